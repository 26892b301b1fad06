"""Sphinx settings of the documentation site: ``make docs`` builds it into build/site."""

from __future__ import annotations

import inspect
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util.nodes import make_refnode
from sphinx.writers.html5 import HTML5Translator

from sepc_torch import __version__

project = "sepc_torch"
author = "the sepc_torch contributors"
version = release = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.doctest",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
autosummary_generate = False  # the pages of api/ list their names; autosummary writes the tables of api/index
viewcode_line_numbers = True
exclude_patterns = ["gallery/README.md"]
# pytest runs the doctests of the modules (--doctest-modules); the builder doctest is for single pages by hand.
doctest_test_doctest_blocks = ""

html_theme = "furo"
smartquotes = False  # would make dashes of the options of commands
html_title = f"sepc_torch {release}"
html_show_sphinx = False
html_show_copyright = False
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
# Styles in which names of modules do not look like links, with a contrast of at least 4.5 in every token.
pygments_style = "a11y-light"
pygments_dark_style = "github-dark"
copybutton_selector = (
    "div.highlight-python pre, div.highlight-default pre, div.highlight-sh pre, div.highlight-none pre"
)
copybutton_prompt_text = r">>> |\.\.\. |\$ "  # examples of docstrings are copied without prompts and output
copybutton_prompt_is_regexp = True

myst_enable_extensions = ["dollarmath", "amsmath", "deflist"]
myst_heading_anchors = 4  # anchors of headings as GitHub makes them, so links work in both places

add_module_names = True
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_type_aliases = {"ArrayLike": "ArrayLike"}  # NumPy spells it out in ten lines
autodoc_class_signature = "mixed"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
napoleon_use_rtype = False
napoleon_use_ivar = True  # attributes as a list: autodoc already describes those of dataclasses


def _mathml(source: str, block: bool = False) -> str:
    r"""MathML of a formula, with what docutils does not know: ``\big``, ``\tfrac12``, and a space after ``\log``."""
    source = re.sub(r"\\([bB]igg?)(?![a-zA-Z])", r"\\\1l", source)
    source = re.sub(r"(\\[td]?frac)(\d)(\d)", r"\1{\2}{\3}", source)
    found = str(tex2mathml(source, as_block=block))
    return found.replace("<mo>&ApplyFunction;</mo>", '<mspace width="0.17em"></mspace>')


def _inline(writer: HTML5Translator, node: nodes.math) -> None:
    writer.body.append(_mathml(node.astext()))
    raise nodes.SkipNode


def _block(writer: HTML5Translator, node: nodes.math_block) -> None:
    writer.body.append(f'<div class="math">{_mathml(node.astext(), block=True)}</div>')
    raise nodes.SkipNode


# Classes that a user makes by fit or load, never by the constructor.
_MADE_OTHERWISE = {
    "sepc_torch.TrustHead",
    "sepc_torch.TrustedModel",
    "sepc_torch.SEPC",
}


def _without_constructor(
    app: Sphinx, what: str, name: str, member: object, options: object, signature: str | None, returns: str | None
) -> tuple[str, str] | None:
    """Leave out the signature of a constructor that nobody calls: ``fit`` and ``load`` follow."""
    return ("", "") if name in _MADE_OTHERWISE else None


def _without_arguments(app: Sphinx, what: str, name: str, member: object, options: object, lines: list[str]) -> None:
    """Leave out the arguments of such a constructor."""
    if name in _MADE_OTHERWISE and "Args:" in lines:
        first = lines.index("Args:")
        last = next((i for i in range(first + 1, len(lines)) if lines[i] and not lines[i].startswith(" ")), len(lines))
        del lines[first:last]


# Methods that torch and Lightning call, or other parts of the package, and those that scikit-learn adds.
_INTERNAL = {"get_extra_state", "set_extra_state", "as_tensor", "require_calibration", "replace_points"}
_HOOK = r"set_\w+_request|on_\w+_(start|end)|on_exception|setup|teardown"


def _left_out(app: Sphinx, what: str, name: str, member: object, skip: bool, options: object) -> bool | None:
    """Leave out fields of named tuples, which their class describes, and methods that other libraries call."""
    field = (getattr(member, "__doc__", None) or "").startswith("Alias for field number")
    return True if field or name in _INTERNAL or re.fullmatch(_HOOK, name) else None


# Pages of other projects, by the names that autodoc finds. Sphinx's intersphinx would read their inventories from the
# network in every build.
_TORCH, _NUMPY = "https://docs.pytorch.org/docs/stable", "https://numpy.org/doc/stable/reference/generated"
_ELSEWHERE = {
    "numpy.dtype": f"{_NUMPY}/numpy.dtype.html",
    "numpy.ndarray": f"{_NUMPY}/numpy.ndarray.html",
    "torch.Tensor": f"{_TORCH}/tensors.html",
    "torch._C.Generator": f"{_TORCH}/generated/torch.Generator.html",
    "torch.device": f"{_TORCH}/tensor_attributes.html#torch.device",
    "torch.dtype": f"{_TORCH}/tensor_attributes.html#torch.dtype",
    "torch.nn.Module.to": f"{_TORCH}/generated/torch.nn.Module.html#torch.nn.Module.to",
    "torch.nn.modules.module.Module": f"{_TORCH}/generated/torch.nn.Module.html",
    "torch.utils.data.dataloader.DataLoader": f"{_TORCH}/data.html#torch.utils.data.DataLoader",
}


def _other_names(
    app: Sphinx, env: BuildEnvironment, node: addnodes.pending_xref, content: nodes.Element
) -> nodes.reference | None:
    """Link names of torch and NumPy to their pages, and a second name of a documented object to its entry."""
    target = node.get("reftarget", "")
    if target in _ELSEWHERE:
        return nodes.reference("", "", content, refuri=_ELSEWHERE[target], internal=False)
    if node.get("refdomain") != "py" or not target.startswith("sepc_torch."):
        return None
    last = f".{target.rpartition('.')[2]}"
    same = [(name, entry) for name, entry in env.domains["py"].data["objects"].items() if name.endswith(last)]
    if len(same) != 1:
        return None
    name, entry = same[0]
    return make_refnode(app.builder, node["refdoc"], entry.docname, entry.node_id, content, name)


def _second_anchors(app: Sphinx, document: nodes.document) -> None:
    """Give an entry of a module the anchor that links from source pages have: viewcode knows one name for a module."""
    taken = {name for node in document.findall(addnodes.desc_signature) for name in node["ids"]}
    for node in document.findall(addnodes.desc_signature):
        if node.get("module", "").startswith("sepc_torch.") and node.get("fullname"):
            other = f"sepc_torch.{node['fullname']}"
            if other not in taken:
                node["ids"].append(other)


# Characters of a cell that stays on one line (a date with its remark), and of one that holds prose (two lines; on a
# phone, more than a line). From so many columns on a table has a smaller type.
_ONE_LINE, _PROSE, _PHONE, _MANY = 40, 100, 35, 7
# A line of a table has room for so many characters; where the columns need more, only short cells stay on one line.
_ROOM, _SHORT = 80, 11


def _cells_on_one_line(app: Sphinx, document: nodes.document, page: str) -> None:
    """Keep names of rows, and numbers such as 1 048 576, sizes and dates, on one line, except in tables with prose."""
    for table in document.findall(nodes.table):
        for text in list(table.findall(nodes.Text)):
            text.parent.replace(text, nodes.Text(re.sub(r"(?<=\d) (?=\d{3}(?!\d))", "\N{NO-BREAK SPACE}", text)))
        cells = list(table.findall(nodes.entry))
        # A command in code is no prose; it may take several lines.
        prose = [
            text
            for cell in cells
            if (text := cell.astext()) not in map(nodes.literal.astext, cell.findall(nodes.literal))
        ]
        columns = len(list(table.findall(nodes.colspec)))
        longest = max(len(cell.astext()) for cell in cells)
        numbers = sum(bool(re.match(r"[-+(<]?\d", cell.astext())) for cell in cells)
        if longest > _PHONE and columns < _MANY and 2 * numbers < len(cells):  # numbers need the heads of their columns
            table["classes"].append("prose")
        if columns >= _MANY:
            table["classes"].append("many-columns")
        if max(map(len, prose)) > _PROSE:
            continue  # the width of the page belongs to the prose
        wanted = sum(
            max(len(cell.astext()) for cell in cells if cell.parent.index(cell) == column) for column in range(columns)
        )
        limit = _SHORT if wanted > _ROOM else _ONE_LINE
        for cell in cells:
            text, first = cell.astext(), cell.parent.index(cell) == 0
            if len(text) <= limit and (first or re.search(r"\d", text)):
                cell["classes"].append("one-line")


def _sample_report(app: Sphinx, error: Exception | None) -> None:
    """Write the sample of a trust report, to which docs/report.md links, beside the pages."""
    if error is None and app.builder.format == "html":
        sample = runpy.run_path(str(Path(app.srcdir) / "pictures" / "report.py"))
        sample["write_sample"](Path(app.outdir) / "sample_report.html")


def _commands(app: Sphinx, page: str, source: list[str]) -> None:
    """Write the reference of the command line from the program."""
    if page == "command_line":
        import typer

        from sepc_torch.cli import app as sepc

        group = typer.main.get_command(sepc)
        text = "\n".join(_command_text(group, group.make_context("sepc", [], resilient_parsing=True)))
        source[0] = source[0].replace("<!-- commands -->", text)


def _command_text(group: Any, context: Any) -> Iterator[str]:
    """The commands of a group in Markdown: usage, what each does, arguments and options."""
    for listed in group.list_commands(context):
        command = group.resolve_command(context, [listed])[1]
        inner = type(context)(command, info_name=listed, parent=context)
        if hasattr(command, "list_commands"):
            yield from _command_text(command, inner)
            continue
        records = [parameter.get_help_record(inner) for parameter in command.get_params(inner)]
        arguments = [name.partition(" ")[0] for name, _ in records if not name.startswith("-")]
        yield f"## {inner.command_path}\n\n{inspect.cleandoc(command.help)}\n"
        yield f"```none\n{' '.join([inner.command_path, *arguments, '[OPTIONS]'])}\n```\n"
        yield from (f"`{name}`\n: {help}\n" for name, help in records if "--help" not in name)


def setup(app: Sphinx) -> None:
    """Write formulas as MathML, which browsers show without scripts and without a connection; add the sample report."""
    app.connect("source-read", _commands)
    app.connect("autodoc-process-signature", _without_constructor)
    app.connect("autodoc-process-docstring", _without_arguments, priority=400)  # before napoleon
    app.connect("missing-reference", _other_names)
    app.connect("doctree-read", _second_anchors)
    app.connect("doctree-resolved", _cells_on_one_line)
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
    app.connect("autodoc-skip-member", _left_out)
    app.connect("build-finished", _sample_report)


html_math_renderer = "mathml"

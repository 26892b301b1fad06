"""Sphinx settings of the documentation site: ``make docs`` builds it into build/site."""

from __future__ import annotations

import re

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator

from sepc_torch import __version__

project = "sepc_torch"
author = "the sepc_torch contributors"
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.doctest", "sphinx.ext.napoleon"]
exclude_patterns = ["gallery/README.md"]
# pytest runs the doctests of the modules (--doctest-modules); the builder doctest is for single pages by hand.
doctest_test_doctest_blocks = ""

html_theme = "furo"
html_title = f"sepc_torch {release}"
html_show_sphinx = False
html_show_copyright = False
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["site.css"]

myst_enable_extensions = ["dollarmath", "amsmath"]
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


def _left_out(app: Sphinx, what: str, name: str, member: object, skip: bool, options: object) -> bool | None:
    """Leave out fields of named tuples, which their class describes, and the methods that scikit-learn adds."""
    field = (getattr(member, "__doc__", None) or "").startswith("Alias for field number")
    return True if field or re.fullmatch(r"set_\w+_request", name) else None


# Characters of a cell that stays on one line (a date with its remark), and of one that holds prose (two lines).
_ONE_LINE, _PROSE = 40, 100


def _cells_on_one_line(app: Sphinx, document: nodes.document, page: str) -> None:
    """Keep names of rows, and numbers such as 1 048 576, sizes and dates, on one line, except in tables with prose."""
    for table in document.findall(nodes.table):
        cells = list(table.findall(nodes.entry))
        # A command in code is no prose; it may take several lines.
        prose = [
            text
            for cell in cells
            if (text := cell.astext()) not in map(nodes.literal.astext, cell.findall(nodes.literal))
        ]
        if max(map(len, prose)) > _PROSE:
            continue  # the width of the page belongs to the prose
        for cell in cells:
            text, first = cell.astext(), cell.parent.index(cell) == 0
            if len(text) <= _ONE_LINE and (first or re.search(r"\d", text)):
                cell["classes"].append("one-line")


def setup(app: Sphinx) -> None:
    """Write formulas as MathML, which browsers show without scripts and without a connection."""
    app.connect("doctree-resolved", _cells_on_one_line)
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
    app.connect("autodoc-skip-member", _left_out)


html_math_renderer = "mathml"

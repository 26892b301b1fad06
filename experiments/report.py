"""Write the generated sections of README.md and docs/ from the JSON files in experiments/results.

python experiments/report.py            # rewrite the sections between their markers
python experiments/report.py --check    # exit with 1 if a section does not show the stored numbers

Every section ends with the date, the command and the sources of its measurement. A section is marked "on older
sources" if the package or the script differed from the measured one when the page was written. ``--check`` ignores
this mark, so that an edit of the package alone does not fail it, and prints which results are older now.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from evidence_tables import evidence_kinds
from gpu_tables import gpu
from harness import FIGURES, RESULTS, SOURCES
from head_tables import head_speed
from markdown_tables import load, table
from novelty_tables import label_errors, novelties
from panel_tables import chosen_without, defaults, panel, summary
from paper_tables import PAPER, agreements, figures, peers, reproductions, side_by_side
from promise_tables import drift, group_promises
from provenance import Files, older, stamps
from readme_table import overview
from serving_tables import engines, onnx_files, onnx_gpu, serve_load
from tables import (
    active,
    files,
    inference,
    large_fits,
    layers,
    many_classes,
    monitor_cost,
    nearest,
    partitions,
    refits,
    solvers,
)

ROOT = RESULTS.parents[1]
OLDER = ", on older sources"


class Section(NamedTuple):
    """A generated section: the function that writes it, and the results that it shows."""

    write: Callable[[], str]
    results: tuple[str, ...]

    def text(self) -> str:
        return f"{self.write()}\n\n{measured_on({name: load(name) for name in self.results}, SOURCES)}"


def measured_on(results: dict[str, dict[str, Any]], files: Files) -> str:
    """One line for every stamp: date, command and sources, and whether the sources have changed.

    Args:
        results: Stored results by name.
        files: The present sources.
    """
    lines = [_line(names, stamp, files) for names, stamp in _by_stamp(results)]
    return "\n".join(lines if len(lines) == 1 else [f"- {line}" for line in lines])


def _by_stamp(results: dict[str, dict[str, Any]]) -> list[tuple[list[str], dict[str, Any]]]:
    """Every stamp with the parts that share it; a result without parts has one unnamed part."""
    found: list[tuple[list[str], dict[str, Any]]] = []
    for result in results.values():
        groups: list[tuple[list[str], dict[str, Any]]] = []
        for part, stamp in stamps(result).items():
            same = next((names for names, other in groups if other == stamp), None)
            if same is None:
                groups.append(([part], stamp))
            else:
                same.append(part)
        found += groups
    return found


def _line(parts: list[str], stamp: dict[str, Any], files: Files) -> str:
    named = f"{'Parts' if len(parts) > 1 else 'Part'} {', '.join(parts)}: measured"
    what = named if parts != [""] else "Measured"
    age = OLDER if older(stamp, files) else ""
    return f"{what} {_date(stamp)} with `{stamp['command']}`{age} ({_sources(stamp)})."


def _date(stamp: dict[str, Any]) -> str:
    """The day of the measurement; a stamp from version control knows only the day of the commit."""
    return ("not after " if "stamped" in stamp else "") + str(stamp["date"])[:10]


def _sources(stamp: dict[str, Any]) -> str:
    return ", ".join(f"{name} `{value}`" for name, value in stamp["sources"].items())


def all_results() -> dict[str, dict[str, Any]]:
    """Every stored result by name."""
    return {path.stem: load(path.stem) for path in sorted(RESULTS.glob("*.json"))}


def provenance_table(results: dict[str, dict[str, Any]], files: Files) -> str:
    """The command, date and sources of every stored result."""
    rows = [
        [
            f"`{name}.json`" + (f": {', '.join(parts)}" if parts != [""] else ""),
            f"{_date(stamp)}{OLDER if older(stamp, files) else ''}",
            f"`{stamp['command']}`",
            *(f"`{value}`" for value in stamp["sources"].values()),
        ]
        for name, result in results.items()
        for parts, stamp in _by_stamp({name: result})
    ]
    return table(["result", "measured", "command", "package", "script"], rows)


def ages(results: dict[str, dict[str, Any]], files: Files) -> str:
    """A sentence that names the results with a part that was measured on older sources."""
    old = [name for name, result in results.items() if any(older(stamp, files) for stamp in stamps(result).values())]
    named = f": {', '.join(old)}" if old else ""
    return f"{len(old)} of {len(results)} results were measured on older sources{named}"


def rewritten(text: str, sections: dict[str, Callable[[], str]]) -> str:
    """The text with the sections between their markers written afresh."""
    for name, write in sections.items():
        start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        if start not in text or end not in text:
            raise ValueError(
                f"The section {name!r} needs the markers {start.strip()} and {end}, each on a line of its own."
            )
        head, _, rest = text.partition(start)
        _, _, tail = rest.partition(end)
        text = f"{head}{start}\n{write()}\n\n{end}{tail}"
    return text


def same_numbers(before: str, after: str) -> bool:
    """Whether two texts of a page differ at most in the marks of older sources."""
    return before.replace(OLDER, "") == after.replace(OLDER, "")


PAPER_PAGE = ROOT / "docs" / "paper.md"
PAGES: dict[str, dict[str, Section]] = {
    "docs/lightning.md": {"monitor_cost": Section(monitor_cost, ("lightning_digits",))},
    "docs/panel.md": {
        "summary": Section(summary, ("trust_panel",)),
        "panel": Section(panel, ("trust_panel",)),
        "chosen_without": Section(chosen_without, ("leave_one_out",)),
        "evidence_kinds": Section(evidence_kinds, ("evidence_kinds",)),
        "defaults": Section(defaults, ("head_defaults",)),
    },
    "docs/speed.md": {
        "inference": Section(inference, ("bench_inference",)),
        "head": Section(head_speed, ("bench_head",)),
        "gpu": Section(gpu, ("bench_gpu",)),
        "partitions": Section(partitions, ("bench_partition",)),
        "many-classes": Section(many_classes, ("bench_classes",)),
    },
    "docs/large_fits.md": {
        "large_fits": Section(large_fits, ("large_fits",)),
        "files": Section(files, ("bench_files",)),
    },
    "docs/solvers.md": {
        "solvers": Section(solvers, ("bench_solvers",)),
        "layers": Section(layers, ("bench_layers", "bench_layers_gpu")),
        "refits": Section(refits, ("refit_moons", "refit_embeddings")),
    },
    "docs/promises.md": {
        "group_promises": Section(group_promises, ("group_promises",)),
        "drift": Section(drift, ("drift",)),
    },
    "docs/serving.md": {
        "engines": Section(engines, ("engines",)),
        "onnx_files": Section(onnx_files, ("onnx_files",)),
        "onnx_gpu": Section(onnx_gpu, ("onnx_gpu",)),
        "serve_load": Section(serve_load, ("serve_load",)),
    },
    "docs/novelties.md": {"novelties": Section(novelties, ("novelties",))},
    "docs/label_errors.md": {"label_errors": Section(label_errors, ("label_errors",))},
    "docs/active_learning.md": {"active": Section(active, ("active_learning",))},
    "docs/paper.md": {
        "paper": Section(lambda: side_by_side(reproductions()), PAPER),
        "agreements": Section(lambda: agreements(reproductions()), ("overlapping", "toy_sets", "wdbc", "iris")),
        "peers": Section(peers, ("peers",)),
        "nearest": Section(nearest, ("nearest",)),
    },
}
# Generated sections without a line on each measurement: README.md links docs/results.md, which has all of them.
PLAIN: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"overview": overview},
    "docs/paper.md": {"figures": lambda: figures(reproductions(), FIGURES, PAPER_PAGE)},
    "docs/results.md": {"results": lambda: provenance_table(all_results(), SOURCES)},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit with 1 if a page does not show the stored numbers")
    options = parser.parse_args()
    stale = []
    for page in dict.fromkeys([*PAGES, *PLAIN]):
        path = ROOT / page
        sections = {name: section.text for name, section in PAGES.get(page, {}).items()} | PLAIN.get(page, {})
        before = path.read_text()
        after = rewritten(before, sections)
        if not options.check:
            path.write_text(after)
            print(f"{page} {'rewritten' if after != before else 'is up to date'}")
        elif not same_numbers(before, after):
            stale.append(page)
        elif after != before:
            print(f'{page}: the marks "{OLDER.strip(", ")}" are out of date; python experiments/report.py renews them')
    print(ages(all_results(), SOURCES))
    if stale:
        sys.exit(f"{' and '.join(stale)} out of date: run python experiments/report.py")


if __name__ == "__main__":
    main()

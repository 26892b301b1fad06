"""Write the tables of both READMEs from the JSON files in experiments/results, so that no number is typed by hand.

python experiments/report.py            # rewrite what stands between the markers
python experiments/report.py --check    # only say whether they are up to date

Scripts that reproduce the paper store ``rows`` (artefact, paper, ours, why) and, where they draw, ``figures`` (name and
caption); the tables show them as they are.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from harness import FIGURES, RESULTS
from markdown_tables import load, table
from tables import SECTIONS

README = RESULTS.parents[1] / "README.md"
EXPERIMENTS = RESULTS.parent / "README.md"
# What reproduces the paper, in the order of the paper.
PAPER = ("overlapping", "toy_sets", "adult", "wdbc", "vertebral", "iris", "peers", "complexity")


def reproductions() -> dict[str, dict[str, Any]]:
    """The results of the scripts in ``PAPER`` that have been run."""
    return {name: load(name) for name in PAPER if (RESULTS / f"{name}.json").exists()}


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def side_by_side(results: dict[str, dict[str, Any]]) -> str:
    """Every result of the paper beside ours; where they differ, by how much and why."""
    rows = [
        [cell(row["artefact"]), f"`{found['command']}`", cell(row["paper"]), cell(_with_reason(row))]
        for found in results.values()
        for row in found["rows"]
    ]
    return table(["artefact", "command", "paper", "ours"], rows)


def _with_reason(row: dict[str, str]) -> str:
    return f"{row['ours']}. *{row['why']}*" if row["why"] else row["ours"]


def in_short(results: dict[str, dict[str, Any]]) -> str:
    rows = [
        [cell(row["artefact"]), cell(row["paper"]), cell(row["ours"])]
        for found in results.values()
        for row in found["rows"]
    ]
    return table(["artefact", "paper", "ours"], rows)


def figures(results: dict[str, dict[str, Any]], folder: Path) -> str:
    """Every picture under its caption."""
    parts = []
    for script, found in results.items():
        captions: dict[str, str] = found.get("figures") or _found_on_disk(script, folder)
        for name, caption in captions.items():
            link = f"[SVG]({folder.name}/{name}.svg)"
            parts.append(f"{caption} (`{found['command']}`, {link})\n\n![{caption}]({folder.name}/{name}.png)")
    return "\n\n".join(parts)


def _found_on_disk(script: str, folder: Path) -> dict[str, str]:
    """Pictures named after their script, each with what the script says it does."""
    text = ast.get_docstring(ast.parse((RESULTS.parent / f"{script}.py").read_text())) or script
    return {path.stem: text.splitlines()[0] for path in sorted(folder.glob(f"{script}*.png"))}


def agreements(results: dict[str, dict[str, Any]]) -> str:
    """Every comparison of two solvers that the scripts have stored."""
    rows = [
        [
            f"`{script}.py`",
            ", ".join(where),
            " and ".join(found["solvers"]),
            str(found["ellipsoids"][0]),
            "yes" if found["same"] else "no",
            "" if found["log_volume_difference"] is None else f"{found['log_volume_difference']:.0e}",
        ]
        for script, result in results.items()
        for where, found in _comparisons(result, ())
    ]
    return table(["script", "set", "solvers", "ellipsoids", "the same", "log-volumes differ by"], rows)


def peers() -> str:
    """Every classifier on every set; the best of a column in bold."""
    sets = load("peers")["sets"]
    parts = []
    for measure, title, best in (
        ("accuracy", "accuracy", max),
        ("aurc", "AURC of its own confidence (less is better)", min),
        ("accuracy_80", "accuracy at 80 % coverage", max),
    ):
        names = list(next(iter(sets.values())))
        winners = {data: best(found[name][measure] for name in names) for data, found in sets.items()}
        rows = []
        for name in names:
            shown = [
                f"**{found[name][measure]:.3f}**"
                if found[name][measure] == winners[data]
                else f"{found[name][measure]:.3f}"
                for data, found in sets.items()
            ]
            rows.append([name, *shown])
        parts.append(table([title, *sets], rows))
    return "\n\n".join(parts)


def _comparisons(value: Any, where: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    if isinstance(value, dict):
        if "log_volume_difference" in value:
            yield where, value
        for name, inner in value.items():
            yield from _comparisons(inner, where if name in ("agreement", "features") else (*where, name))


def rewritten(text: str, sections: dict[str, Callable[[], str]]) -> str:
    """The text with each section between its markers written afresh."""
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


DOCUMENTS: dict[Path, dict[str, Callable[[], str]]] = {
    README: {
        "paper": lambda: in_short(reproductions()),
        **SECTIONS,
    },
    EXPERIMENTS: {
        "paper": lambda: side_by_side(reproductions()),
        "agreements": lambda: agreements(reproductions()),
        "peers": peers,
        "figures": lambda: figures(reproductions(), FIGURES),
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit with 1 if a README is not up to date")
    options = parser.parse_args()
    stale = []
    for path, sections in DOCUMENTS.items():
        before = path.read_text()
        after = rewritten(before, sections)
        name = path.relative_to(README.parent)
        if after != before:
            stale.append(str(name))
        if not options.check:
            path.write_text(after)
            print(f"{name} {'rewritten' if after != before else 'is up to date'}")
    if options.check and stale:
        sys.exit(f"{' and '.join(stale)} out of date: run python experiments/report.py")


if __name__ == "__main__":
    main()

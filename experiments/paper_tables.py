"""Tables and pictures of the paper's experiments, from the JSON of the scripts that reproduce them.

These scripts store ``rows`` (artefact, paper, ours, why) and, where they draw, ``figures`` (name and caption).
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness import RESULTS
from markdown_tables import load, table

# The scripts that reproduce the paper, in the order of the paper.
PAPER = ("overlapping", "toy_sets", "adult", "wdbc", "vertebral", "iris", "peers", "complexity")


def reproductions() -> dict[str, dict[str, Any]]:
    """The stored results of the scripts in ``PAPER``."""
    return {name: load(name) for name in PAPER if (RESULTS / f"{name}.json").exists()}


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def side_by_side(results: dict[str, dict[str, Any]]) -> str:
    """Every result of the paper beside ours, with the difference and its reason."""
    rows = [
        [cell(row["artefact"]), f"`{script}.py`", cell(row["paper"]), cell(_with_reason(row))]
        for script, found in results.items()
        for row in found["rows"]
    ]
    return table(["artefact", "script", "paper", "ours"], rows)


def _with_reason(row: dict[str, str]) -> str:
    return f"{row['ours']}. *{row['why']}*" if row["why"] else row["ours"]


def figures(results: dict[str, dict[str, Any]], folder: Path, page: Path) -> str:
    """Every picture under its caption.

    Args:
        results: The stored results by script.
        folder: The folder of the pictures.
        page: The page that shows them; links are relative to it.
    """
    link = Path(os.path.relpath(folder, page.parent)).as_posix()
    parts = []
    for script, found in results.items():
        captions: dict[str, str] = found.get("figures") or _found_on_disk(script, folder)
        for name, caption in captions.items():
            parts.append(f"{caption} (`{script}.py`, [SVG]({link}/{name}.svg))\n\n![{caption}]({link}/{name}.png)")
    return "\n\n".join(parts)


def _found_on_disk(script: str, folder: Path) -> dict[str, str]:
    """Pictures named after their script, with the first line of the script's docstring as caption."""
    text = ast.get_docstring(ast.parse((RESULTS.parent / f"{script}.py").read_text())) or script
    return {path.stem: text.splitlines()[0] for path in sorted(folder.glob(f"{script}*.png"))}


def agreements(results: dict[str, dict[str, Any]]) -> str:
    """Every stored comparison of two solvers."""
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

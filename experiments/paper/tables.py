"""Tables and pictures of docs/paper.md.

The scripts that reproduce the paper store ``rows`` (artefact, paper, ours, why) and, where they draw, ``figures`` (name
and caption).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from experiments.table_writer import Column, Row, table

# The scripts that reproduce the paper, in the order of the paper, and those that compare two solvers.
PAPER = ("overlapping", "toy_sets", "adult", "wdbc", "vertebral", "iris", "peers", "complexity")
COMPARING = ("overlapping", "toy_sets", "wdbc", "iris")


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def side_by_side(results: dict[str, Row]) -> str:
    """Every result of the paper beside ours, with the difference and its reason."""
    columns: list[Column] = [
        ("artefact", lambda r: cell(r["artefact"])),
        ("script", "script", "`{}.py`"),
        ("paper", lambda r: cell(r["paper"])),
        ("ours", lambda r: cell(f"{r['ours']}. *{r['why']}*" if r["why"] else r["ours"])),
    ]
    return table([{"script": script, **row} for script, found in results.items() for row in found["rows"]], columns)


def figures(results: dict[str, Row], folder: Path, page: Path) -> str:
    """Every picture in a folder under its caption; links are relative to the page."""
    link = Path(os.path.relpath(folder, page.parent)).as_posix()
    return "\n\n".join(
        f"{caption} (`{script}.py`)\n\n![{caption}]({link}/{name}.png)"
        for script, found in results.items()
        for name, caption in found.get("figures", {}).items()
    )


def agreements(results: dict[str, Row]) -> str:
    """Every stored comparison of two solvers."""
    columns: list[Column] = [
        ("script", "script", "`{}.py`"),
        ("set", "where"),
        ("solvers", lambda r: " and ".join(r["solvers"])),
        ("ellipsoids", lambda r: r["ellipsoids"][0]),
        ("the same", lambda r: "yes" if r["same"] else "no"),
        ("log-volumes differ by", "log_volume_difference", "{:.0e}"),
    ]
    rows = [
        {"script": script, "where": ", ".join(where), **found}
        for script, result in results.items()
        for where, found in _comparisons(result, ())
    ]
    return table(rows, columns)


def _comparisons(value: Any, where: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Row]]:
    if isinstance(value, dict):
        if "log_volume_difference" in value:
            yield where, value
        for name, inner in value.items():
            yield from _comparisons(inner, where if name in ("agreement", "features") else (*where, name))


def peers(results: Row) -> str:
    """Every classifier on every set; the best of a column in bold."""
    sets, parts = results["sets"], []
    for measure, title, best in (
        ("accuracy", "accuracy", max),
        ("aurc", "AURC of its own confidence (less is better)", min),
        ("accuracy_80", "accuracy at 80 % coverage", max),
    ):

        def shown(name: str, data: str, measure: str = measure, best: Any = best) -> str:
            value = sets[data][name][measure]
            mark = "**" if value == best(found[measure] for found in sets[data].values()) else ""
            return f"{mark}{value:.3f}{mark}"

        columns: list[Column] = [(title, str), *((data, lambda n, d=data, shown=shown: shown(n, d)) for data in sets)]
        parts.append(table(next(iter(sets.values())), columns))
    return "\n\n".join(parts)


def nearest(results: Row) -> str:
    columns: list[Column] = [
        ("10 folds", "name"),
        ("outside", "mahalanobis.share_outside", "{:.0%}"),
        ("Mahalanobis", "mahalanobis.accuracy", "{:.1%}"),
        ("Euclidean", "euclidean.accuracy", "{:.1%}"),
        ("outside: Mahalanobis", "mahalanobis.accuracy_outside", "{:.1%}"),
        ("outside: Euclidean", "euclidean.accuracy_outside", "{:.1%}"),
    ]
    mean = [f"{results['mean_accuracy'][kind]:.1%}" for kind in ("mahalanobis", "euclidean")]
    rows = [{"name": name, **found} for name, found in results["sets"].items()]
    shown = table(rows, columns, ["mean", "", *mean, "", ""])
    return f"Accuracy by the distance that defines the nearest ellipsoid:\n\n{shown}"

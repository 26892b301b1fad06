"""Table of strangeness with one kind of nonconformity more, replaced or fewer, from its JSON."""

from __future__ import annotations

from typing import Any

from markdown_tables import load, table

# A change of the mean counts as clear beyond this number of standard errors.
CLEAR = 2.0
# Least difference of a worst gap that the text names: smaller ones do not show in the panel's table.
VISIBLE = 0.01


def evidence_kinds() -> str:
    """Changes of AUROC by variant, the distance behind the best single scores, and what follows."""
    results = load("evidence_kinds")
    rows, sets = results["rows"], results["sets"]
    near = sum(row["near"] for row in sets)
    header = [
        "kinds",
        f"{near} near sets",
        f"{len(sets) - near} far sets",
        f"all {len(sets)} sets",
        "behind the best score: mean",
        "worst",
        "networks with a gain",
        "largest gain",
        "largest loss",
    ]
    return "\n\n".join(
        [
            f"Change of AUROC against the head, mean ± standard error over sets; every set is a mean of "
            f"{len(results['seeds'])} seeds:",
            table(header, [_line(row, row["variant"] == results["head"]) for row in rows]),
            verdict(rows),
        ]
    )


def verdict(rows: list[dict[str, Any]]) -> str:
    """Which variants are clearly better or worse than the head, and which have a smaller worst gap.

    Args:
        rows: The rows of ``evidence_kinds.compare``; the head is the first.
    """
    head, *others = rows
    above = [row for row in others if _errors_of_change(row) > CLEAR]
    below = [row for row in others if _errors_of_change(row) < -CLEAR]
    smaller = [row for row in others if row["worst"]["value"] < head["worst"]["value"] - VISIBLE]
    higher = [row for row in others if row not in above and row["change"]["all"][0] > 0]
    return "\n".join(
        [
            f"- Mean AUROC more than {CLEAR:g} standard errors above the head's: {_named(above)}.",
            f"- Above it, but within {CLEAR:g} standard errors: {_named(higher, _change)}.",
            f"- More than {CLEAR:g} standard errors below it: {_named(below)}.",
            f"- Worst gap smaller by more than {VISIBLE:g}: {_named(smaller, _worst_and_change)}; "
            f"the head has {head['worst']['value']:.3f}.",
        ]
    )


def _errors_of_change(row: dict[str, Any]) -> float:
    """The mean change over all sets in units of its standard error."""
    mean, error = row["change"]["all"]
    return float(mean / error) if error else 0.0


def _named(rows: list[dict[str, Any]], more: Any = None) -> str:
    return ", ".join(row["variant"] + ("" if more is None else f" ({more(row)})") for row in rows) or "none"


def _change(row: dict[str, Any]) -> str:
    return _with_error(row["change"]["all"])


def _worst_and_change(row: dict[str, Any]) -> str:
    return f"{row['worst']['value']:.3f}, mean change {_change(row)}"


def _line(row: dict[str, Any], head: bool) -> list[str]:
    behind = [f"{row['gap']:.4f}", f"{row['worst']['value']:.3f} {_place(row['worst'])}"]
    if head:
        return [row["variant"], "", "", "", *behind, "", "", ""]
    return [
        row["variant"],
        *(_with_error(row["change"][kind]) for kind in ("near", "far", "all")),
        *behind,
        f"{row['better']} of {row['networks']}",
        *(f"{row[kind]['value']:+.3f} {_place(row[kind])}" for kind in ("gain", "loss")),
    ]


def _with_error(change: list[float]) -> str:
    mean, error = change
    return f"{mean:+.4f} ± {error:.4f}"


def _place(place: dict[str, Any]) -> str:
    return f"{place['set']}: {place['unknowns']}"

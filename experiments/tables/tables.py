"""Tables of docs/tables.md: accepted shares, and wrong labels that are found, on ten real tables."""

from __future__ import annotations

from experiments.table_writer import Column, Row, mean, spaced, table

_RULES = {"head": "`TrustClassifier`", "search": "exact search", "mapie": "MAPIE"}


def accepted(results: Row) -> str:
    """Accepted shares of every rule at every risk, and how they differ."""
    found = results["parts"]["accepted"]
    rows, risks = found["rows"], [str(risk) for risk in found["risks"]]
    rules = [name for name in _RULES if name in rows[0][risks[0]]]
    columns: list[Column] = [
        ("table", "table"),
        ("rows: train, calibrate", lambda r: f"{spaced(r['train'])}, {spaced(r['calibration'])}"),
        ("accuracy", "accuracy", "{:.1%}"),
        *((f"{float(risk):.0%}", lambda r, risk=risk: _cell(r[risk], rules)) for risk in risks),
    ]
    means = [
        " / ".join(f"{mean(100 * r[risk][rule]['accepted'] for r in rows):.1f}" for rule in rules) for risk in risks
    ]
    shown = table(rows, columns, ["mean", "", "", *means])
    gaps = {
        (r["table"], risk): r[risk]["head"]["accepted"] - r[risk]["search"]["accepted"] for r in rows for risk in risks
    }
    lower = sorted((gap, name, float(risk)) for (name, risk), gap in gaps.items() if gap < -0.01)
    listed = ", ".join(f"{name} at {risk:.0%} ({100 * gap:+.1f})" for gap, name, risk in lower) or "none"
    higher = sum(gap > 0.01 for gap in gaps.values())
    broken = {
        rule: max(r[risk][rule]["broken"] for r in rows for risk in risks) / found["draws"]
        for rule in ("head", "search")
    }
    return (
        f"Accepted share of the rows in percent, by {' / '.join(_RULES[rule] for rule in rules)}, at each risk; means "
        f"over {found['draws']} calibrations, delta {found['delta']:g}:\n\n{shown}\n\n"
        f"`TrustClassifier` minus the exact search: {100 * mean(gaps.values()):+.1f} points in the mean, more than a "
        f"point above in {higher} of {len(gaps)} cells, more than a point below in {len(lower)}: {listed}. The error "
        f"of the rows that are left is above the risk in at most {broken['head']:.0%} of the calibrations of a cell "
        f"({broken['search']:.0%} with the exact search); these rows are a sample too."
    )


def _cell(row: Row, rules: list[str]) -> str:
    shares = [100 * row[rule]["accepted"] for rule in rules]
    return " / ".join(f"{share:.0f}" for share in shares)


def labels(results: Row) -> str:
    """Average precision of flipped labels."""
    found = results["parts"]["labels"]
    rows = found["rows"]
    columns: list[Column] = [
        ("table", "table"),
        ("`suspicious_labels`", "ours", "{:.3f}"),
        ("cleanlab", "cleanlab", "{:.3f}"),
        ("difference", lambda r: f"{r['ours'] - r['cleanlab']:+.3f} ± {r['se']:.3f}"),
    ]
    shown = table(rows, columns, ["mean", *(f"{mean(r[name] for r in rows):.3f}" for name in ("ours", "cleanlab")), ""])
    better = sum(r["ours"] >= r["cleanlab"] for r in rows)
    return (
        f"Average precision of the flipped rows, {found['flipped']:.0%} of the labels, means over {found['splits']} "
        f"splits with the standard error of the difference. `suspicious_labels` is at least as good on {better} of "
        f"{len(rows)} tables:\n\n{shown}"
    )

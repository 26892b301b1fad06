"""Tables of novelties and label errors, each from the JSON of its script."""

from __future__ import annotations

from typing import Any

import numpy as np
from markdown_tables import load, table


def novelties() -> str:
    """False discovery rate and power, simulated and on the networks of the panel."""
    results = load("novelties")
    bound = results["fdr"] * (1 - results["novel"] / results["batch"])
    simulated = [
        [str(r["points"]), f"{r['fdr']:.3f} ± {r['error']:.3f}", f"{r['power']:.2f}", str(r["least"])]
        for r in results["simulated"]
    ]
    panel = [
        [r["set"], f"{r['unknowns']} ({r['kind']})", str(r["points"]), _rate(r), f"{r['power']:.2f}"]
        for r in results["panel"]
    ]
    mean = float(np.mean([r["fdr"] for r in results["panel"]]))
    return "\n\n".join(
        [
            f"Batches of {results['batch']} samples, {results['novel']} of them novel, fdr={results['fdr']:g}: the "
            f"bound of the rate is {bound:.3f}. Simulation, {results['draws']} draws of normal scores, the novel ones "
            f"shifted by {results['shift']:g}:",
            table(["ranked points", "false discovery rate", "power", "least number of novelties"], simulated),
            f"Networks of the panel, {results['resplits']} calibrations on random known rows with {results['batches']} "
            f"batches each; the mean rate over all groups is {mean:.3f}:",
            table(["network", "unknowns", "ranked points", "false discovery rate", "power"], panel),
        ]
    )


def _rate(row: dict[str, Any]) -> str:
    return f"{row['fdr']:.3f} ± {row['error']:.3f}"


def label_errors() -> str:
    """Average precision of the rows with a flipped label, and the discoveries at the false discovery rate."""
    results = load("label_errors")
    runs = [run for part in results["parts"].values() for run in part]
    rows, reached = [], 0
    for run in runs:
        precision = run["precision"]
        best = max(value for name, value in precision.items() if name.startswith("cleanlab"))
        reached += precision["SEP-C with logits"] >= best
        rows.append(
            [
                run["set"],
                f"{run['kind']}, {run['share']:.0%}",
                *(f"{precision[f'cleanlab, {model}']:.3f}" for model in ("logistic", "neighbours")),
                *(f"{precision[name]:.3f}" for name in ("SEP-C", "SEP-C with logits")),
                f"{run['estimated']:.1%}",
                f"{run['found']}, {run['false']:.0%}",
                f"{run['hit']:.0%}",
            ]
        )
    header = ["set", "flipped", "cleanlab, logistic", "cleanlab, neighbours", "SEP-C", "SEP-C with logits"]
    header += ["estimated share", f"found at fdr={results['fdr']:g}, false", "of the flipped"]
    alone = sum(
        run["precision"]["SEP-C"] >= max(v for k, v in run["precision"].items() if k.startswith("cleanlab"))
        for run in runs
    )
    return (
        f"Average precision of the flipped rows. With logits, `suspicious_labels` is at least as good as the better of "
        f"the two rankings of cleanlab in {reached} of {len(rows)} cases; without logits in {alone}.\n\n"
        f"{table(header, rows)}"
    )

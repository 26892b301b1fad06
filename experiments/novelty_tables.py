"""Tables of novelties and label errors, each from the JSON of its script."""

from __future__ import annotations

from typing import Any

import numpy as np
from markdown_tables import load, table


def novelties() -> str:
    """False discovery rate and power, simulated and on the networks of the panel."""
    results = load("novelties")
    simulated = [
        [str(r["points"]), f"{r['fdr']:.3f} ± {r['error']:.3f}", f"{r['power']:.2f}", str(r["least"])]
        for r in results["simulated"]
    ]
    found = {(r["set"], r["unknowns"], r["novel"]): r for r in results["panel"]}
    panel = []
    for few in (r for r in results["panel"] if r["novel"] == results["novel"]):
        many = found[few["set"], few["unknowns"], results["many"]]
        panel.append(
            [
                few["set"],
                f"{few['unknowns']} ({few['kind']})",
                f"{few['auroc']:.3f}",
                f"{few['beyond']:.0%}",
                *(text for r in (few, many) for text in (_rate(r), f"{r['power']:.2f}", f"{r['plain_power']:.2f}")),
            ]
        )
    mean = float(np.mean([r["fdr"] for r in results["panel"]]))
    header = ["network", "unknowns", "AUROC", f"beyond {1 - results['far']:.0%}"]
    for count in (results["novel"], results["many"]):
        header += [f"{count} novel: rate", "power", "without estimate"]
    return "\n\n".join(
        [
            f"Batches of {results['batch']} samples, fdr={results['fdr']:g}. Simulation, {results['draws']} draws of "
            f"normal scores, {results['novel']} novel ones shifted by {results['shift']:g}:",
            table(["ranked points", "false discovery rate", "power", "least number of novelties"], simulated),
            f"Networks of the panel, {results['resplits']} calibrations with {results['panel'][0]['points']} ranked "
            f"points on random known rows, {results['batches']} batches each; the mean rate over all groups is "
            f"{mean:.3f}. *Beyond*: share of the unknowns that are stranger than this share of known rows. *Without "
            "estimate*: power of Benjamini and Hochberg's procedure alone:",
            table(header, panel),
        ]
    )


def _rate(row: dict[str, Any]) -> str:
    return f"{row['fdr']:.3f} ± {row['error']:.3f}"


def label_errors() -> str:
    """Average precision of the rows with a flipped label, and the discoveries at the false discovery rate."""
    results = load("label_errors")
    runs = [run for part in results["parts"].values() for run in part]
    others = list(dict.fromkeys(name for run in runs for name in run["precision"] if not name.startswith("SEP-C")))
    reached = {"SEP-C": 0, "SEP-C with logits": 0}
    rows = []
    for run in runs:
        precision = run["precision"]
        best = max(precision[name] for name in others if name in precision)
        for name in reached:
            reached[name] += precision[name] >= best
        rows.append(
            [
                run["set"],
                f"{run['kind']}, {run['share']:.0%}",
                *(f"{precision[name]:.3f}" if name in precision else "" for name in (*others, *reached)),
                f"{run['estimated']:.1%}",
                f"{run['found']}, {run['false']:.0%}",
                f"{run['hit']:.0%}",
            ]
        )
    header = ["set", "flipped", *others, *reached, "estimated share", f"found at fdr={results['fdr']:g}, false"]
    return (
        f"Average precision of the flipped rows. `suspicious_labels` is at least as good as the best of the "
        f"{len(others)} rankings of cleanlab in {reached['SEP-C with logits']} of {len(rows)} cases with logits, and "
        f"in {reached['SEP-C']} without.\n\n{table([*header, 'of the flipped'], rows)}"
    )

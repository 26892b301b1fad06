"""Nearest ellipsoid of a point outside all of them: Mahalanobis against Euclidean distance.

The paper measures Euclidean distance to the surface, a convex program. Mahalanobis distance needs no further
computation. The script compares both by cross-validation: accuracy on all points, and on points outside every ellipsoid
(only these can differ).

    SEPC_DATA=... python -m experiments.paper.nearest
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sklearn.model_selection import StratifiedKFold

from experiments.datasets import Data, small
from experiments.harness import arguments, write_results
from sepc_torch import SEPC, Rule, partition


def compare(data: Data, folds: int, seed: int, max_impure: int) -> dict[str, dict[str, float]]:
    x, y = data
    found: dict[str, dict[str, list[np.ndarray]]] = {
        kind: {"right": [], "outside": []} for kind in ("mahalanobis", "euclidean")
    }
    for train, test in StratifiedKFold(folds, shuffle=True, random_state=seed).split(x, y):
        part = partition(x[train], y[train], max_impure=max_impure)
        codes = np.searchsorted(part.classes, y[test])
        for kind, columns in found.items():
            sepc = SEPC.from_partition(part, kind, dtype=torch.float64)  # type: ignore[arg-type]
            out = sepc(torch.from_numpy(x[test].astype(float)))
            columns["right"].append(out.label.numpy() == codes)
            columns["outside"].append(out.rule.numpy() == int(Rule.OUTSIDE))
    summary = {}
    for kind, columns in found.items():
        right, outside = (np.concatenate(columns[name]) for name in ("right", "outside"))
        summary[kind] = {
            "accuracy": float(right.mean()),
            "share_outside": float(outside.mean()),
            "accuracy_outside": float(right[outside].mean()) if outside.any() else float("nan"),
        }
    return summary


def main() -> None:
    options = arguments(__doc__).parse_args()
    folds, sets = (3, ("moons", "iris")) if options.smoke else (10, None)
    rows: dict[str, Any] = {}
    for name, data in small(options.seed).items():
        if sets is not None and name not in sets:
            continue
        rows[name] = compare(data, folds, options.seed, max_impure=2)
        print(name, rows[name], flush=True)
    mean = {
        kind: float(np.mean([row[kind]["accuracy"] for row in rows.values()])) for kind in ("mahalanobis", "euclidean")
    }
    print("mean accuracy", mean)
    if not options.smoke:
        results = {"folds": folds, "sets": rows, "mean_accuracy": mean}
        write_results("nearest", options, ("torch", "scikit-learn"), results)


if __name__ == "__main__":
    main()

"""Nearest ellipsoid of a point outside all of them: Mahalanobis against Euclidean distance.

The paper measures Euclidean distance to the surface, a convex program. Mahalanobis distance needs no further
computation. The script compares both by cross-validation: accuracy on all points, accuracy on points outside every
ellipsoid (only these can differ), and how well trust ranks the mistakes.

    SEPC_DATA=... python experiments/nearest.py
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from datasets import Data, small
from harness import arguments, environment, write_results
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import StratifiedKFold

from sepc_torch import SEPC, Rule, partition


def compare(data: Data, folds: int, seed: int, max_impure: int) -> dict[str, dict[str, float]]:
    x, y = data
    found: dict[str, dict[str, list[np.ndarray]]] = {
        kind: {"right": [], "outside": [], "trust": [], "seconds": []} for kind in ("mahalanobis", "euclidean")
    }
    for train, test in StratifiedKFold(folds, shuffle=True, random_state=seed).split(x, y):
        part = partition(x[train], y[train], max_impure=max_impure)
        codes = np.searchsorted(part.classes, y[test])
        for kind, columns in found.items():
            sepc = SEPC.from_partition(part, kind, dtype=torch.float64)  # type: ignore[arg-type]
            begun = time.perf_counter()
            out = sepc(torch.from_numpy(x[test].astype(float)))
            columns["seconds"].append(np.array([time.perf_counter() - begun]))
            columns["right"].append(out.label.numpy() == codes)
            columns["outside"].append(out.rule.numpy() == int(Rule.OUTSIDE))
            columns["trust"].append(out.trust.numpy())
    summary = {}
    for kind, columns in found.items():
        right, outside, trust = (np.concatenate(columns[name]) for name in ("right", "outside", "trust"))
        summary[kind] = {
            "accuracy": float(right.mean()),
            "share_outside": float(outside.mean()),
            "accuracy_outside": float(right[outside].mean()) if outside.any() else float("nan"),
            "auroc_of_trust": float(roc_auc_score(right, trust)) if 0 < right.sum() < len(right) else float("nan"),
            "seconds": float(np.concatenate(columns["seconds"]).sum()),
        }
    return summary


def main() -> None:
    options = arguments(__doc__).parse_args()
    folds, sets = (3, ("moons", "iris")) if options.smoke else (10, None)
    rows: dict[str, Any] = {}
    print("set          outside   accuracy: mahalanobis  euclidean   outside: mahalanobis  euclidean   time x")
    for name, data in small(options.seed).items():
        if sets is not None and name not in sets:
            continue
        row = compare(data, folds, options.seed, max_impure=2)
        rows[name] = row
        m, e = row["mahalanobis"], row["euclidean"]
        print(
            f"{name:12s} {m['share_outside']:6.1%} {m['accuracy']:17.1%} {e['accuracy']:12.1%}"
            f" {m['accuracy_outside']:18.1%} {e['accuracy_outside']:12.1%} {e['seconds'] / m['seconds']:10.1f}",
            flush=True,
        )
    mean = {
        kind: float(np.mean([row[kind]["accuracy"] for row in rows.values()])) for kind in ("mahalanobis", "euclidean")
    }
    print(f"mean accuracy: mahalanobis {mean['mahalanobis']:.1%}, euclidean {mean['euclidean']:.1%}")
    if not options.smoke:
        results = {
            "command": "python experiments/nearest.py",
            "environment": environment("torch", "scikit-learn"),
            "seed": options.seed,
            "folds": folds,
            "sets": rows,
            "mean_accuracy": mean,
        }
        print(f"written: {write_results('nearest', results).name}")


if __name__ == "__main__":
    main()

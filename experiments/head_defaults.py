"""What ``TrustHead.fit`` should choose by itself: dimensions, impurity, normalisation, and what "nearest" means.

Every choice is varied alone, the others at their defaults, on embeddings of several kinds: pixels of digits, the 64
features of a small CNN (Fashion-MNIST), and 384-dimensional sentence embeddings of 150 classes with 100 points each
(CLINC150). Reported are the head's own accuracy, the AUROC with which its margin finds its mistakes, the share of
test points inside an ellipsoid, ellipsoids, and the time to fit. The default dimension is min(32, sqrt(n), D) for
the smallest class's n.

    SEPC_DATA=... python experiments/head_defaults.py
"""

from __future__ import annotations

import time
import warnings
from typing import Any

import numpy as np
import torch
from datasets import Data, embeddings
from harness import arguments, environment, write_results
from sklearn.metrics import roc_auc_score

from sepc_torch import Rule, TrustHead

VARIATIONS: dict[str, list[dict[str, Any]]] = {
    "default": [{}],
    "dim": [{"dim": d} for d in (4, 8, 16, 32)],
    "normalize": [{"normalize": "standardize"}, {"normalize": None}],
    "projection": [{"projection": "lda"}],
    "max_impure": [{"max_impure": m} for m in (0, 2, 10, 50)],
    "nearest": [{"nearest": "euclidean"}],
}


def measure(train: Data, test: Data, choice: dict[str, Any]) -> dict[str, Any]:
    begun = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # small classes are the point of some variations
        head = TrustHead.fit(*train, progress=False, **choice)
    seconds = time.perf_counter() - begun
    out = head(torch.from_numpy(np.asarray(test[0], dtype=np.float32)))
    right = out.label.numpy() == np.searchsorted(np.array(head.classes), test[1])
    return {
        "choice": choice,
        "dim": len(head.projection.matrix),
        "max_impure": head.sepc.made["max_impure"],
        "accuracy": float(right.mean()),
        "auroc_of_margin": float(roc_auc_score(right, out.margin.numpy())),
        "auroc_of_trust": float(roc_auc_score(right, out.trust.numpy())),
        "inside": float((out.rule != int(Rule.OUTSIDE)).float().mean()),
        "ellipsoids": len(head.sepc.bank),
        "seconds": seconds,
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--per-class", type=int, default=500, help="most training points of a class")
    parser.add_argument("--sets", nargs="+", default=["digits", "fashion"], help="also: clinc150, which takes an hour")
    options = parser.parse_args()
    sets = embeddings(40 if options.smoke else options.per_class, options.seed)
    results: dict[str, list[dict[str, Any]]] = {}
    for name, (train, test) in sets.items():
        if name not in (["digits"] if options.smoke else options.sets):
            continue
        print(
            f"{name}: {len(train[0])} training points, {train[0].shape[1]} features, {len(np.unique(train[1]))} classes"
        )
        print(
            "  choice                        dim  impure  accuracy AUROC margin       trust  inside  ellipsoids       s"
        )
        rows = results[name] = []
        for variation, choices in VARIATIONS.items():
            if options.smoke and variation not in ("default", "nearest"):
                continue
            for choice in choices:
                row = measure(train, test, choice)
                rows.append(row)
                text = ", ".join(f"{key}={value}" for key, value in choice.items()) or "default"
                print(
                    f"  {text:28s} {row['dim']:4d} {row['max_impure']:7d} {row['accuracy']:9.1%} "
                    f"{row['auroc_of_margin']:13.3f} {row['auroc_of_trust']:12.3f} {row['inside']:7.1%} "
                    f"{row['ellipsoids']:11d} {row['seconds']:8.1f}",
                    flush=True,
                )
    if not options.smoke:
        path = write_results(
            "head_defaults",
            {
                "command": "python experiments/head_defaults.py",
                "environment": environment("torch", "scikit-learn"),
                "seed": options.seed,
                "per_class": options.per_class,
                "command_line": {"sets": options.sets},
                "sets": results,
            },
        )
        print(f"written: {path.name}")


if __name__ == "__main__":
    main()

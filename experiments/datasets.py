"""The data sets of the experiments: those that scikit-learn ships, and larger ones from the folder SEPC_DATA."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from sklearn.datasets import load_breast_cancer, load_digits, load_iris, load_wine, make_circles, make_moons

Data = tuple[np.ndarray, np.ndarray]


def data_folder() -> Path | None:
    """The folder named by SEPC_DATA, where set."""
    folder = os.environ.get("SEPC_DATA")
    return Path(folder) if folder else None


def small(seed: int) -> dict[str, Data]:
    """Tables of a few hundred records."""
    sets: dict[str, Data] = {
        "moons": make_moons(400, noise=0.2, random_state=seed),
        "circles": make_circles(400, noise=0.1, factor=0.5, random_state=seed),
        "iris": load_iris(return_X_y=True),
        "wine": load_wine(return_X_y=True),
        "wdbc": load_breast_cancer(return_X_y=True),
    }
    folder = data_folder()
    if folder is not None and (folder / "vertebral_column_2c.csv").is_file():
        table = np.genfromtxt(folder / "vertebral_column_2c.csv", delimiter=",", skip_header=1, dtype=str)
        sets["vertebral"] = table[:, :6].astype(float).round(2), (table[:, 6] == "AB").astype(int)
    return sets


def embeddings(per_class: int | None, seed: int) -> dict[str, tuple[Data, Data]]:
    """Training and test embeddings, at most so many of a class for training."""
    rng = np.random.default_rng(seed)
    x, y = load_digits(return_X_y=True)
    order = rng.permutation(len(x))
    half = len(x) // 2
    sets = {"digits": ((x[order[:half]], y[order[:half]]), (x[order[half:]], y[order[half:]]))}
    folder = data_folder()
    for name, file in (("fashion", "fashion_mnist_cnn_features.npz"), ("clinc150", "clinc150_minilm.npz")):
        if folder is None or not (folder / file).is_file():
            continue
        arrays = np.load(folder / file)
        x, y, split = arrays["X"].astype(np.float32), arrays["y"], arrays["split"]
        train, test = np.flatnonzero((split == 0) & (y >= 0)), np.flatnonzero((split == 2) & (y >= 0))
        sets[name] = (x[train], y[train]), (x[test], y[test])
    return {name: (_at_most(train, per_class, rng), test) for name, (train, test) in sets.items()}


def _at_most(data: Data, per_class: int | None, rng: np.random.Generator) -> Data:
    x, y = data
    if per_class is None:
        return data
    keep = np.concatenate([rng.permutation(np.flatnonzero(y == label))[:per_class] for label in np.unique(y)])
    return x[keep], y[keep]

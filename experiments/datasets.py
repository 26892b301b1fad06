"""Data sets of the experiments.

Some come with scikit-learn. Adult and Vertebral Column come from the folder SEPC_DATA if it is set and has them,
otherwise from OpenML through scikit-learn, which keeps a copy. The records must have the known checksum in both cases.
Larger embeddings are read from SEPC_DATA only.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd
from sklearn.datasets import (
    fetch_openml,
    get_data_home,
    load_breast_cancer,
    load_digits,
    load_iris,
    load_wine,
    make_circles,
    make_moons,
)
from sklearn.preprocessing import OrdinalEncoder

Data = tuple[np.ndarray, np.ndarray]

# Checksums of the sorted records as text: neither their order nor the file format matters.
CHECKSUMS = {
    "adult": "8f4f53d83cf8b886401e6097fdc4917a4ed22e7210b37668c7f4ac9bf1283681",
    "vertebral": "94589f5f67cc855dd6b67ea9d17e33729b4bee9ca5c025d808b4be92e0440dc9",
}
OPENML = {"adult": 1590, "vertebral": 1524}
FASHION, CLINC = "fashion_mnist_cnn_features.npz", "clinc150_minilm.npz"
FILES = {"adult": "adult.csv.gz", "vertebral": "vertebral_column_2c.csv"}

ADULT_NUMBERS = ["age", "fnlwgt", "education-num", "capital-gain", "capital-loss", "hours-per-week"]
# The paper's codes 2, 11, 2, 2, 0, 4, 1 and 38 are the alphabetical positions of these values.
STRATUM = {
    "workclass": "Private",
    "education": "HS-grad",
    "marital-status": "Married-civ-spouse",
    "occupation": "Craft-repair",
    "relationship": "Husband",
    "race": "White",
    "sex": "Male",
    "native-country": "United-States",
}
ADULT_CATEGORIES = list(STRATUM)
# education-num follows from education, so it is constant in the stratum; the paper drops it too.
STRATUM_FEATURES = [name for name in ADULT_NUMBERS if name != "education-num"]
OVERLAPPING_SIZES = (150, 100)
VERTEBRAL_FEATURES = [
    *("pelvic_incidence", "pelvic_tilt", "lumbar_lordosis_angle"),
    *("sacral_slope", "pelvic_radius", "degree_spondylolisthesis"),
]


def data_folder() -> Path | None:
    """The folder named by SEPC_DATA, or None."""
    folder = os.environ.get("SEPC_DATA")
    return Path(folder) if folder else None


def stored_arrays(file: str) -> Mapping[str, np.ndarray] | None:
    """The arrays of a file in SEPC_DATA, or None if it is missing."""
    folder = data_folder()
    return np.load(folder / file) if folder is not None and (folder / file).is_file() else None


def adult() -> pd.DataFrame:
    """The 30 162 complete training records of Adult, with the column ``income``."""
    file = _file("adult")
    if file is not None:
        table = pd.read_csv(file, na_values="?")
        table = table[table["split"] == "train"]
    else:
        # OpenML lists the 16 281 records of the test set first.
        table = _openml("adult").rename(columns={"class": "income"}).iloc[16281:]
    table = table[[*ADULT_NUMBERS, *ADULT_CATEGORIES, "income"]].dropna().reset_index(drop=True)
    # OpenML has a categorical type; as text the categories have the same order from either source.
    texts = {name: table[name].astype(str).str.strip() for name in [*ADULT_CATEGORIES, "income"]}
    table = table.assign(**texts, **{name: table[name].astype(int) for name in ADULT_NUMBERS})
    _check("adult", table)
    return table


def adult_stratum() -> Data:
    """The paper's stratum of Adult, five continuous features: 548 records of at most 50 000 dollars (0), 255 more."""
    table = adult()
    chosen = table[(table[list(STRATUM)] == pd.Series(STRATUM)).all(axis=1)]
    return chosen[STRATUM_FEATURES].to_numpy(float), _rich(chosen)


def adult_encoded() -> Data:
    """All complete records of Adult, categories numbered in alphabetical order as in the paper: 14 features."""
    table = adult()
    codes = OrdinalEncoder().fit_transform(table[ADULT_CATEGORIES])
    return np.hstack([table[ADULT_NUMBERS].to_numpy(float), codes]), _rich(table)


def vertebral() -> Data:
    """Vertebral Column, six features with two decimals as in UCI's file: 100 normal (0) and 210 abnormal (1)."""
    file = _file("vertebral")
    table = pd.read_csv(file).iloc[:, :7] if file is not None else _openml("vertebral")
    table = table.set_axis([*VERTEBRAL_FEATURES, "class"], axis=1)
    # OpenML numbers the classes; the abnormal class is the larger one.
    abnormal = (table["class"].astype(str) == table["class"].astype(str).mode()[0]).astype(int)
    x = table[VERTEBRAL_FEATURES].astype(float).round(2)
    _check("vertebral", x.map("{:.2f}".format).assign(abnormal=abnormal))
    return x.to_numpy(), abnormal.to_numpy()


def overlapping(seed: int) -> Data:
    """Two correlated Gaussian classes in the plane, the larger on the left; the paper does not give its points."""
    rng = np.random.default_rng(seed)
    first = rng.multivariate_normal([-1.2, 0.0], [[1.0, 0.4], [0.4, 1.0]], OVERLAPPING_SIZES[0])
    second = rng.multivariate_normal([1.2, 0.0], [[1.0, -0.4], [-0.4, 1.0]], OVERLAPPING_SIZES[1])
    return np.concatenate([first, second]), np.repeat([0, 1], OVERLAPPING_SIZES)


def small(seed: int) -> dict[str, Data]:
    """Tables of a few hundred records."""
    sets: dict[str, Data] = {
        "moons": make_moons(400, noise=0.2, random_state=seed),
        "circles": make_circles(400, noise=0.1, factor=0.5, random_state=seed),
        "iris": load_iris(return_X_y=True),
        "wine": load_wine(return_X_y=True),
        "wdbc": load_breast_cancer(return_X_y=True),
    }
    if _file("vertebral") is not None:
        sets["vertebral"] = vertebral()
    return sets


def embeddings(per_class: int, seed: int) -> dict[str, tuple[Data, Data]]:
    """Training and test embeddings by name, with at most ``per_class`` training points of a class."""
    rng = np.random.default_rng(seed)
    x, y = load_digits(return_X_y=True)
    order = rng.permutation(len(x))
    half = len(x) // 2
    sets = {"digits": ((x[order[:half]], y[order[:half]]), (x[order[half:]], y[order[half:]]))}
    if (arrays := stored_arrays(FASHION)) is not None:
        x, y, split = arrays["X"].astype(np.float32), arrays["y"], arrays["split"]
        sets["fashion"] = (x[split == 0], y[split == 0]), (x[split == 2], y[split == 2])
    return {name: (_at_most(*train, per_class, rng), test) for name, (train, test) in sets.items()}


def _file(name: str) -> Path | None:
    folder = data_folder()
    return folder / FILES[name] if folder is not None and (folder / FILES[name]).is_file() else None


def _openml(name: str) -> pd.DataFrame:
    """The table from OpenML; scikit-learn keeps a copy and checks OpenML's own checksum."""
    try:
        return fetch_openml(data_id=OPENML[name], as_frame=True, parser="auto", cache=True).frame
    except OSError as error:
        raise RuntimeError(
            f"The data set {name!r} is not available and OpenML cannot be reached ({error}). Either run once with a "
            f"network: scikit-learn then keeps a copy in {get_data_home()}, which you can also copy from another "
            f"machine. Or set SEPC_DATA to a folder that holds {FILES[name]} (see experiments/datasets.py)."
        ) from error


def _check(name: str, records: pd.DataFrame) -> None:
    lines = sorted(records.to_csv(index=False, header=False, lineterminator="\n").splitlines())
    found = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    if found != CHECKSUMS[name]:
        raise ValueError(
            f"The data set {name!r} has {len(records)} records with checksum {found}, expected {CHECKSUMS[name]}: it "
            f"is not the data set of the stored results. Remove scikit-learn's copy in {get_data_home()} and fetch "
            f"again, or replace {FILES[name]} in SEPC_DATA."
        )


def _rich(table: pd.DataFrame) -> np.ndarray:
    return (table["income"] == ">50K").to_numpy().astype(int)


def _at_most(x: np.ndarray, y: np.ndarray, per_class: int, rng: np.random.Generator) -> Data:
    keep = np.concatenate([rng.permutation(np.flatnonzero(y == label))[:per_class] for label in np.unique(y)])
    return x[keep], y[keep]

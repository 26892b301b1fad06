"""Usual classifiers of scikit-learn for encoded tables, fitted and frozen (extra ``sklearn``)."""

from __future__ import annotations

import inspect
import os
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np

from sepc_torch.data.table_classifier import Linear, OwnEstimator, TableClassifier, Trees
from sepc_torch.data.table_encoding import TableEncoding
from sepc_torch.shapes import Array, Float, Int

KINDS = ("boosting", "forest", "logistic")
# Least rows of a leaf of a forest. Leaves of single rows give probabilities of 0 and 1, which rank no labels, and files
# that grow with the training rows.
_LEAF_ROWS = 5
_FOREST_TREES = 200
# Iterations of boosting, scikit-learn's default. Each has a tree for every class.
_ITERATIONS = 100
# A comparison takes at most so many rows, and so many cells and trees over all folds (one fold in any case), so that it
# costs little beside a fit to a large table. At least so many rows are compared, however many columns there are.
_COMPARED_ROWS, _COMPARED_CELLS, _COMPARED_TREES = 2**13, 2**19, 2000
_LEAST_COMPARED, _FOLDS = 2**11, 4


def fit_classifier(
    kind: str,
    features: Float[Array, "N F"],
    labels: Array,
    encoding: TableEncoding,
    seed: int = 0,
    iterations: int = _ITERATIONS,
) -> TableClassifier:
    """Fit a classifier to encoded rows of a table, and freeze it.

    Args:
        kind: ``"boosting"`` (histogram gradient boosting with native categories and gaps), ``"forest"``,
            ``"logistic"``, or ``"module:object"``: an estimator, or a class or function without arguments that returns
            one. It is fitted to the encoded numbers.
        features: The encoded rows.
        labels: Their labels.
        encoding: The encoding.
        seed: Seed of the classifier.
        iterations: Iterations of boosting.

    >>> rng = np.random.default_rng(0)
    >>> table = {"x": rng.normal(size=200), "pet": rng.choice(["cat", "dog"], 200)}
    >>> labels = np.where((table["x"] > 0) == (table["pet"] == "cat"), "yes", "no")
    >>> encoding = TableEncoding.fit(table, ["x"], ["pet"])
    >>> features = encoding.encode(table).points
    >>> logits = fit_classifier("boosting", features, labels, encoding).logits(features, encoding)
    >>> float((np.array(["no", "yes"])[logits.argmax(axis=1)] == labels).mean())
    1.0
    """
    from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
    from sklearn.linear_model import LogisticRegression

    x = np.asarray(features, dtype=np.float32).astype(np.float64)  # a head has float32
    match kind:
        case "boosting":
            native = np.arange(len(encoding.categories) + len(encoding.numbers)) < len(encoding.categories)
            boosting = HistGradientBoostingClassifier(
                max_iter=iterations, categorical_features=native, random_state=seed
            )
            return frozen_boosting(boosting.fit(encoding.columns_of(x), labels))
        case "forest":
            forest = RandomForestClassifier(_FOREST_TREES, min_samples_leaf=_LEAF_ROWS, random_state=seed)
            return frozen_forest(forest.fit(x, labels))
        case "logistic":
            logistic = LogisticRegression(max_iter=1000).fit(x, labels)
            return Linear(logistic.coef_, logistic.intercept_)
        case _:
            return OwnEstimator(_own_estimator(kind).fit(x, labels))


def right_shares(
    kinds: Sequence[str],
    features: Float[Array, "N F"],
    labels: Array,
    encoding: TableEncoding,
    groups: Int[Array, "N"] | None = None,
    seed: int = 0,
) -> dict[str, float]:
    """Share of right labels of several kinds of classifiers, on folds of the rows that they were not fitted to.

    No kind is better on all tables. Boosting finds interactions, and fails where a class has few rows and there are
    many columns, such as embeddings of a hundred classes.

    Args:
        kinds: As in :func:`fit_classifier`.
        features: The encoded rows, of which at most 8192 are used, fewer above 64 columns.
        labels: Their labels.
        encoding: The encoding.
        groups: A number for each row; rows with the same number are in the same fold.
        seed: Seed of the sample, the folds and the classifiers.
    """
    from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold

    columns = features.shape[1]
    most = min(_COMPARED_ROWS, max(_COMPARED_CELLS // columns, _LEAST_COMPARED))
    chosen = np.random.default_rng(seed).permutation(len(labels))[:most]
    x, y = features[chosen], labels[chosen]
    classes, sizes = np.unique(y, return_counts=True)
    if sizes.max() < 2:
        return dict.fromkeys(kinds, 0.0)
    parts: Any = StratifiedKFold if groups is None else StratifiedGroupKFold
    folds = parts(min(_FOLDS, int(sizes.max())), shuffle=True, random_state=seed)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The least populated class", UserWarning)
        split = list(folds.split(x, y, groups if groups is None else groups[chosen]))
    iterations = max(1, min(_ITERATIONS, _COMPARED_TREES // 2 // len(classes)))
    several = min(_COMPARED_CELLS // (len(y) * columns), _COMPARED_TREES // (iterations * len(classes)))
    right, asked = dict.fromkeys(kinds, 0), 0
    for train, test in split[: max(1, several)]:
        known = np.unique(y[train])
        if len(known) < 2:  # no classifier can be fitted
            continue
        asked += len(test)
        for kind in kinds:
            logits = fit_classifier(kind, x[train], y[train], encoding, seed, iterations).logits(x[test], encoding)
            right[kind] += int((known[logits.argmax(axis=1)] == y[test]).sum())
    return {kind: count / max(1, asked) for kind, count in right.items()}


def check_kind(kind: str) -> None:
    """Raise ValueError for a kind of classifier that does not exist, and for an object that cannot be imported."""
    if kind not in KINDS:
        _own_estimator(kind)


def _own_estimator(name: str) -> Any:
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ValueError(f"There is no model {name!r}: pass {', '.join(KINDS)}, sepc, or module:object for your own.")
    if os.getcwd() not in sys.path:  # noqa: PTH109 - compared with texts; a script of the user lies where it is called
        sys.path.insert(0, os.getcwd())  # noqa: PTH109
    try:
        found: Any = import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"{name!r} cannot be imported ({error}); pass module:object, such as mymodels:churn."
        ) from error
    if inspect.isclass(found) or not hasattr(found, "fit"):
        found = found()
    if not (hasattr(found, "fit") and hasattr(found, "predict")):
        raise ValueError(f"{name!r} is a {type(found).__name__} without fit and predict; pass a classifier.")
    if hasattr(found, "get_params"):
        from sklearn.base import clone, is_regressor

        if is_regressor(found):
            raise ValueError(f"{name!r} is a regressor, which predicts numbers and no labels; pass a classifier.")
        found = clone(found)
    return found


def frozen_boosting(fitted: Any) -> Trees:
    """The trees of a fitted ``HistGradientBoostingClassifier`` whose columns of numbered categories come first."""
    trees = [tree for iteration in fitted._predictors for tree in iteration]
    parts = []
    splits: list[Array] = []
    most = 1
    if fitted.is_categorical_ is not None:
        known = fitted._preprocessor.named_transformers_["encoder"].categories_
        for categories in known:
            present = categories[~np.isnan(categories)]
            assert np.array_equal(present, np.arange(len(present))), "a category of the encoding has no training row"
            most = max(most, len(present))
    for tree in trees:
        nodes = tree.nodes
        leaf = nodes["is_leaf"].astype(bool)
        kinds = nodes["is_categorical"].astype(bool) & ~leaf
        split = np.full(len(nodes), -1)
        split[kinds] = len(splits) + nodes["bitset_idx"][kinds]
        splits += list(tree.raw_left_cat_bitsets)
        numbers = ~leaf & ~kinds
        parts.append(
            {
                "column": np.where(leaf, -1, nodes["feature_idx"]),
                "threshold": np.where(numbers, nodes["num_threshold"], 0.0),
                "missing_left": nodes["missing_go_to_left"].astype(bool) & ~leaf,
                "left": nodes["left"].astype(np.int64),
                "right": nodes["right"].astype(np.int64),
                "split": split,
                "value": nodes["value"][leaf, None],
            }
        )
    categories = np.arange(most)
    goes_left = np.zeros((len(splits), most), dtype=bool)
    for row, bitset in zip(goes_left, splits, strict=True):
        row[:] = (bitset[categories // 32] >> (categories % 32)) & 1
    start = np.asarray(fitted._baseline_prediction, dtype=np.float64).ravel()
    output = np.arange(len(trees)) % len(start)
    return _joined("boosting", parts, goes_left, output, start)


def frozen_forest(fitted: Any) -> Trees:
    """The trees of a fitted ``RandomForestClassifier``."""
    parts = []
    for estimator in fitted.estimators_:
        tree = estimator.tree_
        leaf = tree.children_left < 0
        missing = np.zeros(len(leaf), dtype=bool)
        if getattr(tree, "missing_go_to_left", None) is not None:
            missing = tree.missing_go_to_left.astype(bool) & ~leaf
        parts.append(
            {
                "column": np.where(leaf, -1, tree.feature),
                "threshold": np.where(leaf, 0.0, tree.threshold),
                "missing_left": missing,
                "left": tree.children_left,
                "right": tree.children_right,
                "split": np.full(len(leaf), -1),
                "value": tree.value[leaf, 0],
            }
        )
    output, start = np.zeros(len(parts), dtype=np.int64), np.zeros(len(fitted.classes_))
    return _joined("forest", parts, np.zeros((0, 1), dtype=bool), output, start)


def _joined(kind: Any, parts: list[dict[str, Array]], goes_left: Array, output: Array, start: Array) -> Trees:
    """The nodes of all trees in one list."""
    first = leaves = 0
    for part in parts:
        leaf = part["column"] < 0
        inside, number = ~leaf, np.arange(int(leaf.sum()))
        for side in ("left", "right"):
            part[side] = np.where(inside, part[side] + first, 0)
        part["left"][leaf] = leaves + number
        part["root"] = np.array([first])
        first, leaves = first + len(leaf), leaves + len(number)
    arrays = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    for name in ("column", "left", "right", "split", "root"):
        arrays[name] = arrays[name].astype(np.int32)
    return Trees(kind, goes_left=goes_left, output=output.astype(np.int32), start=start, **arrays)

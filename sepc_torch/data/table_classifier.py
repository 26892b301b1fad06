"""Classifiers of encoded tables in a form that a file holds without pickles: trees, linear models, own estimators.

:func:`sepc_torch.sklearn.tables.fit_classifier` fits a classifier of scikit-learn and freezes it. A frozen classifier
computes its scores with NumPy and gives the labels of the fitted one in every row. It sees the features of a
:class:`~sepc_torch.data.table_encoding.TableEncoding` in float32, the precision of a head, whatever it is given.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np

from sepc_torch.data.table_encoding import TableEncoding
from sepc_torch.shapes import Array, Float, Int

# The label gets at least this lead over the other logits, relative to 1 + |logit|: float32 keeps it, and the energy of
# the logits changes by less than the resolution of nonconformity scores.
LEAD = 1e-6
# Energy of log probabilities. It is the same for every row; around zero its rounding errors would count as differences.
ENERGY = -1.0
# Logit of the label of an estimator without scores: softmax then says the same of every row.
_PLAIN_LOGIT = 4.0
# Rows that go through the trees at a time: small enough for caches, large enough for calls of NumPy.
_ROWS = 2**13
# Fewer rows go through all trees at once, step by step; more go through one tree at a time, split at every node.
_FEW = 2**8


class TableClassifier(ABC):
    """A frozen classifier of encoded rows.

    Attributes:
        kind: Its name in a file: ``"boosting"``, ``"forest"``, ``"logistic"`` or ``"own"``.
    """

    kind: str

    @abstractmethod
    def scores(self, features: Float[Array, "B F"], encoding: TableEncoding) -> Float[Array, "B _"]:
        """Raw predictions of rows without NaN: log odds of the second of two classes, log odds or probabilities."""

    @abstractmethod
    def arrays(self) -> dict[str, Array]:
        """The arrays that a file holds."""

    def logits(self, features: Float[Array, "B F"], encoding: TableEncoding) -> Float[Array, "B C"]:
        r"""Logits, of which the largest one belongs to the classifier's label in every row; NaN for rows with NaN.

        They are the log odds (:math:`\mp d / 2` for two classes), or one plus the logarithm of the probabilities.
        """
        x = np.asarray(features, dtype=np.float32)
        good = ~np.isnan(x).any(axis=1)
        found = self._logits(x[good].astype(np.float64), encoding)
        logits = np.full((len(x), found.shape[1]), np.nan)
        logits[good] = found
        return logits

    def _logits(self, features: Float[Array, "B F"], encoding: TableEncoding) -> Float[Array, "B C"]:
        scores = self.scores(features, encoding)
        if scores.shape[1] == 1:
            scores = np.concatenate([-scores / 2, scores / 2], axis=1)
        return leading(scores, scores.argmax(axis=1))


def leading(logits: Float[Array, "B C"], label: Int[Array, "B"]) -> Float[Array, "B C"]:
    """Logits in which the label's is the only largest one, in float32 too.

    >>> leading(np.array([[0.0, 0.0], [1.0, 3.0]]), np.array([1, 1]))
    array([[0.e+00, 1.e-06],
           [1.e+00, 3.e+00]])
    """
    rows = np.arange(len(label))
    others = logits.copy()
    others[rows, label] = -np.inf
    best = others.max(axis=1, initial=-np.finfo(np.float32).max)
    found = logits.copy()
    found[rows, label] = np.maximum(logits[rows, label], best + LEAD * (1.0 + np.abs(best)))
    return found


def log_probabilities(probabilities: Float[Array, "B C"]) -> Float[Array, "B C"]:
    """Logarithms of probabilities, shifted by a constant."""
    with np.errstate(divide="ignore"):
        return np.log(probabilities) - ENERGY


def estimator_labels(estimator: Any, X: Any) -> Array:
    """Labels of a fitted classifier (n,); some libraries return them as a column.

    >>> from sklearn.dummy import DummyClassifier
    >>> estimator_labels(DummyClassifier().fit([[0], [1]], ["a", "a"]), [[2]]).tolist()
    ['a']
    """
    labels = np.asarray(estimator.predict(X))
    return labels[:, 0] if labels.shape[1:] == (1,) else labels


def estimator_logits(estimator: Any, X: Any) -> Float[Array, "B C"]:
    r"""Logits of a fitted classifier, of which the largest one belongs to its label in every row.

    They are its decision function (:math:`\mp d / 2` for two classes), or one plus the logarithm of its probabilities.
    An estimator without either has the same logits for every row of a label.

    >>> from sklearn.neighbors import KNeighborsClassifier
    >>> tie = KNeighborsClassifier(2).fit([[0.0], [1.0]], ["a", "b"])
    >>> estimator_logits(tie, [[0.5]]).round(3)
    array([[0.307, 0.307]])
    >>> estimator_logits(tie, [[0.5]]).argmax()
    np.int64(0)
    """
    classes = np.asarray(estimator.classes_)
    label = np.searchsorted(classes, estimator_labels(estimator, X))
    scores = estimator_scores(estimator, X)
    if scores is None:
        scores = np.where(label[:, None] == np.arange(len(classes)), _PLAIN_LOGIT, 0.0)
    # Probabilities of forests have ties, and the labels of a support vector machine need not be its largest score.
    return leading(scores, label)


def estimator_scores(estimator: Any, X: Any) -> Float[Array, "B C"] | None:
    """Decision function or log probabilities; None if the estimator has neither for every class."""
    classes = len(estimator.classes_)
    if hasattr(estimator, "decision_function"):
        scores = np.asarray(estimator.decision_function(X), dtype=np.float64)
        if classes == 2 and scores.shape[1:] in ((), (1,)):
            scores = scores.reshape(-1, 1)
            return np.concatenate([-scores / 2, scores / 2], axis=1)
        if scores.shape[1:] == (classes,):
            return scores
    if hasattr(estimator, "predict_proba"):
        probabilities = np.asarray(estimator.predict_proba(X), dtype=np.float64)
        if probabilities.shape[1:] == (classes,):
            return log_probabilities(probabilities)
    return None


@dataclass(frozen=True)
class Trees(TableClassifier):
    """A sum or mean of decision trees: histogram gradient boosting, or a random forest.

    The nodes of all trees stand in one list, children after their parent. A row goes to the left child if its value is
    at most the threshold, or if its category is one of those that go left; a missing value goes to its own side.

    Attributes:
        kind: ``"boosting"`` for sums of log odds of native columns
            (:meth:`~sepc_torch.data.table_encoding.TableEncoding.columns_of`), ``"forest"`` for means of probabilities
            of the features.
        column: Column whose value decides, -1 for a leaf.
        threshold: Largest value of a number that goes left.
        missing_left: Whether a missing value goes left.
        left: Left child; of a leaf its row in ``value``.
        right: Right child.
        split: Row of ``goes_left``, -1 for a number.
        goes_left: Whether each category goes left, for each split of categories.
        value: Values of the leaves.
        root: Root of each tree.
        output: Score that each tree adds to; a forest adds all probabilities.
        start: Scores without trees.
    """

    kind: Literal["boosting", "forest"]
    column: Int[Array, "nodes"]
    threshold: Float[Array, "nodes"]
    missing_left: Array
    left: Int[Array, "nodes"]
    right: Int[Array, "nodes"]
    split: Int[Array, "nodes"]
    goes_left: Array
    value: Float[Array, "leaves V"]
    root: Int[Array, "trees"]
    output: Int[Array, "trees"]
    start: Float[Array, "K"]

    NAMES: ClassVar[tuple[str, ...]] = (
        *("column", "threshold", "missing_left", "left", "right", "split"),
        *("goes_left", "value", "root", "output", "start"),
    )

    def arrays(self) -> dict[str, Array]:
        """The arrays that a file holds."""
        return {name: getattr(self, name) for name in self.NAMES}

    def check(self, columns: int) -> None:
        """Raise ValueError unless every path ends at a leaf and every split is about one of the columns."""
        inner, place = self.column >= 0, np.arange(len(self.column))
        later = (self.left > place) & (self.right > place)
        leaves = self.left[~inner] < len(self.value)
        split = (self.split < len(self.goes_left)) & (self.column < columns)
        if not (later[inner].all() and leaves.all() and split.all()) or (self.output >= len(self.start)).any():
            raise ValueError("the trees of its classifier are not complete")

    def scores(self, features: Float[Array, "B F"], encoding: TableEncoding) -> Float[Array, "B _"]:
        """Sums of log odds, or means of probabilities, added tree by tree as scikit-learn does."""
        x = encoding.columns_of(features) if self.kind == "boosting" else features
        return np.concatenate([self._scores(x[i : i + _ROWS]) for i in range(0, max(len(x), 1), _ROWS)])

    def _scores(self, x: Float[Array, "B _"]) -> Float[Array, "B _"]:
        leaf = self._leaves(x) if len(x) < _FEW else self._leaves_of_many(x)
        total = np.zeros((len(x), len(self.start))) + self.start
        for tree, output in enumerate(self.output.tolist()):
            if self.kind == "forest":
                total += self.value[leaf[tree]]
            else:
                total[:, output] += self.value[leaf[tree], 0]
        return total / len(self.root) if self.kind == "forest" else total

    def _leaves(self, x: Float[Array, "B _"]) -> Int[Array, "trees B"]:
        """The leaf of each tree in which each row ends; all trees at once."""
        node = np.repeat(self.root[:, None], len(x), axis=1).ravel()
        inner = self._inner[node]
        moving = np.flatnonzero(inner)
        while len(moving):
            here, row = node[moving], moving % len(x)
            value = x[row, self.column[here]]
            left = np.where(np.isnan(value), self.missing_left[here], value <= self.threshold[here])
            if len(self.goes_left):
                split = self.split[here]
                kinds = np.flatnonzero((split >= 0) & ~np.isnan(value))
                left[kinds] = self.goes_left[split[kinds], value[kinds].astype(np.int64)]
            here = np.where(left, self.left[here], self.right[here])
            node[moving] = here
            moving = moving[self._inner[here]]
        return self.left[node].reshape(len(self.root), len(x))

    def _leaves_of_many(self, x: Float[Array, "B _"]) -> Int[Array, "trees B"]:
        """The same leaves; the rows are divided at every node, which is many times faster for many rows."""
        columns = np.ascontiguousarray(x.T)
        gaps = np.isnan(columns)
        gappy = gaps.any(axis=1).tolist()
        column, threshold, missing_left, left, right, split = self._lists
        found = np.empty((len(self.root), len(x)), dtype=np.int64)
        everything = np.arange(len(x))
        for leaf, root in zip(found, self.root.tolist(), strict=True):
            open_nodes = [(root, everything)]
            while open_nodes:
                node, rows = open_nodes.pop()
                place = column[node]
                if place < 0:
                    leaf[rows] = left[node]
                    continue
                value = columns[place][rows]
                if split[node] >= 0:
                    kinds = np.where(np.isnan(value), 0.0, value).astype(np.int64)
                    goes = self.goes_left[split[node]][kinds]
                else:
                    goes = value <= threshold[node]
                if gappy[place]:
                    goes = np.where(gaps[place][rows], missing_left[node], goes)
                open_nodes += [(left[node], rows[goes]), (right[node], rows[~goes])]
        return found

    @cached_property
    def _inner(self) -> Array:
        return self.column >= 0

    @cached_property
    def _lists(self) -> list[list[Any]]:
        return [getattr(self, name).tolist() for name in self.NAMES[:6]]

    def _logits(self, features: Float[Array, "B F"], encoding: TableEncoding) -> Float[Array, "B C"]:
        if self.kind == "boosting":
            return super()._logits(features, encoding)
        shares = self.scores(features, encoding)
        return leading(log_probabilities(shares), shares.argmax(axis=1))


@dataclass(frozen=True)
class Linear(TableClassifier):
    """A linear classifier of the features, such as a logistic regression: log odds ``coef @ x + intercept``."""

    coef: Float[Array, "K F"]
    intercept: Float[Array, "K"]
    kind: Literal["logistic"] = "logistic"

    def arrays(self) -> dict[str, Array]:
        """The arrays that a file holds."""
        return {"coef": self.coef, "intercept": self.intercept}

    def scores(self, features: Float[Array, "B F"], encoding: TableEncoding) -> Float[Array, "B _"]:
        """Log odds."""
        return features @ self.coef.T + self.intercept


@dataclass(frozen=True)
class OwnEstimator(TableClassifier):
    """A fitted estimator of the user, which sees the features. A file holds it as skops writes it.

    >>> from sklearn.neighbors import KNeighborsClassifier
    >>> tie = KNeighborsClassifier(2).fit([[0.0], [1.0]], ["a", "b"])
    >>> encoding = TableEncoding.fit({"x": np.arange(2.0)}, ["x"], [])
    >>> OwnEstimator(tie).logits(np.array([[0.5]]), encoding).argmax()
    np.int64(0)
    """

    estimator: Any
    kind: Literal["own"] = "own"

    def arrays(self) -> dict[str, Array]:
        """The bytes of the estimator, as skops writes them."""
        return {"estimator": np.frombuffer(_skops().dumps(self.estimator), dtype=np.uint8)}

    def scores(self, features: Float[Array, "B F"], encoding: TableEncoding) -> Float[Array, "B _"]:
        """Log odds or log probabilities."""
        return self._logits(features, encoding)

    def _logits(self, features: Float[Array, "B F"], encoding: TableEncoding) -> Float[Array, "B C"]:
        if not len(features):
            return np.zeros((0, len(self.estimator.classes_)))
        return estimator_logits(self.estimator, features)


def read_classifier(
    kind: str, arrays: Mapping[str, Array], encoding: TableEncoding | None, classes: list[Any], trust: bool
) -> TableClassifier:
    """The classifier of a file; raise ValueError if it does not fit to the table of the head.

    Args:
        kind: Its kind.
        arrays: Its arrays.
        encoding: The encoding of the table.
        classes: The labels of the head.
        trust: Whether an estimator of the user may be loaded: its file can run code.
    """
    if encoding is None:
        raise ValueError("it has a classifier, but no encoding of a table")
    outputs = 1 if len(classes) == 2 else len(classes)
    match kind:
        case "boosting" | "forest":
            trees = Trees(kind, **{name: arrays[name] for name in Trees.NAMES})
            boosting = kind == "boosting"
            trees.check(len(encoding.numbers) + len(encoding.categories) if boosting else len(encoding.feature_names))
            if len(trees.start) != (outputs if boosting else len(classes)):
                raise ValueError("its classifier has other classes than the head")
            if trees.value.shape[1] != (1 if boosting else len(classes)):
                raise ValueError("the leaves of its classifier have another number of values than it needs")
            if boosting and len(trees.goes_left) and trees.goes_left.shape[1] < max(encoding.widths, default=0):
                raise ValueError("its classifier does not know all categories of the table")
            return trees
        case "logistic":
            if arrays["coef"].shape != (outputs, len(encoding.feature_names)):
                raise ValueError("its linear classifier has other features or classes than the head")
            return Linear(arrays["coef"], arrays["intercept"])
        case "own":
            found = _own_estimator(arrays["estimator"].tobytes(), trust)
            if list(found.classes_) != classes:
                raise ValueError("its classifier has other classes than the head")
            return OwnEstimator(found)
        case _:
            raise ValueError(f"it has a classifier of the unknown kind {kind!r}")


def _own_estimator(data: bytes, trust: bool) -> Any:
    if not trust:
        raise PermissionError(
            "The model holds an estimator of its user, and loading it can run code. If you trust the file, load it "
            "with --trust on the command line, or with TrustHead.load(path, trust=True)."
        )
    skops = _skops()
    return skops.loads(data, trusted=skops.get_untrusted_types(data=data))


def _skops() -> Any:
    try:
        import skops.io
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "A model with an estimator of its user is written and read with skops: pip install skops, or choose "
            "--model boosting, forest or logistic, which need no further package.",
            name="skops",
        ) from None
    return skops.io

"""Scikit-learn classifier around SEP-C (extra ``sklearn``)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data
from torch import Tensor

from sepc_torch.data.labels import label_codes
from sepc_torch.data.text import printable
from sepc_torch.ellipsoid import DEFAULT_FLOOR
from sepc_torch.model.explanation import Explanation
from sepc_torch.model.sepc import SEPC, Nearest
from sepc_torch.partitioning.fit import partition
from sepc_torch.partitioning.record import Partition, Rest
from sepc_torch.shapes import Array, Float, Int
from sepc_torch.solvers import NATIVE


class SEPClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc] # scikit-learn ships no types
    """Sequential ellipsoidal partitioning classifier, with a trust value for every label.

    ``fit`` covers the points of every class with minimum-volume ellipsoids. A new point gets its label from the
    ellipsoids that contain it and from the training points in them.

    This is the paper's classifier, for reproduction and for tables where its ellipsoids explain a label. It is weak
    where classes overlap in many features, and its trust ranks mistakes worse than a calibrated confidence. It is slow
    on large tables, because a fit compares every class with all other rows, and it takes numbers only. To decide which
    labels of any classifier to accept, use :class:`~sepc_torch.TrustClassifier`.

    Parameters
    ----------
    max_impure : int, default=2
        Number of points of other classes that an ellipsoid may contain; the only parameter to tune.
    rest : {"whole", "partitioned"}, default="whole"
        How a class of more than two is separated from the others: ``"whole"`` covers the class alone,
        ``"partitioned"`` is the paper's one-versus-rest; see :func:`sepc_torch.partition`.
    standardize : bool, default=True
        Divide each feature by its standard deviation before separating the classes. The ellipsoids themselves do not
        depend on the scale.
    nearest : {"euclidean", "mahalanobis"}, default="euclidean"
        Distance that selects the nearest ellipsoid for a point outside every ellipsoid. The paper uses Euclidean
        distance, which is also more accurate on average (``experiments/paper``); Mahalanobis distance is faster.
    solver : str, default="native"
        ``"native"``, or the name of an installed cvxpy solver, which solves the paper's programs as stated.
    floor : float, default=0.001
        Smallest semi-axis of an ellipsoid, in standard deviations of each feature.
    n_jobs : int or None, default=None
        Number of processes, as in joblib; used for more than two classes.

    Attributes
    ----------
    classes_ : ndarray of shape (n_classes,)
        The labels, sorted.
    n_features_in_ : int
        Number of features seen in ``fit``.
    feature_names_in_ : ndarray of shape (n_features,)
        Names of the features, if ``X`` has column names that are all strings.
    partition_ : Partition
        The ellipsoids and their counts; prints as a table.
    sepc_ : SEPC
        The frozen torch module (float64) that predicts; ``sepc_.save(path)`` writes it for use without scikit-learn.

    Notes
    -----
    ``predict`` returns the label of the paper's rules. ``predict_proba`` returns the paper's Bayes posterior in the
    region that decided the label, so ``trust(X)`` is the column of ``predict_proba`` of the predicted label.

    The predicted label is not always the class with the highest probability. The rules give a point in or near an
    ellipsoid the label of that ellipsoid. The posterior counts every training point in the region and weighs each class
    by its share of the training set. Where the two disagree, the trust of the predicted label is low (at most one half
    for two classes), and abstaining is advisable.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> X, y = load_iris(return_X_y=True)
    >>> model = SEPClassifier().fit(X, y)
    >>> model.predict(X[[0, 50, 100]])
    array([0, 1, 2])
    >>> bool((model.trust(X[[0, 50, 100]]) > 0.9).all())
    True
    """

    def __init__(
        self,
        max_impure: int = 2,
        *,
        rest: Rest = "whole",
        standardize: bool = True,
        nearest: Nearest = "euclidean",
        solver: str = NATIVE,
        floor: float = DEFAULT_FLOOR,
        n_jobs: int | None = None,
    ) -> None:
        self.max_impure = max_impure
        self.rest = rest
        self.standardize = standardize
        self.nearest = nearest
        self.solver = solver
        self.floor = floor
        self.n_jobs = n_jobs

    classes_: Array
    n_features_in_: int
    feature_names_in_: Array
    partition_: Partition
    sepc_: SEPC

    def fit(self, X: Any, y: Any) -> SEPClassifier:
        """Fit the ellipsoids to the training points.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features)
            Training points; finite real numbers.
        y : array-like of shape (n_samples,)
            Labels: numbers, strings or booleans; at least two classes.

        Returns
        -------
        self : SEPClassifier
            The fitted classifier.
        """
        # A classifier needs at least two classes, hence two points.
        X, y = validate_data(self, X, y, dtype=np.float64, ensure_min_samples=2)
        check_classification_targets(y)
        if self.nearest not in get_args(Nearest):
            raise ValueError(f"nearest must be one of {', '.join(map(repr, get_args(Nearest)))}, got {self.nearest!r}.")
        found = partition(
            X,
            y,
            max_impure=self.max_impure,
            rest=self.rest,
            solver=self.solver,
            standardize=self.standardize,
            floor=self.floor,
            n_jobs=self.n_jobs,
        )
        names = getattr(self, "feature_names_in_", None)
        self.partition_ = found if names is None else replace(found, feature_names=tuple(names))
        self.sepc_ = SEPC.from_partition(self.partition_, self.nearest, dtype=torch.float64)
        self.classes_ = np.unique(y)
        return self

    def predict(self, X: Any) -> Array:
        """Predict the label of every point by the paper's rules.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features)
            Points.

        Returns
        -------
        y : ndarray of shape (n_samples,)
            Labels.
        """
        z = self._points(X)
        return self.classes_[self.sepc_(z).label.numpy()]

    def predict_proba(self, X: Any) -> Float[Array, "B C"]:
        """Bayes posterior of every class in the region that decided the label.

        The posterior counts the point itself as a point of its predicted label.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features)
            Points.

        Returns
        -------
        proba : ndarray of shape (n_samples, n_classes)
            Probabilities in the order of ``classes_``; every row sums to 1. The Notes of the class explain how they
            relate to ``predict``.
        """
        z = self._points(X)
        return self.sepc_.posterior(z).numpy()

    def trust(self, X: Any, y: Any = None) -> Float[Array, "B"]:
        """Trust in the predicted labels, or in given labels.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features)
            Points.
        y : array-like of shape (n_samples,), default=None
            Labels to evaluate, all of them in ``classes_``; by default the predicted labels.

        Returns
        -------
        trust : ndarray of shape (n_samples,)
            Probability of each label given the training points in its region; higher means more trust.
        """
        z = self._points(X)
        label = None if y is None else torch.from_numpy(self._codes(y, len(z)))
        return self.sepc_(z, label).trust.numpy()

    def explain(self, X: Any, i: int | None = None) -> Explanation | list[Explanation]:
        """Explain predictions: the rule, the ellipsoids, the counts, the arithmetic of the trust, and the features.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features)
            Points.
        i : int, default=None
            Index of the row to explain; by default all rows.

        Returns
        -------
        explanation : Explanation or list of Explanation
            The explanation of row ``i``, or a list with one for each row. ``str()`` gives text for people, ``.details``
            a dictionary for programs.
        """
        z = self._points(X)
        return self.sepc_.explain(z, i)

    def _points(self, X: Any) -> Tensor:
        """Check the points; raise NotFittedError first if the classifier is not fitted."""
        check_is_fitted(self)
        # Copy the points: torch warns about read-only memory, which a DataFrame may return.
        return torch.tensor(validate_data(self, X, reset=False, dtype=np.float64))

    def _codes(self, y: Any, expected: int) -> Int[Array, "B"]:
        """Convert labels to indices into ``classes_``."""
        labels = column_or_1d(y)
        if len(labels) != expected:
            raise ValueError(f"X has {expected} rows and y has {len(labels)} labels; one label per row is needed.")
        codes = label_codes(labels.tolist(), self.classes_.tolist())
        if (codes < 0).any():
            unknown = sorted(map(printable, set(labels[codes < 0].tolist())))
            known = ", ".join(map(printable, self.classes_.tolist()))
            raise ValueError(f"y holds labels that fit did not see: {', '.join(unknown)}. It saw the labels {known}.")
        return codes

"""SEP-C as a scikit-learn classifier (extra ``sklearn``)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data
from torch import Tensor

from sepc_torch.data.arrays import label_codes
from sepc_torch.ellipsoid import DEFAULT_FLOOR
from sepc_torch.model.explanation import Explanation
from sepc_torch.model.sepc import SEPC, Nearest
from sepc_torch.partitioning.fit import partition
from sepc_torch.partitioning.record import Partition
from sepc_torch.shapes import Array, Float, Int
from sepc_torch.solvers import NATIVE


class SEPClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc] # scikit-learn ships no types
    r"""Sequential ellipsoidal partitioning: a label, the rule that gave it, and how far to trust it.

    The points of every class are covered with minimum-volume ellipsoids; a new point gets its label from those that
    hold it and from the training points it shares them with.

    Parameters
    ----------
    max_impure : int, default=2
        How many remaining points of other classes an ellipsoid may hold; the only parameter to tune.
    standardize : bool, default=True
        Separate the classes in standard deviations of each feature. The ellipsoids themselves do not depend on scale.
    nearest : {"euclidean", "mahalanobis"}, default="euclidean"
        How a point outside every ellipsoid finds the nearest one. Euclidean is the paper's way, and the more
        accurate in the mean of ``experiments/nearest.py``; Mahalanobis is the faster.
    solver : str, default="native"
        ``"native"``, or the name of an installed cvxpy solver to run the paper's programs as stated.
    floor : float, default=0.001
        Least semi-axis of an ellipsoid, in standard deviations of each feature.
    n_jobs : int or None, default=None
        Processes for more than two classes, as in joblib.

    Attributes
    ----------
    classes_ : ndarray of shape (n_classes,)
        The labels, sorted.
    n_features_in_ : int
        Number of features seen in ``fit``.
    feature_names_in_ : ndarray of shape (n_features_in_,)
        Their names, where ``X`` came with names that are all strings.
    partition_ : Partition
        The ellipsoids, with their counts; prints as a table.
    sepc_ : SEPC
        The frozen torch module (float64) that predicts; ``sepc_.save(path)`` writes it for use without scikit-learn.

    Notes
    -----
    ``predict`` gives the label of the paper's rules, ``predict_proba`` the paper's Bayes posterior in the region that
    decided, so ``trust(X)`` is the column of ``predict_proba`` that belongs to the predicted label. The two are
    different statements and can differ: a point in or near an ellipsoid gets that ellipsoid's label, while the
    posterior counts every training point in the region and weighs each class by its share of the training set. The
    predicted label is then not the likeliest by ``predict_proba``, and its low trust says so (for two classes, below
    one half): it is a label to abstain from. In five-fold cross-validation of seven data sets they differed for no
    more than one point in twenty, and there the rule was right about twice as often; so ``predict`` keeps to the rule.

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
        standardize: bool = True,
        nearest: Nearest = "euclidean",
        solver: str = NATIVE,
        floor: float = DEFAULT_FLOOR,
        n_jobs: int | None = None,
    ) -> None:
        self.max_impure = max_impure
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
        """Cover the training points with ellipsoids.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features)
            Training points: finite real numbers.
        y : array-like of shape (n_samples,)
            Labels: numbers, strings or booleans, of two classes at least.

        Returns
        -------
        self : SEPClassifier
            The fitted classifier.
        """
        # Two points at least: one has no second class to be told from.
        X, y = validate_data(self, X, y, dtype=np.float64, ensure_min_samples=2)
        check_classification_targets(y)
        if self.nearest not in get_args(Nearest):
            raise ValueError(f"nearest must be one of {', '.join(map(repr, get_args(Nearest)))}, got {self.nearest!r}.")
        found = partition(
            X,
            y,
            max_impure=self.max_impure,
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
        """The label of every point, by the rules.

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
        """The Bayes posterior of every class in the region that decided, the point counted with its predicted label.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features)
            Points.

        Returns
        -------
        proba : ndarray of shape (n_samples, n_classes)
            Probabilities, in the order of ``classes_``; every row sums to 1. See the Notes on how they go with
            ``predict``.
        """
        z = self._points(X)
        return self.sepc_.posterior(z).numpy()

    def trust(self, X: Any, y: Any = None) -> Float[Array, "B"]:
        """How far to trust the predicted labels, or labels given by someone else.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features)
            Points.
        y : array-like of shape (n_samples,), default=None
            Labels to judge, all of them known to the classifier; by default those it predicts.

        Returns
        -------
        trust : ndarray of shape (n_samples,)
            The probability of each label given the training points in its region; higher is safer.
        """
        z = self._points(X)
        label = None if y is None else torch.from_numpy(self._codes(y, len(z)))
        return self.sepc_(z, label).trust.numpy()

    def explain(self, X: Any, i: int | None = None) -> Explanation | list[Explanation]:
        """Why: rule, ellipsoids, counts, arithmetic of the trust, runner-up and features; the decision path.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features)
            Points.
        i : int, default=None
            Which row to explain; by default all of them.

        Returns
        -------
        explanation : Explanation or list of Explanation
            One for row ``i``, or one for each row; ``str()`` is for a person, ``.details`` for a program.
        """
        z = self._points(X)
        return self.sepc_.explain(z, i)

    def _points(self, X: Any) -> Tensor:
        """Checked points; called before any learnt name, so that a classifier without them says so."""
        check_is_fitted(self)
        # A copy: torch takes no memory that it may not write to, as that of a DataFrame.
        return torch.tensor(validate_data(self, X, reset=False, dtype=np.float64))

    def _codes(self, y: Any, expected: int) -> Int[Array, "B"]:
        """Labels as indices into ``classes_``."""
        labels = column_or_1d(y)
        if len(labels) != expected:
            raise ValueError(f"X has {expected} rows and y has {len(labels)} labels; one label per row is needed.")
        codes = label_codes(labels.tolist(), self.classes_.tolist())
        if (codes < 0).any():
            unknown = sorted(map(str, set(labels[codes < 0].tolist())))
            known = ", ".join(map(str, self.classes_.tolist()))
            raise ValueError(f"y holds labels that fit did not see: {', '.join(unknown)}. It saw {known}.")
        return codes

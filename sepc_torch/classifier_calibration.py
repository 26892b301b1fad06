"""Fit of a scikit-learn classifier with a trust head, the head's calibration and its promise (extra ``sklearn``)."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.base import clone
from sklearn.model_selection import check_cv
from sklearn.utils import _safe_indexing
from sklearn.utils.validation import _check_method_params

from sepc_torch.classifier_embedding import ClassifierEmbedding
from sepc_torch.head.calibration_set import LEAST_CALIBRATION
from sepc_torch.head.cross_calibration import Fold, calibrate_out_of_fold
from sepc_torch.head.defaults import default_dim
from sepc_torch.head.label_calibration import Acceptance
from sepc_torch.head.trust_head import TrustHead
from sepc_torch.shapes import Array, Int

# Dimensions that the head of a table may be reduced to, so that its smallest class has twice as many rows. Classes that
# are smaller yet do not decide for all others; the head then warns of them.
_LEAST_DIM = 8


class FittedClassifier(NamedTuple):
    """A fitted classifier, the embedding of its rows, and a trust head on the embedding.

    ``shortfall`` says why the head is not calibrated; None if it is.
    """

    estimator: Any
    embedding: ClassifierEmbedding
    head: TrustHead
    shortfall: str | None


class PromisedAcceptance(NamedTuple):
    """The threshold of a head, and why its promise is not the wanted one; None if it is."""

    acceptance: Acceptance
    shortfall: str | None


@dataclass(frozen=True)
class ClassifierTraining:
    """A classifier and the rows to fit it to.

    Attributes:
        estimator: The classifier; clones of it are fitted.
        embed: The numbers that the head sees, as in :class:`~sepc_torch.classifier_embedding.ClassifierEmbedding`.
        X: Training rows, in any form that the estimator takes.
        y: Labels.
        params: Parameters of the estimator's ``fit``.
        keep_points: Whether the head keeps its training points.

    >>> from sklearn.datasets import load_iris
    >>> from sklearn.linear_model import LogisticRegression
    >>> X, y = load_iris(return_X_y=True)
    >>> training = ClassifierTraining(LogisticRegression(max_iter=500), None, X, y, {}, keep_points=False)
    >>> fitted = training.calibrate_with_part(0.4, np.random.RandomState(0))
    >>> fitted.shortfall is None, fitted.estimator.n_features_in_
    (True, 4)
    >>> keep_promise(fitted.head, risk=None, flag_rate=0.2, delta=0.05, rows_per_point=2.5).shortfall is None
    True
    """

    estimator: Any
    embed: Any
    X: Any
    y: Array
    params: dict[str, Any]
    keep_points: bool

    def calibrate_with_part(self, share: float, random: Any) -> FittedClassifier:
        """Fit to some rows and calibrate with the others, a share of all; fit to all rows if these are too few."""
        y = self.y
        order = random.permutation(len(y))
        held = round(share * len(y))
        fitted, calibration = order[held:], order[:held]
        # The estimator must see every class.
        lacking = ~np.isin(y[calibration], y[fitted])
        fitted, calibration = np.append(fitted, calibration[lacking]), calibration[~lacking]
        if len(calibration) < LEAST_CALIBRATION:
            more = math.ceil((LEAST_CALIBRATION - len(calibration)) / share)
            left = f"calibration_size={share:g} leaves {len(calibration)} of {len(y)}"
            return _uncalibrated(self._fit(None, self.keep_points), f"{left}, about {more} rows too few")
        found = self._fit(fitted, self.keep_points)
        z, logits = found.embedding(found.estimator, _safe_indexing(self.X, calibration))
        found.head.calibrate(z, y[calibration], logits, seed=int(random.randint(2**31)))
        return found

    def calibrate_with_folds(self, cv: Any, random: Any) -> FittedClassifier:
        """Fit to all rows, and calibrate with the evidence of classifiers and heads that each leave a fold out."""
        X, y = self.X, self.y
        found = self._fit(None, self.keep_points)
        if len(y) < LEAST_CALIBRATION or np.unique(y, return_counts=True)[1].min() < 2:
            return _uncalibrated(found, f"with cv, every class needs two rows, and {len(y)} rows are given")
        folds = []
        for fitted, left_out in check_cv(cv, y, classifier=True).split(X, y):
            if set(y[fitted].tolist()) != set(y.tolist()):
                return _uncalibrated(found, "a fold of cv lacks a class: a class has fewer rows than there are folds")
            fold = self._fit(fitted, keep_points=False)
            z, logits = fold.embedding(fold.estimator, _safe_indexing(X, left_out))
            folds.append(Fold(fold.head, torch.from_numpy(z), y[left_out], torch.from_numpy(logits)))
        calibrate_out_of_fold(found.head, folds, seed=int(random.randint(2**31)))
        return found

    def _fit(self, rows: Int[Array, "n"] | None, keep_points: bool) -> FittedClassifier:
        """A clone of the estimator and a head, fitted to some rows, or to all for None."""
        X, y = (self.X, self.y) if rows is None else (_safe_indexing(self.X, rows), self.y[rows])
        params = _check_method_params(self.X, self.params, indices=rows)
        estimator = clone(self.estimator).fit(X, y, **params)
        embedding = ClassifierEmbedding.fit(self.embed, estimator, X)
        z = embedding.embed(estimator, X)
        # Some rows of a network can be zero, which have no direction.
        unit_length = embedding.features is None and bool(z.any(axis=1).all())
        sizes = np.unique(y, return_counts=True)[1]
        least = int(sizes.min()) // 2
        head = TrustHead.fit(
            *(z, y),
            dim=min(least, default_dim(sizes, z.shape[1])) if least >= _LEAST_DIM else None,
            normalize="l2" if unit_length else None,
            nan_policy="flag",
            progress=False,
            classes=estimator.classes_,
            keep_points=keep_points,
        )
        return FittedClassifier(estimator, embedding, head, None)


def _uncalibrated(fitted: FittedClassifier, reason: str) -> FittedClassifier:
    return fitted._replace(
        shortfall=f"The head is not calibrated and accepts nothing: {reason}; {LEAST_CALIBRATION} calibration rows are "
        "needed. Give more rows, a larger calibration_size, or cv."
    )


def keep_promise(
    head: TrustHead, *, risk: float | None, flag_rate: float, delta: float, rows_per_point: float
) -> PromisedAcceptance:
    """Set the threshold of a calibrated head, at the wanted promise or at the nearest one that its rows allow.

    Args:
        head: The head.
        risk: Largest share of wrong labels among the accepted ones; None: ``flag_rate`` decides.
        flag_rate: Share of refused rows; a larger one is promised if there are too few calibration rows.
        delta: Probability that the promise of ``risk`` may fail.
        rows_per_point: Training rows that must be given for one more calibration row.
    """
    assert head.calibration is not None
    labels = head.calibration.network
    if risk is not None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The head accepts nothing", UserWarning)
            acceptance = head.accept_at(risk=risk, delta=delta)
        if acceptance.found:
            return PromisedAcceptance(acceptance, None)
        limits = labels.shortfall(risk, delta, rows_per_point, "rows of X")
        return PromisedAcceptance(acceptance, f"The head accepts nothing: {limits}")
    least = labels.least_flag_rate(flag_rate)
    acceptance = head.accept_at(flag_rate=least)
    if least <= flag_rate:
        return PromisedAcceptance(acceptance, None)
    return PromisedAcceptance(
        acceptance,
        f"{labels.flag_rate_shortfall(flag_rate, rows_per_point, 'rows of X')} Until then up to {least:.3g} of rows "
        f"like the calibration rows are refused; flag_rate={least:.3g} says so without this warning.",
    )

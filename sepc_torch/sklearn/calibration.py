"""Fit of a scikit-learn classifier with a trust head, the head's calibration and its promise (extra ``sklearn``)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.base import clone
from sklearn.model_selection import check_cv
from sklearn.utils import _safe_indexing
from sklearn.utils.validation import _check_method_params
from torch import Tensor

from sepc_torch.data.table_encoding import TableEncoding
from sepc_torch.head.calibration.calibration import LEAST_CALIBRATION, Calibration, CalibrationSet, calibration_set
from sepc_torch.head.calibration.label_calibration import Acceptance
from sepc_torch.head.evidence.evidence import EvidenceValues
from sepc_torch.head.promises.costs import CostAcceptance
from sepc_torch.head.promises.groups import GroupAcceptance
from sepc_torch.head.reading.defaults import default_dim
from sepc_torch.head.trust_head import TrustHead
from sepc_torch.model.queries import class_codes, points_as_tensor
from sepc_torch.shapes import Array, Float, Int
from sepc_torch.sklearn.embedding import ClassifierEmbedding

# Dimensions that the head of a table may be reduced to, so that its smallest class has twice as many rows. Classes that
# are smaller yet do not decide for all others; the head then warns of them.
_LEAST_DIM = 8


class FittedClassifier(NamedTuple):
    """A fitted classifier, the embedding of its rows, and a trust head on the embedding.

    ``shortfall`` says why the head is not calibrated; None if it is. ``rows`` are the positions of the calibration rows
    among those that were given to calibrate, in the order in which the head has them.
    """

    estimator: Any
    embedding: ClassifierEmbedding
    head: TrustHead
    shortfall: str | None
    rows: Int[Array, "M"]


class Wish(NamedTuple):
    """The promise to ask a head for; the fields are the parameters of :class:`~sepc_torch.TrustClassifier`."""

    risk: float | None = None
    flag_rate: float = 0.05
    delta: float = 0.05
    by: str | None = None
    costs: Any = None
    review: float | None = None
    average: bool = False


class PromisedAcceptance(NamedTuple):
    """The threshold of a head, and why its promise is not the wanted one; None if it is."""

    acceptance: Acceptance | GroupAcceptance | CostAcceptance
    shortfall: str | None


@dataclass(frozen=True)
class ClassifierTraining:
    """A classifier and the rows to fit it to.

    Attributes:
        estimator: The classifier; clones of it are fitted.
        embed: The numbers that the head sees, as in :class:`~sepc_torch.sklearn.embedding.ClassifierEmbedding`.
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
    >>> keep_promise(fitted.head, Wish(flag_rate=0.2), None, 2.5).shortfall is None
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
        return found._replace(rows=calibration)

    def calibrate_with_rows(self, X: Any, y: Array, random: Any) -> FittedClassifier:
        """Fit to all rows, and calibrate with other rows, unless these are too few."""
        found = self._fit(None, self.keep_points)
        if len(y) < LEAST_CALIBRATION:
            return _uncalibrated(found, f"X_calibration has {len(y)} rows")
        z, logits = found.embedding(found.estimator, X)
        found.head.calibrate(z, y, logits, seed=int(random.randint(2**31)))
        return found._replace(rows=np.arange(len(y)))

    def calibrate_with_folds(self, cv: Any, random: Any) -> FittedClassifier:
        """Fit to all rows, and calibrate with the evidence of classifiers and heads that each leave a fold out."""
        X, y = self.X, self.y
        found = self._fit(None, self.keep_points)
        if len(y) < LEAST_CALIBRATION or np.unique(y, return_counts=True)[1].min() < 2:
            return _uncalibrated(found, f"with cv, every class needs two rows, and {len(y)} rows are given")
        folds, final, rows = [], torch.from_numpy(found.embedding.embed(found.estimator, X)), []
        for fitted, left_out in check_cv(cv, y, classifier=True).split(X, y):
            if set(y[fitted].tolist()) != set(y.tolist()):
                return _uncalibrated(found, "a fold of cv lacks a class: a class has fewer rows than there are folds")
            fold = self._fit(fitted, keep_points=False)
            z, logits = fold.embedding(fold.estimator, _safe_indexing(X, left_out))
            folds.append(Fold(fold.head, torch.from_numpy(z), final[left_out], y[left_out], torch.from_numpy(logits)))
            rows.append(left_out)
        calibrate_out_of_fold(found.head, folds, seed=int(random.randint(2**31)))
        return found._replace(rows=np.concatenate(rows))

    def _fit(self, rows: Int[Array, "n"] | None, keep_points: bool) -> FittedClassifier:
        """A clone of the estimator and a head, fitted to some rows, or to all for None."""
        X, y = (self.X, self.y) if rows is None else (_safe_indexing(self.X, rows), self.y[rows])
        params = _check_method_params(self.X, self.params, indices=rows)
        estimator = clone(self.estimator).fit(X, y, **params)
        embedding = ClassifierEmbedding.fit(self.embed, estimator, X)
        z = embedding.embed(estimator, X)
        # Some rows of a network can be zero, which have no direction. Log probabilities are no directions.
        unit_length = self.embed is not None and bool(z.any(axis=1).all())
        sizes = np.unique(y, return_counts=True)[1]
        least = int(sizes.min()) // 2
        head = TrustHead.fit(
            *(z, y),
            dim=min(least, default_dim(sizes, z.shape[1])) if least >= _LEAST_DIM else None,
            normalize="l2" if unit_length else None,
            nan_policy="flag",
            progress=False,
            classes=estimator.classes_,
            ids=np.arange(len(self.y))[slice(None) if rows is None else rows],
            keep_points=keep_points,
            encoding=embedding.features if isinstance(embedding.features, TableEncoding) else None,
        )
        return FittedClassifier(estimator, embedding, head, None, np.arange(0))


def _uncalibrated(fitted: FittedClassifier, reason: str) -> FittedClassifier:
    return fitted._replace(
        shortfall=f"The head is not calibrated and accepts nothing: {reason}; {LEAST_CALIBRATION} calibration rows are "
        "needed. Give more rows, a larger calibration_size, or cv."
    )


def keep_promise(
    head: TrustHead, wish: Wish, groups: Int[Array, "M"] | None, rows_per_point: float, rows: str = "rows of X"
) -> PromisedAcceptance:
    """Set the threshold of a calibrated head, at the wanted promise or at the nearest one that its rows allow.

    A flag rate is replaced by the smallest one that the rows can promise. Any other promise that cannot be kept leaves
    a head that accepts nothing, or nothing in some groups.

    Args:
        head: The head.
        wish: The wanted promise.
        groups: Given groups of the calibration points, as indices from 0, or None.
        rows_per_point: Rows that must be given for one more calibration row.
        rows: What these rows are called.
    """
    assert head.calibration is not None
    labels, risk = head.calibration.network, wish.risk
    if wish.costs is not None:
        assert wish.review is not None
        cheapest = head.accept_at(costs=wish.costs, review=wish.review, delta=wish.delta)
        return PromisedAcceptance(cheapest, None)
    if risk is None:
        least = labels.least_flag_rate(wish.flag_rate)
        acceptance = head.accept_at(flag_rate=least)
        if least <= wish.flag_rate:
            return PromisedAcceptance(acceptance, None)
        return PromisedAcceptance(
            acceptance,
            f"{labels.flag_rate_shortfall(wish.flag_rate, rows_per_point, rows)} Until then up to {least:.3g} of rows "
            f"like the calibration rows are refused; flag_rate={least:.3g} says so without this warning.",
        )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The head accepts nothing|The risk .* cannot be promised", UserWarning)
        if wish.by is not None:
            by, known = (wish.by, True) if groups is None else (groups, wish.by == "group")
            table = head.accept_at(risk=risk, delta=wish.delta, by=by, known=known)
            refused = sum(not row.found for row in table.groups)
            text = (
                f"The risk {risk:g} cannot be promised in {refused} of {len(table.groups)} groups, of which nothing is "
                f"accepted. For example, {table.limits} A calibration point takes about {rows_per_point:.3g} {rows}. "
                "Print acceptance_ for a table of the groups."
            )
            return PromisedAcceptance(table, None if table.found else text)
        acceptance = head.accept_at(risk=risk, delta=wish.delta, average=wish.average)
    if acceptance.found:
        return PromisedAcceptance(acceptance, None)
    limits = labels.shortfall(risk, wish.delta, rows_per_point, rows)
    return PromisedAcceptance(acceptance, f"The head accepts nothing: {limits}")


class Fold(NamedTuple):
    """A head that was fitted without some rows, with the embeddings, labels and logits of these rows.

    ``z`` are the embeddings of the network of the fold, ``final`` those of the final network.
    """

    head: TrustHead
    z: Float[Tensor, "n D"]
    final: Float[Tensor, "n E"]
    labels: Any
    logits: Float[Tensor, "n C"]


@torch.inference_mode(False)  # the new buffers outlive the call
@torch.no_grad()
def calibrate_out_of_fold(head: TrustHead, folds: Sequence[Fold], *, seed: int = 0) -> TrustHead:
    """Calibrate a head fitted on all rows with the evidence that the heads of folds give for the rows they left out.

    The folds' heads and networks differ from the final ones, so out-of-fold scores are not exchangeable with those of
    new rows. What holds: thresholds, p-values and promises are estimates (``head.promise.exact`` is False). Scores of
    new rows come from a head with more training rows: it is typically better than those of the folds, so errors and
    flag rates are typically below the promised ones. Predicted labels are those of the folds' networks; regions are
    those of the final head. :class:`~sepc_torch.DriftMonitor` needs exchangeable scores and refuses such a head.

    Args:
        head: The head fitted on all rows, with the classes of the folds' heads in the same order.
        folds: The folds; together at least 20 rows.
        seed: Seed of the random choice of the ranked rows.

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> y = np.arange(120) % 2
    >>> z = rng.normal(size=(120, 4)) + 3.0 * y[:, None]
    >>> odds = torch.tensor(np.stack([-z.sum(1), z.sum(1) - 12.0], axis=1))
    >>> folds = []
    >>> for k in range(3):
    ...     out = np.arange(120) % 3 == k
    ...     fitted = TrustHead.fit(z[~out], y[~out], normalize=None)
    ...     folds.append(Fold(fitted, torch.tensor(z[out]), torch.tensor(z[out]), y[out], odds[torch.tensor(out)]))
    >>> head = calibrate_out_of_fold(TrustHead.fit(z, y, normalize=None), folds)
    >>> head.accept_at(flag_rate=0.1).points, head.promise.exact
    (80, False)
    """
    evidence = head.evidence
    if evidence is None:
        raise RuntimeError("This head has no evidence to calibrate; make it with TrustHead.fit.")
    rows = sum(len(fold.z) for fold in folds)
    if rows < LEAST_CALIBRATION:
        raise ValueError(f"{rows} points are too few to calibrate with; pass at least {LEAST_CALIBRATION}.")
    sets, codes = zip(*(_evidence_of(fold, head.classes) for fold in folds), strict=True)
    values = {name: _joined([found.values[name] for found in sets]) for name in sets[0].values}
    right = {name: torch.cat([found.right[name] for found in sets]) for name in sets[0].right}
    labels = {name: torch.cat([found.label[name] for found in sets]) for name in sets[0].label}
    where, dtype = head.sepc.codes.device, head.projection.shift.dtype
    final = points_as_tensor(torch.cat([fold.final for fold in folds]), None, where, dtype)
    region = head.sepc(head.projection(final)).nearest
    scores = {name: torch.cat([found.scores[name].double() for found in sets]) for name in sets[0].scores}
    calibration = Calibration(evidence.support_names, len(evidence.kinds))
    calibration.fit(values, right, torch.cat(codes), labels, region, scores, None, seed)
    return head._adopt(calibration.to(head.sepc.codes.device), exact=False, stacklevel=5)


def _evidence_of(fold: Fold, classes: list[Any]) -> tuple[CalibrationSet, Tensor]:
    """The evidence of a fold's head for the rows that it left out, and their classes."""
    assert fold.head.evidence is not None
    device = fold.head.sepc.codes.device
    z = points_as_tensor(fold.z, None, device, fold.head.projection.shift.dtype)
    codes = class_codes(fold.labels, classes, len(z), device)
    own = fold.head.sepc(fold.head.projection(z)).label
    return calibration_set(fold.head.evidence, z, codes, own, fold.logits, len(classes)), codes


def _joined(parts: list[EvidenceValues]) -> EvidenceValues:
    return EvidenceValues(*(torch.cat(columns) for columns in zip(*parts, strict=True)))

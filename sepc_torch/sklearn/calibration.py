"""Fit of a scikit-learn classifier with a trust head, the head's calibration and its promise (extra ``sklearn``)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.base import clone
from sklearn.model_selection import StratifiedKFold, check_cv
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
# Folds of the training rows that fit the scores, up to this number of calibration rows: a fifth of more rows does the
# same, without further fits, and costs little of what is accepted.
_SCORE_FOLDS, _FEW_CALIBRATION = 3, 5000


class FittedClassifier(NamedTuple):
    """A fitted classifier, the embedding of its rows, and a trust head on the embedding.

    ``shortfall`` says why the head is not calibrated; None if it is. ``rows`` are the positions of the head's
    calibration points in ``X``, or behind it in ``X_calibration``.
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

    @property
    def for_rate(self) -> bool:
        """Whether the promise is a flag rate."""
        return self.risk is None and self.costs is None


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
        score_folds: Folds of the training rows that fit the scores, so that all calibration rows are ranked; 0 for
            none, None to choose by the number of calibration rows.

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
    score_folds: int | None = None

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
        new, found = _safe_indexing(self.X, calibration), self._fit(fitted, self.keep_points)
        return self._calibrate(found, fitted, new, y[calibration], calibration, random)

    def calibrate_with_rows(self, X: Any, y: Array, random: Any) -> FittedClassifier:
        """Fit to all rows, and calibrate with other rows, unless these are too few."""
        found, fitted = self._fit(None, self.keep_points), np.arange(len(self.y))
        if len(y) < LEAST_CALIBRATION:
            return _uncalibrated(found, f"X_calibration has {len(y)} rows")
        return self._calibrate(found, fitted, X, y, len(fitted) + np.arange(len(y)), random)

    def calibrate_with_folds(self, cv: Any, random: Any) -> FittedClassifier:
        """Fit to all rows, and calibrate with the evidence of classifiers and heads that each leave a fold out."""
        X, y = self.X, self.y
        found = self._fit(None, self.keep_points)
        if len(y) < LEAST_CALIBRATION or np.unique(y, return_counts=True)[1].min() < 2:
            return _uncalibrated(found, f"with cv, every class needs two rows, and {len(y)} rows are given")
        splits = list(check_cv(cv, y, classifier=True).split(X, y))
        if any(set(y[fitted].tolist()) != set(y.tolist()) for fitted, _ in splits):
            return _uncalibrated(found, "a fold of cv lacks a class: a class has fewer rows than there are folds")
        given = _as_final(found.head, y, *found.embedding(found.estimator, X))
        folds, rows = zip(*self._leave_out(given, np.arange(len(y)), splits), strict=True)
        calibrate_out_of_fold(found.head, folds, seed=int(random.randint(2**31)))
        return found._replace(rows=np.concatenate(rows))

    def _calibrate(
        self, found: FittedClassifier, fitted: Int[Array, "n"], X: Any, y: Array, rows: Int[Array, "m"], random: Any
    ) -> FittedClassifier:
        """Calibrate with rows that trained nothing; folds of the training rows fit the scores if that pays.

        Args:
            found: The classifier and the head, fitted to the rows ``fitted``.
            fitted: Positions of the training rows.
            X: Calibration rows.
            y: Their labels.
            rows: Their positions.
            random: Source of random numbers.
        """
        z, logits = found.embedding(found.estimator, X)
        count = self.score_folds
        if count is None:
            count = _SCORE_FOLDS if len(y) < _FEW_CALIBRATION else 0
        folds: list[Fold] = []
        if count and np.unique(self.y[fitted], return_counts=True)[1].min() >= count:
            trained = found.embedding(found.estimator, _safe_indexing(self.X, fitted))
            given = _as_final(found.head, self.y[fitted], *trained)
            splitter = StratifiedKFold(count, shuffle=True, random_state=int(random.randint(2**31)))
            for fold, left_out in self._leave_out(given, fitted, splitter.split(fitted, given.labels)):
                if not folds and torch.equal(fold.logits, given.logits[torch.from_numpy(np.isin(fitted, left_out))]):
                    break  # the classifier was not fitted again, so its logits are not out of fold
                folds.append(fold)
                rows = np.insert(rows, len(rows) - len(y), left_out)
        seed = int(random.randint(2**31))
        if folds:
            calibrate_out_of_fold(found.head, folds, _as_final(found.head, y, z, logits), seed=seed)
        else:
            found.head.calibrate(z, y, logits, seed=seed)
        return found._replace(rows=rows)

    def _leave_out(
        self, given: Fold, rows: Int[Array, "n"], splits: Iterable[tuple[Array, Array]]
    ) -> Iterator[tuple[Fold, Int[Array, "m"]]]:
        """The left-out rows of each fold as the classifier and head of the others see them, with their positions."""
        for fitted, left_out in splits:
            fold = self._fit(rows[fitted], keep_points=False, like=given.head)
            z, logits = fold.embedding(fold.estimator, _safe_indexing(self.X, rows[left_out]))
            points = torch.from_numpy(z), given.final[left_out], given.labels[left_out], torch.from_numpy(logits)
            yield Fold(fold.head, *points), rows[left_out]

    def _fit(self, rows: Int[Array, "n"] | None, keep_points: bool, like: TrustHead | None = None) -> FittedClassifier:
        """A clone of the estimator and a head, fitted to some rows, or to all for None.

        The head has as many dimensions as another one if its classes allow: distances of both are then comparable.
        """
        X, y = (self.X, self.y) if rows is None else (_safe_indexing(self.X, rows), self.y[rows])
        params = _check_method_params(self.X, self.params, indices=rows)
        estimator = clone(self.estimator).fit(X, y, **params)
        embedding = ClassifierEmbedding.fit(self.embed, estimator, X)
        z = embedding.embed(estimator, X)
        # Some rows of a network can be zero, which have no direction. Log probabilities are no directions.
        unit_length = self.embed is not None and bool(z.any(axis=1).all())
        sizes = np.unique(y, return_counts=True)[1]
        least = int(sizes.min()) // 2
        dim = min(least, default_dim(sizes, z.shape[1])) if least >= _LEAST_DIM else None
        if like is not None and (wanted := like.sepc.bank.centers.shape[1]) <= min(sizes.min() - 1, z.shape[1]):
            dim = wanted
        with warnings.catch_warnings():
            if like is not None:  # which was fitted to more rows, and warned if these are few
                warnings.filterwarnings("ignore", "Classes with fewer than", UserWarning)
            head = TrustHead.fit(
                *(z, y),
                dim=dim,
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


def _as_final(head: TrustHead, labels: Array, z: Float[Array, "n D"], logits: Float[Array, "n C"]) -> Fold:
    """Rows as the final head and classifier see them."""
    points = torch.from_numpy(z)
    return Fold(head, points, points, labels, torch.from_numpy(logits))


@torch.inference_mode(False)  # the new buffers outlive the call
@torch.no_grad()
def calibrate_out_of_fold(
    head: TrustHead, folds: Sequence[Fold], new: Fold | None = None, *, seed: int = 0
) -> TrustHead:
    """Calibrate a head with the evidence that the heads of folds of its rows give for the rows they left out.

    With ``new`` rows, which trained nothing, the folds only fit the scores, and all new rows are ranked. The scores are
    functions that do not depend on the new rows, so these are exchangeable with rows drawn like them: p-values and
    promises are exact, as after :meth:`~sepc_torch.TrustHead.calibrate`.

    Without new rows, a part of the folds' rows is ranked. The folds' heads and networks differ from the final ones, so
    out-of-fold scores are not exchangeable with those of new rows. What holds: thresholds, p-values and promises are
    estimates (``head.promise.exact`` is False). Scores of new rows come from a head with more training rows: it is
    typically better than those of the folds, so errors and flag rates are typically below the promised ones. Predicted
    labels are those of the folds' networks; regions are those of the final head. :class:`~sepc_torch.DriftMonitor`
    needs exchangeable scores and refuses such a head.

    Args:
        head: The head fitted on all rows, with the classes of the folds' heads in the same order.
        folds: The folds; together at least 20 rows.
        new: The new rows with ``head`` as their head, or None.
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
    parts = [*folds, *([] if new is None else [new])]
    sets, codes = zip(*(_evidence_of(part, head.classes) for part in parts), strict=True)
    values = {name: _joined([found.values[name] for found in sets]) for name in sets[0].values}
    right = {name: torch.cat([found.right[name] for found in sets]) for name in sets[0].right}
    labels = {name: torch.cat([found.label[name] for found in sets]) for name in sets[0].label}
    where, dtype = head.sepc.codes.device, head.projection.shift.dtype
    final = points_as_tensor(torch.cat([part.final for part in parts]), None, where, dtype)
    region = head.sepc(head.projection(final)).nearest
    scores = {name: torch.cat([found.scores[name].double() for found in sets]) for name in sets[0].scores}
    calibration = Calibration(evidence.support_names, len(evidence.kinds))
    ranked = None if new is None else torch.arange(rows + len(new.z)) >= rows
    calibration.fit(values, right, torch.cat(codes), labels, region, scores, None, seed, ranked=ranked)
    return head._adopt(calibration.to(head.sepc.codes.device), exact=new is not None)


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

r"""Rows whose label the rest of the data contradict, ranked, with a false discovery rate.

Every row is scored by models that were fitted without it. Four sources each give evidence :math:`e_{jc}` for every
class c of a row: Student's t densities of the classes (:mod:`sepc_torch.head.evidence.densities`), the share of the
class among the nearest rows, its share by linear regression, and the network's logits if they are given. Evidence is
the log share of a class, and for densities and logits, whose shares are often too extreme, also asinh of their log
odds; for linear regression it is the share itself. The evidence is pooled:

.. math:: s_c = \mathrm{softmax}_c \sum_j w_j e_{jc}, \qquad
    P(\text{label } y \mid z) = (1 - \varepsilon) s_y + \varepsilon \frac{1 - s_y}{C - 1}.

The weights :math:`w_j \ge 0` maximise the likelihood of the given labels. The share :math:`\varepsilon` of wrong labels
is the largest one whose log-likelihood is within two units of the maximum: in well separated classes the likelihood can
hardly tell wrong labels from a soft border, and the most likely share is often zero. The softmax :math:`s` is then the
distribution of the right label: the second term accounts for the wrong ones.
A second round fits densities, neighbours and regression without the rows that the first round found more likely wrong
than right.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sepc_torch.data.arrays import numeric_points, rows_per_chunk
from sepc_torch.data.labels import label_array
from sepc_torch.data.options import check_count
from sepc_torch.head.evidence.densities import fit_densities
from sepc_torch.head.promises.conformal import check_share
from sepc_torch.head.reading.projection import fit_projection
from sepc_torch.shapes import Array, Bool, Float, Int

# Candidate penalties, as shares of the largest eigenvalue: from hardly any to almost only the class shares.
_PENALTIES = 10.0 ** np.arange(-6, 1)
# Number of nearest rows that vote: enough to outvote a wrong label, few enough to be near.
_NEIGHBOURS = 10
# Largest number of directions of the densities, as in a trust head.
_MAX_DIRECTIONS = 64
# Bound of the weights, and of the share of wrong labels: above one half the labels would say nothing.
_MAX_WEIGHT, _MAX_WRONG = 20.0, 0.5
# Bound of log shares: a masked class (logit -inf) has none.
_LEAST_LOG_SHARE = -60.0
# Loss of log-likelihood that the estimated share of wrong labels may have: an interval of about 95 %.
_LIKELIHOOD = 2.0
# Least share of wrong labels: one in ten thousand keeps the likelihood of a contradicted label finite.
_LEAST_WRONG = 1e-4


def ridge_shares(
    points: Float[Array, "N D"], codes: Int[Array, "N"], classes: int, z: Float[Array, "B D"]
) -> Float[Array, "B C"]:
    r"""Estimated shares of the classes at new points, by linear regression of the indicators of the classes.

    :math:`\hat p(z) = \bar y + (X^\top X + a I)^{-1} X^\top Y \cdot (z - \bar x)`, cut to [0, 1], with centred points X
    and indicators Y. The penalty a minimises the mean square of the leave-one-out errors
    :math:`(y_i - \hat y_i) / (1 - h_i)`, where :math:`h_i` is the leverage of point i.

    Args:
        points: Points with known classes.
        codes: Their classes, as indices from 0.
        classes: Number of classes.
        z: New points.

    >>> points = np.array([[0.0], [1.0], [10.0], [11.0]])
    >>> ridge_shares(points, np.array([0, 0, 1, 1]), 2, np.array([[0.5], [5.5], [99.0]])).round(1)
    array([[1. , 0. ],
           [0.5, 0.5],
           [0. , 1. ]])
    """
    centre, indicators = points.mean(axis=0), np.eye(classes)[codes]
    shares = indicators.mean(axis=0)
    centred, target = points - centre, indicators - shares
    values, vectors = np.linalg.eigh(centred.T @ centred)
    values, rotated = np.maximum(values, 0.0), centred @ vectors
    moments = rotated.T @ target
    # Equal points have no direction; any penalty then gives the class shares.
    penalties = _PENALTIES * (values[-1] if values[-1] > 0 else 1.0)
    errors = []
    for penalty in penalties:
        leverage = (rotated**2 / (values + penalty)).sum(axis=1) + 1.0 / len(points)
        residual = target - rotated @ (moments / (values + penalty)[:, None])
        # A leverage of one, up to rounding, fits its own point whatever the class is: it counts as a large error.
        errors.append(float(((residual / np.maximum(1.0 - leverage, 1e-9)[:, None]) ** 2).mean()))
    weights = vectors @ (moments / (values + penalties[int(np.argmin(errors))])[:, None])
    return np.clip(shares + (z - centre) @ weights, 0.0, 1.0)


class SuspiciousLabels(NamedTuple):
    """Rows by how far the rest of the data contradict their label; every array is in the order of the rows.

    Attributes:
        order: Rows from the most to the least suspicious.
        wrong: Estimated probability that the label of each row is wrong.
        suggested: The most likely label of each row.
        p_value: Probability that a right label of the row would be at most as likely as the given one.
        adjusted: Adjusted p-value (Benjamini and Hochberg): the least false discovery rate at which the row is found.
        found: Whether ``adjusted`` is at most ``fdr``; without ``fdr``, whether ``wrong`` is above one half.
        ids: The ids of the rows; their positions by default.
        share: Largest share of wrong labels that the data allow, up to two units of log-likelihood.
        weights: Weight of every source of evidence.
    """

    order: Int[Array, "N"]
    wrong: Float[Array, "N"]
    suggested: Array
    p_value: Float[Array, "N"]
    adjusted: Float[Array, "N"]
    found: Bool[Array, "N"]
    ids: Array
    share: float
    weights: dict[str, float]

    def __repr__(self) -> str:
        found, rows = int(self.found.sum()), len(self.found)
        return f"SuspiciousLabels({found} of {rows} rows found, share={self.share:.3g}, most suspicious first in order)"

    @property
    def found_ids(self) -> Array:
        """Ids of the found rows, the most suspicious first."""
        return self.ids[self.order[self.found[self.order]]]


def suspicious_labels(
    z: Any,
    y: Any,
    logits: Any = None,
    *,
    folds: int = 5,
    fdr: float | None = None,
    ids: Any = None,
    normalize: str | None = "l2",
    seed: int = 0,
) -> SuspiciousLabels:
    r"""Rank the rows whose label the rest of the data contradict.

    False discovery rate: if the labels of the rows are right with the probabilities s given the embeddings, the
    p-value :math:`p = \sum_{c: s_c \le s_y} s_c` of a right label y satisfies :math:`P(p \le u) \le u`: the labels c
    with :math:`p \le u` are the least likely ones, with total probability at most u. Given the embeddings, labels of
    different rows are independent, and so are their p-values, up to the few fitted parameters. Benjamini and Hochberg
    (1995) then estimate the expected share of right labels among the found rows as at most ``fdr``. This is an estimate
    by the model s and no promise: a right label of an unusual row counts against it. ``order`` ranks all rows in any
    case.

    Args:
        z: (N, D) embeddings, or features of a table with ``normalize="standardize"``.
        y: (N,) labels, some of them possibly wrong; every class needs at least ``folds`` rows.
        logits: (N, C) logits of a network for rows that it was **not** trained on (for example out-of-fold), with
            classes in sorted order; None without a network. Logits of training rows repeat wrong labels.
        folds: Number of folds.
        fdr: The estimated share of right labels among the found rows that is allowed; None to find rows that are more
            likely wrong than right.
        ids: (N,) names of the rows.
        normalize: ``"l2"`` compares directions of embeddings, ``"standardize"`` features in standard deviations,
            ``None`` embeddings as they are.
        seed: Seed of the folds.

    >>> rng = np.random.default_rng(0)
    >>> y = np.arange(200) % 2
    >>> z = rng.normal(size=(200, 2)) + 6.0 * y[:, None]
    >>> y[[3, 8]] = [0, 1]  # wrong labels
    >>> found = suspicious_labels(z, y, normalize=None, fdr=0.1)
    >>> sorted(found.found_ids.tolist()), found.suggested[[3, 8]].tolist()
    ([3, 8], [1, 0])
    """
    if normalize not in ("l2", "standardize", None):
        raise ValueError(f"normalize must be 'l2', 'standardize' or None, got {normalize!r}.")
    folds = check_count(folds, "folds", least=2)
    if fdr is not None:
        fdr = check_share(fdr, "fdr")
    points = _normalised(numeric_points(z, "z")[0], normalize)
    labels = label_array(y)
    if len(labels) != len(points):
        raise ValueError(f"z has {len(points)} rows and y has {len(labels)} labels; one label per row is needed.")
    classes, codes = np.unique(labels, return_inverse=True)
    sizes = np.bincount(codes)
    if len(classes) < 2 or sizes.min() < folds:
        smallest = classes[sizes.argmin()].item()
        raise ValueError(
            f"Of {len(classes)} classes, the smallest, {smallest!r}, has {sizes.min()} rows; at least two classes of "
            f"folds={folds} rows each are needed. Choose fewer folds, or leave the class out."
        )
    names = np.arange(len(codes)) if ids is None else np.asarray(ids)
    if names.shape != codes.shape:
        raise ValueError(f"Expected one id for each of {len(codes)} rows, got ids of shape {names.shape}.")
    sources: dict[str, Float[Array, "N C"]] = {}
    if logits is not None:
        given = np.asarray(logits.detach().cpu() if isinstance(logits, Tensor) else logits, dtype=np.float64)
        if given.shape != (len(codes), len(classes)) or np.isnan(given).any():
            raise ValueError(f"Expected logits of shape {len(codes), len(classes)} without NaN, got {given.shape}.")
        sources = {"logits": _log_share(given), "logits (asinh)": _asinh_odds(given)}
    fold = _stratified(codes, folds, seed)
    kept = np.ones(len(codes), dtype=bool)
    for _ in range(2):
        pooled = _pool(sources | _out_of_fold(points, codes, fold, kept), codes)
        kept = _without(pooled.wrong > 0.5, codes, fold)
    return _record(pooled, codes, classes, names, fdr)


class _Pooled(NamedTuple):
    """Distribution of the right label of every row, probability that the given one is wrong, and the fitted model."""

    right: Float[Array, "N C"]
    wrong: Float[Array, "N"]
    share: float
    weights: dict[str, float]


def _record(
    pooled: _Pooled, codes: Int[Array, "N"], classes: Array, names: Array, fdr: float | None
) -> SuspiciousLabels:
    from scipy.stats import false_discovery_control

    own = pooled.right[np.arange(len(codes)), codes]
    p_value = np.where(pooled.right <= own[:, None], pooled.right, 0.0).sum(axis=1).clip(0.0, 1.0)
    adjusted = false_discovery_control(p_value, method="bh")
    return SuspiciousLabels(
        order=np.argsort(own, kind="stable"),
        wrong=pooled.wrong,
        suggested=classes[pooled.right.argmax(axis=1)],
        p_value=p_value,
        adjusted=adjusted,
        found=pooled.wrong > 0.5 if fdr is None else adjusted <= fdr,
        ids=names,
        share=pooled.share,
        weights=pooled.weights,
    )


def _normalised(points: Float[Array, "N D"], normalize: str | None) -> Float[Array, "N D"]:
    if normalize == "l2":
        length = np.linalg.norm(points, axis=1, keepdims=True)
        return points / np.where(length > 0, length, 1.0)
    if normalize == "standardize":
        scale = points.std(axis=0)
        return (points - points.mean(axis=0)) / np.where(scale > 0, scale, 1.0)
    return np.asarray(points, dtype=np.float64)


def _stratified(codes: Int[Array, "N"], folds: int, seed: int) -> Int[Array, "N"]:
    """The fold of every row, with as many rows of a class in every fold as possible."""
    order = np.random.default_rng(seed).permutation(len(codes))
    order = order[np.argsort(codes[order], kind="stable")]
    fold = np.empty(len(codes), dtype=np.int64)
    fold[order] = np.arange(len(codes)) % folds
    return fold


def _without(doubtful: Bool[Array, "N"], codes: Int[Array, "N"], fold: Int[Array, "N"]) -> Bool[Array, "N"]:
    """Rows that are not doubtful, and all rows of a class that would lose most of its rows outside a fold."""
    kept = ~doubtful
    for k in range(fold.max() + 1):
        rows = fold != k
        left = np.bincount(codes[rows & kept], minlength=codes.max() + 1)
        kept |= (2 * left < np.bincount(codes[rows]))[codes]
    return kept


def _out_of_fold(
    points: Float[Array, "N D"], codes: Int[Array, "N"], fold: Int[Array, "N"], kept: Bool[Array, "N"]
) -> dict[str, Float[Array, "N C"]]:
    """Evidence for every class of every row, without logits, fitted to the kept rows of other folds."""
    classes = int(codes.max()) + 1
    regions = np.empty((len(codes), classes))
    neighbours, linear = np.empty_like(regions), np.empty_like(regions)
    for k in range(fold.max() + 1):
        fitted, out = (fold != k) & kept, fold == k
        project = fit_projection(points[fitted], codes[fitted], _MAX_DIRECTIONS, None, "pca", torch.float64)
        coordinates = project(torch.from_numpy(points)).numpy()
        densities, _ = fit_densities(
            coordinates[fitted], codes[fitted], np.full(int(fitted.sum()), -1), dtype=torch.float64
        )
        regions[out] = densities(torch.from_numpy(coordinates[out])).numpy()
        neighbours[out] = np.log(_votes(points[out], points[fitted], codes[fitted], classes))
        linear[out] = ridge_shares(points[fitted], codes[fitted], classes, points[out])
    regions_too = {"regions": _log_share(regions), "regions (asinh)": _asinh_odds(regions)}
    return regions_too | {"neighbours": neighbours, "linear": linear}


def _votes(
    z: Float[Array, "B D"], points: Float[Array, "N D"], codes: Int[Array, "N"], classes: int
) -> Float[Array, "B C"]:
    """Shares of the classes among the nearest points, with one more vote by the shares of the classes overall."""
    nearest = min(_NEIGHBOURS, len(points))
    prior = np.bincount(codes, minlength=classes) / len(codes)
    rows, other = torch.from_numpy(z), torch.from_numpy(points)
    squares = other.square().sum(dim=1) / 2
    found = np.tile(prior, (len(z), 1))
    step = rows_per_chunk(len(points))
    for start in range(0, len(z), step):
        index = (rows[start : start + step] @ other.T - squares).topk(nearest, dim=1).indices.numpy()
        np.add.at(found, (np.arange(start, start + len(index))[:, None], codes[index]), 1.0)
    return found / (nearest + 1.0)


def _log_share(score: Float[Array, "N C"]) -> Float[Array, "N C"]:
    """Logarithm of the softmax of log densities or logits, bounded below."""
    return torch.from_numpy(score).log_softmax(dim=1).nan_to_num(nan=0.0).clamp_min(_LEAST_LOG_SHARE).numpy()


def _asinh_odds(score: Float[Array, "N C"]) -> Float[Array, "N C"]:
    """Asinh of the log odds of every class, from log densities or logits; an undefined difference counts as zero."""
    values = torch.from_numpy(score)
    best = values.argmax(dim=1, keepdim=True)
    total = values.logsumexp(dim=1, keepdim=True)
    share = (values - total).exp()
    odds = values - total - torch.log1p(-share)
    rest = values.scatter(1, best, -torch.inf).logsumexp(dim=1, keepdim=True)
    odds = odds.scatter(1, best, values.gather(1, best) - rest)  # 1 - share of the best class can round to zero
    return torch.asinh(odds.nan_to_num(nan=0.0, posinf=1e4, neginf=-1e4)).numpy()


def _pool(sources: dict[str, Float[Array, "N C"]], codes: Int[Array, "N"]) -> _Pooled:
    """Fit the weights and the share of wrong labels by maximum likelihood."""
    from scipy.optimize import minimize

    evidence = np.stack(list(sources.values()))
    rows, classes = np.arange(len(codes)), evidence.shape[2]

    def right(weights: Float[Array, "J"]) -> Float[Array, "N C"]:
        score = np.tensordot(weights, evidence, axes=1)
        score = np.exp(score - score.max(axis=1, keepdims=True))
        return score / score.sum(axis=1, keepdims=True)

    def loss(x: Float[Array, "E"]) -> tuple[float, Float[Array, "E"]]:
        share, s = x[-1], right(x[:-1])
        own = s[rows, codes]
        other = (1.0 - own) / (classes - 1)
        chance = (1.0 - share) * own + share * other
        slope = (1.0 - share - share / (classes - 1)) * own / chance
        gradient = [-(slope * (e[rows, codes] - (s * e).sum(axis=1))).mean() for e in evidence]
        return -float(np.log(chance).mean()), np.array([*gradient, -((other - own) / chance).mean()])

    start = np.array([*(1.0 / len(sources) for _ in sources), 0.05])

    def best(start: Float[Array, "E"], least: float, most: float) -> Any:
        bounds = [*((0.0, _MAX_WEIGHT) for _ in sources), (least, most)]
        return minimize(loss, start, jac=True, bounds=bounds, method="L-BFGS-B")

    found = best(start, _LEAST_WRONG, _MAX_WRONG)
    x, low, high = found.x, float(found.x[-1]), _MAX_WRONG
    limit = found.fun + _LIKELIHOOD / len(codes)
    while high - low > 1e-3 + 0.02 * low:
        middle = (low + high) / 2
        other = best(np.append(x[:-1], middle), middle, middle)
        if other.fun <= limit:
            x, low = other.x, middle
        else:
            high = middle
    s, share = right(x[:-1]), float(x[-1])
    own = s[rows, codes]
    doubt = share * (1.0 - own) / (classes - 1)
    names = dict(zip(sources, x[:-1].tolist(), strict=True))
    return _Pooled(s, doubt / (doubt + (1.0 - share) * own), share, names)

r"""Conformal p-values and thresholds with finite-sample guarantees, from a calibration set.

- :func:`conformal_p_value`: how often a point of the calibration distribution has a nonconformity score at least as
  large.
- :func:`flag_threshold`: flags at most a chosen share of the points of the calibration distribution.
- :func:`risk_threshold`: at most a chosen share of the accepted predictions are wrong.

All guarantees are exact for every sample size and every distribution. They assume that calibration points and new
points are drawn independently from one distribution. No calibration point may have been used to train the network or to
fit the partition. After a distribution shift the guarantees no longer hold. A higher score is safer; a higher
nonconformity score is less safe.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sepc_torch.head.binomial_search import binomial_tail, search_level, upper_bound
from sepc_torch.model.precision import as_dtype
from sepc_torch.shapes import Array, Bool, Float, Int

# Largest (B, M) temporary of a class p-value, in numbers: one call then replaces a dozen.
_FEW_VALUES = 2**16

__all__ = [
    "ClassCalibration",
    "RiskThreshold",
    "binomial_tail",
    "check_calibration",
    "check_correct",
    "check_share",
    "class_calibration",
    "class_p_value",
    "class_share_above",
    "conformal_p_value",
    "counts_above",
    "flag_threshold",
    "p_value_from_sorted",
    "risk_threshold",
    "search_level",
    "share_above",
    "sorted_calibration",
    "upper_bound",
]


class ClassCalibration(NamedTuple):
    """Nonconformity scores of the calibration points of each class.

    ``ordered`` holds a row per class, in ascending order and padded with inf; ``counts`` holds the number of points of
    each class. Both are plain tensors, so that a module can register them as buffers.
    """

    ordered: Float[Tensor, "C M"]
    counts: Int[Tensor, "C"]


class RiskThreshold(NamedTuple):
    """Acceptance threshold that keeps a risk, with its statistics on the calibration points.

    ``accepted`` calibration points have a score of at least ``threshold``; ``errors`` of them are wrong, and
    ``coverage`` is their share of all points. ``level`` is the level at which each threshold is tested. ``bound`` is
    the Clopper-Pearson upper bound of the risk at confidence 1 - ``level``; it is at most the wanted risk. If no
    threshold qualifies, ``found`` is False, the threshold is inf, nothing is accepted and the bound is 1.
    """

    threshold: float
    coverage: float
    errors: int
    accepted: int
    bound: float
    level: float
    found: bool


def conformal_p_value(calibration: Float[Tensor, "M"], strangeness: Float[Tensor, "B"]) -> Float[Tensor, "B"]:
    r"""Conformal p-value of each nonconformity score, :math:`p = \frac{1 + \#\{i : a_i \ge s\}}{M + 1}`.

    For a new point from the distribution of the calibration points, :math:`P(p \le u) \le u` for every u, with
    equality at every multiple of :math:`\frac{1}{M + 1}` if there are no ties.

    Args:
        calibration: Nonconformity scores :math:`a_i` of the calibration points; inf is allowed, NaN is not.
        strangeness: Nonconformity scores s of the points to assess. NaN counts as inf.

    Every call sorts the calibration points. For many batches, sort once with :func:`sorted_calibration` and call
    :func:`p_value_from_sorted`.

    >>> conformal_p_value(torch.tensor([0.3, 0.1, 0.2]), torch.tensor([0.0, 0.2, 9.0]))
    tensor([1.0000, 0.7500, 0.2500])
    """
    return p_value_from_sorted(sorted_calibration(calibration), strangeness)


def sorted_calibration(calibration: Float[Tensor, "M"]) -> Float[Tensor, "M"]:
    """Sort calibration scores in ascending order, for :func:`p_value_from_sorted`.

    >>> sorted_calibration(torch.tensor([0.3, 0.1, 0.2]))
    tensor([0.1000, 0.2000, 0.3000])
    """
    check_calibration(calibration)
    return calibration.detach().sort().values


def p_value_from_sorted(ordered: Float[Tensor, "M"], strangeness: Float[Tensor, "B"]) -> Float[Tensor, "B"]:
    """Conformal p-values by binary search in sorted calibration scores; does not synchronise with the device.

    Values are not checked, since a check would synchronise.

    >>> p_value_from_sorted(torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.2, torch.nan]))
    tensor([0.7500, 0.2500])
    """
    _check_vector(ordered, "sorted calibration points")
    if not strangeness.is_floating_point():
        strangeness = strangeness.to(ordered.dtype)
    dtype = torch.promote_types(ordered.dtype, strangeness.dtype)
    scores = _nan_to_inf(strangeness).to(dtype).contiguous()
    return share_above(ordered.to(dtype).contiguous(), scores).to(strangeness.dtype)


def share_above(ordered: Float[Tensor, "M"], scores: Float[Tensor, "B"]) -> Float[Tensor, "B"]:
    """The p-value of :func:`p_value_from_sorted` in float64, without checks: tensors of one dtype, and no NaN.

    >>> share_above(torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.2]))
    tensor([0.7500], dtype=torch.float64)
    """
    m = ordered.shape[0]
    # float64: float32 counts exactly only up to 2**24, about 17 million points.
    return (m + 1 - torch.searchsorted(ordered, scores)).double() / (m + 1)


def class_calibration(calibration: Float[Tensor, "M"], label: Int[Tensor, "M"], classes: int) -> ClassCalibration:
    """Sort calibration scores within each class, for :func:`class_p_value`.

    Args:
        calibration: Nonconformity scores of the calibration points; inf is allowed, NaN is not.
        label: The class of each point, as an index from 0.
        classes: Number of classes.

    >>> class_calibration(torch.tensor([0.3, 0.1, 0.2]), torch.tensor([0, 0, 2]), classes=3)
    ClassCalibration(ordered=tensor([[0.1000, 0.3000],
            [   inf,    inf],
            [0.2000,    inf]]), counts=tensor([2, 0, 1]))
    """
    check_calibration(calibration)
    if label.shape != calibration.shape:
        raise ValueError(
            f"Expected one label for each calibration point; got {tuple(calibration.shape)} values and "
            f"{tuple(label.shape)} labels."
        )
    if int(label.min()) < 0 or int(label.max()) >= classes:
        raise ValueError(
            f"Labels must be indices from 0 to {classes - 1} for {classes} classes, got {int(label.min())} to "
            f"{int(label.max())}. Leave points without a class out of the calibration."
        )
    count = torch.bincount(label, minlength=classes)
    value, by_value = calibration.detach().sort()
    row, by_class = label[by_value].sort(stable=True)
    column = torch.arange(len(row), device=row.device) - (count.cumsum(0) - count)[row]
    ordered = value.new_full((classes, int(count.max())), torch.inf)
    ordered[row, column] = value[by_class]
    return ClassCalibration(ordered, count)


def class_p_value(
    calibration: ClassCalibration, strangeness: Float[Tensor, "B"], label: Int[Tensor, "B"]
) -> Float[Tensor, "B"]:
    r"""Class-conditional (Mondrian) conformal p-value, :math:`p = \frac{1 + \#_c}{M_c + 1}`.

    :math:`\#_c` counts the calibration points of the label's class c whose nonconformity score is at least as large;
    :math:`M_c` counts all calibration points of the class. :math:`P(p \le u) \le u` holds within every class, also a
    rare one.

    Args:
        calibration: The result of :func:`class_calibration`.
        strangeness: Nonconformity scores of the points to assess. NaN counts as inf.
        label: The class that each point is compared with. p is 1 for a class without calibration points (0 in
            ``counts``), and for a label outside the classes, such as -1.

    >>> known = class_calibration(torch.tensor([0.3, 0.1, 0.2]), torch.tensor([0, 0, 2]), classes=3)
    >>> class_p_value(known, torch.tensor([0.2, 0.2, 0.9]), torch.tensor([0, 1, 2]))
    tensor([0.6667, 1.0000, 0.5000])
    """
    known = (label >= 0) & (label < calibration.ordered.shape[0])
    found = class_share_above(calibration, _nan_to_inf(strangeness), torch.where(known, label, 0))
    return torch.where(known, found, 1.0).to(strangeness.dtype)


def class_share_above(
    calibration: ClassCalibration, scores: Float[Tensor, "B"], row: Int[Tensor, "B"]
) -> Float[Tensor, "B"]:
    """The p-value of :func:`class_p_value` in float64, without checks: classes from 0 on, and no NaN."""
    most = calibration.ordered.shape[1]
    count = calibration.counts.index_select(0, row)
    if not torch.compiler.is_compiling() and len(row) * most <= _FEW_VALUES:
        ordered = calibration.ordered.index_select(0, row)
        below = torch.searchsorted(ordered, as_dtype(scores, ordered.dtype).unsqueeze(1)).squeeze(1)
    else:
        # Binary search in the row of each point's class. torch.searchsorted needs a row per point, a (B, M) temporary.
        flat = calibration.ordered.reshape(-1)
        below = torch.zeros_like(row)
        for power in reversed(range(most.bit_length())):
            further = below + 2**power
            value = flat[row * most + further.clamp(max=most) - 1]
            below = torch.where((further <= most) & (value < scores), further, below)
    # The padding (inf) is never below a score, so below <= count.
    total = count + 1
    return (total - below).double() / total


def flag_threshold(score: Float[Tensor, "M"], flag_rate: float) -> float:
    r"""Threshold that flags a new point of the calibration distribution with probability at most ``flag_rate``.

    Split conformal prediction: the threshold is the k-th smallest calibration score,
    :math:`k = \lfloor \alpha (M + 1) \rfloor` for the rate :math:`\alpha`. The probability is over the calibration set
    and the new point together. It is :math:`\frac{k}{M + 1}` without ties, and less with ties. Flag points with
    ``score < threshold``. This comparison is False for NaN; test for NaN separately.

    Args:
        score: Scores of the calibration points, higher is safer; -inf and inf are allowed, NaN is not.
        flag_rate: The share :math:`\alpha` of points that may be flagged. With too few points for the rate
            (:math:`k = 0`) the threshold is -inf and flags nothing.

    >>> flag_threshold(torch.arange(1.0, 100.0), flag_rate=0.05)
    5.0
    >>> flag_threshold(torch.arange(1.0, 10.0), flag_rate=0.05)
    -inf
    """
    check_calibration(score)
    flag_rate = check_share(flag_rate, "flag_rate")
    # The factor corrects rounding: 0.29 * 100 is slightly less than 29 in floating point.
    k = math.floor(flag_rate * (len(score) + 1) * (1.0 + 1e-12))
    return -math.inf if k < 1 else float(score.detach().kthvalue(min(k, len(score))).values)


def risk_threshold(score: Float[Tensor, "M"], correct: Bool[Tensor, "M"], risk: float, delta: float) -> RiskThreshold:
    r"""Lowest threshold t that provably keeps the risk, :math:`P(\mathrm{wrong} \mid \mathrm{score} \ge t) \le r`.

    With probability at least :math:`1 - \delta` over the calibration points, the returned threshold keeps the risk r on
    new points, or no threshold is found. Accept points with ``score >= threshold``; NaN is never accepted.

    A threshold with n accepted points, e of them wrong, qualifies if the exact binomial tail
    :math:`P(\mathrm{Bin}(n, r) \le e)` is at most a level :math:`\alpha`. :func:`search_level` sets :math:`\alpha` so
    that the search over all distinct scores fails with probability at most :math:`\delta`. The guarantee holds for all
    thresholds at once and for every distribution. Up to 1 %, no higher level :math:`\alpha \le \delta` has this
    property: the search over a useless score of risk r would fail with a probability above :math:`\delta`.

    Args:
        score: Scores of the calibration predictions, higher is safer; -inf is allowed and is accepted last, inf raises
            an error. New scores must be computed in the same way and dtype.
        correct: Whether each of these predictions is right.
        risk: The allowed share r of wrong predictions among the accepted ones.
        delta: The allowed probability :math:`\delta` that the guarantee fails.

    >>> score, correct = torch.linspace(1.0, 0.0, 101), torch.arange(101) < 80
    >>> found = risk_threshold(score, correct, risk=0.1, delta=0.1)
    >>> found.found, found.accepted, found.errors, round(found.bound, 3)
    (True, 83, 3, 0.094)
    """
    risk, delta = check_share(risk, "risk"), check_share(delta, "delta")
    check_calibration(score)
    check_correct(correct, score)
    if bool((score == torch.inf).any()):
        raise ValueError(
            "A calibration score is inf, so every threshold would accept it. Use a finite score, for instance "
            "1 - 1 / (1 + s) for s >= 0."
        )
    value, accepted, errors = counts_above(score, correct)
    level = search_level(len(score), risk, delta)
    qualified = np.flatnonzero(binomial_tail(errors, accepted, risk) <= level)
    if len(qualified) == 0:
        return RiskThreshold(math.inf, 0.0, 0, 0, 1.0, level, found=False)
    last = qualified[-1]
    e, n = int(errors[last]), int(accepted[last])
    return RiskThreshold(float(value[last]), n / len(score), e, n, upper_bound(e, n, level), level, found=True)


def counts_above(
    score: Float[Tensor, "M"], correct: Bool[Tensor, "M"]
) -> tuple[Float[Array, "T"], Int[Array, "T"], Int[Array, "T"]]:
    """Distinct scores from the highest down, with the number of points and of wrong points at or above each.

    >>> value, accepted, errors = counts_above(torch.tensor([0.5, 0.9, 0.5]), torch.tensor([True, True, False]))
    >>> accepted, errors
    (array([1, 3]), array([0, 1]))
    """
    value, group = np.unique(score.detach().cpu().double().numpy(), return_inverse=True)
    wrong = (~correct).cpu().double().numpy()
    # Equal scores are accepted together.
    accepted = np.bincount(group)[::-1].cumsum()
    errors = np.bincount(group, weights=wrong)[::-1].cumsum().astype(np.int64)
    return value[::-1], accepted, errors


def check_calibration(values: Any) -> None:
    """Raise an error unless the calibration points are a 1-D floating-point tensor without NaN."""
    _check_vector(values, "calibration points")
    if bool(values.isnan().any()):
        raise ValueError(
            "A calibration point is NaN. Replace NaN by -inf in a score, or by inf in a nonconformity score. Dropping "
            "the point would make the guarantee too optimistic."
        )


def check_correct(correct: Any, score: Tensor) -> None:
    """Raise an error unless ``correct`` is a boolean tensor with one element per score."""
    if not isinstance(correct, Tensor) or correct.dtype != torch.bool:
        given = correct.dtype if isinstance(correct, Tensor) else type(correct).__name__
        raise TypeError(f"correct must be a boolean tensor, got {given}; use label == target.")
    if correct.shape != score.shape:
        raise ValueError(
            f"Expected one element of correct for each score; got {tuple(score.shape)} scores and "
            f"{tuple(correct.shape)} elements."
        )


def _check_vector(values: Any, name: str) -> None:
    if not isinstance(values, Tensor) or not values.is_floating_point():
        given = values.dtype if isinstance(values, Tensor) else type(values).__name__
        raise TypeError(
            f"The {name} must be a tensor of floating-point numbers, got {given}; use torch.as_tensor(...).double()."
        )
    if values.ndim != 1:
        raise ValueError(f"The {name} must have shape (M,); got the shape {tuple(values.shape)}.")
    if values.shape[0] == 0:
        raise ValueError(f"There are no {name}; hold out some points from training.")


def check_share(value: Any, name: str) -> float:
    """Return a share strictly between 0 and 1 as a float, or raise an error."""
    if isinstance(value, str) or not hasattr(value, "__float__") or getattr(value, "shape", ()) != ():
        raise TypeError(f"{name} must be a number between 0 and 1, got {value!r}.")
    share = float(value)
    if not 0.0 < share < 1.0:  # written so that NaN fails too
        raise ValueError(f"{name} must lie between 0 and 1, both excluded; got {share}.")
    return share


def _nan_to_inf(strangeness: Float[Tensor, "B"]) -> Float[Tensor, "B"]:
    return torch.where(strangeness.isnan(), torch.inf, strangeness.detach())

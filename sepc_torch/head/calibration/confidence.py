r"""Logistic model of the probability that a label is right, given the evidence for the label."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from sepc_torch.model.precision import as_dtype
from sepc_torch.model.queries import check_labels
from sepc_torch.shapes import Array, Bool, Float, Int

# Weights of the evidence before any calibration. They also are the mean of the Gaussian prior of a fit. With asinh of
# log odds and log ratios of neighbour distances as inputs, these weights rank well without a fit.
PRIOR = {"softmax": 0.5, "regions": 0.5, "neighbours": 1.0}
# Standard deviation of the prior of the bias: wide.
_BIAS_WIDTH = 10.0
# Newton steps of a fit: it converges in about ten. Shortest step of a line search, and the share of the decrease that
# the gradient promises which a step must reach.
_MAX_STEPS = 200
_LEAST_STEP = 1e-10
_DECREASE = 1e-4


def fit_temperature(logits: Float[Tensor, "N C"], labels: Int[Tensor, "N"]) -> float:
    r"""Fit the temperature T that minimises the cross-entropy :math:`-\sum_i \log \mathrm{softmax}(l_i / T)_{y_i}`.

    The loss is convex in :math:`b = 1 / T`. The search takes Newton steps on its slope. It bisects the bracket
    (geometric mean) when a Newton step leaves the bracket or does not shrink. The bracket spans six decades around one
    over the mean standard deviation of the logits. If the logits are right for all labels, or wrong for all, no finite
    positive temperature is optimal; the result then lies at an end of the bracket.

    Args:
        logits: Logits :math:`l_i`; finite.
        labels: True classes :math:`y_i`, as indices from 0.

    Returns:
        The temperature; 1.0 if the logits of every row are equal.

    >>> import torch
    >>> logits = torch.tensor([[0.0, math.log(9.0)]]).repeat(4, 1)
    >>> round(fit_temperature(logits, torch.tensor([1, 1, 1, 0])), 6)  # log 9 / log 3: right three times of four
    2.0
    """
    values = logits.detach().double()
    check_labels(labels, len(values))
    own = values.gather(1, labels.long().unsqueeze(1))
    margin = values - own  # relative to the true class: softmax ignores a constant added to a row
    spread = float(values.std(dim=1, correction=0).mean())
    if not spread > 0:
        return 1.0  # equal logits: no temperature changes the softmax
    low, high = 1e-3 / spread, 1e3 / spread
    b, moved = math.sqrt(low * high), math.inf
    for _ in range(200):
        p = (b * margin).softmax(dim=1)
        mean = (p * margin).sum(dim=1)
        slope = float(mean.mean())
        curvature = float(((p * margin.square()).sum(dim=1) - mean.square()).mean())
        low, high = (b, high) if slope < 0 else (low, b)
        newton = b - slope / curvature if curvature > 0 else math.inf
        shrinks = low < newton < high and abs(newton - b) < moved / 2
        following = newton if shrinks else math.sqrt(low * high)
        moved = abs(following - b)
        b = following
        if moved <= 1e-14 * b:
            break
    return 1.0 / b


class Confidence(nn.Module):
    r"""Probability that a label is right, given the evidence x for the label.

    The logistic score :math:`q = \sigma(w \cdot x + b)` ranks. Its weights are non-negative, :math:`w \ge 0`, so more
    evidence never lowers the confidence. A logistic can fit badly far from one half. Beta calibration (Kull et al.
    2017) therefore maps q to :math:`\sigma(u \log q - v \log(1 - q) + t)`, which keeps the order.

    >>> model = Confidence(["regions", "neighbours"])
    >>> model(torch.tensor([[0.0, 0.0], [2.0, 1.0]]))
    tensor([0.5000, 0.8808])
    """

    weights: Tensor
    bias: Tensor
    bend: Tensor
    shift: Tensor

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.register_buffer("weights", torch.tensor([PRIOR[name] for name in names]))
        self.register_buffer("bias", torch.zeros(()))
        self.register_buffer("bend", torch.ones(2))
        self.register_buffer("shift", torch.zeros(()))

    def forward(self, support: Float[Tensor, "B F"]) -> Float[Tensor, "B"]:
        """Return the confidence of every row."""
        parameters = as_dtype(self.parameters_in_one(), support.dtype)
        return confidences(support.T, logistic_models(parameters.unsqueeze(0)))[0]

    def parameters_in_one(self) -> Float[Tensor, "f"]:
        """Weights, bias, both bends and shift as one tensor in float64, for :func:`logistic_models`."""
        return torch.cat([self.weights, self.bias.reshape(1), self.bend, self.shift.reshape(1)]).double()

    def fit(self, support: Float[Array, "M F"], right: Bool[Array, "M"], *, bend: bool = True) -> None:
        """Fit the weights, and with ``bend`` the beta calibration, to labels known to be right or wrong.

        With few labels the weights stay near the prior.
        """
        weights, bias = fit_logistic(support, right, self.weights.cpu().double().numpy())
        self.weights.copy_(torch.from_numpy(weights))
        self.bias.fill_(bias)
        if bend:
            score = support @ weights + bias
            sides = np.column_stack([-np.logaddexp(0.0, -score), np.logaddexp(0.0, score)])
            shape, shift = fit_logistic(sides, right, np.ones(2))
            self.bend.copy_(torch.from_numpy(shape))
            self.shift.fill_(shift)


class LogisticModels(NamedTuple):
    r"""Parameters of n models (:class:`Confidence`), laid out for :func:`confidences`.

    ``weights`` and ``bias`` hold w, b and, second, -w, -b: one logarithm then gives :math:`\log q` and
    :math:`\log(1 - q) = \log \sigma(-w \cdot x - b)`. ``bend`` holds u and -v.
    """

    weights: Float[Tensor, "2 n F 1"]
    bias: Float[Tensor, "2 n 1"]
    bend: Float[Tensor, "2 n 1"]
    shift: Float[Tensor, "n 1"]


def logistic_models(parameters: Float[Tensor, "n f"]) -> LogisticModels:
    """Lay out the parameters of n models; see :meth:`Confidence.parameters_in_one`."""
    weights, rest = parameters.unsqueeze(2).split([parameters.shape[1] - 4, 4], dim=1)
    bias, first, second, shift = rest.unbind(dim=1)
    weights, bias = torch.stack([weights, -weights]), torch.stack([bias, -bias])
    return LogisticModels(weights, bias, torch.stack([first, -second]), shift)


def confidences(support: Float[Tensor, "F B"], models: LogisticModels) -> Float[Tensor, "n B"]:
    """Confidences of every column from n models at once.

    >>> confidences(torch.tensor([[0.0, 1.0]]), logistic_models(torch.tensor([[2.0, 0.0, 1.0, 1.0, 0.0]])))
    tensor([[0.5000, 0.8808]])
    """
    score = (support * models.weights).sum(dim=2) + models.bias
    return torch.sigmoid((models.bend * logsigmoid(score)).sum(dim=0) + models.shift)


def fit_logistic(
    x: Float[Array, "M F"], right: Bool[Array, "M"], prior: Float[Array, "F"], width: float = 1.0
) -> tuple[Float[Array, "F"], float]:
    r"""Fit weights :math:`w \ge 0` and a bias b by maximum a posteriori logistic regression.

    Minimises the cross-entropy plus :math:`\tfrac12 \|w - w_0\|^2 / \tau^2 + \tfrac12 (b / 10)^2` for the prior mean
    :math:`w_0` and its width :math:`\tau`, by Newton steps with non-negative weights. The default width is as large as
    the largest weight of :data:`PRIOR`. The targets are Platt's:
    :math:`\frac{n_+ + 1}{n_+ + 2}` for right labels and :math:`\frac{1}{n_- + 2}` for wrong ones. A hundred labels
    without a mistake do not prove an error rate of zero.

    >>> w, b = fit_logistic(np.array([[-1.0], [1.0]] * 50), np.array([False, True] * 50), np.ones(1))
    >>> (w > 1).all(), abs(b) < 1e-6
    (np.True_, True)
    """
    wins = int(right.sum())
    target = np.where(right, (wins + 1) / (wins + 2), 1 / (len(right) - wins + 2))
    design = np.column_stack([x, np.ones(len(x))])
    centre = np.append(prior, 0.0)
    precision = np.array([width**-2] * len(prior) + [_BIAS_WIDTH**-2])

    def loss(w: Float[Array, "E"]) -> float:
        score = design @ w
        return float((np.logaddexp(0.0, score) - target * score).sum() + (precision * (w - centre) ** 2).sum() / 2)

    w, value = centre, loss(centre)
    for _ in range(_MAX_STEPS):
        chance = 0.5 * (1.0 + np.tanh(design @ w / 2))
        gradient = design.T @ (chance - target) + precision * (w - centre)
        curvature = (design * (chance * (1.0 - chance))[:, None]).T @ design + np.diag(precision)
        step = _least_quadratic(curvature, curvature @ w - gradient) - w
        length, lower = 1.0, loss(w + step)
        while lower > value + _DECREASE * length * float(gradient @ step) and length > _LEAST_STEP:
            length /= 2
            lower = loss(w + length * step)
        if not lower < value:  # rounding errors hide any further decrease
            break
        w, value = w + length * step, lower
    return w[:-1], float(w[-1])


def _least_quadratic(curvature: Float[Array, "E E"], slope: Float[Array, "E"]) -> Float[Array, "E"]:
    r"""Minimise :math:`\tfrac12 u^\top H u - c^\top u` with all entries of u but the last non-negative."""
    from scipy.optimize import nnls

    corner = curvature[-1, -1]
    # Eliminate the last entry, then solve a least-squares problem with the same minimiser.
    factor = np.linalg.cholesky(curvature[:-1, :-1] - np.outer(curvature[:-1, -1], curvature[-1, :-1]) / corner)
    weights, _ = nnls(factor.T, np.linalg.solve(factor, slope[:-1] - curvature[:-1, -1] * (slope[-1] / corner)))
    return np.append(weights, (slope[-1] - curvature[-1, :-1] @ weights) / corner)

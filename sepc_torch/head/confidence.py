r"""From evidence for a label to the probability that it is right."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from sepc_torch.shapes import Array, Bool, Float

# The weights that evidence has before any calibration, and how far data are expected to move them: as wide as the
# weights themselves. With the asinh of log odds and the log ratio of neighbours they rank well as they are.
PRIOR = {"softmax": 0.5, "regions": 0.5, "neighbours": 1.0}
_PRIOR_WIDTH = 1.0
_BIAS_WIDTH = 10.0
_NEWTON_STEPS = 50


class Confidence(nn.Module):
    r"""The probability that a label is right, with the evidence x for it.

    The logistic :math:`q = \sigma(w \cdot x + b)` with weights :math:`w \ge 0` ranks; more evidence never lowers it.
    Its shape need not be right far from one half, so it is bent to :math:`\sigma(u \log q - v \log(1 - q) + t)` (beta
    calibration, Kull et al. 2017), which keeps the order.

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
        """The confidence of every row."""
        weights, bias, bend, shift = (
            tensor.to(support.dtype) for tensor in (self.weights, self.bias, self.bend, self.shift)
        )
        score = (support * weights).sum(dim=1) + bias
        return torch.sigmoid(bend[0] * logsigmoid(score) - bend[1] * logsigmoid(-score) + shift)

    def fit(self, support: Float[Array, "M F"], right: Bool[Array, "M"], *, bend: bool = True) -> None:
        """Learn from labels that are known to be right or wrong; few of them leave the prior almost as it is."""
        weights, bias = fit_logistic(support, right, self.weights.cpu().double().numpy())
        self.weights.copy_(torch.from_numpy(weights))
        self.bias.fill_(bias)
        if bend:
            score = support @ weights + bias
            sides = np.column_stack([-np.logaddexp(0.0, -score), np.logaddexp(0.0, score)])
            shape, shift = fit_logistic(sides, right, np.ones(2))
            self.bend.copy_(torch.from_numpy(shape))
            self.shift.fill_(shift)


def fit_logistic(
    x: Float[Array, "M F"], right: Bool[Array, "M"], prior: Float[Array, "F"]
) -> tuple[Float[Array, "F"], float]:
    r"""Weights :math:`w \ge 0` and bias b of the likeliest logistic model, near the prior where data say little.

    Minimises the cross-entropy plus :math:`\tfrac12 \|w - w_0\|^2` and a weak pull of b to zero. As targets for right
    and wrong serve Platt's :math:`\frac{n_+ + 1}{n_+ + 2}` and :math:`\frac{1}{n_- + 2}`: a hundred labels without a
    mistake do not prove that there are none.

    >>> w, b = fit_logistic(np.array([[-1.0], [1.0]] * 50), np.array([False, True] * 50), np.ones(1))
    >>> (w > 1).all(), abs(b) < 1e-6
    (np.True_, True)
    """
    wins = int(right.sum())
    target = np.where(right, (wins + 1) / (wins + 2), 1 / (len(right) - wins + 2))
    features = x.shape[1]
    found: list[tuple[float, Array]] = []
    # The problem is convex and small: the best of the solutions with some weights fixed at zero and none below it.
    for chosen in range(2**features):
        free = np.array([*(chosen >> j & 1 for j in range(features)), 1], dtype=bool)
        loss, solution = _newton(x, target, prior, free)
        if (solution[:-1] >= 0).all():
            found.append((loss, solution))
    best = min(found, key=lambda pair: pair[0])[1]
    return best[:-1], float(best[-1])


def _newton(
    x: Float[Array, "M F"], target: Float[Array, "M"], prior: Float[Array, "F"], free: Bool[Array, "E"]
) -> tuple[float, Float[Array, "E"]]:
    """The penalised fit with some weights free and the others zero, by Newton's method with halved steps."""
    design = np.column_stack([x, np.ones(len(x))])
    pull = np.array([_PRIOR_WIDTH**-2] * len(prior) + [_BIAS_WIDTH**-2])
    centre = np.append(prior, 0.0)

    def loss(w: Float[Array, "E"]) -> float:
        score = design @ w
        return float((np.logaddexp(0.0, score) - target * score).sum() + (pull * (w - centre) ** 2).sum() / 2)

    w = np.where(free, centre, 0.0)
    value = loss(w)
    for _ in range(_NEWTON_STEPS):
        probability = 0.5 * (1.0 + np.tanh(design @ w / 2))
        gradient = (design.T @ (probability - target) + pull * (w - centre))[free]
        curvature = (design.T * (probability * (1.0 - probability))) @ design + np.diag(pull)
        step = np.zeros(len(w))
        step[free] = np.linalg.solve(curvature[np.ix_(free, free)], gradient)
        while loss(w - step) > value and np.abs(step).max() > 1e-12:
            step /= 2
        w, before = w - step, value
        value = loss(w)
        if before - value <= 1e-12 * max(1.0, abs(value)):
            break
    return value, w

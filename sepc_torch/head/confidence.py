r"""Logistic model of the probability that a label is right, given the evidence for the label."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from sepc_torch.shapes import Array, Bool, Float

# Weights of the evidence before any calibration. They also are the mean of the Gaussian prior of a fit. With asinh of
# log odds and log ratios of neighbour distances as inputs, these weights rank well without a fit.
PRIOR = {"softmax": 0.5, "regions": 0.5, "neighbours": 1.0}
# Standard deviation of the prior: that of a weight is as large as the largest weight, that of the bias is wide.
_PRIOR_WIDTH = 1.0
_BIAS_WIDTH = 10.0


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
        weights, bias, bend, shift = (
            tensor.to(support.dtype) for tensor in (self.weights, self.bias, self.bend, self.shift)
        )
        score = (support * weights).sum(dim=1) + bias
        return torch.sigmoid(bend[0] * logsigmoid(score) - bend[1] * logsigmoid(-score) + shift)

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


def fit_logistic(
    x: Float[Array, "M F"], right: Bool[Array, "M"], prior: Float[Array, "F"]
) -> tuple[Float[Array, "F"], float]:
    r"""Fit weights :math:`w \ge 0` and a bias b by maximum a posteriori logistic regression, with L-BFGS-B.

    Minimises the cross-entropy plus :math:`\tfrac12 \|w - w_0\|^2 + \tfrac12 (b / 10)^2` for the prior mean
    :math:`w_0`. The targets are Platt's: :math:`\frac{n_+ + 1}{n_+ + 2}` for right labels and
    :math:`\frac{1}{n_- + 2}` for wrong ones. A hundred labels without a mistake do not prove an error rate of zero.

    >>> w, b = fit_logistic(np.array([[-1.0], [1.0]] * 50), np.array([False, True] * 50), np.ones(1))
    >>> (w > 1).all(), abs(b) < 1e-6
    (np.True_, True)
    """
    from scipy.optimize import minimize  # imported here: a frozen head runs without SciPy

    wins = int(right.sum())
    target = np.where(right, (wins + 1) / (wins + 2), 1 / (len(right) - wins + 2))
    design = np.column_stack([x, np.ones(len(x))])
    centre = np.append(prior, 0.0)
    precision = np.array([_PRIOR_WIDTH**-2] * len(prior) + [_BIAS_WIDTH**-2])

    # Unit curvature at probability one half: L-BFGS-B starts from a multiple of the identity.
    unit = 1.0 / np.sqrt((design**2).sum(axis=0) / 4 + precision)

    def loss(scaled: Float[Array, "E"]) -> tuple[float, Float[Array, "E"]]:
        w = unit * scaled
        score = design @ w
        value = (np.logaddexp(0.0, score) - target * score).sum() + (precision * (w - centre) ** 2).sum() / 2
        gradient = design.T @ (0.5 * (1.0 + np.tanh(score / 2)) - target) + precision * (w - centre)
        return float(value), unit * gradient

    # The problem is strictly convex and has at most four variables. Tolerances of zero let L-BFGS-B run until rounding
    # errors stop its line search.
    bounds = [(0.0, None)] * len(prior) + [(None, None)]
    options = {"maxiter": 1000, "ftol": 0.0, "gtol": 0.0}
    best = unit * minimize(loss, centre / unit, jac=True, method="L-BFGS-B", bounds=bounds, options=options).x
    return best[:-1], float(best[-1])

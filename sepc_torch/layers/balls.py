r"""Point sets that fit in a ball of the floor's radius: find them, differentiate the centre of the ball.

Lengths are in units of the floor, so that the ball has radius 1. Every centre within distance 1 of all points gives the
least volume, and every multiplier of program (2) is zero. The layer returns the limit of the central path, the analytic
centre

.. math:: \max_c\ \sum_i \log(1 - \|y_i - c\|^2), \qquad \sum_i w_i (y_i - c) = 0,\quad w_i = 1 / (1 - \|y_i - c\|^2).

The analytic centre is a smooth function of the points. It joins the centre of the smallest ball continuously where the
floor begins to matter. The problem has D unknowns instead of M multipliers: a step costs M D^2 instead of M^3.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from sepc_torch.layers.implicit import OnlyOnce
from sepc_torch.shapes import Bool, Float

# Sets with less room than this between the farthest point and the surface go to the general method, whose active set is
# then well determined. Weights w_i of up to 1e9 are the most that the square root of float64's precision resolves.
_ROOM = 1e-9
# The smallest ball minimises a soft maximum of the squared distances. Its sharpness grows fourfold after every three
# Newton steps until its error, log(M) / sharpness, is about the room: 4^17 = 1.7e10.
_STAGES = 18
_STEPS = 3
_GROWTH = 4.0
# Limit on the Newton steps for the analytic centre, which takes about ten. Below a decrement of 1/4 convergence is
# quadratic and needs no line search.
_CENTRING_STEPS = 100
_QUADRATIC = 0.25
_CENTRED = 1e-8
_HALVINGS = 40


@torch.no_grad()
def covered(y: Float[Tensor, "B M D"], mask: Bool[Tensor, "B M"]) -> tuple[Bool[Tensor, "B"], Float[Tensor, "B D"]]:
    """Find the sets that a ball of radius 1 covers with room to spare, and their analytic centres.

    The centres of the other sets are undefined.
    """
    center = torch.where(mask.unsqueeze(-1), y, 0.0).sum(-2) / mask.sum(-1, keepdim=True).clamp_min(1)
    found = torch.zeros_like(mask[:, 0])
    open_sets = torch.arange(len(y), device=y.device)
    inner, exists, here = y, mask, center.clone()
    sharpness = 1 / _squares(inner, exists, here).amax(-1, keepdim=True).clamp_min(1e-300)
    for step in range(_STAGES * _STEPS):
        h = _squares(inner, exists, here)
        p = torch.softmax(torch.where(exists, sharpness * h, -math.inf), -1)
        offsets = inner - here.unsqueeze(-2)
        mean = (p.unsqueeze(-2) @ offsets).squeeze(-2)
        inside = h.amax(-1) <= 1 - _ROOM
        # For any weights p, the variance of the points is a lower bound of the squared radius of the smallest ball.
        outside = (p * h).sum(-1) - mean.square().sum(-1) > 1
        found[open_sets[inside]] = True
        center[open_sets] = here
        left = ~(inside | outside)
        if not bool(left.any()):
            break
        inner, exists, here, sharpness = inner[left], exists[left], here[left], sharpness[left]
        h, p, offsets, mean, open_sets = h[left], p[left], offsets[left], mean[left], open_sets[left]
        spread = (p.unsqueeze(-1) * offsets).mT @ offsets - mean.unsqueeze(-1) @ mean.unsqueeze(-2)
        eye = torch.eye(y.shape[-1], dtype=y.dtype, device=y.device)
        towards = _solved(eye + 2 * sharpness.unsqueeze(-1) * spread, mean)

        def soft(at: Tensor, points: Tensor = inner, real: Tensor = exists, t: Tensor = sharpness) -> Tensor:
            return torch.logsumexp(torch.where(real, t * _squares(points, real, at), -math.inf), -1)

        here = _descended(soft, here, towards)
        if step % _STEPS == _STEPS - 1:
            sharpness = sharpness * _GROWTH
    index = found.nonzero().squeeze(-1)
    center[index], found[index] = _analytic_centers(y[index], mask[index], center[index])
    return found, center


def _squares(
    y: Float[Tensor, "B M D"], mask: Bool[Tensor, "B M"], center: Float[Tensor, "B D"]
) -> Float[Tensor, "B M"]:
    """The squared distances to the centre, zero for masked points."""
    return torch.where(mask, (y - center.unsqueeze(-2)).square().sum(-1), 0.0)


def _solved(matrix: Float[Tensor, "B D D"], vector: Float[Tensor, "B D"]) -> Float[Tensor, "B D"]:
    return torch.linalg.solve(matrix, vector.unsqueeze(-1)).squeeze(-1)


def _descended(value: Any, here: Float[Tensor, "B D"], towards: Float[Tensor, "B D"]) -> Float[Tensor, "B D"]:
    """Backtracking line search: halve each step until the value does not rise; make no step if it always rises."""
    before = value(here)
    share = torch.ones_like(before)
    for _ in range(_HALVINGS):
        worse = ~(value(here + share.unsqueeze(-1) * towards) <= before)
        if not bool(worse.any()):
            break
        share = torch.where(worse, 0.5 * share, share)
    return here + torch.where(worse, 0.0, share).unsqueeze(-1) * towards


def _analytic_centers(
    y: Float[Tensor, "B M D"], mask: Bool[Tensor, "B M"], center: Float[Tensor, "B D"]
) -> tuple[Float[Tensor, "B D"], Bool[Tensor, "B"]]:
    """Newton's method for the analytic centres from centres of covering balls, and the sets that converged."""

    def barrier(at: Tensor) -> Tensor:
        room = 1 - _squares(y, mask, at)
        return torch.where((room > 0).all(-1), -room.clamp_min(1e-300).log().sum(-1), math.inf)

    arrived = torch.zeros_like(mask[:, 0])
    for _ in range(_CENTRING_STEPS):
        curvature, weighted = _curvature(y, mask, center)
        towards = _solved(curvature, weighted.sum(-2))
        decrement = (2 * (weighted.sum(-2) * towards).sum(-1)).clamp_min(0).sqrt()
        # The barrier is self-concordant: below a decrement of 1 the full step stays feasible. Near the optimum the line
        # search is left out, because rounding hides the decrease of the barrier.
        near = (decrement <= _QUADRATIC).unsqueeze(-1)
        center = torch.where(
            near, center + towards, center if bool(near.all()) else _descended(barrier, center, towards)
        )
        # The step just made squares the decrement, to below rounding.
        arrived = decrement <= _CENTRED
        if bool(arrived.all()):
            break
    return center, arrived


def _curvature(
    y: Float[Tensor, "B M D"], mask: Bool[Tensor, "B M"], center: Float[Tensor, "B D"]
) -> tuple[Float[Tensor, "B D D"], Float[Tensor, "B M D"]]:
    r"""The sum K of the :math:`A_i = w_i I + 2 w_i^2 (y_i - c)(y_i - c)^\top`, and the rows :math:`w_i (y_i - c)`."""
    weights = torch.where(mask, 1 / (1 - _squares(y, mask, center)), 0.0)
    weighted = weights.unsqueeze(-1) * (y - center.unsqueeze(-2))
    eye = torch.eye(y.shape[-1], dtype=y.dtype, device=y.device)
    return weights.sum(-1)[:, None, None] * eye + 2 * weighted.mT @ weighted, weighted


class BallCenters(torch.autograd.Function):
    r"""The analytic centres as a function of the points: :math:`dc = K^{-1} \sum_i A_i\, dy_i`."""

    @staticmethod
    def forward(
        ctx: Any, y: Float[Tensor, "B M D"], mask: Bool[Tensor, "B M"], center: Float[Tensor, "B D"]
    ) -> Float[Tensor, "B D"]:
        """Return the given centres."""
        ctx.save_for_backward(y, mask, center)
        return center.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient by the implicit function theorem; it cannot be differentiated again."""
        y, mask, center = ctx.saved_tensors
        with torch.no_grad():
            curvature, weighted = _curvature(y, mask, center)
            solved = _solved(curvature, grads[0]).unsqueeze(-1)
            weights = torch.where(mask, 1 / (1 - _squares(y, mask, center)), 0.0).unsqueeze(-1)
            gradient = weights * solved.mT + 2 * weighted * (weighted @ solved)
        if torch.is_grad_enabled():  # create_graph=True: the caller may differentiate again
            gradient = OnlyOnce.apply(gradient, grads[0], y)  # type: ignore[no-untyped-call]
        return gradient, None, None

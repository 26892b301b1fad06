r"""The multipliers of program (2) as a differentiable function of the points, by the implicit function theorem.

On the active set :math:`h_i(\lambda, y) = 1` (with a barrier, :math:`\lambda_i (1 - h_i) = \mu`), so that for a loss
with the gradient :math:`\bar\lambda` in the multipliers

.. math:: (H + \mathrm{diag}(s / \lambda))\, \ell = \bar\lambda, \qquad \bar y = \nabla_y \sum_i \ell_i h_i(\lambda, y)

with the negative Hessian H of the dual. The multipliers are an analytic function of the points where every active point
carries weight and the products :math:`(y_i, 1)(y_i, 1)^\top` of the active points are independent. Elsewhere (a circle,
a cube) they are only directionally differentiable, and a ridge picks the element of least norm.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from sepc_torch.layers.dual import Form, PlainForm
from sepc_torch.layers.interior_point import (
    Solution,
    crossover,
    gather_active,
    gather_rows,
    interior_point,
    screened,
)
from sepc_torch.shapes import Bool, Float

# The gap that the offline solver proves before the crossover: Newton's method then starts with eight digits.
_OFFLINE_GAP = 1e-9
# Where no active set passes the certificate (points that touch a ball of the floor's radius and carry no weight), the
# ellipsoid is the one of this barrier parameter, at most M / 2 times this above the minimal log-volume.
_LAST_BARRIER = 1e-9
# Added to the Hessian, whose diagonal is 1 on the active set; two refinements take out what it changes.
_RIDGE = 1e-9
_REFINEMENTS = 2


def solve(form: type[Form], y: Float[Tensor, "B M D"], mask: Bool[Tensor, "B M"], smoothing: float) -> Solution:
    """Optimal multipliers and slacks of every set, or of the smoothed program; sets that no method solves are marked.

    On the CPU the plain program goes set by set to the offline solver's design: twice as slow there as a batch of many
    sets of few points, but five times faster at 300 points in 30 dimensions. The smoothed and the floored program, and
    everything on a GPU, go to the batched interior point.
    """
    if smoothing > 0:
        return interior_point(form, y, mask, smoothing)
    if form is PlainForm and y.device.type == "cpu":
        found = crossover(form, y, mask, _one_by_one(y, mask))
        if bool(found.solved.all()):
            return found
        left = (~found.solved).nonzero().squeeze(-1)
        return _replaced(found, left, _in_batch(form, y[left], mask[left]))
    return _in_batch(form, y, mask)


def _in_batch(form: type[Form], y: Float[Tensor, "B M D"], mask: Bool[Tensor, "B M"]) -> Solution:
    found = crossover(form, y, mask, screened(form, y, mask))
    if bool(found.solved.all()):
        return found
    left = (~found.solved).nonzero().squeeze(-1)
    return _replaced(found, left, screened(form, y[left], mask[left], _LAST_BARRIER))


def _replaced(found: Solution, index: Tensor, by: Solution) -> Solution:
    return Solution(*(a.index_copy(0, index, b) for a, b in zip(found, by, strict=True)))


def _one_by_one(y: Float[Tensor, "B M D"], mask: Bool[Tensor, "B M"]) -> Solution:
    """The offline solver's designs, to a gap of 1e-9; a set that defeats its arithmetic comes back without weights."""
    from sepc_torch.solvers.d_optimal import Design  # with SciPy, which a machine that solves on its GPU need not have

    count, points, dim = y.shape
    u, s = np.zeros((count, points)), np.ones((count, points))
    for b, (row, real) in enumerate(zip(y.numpy(), mask.numpy(), strict=True)):
        lifted = np.concatenate([row[real].T, np.ones((1, int(real.sum())))])
        try:
            design = Design(lifted)
            design.refine(_OFFLINE_GAP)
        except np.linalg.LinAlgError:
            continue
        weights = np.zeros(lifted.shape[1])
        weights[design.support] = dim * design.weights
        # The weights of a design sum to 1 and its lifted points have g = 1 + D h.
        g = np.square(design.root @ lifted).sum(axis=0)
        u[b, real], s[b, real] = weights, np.maximum(1.0 - (g - 1.0) / dim, 0.0)
    return Solution(torch.from_numpy(u), torch.from_numpy(s), torch.from_numpy(u.any(axis=1)))


class Multipliers(torch.autograd.Function):
    """The multipliers (B, M) of a solution as a function of the points (B, M, D)."""

    @staticmethod
    def forward(
        ctx: Any, y: Float[Tensor, "B M D"], mask: Bool[Tensor, "B M"], form: type[Form], found: Solution
    ) -> Float[Tensor, "B M"]:
        """The multipliers as found."""
        ctx.save_for_backward(y, mask, found.u, found.s)
        ctx.form = form
        return found.u.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        """The gradient by the implicit function theorem; once."""
        y, mask, u, s = ctx.saved_tensors
        with torch.no_grad():
            gradient = multipliers_gradient(ctx.form, y, mask, Solution(u, s, mask[:, 0]), grads[0])
        if torch.is_grad_enabled():  # create_graph=True: somebody may ask for the gradient of the gradient
            gradient = OnlyOnce.apply(gradient, grads[0], y)  # type: ignore[no-untyped-call]
        return gradient, None, None, None


class OnlyOnce(torch.autograd.Function):
    """The identity in its first argument, as something that depends on the others but cannot be differentiated."""

    @staticmethod
    def forward(_ctx: Any, gradient: Tensor, *_sources: Tensor) -> Tensor:
        """The first argument."""
        return gradient.clone()

    @staticmethod
    def backward(_ctx: Any, *_grads: Tensor) -> Any:
        """Always an error."""
        raise RuntimeError(
            "A refit has first derivatives only, and this backward pass asks for second ones. Differentiate "
            "once, without create_graph=True; or take finite differences of the gradient."
        )


def multipliers_gradient(
    form: type[Form], y: Float[Tensor, "B M D"], mask: Bool[Tensor, "B M"], found: Solution, grad: Float[Tensor, "B M"]
) -> Float[Tensor, "B M D"]:
    r"""The gradient :math:`\bar y` in the points of a loss with the gradient :math:`\bar\lambda` in the multipliers.

    Only points that carry weight enter the system, at most D (D + 3) / 2 of them where the program is not smoothed; all
    others have the gradient zero, exactly.
    """
    index, real = gather_active(mask & (found.u > 0))
    u, s = (torch.where(real, x.gather(1, index), 0.0) for x in (found.u, found.s))
    here = form(gather_rows(y, index), real, u)
    # In the scale of the weights: (r H r + s) x = r grad, lambda = r x, with r = sqrt(lambda).
    r = u.sqrt()
    k = r.unsqueeze(-1) * here.hessian() * r.unsqueeze(-2)
    k.diagonal(dim1=-2, dim2=-1).add_(torch.where(real, s, torch.ones_like(s)))
    root = torch.linalg.cholesky(k + torch.diag_embed(_RIDGE * u))
    rhs = (r * grad.gather(1, index)).unsqueeze(-1)
    x = torch.cholesky_solve(rhs, root)
    for _ in range(_REFINEMENTS):
        x = x + torch.cholesky_solve(rhs - k @ x, root)
    pulled = here.pullback(r * x.squeeze(-1))
    return torch.zeros_like(y).scatter(1, index.unsqueeze(-1).expand_as(pulled), pulled)

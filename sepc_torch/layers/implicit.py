r"""Solving the dual of program (2), and its multipliers as a differentiable function of the points.

The derivative follows from the implicit function theorem. On the active set :math:`h_i(\lambda, y) = 1`; with a
barrier, :math:`\lambda_i (1 - h_i) = \mu`. A loss with the gradient :math:`\bar\lambda` in the multipliers has the
gradient :math:`\bar y` in the points:

.. math:: (H + \mathrm{diag}(s / \lambda))\, \ell = \bar\lambda, \qquad \bar y = \nabla_y \sum_i \ell_i h_i(\lambda, y)

with the negative Hessian H of the dual. The multipliers are an analytic function of the points where every active point
has a positive weight and the products :math:`(y_i, 1)(y_i, 1)^\top` of the active points are linearly independent.
Elsewhere (a circle, a cube) they are only directionally differentiable, and a ridge selects the element of least norm.
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
from sepc_torch.partitioning.processes import one_thread
from sepc_torch.shapes import Bool, Float

# The gap to which the offline solver certifies its result before the crossover: Newton's method then starts with eight
# correct digits.
_OFFLINE_GAP = 1e-9
# If no active set passes the certificate (points without weight touch a ball of the floor's radius), the ellipsoid is
# that of this barrier parameter. Its log-volume is at most M / 2 times this above the minimum.
_LAST_BARRIER = 1e-9
# Added to the Hessian, whose diagonal is 1 on the active set. Two steps of iterative refinement remove its effect.
_RIDGE = 1e-9
_REFINEMENTS = 2


def solve(form: type[Form], y: Float[Tensor, "B M D"], mask: Bool[Tensor, "B M"], smoothing: float) -> Solution:
    """Find the optimal multipliers and slacks of every set; ``solved`` is False for sets that no method solves.

    On the CPU the plain program is solved set by set by the offline solver, whose working sets make it faster for large
    sets. The smoothed program, the floored program and all programs on a GPU go to the batched interior-point method.
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
    """Solve all sets by the batched method; sets that fail the certificate get the solution of a small barrier."""
    found = crossover(form, y, mask, screened(form, y, mask))
    if bool(found.solved.all()):
        return found
    left = (~found.solved).nonzero().squeeze(-1)
    return _replaced(found, left, screened(form, y[left], mask[left], _LAST_BARRIER))


def _replaced(found: Solution, index: Tensor, by: Solution) -> Solution:
    return Solution(*(a.index_copy(0, index, b) for a, b in zip(found, by, strict=True)))


@one_thread()
def _one_by_one(y: Float[Tensor, "B M D"], mask: Bool[Tensor, "B M"]) -> Solution:
    """Solve each set by the offline solver; a set on which its linear algebra fails is returned without weights.

    The matrices are small: threads of BLAS would wait for each other longer than one of them computes.
    """
    from sepc_torch.solvers.d_optimal import Design  # imports SciPy, which the batched method does not need

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
        # The weights of a design sum to 1, those of the dual to D. Its lifted points have g = 1 + D h.
        g = np.square(design.root @ lifted).sum(axis=0)
        u[b, real], s[b, real] = weights, np.maximum(1.0 - (g - 1.0) / dim, 0.0)
    return Solution(torch.from_numpy(u), torch.from_numpy(s), torch.from_numpy(u.any(axis=1)))


class Multipliers(torch.autograd.Function):
    """The multipliers (B, M) of a solution as a function of the points (B, M, D)."""

    @staticmethod
    def forward(
        ctx: Any, y: Float[Tensor, "B M D"], mask: Bool[Tensor, "B M"], form: type[Form], found: Solution
    ) -> Float[Tensor, "B M"]:
        """Return the multipliers of the solution."""
        ctx.save_for_backward(y, mask, found.u, found.s)
        ctx.form = form
        return found.u.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        """Return the gradient by the implicit function theorem; it cannot be differentiated again."""
        y, mask, u, s = ctx.saved_tensors
        with torch.no_grad():
            gradient = multipliers_gradient(ctx.form, y, mask, Solution(u, s, mask[:, 0]), grads[0])
        if torch.is_grad_enabled():  # create_graph=True: the caller may differentiate again
            gradient = OnlyOnce.apply(gradient, grads[0], y)  # type: ignore[no-untyped-call]
        return gradient, None, None, None


class OnlyOnce(torch.autograd.Function):
    """The identity in its first argument; its backward pass, with respect to any argument, is an error."""

    @staticmethod
    def forward(_ctx: Any, gradient: Tensor, *_sources: Tensor) -> Tensor:
        """Return the first argument."""
        return gradient.clone()

    @staticmethod
    def backward(_ctx: Any, *_grads: Tensor) -> Any:
        """Raise an error."""
        raise RuntimeError(
            "A layer of sepc_torch has first derivatives only, and this backward pass needs second derivatives. "
            "Differentiate once, without create_graph=True, or take finite differences of the gradient."
        )


def multipliers_gradient(
    form: type[Form], y: Float[Tensor, "B M D"], mask: Bool[Tensor, "B M"], found: Solution, grad: Float[Tensor, "B M"]
) -> Float[Tensor, "B M D"]:
    r"""The gradient :math:`\bar y` in the points of a loss with the gradient :math:`\bar\lambda` in the multipliers.

    Only points with positive weight enter the system, at most D (D + 3) / 2 of them without smoothing. The gradient of
    all other points is exactly zero.
    """
    index, real = gather_active(mask & (found.u > 0))
    u, s = (torch.where(real, x.gather(1, index), 0.0) for x in (found.u, found.s))
    here = form(gather_rows(y, index), real, u)
    # Scaled by r = sqrt(lambda): (r H r + s) x = r grad, l = r x.
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

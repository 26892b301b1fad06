r"""Batched interior-point method in torch for the dual of program (2), and the crossover to the active set.

The method is Mehrotra's predictor-corrector, as in :mod:`sepc_torch.solvers.interior_point`, on

.. math:: h_i(\lambda) + s_i = 1, \qquad \lambda_i s_i = \mu, \qquad \lambda, s \ge 0,

for many sets at once. Each step is a batch of Cholesky factorisations; a converged set stays unchanged until the last
set converges. For :math:`\mu > 0` the ellipsoid holds every point strictly inside, and its log-volume exceeds the
minimum by at most :math:`\tfrac12 M \mu`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from sepc_torch.layers.dual import Form
from sepc_torch.shapes import Bool, Float

# The sum of lambda_i s_i at which the method stops: the crossover can then separate active from inactive points.
_TOLERANCE = 1e-11
_MAX_STEPS = 60
# Largest error of the slacks after a step, and the largest number of halvings of a step to get there.
_TRUST = 0.3
_HALVINGS = 6
# Steps without progress at the end of the path after which rounding is taken to allow no more.
_PATIENCE = 5
# The first Newton step on the active set squares an error of 1e-8; the others settle the last digits.
_NEWTON_STEPS = 3
_CROSSOVER_ROUNDS = 6
# Tolerance of the certificate (active points on the surface, no point outside), well above the rounding of h.
_ON_SURFACE = 1e-10
# Regularises the Hessian where it is singular (support on a circle or a cube), far above its rounding there.
_RIDGE = 1e-12
# Rounds after which the size of the working set is doubled.
_SCREENING_ROUNDS = 12


class Solution(NamedTuple):
    """Multipliers and slacks of every point (0 and 1 for masked points), and which sets are certified as solved."""

    u: Float[Tensor, "B M"]
    s: Float[Tensor, "B M"]
    solved: Bool[Tensor, "B"]


def interior_point(form: type[Form], y: Float[Tensor, "B M D"], mask: Bool[Tensor, "B M"], mu: float = 0.0) -> Solution:
    """Follow the central path of every set to the barrier parameter ``mu``."""
    u, s = _start(form, y, mask)
    here = form(y, mask, _only(u, mask))
    count = mask.sum(-1, keepdim=True).clamp_min(1)
    tolerance = min(_TOLERANCE, 1e-2 * mu) if mu > 0 else _TOLERANCE
    best_u, best_s = u, s
    best = torch.full_like(u[:, 0], math.inf)
    stalled = torch.zeros_like(best)
    done = torch.zeros_like(mask[:, 0])
    for _ in range(_MAX_STEPS):
        product = _only(u * s, mask)
        mean = product.sum(-1, keepdim=True) / count
        off_path = _only(u * s - mu, mask).abs().sum(-1)
        off_surface = _off_surface(here, s, mask)
        error = torch.nan_to_num(torch.maximum(off_path, off_surface.squeeze(-1)), nan=math.inf)
        better = error < best
        best_u, best_s = torch.where(better[:, None], u, best_u), torch.where(better[:, None], s, best_s)
        ended = mean.squeeze(-1) <= 1e-9 + 2 * mu
        stalled = torch.where((error < 0.7 * best) | ~ended, torch.zeros_like(stalled), stalled + 1)
        best = torch.minimum(best, error)
        done = done | (error <= tolerance) | (stalled >= _PATIENCE) | error.isinf()
        if bool(done.all()):
            break
        du, ds = _direction(here, u, s, mean, off_surface, mask, mu)
        # A converged set must not move: its steps are quotients of rounding errors.
        primal, dual = (_longest(x, dx, mask).masked_fill(done[:, None], 0.0) for x, dx in ((u, du), (s, ds)))
        for _ in range(_HALVINGS):
            next_u, next_s = (torch.where(a > 0, x + a * dx, x) for x, dx, a in ((u, du, primal), (s, ds, dual)))
            here = form(y, mask, _only(next_u, mask))
            # h is far from linear: a long early step leaves errors in the slacks that later steps, kept short by the
            # boundary, cannot repair.
            far = ~(_off_surface(here, next_s, mask) <= off_surface.clamp_min(_TRUST)) & ~done[:, None]
            if not bool(far.any()):
                break
            primal, dual = torch.where(far, 0.5 * primal, primal), torch.where(far, 0.5 * dual, dual)
        u, s = next_u, next_s
    accepted = best <= (max(1e-8, 1e-4 * mu) if mu > 0 else 1e-6)
    return Solution(_only(best_u, mask), torch.where(mask, best_s, torch.ones_like(best_s)), accepted)


def _off_surface(here: Form, s: Float[Tensor, "B M"], mask: Bool[Tensor, "B M"]) -> Float[Tensor, "B 1"]:
    """Largest error of the slacks, which should be 1 - h."""
    return _only(1 - here.h - s, mask).abs().amax(-1, keepdim=True)


def _start(
    form: type[Form], y: Float[Tensor, "B M D"], mask: Bool[Tensor, "B M"]
) -> tuple[Float[Tensor, "B M"], Float[Tensor, "B M"]]:
    """Equal weights, large enough that no point is far outside, and matching slacks; 1 for masked points."""
    count = mask.sum(-1, keepdim=True).clamp_min(1)
    equal = mask.to(y.dtype) * (y.shape[-1] / count)
    outermost = form(y, mask, equal).h.amax(-1, keepdim=True)
    u = equal * (2 * outermost).clamp_min(1e-3)
    s = (1 - form(y, mask, u).h).clamp_min(0.1)
    return torch.where(mask, u, torch.ones_like(u)), torch.where(mask, s, torch.ones_like(s))


def _direction(
    here: Form,
    u: Float[Tensor, "B M"],
    s: Float[Tensor, "B M"],
    mean: Float[Tensor, "B 1"],
    off_surface: Float[Tensor, "B 1"],
    mask: Bool[Tensor, "B M"],
    mu: float,
) -> tuple[Float[Tensor, "B M"], Float[Tensor, "B M"]]:
    r"""Predictor and corrector steps: solve :math:`(H + s / \lambda)\, d\lambda = h - 1 + \sigma / \lambda` twice."""
    # Scaling by r = sqrt(lambda) gives the best-conditioned form of the matrix: r H r + s.
    r = u.sqrt()
    k = r.unsqueeze(-1) * here.hessian() * r.unsqueeze(-2)
    k.diagonal(dim1=-2, dim2=-1).add_(s + 1e-15)
    root, _ = torch.linalg.cholesky_ex(k)

    def towards(target: Tensor) -> tuple[Tensor, Tensor]:
        rhs = _only(here.h - 1 + target / u, mask)
        du = r * torch.cholesky_solve((r * rhs).unsqueeze(-1), root).squeeze(-1)
        return du, _only((target - s * du) / u - s, mask)

    du, ds = towards(torch.full_like(s, mu))
    ahead = (u + _longest(u, du, mask, 1.0) * du) * (s + _longest(s, ds, mask, 1.0) * ds)
    ahead_mean = _only(ahead, mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp_min(1)
    # The products must not vanish before the slacks are accurate.
    centring = torch.maximum((ahead_mean / mean).clamp(0, 1) ** 3, off_surface.clamp_max(0.5))
    # At the end of a path with mu > 0 the plain Newton step aims at the solution; a correction would only disturb it.
    arrived = mean <= 2 * mu
    return towards(torch.where(arrived, mu, (centring * mean).clamp_min(mu) - du * ds))


def _longest(
    x: Float[Tensor, "B M"], dx: Float[Tensor, "B M"], mask: Bool[Tensor, "B M"], fraction: float = 0.99
) -> Float[Tensor, "B 1"]:
    """The longest step, at most 1, that goes at most the given fraction of the way to the boundary."""
    steepest = _only(dx / x, mask).amin(-1, keepdim=True)
    return torch.where(steepest < -fraction, -fraction / steepest, torch.ones_like(steepest))


def screened(form: type[Form], y: Float[Tensor, "B M D"], mask: Bool[Tensor, "B M"], mu: float = 0.0) -> Solution:
    """Run the interior-point method on a working set of points; the other points are checked afterwards.

    At most D (D + 3) / 2 points determine an ellipsoid, and the time of a step grows with the cube of the number of
    points. A few multiplicative steps give first weights, and the points with the largest weights form the working set.
    Points found outside replace points without weight until none is outside. If that takes too many rounds, the size of
    the working set is doubled. The result is that of :func:`interior_point` on all points.
    """
    dim = y.shape[-1]
    size = max(48, dim * (dim + 3) // 2 + 2 * dim)
    if y.shape[1] <= 2 * size:
        return interior_point(form, y, mask, mu)
    u = mask.to(y.dtype) * (dim / mask.sum(-1, keepdim=True).clamp_min(1))
    for _ in range(4):
        u = u * form(y, mask, u).h
        u = u * (dim / u.sum(-1, keepdim=True))
    score = torch.where(mask, u, torch.full_like(u, -1.0))
    rounds = 0
    while 2 * size < y.shape[1]:
        rounds += 1
        working = score.topk(size, -1).indices
        part = interior_point(form, gather_rows(y, working), mask.gather(1, working), mu)
        u = torch.zeros_like(u).scatter(1, working, part.u)
        h = form(y, mask, u).h
        if bool((h.amax(-1) <= 1 + 1e-9).all()):
            s = (1 - h).clamp_min(0).scatter(1, working, part.s)
            return Solution(u, torch.where(mask, s, torch.ones_like(s)), part.solved)
        carries = torch.zeros_like(mask).scatter(1, working, part.u > part.s)
        score = torch.where(mask, h + carries * (h.amax(-1, keepdim=True) + 1), torch.full_like(h, -1.0))
        size = 2 * size if rounds % _SCREENING_ROUNDS == 0 else size
    return interior_point(form, y, mask, mu)


def crossover(form: type[Form], y: Float[Tensor, "B M D"], mask: Bool[Tensor, "B M"], near: Solution) -> Solution:
    r"""Refine a solution near the optimum to rounding: Newton's method on :math:`h_i = 1` over the active set.

    The active set starts with the points with :math:`\lambda_i > s_i`. Points whose weight becomes negative leave it,
    and points found outside join. ``solved`` marks the sets that satisfy the optimality conditions to rounding: no
    point is outside, and all points with positive weight are on the surface. The weights of inactive points are exactly
    zero.
    """
    active = mask & (near.u > near.s)
    start, solved = near.u, torch.zeros_like(near.solved)
    u, s = near.u, near.s
    for _ in range(_CROSSOVER_ROUNDS):
        index, real = gather_active(active)
        points, weights = gather_rows(y, index), _only(start.gather(1, index), real)
        for _ in range(_NEWTON_STEPS):
            here = form(points, real, weights)
            r = weights.sqrt()
            k = r.unsqueeze(-1) * here.hessian() * r.unsqueeze(-2)
            k.diagonal(dim1=-2, dim2=-1).add_(torch.where(real, _RIDGE * weights, torch.ones_like(weights)))
            root, _ = torch.linalg.cholesky_ex(k)
            step = r * torch.cholesky_solve((r * (here.h - 1)).unsqueeze(-1), root).squeeze(-1)
            weights = weights + _only(step, real)
            real = real & (weights > 0)
            weights = _only(weights, real)
        found = torch.zeros_like(u).scatter(1, index, weights)
        h = form(y, mask, found).h
        carries = found > 0
        outside = h.amax(-1) > 1 + _ON_SURFACE
        off = torch.where(carries, h - 1, torch.zeros_like(h)).abs().amax(-1) > _ON_SURFACE
        now = ~outside & ~off & carries.any(-1) & h.isfinite().all(-1)
        fresh = (now & ~solved)[:, None]
        u, s = torch.where(fresh, found, u), torch.where(fresh, torch.where(carries, 0.0, 1 - h), s)
        solved = solved | now
        if bool(solved.all()):
            break
        joins = mask & (h > 1 + _ON_SURFACE)
        again = torch.where(torch.isfinite(h).all(-1, keepdim=True), carries | joins, active)
        # Points that join start with a small positive weight.
        start = torch.where(carries, found, torch.where(joins, 1e-6 * torch.ones_like(found), start))
        active = torch.where(solved[:, None], active, again)
    return Solution(u, torch.where(mask, s.clamp_min(0), torch.ones_like(s)), solved)


def gather_active(active: Bool[Tensor, "B M"]) -> tuple[Tensor, Bool[Tensor, "B K"]]:
    """Indices of the active points of each set, in order and padded to one length, and which are not padding."""
    size = max(1, int(active.sum(-1).max()))
    # A stable sort keeps the order of the points, and so the result, equal on every device.
    index = (~active).byte().sort(stable=True, dim=-1).indices[:, :size]
    return index, active.gather(1, index)


def gather_rows(y: Float[Tensor, "B M D"], index: Tensor) -> Float[Tensor, "B K D"]:
    """The points at the given indices of each set."""
    return y.gather(1, index.unsqueeze(-1).expand(-1, -1, y.shape[-1]))


def _only(values: Float[Tensor, "B M"], mask: Bool[Tensor, "B M"]) -> Float[Tensor, "B M"]:
    """The values with zeros where the mask is False."""
    return torch.where(mask, values, torch.zeros_like(values))

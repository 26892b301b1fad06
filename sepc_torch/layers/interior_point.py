r"""Batched, masked interior point for the dual of program (2), and the crossover to its exact active set.

The same method as :mod:`sepc_torch.solvers.interior_point`, Mehrotra's predictor and corrector on

.. math:: h_i(\lambda) + s_i = 1, \qquad \lambda_i s_i = \mu, \qquad \lambda, s \ge 0,

for many sets at once: every step is a batch of Cholesky factorisations, and a set that is done waits for the others.
For :math:`\mu > 0` the ellipsoid holds every point strictly inside, and its log-volume is above the minimum by at most
:math:`\tfrac12 M \mu`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from sepc_torch.layers.dual import Form
from sepc_torch.shapes import Bool, Float

# Where the sum of lambda_i s_i ends: the crossover then tells every weight from every slack.
_TOLERANCE = 1e-11
_MAX_STEPS = 60
# A step may leave slacks wrong by this much, and is halved at most so often to get there.
_TRUST = 0.3
_HALVINGS = 6
# Steps without progress, once the path has ended, before arithmetic is said to allow no more.
_PATIENCE = 5
# Newton on the active set squares an error of 1e-8 in the first step; the others settle the last digits.
_NEWTON_STEPS = 3
_CROSSOVER_ROUNDS = 6
# The certificate: every active point on the surface and no point outside, to a hundred roundings of the dimension.
_ON_SURFACE = 1e-10
# Regularises the Hessian of supports on which it is singular (a circle, a cube), far above its rounding there.
_RIDGE = 1e-12
# Rounds in which points may join the working points before there may be twice as many of them.
_SCREENING_ROUNDS = 12


class Solution(NamedTuple):
    """Multipliers and slacks of every point, zero and one where the mask is off, and which sets are proven solved."""

    u: Float[Tensor, "B M"]
    s: Float[Tensor, "B M"]
    solved: Bool[Tensor, "B"]


def interior_point(form: type[Form], y: Float[Tensor, "B M D"], mask: Bool[Tensor, "B M"], mu: float = 0.0) -> Solution:
    """Follow the path of centres to the barrier parameter ``mu`` in all sets."""
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
        # A set that is done must not move: its steps are divisions of rounding errors.
        primal, dual = (_longest(x, dx, mask).masked_fill(done[:, None], 0.0) for x, dx in ((u, du), (s, ds)))
        for _ in range(_HALVINGS):
            next_u, next_s = (torch.where(a > 0, x + a * dx, x) for x, dx, a in ((u, du, primal), (s, ds, dual)))
            here = form(y, mask, _only(next_u, mask))
            # h is far from linear: a long first step leaves slacks that no later step, short of the boundary, repairs.
            far = ~(_off_surface(here, next_s, mask) <= off_surface.clamp_min(_TRUST)) & ~done[:, None]
            if not bool(far.any()):
                break
            primal, dual = torch.where(far, 0.5 * primal, primal), torch.where(far, 0.5 * dual, dual)
        u, s = next_u, next_s
    accepted = best <= (max(1e-8, 1e-4 * mu) if mu > 0 else 1e-6)
    return Solution(_only(best_u, mask), torch.where(mask, best_s, torch.ones_like(best_s)), accepted)


def _off_surface(here: Form, s: Float[Tensor, "B M"], mask: Bool[Tensor, "B M"]) -> Float[Tensor, "B 1"]:
    """How far the slacks are from 1 - h, at most."""
    return _only(1 - here.h - s, mask).abs().amax(-1, keepdim=True)


def _start(
    form: type[Form], y: Float[Tensor, "B M D"], mask: Bool[Tensor, "B M"]
) -> tuple[Float[Tensor, "B M"], Float[Tensor, "B M"]]:
    """Equal weights, heavy enough that no point is far outside, and slacks to match; ones where the mask is off."""
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
    r"""Predictor and corrector: :math:`(H + s / \lambda)\, d\lambda = h - 1 + \sigma / \lambda` for two targets."""
    # In the scale of the weights the matrix is as well conditioned as it gets: r H r + s with r = sqrt(lambda).
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
    # The products must not vanish before the slacks are right.
    centring = torch.maximum((ahead_mean / mean).clamp(0, 1) ** 3, off_surface.clamp_max(0.5))
    # At the end of a path with a barrier Newton's own step is the target, and to correct it would only disturb it.
    arrived = mean <= 2 * mu
    return towards(torch.where(arrived, mu, (centring * mean).clamp_min(mu) - du * ds))


def _longest(
    x: Float[Tensor, "B M"], dx: Float[Tensor, "B M"], mask: Bool[Tensor, "B M"], fraction: float = 0.99
) -> Float[Tensor, "B 1"]:
    """The longest step of at most 1 that goes at most the given fraction of the way to the boundary."""
    steepest = _only(dx / x, mask).amin(-1, keepdim=True)
    return torch.where(steepest < -fraction, -fraction / steepest, torch.ones_like(steepest))


def screened(form: type[Form], y: Float[Tensor, "B M D"], mask: Bool[Tensor, "B M"], mu: float = 0.0) -> Solution:
    """The interior point on the points that may carry weight, which changes nothing: all others are checked.

    At most D (D + 3) / 2 points determine an ellipsoid. The working points are the outermost for weights that a few
    multiplicative steps have improved; those found outside join, until none is. Where that does not end there are twice
    as many working points, and so on: the time of a step grows with their cube.
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
    r"""From a point near the optimum to the optimum: Newton's method on :math:`h_i = 1` over the active set.

    Active are at first the points with :math:`\lambda_i > s_i`; those whose weight turns negative leave, those found
    outside join. ``solved`` says where the conditions of optimality hold to rounding: no point outside, all that carry
    weight on the surface. Weights off the active set are exactly zero.
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
        # Those that join need some weight to start from.
        start = torch.where(carries, found, torch.where(joins, 1e-6 * torch.ones_like(found), start))
        active = torch.where(solved[:, None], active, again)
    return Solution(u, torch.where(mask, s.clamp_min(0), torch.ones_like(s)), solved)


def gather_active(active: Bool[Tensor, "B M"]) -> tuple[Tensor, Bool[Tensor, "B K"]]:
    """Indices of the active points, in order, filled up to one length, and which of them are real."""
    size = max(1, int(active.sum(-1).max()))
    # A stable sort keeps the order of the points, and with it the result, the same on every device.
    index = (~active).byte().sort(stable=True, dim=-1).indices[:, :size]
    return index, active.gather(1, index)


def gather_rows(y: Float[Tensor, "B M D"], index: Tensor) -> Float[Tensor, "B K D"]:
    """The points of the given indices."""
    return y.gather(1, index.unsqueeze(-1).expand(-1, -1, y.shape[-1]))


def _only(values: Float[Tensor, "B M"], mask: Bool[Tensor, "B M"]) -> Float[Tensor, "B M"]:
    """Zeros where the mask is off."""
    return torch.where(mask, values, torch.zeros_like(values))

r"""The covering program through cvxpylayers: program (2) of the paper, with the points as parameters.

.. math:: \max_{F, b}\ \sum_k \log F_{kk} \quad\text{s.t.}\quad \|F y_i - b\| \le 1, \qquad F\ \text{upper triangular}

An ellipsoid has one such factor just as it has one symmetric one. With it the program has no matrix cone, which makes
it up to 13 times faster, its gradients up to 100 times more accurate, and keeps clear of a fault of diffcp 1.1.9:
there, Clarabel's duals of matrix cones come back permuted, and gradients are wrong without a word. The points are
whitened first, by a map that counts as constant; sets are filled up to one size with points at their centroid, which
are strictly inside and change nothing.

``CvxpyLayer`` objects are never registered as submodules: their sparse buffers break copies, distributed training and
state dicts. They live in a cache of the thread, one for each size, because a call writes into them.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import cvxpy as cp
import diffcp
import numpy as np
import torch
from cvxpylayers.torch import CvxpyLayer
from scipy.optimize import nnls
from torch import Tensor

from sepc_torch.layers.implicit import OnlyOnce
from sepc_torch.layers.native import Whitening
from sepc_torch.shapes import Array, Bool, Float

# SCS at 1e-8: gradients then are as good as diffcp's least-squares solver (LSQR) can make them, 1e-6 to 1e-4; at the
# default 1e-4 they are ten times worse, and beyond 1e-8 nothing is gained. One thread: diffcp would start a pool of all
# cores at every call. The iterations are SCS's own limit.
_SOLVER: dict[str, Any] = {"solve_method": "SCS", "eps": 1e-8, "max_iters": 100_000, "n_jobs_forward": 1}
# A point may be left this far outside, and the log-volume this much above what multipliers prove. Both are a hundred
# times what the tolerance above gives.
_ACCEPTED = 1e-5
# Points this near to the surface may carry multipliers.
_NEAR = 1e-2

_cache = threading.local()


def fit(
    z: Float[Tensor, "B M D"], mask: Bool[Tensor, "B M"], white: Whitening, points: int
) -> tuple[Float[Tensor, "B D"], Float[Tensor, "B D D"]]:
    """Centres and whiteners of all sets, computed on the CPU and returned to where the points are."""
    dim = z.shape[-1]
    if len(z) == 0:  # cvxpylayers cannot stack the answers of no sets
        return z.sum(-2), z.new_zeros(0, dim, dim)
    y = torch.nn.functional.pad(white.coordinates(z, mask).cpu(), (0, 0, 0, points - z.shape[1]))
    entries, b = run(_program(points, dim), [y], "The covering program", f"{points} points x {dim} dims")
    row, column = torch.triu_indices(dim, dim)
    factor = y.new_zeros(len(y), dim, dim).index_put((torch.arange(len(y))[:, None], row, column), entries)
    _check(y.detach().numpy(), factor.detach().numpy(), b.detach().numpy())
    inside = torch.linalg.solve_triangular(factor, b.mT, upper=True).to(z.device)
    center = white.origin + torch.linalg.solve_triangular(white.transform, inside, upper=True).mT
    return center.squeeze(-2), factor.to(z.device) @ white.transform


def _program(points: int, dim: int) -> CvxpyLayer:
    def state() -> CvxpyLayer:
        y = cp.Parameter((points, dim))
        entries, b = cp.Variable(dim * (dim + 1) // 2), cp.Variable((1, dim))
        factor = cp.vec_to_upper_tri(entries)
        # One second-order cone a point; cp.norm(...) <= 1 would add a row and a variable to each.
        covers = cp.SOC(np.ones(points), y @ factor.T - np.ones((points, 1)) @ b, axis=1)
        problem = cp.Problem(cp.Maximize(cp.sum(cp.log(cp.diag(factor)))), [covers])
        return CvxpyLayer(problem, [y], [entries, b])

    return cached(("covering", points, dim), state)


def cached(key: tuple[Any, ...], state: Callable[[], CvxpyLayer]) -> CvxpyLayer:
    """The program of this size, stated once in every thread; that takes from 0.02 s to 1 s."""
    programs: dict[tuple[Any, ...], CvxpyLayer] = _cache.__dict__.setdefault("programs", {})
    if key not in programs:
        programs[key] = state()
    return programs[key]


def run(program: CvxpyLayer, parameters: list[Tensor], name: str, size: str, **changes: Any) -> tuple[Tensor, ...]:
    """Solve a program for a batch of CPU tensors in float64, by SCS; its failure is an error with a remedy.

    The derivative is diffcp's; to differentiate it again is an error.
    """
    settings: dict[str, Any] = _SOLVER | changes
    mode = settings.pop("mode", "lsqr")
    if torch.is_grad_enabled() and any(p.requires_grad for p in parameters):
        # Without gradients diffcp would hand these to SCS, which refuses them.
        settings |= {"mode": mode, "n_jobs_backward": 1}
    try:
        found: tuple[Tensor, ...] = _Once.apply(  # type: ignore[no-untyped-call]
            lambda *given: program(*given, solver_args=settings), *parameters
        )
    except diffcp.SolverError as error:
        raise failure(name, size, str(error)) from error
    if not all(bool(x.isfinite().all()) for x in found):
        raise failure(name, size, "its answer is not finite")
    return found


class _Once(torch.autograd.Function):
    """A stated program with its first derivative; cvxpylayers would give zero for the second, without a word."""

    @staticmethod
    def forward(ctx: Any, program: Callable[..., tuple[Tensor, ...]], *parameters: Tensor) -> tuple[Tensor, ...]:
        # Autograd calls this with gradients off, so that the program gets a graph of its own.
        needed = ctx.needs_input_grad[1:]
        given = [p.detach().requires_grad_(need) for p, need in zip(parameters, needed, strict=True)]
        with torch.set_grad_enabled(any(needed)), _without_third_party_warnings():
            ctx.found = program(*given)
        ctx.given = [p for p in given if p.requires_grad]
        ctx.save_for_backward(*parameters)
        return tuple(x.detach().clone() for x in ctx.found)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        parameters = ctx.saved_tensors  # an error of torch's own where the graph has been freed
        with _without_third_party_warnings():
            # Kept, because a caller with retain_graph=True may come again; it goes with the graph outside.
            found = torch.autograd.grad(ctx.found, ctx.given, [g.detach() for g in grads], retain_graph=True)
        if torch.is_grad_enabled():  # create_graph=True: somebody may ask for the gradient of the gradient
            found = tuple(OnlyOnce.apply(g, *grads, *parameters) for g in found)  # type: ignore[no-untyped-call]
        left = iter(found)
        return None, *(next(left) if need else None for need in ctx.needs_input_grad[1:])


@contextmanager
def _without_third_party_warnings() -> Iterator[None]:
    """Keep quiet what a caller cannot change: cvxpylayers 1.2 calls np.array(tensor), whose __array__ lacks ``copy``.

    Filters are global. Two threads at once may leave this one in place, or see the warning; neither does harm.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "__array__ implementation doesn't accept a copy", DeprecationWarning)
        yield


def failure(name: str, size: str, said: str) -> RuntimeError:
    """The error to raise, with a remedy."""
    return RuntimeError(
        f"{name}, {size}, through cvxpylayers: SCS failed or gave an answer that does not pass the checks: {said}. "
        "Scale the points, use fewer features, or backend='native' where it is offered."
    )


def _check(y: Float[Array, "B M D"], factor: Float[Array, "B D D"], b: Float[Array, "B 1 D"]) -> None:
    r"""Refuse answers that leave a point outside or that no multipliers prove to be near the optimum.

    diffcp checks neither. In the coordinates :math:`v = F y - b` of a solution, any multipliers :math:`\lambda \ge 0`
    of the points prove the log-volume to be at most

    .. math:: \tfrac D2 \log(\omega / D)
              - \tfrac12 \log\det \textstyle\sum_i \lambda_i (v_i - \bar v)(v_i - \bar v)^\top

    above the minimum, :math:`\omega = \sum_i \lambda_i`; zero for those with :math:`\sum_i \lambda_i v_i = 0`,
    :math:`\sum_i \lambda_i v_i v_i^\top = I` and :math:`\omega = D`, which non-negative least squares finds. (The last
    follows from the second for points on the surface, and keeps multipliers away from points just below it.)
    """
    dim = y.shape[-1]
    v = y @ factor.swapaxes(-2, -1) - b
    size = f"{y.shape[1]} points x {dim} dims"
    row, column = np.triu_indices(dim)
    target = np.concatenate([np.eye(dim)[row, column], np.zeros(dim), [float(dim)]])
    for number, points in enumerate(v):
        radius = np.linalg.norm(points, axis=1)
        near = points[radius > 1.0 - _NEAR]
        if radius.max() > 1.0 + _ACCEPTED or len(near) <= dim:
            said = f"in set {number} the farthest point is at distance {radius.max():.6f} of 1"
            raise failure("The covering program", size, said)
        moments = np.concatenate([near[:, row] * near[:, column], near, np.ones((len(near), 1))], axis=1)
        multipliers, _ = nnls(moments.T, target)
        mass = float(multipliers.sum())
        offsets = near - multipliers @ near / mass
        moment = (offsets * multipliers[:, None]).T @ offsets
        excess = 0.5 * dim * float(np.log(mass / dim)) - 0.5 * float(np.linalg.slogdet(moment)[1])
        if not excess <= _ACCEPTED * dim:
            said = f"in set {number} its log-volume may be {excess:.1e} above the minimum"
            raise failure("The covering program", size, said)

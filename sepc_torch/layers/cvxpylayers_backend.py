r"""The cvxpylayers backend of :class:`~sepc_torch.MVELayer`: program (2) in cvxpy with the points as parameters.

.. math:: \max_{F, b}\ \sum_k \log F_{kk} \quad\text{s.t.}\quad \|F y_i - b\| \le 1, \qquad F\ \text{upper triangular}

An ellipsoid has exactly one such triangular factor, as it has exactly one symmetric factor. The triangular form needs
no matrix cone, so that solving is faster and gradients are more accurate. It also avoids a fault of diffcp 1.1.9, which
permutes Clarabel's duals of matrix cones and then returns wrong gradients without an error. The points are whitened
first by a map that counts as constant for gradients. Sets are padded to one size with points at their centroid, which
are strictly inside and have no effect.

``CvxpyLayer`` objects are not registered as submodules: their sparse buffers break copies, distributed training and
state dicts. Each thread has its own cache of them, one per size, because a call writes into the object.
:func:`compiled` and :func:`run` serve :class:`~sepc_torch.RCHLayer` too.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

try:
    import cvxpy as cp
    import diffcp
    from cvxpylayers.torch import CvxpyLayer
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "RCHLayer and MVELayer(backend='cvxpylayers') need cvxpylayers: pip install 'sepc_torch[layers]'.",
        name=error.name,
    ) from error
from scipy.optimize import nnls
from torch import Tensor

from sepc_torch.layers.implicit import OnlyOnce
from sepc_torch.layers.native import Whitening
from sepc_torch.shapes import Array, Bool, Float

# SCS at a tolerance of 1e-8: the accuracy of gradients (see experiments/solvers) is then limited by diffcp's
# least-squares solver (LSQR) and not by SCS. One thread, because diffcp would start a pool of all cores at every call.
# The limit on iterations is SCS's own default.
_SOLVER: dict[str, Any] = {"solve_method": "SCS", "eps": 1e-8, "max_iters": 100_000, "n_jobs_forward": 1}
# Largest accepted distance of a point beyond the surface, and largest accepted excess of the log-volume per dimension.
# Both are far above the errors at the tolerance above.
_ACCEPTED = 1e-5
# Points within this distance of the surface may have positive multipliers.
_NEAR = 1e-2

_NAME = "The minimum-volume ellipsoid"
_cache = threading.local()


def fit(
    z: Float[Tensor, "B M D"], mask: Bool[Tensor, "B M"], white: Whitening, points: int
) -> tuple[Float[Tensor, "B D"], Float[Tensor, "B D D"]]:
    """Fit the centres and whiteners of all sets on the CPU and return them on the device of the points."""
    dim = z.shape[-1]
    if len(z) == 0:  # cvxpylayers cannot stack an empty list of results
        return z.sum(-2), z.new_zeros(0, dim, dim)
    y = torch.nn.functional.pad(white.coordinates(z, mask).cpu(), (0, 0, 0, points - z.shape[1]))
    entries, b = run(_program(points, dim), [y], _NAME, f"{points} points x {dim} dims")
    row, column = torch.triu_indices(dim, dim)
    factor = y.new_zeros(len(y), dim, dim).index_put((torch.arange(len(y))[:, None], row, column), entries)
    _check(y.detach().numpy(), factor.detach().numpy(), b.detach().numpy())
    inside = torch.linalg.solve_triangular(factor, b.mT, upper=True).to(z.device)
    center = white.origin + torch.linalg.solve_triangular(white.transform, inside, upper=True).mT
    return center.squeeze(-2), factor.to(z.device) @ white.transform


def _program(points: int, dim: int) -> CvxpyLayer:
    """Program (2) for sets of this size."""

    def state() -> CvxpyLayer:
        y = cp.Parameter((points, dim))
        entries, b = cp.Variable(dim * (dim + 1) // 2), cp.Variable((1, dim))
        factor = cp.vec_to_upper_tri(entries)
        # One second-order cone per point; cp.norm(...) <= 1 would add a row and a variable to each.
        covers = cp.SOC(np.ones(points), y @ factor.T - np.ones((points, 1)) @ b, axis=1)
        problem = cp.Problem(cp.Maximize(cp.sum(cp.log(cp.diag(factor)))), [covers])
        return CvxpyLayer(problem, [y], [entries, b])

    return compiled(("minimum volume", points, dim), state)


def compiled(key: tuple[Any, ...], state: Callable[[], CvxpyLayer]) -> CvxpyLayer:
    """The compiled program of this key; ``state`` compiles it on the first call in every thread."""
    programs: dict[tuple[Any, ...], CvxpyLayer] = _cache.__dict__.setdefault("programs", {})
    if key not in programs:
        programs[key] = state()
    return programs[key]


def run(program: CvxpyLayer, parameters: list[Tensor], name: str, size: str, **changes: Any) -> tuple[Tensor, ...]:
    """Solve a program with SCS for a batch of CPU tensors in float64; raise an error if SCS fails.

    The derivative is diffcp's. Differentiating it again is an error.

    Args:
        program: The compiled program.
        parameters: One tensor per parameter of the program.
        name: Name of the program, for errors.
        size: Size of the program, for errors.
        changes: Solver settings that replace the default ones.
    """
    settings: dict[str, Any] = _SOLVER | changes
    mode = settings.pop("mode", "lsqr")
    if torch.is_grad_enabled() and any(p.requires_grad for p in parameters):
        # Only with gradients: otherwise diffcp passes these settings on to SCS, which rejects them.
        settings |= {"mode": mode, "n_jobs_backward": 1}
    try:
        found: tuple[Tensor, ...] = _Once.apply(  # type: ignore[no-untyped-call]
            lambda *given: program(*given, solver_args=settings), *parameters
        )
    except diffcp.SolverError as error:
        raise failure(name, size, str(error)) from error
    if not all(bool(x.isfinite().all()) for x in found):
        raise failure(name, size, "the solution holds NaN or infinity")
    return found


class _Once(torch.autograd.Function):
    """A compiled program with its first derivative; for second ones cvxpylayers would silently return zero."""

    @staticmethod
    def forward(ctx: Any, program: Callable[..., tuple[Tensor, ...]], *parameters: Tensor) -> tuple[Tensor, ...]:
        # Autograd calls forward with gradients disabled; enabling them gives the program a graph of its own.
        needed = ctx.needs_input_grad[1:]
        given = [p.detach().requires_grad_(need) for p, need in zip(parameters, needed, strict=True)]
        with torch.set_grad_enabled(any(needed)), _without_third_party_warnings():
            ctx.found = program(*given)
        ctx.given = [p for p in given if p.requires_grad]
        ctx.save_for_backward(*parameters)
        return tuple(x.detach().clone() for x in ctx.found)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        parameters = ctx.saved_tensors  # torch raises its own error if the graph has been freed
        with _without_third_party_warnings():
            # The inner graph is retained for callers with retain_graph=True; it is freed with the outer graph.
            found = torch.autograd.grad(ctx.found, ctx.given, [g.detach() for g in grads], retain_graph=True)
        if torch.is_grad_enabled():  # create_graph=True: the caller may differentiate again
            found = tuple(OnlyOnce.apply(g, *grads, *parameters) for g in found)  # type: ignore[no-untyped-call]
        left = iter(found)
        return None, *(next(left) if need else None for need in ctx.needs_input_grad[1:])


@contextmanager
def _without_third_party_warnings() -> Iterator[None]:
    """Suppress a warning that a caller cannot avoid: cvxpylayers 1.2 calls np.array(tensor) without ``copy``.

    Warning filters are global. Two threads at once may leave this filter in place, or see the warning. Both are
    harmless.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "__array__ implementation doesn't accept a copy", DeprecationWarning)
        yield


def failure(name: str, size: str, reason: str) -> RuntimeError:
    """The error for a failed program, with a remedy."""
    return RuntimeError(
        f"{name}, {size}, through cvxpylayers: SCS failed, or its solution did not pass the checks: {reason}. "
        "Scale the points, use fewer features, or use backend='native' (MVELayer and EllipsoidLoss have it)."
    )


def _check(y: Float[Array, "B M D"], factor: Float[Array, "B D D"], b: Float[Array, "B 1 D"]) -> None:
    r"""Raise an error for a solution that leaves a point outside or whose duality gap is too large.

    diffcp checks neither. In the coordinates :math:`v = F y - b` of a solution, any multipliers :math:`\lambda \ge 0`
    of the points certify that the log-volume exceeds the minimum by at most

    .. math:: \tfrac D2 \log(\omega / D)
              - \tfrac12 \log\det \textstyle\sum_i \lambda_i (v_i - \bar v)(v_i - \bar v)^\top,
              \qquad \omega = \sum_i \lambda_i.

    The bound is zero for multipliers with :math:`\sum_i \lambda_i v_i = 0`, :math:`\sum_i \lambda_i v_i v_i^\top = I`
    and :math:`\omega = D`. Non-negative least squares finds them. (For points on the surface the last condition follows
    from the second; it keeps weight away from points just below the surface.)
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
            reason = f"in set {number} the farthest point is at distance {radius.max():.6f}, not 1"
            raise failure(_NAME, size, reason)
        moments = np.concatenate([near[:, row] * near[:, column], near, np.ones((len(near), 1))], axis=1)
        multipliers, _ = nnls(moments.T, target)
        mass = float(multipliers.sum())
        offsets = near - multipliers @ near / mass
        moment = (offsets * multipliers[:, None]).T @ offsets
        excess = 0.5 * dim * float(np.log(mass / dim)) - 0.5 * float(np.linalg.slogdet(moment)[1])
        if not excess <= _ACCEPTED * dim:
            reason = f"in set {number} the log-volume may exceed the minimum by {excess:.1e}"
            raise failure(_NAME, size, reason)

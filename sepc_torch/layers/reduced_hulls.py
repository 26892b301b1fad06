"""The torch layer :class:`RCHLayer`: closest points of two reduced convex hulls, program (4), through cvxpylayers."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from sepc_torch.data.options import check_count
from sepc_torch.layers.mve import refuse_transforms
from sepc_torch.shapes import Float

if TYPE_CHECKING:
    from cvxpylayers.torch import CvxpyLayer

# Hulls closer than this, relative to the extent of the points, count as touching: the difference has no direction.
_TOUCHING = 1e-6
# Largest accepted duality gap, relative to the squared extent, as in sepc_torch.solvers.programs: the squared norm of
# the difference w minus the least product of w with a difference of the hulls. It bounds the squared error of w.
_ACCEPTED = 1e-8
# Tolerance of SCS, tight enough that its solutions pass the check above. At 1e-8, enough for ellipsoids, some do not.
_TOLERANCE = 1e-10
# Up to this number of points the derivative is solved by a dense factorisation, which is more accurate than LSQR.
_DENSE = 200
_NAME = "The closest points of reduced hulls"


class ClosestPoints(NamedTuple):
    r"""The closest points :math:`c = X^\top u` and :math:`d = Y^\top v` of two reduced hulls, with their weights.

    The difference :math:`w = c - d` is unique. c, d and the weights need not be; if they are not, their gradients are
    those of the solution found.
    """

    c: Float[Tensor, "*batch D"]
    d: Float[Tensor, "*batch D"]
    u: Float[Tensor, "*batch N"]
    v: Float[Tensor, "*batch M"]

    def distance(self) -> Float[Tensor, "*batch"]:
        """The distance between the hulls."""
        return torch.linalg.vector_norm(self.c - self.d, dim=-1)


class RCHLayer(nn.Module):
    r"""Layer that finds the closest points of two reduced convex hulls, program (4), differentiable in the points.

    .. math:: \min_{u, v}\ \|X^\top u - Y^\top v\| \quad \text{s.t.}\quad e^\top u = e^\top v = 1,\ \ 0 \le u, v \le D e

    The norm is not squared: the minimiser is the same, but the derivative of the cone program is more accurate. A hull
    with cap 1 / N is the centroid of its points and needs no program. The layer computes on the CPU in float64, one
    pair after the other, with autocast off. It returns the dtype of the points (float32 for half precision) on their
    device. It needs the extra ``layers``. Hulls that intersect are an error, because their difference is zero and has
    no gradient.

    Args:
        first: Number of points N of the first set.
        second: Number of points M of the second set.
        features: Number of features D.
        cap: The bound on the weights, at least ``1 / min(N, M)``, which is the default and reduces the smaller set to
            its centroid; 1 gives the whole convex hulls.

    >>> layer = RCHLayer(2, 3, 2)
    >>> x, y = torch.tensor([[0.0, 0.0], [0.0, 2.0]]), torch.tensor([[3.0, 1.0], [5.0, 1.0], [7.0, 1.0]])
    >>> closest = layer(x.requires_grad_(), y)
    >>> closest.c.tolist(), [round(value, 4) for value in closest.d.tolist()]
    ([0.0, 1.0], [4.0, 1.0])
    """

    def __init__(self, first: int, second: int, features: int, cap: float | None = None) -> None:
        super().__init__()
        self.first, self.second = check_count(first, "first", 1), check_count(second, "second", 1)
        self.features = check_count(features, "features", 1)
        least = 1.0 / min(self.first, self.second)
        cap = least if cap is None else min(float(cap), 1.0)
        if not cap >= least * (1.0 - 1e-12):
            raise ValueError(
                f"cap={cap} is below 1/min(first, second) = {least}: {min(self.first, self.second)} weights of at most "
                f"{cap} cannot sum to 1. Give a cap of at least {least}, or leave it out."
            )
        self.cap = max(cap, least)

    def extra_repr(self) -> str:
        """The settings, for ``repr``."""
        return f"first={self.first}, second={self.second}, features={self.features}, cap={self.cap}"

    def forward(self, x: Float[Tensor, "*batch N D"], y: Float[Tensor, "*batch M D"]) -> ClosestPoints:
        """Find the closest points of the hulls of x (N, D) and y (M, D), or of B pairs of sets."""
        refuse_transforms(type(self).__name__)
        for name, z, rows in (("x", x, self.first), ("y", y, self.second)):
            if z.ndim not in (2, 3) or z.shape[-2:] != (rows, self.features) or z.shape[:-2] != x.shape[:-2]:
                raise ValueError(
                    f"{name} must have shape ({rows}, {self.features}), or (B, {rows}, {self.features}) with the "
                    f"same B for x and y; got {tuple(z.shape)}."
                )
            if not bool(z.isfinite().all()):
                raise ValueError(
                    f"{name} holds NaN or infinity. Drop these points, or check for a training step that diverged "
                    "(learning rate too high)."
                )
        dtype = torch.promote_types(torch.promote_types(x.dtype, y.dtype), torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            wide = [(z if z.ndim == 3 else z.unsqueeze(0)).cpu().double() for z in (x, y)]
            found = self._solve(*wide)
        single = x.ndim == 2
        return ClosestPoints(*((t.squeeze(0) if single else t).to(x.device, dtype) for t in found))

    def _solve(self, x: Float[Tensor, "B N D"], y: Float[Tensor, "B M D"]) -> ClosestPoints:
        if len(x) == 0:  # cvxpylayers cannot stack an empty list of results
            return ClosestPoints(x.sum(1), y.sum(1), x.sum(2), y.sum(2))
        # A common shift and scaling of both sets changes neither the weights nor the optimality conditions.
        joint = torch.cat([x, y], dim=1).detach()
        origin = 0.5 * (x.detach().mean(1, keepdim=True) + y.detach().mean(1, keepdim=True))
        extent = (joint - origin).abs().amax((1, 2), keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)
        unit = [(z - origin) / extent for z in (x, y)]
        u, v = (z.new_full(z.shape[:2], 1.0 / z.shape[1]) for z in unit)
        free = [self.cap * z.shape[1] > 1.0 + 1e-9 for z in unit]
        if any(free):
            from sepc_torch.layers import cvxpylayers_backend  # imports cvxpylayers, an optional dependency

            # A set reduced to its centroid enters the program as a hull of one point.
            given = [z if moves else z.mean(1, keepdim=True) for z, moves in zip(unit, free, strict=True)]
            counts = given[0].shape[1], given[1].shape[1]
            program = cvxpylayers_backend.compiled(
                ("reduced hulls", *counts, self.features, self.cap), lambda: _program(*counts, self)
            )
            mode = "dense" if sum(counts) <= _DENSE else "lsqr"
            found = cvxpylayers_backend.run(program, given, _NAME, self._size(), mode=mode, eps=_TOLERANCE)
            u, v = (w if moves else equal for w, moves, equal in zip(found, free, (u, v), strict=True))
        # In the shifted coordinates the difference c - d loses no digits far from the origin.
        c = (u.unsqueeze(1) @ unit[0]).squeeze(1)
        d = (v.unsqueeze(1) @ unit[1]).squeeze(1)
        self._check(*(t.detach() for t in (*unit, u, v, c - d)))
        back = extent.squeeze(1), origin.squeeze(1)
        return ClosestPoints(back[1] + back[0] * c, back[1] + back[0] * d, u, v)

    def _size(self) -> str:
        return f"{self.first} + {self.second} points x {self.features} dims"

    def _check(self, x: Tensor, y: Tensor, u: Tensor, v: Tensor, w: Tensor) -> None:
        """Raise an error for hulls that intersect and for solutions that violate the optimality conditions."""
        from sepc_torch.layers import cvxpylayers_backend
        from sepc_torch.solvers.programs.reduced_hull import least_mean

        touching = (torch.linalg.vector_norm(w, dim=-1) <= _TOUCHING).nonzero().squeeze(-1).tolist()
        if touching:
            raise ValueError(
                f"The reduced hulls of the pairs {touching} of the batch intersect, so that the direction between them "
                "and its gradient are undefined. Give a smaller cap, or leave these pairs out."
            )
        for number in range(len(w)):
            ahead, behind = (x[number] @ w[number]).numpy(), (y[number] @ w[number]).numpy()
            gap = float(w[number] @ w[number]) - least_mean(ahead, self.cap) - least_mean(-behind, self.cap)
            off = max(abs(float(t[number].sum()) - 1.0) for t in (u, v))
            if not max(gap, off) <= _ACCEPTED:
                raise cvxpylayers_backend.failure(
                    _NAME, self._size(), f"in pair {number} the optimality conditions fail by {max(gap, off):.1e}"
                )


def _program(first: int, second: int, layer: RCHLayer) -> CvxpyLayer:
    """Program (4) for sets of these sizes, with the points as parameters."""
    import cvxpy as cp
    from cvxpylayers.torch import CvxpyLayer

    from sepc_torch.solvers.programs.reduced_hull import weights_and_difference

    x, y = cp.Parameter((first, layer.features)), cp.Parameter((second, layer.features))
    # The weight of a single point is 1. A cap below 1 would make the program infeasible.
    caps = [layer.cap if points > 1 else None for points in (first, second)]
    u, v, difference, constraints = weights_and_difference(x, y, caps)
    w = cp.Variable(layer.features)
    return CvxpyLayer(cp.Problem(cp.Minimize(cp.norm(w, 2)), [w == difference, *constraints]), [x, y], [u, v])

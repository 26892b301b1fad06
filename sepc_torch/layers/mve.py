"""The minimum-volume ellipsoid as a torch layer."""

from __future__ import annotations

import math
import operator
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from sepc_torch.layers import native
from sepc_torch.layers.ellipsoids import RefittedEllipsoid
from sepc_torch.layers.native import Whitening, whiten
from sepc_torch.shapes import Bool, Float

Backend = Literal["native", "cvxpylayers"]


class MVELayer(nn.Module):
    r"""The ellipsoid of least volume that covers a set of points, differentiable in the points.

    .. math:: \max_{W, c}\ \log\det W \quad\text{s.t.}\quad \|W (z_i - c)\| \le 1,\ \ \text{semi-axes} \ge \tau

    Two backends solve the same program. ``"native"``, the default, computes where the points are: a certified interior
    point, Newton's method on the active set, and implicit differentiation, exact to rounding; points strictly inside
    have the gradient zero, exactly. ``"cvxpylayers"`` (extra ``layers``) states the program in cvxpy and differentiates
    the cone program; it computes on the CPU, one set after the other, wherever the points are. Both compute in float64
    with autocast off and return the dtype of the points (float32 for half precision), on their device. Both are
    deterministic. Second derivatives are refused.

    Memory of the native backend, in float64: on the CPU a few matrices (S, S) for S support points, at most
    D (D + 3) / 2, and set; on a GPU, and with smoothing, a few (M, M). Times: ``experiments/bench_layers.py``.

    The module holds no tensors: it copies, pickles and trains with any strategy, and adds nothing to a state dict.

    Args:
        points: Largest number of points M in a set.
        features: Number of features D.
        backend: ``"native"`` or ``"cvxpylayers"``.
        smoothing: Barrier parameter :math:`\mu`, native only. Above 0 every point counts a little, which makes a smooth
            map also of sets whose support is not unique (points on a circle or a cube); the ellipsoid still covers
            every point and its log-volume exceeds the minimum by at most :math:`\tfrac12 M \mu`.
        floor: Least semi-axis :math:`\tau`, native only, as in :func:`~sepc_torch.minimum_volume_ellipsoid`: with one,
            sets that are flat or hold few points have an ellipsoid too. Without, they are an error. Where a ball of
            that radius covers a set it is the ellipsoid, and its centre, which is then not unique, the analytic centre:
            a smooth function of all points, so that there points inside have a gradient too.

    >>> layer = MVELayer(points=5, features=2)
    >>> z = torch.tensor([[0.0, 0.0], [2.0, 0.0], [0.0, 2.0], [2.0, 2.0], [1.5, 1.0]], requires_grad=True)
    >>> e = layer(z)
    >>> e.center, e.log_volume().exp()
    (tensor([1., 1.], grad_fn=...), tensor(2.0000, grad_fn=...))
    >>> e.log_volume().backward()
    >>> z.grad[4]  # the last point is inside
    tensor([0., 0.])
    """

    def __init__(
        self,
        points: int,
        features: int,
        *,
        backend: Backend = "native",
        smoothing: float = 0.0,
        floor: float = 0.0,
    ) -> None:
        super().__init__()
        self.points, self.features = at_least_one(points, "points"), at_least_one(features, "features")
        if backend not in get_args(Backend):
            raise ValueError(f"backend must be 'native' or 'cvxpylayers', got {backend!r}.")
        for name, value in (("smoothing", smoothing), ("floor", floor)):
            at_least_zero(value, name)
            if value and backend != "native":
                raise ValueError(f"{name}={value} needs backend='native'; cvxpylayers states the plain program.")
        self.backend: Backend = backend
        self.smoothing, self.floor = float(smoothing), float(floor)

    def extra_repr(self) -> str:
        """The settings."""
        said = f"points={self.points}, features={self.features}, backend={self.backend!r}"
        for name in ("smoothing", "floor"):
            said += f", {name}={getattr(self, name)}" if getattr(self, name) else ""
        return said

    def forward(
        self, z: Float[Tensor, "*batch M D"], mask: Bool[Tensor, "*batch M"] | None = None
    ) -> RefittedEllipsoid:
        """The ellipsoid of points (M, D), or those of B sets (B, M, D).

        Args:
            z: The points; M may be anything up to ``points``.
            mask: Which of the points exist. What stands in the places of the others, NaN included, changes nothing.
        """
        if torch.compiler.is_compiling():
            # Nothing in a solver is worth compiling (99 s for 30 points in 3 dimensions). The decorator would import
            # torch._dynamo, 2 s, for everyone; here it is imported already.
            return torch.compiler.disable(self._refit)(z, mask)
        return self._refit(z, mask)

    def _refit(self, z: Float[Tensor, "*batch M D"], mask: Bool[Tensor, "*batch M"] | None) -> RefittedEllipsoid:
        self._check(z, mask)
        dtype = torch.promote_types(z.dtype, torch.float32)
        batched = z if z.ndim == 3 else z.unsqueeze(0)
        exists = torch.ones_like(batched[..., 0], dtype=torch.bool) if mask is None else mask.reshape(batched.shape[:2])
        with torch.autocast(z.device.type, enabled=False):
            # What does not exist must not reach the arithmetic: zero times NaN is NaN, in gradients too.
            wide = torch.where(exists.unsqueeze(-1), batched.double(), 0.0)
            self._check_values(wide.detach(), exists)
            center, whitener = self._fit(wide, exists, z.dtype)
        if z.ndim == 2:
            center, whitener = center.squeeze(0), whitener.squeeze(0)
        return RefittedEllipsoid(center.to(dtype), whitener.to(dtype))

    def _fit(
        self, z: Float[Tensor, "B M D"], mask: Bool[Tensor, "B M"], given: torch.dtype
    ) -> tuple[Float[Tensor, "B D"], Float[Tensor, "B D D"]]:
        white = whiten(z.detach(), mask, given)
        if not self.floor and bool(white.flat.any()):
            raise ValueError(self._flatness(white, mask))
        if self.backend == "native":
            return native.fit(z, mask, white, self.smoothing, self.floor)
        from sepc_torch.layers import cvxpylayers_backend  # with cvxpylayers, an extra

        return cvxpylayers_backend.fit(z, mask, white, self.points)

    def _check(self, z: Tensor, mask: Tensor | None) -> None:
        refuse_transforms(type(self).__name__)
        if not z.is_floating_point():
            raise TypeError(f"Points must be a floating-point tensor, got {z.dtype}; convert them with z.float().")
        if z.ndim not in (2, 3) or not 1 <= z.shape[-2] <= self.points or z.shape[-1] != self.features:
            raise ValueError(
                f"Points must have shape (M, {self.features}) or (B, M, {self.features}) with M from 1 to "
                f"{self.points}, got {tuple(z.shape)}."
            )
        if mask is not None and mask.shape != z.shape[:-1]:
            raise ValueError(
                f"The mask of points {tuple(z.shape)} has shape {tuple(z.shape[:-1])}, got {tuple(mask.shape)}."
            )
        if mask is not None and mask.dtype != torch.bool:
            raise TypeError(
                f"The mask must be a tensor of torch.bool, True where a point exists, got {mask.dtype}; convert it "
                "with mask.bool()."
            )

    def _check_values(self, z: Float[Tensor, "B M D"], mask: Bool[Tensor, "B M"]) -> None:
        bad = ~z.isfinite().flatten(1).all(-1) | ~mask.any(-1)
        if not bool(bad.any()):
            return
        empty = (~mask.any(-1)).nonzero().squeeze(-1).tolist()
        if empty:
            raise ValueError(f"The sets {empty} of the batch have no points: leave them out of the batch.")
        raise ValueError(
            f"The sets {bad.nonzero().squeeze(-1).tolist()} of the batch hold NaN or infinity. Mask such points, or "
            "look for a step of training that was too long."
        )

    def _flatness(self, white: Whitening, mask: Bool[Tensor, "B M"]) -> str:
        sets = white.flat.nonzero().squeeze(-1)
        return (
            f"The sets {sets.tolist()} of the batch, of {mask.sum(-1)[sets].tolist()} points, do not span all "
            f"{self.features} dimensions, so they have no ellipsoid of positive volume; at least {self.features + 1} "
            "points in general position are needed. Give the layer a floor, project to fewer features, or mask fewer "
            "points."
        )


def at_least_one(value: Any, name: str) -> int:
    """A count, or a clear error."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):  # True is an index, but nobody means a count by it
        raise TypeError(f"{name} must be a whole number of at least 1, got {value!r}; give a number such as 8.")
    if number < 1:
        raise ValueError(f"{name} must be at least 1, got {number}.")
    return number


def at_least_zero(value: Any, name: str) -> float:
    """A finite number that is not negative, or a clear error."""
    try:
        number = None if isinstance(value, str) else float(value)
    except (TypeError, ValueError):
        number = None
    if number is None:
        raise TypeError(f"{name} must be a finite number of at least 0, got {value!r}; give a number such as 0.0.")
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"{name} must be a finite number of at least 0, got {value!r}.")
    return number


def refuse_transforms(name: str) -> None:
    """An error inside of torch.func.grad, vmap and the like, whose tensors have no values to compute with."""
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            f"{name} cannot run inside of a transform of torch.func (grad, vmap, jacrev and so on): it needs the "
            "values of the points. Take gradients by backward() or torch.autograd.grad, and give several sets as one "
            "batch."
        )

"""The torch layer :class:`MVELayer`: minimum-volume ellipsoids of point sets, differentiable in the points."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor, nn

from sepc_torch.data.options import check_choice, check_count, check_not_negative
from sepc_torch.layers import native
from sepc_torch.layers.ellipsoids import RefittedEllipsoid
from sepc_torch.layers.native import Whitening, whiten
from sepc_torch.shapes import Bool, Float

Backend = Literal["native", "cvxpylayers"]


class MVELayer(nn.Module):
    r"""Layer that fits the ellipsoid of least volume to a set of points, differentiable in the points.

    .. math:: \max_{W, c}\ \log\det W \quad\text{s.t.}\quad \|W (z_i - c)\| \le 1,\ \ \text{semi-axes} \ge \tau

    Two backends solve this program. ``"native"``, the default, runs on the device of the points: a certified
    interior-point method, Newton's method on the active set, and implicit differentiation. It is exact to rounding, and
    the gradient of a point strictly inside is exactly zero. ``"cvxpylayers"`` (extra ``layers``) states the program in
    cvxpy and differentiates the cone program. It runs on the CPU, one set after the other, wherever the points are.
    Both backends compute in float64 with autocast off, return the dtype of the points (float32 for half precision) on
    their device, and are deterministic. Both raise an error for second derivatives.

    Memory of the native backend, in float64: on the CPU, per set, a few matrices (S, S) for S support points, at most
    D (D + 3) / 2; on a GPU, and with smoothing, a few (M, M). ``experiments/solvers/bench_layers.py`` measures times.

    The module holds no tensors. It can be copied, pickled and trained with any strategy, and adds nothing to a state
    dict.

    Args:
        points: Largest number of points M in a set.
        features: Number of features D.
        backend: ``"native"`` or ``"cvxpylayers"``.
        smoothing: Barrier parameter :math:`\mu`, native only. Above 0 every point has a positive weight, and the map
            is smooth also for sets whose support is not unique (points on a circle or a cube). The ellipsoid still
            covers every point, and its log-volume exceeds the minimum by at most :math:`\tfrac12 M \mu`.
        floor: Least semi-axis :math:`\tau`, native only, as in :func:`~sepc_torch.minimum_volume_ellipsoid`. With a
            floor, sets that are flat or have few points have an ellipsoid too; without one, they are an error. If a
            ball of that radius covers a set, the ball is the ellipsoid. Its centre is then not unique, and the layer
            returns the analytic centre, a smooth function of all points: points inside then have a gradient too.

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
        self.points, self.features = check_count(points, "points", 1), check_count(features, "features", 1)
        check_choice("backend", backend, get_args(Backend))
        for name, value in (("smoothing", smoothing), ("floor", floor)):
            check_not_negative(value, name)
            if value and backend != "native":
                raise ValueError(
                    f"{name}={value} needs backend='native'; the cvxpylayers backend has neither smoothing nor a floor."
                )
        self.backend: Backend = backend
        self.smoothing, self.floor = float(smoothing), float(floor)

    def extra_repr(self) -> str:
        """The settings, for ``repr``; smoothing and floor only if set."""
        text = f"points={self.points}, features={self.features}, backend={self.backend!r}"
        for name in ("smoothing", "floor"):
            text += f", {name}={getattr(self, name)}" if getattr(self, name) else ""
        return text

    def forward(
        self, z: Float[Tensor, "*batch M D"], mask: Bool[Tensor, "*batch M"] | None = None
    ) -> RefittedEllipsoid:
        """Fit the ellipsoid of one set of points (M, D), or the ellipsoids of B sets (B, M, D).

        Args:
            z: The points; M is at most ``points``.
            mask: True for points that exist. The values of masked points, NaN included, have no effect.
        """
        if torch.compiler.is_compiling():
            # Compiling the loops of a solver takes far longer than running them. torch.compiler.disable as a decorator
            # would import torch._dynamo for every user of the module; while compiling it is already imported.
            return torch.compiler.disable(self._refit)(z, mask)
        return self._refit(z, mask)

    def _refit(self, z: Float[Tensor, "*batch M D"], mask: Bool[Tensor, "*batch M"] | None) -> RefittedEllipsoid:
        self._check(z, mask)
        dtype = torch.promote_types(z.dtype, torch.float32)
        batched = z if z.ndim == 3 else z.unsqueeze(0)
        exists = torch.ones_like(batched[..., 0], dtype=torch.bool) if mask is None else mask.reshape(batched.shape[:2])
        with torch.autocast(z.device.type, enabled=False):
            # Masked values must not enter the arithmetic: zero times NaN is NaN, in gradients too.
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
        from sepc_torch.layers import cvxpylayers_backend  # imports cvxpylayers, an optional dependency

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
                f"The mask for points of shape {tuple(z.shape)} must have shape {tuple(z.shape[:-1])}, got "
                f"{tuple(mask.shape)}."
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
            f"The sets {bad.nonzero().squeeze(-1).tolist()} of the batch hold NaN or infinity. Mask these points, or "
            "check for a training step that diverged (learning rate too high)."
        )

    def _flatness(self, white: Whitening, mask: Bool[Tensor, "B M"]) -> str:
        sets = white.flat.nonzero().squeeze(-1)
        return (
            f"The sets {sets.tolist()} of the batch, of {mask.sum(-1)[sets].tolist()} points, do not span all "
            f"{self.features} dimensions, so they have no ellipsoid of positive volume; at least {self.features + 1} "
            "points in general position are needed. Give the layer a floor, project to fewer features, or mask fewer "
            "points."
        )


def refuse_transforms(name: str) -> None:
    """Raise an error inside a torch.func transform (grad, vmap, ...): its tensors have no values to compute with."""
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            f"{name} cannot run inside a torch.func transform (grad, vmap, jacrev and so on): it needs the values of "
            "the points. Take gradients with backward() or torch.autograd.grad, and pass several sets as one batch."
        )

r"""Ellipsoid bank: torch module that maps points (B, D) to Mahalanobis distances (B, K)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor, nn

from sepc_torch.data.arrays import single_row_hint
from sepc_torch.data.options import check_choice
from sepc_torch.data.warn import warn_user
from sepc_torch.ellipsoid import SURFACE_TOLERANCE
from sepc_torch.model import torch_ops
from sepc_torch.model.derived import Derived
from sepc_torch.model.device_sync import warm_up
from sepc_torch.model.kernels import Kernel, Split, fused_distances, possible, split
from sepc_torch.model.precision import as_dtype
from sepc_torch.shapes import Float


class PrincipalAxes(NamedTuple):
    """Centres (K, D), unit axis directions (K, D, D) as rows, and semi-axis lengths (K, D) of K ellipsoids."""

    centers: Float[Tensor, "K D"]
    directions: Float[Tensor, "K D D"]
    lengths: Float[Tensor, "K D"]


class EllipsoidBank(Derived):
    r"""Mahalanobis distances :math:`d_k(z) = \|W_k (z - c_k)\|` to K ellipsoids.

    Centres and whiteners are buffers: they move with ``.to()`` and are saved, but they are not trained. The module
    computes distances in the wider of the input's and its own dtype, and never below float32: ``.half()`` moves the
    module but keeps float32, and autocast is disabled inside.

    The module subtracts an ``origin`` from points and centres. The default origin is the mean of the centres. Data
    far from zero (a year, a time stamp) therefore lose no digits in float32 beyond those of the points themselves.

    Args:
        centers: Centres :math:`c_k` (K, D); relative to ``origin`` if ``origin`` is given.
        whiteners: Whiteners :math:`W_k` (K, D, D).
        origin: The origin (D,); by default the mean of the centres, rounded to float32.
        kernel: ``"torch"`` uses plain torch operators. ``"triton"`` uses one fused kernel of equal accuracy, on CUDA
            in float32. ``"auto"`` uses the fused kernel wherever it can run.

    >>> import torch
    >>> bank = EllipsoidBank(torch.tensor([[0.0, 0.0], [3.0, 0.0]]), torch.stack([torch.eye(2), 0.5 * torch.eye(2)]))
    >>> bank(torch.tensor([[1.0, 0.0]]))
    tensor([[1., 1.]])
    """

    derived = ("prepared",)
    origin: Tensor
    offsets: Tensor
    whiteners: Tensor

    def __init__(
        self,
        centers: Float[Tensor, "K D"],
        whiteners: Tensor,
        origin: Float[Tensor, "D"] | None = None,
        *,
        kernel: Kernel = "auto",
    ) -> None:
        super().__init__()
        count, dim = centers.shape
        check_choice("kernel", kernel, get_args(Kernel))
        if whiteners.shape != (count, dim, dim):
            raise ValueError(
                f"{count} centres in {dim} dimensions need whiteners of shape {(count, dim, dim)}, "
                f"got {tuple(whiteners.shape)}. Pass one {dim} x {dim} whitener per centre."
            )
        if origin is None:
            # Float32 represents this origin exactly: subtracting it from a nearby float32 point is exact.
            mean = centers.mean(dim=0)
            origin = mean.float().to(centers.dtype)
            origin = torch.where(origin.isfinite(), origin, mean)  # a float64 bank can lie beyond float32's range
            centers = centers - origin
        self.register_buffer("origin", origin)
        self.register_buffer("offsets", centers)
        self.register_buffer("whiteners", whiteners)
        self.kernel: Kernel = kernel
        self.prepared: Split | None = None
        self.restore()

    @property
    def centers(self) -> Float[Tensor, "K D"]:
        """Centres (K, D) in the caller's coordinates."""
        return self.origin + self.offsets

    @property
    def dim(self) -> int:
        """Number of features D."""
        return self.offsets.shape[1]

    def __len__(self) -> int:
        return self.offsets.shape[0]

    def forward(self, z: Tensor) -> Float[Tensor, "B K"]:
        r"""Mahalanobis distances (B, K) of points (B, D) to each ellipsoid; distance 1 is the surface."""
        if (prepared := self.prepared_for(z)) is not None:
            return fused_distances(z, self.origin, self.offsets, self.whiteners, prepared)
        z, offsets = self._relative(z)
        if self.kernel == "triton":
            raise RuntimeError(
                f"kernel='triton' runs on a CUDA device in float32 with Triton installed; the bank is in "
                f"{self.offsets.dtype} on {self.offsets.device}, z is in {z.dtype}. Move both to CUDA in float32, or "
                "choose kernel='auto'."
            )
        return torch_ops.distances(z, offsets, as_dtype(self.whiteners, z.dtype))

    def principal_axes(self, scale: Float[Tensor, "D"]) -> PrincipalAxes:
        """Centres relative to the origin and principal axes, after dividing each feature by its scale."""
        _, inverse, directions = torch.linalg.svd(self.whiteners.double() * scale.double())
        dtype = self.whiteners.dtype
        return PrincipalAxes((self.offsets / scale).to(dtype), directions.to(dtype), (1.0 / inverse).to(dtype))

    def prepared_for(self, z: Tensor) -> Split | None:
        """The ellipsoids in the fused kernel's format, or None if the kernel cannot take ``z``; validates ``z``."""
        self._check(z)
        if self.prepared is None or not z.is_cuda or self.prepared.centers.device != z.device:
            return None
        return self.prepared if torch.promote_types(z.dtype, torch.float32) == torch.float32 else None

    def relative(self, z: Tensor) -> Float[Tensor, "B D"]:
        """Points minus the origin, in the wider of their own and the module's dtype; validates ``z``."""
        self._check(z)
        return self._relative(z)[0]

    def _relative(self, z: Tensor) -> tuple[Float[Tensor, "B D"], Float[Tensor, "K D"]]:
        """Points and centres relative to the origin, in the wider dtype."""
        offsets = self.offsets
        dtype = z.dtype if z.dtype == offsets.dtype else torch.promote_types(z.dtype, offsets.dtype)
        return torch_ops.relative(as_dtype(z, dtype), as_dtype(self.origin, dtype)), as_dtype(offsets, dtype)

    def _check(self, z: Any) -> None:
        if not isinstance(z, Tensor):
            raise TypeError(
                f"z must be a tensor, got {type(z).__name__}; use torch.as_tensor(z), or predict for arrays."
            )
        offsets = self.offsets
        if z.dim() != 2 or z.shape[1] != offsets.shape[1]:
            raise ValueError(f"z must have shape (points, {self.dim}), got {tuple(z.shape)}.{single_row_hint(z.shape)}")
        if not z.is_floating_point():
            raise TypeError(f"z must be a floating-point tensor, got {z.dtype}; convert it with z.float().")
        if z.device != offsets.device:
            raise ValueError(f"z is on {z.device} and the ellipsoids on {offsets.device}; move one with .to().")

    def warmup(self, *rows: int) -> float:
        """Compile the kernel before the first request.

        Args:
            rows: Batch sizes; by default 1 and 4096, on CUDA also 32 768.

        Returns:
            The elapsed seconds.
        """
        return warm_up(self, self.offsets, rows)

    def derive(self) -> None:
        """Derive the fused kernel's data from the buffers, whenever they move or change. The data are not saved."""
        wanted = self.kernel != "torch" and possible(self.offsets)
        self.prepared = split(self.offsets, self.whiteners) if wanted else None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        before = self.offsets.dtype
        moved = super()._apply(fn, recurse)
        if before == torch.float64 and self.offsets.dtype == torch.float32 and not self.offsets.is_meta:
            self._warn_of_rounding()
        return moved

    def _warn_of_rounding(self) -> None:
        """Warn if float32 moves the surface of an ellipsoid beyond the surface tolerance.

        The mean of the offsets is the rounding error of the origin. It exceeds the size of the ellipsoids if the data
        lie far from zero relative to their spread, and then the offsets have no digits left for the centres.
        """
        rounding = 0.5 * torch.finfo(torch.float32).eps * self.offsets.mean(dim=0).abs()
        moved = float(torch.linalg.vector_norm(self.whiteners.abs() @ rounding, dim=1).max())
        if moved > 0.5 * SURFACE_TOLERANCE:  # the other half is for the rounding of data near zero
            warn_user(
                "The data lie so far from zero, relative to their spread, that float32 rounds centres of ellipsoids by "
                f"up to {moved:.0e} semi-axes, so training points can lie outside; subtract the mean of each feature, "
                "or use dtype=torch.float64.",
            )

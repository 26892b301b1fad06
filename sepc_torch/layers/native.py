"""The native backend of the layer: solve, then rebuild the ellipsoids from the multipliers so that gradients flow."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sepc_torch.layers.balls import BallCenters, covered
from sepc_torch.layers.dual import FlooredForm, Form, PlainForm, center_and_scatter
from sepc_torch.layers.implicit import Multipliers, solve
from sepc_torch.shapes import Bool, Float

# A set is flat where some direction, with every feature scaled to unit spread, is thinner than this: the squares that a
# Gram matrix holds are rounded at 1e-16, so that whitening by it ends near the root of that.
_FLAT = 3e-8
# Rounding puts points off their hull by at most half a rounding of their magnitude; this many are flat for certain.
_ROUNDINGS = 16


class Whitening(NamedTuple):
    r"""The constant map :math:`y = T (z - o)` of each set, and which sets are too flat to have one.

    T is upper triangular with positive diagonal, so that a whitener of that form in y gives one in z.
    """

    origin: Float[Tensor, "B 1 D"]
    transform: Float[Tensor, "B D D"]
    flat: Bool[Tensor, "B"]

    def coordinates(self, z: Float[Tensor, "B M D"], mask: Bool[Tensor, "B M"]) -> Float[Tensor, "B M D"]:
        """The points in these coordinates, with zeros where the mask is off; differentiable in z."""
        return _masked(z - self.origin, mask) @ self.transform.mT


@torch.no_grad()
def whiten(z: Float[Tensor, "B M D"], mask: Bool[Tensor, "B M"], given: torch.dtype) -> Whitening:
    """Whiten each set by two Gram passes, the second on what the first has made nearly orthonormal.

    ``given`` is the dtype in which the points came: what is within its rounding of a flat set counts as flat.
    """
    # Narrower types than float32 round points off their hull for good: what they give is not flat.
    eps = torch.finfo(torch.float64 if given == torch.float64 else torch.float32).eps
    count = mask.sum(-1).clamp_min(1).to(z.dtype)[:, None, None]
    origin = _masked(z, mask).sum(-2, keepdim=True) / count
    offsets = _masked(z - origin, mask)
    largest = _masked(z, mask).abs().amax(-2)
    spread = (offsets.square().sum(-2) / count[:, 0]).sqrt()
    constant = spread <= _ROUNDINGS * eps * largest
    scale = torch.where(constant, torch.ones_like(spread), spread)

    y = offsets / scale.unsqueeze(-2)
    first, failed = _upper_inverse_root(y.mT @ y / count)
    y = y @ first.mT
    # Where a pivot is noise the direction is good all the same, and the spread measured along it tells.
    along = (y.square().sum(-2) / count[:, 0]).sqrt()
    rounding = _ROUNDINGS * eps * (first * (largest / scale).unsqueeze(-2)).norm(dim=-1)
    thin = (along <= _FLAT * first.norm(dim=-1)) | (along <= rounding)
    second, failed_again = _upper_inverse_root(y.mT @ y / count)
    flat = constant.any(-1) | thin.any(-1) | failed | failed_again | (mask.sum(-1) <= z.shape[-1])
    transform = (second @ first) / scale.unsqueeze(-2)
    flat |= ~transform.isfinite().flatten(1).all(-1)
    eye = torch.eye(z.shape[-1], dtype=z.dtype, device=z.device)
    return Whitening(origin, torch.where(flat[:, None, None], eye, transform), flat)


def _masked(z: Float[Tensor, "B M D"], mask: Bool[Tensor, "B M"]) -> Float[Tensor, "B M D"]:
    """Zeros where the mask is off, whatever stood there."""
    return torch.where(mask.unsqueeze(-1), z, torch.zeros_like(z))


def _upper_inverse_root(covariance: Float[Tensor, "B D D"]) -> tuple[Float[Tensor, "B D D"], Bool[Tensor, "B"]]:
    r"""The upper triangular T with :math:`T C T^\top = I`, and where there is none."""
    # The Cholesky factor of the matrix with both axes reversed is, reversed back, an upper triangular root.
    lower, info = torch.linalg.cholesky_ex(covariance.flip(-2, -1))
    eye = torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device).expand_as(covariance)
    lower = torch.where(info[:, None, None] > 0, eye, lower)
    return torch.linalg.solve_triangular(lower, eye, upper=False).flip(-2, -1), info > 0


Factors = tuple[Tensor, Tensor]
"""Centres (B, D) and upper triangular whiteners (B, D, D)."""


def fit(
    z: Float[Tensor, "B M D"], mask: Bool[Tensor, "B M"], white: Whitening, smoothing: float, floor: float
) -> Factors:
    """The minimum-volume ellipsoids of all sets; without a floor none may be flat.

    A floor below every semi-axis changes nothing, so that only the sets for which it matters solve the floored program;
    and where a ball of its radius covers all points, it is the ellipsoid.
    """
    if floor == 0:
        return _ellipsoids(PlainForm, z, mask, white, smoothing)
    # In units of the floor its semi-axis is 1; whitening would turn that into another matrix.
    eye = torch.eye(z.shape[-1], dtype=z.dtype, device=z.device)
    in_floors = Whitening(white.origin, (eye / floor).expand_as(white.transform), white.flat)
    if smoothing > 0:
        return _floored(z, mask, white, in_floors, smoothing, floor)
    y = in_floors.coordinates(z, mask)
    round_sets, found = covered(y.detach(), mask)
    if not bool(round_sets.any()):
        return _floored(z, mask, white, in_floors, smoothing, floor)
    balls, others = (which.nonzero().squeeze(-1) for which in (round_sets, ~round_sets))
    inside = BallCenters.apply(y[balls], mask[balls], found[balls])  # type: ignore[no-untyped-call]
    center, whitener = _floored(
        z[others], mask[others], _select(white, others), _select(in_floors, others), smoothing, floor
    )
    order = torch.cat([balls, others]).argsort()
    return (
        torch.cat([white.origin[balls].squeeze(-2) + floor * inside, center])[order],
        torch.cat([in_floors.transform[balls], whitener])[order],
    )


def _floored(
    z: Float[Tensor, "B M D"],
    mask: Bool[Tensor, "B M"],
    white: Whitening,
    in_floors: Whitening,
    smoothing: float,
    floor: float,
) -> Factors:
    spans = (~white.flat).nonzero().squeeze(-1)
    center, whitener = _ellipsoids(PlainForm, z[spans], mask[spans], _select(white, spans), smoothing)
    thick = torch.linalg.matrix_norm(whitener.detach(), ord=2) * floor <= 1 + 1e-9
    kept = spans[thick]
    floored = torch.ones_like(white.flat).index_fill(0, kept, False).nonzero().squeeze(-1)
    others = _ellipsoids(FlooredForm, z[floored], mask[floored], _select(in_floors, floored), smoothing)
    order = torch.cat([kept, floored]).argsort()
    return torch.cat([center[thick], others[0]])[order], torch.cat([whitener[thick], others[1]])[order]


def _select(white: Whitening, index: Tensor) -> Whitening:
    return Whitening(*(field[index] for field in white))


def _ellipsoids(
    form: type[Form], z: Float[Tensor, "B M D"], mask: Bool[Tensor, "B M"], white: Whitening, smoothing: float
) -> Factors:
    if len(z) == 0:
        return z[:, 0], z.new_zeros(0, z.shape[-1], z.shape[-1])
    y = white.coordinates(z, mask)
    found = solve(form, y.detach(), mask, smoothing)
    if not bool(found.solved.all()):
        sets = (~found.solved).nonzero().squeeze(-1).tolist()
        raise RuntimeError(
            f"Minimum-volume ellipsoid of {z.shape[1]} points x {z.shape[2]} dims: arithmetic did not reach the "
            f"optimum of the sets {sets} of the batch. Give a floor for thin sets, more smoothing, or scale the points."
        )
    u = Multipliers.apply(y, mask, form, found)  # type: ignore[no-untyped-call]
    _, scatter = center_and_scatter(y, u)
    whitener = torch.linalg.cholesky(form.precision(scatter)).mT @ white.transform
    # In the caller's coordinates the centre needs no inverse, and keeps its digits far from zero.
    center = white.origin + (u.unsqueeze(-2) @ (z - white.origin)) / u.sum(-1)[:, None, None]
    return center.squeeze(-2), whitener

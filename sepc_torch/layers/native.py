r"""The native backend of :class:`~sepc_torch.MVELayer`: whiten the points, solve the dual, build the ellipsoids.

1. :func:`whiten` finds for each set the affine map to unit covariance, and marks the sets that are too flat for one.
   The cvxpylayers backend uses these maps too. Gradients treat them as constants.
2. :func:`fit` chooses the program of each set (plain, floored, or a ball of the floor's radius), solves the programs in
   these coordinates, and builds centres and whiteners from the multipliers by differentiable operations.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sepc_torch.layers.balls import BallCenters, covered
from sepc_torch.layers.dual import FlooredForm, Form, PlainForm, center_and_scatter
from sepc_torch.layers.implicit import Multipliers, solve
from sepc_torch.shapes import Bool, Float

# A set is flat if, with every feature scaled to unit spread, it is thinner than this in some direction. A Gram matrix
# holds squares, rounded at 1e-16; whitening by a Gram matrix resolves directions down to the square root, about 1e-8.
_FLAT = 3e-8
# Rounding moves a point off the hull by at most half a rounding unit of its magnitude. A set is flat for certain if its
# spread is within this many rounding units.
_ROUNDINGS = 16

Factors = tuple[Tensor, Tensor]
"""Centres (B, D) and upper triangular whiteners (B, D, D)."""


class Whitening(NamedTuple):
    r"""The map :math:`y = T (z - o)` of each set, constant for gradients, and the sets too flat to have one.

    T is upper triangular with positive diagonal. A whitener W of this form in y gives the whitener W T, of this form
    too, in z. The map of a flat set has T = I.
    """

    origin: Float[Tensor, "B 1 D"]
    transform: Float[Tensor, "B D D"]
    flat: Bool[Tensor, "B"]

    def coordinates(self, z: Float[Tensor, "B M D"], mask: Bool[Tensor, "B M"]) -> Float[Tensor, "B M D"]:
        """The points in the coordinates y, zero for masked points; differentiable in z."""
        return _masked(z - self.origin, mask) @ self.transform.mT

    def select(self, index: Tensor) -> Whitening:
        """The maps of the given sets."""
        return Whitening(*(field[index] for field in self))


@torch.no_grad()
def whiten(z: Float[Tensor, "B M D"], mask: Bool[Tensor, "B M"], given: torch.dtype) -> Whitening:
    """Find the whitening map of each set by two Gram passes; the second corrects the rounding of the first.

    Args:
        z: The points in float64.
        mask: True for points that exist.
        given: The dtype of the caller's points. A set within the rounding of this dtype of a flat set counts as flat.
    """
    # Types narrower than float32 round the points of a flat set so far apart that the set is no longer flat.
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
    # A pivot that is only rounding noise still gives a good direction. The spread along it shows whether it is flat.
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
    """The points with zeros, instead of any value, for masked points."""
    return torch.where(mask.unsqueeze(-1), z, torch.zeros_like(z))


def _upper_inverse_root(covariance: Float[Tensor, "B D D"]) -> tuple[Float[Tensor, "B D D"], Bool[Tensor, "B"]]:
    r"""The upper triangular T with :math:`T C T^\top = I`, and the matrices C for which it does not exist."""
    # Cholesky of the matrix with both axes reversed, reversed back, gives an upper triangular root.
    lower, info = torch.linalg.cholesky_ex(covariance.flip(-2, -1))
    eye = torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device).expand_as(covariance)
    lower = torch.where(info[:, None, None] > 0, eye, lower)
    return torch.linalg.solve_triangular(lower, eye, upper=False).flip(-2, -1), info > 0


def fit(
    z: Float[Tensor, "B M D"], mask: Bool[Tensor, "B M"], white: Whitening, smoothing: float, floor: float
) -> Factors:
    """Fit the minimum-volume ellipsoids of all sets; without a floor no set may be flat.

    A floor below every semi-axis has no effect, so only the other sets solve the floored program. If a ball of the
    floor's radius covers all points of a set, the ball is the ellipsoid.
    """
    if floor == 0:
        return _ellipsoids(PlainForm, z, mask, white, smoothing)
    # The floored program needs coordinates in which the least semi-axis is 1 in every direction: units of the floor.
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
        z[others], mask[others], white.select(others), in_floors.select(others), smoothing, floor
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
    """Solve the plain program of every set that spans, then the floored program where the floor acts."""
    spans = (~white.flat).nonzero().squeeze(-1)
    center, whitener = _ellipsoids(PlainForm, z[spans], mask[spans], white.select(spans), smoothing)
    thick = torch.linalg.matrix_norm(whitener.detach(), ord=2) * floor <= 1 + 1e-9
    kept = spans[thick]
    floored = torch.ones_like(white.flat).index_fill(0, kept, False).nonzero().squeeze(-1)
    others = _ellipsoids(FlooredForm, z[floored], mask[floored], in_floors.select(floored), smoothing)
    order = torch.cat([kept, floored]).argsort()
    return torch.cat([center[thick], others[0]])[order], torch.cat([whitener[thick], others[1]])[order]


def _ellipsoids(
    form: type[Form], z: Float[Tensor, "B M D"], mask: Bool[Tensor, "B M"], white: Whitening, smoothing: float
) -> Factors:
    """Solve one program for all sets and build the ellipsoids from the multipliers, differentiable in z."""
    if len(z) == 0:
        return z[:, 0], z.new_zeros(0, z.shape[-1], z.shape[-1])
    y = white.coordinates(z, mask)
    found = solve(form, y.detach(), mask, smoothing)
    if not bool(found.solved.all()):
        sets = (~found.solved).nonzero().squeeze(-1).tolist()
        raise RuntimeError(
            f"Minimum-volume ellipsoid of {z.shape[1]} points x {z.shape[2]} dims: rounding kept the solver from the "
            f"optimum of the sets {sets} of the batch. Give a floor for thin sets, more smoothing, or scale the points."
        )
    u = Multipliers.apply(y, mask, form, found)  # type: ignore[no-untyped-call]
    _, scatter = center_and_scatter(y, u)
    whitener = torch.linalg.cholesky(form.precision(scatter)).mT @ white.transform
    # As a mean of the points in the caller's coordinates, the centre needs no inverse and loses no digits far from the
    # origin.
    center = white.origin + (u.unsqueeze(-2) @ (z - white.origin)) / u.sum(-1)[:, None, None]
    return center.squeeze(-2), whitener

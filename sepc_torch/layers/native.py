"""The native backend of the layer: solve, then rebuild the ellipsoids from the multipliers so that gradients flow."""

from __future__ import annotations

import torch
from torch import Tensor

from sepc_torch.layers.balls import BallCenters, covered
from sepc_torch.layers.forms import FlooredForm, Form, PlainForm, center_and_scatter
from sepc_torch.layers.implicit import Multipliers, solve
from sepc_torch.layers.whitening import Whitening
from sepc_torch.shapes import Bool, Float

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

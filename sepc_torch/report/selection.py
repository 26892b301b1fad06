"""What a report shows of many rows: samples worth a look, regions that matter, and a map."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from sepc_torch.ellipsoid import SURFACE_TOLERANCE
from sepc_torch.head.drift_report import Move
from sepc_torch.head.reasons import Reason
from sepc_torch.head.trust_head import TrustHead
from sepc_torch.model.plane import viewing_plane
from sepc_torch.report.record import MapSection, Region
from sepc_torch.report.rows import Rows, take
from sepc_torch.shapes import Array, Float, Int

WRONG = "accepted but wrong"
# Samples of each kind: with all kinds, a page of 200 cards.
_PER_KIND = 40
# Cards of regions for each reason to show one, and rows shown on each.
_REGIONS_PER_REASON, _EXAMPLES = 3, 4
# Points on the map beside the samples, and ellipses: enough to show the shape, few enough for a small file.
_MAP_POINTS, _MAP_ELLIPSES = 800, 80


def rows_to_look_at(rows: Rows) -> dict[int, str]:
    """Row numbers of the samples and their kinds, the most striking of each kind first."""
    out = rows.out
    chosen: dict[int, str] = {}
    if rows.right is not None:
        slipped = np.flatnonzero(rows.accept & ~rows.right)
        chosen.update(dict.fromkeys(_largest(out.joint, slipped), WRONG))
    orders: dict[Reason, Tensor] = {
        Reason.NOVEL: out.strangeness,
        Reason.DISAGREES: out.trust,
        Reason.AMBIGUOUS: -out.joint,
        Reason.NO_PREDICTION: -torch.arange(len(rows), dtype=torch.float64),
    }
    for reason, order in orders.items():
        found = np.flatnonzero(rows.reason == int(reason))
        chosen.update(dict.fromkeys(_largest(order, found), reason.text))
    return chosen


def regions(rows: Rows, head: TrustHead, moves: Sequence[Move] = ()) -> list[Region]:
    """Regions with most refusals, with most accepted mistakes, the least pure, and drifting ones, with their numbers.

    Args:
        rows: The assessed rows.
        head: The head.
        moves: Changes of a stream; of the regions of a change the one with most rows is shown, or with most training
            points.
    """
    sepc = head.sepc
    held, codes = sepc.held.cpu().numpy(), sepc.codes.cpu().numpy()
    k = len(codes)
    nearest = rows.out.nearest.numpy()
    valid = (nearest >= 0) & (rows.out.label.numpy() >= 0)
    where = np.where(valid, nearest, k)  # rows without a prediction have no region

    def count(chosen: Array) -> Int[Array, "K"]:
        return np.bincount(where[chosen], minlength=k + 1)[:k]

    everything = np.ones(len(rows), dtype=bool)
    distance = rows.out.distance.numpy()
    visits, refused, outside = count(everything), count(~rows.accept), count(distance > 1.0 + SURFACE_TOLERANCE)
    wrong = slipped = None
    if rows.right is not None:
        wrong, slipped = count(~rows.right), count(~rows.right & rows.accept)
    training = held.sum(axis=1)
    own = held[np.arange(k), codes]
    why: dict[int, list[str]] = {}
    for reason, score in (
        ("most refusals", refused),
        (WRONG, np.zeros(k) if slipped is None else slipped),
        ("impure", np.where(visits > 0, training - own, 0)),
    ):
        for region in np.argsort(-score, kind="stable")[:_REGIONS_PER_REASON].tolist():
            if score[region] > 0:
                why.setdefault(region, []).append(reason)
    for move in [move for move in moves if move.regions][:_REGIONS_PER_REASON]:
        region = max(move.regions, key=lambda r: (visits[r], training[r]))
        shares = f"{100 * move.expected:.0f} % of the calibration points, {100 * move.share:.0f} % of these rows"
        why.setdefault(region, []).append(f"{move.change} traffic: {shares} are in this part of the class")
    return [
        Region(
            region=region,
            code=int(codes[region]),
            why=reasons,
            training=int(training[region]),
            purity=float(own[region] / max(training[region], 1)),
            rows=int(visits[region]),
            refused=int(refused[region]),
            outside=int(outside[region]),
            wrong=None if wrong is None else int(wrong[region]),
            wrong_accepted=None if slipped is None else int(slipped[region]),
            examples=_examples(np.flatnonzero(where == region), rows.accept, distance),
        )
        for region, reasons in why.items()
    ]


def embedding_map(rows: Rows, head: TrustHead, z: object, samples: list[int]) -> MapSection:
    """Samples and evenly chosen other rows on the plane of the head, with the shadows of its largest ellipsoids."""
    plane = viewing_plane(head.sepc)
    n = len(rows)
    even = np.unique(np.linspace(0, n - 1, min(n, _MAP_POINTS)).round().astype(np.int64))
    chosen = np.union1d(even, np.array(samples, dtype=np.int64))
    points = plane.points(_projected(head, take(z, chosen))).numpy()
    shown = np.isfinite(points).all(axis=1)
    chosen, points = chosen[shown], points[shown]
    training = head.sepc.held.cpu().sum(dim=1).numpy()
    largest = [k for k in np.argsort(-training, kind="stable")[:_MAP_ELLIPSES].tolist() if training[k] > 1]
    shadows = plane.shadows(head.sepc.bank)
    codes = head.sepc.codes.cpu().tolist()
    return MapSection(
        row=chosen.tolist(),
        x=points[:, 0].tolist(),
        y=points[:, 1].tolist(),
        code=rows.label[chosen].tolist(),
        reason=rows.reason[chosen].tolist(),
        rank=_ranks(rows.out.strangeness)[chosen].tolist(),
        ellipses=[
            (k, codes[k], *shadows.centers[k].tolist(), *shadows.matrices[k].flatten()[[0, 1, 3]].tolist())
            for k in largest
        ],
        regions=len(codes),
    )


def _projected(head: TrustHead, z: object) -> Tensor:
    with torch.no_grad():
        return head.projection(head.as_tensor(z))


def _ranks(strangeness: Float[Tensor, "B"]) -> Float[Array, "B"]:
    """Share of the other rows that are less strange, from 0 to 1; NaN is the strangest."""
    values = strangeness.nan_to_num(torch.inf, posinf=torch.inf).numpy()
    return np.searchsorted(np.sort(values), values) / max(len(values) - 1, 1)


def _largest(score: Tensor, rows: Int[Array, "n"]) -> list[int]:
    values = score.double().nan_to_num(0.0).numpy()[rows]
    return rows[np.argsort(-values, kind="stable")[:_PER_KIND]].tolist()


def _examples(found: Int[Array, "n"], accept: Array, distance: Array) -> list[int]:
    order = np.lexsort((distance[found], accept[found]))
    return found[order[:_EXAMPLES]].tolist()

"""What a report shows of many rows: samples worth a look with thumbnails, regions that matter, and a map."""

from __future__ import annotations

import base64
import copy
import re
import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sepc_torch.data.arrays import rank_shares
from sepc_torch.ellipsoid import SURFACE_TOLERANCE
from sepc_torch.head.drift import Move
from sepc_torch.head.explanation import DecisionExplanation
from sepc_torch.head.reasons import Reason
from sepc_torch.head.trust_head import TrustHead
from sepc_torch.model.plane import viewing_plane
from sepc_torch.report.columns import ShownValues
from sepc_torch.report.record import MapSection, Nearest, Region, Sample, Value
from sepc_torch.report.rows import Rows, shortened, take
from sepc_torch.shapes import Array, Int

WRONG = "accepted but wrong"
# Samples of each kind: with all kinds, a page of 200 cards.
_PER_KIND = 40
# Cards of regions for each reason to show one, and rows shown on each.
_REGIONS_PER_REASON, _EXAMPLES = 3, 4
# Points on the map beside the samples, and ellipses: enough to show the shape, few enough for a small file.
_MAP_POINTS, _MAP_ELLIPSES = 800, 80
# Longest side of a thumbnail in pixels: a card shows it at this size or smaller.
_SIDE = 96
_SIGNATURES = {b"\x89PNG\r\n\x1a\n": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif", b"RIFF": "webp"}


def rows_to_look_at(rows: Rows) -> dict[int, str]:
    """Row numbers of the samples and their kinds, the most striking of each kind first."""
    out = rows.out
    chosen: dict[int, str] = {}
    if rows.right is not None:
        slipped = np.flatnonzero(rows.accept & ~rows.right)
        chosen.update(dict.fromkeys(_largest(out.joint, slipped), WRONG))
    orders: dict[Reason, Tensor] = {
        Reason.NO_PROMISE: -out.joint,
        Reason.NOVEL: out.nonconformity,
        Reason.DISAGREES: out.trust,
        Reason.AMBIGUOUS: -out.joint,
        Reason.NO_PREDICTION: -torch.arange(len(rows), dtype=torch.float64),
    }
    for reason, order in orders.items():
        found = np.flatnonzero(rows.reason == int(reason))
        chosen.update(dict.fromkeys(_largest(order, found), reason.text))
    return chosen


def regions(rows: Rows, head: TrustHead, moves: Sequence[Move] = ()) -> list[Region]:
    """Regions with most refusals or accepted mistakes, the least pure, and the largest of each change in ``moves``."""
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
        rank=rank_shares(rows.out.nonconformity.numpy())[chosen].tolist(),
        ellipses=[
            (k, codes[k], *shadows.centers[k].tolist(), *shadows.matrices[k].flatten()[[0, 1, 3]].tolist())
            for k in largest
        ],
        regions=len(codes),
    )


def _projected(head: TrustHead, z: object) -> Tensor:
    with torch.no_grad():
        return head.projection(head.as_tensor(z))


def _largest(score: Tensor, rows: Int[Array, "n"]) -> list[int]:
    values = score.double().nan_to_num(0.0).numpy()[rows]
    return rows[np.argsort(-values, kind="stable")[:_PER_KIND]].tolist()


def _examples(found: Int[Array, "n"], accept: Array, distance: Array) -> list[int]:
    order = np.lexsort((distance[found], accept[found]))
    return found[order[:_EXAMPLES]].tolist()


def samples(
    rows: Rows,
    head: TrustHead,
    z: Any,
    logits: Any,
    groups: Any,
    layers: Mapping[str, Any] | None,
    table: Any,
    chosen: Mapping[int, str],
) -> list[Sample]:
    """The records of chosen rows, whose kinds are given by row number, with values of the columns of a table."""
    if not chosen:
        return []
    numbers = np.array(list(chosen), dtype=np.int64)
    given = None if logits is None else take(logits, numbers)
    mine = None if groups is None else take(groups, numbers)
    own = None if layers is None else {name: take(values, numbers) for name, values in layers.items()}
    found = _with_names(head, rows.names).explain(take(z, numbers), logits=given, groups=mine, layers=own)
    assert isinstance(found, list)  # one for each row
    values = ShownValues(head, table, numbers)
    return [
        _sample(rows, row, kind, why, values.of(i, why.features))
        for i, ((row, kind), why) in enumerate(zip(chosen.items(), found, strict=True))
    ]


def _sample(rows: Rows, row: int, kind: str, found: DecisionExplanation, values: list[Value]) -> Sample:
    out, true = rows.out, rows.true_name(row)
    sentence = f"{found.sentence.removesuffix('.')}, but the true class is {true}." if kind == WRONG else found.sentence
    sentence = re.sub(r"(?<=\d)%(?=[\s,;.]|$)", " %", sentence)  # as in all numbers of the page
    near = ((found.label, found.examples), (found.runner_up, found.runner_up_examples))
    return Sample(
        row=row,
        kind=kind,
        label=int(rows.label[row]),
        own=int(out.label[row]),
        truth=true,
        joint=float(out.joint[row]),
        confidence=float(out.confidence[row]),
        p_value=float(out.p_value[row]),
        nonconformity=float(out.nonconformity[row]),
        trust=float(out.network_trust[row]),
        softmax=None if rows.softmax is None else float(rows.softmax[row]),
        why=sentence,
        values=values,
        nearest=[Nearest(str(label), [shortened(e.id, 24) for e in examples]) for label, examples in near if examples],
    )


def _with_names(head: TrustHead, names: list[str]) -> TrustHead:
    """The head with other names of its classes, for explanations; it shares every buffer with the head."""
    renamed = copy.copy(head.sepc)
    renamed.classes = names
    shown = copy.copy(head)
    shown._modules = {**head._modules, "sepc": renamed}
    return shown


def thumbnail(image: Any) -> str:
    """A data URI of an image: encoded bytes (PNG, JPEG, GIF, WebP) as they are, an array as a small PNG.

    Args:
        image: Bytes of an image file, or an array, tensor or PIL image of shape (H, W), (H, W, C) or (C, H, W) with 1,
            3 or 4 channels C. Values other than bytes are scaled from their least and greatest to 0 and 255.

    >>> thumbnail(np.zeros((2, 2)))[:26]
    'data:image/png;base64,iVBO'
    """
    if isinstance(image, bytes):
        kind = next((name for start, name in _SIGNATURES.items() if image.startswith(start)), None)
        if kind is None:
            raise ValueError("The bytes are not a PNG, JPEG, GIF or WebP image; pass such a file's bytes, or an array.")
        return f"data:image/{kind};base64,{base64.b64encode(image).decode('ascii')}"
    pixels = _bytes(_channels_last(image.detach().cpu().numpy() if isinstance(image, Tensor) else np.asarray(image)))
    return f"data:image/png;base64,{base64.b64encode(_png(pixels)).decode('ascii')}"


def _channels_last(pixels: Array) -> Array:
    if pixels.ndim == 2:
        pixels = pixels[:, :, None]
    if pixels.ndim == 3 and pixels.shape[2] not in (1, 3, 4) and pixels.shape[0] in (1, 3, 4):
        pixels = np.moveaxis(pixels, 0, 2)
    if pixels.ndim != 3 or pixels.shape[2] not in (1, 3, 4) or 0 in pixels.shape:
        raise ValueError(
            f"An image must have shape (H, W), (H, W, C) or (C, H, W) with 1, 3 or 4 channels, got {pixels.shape}."
        )
    return pixels


def _bytes(pixels: Array) -> Array:
    """Scale values to bytes and the longest side to at most :data:`_SIDE`, by means of blocks."""
    if pixels.dtype != np.uint8:
        values = np.nan_to_num(pixels.astype(np.float64))
        low, high = values.min(), values.max()
        values = (values - low) / max(high - low, np.finfo(np.float64).tiny) * 255.0
    else:
        values = pixels.astype(np.float64)
    height, width, channels = values.shape
    step = -(-max(height, width) // _SIDE)
    if step > 1:
        # Sides shorter than a block keep one row or column of pixels.
        tall, wide = max(height // step, 1), max(width // step, 1)
        high_step, wide_step = min(step, height), min(step, width)
        values = values[: tall * high_step, : wide * wide_step]
        values = values.reshape(tall, high_step, wide, wide_step, channels).mean(axis=(1, 3))
    return values.round().astype(np.uint8)


def _png(pixels: Array) -> bytes:
    """Encode pixels as PNG: 8 bits, grey, RGB or RGBA, no filter."""
    height, width, channels = pixels.shape
    color = {1: 0, 3: 2, 4: 6}[channels]
    lines = b"".join(b"\0" + line.tobytes() for line in pixels)
    parts = [
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, color, 0, 0, 0)),
        (b"IDAT", zlib.compress(lines, 9)),
        (b"IEND", b""),
    ]
    chunks = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)

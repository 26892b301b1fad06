"""Thumbnails as data URIs, so that a page needs no other file."""

from __future__ import annotations

import base64
import struct
import zlib
from typing import Any

import numpy as np
from torch import Tensor

from sepc_torch.shapes import Array

# Longest side of a thumbnail in pixels: a card shows it at this size or smaller.
_SIDE = 96
_SIGNATURES = {b"\x89PNG\r\n\x1a\n": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif", b"RIFF": "webp"}


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

"""Activations of earlier layers of a network: rows (B, D) by name, their checks, and their moments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sepc_torch.data.arrays import rows_per_chunk
from sepc_torch.data.labels import check_one_label_per_row
from sepc_torch.head.reading.moments import EmbeddingMoments
from sepc_torch.model.kernels.launch import available, on_device
from sepc_torch.shapes import Array, Float

# Positions of a map or of a sequence, by the number of dimensions of the activations.
_POSITIONS = {2: (), 3: (1,), 4: (2, 3)}
# Dtypes of maps for which there is a CUDA kernel.
_KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class LayerMoments:
    """Moments of the activations of several layers, which come in chunks with the labels of their rows.

    Args:
        device: Torch device that computes products in float64; None for NumPy.

    >>> moments = LayerMoments()
    >>> moments.add({"conv": np.array([[3.0, 4.0], [0.0, 2.0]])}, ["a", "b"])
    >>> moments.finished()["conv"].raw.mean
    array([1.5, 3. ])
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        self._moments: dict[str, EmbeddingMoments] = {}
        self._widths: dict[str, int] = {}
        self.index: dict[Any, int] = {}

    def add(self, layers: Mapping[str, Any], labels: Sequence[Any]) -> None:
        """Add the activations of all layers for some rows."""
        if self._moments and set(layers) != set(self._moments):
            raise ValueError(f"Every batch must have the layers {list(self._moments)}; one has {list(layers)}.")
        codes = np.array([self.index.setdefault(label, len(self.index)) for label in labels], dtype=np.int64)
        for name, values in layers.items():
            rows = layer_rows(values, name)
            x = rows.to("cpu", torch.promote_types(rows.dtype, torch.float32)).numpy()
            check_one_label_per_row(len(x), len(codes))
            if not np.isfinite(x).all():
                raise ValueError(f"The layer {name!r} holds NaN or infinity; drop those rows, or leave the layer out.")
            if self._widths.setdefault(name, x.shape[1]) != x.shape[1]:
                raise ValueError(
                    f"The layer {name!r} has {self._widths[name]} features, but {x.shape[1]} in another batch."
                )
            self._moments.setdefault(name, EmbeddingMoments("polar", self._device)).add(x, codes)

    def finished(self) -> dict[str, EmbeddingMoments]:
        """The moments of every layer; the numbers of their classes are in ``index``."""
        for moments in self._moments.values():
            moments.finish()
        return self._moments


def read_layers(layers: Any, labels: Array, device: torch.device | None = None) -> LayerMoments:
    """Moments of layers that are arrays or tensors in memory, read a chunk of rows at a time."""
    found = LayerMoments(device)
    values = {name: _array_like(value) for name, value in check_layers(layers).items()}
    for name, array in values.items():
        if len(array) != len(labels):
            raise ValueError(f"The layer {name!r} has {len(array)} rows for {len(labels)} labels; pass as many.")
    step = rows_per_chunk(max(int(np.prod(array.shape[1:])) for array in values.values()))
    for start in range(0, len(labels), step):
        rows = slice(start, start + step)
        found.add({name: array[rows] for name, array in values.items()}, labels[rows].tolist())
    return found


def check_layers(layers: Any) -> Mapping[str, Any]:
    """The mapping from names of layers to activations; anything else is refused."""
    if not isinstance(layers, Mapping):
        raise TypeError(
            f"layers must be a dictionary from names to activations, got {type(layers).__name__}; pass "
            "layers={'layer1': z1, 'layer2': z2}."
        )
    if not layers or not all(isinstance(name, str) for name in layers):
        raise ValueError(f"layers must name at least one layer, by text; got {list(layers)}.")
    return layers


def _array_like(values: Any) -> Any:
    """A tensor or an array as it is, anything else as an array."""
    return values if isinstance(values, (Tensor, np.ndarray)) else np.asarray(values)


def layer_rows(values: Any, name: str) -> Float[Tensor, "B D"]:
    """Activations of a layer as rows (B, D): maps (B, C, H, W) and tokens (B, T, C) are averaged over positions.

    The mean is taken in float64, so that it does not depend on the batch.

    >>> layer_rows(torch.arange(8.0).view(1, 2, 2, 2), "conv")
    tensor([[1.5000, 5.5000]])
    >>> layer_rows(torch.arange(4.0).view(1, 2, 2), "block")
    tensor([[1., 2.]])
    """
    x = values if isinstance(values, Tensor) else torch.from_numpy(np.array(_array_like(values)))
    if x.dim() not in _POSITIONS or 0 in x.shape[1:] or x.is_complex():
        raise ValueError(
            f"The layer {name!r} has the shape {tuple(x.shape)}; expected rows (B, D), maps (B, C, H, W) or tokens "
            "(B, T, C)."
        )
    x = x if x.is_floating_point() else x.float()
    if not (positions := _POSITIONS[x.dim()]):
        return x
    graph = torch.compiler.is_compiling() or (torch.is_grad_enabled() and x.requires_grad)
    if x.dtype in _KERNEL_DTYPES and not graph and available(x):
        from sepc_torch.head.kernels.coordinates import mean_of_positions

        with on_device(x):
            return mean_of_positions(x.flatten(2) if len(positions) == 2 else x.transpose(1, 2))
    return x.mean(dim=positions, dtype=torch.float64).to(x.dtype)


def layers_in_order(
    layers: Mapping[str, Any] | None, names: Sequence[str], widths: Sequence[int], rows: int | torch.SymInt
) -> list[Float[Tensor, "B _"]]:
    """The rows of the layers of a head in its order; others than the head was fitted with are refused.

    Args:
        layers: The activations by name; None for none.
        names: Names of the layers of the head.
        widths: Numbers of features of these layers.
        rows: Number of rows of the batch.
    """
    if layers is None and not names:
        return []
    given = {} if layers is None else check_layers(layers)
    missing, unknown = [name for name in names if name not in given], [name for name in given if name not in names]
    if missing or unknown:
        fitted = f"with the layers {list(names)}" if names else "without layers"
        text = f"lacks {missing}" if missing else f"holds {unknown}"
        raise ValueError(
            f"The head was fitted {fitted}, and layers= {text}. Pass the same layers at fit, at calibrate and at every "
            "call."
        )
    found = []
    for name, width in zip(names, widths, strict=True):
        x = layer_rows(given[name], name)
        if x.shape != (rows, width):
            raise ValueError(f"The layer {name!r} has the shape {tuple(x.shape)}, expected ({rows}, {width}).")
        found.append(x)
    return found

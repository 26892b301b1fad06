"""A head recorded as a CUDA graph, for batches of a fixed size: one launch instead of dozens."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from sepc_torch.data.options import check_count
from sepc_torch.head.prediction import HeadPrediction
from sepc_torch.head.reading.layers import layers_in_order
from sepc_torch.shapes import Float

# Calls before the recording: they compile the kernels and allocate what the recording must not allocate.
_WARM_UP = 3


class GraphedHead:
    """A head on a CUDA device that replays one recorded graph; see :meth:`sepc_torch.TrustHead.graphed`.

    The graph reads the tensors of the head. After ``calibrate``, ``accept_at`` or ``to`` record it again.

    Args:
        head: The head, on a CUDA device.
        rows: Largest number of rows of a batch.
        features: Number of features D of the embeddings.
        classes: Number of classes C of the logits; None for batches without logits.
        layers: Numbers of features of the earlier layers of the network that the head takes, by name.
    """

    def __init__(
        self, head: nn.Module, rows: int, features: int, classes: int | None, layers: Mapping[str, int] | None = None
    ) -> None:
        device = next(head.buffers()).device
        if device.type != "cuda":
            raise ValueError(f"The head is on {device}; a CUDA graph needs a head on a CUDA device: head.to('cuda').")
        self.rows = check_count(rows, "rows", least=1)
        self._z = torch.ones(rows, features, device=device)
        self._logits = None if classes is None else torch.ones(rows, classes, device=device)
        widths = layers or {}
        self._layers = {name: torch.ones(rows, width, device=device) for name, width in widths.items()}
        given = {"logits": self._logits, "layers": self._layers or None}
        self._kept = head, getattr(head, "calibration", None)  # whose memory the graph reads, whatever becomes of them
        self._graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.no_grad(), torch.cuda.stream(stream):
            for _ in range(_WARM_UP):
                head(self._z, **given)
        torch.cuda.current_stream(device).wait_stream(stream)
        with torch.no_grad(), torch.cuda.graph(self._graph):
            fields: HeadPrediction = head(self._z, **given)
            # One tensor for all fields of a dtype, so that a call copies a few tensors instead of all fields.
            self._dtypes = [field.dtype for field in fields]
            self._out = {
                dtype: torch.stack([field for field in fields if field.dtype == dtype])
                for dtype in dict.fromkeys(self._dtypes)
            }

    def __call__(
        self,
        z: Float[Tensor, "B D"],
        logits: Float[Tensor, "B C"] | None = None,
        layers: Mapping[str, Tensor] | None = None,
    ) -> HeadPrediction:
        """Judge at most ``rows`` embeddings. The results are new tensors."""
        if (logits is None) != (self._logits is None):
            raise ValueError(
                "The graph was recorded with logits; pass logits."
                if logits is None
                else "The graph was recorded without logits; record one with head.graphed(rows, logits=True)."
            )
        number = z.shape[0]
        if z.shape[1:] != self._z.shape[1:] or number > self.rows:
            raise ValueError(
                f"The graph takes at most {self.rows} embeddings of {self._z.shape[1]} features; got the shape "
                f"{tuple(z.shape)}. Record a larger one with head.graphed(rows)."
            )
        widths = [x.shape[1] for x in self._layers.values()]
        rows = layers_in_order(layers, list(self._layers), widths, number)
        for static, x in zip(self._layers.values(), rows, strict=True):
            static[:number].copy_(x)
        self._z[:number].copy_(z)
        if logits is not None and self._logits is not None:
            self._logits[:number].copy_(logits)
        self._graph.replay()
        fields = {dtype: iter(some[:, :number].clone().unbind()) for dtype, some in self._out.items()}
        return HeadPrediction(*(next(fields[dtype]) for dtype in self._dtypes))

"""Device synchronisation (when the host may read a tensor), branches of CUDA graphs, and warm-up before first use.

Reading a tensor's values on the host synchronises with its device. A graph that ``torch.compile`` traces or that CUDA
captures cannot synchronise. Warm-up moves compilation and memory allocation before the first request.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from sepc_torch.data.options import check_count
from sepc_torch.shapes import Float

# Default batch sizes: a single request, a batch and, on a GPU, a batch large enough to need every kernel.
_ROWS = (1, 4096)
_ROWS_ON_CUDA = (*_ROWS, 2**15)


def can_synchronize(values: Tensor) -> bool:
    """Whether the host can read the values: not inside ``torch.compile`` nor during CUDA graph capture.

    >>> can_synchronize(torch.zeros(1))
    True
    """
    if torch.compiler.is_compiling():
        return False
    return not (values.is_cuda and torch.cuda.is_current_stream_capturing())


def readable(values: Tensor) -> bool:
    """Whether the host can read the values without waiting for a device, to skip work that no row needs.

    >>> readable(torch.zeros(1))
    True
    """
    return values.device.type == "cpu" and not torch.compiler.is_compiling()


def all_finite(values: Tensor) -> bool:
    """Whether it is known, at little cost, that all values are finite; their sum may overflow.

    >>> all_finite(torch.ones(2)), all_finite(torch.tensor([1.0, torch.nan]))
    (True, False)
    """
    return readable(values) and math.isfinite(float(values.sum()))


class Branches:
    """Independent parts of a CUDA graph, which then run side by side; outside of graphs they run one after the other.

    A small batch occupies a fraction of the chip. Everything that a branch reads must stay referenced until
    :meth:`join`, or its memory could be used again by what runs beside it.

    Args:
        like: A tensor on the device of the work.

    >>> branches = Branches(torch.zeros(1))
    >>> with branches.branch():
    ...     found = torch.ones(1)
    >>> branches.join()
    """

    def __init__(self, like: Tensor) -> None:
        self._main: torch.cuda.Stream | None = None
        self._streams: list[torch.cuda.Stream] = []
        if not torch.compiler.is_compiling() and like.is_cuda and torch.cuda.is_current_stream_capturing():
            self._main = torch.cuda.current_stream(like.device)

    def branch(self) -> AbstractContextManager[Any]:
        """Context of one branch. It starts after the work before it in the current stream."""
        if self._main is None:
            return nullcontext()
        stream = torch.cuda.Stream(self._main.device)
        stream.wait_stream(self._main)
        self._streams.append(stream)
        return torch.cuda.stream(stream)

    def join(self) -> None:
        """Let the current stream wait for all branches."""
        for stream in self._streams:
            assert self._main is not None
            self._main.wait_stream(stream)


@torch.no_grad()
def warm_up(run: Callable[[Tensor], object], like: Float[Tensor, "B D"], rows: tuple[int, ...] = ()) -> float:
    """Run a model on random batches of the given sizes, then synchronise.

    Args:
        run: The model.
        like: Tensor with the width, dtype and device of the random points; its number of rows does not matter.
        rows: Batch sizes; by default 1 and 4096, on CUDA also 32 768.

    Returns:
        The elapsed seconds.

    >>> warm_up(torch.nn.Linear(3, 2), torch.empty(0, 3), (1, 8)) > 0.0
    True
    """
    sizes = [check_count(size, "rows", least=1) for size in rows or (_ROWS_ON_CUDA if like.is_cuda else _ROWS)]
    generator = torch.Generator(like.device).manual_seed(0)  # leaves the global generator unchanged
    start = time.perf_counter()
    for size in sizes:
        run(torch.randn(size, like.shape[1], dtype=like.dtype, device=like.device, generator=generator))
    if like.is_cuda:
        torch.cuda.synchronize(like.device)
    return time.perf_counter() - start

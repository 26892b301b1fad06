"""When to wait for a device: never while a graph is recorded, and best before the first request comes."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from sepc_torch.data.arrays import count
from sepc_torch.shapes import Float

# One request alone, a batch, and on a GPU one large enough for every kernel there is.
_ROWS = (1, 4096)
_ROWS_ON_CUDA = (*_ROWS, 2**15)


def can_synchronize(values: Tensor) -> bool:
    """Whether values may be read: neither a compiled graph nor one that CUDA records can stop halfway.

    >>> can_synchronize(torch.zeros(1))
    True
    """
    if torch.compiler.is_compiling():
        return False
    return not (values.is_cuda and torch.cuda.is_current_stream_capturing())


@torch.no_grad()
def warm_up(run: Callable[[Tensor], object], like: Float[Tensor, "B D"], rows: tuple[int, ...] = ()) -> float:
    """Run a model on random points, in batches of so many rows, and wait until all is done.

    Args:
        run: The model.
        like: Points of the same width, dtype and device; their number does not matter.
        rows: Sizes of batches; by default 1 and 4096, on CUDA also 32 768.

    Returns:
        The seconds it took.

    >>> warm_up(torch.nn.Linear(3, 2), torch.empty(0, 3), (1, 8)) > 0.0
    True
    """
    sizes = [count(size, "rows", least=1) for size in rows or (_ROWS_ON_CUDA if like.is_cuda else _ROWS)]
    generator = torch.Generator(like.device).manual_seed(0)  # its own: the user's random numbers stay as they are
    start = time.perf_counter()
    for size in sizes:
        run(torch.randn(size, like.shape[1], dtype=like.dtype, device=like.device, generator=generator))
    if like.is_cuda:
        torch.cuda.synchronize(like.device)
    return time.perf_counter() - start

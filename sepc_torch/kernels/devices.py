"""Where kernels run, and what they can reach there."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

_FIRST_TRITON = (3, 2)


def available(like: Tensor) -> bool:
    """Whether kernels can run where a tensor is: on CUDA, with a Triton that has what they are written in."""
    return like.is_cuda and find_spec("triton") is not None and recent_enough(_triton_version())


def recent_enough(version: str) -> bool:
    """Whether a version of Triton is at least the first that unrolls loops as it is told.

    >>> recent_enough("3.6.0"), recent_enough("3.10.0+git1"), recent_enough("3.1.0")
    (True, True, False)
    """
    major, minor = (int(part) for part in version.split(".")[:2])
    return (major, minor) >= _FIRST_TRITON


def _triton_version() -> str:
    import triton

    return triton.__version__


def on_device(like: Tensor) -> AbstractContextManager[Any]:
    """Triton launches on the current device: make it the tensor's, which costs time, only where it is another."""
    if not like.is_cuda or like.get_device() == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(like.device)


def near_together(z: Tensor) -> Tensor:
    """Points whose features lie within 32-bit addresses of each other: of huge transposed batches, a copy."""
    return z if z.stride(1) * z.shape[1] < 2**31 else z.contiguous()

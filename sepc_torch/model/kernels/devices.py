"""Where kernels run, and what they can reach there."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

# The first in which a kernel's functions take tuples.
_FIRST_TRITON = (3, 3)


def available(like: Tensor) -> bool:
    """Whether kernels can run where a tensor is: on a CUDA device, with a Triton that has what they are written in.

    To torch an AMD device is one of CUDA too; these kernels were never run there.
    """
    return (
        like.is_cuda
        and torch.version.hip is None
        and find_spec("triton") is not None
        and triton_version() >= _FIRST_TRITON
    )


def triton_version() -> tuple[int, int]:
    """The major and minor version of the Triton that is installed."""
    import triton

    return version_of(triton.__version__)


def version_of(text: str) -> tuple[int, int]:
    """The first two numbers of a version.

    >>> version_of("3.10.0+git1") > version_of("3.6.0")
    True
    """
    major, minor = (int(part) for part in text.split(".")[:2])
    return major, minor


def on_device(like: Tensor) -> AbstractContextManager[Any]:
    """Triton launches on the current device: make it the tensor's, which costs time, only where it is another."""
    if not like.is_cuda or like.get_device() == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(like.device)


def near_together(z: Tensor) -> Tensor:
    """Points whose features lie within 32-bit addresses of each other: of huge transposed batches, a copy."""
    return z if z.stride(1) * z.shape[1] < 2**31 else z.contiguous()

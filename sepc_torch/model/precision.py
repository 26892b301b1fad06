"""Matrix products in the full precision of their dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from sepc_torch.data.shared_setting import SharedSetting


def _set_full_precision() -> Callable[[], None]:
    """Set float32 matrix products to full precision; return a function that restores the previous setting."""
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:  # raised if the user set fp32_precision per backend, which this older function cannot read
        backends: list[Any] = [torch.backends.cuda.matmul, torch.backends.mkldnn.matmul]  # type: ignore[attr-defined]
        precisions = [backend.fp32_precision for backend in backends]
        _set_precisions(backends, ["ieee" for _ in backends])
        return lambda: _set_precisions(backends, precisions)
    if before == "highest":
        return lambda: None
    torch.set_float32_matmul_precision("highest")
    return lambda: torch.set_float32_matmul_precision(before)


def _set_precisions(backends: list[Any], precisions: list[str]) -> None:
    for backend, precision in zip(backends, precisions, strict=True):
        backend.fp32_precision = precision


@contextmanager
def _full_float32() -> Iterator[None]:
    restore = _set_full_precision()
    yield
    restore()


# Torch keeps the precision of float32 matrix products as a setting of the whole process.
_FULL_FLOAT32 = SharedSetting(_full_float32)


@contextmanager
def full_precision(z: Tensor) -> Iterator[None]:
    """Context in which matrix products use the tensor's own dtype, regardless of autocast and TF32 settings."""
    with torch.autocast(z.device.type, enabled=False), _FULL_FLOAT32:
        yield

"""Matrix products in the full precision of their dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
    global _changes
    _changes += 1
    restore = _set_full_precision()
    yield
    restore()
    _changes += 1


# Torch keeps the precision of float32 matrix products as a setting of the whole process.
_FULL_FLOAT32 = SharedSetting(_full_float32)
# Times that the setting was changed and restored: odd while any thread is inside the context.
_changes = 0
_NOTHING: AbstractContextManager[Any] = nullcontext()


def _full_by_default() -> bool:
    """Whether the user's setting is full precision; False if a thread that changed it hides the user's setting."""
    before = _changes
    try:
        full = torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:
        return False
    return full and before % 2 == 0 and before == _changes


def full_precision(z: Tensor) -> AbstractContextManager[Any]:
    """Context in which matrix products use the tensor's own dtype, regardless of autocast and TF32 settings."""
    if z.dtype == torch.float64:  # no setting narrows float64
        return _NOTHING
    if torch.is_autocast_enabled(z.device.type):
        return _without_autocast(z.device.type)
    return _NOTHING if _full_by_default() else _FULL_FLOAT32


@contextmanager
def _without_autocast(device: str) -> Iterator[None]:
    with torch.autocast(device, enabled=False), _FULL_FLOAT32:
        yield


def as_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in a dtype: ``tensor.to(dtype)`` without its cost if there is nothing to convert.

    >>> x = torch.zeros(1)
    >>> as_dtype(x, torch.float32) is x
    True
    """
    return tensor if tensor.dtype == dtype else tensor.to(dtype)

"""Buffers of the frozen modules: never below float32, and of whatever shape a state dict brings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn


def at_least_float32(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A conversion that follows ``fn`` to its device but not below float32."""

    def convert(tensor: Tensor) -> Tensor:
        converted = fn(tensor)
        if converted.is_floating_point() and converted.element_size() < 4:
            return tensor.to(device=converted.device)
        return converted

    return convert


def resize_buffers(module: nn.Module, state_dict: Mapping[str, Any], prefix: str) -> None:
    """Give the buffers the shapes of a state dict, if it is complete: another partition has other numbers."""
    if any(prefix + name not in state_dict for name in module.state_dict()):
        return
    for name, buffer in list(module.named_buffers()):
        saved = state_dict.get(prefix + name)
        if isinstance(saved, Tensor) and saved.shape != buffer.shape:
            owner = module.get_submodule(name.rpartition(".")[0])
            setattr(owner, name.rpartition(".")[2], buffer.new_empty(saved.shape))

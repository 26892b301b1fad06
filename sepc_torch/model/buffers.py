"""Module buffers: never narrower than float32, and resized to the shapes of a state dict when loading."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn


def at_least_float32(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Wrap a tensor conversion: apply its device, and its dtype unless that is narrower than float32."""

    def convert(tensor: Tensor) -> Tensor:
        converted = fn(tensor)
        if converted.is_floating_point() and converted.element_size() < 4:
            return tensor.to(device=converted.device)
        return converted

    return convert


def resize_buffers(module: nn.Module, state_dict: Mapping[str, Any], prefix: str) -> None:
    """Resize the buffers of a module to the shapes in a state dict.

    The state of another partition has other numbers of ellipsoids, cells and classes. An incomplete state dict changes
    no buffer: ``load_state_dict`` then raises an error, and the module must stay usable.
    """
    if any(prefix + name not in state_dict for name in module.state_dict()):
        return
    for name, buffer in list(module.named_buffers()):
        saved = state_dict.get(prefix + name)
        if isinstance(saved, Tensor) and saved.shape != buffer.shape:
            owner = module.get_submodule(name.rpartition(".")[0])
            setattr(owner, name.rpartition(".")[2], buffer.new_empty(saved.shape))

"""Module buffers: never narrower than float32; converted from older state dicts and resized to theirs when loading."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sepc_torch.data.old_formats import current_arrays


def at_least_float32(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Wrap a tensor conversion: apply its device, and its dtype unless that is narrower than float32."""

    def convert(tensor: Tensor) -> Tensor:
        converted = fn(tensor)
        if converted.is_floating_point() and converted.element_size() < 4:
            return tensor.to(device=converted.device)
        return converted

    return convert


def resize_buffers(module: nn.Module, state_dict: Mapping[str, Any], prefix: str) -> bool:
    """Resize the buffers of a module to the shapes in a state dict; return whether the state dict is complete.

    The state of another partition has other numbers of ellipsoids, cells and classes. An incomplete state dict changes
    no buffer: ``load_state_dict`` then raises an error, and the module must stay usable.
    """
    if any(prefix + name not in state_dict for name in module.state_dict()):
        return False
    for name, buffer in list(module.named_buffers()):
        saved = state_dict.get(prefix + name)
        if isinstance(saved, Tensor) and saved.shape != buffer.shape:
            owner = module.get_submodule(name.rpartition(".")[0])
            setattr(owner, name.rpartition(".")[2], buffer.new_empty(saved.shape))
    return True


def convert_state(state_dict: MutableMapping[str, Any], prefix: str) -> None:
    """Convert the entries of a state dict whose names begin with ``prefix`` to the current names and tables."""
    own = {name: state_dict.pop(name) for name in list(state_dict) if name.startswith(prefix)}
    for name, value in current_arrays(own).items():
        state_dict[name] = torch.from_numpy(value) if isinstance(value, np.ndarray) else value

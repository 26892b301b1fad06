"""Modules with state that follows from their buffers; the dtypes that buffers keep, and their shapes when loading."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sepc_torch.shapes import Array


def at_least_float32(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Wrap a tensor conversion: apply its device, and its dtype unless that is narrower than float32."""

    def convert(tensor: Tensor) -> Tensor:
        converted = fn(tensor)
        if converted.is_floating_point() and converted.element_size() < 4:
            return tensor.to(device=converted.device)
        return converted

    return convert


def buffer_of(array: Array) -> Tensor:
    """An array as a tensor that shares its memory, if there is any.

    ``torch.export.save`` fails with an overflow for an empty tensor of NumPy's.

    >>> import numpy as np
    >>> buffer_of(np.zeros((3, 0))).untyped_storage().data_ptr()
    0
    """
    found = torch.from_numpy(array)
    return found if array.size else torch.empty_like(found, memory_format=torch.contiguous_format)


def device_only(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Wrap a tensor conversion: apply its device, and leave the dtype as it is."""

    def convert(tensor: Tensor) -> Tensor:
        converted = fn(tensor)
        return converted if converted.dtype == tensor.dtype else tensor.to(device=converted.device)

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


class Derived(nn.Module):
    """A module with state that follows from its buffers: computed again after every change, never saved or pickled.

    A subclass calls :meth:`restore` at the end of its constructor.
    """

    derived: tuple[str, ...] = ()  # attributes that pickles leave out
    # How a conversion, such as ``.half()``, changes the buffers.
    conversion: Callable[[Callable[[Tensor], Tensor]], Callable[[Tensor], Tensor]] = staticmethod(at_least_float32)

    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_post_hook(_after_loading)  # type: ignore[no-untyped-call]

    def derive(self) -> None:
        """Compute what depends on the device and the dtype of the buffers."""
        raise NotImplementedError

    def restore(self) -> None:
        """Compute everything that follows from the buffers: after a fit, after loading and from a pickle."""
        self.derive()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        moved = super()._apply(self.conversion(fn), recurse)  # type: ignore[no-untyped-call]
        if not self._on_meta():
            self.derive()
        return moved

    def _on_meta(self) -> bool:
        return any(buffer.is_meta for buffer in self.buffers())

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in self.derived}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if not self._on_meta():
            self.restore()


def _after_loading(module: Derived, _keys: Any) -> None:
    module.restore()

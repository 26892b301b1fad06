"""Launching a kernel again sooner than Triton does.

Triton looks at every argument of a launch to find which of its compiled kernels to take, which takes the host longer
than a small batch takes the device. Whoever knows what was compiled can keep it and launch it at once.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import triton
from torch import Tensor
from triton.runtime import driver

from sepc_torch.model.kernels.devices import triton_version

# From then on a compiled kernel takes the arguments of the kernel as it is written, constants included.
_FIRST_DIRECT = (3, 3)


class Launcher:
    """A kernel, and what was compiled of it.

    Args:
        kernel: The kernel, a function under ``triton.jit``.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.compiled: dict[Hashable, Any] = {}
        self.direct = isinstance(kernel, triton.JITFunction) and triton_version() >= _FIRST_DIRECT

    def __call__(
        self,
        grid: tuple[int, int, int],
        like: Hashable,
        arguments: tuple[Any, ...],
        constants: tuple[Any, ...],
        **options: int | None,
    ) -> None:
        """Launch on the current stream of the current device, where the tensors are.

        Args:
            grid: Programs along three axes.
            like: All that Triton would look at in the arguments: types, alignment, sizes it makes variants for.
            arguments: What changes with every launch, in the order of the kernel's parameters; the first is a tensor.
            constants: What the kernel was compiled with, in the same order, after them.
            options: Warps, stages and registers.
        """
        device = arguments[0].get_device()
        key = (device, like, constants, *options.values())
        compiled = self.compiled.get(key)
        if compiled is not None:
            compiled[grid](*arguments, *constants, stream=driver.active.get_current_stream(device))
            return
        compiled = self.kernel[grid](*arguments, *constants, **options)
        if self.direct:
            self.compiled[key] = compiled


def aligned(tensor: Tensor) -> bool:
    """Whether a tensor begins where Triton may load sixteen bytes at once."""
    return tensor.data_ptr() % 16 == 0


def int_kind(number: int) -> tuple[bool, bool, bool]:
    """What Triton distinguishes in an integer: one, whole multiples of sixteen, and what needs 64 bits.

    >>> int_kind(1), int_kind(48), int_kind(2**40 + 1)
    ((True, False, False), (False, True, False), (False, False, True))
    """
    return number == 1, number % 16 == 0, number >= 2**31

"""Starting a kernel while the one before it ends, where the chip can: from compute capability 9 on, with Triton 3.5.

The first kernel says at its beginning that the next may start. The next comes to the chip, fetches what does not depend
on the first, and waits for it to be done.
"""

from __future__ import annotations

import functools

import torch

from sepc_torch.model.kernels.devices import triton_version

__all__ = ["let_next_start", "overlaps", "wait_for_previous"]

_FIRST_TRITON = (3, 5)
_FIRST_CHIP = (9, 0)

if triton_version() >= _FIRST_TRITON:
    from triton.language.extra.cuda import gdc_launch_dependents as let_next_start
    from triton.language.extra.cuda import gdc_wait as wait_for_previous
else:
    let_next_start = wait_for_previous = None


@functools.cache
def overlaps(device: int) -> bool:
    """Whether kernels on this device start early; a device of -1 is the CPU, where the interpreter runs them."""
    if device < 0 or triton_version() < _FIRST_TRITON:
        return False
    return torch.cuda.get_device_capability(device) >= _FIRST_CHIP

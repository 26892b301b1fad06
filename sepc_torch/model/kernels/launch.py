"""Launching of kernels: supported devices, compilation, and a launcher with little overhead for small batches.

This module imports Triton only when a kernel is defined or launched.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

# The kernels were compiled with Triton 3.3 to 3.6. From 3.3 on, a compiled kernel takes its constants as arguments.
_OLDEST_TRITON = (3, 3)
# The oldest version with products of matrices in float64.
_OLDEST_WITH_FLOAT64 = (3, 5)
# The newest version whose compiled kernels are known to take the arguments of a launch as in Launcher.
_NEWEST_TRITON = (3, 6)


def available(like: Tensor) -> bool:
    """Whether kernels can run on the device of a tensor: NVIDIA CUDA with Triton 3.3 or newer.

    Torch reports AMD devices as CUDA devices too. The kernels were never run there, so they are not used.
    """
    return (
        like.is_cuda
        and torch.version.hip is None
        and find_spec("triton") is not None
        and triton_version() >= _OLDEST_TRITON
    )


@functools.cache
def triton_version() -> tuple[int, int]:
    """Major and minor version of the installed Triton."""
    import triton

    return version_of(triton.__version__)


def has_float64_products() -> bool:
    """Whether kernels can multiply matrices in float64."""
    return triton_version() >= _OLDEST_WITH_FLOAT64


def version_of(text: str) -> tuple[int, int]:
    """Major and minor number of a version string.

    >>> version_of("3.10.0+git1") > version_of("3.6.0")
    True
    """
    major, minor = (int(part) for part in text.split(".")[:2])
    return major, minor


def on_device(like: Tensor) -> AbstractContextManager[Any]:
    """Context in which the current CUDA device is that of the tensor; Triton launches on the current device.

    Entering a device context costs microseconds, so nothing is entered when the device is current already.
    """
    if not like.is_cuda or like.get_device() == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(like.device)


def within_32_bits(z: Tensor) -> Tensor:
    """The tensor, or a contiguous copy if the features of one row span more than a 32-bit offset can address."""
    return z if z.stride(1) * z.shape[1] < 2**31 else z.contiguous()


def jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """``triton.jit`` of the undecorated function.

    Triton compiles the source of a function. An import hook that checks types decorates every function of the
    package; the decorator must be removed first.
    """
    import triton

    if function is None:
        return functools.partial(jit, **options)
    plain = inspect.unwrap(function)
    compiled = triton.jit(plain, **options)
    # Triton's interpreter runs plain arithmetic as it is, and refuses to wrap it outside modules that import Triton.
    return compiled if isinstance(compiled, triton.JITFunction) or "tl" in plain.__globals__ else plain


class Launcher:
    """A kernel together with its compiled variants.

    Triton inspects every argument of a launch to select a compiled variant. On the host, that takes longer than a small
    batch takes on the device. The launcher keeps the compiled variants under a short key and launches them directly.

    Args:
        kernel: A function under :func:`jit`.
    """

    def __init__(self, kernel: Any) -> None:
        import triton

        self.kernel = kernel
        self.compiled: dict[Hashable, Any] = {}
        self.direct = isinstance(kernel, triton.JITFunction)  # not in Triton's interpreter
        self.without_hooks = triton_version() <= _NEWEST_TRITON

    def __call__(
        self,
        grid: tuple[int, int, int],
        variant: Hashable,
        arguments: tuple[Any, ...],
        constants: tuple[Any, ...],
        **options: int,
    ) -> None:
        """Launch on the current stream of the current device, which must hold the tensors.

        Args:
            grid: Number of programs along three axes.
            variant: Every property of the arguments by which Triton distinguishes compiled variants: dtypes, alignment,
                kinds of integers (:func:`int_kind`).
            arguments: Run-time arguments in the order of the kernel's parameters; the first is a tensor.
            constants: Compile-time constants, which follow the arguments in the kernel's parameters.
            options: Compiler options such as ``num_warps``.
        """
        device = arguments[0].get_device()
        key = (device, variant, constants, *options.values())
        compiled = self.compiled.get(key)
        if compiled is None:
            compiled = self.kernel[grid](*arguments, *constants, **options)
            if self.direct:
                self.compiled[key] = compiled
            return
        stream = _driver().active.get_current_stream(device)
        if self.without_hooks:
            # Triton's own call first looks for the hooks of profilers, which takes about as long as the launch.
            setup = compiled.function, compiled.packed_metadata, None, None, None
            compiled.run(*grid, stream, *setup, *arguments, *constants)
        else:
            compiled[grid](*arguments, *constants, stream=stream)


@functools.cache
def _driver() -> Any:
    from triton.runtime import driver

    return driver


def aligned(tensor: Tensor) -> bool:
    """Whether a tensor starts at a multiple of 16 bytes, where Triton may use vector loads."""
    return tensor.data_ptr() % 16 == 0


def int_kind(number: int) -> tuple[bool, bool, bool]:
    """The properties by which Triton distinguishes integer arguments: equal to 1, a multiple of 16, 64 bits wide.

    >>> int_kind(1), int_kind(48), int_kind(2**40 + 1)
    ((True, False, False), (False, True, False), (False, False, True))
    """
    return number == 1, number % 16 == 0, number >= 2**31

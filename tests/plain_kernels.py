"""Kernels as they are written, though every other function of the package is wrapped in checks of its shapes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import triton


def compile_plain_kernels() -> None:
    """Let Triton take off what is wrapped around a kernel: it compiles the source, and looks names up beside it."""
    jit = triton.jit

    def plain(kernel: Callable[..., Any] | None = None, **options: Any) -> Any:
        if kernel is None:
            return lambda wrapped: plain(wrapped, **options)
        return jit(inspect.unwrap(kernel), **options)

    triton.jit = plain

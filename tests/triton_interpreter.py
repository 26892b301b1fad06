"""Triton's interpreter with NumPy 2.4, which no longer takes an array of one number for that number.

Imported first in a process with TRITON_INTERPRET=1; kernels then run on the CPU.
"""

from __future__ import annotations

from typing import Any

from triton.runtime import interpreter

_patch = interpreter._patch_lang_tensor


def _patch_with_index(tensor: Any, scope: Any) -> None:
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


interpreter._patch_lang_tensor = _patch_with_index

"""Checks of options: numbers, choices and torch devices."""

from __future__ import annotations

import operator
import reprlib
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch


def check_positive(value: Any, name: str, unit: str) -> float:
    """Validate a positive finite number; ``name`` and ``unit`` are for the error message."""
    if isinstance(value, (bool, str)) or not isinstance(value, (int, float, np.number)):
        raise TypeError(f"{name} must be a positive number of {unit}, got {value!r}.")
    if not (np.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be a positive number of {unit}, got {value!r}.")
    return float(value)


def check_not_negative(value: Any, name: str) -> float:
    """Validate a finite number of at least 0; ``name`` is for the error message."""
    try:
        number = None if isinstance(value, str) else float(value)
    except (TypeError, ValueError):
        number = None
    if number is None:
        raise TypeError(f"{name} must be a finite number of at least 0, got {value!r}.")
    if not (np.isfinite(number) and number >= 0):
        raise ValueError(f"{name} must be a finite number of at least 0, got {value!r}.")
    return number


def check_count(value: Any, name: str, least: int = 0) -> int:
    """Validate an integer of at least ``least``; ``name`` is for the error message."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {reprlib.repr(value)}.") from None
    if isinstance(value, (bool, np.bool_)) or number < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}.")
    return number


def check_jobs(value: int | None) -> int | None:
    """Validate a number of processes as in joblib: None, or an integer other than 0.

    >>> check_jobs(-1)
    -1
    """
    if value is not None and check_count(value, "n_jobs", least=-(2**31)) == 0:
        raise ValueError("n_jobs must not be 0: pass a number of processes, -1 for one per processor, or None for one.")
    return value


def float64_device(device: torch.device | str) -> torch.device:
    """Validate a torch device that must be available and support float64."""
    return usable_device(device, "float64", "Choose another device, or omit device to compute with NumPy.")


def usable_device(
    device: torch.device | str, dtype: str = "float32", advice: str = "Choose another, such as 'cpu'."
) -> torch.device:
    """Validate a torch device that must be available and support ``dtype``, by running a small sum on it.

    >>> usable_device("cpu")
    device(type='cpu')
    """
    import torch

    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device must name a torch device, such as 'cuda' or 'cpu', got {device!r}.") from error
    try:
        torch.ones(1, dtype=getattr(torch, dtype), device=found).sum().item()
    except (RuntimeError, TypeError, AssertionError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0].partition(". ")[0].rstrip(".")
        raise ValueError(f"device {str(found)!r} cannot be used here in {dtype}: {reason}. {advice}") from error
    return found


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise ValueError if ``value`` is not one of the choices."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}.")

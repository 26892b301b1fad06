"""The arguments of a monitor, checked before anything runs."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from sepc_torch.callbacks.lightning_names import MisconfigurationException
from sepc_torch.flagging import Criteria
from sepc_torch.head import TrustHead
from sepc_torch.inputs import count
from sepc_torch.sepc import SEPC

STAGES = ("validate", "test", "predict")
FORMATS = ("csv", "jsonl")
POLICIES = ("warn", "raise")


def criteria(
    threshold: float | None, flag_fraction: float | None, reasons: Collection[str], **numbers: float
) -> Criteria:
    """When to flag; a fraction takes the place of the default threshold."""
    if flag_fraction is not None and threshold == Criteria.threshold:
        threshold = None
    if isinstance(reasons, str):
        reasons = (reasons,)
    try:
        return Criteria(threshold, flag_fraction, tuple(reasons), **numbers)
    except ValueError as error:
        raise MisconfigurationException(f"TrustMonitor: {error}") from error


def check_source(name: str, source: Any) -> None:
    """A submodule's name, or a function."""
    if not isinstance(source, str) and not callable(source):
        raise MisconfigurationException(
            f"{name} must be the name of a submodule or a function (module, batch) -> tensor, got {source!r}."
        )


def check_head(head: Any) -> None:
    """A head that is ready, or None."""
    if head is not None and not isinstance(head, (SEPC, TrustHead)):
        raise MisconfigurationException(
            f"head must be an SEPC or a TrustHead, or None to fit one while training; got a {type(head).__name__}."
        )


def check_functions(**functions: Any) -> None:
    """Functions, or None."""
    for name, function in functions.items():
        if function is not None and not callable(function):
            raise MisconfigurationException(f"{name} must be a function or None, got {function!r}.")


def check_fit(fit: Any) -> None:
    """Options, or a function."""
    if fit is not None and not callable(fit) and not isinstance(fit, Mapping):
        raise MisconfigurationException(
            f"fit must be the options of TrustHead.fit as a dictionary, or a function (embeddings, labels) -> head; "
            f"got {fit!r}."
        )


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> str:
    """One of some names."""
    if value not in choices:
        raise MisconfigurationException(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}.")
    return str(value)


def check_stages(stages: Collection[str]) -> tuple[str, ...]:
    """Some of the stages."""
    chosen = (stages,) if isinstance(stages, str) else tuple(stages)
    for stage in chosen:
        check_choice("Every entry of stages", stage, STAGES)
    return chosen


def check_count(name: str, value: Any, least: int) -> int:
    """A whole number of at least so much."""
    try:
        return count(value, name, least)
    except (TypeError, ValueError) as error:
        raise MisconfigurationException(f"TrustMonitor: {error}") from error


def check_optional_count(name: str, value: Any, least: int) -> int | None:
    """The same, or None for no limit."""
    return None if value is None else check_count(name, value, least)


def check_folder(dirpath: str | os.PathLike[str] | None) -> Path | None:
    """A folder to write to; it is made when needed."""
    if dirpath is None:
        return None
    folder = Path(dirpath)
    if folder.exists() and not folder.is_dir():
        raise MisconfigurationException(f"dirpath={str(folder)!r} is a file; name a folder.")
    return folder

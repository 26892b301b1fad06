"""Validation of the callback's arguments, before anything runs; invalid ones raise MisconfigurationException."""

from __future__ import annotations

import inspect
import os
import pickle
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from numbers import Real
from pathlib import Path
from typing import Any

from sepc_torch.data.arrays import count
from sepc_torch.head.trust_head import TrustHead
from sepc_torch.model.sepc import SEPC
from sepc_torch.training.flagging import Criteria
from sepc_torch.training.lightning.lightning_names import MisconfigurationException

STAGES = ("validate", "test", "predict")
FORMATS = ("csv", "jsonl")
POLICIES = ("warn", "raise")
# Arguments of TrustHead.fit that the monitor passes itself, so they cannot be among the user's options.
_OURS = ("embeddings", "labels", "encoder")


class _Unset(float):
    """Default value that differs by identity from an equal number given by the user."""


UNSET_THRESHOLD = _Unset(Criteria.threshold or 0.0)


@dataclass(frozen=True)
class Functions:
    """The user's functions, each under the name of its argument of ``TrustMonitor``."""

    inputs: Callable[[Any], Any] | None
    labels: Callable[[Any], Any] | None
    ids: Callable[[Any], Any] | str | None
    fit: Any
    on_flag: Callable[[Any, str, Any], None] | None

    def __reduce__(self) -> tuple[Any, ...]:
        """Check before pickling, for spawned processes, that every function can be pickled; a lambda cannot."""
        values = tuple(getattr(self, field.name) for field in fields(self))
        for field, value in zip(fields(self), values, strict=True):
            check_picklable(field.name, value)
        return Functions, values

    def __deepcopy__(self, _memo: Any) -> Functions:
        return self


def check_picklable(name: str, value: Any) -> None:
    """Raise an error if a value cannot be pickled, and so cannot be sent to a spawned process."""
    try:
        pickle.dumps(value)
    except Exception as error:
        raise MisconfigurationException(
            f"{name}={value!r} cannot be sent to spawned processes ({error}). Define it with def at the top level of a "
            "module, or use strategy='ddp', which starts processes without pickling."
        ) from error


def criteria(threshold: Any, flag_fraction: Any, reasons: Any, **numbers: Any) -> Criteria:
    """Build the criteria; a given ``flag_fraction`` replaces the default threshold."""
    if flag_fraction is not None and threshold is UNSET_THRESHOLD:
        threshold = None
    if threshold is UNSET_THRESHOLD:
        threshold = Criteria.threshold
    optional = {"threshold": threshold, "flag_fraction": flag_fraction}
    for name, value in {**optional, **numbers}.items():
        if not isinstance(value, Real) and not (name in optional and value is None):
            raise MisconfigurationException(f"{name} must be a number; got {value!r}.")
    try:
        return Criteria(threshold, flag_fraction, _names("reasons", reasons), **numbers)
    except ValueError as error:
        raise MisconfigurationException(f"TrustMonitor: {error}") from error


def _names(name: str, values: Any) -> tuple[Any, ...]:
    """Tuple of names, from one name or a collection."""
    if isinstance(values, str):
        return (values,)
    if not isinstance(values, Collection):
        raise MisconfigurationException(f"{name} must be a tuple of names; got {values!r}.")
    return tuple(values)


def check_source(name: str, source: Any) -> None:
    """Check that a source is the name of a submodule or a function."""
    if not isinstance(source, str) and not callable(source):
        raise MisconfigurationException(
            f"{name} must be the name of a submodule or a function (module, batch) -> tensor; got {source!r}."
        )


def check_head(head: Any) -> None:
    """Check that a head is an SEPC, a TrustHead or None."""
    if head is not None and not isinstance(head, (SEPC, TrustHead)):
        raise MisconfigurationException(
            f"head must be an SEPC or a TrustHead, or None to fit one while training; got a {type(head).__name__}."
        )


def check_functions(**functions: Any) -> None:
    """Check that every argument is a function or None."""
    for name, function in functions.items():
        if function is not None and not callable(function):
            raise MisconfigurationException(f"{name} must be a function or None; got {function!r}.")


def check_fit(fit: Any) -> None:
    """Check that ``fit`` is a function, or a dictionary of options of ``TrustHead.fit``."""
    if fit is not None and not callable(fit) and not isinstance(fit, Mapping):
        raise MisconfigurationException(
            f"fit must be the options of TrustHead.fit as a dictionary, or a function (embeddings, labels) -> head; "
            f"got {fit!r}."
        )
    if isinstance(fit, Mapping):
        known = [name for name in inspect.signature(TrustHead.fit).parameters if name not in _OURS]
        unknown = [name for name in fit if name not in known]
        if unknown:
            raise MisconfigurationException(
                f"fit has the unknown options {', '.join(map(repr, unknown))}; TrustHead.fit accepts "
                f"{', '.join(map(repr, known))}."
            )


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> str:
    """Check that a value is one of the choices."""
    if value not in choices:
        raise MisconfigurationException(f"{name} must be one of {', '.join(map(repr, choices))}; got {value!r}.")
    return str(value)


def check_stages(stages: Any) -> tuple[str, ...]:
    """Check that at least one stage is named and every name is a stage."""
    chosen = _names("stages", stages)
    if not chosen:
        raise MisconfigurationException(f"stages is empty; name at least one of {', '.join(map(repr, STAGES))}.")
    for stage in chosen:
        check_choice("Every entry of stages", stage, STAGES)
    return chosen


def check_prefix(prefix: Any) -> str:
    """Check the prefix of the logged names."""
    if not isinstance(prefix, str) or not prefix:
        raise MisconfigurationException(f"prefix must be a non-empty string, such as 'trust'; got {prefix!r}.")
    return prefix


def check_ids(ids: Any) -> None:
    """Check that ``ids`` is a function, a key of a batch, or None."""
    if ids is not None and not isinstance(ids, str) and not callable(ids):
        raise MisconfigurationException(
            f"ids must be a function from a batch to ids, the key of a batch, or None; got {ids!r}."
        )


def check_data(name: str, data: Any, kinds: tuple[type, ...], expected: str) -> None:
    """Check that an argument is an indexable data set, an instance of ``kinds``, or None."""
    indexable = hasattr(data, "__len__") and hasattr(data, "__getitem__") and not isinstance(data, (str, bytes))
    if data is not None and not indexable and not isinstance(data, kinds):
        raise MisconfigurationException(f"{name} must be {expected} or None; got a {type(data).__name__}.")


def check_count(name: str, value: Any, least: int) -> int:
    """Check that a value is an integer of at least ``least``."""
    try:
        return count(value, name, least)
    except (TypeError, ValueError) as error:
        raise MisconfigurationException(f"TrustMonitor: {error}") from error


def check_optional_count(name: str, value: Any, least: int) -> int | None:
    """Check that a value is an integer of at least ``least``, or None for no limit."""
    return None if value is None else check_count(name, value, least)


def check_folder(dirpath: Any) -> Path | None:
    """Check the output folder, which is created when the first file is written."""
    if dirpath is None:
        return None
    if not isinstance(dirpath, str | os.PathLike):
        raise MisconfigurationException(f"dirpath must be a path or None; got {dirpath!r}.")
    folder = Path(dirpath)
    if folder.exists() and not folder.is_dir():
        raise MisconfigurationException(f"dirpath={str(folder)!r} is a file; name a folder.")
    return folder

"""Arguments of the callback, checked before anything runs, and its base classes for both packages of Lightning.

``lightning.pytorch`` and ``pytorch_lightning`` each have their own ``Callback``, and their Trainers accept only that
one. The base classes here inherit from those of all installed packages, so every Trainer accepts them.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import pickle
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sepc_torch.data.options import count
from sepc_torch.head.conformal import check_share
from sepc_torch.head.trust_head import TrustHead
from sepc_torch.model.sepc import SEPC
from sepc_torch.training.flagging import Criteria


def _installed(names: tuple[str, ...], what: str) -> tuple[Any, ...]:
    """The attribute ``what`` of every installed module, without repeats."""
    found = []
    for name in names:
        try:
            found.append(getattr(importlib.import_module(name), what))
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] != name.partition(".")[0]:
                raise  # the package is installed but broken
    if not found:
        raise ModuleNotFoundError(f"Neither {' nor '.join(names)} is installed: pip install 'sepc_torch[lightning]'.")
    return tuple(dict.fromkeys(found))


if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningDataModule

    class CallbackBase(Callback):
        """Base class of a callback that every installed Lightning accepts."""

    class DataModuleBase(LightningDataModule):
        """Base class of a data module that every installed Lightning accepts."""

    class MisconfigurationException(ValueError):
        """Invalid configuration; the message says how to correct it."""

else:
    _TRAINERS = ("lightning.pytorch", "pytorch_lightning")
    _FABRICS = ("lightning.fabric.utilities.exceptions", "lightning_fabric.utilities.exceptions")

    class CallbackBase(*_installed(_TRAINERS, "Callback")):
        """Base class of a callback that every installed Lightning accepts."""

    class DataModuleBase(*_installed(_TRAINERS, "LightningDataModule")):
        """Base class of a data module that every installed Lightning accepts."""

    class MisconfigurationException(*_installed(_FABRICS, "MisconfigurationException"), ValueError):
        """Invalid configuration; the message says how to correct it."""


# Arguments of TrustHead.fit that the monitor passes itself, so they cannot be among the user's options.
_OURS = ("embeddings", "labels", "encoder")


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


# Deprecated arguments, the setting that they are now, and what takes their place.
_LIMIT = "fit={'max_per_class': ...} or, if fit= is a function, the attribute max_per_class of the monitor"
_RENAMED = {
    "flag_fraction": ("flag_rate", "flag_rate"),
    "max_fit_per_class": ("max_per_class", _LIMIT),
    "max_per_class": ("max_per_class", _LIMIT),
}
_UNCALIBRATED = ("threshold", "reasons", "min_margin", "novel_distance")
_REMOVED = {
    "stages": "every stage is recorded",
    "file_format": "files are CSV; on_flag=lambda trainer, stage, table: table.to_jsonl(...) writes others",
    "refit_errors": "a refit that fails warns; warnings.simplefilter('error') raises",
    "max_pool": "set the attribute max_pool of the monitor",
}


def rename_old(old: Mapping[str, Any]) -> dict[str, Any]:
    """Values of deprecated arguments under their new names, with a warning; removed and unknown ones are refused."""
    found = {}
    for name, value in old.items():
        if name in _REMOVED:
            raise MisconfigurationException(f"TrustMonitor has no argument {name!r} any more: {_REMOVED[name]}.")
        if name not in _RENAMED and name not in _UNCALIBRATED:
            raise TypeError(f"TrustMonitor got an unexpected argument {name!r}.")
        if name in _RENAMED:
            text = f"{name} is deprecated; use {_RENAMED[name][1]}."
        else:
            text = f"{name} is deprecated: it applies only while the head is not calibrated. Use flag_rate or risk."
        warnings.warn(text, DeprecationWarning, stacklevel=3)
        found[_RENAMED[name][0] if name in _RENAMED else name] = value
    return found


def criteria(flag_rate: float, **old: Any) -> Criteria:
    """Criteria of a head that is not calibrated: it flags a share of the samples, unless a threshold is given."""
    for name, value in old.items():
        if name != "reasons" and not isinstance(value, Real):
            raise MisconfigurationException(f"{name} must be a number; got {value!r}.")
    if "reasons" in old:
        old["reasons"] = _names("reasons", old["reasons"])
    try:
        return Criteria(**{"threshold": None, "flag_fraction": None if "threshold" in old else flag_rate, **old})
    except ValueError as error:
        raise MisconfigurationException(f"TrustMonitor: {error}") from error


def check_rate(name: str, value: Any) -> float:
    """Check that a value lies strictly between 0 and 1."""
    try:
        return check_share(value, name)
    except (TypeError, ValueError) as error:
        raise MisconfigurationException(f"TrustMonitor: {error}") from error


def check_cost(value: Any) -> float | None:
    """Check that the cost limit is a number above 0, or None for no limit."""
    if value is not None and not (isinstance(value, Real) and float(value) > 0.0):
        raise MisconfigurationException(f"max_cost must be a number above 0, or None for no limit; got {value!r}.")
    return None if value is None else float(value)


def check_report(report: Any) -> bool:
    """Check ``report``, and that the packages of reports and figures are installed."""
    if not isinstance(report, bool):
        raise MisconfigurationException(f"report must be True or False; got {report!r}.")
    missing = [name for name in ("jinja2", "matplotlib") if report and importlib.util.find_spec(name) is None]
    if missing:
        raise MisconfigurationException(f"report=True needs {' and '.join(missing)}: pip install {' '.join(missing)}")
    return report


def check_logits(logits: Any) -> None:
    """Check that ``logits`` is a source, None to find the logits, or False for none."""
    if logits is not None and logits is not False:
        check_source("logits", logits)


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


def per_class_limit(fit: Any, default: int) -> Any:
    """Largest number of samples per class to fit to, from the options of ``TrustHead.fit``; not checked."""
    limit = fit.get("max_per_class", "auto") if isinstance(fit, Mapping) else "auto"
    return default if limit == "auto" else limit


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

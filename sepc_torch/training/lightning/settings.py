"""Arguments of the callback, checked before anything runs, and its base classes for both packages of Lightning.

``lightning.pytorch`` and ``pytorch_lightning`` each have their own ``Callback``, and their Trainers accept only that
one. The base classes here inherit from those of all installed packages, so every Trainer accepts them.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from sepc_torch.head.trust_head import TrustHead
from sepc_torch.training.pool import LabelPool

# The names under which Lightning is installed.
_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


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
    from lightning.pytorch.utilities.seed import isolate_rng as isolate_rng

    class CallbackBase(Callback):
        """Base class of a callback that every installed Lightning accepts."""

    class DataModuleBase(LightningDataModule):
        """Base class of a data module that every installed Lightning accepts."""

    class MisconfigurationException(ValueError):
        """Invalid configuration; the message says how to correct it."""

else:
    _FABRICS = ("lightning.fabric.utilities.exceptions", "lightning_fabric.utilities.exceptions")

    isolate_rng = _installed(tuple(f"{name}.utilities.seed" for name in _PACKAGES), "isolate_rng")[0]

    class CallbackBase(*_installed(_PACKAGES, "Callback")):
        """Base class of a callback that every installed Lightning accepts."""

    class DataModuleBase(*_installed(_PACKAGES, "LightningDataModule")):
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


def say(trainer: Any, text: str) -> None:
    """Log a message on the main process, by the logger of the Trainer's package, which shows such messages."""
    if trainer.is_global_zero:
        homes = {base.__module__ for base in type(trainer).__mro__}
        package = next((name for name in _PACKAGES if any(home.startswith(name) for home in homes)), _PACKAGES[0])
        logging.getLogger(f"{package}.trust_monitor").info("TrustMonitor: %s", text)


def check_picklable(name: str, value: Any) -> None:
    """Raise an error if a value cannot be pickled, and so cannot be sent to a spawned process."""
    try:
        pickle.dumps(value)
    except Exception as error:
        raise MisconfigurationException(
            f"{name}={value!r} cannot be sent to spawned processes ({error}). Define it with def at the top level of a "
            "module, or use strategy='ddp', which starts processes without pickling."
        ) from error


@contextmanager
def configuring() -> Iterator[None]:
    """Turn errors of the package's own checks into errors of the configuration."""
    try:
        yield
    except MisconfigurationException:
        raise
    except (TypeError, ValueError) as error:
        raise MisconfigurationException(f"TrustMonitor: {error}") from error


def require(fits: bool, problem: str) -> None:
    """Raise an error of the configuration unless an argument fits."""
    if not fits:
        raise MisconfigurationException(problem)


def check_sources(**sources: Any) -> None:
    """Check that every argument is the name of a submodule or a function."""
    for name, source in sources.items():
        require(
            isinstance(source, str) or callable(source),
            f"{name} must be the name of a submodule or a function (module, batch) -> tensor; got {source!r}.",
        )


def check_functions(**functions: Any) -> None:
    """Check that every argument is a function or None."""
    for name, function in functions.items():
        require(function is None or callable(function), f"{name} must be a function or None; got {function!r}.")


def check_data(expected: str, **sources: Any) -> None:
    """Check that every argument is an indexable data set, a loader, a ``LabelPool`` if expected, or None."""
    kinds = (DataLoader, LabelPool) if "LabelPool" in expected else DataLoader
    for name, data in sources.items():
        indexable = hasattr(data, "__len__") and hasattr(data, "__getitem__") and not isinstance(data, (str, bytes))
        require(
            data is None or indexable or isinstance(data, kinds),
            f"{name} must be {expected}an indexable data set, a loader or None; got a {type(data).__name__}.",
        )


def check_fit(fit: Any) -> None:
    """Check that ``fit`` is a function, or a dictionary of options of ``TrustHead.fit``."""
    require(
        fit is None or callable(fit) or isinstance(fit, Mapping),
        "fit must be the options of TrustHead.fit as a dictionary, or a function (embeddings, labels) -> head; got "
        f"{fit!r}.",
    )
    if isinstance(fit, Mapping):
        known = [name for name in inspect.signature(TrustHead.fit).parameters if name not in _OURS]
        unknown = [name for name in fit if name not in known]
        require(
            not unknown,
            f"fit has the unknown options {', '.join(map(repr, unknown))}; TrustHead.fit accepts "
            f"{', '.join(map(repr, known))}.",
        )


def check_report(report: Any) -> bool:
    """Check ``report``, and that the packages of reports and figures are installed."""
    require(isinstance(report, bool), f"report must be True or False; got {report!r}.")
    missing = [name for name in ("jinja2", "matplotlib") if report and importlib.util.find_spec(name) is None]
    require(not missing, f"report=True needs {' and '.join(missing)}: pip install {' '.join(missing)}")
    return bool(report)


def check_folder(dirpath: Any) -> Path | None:
    """Check the output folder, which is created when the first file is written."""
    if dirpath is None:
        return None
    require(isinstance(dirpath, str | os.PathLike), f"dirpath must be a path or None; got {dirpath!r}.")
    folder = Path(dirpath)
    require(not folder.exists() or folder.is_dir(), f"dirpath={str(folder)!r} is a file; name a folder.")
    return folder

"""Base classes of the callback for both packages of Lightning, ``lightning.pytorch`` and ``pytorch_lightning``.

Each package has its own ``Callback``, and its Trainer accepts only that one. The base classes here inherit from those
of all installed packages, so every Trainer accepts them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any


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
    from lightning.pytorch import Callback as CallbackBase
    from lightning.pytorch import LightningDataModule as DataModuleBase

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


__all__ = ["CallbackBase", "DataModuleBase", "MisconfigurationException"]

"""One class for both names of Lightning, ``lightning.pytorch`` and ``pytorch_lightning``.

Each has its own ``Callback``, and its Trainer takes only its own (a foreign one alone is refused). A class that
inherits from all that are installed passes everywhere.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any


def _installed(names: tuple[str, ...], what: str) -> tuple[Any, ...]:
    found = []
    for name in names:
        try:
            found.append(getattr(importlib.import_module(name), what))
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] != name.partition(".")[0]:
                raise  # installed, but broken
    if not found:
        raise ModuleNotFoundError(f"{' or '.join(names)} is not installed: pip install 'sepc_torch[lightning]'.")
    return tuple(dict.fromkeys(found))


if TYPE_CHECKING:
    from lightning.pytorch import Callback as CallbackBase
    from lightning.pytorch import LightningDataModule as DataModuleBase

    class MisconfigurationException(ValueError):
        """A setting that cannot work, with what to do about it."""

else:
    _TRAINERS = ("lightning.pytorch", "pytorch_lightning")
    _FABRICS = ("lightning.fabric.utilities.exceptions", "lightning_fabric.utilities.exceptions")

    class CallbackBase(*_installed(_TRAINERS, "Callback")):
        """A callback of every installed Lightning."""

    class DataModuleBase(*_installed(_TRAINERS, "LightningDataModule")):
        """A data module of every installed Lightning."""

    class MisconfigurationException(*_installed(_FABRICS, "MisconfigurationException"), ValueError):
        """A setting that cannot work, with what to do about it."""


__all__ = ["CallbackBase", "DataModuleBase", "MisconfigurationException"]

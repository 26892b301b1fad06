"""The functions that a user gives, which must survive the way into spawned processes."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from sepc_torch.callbacks.lightning_names import MisconfigurationException


@dataclass(frozen=True)
class Functions:
    """What the user gave, by argument."""

    inputs: Callable[[Any], Any] | None
    labels: Callable[[Any], Any] | None
    ids: Callable[[Any], Any] | str | None
    fit: Any
    on_flag: Callable[[Any, str, Any], None] | None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickling happens when processes are spawned, and fails there for a lambda: say so."""
        values = tuple(getattr(self, field.name) for field in fields(self))
        for field, value in zip(fields(self), values, strict=True):
            check_picklable(field.name, value)
        return Functions, values

    def __deepcopy__(self, _memo: Any) -> Functions:
        return self


def check_picklable(name: str, value: Any) -> None:
    """Refuse what cannot be sent to another process."""
    try:
        pickle.dumps(value)
    except Exception as error:
        raise MisconfigurationException(
            f"{name}={value!r} cannot be sent to spawned processes ({error}). Define it with def at the top of a "
            "module, or use strategy='ddp', which starts processes without pickling."
        ) from error

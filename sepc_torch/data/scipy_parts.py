"""Modules of SciPy, loaded where they are used: a frozen head judges without SciPy."""

from __future__ import annotations

import importlib
from typing import Any


def scipy_part(name: str, what: str) -> Any:
    """Import a module of SciPy, or say what needs SciPy.

    Args:
        name: Name of the module inside SciPy.
        what: The operation that needs the module, for the error message.

    >>> float(scipy_part("special", "This example").expit(0.0))
    0.5
    """
    try:
        return importlib.import_module(f"scipy.{name}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "scipy":
            raise  # SciPy is installed but broken
        raise ModuleNotFoundError(
            f"{what} needs SciPy: pip install scipy. A head that is calibrated already judges without it.", name="scipy"
        ) from error

"""Import of a single module of a library, without importing its parent packages."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any


def lone_module(name: str) -> Any:
    """Import a module of an installed library; raise ``ModuleNotFoundError`` if the library is missing.

    The parent packages stay empty. They would import torchvision, image models and plots, which are not needed here,
    and a torchvision that was not built for this torch breaks torchmetrics and Lightning.
    """
    first, *rest = name.split(".")
    if first not in sys.modules:
        spec = importlib.util.find_spec(first)
        if spec is None or not spec.submodule_search_locations:
            raise ModuleNotFoundError(f"{first} is not installed", name=first)
        _empty_package(first, str(spec.submodule_search_locations[0]))
    for depth in range(1, len(rest)):
        package = ".".join([first, *rest[:depth]])
        if package not in sys.modules:
            _empty_package(package, "/".join([sys.modules[first].__path__[0], *rest[:depth]]))
    # After importlib.import_module, a stamp would cover every module in this folder (see experiments/provenance.py).
    __import__(name)
    return sys.modules[name]


def _empty_package(name: str, folder: str) -> None:
    package = ModuleType(name)
    package.__path__ = [folder]
    sys.modules[name] = package

"""The comparable projects that our baselines and metrics are tested against, where they are installed."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

import pytest


def peer(name: str) -> Any:
    """One module of a comparable project; without that project the test is skipped.

    The packages above the module stay empty: what they would load (torchvision, image models, plots) is many times what
    the test needs, and a torchvision that was not built for this torch breaks torchmetrics and Lightning.
    """
    first, *rest = name.split(".")
    if first not in sys.modules:
        spec = importlib.util.find_spec(first)
        if spec is None or not spec.submodule_search_locations:
            pytest.skip(f"{first} is not installed")
        _empty_package(first, str(spec.submodule_search_locations[0]))
    for depth in range(1, len(rest)):
        package = ".".join([first, *rest[:depth]])
        if package not in sys.modules:
            _empty_package(package, "/".join([sys.modules[first].__path__[0], *rest[:depth]]))
    return importlib.import_module(name)


def _empty_package(name: str, folder: str) -> None:
    package = ModuleType(name)
    package.__path__ = [folder]
    sys.modules[name] = package

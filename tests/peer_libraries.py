"""The comparable projects that our baselines and metrics are tested against, where they are installed."""

from __future__ import annotations

from typing import Any

import pytest

from experiments.speed.lone_modules import lone_module


def peer(name: str) -> Any:
    """One module of a comparable project; without that project the test is skipped."""
    try:
        return lone_module(name)
    except ModuleNotFoundError as missing:
        if missing.name != name.partition(".")[0]:
            raise
        pytest.skip(str(missing))

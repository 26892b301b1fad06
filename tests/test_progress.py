"""The progress bar appears for long work on a terminal or on request, and never otherwise."""

from __future__ import annotations

import io
import sys
from typing import Any

import numpy as np
import pytest

from sepc_torch import partition
from sepc_torch.data import progress
from sepc_torch.data.progress import Bar, Choice


class Screen(io.StringIO):
    """A standard error stream that is a terminal or not."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove environment variables that change how rich detects a terminal."""
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


def shown(monkeypatch: pytest.MonkeyPatch, choice: Choice, *, terminal: bool, patience: float) -> str:
    screen = Screen(terminal)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(progress, "_PATIENCE", patience)
    with Bar("counting sheep", 3, choice) as bar:
        for _ in range(3):
            bar.advance(1)
    return screen.getvalue()


def test_long_work_on_a_terminal_shows_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "counting sheep" in shown(monkeypatch, "auto", terminal=True, patience=-1.0)


def test_short_work_shows_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch, "auto", terminal=True, patience=60.0) == ""


def test_redirected_output_shows_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch, "auto", terminal=False, patience=-1.0) == ""


@pytest.mark.parametrize("terminal", [True, False])
def test_true_always_shows_the_bar(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    text = shown(monkeypatch, True, terminal=terminal, patience=60.0)
    assert "counting sheep" in text
    assert "100%" in text


@pytest.mark.parametrize("terminal", [True, False])
def test_false_never_shows_the_bar(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    assert shown(monkeypatch, False, terminal=terminal, patience=-1.0) == ""


def test_an_error_restores_the_cursor(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen(True)
    monkeypatch.setattr(sys, "stderr", screen)

    def interrupted() -> None:
        with Bar("counting sheep", 3, True):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    hidden, visible = (screen.getvalue().rfind(code) for code in ("\x1b[?25l", "\x1b[?25h"))
    assert 0 <= hidden < visible, "the cursor is still hidden"


def test_a_partition_prints_nothing_by_default(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "_PATIENCE", -1.0)
    partition(rng.normal(size=(40, 2)), np.arange(40) % 3)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("classes", [2, 3])
def test_every_point_is_counted_once(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, classes: int) -> None:
    """The progress of a fit ends at its total."""
    totals, steps = [], []

    class Counting(Bar):
        def __init__(self, description: str, total: int, choice: Choice, **options: Any) -> None:
            super().__init__(description, total, choice, **options)
            totals.append(total)

        def advance(self, units: int) -> None:
            steps.append(units)

    monkeypatch.setattr("sepc_torch.partitioning.tasks.Bar", Counting)
    partition(rng.normal(size=(60, 2)), np.arange(60) % classes)
    assert totals == [60]
    assert sum(steps) == 60


def test_the_bar_shows_parts_and_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen(True)
    monkeypatch.setattr(sys, "stderr", screen)
    with Bar("counting sheep", 4, True, parts=2, part_name="flocks") as bar:
        for _ in range(2):
            bar.advance(2)
            bar.finish_part()
    assert "0 of 2 flocks" in screen.getvalue()
    assert "2 of 2 flocks" in screen.getvalue()
    assert "left" in screen.getvalue()

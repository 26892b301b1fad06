"""Progress bar on a terminal, shown only for work that takes longer than a second."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.progress import Progress

# With "auto", work shorter than this many seconds shows no bar.
_PATIENCE = 1.0

Choice = Literal["auto"] | bool


class Bar:
    """Progress bar over ``total`` units of work, as a context manager.

    ``choice="auto"`` shows the bar on a terminal once the work has taken a second. It shows no bar in notebooks and
    redirected output, where a bar would fill the logs. ``True`` shows the bar from the start, wherever the output goes.
    ``False`` never shows it. The bar shows the time left, and the number of parts done if there are several.
    """

    def __init__(
        self, description: str, total: int, choice: Choice, *, parts: int = 1, part_name: str = "parts"
    ) -> None:
        if choice != "auto" and not isinstance(choice, bool):
            raise ValueError(f"progress must be 'auto', True or False, got {choice!r}.")
        self._description, self._total, self._choice = description, total, choice
        self._parts, self._part_name, self._parts_done = parts, part_name, 0
        self._done = 0
        self._begun = time.monotonic()
        self._bar: Progress | None = None

    def __enter__(self) -> Bar:
        if self._choice is True:
            self._show()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, units: int) -> None:
        """Add ``units`` to the work done."""
        self._done += units
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self._done)
        elif self._choice == "auto" and time.monotonic() - self._begun > _PATIENCE:
            self._show()

    def finish_part(self) -> None:
        """Count one more part as done."""
        self._parts_done += 1
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], description=self._text())

    def _text(self) -> str:
        if self._parts == 1:
            return self._description
        return f"{self._description}, {self._parts_done} of {self._parts} {self._part_name}"

    def _show(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            Progress,
            TaskProgressColumn,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        console = Console(stderr=True)
        if self._choice == "auto" and (not console.is_terminal or console.is_jupyter):
            self._choice = False
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        self._bar = Progress(*columns, console=console, transient=console.is_terminal)
        self._bar.add_task(self._text(), total=self._total, completed=self._done)
        self._bar.start()

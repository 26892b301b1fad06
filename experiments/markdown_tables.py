"""Markdown tables, and the stored results that fill them."""

from __future__ import annotations

import json
from typing import Any

from harness import RESULTS


def load(name: str) -> dict[str, Any]:
    """The stored results of a script."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)

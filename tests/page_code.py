"""The Python code of documentation pages: extracting and running it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RECIPES = sorted(page for page in (ROOT / "docs" / "recipes").glob("*.md") if page.name != "index.md")


def blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.S)


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


# Numbers that differ by machine, since a network's optimiser rounds differently: percentages by at most so many points,
# and other decimals by at most this share.
POINTS, SHARE = 15.0, 0.02
NUMBER = re.compile(r"\d+\.\d+%?|\d+%")


def is_printed(shown: str, printed: str) -> bool:
    """Whether a text was printed, up to small differences of its percentages and decimals."""
    pattern = f"({NUMBER.pattern})".join(re.escape(part) for part in NUMBER.split(shown))
    expected = NUMBER.findall(shown)
    return any(all(map(_alike, expected, found.groups())) for found in re.finditer(pattern, printed))


def _alike(expected: str, found: str) -> bool:
    if expected.endswith("%") != found.endswith("%"):
        return False
    one, other = float(expected.rstrip("%")), float(found.rstrip("%"))
    return abs(one - other) <= (POINTS if expected.endswith("%") else SHARE * abs(one))


def check_page(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Run the blocks in order, in the working directory; the output shown on the page must be printed."""
    names: dict[str, object] = {}
    for number, block in enumerate(blocks(page)):
        exec(compile(block, f"{name(page)}, block {number}", "exec"), names)
    printed = "\n".join(line.rstrip() for line in capsys.readouterr().out.splitlines())
    assert printed
    for shown in re.findall(r"```text\n(.*?)```", page.read_text(), flags=re.S):
        assert is_printed(shown.rstrip(), printed), f"not printed:\n{shown}\nprinted:\n{printed}"

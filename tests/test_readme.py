"""Code, links and length of README.md and the documentation pages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [
    README,
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    ROOT / "experiments" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
# Pages whose code takes more than ten seconds.
SLOW = {"README.md", "docs/active_learning.md"}
# A README that takes five minutes to read.
MOST_WORDS = 1400


def blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.S)


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=name(page), marks=[pytest.mark.slow] if name(page) in SLOW else [])
        for page in PAGES
        if blocks(page)
    ],
)
def test_code_of_a_page_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Blocks run in order; later blocks may use the names of earlier ones. Files go to the working directory."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for number, block in enumerate(blocks(page)):
        exec(compile(block, f"{name(page)}, block {number}", "exec"), names)
    printed = capsys.readouterr().out
    assert printed
    if page == README:
        assert "right among the accepted" in printed
        assert "the head accepts" in printed


def test_readme_shows_the_main_path() -> None:
    code = "\n".join(blocks(README))
    for call in ("TrustHead.fit(", "head.calibrate(", "head.accept_at(risk=", "out.accept", "TrustClassifier("):
        assert call in code, call


def test_readme_is_short() -> None:
    assert len(README.read_text().split()) <= MOST_WORDS


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_and_pictures_exist(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]+))?\)", page.read_text()):
        path = page.parent / target if target else page
        assert path.exists(), target
        if anchor:
            assert anchor in anchors(path), f"{target}#{anchor}"


def test_readme_links_every_page() -> None:
    linked = re.findall(r"\]\((docs/\w+\.md)\)", README.read_text())
    assert set(linked) == {name(page) for page in (ROOT / "docs").glob("*.md")}

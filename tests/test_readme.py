"""Code, links, length and pictures of README.md, the documentation pages and the gallery; the site builds."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest
from page_code import RECIPES, ROOT, blocks, check_page, name

README = ROOT / "README.md"
PAGES = [
    README,
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    ROOT / "experiments" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
GALLERY = sorted((ROOT / "docs" / "gallery").glob("*.py"))
# Pages whose code takes more than about three seconds.
SLOW = {"README.md", "docs/active_learning.md", "docs/quickstart_table.md", "docs/report.md", "docs/solvers.md"}
# A README that takes three minutes to read.
MOST_WORDS = 700


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=name(page), marks=[pytest.mark.slow] if name(page) in SLOW else [])
        for page in PAGES
        if blocks(page) and page not in RECIPES  # test_recipes.py runs them
    ],
)
def test_code_of_a_page_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Blocks run in order; later blocks may use the names of earlier ones. Files go to the working directory."""
    monkeypatch.chdir(tmp_path)
    check_page(page, capsys)


def test_readme_shows_the_main_path() -> None:
    code = "\n".join(blocks(README))
    for call in ("TrustedModel.fit(", "risk=", "trusted.head.promise", "out.accept", "softmax"):
        assert call in code, call


def test_readme_is_short() -> None:
    assert len(README.read_text().split()) <= MOST_WORDS  # as wc -w counts


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_and_pictures_exist(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]+))?\)", page.read_text()):
        path = page.parent / target if target else page
        assert path.exists(), target
        if anchor:
            assert anchor in anchors(path), f"{target}#{anchor}"


def test_the_index_leads_to_every_page() -> None:
    """Every page is in a table of contents; Sphinx only warns."""
    listed = set()
    for page in (ROOT / "docs").rglob("*.md"):
        for tree in re.findall(r"```{toctree}\n(.*?)```", page.read_text(), flags=re.S):
            entries = [line for line in tree.splitlines() if line and not line.startswith(":")]
            named = [re.fullmatch(r"(?:.* <)?([\w/]+)>?", entry) for entry in entries]
            listed |= {page.parent / f"{found[1]}.md" for found in named if found}
    assert listed == set((ROOT / "docs").rglob("*.md")) - {ROOT / "docs" / "index.md"}


def test_readme_links_the_site() -> None:
    assert "](docs/index.md)" in README.read_text()


def test_the_gallery_shows_every_script() -> None:
    page = (ROOT / "docs" / "gallery.md").read_text()
    assert len(GALLERY) == 6
    for script in GALLERY:
        assert len(script.read_text().splitlines()) < 60
        assert f"gallery/{script.name}" in page
        assert f"gallery/{script.stem}.png" in page


@pytest.mark.slow
@pytest.mark.parametrize("script", GALLERY, ids=lambda path: path.name)
def test_a_script_of_the_gallery_draws(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("SEPC_DATA", raising=False)  # the stand-in is as good a test, and smaller
    monkeypatch.setattr(sys, "argv", [str(script), str(tmp_path / "picture.png")])
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(script), run_name="__main__")
    assert (tmp_path / "picture.png").stat().st_size > 10_000
    capsys.readouterr()


@pytest.mark.slow
def test_pictures_of_the_numbers(tmp_path: Path) -> None:
    draw = runpy.run_path(str(ROOT / "docs" / "pictures" / "draw.py"))
    written = draw["draw_all"](tmp_path, steps=21)
    drawn = {path.name for path in written} | {"report.png"}  # which needs a browser: test_report_browser.py
    assert drawn == {path.name for path in (ROOT / "docs" / "pictures").glob("*.png")}

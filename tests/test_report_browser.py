"""The trust report in a real browser: Debian's Chromium, headless; skipped with the reason where there is none."""

from __future__ import annotations

import json
import runpy
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from browser import Browser, Unavailable
from page_code import ROOT
from PIL import Image
from reported_heads import MOST_BYTES, Reported, report_of_a_million, reported_head

from sepc_torch import TrustHead, write_report

HOSTILE = "</script><script>window.hacked=1</script><img src=x onerror='window.hacked=2'><a href='https://example.org'>"
LONG = "W" * 400
# The most seconds that a page of a million rows takes to open.
MOST_SECONDS = 2.0


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    try:
        started = Browser(tmp_path_factory.mktemp("browser"))
    except Unavailable as reason:
        pytest.skip(str(reason))
    yield started
    started.close()


@pytest.fixture(scope="module")
def reported() -> Reported:
    return reported_head()


@pytest.fixture(scope="module")
def page(reported: Reported, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report whose classes, ids and texts are hostile, long or both, with thumbnails."""
    head, z, y, logits = reported
    n = len(z)
    return write_report(
        head,
        *(z, y, logits, tmp_path_factory.mktemp("page") / "page.html"),
        images=np.random.default_rng(0).random((n, 8, 8)),
        texts=[f"{HOSTILE} {LONG}" for _ in range(n)],
        table={"note": [f"=1+{i}" for i in range(n)], LONG: [LONG] * n},
        ids=[f"{i} {HOSTILE}" if i % 2 else f"{i} {LONG}" for i in range(n)],
        class_names=["ant", HOSTILE, LONG],
    )


@pytest.fixture
def opened(browser: Browser, page: Path) -> Browser:
    browser.view(1600)
    browser.open(page)
    return browser


@pytest.mark.slow
def test_no_error_and_no_request(browser: Browser, page: Path) -> None:
    browser.open_blank()
    browser.log("browser")
    browser.open(page)
    asked = browser.requests()
    assert page.as_uri() in asked
    assert {address.partition(":")[0] for address in asked} <= {"file", "data"}
    assert [address for address in asked if address.startswith("file:")] == [page.as_uri()]
    assert browser.log("browser") == []
    assert browser.run("return window.hacked") is None
    assert browser.run("return document.querySelectorAll('script').length") == 2
    assert browser.run("return document.querySelectorAll('a[href^=http]').length") == 0


def test_samples_are_filtered_and_sorted(opened: Browser) -> None:
    visible = "[...document.querySelectorAll('.sample')].filter(card => !card.hidden)"
    every = opened.run("return document.querySelectorAll('.sample').length")
    assert opened.run(f"return {visible}.length") == min(every, 24)
    opened.run("document.querySelector('button[data-kind=novel]').click()")
    assert set(opened.run(f"return {visible}.map(card => card.dataset.kind)")) == {"novel"}
    opened.run("document.querySelector('button[data-kind=\"\"]').click()")
    opened.run("const s = document.getElementById('sort'); s.value = 'joint'; s.dispatchEvent(new Event('change'))")
    scores = opened.run(f"return {visible}.map(card => Number(card.dataset.joint))")
    assert scores == sorted(scores)
    opened.run("const s = document.getElementById('sort'); s.value = '-joint'; s.dispatchEvent(new Event('change'))")
    assert opened.run(f"return Number({visible}[0].dataset.joint)") >= max(scores)
    opened.run("document.getElementById('more').click()")
    assert opened.run(f"return {visible}.length") == min(every, 72)
    opened.run("const f = document.getElementById('find'); f.value = 'zzz'; f.dispatchEvent(new Event('input'))")
    assert opened.run(f"return {visible}.length") == 0
    assert opened.run("return document.getElementById('shown').textContent") == "0 of 0 shown"


def test_samples_are_filtered_by_label(opened: Browser) -> None:
    visible = "[...document.querySelectorAll('.sample')].filter(card => !card.hidden)"
    change = "const s = document.getElementById('label'); s.value = %r; s.dispatchEvent(new Event('change'))"
    opened.run(change % "1")
    assert set(opened.run(f"return {visible}.map(card => card.dataset.label)")) == {"1"}
    opened.run(change % "")
    assert len(set(opened.run(f"return {visible}.map(card => card.dataset.label)"))) > 1


def test_chosen_rows_are_saved_as_csv(opened: Browser, page: Path, tmp_path: Path) -> None:
    """The file has the rows that are found, or those that were chosen; no cell is a formula."""
    opened.command("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    save = "document.getElementById('save').click()"
    opened.run("document.querySelector('button[data-kind=novel]').click()")
    opened.run(save)
    samples = json.loads(page.with_suffix(".json").read_text("utf-8"))["samples"]
    novel = [sample for sample in samples if sample["kind"] == "novel"]
    table = saved(tmp_path)
    assert table["row"].tolist() == [sample["row"] for sample in novel]
    assert table["id"].str.match(rf"{novel[0]['row']} ").any()
    assert np.allclose(table["score"], [sample["joint"] for sample in novel], atol=1e-6)
    assert table["note"].tolist() == [f"'=1+{sample['row']}" for sample in novel]
    for k in (1, 0):
        opened.run(f"document.querySelectorAll('.sample:not([hidden]) input')[{k}].click()")
    assert opened.run("return document.getElementById('chosen').textContent") == "2 chosen"
    opened.run("document.querySelector('button[data-kind=\"\"]').click()")  # what is chosen stays chosen
    opened.run(save)
    assert saved(tmp_path)["row"].tolist() == [sample["row"] for sample in novel[:2]]


def saved(folder: Path) -> pd.DataFrame:
    """The file that the page has saved, which is removed."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        files = list(folder.glob("*.csv"))
        if files:
            table = pd.read_csv(files[0])
            files[0].unlink()
            return table
        time.sleep(0.05)
    raise TimeoutError("The page has saved no file.")


def test_no_control_is_without_use(browser: Browser, reported: Reported, tmp_path: Path) -> None:
    """With few samples nothing is left to show; with one there is nothing to sort; without scripts no control works."""
    head, z, y, logits = reported
    accepted = head.judge(z, logits).accept.numpy()
    right = accepted & (np.array(head.classes)[head.judge(z, logits).network_label.numpy()] == y)
    shown = "[...document.querySelectorAll('button, select, input')].filter(e => e.getClientRects().length)"
    wanted = {1: {"save", "th", "choose"}, 3: {"save", "th", "choose", "sort", "find"}}
    for refused, names in wanted.items():
        rows = [*np.flatnonzero(right)[:20], *np.flatnonzero(~accepted)[:refused]]
        path = write_report(head, z[rows], y[rows], logits[rows], tmp_path / f"{refused}.html")
        browser.view(1400)
        browser.open(path)
        found = browser.run(f"return {shown}.map(e => e.closest('th') ? 'th' : e.closest('.pick') ? 'choose' : e.id)")
        assert set(found) - {"", "label"} == names
        assert browser.run("return document.getElementById('more').hidden")
        browser.view(1400, scripts=False)
        browser.open(path)
        browser.view(1400)  # scripts that ask run again
        assert browser.run(f"return {shown}.length") == 0


def test_the_table_of_classes_is_sorted(opened: Browser) -> None:
    values = "[...document.querySelectorAll('.sortable tbody tr')].map(row => Number(row.cells[1].dataset.v))"
    press = "document.querySelectorAll('.sortable thead button')[1].click()"
    opened.run(press)
    down = opened.run(f"return {values}")
    opened.run(press)
    assert down == sorted(down, reverse=True)
    assert opened.run(f"return {values}") == sorted(down)


def test_a_mark_on_the_map_leads_to_its_card(opened: Browser) -> None:
    opened.run("document.querySelector('.pt[data-row]').dispatchEvent(new MouseEvent('click', {bubbles: true}))")
    row = opened.run("return document.querySelector('.pt[data-row]').dataset.row")
    assert opened.run("return document.querySelector('.found').id") == f"row-{row}"
    assert opened.run("return document.querySelector('.found').hidden") is False


@pytest.mark.slow
def test_a_million_rows_open_in_two_seconds(browser: Browser, reported: Reported, tmp_path: Path) -> None:
    """The time is that of the processor, so it does not depend on other work of the machine."""
    path = report_of_a_million(reported, tmp_path / "page.html")
    assert path.stat().st_size < MOST_BYTES
    browser.view(1600)
    loads = [browser.seconds_to_open(path) for _ in range(3)]
    assert 0.0 < min(loads) < MOST_SECONDS
    assert browser.run("return document.querySelectorAll('.sample').length") > 100


# Parts of a page that run out of the window or of their own box.
CUT = """return [...document.querySelectorAll('body *')].filter(e => !e.closest('svg') && e.getClientRects().length && (
  e.getBoundingClientRect().right > innerWidth + 1
  || (e.scrollWidth > e.clientWidth + 1 && e.clientWidth > 0 && getComputedStyle(e).overflowX !== 'visible')
)).map(e => e.tagName + '.' + e.className)"""


@pytest.fixture(scope="module")
def pages(page: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The hostile page, and one of a table with 25 classes that have long names."""
    rng, folder = np.random.default_rng(0), tmp_path_factory.mktemp("many")

    def draw(n: int) -> tuple[pd.DataFrame, np.ndarray]:
        y = np.arange(n) % 25
        z = rng.normal(size=(n, 6)) + 2.2 * np.stack([(y + 1) * (k + 2) % 7 for k in range(6)], axis=1)
        return pd.DataFrame(z, columns=[f"measurement number {k} of the insect" for k in range(6)]), y

    z, y = draw(1000)
    head = TrustHead.fit(z, y, normalize="standardize", progress=False).calibrate(*draw(1000))
    names = [f"class number {k} of twenty-five classes" for k in range(25)]
    return [page, write_report(head, *draw(500), path=folder / "many.html", class_names=names)]


@pytest.mark.slow
@pytest.mark.parametrize("scripts", [True, False])
@pytest.mark.parametrize("width", [400, 1000, 1400])
def test_nothing_is_cut_or_wider_than_the_window(
    browser: Browser, pages: list[Path], width: int, scripts: bool
) -> None:
    for path in pages:
        browser.view(width, scripts=scripts)
        browser.open(path)
        assert browser.widths() == (width, width)
        browser.view(width)
        assert browser.run(CUT) == []


@pytest.mark.slow
def test_the_picture_of_the_documentation(browser: Browser, page: Path, tmp_path: Path) -> None:
    assert browser  # there is a browser that works
    draw = runpy.run_path(str(ROOT / "docs" / "pictures" / "report.py"))
    picture = draw["draw_sample"](page, tmp_path / "report.png")
    for path in (picture, ROOT / "docs" / "pictures" / "report.png"):
        with Image.open(path) as drawn:
            assert drawn.size == draw["SIZE"]


def test_paper_shows_every_sample_and_no_control(opened: Browser) -> None:
    shown = "[...document.querySelectorAll(%r)].filter(element => element.getClientRects().length).length"
    every = opened.run("return document.querySelectorAll('.sample').length")
    assert opened.run(f"return {shown % '.sample'}") < every
    opened.command("Emulation.setEmulatedMedia", media="print")
    try:
        assert opened.run(f"return {shown % '.sample'}") == every
        assert opened.run(f"return {shown % 'nav, .controls, .pick'}") == 0
    finally:
        opened.command("Emulation.setEmulatedMedia", media="")


def test_dark_and_light_have_contrast(browser: Browser, page: Path) -> None:
    """Text has at least the contrast 4.5 with its ground (WCAG AA), in both schemes."""
    for scheme in ("light", "dark"):
        browser.view(1600, scheme)
        browser.open(page)
        colors = browser.run(
            "const s = getComputedStyle(document.documentElement);"
            "return ['--bg', '--card', '--ink', '--soft'].map(name => s.getPropertyValue(name).trim())"
        )
        for ground in colors[:2]:
            for text in colors[2:]:
                assert contrast(ground, text) >= 4.5, (scheme, ground, text)
        badges = browser.run(
            "const s = getComputedStyle(document.documentElement);"
            "return ['--kept', '--open', '--bad', '--outside', '--soft'].map(name => s.getPropertyValue(name).trim())"
        )
        for badge in badges:  # its text has the colour of a card
            assert contrast(colors[1], badge) >= 4.5, (scheme, badge)


def contrast(first: str, second: str) -> float:
    """Contrast ratio of two colours #rrggbb, as WCAG defines it."""

    def luminance(color: str) -> float:
        parts = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
        linear = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    light, dark = sorted((luminance(first), luminance(second)), reverse=True)
    return (light + 0.05) / (dark + 0.05)

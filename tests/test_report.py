"""Trust report: its numbers agree with the predictions, its size is bounded, and hostile names are inert."""

from __future__ import annotations

import html.parser
import json
import re
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reported_heads import CLASSES, MILLION, MOST_BYTES, Reported, report_of_a_million, reported_head
from typer.testing import CliRunner

from sepc_torch import TrustHead
from sepc_torch.head.promise import Promise
from sepc_torch.head.reasons import Reason, refusal_reason
from sepc_torch.metrics import aurc, ece
from sepc_torch.report.record import Totals
from sepc_torch.report.rows import judged_rows, shortened
from sepc_torch.report.sentences import verdict
from sepc_torch.report.thumbnails import thumbnail

HOSTILE = "</script><script>window.hacked=1</script><img src=x onerror='window.hacked=2'>\"'&{{7*7}}"


@pytest.fixture(scope="module")
def reported() -> Reported:
    return reported_head()


@pytest.fixture(scope="module")
def few(reported: Reported) -> Reported:
    """The last rows, half of them of the unknown class."""
    head, z, y, logits = reported
    return Reported(head, z[220:], y[220:], logits[220:])


@pytest.fixture(scope="module")
def written(reported: Reported, tmp_path_factory: pytest.TempPathFactory) -> Path:
    head, z, y, logits = reported
    return head.report(z, y, logits, tmp_path_factory.mktemp("report") / "page.html")


class Outline(html.parser.HTMLParser):
    """Elements, attributes and visible text of a page; an error for an element that is closed wrongly."""

    VOID = frozenset({"meta", "link", "img", "input", "br"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def numbers_inside(path: Path) -> Any:
    found = re.search(r'<script type="application/json" id="numbers">(.*?)</script>', path.read_text("utf-8"), re.S)
    assert found
    return json.loads(found[1])


def test_the_same_numbers_are_inside_and_beside(written: Path) -> None:
    assert numbers_inside(written) == json.loads(written.with_suffix(".json").read_text("utf-8"))


def test_the_numbers_are_those_of_the_predictions(reported: Reported, written: Path) -> None:
    head, z, y, logits = reported
    out, found = head.judge(z, logits), numbers_inside(written)
    right = np.array(CLASSES)[out.network_label.numpy()] == y
    accept = out.accept.numpy()
    totals = found["totals"]
    assert totals["rows"] == 300
    assert totals["accepted"] == accept.sum()
    assert totals["wrong"] == (~right).sum()
    assert totals["wrong_accepted"] == (~right & accept).sum()
    assert totals["unknown"] == 40
    codes = refusal_reason(out).tolist()
    assert totals["reasons"] == {r.text: codes.count(int(r)) for r in Reason if r is not Reason.ACCEPTED}
    ours, softmax = found["risk"]["curves"]
    probability = torch.from_numpy(logits).float().softmax(dim=1).amax(dim=1)
    assert ours["aurc"] == pytest.approx(float(aurc(out.joint, torch.from_numpy(right))), rel=1e-4)
    assert softmax["aurc"] == pytest.approx(float(aurc(probability, torch.from_numpy(right))), rel=1e-4)
    assert ours["coverage"][-1] == 1.0
    assert ours["risk"][-1] == pytest.approx((~right).mean(), rel=1e-4)
    known = torch.from_numpy(y != "dog")
    stated, hits = out.confidence[known], torch.from_numpy(right)[known]
    assert found["reliability"][0]["ece"] == pytest.approx(float(ece(stated, hits)), rel=1e-4, abs=1e-6)
    rows = {row["code"]: row for row in found["classes"]}
    assert rows[-1]["points"] == 40
    for code, name in enumerate(CLASSES):
        own = y == name
        assert rows[code]["points"] == own.sum()
        assert rows[code]["right"] == (right & own).sum()
        assert rows[code]["accepted"] == (accept & own).sum()
    for sample in found["samples"]:
        row = sample["row"]
        wrong = sample["kind"] == "accepted but wrong"
        assert wrong == bool(accept[row])
        assert not (wrong and right[row])
        if not wrong:
            assert sample["kind"] == Reason(codes[row]).text
    assert {sample["kind"] for sample in found["samples"]} >= {"accepted but wrong", "novel", "disagrees", "ambiguous"}


def test_the_page_reads_without_scripts(written: Path) -> None:
    page = Outline(written.read_text("utf-8"))
    sections = [attributes["id"] for tag, attributes in page.elements if tag == "section"]
    assert sections == ["verdict", "risk", "reliability", "classes", "map", "regions", "samples", "made"]
    assert "promises that at most 10 % of the accepted labels are wrong" in page.text
    assert "dog (unknown)" in page.text
    for sentence in numbers_inside(written)["verdict"]:
        assert sentence in page.text


def test_nothing_is_loaded_from_elsewhere(written: Path) -> None:
    page = Outline(written.read_text("utf-8"))
    for tag, attributes in page.elements:
        assert tag not in ("iframe", "object", "embed", "base", "form")
        for name in ("src", "href", "action", "srcset", "poster"):
            value = attributes.get(name)
            assert value is None or value.startswith(("#", "data:")), (tag, value)
        assert not any(name.startswith("on") or name == "style" for name in attributes)
    text = written.read_text("utf-8")
    assert "@import" not in text
    assert "url(" not in text
    assert not re.search(r"https?://", text)


def test_hostile_names_are_text(few: Reported, tmp_path: Path) -> None:
    head, z, y, logits = few
    n = len(z)
    path = head.report(
        *(z, y, logits, tmp_path / "page.html"),
        ids=[f"{i}{HOSTILE}" for i in range(n)],
        texts=[HOSTILE] * n,
        class_names=[f"{i}{HOSTILE}" for i in range(3)],
    )
    page = Outline(path.read_text("utf-8"))
    assert [tag for tag, _ in page.elements].count("script") == 2
    assert "img" not in [tag for tag, _ in page.elements]
    assert HOSTILE[:30] in page.text
    assert "49" not in page.text.partition("Samples to look at")[2].partition("window.hacked")[0]
    assert numbers_inside(path) == json.loads(path.with_suffix(".json").read_text("utf-8"))


@pytest.mark.slow
def test_a_million_rows_make_a_small_page(reported: Reported, tmp_path: Path) -> None:
    path = report_of_a_million(reported, tmp_path / "page.html")
    assert path.stat().st_size < MOST_BYTES
    assert path.with_suffix(".json").stat().st_size < MOST_BYTES
    found = numbers_inside(path)
    assert found["totals"]["rows"] == MILLION
    assert len(found["samples"]) > 100


def test_without_true_labels_the_curve_is_that_of_calibration(few: Reported, tmp_path: Path) -> None:
    path = few.head.report(few.z, logits=few.logits, path=tmp_path / "page.html")
    found = numbers_inside(path)
    assert found["risk"]["source"] == "calibration"
    assert found["totals"]["wrong"] is None
    assert found["reliability"] == []
    assert "needs true labels" in Outline(path.read_text("utf-8")).text


def test_the_heads_own_labels_can_be_reported(few: Reported, tmp_path: Path) -> None:
    path = few.head.report(few.z, few.y, path=tmp_path / "page.html")
    found = numbers_inside(path)
    assert [curve["name"] for curve in found["risk"]["curves"]] == ["trust head"]
    assert ["Labels assessed", "the head's own"] in found["made"]


def test_flagged_rows_are_reported(few: Reported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few.head.sepc, "nan_policy", "flag")
    z, logits = few.z.copy(), few.logits.copy()
    z[0], logits[1] = np.nan, np.nan
    path = few.head.report(z, few.y, logits, tmp_path / "page.html")
    found = numbers_inside(path)
    assert found["totals"]["reasons"]["no prediction"] == 2
    assert 0 not in found["map"]["row"]
    Outline(path.read_text("utf-8"))


def test_rows_can_be_marked_unknown(reported: Reported) -> None:
    head, z, y, logits = reported
    y = np.where(y == "dog", "ant", y)
    rows = judged_rows(head, z, y, logits, unknown=np.arange(300) >= 260)
    assert rows.truth is not None
    assert (rows.truth[260:] == -1).all()
    assert (rows.truth[:260] >= 0).all()


def test_promises_by_group_are_reported(few: Reported, tmp_path: Path) -> None:
    head, z, y, logits = few
    try:
        head.accept_at(risk=0.3, by="predicted")
        found = numbers_inside(head.report(z, y, logits, tmp_path / "page.html"))
        assert "of each predicted class are wrong" in found["verdict"][0]
        assert ["Threshold", "one for each predicted class"] in found["made"]
        groups = np.arange(400) % 2
        head.accept_at(risk=0.3, by=groups)
        found = numbers_inside(head.report(z, y, logits, tmp_path / "page.html", groups=groups[:80]))
        assert found["totals"]["accepted"] == int(head.judge(z, logits, groups[:80]).accept.sum())
    finally:
        head.accept_at(risk=0.1)  # as the other tests expect


def test_a_drift_summary_ends_the_verdict(reported: Reported, tmp_path: Path) -> None:
    class Summary:
        sentence = "Nothing drifts."

        def to_dict(self) -> dict[str, Any]:
            return {"alarm": False}

    path = reported.head.report(reported.z[:50], path=tmp_path / "page.html", drift=Summary())
    found = numbers_inside(path)
    assert found["drift"] == {"alarm": False}
    assert found["verdict"][-1] == "Nothing drifts."


def test_rows_are_compared_with_the_calibration_points(reported: Reported, tmp_path: Path) -> None:
    """Rows drawn alike differ by chance only, in any order; rows of one class do not look like the calibration."""
    known = np.flatnonzero(np.isin(reported.y, CLASSES))
    order = known[np.argsort(reported.y[known], kind="stable")]
    same = reported.head.report(reported.z[order], logits=reported.logits[order], path=tmp_path / "same.html")
    found = numbers_inside(same)
    assert not found["drift"]["alarm"]
    assert "No difference from the calibration points is shown" in found["verdict"][-1]
    one = np.flatnonzero(reported.y == reported.y[0])
    rows = np.resize(one, 400)
    other = reported.head.report(reported.z[rows], logits=reported.logits[rows], path=tmp_path / "one.html")
    found = numbers_inside(other)
    assert found["drift"]["alarm"]
    assert "promises do not cover them" in found["verdict"][-1]
    assert any("traffic" in reason for card in found["regions"] for reason in card["why"])
    assert all("since" not in move for move in found["drift"]["moves"])


@pytest.mark.parametrize(
    ("wrong", "expected"), [(5, "as promised"), (12, "no more than chance explains"), (100, "the promise is broken")]
)
def test_the_verdict_compares_with_the_promise(wrong: int, expected: str) -> None:
    totals = Totals(2000, 1000, {"novel": 1000}, 0, 500, wrong, None, 1000)
    sentences = verdict(totals, Promise(0.01, 0.05, None), None)
    assert len(sentences) == 2
    assert expected in sentences[1]
    assert "The calibration is stale: 12" in verdict(totals, Promise(0.01, 0.05, None), "Drift.", 0.125)[2]


def test_mistakes_are_explained(reported: Reported, tmp_path: Path) -> None:
    head, z, y, logits = reported
    bare = TrustHead(head.projection, head.sepc, head.evidence)
    with pytest.raises(RuntimeError, match="needs a calibrated head"):
        bare.report(z, path=tmp_path / "page.html")
    with pytest.raises(ValueError, match="300 embeddings and 299 values of y"):
        head.report(z, y[:-1], path=tmp_path / "page.html")
    with pytest.raises(ValueError, match="300 embeddings and 2 ids"):
        head.report(z, y, path=tmp_path / "page.html", ids=["a", "b"])
    with pytest.raises(ValueError, match="3 classes and class_names has 1"):
        head.report(z, y, path=tmp_path / "page.html", class_names=["a"])
    with pytest.raises(TypeError, match="unknown must hold booleans"):
        head.report(z, y, path=tmp_path / "page.html", unknown=np.zeros(300))
    with pytest.raises(ValueError, match="overwritten by its JSON file"):
        head.report(z, y, path=tmp_path / "page.json")
    with pytest.raises(ValueError, match="no rows"):
        head.report(z[:0], path=tmp_path / "page.html")
    with pytest.raises(OSError, match="nowhere"):
        head.report(z, y, path=tmp_path / "nowhere" / "page.html")
    assert not list(tmp_path.iterdir())
    own = TrustHead(head.projection, head.sepc, head.evidence).calibrate(z[:260], y[:260])
    with pytest.raises(ValueError, match="calibrated without logits"):
        own.report(z, y, logits, tmp_path / "page.html")


def test_the_promise_is_saved(reported: Reported, tmp_path: Path) -> None:
    assert reported.head.promise == Promise(0.1, 0.05, None)
    reported.head.save(tmp_path / "head.safetensors")
    assert TrustHead.load(tmp_path / "head.safetensors").promise == reported.head.promise


def pixels_of(uri: str) -> tuple[int, int, int, bytes]:
    """Width, height, colour type and unfiltered lines of a PNG in a data URI, each line with its filter byte."""
    import base64

    data = base64.b64decode(uri.partition(",")[2])
    width, height, _, color = struct.unpack(">IIBB", data[16:26])
    start = data.index(b"IDAT")
    (length,) = struct.unpack(">I", data[start - 4 : start])
    return width, height, color, zlib.decompress(data[start + 4 : start + 4 + length])


def test_thumbnails_are_pictures() -> None:
    width, height, color, lines = pixels_of(thumbnail(np.array([[0.0, 8.0, 16.0], [16.0, 8.0, 0.0]])))
    assert (width, height, color) == (3, 2, 0)
    assert lines == bytes([0, 0, 128, 255, 0, 255, 128, 0])
    channels_first = torch.zeros(3, 400, 300)
    assert pixels_of(thumbnail(channels_first))[:3] == (60, 80, 2)
    assert pixels_of(thumbnail(np.zeros((5, 1000, 4), dtype=np.uint8)))[:3] == (90, 1, 6)
    assert thumbnail(b"\xff\xd8\xff\xe0") == "data:image/jpeg;base64,/9j/4A=="
    with pytest.raises(ValueError, match="not a PNG"):
        thumbnail(b"<svg onload=alert(1)>")
    with pytest.raises(ValueError, match="must have shape"):
        thumbnail(np.zeros((2, 2, 2)))


def test_images_of_shown_rows_are_embedded(few: Reported, tmp_path: Path) -> None:
    head, z, y, logits = few
    path = head.report(z, y, logits, tmp_path / "page.html", images=np.random.default_rng(0).random((80, 4, 4)))
    page = Outline(path.read_text("utf-8"))
    pictures = [attributes for tag, attributes in page.elements if tag == "img"]
    examples = [row for region in numbers_inside(path)["regions"] for row in region["examples"]]
    assert len(pictures) == len(numbers_inside(path)["samples"]) + len(examples)


def test_long_and_strange_texts_are_shortened() -> None:
    assert shortened("a\x00b\u202ec") == "a\\x00b\\u202ec"
    assert len(shortened("word " * 10**6)) <= 40


def test_the_command_writes_a_report(few: Reported, tmp_path: Path) -> None:
    import pandas as pd

    from sepc_torch.cli import app

    head, z, y, logits = few
    head.save(tmp_path / "head.safetensors")
    frame = pd.DataFrame(np.hstack([z, logits]), columns=[*(f"e{i}" for i in range(6)), "l0", "l1", "l2"])
    frame.assign(kind=y, name=[f"row {i}" for i in range(80)]).to_csv(tmp_path / "rows.csv", index=False)
    arguments = ["report", str(tmp_path / "head.safetensors"), str(tmp_path / "rows.csv"), "-l", "kind", "--id", "name"]
    output = tmp_path / "page.html"
    done = CliRunner().invoke(app, [*arguments, "--logits", "l", "-o", str(output)])
    assert done.exit_code == 0, done.output
    found = numbers_inside(output)
    assert found["totals"]["unknown"] == 40
    assert found["ids"][str(found["samples"][0]["row"])].startswith("row ")
    done = CliRunner().invoke(app, [*arguments, "--logits", "x", "-o", str(output)])
    assert done.exit_code == 2
    done = CliRunner().invoke(app, [*arguments, "-o", str(tmp_path / "page.pdf")])
    assert done.exit_code == 2


def test_the_command_watches_a_stream(few: Reported, tmp_path: Path) -> None:
    from sepc_torch.cli import app

    head, z, _, logits = few
    head.save(tmp_path / "head.safetensors")
    for name, shift in (("same", 0.0), ("moved", 30.0)):
        np.savez(tmp_path / f"{name}.npz", embeddings=np.tile(z, (5, 1)) + shift, logits=np.tile(logits, (5, 1)))
    found = {}
    for name in ("same", "moved"):
        arguments = ["drift", str(tmp_path / "head.safetensors"), str(tmp_path / f"{name}.npz"), "--json"]
        done = CliRunner().invoke(app, arguments)
        found[name] = json.loads(done.stdout)
        assert done.exit_code == int(found[name]["alarm"]), done.output
    assert found["moved"]["alarm"]
    assert found["moved"]["seen"] == 400
    assert found["moved"]["p_value"] < found["same"]["p_value"]

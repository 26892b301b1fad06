"""Trust report: its numbers agree with the predictions, its size is bounded, and hostile names are inert."""

from __future__ import annotations

import html.parser
import json
import re
import runpy
import struct
import zlib
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from page_code import ROOT
from reported_heads import CLASSES, MILLION, MOST_BYTES, Reported, report_of_a_million, reported_head
from scipy.stats import binom
from typer.testing import CliRunner

from sepc_torch import TrustHead, write_report
from sepc_torch.data.table_encoding import TableEncoding
from sepc_torch.head.prediction import Promise
from sepc_torch.head.reasons import Reason, refusal_reason
from sepc_torch.metrics import aurc, ece
from sepc_torch.report.aggregates import confusion_section, mean_cost, totals
from sepc_torch.report.columns import column_drift
from sepc_torch.report.rows import Rows, judged_rows, shortened
from sepc_torch.report.samples import thumbnail
from sepc_torch.report.sentences import _average_tail, promise_state, share_interval

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
    return write_report(head, z, y, logits, tmp_path_factory.mktemp("report") / "page.html")


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


def test_the_confusion_matrix_counts_refused_rows(reported: Reported, written: Path) -> None:
    head, z, y, logits = reported
    out, found = head.judge(z, logits), numbers_inside(written)["confusion"]
    label, accept = np.array(CLASSES)[out.network_label.numpy()], out.accept.numpy()
    assert (found["codes"], found["left_out"]) == ([0, 1, 2], 0)
    for name, counts in zip((*CLASSES, "dog"), found["counts"], strict=True):
        mine = y == name
        assert counts == [*((label[mine & accept] == other).sum() for other in CLASSES), 0, (mine & ~accept).sum()]
    assert "unknown classes" in Outline(written.read_text("utf-8")).text
    # Of more classes than columns, the ones with most accepted mistakes are shown.
    names = [str(i) for i in range(30)]
    truth = np.repeat(np.arange(30), 2)
    guess = np.where(np.arange(60) % 2, truth, (truth + 1) % 30)
    yes = np.isin(truth, [3, 4, 28]) | (np.arange(60) % 2 == 1)
    given = judged_rows(head, z[:60], y[:60], logits[:60])._asdict()
    given |= {"label": guess, "truth": truth, "accept": yes, "names": names}
    many = confusion_section(Rows(**given))
    assert many is not None
    assert (len(many.codes), many.left_out) == (20, 10)
    assert {3, 4, 5, 28, 29} <= set(many.codes)
    assert [sum(counts) for counts in many.counts] == [2] * 20
    assert confusion_section(Rows(**(given | {"truth": None}))) is None


def test_costs_are_reported(few: Reported, tmp_path: Path) -> None:
    head, z, y, logits = few
    before = head.promise
    costs = np.array([[0.0, 1.0, 9.0], [1.0, 0.0, 1.0], [1.0, 1.0, 0.0]])
    try:
        found = head.accept_at(costs=costs, review=0.25)
        out, known = head.judge(z, logits), np.isin(y, CLASSES)
        path = write_report(head, z, y, logits, tmp_path / "page.html")
    finally:
        assert before is not None
        head.accept_at(risk=before.risk, delta=before.delta)
    paid = np.where(out.accept.numpy(), costs[np.searchsorted(CLASSES, y) % 3, out.network_label.numpy()], 0.25)
    inside = numbers_inside(path)
    assert f"the expected cost of a row is at most {found.bound:.3g}" in inside["verdict"][0]
    assert f"costs {paid[known].mean():.3g} on average, and a refused row 0.25" in inside["verdict"][2]


def test_the_page_reads_without_scripts(written: Path) -> None:
    page = Outline(written.read_text("utf-8"))
    sections = [attributes["id"] for tag, attributes in page.elements if tag == "section"]
    assert sections == ["verdict", "risk", "reliability", "classes", "map", "regions", "moved", "samples", "made"]
    assert "at most 10 % of the accepted labels are wrong" in page.text
    assert "dog (unknown)" in page.text
    found = numbers_inside(written)
    for sentence in (*found["verdict"], found["promise"]["sentence"], found["promise"]["next_step"]):
        assert sentence in page.text
    for word in ("novel", "disagrees", "ambiguous", "score", "confidence", "trust", "head", "interval"):
        assert word in [text.strip() for text in page.words], f"{word} is not explained"


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
    path = write_report(
        head,
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


def test_without_true_labels_the_curve_is_that_of_calibration(reported: Reported, tmp_path: Path) -> None:
    path = write_report(reported.head, reported.z[:80], logits=reported.logits[:80], path=tmp_path / "page.html")
    found = numbers_inside(path)
    assert found["risk"]["source"] == "calibration"
    assert found["totals"]["wrong"] is None
    assert found["reliability"] == []
    assert found["promise"]["state"] == "not checked"
    page = Outline(path.read_text("utf-8"))
    sections = [attributes["id"] for tag, attributes in page.elements if tag == "section"]
    assert sections == ["verdict", "risk", "classes", "map", "regions", "samples", "made"]
    links = [attributes["href"] for tag, attributes in page.elements if tag == "a"]
    assert links == [f"#{name}" for name in sections[1:]]  # no link to what is left out
    assert "drawn at random, and report on them" in page.text


def test_the_heads_own_labels_can_be_reported(few: Reported, tmp_path: Path) -> None:
    path = write_report(few.head, few.z, few.y, path=tmp_path / "page.html")
    found = numbers_inside(path)
    assert [curve["name"] for curve in found["risk"]["curves"]] == ["trust head"]
    assert ["Labels assessed", "the head's own"] in found["made"]


def test_flagged_rows_are_reported(few: Reported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few.head.sepc, "nan_policy", "flag")
    z, logits = few.z.copy(), few.logits.copy()
    z[0], logits[1] = np.nan, np.nan
    path = write_report(few.head, z, few.y, logits, tmp_path / "page.html")
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
        found = numbers_inside(write_report(head, z, y, logits, tmp_path / "page.html"))
        assert "of each predicted class are wrong" in found["verdict"][0]
        assert found["promise"]["state"] == "does not apply"  # half of the rows are of an unknown class
        assert ["Threshold", "one for each predicted class"] in found["made"]
        groups = np.arange(400) % 2
        head.accept_at(risk=0.3, by=groups)
        found = numbers_inside(write_report(head, z, y, logits, tmp_path / "page.html", groups=groups[:80]))
        assert found["totals"]["accepted"] == int(head.judge(z, logits, groups[:80]).accept.sum())
    finally:
        head.accept_at(risk=0.1)  # as the other tests expect


@pytest.mark.filterwarnings("ignore:The head accepts nothing")
def test_without_a_promise_every_row_says_so(few: Reported, tmp_path: Path) -> None:
    head, z, _, logits = few
    try:
        head.accept_at(risk=1e-6)
        found = numbers_inside(write_report(head, z, None, logits, tmp_path / "page.html"))
    finally:
        head.accept_at(risk=0.1)  # as the other tests expect
    assert found["totals"]["reasons"]["no promise"] == len(z)
    assert {sample["kind"] for sample in found["samples"]} == {"no promise"}
    assert f"{len(z)} have the reason 'no promise'" in found["verdict"][1]
    assert found["promise"]["state"] == "no promise"
    assert "nothing is accepted" in found["promise"]["sentence"].lower()


def test_a_drift_summary_ends_the_verdict(reported: Reported, tmp_path: Path) -> None:
    class Summary:
        sentence = "Nothing drifts."

        def to_dict(self) -> dict[str, Any]:
            return {"alarm": False}

    path = write_report(reported.head, reported.z[:50], path=tmp_path / "page.html", drift=Summary())
    found = numbers_inside(path)
    assert found["drift"] == {"alarm": False}
    assert found["verdict"][-1] == "Nothing drifts."


def test_rows_are_compared_with_the_calibration_points(reported: Reported, tmp_path: Path) -> None:
    """Rows drawn alike differ by chance only, in any order; rows of one class do not look like the calibration."""
    known = np.flatnonzero(np.isin(reported.y, CLASSES))
    order = known[np.argsort(reported.y[known], kind="stable")]
    same = write_report(reported.head, reported.z[order], logits=reported.logits[order], path=tmp_path / "same.html")
    found = numbers_inside(same)
    assert not found["drift"]["alarm"]
    assert "No difference from the calibration points is shown" in found["verdict"][-1]
    one = np.flatnonzero(reported.y == reported.y[0])
    rows = np.resize(one, 400)
    other = write_report(reported.head, reported.z[rows], logits=reported.logits[rows], path=tmp_path / "one.html")
    found = numbers_inside(other)
    assert found["drift"]["alarm"]
    assert "promises do not cover them" in found["verdict"][-1]
    assert any("traffic" in reason for card in found["regions"] for reason in card["why"])
    assert all("since" not in move for move in found["drift"]["moves"])


def judged(reported: Reported, wrong: int, accepted: int, unknown: int = 0, group: Any = None) -> Rows:
    """Rows of which so many are accepted, wrong, or accepted and of an unknown class; without logits."""
    rows = judged_rows(reported.head, reported.z, reported.y)
    n = len(rows)
    where = np.arange(accepted) % n
    out = type(rows.out)(*(field[where] for field in rows.out))
    label = np.zeros(accepted, dtype=np.int64) if group is None else np.asarray(group)
    truth = label.copy()
    truth[:wrong] = (label[:wrong] + 1) % 3
    truth[accepted - unknown :] = -1
    everything, none = np.ones(accepted, dtype=bool), np.zeros(accepted, dtype=np.int64)
    return Rows(out, label, everything, none, truth, label == truth, None, None, rows.names)


@pytest.fixture
def promising(reported: Reported) -> Iterator[TrustHead]:
    """The head, whose promise a test may replace."""
    before = reported.head.promise
    yield reported.head
    reported.head.promise = before


RISK = Promise(0.01, 0.05, None)


@pytest.mark.parametrize(
    ("promise", "wrong", "unknown", "state", "words"),
    [
        (RISK, 5, 0, "kept", "0.5 % of the accepted labels are wrong, and at most 1.0 % were promised"),
        (RISK, 12, 0, "open", "chance can explain the difference"),
        (RISK, 100, 0, "broken", "less than 1.0 %"),
        (RISK, 5, 300, "does not apply", "300 accepted rows are of unknown classes"),
        (RISK._replace(units=True), 12, 0, "open", "over units"),
        (RISK._replace(units=True), 100, 0, "open", "over units"),
        (RISK._replace(average=True), 12, 0, "open", "chance can explain"),
        (RISK._replace(average=True), 500, 0, "broken", "50.0 %"),
        (Promise(None, 0.05, 0.1), 500, 0, "kept", "0 % of the rows are refused"),
        (Promise(None, 0.05, None, costs=1.0, review=0.2, bound=0.1), 500, 0, "broken", "costs 0.5 on average"),
        (Promise(None, 0.05, None, costs=1.0, review=0.2, bound=0.49), 500, 0, "open", "at most 0.49"),
        (Promise(0.01, 0.05, None, found=False), 5, 0, "no promise", "Nothing is accepted"),
        (None, 5, 0, "no promise", "does not say"),
    ],
)
def test_the_state_of_the_promise(
    reported: Reported,
    promising: TrustHead,
    promise: Promise | None,
    wrong: int,
    unknown: int,
    state: str,
    words: str,
) -> None:
    promising.promise = promise
    rows = judged(reported, wrong, 1000, unknown)
    found = promise_state(promising, rows, totals(rows), cost=mean_cost(rows, promising))
    assert found.state == state
    assert words in found.sentence
    assert found.next_step
    if promise is not None and promise.found:
        assert promise_state(promising, rows, totals(rows), alarm=True).state == "does not apply"


def test_the_promise_is_checked_in_every_group(reported: Reported, promising: TrustHead) -> None:
    """All rows together keep the risk, and the rows of one label do not."""
    label = np.repeat([1, 0], [100, 900])
    rows = judged(reported, 40, 1000, group=label)
    promising.promise = Promise(0.05, 0.05, None)
    assert promise_state(promising, rows, totals(rows)).state == "kept"
    promising.promise = Promise(0.05, 0.05, None, by="predicted")
    found = promise_state(promising, rows, totals(rows))
    assert found.state == "broken"
    assert "in the worst (predicted class " in found.sentence
    assert "), 40.0 % are wrong" in found.sentence
    assert promising.calibration is not None
    labels = promising.calibration.own if rows.softmax is None else promising.calibration.network
    labels.set_table("class_threshold", np.zeros(len(promising.classes)))
    promising.promise = Promise(0.05, 0.05, None, by="predicted", groups=1)  # both classes are one merged group
    assert promise_state(promising, rows, totals(rows)).state == "kept"
    assert "all predicted classes together" in str(promising.promise)
    promising.promise = Promise(0.05, 0.05, None, by="group")
    assert promise_state(promising, rows, totals(rows), groups=label).state == "broken"
    assert promise_state(promising, rows, totals(rows), groups=np.arange(1000) % 2).state == "kept"


def test_a_stale_promise_does_not_apply(
    reported: Reported, promising: TrustHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TrustHead, "calibration_age", 0.125)
    rows = judged(reported, 0, 100)
    found = promise_state(promising, rows, totals(rows))
    assert found.state == "does not apply"
    assert "12.5 % of the training points" in found.sentence


@pytest.mark.slow
@pytest.mark.parametrize("groups", [1, 4])
def test_a_kept_promise_is_seldom_called_broken(
    reported: Reported, promising: TrustHead, rng: np.random.Generator, groups: int
) -> None:
    """The error is just the promised risk in every group: at most 1 % of the reports say that it is broken.

    The wrong rows come first, and groups are drawn at random.
    """
    promising.promise = Promise(0.1, 0.05, None, by=None if groups == 1 else "group")
    broken, runs, n = 0, 300, 200
    for _ in range(runs):
        rows = judged(reported, rng.binomial(n, 0.1), n)
        group = rng.integers(groups, size=n)
        broken += promise_state(promising, rows, totals(rows), groups=group).state == "broken"
    assert binom.sf(broken - 1, runs, 0.01) > 1e-6


def test_an_average_is_seldom_called_broken(rng: np.random.Generator) -> None:
    """A threshold at a quantile of calibration scores refuses a share that varies with the calibration set."""
    points, rows, rate, runs = 99, 1000, 0.1, 2000
    share = np.sort(rng.random((runs, points)), axis=1)[:, round(rate * (points + 1)) - 1]  # refused below this score
    refused = rng.binomial(rows, share)
    tails = np.array([_average_tail(int(count), rows, rate, points) for count in refused])
    for level in (0.01, 0.1):
        assert binom.sf((tails < level).sum() - 1, runs, level) > 1e-6
    # A binomial test, which forgets the calibration set, would call far more of them broken.
    assert (binom.sf(refused - 1, rows, rate) < 0.01).mean() > 0.1


@pytest.mark.parametrize("n", [1, 7, 40])
def test_intervals_of_shares_cover(n: int) -> None:
    """Of every true share, at least 95 % of the counts have an interval that holds it."""
    ends = np.array([share_interval(k, n) for k in range(n + 1)])
    assert ends[0, 0] == 0.0
    assert ends[-1, 1] == 1.0
    for share in np.linspace(0.0, 1.0, 101):
        inside = (ends[:, 0] <= share) & (share <= ends[:, 1])
        assert binom.pmf(np.arange(n + 1), n, share)[inside].sum() >= 0.95 - 1e-12


def test_what_the_report_is_about_stands_at_its_top(few: Reported, tmp_path: Path) -> None:
    named: dict[str, Any] = {"title": "Ants & bees", "model": "insects-7", "data": "may.csv", "date": "1 June 2026"}
    path = write_report(few.head, few.z, few.y, few.logits, tmp_path / "page.html", **named)
    found, page = numbers_inside(path), Outline(path.read_text("utf-8"))
    assert {name: found[name] for name in named} == named
    top = page.text.partition("Risk over coverage")[0]
    assert "Report Ants & bees Model insects-7 Data may.csv Date 1 June 2026 ! promise does not apply" in top
    assert "Next:" in top
    legend = page.text.partition("Risk over coverage")[2]
    assert "promised: at most 10.0 % does not apply" in legend.replace("\xa0", " ")
    bare = Outline(write_report(few.head, few.z, path=tmp_path / "bare.html").read_text("utf-8")).text
    assert "Model" not in bare.partition("Next:")[0]
    assert str(datetime.now(UTC).year) in bare.partition("Next:")[0]


def test_mistakes_are_explained(reported: Reported, tmp_path: Path) -> None:
    head, z, y, logits = reported
    bare = TrustHead(head.projection, head.sepc, head.evidence)
    with pytest.raises(RuntimeError, match="needs a calibrated head"):
        write_report(bare, z, path=tmp_path / "page.html")
    with pytest.raises(ValueError, match="300 embeddings and 299 values of y"):
        write_report(head, z, y[:-1], path=tmp_path / "page.html")
    with pytest.raises(ValueError, match="300 embeddings and 2 ids"):
        write_report(head, z, y, path=tmp_path / "page.html", ids=["a", "b"])
    with pytest.raises(ValueError, match="3 classes and class_names has 1"):
        write_report(head, z, y, path=tmp_path / "page.html", class_names=["a"])
    with pytest.raises(TypeError, match="unknown must hold booleans"):
        write_report(head, z, y, path=tmp_path / "page.html", unknown=np.zeros(300))
    with pytest.raises(TypeError, match="table must have named columns"):
        write_report(head, z, y, path=tmp_path / "page.html", table=[["a"]] * 300)
    with pytest.raises(ValueError, match=r"300 embeddings and 2 values of the column 'age' of table"):
        write_report(head, z, y, path=tmp_path / "page.html", table={"age": [1, 2]})
    with pytest.raises(ValueError, match="overwritten by its JSON file"):
        write_report(head, z, y, path=tmp_path / "page.json")
    with pytest.raises(ValueError, match="no rows"):
        write_report(head, z[:0], path=tmp_path / "page.html")
    with pytest.raises(OSError, match="nowhere"):
        write_report(head, z, y, path=tmp_path / "nowhere" / "page.html")
    assert not list(tmp_path.iterdir())
    own = TrustHead(head.projection, head.sepc, head.evidence).calibrate(z[:260], y[:260])
    with pytest.raises(ValueError, match="calibrated without logits"):
        write_report(own, z, y, logits, tmp_path / "page.html")


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
    path = write_report(head, z, y, logits, tmp_path / "page.html", images=np.random.default_rng(0).random((80, 4, 4)))
    page = Outline(path.read_text("utf-8"))
    pictures = [attributes for tag, attributes in page.elements if tag == "img"]
    inside = numbers_inside(path)
    examples = [row for region in inside["regions"] for row in region["examples"]]
    moved = [row for group in inside["moved"]["groups"] for row in group["rows"]]
    assert len(pictures) == len(inside["samples"]) + len(examples) + len(moved)


def test_long_and_strange_texts_are_shortened() -> None:
    assert shortened("a\x00b\u202ec") == "a\\x00b\\u202ec"
    assert len(shortened("word " * 10**6)) <= 40


def table_of(rng: np.random.Generator, n: int, older: float = 0.0, cats: float = 0.5) -> dict[str, list[Any]]:
    """Ages in whole years, a weight that is missing at times, and pets."""
    weight = [None if gone else round(w, 1) for gone, w in zip(rng.random(n) < 0.1, rng.normal(70, 9, n), strict=True)]
    pet = np.where(rng.random(n) < cats, "cat", "dog").tolist()
    return {"age": (rng.normal(40.0, 6.0, n).round() + older).tolist(), "weight": weight, "pet": pet}


def tabled_head(rng: np.random.Generator) -> TrustHead:
    """A calibrated head on such tables; the label says whether the age is above 40."""
    tables = [table_of(rng, 400) for _ in range(2)]
    arrays = [{name: np.array(cells, dtype=object) for name, cells in table.items()} for table in tables]
    labels = [np.where(np.array(table["age"]) > 40.0, "old", "young") for table in tables]
    encoding = TableEncoding.fit(arrays[0], ["age", "weight"], ["pet"])
    head = TrustHead.fit(
        encoding.encode(arrays[0]).points, labels[0], normalize=None, encoding=encoding, progress=False
    )
    return head.calibrate(arrays[1], labels[1])


def in_every_form(table: dict[str, list[Any]]) -> list[Any]:
    """A table as arrays, DataFrame and Arrow table."""
    return [{name: np.array(v, dtype=object) for name, v in table.items()}, pd.DataFrame(table), pa.table(table)]


def test_columns_that_moved_are_found(rng: np.random.Generator) -> None:
    head = tabled_head(rng)
    for given in in_every_form(table_of(rng, 300, older=12.0, cats=0.9)):
        found = column_drift(head, given, 300)
        assert found is not None
        assert (found.rows, found.training_rows, found.left_out) == (300, 400, 0)
        shifts = {shift.name: shift for shift in found.columns}
        assert set(shifts) == {"age", "weight", "weight is missing", "pet"}
        assert {name for name in ("age", "pet") if shifts[name].differs} == {"age", "pet"}
        assert found.columns[0].name == "age"  # the largest shift of those that differ
        age, pet = shifts["age"], shifts["pet"]
        assert age.here == pytest.approx(np.mean(np.asarray(given["age"], dtype=float)), rel=1e-4)
        assert age.here - age.training == pytest.approx(12.0, abs=2.0)
        share = pet.here if pet.category == "cat" else 1.0 - pet.here
        assert share == pytest.approx(0.9, abs=0.08)
        assert pet.shift == pytest.approx(abs(pet.here - pet.training), abs=1e-9)


def test_chance_seldom_moves_a_column(rng: np.random.Generator) -> None:
    """Rows drawn like the training rows: at most 1 % of the reports name a column, ties of whole years or not."""
    head, runs = tabled_head(rng), 60
    named = 0
    for _ in range(runs):
        found = column_drift(head, pd.DataFrame(table_of(rng, 300)), 300)
        assert found is not None
        named += found.differ > 0
    # The training rows are the same in all runs, so that the runs are not independent: ten times the rate is allowed.
    assert binom.sf(named - 1, runs, 0.1) > 1e-6


def test_equal_values_stay_equal(rng: np.random.Generator) -> None:
    """The training rows themselves have not moved, although the head keeps them relative to an origin in float32."""
    table = pd.DataFrame({"big": rng.integers(5, size=200) + 1e4, "small": rng.integers(3, size=200) / 7.0})
    head = TrustHead.fit(table, np.arange(200) % 2, normalize="standardize", progress=False)
    for converted in (head, head.double(), head.half()):
        found = column_drift(converted, table, 200)
        assert found is not None
        assert [shift.shift for shift in found.columns] == [0.0, 0.0]
    assert column_drift(TrustHead.fit(table.to_numpy(), np.arange(200) % 2, progress=False), table, 200) is None


def test_values_of_columns_stand_on_the_cards(rng: np.random.Generator, tmp_path: Path) -> None:
    head, table = tabled_head(rng), table_of(rng, 60, older=30.0)
    for k, given in enumerate(in_every_form(table)):
        path = write_report(head, given, path=tmp_path / f"{k}.html")
        samples = numbers_inside(path)["samples"]
        assert samples
        for sample in samples:
            shown = {value["name"]: value for value in sample["values"]}
            assert set(shown) == {"age", "weight", "pet"}
            weight = table["weight"][sample["row"]]
            assert shown["weight"]["text"] == ("(missing)" if weight is None else f"{weight:.6g}")
            assert shown["pet"]["text"] == table["pet"][sample["row"]]
            assert sample["values"][0]["name"] == "age"  # 30 years more than in training
            assert re.fullmatch(r"mean \d\d(\.\d)? in its class", shown["age"]["usual"])
        assert "in its class" in Outline(path.read_text("utf-8")).text
    # Encoded rows alone: numbers in the units of the table, and the category.
    encoded = head.encode(pd.DataFrame(table))
    for sample in numbers_inside(write_report(head, encoded, path=tmp_path / "page.html"))["samples"]:
        shown = {value["name"]: value["text"] for value in sample["values"]}
        assert float(shown["age"]) == table["age"][sample["row"]]
        assert shown["pet"] == table["pet"][sample["row"]]
    # Another table names the columns to show.
    notes = {"note": [f"row {i}" for i in range(60)]}
    sample = numbers_inside(write_report(head, encoded, path=tmp_path / "page.html", table=notes))["samples"][0]
    assert sample["values"] == [{"name": "note", "text": f"row {sample['row']}", "usual": ""}]


@pytest.mark.slow
def test_the_sample_page_of_the_documentation(tmp_path: Path) -> None:
    written = runpy.run_path(str(ROOT / "docs" / "pictures" / "report.py"))["write_sample"](tmp_path / "page.html")
    assert written.stat().st_size < MOST_BYTES
    found = numbers_inside(written)
    assert found["promise"]["state"] == "kept"
    assert [shift["name"] for shift in found["columns"]["columns"] if shift["differs"]] == ["age"]


def test_the_command_writes_a_report(few: Reported, tmp_path: Path) -> None:
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
    assert [found[name] for name in ("title", "model", "data")] == ["Trust report", "head.safetensors", "rows.csv"]
    assert found["ids"][str(found["samples"][0]["row"])].startswith("row ")
    done = CliRunner().invoke(app, [*arguments, "--logits", "x", "-o", str(output)])
    assert done.exit_code == 2
    done = CliRunner().invoke(app, [*arguments, "-o", str(tmp_path / "page.pdf")])
    assert done.exit_code == 2


def test_the_command_shows_the_cells_of_a_table(rng: np.random.Generator, tmp_path: Path) -> None:
    from sepc_torch.cli import app

    tabled_head(rng).save(tmp_path / "head.safetensors")
    table = table_of(rng, 50, older=30.0)
    pd.DataFrame(table).to_csv(tmp_path / "rows.csv", index=False)
    arguments = ["report", str(tmp_path / "head.safetensors"), str(tmp_path / "rows.csv"), "--title", "Pets"]
    done = CliRunner().invoke(app, [*arguments, "-o", str(tmp_path / "page.html")])
    assert done.exit_code == 0, done.output
    found = numbers_inside(tmp_path / "page.html")
    assert found["title"] == "Pets"
    assert found["columns"]["columns"][0]["name"] == "age"
    for sample in found["samples"]:
        shown = {value["name"]: value["text"] for value in sample["values"]}
        assert shown["pet"] == table["pet"][sample["row"]]
        assert float(shown["age"]) == table["age"][sample["row"]]


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

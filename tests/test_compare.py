"""The one-call comparison: agreement with the metrics, a constructed case, input types, and input errors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

import sepc_torch
from sepc_torch import Comparison, TrustHead, compare, metrics
from sepc_torch.head.promises.conformal import risk_threshold
from sepc_torch.metrics.baselines import baseline_scores
from sepc_torch.metrics.compare import BASELINES, InputFormat, classes_of_head
from sepc_torch.shapes import Array

Rng = np.random.Generator
CLASSES, DIM, TRAIN, TEST = 3, 4, 150, 240


@dataclass(frozen=True)
class Case:
    """Three classes, a network that errs on a fifth of the rows, and unknown rows away from the classes."""

    z: Array
    y: Array
    logits: Array
    test_z: Array
    test_y: Array
    test_logits: Array
    ood: Array
    ood_logits: Array
    held_out: tuple[Array, Array, Array]

    @property
    def five(self) -> tuple[Any, ...]:
        """The five required arguments."""
        return self.z, self.y, self.test_z, self.test_y, self.test_logits


def draw(rng: Rng, count: int, centers: Array) -> tuple[Array, Array, Array]:
    y = rng.integers(0, CLASSES, count)
    z = centers[y] + rng.normal(size=(count, DIM))
    said = np.where(rng.random(count) < 0.2, (y + 1) % CLASSES, y)
    return z, y, 3.0 * np.eye(CLASSES)[said] + rng.normal(size=(count, CLASSES))


@pytest.fixture
def case(rng: Rng) -> Case:
    centers = 5.0 * np.eye(CLASSES, DIM)
    ood = rng.normal(size=(150, DIM)) - 2.0
    return Case(*draw(rng, TRAIN, centers), *draw(rng, TEST, centers), ood, ood[:, :3], draw(rng, 150, centers))


def with_last_layer(case: Case, weight: Array, bias: Array) -> Case:
    """The same rows with the logits of a linear layer."""
    z, y, _ = case.held_out
    parts = {name: getattr(case, name) @ weight.T + bias for name in ("z", "test_z", "ood")}
    logits = dict(zip(("logits", "test_logits", "ood_logits"), parts.values(), strict=True))
    return replace(case, **logits, held_out=(z, y, z @ weight.T + bias))


def quiet(*args: Any, **options: Any) -> Comparison:
    return compare(*args, show=False, **options)


def row(found: Comparison, name: str) -> dict[str, float]:
    return next(row for row in found.rows if row["score"] == name)


def same(a: Comparison, b: Comparison) -> bool:
    return str(a) == str(b) and all(
        (x := {k: v for k, v in first.items() if v == v}) == {k: v for k, v in second.items() if v == v} and len(x) > 1
        for first, second in zip(a.rows, b.rows, strict=True)
    )


@pytest.mark.slow
def test_rows_agree_with_the_metrics(case: Case) -> None:
    """With as many unknown as known rows, the joint task uses all rows; the last layer gives logits left out."""
    weight, bias = np.eye(CLASSES, DIM) + 0.2, np.linspace(-1.0, 1.0, CLASSES)
    case = with_last_layer(case, weight, bias)
    case.test_y[::5] = (case.test_y[::5] + 1) % CLASSES  # mistakes
    known = slice(0, len(case.ood))
    test_z, test_y, test_logits = case.test_z[known], case.test_y[known], case.test_logits[known]
    rows = case.z, case.y, test_z, test_y, test_logits, case.ood
    found = quiet(*rows, weight=weight, bias=bias, calibration=case.held_out)
    given = {"logits_ood": case.ood_logits, "logits_train": case.logits, "calibration": case.held_out}
    assert same(found, quiet(*rows, weight=weight, bias=bias, **given))
    assert "Left out" not in str(found)
    right = torch.from_numpy(test_logits.argmax(axis=1) == test_y)
    assert found.accuracy == float(right.double().mean())
    assert found.judged.tolist() == list(range(len(right)))
    assert found.unknown == len(case.ood)

    trained = TrustHead.fit(case.z, case.y).calibrate(*case.held_out)
    out = trained(torch.from_numpy(test_z).float(), logits=torch.from_numpy(test_logits))
    far = trained(torch.from_numpy(case.ood).float(), logits=torch.from_numpy(case.ood_logits))
    z, y, logits = (torch.from_numpy(a) for a in (case.z, case.y, case.logits))
    calibration = torch.from_numpy(case.held_out[2]), torch.from_numpy(case.held_out[1])
    classifier = torch.from_numpy(weight), torch.from_numpy(bias)
    scores = {
        "SEP-C": ((out.confidence,), (-out.nonconformity, -far.nonconformity), (out.joint, far.joint)),
        "SEP-C joint": ((out.joint,), *2 * [(out.joint, far.joint)]),
        "paper's trust": ((out.network_trust,), *2 * [(out.network_trust, far.network_trust)]),
        "partition's margin": ((out.network_margin,), *2 * [(out.network_margin, far.network_margin)]),
    }
    near, unknown = (
        baseline_scores(z, y, torch.from_numpy(a), torch.from_numpy(b), logits, calibration, classifier)
        for a, b in ((test_z, test_logits), (case.ood, case.ood_logits))
    )
    scores |= {BASELINES[name].title: ((near[name],), *2 * [(near[name], unknown[name])]) for name in near}
    assert set(near) == set(BASELINES)
    assert [row["score"] for row in found.rows] == list(scores)

    flags = torch.arange(2 * len(right)) >= len(right)
    for name, (mistakes, typical, joint) in scores.items():
        expected = {
            "aurc": metrics.aurc(mistakes[0], right),
            "naurc": metrics.naurc(mistakes[0], right),
            "failure_auroc": metrics.failure_auroc(mistakes[0], right),
            "unknown_auroc": metrics.unknown_auroc(*typical),
            "fpr95": metrics.fpr95(typical[0], typical[1], positive="known"),
            "scod_aurc": metrics.scod_aurc(torch.cat(joint), torch.cat([right, ~right]), flags),
        }
        got = row(found, name)
        assert all(type(value) is float for key, value in got.items() if key != "score")
        for metric, value in expected.items():
            assert got[metric] == pytest.approx(float(value), abs=1e-6), (name, metric)
        if name in ("SEP-C", "max softmax", "scaled softmax"):
            assert got["ece"] == pytest.approx(float(metrics.ece(mistakes[0], right)), abs=1e-6)
        else:
            assert math.isnan(got["ece"]), "not a probability"


def test_sepc_detects_mistakes_of_an_overconfident_network(case: Case) -> None:
    wrong = case.test_logits.argmax(axis=1) != case.test_y
    logits = np.where(wrong[:, None], 3.0, 1.0) * case.test_logits
    found = quiet(case.z, case.y, case.test_z, case.test_y, logits)
    ours, softmax = row(found, "SEP-C"), row(found, "max softmax")
    assert ours["failure_auroc"] > 0.9 > softmax["failure_auroc"]
    assert ours["aurc"] < softmax["aurc"] / 2
    assert ours["naurc"] < 0.3
    assert found.best("aurc") != "max softmax"


@pytest.mark.slow
def test_the_default_split_separates_calibration_from_evaluation(case: Case) -> None:
    mine = TrustHead.fit(case.z, case.y)
    found = quiet(*case.five, head=mine)
    judged = np.isin(np.arange(TEST), found.judged)
    assert judged.sum() == TEST // 2
    assert found.accuracy == np.mean(case.test_logits.argmax(axis=1)[judged] == case.test_y[judged])
    assert "the other 120 (seed 0)" in found.caption

    nonsense = case.test_logits[np.random.default_rng(0).permutation(TEST)]  # logits of other rows
    among_judged = quiet(*case.five[:4], np.where(judged[:, None], nonsense, case.test_logits), head=mine)
    before, after = found.head.state_dict(), among_judged.head.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before if isinstance(before[key], torch.Tensor))
    among_others = quiet(*case.five[:4], np.where(judged[:, None], case.test_logits, nonsense), head=mine)
    assert among_others.accuracy == found.accuracy
    assert row(among_others, "energy") == pytest.approx(row(found, "energy"), nan_ok=True)
    assert quiet(*case.five, seed=1, head=mine).judged.tolist() != found.judged.tolist()


@pytest.mark.slow
def test_equal_inputs_give_equal_tables(case: Case) -> None:
    options = {"logits_ood": case.ood_logits, "seed": 3}
    assert same(quiet(*case.five, case.ood, **options), quiet(*case.five, case.ood, **options))


@pytest.mark.slow
def test_label_types_and_containers(case: Case) -> None:
    import pandas as pd

    expected = quiet(*case.five)
    names = np.array(["ant", "bee", "cat"])
    assert same(
        quiet(case.z, names[case.y], case.test_z, names[case.test_y], case.test_logits, classes=names), expected
    )
    tensors = [torch.from_numpy(given).requires_grad_(given.dtype.kind == "f") for given in case.five]
    assert same(quiet(*tensors), expected)
    frames = [pd.DataFrame(given) if given.ndim == 2 else pd.Series(given) for given in case.five]
    assert same(quiet(*frames), expected)
    assert same(quiet(*(given.tolist() for given in case.five)), expected)
    read_only = [np.frombuffer(given.tobytes(), given.dtype).reshape(given.shape) for given in case.five]
    assert same(quiet(*read_only), expected)


@pytest.mark.slow
def test_classes_name_the_columns_of_the_logits(case: Case) -> None:
    names = np.array(["zebra", "yak", "ant"])
    arguments = case.z, names[case.y], case.test_z, names[case.test_y], case.test_logits
    found = quiet(*arguments, classes=names)
    assert found.head.classes == names.tolist()
    assert found.accuracy == quiet(*case.five).accuracy
    with pytest.raises(
        ValueError, match=r"sorted, they are \['ant', 'yak', 'zebra'\].*compare\(..., classes=\[...\]\)"
    ):
        quiet(*arguments)
    with pytest.raises(ValueError, match="Which column of the logits"):
        quiet(*arguments, head=TrustHead.fit(case.z, names[case.y]))
    assert quiet(*arguments, head=TrustHead.fit(case.z, names[case.y], classes=names)).accuracy == found.accuracy


def test_tables_of_logits_are_matched_by_name(case: Case) -> None:
    import pandas as pd

    names = np.array(["zebra", "yak", "ant"])
    table = pd.DataFrame(case.test_logits, columns=names)[["yak", "ant", "zebra"]]
    found = quiet(case.z, names[case.y], case.test_z, names[case.test_y], table)
    assert found.head.classes == ["ant", "yak", "zebra"]
    assert found.accuracy == quiet(*case.five).accuracy
    assert not found.head.order_stated, "the table says nothing about arrays"
    with pytest.raises(ValueError, match="The columns of the logits are"):
        quiet(case.z, names[case.y], case.test_z, names[case.test_y], table.rename(columns={"yak": "emu"}))


def test_without_logits_of_unknown_rows_some_cells_are_empty(case: Case) -> None:
    mine = TrustHead.fit(case.z, case.y)
    full = quiet(*case.five, case.ood, logits_ood=case.ood_logits, head=mine)
    found = quiet(*case.five, case.ood, head=mine)
    plain = mine.calibrate(case.test_z, case.test_y, case.test_logits)  # only the difference of known and unknown rows
    near, far = (plain(torch.from_numpy(rows).float()).nonconformity for rows in (case.test_z[found.judged], case.ood))
    assert row(found, "SEP-C")["unknown_auroc"] == pytest.approx(float(metrics.unknown_auroc(-near, -far)), abs=0.05)
    assert math.isnan(row(found, "SEP-C")["scod_aurc"])
    for score in ("SEP-C joint", "paper's trust", "energy", "TrustScore", "one ellipsoid, ratio"):
        assert math.isnan(row(found, score)["unknown_auroc"])
    for score in ("Mahalanobis", "relative Mahalanobis++", "Gaussian per class", "k-NN (Sun)"):
        assert row(found, score) == pytest.approx(row(full, score), nan_ok=True)
    assert "needs logits_ood" in str(found)
    assert "needs logits_ood" not in str(full)


@pytest.mark.parametrize("unknown", [1, 400])
def test_the_joint_task_draws_equal_numbers(case: Case, rng: Rng, unknown: int) -> None:
    ood = rng.normal(size=(unknown, DIM)) - 2.0
    found = quiet(*case.five, ood, logits_ood=ood[:, :3], head=TrustHead.fit(case.z, case.y))
    size = min(unknown, TEST // 2)
    assert f"SCOD-AURC: {size} known, {size} unknown" in found.caption
    assert all(0.0 <= row["scod_aurc"] <= 0.5 for row in found.rows), "an unknown row costs at most one half"


def test_a_given_head_is_copied(case: Case) -> None:
    mine = TrustHead.fit(case.z, case.y, dim=2)
    before = {key: copy.clone() for key, copy in mine.state_dict().items() if isinstance(copy, torch.Tensor)}
    found = quiet(*case.five, head=mine)
    assert not mine.calibration.done  # type: ignore[union-attr]
    assert all(torch.equal(mine.state_dict()[key], value) for key, value in before.items())
    assert found.head.calibration.done  # type: ignore[union-attr]
    assert same(found, quiet(*case.five, dim=2))


def test_a_row_of_zeros_has_the_lowest_trust(case: Case) -> None:
    mine = TrustHead.fit(case.z, case.y, nan_policy="flag")
    test_z = case.test_z.copy()
    test_z[0] = 0.0
    found = quiet(case.z, case.y, test_z, *case.five[3:], np.zeros((1, DIM)), head=mine, calibration=case.held_out)
    assert row(found, "SEP-C")["unknown_auroc"] > 0.99


def test_compare_prints_a_table_and_marks_the_best(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    z, y, test_z, test_y, logits = case.five
    found = compare(z, y, test_z, test_y, logits, case.ood, logits_ood=case.ood_logits)
    text = capsys.readouterr().out
    assert text == f"{found}\n"
    lines = text.splitlines()
    assert lines[0].split()[0] == "score"
    assert max(map(len, lines)) <= 124
    end = lines[0].index("ECE") + 3
    assert {line[end - 1 : end + 1] for line in lines[1 : len(found.rows) + 1]} >= {"- "}, "columns are aligned"
    for column in found.columns:
        values = found.to_pandas()[column]
        better = values.max() if column in ("failure_auroc", "unknown_auroc", "accepted") else values.min()
        assert values[found.best(column)] == better
    assert text.count("*") >= len(found.columns) + 1, "one in every column, and one in the caption"
    assert len(found.caption.splitlines()) == 5
    assert f"accuracy {found.accuracy:.1%}" in found.caption
    assert repr(found).startswith("Comparison(23 scores, 120 test rows, 150 unknown rows")
    quiet(*case.five)
    assert capsys.readouterr().out == ""


@pytest.mark.slow
def test_the_advice_follows_the_table(case: Case) -> None:
    found = quiet(*case.five, case.ood, logits_ood=case.ood_logits)
    assert str(found).replace("\n", " ").endswith(found.advice)
    for column, field, task in (
        ("aurc", "confidence", "mistakes"),
        ("unknown_auroc", "nonconformity", "unknowns"),
        ("scod_aurc", "joint", "both"),
    ):
        ours, more = row(found, "SEP-C")[column], column == "unknown_auroc"
        others = [row for row in found.rows if row["score"] not in ("SEP-C", f"SEP-C {field}")]
        best = (max if more else min)(others, key=lambda row: row[column])
        wins = ours >= best[column] if more else ours <= best[column]
        wanted = f"to find {task}, use {field}" if wins else f"to find {task}, {best['score']} is better"
        shown = [f"{v:.3f}" if more else f"{1000 * v:.2f}" for v in (ours, best[column])]
        assert wanted in found.advice or shown[0] == shown[1]
        assert all(value in found.advice for value in shown)
        if wins:
            assert f"best other score: {best['score']}" in found.advice
    assert "unknowns" not in quiet(*case.five).advice


@pytest.mark.parametrize(
    ("weight", "bias", "message"),
    [
        (np.eye(3, DIM), np.zeros(2), r"weight must have shape \(3, 4\), .* bias \(3,\); got \(3, 4\) and \(2,\)"),
        (np.eye(3, DIM + 1), None, r"got \(3, 5\) and \(3,\)"),
        (np.eye(3, DIM)[::-1].copy(), None, "weight and bias do not turn z_test into logits_test"),
        (np.eye(3, DIM), np.ones(3), "do not turn z_test into logits_test"),
        (np.full((3, DIM), np.nan), None, "do not turn z_test into logits_test"),
        (None, np.zeros(3), "bias came without weight"),
    ],
)
def test_a_wrong_last_layer_is_refused(case: Case, weight: Any, bias: Any, message: str) -> None:
    case = with_last_layer(case, np.eye(3, DIM), np.zeros(3))
    with pytest.raises(ValueError, match=message):
        quiet(*case.five, weight=weight, bias=bias)


def test_without_the_last_layer_its_scores_are_named(case: Case) -> None:
    weight = np.eye(CLASSES, DIM)
    case = with_last_layer(case, weight, np.zeros(CLASSES))
    mine = TrustHead.fit(case.z, case.y)
    plain, full = quiet(*case.five, head=mine), quiet(*case.five, head=mine, weight=weight)
    left_out = {row["score"] for row in full.rows} - {row["score"] for row in plain.rows}
    assert left_out == {baseline.title for baseline in BASELINES.values() if baseline.needs}
    for needs in ("weight=, bias=", "logits_train="):
        line = next(line for line in plain.caption.splitlines() if f"Left out without {needs}" in line)
        assert line.partition(": ")[2] == ", ".join(b.title for b in BASELINES.values() if b.needs == needs) + "."
    common = {row["score"]: row for row in plain.rows}
    for expected in full.rows:
        assert expected["score"] in left_out or common[expected["score"]] == pytest.approx(expected, nan_ok=True)


def test_rounded_logits_agree_with_their_layer(case: Case) -> None:
    weight = np.eye(CLASSES, DIM)
    case = with_last_layer(case, weight, np.zeros(CLASSES))
    rounded = case.test_logits.astype(np.float16)
    assert row(quiet(*case.five[:4], rounded, weight=weight.astype(np.float16)), "ReAct")["aurc"] >= 0.0


@pytest.mark.slow
def test_a_network_without_mistakes(case: Case) -> None:
    found = quiet(*case.five[:4], 4.0 * np.eye(CLASSES)[case.test_y])
    assert row(found, "SEP-C")["aurc"] == 0.0
    assert "0 mistakes, accuracy 100.0%" in str(found)
    with pytest.raises(ValueError, match=r"No score has a value in column 'naurc'.*accuracy is 100%"):
        found.best("naurc")
    with pytest.raises(ValueError, match="no column 'fpr95'; this comparison has aurc, naurc, failure_auroc, ece"):
        found.best("fpr95")


def test_compare_is_public() -> None:
    assert {"compare", "Comparison"} <= set(sepc_torch.__all__)


Change = Callable[[Case], dict[str, Any]]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda c: {"z_train": c.z[0]}, ValueError, "z_train must be a non-empty array"),
        (lambda c: {"y_train": c.y[:-1]}, ValueError, "z_train has 150 rows and y_train has 149 labels"),
        (lambda c: {"y_train": np.zeros(TRAIN)}, ValueError, "single class"),
        (lambda c: {"z_test": c.test_z[:, :3]}, ValueError, "z_test has 3 features, but z_train has 4"),
        (lambda c: {"z_test": np.full_like(c.test_z, np.nan)}, ValueError, "z_test holds 960 NaN"),
        (lambda c: {"y_test": c.test_y[1:]}, ValueError, "z_test has 240 rows and y_test has 239 labels"),
        (lambda c: {"y_test": c.test_y + 1}, ValueError, "y_test holds labels that y_train does not: 3. .* z_ood"),
        (lambda c: {"logits_test": c.test_logits[1:]}, ValueError, "z_test has 240 rows and logits_test has 239"),
        (lambda c: {"logits_test": c.test_logits[:, :2]}, ValueError, "logits_test has 2 columns, .* 3 classes"),
        (lambda c: {"logits_test": c.test_logits[:, 0]}, ValueError, r"column per class, got shape \(240,\)"),
        (lambda c: {"z_ood": c.ood[:, 1:]}, ValueError, "z_ood has 3 features"),
        (lambda c: {"z_ood": 0 * c.ood}, ValueError, "Row 0 of z_ood is all zeros and has no direction"),
        (lambda c: {"logits_ood": c.ood_logits}, ValueError, "logits_ood came without z_ood"),
        (lambda c: {"z_ood": c.ood, "logits_ood": c.ood_logits[1:]}, ValueError, "z_ood has 150 rows and logits_ood"),
        (lambda c: {"logits_train": c.logits[1:]}, ValueError, "z_train has 150 rows and logits_train has 149"),
        (lambda c: {"calibration": tuple(a[:19] for a in c.held_out)}, ValueError, "19 rows are too few"),
        (
            lambda c: {"calibration": (c.held_out[0], c.held_out[1][1:], c.held_out[2])},
            ValueError,
            r"calibration\[0\] has 150 rows and calibration\[1\] has 149 labels",
        ),
        (
            lambda c: {"z_test": c.test_z[:39], "y_test": c.test_y[:39], "logits_test": c.test_logits[:39]},
            ValueError,
            "39 rows are too few; pass at least 40 test rows, or other rows as calibration=",
        ),
        (lambda c: {"classes": [0, 1, 2, 3]}, ValueError, r"classes names \[3\], but no row has"),
        (lambda c: {"seed": -1}, ValueError, "seed must be an integer of at least 0"),
        (lambda c: {"dimension": 3}, TypeError, "unexpected keyword argument 'dimension'"),
    ],
)
def test_input_errors(case: Case, change: Change, error: type[Exception], message: str) -> None:
    arguments = dict(zip(("z_train", "y_train", "z_test", "y_test", "logits_test"), case.five, strict=True))
    with pytest.raises(error, match=message):
        quiet(**(arguments | change(case)))


def test_type_errors() -> None:
    """Calls the checks directly, because the tests check the annotations of the public function first."""
    form = InputFormat([0, 1], 2, torch.device("cpu"), direction=False, stated=True)
    for given, came in ((("z", "y"), "2 items"), (np.zeros(3), "ndarray")):
        with pytest.raises(TypeError, match=f"calibration must be a triple.*got {came}"):
            form.calibration_rows(given)
    with pytest.raises(TypeError, match="head must be a fitted TrustHead, got a str"):
        classes_of_head("mine", None, {})


def test_errors_about_a_given_head(case: Case) -> None:
    mine = TrustHead.fit(case.z, case.y)
    with pytest.raises(ValueError, match="came together with options for fitting one: dim"):
        quiet(*case.five, head=mine, dim=2)
    with pytest.raises(ValueError, match=r"classes=\[2, 1, 0\] is not the order of the head, \[0, 1, 2\]"):
        quiet(*case.five, head=mine, classes=[2, 1, 0])
    narrow = replace(case, z=case.z[:, :3], test_z=case.test_z[:, :3])
    with pytest.raises(ValueError, match="z_train has 3 features, but the head was fitted on 4"):
        quiet(*narrow.five, head=mine)


@pytest.mark.gpu
def test_gpu_agrees_with_cpu(case: Case) -> None:
    expected = quiet(*case.five, case.ood, logits_ood=case.ood_logits)
    there = [torch.from_numpy(given).cuda() for given in (*case.five, case.ood, case.ood_logits)]
    found = quiet(*there[:6], logits_ood=there[6])
    for a, b in zip(found.rows, expected.rows, strict=True):
        for column in found.columns:
            assert a[column] == pytest.approx(b[column], abs=5e-3, nan_ok=True), (a["score"], column)
    assert found.head.sepc.codes.is_cuda


def test_the_accepted_share_is_that_of_the_promise(case: Case) -> None:
    """Of the head by its own promise, of other scores by an exact search on the held-out rows."""
    found = quiet(*case.five, calibration=case.held_out, risk=0.4, delta=0.2)
    accepted = {row["score"]: row["accepted"] for row in found.rows}
    out = found.head.judge(case.test_z.astype(np.float32), case.test_logits)
    assert accepted["SEP-C"] == accepted["SEP-C joint"] == pytest.approx(float(out.accept.double().mean()))
    assert found.head.promise is not None
    assert (found.head.promise.risk, found.head.promise.delta) == (0.4, 0.2)
    _, y, logits = case.held_out
    held, new = (torch.tensor(scores).softmax(dim=1).amax(dim=1) for scores in (logits, case.test_logits))
    search = risk_threshold(held, torch.from_numpy(logits.argmax(axis=1) == y), 0.4, 0.2).threshold
    assert accepted["max softmax"] == pytest.approx(float((new >= search).double().mean()))
    assert accepted["max softmax"] > 0.1
    assert "at most 0.4 of the accepted labels are wrong, with probability 0.8" in str(found)
    with pytest.raises(ValueError, match="risk must lie between 0 and 1"):
        quiet(*case.five, risk=1.5)


@pytest.mark.slow
def test_standard_errors_are_those_of_fresh_rows() -> None:
    """The jackknife agrees with the spread over test sets that are drawn anew, for the same head and baselines."""
    rng = np.random.default_rng(0)

    def draw(count: int) -> tuple[Array, Array, Array]:
        y = rng.integers(0, 2, count)
        z = rng.normal(size=(count, 3)) + 1.5 * y[:, None]
        return z, y, np.stack([np.zeros(count), z[:, 0] + z[:, 1] - 1.5], axis=1)

    z, y, _ = draw(300)
    calibration, head = draw(300), TrustHead.fit(z, y, normalize=None)
    found = [
        quiet(z, y, *draw(400), draw(200)[0] + 3.0, head=head, calibration=calibration, risk=0.1) for _ in range(12)
    ]
    for name in ("aurc", "failure_auroc", "ece", "accepted", "unknown_auroc"):
        spread = np.std([f.rows[0][name] for f in found], ddof=1)
        stated = np.mean([f.standard_errors[0][name] for f in found])
        assert 0.5 < stated / spread < 2.0, name
    table = found[0].to_pandas()
    assert table.loc["SEP-C", "aurc_se"] == found[0].standard_errors[0]["aurc"]
    assert "Standard errors of SEP-C: AURC x1000 " in str(found[0])
    few = quiet(z, y, *draw(60), draw(5)[0] + 3.0, head=head, calibration=calibration)
    assert np.isnan(few.standard_errors[0]["unknown_auroc"])

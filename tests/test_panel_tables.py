"""Tables of the panel: networks and tables of numbers apart, the words about the partition."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from experiments.panel import ablation, tables
from experiments.panel.cases import Case, Rows
from experiments.panel.scores import PEERS, fitted, head_scores
from sepc_torch.metrics.baselines import baseline_scores
from sepc_torch.metrics.compare import BASELINES

PANEL_PEERS = {"max_softmax": "max softmax", "a": "A", "b": "B"}


def run(
    name: str, near: list[str], ours: float, softmax: float, a: float, b: float, group: str = "x"
) -> dict[str, Any]:
    """One run in which every figure of a score is the same number."""
    values = {"max_softmax": softmax, "a": a, "b": b}
    figures = {
        kind: values | {score: ours} for kind, score in (("naurc", "confidence"), ("mistakes: dark", "confidence"))
    }
    figures[f"unknowns: {group}"] = values | {"nonconformity": ours}
    figures[f"both: {group}"] = values | {"joint": ours}
    figures["calibration"] = {"max_softmax": softmax, "confidence": ours}
    return {"set": name, "near": near, "figures": figures}


def result(*runs: dict[str, Any], rows: tuple[dict[str, Any], ...] = ()) -> dict[str, Any]:
    return {"peers": PANEL_PEERS, "runs": list(runs), "rows": list(rows)}


def answer(found: list[dict[str, Any]], title: str) -> dict[str, Any]:
    return next(row for row in found if row["question"].title == title)


def test_networks_and_tables_are_apart_and_each_counts_once() -> None:
    results = result(
        run("cifar10", ["x"], 0.1, 0.5, 0.2, 0.3),
        run("cifar10", ["x"], 0.3, 0.5, 0.2, 0.3),  # another seed
        run("fashion", [], 0.38, 0.5, 0.6, 0.3),
        run("letter", [], 0.9, 0.8, 0.7, 0.6),
        *2 * [run("letter, open", ["x"], 0.5, 0.8, 0.7, 0.6)],  # the same table: the mean of three runs
    )
    networks, numbers = (tables.answers(results, of_networks) for of_networks in (True, False))
    mistakes = answer(networks, "mistakes")
    assert mistakes["networks"] == 2
    assert mistakes["ours"] == pytest.approx((0.2 + 0.38) / 2)
    assert (mistakes["title"], mistakes["theirs"]) == ("B", pytest.approx(0.3))
    assert mistakes["change"][0] == pytest.approx(-0.01)
    assert (mistakes["rank"], mistakes["scores"]) == (1, 4)
    assert answer(networks, "near unknowns")["networks"] == 1  # the unknowns of the other network are far
    far = answer(networks, "far unknowns")
    assert (far["ours"], far["title"], far["rank"]) == (0.38, "A", 3)  # a larger AUROC is better
    letter = answer(numbers, "mistakes")
    assert letter["networks"] == 1
    assert letter["ours"] == pytest.approx((0.9 + 2 * 0.5) / 3)
    assert answer(numbers, "calibration")["scores"] == 2


def test_comparisons_are_counted_in_their_group() -> None:
    def row(name: str, question: str, ours: float, low: float, high: float) -> dict[str, Any]:
        return {"set": name, "question": question, "ours": ours, "theirs": 0.5, "interval": [low, high]}

    rows = (
        row("cifar10", "mistakes", 0.4, -0.2, -0.1),
        row("cifar10", "mistakes: dark", 0.4, -0.2, -0.1),  # a shift is another question
        row("cifar10", "unknowns: x", 0.4, -0.2, -0.1),
        row("letter", "mistakes", 0.4, -0.2, 0.1),
    )
    results = result(run("cifar10", ["x"], 1, 1, 1, 1), run("letter", [], 1, 1, 1, 1), rows=rows)
    networks, numbers = (tables.answers(results, of_networks) for of_networks in (True, False))
    assert answer(networks, "mistakes")["counts"] == (1, 0, 0)
    assert answer(networks, "near unknowns")["counts"] == (0, 1, 0)
    assert answer(numbers, "mistakes")["counts"] == (0, 0, 1)


@pytest.mark.parametrize("change", [[0.001, -0.001, 0.003], [0.01, 0.005, 0.015], [-0.01, -0.015, -0.005]])
def test_the_words_about_the_partition_follow_from_the_intervals(change: list[float]) -> None:
    none = {"change": [0.0, -0.001, 0.001]}
    rows = [
        {"variant": name, "mistakes": none, "unknowns": none, "both": none}
        for name in (ablation.ONE, ablation.KMEANS, ablation.NOTHING)
    ]
    rows[0] = rows[0] | {"mistakes": {"change": change}}
    runs = [{"set": "one", "divided": 0.0}, {"set": "two", "divided": 0.3}]
    text = tables.partition_verdict({"rows": rows, "runs": runs})
    assert "on 1 of 2 networks" in text
    assert ("do not measurably improve" in text) is (change[1] <= 0.0)
    for word, named in (("worse", change[1] > 0.0), ("better", change[2] < 0.0)):
        expected = f"{ablation.ONE} (mistakes)" if named else "nothing"
        assert f"Clearly {word} without it: {expected}." in text
    if change[1] <= 0.0:
        assert f"loses at most {max(0.0, change[2]):.4f} of NAURC" in text


def test_the_variants_of_the_partition_have_the_names_of_the_ablation() -> None:
    assert tables.REPLACED == (ablation.ONE, ablation.KMEANS, ablation.NOTHING)
    assert set(tables.ABLATED) == set(ablation.FIGURES)


def test_no_peer_has_the_name_of_a_score_of_the_head() -> None:
    """A panel holds all scores in one dictionary."""
    generator = torch.Generator().manual_seed(0)
    y = (torch.arange(120) % 2).numpy()
    z = (torch.randn(120, 3, generator=generator).numpy() + 4.0 * y[:, None]).astype("float32")
    rows = Rows(z, y, z[:, :2])
    case = Case("blobs", rows, rows, rows)
    assert not set(head_scores(fitted(case)[0], case)) & set(PEERS)
    points, logits = torch.from_numpy(z), torch.from_numpy(z[:, :2])
    layer = torch.eye(2, 3), torch.zeros(2)
    found = baseline_scores(points, torch.from_numpy(y), points, logits, logits, (logits, torch.from_numpy(y)), layer)
    assert set(found) == set(BASELINES)
    chosen = baseline_scores(points, torch.from_numpy(y), points, logits, names=["energy", "knn"])
    assert list(chosen) == ["energy", "knn"]
    torch.testing.assert_close(chosen["knn"], found["knn"])
    with pytest.raises(ValueError, match="There is no score 'vim' with these inputs; there are max_softmax, "):
        baseline_scores(points, torch.from_numpy(y), points, logits, names=["vim"])

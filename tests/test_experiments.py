"""The experiments say what they found: rows follow from numbers, solvers agree, pictures and READMEs repeat exactly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import complexity
import datasets
import iris
import matplotlib.pyplot as plt
import numpy as np
import overlapping
import partition_chain
import pictures
import pytest
import report
import resampling
import torch
import toy_sets
from harness import FIGURES
from partitions import agreement, agreement_of_solvers, ellipsoids_per_class
from sklearn.datasets import load_iris

from sepc_torch import Kind, partition
from sepc_torch.metrics import aurc, unknown_auroc
from sepc_torch.partitioning.fit import _Task
from sepc_torch.solvers import capped_weights

RECORDED = report.reproductions()


def planar_sets() -> dict[str, tuple[tuple[np.ndarray, np.ndarray], dict[str, Any]]]:
    x, y = load_iris(return_X_y=True)
    return {
        "overlapping": (datasets.overlapping(1), {"max_impure": 10, "standardize": False}),
        "circles": (toy_sets.draw("circles", toy_sets.SETTINGS["circles"]["ours"], 1), {"max_impure": 5}),
        "moons": (toy_sets.draw("moons", toy_sets.SETTINGS["moons"]["ours"], 1), {"max_impure": 2}),
        "xor": (toy_sets.XOR, {"max_impure": 2}),
        "iris, 4 features": ((x, y), {"max_impure": 2}),
    }


@pytest.mark.parametrize("name", planar_sets())
def test_solvers_find_the_same_partition(name: str) -> None:
    (x, y), options = planar_sets()[name]
    found = agreement_of_solvers(partition(x, y, **options), x, y)
    assert found["solvers"] == ["native", "CLARABEL"]
    assert found["same"], found


def test_other_partitions_do_not_agree(rng: np.random.Generator) -> None:
    x, y = rng.normal(size=(60, 2)), np.arange(60) % 2
    loose, strict = partition(x, y, max_impure=8), partition(x, y, max_impure=0)
    assert agreement(loose, loose, x)["same"]
    assert not agreement(loose, strict, x)["same"]
    larger = partition(1.001 * x, y, max_impure=8)
    found = agreement(loose, larger, x)
    assert not found["same"]
    assert found["log_volume_difference"] == pytest.approx(2 * np.log(1.001), rel=1e-3)


def test_the_same_picture_gives_the_same_bytes(
    rng: np.random.Generator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = rng.normal(size=(2, 30))
    written = []
    for folder in ("first", "second"):
        monkeypatch.setattr(pictures, "FIGURES", tmp_path / folder)
        figure, ax = plt.subplots()
        ax.plot(*x, label="a line")
        ax.fill(*x, hatch="//")  # hatches and clips carry ids
        ax.legend()
        written.append([path.read_bytes() for path in pictures.save_figure(figure, "line")])
        plt.close(figure)
    assert written[0] == written[1]
    svg, png = written[0]
    assert b"dc:date" not in svg
    assert b"Software" not in png


@pytest.mark.parametrize("script", RECORDED)
def test_recorded_rows_are_complete(script: str) -> None:
    rows = RECORDED[script]["rows"]
    assert rows
    for row in rows:
        assert row.keys() == {"artefact", "paper", "ours", "why"}
        assert row["artefact"]
        assert row["paper"]
        assert row["ours"]


@pytest.mark.parametrize("script", [name for name, found in RECORDED.items() if isinstance(found.get("figures"), dict)])
def test_recorded_figures_exist_and_are_small(script: str) -> None:
    for name in RECORDED[script]["figures"]:
        assert (FIGURES / f"{name}.png").is_file()
        assert (FIGURES / f"{name}.svg").stat().st_size < 400_000


def toy_numbers(iterations: int) -> list[dict[str, str]]:
    found = {toy.name: {"iterations": iterations, "raw": 2} for toy in toy_sets.TOYS}
    counts = {"standardised": {"3": 7, "4": 23}, "as they are": {"2": 30}}
    counted = {toy.name: {"ours": counts} for toy in toy_sets.TOYS}
    return toy_sets.rows(found, counted, toy_sets.xor(0, "native")[2])


def test_rows_of_the_toy_sets_follow_the_numbers() -> None:
    circles, moons, xor = toy_numbers(4)
    assert circles["why"] == ""
    assert "23 of 30" in circles["ours"]
    assert moons["ours"].startswith("4 ")
    assert moons["why"].startswith("+1")
    assert "7 of 30 draws" in moons["why"]  # the setting that comes closest
    assert toy_numbers(3)[1]["why"] == ""
    assert "terminal and terminal ellipsoid, which cross" in xor["ours"]


def test_xor_is_not_separated_and_the_jitter_changes_it() -> None:
    x, y = toy_sets.jittered(3)
    assert np.linalg.norm(x[4] - [0, 1]) <= toy_sets.JITTER
    assert np.linalg.norm(x[5] - [1, 1]) <= toy_sets.JITTER
    assert y[4:].tolist() == [1, 0]
    part, _, found = toy_sets.xor(3, "native")
    assert (found["hyperplanes"], found["cross"], found["jittered_cross"]) == (0, True, True)
    assert {e.kind for e in part.ellipsoids} == {Kind.TERMINAL}
    # Of three points, two of them together, the ellipsoid is 4/3 as long as the two points are apart.
    assert found["jittered_semi_axes"][0][0] == pytest.approx(4 / 3 * found["semi_axes"][0][0], rel=0.02)


def test_the_overlap_covers_the_joint_points(rng: np.random.Generator) -> None:
    x, y = datasets.overlapping(int(rng.integers(1000)))
    found = overlapping.overlap(x, y, "native")
    both = found.classes[0].contains(x) & found.classes[1].contains(x)
    assert both.sum() == found.points
    assert found.outer.contains(x[both]).all()
    assert found.joint.contains(x[both]).all()
    # Program (3) covers the whole intersection, the other only the points in it.
    assert overlapping.volumes(found)["outer_over_joint"] > 1


def test_the_first_round_is_that_of_the_partition() -> None:
    x, y = datasets.overlapping(0)
    part = partition(x, y, max_impure=overlapping.MAX_IMPURE, standardize=False)
    first = [next(e for e in part.ellipsoids if e.label == c) for c in (0, 1)]
    for piece, e in zip(overlapping.first_round(x, y, "native").pieces, first, strict=True):
        assert len(piece.members) == e.covered
        assert piece.ellipsoid.log_volume == pytest.approx(e.log_volume, abs=1e-6)


def test_rows_of_iris_follow_the_numbers() -> None:
    numbers = {
        "ellipsoids": (1, 5, 4),
        "isolated": [0, 1, 3],
        "splits": 9,
        "without_line_4": {"whole": (5, 5, 4), "splits": {"3, 4, 4": 6, "4, 4, 4": 3}},
    }
    row = iris.count_row("2 features", numbers)
    assert row["ours"].startswith("1, 5, 4")
    assert row["why"].startswith("-2, +1, +0")
    assert "3, 4, 4 (6 of 9 draws; the paper's numbers in 6)" in row["why"]
    assert iris.count_row("2 features", numbers | {"ellipsoids": iris.PAPER})["why"] == ""


def test_without_line_4_setosa_is_cut() -> None:
    x, y = load_iris(return_X_y=True)
    assert ellipsoids_per_class(partition(x, y))[0] == 1
    assert iris.without_line_4(x, y)[0] > 1


def test_gaussian_ellipses_hold_their_share(rng: np.random.Generator) -> None:
    x = rng.normal(size=(20_000, 2)) @ rng.normal(size=(2, 2))
    (model,) = iris.mixtures(x, np.zeros(len(x), dtype=int), (1,), seed=0)
    (e,) = iris.gaussian_ellipses(model)
    assert e.contains(x).mean() == pytest.approx(iris.SHARE, abs=0.01)


def test_the_exponent_of_a_power(rng: np.random.Generator) -> None:
    power, sizes = float(rng.uniform(0.2, 3)), (10, 30, 100, 300, 1000)
    assert complexity.exponent(sizes, [2e-3 * n**power for n in sizes]) == pytest.approx(power)


def test_sections_are_rewritten_between_their_markers() -> None:
    text = "before\n<!-- a -->\nold\n<!-- end of a -->\nafter\n"
    once = report.rewritten(text, {"a": lambda: "new"})
    assert once == "before\n<!-- a -->\n\nnew\n\n<!-- end of a -->\nafter\n"
    assert report.rewritten(once, {"a": lambda: "new"}) == once
    with pytest.raises(ValueError, match="markers"):
        report.rewritten(text, {"b": lambda: "new"})


def test_the_table_shows_the_rows() -> None:
    row = {"artefact": "a | b", "paper": "3", "ours": "4", "why": "Another draw."}
    results = {"script": {"command": "python experiments/script.py", "rows": [row, row | {"why": ""}]}}
    lines = report.side_by_side(results).splitlines()
    assert lines[2] == r"| a \| b | `python experiments/script.py` | 3 | 4. *Another draw.* |"
    assert lines[3].endswith("| 3 | 4 |")
    assert "Another draw" not in report.in_short(results)


def test_comparisons_of_solvers_are_found_wherever_they_stand() -> None:
    found = {"solvers": ["a", "b"], "same": False, "ellipsoids": [3, 4], "log_volume_difference": None}
    results: dict[str, dict[str, Any]] = {
        "one": {"agreement": found},
        "two": {"features": {"2": {"agreement": found | {"same": True}}}},
    }
    lines = report.agreements(results).splitlines()
    assert lines[2:] == ["| `one.py` |  | a and b | 3 | no |  |", "| `two.py` | 2 | a and b | 3 | yes |  |"]


def test_recorded_solvers_agree() -> None:
    assert "| no |" not in report.agreements(RECORDED)


def test_missing_results_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    assert report.reproductions() == {}
    (tmp_path / "iris.json").write_text(json.dumps({"rows": []}))
    assert list(report.reproductions()) == ["iris"]


def test_pictures_stand_under_their_captions(tmp_path: Path) -> None:
    named = {"iris": {"command": "python experiments/iris.py", "figures": {"one": "A picture."}}}
    assert f"![A picture.]({tmp_path.name}/one.png)" in report.figures(named, tmp_path)
    (tmp_path / "iris_two.png").touch()
    unnamed = report.figures({"iris": {"command": "python experiments/iris.py"}}, tmp_path)
    assert f"{tmp_path.name}/iris_two.png" in unnamed
    assert "Figure 7" in unnamed  # the script's own first line


def test_resamples_are_those_of_the_metrics(rng: np.random.Generator) -> None:
    """With every row once, and with rows drawn by hand; up to the steps within rows that are held twice."""
    known, unknown = (torch.from_numpy(rng.normal(size=n) + n / 400) for n in (400, 300))
    wrong = rng.random(400) < 0.3
    counts = np.stack([np.ones(400, dtype=np.int64), rng.multinomial(400, np.full(400, 1 / 400))])
    others = np.stack([np.ones(300, dtype=np.int64), rng.multinomial(300, np.full(300, 1 / 300))])
    areas = resampling.resampled_aurc(known, wrong.astype(float), counts)
    chances = resampling.resampled_auroc(known, unknown, counts, others)
    for held, strange, area, chance, most in zip(counts, others, areas, chances, (1e-12, 0.03), strict=True):
        rows, far = (torch.from_numpy(np.repeat(np.arange(len(n)), n)) for n in (held, strange))
        assert area == pytest.approx(float(aurc(known[rows], torch.from_numpy(~wrong)[rows])), abs=most)
        assert chance == pytest.approx(float(unknown_auroc(known[rows], unknown[far])), abs=1e-12)


def test_the_replayed_step_is_that_of_the_solver(rng: np.random.Generator) -> None:
    rows, dims = int(rng.integers(20, 40)), int(rng.integers(2, 6))
    stage = partition_chain.Stage(torch.device("cpu"), 3, 50, 8, seed=int(rng.integers(1000)))
    right = torch.from_numpy(rng.normal(size=(3, rows)))
    found, _ = stage._hull_system(rows, dims)(right)
    for k in range(3):
        p, member, d = (t[k, :rows].numpy() for t in (stage._points[..., :dims], stage._ones, stage._positive))
        np.testing.assert_allclose(found[k], capped_weights._newton(p, member, d)(right[k].numpy())[0], atol=1e-10)


def test_a_recorded_chain_is_replayed(rng: np.random.Generator) -> None:
    """Recording changes no function for good, and every kind that was recorded is replayed."""
    before = capped_weights._newton
    codes = rng.integers(0, 3, 400)
    points = rng.normal(size=(400, 12)) + 2.0 * np.eye(3, 12)[codes]
    parameters = {"max_impure": 2, "floor": 1e-3, "dim": 12, "solver": "native", "metric": None}
    chain = partition_chain.record(_Task(points, codes, 0, (True, False), parameters))
    assert capped_weights._newton is before
    counted = partition_chain.summary(chain)
    assert counted["hull steps"]["count"] > 0
    assert 0 < chain.in_steps < chain.seconds
    short = chain._replace(sizes={kind: sizes[:2] for kind, sizes in chain.sizes.items()})
    replayed = partition_chain.replay(short, torch.device("cpu"), 3, seed=0)
    assert replayed["seconds"].keys() == chain.sizes.keys()

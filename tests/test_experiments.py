"""Experiments: stamped results, rows that follow from numbers, solvers that agree, reproducible pictures and pages."""

from __future__ import annotations

import argparse
import json
import sys
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from sklearn.datasets import load_iris

from experiments import datasets, harness, pictures, provenance, report, rerun, table_writer
from experiments.harness import FIGURES, RESULTS
from experiments.panel import scores
from experiments.paper import complexity, iris, overlapping, toy_sets
from experiments.paper import tables as paper_tables
from experiments.paper.partitions import agreement, agreement_of_solvers, ellipsoids_per_class
from sepc_torch import Kind, partition
from sepc_torch.metrics import aurc, unknown_auroc

RECORDED = {name: harness.load(name) for name in paper_tables.PAPER}


def planar_sets() -> dict[str, tuple[tuple[np.ndarray, np.ndarray], dict[str, Any]]]:
    x, y = load_iris(return_X_y=True)
    return {
        "overlapping": (datasets.overlapping(1), {"max_impure": 10, "standardize": False}),
        "circles": (toy_sets.draw("circles", toy_sets.SETTINGS["circles"]["ours"], 1), {"max_impure": 5}),
        "moons": (toy_sets.draw("moons", toy_sets.SETTINGS["moons"]["ours"], 1), {"max_impure": 2}),
        "xor": (toy_sets.XOR, {"max_impure": 2}),
        "iris, 4 features": ((x, y), {"max_impure": 2, "rest": "partitioned"}),
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
        ax.legend()
        written.append(pictures.save_figure(figure, "line").read_bytes())
        plt.close(figure)
    assert written[0] == written[1]
    assert written[0].startswith(b"\x89PNG")


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
        assert 0 < (FIGURES / f"{name}.png").stat().st_size < 400_000


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
    # For three points, two of them close together, the long axis is 4/3 of the distance to the third.
    assert found["jittered_semi_axes"][0][0] == pytest.approx(4 / 3 * found["semi_axes"][0][0], rel=0.02)


def test_the_overlap_covers_the_joint_points(rng: np.random.Generator) -> None:
    x, y = datasets.overlapping(int(rng.integers(1000)))
    found = overlapping.overlap(x, y, "native")
    both = found.classes[0].contains(x) & found.classes[1].contains(x)
    assert both.sum() == found.points
    assert found.outer.contains(x[both]).all()
    assert found.joint.contains(x[both]).all()
    # Program (3) covers the whole intersection, the other ellipsoid only the points in it.
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
    # Axes of similar lengths: the mixture adds 1e-6 to every variance, which would widen a flat set.
    x = rng.normal(size=(20_000, 2)) @ (np.eye(2) + 0.4 * rng.uniform(-1.0, 1.0, size=(2, 2)))
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


def test_columns_are_keys_or_functions_with_a_format() -> None:
    columns: list[table_writer.Column] = [
        ("name", "name"),
        ("nested", "times.cpu", "{:.1f} s"),
        ("many", lambda row: 1000 * row["count"], "{:,}"),
    ]
    rows = [{"name": "a, b", "times": {"cpu": 1.25}, "count": 12}, {"name": "c", "count": 0}]
    found = table_writer.Table("Of {total:.0%}", columns, "found")({"total": 0.5, "found": rows})
    assert found.splitlines() == [
        "Of 50%:",
        "",
        "| name | nested | many |",
        "| --- | --- | --- |",
        "| a, b | 1.2 s | 12 000 |",
        "| c |  | 0 |",  # the row has no times
    ]


def test_the_table_shows_the_rows() -> None:
    row = {"artefact": "a | b", "paper": "3", "ours": "4", "why": "Another draw."}
    results = {"script": {"rows": [row, row | {"why": ""}]}}
    lines = paper_tables.side_by_side(results).splitlines()
    assert lines[2] == r"| a \| b | `script.py` | 3 | 4. *Another draw.* |"
    assert lines[3].endswith("| 3 | 4 |")


def test_comparisons_of_solvers_are_found_wherever_they_stand() -> None:
    found = {"solvers": ["a", "b"], "same": False, "ellipsoids": [3, 4], "log_volume_difference": None}
    results: dict[str, dict[str, Any]] = {
        "one": {"agreement": found},
        "two": {"features": {"2": {"agreement": found | {"same": True}}}},
    }
    lines = paper_tables.agreements(results).splitlines()
    assert lines[2:] == ["| `one.py` |  | a and b | 3 | no |  |", "| `two.py` | 2 | a and b | 3 | yes |  |"]


def test_recorded_solvers_agree() -> None:
    assert "| no |" not in paper_tables.agreements(RECORDED)


def test_pictures_stand_under_their_captions(tmp_path: Path) -> None:
    folder, page = tmp_path / "figures", tmp_path / "docs" / "paper.md"
    folder.mkdir()
    named = {"iris": {"figures": {"one": "A picture."}}}
    assert "![A picture.](../figures/one.png)" in paper_tables.figures(named, folder, page)
    assert paper_tables.figures({"iris": {}}, folder, page) == ""


def test_resamples_are_those_of_the_metrics(rng: np.random.Generator) -> None:
    """Each row once, and rows drawn at random; rows drawn twice change the AURC slightly by their ties."""
    known, unknown = (torch.from_numpy(rng.normal(size=n) + n / 400) for n in (400, 300))
    wrong = rng.random(400) < 0.3
    counts = np.stack([np.ones(400, dtype=np.int64), rng.multinomial(400, np.full(400, 1 / 400))])
    others = np.stack([np.ones(300, dtype=np.int64), rng.multinomial(300, np.full(300, 1 / 300))])
    areas = scores.resampled_aurc(known, wrong.astype(float), counts)
    chances = scores.resampled_auroc(known, unknown, counts, others)
    for held, unknown_counts, area, chance, most in zip(counts, others, areas, chances, (1e-12, 0.03), strict=True):
        rows, far = (torch.from_numpy(np.repeat(np.arange(len(n)), n)) for n in (held, unknown_counts))
        assert area == pytest.approx(float(aurc(known[rows], torch.from_numpy(~wrong)[rows])), abs=most)
        assert chance == pytest.approx(float(unknown_auroc(known[rows], unknown[far])), abs=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_every_result_is_stamped(path: Path) -> None:
    result = json.loads(path.read_text())
    found = provenance.stamps(result)
    if "parts" in result:
        assert found.keys() == result["parts"].keys()
    for stamp in found.values():
        assert stamp.keys() - {"stamped"} == {"command", "date", "sources"}
        assert provenance.script_files(provenance.script_of(stamp["command"]), harness.SOURCES)
        assert datetime.fromisoformat(stamp["date"]).utcoffset() is not None
        assert stamp["sources"].keys() == {"package", "script"}
        assert all(int(value, 16) >= 0 and len(value) == provenance.DIGITS for value in stamp["sources"].values())


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small copy of the repository: a package, a script, a module that it imports, and one that it does not."""
    files = {
        "sepc_torch/__init__.py": '_NAMES = {"model.sepc": ["SEPC"], "report": ["write"]}\n',
        "sepc_torch/model/__init__.py": "",
        "sepc_torch/model/sepc.py": "def f():\n    from sepc_torch.model.rules import rule\n",
        "sepc_torch/model/rules.py": "rule = 1\n",
        "sepc_torch/report/__init__.py": "from sepc_torch.model.sepc import SEPC\n",
        "sepc_torch/cli/__init__.py": "",
        "sepc_torch/cli/shell.py": "import_module(name)\n",
        "sepc_torch/cli/scoring.py": "",
        "experiments/paper/script.py": "from experiments.paper import first\n",
        "experiments/paper/first.py": "from experiments.second import number\nfrom sepc_torch import SEPC\n",
        "experiments/second.py": "number = 1\n",
        "experiments/paper/other.py": "from experiments.paper import script\n",
        "README.md": "text\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("sepc_torch/model/sepc.py", {"package"}),  # the module of a public name
        ("sepc_torch/model/rules.py", {"package"}),  # imported by it
        ("sepc_torch/model/__init__.py", {"package"}),
        ("sepc_torch/model/new.py", set()),
        ("sepc_torch/report/__init__.py", set()),
        ("experiments/paper/script.py", {"script"}),
        ("experiments/second.py", {"script"}),  # imported by a module that the script imports
        ("experiments/paper/other.py", set()),
        ("experiments/results/script.json", set()),
        ("README.md", set()),
        ("sepc_torch/notes.txt", set()),
    ],
)
def test_a_hash_changes_with_its_sources_only(tree: Path, name: str, changed: set[str]) -> None:
    before = provenance.hashes("paper.script", provenance.read_sources(tree))
    assert provenance.hashes("paper.script", provenance.read_sources(tree)) == before
    path = tree / name
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as file:
        file.write("edited = True\n")
    after = provenance.hashes("paper.script", provenance.read_sources(tree))
    assert {key for key in before if before[key] != after[key]} == changed


def test_a_module_that_a_script_runs_counts(tree: Path) -> None:
    """It is named in a text, and imports others by names that are made at run time."""
    (tree / "experiments/paper/script.py").write_text('command = ["python", "-m", "sepc_torch.cli.shell"]\n')
    files = provenance.read_sources(tree)
    assert provenance.package_files("paper.script", files).keys() == {
        f"sepc_torch/cli/{name}.py" for name in ("__init__", "shell", "scoring")
    }


def test_a_script_that_moves_keeps_its_hash(tree: Path) -> None:
    before = provenance.hashes("paper.script", provenance.read_sources(tree))
    (tree / "experiments/panel").mkdir()
    (tree / "experiments/paper/script.py").rename(tree / "experiments/panel/script.py")
    assert provenance.hashes("panel.script", provenance.read_sources(tree)) == before


def test_comments_and_docstrings_are_no_code() -> None:
    function = 'def f():\n    """{}"""\n    return {}  # {}\n'
    first, second = (function.format(text, 1, text).encode() for text in ("one", "two"))
    assert provenance.code(first) == provenance.code(second)
    assert provenance.code(first) != provenance.code(function.format("one", 2, "one").encode())
    assert provenance.code(b'text = """no docstring"""') != provenance.code(b'text = """another"""')


def test_a_hash_of_the_package_depends_on_paths_and_code_only() -> None:
    files = {"sepc_torch/a.py": b"x = 1\ny = 2\n", "sepc_torch/b.py": b""}
    same = {
        "sepc_torch/b.py": b"# a comment\n",
        "sepc_torch/a.py": b"x = 1  \r\n\r\ny = 2\r\n",
    }  # other order, blanks and line endings
    assert provenance.digest(files) == provenance.digest(same)
    moved = {"sepc_torch/a.py": b"", "sepc_torch/b.py": b"x = 1\ny = 2\n"}
    assert provenance.digest(files) != provenance.digest(moved)


def test_a_script_without_experiments_in_its_command_is_refused() -> None:
    with pytest.raises(ValueError, match="Expected a command that runs a module of experiments"):
        provenance.script_of("python elsewhere.py")


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    """The process looks like a script with an option, and writes to another folder; returns the options."""
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    spec = SimpleNamespace(name="experiments.paper.iris")
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__spec__=spec))
    monkeypatch.setattr("sys.argv", ["experiments/paper/iris.py", "--seed", "3"])
    return harness.arguments(None).parse_args()


def test_a_result_is_stamped_with_the_command_that_ran(ran: argparse.Namespace) -> None:
    harness.write_results("iris", ran, ["torch", "no such package"], {"numbers": np.arange(2)})
    found = harness.load("iris")
    assert (found["seed"], found["numbers"]) == (3, [0, 1])
    assert (found["environment"]["torch"], found["environment"]["no such package"]) == (version("torch"), None)
    stamp = found["measured"]
    assert stamp["command"] == "python -m experiments.paper.iris --seed 3"
    assert stamp["sources"] == provenance.hashes("paper.iris", harness.SOURCES)
    assert not provenance.older(stamp, harness.SOURCES)
    assert provenance.older(stamp, {**harness.SOURCES, "sepc_torch/ellipsoid.py": b""})


def test_parts_are_chosen_by_their_names(capsys: pytest.CaptureFixture[str]) -> None:
    parser = harness.arguments(None, parts={"a": 1, "b": 2})
    assert parser.parse_args([]).only == ["a", "b"]
    assert parser.parse_args(["--only", "b"]).only == ["b"]
    with pytest.raises(SystemExit):
        parser.parse_args(["--only", "b,c"])
    assert "unknown part 'c'; choose from a, b" in capsys.readouterr().err


def test_partial_reruns_keep_the_stamps_of_the_other_parts(
    ran: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(parts: dict[str, int], files: dict[str, bytes], measured: tuple[str, ...]) -> dict[str, str]:
        monkeypatch.setattr(harness, "SOURCES", files)
        harness.write_results("script", ran, (), {"parts": parts}, measured)
        found = provenance.stamps(harness.load("script"))
        return {name: stamp["sources"]["package"] for name, stamp in found.items()}

    states: list[dict[str, bytes]] = [{"sepc_torch/a.py": f"a = {i}".encode()} for i in range(4)]
    packages = [provenance.hashes("script", files)["package"] for files in states]
    assert write({"a": 1, "b": 2}, states[0], ("a", "b")) == {"a": packages[0], "b": packages[0]}
    # Measured again, with other numbers and with the same ones; a part with new numbers counts without being named.
    assert write({"a": 1, "b": 3}, states[1], ("b",)) == {"a": packages[0], "b": packages[1]}
    assert write({"a": 1, "b": 3}, states[2], ("a",)) == {"a": packages[2], "b": packages[1]}
    assert write({"a": 1, "b": 4, "c": 5}, states[3], ()) == {"a": packages[2], "b": packages[3], "c": packages[3]}
    # A part that is no longer stored has no stamp.
    assert write({"a": 1}, states[3], ()) == {"a": packages[2]}


def stamped(package: str, **more: str) -> dict[str, Any]:
    sources = provenance.hashes("script", {}) | {"package": package}
    return {"command": "python -m experiments.script", "date": "2026-01-02T03:04:05+00:00", "sources": sources, **more}


def test_pages_say_when_and_on_which_sources() -> None:
    files: dict[str, bytes] = {}
    now = provenance.hashes("script", files)["package"]
    current = report.measured_on({"one": {"measured": stamped(now)}}, files)
    assert current == "Measured 2026-01-02 ([commands and sources](results.md))."
    older = report.measured_on({"one": {"measured": stamped("0" * 12, stamped="from version control")}}, files)
    assert "Measured not after 2026-01-02" in older
    assert report.OLDER in older
    later = stamped(now) | {"date": "2026-01-05T03:04:05+00:00"}
    both = {"measured": {"parts": {"a": stamped(now), "b": stamped("0" * 12), "c": later}}}
    line = report.measured_on({"one": both}, files)
    assert line.startswith(f"Measured 2026-01-02 to 2026-01-05{report.OLDER} (")
    assert report.provenance_table({"one": both}, files).count(report.OLDER) == 1
    assert report.ages({"one": both, "two": {"measured": stamped(now)}}, files) == (
        "1 of 2 results were measured on older sources: one"
    )


def test_the_check_ignores_age_but_not_numbers() -> None:
    files, stamp = {"sepc_torch/a.py": b""}, stamped("0" * 12)
    old = report.measured_on({"one": {"measured": stamp}}, files)
    assert report.same_numbers(old, old.replace(report.OLDER, ""))
    later = report.measured_on({"one": {"measured": stamp | {"date": "2026-02-02T03:04:05+00:00"}}}, files)
    assert not report.same_numbers(old, later)


def test_older_results_are_measured_again_once() -> None:
    files: dict[str, bytes] = {}
    sources = {
        script: provenance.hashes(script, files) for script in ("paper.iris", "speed.bench_head", "speed.bench_gpu")
    }

    def measured(script: str, package: str | None = None) -> dict[str, Any]:
        stamp = {"command": f"python -m experiments.{script} --jobs 2", "sources": sources[script]}
        return stamp | {"sources": sources[script] | ({"package": package} if package else {})}

    old = "0" * 12
    results = {
        "iris": {"measured": measured("paper.iris")},
        "gpu": {"measured": measured("speed.bench_gpu", old)},
        "head": {
            "measured": {"parts": {"cpu": measured("speed.bench_head", old), "gpu": measured("speed.bench_head", old)}}
        },
    }
    head = "python -m experiments.speed.bench_head"
    assert rerun.commands(results, files, gpu=False) == [f"{head} --only cpu,compile"]
    on_gpu = ["python -m experiments.speed.bench_gpu", f"{head} --only gpu,fashion,exactness,layers"]
    assert rerun.commands(results, files, gpu=True) == on_gpu
    assert "python -m experiments.paper.iris" in rerun.commands(results, files, gpu=False, every=True)


def test_a_script_that_fails_is_named_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rerun, "ROOT", tmp_path)
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "__init__.py").touch()
    (tmp_path / "experiments" / "bad.py").write_text("raise SystemExit(3)")
    (tmp_path / "experiments" / "good.py").write_text("print('measured')")
    for jobs in (1, 2):
        lines = (f"python -m experiments.{name}" for name in ("bad", "good"))
        assert rerun.run(lines, jobs) == ["python -m experiments.bad"]
        assert (tmp_path / "build/results/good.log").read_text() == "measured\n"


@pytest.mark.parametrize("one_thread", [True, False])
def test_scripts_have_one_thread_or_those_of_the_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: bool
) -> None:
    monkeypatch.setattr(rerun, "ROOT", tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "__init__.py").touch()
    (tmp_path / "experiments" / "threads.py").write_text("import os; print(os.environ['OMP_NUM_THREADS'])")
    assert rerun.run(["python -m experiments.threads"], one_thread=one_thread) == []
    assert (tmp_path / "build/results/threads.log").read_text() == ("1\n" if one_thread else "7\n")


def test_scripts_run_at_a_time_and_those_with_times_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rerun, "ROOT", tmp_path)
    (tmp_path / "experiments" / "speed").mkdir(parents=True)
    scripts = {
        "__init__": "",
        "speed/__init__": "",
        # It ends only if the second one runs beside it.
        "first": "import os, time\nwhile not os.path.exists('begun'): time.sleep(0.01)\nopen('first', 'w')",
        "second": "open('begun', 'w')",
        "speed/third": "import os; assert os.path.exists('first') and os.path.exists('begun')",
    }
    for name, code in scripts.items():
        (tmp_path / "experiments" / f"{name}.py").write_text(code)
    lines = [f"python -m experiments.{name.replace('/', '.')}" for name in ("speed/third", "first", "second")]
    assert rerun.run(lines, jobs=2) == []

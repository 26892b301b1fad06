"""Plots and demo: every ellipse, isolated point and hyperplane of the partition is drawn."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from reported_heads import Reported, reported_head

from sepc_torch import SEPC, Ellipsoid, Kind, Partition, TrustHead, demo, partition
from sepc_torch.model.plane import viewing_plane
from sepc_torch.plot import (
    draw_class_table,
    draw_decisions,
    draw_drift,
    draw_embedding,
    draw_partition,
    draw_reliability,
    draw_risk_coverage,
    outline,
)
from sepc_torch.shapes import Array


@pytest.fixture(autouse=True)
def _no_windows() -> Iterator[None]:
    mpl.use("Agg")
    yield
    plt.close("all")


@pytest.fixture
def drawn(rng: np.random.Generator) -> tuple[Partition, Array, Array]:
    """Two overlapping classes, a third far away, and a fourth of a single point."""
    y = np.append(np.arange(90) % 3, 3)
    x = rng.normal(size=(91, 2)) + np.array([0.0, 1.0, 12.0, -9.0])[y, None]
    return partition(x, y), x, y


@pytest.mark.parametrize("points", [3, 200])
def test_the_outline_lies_on_the_surface(rng: np.random.Generator, points: int) -> None:
    e = Ellipsoid(rng.normal(scale=5, size=2), rng.normal(size=(2, 2)) + 2 * np.eye(2))
    line = outline(e, points)
    assert line.shape == (points, 2)
    np.testing.assert_allclose(e.distance(line), 1.0, rtol=1e-9)
    np.testing.assert_allclose(line[0], line[-1], atol=1e-9)  # closed


def test_the_outline_goes_all_the_way_round(rng: np.random.Generator) -> None:
    e = Ellipsoid(rng.normal(size=2), np.diag(rng.uniform(0.1, 10, size=2)))
    line = outline(e, 400)
    np.testing.assert_allclose(np.ptp(line, axis=0), 2 / np.diag(e.whitener), rtol=1e-3)


def test_only_ellipses_have_an_outline() -> None:
    with pytest.raises(ValueError, match="3 dimensions"):
        outline(Ellipsoid.ball(np.zeros(3), 1.0))


def lines(ax: Axes, points: int, style: str | None = None) -> list[Array]:
    """Lines with this number of points, optionally of one style: ellipses have 200, hyperplanes 2, rings 1."""
    found = [np.asarray(line.get_xydata()) for line in ax.lines if style in (None, line.get_linestyle())]
    return [line for line in found if len(line) == points]


def test_every_ellipsoid_is_drawn(drawn: tuple[Partition, Array, Array]) -> None:
    part, x, y = drawn
    ax = draw_partition(part, x, y)
    ellipses = [e for e in part.ellipsoids if e.kind is not Kind.ISOLATED]
    isolated = [e for e in part.ellipsoids if e.kind is Kind.ISOLATED]
    assert ellipses
    assert isolated
    outlines = lines(ax, 200)
    assert len(outlines) == len(ellipses)
    for e in ellipses:
        assert any(np.allclose(e.distance(line), 1.0) for line in outlines)
    rings = lines(ax, 1)
    assert sorted(map(tuple, np.concatenate(rings))) == sorted(tuple(e.center) for e in isolated)
    assert len(lines(ax, 200, "--")) == sum(e.kind is Kind.TERMINAL for e in ellipses)


def test_every_point_is_drawn(drawn: tuple[Partition, Array, Array]) -> None:
    part, x, y = drawn
    ax = draw_partition(part, x, y)
    offsets = np.concatenate([np.asarray(c.get_offsets()) for c in ax.collections])
    assert sorted(map(tuple, offsets)) == sorted(map(tuple, x))


def test_hyperplanes_are_drawn_halfway(rng: np.random.Generator) -> None:
    y = np.arange(60) % 2
    x = rng.normal(size=(60, 2)) + y[:, None]
    part = partition(x, y)
    assert part.hyperplanes
    segments = lines(draw_partition(part, x, y), 2)
    for h in part.hyperplanes:
        middle = 0.5 * (h.alpha + h.beta)
        on_it = [np.allclose(segment @ h.w, middle, rtol=1e-6, atol=1e-9) for segment in segments]
        # The hyperplane separates points, so its line crosses the axes.
        assert any(on_it)
    assert lines(draw_partition(part, x, y, hyperplanes=False), 2) == []


def test_given_axes_are_used(drawn: tuple[Partition, Array, Array], tmp_path: Path) -> None:
    part, x, y = drawn
    figure, (left, right) = plt.subplots(1, 2)
    assert draw_partition(part, x, y, ax=right) is right
    assert not left.lines
    figure.savefig(tmp_path / "both.png")
    assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG")


def test_axes_have_the_names_of_the_features(rng: np.random.Generator) -> None:
    import pandas as pd

    frame = pd.DataFrame(rng.normal(size=(30, 2)), columns=["length", "width"])
    ax = draw_partition(partition(frame, np.arange(30) % 2), frame, np.arange(30) % 2)
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("length", "width")


@pytest.mark.slow
def test_the_demo_writes_the_files_that_it_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "new" / "folder"
    demo.main(folder)
    printed = capsys.readouterr().out
    written = sorted(folder.iterdir())
    assert written
    assert str(folder) in printed
    for path in written:
        assert path.name in printed
        assert path.stat().st_size > 0
    assert str(Partition.load(folder / "wdbc.partition.safetensors")) in printed
    pictures = [path for path in written if path.suffix == ".png"]
    assert pictures
    for picture in pictures:
        assert plt.imread(picture).std() > 0.01, "the picture is empty"


def test_axes_contain_every_ellipse(drawn: tuple[Partition, Array, Array]) -> None:
    ax = draw_partition(*drawn)
    (left, right), (low, high) = ax.get_xlim(), ax.get_ylim()
    for line in lines(ax, 200):
        assert left < line[:, 0].min() < line[:, 0].max() < right
        assert low < line[:, 1].min() < line[:, 1].max() < high


def test_numbers_of_hyperplanes_do_not_overlap(rng: np.random.Generator) -> None:
    x, y = rng.normal(size=(80, 2)), np.arange(80) % 2
    ax = draw_partition(partition(x, y, max_impure=10), x, y)
    size = np.array([np.ptp(ax.get_xlim()), np.ptp(ax.get_ylim())])
    places = np.array([text.get_position() for text in ax.texts if text.get_text().isdigit()]) / size
    apart = np.abs(places[:, None] - places[None]).max(axis=-1)[np.triu_indices(len(places), 1)]
    assert len(places) > 1
    assert (apart > 0.02).all()


@pytest.mark.slow
def test_the_legend_can_be_left_out(drawn: tuple[Partition, Array, Array]) -> None:
    part, x, y = drawn
    assert draw_partition(part, x, y, legend=False).get_legend() is None
    assert draw_partition(part, x, y).get_legend() is not None
    ax = draw_decisions(SEPC.from_partition(part), x, y, legend=False)
    assert ax.get_legend() is None
    assert ax.figure.axes == [ax]  # no colour bar
    ax = draw_decisions(SEPC.from_partition(part), x, y)
    assert ax.get_legend() is not None
    assert len(ax.figure.axes) == 2


@pytest.fixture(scope="module")
def reported() -> Reported:
    return reported_head()


def test_shadows_are_the_exact_projections(reported: Reported) -> None:
    """Support functions agree: the largest coordinate of an ellipsoid along a direction of the plane."""
    sepc = reported.head.sepc
    plane = viewing_plane(sepc)
    torch.testing.assert_close(plane.axes @ plane.axes.T, torch.eye(2, dtype=torch.float64))
    shadows = plane.shadows(sepc.bank)
    angle = torch.linspace(0.0, 6.0, 25, dtype=torch.float64)
    directions = torch.stack([angle.cos(), angle.sin()], dim=1)
    for k in range(len(sepc.bank)):
        inverse = torch.linalg.inv(sepc.bank.whiteners[k].double())
        center = (sepc.bank.centers[k].double() - plane.origin) @ plane.axes.T
        reach = (inverse.T @ (directions @ plane.axes).T).norm(dim=0) + directions @ center
        drawn = (directions @ shadows.matrices[k] * directions).sum(dim=1).sqrt() + directions @ shadows.centers[k]
        torch.testing.assert_close(drawn, reach)


def test_every_embedding_is_drawn(reported: Reported, tmp_path: Path) -> None:
    head, z, _, logits = reported
    ax = draw_embedding(head, z, logits)
    drawn = sum(len(np.asarray(c.get_offsets())) for c in ax.collections if len(np.asarray(c.get_offsets())))
    assert drawn == len(z)
    assert len(lines(ax, 120)) == len(head.sepc.bank)
    ax.figure.savefig(tmp_path / "map.png")  # type: ignore[union-attr]
    legend = ax.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["ant", "bee", "cat"]
    uncalibrated = TrustHead(head.projection, head.sepc, head.evidence)
    assert draw_embedding(uncalibrated, z, legend=False).get_legend() is None


def test_the_table_of_classes_is_drawn(reported: Reported) -> None:
    head, z, y, logits = reported
    cells = draw_class_table(head, z, y, logits).tables[0].get_celld()
    assert cells[0, 0].get_text().get_text() == "class"
    assert [cells[i, 0].get_text().get_text() for i in range(1, 5)] == ["ant", "bee", "cat", "unknown"]
    assert cells[4, 1].get_text().get_text() == "40"
    few = draw_class_table(head, z, logits=logits).tables[0].get_celld()
    assert max(column for _, column in few) == 2


def test_curves_of_several_scores_are_drawn() -> None:
    rng = np.random.default_rng(0)
    score = rng.random(200)
    right = rng.random(200) < score
    ax = draw_risk_coverage({"a": score, "b": -score}, right, chosen=0.5, promised=0.1)
    assert len(ax.lines) == 3
    assert np.asarray(ax.lines[0].get_ydata())[-1] == pytest.approx((~right).mean())
    ax = draw_reliability({"a": score, "b": torch.from_numpy(score)}, right)
    assert len(ax.get_legend_handles_labels()[1]) == 3


def test_the_first_alarm_is_marked() -> None:
    ax = draw_drift([0.0, 2.0, 4.0, 3.0, 9.0], alarm=3.5, steps=[10, 20, 30, 40, 50])
    assert [text.get_text() for text in ax.texts] == ["alarm at 30"]
    assert not draw_drift([0.0, 2.0], alarm=3.5).texts
    with pytest.raises(ValueError, match="one value for each step"):
        draw_drift([0.0, 2.0], alarm=3.5, steps=[1])


def test_decisions_of_a_head_are_drawn() -> None:
    rng = np.random.default_rng(0)
    y = np.arange(120) % 2
    x = rng.normal(size=(120, 2)) + 4.0 * y[:, None] + 100.0
    head = TrustHead.fit(x, y, dim=2, normalize="standardize")
    ax = draw_decisions(head, x, y)
    assert ax.get_xlabel() == "feature 0"
    with pytest.raises(ValueError, match="6 features"):
        draw_decisions(reported_head().head, np.zeros((3, 6)), ["ant", "bee", "cat"])

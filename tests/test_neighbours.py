"""Nearest reference point of every class: against brute force, far from the origin, in chunks, as one operator."""

from __future__ import annotations

import copy
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from torch import Tensor

from sepc_torch.head.evidence import class_search
from sepc_torch.head.evidence.neighbours import Neighbours, as_half
from sepc_torch.model import torch_ops

Rng = np.random.Generator


def draw(rng: Rng, *sizes: int, dim: int = 5, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    codes = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    return torch.from_numpy(rng.normal(size=(len(codes), dim))).to(dtype), codes


def by_brute_force(z: Tensor, points: Tensor, codes: Tensor) -> Tensor:
    each = (z.double()[:, None] - points.double()).norm(dim=2)
    return torch.stack([each[:, codes == c].amin(dim=1) for c in range(int(codes.max()) + 1)], dim=1)


@pytest.mark.parametrize("sizes", [(30, 20, 50), (500, 1, 2), (1, 1), (7,)])
def test_agrees_with_brute_force(rng: Rng, sizes: tuple[int, ...]) -> None:
    points, codes = draw(rng, *sizes)
    z, _ = draw(rng, 40)
    assert torch.allclose(Neighbours(points, codes)(z), by_brute_force(z, points, codes), rtol=1e-12)


def test_tiny_points_in_float64() -> None:
    """The square of the length times eps rounds to zero."""
    points = torch.tensor([[0.0], [1e-158]], dtype=torch.float64)
    near = Neighbours(points, torch.tensor([0, 1]))
    assert not near.far_apart
    assert near(points)[0, 0] == 0.0


@pytest.mark.parametrize("ratio", [1e1, 1e3, 1e5])
@pytest.mark.parametrize("classes", [4, 40])
def test_clusters_far_apart(rng: Rng, ratio: float, classes: int) -> None:
    """In float32, for clusters many times their width apart, also within a class."""
    centers = ratio * rng.normal(size=(2 * classes, 16))
    codes = torch.repeat_interleave(torch.arange(classes), 30)
    cluster = 2 * codes.numpy() + rng.integers(0, 2, len(codes))
    points = torch.from_numpy(rng.normal(size=(len(codes), 16)) + centers[cluster]).float()
    z = torch.from_numpy(rng.normal(size=(60, 16)) + centers[rng.integers(0, 2 * classes, 60)]).float()
    near = Neighbours(points, codes)
    assert near.far_apart == (ratio > 1e2)
    found = near(z).amin(dim=1).double()
    assert torch.equal(near.float()(z).amin(dim=1).double(), found), "a conversion to its own dtype changes nothing"
    # The origin is subtracted in float32 from points that are float32 themselves.
    exact = (z.double()[:, None] - near.points.double()).norm(dim=2).amin(dim=1)
    assert torch.allclose(found, exact, rtol=1e-3, atol=1e-6 * ratio)


@pytest.mark.parametrize("widths", [(1, 2), (9, 17), (1, 200)])
def test_many_classes_are_searched_together(rng: Rng, monkeypatch: pytest.MonkeyPatch, widths: tuple[int, int]) -> None:
    """The grouped search equals the search class by class, to the last bit for the nearest classes of a row.

    One row is NaN and one lies on a reference point.
    """
    sizes = rng.integers(*widths, size=60).tolist()
    points, codes = draw(rng, *sizes)
    z, _ = draw(rng, 40)
    z[3], z[4] = torch.nan, points[-1]
    together = Neighbours(points, codes)
    assert sum(together.shapes[::2]) == 60
    assert len(together.slots) < 2 * len(points)
    found = together(z)
    monkeypatch.setattr(class_search, "_MANY_CLASSES", 60)
    one_by_one = Neighbours(points, codes)
    monkeypatch.setattr(class_search, "_FEW_PRODUCTS", 0)
    assert found[3].isnan().all()
    assert found[4, -1] == 0
    few = torch.arange(40) != 3
    wanted = one_by_one(z)[few]
    near = wanted.topk(4, dim=1, largest=False).indices
    assert torch.equal(found[few].gather(1, near), wanted.gather(1, near))
    assert torch.allclose(found[few], by_brute_force(z[few], points, codes), rtol=1e-9)
    # A state dict can change the number of classes.
    monkeypatch.undo()
    other = Neighbours(points + 1.0, torch.zeros_like(codes))
    other.load_state_dict(together.state_dict())
    assert torch.equal(other(z).nan_to_num(-1.0), found.nan_to_num(-1.0))


def test_a_reference_point_has_distance_zero_to_its_class(rng: Rng) -> None:
    for dtype in (torch.float32, torch.float64):
        points, codes = draw(rng, 60, 40, dtype=dtype)
        found = Neighbours(points, codes)(points)
        assert (found.gather(1, codes[:, None]) == 0).all()
        assert (found.gather(1, 1 - codes[:, None]) > 0).all()


def test_ties_have_the_same_distance(rng: Rng) -> None:
    points, _ = draw(rng, 20)
    codes = torch.repeat_interleave(torch.arange(2), 20)
    z, _ = draw(rng, 30)
    found = Neighbours(torch.cat([points, points]), codes)(z)
    assert torch.equal(found[:, 0], found[:, 1])
    twice = torch.cat([points, points])
    assert torch.equal(Neighbours(twice, torch.zeros(40, dtype=torch.int64))(z)[:, 0], found[:, 0])


@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_precision_far_from_the_origin(rng: Rng, offset: float) -> None:
    """float32 against float64 on equal numbers: the distance is accurate and the point found is the nearest."""
    points, codes = draw(rng, 300, 100, dim=8)
    z, _ = draw(rng, 200, dim=8)
    points, z = (points + offset).float(), (z + offset).float()
    found, exact = Neighbours(points, codes)(z).double(), by_brute_force(z, points, codes)
    # The matrix product that finds the point has a few rounding errors of squares of at most 100.
    assert (found.square() <= exact.square() + 1e-4).all()
    assert (found >= exact * (1 - 1e-6)).all()


def test_chunks_of_rows_change_nothing(rng: Rng, monkeypatch: pytest.MonkeyPatch) -> None:
    points, codes = draw(rng, 30, 20)
    z, _ = draw(rng, 333)
    near = Neighbours(points, codes)
    whole = near(z)
    for rows in (1, 7, 332, 333):
        monkeypatch.setattr(torch_ops, "CPU_BYTES", rows * len(points) * 8)
        assert torch_ops.rows_per_piece(z, len(points)) == rows
        assert torch.allclose(near(z), whole, rtol=1e-12)


@pytest.mark.parametrize("many", [0, 2000])
@pytest.mark.parametrize("sizes", [[1], [64], [65, 1, 128, 40], [1000, 63]])
def test_the_first_of_equally_near_points_is_found(
    rng: Rng, monkeypatch: pytest.MonkeyPatch, sizes: list[int], many: int
) -> None:
    """Against differences, with coordinates so small that products are exact and most rows have ties."""
    for name, value in (("_FEW_PRODUCTS", 0), ("_MANY_PRODUCTS", 0), ("_MANY_POINTS", many)):
        monkeypatch.setattr(class_search, name, value)
    codes = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    points, z = (torch.from_numpy(rng.integers(-2, 3, size=(n, 3))).float() for n in (sum(sizes), 200))
    found, index = Neighbours(points, codes, torch.zeros(3)).nearest(z)
    apart = (z[:, None] - points).square().sum(dim=2)
    for c, own in enumerate(apart.split(sizes, dim=1)):
        assert torch.equal(index[:, c] - sum(sizes[:c]), own.argmin(dim=1))
        assert torch.equal(found[:, c], own.amin(dim=1).sqrt())


@pytest.mark.parametrize("dim", [3, 40])
@pytest.mark.parametrize("kind", ["few rows", "blocks", "each class", "many classes"])
def test_the_nearest_of_points_that_float32_cannot_tell_apart(
    rng: Rng, monkeypatch: pytest.MonkeyPatch, kind: str, dim: int
) -> None:
    """The points lie on spheres around the rows, with radii that differ in the digits after those of products."""
    rows, classes = 4, 40 if kind == "many classes" else 3
    small = kind == "few rows"
    for name, value in (("_FEW_PRODUCTS", 2**20 if small else 0), ("_MANY_PRODUCTS", 2**40 if small else 0)):
        monkeypatch.setattr(class_search, name, value)
    monkeypatch.setattr(class_search, "_MANY_POINTS", 10**6 if kind == "each class" else 0)
    z = torch.from_numpy(5.0 + 2.0 * np.arange(rows)[:, None] + 0.1 * rng.normal(size=(rows, dim))).float()
    codes = torch.arange(150 * classes) // 150
    steps = rng.normal(size=(len(codes), dim))
    steps *= (0.5 + 1e-6 * rng.random((len(codes), 1))) / np.linalg.norm(steps, axis=1, keepdims=True)
    points = z[torch.arange(len(codes)) % rows] + torch.from_numpy(steps).float()
    found, index = Neighbours(points, codes, torch.zeros(dim)).nearest(z)
    squares = (points.double() - z.double()[:, None]).square().sum(dim=2)
    closest = squares.view(rows, classes, 150).argmin(dim=2)
    assert torch.equal(index, closest + 150 * torch.arange(classes))
    assert torch.equal(found.amin(dim=1), squares.amin(dim=1).sqrt().float())
    by_products = torch.addmm(points.square().sum(dim=1) / 2, z, points.T, beta=-1).view(rows, classes, 150)
    assert not torch.equal(by_products.argmax(dim=2), closest)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_of_equal_points_of_a_class_the_first_is_found(rng: Rng, dtype: torch.dtype) -> None:
    points, _ = draw(rng, 50, dtype=dtype)
    twice = torch.cat([points, points, points[:20]])
    near = Neighbours(twice, torch.repeat_interleave(torch.arange(2), torch.tensor([100, 20])))
    assert near.kept is not None
    assert near.kept.tolist() == [*range(50), *range(100, 120)]
    found, index = near.nearest(points)
    assert (found[:, 0] == 0).all()
    assert index[:, 0].tolist() == list(range(50))
    assert torch.equal(index[:20, 1], 100 + torch.arange(20))
    assert Neighbours(points, torch.zeros(50, dtype=torch.int64)).kept is None


@pytest.mark.parametrize("few", [True, False])
def test_a_row_beyond_the_range_of_products_leaves_the_others(
    rng: Rng, monkeypatch: pytest.MonkeyPatch, few: bool
) -> None:
    if not few:
        monkeypatch.setattr(class_search, "_MANY_PRODUCTS", 0)
        monkeypatch.setattr(class_search, "_MANY_POINTS", 0)
    points = torch.tensor([[10.0, 0.0], [5.0, 0.0], [-10.0, 0.0], [-5.0, 0.0], [-7.0, 1.0]])
    near = Neighbours(points, torch.tensor([0, 0, 1, 1, 1]), torch.zeros(2))
    far = torch.tensor([[torch.inf, 0.0], [3e38, 0.0], [3e38, -3e38], [1e38, 1e38], [-torch.inf, torch.inf]])
    usual = torch.from_numpy(rng.normal(size=(3, 2))).float()
    found, index = near.nearest(torch.cat([usual, far]))
    assert torch.equal(found[:3], near(usual))
    assert torch.equal(near.codes[index], torch.arange(2).expand(8, -1))
    assert not (found[3:] < 1e37).any()


def test_numbers_below_the_range_of_products(rng: Rng) -> None:
    points, codes = draw(rng, 1500, 1500, dim=8, dtype=torch.float32)
    z, _ = draw(rng, 100, dim=8, dtype=torch.float32)
    for size in (1e-21, 1e-22, 1e-23):
        some, rows = size * points, size * z
        _, index = Neighbours(some, codes, torch.zeros(8)).nearest(rows)
        squares = (some.double() - rows.double()[:, None]).square().sum(dim=2)
        closest = squares.view(100, 2, 1500).argmin(dim=2)
        assert torch.equal(index, closest + torch.tensor([0, 1500]))


def test_rows_in_float64_are_compared_with_all_their_digits(rng: Rng) -> None:
    steps = rng.normal(size=(400, 6))
    points = torch.from_numpy(steps / np.linalg.norm(steps, axis=1, keepdims=True)).float()
    z = torch.from_numpy(1e-6 * rng.normal(size=(300, 6)))
    _, index = Neighbours(points, torch.zeros(400, dtype=torch.int64), torch.zeros(6)).nearest(z)
    assert torch.equal(index[:, 0], (points.double() - z[:, None]).square().sum(dim=2).argmin(dim=1))


@pytest.mark.parametrize(("count", "dim"), [(1001, 7), (1003, 130)])
def test_all_equal_points_are_found(rng: Rng, count: int, dim: int) -> None:
    points = torch.from_numpy(rng.normal(size=(1, dim))).float().expand(count, -1).contiguous()
    near = Neighbours(points, torch.zeros(count, dtype=torch.int64), torch.zeros(dim))
    assert near.kept is not None
    assert near.kept.tolist() == [0]


def test_without_points_there_are_no_columns() -> None:
    near = Neighbours(torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64))
    assert near.ends == []
    assert near(torch.zeros(3, 4)).shape == (3, 0)
    some = Neighbours(torch.zeros(2, 4), torch.tensor([0, 1]))
    assert some(torch.zeros(0, 4)).shape == (0, 2)


def test_a_row_of_nan_does_not_affect_other_rows(rng: Rng) -> None:
    points, codes = draw(rng, 30, 20)
    z, _ = draw(rng, 10)
    near = Neighbours(points, codes)
    whole = near(z)
    z[3] = torch.nan
    found = near(z)
    assert found[3].isnan().all()
    rest = torch.arange(10) != 3
    assert torch.allclose(found[rest], whole[rest], rtol=1e-12)


def test_the_result_has_the_wider_dtype_and_no_gradient(rng: Rng) -> None:
    points, codes = draw(rng, 30, 20, dtype=torch.float32)
    near = Neighbours(points, codes)
    z, _ = draw(rng, 10)
    assert near(z).dtype == torch.float64
    assert near(z.half()).dtype == torch.float32
    assert not near(z.requires_grad_()).requires_grad
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(near(z), near(z.detach()))
        assert torch.allclose(near(z.float()).double(), by_brute_force(z.detach(), points, codes), rtol=1e-4)


def test_loading_a_state_dict_updates_the_ends(rng: Rng) -> None:
    points, codes = draw(rng, 30, 20)
    near = Neighbours(points, codes)
    other = Neighbours(points + 1.0, torch.repeat_interleave(torch.arange(5), 10))
    other.load_state_dict(near.state_dict())
    assert other.ends == [30, 50]
    z, _ = draw(rng, 10)
    assert torch.equal(other(z), near(z))
    assert not Neighbours(points, codes, persistent=False).state_dict()


@pytest.mark.slow
@pytest.mark.parametrize("sizes", ["[30, 1, 19]", "[1, 2] * 20"])
def test_compiled_and_exported_graphs_hold_one_operator(sizes: str) -> None:
    """In a separate process: torch.compile cannot trace the shape checks of the tests."""
    script = textwrap.dedent(
        """
        import torch
        from sepc_torch.head.evidence.neighbours import Neighbours

        sizes = SIZES
        codes = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
        near = Neighbours(torch.randn(len(codes), 4), codes)
        z = torch.randn(20, 4)
        compiled = torch.compile(near, fullgraph=True, backend="aot_eager")
        batch = torch.export.Dim("batch", min=2)
        program = torch.export.export(near, (z,), dynamic_shapes=({0: batch},))
        calls = [node.target for node in program.graph.nodes if node.op == "call_function"]
        assert sum("class_nearest" in str(target) for target in calls) == 1, calls
        assert not any("addmm" in str(target) for target in calls), calls
        for rows in (20, 7):
            assert torch.equal(compiled(z[:rows]), near(z[:rows]))
            assert torch.equal(program.module()(z[:rows]), near(z[:rows]))
        print("right")
        """
    ).replace("SIZES", sizes)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.strip() == "right", done.stderr[-2000:]


def test_eleven_bits(rng: Rng) -> None:
    """Numbers keep the digits of float16, ties to even, at every size."""
    x = torch.from_numpy(rng.normal(size=5000) * 10.0 ** rng.uniform(-3, 37, size=5000)).float()
    x[:6] = torch.tensor([1 + 2.0**-11, 1 + 3 * 2.0**-11, -65535.0, 0.0, torch.inf, 2.0**-20 * 1.3])
    found = as_half(x)
    assert found[:6].tolist() == [1.0, 1 + 2.0**-9, -65536.0, 0.0, torch.inf, 21 * 2.0**-24]
    mantissa, exponent = torch.frexp(x.double())
    digits = torch.ldexp((mantissa * 2**11).round() / 2**11, exponent)
    expected = torch.where(x.abs() < 2.0**-14, found.double(), digits)
    assert torch.equal(found[6:].double(), expected[6:])
    assert torch.equal(as_half(found), found)
    ordinary = torch.from_numpy(rng.normal(size=1000)).float()
    assert torch.equal(as_half(ordinary), as_half(torch.cat([ordinary, x]))[:1000])
    assert torch.equal(as_half(torch.cat([ordinary, x[:1] * torch.nan]))[:1000], as_half(ordinary))


def test_points_with_eleven_bits(rng: Rng) -> None:
    """Points and embeddings are rounded relative to the origin; a copy of a point is at distance zero."""
    points, codes = torch.from_numpy(rng.normal(size=(50, 8))).float() + 9.0, torch.zeros(50, dtype=torch.int64)
    z = torch.cat([points[:3], torch.from_numpy(rng.normal(size=(40, 8))).float() + 9.0])
    for origin in (None, torch.zeros(8)):
        near = Neighbours(points, codes, origin, eleven_bits=True)
        assert near.in_half == (origin is None)  # 9.0 has fewer digits behind the point
        distance, index = near.nearest(z)
        rows, searched = z - near.origin, points - near.origin
        if near.in_half:
            rows, searched = as_half(rows), as_half(searched)
        least, nearest = torch.linalg.vector_norm(rows.double()[:, None] - searched.double(), dim=2).min(dim=1)
        assert distance[:3].tolist() == [[0.0]] * 3
        assert torch.equal(index.squeeze(1), nearest)
        assert torch.allclose(distance.squeeze(1).double(), least, rtol=1e-6)
        assert torch.equal(near.offsets, points - near.origin)
        if near.in_half:  # the digits of the rows are those of float32 in any dtype
            assert torch.equal(near(z.double()), distance.double())
            assert torch.equal(near(z.double() * (1.0 + 1e-9)), distance.double())
            assert torch.equal(near.double()(z.double()), distance.double())


@pytest.mark.parametrize(("scale", "large", "in_half"), [(1.0, 1.0, True), (1e-6, 1.0, False), (1.0, 700.0, False)])
def test_eleven_bits_keep_distances(rng: Rng, scale: float, large: float, in_half: bool) -> None:
    """Not below the range of float16, and not where one large coordinate has few digits left for small distances."""
    points = scale * torch.from_numpy(rng.normal(size=(400, 64)) * np.append(np.ones(63), large)).float()
    near = Neighbours(points, torch.zeros(400, dtype=torch.int64), eleven_bits=True)
    assert near.in_half == in_half
    z = scale * torch.from_numpy(rng.normal(size=(300, 64)) * np.append(np.ones(63), large)).float()
    exact = torch.cdist(z.double(), points.double()).amin(dim=1)
    change = near(z).squeeze(1).double() / exact - 1.0
    assert float(change.square().mean().sqrt()) < 2.0**-11


def test_the_digits_of_a_search_do_not_depend_on_moves(rng: Rng) -> None:
    points = torch.from_numpy(rng.normal(size=(3000, 16))).float()
    points[0] = 40.0  # so that the search is in float64
    origin = torch.from_numpy(300.0 * rng.normal(size=16)).float()
    near = Neighbours(points + origin, torch.zeros(3000, dtype=torch.int64), eleven_bits=True)
    assert near.in_half
    assert near.far_apart
    z = torch.from_numpy(rng.normal(size=(500, 16))) + origin.double()
    expected = near(z)
    for _ in range(2):
        assert torch.equal(near.double()(z), expected)
    assert torch.equal(copy.deepcopy(near)(z), expected)
    assert torch.equal(near.float()(z), expected)


def test_eleven_bits_need_points_far_apart(rng: Rng) -> None:
    """The digits of points that are close to each other are kept, also after other points are loaded."""
    points, codes = torch.from_numpy(rng.normal(size=(2000, 2))).float(), torch.zeros(2000, dtype=torch.int64)
    close = Neighbours(points, codes, eleven_bits=True)
    assert not close.in_half
    assert torch.equal(close.searched, close.offsets)
    far = Neighbours(torch.from_numpy(rng.normal(size=(50, 40))).float(), codes[:50], eleven_bits=True)
    assert far.in_half
    assert not torch.equal(far.searched, far.offsets)
    loaded = Neighbours(torch.zeros(50, 40), codes[:50], eleven_bits=True)
    loaded.load_state_dict(far.state_dict())
    assert loaded.in_half
    assert torch.equal(loaded.searched, far.searched)
    z = torch.from_numpy(rng.normal(size=(20, 40))).float()
    assert torch.equal(loaded(z), far(z))
    assert not Neighbours(points, codes).in_half

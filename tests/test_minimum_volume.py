"""Native solver of the minimum-volume ellipsoid: optimality conditions, equivariance, closed forms, degenerate sets."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from sepc_torch import MinimumVolumeEllipsoid, minimum_volume_ellipsoid
from sepc_torch.shapes import Array
from sepc_torch.solvers.affine_hull import affine_hull
from sepc_torch.solvers.d_optimal import Design, LogDeterminant, Variances, enclosure, inverse_root
from sepc_torch.solvers.interior_point import interior_point
from sepc_torch.solvers.minimum_volume import lifted
from sepc_torch.solvers.newton import Solve

Rng = np.random.Generator


def gaussian(rng: Rng, count: int, dim: int) -> Array:
    return rng.normal(size=(count, dim)) @ rng.normal(size=(dim, dim)) + rng.normal(size=dim)


def assert_john(e: MinimumVolumeEllipsoid, points: Array, tol: float = 1e-6) -> None:
    r"""John's conditions: surface points, :math:`\sum u (z-c) = 0`, :math:`D \sum u (z-c)(z-c)^T = (W^T W)^{-1}`."""
    assert e.distance(points).max() <= 1.0
    assert e.weights.min() > 0
    assert e.weights.sum() == pytest.approx(1.0)
    significant = e.weights > 1e-4  # points with a vanishing weight can lie slightly inside
    assert e.distance(points[e.support])[significant] == pytest.approx(1.0, abs=1e-3)
    v = (points[e.support] - e.center) @ e.whitener.T
    assert e.weights @ v == pytest.approx(np.zeros(e.dim), abs=tol)
    assert e.dim * (v * e.weights[:, None]).T @ v == pytest.approx(np.eye(e.dim), abs=tol)


@pytest.mark.parametrize(
    ("count", "dim"), [(3, 1), (50, 2), (200, 5), (1000, 10), (450, 3), (5000, 16), (200, 30), (65, 64)]
)
def test_satisfies_johns_conditions(rng: Rng, count: int, dim: int) -> None:
    points = gaussian(rng, count, dim)
    e = minimum_volume_ellipsoid(points)
    assert e.gap <= 1e-7
    assert e.rank == dim
    assert e.log_volume_bound <= 0.5 * (dim + 1) * 1e-7
    assert_john(e, points, tol=1e-5)


@pytest.mark.parametrize(
    "draw",
    [
        lambda rng: rng.standard_cauchy(size=(2000, 8)),
        lambda rng: np.exp(3 * rng.normal(size=(1500, 8))),
        lambda rng: rng.integers(0, 4, size=(3000, 6)).astype(float),
        lambda rng: (rng.random((400, 9)) < 0.3).astype(float),
        lambda rng: np.repeat(rng.normal(size=(25, 4)), 30, axis=0),
        lambda rng: np.concatenate([rng.normal(size=(1000, 5)), 1e4 + rng.normal(size=(3, 5))]),
        lambda rng: rng.normal(size=(500, 7)) * 10.0 ** np.linspace(-6, 6, 7),
        lambda rng: rng.normal(size=(400, 5)) + 1e8,
        lambda rng: rng.uniform(-1, 1, size=(2000, 1)) ** np.arange(1, 11),
    ],
    ids=["cauchy", "lognormal", "grid", "binary", "duplicates", "lump", "scales", "offset", "moment curve"],
)
def test_certifies_hard_sets(rng: Rng, draw: Callable[[Rng], Array]) -> None:
    points = draw(rng)
    e = minimum_volume_ellipsoid(points)
    assert e.gap <= 2e-7
    assert e.distance(points).max() <= 1.0 + 1e-9


@pytest.mark.slow
@pytest.mark.parametrize(("count", "dim"), [(100_000, 10), (20_000, 128)])
def test_certifies_large_sets(rng: Rng, count: int, dim: int) -> None:
    points = gaussian(rng, count, dim)
    e = minimum_volume_ellipsoid(points)
    assert e.gap <= 1e-7
    assert e.distance(points).max() <= 1.0


def test_gap_bounds_the_excess_volume(rng: Rng) -> None:
    points = gaussian(rng, 800, 6)
    best = minimum_volume_ellipsoid(points, tol=1e-10)
    for tol in (1e-1, 1e-2, 1e-4):
        coarse = minimum_volume_ellipsoid(points, tol=tol)
        assert coarse.gap <= tol
        assert coarse.distance(points).max() <= 1.0
        excess = coarse.log_volume - best.log_volume
        assert -1e-9 <= excess <= coarse.log_volume_bound + 1e-9


def test_enclosure_holds_at_every_stage(rng: Rng) -> None:
    """A coarse design encloses the exact ellipsoid: g / outer <= g* <= g / inner at any point."""
    points = gaussian(rng, 600, 5)
    hull = affine_hull(points)
    x = lifted(hull)
    exact = Design(x)
    exact.refine(1e-11)
    anywhere = np.concatenate([3 * rng.normal(size=(5, 4000)), np.ones((1, 4000))])
    g_star = np.sum((exact.root @ anywhere) ** 2, axis=0)
    design = Design(x)
    for stage in (np.inf, 0.3, 1e-2, 1e-4):
        design.refine(stage)
        inner, outer = enclosure(design.gap, 6)
        g = np.sum((design.root @ anywhere) ** 2, axis=0)
        assert (g / outer <= g_star * (1 + 1e-6)).all()
        assert (g_star <= g / inner * (1 + 1e-6)).all()


def test_variances_are_bounded_while_the_design_moves(rng: Rng) -> None:
    """Every value that is not recomputed is below the level, for each design of a sequence and for subsets."""
    x = np.concatenate([rng.standard_t(4, size=(4, 3000)), np.ones((1, 3000))])
    known, computed = Variances(x), 0
    u = np.full(3000, 1 / 3000)
    for step in range(30):
        u *= rng.uniform(0.8, 1.25, size=len(u))
        root = inverse_root(known.columns().T, u / u.sum())
        g = np.sum((root @ known.columns()) ** 2, axis=0)
        near, values = known.at_least(root, 0.9 * 5, np.arange(len(known)))
        computed += len(near)
        assert values == pytest.approx(g[near])
        assert np.isin(np.flatnonzero(g >= 0.9 * 5), near).all()
        assert (known.bounds() >= g * (1 - 1e-9)).all()
        if step % 10 == 9:
            keep = np.sort(rng.permutation(len(known))[: len(known) // 2])
            known, u = known.subset(keep), u[keep]
    assert computed < 0.7 * 30 * 3000


@pytest.mark.parametrize("left", [0.9, 0.5])
def test_a_subset_design_reaches_the_optimum_of_its_columns(rng: Rng, left: float) -> None:
    """Started from the design of the whole set, it reaches the optimum of a new design, with a valid certificate."""
    x = lifted(affine_hull(gaussian(rng, 2000, 6)))
    whole = Design(x)
    whole.refine(0.1)
    values = rng.normal(size=7) @ x
    rows = np.flatnonzero(values <= np.quantile(values, left))
    part, fresh = whole.subset(rows), Design(x[:, rows])
    assert float(np.sum((part.root @ x[:, rows]) ** 2, axis=0).max()) <= 7 * (1 + part.gap) * (1 + 1e-9)
    assert max(part.refine(1e-9), fresh.refine(1e-9)) <= 1e-9
    logdet = [np.log(np.diag(design.root)).sum() for design in (part, fresh)]
    assert logdet[0] == pytest.approx(logdet[1], abs=1e-8)


@pytest.mark.parametrize("dim", [1, 2, 3, 7])
def test_closed_forms(dim: int) -> None:
    cross = np.concatenate([np.eye(dim), -np.eye(dim)])
    e = minimum_volume_ellipsoid(cross)
    assert e.semi_axes == pytest.approx(np.ones(dim))
    assert e.center == pytest.approx(np.zeros(dim), abs=1e-12)
    cube = np.stack(np.meshgrid(*[[-1.0, 1.0]] * dim), axis=-1).reshape(-1, dim)
    assert minimum_volume_ellipsoid(cube).semi_axes == pytest.approx(np.full(dim, np.sqrt(dim)))
    # The simplex 0, e_1, ..., e_D: all points lie on the surface, the centre is the centroid, and the shape matrix is D
    # times the covariance.
    simplex = np.concatenate([np.zeros((1, dim)), np.eye(dim)])
    e = minimum_volume_ellipsoid(simplex)
    assert e.center == pytest.approx(np.full(dim, 1 / (dim + 1)))
    assert e.distance(simplex) == pytest.approx(np.ones(dim + 1))
    scatter = (simplex - e.center).T @ (simplex - e.center) / (dim + 1)
    assert np.linalg.inv(e.whitener.T @ e.whitener) == pytest.approx(dim * scatter)


def test_affine_equivariance(rng: Rng) -> None:
    points, matrix, shift = gaussian(rng, 300, 4), rng.normal(size=(4, 4)), 10 * rng.normal(size=4)
    e = minimum_volume_ellipsoid(points, tol=1e-10)
    image = minimum_volume_ellipsoid(points @ matrix.T + shift, tol=1e-10)
    anywhere = 3 * rng.normal(size=(100, 4))
    assert image.distance(anywhere @ matrix.T + shift) == pytest.approx(e.distance(anywhere), rel=1e-6)
    assert e.affine_image(matrix, shift).whitener == pytest.approx(image.whitener, rel=1e-5, abs=1e-7)


def test_interior_points_and_duplicates_do_not_change_the_volume(rng: Rng) -> None:
    points = gaussian(rng, 200, 5)
    e = minimum_volume_ellipsoid(points, tol=1e-10)
    inside = e.center + 0.9 * (points - e.center)
    for more in (np.concatenate([points, inside]), np.repeat(points, 3, axis=0), points[e.support]):
        assert minimum_volume_ellipsoid(more, tol=1e-10).log_volume == pytest.approx(e.log_volume, abs=1e-8)


def test_row_order_does_not_matter(rng: Rng) -> None:
    points = gaussian(rng, 1000, 6)
    order = rng.permutation(1000)
    e, f = minimum_volume_ellipsoid(points), minimum_volume_ellipsoid(points[order])
    assert f.log_volume == pytest.approx(e.log_volume, abs=1e-6)
    assert f.whitener == pytest.approx(e.whitener, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("floor", [0.0, 1e-4, 1e-2])
@pytest.mark.parametrize(("dim", "rank"), [(2, 1), (3, 2), (5, 3), (6, 1)])
def test_flat_sets_have_the_floor_as_thickness(rng: Rng, dim: int, rank: int, floor: float) -> None:
    basis = np.linalg.qr(rng.normal(size=(dim, dim)))[0]
    inside = rng.normal(size=(60, rank))
    points = inside @ basis[:, :rank].T + 3.0
    e = minimum_volume_ellipsoid(points, floor=floor)
    assert e.rank == rank
    assert e.distance(points).max() <= 1.0
    in_hull = minimum_volume_ellipsoid(inside)
    assert e.semi_axes[:rank] == pytest.approx(in_hull.semi_axes, rel=1e-5)
    thickness = floor or 0.5e-6 * np.ptp(points, axis=0).max()
    assert e.semi_axes[rank:] == pytest.approx(np.full(dim - rank, thickness), rel=1e-5)
    normal = basis[:, -1]
    assert e.distance(e.center + 2 * thickness * normal) == pytest.approx(2.0, rel=1e-5)


def test_a_constant_and_a_dependent_feature(rng: Rng) -> None:
    a = rng.normal(size=(80, 2)) * [1.0, 1e5]
    points = np.column_stack([a[:, 0], np.full(80, 7.0), a[:, 1], a[:, 0] + 1e-5 * a[:, 1]])
    e = minimum_volume_ellipsoid(points, floor=1e-3)
    assert e.rank == 2
    assert e.distance(points).max() <= 1.0
    assert e.semi_axes[-2:] == pytest.approx([1e-3, 1e-3], rel=1e-4)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_fewer_points_than_dimensions(rng: Rng, count: int) -> None:
    points = rng.normal(size=(count, 4))
    e = minimum_volume_ellipsoid(points, floor=0.01)
    assert e.rank == count - 1
    assert e.distance(points).max() <= 1.0
    assert e.semi_axes[count - 1 :] == pytest.approx(np.full(5 - count, 0.01), rel=1e-5)


def test_identical_points_give_a_ball() -> None:
    e = minimum_volume_ellipsoid(np.full((5, 3), 0.1), floor=0.5)
    assert e.semi_axes == pytest.approx([0.5] * 3)
    assert e.center == pytest.approx([0.1] * 3)


@pytest.mark.parametrize("thin", [[0.02], [0.05, 0.01], [0.03, 0.0]])
def test_the_solution_with_an_active_floor_is_optimal(rng: Rng, thin: list[float]) -> None:
    """For sets thinner than the floor: the optimality conditions of program (2) with A <= I / tau, and its gap."""
    tau, dim = 0.1, 2 + len(thin)
    rotation = np.linalg.qr(rng.normal(size=(dim, dim)))[0]
    points = (rng.normal(size=(80, dim)) * [1.0, 2.0, *thin]) @ rotation + 1.0
    e = minimum_volume_ellipsoid(points, floor=tau)
    assert e.floor == tau
    assert e.distance(points).max() <= 1.0
    assert e.semi_axes.min() == pytest.approx(tau, rel=1e-6)
    assert e.gap <= 1e-7
    # The shape matrix is the weighted scatter with its eigenvalues raised to at least tau^2, so the two commute.
    offsets = points[e.support] - e.center
    shape = np.linalg.inv(e.whitener.T @ e.whitener)
    mass = float(np.trace(np.linalg.solve(shape, (offsets * e.weights[:, None]).T @ offsets)))
    scatter = (offsets * e.weights[:, None]).T @ offsets / mass
    # The mass normalises the multipliers: sum(lambda h) = sum(lambda), that is omega = tr(P S).
    values, vectors = np.linalg.eigh(shape)
    assert vectors.T @ shape @ vectors == pytest.approx(np.diag(values), abs=1e-9)
    assert e.weights @ offsets == pytest.approx(np.zeros(dim), abs=1e-5)
    commutator = shape @ scatter - scatter @ shape
    assert commutator == pytest.approx(np.zeros((dim, dim)), abs=1e-4)
    plain = minimum_volume_ellipsoid(points)
    assert e.log_volume > plain.log_volume


@pytest.mark.parametrize(
    ("points", "floor"),
    [
        (
            "0 1 4 -2, 1 1 -6 1, -1 1 -3 1, 1 0 5 -2, 0 0 13 0, 0 0 -9 3, 0 -1 -7 3, -1 0 3 0, 1 -2 2 0, 0 2 -4 1, "
            "0 1 0 5, 0 1 -23 3",
            4.0,
        ),
        ("0 8 1, -3 7 -1, -1 9 -1, 2 8 -1, -2 0 0, 0 2 0, -2 -5 -1, 1 -7 0, 2 4 0, -1 -5 -1, 1 -1 1", 5.0),
    ],
)
def test_a_step_that_leaves_a_dual_residual_does_not_stop_the_solver(points: str, floor: float) -> None:
    """Sets on which steps of unequal primal and dual length would increase the residual, however short they are."""
    z = np.array([row.split() for row in points.split(",")], dtype=float)
    e = minimum_volume_ellipsoid(z, floor=floor)
    assert e.gap <= 1e-7
    assert e.distance(z).max() <= 1.0
    assert e.semi_axes.min() == pytest.approx(floor, rel=1e-6)


def test_a_floor_below_every_semi_axis_is_inactive(rng: Rng) -> None:
    points = gaussian(rng, 100, 3)
    plain, floored = minimum_volume_ellipsoid(points), minimum_volume_ellipsoid(points, floor=1e-6)
    assert floored.floor == 0.0
    assert np.array_equal(plain.whitener, floored.whitener)


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ([[0.0, np.nan]], "NaN or infinity, first in row 0"),
        (np.zeros((0, 3)), "non-empty"),
        ([1.0, 2.0], r"shape \(points, features\)"),
    ],
)
def test_invalid_points_are_refused(points: Array, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        minimum_volume_ellipsoid(points)


@pytest.mark.parametrize("scale", [1e-320, 1e-300, 1e-150, 1e150, 1e300])
def test_points_of_extreme_scale_are_refused(rng: Rng, scale: float) -> None:
    points = gaussian(rng, 30, 3)
    points[:, 1] *= scale
    with pytest.raises(ValueError, match=r"Column 1 of points has a scale of .*; rescale the features"):
        minimum_volume_ellipsoid(points)


@pytest.mark.parametrize("exponent", [-325, -200, 200, 325])
def test_units_in_powers_of_two_change_only_the_units(rng: Rng, exponent: int) -> None:
    points, unit = gaussian(rng, 30, 3), 2.0**exponent
    e, scaled = minimum_volume_ellipsoid(points), minimum_volume_ellipsoid(points * unit)
    assert np.array_equal(scaled.center, e.center * unit)
    assert np.array_equal(scaled.whitener, e.whitener / unit)


@pytest.mark.parametrize(("argument", "value"), [("tol", 0.0), ("tol", 2.0), ("floor", -1.0), ("floor", np.nan)])
def test_invalid_parameters_are_refused(argument: str, value: float) -> None:
    with pytest.raises(ValueError, match=argument):
        minimum_volume_ellipsoid(np.eye(3), **{argument: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("dim", [2, 3, 5])
def test_a_floor_above_the_smallest_enclosing_radius_gives_a_ball(rng: Rng, dim: int) -> None:
    """If a ball with the floor as radius covers the points, it is the minimum-volume ellipsoid."""
    for count in (dim + 2, 50):
        points = rng.normal(size=(count, dim))
        # The smallest enclosing ball, by many small steps towards the farthest point.
        center = points.mean(axis=0)
        for step in range(20_000):
            center += (points[np.linalg.norm(points - center, axis=1).argmax()] - center) / (step + 2)
        radius = float(np.linalg.norm(points - center, axis=1).max())
        for factor in (1.002, 1.02, 1.3, 10.0):
            e = minimum_volume_ellipsoid(points, floor=factor * radius)
            assert e.semi_axes == pytest.approx(np.full(dim, factor * radius), rel=1e-9)
            assert e.contains(points).all()
            assert e.gap == 0.0
            assert e.weights @ points[e.support] == pytest.approx(e.center)
        below = minimum_volume_ellipsoid(points, floor=0.95 * radius)
        assert below.semi_axes[0] > 0.95 * radius * (1 + 1e-6)
        assert below.gap <= 1e-7


def test_a_failed_factorisation_returns_the_best_weights_so_far(rng: Rng) -> None:
    """Near the end of the central path, weights and slacks span the range of float64 and a factorisation can fail."""

    class Failing(LogDeterminant):
        left = 6

        def newton(self, d: Array, accuracy: float) -> Solve:
            self.left -= 1
            if not self.left:
                raise np.linalg.LinAlgError("not positive definite")
            return super().newton(d, accuracy)

    x = np.ascontiguousarray(lifted(affine_hull(gaussian(rng, 100, 3))).T)
    start = np.full(100, 0.01)
    objective = LogDeterminant(x)
    objective.move(start)
    before = objective.gap(start)
    reached = interior_point(Failing(x), start, 1e-9, 0.1)
    objective.move(reached)
    assert objective.gap(reached) < 0.1 * before


def test_an_unreachable_gap_raises_an_error(rng: Rng) -> None:
    """Far from the origin the rounding of the coordinates exceeds the wanted gap."""
    message = r"300 points x 4 dims: rounding stopped the solver at a gap of .*, above tol=1.0e-16. Increase tol"
    with pytest.raises(RuntimeError, match=message):
        minimum_volume_ellipsoid(1e5 + gaussian(rng, 300, 4), tol=1e-16)

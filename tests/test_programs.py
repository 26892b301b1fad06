"""The cvxpy programs: optimality conditions, closed forms and agreement with the native solvers."""

from __future__ import annotations

from collections.abc import Callable

import cvxpy as cp
import numpy as np
import pytest
from scipy.optimize import minimize_scalar

from sepc_torch.ellipsoid import Ellipsoid, MinimumVolumeEllipsoid
from sepc_torch.shapes import Array
from sepc_torch.solvers.minimum_volume import minimum_volume
from sepc_torch.solvers.programs import (
    ProgramError,
    distance_to_ellipsoid,
    ellipsoids_intersect,
    intersection_ellipsoid,
    minimum_volume_ellipsoid,
    reduced_hull_points,
    solve,
)
from sepc_torch.solvers.reduced_hull import closest_points

# Log-volumes agree to 1e-6 per dimension. The volume is flat near the optimum, so shapes and weights are only as
# accurate as the square root of the error in the volume.
VOLUME = 1e-6
SHAPE = 1e-4

CONE_SOLVERS = ["CLARABEL", "SCS"]


def rotation(rng: np.random.Generator, dim: int) -> Array:
    return np.linalg.qr(rng.normal(size=(dim, dim)))[0]


def cloud(rng: np.random.Generator, count: int, dim: int) -> Array:
    """Correlated points away from the origin, semi-axes between 1 and 10."""
    return rng.normal(size=(count, dim)) * 10 ** rng.uniform(0, 1, dim) @ rotation(rng, dim) + rng.normal(0, 20, dim)


def random_ellipsoid(rng: np.random.Generator, dim: int, spread: float = 10.0) -> Ellipsoid:
    """Semi-axes between 1/spread and spread, any orientation; the whitener is a full matrix."""
    whitener = (rotation(rng, dim) * spread ** rng.uniform(-1, 1, dim)) @ rotation(rng, dim)
    return Ellipsoid(rng.normal(scale=3.0, size=dim), whitener)


def inside(rng: np.random.Generator, e: Ellipsoid, count: int) -> Array:
    """Points drawn uniformly from an ellipsoid."""
    u = rng.normal(size=(count, e.dim))
    u *= (rng.random(count) ** (1 / e.dim) / np.linalg.norm(u, axis=1))[:, None]
    return e.center + np.linalg.solve(e.whitener, u.T).T


def assert_same_ellipsoid(a: Ellipsoid, b: Ellipsoid) -> None:
    assert a.log_volume == pytest.approx(b.log_volume, abs=VOLUME * a.dim)
    np.testing.assert_allclose(np.linalg.svd(a.whitener @ np.linalg.inv(b.whitener))[1], 1.0, atol=SHAPE)
    assert b.distance(a.center[None])[0] < SHAPE


def attempt(monkeypatch: pytest.MonkeyPatch, *settings: dict[str, float]) -> None:
    """Make every program try these solver settings in order."""
    monkeypatch.setattr(solve, "_attempts", lambda _solver, _accuracy: list(settings))


class TestMinimumVolume:
    @pytest.mark.parametrize("solver", CONE_SOLVERS)
    @pytest.mark.parametrize(("count", "dim"), [(3, 2), (40, 1), (60, 2), (400, 5), (80, 10)])
    def test_johns_conditions(self, rng: np.random.Generator, solver: str, count: int, dim: int) -> None:
        z = cloud(rng, count, dim)
        e = minimum_volume_ellipsoid(z, solver=solver)
        v = (z[e.support] - e.center) @ e.whitener.T
        assert e.distance(z).max() <= 1.0
        assert (e.weights > 0).all()
        assert e.weights.sum() == pytest.approx(1.0)
        np.testing.assert_allclose(np.linalg.norm(v, axis=1), 1.0, atol=SHAPE)
        np.testing.assert_allclose(e.weights @ v, 0.0, atol=SHAPE)
        np.testing.assert_allclose(dim * (v * e.weights[:, None]).T @ v, np.eye(dim), atol=SHAPE)
        assert (e.rank, e.floor) == (dim, 0.0)
        assert e.gap <= 1e-6
        assert e.log_volume_bound == pytest.approx(0.5 * dim * np.log1p(e.gap * (dim + 1) / dim))

    @pytest.mark.parametrize("dim", [2, 3, 6])
    @pytest.mark.parametrize("shape", ["simplex", "cube", "cross-polytope"])
    def test_regular_polytopes_give_their_circumscribed_ball(
        self, rng: np.random.Generator, shape: str, dim: int
    ) -> None:
        if shape == "simplex":  # the unit vectors of dim + 1 dimensions, in their hyperplane
            corners = np.eye(dim + 1) @ np.linalg.qr(np.column_stack([np.ones(dim + 1), np.eye(dim + 1)[:, :dim]]))[0]
            corners = corners[:, 1:]
        elif shape == "cube":
            corners = np.array(np.meshgrid(*[[-1.0, 1.0]] * dim)).reshape(dim, -1).T
        else:
            corners = np.concatenate([np.eye(dim), -np.eye(dim)])
        radius = np.linalg.norm(corners - corners.mean(axis=0), axis=1).max()
        scale, shift = 10 ** rng.uniform(-3, 3), rng.normal(size=dim)
        e = minimum_volume_ellipsoid(scale * corners @ rotation(rng, dim) + shift)
        np.testing.assert_allclose(e.semi_axes, scale * radius, rtol=SHAPE)
        assert e.log_volume == pytest.approx(dim * np.log(scale * radius), abs=VOLUME * dim)

    @pytest.mark.parametrize("dim", [1, 2, 4])
    def test_affine_equivariance(self, rng: np.random.Generator, dim: int) -> None:
        z = cloud(rng, 20 * dim, dim)
        matrix, shift = rng.normal(size=(dim, dim)), rng.normal(scale=10.0, size=dim)
        image = minimum_volume_ellipsoid(z).affine_image(matrix, shift)
        assert_same_ellipsoid(minimum_volume_ellipsoid(z @ matrix.T + shift), image)

    @pytest.mark.parametrize("solver", CONE_SOLVERS)
    def test_interior_points_and_copies_do_not_change_the_ellipsoid(
        self, rng: np.random.Generator, solver: str
    ) -> None:
        z = cloud(rng, 50, 3)
        mixed = rng.dirichlet(np.ones(50), size=500) @ z
        more = rng.permutation(np.concatenate([mixed, np.repeat(z, 40, axis=0)]))
        assert_same_ellipsoid(minimum_volume_ellipsoid(more, solver=solver), minimum_volume_ellipsoid(z, solver=solver))

    @pytest.mark.parametrize("solver", CONE_SOLVERS)
    @pytest.mark.parametrize(
        "make",
        [
            pytest.param(lambda rng: rng.standard_cauchy((300, 4)), id="heavy tails"),
            pytest.param(lambda rng: rng.integers(0, 3, (200, 5)).astype(float), id="grid"),
            pytest.param(lambda rng: rng.normal(size=(100, 4)) * 10.0 ** np.array([-6, -2, 2, 6]), id="units"),
            pytest.param(lambda rng: rng.normal(size=(100, 3)) + 1e8, id="offset"),
            pytest.param(lambda rng: rng.normal(size=(7, 6)), id="N = D + 1"),
            pytest.param(lambda rng: rng.normal(size=(4, 9)), id="N < D"),
            pytest.param(lambda rng: rng.normal(size=(60, 2)) @ rng.normal(size=(2, 5)) + 3.0, id="dependent"),
            pytest.param(lambda rng: np.column_stack([rng.normal(size=(60, 3)), np.full(60, 7.0)]), id="constant"),
            pytest.param(lambda rng: np.eye(6)[rng.integers(0, 6, 200)], id="one-hot"),
            pytest.param(
                lambda rng: np.concatenate([rng.normal(size=(40, 3)), np.tile(20 * rng.normal(size=3), (500, 1))]),
                id="lump",
            ),
        ],
    )
    def test_agrees_with_the_native_solver(
        self, rng: np.random.Generator, make: Callable[[np.random.Generator], Array], solver: str
    ) -> None:
        z = make(rng)
        e, native = minimum_volume_ellipsoid(z, solver=solver), minimum_volume(z, 1e-9, 0.0)
        assert e.distance(z).max() <= 1.0 + 1e-12
        assert e.rank == native.rank
        assert e.floor == pytest.approx(native.floor, rel=SHAPE)
        # The default thickness depends on the offsets from the centre, so it is only as accurate as the centre.
        across = (e.dim - e.rank) * np.log(e.floor / native.floor) if native.floor else 0.0
        assert e.log_volume - across == pytest.approx(native.log_volume, abs=VOLUME * e.dim)
        assert e.gap <= 1e-6

    def test_the_log_volume_bound_holds(self, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
        """The bound also holds for a solver that stops early."""
        attempt(monkeypatch, {"eps_abs": 1e-6, "eps_rel": 1e-6})
        z = cloud(rng, 100, 4)
        best = minimum_volume(z, 1e-12, 0.0).log_volume
        e = minimum_volume_ellipsoid(z, solver="SCS")
        assert best - 1e-9 <= e.log_volume <= best + e.log_volume_bound + 1e-9

    def test_one_and_two_points(self, rng: np.random.Generator) -> None:
        z = rng.normal(size=(2, 3))
        ball = minimum_volume_ellipsoid(np.repeat(z[:1], 4, axis=0), floor=0.25)
        np.testing.assert_allclose(ball.center, z[0])
        np.testing.assert_allclose(ball.semi_axes, 0.25)
        assert (ball.rank, ball.floor) == (0, 0.25)
        half = float(np.linalg.norm(z[1] - z[0]) / 2)
        rod = minimum_volume_ellipsoid(z, floor=0.1 * half)
        np.testing.assert_allclose(rod.center, z.mean(axis=0), atol=1e-6)
        np.testing.assert_allclose(rod.semi_axes, half * np.array([1.0, 0.1, 0.1]), rtol=1e-6)
        np.testing.assert_allclose(rod.weights, 0.5, atol=1e-6)
        thin = minimum_volume_ellipsoid(z[:1])
        assert thin.distance(z[:1])[0] == 0.0
        assert 0 < thin.semi_axes[0] < 1e-5

    def test_a_hundred_thousand_points(self, rng: np.random.Generator) -> None:
        z = cloud(rng, 100_000, 10)
        e = minimum_volume_ellipsoid(z)
        assert e.distance(z).max() <= 1.0
        assert e.gap <= 1e-7
        assert_same_ellipsoid(e, minimum_volume(z, 1e-9, 0.0))


def textbook(z: Array, floor: float) -> float:
    """Log-volume of program (2) with a floor in its textbook form: a symmetric matrix and its log-determinant."""
    dim = z.shape[1]
    a, b = cp.Variable((dim, dim), PSD=True), cp.Variable(dim)
    constraints = [cp.norm(a @ point + b) <= 1 for point in z]
    problem = cp.Problem(cp.Maximize(cp.log_det(a)), [*constraints, a << np.eye(dim) / floor])
    problem.solve(solver="SCS", eps_abs=1e-9, eps_rel=1e-9, max_iters=100_000)
    assert problem.status == cp.OPTIMAL
    return -float(np.linalg.slogdet(a.value)[1])


class TestFloor:
    @pytest.mark.parametrize("solver", CONE_SOLVERS)
    @pytest.mark.parametrize("dim", [2, 3, 5])
    def test_thin_sets_match_the_textbook(self, rng: np.random.Generator, solver: str, dim: int) -> None:
        """The floor lies between the shortest and the longest semi-axis of the ellipsoid without a floor."""
        z = rng.normal(size=(12 * dim, dim)) * np.geomspace(1.0, 10 ** -rng.uniform(0.5, 3), dim) @ rotation(rng, dim)
        z += rng.normal(size=dim) - z.mean(axis=0)
        axes = minimum_volume_ellipsoid(z, solver=solver).semi_axes
        floor = float(np.exp(rng.uniform(np.log(axes[-1] * 1.1), np.log(axes[0] * 0.9))))
        e = minimum_volume_ellipsoid(z, solver=solver, floor=floor)
        assert e.distance(z).max() <= 1.0
        assert e.semi_axes[-1] >= floor * (1 - 1e-12)
        assert (e.rank, e.floor) == (dim, floor)
        assert e.gap <= 1e-6
        assert e.log_volume == pytest.approx(textbook(z, floor), abs=10 * VOLUME * dim)
        assert e.log_volume == pytest.approx(minimum_volume(z, 1e-9, floor).log_volume, abs=VOLUME * dim)

    def test_an_inactive_floor_does_not_change_the_ellipsoid(self, rng: np.random.Generator) -> None:
        z = cloud(rng, 60, 3)
        plain = minimum_volume_ellipsoid(z)
        floored = minimum_volume_ellipsoid(z, floor=0.9 * float(plain.semi_axes[-1]))
        assert_same_ellipsoid(floored, plain)
        assert floored.floor == 0.0

    @pytest.mark.parametrize("solver", CONE_SOLVERS)
    def test_flat_sets_have_the_floor_as_thickness(self, rng: np.random.Generator, solver: str) -> None:
        """Across the hull the semi-axes equal the floor; within it they are those of the hull's own ellipsoid."""
        flat, basis, shift = cloud(rng, 50, 2), rotation(rng, 5)[:2], rng.normal(size=5)
        within = minimum_volume_ellipsoid(flat, solver=solver)
        floor = float(within.semi_axes[-1]) * 0.01
        e = minimum_volume_ellipsoid(flat @ basis + shift, solver=solver, floor=floor)
        np.testing.assert_allclose(e.semi_axes, [*within.semi_axes, floor, floor, floor], rtol=SHAPE)
        assert e.log_volume == pytest.approx(within.log_volume + 3 * np.log(floor), abs=5 * VOLUME)
        assert (e.rank, e.floor) == (2, floor)

    def test_flat_and_thin(self, rng: np.random.Generator) -> None:
        """The floor is active within the hull and across it."""
        flat, basis = rng.normal(size=(50, 3)) * np.array([1.0, 0.3, 1e-4]), rotation(rng, 5)[:3]
        e = minimum_volume_ellipsoid(flat @ basis, floor=0.05)
        np.testing.assert_allclose(e.semi_axes[2:], 0.05, rtol=1e-6)
        assert (e.rank, e.floor) == (3, 0.05)
        assert e.log_volume == pytest.approx(textbook(flat, 0.05) + 2 * np.log(0.05), abs=50 * VOLUME)

    @pytest.mark.parametrize("solver", CONE_SOLVERS)
    def test_a_floor_larger_than_the_set_gives_a_ball(self, rng: np.random.Generator, solver: str) -> None:
        z = cloud(rng, 30, 3)
        floor = 2.0 * float(np.linalg.norm(z - z.mean(axis=0), axis=1).max())
        e = minimum_volume_ellipsoid(z, solver=solver, floor=floor)
        np.testing.assert_allclose(e.semi_axes, floor, rtol=1e-7)
        assert e.distance(z).max() <= 1.0
        assert e.weights.sum() == pytest.approx(1.0)


class TestInaccurateResultsAreErrors:
    @pytest.mark.parametrize("rank", [1, 3])
    def test_flat_sets_are_solved_correctly_or_refused(self, rng: np.random.Generator, rank: int) -> None:
        """Without the affine hull, SCS reports flat sets as optimal with points far outside."""
        z = rng.normal(size=(40, rank)) @ rng.normal(size=(rank, 5)) + rng.normal(size=5)
        try:
            e: MinimumVolumeEllipsoid | None = minimum_volume_ellipsoid(z, solver="SCS", floor=1e-4)
        except ProgramError:
            e = None
        if e is not None:
            assert e.distance(z).max() <= 1.0
            assert e.log_volume == pytest.approx(minimum_volume(z, 1e-9, 1e-4).log_volume, abs=5 * VOLUME)

    def test_an_inaccurate_result_is_refused(self, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
        """SCS reports these results as optimal; the checks refuse them."""
        attempt(monkeypatch, {"eps_abs": 0.03, "eps_rel": 0.03})
        with pytest.raises(ProgramError, match=r"optimal, but"):
            minimum_volume_ellipsoid(cloud(rng, 60, 4), solver="SCS")
        x, y = rng.normal(size=(60, 3)), rng.normal(size=(40, 3)) + 3.0
        with pytest.raises(ProgramError, match=r"optimal, but the optimality conditions fail"):
            reduced_hull_points(x, y, solver="SCS")

    def test_a_solver_that_stops_early_raises_an_error(
        self, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        attempt(monkeypatch, {"max_iter": 2})
        with pytest.raises(ProgramError) as caught:
            minimum_volume_ellipsoid(cloud(rng, 30, 3))
        message = str(caught.value)
        for part in ["minimum-volume ellipsoid (2)", "30 points x 3 dims", "CLARABEL", "user_limit", "'SCS'", "native"]:
            assert part in message
        with pytest.raises(ProgramError, match=r"30 \+ 20 points x 2 dims"):
            reduced_hull_points(rng.normal(size=(30, 2)), rng.normal(size=(20, 2)))
        first, second = Ellipsoid.ball(np.zeros(2), 1.0), Ellipsoid.ball(np.array([1.0, 0.5]), 1.0)
        with pytest.raises(ProgramError, match=r"intersection \(3\), 2 ellipsoids x 2 dims"):
            intersection_ellipsoid(first, second)
        with pytest.raises(ProgramError, match="separation of two ellipsoids"):
            ellipsoids_intersect(first, second)
        with pytest.raises(ProgramError, match="distance to an ellipsoid"):
            distance_to_ellipsoid(first, np.array([[3.0, 1.0]]))

    def test_inaccurate_is_not_optimal(self, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
        """The status is only a warning in cvxpy. Here it is an error, after all settings have been tried."""
        impossible = {"eps_abs": 1e-20, "eps_rel": 1e-20, "max_iters": 50}
        attempt(monkeypatch, impossible)
        z = cloud(rng, 30, 2)
        with pytest.raises(ProgramError, match="optimal_inaccurate"):
            minimum_volume_ellipsoid(z, solver="SCS")
        attempt(monkeypatch, impossible, {"eps_abs": 1e-9, "eps_rel": 1e-9})
        assert minimum_volume_ellipsoid(z, solver="SCS").gap <= 1e-6

    def test_a_solver_without_the_cones_raises_an_error(self, rng: np.random.Generator) -> None:
        with pytest.raises(ProgramError, match=r"OSQP ended with status: .* Use solver='CLARABEL'"):
            minimum_volume_ellipsoid(cloud(rng, 10, 2), solver="OSQP")

    @pytest.mark.parametrize("solver", ["GUROBY", "native", ""])
    def test_unknown_solvers_are_refused(self, rng: np.random.Generator, solver: str) -> None:
        ball = Ellipsoid.ball(np.zeros(2), 1.0)
        z = rng.normal(size=(1, 2))
        calls: list[Callable[[], object]] = [
            lambda: minimum_volume_ellipsoid(z, solver=solver),
            lambda: reduced_hull_points(z, z, solver=solver),
            lambda: intersection_ellipsoid(ball, ball, solver=solver),
            lambda: ellipsoids_intersect(ball, ball, solver=solver),
            lambda: distance_to_ellipsoid(ball, z, solver=solver),
        ]
        for call in calls:
            with pytest.raises(ValueError, match=f"solver='{solver}' is not .* expected one of .*CLARABEL.*SCS"):
                call()

    def test_solver_names_are_case_insensitive(self, rng: np.random.Generator) -> None:
        assert minimum_volume_ellipsoid(cloud(rng, 10, 2), solver="clarabel").gap <= 1e-6


def overlapping(rng: np.random.Generator, dim: int) -> tuple[Ellipsoid, Ellipsoid]:
    """Two ellipsoids that share some volume; neither need contain the centre of the other."""
    first, second = random_ellipsoid(rng, dim), random_ellipsoid(rng, dim)
    common = inside(rng, first, 1)[0]
    return first, Ellipsoid(second.center + common - inside(rng, second, 1)[0], second.whitener)


class TestIntersection:
    @pytest.mark.parametrize("solver", CONE_SOLVERS)
    @pytest.mark.parametrize("dim", [1, 2, 3, 6])
    def test_covers_the_intersection(self, rng: np.random.Generator, solver: str, dim: int) -> None:
        first, second = overlapping(rng, dim)
        e = intersection_ellipsoid(first, second, solver=solver)
        z = np.concatenate([inside(rng, first, 20_000), inside(rng, second, 20_000)])
        common = z[(first.distance(z) <= 1) & (second.distance(z) <= 1)]
        assert (e.distance(common) <= 1 + 1e-9).all()
        assert e.log_volume <= min(first.log_volume, second.log_volume) + VOLUME * dim

    @pytest.mark.parametrize("dim", [2, 4])
    def test_is_the_smallest_member_of_the_pencil(self, rng: np.random.Generator, dim: int) -> None:
        """The reference is a search over the ratio of the two tau in sum_j tau_j q_j(z) <= 0."""
        first, second = overlapping(rng, dim)

        def log_volume(t: float) -> float:
            q1, q2 = (e.whitener.T @ e.whitener for e in (first, second))
            p = (1 - t) * q1 + t * q2
            center = np.linalg.solve(p, (1 - t) * q1 @ first.center + t * q2 @ second.center)
            slack1, slack2 = (1 - e.distance(center[None])[0] ** 2 for e in (first, second))
            return 0.5 * (dim * np.log((1 - t) * slack1 + t * slack2) - np.linalg.slogdet(p)[1])

        grid = np.linspace(0, 1, 201)
        best = int(np.argmin([log_volume(t) for t in grid]))
        bounds = (grid[max(best - 1, 0)], grid[min(best + 1, 200)])
        expected = minimize_scalar(log_volume, bounds=bounds, method="bounded", options={"xatol": 1e-10}).fun
        assert intersection_ellipsoid(first, second).log_volume == pytest.approx(expected, abs=10 * VOLUME * dim)

    def test_two_balls_give_a_ball(self, rng: np.random.Generator) -> None:
        """For two balls of radius r at distance 2 h, the result is a ball of radius sqrt(r^2 - h^2)."""
        radius, half = rng.uniform(1, 10), rng.uniform(0.1, 0.9)
        center, offset = rng.normal(size=3), rng.normal(size=3)
        offset *= half * radius / np.linalg.norm(offset)
        e = intersection_ellipsoid(Ellipsoid.ball(center - offset, radius), Ellipsoid.ball(center + offset, radius))
        np.testing.assert_allclose(e.semi_axes, radius * np.sqrt(1 - half**2), rtol=1e-5)
        np.testing.assert_allclose(e.center, center, atol=1e-4 * radius)

    def test_nested_ellipsoids_give_the_inner_one(self, rng: np.random.Generator) -> None:
        inner = random_ellipsoid(rng, 3)
        outer = Ellipsoid(inner.center + 0.1 * inner.semi_axes[-1], inner.whitener / 3.0)
        assert_same_ellipsoid(intersection_ellipsoid(outer, inner), inner)

    def test_disjoint_ellipsoids_are_refused(self) -> None:
        with pytest.raises(ValueError, match="disjoint"):
            intersection_ellipsoid(Ellipsoid.ball(np.zeros(2), 1.0), Ellipsoid.ball(np.array([3.0, 0.0]), 1.0))

    def test_unequal_dimensions_are_refused(self) -> None:
        for program in (intersection_ellipsoid, ellipsoids_intersect):
            with pytest.raises(ValueError, match="2 and 3 dimensions"):
                program(Ellipsoid.ball(np.zeros(2), 1.0), Ellipsoid.ball(np.zeros(3), 1.0))


class TestReducedHulls:
    @pytest.mark.parametrize("solver", ["CLARABEL", "SCS", "OSQP"])
    @pytest.mark.parametrize(("n", "m", "dim", "slack"), [(40, 25, 3, 1.0), (40, 25, 3, 2.5), (30, 50, 8, 100.0)])
    def test_optimality_conditions(
        self, rng: np.random.Generator, solver: str, n: int, m: int, dim: int, slack: float
    ) -> None:
        x, y = cloud(rng, n, dim), cloud(rng, m, dim)
        cap = min(slack / min(n, m), 1.0)
        r = reduced_hull_points(x, y, cap=cap, solver=solver)
        for weights, points, point in ((r.u, x, r.c), (r.v, y, r.d)):
            assert weights.min() >= 0
            assert weights.max() <= cap
            assert weights.sum() == pytest.approx(1.0, abs=1e-12)
            np.testing.assert_allclose(weights @ points, point, rtol=1e-9, atol=1e-9 * np.abs(points).max())
        # Along w = c - d, no feasible weights give a lower value in x, or a higher value in y, than the solution.
        w = r.c - r.d
        extent = max(np.abs(x - r.c).max(), np.abs(y - r.d).max())
        share = np.clip(1 - cap * np.arange(max(n, m)), 0, cap)
        lowest, highest = np.sort(x @ w) @ share[:n], np.sort(y @ w)[::-1] @ share[:m]
        assert w @ r.c - lowest <= 1e-6 * extent**2
        assert highest - w @ r.d <= 1e-6 * extent**2
        native = closest_points(x, y, cap)
        np.testing.assert_allclose(w, native.c - native.d, atol=1e-4 * extent)

    def test_clarabel_is_accurate(self, rng: np.random.Generator) -> None:
        x, y = rng.normal(size=(120, 4)), rng.normal(size=(70, 4)) + 1.0
        r, native = reduced_hull_points(x, y), closest_points(x, y, 1 / 70)
        np.testing.assert_allclose(r.c - r.d, native.c - native.d, atol=1e-7)

    def test_the_smaller_set_is_reduced_to_its_centroid(self, rng: np.random.Generator) -> None:
        x, y = rng.normal(size=(20, 2)), rng.normal(size=(50, 2)) + 2.0
        np.testing.assert_allclose(reduced_hull_points(x, y).c, x.mean(axis=0), atol=1e-6)
        balanced = reduced_hull_points(x, y[:20])
        np.testing.assert_allclose(balanced.d, y[:20].mean(axis=0), atol=1e-6)

    def test_full_hulls_of_known_distance(self, rng: np.random.Generator) -> None:
        """Two boxes with facing corners; a cap above 1 is equivalent to 1."""
        x = np.concatenate([rng.uniform(-1, 0, (30, 3)), np.zeros((1, 3))])
        gap = rng.uniform(0.5, 2.0, 3)
        y = np.concatenate([rng.uniform(0, 1, (20, 3)), np.zeros((1, 3))]) + gap
        for cap in (1.0, 7.0):
            r = reduced_hull_points(x, y, cap=cap)
            np.testing.assert_allclose(r.c, 0.0, atol=1e-6)
            np.testing.assert_allclose(r.d, gap, atol=1e-6)

    def test_hulls_with_a_common_point(self, rng: np.random.Generator) -> None:
        x = rng.normal(size=(60, 2))
        r = reduced_hull_points(x, x + 0.01, cap=0.5)
        np.testing.assert_allclose(r.c, r.d, atol=1e-4)

    @pytest.mark.parametrize("cap", [0.049, 0.0, -1.0, float("nan")])
    def test_infeasible_caps_are_refused(self, rng: np.random.Generator, cap: float) -> None:
        with pytest.raises(ValueError, match=r"below 1/min\(N, M\) = 0.05: 20 weights"):
            reduced_hull_points(rng.normal(size=(30, 2)), rng.normal(size=(20, 2)), cap=cap)


class TestSeparationAndDistance:
    @pytest.mark.parametrize("solver", CONE_SOLVERS)
    @pytest.mark.parametrize("dim", [1, 2, 5])
    def test_ellipsoids_just_before_and_after_touching(self, rng: np.random.Generator, solver: str, dim: int) -> None:
        """The second ellipsoid is placed to touch the first, then moved slightly together or apart."""
        first, second = random_ellipsoid(rng, dim), random_ellipsoid(rng, dim)
        normal = rng.normal(size=dim)
        reaches = [np.linalg.solve(e.whitener.T, normal) for e in (first, second)]
        first_tip, second_tip = (
            np.linalg.solve(e.whitener, reach) / np.linalg.norm(reach)
            for e, reach in zip((first, second), reaches, strict=True)
        )
        for factor, meet in ((1 - 1e-4, True), (1 + 1e-4, False)):
            moved = Ellipsoid(first.center + factor * (first_tip + second_tip), second.whitener)
            assert ellipsoids_intersect(first, moved, solver=solver) is meet
            assert ellipsoids_intersect(moved, first, solver=solver) is meet
            assert first.intersects(moved) is meet

    def test_agrees_with_the_scalar_equation(self, rng: np.random.Generator) -> None:
        answers = []
        for _ in range(20):
            dim = int(rng.integers(1, 7))
            first, second = random_ellipsoid(rng, dim), random_ellipsoid(rng, dim)
            answers.append(ellipsoids_intersect(first, second))
            assert answers[-1] == first.intersects(second)
        assert ellipsoids_intersect(first, first)

    @pytest.mark.parametrize("solver", CONE_SOLVERS)
    @pytest.mark.parametrize("dim", [1, 2, 7])
    def test_distance_agrees_with_the_secular_equation(self, rng: np.random.Generator, solver: str, dim: int) -> None:
        e = random_ellipsoid(rng, dim)
        z = e.center + rng.normal(size=(12, dim)) * 10 ** rng.uniform(-1, 3, (12, 1))
        expected = e.euclidean_distance(z)
        scale = float(e.semi_axes[0]) + expected
        assert (np.abs(distance_to_ellipsoid(e, z, solver=solver) - expected) <= 1e-7 * scale).all()

    def test_distance_is_zero_inside(self, rng: np.random.Generator) -> None:
        e = random_ellipsoid(rng, 3)
        assert (distance_to_ellipsoid(e, e.center + 0.99 * (inside(rng, e, 50) - e.center)) == 0).all()

"""Section 3.6 of the paper: growth of the time of its two programs with the number of points and of features.

Claims: the reduced hulls (4), the dual of a support vector machine, cost O(N^3) in the training set size N; the
minimum-volume ellipsoid (2), by a barrier method, costs O(sqrt(N)). The second bound counts Newton steps, and each step
costs more with more points. The script fits the exponents of CPU time on one thread for the native solvers and for the
paper's programs through cvxpy, all points at once. It also counts the steps of cvxpy's interior-point solver.

    python -m experiments.paper.complexity

Points are Gaussian. The reduced hulls get two overlapping classes of N and N / 2 points, because for equal classes the
solution is the centroids. ``--solver`` names a cvxpy solver other than Clarabel to compare with the native ones.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import cvxpy as cp
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from threadpoolctl import threadpool_limits

from experiments.harness import arguments, cpu_time, write_results
from experiments.paper.regions import reproduced
from experiments.pictures import legend_below, panel, save_figure
from sepc_torch import minimum_volume_ellipsoid, reduced_hull_points
from sepc_torch.plot import COLORS, MARKERS

DIMS, POINTS = 5, 1000  # held fixed while the other grows
CAPTIONS = {
    "complexity": "Section 3.6: CPU time of both programs with the number of points and of features, and the steps of "
    "the interior-point solver, with what the paper states as dotted lines."
}


class Sweep(NamedTuple):
    """One line of the picture: a program and solver over growing N or D."""

    program: str
    solver: str
    grows: str
    sizes: tuple[int, ...]


def sweeps(stated: str, smoke: bool) -> list[Sweep]:
    """The sweeps to run, with sizes that end in reasonable time."""
    if smoke:
        return [Sweep(p, s, "N", (50, 100, 200)) for p in ("ellipsoid", "hulls") for s in ("native", stated)]
    many, wide = (100, 300, 1000, 3000, 10_000, 30_000, 100_000), (2, 4, 8, 16, 32, 64)
    return [
        Sweep("ellipsoid", "native", "N", many),
        Sweep("ellipsoid", stated, "N", many[:4]),
        Sweep("hulls", "native", "N", many),
        Sweep("hulls", stated, "N", many[:5]),
        Sweep("ellipsoid", "native", "D", wide),
        Sweep("ellipsoid", stated, "D", (2, 4, 8, 12)),
        Sweep("hulls", "native", "D", wide),
        Sweep("hulls", stated, "D", wide),
    ]


def stated_ellipsoid(x: np.ndarray, solver: str) -> int:
    """Solve program (2) with a symmetric A and a constraint for every point; return the solver's iterations."""
    dims = x.shape[1]
    a, b = cp.Variable((dims, dims), PSD=True), cp.Variable((dims, 1))
    problem = cp.Problem(cp.Maximize(cp.log_det(a)), [cp.norm(a @ x.T + b, axis=0) <= 1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # "may be inaccurate": only the number of steps matters here
        problem.solve(solver=solver)
    return int(problem.solver_stats.num_iters)


def task(sweep: Sweep, size: int, rng: np.random.Generator) -> Callable[[], object]:
    """The function to time."""
    count, dims = (size, DIMS) if sweep.grows == "N" else (POINTS, size)
    x = rng.normal(size=(count, dims))
    if sweep.program == "ellipsoid":
        if sweep.solver == "native":
            return lambda: minimum_volume_ellipsoid(x)
        return lambda: stated_ellipsoid(x, sweep.solver)
    y = rng.normal(size=(count // 2, dims)) + 1.0 / np.sqrt(dims)
    return lambda: reduced_hull_points(x, y, solver=sweep.solver)


def measure(sweep: Sweep, draws: int, seed: int) -> dict[str, Any]:
    """Median CPU time over draws, the steps if the solver reports them, and the exponents."""
    seconds, steps = [], []
    for size in sweep.sizes:
        found = [
            cpu_time(task(sweep, size, np.random.default_rng([seed, size, draw])), 3 if size <= 1000 else 1)
            for draw in range(draws)
        ]
        seconds.append(float(np.median([taken for taken, _ in found])))
        steps.append([result for _, result in found if isinstance(result, int)])
    row: dict[str, Any] = {**sweep._asdict(), "seconds": seconds, "exponent": exponent(sweep.sizes, seconds)}
    if all(steps):
        counts = [float(np.median(step)) for step in steps]
        row |= {"steps": counts, "exponent_of_steps": exponent(sweep.sizes, counts)}
    return row


def exponent(sizes: tuple[int, ...], values: list[float]) -> float:
    """The slope of log value over log size for the larger sizes; fixed costs dominate the smaller ones."""
    last = slice(-max(3, (len(sizes) + 1) // 2), None)
    return float(np.polyfit(np.log(sizes[last]), np.log(values[last]), 1)[0])


def rows(found: list[dict[str, Any]]) -> list[dict[str, str]]:
    by = {(r["program"], "native" if r["solver"] == "native" else "stated", r["grows"]): r for r in found}
    growth = {key: f"{r['exponent']:.1f}" for key, r in by.items()}
    name = next(r["solver"] for r in found if r["solver"] != "native")
    steps = by["ellipsoid", "stated", "N"]["exponent_of_steps"]
    largest = {key: f"{max(r['sizes']):,}".replace(",", " ") for key, r in by.items()}

    def times(program: str, grows: str) -> str:
        native, stated = (program, "native", grows), (program, "stated", grows)
        return (
            f"{grows}^{growth[native]} native to {largest[native]}, "
            f"{grows}^{growth[stated]} {name} to {largest[stated]}"
        )

    return [
        reproduced(
            "Section 3.6: time of the reduced hulls (4) with N points",
            "N^3, as for a support vector machine",
            times("hulls", "N"),
            "The bound is of dense quadratic programs; this one has D features, and an interior-point step that uses "
            "that can be linear in N.",
        ),
        reproduced(
            "Section 3.6: time of the minimum-volume ellipsoid (2) with N points",
            "N^0.5 (Newton steps)",
            f"steps N^{steps:.2f}; time {times('ellipsoid', 'N')}",
            "N^0.5 bounds the steps, not the time: each step reads all N constraints.",
        ),
        reproduced(
            "Section 3.6: time with D features",
            "not given",
            f"ellipsoid {times('ellipsoid', 'D')}; hulls {times('hulls', 'D')}",
        ),
    ]


def draw_growth(found: list[dict[str, Any]]) -> Figure:
    figure, axes = plt.subplots(1, 3, figsize=(15, 5.4), layout="constrained")
    programs = {"ellipsoid": "ellipsoid (2)", "hulls": "reduced hulls (4)"}
    for ax, grows in zip(axes, "ND", strict=False):
        for r in (r for r in found if r["grows"] == grows):
            c = list(programs).index(r["program"])
            native = r["solver"] == "native"
            label = f"{programs[r['program']]}, {r['solver']}: ${grows}^{{{r['exponent']:.1f}}}$"
            style = {
                "color": COLORS[c],
                "marker": MARKERS[c],
                "ls": "-" if native else "--",
                "mfc": None if native else "w",
            }
            ax.loglog(r["sizes"], r["seconds"], label=label, **style)
        ax.set(ylabel="CPU seconds, one thread")
    stated = next(r for r in found if "steps" in r and r["grows"] == "N")
    label = f"ellipsoid (2), {stated['solver']}: $N^{{{stated['exponent_of_steps']:.2f}}}$"
    axes[2].loglog(stated["sizes"], stated["steps"], color=COLORS[0], marker=MARKERS[0], ls="--", mfc="w", label=label)
    hulls = next(r for r in found if r["program"] == "hulls" and r["solver"] != "native" and r["grows"] == "N")
    _guide(axes[0], hulls["sizes"][1:3], hulls["seconds"][1], 3.0, "the paper's $N^3$")
    _guide(axes[2], stated["sizes"], stated["steps"][0], 0.5, "the paper's $N^{0.5}$")
    panel(axes[0], "a", f"time with N points, {DIMS} features")
    panel(axes[1], "b", f"time with D features, {POINTS} points")
    panel(axes[2], "c", "interior-point steps with N points")
    axes[0].set_xlabel("points N")
    axes[1].set_xlabel("features D")
    axes[2].set(xlabel="points N", ylabel="steps")
    for axis, ticks in ((axes[1].xaxis, (2, 4, 8, 16, 32, 64)), (axes[2].yaxis, (10, 20, 40, 80))):
        axis.set_ticks(ticks, labels=[str(tick) for tick in ticks])
        axis.set_minor_locator(NullLocator())
    for ax in axes:
        ax.grid(alpha=0.3)
        legend_below(ax, 1)
    return figure


def _guide(ax: Axes, sizes: list[int], start: float, power: float, label: str) -> None:
    x = np.asarray(sizes, dtype=float)
    ax.loglog(x, start * (x / x[0]) ** power, color="0.5", ls=":", lw=1.6, label=label)


def main() -> None:
    options = arguments(__doc__, solver=True).parse_args()
    stated = "CLARABEL" if options.solver == "native" else options.solver
    found = []
    with threadpool_limits(1):
        stated_ellipsoid(np.random.default_rng(options.seed).normal(size=(20, 2)), stated)  # the first call imports
        for sweep in sweeps(stated, options.smoke):
            row = measure(sweep, 1 if options.smoke else 3 if sweep.solver == stated else 7, options.seed)
            found.append(row)
            times = " ".join(f"{n}: {s * 1e3:.3g} ms" for n, s in zip(row["sizes"], row["seconds"], strict=True))
            print(f"{sweep.program}, {sweep.solver}, {sweep.grows}^{row['exponent']:.2f}: {times}", flush=True)
            if "steps" in row:
                print(f"  steps {row['steps']}, {sweep.grows}^{row['exponent_of_steps']:.2f}")
    if options.smoke:
        return
    save_figure(draw_growth(found), "complexity")
    fixed = {"dims": DIMS, "points": POINTS}
    results = {"solver": stated, "fixed": fixed, "sweeps": found, "rows": rows(found), "figures": CAPTIONS}
    write_results("complexity", options, ("cvxpy", "clarabel"), results)


if __name__ == "__main__":
    main()

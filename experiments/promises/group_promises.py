"""Promises by group: does one threshold per class or region keep the risk in each, and what does one threshold do?

A head is fitted to a network's embeddings and its joint score to a part of the calibration rows, once. The other rows
are the population: every draw takes ranked points from it with replacement, so that the risk of every group is known
exactly. A draw is violated if the risk exceeds the promise in any group that accepts. The same groups are then judged
under a single threshold for the same risk.

    SEPC_DATA=... python -m experiments.promises.group_promises

The heads and populations can be stored once (``--points FILE --draws 0``) and drawn from on another machine
(``--points FILE --jobs 16``), which then needs neither the data nor a solver.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from joblib import Parallel, delayed

from experiments.harness import arguments, write_results
from sepc_torch import TrustHead
from sepc_torch.head.calibration.label_calibration import LabelCalibration
from sepc_torch.head.promises.groups import accept_by_group
from sepc_torch.model.sepc import SEPC
from sepc_torch.shapes import Array

if TYPE_CHECKING:
    from experiments.panel.cases import Case

RISK, DELTA = 0.05, 0.05
TABLES = ("penbased", "satimage", "letter")
KINDS = ("predicted", "region", "class")
# Training rows of a head, and ranked points of a draw.
MOST_TRAIN, RANKED = 10_000, 2000
# Draws of one task of a worker; every task has random numbers of its own.
CHUNK = 50


class Population(NamedTuple):
    """Calibration and regions of a head, and the points that ranked points are drawn from.

    The columns of ``points`` are the joint score, correctness, label, true class and region.
    """

    name: str
    labels: LabelCalibration
    sepc: SEPC
    points: dict[str, Array]


def cases(seed: int, smoke: bool) -> list[Case]:
    """The networks: three KEEL tables, Adult, and two ResNets where their embeddings are stored."""
    # Imported here: these modules need packages that a machine which only draws may lack.
    from experiments.panel.cases import paper_tables, resnet_case, table_case, tables

    if smoke:
        return [table_case("digits", paper_tables()["digits"], seed, epochs=5)]
    sets = tables(TABLES) | {name: data for name, data in paper_tables().items() if name == "adult"}
    found = [table_case(name, data, seed) for name, data in sets.items()]
    return found + [case for case in (resnet_case(10), resnet_case(100)) if case is not None]


def population(case: Case, seed: int) -> Population:
    """Fit and calibrate a head, and judge the other rows."""
    rng = np.random.default_rng([seed, len(case.train.y)])
    rows = rng.permutation(len(case.train.y))[:MOST_TRAIN]
    head = TrustHead.fit(case.train.z[rows], case.train.y[rows], classes=np.arange(case.train.logits.shape[1]))
    # Half of the calibration rows fit the scores; the other half joins the population.
    fitted = slice(0, len(case.calibration.y) // 2)
    head.calibrate(*(part[fitted] for part in case.calibration), rank_fraction=0.1)
    z, y, logits = (
        np.concatenate([part[len(case.calibration.y) // 2 :], more])
        for part, more in zip(case.calibration, case.test, strict=True)
    )
    out = head.judge(z, logits)
    columns = {
        "joint": out.joint.double(),
        "right": out.network_label == torch.from_numpy(y),
        "label": out.network_label,
        "class": torch.from_numpy(y),
        "region": out.nearest.long(),
    }
    assert head.calibration is not None
    points = {name: column.numpy() for name, column in columns.items()}
    return Population(case.name, head.calibration.network, head.sepc, points)


def with_ranked(labels: LabelCalibration, points: dict[str, Array], rows: Array) -> LabelCalibration:
    """The calibration with other ranked points; points that are not ranked decide which groups merge, as before."""
    drawn = copy.deepcopy(labels)
    fitted = np.delete(np.arange(len(labels.point_label)), labels.ranked_rows.numpy())
    drawn.ranked_joint = torch.from_numpy(points["joint"][rows])
    drawn.ranked_right = torch.from_numpy(points["right"][rows])
    drawn.ranked_rows = torch.arange(len(rows))
    for name in ("label", "class", "region"):
        before = getattr(labels, f"point_{name}")[fitted]
        setattr(drawn, f"point_{name}", torch.cat([torch.from_numpy(points[name][rows]), before]))
    return drawn


def risks(accept: Array, right: Array, group: Array, count: int) -> Array:
    """Share of wrong labels among the accepted points of each group; zero where none is accepted."""
    taken = np.bincount(group[accept], minlength=count)
    return np.bincount(group[accept & ~right], minlength=count) / np.maximum(taken, 1)


def draws(known: Population, by: str, count: int, seed: list[int]) -> dict[str, Any]:
    """Results of some draws of the ranked points: one value per draw, and the numbers of groups."""
    rng, points = np.random.default_rng(seed), known.points
    key = points["label" if by == "predicted" else by]
    label, region = torch.from_numpy(points["label"]), torch.from_numpy(points["region"])
    rows = []
    for _ in range(count):
        labels = with_ranked(known.labels, points, rng.integers(0, len(key), min(RANKED, len(key))))
        table = accept_by_group(labels, known.sepc, RISK, DELTA, by, joint=True)
        members: dict[Any, int] = {member: g for g, row in enumerate(table.groups) for member in row.group}
        group = np.array([members[k] for k in range(len(members))])[key]
        accept = (torch.from_numpy(points["joint"]) >= labels.least_score(label, region, None)).numpy()
        labels.accept(RISK, DELTA, None)
        single = points["joint"] >= float(labels.threshold)
        worst = risks(accept, points["right"], group, len(table.groups)).max()
        single_worst = risks(single, points["right"], group, len(table.groups)).max()
        found = np.mean([row.found for row in table.groups])
        rows.append((worst > RISK, accept.mean(), found, worst, single_worst, single.mean()))
    names = ("violations", "coverage", "found", "worst_risk", "single_worst_risk", "single_coverage")
    columns = dict(zip(names, np.array(rows, dtype=float).T, strict=True))
    return {"groups": len(table.groups), "merged_from": len(members), **columns}


def summary(known: Population, by: str, count: int, seed: int, jobs: int) -> dict[str, Any]:
    """Violations, coverage and the worst group over many draws of the ranked points."""
    sizes = [CHUNK] * (count // CHUNK) + [count % CHUNK] * (count % CHUNK > 0)
    tasks = (delayed(draws)(known, by, size, [seed, KINDS.index(by), i]) for i, size in enumerate(sizes))
    parts = Parallel(n_jobs=jobs)(tasks)
    found = {name: parts[0][name] for name in ("groups", "merged_from")}
    for name in parts[0].keys() - found.keys():
        middle = np.median if "worst" in name else np.mean
        found[name] = float(middle(np.concatenate([part[name] for part in parts])))
    return found


def main() -> None:
    parser = arguments(__doc__, jobs=True)
    parser.add_argument("--draws", type=int, default=1000, help="draws of the ranked points for every network and kind")
    parser.add_argument("--points", type=Path, help="file of heads and populations; it is written if it is missing")
    options = parser.parse_args()
    count = 20 if options.smoke else options.draws
    warnings.filterwarnings("ignore", message="Most calibration points")
    if options.points is not None and options.points.exists():
        networks = pickle.loads(options.points.read_bytes())
    else:
        networks = [population(case, options.seed) for case in cases(options.seed, options.smoke)]
        if options.points is not None:
            options.points.write_bytes(pickle.dumps(networks))
    rows = []
    for known in networks if count else []:
        error = float(1.0 - known.points["right"].mean())
        for by in KINDS:
            found = summary(known, by, count, options.seed, options.jobs)
            rows.append({"network": known.name, "error": error, "by": by, **found})
            print(rows[-1], flush=True)
    if not options.smoke and count:
        results = {"risk": RISK, "delta": DELTA, "draws": count, "ranked": RANKED, "rows": rows}
        write_results("group_promises", options, ("torch", "scikit-learn"), results)


if __name__ == "__main__":
    main()

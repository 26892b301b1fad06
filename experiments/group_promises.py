"""Promises by group: does one threshold per class or region keep the risk in each, and what does one threshold do?

A head is fitted to a network's embeddings and its joint score to a part of the calibration rows, once. The other rows
are the population: every draw takes ranked points from it with replacement, so that the risk of every group is known
exactly. A draw is violated if the risk exceeds the promise in any group that accepts. The same groups are then judged
under a single threshold for the same risk.

    SEPC_DATA=... python experiments/group_promises.py
"""

from __future__ import annotations

import copy
import time
import warnings
from typing import Any

import numpy as np
import torch
from harness import arguments, environment, write_results
from panel_data import Case, paper_tables, resnet_case, table_case, tables

from sepc_torch import TrustHead
from sepc_torch.head.groups import accept_by_group
from sepc_torch.head.label_calibration import LabelCalibration
from sepc_torch.shapes import Array

RISK, DELTA = 0.05, 0.05
TABLES = ("penbased", "satimage", "letter")
KINDS = ("predicted", "region", "class")
# Training rows of a head, and ranked points of a draw.
MOST_TRAIN, RANKED = 10_000, 2000


def cases(seed: int, smoke: bool) -> list[Case]:
    """The networks: three KEEL tables, Adult, and two ResNets where their embeddings are stored."""
    if smoke:
        return [table_case("digits", paper_tables()["digits"], seed, epochs=5)]
    sets = tables(TABLES) | {name: data for name, data in paper_tables().items() if name == "adult"}
    found = [table_case(name, data, seed) for name, data in sets.items()]
    return found + [case for case in (resnet_case(10), resnet_case(100)) if case is not None]


def population(case: Case, rng: np.random.Generator) -> tuple[TrustHead, dict[str, Array]]:
    """A calibrated head, and the joint score, correctness, label, true class and region of the population."""
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
    return head, {name: column.numpy() for name, column in columns.items()}


def with_ranked(labels: LabelCalibration, points: dict[str, Array], rows: Array) -> LabelCalibration:
    """The calibration with other ranked points; points that are not ranked decide which groups merge, as before."""
    drawn = copy.deepcopy(labels)
    fitted = np.delete(np.arange(len(labels.point_label)), labels.held_rows.numpy())
    drawn.held_joint = torch.from_numpy(points["joint"][rows])
    drawn.held_right = torch.from_numpy(points["right"][rows])
    drawn.held_rows = torch.arange(len(rows))
    for name in ("label", "class", "region"):
        before = getattr(labels, f"point_{name}")[fitted]
        setattr(drawn, f"point_{name}", torch.cat([torch.from_numpy(points[name][rows]), before]))
    return drawn


def risks(accept: Array, right: Array, group: Array, count: int) -> Array:
    """Share of wrong labels among the accepted points of each group; zero where none is accepted."""
    taken = np.bincount(group[accept], minlength=count)
    return np.bincount(group[accept & ~right], minlength=count) / np.maximum(taken, 1)


def draws(head: TrustHead, points: dict[str, Array], by: str, count: int, rng: np.random.Generator) -> dict[str, Any]:
    """Violations, coverage and the worst group over many draws of the ranked points."""
    assert head.calibration is not None
    key = torch.from_numpy(points["label" if by == "predicted" else by])
    ranked = min(RANKED, len(key))
    violated, coverage, worst, single_worst, single_coverage, found = [], [], [], [], [], []
    for _ in range(count):
        labels = with_ranked(head.calibration.network, points, rng.integers(0, len(key), ranked))
        table = accept_by_group(labels, head.sepc, RISK, DELTA, by, joint=True)
        members: dict[Any, int] = {member: g for g, row in enumerate(table.groups) for member in row.group}
        group = np.array([members[k] for k in range(len(members))])[key.numpy()]
        label, region = torch.from_numpy(points["label"]), torch.from_numpy(points["region"])
        accept = (torch.from_numpy(points["joint"]) >= labels.least_score(label, region, None)).numpy()
        labels.accept(RISK, DELTA, None)
        single = points["joint"] >= float(labels.threshold)
        by_group = risks(accept, points["right"], group, len(table.groups))
        violated.append(bool((by_group > RISK).any()))
        worst.append(by_group.max())
        coverage.append(accept.mean())
        single_worst.append(risks(single, points["right"], group, len(table.groups)).max())
        single_coverage.append(single.mean())
        found.append(np.mean([row.found for row in table.groups]))
    return {
        "groups": len(table.groups),
        "merged_from": len(members),
        "violations": float(np.mean(violated)),
        "coverage": float(np.mean(coverage)),
        "found": float(np.mean(found)),
        "worst_risk": float(np.median(worst)),
        "single_worst_risk": float(np.median(single_worst)),
        "single_coverage": float(np.mean(single_coverage)),
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--draws", type=int, default=500, help="draws of the ranked points for every network and kind")
    options = parser.parse_args()
    count = 20 if options.smoke else options.draws
    warnings.filterwarnings("ignore", message="Most calibration points")
    rows = []
    print("network    by         groups  violations  found  coverage  worst risk | single threshold: coverage  worst")
    for case in cases(options.seed, options.smoke):
        rng = np.random.default_rng([options.seed, len(case.train.y)])
        begun = time.process_time()
        head, points = population(case, rng)
        error = float(1.0 - points["right"].mean())
        for by in KINDS:
            row = {"network": case.name, "error": error, "by": by, **draws(head, points, by, count, rng)}
            rows.append(row)
            print(
                f"{case.name:10s} {by:10s} {row['groups']:6d} {row['violations']:10.1%} {row['found']:7.0%} "
                f"{row['coverage']:8.1%} {row['worst_risk']:10.1%}  | {row['single_coverage']:18.1%} "
                f"{row['single_worst_risk']:14.1%}",
                flush=True,
            )
        print(f"{case.name}: {time.process_time() - begun:.0f} CPU seconds", flush=True)
    if not options.smoke:
        results = {
            "command": "python experiments/group_promises.py",
            "environment": environment("torch", "scikit-learn"),
            "seed": options.seed,
            "risk": RISK,
            "delta": DELTA,
            "draws": count,
            "ranked": RANKED,
            "rows": rows,
        }
        print(f"written: {write_results('group_promises', results).name}")


if __name__ == "__main__":
    main()

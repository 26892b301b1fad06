"""Scores that were added after the last run of the trust panel, on its four networks.

``baseline_scores`` has more scores than the stored results of the panel: ReAct, ASH, SCALE, DICE, NCI, SHE, KL
matching, MaxLogit-pNorm and the margins of the logits were added later. This script measures those without a stored
figure on the panel's networks, with its rows, its questions and its seeds, so that their figures stand beside the
stored ones. A seed changes only the draw of rows for mistakes and unknowns together. Constants are those of the
authors; no score is tuned.

    SEPC_DATA=... python -m experiments.panel.later_scores        # about one minute
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from experiments.harness import arguments, load, write_results
from experiments.panel.cases import Case, clinc_case, fashion_case, paper_tables, resnet_case, table_case
from experiments.panel.scores import PEERS, Scores, groups, joint, tensor
from experiments.panel.trust_panel import SEEDS, complete
from sepc_torch.metrics import naurc, scod_aurc, unknown_auroc
from sepc_torch.metrics.baselines import baseline_scores
from sepc_torch.metrics.compare import BASELINES


def score(case: Case, names: list[str]) -> Scores:
    """These scores of every group of rows."""
    assert case.classifier is not None
    parts = groups(case)
    z, logits = (tensor(np.concatenate([getattr(rows, part) for rows in parts.values()])) for part in ("z", "logits"))
    weight, bias = (tensor(part) for part in case.classifier)
    calibration = tensor(case.calibration.logits).double(), tensor(case.calibration.y)
    train = tensor(case.train.z), tensor(case.train.y)
    found = baseline_scores(*train, z, logits.double(), tensor(case.train.logits), calibration, (weight, bias), names)
    sizes = [len(rows.y) for rows in parts.values()]
    return {name: dict(zip(parts, values.split(sizes), strict=True)) for name, values in found.items()}


def run(case: Case, names: list[str], seeds: list[int]) -> list[dict[str, Any]]:
    """The figures of the scores by question, as the panel stores them, one row for each seed."""
    scores, right = score(replace(case, shifted={}), names), tensor(case.test.right)
    figures: dict[str, dict[str, float]] = {"naurc": {}}
    for name, values in scores.items():
        figures["naurc"][name] = float(naurc(values["test"], right))
        for group in case.unknown:
            figures.setdefault(f"unknowns: {group}", {})[name] = float(unknown_auroc(values["test"], values[group]))
    rows = []
    for seed in seeds:
        both: dict[str, dict[str, float]] = {f"both: {group}": {} for group in case.unknown}
        for name, values in scores.items():
            for group in case.unknown:
                both[f"both: {group}"][name] = 1000 * float(scod_aurc(*joint(case, values, group, seed)))
        rows.append({"set": case.name, "seed": seed, "near": list(case.near), "figures": figures | both})
    return rows


def main() -> None:
    options = arguments(__doc__).parse_args()
    torch.set_num_threads(1)
    seeds = [options.seed + number for number in range(1 if options.smoke else SEEDS)]
    names = [name for name in BASELINES if name not in load("trust_panel")["peers"]]
    if options.smoke:
        digits = table_case("digits", paper_tables()["digits"], options.seed, open_set=True, epochs=5)
        names, cases = list(BASELINES)[:3], [digits]
    else:
        found = [fashion_case(), clinc_case(), resnet_case(10), resnet_case(100)]
        cases = [case for case in found if case is not None]
    if not names:
        print("nothing to do: the stored panel has every score")
        return
    runs = [row for case in cases for row in run(case, names, seeds)]
    for name in names:
        means = [np.mean([row["figures"]["naurc"][name] for row in runs if row["set"] == case.name]) for case in cases]
        print(f"{PEERS[name]:18} NAURC", *(f"{value:.3f}" for value in means))
    if options.smoke or not complete(case.name for case in cases):
        return
    peers = {name: PEERS[name] for name in names}
    write_results("later_scores", options, ("torch",), {"seeds": seeds, "peers": peers, "runs": runs})


if __name__ == "__main__":
    main()

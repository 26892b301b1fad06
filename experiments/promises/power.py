"""How much do valid rules accept at a promised risk, and how often do they break it?

The rows of a set that neither its network nor the head was fitted on are the population: calibration rows are drawn
from it with replacement, so that the risk of a threshold is a sum over all rows, without noise of its own. The risk is
half of the network's error. All rules but the last promise the risk with probability 1 - delta:

- ``head``: ``TrustHead.accept_at``; ``search``: the exact search over all thresholds, for the same joint scores;
- ``softmax``: the exact search for the largest softmax probability, with all rows;
- ``sequence``: Learn then Test for softmax, binomial tests in a fixed sequence from the highest score (Angelopoulos et
  al. 2021), from the least number of rows that can promise the risk; this is what MAPIE's controllers do;
- ``tuned``: the same, from the best threshold of three rows in ten, which are not tested (split fixed sequence);
- ``sgr``: selection with guaranteed risk for softmax (Geifman and El-Yaniv 2017);
- ``average``: ``accept_at(average=True)``, which promises less: the risk on average over calibration sets.

    SEPC_DATA=... python -m experiments.promises.power
"""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from joblib import Parallel, delayed

from experiments.harness import arguments, write_results
from sepc_torch import TrustHead
from sepc_torch.head.promises.conformal import (
    binomial_tail,
    counts_above,
    least_points,
    passed_sequence,
    risk_threshold,
)
from sepc_torch.shapes import Array

if TYPE_CHECKING:
    from experiments.panel.cases import Case

DELTA, SHARE = 0.1, 0.5
ROWS = (200, 1000, 5000)
TABLES = ("satimage", "phoneme")
STEPS = 200


def cases(seed: int, smoke: bool) -> list[Case]:
    """Networks on tables, and those of SEPC_DATA."""
    from experiments.panel.cases import paper_tables, resnet_case, table_case, tables

    if smoke:
        return [table_case("digits", paper_tables()["digits"], seed, epochs=5)]
    found = [table_case(name, data, seed) for name, data in tables(TABLES).items()]
    return found + [case for case in (resnet_case(10), resnet_case(100)) if case is not None]


def sequence(score: Array, right: Array, grid: Array, expected: Array, risk: float) -> float:
    """The last threshold of a grid that passes, from the least expected tail on."""
    ordered, wrong = np.sort(score), np.sort(score[~right])
    accepted = len(ordered) - np.searchsorted(ordered, grid)
    errors = len(wrong) - np.searchsorted(wrong, grid)
    last = passed_sequence(binomial_tail(errors, accepted, risk), expected, DELTA)
    return math.inf if last is None else float(grid[last])


def selection(score: Array, right: Array, risk: float) -> float:
    """Selection with guaranteed risk: a binary search over the ordered scores, each step at a share of delta."""
    order = np.argsort(-score, kind="stable")
    value, errors = score[order], (~right[order]).cumsum()
    steps = math.ceil(math.log2(len(score)))
    low, high, best = 0, len(score) - 1, math.inf
    for _ in range(steps):
        middle = (low + high + 1) // 2
        kept = binomial_tail(errors[middle : middle + 1], np.array([middle + 1]), risk)[0] <= DELTA / steps
        best, low, high = (float(value[middle]), middle, high) if kept else (best, low, max(middle - 1, 0))
        if low >= high:
            break
    return best


def of_softmax(score: Array, right: Array, risk: float) -> dict[str, float]:
    """Thresholds of the rules for softmax."""
    as_tensors = torch.from_numpy(score), torch.from_numpy(right)
    grid = np.unique(np.quantile(score, np.linspace(0, 1, STEPS)))[::-1]
    least = min(least_points(risk, DELTA) / len(score), 1.0)
    first = (np.arange(len(grid)) < min(math.ceil(2 * least * len(grid)), len(grid) - 1)).astype(float)
    cut = int(0.3 * len(score))
    value, accepted, errors = counts_above(*(part[:cut] for part in as_tensors))
    more = (len(score) - cut) / cut
    expected = binomial_tail(more * np.minimum(errors + 0.5, accepted), more * accepted, risk)
    return {
        "softmax": risk_threshold(*as_tensors, risk, DELTA).threshold,
        "sequence": sequence(score, right, grid, first, risk),
        "tuned": sequence(score[cut:], right[cut:], value, expected, risk),
        "sgr": selection(score, right, risk),
    }


def draw(head: TrustHead, rows: tuple[Array, Array, Array], count: int, seed: list[int]) -> dict[str, Any]:
    """Of one calibration, for every rule: the accepted share of the population and whether the risk is broken."""
    warnings.simplefilter("ignore")  # of thresholds that are not found
    torch.set_num_threads(1)
    z, y, logits = rows
    softmax = torch.from_numpy(logits).double().softmax(dim=1).amax(dim=1).numpy()
    right = logits.argmax(axis=1) == y
    risk = SHARE * float((~right).mean())
    picked = np.random.default_rng(seed).integers(0, len(y), count)
    head.promise = None
    head.calibrate(z[picked], y[picked], logits[picked], seed=seed[-1])
    assert head.calibration is not None
    labels = head.calibration.network
    joint = head.judge(z, logits).joint.double().numpy()
    thresholds = {
        "head": head.accept_at(risk=risk, delta=DELTA).threshold,
        "search": risk_threshold(labels.ranked_joint.double(), labels.ranked_right, risk, DELTA).threshold,
        "average": head.accept_at(risk=risk, average=True).threshold,
    }
    accepts = {name: joint >= threshold for name, threshold in thresholds.items()}
    found = of_softmax(softmax[picked], right[picked], risk)
    accepts |= {name: softmax >= threshold for name, threshold in found.items()}
    return {
        name: (accept.mean(), bool(accept.any()) and bool((~right[accept]).mean() > risk))
        for name, accept in accepts.items()
    }


def main() -> None:
    parser = arguments(__doc__, jobs=True)
    parser.add_argument("--draws", type=int, default=100, help="calibrations of each setting")
    options = parser.parse_args()
    count = 3 if options.smoke else options.draws
    table: list[dict[str, Any]] = []
    for case in cases(options.seed, options.smoke):
        z, y, logits = (np.concatenate(parts) for parts in zip(case.calibration, case.test, strict=True))
        some = np.random.default_rng(options.seed).permutation(len(case.train.y))[:3000]
        head = TrustHead.fit(case.train.z[some], case.train.y[some], classes=np.arange(logits.shape[1]), progress=False)
        for rows in ROWS[:1] if options.smoke else ROWS:
            seeds = ([options.seed, rows, i] for i in range(count))
            found = Parallel(n_jobs=options.jobs)(delayed(draw)(head, (z, y, logits), rows, seed) for seed in seeds)
            row: dict[str, Any] = {"set": case.name, "rows": rows}
            for name in found[0]:
                accepted, broken = np.mean([drawn[name] for drawn in found], axis=0)
                row |= {f"accepted_{name}": float(accepted), f"broken_{name}": float(broken)}
            table.append(row)
            print({key: value if isinstance(value, str) else round(value, 3) for key, value in row.items()}, flush=True)
    if not options.smoke:
        write_results("power", options, ("torch",), {"delta": DELTA, "share": SHARE, "draws": count, "rows": table})


if __name__ == "__main__":
    main()

"""How much do valid rules accept at a promised risk, and how often do they break it?

The rows of a set that neither its network nor the head was fitted on are the population: calibration rows are drawn
from it with replacement, so that the risk of a threshold is a sum over all rows, without noise of its own. The risks
are those below the network's error: with others every row can be accepted. These rules promise the same, that with
probability 1 - delta over calibration sets at most this share of the accepted labels is wrong:

- ``head``: ``TrustHead.accept_at``; ``search``: the exact search over all thresholds, for the same joint scores;
- ``softmax``: the exact search for the largest softmax probability, with all rows;
- ``sequence``: Learn then Test for softmax, binomial tests in a fixed sequence from the highest score (Angelopoulos et
  al. 2021), from the least number of rows that can promise the risk;
- ``tuned``: the same, from the best threshold of three rows in ten, which are not tested (split fixed sequence);
- ``sgr``: selection with guaranteed risk for softmax (Geifman and El-Yaniv 2017);
- ``mapie``, ``mapie sequence``, ``mapie split``: MAPIE's ``BinaryClassificationController`` keeps the precision of "the
  label is right", judged by softmax, over its default grid of 100 thresholds, by each of its ways to test several:
  Bonferroni-Holm (its default), a fixed sequence, and one that three rows in ten order. They are left out without
  MAPIE. Its other controllers promise something else: the precision or recall of each class, or recalls of label sets.

``average`` and ``average softmax`` promise less, the risk on average over calibration sets, as conformal risk control
does: ``accept_at(average=True)``, and the same rule for softmax. (Conformal risk control itself needs a loss that
falls with the threshold; it bounds the share of *all* rows that are accepted and wrong, not that of the accepted ones.)

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
    average_threshold,
    binomial_tail,
    counts_above,
    least_points,
    passed_sequence,
    risk_threshold,
)
from sepc_torch.shapes import Array

if TYPE_CHECKING:
    from experiments.panel.cases import Case

DELTA = 0.1
RISKS = (0.01, 0.02, 0.05, 0.1, 0.2)
ROWS = (200, 1000, 5000)
TABLES = ("satimage", "phoneme")
# Rows that fit the head, and those of a population.
FITTED, MOST = 3000, 4000
# Share of the rows that only order the tests of the others.
LEARN = 0.3
STEPS = 200


def cases(seed: int, smoke: bool) -> list[Case]:
    """Networks on tables, and those of SEPC_DATA."""
    from experiments.panel.cases import clinc_case, fashion_case, paper_tables, resnet_case, table_case, tables

    if smoke:
        return [table_case("digits", paper_tables()["digits"], seed, epochs=5)]
    sets = tables(TABLES) | {name: data for name, data in paper_tables().items() if name == "adult"}
    networks = (resnet_case(10), resnet_case(100), fashion_case(), clinc_case())
    found = [table_case(name, data, seed) for name, data in sets.items()]
    return found + [case for case in networks if case is not None]


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


def of_mapie(score: Array, right: Array, risk: float) -> dict[str, float]:
    """Thresholds of MAPIE's controller by its ways to test several thresholds; empty without MAPIE."""
    try:
        from mapie.risk_control import BinaryClassificationController
    except ImportError:
        return {}
    rows, cut, found = np.column_stack([1.0 - score, score]), int(LEARN * len(score)), {}
    for name, method in (("", "bonferroni_holm"), (" sequence", "fixed_sequence"), (" split", "split_fixed_sequence")):
        control = BinaryClassificationController(
            np.asarray, "precision", 1.0 - risk, confidence_level=1.0 - DELTA, fwer_method=method
        )
        first = 0
        if name == " split":
            # As many levels as the grid has thresholds order them almost as the default of 1000 does.
            control.learn_fixed_sequence_order(rows[:cut], right[:cut], np.logspace(-25, 0, 100), binary=True)
            first = cut
        control.calibrate(rows[first:], right[first:])
        best = control.best_predict_param
        found[f"mapie{name}"] = math.inf if best is None else float(best)
    return found


def of_softmax(score: Array, right: Array, risk: float) -> dict[str, float]:
    """Thresholds of the rules for softmax."""
    as_tensors = torch.from_numpy(score), torch.from_numpy(right)
    grid = np.unique(np.quantile(score, np.linspace(0, 1, STEPS)))[::-1]
    least = min(least_points(risk, DELTA) / len(score), 1.0)
    first = (np.arange(len(grid)) < min(math.ceil(2 * least * len(grid)), len(grid) - 1)).astype(float)
    cut = int(LEARN * len(score))
    value, accepted, errors = counts_above(*(part[:cut] for part in as_tensors))
    more = (len(score) - cut) / cut
    expected = binomial_tail(more * np.minimum(errors + 0.5, accepted), more * accepted, risk)
    return {
        "softmax": risk_threshold(*as_tensors, risk, DELTA).threshold,
        "sequence": sequence(score, right, grid, first, risk),
        "tuned": sequence(score[cut:], right[cut:], value, expected, risk),
        "sgr": selection(score, right, risk),
        **of_mapie(score, right, risk),
        "average softmax": average_threshold(*as_tensors, risk),
    }


def draw(
    head: TrustHead, rows: tuple[Array, Array, Array], risks: list[float], count: int, seed: list[int]
) -> dict[tuple[float, str], tuple[float, bool]]:
    """Of one calibration, for every risk and rule: the accepted share of the population, and whether it is broken."""
    warnings.simplefilter("ignore")  # of thresholds that are not found
    torch.set_num_threads(1)
    z, y, logits = rows
    softmax = torch.from_numpy(logits).double().softmax(dim=1).amax(dim=1).numpy()
    right = logits.argmax(axis=1) == y
    picked = np.random.default_rng(seed).integers(0, len(y), count)
    head.promise = None
    head.calibrate(z[picked], y[picked], logits[picked], seed=seed[-1])
    assert head.calibration is not None
    labels = head.calibration.network
    joint = head.judge(z, logits).joint.double().numpy()
    found = {}
    for risk in risks:
        thresholds = {
            "head": head.accept_at(risk=risk, delta=DELTA).threshold,
            "search": risk_threshold(labels.ranked_joint.double(), labels.ranked_right, risk, DELTA).threshold,
            "average": head.accept_at(risk=risk, average=True).threshold,
        }
        accepts = {name: joint >= threshold for name, threshold in thresholds.items()}
        for name, threshold in of_softmax(softmax[picked], right[picked], risk).items():
            accepts[name] = softmax >= threshold
        for name, accept in accepts.items():
            broken = bool(accept.any()) and bool((~right[accept]).mean() > risk)
            found[risk, name] = float(accept.mean()), broken
    return found


def main() -> None:
    parser = arguments(__doc__, jobs=True)
    parser.add_argument("--draws", type=int, default=20, help="calibrations of each set and number of rows")
    options = parser.parse_args()
    count = 3 if options.smoke else options.draws
    table: list[dict[str, Any]] = []
    for case in cases(options.seed, options.smoke):
        z, y, logits = (np.concatenate(parts) for parts in zip(case.calibration, case.test, strict=True))
        rng = np.random.default_rng(options.seed)
        some = rng.permutation(len(case.train.y))[:FITTED]
        head = TrustHead.fit(case.train.z[some], case.train.y[some], classes=np.arange(logits.shape[1]), progress=False)
        held = rng.permutation(len(y))[:MOST]
        known = z[held], y[held], logits[held]
        error = float((known[2].argmax(axis=1) != known[1]).mean())
        risks = [risk for risk in RISKS if risk < error]
        for rows in ROWS[:1] if options.smoke else ROWS:
            seeds = ([options.seed, rows, i] for i in range(count))
            found = Parallel(n_jobs=options.jobs)(delayed(draw)(head, known, risks, rows, seed) for seed in seeds)
            for risk in risks:
                row: dict[str, Any] = {"set": case.name, "error": error, "rows": rows, "risk": risk}
                for name in (name for r, name in found[0] if r == risk):
                    accepted, broken = np.mean([drawn[risk, name] for drawn in found], axis=0)
                    row[name] = {"accepted": float(accepted), "broken": float(broken)}
                table.append(row)
                print(row, flush=True)
    if not options.smoke:
        results = {"delta": DELTA, "draws": count, "fitted": FITTED, "rows": table}
        write_results("power", options, ("torch", "mapie"), results)


if __name__ == "__main__":
    main()

"""Sizes of prediction sets against LAC, APS and RAPS, and class probabilities against temperature scaling.

Claims: the sets of ``TrustHead.sets`` cover as promised, are on average not larger than those of softmax (LAC), and are
empty for unknown rows more often than for known ones. Question: are the log loss and the ECE of
``TrustHead.predict_proba`` better than those of temperature scaling?

The peers follow their published formulas (LAC: Sadinle, Lei and Wasserman 2019; APS: Romano, Sesia and Candes 2020;
RAPS: Angelopoulos et al. 2021) and rank all calibration rows; RAPS chooses its two constants on a fifth of them, as
MAPIE does. The head spends half of the same rows on its score. Every draw calibrates with other known rows.

SEPC_DATA=path/to/data python -m experiments.promises.set_sizes
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from joblib import Parallel, delayed

from experiments.harness import arguments, write_results
from experiments.panel.cases import (
    Case,
    Rows,
    clinc_case,
    fashion_case,
    paper_tables,
    resnet_case,
    table_case,
    tables,
)
from sepc_torch import TrustHead
from sepc_torch.head.calibration.confidence import fit_temperature
from sepc_torch.metrics import ece

Array = np.ndarray
COVERAGES, DRAWS, CALIBRATION, TEST, UNKNOWN, TRAIN = (0.9, 0.95), 5, 1000, 2000, 300, 8000
# The constants of RAPS that MAPIE and the authors try.
PENALTIES, RANKS = (0.001, 0.01, 0.1, 0.2, 0.5), (1, 2, 5)
Scores = Callable[[Array, Array], Array]


def lac(p: Array, _u: Array) -> Array:
    """Nonconformity of every class by LAC: one minus its probability."""
    return 1.0 - p


def aps(p: Array, u: Array) -> Array:
    """Nonconformity of every class by APS: the sum of all larger probabilities, and a random share of its own."""
    order = np.argsort(-p, axis=1)
    ranked = np.take_along_axis(p, order, axis=1)
    found = np.empty_like(p)
    np.put_along_axis(found, order, ranked.cumsum(axis=1) - u[:, None] * ranked, axis=1)
    return found


def raps(penalty: float, rank: int) -> Scores:
    """Nonconformity of every class by RAPS: APS with a penalty for every class beyond the given rank."""

    def scores(p: Array, u: Array) -> Array:
        place = np.argsort(np.argsort(-p, axis=1), axis=1) + 1
        return aps(p, u) + penalty * np.maximum(place - rank, 0)

    return scores


def threshold(nonconformity: Array, coverage: float) -> float:
    """The conformal quantile: the smallest nonconformity that covers, with the finite-sample correction."""
    k = int(np.ceil(coverage * (len(nonconformity) + 1) * (1.0 - 1e-12)))
    return float(np.sort(nonconformity)[k - 1]) if k <= len(nonconformity) else np.inf


def conformal_sets(scores: Scores, known: Array, y: Array, coverage: float, rng: np.random.Generator) -> Any:
    """The function from probabilities to sets of split conformal prediction with these scores."""
    limit = threshold(scores(known, rng.random(len(y)))[np.arange(len(y)), y], coverage)
    return lambda p: scores(p, rng.random(len(p))) <= limit


def raps_sets(known: Array, y: Array, coverage: float, rng: np.random.Generator) -> Any:
    """RAPS with the constants whose sets are the smallest on a fifth of the rows; the others rank."""
    cut = len(y) // 5

    def size(constants: tuple[float, int]) -> float:
        found = conformal_sets(raps(*constants), known[:cut], y[:cut], coverage, np.random.default_rng(0))
        return float(found(known[:cut]).sum(axis=1).mean())

    best = min(((penalty, rank) for penalty in PENALTIES for rank in RANKS), key=size)
    return conformal_sets(raps(*best), known[cut:], y[cut:], coverage, rng)


def some(rows: Rows, count: int, rng: np.random.Generator) -> Rows:
    """Random rows."""
    chosen = rng.permutation(len(rows.y))[:count]
    return Rows(*(part[chosen] for part in rows))


def measure(case: Case, draws: int, seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Sizes of sets and quality of probabilities of a network, means over draws."""
    torch.set_num_threads(1)
    rng = np.random.default_rng(seed)
    classes = case.train.logits.shape[1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # small classes
        head = TrustHead.fit(*some(case.train, TRAIN, rng)[:2], progress=False, classes=np.arange(classes))
    known = Rows(*(np.concatenate(parts) for parts in zip(case.calibration, case.test, strict=True)))
    held = min(CALIBRATION, len(known.y) // 2)
    sets: dict[tuple[str, float], list[list[float]]] = {}
    qualities: dict[str, list[list[float]]] = {}
    for draw in range(draws):
        mixed = some(known, held + TEST, rng)
        fit, test = (Rows(*(part[rows] for part in mixed)) for rows in (slice(held), slice(held, None)))
        unknown = [some(rows, UNKNOWN, rng) for rows in case.unknown.values()]
        head.calibrate(fit.z, fit.y, fit.logits, seed=draw)
        softmax = [torch.from_numpy(rows.logits).double().softmax(1).numpy() for rows in (fit, test, *unknown)]
        for coverage in COVERAGES:
            peers = {"LAC": lac, "APS": aps}
            found = {name: conformal_sets(score, softmax[0], fit.y, coverage, rng) for name, score in peers.items()}
            found["RAPS"] = raps_sets(softmax[0], fit.y, coverage, rng)
            made = {name: [function(p) for p in softmax[1:]] for name, function in found.items()}
            parts = (test, *unknown)
            made["trust head"] = [head.sets(r.z, r.logits, coverage=coverage).sets.numpy() for r in parts]
            for name, (of_test, *others) in made.items():
                empty = [float((part.sum(axis=1) == 0).mean()) for part in (of_test, *others)]
                row = [float(of_test[np.arange(len(test.y)), test.y].mean()), float(of_test.sum(axis=1).mean())]
                sets.setdefault((name, coverage), []).append([*row, empty[0], float(np.mean(empty[1:]))])
        tempered = torch.from_numpy(test.logits).double()
        tempered = tempered / fit_temperature(torch.from_numpy(fit.logits), torch.from_numpy(fit.y))
        ours = head.predict_proba(test.z, test.logits).double()
        for name, p in (("temperature scaling", tempered.softmax(1)), ("trust head", ours)):
            qualities.setdefault(name, []).append(quality(p, torch.from_numpy(test.y)))
    about = {"set": case.name, "classes": classes, "accuracy": float(known.right.mean())}
    names = ("covered", "size", "empty", "unknown_empty")
    return (
        [
            {
                **about,
                "method": name,
                "coverage": coverage,
                **dict(zip(names, np.mean(rows, axis=0).tolist(), strict=True)),
            }
            for (name, coverage), rows in sets.items()
        ],
        [
            {**about, "method": name, **dict(zip(("log_loss", "ece"), np.mean(rows, axis=0).tolist(), strict=True))}
            for name, rows in qualities.items()
        ],
    )


def quality(p: torch.Tensor, y: torch.Tensor) -> list[float]:
    """Log loss, and ECE of the most probable class."""
    of_truth = p[torch.arange(len(y)), y].clamp_min(torch.finfo(torch.float64).tiny)
    return [-float(of_truth.log().mean()), float(ece(p.amax(dim=1), p.argmax(dim=1) == y))]


def main() -> None:
    options = arguments(__doc__, jobs=True).parse_args()
    if options.smoke:
        cases: list[Case | None] = [table_case("digits", paper_tables()["digits"], 0, open_set=True, epochs=5)]
    else:
        some_tables = {"digits": paper_tables()["digits"], **tables(("satimage", "letter", "penbased"))}
        cases = [resnet_case(10), resnet_case(100), fashion_case(), clinc_case()]
        cases += [table_case(name, data, options.seed, open_set=True) for name, data in some_tables.items()]
    sets, probabilities = [], []
    draws, present = 2 if options.smoke else DRAWS, [case for case in cases if case is not None]
    found = Parallel(n_jobs=options.jobs)(delayed(measure)(case, draws, options.seed) for case in present)
    for sizes, qualities in found:
        for row in (*sizes, *qualities):
            print({key: round(v, 4) if isinstance(v, float) else v for key, v in row.items()})
        sets += sizes
        probabilities += qualities
    if options.smoke or None in cases:
        print("nothing written" if options.smoke else "nothing written: the results need all files of SEPC_DATA")
        return
    about = {"draws": DRAWS, "calibration": CALIBRATION, "coverages": COVERAGES}
    write_results("set_sizes", options, ("torch",), {**about, "sets": sets, "probabilities": probabilities})


if __name__ == "__main__":
    main()

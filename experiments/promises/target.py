"""Promises for shifted rows: does ``accept_at(target=...)`` keep a risk that the old threshold breaks, and refuse blur?

A head is fitted once for each network. Every draw calibrates it with random known rows; the other rows are the
population, weighted so that the hardest class, or its regions, make half of the traffic, or replaced by rows in another
condition (blur, noise). Unlabelled target rows are drawn from it, and the risk in the population is known exactly.

    SEPC_DATA=... python -m experiments.promises.target
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from joblib import Parallel, delayed

from experiments.harness import arguments, write_results
from experiments.panel.cases import Case, Rows, fashion_case, paper_tables, resnet_case, table_case
from sepc_torch import HeadPrediction, TrustHead
from sepc_torch.shapes import Array

RISK, DELTA = 0.1, 0.05
# Rows that fit the head, that calibrate it, and target rows.
FITTED, CALIBRATION, TARGET = 10_000, 2000, 2000
# Share of the traffic that the hardest class, or its regions, have after the change.
GROWN = 0.5
RULES = ("old", "covariate", "label")


def cases(seed: int, smoke: bool) -> list[Case]:
    """The networks: two with stored embeddings."""
    if smoke:
        return [table_case("digits", paper_tables()["digits"], seed, epochs=5)]
    return [case for case in (resnet_case(10), fashion_case()) if case is not None]


def grown(part: Array) -> Array:
    """Weights of rows of which a part makes half of the traffic."""
    return np.where(part, GROWN / part.sum(), (1.0 - GROWN) / (~part).sum())


def judged(out: HeadPrediction, accept: Array, y: Array, weight: Array) -> tuple[float, float]:
    """The accepted share of a population, and the risk of what is accepted."""
    accepted = weight[accept].sum()
    wrong = weight[accept & (out.network_label.numpy() != y)].sum()
    return float(accepted), float(wrong / accepted) if accepted > 0 else 0.0


def draw(head: TrustHead, known: Rows, case: Case, seed: int, number: int) -> dict[str, dict[str, tuple[float, float]]]:
    """Of one calibration, for every change and rule: accepted share and risk."""
    warnings.simplefilter("ignore")  # of promises that are refused
    rng = np.random.default_rng([seed, len(case.train.y), number])
    order = rng.permutation(len(known.y))
    count = min(CALIBRATION, len(order) // 2)
    head.promise = None
    head.calibrate(*(part[order[:count]] for part in known), seed=int(rng.integers(2**31)))
    rest = Rows(*(part[order[count:]] for part in known))
    out = head.judge(rest.z, rest.logits)
    errors = [1.0 - rest.right[rest.y == c].mean() for c in range(int(rest.y.max()) + 1)]
    hardest = int(np.argmax(errors))
    region = head.sepc.codes.numpy()[out.nearest.numpy()] == hardest
    changes = {"class grows": (rest, out, grown(rest.y == hardest)), "regions grow": (rest, out, grown(region))}
    for name, rows in case.shifted.items():
        if name in ("blur", "noisy"):
            changes[name] = rows, head.judge(rows.z, rows.logits), np.full(len(rows.y), 1.0 / len(rows.y))
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for name, (rows, predicted, weight) in changes.items():
        some = rng.choice(len(weight), TARGET, p=weight)
        found[name] = {}
        for rule in RULES:
            given: dict[str, Any] = {}
            if rule != "old":
                given = {"target": rows.z[some], "target_logits": rows.logits[some], "shift": rule}
            threshold = head.accept_at(risk=RISK, delta=DELTA, **given).threshold
            accept = (predicted.joint.double() >= threshold).numpy() & (predicted.network_label >= 0).numpy()
            found[name][rule] = judged(predicted, accept, rows.y, weight)
    return found


def main() -> None:
    parser = arguments(__doc__, jobs=True)
    parser.add_argument("--draws", type=int, default=12, help="calibrations of each network")
    options = parser.parse_args()
    rows = []
    for case in cases(options.seed, options.smoke):
        rng = np.random.default_rng([options.seed, len(case.train.y)])
        some = rng.permutation(len(case.train.y))[:FITTED]
        settings: dict[str, Any] = {
            "classes": np.arange(case.train.logits.shape[1]),
            "reference_points": 2000,
            "max_per_class": 500,
        }
        head = TrustHead.fit(case.train.z[some], case.train.y[some], nan_policy="flag", progress=False, **settings)
        known = Rows(*(np.concatenate(pair) for pair in zip(case.calibration, case.test, strict=True)))
        draws = range(2 if options.smoke else options.draws)
        found = Parallel(n_jobs=options.jobs)(delayed(draw)(head, known, case, options.seed, i) for i in draws)
        for change in found[0]:
            row: dict[str, Any] = {"network": case.name, "change": change}
            for rule in RULES:
                accepted, risk = np.array([one[change][rule] for one in found]).T
                shares = {
                    "broken": (risk > RISK).mean(),
                    "accepted": accepted.mean(),
                    "promised": (accepted > 0).mean(),
                }
                row[rule] = {name: float(value) for name, value in shares.items()}
            rows.append(row)
            print(row, flush=True)
    if not options.smoke:
        about = {"risk": RISK, "delta": DELTA, "draws": options.draws, "calibration": CALIBRATION, "target": TARGET}
        write_results("target", options, ("torch",), about | {"grown": GROWN, "rows": rows})


if __name__ == "__main__":
    main()

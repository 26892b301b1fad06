"""Promises over units: how often do rows that come in units break a promise for independent rows, and one over units?

Every unit is a picture of some rows. In one picture of seven half of the network's labels are wrong, and nothing shows
it, so the risk of the accepted labels is the same at every threshold and known. A promise of a lower risk is broken
whenever a threshold is found. A promise of a higher risk should accept nearly all rows.

    python -m experiments.promises.unit_promises
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from joblib import Parallel, delayed

from experiments.harness import arguments, write_results
from sepc_torch import TrustHead
from sepc_torch.shapes import Array

# Share of hard units, and of wrong labels in them.
HARD, WRONG = 0.15, 0.5
# A risk below that of the labels, and one above.
LOW, HIGH, DELTA = 0.07, 0.15, 0.1
# Numbers of units and of the rows of each.
SETTINGS = ((1600, 1), (160, 10), (32, 50), (400, 50))


def draw(rng: np.random.Generator, units: int, rows: int) -> tuple[Array, Array, Array, Array]:
    """Embeddings, true labels, logits and units."""
    unit = np.repeat(np.arange(units), rows)
    label = rng.integers(0, 3, len(unit))
    z = rng.normal(size=(len(unit), 8)) + 4.0 * np.eye(3, 8)[label]
    wrong = (rng.random(units) < HARD)[unit] & (rng.random(len(unit)) < WRONG)
    logits = 4.0 * np.eye(3)[label] + 0.5 * rng.normal(size=(len(unit), 3))
    return z, np.where(wrong, (label + 1) % 3, label), logits, unit


def calibration(head: TrustHead, units: int, rows: int, seed: list[int]) -> dict[str, tuple[bool, float]]:
    """Of one calibration, by rows and by units: whether the low risk is broken, and the share accepted at the high."""
    warnings.simplefilter("ignore")  # of thresholds that are not found
    z, y, logits, unit = draw(np.random.default_rng(seed), units, rows)
    found = {}
    for name, given in (("rows", None), ("units", unit)):
        head.promise = None
        head.calibrate(z, y, logits, units=given)
        accepted = head.accept_at(risk=HIGH, delta=DELTA).coverage
        found[name] = (head.accept_at(risk=LOW, delta=DELTA).found, accepted)
    return found


def main() -> None:
    parser = arguments(__doc__, jobs=True)
    parser.add_argument("--draws", type=int, default=200, help="calibrations of each setting")
    options = parser.parse_args()
    count = 3 if options.smoke else options.draws
    settings = SETTINGS[1:3] if options.smoke else SETTINGS
    z, y, _, _ = draw(np.random.default_rng(options.seed), 600, 1)
    head = TrustHead.fit(z, y, dim=4)
    table: list[dict[str, Any]] = []
    for units, rows in settings:
        seeds = ([options.seed, units, rows, i] for i in range(count))
        found = Parallel(n_jobs=options.jobs)(delayed(calibration)(head, units, rows, seed) for seed in seeds)
        row: dict[str, Any] = {"units": units, "rows": rows}
        for name in ("rows", "units"):
            broken, accepted = np.mean([calibrated[name] for calibrated in found], axis=0)
            row |= {f"broken_{name}": float(broken), f"accepted_{name}": float(accepted)}
        table.append(row)
        print(row, flush=True)
    if not options.smoke:
        about = {"true_risk": HARD * WRONG, "low": LOW, "high": HIGH, "delta": DELTA, "draws": count}
        write_results("unit_promises", options, ("torch",), about | {"rows": table})


if __name__ == "__main__":
    main()

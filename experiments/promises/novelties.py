"""New samples of a batch: false discoveries and power of ``TrustHead.novelties``, by simulation and on the panel.

Claim: the false discovery rate is at most ``fdr``, for every number of calibration points. Simulation: ordinary scores
are standard normal, novel ones are shifted by three. Panel: the head of every network is calibrated anew on random
known rows that trained nothing; batches mix other known rows with rows of one group of unknowns, a tenth or a half of
the batch. Power is the share of the novel samples that are found; beside it that of the procedure without the estimated
share of ordinary samples (Benjamini and Hochberg), and how well the score separates the unknowns: the AUROC, and the
share of the unknowns beyond 99 % of the known rows.

SEPC_DATA=path/to/data python -m experiments.promises.novelties
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from scipy.stats import false_discovery_control

from experiments.harness import arguments, write_results
from experiments.panel.cases import Case, Rows, clinc_case, fashion_case, paper_tables, resnet_case, table_case
from sepc_torch import TrustHead
from sepc_torch.head.promises.conformal import conformal_p_value
from sepc_torch.head.promises.novelties import find_novelties
from sepc_torch.metrics import unknown_auroc

FDR, BATCH, NOVEL, MANY = 0.1, 200, 20, 100
# The strictest share of known rows that is reported.
FAR = 0.01
DRAWS, SHIFT, POINTS = 1000, 3.0, (50, 100, 200, 500, 2000)
RESPLITS, BATCHES, CALIBRATION, GROUP = 15, 20, 1000, 500


def shares(novel: torch.Tensor, new: int) -> tuple[float, float]:
    """False share of the discoveries and share of the novel samples found; the last ``new`` samples are novel."""
    return float(novel[:-new].sum()) / max(1, int(novel.sum())), float(novel[-new:].double().mean())


def simulate(points: int, draws: int, seed: int) -> dict[str, Any]:
    random = torch.Generator().manual_seed(seed)
    found, least = [], 0
    for _ in range(draws):
        scores = torch.randn(BATCH, generator=random)
        scores[-NOVEL:] += SHIFT
        record = find_novelties(conformal_p_value(torch.randn(points, generator=random), scores), points, FDR)
        found.append(shares(record.novel, NOVEL))
        least = record.least
    false, power = np.mean(found, axis=0)
    error = float(np.std([pair[0] for pair in found]) / draws**0.5)
    return {"points": points, "fdr": float(false), "error": error, "power": float(power), "least": least}


def draw_rows(rows: Rows, index: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.from_numpy(rows.z[index]), torch.from_numpy(rows.logits[index])


def measure(case: Case, resplits: int, seed: int) -> list[dict[str, Any]]:
    """False discoveries and power for every group of unknowns of a network."""
    torch.set_num_threads(1)
    classes = np.arange(case.train.logits.shape[1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # small classes
        head = TrustHead.fit(case.train.z, case.train.y, progress=False, classes=classes)
    known = Rows(*(np.concatenate(parts) for parts in zip(case.calibration, case.test, strict=True)))
    held = min(CALIBRATION, len(known.y) // 2)
    rng = np.random.default_rng(seed)
    rows = {(group, new): Found() for group in case.unknown for new in (NOVEL, MANY)}
    for split in range(resplits):
        order = rng.permutation(len(known.y))
        z, logits = draw_rows(known, order[:held])
        head.calibrate(z, known.y[order[:held]], logits, seed=split)
        ordinary = head(*draw_rows(known, order[held : held + GROUP]))
        for group, unknown in case.unknown.items():
            new = head(*draw_rows(unknown, rng.permutation(len(unknown.y))[:GROUP]))
            beyond = new.nonconformity > ordinary.nonconformity.quantile(1.0 - FAR)
            for count in (NOVEL, MANY):
                record = rows[group, count]
                record.separation.append(
                    (float(unknown_auroc(-ordinary.nonconformity, -new.nonconformity)), float(beyond.double().mean()))
                )
                for _ in range(BATCHES):
                    some = rng.permutation(len(ordinary.p_value))[: BATCH - count]
                    batch = torch.cat([ordinary.p_value[some], new.p_value[rng.permutation(len(new.p_value))[:count]]])
                    record.shares.append(shares(find_novelties(batch, held // 2, FDR).novel, count))
                    plain = torch.from_numpy(false_discovery_control(batch.double().numpy(), method="bh") <= FDR)
                    record.plain.append(shares(plain, count)[1])
    return [
        {
            "set": case.name,
            "unknowns": group,
            "kind": "near" if group in case.near else "far",
            "points": held // 2,
            "novel": count,
            **record.summary(resplits),
        }
        for (group, count), record in rows.items()
    ]


@dataclass
class Found:
    """False and found shares of every batch, the latter also by the plain procedure, and separation in every split."""

    shares: list[tuple[float, float]] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)
    separation: list[tuple[float, float]] = field(default_factory=list)

    def summary(self, resplits: int) -> dict[str, float]:
        by_split = np.array(self.shares).reshape(resplits, -1, 2)
        false, power = by_split.mean(axis=(0, 1))
        error = by_split[:, :, 0].mean(axis=1).std() / resplits**0.5
        auroc, beyond = np.mean(self.separation, axis=0)
        names = ("fdr", "error", "power", "plain_power", "auroc", "beyond")
        return dict(zip(names, map(float, (false, error, power, np.mean(self.plain), auroc, beyond)), strict=True))


def main() -> None:
    options = arguments(__doc__).parse_args()
    simulated = [simulate(points, 20 if options.smoke else DRAWS, options.seed) for points in POINTS]
    for row in simulated:
        print(f"{row['points']} points: rate {row['fdr']:.3f}, power {row['power']:.3f}", flush=True)
    if options.smoke:
        digits = table_case("digits", paper_tables()["digits"], options.seed, open_set=True, epochs=5)
        cases: list[Case | None] = [digits]
    else:
        cases = [resnet_case(10), resnet_case(100), fashion_case(), clinc_case()]
    panel = []
    for case in cases:
        for row in [] if case is None else measure(case, 2 if options.smoke else RESPLITS, options.seed):
            print(row, flush=True)
            panel.append(row)
    if options.smoke or None in cases:
        print("nothing written" if options.smoke else "nothing written: the results need all files of SEPC_DATA")
        return
    results = {
        "fdr": FDR,
        "batch": BATCH,
        "novel": NOVEL,
        "many": MANY,
        "far": FAR,
        "draws": DRAWS,
        "shift": SHIFT,
        "resplits": RESPLITS,
        "batches": BATCHES,
        "simulated": simulated,
        "panel": panel,
    }
    write_results("novelties", options, ("torch",), results)


if __name__ == "__main__":
    main()

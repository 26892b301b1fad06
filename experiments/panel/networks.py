"""Networks that nobody tuned on: are the head's scores better than other scores, and does it accept more at a promise?

The networks are other people's, or frozen backbones of other people with a linear probe; ``features.py`` makes their
files. The defaults of ``TrustHead`` were frozen before the first run on them, and nothing is chosen per network. Scores
and figures are those of ``trust_panel``: mistakes by ``confidence``, unknowns by ``nonconformity``, both by ``joint``,
against every score of ``compare``.

The rows of calibration and test together are drawn anew into these two parts by each of five seeds, so that intervals
hold more than the split of one calibration set. The network and the rows that the head is fitted on stay the same.
The last question is a promise: wrong labels among the accepted ones at most half of the network's error (on calibration
and test rows together), with delta 0.1. It compares ``accept_at`` with the exact search for the largest softmax
probability, which needs no rows to fit a score. A promise counts as broken if the accepted test rows break it; with few
of them chance alone breaks some.

    SEPC_DATA=... python -m experiments.panel.networks --jobs 2        # reads SEPC_DATA/networks/*.npz
    python -m experiments.panel.networks --features DIR                # networks without a file there keep their result
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from joblib import Parallel, delayed
from torch import Tensor

from experiments.datasets import data_folder
from experiments.harness import arguments, load, write_results
from experiments.panel.cases import Case, Rows, paper_tables, table_case
from experiments.panel.features import PARTS, store
from experiments.panel.openood import dequantised
from experiments.panel.scores import (
    PEERS,
    Scores,
    bootstrap,
    fitted,
    head_scores,
    judge,
    peer_scores,
    summarise,
    tensor,
)
from experiments.panel.trust_panel import RESAMPLES, SEEDS
from sepc_torch import TrustHead
from sepc_torch.head.promises.conformal import risk_threshold

DELTA, SHARE = 0.1, 0.5
# The peers that use calibration rows.
CALIBRATED = ("scaled_softmax", "kl_matching", "max_logit_p_norm")


def stored_case(path: Path) -> Case:
    """The case of a feature file; logits are computed from the stored embeddings and the last layer."""
    with np.load(path) as arrays:
        weight, bias = (arrays[name].astype(np.float32) for name in ("weight", "bias"))
        parts = {}
        for part in (name.removesuffix("_z") for name in arrays if name.endswith("_z")):
            z = dequantised(arrays[f"{part}_z"], arrays["scale"])
            parts[part] = Rows(z, arrays[f"{part}_y"].astype(np.int64), z @ weight.T + bias)
        near = tuple(arrays["near"].tolist())
    unknown = {part.removeprefix("ood_"): rows for part, rows in parts.items() if part.startswith("ood_")}
    train, calibration, test = (parts[part] for part in PARTS)
    return Case(path.stem, train, calibration, test, unknown, near, classifier=(weight, bias))


def pooled(case: Case) -> Case:
    """The case with its calibration rows and then its test rows as test rows."""
    pairs = zip(case.calibration, case.test, strict=True)
    return replace(case, test=Rows(*(np.concatenate(pair) for pair in pairs)))


def drawn_rows(case: Case, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Which rows of the pool calibrate, and which test: as many as in the case."""
    calibrating = len(case.calibration.y)
    order = np.random.default_rng([seed, 11]).permutation(calibrating + len(case.test.y))
    return order[:calibrating], order[calibrating:]


def redrawn(case: Case, seed: int) -> Case:
    """The case with calibration and test rows drawn anew from both, in the same numbers."""
    pool = pooled(case).test
    calibration, test = (Rows(*(values[rows] for values in pool)) for rows in drawn_rows(case, seed))
    return replace(case, calibration=calibration, test=test)


def peers_of_draws(case: Case, seeds: list[int]) -> Iterator[Scores]:
    """The scores of all peers for the draw of every seed; those without calibration rows are computed once."""
    fixed = peer_scores(pooled(case), [name for name in PEERS if name not in CALIBRATED])
    for seed in seeds:
        test = tensor(drawn_rows(case, seed)[1])
        own = {name: parts | {"test": parts["test"][test]} for name, parts in fixed.items()}
        yield own | peer_scores(redrawn(case, seed), CALIBRATED)


def promise(head: TrustHead, case: Case) -> dict[str, dict[str, Any]]:
    """Accepted share of test rows and of unknowns, and whether the risk is broken, of the head and of max softmax.

    Args:
        head: A calibrated head; its acceptance threshold is set.
        case: The case with the rows that calibrated it.
    """
    right = np.concatenate([case.calibration.right, case.test.right])
    risk = SHARE * float((~right).mean())
    if risk == 0.0:
        return {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of thresholds that are not found
        threshold = float(head.accept_at(risk=risk, delta=DELTA).threshold)

    def joint(rows: Rows) -> Tensor:
        return head(tensor(rows.z), tensor(rows.logits)).joint.double()

    def softmax(rows: Rows) -> Tensor:
        return tensor(rows.logits).double().softmax(dim=1).amax(dim=1)

    search = risk_threshold(softmax(case.calibration), tensor(case.calibration.right), risk, DELTA).threshold
    found = {}
    for name, score, least in (("head", joint, threshold), ("softmax", softmax, search)):
        accepted = score(case.test) >= least
        wrong = accepted & ~tensor(case.test.right)
        unknowns = [float((score(rows) >= least).double().mean()) for rows in case.unknown.values()]
        found[name] = {
            "accepted": float(accepted.double().mean()),
            "broken": bool(wrong.sum() > risk * accepted.sum()),
            "unknowns": float(np.mean(unknowns)) if unknowns else None,
        }
    return found


def run(case: Case, seeds: list[int], resamples: int) -> list[dict[str, Any]]:
    """One fit, and for every seed a draw of the calibration rows and all figures."""
    head, seconds = fitted(case)
    results = []
    for seed, peers in zip(seeds, peers_of_draws(case, seeds), strict=True):
        drawn = redrawn(case, seed)
        head.promise = None
        head.calibrate(drawn.calibration.z, drawn.calibration.y, drawn.calibration.logits, seed=seed)
        scores = peers | head_scores(head, drawn)
        results.append(
            {
                "set": case.name,
                "seed": seed,
                "fit_s": seconds,
                "features": case.train.z.shape[1],
                "classes": case.train.logits.shape[1],
                "rows": {"train": len(case.train.y), "calibration": len(case.calibration.y), "test": len(case.test.y)},
                "accuracy": float(drawn.test.right.mean()),
                "near": list(case.near),
                "figures": judge(drawn, scores, seed),
                "differences": bootstrap(drawn, scores, seed, resamples),
                "promise": promise(head, drawn),
            }
        )
    return results


def measured(path: Path, seeds: list[int], resamples: int) -> list[dict[str, Any]]:
    """The runs of one feature file."""
    torch.set_num_threads(1)
    found = run(stored_case(path), seeds, resamples)
    print(f"{path.stem}: done", flush=True)
    return found


def write_small(path: Path, seed: int) -> None:
    """The feature file of a small network on the digits, with left-out classes."""
    case = table_case("digits", paper_tables()["digits"], seed, open_set=True, epochs=5)
    parts = {"train": case.train, "calibration": case.calibration, "test": case.test}
    parts |= {"ood_left_out": case.unknown["left out"]}
    embeddings = {part: (rows.z, rows.y) for part, rows in parts.items()}
    store(path, embeddings, case.classifier, ("left_out",), 255, torch.device("cpu"))


def feature_files(folder: Path | None) -> list[Path]:
    """The feature files of a folder, or else of SEPC_DATA/networks."""
    data = data_folder()
    folder = data / "networks" if folder is None and data is not None else folder
    paths = [] if folder is None else sorted(folder.glob("*.npz"))
    if not paths:
        raise FileNotFoundError(
            f"{'SEPC_DATA is not set' if folder is None else f'{folder} has no feature files'}. Make them with "
            "`python -m experiments.panel.features --out DIR`, then pass --features DIR or put them into "
            "SEPC_DATA/networks."
        )
    return paths


def main() -> None:
    parser = arguments(__doc__, jobs=True)
    parser.add_argument("--features", type=Path, help="the folder of the feature files; by default SEPC_DATA/networks")
    options = parser.parse_args()
    seeds = [options.seed + number for number in range(1 if options.smoke else SEEDS)]
    if options.smoke:
        with tempfile.TemporaryDirectory() as folder:
            write_small(Path(folder) / "digits.npz", options.seed)
            results = measured(Path(folder) / "digits.npz", seeds, 5)
    else:
        paths = feature_files(options.features)
        tasks = (delayed(measured)(path, seeds, RESAMPLES) for path in paths)
        results = [row for found in Parallel(n_jobs=options.jobs)(tasks) for row in found]
    rows = summarise(results)
    for row in rows:
        mark = "reached" if row["reached"] else "missed "
        best = f"best other {row['theirs']:8.4g} ({PEERS[row['best']]})"
        print(f"{row['set']:24} {row['question']:24} {mark}  ours {row['ours']:8.4g}  {best}")
    if options.smoke:
        return
    for result in results:
        del result["differences"]
    new = {
        path.stem: {
            "rows": [row for row in rows if row["set"] == path.stem],
            "runs": [result for result in results if result["set"] == path.stem],
        }
        for path in paths
    }
    about = {"seeds": seeds, "resamples": RESAMPLES, "delta": DELTA, "share": SHARE, "peers": PEERS}
    parts = load("networks").get("parts", {}) | new
    write_results("networks", options, ("torch", "scikit-learn"), about | {"parts": parts}, list(new))


if __name__ == "__main__":
    main()

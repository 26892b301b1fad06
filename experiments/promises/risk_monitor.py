"""Risk over time: how often is a kept risk called broken, and how many labels does a monitor need to tell?

False alarms: streams with the error exactly at the risk; at most ``alpha`` of them may ever be broken. Labels: streams
with other errors, until the state is broken (above the risk) or holds (below). A twentieth of the rows is asked for,
evenly or more where the confidence is low. In simulated streams the probabilities of errors are drawn from a skewed
distribution, and the confidence knows them (*informative*) or knows nothing. In streams of networks the head accepts at
the risk, and rows are drawn from the test set (the risk should hold) or from changed pictures (it breaks).

    SEPC_DATA=... python -m experiments.promises.risk_monitor
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from joblib import Parallel, delayed

from experiments.harness import arguments, write_results
from experiments.panel.cases import Case, paper_tables, resnet_case, table_case
from sepc_torch import HeadPrediction, RiskMonitor, TrustHead
from sepc_torch.head.risk_monitor import RiskReport
from sepc_torch.shapes import Array

ALPHA, RISK = 0.05, 0.05
BATCH, BUDGET, BATCHES = 500, 25, 60
# The beta distribution of the probabilities of errors: the most unsure tenth of the rows has half of the errors.
SHAPE = 0.3
ASKING = {"even": 1.0, "active": 0.5}
ERRORS = (0.0, 0.25, 0.5, 1.5, 2.0, 3.0)

# From a number of rows to predictions and true codes.
Draw = Callable[[int], tuple[HeadPrediction, Array]]


def simulated(error: float, informative: bool, rng: np.random.Generator) -> Draw:
    """Rows of predicted class 0; a wrong one has the true class 1."""

    def draw(count: int) -> tuple[HeadPrediction, Array]:
        wrong = rng.beta(SHAPE, SHAPE * (1.0 - error) / error, count) if error else np.zeros(count)
        known = wrong if informative else rng.permutation(wrong)
        whole, real = torch.zeros(count, dtype=torch.int64), torch.zeros(count)
        fields = dict.fromkeys(HeadPrediction._fields, real)
        fields |= dict.fromkeys(("label", "rule", "nearest", "runner_up", "network_label"), whole)
        out = HeadPrediction(**fields | {"confidence": torch.from_numpy(1.0 - known), "accept": whole == 0})
        return out, (rng.random(count) < wrong).astype(np.int64)

    return draw


def of_rows(judged: HeadPrediction, y: Array, rng: np.random.Generator) -> Draw:
    """Rows drawn with replacement from judged rows."""

    def draw(count: int) -> tuple[HeadPrediction, Array]:
        taken = rng.integers(0, len(y), count)
        return HeadPrediction(*(field[taken] for field in judged)), y[taken]

    return draw


def watch(monitor: RiskMonitor, draw: Draw, explore: float, batches: int, until: tuple[str, ...]) -> RiskReport:
    """The report on a stream, at the first of some states or at the end."""
    for batch in range(batches):
        out, y = draw(BATCH)
        codes = np.arange(BATCH) % len(monitor.groups) if monitor.groups else None
        chosen = monitor.ask(out, BUDGET, batch * BATCH + np.arange(BATCH), groups=codes, explore=explore)
        report = monitor.update(batch * BATCH + chosen, y[chosen.numpy()])
        if report.state in until:
            break
    return report


def stream(
    make: Callable[[np.random.Generator], Draw], risk: float, explore: float, batches: int, seed: int, number: int
) -> RiskReport:
    """The report on one stream, when the risk is known to be kept or broken, or at the end."""
    draw = make(np.random.default_rng([seed, number]))
    return watch(RiskMonitor(None, risk, ALPHA, seed=number), draw, explore, batches, ("holds", "broken"))


def labels_needed(
    make: Callable[[np.random.Generator], Draw],
    risk: float,
    above: bool,
    streams: int,
    batches: int,
    seed: int,
    parallel: Parallel,
) -> dict[str, Any]:
    """For each way of asking: median labels until the right state, and shares of streams that reach it or the other."""
    right, wrong = ("broken", "holds") if above else ("holds", "broken")
    found: dict[str, Any] = {"state": right}
    for name, explore in ASKING.items():
        ends = parallel(delayed(stream)(make, risk, explore, batches, seed, i) for i in range(streams))
        labels = float(np.median([end.overall.labels if end.state == right else math.inf for end in ends]))
        found[name] = labels if math.isfinite(labels) else None
        found[f"{name}_reached"] = float(np.mean([end.state == right for end in ends]))
        found[f"{name}_wrong"] = float(np.mean([end.state == wrong for end in ends]))
    return found


def broken(explore: float, groups: int, batches: int, seed: int, number: int) -> bool:
    """Whether a stream with the error at the risk is ever broken."""
    monitor = RiskMonitor(None, RISK, ALPHA, groups=range(groups) if groups else None, seed=number)
    draw = simulated(RISK, True, np.random.default_rng([seed, number, groups]))
    return watch(monitor, draw, explore, batches, ("broken",)).state == "broken"


def false_alarms(streams: int, batches: int, seed: int, parallel: Parallel) -> dict[str, float]:
    """Share of streams with the error at the risk that are ever broken."""
    return {
        name: float(np.mean(parallel(delayed(broken)(explore, groups, batches, seed, i) for i in range(streams))))
        for name, explore, groups in (("even", 1.0, 0), ("active", 0.5, 0), ("active, 4 groups", 0.5, 4))
    }


def networks(smoke: bool, seed: int) -> list[tuple[Case, float]]:
    """Networks, and the risk at which each is watched: about half of its error."""
    if smoke:
        return [(table_case("digits", paper_tables()["digits"], seed, epochs=5), 0.05)]
    return [(case, risk) for case, risk in ((resnet_case(10), 0.05), (resnet_case(100), 0.2)) if case is not None]


def main() -> None:
    parser = arguments(__doc__, jobs=True)
    parser.add_argument("--streams", type=int, default=1000, help="streams with the error at the risk")
    parser.add_argument("--draws", type=int, default=50, help="streams of every other error")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message="Classes with fewer than")
    streams, draws, batches = (4, 2, 4) if options.smoke else (options.streams, options.draws, BATCHES)
    rows: list[dict[str, Any]] = []
    parallel = Parallel(n_jobs=options.jobs)

    def add(about: dict[str, Any], found: dict[str, Any]) -> None:
        rows.append(about | found)
        print(rows[-1], flush=True)

    for name in ("informative", "uninformative"):
        for ratio in ERRORS[2::2] if options.smoke else ERRORS:
            about = {"stream": f"simulated, {name}", "risk": RISK, "error": ratio * RISK}
            make = partial(simulated, ratio * RISK, name == "informative")
            add(about, labels_needed(make, RISK, ratio > 1, draws, batches, options.seed, parallel))
    for case, risk in networks(options.smoke, options.seed):
        head = TrustHead.fit(case.train.z, case.train.y, classes=np.arange(case.train.logits.shape[1]))
        head.calibrate(*case.calibration).accept_at(risk=risk)
        for name, given in {"test": case.test, **case.shifted}.items():
            out = head.judge(given.z, given.logits)
            error = float((out.network_label.numpy() != given.y)[out.accept.numpy()].mean())
            about = {"stream": f"{case.name}, {name}", "risk": risk, "error": error}
            make = partial(of_rows, out, given.y)
            add(about, labels_needed(make, risk, error > risk, draws, batches, options.seed, parallel))
    false = false_alarms(streams, 2 if options.smoke else 20, options.seed, parallel)
    print(false)
    if not options.smoke:
        about = {"alpha": ALPHA, "batch": BATCH, "budget": BUDGET, "batches": BATCHES, "draws": draws}
        results = about | {"streams": streams, "false_alarms": false, "rows": rows}
        write_results("risk_monitor", options, ("torch",), results)


if __name__ == "__main__":
    main()

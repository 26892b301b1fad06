"""A guard in operation: how often does it say that a broken promise holds, and how many labels restore it?

Simulated deployments: ordinary rows (drawn from the test rows), then rows of another kind, then ordinary ones again.
The kinds are changed pictures where they are stored (blur, noise, dark) and otherwise noise on embeddings, a class that
grows to eight rows in ten, and rows of unknown classes among three in ten. Labels of the rows that the guard asks for
arrive some batches later. The guard refuses while its promise is suspended, and it is recalibrated as soon as its
labels are enough. With *even* sampling the same tests get labels of rows that are chosen evenly from all rows.

Beside the guard: a head without one goes on accepting; the martingales of crepes get the scores that the guard's drift
monitor gets; and MAPIE's ``RiskMonitoring`` gets as many labels of accepted rows as the guard, chosen evenly and as
late, and alarms when it shows at the level of the guard's risk monitor that the promised risk is broken (without MAPIE
it is left out).

A promise is *missed* if, at the end of the changed rows, the guard says that it holds and the risk at its threshold,
computed from all rows of the kind, is above the promised one. A deployment goes through its ordinary rows once, and
from there through every change.

False alarms: streams without a change, each with a calibration of its own, of normal embeddings.

    SEPC_DATA=... python -m experiments.promises.deployment
"""

from __future__ import annotations

import argparse
import copy
import math
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

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
)
from experiments.promises.drift import ALPHA, crepes_alarms
from sepc_torch import DriftMonitor, Guard, HeadPrediction, RiskMonitor, TrustHead
from sepc_torch.head import guard as guard_module
from sepc_torch.head.guard import GuardedPrediction
from sepc_torch.shapes import Array

BATCH, ORDINARY, CHANGED, BACK = 100, 50, 30, 20
# Batches until labels arrive, and rows asked for in a batch, while the promise holds and while it is suspended.
DELAY, WATCHING, RESTORING = 3, 5, 25
# Shares of the rows of the class that grows, and of unknown rows.
GROWN, UNKNOWN = 0.8, 0.3
METHODS = ("guard", "even")
# Streams for the martingales of crepes and for MAPIE, and the level of the risk monitors.
STREAMS, RISK_ALPHA = 10, 0.05


class Pool(NamedTuple):
    """Judged rows of one kind, their true codes (-1 for unknown ones), and probabilities to draw them."""

    out: HeadPrediction
    y: Array
    share: Array

    def draw(self, count: int, rng: np.random.Generator) -> tuple[HeadPrediction, Array]:
        rows = rng.choice(len(self.y), count, p=self.share)
        return HeadPrediction(*(field[rows] for field in self.out)), self.y[rows]

    def risk(self, accept: Array) -> float:
        """Share of wrong labels among the accepted rows."""
        wrong = self.out.network_label.numpy() != self.y
        whole = float(self.share[accept].sum())
        return float(self.share[accept & wrong].sum()) / whole if whole else 0.0


class Run(NamedTuple):
    """One deployment with a guard; labels are infinite if the promise was not restored."""

    missed: bool
    delay: float
    accepted_before: int
    wrong_before: int
    labels: float
    accepted: float
    back: float
    early: bool


def cases(seed: int, smoke: bool) -> Iterator[tuple[Case, float]]:
    """Networks with the risk that is promised: about half of their error, and at least 2 %."""
    if smoke:
        yield table_case("digits", paper_tables()["digits"], seed, epochs=5), 0.05
        return
    found = [resnet_case(10), resnet_case(100), fashion_case(), clinc_case()]
    found += [table_case(name, data, seed) for name, data in paper_tables().items() if name in ("digits", "adult")]
    for case in found:
        if case is not None:
            error = 1.0 - float(case.calibration.right.mean())
            yield case, next(risk for risk in (0.2, 0.1, 0.05, 0.02) if risk <= max(0.6 * error, 0.02))


def pool(head: TrustHead, rows: Rows, share: Array | None = None) -> Pool:
    even = np.full(len(rows.y), 1.0 / len(rows.y)) if share is None else share
    return Pool(head.judge(rows.z, rows.logits), rows.y, even)


def pools(case: Case, head: TrustHead, rng: np.random.Generator) -> dict[str, Pool]:
    """What the stream changes to."""
    test = pool(head, case.test)
    found = {name: pool(head, rows) for name, rows in case.shifted.items()}
    if not found and case.classifier is not None:
        weight, bias = case.classifier
        z = case.test.z + 0.7 * case.test.z.std(axis=0) * rng.normal(size=case.test.z.shape).astype(np.float32)
        found["noise"] = pool(head, Rows(z, case.test.y, z @ weight.T + bias))
    wrong = np.bincount(case.test.y, ~case.test.right, minlength=case.test.logits.shape[1])
    chosen = case.test.y == int(wrong.argmax())
    found["growing class"] = test._replace(share=np.where(chosen, GROWN / chosen.sum(), (1 - GROWN) / (~chosen).sum()))
    name = next(iter(case.near), next(iter(case.unknown), None))
    if name is not None:
        other = pool(head, case.unknown[name])
        out = HeadPrediction(*(torch.cat([a, b]) for a, b in zip(test.out, other.out, strict=True)))
        share = np.concatenate([(1 - UNKNOWN) * test.share, UNKNOWN * other.share])
        found["new class"] = Pool(out, np.concatenate([test.y, np.full(len(other.y), -1)]), share)
    return found


def kept(guard: Guard, rows: Pool) -> Array:
    """The rows of a pool that a guard accepts at its present threshold."""
    if guard.threshold is None:
        return rows.out.accept.numpy()
    return (rows.out.joint.double() >= guard.threshold).numpy()


class Stream:
    """A guard, the rows that come to it, and labels on their way."""

    def __init__(self, guard: Guard, seed: int) -> None:
        self.guard, self.rng = guard, np.random.default_rng(seed)
        self.labels: list[dict[int, int]] = [{} for _ in range(DELAY)]
        self.truth: dict[int, int] = {}

    def fork(self, guard: Guard) -> Stream:
        """Another stream that goes on from here, with a guard in the same state."""
        other = copy.copy(self)
        other.guard, other.rng = guard, copy.deepcopy(self.rng)
        other.labels, other.truth = list(self.labels), dict(self.truth)
        return other

    def batch(self, rows: Pool, even: bool) -> tuple[GuardedPrediction, Array, dict[int, int]]:
        """Judge a batch, ask for labels and take those that arrive; return the answer, the truth and the labels."""
        guard = self.guard
        out, y = rows.draw(BATCH, self.rng)
        found = guard.watch(out, with_logits=guard.head.takes_logits)
        if guard.state == "holds":
            chosen = guard.ask(WATCHING)
        elif even:
            with patch.object(guard_module._Trial, "forecast", _everywhere):
                chosen = guard.ask(RESTORING)
        else:
            chosen = guard.ask(RESTORING)
        self.truth |= dict(zip(found.ids.tolist(), y.tolist(), strict=True))
        self.labels.append({name: self.truth[name] for name in chosen.tolist()})
        arrived = self.labels.pop(0)
        if arrived:
            guard.update(arrived)
        return found, y, arrived


def _everywhere(trial: Any) -> tuple[int, int | None, float]:
    return len(trial.state["threshold"]) - 1, None, math.nan


def deployments(head: TrustHead, test: Pool, changes: dict[str, Pool], seed: int) -> dict[tuple[str, str], Run]:
    """Ordinary rows, and from there one deployment for every change and every way to choose rows."""
    torch.set_num_threads(1)
    guard = Guard(head, DriftMonitor(head, ALPHA, seed), RiskMonitor(head, seed=seed), on_alarm="refuse", seed=seed)
    stream, early = Stream(guard, seed), False
    for _ in range(ORDINARY):
        early |= stream.batch(test, even=False)[0].state != "holds"
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "guard.safetensors"
        guard.save(path)
        for kind, changed in changes.items():
            for method in METHODS:
                fork = stream.fork(Guard.load(path, head, on_alarm="refuse"))
                found[kind, method] = deploy(fork, test, changed, method == "even")._replace(early=early)
    return found


def deploy(stream: Stream, test: Pool, changed: Pool, even: bool) -> Run:
    """The changed rows of a deployment, and the ordinary ones that come back."""
    guard = stream.guard
    alarm, before, wrong, asked, restored, accepted = math.inf, 0, 0, 0, math.inf, 0
    for number in range(CHANGED):
        found, y, arrived = stream.batch(changed, even)
        accept, right = found.out.accept.numpy(), found.out.network_label.numpy() == y
        if math.isinf(alarm):
            before, wrong = before + int(accept.sum()), wrong + int((accept & ~right).sum())
            alarm = (number + 1) * BATCH if found.state != "holds" else alarm
        accepted += int(accept.sum()) if number >= CHANGED - 10 else 0
        if found.state != "holds":
            asked += len(arrived)
            if guard.state != "holds":
                guard.recalibrate()
            if guard.state == "holds":
                restored = min(restored, asked)
    assert guard.risk is not None
    missed = guard.state == "holds" and changed.risk(kept(guard, changed)) > guard.risk.risk
    back = 0
    for number in range(BACK):
        found, _, _ = stream.batch(test, even)
        if guard.state != "holds":
            guard.recalibrate()
        back += int(found.out.accept.sum()) if number >= BACK - 10 else 0
    return Run(missed, alarm, before, wrong, restored, accepted / (10 * BATCH), back / (10 * BATCH), False)


def summary(ends: list[Run]) -> dict[str, Any]:
    """Means and medians over the deployments of one change."""
    restored = np.array([end.labels for end in ends])
    means = ("missed", "early", "accepted_before", "wrong_before", "accepted", "back")
    return {
        **{name: float(np.mean([getattr(end, name) for end in ends])) for name in means},
        "delay": _median(end.delay for end in ends),
        "restored": float(np.isfinite(restored).mean()),
        "labels": _median(restored),
    }


def _median(values: Any) -> float | None:
    found = float(np.median(list(values)))
    return found if math.isfinite(found) else None


def martingales(head: TrustHead, test: Pool, changed: Pool, seed: int) -> dict[str, float]:
    """Number of changed rows until the martingales of crepes alarm, in one stream."""
    assert head.calibration is not None
    reference = head.calibration.network.ranked_nonconformity.double().numpy()
    rng = np.random.default_rng(seed)
    parts = [test.draw(ORDINARY * BATCH, rng)[0], changed.draw(CHANGED * BATCH, rng)[0]]
    score = np.concatenate([part.nonconformity.double().numpy() for part in parts])
    first = ORDINARY * BATCH
    alarms = crepes_alarms(rng.permutation(reference), score, seed)
    return {name: at - first if at >= first else math.inf for name, at in alarms.items()}


def risk_monitoring(test: Pool, changed: Pool, risk: float, seed: int) -> float | None:
    """Number of changed rows until MAPIE's monitor of the risk alarms, in one stream; None without MAPIE."""
    try:
        from mapie.exchangeability_testing import RiskMonitoring
    except ImportError:
        return None
    rng, right = np.random.default_rng(seed), []
    for rows in [test] * ORDINARY + [changed] * CHANGED:
        out, y = rows.draw(BATCH, rng)
        chosen = np.flatnonzero(out.accept.numpy())[:WATCHING]  # the rows of a batch are in random order
        right.append(out.network_label.numpy()[chosen] == y[chosen])
    # Half of its level is for a reference, which a given threshold does not need.
    monitor = RiskMonitoring("precision", test_level=2 * RISK_ALPHA, threshold=risk, warn=False)
    values = np.concatenate(right).astype(int)
    monitor.update(values, np.ones_like(values))
    alarmed = np.flatnonzero(monitor.online_risk_lower_bound_sequence_history > risk)
    if not len(alarmed):
        return math.inf
    number = int(np.searchsorted(np.cumsum([len(part) for part in right]), alarmed[0], side="right"))
    late = number + 1 + DELAY - ORDINARY  # batches of changed rows
    return float(late * BATCH) if DELAY < late <= CHANGED else math.inf


def peers(head: TrustHead, test: Pool, changed: Pool, streams: int, seed: int, parallel: Parallel) -> dict[str, Any]:
    """Median number of changed rows until other monitors alarm, and how often MAPIE's does not."""
    assert head.promise is not None
    assert head.promise.risk is not None
    seeds = range(seed, seed + streams)
    crepes = parallel(delayed(martingales)(head, test, changed, i) for i in seeds)
    mapie = parallel(delayed(risk_monitoring)(test, changed, head.promise.risk, i) for i in seeds)
    found: dict[str, Any] = {"crepes": {name: _median(stream[name] for stream in crepes) for name in crepes[0]}}
    if mapie[0] is not None:
        found["mapie"] = {"delay": _median(mapie), "silent": float(np.isinf(mapie).mean())}
    return found


def false_alarms(streams: int, length: int, seed: int, parallel: Parallel) -> dict[str, Any]:
    """Share of streams without a change in which the guard ever suspends the promise; each has its own calibration."""
    head = TrustHead.fit(*_ordinary(np.random.default_rng(seed), 300), normalize=None, reference_points=0)
    found = parallel(delayed(_suspended)(head, length, seed, i) for i in range(streams))
    known = [alarm for alarm in found if alarm is not None]
    return {"streams": len(known), "length": length, "alarms": float(np.mean(known)) if known else 0.0}


def _ordinary(rng: np.random.Generator, count: int) -> tuple[Array, Array]:
    y = rng.integers(0, 3, count)
    return rng.normal(size=(count, 4)) + 2.5 * np.eye(3, 4)[y], y


def _suspended(head: TrustHead, length: int, seed: int, number: int) -> bool | None:
    """Whether the guard of one stream suspends its promise; None if the calibration allows no promise."""
    rng = np.random.default_rng([seed, number])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        head.promise = None
        head.calibrate(*_ordinary(rng, 400))
        if not head.accept_at(risk=0.1).found:
            return None
        guard = Guard(head, on_alarm="refuse", seed=number)
        z, y = _ordinary(rng, length)
        found = guard.judge(z)
        chosen = guard.ask(length // 10)
        guard.update(chosen, y[chosen.numpy()])
        return found.state != "holds" or guard.state != "holds"


def main(options: argparse.Namespace) -> None:
    warnings.filterwarnings("ignore", message="Classes with fewer than")
    rows, parallel = [], Parallel(n_jobs=options.jobs)
    for case, risk in cases(options.seed, options.smoke):
        rng = np.random.default_rng(options.seed)
        head = TrustHead.fit(case.train.z, case.train.y, classes=np.arange(case.train.logits.shape[1]))
        head.calibrate(*case.calibration)
        if not head.accept_at(risk=risk).found:
            continue
        assert head.promise is not None
        test, changes = pool(head, case.test), pools(case, head, rng)
        runs, streams = (1, 1) if options.smoke else (options.runs, min(options.runs, STREAMS))
        ends = parallel(delayed(deployments)(head, test, changes, options.seed + i) for i in range(runs))
        for kind, changed in changes.items():
            plain = changed.out.accept.numpy()
            row: dict[str, Any] = {"network": case.name, "change": kind, "risk": head.promise.risk}
            row |= {"true_risk": changed.risk(plain), "plain_accepted": float(changed.share[plain].sum())}
            row |= {"ordinary_accepted": float(test.out.accept.double().mean())}
            row |= {method: summary([end[kind, method] for end in ends]) for method in METHODS}
            rows.append(row | peers(head, test, changed, streams, options.seed, parallel))
            print(rows[-1], flush=True)
    false = false_alarms(3 if options.smoke else options.streams, 1000, options.seed, parallel)
    print(false)
    if not options.smoke:
        about = {"runs": options.runs, "batch": BATCH, "ordinary": ORDINARY, "changed": CHANGED, "back": BACK}
        about |= {"watching": WATCHING, "restoring": RESTORING, "delay": DELAY, "streams": min(options.runs, STREAMS)}
        about |= {"alpha": ALPHA, "risk_alpha": RISK_ALPHA, "false_alarms": false}
        write_results("deployment", options, ("torch", "crepes", "mapie"), about | {"rows": rows})


if __name__ == "__main__":
    parser = arguments(__doc__, jobs=True)
    parser.add_argument("--runs", type=int, default=40, help="deployments of every change")
    parser.add_argument("--streams", type=int, default=1000, help="streams without a change")
    main(parser.parse_args())

"""A guard in operation: how often does it say that a broken promise holds, and how many labels restore it?

Simulated deployments: ordinary rows (drawn from the test rows), then rows of another kind, then ordinary ones again.
The kinds are changed pictures where they are stored (blur, noise, dark) and otherwise noise on embeddings, a class that
grows to eight rows in ten, and rows of unknown classes among three in ten. Labels of the rows that the guard asks for
arrive some batches later. The guard refuses while its promise is suspended, and it is recalibrated as soon as its
labels are enough. With *even* sampling the same tests get labels of rows that are chosen evenly from all rows. A head
without a guard goes on accepting. The martingales of crepes get the scores that the guard's drift monitor gets.

A promise is *missed* if, at the end of the changed rows, the guard says that it holds and the risk at its threshold,
computed from all rows of the kind, is above the promised one.

False alarms: streams without a change, each with a calibration of its own, of normal embeddings.

    SEPC_DATA=... python -m experiments.promises.deployment
"""

from __future__ import annotations

import argparse
import math
import warnings
from collections.abc import Iterator
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
    paper_tables,
    resnet_case,
    table_case,
)
from experiments.promises.drift import ALPHA, crepes_alarms
from sepc_torch import DriftMonitor, Guard, HeadPrediction, RiskMonitor, TrustHead
from sepc_torch.head import guard as guard_module
from sepc_torch.shapes import Array

BATCH, ORDINARY, CHANGED, BACK = 100, 10, 30, 10
# Batches until labels arrive, and rows asked for in a batch, while the promise holds and while it is suspended.
DELAY, WATCHING, RESTORING = 3, 5, 25
# Shares of the rows of the class that grows, and of unknown rows.
GROWN, UNKNOWN = 0.8, 0.3
METHODS = ("guard", "even")


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
    early: bool


def cases(seed: int, smoke: bool) -> Iterator[tuple[Case, float]]:
    """Networks with the risk that is promised: about half of their error, and at least 2 %."""
    if smoke:
        yield table_case("digits", paper_tables()["digits"], seed, epochs=5), 0.05
        return
    found = [resnet_case(10), resnet_case(100), clinc_case()]
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


def deploy(head: TrustHead, test: Pool, changed: Pool, seed: int, even: bool) -> Run:
    """Run one deployment."""
    rng = np.random.default_rng(seed)
    guard = Guard(head, DriftMonitor(head, ALPHA, seed), RiskMonitor(head, seed=seed), on_alarm="refuse", seed=seed)
    assert guard.risk is not None
    labels: list[dict[int, int]] = [{} for _ in range(DELAY)]
    truth: dict[int, int] = {}
    first, last = ORDINARY * BATCH, (ORDINARY + CHANGED) * BATCH
    alarm, before, wrong, missed, asked, restored, accepted, early = math.inf, 0, 0, False, 0, math.inf, 0, False
    plan = [test] * ORDINARY + [changed] * CHANGED + [test] * BACK

    def everywhere(trial: Any) -> tuple[int, int | None, float]:
        return len(trial.state["threshold"]) - 1, None, math.nan

    for number, rows in enumerate(plan):
        out, y = rows.draw(BATCH, rng)
        found = guard.watch(out, with_logits=head.takes_logits)
        inside = first <= number * BATCH < last
        if inside and math.isinf(alarm):
            before += int(found.out.accept.sum())
            wrong += int((found.out.accept.numpy() & (out.network_label.numpy() != y)).sum())
            if found.state != "holds":
                alarm = (number + 1) * BATCH - first
        early |= number < ORDINARY and found.state != "holds"
        if inside:
            accepted += int(found.out.accept.sum()) if number * BATCH >= last - 1000 else 0
        if guard.state == "holds":
            chosen = guard.ask(WATCHING)
        elif even:
            with patch.object(guard_module._Trial, "forecast", everywhere):
                chosen = guard.ask(RESTORING)
        else:
            chosen = guard.ask(RESTORING)
        names, of_id = chosen.tolist(), dict(zip(found.ids.tolist(), y.tolist(), strict=True))
        truth |= of_id
        labels.append({name: truth[name] for name in names})
        held, arrived = guard.state == "holds", labels.pop(0)
        if arrived:
            guard.update(arrived)
        if not held and inside:
            asked += len(arrived)
            if guard.state != "holds":
                guard.recalibrate()
            if guard.state == "holds":
                restored = min(restored, asked)
        if (number + 1) * BATCH == last:
            missed = guard.state == "holds" and changed.risk(kept(guard, changed)) > guard.risk.risk
    return Run(missed, alarm, before, wrong, restored, accepted / 1000, early)


def summary(
    name: str, kind: str, head: TrustHead, test: Pool, changed: Pool, runs: int, seed: int, parallel: Parallel
) -> dict[str, Any]:
    """One row of the table."""
    assert head.promise is not None
    plain = changed.out.accept.numpy()
    found: dict[str, Any] = {"network": name, "change": kind, "risk": head.promise.risk}
    found |= {"true_risk": changed.risk(plain), "plain_accepted": float(changed.share[plain].sum())}
    for method in METHODS:
        ends = parallel(delayed(deploy)(head, test, changed, seed + i, method == "even") for i in range(runs))
        restored = np.array([end.labels for end in ends])
        known = restored[np.isfinite(restored)]
        found[method] = {
            "missed": float(np.mean([end.missed for end in ends])),
            "early": float(np.mean([end.early for end in ends])),
            "delay": _median(end.delay for end in ends),
            "accepted_before": float(np.mean([end.accepted_before for end in ends])),
            "wrong_before": float(np.mean([end.wrong_before for end in ends])),
            "restored": len(known) / runs,
            "labels": _median(restored),
            "accepted": float(np.mean([end.accepted for end in ends])),
        }
    return found


def _median(values: Any) -> float | None:
    found = float(np.median(list(values)))
    return found if math.isfinite(found) else None


def martingales(head: TrustHead, test: Pool, changed: Pool, runs: int, seed: int) -> dict[str, float | None]:
    """Median number of changed rows until the martingales of crepes alarm."""
    assert head.calibration is not None
    reference = head.calibration.network.ranked_nonconformity.double().numpy()
    found: dict[str, list[float]] = {}
    for i in range(runs):
        rng = np.random.default_rng(seed + i)
        parts = [test.draw(ORDINARY * BATCH, rng)[0], changed.draw(CHANGED * BATCH, rng)[0]]
        score = np.concatenate([part.nonconformity.double().numpy() for part in parts])
        for name, at in crepes_alarms(rng.permutation(reference), score, i).items():
            found.setdefault(name, []).append(at - ORDINARY * BATCH if at >= ORDINARY * BATCH else math.inf)
    return {name: _median(delays) for name, delays in found.items()}


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
        test, runs = pool(head, case.test), 1 if options.smoke else options.runs
        for kind, changed in pools(case, head, rng).items():
            row = summary(case.name, kind, head, test, changed, runs, options.seed, parallel)
            rows.append(row | {"crepes": martingales(head, test, changed, min(runs, 5), options.seed)})
            print(rows[-1], flush=True)
    false = false_alarms(3 if options.smoke else options.streams, 1000, options.seed, parallel)
    print(false)
    if not options.smoke:
        about = {"runs": options.runs, "batch": BATCH, "ordinary": ORDINARY, "changed": CHANGED, "delay": DELAY}
        about |= {"watching": WATCHING, "restoring": RESTORING, "alpha": ALPHA, "false_alarms": false}
        write_results("deployment", options, ("torch", "crepes"), about | {"rows": rows})


if __name__ == "__main__":
    parser = arguments(__doc__, jobs=True)
    parser.add_argument("--runs", type=int, default=20, help="deployments of every change")
    parser.add_argument("--streams", type=int, default=1000, help="streams without a change")
    main(parser.parse_args())

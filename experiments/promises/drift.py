"""Drift over time: how often does the monitor raise a false alarm, and how many points does it need for a change?

False alarms: streams without drift, each with ranked points of its own; the promise is at most ``alpha`` of the
streams, at any moment. Delay: streams of test rows that change after 1000 points, to other conditions (noise, blur,
dark), to other classes (one class in eight points of ten) or to other regions (the points of half of the regions).

The others get the same level for the whole stream. Kolmogorov-Smirnov and MMD test windows of 100 points against
calibration points and share the level among the windows, so that they must know the length of the stream; MMD is
Gretton's unbiased estimate with a Gaussian kernel of the median width, and permutations (the test of alibi-detect's
MMDDrift). The martingales of crepes, with their default settings, bet on conformal p-values of the score against all
earlier points: the simple jumper, and the mean of simple jumper and sleeper/stayer.

    SEPC_DATA=... python -m experiments.promises.drift
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import torch
from scipy.stats import ks_2samp

from experiments.harness import arguments, write_results
from experiments.panel.cases import Case, Rows, paper_tables, resnet_case, table_case, tables
from sepc_torch import DriftMonitor, HeadPrediction, TrustHead
from sepc_torch.shapes import Array

ALPHA = 0.01
CLEAN, CHANGED, WINDOW = 1000, 600, 100
METHODS = ("monitor", "ks", "mmd", "crepes jumper", "crepes composite")


def cases(seed: int, smoke: bool) -> list[Case]:
    """The networks: two tables, and two ResNets where their embeddings are stored."""
    if smoke:
        return [table_case("digits", paper_tables()["digits"], seed, epochs=5)]
    found = [table_case(name, data, seed) for name, data in tables(("penbased", "satimage")).items()]
    return found + [case for case in (resnet_case(10), resnet_case(100)) if case is not None]


def changes(case: Case, out: HeadPrediction, rng: np.random.Generator) -> dict[str, Rows | Array]:
    """What the stream changes to: other rows, or weights of the test rows."""
    found: dict[str, Rows | Array] = dict(case.shifted)
    if not found and case.classifier is not None:
        weight, bias = case.classifier
        z = case.test.z + 0.5 * case.test.z.std(axis=0) * rng.normal(size=case.test.z.shape).astype(np.float32)
        found["noise"] = Rows(z, case.test.y, z @ weight.T + bias)
    chosen = case.test.y == rng.integers(case.test.y.max() + 1)
    found["class"] = np.where(chosen, 0.8 / chosen.sum(), 0.2 / (~chosen).sum())
    region = out.nearest.numpy()
    kept = np.isin(region, rng.permutation(np.unique(region))[::2])
    found["region"] = kept / kept.sum()
    return found


def first(crossed: Array) -> float:
    """Index of the first True, or inf."""
    return float(np.argmax(crossed)) if crossed.any() else math.inf


def monitor_alarm(monitor: DriftMonitor, out: HeadPrediction) -> float:
    at = monitor.update_from(out, with_logits=monitor.with_logits).alarm_at
    return math.inf if at is None else float(at)


def ks_alarm(reference: Array, score: Array) -> float:
    windows = score[: len(score) // WINDOW * WINDOW].reshape(-1, WINDOW)
    p = np.array([ks_2samp(reference, window).pvalue for window in windows])
    return WINDOW * (first(p <= ALPHA / len(windows)) + 1) - 1


def mmd_alarm(reference: Array, z: Array, rng: np.random.Generator) -> float:
    windows = z[: len(z) // WINDOW * WINDOW].reshape(-1, WINDOW, z.shape[1])
    n = len(reference)
    # Permutations that can reach the level of one window.
    permutations = math.ceil(1.1 * len(windows) / ALPHA)
    sides = np.ones((permutations, n + WINDOW), dtype=np.float32)
    sides[:, n:] = 0.0
    sides[1:] = rng.permuted(sides[1:], axis=1)
    for number, window in enumerate(windows):
        both = torch.from_numpy(np.concatenate([reference, window])).float()
        squared = torch.cdist(both, both) ** 2
        kernel = torch.exp(-squared / squared[squared > 0].median()).fill_diagonal_(0.0).numpy()
        row = kernel.sum(axis=1)
        inside = np.einsum("ij,ij->i", sides @ kernel, sides)
        mixed = sides @ row - inside
        other = kernel.sum() - inside - 2 * mixed
        mmd = inside / (n * (n - 1)) + other / (WINDOW * (WINDOW - 1)) - 2 * mixed / (n * WINDOW)
        if (mmd >= mmd[0]).mean() <= ALPHA / len(windows):
            return float(WINDOW * (number + 1) - 1)
    return math.inf


def crepes_alarms(reference: Array, score: Array, seed: int) -> dict[str, float]:
    from crepes.martingales import CompositeMartingale, SimpleJumper, SleeperStayer, semi_online_p_values

    p = semi_online_p_values(np.concatenate([reference, score]), seed=seed)[len(reference) :]
    both = CompositeMartingale([SimpleJumper(), SleeperStayer()])
    martingales = {"crepes jumper": SimpleJumper(), "crepes composite": both}
    return {name: first(martingale.apply(p) >= 1.0 / ALPHA) for name, martingale in martingales.items()}


def delays(case: Case, draws: int, rng: np.random.Generator) -> list[dict[str, Any]]:
    """For every change and method: false alarms before it, share of streams that alarm after it, median delay."""
    head = TrustHead.fit(case.train.z, case.train.y, classes=np.arange(case.train.logits.shape[1]))
    head.calibrate(*case.calibration)
    assert head.calibration is not None
    labels = head.calibration.network
    reference = labels.ranked_nonconformity.double().numpy()
    points = case.calibration.z[labels.ranked_rows.numpy()][:300]
    out = head.judge(case.test.z, case.test.logits)
    rows = []
    for name, change in changes(case, out, rng).items():
        later = head.judge(change.z, change.logits) if isinstance(change, Rows) else out
        embeddings = change.z if isinstance(change, Rows) else case.test.z
        found: dict[str, list[float]] = {method: [] for method in METHODS}
        accuracy = []
        for draw in range(draws):
            before = rng.permutation(len(case.test.y))[: min(CLEAN, len(case.test.y) // 2)]
            after = (
                rng.permutation(len(change.y))[:CHANGED]
                if isinstance(change, Rows)
                else rng.choice(len(change), CHANGED, p=change)
            )
            stream = HeadPrediction(*(torch.cat([a[before], b[after]]) for a, b in zip(out, later, strict=True)))
            z = np.concatenate([case.test.z[before], embeddings[after]])
            score = stream.nonconformity.double().numpy()
            found["monitor"].append(monitor_alarm(DriftMonitor(head, ALPHA, seed=draw), stream) - len(before))
            found["ks"].append(ks_alarm(reference, score) - len(before))
            if draw < 3:  # permutations are slow
                found["mmd"].append(mmd_alarm(points, z, rng) - len(before))
            for method, alarm in crepes_alarms(rng.permutation(reference), score, draw).items():
                found[method].append(alarm - len(before))
            alone = DriftMonitor(head, ALPHA)
            alone.update_from(HeadPrediction(*(column[after] for column in later)), with_logits=alone.with_logits)
            y = torch.from_numpy(change.y if isinstance(change, Rows) else case.test.y)
            taken = later.accept[after]
            right = (later.network_label == y)[after][taken].double().mean()
            accuracy.append([float(right), *alone.accuracy()])
        # Draws in which the head accepted nothing have no accuracy.
        known = np.array([row for row in accuracy if np.isfinite(row).all()])
        means = known.mean(axis=0).tolist() if len(known) else [None] * 4
        for method, delay in found.items():
            late = np.array([d for d in delay if d >= 0])
            rows.append(
                {
                    "network": case.name,
                    "change": name,
                    "method": method,
                    "false": sum(d < 0 for d in delay) / len(delay),
                    "found": float(np.mean(np.isfinite(late))) if len(late) else None,
                    "delay": float(np.median(late)) if len(late) and np.isfinite(np.median(late)) else None,
                    "accuracy": dict(zip(("true", "estimate", "low", "high"), means, strict=True)),
                }
            )
    return rows


def false_alarms(head: TrustHead, streams: int, length: int, ranked: int, rng: np.random.Generator) -> dict[str, Any]:
    """Share of streams without drift that ever alarm; scores and regions are drawn afresh, also the ranked points."""
    monitor = DriftMonitor(head, ALPHA)
    shares = monitor._shares
    bins = len(monitor._score_start)
    alarms = 0
    for seed in range(streams):
        monitor.seed = seed
        monitor._score_start = np.bincount(rng.integers(0, bins, ranked), minlength=bins)
        monitor._cell_start = np.bincount(rng.choice(len(shares), ranked, p=shares), minlength=len(shares))
        monitor._state = monitor._fresh_state()
        for _ in range(0, length, 2000):
            cell = rng.choice(len(shares), 2000, p=shares)
            monitor._advance(rng.integers(0, bins, 2000), cell, np.zeros(2000, dtype=bool))
        alarms += monitor.p_value <= ALPHA
    return {"streams": streams, "length": length, "ranked": ranked, "cells": len(shares), "alarms": alarms / streams}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--streams", type=int, default=1000, help="streams without drift")
    parser.add_argument("--draws", type=int, default=20, help="streams of every change")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message="Classes with fewer than")
    rng = np.random.default_rng(options.seed)
    rows = []
    found = cases(options.seed, options.smoke)
    for case in found:
        for row in delays(case, 3 if options.smoke else options.draws, rng):
            rows.append(row)
            print(row, flush=True)
    head = TrustHead.fit(found[0].train.z, found[0].train.y).calibrate(*found[0].calibration)
    streams, length = (5, 2000) if options.smoke else (options.streams, 10_000)
    false = false_alarms(head, streams, length, 1000, rng)
    print(false)
    if not options.smoke:
        results = {
            "alpha": ALPHA,
            "draws": options.draws,
            "clean": CLEAN,
            "changed": CHANGED,
            "window": WINDOW,
            "false_alarms": false,
            "rows": rows,
        }
        write_results("drift", options, ("torch", "scikit-learn", "crepes"), results)


if __name__ == "__main__":
    main()

r"""Drift over time: an alarm that is valid at every moment, where the stream changed, and the accuracy to expect.

:class:`DriftMonitor` compares a stream with the ranked calibration points of a head by conformal p-values
(:mod:`sepc_torch.head.betting`) of two kinds: of the nonconformity score, and of the occupancy of cells of regions
(nearest ellipsoids).

Claim: if ranked points and stream are exchangeable, :math:`P(\text{ever an alarm}) \le \alpha`. Proof. (1) Bins, cells
and bets depend only on calibration points that are not ranked. Given these, the p-values of each sequence are
independent and uniform. (2) A bet is a density on [0, 1], so the capital of a sequence is a martingale that starts at
one. (3) By Ville's inequality it ever reaches L with probability at most 1 / L. (4) L is :math:`2 / \alpha` for the
scores and :math:`2 C / \alpha` for each of C cells of regions; the probabilities sum to :math:`\alpha`, whatever the
dependence of the sequences. (5) For W merged workers L is W times as large; that they share the ranked points does not
matter.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sepc_torch.data import files
from sepc_torch.data.options import count
from sepc_torch.head.betting import (
    GAINS,
    POWERS,
    bet,
    counts_after,
    log_cell_bets,
    log_power_bets,
    occupancy_p_values,
    sequential_p_values,
    uniforms,
)
from sepc_torch.head.conformal import check_share
from sepc_torch.head.drift_report import AccuracyEstimate, DriftReport, Move, expected_accuracy
from sepc_torch.head.label_calibration import LabelCalibration
from sepc_torch.head.prediction import HeadPrediction
from sepc_torch.head.trust_head import TrustHead
from sepc_torch.shapes import Array, Float, Int

# Rows that are processed at once; the bets on them need some megabytes.
_CHUNK = 2048
# Quantiles of the scores that separate bins: even ones, and finer towards strange points.
_QUANTILES = np.unique(np.concatenate([np.linspace(0.0, 1.0, 33), 1.0 - 0.5 ** np.arange(5, 11)]))
# Regions form cells that are expected to hold at least this many calibration points, and at least this share of them.
_CELL_POINTS, _CELL_SHARE = 10, 1 / 40
# A change is listed if its evidence since it began exceeds this logarithm: about one in a thousand.
_LISTED = 7.0
# p-values up to this one are counted to describe bets on scores.
_SMALL = 0.1


class DriftMonitor:
    """Watches whether a stream still looks like the calibration points of a head.

    Args:
        head: A calibrated head, with its threshold set.
        alpha: Probability of *ever* raising an alarm without drift.
        seed: Seed of the random numbers that break ties; workers need different ones.

    >>> rng = np.random.default_rng(0)
    >>> y = np.arange(600) % 2
    >>> x = rng.normal(size=(600, 4)) + 3.0 * y[:, None]
    >>> head = TrustHead.fit(x[:200], y[:200]).calibrate(x[200:], y[200:])
    >>> monitor = DriftMonitor(head)
    >>> monitor.update(rng.normal(size=(100, 4)) + 3.0 * y[:100, None]).alarm
    False
    >>> monitor.update(rng.normal(size=(100, 4))).alarm  # only one class is left
    True
    """

    def __init__(self, head: TrustHead, alpha: float = 0.01, seed: int = 0) -> None:
        if head.calibration is None or not head.calibration.done:
            raise RuntimeError("The head must be calibrated first: head.calibrate(embeddings, labels, logits).")
        self.head, self.alpha, self.seed = head, check_share(alpha, "alpha"), count(seed, "seed")
        self._calibration, self.with_logits = head.calibration, head.calibration.network.done
        labels = head.calibration.network if self.with_logits else head.calibration.own
        if len(labels.point_region) == 0:
            raise RuntimeError("The calibration of this head is of an older version, without regions; repeat it.")
        if len(labels.group_threshold):
            raise ValueError("The head accepts by given groups, which a stream does not have; use another accept_at.")
        self._score_edges = np.quantile(labels.strangeness.combined.double().cpu().numpy(), _QUANTILES)[1:]
        self._cell_of, codes = _cells(labels, head)
        self._classes = [tuple(sorted(set(codes[self._cell_of == c].tolist()))) for c in range(self._cell_of.max() + 1)]
        region = labels.point_region[labels.held_rows]
        cell = self._cell_of[region.cpu().numpy()]
        self._cell_start = np.bincount(cell, minlength=len(self._classes))
        # As rounded in predictions.
        scores = self._score_bins(labels.held_nonconformity.to(head.projection.shift).double().cpu().numpy())
        self._score_start = np.bincount(scores, minlength=len(self._score_edges) + 1)
        # Shares from points that are not ranked: bets must not depend on the ranked ones.
        fitted = np.delete(labels.point_region.cpu().numpy(), labels.held_rows.cpu().numpy())
        expected = np.bincount(self._cell_of[fitted], minlength=len(self._classes)) + 0.5
        self._shares = expected / expected.sum()
        accepted = (labels.held_joint >= labels.least_score(labels.point_label[labels.held_rows], region, None)).cpu()
        wrong = accepted & ~labels.held_right.cpu()
        self._accepted_start = np.bincount(cell, weights=accepted.numpy(), minlength=len(self._classes))
        self._wrong_start = np.bincount(cell, weights=wrong.numpy(), minlength=len(self._classes))
        self._state = self._fresh_state()

    def update(self, z: Any, logits: Any = None) -> DriftReport:
        """Judge further points of the stream, in their order; return the report.

        Args:
            z: (B, D) embeddings, as in :meth:`TrustHead.judge`.
            logits: (B, C) logits of the network; required if and only if the head was calibrated with logits.
        """
        if (logits is None) == self.with_logits:
            raise ValueError(
                f"The head was calibrated {'with' if self.with_logits else 'without'} logits; call update "
                f"{'with' if self.with_logits else 'without'} them too."
            )
        return self.update_from(self.head.judge(z, logits))

    def update_from(self, out: HeadPrediction) -> DriftReport:
        """Update with predictions of the head that are already there, so that the head runs once."""
        if self.head.calibration is not self._calibration:
            raise RuntimeError(
                "The head was calibrated again, so its p-values have a new meaning; start a new DriftMonitor."
            )
        score = out.strangeness.double().cpu().numpy()
        region = out.nearest.clamp_min(0).cpu().numpy()
        accept = out.accept.cpu().numpy()
        for start in range(0, len(score), _CHUNK):
            rows = slice(start, start + _CHUNK)
            self._advance(self._score_bins(score[rows]), self._cell_of[region[rows]], accept[rows])
        return self.report()

    def watch(self, chunks: Iterable[Any]) -> Iterator[DriftReport]:
        """Yield a report after each chunk of a stream: embeddings, or pairs of embeddings and logits."""
        for chunk in chunks:
            yield self.update(*chunk) if isinstance(chunk, tuple) else self.update(chunk)

    @property
    def p_value(self) -> float:
        """Anytime-valid p-value: at every moment, and also for the least one so far."""
        return min(1.0, 2.0 * len(self._state["seen"]) * math.exp(-max(float(self._state["peak"].max()), 0.0)))

    def report(self) -> DriftReport:
        """Return the report on all points seen."""
        seen, moves, at = int(self._state["seen"].sum()), self.moves(), self._state["alarm_at"]
        return DriftReport(
            seen=seen,
            p_value=self.p_value,
            alarm=self.p_value <= self.alpha,
            alarm_at=int(at[at >= 0].min()) if self.p_value <= self.alpha and (at >= 0).any() else None,
            since=moves[0].since if moves else None,
            moves=moves,
            accepted=float(self._state["accepted"].sum() / max(seen, 1)),
            accuracy=self.accuracy(),
        )

    def moves(self) -> tuple[Move, ...]:
        """Return the changes that bets have found, strongest first; they describe, and carry no guarantee."""
        found: dict[tuple[str, int], Move] = {}
        for worker in range(len(self._state["seen"])):
            state = {name: values[worker] for name, values in self._state.items()}
            evidence = state["path"] - state["low"]
            for j in np.argsort(-evidence):
                if evidence[j] < _LISTED:
                    break
                move = self._describe(int(j), state, float(evidence[j]))
                found.setdefault((move.change, -1 if not move.regions else move.regions[0]), move)
        return tuple(sorted(found.values(), key=lambda move: -move.evidence))

    def accuracy(self, level: float = 0.05) -> AccuracyEstimate:
        """Expected accuracy of the accepted points of the stream, without labels; see :func:`expected_accuracy`.

        The estimate does not see a change within a region, such as new label errors there.

        Args:
            level: Probability that the interval misses.
        """
        traffic = self._state["accepted"].sum(axis=0)
        return expected_accuracy(traffic, self._accepted_start, self._wrong_start, check_share(level, "level"))

    def merge(self, *others: DriftMonitor) -> DriftMonitor:
        """Return a monitor of several workers' streams; further updates of it continue the first stream.

        All workers must watch with the same head and alpha. The number of workers must be decided before the stream is
        seen: each gets its share of alpha.
        """
        merged = DriftMonitor(self.head, self.alpha, self.seed)
        states = [monitor.state_dict() for monitor in (self, *others)]
        arrays = {name: torch.cat([state[name] for state in states]) for name in self._state}
        merged.load_state_dict({**states[0], **arrays})
        return merged

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state: counts and capital, some kilobytes, as tensors with a row per worker."""
        arrays = {name: torch.from_numpy(values.copy()) for name, values in self._state.items()}
        return {**arrays, "seed": torch.tensor(self.seed)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore a state of :meth:`state_dict` of a monitor with an equal head."""
        fresh = self._fresh_state()
        for name, values in fresh.items():
            if name not in state or state[name].shape[1:] != values.shape[1:]:
                given = tuple(state[name].shape) if name in state else "nothing"
                raise ValueError(
                    f"The state of {name!r} should have shape {('workers', *values.shape[1:])}, got {given}; "
                    "load the state of a monitor with the same head."
                )
        self._state = {name: state[name].cpu().numpy().copy() for name in fresh}
        self.seed = int(state["seed"])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state, alpha and a checksum of the calibration to a file; the head has a file of its own."""
        metadata = {"alpha": self.alpha, "seed": self.seed, "calibration": self._calibration_checksum()}
        files.write(path, "drift_monitor", self._state, metadata)

    @classmethod
    def load(cls, path: str | os.PathLike[str], head: TrustHead) -> DriftMonitor:
        """Load a monitor that continues the stream of the saved one.

        Args:
            path: File that :meth:`save` wrote.
            head: The head of the saved monitor, with the same calibration and threshold.
        """
        arrays, metadata = files.read(path, "drift_monitor")
        with files.interpreting(path):
            monitor = cls(head, metadata["alpha"], metadata["seed"])
        if metadata["calibration"] != monitor._calibration_checksum():
            raise ValueError(
                f"{os.fspath(path)!r} belongs to another head, calibration or threshold, so its counts mean nothing "
                "here; load it with the head it was saved with, or start a new DriftMonitor."
            )
        with files.interpreting(path):
            state = {name: torch.from_numpy(array) for name, array in arrays.items()}
            monitor.load_state_dict({**state, "seed": torch.tensor(monitor.seed)})
        return monitor

    def _calibration_checksum(self) -> str:
        """SHA-256 of the bins, cells and counts with which every stream of this calibration starts."""
        starts = (self._cell_start, self._score_start, self._accepted_start, self._wrong_start)
        counts = [self._cell_of, *(start.astype(np.int64) for start in starts)]
        # Bins in float32: the head's dtype, in which a file of the head keeps the scores.
        parts = [*counts, self._score_edges.astype(np.float32)]
        return hashlib.sha256(b"".join(np.ascontiguousarray(part).tobytes() for part in parts)).hexdigest()

    def _fresh_state(self) -> dict[str, Array]:
        total = POWERS + len(GAINS) * len(self._classes)
        return {
            "seen": np.zeros(1, np.int64),
            "scores": self._score_start[None].copy(),
            "cells": self._cell_start[None].copy(),
            "accepted": np.zeros((1, len(self._classes)), np.int64),
            "small": np.zeros((1, 2), np.int64),  # p-values of scores up to 0.1, and from 0.9
            "capital": np.full((1, total), -np.inf),
            # The running logarithm of each bet, where it was lowest, and the traffic counted until then.
            "path": np.zeros((1, total)),
            "low": np.zeros((1, total)),
            "low_at": np.zeros((1, total), np.int64),
            "low_count": np.zeros((1, total), np.int64),
            "peak": np.zeros((1, 2)),
            "alarm_at": np.full(1, -1, np.int64),
        }

    def _advance(self, score: Int[Array, "T"], cell: Int[Array, "T"], accept: Array) -> None:
        """Add points to the first worker's stream."""
        state = {name: values[0] for name, values in self._state.items()}
        seen, workers, cells = int(state["seen"]), len(self._state["seen"]), len(self._classes)
        noise = [uniforms(2 * self.seed + i, seen, len(score)) for i in range(2)]
        p_score, state["scores"][:] = sequential_p_values(score, state["scores"], noise[0])
        p_cell, state["cells"][:] = occupancy_p_values(cell, state["cells"], noise[1])
        factors = log_power_bets(p_score)[:, None], log_cell_bets(p_cell, self._shares)
        limit = math.log(2.0 * workers / self.alpha)
        for i, part in enumerate((slice(None, POWERS), slice(POWERS, None))):
            sequences = (1, cells)[i]
            capital = bet(state["capital"][part].reshape(sequences, -1), seen, factors[i])
            state["capital"][part] = capital.bets.reshape(-1)
            total = capital.total.max(axis=1) - math.log(sequences)
            state["peak"][i] = max(state["peak"][i], float(total.max()))
            crossed = np.flatnonzero(total >= limit)
            if len(crossed) and not 0 <= self._state["alarm_at"][0] <= seen + crossed[0]:
                self._state["alarm_at"][0] = seen + crossed[0]
        self._keep_lows(state, np.concatenate([f.reshape(len(f), -1) for f in factors], axis=1), p_score, cell, seen)
        state["accepted"] += np.bincount(cell[accept], minlength=len(self._classes))
        state["small"] += np.array([(p_score <= _SMALL).sum(), (p_score >= 1.0 - _SMALL).sum()])
        self._state["seen"][0] = seen + len(score)

    def _keep_lows(
        self, state: Mapping[str, Any], factors: Float[Array, "T J"], p: Float[Array, "T"], cell: Array, seen: int
    ) -> None:
        """Note where the running logarithm of each bet was lowest, with the traffic counted until there."""
        path = state["path"] + factors.cumsum(axis=0)
        lowest, at = path.min(axis=0), path.argmin(axis=0)
        lower = lowest <= state["low"]
        small = state["small"] + np.stack([p <= _SMALL, p >= 1.0 - _SMALL], axis=1).cumsum(axis=0)
        traffic = (state["cells"] - self._cell_start)[None] - counts_after(cell, len(self._classes))
        counts = np.concatenate([np.repeat(small, POWERS // 2, axis=1), np.repeat(traffic, len(GAINS), axis=1)], axis=1)
        state["low"][lower] = lowest[lower]
        state["low_at"][lower] = seen + at[lower] + 1
        state["low_count"][lower] = counts[at[lower], np.flatnonzero(lower)]
        state["path"][:] = path[-1]

    def _describe(self, j: int, state: Mapping[str, Any], evidence: float) -> Move:
        """Describe the change that bet j stands for."""
        since, half = int(state["low_at"][j]), POWERS // 2
        span = max(int(state["seen"]) - since, 1)
        if j < POWERS:
            share = (state["small"][j // half] - state["low_count"][j]) / span
            return Move(("fell", "rose")[j // half], (), (), _SMALL, float(share), since, evidence)
        c, gain = divmod(j - POWERS, len(GAINS))
        total = state["cells"][c] - self._cell_start[c]
        return Move(
            "lost" if GAINS[gain] < 0 else "gained",
            tuple(self.head.classes[code] for code in self._classes[c]),
            tuple(np.flatnonzero(self._cell_of == c).tolist()),
            float(self._cell_start[c] / self._cell_start.sum()),
            float((total - state["low_count"][j]) / span),
            since,
            evidence,
        )

    def _score_bins(self, score: Float[Array, "T"]) -> Int[Array, "T"]:
        return np.searchsorted(self._score_edges, np.nan_to_num(score, nan=np.inf), side="left")


def _cells(labels: LabelCalibration, head: TrustHead) -> tuple[Int[Array, "K"], Int[Array, "K"]]:
    """Cell of every region, and its class: small regions share a cell, as points that are not ranked say."""
    codes = head.sepc.codes.cpu().numpy()
    regions, held = labels.point_region.cpu().numpy(), labels.held_rows.cpu().numpy()
    expected = np.bincount(np.delete(regions, held), minlength=len(codes)).astype(float)
    least = max(_CELL_POINTS, _CELL_SHARE * expected.sum())
    cell_of, cell, inside = np.zeros(len(codes), np.int64), 0, 0.0
    order = np.lexsort((-expected, codes))  # by class, and within a class the largest regions first
    for position, region in enumerate(order):
        cell_of[region] = cell
        inside += expected[region]
        rest = expected[order[position + 1 :]].sum()
        if inside >= least and rest >= least:
            cell, inside = cell + 1, 0.0
    return cell_of, codes

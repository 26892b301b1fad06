"""Metrics of the scores of the trust panel: by question and group, resampled, and as risk over coverage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from panel_data import Case
from panel_scores import Scores, tensor
from peer_names import PEERS
from resampling import resampled_aurc, resampled_auroc
from torch import Tensor

from sepc_torch.metrics import aurc, ece, naurc, scod_aurc, unknown_auroc


def judge(case: Case, scores: Scores, seed: int) -> dict[str, dict[str, float]]:
    """All figures by question (or question and group) and score."""
    right = tensor(case.test.right)
    found: dict[str, dict[str, float]] = {}
    for name, score in scores.items():
        if name == "accept":
            continue
        found.setdefault("mistakes", {})[name] = 1000 * float(aurc(score["test"], right))
        if not bool(right.all()):
            found.setdefault("naurc", {})[name] = float(naurc(score["test"], right))
        for group in case.unknown:
            found.setdefault(f"unknowns: {group}", {})[name] = float(unknown_auroc(score["test"], score[group]))
            found.setdefault(f"both: {group}", {})[name] = 1000 * float(scod_aurc(*joint(case, score, group, seed)))
        for group, rows in case.shifted.items():
            area = 1000 * float(aurc(score[group], tensor(rows.right)))
            found.setdefault(f"mistakes: {group}", {})[name] = area
    for name in ("max_softmax", "scaled_softmax", "confidence"):
        found.setdefault("calibration", {})[name] = float(ece(scores[name]["test"], right))
        for group, rows in case.shifted.items():
            error = float(ece(scores[name][group], tensor(rows.right)))
            found.setdefault(f"calibration: {group}", {})[name] = error
    return found


def joint(case: Case, score: dict[str, Tensor], group: str, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, right labels and unknown flags of as many known as unknown rows; every score gets the same draw."""
    count = min(len(score["test"]), len(score[group]))
    rng = np.random.default_rng([seed, count])
    known, unknown_rows = (torch.from_numpy(rng.permutation(len(score[name]))[:count]) for name in ("test", group))
    right = torch.cat([tensor(case.test.right)[known], torch.zeros(count, dtype=torch.bool)])
    unknown = torch.arange(2 * count) >= count
    return torch.cat([score["test"][known], score[group][unknown_rows]]), right, unknown


def bootstrap(case: Case, scores: Scores, seed: int, resamples: int) -> dict[str, dict[str, list[float]]]:
    """Differences of our resampled figures to those of each peer, paired: all share the resampled rows."""
    rng = np.random.default_rng([seed, 7])
    names = [name for name in PEERS if name in scores]
    found: dict[str, dict[str, list[float]]] = {}

    def draw_counts(size: int) -> np.ndarray:
        return rng.multinomial(size, np.full(size, 1.0 / size), size=resamples)

    def add(question: str, ours: str, figure: Callable[[str], np.ndarray]) -> None:
        own = figure(ours)
        found[question] = {name: (own - figure(name)).tolist() for name in names}

    test = draw_counts(len(case.test.y))
    wrong = (~case.test.right).astype(float)
    add("mistakes", "confidence", lambda name: 1000 * resampled_aurc(scores[name]["test"], wrong, test))
    for group, rows in case.shifted.items():
        drawn, errors = draw_counts(len(rows.y)), (~rows.right).astype(float)
        add(
            f"mistakes: {group}",
            "confidence",
            lambda name, group=group, errors=errors, drawn=drawn: (  # type: ignore[misc]
                1000 * resampled_aurc(scores[name][group], errors, drawn)
            ),
        )
    for group in case.unknown:
        other = draw_counts(len(scores["joint"][group]))
        add(
            f"unknowns: {group}",
            "strangeness",
            lambda name, group=group, other=other: resampled_auroc(  # type: ignore[misc]
                scores[name]["test"], scores[name][group], test, other
            ),
        )
        both = {name: joint(case, scores[name], group, seed) for name in [*names, "joint"]}
        loss = 0.5 * (~both["joint"][1]).double().numpy()
        drawn = draw_counts(len(loss))
        add(
            f"both: {group}",
            "joint",
            lambda name, both=both, loss=loss, drawn=drawn: (
                1000
                * resampled_aurc(  # type: ignore[misc]
                    both[name][0], loss, drawn
                )
            ),
        )
    return found


def curves(case: Case, scores: Scores, seed: int) -> dict[str, Any]:
    """Risk over coverage, thinned, for the pictures."""
    points = np.linspace(0.05, 1.0, 96)

    def risk(score: Tensor, loss: Tensor) -> list[float]:
        ordered = loss[score.argsort(descending=True, stable=True)].double().cumsum(0)
        counts = np.maximum(1, np.round(points * len(loss)).astype(int))
        return (ordered.numpy()[counts - 1] / counts).tolist()

    right = tensor(case.test.right)
    shown = ("max_softmax", "trust_score", "mahalanobis++", "gaussians", "confidence", "joint")
    found: dict[str, Any] = {"coverage": points.tolist(), "mistakes": {}, "both": {}}
    for name in shown:
        found["mistakes"][name] = risk(scores[name]["test"], ~right)
        for group in case.unknown:
            score, correct, _ = joint(case, scores[name], group, seed)
            found["both"].setdefault(group, {})[name] = risk(score, ~correct)
    return found

"""Scores of a case of the trust panel, of the peers and of a trust head with all defaults, and their metrics."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.panel.cases import Case, Rows
from sepc_torch import TrustHead
from sepc_torch.metrics import aurc, ece, naurc, scod_aurc, unknown_auroc
from sepc_torch.metrics.baselines import NearestNeighbours, TrustScore, baseline_scores
from sepc_torch.metrics.compare import BASELINES

# Titles of the peers in tables, as ``compare`` prints them.
PEERS = {name: baseline.title for name, baseline in BASELINES.items()} | {
    "trust_score_1": f"{BASELINES['trust_score'].title}, first neighbour",
    "knn_50": f"{BASELINES['knn'].title}, 50 neighbours",
}
# The head's score for each question.
OURS = {"mistakes": "confidence", "unknowns": "nonconformity", "both": "joint", "calibration": "confidence"}
# Scores by their name, then by the group of rows.
Scores = dict[str, dict[str, Tensor]]


def tensor(values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))


def groups(case: Case) -> dict[str, Rows]:
    """The rows to score by group: test rows, then unknown and shifted rows."""
    return {"test": case.test, **case.unknown, **case.shifted}


def peer_scores(case: Case, names: Collection[str] = tuple(PEERS)) -> Scores:
    """Every peer's confidence in every group of rows; ``names`` are the wanted peers."""
    parts = groups(case)
    z = tensor(np.concatenate([rows.z for rows in parts.values()]))
    logits = tensor(np.concatenate([rows.logits for rows in parts.values()])).double()
    train, labels = tensor(case.train.z), tensor(case.train.y)
    classifier = None if case.classifier is None else (tensor(case.classifier[0]), tensor(case.classifier[1]))
    calibration = tensor(case.calibration.logits).double(), tensor(case.calibration.y)
    listed = [name for name in BASELINES if name in names]
    found = baseline_scores(train, labels, z, logits, tensor(case.train.logits), calibration, classifier, listed)
    if "trust_score_1" in names:
        found["trust_score_1"] = TrustScore.fit(train, labels, neighbour=1).score(z, logits.argmax(dim=1))
    if "knn_50" in names:
        found["knn_50"] = NearestNeighbours.fit(train, labels, k=min(50, int(labels.bincount().min()))).score(z)
    sizes = [len(rows.y) for rows in parts.values()]
    return {name: dict(zip(parts, score.split(sizes), strict=True)) for name, score in found.items()}


def head_scores(head: TrustHead, case: Case) -> Scores:
    """The calibrated head's scores in every group; a larger score means more trust."""
    outs = {name: head(tensor(rows.z), tensor(rows.logits)) for name, rows in groups(case).items()}
    fields: dict[str, Callable[[Any], Tensor]] = {
        "confidence": lambda out: out.confidence,
        "nonconformity": lambda out: -out.nonconformity,
        "joint": lambda out: out.joint,
        "trust": lambda out: out.network_trust,
        # Rows whose largest logit is not unique have no label, and no margin.
        "margin": lambda out: torch.where(out.network_margin.isnan(), -torch.inf, out.network_margin),
        "accept": lambda out: out.accept,
    }
    return {field: {name: value(out).double() for name, out in outs.items()} for field, value in fields.items()}


def fitted(case: Case) -> tuple[TrustHead, float]:
    """A head with all defaults, and the CPU seconds of the fit."""
    begun = time.process_time()
    head = TrustHead.fit(case.train.z, case.train.y, progress=False, classes=np.arange(case.train.logits.shape[1]))
    return head, time.process_time() - begun


def rows_that_fit(
    head: TrustHead,
    case: Case,
    seed: int,
    some: Rows | None = None,
    layers: dict[str, np.ndarray] | None = None,
) -> Tensor:
    """Calibrate the head; return the indices of the calibration rows that fit its scores. The others are only ranked.

    ``some`` replaces the calibration rows of the case; ``layers`` holds their activations of earlier layers.
    """
    rows = case.calibration if some is None else some
    head.calibrate(rows.z, rows.y, rows.logits, layers=layers, seed=seed)
    assert head.calibration is not None
    return tensor(np.setdiff1d(np.arange(len(rows.y)), head.calibration.network.ranked_rows.numpy()))


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
            "nonconformity",
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


def resampled_aurc(score: Tensor, loss: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The area under the risk-coverage curve of every bootstrap resample, from its counts of the rows."""
    order = score.argsort(descending=True, stable=True).numpy()
    held = counts[:, order]
    risk = (held * loss[order]).cumsum(axis=1) / np.maximum(held.cumsum(axis=1), 1)
    return (held * risk).sum(axis=1) / held.sum(axis=1)


def resampled_auroc(known: Tensor, unknown: Tensor, counts: np.ndarray, others: np.ndarray) -> np.ndarray:
    """The share of pairs in which the known row scores above the unknown one, for every resample."""
    order = torch.cat([unknown, known]).argsort(stable=True).numpy()
    unknown_counts = np.hstack([others, np.zeros_like(counts)])[:, order]
    known_counts = np.hstack([np.zeros_like(others), counts])[:, order]
    wins = (known_counts * unknown_counts.cumsum(axis=1)).sum(axis=1)
    return wins / (counts.sum(axis=1) * others.sum(axis=1))


def summarise(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for every set and question: ours, the best peer in hindsight, the difference and its interval."""
    rows = []
    for name in dict.fromkeys(result["set"] for result in results):
        runs = [result for result in results if result["set"] == name]
        for question in runs[0]["figures"]:
            kind = question.partition(":")[0]
            if kind == "naurc":  # undefined in runs without a mistake
                continue
            mean = {
                score: float(np.mean([run["figures"][question][score] for run in runs]))
                for score in runs[0]["figures"][question]
            }
            ours = mean[OURS[kind]]
            theirs = {score: value for score, value in mean.items() if score in PEERS}
            if kind == "calibration":
                theirs = {"scaled_softmax": theirs["scaled_softmax"]}
            best = (max if kind == "unknowns" else min)(theirs, key=lambda score: theirs[score])
            draws = [run["differences"].get(question, {}).get(best) for run in runs]
            interval = None
            if all(draws):
                interval = np.quantile(np.mean(draws, axis=0), [0.025, 0.975]).tolist()
            rows.append(
                {
                    "set": name,
                    "question": question,
                    "ours": ours,
                    "best": best,
                    "theirs": theirs[best],
                    "interval": interval,
                    "reached": reached(kind, ours, theirs[best]),
                    "all": mean,
                }
            )
    return rows


def reached(kind: str, ours: float, theirs: float) -> bool:
    """The target of each question."""
    if kind == "unknowns":
        return ours >= theirs - 0.005
    return ours < theirs if kind == "both" else ours <= theirs

"""Summary of the trust panel: the head against the best peer of every set and question."""

from __future__ import annotations

from typing import Any

import numpy as np
from peer_names import PEERS

# The head's score for each question.
OURS = {"mistakes": "confidence", "unknowns": "strangeness", "both": "joint", "calibration": "confidence"}


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

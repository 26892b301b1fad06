"""Scores of a case of the trust panel: those of the peers, and those of a trust head with all defaults."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from panel_data import Case, Rows
from torch import Tensor

from sepc_torch import TrustHead
from sepc_torch.metrics.baselines import NearestNeighbours, TrustScore, baseline_scores

# Scores by their name, then by the group of rows.
Scores = dict[str, dict[str, Tensor]]


def tensor(values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))


def groups(case: Case) -> dict[str, Rows]:
    """The rows to score by group: test rows, then unknown and shifted rows."""
    return {"test": case.test, **case.unknown, **case.shifted}


def peer_scores(case: Case) -> Scores:
    """Every peer's confidence in every group of rows."""
    parts = groups(case)
    z = tensor(np.concatenate([rows.z for rows in parts.values()]))
    logits = tensor(np.concatenate([rows.logits for rows in parts.values()])).double()
    train, labels = tensor(case.train.z), tensor(case.train.y)
    classifier = None if case.classifier is None else (tensor(case.classifier[0]), tensor(case.classifier[1]))
    calibration = tensor(case.calibration.logits).double(), tensor(case.calibration.y)
    found = baseline_scores(train, labels, z, logits, tensor(case.train.logits), calibration, classifier)
    found["trust_score_1"] = TrustScore.fit(train, labels, neighbour=1).score(z, logits.argmax(dim=1))
    found["knn_50"] = NearestNeighbours.fit(train, labels, k=min(50, int(labels.bincount().min()))).score(z)
    sizes = [len(rows.y) for rows in parts.values()]
    return {name: dict(zip(parts, score.split(sizes), strict=True)) for name, score in found.items()}


def head_scores(head: TrustHead, case: Case) -> Scores:
    """The calibrated head's scores in every group; a larger score means more trust."""
    outs = {name: head(tensor(rows.z), tensor(rows.logits)) for name, rows in groups(case).items()}
    fields: dict[str, Callable[[Any], Tensor]] = {
        "confidence": lambda out: out.confidence,
        "strangeness": lambda out: -out.strangeness,
        "joint": lambda out: out.joint,
        "trust": lambda out: out.network_trust,
        "margin": lambda out: out.network_margin,
        "accept": lambda out: out.accept,
    }
    return {field: {name: value(out).double() for name, out in outs.items()} for field, value in fields.items()}


def fitted(case: Case) -> tuple[TrustHead, float]:
    """A head with all defaults, and the CPU seconds of the fit."""
    begun = time.process_time()
    head = TrustHead.fit(case.train.z, case.train.y, progress=False, classes=np.arange(case.train.logits.shape[1]))
    return head, time.process_time() - begun

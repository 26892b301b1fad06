"""Pre-annotations for Label Studio: predictions of a head for tasks, as an ML backend returns them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sepc_torch.head.trust_head import TrustHead
from sepc_torch.shapes import Array
from sepc_torch.training.annotation_files import label_studio_prediction


def pre_annotations(
    tasks: Sequence[Mapping[str, Any]], head: TrustHead, embeddings: Array, logits: Array | None = None
) -> list[dict[str, Any]]:
    """Predictions for tasks that :func:`~sepc_torch.training.write_questions` wrote, one for each task.

    The score, by which Label Studio sorts tasks, is the joint score of a calibrated head and the trust of any other.
    An ML backend returns the list from its ``predict(tasks)``.

    Args:
        tasks: Tasks of Label Studio. ``data.id`` of a task is its row in ``embeddings``.
        head: The head.
        embeddings: Embeddings (N, D) of the data set.
        logits: Logits (N, C) of the network, or None to predict the head's own labels.

    >>> points = np.array([[1.0, 0.0], [2.0, 0.1], [0.0, 1.0], [0.1, 2.0]])
    >>> head = TrustHead.fit(points, ["a", "a", "b", "b"], dim=1)
    >>> [found] = pre_annotations([{"data": {"id": 2}}], head, points)
    >>> found["result"][0]["value"]["choices"], found["score"] > 0.5
    (['b'], True)
    """
    rows = np.array([_row(task, len(embeddings)) for task in tasks], dtype=np.int64)
    out = head.judge(embeddings[rows], None if logits is None else logits[rows])
    calibrated = not bool(out.joint.isnan().all())
    score = (out.joint if calibrated else out.network_trust).tolist()
    found = []
    for code, value in zip(out.network_label.tolist(), score, strict=True):
        prediction = label_studio_prediction(head.classes[code], value)
        found.append(prediction if code >= 0 else {**prediction, "score": 0.0, "result": []})
    return found


def _row(task: Mapping[str, Any], rows: int) -> int:
    name = task.get("data", {}).get("id")
    if isinstance(name, bool) or not isinstance(name, int) or not 0 <= name < rows:
        raise ValueError(f"A task has data.id {name!r}; expected the row of its embedding, 0 to {rows - 1}.")
    return name

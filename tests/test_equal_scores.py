"""Equal embeddings get equal answers: in every batch, for every dtype of the input, after saving and loading."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from sepc_torch import TrustHead
from sepc_torch.head.calibration.calibration_tables import RESOLUTION
from sepc_torch.head.calibration.label_calibration import LabelCalibration, separated

Rng = np.random.Generator
# Whether random points can promise a risk is not the question of these tests.
pytestmark = pytest.mark.filterwarnings("ignore:The head accepts nothing")


class TestSeparated:
    def test_groups_are_clearly_apart(self, rng: Rng) -> None:
        """Every threshold lies under its group, and over all lower groups."""
        for spread in (1e-6, 1e-3, 1.0):
            scores = torch.from_numpy(np.repeat(spread * rng.normal(size=40), 5) + 1e-8 * rng.normal(size=200))
            steps = separated(scores)
            for low in steps.scores.unique().tolist():
                group = steps.scores == low
                under = steps.below[low]
                assert under < float(scores[group].min()) == low
                others = scores[steps.scores < low]
                assert len(others) == 0 or float(others.max()) < under
                assert float(scores[group].max()) - low <= 8 * RESOLUTION * (1 + abs(low))

    def test_equal_scores_share_a_group(self, rng: Rng) -> None:
        values = rng.normal(size=30)
        scores = torch.from_numpy(np.repeat(values, 10) + 1e-9 * rng.normal(size=300))
        steps = separated(scores)
        clear = np.flatnonzero([np.partition(np.abs(values - v), 1)[1] > 10 * RESOLUTION for v in values])
        for i in clear:
            assert len(steps.scores[10 * i : 10 * i + 10].unique()) == 1

    def test_dense_scores_keep_many_groups(self, rng: Rng) -> None:
        scores = torch.from_numpy(rng.normal(size=100_000))
        assert len(separated(scores).scores.unique()) > 2000

    def test_joint_scores_of_zero(self) -> None:
        """Far points have joint scores that round to zero; a threshold can lie above or below them."""
        labels = LabelCalibration(["regions"], 1)
        labels.ranked_joint = torch.tensor([0.0] * 20 + [0.5] * 80, dtype=torch.float64)
        labels.ranked_right = torch.ones(100, dtype=torch.bool)
        assert labels.accept(None, 0.05, 0.1).coverage == 1.0
        assert labels.accept(None, 0.05, 0.5).coverage == 0.8


def blank_pages(rng: Rng, blank: np.ndarray, count: int, share: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Embeddings after a ReLU, labels and logits; a share of the embeddings is one and the same."""
    y = rng.integers(0, 2, count)
    z = np.maximum(
        rng.normal(size=(count, len(blank))) + 1.2 * np.sign(np.arange(len(blank)) % 2 - 0.5) * y[:, None], 0
    )
    same = rng.random(count) < share
    z[same], y[same] = blank, 0
    logits = 3.0 * np.eye(2)[np.where((rng.random(count) < 0.15) & ~same, 1 - y, y)]
    return z, y, logits


def judged(head: TrustHead, z: Tensor, logits: Tensor | None, size: int) -> tuple[Tensor, Tensor]:
    outs = [head(z[i : i + size], None if logits is None else logits[i : i + size]) for i in range(0, len(z), size)]
    return torch.cat([out.accept for out in outs]), torch.cat([out.p_value for out in outs])


@pytest.mark.slow
@pytest.mark.parametrize("with_logits", [False, True])
def test_repeated_embeddings_are_judged_alike(rng: Rng, tmp_path: Path, with_logits: bool) -> None:
    """The threshold lies next to the score of the repeated embedding, where a rounding error would decide."""
    blank = np.maximum(2.5 * rng.normal(size=24), 0.0)
    z, y, _ = blank_pages(rng, blank, 400, 0.0)
    head = TrustHead.fit(z, y)
    z, y, logits = blank_pages(rng, blank, 600, 0.3)
    head.calibrate(z, y, logits if with_logits else None)
    head.save(tmp_path / "head")
    loaded = TrustHead.load(tmp_path / "head")
    new = torch.from_numpy(np.vstack([np.repeat(blank[None], 120, axis=0), z[:80]]))
    scores = torch.from_numpy(np.vstack([np.repeat([[1.0, 0.0]], 120, axis=0), logits[:80]])) if with_logits else None
    for request in ({"flag_rate": 0.1}, {"flag_rate": 0.3}, {"risk": 0.12}):
        for model in (head, loaded):
            model.accept_at(**request)
        expected = judged(head, new.float(), scores, 200)
        assert len(expected[0][:120].unique()) == 1
        for model, rows, size in ((head, new.float(), 1), (loaded, new.float(), 7), (loaded, new, 200)):
            accept, p_value = judged(model, rows, scores, size)
            assert torch.equal(accept, expected[0])
            # A p-value can change by one rank if another score lies at the edge of the resolution.
            assert float((p_value - expected[1]).abs().max()) <= 2.5 / 301

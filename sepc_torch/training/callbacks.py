"""Parts that the callbacks of all frameworks share: rows to fit to, fingerprints of weights, and results of a stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sepc_torch.head.trust_head import TrustHead
from sepc_torch.shapes import Bool, Float, Int
from sepc_torch.training.flags import CALIBRATED, Rows, find_reasons, no_rows, own_labels, stage_numbers
from sepc_torch.training.subsets import calibration_half, id_numbers, random_subset, sample_per_class
from sepc_torch.training.trust_table import TrustTable

# Samples of the first pass over a data set, which finds the samples of every class. It reads pieces until every class
# that it has found has enough samples: at least 5000, in which a class with one sample in 1000 is missed with
# probability 0.7 %, and at most 50 000.
_FIRST_PIECE, _FIRST_PASS = 5000, 50_000
# Relative tolerance between fingerprints. Another order of summation, as on another device, changes them by less; a
# training step changes them by more.
_SAME_WEIGHTS = 1e-9


class FitSample:
    """The positions of the samples that the last refit used; later refits embed only these.

    The labels of a data set are known only after its batches are read, so the first refit runs the module over more
    samples than it uses.
    """

    def __init__(self) -> None:
        self._dataset: Any = None
        self._size = 0
        self._positions: Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        return FitSample().__dict__

    def pieces(self, dataset: Any, limit: int | None) -> list[Int[Tensor, "n"]]:
        """Positions in the data set to embed, in pieces: the later ones only if some class needs more samples."""
        if self._positions is not None and dataset is self._dataset and len(dataset) == self._size:
            return [self._positions]
        ends = [_FIRST_PASS] if limit is None else [_FIRST_PIECE, 2 * _FIRST_PIECE, 4 * _FIRST_PIECE, _FIRST_PASS]
        every = torch.arange(len(dataset))
        found, read = [], every[:0]
        for end in ends:
            subset = random_subset(every, end)  # a larger subset holds the smaller ones
            found.append(subset[~torch.isin(subset, read)])
            read = subset
            if len(subset) == len(every):
                break
        return found

    def keep(self, dataset: Any, positions: Int[Tensor, "n"]) -> None:
        """Use these positions for the next refits on the data set."""
        self._dataset, self._size, self._positions = dataset, len(dataset), positions

    def rows(self, dataset: Any, limit: int | None, read: Callable[[Int[Tensor, "n"]], Rows]) -> Rows:
        """Rows of at most ``limit`` samples of each class; ``read`` gives those at some positions in the data set."""
        rows: Rows = {}
        for piece in self.pieces(dataset, limit):
            found = read(piece)
            joined = {name: torch.cat([rows[name], column]) if rows else column for name, column in found.items()}
            order = joined["id"].argsort()
            order = order[sample_per_class(joined["id"][order], joined["target"][order], limit)]
            rows = {name: column[order] for name, column in joined.items()}
            if limit is not None and bool((rows["target"].unique(return_counts=True)[1] == limit).all()):
                break
        self.keep(dataset, rows["id"])
        return rows


@torch.no_grad()
def fingerprint(module: nn.Module) -> Float[Tensor, "3"]:
    """Fingerprint of a module's weights: the sums of their values, absolute values and squares."""
    total = torch.zeros(3, dtype=torch.float64)
    for weight in module.parameters():
        if weight.is_floating_point():
            values = weight.detach().double()
            total += torch.stack([values.sum(), values.abs().sum(), values.square().sum()]).cpu()
    return total


def same_weights(a: Float[Tensor, "3"], b: Float[Tensor, "3"]) -> bool:
    """Whether two fingerprints belong to the same weights, up to the order of summation."""
    scale = torch.maximum(a, b)[1].clamp_min(1.0)  # of the absolute values, because the plain sum may cancel
    return bool(((a - b).abs() <= _SAME_WEIGHTS * scale).all())


class StageResult(NamedTuple):
    """Table of all samples of a stage, and its summary statistics.

    Attributes:
        table: All samples.
        numbers: Numbers of the measured samples, those that did not calibrate the head.
        rows: Columns of the measured samples, with ``emb`` and ``logits`` if they were kept.
        ids: Ids of the measured samples.
    """

    table: TrustTable
    numbers: dict[str, float]
    rows: Rows
    ids: list[Any]

    @property
    def right(self) -> Bool[Tensor, "B"]:
        """Whether each judged label of a measured sample is its target."""
        return self.rows["network_label"] == self.rows["target"]


def stage_result(
    rows: Rows, names: list[str], head: TrustHead, flag_rate: float, has_network: bool, halved: bool = False
) -> StageResult:
    """Build the table and the numbers of a stage from its gathered rows.

    With ``halved`` the calibration half, which the head was calibrated on, is not measured.
    """
    rows = rows or no_rows()
    own = own_labels(head.classes, rows["label"])
    reason = rows["reason"] if "reason" in rows else find_reasons(rows, own, flag_rate)
    ids = [names[place] if names else place for place in rows["id"].tolist()]
    target = rows.get("target")
    halved = halved and "joint" in rows
    calibrates: Bool[Tensor, "B"] = calibration_half(id_numbers(ids)) if halved else torch.zeros(len(ids)) > 0
    measured = {name: column[~calibrates] for name, column in rows.items()}
    numbers = stage_numbers(
        measured, reason[~calibrates], own[~calibrates], measured.get("target"), has_network=has_network
    )
    shown = {name: rows[name] for name in CALIBRATED if name in rows and name != "reason"}
    if has_network:
        shown |= {name: rows[name] for name in ("network_label", "network_trust", "network_margin")}
    shown |= {"reason": reason} | {name: rows[name] for name in ("trust", "label", "rule", "distance", "margin")}
    if target is not None:
        shown["target"] = target
    if halved:
        shown["calibrates"] = calibrates
    kept = [name for name, out in zip(ids, calibrates.tolist(), strict=True) if not out]
    return StageResult(
        TrustTable.of(ids, shown, head.classes), numbers, {**measured, "reason": reason[~calibrates]}, kept
    )

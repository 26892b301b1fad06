"""Validation of the arrays that are passed to ``compare``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sepc_torch.data.arrays import numeric_points
from sepc_torch.data.labels import label_array, label_codes
from sepc_torch.head.calibration_set import LEAST_CALIBRATION
from sepc_torch.head.trust_head import TrustHead
from sepc_torch.shapes import Array, Float, Int


class LabelledRows(NamedTuple):
    """Checked rows: embeddings, index of the true class, and logits."""

    z: Float[Tensor, "B D"]
    codes: Int[Tensor, "B"]
    logits: Float[Tensor, "B C"]

    def take(self, rows: Int[Array, "b"]) -> LabelledRows:
        """The rows with these indices."""
        chosen = torch.from_numpy(rows).to(self.z.device)
        return LabelledRows(self.z[chosen], self.codes[chosen], self.logits[chosen])


@dataclass(frozen=True)
class InputFormat:
    """Format that every array must have, and the checks that convert an array to it.

    Attributes:
        names: The labels, in the order of the columns of the logits.
        features: Number of features of an embedding.
        device: Device of the checked tensors.
        direction: Whether the head refuses an embedding of zeros, which has no direction.
    """

    names: list[Any]
    features: int
    device: torch.device
    direction: bool

    def embeddings(self, z: Any, title: str) -> Float[Tensor, "B D"]:
        """Convert embeddings to a float64 tensor; ``title`` names them in error messages."""
        points = numeric_points(z, title)[0]
        if points.shape[1] != self.features:
            raise ValueError(f"{title} has {points.shape[1]} features, but z_train has {self.features}.")
        zeros = ~points.any(axis=1)
        if self.direction and zeros.any():
            raise ValueError(
                f"Row {int(zeros.argmax())} of {title} is all zeros and has no direction. Drop the row, or pass "
                "nan_policy='flag' to give it the lowest trust."
            )
        return torch.tensor(points, device=self.device)

    def logits(self, logits: Any, title: str, rows: int, of: str) -> Float[Tensor, "B C"]:
        """Convert the logits of the ``rows`` rows of ``of`` to a float64 tensor."""
        if len(np.shape(logits)) == 1:
            raise ValueError(
                f"{title} must have a column per class, got shape {tuple(np.shape(logits))}. If the network has one "
                "logit for two classes, pass two columns: a column of zeros and the logit."
            )
        values = numeric_points(logits, title)[0]
        if len(values) != rows:
            raise ValueError(f"{of} has {rows} rows and {title} has {len(values)}; every row needs its logits.")
        if values.shape[1] != len(self.names):
            raise ValueError(
                f"{title} has {values.shape[1]} columns, but y_train has {len(self.names)} classes. Every class of the "
                "network needs training rows and a column; classes= gives the order of the columns."
            )
        return torch.tensor(values, device=self.device)

    def labelled(self, z: Any, y: Any, logits: Any, titles: tuple[str, str, str]) -> LabelledRows:
        """Convert embeddings, labels and logits of the same rows."""
        points = self.embeddings(z, titles[0])
        labels = label_list(y, titles[1], len(points), titles[0])
        codes = label_codes(labels, self.names)
        unknown = sorted({repr(label) for label, code in zip(labels, codes.tolist(), strict=True) if code < 0})
        if unknown:
            raise ValueError(
                f"{titles[1]} holds labels that y_train does not: {', '.join(unknown[:5])}. Pass rows of unknown "
                "classes as z_ood."
            )
        checked = self.logits(logits, titles[2], len(points), titles[0])
        return LabelledRows(points, torch.from_numpy(codes).to(self.device), checked)

    def classifier(self, given: tuple[Any, Any]) -> tuple[Float[Tensor, "C D"], Float[Tensor, "C"]]:
        """Weight and bias of the last layer, in float64 on the device."""
        shapes = (len(self.names), self.features), (len(self.names),)
        if not isinstance(given, (tuple, list)) or len(given) != 2:
            raise ValueError("classifier must be a pair (weight, bias) of the network's last layer.")
        weight, bias = (
            torch.as_tensor(part.detach() if isinstance(part, Tensor) else np.asarray(part)).to(self.device).double()
            for part in given
        )
        if (weight.shape, bias.shape) != shapes:
            raise ValueError(
                f"classifier must hold a weight of shape {shapes[0]} and a bias of shape {shapes[1]}, got "
                f"{tuple(weight.shape)} and {tuple(bias.shape)}."
            )
        return weight, bias

    def calibration_rows(self, calibration: Any) -> LabelledRows:
        """Convert the triple that the user passes as ``calibration``."""
        if not isinstance(calibration, (tuple, list)) or len(calibration) != 3:
            sequence = isinstance(calibration, (tuple, list))
            came = f"{len(calibration)} items" if sequence else type(calibration).__name__
            raise TypeError(f"calibration must be a triple, (embeddings, labels, logits) of held-out rows; got {came}.")
        z, y, logits = calibration
        rows = self.labelled(z, y, logits, ("calibration[0]", "calibration[1]", "calibration[2]"))
        if len(rows.z) < LEAST_CALIBRATION:
            raise ValueError(f"{len(rows.z)} rows are too few to calibrate with; pass at least {LEAST_CALIBRATION}.")
        return rows


def label_list(y: Any, title: str, rows: int, of: str) -> list[Any]:
    """Convert labels to a list, one label for each of the ``rows`` rows of ``of``."""
    labels = label_array(y, title)
    if len(labels) != rows:
        raise ValueError(f"{of} has {rows} rows and {title} has {len(labels)} labels; one label per row is needed.")
    return labels.tolist()


def classes_of_head(head: Any, classes: Any, options: dict[str, Any]) -> list[Any]:
    """Check the head that the user passes; return its classes."""
    if not isinstance(head, TrustHead):
        raise TypeError(f"head must be a fitted TrustHead, got a {type(head).__name__}.")
    if options:
        raise ValueError(
            f"A fitted head came together with options for fitting one: {', '.join(sorted(options))}. Pass either the "
            "head or the options."
        )
    if classes is not None and (order := label_array(classes, "classes").tolist()) != head.classes:
        raise ValueError(f"classes={order} is not the order of the head, {head.classes}; leave classes out.")
    return head.classes

"""The reason why a calibrated head refuses a label: no prediction, no promise, novel, disagrees or ambiguous."""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

from sepc_torch.head.prediction import HeadPrediction, Promise
from sepc_torch.shapes import Int

# A refused point with a p-value of at most this is novel: at most this share of the calibration distribution is.
NOVEL_P_VALUE = 0.05


class Reason(IntEnum):
    """Why a label is refused. A label with several reasons has the first one that applies, in this order.

    - ``ACCEPTED``: the label is not refused.
    - ``NO_PREDICTION``: the embedding or the logits hold NaN, or the largest logit is not unique.
    - ``NO_PROMISE``: nothing is accepted: no threshold keeps the wanted risk, or a guard has suspended the promise.
    - ``NOVEL``: the point is unlike the calibration points (:data:`NOVEL_P_VALUE`).
    - ``DISAGREES``: the head's own label is another one.
    - ``AMBIGUOUS``: the point is of a known kind and the labels agree, but the joint score is too low.
    """

    ACCEPTED = 0
    NO_PREDICTION = 1
    NO_PROMISE = 2
    NOVEL = 3
    DISAGREES = 4
    AMBIGUOUS = 5

    @property
    def text(self) -> str:
        """The name in lower case, with spaces."""
        return self.name.lower().replace("_", " ")


def refusal_reason(out: HeadPrediction, promise: Promise | None = None) -> Int[Tensor, "B"]:
    """Return the :class:`Reason` of every row of a calibrated head's predictions, as an integer.

    Args:
        out: The predictions.
        promise: The promise of the head, ``head.promise``.

    >>> reasons = [Reason(int(code)).text for code in refusal_reason(_example())]
    >>> reasons
    ['accepted', 'novel', 'disagrees', 'ambiguous']
    >>> Reason(int(refusal_reason(_example(), Promise(0.01, 0.05, None, found=False))[1])).text
    'no promise'
    """
    reason = torch.full_like(out.network_label, int(Reason.AMBIGUOUS))
    reason = torch.where(out.label != out.network_label, int(Reason.DISAGREES), reason)
    reason = torch.where(out.p_value <= NOVEL_P_VALUE, int(Reason.NOVEL), reason)
    if promise is not None and not promise.found:
        reason = torch.full_like(reason, int(Reason.NO_PROMISE))
    reason = torch.where((out.label < 0) | (out.network_label < 0), int(Reason.NO_PREDICTION), reason)
    return torch.where(out.accept, int(Reason.ACCEPTED), reason)


def _example() -> HeadPrediction:
    """Four predictions, one for each of four reasons."""
    zeros, label = torch.zeros(4), torch.zeros(4, dtype=torch.int64)
    return HeadPrediction(
        *(label, zeros, label, zeros, zeros, label, label, torch.tensor([0, 0, 1, 0]), zeros, zeros, zeros),
        p_value=torch.tensor([0.5, 0.01, 0.5, 0.5]),
        class_p_value=zeros,
        nonconformity=zeros,
        joint=zeros,
        accept=torch.tensor([True, False, False, False]),
    )

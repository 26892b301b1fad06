"""The paper's trigger for a new partition: too many confirmed mistakes in one cell are a class of their own."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sepc_torch.flagging import Head, class_values, coordinates
from sepc_torch.head import TrustHead
from sepc_torch.overlap import SmallDisjunct, mistaken_regions
from sepc_torch.shapes import Array, Float, Int

# What a partition tolerates where the head does not say what it was made with.
_MAX_IMPURE = 2


@torch.no_grad()
def confirmed_disjuncts(
    head: Head, emb: Float[Tensor, "N D"], truth: Int[Tensor, "N"], given: Int[Tensor, "N"] | None = None
) -> tuple[SmallDisjunct, ...]:
    """Cells of a head in which more mistakes are confirmed than it was made to tolerate, the worst first.

    Args:
        head: The head in use.
        emb: Embeddings whose label is now known.
        truth: That label, as batches carry it.
        given: The label they had been given; by default the head's own.

    >>> X = torch.tensor([[0.0], [1.0], [2.0], [3.0], [10.0], [11.0], [12.0], [13.0]])
    >>> head = TrustHead.fit(X, [0, 0, 0, 0, 1, 1, 1, 1], dim=1, normalize=None, max_impure=1)
    >>> (found,) = confirmed_disjuncts(head, torch.tensor([[1.4], [1.5], [11.0]]), torch.tensor([1, 1, 1]))
    >>> found.predicted, found.true, found.rows.tolist()
    (0, (1,), [0, 1])
    """
    sepc = head.sepc if isinstance(head, TrustHead) else head
    points = coordinates(head, emb)
    distance = sepc.bank(points).double().cpu().numpy()
    if given is None:
        given = class_values(head)[sepc(points).label.cpu()]
    limit = int(sepc.made.get("max_impure", _MAX_IMPURE))
    return mistaken_regions(distance, _objects(given), _objects(truth), limit)


def _objects(labels: Int[Tensor, "N"]) -> Array:
    return np.array(labels.tolist(), dtype=object)

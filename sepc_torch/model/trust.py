r"""Bayes trust: from the training points that share a region to the probability of a label.

With :math:`n_c` training points of class :math:`c` in the region, :math:`N_c` in the training set, and the point
itself counted with the label :math:`p` it was given,

.. math:: P(c \mid E) \propto (n_c + [c = p])\,(N_c + [c = p]).

For two classes these are equations (7) to (9) of the paper.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from sepc_torch.shapes import Float, Int


def posterior(
    counts: Int[Tensor, "B C"], totals: Int[Tensor, "C"], label: Int[Tensor, "B"], dtype: torch.dtype = torch.float64
) -> Float[Tensor, "B C"]:
    r"""The probability :math:`P(c \mid E)` of every class, the point counted as ``label``.

    >>> posterior(torch.tensor([[1, 5]]), torch.tensor([547, 256]), torch.tensor([1])).round(decimals=3)
    tensor([[0.2620, 0.7380]], dtype=torch.float64)
    """
    own = one_hot(label, counts.shape[1])
    # In float64: the product of two counts passes float32's integers already for a few thousand points.
    weight = (counts + own).double() * (totals + own).double()
    return (weight / weight.sum(dim=1, keepdim=True)).to(dtype)


def bayes_trust(
    counts: Int[Tensor, "B C"], totals: Int[Tensor, "C"], label: Int[Tensor, "B"], dtype: torch.dtype = torch.float64
) -> Float[Tensor, "B"]:
    r"""The trust :math:`P(p \mid E)` in a label p, predicted by SEP-C or given by someone else.

    Args:
        counts: Training points of each class in the region that judges each point.
        totals: Training points of each class.
        label: The label to judge, as an index.
        dtype: Of the result; computed in float64.

    The paper's example, one point of 547 and five of 256 in the region, the latter's label:

    >>> bayes_trust(torch.tensor([[1, 5]]), torch.tensor([547, 256]), torch.tensor([1])).item()
    0.738...
    """
    return posterior(counts, totals, label, dtype).gather(1, label.unsqueeze(1)).squeeze(1)


def odds(posterior: Float[Tensor, "B C"], label: Int[Tensor, "B"]) -> Float[Tensor, "B"]:
    r"""The odds of a label against the likeliest other class; near 1 the classifier should abstain.

    >>> odds(torch.tensor([[0.25, 0.75]]), torch.tensor([1]))
    tensor([3.])
    """
    own = posterior.gather(1, label.unsqueeze(1)).squeeze(1)
    return own / posterior.scatter(1, label.unsqueeze(1), 0.0).amax(dim=1)

r"""Bayes trust: probability of a label given the class counts of its region.

Let the region hold :math:`n_c` of the :math:`N_c` training points of class :math:`c`. The point itself counts once with
its label :math:`p`. Then

.. math:: P(c \mid E) \propto (n_c + [c = p])\,(N_c + [c = p]).

For two classes these are equations (7) to (9) of the paper.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from sepc_torch.model.precision import as_dtype
from sepc_torch.shapes import Float, Int


def trust_from_sums(
    count: Int[Tensor, "..."], total: Int[Tensor, "..."], weighted_sum: Int[Tensor, "..."]
) -> Float[Tensor, "..."]:
    r"""The trust in a label p from the counts of its class and a weighted sum over all classes.

    .. math:: P(p \mid E) = \frac{w}{w + S - n_p N_p}, \qquad w = (n_p + 1)(N_p + 1), \qquad S = \sum_c n_c N_c.

    Args:
        count: Training points :math:`n_p` of the label's class in the region.
        total: Training points :math:`N_p` of the label's class.
        weighted_sum: The sum :math:`S` over all classes, in int64.

    Returns:
        The trust in float64. The arguments broadcast. The trust is the correctly rounded quotient while the denominator
        is below 2^53, where float64 represents every integer.

    >>> count, total = torch.tensor([1, 5]), torch.tensor([547, 256])
    >>> trust_from_sums(count, total, (count * total).sum()).round(decimals=3)
    tensor([0.4610, 0.7380], dtype=torch.float64)
    """
    return trust_ratio(count.double(), total.double(), weighted_sum.double())  # type: ignore[no-untyped-call]


def trust_ratio(count, total, weighted_sum):  # type: ignore[no-untyped-def]
    r"""The formula of :func:`trust_from_sums` in plain arithmetic, for float64 arguments.

    The CUDA kernels compile this source, so it has operators only and no annotations.

    >>> trust_ratio(5.0, 256.0, 1.0 * 547.0 + 5.0 * 256.0)
    0.738...
    """
    own = (count + 1) * (total + 1)
    return own / (own + (weighted_sum - count * total))


def bayes_trust(
    counts: Int[Tensor, "B C"], totals: Int[Tensor, "C"], label: Int[Tensor, "B"], dtype: torch.dtype = torch.float64
) -> Float[Tensor, "B"]:
    r"""The trust :math:`P(p \mid E)` in a label p, predicted by SEP-C or given from another source.

    Args:
        counts: Training points of each class in the region of each point.
        totals: Training points of each class.
        label: The label to evaluate, as a class index.
        dtype: Dtype of the result; the computation runs in float64.

    The paper's example: the region holds 1 of 547 points of class 0 and 5 of 256 points of class 1; the label is 1.

    >>> bayes_trust(torch.tensor([[1, 5]]), torch.tensor([547, 256]), torch.tensor([1])).item()
    0.738...
    """
    return label_trusts(counts, totals, label.unsqueeze(0))[0].to(dtype)


def label_trusts(
    counts: Int[Tensor, "B C"], totals: Int[Tensor, "C"], labels: Int[Tensor, "n B"]
) -> Float[Tensor, "n B"]:
    """The trust of :func:`bayes_trust` in n labels of each point, in float64.

    >>> label_trusts(torch.tensor([[1, 5]]), torch.tensor([547, 256]), torch.tensor([[0], [1]])).round(decimals=3)
    tensor([[0.4610],
            [0.7380]], dtype=torch.float64)
    """
    count = counts.gather(1, labels.T).T
    weighted_sum = (as_dtype(counts, torch.int64) * totals).sum(dim=1)
    return trust_from_sums(count, totals.take(labels), weighted_sum)


def posterior(
    counts: Int[Tensor, "B C"], totals: Int[Tensor, "C"], label: Int[Tensor, "B"], dtype: torch.dtype = torch.float64
) -> Float[Tensor, "B C"]:
    r"""The probability :math:`P(c \mid E)` of every class if the point itself counts with ``label``.

    The column of ``label`` is :func:`bayes_trust`.

    >>> posterior(torch.tensor([[1, 5]]), torch.tensor([547, 256]), torch.tensor([1])).round(decimals=3)
    tensor([[0.2620, 0.7380]], dtype=torch.float64)
    """
    own = one_hot(label, counts.shape[1])
    # Float64: the product of two counts exceeds float32's exact integers (2^24) from a few thousand points on.
    weight = (counts + own).double() * (totals + own).double()
    return (weight / weight.sum(dim=1, keepdim=True)).to(dtype)


def odds(posterior: Float[Tensor, "B C"], label: Int[Tensor, "B"]) -> Float[Tensor, "B"]:
    r"""The odds of a label against the likeliest other class; near 1 the classifier should abstain.

    >>> odds(torch.tensor([[0.25, 0.75]]), torch.tensor([1]))
    tensor([3.])
    """
    own = posterior.gather(1, label.unsqueeze(1)).squeeze(1)
    return own / posterior.scatter(1, label.unsqueeze(1), 0.0).amax(dim=1)

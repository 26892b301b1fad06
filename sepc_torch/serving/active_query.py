"""Query strategy of scikit-activeml: asks for the labels that a trust head supports least."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from skactiveml.base import SingleAnnotatorPoolQueryStrategy
from skactiveml.utils import MISSING_LABEL, is_labeled

from sepc_torch.head.trust_head import TrustHead
from sepc_torch.shapes import Array
from sepc_torch.training.selection import select


class TrustQuery(SingleAnnotatorPoolQueryStrategy):  # type: ignore[misc]
    """Fit a head to the labelled samples, then select samples of low confidence, far from each other.

    Args:
        fit_options: Further arguments of :meth:`TrustHead.fit`.
        missing_label: Value of an unknown label.
        random_state: Not used: the selection is deterministic. scikit-activeml passes it to every strategy.

    >>> X = np.random.default_rng(0).normal(size=(60, 2)) + 4.0 * (np.arange(60) % 2)[:, None]
    >>> y = np.where(np.arange(60) < 40, np.arange(60) % 2, np.nan)
    >>> index = TrustQuery(fit_options={"normalize": None, "dim": 2}).query(X, y, batch_size=3)
    >>> len(set(index)), bool((index >= 40).all())
    (3, True)
    """

    def __init__(
        self, fit_options: dict[str, Any] | None = None, missing_label: Any = MISSING_LABEL, random_state: Any = None
    ) -> None:
        super().__init__(missing_label=missing_label, random_state=random_state)
        self.fit_options = fit_options

    def query(
        self, X: Any, y: Any, candidates: Any = None, batch_size: int = 1, return_utilities: bool = False
    ) -> Array | tuple[Array, Array]:
        """Select candidates to label; arguments and results as in scikit-activeml."""
        X, y, candidates, batch_size, return_utilities = self._validate_data(
            X, y, candidates, batch_size, return_utilities, reset=True
        )
        pool, mapping = self._transform_candidates(candidates, X, y)
        known = is_labeled(y, self.missing_label)
        head = TrustHead.fit(X[known], y[known], **(self.fit_options or {}))
        utility = 1.0 - head.judge(pool).confidence.double()
        chosen = select(utility, batch_size, torch.as_tensor(pool), labelled_emb=torch.as_tensor(X[known])).numpy()
        where = np.arange(len(pool)) if mapping is None else mapping
        if not return_utilities:
            return where[chosen]
        utilities = np.full((len(chosen), len(pool) if mapping is None else len(X)), np.nan)
        utilities[:, where] = utility.numpy()
        for i in range(1, len(chosen)):
            utilities[i, where[chosen[:i]]] = np.nan  # a sample that is taken cannot be taken again
        return where[chosen], utilities

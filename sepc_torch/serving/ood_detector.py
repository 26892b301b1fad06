"""A trust head with the interface of pytorch-ood's ``FeaturesDetector``, which this module does not import."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from sepc_torch.head.trust_head import TrustHead
from sepc_torch.shapes import Float, Int


class TrustHeadDetector:
    """Detector whose outlier score is the nonconformity of a point; larger is less typical.

    Args:
        encoder: The network from inputs to embeddings, for :meth:`fit` and :meth:`predict`.
        held_out: Share of the embeddings, every n-th one, that calibrates the score and is not fitted.
        options: Further arguments of :meth:`TrustHead.fit`.

    >>> y = torch.arange(200) % 2
    >>> x = torch.randn(200, 3, generator=torch.Generator().manual_seed(0)) + 9.0 * y[:, None]
    >>> detector = TrustHeadDetector(normalize="standardize").fit_features(x, y)
    >>> score = detector.predict_features(torch.cat([x[:1], 50.0 + x[:1]]))
    >>> bool(score[1] > score[0])
    True
    """

    requires_fit = True

    def __init__(self, encoder: Callable[[Any], Tensor] | None = None, held_out: float = 0.25, **options: Any) -> None:
        self.encoder, self.held_out, self.options = encoder, held_out, options
        self.head = TrustHead.empty()

    def fit(self, data_loader: Iterable[tuple[Any, Tensor]]) -> TrustHeadDetector:
        """Fit to batches (inputs, labels); inputs go through the encoder."""
        with torch.no_grad():
            parts = [(self._encode(x), y) for x, y in data_loader]
        return self.fit_features(*(torch.cat(column) for column in zip(*parts, strict=True)))

    def fit_features(self, x: Float[Tensor, "N D"], y: Int[Tensor, "N"]) -> TrustHeadDetector:
        """Fit and calibrate to embeddings; negative labels, pytorch-ood's outliers, are left out."""
        x, y = x[y >= 0].cpu(), y[y >= 0].cpu()
        held = torch.arange(len(x)) % max(round(1.0 / self.held_out), 2) == 0
        fitted = TrustHead.fit(x[~held], y[~held].numpy(), **self.options)
        self.head = fitted.calibrate(x[held], y[held].numpy()).to(self.head.sepc.codes.device)
        return self

    @torch.no_grad()
    def predict_features(self, x: Float[Tensor, "B D"]) -> Float[Tensor, "B"]:
        """Outlier scores of embeddings."""
        return self.head(x.to(self.head.sepc.codes.device)).strangeness

    def predict(self, x: Any) -> Float[Tensor, "B"]:
        """Outlier scores of inputs."""
        with torch.no_grad():
            return self.predict_features(self._encode(x))

    __call__ = predict

    def to(self, device: torch.device | str) -> TrustHeadDetector:
        """Move the head to a device."""
        self.head = self.head.to(device)
        return self

    def _encode(self, x: Any) -> Tensor:
        if self.encoder is None:
            raise ValueError("This detector has no encoder; pass one, or use fit_features and predict_features.")
        return self.encoder(x)

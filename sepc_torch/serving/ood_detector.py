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

    ``encoder`` maps inputs to embeddings. The share ``held_out`` of the embeddings, every n-th one, calibrates the
    score and is not fitted. ``options`` are further arguments of :meth:`TrustHead.fit`.

    >>> y = torch.arange(200) % 2
    >>> x = torch.randn(200, 3, generator=torch.Generator().manual_seed(0)) + 9.0 * y[:, None]
    >>> TrustHeadDetector(normalize="standardize").fit_features(x, y)(torch.stack([x[0], x[0] + 50.0])).argmax()
    tensor(1)
    """

    requires_fit = True

    def __init__(self, encoder: Callable[[Any], Tensor] = lambda x: x, held_out: float = 0.25, **options: Any) -> None:
        self.encoder, self.held_out, self.options, self.head = encoder, held_out, options, TrustHead.empty()

    @torch.no_grad()
    def fit(self, data_loader: Iterable[tuple[Any, Tensor]]) -> TrustHeadDetector:
        """Fit to batches (inputs, labels); inputs go through the encoder."""
        return self.fit_features(*map(torch.cat, zip(*((self.encoder(x), y) for x, y in data_loader), strict=True)))

    def fit_features(self, x: Float[Tensor, "N D"], y: Int[Tensor, "N"]) -> TrustHeadDetector:
        """Fit and calibrate to embeddings; negative labels, pytorch-ood's outliers, are left out."""
        x, y = x[y >= 0].cpu(), y[y >= 0].cpu()
        held = torch.arange(len(x)) % max(round(1.0 / self.held_out), 2) == 0
        fitted = TrustHead.fit(x[~held], y[~held].numpy(), **self.options).to(self.head.sepc.codes.device)
        self.head = fitted.calibrate(x[held], y[held].numpy())
        return self

    def predict_features(self, x: Float[Tensor, "B D"]) -> Float[Tensor, "B"]:
        """Outlier scores of embeddings."""
        return self.head(x.to(self.head.sepc.codes.device)).nonconformity

    @torch.no_grad()
    def predict(self, x: Any) -> Float[Tensor, "B"]:
        """Outlier scores of inputs."""
        return self.predict_features(self.encoder(x))

    __call__ = predict

    def to(self, device: torch.device | str) -> TrustHeadDetector:
        """Move the head to a device."""
        self.head = self.head.to(device)
        return self

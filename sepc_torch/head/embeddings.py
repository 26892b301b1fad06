"""Embeddings and labels as a head takes them: arrays, tensors, or batches that a network turns into embeddings."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sepc_torch.shapes import Array


def gather(embeddings: Any, labels: Any, encoder: Callable[[Any], Tensor] | None) -> tuple[Any, Any]:
    """Embeddings and labels as given, or collected from batches through the encoder."""
    is_array = isinstance(embeddings, (Tensor, np.ndarray, list, tuple)) or hasattr(embeddings, "columns")
    if encoder is None:
        if not is_array:
            raise TypeError(
                f"embeddings must be an array or a tensor, got {type(embeddings).__name__}; batches need an encoder."
            )
        if labels is None:
            raise ValueError("labels are missing; only batches with an encoder bring their own.")
        return embeddings, labels
    if labels is not None:
        raise ValueError("With an encoder the batches bring the labels; do not give labels as well.")
    return _encode(embeddings, encoder)


@torch.no_grad()
def _encode(batches: Iterable[Any], encoder: Callable[[Any], Tensor]) -> tuple[Array, Array]:
    module = encoder if isinstance(encoder, nn.Module) else None
    was_training = module is not None and module.training
    device = next((p.device for p in module.parameters()), None) if module is not None else None
    found: list[Array] = []
    labels: list[Array] = []
    try:
        if module is not None:
            module.eval()
        for batch in batches:
            if not isinstance(batch, (tuple, list)) or len(batch) != 2:
                size = f" of {len(batch)}" if isinstance(batch, (tuple, list)) else ""
                raise TypeError(
                    f"Every batch must be a pair (inputs, labels), got a {type(batch).__name__}{size}. Wrap it: "
                    "TrustHead.fit(((b['x'], b['y']) for b in loader), encoder=...)."
                )
            inputs, targets = batch
            z = encoder(inputs.to(device) if device is not None and isinstance(inputs, Tensor) else inputs)
            if not isinstance(z, Tensor):
                raise TypeError(
                    f"The encoder must return a tensor of embeddings, got a {type(z).__name__}; take the right entry."
                )
            found.append(z.flatten(1).float().cpu().numpy())
            labels.append(np.asarray(targets))
    finally:
        if module is not None and was_training:
            module.train()
    if not found:
        raise ValueError("The batches are empty: there is nothing to fit.")
    return np.concatenate(found), np.concatenate(labels)

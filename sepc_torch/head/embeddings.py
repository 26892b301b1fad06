"""Collection of embeddings and labels: from arrays and tensors, or from batches through an encoder."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sepc_torch.shapes import Array


def collect_embeddings(embeddings: Any, labels: Any, encoder: Callable[[Any], Tensor] | None) -> tuple[Any, Any]:
    """Return embeddings and labels as given, or those of all batches, computed by the encoder.

    Args:
        embeddings: Array or tensor of embeddings; with an encoder, an iterable of batches (inputs, labels).
        labels: The labels; None with an encoder.
        encoder: A function or module from inputs to embeddings, or None.
    """
    is_array = isinstance(embeddings, (Tensor, np.ndarray, list, tuple)) or hasattr(embeddings, "columns")
    if encoder is None:
        if not is_array:
            raise TypeError(
                f"embeddings must be an array or a tensor, got {type(embeddings).__name__}; batches need an encoder. "
                "Pass encoder=."
            )
        if labels is None:
            raise ValueError("labels are missing; only batches with an encoder contain labels. Pass labels=.")
        return embeddings, labels
    if labels is not None:
        raise ValueError("With an encoder the batches contain the labels; do not give labels as well.")
    return _encode(embeddings, encoder)


@torch.no_grad()
def _encode(batches: Iterable[Any], encoder: Callable[[Any], Tensor]) -> tuple[Array, Array]:
    """Run the encoder on every batch, in evaluation mode, and restore its training mode."""
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
                    f"The encoder must return a tensor of embeddings, got a {type(z).__name__}; wrap the encoder and "
                    "return only the embeddings."
                )
            found.append(z.flatten(1).float().cpu().numpy())
            labels.append(np.asarray(targets))
    finally:
        if module is not None and was_training:
            module.train()
    if not found:
        raise ValueError("The batches are empty: there is nothing to fit. Pass at least one batch (inputs, labels).")
    return np.concatenate(found), np.concatenate(labels)

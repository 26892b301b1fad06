"""Options of a fit of a trust head, checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from sepc_torch.data.options import check_choice, count
from sepc_torch.data.progress import Choice
from sepc_torch.head.projection import Method, Normalize
from sepc_torch.model.sepc import NanPolicy, Nearest
from sepc_torch.partitioning.record import Rest


@dataclass(frozen=True)
class FitOptions:
    """Options of :meth:`TrustHead.fit`, which documents each of them."""

    dim: int | None
    normalize: Normalize
    projection: Method
    max_impure: int | None
    max_per_class: int | Literal["auto"] | None
    rest: Rest
    max_isolated: int | None
    nearest: Nearest
    nan_policy: NanPolicy
    reference_points: int | None
    floor: float
    solver: str
    n_jobs: int | None
    progress: Choice
    device: torch.device | None
    keep_points: bool

    def __post_init__(self) -> None:
        if self.normalize not in ("l2", "standardize", None):
            raise ValueError(f"normalize must be 'l2', 'standardize' or None, got {self.normalize!r}.")
        check_choice("projection", self.projection, get_args(Method))
        check_choice("rest", self.rest, get_args(Rest))
        if self.reference_points is not None:
            count(self.reference_points, "reference_points")
        if self.dim is not None:
            count(self.dim, "dim", least=1)
        if self.max_per_class is not None and self.max_per_class != "auto":
            count(self.max_per_class, "max_per_class", least=1)

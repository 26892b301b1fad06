"""The training loss :class:`EllipsoidLoss`, which keeps the ellipsoids of the classes small and apart."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from sepc_torch.data.options import check_count, check_not_negative
from sepc_torch.data.warn import warn_user
from sepc_torch.layers.ellipsoids import RefittedEllipsoid
from sepc_torch.layers.mve import Backend, MVELayer, refuse_transforms
from sepc_torch.shapes import Bool, Float, Int


class LossTerms(NamedTuple):
    """The unweighted terms of the loss: mean relative log-volume per dimension, and mean intrusion."""

    volume: Float[Tensor, ""]
    intrusion: Float[Tensor, ""]


class EllipsoidLoss(nn.Module):
    r"""Loss that keeps class ellipsoids, refitted to every batch, small and free of points of other classes.

    With :math:`E_k` the minimum-volume ellipsoid of the points of class k in the batch, :math:`E` that of all points,
    and :math:`d_k` the distance to :math:`E_k`, the loss is

    .. math:: \frac{\alpha}{C D} \sum_k \log\frac{\operatorname{vol} E_k}{\operatorname{vol} E}
              + \frac{1}{C} \sum_k \operatorname*{mean}_{y_j \ne k} \max\big(0,\ m^2 - d_k(z_j)^2\big).

    Volumes are relative to the volume of the whole batch: a plain log-volume has no lower bound, and the encoder would
    collapse. The gradient passes through the fit: points on the surface of their ellipsoid are pulled inwards, and
    ellipsoids shrink away from the points of other classes. Add the loss to one that separates classes, such as
    cross-entropy, in a ``training_step``, in any precision:

    ``loss = cross_entropy(logits, y) + 0.1 * ellipsoid_loss(embedding, y)``

    The loss has kinks where the support of an ellipsoid changes, and steep gradients near them. Clip gradients and keep
    the weight small (``experiments/solvers/refits.py`` measures gain and cost).

    A class with fewer than D + 1 points in the batch has no ellipsoid: it is left out, with one warning per class. A
    batch should have several times D points of every class. In distributed training every process fits its own part of
    the batch. For ellipsoids of the whole batch, gather the embeddings first (``all_gather`` with gradients).

    The loss computes in float64 with autocast off and returns float32 (float64 for float64 embeddings). Time: one fit
    per class and one of the batch (``experiments/solvers`` measures fits). Memory: (C + 2) N D numbers for a
    batch of N, and on a GPU a few matrices (M, M) for each class of M points and for the batch's working set of at most
    D (D + 5) points.

    Args:
        classes: Number of classes C; labels are 0 to C - 1.
        features: Number of features D of an embedding.
        volume: The weight :math:`\alpha` of the volumes.
        margin: The distance :math:`m` beyond which points of other classes cost nothing; 1 is the surface.
        through_refit: Whether the gradient treats the ellipsoids as functions of the points (the default) or as
            constants. With constants only the points of other classes move.
        backend, smoothing, floor: As in :class:`MVELayer`. The floor is in units of the embedding, by default 1e-3.
            Without a floor a flat class is an error. The cvxpylayers backend has no floor.

    >>> loss = EllipsoidLoss(classes=2, features=2)
    >>> z = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.5, 0.5], [1.5, 0.5], [0.5, 1.5]], requires_grad=True)
    >>> value = loss(z, torch.tensor([0, 0, 0, 1, 1, 1]))
    >>> value.backward()
    >>> value.item() > 0, z.grad.abs().sum().item() > 0
    (True, True)
    """

    def __init__(
        self,
        classes: int,
        features: int,
        *,
        volume: float = 0.1,
        margin: float = 1.5,
        through_refit: bool = True,
        backend: Backend = "native",
        smoothing: float = 0.0,
        floor: float | None = None,
    ) -> None:
        super().__init__()
        self.classes, self.features = check_count(classes, "classes", 1), check_count(features, "features", 1)
        self.volume, self.margin = check_not_negative(volume, "volume"), check_not_negative(margin, "margin")
        self.through_refit = through_refit
        self.backend: Backend = backend
        self.smoothing = smoothing
        # The default floor is a thousandth of 1, the order of magnitude of the embeddings of most networks.
        self.floor = (1e-3 if backend == "native" else 0.0) if floor is None else floor
        self._layer(1)  # raises errors for bad settings now instead of in the first training step
        self._warned: set[int] = set()

    def extra_repr(self) -> str:
        """The settings, for ``repr``."""
        return (
            f"classes={self.classes}, features={self.features}, volume={self.volume}, margin={self.margin}, "
            f"through_refit={self.through_refit}, {self._layer(1).extra_repr().partition(', ')[2].partition(', ')[2]}"
        )

    def forward(self, z: Float[Tensor, "N D"], labels: Int[Tensor, "N"]) -> Float[Tensor, ""]:
        """Compute the loss of a batch of embeddings.

        If no class has enough points, the loss is zero and its gradient consists of zeros.
        """
        terms = self.terms(z, labels)
        return self.volume * terms.volume + terms.intrusion

    def terms(self, z: Float[Tensor, "N D"], labels: Int[Tensor, "N"]) -> LossTerms:
        """Compute the unweighted terms of the loss, for logging."""
        self._check(z, labels)
        with torch.autocast(z.device.type, enabled=False):
            z = z.to(torch.promote_types(z.dtype, torch.float32))
            present = self._present(labels)
            if not present:
                nothing = 0.0 * z.sum()
                return LossTerms(nothing, nothing)
            fitted, whole = self._refit(z, labels, present)
            volume = (fitted.log_volume() - whole.log_volume()).mean() / self.features
            others = labels != torch.tensor(present, device=labels.device).unsqueeze(-1)
            inside = torch.relu(self.margin**2 - fitted.distance(z).square())
            share = others / others.sum(-1, keepdim=True).clamp_min(1)
            return LossTerms(volume, (inside * share).sum(-1).mean())

    def _refit(
        self, z: Float[Tensor, "N D"], labels: Int[Tensor, "N"], present: list[int]
    ) -> tuple[RefittedEllipsoid, RefittedEllipsoid]:
        """Fit the ellipsoids of the present classes, as one batch, and the ellipsoid of all points."""
        points = z if self.through_refit else z.detach()
        index, exists = _by_class(labels, present)
        return self._layer(index.shape[1])(points[index], exists), self._layer(len(z))(points)

    def _layer(self, points: int) -> MVELayer:
        # cvxpylayers compiles one program per size; sizes that are powers of two keep the number of programs small.
        size = 1 << (points - 1).bit_length()
        return MVELayer(size, self.features, backend=self.backend, smoothing=self.smoothing, floor=self.floor)

    def _present(self, labels: Int[Tensor, "N"]) -> list[int]:
        """The classes with enough points for an ellipsoid; warn once about each of the others."""
        counts = torch.bincount(labels, minlength=self.classes).tolist()
        few = {k: n for k, n in enumerate(counts) if n <= self.features}
        if not set(few) <= self._warned:
            self._warned |= set(few)
            listed = ", ".join(f"{k} ({n})" for k, n in few.items())
            warn_user(
                f"An ellipsoid in {self.features} dimensions needs at least {self.features + 1} points; the batch of "
                f"{len(labels)} holds too few of the classes {listed}, which are left out. Use larger batches, sample "
                "them by class, or apply the loss to fewer features. This warning appears once per class.",
            )
        return [k for k in range(self.classes) if k not in few]

    def _check(self, z: Tensor, labels: Tensor) -> None:
        refuse_transforms(type(self).__name__)
        if z.ndim != 2 or z.shape[1] != self.features or labels.shape != z.shape[:1]:
            raise ValueError(
                f"Embeddings must have shape (N, {self.features}) and labels (N,), got {tuple(z.shape)} and "
                f"{tuple(labels.shape)}."
            )
        if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
            raise TypeError(
                f"Labels must be integers from 0 to {self.classes - 1}, got {labels.dtype}; convert them with "
                "labels.long()."
            )
        if not bool(z.isfinite().all()):
            raise ValueError(
                "The embeddings hold NaN or infinity. Leave these samples out, or check for a training step that "
                "diverged (learning rate too high)."
            )
        if labels.numel() and not 0 <= int(labels.min()) <= int(labels.max()) < self.classes:
            raise ValueError(
                f"Labels must lie between 0 and {self.classes - 1}, got {int(labels.min())} to {int(labels.max())}."
            )


def _by_class(labels: Int[Tensor, "N"], present: list[int]) -> tuple[Tensor, Bool[Tensor, "C M"]]:
    """The rows of each class (C, M), padded to one length with other rows, and which are not padding."""
    member = labels == torch.tensor(present, device=labels.device).unsqueeze(-1)
    size = int(member.sum(-1).max())
    index = (~member).byte().sort(stable=True, dim=-1).indices[:, :size]
    return index, member.gather(1, index)

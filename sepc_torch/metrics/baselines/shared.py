"""Shared parts of the baselines: input checks, class means, whitening, neighbour distances, distance ratios."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sepc_torch.model.queries import check_labels
from sepc_torch.shapes import Float, Int

# Largest number of distances or products held in memory: 64 MiB in float64.
ENTRIES = 2**23
# Directions with less than this fraction of the largest variance are dropped. Their standard deviation, 1e-6 of the
# largest, is about ten rounding errors of float32 features.
_ABSENT = 1e-12
# Prevents a division by zero in a ratio of distances. The authors of TrustScore add 1e-12; here it is a fraction of the
# numerator, so the ratio does not depend on units and keeps its order.
_LEAST_SHARE = 1e-12


def training(z: Tensor, y: Tensor) -> tuple[Float[Tensor, "N D"], Int[Tensor, "N"], int]:
    """Check training data; return the embeddings in float64, the labels, and the number of classes."""
    points = z.detach().double()
    check_labels(y, len(points))
    if not points.isfinite().all():
        raise ValueError("The training embeddings hold NaN or infinity. Drop these rows.")
    sizes = torch.bincount(y.long())
    if (sizes == 0).any():
        missing = (sizes == 0).nonzero().flatten().tolist()
        raise ValueError(
            f"No training point has the label {missing}; labels must be 0 to C - 1, each with a training point."
        )
    return points, y.long(), len(sizes)


def class_means(points: Float[Tensor, "N D"], labels: Int[Tensor, "N"], classes: int) -> Float[Tensor, "C D"]:
    """Mean embedding of every class."""
    sums = torch.zeros(classes, points.shape[1], dtype=torch.float64, device=points.device)
    return sums.index_add_(0, labels, points) / torch.bincount(labels, minlength=classes).unsqueeze(1)


def whitener(centred: Float[Tensor, "N D"]) -> Float[Tensor, "D R"]:
    r"""Matrix V with :math:`V V^\top = \Sigma^+`, the pseudo-inverse of the covariance of centred points.

    The features are scaled to variance one first, so the rank does not depend on their units.
    """
    scale = centred.square().mean(dim=0).sqrt()
    scale = torch.where(scale > 0, scale, 1.0)
    unit = centred / scale
    variances, directions = torch.linalg.eigh(unit.T @ unit / len(unit))
    present = variances > _ABSENT * variances[-1]
    return directions[:, present] / variances[present].sqrt() / scale.unsqueeze(1)


def unit(points: Float[Tensor, "N D"]) -> Float[Tensor, "N D"]:
    """Scale every row to length one; a row of zeros stays zero."""
    length = points.norm(dim=1, keepdim=True)
    return points / torch.where(length > 0, length, 1.0)


def squared_distances(a: Float[Tensor, "B D"], b: Float[Tensor, "N D"]) -> Float[Tensor, "B N"]:
    """Squared Euclidean distances of all pairs."""
    return (a.square().sum(dim=1, keepdim=True) + b.square().sum(dim=1) - 2.0 * a @ b.T).clamp_min(0.0)


def neighbour_distance(z: Float[Tensor, "B D"], points: Float[Tensor, "N D"], k: int) -> Float[Tensor, "B"]:
    """Distance of each row to its k-th nearest point, computed in batches of rows.

    A matrix product finds the neighbour. The distance to it is then computed from the difference, because the matrix
    product loses accuracy for small distances.
    """
    origin = points.mean(dim=0)
    near = points - origin
    found = []
    for rows in (z - origin).split(max(1, ENTRIES // len(points))):
        nearest = squared_distances(rows, near).topk(k, dim=1, largest=False).indices
        found.append((rows - near[nearest[:, -1]]).norm(dim=1))
    return torch.cat(found) if found else z.new_empty(0)


def other_over_own(distances: Float[Tensor, "B C"], predicted: Int[Tensor, "B"]) -> Float[Tensor, "B"]:
    """Distance to the nearest class other than the predicted one, divided by the distance to the predicted class."""
    own = predicted.long().unsqueeze(1)
    other = distances.scatter(1, own, math.inf).amin(dim=1)
    least = (_LEAST_SHARE * other).clamp_min(torch.finfo(torch.float64).tiny)
    return other / (distances.gather(1, own).squeeze(1) + least)

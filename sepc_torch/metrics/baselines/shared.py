"""What the baselines share."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sepc_torch.model.queries import check_labels
from sepc_torch.shapes import Float, Int

# Entries of a matrix of distances that are held at a time: 64 MiB in float64.
_ENTRIES = 2**23
# Directions of less than this share of the largest variance count as absent: their deviation, 1e-6 of the largest, is
# ten roundings of float32 features.
_ABSENT = 1e-12
# Guards a ratio of distances against a division by zero, as the 1e-12 of the trust score's authors, but as a share of
# the other distance: units do not matter, and the order of ratios stays.
_LEAST_SHARE = 1e-12


def training(z: Tensor, y: Tensor) -> tuple[Float[Tensor, "N D"], Int[Tensor, "N"], int]:
    """Embeddings in float64, labels, and the number of classes."""
    points = z.detach().double()
    check_labels(y, len(points))
    if not points.isfinite().all():
        raise ValueError("The training embeddings hold NaN or infinity. Drop such rows.")
    sizes = torch.bincount(y.long())
    if (sizes == 0).any():
        missing = (sizes == 0).nonzero().flatten().tolist()
        raise ValueError(f"No training point has the label {missing}; number the classes from 0, or leave them out.")
    return points, y.long(), len(sizes)


def class_means(points: Float[Tensor, "N D"], labels: Int[Tensor, "N"], classes: int) -> Float[Tensor, "C D"]:
    """The mean of every class."""
    sums = torch.zeros(classes, points.shape[1], dtype=torch.float64, device=points.device)
    return sums.index_add_(0, labels, points) / torch.bincount(labels, minlength=classes).unsqueeze(1)


def whitener(centred: Float[Tensor, "N D"]) -> Float[Tensor, "D R"]:
    r"""A matrix V with :math:`V V^\top = \Sigma^+`, found on features of variance one, so that units do not matter."""
    scale = centred.square().mean(dim=0).sqrt()
    scale = torch.where(scale > 0, scale, 1.0)
    unit = centred / scale
    variances, directions = torch.linalg.eigh(unit.T @ unit / len(unit))
    present = variances > _ABSENT * variances[-1]
    return directions[:, present] / variances[present].sqrt() / scale.unsqueeze(1)


def unit(points: Float[Tensor, "N D"]) -> Float[Tensor, "N D"]:
    """Every row scaled to length one; a row of zeros stays."""
    length = points.norm(dim=1, keepdim=True)
    return points / torch.where(length > 0, length, 1.0)


def squared_distances(a: Float[Tensor, "B D"], b: Float[Tensor, "N D"]) -> Float[Tensor, "B N"]:
    """Squared Euclidean distances of all pairs."""
    return (a.square().sum(dim=1, keepdim=True) + b.square().sum(dim=1) - 2.0 * a @ b.T).clamp_min(0.0)


def neighbour_distance(z: Float[Tensor, "B D"], points: Float[Tensor, "N D"], k: int) -> Float[Tensor, "B"]:
    """The distance of each row to its k-th nearest point, some rows at a time.

    A matrix product finds the neighbour; its distance is then taken directly, so that a small one is accurate.
    """
    origin = points.mean(dim=0)
    near = points - origin
    found = []
    for rows in (z - origin).split(max(1, _ENTRIES // len(points))):
        nearest = squared_distances(rows, near).topk(k, dim=1, largest=False).indices
        found.append((rows - near[nearest[:, -1]]).norm(dim=1))
    return torch.cat(found) if found else z.new_empty(0)


def other_over_own(distances: Float[Tensor, "B C"], predicted: Int[Tensor, "B"]) -> Float[Tensor, "B"]:
    """The least distance to a class that was not predicted over that to the predicted one."""
    own = predicted.long().unsqueeze(1)
    other = distances.scatter(1, own, math.inf).amin(dim=1)
    least = (_LEAST_SHARE * other).clamp_min(torch.finfo(torch.float64).tiny)
    return other / (distances.gather(1, own).squeeze(1) + least)

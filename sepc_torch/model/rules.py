r"""Decision rules of the paper in torch: label, rule and class counts of a point, from its distances.

``kernels.decide`` applies the same rules on CUDA.

======================  =====================================  ==================================================
rule                    the point lies                         label
======================  =====================================  ==================================================
``Rule.SINGLE``   R1    in exactly one ellipsoid               class of that ellipsoid
``Rule.OVERLAP``  R2a   in several ellipsoids                  majority of the training points in all of them
``Rule.UNION``    R2b   in several ellipsoids whose            majority of the training points in any of them
                        intersection holds no training point
                        or no single majority
``Rule.OUTSIDE``  R3    in no ellipsoid                        class of the nearest ellipsoid, expanded until it
                                                               touches the point
======================  =====================================  ==================================================

Exactly one rule applies to a point. A tie in the union goes to the tied class with the nearest ellipsoid.

If several ellipsoids are equally near to a point outside, all of them are expanded. The paper then applies R2a and R2b
to the training points in the expanded ellipsoids. The model holds no training points and takes bounds of these counts
from each ellipsoid alone. In R2a the least count of a class over these ellipsoids is an upper bound of its count in all
of them. In R2b the greatest is a lower bound of its count in any of them. Label and trust of such a point can therefore
differ from the paper.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from sepc_torch.ellipsoid import SURFACE_TOLERANCE
from sepc_torch.model.counting import counts_in_reach, expanded_counts, region_counts
from sepc_torch.model.derived import buffer_of
from sepc_torch.model.device_sync import all_finite, readable
from sepc_torch.partitioning.cells import Ledger
from sepc_torch.shapes import Bool, Float, Int

# Relative difference up to which distances count as equal: ten times the rounding of a float32 distance.
NEAREST_TIE = 1e-6


class Rule(IntEnum):
    """The rule that gave a label."""

    SINGLE = 0
    OVERLAP = 1
    UNION = 2
    OUTSIDE = 3


class TrainingCounts(NamedTuple):
    """Class counts of the training set, for the rules.

    The fields between ``codes`` and ``held`` are those of :class:`~sepc_torch.partitioning.cells.Ledger`, with
    distances in the model's dtype.

    Attributes:
        codes: Class of each ellipsoid.
        cell_sizes, cell_members: Cells that hold training points, as lists of ellipsoids.
        entry_cells, entry_classes, entry_counts: Training points of each class in each cell.
        grid_classes, grid_counts: Counts of each class for which the ellipsoids have steps.
        step_ids, step_distances: Distances to which each ellipsoid must be expanded to hold these counts.
        tail_distances: Distances that stand for the steps beyond the horizon of each ellipsoid.
        held: Training points of each class in each ellipsoid.
    """

    codes: Int[Tensor, "K"]
    cell_sizes: Int[Tensor, "P"]
    cell_members: Int[Tensor, "M"]
    entry_cells: Int[Tensor, "E"]
    entry_classes: Int[Tensor, "E"]
    entry_counts: Int[Tensor, "E"]
    grid_classes: Int[Tensor, "T"]
    grid_counts: Int[Tensor, "T"]
    step_ids: Int[Tensor, "K L"]
    step_distances: Float[Tensor, "K L"]
    tail_distances: Float[Tensor, "K J"]
    held: Int[Tensor, "K C"]

    @classmethod
    def from_ledger(cls, codes: Int[Tensor, "K"], ledger: Ledger, dtype: torch.dtype) -> TrainingCounts:
        """Build the tables from a ledger, with distances in the given dtype."""
        tables = (buffer_of(table) for table in (*ledger, ledger.held))
        return cls(codes, *(table.to(dtype) if table.is_floating_point() else table for table in tables))


class Resolution(NamedTuple):
    """Label, rule, nearest ellipsoid and its distance (B,) of every point, and the class counts (B, C) of its region.

    ``finite`` is True if all distances are known to be finite.
    """

    label: Int[Tensor, "B"]
    rule: Int[Tensor, "B"]
    nearest: Int[Tensor, "B"]
    distance: Float[Tensor, "B"]
    counts: Int[Tensor, "B C"]
    finite: bool


def resolve(
    distance: Float[Tensor, "B K"], training: TrainingCounts, nearness: Float[Tensor, "B K"] | None = None
) -> Resolution:
    """Apply the rules to a batch of points. Rules that no point needs are skipped where values can be read.

    Args:
        distance: Mahalanobis distance of every point to every ellipsoid.
        training: Class counts of the training set.
        nearness: Distances that define the nearest ellipsoid of a point outside; by default ``distance``.
    """
    finite = all_finite(distance)
    inside = distance <= 1.0 + SURFACE_TOLERANCE
    held_by = inside.sum(dim=1)
    fewest, most = _range(held_by)
    outside, single = held_by == 0, held_by == 1
    least, nearest = (distance if nearness is None else nearness).min(dim=1)
    if nearness is not None:
        nearest = torch.where(outside, nearest, distance.argmin(dim=1))
    length = least if nearness is None else distance.gather(1, nearest.unsqueeze(1)).squeeze(1)
    # The ellipsoid that holds a point alone is the nearest one, but for distances that are NaN.
    place = nearest if finite else torch.where(single, inside.to(torch.uint8).argmax(dim=1), nearest)
    label, rule = training.codes.index_select(0, place), outside * int(Rule.OUTSIDE)
    narrow = wide = training.held.index_select(0, place)
    classes, alone, settled = training.held.shape[1], single, fewest == most == 1
    if fewest == 0:
        nearness = distance if nearness is None else nearness
        tied = (nearness <= (least * (1.0 + NEAREST_TIE)).unsqueeze(1)).sum(dim=1)
        alone = tied == 1 if most == 0 else single | (outside & (tied == 1))
        settled = most <= 1 and bool(alone.all())
        tables = *training[6:11], classes, SURFACE_TOLERANCE
        if settled and most == 0:
            narrow = counts_in_reach(nearest, length, *tables)
        elif settled:
            rows = outside.nonzero().squeeze(1)
            narrow = narrow.index_copy(0, rows, counts_in_reach(nearest[rows], length[rows], *tables))
        else:
            expanded = expanded_counts(distance, nearness, outside, *tables, NEAREST_TIE)
            narrow, wide = torch.where(outside.unsqueeze(1), expanded, narrow)
    if most > 1:
        regions = region_counts(inside, *training[1:6], classes)
        several = (held_by > 1).unsqueeze(1)
        narrow, wide = torch.where(several, regions[0], narrow), torch.where(several, regions[1], wide)
    if settled:
        return Resolution(label, rule, nearest, length, narrow, finite)
    by_narrow, by_wide = decided(narrow), decided(wide)
    majority = torch.where(
        by_narrow,
        narrow.argmax(dim=1),
        torch.where(by_wide, wide.argmax(dim=1), _nearest_of_tied(wide, class_distance(distance, training))),
    )
    label = torch.where(alone, label, majority)
    rule = torch.where(held_by > 1, torch.where(by_narrow, int(Rule.OVERLAP), int(Rule.UNION)), rule)
    counts = torch.where((alone | by_narrow)[:, None], narrow, wide)
    return Resolution(label, rule, nearest, length, counts, finite)


def _range(held_by: Int[Tensor, "B"]) -> tuple[int, int]:
    """Least and largest number of ellipsoids that hold a point; all numbers are possible where none can be read."""
    if not readable(held_by) or held_by.shape[0] == 0:
        return 0, 2
    fewest, most = torch.aminmax(held_by)
    return int(fewest), int(most)


def class_distance(distance: Float[Tensor, "B K"], training: TrainingCounts) -> Float[Tensor, "B C"]:
    """Distance of every point to the nearest ellipsoid of every class; infinite for a class without an ellipsoid."""
    classes = training.held.shape[1]
    start = torch.full((distance.shape[0], classes), torch.inf, dtype=distance.dtype, device=distance.device)
    return start.scatter_reduce(1, training.codes.expand(distance.shape), distance, "amin")


def decided(counts: Int[Tensor, "B C"]) -> Bool[Tensor, "B"]:
    """Whether one class has more points than every other class."""
    most = counts.amax(dim=1, keepdim=True)
    return (counts == most).sum(dim=1) == 1


def _nearest_of_tied(counts: Int[Tensor, "B C"], near: Float[Tensor, "B C"]) -> Int[Tensor, "B"]:
    """The class with the nearest ellipsoid among the classes with the most points."""
    tied = counts == counts.amax(dim=1, keepdim=True)
    # The clamp keeps a tied class without an ellipsoid (infinite distance) below the classes that are not tied.
    return torch.where(tied, near.clamp_max(torch.finfo(near.dtype).max), torch.inf).argmin(dim=1)

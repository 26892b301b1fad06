"""Conversion of arrays from older file formats and state dicts.

Format 1 had other names, formats 1 and 2 other tables, formats 1 to 3 one nonconformity score for all labels, formats 1
to 4 no groups of calibration points.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from sepc_torch.shapes import Array

# Names of arrays and modules in format 1, and their names in format 2.
_RENAMED = {
    "reach": "sorted_distances",
    "ranks": "counts_at",
    "witnesses": "reference_points",
    "held_strangeness": "held_nonconformity",
    "class_strangeness": "class_nonconformity",
}
# The tables of formats 1 and 2. A file held either "held" or "inside", which now follow from the other tables.
_DENSE = ("cells", "counts", "sorted_distances", "counts_at")
_DERIVED = ("held", "inside")
# The calibration of formats 1 to 3: the same nonconformity scores for the network's labels and for the head's own. Now
# both have a set of their own, with weights of the kinds and the prior odds of unknowns, which was a constant.
_SHARED = {
    "typicality.ordered": "strangeness.ordered",
    "typicality.combined": "strangeness.combined",
    "held_nonconformity": "held_nonconformity",
    "class_nonconformity": "class_nonconformity",
    "class_counts": "class_counts",
}
_FIXED_UNKNOWN_ODDS = 0.1
# The calibration of formats 1 to 4 lacks these arrays; empty ones say that there are no groups.
_GROUPS = {
    "held_rows": np.int64,
    "point_label": np.int64,
    "point_class": np.int64,
    "point_region": np.int64,
    "class_threshold": np.float64,
    "region_threshold": np.float64,
    "group_threshold": np.float64,
}


def current_arrays(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Arrays of this or an earlier version under their current names and with the current tables.

    The tables of a partition or model become NumPy arrays if they are converted. Everything else is passed on as it is.

    Args:
        arrays: Arrays of a file, or tensors and other values of a state dict; names can have prefixes such as
            ``"sepc."``.

    >>> current_arrays({"evidence.witnesses": 1, "scale": 2})
    {'evidence.reference_points': 1, 'scale': 2}
    """
    named = {".".join(_RENAMED.get(part, part) for part in name.split(".")): value for name, value in arrays.items()}
    for prefix in [name.removesuffix(_DENSE[2]) for name in named if name.rpartition(".")[2] == _DENSE[2]]:
        if all(prefix + name in named for name in _DENSE):
            named |= {prefix + name: table for name, table in _tables(*(named.pop(prefix + n) for n in _DENSE)).items()}
            for name in _DERIVED:
                named.pop(prefix + name, None)
    for prefix in [name.removesuffix("typicality.ordered") for name in named if name.endswith("typicality.ordered")]:
        shared = {new: named.pop(prefix + old) for old, new in _SHARED.items()}
        shared["strangeness.weights"] = np.ones(len(shared["strangeness.ordered"]))
        shared["unknown_odds"] = np.array(_FIXED_UNKNOWN_ODDS)
        named |= {f"{prefix}{source}.{name}": value for source in ("network", "own") for name, value in shared.items()}
    for prefix in [name.removesuffix("held_joint") for name in named if name.endswith(".held_joint")]:
        if not any(prefix + name in named for name in _GROUPS):
            named |= {prefix + name: np.zeros(0, dtype) for name, dtype in _GROUPS.items()}
    return named


def _tables(cells: Any, counts: Any, sorted_distances: Any, counts_at: Any) -> dict[str, Array]:
    """The tables of :class:`~sepc_torch.partitioning.cells.Ledger` from those of formats 1 and 2, without loss.

    ``cells[p, k]`` said whether cell p lies in ellipsoid k, and ``counts[p, c]`` how many points of class c it holds.
    ``counts_at[c, q]`` points of class c lie within ``sorted_distances[k, c, q]`` of ellipsoid k. Rows of small classes
    were padded with infinite distances and repeated counts.
    """
    cells, counts, sorted_distances, counts_at = (
        table.cpu().numpy() if hasattr(table, "cpu") else table
        for table in (cells, counts, sorted_distances, counts_at)
    )
    entry_cells, entry_classes = np.nonzero(counts)
    grid_classes, rank = np.nonzero(np.diff(counts_at, axis=1, prepend=0))
    steps = np.tile(np.arange(len(rank), dtype=np.int32), (len(sorted_distances), 1))
    return {
        "cell_sizes": cells.sum(axis=1),
        "cell_members": np.nonzero(cells)[1].astype(np.int32),
        "entry_cells": entry_cells.astype(np.int32),
        "entry_classes": entry_classes.astype(np.int32),
        "entry_counts": counts[entry_cells, entry_classes],
        "grid_classes": grid_classes.astype(np.int32),
        "grid_counts": counts_at[grid_classes, rank],
        "step_ids": steps,
        "step_distances": sorted_distances[:, grid_classes, rank],
        "tail_distances": sorted_distances[:, 0, :0],
    }

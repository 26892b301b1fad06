"""Fit of the parts of a trust head: projection, partition, frozen classifier and evidence."""

from __future__ import annotations

from typing import Any, Literal, TypedDict, get_args

import numpy as np
import torch

from sepc_torch.data.options import check_choice, check_count, check_jobs
from sepc_torch.data.progress import Choice
from sepc_torch.data.warn import warn_user
from sepc_torch.ellipsoid import DEFAULT_FLOOR
from sepc_torch.head.evidence.evidence import fit_evidence, pieces_of
from sepc_torch.head.evidence.layer_distance import fit_layers
from sepc_torch.head.reading.defaults import default_max_impure, default_max_per_class, default_reference_points
from sepc_torch.head.reading.moments import Moments
from sepc_torch.head.reading.passes import first_pass, second_pass
from sepc_torch.head.reading.projection import Method, Normalize, choose_projection
from sepc_torch.head.reading.sources import EmbeddingSource
from sepc_torch.head.training_set import KeptTrainingSet
from sepc_torch.model.sepc import SEPC, NanPolicy, Nearest
from sepc_torch.partitioning.fit import partition
from sepc_torch.partitioning.record import Rest

# Least standard deviation of a feature, in steps of float32, that leaves the digits of distances.
_STEPS = 16.0


class PartitionOptions(TypedDict, total=False):
    """Further options of a head's partition.

    Attributes:
        rest: How a class of more than two is separated from the others; see :func:`~sepc_torch.partition`.
        max_isolated: Largest number of isolated training points that get an ellipsoid of their own, a ball; None for
            all, by default 256. If there are more, none gets one: they would cost as much as other ellipsoids and hold
            no new point.
        floor: Least semi-axis, in standard deviations.
        solver: ``"native"`` or the name of an installed cvxpy solver.
        nearest: The distance that finds the nearest ellipsoid of a point outside every ellipsoid, by default
            ``"mahalanobis"``; see :meth:`SEPC.from_partition`.
    """

    rest: Rest
    max_isolated: int | None
    floor: float
    solver: str
    nearest: Nearest


def fit_parts(
    source: EmbeddingSource,
    classes: Any,
    *,
    dim: int | None,
    normalize: Normalize,
    projection: Method,
    max_impure: int | None,
    max_per_class: int | Literal["auto"] | None,
    reference_points: int | None,
    nan_policy: NanPolicy,
    partition_options: PartitionOptions,
    n_jobs: int | None,
    progress: Choice,
    keep_points: bool,
    device: torch.device | None,
) -> dict[str, Any]:
    """Fit the parts of a head, the arguments of :class:`~sepc_torch.TrustHead`, to embeddings that are read twice.

    The options are those of :meth:`TrustHead.fit`, which documents them.
    """
    if normalize not in ("l2", "standardize", None):
        raise ValueError(f"normalize must be 'l2', 'standardize' or None, got {normalize!r}.")
    check_choice("projection", projection, get_args(Method))
    unknown = sorted(partition_options.keys() - PartitionOptions.__annotations__.keys())
    if unknown:
        raise ValueError(
            f"partition has no option {unknown[0]!r}; its options are {', '.join(PartitionOptions.__annotations__)}."
        )
    chosen: PartitionOptions = {"rest": "whole", "max_isolated": 256, "floor": DEFAULT_FLOOR, "solver": "native"}
    chosen |= {"nearest": "mahalanobis", **partition_options}
    check_choice("rest", chosen["rest"], get_args(Rest))
    if reference_points is not None:
        check_count(reference_points, "reference_points")
    if dim is not None:
        check_count(dim, "dim", least=1)
    if max_per_class is not None and max_per_class != "auto":
        check_count(max_per_class, "max_per_class", least=1)
    check_jobs(n_jobs)
    first = first_pass(source, classes, normalize, projection, device, least_dim=dim or 1)
    _check_resolution(first.moments.raw)
    project = choose_projection(first.moments, first.classes, first.sizes, dim, normalize, projection)
    if max_per_class == "auto":
        max_per_class = default_max_per_class(first.sizes)
    if max_impure is None:
        max_impure = default_max_impure(first.sizes, max_per_class)
    if reference_points is None:
        reference_points = default_reference_points(first.moments.features)
    data = second_pass(source, first, project, reference_points)
    part = partition(
        data.points,
        data.classes[data.codes],
        max_impure=max_impure,
        max_per_class=max_per_class,
        standardize=False,
        n_jobs=n_jobs,
        progress=progress,
        classes=data.classes,
        device=device,
        rest=chosen["rest"],
        max_isolated=chosen["max_isolated"],
        floor=chosen["floor"],
        solver=chosen["solver"],
    )
    sepc = SEPC.from_partition(part, chosen["nearest"], nan_policy=nan_policy)
    sepc.feature_names = tuple(f"component {j}" for j in range(sepc.dim))
    layers = None if source.layers is None else fit_layers(source.layers, data.classes.tolist())
    evidence = fit_evidence(data, pieces_of(part, data.points, data.codes, device), layers)
    ids = np.arange(len(data.codes)) if source.ids is None else source.ids
    training_set = None
    if keep_points:
        training_set = KeptTrainingSet(
            data.points,
            data.coordinates,
            data.codes,
            ids,
            data.reference_rows,
            part.uncounted(),
            states=tuple("unchanged" for _ in data.classes),
            current=np.ones(len(data.classes), dtype=bool),
            most_reference_points=reference_points,
            variance=data.variance,
        )
    return {
        "projection": project,
        "sepc": sepc,
        "evidence": evidence,
        "feature_names": source.names,
        "reference_ids": tuple(ids[data.reference_rows].tolist()),
        "training_set": training_set,
    }


def _check_resolution(moments: Moments) -> None:
    """Raise or warn if float32, in which a head computes, rounds most features by much of their spread.

    Args:
        moments: Mean and covariance of the embeddings.
    """
    spread = np.sqrt(np.diag(moments.covariance))
    varying = spread > 0
    if not varying.any():
        return
    step = np.finfo(np.float32).eps * np.abs(moments.mean[varying])
    steps = float(np.median(spread[varying] / np.maximum(step, np.finfo(np.float64).tiny)))
    if steps >= _STEPS:
        return
    problem = (
        f"Half of the embeddings' features lie so far from zero that their standard deviation is at most {steps:.2g} "
        "steps of float32, in which a head computes. Subtract the mean of the training embeddings from all embeddings."
    )
    if steps < 1.0:
        raise ValueError(problem)
    warn_user(f"{problem} Scores are coarse otherwise.")

"""Fit of the parts of a trust head: projection, partition, frozen classifier and evidence."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from sepc_torch.head.defaults import default_max_impure, default_max_per_class, default_reference_points
from sepc_torch.head.evidence import Evidence, fit_evidence, pieces_of
from sepc_torch.head.fit_options import FitOptions
from sepc_torch.head.passes import first_pass, second_pass
from sepc_torch.head.projection import Projection, choose_projection
from sepc_torch.head.sources import EmbeddingSource
from sepc_torch.head.training_set import KeptTrainingSet
from sepc_torch.model.sepc import SEPC
from sepc_torch.partitioning.fit import partition


class FittedParts(NamedTuple):
    """The arguments of :class:`~sepc_torch.TrustHead`."""

    projection: Projection
    sepc: SEPC
    evidence: Evidence
    feature_names: tuple[str, ...] | None
    reference_ids: tuple[int | str, ...]
    training_set: KeptTrainingSet | None


def fit_parts(source: EmbeddingSource, classes: Any, options: FitOptions) -> FittedParts:
    """Fit the parts of a head to a source of labelled embeddings, which is read twice.

    Args:
        source: The labelled embeddings.
        classes: The labels in the order of the network's logits, or None to sort them.
        options: The options of the fit.
    """
    normalize, method, device = options.normalize, options.projection, options.device
    first = first_pass(source, classes, normalize, method, device, least_dim=options.dim or 1)
    project = choose_projection(first.moments, first.classes, first.sizes, options.dim, normalize, method)
    max_per_class, max_impure = options.max_per_class, options.max_impure
    if max_per_class == "auto":
        max_per_class = default_max_per_class(first.sizes)
    if max_impure is None:
        max_impure = default_max_impure(first.sizes, max_per_class)
    kept = options.reference_points
    if kept is None:
        kept = default_reference_points(first.moments.features)
    data = second_pass(source, first, project, kept)
    part = partition(
        data.points,
        data.classes[data.codes],
        max_impure=max_impure,
        max_per_class=max_per_class,
        rest=options.rest,
        max_isolated=options.max_isolated,
        solver=options.solver,
        standardize=False,
        floor=options.floor,
        n_jobs=options.n_jobs,
        progress=options.progress,
        classes=data.classes,
        device=device,
    )
    sepc = SEPC.from_partition(part, options.nearest, nan_policy=options.nan_policy)
    sepc.feature_names = tuple(f"component {j}" for j in range(sepc.dim))
    evidence = fit_evidence(data, pieces_of(part, data.points, data.codes, device))
    ids = np.arange(len(data.codes)) if source.ids is None else source.ids
    training_set = None
    if options.keep_points:
        training_set = KeptTrainingSet(
            data.points,
            data.coordinates,
            data.codes,
            # One integer dtype: int64 and uint64 together would become float64.
            ids.astype(np.int64) if ids.dtype.kind in "iu" else ids,
            data.reference_rows,
            part.uncounted(),
            states=tuple("unchanged" for _ in data.classes),
            current=np.ones(len(data.classes), dtype=bool),
            most_reference_points=kept,
            variance=data.variance,
        )
    reference_ids = tuple(ids[data.reference_rows].tolist())
    return FittedParts(project, sepc, evidence, source.names, reference_ids, training_set)

r"""The two passes of a fit over its embeddings: one accumulates moments, one projects; neither holds the embeddings.

The first pass (:func:`first_pass`) finds the classes, their sizes and the moments that projections are fitted to. The
second pass (:func:`second_pass`) projects every embedding and keeps the coordinates: R values in float64 for the
partition and at most 64 in float32 for the densities, and the embeddings of the reference points.

A source may give the rows of the second pass in another order, like a loader that shuffles. Classes and coordinates
therefore come from the same pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from sepc_torch.data.arrays import FiniteCheck, check_scale, rows_per_chunk
from sepc_torch.data.labels import check_one_label_per_row, label_array, label_codes, ordered_classes
from sepc_torch.data.memory import PARTITION_COPIES, check_memory
from sepc_torch.head.evidence.neighbours import Neighbours
from sepc_torch.head.reading.moments import EmbeddingMoments
from sepc_torch.head.reading.projection import Method, Normalize, Projection, class_features, projection_from
from sepc_torch.head.reading.sources import EmbeddingSource
from sepc_torch.shapes import Array, Bool, Float, Int

# Largest number of directions for densities and for whitened distances: the error of an estimated covariance grows with
# them, and memory and time of a region grow with their square.
MAX_DIRECTIONS = 64
# Scales of embeddings for which float32 represents their squares, also those of small differences and long vectors.
_LEAST_SCALE, _LARGEST_SCALE = 1e-15, 1e15


class FirstPass(NamedTuple):
    """Classes (C,), the number of rows of each class, and the moments of all embeddings."""

    classes: Array
    sizes: Int[Array, "C"]
    moments: EmbeddingMoments


class ProjectedSet(NamedTuple):
    """Coordinates of the training embeddings.

    ``points`` are the coordinates of the partition. ``coordinates`` are those of the densities, which ``polar``
    computes; ``variance`` is the sum of the variances of all polar features. ``codes`` are indices into ``classes``
    (C,). ``white`` scales all directions to unit variance. ``reference_rows`` holds the row number of every reference
    point, in the order of the second pass.
    """

    points: Float[Array, "N R"]
    coordinates: Float[Array, "N S"]
    codes: Int[Array, "N"]
    classes: Array
    polar: Projection
    white: Projection
    reference_points: Neighbours
    reference_rows: Int[Array, "n"]
    variance: float


def first_pass(
    source: EmbeddingSource,
    classes: Any = None,
    normalize: Normalize = "l2",
    method: Method = "pca",
    device: torch.device | None = None,
    least_dim: int = 1,
) -> FirstPass:
    """Read all embeddings once: check them, count the classes and accumulate the moments.

    If the source knows its number of rows, the memory of the fit is checked when the first chunk has been read. The
    check is repeated with the chosen dimension and the number of classes in :func:`second_pass`.

    Args:
        source: The labelled embeddings.
        classes: The labels in the wanted order; by default sorted.
        normalize: Normalisation of the projection that will be fitted.
        method: Method of the projection that will be fitted.
        device: Torch device that computes products of embeddings in float64; None for NumPy.
        least_dim: Least dimension that the projection can have.

    >>> from sepc_torch.head.reading.sources import ArraySource
    >>> first = first_pass(ArraySource([[1.0, 0.0], [0.0, 1.0], [2.0, 0.0]], ["b", "a", "b"]))
    >>> first.classes.tolist(), first.sizes.tolist(), first.moments.raw.mean.tolist()
    (['a', 'b'], [1, 2], [1.0, 0.3333333333333333])
    """
    index: dict[Any, int] = {}

    def code(labels: list[Any]) -> Int[Array, "n"]:
        """Number the labels in the order in which they occur."""
        return np.array([index.setdefault(label, len(index)) for label in labels], dtype=np.int64)

    moments = EmbeddingMoments(class_features(normalize, method), device)
    check = FiniteCheck("embeddings", source.names)
    sizes: Int[Array, "C"] = np.zeros(0, dtype=np.int64)
    rows = source.row_count()
    largest = 0.0
    for z, codes in _read(source, code):
        if rows is not None and not len(sizes):
            _check_fit_memory(rows, z.shape[1], least_dim, len(index), reference_points=0)
        sizes = np.bincount(codes, minlength=len(index)) + np.pad(sizes, (0, len(index) - len(sizes)))
        if check.add(z):  # the message counts all values that are not finite, so the search goes on
            largest = max(largest, float(z.max()), -float(z.min()))
            if largest <= _LARGEST_SCALE:
                moments.add(z, codes)
    check.refuse()
    check_scale(largest, "embeddings", _LEAST_SCALE, _LARGEST_SCALE)
    if not index:
        raise ValueError("The batches are empty: there is nothing to fit. Pass at least one batch (inputs, labels).")
    moments.finish()
    labels = label_array(list(index))
    order = np.argsort(labels)
    found, places = ordered_classes(labels[order], classes)
    ordered = np.empty_like(sizes)
    ordered[places] = sizes[order]
    return FirstPass(found, ordered, moments)


def second_pass(
    source: EmbeddingSource, first: FirstPass, project: Projection, reference_points: int, seed: int = 0
) -> ProjectedSet:
    """Read all embeddings again: project them and keep the reference points.

    Args:
        source: The labelled embeddings.
        first: The result of the first pass.
        project: Projection to the coordinates of the partition.
        reference_points: Largest number of training points to keep, proportional to class sizes and at least one per
            class; 0 keeps none.
        seed: Seed of the random choice of reference points.
    """
    sizes, features = first.sizes, first.moments.features
    total = int(sizes.sum())
    _check_fit_memory(total, features, len(project.matrix), len(sizes), reference_points)
    polar = projection_from(first.moments, MAX_DIRECTIONS, "polar", "pca")
    white = projection_from(first.moments, MAX_DIRECTIONS, None, "pca")
    points = np.empty((total, len(project.matrix)))
    coordinates = np.empty((total, len(polar.matrix)), dtype=np.float32)
    codes = np.empty(total, dtype=np.int64)
    # Reference points are chosen by their rank within their class, which is defined before the order of rows is known.
    chosen = _choose_reference_points(sizes, reference_points, np.random.default_rng(seed))
    places, starts = chosen.cumsum() - 1, sizes.cumsum() - sizes
    reference = torch.empty(int(chosen.sum()), features)
    reference_rows = np.empty(len(reference), dtype=np.int64)
    seen = np.zeros_like(sizes)
    names = first.classes.tolist()
    check = FiniteCheck("embeddings", source.names)
    start = 0
    for z, chunk in _read(source, lambda labels: label_codes(labels, names)):
        stop = start + len(chunk)
        now = seen + np.bincount(chunk[chunk >= 0], minlength=len(sizes))
        if (chunk < 0).any() or (now > sizes).any():
            _refuse_other_rows(first, now, int((chunk < 0).sum()))
        if not check.add(z):
            check.refuse()
        # In float32, as the head projects in inference, so that training points keep their exact coordinates.
        embeddings = torch.from_numpy(np.array(z, order="C")).float()  # a copy: torch refuses some views
        points[start:stop] = project(embeddings).numpy()
        coordinates[start:stop] = polar(embeddings).numpy()
        codes[start:stop] = chunk
        rank = starts[chunk] + seen[chunk] + _ranks(chunk)
        kept = np.flatnonzero(chosen[rank])
        reference[torch.from_numpy(places[rank[kept]])] = embeddings[torch.from_numpy(kept)]
        reference_rows[places[rank[kept]]] = start + kept
        seen, start = now, stop
    if start < total:
        _refuse_other_rows(first, seen, 0)
    owners = torch.from_numpy(np.repeat(np.arange(len(sizes)), sizes)[chosen])
    kept_points = Neighbours(reference, owners, eleven_bits=True)
    variance = float(np.trace(first.moments.polar().covariance))
    return ProjectedSet(points, coordinates, codes, first.classes, polar, white, kept_points, reference_rows, variance)


def _read(
    source: EmbeddingSource, code: Callable[[list[Any]], Int[Array, "n"]]
) -> Iterator[tuple[Float[Array, "n D"], Int[Array, "n"]]]:
    """Read chunks of about equal size with the codes of their labels; check shapes and labels.

    Chunks of a source are joined or split: tiny ones would take a product of D x D matrices for a few rows, large ones
    too much memory.

    Args:
        source: The labelled embeddings.
        code: Function from distinct labels to their codes.
    """
    waiting: list[tuple[Array, Array]] = []
    held, features = 0, 0
    for z, given in source.chunks():
        if len(z) == 0 and len(given) == 0:
            continue
        if z.ndim != 2 or 0 in z.shape or z.shape[1] != (features or z.shape[1]):
            wanted = f"(points, {features})" if features else "(points, features)"
            raise ValueError(f"embeddings must be a non-empty array of shape {wanted}, got shape {z.shape} in a batch.")
        labels = label_array(given, "labels")
        check_one_label_per_row(len(z), len(labels))
        distinct, inverse = np.unique(labels, return_inverse=True)
        codes = code(distinct.tolist())[inverse]
        features = z.shape[1]
        step = rows_per_chunk(features)
        for start in range(0, len(z), step):
            waiting.append((z[start : start + step], codes[start : start + step]))
            held += len(waiting[-1][0])
            if held >= step:
                yield _joined(waiting)
                waiting, held = [], 0
    if waiting:
        yield _joined(waiting)


def _joined(parts: list[tuple[Array, Array]]) -> tuple[Array, Array]:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate([z for z, _ in parts]), np.concatenate([codes for _, codes in parts])


def _ranks(codes: Int[Array, "n"]) -> Int[Array, "n"]:
    """Number of earlier entries with the same code.

    >>> _ranks(np.array([1, 0, 1, 1, 0]))
    array([0, 0, 1, 2, 1])
    """
    order = np.argsort(codes, kind="stable")
    ranks = np.empty_like(codes)
    ranks[order] = np.arange(len(codes)) - np.searchsorted(codes[order], codes[order])
    return ranks


def _choose_reference_points(sizes: Int[Array, "C"], most: int, rng: np.random.Generator) -> Bool[Array, "N"]:
    """Choose rows at random, proportional to class sizes and at least one per class; rows are sorted by class."""
    chosen = np.zeros(int(sizes.sum()), dtype=bool)
    if most:
        share = min(1.0, most / len(chosen))
        for start, size in zip((sizes.cumsum() - sizes).tolist(), sizes.tolist(), strict=True):
            chosen[start + rng.choice(size, max(1, int(share * size)), replace=False)] = True
    return chosen


def _refuse_other_rows(first: FirstPass, counts: Int[Array, "C"], unknown: int) -> None:
    """Raise ValueError because the second pass does not give the rows of the first."""
    names, sizes = first.classes.tolist(), first.sizes.tolist()
    differ = [
        f"{name!r}: {size} and {now}"
        for name, size, now in zip(names, sizes, counts.tolist(), strict=True)
        if size != now
    ]
    found = f"{unknown} labels that the first did not have" if unknown else f"rows per class {'; '.join(differ[:5])}"
    raise ValueError(
        f"The second pass over the data gave other rows than the first: {found}. A fit reads its data twice. Pass data "
        "that give the same rows each time, in any order (a loader that shuffles needs drop_last=False), or pass "
        "iter(loader), whose embeddings are read once and kept in memory."
    )


def _check_fit_memory(rows: int, features: int, dim: int, classes: int, reference_points: int) -> None:
    """Raise MemoryError if the fit of so many rows does not fit into memory."""
    directions = min(MAX_DIRECTIONS, features + 1)
    coordinates = rows * (8 * dim * (1 + PARTITION_COPIES) + 4 * directions)
    # Merged moments and the workspace of their eigenvectors; a region of each class in float64, twice; reference points
    # with their offsets, rounded offsets and one copy.
    others = 32 * (features + 1) ** 2 + 16 * classes * directions**2 + 16 * min(rows, reference_points) * features
    check_memory(
        coordinates + others,
        f"The fit of {rows} rows x {features} features, {classes} classes and {dim} dimensions",
        "Choose a smaller dim or fit on fewer rows of each class. If the embeddings themselves fill the memory, pass "
        "them as a numpy.memmap, a Parquet file, or a DataLoader with encoder=.",
    )

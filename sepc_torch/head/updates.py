r"""Updates of a fitted head: add labelled points, remove points, and solve the ellipsoids of some classes again.

The projections stay as they were fitted. A point inside an ellipsoid of its own class does not change the
minimum-volume ellipsoid of the points that the ellipsoid covers; neither does the removal of a point that is no support
point. Such changes concern counts, densities and reference points only, which are computed again from all points. Every
other change marks a class, and :func:`refit` solves the ellipsoids of marked classes. ``max_impure`` and
``max_per_class`` keep the values that the fit chose. :mod:`sepc_torch.head.training_set` says how near the result is to
a full fit.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from sepc_torch.data.arrays import numeric_points
from sepc_torch.data.labels import TrainingSet, label_array, label_codes
from sepc_torch.data.progress import Choice
from sepc_torch.head.evidence.evidence import Evidence, fit_evidence, pieces_of
from sepc_torch.head.evidence.neighbours import Neighbours
from sepc_torch.head.reading.passes import ProjectedSet
from sepc_torch.head.reading.sources import row_ids
from sepc_torch.head.training_set import INSIDE_TOLERANCE, KeptTrainingSet, State, kept_points
from sepc_torch.model.queries import feature_columns
from sepc_torch.model.sepc import SEPC
from sepc_torch.partitioning.fit import count_partition, separate_classes
from sepc_torch.partitioning.record import UncountedEllipsoid
from sepc_torch.shapes import Array, Bool, Float, Int

if TYPE_CHECKING:
    from sepc_torch.head.trust_head import TrustHead

Part = TypeVar("Part", bound=nn.Module)


class Updated(NamedTuple):
    """The parts of a head that follow from its training points."""

    sepc: SEPC
    evidence: Evidence
    training_set: KeptTrainingSet


def add_points(head: TrustHead, z: Any, y: Any, ids: Any = None) -> TrustHead:
    """Add labelled embeddings; mark the classes whose ellipsoids they change.

    A class is marked if a new point of the class lies in none of its ellipsoids, or if new points of other classes push
    one of its ellipsoids beyond ``max_impure``. New points become reference points while there is room. Beyond, each
    replaces a random reference point of its class, so that these stay a uniform sample of the class.

    Args:
        head: The head, which is changed.
        z: Embeddings (M, D): an array, list of rows, tensor, or a table with the columns that the head was fitted on.
        y: Their labels (M,), all known to the head.
        ids: Their identifiers (M,), new to the head; by default the integers after the largest identifier.

    >>> from sepc_torch import TrustHead
    >>> z = [[1.0, 0.0], [2.0, 0.1], [3.0, 0.0], [0.0, 1.0], [0.1, 2.0], [0.0, 3.0]]
    >>> head = TrustHead.fit(z, ["a", "a", "a", "b", "b", "b"], dim=1, normalize=None, keep_points=True)
    >>> head.update([[1.5, 0.1]], ["a"]).marked  # add_points, in the head's own words
    ()
    >>> head.sepc.totals.tolist(), head.calibration_age
    ([4, 3], 0.14285714285714285)
    """
    old = kept_points(head)
    embeddings = _embeddings(head, z)
    codes = _known_codes(y, head.sepc.classes, len(embeddings))
    names = _new_ids(ids, old.ids, len(codes))
    with torch.no_grad():
        points = _on_cpu(head.projection)(embeddings).double().numpy()
        coordinates = _on_cpu(_evidence_of(head).polar)(embeddings).float().numpy()
    bad = ~(np.isfinite(points).all(axis=1) & np.isfinite(coordinates).all(axis=1))
    if bad.any():
        raise ValueError(
            f"Row {int(bad.argmax())} has no projection: it holds only zeros or too large values. Drop it."
        )
    rows = np.arange(len(old), len(old) + len(codes))
    reference = _evidence_of(head).reference_points
    fresh = embeddings.to(reference.offsets.dtype) - reference.origin.cpu()
    kept, added = _choose_reference_points(old, codes)
    references = np.concatenate([old.reference_rows[kept], rows[added]])
    offsets = torch.cat([reference.offsets.cpu()[torch.from_numpy(kept)], fresh[torch.from_numpy(added)]])
    new = replace(
        old,
        points=np.concatenate([old.points, points]),
        coordinates=np.concatenate([old.coordinates, coordinates]),
        codes=np.concatenate([old.codes, codes]),
        ids=np.concatenate([old.ids, names]),
    )
    order = np.lexsort((references, new.codes[references]))
    new = replace(new, reference_rows=references[order])
    outside = ~_inside_own(old.ellipsoids, points, codes)
    found = _count_again(head, new, new.ellipsoids, offsets[torch.from_numpy(order)])
    return _with_states(head, found, set(codes[outside].tolist()), set(codes.tolist()))


def remove_points(head: TrustHead, ids: Any) -> TrustHead:
    """Remove all points with the given identifiers; mark the classes whose support points are among them.

    Every class must keep a point and, if the head has reference points, a reference point.

    Args:
        head: The head, which is changed.
        ids: The identifiers, or one identifier.

    >>> from sepc_torch import TrustHead
    >>> z = [[1.0, 0.0], [2.0, 0.1], [3.0, 0.0], [0.0, 1.0], [0.1, 2.0], [0.0, 3.0]]
    >>> head = TrustHead.fit(z, ["a", "a", "a", "b", "b", "b"], dim=1, normalize=None, keep_points=True)
    >>> head.forget(1).marked, head.sepc.totals.tolist()  # a point between the others
    ((), [2, 3])
    >>> head.forget([2]).marked  # an end; two classes are always solved together
    ('a', 'b')
    """
    old = kept_points(head)
    wanted = label_array(_several(ids), "ids").tolist()
    unknown = sorted(set(wanted) - set(old.ids.tolist()), key=str)
    if unknown:
        raise ValueError(
            f"{len(unknown)} ids are not in the training set of the head, such as {unknown[0]!r}. Pass ids of the fit "
            "or of an update."
        )
    gone = np.isin(old.ids, np.array(wanted, dtype=old.ids.dtype))
    _refuse_empty_classes(head, gone)
    left = ~gone
    place = left.cumsum() - 1  # the new row of each row that is left
    support = {e.code for e in old.ellipsoids if gone[e.support].any()}
    ellipsoids = tuple(e._replace(support=place[e.support[left[e.support]]]) for e in old.ellipsoids)
    kept = left[old.reference_rows]
    new = replace(
        old,
        points=old.points[left],
        coordinates=old.coordinates[left],
        codes=old.codes[left],
        ids=old.ids[left],
        reference_rows=place[old.reference_rows[kept]],
    )
    offsets = _evidence_of(head).reference_points.offsets.cpu()[torch.from_numpy(kept)]
    found = _count_again(head, new, ellipsoids, offsets)
    return _with_states(head, found, support, set(old.codes[gone].tolist()))


def refit(head: TrustHead, classes: Any = None, n_jobs: int | None = None, progress: Choice = "auto") -> TrustHead:
    """Solve the ellipsoids of some classes again, with the present points of all classes; keep the others.

    The ellipsoids of these classes are bit-identical to those of a full fit with the same projection. If the head has
    two classes, one run separates them, so both are solved.

    Args:
        head: The head, which is changed.
        classes: Labels of the classes; by default the marked ones.
        n_jobs: Number of processes, as in joblib.
        progress: Whether to show a progress bar.

    >>> from sepc_torch import TrustHead
    >>> z = [[1.0, 0.0], [2.0, 0.1], [3.0, 0.0], [0.0, 1.0], [0.1, 2.0], [0.0, 3.0]]
    >>> head = TrustHead.fit(z, ["a", "a", "a", "b", "b", "b"], dim=1, normalize=None, keep_points=True)
    >>> head.update([[4.0, 0.0]], ["a"]).marked
    ('a', 'b')
    >>> head.refit().marked, [c.state for c in head.certificate().classes]
    ((), ['refitted', 'refitted'])
    """
    old, labels = kept_points(head), head.sepc.classes
    wanted = set(old.marked.tolist())
    if classes is not None:
        wanted = set(_known_codes(_several(classes), labels, None).tolist())
    if not wanted:
        return head
    if len(labels) == 2:
        wanted = {0, 1}
    solved = separate_classes(_points_of(head, old), head.sepc.made, wanted, n_jobs, progress)
    kept = [e for e in old.ellipsoids if e.code not in wanted]
    found = _count_again(head, old, (*kept, *solved.pieces), _evidence_of(head).reference_points.offsets.cpu(), n_jobs)
    states: list[State] = ["refitted" if c in wanted else state for c, state in enumerate(old.states)]
    current = old.current.copy()
    current[list(wanted)] = True
    new = replace(found.training_set, states=tuple(states), current=current)
    return head.replace_points(found.sepc, found.evidence, new)


def _count_again(
    head: TrustHead,
    kept: KeptTrainingSet,
    ellipsoids: Iterable[UncountedEllipsoid],
    offsets: Float[Tensor, "n D"],
    n_jobs: int | None = None,
) -> Updated:
    """Compute counts, densities and reference points of the given training points and ellipsoids."""
    old, evidence = head.sepc, _evidence_of(head)
    device, dtype = old.codes.device, old.bank.offsets.dtype
    data = _points_of(head, kept)
    part = count_partition(list(ellipsoids), data, old.made, n_jobs=n_jobs)
    sepc = SEPC.from_partition(part, old.nearest, nan_policy=old.nan_policy, dtype=dtype, kernel=old.bank.kernel)
    sepc.feature_names, sepc.screen = old.feature_names, old.screen
    owners = torch.from_numpy(kept.codes[kept.reference_rows])
    projected = ProjectedSet(
        kept.points,
        kept.coordinates,
        kept.codes,
        data.classes,
        _on_cpu(evidence.polar),
        _on_cpu(evidence.white),
        # The origin stays, so that the reference points that are kept stay the same bit for bit.
        Neighbours(offsets, owners, evidence.reference_points.origin.cpu(), eleven_bits=True),
        kept.reference_rows,
        kept.variance,
    )
    fitted = fit_evidence(
        projected,
        pieces_of(part, kept.points, kept.codes),
        dict(zip(evidence.layer_names, map(_on_cpu, evidence.layers), strict=True)),
    )
    return Updated(sepc.to(device), fitted.to(device, dtype), replace(kept, ellipsoids=part.uncounted()))


def _with_states(head: TrustHead, after: Updated, marked: set[int], changed: set[int]) -> TrustHead:
    """Give the head its changed points, and set the states of the classes.

    Args:
        head: The head before the change.
        after: Its parts after the change, with the same ellipsoids.
        marked: Classes that must be solved again.
        changed: Classes whose points changed.
    """
    codes, most = after.sepc.codes.cpu().numpy(), after.sepc.made["max_impure"]
    held, previous = (sepc.held.cpu().numpy() for sepc in (after.sepc, head.sepc))
    impure, impure_before = (
        counts.sum(axis=1) - np.take_along_axis(counts, codes[:, None], axis=1)[:, 0] for counts in (held, previous)
    )
    marked = marked | set(codes[(impure_before <= most) & (impure > most)].tolist())
    changed = changed | set(codes[(held != previous).any(axis=1)].tolist())
    if marked and len(after.sepc.classes) == 2:
        marked = {0, 1}
    states: list[State] = list(after.training_set.states)
    for c, state in enumerate(states):
        if c in marked or state == "marked":
            states[c] = "marked"
        elif c in changed:
            states[c] = "counts only"
    current = np.zeros_like(after.training_set.current)
    new = replace(after.training_set, states=tuple(states), current=current)
    return head.replace_points(after.sepc, after.evidence, new)


def _inside_own(
    ellipsoids: Iterable[UncountedEllipsoid], points: Float[Array, "M R"], codes: Int[Array, "M"]
) -> Bool[Array, "M"]:
    """Whether each point lies in an ellipsoid of its own class."""
    inside = np.zeros(len(points), dtype=bool)
    for e in ellipsoids:
        own = np.flatnonzero(codes == e.code)
        inside[own] |= e.ellipsoid.distance(points[own]) <= 1.0 + INSIDE_TOLERANCE
    return inside


def _choose_reference_points(old: KeptTrainingSet, codes: Int[Array, "M"]) -> tuple[Bool[Array, "n"], Bool[Array, "M"]]:
    """Masks of the reference points that stay, and of the new points that become reference points.

    A class whose points all are reference points takes new ones while there is room. Otherwise the n-th point of a
    class enters with probability r / n in place of a random one of its r reference points (reservoir sampling).
    """
    classes = len(old.states)
    owners = old.codes[old.reference_rows]
    # Places of the reference points of each class; numbers from len(owners) on are new points.
    places = [np.flatnonzero(owners == c).tolist() for c in range(classes)]
    sizes = np.bincount(old.codes, minlength=classes)
    room = old.most_reference_points - len(owners)
    rng = np.random.default_rng(len(old))
    for i, c in enumerate(codes.tolist()):
        whole = len(places[c]) == sizes[c]
        sizes[c] += 1
        if whole and room > 0:
            places[c].append(len(owners) + i)
            room -= 1
        elif (place := int(rng.integers(sizes[c]))) < len(places[c]):
            places[c][place] = len(owners) + i
    chosen = np.zeros(len(owners) + len(codes), dtype=bool)
    chosen[[place for own in places for place in own]] = True
    return chosen[: len(owners)], chosen[len(owners) :]


def _refuse_empty_classes(head: TrustHead, gone: Bool[Array, "N"]) -> None:
    """Raise ValueError if a class would keep no point or no reference point."""
    kept, labels = kept_points(head), head.sepc.classes
    left = np.bincount(kept.codes[~gone], minlength=len(labels))
    if not left.all():
        raise ValueError(
            f"All points of class {labels[int(left.argmin())]!r} would be removed, and a head cannot lose a class. Fit "
            "again without the class."
        )
    owners = kept.codes[kept.reference_rows[~gone[kept.reference_rows]]]
    if len(kept.reference_rows) and len(np.unique(owners)) < len(labels):
        lost = int(np.bincount(owners, minlength=len(labels)).argmin())
        raise ValueError(
            f"All reference points of class {labels[lost]!r} would be removed. Add points of the class first, or fit "
            "again with more reference_points."
        )


def _several(values: Any) -> Any:
    """A single label or identifier as a list of one."""
    return [values] if isinstance(values, (str, int, float, np.generic)) else values


def _evidence_of(head: TrustHead) -> Evidence:
    assert head.evidence is not None  # fits that keep points fit the evidence too
    return head.evidence


def _points_of(head: TrustHead, kept: KeptTrainingSet) -> TrainingSet:
    return TrainingSet(kept.points, kept.codes, np.array(head.sepc.classes), None)


def _on_cpu(part: Part) -> Part:
    return copy.deepcopy(part).cpu()


def _embeddings(head: TrustHead, z: Any) -> Float[Tensor, "M D"]:
    """The embeddings as a tensor on the CPU in the dtype of the projection."""
    values = numeric_points(feature_columns(z, head.feature_names), "z")[0]
    if values.shape[1] != head.projection.in_features:
        wanted = head.projection.in_features
        raise ValueError(f"z must have {wanted} features like the embeddings of the fit, got {values.shape[1]}.")
    # In float32 first, as the fit reads embeddings.
    return torch.from_numpy(np.array(values)).float().to(head.projection.shift.dtype)


def _known_codes(y: Any, classes: list[Any], rows: int | None) -> Int[Array, "M"]:
    """Class indices of labels; unknown labels raise ValueError."""
    labels = label_array(y, "y" if rows is not None else "classes")
    if rows is not None and len(labels) != rows:
        raise ValueError(f"Got {len(labels)} labels for {rows} embeddings; pass one label for each.")
    codes = label_codes(labels.tolist(), classes)
    if (codes < 0).any():
        unknown = sorted(map(repr, set(labels[codes < 0].tolist())))
        raise ValueError(
            f"The head does not know the classes {', '.join(unknown[:5])}, and an update cannot add a class: the "
            "projection and the calibration depend on the classes. Fit again with TrustHead.fit on all points."
        )
    return codes


def _new_ids(ids: Any, old: Array, rows: int) -> Array:
    """Identifiers of new points; they must be of the kind of the old ones and new."""
    if ids is None:
        if old.dtype.kind == "U":
            raise ValueError("The training points have names as ids; pass ids for the new points too.")
        first = int(old.max()) + 1
        if first + rows > np.iinfo(np.int64).max:
            raise ValueError("No integers are left after the largest id of the training points; pass ids.")
        return np.arange(first, first + rows)
    found = row_ids(ids, rows)
    if (found.dtype.kind == "U") != (old.dtype.kind == "U"):
        raise TypeError(
            f"ids are {found.dtype} and those of the training points {old.dtype}; pass ids of the same kind."
        )
    twice = np.unique(found).size < rows
    if twice or np.isin(found, old).any():
        known = (
            "one of them is given twice"
            if twice
            else f"{found[np.isin(found, old)].tolist()[0]!r} is in the training set"
        )
        raise ValueError(f"ids of new points must be new: {known}. Remove the old point first with forget(ids).")
    return found

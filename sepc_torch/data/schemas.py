"""What the arrays of each kind of file must look like: dtypes, shapes that fit together, and ranges.

A file may be damaged or made by somebody else, so nothing is computed from its arrays before they are checked here. The
check allocates no more than the arrays themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from sepc_torch.data.memory import check_memory
from sepc_torch.shapes import Array

Sizes = dict[str, int]
# The dtypes of each kind of array.
_DTYPES = {"f": ("float32", "float64"), "i": ("int64",), "i4": ("int32",), "i1": ("int8",), "b": ("bool",)}
_DTYPES |= {"u1": ("uint8",)}


class Field(NamedTuple):
    """One array of a file.

    Attributes:
        dtype: Kind of the dtype: ``"f"`` float, ``"i"`` integer, ``"i4"`` index of four bytes, ``"i1"`` one byte,
            ``"u1"`` bytes, ``"b"`` bool.
        shape: Names of sizes, numbers, or a name plus a number (``"F+1"``). A name stands for one size in the whole
            file.
        low: Least value.
        below: Name of a size that all values must be below, or None.
        finite: Whether values must be finite; otherwise only NaN is refused.
        optional: Whether the file may lack the array.
        high: Greatest value.
    """

    dtype: str
    shape: tuple[str | int, ...]
    low: float = -math.inf
    below: str | None = None
    finite: bool = True
    optional: bool = False
    high: float = math.inf


_LEDGER = {
    "cell_sizes": Field("i", ("P",), low=0),
    "cell_members": Field("i4", ("M",), low=0, below="K"),
    "entry_cells": Field("i4", ("E",), low=0, below="P"),
    "entry_classes": Field("i4", ("E",), low=0, below="C"),
    "entry_counts": Field("i", ("E",), low=0),
    "grid_classes": Field("i4", ("G",), low=0, below="C"),
    "grid_counts": Field("i", ("G",), low=0),
    "step_ids": Field("i4", ("K", "S"), low=0, below="G"),
    "step_distances": Field("f", ("K", "S"), low=0, finite=False),
    "tail_distances": Field("f", ("K", "T"), low=0, finite=False),
}
_PARTITION = {
    "center": Field("f", ("K", "D")),
    "whitener": Field("f", ("K", "D", "D")),
    "code": Field("i", ("K",), low=0, below="C"),
    "iteration": Field("i", ("K",), low=0),
    "support": Field("i", ("U",), low=0),
    "support_size": Field("i", ("K",), low=0),
    "covered": Field("i", ("K",), low=0),
    "purity": Field("f", ("K",), low=0),
    "gap": Field("f", ("K",)),
    "hyperplane_w": Field("f", ("H", "D")),
    "hyperplane_levels": Field("f", ("H", 2)),
    "class_counts": Field("i", ("C",), low=0),
    "scale": Field("f", ("D",), low=0),
    **_LEDGER,
}
_SEPC = {
    "bank.offsets": Field("f", ("K", "D")),
    "bank.whiteners": Field("f", ("K", "D", "D")),
    "bank.origin": Field("f", ("D",)),
    "codes": Field("i", ("K",), low=0, below="C"),
    "totals": Field("i", ("C",), low=0),
    "scale": Field("f", ("D",), low=0),
    **_LEDGER,
}
_EVIDENCE = {
    "polar.shift": Field("f", ("F+1",)),
    "polar.matrix": Field("f", ("R", "F+1")),
    "polar.least_length": Field("f", (), low=0),
    "densities.bank.offsets": Field("f", ("Q", "R")),
    "densities.bank.whiteners": Field("f", ("Q", "R", "R")),
    "densities.bank.origin": Field("f", ("R",)),
    "densities.codes": Field("i", ("Q",), low=0, below="C"),
    "densities.freedom": Field("f", ("Q",), low=0),
    "densities.log_weight": Field("f", ("Q",)),
    "white.shift": Field("f", ("F",)),
    "white.matrix": Field("f", ("W", "F")),
    "reference_points.offsets": Field("f", ("N", "F")),
    "reference_points.codes": Field("i", ("N",), low=0, below="C"),
    "reference_points.origin": Field("f", ("F",)),
    "gaussian.whitener": Field("f", ("R", "R")),
    "gaussian.means": Field("f", ("C", "R")),
    "gaussian.deviations": Field("f", ("R",)),
    "gaussian.outside": Field("f", (), low=0, finite=False),
}


def _labels(source: str) -> dict[str, Field]:
    """The calibration of one source of labels; its sizes differ from those of the other source."""
    held, fitted, kinds, columns = (f"{name} of {source}" for name in ("held", "fitted", "kinds", "columns"))
    models = {
        f"{model}.{name}": Field("f", shape, finite=True)
        for model in ("confidence", "ranking")
        for name, shape in (("weights", (columns,)), ("bias", ()), ("bend", (2,)), ("shift", ()))
    }
    return {
        "temperature": Field("f", (), low=0),
        "threshold": Field("f", (), finite=False),
        "unknown_odds": Field("f", (), low=0),
        "ranked_joint": Field("f", (held,), low=0, high=1),
        "ranked_right": Field("b", (held,)),
        "ranked_truth": Field("f", (held,)),
        "ranked_nonconformity": Field("f", (held,), finite=False),
        "class_nonconformity": Field("f", (f"classes of {source}", f"most of {source}"), finite=False),
        "class_counts": Field("i", (f"classes of {source}",), low=0),
        "ranked_rows": Field("i", (f"ranked of {source}",), low=0, below=f"points of {source}"),
        "ranked_place": Field("i", (f"ranked of {source}",), low=0, below=f"ranked of {source}"),
        "point_label": Field("i", (f"points of {source}",), low=0, below="C"),
        "point_class": Field("i", (f"points of {source}",), low=0, below="C"),
        # Empty if the regions of the head changed since the calibration.
        "point_region": Field("i", (f"regions of {source}",), low=0, below="K"),
        "point_unit": Field("i", (f"units of {source}",), low=0, below=f"points of {source}"),  # empty without units
        "fitted_joint": Field("f", (f"others of {source}",), low=0, high=1),
        "fitted_right": Field("b", (f"others of {source}",)),
        "class_threshold": Field("f", (f"class thresholds of {source}",), finite=False),
        "region_threshold": Field("f", (f"region thresholds of {source}",), finite=False),
        "group_threshold": Field("f", (f"group thresholds of {source}",), finite=False),
        "combined_score.ordered": Field("f", (kinds, fitted), finite=False),
        "combined_score.weights": Field("f", (kinds,), low=0),
        "combined_score.combined": Field("f", (fitted,), finite=False),
        **models,
    }


def _prefixed(prefix: str, fields: Mapping[str, Field]) -> dict[str, Field]:
    return {prefix + name: field for name, field in fields.items()}


def _layers(metadata: Mapping[str, Any]) -> dict[str, Field]:
    """The distances of earlier layers, as many as the metadata name; each has sizes of its own."""
    names = metadata.get("layers")
    plain = isinstance(names, list) and all(isinstance(name, str) for name in names)
    _require(plain and len(set(names or ())) == len(names or ()), "its metadata do not name the layers")
    fields: dict[str, Field] = {}
    for i in range(len(names or ())):
        width, kept = f"features of layer {i}", f"coordinates of layer {i}"
        own = {
            "polar.shift": Field("f", (f"{width}+1",)),
            "polar.matrix": Field("f", (kept, f"{width}+1")),
            "polar.least_length": Field("f", (), low=0),
            "gaussian.whitener": Field("f", (kept, kept)),
            "gaussian.means": Field("f", ("C", kept)),
            "gaussian.deviations": Field("f", (kept,)),
            "gaussian.outside": Field("f", (), low=0, finite=False),
        }
        fields |= _prefixed(f"evidence.layers.{i}.", own)
    return fields


_HEAD = {
    "projection.shift": Field("f", ("F",)),
    "projection.matrix": Field("f", ("D", "F")),
    **_prefixed("sepc.", _SEPC),
}
_HEAD_EVIDENCE = {
    **_prefixed("evidence.", _EVIDENCE),
    **_prefixed("calibration.network.", _labels("network")),
    **_prefixed("calibration.own.", _labels("own")),
}
_TRAINING = {
    "points": Field("f", ("training points", "D")),
    "coordinates": Field("f", ("training points", "R")),
    "codes": Field("i", ("training points",), low=0, below="C"),
    "reference_rows": Field("i", ("N",), low=0, below="training points"),
    "current": Field("b", ("C",)),
    "center": Field("f", ("K", "D")),
    "whitener": Field("f", ("K", "D", "D")),
    "iteration": Field("i", ("K",), low=0),
    "support": Field("i", ("training support",), low=0, below="training points"),
    "support_size": Field("i", ("K",), low=0),
    "covered": Field("i", ("K",), low=0),
    "gap": Field("f", ("K",)),
}
_TREES = {
    "column": Field("i4", ("nodes",), low=-1),
    "threshold": Field("f", ("nodes",), finite=False),
    "missing_left": Field("b", ("nodes",)),
    "left": Field("i4", ("nodes",), low=0, below="nodes"),
    "right": Field("i4", ("nodes",), low=0, below="nodes"),
    "split": Field("i4", ("nodes",), low=-1),
    "goes_left": Field("b", ("splits", "most categories")),
    "value": Field("f", ("leaves", "values of a leaf")),
    "root": Field("i4", ("trees",), low=0, below="nodes"),
    "output": Field("i4", ("trees",), low=0),
    "start": Field("f", ("outputs",)),
}
_CLASSIFIERS = {
    "boosting": _TREES,
    "forest": _TREES,
    "logistic": {"coef": Field("f", ("outputs", "F")), "intercept": Field("f", ("outputs",))},
    "own": {"estimator": Field("u1", ("bytes of the estimator",))},
}
_POOL = {
    "round": Field("i", ("N",), low=-1),
    "answered": Field("b", ("N",)),
    "answers": Field("i", ("N",)),
    "ignored": Field("b", ("N",)),
    "rounds": Field("i", (), low=0),
    "block_checksums": Field("i", ("B",), low=0, optional=True),
}
_MONITOR = {
    "seen": Field("i", ("workers",), low=0, high=2.0**62),  # more can be counted
    "scores": Field("i", ("workers", "bins"), low=0),
    "cells": Field("i", ("workers", "cells"), low=0),
    "accepted": Field("i", ("workers", "cells"), low=0),
    "small": Field("i", ("workers", 2), low=0),
    "capital": Field("f", ("workers", "bets"), finite=False),  # minus infinity before the first point
    "path": Field("f", ("workers", "bets")),
    "low": Field("f", ("workers", "bets")),
    "low_at": Field("i", ("workers", "bets"), low=0),
    "low_count": Field("i", ("workers", "bets"), low=0),
    "peak": Field("f", ("workers", 2)),
    "alarm_at": Field("i", ("workers",), low=-1),
    "kept_at": Field("i", ("workers", "kept"), low=-1),
    "kept_score": Field("f", ("workers", "kept")),
    "kept_region": Field("i", ("workers", "kept"), low=0),
    "kept_id": Field("i1", ("workers", "kept", "bytes")),
    "kept_z": Field("f", ("workers", "kept", "features"), finite=False),
}
_RISK_MONITOR = {
    "rows": Field("i", ("sequences",), low=0),
    "labels": Field("i", ("sequences",), low=0),
    "errors": Field("f", ("sequences", 2), low=0),
    "skipped": Field("i", (), low=0),
    "above": Field("f", ("sequences", "means", "bets above")),
    "below": Field("f", ("sequences", "means", "bets below")),
    "late": Field("f", ("workers", "sequences", "bets above"), finite=False),  # minus infinity before the first row
    "late_seen": Field("i", ("workers", "sequences"), low=0),
    "peak": Field("f", ("sequences",)),
    "drawn": Field("i", (), low=0),
    "score_sum": Field("f", (), low=0),
    "done_id": Field("i", ("done",), low=0),
    "done_label": Field("i", ("done",), low=-1),
    "done_answer": Field("i1", ("done",), low=0),
    "counted": Field("i", (), low=0),
    "queue.id": Field("i", ("entries",), low=-1),
    "queue.label": Field("i", ("entries",), low=-1),
    "queue.group": Field("i", ("entries",), low=-1),
    "queue.gap": Field("i", ("entries",), low=0),
    "queue.group_gap": Field("i", ("entries",), low=0),
    "queue.weight": Field("f", ("entries",), low=0),
    "queue.least": Field("f", ("entries",), low=0),
    "queue.answer": Field("i1", ("entries",), low=-1),
}

_GUARD = {
    "closed": Field("i", ("closed",), low=0),
    "threshold": Field("f", ("threshold",), low=0),
    "counts.rows": Field("i", (), low=0),
    "counts.accepted": Field("i", (), low=0),
    "counts.sum": Field("f", (), low=0),
    "counts.last": Field("f", ("last",), low=0),
}
_REFERENCE = {
    "reference.score_edges": Field("f", ("edges",), finite=False),  # scores of flagged rows are infinite
    "reference.shares": Field("f", ("cells",), low=0),
    "reference.score_start": Field("i", ("bins",), low=0),
    "reference.cell_start": Field("i", ("cells",), low=0),
    "reference.accepted_start": Field("f", ("cells",), low=0),
    "reference.wrong_start": Field("f", ("cells",), low=0),
}
_TRIAL = {
    "threshold": Field("f", ("thresholds",), low=0),
    "share": Field("f", ("thresholds",), low=0),
    "coverage": Field("f", ("thresholds",), low=0),
    "expected": Field("f", ("thresholds",), low=0),
    "below": Field("f", ("thresholds", "bets below")),
    "peak": Field("f", ("thresholds",), low=0),
    "labels": Field("i", ("thresholds",), low=0),
    "errors": Field("i", ("thresholds",), low=0),
    "present": Field("i", (), low=-1),
    "above": Field("f", ("bets above",)),
    "above_peak": Field("f", (), low=0),
    "levels": Field("f", (3,), low=0),
    "done_id": Field("i", ("done",), low=0),
    "done_label": Field("i", ("done",), low=-1),
    "done_answer": Field("i1", ("done",), low=0),
    "queue.id": Field("i", ("entries",), low=-1),
    "queue.label": Field("i", ("entries",), low=-1),
    "queue.level": Field("i", ("entries",), low=-1, below="thresholds"),
    "queue.target": Field("i", ("entries",), low=0, below="thresholds"),
    "queue.answer": Field("i1", ("entries",), low=-1),
    "queue.p": Field("f", ("entries",), low=0),
    "queue.gap": Field("i", ("entries", "thresholds"), low=0),
}
_GUARD_ROWS = {
    "id": Field("i", ("rows",), low=0),
    "joint": Field("f", ("rows",), low=0),
    "confidence": Field("f", ("rows",), low=0),
    "score": Field("f", ("rows",), finite=False),
    "label": Field("i", ("rows",), low=-1),
    "region": Field("i", ("rows",), low=-1),
    "accept": Field("b", ("rows",)),
}


def check(kind: str, arrays: Mapping[str, Array], metadata: Mapping[str, Any]) -> None:
    """Raise ValueError with what is wrong, unless arrays and metadata fit together.

    >>> check("label_pool", {"round": np.zeros((2, 2), dtype=np.int64)}, {})
    Traceback (most recent call last):
    ValueError: the array 'round' has the shape (2, 2), expected (N)
    """
    match kind:
        case "partition":
            sizes = _check_model(metadata)
            _check_arrays(arrays, _PARTITION, sizes)
            _check_sum(arrays["support_size"], "support_size", sizes["U"])
            _check_ledger(arrays, "", sizes)
            _require(len(np.unique(arrays["code"])) == sizes["C"], "a class has no ellipsoid")
            _require(len(set(map(type, metadata["classes"]))) == 1, "its classes are of several types")
            for name, size in (("kinds", sizes["K"]), ("hyperplanes", sizes["H"])):
                listed = metadata.get(name)
                _require(isinstance(listed, list) and len(listed) == size, f"its metadata do not list {size} {name}")
        case "sepc":
            sizes = _check_model(metadata)
            _check_arrays(arrays, _SEPC, sizes)
            _check_ledger(arrays, "", sizes)
        case "trust_head":
            _require(isinstance(metadata.get("sepc"), dict), "its metadata lack the classifier")
            sizes = _check_model(metadata["sepc"])
            _require(isinstance(metadata.get("unit_length"), bool), "its metadata do not say how embeddings are scaled")
            changes = metadata.get("changes")
            _require(type(changes) is int and changes >= 0, "its metadata lack the changes since the calibration")
            _require(isinstance(metadata.get("order_stated", False), bool), "its metadata hold another order_stated")
            names = metadata.get("feature_names")
            if names is not None:
                _check_names(names)
                sizes["F"] = len(names)
            _check_network(metadata.get("network"))
            full = "evidence.polar.shift" in arrays
            kept = full and "training" in metadata
            fields = _HEAD | (_HEAD_EVIDENCE | _layers(metadata) if full else {})
            fields |= _prefixed("training.", _TRAINING) if kept else {}
            classifier = metadata.get("classifier")
            _require(classifier is None or classifier in _CLASSIFIERS, "its metadata hold an unknown classifier")
            fields |= {} if classifier is None else _prefixed("classifier.", _CLASSIFIERS[classifier])
            fields |= {"fitted_rows": Field("i", ("rows of the fit",), optional=True)}
            repeats = metadata.get("repeats", 0.0)
            _require(type(repeats) is float and 0.0 <= repeats <= 1.0, "its metadata hold other repeats")
            _check_arrays(arrays, fields, sizes)
            _check_ledger(arrays, "sepc.", sizes)
            if full:
                _check_head(arrays, sizes)
            _check_ids(metadata.get("reference_ids"), sizes.get("N", 0))
            if kept:
                _check_training(arrays, metadata["training"], metadata["sepc"]["made"], sizes)
        case "label_pool":
            _check_arrays(arrays, _POOL, {})
        case "drift_monitor":
            _check_arrays(arrays, _MONITOR, {})
            _check_kept(arrays["kept_id"])
            _require(len(arrays["seen"]) >= 1, "it holds no stream")
            for name, plain in (("alpha", float), ("seed", int), ("calibration", str)):
                _require(type(metadata.get(name)) is plain, f"its metadata lack {name}")
        case "risk_monitor":
            _check_risk_monitor(arrays, metadata)
        case "guard":
            _check_guard(arrays, metadata)


def _check_guard(arrays: Mapping[str, Array], metadata: Mapping[str, Any]) -> None:
    """Check the parts of a guard: rows, the tests of a suspended epoch, and the monitors."""
    for name in ("window", "seed", "since", "next", "answered", "drawn"):
        _require(_is_count(metadata.get(name)), f"its metadata lack {name}")
    _require(metadata.get("state") in ("holds", "unverified", "broken"), "its metadata lack the state")
    _require(isinstance(metadata.get("head"), str), "its metadata do not name the head")
    rest = dict(arrays)

    def part(prefix: str) -> dict[str, Array]:
        names = [name for name in rest if name.startswith(prefix)]
        return {name.removeprefix(prefix): rest.pop(name) for name in names}

    _check_arrays(part("recent."), _GUARD_ROWS, {})
    for prefix, fields in (("collected.", _GUARD_ROWS), ("trial.", _TRIAL)):
        if found := part(prefix):
            _check_arrays(found, fields, {})
            if prefix == "trial.":
                _check_trial(found)
    for name, keys in (("drift", ("alpha", "seed")), ("risk", ())):
        about, found = metadata.get(name), part(f"{name}.")
        _require((about is None) == (not found), f"its metadata and arrays of {name} do not belong together")
        if about is None:
            continue
        _require(isinstance(about, dict) and all(key in about for key in keys), f"its metadata do not describe {name}")
        if name == "risk":
            _check_risk_monitor(found, about)
        else:
            _require(
                type(about["alpha"]) is float and _is_count(about["seed"]), "its drift monitor lacks alpha or seed"
            )
            _check_arrays(found, _MONITOR | _REFERENCE, {})
            _check_kept(found["kept_id"])
    _check_arrays(rest, _GUARD, {})
    threshold = arrays["threshold"]
    _require(len(threshold) <= 1 and bool((threshold <= 1).all()), "its threshold is no score")


def _check_kept(coded: Array) -> None:
    """Check that every kept identifier begins with its kind (of four), and that integers (2) are digits."""
    _require(bool(((coded[..., 0] >= 0) & (coded[..., 0] < 4)).all()), "a kept identifier is of no known kind")
    for row in coded[coded[..., 0] == 2]:
        text = row[1:].tobytes().rstrip(b"\0")
        _require(text.removeprefix(b"-").isdigit(), "a kept identifier is no integer")


def _check_trial(arrays: Mapping[str, Array]) -> None:
    """Check that thresholds are in descending order, and that probabilities and places are such."""
    threshold, p = arrays["threshold"], arrays["queue.p"]
    _require(len(threshold) > 0 and bool((np.diff(threshold) < 0).all()), "its thresholds are not in descending order")
    _require(int(arrays["present"]) < len(threshold), "its present threshold is not in the list")
    _require(bool(((p > 0) & (p <= 1)).all()), "its rows were asked for with no probability")
    shares = arrays["share"]
    _require(0 < float(shares.sum()) <= 1 + 1e-9, "the shares of its starts are more than one")
    _require(bool(((arrays["levels"] > 0) & (arrays["levels"] < 1)).all()), "its levels are no shares")
    for name in ("done_answer", "queue.answer"):
        _require(int(arrays[name].max(initial=0)) <= 2, f"the array {name!r} holds an unknown answer")


def _check_risk_monitor(arrays: Mapping[str, Array], metadata: Mapping[str, Any]) -> None:
    """Check that the entries of a risk monitor belong to its groups, and that their weights are probabilities."""
    for name, plain in (("risk", float), ("alpha", float), ("seed", int), ("groups", list)):
        _require(type(metadata.get(name)) is plain, f"its metadata lack {name}")
    groups, classes = metadata["groups"], metadata.get("classes")
    _require(metadata.get("by", "") in (None, "given", "predicted", "region"), "its metadata lack the kind of groups")
    _require((metadata["by"] is None) == (not groups), "its metadata lack the groups")
    _require(classes is None or isinstance(classes, list), "its metadata do not list the classes")
    sizes = {"sequences": 1 + len(groups)}
    _check_arrays(arrays, _RISK_MONITOR, sizes)
    _require(sizes["workers"] >= 1, "it holds no stream")
    _require(int(arrays["counted"]) <= sizes["entries"], "it has counted more entries than it holds")
    _require(int(arrays["queue.group"].max(initial=-1)) < len(groups), "an entry is of an unknown group")
    for name in ("queue.answer", "done_answer"):
        _require(int(arrays[name].max(initial=0)) <= 2, f"the array {name!r} holds an unknown answer")
    least, weight = arrays["queue.least"], arrays["queue.weight"]
    likely = (least > 0).all() and (least * weight <= 1 + 1e-12).all() and ((weight == 0) | (weight >= 1)).all()
    _require(bool(likely), "the weights of its entries belong to no probabilities")
    _require(bool((arrays["queue.id"][weight == 0] == -1).all()), "the end of a batch has an id")


def _check_arrays(arrays: Mapping[str, Array], fields: Mapping[str, Field], sizes: Sizes) -> None:
    """Check names, dtypes, shapes and ranges; add the sizes found to ``sizes``."""
    for name, field in fields.items():
        if name not in arrays:
            _require(field.optional, f"it lacks the array {name!r}")
            continue
        array = arrays[name]
        _require(str(array.dtype) in _DTYPES[field.dtype], f"the array {name!r} has the dtype {array.dtype}")
        wanted = ", ".join(map(str, field.shape))
        found = f"the array {name!r} has the shape {array.shape}, expected ({wanted})"
        _require(array.ndim == len(field.shape), found)
        for size, place in zip(array.shape, field.shape, strict=True):
            symbol, _, more = (place, "", "") if isinstance(place, int) else place.partition("+")
            known = symbol if isinstance(symbol, int) else sizes.setdefault(symbol, size - int(more or 0))
            _require(size == known + int(more or 0), f"{found} with {symbol} = {known}")
    for name, field in fields.items():
        if name in arrays and arrays[name].size:
            _check_range(name, arrays[name], field, sizes)
    unknown = sorted(arrays.keys() - fields.keys())
    _require(not unknown, f"it holds unknown arrays: {', '.join(unknown[:5])}")


def _check_range(name: str, array: Array, field: Field, sizes: Sizes) -> None:
    if field.dtype == "b":
        return
    least, most = array.min().item(), array.max().item()  # NaN if there is one
    if field.dtype == "f":
        _require(not math.isnan(least), f"the array {name!r} holds NaN")
        _require(not field.finite or (math.isfinite(least) and math.isfinite(most)), f"{name!r} holds infinity")
    _require(least >= field.low, f"the array {name!r} holds {least}, expected at least {field.low:g}")
    _require(most <= field.high, f"the array {name!r} holds {most}, expected at most {field.high:g}")
    if field.below is not None:
        _require(most < sizes[field.below], f"the array {name!r} holds {most}, expected less than {sizes[field.below]}")


def _check_model(metadata: Mapping[str, Any]) -> Sizes:
    """Check the metadata of a partition or classifier; return the number of classes."""
    classes, names = metadata.get("classes"), metadata.get("feature_names")
    _require(isinstance(classes, list) and len(classes) >= 1, "its metadata lack the classes")
    assert isinstance(classes, list)
    _require(all(isinstance(label, (str, int, float, bool)) for label in classes), "a class is not a plain value")
    _require(len(set(classes)) == len(classes), "a class occurs twice")
    sizes = {"C": len(classes)}
    if names is not None:
        _check_names(names)
        sizes["D"] = len(names)
    _require(isinstance(metadata.get("made"), dict), "its metadata do not say how it was made")
    for key, usable in _MADE.items():
        value = metadata["made"].get(key, _ABSENT)
        _require(value is _ABSENT or usable(value), f"it was made with {key} = {value!r}")
    for key, allowed in (("nearest", ("mahalanobis", "euclidean")), ("nan_policy", ("raise", "flag"))):
        _require(metadata.get(key, allowed[0]) in allowed, f"its metadata hold {key} = {metadata.get(key)!r}")
    return sizes


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


# The options of a partition, and whether a value is allowed.
_ABSENT = object()
_MADE: dict[str, Callable[[Any], bool]] = {
    "max_impure": _is_count,
    "max_isolated": lambda value: value is None or _is_count(value),
    "max_per_class": lambda value: value is None or (_is_count(value) and value > 0),
    "rest": lambda value: value in ("whole", "partitioned"),
    "solver": lambda value: isinstance(value, str),
    "standardize": lambda value: isinstance(value, bool),
    "floor": lambda value: type(value) in (int, float) and 0 < value < math.inf,
}


def _check_network(network: Any) -> None:
    """Check the description of the network that a head sits in, if there is one."""
    if network is None:
        return
    _require(isinstance(network, dict), "its metadata do not describe the network")
    plain = all(isinstance(network.get(name), str) for name in ("layer", "fingerprint"))
    plain = plain and isinstance(network.get("normalised"), bool)
    listed = all(isinstance(network.get(name), list) for name in ("layers", "inputs"))
    _require(
        plain and listed and isinstance(network.get("named_inputs"), dict), "its metadata lack the network's layer"
    )
    _require(all(isinstance(name, str) for name in network["layers"]), "its metadata do not name the network's layers")


def _check_names(names: Any) -> None:
    _require(isinstance(names, list) and all(isinstance(name, str) for name in names), "a feature has no name")


def _check_ids(ids: Any, count: int) -> None:
    if ids is not None:
        _require(isinstance(ids, list) and len(ids) == count, f"its metadata do not list {count} identifiers")
        plain = all(isinstance(name, (str, int)) and not isinstance(name, bool) for name in ids)
        _require(plain, "an identifier is neither an integer nor a string")


def _check_ledger(arrays: Mapping[str, Array], prefix: str, sizes: Sizes) -> None:
    _check_sum(arrays[f"{prefix}cell_sizes"], f"{prefix}cell_sizes", sizes["M"])
    _require(sizes["K"] >= 1, "it has no ellipsoid")
    # A classifier counts the training points of each class in each ellipsoid in 8 bytes.
    work = f"The table of {sizes['K']} ellipsoids and {sizes['C']} classes"
    check_memory(8 * sizes["K"] * sizes["C"], work, "Use fewer classes.")
    _require(bool((np.diff(arrays[f"{prefix}grid_classes"]) >= 0).all()), "the classes of its grid are not in order")


def _check_head(arrays: Mapping[str, Array], sizes: Sizes) -> None:
    codes = arrays["evidence.reference_points.codes"]
    _require(bool((np.diff(codes) >= 0).all()), "the classes of the reference points are not in order")
    _require(len(codes) == 0 or len(np.unique(codes)) == sizes["C"], "a class has no reference point")
    _require(len(np.unique(arrays["evidence.densities.codes"])) == sizes["C"], "a class has no density")
    for source in ("network", "own"):
        held, classes = sizes[f"held of {source}"], sizes[f"classes of {source}"]
        if held:  # calibrated
            _require(classes == sizes["C"], f"the calibration has {classes} classes")
            most = int(arrays[f"calibration.{source}.class_counts"].max(initial=0))
            _require(most <= sizes[f"most of {source}"], "a class has more calibration points than are stored")
            _require(sizes[f"fitted of {source}"] > 0, "the calibration holds no fitted points")
        _require(sizes[f"ranked of {source}"] in (0, held), "the rows of the ranked points are not complete")
        for name in ("ranked_rows", "ranked_place"):
            values = arrays[f"calibration.{source}.{name}"]
            _require(len(np.unique(values)) == len(values), f"the array {name!r} of {source} repeats a value")
        regions = sizes[f"regions of {source}"]
        _require(regions in (0, sizes[f"points of {source}"]), "the regions of the calibration points are not complete")
        points = sizes[f"points of {source}"]
        _require(sizes[f"units of {source}"] in (0, points), "the units of the calibration points are not complete")
        _require(sizes[f"others of {source}"] == points - held, "the scores of the fitted points are not complete")
        for name, size in (("class", "C"), ("region", "K")):
            count = sizes[f"{name} thresholds of {source}"]
            _require(count in (0, sizes[size]), f"the calibration has {count} thresholds by {name}")


def _check_training(arrays: Mapping[str, Array], metadata: Any, made: Mapping[str, Any], sizes: Sizes) -> None:
    """Check that the training points fit to their counts and to the reference points of the head."""
    _require(isinstance(metadata, dict), "its metadata do not describe the training points")
    lacking = sorted(_MADE.keys() - made.keys())
    _require(not lacking, f"its metadata do not say how it was made: {', '.join(lacking)}")
    _check_sum(arrays["training.support_size"], "training.support_size", sizes["training support"])
    codes = arrays["training.codes"]
    counts = np.bincount(codes, minlength=sizes["C"])
    _require(bool((counts == arrays["sepc.totals"]).all()), "the training points do not match their counts")
    owners = codes[arrays["training.reference_rows"]]
    same = np.array_equal(owners, arrays["evidence.reference_points.codes"])
    _require(same, "the reference points do not match the training points")
    _require(metadata.get("ids") is not None, "its metadata do not name the training points")
    _check_ids(metadata["ids"], len(codes))
    for name, size, allowed in (
        ("kinds", sizes["K"], ("first", "further", "terminal", "isolated")),
        ("states", sizes["C"], ("unchanged", "counts only", "refitted", "marked")),
    ):
        listed = metadata.get(name)
        _require(isinstance(listed, list) and len(listed) == size, f"its metadata do not list {size} {name}")
        _require(all(value in allowed for value in metadata[name]), f"its metadata hold other {name} than {allowed}")
    # Counting the points again drops all balls if there are more than the limit.
    most = made["max_isolated"]
    _require(most is None or metadata["kinds"].count("isolated") <= most, f"it holds more than {most} isolated points")
    _require(len(np.unique(arrays["sepc.codes"])) == sizes["C"], "a class has no ellipsoid")
    for name in ("most_reference_points", "variance"):
        value = metadata.get(name)
        plain = isinstance(value, (int, float)) and not isinstance(value, bool)
        _require(plain and 0 <= metadata[name] < math.inf, f"its metadata lack {name}")


def _check_sum(parts: Array, name: str, total: int) -> None:
    # Each part is checked first: a sum of large parts could overflow.
    _require(bool((parts <= total).all()) and int(parts.sum()) == total, f"the array {name!r} does not sum to {total}")


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise ValueError(problem)

"""What the arrays of each kind of file must look like: dtypes, shapes that fit together, and ranges.

A file may be damaged or made by somebody else, so nothing is computed from its arrays before they are checked here. The
check allocates no more than the arrays themselves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from sepc_torch.shapes import Array

Sizes = dict[str, int]


class Field(NamedTuple):
    """One array of a file.

    Attributes:
        dtype: Kind of the dtype: ``"f"`` float, ``"i"`` integer, ``"b"`` bool.
        shape: Names of sizes, numbers, or a name plus a number (``"F+1"``). A name stands for one size in the whole
            file.
        low: Least value.
        below: Name of a size that all values must be below, or None.
        finite: Whether values must be finite; otherwise only NaN is refused.
        optional: Whether the file may lack the array.
    """

    dtype: str
    shape: tuple[str | int, ...]
    low: float = -math.inf
    below: str | None = None
    finite: bool = True
    optional: bool = False


_LEDGER = {
    "cell_sizes": Field("i", ("P",), low=0),
    "cell_members": Field("i", ("M",), low=0, below="K"),
    "entry_cells": Field("i", ("E",), low=0, below="P"),
    "entry_classes": Field("i", ("E",), low=0, below="C"),
    "entry_counts": Field("i", ("E",), low=0),
    "grid_classes": Field("i", ("G",), low=0, below="C"),
    "grid_counts": Field("i", ("G",), low=0),
    "step_ids": Field("i", ("K", "S"), low=0, below="G"),
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
    "gaussian.whitener": Field("f", ("R", "R"), optional=True),
    "gaussian.means": Field("f", ("C", "R"), optional=True),
    "gaussian.deviations": Field("f", ("R",), optional=True),
    "gaussian.outside": Field("f", (), low=0, finite=False, optional=True),
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
        "held_joint": Field("f", (held,)),
        "held_right": Field("b", (held,)),
        "held_nonconformity": Field("f", (held,), finite=False),
        "class_nonconformity": Field("f", (f"classes of {source}", f"most of {source}"), finite=False),
        "class_counts": Field("i", (f"classes of {source}",), low=0),
        "held_rows": Field("i", (f"ranked of {source}",), low=0, below=f"points of {source}"),
        "point_label": Field("i", (f"points of {source}",), low=0, below="C"),
        "point_class": Field("i", (f"points of {source}",), low=0, below="C"),
        "point_region": Field("i", (f"points of {source}",), low=0, below="K"),
        "class_threshold": Field("f", (f"class thresholds of {source}",), finite=False),
        "region_threshold": Field("f", (f"region thresholds of {source}",), finite=False),
        "group_threshold": Field("f", (f"group thresholds of {source}",), finite=False),
        "strangeness.ordered": Field("f", (kinds, fitted), finite=False),
        "strangeness.weights": Field("f", (kinds,), low=0),
        "strangeness.combined": Field("f", (fitted,), finite=False),
        **models,
    }


def _prefixed(prefix: str, fields: Mapping[str, Field]) -> dict[str, Field]:
    return {prefix + name: field for name, field in fields.items()}


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
_POOL = {
    "round": Field("i", ("N",), low=-1),
    "answered": Field("b", ("N",)),
    "answers": Field("i", ("N",)),
    "ignored": Field("b", ("N",)),
    "rounds": Field("i", (), low=0),
    "block_checksums": Field("i", ("B",), low=0, optional=True),
}
_MONITOR = {
    "seen": Field("i", ("workers",), low=0),
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
            names = metadata.get("feature_names")
            if names is not None:
                _check_names(names)
                sizes["F"] = len(names)
            full = "evidence.polar.shift" in arrays
            kept = full and "training" in metadata
            fields = _HEAD | (_HEAD_EVIDENCE if full else {}) | (_prefixed("training.", _TRAINING) if kept else {})
            _check_arrays(arrays, fields, sizes)
            _check_ledger(arrays, "sepc.", sizes)
            if full:
                _check_head(arrays, sizes)
            _check_ids(metadata.get("reference_ids"), sizes.get("N", 0))
            if kept:
                _check_training(arrays, metadata["training"], sizes)
        case "label_pool":
            _check_arrays(arrays, _POOL, {})
        case "drift_monitor":
            _check_arrays(arrays, _MONITOR, {})
            _require(len(arrays["seen"]) >= 1, "it holds no stream")
            for name, plain in (("alpha", float), ("seed", int), ("calibration", str)):
                _require(type(metadata.get(name)) is plain, f"its metadata lack {name}")


def _check_arrays(arrays: Mapping[str, Array], fields: Mapping[str, Field], sizes: Sizes) -> None:
    """Check names, dtypes, shapes and ranges; add the sizes found to ``sizes``."""
    for name, field in fields.items():
        if name not in arrays:
            _require(field.optional, f"it lacks the array {name!r}")
            continue
        array = arrays[name]
        _require(array.dtype.kind in field.dtype, f"the array {name!r} has the dtype {array.dtype}")
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
    for key, allowed in (("nearest", ("mahalanobis", "euclidean")), ("nan_policy", ("raise", "flag"))):
        _require(metadata.get(key, allowed[0]) in allowed, f"its metadata hold {key} = {metadata.get(key)!r}")
    return sizes


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


def _check_head(arrays: Mapping[str, Array], sizes: Sizes) -> None:
    codes = arrays["evidence.reference_points.codes"]
    _require(bool((np.diff(codes) >= 0).all()), "the classes of the reference points are not in order")
    _require(len(codes) == 0 or len(np.unique(codes)) == sizes["C"], "a class has no reference point")
    _require(len(np.unique(arrays["evidence.densities.codes"])) == sizes["C"], "a class has no density")
    gaussian = [name for name in arrays if name.startswith("evidence.gaussian.")]
    _require(len(gaussian) in (0, 4), "the shared Gaussian is not complete")
    for source in ("network", "own"):
        held, classes = sizes[f"held of {source}"], sizes[f"classes of {source}"]
        if held:  # calibrated
            _require(classes == sizes["C"], f"the calibration has {classes} classes")
            most = int(arrays[f"calibration.{source}.class_counts"].max(initial=0))
            _require(most <= sizes[f"most of {source}"], "a class has more calibration points than are stored")
            _require(sizes[f"fitted of {source}"] > 0, "the calibration holds no fitted points")
        _require(sizes[f"ranked of {source}"] in (0, held), "the rows of the ranked points are not complete")
        for name, size in (("class", "C"), ("region", "K")):
            count = sizes[f"{name} thresholds of {source}"]
            _require(count in (0, sizes[size]), f"the calibration has {count} thresholds by {name}")


def _check_training(arrays: Mapping[str, Array], metadata: Any, sizes: Sizes) -> None:
    """Check that the training points fit to their counts and to the reference points of the head."""
    _require(isinstance(metadata, dict), "its metadata do not describe the training points")
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
    for name in ("most_reference_points", "changes", "variance"):
        value = metadata.get(name)
        plain = isinstance(value, (int, float)) and not isinstance(value, bool)
        _require(plain and 0 <= metadata[name] < math.inf, f"its metadata lack {name}")


def _check_sum(parts: Array, name: str, total: int) -> None:
    # Each part is checked first: a sum of large parts could overflow.
    _require(bool((parts <= total).all()) and int(parts.sum()) == total, f"the array {name!r} does not sum to {total}")


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise ValueError(problem)

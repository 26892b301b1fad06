"""Targets of the fault campaign (``campaign.py``) that compute: partitions, trust heads and differentiable layers."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import numpy as np
import torch
from threadpoolctl import threadpool_info, threadpool_limits
from torch import Tensor

from experiments.fuzz.checks import Finding, Rng, hostile_points, refused, scratch
from sepc_torch import SEPC, Kind, Partition, Rule, TrustHead, minimum_volume_ellipsoid, partition
from sepc_torch.head.prediction import HeadPrediction
from sepc_torch.head.reading.projection import Normalize
from sepc_torch.layers import (
    MVELayer,
    RCHLayer,
    cvxpylayers_backend,  # noqa: F401 - its slow import happens before the fork
)
from sepc_torch.shapes import Array

# Points with at most this distance to an ellipsoid are inside for every precision of the model.
_WELL_INSIDE = 0.9
# Fields that must lie in [0, 1] in a row with a label.
_SHARES = ("trust", "network_trust", "confidence", "p_value", "joint")


def partition_target(rng: Rng) -> Finding | None:
    """A partition of hostile points; sometimes partitions in threads, or single ellipsoids of ordinary points."""
    kind = rng.choice(["points", "threads", "ellipsoids"], p=[0.85, 0.03, 0.12])
    return {"points": _hostile_partition, "threads": _partitions_in_threads, "ellipsoids": _ellipsoids}[kind](rng)


def _hostile_partition(rng: Rng) -> Finding | None:
    x, y = hostile_points(rng)
    options: dict[str, Any] = {
        "max_impure": int(rng.choice([0, 1, 2, 5])),
        "standardize": bool(rng.random() < 0.7),
        "rest": "whole" if rng.random() < 0.8 else "partitioned",
    }
    seen = f"{x.shape[0]} x {x.shape[1]}, up to {np.abs(x).max():.1e}, {options}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            part = partition(x, y, **options)
        except Exception as error:
            return refused(error, ValueError, TypeError, MemoryError, detail=seen)
        if not all(np.isfinite(e.center).all() and np.isfinite(e.whitener).all() for e in part.ellipsoids):
            return Finding("an ellipsoid is not finite", seen)
        found = _uncovered(part, x, y) or _impure(part, options)
        if found is None and rng.random() < 0.3:
            order = rng.permutation(len(x))
            found = _different(part, partition(x[order], y[order], **options))
    found = found or _lost_by_the_model(part, x)
    return None if found is None else found._replace(detail=f"{found.detail} ({seen})")


def _uncovered(part: Partition, x: Array, y: Array) -> Finding | None:
    inside = np.stack([e.contains(x) & (y == e.label) for e in part.ellipsoids])
    lost = int((~inside.any(axis=0)).sum())
    return Finding("training points in no ellipsoid of their class", f"{lost} of {len(x)}") if lost else None


def _impure(part: Partition, options: dict[str, Any]) -> Finding | None:
    """Two classes count only points that are not covered yet, so the counts say nothing there."""
    if len(part.classes) == 2 or options["rest"] == "partitioned":
        return None
    for e, code in zip(part.ellipsoids, part.codes, strict=True):
        others = int(e.counts.sum() - e.counts[code])
        if e.kind in (Kind.FIRST, Kind.FURTHER) and others > options["max_impure"]:
            return Finding("an ellipsoid holds more than max_impure points of others", f"{others}")
    return None


def _different(one: Partition, other: Partition) -> Finding | None:
    """The arrays that do not number rows."""
    mine, theirs = one._arrays(), other._arrays()
    names = [name for name in mine if name != "support" and not np.array_equal(mine[name], theirs[name])]
    return Finding("the partition depends on the order of the rows", ", ".join(names)) if names else None


def _lost_by_the_model(part: Partition, x: Array) -> Finding | None:
    """Training points well inside an ellipsoid that the float32 model puts outside, without a warning."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            out = SEPC.from_partition(part, nan_policy="flag")(torch.from_numpy(x))
        except Exception as error:
            return refused(error, ValueError, where="SEPC of a partition: ")
    with np.errstate(all="ignore"):
        inside = (part.distances(x) <= _WELL_INSIDE).any(axis=1)
    lost = int(((out.rule == int(Rule.OUTSIDE)) | (out.label < 0)).numpy()[inside].sum())
    if lost and not said:
        return Finding("the float32 model loses training points silently", f"{lost} of {inside.sum()}")
    return None


def _partitions_in_threads(rng: Rng) -> Finding | None:
    """Partitions in threads are those of one thread, and leave the settings of the process alone."""
    x = rng.normal(size=(300, 6)) + np.repeat([[0.0], [1.2]], 150, axis=0)
    y = np.repeat([0, 1], 150)
    threadpool_limits(2)
    before = [pool["num_threads"] for pool in threadpool_info()]
    expected = partition(x, y)
    found: list[Partition] = []
    starts = rng.uniform(0, 0.02, size=6)

    def run(delay: float) -> None:
        threading.Event().wait(delay)
        found.append(partition(x, y))

    for _ in range(3):
        threads = [threading.Thread(target=run, args=(delay,)) for delay in starts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if len(found) != 18 or any(part != expected for part in found):
        return Finding("partitions in threads differ from those of one thread")
    after = [pool["num_threads"] for pool in threadpool_info()]
    return Finding("partitions in threads change the threads of BLAS", f"{before} {after}") if before != after else None


def _ellipsoids(rng: Rng) -> Finding | None:
    """Single ellipsoids of points whose features have one scale, with a floor: nothing here is ill-conditioned."""
    for _ in range(30):
        n, d, groups = (int(rng.integers(*bounds)) for bounds in ((2, 60), (1, 6), (1, 4)))
        centers = rng.choice([1.0, 3.0]) * rng.normal(size=(groups, d))
        points = rng.normal(size=(n, d)) + centers[rng.integers(0, groups, n)]
        # A floor near the half range holds some of the axes and leaves others free.
        floor = float(rng.choice([0.0, 10.0 ** rng.uniform(-6, 0), rng.uniform(0.85, 1.2), rng.uniform(0.85, 1.2)]))
        floor *= float(np.ptp(points, axis=0).max()) / 2
        seen = f"{n} x {d}, floor {floor!r}"
        try:
            found = minimum_volume_ellipsoid(points, floor=floor)
        except Exception as error:  # RuntimeError is documented for rounding, which these points do not suffer from
            return refused(error, ValueError, detail=seen)
        if not found.contains(points).all():
            return Finding("a minimum-volume ellipsoid does not cover its points", seen)
    return None


def head_target(rng: Rng) -> Finding | None:
    """A trust head, fitted, calibrated, asked, saved and loaded, with hostile embeddings and logits."""
    d, classes = int(rng.integers(2, 12)), int(rng.choice([2, 3, 6]))
    dtype = (torch.float16, torch.float32, torch.float64)[rng.integers(0, 3)]
    centers = rng.choice([0.5, 3.0, 1e3]) * rng.normal(size=(classes, d))
    scale = 10.0 ** rng.choice([0.0, 0.0, 0.0, rng.uniform(-30, 30)])
    dtype = torch.float64 if scale != 1.0 and dtype == torch.float16 else dtype

    def draw(n: int, share: float) -> tuple[Tensor, Array]:
        y = rng.integers(0, classes, size=n)
        z = (rng.normal(size=(n, d)) + centers[y]) * scale
        z[rng.random(n) < share] = z[0]  # one embedding many times, such as that of a blank page
        if rng.random() < 0.2:
            z[rng.random(n) < 0.2] = 0.0
        return torch.from_numpy(z).to(dtype), y

    z, y = draw(int(rng.integers(10, 150)), rng.choice([0.0, 0.3]))
    held, true = draw(int(rng.integers(20, 150)), rng.choice([0.0, 0.5]))
    asked, _ = draw(64, rng.choice([0.0, 0.5]))
    asked[:32] = held[:32] if len(held) >= 32 else asked[:32]
    for value in rng.choice([0.0, np.nan, np.inf, 1e4], size=3):
        asked[rng.integers(32, 64), rng.integers(0, d)] = value
    logits = None if rng.random() < 0.5 else torch.from_numpy(rng.normal(size=(len(held), classes)))
    new = None if logits is None else torch.from_numpy(rng.normal(size=(64, classes)) * rng.choice([1.0, 1e4]))
    if new is not None:
        new[40], new[41, 0], new[42] = torch.nan, torch.inf, 0.0
    choices: list[Normalize] = [None, "l2", "standardize"]
    normalize = choices[rng.integers(0, 3)]
    seen = f"{tuple(z.shape)} {dtype}, {classes} classes, scale {scale:.1e}, {normalize}, logits={logits is not None}"
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            head = TrustHead.fit(z, y, normalize=normalize, nan_policy="flag")
            head.calibrate(held, true, logits)
            out = head(asked, new)
        except Exception as error:
            return refused(error, ValueError, TypeError, MemoryError, detail=seen)
        found = _undocumented(out, calibrated=set(true)) or _unequal_when_loaded(head, asked, new, out)
        found = found or _varying(head, asked, new, out)
    return None if found is None else found._replace(detail=f"{found.detail} ({seen})")


def _undocumented(out: HeadPrediction, calibrated: set[int]) -> Finding | None:
    """Values outside of what :class:`HeadPrediction` documents."""
    labelled = (out.label >= 0) & (out.network_label >= 0)
    if bool(out.accept[~labelled].any()):
        return Finding("a flagged row is accepted")
    for name in _SHARES:
        values = getattr(out, name)[labelled]
        if not bool(((values >= 0) & (values <= 1)).all()):
            return Finding(f"{name} is not in [0, 1]", str(values[~((values >= 0) & (values <= 1))][0].item()))
    for name in ("nonconformity", "distance"):
        if not bool(getattr(out, name)[labelled].isfinite().all()):
            return Finding(f"{name} is not finite")
    for name in ("margin", "network_margin"):
        if bool(getattr(out, name)[labelled].isnan().any()):
            return Finding(f"{name} is NaN in a row with a label")
    known = labelled & torch.tensor([int(label) in calibrated for label in out.network_label])
    if bool(out.class_p_value[known].isnan().any()):
        return Finding("class_p_value is NaN in a row with a label")
    return None


def _unequal_when_loaded(head: TrustHead, z: Tensor, logits: Tensor | None, out: HeadPrediction) -> Finding | None:
    with scratch() as folder:
        head.save(folder / "head")
        again = TrustHead.load(folder / "head")(z, logits)
    names = [name for name in out._fields if not _same(getattr(out, name), getattr(again, name))]
    return Finding("a loaded head answers differently", ", ".join(names)) if names else None


def _varying(head: TrustHead, z: Tensor, logits: Tensor | None, out: HeadPrediction) -> Finding | None:
    """Decisions that differ for a batch of one row, or for the same values in float64."""
    rows = [head(z[i : i + 1], None if logits is None else logits[i : i + 1]) for i in range(len(z))]
    alone = HeadPrediction(*(torch.cat(parts) for parts in zip(*rows, strict=True)))
    wide = head(z.double(), logits)
    for name in ("label", "accept", "p_value"):
        for other, cause in ((alone, "the size of the batch"), (wide, "the dtype of the embeddings")):
            mine, theirs = getattr(out, name), getattr(other, name)
            if not _same(mine, theirs):
                different = int((mine.nan_to_num(-1.0) != theirs.nan_to_num(-1.0)).sum())
                return Finding(f"{name} depends on {cause}", f"{different} of {len(z)} rows")
    return None


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.double().nan_to_num(-1.0), other.double().nan_to_num(-1.0))


def layers_target(rng: Rng) -> Finding | None:
    """Gradients of the layers on hostile points, of magnitudes whose reciprocal has the same dtype."""
    dtype, power = (torch.float32, 18.0) if rng.random() < 0.5 else (torch.float64, 120.0)
    x, y = hostile_points(rng, -power, power)
    if rng.random() < 0.1:
        x[rng.integers(0, len(x)), 0] = rng.choice([np.nan, np.inf])
    z = torch.from_numpy(x).to(dtype).requires_grad_()
    seen = f"{tuple(x.shape)} {dtype}, up to {np.abs(x).max():.1e}"
    try:
        if rng.random() < 0.6 or len(np.unique(y)) < 2:
            floor = float(rng.choice([0.0, 1e-3])) * float(np.abs(x).max())
            smoothing = float(rng.choice([0.0, 1e-3]))
            name, seen = "MVELayer", f"{seen}, floor {floor:.1e}, smoothing {smoothing}"
            fitted = MVELayer(*x.shape, floor=floor if np.isfinite(floor) else 0.0, smoothing=smoothing)(z)
            value = fitted.log_volume() + fitted.center.sum() / max(float(np.abs(x).max()), 1e-30)
        else:
            mask = torch.from_numpy(y == y[0])
            cap = None if rng.random() < 0.5 else 1.0
            name, seen = "RCHLayer", f"{seen}, cap {cap}"
            sizes = int(mask.sum()), int((~mask).sum())
            value = RCHLayer(*sizes, x.shape[1], cap=cap)(z[mask], z[~mask]).distance()
        value.backward()
    except Exception as error:
        return refused(error, ValueError, RuntimeError, where=f"{name}: ", detail=seen)
    if not bool(value.isfinite()):
        return Finding(f"{name}: the result is not finite", seen)
    assert z.grad is not None
    return None if bool(z.grad.isfinite().all()) else Finding(f"{name}: a gradient is not finite", seen)

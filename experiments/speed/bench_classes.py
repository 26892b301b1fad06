"""Fits with many classes: time, number of ellipsoids, size of the file, memory, and growth with points and classes.

Claims (the table of ``docs/speed.md`` shows what was measured): CLINC150 (15 000 points, 150 classes) takes at most
15 CPU seconds on one thread; 10 000 x 64 points of 100 classes 8 seconds and 15 MB without reference points; 100 000 x
64 points of 100 classes 10 seconds on 16 cores with a GPU; and 1 281 167 x 512 points of 1000 classes, the shape of
ImageNet, 600 seconds, with 60 seconds to calibrate, 24 GB of memory, and 100 ms for the forward pass of 65 536 rows.
Time grows with the number of points, and with the number of classes at a fixed number of points, by an exponent of at
most 1.1. The fit of the largest set uses ``max_per_class=256``.

    SEPC_DATA=... python -m experiments.speed.bench_classes --only clinc,hundred,growth,rest      # one thread
    python -m experiments.speed.bench_classes --only cores,imagenet,solver           # 16 cores and a CUDA device

The synthetic embeddings have one anisotropic, heavy-tailed cluster for each class, around directions of a common
subspace. Their spread was chosen after trying others: with a larger spread classes overlap more, and fits take several
times as long. ``rest`` compares ``rest="whole"`` with the paper's one-versus-rest on the same points. ``solver``
compares the solver of the partition on all cores with the batched solver of ``MVELayer`` on the device, for the first
ellipsoid of every class.
"""

from __future__ import annotations

import json
import resource
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import torch

from experiments.datasets import CLINC, stored_arrays
from experiments.harness import arguments, write_part
from experiments.speed.bench_partition import PhaseClock, Phases, fashion
from sepc_torch import MVELayer, TrustHead, minimum_volume_ellipsoid, partition
from sepc_torch.partitioning import fit
from sepc_torch.partitioning.steps import Steps
from sepc_torch.solvers import progressive
from sepc_torch.solvers.d_optimal import Design
from sepc_torch.solvers.progressive import ProgressiveEllipsoid

Array = np.ndarray
# Rows of ImageNet's training set and of one forward pass, and rows per class to calibrate with.
IMAGENET, FORWARD_ROWS, CALIBRATION = 1_281_167, 65_536, 50
CORES = 16
# Points of each class that the ellipsoids of the largest set are fitted to. A fit to all points takes much longer: it
# tests dozens of ellipsoids of every class against all other points.
PER_CLASS = 256
# Sets that the batched solver takes at once.
BATCH = 250
ONE_THREAD = ("clinc", "hundred", "growth", "rest")


# The functions of each phase; time in a function of another phase counts only there.
PHASES: Phases = {
    "ellipsoids": (
        (ProgressiveEllipsoid, "__init__"),
        (ProgressiveEllipsoid, "subset"),
        (ProgressiveEllipsoid, "exact"),
        (ProgressiveEllipsoid, "_view"),
        (Design, "refine"),
    ),
    "directions": ((Steps, "_closest"),),
    "tests": ((progressive, "_search"), (progressive._Search, "refine"), (Steps, "_balls")),
    "counts": ((fit, "count_partition"),),
}


def embeddings(count: int, dim: int, classes: int, seed: int, spread: float = 1.2) -> tuple[Array, Array]:
    """Synthetic embeddings in float32, and their classes; the mean length of a centre is 1, of the noise ``spread``."""
    rng = np.random.default_rng(seed)
    rank = min(dim, 64)
    basis = np.linalg.qr(rng.normal(size=(dim, rank)))[0].astype(np.float32)
    centers = (rng.normal(size=(classes, rank)) / np.sqrt(rank)).astype(np.float32)
    scale = np.geomspace(2.0, 0.5, rank).astype(np.float32)
    scale *= spread / np.sqrt((scale**2).sum())
    labels = rng.integers(0, classes, count)
    labels[:classes] = np.arange(classes)
    out = np.empty((count, dim), dtype=np.float32)
    for start in range(0, count, 65_536):
        own = labels[start : start + 65_536]
        noise = rng.standard_normal((len(own), rank), dtype=np.float32) * scale
        noise /= np.sqrt(rng.standard_gamma(4.0, size=(len(own), 1)) / 4.0).astype(np.float32)
        out[start : start + 65_536] = (centers[own] + noise) @ basis.T
        out[start : start + 65_536] += 0.02 / np.sqrt(dim) * rng.standard_normal((len(own), dim), dtype=np.float32)
    return out, labels


def logits(z: Array, labels: Array, classes: int) -> Array:
    """Logits of a nearest-mean classifier, in place of a network's."""
    sums = np.zeros((classes, z.shape[1]), dtype=np.float32)
    np.add.at(sums, labels, z)
    means = sums / np.bincount(labels, minlength=classes)[:, None]
    return 20.0 * (z @ means.T - 0.5 * (means**2).sum(axis=1))


def timed(function: Callable[[], Any]) -> tuple[Any, float, float]:
    """The result, the seconds and the CPU seconds of this process."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = function()
    return result, time.perf_counter() - wall, time.process_time() - cpu


def size_of(head: TrustHead) -> float:
    """Megabytes of the head's file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "head.safetensors"
        head.save(path)
        return path.stat().st_size / 1e6


def fitted(x: Array, y: Array, test: tuple[Array, Array], **options: Any) -> dict[str, Any]:
    """Fit a head with its defaults, without reference points, and describe it."""
    head, wall, cpu = timed(lambda: TrustHead.fit(x, y, progress=False, reference_points=0, **options))
    right = head.predict(test[0]) == test[1]
    return {
        "points": len(x),
        "features": x.shape[1],
        "classes": len(head.classes),
        "dim": head.sepc.dim,
        "ellipsoids": len(head.sepc.bank),
        "wall_s": wall,
        "cpu_s": cpu,
        "megabytes": size_of(head),
        "accuracy": float(right.mean()),
    }


def clinc(smoke: bool, _seed: int) -> dict[str, Any]:
    """CLINC150 with all defaults."""
    file = stored_arrays(CLINC)
    if file is None:
        return {}
    x, y, split = file["X"].astype(np.float32), file["y"], file["split"]
    train, test = (split == 0) & (y >= 0), (split == 2) & (y >= 0)
    if smoke:
        train &= y < 5
        test &= y < 5
    return fitted(x[train], y[train], (x[test], y[test]))


def hundred(smoke: bool, seed: int) -> dict[str, Any]:
    count, classes = (600, 6) if smoke else (10_000, 100)
    x, y = embeddings(2 * count, 64, classes, seed)
    return fitted(x[:count], y[:count], (x[count:], y[count:]))


def growth(smoke: bool, seed: int) -> dict[str, Any]:
    """CPU seconds of a partition of 16-dimensional points and of its phases, by points and by classes; exponents."""
    points = (500, 1000) if smoke else (10_000, 20_000, 40_000, 80_000)
    classes = (3, 6) if smoke else (25, 50, 100, 200, 400)
    by_points = [_partition_seconds(count, 4 if smoke else 50, seed) for count in points]
    by_classes = [_partition_seconds(1000 if smoke else 40_000, number, seed) for number in classes]
    return {
        "by_points": by_points,
        "by_classes": by_classes,
        "exponent_points": _exponent(by_points, "points"),
        "exponent_classes": _exponent(by_classes, "classes"),
        "exponent_phases": {phase: _exponent(by_points, "points", phase) for phase in (*PHASES, "rest")},
    }


def _partition_seconds(count: int, classes: int, seed: int) -> dict[str, Any]:
    x, y = embeddings(count, 16, classes, seed, spread=0.8)
    clock = PhaseClock(PHASES)
    with clock.running():
        part, _, cpu = timed(lambda: partition(x, y, max_impure=max(2, count // classes // 100), progress=False))
    return {
        "points": count,
        "classes": classes,
        "cpu_s": cpu,
        "ellipsoids": len(part),
        "phases_s": {phase: clock.seconds[phase] for phase in (*PHASES, "rest")},
        "tested": clock.calls["_search"],
        "directions": clock.calls["_closest"],
    }


def _exponent(rows: list[dict[str, Any]], name: str, phase: str | None = None) -> float:
    seconds = [r["cpu_s"] if phase is None else r["phases_s"][phase] for r in rows]
    return float(np.polyfit(np.log([r[name] for r in rows]), np.log(np.maximum(seconds, 1e-3)), 1)[0])


def rest(smoke: bool, _seed: int) -> dict[str, Any]:
    """Fashion-MNIST, 50 000 x 32 points of ten classes, with both values of ``rest`` in one run."""
    real = fashion(32)
    if real is None:
        return {}
    x, y = (values[:500] for values in real) if smoke else real
    found = {}
    for choice in ("whole", "partitioned"):
        part, _, cpu = timed(lambda choice=choice: partition(x, y, max_impure=50, rest=choice, progress=False))  # type: ignore[misc]
        found[choice] = {"cpu_s": cpu, "ellipsoids": len(part)}
    return {"points": len(x), "dim": x.shape[1], "runs": found}


def cores(smoke: bool, seed: int) -> dict[str, Any]:
    """100 000 x 64 points of 100 classes, on all cores, counted on the device."""
    count, classes = (600, 6) if smoke else (100_000, 100)
    x, y = embeddings(count + 5000, 64, classes, seed)
    warm(smoke)
    test = x[count:], y[count:]
    return {"device": fitted(x[:count], y[:count], test, n_jobs=jobs(smoke), device=where())}


def imagenet(smoke: bool, seed: int) -> dict[str, Any]:
    """Fit, calibrate and run a head on data of ImageNet's shape."""
    count, dim, classes = (2000, 32, 10) if smoke else (IMAGENET, 512, 1000)
    held = CALIBRATION * classes
    x, y = embeddings(count + held, dim, classes, seed)
    scores = logits(x[count:], y[count:], classes)
    warm(smoke)
    device = where()
    options: dict[str, Any] = {"n_jobs": jobs(smoke), "device": device, "max_per_class": PER_CLASS, "progress": False}
    head, fit_s, _ = timed(lambda: TrustHead.fit(x[:count], y[:count], **options))
    head = head.to(device)
    _, calibrate_s, _ = timed(lambda: head.calibrate(x[count:], y[count:], scores))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    rows = 100 if smoke else FORWARD_ROWS
    z = torch.from_numpy(x[:rows]).to(device)
    given = torch.from_numpy(logits(x[:rows], y[:rows], classes)).to(device)
    with torch.no_grad():
        out = head(z, given)
        seconds = min(timed(lambda: synchronised(lambda: head(z, given)))[1] for _ in range(2 if smoke else 5))
    return {
        "points": count,
        "features": dim,
        "classes": classes,
        "max_per_class": PER_CLASS,
        "dim": head.sepc.dim,
        "ellipsoids": len(head.sepc.bank),
        "fit_s": fit_s,
        "calibrate_s": calibrate_s,
        "memory_gb": peak,
        "forward_rows": rows,
        "forward_ms": 1e3 * seconds,
        "megabytes": size_of(head),
        "accuracy": float((out.label.cpu().numpy() == y[:rows]).mean()),
    }


def solver(smoke: bool, seed: int) -> dict[str, Any]:
    """Minimum-volume ellipsoids of 1000 classes: the partition's solver on all cores, the batched one on the device."""
    classes, sizes = (4, ((40, 4),)) if smoke else (1000, ((300, 30), (1281, 32)))
    warm(smoke)
    return {"rows": [_solvers(classes, points, dim, smoke, seed) for points, dim in sizes]}


def _solvers(classes: int, points: int, dim: int, smoke: bool, seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(classes, points, dim)) / np.sqrt(rng.standard_gamma(4.0, size=(classes, points, 1)) / 4.0)
    each = [joblib.delayed(minimum_volume_ellipsoid)(own) for own in x]
    native, wall, _ = timed(lambda: joblib.Parallel(n_jobs=jobs(smoke))(each))
    layer, z = MVELayer(points=points, features=dim), torch.from_numpy(x).to(where())
    with torch.no_grad():
        synchronised(lambda: layer(z[:2]))
        found, batched, _ = timed(lambda: synchronised(lambda: [layer(part) for part in z.split(BATCH)]))
    volumes = torch.cat([e.log_volume() for e in found]).cpu().numpy()
    error = float(np.abs(volumes - [e.log_volume for e in native]).max())
    times = {"cores_s": wall, "device_s": batched}
    return {"classes": classes, "points": points, "dim": dim, **times, "log_volume_error": error}


def synchronised(function: Callable[[], Any]) -> Any:
    result = function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return result


def where() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def jobs(smoke: bool) -> int:
    return 2 if smoke else CORES


def warm(smoke: bool) -> None:
    """Start the processes and the device."""
    x, y = embeddings(200, 8, 4, 0)
    partition(x, y, n_jobs=jobs(smoke), device=where(), progress=False)


PARTS: dict[str, Callable[[bool, int], dict[str, Any]]] = {
    "clinc": clinc,
    "hundred": hundred,
    "growth": growth,
    "rest": rest,
    "cores": cores,
    "imagenet": imagenet,
    "solver": solver,
}


def main() -> None:
    options = arguments(__doc__, parts=PARTS).parse_args()
    for name in options.only:
        torch.set_num_threads(1 if name in ONE_THREAD else CORES)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # small classes are intended
            found = PARTS[name](options.smoke, options.seed)
        print(name, json.dumps(found, indent=1), flush=True)
        if options.smoke or not found:
            continue
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
        write_part("bench_classes", options, ("torch",), name, {"gpu": gpu, **found})


if __name__ == "__main__":
    main()

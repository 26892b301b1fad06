"""Speed, memory and exactness of a whole calibrated head, on the CPU and on a CUDA device.

Goals, for 10 classes and 64 features with logits: on an H200 with 567 ellipsoids and 16 384 reference points 2^20 rows
in 45 ms, 65 536 rows in 4 ms, one row in 0.6 ms and in 0.06 ms from a CUDA graph, within 1 GiB; on one CPU thread with
285 ellipsoids and 6000 reference points one row in 2 ms and 1024 rows in 100 ms; the first call of a compiled head in
20 s, other batch sizes without compiling again.

    python -m experiments.speed.bench_head                 # the CPU, and the CUDA device if there is one
    python -m experiments.speed.bench_head --only cpu,compile
    SEPC_DATA=... python -m experiments.speed.bench_head --only gpu,fashion,exactness

Heads are fitted to random embeddings, and in the part ``fashion`` to embeddings of Fashion-MNIST from SEPC_DATA.
``nearest`` is the time of ``torch.cdist`` to the same reference points, its minimum, and softmax: the least that a
score from neighbours costs in plain torch. ``brute`` is scikit-learn's brute-force search, ``knn`` and ``vim`` are
pytorch-ood's detectors, ``faiss`` is faiss's flat index, if it is installed. ``classifier`` is the frozen classifier
alone. ``plain`` is the head without kernels. The exactness part counts the rows in which the head with
kernels differs from the plain head with a search in float64, field by field, for 10^8 rows, and the rows in which
batches of other sizes and the head on the CPU differ. The part ``layers`` measures a head with four earlier layers
beside one without, and a ResNet-18 with its head (:class:`~sepc_torch.TrustedModel`) beside the network alone.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
from sklearn.neighbors import NearestNeighbors
from torch import Tensor

from experiments.datasets import FASHION, stored_arrays
from experiments.harness import arguments, wall_time, write_part
from experiments.panel.openood import COLOURS, ResNet18
from experiments.speed.lone_modules import lone_module
from sepc_torch import HeadPrediction, TrustedModel, TrustHead
from sepc_torch.head.evidence.class_search import class_nearest

# With 200 modes a class, 20 000 points give about as many ellipsoids as the goals are for.
CLASSES, MODES, FEATURES = 10, 200, 64
GPU_ROWS = (1, 1024, 65_536, 2**20)
BATCHES = (1, 2, 7, 64, 1000)
WIDTHS = (64, 128, 256, 512)  # of earlier layers, as in a ResNet-18
CPU_ROWS = 10**5  # compared with the CPU
# Batches of 10^6 rows that are compared with plain torch, for each of three heads: the first, and the first with noise.
DRAWS = 34
# Seconds of calls before a measurement: an idle chip runs at a lower clock.
WARMUP_S = 0.3


class Networklike:
    """Embeddings and logits like those of a network: classes with several modes each, of low rank, and lengths."""

    def __init__(self, seed: int, apart: float = 1.0) -> None:
        self.rng = np.random.default_rng(seed)
        self.middles = apart * self.rng.normal(size=(CLASSES, MODES, FEATURES)) / 4.0 + self.rng.normal(size=FEATURES)
        self.spread = self.rng.normal(size=(CLASSES, 24, FEATURES)) / np.sqrt(24)
        self.weights = self.middles.mean(axis=1) - self.middles.mean(axis=(0, 1))

    def draw(self, rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        labels, mode = self.rng.integers(0, CLASSES, rows), self.rng.integers(0, MODES, rows)
        noise = self.rng.normal(size=(rows, 24))
        z = self.middles[labels, mode] + 0.1 * self.rng.normal(size=(rows, FEATURES))
        for c, spread in enumerate(self.spread):
            z[labels == c] += noise[labels == c] @ spread / 3.0
        return z.astype(np.float32), labels, ((z - z.mean(axis=0)) @ self.weights.T).astype(np.float32)

    def head(self, points: int, reference_points: int) -> TrustHead:
        z, labels, _ = self.draw(points)
        head = TrustHead.fit(z, labels, reference_points=reference_points, nan_policy="flag", progress=False)
        head.calibrate(*self.draw(4000))
        return head

    def batch(self, rows: int, device: str) -> tuple[Tensor, Tensor]:
        z, _, logits = self.draw(rows)
        return torch.from_numpy(z).to(device), torch.from_numpy(logits).to(device)


def milliseconds(function: Callable[[], Any], repeats: int) -> float:
    """Median time from the call to its result, once the device and the caches are warm."""
    wall_time(function, 2)  # the first calls compile and allocate
    warm = time.perf_counter() + WARMUP_S
    while time.perf_counter() < warm:
        wall_time(function, 1)
    return 1e3 * statistics.median(wall_time(function, repeats)[0])


def nearest(points: Tensor, z: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax, and the distance to the nearest reference point, in pieces of at most 1 GiB."""
    step = max(1, 2**28 // len(points))
    parts = [torch.cdist(piece, points).amin(dim=1) for piece in z.split(step)]
    return logits.softmax(dim=1).amax(dim=1), torch.cat(parts)


def faiss_search(points: Tensor) -> Callable[..., Any] | None:
    """Exact search by faiss, if it is installed (pip install faiss-cpu)."""
    try:
        import faiss
    except ModuleNotFoundError:
        return None
    faiss.omp_set_num_threads(1)
    index = faiss.IndexFlatL2(points.shape[1])
    index.add(points.numpy())
    search: Callable[..., Any] = index.search
    return search


def size_of(head: TrustHead) -> dict[str, int]:
    assert head.evidence is not None
    return {
        "ellipsoids": len(head.sepc.bank),
        "dims": head.sepc.bank.dim,
        "regions": len(head.evidence.densities.codes),
        "reference_points": len(head.evidence.reference_points.codes),
    }


def on_the_cpu(seed: int, smoke: bool) -> dict[str, Any]:
    torch.set_num_threads(1)
    source = Networklike(seed)
    head = source.head(1000 if smoke else 20_000, 500 if smoke else 6000)
    assert head.evidence is not None
    points = head.evidence.reference_points.points
    codes = head.evidence.reference_points.codes
    knn = lone_module("pytorch_ood.detector.knn").KNN(None).fit_features(points, codes)
    last = torch.from_numpy(source.weights).float()
    vim = lone_module("pytorch_ood.detector.vim").ViM(None, d=32, w=last, b=torch.zeros(len(last)))
    vim.fit_features(points, codes)
    brute = NearestNeighbors(n_neighbors=1, algorithm="brute").fit(points.numpy())
    found = []
    for rows in (1, 64) if smoke else (1, 1024):
        z, logits = source.batch(rows, "cpu")
        calls: dict[str, Callable[[], Any]] = {
            "head": partial(head, z, logits=logits),
            "classifier": partial(head.sepc, head.projection(z)),
            "nearest": partial(nearest, points, z, logits),
            "brute": partial(brute.kneighbors, z.numpy()),
            "knn": partial(knn.predict_features, z),
            "vim": partial(vim.predict_features, z),
        }
        if (search := faiss_search(points)) is not None:
            calls["faiss"] = partial(search, z.numpy(), 1)
        times = {name: milliseconds(call, 3 if smoke else 200 if rows == 1 else 15) for name, call in calls.items()}
        found.append({"rows": rows, **times})
        print(found[-1], flush=True)
    return {**size_of(head), "rows": found}


def on_the_gpu(seed: int, smoke: bool) -> dict[str, Any]:
    source = Networklike(seed)
    head = source.head(2000 if smoke else 50_000, 1000 if smoke else 16_384)
    return measured_on_the_gpu(head, source.batch, smoke)


def fashion_on_the_gpu(_seed: int, smoke: bool) -> dict[str, Any]:
    arrays = stored_arrays(FASHION)
    if arrays is None:
        raise SystemExit(f"The part fashion needs {FASHION} in the folder SEPC_DATA.")
    train, calibration, test = (arrays["split"] == part for part in range(3))
    x, y, logits = arrays["X"], arrays["y"], arrays["logits"]
    head = TrustHead.fit(x[train], y[train], reference_points=16_384, nan_policy="flag", progress=False)
    head.calibrate(x[calibration], y[calibration], logits[calibration])
    return measured_on_the_gpu(head, partial(repeated, x[test], logits[test]), smoke)


def repeated(z: np.ndarray, logits: np.ndarray, rows: int, device: str) -> tuple[Tensor, Tensor]:
    """The first rows of embeddings and logits, one after the other as often as needed."""
    times = -(-rows // len(z))
    return tuple(torch.from_numpy(part).float().repeat(times, 1)[:rows].to(device) for part in (z, logits))  # type: ignore[return-value]


def measured_on_the_gpu(
    head: TrustHead, batch: Callable[[int, str], tuple[Tensor, Tensor]], smoke: bool
) -> dict[str, Any]:
    head = head.to("cuda")
    assert head.evidence is not None
    points = head.evidence.reference_points.points
    found = []
    for rows in GPU_ROWS[:2] if smoke else GPU_ROWS:
        z, logits = batch(rows, "cuda")
        projected = head.projection(z)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = head(z, logits=logits)
        kept = sum(field.element_size() * field.numel() for field in result)
        peak = torch.cuda.max_memory_allocated() - before - kept
        del result
        calls: dict[str, Callable[[], Any]] = {
            "head": partial(head, z, logits=logits),
            "classifier": partial(head.sepc, projected),
            "nearest": partial(nearest, points, z, logits),
        }
        if rows <= GPU_ROWS[1]:
            calls["graph"] = partial(head.graphed(rows), z, logits)
        times = {name: milliseconds(call, 100 if rows <= 1024 else 10) for name, call in calls.items()}
        with without_kernels(head) as plain:
            times["plain"] = milliseconds(partial(plain, z, logits=logits), 20 if rows <= 1024 else 2)
        found.append({"rows": rows, "bytes": peak, **times})
        print(found[-1], flush=True)
    return {"device": torch.cuda.get_device_name(), **size_of(head), "rows": found}


class without_kernels:
    """Context with a copy of a head that searches, sums densities and assesses in plain torch.

    With ``exact`` the search compares points in float64: float32 cannot tell points at almost equal distances apart.
    """

    def __init__(self, head: TrustHead, exact: bool = False) -> None:
        self.head = copy.deepcopy(head)
        assert self.head.evidence is not None
        for part in (self.head.evidence.reference_points, self.head.evidence.white_reference_points):
            part.tables = []
        self.head.evidence.densities.bank.prepared = None
        self.patches: list[Any] = [mock.patch("sepc_torch.head.calibration.assess.available", return_value=False)]
        if exact:
            self.patches.append(mock.patch("sepc_torch.head.evidence.neighbours.class_nearest", search_in_float64))

    def __enter__(self) -> TrustHead:
        for patch in self.patches:
            patch.start()
        return self.head

    def __exit__(self, *_: object) -> None:
        for patch in self.patches:
            patch.stop()


def search_in_float64(z: Tensor, points: Tensor, _half_squares: Tensor, *layout: Any) -> tuple[Tensor, Tensor]:
    wide = points.double()
    return class_nearest(z.double(), wide, wide.square().sum(dim=1) / 2, *layout)


def exactness(seed: int, smoke: bool) -> dict[str, Any]:
    """Differences between the head with kernels and without, and between batch sizes, for three heads."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows, draws = (2000, 2) if smoke or device == "cpu" else (10**6, DRAWS)
    found = []
    for turn, apart in enumerate((1.0, 0.3, 3.0)):
        source = Networklike(seed + turn, apart)
        head = source.head(1000 if smoke else 8000, 500 if smoke else 4096).to(device)
        head.accept_at(flag_rate=0.1)
        z, logits = source.batch(rows, device)
        whole = head(z, logits=logits)
        other = dict.fromkeys(HeadPrediction._fields, 0)
        for batch in BATCHES:
            for start in range(0, 40 * batch, batch):
                out = head(z[start : start + batch], logits=logits[start : start + batch])
                for name, count in differ(out, HeadPrediction(*(f[start : start + batch] for f in whole))).items():
                    other[name] += count
        kernels = dict.fromkeys(HeadPrediction._fields, 0)
        plain = without_kernels(head, exact=True)
        generator = torch.Generator(device).manual_seed(seed)
        for draw in range(draws):
            noise = torch.randn(z.shape, generator=generator, device=device)
            near = z + 0.1 * z.std(dim=0) * noise if draw else z
            out = head(near, logits=logits)
            with plain as reference:
                for name, count in differ(out, reference(near, logits=logits)).items():
                    kernels[name] += count
        some = slice(0, min(rows, CPU_ROWS))
        expected = head.cpu()(z[some].cpu(), logits=logits[some].cpu())
        on_cpu = differ(HeadPrediction(*(field[some].cpu() for field in whole)), expected)
        counts = {"without_kernels": kernels, "batches": other, "on_the_cpu": on_cpu}
        found.append({"apart": apart, **size_of(head), **counts})
        print(found[-1], flush=True)
    compared = {"compared_in_batches": 40 * sum(BATCHES), "compared_on_the_cpu": min(rows, CPU_ROWS)}
    return {"device": device, "rows": draws * rows, **compared, "heads": found}


def differ(found: HeadPrediction, expected: HeadPrediction) -> dict[str, int]:
    """Rows in which fields differ in any digit; NaN equals NaN."""
    both = zip(HeadPrediction._fields, found, expected, strict=True)
    return {name: int(((a != b) & ~(a.isnan() & b.isnan())).sum()) for name, a, b in both}


def compiling(seed: int, smoke: bool) -> dict[str, Any]:
    """Seconds of the first call of a compiled head, of another batch size, and whether the results are equal."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    source = Networklike(seed)
    head = source.head(1000 if smoke else 8000, 500 if smoke else 4096).to(device)
    z, logits = source.batch(1000, device)
    torch._inductor.config.force_disable_caches = True  # code on disk from earlier runs would shorten the first call
    compiled = torch.compile(head)
    times = []
    with torch.no_grad():
        for rows in (64, 33, 1000, 64):
            some = z[:rows].clone(), logits[:rows].clone()  # a view of a larger tensor would be compiled separately
            for part in some:  # dynamic=True would take 64 rows and 64 features for the same dimension
                torch._dynamo.mark_dynamic(part, 0)
            begun = time.perf_counter()
            out = compiled(*some)
            times.append(time.perf_counter() - begun)
        unequal = {name: count for name, count in differ(out, head(*some)).items() if count}
    found = {
        "device": device,
        "first_s": times[0],
        "other_size_s": max(times[1:3]),
        "again_s": times[3],
        "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"],
        "unequal": unequal,
    }
    print(found, flush=True)
    return found


def with_layers(seed: int, smoke: bool) -> dict[str, Any]:
    """Milliseconds of a head with and without four earlier layers, side by side, and of a network with its head."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1 if device == "cpu" else torch.get_num_threads())
    source = Networklike(seed)
    sizes = (1000, 500) if smoke else (8000, 4096)

    def layers(labels: np.ndarray) -> dict[str, np.ndarray]:
        """Activations whose classes have means of their own."""
        draw = np.random.default_rng(seed).normal
        means = {width: draw(size=(CLASSES, width)) for width in WIDTHS}
        return {
            f"layer{i}": (means[width][labels] + source.rng.normal(size=(len(labels), width))).astype(np.float32)
            for i, width in enumerate(WIDTHS)
        }

    z, y, _ = source.draw(sizes[0])
    options: dict[str, Any] = {"reference_points": sizes[1], "nan_policy": "flag", "progress": False}
    plain, layered = TrustHead.fit(z, y, **options), TrustHead.fit(z, y, layers=layers(y), **options)
    z, y, logits = source.draw(4000)
    plain.calibrate(z, y, logits).to(device)
    layered.calibrate(z, y, logits, layers=layers(y)).to(device)
    found: dict[str, Any] = {"device": device, "widths": list(WIDTHS), "rows": []}
    for rows in (1, 64) if smoke else (1, 1024, *((2**20,) if device == "cuda" else ())):
        z, y, logits = source.draw(min(rows, 2**16))
        copies = -(-rows // len(z))
        given = [torch.from_numpy(part).to(device).repeat(copies, 1) for part in (z, logits)]
        some = {name: torch.from_numpy(x).to(device).repeat(copies, 1) for name, x in layers(y).items()}
        repeats = 3 if smoke else 9 if rows > 2**16 else 100
        times = {
            "without": milliseconds(partial(plain, *given), repeats),
            "with": milliseconds(partial(layered, *given, layers=some), repeats),
        }
        found["rows"].append({"rows": rows, **times})
        print(found["rows"][-1], flush=True)
    return {**found, "trusted": network_with_head(device, smoke)}


def network_with_head(device: str, smoke: bool) -> dict[str, Any]:
    """Milliseconds of a ResNet-18 alone, and in a TrustedModel.

    It has no pooling in its stem, so that pictures of 64 pixels take as many products as pictures of 224 pixels in the
    usual ResNet-18.
    """
    network = ResNet18(CLASSES, COLOURS["cifar10"], width=8 if smoke else 64).to(device).eval()
    size, rows = (64, 4) if smoke else (2000, 256 if device == "cuda" else 8)
    pictures = torch.randint(0, 256, (size, 64, 64, 3), dtype=torch.uint8)
    labels = torch.arange(size) % CLASSES
    batches = [(x, y) for x, y in zip(pictures.split(100), labels.split(100), strict=True)]
    trusted = TrustedModel.fit(network, batches, batches[: max(1, len(batches) // 2)], flag_rate=0.1, progress=False)
    x = pictures[:rows].to(device)
    times = {
        "network": milliseconds(partial(network, x), 3 if smoke else 30),
        "trusted": milliseconds(partial(trusted.eval(), x), 3 if smoke else 30),
    }
    print(times, flush=True)
    return {"rows": rows, "layers": list(trusted.places.layers), **times}


PARTS: dict[str, Callable[[int, bool], dict[str, Any]]] = {
    "cpu": on_the_cpu,
    "gpu": on_the_gpu,
    "fashion": fashion_on_the_gpu,
    "exactness": exactness,
    "compile": compiling,
    "layers": with_layers,
}


def main() -> None:
    parser = arguments(__doc__, parts=PARTS)
    if not torch.cuda.is_available():
        parser.set_defaults(only=["cpu", "exactness", "compile", "layers"])
    options = parser.parse_args()
    for name in ("cpu", "exactness", "layers") if options.smoke else options.only:
        with torch.no_grad():
            found = PARTS[name](options.seed, options.smoke)
        if not options.smoke:
            write_part("bench_head", options, ("torch",), name, found)


if __name__ == "__main__":
    main()

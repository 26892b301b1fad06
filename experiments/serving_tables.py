"""Sections of docs/serving.md: engines that lose a worker, exported files beside the head, and a server under load."""

from __future__ import annotations

from typing import Any

from head_tables import spaced
from markdown_tables import load, table

_ENGINES = {
    "dask": "Dask {dask}, two workers, one killed after the first partition",
    "ray": "Ray Data {ray}, one actor",
}


def engines() -> str:
    found = load("engines")
    rows = [
        [
            name.format(**found["environment"]),
            *(spaced(found["engines"][key][count]) for count in ("rows", "lost", "twice", "different")),
            f"{found['engines'][key]['seconds']:.0f}",
        ]
        for key, name in _ENGINES.items()
    ]
    header = ["engine", "rows", "lost", "twice", "decided differently", "seconds"]
    return f"On two cores that other programs used too:\n\n{table(header, rows)}"


def onnx_files() -> str:
    found = load("onnx_files")
    dtypes: dict[str, dict[str, Any]] = found["dtypes"]
    sizes = list(dtypes["float32"]["latency"])
    rows = [
        [
            name,
            f"{part['safetensors_bytes'] / 2**20:.1f} / {part['onnx_bytes'] / 2**20:.1f}",
            *(f"{part['latency'][n]['torch_ms']:.1f} / {part['latency'][n]['onnxruntime_ms']:.1f}" for n in sizes),
            *(spaced(part["different"][field]) for field in ("label", "accept", "p_value")),
        ]
        for name, part in dtypes.items()
    ]
    header = [
        "head / ONNX Runtime",
        "size, MiB",
        *(f"{n} row{'s' if n != '1' else ''}, ms" for n in sizes),
        *(f"`{field}` differs" for field in ("label", "accept", "p_value")),
    ]
    compared = spaced(dtypes["float32"]["rows"])
    seconds = sorted(part["export_cpu_s"] for part in dtypes.values())
    return (
        f"A head with {found['features']} features, {found['classes']} classes and {found['ellipsoids']} ellipsoids, "
        f"opset {found['opset']}, ONNX Runtime {found['environment']['onnxruntime']}, on one thread of a CPU that "
        f"other programs used too. Latency is CPU time; the last columns count rows of {compared} that differ. "
        f"Writing a file took {seconds[0]:.0f} to {seconds[-1]:.0f} CPU seconds.\n\n{table(header, rows)}"
    )


def onnx_gpu() -> str:
    found = load("onnx_gpu")
    dtypes: dict[str, dict[str, Any]] = found["dtypes"]
    sizes = list(dtypes["float32"]["latency"])
    fields = ("label", "accept", "p_value")
    rows = [
        [
            name,
            *(f"{part['latency'][n]['torch_ms']:.1f} / {part['latency'][n]['onnxruntime_ms']:.1f}" for n in sizes),
            *(f"{part['from_cuda']['different'][field]} / {part['from_cpu']['different'][field]}" for field in fields),
        ]
        for name, part in dtypes.items()
    ]
    header = [
        "head / ONNX Runtime",
        *(f"{spaced(int(n))} row{'s' if n != '1' else ''}, ms" for n in sizes),
        *(f"`{field}` differs" for field in fields),
    ]
    return (
        f"A head with {found['features']} features, {found['classes']} classes and {found['ellipsoids']} ellipsoids, "
        f"on an {found['device']}, ONNX Runtime {found['environment']['onnxruntime-gpu']} with the CUDA provider. The "
        f"last columns count the rows of {spaced(dtypes['float32']['rows'])} that differ from the head on the same "
        f"device / from the head on a CPU.\n\n{table(header, rows)}"
    )


def serve_load() -> str:
    found = load("serve_load")
    part = found["load"]
    growth = part["memory_growth_bytes"]
    grown = f"{growth / 2**20:.0f} MiB of growth" if growth else "no growth"
    return (
        f"With FastAPI {found['environment']['fastapi']}, {spaced(part['requests'])} requests of one row from "
        f"{part['clients']} clients, with {spaced(part['malformed'])} malformed ones between: {part['lost'] or 'none'} "
        f"lost, {part['wrong'] or 'none'} wrong, {part['malformed_not_4xx'] or 'no'} malformed one without an answer "
        f"4xx, {grown} of the server's peak memory after the first tenth. On {found['cores_used']} cores that clients, "
        f"server and other programs shared: {part['requests_per_s']:.0f} requests a second in batches of "
        f"{part['mean_batch']:.0f} on average, p50 {part['p50_ms']:.0f} ms, p99 {part['p99_ms']:.0f} ms."
    )

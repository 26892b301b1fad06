"""Sections of docs/serving.md: engines that lose a worker, exported files beside the head, and a server under load."""

from __future__ import annotations

from collections.abc import Callable

from experiments.table_writer import Column, Row, spaced, table

_ENGINES = {
    "dask": "Dask {dask}, two workers, one killed after the first partition",
    "ray": "Ray Data {ray}, one actor",
}
FIELDS, PLACES = ("label", "accept", "p_value"), ("from_cuda", "from_cpu")


def engines(found: Row) -> str:
    columns: list[Column] = [
        ("engine", lambda r: _ENGINES[r["key"]].format(**found["environment"])),
        ("rows", "rows", "{:,}"),
        ("lost", "lost", "{:,}"),
        ("twice", "twice", "{:,}"),
        ("decided differently", "different", "{:,}"),
        ("seconds", "seconds", "{:.0f}"),
    ]
    rows = [{"key": key, **found["engines"][key]} for key in _ENGINES]
    return f"On two cores that other programs used too:\n\n{table(rows, columns)}"


def _latencies(found: Row, number: Callable[[int], str] = str) -> list[Column]:
    """A column for each size of a batch: milliseconds of the head / of ONNX Runtime."""
    return [
        (
            f"{number(int(n))} row{'s' if n != '1' else ''}, ms",
            lambda r, n=n: "{torch_ms:.1f} / {onnxruntime_ms:.1f}".format(**r["latency"][n]),
        )
        for n in found["dtypes"]["float32"]["latency"]
    ]


def _head(found: Row) -> str:
    return "A head with {features} features, {classes} classes and {ellipsoids} ellipsoids, ".format(**found)


def onnx_files(found: Row) -> str:
    columns: list[Column] = [
        ("head / ONNX Runtime", "name"),
        ("size, MiB", lambda r: f"{r['safetensors_bytes'] / 2**20:.1f} / {r['onnx_bytes'] / 2**20:.1f}"),
        *_latencies(found),
        *((f"`{field}` differs", f"different.{field}", "{:,}") for field in FIELDS),
    ]
    seconds = sorted(part["export_cpu_s"] for part in found["dtypes"].values())
    return (
        f"{_head(found)}opset {found['opset']}, ONNX Runtime {found['environment']['onnxruntime']}, on one thread of a "
        "CPU that other programs used too. Latency is CPU time; the last columns count rows of "
        f"{spaced(found['dtypes']['float32']['rows'])} that differ. Writing a file took {seconds[0]:.0f} to "
        f"{seconds[-1]:.0f} CPU seconds.\n\n{table(_named(found), columns)}"
    )


def onnx_gpu(found: Row) -> str:
    columns: list[Column] = [
        ("head / ONNX Runtime", "name"),
        *_latencies(found, spaced),
        *((f"`{f}` differs", lambda r, f=f: " / ".join(str(r[p]["different"][f]) for p in PLACES)) for f in FIELDS),
    ]
    return (
        f"{_head(found)}on an {found['device']}, ONNX Runtime {found['environment']['onnxruntime-gpu']} with the CUDA "
        f"provider. The last columns count the rows of {spaced(found['dtypes']['float32']['rows'])} that differ from "
        f"the head on the same device / from the head on a CPU.\n\n{table(_named(found), columns)}"
    )


def _named(found: Row) -> list[Row]:
    return [{"name": name, **part} for name, part in found["dtypes"].items()]


def serve_load(found: Row) -> str:
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

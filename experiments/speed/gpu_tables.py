"""Tables of the CUDA kernels in docs/speed.md, from the JSON of ``bench_gpu.py``."""

from __future__ import annotations

from collections.abc import Callable

from experiments.table_writer import Column, Row, size, spaced, table
from sepc_torch.model.kernels import worth_screening

# Shapes in the table besides the headline; the JSON has more.
SHOWN_COUNTS, SHOWN_DIMS = (10, 100, 1000), (8, 32, 64, 256)
# The claims of the benchmark: relative error, time over that of plain torch, whole forward over its distances (or the
# milliseconds that it may take longer), and gains.
MOST_ERROR, MOST_SLOWDOWN, MOST_RATIO, MOST_ADDED_MS = 1e-5, 1.1, 1.5, 0.020
ROUNDING = 1.0 + 1e-6  # times are multiples of 32 ns in float32
LEAST_OVER_EAGER, LEAST_OVER_COMPILE, LEAST_OVER_TF32 = 6.0, 3.0, 2.0
PEERS = {
    "forward": "ours, whole forward",
    "distances": "ours, distances",
    "eager": 'ours with `kernel="torch"`',
    "compile": "`torch.compile`, float32",
    "compile_tf32": "`torch.compile`, TF32",
    "loop": "loop over the ellipsoids",
    "pytorch_ood": "pytorch-ood, one matrix for all classes",
    "mixture": "scikit-learn's `GaussianMixture`, CPU",
    "covariance": "scikit-learn's `mahalanobis`, CPU",
}


def gpu(results: Row) -> str:
    parts = results["parts"]
    ceiling = parts["distances"]["ceilings"]
    text = (
        f"On an {results['device']} (`python -m experiments.speed.bench_gpu`). Distances have float32 accuracy. The "
        "whole forward gives label, trust, rule, distance, margin, nearest and runner-up; the table has its time, the "
        "ratio to its distances, and its rows per second. The other columns are of the distances: TFLOP/s (2 K D² "
        "operations per row), the time of plain torch over ours, and our time over the least time that the chip needs "
        "for the three "
        f"float16 products, at the {ceiling['float16_tflops']:.0f} TFLOP/s in float16 and "
        f"{ceiling['copy_tb_per_s']:.1f} TB/s that it reached in the same run"
    )
    other = (
        "Other methods for the distances in the same run: rows per second, TFLOP/s (2 K D² operations per row), and "
        f"time over ours. Scikit-learn ran on the {results['environment']['cores']} cores of the same machine"
    )
    said = [targets(parts), small(parts["graphs"]), low_precision(parts), memory(parts["forward"])]
    said.append(compiling(parts["compile"]))
    return f"{text}:\n\n{shapes(parts)}\n\n{other}:\n\n{peers(parts['peers'])}\n\n" + "\n\n".join(said)


def shapes(parts: Row) -> str:
    whole = {size(row): row for row in parts["forward"]["rows"]}
    columns: list[Column] = [
        ("rows x ellipsoids x dims", size),
        ("distances", "kernel_ms", "{:.2f} ms"),
        ("whole forward", lambda r: whole[size(r)]["forward_ms"], "{:.2f} ms"),
        ("over distances", lambda r: whole[size(r)]["ratio"], "{:.2f} x"),
        ("rows/s", lambda r: short(whole[size(r)]["rows_per_second"] / 1e6), "{} million"),
        ("TFLOP/s", "tflops", "{:.0f}"),
        ("plain torch", "ratio", "{:.1f} x"),
        ("least time", lambda r: r["kernel_ms"] / r["floor_ms"], "{:.1f} x"),
        ("error", "error", "{:.0e}"),
    ]
    headline, *others = parts["distances"]["rows"]
    shown = [r for r in others if r["rows"] > 1000 and r["ellipsoids"] in SHOWN_COUNTS and r["dims"] in SHOWN_DIMS]
    return table([headline, *shown], columns)


def peers(part: Row) -> str:
    head, *others = part["shapes"]

    def slower(shape: Row, name: str) -> str:
        ours, theirs = (shape["methods"][key]["rows_per_second"] for key in ("distances", name))
        return f"{short(ours / theirs)} x"

    columns: list[Column] = [
        (f"at {size(head)}", lambda name: PEERS[name]),
        ("rows/s", lambda name: short(head["methods"][name]["rows_per_second"] / 1e6), "{} million"),
        ("TFLOP/s", lambda name: head["methods"][name]["tflops"], "{:.3g}"),
        ("time", lambda name: slower(head, name)),
        *((f"time at {s['ellipsoids']} x {s['dims']}", lambda name, s=s: slower(s, name)) for s in others),
    ]
    return table([name for name in PEERS if name in head["methods"]], columns)


def targets(parts: Row) -> str:
    """How many shapes meet each claim, and the worst shape."""
    found, whole = parts["distances"]["rows"], parts["forward"]["rows"]
    head = parts["peers"]["shapes"][0]
    times = {name: rates["ms"] / head["methods"]["distances"]["ms"] for name, rates in head["methods"].items()}
    error = held(found, lambda r: r["error"], MOST_ERROR, ".0e")
    slow = held(found, lambda r: 1 / r["ratio"], MOST_SLOWDOWN, ".2f", " times its time")
    kept = len(whole) - len(too_slow(whole))
    return (
        f"At {size(head)} plain torch takes {reached(times['eager'], LEAST_OVER_EAGER)} times as long as our distances "
        f"and torch.compile {reached(times['compile'], LEAST_OVER_COMPILE)} times. Over all shapes from 1 row, "
        f"1 ellipsoid and {min(r['dims'] for r in found)} dimensions on: the relative error is at most "
        f"{MOST_ERROR:.0e} on {error}; distances are at most 10 % slower than plain torch on {slow}. The goal for a "
        f"whole forward, in device time, is at most {MOST_RATIO} times its distances or at most "
        f"{MOST_ADDED_MS * 1e3:.0f} µs more. It holds on {kept} of {len(whole)} shapes{exceptions(whole)}."
    )


def too_slow(rows: list[Row]) -> list[Row]:
    """The shapes at which a whole forward misses its goal."""
    return [
        row
        for row in rows
        if row["ratio"] > MOST_RATIO * ROUNDING and row["forward_ms"] - row["distances_ms"] > MOST_ADDED_MS
    ]


def exceptions(rows: list[Row]) -> str:
    """The shapes at which a whole forward misses its goal, with its ratio and additional time."""
    named = "; ".join(
        f"{size(row)} ({row['ratio']:.2f} times, {(row['forward_ms'] - row['distances_ms']) * 1e3:.0f} µs more)"
        for row in too_slow(rows)
    )
    return f", and not at {named}" if named else ""


def small(part: Row) -> str:
    """Times of small batches, where the host takes longer than the device."""
    said = "; ".join(
        f"at {size(r)} distances {r['distances_ms'] * 1e3:.0f} µs and whole forward {r['forward_ms'] * 1e3:.0f} µs, "
        f"replayed from a CUDA graph {r['distances_graph_ms'] * 1e3:.0f} µs and {r['forward_graph_ms'] * 1e3:.0f} µs"
        for r in part["rows"]
    )
    return f"In small batches the device waits for Python: {said}."


def reached(value: float, least: float) -> str:
    """A number, with the goal where it falls short."""
    return f"{value:.1f}" if value >= least else f"{value:.2f} (short of {least:.0f})"


def held(rows: list[Row], value: Callable[[Row], float], most: float, style: str, unit: str = "") -> str:
    """On how many shapes a value keeps a limit, and the worst shape."""
    kept = sum(value(row) <= most * ROUNDING for row in rows)
    worst = max(rows, key=value)
    return f"{kept} of {len(rows)} (the worst: {value(worst):{style}}{unit} at {size(worst)})"


def low_precision(parts: Row) -> str:
    """The gain of screening, and whether it changes a decision."""
    head, exact = parts["forward"]["headline"], parts["exact"]
    models = {name: m for name, m in exact["models"].items() if worth_screening(m["ellipsoids"], m["dims"])}
    wrong = sum(model["differ"]["any"] for model in models.values())
    by_torch = ", ".join(f"{spaced(model['torch_differs']['any'])} ({name})" for name, model in models.items())
    kinds = ", ".join(
        f"{name} ({m['ellipsoids']} x {m['dims']}, condition {m['condition']:.0f})" for name, m in models.items()
    )
    most = max(model["largest"][name] for model in models.values() for name in ("distance", "margin"))
    numbers = "are bit-identical" if most == 0 else f"agree to {most:.0e}"
    same = "agree on every row" if wrong == 0 else f"differ on {spaced(wrong)} rows"
    return (
        f"At {size(parts['forward']['rows'][0])} the whole forward takes {head['screened_ms']:.2f} ms with screening, "
        f"{head['unscreened_ms']:.2f} ms without, and {head['torch_ms']:.1f} ms in plain torch. Distances from three "
        f"TF32 products, by a plain fused kernel, take {head['tf32x3_distances_ms']:.2f} ms: "
        f"{reached(head['tf32x3_distances_ms'] / head['screened_ms'], LEAST_OVER_TF32)} times the whole forward. "
        f"Label, rule, nearest, runner-up and trust with and without screening {same}, on {spaced(exact['rows'])} rows "
        f"of each of {len(models)} models: {kinds}. Distances and margins {numbers}. Plain torch rounds differently "
        f"and differs in one of these fields on {by_torch} of the rows. Above 64 dimensions nothing is screened."
    )


def memory(part: Row) -> str:
    rows = part["memory"]
    added = ", ".join(f"{r['added_per_row']:.0f} with {r['ellipsoids']}" for r in rows)
    few, many = rows[0]["rows"]
    widest = max(part["rows"], key=lambda r: r["rows"] * r["ellipsoids"])
    return (
        f"Memory of a whole forward, with its result, grows from {spaced(few)} to {spaced(many)} rows of "
        f"{rows[0]['dims']} dimensions by this number of bytes per row: {added} ellipsoids. At {size(widest)} the "
        f"distances alone would take {4 * widest['rows'] * widest['ellipsoids'] / 2**30:.2f} GiB; the forward takes "
        f"{widest['peak_bytes'] / 2**30:.2f} GiB."
    )


def compiling(part: dict[str, float]) -> str:
    return (
        f"The first call of a process compiles: {part['first_s']:.1f} s, the second {part['second_s'] * 1e3:.0f} ms; "
        f"with the compiled kernels on disk {part['first_cached_s']:.1f} s. `warmup()` also compiles the "
        f"variants for given labels. It takes {part['warmup_s']:.1f} s; the first call then takes "
        f"{part['first_after_warmup_s'] * 1e3:.0f} ms."
    )


def short(number: float) -> str:
    """A number with three digits, or all its digits before the decimal point."""
    return f"{number:.3g}" if number < 1000 else spaced(round(number))

"""Tables of docs/speed_tables.md and of files in docs/measurements.md, but for those of the CUDA kernels."""

from __future__ import annotations

from experiments.table_writer import Column, Row, Table, size, spaced, table, text_table

# The goals of ``bench_head.py``, in milliseconds: by rows on the GPU, by rows on the CPU, one row from a CUDA graph.
GPU_GOALS = {1: 0.6, 65_536: 4.0, 2**20: 45.0}
CPU_GOALS = {1: 2.0, 1024: 100.0}
GRAPH_GOAL = 0.06
# Other methods on the CPU: a distance to the nearest of the same points, and ViM.
CPU_PEERS = {
    "brute": "scikit-learn, brute force",
    "faiss": "faiss, flat",
    "knn": "pytorch-ood, kNN",
    "vim": "pytorch-ood, ViM",
}
# Fields that decide or promise.
DECISIONS = ("label", "trust", "rule", "nearest", "network_label", "accept")
# Phases of a partition in ``bench_classes.py``.
PHASES = {
    "ellipsoids": "solving ellipsoids",
    "directions": "closest points of reduced hulls",
    "tests": "tests against points of other classes",
    "counts": "counts of all points in all ellipsoids",
    "rest": "other",
}

INFERENCE = Table(
    "Distances on one CPU thread in float32, and how many times longer other methods take in the same run",
    [
        ("rows x ellipsoids x dims", size),
        ("rows/s", "rows_per_second", "{:,.0f}"),
        ("N x N loop", "ratio_n_by_n", "{:.0f} x"),
        ("plain loop", "ratio_loop", "{:.1f} x"),
        ("GaussianMixture", "ratio_mixture", "{:.1f} x"),
        (
            "MiB: ours / loop / mixture",
            lambda r: " / ".join(f"{r[f'{name}_bytes'] / 2**20:.0f}" for name in ("bank", "loop", "mixture")),
        ),
    ],
)
FILES = Table(
    "Each command in a process with one thread; the memory includes that of Python and torch, about 300 MiB",
    [
        ("command", "command", "`sepc {}`"),
        ("`--max-rows` of the model", "max_rows", "{:,}"),
        ("file", lambda r: f"{r['format']}, {r['shape']}"),
        ("size", "gb", "{:.2f} GB"),
        ("rows", "rows", "{:,}"),
        ("CPU time", "cpu_s", "{:.0f} s"),
        ("rows/s", lambda r: 100 * round(r["rows"] / r["cpu_s"] / 100), "{:,}"),
        ("peak memory", "peak_mb", "{:.0f} MiB"),
    ],
    lambda results: [row for part in results["parts"].values() for row in part["rows"]],
)
PARTITIONS = Table(
    "A whole partition",
    [
        ("10 classes", lambda r: {"fashion": "CNN embeddings (Fashion-MNIST)"}.get(r["data"], r["data"])),
        ("points x dims", lambda r: f"{spaced(r['points'])} x {r['dims']}"),
        ("CPU time", "cpu_s", "{:.1f} s"),
        ("ellipsoids", "ellipsoids"),
        ("isolated", "isolated"),
        ("in ellipsoids", lambda r: r["share"]["cover"] + r["share"].get("disjoint", 0.0), "{:.0%}"),
        ("in hulls", "share.hulls", "{:.0%}"),
    ],
    lambda results: [row for row in results["rows"] if row.get("draw", 0) == 0],
)


def partitions(results: Row) -> str:
    growth = "; ".join(
        f"{', '.join(f'{e:.2f}' for e in exponents)} at {dims} dims" for dims, exponents in results["growth"].items()
    )
    return f"{PARTITIONS(results)}\n\nGrowth from 10 000 to 50 000 points, exponents of three draws: {growth}."


def many_classes(results: Row) -> str:
    """Fits with 100 and 1000 classes, their growth, and the solver on a GPU."""
    parts = results["parts"]
    cores, large, growth = parts["cores"]["device"], parts["imagenet"], parts["growth"]
    runs = parts["rest"]["runs"]

    def shape(r: Row) -> str:
        return f"{spaced(r['points'])} x {r['features']}, {r['classes']} classes"

    rows = [
        [f"CLINC150: {shape(parts['clinc'])}", "one thread", f"{parts['clinc']['cpu_s']:.1f} s", "15 s"],
        [f"synthetic: {shape(parts['hundred'])}", "one thread", f"{parts['hundred']['cpu_s']:.1f} s", "8 s"],
        ["its file, without reference points", "", f"{parts['hundred']['megabytes']:.1f} MB", "15 MB"],
        [f"synthetic: {shape(cores)}", "16 cores, GPU", f"{cores['wall_s']:.1f} s", "10 s"],
        [
            f"synthetic: {shape(large)}, `max_per_class={large['max_per_class']}`",
            "16 cores, GPU",
            f"{large['fit_s']:.0f} s",
            "600 s without `max_per_class`",
        ],
        ["its calibration with 50 000 points", "GPU", f"{large['calibrate_s']:.0f} s", "60 s"],
        ["memory of its process, with the embeddings", "", f"{large['memory_gb']:.1f} GB", "24 GB"],
        [f"its forward pass of {spaced(large['forward_rows'])} rows", "GPU", f"{large['forward_ms']:.0f} ms", "100 ms"],
        [
            "Fashion-MNIST, 50 000 x 32, 10 classes, partition only",
            "one thread",
            f"{runs['whole']['cpu_s']:.0f} s; the paper's one-versus-rest {runs['partitioned']['cpu_s']:.0f} s",
            "89 s",
        ],
        ["growth of the time with points, at 50 classes", "", f"exponent {growth['exponent_points']:.2f}", "1.1"],
        ["growth with classes, at 40 000 points", "", f"exponent {growth['exponent_classes']:.2f}", "1.1"],
    ]
    solvers = "; ".join(
        f"{r['classes']} sets of {r['points']} x {r['dim']} points: {r['cores_s']:.2f} s on 16 cores, "
        f"{r['device_s']:.2f} s with the batched solver on the GPU"
        for r in parts["solver"]["rows"]
    )
    misses = (
        f"The largest head has {large['ellipsoids']} ellipsoids, and its file {large['megabytes']:.0f} MB with 16 384 "
        "reference points. A fit of this set without `max_per_class` was not measured to its end."
    )
    gpu = (
        "The batched solver of `MVELayer` was tried for the first ellipsoids of all classes at once. It saves at "
        f"most a fraction of a second, so the partition does not use it: {solvers}."
    )
    return f"{text_table(['work', 'on', 'measured', 'goal'], rows)}\n\n{misses}\n\n{_phases(growth)}\n\n{gpu}"


def _phases(growth: Row) -> str:
    """Where the CPU time of the fits with 50 classes goes, by number of points."""
    runs, exponents = growth["by_points"], growth["exponent_phases"]
    rows: list[list[str]] = [
        [name, *(f"{r['phases_s'][phase]:.1f} s" for r in runs), f"{exponents[phase]:.2f}"]
        for phase, name in PHASES.items()
    ]
    rows.append(["all", *(f"{r['cpu_s']:.1f} s" for r in runs), f"{growth['exponent_points']:.2f}"])
    counts = {"tested": "ellipsoids tested", "directions": "hulls solved", "ellipsoids": "final ellipsoids"}
    rows += [[name, *(spaced(r[key]) for r in runs), ""] for key, name in counts.items()]
    header = ["50 classes, 16 dimensions", *(f"{spaced(r['points'])} points" for r in runs), "exponent"]
    return (
        "Where the CPU time of `partition` goes as the number of points grows, on one thread. Every column is a single "
        "run on a shared machine, and the exponents change from run to run, also on either side of the goal:\n\n"
        f"{text_table(header, rows)}"
    )


def head_speed(results: Row) -> str:
    parts = results["parts"]
    heads = {"Fashion-MNIST": parts["fashion"], "random embeddings": parts["gpu"]}
    text = [on_gpu(heads), layers_and_network(parts["layers"]), exact(parts["exactness"])]
    text += [compiled(parts["compile"]), on_cpu(parts["cpu"])]
    return "\n\n".join(text)


def on_gpu(heads: dict[str, Row]) -> str:
    columns: list[Column] = [
        ("embeddings", "name"),
        ("rows", "rows", "{:,}"),
        ("head", lambda r: with_goal(r["head"], GPU_GOALS.get(r["rows"]))),
        ("from a CUDA graph", "graph", "{:.2f} ms"),
        ("without kernels", "plain", "{:.3g} ms"),
        ("classifier alone", "classifier", "{:.3g} ms"),
        ("`cdist` and softmax", "nearest", "{:.3g} ms"),
        ("memory", lambda r: r["bytes"] / 2**20, "{:.0f} MiB"),
    ]
    rows = [{"name": name, **row} for name, part in heads.items() for row in part["rows"]]
    sizes = " and ".join(
        f"{part['ellipsoids']} ellipsoids in {part['dims']} dimensions, {part['regions']} regions and "
        f"{spaced(part['reference_points'])} reference points ({name})"
        for name, part in heads.items()
    )
    return (
        f"Calibrated heads with logits on an {heads['Fashion-MNIST']['device']}, for 64 features: {sizes}. "
        "Times are from the call to the result. Memory is the largest beyond inputs and results. In brackets the goal, "
        f"where it is missed; one row from a CUDA graph should take {GRAPH_GOAL} ms:\n\n{table(rows, columns)}"
    )


def layers_and_network(part: Row) -> str:
    """What earlier layers cost, and a network in a ``TrustedModel`` beside the network alone."""
    columns: list[Column] = [
        ("rows", "rows", "{:,}"),
        ("head", "without", "{:.3g} ms"),
        ("head with layers", "with", "{:.3g} ms"),
    ]
    trusted = part["trusted"]
    more = trusted["trusted"] / trusted["network"] - 1.0
    return (
        f"With {len(part['widths'])} earlier layers of {', '.join(map(str, part['widths'][:-1]))} and "
        f"{part['widths'][-1]} features on the same device:\n\n{table(part['rows'], columns)}\n\n"
        f"A ResNet-18 takes {trusted['network']:.2f} ms for {trusted['rows']} pictures of 64 pixels without pooling in "
        f"its stem, as much work as for 224 pixels with it; in a `TrustedModel` with {len(trusted['layers'])} stages "
        f"{trusted['trusted']:.2f} ms, {more:.0%} more (goal 5%)."
    )


def exact(part: Row) -> str:
    heads = part["heads"]

    def differing(kind: str, *names: str) -> str:
        return spaced(sum(head[kind][name] for head in heads for name in names))

    ranks, scores = ("p_value", "class_p_value"), ("confidence", "nonconformity", "joint")
    lengths = "distance", "margin", "network_margin"
    return (
        f"On {spaced(part['rows'])} different rows of each of {len(heads)} heads, kernels and plain torch differ in "
        f"{differing('without_kernels', *DECISIONS)} decisions (labels, rules, trust, nearest ellipsoid, `accept`), "
        f"{differing('without_kernels', *ranks)} p-values, {differing('without_kernels', *scores)} scores (confidence, "
        f"nonconformity, `joint`) and {differing('without_kernels', *lengths)} distances and margins. Of "
        f"{spaced(part['compared_on_the_cpu'])} rows of each head on the CPU, {differing('on_the_cpu', *DECISIONS)} "
        f"decisions, {differing('on_the_cpu', *ranks)} p-values and {differing('on_the_cpu', *scores)} scores differ. "
        f"Batches of 1 to 1000 rows and one large batch differ in {differing('batches', *DECISIONS, *ranks, *scores)} "
        f"decisions, p-values and scores of {spaced(part['compared_in_batches'])} rows of each head. In the last two "
        "comparisons distances and margins of the classifier can differ in their last digit."
    )


def compiled(part: Row) -> str:
    same = f"these fields differ: {part['unequal']}" if part["unequal"] else "every field equals the plain call's"
    return (
        "`torch.compile(head)`, with the rows marked by `torch._dynamo.mark_dynamic`, takes "
        f"{part['first_s']:.0f} s for the first call on a CPU, "
        f"{part['other_size_s']:.1f} s for the first batch of another size, and then "
        f"{1e3 * part['again_s']:.0f} ms; {same}."
    )


def on_cpu(part: Row) -> str:
    columns: list[Column] = [
        ("rows", "rows", "{:,}"),
        ("head", lambda r: with_goal(r["head"], CPU_GOALS.get(r["rows"]))),
        ("classifier alone", "classifier", "{:.3g} ms"),
        ("`cdist` and softmax", "nearest", "{:.3g} ms"),
        *((title, name, "{:.3g} ms") for name, title in CPU_PEERS.items()),
    ]
    return (
        f"On one CPU thread, with {part['ellipsoids']} ellipsoids in {part['dims']} dimensions and "
        f"{spaced(part['reference_points'])} reference points of 64 features:\n\n{table(part['rows'], columns)}"
    )


def with_goal(ms: float, goal: float | None) -> str:
    return f"{ms:.3g} ms" + (f" (goal {goal:g})" if goal is not None and ms > goal else "")

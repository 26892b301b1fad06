"""Table of a whole head's speed in docs/speed.md, from the JSON of ``bench_head.py``."""

from __future__ import annotations

from typing import Any

from markdown_tables import load, table

# The goals of the benchmark, in milliseconds: by rows on the GPU, by rows on the CPU, one row from a CUDA graph.
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


def head_speed() -> str:
    parts = load("bench_head")["parts"]
    heads = {"Fashion-MNIST": parts["fashion"], "random embeddings": parts["gpu"]}
    text = [on_gpu(heads), exact(parts["exactness"]), compiled(parts["compile"]), on_cpu(parts["cpu"])]
    return "\n\n".join(text)


def on_gpu(heads: dict[str, dict[str, Any]]) -> str:
    rows = [
        [
            name,
            spaced(r["rows"]),
            with_goal(r["head"], GPU_GOALS.get(r["rows"])),
            f"{r['graph']:.2f} ms" if "graph" in r else "",
            f"{r['plain']:.3g} ms",
            f"{r['classifier']:.3g} ms",
            f"{r['nearest']:.3g} ms",
            f"{r['bytes'] / 2**20:.0f} MiB",
        ]
        for name, part in heads.items()
        for r in part["rows"]
    ]
    header = [
        "embeddings",
        "rows",
        "head",
        "from a CUDA graph",
        "without kernels",
        "classifier alone",
        "`cdist` and softmax",
        "memory",
    ]
    sizes = " and ".join(
        f"{part['ellipsoids']} ellipsoids in {part['dims']} dimensions, {part['regions']} regions and "
        f"{spaced(part['reference_points'])} reference points ({name})"
        for name, part in heads.items()
    )
    return (
        f"Calibrated heads with logits on an {heads['Fashion-MNIST']['device']}, for 64 features: {sizes}. "
        "Times are from the call to the result. Memory is the largest beyond inputs and results. In brackets the goal, "
        f"where it is missed; one row from a CUDA graph should take {GRAPH_GOAL} ms:\n\n{table(header, rows)}"
    )


def exact(part: dict[str, Any]) -> str:
    heads = part["heads"]

    def differing(kind: str, *names: str) -> str:
        return spaced(sum(head[kind][name] for head in heads for name in names))

    ranks, scores = ("p_value", "class_p_value"), ("confidence", "strangeness", "joint")
    lengths = "distance", "margin", "network_margin"
    return (
        f"On {spaced(part['rows'])} different rows of each of {len(heads)} heads, kernels and plain torch differ in "
        f"{differing('without_kernels', *DECISIONS)} decisions (labels, rules, trust, nearest ellipsoid, `accept`), "
        f"{differing('without_kernels', *ranks)} p-values, {differing('without_kernels', *scores)} scores (confidence, "
        f"strangeness, `joint`) and {differing('without_kernels', *lengths)} distances and margins. Of "
        f"{spaced(part['compared_on_the_cpu'])} rows of each head on the CPU, {differing('on_the_cpu', *DECISIONS)} "
        f"decisions, {differing('on_the_cpu', *ranks)} p-values and {differing('on_the_cpu', *scores)} scores differ. "
        f"Batches of 1 to 1000 rows and one large batch differ in {differing('batches', *DECISIONS, *ranks, *scores)} "
        f"decisions, p-values and scores of {spaced(part['compared_in_batches'])} rows of each head. In the last two "
        "comparisons distances and margins of the classifier can differ in their last digit."
    )


def compiled(part: dict[str, Any]) -> str:
    same = f"these fields differ: {part['unequal']}" if part["unequal"] else "every field equals the plain call's"
    return (
        "`torch.compile(head)`, with the rows marked by `torch._dynamo.mark_dynamic`, takes "
        f"{part['first_s']:.0f} s for the first call on a CPU (goal 20), "
        f"{part['other_size_s']:.1f} s for the first batch of another size (goal 0), and then "
        f"{1e3 * part['again_s']:.0f} ms; {same}."
    )


def on_cpu(part: dict[str, Any]) -> str:
    rows = [
        [
            spaced(r["rows"]),
            with_goal(r["head"], CPU_GOALS.get(r["rows"])),
            f"{r['classifier']:.3g} ms",
            f"{r['nearest']:.3g} ms",
            *(f"{r[name]:.3g} ms" if name in r else "" for name in CPU_PEERS),
        ]
        for r in part["rows"]
    ]
    header = ["rows", "head", "classifier alone", "`cdist` and softmax", *CPU_PEERS.values()]
    return (
        f"On one CPU thread, with {part['ellipsoids']} ellipsoids in {part['dims']} dimensions and "
        f"{spaced(part['reference_points'])} reference points of 64 features:\n\n{table(header, rows)}"
    )


def with_goal(ms: float, goal: float | None) -> str:
    return f"{ms:.3g} ms" + (f" (goal {goal:g})" if goal is not None and ms > goal else "")


def spaced(number: int) -> str:
    return f"{number:,}".replace(",", " ")

"""Tables of speed, large fits and files, solvers, layers and active learning, each from the JSON of its script."""

from __future__ import annotations

from typing import Any

from markdown_tables import load, table


def solvers() -> str:
    results = load("bench_solvers")
    rows = [
        [
            f"{r['points']:,} x {r['dims']}".replace(",", " "),
            f"{r['native_s']:.1f} s" if r["native_s"] >= 1 else f"{r['native_s'] * 1e3:.3g} ms",
            f"{r['ratio_direct']:.0f} x" if "ratio_direct" in r else "",
            f"{r['ratio_generated']:.0f} x" if "ratio_generated" in r else "",
        ]
        for r in results["rows"]
    ]
    header = ["minimum-volume ellipsoid", "native, gap 1e-7", "cvxpy, one program", "cvxpy, generated constraints"]
    text = (
        "CPU time of one ellipsoid on one thread, and how many times longer cvxpy with Clarabel takes in the same run"
    )
    return f"{text}:\n\n{table(header, rows)}"


def partitions() -> str:
    results = load("bench_partition")
    rows = [
        [
            {"fashion": "CNN embeddings (Fashion-MNIST)", "synthetic": "synthetic"}[r["data"]],
            f"{r['points']:,} x {r['dims']}".replace(",", " "),
            f"{r['cpu_s']:.1f} s",
            str(r["ellipsoids"]),
            str(r["isolated"]),
            f"{r['share']['cover'] + r['share'].get('disjoint', 0.0):.0%}",
            f"{r['share']['hulls']:.0%}",
        ]
        for r in results["rows"]
        if r.get("draw", 0) == 0
    ]
    header = ["10 classes", "points x dims", "CPU time", "ellipsoids", "isolated", "in ellipsoids", "in hulls"]
    growth = "; ".join(
        f"{', '.join(f'{e:.2f}' for e in exponents)} at {dims} dims" for dims, exponents in results["growth"].items()
    )
    claim = f"Growth from 10 000 to 50 000 points, exponents of three draws: {growth}."
    return f"A whole partition:\n\n{table(header, rows)}\n\n{claim}"


def large_fits() -> str:
    results = load("large_fits")
    dim, runs = results["dim"], results["runs"]
    costs = "; ".join(
        f"{name}: {1e6 * found['cost']['own_s']:.1f} µs for each point of the class and "
        f"{1e6 * found['cost']['rest_s']:.1f} µs for each point of other classes, with errors of up to "
        f"{found['cost']['largest_error']:.0%}"
        for name, found in runs.items()
    )
    largest = max(r["rest"] for found in runs.values() for r in found["rows"])
    measured = (
        f"Time of a class in {dim} dimensions, with up to {_thousands(largest)} points of other classes: {costs}."
    )
    workers = list(results["simulated"][0]["wall_s"])
    rows = [
        [
            f"{_fit_size(r)}, {r['data']}",
            "" if r["cap"] is None else str(r["cap"]),
            _bytes(r["points_bytes"]),
            _duration(r["cpu_s"]),
            *(_duration(r["wall_s"][count]) for count in workers),
        ]
        for r in results["simulated"]
    ]
    header = ["rows x classes", "`max_per_class`", "points", "CPU time", *(f"{count} workers" for count in workers)]
    simulated = (
        "Simulated from these costs, with log-normal class sizes. The points are what travels once to each machine "
        "(Ray) or each process (Dask)"
    )
    counts = [
        [_fit_size(r), _bytes(r["memory_bytes"]), _bytes(r["count_bytes"]), _duration(r["count_s"])]
        for r in results["calling_process"]
    ]
    own = (
        f"With few ellipsoids, `partition` allocates {results['memory_copies']:.1f} copies of the points in float64 in "
        "the calling process (measured). The counts of one ellipsoid for each class add memory (computed) and time on "
        "one core (from the measured time for each point and ellipsoid)"
    )
    count_header = ["rows x classes", "memory with few ellipsoids", "memory of the counts", "CPU time of the counts"]
    return f"{measured}\n\n{simulated}:\n\n{table(header, rows)}\n\n{own}:\n\n{table(count_header, counts)}"


def _thousands(value: int) -> str:
    return f"{value:,}".replace(",", " ")


def _fit_size(row: dict[str, Any]) -> str:
    """Rows, rounded to millions, and classes."""
    return f"{round(row['rows'] / 1e6)} million x {_thousands(row['classes'])}"


def _bytes(value: float) -> str:
    return f"{value / 1e12:.1f} TB" if value >= 1e12 else f"{value / 1e9:.3g} GB"


def _duration(seconds: float) -> str:
    """Two digits, in the largest unit of which there are at least two."""
    for unit, size in (("days", 86_400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{float(f'{seconds / size:.2g}'):.3g} {unit}"
    return f"{float(f'{seconds:.2g}'):.3g} s"


def inference() -> str:
    results = load("bench_inference")
    rows = [
        [
            f"{r['rows']:,} x {r['ellipsoids']} x {r['dims']}".replace(",", " "),
            f"{r['rows_per_second']:,.0f}".replace(",", " "),
            f"{r['ratio_n_by_n']:.0f} x" if "ratio_n_by_n" in r else "",
            f"{r['ratio_loop']:.1f} x",
            f"{r['ratio_mixture']:.1f} x",
            f"{r['bank_bytes'] / 2**20:.0f} / {r['loop_bytes'] / 2**20:.0f} / {r['mixture_bytes'] / 2**20:.0f}",
        ]
        for r in results["rows"]
    ]
    header = [
        "rows x ellipsoids x dims",
        "rows/s",
        "N x N loop",
        "plain loop",
        "GaussianMixture",
        "MiB: ours / loop / mixture",
    ]
    text = "Distances on one CPU thread in float32, and how many times longer other methods take in the same run"
    return f"{text}:\n\n{table(header, rows)}"


def nearest() -> str:
    results = load("nearest")
    kinds = ("mahalanobis", "euclidean")
    rows = [
        [
            name,
            f"{r['mahalanobis']['share_outside']:.0%}",
            *(f"{r[kind]['accuracy']:.1%}" for kind in kinds),
            *(f"{r[kind]['accuracy_outside']:.1%}" for kind in kinds),
        ]
        for name, r in results["sets"].items()
    ]
    rows.append(["mean", "", *(f"{results['mean_accuracy'][kind]:.1%}" for kind in kinds), "", ""])
    header = ["10 folds", "outside", "Mahalanobis", "Euclidean", "outside: Mahalanobis", "outside: Euclidean"]
    return f"Accuracy by the distance that defines the nearest ellipsoid:\n\n{table(header, rows)}"


def layers() -> str:
    results = load("bench_layers")
    rows = [
        [
            f"{r['points']} x {r['dims']}",
            str(r["batch"]),
            *(
                f"{(r[f'{name}_forward_s'] + r[f'{name}_backward_s']) * 1e3:.0f} ms"
                for name in ("native", "cvxpylayers")
            ),
            f"{r['ratio']:.1f} x" + (" (scaled from one set)" if r["scaled"] else ""),
            f"{r['gradient_difference']:.0e}",
        ]
        for r in results["rows"]
    ]
    header = ["points x dims", "batch", "native", "cvxpylayers", "ratio", "gradients differ by"]
    text = "Forward and backward pass of a batch of ellipsoids, CPU time of one thread"
    gpu = load("bench_layers_gpu")
    sizes = ", ".join(
        f"{r['points']} x {r['dims']} in {(r['forward_s'] + r['backward_s']) * 1e3:.0f} ms" for r in gpu["rows"]
    )
    on_gpu = f"Batches of {gpu['rows'][0]['batch']} on an {gpu['device']}: {sizes}."
    return f"{text}:\n\n{table(header, rows)}\n\n{on_gpu}"


def many_classes() -> str:
    """Fits with 100 and 1000 classes, their growth, and the solver on a GPU."""
    parts = load("bench_classes")["parts"]
    cores, large, growth = parts["cores"]["device"], parts["imagenet"], parts["growth"]
    runs = parts["rest"]["runs"]

    def shape(r: dict[str, Any]) -> str:
        return f"{r['points']:,} x {r['features']}, {r['classes']} classes".replace(
            ",", " ", f"{r['points']:,}".count(",")
        )

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
        [
            f"its forward pass of {_thousands(large['forward_rows'])} rows",
            "GPU",
            f"{large['forward_ms']:.0f} ms",
            "100 ms",
        ],
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
    phases = f"{_phases(growth)}\n\n" if "exponent_phases" in growth else ""  # older results have no phases
    gpu = (
        "The batched solver of `MVELayer` was tried for the first ellipsoids of all classes at once. It saves at "
        f"most a fraction of a second, so the partition does not use it: {solvers}."
    )
    return f"{table(['work', 'on', 'measured', 'goal'], rows)}\n\n{misses}\n\n{phases}{gpu}"


def _phases(growth: dict[str, Any]) -> str:
    """Where the CPU time of the fits with 50 classes goes, by number of points."""
    names = {
        "ellipsoids": "solving ellipsoids",
        "directions": "closest points of reduced hulls",
        "tests": "tests against points of other classes",
        "counts": "counts of all points in all ellipsoids",
        "rest": "other",
    }
    runs, exponents = growth["by_points"], growth["exponent_phases"]
    rows: list[list[Any]] = [
        [name, *(f"{r['phases_s'][phase]:.1f} s" for r in runs), f"{exponents[phase]:.2f}"]
        for phase, name in names.items()
    ]
    rows.append(["all", *(f"{r['cpu_s']:.1f} s" for r in runs), f"{growth['exponent_points']:.2f}"])
    for key, name in (
        ("tested", "ellipsoids tested"),
        ("directions", "hulls solved"),
        ("ellipsoids", "final ellipsoids"),
    ):
        rows.append([name, *(_thousands(r[key]) for r in runs), ""])
    header = ["50 classes, 16 dimensions", *(f"{_thousands(r['points'])} points" for r in runs), "exponent"]
    return (
        "Where the CPU time of `partition` goes as the number of points grows, on one thread. Every column is a single "
        "run on a shared machine, and the exponents change from run to run, also on either side of the goal:\n\n"
        f"{table(header, rows)}"
    )


def refits() -> str:
    moons, others = load("refit_moons"), load("refit_embeddings")
    header = ["test points", "loss", "others inside", "network", "its AURC", "SEP-C", "its AURC"]
    names = ("foreign_inside", "network_accuracy", "network_aurc", "sepc_accuracy", "sepc_aurc")
    rows = [
        [data, arm, *(_spread(values[name], name.endswith("aurc")) for name in names)]
        for data, result in {"moons": moons, **others["sets"]}.items()
        for arm, values in result["summary"].items()
    ]
    text = "An encoder trained with cross-entropy alone, with `EllipsoidLoss` added but its ellipsoids held constant"
    text += " (detached), and with gradients through the refit; mean and standard deviation of five seeds"
    return f"{text}:\n\n{table(header, rows)}"


def _spread(value: dict[str, float], small: bool) -> str:
    """Mean and standard deviation: AURC in thousandths, shares in per cent."""
    scale, unit = (1e3, "e-3") if small else (100.0, "%")
    return f"{value['mean'] * scale:.1f} ± {value['std'] * scale:.1f}{unit}"


def files() -> str:
    results = load("bench_files")
    rows = [
        [
            f"`sepc {r['command']}`",
            "" if r.get("max_rows") is None else _thousands(r["max_rows"]),
            f"{r['format']}, {r['shape']}",
            f"{r['gb']:.2f} GB",
            _thousands(r["rows"]),
            f"{r['cpu_s']:.0f} s",
            _thousands(100 * round(r["rows"] / r["cpu_s"] / 100)),
            f"{r['peak_mb']:.0f} MiB",
        ]
        for part in results["parts"].values()
        for r in part["rows"]
    ]
    header = ["command", "`--max-rows` of the model", "file", "size", "rows", "CPU time", "rows/s", "peak memory"]
    text = "Each command in a process with one thread; the memory includes that of Python and torch, about 300 MiB"
    return f"{text}:\n\n{table(header, rows)}"


def monitor_cost() -> str:
    results = load("lightning_digits")
    rows = [
        [
            str(r["epochs"]),
            f"{r['training_seconds']:.1f} s",
            f"{r['assessed']:.0f}",
            f"{r['monitor_seconds']:.1f} s",
            f"{r['share']:.0%}",
        ]
        for r in results["cost"]
    ]
    header = ["epochs", "training", "assessed validations", "monitor", "share"]
    text = "A small CNN on digits in one process with one thread, in CPU time, medians of three runs"
    return f"{text}:\n\n{table(header, rows)}"


def active() -> str:
    results = load("active_learning")
    methods = [method for method in results["verdict"]["mean_gain"] if method != "random"]

    def gain(row: dict[str, Any]) -> str:
        return f"{100 * row['gain']:+.1f} ± {100 * row['gain_se']:.1f}"

    rows = [
        [name, f"{100 * r['rows']['random']['area']:.1f}", *(gain(r["rows"][method]) for method in methods)]
        for name, r in results["sets"].items()
    ]
    mean = results["verdict"]["mean_gain"]
    rows.append(["mean", "", *(f"{100 * mean[method]:+.1f}" for method in methods)])
    needed = [[r["rows"][m]["labels_to_target"] for r in results["sets"].values()] for m in ["random", *methods]]
    rows.append(["sets where 95 % is reached", *(str(sum(n is not None for n in column)) for column in needed)])
    header = ["area under the curve", "random", *methods]
    text = (
        "Mean accuracy over all rounds, and the gain of each method over random selection in percentage points, paired "
        f"over {results['seeds']} seeds, with standard errors"
    )
    trained = results["sets"]["digits, network"]["rows"]
    verdict = results["verdict"]
    pairs = {name: r["rows"]["ours"] for name, r in results["sets"].items()}
    what = (
        "`ours` is the query of `TrustMonitor`: its head is calibrated on up to "
        f"{results['validation']} validation samples, which train no network. Minus margin sampling, on the same "
        "splits: "
        + ", ".join(
            f"{name} {100 * row['over_margin']:+.1f} ± {100 * row['over_margin_se']:.1f}" for name, row in pairs.items()
        )
        + ". By more than two standard errors it is below margin sampling on "
        f"{', '.join(verdict['clearly_below_margin_on']) or 'none of these sets'}."
    )
    reading = (
        f"{what} It is below margin sampling on {', '.join(verdict['below_margin_on']) or 'none of these sets'}, and "
        f"{'above' if verdict['above_badge_on_average'] else 'not above'} BADGE on average. Ambiguity "
        "comes from the network there, and novelty from the head. On the trained network, the head alone (without "
        f"`logits`) gains {gain(trained['ours, head alone'])}, and querying the least trusted samples first gains "
        f"{gain(trained['least trusted'])}: with so few labels the head is poor, and the least trusted samples are "
        "outliers."
    )
    return f"{text}:\n\n{table(header, rows)}\n\n{reading}"

"""Tables of docs/solvers.md: solvers, differentiable layers, and training through the refit."""

from __future__ import annotations

from collections.abc import Callable

from experiments.table_writer import Column, Row, Table, table

SOLVERS = Table(
    "CPU time of one ellipsoid on one thread, and how many times longer cvxpy with Clarabel takes in the same run",
    [
        ("minimum-volume ellipsoid", lambda r: f"{r['points']:,} x {r['dims']}".replace(",", " ")),
        ("native, gap 1e-7", lambda r: f"{s:.1f} s" if (s := r["native_s"]) >= 1 else f"{s * 1e3:.3g} ms"),
        ("cvxpy, one program", "ratio_direct", "{:.0f} x"),
        ("cvxpy, generated constraints", "ratio_generated", "{:.0f} x"),
    ],
)
LAYERS = Table(
    "Forward and backward pass of a batch of ellipsoids, CPU time of one thread",
    [
        ("points x dims", lambda r: f"{r['points']} x {r['dims']}"),
        ("batch", "batch"),
        ("native", lambda r: 1e3 * (r["native_forward_s"] + r["native_backward_s"]), "{:.0f} ms"),
        ("cvxpylayers", lambda r: 1e3 * (r["cvxpylayers_forward_s"] + r["cvxpylayers_backward_s"]), "{:.0f} ms"),
        ("ratio", lambda r: f"{r['ratio']:.1f} x" + (" (scaled from one set)" if r["scaled"] else "")),
        ("gradients differ by", "gradient_difference", "{:.0e}"),
    ],
)


def layers(cpu: Row, gpu: Row) -> str:
    sizes = ", ".join(
        f"{r['points']} x {r['dims']} in {(r['forward_s'] + r['backward_s']) * 1e3:.0f} ms" for r in gpu["rows"]
    )
    return f"{LAYERS(cpu)}\n\nBatches of {gpu['rows'][0]['batch']} on an {gpu['device']}: {sizes}."


def refits(moons: Row, others: Row) -> str:
    rows = [
        {"data": data, "arm": arm, **values}
        for data, result in {"moons": moons, **others["sets"]}.items()
        for arm, values in result["summary"].items()
    ]

    def spread(name: str, scale: float = 100.0, unit: str = "%") -> Callable[[Row], str]:
        return lambda r: f"{r[name]['mean'] * scale:.1f} ± {r[name]['std'] * scale:.1f}{unit}"

    columns: list[Column] = [
        ("test points", "data"),
        ("loss", "arm"),
        ("others inside", spread("foreign_inside")),
        ("network", spread("network_accuracy")),
        ("its AURC", spread("network_aurc", 1e3, "e-3")),
        ("SEP-C", spread("sepc_accuracy")),
        ("its AURC", spread("sepc_aurc", 1e3, "e-3")),
    ]
    return (
        "An encoder trained with cross-entropy alone, with `EllipsoidLoss` added but its ellipsoids held constant "
        "(detached), and with gradients through the refit; mean and standard deviation of five seeds:\n\n"
        + table(rows, columns)
    )

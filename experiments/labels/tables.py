"""Tables of docs/label_errors.md, docs/active_learning.md and docs/lightning.md."""

from __future__ import annotations

from experiments.table_writer import Column, Row, Table, table

MONITOR_COST = Table(
    "A small CNN on digits in one process with one thread, in CPU time, medians of three runs",
    [
        ("epochs", "epochs"),
        ("training", "training_seconds", "{:.1f} s"),
        ("assessed validations", "assessed", "{:.0f}"),
        ("monitor", "monitor_seconds", "{:.1f} s"),
        ("share", "share", "{:.0%}"),
    ],
    "cost",
)


HUMAN_ERRORS = Table(
    "5000 training pictures of CIFAR-10 with the labels of people, which differ from CIFAR-10's own in the share "
    '"wrong"; the logistic regression of both methods is right in {accuracy:.1%} with the true labels',
    [
        ("labels of people", "labels"),
        ("wrong", "wrong", "{:.1%}"),
        ("average precision: `suspicious_labels`", "precision.ours", "{:.3f}"),
        ("cleanlab", "precision.cleanlab", "{:.3f}"),
        ("wrong among the first 5 %: `suspicious_labels`", "first.ours", "{:.0%}"),
        ("cleanlab ", "first.cleanlab", "{:.0%}"),
        ("estimated share", "estimated", "{:.1%}"),
        ("found at fdr=0.1, false", lambda r: f"{r['found']}, {r['false']:.0%}"),
    ],
)


def label_errors(results: Row) -> str:
    """Average precision of the rows with a flipped label, and the discoveries at the false discovery rate."""
    runs = [run for part in results["parts"].values() for run in part]
    others = list(dict.fromkeys(name for run in runs for name in run["precision"] if not name.startswith("SEP-C")))

    def reached(ours: str) -> int:
        best = [max(run["precision"].get(name, 0.0) for name in others) for run in runs]
        return sum(run["precision"][ours] >= value for run, value in zip(runs, best, strict=True))

    columns: list[Column] = [
        ("set", "set"),
        ("flipped", lambda r: f"{r['kind']}, {r['share']:.0%}"),
        *((name, f"precision.{name}", "{:.3f}") for name in (*others, "SEP-C", "SEP-C with logits")),
        ("estimated share", "estimated", "{:.1%}"),
        (f"found at fdr={results['fdr']:g}, false", lambda r: f"{r['found']}, {r['false']:.0%}"),
        ("of the flipped", "hit", "{:.0%}"),
    ]
    return (
        f"Average precision of the flipped rows. `suspicious_labels` is at least as good as the best of the "
        f"{len(others)} rankings of cleanlab in {reached('SEP-C with logits')} of {len(runs)} cases with logits, and "
        f"in {reached('SEP-C')} without.\n\n{table(runs, columns)}"
    )


def active(results: Row) -> str:
    verdict, sets = results["verdict"], {name: r["rows"] for name, r in results["sets"].items()}
    methods = [method for method in verdict["mean_gain"] if method != "random"]

    def gain(row: Row, name: str = "gain") -> str:
        return f"{100 * row[name]:+.1f} ± {100 * row[f'{name}_se']:.1f}"

    def listed(names: list[str]) -> str:
        return ", ".join(names) or "none of these sets"

    columns: list[Column] = [
        ("area under the curve", "name"),
        ("random", lambda r: 100 * r["random"]["area"], "{:.1f}"),
        *((method, lambda r, method=method: gain(r[method])) for method in methods),
    ]
    reached = [
        [rows[method]["labels_to_target"] is not None for rows in sets.values()] for method in ["random", *methods]
    ]
    shown = table(
        [{"name": name, **rows} for name, rows in sets.items()],
        columns,
        ["mean", "", *(f"{100 * verdict['mean_gain'][method]:+.1f}" for method in methods)],
        ["sets where 95 % is reached", *(str(sum(column)) for column in reached)],
    )
    trained = sets["digits, network"]
    over_margin = ", ".join(f"{name} {gain(rows['ours'], 'over_margin')}" for name, rows in sets.items())
    return (
        "Mean accuracy over all rounds, and the gain of each method over random selection in percentage points, paired "
        f"over {results['seeds']} seeds, with standard errors:\n\n{shown}\n\n"
        f"`ours` is the query of `TrustMonitor`: its head is calibrated on up to {results['validation']} validation "
        f"samples, which train no network. Minus margin sampling, on the same splits: {over_margin}. By more than two "
        f"standard errors it is below margin sampling on {listed(verdict['clearly_below_margin_on'])}. It is below "
        f"margin sampling on {listed(verdict['below_margin_on'])}, and "
        f"{'above' if verdict['above_badge_on_average'] else 'not above'} BADGE on average. Ambiguity "
        "comes from the network there, and novelty from the head. On the trained network, the head alone (without "
        f"`logits`) gains {gain(trained['ours, head alone'])}, and querying the least trusted samples first gains "
        f"{gain(trained['least trusted'])}: with so few labels the head is poor, and the least trusted samples are "
        "outliers."
    )

"""Tables of promises by group and of the drift monitor, each from the JSON of its script."""

from __future__ import annotations

from markdown_tables import load, table


def group_promises() -> str:
    results = load("group_promises")
    rows = [
        [
            r["network"] if r["by"] == "predicted" else "",
            f"`{r['by']}`",
            f"{r['merged_from']} in {r['groups']}",
            f"{r['violations']:.1%}",
            f"{r['found']:.0%}",
            f"{r['coverage']:.0%}",
            f"{r['worst_risk']:.1%}",
            f"{r['single_coverage']:.0%}",
            f"{r['single_worst_risk']:.1%}",
        ]
        for r in results["rows"]
    ]
    header = ["network", "`by`", "groups", "violated", "found", "accepted", "worst group"]
    header += ["one threshold: accepted", "its worst group"]
    text = (
        f"{results['draws']} draws of {results['ranked']} ranked points, risk {results['risk']:.0%}. *Violated*: draws "
        f"in which any group exceeds the risk; promised are at most {results['delta']:.0%}. *Found*: groups where the "
        "risk can be promised. *Worst group*: the largest risk of a group, median over draws. The last two columns use "
        "the single threshold of `accept_at(risk=...)` on the same groups"
    )
    return f"{text}:\n\n{table(header, rows)}"


def drift() -> str:
    results = load("drift")
    methods = list(dict.fromkeys(r["method"] for r in results["rows"]))
    cells = {(r["network"], r["change"], r["method"]): r for r in results["rows"]}
    rows = []
    for network, change in dict.fromkeys((r["network"], r["change"]) for r in results["rows"]):
        found = [cells[network, change, method] for method in methods]
        accuracy = found[0]["accuracy"]
        rows.append(
            [
                network,
                change,
                *(_delay(r) for r in found),
                *_accuracies(**accuracy),
            ]
        )
    false, early = results["false_alarms"], {}
    for method in methods:
        shares = [r["false"] for r in results["rows"] if r["method"] == method]
        early[method] = sum(shares) / len(shares)
    text = (
        f"False alarms: {false['alarms']:.1%} of {false['streams']} streams of {false['length']} points without drift; "
        f"promised are at most {results['alpha']:.0%}. Before the change, real streams of {results['clean']} points "
        f"alarmed in {', '.join(f'{share:.0%} ({method})' for method, share in early.items())} of the draws; "
        "the streams of a network share one calibration set, and the promise is over calibration sets too.\n\n"
        f"Median number of points from the change to the alarm, within {results['changed']} points, over "
        f"{results['draws']} streams (MMD: three); in brackets the "
        "share of the streams that alarmed, where it is not all. The last columns compare the accuracy of the accepted "
        "points after the change with the monitor's estimate"
    )
    return f"{text}:\n\n{table(['network', 'change', *methods, 'accuracy', 'estimate'], rows)}"


def _accuracies(true: float | None, estimate: float, low: float, high: float) -> tuple[str, str]:
    if true is None:
        return "none accepted", ""
    return f"{true:.0%}", f"{estimate:.0%} ({low:.0%} to {high:.0%})"


def _delay(row: dict[str, float | None]) -> str:
    found, delay = row["found"] or 0.0, row["delay"]
    share = "" if found == 1.0 else f" ({found:.0%})"
    return ("none" if delay is None and found == 0.0 else "later" if delay is None else f"{delay:.0f}") + share

"""Tables of docs/promises.md, docs/drift.md and docs/novelties.md: promises by group and over units, monitors."""

from __future__ import annotations

import math
from collections.abc import Mapping

from experiments.table_writer import Column, Row, Table, mean, table

_PROBABILITIES = ("temperature scaling", "trust head")

GROUP_PROMISES = Table(
    "{draws} draws of {ranked} ranked points, risk {risk:.0%}. *Violated*: draws in which any group exceeds the risk; "
    "promised are at most {delta:.0%}. *Found*: groups where the risk can be promised. *Worst group*: the largest risk "
    "of a group, median over draws. The last two columns use the single threshold of `accept_at(risk=...)` on the same "
    "groups",
    [
        ("network", lambda r: r["network"] if r["by"] == "predicted" else ""),
        ("`by`", "by", "`{}`"),
        ("groups", lambda r: f"{r['merged_from']} in {r['groups']}"),
        ("violated", "violations", "{:.1%}"),
        ("found", "found", "{:.0%}"),
        ("accepted", "coverage", "{:.0%}"),
        ("worst group", "worst_risk", "{:.1%}"),
        ("one threshold: accepted", "single_coverage", "{:.0%}"),
        ("its worst group", "single_worst_risk", "{:.1%}"),
    ],
)

UNIT_PROMISES = Table(
    "{draws} calibrations with simulated units; {true_risk:.1%} of the labels are wrong at every score, all of them in "
    "a few units. *Broken*: calibrations in which a risk of {low:.0%} is promised; allowed are {delta:.0%}. "
    "*Accepted*: share of the rows at a risk of {high:.0%}, which can be kept. `calibrate` was called without and "
    "with `units`",
    [
        ("units", "units"),
        ("rows of each", "rows"),
        ("without: broken", "broken_rows", "{:.1%}"),
        ("accepted", "accepted_rows", "{:.0%}"),
        ("with: broken", "broken_units", "{:.1%}"),
        ("accepted", "accepted_units", "{:.0%}"),
    ],
)

# Rules that promise a risk: the title of a column, and the name in the result. The head comes first, then its own
# parts, the others that promise the same, and those that promise less.
_OURS = {"head": "head", "search": "search"}
_PEERS = {"softmax": "softmax", "sequence": "sequence", "tuned": "tuned", "SGR": "sgr", "MAPIE": "mapie"}
_PEERS |= {"MAPIE sequence": "mapie sequence", "MAPIE split": "mapie split"}
_AVERAGES = {"average": "average", "average softmax": "average softmax"}


def _power_table(rows: list[Row], columns: list[Column], rules: Mapping[str, str], delta: float) -> str:
    def cell(row: Row, name: str) -> str:
        mark = " †" if name in row and row[name]["broken"] > delta else ""
        return f"{row[name]['accepted']:.0%}{mark}" if name in row else ""

    return table(rows, columns + [(title, lambda r, name=name: cell(r, name)) for title, name in rules.items()])


def power(results: Row) -> str:
    """Means over the sets of what rules accept that promise a risk, and where the head accepts less than another."""
    rows: list[Row] = results["rows"]
    peers = [name for name in _PEERS.values() if name in rows[0]]
    means = []
    for risk, count in sorted({(row["risk"], row["rows"]) for row in rows}):
        some = [row for row in rows if (row["risk"], row["rows"]) == (risk, count)]
        found = {"risk": risk, "rows": count, "sets": len(some)}
        for name in (*_OURS.values(), *peers, *_AVERAGES.values()):
            found[name] = {key: mean(row[name][key] for row in some) for key in ("accepted", "broken")}
        means.append(found)
    gains = [row["head"]["accepted"] - max(row[name]["accepted"] for name in peers) for row in rows]
    counts = sorted({row["rows"] for row in rows})
    over = {
        count: mean(row["head"]["accepted"] - row["softmax"]["accepted"] for row in rows if row["rows"] == count)
        for count in counts
    }
    broken = {
        title: mean(row[name]["broken"] for row in rows) for title, name in (_OURS | _PEERS).items() if name in rows[0]
    }
    text = (
        f"Share of all rows that is accepted, over {results['draws']} calibrations of each set, means over the sets "
        f"whose network errs more often than the risk; † where more than the allowed {results['delta']:.0%} of the "
        "calibrations break the risk (the *average* rules promise nothing about this share). *search*: the exact "
        "search alone, for the head's scores. For softmax: *softmax* the "
        "exact search, *sequence* and *tuned* Learn then Test in a fixed sequence from the highest score and from the "
        "best threshold of three rows in ten, *SGR* selection with guaranteed risk, *MAPIE* its controller of the "
        'precision of "the label is right" with its default grid and Bonferroni-Holm, with a fixed sequence, and '
        "with one that three rows in ten order. These promise the same. *average* (`average=True`, and the same rule "
        "for softmax) promises less: the risk on average over calibrations"
    )
    after = (
        f"In {sum(gain > -0.005 for gain in gains)} of {len(rows)} cases (a set, a risk and a number of rows) the head "
        "accepts at least as much as every other rule with the same promise, up to half a point, and in "
        f"{sum(gain < -0.02 for gain in gains)} it accepts over two points less than the best of them in that case. "
        "The head minus the exact search on softmax, in the mean: "
        f"{', '.join(f'{100 * gain:+.1f} points with {count} rows' for count, gain in over.items())}. Broken in the "
        f"mean over all cases: {', '.join(f'{title} {share:.1%}' for title, share in broken.items())}."
    )
    columns: list[Column] = [("risk", "risk", "{:.0%}"), ("rows", "rows"), ("sets", "sets")]
    return f"{text}:\n\n{_power_table(means, columns, _OURS | _PEERS | _AVERAGES, results['delta'])}\n\n{after}"


def power_rows(results: Row) -> str:
    """The same for every set, without the average rules."""
    columns: list[Column] = [("set", "set"), ("error", "error", "{:.1%}"), ("risk", "risk", "{:.0%}"), ("rows", "rows")]
    return _power_table(results["rows"], columns, _OURS | _PEERS, results["delta"])


def drift(results: Row) -> str:
    methods = list(dict.fromkeys(r["method"] for r in results["rows"]))
    rows: dict[tuple[str, str], Row] = {}
    for r in results["rows"]:
        place = {"network": r["network"], "change": r["change"], "accuracy": r["accuracy"]}
        rows.setdefault((r["network"], r["change"]), place)[r["method"]] = _delay(r)
    early = {method: mean(r["false"] for r in results["rows"] if r["method"] == method) for method in methods}
    false = results["false_alarms"]
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
    columns: list[Column] = [
        *(("network", "network"), ("change", "change"), *((method, method) for method in methods)),
        ("accuracy", lambda r: "none accepted" if (a := r["accuracy"])["true"] is None else f"{a['true']:.0%}"),
        ("estimate", lambda r: _estimate(**r["accuracy"])),
    ]
    return f"{text}:\n\n{table(rows.values(), columns)}"


def _estimate(true: float | None, estimate: float, low: float, high: float) -> str:
    return "" if true is None else f"{estimate:.0%} ({low:.0%} to {high:.0%})"


def _delay(row: Row) -> str:
    found, delay = row["found"] or 0.0, row["delay"]
    share = "" if found == 1.0 else f" ({found:.0%})"
    return ("none" if delay is None and found == 0.0 else "later" if delay is None else f"{delay:.0f}") + share


def target(results: Row) -> str:
    """Broken promises and accepted shares for shifted rows."""
    rules = (("old", "old threshold"), ("covariate", '`"covariate"`'), ("label", '`"label"`'))
    columns: list[Column] = [("network", "network"), ("change", "change")]
    for rule, title in rules:
        columns += [(f"{title}: broken", f"{rule}.broken", "{:.0%}"), ("accepted", f"{rule}.accepted", "{:.0%}")]
        if rule != "old":
            columns.append(("refused", lambda r, rule=rule: f"{1 - r[rule]['promised']:.0%}"))
    return (
        f"{results['draws']} calibrations with {results['calibration']} rows, and {results['target']} unlabelled "
        f"target rows each, at a risk of {results['risk']:.0%}. *Broken*: calibrations with a larger risk in the "
        f"target; promised are at most {results['delta']:.0%}. *Accepted*: share of the rows, with 0 for a refusal. "
        "*Refused*: calibrations that accept nothing. The hardest class, or its regions, grow to "
        f"{results['grown']:.0%} of the rows; blur and noise fit neither assumption:\n\n"
        f"{table(results['rows'], columns)}"
    )


def set_sizes(results: Row) -> str:
    """Sizes of prediction sets beside those of other methods, and quality of probabilities."""
    methods = list(dict.fromkeys(r["method"] for r in results["sets"]))
    by_case: dict[tuple[str, float], Row] = {}
    for r in results["sets"]:
        by_case.setdefault((r["set"], r["coverage"]), {"set": r["set"], "coverage": r["coverage"]})[r["method"]] = r
    columns: list[Column] = [("network", "set"), ("coverage", "coverage", "{:.0%}")]
    columns += [(f"{method}: size", f"{method}.size", "{:.2f}") for method in methods]
    for method in ("LAC", "trust head"):
        columns.append((f"{method}: known empty", f"{method}.empty", "{:.0%}"))
        columns.append(("unknown", f"{method}.unknown_empty", "{:.0%}"))
    rows, levels = list(by_case.values()), results["coverages"]
    logs = {
        c: [math.log(r["trust head"]["size"] / r["LAC"]["size"]) for r in rows if r["coverage"] == c] for c in levels
    }
    ratios = [f"{math.exp(mean(found)):.3f}" for found in logs.values()]
    off = max(abs(r["covered"] - r["coverage"]) for r in results["sets"] if r["method"] == "trust head")
    scaled, ours = ([r for r in results["probabilities"] if r["method"] == name] for name in _PROBABILITIES)
    quality: list[Column] = [
        ("network", "0.set"),
        *((f"{name}: log loss", f"{i}.log_loss", "{:.3f}") for i, name in enumerate(_PROBABILITIES)),
        *((f"{name}: ECE", f"{i}.ece", "{:.3f}") for i, name in enumerate(_PROBABILITIES)),
    ]
    pairs = [{"0": one, "1": other} for one, other in zip(scaled, ours, strict=True)]
    return "\n\n".join(
        [
            f"Mean numbers of classes in a set, over {results['draws']} calibrations with {results['calibration']} "
            "known rows (or half of them), and shares of empty sets of known and of unknown rows. LAC, APS and RAPS "
            "rank all of these rows, the head four fifths of them. The sizes of the head are on average "
            f"{' and '.join(ratios)} times those of LAC at {' and '.join(f'{c:.0%}' for c in levels)}; "
            f"the covered share differs from the promised one by at most {off:.3f}:",
            table(rows, columns),
            "Probabilities of all classes, on the same draws:",
            table(pairs, quality),
        ]
    )


def risk_monitor(results: Row) -> str:
    """False alarms, and labels until a state."""
    false = ", ".join(f"{share:.1%} ({name})" for name, share in results["false_alarms"].items())
    columns: list[Column] = [
        *(("stream", "stream"), ("risk", "risk", "{:.0%}"), ("error", "error", "{:.1%}"), ("state", "state")),
        *((name, lambda r, name=name: _labels(r, name)) for name in ("even", "active")),
    ]
    return (
        f"Streams with the error at the risk that are ever broken, by the way of asking: {false} of "
        f"{results['streams']}; promised are at most {results['alpha']:.0%}.\n\n"
        f"Median number of labels until the state is reached, over {results['draws']} streams; {results['budget']} "
        f"rows of {results['batch']} are asked for, evenly (`explore=1`) or by `ask`'s default, in at most "
        f"{results['batches']} batches. In brackets the share of the streams that reach it, where it is not all, and "
        "the share that first reaches the opposite state, where there is one. The simulated confidences know the "
        f"probabilities of errors, or nothing:\n\n{table(results['rows'], columns)}"
    )


def _labels(row: Row, name: str) -> str:
    labels, reached, wrong = row[name], row[f"{name}_reached"], row[f"{name}_wrong"]
    shares = [f"{reached:.0%}"] if reached < 1.0 else []
    shares += [f"opposite {wrong:.0%}"] if wrong else []
    return ("later" if labels is None else f"{labels:.0f}") + (f" ({', '.join(shares)})" if shares else "")


def deployment(results: Row) -> str:
    """Missed breaks, delays, labels until the promise is restored, and what it accepts then."""
    false = results["false_alarms"]
    columns: list[Column] = [
        *(("network, risk", lambda r: f"{r['network']}, {r['risk']:.0%}"), ("change", "change")),
        ("no guard: wrong", lambda r: f"{r['true_risk']:.0%} of {r['plain_accepted']:.0%}"),
        ("missed", "guard.missed", "{:.0%}"),
        ("rows to alarm", lambda r: _or_later(r["guard"]["delay"])),
        ("MAPIE", lambda r: _or_later(r["mapie"]["delay"]) if "mapie" in r else ""),
        ("crepes", lambda r: _or_later(r["crepes"]["crepes composite"])),
        ("accepted before", lambda r: f"{r['guard']['accepted_before']:.0f} ({r['guard']['wrong_before']:.0f} wrong)"),
        ("labels", lambda r: _restored(r["guard"])),
        ("even labels", lambda r: _restored(r["even"])),
        ("accepted at the end", "guard.accepted", "{:.0%}"),
        ("back", lambda r: f"{r['guard']['back']:.0%} of {r['ordinary_accepted']:.0%}"),
    ]
    count, changed, back = (results["batch"] * results[name] for name in ("ordinary", "changed", "back"))
    early = mean(r["guard"]["early"] for r in results["rows"])
    return (
        f"False alarms: {false['alarms']:.1%} of {false['streams']} streams of {false['length']} rows without a "
        f"change, each with a calibration of its own; allowed are {results['alpha']:.0%} by the drift monitor and "
        f"{results['risk_alpha']:.0%} by the risk monitor. Of the deployments below, {early:.0%} had an alarm among "
        "their ordinary rows; those of a network share one calibration.\n\n"
        f"{results['runs']} deployments of every change: {count} ordinary rows, then {changed} changed ones, then "
        f"{back} ordinary ones in batches of {results['batch']}; {results['watching']} rows of a batch are asked for "
        f"while the promise holds, {results['restoring']} while it is suspended, and labels arrive {results['delay']} "
        "batches later. *No guard*: share of wrong labels among those that the head goes on accepting, and their share "
        "of the changed rows. *Missed*: deployments whose changed rows end with a broken promise and the state "
        "*holds*. *Rows to alarm*: median, rounded up to a batch; *crepes*: those of its composite martingale at the "
        f"level of the drift monitor, over {results['streams']} streams and not rounded; a stream that alarms before "
        "the change counts as later. *MAPIE*: its `RiskMonitoring` of the promised risk with as many labels of "
        f"accepted rows, at the level of the risk monitor, over {results['streams']} streams. *Accepted before*: "
        "changed rows that were accepted before the alarm. *Labels*: median until the promise was restored, and the "
        "share of the deployments in which it was; *even labels*: with rows chosen evenly from all rows. *Accepted at "
        "the end*: share of the last 1000 changed rows; *back*: of the last 1000 ordinary rows, and what the head "
        "accepts of such rows "
        f"without a guard:\n\n{table(results['rows'], columns)}"
    )


def _or_later(rows: float | None) -> str:
    return "later" if rows is None else f"{rows:.0f}"


def _restored(row: Row) -> str:
    labels = "" if row["labels"] is None else f"{row['labels']:.0f} "
    return "none" if not row["restored"] else f"{labels}({row['restored']:.0%})"


def novelties(results: Row) -> str:
    """False discovery rate and power, simulated and on the networks of the panel."""
    few, many = ([r for r in results["panel"] if r["novel"] == results[name]] for name in ("novel", "many"))

    def rate(row: Row) -> str:
        return f"{row['fdr']:.3f} ± {row['error']:.3f}"

    simulated: list[Column] = [
        ("ranked points", "points"),
        ("false discovery rate", rate),
        ("power", "power", "{:.2f}"),
        ("least number of novelties", "least"),
    ]
    panel: list[Column] = [
        ("network", "few.set"),
        ("unknowns", lambda r: f"{r['few']['unknowns']} ({r['few']['kind']})"),
        ("AUROC", "few.auroc", "{:.3f}"),
        (f"beyond {1 - results['far']:.0%}", "few.beyond", "{:.0%}"),
    ]
    for name, count in (("few", results["novel"]), ("many", results["many"])):
        panel.append((f"{count} novel: rate", lambda r, name=name: rate(r[name])))
        panel += [("power", f"{name}.power", "{:.2f}"), ("without estimate", f"{name}.plain_power", "{:.2f}")]
    pairs = [{"few": one, "many": other} for one, other in zip(few, many, strict=True)]
    return "\n\n".join(
        [
            f"Batches of {results['batch']} samples, fdr={results['fdr']:g}. Simulation, {results['draws']} draws of "
            f"normal scores, {results['novel']} novel ones shifted by {results['shift']:g}:",
            table(results["simulated"], simulated),
            f"Networks of the panel, {results['resplits']} calibrations with {results['panel'][0]['points']} ranked "
            f"points on random known rows, {results['batches']} batches each; the mean rate over all groups is "
            f"{mean(r['fdr'] for r in results['panel']):.3f}. *Beyond*: share of the unknowns that are stranger than "
            "this share of known rows. *Without estimate*: power of Benjamini and Hochberg's procedure alone:",
            table(pairs, panel),
        ]
    )

"""Tables of the trust panel and of the defaults of ``TrustHead.fit``, from their JSON."""

from __future__ import annotations

from typing import Any

from markdown_tables import load, table

KINDS = ("mistakes", "unknowns", "both", "calibration")
# The rows of our scores: the score for mistakes, for unknowns and for both.
OURS = {
    "SEP-C: confidence, strangeness, joint": ("confidence", "strangeness", "joint"),
    "SEP-C joint alone": ("joint", "joint", "joint"),
    "the paper's trust": ("trust", "trust", "trust"),
    "margin of the partition": ("margin", "margin", "margin"),
}


def summary() -> str:
    """How often the head and the best peer differ by more than noise, and how far it is behind at most."""
    results = load("trust_panel")
    rows, peers = results["rows"], results["peers"]
    sets = {row["set"] for row in rows}
    counted = counted_questions(results)
    calibration = [row for row in rows if row["question"] == "calibration"]
    both = [row for row in rows if _kind(row["question"]) == "both"]
    gaps = [row["theirs"] - row["ours"] for row in rows if _kind(row["question"]) == "unknowns"]
    above = [row for row in both if row["ours"] > 1.01 * row["all"]["max_softmax"]]
    return (
        f"The trust panel tests on {len(sets)} data sets whether the calibrated head ranks mistakes, unknowns, or both "
        f"better than the best of {len(peers)} other scores, chosen in hindsight for each question. Of "
        f"{sum(counted.values())} questions, the head is better in {counted['better']}, worse in {counted['worse']}, "
        f"and within noise in {counted['noise']} (the 95 % interval of a paired bootstrap contains zero). For unknowns "
        "it is behind the best score "
        f"of each set by {_mean(gaps):.3f} of AUROC in the mean and by {max(gaps):.3f} at worst. For mistakes and "
        f"unknowns together, the joint score is worse than max softmax by more than 1 % on {len(above)} of "
        f"{len(both)} sets. The mean calibration error is {_mean([row['ours'] for row in calibration]):.3f}; that "
        f"of temperature-scaled softmax is {_mean([row['theirs'] for row in calibration]):.3f}."
    )


def counted_questions(results: dict[str, Any]) -> dict[str, int]:
    """Number of questions in which the head is better or worse than the best peer, or within noise."""
    compared = [row for row in results["rows"] if row["interval"] is not None]
    noise = sum(_within_noise(row) for row in compared)
    better = sum(not _within_noise(row) and _better(row) for row in compared)
    return {"better": better, "worse": len(compared) - noise - better, "noise": noise}


def _within_noise(row: dict[str, Any]) -> bool:
    low, high = row["interval"]
    return bool(low <= 0 <= high)


def _better(row: dict[str, Any]) -> bool:
    """Whether ours is better than the best peer: a larger AUROC for unknowns, a smaller area otherwise."""
    return bool(row["ours"] > row["theirs"] if _kind(row["question"]) == "unknowns" else row["ours"] < row["theirs"])


def panel() -> str:
    """Ours beside the best peer on every set, sets of unknowns and shifts, and every score's mean over the sets."""
    results = load("trust_panel")
    names = list(dict.fromkeys(row["set"] for row in results["rows"]))
    header = ["set", "network", "mistakes: AURC x 1000", "ECE", "fit"]
    unknown = [row for row in results["rows"] if _kind(row["question"]) == "unknowns"]
    shifted = [row for row in results["rows"] if row["question"].startswith("mistakes: ")]
    return "\n\n".join(
        [
            "SEP-C and the best other score on each set:",
            table(header, [_line(results, name) for name in names]),
            "Unknowns, and mistakes and unknowns together:",
            table(
                ["set", "unknowns", "AUROC", "both: SCOD-AURC x 1000", "max softmax"],
                [_unknown_line(results, row) for row in unknown],
            ),
            "Known classes under shift:",
            table(
                ["set", "shift", "mistakes: AURC x 1000", "max softmax", "ECE"],
                [_shifted_line(results, row) for row in shifted],
            ),
            _caption(results),
            "Mean of each score over all sets:",
            _means(results),
        ]
    )


def _line(results: dict[str, Any], name: str) -> list[str]:
    rows = {row["question"]: row for row in results["rows"] if row["set"] == name}
    runs = [run for run in results["runs"] if run["set"] == name]
    return [
        name,
        f"{_mean([run['accuracy'] for run in runs]):.1%}",
        _cell(rows["mistakes"], ".3g", results["peers"]),
        _cell(rows["calibration"], ".3f"),
        f"{_mean([run['fit_s'] for run in runs]):.1f} s",
    ]


def _unknown_line(results: dict[str, Any], row: dict[str, Any]) -> list[str]:
    group = row["question"].partition(": ")[2]
    both = _row(results, row["set"], f"both: {group}")
    softmax = f"{both['all']['max_softmax']:.4g}"
    return [
        row["set"],
        f"{group} ({_distance(results, row)})",
        _cell(row, ".3f", results["peers"]),
        _cell(both, ".4g", results["peers"]),
        softmax,
    ]


def _row(results: dict[str, Any], name: str, question: str) -> dict[str, Any]:
    """The row of a set and a question."""
    return next(row for row in results["rows"] if row["set"] == name and row["question"] == question)


def _distance(results: dict[str, Any], row: dict[str, Any]) -> str:
    """Whether the unknowns of a question resemble the known classes."""
    near = next(run["near"] for run in results["runs"] if run["set"] == row["set"])
    return "near" if row["question"].partition(": ")[2] in near else "far"


def _shifted_line(results: dict[str, Any], row: dict[str, Any]) -> list[str]:
    group = row["question"].partition(": ")[2]
    calibration = _row(results, row["set"], f"calibration: {group}")
    return [
        row["set"],
        group,
        _cell(row, ".4g", results["peers"]),
        f"{row['all']['max_softmax']:.4g}",
        _cell(calibration, ".3f"),
    ]


def _cell(row: dict[str, Any], form: str, names: dict[str, str] | None = None) -> str:
    """Ours / the best peer; without names, the peer is always the same."""
    ours = f"{row['ours']:{form}}"
    mark = " †" if row["interval"] is not None and _within_noise(row) else ""
    name = "" if names is None else f" {names[row['best']]}"
    return f"{f'**{ours}**' if row['reached'] else ours} / {row['theirs']:{form}}{mark}{name}"


def _caption(results: dict[str, Any]) -> str:
    asked = {kind: [row for row in results["rows"] if _kind(row["question"]) == kind] for kind in KINDS}
    met = {kind: f"{sum(row['reached'] for row in rows)} of {len(rows)}" for kind, rows in asked.items()}
    gaps: dict[str, list[float]] = {"near": [], "far": []}
    for row in asked["unknowns"]:
        gaps[_distance(results, row)].append(row["theirs"] - row["ours"])
    behind = "; ".join(f"{kind} {_mean(found):.3f} and {max(found):.3f}" for kind, found in gaps.items())
    return (
        f"Each cell: ours / the best of {len(results['peers'])} peers, chosen in hindsight for the cell. † marks "
        "differences within noise: the 95 % interval of the difference (paired bootstrap) contains zero. Bold figures "
        f"reach the target. Targets: mistakes not above the best peer ({met['mistakes']}), unknowns within 0.005 of it "
        f"({met['unknowns']}), both strictly below it ({met['both']}), ECE not above that of scaled softmax "
        f"({met['calibration']}). Behind the best peer on unknowns, mean and worst: {behind}. Figures are means of "
        "five seeds with all defaults and nothing chosen per set. `fit` is CPU seconds of one thread. AURC is the area "
        "under the risk-coverage curve: the share of mistakes among accepted points, averaged over coverage. NAURC "
        "rescales AURC to 0 for the best ranking and 1 for a random one. SCOD-AURC counts unknowns as mistakes. AUROC "
        "is the probability that an unknown ranks below a known point. ECE is the expected calibration error, the gap "
        "between confidence and accuracy over 15 bins."
    )


def mean_of_score(results: dict[str, Any], score: str, kind: str, distance: str | None = None) -> float:
    """Mean figure of a score over all sets that ask a kind of question, of near or far unknowns if ``distance``."""
    return _mean(
        [
            figures[score]
            for run in results["runs"]
            for question, figures in run["figures"].items()
            if _kind(question) == kind
            and score in figures
            and (distance is None or (question.partition(": ")[2] in run["near"]) == (distance == "near"))
        ]
    )


def _means(results: dict[str, Any]) -> str:
    rows = OURS | {title: (key, key, key) for key, title in results["peers"].items()}
    lines = [
        [
            title,
            f"{mean_of_score(results, a, 'naurc'):.3f}",
            f"{mean_of_score(results, b, 'unknowns', 'near'):.3f}",
            f"{mean_of_score(results, b, 'unknowns', 'far'):.3f}",
            f"{mean_of_score(results, c, 'both'):.1f}",
        ]
        for title, (a, b, c) in rows.items()
    ]
    header = ["score", "mistakes: NAURC", "near unknowns: AUROC", "far unknowns: AUROC", "both: SCOD-AURC x 1000"]
    return table(header, lines)


def chosen_without() -> str:
    """Constants chosen without each network in turn, and that network's figures."""
    results = load("leave_one_out")
    lines = [
        [
            row["network"],
            row["choice"],
            f"{row['gap']:+.3f}",
            f"{row['default_gap']:+.3f}",
            f"{row['odds']:g}",
            f"{row['ratio']:.3f}",
            f"{row['default_ratio']:.3f}",
        ]
        for row in results["rows"]
    ]
    header = [
        "network left out",
        "kinds and tail chosen on the others",
        "behind the best score",
        "the same with the defaults",
        "prior odds",
        "joint / max softmax",
        "the same with the defaults",
    ]
    grid = [[row["choice"], f"{row['gap']:.4f}", f"{row['worst']:.3f}"] for row in results["grid"]]
    odds = [
        [f"{row['odds']:g}", f"{row['ratio']:.3f}", f"{row['to_best']:.3f}", f"{row['worst']:.3f}", f"{row['above']}"]
        for row in results["odds"]
    ]
    return "\n\n".join(
        [
            table(header, lines),
            f"Mean of the networks left out: {results['mean_gap']:+.4f} behind the best score (defaults "
            f"{results['default_mean_gap']:+.4f}). All choices, means of {results['sets']} sets of unknowns:",
            table(["kinds and tail", "mean AUROC behind the best score", "worst"], grid),
            "Prior odds of the joint score, SCOD-AURC relative to max softmax and to the best score of each set:",
            table(["prior odds", "to max softmax", "to the best score", "worst to max softmax", "sets above it"], odds),
        ]
    )


def defaults() -> str:
    """The effect of each choice of ``TrustHead.fit`` on every figure."""
    results = load("head_defaults")
    rows = [
        [
            ", ".join(f"`{key}={value!r}`" for key, value in row["choice"].items()) or "the defaults",
            f"{row['mean']['dim']:.0f}",
            f"{row['mean']['ellipsoids']:.0f}",
            f"{row['mean']['accuracy']:.1%}",
            *(f"{row['mean'][name]:.3f}" for name in ("auroc_of_trust", "auroc_of_margin")),
            f"{row['mean']['mistakes']:.2f}",
            f"{row['mean']['unknowns']:.3f}",
            f"{row['mean']['both']:.1f}",
            f"{row['mean']['seconds']:.1f} s",
        ]
        for row in results["rows"]
    ]
    header = [
        "choice",
        "dims",
        "ellipsoids",
        "own accuracy",
        "trust: AUROC",
        "margin: AUROC",
        "confidence: AURC x 1000",
        "unknowns: AUROC",
        "joint: SCOD-AURC x 1000",
        "fit",
    ]
    text = f"Each choice of `TrustHead.fit` varied alone, means of {len(results['cases'])} cases with unknown classes"
    found = results.get("many_classes", [])
    many = [
        [
            f"{row['classes']:.0f}",
            f"{row['dim']:.0f}{' (default)' if row['default'] else ''}",
            f"{row['ellipsoids']:.0f}",
            f"{row['accuracy']:.1%}",
            f"{row['outside']:.1%}",
            f"{row['seconds']:.1f} s",
        ]
        for row in found
    ]
    both = f"{text}:\n\n{table(header, rows)}"
    if many:
        titles = ["classes", "dims", "ellipsoids", "own accuracy", "points in no ellipsoid", "fit"]
        both += f"\n\nSynthetic classes of 50 points in 64 features, by dimension:\n\n{table(titles, many)}"
    return both


def _kind(question: str) -> str:
    return question.partition(":")[0]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)

"""Tables of the trust panel and of the defaults of ``TrustHead.fit``, from their JSON."""

from __future__ import annotations

from typing import Any

from markdown_tables import load, table
from peer_names import PEERS

KINDS = ("mistakes", "unknowns", "both", "calibration")
# The rows of our scores: the score for mistakes, for unknowns and for both.
OURS = {
    "SEP-C: confidence, strangeness, joint": ("confidence", "strangeness", "joint"),
    "SEP-C joint alone": ("joint", "joint", "joint"),
    "the paper's trust": ("trust", "trust", "trust"),
    "margin of the partition": ("margin", "margin", "margin"),
}


def summary() -> str:
    """How often the head and the best peer differ by more than noise."""
    results = load("trust_panel")
    sets = {row["set"] for row in results["rows"]}
    calibration = [row for row in results["rows"] if _kind(row["question"]) == "calibration"]
    compared = [row for row in results["rows"] if row["interval"] is not None]
    others = [row for row in results["rows"] if row["interval"] is None and row not in calibration]
    noise = sum(_within_noise(row) for row in compared)
    better = sum(not _within_noise(row) and _better(row) for row in compared)
    without = sum(_better(row) for row in others)
    return (
        f"The trust panel tests on {len(sets)} data sets whether the calibrated head ranks mistakes, unknowns, or both "
        f"better than the best of {len(PEERS)} other scores, chosen in hindsight for each question. Of {len(compared)} "
        f"questions, the head is better in {better}, worse in {len(compared) - noise - better}, and within noise in "
        f"{noise} (the 95 % interval of a paired bootstrap contains zero). On noisy pictures, which have no "
        f"interval, it is better in {without} of {len(others)}. Its calibration error is not above that of "
        f"temperature-scaled softmax on {sum(row['reached'] for row in calibration)} of {len(calibration)} sets."
    )


def _within_noise(row: dict[str, Any]) -> bool:
    low, high = row["interval"]
    return bool(low <= 0 <= high)


def _better(row: dict[str, Any]) -> bool:
    """Whether ours is better than the best peer: a larger AUROC for unknowns, a smaller area otherwise."""
    return bool(row["ours"] > row["theirs"] if _kind(row["question"]) == "unknowns" else row["ours"] < row["theirs"])


def panel() -> str:
    """Ours beside the best peer on every set, and every score's mean over the sets."""
    results = load("trust_panel")
    names = list(dict.fromkeys(row["set"] for row in results["rows"]))
    header = ["set", "network", "mistakes: AURC x 1000", "unknowns: AUROC", "both: SCOD-AURC x 1000", "ECE", "fit"]
    return "\n\n".join(
        [
            "SEP-C and the best other score on each set:",
            table(header, [_line(results, name) for name in names]),
            _caption(results),
            "Mean of each score over all sets:",
            _means(results),
        ]
    )


def _line(results: dict[str, Any], name: str) -> list[str]:
    rows = [row for row in results["rows"] if row["set"] == name]
    runs = [run for run in results["runs"] if run["set"] == name]

    def cells(kind: str, form: str) -> str:
        return "; ".join(_cell(row, form, PEERS) for row in rows if _kind(row["question"]) == kind)

    return [
        name,
        f"{_mean([run['accuracy'] for run in runs]):.1%}",
        cells("mistakes", ".3g"),
        cells("unknowns", ".3f"),
        cells("both", ".4g"),
        cells("calibration", ".3f").replace(f" {PEERS['scaled_softmax']}", ""),
        f"{_mean([run['fit_s'] for run in runs]):.1f} s",
    ]


def _cell(row: dict[str, Any], form: str, names: dict[str, str]) -> str:
    ours = f"{row['ours']:{form}}"
    mark = " †" if row["interval"] is not None and _within_noise(row) else ""
    return f"{f'**{ours}**' if row['reached'] else ours} / {row['theirs']:{form}}{mark} {names[row['best']]}"


def _caption(results: dict[str, Any]) -> str:
    asked = {kind: [row["reached"] for row in results["rows"] if _kind(row["question"]) == kind] for kind in KINDS}
    met = {kind: f"{sum(answers)} of {len(answers)}" for kind, answers in asked.items()}
    return (
        f"Each cell: ours / the best of {len(PEERS)} peers, chosen in hindsight for the cell. † marks differences "
        "within noise: the 95 % interval of the difference (paired bootstrap) contains zero. Bold figures reach the "
        f"target. Targets: mistakes not above the best peer ({met['mistakes']}), unknowns within 0.005 of it "
        f"({met['unknowns']}), both strictly below it ({met['both']}), ECE not above that of scaled softmax "
        f"({met['calibration']}). The second figure of Fashion-MNIST for mistakes is for noisy pictures; its unknowns "
        "are MNIST and notMNIST. Figures are means of five seeds with all defaults and nothing chosen per set. `fit` "
        "is CPU seconds of one thread. AURC is the area under the risk-coverage curve: the share of mistakes among "
        "accepted points, averaged over coverage. NAURC rescales AURC to 0 for the best ranking and 1 for a random "
        "one. SCOD-AURC counts unknowns as mistakes. AUROC is the probability that an unknown ranks below a known "
        "point. ECE is the expected calibration error, the gap between confidence and accuracy over 15 bins."
    )


def _means(results: dict[str, Any]) -> str:
    def mean(score: str, kind: str) -> float:
        questions = (item for run in results["runs"] for item in run["figures"].items())
        return _mean([figures[score] for question, figures in questions if _kind(question) == kind])

    rows = OURS | {title: (key, key, key) for key, title in PEERS.items()}
    lines = [
        [title, f"{mean(a, 'naurc'):.3f}", f"{mean(b, 'unknowns'):.3f}", f"{mean(c, 'both'):.1f}"]
        for title, (a, b, c) in rows.items()
    ]
    return table(["score", "mistakes: NAURC", "unknowns: AUROC", "both: SCOD-AURC x 1000"], lines)


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

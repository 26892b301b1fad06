"""The tables of the trust panel and of the head's defaults, from their JSON."""

from __future__ import annotations

from typing import Any

from markdown_tables import load, table
from peer_names import PEERS

KINDS = ("mistakes", "unknowns", "both", "calibration")
# Which of our scores answers each question, and single ones for all of them.
OURS = {
    "SEP-C: confidence, strangeness, joint": ("confidence", "strangeness", "joint"),
    "SEP-C joint alone": ("joint", "joint", "joint"),
    "the paper's trust": ("trust", "trust", "trust"),
    "margin of the partition": ("margin", "margin", "margin"),
}


def panel() -> str:
    """Ours beside the best peer on every set, and every score's mean over the sets."""
    results = load("trust_panel")
    names = list(dict.fromkeys(row["set"] for row in results["rows"]))
    header = ["set", "network", "mistakes: AURC x 1000", "unknowns: AUROC", "both: SCOD-AURC x 1000", "ECE", "fit"]
    text = "Against the best of the others, set by set"
    return "\n\n".join(
        [
            f"{text} (`{results['command']}`):",
            table(header, [_line(results, name) for name in names]),
            _caption(results),
            "Means over all sets, one score for everything:",
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
    open_question = row["interval"] is not None and row["interval"][0] < 0 < row["interval"][1]
    mark = " †" if open_question else ""
    return f"{f'**{ours}**' if row['reached'] else ours} / {row['theirs']:{form}}{mark} {names[row['best']]}"


def _caption(results: dict[str, Any]) -> str:
    asked = {kind: [row["reached"] for row in results["rows"] if _kind(row["question"]) == kind] for kind in KINDS}
    met = {kind: f"{sum(answers)} of {len(answers)}" for kind, answers in asked.items()}
    return (
        f"Ours / the best of {len(PEERS)} peers, chosen in hindsight for every cell; † where the 95 % "
        "interval of the difference (paired bootstrap) holds zero. Bold where the target is reached. Targets: mistakes "
        f"not above the best peer ({met['mistakes']}), unknowns within 0.005 of it ({met['unknowns']}), both strictly "
        f"below it ({met['both']}), ECE not above scaled softmax's ({met['calibration']}). Fashion-MNIST's second "
        "figure for mistakes is for noisy pictures, its unknowns are MNIST and notMNIST. Means of five seeds, all "
        "defaults, nothing chosen per set; CPU seconds of one thread. AURC is the area under the risk-coverage curve: "
        "the share of mistakes among what is kept, averaged over how much is kept; NAURC puts it between the best "
        "ranking (0) and a random one (1), SCOD-AURC counts unknowns as mistakes. AUROC is the chance that an unknown "
        "ranks below a known point. ECE is the expected calibration error, the gap between confidence and accuracy "
        "over 15 bins."
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
    """What each choice of ``TrustHead.fit`` does to every figure."""
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
    text = f"What the choices of `TrustHead.fit` do, each alone, means of {len(results['cases'])} open cases"
    return f"{text} (`{results['command']}`):\n\n{table(header, rows)}"


def _kind(question: str) -> str:
    return question.partition(":")[0]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)

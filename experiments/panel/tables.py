"""Tables of docs/panel.md: trust panel, held-out networks, ablation, constants, kinds of evidence, OpenOOD."""

from __future__ import annotations

from collections.abc import Callable
from statistics import stdev
from typing import NamedTuple

from experiments.table_writer import Column, Row, Table, interval, mean, spaced, table, text_table

KINDS = ("mistakes", "unknowns", "both", "calibration")
# The panel's networks, by the names of their sets; its other sets are tables of numbers.
NETWORKS = {
    "fashion": "Fashion-MNIST",
    "clinc150": "CLINC150",
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
}
OPEN = ", open"
# Networks that nobody tuned on, by the names of their feature files.
HELD_OUT = {
    "cifar10_resnet20": "CIFAR-10, ResNet-20",
    "cifar10_resnet56": "CIFAR-10, ResNet-56",
    "mnist_lenet": "MNIST, LeNet",
    "mnist6_lenet": "MNIST, six digits, LeNet",
    "cifar100_lite2": "CIFAR-100, EfficientNet-Lite2",
    "tinyimagenet_mobilenet": "Tiny ImageNet, MobileNetV2",
    "textures_lite0": "textures, EfficientNet-Lite0",
    "scenes_mobilenet": "scenes, MobileNetV2",
    "clinc150_wordllama": "CLINC150, WordLlama",
    "spoken_mobilenet": "spoken digits, MobileNetV2",
    "environment_mobilenet": "environmental sounds, MobileNetV2",
}


class Question(NamedTuple):
    """A question of the panel: its kind of figure, our score for it, and whether a larger figure is better.

    ``group`` says which rows it is about: the test rows (""), near or far unknowns, or all unknowns.
    """

    title: str
    kind: str
    ours: str
    larger: bool
    unit: str
    form: str
    group: str = ""


QUESTIONS = (
    Question("mistakes", "naurc", "confidence", False, "NAURC", ".3f"),
    Question("near unknowns", "unknowns", "nonconformity", True, "AUROC", ".3f", "near"),
    Question("far unknowns", "unknowns", "nonconformity", True, "AUROC", ".3f", "far"),
    Question("both", "both", "joint", False, "SCOD-AURC x 1000", ".1f", "all"),
    Question("calibration", "calibration", "confidence", False, "ECE", ".3f"),
)
# The rows of our scores: the score for mistakes, for unknowns and for both.
OURS = {
    "SEP-C: confidence, nonconformity, joint": ("confidence", "nonconformity", "joint"),
    "SEP-C joint alone": ("joint", "joint", "joint"),
    "the paper's trust": ("trust", "trust", "trust"),
    "margin of the partition": ("margin", "margin", "margin"),
}
# A change of the mean counts as clear beyond this number of standard errors.
CLEAR = 2.0
# Least difference of a worst gap that the text names: smaller ones do not show in the panel's table.
VISIBLE = 0.01


def summary(results: Row) -> str:
    """How often the head and the best peer differ by more than noise, and how far it is behind at most."""
    rows, peers = results["rows"], results["peers"]
    counted = counted_questions(results)
    calibration = [row for row in rows if row["question"] == "calibration"]
    both = [row for row in rows if _kind(row["question"]) == "both"]
    gaps = [row["theirs"] - row["ours"] for row in rows if _kind(row["question"]) == "unknowns"]
    above = [row for row in both if row["ours"] > 1.01 * row["all"]["max_softmax"]]
    return (
        f"The trust panel tests on {len({row['set'] for row in rows})} data sets whether the calibrated head ranks "
        f"mistakes, unknowns, or both better than the best of {len(peers)} other scores, chosen in hindsight for each "
        f"question. Of {sum(counted.values())} questions, the head is better in {counted['better']}, worse in "
        f"{counted['worse']}, and within noise in {counted['noise']} (the 95 % interval of a paired bootstrap contains "
        f"zero). For unknowns it is behind the best score of each set by {mean(gaps):.3f} of AUROC in the mean and by "
        f"{max(gaps):.3f} at worst. For mistakes and unknowns together, the joint score is worse than max softmax by "
        f"more than 1 % on {len(above)} of {len(both)} sets. The mean calibration error is "
        f"{mean(row['ours'] for row in calibration):.3f}; that of temperature-scaled softmax is "
        f"{mean(row['theirs'] for row in calibration):.3f}."
    )


def counted_questions(results: Row) -> dict[str, int]:
    """Number of questions in which the head is better or worse than the best peer, or within noise."""
    compared = [row for row in results["rows"] if row["interval"] is not None]
    noise = sum(_within_noise(row) for row in compared)
    better = sum(not _within_noise(row) and _better(row) for row in compared)
    return {"better": better, "worse": len(compared) - noise - better, "noise": noise}


def _within_noise(row: Row) -> bool:
    low, high = row["interval"]
    return bool(low <= 0 <= high)


def _better(row: Row) -> bool:
    """Whether ours is better than the best peer: a larger AUROC for unknowns, a smaller area otherwise."""
    return bool(row["ours"] > row["theirs"] if _kind(row["question"]) == "unknowns" else row["ours"] < row["theirs"])


def panel(results: Row) -> str:
    """Ours beside the best peer on every set, sets of unknowns and shifts, and every score's mean over the sets."""
    asked = {(row["set"], row["question"]): row for row in results["rows"]}

    def compared(form: str, kind: str = "", peer: bool = True) -> Callable[[Row], str]:
        """Ours / the best peer, of another question about the same rows if ``kind``; its name if ``peer``."""

        def text(row: Row) -> str:
            if kind:
                _, colon, group = row["question"].partition(": ")
                row = asked[row["set"], f"{kind}{colon}{group}"]
            ours = f"{row['ours']:{form}}"
            mark = " †" if row["interval"] is not None and _within_noise(row) else ""
            name = f" {results['peers'][row['best']]}" if peer else ""
            return f"{f'**{ours}**' if row['reached'] else ours} / {row['theirs']:{form}}{mark}{name}"

        return text

    def of_runs(name: str) -> Callable[[Row], float]:
        return lambda row: mean(run[name] for run in results["runs"] if run["set"] == row["set"])

    def softmax(row: Row) -> float:
        group = row["question"].partition(": ")[2]
        found = asked[row["set"], f"both: {group}"] if _kind(row["question"]) == "unknowns" else row
        return float(found["all"]["max_softmax"])

    sets: list[Column] = [
        ("set", "set"),
        ("network", of_runs("accuracy"), "{:.1%}"),
        ("mistakes: AURC x 1000", compared(".3g")),
        ("ECE", compared(".3f", "calibration", peer=False)),
        ("fit", of_runs("fit_s"), "{:.1f} s"),
    ]
    unknowns: list[Column] = [
        ("set", "set"),
        ("unknowns", lambda r: f"{r['question'].partition(': ')[2]} ({_distance(results, r)})"),
        ("AUROC", compared(".3f")),
        ("both: SCOD-AURC x 1000", compared(".4g", "both")),
        ("max softmax", softmax, "{:.4g}"),
    ]
    shifts: list[Column] = [
        ("set", "set"),
        ("shift", lambda r: r["question"].partition(": ")[2]),
        ("mistakes: AURC x 1000", compared(".4g")),
        ("max softmax", softmax, "{:.4g}"),
        ("ECE", compared(".3f", "calibration", peer=False)),
    ]
    rows = results["rows"]
    return "\n\n".join(
        [
            "SEP-C and the best other score on each set:",
            table([row for row in rows if row["question"] == "mistakes"], sets),
            "Unknowns, and mistakes and unknowns together:",
            table([row for row in rows if _kind(row["question"]) == "unknowns"], unknowns),
            "Known classes under shift:",
            table([row for row in rows if row["question"].startswith("mistakes: ")], shifts),
            _caption(results),
        ]
    )


def _distance(results: Row, row: Row) -> str:
    """Whether the unknowns of a question resemble the known classes."""
    near = next(run["near"] for run in results["runs"] if run["set"] == row["set"])
    return "near" if row["question"].partition(": ")[2] in near else "far"


def _caption(results: Row) -> str:
    asked = {kind: [row for row in results["rows"] if _kind(row["question"]) == kind] for kind in KINDS}
    met = {kind: f"{sum(row['reached'] for row in rows)} of {len(rows)}" for kind, rows in asked.items()}
    gaps: dict[str, list[float]] = {"near": [], "far": []}
    for row in asked["unknowns"]:
        gaps[_distance(results, row)].append(row["theirs"] - row["ours"])
    behind = "; ".join(f"{kind} {mean(found):.3f} and {max(found):.3f}" for kind, found in gaps.items())
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


def groups(results: Row) -> str:
    """The networks and the tables of numbers apart: ours, the best other score, the difference and the rank."""
    texts = []
    for networks in (True, False):
        columns: list[Column] = [
            ("question", lambda q: f"{q['question'].title}: {q['question'].unit}"),
            *FIGURES,
            ("better, worse, within noise", lambda q: ", ".join(map(str, q["counts"])) if any(q["counts"]) else ""),
        ]
        texts += [f"{_named_sets(results, networks)}:", table(answers(results, networks), columns)]
        texts.append("Mean of each score:")
        texts.append(scores_of_group(results, networks))
    return "\n\n".join(texts)


def answers(results: Row, networks: bool) -> list[Row]:
    """One row for each question that the networks, or the tables of numbers, ask.

    A network counts once: its figure is the mean over its seeds and unknowns, and, for a table, over the network of all
    classes and that of three in five. The best other score has the best mean; the interval is over the networks.
    """
    rows = []
    for question in QUESTIONS:
        found = by_network(results, networks, question)
        if not found:
            continue
        scores = set.intersection(*(set(values) for values in found.values()))
        means = {score: mean(values[score] for values in found.values()) for score in scores}
        peers = {score: means[score] for score in results["peers"] if score in means}
        best = (max if question.larger else min)(peers, key=lambda score: peers[score])
        ours = means[question.ours]
        ahead = sum((value > ours) if question.larger else (value < ours) for value in peers.values())
        rows.append(
            {
                "question": question,
                "ours": ours,
                "theirs": peers[best],
                "title": results["peers"][best],
                "softmax": peers["max_softmax"],
                "change": interval([values[question.ours] - values[best] for values in found.values()]),
                "rank": 1 + ahead,
                "scores": 1 + len(peers),
                "networks": len(found),
                "counts": _counts(results, networks, question),
            }
        )
    return rows


def by_network(results: Row, networks: bool, question: Question) -> dict[str, dict[str, float]]:
    """The figure of every score on every network, or table of numbers; a score without a value is left out."""
    found: dict[str, dict[str, list[float]]] = {}
    for run in results["runs"]:
        name = run["set"].removesuffix(OPEN)
        for text, figures in run["figures"].items():
            if (name in NETWORKS) is networks and _asks(text, run["near"], question):
                for score, value in figures.items():
                    found.setdefault(name, {}).setdefault(score, []).append(value)
    return {name: {score: mean(values) for score, values in scores.items()} for name, scores in found.items()}


def _asks(text: str, near: list[str], question: Question) -> bool:
    """Whether the text of a question of a run is about the rows of a question here."""
    kind, _, group = text.partition(": ")
    distance = "" if not group else "near" if group in near else "far"
    return kind == question.kind and (question.group == distance or (question.group == "all" and bool(group)))


def _counts(results: Row, networks: bool, question: Question) -> tuple[int, int, int]:
    """How often the head is better than the best peer of each set and question, worse, and within noise."""
    kind = "mistakes" if question.kind == "naurc" else question.kind
    near = {run["set"]: run["near"] for run in results["runs"]}
    rows = [
        row
        for row in results["rows"]
        if (row["set"].removesuffix(OPEN) in NETWORKS) is networks
        and row["interval"] is not None
        and _asks(row["question"], near[row["set"]], question._replace(kind=kind))
    ]
    noise = sum(_within_noise(row) for row in rows)
    better = sum(not _within_noise(row) and _better(row) for row in rows)
    return better, len(rows) - noise - better, noise


def set_names(results: Row, networks: bool) -> list[str]:
    """The networks or the tables of a result, by name."""
    names = dict.fromkeys(run["set"].removesuffix(OPEN) for run in results["runs"])
    return [NETWORKS.get(name, name) for name in names if (name in NETWORKS) is networks]


def _named_sets(results: Row, networks: bool) -> str:
    """How many networks or tables, and which."""
    names = set_names(results, networks)
    title = "networks" if networks else "tables of numbers, with small networks trained on them"
    return f"{len(names)} {title} ({', '.join(names)})"


def figure(row: Row, name: str) -> str:
    """A figure, bold if it is the better one of ours and the best other's."""
    text = f"{row[name]:{row['question'].form}}"
    best = (max if row["question"].larger else min)(row["ours"], row["theirs"])
    return f"**{text}**" if row[name] == best else text


def difference(row: Row) -> str:
    """Ours less the best other score, with its interval."""
    return "{:+{form}} [{:+{form}}, {:+{form}}]".format(*row["change"], form=row["question"].form)


def of_parts(results: Row) -> Row:
    """A result with the rows and runs of its parts together."""
    return results | {key: [row for part in results["parts"].values() for row in part[key]] for key in ("rows", "runs")}


def held_out(results: Row) -> str:
    """Networks that nobody tuned on: a row for every question, a row for every network, and where the head loses."""
    results = of_parts(results)
    rows = answers(results, networks=False)
    questions: list[Column] = [
        ("question", lambda q: f"{q['question'].title}: {q['question'].unit}"),
        *FIGURES,
        ("networks", "networks"),
        ("better, worse, within noise", lambda q: ", ".join(map(str, q["counts"])) if any(q["counts"]) else ""),
    ]
    own = {question.title: by_network(results, False, question) for question in QUESTIONS}

    def compared(question: Question) -> Callable[[Row], str]:
        """Ours / the best other score of this network; empty if it has no such rows."""

        def text(row: Row) -> str:
            found = own[question.title].get(row["set"])
            if found is None:
                return ""
            best = (max if question.larger else min)(
                (name for name in results["peers"] if name in found), key=lambda name: found[name]
            )
            pair = {"question": question, "ours": found[question.ours], "theirs": found[best]}
            return f"{figure(pair, 'ours')} / {figure(pair, 'theirs')} {results['peers'][best]}"

        return text

    def promised(name: str) -> Callable[[Row], str]:
        """Accepted share of known and of unknown rows, and in how many runs the promise is broken."""

        def text(row: Row) -> str:
            runs = [run["promise"][name] for run in row["runs"] if run["promise"]]
            if not runs:
                return ""
            unknowns = [run["unknowns"] for run in runs if run["unknowns"] is not None]
            others = f", unknown {mean(unknowns):.0%}" if unknowns else ""
            return f"{mean(run['accepted'] for run in runs):.1%}{others}; {sum(run['broken'] for run in runs)}"

        return text

    columns: list[Column] = [
        ("network", lambda r: HELD_OUT.get(r["set"], r["set"])),
        ("accuracy", lambda r: mean(run["accuracy"] for run in r["runs"]), "{:.1%}"),
        ("rows to fit, calibrate, test", lambda r: ", ".join(spaced(n) for n in r["runs"][0]["rows"].values())),
        *((f"{q.title}: {q.unit}", compared(q)) for q in QUESTIONS if q.kind != "calibration"),
        ("accepted, broken: ours", promised("head")),
        ("accepted, broken: max softmax", promised("softmax")),
    ]
    names = dict.fromkeys(run["set"] for run in results["runs"])
    networks = [{"set": name, "runs": [run for run in results["runs"] if run["set"] == name]} for name in names]
    return "\n\n".join(
        [
            f"{len(names)} networks, {len(results['seeds'])} seeds each:",
            table(rows, questions),
            losses(rows),
            "Each network, ours / the best other score of this network and question:",
            table(networks, columns),
            "Bold is the better figure. Accepted: the share of known test rows, and of unknown rows, at a promised "
            f"share of wrong labels of {results['share']:g} times the network's error (delta {results['delta']:g}), "
            f"then in how many of the {len(results['seeds'])} seeds the accepted test rows break it. A seed redraws "
            "the calibration and the test rows from both together.",
        ]
    )


def losses(rows: list[Row]) -> str:
    """The questions in which the head has a worse mean than the best other score, and those where that is clear."""
    behind = []
    for row in rows:
        change, low, high = (value if row["question"].larger else -value for value in row["change"])
        if change < 0:
            clear = "clearly" if max(low, high) < 0 else "within the interval"
            behind.append(f"{row['question'].title} ({clear})")
    if not behind:
        return "In the mean the head is behind the best other score in none of the questions."
    return f"**In the mean the head is behind the best other score in: {', '.join(behind)}.**"


def scores_of_group(results: Row, networks: bool) -> str:
    """The mean figure of every score over the networks or the tables of numbers."""
    asked = [q for q in QUESTIONS if q.kind != "calibration" and by_network(results, networks, q)]
    found = {question: by_network(results, networks, question) for question in asked}
    titles = OURS | {title: (key, key, key) for key, title in results["peers"].items()}
    place = {"naurc": 0, "unknowns": 1, "both": 2}
    lines = []
    for title, keys in titles.items():
        cells = []
        for question, values in found.items():
            key = keys[place[question.kind]]
            known = [scores[key] for scores in values.values() if key in scores]
            cells.append(f"{mean(known):{question.form}}" if len(known) == len(values) else "")
        if any(cells):
            lines.append([title, *cells])
    return text_table(["score", *(f"{q.title}: {q.unit}" for q in asked)], lines)


FIGURES: list[Column] = [
    ("ours", lambda row: figure(row, "ours")),
    ("best other in the mean", lambda row: f"{figure(row, 'theirs')} {row['title']}"),
    ("max softmax", lambda row: figure(row, "softmax")),
    ("ours less the best other, 95 %", lambda row: difference(row)),
    ("rank", lambda row: f"{row['rank']} of {row['scores']}"),
]
ABLATION: list[Column] = [
    ("variant", "variant"),
    ("mistakes: NAURC", lambda r: _with_interval(r["mistakes"], ".4f")),
    ("unknowns: AUROC", lambda r: _with_interval(r["unknowns"], ".4f")),
    ("both: SCOD-AURC x 1000", lambda r: _with_interval(r["both"], ".2f")),
]
LAYERS: list[Column] = [
    ("variant", lambda r: r["variant"].replace("layer layer", "layer")),
    ("near unknowns: AUROC", lambda r: _with_interval(r["near"], ".3f")),
    ("far unknowns: AUROC", lambda r: _with_interval(r["far"], ".3f")),
]
# The variants of the ablation that replace the partition; the last one leaves out the densities too.
REPLACED = ("one ellipsoid per class", "k-means pieces", "no partition and no densities")
# Figures of the ablation, how the text names them, and whether a larger value is better.
ABLATED = {"mistakes": ("NAURC", ".4f", False), "unknowns": ("AUROC", ".4f", True), "both": ("SCOD-AURC", ".2f", False)}


def _with_interval(figure: Row, form: str) -> str:
    """A change with its interval; the mean itself where nothing changed. Bold: the interval does not contain zero."""
    change, low, high = figure["change"]
    if low == high == 0.0:
        return f"{figure['mean']:{form}}"
    text = f"{change:+{form}} [{low:+{form}}, {high:+{form}}]"
    return f"**{text}**" if low > 0.0 or high < 0.0 else text


def ablation(results: Row) -> str:
    """Changes of the figures by variant, what follows for the partition, and the layers."""
    general = [row for row in results["rows"] if "layer" not in row["variant"]]
    networks = list(dict.fromkeys(run["set"].removesuffix(OPEN) for run in results["runs"]))
    return "\n\n".join(
        [
            f"Change from the head, mean over {general[0]['networks']} networks ({', '.join(networks)}), "
            f"{len(results['seeds'])} seeds each; in brackets the 95 % interval over the networks, bold where it does "
            "not contain zero. Figures without a sign are unchanged. A lower NAURC or SCOD-AURC and a higher AUROC is "
            "better:",
            table(general, ABLATION),
            partition_verdict(results),
            "The network with four layers, intervals over the splits of its calibration rows:",
            table(results["layers"], LAYERS),
        ]
    )


def partition_verdict(results: Row) -> str:
    """What the partition adds to the calibrated scores, in words that follow from the numbers."""
    rows = {row["variant"]: row for row in results["rows"]}
    clear: dict[str, list[str]] = {"worse": [], "better": []}
    losses = {}
    for variant in REPLACED:
        for figure, (unit, form, larger) in ABLATED.items():
            change, low, high = rows[variant][figure]["change"]
            if low > 0.0 or high < 0.0:
                clear["better" if (change > 0.0) is larger else "worse"].append(f"{variant} ({figure})")
            if variant == REPLACED[0]:
                losses[unit] = f"{max(0.0, -low if larger else high):{form}} of {unit}"
    divided = {run["set"]: run["divided"] for run in results["runs"]}
    some = sum(share > 0 for share in divided.values())
    lines = [
        f"The partition divides at least one class into pieces on {some} of {len(divided)} networks; on the others it "
        "changes nothing.",
        *(f"Clearly {name} without it: {', '.join(variants) or 'nothing'}." for name, variants in clear.items()),
    ]
    if not any(text.startswith(REPLACED[:2]) for text in clear["worse"]):
        lines.append(
            "**So the pieces of the partition do not measurably improve the calibrated scores: one ellipsoid per "
            "class, or pieces by k-means, do as well. The partition serves explanations, the paper's trust and "
            "promises by region.** By the intervals, one ellipsoid per class loses at most "
            f"{', '.join(losses.values())} (x 1000) in the mean."
        )
    return " ".join(lines)


CHOSEN: list[Column] = [
    ("network left out", "network"),
    ("kinds and weighted sum chosen on the others", "choice"),
    ("behind the best score", "gap", "{:+.3f}"),
    ("the same with the defaults", "default_gap", "{:+.3f}"),
    ("prior odds", "odds"),
    ("joint / max softmax", "ratio", "{:.3f}"),
    ("the same with the defaults", "default_ratio", "{:.3f}"),
]
GRID: list[Column] = [
    ("kinds and weighted sum", "choice"),
    ("mean AUROC behind the best score", "gap", "{:.4f}"),
    ("worst", "worst", "{:.3f}"),
]
ODDS: list[Column] = [
    ("prior odds", "odds"),
    ("to max softmax", "ratio", "{:.3f}"),
    ("to the best score", "to_best", "{:.3f}"),
    ("worst to max softmax", "worst", "{:.3f}"),
    ("sets above it", "above"),
    ("accepted rows lost", "price", "{:.1%}"),
    ("at most", "most", "{:.1%}"),
]
WEAK: list[Column] = [
    ("weak network", "network"),
    ("error", "error", "{:.0%}"),
    ("behind the best kind", "mixed", "{:.3f}"),
    ("without equal weights", "plain", "{:.3f}"),
]


def chosen_without(results: Row) -> str:
    """Constants chosen without each network in turn, that network's figures, examples of unknowns, weak networks."""
    gaps = results["examples"]
    return "\n\n".join(
        [
            table(results["rows"], CHOSEN),
            f"Mean of the networks left out: {results['mean_gap']:+.4f} behind the best score (defaults "
            f"{results['default_mean_gap']:+.4f}). All choices, means of {results['sets']} sets of unknowns:",
            table(results["grid"], GRID),
            "Prior odds of the joint score, SCOD-AURC relative to max softmax and to the best score of each set:",
            table(results["odds"], ODDS),
            "*Accepted rows lost*: the share of known test rows that the confidence inside the joint score accepts at "
            "half of the error and the joint score does not, mean and largest of the networks. With 30 examples of one "
            f"kind of unknowns, other rows of this kind are {gaps['own with']:.3f} behind the best score instead of "
            f"{gaps['own']:.3f}, and other kinds {gaps['other with']:.3f} instead of {gaps['other']:.3f}. Networks of "
            "two epochs, and networks that learned 60 % random labels:",
            table(results["weak"], WEAK),
        ]
    )


def evidence_kinds(results: Row) -> str:
    """Changes of AUROC by variant, the distance behind the best single scores, and what follows."""
    rows, sets = results["rows"], results["sets"]
    near = sum(row["near"] for row in sets)

    def unless_head(text: Callable[[Row], str]) -> Callable[[Row], str]:
        return lambda row: "" if row["variant"] == results["head"] else text(row)

    def place(name: str, form: str) -> Callable[[Row], str]:
        return lambda row: f"{row[name]['value']:{form}} {row[name]['set']}: {row[name]['unknowns']}"

    columns: list[Column] = [
        ("kinds", "variant"),
        (f"{near} near sets", unless_head(lambda r: _change(r, "near"))),
        (f"{len(sets) - near} far sets", unless_head(lambda r: _change(r, "far"))),
        (f"all {len(sets)} sets", unless_head(_change)),
        ("behind the best score: mean", "gap", "{:.4f}"),
        ("worst", place("worst", ".3f")),
        ("networks with a gain", unless_head(lambda r: f"{r['better']} of {r['networks']}")),
        ("largest gain", unless_head(place("gain", "+.3f"))),
        ("largest loss", unless_head(place("loss", "+.3f"))),
    ]
    return "\n\n".join(
        [
            f"Change of AUROC against the head, mean ± standard error over sets; every set is a mean of "
            f"{len(results['seeds'])} seeds:",
            table(rows, columns),
            verdict(rows),
        ]
    )


def verdict(rows: list[Row]) -> str:
    """Which variants are clearly better or worse than the head, and which have a smaller worst gap.

    Args:
        rows: The rows of ``evidence_kinds.compare``; the head is the first.
    """
    head, *others = rows
    above = [row for row in others if _errors_of_change(row) > CLEAR]
    below = [row for row in others if _errors_of_change(row) < -CLEAR]
    smaller = [row for row in others if row["worst"]["value"] < head["worst"]["value"] - VISIBLE]
    higher = [row for row in others if row not in above and row["change"]["all"][0] > 0]

    def named(rows: list[Row], more: Callable[[Row], str] | None = None) -> str:
        return ", ".join(row["variant"] + ("" if more is None else f" ({more(row)})") for row in rows) or "none"

    gaps = named(smaller, lambda r: f"{r['worst']['value']:.3f}, mean change {_change(r)}")
    return "\n".join(
        [
            f"- Mean AUROC more than {CLEAR:g} standard errors above the head's: {named(above)}.",
            f"- Above it, but within {CLEAR:g} standard errors: {named(higher, _change)}.",
            f"- More than {CLEAR:g} standard errors below it: {named(below)}.",
            f"- Worst gap smaller by more than {VISIBLE:g}: {gaps}; the head has {head['worst']['value']:.3f}.",
        ]
    )


def _errors_of_change(row: Row) -> float:
    """The mean change over all sets in units of its standard error."""
    change, error = row["change"]["all"]
    return float(change / error) if error else 0.0


def _change(row: Row, kind: str = "all") -> str:
    change, error = row["change"][kind]
    return f"{change:+.4f} ± {error:.4f}"


DEFAULTS = Table(
    "Each choice of `TrustHead.fit` varied alone, means of {cases} cases with unknown classes",
    [
        ("choice", lambda r: ", ".join(f"`{key}={value!r}`" for key, value in r["choice"].items()) or "the defaults"),
        ("dims", "mean.dim", "{:.0f}"),
        ("ellipsoids", "mean.ellipsoids", "{:.0f}"),
        ("own accuracy", "mean.accuracy", "{:.1%}"),
        ("trust: AUROC", "mean.auroc_of_trust", "{:.3f}"),
        ("margin: AUROC", "mean.auroc_of_margin", "{:.3f}"),
        ("confidence: AURC x 1000", "mean.mistakes", "{:.2f}"),
        ("unknowns: AUROC", "mean.unknowns", "{:.3f}"),
        ("joint: SCOD-AURC x 1000", "mean.both", "{:.1f}"),
        ("fit", "mean.seconds", "{:.1f} s"),
    ],
)
MANY_CLASSES = Table(
    "Synthetic classes of 50 points in 64 features, by dimension",
    [
        ("classes", "classes", "{:.0f}"),
        ("dims", lambda r: f"{r['dim']:.0f}{' (default)' if r['default'] else ''}"),
        ("ellipsoids", "ellipsoids", "{:.0f}"),
        ("own accuracy", "accuracy", "{:.1%}"),
        ("points in no ellipsoid", "outside", "{:.1%}"),
        ("fit", "seconds", "{:.1f} s"),
    ],
    "many_classes",
)


def defaults(results: Row) -> str:
    """The effect of each choice of ``TrustHead.fit`` on every figure."""
    return f"{DEFAULTS(results | {'cases': len(results['cases'])})}\n\n{MANY_CLASSES(results)}"


def openood(results: Row) -> str:
    """Every score on networks trained by OpenOOD's recipe, a table for each set, beside the published figures."""

    def spread(name: str, form: str) -> Callable[[Row], str]:
        """Mean and standard deviation over the trainings."""

        def text(row: Row) -> str:
            value, deviation = row[name]
            return f"{value:{form}}" if deviation is None else f"{value:{form}} ± {deviation:{form}}"

        return text

    def unknowns(name: str, part: str) -> Callable[[Row], str]:
        """Mean and standard deviation of the AUROC of one kind of unknowns over the trainings of a set."""

        def text(row: Row) -> str:
            runs = [run for run in results["runs"] if run["set"] == name]
            values = [run["scores"][row["score"]]["unknowns"][part]["auroc"] for run in runs]
            return f"{mean(values):.1f}" if len(values) < 2 else f"{mean(values):.1f} ± {stdev(values):.1f}"

        return text

    others: list[Column] = [
        ("score", "title"),
        ("near: FPR@95", spread("near_fpr95", ".1f")),
        ("far: FPR@95", spread("far_fpr95", ".1f")),
        ("mistakes: AURC x 1000", spread("aurc", ".1f")),
        ("both, near: SCOD-AURC x 1000", spread("near_scod_aurc", ".1f")),
        ("both, far", spread("far_scod_aurc", ".1f")),
    ]
    texts = []
    for name in dict.fromkeys(run["set"] for run in results["runs"]):
        runs = [run for run in results["runs"] if run["set"] == name]
        rows, epochs = runs[0]["rows"], ", ".join(str(epoch) for epoch in sorted({run["epochs"] for run in runs}))
        texts.append(
            f"{_SETS[name]}, {len(runs)} training{'s' if len(runs) > 1 else ''} of {epochs} epochs, accuracy "
            f"{mean(run['accuracy'] for run in runs):.1f} %; "
            f"{spaced(rows['train'])} rows to fit, {spaced(rows['calibration'])} to calibrate, "
            f"{spaced(rows['test'])} to test. AUROC of unknowns:"
        )
        near, far = (
            [(_SETS[part], unknowns(name, part)) for part in parts if part != name]
            for parts in (("cifar10", "cifar100", "tin"), ("mnist", "textures"))
        )
        auroc: list[Column] = [
            ("score", "title"),
            ("near", spread("near_auroc", ".1f")),
            ("near, published", lambda row: None if row["published"] is None else float(row["published"][0]), "{:.1f}"),
            *near,
            ("far", spread("far_auroc", ".1f")),
            *far,
        ]
        own = [row for row in results["rows"] if row["set"] == name]
        texts += [table(own, auroc), table(own, others)]
    return "\n\n".join(texts)


def strong_networks(results: Row) -> str:
    """The AUROC of unknowns on networks by OpenOOD's recipe, beside the best score of the last layer, in a sentence."""
    found = []
    for name in dict.fromkeys(row["set"] for row in results["rows"]):
        rows = {row["score"]: row for row in results["rows"] if row["set"] == name}
        others = [row for score, row in rows.items() if not score.startswith("head")]
        ours, best = (
            " / ".join(f"{max(row[kind][0] for row in some) / 100:.3f}" for kind in ("near_auroc", "far_auroc"))
            for some in ([rows["head_layers"]], others)
        )
        found.append(f"{ours} ({best}) on {_SETS[name]}")
    link = "[earlier layers](docs/panel.md#networks-by-openoods-recipe)"
    return f"ResNet-18 with {link}, near / far unknowns (best other, last layer only): {', '.join(found)}."


# Names of the sets of pictures.
_SETS = {
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "tin": "Tiny ImageNet",
    "mnist": "MNIST",
    "textures": "textures",
}


def _kind(question: str) -> str:
    return question.partition(":")[0]

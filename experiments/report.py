"""Write the generated sections of README.md and docs/ from the JSON files in experiments/results.

python -m experiments.report            # rewrite the sections between their markers
python -m experiments.report --check    # exit with 1 if a section does not show the stored numbers

Every section ends with the date of its measurement; docs/results.md has commands and sources. A section is marked "on
older sources" if the package or the script differed from the measured one when the page was written. ``--check``
ignores this mark, so that an edit of the package alone does not fail it, and prints which results are older now.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import experiments.labels.tables as labels
import experiments.panel.tables as panel
import experiments.paper.tables as paper
import experiments.promises.tables as promises
import experiments.serving.tables as serving
import experiments.solvers.tables as solvers
import experiments.speed.tables as speed
import experiments.tables.tables as tables
from experiments.harness import FIGURES, RESULTS, SOURCES, load
from experiments.provenance import ROOT, Files, older, stamps
from experiments.speed.gpu_tables import gpu
from experiments.table_writer import Column, Row, spaced, table, text_table

OLDER = ", on older sources"


class Section(NamedTuple):
    """A generated section: the function that writes it from stored results, and their names.

    A section that is not ``dated`` has no line on each measurement: docs/results.md has all of them.
    """

    write: Callable[..., str]
    results: tuple[str, ...]
    by_name: bool = False  # whether the function takes one dictionary of all results
    dated: bool = True

    def text(self) -> str:
        found = {name: load(name) for name in self.results}
        if not all(found.values()):
            return "Not measured yet."
        text = self.write(found) if self.by_name else self.write(*found.values())
        return f"{text}\n\n{measured_on(found, SOURCES)}" if self.dated else text


def measured_on(results: dict[str, Row], files: Files) -> str:
    """The days of the measurements, and whether sources have changed since; docs/results.md has commands and sources.

    Args:
        results: Stored results by name.
        files: The present sources.
    """
    found = sorted((stamp for _, stamp in _by_stamp(results)), key=lambda stamp: str(stamp["date"]))
    days = list(dict.fromkeys([_date(found[0]), _date(found[-1])]))
    age = OLDER if any(older(stamp, files) for stamp in found) else ""
    return f"Measured {' to '.join(days)}{age} ([commands and sources](results.md))."


def _by_stamp(results: dict[str, Row]) -> list[tuple[list[str], Row]]:
    """Every stamp with the parts that share it; a result without parts has one unnamed part."""
    found: list[tuple[list[str], Row]] = []
    for result in results.values():
        groups: list[tuple[list[str], Row]] = []
        for part, stamp in stamps(result).items():
            same = next((names for names, other in groups if other == stamp), None)
            if same is None:
                groups.append(([part], stamp))
            else:
                same.append(part)
        found += groups
    return found


def _date(stamp: Row) -> str:
    """The day of the measurement; a stamp from version control knows only the day of the commit."""
    return ("not after " if "stamped" in stamp else "") + str(stamp["date"])[:10]


def provenance_table(results: dict[str, Row], files: Files) -> str:
    """The command, date and sources of every stored result."""
    columns: list[Column] = [
        ("result", lambda r: f"`{r['name']}.json`" + (f": {', '.join(r['parts'])}" if r["parts"] != [""] else "")),
        ("measured", lambda r: f"{_date(r)}{OLDER if older(r, files) else ''}"),
        ("command", "command", "`{}`"),
        ("package", "sources.package", "`{}`"),
        ("script", "sources.script", "`{}`"),
    ]
    return table(
        [
            {"name": name, "parts": parts, **stamp}
            for name, result in results.items()
            for parts, stamp in _by_stamp({name: result})
        ],
        columns,
    )


def ages(results: dict[str, Row], files: Files) -> str:
    """A sentence that names the results with a part that was measured on older sources."""
    old = [name for name, result in results.items() if any(older(stamp, files) for stamp in stamps(result).values())]
    named = f": {', '.join(old)}" if old else ""
    return f"{len(old)} of {len(results)} results were measured on older sources{named}"


def rewritten(text: str, sections: dict[str, Callable[[], str]]) -> str:
    """The text with the sections between their markers written afresh."""
    for name, write in sections.items():
        start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        if start not in text or end not in text:
            raise ValueError(
                f"The section {name!r} needs the markers {start.strip()} and {end}, each on a line of its own."
            )
        head, _, rest = text.partition(start)
        _, _, tail = rest.partition(end)
        text = f"{head}{start}\n{write()}\n\n{end}{tail}"
    return text


def same_numbers(before: str, after: str) -> bool:
    """Whether two texts of a page differ at most in the marks of older sources."""
    return before.replace(OLDER, "") == after.replace(OLDER, "")


def _answers(rows: list[Row]) -> str:
    """A row for every question but calibration."""
    columns: list[Column] = [
        ("question", lambda row: f"{row['question'].title}: {row['question'].unit}"),
        ("ours", lambda row: panel.figure(row, "ours")),
        ("best other", lambda row: f"{panel.figure(row, 'theirs')} {row['title']}"),
        ("difference, 95 %", panel.difference),
        ("rank", lambda row: f"{row['rank']}/{row['scores']}"),
    ]
    return table([row for row in rows if row["question"].kind != "calibration"], columns)


def answers(results: Row) -> str:
    """The networks and the tables of numbers apart, a row for every question."""
    texts = []
    for networks in (True, False):
        texts.append(f"{'Networks' if networks else 'Tables'} ({', '.join(panel.set_names(results, networks))}):")
        texts.append(_answers(panel.answers(results, networks)))
    return "\n\n".join(texts)


def overview(results: Row, held: Row, head: Row, strong: Row) -> str:
    """The answers on networks that nobody tuned on, on strong networks, and on tables; then the speed of a head."""
    largest = head["parts"]["gpu"]["rows"][-1]
    names = panel.set_names(results, networks=False)
    count = len(held["parts"])
    return "\n\n".join(
        [
            f"{count} [networks that nobody tuned on](docs/panel.md#networks-that-nobody-tuned-on):",
            _answers(panel.answers(panel.of_parts(held), networks=False)),
            panel.strong_networks(strong),
            f"{len(names)} tables, looked at during the [design](docs/panel.md#networks-and-tables-apart):",
            _answers(panel.answers(results, networks=False)),
            "Means; a larger AUROC is better. A GPU judges "
            f"{largest['rows'] / largest['head'] / 1e3:.0f} million rows/s ([speed](docs/speed.md)).",
        ]
    )


def speed_summary(head: Row, classes: Row) -> str:
    """Times of judging rows with a calibrated head, and of fits with many classes."""
    heads, cpu = [head["parts"]["fashion"], head["parts"]["gpu"]], head["parts"]["cpu"]
    most = max(row["rows"] for part in heads for row in part["rows"])

    def times(rows: int, key: str) -> str:
        found = [row[key] for part in heads for row in part["rows"] if row["rows"] == rows]
        return f"{min(found):.2g} to {max(found):.2g} ms"

    trusted = head["parts"]["layers"]["trusted"]
    fits, device = classes["parts"], classes["parts"]["cores"]["device"]
    large = fits["imagenet"]
    rows: list[list[str]] = [
        ["judge 1 row", "GPU", times(1, "head")],
        ["judge 1 row, recorded as a CUDA graph", "GPU", times(1, "graph")],
        [f"judge {spaced(most)} rows", "GPU", times(most, "head")],
        [
            f"judge {spaced(trusted['rows'])} pictures with a ResNet-18 in a `TrustedModel`",
            "GPU",
            f"{trusted['trusted']:.3g} ms, the network alone {trusted['network']:.3g} ms",
        ],
        *(
            [f"judge {spaced(row['rows'])} row{'s' * (row['rows'] > 1)}", "CPU", f"{row['head']:.3g} ms"]
            for row in cpu["rows"]
        ),
    ]
    for fit, where, seconds in (
        (fits["clinc"], "CPU", fits["clinc"]["cpu_s"]),
        (device, "GPU and 16 cores", device["wall_s"]),
        (large, "GPU and 16 cores", large["fit_s"]),
    ):
        cap = f", `max_per_class={fit['max_per_class']}`" if "max_per_class" in fit else ""
        shape = f"{spaced(fit['points'])} rows of {fit['features']} features, {fit['classes']} classes{cap}"
        rows.append([f"fit {shape}", where, f"{seconds:.2g} s"])
    ellipsoids = [part["ellipsoids"] for part in (*heads, cpu)]
    points = [part["reference_points"] for part in (*heads, cpu)]
    return (
        f"{text_table(['work', 'on', 'time'], rows)}\n\nThe GPU is an {heads[0]['device']}, the CPU one thread. The "
        f"heads that judge have 64 features, {min(ellipsoids)} to {max(ellipsoids)} ellipsoids and "
        f"{spaced(min(points))} to {spaced(max(points))} reference points."
    )


ALL = tuple(path.stem for path in sorted(RESULTS.glob("*.json")))
PAGES: dict[str, dict[str, Section]] = {
    "README.md": {"overview": Section(overview, ("trust_panel", "networks", "bench_head", "openood"), dated=False)},
    "docs/measurements.md": {
        "power": Section(promises.power, ("power",)),
        "power_rows": Section(promises.power_rows, ("power",), dated=False),
        "group_promises": Section(promises.GROUP_PROMISES, ("group_promises",)),
        "unit_promises": Section(promises.UNIT_PROMISES, ("unit_promises",)),
        "target": Section(promises.target, ("target",)),
        "set_sizes": Section(promises.set_sizes, ("set_sizes",)),
        "drift": Section(promises.drift, ("drift",)),
        "novelties": Section(promises.novelties, ("novelties",)),
        "label_errors": Section(labels.label_errors, ("label_errors",)),
        "human_errors": Section(labels.HUMAN_ERRORS, ("human_errors",)),
        "active": Section(labels.active, ("active_learning",)),
        "monitor_cost": Section(labels.MONITOR_COST, ("lightning_digits",)),
        "files": Section(speed.FILES, ("bench_files",)),
    },
    "docs/panel.md": {
        "summary": Section(panel.summary, ("trust_panel",)),
        "answers": Section(answers, ("trust_panel",)),
        "held_out": Section(panel.held_out, ("networks",)),
    },
    "docs/panel_tables.md": {
        "groups": Section(panel.groups, ("trust_panel",)),
        "panel": Section(panel.panel, ("trust_panel",)),
        "chosen_without": Section(panel.chosen_without, ("leave_one_out",)),
        "evidence_kinds": Section(panel.evidence_kinds, ("evidence_kinds",)),
        "ablation": Section(panel.ablation, ("ablation",)),
        "openood": Section(panel.openood, ("openood",)),
        "defaults": Section(panel.defaults, ("head_defaults",)),
    },
    "docs/speed.md": {"speed": Section(speed_summary, ("bench_head", "bench_classes"), dated=False)},
    "docs/speed_tables.md": {
        "inference": Section(speed.INFERENCE, ("bench_inference",)),
        "head": Section(speed.head_speed, ("bench_head",)),
        "gpu": Section(gpu, ("bench_gpu",)),
        "partitions": Section(speed.partitions, ("bench_partition",)),
        "many-classes": Section(speed.many_classes, ("bench_classes",)),
    },
    "docs/solvers.md": {
        "solvers": Section(solvers.SOLVERS, ("bench_solvers",)),
        "layers": Section(solvers.layers, ("bench_layers", "bench_layers_gpu")),
        "refits": Section(solvers.refits, ("refit_moons", "refit_embeddings")),
    },
    "docs/drift.md": {"risk_monitor": Section(promises.risk_monitor, ("risk_monitor",))},
    "docs/deployment.md": {"deployment": Section(promises.deployment, ("deployment",))},
    "docs/serving.md": {
        name: Section(getattr(serving, name), (name,)) for name in ("engines", "onnx_files", "onnx_gpu", "serve_load")
    },
    "docs/tables.md": {name: Section(getattr(tables, name), ("ten_tables",)) for name in ("accepted", "labels")},
    "docs/paper.md": {
        "paper": Section(paper.side_by_side, paper.PAPER, by_name=True),
        "agreements": Section(paper.agreements, paper.COMPARING, by_name=True),
        "peers": Section(paper.peers, ("peers",)),
        "nearest": Section(paper.nearest, ("nearest",)),
        "figures": Section(
            partial(paper.figures, folder=FIGURES, page=ROOT / "docs" / "paper.md"), paper.PAPER, True, dated=False
        ),
    },
    "docs/results.md": {"results": Section(partial(provenance_table, files=SOURCES), ALL, True, dated=False)},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit with 1 if a page does not show the stored numbers")
    options = parser.parse_args()
    stale = []
    for page, sections in PAGES.items():
        path = ROOT / page
        before = path.read_text()
        after = rewritten(before, {name: section.text for name, section in sections.items()})
        if not options.check:
            path.write_text(after)
            print(f"{page} {'rewritten' if after != before else 'is up to date'}")
        elif not same_numbers(before, after):
            stale.append(page)
        elif after != before:
            print(f'{page}: the marks "{OLDER.strip(", ")}" are out of date; python -m experiments.report renews them')
    print(ages({name: load(name) for name in ALL}, SOURCES))
    if stale:
        sys.exit(f"{' and '.join(stale)} out of date: run python -m experiments.report")


if __name__ == "__main__":
    main()

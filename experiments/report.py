"""Write the tables of both READMEs from the JSON files in experiments/results, so that no number is typed by hand.

python experiments/report.py            # rewrite what stands between the markers
python experiments/report.py --check    # only say whether they are up to date

Scripts that reproduce the paper store ``rows`` (artefact, paper, ours, why) and, where they draw, ``figures`` (name and
caption); the tables show them as they are.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from harness import FIGURES, RESULTS

README = RESULTS.parents[1] / "README.md"
EXPERIMENTS = RESULTS.parent / "README.md"
# What reproduces the paper, in the order of the paper.
PAPER = ("overlapping", "toy_sets", "adult", "wdbc", "vertebral", "iris", "peers", "complexity")


def load(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


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
    text = "One ellipsoid, one thread, CPU time; how many times longer cvxpy with Clarabel takes in the same run"
    return f"{text} (`{results['command']}`):\n\n{table(header, rows)}"


def partitions() -> str:
    results = load("bench_partition")
    rows = [
        [
            {"fashion": "CNN embeddings (Fashion-MNIST)", "synthetic": "synthetic"}[r["data"]],
            f"{r['points']:,} x {r['dims']}".replace(",", " "),
            f"{r['cpu_s']:.1f} s",
            str(r["ellipsoids"]),
            str(r["isolated"]),
            f"{r['share']['cover'] + r['share']['disjoint']:.0%}",
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
    return f"A whole partition (`{results['command']}`):\n\n{table(header, rows)}\n\n{claim}"


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
    text = "Distances on one CPU thread in float32, and how many times longer others take in the same run"
    return f"{text} (`{results['command']}`):\n\n{table(header, rows)}"


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
    return f'Accuracy by what "nearest" means (`{results["command"]}`):\n\n{table(header, rows)}'


def reproductions() -> dict[str, dict[str, Any]]:
    """The results of the scripts in ``PAPER`` that have been run."""
    return {name: load(name) for name in PAPER if (RESULTS / f"{name}.json").exists()}


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def side_by_side(results: dict[str, dict[str, Any]]) -> str:
    """Every result of the paper beside ours; where they differ, by how much and why."""
    rows = [
        [cell(row["artefact"]), f"`{found['command']}`", cell(row["paper"]), cell(_with_reason(row))]
        for found in results.values()
        for row in found["rows"]
    ]
    return table(["artefact", "command", "paper", "ours"], rows)


def _with_reason(row: dict[str, str]) -> str:
    return f"{row['ours']}. *{row['why']}*" if row["why"] else row["ours"]


def in_short(results: dict[str, dict[str, Any]]) -> str:
    rows = [
        [cell(row["artefact"]), cell(row["paper"]), cell(row["ours"])]
        for found in results.values()
        for row in found["rows"]
    ]
    return table(["artefact", "paper", "ours"], rows)


def figures(results: dict[str, dict[str, Any]], folder: Path) -> str:
    """Every picture under its caption."""
    parts = []
    for script, found in results.items():
        captions: dict[str, str] = found.get("figures") or _found_on_disk(script, folder)
        for name, caption in captions.items():
            link = f"[SVG]({folder.name}/{name}.svg)"
            parts.append(f"{caption} (`{found['command']}`, {link})\n\n![{caption}]({folder.name}/{name}.png)")
    return "\n\n".join(parts)


def _found_on_disk(script: str, folder: Path) -> dict[str, str]:
    """Pictures named after their script, each with what the script says it does."""
    text = ast.get_docstring(ast.parse((RESULTS.parent / f"{script}.py").read_text())) or script
    return {path.stem: text.splitlines()[0] for path in sorted(folder.glob(f"{script}*.png"))}


def agreements(results: dict[str, dict[str, Any]]) -> str:
    """Every comparison of two solvers that the scripts have stored."""
    rows = [
        [
            f"`{script}.py`",
            ", ".join(where),
            " and ".join(found["solvers"]),
            str(found["ellipsoids"][0]),
            "yes" if found["same"] else "no",
            "" if found["log_volume_difference"] is None else f"{found['log_volume_difference']:.0e}",
        ]
        for script, result in results.items()
        for where, found in _comparisons(result, ())
    ]
    return table(["script", "set", "solvers", "ellipsoids", "the same", "log-volumes differ by"], rows)


def _comparisons(value: Any, where: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    if isinstance(value, dict):
        if "log_volume_difference" in value:
            yield where, value
        for name, inner in value.items():
            yield from _comparisons(inner, where if name in ("agreement", "features") else (*where, name))


def rewritten(text: str, sections: dict[str, Callable[[], str]]) -> str:
    """The text with each section between its markers written afresh."""
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


DOCUMENTS: dict[Path, dict[str, Callable[[], str]]] = {
    README: {
        "paper": lambda: in_short(reproductions()),
        "solvers": solvers,
        "partitions": partitions,
        "inference": inference,
        "nearest": nearest,
    },
    EXPERIMENTS: {
        "paper": lambda: side_by_side(reproductions()),
        "agreements": lambda: agreements(reproductions()),
        "figures": lambda: figures(reproductions(), FIGURES),
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit with 1 if a README is not up to date")
    options = parser.parse_args()
    stale = []
    for path, sections in DOCUMENTS.items():
        before = path.read_text()
        after = rewritten(before, sections)
        name = path.relative_to(README.parent)
        if after != before:
            stale.append(str(name))
        if not options.check:
            path.write_text(after)
            print(f"{name} {'rewritten' if after != before else 'is up to date'}")
    if options.check and stale:
        sys.exit(f"{' and '.join(stale)} out of date: run python experiments/report.py")


if __name__ == "__main__":
    main()

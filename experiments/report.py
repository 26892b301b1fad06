"""Write the tables of the README from the JSON files in experiments/results, so that no number is typed by hand.

python experiments/report.py            # rewrite what stands between the markers
python experiments/report.py --check    # only say whether it is up to date
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from harness import RESULTS

README = RESULTS.parents[1] / "README.md"


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


SECTIONS = {"solvers": solvers, "partitions": partitions, "inference": inference, "nearest": nearest}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit with 1 if the README is not up to date")
    options = parser.parse_args()
    before = text = README.read_text()
    for name, write in SECTIONS.items():
        start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        head, _, rest = text.partition(start)
        _, _, tail = rest.partition(end)
        text = f"{head}{start}\n{write()}\n\n{end}{tail}"
    if options.check:
        sys.exit("README.md is out of date: run python experiments/report.py" if text != before else 0)
    README.write_text(text)
    print("README.md is up to date" if text == before else "README.md rewritten")


if __name__ == "__main__":
    main()

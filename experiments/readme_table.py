"""The table of README.md: five questions, our answer and that of other methods, from the JSON of three benchmarks."""

from __future__ import annotations

from typing import Any

from markdown_tables import load, table
from panel_tables import counted_questions, mean_of_score

# Ours for each question of the panel, and whether a larger value is better.
PANEL = {
    "mistakes": ("naurc", "confidence", False, "NAURC, lower is better"),
    "unknowns": ("unknowns", "strangeness", True, "AUROC, higher is better"),
    "both": ("both", "joint", False, "SCOD-AURC x 1000, lower is better"),
}
# The size of the ellipsoid in the row on fits.
POINTS, DIMS = 1000, 10


def overview() -> str:
    """Five rows: mistakes, unknowns, both, speed, fit; and how often the head is better than the best other score."""
    results = load("trust_panel")
    rows = [_panel_row(results, name) for name in PANEL]
    head = load("bench_gpu")["parts"]["peers"]["shapes"][0]
    rate = {name: f"{found['rows_per_second'] / 1e6:.0f}" for name, found in head["methods"].items()}
    shape = f"{head['ellipsoids']} ellipsoids"
    rows.append(
        [
            f"[speed](docs/speed.md#inference-on-a-gpu): million rows/s on a GPU, {shape}",
            f"**{rate['distances']}**",
            f"{rate['compile']} torch.compile",
            f"{rate['pytorch_ood']} pytorch-ood",
        ]
    )
    fit = next(r for r in load("bench_solvers")["rows"] if (r["points"], r["dims"]) == (POINTS, DIMS))
    cvxpy = {name: 1e3 * fit["native_s"] * fit[f"ratio_{name}"] for name in ("generated", "direct")}
    rows.append(
        [
            f"[fit](docs/solvers.md): ms for an ellipsoid around {POINTS} points",
            f"**{1e3 * fit['native_s']:.1f}**",
            f"{cvxpy['generated']:.0f} cvxpy, generated constraints",
            f"{cvxpy['direct']:.0f} cvxpy",
        ]
    )
    counted = counted_questions(results)
    return (
        table(["question", "ours", "best other", "usual choice"], rows)
        + f"\n\nThe first three rows are means over {len({row['set'] for row in results['rows']})} data sets. The best "
        f"other score is the best of {len(results['peers'])} in the mean. Against the best one of *each* question, "
        f"chosen in hindsight, the head is better in {counted['better']} of {sum(counted.values())} questions, worse "
        f"in {counted['worse']}, within noise in {counted['noise']}."
    )


def _panel_row(results: dict[str, Any], name: str) -> list[str]:
    kind, score, larger, unit = PANEL[name]
    form = ".1f" if name == "both" else ".3f"
    peers = {key: mean_of_score(results, key, kind) for key in results["peers"]}
    best = (max if larger else min)(peers, key=lambda key: peers[key])
    ours = mean_of_score(results, score, kind)
    return [
        f"[{name}](docs/panel.md): {unit}",
        f"**{ours:{form}}**",
        f"{peers[best]:{form}} {results['peers'][best]}",
        f"{peers['max_softmax']:{form}} max softmax",
    ]

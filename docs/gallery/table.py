"""A table with categories and gaps: a scikit-learn pipeline, and which of its labels to accept."""

import sys
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from sklearn.compose import make_column_transformer
from sklearn.ensemble import RandomForestClassifier
from sklearn.impute import SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder

from sepc_torch import TrustClassifier
from sepc_torch.plot import draw_reliability

rng = np.random.default_rng(0)


def loans(count: int) -> tuple[pd.DataFrame, np.ndarray]:
    """Made-up loans: repaid or not depends on income and job; for the self-employed it is almost a coin flip."""
    job = rng.choice(["clerk", "nurse", "student", "self-employed"], count)
    income = rng.gamma(4.0, 10.0, count) + np.where(job == "nurse", 15, 0)
    odds = np.where(job == "self-employed", 0.2, 0.4 * (income - 40)) - 3.0 * (job == "student")
    repaid = rng.random(count) < 1 / (1 + np.exp(-odds))
    table = pd.DataFrame({"job": job, "income": income, "town": rng.choice(list("ABC"), count)})
    table.loc[rng.random(count) < 0.1, "income"] = np.nan
    return table, np.where(repaid, "repaid", "default")


numbers = make_column_transformer(
    (OneHotEncoder(handle_unknown="ignore"), ["job", "town"]), (SimpleImputer(), ["income"])
)
forest = make_pipeline(numbers, RandomForestClassifier(30, min_samples_leaf=10, random_state=0))
model = TrustClassifier(forest, flag_rate=0.4, random_state=0).fit(*loans(600))
new, outcome = loans(600)
right, accept = model.predict(new) == outcome, model.accept(new)
print(f"right: {right.mean():.0%} of all labels, {right[accept].mean():.0%} of the {accept.mean():.0%} accepted")

figure = Figure(figsize=(11, 4), layout="constrained")
left, ax = figure.subplots(1, 2)
draw_reliability(model.confidence(new), right, bins=8, ax=left).set_title("confidence against right labels")
jobs = sorted(new["job"].unique())
ax.bar(jobs, [accept[new["job"] == job].mean() for job in jobs], width=0.7, label="accepted", color="#56B4E9")
ax.plot(jobs, [right[new["job"] == job].mean() for job in jobs], "o", c="#D55E00", label="right, of all labels")
ax.plot(
    jobs, [right[accept & (new["job"] == job)].mean() for job in jobs], "^", c="#009E73", label="right, of the accepted"
)
ax.set(ylim=(0, 1.3), title="by job: share accepted, and right labels")
ax.legend(ncols=3, loc="upper center", fontsize=8)
figure.savefig(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).with_suffix(".png"), dpi=80)

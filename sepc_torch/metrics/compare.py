"""One-call comparison of SEP-C with the baseline scores, on the user's own embeddings and logits.

::

    found = sepc_torch.compare(z_train, y_train, z_test, y_test, logits_test, z_ood, logits_ood=logits_ood)
    found.best("aurc"), found.to_pandas()           # compare prints the table; these are its numbers
"""

from __future__ import annotations

import copy
import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sepc_torch import metrics
from sepc_torch.data.arrays import numeric_points
from sepc_torch.data.labels import training_set
from sepc_torch.data.options import count
from sepc_torch.data.progress import Choice
from sepc_torch.head.calibration_set import LEAST_CALIBRATION
from sepc_torch.head.prediction import HeadPrediction
from sepc_torch.head.trust_head import TrustHead
from sepc_torch.metrics.baselines import baseline_scores
from sepc_torch.metrics.compare_inputs import InputFormat, LabelledRows, classes_of_head, label_list
from sepc_torch.metrics.comparison import Comparison
from sepc_torch.shapes import Array, Bool, Float, Int

# Rows per call of the head, which limits memory: a call holds the distances of its rows to all ellipsoids.
_BATCH = 8192

# Titles of the baselines in the printed table, by their names in baseline_scores.
TITLES = {
    "max_softmax": "max softmax",
    "scaled_softmax": "scaled softmax",
    "entropy": "entropy",
    "max_logit": "max logit",
    "energy": "energy",
    "gen": "GEN",
    "sirc": "SIRC",
    "vim": "ViM",
    "nnguide": "NNGuide",
    "fdbd": "fDBD",
    "trust_score": "TrustScore",
    "knn": "k-NN (Sun)",
    "mahalanobis": "Mahalanobis",
    "mahalanobis++": "Mahalanobis++",
    "relative_mahalanobis": "relative Mahalanobis",
    "relative_mahalanobis++": "relative Mahalanobis++",
    "gaussians": "Gaussian per class",
    "ellipsoid_distance": "one ellipsoid, distance",
    "ellipsoid_ratio": "one ellipsoid, ratio",
}
# Baselines that need only embeddings. The others need logits, or the label that the logits predict.
_WITHOUT_LOGITS = {"knn", "gaussians"} | {
    f"{relative}mahalanobis{unit}" for relative in ("", "relative_") for unit in ("", "++")
}
_PROBABILITIES = {"max_softmax", "scaled_softmax"}


class _Score(NamedTuple):
    """Values of one score, which become one row of the table; a higher value means more trust.

    Attributes:
        name: Title of the row.
        known: Values of the test rows, which rank the network's mistakes.
        probability: Whether ``known`` is a probability, so that its calibration error is defined.
        typical: Values of the test rows and of the unknown rows, for the metrics of unknowns; None if undefined.
        joint: Values of the test rows and of the unknown rows, for the joint task; None if undefined.
    """

    name: str
    known: Float[Tensor, "B"]
    probability: bool
    typical: tuple[Float[Tensor, "B"], Float[Tensor, "U"]] | None
    joint: tuple[Float[Tensor, "B"], Float[Tensor, "U"]] | None


@torch.no_grad()
def compare(
    z_train: Any,
    y_train: Any,
    z_test: Any,
    y_test: Any,
    logits_test: Any,
    z_ood: Any = None,
    *,
    logits_ood: Any = None,
    logits_train: Any = None,
    classifier: tuple[Any, Any] | None = None,
    calibration: tuple[Any, Any, Any] | None = None,
    head: TrustHead | None = None,
    classes: Any = None,
    seed: int = 0,
    progress: Choice = "auto",
    show: bool = True,
    **options: Any,
) -> Comparison:
    """Compare SEP-C with the baselines: how well each score detects the network's mistakes and unknown samples.

    Arrays may be NumPy arrays, lists, DataFrames or tensors on any device; labels may be of any type.

    Args:
        z_train: Training embeddings (N, D).
        y_train: Training labels (N,).
        z_test: Test embeddings (B, D), not used for training or for any choice.
        y_test: Test labels (B,); every label must occur in ``y_train``.
        logits_test: The network's logits of ``z_test`` (B, C), a column per class.
        z_ood: Embeddings (U, D) of unknown classes. They add the columns AUROC unknowns, FPR95 and SCOD-AURC.
        logits_ood: The network's logits of ``z_ood`` (U, C). Without them, scores that need logits or the network's
            label have no value for unknown rows. The nonconformity score of SEP-C needs neither.
        logits_train: The network's logits of ``z_train`` (N, C), for ViM and NNGuide.
        classifier: Weight (C, D) and bias (C,) of the network's last layer, for fDBD and the origin of ViM.
        calibration: Embeddings, labels and logits of held-out rows, which calibrate the head and the temperature. By
            default a random half of the test rows calibrates, and the other half evaluates every score.
        head: A fitted head to use. It is copied, and the copy is calibrated. By default a head is fitted.
        classes: The labels in the order of the logits' columns. By default the order of the head, or sorted.
        seed: Seed of the default split and of the rows drawn for the joint task.
        progress: ``"auto"`` shows a progress bar on a terminal for long fits.
        show: Print the table.
        **options: Passed to :meth:`TrustHead.fit`.

    Returns:
        The metrics of every score. The row ``SEP-C`` uses the score made for each task: the confidence for mistakes,
        the nonconformity score for unknowns, the joint score for the joint task. The row ``SEP-C joint`` uses the joint
        score for all tasks.

    >>> rng = np.random.default_rng(0)
    >>> y = np.repeat(["cat", "dog"], 150)
    >>> z = rng.normal(size=(300, 4)) + 2.0 * (y == "dog")[:, None]
    >>> logits = np.stack([np.zeros(300), z[:, 0] - 1.0], axis=1)  # this network uses one of the four features
    >>> found = compare(z[::2], y[::2], z[1::2], y[1::2], logits[1::2], normalize="standardize", show=False)
    >>> found
    Comparison(20 scores, 75 test rows, 0 unknown rows, accuracy 0.8...)
    >>> sepc, softmax = (row for row in found.rows if row["score"] in ("SEP-C", "max softmax"))
    >>> sepc["aurc"] < softmax["aurc"]
    True
    """
    seed = count(seed, "seed")
    if head is not None:
        classes = classes_of_head(head, classes, options)
    points = numeric_points(z_train, "z_train")[0]
    train = training_set(points, label_list(y_train, "y_train", len(points), "z_train"), classes, least_per_class=1)
    # The baselines compute in float64, which some accelerators do not support.
    device = z_train.device if isinstance(z_train, Tensor) and z_train.is_cuda else torch.device("cpu")
    if head is None:
        direction = options.get("normalize", "l2") == "l2" and options.get("nan_policy", "raise") == "raise"
    else:
        direction = head.projection.unit_length and head.sepc.nan_policy == "raise"
    form = InputFormat(train.classes.tolist(), points.shape[1], device, direction)
    if head is not None and head.in_features != form.features:
        raise ValueError(f"z_train has {form.features} features, but the head was fitted on {head.in_features}.")
    test = form.labelled(z_test, y_test, logits_test, ("z_test", "y_test", "logits_test"))
    if z_ood is None and logits_ood is not None:
        raise ValueError("logits_ood came without z_ood; pass the embeddings of these rows as z_ood.")
    ood = None if z_ood is None else form.embeddings(z_ood, "z_ood")
    if ood is not None and logits_ood is not None:
        logits_ood = form.logits(logits_ood, "logits_ood", len(ood), "z_ood")
    if logits_train is not None:
        logits_train = form.logits(logits_train, "logits_train", len(points), "z_train")

    last_layer = None if classifier is None else form.classifier(classifier)
    rng = np.random.default_rng(seed)
    evaluated = np.arange(len(test.z))
    if calibration is not None:
        held_out = form.calibration_rows(calibration)
    else:
        calibrating, evaluated = _random_halves(len(test.z), rng)
        held_out, test = test.take(calibrating), test.take(evaluated)

    if head is None:
        labels = train.classes[train.codes]
        head = TrustHead.fit(points, labels, classes=train.classes, progress=progress, **options)
    head = copy.deepcopy(head).to(form.device)
    head.calibrate(held_out.z, [form.names[code] for code in held_out.codes.tolist()], held_out.logits, seed=seed)

    training = torch.tensor(points, device=form.device), torch.from_numpy(train.codes).to(form.device)
    scores = [
        *_sepc_scores(head, test, ood, logits_ood),
        *_baseline_scores(training, test, ood, logits_ood, logits_train, held_out, last_layer),
    ]
    right = test.logits.argmax(dim=1) == test.codes
    pair = None if ood is None else _joint_rows(len(right), len(ood), rng)
    how = f"{len(held_out.z)} given rows" if calibration is not None else f"the other {len(held_out.z)} (seed {seed})"
    found = Comparison(
        rows=[_table_row(score, right, pair) for score in scores],
        accuracy=float(right.double().mean()),
        judged=evaluated,
        unknown=0 if ood is None else len(ood),
        caption=_caption(right, how, ood, logits_ood),
        head=head,
    )
    if show:
        print(found)
    return found


def _random_halves(rows: int, rng: np.random.Generator) -> tuple[Int[Array, "M"], Int[Array, "B"]]:
    """Split the test rows at random: indices for calibration, and indices for evaluation."""
    if rows < 2 * LEAST_CALIBRATION:
        raise ValueError(
            f"Half of the test rows are used for calibration, and {rows} rows are too few; pass at least "
            f"{2 * LEAST_CALIBRATION} test rows, or other rows as calibration=(embeddings, labels, logits)."
        )
    order = rng.permutation(rows)
    return np.sort(order[: rows // 2]), np.sort(order[rows // 2 :])


def _joint_rows(known: int, unknown: int, rng: np.random.Generator) -> tuple[Int[Array, "n"], Int[Array, "n"]]:
    """Draw equally many known and unknown rows for the joint task; return their indices."""
    size = min(known, unknown)
    return rng.choice(known, size, replace=False), rng.choice(unknown, size, replace=False)


def _sepc_scores(
    head: TrustHead, test: LabelledRows, ood: Float[Tensor, "U D"] | None, logits_ood: Float[Tensor, "U C"] | None
) -> list[_Score]:
    """The scores of the head."""
    known = _predict(head, test.z, test.logits)
    unknown = None if ood is None else _predict(head, ood, logits_ood)
    # Without logits the head scores its own label, not the network's: not comparable with the scores of the test rows.
    with_label = None if logits_ood is None else unknown
    # The nonconformity scores with and without logits cannot be compared: both sides use logits, or none does.
    plain = known if logits_ood is not None or ood is None else _predict(head, test.z, None)
    typical = None if unknown is None else (-plain.strangeness, -unknown.strangeness)
    joint = None if with_label is None else (known.joint, with_label.joint)
    trust = None if with_label is None else (known.network_trust, with_label.network_trust)
    margin = None if with_label is None else (known.network_margin, with_label.network_margin)
    return [
        _Score("SEP-C", known.confidence, True, typical, joint),
        _Score("SEP-C joint", known.joint, False, joint, joint),
        _Score("paper's trust", known.network_trust, False, trust, trust),
        _Score("partition's margin", known.network_margin, False, margin, margin),
    ]


def _predict(head: TrustHead, z: Float[Tensor, "B D"], logits: Float[Tensor, "B C"] | None) -> HeadPrediction:
    """The head's prediction, in batches and in float32, as in calibration; NaN becomes the lowest trust."""
    batches = z.float().split(_BATCH)
    with_logits = [None] * len(batches) if logits is None else logits.split(_BATCH)
    parts = [head(batch, logits=own) for batch, own in zip(batches, with_logits, strict=True)]
    out = HeadPrediction(*(torch.cat(field) for field in zip(*parts, strict=True)))
    return out._replace(
        network_trust=out.network_trust.nan_to_num(0.0),
        network_margin=out.network_margin.nan_to_num(0.0, posinf=torch.inf),
        confidence=out.confidence.nan_to_num(0.0),
        joint=out.joint.nan_to_num(0.0),
        strangeness=out.strangeness.nan_to_num(torch.inf, posinf=torch.inf),
    )


def _baseline_scores(
    training: tuple[Float[Tensor, "N D"], Int[Tensor, "N"]],
    test: LabelledRows,
    ood: Float[Tensor, "U D"] | None,
    logits_ood: Float[Tensor, "U C"] | None,
    logits_train: Float[Tensor, "N C"] | None,
    held_out: LabelledRows,
    classifier: tuple[Float[Tensor, "C D"], Float[Tensor, "C"]] | None,
) -> list[_Score]:
    """The scores of all baselines; one call scores known and unknown rows, so each baseline is fitted once."""
    z, logits = test.z, test.logits
    if ood is not None:
        # Zeros stand in for missing logits; the scores that depend on logits are left out below.
        logits = torch.cat([logits, logits.new_zeros(len(ood), logits.shape[1]) if logits_ood is None else logits_ood])
        z = torch.cat([z, ood])
    found = baseline_scores(*training, z, logits, logits_train, (held_out.logits, held_out.codes), classifier)
    scores = []
    for name, values in found.items():
        known, unknown = values[: len(test.z)], values[len(test.z) :]
        pair = (known, unknown) if ood is not None and (logits_ood is not None or name in _WITHOUT_LOGITS) else None
        scores.append(_Score(TITLES[name], known, name in _PROBABILITIES, pair, pair))
    return scores


def _table_row(
    score: _Score, right: Bool[Tensor, "B"], pair: tuple[Int[Array, "n"], Int[Array, "n"]] | None
) -> dict[str, Any]:
    """The metrics of one score; ``pair`` holds the indices of the known and unknown rows of the joint task."""
    found: dict[str, Any] = {"score": score.name}
    found["aurc"] = float(metrics.aurc(score.known, right))
    found["naurc"] = float(metrics.naurc(score.known, right))
    found["failure_auroc"] = float(metrics.failure_auroc(score.known, right))
    found["ece"] = float(metrics.ece(score.known, right)) if score.probability else math.nan
    if pair is not None:
        found |= dict.fromkeys(("unknown_auroc", "fpr95", "scod_aurc"), math.nan)
    if pair is not None and score.typical is not None:
        found["unknown_auroc"] = float(metrics.unknown_auroc(*score.typical))
        found["fpr95"] = float(metrics.fpr95(*score.typical, positive="known"))
    if pair is not None and score.joint is not None:
        known, unknown = (torch.from_numpy(rows).to(right.device) for rows in pair)
        both = torch.cat([score.joint[0][known], score.joint[1][unknown]])
        is_unknown = torch.arange(len(both), device=right.device) >= len(known)
        correct = right[known].repeat(2)  # scod_aurc ignores the second half, which belongs to the unknown rows
        found["scod_aurc"] = float(metrics.scod_aurc(both, correct, is_unknown))
    return found


def _caption(
    right: Bool[Tensor, "B"], how: str, ood: Float[Tensor, "U D"] | None, logits_ood: Float[Tensor, "U C"] | None
) -> str:
    """Two lines below the table: the rows used, and how to read the table."""
    mistakes = int((~right).sum())
    unknown = "" if ood is None else f", {len(ood)} unknown"
    size = 0 if ood is None else min(len(right), len(ood))
    joint = "" if ood is None else f" SCOD-AURC: {size} known, {size} unknown."
    absent = "undefined, or needs logits_ood" if ood is not None and logits_ood is None else "undefined"
    return (
        f"Evaluation rows: {len(right)} test{unknown}; calibrated on {how}. "
        f"Network: {mistakes} mistakes, accuracy {float(right.double().mean()):.1%}.\n"
        f"*: best. AUROC: higher is better; others: lower.{joint} -: {absent}."
    )

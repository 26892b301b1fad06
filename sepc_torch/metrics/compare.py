"""One call that compares our scores with the plain baselines, on the user's own embeddings and logits.

::

    found = sepc_torch.compare(z_train, y_train, z_test, y_test, logits_test, z_ood, logits_ood=logits_ood)
    found.best("aurc"), found.to_pandas()           # the table is printed; here are its numbers
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sepc_torch import metrics
from sepc_torch.data.arrays import count, label_array, numeric_points, training_set
from sepc_torch.data.progress import Choice
from sepc_torch.head.prediction import HeadPrediction
from sepc_torch.head.trust_head import LEAST_CALIBRATION, TrustHead
from sepc_torch.metrics.baselines import baseline_scores
from sepc_torch.metrics.comparison import Comparison
from sepc_torch.shapes import Array, Bool, Float, Int

# Rows that the head judges at a time: a batch of any size would hold its distances to all ellipsoids at once.
_BATCH = 8192

# The names of baselines, for people.
TITLES = {
    "max_softmax": "max softmax",
    "scaled_softmax": "scaled softmax",
    "entropy": "entropy",
    "max_logit": "max logit",
    "energy": "energy",
    "gen": "GEN",
    "vim": "ViM",
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
# These need embeddings alone; the others need logits, if only for the network's label.
_WITHOUT_LOGITS = {"knn", "gaussians"} | {
    f"{relative}mahalanobis{unit}" for relative in ("", "relative_") for unit in ("", "++")
}
_PROBABILITIES = {"max_softmax", "scaled_softmax"}


class _Rows(NamedTuple):
    """Checked rows: embeddings, the index of the true class, and logits."""

    z: Float[Tensor, "B D"]
    codes: Int[Tensor, "B"]
    logits: Float[Tensor, "B C"]

    def take(self, rows: Int[Array, "b"]) -> _Rows:
        """Some of the rows."""
        chosen = torch.from_numpy(rows).to(self.z.device)
        return _Rows(self.z[chosen], self.codes[chosen], self.logits[chosen])


@dataclass(frozen=True)
class _Wanted:
    """What everything must fit to: the labels in the order of the logits, the number of features, one device.

    ``direction`` says whether the head refuses embeddings of zeros, which have none.
    """

    names: list[Any]
    features: int
    device: torch.device
    direction: bool

    def embeddings(self, z: Any, title: str) -> Float[Tensor, "B D"]:
        """Embeddings as float64, or a clear error."""
        points = numeric_points(z, title)[0]
        if points.shape[1] != self.features:
            raise ValueError(f"{title} has {points.shape[1]} features, but z_train has {self.features}.")
        zeros = ~points.any(axis=1)
        if self.direction and zeros.any():
            raise ValueError(
                f"Row {int(zeros.argmax())} of {title} is all zeros and has no direction. Leave it out, or choose "
                "nan_policy='flag' to trust it least."
            )
        return torch.from_numpy(points).to(self.device)

    def logits(self, logits: Any, title: str, rows: int, of: str) -> Float[Tensor, "B C"]:
        """Logits as float64, or a clear error."""
        if len(np.shape(logits)) == 1:
            raise ValueError(
                f"{title} must have a column per class, got shape {tuple(np.shape(logits))}. If the network has one "
                "logit for two classes, give two columns: zeros, and that logit."
            )
        values = numeric_points(logits, title)[0]
        if len(values) != rows:
            raise ValueError(f"{of} has {rows} rows and {title} has {len(values)}; every row needs its logits.")
        if values.shape[1] != len(self.names):
            raise ValueError(
                f"{title} has {values.shape[1]} columns, but y_train has {len(self.names)} classes. Every class that "
                "the network knows needs training rows, and a column; classes= says in which order."
            )
        return torch.from_numpy(values).to(self.device)

    def labelled(self, z: Any, y: Any, logits: Any, titles: tuple[str, str, str]) -> _Rows:
        """Embeddings, labels and logits that fit together, or a clear error."""
        points = self.embeddings(z, titles[0])
        labels = _labels(y, titles[1], len(points), titles[0])
        place = {label: code for code, label in enumerate(self.names)}
        strangers = sorted({repr(label) for label in labels if label not in place})
        if strangers:
            raise ValueError(
                f"{titles[1]} holds labels that y_train does not: {', '.join(strangers[:5])}. Rows of unknown classes "
                "belong in z_ood."
            )
        codes = torch.tensor([place[label] for label in labels], device=self.device)
        return _Rows(points, codes, self.logits(logits, titles[2], len(points), titles[0]))


class _Score(NamedTuple):
    """What one row of the table ranks by, larger is more to be trusted; None where there is no such score.

    ``known`` ranks mistakes, ``typical`` are the known and unknown that are told apart, ``joint`` the known and unknown
    of the joint task.
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
    calibration: tuple[Any, Any, Any] | None = None,
    head: TrustHead | None = None,
    classes: Any = None,
    seed: int = 0,
    progress: Choice = "auto",
    show: bool = True,
    **options: Any,
) -> Comparison:
    """Compare SEP-C with the plain baselines: do they find the network's mistakes, and what it has never seen?

    Everything may be an array, a list, a DataFrame or a tensor on any device; labels may be of any type.

    Args:
        z_train: Training embeddings (N, D).
        y_train: Their labels (N,).
        z_test: Test embeddings (B, D), seen by nothing before.
        y_test: Their labels (B,), each of them among the training labels.
        logits_test: What the network says of them (B, C), a column per class.
        z_ood: Embeddings (U, D) of unknown kinds. With them come the columns for unknowns.
        logits_ood: What the network says of those (U, C). Without it, a score that needs logits or the network's label
            has no value for unknowns: of ours, only the strangeness has.
        logits_train: What it says of the training rows (N, C), for ViM.
        calibration: Embeddings, labels and logits of held-out rows, that calibrate the head and the temperature. By
            default half of the test rows do, and every score is judged on the other half.
        head: A fitted head to use. It is copied, and the copy is calibrated. By default one is fitted.
        classes: The labels in the order of the logits' columns. By default that of the head, or sorted.
        seed: For the default split and for the rows of the joint task.
        progress: ``"auto"`` shows a bar on a terminal for long fits.
        show: Print the table.
        **options: For :meth:`TrustHead.fit`.

    Returns:
        The numbers. Its row ``SEP-C`` takes each score for what it is made for: the confidence for mistakes, the
        strangeness for unknowns, the joint score for both. ``SEP-C joint`` is one score for all.

    >>> rng = np.random.default_rng(0)
    >>> y = np.repeat(["cat", "dog"], 150)
    >>> z = rng.normal(size=(300, 4)) + 2.0 * (y == "dog")[:, None]
    >>> logits = np.stack([np.zeros(300), z[:, 0] - 1.0], axis=1)  # this network looks at one feature of four
    >>> found = compare(z[::2], y[::2], z[1::2], y[1::2], logits[1::2], normalize="standardize", show=False)
    >>> found
    Comparison(19 scores, 75 test rows, 0 unknown rows, accuracy 0.8...)
    >>> sepc, softmax = (row for row in found.rows if row["score"] in ("SEP-C", "max softmax"))
    >>> sepc["aurc"] < softmax["aurc"]
    True
    """
    seed = count(seed, "seed")
    if head is not None:
        classes = _classes_of(head, classes, options)
    points = numeric_points(z_train, "z_train")[0]
    train = training_set(points, _labels(y_train, "y_train", len(points), "z_train"), classes, least_per_class=1)
    # The baselines compute in float64, which not every kind of device can.
    device = z_train.device if isinstance(z_train, Tensor) and z_train.is_cuda else torch.device("cpu")
    if head is None:
        direction = options.get("normalize", "l2") == "l2" and options.get("nan_policy", "raise") == "raise"
    else:
        direction = head.projection.unit_length and head.sepc.nan_policy == "raise"
    wanted = _Wanted(train.classes.tolist(), points.shape[1], device, direction)
    if head is not None and head.in_features != wanted.features:
        raise ValueError(f"z_train has {wanted.features} features, but the head was fitted on {head.in_features}.")
    test = wanted.labelled(z_test, y_test, logits_test, ("z_test", "y_test", "logits_test"))
    if z_ood is None and logits_ood is not None:
        raise ValueError("logits_ood came without z_ood; give the embeddings of those rows too.")
    ood = None if z_ood is None else wanted.embeddings(z_ood, "z_ood")
    if ood is not None and logits_ood is not None:
        logits_ood = wanted.logits(logits_ood, "logits_ood", len(ood), "z_ood")
    if logits_train is not None:
        logits_train = wanted.logits(logits_train, "logits_train", len(points), "z_train")

    rng = np.random.default_rng(seed)
    judged = np.arange(len(test.z))
    if calibration is not None:
        held_out = _given(calibration, wanted)
    else:
        calibrating, judged = _halves(len(test.z), rng)
        held_out, test = test.take(calibrating), test.take(judged)

    if head is None:
        labels = train.classes[train.codes]
        head = TrustHead.fit(points, labels, classes=train.classes, progress=progress, **options)
    head = copy.deepcopy(head).to(wanted.device)
    head.calibrate(held_out.z, [wanted.names[code] for code in held_out.codes.tolist()], held_out.logits, seed=seed)

    training = torch.from_numpy(points).to(wanted.device), torch.from_numpy(train.codes).to(wanted.device)
    scores = [
        *_our_scores(head, test, ood, logits_ood),
        *_plain_scores(training, test, ood, logits_ood, logits_train, held_out),
    ]
    right = test.logits.argmax(dim=1) == test.codes
    pair = None if ood is None else _equal_numbers(len(right), len(ood), rng)
    how = f"{len(held_out.z)} given rows" if calibration is not None else f"the other {len(held_out.z)} (seed {seed})"
    found = Comparison(
        rows=[_row(score, right, pair) for score in scores],
        accuracy=float(right.double().mean()),
        judged=judged,
        unknown=0 if ood is None else len(ood),
        caption=_caption(right, how, ood, logits_ood),
        head=head,
    )
    if show:
        print(found)
    return found


def _classes_of(head: Any, classes: Any, options: dict[str, Any]) -> list[Any]:
    """The classes of a head that can be used, or a clear error."""
    if not isinstance(head, TrustHead):
        raise TypeError(f"head must be a fitted TrustHead, got a {type(head).__name__}.")
    if options:
        raise ValueError(f"A head was given, so nothing is fitted with {', '.join(sorted(options))}; drop one of them.")
    if classes is not None and (order := label_array(classes, "classes").tolist()) != head.classes:
        raise ValueError(f"classes={order} is not the order of the head, {head.classes}; leave classes out.")
    return head.classes


def _labels(y: Any, title: str, rows: int, of: str) -> list[Any]:
    labels = label_array(y, title)
    if len(labels) != rows:
        raise ValueError(f"{of} has {rows} rows and {title} has {len(labels)} labels; one label per row is needed.")
    return labels.tolist()


def _given(calibration: Any, wanted: _Wanted) -> _Rows:
    """The user's rows to calibrate with."""
    if not isinstance(calibration, (tuple, list)) or len(calibration) != 3:
        came = f"{len(calibration)} things" if isinstance(calibration, (tuple, list)) else type(calibration).__name__
        raise TypeError(f"calibration must be a triple, (embeddings, labels, logits) of held-out rows; got {came}.")
    z, y, logits = calibration
    rows = wanted.labelled(z, y, logits, ("calibration[0]", "calibration[1]", "calibration[2]"))
    if len(rows.z) < LEAST_CALIBRATION:
        raise ValueError(f"{len(rows.z)} rows are too few to calibrate with; give at least {LEAST_CALIBRATION}.")
    return rows


def _halves(rows: int, rng: np.random.Generator) -> tuple[Int[Array, "M"], Int[Array, "B"]]:
    """The test rows that calibrate, and those that are judged."""
    if rows < 2 * LEAST_CALIBRATION:
        raise ValueError(
            f"Half of the test rows calibrate, and {rows} are too few for that; give at least "
            f"{2 * LEAST_CALIBRATION}, or other rows as calibration=(embeddings, labels, logits)."
        )
    order = rng.permutation(rows)
    return np.sort(order[: rows // 2]), np.sort(order[rows // 2 :])


def _equal_numbers(known: int, unknown: int, rng: np.random.Generator) -> tuple[Int[Array, "n"], Int[Array, "n"]]:
    """As many rows of the one as of the other, for the joint task."""
    size = min(known, unknown)
    return rng.choice(known, size, replace=False), rng.choice(unknown, size, replace=False)


def _our_scores(
    head: TrustHead, test: _Rows, ood: Float[Tensor, "U D"] | None, logits_ood: Float[Tensor, "U C"] | None
) -> list[_Score]:
    out = _judge(head, test.z, test.logits)
    far = None if ood is None else _judge(head, ood, logits_ood)
    # Without the network's label, what a head says of labels is said of its own: not the same thing as for known rows.
    judged = None if logits_ood is None else far
    joint = None if judged is None else (out.joint, judged.joint)
    strange = None if far is None else (-out.strangeness, -far.strangeness)
    trust = None if judged is None else (out.network_trust, judged.network_trust)
    margin = None if judged is None else (out.network_margin, judged.network_margin)
    return [
        _Score("SEP-C", out.confidence, True, strange, joint),
        _Score("SEP-C joint", out.joint, False, joint, joint),
        _Score("paper's trust", out.network_trust, False, trust, trust),
        _Score("partition's margin", out.network_margin, False, margin, margin),
    ]


def _judge(head: TrustHead, z: Float[Tensor, "B D"], logits: Float[Tensor, "B C"] | None) -> HeadPrediction:
    """What the head says, in the float32 it was calibrated in; the least of a row that it can say nothing of."""
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


def _plain_scores(
    training: tuple[Float[Tensor, "N D"], Int[Tensor, "N"]],
    test: _Rows,
    ood: Float[Tensor, "U D"] | None,
    logits_ood: Float[Tensor, "U C"] | None,
    logits_train: Float[Tensor, "N C"] | None,
    held_out: _Rows,
) -> list[_Score]:
    """Every baseline, known and unknown rows in one go: they are fitted once."""
    z, logits = test.z, test.logits
    if ood is not None:
        # Without logits any will do: what rests on them is not shown.
        logits = torch.cat([logits, logits.new_zeros(len(ood), logits.shape[1]) if logits_ood is None else logits_ood])
        z = torch.cat([z, ood])
    found = baseline_scores(*training, z, logits, logits_train, (held_out.logits, held_out.codes))
    scores = []
    for name, values in found.items():
        known, unknown = values[: len(test.z)], values[len(test.z) :]
        pair = (known, unknown) if ood is not None and (logits_ood is not None or name in _WITHOUT_LOGITS) else None
        scores.append(_Score(TITLES[name], known, name in _PROBABILITIES, pair, pair))
    return scores


def _row(
    score: _Score, right: Bool[Tensor, "B"], pair: tuple[Int[Array, "n"], Int[Array, "n"]] | None
) -> dict[str, Any]:
    """A row of the table; ``pair`` are the known and the unknown rows of the joint task."""
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
        correct = right[known].repeat(2)  # of unknowns it says nothing, whatever it is
        found["scod_aurc"] = float(metrics.scod_aurc(both, correct, is_unknown))
    return found


def _caption(
    right: Bool[Tensor, "B"], how: str, ood: Float[Tensor, "U D"] | None, logits_ood: Float[Tensor, "U C"] | None
) -> str:
    mistakes = int((~right).sum())
    unknown = "" if ood is None else f" and {len(ood)} unknown"
    size = 0 if ood is None else min(len(right), len(ood))
    joint = "" if ood is None else f" SCOD-AURC: {size} known, {size} unknown."
    absent = "no value, or only with logits_ood" if ood is not None and logits_ood is None else "no value"
    return (
        f"Judged on {len(right)} test rows{unknown}, calibrated on {how}. "
        f"The network: {mistakes} mistakes, accuracy {float(right.double().mean()):.1%}.\n"
        f"* best. AUROC: more is better; all others: less.{joint} -: {absent}."
    )

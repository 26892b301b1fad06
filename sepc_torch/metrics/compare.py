"""One-call comparison of SEP-C with the baseline scores, on the user's own embeddings and logits.

::

    found = sepc_torch.compare(z_train, y_train, z_test, y_test, logits_test, z_ood, logits_ood=logits_ood)
    found.best("aurc"), found.to_pandas()           # compare prints the table; these are its numbers
"""

from __future__ import annotations

import copy
import math
import warnings
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sepc_torch import metrics
from sepc_torch.data.arrays import numeric_points
from sepc_torch.data.labels import label_array, label_codes, training_set
from sepc_torch.data.options import check_count
from sepc_torch.data.progress import Choice
from sepc_torch.data.table_encoding import EncodedArray
from sepc_torch.head.calibration.calibration import LEAST_CALIBRATION
from sepc_torch.head.prediction import HeadPrediction
from sepc_torch.head.promises.conformal import check_share, risk_threshold
from sepc_torch.head.trust_head import TrustHead
from sepc_torch.metrics.baselines import baseline_scores
from sepc_torch.metrics.comparison import Comparison
from sepc_torch.model.queries import class_columns, rows_without_prediction, unstated_order
from sepc_torch.shapes import Array, Bool, Float, Int

# Largest difference between given logits and those of the given last layer, relative to the spread of the logits: above
# the rounding of half precision (0.1 %), far below the difference of another layer (above 100 %).
_LAYER_TOLERANCE = 0.02
# Groups of rows that are left out in turn for standard errors: their relative error is about a quarter.
_GROUPS = 10
# Rows per call of the head, which limits memory: a call holds the distances of its rows to all ellipsoids.
_BATCH = 8192


class Baseline(NamedTuple):
    """How the comparison shows a baseline: its title, and whether it is a probability.

    A baseline that ``needs_logits`` uses them or the label that they predict; the others need only embeddings.
    ``needs`` names the argument of ``compare`` without which a baseline is left out.
    """

    title: str
    needs_logits: bool = True
    probability: bool = False
    needs: str = ""


# The arguments without which some baselines are left out.
_WEIGHT, _TRAIN = "weight=, bias=", "logits_train="
# By the names in baseline_scores.
BASELINES = {
    "max_softmax": Baseline("max softmax", probability=True),
    "scaled_softmax": Baseline("scaled softmax", probability=True),
    "entropy": Baseline("entropy"),
    "max_logit": Baseline("max logit"),
    "energy": Baseline("energy"),
    "gen": Baseline("GEN"),
    "logit_margin": Baseline("margin of logits"),
    "max_logit_p_norm": Baseline("MaxLogit-pNorm"),
    "kl_matching": Baseline("KL matching"),
    "sirc": Baseline("SIRC"),
    "vim": Baseline("ViM", needs=_TRAIN),
    "nnguide": Baseline("NNGuide", needs=_TRAIN),
    "she": Baseline("SHE", needs=_TRAIN),
    "react": Baseline("ReAct", needs=_WEIGHT),
    "ash": Baseline("ASH", needs=_WEIGHT),
    "scale": Baseline("SCALE", needs=_WEIGHT),
    "dice": Baseline("DICE", needs=_WEIGHT),
    "nci": Baseline("NCI", needs=_WEIGHT),
    "fdbd": Baseline("fDBD", needs=_WEIGHT),
    "geometric_margin": Baseline("geometric margin", needs=_WEIGHT),
    "trust_score": Baseline("TrustScore"),
    "knn": Baseline("k-NN (Sun)", needs_logits=False),
    "mahalanobis": Baseline("Mahalanobis", needs_logits=False),
    "mahalanobis++": Baseline("Mahalanobis++", needs_logits=False),
    "relative_mahalanobis": Baseline("relative Mahalanobis", needs_logits=False),
    "relative_mahalanobis++": Baseline("relative Mahalanobis++", needs_logits=False),
    "gaussians": Baseline("Gaussian per class", needs_logits=False),
    "ellipsoid_distance": Baseline("one ellipsoid, distance"),
    "ellipsoid_ratio": Baseline("one ellipsoid, ratio"),
}


class _Score(NamedTuple):
    """Values of one score, which become one row of the table; a higher value means more trust.

    Attributes:
        name: Title of the row.
        known: Values of the test rows, which rank the network's mistakes.
        probability: Whether ``known`` is a probability, so that its calibration error is defined.
        typical: Values of the test rows and of the unknown rows, for the metrics of unknowns; None if undefined.
        joint: Values of the test rows and of the unknown rows, for the joint task; None if undefined.
        accept: Which test rows are accepted at the promised risk.
    """

    name: str
    known: Float[Tensor, "B"]
    probability: bool
    typical: tuple[Float[Tensor, "B"], Float[Tensor, "U"]] | None
    joint: tuple[Float[Tensor, "B"], Float[Tensor, "U"]] | None
    accept: Bool[Tensor, "B"]

    def take(self, known: Bool[Tensor, "B"], unknown: Bool[Tensor, "U"] | None) -> _Score:
        """The values of some test rows and unknown rows."""
        pairs = [
            None if pair is None or unknown is None else (pair[0][known], pair[1][unknown])
            for pair in (self.typical, self.joint)
        ]
        return self._replace(known=self.known[known], accept=self.accept[known], typical=pairs[0], joint=pairs[1])


class LabelledRows(NamedTuple):
    """Checked rows: embeddings, index of the true class, and logits."""

    z: Float[Tensor, "B D"]
    codes: Int[Tensor, "B"]
    logits: Float[Tensor, "B C"]

    @property
    def right(self) -> Bool[Tensor, "B"]:
        """Whether the network's label of each row is right."""
        return (self.logits.argmax(dim=1) == self.codes) & ~rows_without_prediction(self.logits)

    def take(self, rows: Int[Array, "b"]) -> LabelledRows:
        """The rows with these indices."""
        chosen = torch.from_numpy(rows).to(self.z.device)
        return LabelledRows(self.z[chosen], self.codes[chosen], self.logits[chosen])


@dataclass(frozen=True)
class InputFormat:
    """Format that every array must have, and the checks that convert an array to it.

    Attributes:
        names: The labels, in the order of the columns of the logits.
        features: Number of features of an embedding.
        device: Device of the checked tensors.
        direction: Whether the head refuses an embedding of zeros, which has no direction.
        stated: Whether columns without names are known to be in the order of ``names``.
    """

    names: list[Any]
    features: int
    device: torch.device
    direction: bool
    stated: bool

    def embeddings(self, z: Any, title: str) -> Float[Tensor, "B D"]:
        """Convert embeddings to a float64 tensor; ``title`` names them in error messages."""
        points = numeric_points(z, title)[0]
        if points.shape[1] != self.features:
            raise ValueError(f"{title} has {points.shape[1]} features, but z_train has {self.features}.")
        zeros = ~points.any(axis=1)
        if self.direction and zeros.any():
            raise ValueError(
                f"Row {int(zeros.argmax())} of {title} is all zeros and has no direction. Drop the row, or pass "
                "nan_policy='flag' to give it the lowest trust."
            )
        return torch.tensor(points, device=self.device)

    def logits(self, logits: Any, title: str, rows: int, of: str) -> Float[Tensor, "B C"]:
        """Convert the logits of the ``rows`` rows of ``of`` to a float64 tensor."""
        if len(np.shape(logits)) == 1:
            raise ValueError(
                f"{title} must have a column per class, got shape {tuple(np.shape(logits))}. If the network has one "
                "logit for two classes, pass two columns: a column of zeros and the logit."
            )
        logits, named = class_columns(logits, self.names)
        if not (named or self.stated):
            raise unstated_order(self.names, "compare")
        values = numeric_points(logits, title)[0]
        if len(values) != rows:
            raise ValueError(f"{of} has {rows} rows and {title} has {len(values)}; every row needs its logits.")
        if values.shape[1] != len(self.names):
            raise ValueError(
                f"{title} has {values.shape[1]} columns, but y_train has {len(self.names)} classes. Every class of the "
                "network needs training rows and a column; classes= gives the order of the columns."
            )
        return torch.tensor(values, device=self.device)

    def labelled(self, z: Any, y: Any, logits: Any, titles: tuple[str, str, str]) -> LabelledRows:
        """Convert embeddings, labels and logits of the same rows."""
        points = self.embeddings(z, titles[0])
        labels = label_list(y, titles[1], len(points), titles[0])
        codes = label_codes(labels, self.names)
        unknown = sorted({repr(label) for label, code in zip(labels, codes.tolist(), strict=True) if code < 0})
        if unknown:
            raise ValueError(
                f"{titles[1]} holds labels that y_train does not: {', '.join(unknown[:5])}. Pass rows of unknown "
                "classes as z_ood."
            )
        checked = self.logits(logits, titles[2], len(points), titles[0])
        return LabelledRows(points, torch.from_numpy(codes).to(self.device), checked)

    def last_layer(self, weight: Any, bias: Any, test: LabelledRows) -> tuple[Float[Tensor, "C D"], Float[Tensor, "C"]]:
        """Convert weight and bias of the last layer, and check that they give the logits of the test rows."""
        shapes = (len(self.names), self.features), (len(self.names),)
        given = weight, np.zeros(shapes[1]) if bias is None else bias
        arrays = [
            torch.as_tensor(part.detach() if isinstance(part, Tensor) else np.asarray(part)).to(self.device).double()
            for part in given
        ]
        if (arrays[0].shape, arrays[1].shape) != shapes:
            raise ValueError(
                f"weight must have shape {shapes[0]}, a row per class and a column per feature, and bias {shapes[1]}; "
                f"got {tuple(arrays[0].shape)} and {tuple(arrays[1].shape)}."
            )
        logits = test.z @ arrays[0].T + arrays[1]
        spread = (test.logits - test.logits.mean(dim=0)).norm()
        if not (logits - test.logits).norm() <= _LAYER_TOLERANCE * spread:
            raise ValueError(
                "weight and bias do not turn z_test into logits_test. Pass those of the layer that computes these "
                "logits from these embeddings, its rows in the order of the columns of the logits; or leave both out."
            )
        return arrays[0], arrays[1]

    def calibration_rows(self, calibration: Any) -> LabelledRows:
        """Convert the triple that the user passes as ``calibration``."""
        if not isinstance(calibration, (tuple, list)) or len(calibration) != 3:
            sequence = isinstance(calibration, (tuple, list))
            came = f"{len(calibration)} items" if sequence else type(calibration).__name__
            raise TypeError(f"calibration must be a triple, (embeddings, labels, logits) of held-out rows; got {came}.")
        z, y, logits = calibration
        rows = self.labelled(z, y, logits, ("calibration[0]", "calibration[1]", "calibration[2]"))
        if len(rows.z) < LEAST_CALIBRATION:
            raise ValueError(f"{len(rows.z)} rows are too few to calibrate with; pass at least {LEAST_CALIBRATION}.")
        return rows


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
    weight: Any = None,
    bias: Any = None,
    calibration: tuple[Any, Any, Any] | None = None,
    head: TrustHead | None = None,
    classes: Any = None,
    risk: float = 0.05,
    delta: float = 0.05,
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
        logits_test: The network's logits of ``z_test`` (B, C), a column per class. Columns of a table are matched with
            the classes by name, other columns by position.
        z_ood: Embeddings (U, D) of unknown classes. They add the columns AUROC unknowns, FPR95 and SCOD-AURC.
        logits_ood: The network's logits of ``z_ood`` (U, C). Without them, scores that need logits or the network's
            label have no value for unknown rows. The nonconformity score of SEP-C needs neither.
        logits_train: The network's logits of ``z_train`` (N, C), for ViM, NNGuide and SHE.
        weight: Weight (C, D) of the network's last layer, which turns embeddings into logits: for ReAct, ASH, SCALE,
            DICE, NCI, fDBD, the geometric margin and the origin of ViM. Logits of unknown and training rows that are
            not given are then computed. Without it the first seven are left out, and the table says so.
        bias: Bias (C,) of the last layer; by default zero.
        calibration: Embeddings, labels and logits of held-out rows, which calibrate the head and the temperature. By
            default a random half of the test rows calibrates, and the other half evaluates every score.
        head: A fitted head to use. It is copied, and the copy is calibrated and promises ``risk``. By default a head is
            fitted.
        classes: The labels in the order of the logits' columns. By default the order of the head, or sorted. Labels
            that are names need it, unless the head was fitted with it or all logits are tables with these names.
        risk: The column ``accepted`` is the share of test rows that a score accepts with the promise that at most this
            share of the accepted labels is wrong. The threshold comes from an exact search over the held-out rows, and
            for SEP-C from :meth:`TrustHead.accept_at`. Choose a risk below the network's error, or every good score
            accepts everything.
        delta: The allowed probability that this promise fails.
        seed: Seed of the default split, of the rows drawn for the joint task, and of the groups for standard errors.
        progress: ``"auto"`` shows a progress bar on a terminal for long fits.
        show: Print the table.
        **options: Passed to :meth:`TrustHead.fit`.

    Returns:
        The metrics of every score. The row ``SEP-C`` uses the score made for each task: the confidence for mistakes,
        the nonconformity score for unknowns, the joint score for the joint task. The row ``SEP-C joint`` uses the joint
        score for all tasks. ``standard_errors`` are those of the evaluated rows, by a jackknife that leaves out tenths
        of the rows in turn; the head and its calibration stay the same.

    >>> rng = np.random.default_rng(0)
    >>> y = np.repeat(["cat", "dog"], 150)
    >>> z = rng.normal(size=(300, 4)) + 2.0 * (y == "dog")[:, None]
    >>> logits = np.stack([np.zeros(300), z[:, 0] - 1.0], axis=1)  # this network uses one of the four features
    >>> rows = z[::2], y[::2], z[1::2], y[1::2], logits[1::2]
    >>> found = compare(*rows, classes=["cat", "dog"], normalize="standardize", show=False)
    >>> found
    Comparison(23 scores, 75 test rows, 0 unknown rows, accuracy 0.8...)
    >>> sepc, softmax = (row for row in found.rows if row["score"] in ("SEP-C", "max softmax"))
    >>> sepc["aurc"] < softmax["aurc"]
    True
    """
    seed = check_count(seed, "seed")
    risk, delta = check_share(risk, "risk"), check_share(delta, "delta")
    stated = classes is not None or (head is not None and head.order_stated)
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
    stated |= not any(isinstance(name, str) for name in train.classes.tolist())
    form = InputFormat(train.classes.tolist(), points.shape[1], device, direction, stated)
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
    if weight is None and bias is not None:
        raise ValueError("bias came without weight; pass the weight of the last layer too.")
    last_layer = None if weight is None else form.last_layer(weight, bias, test)
    if last_layer is not None:
        if logits_train is None:
            logits_train = torch.tensor(points, device=device) @ last_layer[0].T + last_layer[1]
        if ood is not None and logits_ood is None:
            logits_ood = ood @ last_layer[0].T + last_layer[1]

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
    features = held_out.z.cpu().numpy().view(EncodedArray)  # also of a head with an encoding, whose features z holds
    head.order_stated = True  # of the checked logits
    head.calibrate(features, [form.names[code] for code in held_out.codes.tolist()], held_out.logits, seed=seed)
    head.order_stated = stated
    with warnings.catch_warnings():  # the column says 0 where nothing can be promised
        warnings.simplefilter("ignore")
        head.accept_at(risk=risk, delta=delta)

    promise = risk, delta
    training = torch.tensor(points, device=form.device), torch.from_numpy(train.codes).to(form.device)
    scores = [
        *_sepc_scores(head, test, ood, logits_ood, held_out, promise),
        *_baseline_scores(training, test, ood, logits_ood, logits_train, held_out, last_layer, promise),
    ]
    right = test.right
    pair = None if ood is None else _joint_rows(len(right), len(ood), rng)
    how = f"{len(held_out.z)} given rows" if calibration is not None else f"the other {len(held_out.z)} (seed {seed})"
    rows = [_table_row(score, right, pair) for score in scores]
    errors = _standard_errors(scores, right, pair, rng)
    found = Comparison(
        rows=rows,
        standard_errors=errors,
        accuracy=float(right.double().mean()),
        judged=evaluated,
        unknown=0 if ood is None else len(ood),
        caption=_caption(right, how, ood, logits_ood, {score.name for score in scores}, promise),
        head=head,
    )
    if show:
        print(found)
    return found


def label_list(y: Any, title: str, rows: int, of: str) -> list[Any]:
    """Convert labels to a list, one label for each of the ``rows`` rows of ``of``."""
    labels = label_array(y, title)
    if len(labels) != rows:
        raise ValueError(f"{of} has {rows} rows and {title} has {len(labels)} labels; one label per row is needed.")
    return labels.tolist()


def classes_of_head(head: Any, classes: Any, options: dict[str, Any]) -> list[Any]:
    """Check the head that the user passes; return its classes."""
    if not isinstance(head, TrustHead):
        raise TypeError(f"head must be a fitted TrustHead, got a {type(head).__name__}.")
    if options:
        raise ValueError(
            f"A fitted head came together with options for fitting one: {', '.join(sorted(options))}. Pass either the "
            "head or the options."
        )
    if classes is not None and (order := label_array(classes, "classes").tolist()) != head.classes:
        raise ValueError(f"classes={order} is not the order of the head, {head.classes}; leave classes out.")
    return head.classes


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


def _accepted(
    held: Float[Tensor, "M"], right: Bool[Tensor, "M"], known: Float[Tensor, "B"], promise: tuple[float, float]
) -> Bool[Tensor, "B"]:
    """The rows that a score accepts at a promised risk, with the threshold of an exact search on held-out rows."""
    # Between -1 and 1, in the same order: the search refuses infinite scores.
    values = [torch.where(v.isinf(), v.sign(), v / (1.0 + v.abs())) for v in (held.double(), known.double())]
    return values[1] >= risk_threshold(values[0], right, *promise).threshold


def _sepc_scores(
    head: TrustHead,
    test: LabelledRows,
    ood: Float[Tensor, "U D"] | None,
    logits_ood: Float[Tensor, "U C"] | None,
    held_out: LabelledRows,
    promise: tuple[float, float],
) -> list[_Score]:
    """The scores of the head."""
    known, held = _predict(head, test.z, test.logits), _predict(head, held_out.z, held_out.logits)
    unknown = None if ood is None else _predict(head, ood, logits_ood)
    # Without logits the head scores its own label, not the network's: not comparable with the scores of the test rows.
    with_label = None if logits_ood is None else unknown
    # The nonconformity scores with and without logits cannot be compared: both sides use logits, or none does.
    plain = known if logits_ood is not None or ood is None else _predict(head, test.z, None)
    typical = None if unknown is None else (-plain.nonconformity, -unknown.nonconformity)
    joint = None if with_label is None else (known.joint, with_label.joint)
    trust = None if with_label is None else (known.network_trust, with_label.network_trust)
    margin = None if with_label is None else (known.network_margin, with_label.network_margin)
    by_trust = _accepted(held.network_trust, held_out.right, known.network_trust, promise)
    by_margin = _accepted(held.network_margin, held_out.right, known.network_margin, promise)
    return [
        _Score("SEP-C", known.confidence, True, typical, joint, known.accept),
        _Score("SEP-C joint", known.joint, False, joint, joint, known.accept),
        _Score("paper's trust", known.network_trust, False, trust, trust, by_trust),
        _Score("partition's margin", known.network_margin, False, margin, margin, by_margin),
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
        nonconformity=out.nonconformity.nan_to_num(torch.inf, posinf=torch.inf),
    )


def _baseline_scores(
    training: tuple[Float[Tensor, "N D"], Int[Tensor, "N"]],
    test: LabelledRows,
    ood: Float[Tensor, "U D"] | None,
    logits_ood: Float[Tensor, "U C"] | None,
    logits_train: Float[Tensor, "N C"] | None,
    held_out: LabelledRows,
    classifier: tuple[Float[Tensor, "C D"], Float[Tensor, "C"]] | None,
    promise: tuple[float, float],
) -> list[_Score]:
    """The scores of all baselines; one call scores all rows, so each baseline is fitted once."""
    z, logits = torch.cat([test.z, held_out.z]), torch.cat([test.logits, held_out.logits])
    if ood is not None:
        # Zeros stand in for missing logits; the scores that depend on logits are left out below.
        logits = torch.cat([logits, logits.new_zeros(len(ood), logits.shape[1]) if logits_ood is None else logits_ood])
        z = torch.cat([z, ood])
    found = baseline_scores(*training, z, logits, logits_train, (held_out.logits, held_out.codes), classifier)
    scores = []
    for name, values in found.items():
        known, held, unknown = values.tensor_split((len(test.z), len(test.z) + len(held_out.z)))
        accept = _accepted(held, held_out.right, known, promise)
        baseline = BASELINES[name]
        pair = None if ood is None or (baseline.needs_logits and logits_ood is None) else (known, unknown)
        scores.append(_Score(baseline.title, known, baseline.probability, pair, pair, accept))
    return scores


def _table_row(
    score: _Score, right: Bool[Tensor, "B"], pair: tuple[Int[Array, "n"], Int[Array, "m"]] | None
) -> dict[str, Any]:
    """The metrics of one score; ``pair`` holds the indices of the known and unknown rows of the joint task."""
    found: dict[str, Any] = {"score": score.name}
    found["aurc"] = float(metrics.aurc(score.known, right))
    found["naurc"] = float(metrics.naurc(score.known, right))
    found["failure_auroc"] = float(metrics.failure_auroc(score.known, right))
    found["ece"] = float(metrics.ece(score.known, right)) if score.probability else math.nan
    found["accepted"] = float(score.accept.double().mean())
    if pair is not None:
        found |= dict.fromkeys(("unknown_auroc", "fpr95", "scod_aurc"), math.nan)
    if pair is not None and score.typical is not None:
        found["unknown_auroc"] = float(metrics.unknown_auroc(*score.typical))
        found["fpr95"] = float(metrics.fpr95(*score.typical, positive="known"))
    if pair is not None and score.joint is not None:
        known, unknown = (torch.from_numpy(rows).to(right.device) for rows in pair)
        both = torch.cat([score.joint[0][known], score.joint[1][unknown]])
        is_unknown = torch.arange(len(both), device=right.device) >= len(known)
        correct = torch.cat([right[known], is_unknown[len(known) :]])  # scod_aurc ignores the unknown rows
        found["scod_aurc"] = float(metrics.scod_aurc(both, correct, is_unknown))
    return found


def _standard_errors(
    scores: list[_Score],
    right: Bool[Tensor, "B"],
    pair: tuple[Int[Array, "n"], Int[Array, "n"]] | None,
    rng: np.random.Generator,
) -> list[dict[str, Any]]:
    r"""Standard errors of the metrics by a jackknife, :math:`\sqrt{\frac{G - 1}{G} \sum_g (m_{-g} - \bar m)^2}`.

    Group g of G holds a random tenth of the test rows and a tenth of the unknown rows. With few unknown rows the
    standard errors of their metrics are NaN.
    """
    sizes = [len(right)]
    names = _table_row(scores[0], right, pair)
    if pair is not None and scores[0].typical is not None:
        sizes.append(len(scores[0].typical[1]))
        pair = None if sizes[1] < 2 * _GROUPS else pair
    group = [torch.from_numpy(rng.permutation(size) % _GROUPS).to(right.device) for size in sizes]
    tables = []
    for g in range(_GROUPS):
        kept = [of != g for of in group]
        left = None
        if pair is not None:  # where the kept rows of the joint task are among the kept rows
            place = [(keep.cumsum(0) - 1).cpu().numpy() for keep in kept]
            inside = [rows[keep.cpu().numpy()[rows]] for rows, keep in zip(pair, kept, strict=True)]
            left = place[0][inside[0]], place[1][inside[1]]
        unknown = kept[1] if len(kept) > 1 else None
        tables.append([_table_row(score.take(kept[0], unknown), right[kept[0]], left) for score in scores])
    return [
        {
            name: rows[0][name]
            if name == "score"
            else float(np.std([row.get(name, math.nan) for row in rows])) * math.sqrt(_GROUPS - 1)
            for name in names
        }
        for rows in zip(*tables, strict=True)
    ]


def _caption(
    right: Bool[Tensor, "B"],
    how: str,
    ood: Float[Tensor, "U D"] | None,
    logits_ood: Float[Tensor, "U C"] | None,
    shown: set[str],
    promise: tuple[float, float],
) -> str:
    """Lines below the table: the rows used, how to read the table, and the scores left out."""
    mistakes = int((~right).sum())
    unknown = "" if ood is None else f", {len(ood)} unknown"
    size = 0 if ood is None else min(len(right), len(ood))
    joint = "" if ood is None else f" SCOD-AURC: {size} known, {size} unknown."
    absent = "undefined, or needs logits_ood" if ood is not None and logits_ood is None else "undefined"
    lines = [
        f"Evaluation rows: {len(right)} test{unknown}; calibrated on {how}. "
        f"Network: {mistakes} mistakes, accuracy {float(right.double().mean()):.1%}.",
        f"*: best. AUROC and accepted: higher is better; others: lower.{joint} -: {absent}.",
        f"accepted: share of the rows at the promise that at most {promise[0]:.3g} of the accepted labels are wrong, "
        f"with probability {1.0 - promise[1]:.3g}.",
    ]
    for needs in (_TRAIN, _WEIGHT):
        titles = [b.title for b in BASELINES.values() if b.needs == needs and b.title not in shown]
        if titles:
            lines.append(f"Left out without {needs}: {', '.join(titles)}.")
    return "\n".join(lines)

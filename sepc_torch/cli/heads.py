"""A trust head and the rows of a file that it judges, and the promise of the head."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sepc_torch.cli.columns import chosen_label, encoded_rows, label_texts, logit_columns, model_columns
from sepc_torch.cli.row_files import SUFFIXES, Piece, RowFile, open_rows
from sepc_torch.cli.shell import existing_model, note
from sepc_torch.cli.training_rows import Sample, sample_rows
from sepc_torch.data.files import FileFormatError, kind_of
from sepc_torch.data.table_encoding import ABSENT, MISSING, category_texts
from sepc_torch.head.calibration.label_calibration import LabelCalibration
from sepc_torch.head.promises.groups import GroupAcceptance
from sepc_torch.head.promises.shift import Shift
from sepc_torch.head.trust_head import TrustHead
from sepc_torch.shapes import Array, Float

# Share of rows that a new head refuses, where the user asks for nothing else.
_FLAG_RATE = 0.05


# Share and number of rows of the training file from which on they are said to be known.
_SEEN, _LEAST_SEEN = 0.1, 20


def made_the_head(head: TrustHead, seen: float, rows: int) -> bool:
    """Whether a share ``seen`` of rows that equal rows of the training file is more than chance gives."""
    return seen >= max(_SEEN, 2.0 * head.repeats) and seen * rows >= _LEAST_SEEN


class Points(NamedTuple):
    """Rows of a file as a head takes them.

    Attributes:
        z: (n, D) features; NaN in rows with a problem.
        logits: (n, C) logits, or None.
        truth: True labels as text, None where missing; or None if the file has none.
        problems: What is wrong with the rows that cannot be judged.
        filled: Missing values that training did not have, by column.
        new: Categories that training did not have, by column.
    """

    z: Float[Array, "n D"]
    logits: Float[Array, "n C"] | None
    truth: list[str | None] | None
    problems: dict[int, str]
    filled: dict[str, int]
    new: dict[str, Counter[str]]


class LabelledPoints(NamedTuple):
    """Labelled rows of a file that a head can judge: the sample, their features, labels and logits."""

    sample: Sample
    z: Float[Array, "n D"]
    targets: list[Any]
    logits: Float[Array, "n C"] | None


class HeadRows:
    """A head with the rows of a file.

    Args:
        model: The file of the head.
        data: The file of rows.
        sep: The character between the fields of a CSV or TSV file.
        logits: The columns of logits, as the user names them.
        label: The column of true labels; by default that of an NPZ file.
        others: Further columns to read, which are no features.
        encoding: The encoding of a text file; by default it is guessed.
        trust: Whether to load an estimator of the model's user.
    """

    def __init__(
        self,
        model: Path,
        data: Path,
        sep: str | None,
        logits: str | None,
        label: str | None = None,
        others: Sequence[str | None] = (),
        encoding: str | None = None,
        trust: bool = False,
    ) -> None:
        self.head: TrustHead = load_head(model, trust, data)
        self.file: RowFile = open_rows(data, sep, encoding)
        self.label = label or self.file.label
        if logits is not None and self.head.classifier is not None:
            raise ValueError("The model has a classifier, whose labels it judges; leave out --logits.")
        self.logits = logit_columns(self.file, logits, self.head.classes)
        read = [name for name in (*others, self.label) if name is not None]
        self.file.require(read)
        names = self.head.feature_names if self.head.encoding is None else self.head.encoding.columns
        not_features = [self.file.label, *read, *self.logits]
        self.features = model_columns(self.file, names, self.head.in_features, not_features)
        self.columns = list(dict.fromkeys([*self.features, *self.logits, *read]))

    def pieces(self) -> Iterator[tuple[Piece, Points]]:
        """Read the rows a piece at a time, with a progress bar; the head flags rows that cannot be judged."""
        self.head.sepc.nan_policy = "flag"  # one unusable row does not end the file
        for piece in self.file.pieces(self.columns, "read"):
            yield piece, self.points(piece)
        self.note_missing_logits()

    def points(self, piece: Piece) -> Points:
        """The rows of a piece as points; a head with an encoding encodes them, otherwise they are plain numbers."""
        encoded = encoded_rows(piece.table, self.features, self.head.encoding)
        problems = encoded.problems
        scores = None
        if self.logits:
            # A row without logits has no network label; the head flags it.
            of_logits = encoded_rows(piece.table, self.logits, None)
            scores, problems = of_logits.points, of_logits.problems | problems
        # Broken rows hold no value at all, and are not counted as filled.
        broken = len(piece.problems)
        filled = {name: rows - broken for name, rows in encoded.filled.items() if rows > broken}
        for found in encoded.new.values():
            found[ABSENT] -= broken
        new = {name: +found for name, found in encoded.new.items() if +found}
        problems |= piece.problems
        encoded.points[list(problems)] = np.nan
        if self.head.classifier is not None:
            scores = self.head.with_logits(encoded.points)[1]
        truth = None if self.label is None else label_texts(piece.table.column(self.label), self._of_label)
        return Points(encoded.points, scores, truth, problems, filled, new)

    @property
    def _of_label(self) -> frozenset[str]:
        """Texts of the column of labels that stand for a missing one: those of training, without the classes."""
        missing = MISSING if self.head.encoding is None else self.head.encoding.missing
        return frozenset(missing) - set(category_texts(self.head.classes, frozenset()).tolist())

    def usable(self) -> tuple[Float[Array, "n D"], Float[Array, "n C"] | None]:
        """The features and logits of all rows that the head can judge; rows with a problem are left out."""
        z, scores = [], []
        for _, points in self.pieces():
            good = np.setdiff1d(np.arange(len(points.z)), list(points.problems))
            z.append(points.z[good])
            if points.logits is not None:
                scores.append(points.logits[good])
        if not sum(map(len, z)):
            raise ValueError(f"{str(self.file.path)!r} has no row that can be judged.")
        return np.concatenate(z), np.concatenate(scores) if scores else None

    def labelled(self, most: int | None, seed: int) -> LabelledPoints:
        """Read a random sample of at most ``most`` rows that have a label of the head and no problem."""
        label = chosen_label(self.file, self.label)
        sample = sample_rows(self.file, self.columns, label, most, seed, self._of_label)
        found = self.points(Piece(sample.table, {}, 0))
        assert found.truth is not None
        by_text = self.classes_by_text()
        problems = {
            i: f"the model does not know the label {text!r}"
            for i, text in enumerate(found.truth)
            if text not in by_text
        } | found.problems
        good = np.setdiff1d(np.arange(len(found.z)), list(problems))
        if not len(good):
            raise ValueError(f"No row of {str(self.file.path)!r} can be used; row {sample.rows[0]}: {problems[0]}.")
        targets = [by_text[str(found.truth[i])] for i in good]
        scores = None if found.logits is None else found.logits[good]
        return LabelledPoints(sample.without(problems), found.z[good], targets, scores)

    def classes_by_text(self) -> dict[str, Any]:
        """The classes of the head by their text."""
        return dict(zip(category_texts(self.head.classes, frozenset()).tolist(), self.head.classes, strict=True))

    def note_missing_logits(self) -> None:
        """Say so if the head was calibrated with logits, and the file has none."""
        if not self.logits and self.head.takes_logits and self.head.classifier is None:
            note("the model was calibrated with a network's logits; without --logits it judges its own labels")


def load_head(model: Path, trust: bool = False, data: Path | None = None) -> TrustHead:
    """Load a head; the suffix .safetensors may be left out. ``data`` is the file of rows that comes after it."""
    path = existing_model(model)
    if path.name.lower().endswith(SUFFIXES) and (data is None or existing_model(data).suffix == ".safetensors"):
        order = "the model comes first, then the rows" if data is not None else "name the file of the model"
        raise ValueError(f"{str(path)!r} is a file of rows and no model: {order}.")
    try:
        return TrustHead.load(path, trust=trust)
    except FileFormatError:
        if kind_of(path) == "sepc":
            raise ValueError(
                f"{str(path)!r} holds the paper's classifier: use `sepc paper score` or `sepc paper explain`, or fit a "
                "calibrated model with `sepc fit`."
            ) from None
        raise


def calibrated_labels(head: TrustHead) -> LabelCalibration:
    """The calibration of the labels that a head judges; raise ValueError if there is none."""
    if head.calibration is None or not head.calibration.done:
        raise ValueError("The model is not calibrated; calibrate it with `sepc calibrate MODEL DATA --label COLUMN`.")
    return head.calibration.labels


def use_promise(head: TrustHead, risk: float | None, delta: float, flag_rate: float | None) -> None:
    """Set the acceptance threshold of a head if the user asks for a promise; note a promise that cannot be kept."""
    if risk is not None or flag_rate is not None:
        promise = set_promise(head, risk, delta, flag_rate)
        if not promise["found"]:
            note(promise["text"])


def promise_in_force(head: TrustHead) -> dict[str, Any] | None:
    """The promise that a head brings along, in the form of :func:`set_promise`; None if it is not recorded."""
    promise = head.promise
    if promise is None:
        return None
    if promise.found:
        text = f"Promise of the model: {promise}."
        text += "" if promise.shift else f" It holds for {_drawn_alike(promise.units)}."
    else:
        text = f"No promise, nothing is accepted: the promise of the model, {promise}, cannot be kept."
        if promise.risk is not None and promise.by is None:
            why = calibrated_labels(head).shortfall(promise.risk, promise.delta, 1.0, "calibration rows")
            text = f"No promise, nothing is accepted: {why}"
    delta = None if promise.risk is None else promise.delta
    return {"text": text, "risk": promise.risk, "delta": delta, "flag_rate": promise.flag_rate, "found": promise.found}


def _drawn_alike(units: bool) -> str:
    """What a promise holds for."""
    drawn = "units" if units else "rows"
    return f"{drawn} drawn like the calibration {drawn}"


def set_promise(
    head: TrustHead,
    risk: float | None,
    delta: float,
    flag_rate: float | None,
    rows: float = 1.0,
    what: str = "calibration rows",
    target: HeadRows | None = None,
    shift: Shift = "covariate",
    by: Any = None,
) -> dict[str, Any]:
    """Set the acceptance threshold of a calibrated head; return the promise in words (``text``) and numbers.

    Args:
        head: The head.
        risk: Allowed share of wrong labels among the accepted ones, or None.
        delta: Allowed probability that the promise of ``risk`` fails.
        flag_rate: Allowed share of refused rows, or None; 5 % if neither is given.
        rows: Number of rows that a user must add for each further calibration row, if there are too few.
        what: Name of these rows.
        target: Unlabelled rows for which the promise must hold, if the data have shifted.
        shift: What the promise then assumes.
        by: Kind of groups in each of which the promise of ``risk`` must hold, or None for all rows.
    """
    if risk is None and by is not None:
        raise ValueError("--by keeps the promise of --risk in every group: pass --risk too.")
    if risk is not None and flag_rate is not None:
        raise ValueError("Pass --risk or --flag-rate, not both: one threshold keeps one promise.")
    labels = calibrated_labels(head)
    wanted = _FLAG_RATE if flag_rate is None else flag_rate
    if risk is None and flag_rate is None:
        flag_rate = labels.least_flag_rate(_FLAG_RATE)
    if target is not None:
        return _promise_for_target(head, risk, delta, flag_rate, target, shift)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The head accepts", UserWarning)  # the promise says so
        warnings.filterwarnings("ignore", "The risk .* cannot be promised in", UserWarning)  # as does the table
        found: Any = head.accept_at(risk=risk, delta=delta, flag_rate=flag_rate, by=by)
    if isinstance(found, GroupAcceptance):
        kept = any(group.found for group in found.groups)
        text = f"Promise: {head.promise}. It holds for rows drawn like the calibration rows." if kept else "No promise."
        text += f"\n\n{found}\n"
        text += (
            "" if found.found else f"\nNothing is accepted of groups that are not found. For example, {found.limits}"
        )
        facts = {"text": text, "risk": risk, "delta": delta, "flag_rate": flag_rate, "by": by, **found._asdict()}
        return {**facts, "groups": [group._asdict() for group in found.groups]}
    if risk is not None and not found.found:
        text = f"No promise, nothing is accepted: {labels.shortfall(risk, delta, rows, what)}"
    else:
        text = f"Promise: {head.promise}. It holds for {_drawn_alike(labels.in_units)}."
        if risk is None and labels.least_flag_rate(wanted) > wanted:
            text += f"\nNote: {labels.flag_rate_shortfall(wanted, rows, what)}"
    if found.found:
        text += f"\nOn the {found.points} calibration rows that set the threshold: {found.coverage:.1%} accepted"
        text += "." if found.coverage == 0 else f", {found.error:.1%} of the accepted labels wrong."
    asked = {"text": text, "risk": risk, "delta": delta if risk is not None else None, "flag_rate": flag_rate}
    return {**asked, **found._asdict()}


def _promise_for_target(
    head: TrustHead, risk: float | None, delta: float, flag_rate: float | None, target: HeadRows, shift: Shift
) -> dict[str, Any]:
    """The promise for shifted rows, in words and numbers."""
    z, logits = target.usable()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The head accepts", UserWarning)  # the promise says so
        found = head.accept_at(risk=risk, delta=delta, flag_rate=flag_rate, target=z, target_logits=logits, shift=shift)
    if found.found:
        text = f"Promise: {head.promise}.\nOf {found.rows} target rows {found.coverage:.1%} are accepted; "
        text += f"{found.points} calibration rows count for them"
        text += "." if math.isnan(found.error) else f", where {found.error:.1%} of the accepted labels are wrong."
    else:
        text = f"No promise, nothing is accepted: {found.limits}."
    asked = {"text": text, "risk": risk, "delta": delta if risk is not None else None, "flag_rate": flag_rate}
    return {**asked, **found._asdict(), "moves": [move._asdict() for move in found.moves]}

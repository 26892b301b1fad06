"""The rows of a report: a head's predictions for them, checked labels, and what stands for each row on the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sepc_torch.data.arrays import rows_per_chunk
from sepc_torch.data.labels import label_codes
from sepc_torch.data.text import printable
from sepc_torch.head.prediction import HeadPrediction
from sepc_torch.head.reasons import refusal_reason
from sepc_torch.head.trust_head import TrustHead
from sepc_torch.metrics.baselines.softmax import max_softmax
from sepc_torch.shapes import Array, Bool, Float, Int

# Most characters of a class name or an id, and of a text, on the page.
_NAME_LENGTH, _TEXT_LENGTH = 40, 280


class Rows(NamedTuple):
    """N rows with predictions.

    Attributes:
        out: The head's predictions.
        label: The assessed labels as class indices; -1 without a label.
        accept: Whether each label is accepted.
        reason: The :class:`~sepc_torch.head.reasons.Reason` of each row.
        truth: The true classes, -1 for rows of no known class; None without true labels.
        right: Whether each label is right; None without true labels.
        softmax: Largest softmax probability of each row, 0 for a row without one; None without logits.
        given: The true labels as the caller named them; None without true labels.
        names: Names of the classes on the page.
    """

    out: HeadPrediction
    label: Int[Array, "N"]
    accept: Bool[Array, "N"]
    reason: Int[Array, "N"]
    truth: Int[Array, "N"] | None
    right: Bool[Array, "N"] | None
    softmax: Float[Array, "N"] | None
    given: Sequence[Any] | None
    names: list[str]

    def __len__(self) -> int:
        return len(self.label)

    def name(self, code: int) -> str:
        """Name of a class index; the rest of the rows have none."""
        return self.names[code] if code >= 0 else "none"

    def true_name(self, row: int) -> str | None:
        """Name of the true class of a row: a class of the head, or the caller's own word for an unknown class."""
        if self.truth is None:
            return None
        code = int(self.truth[row])
        if code >= 0:
            return self.names[code]
        return "unknown" if self.given is None else f"{shortened(self.given[row])} (unknown)"


def judged_rows(
    head: TrustHead,
    z: Any,
    y: Any = None,
    logits: Any = None,
    class_names: Any = None,
    unknown: Any = None,
    groups: Any = None,
    layers: Mapping[str, Any] | None = None,
) -> Rows:
    """Assess rows with a calibrated head and check what was given with them; see ``write_report``."""
    if head.calibration is None or not head.calibration.done:
        raise RuntimeError(
            "A report needs a calibrated head: call head.calibrate(embeddings, labels, logits) with held-out points, "
            "then head.accept_at(risk=...)."
        )
    if logits is not None and head.calibration.without_logits:
        raise ValueError(
            "The head was calibrated without logits, so it cannot assess the network's labels. Calibrate with logits, "
            "or leave out logits to report on the head's own labels."
        )
    out = head.judge(z, logits, groups, layers=layers)
    n = len(out.label)
    if n == 0:
        raise ValueError("There are no rows to report on; pass at least one.")
    label = out.network_label.numpy()
    given = None if y is None else _as_list(y)
    strange = None if unknown is None else np.asarray(_as_list(unknown))
    for name, values in (("y", given), ("unknown", strange)):
        if values is not None and len(values) != n:
            raise ValueError(f"Got {n} embeddings and {len(values)} values of {name}; pass one for each row.")
    if strange is not None and strange.dtype != bool:
        raise TypeError(f"unknown must hold booleans, one for each row, got {strange.dtype}.")
    truth = None if given is None else label_codes(given, head.classes)
    if truth is not None and strange is not None:
        truth = np.where(strange, -1, truth)
    return Rows(
        out=out,
        label=label,
        accept=out.accept.numpy(),
        reason=refusal_reason(out, head.promise).numpy(),
        truth=truth,
        right=None if truth is None else (label == truth) & (truth >= 0),
        softmax=None if logits is None else _largest_softmax(logits),
        given=given,
        names=_class_names(head.classes, class_names),
    )


def take(values: Any, rows: Int[Array, "n"]) -> Any:
    """Rows of an array, a tensor, a table, a mapping to columns or a list, in that form.

    >>> take(["a", "b", "c"], np.array([2, 0]))
    ['c', 'a']
    """
    if hasattr(values, "iloc"):
        return values.iloc[rows]
    if hasattr(values, "to_pydict"):  # an Arrow table
        return values.take(rows)
    if isinstance(values, Mapping):
        return {name: take(column, rows) for name, column in values.items()}
    if isinstance(values, Tensor):
        return values[torch.from_numpy(rows).to(values.device)]
    if isinstance(values, np.ndarray):
        return values[rows]
    return [values[int(row)] for row in rows]


def is_table(values: Any) -> bool:
    """Whether values have named columns: a DataFrame, an Arrow table or a mapping to columns."""
    return isinstance(values, Mapping) or hasattr(values, "columns")


def columns_of(table: Any, rows: Int[Array, "n"]) -> dict[str, list[Any]]:
    """The cells of some rows of a table, by column.

    >>> columns_of({"age": np.array([30, 40, 50]), "pet": ["cat", "dog", "cow"]}, np.array([2, 0]))
    {'age': [50, 30], 'pet': ['cow', 'cat']}
    """
    some = take(table, rows)
    found = some.to_pydict() if hasattr(some, "to_pydict") else {name: some[name] for name in some}
    return {str(name): _as_list(cells) for name, cells in found.items()}


def shortened(value: object, length: int = _NAME_LENGTH) -> str:
    r"""The text of a value in one line of at most ``length`` characters, without control characters.

    >>> shortened("a\nb"), shortened("x" * 100, 4)
    ('a b', 'xxx…')
    """
    text = str(value)
    # The rest of a long text is never looked at: a row can hold megabytes.
    text = printable(" ".join(text[: 4 * length].split())) or printable(text[:length])
    return text if len(text) <= length else f"{text[: length - 1]}…"


def text_of(texts: Any, row: int) -> str:
    """The beginning of the text of a row."""
    return shortened(take(texts, np.array([row]))[0], _TEXT_LENGTH)


def row_ids(ids: Any, rows: Int[Array, "n"]) -> dict[int, str]:
    """Names of rows: their ids, by default their row numbers."""
    chosen = rows.tolist() if ids is None else _as_list(take(ids, rows))
    return {row: shortened(name) for row, name in zip(rows.tolist(), chosen, strict=True)}


def check_length(values: Any, name: str, n: int) -> None:
    """Raise an error unless there is one value for each row, in every column of a mapping."""
    if isinstance(values, Mapping):
        for column, cells in values.items():
            check_length(cells, f"values of the column {str(column)!r} of {name}", n)
    elif values is not None and len(values) != n:
        raise ValueError(f"Got {n} embeddings and {len(values)} {name}; pass one for each row.")


def _as_list(values: Any) -> list[Any]:
    if isinstance(values, Tensor):
        values = values.detach().cpu().numpy()
    found: list[Any] = values.tolist() if hasattr(values, "tolist") else list(values)
    return found


def _class_names(classes: list[Any], given: Any) -> list[str]:
    if given is None:
        return [shortened(label) for label in classes]
    if isinstance(given, Mapping):
        return [shortened(given.get(label, label)) for label in classes]
    if len(given) != len(classes):
        raise ValueError(f"The head has {len(classes)} classes and class_names has {len(given)} names; pass one each.")
    return [shortened(name) for name in given]


def _largest_softmax(logits: Any) -> Float[Array, "N"]:
    given = logits if isinstance(logits, Tensor) else np.asarray(logits)
    step = rows_per_chunk(given.shape[1])
    parts = []
    for start in range(0, len(given), step):
        part = given[start : start + step]
        # A copy of the chunk: arrays can be read-only.
        part = part if isinstance(part, Tensor) else torch.from_numpy(np.array(part, dtype=np.float32))
        parts.append(max_softmax(part.float()).nan_to_num(0.0).cpu())
    return torch.cat(parts).numpy()

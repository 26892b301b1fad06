"""Counts of scored rows and right labels, for the summaries of ``sepc score``, ``sepc paper score`` and the demo."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sepc_torch.cli.shell import named, note
from sepc_torch.data.table_encoding import ABSENT, category_texts
from sepc_torch.data.text import text_table
from sepc_torch.model.prediction import Prediction
from sepc_torch.model.rules import Rule
from sepc_torch.shapes import Array, Bool

# Labels in a table of counts.
_LABELS = 20


class Share(NamedTuple):
    """Some of the scored rows: their number, their fraction of all rows, and their accuracy if known."""

    points: int
    share: float
    accuracy: float | None


class Tally:
    """Counts of rows by kind, such as the rule that labelled a row or the reason of a decision.

    Args:
        title: Name of the kinds.
        kinds: The kinds, in the order of the table.
        classes: The labels that the model knows.
        accepted: Title of a last line for the accepted rows; None where a kind counts them.

    >>> tally = Tally("rule", ["SINGLE", "OUTSIDE"], ["cat", "dog"], "inside")
    >>> tally.add(np.array(["SINGLE", "OUTSIDE"]), np.array([True, False]), ["cat", "dog"], ["cat", "eel"])
    >>> print(tally)
    rule     rows  share   accuracy
    SINGLE      1  50.0%   100.0%
    OUTSIDE     1  50.0%   0.0%
    all         2  100.0%  50.0%
    inside      1  50.0%   100.0%
    """

    def __init__(self, title: str, kinds: Sequence[str], classes: Sequence[Any], accepted: str | None = None) -> None:
        self._title, self._kinds, self._accepted = title, list(kinds), accepted
        self._known = set(category_texts(list(classes), frozenset()).tolist())
        self.rows = 0
        self._truth: Counter[str] = Counter()
        # By kind and by whether the row is accepted.
        self._count: Counter[tuple[str, bool]] = Counter()
        self._labelled: Counter[tuple[str, bool]] = Counter()
        self._right: Counter[tuple[str, bool]] = Counter()
        # By label, true label ("" if unknown) and whether the row is accepted.
        self._pairs: Counter[tuple[str, str, bool]] = Counter()

    def add(
        self, kinds: Array, accepted: Bool[Array, "n"], labels: Sequence[Any], truth: Sequence[str | None] | None
    ) -> None:
        """Count rows: their kinds, their labels, and their true labels as text, None where one is missing."""
        self.rows += len(kinds)
        keys = list(zip(kinds.tolist(), accepted.tolist(), strict=True))
        self._count.update(keys)
        given = category_texts(list(labels), frozenset()).tolist()
        true = [""] * len(given) if truth is None else [text or "" for text in truth]
        self._pairs.update(zip(given, true, accepted.tolist(), strict=True))
        if truth is None:
            return
        self._truth.update(text for text in truth if text is not None)
        self._labelled.update(key for key, text in zip(keys, truth, strict=True) if text is not None)
        self._right.update(key for key, text, label in zip(keys, truth, given, strict=True) if text == label)

    def share(self, kind: str | None = None, accepted: bool = False) -> Share:
        """The rows of a kind, or all rows; with ``accepted`` only the accepted ones."""
        chosen = [key for key in self._count if kind in (None, key[0]) and (key[1] or not accepted)]
        rows, labelled, right = (sum(c[key] for key in chosen) for c in (self._count, self._labelled, self._right))
        return Share(rows, rows / max(self.rows, 1), right / labelled if labelled else None)

    def check_labels(self, path: Path, label: str | None) -> None:
        """Note true labels that the model does not know; raise ValueError if it knows none of them."""
        unknown = sorted(set(self._truth) - self._known)
        if unknown and len(unknown) == len(self._truth):
            raise ValueError(
                f"{str(path)!r}, column {label!r}: the model knows none of the labels {named(unknown)}; "
                f"it knows {named(sorted(self._known))}."
            )
        if unknown:
            note(f"labels unknown to the model count as mistakes: {named(unknown)}")

    def numbers(self, key: str) -> dict[str, Any]:
        """The counts as a dictionary for JSON; those of the kinds stand under ``key``."""
        everything, accepted = self.share(), self.share(accepted=True)
        return {
            "points": self.rows,
            "accuracy": everything.accuracy,
            "accepted": accepted.points,
            "coverage": accepted.share,
            "accepted_accuracy": accepted.accuracy,
            key: {kind: self.share(kind)._asdict() for kind in self._kinds},
        }

    def by_label(self) -> list[dict[str, Any]]:
        """For every label: its rows, those accepted, and, with true labels, how they fare by their true label."""
        found = []
        for name in sorted({name for pair in self._pairs for name in pair[:2]} - {"", ABSENT}):
            so = [pair for pair in self._pairs if pair[0] == name]
            accepted = [pair for pair in so if pair[2]]
            line: dict[str, Any] = {"label": name, "rows": self._rows(so), "accepted": self._rows(accepted)}
            if self._truth:
                known = [pair for pair in accepted if pair[1]]
                truly = [pair for pair in self._pairs if pair[1] == name]
                taken = [pair for pair in truly if pair[2]]
                line["right"] = self._part(known, [pair for pair in known if pair[0] == pair[1]])
                line |= {"truly": self._rows(truly), "truly_accepted": self._rows(taken)}
                line["truly_wrong"] = self._part(taken, [pair for pair in taken if pair[0] != name])
            found.append(line)
        return found

    def _rows(self, pairs: Iterable[tuple[str, str, bool]]) -> int:
        return sum(self._pairs[pair] for pair in pairs)

    def _part(self, pairs: Iterable[tuple[str, str, bool]], some: Iterable[tuple[str, str, bool]]) -> float | None:
        rows = self._rows(pairs)
        return self._rows(some) / rows if rows else None

    def label_table(self) -> str:
        """The counts by label as text, of the most frequent labels.

        >>> tally = Tally("decision", ["accepted"], ["cat", "dog"])
        >>> labels, truth = ["cat", "cat", "dog"], ["cat", "dog", "dog"]
        >>> tally.add(np.array(["accepted"] * 3), np.array([True, True, False]), labels, truth)
        >>> print(tally.label_table())
        label  labelled so  accepted  of these right  truly so  accepted  of these wrong
        cat              2         2  50.0%                  1         1  0.0%
        dog              1         0                         2         1  100.0%
        """
        lines = sorted(self.by_label(), key=lambda line: -line["rows"])
        title = ["label", "labelled so", "accepted"]
        title += ["of these right", "truly so", "accepted", "of these wrong"] if self._truth else []
        cells = [
            ["" if value is None else f"{value:.1%}" if isinstance(value, float) else value for value in line.values()]
            for line in lines[:_LABELS]
        ]
        more = f"\nand {len(lines) - _LABELS} more labels" if len(lines) > _LABELS else ""
        return text_table(title, cells) + more

    def __str__(self) -> str:
        lines = {kind: self.share(kind) for kind in self._kinds if self.share(kind).points}
        lines["all"] = self.share()
        if self._accepted is not None:
            lines[self._accepted] = self.share(accepted=True)
        cells = [
            [title, points, f"{share:.1%}", "" if accuracy is None else f"{accuracy:.1%}"]
            for title, (points, share, accuracy) in lines.items()
        ]
        return text_table([self._title, "rows", "share", "accuracy"], cells)


class RuleTally(Tally):
    """Counts of rows that the paper's classifier labelled, by rule.

    Args:
        classes: The labels of the classifier.
        threshold: Lowest trust of an accepted row, which also lies inside an ellipsoid.
    """

    def __init__(self, classes: Sequence[Any], threshold: float) -> None:
        super().__init__("rule", [rule.name for rule in Rule], classes, f"trust >= {threshold:g}, inside")
        self._classes, self._threshold = classes, threshold

    def add_prediction(self, out: Prediction, truth: Sequence[str | None] | None) -> None:
        """Count the rows of a prediction."""
        rules = np.array([rule.name for rule in Rule])[out.rule.numpy()]
        accepted = ~out.abstain(self._threshold, outside=True).numpy()
        self.add(rules, accepted, [self._classes[code] for code in out.label.tolist()], truth)

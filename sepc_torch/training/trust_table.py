"""Table of predictions with one row per sample: the least safe first, filtered by flag, as CSV or JSON lines."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sepc_torch.data import files
from sepc_torch.data.text import escape_cell, printable, quoting, text_table, to_json
from sepc_torch.head.reasons import Reason
from sepc_torch.model.rules import Rule
from sepc_torch.shapes import Bool, Int

# Reasons to flag a sample, in order of priority; a table holds their index, -1 for samples without a flag.
REASONS = tuple(reason.text for reason in Reason if reason != Reason.ACCEPTED)
# Number of rows that a printed table shows.
_SHOWN = 10


@dataclass(frozen=True, eq=False, repr=False)
class TrustTable:
    """Predictions with one row per sample, the least safe first: in order of joint score, else of trust.

    Attributes:
        ids: Ids of the samples: integers or text.
        columns: Tensors (B,) by name: ``trust``, ``label``, ``rule``, ``reason``, ``distance``, ``margin``; if known,
            ``network_label``, ``network_trust``, ``network_margin``, ``target``; of a calibrated head ``joint``,
            ``confidence``, ``p_value``. ``label``, ``rule`` and ``reason`` hold codes.
        classes: The class labels, indexed by the codes in ``label``.

    >>> columns = {"trust": torch.tensor([0.9, 0.4]), "label": torch.tensor([1, 0]), "reason": torch.tensor([-1, 4])}
    >>> table = TrustTable.of([7, 8], columns, classes=["cat", "dog"])
    >>> print(table)
    id   trust  label  reason
     8     0.4    cat  ambiguous
     7     0.9    dog
    >>> table.where(table.columns["reason"] >= 0).ids
    (8,)
    """

    ids: tuple[int | str, ...]
    columns: Mapping[str, Tensor]
    classes: Sequence[Any]

    @classmethod
    def of(cls, ids: Sequence[int | str], columns: Mapping[str, Tensor], classes: Sequence[Any]) -> TrustTable:
        """Build a table sorted by joint score if there is one, then by trust, then margin, then id."""
        table = cls(tuple(ids), dict(columns), list(classes))
        keys = [columns[name].numpy() for name in ("margin", "trust", "joint") if name in columns]
        return table.take(torch.from_numpy(np.lexsort((np.array(table.ids), *keys))) if len(table) else torch.arange(0))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, name: str) -> list[Any]:
        """Values of a column, with labels, rules and reasons by name instead of by code."""
        if name == "id":
            return list(self.ids)
        if name not in self.columns:
            raise KeyError(f"There is no column {name!r}; the columns are id, {', '.join(self.columns)}.")
        values = self.columns[name].tolist()
        if name == "label":
            return [None if code < 0 else self.classes[code] for code in values]
        if name == "rule":
            return [Rule(code).name for code in values]
        if name == "reason":
            return ["" if code < 0 else REASONS[code] for code in values]
        return values

    def __repr__(self) -> str:
        return f"TrustTable({len(self)} rows: id, {', '.join(map(printable, self.columns))})"

    def __str__(self) -> str:
        shown = self.take(torch.arange(min(_SHOWN, len(self))))
        lines = text_table(["id", *self.columns], [list(row.values()) for row in shown.rows()])
        return lines if len(self) <= _SHOWN else f"{lines}\n... {len(self) - _SHOWN} more"

    def rows(self) -> Iterator[dict[str, Any]]:
        """Iterate over the rows as dictionaries of plain values."""
        named = {"id": self["id"], **{name: self[name] for name in self.columns}}
        for values in zip(*named.values(), strict=True):
            yield dict(zip(named, values, strict=True))

    def take(self, positions: Int[Tensor, "n"]) -> TrustTable:
        """The rows at the given positions, in the given order."""
        return replace(
            self,
            ids=tuple(self.ids[i] for i in positions.tolist()),
            columns={name: column[positions] for name, column in self.columns.items()},
        )

    def where(self, mask: Bool[Tensor, "B"]) -> TrustTable:
        """The rows for which the mask is True."""
        return self.take(mask.nonzero().squeeze(1))

    def find(self, ids: Sequence[int | str]) -> TrustTable:
        """The rows with the given ids, in the given order."""
        place = {name: row for row, name in enumerate(self.ids)}
        missing = [name for name in ids if name not in place]
        if missing:
            raise KeyError(f"The table has no rows for the ids {missing[:5]}; it has {len(self)} rows.")
        return self.take(torch.tensor([place[name] for name in ids], dtype=torch.int64))

    def to_pandas(self) -> Any:
        """Convert to a pandas DataFrame; pandas must be installed."""
        import pandas as pd

        return pd.DataFrame({"id": self["id"], **{name: self[name] for name in self.columns}})

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write a CSV file with a header, atomically. Text that looks like a formula starts with an apostrophe."""
        write_records(path, list(self.rows()), ["id", *self.columns])

    def to_jsonl(self, path: str | os.PathLike[str]) -> None:
        """Write one JSON object per line, atomically. NaN and infinity become null."""
        lines = [json.dumps(to_json(row)) + "\n" for row in self.rows()]
        with files.replacing(Path(path)) as temporary:
            temporary.write_text("".join(lines), encoding="utf-8")


def write_records(path: str | os.PathLike[str], records: Sequence[Mapping[str, Any]], header: Sequence[str]) -> None:
    """Write dictionaries as a CSV file for spreadsheets, atomically; text that looks like a formula is escaped."""
    rows = [[escape_cell(name) for name in header]]
    rows += [[escape_cell(record.get(name, "")) for name in header] for record in records]
    with (
        files.replacing(Path(path)) as temporary,
        temporary.open("w", newline="", encoding="utf-8") as file,
    ):
        style = quoting(cell for row in rows for cell in row)
        csv.writer(file, lineterminator="\n", quoting=style).writerows(rows)

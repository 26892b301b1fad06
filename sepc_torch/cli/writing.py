"""Scores written in pieces to CSV or Parquet; the file appears when all of it is written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet

from sepc_torch.data.csv_cells import escape_cell
from sepc_torch.data.files import replacing


class ScoreWriter:
    """Writer of tables of the same columns, one piece after the other.

    Args:
        path: The file to write to.
        csv: Whether to write CSV, with text that looks like a formula escaped; Parquet otherwise.
    """

    def __init__(self, path: Path, csv: bool) -> None:
        self._path, self._csv = path, csv
        self._writer: Any = None
        self._schema: Any = None

    def write(self, table: pa.Table) -> None:
        """Write the next rows; missing values become empty cells."""
        if self._csv:
            table = escaped(table)
        if self._writer is None:
            kind = pa.csv.CSVWriter if self._csv else pa.parquet.ParquetWriter
            self._schema = table.schema
            self._writer = kind(str(self._path), self._schema)
        self._writer.write(table.cast(self._schema))

    def close(self) -> None:
        """Write what is left."""
        if self._writer is not None:
            self._writer.close()


@contextmanager
def score_writer(path: Path) -> Iterator[ScoreWriter]:
    """Context manager for a writer by the suffix of the file; an error leaves the old file unchanged."""
    with replacing(path) as temporary:
        writer = ScoreWriter(temporary, path.name.lower().endswith(".csv"))
        try:
            yield writer
        finally:
            writer.close()


def escaped(table: pa.Table) -> pa.Table:
    """Escape column names and texts that a spreadsheet would run as formulas.

    >>> escaped(pa.table({"=a": ["=1", None, "x"]})).to_pydict()
    {"'=a": ["'=1", None, 'x']}
    """
    columns = [_escaped_column(table.column(name)) for name in table.column_names]
    return pa.table(columns, names=[escape_cell(name) for name in table.column_names])


def _escaped_column(column: Any) -> Any:
    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        return column
    distinct: list[str | None] = pc.unique(column).to_pylist()
    changed = {text: None if text is None else escape_cell(text) for text in distinct}
    if all(before == after for before, after in changed.items()):
        return column
    return pa.chunked_array([pa.array([changed[text] for text in column.to_pylist()], column.type)])

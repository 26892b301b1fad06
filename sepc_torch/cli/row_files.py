"""Files of rows, read in pieces: CSV, TSV, JSON lines, Parquet, NPY and NPZ (extra ``cli``).

Text formats give columns of text, so that one unreadable cell spoils its row and not the file. A row with the wrong
number of fields comes as a row without values, with its problem.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from sepc_torch.cli.array_files import ArrayStream, npy_stream, npz_streams
from sepc_torch.cli_tables import named, reason
from sepc_torch.data.arrays import refuse_duplicates
from sepc_torch.data.csv_cells import unescape_cell

# Bytes of text that are parsed at a time. A row must fit, and Arrow's reader keeps up to 32 of these blocks.
_BLOCK = 2**20
# Most rows of a piece: enough to use all cores, and few enough that the values computed from them stay small.
_ROWS = 2**13
# Numbers per piece of the binary formats: 16 MiB in float64.
_VALUES = 2**21
SUFFIXES = (".csv", ".csv.gz", ".tsv", ".tsv.gz", ".jsonl", ".jsonl.gz", ".parquet", ".npy", ".npz")
# Names of the arrays of an NPZ file. The first two of the first line hold features, the others embeddings of a network.
_POINTS, _LABELS = ("X", "features", "z", "embeddings"), ("y", "labels")


class Piece(NamedTuple):
    """Some rows of a file.

    Attributes:
        table: The columns; a broken row holds nulls.
        problems: What is wrong with the broken rows, by their index in the piece.
        done: Units of work read so far, of ``RowFile.total``.
    """

    table: pa.Table
    problems: dict[int, str]
    done: int


class RowFile(ABC):
    """A file of rows.

    Attributes:
        path: The file.
        names: Names of all columns.
        total: Units of work of the whole file, bytes or rows.
        label: The column of labels of an NPZ file, or None.
        logits: The columns of logits of an NPZ file.
        embeddings: Whether the file says that its rows are embeddings of a network.
        named: Whether the names of the features come from the file.
    """

    path: Path
    names: list[str]
    total: int
    label: str | None = None
    logits: tuple[str, ...] = ()
    embeddings: bool = False
    named: bool = True

    @abstractmethod
    def read(self, columns: Sequence[str]) -> Iterator[Piece]:
        """Read these columns a piece at a time."""

    def pieces(self, columns: Sequence[str]) -> Iterator[Piece]:
        """Read these columns a piece at a time; every error of the reader becomes a ValueError of one line."""
        read = iter(self.read(columns))
        while True:
            with usable(self.path):
                piece = next(read, None)
            if piece is None:
                return
            for start in range(0, piece.table.num_rows, _ROWS):
                here = {i - start: text for i, text in piece.problems.items() if start <= i < start + _ROWS}
                yield Piece(piece.table.slice(start, _ROWS), here, piece.done)

    def require(self, columns: Sequence[str]) -> None:
        """Raise ValueError if the file lacks one of the columns."""
        lacking = [column for column in columns if column not in self.names]
        if not lacking:
            return
        single = next((mark for mark in ";\t|" if len(self.names) == 1 and mark in self.names[0]), None)
        hint = "" if single is None else f" The columns seem to be separated by {single!r}: use --sep {single!r}."
        few = "column" if len(lacking) == 1 else "columns"
        raise ValueError(f"{str(self.path)!r} has no {few} {named(lacking)}; it has {named(self.names)}.{hint}")


@contextmanager
def usable(path: Path) -> Iterator[None]:
    """Context manager for reading a file: errors of the readers become ValueError with the name of the file."""
    try:
        yield
    except PermissionError:
        raise PermissionError(f"No permission to read {str(path)!r}.") from None
    except (ImportError, MemoryError):
        raise
    except Exception as error:  # the readers raise any error for a damaged file
        kind = path.name.lower().removesuffix(".gz").rpartition(".")[2].upper()
        raise ValueError(f"{str(path)!r} is not a usable {kind} file ({reason(error)}). Check the file.") from error


def open_rows(path: Path, sep: str | None = None) -> RowFile:
    """Open a file by its suffix.

    Args:
        path: The file.
        sep: The character between the fields of a CSV or TSV file; by default a comma or a tab.
    """
    suffix = next((suffix for suffix in SUFFIXES if path.name.lower().endswith(suffix)), None)
    if suffix is None:
        raise ValueError(f"Cannot read {str(path)!r}: its name must end in {' or '.join(SUFFIXES)}.")
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {str(path)!r}.")
    if sep is not None:
        sep = {"tab": "\t", "\\t": "\t"}.get(sep, sep)
        if len(sep) != 1 or not suffix.startswith((".csv", ".tsv")):
            raise ValueError(f"--sep must be one character, for CSV and TSV files; got {sep!r} for {str(path)!r}.")
    with usable(path):
        if suffix.startswith((".csv", ".tsv")):
            return _TextFile(path, sep or ("\t" if suffix.startswith(".tsv") else ","))
        if suffix.startswith(".jsonl"):
            return _JsonLines(path)
        return _ParquetFile(path) if suffix == ".parquet" else _ArrayFile(path, suffix)


class _TextFile(RowFile):
    """CSV and TSV, plain or compressed."""

    def __init__(self, path: Path, sep: str) -> None:
        self.path, self._sep, self.total = path, sep, max(path.stat().st_size, 1)
        with _open_text(path) as file:
            reader = csv.reader(file, delimiter=sep)
            header = next((row for row in reader if row), None)
            self._skip = reader.line_num
            self._rows = any(line.strip() for line in file)  # read up to the first row
        if header is None:
            raise ValueError("the file is empty")
        self.names = [unescape_cell(name) or f"column {j}" for j, name in enumerate(header)]
        refuse_duplicates(self.names, "it")

    def read(self, columns: Sequence[str]) -> Iterator[Piece]:
        if not self._rows:  # the reader of Arrow calls such a file damaged
            return
        keys = {name: f"f{j}" for j, name in enumerate(self.names)}  # unique names for the reader
        broken: dict[int, str] = {}

        def skip(row: Any) -> str:
            # The reader counts rows from 1, with the lines of the header.
            fields = f"{row.actual_columns} {'field' if row.actual_columns == 1 else 'fields'}"
            broken[row.number - 1 - self._skip] = f"the row has {fields}, expected {row.expected_columns}"
            return "skip"

        # A file without a chosen column still has rows: read the first column to count them.
        chosen = [keys[name] for name in columns] or ["f0"]
        with pa.OSFile(str(self.path)) as file:
            stream = pa.CompressedInputStream(file, "gzip") if self.path.name.lower().endswith(".gz") else file
            # One thread: the row numbers of broken rows are only known then.
            reader = pa.csv.open_csv(
                stream,
                pa.csv.ReadOptions(
                    use_threads=False, block_size=_BLOCK, skip_rows=self._skip, column_names=list(keys.values())
                ),
                pa.csv.ParseOptions(delimiter=self._sep, newlines_in_values=True, invalid_row_handler=skip),
                pa.csv.ConvertOptions(
                    column_types=dict.fromkeys(keys.values(), pa.string()),
                    include_columns=chosen,
                    strings_can_be_null=False,
                ),
            )
            start = 0
            table = pa.table({name: pa.array([], pa.string()) for name in columns or [""]})
            for batch in reader:
                table = pa.table(dict(zip(columns, batch.columns, strict=False)) or {"": batch.columns[0]})
                piece = _with_broken_rows(table, broken, start, file.tell())
                start += piece.table.num_rows
                yield piece
            if broken:  # the last rows of the file
                yield _with_broken_rows(table.slice(0, 0), broken, start, self.total)


def _with_broken_rows(table: pa.Table, broken: dict[int, str], start: int, done: int) -> Piece:
    """Insert rows of nulls where rows are broken; remove these rows from ``broken``.

    Args:
        table: The rows that could be read.
        broken: The problems of broken rows by their index in the file; some may lie beyond the table.
        start: Index of the first row in the file.
        done: Units of work done.
    """
    if not broken:
        return Piece(table, {}, done)
    indices: list[int | None] = []
    problems: dict[int, str] = {}
    rows = iter(range(table.num_rows))
    row = next(rows, None)
    while row is not None or start + len(indices) in broken:
        problem = broken.pop(start + len(indices), None)
        if problem is not None:
            problems[len(indices)] = problem
            indices.append(None)
        else:
            indices.append(row)
            row = next(rows, None)
    if not table.num_rows:
        nulls = [pa.nulls(len(indices), field.type) for field in table.schema]
        return Piece(pa.table(nulls, schema=table.schema), problems, done)
    return Piece(table.take(pa.array(indices, pa.int64())), problems, done)


class _JsonLines(RowFile):
    """One JSON object per line. The first line names the columns; a list of numbers becomes a column per element."""

    def __init__(self, path: Path) -> None:
        self.path, self.total = path, max(path.stat().st_size, 1)
        with _open_text(path) as file:
            first = next((line for line in file if line.strip()), None)
        if first is None:
            raise ValueError("the file is empty")
        self.names = list(_flat(json.loads(first)))
        refuse_duplicates(self.names, "it")

    def read(self, columns: Sequence[str]) -> Iterator[Piece]:
        size, done = 0, 0
        rows: list[dict[str, str | None]] = []
        problems: dict[int, str] = {}
        with _open_text(self.path) as file:
            for line in file:
                if not line.strip():
                    continue
                try:
                    rows.append(_flat(json.loads(line)))
                except (ValueError, RecursionError) as error:
                    problems[len(rows)] = f"the line is not a JSON object ({reason(error)})"
                    rows.append({})
                size += len(line)
                if size >= _BLOCK:
                    done += size
                    yield Piece(_text_table(rows, columns), problems, min(done, self.total))
                    rows, problems, size = [], {}, 0
        yield Piece(_text_table(rows, columns), problems, self.total)


def _flat(record: Any) -> dict[str, str | None]:
    """The values of a JSON object as text; the elements of the list ``z`` are called z0, z1 and so on."""
    if not isinstance(record, dict):
        raise ValueError('a line must hold an object such as {"age": 31}')
    flat: dict[str, str | None] = {}
    for name, value in record.items():
        if isinstance(value, list):
            flat |= {f"{name}{j}": _text(item) for j, item in enumerate(value)}
        else:
            flat[name] = _text(value)
    return flat


def _text(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value)


def _text_table(rows: list[dict[str, str | None]], columns: Sequence[str]) -> pa.Table:
    names = list(columns) or [""]
    return pa.table({name: pa.array([row.get(name) for row in rows], pa.string()) for name in names})


class _ParquetFile(RowFile):
    """Parquet. The index of a pandas table is no column, and a column of lists becomes a column per element."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with pa.parquet.ParquetFile(path) as file:
            schema, self.total = file.schema_arrow, max(file.metadata.num_rows, 1)
            index = (schema.pandas_metadata or {}).get("index_columns", [])
            fields = [field for field in schema if field.name not in index]
            refuse_duplicates([field.name for field in fields], "it")
            lists = [field.name for field in fields if _is_list(field.type)]
            head = next(file.iter_batches(1, columns=lists), None) if lists else None
        # The elements of each list column; the first row says how many.
        self._elements = {name: _elements(name, head) for name in lists}
        self._stored = [field.name for field in fields]
        self.names = [part for name in self._stored for part in self._elements.get(name, [name])]
        refuse_duplicates(self.names, "it")

    def read(self, columns: Sequence[str]) -> Iterator[Piece]:
        home = {part: name for name in self._stored for part in self._elements.get(name, [name])}
        stored = list(dict.fromkeys(home[column] for column in columns)) or self._stored[:1]
        done = 0
        with pa.parquet.ParquetFile(self.path) as file:
            for batch in file.iter_batches(max(1, min(_ROWS, _VALUES // max(len(self.names), 1))), columns=stored):
                parts: dict[str, Any] = {}
                for name in stored:
                    column = batch.column(name)
                    if name in self._elements:
                        parts |= _split_lists(column, self._elements[name])
                    else:
                        parts[name] = column
                done += batch.num_rows
                yield Piece(pa.table({name: parts[name] for name in columns or stored}), {}, done)


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _elements(name: str, head: Any) -> list[str]:
    length = 0 if head is None or head.num_rows == 0 else len(head.column(name)[0].as_py() or [])
    return [f"{name}{j}" for j in range(length)]


def _split_lists(column: Any, names: list[str]) -> dict[str, Any]:
    """One column per element; a list of another length gives nulls."""
    rows = [row if row is not None and len(row) == len(names) else [None] * len(names) for row in column.to_pylist()]
    kind = column.type.value_type
    return {name: pa.array([row[j] for row in rows], kind) for j, name in enumerate(names)}


class _ArrayFile(RowFile):
    """NPY: one array (N, D). NPZ: ``X`` or ``embeddings``, and optionally ``y``, ``logits`` and ``feature_names``."""

    def __init__(self, path: Path, suffix: str) -> None:
        self.path, self._npz = path, suffix == ".npz"
        with self._streams() as streams:
            points = next((name for name in _POINTS if name in streams), None)
            if points is None:
                raise ValueError(f"the array 'X' or 'embeddings' is missing; the file has {named(list(streams))}")
            self._points, width = points, _width(points, streams[points])
            self._label = next((name for name in _LABELS if name in streams), None)
            self.total = max(streams[points].shape[0], 1)
            given = None
            if "feature_names" in streams:
                given = [str(name) for name in streams["feature_names"].rows(width + 1).ravel()]
            self.named = given is not None
            self._features = given or [f"x{j}" for j in range(width)]
            if len(self._features) != width:
                raise ValueError(f"{points} has {width} columns and feature_names has {len(self._features)} names")
            if "logits" in streams:
                self.logits = tuple(f"logits{j}" for j in range(_width("logits", streams["logits"])))
            self.label = None if self._label is None else "y"
            for name in filter(None, (self._label, "logits" if self.logits else None)):
                shape = streams[name].shape
                if shape[0] != streams[points].shape[0] or (name != "logits" and len(shape) != 1):
                    raise ValueError(f"{points} has {streams[points].shape[0]} rows and {name} has shape {shape}")
        self.embeddings = points in ("z", "embeddings") or bool(self.logits)
        self.names = [*self._features, *filter(None, [self.label]), *self.logits]
        refuse_duplicates(self.names, "it")

    def _streams(self) -> Any:
        return npz_streams(self.path) if self._npz else npy_stream(self.path, "X")

    def read(self, columns: Sequence[str]) -> Iterator[Piece]:
        with self._streams() as streams:
            wanted: list[tuple[Sequence[str], ArrayStream]] = [(self._features, streams[self._points])]
            if self._label is not None:
                wanted.append((["y"], streams[self._label]))
            if self.logits:
                wanted.append((self.logits, streams["logits"]))
            step, done = max(1, min(_ROWS, _VALUES // max(len(self.names), 1))), 0
            chosen = set(columns)
            while done < streams[self._points].shape[0]:
                parts: dict[str, Any] = {}
                for names, stream in wanted:
                    rows = stream.rows(step)
                    rows = rows.reshape(len(rows), -1)
                    parts |= {name: pa.array(rows[:, j]) for j, name in enumerate(names) if name in chosen}
                done = min(done + step, streams[self._points].shape[0])
                yield Piece(pa.table({name: parts[name] for name in columns}), {}, done)


def _width(name: str, stream: ArrayStream) -> int:
    if len(stream.shape) != 2:
        raise ValueError(f"{name} must have shape (rows, columns), got {stream.shape}")
    return stream.shape[1]


def _open_text(path: Path) -> io.TextIOBase:
    """The text of a file, plain or compressed, without a byte order mark."""
    if path.name.lower().endswith(".gz"):
        return io.TextIOWrapper(gzip.open(path), encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")

"""Files of rows, read and written in pieces: CSV, TSV, JSON lines, Parquet, NPY and NPZ (extra ``cli``).

Text is read as text, so that one unreadable cell spoils its row and not the file. A broken row comes as a row without
values, with its problem. A column of lists becomes a column for each element; its lists have the length that most of
its first lists have, and a list of another length spoils its row.
"""

from __future__ import annotations

import atexit
import codecs
import csv
import difflib
import gzip
import io
import json
import math
import shutil
import sys
import tempfile
import zipfile
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet
from numpy.lib import format as npy_format

from sepc_torch.cli.shell import WRITABLE, named, reason
from sepc_torch.data.arrays import refuse_duplicates
from sepc_torch.data.files import replacing
from sepc_torch.data.labels import LONGEST_LABEL
from sepc_torch.data.memory import check_memory
from sepc_torch.data.progress import Bar
from sepc_torch.data.text import escape_cell, to_json, unescape_cell
from sepc_torch.data.warn import warn_user
from sepc_torch.shapes import Array

SUFFIXES = (".csv", ".csv.gz", ".tsv", ".tsv.gz", ".jsonl", ".jsonl.gz", ".parquet", ".npy", ".npz")
# Bytes of text that are parsed at a time. A row must fit, and Arrow's reader keeps up to 32 of these blocks.
BLOCK = 2**20
# Most rows of a piece: enough to use all cores, and few enough that the values computed from them stay small.
ROWS = 2**13
# Numbers per piece of the binary formats: 16 MiB in float64.
VALUES = 2**21
# Most columns of an array, and most elements of a list: a row has to fit into memory with a name for each number.
COLUMNS = 2**20
# Most characters of a line of JSON and of the header of a CSV file: a compressed file can hold a line of any length.
LINE = 2**24
# Names of the arrays of an NPZ file. The first two of the first line hold features, the others embeddings of a network.
_POINTS, _LABELS = ("X", "features", "z", "embeddings"), ("y", "labels")
# Bytes of a text file by which its encoding is guessed.
_GUESS = 2**24
# Likeness of a name to one that is suggested.
_NEAR = 0.8
# Most names of columns in an error message: those of any table that a person made.
_NAMES = 300
# Types of bytes in Arrow tables.
_BYTES = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary)


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

    def pieces(self, columns: Sequence[str], task: str | None = None) -> Iterator[Piece]:
        """Read these columns a piece at a time, with a progress bar if there is a task.

        Every error of the reader becomes a ValueError of one line.
        """
        read = iter(self.read(columns))
        done = 0
        with Bar(task or "", self.total, "auto" if task else False) as bar:
            while True:
                with usable(self.path):
                    piece = next(read, None)
                if piece is None:
                    return
                for start in range(0, piece.table.num_rows, ROWS):
                    here = {i - start: text for i, text in piece.problems.items() if start <= i < start + ROWS}
                    yield Piece(piece.table.slice(start, ROWS), here, piece.done)
                bar.advance(piece.done - done)
                done = piece.done

    def rows(self, columns: Sequence[str], wanted: Sequence[int]) -> Piece:
        """Read these columns of some rows; the file is read no further than the last of them."""
        start, found = 0, {}
        problems: dict[int, str] = {}
        for piece in self.pieces(columns):
            for i in wanted:
                if start <= i < start + piece.table.num_rows:
                    found[i] = piece.table.slice(i - start, 1)
                    problems |= {i: piece.problems[i - start]} if i - start in piece.problems else {}
            start += piece.table.num_rows
            if start > max(wanted):
                break
        else:
            beyond = next((i for i in wanted if i >= start), None)
            if beyond is not None:
                raise ValueError(f"{str(self.path)!r} has no row {beyond}; it has the rows 0 to {start - 1}.")
        places = {j: problems[i] for j, i in enumerate(wanted) if i in problems}
        return Piece(pa.concat_tables([found[i] for i in wanted]), places, self.total)

    def require(self, columns: Sequence[str]) -> None:
        """Raise ValueError if the file lacks one of the columns."""
        lacking = [column for column in columns if column not in self.names]
        if not lacking:
            return
        folded = {name.strip().casefold(): name for name in reversed(self.names)}
        near = [difflib.get_close_matches(name.strip().casefold(), list(folded), 1, _NEAR) for name in lacking]
        meant = ", ".join(repr(folded[found[0]]) for found in near if found)
        hint = f" Did you mean {meant}?" if meant else ""
        few = "column" if len(lacking) == 1 else "columns"
        raise ValueError(f"{str(self.path)!r} has no {few} {named(lacking)}.{hint} It has {named(self.names, _NAMES)}.")


@contextmanager
def usable(path: Path) -> Iterator[None]:
    """Context manager for reading a file: errors of the readers become ValueError with the name of the file."""
    try:
        yield
    except PermissionError:
        raise PermissionError(f"No permission to read {str(path)!r}.") from None
    except ImportError:
        raise
    except MemoryError as error:
        raise MemoryError(
            f"{str(path)!r} does not fit into memory: {reason(error)}. Split its rows or columns."
        ) from None
    except Exception as error:  # the readers raise any error for a damaged file
        kind = path.name.lower().removesuffix(".gz").rpartition(".")[2].upper()
        raise ValueError(f"{str(path)!r} is not a usable {kind} file ({reason(error)}). Check the file.") from error


def open_bytes(path: Path) -> Any:
    """The bytes of a file, plain or compressed."""
    return gzip.open(path) if path.name.lower().endswith(".gz") else path.open("rb")


def open_text(path: Path, encoding: str = "utf-8-sig") -> io.TextIOBase:
    """The text of a file, plain or compressed, without a byte order mark."""
    return io.TextIOWrapper(open_bytes(path), encoding=encoding, newline="")


def guessed_encoding(path: Path) -> str:
    """The encoding of a text file by its first bytes: utf-16 with its mark, utf-8 where it fits, else cp1252.

    A later byte that does not fit is an error of the reader.
    """
    with open_bytes(path) as file:
        start = file.read(_GUESS)
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    try:  # a character may be cut at the end
        codecs.getincrementaldecoder("utf-8")().decode(start, final=len(start) < _GUESS)
    except UnicodeDecodeError:
        return "cp1252"
    return "utf-8-sig"


def _checked_encoding(encoding: str) -> str:
    try:
        name = codecs.lookup(encoding).name
    except LookupError:
        raise ValueError(
            f"There is no encoding {encoding!r} (--encoding); examples are utf-8, cp1252, utf-16."
        ) from None
    return "utf-8-sig" if name == "utf-8" else name


def standard_input() -> Path:
    """A file with what standard input holds, named by its contents; it is deleted when the program ends."""
    folder = Path(tempfile.mkdtemp(prefix="sepc-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    target = folder / "standard input"
    with target.open("wb") as file:
        shutil.copyfileobj(sys.stdin.buffer, file)
    with target.open("rb") as file:
        start = file.read(4096)
    kinds = {b"PAR1": ".parquet", b"PK\x03\x04": ".npz", b"\x93NUMPY": ".npy"}
    suffix = next((suffix for mark, suffix in kinds.items() if start.startswith(mark)), None)
    if suffix is None:
        packed = start.startswith(b"\x1f\x8b")
        with gzip.open(target) if packed else target.open("rb") as file:
            suffix = (".jsonl" if file.read(4096).lstrip().startswith(b"{") else ".csv") + (".gz" if packed else "")
    return target.rename(target.with_name(target.name + suffix))


def open_rows(path: Path, sep: str | None = None, encoding: str | None = None) -> RowFile:
    """Open a file by its suffix, or standard input for ``-``.

    Args:
        path: The file.
        sep: The character between the fields of a CSV or TSV file; by default that of the header.
        encoding: The encoding of a text file; by default it is guessed.
    """
    if str(path) == "-":
        path = standard_input()
    if path.suffix == ".safetensors":
        raise ValueError(f"{str(path)!r} is a model and no file of rows: the model comes first, then the rows.")
    suffix = next((suffix for suffix in SUFFIXES if path.name.lower().endswith(suffix)), None)
    if suffix is None:
        raise ValueError(f"Cannot read {str(path)!r}: its name must end in {' or '.join(SUFFIXES)}.")
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {str(path)!r}.")
    if sep is not None:
        sep = {"tab": "\t", "\\t": "\t"}.get(sep, sep)
        if len(sep) != 1 or not suffix.startswith((".csv", ".tsv")):
            raise ValueError(f"--sep must be one character, for CSV and TSV files; got {sep!r} for {str(path)!r}.")
    text = suffix.startswith((".csv", ".tsv", ".jsonl"))
    if encoding is not None and not text:
        raise ValueError(f"--encoding is for text files, and {str(path)!r} is none.")
    name = "" if not text else _checked_encoding(encoding) if encoding is not None else ""
    opened: RowFile
    with usable(path):
        name = name or (guessed_encoding(path) if text else "")
        if suffix.startswith((".csv", ".tsv")):
            opened = CsvFile(path, sep or ("\t" if suffix.startswith(".tsv") else ","), name, sep is None)
        elif suffix.startswith(".jsonl"):
            opened = JsonLines(path, name)
        else:
            opened = ParquetFile(path) if suffix == ".parquet" else ArrayFile(path, suffix)
    if encoding is None and text and name != "utf-8-sig":
        warn_user(f"{str(path)!r} is read as {name}; --encoding names another encoding")
    if isinstance(opened, CsvFile) and opened.guessed is not None:
        told = f"the columns of {str(path)!r} are separated by {opened.guessed!r}; --sep names another character"
        warn_user(told)
    return opened


class CsvFile(RowFile):
    """CSV and TSV, plain or compressed; ``guessed`` is the separator if it was taken from the header."""

    def __init__(self, path: Path, sep: str, encoding: str = "utf-8-sig", guess: bool = False) -> None:
        self.path, self._sep, self.total = path, sep, max(path.stat().st_size, 1)
        self._encoding = encoding
        with open_text(path, encoding) as file:
            lines = io.StringIO(file.read(LINE), newline="")
        reader = csv.reader(lines, delimiter=sep)
        header = next((row for row in reader if row), None)
        single = guess and header is not None and len(header) == 1
        self.guessed = next((mark for mark in ";\t|" if single and mark in str(header)), None)
        if self.guessed is not None:
            self._sep = self.guessed
            lines.seek(0)
            reader = csv.reader(lines, delimiter=self.guessed)
            header = next(row for row in reader if row)
        self._skip = reader.line_num
        self._rows = any(line.strip() for line in lines)
        if header is None:
            raise ValueError("the file is empty")
        if lines.tell() == LINE and not self._rows:
            raise ValueError(f"no row begins within the first {LINE} characters")
        self.names = [unescape_cell(name) or f"column {j}" for j, name in enumerate(header)]
        refuse_duplicates(self.names, "it")

    def read(self, columns: Sequence[str]) -> Iterator[Piece]:
        """Read these columns a piece at a time."""
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
                    use_threads=False,
                    block_size=BLOCK,
                    skip_rows=self._skip,
                    column_names=list(keys.values()),
                    encoding="utf8" if self._encoding == "utf-8-sig" else self._encoding,
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
                table = pa.table(dict(zip(columns, _unescaped(batch.columns), strict=False)) or {"": batch.columns[0]})
                piece = _with_broken_rows(table, broken, start, file.tell())
                start += piece.table.num_rows
                yield piece
            if broken:  # the last rows of the file
                yield _with_broken_rows(table.slice(0, 0), broken, start, self.total)


def _unescaped(columns: list[Any]) -> list[Any]:
    """Columns of text without the apostrophes that the writers of this package put before formulas."""
    # One call for all columns: few files hold such a text, and a call for each of hundreds of columns takes longer.
    if not pc.any(pc.starts_with(pa.chunked_array(columns), "'")).as_py():
        return columns
    return [mapped(column, unescape_cell) for column in columns]


def _with_broken_rows(table: pa.Table, broken: dict[int, str], start: int, done: int) -> Piece:
    """Insert rows of nulls where rows are broken; remove these rows from ``broken``, which counts rows of the file."""
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


class JsonLines(RowFile):
    """One JSON object per line. The lines of the first block name the columns."""

    def __init__(self, path: Path, encoding: str = "utf-8-sig") -> None:
        self.path, self.total, self._encoding = path, max(path.stat().st_size, 1), encoding
        lengths: dict[str, Counter[int]] = {}
        size, problem = 0, "the file is empty"
        for line in self._lines():
            try:
                record = _record(line)
            except ValueError as error:
                problem = str(error)
                continue
            for name, value in record.items():
                lengths.setdefault(name, Counter()).update([len(value)] if isinstance(value, list) else [])
            size += len(line)
            if size >= BLOCK:
                break
        if not lengths:
            raise ValueError(problem)
        self._elements = _elements(lengths)
        self._known = frozenset(lengths)
        self.names = [part for name in lengths for part in self._elements.get(name, [name])]
        refuse_duplicates(self.names, "it")

    def _lines(self) -> Iterator[str]:
        """The lines that are not blank."""
        with open_text(self.path, self._encoding) as file:
            while line := file.readline(LINE):
                if len(line) == LINE:
                    raise ValueError(f"a line has more than {LINE} characters")
                if line.strip():
                    yield line

    def read(self, columns: Sequence[str]) -> Iterator[Piece]:
        """Read these columns a piece at a time."""
        size, done = 0, 0
        rows: list[dict[str, str | None]] = []
        problems: dict[int, str] = {}
        wanted = set(columns)
        chosen = {name for name in self._known if not wanted.isdisjoint(self._elements.get(name, [name]))}
        for line in self._lines():
            try:
                record = _record(line)
                self._warn_of_others(record)
                rows.append(self._cells({name: record[name] for name in record.keys() & chosen}))
            except ValueError as error:
                problems[len(rows)] = str(error)
                rows.append({})
            size += len(line)
            if size >= BLOCK:
                done += size
                yield Piece(_text_table(rows, columns), problems, min(done, self.total))
                rows, problems, size = [], {}, 0
        yield Piece(_text_table(rows, columns), problems, self.total)

    def _cells(self, record: Mapping[str, Any]) -> dict[str, str | None]:
        """The values of a JSON object as text by column; raise ValueError for a list of another length."""
        cells: dict[str, str | None] = {}
        for name, value in record.items():
            parts = self._elements.get(name)
            if parts is None and not isinstance(value, list):
                cells[name] = _text(value)
            elif value is not None and value != []:
                cells |= zip(parts or [name], map(_text, _checked_list(name, value, len(parts or []))), strict=True)
        return cells

    def _warn_of_others(self, record: Mapping[str, Any]) -> None:
        others = sorted(record.keys() - self._known)
        if others:
            warn_user(
                f"{str(self.path)!r}: keys that the first {BLOCK} characters of the file lack are ignored: "
                f"{named(others)}. Put a line with all keys first.",
            )
            self._known |= set(others)


def _record(line: str) -> dict[str, Any]:
    """The JSON object of a line."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the line is not a JSON object ({reason(error)})") from error
    if not isinstance(record, dict):
        raise ValueError('the line is not a JSON object such as {"age": 31}')
    return record


def _elements(lengths: Mapping[str, Counter[int]]) -> dict[str, list[str]]:
    """Names of the elements of each column of lists: z0, z1 and so on, as many as most lists of z have."""
    found = {}
    for name, counts in lengths.items():
        most = max((length for length in counts if length), key=lambda length: counts[length], default=0)
        if most > COLUMNS:
            raise ValueError(f"{name} holds lists of {most} elements, expected at most {COLUMNS}")
        if most:
            found[name] = [f"{name}{j}" for j in range(most)]
    return found


def _checked_list(name: str, value: Any, length: int) -> list[Any]:
    """The list; raise ValueError unless it has the length that most lists of the column have."""
    if isinstance(value, list) and len(value) == length:
        return value
    came = f"a list of {len(value)}" if isinstance(value, list) else "a single value"
    raise ValueError(f"{name} is {came}, expected {f'a list of {length}' if length else 'a single value'}")


def _text(value: Any) -> str | None:
    if isinstance(value, bool):
        return str(value)  # as CSV files have it
    return value if value is None or isinstance(value, str) else json.dumps(value)


def _text_table(rows: list[dict[str, str | None]], columns: Sequence[str]) -> pa.Table:
    names = list(columns) or [""]
    return pa.table({name: pa.array([row.get(name) for row in rows], pa.string()) for name in names})


class ParquetFile(RowFile):
    """Parquet. The index of a pandas table is no column, and a column of lists becomes a column per element."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with pa.parquet.ParquetFile(path) as file:
            schema, self.total = file.schema_arrow, max(file.metadata.num_rows, 1)
            index = (schema.pandas_metadata or {}).get("index_columns", [])
            fields = [field for field in schema if field.name not in index]
            refuse_duplicates([field.name for field in fields], "it")
            self._elements = _elements({field.name: _lengths(file, field) for field in fields if _is_list(field.type)})
        self._stored = [field.name for field in fields]
        self.names = [part for name in self._stored for part in self._elements.get(name, [name])]
        refuse_duplicates(self.names, "it")

    def read(self, columns: Sequence[str]) -> Iterator[Piece]:
        """Read these columns a piece at a time."""
        home = {part: name for name in self._stored for part in self._elements.get(name, [name])}
        stored = list(dict.fromkeys(home[column] for column in columns)) or self._stored[:1]
        done = 0
        with pa.parquet.ParquetFile(self.path) as file:
            for batch in file.iter_batches(max(1, min(ROWS, VALUES // max(len(self.names), 1))), columns=stored):
                parts: dict[str, Any] = {}
                problems: dict[int, str] = {}
                for name in stored:
                    column = batch.column(name)
                    if name in self._elements:
                        parts |= _split_lists(column, name, self._elements[name], problems)
                    else:
                        parts[name] = column.cast(pa.string()) if pa.types.is_string_view(column.type) else column
                done += batch.num_rows
                table = pa.table({name: parts[name] for name in columns or stored})
                if problems:  # a broken row holds nulls
                    table = table.take(pa.array([None if i in problems else i for i in range(len(table))], pa.int64()))
                yield Piece(table, problems, done)


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _lengths(file: Any, field: pa.Field) -> Counter[int]:
    """How often each length of the lists of a column occurs in the first rows that hold a list with elements."""
    if pa.types.is_fixed_size_list(field.type):
        return Counter([field.type.list_size])
    for batch in file.iter_batches(ROWS, columns=[field.name]):
        found = Counter(filter(None, pc.list_value_length(batch.column(0)).to_pylist()))
        if found:
            return found
    return Counter()


def _split_lists(column: Any, name: str, parts: list[str], problems: dict[int, str]) -> dict[str, Any]:
    """One column per element; a list of another length gives a problem of its row."""
    rows = [row or [None] * len(parts) for row in column.to_pylist()]
    for i, row in enumerate(rows):
        if len(row) != len(parts):
            problems.setdefault(i, f"{name} is a list of {len(row)}, expected a list of {len(parts)}")
            rows[i] = [None] * len(parts)
    kind = column.type.value_type
    return {part: pa.array([row[j] for row in rows], kind) for j, part in enumerate(parts)}


class ArrayStream:
    """An array in a file, read from its first row on.

    Args:
        name: Name of the array, for error messages.
        file: The binary file, at the beginning of the array.
        size: Bytes of the file.

    >>> import io
    >>> file = io.BytesIO()
    >>> np.save(file, np.arange(6).reshape(3, 2))
    >>> size, _ = file.tell(), file.seek(0)
    >>> ArrayStream("X", file, size).rows(2)
    array([[0, 1],
           [2, 3]])
    """

    def __init__(self, name: str, file: Any, size: int) -> None:
        self._name, self._file = name, file
        try:
            version = npy_format.read_magic(file)
        except ValueError:
            raise ValueError(f"{name} is not an array") from None
        read = npy_format.read_array_header_1_0 if version == (1, 0) else npy_format.read_array_header_2_0
        self.shape, self._fortran, self._dtype = read(file)
        if self._dtype.hasobject:
            # Python objects would have to be unpickled, which can run code.
            raise ValueError(f"{name} is an array of Python objects; save it as numbers or text")
        if self._dtype.kind in "SU" and self._dtype.itemsize > 4 * LONGEST_LABEL:
            raise ValueError(f"{name} holds text of more than {LONGEST_LABEL} characters; shorten it")
        # The header can state any shape; nothing is allocated for numbers that the file does not hold.
        if math.prod(self.shape) * self._dtype.itemsize > size - file.tell():
            raise ValueError(f"the file ends within {name}")
        self._left = self.shape[0] if self.shape else 1
        self._by_columns: Array | None = None

    def rows(self, number: int) -> Array:
        """Read the next rows, ``number`` or as many as are left. An array that is stored by columns is read whole."""
        number = min(number, self._left)
        start = (self.shape[0] if self.shape else 1) - self._left
        self._left -= number
        if not self._fortran or len(self.shape) < 2:
            return self._read(number).reshape(number, *self.shape[1:])
        if self._by_columns is None:
            size = math.prod(self.shape) * self._dtype.itemsize
            check_memory(size, f"{self._name}, which is stored by columns,", "Save it by rows (np.ascontiguousarray).")
            self._by_columns = self._read(self.shape[0]).reshape(self.shape, order="F")
        return self._by_columns[start : start + number]

    def _read(self, number: int) -> Array:
        size = number * math.prod(self.shape[1:]) * self._dtype.itemsize
        data = self._file.read(size)
        if len(data) != size:
            raise ValueError(f"the file ends within {self._name}")
        return np.frombuffer(data, dtype=self._dtype)


class ArrayFile(RowFile):
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

    @contextmanager
    def _streams(self) -> Iterator[dict[str, ArrayStream]]:
        """The arrays by their names; each can be read independently of the others."""
        with ExitStack() as stack:
            if self._npz:
                archive = stack.enter_context(zipfile.ZipFile(self.path))
                entries = {entry.filename.removesuffix(".npy"): entry for entry in archive.infolist()}
                yield {
                    name: ArrayStream(name, stack.enter_context(archive.open(entry)), entry.file_size)
                    for name, entry in entries.items()
                }
            else:
                yield {"X": ArrayStream("X", stack.enter_context(self.path.open("rb")), self.path.stat().st_size)}

    def read(self, columns: Sequence[str]) -> Iterator[Piece]:
        """Read these columns a piece at a time."""
        with self._streams() as streams:
            wanted: list[tuple[Sequence[str], ArrayStream]] = [(self._features, streams[self._points])]
            if self._label is not None:
                wanted.append((["y"], streams[self._label]))
            if self.logits:
                wanted.append((self.logits, streams["logits"]))
            step, done = max(1, min(ROWS, VALUES // max(len(self.names), 1))), 0
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
    if stream.shape[1] > COLUMNS:
        raise ValueError(f"{name} has {stream.shape[1]} columns, expected at most {COLUMNS}")
    return stream.shape[1]


class _JsonWriter:
    """Writer of JSON lines with the interface of Arrow's writers; a missing value and NaN become null."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, table: pa.Table) -> None:
        for record in table.to_pylist():
            plain = {name: to_json(value) for name, value in record.items()}
            self._file.write((json.dumps(plain, ensure_ascii=False, default=str) + "\n").encode())

    def close(self) -> None:
        self._file.flush()


class ScoreWriter:
    """Writer of tables of the same columns, one after the other, to CSV or TSV with formulas escaped, JSON or Parquet.

    Args:
        file: The file, by its path or opened.
        kind: Its suffix, one of :data:`~sepc_torch.cli.shell.WRITABLE`.
    """

    def __init__(self, file: Any, kind: str) -> None:
        self._file, self._kind = file, kind
        self._csv = kind.startswith((".csv", ".tsv"))
        self._writer: Any = None
        self._schema: Any = None

    def write(self, table: pa.Table) -> None:
        """Write the next rows; missing values become empty cells."""
        if self._csv:
            table = escaped(table)
        if self._writer is None:
            self._schema = table.schema
            try:
                self._writer = self._opened()
            except pa.ArrowException as error:
                raise ValueError(f"A column cannot be written ({error}). Leave it out, or write Parquet.") from error
        self._writer.write(table.cast(self._schema))

    def _opened(self) -> Any:
        if self._csv:
            options = pa.csv.WriteOptions(delimiter="\t" if self._kind.startswith(".tsv") else ",")
            return pa.csv.CSVWriter(self._file, self._schema, write_options=options)
        return _JsonWriter(self._file) if self._kind == ".jsonl" else pa.parquet.ParquetWriter(self._file, self._schema)

    def close(self) -> None:
        """Write what is left."""
        if self._writer is not None:
            self._writer.close()


@contextmanager
def score_writer(path: Path) -> Iterator[ScoreWriter]:
    """Context manager for a writer by the suffix of the file; an error leaves the old file unchanged.

    The path ``-`` writes CSV to standard output.
    """
    if str(path) == "-":
        writer = ScoreWriter(sys.stdout.buffer, ".csv")
        try:
            yield writer
        finally:
            writer.close()
            sys.stdout.buffer.flush()
        return
    kind = next(suffix for suffix in WRITABLE if path.name.lower().endswith(suffix))
    with replacing(path) as temporary, ExitStack() as stack:
        file: Any = stack.enter_context(temporary.open("wb"))
        if kind.endswith(".gz"):
            file = stack.enter_context(gzip.GzipFile("", "wb", fileobj=file, mtime=0))  # equal rows give equal bytes
        writer = ScoreWriter(file, kind)
        stack.callback(writer.close)
        yield writer


def escaped(table: pa.Table) -> pa.Table:
    r"""Escape column names and texts that a spreadsheet would run as formulas.

    >>> escaped(pa.table({"=a": ["=1", None, "x"], "b": [b"@c", b"", b"\xff"]})).to_pydict()
    {"'=a": ["'=1", None, 'x'], 'b': ["'@c", '', '\\xff']}
    """
    columns = [_escaped_column(table.column(name)) for name in table.column_names]
    return pa.table(columns, names=[escape_cell(name) for name in table.column_names])


def _escaped_column(column: Any) -> Any:
    """A column as CSV holds it: categories as values, bytes as text, and text that looks like a formula escaped."""
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if any(test(column.type) for test in _BYTES):
        texts = [None if cell is None else cell.decode("utf-8", "backslashreplace") for cell in column.to_pylist()]
        column = pa.chunked_array([pa.array(texts, pa.string())])
    return mapped(column, escape_cell) if is_text(column.type) else column


def is_text(kind: pa.DataType) -> bool:
    """Whether a type is text."""
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def mapped(column: Any, change: Callable[[str], str]) -> Any:
    """Apply a function to each text of a column; it is called once for equal texts, because columns repeat few.

    >>> mapped(pa.chunked_array([["a", None, "a"]]), str.upper).to_pylist()
    ['A', None, 'A']
    """
    distinct: list[str | None] = pc.unique(column).to_pylist()
    changed = {text: None if text is None else change(text) for text in distinct}
    if all(before == after for before, after in changed.items()):
        return column
    return pa.chunked_array([pa.array([changed[text] for text in column.to_pylist()], column.type)])

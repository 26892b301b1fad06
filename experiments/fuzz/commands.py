"""Target of the fault campaign (``campaign.py``) for the command line: ``sepc`` on hostile tables."""

from __future__ import annotations

import csv
import gzip
import io
import json
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow
import pyarrow.parquet
from typer.testing import CliRunner

from experiments.fuzz.checks import Finding, Rng, memory_limit, refused, scratch
from experiments.fuzz.files import originals
from sepc_torch.cli import app

_BYTES = 2**30
_CELLS = (
    "9" * 400, "1e999", "-1e-400", "nan", "inf", "", " ", "NULL", "0x1f", "1_000", "1,5", "True", "\x00", "\x1b[2J",
    '"', "\n", "=1+1", "@SUM(1)", "-2+3|cmd", "a" * 200_000, "٣", "\ud7ff", "\u202e", "1" * 20, "2024-01-01",
)  # fmt: skip
_NAMES = (
    "u", "v", "", " u", "\x1b]0;x\x07", "label", "trust", "row", "u.1", "=1+1", "0", "a\nb", "\ufeffu", "x" * 5000,
)  # fmt: skip
_ENCODINGS = ("utf-8", "utf-8", "utf-8", "utf-8-sig", "utf-16", "cp1252")


def cli_target(rng: Rng) -> Finding | None:
    """A command on a hostile table: success, or one line on standard error, and never a part of an output."""
    with scratch() as folder:
        (folder / "model.safetensors").write_bytes(originals()["model"])
        data = _TABLES[str(rng.choice(list(_TABLES), p=[0.7, 0.15, 0.15]))](rng, folder)
        before = set(folder.iterdir())
        command = str(rng.choice(["fit", "score", "explain", "overlap"]))
        output = folder / str(rng.choice(["out.csv", "out.parquet"]) if command == "score" else "out.safetensors")
        words = _words(rng, command, folder / "model.safetensors", data, output)
        try:
            with memory_limit(_BYTES):
                result = CliRunner().invoke(app, words)
        except Exception as error:  # the runner could not even decode the output
            return Finding(f"sepc {command}: {type(error).__name__} of the output", str(error)[:160])
        seen = f"{' '.join(words).replace(f'{folder}/', '')}, where {data.name} is {data.read_bytes()[:60]!r}"
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            found = refused(result.exception, where=f"sepc {command}: traceback, ", detail=seen)
            return None if found is None else found._replace(detail=found.detail.replace(f"{folder}/", ""))
        left = set(folder.iterdir()) - before
        if left - {output} or (result.exit_code and left):
            return Finding(f"sepc {command}: partial output", f"{sorted(path.name for path in left)} {seen}")
        fault = _output_fault(result.output, result.exit_code)
        if fault is None and not result.exit_code:
            fault = _unnoticed(data) or (_formula(output) if output.name == "out.csv" else None)
        return None if fault is None else Finding(f"sepc {command}: {fault}", seen)


def _words(rng: Rng, command: str, model: Path, data: Path, output: Path) -> list[str]:
    """The arguments of a command."""
    words = {
        "fit": ["fit", str(data), "-o", str(output)],
        "score": ["score", str(model), str(data), "-o", str(output)],
        "explain": ["explain", str(model), str(data), "--row", str(rng.choice(["0", "3", "99", "9" * 20]))],
        "overlap": ["overlap", str(data)],
    }[command]  # fmt: skip
    if command in ("fit", "overlap"):
        words += ["--label", "cls"]
        words += ["--ignore", "who"] if rng.random() < 0.8 else []
    if command == "score" and rng.random() < 0.6:
        words += ["--id", str(rng.choice(["who", "u", "label"]))]
    if command == "score" and rng.random() < 0.3:
        words += ["--label", "cls"]
    return ["paper", *words] + (["--json"] if rng.random() < 0.3 else [])


def _output_fault(text: str, code: int) -> str | None:
    """The fault in what the command printed, or None."""
    control = sorted({character for character in text if ord(character) < 32 and character not in "\n\t"} | {"\x7f"})
    if any(character in text for character in control):
        return "control characters in the output"
    errors = [line for line in text.splitlines() if line.startswith("sepc: ")]
    return "an error without a message" if code == 1 and not errors else None


def _unnoticed(data: Path) -> str | None:
    """Two columns of one name, in a table that the command took."""
    if data.suffix != ".csv":
        return None
    try:
        header = next(csv.reader(io.StringIO(data.read_text(encoding="utf-8-sig"), newline="")))
    except (UnicodeDecodeError, StopIteration, csv.Error):
        return None
    return "duplicate columns are not noticed" if len(set(header)) < len(header) else None


def _formula(output: Path) -> str | None:
    """Cells that a spreadsheet would compute."""
    csv.field_size_limit(10**7)
    for row in csv.reader(io.StringIO(output.read_text(encoding="utf-8"), newline="")):
        for cell in row:
            if cell[:1] in tuple("=+-@\t\r") and not _is_number(cell):
                return "a formula in the exported CSV"
    return None


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _rows(rng: Rng) -> tuple[list[str], list[list[str]]]:
    """Header and rows of an ordinary table with a few hostile cells and names."""
    n = int(rng.choice([0, 1, 3, 30]))
    y = rng.integers(0, 3, size=n)
    x = rng.normal(size=(n, 2)) + 2.0 * y[:, None]
    rows = [
        [repr(float(a)), repr(float(b)), f"id{i}", "abc"[k]] for i, ((a, b), k) in enumerate(zip(x, y, strict=True))
    ]
    header = ["u", "v", "who", "cls"]
    for _ in range(int(rng.choice([0, 1, 1, 3]))):
        if rows:
            rows[rng.integers(0, n)][rng.choice([0, 1, 2, 2, 3])] = _CELLS[rng.integers(0, len(_CELLS))]
    if rng.random() < 0.3:
        header.append(_NAMES[rng.integers(0, len(_NAMES))])
        rows = [[*row, "1"] for row in rows]
    if rng.random() < 0.15 and rows:
        label = str(rng.choice(["=1+1", "\x1b[2Jok", "-", "a\nb"]))
        rows = [[*row[:3], label if row[3] == "a" else row[3], *row[4:]] for row in rows]
    return header, rows


def _csv(rng: Rng, folder: Path) -> Path:
    header, rows = _rows(rng)
    text = io.StringIO(newline="")
    writer = csv.writer(text, delimiter=str(rng.choice([",", ",", ",", ";"])))
    writer.writerow(header)
    writer.writerows(rows)
    content = text.getvalue().encode(_ENCODINGS[rng.integers(0, len(_ENCODINGS))], errors="replace")
    if rng.random() < 0.15:
        place = int(rng.integers(0, len(content) + 1))
        content = content[:place] + (rng.bytes(20) if rng.random() < 0.5 else b"")
    path = folder / str(rng.choice(["data.csv", "data.csv", "data.csv.gz"]))
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" and rng.random() < 0.8 else content)
    return path


def _npz(rng: Rng, folder: Path) -> Path:
    path = folder / "data.npz"
    kind = rng.choice(["arrays", "text", "claim", "objects"])
    if kind == "arrays":
        x = [rng.normal(size=(6, 2)), rng.normal(size=6), np.array([["a", "b"]] * 6), np.zeros((0, 2)), np.eye(6) * 1j]
        y = [np.array(list("aabbcc")), np.arange(3), np.full(6, np.nan), np.arange(6).reshape(3, 2), np.array("a")]
        names = [np.array(["u", "v"]), np.array(["u", "u"]), np.array([1, 2]), np.array(["\x1b[2J", "v"])]
        arrays: dict[str, Any] = {
            "X": x[rng.integers(0, 5)],
            "y": y[rng.integers(0, 5)],
            "feature_names": names[rng.integers(0, 4)],
        }
        np.savez(path, **{name: array for name, array in arrays.items() if rng.random() < 0.8})
    elif kind == "objects":
        np.savez(path, X=np.array([{"a": 1}, None], dtype=object))
    else:
        with zipfile.ZipFile(path, "w") as archive:
            if kind == "text":
                archive.writestr(str(rng.choice(["X", "X.npy"])), b"hello")
            else:
                claim = f"{{'descr':'<f8','fortran_order':False,'shape':({10 ** int(rng.integers(8, 25))},3)}}".encode()
                claim += b" " * (-(len(claim) + 11) % 64) + b"\n"
                archive.writestr("X.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(claim)) + claim)
    return path


def _parquet(rng: Rng, folder: Path) -> Path:
    path = folder / "data.parquet"
    header, rows = _rows(rng)
    odd: list[Any] = [[1, 2], {"a": 1}, b"\xff", pd.Timestamp("2024-01-01"), None, 1 + 2**60, float("inf")]
    columns = {name: [row[j] for row in rows] for j, name in enumerate(header)}
    for name in ("u", "v"):
        columns[name] = [float(cell) if _is_number(cell) else 0.0 for cell in columns[name]]  # type: ignore[misc]
    if rng.random() < 0.5:
        columns[str(rng.choice(["u", "cls", "who"]))] = [odd[rng.integers(0, len(odd))]] * len(rows)
    table = pyarrow.Table.from_pandas(pd.DataFrame(columns))
    if rng.random() < 0.3:
        metadata = json.loads(table.schema.metadata[b"pandas"])
        key = str(rng.choice(["index_columns", "columns", "column_indexes"]))
        metadata[key] = [["nope"], [], None, 3][rng.integers(0, 4)]
        table = table.replace_schema_metadata({b"pandas": json.dumps(metadata)})
    pyarrow.parquet.write_table(table, path)
    if rng.random() < 0.3:
        content = bytearray(path.read_bytes())
        content[rng.integers(0, len(content))] ^= 1 << int(rng.integers(0, 8))
        path.write_bytes(content)
    return path


_TABLES = {"csv": _csv, "npz": _npz, "parquet": _parquet}

"""Memory and speed of the command line on large files: ``sepc fit``, ``sepc calibrate`` and ``sepc score``.

Each command runs in a process of its own, with one thread, on files of two shapes: a table of 12 numbers and 2
categories, and embeddings of 384 numbers, as CSV and, with the same rows, as Parquet. The script reports the CPU time
and the peak of the resident memory. The largest file shows whether the memory grows with the size; a small model scores
it, so that the time is that of reading, judging by few reference points, and writing.

    python experiments/bench_files.py                  # ten minutes on one core, 2 GB of free disk
    python experiments/bench_files.py --gigabytes 10   # a larger file; the time grows in proportion
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
from harness import arguments, environment, write_results

CLASSES = np.array(["low", "mid", "high"])
# Rows that are drawn and written at a time.
ROWS = 10_000
# Sizes of the CSV files in GB.
TABLE, EMBEDDINGS, LARGEST = 0.02, 0.1, 1.0
# Rows of the model that scores the largest file: it has few reference points, so that reading and writing show.
MAX_ROWS = 2000


class Shape(NamedTuple):
    """Columns of a file: its name in the results, the number of columns of numbers, and whether it has categories."""

    name: str
    numbers: int
    categories: bool


SHAPES = (Shape("table of 14 columns", 12, True), Shape("384 numbers", 384, False))


def drawn_rows(shape: Shape, rng: np.random.Generator, rows: int = ROWS) -> pa.Table:
    """Rows of three overlapping Gaussian classes."""
    codes = rng.integers(0, len(CLASSES), rows)
    means = np.random.default_rng(0).normal(0.0, 6.0 / shape.numbers**0.5, (len(CLASSES), shape.numbers))
    # Six digits, as such files have.
    x = np.round(means[codes] + rng.normal(size=(rows, shape.numbers)), 6)
    columns: dict[str, Any] = {f"x{j}": x[:, j] for j in range(shape.numbers)}
    if shape.categories:
        columns["colour"] = np.array(["red", "green", "blue"])[(codes + rng.integers(0, 2, rows)) % 3]
        columns["kind"] = np.array(["a", "b", "c"])[rng.integers(0, 3, rows)]
    return pa.table({**columns, "y": CLASSES[codes]})


def write_files(shape: Shape, folder: Path, gigabytes: float) -> tuple[dict[str, Path], int]:
    """Write a CSV file of a given size and a Parquet file of the same rows; return them and the number of rows."""
    rng = np.random.default_rng(1)
    paths = {"CSV": folder / "rows.csv", "Parquet": folder / "rows.parquet"}
    table, rows = drawn_rows(shape, rng), 0
    text, binary = (
        pa.csv.CSVWriter(paths["CSV"], table.schema),
        pa.parquet.ParquetWriter(paths["Parquet"], table.schema),
    )
    with text, binary:
        while rows == 0 or paths["CSV"].stat().st_size < 1e9 * gigabytes:
            text.write(table)
            binary.write(table)
            rows += len(table)
            table = drawn_rows(shape, rng)
    return paths, rows


def measured(*command: object) -> dict[str, float]:
    """CPU seconds and peak memory of a command of ``sepc``, in a process with one thread."""
    started = subprocess.Popen(
        [sys.executable, "-m", "sepc_torch.cli", *map(str, command)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert started.stderr is not None
    said = started.stderr.read()  # notes, or the reason of a failure
    _, status, used = os.wait4(started.pid, 0)
    if status:
        raise RuntimeError(f"sepc {' '.join(map(str, command))} failed: {said}")
    return {"cpu_s": used.ru_utime + used.ru_stime, "peak_mb": used.ru_maxrss / 1024}


def measure(shape: Shape, gigabytes: float, max_rows: int | None = None) -> Iterator[dict[str, Any]]:
    """Fit to CSV, score CSV and Parquet, calibrate with CSV; with ``max_rows`` only fit to so many rows and score CSV.

    The same rows fit, calibrate and are scored: only time and memory are measured here.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths, rows = write_files(shape, folder, gigabytes)
        model, scores = folder / "model.safetensors", folder / "scores"
        limit = () if max_rows is None else ("--max-rows", max_rows)
        steps = [
            ("fit", "CSV", (paths["CSV"], "-l", "y", "-o", model, *limit)),
            ("score", "CSV", (model, paths["CSV"], "-l", "y", "-o", scores.with_suffix(".csv"))),
            ("score", "Parquet", (model, paths["Parquet"], "-l", "y", "-o", scores.with_suffix(".parquet"))),
            ("calibrate", "CSV", (model, paths["CSV"], "-l", "y")),
        ]
        for command, kind, options in steps[: len(steps) if max_rows is None else 2]:
            described = {"command": command, "format": kind, "shape": shape.name, "rows": rows, "max_rows": max_rows}
            size = paths[kind].stat().st_size / 1e9
            yield described | {"gb": size} | measured(command, *options)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--gigabytes", type=float, default=LARGEST, help="size of the largest CSV file")
    options = parser.parse_args()
    if options.smoke:
        with tempfile.TemporaryDirectory() as name:
            data, model = Path(name, "rows.csv"), Path(name, "model")
            pa.csv.write_csv(drawn_rows(SHAPES[0], np.random.default_rng(1), 500), data)
            print(measured("fit", data, "-l", "y", "-o", model))
        return
    table, embeddings = SHAPES
    largest = "" if options.gigabytes == LARGEST else f" --gigabytes {options.gigabytes:g}"
    rows: list[dict[str, Any]] = []
    cases = (
        (embeddings, options.gigabytes, MAX_ROWS),
        (embeddings, EMBEDDINGS, MAX_ROWS),
        (embeddings, EMBEDDINGS, None),
        (table, TABLE, None),
    )
    for shape, size, max_rows in cases:
        for row in measure(shape, size, max_rows):
            print({key: round(value, 2) if isinstance(value, float) else value for key, value in row.items()})
            rows.append(row)
            written = {
                "command": f"python experiments/bench_files.py{largest}",
                "environment": environment("torch", "pyarrow"),
                "rows": rows,
            }
            # After every command, because the last ones take long.
            print(f"written: {write_results('bench_files', written).name}", flush=True)


if __name__ == "__main__":
    main()

"""Memory and speed of the command line on large files: ``sepc fit``, ``sepc calibrate`` and ``sepc score``.

Each command runs in a process of its own, with one thread, on files of two shapes: a table of 12 numbers and 2
categories, and embeddings of 384 numbers, as CSV and, with the same rows, as Parquet. The script reports the CPU time
and the peak of the resident memory. The largest file shows whether the memory grows with the size; a small model scores
it, so that the time is that of reading, judging by few reference points, and writing.

    python -m experiments.speed.bench_files                  # half an hour on one core, 12 GB of free disk
    python -m experiments.speed.bench_files --only largest --gigabytes 1    # one part, and a smaller file
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from experiments.harness import arguments, write_part

CLASSES = np.array(["low", "mid", "high"])
# Rows that are drawn and written at a time.
ROWS = 10_000
# Sizes of the CSV files in GB.
TABLE, EMBEDDINGS, LARGEST = 0.02, 0.1, 10.0
# Rows of the small model: it has few reference points, so that reading and writing show.
MAX_ROWS = 2000


class Shape(NamedTuple):
    """Columns of a file: its name in the results, the number of columns of numbers, and whether it has categories."""

    name: str
    numbers: int
    categories: bool


SHAPES = (Shape("table of 14 columns", 12, True), Shape("384 numbers", 384, False))


class Part(NamedTuple):
    """Files of one shape and size: ``max_rows`` limits the rows that fit the model; None for all."""

    shape: Shape
    gigabytes: float
    max_rows: int | None


PARTS = {
    "largest": Part(SHAPES[1], LARGEST, MAX_ROWS),
    "small model": Part(SHAPES[1], EMBEDDINGS, MAX_ROWS),
    "embeddings": Part(SHAPES[1], EMBEDDINGS, None),
    "table": Part(SHAPES[0], TABLE, None),
}


def drawn_rows(shape: Shape, rng: np.random.Generator) -> pa.Table:
    """Rows of three overlapping Gaussian classes."""
    codes = rng.integers(0, len(CLASSES), ROWS)
    means = np.random.default_rng(0).normal(0.0, 6.0 / shape.numbers**0.5, (len(CLASSES), shape.numbers))
    # Six digits, as such files have.
    x = np.round(means[codes] + rng.normal(size=(ROWS, shape.numbers)), 6)
    columns: dict[str, Any] = {f"x{j}": x[:, j] for j in range(shape.numbers)}
    if shape.categories:
        columns["colour"] = np.array(["red", "green", "blue"])[(codes + rng.integers(0, 2, ROWS)) % 3]
        columns["kind"] = np.array(["a", "b", "c"])[rng.integers(0, 3, ROWS)]
    return pa.table({**columns, "y": CLASSES[codes]})


def write_files(
    shape: Shape, folder: Path, gigabytes: float, kinds: Sequence[str], seed: int = 1
) -> tuple[dict[str, Path], int]:
    """Write files of the same rows in these formats, the CSV file of a given size; return them and the rows."""
    rng = np.random.default_rng(seed)
    paths = {kind: folder / f"rows{seed}.{kind.lower()}" for kind in kinds}
    writers = {"CSV": pa.csv.CSVWriter, "Parquet": pa.parquet.ParquetWriter}
    table, rows = drawn_rows(shape, rng), 0
    with ExitStack() as stack:
        opened = [stack.enter_context(writers[kind](path, table.schema)) for kind, path in paths.items()]
        while rows == 0 or paths["CSV"].stat().st_size < 1e9 * gigabytes:
            for writer in opened:
                writer.write(table)
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


def measure(part: Part) -> Iterator[dict[str, Any]]:
    """Fit to CSV, score CSV and Parquet, calibrate with CSV; for the small model only fit and score CSV.

    The same rows fit and are scored: only time and memory are measured here. Calibration refuses them and has others.
    """
    shape, gigabytes, max_rows = part
    whole = max_rows is None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths, rows = write_files(shape, folder, gigabytes, ("CSV", "Parquet") if whole else ("CSV",))
        model, scores = folder / "model.safetensors", folder / "scores"
        limit = () if whole else ("--max-rows", max_rows)
        steps: list[tuple[str, str, tuple[object, ...]]] = [
            ("fit", "CSV", ("-o", model, *limit)),
            ("score", "CSV", ("-o", scores.with_suffix(".csv"))),
        ]
        others = paths
        if whole:
            others, _ = write_files(shape, folder, gigabytes, ("CSV",), seed=2)
            steps += [("score", "Parquet", ("-o", scores.with_suffix(".parquet"))), ("calibrate", "CSV", ())]
        for command, kind, options in steps:
            described = {"command": command, "format": kind, "shape": shape.name, "rows": rows, "max_rows": max_rows}
            file = (others if command == "calibrate" else paths)[kind]
            given = (file,) if command == "fit" else (model, file)
            size = file.stat().st_size / 1e9
            yield described | {"gb": size} | measured(command, *given, "-l", "y", *options)


def main() -> None:
    parser = arguments(__doc__, parts=PARTS)
    parser.add_argument("--gigabytes", type=float, default=LARGEST, help="size of the largest CSV file")
    options = parser.parse_args()
    if options.smoke:
        for row in measure(Part(SHAPES[0], 1e-4, None)):
            print(row)
        return
    for name in options.only:
        part = PARTS[name]._replace(gigabytes=options.gigabytes) if name == "largest" else PARTS[name]
        rows = []
        for row in measure(part):
            print({key: round(value, 2) if isinstance(value, float) else value for key, value in row.items()})
            rows.append(row)
        # After every part, because the last ones take long.
        write_part("bench_files", options, ("torch", "pyarrow"), name, {"rows": rows})


if __name__ == "__main__":
    main()

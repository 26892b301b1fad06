"""Files of rows read in pieces: the rows of the file in their order, broken rows in their places."""

from __future__ import annotations

import csv
import gzip
import io
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sepc_torch.cli import columns, row_files, training_rows
from sepc_torch.cli.columns import cells, number_cells, number_columns
from sepc_torch.cli.row_files import Piece, open_rows, score_writer
from sepc_torch.cli.training_rows import _Sampled
from sepc_torch.data import memory
from sepc_torch.data.table_encoding import MISSING, parse_numbers

Rng = np.random.Generator


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of a few rows, so that files of a few rows have several."""
    monkeypatch.setattr(row_files, "BLOCK", 200)
    monkeypatch.setattr(row_files, "VALUES", 20)
    monkeypatch.setattr(row_files, "ROWS", 7)


def read(path: Path, columns: list[str] | None = None, **options: Any) -> tuple[dict[str, list[Any]], dict[int, str]]:
    """All rows of a file, and the problems of broken rows by their index in the file."""
    file = open_rows(path, **options)
    columns = file.names if columns is None else columns
    found = list(file.pieces(columns))
    starts = np.cumsum([0, *(piece.table.num_rows for piece in found)]).tolist()
    done = [piece.done for piece in found]
    assert done == sorted(done)
    assert done[-1] <= file.total
    problems = {
        start + i: text for start, piece in zip(starts, found, strict=False) for i, text in piece.problems.items()
    }
    return pa.concat_tables(piece.table for piece in found).to_pydict(), problems


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".csv.gz"])
def test_broken_rows_keep_their_places(rng: Rng, tmp_path: Path, suffix: str) -> None:
    sep = "\t" if suffix == ".tsv" else ","
    rows = [[str(i), f"text {i}", '"a\nb"' if i % 7 == 0 else "x"] for i in range(100)]
    broken = rng.random(100) < rng.choice([0.05, 0.9, 1.0])
    lines = [sep.join([*row, "more"] if bad else row) for row, bad in zip(rows, broken, strict=True)]
    text = "\n".join([sep.join("abc"), *lines]) + "\n"
    path = tmp_path / f"d{suffix}"
    path.write_bytes(gzip.compress(text.encode()) if suffix.endswith(".gz") else text.encode())
    found, problems = read(path, ["c", "a"])
    assert list(found) == ["c", "a"]
    assert found["a"] == [None if bad else row[0] for row, bad in zip(rows, broken, strict=True)]
    assert [c for c in found["c"] if c is not None and "\n" in c] == ["a\nb"] * sum(~broken[::7])
    assert problems == dict.fromkeys(np.flatnonzero(broken).tolist(), "the row has 4 fields, expected 3")


def test_a_byte_order_mark_blank_lines_and_a_long_header(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_bytes(b'\xef\xbb\xbf"a\nb",\'=c\n1,2\n\n3\n5,6\n')
    found, problems = read(tmp_path / "d.csv")
    assert found == {"a\nb": ["1", None, "5"], "=c": ["2", None, "6"]}
    assert problems == {1: "the row has 1 field, expected 2"}


def test_texts_are_read_as_they_were_before_they_were_written(tmp_path: Path) -> None:
    texts = ["=1", "'=1", "''+", "+", "-", "-1.5", "@a", "it's", "'tis", "\uff1da", "x", ""]
    table = pa.table({"=t": texts, "n": list(range(12))})
    for suffix in ("csv", "parquet"):
        with score_writer(tmp_path / f"t.{suffix}") as writer:
            writer.write(table)
        found, _ = read(tmp_path / f"t.{suffix}")
        assert found["=t"] == texts


def test_no_column_type_hides_a_formula(tmp_path: Path) -> None:
    texts = ["=cmd|' /C calc'!A0", "x", None]
    kinds = [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string()), pa.binary(), pa.large_binary()]
    with score_writer(tmp_path / "t.csv") as writer:
        writer.write(pa.table({str(kind): pa.array(texts).cast(kind) for kind in kinds}))
    for row in list(csv.reader((tmp_path / "t.csv").read_text().splitlines()))[1:]:
        assert set(row) in ({f"'{texts[0]}"}, {"x"}, {""})
    with (
        pytest.raises(ValueError, match=r"cannot be written .*struct.* or write Parquet"),
        score_writer(tmp_path / "s.csv") as writer,
    ):
        writer.write(pa.table({"a": [{"b": 1}]}))
    assert not (tmp_path / "s.csv").exists()


@pytest.mark.parametrize("first", [None, [], [1.0]])
def test_the_first_row_does_not_decide_about_the_columns(tmp_path: Path, first: list[float] | None) -> None:
    lists = [first, *([i, i + 0.5] for i in range(9))]
    pd.DataFrame({"z": lists, "y": range(10)}).to_parquet(tmp_path / "d.parquet")
    records: list[dict[str, Any]] = [{"z": z, "y": i, "late": "x"} for i, z in enumerate(lists)]
    del records[0]["late"]
    if first is None:
        del records[0]["z"]
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, records)))
    for name in ("d.parquet", "d.jsonl"):
        found, problems = read(tmp_path / name)
        assert {"z0", "z1", "y"} <= set(found)
        assert found["z0"][0] is found["z1"][0] is None
        assert [float(value) for value in found["z1"][1:]] == [i + 0.5 for i in range(9)]
        assert problems == ({0: "z is a list of 1, expected a list of 2"} if first else {})
        assert (found["y"][0] is None) == bool(first), "a broken row holds nulls"
    assert found["late"] == [None, *["x"] * 9]


def test_the_schema_says_how_long_fixed_lists_are(tmp_path: Path) -> None:
    kind = pa.list_(pa.float64(), 3)
    pq.write_table(pa.table({"z": pa.array([None, [1.0, 2.0, 3.0]], kind)}), tmp_path / "d.parquet")
    assert read(tmp_path / "d.parquet")[0] == {"z0": [None, 1.0], "z1": [None, 2.0], "z2": [None, 3.0]}
    pq.write_table(pa.table({"z": pa.array([], pa.list_(pa.float64(), 2**30))}), tmp_path / "wide.parquet")
    with pytest.raises(ValueError, match="z holds lists of 1073741824 elements, expected at most"):
        open_rows(tmp_path / "wide.parquet")


@pytest.mark.usefixtures("small_pieces")
def test_keys_beyond_the_first_block_are_named(tmp_path: Path) -> None:
    records = [{"a": i} for i in range(100)] + [{"a": 1, "late": 2}] * 100
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, records)))
    with pytest.warns(UserWarning, match="the file lack are ignored: 'late'") as caught:
        found, problems = read(tmp_path / "d.jsonl")
    assert len(caught) == 1
    assert not problems
    assert list(found) == ["a"]


@pytest.mark.parametrize("suffix", ["csv.gz", "jsonl.gz"])
def test_a_line_of_any_length_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    monkeypatch.setattr(row_files, "LINE", 2**12)
    message = "more than 4096 characters" if suffix == "jsonl.gz" else "no row begins within the first 4096 characters"
    for content in (b'{"a": "' + b"1" * 2**20, b'["a\tb",' * 2**14):
        (tmp_path / f"d.{suffix}").write_bytes(gzip.compress(content))
        with pytest.raises(ValueError, match=message):
            read(tmp_path / f"d.{suffix}")


@pytest.mark.usefixtures("small_pieces")
def test_json_lines(tmp_path: Path) -> None:
    records = [{"z": [i, i + 0.5], "name": f"n{i}", "yes": i > 3, "none": None} for i in range(50)]
    lines = [json.dumps(record) for record in records]
    lines[7], lines[9] = "{", "[1]"
    (tmp_path / "d.jsonl").write_text("\n".join(lines))
    found, problems = read(tmp_path / "d.jsonl")
    assert list(found) == ["z0", "z1", "name", "yes", "none"]
    assert found["z1"][:3] == ["0.5", "1.5", "2.5"]
    assert found["name"][6:10] == ["n6", None, "n8", None]
    assert list(problems) == [7, 9]
    assert "is not a JSON object" in problems[9]


@pytest.mark.usefixtures("small_pieces")
def test_parquet_with_lists_and_an_index(tmp_path: Path) -> None:
    frame = pd.DataFrame({"z": [[i, 2.0 * i] for i in range(30)], "y": list("ab") * 15, "id": range(30)})
    frame.set_index("id").to_parquet(tmp_path / "d.parquet")
    found, problems = read(tmp_path / "d.parquet")
    assert not problems
    assert found == {"z0": list(range(30)), "z1": [2.0 * i for i in range(30)], "y": list("ab") * 15}


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays(rng: Rng, tmp_path: Path, order: Any) -> None:
    points, logits = rng.normal(size=(50, 3)), rng.normal(size=(50, 2)).astype(np.float32)
    labels = rng.choice(["cat", "dog"], 50)
    np.savez(tmp_path / "d.npz", embeddings=np.asarray(points, order=order), labels=labels, logits=logits)
    np.savez_compressed(tmp_path / "small.npz", X=points, feature_names=["a", "b", "c"])
    np.save(tmp_path / "d.npy", np.asarray(points, order=order))
    file = open_rows(tmp_path / "d.npz")
    assert (file.embeddings, file.label, file.logits) == (True, "y", ("logits0", "logits1"))
    found, _ = read(tmp_path / "d.npz")
    assert found["y"] == labels.tolist()
    for j, name in enumerate(["x0", "x1", "x2"]):
        assert found[name] == read(tmp_path / "d.npy")[0][name] == points[:, j].tolist()
    assert found["logits1"] == logits[:, 1].tolist()
    assert list(read(tmp_path / "small.npz")[0]) == ["a", "b", "c"]


ERRORS: dict[str, tuple[str, bytes, str]] = {
    "empty": ("d.csv", b"", "is not a usable CSV file (the file is empty)"),
    "empty lines": ("d.jsonl", b"\n\n", "is not a usable JSONL file (the file is empty)"),
    "no text": ("d.csv", b"\xff\xfea\x00,\x00b\x00\n\x00\x00\xd8", "is not a usable CSV file"),
    "cut": ("d.csv.gz", gzip.compress(b"a,b\n1,2\n" * 999)[:-40], "is not a usable CSV file"),
    "twice": ("d.tsv", b"a\tb\ta\n1\t2\t3\n", "more than one column 'a'"),
    "no parquet": ("d.parquet", b"PAR1 and no more", "is not a usable PARQUET file"),
    "no archive": ("d.npz", b"PK\x03\x04 and no more", "is not a usable NPZ file"),
    "no array": ("d.npy", b"text", "is not a usable NPY file (X is not an array)"),
    "suffix": ("d.xlsx", b"", "its name must end in .csv"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_unusable_files_are_one_error(tmp_path: Path, case: str) -> None:
    name, content, message = ERRORS[case]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=r"Cannot read|is not a usable") as error:
        read(tmp_path / name)
    assert message in str(error.value)


def test_objects_and_cut_arrays_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "o.npz", X=np.array([[1, "a"]], dtype=object))
    with pytest.raises(ValueError, match="X is an array of Python objects"):
        open_rows(tmp_path / "o.npz")
    np.save(tmp_path / "d.npy", np.eye(9))
    (tmp_path / "d.npy").write_bytes((tmp_path / "d.npy").read_bytes()[:-8])
    with pytest.raises(ValueError, match="the file ends within X"):
        read(tmp_path / "d.npy")
    np.savez(tmp_path / "l.npz", X=np.eye(3), y=np.arange(2))
    with pytest.raises(ValueError, match=r"X has 3 rows and y has shape \(2,\)"):
        open_rows(tmp_path / "l.npz")


def test_a_header_that_states_more_than_the_file_holds_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything of the stated size is allocated."""
    header = io.BytesIO()
    stated = {"descr": "<f8", "fortran_order": False, "shape": (4, 10**9)}
    np.lib.format.write_array_header_1_0(header, stated)
    (tmp_path / "d.npy").write_bytes(header.getvalue())
    with zipfile.ZipFile(tmp_path / "d.npz", "w") as archive:
        archive.writestr("X.npy", header.getvalue())
    for name in ("d.npy", "d.npz"):
        with pytest.raises(ValueError, match="the file ends within X"):
            open_rows(tmp_path / name)
    monkeypatch.setattr(row_files, "COLUMNS", 99)
    np.savez_compressed(tmp_path / "wide.npz", X=np.zeros((2, 100)))
    with pytest.raises(ValueError, match="X has 100 columns, expected at most 99"):
        open_rows(tmp_path / "wide.npz")
    np.savez_compressed(tmp_path / "long.npz", X=np.zeros((2, 1)), y=np.array(["a" * 251, "b"]))
    with pytest.raises(ValueError, match="y holds text of more than 250 characters"):
        open_rows(tmp_path / "long.npz")
    np.save(tmp_path / "columns.npy", np.asfortranarray(np.eye(9)))
    monkeypatch.setattr(memory, "available_memory", lambda: 100)
    with pytest.raises(MemoryError, match=r"columns.npy' does not fit into memory: X, which is stored by columns"):
        read(tmp_path / "columns.npy")


def test_another_separator_is_found_and_said(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text("a;b\n1;2\n")
    with pytest.warns(UserWarning, match="are separated by ';'; --sep names another"):
        assert read(tmp_path / "d.csv")[0] == {"a": ["1"], "b": ["2"]}
    assert read(tmp_path / "d.csv", sep=";")[0] == {"a": ["1"], "b": ["2"]}
    with pytest.raises(ValueError, match="--sep must be one character"):
        open_rows(tmp_path / "d.csv", sep=";;")


NUMBERS = ["1", " 2.5 ", "-0", "1e-300", ".5", "5.", "+3", "0.1234567890123456789", "9007199254740993", "1E5", "", "NA"]
OTHERS = ["x", "1_000", "1,5", "0x1p3", "1e999", "inf", "-Infinity", "nan", "-nan", "1.5.2", "\u0661", "1d5", "--1"]


@pytest.mark.parametrize("other", [None, *OTHERS])
@pytest.mark.parametrize("missing", [MISSING, (*MISSING, "1"), ()])
def test_numbers_are_parsed_as_python_does(other: str | None, missing: tuple[str, ...]) -> None:
    column = pa.chunked_array([NUMBERS, [None, *([] if other is None else [other])]], pa.string())
    fast = parse_numbers(number_cells(column, frozenset(missing)), frozenset(missing))
    slow = parse_numbers(cells(column), frozenset(missing))
    for found, expected in zip(fast, slow, strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("at_a_time", [1, 3, 1000])
def test_columns_parsed_together_are_those_parsed_alone(monkeypatch: pytest.MonkeyPatch, at_a_time: int) -> None:
    monkeypatch.setattr(columns, "_CELLS", 3 * at_a_time)
    texts: list[list[Any]] = [["1", "2", ""], ["x", "1", "2"], ["3", None, " 4"], ["5", "inf", "6"], ["7", "8", "9"]]
    table = [pa.chunked_array([row[:1], row[1:]], pa.string()) for row in texts]
    table.insert(2, pa.chunked_array([[1.5, None, 2.5]]))
    table.insert(4, pa.chunked_array([["1", "NA", "2"]], pa.large_string()))
    missing = frozenset(MISSING)
    for together in (table, [column.slice(0, 0) for column in table], table[:1], []):
        alone = [number_cells(column, missing) for column in together]
        for found, expected in zip(number_columns(together, missing), alone, strict=True):
            assert found.dtype == expected.dtype
            np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("most", [1, 7, 50, 1000])
def test_a_sample_of_a_file_has_the_least_keys(rng: Rng, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_rows, "_MOST_TABLES", 3)
    keys = rng.random(300)
    kept = _Sampled(most)
    start = 0
    for size in (120, 1, 0, 60, 10, 9, 60, 40):
        piece = Piece(pa.table({"i": np.arange(start, start + size)}), dict.fromkeys(range(0, size, 2), "bad"), 0)
        kept.add(piece, keys[start : start + size], start)
        assert sum(len(table) for table in kept.tables) <= 2 * most + 120, "no more than the sample and a piece"
        assert len(kept.tables) <= 3
        start += size
    kept.prune()
    expected = np.sort(np.argsort(keys)[:most])
    assert kept.tables[0].column("i").to_pylist() == kept.numbers[0].tolist() == expected.tolist()
    if most < len(keys):
        assert set(kept.problems) <= set(expected.tolist())

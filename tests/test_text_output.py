"""Text for people: cells of CSV exports that look like formulas, and control characters in printed names."""

from __future__ import annotations

import csv
import unicodedata
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch

from sepc_torch import SEPC, landscape, partition
from sepc_torch.cli.row_files import open_rows, score_writer
from sepc_torch.data.text import escape_cell, printable, text_table, unescape_cell
from sepc_torch.head.drift import AccuracyEstimate, DriftReport, Move
from sepc_torch.training.trust_table import TrustTable, write_records

Rng = np.random.Generator
# Characters that matter to spreadsheets and to CSV, and a few that do not.
FULL_WIDTH = ["\uff1d", "\uff0b", "\uff0d", "\uff20"]
ALPHABET = [*"=+-@\t\r\n'\",;1.eE| a\u00e9", *FULL_WIDTH]
DANGEROUS = ("=", "+", "-", "@", "\t", "\r", "\n", *FULL_WIDTH)


def texts(rng: Rng, number: int = 300) -> list[str]:
    """Short random texts; short ones start with a character of each kind."""
    return ["".join(rng.choice(ALPHABET, rng.integers(1, 6))) for _ in range(number)]


def is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return text == text.strip()


class TestCells:
    def test_no_cell_starts_a_formula(self, rng: Rng) -> None:
        for text in texts(rng):
            cell = escape_cell(text)
            assert is_number(cell) or not cell.startswith(DANGEROUS)
            assert cell in (text, f"'{text}")
            assert unescape_cell(cell) == text

    def test_a_spreadsheet_skips_nul(self) -> None:
        assert escape_cell("\0=1") == "'\0=1"
        assert unescape_cell("'\0=1") == "\0=1"

    @pytest.mark.parametrize("number", ["-5", "+1.5", "-.5e-3", "-1E+9", "-0"])
    def test_numbers_stay_numbers(self, number: str) -> None:
        assert escape_cell(number) == unescape_cell(number) == number
        assert escape_cell(float(number)) == float(number)

    def test_trust_tables(self, tmp_path: Path) -> None:
        columns = {
            "trust": torch.tensor([0.25, 0.5]),
            "margin": torch.tensor([-1.0, -2.0]),
            "label": torch.tensor([0, 1]),
        }
        TrustTable.of(["=1+1|cmd", "-2"], columns, classes=["+cmd", "cat"]).to_csv(tmp_path / "t.csv")
        expected = "id,trust,margin,label\n'=1+1|cmd,0.25,-1.0,'+cmd\n-2,0.5,-2.0,cat\n"
        assert (tmp_path / "t.csv").read_text() == expected

    def test_records_are_read_back(self, rng: Rng, tmp_path: Path) -> None:
        """Also by a reader that starts a row at a carriage return outside quotes."""
        header = ["=name", "other"]
        rows = [dict(zip(header, pair, strict=True)) for pair in zip(texts(rng), texts(rng), strict=True)]
        write_records(tmp_path / "r.csv", rows, header)
        with (tmp_path / "r.csv").open(newline="", encoding="utf-8") as file:
            read = [[unescape_cell(cell) for cell in row] for row in csv.reader(file)]
        assert read == [header, *(list(row.values()) for row in rows)]

    def test_tables_of_the_command_line_are_read_back(self, rng: Rng, tmp_path: Path) -> None:
        names = [f"{text} x" for text in texts(rng)]
        table = pa.table({"=a": names, "-b x": [str(-i) for i in range(len(names))], "@c": ["plain"] * len(names)})
        with score_writer(tmp_path / "t.csv") as writer:
            writer.write(table)
        file = open_rows(tmp_path / "t.csv")
        assert file.names == table.column_names
        assert pa.concat_tables(piece.table for piece in file.pieces(file.names)).to_pydict() == table.to_pydict()
        first = pd.read_csv(tmp_path / "t.csv")
        assert not any(str(cell).startswith(DANGEROUS) for cell in [*first.columns, *first.iloc[:, 0]])


class TestPrintable:
    def test_no_control_character_is_left(self, rng: Rng) -> None:
        text = "".join(map(chr, rng.integers(0, 0x10FFFF, 2000)))
        shown = printable(text)
        assert not [c for c in shown if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")]
        shown.encode()  # a lone surrogate could not be printed

    def test_ordinary_text_is_unchanged(self) -> None:
        for text in ("benign", "\u00e9t\u00e9", "\u732b\u3000\u72ac", "100\u00a0%", "a\\b"):
            assert printable(text) == text

    def test_tables(self) -> None:
        shown = text_table(["a\x1b[2J", "n"], [["\x1b]0;x\x07", 1], ["b\nc", 2]])
        assert shown.splitlines() == ["a\\x1b[2J      n", "\\x1b]0;x\\x07  1", "b\\nc          2"]

    def test_drift_reports(self) -> None:
        move = Move("gained", ("\x1b[2Jred", "b"), (3,), expected=0.1, share=0.5, since=7, evidence=9.0)
        accuracy = AccuracyEstimate(0.9, 0.8, 1.0)
        shown = str(DriftReport(100, 0.001, True, 50, 7, (move,), accepted=0.5, accuracy=accuracy))
        assert "\x1b" not in shown
        assert "class \\x1b[2Jred, b, regions 3 gained traffic" in shown

    def test_records_of_a_model(self, rng: Rng) -> None:
        x = np.concatenate([rng.normal(size=(20, 2)), rng.normal(size=(20, 2)) + 20])
        frame = pd.DataFrame(x, columns=["a\x1b]0;title\x07", "b"])
        y = np.where(np.arange(40) < 20, "\x1b[2Jred", "b")
        found = partition(frame, y)
        model = SEPC.from_partition(found)
        table = TrustTable.of(
            ["\x1b[31m"], {"trust": torch.ones(1), "label": torch.zeros(1).long()}, found.classes.tolist()
        )
        shown = [found, landscape(frame, y), model, model.explain(x[0]), table]
        for text in [*map(str, shown), *map(repr, shown)]:
            assert "\x1b" not in text
            assert "\x07" not in text

"""Tests of the trust table."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from sepc_torch.training.trust_table import TrustTable

Rng = np.random.Generator


class TestTable:
    def table(self, rng: Rng, n: int = 30) -> TrustTable:
        columns = {
            "trust": torch.from_numpy(rng.integers(0, 3, n) / 2).float(),
            "label": torch.from_numpy(rng.integers(-1, 2, n)),
            "rule": torch.from_numpy(rng.integers(0, 4, n)),
            "reason": torch.from_numpy(rng.integers(-1, 4, n)),
            "margin": torch.from_numpy(rng.integers(0, 2, n)).float(),
        }
        return TrustTable.of(rng.permutation(n).tolist(), columns, ["cat", "dog"])

    def test_the_least_trusted_come_first(self, rng: Rng) -> None:
        table = self.table(rng)
        keys = list(zip(table["trust"], table["margin"], table.ids, strict=True))
        assert keys == sorted(keys)

    def test_find_and_where_keep_rows_intact(self, rng: Rng) -> None:
        table = self.table(rng)
        by_id = {row["id"]: row for row in table.rows()}
        some = rng.permutation(30)[:7].tolist()
        assert list(table.find(some).rows()) == [by_id[i] for i in some]
        flagged = table.where(table.columns["reason"] >= 0)
        assert {row["id"] for row in flagged.rows()} == {i for i, row in by_id.items() if row["reason"]}

    def test_files_and_data_frames_hold_the_rows(self, rng: Rng, tmp_path: Path) -> None:
        table = self.table(rng)
        table.to_csv(tmp_path / "t.csv")
        table.to_jsonl(tmp_path / "t.jsonl")
        rows = list(table.rows())
        assert [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()] == rows
        with (tmp_path / "t.csv").open(newline="") as file:
            read = list(csv.DictReader(file))
        assert [(int(r["id"]), r["rule"], r["reason"], float(r["trust"])) for r in read] == [
            (r["id"], r["rule"], r["reason"], r["trust"]) for r in rows
        ]
        frame = table.to_pandas()
        assert list(frame.columns) == ["id", "trust", "label", "rule", "reason", "margin"]
        assert frame["reason"].tolist() == table["reason"]
        assert "... 20 more" in str(table)

    def test_json_lines_hold_null_for_nan_and_infinity(self, tmp_path: Path) -> None:
        columns = {
            "trust": torch.zeros(2),
            "distance": torch.tensor([torch.inf, 2.0]),
            "margin": torch.tensor([torch.nan, 1.5]),
        }
        TrustTable.of([4, 5], columns, ["cat"]).to_jsonl(tmp_path / "t.jsonl")
        rows = [
            json.loads(line, parse_constant=pytest.fail) for line in (tmp_path / "t.jsonl").read_text().splitlines()
        ]
        assert {row["id"]: (row["distance"], row["margin"]) for row in rows} == {4: (None, None), 5: (2.0, 1.5)}

    def test_missing_columns_and_ids(self, rng: Rng) -> None:
        table = self.table(rng)
        with pytest.raises(KeyError, match="no column 'colour'"):
            table["colour"]
        with pytest.raises(KeyError, match=r"no rows for the ids \[99\]"):
            table.find([3, 99])
        assert len(TrustTable.of([], {}, [])) == 0

"""Tests of flagging and of the trust table."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from sepc_torch import TrustHead
from sepc_torch.shapes import Array
from sepc_torch.training.flagging import Criteria, Judged, class_values, find_reasons, judge, safety
from sepc_torch.training.trust_table import REASONS, TrustTable

Rng = np.random.Generator


def clouds(rng: Rng, labels: tuple[int, ...] = (3, 8)) -> tuple[Array, Array]:
    """Two clouds of forty points each, six standard deviations apart."""
    y = np.repeat(labels, 40)
    x = rng.normal(size=(80, 3))
    x[40:, 0] += 6.0
    return x, y


def head_of(x: Array, y: Array) -> TrustHead:
    return TrustHead.fit(x, y, dim=3, normalize=None, progress=False)


def names(reason: Tensor) -> list[str]:
    return ["" if code < 0 else REASONS[code] for code in reason.tolist()]


class TestJudge:
    def test_agrees_with_the_head(self, rng: Rng) -> None:
        x, y = clouds(rng)
        head = head_of(x, y)
        z = torch.from_numpy(x).float()
        given = torch.from_numpy(rng.permutation(y))
        found, out = judge(head, z, given), head(z, labels=(given == 8).long())
        assert torch.equal(found.label, out.label)
        assert torch.equal(found.trust, out.trust)
        assert torch.equal(found.network_trust, out.network_trust)
        assert torch.equal(found.network_margin, out.network_margin)
        alone = judge(head, z)
        assert torch.equal(alone.network_label, class_values(head)[alone.label])
        inner = judge(head.sepc, head.projection(z), given)
        assert all(torch.equal(a, b) for a, b in zip(inner, found, strict=True))

    def test_an_unknown_label_has_trust_zero(self, rng: Rng) -> None:
        """With few labels, the network may have classes that the head lacks."""
        x, y = clouds(rng)
        found = judge(head_of(x, y), torch.from_numpy(x).float(), torch.full((80,), 5))
        assert bool((found.network_trust == 0).all())
        assert bool((found.network_margin == 0).all())
        assert bool((found.trust > 0).all())

    def test_nan_and_infinity_have_no_prediction(self, rng: Rng) -> None:
        x, y = clouds(rng)
        z = torch.from_numpy(x).float()
        expected = judge(head_of(x, y), z)
        z[[2, 7], 1] = torch.tensor([torch.nan, torch.inf])
        found = judge(head_of(x, y), z)
        assert found.label[[2, 7]].tolist() == [-1, -1]
        assert found.trust[[2, 7]].tolist() == [0.0, 0.0]
        others = [i for i in range(80) if i not in (2, 7)]
        assert all(torch.equal(a[others], b[others]) for a, b in zip(found, expected, strict=True))
        assert names(find_reasons(found, Criteria(), found.label >= -1))[2] == "no prediction"

    def test_text_labels_have_index_values(self, rng: Rng) -> None:
        x, y = clouds(rng)
        head = head_of(x, np.where(y == 3, "cat", "dog"))
        assert class_values(head).tolist() == [0, 1]
        assert (
            judge(head, torch.from_numpy(x).float()).network_label.tolist()
            == judge(head, torch.from_numpy(x).float()).label.tolist()
        )


class TestReasons:
    def test_reason_by_location(self, rng: Rng) -> None:
        x, y = clouds(rng)
        head = head_of(x, y)
        centers = x[:40].mean(axis=0), x[40:].mean(axis=0)
        line = np.linspace(*centers, 101)
        between = line[int(judge(head, torch.from_numpy(line).float()).margin.argmin())]
        far = np.array([0.0, 100.0, 0.0])
        found = judge(head, torch.from_numpy(np.stack([centers[0], between, far])).float())
        agrees = torch.tensor([False, True, True])
        every = Criteria(reasons=REASONS, novel_distance=10.0)
        assert names(find_reasons(found, every, agrees)) == ["disagrees", "ambiguous", "novel"]
        assert names(find_reasons(found, Criteria(reasons=("novel",), novel_distance=10.0), agrees)) == [
            "",
            "",
            "novel",
        ]
        strict = Criteria(novel_distance=1e6, min_margin=0.0, threshold=1e-6, reasons=("novel", "ambiguous"))
        assert names(find_reasons(found, strict, agrees)) == ["", "", ""]

    @pytest.mark.parametrize("fraction", [0.05, 0.1, 0.5])
    def test_flag_fraction_takes_the_least_safe(self, rng: Rng, fraction: float) -> None:
        x, y = clouds(rng)
        found = judge(head_of(x, y), torch.from_numpy(x + rng.normal(size=x.shape)).float())
        flagged = find_reasons(found, Criteria(None, fraction), torch.ones(80, dtype=torch.bool)) >= 0
        assert int(flagged.sum()) == np.ceil(fraction * 80)
        assert float(safety(found)[flagged].max()) <= float(safety(found)[~flagged].min())

    def test_safety_ranks_samples_of_equal_trust(self) -> None:
        column = torch.ones(3)
        codes = torch.zeros(3, dtype=torch.int64)
        margin = torch.tensor([1.0, 3.0, torch.inf])
        judged = Judged(codes, column, codes, column, margin, codes, column, margin)
        assert safety(judged).tolist() == [0.5, 0.75, 1.0]
        unsure = judged._replace(network_trust=torch.full((3,), 0.2))
        assert safety(unsure).tolist() == pytest.approx([0.2, 0.2, 0.2])


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

"""Tests of active learning: label pool, batch selection, annotation files and confirmed mistakes."""

from __future__ import annotations

import csv
import inspect
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sepc_torch import LabelPool, TrustHead, select
from sepc_torch.training import Candidates, choose, confirmed_disjuncts, read_answers, write_questions
from sepc_torch.training.trust_table import TrustTable

Rng = np.random.Generator


def samples(n: int = 20) -> list[tuple[Tensor, int]]:
    return [(torch.full((2,), float(i)), i % 3) for i in range(n)]


def draw(rng: Rng, n: int, d: int = 4) -> Tensor:
    return torch.from_numpy(rng.normal(size=(n, d)))


class TestLabelPool:
    def test_ids_are_those_of_the_data_set(self, rng: Rng) -> None:
        """An id denotes the same sample, whichever samples are labelled or ignored in between."""
        data = samples(60)
        pool = LabelPool(data, labelled=[3])
        for _ in range(8):
            unlabelled = pool.pool()
            assert [float(unlabelled[i][0][0]) for i in range(len(unlabelled))] == unlabelled.ids.tolist()
            chosen = rng.choice(pool.pool_ids.numpy(), 5, replace=False)
            pool.label(chosen[:4])
            pool.ignore(chosen[4:].tolist())
        assert len(pool.labelled_ids) == 33
        assert len(pool.pool_ids) == 60 - 33 - 8
        assert {float(x[0]) for x, _ in pool.labelled()} == set(pool.labelled_ids.tolist())  # type: ignore[attr-defined]
        assert set(pool.round_of.tolist()) == set(range(-1, 9))

    def test_answers_replace_the_data_sets_labels(self) -> None:
        pool = LabelPool(samples(), labelled=[0, 1])
        pool.label([5, 6], y=[9, 8])
        assert [y for _, y in pool.labelled()] == [0, 1, 9, 8]  # type: ignore[attr-defined]
        assert pool.labels_of([6, 0, 5]).tolist() == [8, 0, 9]
        pool.correct([0, 5], [4, 4])
        assert pool.labels_of([0, 5]).tolist() == [4, 4]

    def test_eval_view_is_used_for_embedding(self) -> None:
        train = [(torch.zeros(2), 0)] * 5
        pool = LabelPool(train, labelled=[1], eval_view=samples(5))
        assert float(pool.labelled_eval()[0][0][0]) == 1.0
        assert float(pool.labelled()[0][0][0]) == 0.0
        assert float(pool.pool()[1][0][0]) == 2.0

    def test_samples_of_other_kinds(self) -> None:
        pool = LabelPool([{"x": i} for i in range(4)])
        pool.label([2], y=[7])
        with pytest.raises(TypeError, match=r"dictionary with the keys \['x'\].*relabel="):
            pool.labelled()[0]
        pool = LabelPool([{"x": i} for i in range(4)], relabel=lambda sample, y: {**sample, "y": y})
        pool.label([2], y=[7])
        assert pool.labelled()[0] == {"x": 2, "y": 7}
        bare = LabelPool(list(torch.arange(4.0)))
        bare.label([1], y=[5])
        assert bare.labelled()[0] == (torch.tensor(1.0), 5)
        with pytest.raises(ValueError, match=r"no label for id 2: the sample is a Tensor.*label\(ids, y\)"):
            bare.label([2])
        assert bare.labelled_ids.tolist() == [1]

    def test_label_of_reads_the_label(self) -> None:
        triples = [(float(i), 7, i % 2) for i in range(4)]
        for item in (triples[0], {"x": 0.0, "y": 1}, (0.0, torch.zeros(2))):
            with pytest.raises(TypeError, match=r"(Sample 0 is|label of sample 0 must be an integer).*label_of="):
                LabelPool([item], labelled=[0]).labels_of([0])
        pool = LabelPool(triples, labelled=[0, 3], label_of=lambda sample: sample[2])
        assert pool.labels_of([0, 3]).tolist() == [0, 1]
        pool.label([1])
        with pytest.raises(TypeError, match="label_of fails for sample 0"):
            LabelPool(samples(), labelled=[0], label_of=lambda sample: sample["y"]).labels_of([0])

    @pytest.mark.parametrize(
        ("act", "message"),
        [
            (lambda p: p.label([0]), "labelled already"),
            (lambda p: p.label([4, 4]), "occur more than once"),
            (lambda p: p.label([20]), "must be indices from 0 to 19"),
            (lambda p: p.label([-1]), "must be indices from 0 to 19"),
            (lambda p: p.label([4, 5], y=[1]), "2 ids and 1 labels"),
            (lambda p: p.label([4.5]), "list of integers"),
            (lambda p: p.label({4, 5}), "ids must be a list of integers.*got a set"),
            (lambda p: p.label(i for i in (4, 5)), "ids must be a list of integers.*got a generator"),
            (lambda p: p.label(["4"]), "ids must be a list of integers.*starts with '4'"),
            (lambda p: p.label([4, 5], y=[0, -1]), "y must hold labels from 0; got -1"),
            (lambda p: p.answer({4: -5}), "The answers must hold labels from 0; got -5"),
            (lambda p: p.label([4], y=["a"]), "y must be a list of integers.*starts with 'a'"),
            (lambda p: p.answer({0: 1, 2: 1}), "id 0 was 0 and is now 1"),
            (lambda p: p.load_state_dict({}), "lacks round, answered"),
            (lambda p: p.ignore([0]), "are labelled"),
            (lambda p: p.correct([4], [1]), "not labelled yet"),
            (lambda p: p.load_state_dict(LabelPool(samples(7)).state_dict()), "for another data set: it has 7 samples"),
        ],
    )
    def test_refuses(self, act: Any, message: str) -> None:
        pool = LabelPool(samples(), labelled=[0, 1])
        before = pool.state_dict()
        with pytest.raises(ValueError, match=message):
            act(pool)
        after = pool.state_dict()
        assert all(torch.equal(torch.as_tensor(before[k]), torch.as_tensor(after[k])) for k in before), (
            "the pool is unchanged"
        )

    def test_refuses_data_without_an_index(self) -> None:
        with pytest.raises(TypeError, match="iterable data set have no ids"):
            LabelPool(iter(samples()))
        with pytest.raises(TypeError, match=r"by index.*got a dict"):
            LabelPool({"a": 1})
        with pytest.raises(ValueError, match="the lengths must match"):
            LabelPool(samples(), eval_view=samples(3))

    def test_survives_a_file_and_a_checkpoint(self, tmp_path: Path) -> None:
        pool = LabelPool(samples(), labelled=[0, 1])
        pool.label([5, 6], y=[9, 8])
        pool.ignore([7])
        pool.save(tmp_path / "pool.safetensors")
        torch.save(pool.state_dict(), tmp_path / "pool.pt")
        for way in ("file", "state"):
            again = LabelPool(samples())
            if way == "file":
                again.restore(tmp_path / "pool.safetensors")
            else:
                again.load_state_dict(torch.load(tmp_path / "pool.pt", weights_only=True))
            assert repr(again) == repr(pool)
            assert torch.equal(again.round_of, pool.round_of)
            assert torch.equal(again.pool_ids, pool.pool_ids)
            assert again.labels_of([5, 6]).tolist() == [9, 8]

    @pytest.mark.parametrize("newer_first", [True, False])
    def test_absorb_keeps_all_labels(self, newer_first: bool) -> None:
        old, new = LabelPool(samples(), labelled=[0]), LabelPool(samples(), labelled=[0])
        old.label([3], y=[1])
        new.label([3], y=[1])
        new.label([4, 5], y=[2, 2])
        new.ignore([9])
        first, second = (new, old) if newer_first else (old, new)
        first.absorb(second.state_dict())
        assert first.labelled_ids.tolist() == [0, 3, 4, 5]
        assert first.labels_of([3, 4, 5]).tolist() == [1, 2, 2]
        assert first.rounds == 2
        assert 9 not in first.pool_ids

    def test_repeated_answers_label_nothing_twice(self) -> None:
        pool = LabelPool(samples(), labelled=[0])
        assert pool.answer({4: 1, 5: 2}) == [4, 5]
        assert pool.answer({4: 1, 5: 2, 6: 0}) == [6]
        assert pool.answer({4: 1}) == []
        assert pool.answer({0: 0}) == [], "equal to the label in the data set"
        assert len(pool.labels_of(np.array([]))) == len(pool.labels_of(torch.tensor([]))) == 0
        assert pool.rounds == 2
        with pytest.raises(ValueError, match="id 5 was 2 and is now 1"):
            pool.answer({5: 1, 8: 0})
        assert 8 in pool.pool_ids


class TestSelect:
    @pytest.mark.parametrize("method", ["clusters", "kcenter", "kmeans", "topk", "kmeans++", "gumbel"])
    def test_selection_is_distinct_and_deterministic(self, rng: Rng, method: Any) -> None:
        score, emb, taken = torch.from_numpy(rng.random(200)), draw(rng, 200), draw(rng, 10)
        chosen = select(score, 20, emb, method, labelled_emb=taken)
        assert len(chosen.unique()) == 20
        assert torch.equal(chosen, select(score, 20, emb, method, labelled_emb=taken))
        assert sorted(select(score, 500, emb, method, labelled_emb=taken).tolist()) == list(range(200))
        copies = emb[:1].repeat(200, 1)
        assert len(select(score, 20, copies, method, labelled_emb=taken).unique()) == 20

    @pytest.mark.parametrize("method", ["clusters", "kcenter", "kmeans"])
    def test_candidates_are_the_highest_scores(self, rng: Rng, method: Any) -> None:
        score, emb = torch.from_numpy(rng.random(200)), draw(rng, 200)
        chosen = select(score, 10, emb, method=method, beta=3.0)
        assert float(score[chosen].min()) >= float(score.sort(descending=True).values[29])
        assert set(select(score, 10, emb, method=method, beta=1.0).tolist()) == set(score.topk(10).indices.tolist())

    def test_kcenter_is_farthest_first(self, rng: Rng) -> None:
        """Every selected sample is the farthest from all selected and labelled ones (Gonzalez's algorithm)."""
        emb, taken = draw(rng, 60, 2), draw(rng, 3, 2)
        chosen = select(torch.ones(60), 6, emb, "kcenter", labelled_emb=taken, beta=10.0).tolist()
        for step, best in enumerate(chosen):
            others = torch.cat([taken, emb[chosen[:step]]])
            distance = torch.cdist(emb, others).amin(dim=1)
            assert float(distance[best]) == pytest.approx(float(distance.max()))

    def test_kmeans_takes_one_sample_per_cluster(self, rng: Rng) -> None:
        centers = 100 * draw(rng, 7, 3)
        owner = torch.arange(140) % 7
        emb = centers[owner] + 0.1 * draw(rng, 140, 3)
        chosen = select(torch.from_numpy(rng.uniform(0.5, 1, 140)), 7, emb, method="kmeans", beta=20.0)
        assert sorted(owner[chosen].tolist()) == list(range(7))
        spread = (emb - centers[owner]).norm(dim=1)
        assert float(spread[chosen].mean()) < float(spread.mean()), "typical members, not extreme ones"

    def test_clusters_give_their_highest_score(self, rng: Rng) -> None:
        owner = torch.arange(140) % 7
        emb = 100 * torch.eye(7, dtype=torch.float64)[owner] + 0.1 * torch.from_numpy(rng.uniform(-1, 1, (140, 7)))
        score = torch.from_numpy(rng.uniform(0.5, 1, 140))
        best = [int(torch.where(owner == cluster, score, 0.0).argmax()) for cluster in range(7)]
        assert sorted(select(score, 7, emb, method="clusters", beta=20.0).tolist()) == sorted(best)

    def test_random_methods_follow_the_score(self, rng: Rng) -> None:
        score = torch.cat([torch.full((50,), 0.9), torch.full((50,), 0.1)])
        emb = draw(rng, 100)
        for method in ("gumbel", "kmeans++"):
            generator = torch.Generator().manual_seed(int(rng.integers(2**31)))
            first = [int(select(score, 1, emb, method=method, generator=generator)[0]) < 50 for _ in range(300)]
            assert 0.8 < np.mean(first) < 0.98  # 0.9 with a standard error of 0.017

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"method": "best"}, "method must be one of"),
            ({"k": 0}, "k must be an integer of at least 1"),
            ({"beta": 0.5}, "beta.* must be at least 1"),
            ({"emb": None}, "needs an embedding for each of the 5 scores; got none"),
            ({"emb": torch.zeros(4, 2)}, "got 4"),
            ({"score": torch.full((5,), torch.nan)}, "score holds NaN"),
            ({"score": torch.tensor([0, 1, 2, 3, torch.inf])}, r"score holds \+inf"),
            ({"emb": torch.full((5, 2), torch.nan)}, "emb must be finite.*5 of 5 rows"),
            ({"labelled_emb": torch.full((1, 2), torch.inf)}, "labelled_emb must be finite"),
        ],
    )
    def test_refuses(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            # Unwrapped, so that beartype does not reject the argument first.
            inspect.unwrap(select)(**{"score": torch.ones(5), "k": 2, "emb": torch.zeros(5, 2), **options})

    @pytest.mark.parametrize("method", ["clusters", "kcenter", "kmeans", "topk", "kmeans++", "gumbel"])
    def test_minus_infinity_comes_last(self, rng: Rng, method: Any) -> None:
        """A sample with score -inf comes last, and its embedding may hold NaN."""
        score, emb = torch.from_numpy(rng.random(20)), draw(rng, 20)
        score[:3], emb[:3] = -torch.inf, torch.nan
        for k in (1, 5, 16, 18):
            assert len(set(select(score, k, emb, method)[:17].tolist()) - {0, 1, 2}) == min(k, 17)
        assert sorted(select(score, 30, emb, method).tolist()) == list(range(20))
        candidates = Candidates(score.clamp_min(0.0), torch.arange(20) < 5, emb)
        assert sorted(choose(candidates, 17, emb[:4], method=method).tolist()) == list(range(3, 20))

    def test_an_empty_pool(self) -> None:
        assert len(select(torch.empty(0), 3, torch.empty(0, 2))) == 0


def table() -> TrustTable:
    columns = {
        "trust": torch.tensor([0.4, 0.5, 0.9]),
        "label": torch.tensor([0, 1, 1]),
        "reason": torch.tensor([2, 0, -1]),
    }
    return TrustTable.of([12, 15, 3], columns, ["cat", "dog"])


class TestAnnotationFiles:
    @pytest.mark.parametrize("kind", ["csv", "jsonl"])
    def test_answers_are_read_back(self, tmp_path: Path, kind: str) -> None:
        path = tmp_path / f"questions.{kind}"
        write_questions(path, table(), context=lambda i: {"picture": f"{i}.png, front"})
        assert read_answers(path) == {}, "no question is answered yet"
        text = path.read_text()
        if kind == "csv":
            rows = list(csv.DictReader(text.splitlines()))
            assert [row["picture"] for row in rows] == ["12.png, front", "15.png, front", "3.png, front"]
            rows[0]["answer"], rows[2]["answer"] = " dog ", "cat"
            with path.open("w", newline="") as file:
                writer = csv.DictWriter(file, list(rows[0]))
                writer.writeheader()
                writer.writerows(rows)
        else:
            records = [json.loads(line) for line in text.splitlines()]
            records[0]["answer"], records[2]["answer"] = "dog", "cat"
            path.write_text("\n".join(map(json.dumps, records)))
        assert read_answers(path, ["cat", "dog"]) == {12: 1, 3: 0}
        with pytest.raises(FileExistsError, match="may hold answers"):
            write_questions(path, table())

    def test_label_studio(self, tmp_path: Path) -> None:
        path = tmp_path / "tasks.json"
        numbers = replace(table(), classes=[0, 1])
        write_questions(path, numbers, lambda i: {"image": f"https://example.org/{i}.png"}, classes=["cat", "dog"])
        with pytest.raises(ValueError, match="classes has 1 names, cat, but the table holds the label 1"):
            write_questions(tmp_path / "b.json", numbers, classes=["cat"])
        tasks = json.loads(path.read_text())
        assert tasks[0]["data"]["image"] == "https://example.org/12.png"
        assert tasks[0]["predictions"][0]["score"] == pytest.approx(0.4)
        assert tasks[1]["predictions"][0]["result"][0]["value"]["choices"] == ["dog"]
        assert read_answers(path, ["cat", "dog"]) == {}

        def annotation(choice: str, cancelled: bool = False) -> dict[str, Any]:
            return {"was_cancelled": cancelled, "result": [{"type": "choices", "value": {"choices": [choice]}}]}

        tasks[0]["annotations"], tasks[2]["annotations"] = [annotation("dog")], None
        tasks[1]["annotations"] = [annotation("cat", cancelled=True)]
        path.write_text(json.dumps(tasks))
        assert read_answers(path, ["cat", "dog"]) == {12: 1}

    @pytest.mark.parametrize("values", [[["cat", "dog"]], [["cat"], ["dog"]]])
    def test_label_studio_with_several_choices(self, tmp_path: Path, values: list[list[str]]) -> None:
        """One result with two choices, and two results with one choice each."""
        results = [{"type": "choices", "value": {"choices": choices}} for choices in values]
        task = {"data": {"id": 12}, "annotations": [{"result": results}]}
        (tmp_path / "a.json").write_text(json.dumps([task]))
        with pytest.raises(ValueError, match="answers id 12 with 2 choices, cat, dog; expected one"):
            read_answers(tmp_path / "a.json", ["cat", "dog"])

    def test_annotators_of_label_studio_must_agree(self, tmp_path: Path) -> None:
        def task(*choices: str) -> dict[str, Any]:
            return {"data": {"id": 12}, "annotations": [{"result": [{"value": {"choices": [c]}}]} for c in choices]}

        (tmp_path / "a.json").write_text(json.dumps([task("dog", "dog")]))
        assert read_answers(tmp_path / "a.json", ["cat", "dog"]) == {12: 1}
        (tmp_path / "a.json").write_text(json.dumps([task("dog", "cat")]))
        with pytest.raises(ValueError, match="answers id 12 with dog, cat in different annotations"):
            read_answers(tmp_path / "a.json", ["cat", "dog"])

    @pytest.mark.parametrize("kind", ["csv", "jsonl", "json"])
    def test_class_names_that_look_like_formulas(self, tmp_path: Path, kind: str) -> None:
        """The annotator copies the model's label; a spreadsheet finds no formula in the CSV file."""
        names = ["=cmd|' /C calc'!A0", "@sum", "'=cmd", "-1+1", "+a", "\tx", "\rx", "-5", " cat"]
        ids, path = list(range(len(names))), tmp_path / f"a.{kind}"
        columns = {"trust": torch.linspace(0, 1, len(names)), "label": torch.tensor(ids)}
        write_questions(path, TrustTable.of(ids, columns, names), lambda i: {"=shown": names[i]})
        if kind == "csv":
            with path.open(newline="", encoding="utf-8") as file:
                header, *rows = csv.reader(file)
            assert not any(cell[:1] in tuple("=+@\t\r") for row in [header, *rows] for cell in row if cell)
            with path.open("w", newline="", encoding="utf-8") as file:
                csv.writer(file).writerows([header, *([*row[:-1], row[header.index("label")]] for row in rows)])
        elif kind == "jsonl":
            records = [json.loads(line) for line in path.read_text().splitlines()]
            path.write_text("\n".join(json.dumps({**record, "answer": record["label"]}) for record in records))
        else:
            tasks = json.loads(path.read_text())
            path.write_text(json.dumps([{**task, "annotations": task["predictions"]} for task in tasks]))
        answers = read_answers(path, names)
        assert answers == dict(zip(ids, ids, strict=True))
        pool = LabelPool([(float(i), 0) for i in ids])
        assert sorted(pool.answer(answers)) == ids

    def test_an_answer_is_no_class_by_accident(self, tmp_path: Path) -> None:
        (tmp_path / "a.csv").write_text("id,answer\n3,x\n")
        with pytest.raises(ValueError, match="answers 'x' for id 3"):
            read_answers(tmp_path / "a.csv", ["None", "nan", ""])

    @pytest.mark.parametrize(
        ("name", "text", "classes", "message"),
        [
            ("a.txt", "", None, "must end in .csv, .jsonl or .json"),
            ("a.csv", "id,label\n", None, "lacks answer"),
            ("a.csv", "id,answer\nx,1\n", None, "holds the id 'x'"),
            ("a.csv", "id,answer\n3,dog\n", None, "pass classes="),
            ("a.csv", "id,answer\n3,bird\n", ["cat", "dog"], "expected one of cat, dog"),
            ("a.csv", "id,answer\n3,1\n3,2\n", None, "answers id 3 twice"),
            ("a.csv", "id,note,answer\n5,sizes 3,4,1\n", None, "line 2: the row has 4 fields, expected 3. Put text"),
            ("a.csv", "id,note,answer\n\n5,1\n", None, "line 3: the row has 2 fields, expected 3"),
            ("a.csv", "id,answer\n3,x\n", ["x", "y", "x"], "the name 'x' more than once"),
            ("a.jsonl", "{", None, "not valid JSON"),
            pytest.param("a.json", "[" * 100_000, None, "not valid JSON", id="nested"),
            pytest.param("a.jsonl", "[" * 100_000, None, "not valid JSON", id="nested line"),
            ("a.json", '[{"id": 1}]', None, "lacks data.id"),
            ("a.jsonl", '{"id": 1, "answer": 1.5}', None, "answers 1.5 for id 1; expected a whole number"),
            ("a.jsonl", '{"id": 1, "answer": true}', None, "answers True"),
            ("a.csv", "id,answer\n3,-1\n", None, "answers '-1'"),
            ("a.jsonl", '{"id": 1.9, "answer": 1}', None, "holds the id 1.9"),
            ("a.csv", "id,answer\n-3,1\n", None, "holds the id '-3'"),
            ("a.csv", "id,answer\n3,1E+05\n", None, "answers '1E.05'"),
            ("a.csv", "", None, "is empty; expected a header"),
            ("a.jsonl", "3", None, "holds the line 3"),
            ("a.json", "3", None, "holds a int instead of a list"),
            ("a.json", '[{"data": null}]', None, "lacks data.id"),
            ("a.json", '[{"data": {"id": 1}, "annotations": 3}]', None, "holds 3 where annotations was expected"),
            ("a.csv", "id,answer\n3,\u00e9\n", None, "is not UTF-8"),
            ("a.csv", "id,answer,,,answer\n3,1,,,2\n", None, "has more than one column 'answer'; give each"),
            ("a.csv", "id,answer\n3,x\n", ["\x1b[2J"], r"expected one of \\x1b\[2J\."),
            ("a.csv", "id,\x1b[2J\n", None, r"its columns are id, \\x1b\[2J\."),
        ],
    )
    def test_refuses(self, tmp_path: Path, name: str, text: str, classes: Any, message: str) -> None:
        (tmp_path / name).write_text(text, encoding="latin-1")
        with pytest.raises(ValueError, match=message):
            read_answers(tmp_path / name, classes)

    @pytest.mark.parametrize("names", [None, ["no", "yes"], [0, 1]])
    def test_pandas_columns_with_gaps(self, tmp_path: Path, names: Any) -> None:
        path, yes = tmp_path / "a.csv", "yes" if names == ["no", "yes"] else "1.0"
        path.write_text(f"id,answer\n3.0,{yes}\n4.0,\n5.0,nan\n")
        assert read_answers(path, names) == {3: 1}
        assert read_answers(path, [yes, "nan"]) == {3: 0, 5: 1}, "unless a class has the name nan"

    @pytest.mark.parametrize("kind", ["csv", "jsonl", "json"])
    def test_any_context_can_be_read_back(self, tmp_path: Path, kind: str) -> None:
        path = tmp_path / f"a.{kind}"
        odd = replace(table(), columns={**table().columns, "margin": torch.tensor([torch.inf, torch.nan, 1.0])})
        shown = {"text": "a\x0b\x85\u2028\n,b", "array": np.arange(2), "tensor": torch.ones(()), "of": [np.float32(2)]}
        write_questions(path, odd, context=lambda _: shown)
        assert read_answers(path) == {}
        if kind != "csv":
            parts = path.read_text().splitlines() if kind == "jsonl" else [path.read_text()]
            read = [json.loads(part, parse_constant=pytest.fail) for part in parts]
            rows = read if kind == "jsonl" else [task["data"] for task in read[0]]
            assert [row["margin"] for row in rows] == [None, None, 1.0]
            assert (rows[0]["text"], rows[0]["array"], rows[0]["of"]) == (shown["text"], [0, 1], [2.0])
            path.write_text("\n".join(json.dumps(part, ensure_ascii=False) for part in read), encoding="utf-8")
            assert read_answers(path) == {}, "with characters that are not escaped"
            with pytest.raises(TypeError, match=r"cannot hold .*, a object: JSON supports text"):
                write_questions(tmp_path / f"b.{kind}", table(), context=lambda _: {"what": object()})
        for taken in ({"id": "x"}, {"answer": "x"}, {"label": "x"}):
            with pytest.raises(
                ValueError, match=f"context returns the keys '{next(iter(taken))}' for id 12.*choose other names"
            ):
                write_questions(tmp_path / f"b.{kind}", table(), context={12: taken}.__getitem__)
        assert not (tmp_path / f"b.{kind}").exists()

    def test_the_documented_example_runs_twice(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        root = Path(__file__).parents[1]
        pages = [root / "README.md", *sorted((root / "docs").glob("*.md"))]
        blocks = [part for page in pages for part in re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.S)]
        (block,) = [part for part in blocks if "write_questions(" in part]
        monkeypatch.chdir(tmp_path)
        watch = SimpleNamespace(query=lambda k: [12, 3], scores={"pool": table()})
        for _ in range(2):
            exec(block, {"monitor": watch, "pool": LabelPool(samples())})


class TestConfirmedMistakes:
    def test_more_mistakes_than_max_impure(self, rng: Rng) -> None:
        """Two distant clouds: points of the second class inside the first are tolerated up to max_impure."""
        x = np.concatenate([rng.normal(size=(60, 2)), rng.normal(size=(60, 2)) + 20])
        y = np.repeat([4, 7], 60)
        head = TrustHead.fit(x, y, dim=2, normalize=None, max_impure=3, progress=False)
        middle = torch.from_numpy(x[:60].mean(axis=0) + 0.01 * rng.normal(size=(5, 2))).float()
        truth = torch.full((5,), 7)
        assert confirmed_disjuncts(head, middle[:3], truth[:3]) == ()
        (found,) = confirmed_disjuncts(head, middle[:4], truth[:4])
        assert (found.predicted, found.true, found.rows.tolist()) == (4, (7,), [0, 1, 2, 3])
        assert confirmed_disjuncts(head, middle, truth, given=truth) == (), "the given labels are right"
        again = TrustHead.fit(
            np.concatenate([x, middle.numpy()]), np.concatenate([y, truth.numpy()]), dim=2, normalize=None,
            max_impure=3, progress=False,
        )  # fmt: skip
        assert set(again.predict(middle)) == {7}, "after a refit they have their own ellipsoid"

    def test_unreadable_labels_do_not_stop_training(self, rng: Rng) -> None:
        """The pool warns once; with label_of= the mistakes are found."""
        pooling = pytest.importorskip("sepc_torch.training.lightning.pooling")
        x = np.concatenate([rng.normal(size=(60, 2)), rng.normal(size=(60, 2)) + 20])
        scores = pooling.PoolScores()
        scores.head = TrustHead.fit(x, np.repeat([0, 1], 60), dim=2, normalize=None, max_impure=2, progress=False)
        middle = torch.from_numpy(x[:60].mean(axis=0)).float().repeat(4, 1)
        scores.rows = {"id": torch.arange(4), "emb": middle, "label": torch.zeros(4, dtype=torch.int64)}
        scores.label_pool = LabelPool([{"y": 1}] * 4, labelled=range(4))
        with pytest.warns(UserWarning, match=r"label_of=.*not checked for confirmed mistakes"):
            assert scores.disjuncts() == ()
        assert scores.disjuncts() == (), "a second warning is an error here"
        scores.label_pool = LabelPool([{"y": 1}] * 4, labelled=range(4), label_of=lambda sample: sample["y"])
        (found,) = scores.disjuncts()
        assert (found.predicted, found.true, found.rows.tolist()) == (0, (1,), [0, 1, 2, 3])

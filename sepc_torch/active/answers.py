"""Questions to people and their answers, as files: CSV, JSON lines, and the JSON of Label Studio.

A question file has a row for each sample: its id, what the model says, whatever context helps, and an empty column
``answer``. Filled in, in part or in whole, it is read back with :func:`read_answers`.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sepc_torch import storage
from sepc_torch.trust_table import TrustTable, write_records


def write_questions(
    path: str | os.PathLike[str],
    table: TrustTable,
    context: Callable[[Any], Mapping[str, Any]] | None = None,
) -> None:
    """Write one question per row of a table: ``monitor.scores["pool"].find(ids)``, for instance.

    Args:
        path: ``.csv``, ``.jsonl``, or ``.json`` for tasks that Label Studio imports. The file is written whole or not
            at all; an existing one is not overwritten, since it may hold answers.
        table: The samples, and what the model says of them.
        context: From an id to what a person needs to see, such as the address of a picture.
    """
    path = Path(path)
    if path.exists():
        raise FileExistsError(f"{path} exists and may hold answers. Read it (read_answers), then move it away.")
    records = [{**row, **({} if context is None else context(row["id"]))} for row in table.rows()]
    kind = _kind(path)
    if kind == "csv":
        names = list(dict.fromkeys(["id", *table.columns, *(name for record in records for name in record)]))
        write_records(path, [{**record, "answer": ""} for record in records], [*names, "answer"])
        return
    if kind == "jsonl":
        text = "".join(json.dumps({**record, "answer": None}) + "\n" for record in records)
    else:
        text = json.dumps([_task(record) for record in records], indent=1) + "\n"
    with storage.replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def read_answers(path: str | os.PathLike[str], classes: Sequence[Any] | None = None) -> dict[int, int]:
    r"""The answers of a file by id; questions without one are left out.

    Args:
        path: A filled-in question file, or the JSON that Label Studio exports.
        classes: Names of the classes, where people answer with names instead of numbers.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "questions.csv"
    >>> _ = path.write_text("id,trust,answer\n12,0.4,dog\n15,0.5,\n")
    >>> read_answers(path, classes=["cat", "dog"])
    {12: 1}
    """
    path = Path(path)
    kind = _kind(path)
    text = path.read_text(encoding="utf-8-sig")  # spreadsheets put a mark in front
    try:
        if kind == "csv":
            pairs = [_pair(row, path) for row in csv.DictReader(text.splitlines())]
        elif kind == "jsonl":
            pairs = [_pair(json.loads(line), path) for line in text.splitlines() if line.strip()]
        else:
            pairs = [_annotated(task, path) for task in json.loads(text)]
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON ({error}).") from error
    found: dict[int, int] = {}
    for name, answer in pairs:
        if answer is None or answer == "":
            continue
        code = _code(answer, classes, name, path)
        if found.setdefault(name, code) != code:
            raise ValueError(f"{path} answers id {name} twice, with {found[name]} and with {code}. Keep one.")
    return found


def _kind(path: Path) -> str:
    kind = path.suffix.removeprefix(".").lower()
    if kind not in ("csv", "jsonl", "json"):
        raise ValueError(f"The file must end in .csv, .jsonl or .json (Label Studio), got {path.name!r}.")
    return kind


def _task(record: Mapping[str, Any]) -> dict[str, Any]:
    """A task of Label Studio: the model's label as a prediction, its trust as the score that tasks are sorted by."""
    choice = {
        "from_name": "label",
        "to_name": "sample",
        "type": "choices",
        "value": {"choices": [str(record.get("label"))]},
    }
    prediction = {"model_version": "sepc_torch", "score": record.get("trust"), "result": [choice]}
    return {"data": dict(record), "predictions": [prediction]}


def _pair(row: Mapping[str, Any], path: Path) -> tuple[int, Any]:
    missing = [name for name in ("id", "answer") if name not in row]
    if missing:
        raise ValueError(f"{path} lacks {' and '.join(missing)}; its fields are {', '.join(map(str, row))}.")
    answer = row["answer"]
    return _id(row["id"], path), answer.strip() if isinstance(answer, str) else answer


def _annotated(task: Any, path: Path) -> tuple[int, Any]:
    """Id and last finished annotation of a task that Label Studio exported (JSON, not JSON-MIN)."""
    if not isinstance(task, Mapping) or "id" not in task.get("data", {}):
        raise ValueError(f"{path} is not an export of Label Studio's JSON: a task lacks data.id.")
    name = _id(task["data"]["id"], path)
    answer = None
    for annotation in task.get("annotations", ()):
        if annotation.get("was_cancelled"):
            continue
        for result in annotation.get("result", ()):
            choices = result.get("value", {}).get("choices", ())
            answer = choices[0] if choices else answer
    return name, answer


def _id(value: Any, path: Path) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        raise ValueError(f"{path} holds the id {value!r}; ids are indices into the data set.") from None


def _code(answer: Any, classes: Sequence[Any] | None, name: int, path: Path) -> int:
    names = [] if classes is None else [str(label) for label in classes]
    if str(answer) in names:
        return names.index(str(answer))
    try:
        if classes is None:
            return int(answer)
    except (TypeError, ValueError):
        pass
    expected = "a whole number; give classes= to read names" if classes is None else f"one of {', '.join(names)}"
    raise ValueError(f"{path} answers {answer!r} for id {name}; expected {expected}.")

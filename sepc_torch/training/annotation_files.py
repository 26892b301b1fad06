"""Annotation files: write samples for annotators and read their labels, as CSV, JSON lines or Label Studio JSON.

A question file has one row per sample: the id, the model's predictions, optional context, and an empty column
``answer``. Annotators fill in some or all answers, and :func:`read_answers` reads them back.
"""

from __future__ import annotations

import csv
import io
import json
import math
import operator
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from sepc_torch.data import files
from sepc_torch.data.arrays import refuse_duplicates
from sepc_torch.data.text import printable, unescape_cell
from sepc_torch.training.trust_table import TrustTable, write_records

# Whole numbers, also in the form 3.0. No exponents: a spreadsheet that shows 1.2E+05 has rounded the number.
_WHOLE = re.compile(r"[0-9]+(\.0*)?")


def write_questions(
    path: str | os.PathLike[str],
    table: TrustTable,
    context: Callable[[Any], Mapping[str, Any]] | None = None,
    classes: Sequence[Any] | None = None,
) -> None:
    """Write a question file with one row per row of a table, for instance of ``monitor.scores["pool"].find(ids)``.

    Args:
        path: ``.csv``, ``.jsonl``, or ``.json`` for tasks that Label Studio imports. The file is written atomically. An
            existing file is not overwritten, because it may hold answers. In a CSV file, text that a spreadsheet would
            run as a formula starts with an apostrophe, which :func:`read_answers` removes.
        table: The samples with the model's predictions.
        context: From an id to a dictionary of values to show the annotator, such as the address of a picture. Its keys
            must differ from the table's columns, ``id`` and ``answer``.
        classes: Class names for the labels 0, 1 and so on, as for :func:`read_answers`; the model's label is then
            written by name. Label Studio shows it as a preselected choice if a choice has this name.
    """
    path = Path(path)
    if path.exists():
        raise FileExistsError(
            f"{str(path)!r} exists and may hold answers. Read it with read_answers, then move it away."
        )
    kind = _kind(path)
    records = [{**row, **_context(context, row)} for row in table.rows()]
    if classes is not None and "label" in table.columns:
        records = [{**record, "label": _class_name(record["label"], classes)} for record in records]
    if kind == "csv":
        names = list(dict.fromkeys(["id", *table.columns, *(name for record in records for name in record)]))
        write_records(path, [{**record, "answer": ""} for record in records], [*names, "answer"])
        return
    if kind == "jsonl":
        lines = [{**_to_json(record), "answer": None} for record in records]
        text = "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)
    else:
        text = json.dumps([_task(_to_json(record)) for record in records], indent=1, allow_nan=False) + "\n"
    with files.replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def read_answers(path: str | os.PathLike[str], classes: Sequence[Any] | None = None) -> dict[int, int]:
    r"""Read the answers of a file as a dictionary from id to label; unanswered questions are left out.

    Args:
        path: A question file with answers, or the JSON export of Label Studio.
        classes: Class names for the labels 0, 1 and so on, if annotators answer with names instead of numbers.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "questions.csv"
    >>> _ = path.write_text("id,trust,answer\n12,0.4,dog\n15,0.5,\n")
    >>> read_answers(path, classes=["cat", "dog"])
    {12: 1}
    """
    path = Path(path)
    kind, source = _kind(path), repr(str(path))
    try:
        # Spreadsheets write a byte order mark. Bytes are decoded because read_text would replace carriage returns.
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{source} is not UTF-8 ({error}). Save it as UTF-8, in Excel as 'CSV UTF-8'.") from error
    try:
        if kind == "csv":
            rows = _csv_rows(text, source)
            pairs = [_pair({**row, "answer": unescape_cell(row["answer"])}, source) for row in rows]
        elif kind == "jsonl":
            pairs = [_pair(json.loads(line), source) for line in text.split("\n") if line.strip()]
        else:
            tasks = json.loads(text)
            if not isinstance(tasks, list):
                raise ValueError(_export_error(source, f"it holds a {type(tasks).__name__} instead of a list of tasks"))
            pairs = [_annotated(task, source) for task in tasks]
    except (json.JSONDecodeError, RecursionError) as error:  # a few thousand nested brackets exhaust the stack
        raise ValueError(f"{source} is not valid JSON ({error}).") from error
    except csv.Error as error:
        raise ValueError(f"{source} is not valid CSV ({error}).") from error
    names = None if classes is None else _class_names(classes)
    found: dict[int, int] = {}
    for name, answer in pairs:
        if _is_unanswered(answer, names):
            continue
        code = _code(answer, names, name, source)
        if found.setdefault(name, code) != code:
            raise ValueError(f"{source} answers id {name} twice, with {found[name]} and with {code}. Keep one answer.")
    return found


def _kind(path: Path) -> str:
    """File format by suffix."""
    kind = path.suffix.removeprefix(".").lower()
    if kind not in ("csv", "jsonl", "json"):
        raise ValueError(f"The file name must end in .csv, .jsonl or .json (Label Studio); got {path.name!r}.")
    return kind


def _context(context: Callable[[Any], Mapping[str, Any]] | None, row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Context of a row; its keys may not clash with the columns of the question file."""
    if context is None:
        return {}
    shown = context(row["id"])
    if not isinstance(shown, Mapping):
        raise TypeError(f"context must return a dictionary; got a {type(shown).__name__} for id {row['id']!r}.")
    taken = [name for name in shown if name in row or name == "answer"]
    if taken:
        raise ValueError(
            f"context returns the keys {', '.join(map(repr, taken))} for id {row['id']!r}, but the question file uses "
            "them already; choose other names."
        )
    return shown


def _class_names(classes: Sequence[Any]) -> list[str]:
    """The classes as text; raise ValueError if two have one name."""
    names = [str(label) for label in classes]
    twice = [name for name, times in Counter(names).items() if times > 1]
    if twice:
        raise ValueError(f"classes holds the name {twice[0]!r} more than once; give each class a name of its own.")
    return names


def _class_name(label: Any, classes: Sequence[Any]) -> Any:
    """Name of a class, from its code; names and None are returned unchanged."""
    names = _class_names(classes)
    if label is None or (isinstance(label, str) and label in names):
        return label
    try:
        code = operator.index(label)
    except TypeError:
        code = -1
    if not 0 <= code < len(names):
        raise ValueError(
            f"classes has {len(names)} names, {_listed(names)}, but the table holds the label {label!r}. Name every "
            "class."
        )
    return names[code]


def _to_json(value: Any) -> Any:
    """Convert a value for JSON: tensors and arrays to lists; NaN and infinity, which JSON lacks, to null."""
    if isinstance(value, (Tensor, np.ndarray, np.generic)):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(name): _to_json(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_json(entry) for entry in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (str, int)):
        return value
    raise TypeError(
        f"A question cannot hold {value!r}, a {type(value).__name__}: JSON supports text, numbers, lists and "
        "dictionaries. Return str(...) of the value from context."
    )


def _task(record: Mapping[str, Any]) -> dict[str, Any]:
    """Label Studio task, with the model's label as a prediction and its trust as the score to sort tasks by."""
    if record.get("label") is None:  # no prediction
        return {"data": dict(record), "predictions": []}
    return {"data": dict(record), "predictions": [label_studio_prediction(record["label"], record.get("trust"))]}


def label_studio_prediction(label: Any, score: float | None) -> dict[str, Any]:
    """Prediction of Label Studio that preselects a label as a choice.

    >>> label_studio_prediction("cat", 0.9)["result"][0]["value"]
    {'choices': ['cat']}
    """
    choice = {"from_name": "label", "to_name": "sample", "type": "choices", "value": {"choices": [str(label)]}}
    return {"model_version": "sepc_torch", "score": score, "result": [choice]}


def _check_fields(fields: Collection[Any], source: str) -> None:
    """Raise an error unless a row has an id and an answer."""
    missing = [name for name in ("id", "answer") if name not in fields]
    if missing:
        raise ValueError(f"{source} lacks {' and '.join(missing)}; its columns are {_listed(fields)}.")


def _csv_rows(text: str, source: str) -> Iterator[dict[str, Any]]:
    """Rows of a CSV file by column; a row of another length is refused, because its cells would shift."""
    reader = csv.reader(io.StringIO(text, newline=""))  # splitlines() would also split at characters such as U+2028
    header = next(reader, None)
    if header is None:
        raise ValueError(f"{source} is empty; expected a header with id and answer, as in write_questions.")
    refuse_duplicates(filter(None, header), source)
    _check_fields(header, source)
    for row in filter(None, reader):
        if len(row) != len(header):
            raise ValueError(
                f"{source}, line {reader.line_num}: the row has {len(row)} fields, expected {len(header)}. Put text "
                "that holds a comma in double quotes."
            )
        yield dict(zip(header, row, strict=True))


def _pair(row: Any, source: str) -> tuple[int, Any]:
    """Id and answer of a row."""
    if not isinstance(row, Mapping):
        raise ValueError(f"{source} holds the line {row!r}; expected a JSON object with id and answer on every line.")
    _check_fields(row, source)
    return _id(row["id"], source), row["answer"]


def _annotated(task: Any, source: str) -> tuple[int, Any]:
    """Id and answer of a task exported by Label Studio (JSON, not JSON-MIN); all finished annotations must agree."""
    data = _entry(task, "data", Mapping, {}, source)
    if "id" not in data:
        raise ValueError(_export_error(source, "a task lacks data.id"))
    name = _id(data["id"], source)
    answers: list[Any] = []
    for annotation in _entry(task, "annotations", list, [], source):
        if isinstance(annotation, Mapping) and annotation.get("was_cancelled"):
            continue
        values = [_entry(r, "value", Mapping, {}, source) for r in _entry(annotation, "result", list, [], source)]
        choices = [choice for value in values for choice in _entry(value, "choices", list, [], source)]
        if len(choices) > 1:
            raise ValueError(
                f"{source} answers id {name} with {len(choices)} choices, {_listed(choices)}; expected one. Correct "
                "the annotation, and let annotators select a single choice."
            )
        answers += [choice for choice in choices if choice not in answers]
    if len(answers) > 1:
        raise ValueError(
            f"{source} answers id {name} with {_listed(answers)} in different annotations. Keep one annotation."
        )
    return name, answers[0] if answers else None


def _entry(owner: Any, name: str, kind: type, default: Any, source: str) -> Any:
    """Entry of an export; the default if it is missing or null."""
    found = owner.get(name) if isinstance(owner, Mapping) else owner
    if not isinstance(owner, Mapping) or not (found is None or isinstance(found, kind)):
        raise ValueError(_export_error(source, f"it holds {found!r} where {name} was expected"))
    return default if found is None else found


def _export_error(source: str, why: str) -> str:
    return f"{source} is not a JSON export of Label Studio: {why}. Export as JSON, not as JSON-MIN."


def _listed(names: Iterable[Any]) -> str:
    return ", ".join(map(printable, names))


def _whole(value: Any) -> int | None:
    """A non-negative whole number, or None. Accepts 1.0, which spreadsheets and pandas write in columns with gaps."""
    if isinstance(value, str):
        return int(value.strip().partition(".")[0]) if _WHOLE.fullmatch(value.strip()) else None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return int(value) if value >= 0 and (isinstance(value, int) or value.is_integer()) else None


def _id(value: Any, source: str) -> int:
    """Id of a sample, as an integer."""
    name = _whole(value)
    if name is None:
        raise ValueError(
            f"{source} holds the id {value!r}; ids must be whole numbers from 0, indices into the data set."
        )
    return name


def _is_unanswered(answer: Any, names: Sequence[str] | None) -> bool:
    """Whether a question has no answer. pandas writes a gap as nan; a class may also have the name nan."""
    if isinstance(answer, str):
        text = answer.strip()
        return text == "" or (text.lower() == "nan" and text not in (names or ()))
    return answer is None or (isinstance(answer, float) and math.isnan(answer))


def _code(answer: Any, names: Sequence[str] | None, name: int, source: str) -> int:
    """Label of an answer, as a code."""
    whole = _whole(answer)
    if names is None:
        if whole is not None:
            return whole
        expected = "a whole number from 0; pass classes= to read names"
    else:
        # Annotators add spaces, a name may start with a tab, and if the names are numbers, 7.0 is the class 7.
        for form in (answer, answer.strip() if isinstance(answer, str) else None, whole):
            if form is not None and str(form) in names:
                return names.index(str(form))
        expected = f"one of {_listed(names)}"
    raise ValueError(f"{source} answers {answer!r} for id {name}; expected {expected}.")

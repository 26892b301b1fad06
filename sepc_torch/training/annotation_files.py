"""Questions to people and their answers, as files: CSV, JSON lines, and the JSON of Label Studio.

A question file has a row for each sample: its id, what the model says, whatever context helps, and an empty column
``answer``. Filled in, in part or in whole, it is read back with :func:`read_answers`.
"""

from __future__ import annotations

import csv
import io
import json
import math
import operator
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from sepc_torch.data import files
from sepc_torch.training.trust_table import TrustTable, write_records

_WHOLE = re.compile(r"[0-9]+(\.0*)?")


def write_questions(
    path: str | os.PathLike[str],
    table: TrustTable,
    context: Callable[[Any], Mapping[str, Any]] | None = None,
    classes: Sequence[Any] | None = None,
) -> None:
    """Write one question per row of a table: ``monitor.scores["pool"].find(ids)``, for instance.

    Args:
        path: ``.csv``, ``.jsonl``, or ``.json`` for tasks that Label Studio imports. The file is written whole or not
            at all; an existing one is not overwritten, since it may hold answers.
        table: The samples, and what the model says of them.
        context: From an id to what a person needs to see, such as the address of a picture. The names of the table's
            own columns, ``id`` and ``answer`` are taken.
        classes: Names of the classes by label 0, 1 and so on, as for :func:`read_answers`: the model's label is then
            written by name. Label Studio shows it as an answer to confirm if a choice has that name.
    """
    path = Path(path)
    if path.exists():
        raise FileExistsError(f"{path} exists and may hold answers. Read it (read_answers), then move it away.")
    kind = _kind(path)
    records = [{**row, **_context(context, row)} for row in table.rows()]
    if classes is not None and "label" in table.columns:
        records = [{**record, "label": _named(record["label"], classes)} for record in records]
    if kind == "csv":
        names = list(dict.fromkeys(["id", *table.columns, *(name for record in records for name in record)]))
        write_records(path, [{**record, "answer": ""} for record in records], [*names, "answer"])
        return
    if kind == "jsonl":
        lines = [{**_plain(record), "answer": None} for record in records]
        text = "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)
    else:
        text = json.dumps([_task(_plain(record)) for record in records], indent=1, allow_nan=False) + "\n"
    with files.replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def read_answers(path: str | os.PathLike[str], classes: Sequence[Any] | None = None) -> dict[int, int]:
    r"""The answers of a file by id; questions without one are left out.

    Args:
        path: A filled-in question file, or the JSON that Label Studio exports.
        classes: Names of the classes by label 0, 1 and so on, where people answer with names instead of numbers.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "questions.csv"
    >>> _ = path.write_text("id,trust,answer\n12,0.4,dog\n15,0.5,\n")
    >>> read_answers(path, classes=["cat", "dog"])
    {12: 1}
    """
    path = Path(path)
    kind = _kind(path)
    try:
        text = path.read_text(encoding="utf-8-sig")  # spreadsheets put a mark in front
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error}). Save it as UTF-8, in Excel as 'CSV UTF-8'.") from error
    try:
        if kind == "csv":
            # Not splitlines(), here and below: it also splits at characters that belong to the text, such as U+2028.
            reader = csv.DictReader(io.StringIO(text, newline=""))
            if reader.fieldnames is None:
                raise ValueError(f"{path} is empty; expected a header with id and answer, as write_questions wrote it.")
            _check_fields(reader.fieldnames, path)
            pairs = [_pair(row, path) for row in reader]
        elif kind == "jsonl":
            pairs = [_pair(json.loads(line), path) for line in text.split("\n") if line.strip()]
        else:
            tasks = json.loads(text)
            if not isinstance(tasks, list):
                raise ValueError(_no_export(path, f"it holds a {type(tasks).__name__} in place of a list of tasks"))
            pairs = [_annotated(task, path) for task in tasks]
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON ({error}).") from error
    except csv.Error as error:
        raise ValueError(f"{path} is not valid CSV ({error}).") from error
    names = None if classes is None else [str(label) for label in classes]
    found: dict[int, int] = {}
    for name, answer in pairs:
        if _is_open(answer, names):
            continue
        code = _code(answer, names, name, path)
        if found.setdefault(name, code) != code:
            raise ValueError(f"{path} answers id {name} twice, with {found[name]} and with {code}. Keep one.")
    return found


def _kind(path: Path) -> str:
    kind = path.suffix.removeprefix(".").lower()
    if kind not in ("csv", "jsonl", "json"):
        raise ValueError(f"The file must end in .csv, .jsonl or .json (Label Studio), got {path.name!r}.")
    return kind


def _context(context: Callable[[Any], Mapping[str, Any]] | None, row: Mapping[str, Any]) -> Mapping[str, Any]:
    """What to show beside a row; it may not hide what answers are read back by."""
    if context is None:
        return {}
    shown = context(row["id"])
    if not isinstance(shown, Mapping):
        raise TypeError(f"context must give a dictionary, got a {type(shown).__name__} for id {row['id']!r}.")
    taken = [name for name in shown if name in row or name == "answer"]
    if taken:
        raise ValueError(
            f"context gives {', '.join(map(repr, taken))} for id {row['id']!r}, which the question file has already; "
            "choose other names."
        )
    return shown


def _named(label: Any, classes: Sequence[Any]) -> Any:
    """The name of a class; a label that is a name already stays."""
    names = [str(name) for name in classes]
    if label is None or (isinstance(label, str) and label in names):
        return label
    try:
        code = operator.index(label)
    except TypeError:
        code = -1
    if not 0 <= code < len(names):
        raise ValueError(
            f"classes names {len(names)} classes, {', '.join(names)}; the table holds the label {label!r}."
        )
    return names[code]


def _plain(value: Any) -> Any:
    """A value as JSON holds it: tensors and arrays as lists, NaN and infinities, which JSON does not know, as null."""
    if isinstance(value, (Tensor, np.ndarray, np.generic)):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(name): _plain(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (str, int)):
        return value
    raise TypeError(
        f"A question cannot hold {value!r}, a {type(value).__name__}: JSON knows text, numbers, lists and "
        "dictionaries. Let context give str(...) of it."
    )


def _task(record: Mapping[str, Any]) -> dict[str, Any]:
    """A task of Label Studio: the model's label as a prediction, its trust as the score that tasks are sorted by."""
    if record.get("label") is None:  # nothing to confirm
        return {"data": dict(record), "predictions": []}
    choice = {
        "from_name": "label",
        "to_name": "sample",
        "type": "choices",
        "value": {"choices": [str(record.get("label"))]},
    }
    prediction = {"model_version": "sepc_torch", "score": record.get("trust"), "result": [choice]}
    return {"data": dict(record), "predictions": [prediction]}


def _check_fields(fields: Collection[Any], path: Path) -> None:
    missing = [name for name in ("id", "answer") if name not in fields]
    if missing:
        raise ValueError(f"{path} lacks {' and '.join(missing)}; its fields are {', '.join(map(str, fields))}.")


def _pair(row: Any, path: Path) -> tuple[int, Any]:
    if not isinstance(row, Mapping):
        raise ValueError(f"{path} holds the line {row!r}; expected a JSON object with id and answer on every line.")
    _check_fields(row, path)
    answer = row["answer"]
    return _id(row["id"], path), answer.strip() if isinstance(answer, str) else answer


def _annotated(task: Any, path: Path) -> tuple[int, Any]:
    """Id and last finished annotation of a task that Label Studio exported (JSON, not JSON-MIN)."""
    data = _entry(task, "data", Mapping, {}, path)
    if "id" not in data:
        raise ValueError(_no_export(path, "a task lacks data.id"))
    name = _id(data["id"], path)
    answer = None
    for annotation in _entry(task, "annotations", list, [], path):
        if isinstance(annotation, Mapping) and annotation.get("was_cancelled"):
            continue
        for result in _entry(annotation, "result", list, [], path):
            choices = _entry(_entry(result, "value", Mapping, {}, path), "choices", list, [], path)
            answer = choices[0] if choices else answer
    return name, answer


def _entry(owner: Any, name: str, kind: type, default: Any, path: Path) -> Any:
    """An entry of an export; one that is missing or null is the default."""
    found = owner.get(name) if isinstance(owner, Mapping) else owner
    if not isinstance(owner, Mapping) or not (found is None or isinstance(found, kind)):
        raise ValueError(_no_export(path, f"it holds {found!r} where {name} should be"))
    return default if found is None else found


def _no_export(path: Path, why: str) -> str:
    return f"{path} is not an export of Label Studio's JSON: {why}. Export as JSON, not as JSON-MIN."


def _whole(value: Any) -> int | None:
    """A whole number of 0 or more, or None. 1.0 is one: spreadsheets and pandas write it so in a column with gaps."""
    if isinstance(value, str):
        # No exponents: a spreadsheet that shows 1.2E+05 has rounded it.
        return int(value.strip().partition(".")[0]) if _WHOLE.fullmatch(value.strip()) else None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return int(value) if value >= 0 and (isinstance(value, int) or value.is_integer()) else None


def _id(value: Any, path: Path) -> int:
    name = _whole(value)
    if name is None:
        raise ValueError(f"{path} holds the id {value!r}; ids are indices into the data set, whole numbers from 0.")
    return name


def _is_open(answer: Any, names: Sequence[str] | None) -> bool:
    """Whether nobody has answered; pandas writes a gap as nan, which may also be the name of a class."""
    if answer is None or answer == "" or (isinstance(answer, float) and math.isnan(answer)):
        return True
    return isinstance(answer, str) and answer.lower() == "nan" and answer not in (names or ())


def _code(answer: Any, names: Sequence[str] | None, name: int, path: Path) -> int:
    whole = _whole(answer)
    if names is None:
        if whole is not None:
            return whole
        expected = "a whole number from 0; give classes= to read names"
    else:
        for form in (answer, whole):  # where names are numbers, 7.0 is the class 7
            if form is not None and str(form) in names:
                return names.index(str(form))
        expected = f"one of {', '.join(names)}"
    raise ValueError(f"{path} answers {answer!r} for id {name}; expected {expected}.")

"""Encoding of tables as numbers: standardised numbers, indicators of missing values, and one column per category.

:meth:`TableEncoding.fit` lets scikit-learn's transformers compute the numbers and categories. The encoding keeps only
these, as plain values that a JSON file holds, and applies them with NumPy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from sepc_torch.shapes import Array, Bool, Float

# Texts that stand for a missing value, as pandas reads them.
MISSING = ("", "#N/A", "N/A", "NA", "NULL", "NaN", "None", "n/a", "nan", "null", "<NA>")
# A category of fewer training rows shares the column "other" with the other rare ones: too few rows to learn from.
_LEAST_ROWS = 5
# Largest number of columns of one categorical column, with "other": more would outweigh the other columns.
_MOST_CATEGORIES = 32
# Stands for a missing value among the categories.
ABSENT = "(missing)"


class NumberColumn(NamedTuple):
    """A column of numbers: a missing value becomes ``median``, then ``(value - mean) / scale``.

    ``gaps`` says whether values were missing in training; a further feature then indicates a missing value.
    """

    name: str
    median: float
    mean: float
    scale: float
    gaps: bool

    def original(self, value: float) -> float:
        """An encoded value in the units of the column.

        >>> NumberColumn("age", median=40.0, mean=40.0, scale=10.0, gaps=False).original(1.5)
        55.0
        """
        return value * self.scale + self.mean


class CategoryColumn(NamedTuple):
    """A column of categories: a feature 0 or 1 for each of ``categories``, and one for rare ones if ``other``."""

    name: str
    categories: tuple[str, ...]
    other: bool


class Encoded(NamedTuple):
    """Encoded rows of a table.

    Attributes:
        points: The features; NaN in rows that cannot be encoded.
        problems: What is wrong with these rows.
        filled: Number of missing values in columns of numbers that had none in training, by column.
    """

    points: Float[Array, "n F"]
    problems: dict[int, str]
    filled: dict[str, int]


@dataclass(frozen=True)
class TableEncoding:
    """Map from the columns of a table to features: numbers first, then missing-value indicators, then categories.

    Attributes:
        numbers: The columns of numbers.
        categories: The categorical columns. A category that is unknown counts as rare; without rare categories in
            training, all features of its column are 0.
        missing: Texts that stand for a missing value.

    >>> table = {"age": np.array([30.0, np.nan, 50.0]), "pet": np.array(["cat", "dog", "cat"], dtype=object)}
    >>> encoding = TableEncoding.fit(table, ["age"], ["pet"], least_rows=1)
    >>> encoding.feature_names
    ('age', 'age is missing', 'pet=cat', 'pet=dog')
    >>> encoding.encode({"age": np.array([40.0]), "pet": np.array(["cow"], dtype=object)}).points
    array([[0., 0., 0., 0.]])
    """

    numbers: tuple[NumberColumn, ...]
    categories: tuple[CategoryColumn, ...]
    missing: tuple[str, ...] = MISSING

    @classmethod
    def fit(
        cls,
        table: Any,
        numbers: Sequence[str],
        categories: Sequence[str],
        missing: Sequence[str] = MISSING,
        *,
        least_rows: int = _LEAST_ROWS,
        most_categories: int = _MOST_CATEGORIES,
    ) -> TableEncoding:
        """Fit the encoding to the training rows with scikit-learn.

        Args:
            table: The columns by name: a mapping to arrays, or a DataFrame.
            numbers: Names of the columns of numbers; each needs at least one value.
            categories: Names of the categorical columns.
            missing: Texts that stand for a missing value.
            least_rows: Least number of rows of a category with a feature of its own.
            most_categories: Largest number of features of a categorical column.
        """
        from sklearn.impute import MissingIndicator, SimpleImputer
        from sklearn.preprocessing import OneHotEncoder, StandardScaler

        absent = frozenset(missing)
        number_columns: list[NumberColumn] = []
        if numbers:
            values = np.stack([_numbers_or_error(table, name, absent) for name in numbers], axis=1)
            imputer = SimpleImputer(strategy="median").fit(values)
            scaler = StandardScaler().fit(imputer.transform(values))
            gaps = set(MissingIndicator(features="missing-only").fit(values).features_.tolist())
            fitted = zip(numbers, imputer.statistics_, scaler.mean_, scaler.scale_, strict=True)
            number_columns = [
                NumberColumn(name, float(median), float(mean), float(scale), j in gaps)
                for j, (name, median, mean, scale) in enumerate(fitted)
            ]
        category_columns = []
        for name in categories:
            encoder = OneHotEncoder(
                min_frequency=least_rows, max_categories=most_categories, handle_unknown="infrequent_if_exist"
            )
            encoder.fit(category_texts(table[name], absent)[:, None])
            rare = encoder.infrequent_categories_[0]
            rare = set() if rare is None else set(rare.tolist())
            kept = tuple(str(category) for category in encoder.categories_[0] if category not in rare)
            category_columns.append(CategoryColumn(name, kept, bool(rare)))
        return cls(tuple(number_columns), tuple(category_columns), tuple(missing))

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns that a table needs."""
        return (*(column.name for column in self.numbers), *(column.name for column in self.categories))

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the features, in the order of :meth:`encode`."""
        names = [column.name for column in self.numbers]
        names += [f"{column.name} is missing" for column in self.numbers if column.gaps]
        for column in self.categories:
            names += [f"{column.name}={category}" for category in column.categories]
            names += [f"{column.name}=(other)"] * column.other
        return tuple(names)

    def encode(self, table: Any) -> Encoded:
        """Encode rows. A row with text in place of a number, or an infinite number, becomes NaN.

        Args:
            table: The columns by name: a mapping to arrays of numbers or objects, or a DataFrame.
        """
        lacking = [name for name in self.columns if name not in table]
        if lacking:
            raise ValueError(
                f"The table lacks the columns {lacking}, which the model was fitted on. Add or rename them."
            )
        absent = frozenset(self.missing)
        parts: list[Array] = []
        problems: dict[int, str] = {}
        filled: dict[str, int] = {}
        if self.numbers:
            read = []
            for number in self.numbers:
                values, wrong = parse_numbers(table[number.name], absent)
                note_problems(problems, number.name, table[number.name], wrong)
                read.append(values)
                if not number.gaps and (count := int(np.count_nonzero(np.isnan(values) & ~wrong))):
                    filled[number.name] = count
            # Arithmetic on all columns at once: tables may have hundreds.
            values = np.stack(read)
            median, mean, scale = np.array([[c.median, c.mean, c.scale] for c in self.numbers]).T[:, :, None]
            gap = np.isnan(values)
            parts += [(np.where(gap, median, values) - mean) / scale]
            parts += [gap[[column.gaps for column in self.numbers]].astype(np.float64)]
        for column in self.categories:
            place = {category: j for j, category in enumerate(column.categories)}
            places = [place.get(text, len(place)) for text in category_texts(table[column.name], absent).tolist()]
            indicator = np.eye(len(place) + 1)[places]  # the last feature is that of all other categories
            parts.append(indicator.T if column.other else indicator.T[:-1])
        points = np.ascontiguousarray(np.concatenate(parts).T)
        points[list(problems)] = np.nan
        return Encoded(points, problems, filled)

    def to_dict(self) -> dict[str, Any]:
        """Return the encoding as plain values, which JSON holds exactly.

        >>> TableEncoding((NumberColumn("a", 1.0, 2.0, 0.5, False),), ()).to_dict()["numbers"]
        [{'name': 'a', 'median': 1.0, 'mean': 2.0, 'scale': 0.5, 'gaps': False}]
        """
        return {
            "numbers": [column._asdict() for column in self.numbers],
            "categories": [{**column._asdict(), "categories": list(column.categories)} for column in self.categories],
            "missing": list(self.missing),
        }

    @classmethod
    def from_dict(cls, described: Any) -> TableEncoding:
        """Return the encoding that :meth:`to_dict` described; raise ValueError for anything else."""
        try:
            numbers = tuple(NumberColumn(**column) for column in described["numbers"])
            categories = tuple(CategoryColumn(**column) for column in described["categories"])
            missing = tuple(described["missing"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"the encoding of the table is not complete ({error})") from error
        categories = tuple(column._replace(categories=tuple(column.categories)) for column in categories)
        texts = [*missing, *(column.name for column in numbers)]
        texts += [text for column in categories for text in (column.name, *column.categories)]
        values = [value for column in numbers for value in (column.median, column.mean, column.scale)]
        flags = [*(column.gaps for column in numbers), *(column.other for column in categories)]
        plain = (
            all(isinstance(text, str) for text in texts)
            and all(isinstance(value, float) and math.isfinite(value) for value in values)
            and all(isinstance(flag, bool) for flag in flags)
            and all(column.scale > 0 for column in numbers)
        )
        if not plain or not (numbers or categories):
            raise ValueError("the encoding of the table holds values of the wrong type")
        return cls(numbers, categories, missing)


def parse_numbers(
    cells: Any, missing: frozenset[str] = frozenset(MISSING)
) -> tuple[Float[Array, "n"], Bool[Array, "n"]]:
    """Convert cells to float64, NaN where missing; also return which cells are neither numbers nor missing.

    >>> parse_numbers(np.array(["1.5", "", "wide", None], dtype=object))
    (array([1.5, nan, nan, nan]), array([False, False,  True, False]))
    """
    array = np.asarray(cells)
    if array.dtype.kind in "fiub":
        values = array.astype(np.float64)
    else:
        # Text is compared with the few missing markers by a set, which is faster than by arrays.
        plain = [None if _is_absent(cell, missing) else cell for cell in array.tolist()]
        try:
            values = np.array([math.nan if cell is None else float(cell) for cell in plain], dtype=np.float64)
        except (ValueError, TypeError, OverflowError):
            values = np.array([_number(cell) for cell in plain], dtype=np.float64)
    wrong = np.isinf(values)
    return np.where(wrong, np.nan, values), wrong


def category_texts(cells: Any, missing: frozenset[str] = frozenset(MISSING)) -> Array:
    """Convert cells to texts, whole numbers without a fraction, missing values to ``(missing)``.

    >>> category_texts([3.0, "cat", None, "NA"]).tolist()
    ['3', 'cat', '(missing)', '(missing)']
    """
    found = np.empty(len(cells), dtype=object)
    texts: dict[str, str] = {}  # columns repeat few texts: each is examined once
    for i, cell in enumerate(cells.tolist() if hasattr(cells, "tolist") else cells):
        if type(cell) is not str:
            found[i] = _category_text(cell, missing)
        elif cell in texts:
            found[i] = texts[cell]
        else:
            found[i] = texts[cell] = _category_text(cell, missing)
    return found


def _category_text(cell: Any, missing: frozenset[str]) -> str:
    if _is_absent(cell, missing):
        return ABSENT
    return str(int(cell)) if isinstance(cell, float) and cell.is_integer() else str(cell)


def note_problems(problems: dict[int, str], name: str, cells: Any, wrong: Bool[Array, "n"]) -> None:
    """Add a sentence for each wrong cell of a column, unless the row has a problem already."""
    for row in np.flatnonzero(wrong).tolist():
        shown = repr(cells.iloc[row] if hasattr(cells, "iloc") else cells[row])
        # 40 characters show a cell that is no number, and keep a row readable.
        problems.setdefault(row, f"{name}: {shown if len(shown) <= 40 else shown[:37] + '...'} is not a finite number")


def _is_absent(cell: Any, missing: frozenset[str]) -> bool:
    if isinstance(cell, str):
        return cell.strip() in missing
    if isinstance(cell, float):
        return math.isnan(cell)
    return cell is None or type(cell).__name__ in ("NAType", "NaTType")  # of pandas, which need not be installed


def _number(cell: Any) -> float:
    """A cell as a number: NaN if missing, infinity if it is no number."""
    if cell is None:
        return math.nan
    try:
        return float(cell)
    except (ValueError, TypeError, OverflowError):
        return math.inf


def _numbers_or_error(table: Any, name: str, missing: frozenset[str]) -> Float[Array, "n"]:
    values, wrong = parse_numbers(table[name], missing)
    if wrong.any() or np.isnan(values).all():
        raise ValueError(
            f"Column {name!r} is no column of numbers: {int(wrong.sum())} of its cells are no finite number, or all "
            "are missing. Make the column categorical, or leave it out."
        )
    return values

"""Encoding of tables as numbers: standardised numbers, indicators of missing values, and one column per category.

:meth:`TableEncoding.fit` lets scikit-learn's transformers compute the numbers and categories. The encoding keeps only
these, as plain values that a JSON file holds, and applies them with NumPy.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from sepc_torch.shapes import Array, Bool, Float, Int

# Texts that stand for a missing value, as pandas reads them.
MISSING = ("", "#N/A", "N/A", "NA", "NULL", "NaN", "None", "n/a", "nan", "null", "<NA>")
# A category of fewer training rows shares the column "other" with the other rare ones: too few rows to learn from.
_LEAST_ROWS = 5
# Largest number of columns of one categorical column, with "other": more would outweigh the other columns.
_MOST_CATEGORIES = 32
# Stands for a missing value among the categories.
ABSENT = "(missing)"
# The mark before the fraction of a number that is written with currency, spaces or thousands; "" for a plain number.
Decimal = Literal["", ".", ","]
# The order of year, month and day in a date.
DateOrder = Literal["ymd", "mdy", "dmy"]
# The numbers that a date becomes. The age is in days before the latest date of the training rows.
DATE_PARTS = ("year", "month", "weekday", "age")
# Signs around a number in a cell, such as a currency.
_SIGNS = re.compile(r"[\s$€£¥%]|EUR|USD|GBP|CHF")
_GROUPED = {
    ".": re.compile(r"[+-]?(\d{1,3}(,\d{3})+|\d+)?(\.\d*)?"),
    ",": re.compile(r"[+-]?(\d{1,3}(\.\d{3})+|\d+)?(,\d*)?"),
}
_DATE = re.compile(r"(\d{1,4})([-/.])(\d{1,2})\2(\d{1,4})(?:[T ].*)?", re.DOTALL)
# Years of two digits up to this one are of this century, as in POSIX.
_CENTURY = 68


class NumberColumn(NamedTuple):
    """A column of numbers: a missing value becomes ``median``, then ``(value - mean) / scale``.

    ``gaps`` says whether values were missing in training; a further feature then indicates a missing value.
    ``decimal`` is the decimal mark of cells such as ``"$1,200.50"``; empty for plain numbers.
    """

    name: str
    median: float
    mean: float
    scale: float
    gaps: bool
    decimal: Decimal = ""

    def original(self, value: float) -> float:
        """An encoded value in the units of the column.

        >>> NumberColumn("age", median=40.0, mean=40.0, scale=10.0, gaps=False).original(1.5)
        55.0
        """
        return value * self.scale + self.mean


class CategoryColumn(NamedTuple):
    """A column of categories: a feature 0 or 1 for each of ``categories``, and one for rare ones if ``other``.

    ``rare`` are hashes of the rare categories of training, by which a new category is told from a rare one.
    """

    name: str
    categories: tuple[str, ...]
    other: bool
    rare: tuple[str, ...] = ()


class DateColumn(NamedTuple):
    """A column of dates, from which columns of numbers are made: ``"name (year)"`` and so on, one for each part.

    ``last`` is the latest date in training, in days since 1970: ages count from it.
    """

    name: str
    order: DateOrder
    parts: tuple[str, ...]
    last: float

    def numbers(self, cells: Any, missing: frozenset[str]) -> tuple[dict[str, Float[Array, "n"]], Bool[Array, "n"]]:
        """The parts of dates as columns, NaN where missing; also which cells are no dates.

        >>> column = DateColumn("day", "dmy", ("month", "weekday", "age"), last=19725.0)
        >>> column.numbers(["03.01.2024", ""], frozenset([""]))
        ({'day (month)': array([ 1., nan]), 'day (weekday)': array([ 2., nan]), 'day (age)': array([ 0., nan])},
         array([False, False]))
        """
        days, wrong = parse_dates(cells, self.order, missing)
        return {part_name(self.name, part): _date_part(days, part, self.last) for part in self.parts}, wrong


class EncodedArray(np.ndarray[Any, np.dtype[np.floating[Any]]]):
    """An array of features that an encoding made; a head with an encoding takes no other arrays.

    A plain array does not say whether its numbers are encoded.
    """

    __array_priority__ = 1.0  # above that of plain arrays, so that np.concatenate keeps the class


class Encoded(NamedTuple):
    """Encoded rows of a table.

    Attributes:
        points: The features; NaN in rows that cannot be encoded.
        problems: What is wrong with these rows.
        filled: Number of missing values in columns of numbers that had none in training, by column.
        new: Categories that training did not have, with their numbers of rows, by column.
    """

    points: Float[Array, "n F"]
    problems: dict[int, str]
    filled: dict[str, int]
    new: dict[str, Counter[str]]


@dataclass(frozen=True)
class TableEncoding:
    """Map from the columns of a table to features: numbers first, then missing-value indicators, then categories.

    Attributes:
        numbers: The columns of numbers.
        categories: The categorical columns. A category that is unknown counts as rare; without rare categories in
            training, all features of its column are 0.
        missing: Texts that stand for a missing value.
        dates: The columns of dates; the numbers made from them are among ``numbers``.

    >>> table = {"age": np.array([30.0, np.nan, 50.0]), "pet": np.array(["cat", "dog", "cat"], dtype=object)}
    >>> encoding = TableEncoding.fit(table, ["age"], ["pet"], least_rows=1)
    >>> encoding.feature_names
    ('age', 'age is missing', 'pet=cat', 'pet=dog')
    >>> encoding.encode({"age": np.array([40.0]), "pet": np.array(["cow"], dtype=object)}).points
    EncodedArray([[0., 0., 0., 0.]])
    """

    numbers: tuple[NumberColumn, ...]
    categories: tuple[CategoryColumn, ...]
    missing: tuple[str, ...] = MISSING
    dates: tuple[DateColumn, ...] = ()

    @classmethod
    def fit(
        cls,
        table: Any,
        numbers: Sequence[str],
        categories: Sequence[str],
        missing: Sequence[str] = MISSING,
        *,
        dates: Mapping[str, DateOrder] | None = None,
        decimals: Mapping[str, Decimal] | None = None,
        least_rows: int = _LEAST_ROWS,
        most_categories: int = _MOST_CATEGORIES,
    ) -> TableEncoding:
        """Fit the encoding to the training rows with scikit-learn.

        Args:
            table: The columns by name: a mapping to arrays, or a DataFrame.
            numbers: Names of the columns of numbers; each needs at least one value.
            categories: Names of the categorical columns.
            missing: Texts that stand for a missing value.
            dates: The columns of dates, with the order of year, month and day in their texts.
            decimals: The decimal mark of columns of numbers with currency, spaces or thousands.
            least_rows: Least number of rows of a category with a feature of its own.
            most_categories: Largest number of features of a categorical column.
        """
        from sklearn.impute import MissingIndicator, SimpleImputer
        from sklearn.preprocessing import OneHotEncoder, StandardScaler

        absent, decimals = frozenset(missing), decimals or {}
        number_columns: list[NumberColumn] = []
        read = {name: _numbers_or_error(table, name, absent, decimals.get(name, "")) for name in numbers}
        date_columns = [_fitted_dates(name, order, table[name], absent) for name, order in (dates or {}).items()]
        for column in date_columns:
            read |= column.numbers(table[column.name], absent)[0]
        if len(read) != len(numbers) + sum(len(column.parts) for column in date_columns):
            raise ValueError("A column has the name of a part of a date, such as 'day (year)'; rename the column.")
        if read:
            numbers, values = list(read), np.stack(list(read.values()), axis=1)
            imputer = SimpleImputer(strategy="median").fit(values)
            scaler = StandardScaler().fit(imputer.transform(values))
            gaps = set(MissingIndicator(features="missing-only").fit(values).features_.tolist())
            fitted = zip(numbers, imputer.statistics_, scaler.mean_, scaler.scale_, strict=True)
            number_columns = [
                NumberColumn(name, float(median), float(mean), float(scale), j in gaps, decimals.get(name, ""))
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
            hashes = tuple(sorted(map(_text_hash, rare)))
            category_columns.append(CategoryColumn(name, kept, bool(rare), hashes))
        return cls(tuple(number_columns), tuple(category_columns), tuple(missing), tuple(date_columns))

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns that a table needs."""
        made = {part_name(column.name, part) for column in self.dates for part in column.parts}
        plain = (column.name for column in self.numbers if column.name not in made)
        return (*plain, *(column.name for column in self.dates), *(column.name for column in self.categories))

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
        new: dict[str, Counter[str]] = {}
        made: dict[str, Array] = {}
        for date in self.dates:
            found, wrong = date.numbers(table[date.name], absent)
            note_problems(problems, date.name, table[date.name], wrong, "no date")
            made |= found
        if self.numbers:
            read = []
            for number in self.numbers:
                if number.name in made:
                    values, wrong = made[number.name], np.zeros(len(made[number.name]), dtype=bool)
                else:
                    values, wrong = parse_numbers(table[number.name], absent, number.decimal)
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
            texts = category_texts(table[column.name], absent).tolist()
            places = [place.get(text, len(place)) for text in texts]
            if strange := Counter(text for text in texts if text not in place):
                known = frozenset(column.rare)
                strange = Counter({text: rows for text, rows in strange.items() if _text_hash(text) not in known})
                new |= {column.name: strange} if strange else {}
            indicator = np.zeros((len(place) + 1, len(texts)))  # the last feature is that of all other categories
            indicator[places, np.arange(len(texts))] = 1.0
            parts.append(indicator if column.other else indicator[:-1])
        points = np.ascontiguousarray(np.concatenate(parts).T)
        points[list(problems)] = np.nan
        return Encoded(points.view(EncodedArray), problems, filled, new)

    def columns_of(self, features: Float[Array, "B F"]) -> Float[Array, "B _"]:
        """One value for each column from encoded rows, as classifiers with native categories and gaps take them.

        The columns of categories come first, each as the number of its category, then those of numbers, standardised.
        NaN stands for a gap and for a category that has no feature.

        >>> number, kind = NumberColumn("a", 0.0, 0.0, 1.0, True), CategoryColumn("b", ("x", "y"), False)
        >>> encoding = TableEncoding((number,), (kind,))
        >>> encoding.columns_of(encoding.encode({"a": [2.0, None], "b": ["y", "z"]}).points)
        array([[ 1.,  2.],
               [nan, nan]])
        """
        features = np.asarray(features)
        values = features[:, : len(self.numbers)].astype(np.float64)
        gaps = [j for j, column in enumerate(self.numbers) if column.gaps]
        start = len(self.numbers) + len(gaps)
        for k, j in enumerate(gaps):
            values[features[:, len(self.numbers) + k] > 0, j] = np.nan
        codes = np.full((len(features), len(self.categories)), np.nan)
        for j, width in enumerate(self.widths):
            group = features[:, start : start + width]
            rows = group.max(axis=1, initial=0.0) > 0
            codes[rows, j] = group[rows].argmax(axis=1)
            start += width
        return np.concatenate([codes, values], axis=1)

    @property
    def widths(self) -> tuple[int, ...]:
        """Number of features of each column of categories."""
        return tuple(len(column.categories) + column.other for column in self.categories)

    def home(self, feature: int) -> str:
        """Name of the column of the table that a feature was made from; a date for its parts.

        >>> dates = (DateColumn("day", "ymd", ("year",), 0.0),)
        >>> encoding = TableEncoding((NumberColumn("day (year)", 0.0, 0.0, 1.0, True),), (), (), dates)
        >>> [encoding.home(j) for j in range(2)]
        ['day', 'day']
        """
        names = [column.name for column in self.numbers]
        names += [column.name for column in self.numbers if column.gaps]
        for column, width in zip(self.categories, self.widths, strict=True):
            names += [column.name] * width
        made = {part_name(date.name, part): date.name for date in self.dates for part in date.parts}
        return made.get(names[feature], names[feature])

    def to_dict(self) -> dict[str, Any]:
        """Return the encoding as plain values, which JSON holds exactly.

        >>> TableEncoding((NumberColumn("a", 1.0, 2.0, 0.5, False),), ()).to_dict()["numbers"]
        [{'name': 'a', 'median': 1.0, 'mean': 2.0, 'scale': 0.5, 'gaps': False, 'decimal': ''}]
        """
        described: dict[str, Any] = {
            "numbers": [column._asdict() for column in self.numbers],
            "categories": [
                {**column._asdict(), "categories": list(column.categories), "rare": list(column.rare)}
                for column in self.categories
            ],
            "missing": list(self.missing),
        }
        dates = [{**column._asdict(), "parts": list(column.parts)} for column in self.dates]
        return described | ({"dates": dates} if dates else {})

    @classmethod
    def from_dict(cls, described: Any) -> TableEncoding:
        """Return the encoding that :meth:`to_dict` described; raise ValueError for anything else."""
        try:
            numbers = tuple(NumberColumn(**column) for column in described["numbers"])
            categories = tuple(CategoryColumn(**column) for column in described["categories"])
            missing = tuple(described["missing"])
            dates = tuple(DateColumn(**column) for column in described.get("dates", ()))
            categories = tuple(c._replace(categories=tuple(c.categories), rare=tuple(c.rare)) for c in categories)
            dates = tuple(column._replace(parts=tuple(column.parts)) for column in dates)
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"the encoding of the table is not complete ({error})") from error
        texts = [*missing, *(column.name for column in numbers), *(column.name for column in dates)]
        texts += [text for column in categories for text in (column.name, *column.categories, *column.rare)]
        values = [value for column in numbers for value in (column.median, column.mean, column.scale)]
        values += [column.last for column in dates]
        flags = [*(column.gaps for column in numbers), *(column.other for column in categories)]
        plain = (
            all(isinstance(text, str) for text in texts)
            and all(isinstance(value, float) and math.isfinite(value) for value in values)
            and all(isinstance(flag, bool) for flag in flags)
            and all(column.scale > 0 for column in numbers)
            and all(column.decimal in get_args(Decimal) for column in numbers)
            and all(column.order in get_args(DateOrder) for column in dates)
            and all(set(column.parts) <= set(DATE_PARTS) for column in dates)
            and {part_name(c.name, part) for c in dates for part in c.parts} <= {column.name for column in numbers}
        )
        if not plain or not (numbers or categories):
            raise ValueError("the encoding of the table holds values of the wrong type")
        return cls(numbers, categories, missing, dates)


def parse_numbers(
    cells: Any, missing: frozenset[str] = frozenset(MISSING), decimal: Decimal = ""
) -> tuple[Float[Array, "n"], Bool[Array, "n"]]:
    """Convert cells to float64, NaN where missing; also return which cells are neither numbers nor missing.

    >>> parse_numbers(np.array(["1.5", "", "wide", None], dtype=object))
    (array([1.5, nan, nan, nan]), array([False, False,  True, False]))
    >>> parse_numbers(np.array(["$1,200.50", "1 200"], dtype=object), decimal=".")[0]
    array([1200.5, 1200. ])
    """
    array = np.asarray(cells)
    if array.dtype.kind in "fiub":
        values = array.astype(np.float64)
    else:
        # Text is compared with the few missing markers by a set, which is faster than by arrays.
        plain = [None if _is_absent(cell, missing) else cell for cell in array.tolist()]
        if decimal:
            plain = [plain_number(cell, decimal) if isinstance(cell, str) else cell for cell in plain]
        try:
            values = np.array([math.nan if cell is None else float(cell) for cell in plain], dtype=np.float64)
        except (ValueError, TypeError, OverflowError):
            values = np.array([_number(cell) for cell in plain], dtype=np.float64)
    wrong = np.isinf(values)
    return np.where(wrong, np.nan, values), wrong


def plain_number(text: str, decimal: Decimal) -> str:
    """A number with currency, spaces or thousands as a plain one; other texts are returned as they are.

    >>> plain_number("1.234,5 €", ","), plain_number(" $84,835.00", "."), plain_number("(12)", ".")
    ('1234.5', '84835.00', '-12')
    >>> plain_number("1,2", ".")
    '1,2'
    """
    short = _SIGNS.sub("", text)
    if short.startswith("(") and short.endswith(")"):  # a debit
        short = f"-{short[1:-1]}"
    if not _GROUPED[decimal].fullmatch(short) or not any(map(str.isdigit, short)):
        return text
    return short.replace("," if decimal == "." else ".", "").replace(",", ".")


def parse_dates(
    cells: Any, order: DateOrder, missing: frozenset[str] = frozenset(MISSING)
) -> tuple[Float[Array, "n"], Bool[Array, "n"]]:
    """Convert dates to days since 1970, NaN where missing; also return which cells are neither dates nor missing.

    Args:
        cells: Texts such as 2024-01-31 and 31.1.24, also before a time of day, or dates of Python, NumPy or pandas.
        order: The order of year, month and day in texts; a first number of four digits is a year in any case.
        missing: Texts that stand for a missing value.

    >>> parse_dates(["1970-01-03", "2/1/1970", "", "late"], "dmy")
    (array([ 2.,  1., nan, nan]), array([False, False, False,  True]))
    """
    array = np.asarray(cells)
    if array.dtype.kind == "M":
        days = array.astype("datetime64[D]")
        return np.where(np.isnat(days), np.nan, days.astype(np.int64)), np.zeros(len(days), dtype=bool)
    known: dict[Any, float] = {}
    for cell in {*array.tolist()}:
        known[cell] = math.nan if _is_absent(cell, missing) else _days(cell, order)
    values = np.array([known[cell] for cell in array.tolist()], dtype=np.float64)
    wrong = np.isinf(values)
    return np.where(wrong, np.nan, values), wrong


def _days(cell: Any, order: DateOrder) -> float:
    """A date in days since 1970; infinity if the cell is no date."""
    if isinstance(cell, str):
        found = _DATE.fullmatch(cell.strip())
        if found is None:
            return math.inf
        parts = found[1], found[3], found[4]
        if len(parts[0]) > 2:
            order = "ymd"
        by_name = dict(zip(order, parts, strict=True))
        if len(by_name["m"]) > 2 or len(by_name["d"]) > 2:
            return math.inf
        year = int(by_name["y"])
        if len(by_name["y"]) <= 2:
            year += 2000 if year <= _CENTURY else 1900
        cell = f"{year:04}-{int(by_name['m']):02}-{int(by_name['d']):02}"
    try:
        return float(np.datetime64(cell, "D").astype(np.int64))
    except (ValueError, TypeError):
        return math.inf


def part_name(column: str, part: str) -> str:
    """Name of the column of numbers that is made from a part of a date."""
    return f"{column} ({part})"


def _date_part(days: Float[Array, "n"], part: str, last: float) -> Float[Array, "n"]:
    """The year, the month, the weekday (0 is Monday) or the age of days since 1970; NaN where missing."""
    absent = np.isnan(days)
    whole = np.where(absent, 0.0, days).astype(np.int64)
    dates = whole.astype("datetime64[D]")
    months = dates.astype("datetime64[M]").astype(np.int64)
    match part:
        case "year":
            found = 1970 + months // 12
        case "month":
            found = 1 + months % 12
        case "weekday":
            found = (whole + 3) % 7  # 1970 began on a Thursday
        case _:
            return last - days
    return np.where(absent, np.nan, found)


def _fitted_dates(name: str, order: DateOrder, cells: Any, missing: frozenset[str]) -> DateColumn:
    """A column of dates with the parts that vary, one of them at least."""
    days, wrong = parse_dates(cells, order, missing)
    if wrong.any() or np.isnan(days).all():
        raise ValueError(
            f"Column {name!r} is no column of dates: {int(wrong.sum())} of its cells are no dates, or all are missing. "
            "Make the column categorical, or leave it out."
        )
    last = float(np.nanmax(days))
    parts = tuple(part for part in DATE_PARTS if len(np.unique(_date_part(days[~np.isnan(days)], part, last))) > 1)
    return DateColumn(name, order, parts or DATE_PARTS[:1], last)


def _text_hash(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=4).hexdigest()


def row_hashes(features: Float[Array, "B F"]) -> Int[Array, "B"]:
    """A number for each row, which is equal for equal rows and for other rows with a probability of about 2**-63.

    >>> found = row_hashes(np.array([[1.0, 2.0], [2.0, 1.0], [1.0, 2.0]]))
    >>> bool(found[0] == found[2]), bool(found[0] == found[1])
    (True, False)
    """
    bits = (np.asarray(features, dtype=np.float32) + np.float32(0.0)).view(np.uint32)  # no negative zero
    found = np.zeros(len(bits), dtype=np.uint64)
    for column in bits.T:  # the mixing function of SplitMix64
        found = (found ^ column) + np.uint64(0x9E3779B97F4A7C15)
        found = (found ^ (found >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        found = (found ^ (found >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        found ^= found >> np.uint64(31)
    return found.view(np.int64)


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


def note_problems(
    problems: dict[int, str], name: str, cells: Any, wrong: Bool[Array, "n"], what: str = "not a finite number"
) -> None:
    """Add a sentence for each wrong cell of a column, unless the row has a problem already."""
    for row in np.flatnonzero(wrong).tolist():
        shown = repr(cells.iloc[row] if hasattr(cells, "iloc") else cells[row])
        # 40 characters show a cell that is no number, and keep a row readable.
        problems.setdefault(row, f"{name}: {shown if len(shown) <= 40 else shown[:37] + '...'} is {what}")


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


def _numbers_or_error(table: Any, name: str, missing: frozenset[str], decimal: Decimal) -> Float[Array, "n"]:
    values, wrong = parse_numbers(table[name], missing, decimal)
    if wrong.any() or np.isnan(values).all():
        raise ValueError(
            f"Column {name!r} is no column of numbers: {int(wrong.sum())} of its cells are no finite number, or all "
            "are missing. Make the column categorical, or leave it out."
        )
    return values

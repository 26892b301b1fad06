"""Validation of training data: every invalid input raises a clear error before any computation starts."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import torch

from sepc_torch import TrustHead, landscape, partition
from sepc_torch.data import arrays
from sepc_torch.data.arrays import numeric_points
from sepc_torch.data.labels import ordered_classes, training_set
from sepc_torch.data.options import check_choice
from sepc_torch.partitioning.algorithm import Separator

ROOT = Path(__file__).resolve().parent.parent
X = np.array([[0.0, 1.0], [1.0, 0.0], [1.0, 1.0], [5.0, 5.0], [6.0, 5.0], [5.0, 6.0]])
Y = ["a", "a", "a", "b", "b", "b"]


@pytest.fixture(autouse=True)
def _no_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test if the partition algorithm starts."""

    def start(*_: object) -> NoReturn:
        pytest.fail("the computation started before the input was validated")

    monkeypatch.setattr(Separator, "separate", start)


def with_value(value: float) -> Any:
    x = X.copy()
    x[4, 1] = value
    return x


BAD_POINTS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "NaN": (lambda: with_value(np.nan), ValueError, "1 NaN or infinite values, the first in row 4, column 1.*Drop"),
    "infinity": (lambda: with_value(-np.inf), ValueError, "1 NaN or infinite values, the first in row 4, column 1"),
    "NaN in a frame": (
        lambda: pd.DataFrame(with_value(np.nan), columns=["length", "width"]),
        ValueError,
        "first in row 4, column 'width'",
    ),
    "missing value in a frame": (
        lambda: pd.DataFrame({"a": pd.array([1, 2, 3, None, 5, 6], dtype="Int64"), "b": range(6)}),
        ValueError,
        "row 3, column 'a'",
    ),
    "one dimension": (lambda: X[:, 0], ValueError, r"shape \(points, features\), got shape \(6,\)"),
    "three dimensions": (lambda: X[None], ValueError, r"shape \(points, features\), got shape \(1, 6, 2\)"),
    "no rows": (lambda: X[:0], ValueError, r"non-empty.*\(0, 2\)"),
    "no features": (lambda: X[:, :0], ValueError, r"non-empty.*\(6, 0\)"),
    "too few rows": (lambda: X[:5], ValueError, "5 rows and 6 labels"),
    "text column": (
        lambda: pd.DataFrame({"a": range(6), "town": list("abcdef")}),
        TypeError,
        r"columns that are not numbers: town\. Encode or drop",
    ),
    "date column": (
        lambda: pd.DataFrame({"a": range(6), "day": pd.date_range("2024-01-01", periods=6)}),
        TypeError,
        "not numbers: day",
    ),
    "equal columns": (
        lambda: pd.DataFrame(X[:, [0, 1, 0, 1]], columns=["a", "b", "a", "b"]),
        ValueError,
        "X has more than one column 'a', 'b'; give each column a name of its own",
    ),
    "equal columns as text": (lambda: pd.DataFrame(X, columns=["1", 1]), ValueError, "more than one column '1'"),
    "control characters": (lambda: pd.DataFrame({"a": range(6), "\x1b[2J": list(Y)}), TypeError, r": \\x1b\[2J\."),
    "objects": (lambda: X.astype(object), TypeError, r"Python objects.*X\.astype\(float\)"),
    "text": (lambda: X.astype(str), TypeError, "must hold real numbers, got dtype <U"),
    "complex numbers": (lambda: X.astype(complex), TypeError, "must hold real numbers, got dtype complex128"),
    "complex tensor": (lambda: torch.from_numpy(X).to(torch.complex64), TypeError, "must hold real numbers"),
    "sparse matrix": (lambda: scipy.sparse.csr_matrix(X), TypeError, r"sparse.*toarray\(\).*TruncatedSVD"),
    "sparse array": (lambda: scipy.sparse.coo_array(X), TypeError, r"sparse.*toarray\(\)"),
    "sparse tensor": (lambda: torch.from_numpy(X).to_sparse(), TypeError, r"(?i)sparse.*dense"),
    "ragged rows": (lambda: [[1.0, 2.0], [3.0]] * 3, ValueError, "X has rows of different lengths"),
    "meta tensor": (lambda: torch.from_numpy(X).to("meta"), TypeError, "on the meta device, which holds no numbers"),
    "generator": (lambda: (row for row in X), TypeError, "X must be an array, .* or a list of rows, got generator"),
    "None": (lambda: None, TypeError, "list of rows, got NoneType"),
    "too many features": (
        lambda: np.arange(60.0).reshape(6, 10) ** 2,
        ValueError,
        r"3 points in 10 features; .* at least 10 points.*fewer dimensions",
    ),
}


@pytest.mark.parametrize("case", BAD_POINTS)
def test_invalid_points_are_refused(case: str) -> None:
    make, error, message = BAD_POINTS[case]
    for use in (partition, landscape):
        with pytest.raises(error, match=message):
            use(make(), Y)


BAD_LABELS: dict[str, tuple[Any, type[Exception], str]] = {
    "one class": (["a"] * 6, ValueError, "single class 'a'; a partition separates at least two classes"),
    "too few": (Y[:5], ValueError, "6 rows and 5 labels"),
    "none": ([], ValueError, "y is empty"),
    "a scalar": (1, ValueError, r"one-dimensional.*shape \(\)"),
    "one-hot": (np.eye(2)[[0, 0, 0, 1, 1, 1]], ValueError, r"one-dimensional.*shape \(6, 2\)"),
    "None": ([*Y[:5], None], ValueError, "missing labels.*Drop those rows"),
    "NaN among numbers": ([0.0, 0.0, 0.0, 1.0, 1.0, np.nan], ValueError, "missing labels.*Drop those rows"),
    "NaN among text": ([*Y[:5], np.nan], ValueError, "missing labels.*Drop those rows"),
    "missing in a Series": (pd.Series([*Y[:5], None]), ValueError, "missing labels.*Drop those rows"),
    "NA in a Series": (pd.Series([*Y[:5], pd.NA], dtype=object), ValueError, "missing labels.*Drop those rows"),
    "text and numbers": ([1, 1, 1, "b", "b", "b"], TypeError, "mixes labels of the types int, str"),
    "text and numbers as objects": (
        np.array([1, 1, 1, "b", "b", "b"], dtype=object),
        TypeError,
        "mixes labels of the types int, str",
    ),
    "long text": ([*Y[:5], "z" * 251], ValueError, "a label of 251 characters, 'zzzzzzzzzzzzzzzzzzzz'.*at most 250"),
    "long text as objects": (pd.Series([*Y[:5], "z" * 251]), ValueError, "a label of 251 characters"),
    "NUL at the end": ([*Y[:3], "a\0", "a\0", "a\0"], ValueError, "ends in NUL; rename it"),
    "dates": (np.array(["2024-01-01", "2024-01-02"] * 3, dtype="M8[D]"), TypeError, "numbers, strings or booleans"),
    "bytes": (np.array([b"a", b"b"] * 3), TypeError, "numbers, strings or booleans"),
    "meta tensor": (
        torch.empty(6, device="meta"),
        TypeError,
        "y is a tensor on the meta device, which holds no labels",
    ),
}


@pytest.mark.parametrize("case", BAD_LABELS)
def test_invalid_labels_are_refused(case: str) -> None:
    labels, error, message = BAD_LABELS[case]
    with pytest.raises(error, match=message):
        partition(X, labels)


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        (
            ["a", "b", "c"],
            r"classes names \['c'\], but no row has these labels; name only labels that occur: \['a', 'b'\]",
        ),
        (["a"], r"The labels \['b'\] occur, which classes=\['a'\] does not name"),
        (["a", "b", "a"], r"classes names a label twice: .* Name each label once"),
        ([0, 1], r"classes names \[0, 1\], but no row has these labels"),
        ([], "classes is empty"),
    ],
)
def test_classes_that_do_not_match_the_labels_are_refused(classes: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        partition(X, Y, classes=classes)


def test_many_classes_are_ordered_in_linear_time() -> None:
    """A search through a list for every one of 10^5 labels would take minutes."""
    labels = np.arange(10**5)
    start = time.process_time()
    classes, codes = ordered_classes(labels, labels[::-1])
    assert time.process_time() - start < 1.0
    assert (classes == labels[::-1]).all()
    assert (codes == labels[::-1]).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_labels_may_have_any_floating_dtype(dtype: torch.dtype) -> None:
    codes = [0, 0, 0, 1, 1, 1]
    assert training_set(X, torch.tensor(codes, dtype=dtype)).codes.tolist() == codes


def test_text_of_numpy_and_of_python_mix() -> None:
    assert training_set(X, [*Y[:3], *map(np.str_, Y[3:])]).codes.tolist() == training_set(X, Y).codes.tolist()


@pytest.mark.parametrize("fit", [partition, TrustHead.fit])
def test_zero_processes_are_refused(fit: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="n_jobs must not be 0: pass a number of processes, -1 for one per processor"):
        fit(X, Y, n_jobs=0)


def test_valid_input_starts_the_computation() -> None:
    """The guard of these tests is effective."""
    with pytest.raises(pytest.fail.Exception, match="the computation started"):
        partition(X, Y)


def test_a_class_of_one_point_is_accepted() -> None:
    """A set is refused only if no class has as many points as there are features."""
    data = training_set(np.concatenate([X, [[9.0, 9.0]]]), [*"aaaaaa", "b"])
    assert np.bincount(data.codes).tolist() == [6, 1]


def read_only(x: Any) -> Any:
    x = x.copy()
    x.flags.writeable = False
    return x


def test_points_are_copied_only_if_they_must_change() -> None:
    for same in (X, read_only(X), X[1:4], torch.from_numpy(X)):
        assert np.shares_memory(numeric_points(same)[0], np.asarray(same))
    for other in (X.astype(np.float32), np.asfortranarray(X), X[:, ::-1], X[:1, ::-1], X[::-1][:1]):
        points = numeric_points(other)[0]
        assert (points == other).all()
        assert points.flags.c_contiguous
        assert points.dtype == np.float64
        assert min(points.strides) > 0


def test_checking_points_needs_little_memory() -> None:
    x = np.zeros((2**14, 2**9))  # 64 MiB
    tracemalloc.start()
    try:
        numeric_points(x)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2**23  # a mask of all values would be 8 MiB


@pytest.mark.parametrize("rows", [1, 2, 4, 100])
def test_bad_values_are_counted_over_all_chunks(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "_CHUNK_VALUES", 2 * rows)
    x = X.copy()
    x[2, 1], x[3, 0], x[5] = np.inf, np.nan, -np.inf
    with pytest.raises(ValueError, match="Z holds 4 NaN or infinite values, the first in row 2, column 1"):
        numeric_points(x, "Z")


# These cases run in a separate process without the type checks of the tests, which would refuse most of them before our
# own validation. All cases share one interpreter.
BAD_ARGUMENTS = {
    "max_impure=-1": ("ValueError", "max_impure must be an integer of at least 0, got -1"),
    "max_impure=2.0": ("TypeError", "max_impure must be an integer, got 2.0"),
    "max_impure=True": ("ValueError", "max_impure must be an integer of at least 0, got True"),
    "max_impure='2'": ("TypeError", "max_impure must be an integer, got '2'"),
    "rest='half'": ("ValueError", "rest must be one of 'whole', 'partitioned', got 'half'"),
    "max_isolated=-1": ("ValueError", "max_isolated must be an integer of at least 0, got -1"),
    "max_per_class=0": ("ValueError", "max_per_class must be an integer of at least 1, got 0"),
    "max_impure=None": ("TypeError", "max_impure must be an integer, got None"),
    "floor=0": ("ValueError", "floor must be a positive number of standard deviations, got 0"),
    "floor=-1e-3": ("ValueError", "floor must be a positive number of standard deviations, got -0.001"),
    "floor=float('nan')": ("ValueError", "floor must be a positive number of standard deviations, got nan"),
    "floor=float('inf')": ("ValueError", "floor must be a positive number of standard deviations, got inf"),
    "floor='thin'": ("TypeError", "floor must be a positive number of standard deviations, got 'thin'"),
    "floor=None": ("TypeError", "floor must be a positive number of standard deviations, got None"),
    "solver='clarabel!'": ("ValueError", "solver"),
    "solver=None": ("ValueError", "solver"),
    "progress='yes'": ("ValueError", "progress must be 'auto', True or False, got 'yes'"),
    "progress=None": ("ValueError", "progress must be 'auto', True or False, got None"),
    "progress=2": ("ValueError", "progress must be 'auto', True or False, got 2"),
}
GOOD_ARGUMENTS = ["max_impure=np.int64(2)", "max_impure=0", "floor=1", "floor=np.float32(0.01)", "progress=False"]

SCRIPT = f"""
import json
import numpy as np
from sepc_torch import partition
from sepc_torch.partitioning.algorithm import Separator
class Started(Exception): pass
def start(*_): raise Started("the computation started")
Separator.separate = start
X, Y = np.array({X.tolist()}), {Y}
def outcome(arguments):
    try:
        eval(f"partition(X, Y, {{arguments}})")
    except Exception as error:
        return type(error).__name__, str(error)
print(json.dumps({{case: outcome(case) for case in {[*BAD_ARGUMENTS, *GOOD_ARGUMENTS]}}}))
"""


@pytest.fixture(scope="module")
def outcomes() -> dict[str, tuple[str, str]]:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("case", BAD_ARGUMENTS)
def test_invalid_arguments_are_refused(outcomes: dict[str, tuple[str, str]], case: str) -> None:
    kind, message = BAD_ARGUMENTS[case]
    found, text = outcomes[case]
    assert message in text
    assert found == kind


def test_the_error_for_an_unknown_solver_lists_the_known_solvers(outcomes: dict[str, tuple[str, str]]) -> None:
    _, text = outcomes["solver='clarabel!'"]
    assert all(word in text for word in ("clarabel!", "native", "CLARABEL"))


@pytest.mark.parametrize("case", GOOD_ARGUMENTS)
def test_valid_arguments_are_accepted(outcomes: dict[str, tuple[str, str]], case: str) -> None:
    assert outcomes[case][0] == "Started"


def test_the_error_for_an_unknown_choice_lists_the_choices() -> None:
    """Called directly, because the type checks of the tests run before those of a constructor."""
    check_choice("kernel", "auto", ("auto", "torch"))
    with pytest.raises(ValueError, match="kernel must be one of 'auto', 'torch', got 'cuda'"):
        check_choice("kernel", "cuda", ("auto", "torch"))

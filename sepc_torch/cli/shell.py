"""The application of the command line: its commands, one-line errors, notes, and options that several commands share.

Only the module of the command that runs is imported, so that ``sepc --help`` is fast and modules import what they need
at their top.
"""

from __future__ import annotations

import json
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import IO, Annotated, Any, ClassVar, Literal, ParamSpec

from sepc_torch import __version__
from sepc_torch.data.text import printable

try:
    import typer
    from typer.core import TyperCommand, TyperGroup
except ModuleNotFoundError:
    raise SystemExit("sepc: the command line needs more packages: pip install 'sepc_torch[cli]'") from None

# The files that tables of results are written to.
WRITABLE = (".csv", ".csv.gz", ".tsv", ".jsonl", ".parquet")
# Largest number of names that a message lists.
_NAMED = 8
# Largest number of characters of a cell or a name that a message shows.
_SHOWN = 80
# Each command with its module, its function there, and the first sentence of the function's docstring.
_COMMANDS = {
    "fit": ("cli.fitting", "fit", "Fit a model to labelled rows, and calibrate it on a quarter of them."),
    "calibrate": ("cli.fitting", "calibrate", "Calibrate a model on labelled rows that it was not fitted on."),
    "score": ("cli.scoring", "score", "Label new rows, and decide which labels to accept."),
    "explain": ("cli.explaining", "explain", "Explain the decision about a row."),
    "report": ("cli.streams", "report", "Write a trust report: one HTML page, and its numbers in a JSON file beside."),
    "drift": (
        "cli.streams",
        "drift",
        "Tell whether the rows of a file, in their order, still look like the rows that calibrated the model.",
    ),
    "novelties": ("cli.finding", "novelties", "List the rows of a file that are of a new kind, the strangest first."),
    "label-errors": (
        "cli.finding",
        "label_errors",
        "List the rows whose label the other rows contradict, the most suspicious first.",
    ),
    "threshold": (
        "cli.thresholds",
        "threshold",
        "Choose a threshold for the scores of a file, so that a promise about the accepted rows holds.",
    ),
    "compare": (
        "cli.explaining",
        "compare",
        "Compare the scores of a model with other scores on labelled rows that it was not fitted on.",
    ),
    "export": (
        "cli.exporting",
        "export",
        "Write a model as a graph that runs without sepc_torch: ONNX, or a program of torch.export.",
    ),
    "demo": ("demo", "main", "Run the demonstration: every step on data sets that scikit-learn includes."),
}
_PAPER = {
    "fit": ("cli.paper", "fit", "Fit ellipsoids to labelled rows."),
    "score": ("cli.paper", "score", "Label new rows, and compute the trust in each label."),
    "explain": ("cli.paper", "explain", "Explain the label of a row: the rule, the ellipsoids and the features."),
    "overlap": ("cli.paper", "overlap", "Measure how much the classes overlap."),
}


class _LazyGroup(TyperGroup):
    """Group of commands whose modules are imported when a command runs; the help shows their first sentences."""

    table: ClassVar[dict[str, tuple[str, str, str]]]

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        listed = {name: TyperCommand(name, help=summary) for name, (_, _, summary) in self.table.items()}
        self.commands = {**listed, **self.commands}

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The name of the command that runs, the command itself, and its arguments."""
        name, command, rest = super().resolve_command(ctx, args)
        if name not in self.table:
            return name, command, rest
        module, function, _ = self.table[name]
        with _reporting(None):
            run = getattr(import_module(f"sepc_torch.{module}"), function)
        single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        single.command(name)(_with_one_line_errors(run))
        return name, typer.main.get_command(single), rest


class _Commands(_LazyGroup):
    table = _COMMANDS


class _PaperCommands(_LazyGroup):
    table = _PAPER


app = typer.Typer(
    cls=_Commands,
    help="Decide which labels of a table or of a neural network to accept, with a promise about the mistakes.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
_paper = typer.Typer(cls=_PaperCommands, no_args_is_help=True)
app.add_typer(_paper, name="paper", help="The paper's classifier, for tables of numbers: it has no calibration.")

_FORMATS = "CSV, TSV or JSONL (also .gz), Parquet, NPY, or NPZ with X or embeddings, y, logits; - reads standard input."
Data = Annotated[Path, typer.Argument(help=_FORMATS)]
Model = Annotated[Path, typer.Argument(help="Model file written by `sepc fit` or TrustHead.save.")]
Label = Annotated[str | None, typer.Option("--label", "-l", help="Column with the labels; y in an NPZ file.")]
TrueLabel = Annotated[
    str | None, typer.Option("--label", "-l", help="Column with the true labels, to measure the accuracy.")
]
Ignored = Annotated[
    list[str] | None, typer.Option("--drop", "--ignore", help="Column that is not a feature; repeatable.")
]
Categorical = Annotated[
    list[str] | None, typer.Option(help="Column of numbers or text that names categories; repeatable.")
]
Missing = Annotated[list[str] | None, typer.Option(help="Text that stands for a missing value; repeatable.")]
Separator = Annotated[str | None, typer.Option("--sep", help="Character between the fields of a CSV or TSV file.")]
Encoding = Annotated[
    str | None,
    typer.Option(help="Encoding of a text file, such as cp1252. Default: utf-8, or utf-16 or cp1252 where it fits."),
]
Decimal = Annotated[
    str | None,
    typer.Option(help="Decimal mark of numbers in text: a comma or a point. Default: found for each column."),
]
NaValues = Annotated[
    str | None,
    typer.Option(
        "--na-values",
        help="Texts that stand for a missing value or label, separated by commas, in place of the usual ones (NA, NaN, "
        "null and so on); '' leaves only empty cells.",
    ),
]
Trust = Annotated[
    bool,
    typer.Option("--trust", help="Load a model that holds your own estimator. Such a file can run code."),
]
Logits = Annotated[
    str | None,
    typer.Option(help="Columns with a network's logits: their common prefix, or their names separated by commas."),
]
Classes = Annotated[str | None, typer.Option(help="Labels in the order of the logits, separated by commas.")]


def _share(given: str | float) -> float:
    """A share, written as 0.05 or 5%; anything else ends the command with one line."""
    shown = str(given).strip()
    try:
        value = float(shown.removesuffix("%"))
    except ValueError:
        value = math.nan
    share = value / 100.0 if shown.endswith("%") else value
    if 0.0 < share < 1.0:
        return share
    meant = f"Did you mean {value:g}%?" if 1.0 <= share < 100.0 else "Write 0.05 or 5%, for example."
    note(f"a share must lie between 0 and 1, not {shown!r}. {meant}")
    raise typer.Exit(2)


Risk = Annotated[
    float | None,
    typer.Option(
        help="Accept labels so that at most this share of the accepted ones is wrong.", parser=_share, metavar="SHARE"
    ),
]
Delta = Annotated[
    float,
    typer.Option(help="Allowed probability that the promise of --risk fails.", parser=_share, metavar="SHARE"),
]
FlagRate = Annotated[
    float | None,
    typer.Option(
        help="Accept labels so that at most this share of rows like the calibration rows is refused.",
        parser=_share,
        metavar="SHARE",
    ),
]
Target = Annotated[
    Path | None,
    typer.Option(
        help="File with unlabelled rows like those in use now, if the data have shifted; the promise is for such rows."
    ),
]
Shift = Annotated[
    str,
    typer.Option(
        help="What a promise for --target assumes: covariate (labels in a region are as right as before) or label "
        "(labels of a true class are)."
    ),
]
Coverage = Annotated[
    float | None,
    typer.Option(
        help="Also write sets of classes, with | between names, that hold the true class in this share of rows like "
        "the calibration rows.",
        parser=_share,
        metavar="SHARE",
    ),
]
Units = Annotated[
    str | None,
    typer.Option(help="Column that names the unit of each row, such as a patient; the promise is then over units."),
]
By = Annotated[
    str | None,
    typer.Option(
        help="Keep the promise of --risk in every group, not only over all rows: predicted (labels), class (true "
        "labels) or region."
    ),
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of every random choice of rows.")]
_SAMPLE = "Use a random sample of at most this many rows of the file."
MaxRows = Annotated[int, typer.Option(min=100, help=_SAMPLE)]
MaxTableRows = Annotated[int | None, typer.Option(min=100, help=f"{_SAMPLE} Default: 524288, fewer above 64 columns.")]
RowNumbers = Annotated[list[int], typer.Option("--row", min=0, help="Index of a row, counted from 0; repeatable.")]
NewModel = Annotated[Path, typer.Option("--output", "-o", help="Model file to write (.safetensors).")]
Scores = Annotated[
    Path,
    typer.Option(
        "--output", "-o", help=f"File to write the scores to ({', '.join(WRITABLE)}; - for CSV to standard output)."
    ),
]
Copied = Annotated[
    list[str] | None, typer.Option("--id", help="Column to copy into the scores; repeatable. Default: row number.")
]
MaxImpure = Annotated[
    int | None, typer.Option(min=0, help="Number of points of other classes that an ellipsoid may contain.")
]
Solver = Annotated[str, typer.Option(help="native, or the name of an installed cvxpy solver.")]
Jobs = Annotated[int | None, typer.Option(help="Processes, for more than two classes; -1 uses every core.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Arguments = ParamSpec("Arguments")


def _with_one_line_errors(command: Callable[Arguments, None]) -> Callable[Arguments, None]:
    """A command that reports errors that a user can correct as one line on standard error, with exit code 2.

    Warnings of the library become notes, after the command has succeeded. A command ends with another exit code by
    raising ``typer.Exit``.
    """

    @wraps(command)
    def reporting(*args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
        with _reporting(kwargs.get("data")):
            command(*args, **kwargs)

    return reporting


@contextmanager
def _reporting(data: object) -> Iterator[None]:
    """Context manager of :func:`_with_one_line_errors`; ``data`` is the file that the command reads."""
    result: typer.Exit | None = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        try:
            yield
        except typer.Exit as code:
            result = code
        except BrokenPipeError:
            raise  # the reader closed the pipe; typer exits quietly
        except ModuleNotFoundError as error:
            known = "pip install" in str(error)  # an error of this package names the extra
            note(str(error) if known else f"{error.name} is not installed: pip install 'sepc_torch[all]'")
            raise typer.Exit(2) from None
        except MemoryError as error:
            note(_out_of_memory(error, data))
            raise typer.Exit(2) from None
        except (ValueError, TypeError, IndexError, OSError, RuntimeError) as error:
            note(" ".join(str(error).split()) or type(error).__name__)
            raise typer.Exit(2) from None
    for text in dict.fromkeys(str(w.message) for w in caught if issubclass(w.category, UserWarning)):
        note(" ".join(text.split()))
    if result is not None:
        raise result


def _out_of_memory(error: MemoryError, data: object) -> str:
    """The message of the library, or, for an error of Python, NumPy or Arrow, the file that is read and a remedy."""
    if type(error) is MemoryError and str(error):
        return str(error)
    advice = "Split its rows or columns, or read fewer rows with --max-rows."
    return f"{str(data)!r} needs more memory than is available ({str(error) or 'out of memory'}). {advice}"


def note(text: str) -> None:
    """Print one line on standard error, without control characters."""
    print(f"sepc: {printable(text)}", file=sys.stderr)


def print_json(value: Any, file: IO[str] | None = None) -> None:
    """Print a value as JSON; infinity and NaN become null, because JSON has neither."""
    print(json.dumps(_finite(value), indent=2, allow_nan=False), file=file)


def decimal_mark(given: str | None) -> Literal["", ".", ","]:
    """The decimal mark that a user asks for; empty if it is to be found."""
    match given:
        case None:
            return ""
        case "." | ",":
            return given
    raise ValueError(f"--decimal must be a comma or a point, got {given!r}.")


def by_label(names: Sequence[Any], counts: Sequence[int]) -> list[dict[str, Any]]:
    """Labels with their counts, as a list, because JSON keys must be text and labels may be numbers."""
    return [{"label": name, "points": count} for name, count in zip(names, counts, strict=True)]


def existing_model(path: Path) -> Path:
    """The path of a model; the suffix .safetensors may be left out."""
    longer = path.with_name(f"{path.name}.safetensors")
    return longer if not path.exists() and longer.exists() else path


def new_model(path: Path) -> Path:
    """The path of a model to write, with the suffix .safetensors if it has no suffix; checked before any work."""
    if not path.suffix and path.name:
        path = path.with_name(f"{path.name}.safetensors")
    check_writable(path, [".safetensors"])
    return path


def check_writable(path: Path, suffixes: Sequence[str], data: Path | None = None, *, standard: bool = False) -> None:
    """Raise an error, before any work is done, if the output cannot be written or is the input ``data``.

    With ``standard`` the path ``-`` stands for standard output.
    """
    from sepc_torch.data.files import check_target  # NumPy would slow the help down

    if standard and str(path) == "-":
        return
    if not path.name.lower().endswith(tuple(suffixes)):
        raise ValueError(f"Cannot write {str(path)!r}: its name must end in {' or '.join(suffixes)}.")
    check_target(path)
    if not os.access(path.parent, os.W_OK):
        raise PermissionError(f"Cannot write {str(path)!r}: no permission to write to {str(path.parent)!r}.")
    if data is not None and path.resolve() == data.resolve():
        raise ValueError(f"The output is the input file {str(data)!r}; choose another output.")


def named(names: Sequence[str], most: int = _NAMED) -> str:
    """The first few names, formatted for an error message.

    >>> named(["a", "b"])
    "'a', 'b'"
    """
    more = len(names) - most
    return ", ".join(map(shortened, names[:most])) + (f" and {more} more" if more > 0 else "")


def shortened(value: object) -> str:
    """The ``repr`` of a value, cut if it is long.

    >>> len(shortened("9" * 400)) == _SHOWN
    True
    """
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def reason(error: Exception | Warning) -> str:
    r"""First line of the message of an error.

    >>> reason(ValueError("no rows.\nMore."))
    'no rows'
    """
    # The text of a KeyError is only the key.
    text = f"the entry {error} is missing" if isinstance(error, KeyError) else str(error)
    return (text.strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _version(wanted: bool) -> bool:
    if wanted:
        print(f"sepc {__version__}")
        raise typer.Exit
    return wanted


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None: ...

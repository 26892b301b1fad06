"""The application of the command line: one-line errors, notes, and options that several commands share."""

from __future__ import annotations

import json
import math
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from sepc_torch import __version__
from sepc_torch.data.text_table import printable

try:
    import typer
except ModuleNotFoundError:
    raise SystemExit("sepc: the command line needs more packages: pip install 'sepc_torch[cli]'") from None

app = typer.Typer(
    help="Decide which labels of a table or of a neural network to accept, with a promise about the mistakes.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_FORMATS = "CSV, TSV or JSONL (also .gz), Parquet, NPY, or NPZ with X or embeddings, y, logits."
Data = Annotated[Path, typer.Argument(help=_FORMATS)]
Model = Annotated[Path, typer.Argument(help="Model file written by `sepc fit`, TrustHead.save or SEPC.save.")]
Label = Annotated[str | None, typer.Option("--label", "-l", help="Column with the labels; y in an NPZ file.")]
Ignored = Annotated[
    list[str] | None, typer.Option("--drop", "--ignore", help="Column that is not a feature; repeatable.")
]
Categorical = Annotated[
    list[str] | None, typer.Option(help="Column of numbers or text that names categories; repeatable.")
]
Missing = Annotated[list[str] | None, typer.Option(help="Text that stands for a missing value; repeatable.")]
Separator = Annotated[str | None, typer.Option("--sep", help="Character between the fields of a CSV or TSV file.")]
Logits = Annotated[
    str | None,
    typer.Option(help="Columns with a network's logits: their common prefix, or their names separated by commas."),
]
Classes = Annotated[str | None, typer.Option(help="Labels in the order of the logits, separated by commas.")]
Risk = Annotated[
    float | None, typer.Option(help="Accept labels so that at most this share of the accepted ones is wrong.")
]
Delta = Annotated[float, typer.Option(help="Allowed probability that the promise of --risk fails.")]
FlagRate = Annotated[
    float | None,
    typer.Option(help="Accept labels so that at most this share of rows like the calibration rows is refused."),
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of every random choice of rows.")]
MaxRows = Annotated[
    int | None,
    typer.Option(
        min=100,
        help="Use a random sample of at most this many rows of the file. Default: 524288, fewer above 64 columns.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Report errors that a user can correct as one line on standard error, with exit code 2.

    Warnings of the library become notes, after the command has succeeded. A command ends with another exit code by
    raising ``typer.Exit``.
    """
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
            note(f"{error.name} is not installed: pip install 'sepc_torch[all]'")
            raise typer.Exit(2) from None
        except (ValueError, TypeError, IndexError, OSError, RuntimeError, MemoryError) as error:
            note(" ".join(str(error).split()) or type(error).__name__)
            raise typer.Exit(2) from None
    for text in dict.fromkeys(str(w.message) for w in caught if issubclass(w.category, UserWarning)):
        note(" ".join(text.split()))
    if result is not None:
        raise result


def note(text: str) -> None:
    """Print one line on standard error, without control characters."""
    print(f"sepc: {printable(text)}", file=sys.stderr)


def print_json(value: Any) -> None:
    """Print a value as JSON; infinity and NaN become null, because JSON has neither."""
    print(json.dumps(_finite(value), indent=2, allow_nan=False))


def by_label(names: Sequence[Any], counts: Sequence[int]) -> list[dict[str, Any]]:
    """Labels with their counts, as a list, because JSON keys must be text and labels may be numbers."""
    return [{"label": name, "points": count} for name, count in zip(names, counts, strict=True)]


def existing_model(path: Path) -> Path:
    """The path of a model; the suffix .safetensors may be left out."""
    longer = path.with_name(f"{path.name}.safetensors")
    return longer if not path.exists() and longer.exists() else path


def new_model(path: Path) -> Path:
    """The path of a model to write, with the suffix .safetensors if it has no suffix; checked before any work."""
    from sepc_torch.cli_tables import check_writable

    if not path.suffix and path.name:
        path = path.with_name(f"{path.name}.safetensors")
    check_writable(path, [".safetensors"])
    return path


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

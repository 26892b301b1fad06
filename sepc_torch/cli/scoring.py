"""The command ``sepc score``: the decisions of a trust head about the rows of a file, a piece at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sepc_torch.cli.fitting import promise_of
from sepc_torch.cli.paper import score_paper
from sepc_torch.cli.shell import (
    AsJson,
    Data,
    Delta,
    FlagRate,
    Logits,
    Model,
    Risk,
    Separator,
    app,
    existing_model,
    note,
    one_line_errors,
    print_json,
)
from sepc_torch.data.text_table import printable, text_table

if TYPE_CHECKING:
    import pyarrow as pa

    from sepc_torch.cli.head_rows import Points
    from sepc_torch.head.prediction import HeadPrediction
    from sepc_torch.head.trust_head import TrustHead


@app.command()
@one_line_errors()
def score(
    model: Model,
    data: Data,
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write the scores to (.csv or .parquet).")],
    label: Annotated[
        str | None, typer.Option("--label", "-l", help="Column with the true labels, to measure the accuracy.")
    ] = None,
    identify: Annotated[
        list[str] | None, typer.Option("--id", help="Column to copy into the scores; repeatable. Default: row number.")
    ] = None,
    logits: Logits = None,
    risk: Risk = None,
    delta: Delta = 0.05,
    flag_rate: FlagRate = None,
    sep: Separator = None,
    threshold: Annotated[
        float | None, typer.Option(min=0, max=1, help="Lowest trust of an accepted label (models of --paper only).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Label new rows, and decide which labels to accept."""
    from sepc_torch.cli_tables import WRITABLE, check_writable
    from sepc_torch.data.files import kind_of
    from sepc_torch.head.trust_head import TrustHead
    from sepc_torch.model.sepc import SEPC

    check_writable(output, WRITABLE)
    if output.resolve() == data.resolve():
        raise ValueError(f"The output is the input file {str(data)!r}; choose another output.")
    model = existing_model(model)
    if kind_of(model) == "trust_head":
        if threshold is not None:
            raise ValueError("--threshold is for models of --paper; a calibrated model takes --risk or --flag-rate.")
        head = TrustHead.load(model)
        _score(head, data, output, label, identify or [], logits, (risk, delta, flag_rate), sep, as_json)
        return
    sepc = SEPC.load(model)
    for option, given in (("--risk", risk), ("--flag-rate", flag_rate), ("--logits", logits), ("--sep", sep)):
        if given is not None:
            raise ValueError(f"{option} needs a calibrated model; fit one without --paper.")
    score_paper(sepc, data, output, label, identify, 0.95 if threshold is None else threshold, as_json)


def _score(
    head: TrustHead,
    data: Path,
    output: Path,
    label: str | None,
    identify: Sequence[str],
    logits: str | None,
    wanted: tuple[float | None, float, float | None],
    sep: str | None,
    as_json: bool,
) -> None:
    """Judge the rows of a file and write the decisions."""
    from sepc_torch.cli.columns import logit_columns
    from sepc_torch.cli.head_rows import head_features, note_missing_logits, points_of, with_progress
    from sepc_torch.cli.row_files import open_rows
    from sepc_torch.cli.writing import score_writer

    if head.calibration is None or not head.calibration.done:
        raise ValueError("The model is not calibrated; calibrate it with `sepc calibrate MODEL DATA --label COLUMN`.")
    head.sepc.nan_policy = "flag"  # one unusable row does not end the file
    file = open_rows(data, sep)
    label = label or file.label
    scores = logit_columns(file, logits, head.classes)
    identify = list(dict.fromkeys(identify))
    file.require([*identify, *([] if label is None else [label])])
    features = head_features(head, file, [label, *scores, *identify])
    promise = promise_of(head, *wanted) if wanted[0] is not None or wanted[2] is not None else None
    columns = list(dict.fromkeys([*features, *scores, *identify, *([] if label is None else [label])]))
    tally = Tally(head)
    with score_writer(output) as writer:
        for piece in with_progress(file, columns, "score"):
            points = points_of(head, piece, features, scores, label)
            out = head.judge(points.z, points.logits)
            decided = decisions(head, out, points)
            clash = sorted(set(identify) & set(decided))
            if clash:
                raise ValueError(f"--id {clash[0]!r} is also the name of a score; rename the column or leave out --id.")
            writer.write(_with_ids(piece.table, identify, decided, tally.rows))
            tally.add(decided, points)
        if not tally.rows:
            raise ValueError(f"{str(data)!r} has no rows.")
        tally.refuse_other_labels(file.path, label)
    unused = [name for name in file.names if name not in columns]
    _notes(tally, unused)
    note_missing_logits(head, scores)
    if as_json:
        promised = promise.numbers if promise else None
        print_json({"output": str(output), "ignored": unused, **tally.numbers(), "promise": promised})
    else:
        print(tally if promise is None else f"{tally}\n\n{promise.text}")
        print(f"\nWritten: {printable(output)}")


def decisions(head: TrustHead, out: HeadPrediction, points: Points) -> dict[str, Any]:
    """The columns of the output: the label that is judged, its scores, and the decision with its reason."""
    import numpy as np
    import pyarrow as pa

    from sepc_torch.head.reasons import Reason, refusal_reason
    from sepc_torch.model.rules import Rule

    # Labels of several types, such as 1 and "one", are written as text.
    names = head.classes if len(set(map(type, head.classes))) == 1 else [str(name) for name in head.classes]
    texts = pa.array(names)

    def labels(codes: Any) -> Any:
        return texts.take(pa.array(codes.numpy(), mask=(codes < 0).numpy()))

    none = (out.network_label < 0).numpy()

    def scores(values: Any) -> Any:
        found = values.numpy()
        return pa.array(found, mask=np.isnan(found) | none)

    rules = pa.array([rule.name for rule in Rule]).take(pa.array(out.rule.numpy(), mask=none))
    reasons = pa.array([reason.text for reason in Reason]).take(pa.array(refusal_reason(out).numpy()))
    if points.problems:
        reasons = pa.array([points.problems.get(i, text) for i, text in enumerate(reasons.to_pylist())], pa.string())
    found = {
        "label": labels(out.network_label),
        "confidence": scores(out.confidence),
        "joint": scores(out.joint),
        "p_value": scores(out.p_value),
        "accept": pa.array(out.accept.numpy()),
        "trust": scores(out.network_trust),
        "rule": rules,
        "reason": reasons,
    }
    if points.logits is not None:
        found["head_label"] = labels(out.label)
    if points.truth is not None:
        found["true_label"] = pa.array(points.truth, pa.string())
    return found


def _with_ids(table: pa.Table, identify: Sequence[str], decided: dict[str, Any], start: int) -> pa.Table:
    """The decisions beside the columns that identify the rows, by default the row numbers."""
    import numpy as np
    import pyarrow as pa

    if not identify:
        return pa.table({"row": pa.array(np.arange(start, start + table.num_rows)), **decided})
    return pa.table({**{name: table.column(name) for name in identify}, **decided})


class Tally:
    """Counts over all pieces of a scored file: rows and right labels, by reason and of the accepted ones.

    Args:
        head: The head that judges.
    """

    def __init__(self, head: TrustHead) -> None:
        from sepc_torch.data.table_encoding import category_texts
        from sepc_torch.head.reasons import Reason

        self._known = set(category_texts(head.classes).tolist())
        self._reasons = [reason.text for reason in Reason]
        self.rows = self.bad = 0
        self.first: tuple[int, str] | None = None
        self.filled: Counter[str] = Counter()
        self.labels: Counter[str] = Counter()
        self.count: Counter[str] = Counter()
        self._labelled: Counter[str] = Counter()
        self._right: Counter[str] = Counter()

    def add(self, decided: dict[str, Any], points: Points) -> None:
        """Count the rows of a piece."""
        import numpy as np

        from sepc_torch.data.table_encoding import category_texts

        if points.problems and self.first is None:
            i = min(points.problems)
            self.first = self.rows + i, points.problems[i]
        self.bad += len(points.problems)
        self.filled.update(points.filled)
        kinds = np.array(decided["reason"].to_pylist(), dtype=object)
        kinds[list(points.problems)] = "no prediction"
        self.count.update(kinds.tolist())
        self.rows += len(kinds)
        if points.truth is None:
            return
        truth = np.array(points.truth, dtype=object)
        labelled = truth != None  # noqa: E711 (elementwise)
        right = truth == category_texts(decided["label"].to_pylist())
        self.labels.update(truth[labelled].tolist())
        self._labelled.update(kinds[labelled].tolist())
        self._right.update(kinds[labelled & right].tolist())

    def refuse_other_labels(self, path: Path, label: str | None) -> None:
        """Raise ValueError if the model knows none of the true labels."""
        from sepc_torch.cli_tables import named

        if self.labels and not self.unknown_labels < set(self.labels):
            raise ValueError(
                f"{str(path)!r}, column {label!r}: the model knows none of the labels {named(sorted(self.labels))}; "
                f"it knows {named(sorted(self._known))}."
            )

    @property
    def unknown_labels(self) -> set[str]:
        """True labels that the model does not know."""
        return set(self.labels) - self._known

    def _share(self, kinds: Sequence[str]) -> dict[str, Any]:
        rows, labelled, right = (sum(c[kind] for kind in kinds) for c in (self.count, self._labelled, self._right))
        return {"points": rows, "share": rows / max(self.rows, 1), "accuracy": right / labelled if labelled else None}

    def numbers(self) -> dict[str, Any]:
        """The counts as a dictionary for JSON."""
        everything, accepted = self._share(self._reasons), self._share(["accepted"])
        return {
            "points": self.rows,
            "bad_rows": self.bad,
            "accuracy": everything["accuracy"],
            "accepted": accepted["points"],
            "coverage": accepted["share"],
            "accepted_accuracy": accepted["accuracy"],
            "reasons": {kind: self._share([kind]) for kind in self._reasons},
        }

    def __str__(self) -> str:
        rows = [[kind, *_cells(self._share([kind]))] for kind in self._reasons if self.count[kind]]
        rows.append(["all", *_cells(self._share(self._reasons))])
        return text_table(["decision", "rows", "share", "accuracy"], rows)


def _cells(share: dict[str, Any]) -> list[object]:
    accuracy = share["accuracy"]
    return [share["points"], f"{share['share']:.1%}", "" if accuracy is None else f"{accuracy:.1%}"]


def _notes(tally: Tally, unused: list[str]) -> None:
    """Print what a user should know about the rows and columns."""
    from sepc_torch.cli_tables import named

    if unused:
        note(f"columns not used by the model: {', '.join(unused)}")
    if tally.first is not None:
        few = "1 row has" if tally.bad == 1 else f"{tally.bad} rows have"
        note(f"{few} no decision; row {tally.first[0]}: {tally.first[1]}")
    if tally.filled:
        listed = ", ".join(f"{name} ({rows} rows)" for name, rows in tally.filled.items())
        note(f"missing values that training did not have were replaced by the median: {listed}")
    if tally.unknown_labels:
        note(f"labels unknown to the model count as mistakes: {named(sorted(tally.unknown_labels))}")

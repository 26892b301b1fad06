"""The command ``sepc score``: the decisions of a trust head about the rows of a file, a piece at a time."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, get_args

import numpy as np
import pyarrow as pa
import typer
from torch import Tensor

from sepc_torch.cli import shell
from sepc_torch.cli.columns import IdColumns, class_names, whole_numbers
from sepc_torch.cli.heads import HeadRows, Points, calibrated_labels, made_the_head, promise_in_force, set_promise
from sepc_torch.cli.row_files import score_writer
from sepc_torch.cli.tally import Tally
from sepc_torch.data.files import check_target
from sepc_torch.data.options import check_choice
from sepc_torch.data.table_encoding import category_texts
from sepc_torch.data.text import printable
from sepc_torch.head.guard import Guard
from sepc_torch.head.prediction import HeadPrediction
from sepc_torch.head.promises.sets import PredictionSets
from sepc_torch.head.promises.shift import Shift
from sepc_torch.head.reasons import Reason, refusal_reason
from sepc_torch.head.trust_head import TrustHead
from sepc_torch.model.rules import Rule
from sepc_torch.shapes import Int

# New categories of a column that are named.
_NEW = 5


def score(
    model: shell.Model,
    data: shell.Data,
    output: shell.Scores,
    label: shell.TrueLabel = None,
    identify: shell.Copied = None,
    logits: shell.Logits = None,
    risk: shell.Risk = None,
    delta: shell.Delta = 0.05,
    flag_rate: shell.FlagRate = None,
    target: shell.Target = None,
    shift: shell.Shift = "covariate",
    sets: shell.Coverage = None,
    guard: Annotated[
        Path | None,
        typer.Option(
            help="File of a guard, which carries the stream on from one call to the next; made if missing. It suspends "
            "the promise after an alarm. True labels of accepted rows (--label) show whether the risk is kept."
        ),
    ] = None,
    on_alarm: Annotated[
        str, typer.Option(help="What a guard does while the promise is suspended: warn, or refuse all rows.")
    ] = "warn",
    sep: shell.Separator = None,
    encoding: shell.Encoding = None,
    trust: shell.Trust = False,
    as_json: shell.AsJson = False,
) -> None:
    """Label new rows, and decide which labels to accept.

    With --guard the exit code is 1 if the promise does not hold after the rows.
    """
    shell.check_writable(output, shell.WRITABLE, data, standard=True)
    if guard is not None:
        check_target(guard)
        if risk is not None or flag_rate is not None:
            raise ValueError("A guard watches the promise of the model; leave out --risk and --flag-rate.")
    check_choice("--shift", shift, get_args(Shift))
    if target is None and shift != "covariate":
        raise ValueError("--shift is for the promise for a target: pass --target too.")
    if target is not None and risk is None and flag_rate is None:
        raise ValueError("--target is for a promise: pass --risk or --flag-rate too.")
    rows = HeadRows(model, data, sep, logits, label, identify or [], encoding, trust)
    head, typed = rows.head, output.name.lower().endswith(".parquet")
    calibrated_labels(head)
    promise: dict[str, Any] | None
    if risk is not None or flag_rate is not None:
        shifted = None if target is None else HeadRows(model, target, sep, logits, encoding=encoding, trust=trust)
        given: dict[str, Any] = {} if shifted is None else {"target": shifted, "shift": shift}
        promise = set_promise(head, risk, delta, flag_rate, **given)
    else:
        promise = promise_in_force(head)
    watch = None if guard is None else open_guard(guard, head, on_alarm)
    ids = IdColumns(rows.file, identify or [], typed)
    tally = Tally("decision", [reason.text for reason in Reason], head.classes)
    bad, first = 0, ""
    filled: Counter[str] = Counter()
    new: dict[str, Counter[str]] = {}
    seen = 0.0
    with score_writer(output) as writer:
        for piece, points in rows.pieces():
            if watch is None:
                out = head.judge(points.z, points.logits)
                decided = decisions(head, out, points, refusal_reason(out, head.promise))
            else:
                out, state, numbers, reason = watch.judge(points.z, points.logits)
                decided = decisions(head, out, points, reason)
                decided["promise"] = pa.array([state] * len(numbers), pa.string())
                if points.truth is not None and watch.risk is not None:
                    answer(watch, numbers, points.truth)
            if sets is not None:
                decided["set"] = _set_names(head.sets(points.z, points.logits, coverage=sets))
            if typed and points.truth is not None:
                decided["true_label"] = _as_labels(head, points.truth, decided["label"].type)
            writer.write(ids.beside(piece.table, decided, tally.rows))
            if points.problems and not bad:
                i = min(points.problems)
                first = f"row {tally.rows + i}: {points.problems[i]}"
            bad += len(points.problems)
            filled.update(points.filled)
            for name, found in points.new.items():
                new.setdefault(name, Counter()).update(found)
            seen += (head.seen(points.z) or 0.0) * len(points.z)
            kinds = np.array(decided["reason"].to_pylist(), dtype=object)
            kinds[list(points.problems)] = Reason.NO_PREDICTION.text
            tally.add(kinds, out.accept.numpy(), decided["label"].to_pylist(), points.truth)
        if not tally.rows:
            raise ValueError(f"{str(data)!r} has no rows.")
        tally.check_labels(rows.file.path, rows.label)
    if watch is not None:
        watch.save(str(guard))
    unused = [name for name in rows.file.names if name not in rows.columns]
    if unused:
        shell.note(f"columns not used by the model: {', '.join(unused)}")
    if bad:
        shell.note(f"{'1 row has' if bad == 1 else f'{bad} rows have'} no decision; {first}")
    if filled:
        listed = ", ".join(f"{name} ({number} rows)" for name, number in filled.items())
        shell.note(f"missing values that training did not have were replaced by the median: {listed}")
    for name, found in new.items():
        listed = ", ".join(f"{shell.shortened(text)} ({number})" for text, number in found.most_common(_NEW))
        more = f" and {len(found) - _NEW} more" if len(found) > _NEW else ""
        shell.note(f"column {name!r} has categories that training did not have (rows): {listed}{more}")
    seen /= max(tally.rows, 1)
    if made_the_head(head, seen, tally.rows):
        shell.note(
            f"{seen:.0%} of the rows are rows of the training file, whose labels the model has seen: the accuracy of "
            "these rows is no estimate for new ones"
        )
    # Of a file on standard output nothing else may stand there.
    stream = sys.stderr if str(output) == "-" else sys.stdout
    if as_json:
        counts = {"bad_rows": bad, **tally.numbers("reasons"), "labels": tally.by_label()}
        about = {"new_categories": {name: dict(found) for name, found in new.items()}, "seen": seen}
        about |= {} if watch is None else {"guard": watch.report().to_dict()}
        shell.print_json({"output": str(output), "ignored": unused, **counts, **about, "promise": promise}, stream)
    else:
        print(f"{tally}\n\n{tally.label_table()}", file=stream)
        if promise is not None:
            print(f"\n{promise['text']}", file=stream)
        if watch is not None:
            print(f"\n{watch}", file=stream)
            if watch.state != "holds" and watch.risk is not None and rows.label is None:
                print("Score later rows with their true labels (--label): enough of them restore it.", file=stream)
        if stream is sys.stdout:
            print(f"\nWritten: {printable(output)}")
    if watch is not None and watch.state != "holds":
        raise typer.Exit(1)


def open_guard(path: Path, head: TrustHead, on_alarm: str) -> Guard:
    """The guard of a file, or a new one; its report is printed at the end, so it does not warn itself."""
    if on_alarm not in ("warn", "refuse"):
        raise ValueError(f"--on-alarm must be warn or refuse, got {on_alarm!r}.")
    told: Any = "refuse" if on_alarm == "refuse" else lambda _: None
    if path.exists():
        return Guard.load(path, head, on_alarm=told)
    # Without a promised risk there is only drift to watch.
    return Guard(head, risk=head.promise is not None and head.promise.risk is not None, on_alarm=told)


def answer(guard: Guard, numbers: Int[Tensor, "n"], truth: Sequence[str | None]) -> None:
    """Give a guard the true labels of all rows of a piece that it asks for; a missing one is skipped.

    Labels restore a suspended promise as soon as they are enough.
    """
    known = dict(zip(numbers.tolist(), truth, strict=True))
    code = {text: c for c, text in enumerate(category_texts(guard.head.classes).tolist())}
    asked = guard.ask(max(len(known), 1), among=numbers).tolist()
    guard.skip([i for i in asked if known[i] is None])
    guard.update({i: code.get(str(known[i]), -1) for i in asked if known[i] is not None})
    if guard.state != "holds":
        guard.recalibrate()


def decisions(head: TrustHead, out: HeadPrediction, points: Points, reason: Int[Tensor, "n"]) -> dict[str, Any]:
    """The columns of the output: the label that is judged, its scores, and the decision with its reason."""
    none = (out.network_label < 0).numpy()

    def scores(values: Any) -> Any:
        found = values.numpy()
        return pa.array(found, mask=np.isnan(found) | none)

    rules = pa.array([rule.name for rule in Rule]).take(pa.array(out.rule.numpy(), mask=none))
    reasons = pa.array([kind.text for kind in Reason]).take(pa.array(reason.numpy()))
    if points.problems:
        reasons = pa.array([points.problems.get(i, text) for i, text in enumerate(reasons.to_pylist())], pa.string())
    found = {
        "label": class_names(head.classes, out.network_label.numpy()),
        "confidence": scores(out.confidence),
        "joint": scores(out.joint),
        "p_value": scores(out.p_value),
        "accept": pa.array(out.accept.numpy()),
        "trust": scores(out.network_trust),
        "rule": rules,
        "reason": reasons,
    }
    if points.logits is not None:
        found["head_label"] = class_names(head.classes, out.label.numpy())
    if points.truth is not None:
        found["true_label"] = pa.array(points.truth, pa.string())
    return found


def _set_names(found: PredictionSets) -> Any:
    """The labels of every set as one text."""
    names = category_texts(found.classes).tolist()
    joined = ["|".join(name for name, inside in zip(names, row, strict=True) if inside) for row in found.sets.tolist()]
    return pa.array(joined, pa.string())


def _as_labels(head: TrustHead, truth: Sequence[str | None], kind: pa.DataType) -> Any:
    """True labels in the type of the head's labels; null for a label that the type does not hold."""
    texts = pa.array(truth, pa.string())
    if pa.types.is_string(kind):
        return texts
    if pa.types.is_integer(kind):
        return whole_numbers(texts)
    known = dict(zip(category_texts(head.classes).tolist(), head.classes, strict=True))
    return pa.array([known.get(text) for text in truth], kind)

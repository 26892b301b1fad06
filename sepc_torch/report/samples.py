"""The samples of a report: numbers of single rows, the decision in words, and the nearest training examples."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np

from sepc_torch.head.explanation import DecisionExplanation
from sepc_torch.head.trust_head import TrustHead
from sepc_torch.report.record import Nearest, Sample
from sepc_torch.report.rows import Rows, shortened, take
from sepc_torch.report.selection import WRONG


def samples(rows: Rows, head: TrustHead, z: Any, logits: Any, groups: Any, chosen: Mapping[int, str]) -> list[Sample]:
    """The records of chosen rows, given with their kinds.

    Args:
        rows: All rows.
        head: The head.
        z: The embeddings of all rows.
        logits: The logits of all rows, or None.
        groups: The groups of all rows, or None.
        chosen: Kinds by row number.
    """
    if not chosen:
        return []
    numbers = np.array(list(chosen), dtype=np.int64)
    given = None if logits is None else take(logits, numbers)
    mine = None if groups is None else take(groups, numbers)
    found = _with_names(head, rows.names).explain(take(z, numbers), logits=given, groups=mine)
    assert isinstance(found, list)  # one for each row
    return [_sample(rows, row, kind, why) for (row, kind), why in zip(chosen.items(), found, strict=True)]


def _sample(rows: Rows, row: int, kind: str, found: DecisionExplanation) -> Sample:
    out, true = rows.out, rows.true_name(row)
    sentence = f"{found.sentence.removesuffix('.')}, but the true class is {true}." if kind == WRONG else found.sentence
    near = ((found.label, found.examples), (found.runner_up, found.runner_up_examples))
    return Sample(
        row=row,
        kind=kind,
        label=int(rows.label[row]),
        own=int(out.label[row]),
        truth=true,
        joint=float(out.joint[row]),
        confidence=float(out.confidence[row]),
        p_value=float(out.p_value[row]),
        strangeness=float(out.strangeness[row]),
        trust=float(out.network_trust[row]),
        softmax=None if rows.softmax is None else float(rows.softmax[row]),
        why=sentence,
        nearest=[Nearest(str(label), [shortened(e.id, 24) for e in examples]) for label, examples in near if examples],
    )


def _with_names(head: TrustHead, names: list[str]) -> TrustHead:
    """The head with other names of its classes, for explanations; it shares every buffer with the head."""
    renamed = copy.copy(head.sepc)
    renamed.classes = names
    shown = copy.copy(head)
    shown._modules = {**head._modules, "sepc": renamed}
    return shown

"""Rows and decisions shared by all processes of a run, so that every one of them sees the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

T = TypeVar("T")

Rows = dict[str, Tensor]

# Relative difference up to which two distances may be those of one sample.
_ROUNDING = 0.05


class RankZeroError(RuntimeError):
    """What the main process failed with, raised on every process."""


def gather_rows(trainer: Any, rows: Mapping[str, Tensor]) -> Rows:
    """The rows of all processes, one after the other; each may have another number of them, or none.

    ``all_gather`` itself aborts or hangs on uneven lengths, so shorter ones are padded and trimmed again.
    """
    if trainer.world_size == 1:
        return dict(rows)
    device = trainer.strategy.root_device
    mine = {name: (column.dtype, column.shape[1:]) for name, column in rows.items()}, _length(rows)
    everyone: list[Any] = [None] * trainer.world_size
    dist.all_gather_object(everyone, mine)
    sizes = [size for _, size in everyone]
    kinds = {name: kind for columns, size in everyone if size for name, kind in columns.items()}
    gathered: Rows = {}
    for name in sorted(kinds):  # every process must call the collectives in the same order
        dtype, shape = kinds[name]
        padded = torch.zeros((max(sizes), *shape), dtype=dtype, device=device)
        if _length(rows):
            padded[: _length(rows)] = rows[name].to(device)
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded)
        gathered[name] = torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)]).cpu()
    return gathered


def _length(rows: Mapping[str, Tensor]) -> int:
    return len(next(iter(rows.values()))) if rows else 0


def gather_text(trainer: Any, names: list[str]) -> list[str]:
    """The text of all processes, in the order of :func:`gather_rows`."""
    if trainer.world_size == 1:
        return names
    parts: list[Any] = [None] * trainer.world_size
    dist.all_gather_object(parts, names)
    return [name for part in parts for name in part]


def unique_rows(rows: Mapping[str, Tensor], key: str = "id") -> Rows:
    """Every id once, ascending: samplers of several processes repeat samples to come out even. The first is kept.

    >>> unique_rows({"id": torch.tensor([2, 0, 2]), "trust": torch.tensor([0.5, 0.6, 0.7])})
    {'id': tensor([0, 2]), 'trust': tensor([0.6000, 0.5000])}
    """
    order = rows[key].argsort(stable=True)
    ids = rows[key][order]
    first = torch.ones(len(ids), dtype=torch.bool)
    first[1:] = ids[1:] != ids[:-1]
    return {name: column[order][first] for name, column in rows.items()}


def count_repeats(rows: Mapping[str, Tensor], shared_out: bool, key: str = "id") -> int:
    """Rows whose id stands for another sample too.

    Samplers of several processes repeat samples (``shared_out``); there, only a row with another target or distance
    than the one before counts. The same sample in another batch differs by rounding, in bfloat16 by a few percent.

    >>> rows = {"id": torch.tensor([2, 0, 2]), "distance": torch.tensor([0.5, 0.6, 0.7])}
    >>> count_repeats(rows, shared_out=False), count_repeats({**rows, "distance": torch.ones(3)}, shared_out=True)
    (1, 0)
    """
    order = rows[key].argsort(stable=True)
    ids = rows[key][order]
    repeated = ids[1:] == ids[:-1]
    if shared_out:
        other = torch.zeros_like(repeated)
        for name in ("target", "distance"):
            if name in rows:
                column = rows[name][order].double()
                other |= ~torch.isclose(column[1:], column[:-1], rtol=_ROUNDING, equal_nan=True)
        repeated &= other
    return int(repeated.sum())


def on_rank_zero(trainer: Any, what: str, function: Callable[[], T]) -> T:
    """Run a function on the main process; its result, or its error, reaches all of them.

    Otherwise the others would wait for ever, or die of a broken connection instead of the cause.
    """
    result, error, cause = None, None, None
    if trainer.is_global_zero:
        try:
            result = function()
        except Exception as raised:
            error, cause = f"{type(raised).__name__}: {raised}", raised
    if trainer.world_size > 1:
        result, error = trainer.strategy.broadcast((result, error))
    if error is not None:
        raise RankZeroError(f"TrustMonitor: {what} failed: {error}") from cause
    return result  # type: ignore[return-value] # None only where the function returns it

"""Collectives for the callback: gather rows from all processes, drop repeated samples, run code on rank zero."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

T = TypeVar("T")

Rows = dict[str, Tensor]

# Relative difference up to which two distances count as equal: rounding in bfloat16, which has 8 significant bits,
# accumulates over the layers of a network.
_ROUNDING = 0.05


class RankZeroError(RuntimeError):
    """Error of the main process, raised on every process."""


def gather_rows(trainer: Any, rows: Mapping[str, Tensor]) -> Rows:
    """Concatenate the rows of all processes; the number of rows may differ between processes and may be zero.

    ``all_gather`` aborts or hangs on tensors of different length, so columns are padded before it and trimmed after it.
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
    for name in sorted(kinds):  # all processes must call the collectives in one order
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
    """Concatenate the text of all processes, in the order of :func:`gather_rows`."""
    if trainer.world_size == 1:
        return names
    parts: list[Any] = [None] * trainer.world_size
    dist.all_gather_object(parts, names)
    return [name for part in parts for name in part]


def unique_rows(rows: Mapping[str, Tensor], key: str = "id") -> Rows:
    """Keep the first row of every id, in ascending order of id.

    Distributed samplers repeat samples to give every process the same number.

    >>> unique_rows({"id": torch.tensor([2, 0, 2]), "trust": torch.tensor([0.5, 0.6, 0.7])})
    {'id': tensor([0, 2]), 'trust': tensor([0.6000, 0.5000])}
    """
    order = rows[key].argsort(stable=True)
    ids = rows[key][order]
    first = torch.ones(len(ids), dtype=torch.bool)
    first[1:] = ids[1:] != ids[:-1]
    return {name: column[order][first] for name, column in rows.items()}


def count_repeats(rows: Mapping[str, Tensor], distributed: bool, key: str = "id") -> int:
    """Count rows whose id also belongs to another sample.

    Distributed samplers repeat samples. So with ``distributed`` a repeated id counts only if its target or distance
    differs from that of the previous row by more than rounding.

    >>> rows = {"id": torch.tensor([2, 0, 2]), "distance": torch.tensor([0.5, 0.6, 0.7])}
    >>> count_repeats(rows, distributed=False), count_repeats({**rows, "distance": torch.ones(3)}, distributed=True)
    (1, 0)
    """
    order = rows[key].argsort(stable=True)
    ids = rows[key][order]
    repeated = ids[1:] == ids[:-1]
    if distributed:
        other = torch.zeros_like(repeated)
        for name in ("target", "distance"):
            if name in rows:
                column = rows[name][order].double()
                other |= ~torch.isclose(column[1:], column[:-1], rtol=_ROUNDING, equal_nan=True)
        repeated &= other
    return int(repeated.sum())


def on_rank_zero(trainer: Any, what: str, function: Callable[[], T]) -> T:
    """Run a function on the main process and broadcast its result, or raise its error, on all processes.

    Without the broadcast of an error the other processes would wait for ever, or fail with a broken connection.
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
    return result  # type: ignore[return-value] # None only if the function returns None

"""Inference pass of the callback: run the module over a data set, outside Lightning's loops, to get its embeddings.

The pass restores module modes and random states, so training is unaffected. It builds its own loader, because iterating
over a training loader with persistent workers would take batches from the current epoch.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate

from sepc_torch.shapes import Int
from sepc_torch.training.lightning.batches import Rows, batch_inputs, batch_rows
from sepc_torch.training.lightning.hooks import ActivePass, Captures, check_widths, read_all
from sepc_torch.training.lightning.settings import MisconfigurationException


class _Indexed(Dataset[Any]):
    """Data set that returns each sample with its position."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, position: int) -> tuple[int, Any]:
        return position, self.dataset[position]


class _IndexedCollate:
    """Applies the user's collate function and returns the positions beside the batch."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: list[tuple[int, Any]]) -> tuple[Tensor, Any]:
        return torch.tensor([position for position, _ in samples]), self.collate([sample for _, sample in samples])


class ShardSampler(Sampler[int]):
    """Splits the positions 0 to n - 1 over the processes, with the same number for each.

    To fill up, the last processes repeat positions from the start; repeated samples are dropped later by id.

    >>> [list(ShardSampler(3, rank, 2)) for rank in (0, 1)]
    [[0, 2], [1, 0]]
    """

    def __init__(self, n: int, rank: int, world: int) -> None:
        self.n, self.rank, self.world = n, rank, world

    def __len__(self) -> int:
        return -(-self.n // self.world)

    def __iter__(self) -> Iterator[int]:
        return iter([(self.rank + step * self.world) % self.n for step in range(len(self))])


def sequential_loader(trainer: Any, dataset: Any, like: Any, batch_size: int) -> DataLoader[Any]:
    """Loader over this process's share of a data set, in order, with the collate function of the loader ``like``."""
    collate = getattr(like, "collate_fn", None) or default_collate
    return DataLoader(
        _Indexed(dataset),
        batch_size=getattr(like, "batch_size", None) or batch_size,
        sampler=ShardSampler(len(dataset), trainer.global_rank, trainer.world_size),
        collate_fn=_IndexedCollate(collate),
        num_workers=getattr(like, "num_workers", 0),
    )


@contextmanager
def undisturbed(module: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; restores all module modes and random states on exit.

    Inference mode is off, because buffers created in it cannot be loaded into or differentiated through later.
    """
    modes = [(part, part.training) for part in module.modules()]
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002 - restored below
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    try:
        module.eval()
        with torch.inference_mode(False), torch.no_grad():
            yield
    finally:
        for part, training in modes:
            part.training = training
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
        torch.set_rng_state(cpu)
        if devices:
            torch.cuda.set_rng_state_all(devices)


@contextmanager
def _active_pass(owner: str) -> Iterator[None]:
    """Mark the inference pass of a monitor as running."""
    ActivePass.owner = owner
    try:
        yield
    finally:
        ActivePass.owner = None


def run_forward(module: Any, batch: Any, inputs: Callable[[Any], Any] | None) -> None:
    """Run the module's forward; a tuple from ``inputs`` gives positional arguments, a dictionary named ones."""
    found = batch_inputs(batch, inputs)
    args: tuple[Any, ...] = (found,)
    named: dict[str, Any] = {}
    if inputs is not None and type(found) is tuple:
        args = found
    elif inputs is not None and isinstance(found, Mapping):
        args, named = (), dict(found)
    cure = (
        "Let inputs= return a tuple of all arguments or a dictionary of named ones, or pass embed= (and logits=) a "
        "function (module, batch) -> tensor, which needs no forward."
    )
    # The arguments are checked before the call, so that a TypeError inside the user's forward is not masked.
    signature = _signature(module)
    if signature is not None:
        try:
            signature.bind(*args, **named)
        except TypeError as error:
            raise MisconfigurationException(
                f"The forward of {type(module).__name__} does not accept "
                f"{'the first entry of a batch' if inputs is None else 'the result of inputs='}: {error}. {cure}"
            ) from error
    try:
        module(*args, **named)
    except NotImplementedError as error:
        if type(module).forward.__module__.partition(".")[0] in ("torch", "lightning", "pytorch_lightning"):
            raise MisconfigurationException(f"{type(module).__name__} has no forward of its own. {cure}") from error
        raise


def _signature(module: Any) -> inspect.Signature | None:
    """Signature of a module's forward, or None if it cannot be inspected."""
    try:
        return inspect.signature(module.forward)
    except (TypeError, ValueError):  # a compiled or scripted module
        return None


def embed_samples(
    trainer: Any,
    module: Any,
    loader: DataLoader[Any],
    captures: Captures,
    inputs: Callable[[Any], Any] | None,
    to_rows: Callable[[Any, Int[Tensor, "B"], Rows], Rows],
    only: tuple[str, ...] = ("emb", "logits"),
) -> Rows:
    """Run the module over a loader of :func:`sequential_loader` and concatenate the results of ``to_rows``.

    ``to_rows`` is called for every batch with the batch, the positions of its samples, and the captured values of the
    quantities ``only`` by name, on the CPU in float32.
    """
    parts: list[Rows] = []
    wanted = {name: capture for name, capture in captures.items() if name in only}
    widths: dict[str, set[int]] = {name: set() for name in wanted}
    plugin = trainer.precision_plugin
    with undisturbed(module), _active_pass(captures["emb"].owner):
        for positions, batch in loader:
            moved = trainer.strategy.batch_to_device(plugin.convert_input(batch), device=module.device)
            for capture in captures.values():
                capture.clear()
            with plugin.forward_context():
                _run_hooked(module, moved, wanted, inputs)
                captured = read_all(wanted, module, moved, batch_rows(moved))
            for name, column in captured.items():
                widths[name].add(column.shape[1])
                check_widths(captures[name], widths[name])
            parts.append(to_rows(batch, positions, {name: column.float().cpu() for name, column in captured.items()}))
        for capture in captures.values():
            capture.clear()
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]} if parts else {}


def _run_hooked(module: Any, batch: Any, captures: Captures, inputs: Callable[[Any], Any] | None) -> None:
    """Run the module's forward for the hooks; a forward that only the search for logits would run may fail."""
    hooks = [capture for capture in captures.values() if capture.is_hook]
    try:
        if hooks:
            run_forward(module, batch, inputs)
    except MisconfigurationException:
        if any(capture.required for capture in hooks):
            raise

"""An own pass over a data set: the module runs as in validation, and the training never notices.

The training loader itself is never iterated again: with persistent workers that takes batches away from the epoch.
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
from sepc_torch.training.lightning.batches import batch_inputs, batch_rows
from sepc_torch.training.lightning.distributed import Rows
from sepc_torch.training.lightning.hooks import Capture, OwnPass, check_widths, read_all
from sepc_torch.training.lightning.lightning_names import MisconfigurationException


class _Indexed(Dataset[Any]):
    """Samples with their position."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, position: int) -> tuple[int, Any]:
        return position, self.dataset[position]


class _IndexedCollate:
    """The user's collation, with the positions beside it."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: list[tuple[int, Any]]) -> tuple[Tensor, Any]:
        return torch.tensor([position for position, _ in samples]), self.collate([sample for _, sample in samples])


class ShardSampler(Sampler[int]):
    """Every process its share, all of the same length: the last ones begin anew, and repeats are dropped by id.

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
    """A loader in order over this process's share, collated as a loader that the user made."""
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
    """Evaluation mode without gradients; afterwards every module's mode and every random state are as before.

    Inference mode is off: buffers made in it could not be loaded or differentiated through later.
    """
    modes = [(part, part.training) for part in module.modules()]
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002 - to restore it
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
def _announced(owner: str) -> Iterator[None]:
    """Say whose pass it is."""
    OwnPass.owner = owner
    try:
        yield
    finally:
        OwnPass.owner = None


def run_forward(module: Any, batch: Any, inputs: Callable[[Any], Any] | None) -> None:
    """Run the module's forward; if ``inputs`` returns a tuple it is several arguments, a dictionary named ones."""
    found = batch_inputs(batch, inputs)
    args: tuple[Any, ...] = (found,)
    named: dict[str, Any] = {}
    if inputs is not None and type(found) is tuple:
        args = found
    elif inputs is not None and isinstance(found, Mapping):
        args, named = (), dict(found)
    cure = (
        "Let inputs= return a tuple of all arguments, or a dictionary by name; or give embed= (and logits=) a function "
        "(module, batch) -> tensor, which needs no forward."
    )
    # Checked beforehand, so that an error inside of the user's forward stays what it is.
    signature = _signature(module)
    if signature is not None:
        try:
            signature.bind(*args, **named)
        except TypeError as error:
            raise MisconfigurationException(
                f"The forward of {type(module).__name__} cannot be called with what "
                f"{'the first entry of a batch' if inputs is None else 'inputs='} gives: {error}. {cure}"
            ) from error
    try:
        module(*args, **named)
    except NotImplementedError as error:
        if type(module).forward.__module__.partition(".")[0] in ("torch", "lightning", "pytorch_lightning"):
            raise MisconfigurationException(f"{type(module).__name__} has no forward of its own. {cure}") from error
        raise


def _signature(module: Any) -> inspect.Signature | None:
    try:
        return inspect.signature(module.forward)
    except (TypeError, ValueError):  # compiled or scripted
        return None


def embed_samples(
    trainer: Any,
    module: Any,
    loader: DataLoader[Any],
    captures: dict[str, Capture],
    inputs: Callable[[Any], Any] | None,
    each: Callable[[Any, Int[Tensor, "B"], Rows], Rows],
) -> Rows:
    """Run the module over a loader of :func:`sequential_loader` and join what ``each`` makes of every batch.

    ``each`` gets the batch, the positions of its samples, and the captured rows by name.
    """
    parts: list[Rows] = []
    widths: dict[str, set[int]] = {name: set() for name in captures}
    plugin = trainer.precision_plugin
    with undisturbed(module), _announced(next(iter(captures.values())).owner):
        for positions, batch in loader:
            moved = trainer.strategy.batch_to_device(plugin.convert_input(batch), device=module.device)
            for capture in captures.values():
                capture.clear()
            with plugin.forward_context():
                if any(capture.is_hook for capture in captures.values()):
                    run_forward(module, moved, inputs)
                captured = read_all(captures, module, moved, batch_rows(moved))
            for name, column in captured.items():
                widths[name].add(column.shape[1])
                check_widths(captures[name], widths[name])
            parts.append(each(batch, positions, {name: column.cpu() for name, column in captured.items()}))
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]} if parts else {}

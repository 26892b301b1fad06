"""Inference pass of the callback: run the module over a data set, outside Lightning's loops, to get its embeddings.

The pass restores module modes and random states, so training is unaffected. It builds its own loader, because iterating
over a training loader with persistent workers would take batches from the current epoch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, default_collate

from sepc_torch.head.reading.sources import evaluation_mode
from sepc_torch.shapes import Int
from sepc_torch.training.flags import Rows
from sepc_torch.training.lightning.batches import batch_inputs, batch_rows
from sepc_torch.training.lightning.hooks import ActivePass, Captures, check_widths, read_all
from sepc_torch.training.lightning.settings import Functions, MisconfigurationException, isolate_rng
from sepc_torch.training.pool import View

T = TypeVar("T")

# Batch size without a loader to copy the batch size from.
_BATCH_SIZE = 256


class Pass(NamedTuple):
    """What an inference pass needs of a run: the Trainer, the LightningModule, the captures, the user's functions."""

    trainer: Any
    module: Any
    captures: Captures
    functions: Functions


class Samples(NamedTuple):
    """Samples for an inference pass.

    Attributes:
        dataset: The data set.
        ids: Ids of its samples; None if they are the positions.
        like: Loader whose collate function, batch size and workers to copy; None for the defaults.
    """

    dataset: Any
    ids: Tensor | None
    like: Any

    @property
    def collate(self) -> Callable[[list[Any]], Any]:
        """The function from samples to a batch."""
        return getattr(self.like, "collate_fn", None) or default_collate


@contextmanager
def undisturbed(module: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; restores all module modes and random states on exit.

    Inference mode is off, because buffers created in it cannot be loaded into or differentiated through later.
    """
    with isolate_rng(), evaluation_mode(module), torch.inference_mode(False), torch.no_grad():
        yield


@contextmanager
def active_pass(owner: str) -> Iterator[None]:
    """Mark a pass of a monitor as running, so that the hooks of other monitors ignore it."""
    ActivePass.owner = owner
    try:
        yield
    finally:
        ActivePass.owner = None


def run_forward(module: Any, batch: Any, inputs: Callable[[Any], Any] | None, call: Callable[..., T]) -> T:
    """Call the module, or a function in its place, with the arguments of its forward.

    A tuple from ``inputs`` gives positional arguments, a dictionary named ones.
    """
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
        return call(*args, **named)
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
    run: Pass,
    samples: Samples,
    positions: Int[Tensor, "n"],
    to_rows: Callable[[Any, Int[Tensor, "B"], Rows], Rows],
    only: tuple[str, ...] = ("emb", "logits"),
) -> Rows:
    """Run the module over this process's share of samples, in order, and concatenate the results of ``to_rows``.

    ``to_rows`` is called for every batch with the batch, the positions of its samples in the data set, and the captured
    values of the quantities ``only`` by name, on the CPU in float32. To give every process the same number of samples,
    some are repeated; they are dropped later by id.
    """
    trainer, module, captures, functions = run
    view = View(samples.dataset, positions)
    share: DistributedSampler[Any] = DistributedSampler(view, trainer.world_size, trainer.global_rank, shuffle=False)
    loader = DataLoader(
        view,
        batch_size=getattr(samples.like, "batch_size", None) or _BATCH_SIZE,
        sampler=share,
        collate_fn=samples.collate,
        num_workers=getattr(samples.like, "num_workers", 0),
    )
    parts: list[Rows] = []
    wanted = {name: capture for name, capture in captures.items() if name in only}
    widths: dict[str, set[int]] = {name: set() for name in wanted}
    plugin = trainer.precision_plugin
    with undisturbed(module), active_pass(captures["emb"].owner):
        for places, batch in zip(torch.tensor(list(share)).split(loader.batch_size or 1), loader, strict=True):
            moved = on_device(trainer, module, batch)
            for capture in captures.values():
                capture.clear()
            with plugin.forward_context():
                _run_hooked(module, moved, wanted, functions.inputs)
                captured = read_all(wanted, module, moved, batch_rows(moved))
            for name, column in captured.items():
                widths[name].add(column.shape[1])
                check_widths(captures[name], widths[name])
            found = {name: column.float().cpu() for name, column in captured.items()}
            parts.append(to_rows(batch, positions[places], found))
        for capture in captures.values():
            capture.clear()
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]} if parts else {}


def on_device(trainer: Any, module: Any, batch: Any) -> Any:
    """The batch in the Trainer's precision, on the module's device."""
    return trainer.strategy.batch_to_device(trainer.precision_plugin.convert_input(batch), device=module.device)


def _run_hooked(module: Any, batch: Any, captures: Captures, inputs: Callable[[Any], Any] | None) -> None:
    """Run the module's forward for the hooks; a forward that only the search for logits would run may fail."""
    hooks = [capture for capture in captures.values() if capture.is_hook]
    try:
        if hooks:
            run_forward(module, batch, inputs, module)
    except MisconfigurationException:
        if any(capture.required for capture in hooks):
            raise

"""Embeddings and logits of a user's own module: what a named submodule returns, or what a function computes."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from sepc_torch.shapes import Float
from sepc_torch.training.lightning.lightning_names import MisconfigurationException
from sepc_torch.training.lightning.settings import check_picklable

Source = str | Callable[[Any, Any], Tensor]

# How many names an error lists.
_LISTED = 20


class OwnPass:
    """Whose pass is running: another monitor's passes are not to be seen."""

    owner: Any = None


class Capture:
    """Rows of one quantity for each batch.

    A forward hook must be in place before the module first runs: one that is registered on a compiled module later
    fires for some batches only. So it stays for the whole run, and what it saw is cleared around every batch.
    """

    def __init__(self, source: Source, argument: str, owner: str) -> None:
        self.source = source
        self.argument = argument
        self.owner = owner
        self._handle: Any = None
        self._seen: list[Any] = []

    def __reduce__(self) -> tuple[Any, ...]:
        check_picklable(self.argument, self.source)
        return Capture, (self.source, self.argument, self.owner)

    def __deepcopy__(self, _memo: Any) -> Capture:
        return Capture(self.source, self.argument, self.owner)

    @property
    def is_hook(self) -> bool:
        """Whether a submodule is watched."""
        return isinstance(self.source, str)

    def attach(self, module: nn.Module) -> None:
        """Watch the submodule, if that has not begun yet."""
        if isinstance(self.source, str) and self._handle is None:
            # As little as possible in the hook: torch.compile traces it.
            self._handle = find_submodule(module, self.source, self.argument).register_forward_hook(
                lambda _module, _inputs, output: (
                    self._seen.append(output) if OwnPass.owner in (None, self.owner) else None
                )
            )

    def detach(self) -> None:
        """Stop watching."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        self.clear()

    def clear(self) -> None:
        """Forget what was seen."""
        self._seen.clear()

    def read(self, module: Any, batch: Any, rows: int) -> Float[Tensor, "B D"]:
        """The rows of this batch, as float32 or better and never an inference tensor."""
        seen = list(self._seen) if self.is_hook else [self.source(module, batch)]  # type: ignore[operator]
        self.clear()
        wrong = next((value for value in seen if not isinstance(value, Tensor)), None)
        if wrong is not None:
            raise MisconfigurationException(
                f"{self.argument}={self.source!r} returns a {type(wrong).__name__}, and a tensor (batch, features) is "
                f"needed. Give {self.argument} a function (module, batch) -> tensor that takes the right entry."
            )
        if not seen:
            raise MisconfigurationException(
                f"The submodule {self.argument}={self.source!r} did not run in this step. Name one that every step "
                "runs; if the module was compiled and ran before the Trainer started, name a submodule inside the "
                "compiled part."
            )
        counts = [len(value) if value.ndim else 0 for value in seen]
        if counts != [rows] and sum(counts) != rows:
            raise MisconfigurationException(
                f"{self.argument}={self.source!r} gave {counts} rows for a batch of {rows}. One row for each sample is "
                f"needed: give {self.argument} a function (module, batch) -> tensor."
            )
        check_widths(self, {value.shape[1:].numel() for value in seen})
        with torch.inference_mode(False), torch.no_grad():
            joined = torch.cat(
                [value.detach().flatten(1) if value.ndim > 1 else value.detach()[:, None] for value in seen]
            ).clone()
            return joined if joined.dtype == torch.float64 else joined.float()


def check_widths(capture: Capture, widths: set[int]) -> None:
    """Every sample must have equally many features."""
    if len(widths) > 1:
        raise MisconfigurationException(
            f"{capture.argument}={capture.source!r} gave {' and '.join(map(str, sorted(widths)))} features for "
            "different samples. One vector per sample, always of the same length, is needed: give "
            f"{capture.argument} a function, such as lambda module, batch: module.encoder(batch[0]).mean(dim=1)."
        )


def read_all(captures: dict[str, Capture], module: Any, batch: Any, rows: int) -> dict[str, Tensor]:
    """The rows of every quantity; what was watched comes first, for functions may run the module again."""
    order = sorted(captures, key=lambda name: not captures[name].is_hook)
    return {name: captures[name].read(module, batch, rows) for name in order}


def find_submodule(module: nn.Module, name: str, argument: str) -> nn.Module:
    """The submodule of that name, or an error that lists those there are."""
    try:
        return module.get_submodule(name)
    except AttributeError:
        names = [known for known, _ in module.named_modules() if known]
        close = difflib.get_close_matches(name, names, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        more = ", ..." if len(names) > _LISTED else ""
        raise MisconfigurationException(
            f"{argument}={name!r} names no submodule of {type(module).__name__}.{hint} It has "
            f"{', '.join(map(repr, names[:_LISTED]))}{more}."
        ) from None

"""Capture of embeddings and logits for the callback, by a forward hook on a submodule or by a user's function."""

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

# Number of submodule names in an error message.
_LISTED = 20


class ActivePass:
    """The monitor whose inference pass is running, or None; the hooks of other monitors ignore this pass."""

    owner: Any = None


class Capture:
    """Captures one quantity, the embeddings or the logits, for every batch.

    A forward hook must be registered before the module first runs: on a compiled module, a later hook is not called for
    every batch. So the hook stays for the whole run, and its captured values are cleared before and after every batch.

    Args:
        source: Name of a submodule, or a function (module, batch) -> tensor.
        argument: Name of the argument of ``TrustMonitor`` that gave ``source``, for error messages.
        owner: Prefix of the monitor.
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
        """Whether the source is a submodule with a forward hook."""
        return isinstance(self.source, str)

    def attach(self, module: nn.Module) -> None:
        """Register the forward hook, unless it is registered already."""
        if isinstance(self.source, str) and self._handle is None:
            # The hook is minimal because torch.compile traces it.
            self._handle = find_submodule(module, self.source, self.argument).register_forward_hook(
                lambda _module, _inputs, output: (
                    self._seen.append(output) if ActivePass.owner in (None, self.owner) else None
                )
            )

    def detach(self) -> None:
        """Remove the forward hook."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        self.clear()

    def clear(self) -> None:
        """Discard the captured values."""
        self._seen.clear()

    def read(self, module: Any, batch: Any, rows: int) -> Float[Tensor, "B D"]:
        """Values of the current batch, as float32 or float64, never as an inference tensor."""
        seen = list(self._seen) if self.is_hook else [self.source(module, batch)]  # type: ignore[operator]
        self.clear()
        wrong = next((value for value in seen if not isinstance(value, Tensor)), None)
        if wrong is not None:
            raise MisconfigurationException(
                f"{self.argument}={self.source!r} returns a {type(wrong).__name__}; expected a tensor (batch, "
                f"features). Pass {self.argument} a function (module, batch) -> tensor that selects the right entry."
            )
        if not seen:
            raise MisconfigurationException(
                f"The submodule {self.argument}={self.source!r} did not run in this step. Name a submodule that runs "
                "in every step. If the module was compiled and ran before the Trainer started, name a submodule inside "
                "the compiled part."
            )
        counts = [len(value) if value.ndim else 0 for value in seen]
        if counts != [rows] and sum(counts) != rows:
            raise MisconfigurationException(
                f"{self.argument}={self.source!r} returned {counts} rows for a batch of {rows}; expected one row per "
                f"sample. Pass {self.argument} a function (module, batch) -> tensor."
            )
        check_widths(self, {value.shape[1:].numel() for value in seen})
        with torch.inference_mode(False), torch.no_grad():
            joined = torch.cat(
                [value.detach().flatten(1) if value.ndim > 1 else value.detach()[:, None] for value in seen]
            ).clone()
            return joined if joined.dtype == torch.float64 else joined.float()


def check_widths(capture: Capture, widths: set[int]) -> None:
    """Raise an error unless all samples have the same number of features."""
    if len(widths) > 1:
        raise MisconfigurationException(
            f"{capture.argument}={capture.source!r} returned {' and '.join(map(str, sorted(widths)))} features for "
            "different samples; expected one vector per sample, always of the same length. Pass "
            f"{capture.argument} a function, such as lambda module, batch: module.encoder(batch[0]).mean(dim=1)."
        )


def read_all(captures: dict[str, Capture], module: Any, batch: Any, rows: int) -> dict[str, Tensor]:
    """Values of every quantity. Hooks are read before functions, because a function may run the module again."""
    order = sorted(captures, key=lambda name: not captures[name].is_hook)
    return {name: captures[name].read(module, batch, rows) for name in order}


def find_submodule(module: nn.Module, name: str, argument: str) -> nn.Module:
    """The submodule of a name, or an error that lists the existing ones."""
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

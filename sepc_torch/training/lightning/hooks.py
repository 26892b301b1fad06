"""Capture of embeddings and logits for the callback, by a forward hook on a submodule or by a user's function."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from sepc_torch.shapes import Float
from sepc_torch.training.lightning.settings import MisconfigurationException, check_picklable

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

    required = True

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

    def seen(self) -> list[Any]:
        """The captured values."""
        return list(self._seen)

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
        return plain_matrix(seen)


class LogitsFinder:
    """Finds the network's logits: the output of the module's forward, or of the layer after the embedding layer.

    Hooks watch the modules that contain the embedding layer, the outermost first, and the layer that follows each of
    them. Logits are a floating-point output (B, C) with C the number of classes, or (B,) and (B, 1) for two classes.
    The first module that gives logits is used. A module that does not run in a stage is dropped.

    Args:
        embed: Source of the embeddings.
        owner: Prefix of the monitor.
    """

    required = False
    is_hook = True
    argument = "logits"

    def __init__(self, embed: Source, owner: str) -> None:
        self.embed = embed
        self.owner = owner
        self.classes = 0
        self._warned = False
        self._names: list[str] | None = None
        self._captures: dict[str, Capture] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return LogitsFinder, (self.embed, self.owner)

    def __deepcopy__(self, _memo: Any) -> LogitsFinder:
        return LogitsFinder(self.embed, self.owner)

    @property
    def source(self) -> str | None:
        """Name of the module whose output is used, ``""`` for the module's forward; None if there is none."""
        return self._names[0] if self._names else None

    @property
    def finding(self) -> str:
        """Sentence that says where the logits come from."""
        if self.source is None:
            return "no logits were found, so the head's own labels are judged. Name them: logits='classifier'."
        return f"the network's logits are the output of {shown_name(self.source)}; logits= decides otherwise."

    def attach(self, module: nn.Module) -> None:
        """Register the forward hooks, unless they are registered already."""
        if not self._captures:
            names = logits_candidates(module, self.embed)
            self._captures = {name: Capture(name, "logits", self.owner) for name in names}
        for capture in self._captures.values():
            capture.attach(module)

    def detach(self) -> None:
        """Remove the forward hooks."""
        for capture in self._captures.values():
            capture.detach()

    def clear(self) -> None:
        """Discard the captured values."""
        for capture in self._captures.values():
            capture.clear()

    def read(self, module: Any, batch: Any, rows: int) -> Float[Tensor, "B C"] | None:
        """Logits of the current batch in float32 or float64, never as an inference tensor; None if none are found."""
        names = list(self._captures) if self._names is None else self._names
        found = {name: logits for name in names if (logits := self._logits(name, rows)) is not None}
        self.clear()
        if found:
            self._names = list(found)
        elif self._names and not self._warned:
            self._warned = True
            warnings.warn(
                f"The network's logits were the output of {shown_name(self._names[0])} before, but this step gives "
                "none, so the head's own labels are judged. Name a submodule that runs in every step: "
                "TrustMonitor(..., logits='classifier'), or pass logits=False.",
                stacklevel=2,
            )
        return next(iter(found.values()), None)

    def _logits(self, name: str, rows: int) -> Float[Tensor, "B C"] | None:
        """The first captured value of a module that has the form of logits, or None.

        A module may give other values too: under DDP the hook of the whole module also sees the step's result.
        """
        for value in self._captures[name].seen():
            if isinstance(value, Tensor) and value.is_floating_point() and value.ndim in (1, 2) and len(value) == rows:
                columns = value.shape[1] if value.ndim == 2 else 1
                if columns == self.classes or (columns == 1 and self.classes == 2):
                    return plain_matrix([value])
        return None


def shown_name(name: str) -> str:
    """Name of a module in messages; the empty name belongs to the LightningModule."""
    return f"the submodule {name!r}" if name else "the module's forward"


def logits_candidates(module: nn.Module, embed: Source) -> list[str]:
    """Names of the modules whose output may be the logits, in order of preference.

    >>> net = nn.Sequential(nn.Sequential(nn.Linear(2, 8), nn.Tanh()), nn.Linear(8, 3))
    >>> logits_candidates(net, "0.0"), logits_candidates(net, "0")
    (['', '0', '1', '0.1'], ['', '1'])
    """
    if not isinstance(embed, str):
        return [""]
    parts = embed.split(".") if embed else []
    around = [".".join(parts[:depth]) for depth in range(len(parts))]
    after = []
    for depth, parent in enumerate(around):
        names = [name for name, _ in module.get_submodule(parent).named_children()]
        if parts[depth] in names[:-1]:
            after.append(".".join([*parts[:depth], names[names.index(parts[depth]) + 1]]))
    return [*around, *after]


def plain_matrix(values: list[Tensor]) -> Float[Tensor, "B D"]:
    """One row per sample, joined and copied out of inference mode, in float32 or float64."""
    with torch.inference_mode(False), torch.no_grad():
        joined = torch.cat(
            [value.detach().flatten(1) if value.ndim > 1 else value.detach()[:, None] for value in values]
        ).clone()
        return joined if joined.dtype == torch.float64 else joined.float()


Captures = dict[str, "Capture | LogitsFinder"]


def check_widths(capture: Capture | LogitsFinder, widths: set[int]) -> None:
    """Raise an error unless all samples have the same number of features."""
    if len(widths) > 1:
        raise MisconfigurationException(
            f"{capture.argument}={capture.source!r} returned {' and '.join(map(str, sorted(widths)))} features for "
            "different samples; expected one vector per sample, always of the same length. Pass "
            f"{capture.argument} a function, such as lambda module, batch: module.encoder(batch[0]).mean(dim=1)."
        )


def read_all(captures: Captures, module: Any, batch: Any, rows: int) -> dict[str, Tensor]:
    """Values of every quantity that is found. Hooks are read first, because a function may run the module again."""
    order = sorted(captures, key=lambda name: not captures[name].is_hook)
    found = {name: captures[name].read(module, batch, rows) for name in order}
    return {name: value for name, value in found.items() if value is not None}


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

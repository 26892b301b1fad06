"""Capture of embeddings and logits for the callback, by a forward hook on a submodule or by a user's function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from sepc_torch.data.warn import warn_user
from sepc_torch.head.network import Places, channels_first, submodule
from sepc_torch.head.reading.layers import layer_rows
from sepc_torch.shapes import Float
from sepc_torch.training.lightning.settings import MisconfigurationException, check_picklable, configuring

Source = str | Callable[[Any, Any], Tensor]

# The source of embeddings that stands for the input of the module's last linear layer.
AUTO = "auto"


class ActivePass:
    """The monitor whose inference pass is running, or None; the hooks of other monitors ignore this pass."""

    owner: Any = None


class Capture:
    """Captures one quantity, the embeddings or the logits, for every batch.

    A forward hook must be registered before the module first runs: on a compiled module, a later hook is not called for
    every batch. So the hook stays for the whole run, and its captured values are cleared before and after every batch.
    ``argument`` names the argument of ``TrustMonitor`` that gave ``source``, and ``owner`` is the monitor's prefix.
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

    def attach(self, module: nn.Module, places: Places | None) -> None:
        """Register the forward hook, unless it is registered already; ``places`` are those of the module."""
        if not isinstance(self.source, str) or self._handle is not None:
            return
        if self.source == AUTO:
            assert places is not None
            name, of_input = places.last, True
        else:
            name, of_input = self.source, False
        with configuring():
            found = submodule(module, name, self.argument)
        # The hook is minimal because torch.compile traces it.
        self._handle = found.register_forward_hook(
            lambda _module, inputs, output: (
                self._seen.append(inputs[0] if of_input else output) if ActivePass.owner in (None, self.owner) else None
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
        if self.source == AUTO:
            seen = [layer_rows(channels_first(value), "embedding") for value in seen]
        check_widths(self, {value.shape[1:].numel() for value in seen})
        return plain_matrix(seen)


class LogitsFinder:
    """Finds the network's logits: the output of the module's forward, or of the last linear layer in it.

    Hooks watch the modules that contain the last linear layer, the outermost first, and this layer. Logits are a
    floating-point output (B, C) with C the number of classes, or (B,) and (B, 1) for two classes. The first module that
    gives logits is used. A module that does not run in a stage is dropped.
    """

    required = False
    is_hook = True
    argument = "logits"

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.classes = 0
        self.looked = False  # whether any batch was searched for logits
        self._warned = False
        self._names: list[str] | None = None
        self._captures: dict[str, Capture] = {}
        self._layers: list[tuple[str, int]] = []  # name and outputs of each linear layer

    def __reduce__(self) -> tuple[Any, ...]:
        return LogitsFinder, (self.owner,)

    def __deepcopy__(self, _memo: Any) -> LogitsFinder:
        return LogitsFinder(self.owner)

    @property
    def source(self) -> str | None:
        """Name of the module whose output is used, ``""`` for the module's forward; None if there is none."""
        return self._names[0] if self._names else None

    @property
    def finding(self) -> str:
        """Sentence that says where the logits come from."""
        if self.source is None:
            return f"no logits were found, so the head's own labels are judged. {self._remedy}"
        return f"the network's logits are the output of {shown_name(self.source)}; logits= decides otherwise."

    @property
    def _remedy(self) -> str:
        """Sentence that says how to name the logits: by the last linear layer with an output for each class."""
        widths = (self.classes, 1) if self.classes == 2 else (self.classes,)
        fitting = [name for name, outputs in self._layers if outputs in widths]
        if fitting:
            return f"Name a submodule that runs in every step, logits={fitting[-1]!r}, or pass logits=False."
        return "Pass logits=lambda module, batch: ..., a function to (B, C), or logits=False."

    def attach(self, module: nn.Module, places: Places | None) -> None:
        """Register the forward hooks, unless they are registered already; without ``places`` only on the module."""
        if not self._captures:
            parts = module.named_modules()
            self._layers = [(name, part.out_features) for name, part in parts if isinstance(part, nn.Linear)]
            names = [""] if places is None else logits_candidates(places)
            self._captures = {name: Capture(name, "logits", self.owner) for name in names}
        for capture in self._captures.values():
            capture.attach(module, places)

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
        self.looked = True
        names = list(self._captures) if self._names is None else self._names
        found = {name: logits for name in names if (logits := self._logits(name, rows)) is not None}
        self.clear()
        if found:
            self._names = list(found)
        elif self._names and not self._warned:
            self._warned = True
            warn_user(
                f"The network's logits were the output of {shown_name(self._names[0])} before, but this step gives "
                f"none, so the head's own labels are judged. {self._remedy}",
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


def logits_candidates(places: Places) -> list[str]:
    """Names of the modules whose output may be the logits, in order of preference.

    >>> logits_candidates(Places("net.2.fc")), logits_candidates(Places("fc", normalised=True))
    (['', 'net', 'net.2', 'net.2.fc'], ['fc'])
    """
    if places.normalised:  # the modules around give probabilities
        return [places.last]
    parts = places.last.split(".")
    return [".".join(parts[:depth]) for depth in range(len(parts) + 1)]


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

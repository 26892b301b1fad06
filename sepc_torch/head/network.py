"""Places inside a network: its last linear layer and earlier stages, found by tracing one batch, and read in one pass.

:func:`find_places` runs the network once and notes which module was called with what. :class:`TappedNetwork` then runs
the network with hooks at these places, so that one forward pass gives logits, embeddings and earlier layers.
"""

from __future__ import annotations

import difflib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from sepc_torch.data.text import printable
from sepc_torch.data.warn import warn_user
from sepc_torch.head.reading.layers import layer_rows

# Number of earlier stages that are chosen by default.
_STAGES = 3
# Names of submodules that an error lists.
_LISTED = 12
# Names of the labels in a batch that is a dictionary, and of the logits in an output that is one.
LABELS = ("labels", "label", "targets", "target", "y")
_LOGITS = ("logits", "out", "output", "scores")
# Functions at the end of a network whose input is the logits; the classes are the second dimension, of tokens the last.
_NORMALISATIONS: tuple[Callable[[Tensor], Tensor], ...] = (
    *(partial(torch.softmax, dim=dim) for dim in (1, -1)),
    *(partial(torch.log_softmax, dim=dim) for dim in (1, -1)),
    torch.sigmoid,
    nn.functional.logsigmoid,
)


class Places(NamedTuple):
    """Names of the last linear layer of a network, and of the earlier stages to read.

    ``normalised`` says that the network's output is a softmax or sigmoid of that layer's, whose result is then taken as
    the logits; otherwise the output is.
    """

    last: str
    layers: tuple[str, ...] = ()
    normalised: bool = False


class _Call(NamedTuple):
    """One call of a module: its name, the name of its caller, its input and its output, as tensors where they are."""

    name: str
    parent: str
    given: Tensor | None
    made: Tensor | None


def find_places(
    network: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    layer: str = "auto",
    layers: Sequence[str] | Literal["auto"] | None = "auto",
) -> Places:
    """Find the last linear layer of a network and up to three earlier stages, with one forward pass of a batch.

    The last linear layer (``nn.Linear``, or a convolution of one position) is the one that makes the network's output;
    if the output is computed from it, for example by softmax or an average over positions, the one that ran last. The
    stages are spread evenly over the places where the shape of the activations changes or, in a transformer, over its
    blocks.

    Args:
        network: The network, in evaluation mode.
        args: The inputs of the batch.
        kwargs: The inputs by name.
        layer: The name of the last linear layer, or ``"auto"``.
        layers: The names of the stages, ``"auto"``, or None for none.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
    >>> find_places(net, (torch.ones(2, 4),), {})
    Places(last='4', layers=('1', '2'), normalised=False)
    """
    calls: list[_Call] = []
    names = {module: name for name, module in network.named_modules()}
    stack: list[str] = []

    def enter(module: nn.Module, _args: Any) -> None:
        stack.append(names[module])

    def leave(module: nn.Module, given: Any, named: Any, made: Any) -> None:
        stack.pop()
        first = given[0] if given else next(iter(named.values()), None)
        calls.append(_Call(names[module], stack[-1] if stack else "", _tensor(first), _tensor(made)))

    handles = []
    for module in names:
        handles += [
            module.register_forward_pre_hook(enter),
            module.register_forward_hook(leave, with_kwargs=True, always_call=False),
        ]
    try:
        with torch.no_grad(), _eager():
            output = network(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    logits = output_logits(output)
    last = _last_linear(network, calls, logits, layer)
    made = next(call.made for call in reversed(calls) if call.name == last)
    assert made is not None
    normalised = made.dim() > 1 and any(_equal(function(made), logits) for function in _NORMALISATIONS)
    if layer == "auto" and made.dim() == logits.dim() <= 2 and not (normalised or _equal(made, logits)):
        warn_user(
            f"The logits are not the output of the linear layer {last!r}, whose input is taken as the embedding: "
            "something else computes them. If another module does, name it.",
        )
    maps = logits.dim() > 2 and logits.shape[2:].numel() > 1  # a label for every position
    if layers is None or (layers == "auto" and maps):
        return Places(last, (), normalised)
    if layers != "auto":
        if isinstance(layers, str):
            raise TypeError(f"layers must be a list of names, 'auto' or None, got {layers!r}; pass [{layers!r}].")
        if last in layers or len(set(layers)) < len(layers):
            raise ValueError(f"layers names a module twice, or the last layer {last!r}: {list(layers)}.")
        for name in layers:
            submodule(network, name, "layers")
            if not any(call.name == name and call.made is not None for call in calls):
                raise ValueError(f"layers names {name!r}, which gave no tensor of activations for this batch.")
        return Places(last, tuple(layers), normalised)
    return Places(last, _stages(network, calls, last), normalised)


def _eager() -> AbstractContextManager[Any]:
    """Context in which compiled modules run as they were written: a graph would keep the hooks of the trace."""
    compiled = "torch._dynamo" in sys.modules and hasattr(torch.compiler, "set_stance")  # torch 2.6
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()


def _last_linear(network: nn.Module, calls: list[_Call], output: Tensor, layer: str) -> str:
    """The name of the module whose input is the embedding."""
    if layer != "auto":
        submodule(network, layer, "layer")
        if not any(call.name == layer and call.given is not None and call.made is not None for call in calls):
            raise ValueError(f"layer={layer!r} was not called with a tensor in the forward pass of this batch.")
        return layer
    linear = [
        call
        for call in calls
        if call.given is not None and call.made is not None and _is_linear(network.get_submodule(call.name))
    ]
    if not linear:
        raise ValueError(
            "No linear layer was found in the network. Name the module whose input is the embedding and whose output "
            f"is the logits. The network has {_some_names(network)}."
        )
    same = [call for call in linear if call.made is output or _equal(call.made, output)]
    # Columns of the output: other linear layers that ran late, such as those of gates, have another width.
    columns = output.shape[1] if output.dim() > 1 else 1
    wide = [call for call in linear if columns in (call.made.shape[1], call.made.shape[-1])]  # type: ignore[union-attr]
    return (same or wide or linear)[-1].name


def _is_linear(module: nn.Module) -> bool:
    if isinstance(module, (nn.Conv1d, nn.Conv2d)):
        return all(size == 1 for size in module.kernel_size)
    # LazyLinear becomes Linear at its first call; transformers' Conv1D is a linear layer with a transposed weight.
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _equal(made: Tensor | None, output: Tensor) -> bool:
    """Whether a layer's result is the output, up to rounding, a reshape or a dimension of size one."""
    if made is None or made.numel() != output.numel():
        return False
    made = made.reshape(output.shape).to(output.dtype)  # mixed precision may turn the output into float32
    return torch.allclose(made, output, rtol=1e-3, atol=1e-5, equal_nan=True)


def _stages(network: nn.Module, calls: list[_Call], last: str) -> tuple[str, ...]:
    """Names of up to three modules before the last linear layer, spread evenly over the depth."""
    end = max(i for i, call in enumerate(calls) if call.name == last)
    embedding = calls[end].given
    assert embedding is not None
    rows = len(embedding)
    counts: dict[str, int] = {}
    for call in calls:
        counts[call.name] = counts.get(call.name, 0) + 1
    around = {"", *(last[:i] for i, letter in enumerate(last) if letter == ".")}
    usable = [
        call
        for call in calls[:end]
        if call.made is not None
        and call.made.is_floating_point()
        and call.made.dim() in (2, 3, 4)
        and len(call.made) == rows
        and counts[call.name] == 1
        and call.name not in around
        # Not a view of what came in: a reshape, or dropout in evaluation mode.
        and not (call.given is not None and call.made.data_ptr() == call.given.data_ptr())
    ]
    # Modules are opened, the network first and then what is inside, until there are enough places.
    opened = {""}
    parent_of = {call.name: call.parent for call in calls}
    while True:
        level = [call for call in usable if call.parent in opened and call.name not in opened]
        blocks = _blocks(network, level)
        level = [call for call in level if not _pools_to(call.made, embedding)]
        places = _shape_changes(level)
        # A pooled stage is the same place as the stage.
        copies = {i for i, (call, then) in enumerate(pairwise(places)) if _pools_to(call.made, then.made)}
        places = [call for i, call in enumerate(places) if i not in copies]
        found = max(places, blocks, key=len)
        inside = {call.parent for call in usable} - opened
        deeper = {name for name in inside if parent_of[name] in opened}
        if len(found) >= _STAGES or not deeper:
            break
        opened |= deeper
    found = found if len(found) > 1 else level
    if len(found) > _STAGES:
        found = [found[-(-len(found) * k // _STAGES) - 1] for k in range(1, _STAGES + 1)]
    return tuple(call.name for call in found)


def _shape_changes(level: list[_Call]) -> list[_Call]:
    """The last call of each run of activations of one shape."""
    shapes = [call.made.shape if call.made is not None else None for call in level]
    return [call for i, call in enumerate(level) if i + 1 == len(level) or shapes[i] != shapes[i + 1]]


def _blocks(network: nn.Module, level: list[_Call]) -> list[_Call]:
    """All but the last call of the commonest class of modules with children and one shape: blocks of a transformer."""
    kinds: dict[tuple[Any, Any], list[_Call]] = {}
    for call in level:
        module = network.get_submodule(call.name)
        if call.made is not None and any(True for _ in module.children()):
            kinds.setdefault((type(module), call.made.shape), []).append(call)
    return max(kinds.values(), key=len, default=[])[:-1]


def _pools_to(made: Tensor | None, other: Tensor | None) -> bool:
    """Whether two activations are the same, averaged over positions: one would add nothing to the other."""
    assert made is not None
    assert other is not None
    rows, mean = (layer_rows(channels_first(x), "") for x in (other, made))
    return mean.shape == rows.shape and torch.allclose(mean.float(), rows.float(), atol=1e-4)


def channels_first(x: Tensor) -> Tensor:
    """A map (B, C, H, W); a square map (B, H, W, C), as some transformers have, is turned.

    >>> channels_first(torch.ones(2, 7, 7, 96)).shape, channels_first(torch.ones(2, 3, 8, 8)).shape
    (torch.Size([2, 96, 7, 7]), torch.Size([2, 3, 8, 8]))
    """
    return x.movedim(-1, 1) if x.dim() == 4 and x.shape[1] == x.shape[2] != x.shape[3] else x


def _tensor(value: Any) -> Tensor | None:
    """A tensor, or the first one of a tuple or list; None for the nested tensors of masked transformers."""
    if isinstance(value, (tuple, list)) and value:
        value = value[0]
    return value if isinstance(value, Tensor) and not value.is_nested and value.dim() > 0 else None


def output_logits(output: Any) -> Tensor:
    """The logits in the output of a network: a tensor, or that of a tuple, of a dictionary or in ``.logits``.

    >>> output_logits({"loss": torch.tensor(0.0), "logits": torch.ones(2, 3)}).shape
    torch.Size([2, 3])
    """
    found = output
    if isinstance(output, Mapping):
        found = next((output[name] for name in _LOGITS if name in output), None)
    elif hasattr(output, "logits"):
        found = output.logits
    elif isinstance(output, (tuple, list)) and output:
        found = output[0]
        if isinstance(found, Mapping) and "boxes" in found:
            raise TypeError(
                "The network returns boxes: detection has no single label for a picture. Take boxes as rows: fit a "
                "TrustHead to the features and logits of each box."
            )
    if not isinstance(found, Tensor) or not found.is_floating_point():
        kind = f"{found.dtype} tensor" if isinstance(found, Tensor) else type(output).__name__
        raise TypeError(
            f"The network returned a {kind} without logits; expected a tensor of floating-point numbers, a tuple that "
            f"starts with one, a dictionary with one of {_LOGITS}, or an object with .logits."
        )
    return found


def submodule(network: nn.Module, name: str, argument: str) -> nn.Module:
    """The submodule that an argument names; an unknown name raises ValueError with the names that there are.

    >>> submodule(nn.Sequential(nn.Linear(4, 8)), "0", "layer")
    Linear(in_features=4, out_features=8, bias=True)
    """
    try:
        return network.get_submodule(name)
    except AttributeError:
        names = [known for known, _ in network.named_modules() if known]
        close = difflib.get_close_matches(name, names, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(
            f"{argument}: {name!r} names no submodule of {type(network).__name__}.{hint} It has {_some_names(network)}."
        ) from None


def _some_names(network: nn.Module) -> str:
    names = [printable(repr(name)) for name, _ in network.named_modules() if name]
    return ", ".join(names[:_LISTED]) + (", ..." if len(names) > _LISTED else "")


class _Store:
    """What the hooks of one forward pass saw, by thread: replicas of ``nn.DataParallel`` run in threads."""

    def __init__(self) -> None:
        self.passes: dict[int, dict[str, Any]] = {}

    def key(self) -> int:
        """The number of the thread; compiled code has one pass at a time."""
        return 0 if torch.compiler.is_compiling() else threading.get_ident()

    @contextmanager
    def reading(self) -> Iterator[dict[str, Any]]:
        """Context of one forward pass."""
        key = self.key()
        self.passes[key] = {}
        try:
            yield self.passes[key]
        finally:
            del self.passes[key]


class _Tap:
    """Forward hook that stores the output of a module or, for the last linear layer, its input and output.

    An object, not a closure: a copy of a network gets hooks that write to the store of the copy.
    """

    def __init__(self, store: _Store, name: str, last: bool) -> None:
        self.store, self.name, self.last = store, name, last

    def __call__(self, _module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        found = self.store.passes.get(self.store.key())
        if found is None:
            return
        if self.last:
            given = args[0] if args else next(iter(kwargs.values()))
            found.setdefault("last", []).append((given, _tensor(output)))
        else:
            found[f"layer {self.name}"] = _tensor(output)


class TappedNetwork(nn.Module):
    """A network whose forward pass also returns the embedding, the output of the last linear layer, and the stages.

    Args:
        network: The network.
        places: Where to read.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> output, embedding, linear, layers = TappedNetwork(net, Places("2"))(torch.ones(2, 4))
    >>> output is linear, embedding.shape
    (True, torch.Size([2, 8]))
    """

    def __init__(self, network: nn.Module, places: Places) -> None:
        super().__init__()
        self.network, self.places = network, places
        self._store = _Store()
        self._handles = [
            submodule(network, name, "layer").register_forward_hook(
                _Tap(self._store, name, last=name == places.last), with_kwargs=True
            )
            for name in (places.last, *places.layers)
        ]

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Any, Tensor, Tensor, tuple[Tensor, ...]]:
        """Run the network; return its output, the embedding, the last linear layer's output, and the stages."""
        with self._store.reading() as found:
            output = self.network(*args, **kwargs)
        wanted = "last", *(f"layer {name}" for name in self.places.layers)
        missing = [name for name in wanted if name not in found]
        if missing:
            raise RuntimeError(
                f"The forward pass did not reach {missing}. After detach, or if a module was replaced since the "
                "network was wrapped, fit or load again; if the network was compiled before, wrap the plain network "
                "and compile the TrustedModel."
            )
        layers = tuple(found[f"layer {name}"] for name in self.places.layers)
        # A layer that is called several times: the call that made the output, if there is one.
        calls, logits = found["last"], output_logits(output)
        embedding, linear = next((call for call in calls if call[1] is logits), calls[-1])
        return output, embedding, linear, layers

    def remove(self) -> None:
        """Remove the hooks from the network."""
        for handle in self._handles:
            handle.remove()


def unwrapped(network: nn.Module) -> nn.Module:
    """The network inside ``torch.compile``, ``nn.DataParallel`` and ``DistributedDataParallel``."""
    while True:
        inner = getattr(network, "_orig_mod", None)
        if inner is None and isinstance(network, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            inner = network.module
        if not isinstance(inner, nn.Module):
            return network
        network = inner

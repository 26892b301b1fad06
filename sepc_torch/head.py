r"""A trust head for the embeddings of a neural network: normalise, project, partition, freeze.

::

    head = TrustHead.fit(embeddings, labels)        # arrays or tensors, or a DataLoader and the encoder
    out = head(encoder(x), logits=classifier(encoder(x)))
    out.network_trust                               # how far to trust the network's own label
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor, nn

from sepc_torch import storage
from sepc_torch.ellipsoid import DEFAULT_FLOOR
from sepc_torch.explaining import Explanation
from sepc_torch.inputs import count, training_set
from sepc_torch.prediction import Prediction
from sepc_torch.progress import Choice
from sepc_torch.projection import Method, Normalize, Projection, fit_projection
from sepc_torch.sepc import SEPC, NanPolicy, Nearest, resize_buffers
from sepc_torch.shapes import Array, Float, Int

# More dimensions than this gained nothing on any data set tried, and cost time (experiments/head_defaults.py).
_MOST_DIMENSIONS = 32
# Fewer than this are hardly a picture of an embedding; it is said when a tiny class is the reason.
_FEW_DIMENSIONS = 4


class HeadPrediction(NamedTuple):
    """What the head says of a batch; every field is a tensor (B,).

    The first seven are those of :class:`~sepc_torch.Prediction`, for the head's own label. The others judge the
    network's label in the same place; without logits or labels they repeat the head's own.

    Attributes:
        label, trust, rule, distance, margin, nearest, runner_up: As in ``Prediction``.
        network_label: The label the network gave.
        network_trust: Trust in that label.
        network_margin: Distance to the nearest ellipsoid of another class over that to the nearest of the network's.
    """

    label: Int[Tensor, "B"]
    trust: Float[Tensor, "B"]
    rule: Int[Tensor, "B"]
    distance: Float[Tensor, "B"]
    margin: Float[Tensor, "B"]
    nearest: Int[Tensor, "B"]
    runner_up: Int[Tensor, "B"]
    network_label: Int[Tensor, "B"]
    network_trust: Float[Tensor, "B"]
    network_margin: Float[Tensor, "B"]

    def abstain(self, threshold: float = 0.5, outside: bool = True) -> Tensor:
        """Which of the network's labels to refuse: low trust in them, or a point outside every ellipsoid."""
        own = Prediction(*self[:7])._replace(label=self.network_label, trust=self.network_trust)
        return own.abstain(threshold, outside)


class TrustHead(nn.Module):
    """SEP-C on projected embeddings, with the labels of a network judged beside its own.

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> labels = np.repeat([0, 1], 200)
    >>> embeddings = rng.normal(size=(400, 16)) + 3.0 * labels[:, None]
    >>> head = TrustHead.fit(embeddings, labels, normalize="standardize")
    >>> out = head(torch.tensor(embeddings[:2]), logits=torch.tensor([[2.0, 0.0], [0.0, 2.0]]))
    >>> out.network_label.tolist(), (out.network_trust > 0.5).tolist()
    ([0, 1], [True, False])
    """

    def __init__(self, projection: Projection, sepc: SEPC) -> None:
        super().__init__()
        self.projection = projection
        self.sepc = sepc

    @classmethod
    def fit(
        cls,
        embeddings: Any,
        labels: Any = None,
        *,
        encoder: Callable[[Any], Tensor] | None = None,
        dim: int | None = None,
        normalize: Normalize = "l2",
        projection: Method = "pca",
        max_impure: int | None = None,
        nearest: Nearest = "mahalanobis",
        nan_policy: NanPolicy = "raise",
        floor: float = DEFAULT_FLOOR,
        solver: str = "native",
        n_jobs: int | None = None,
        progress: Choice = "auto",
        classes: Any = None,
    ) -> TrustHead:
        r"""Fit a head to labelled embeddings.

        Args:
            embeddings: (N, D) array or tensor on any device; or an iterable of batches ``(inputs, labels)`` such as a
                ``DataLoader``, with ``encoder`` to turn inputs into embeddings.
            labels: (N,) labels; not with an iterable of batches, which brings its own.
            encoder: The network up to its embedding; run without gradients, in evaluation mode, where it was.
            dim: Dimensions to project on. By default :math:`\min(32, \lfloor\sqrt{n}\rfloor, D)` for the smallest
                class's :math:`n`: an ellipsoid in :math:`r` dimensions leans on about :math:`r^2 / 2` points, and
                should have more.
            normalize: ``"l2"`` puts embeddings on the unit sphere, which helps distances on most networks;
                ``"standardize"`` divides features by their standard deviation; ``None`` takes them as they are.
            projection: ``"pca"``, or ``"lda"`` to use the labels.
            max_impure: Foreign points an ellipsoid may hold. By default one in a hundred of the median class, at
                least 2.
            nearest: How points outside every ellipsoid find the nearest; see :meth:`SEPC.from_partition`.
            nan_policy: ``"raise"`` or ``"flag"`` embeddings that hold NaN or, with ``"l2"``, nothing but zeros.
            floor: Least semi-axis, in standard deviations.
            solver: ``"native"`` or the name of an installed cvxpy solver.
            n_jobs: Processes, as in joblib.
            progress: ``"auto"`` shows a bar on a terminal for long fits.
            classes: The labels in the order of the network's logits; by default sorted.
        """
        from sepc_torch.partitioning import partition  # a frozen head runs where the offline half is not installed

        if normalize not in ("l2", "standardize", None):
            raise ValueError(f"normalize must be 'l2', 'standardize' or None, got {normalize!r}.")
        if projection not in get_args(Method):
            raise ValueError(f"projection must be 'pca' or 'lda', got {projection!r}.")
        embeddings, labels = _gather(embeddings, labels, encoder)
        data = training_set(embeddings, labels, classes, least_per_class=1)
        sizes = np.bincount(data.codes)
        features = data.points.shape[1]
        if dim is None:
            dim = _default_dim(sizes, features)
            if dim < min(_FEW_DIMENSIONS, features):
                warnings.warn(
                    f"The smallest class has {sizes.min()} points, so embeddings are projected on {dim} dimensions. "
                    "Leave that class out, or choose dim.",
                    stacklevel=2,
                )
        elif count(dim, "dim", least=1) > features:
            raise ValueError(f"dim={dim} is more than the {features} features of the embeddings.")
        max_impure = max(2, round(float(np.median(sizes)) / 100)) if max_impure is None else max_impure
        if normalize == "l2" and not np.any(data.points, axis=1).all():
            raise ValueError(
                "Some embeddings are all zeros and have no direction; drop them, or choose normalize=None."
            )
        project = fit_projection(data.points, data.codes, dim, normalize, projection)
        if sizes.max() < len(project.matrix):
            raise ValueError(
                f"No class has {len(project.matrix)} points, one per dimension; choose dim <= {sizes.max()}."
            )
        _warn_of_small_classes(sizes, len(project.matrix), data.classes)
        # In the arithmetic in which the head will see embeddings again, so that training points land where they were.
        points = project(torch.from_numpy(data.points).float()).double().numpy()
        part = partition(
            points,
            data.classes[data.codes],
            max_impure=max_impure,
            solver=solver,
            standardize=False,
            floor=floor,
            n_jobs=n_jobs,
            progress=progress,
            classes=data.classes,
        )
        sepc = SEPC.from_partition(part, nearest, nan_policy=nan_policy)
        sepc.feature_names = tuple(f"component {j}" for j in range(sepc.dim))
        return cls(project, sepc)

    @property
    def classes(self) -> list[Any]:
        """The labels, in the order of indices."""
        return self.sepc.classes

    @property
    def in_features(self) -> int:
        """Number of features D of the embeddings."""
        return self.projection.shift.shape[0]

    def forward(self, z: Tensor, logits: Tensor | None = None, labels: Tensor | None = None) -> HeadPrediction:
        """Judge a batch of embeddings (B, D), and the network's labels for them where given as logits or as indices."""
        if logits is not None and labels is not None:
            raise ValueError("Give logits or labels, not both: each says what the network predicted.")
        if logits is not None:
            if logits.shape != (z.shape[0], len(self.classes)):
                raise ValueError(
                    f"logits must have shape {(z.shape[0], len(self.classes))}, a column for each class, "
                    f"got {tuple(logits.shape)}."
                )
            if not torch.compiler.is_compiling() and bool(logits.isnan().any()):
                raise ValueError("logits hold NaN: the network gave no label there. Drop those rows.")
            labels = logits.argmax(dim=1)
        own, given = self.sepc.judge(self.projection(z), labels)
        return HeadPrediction(*own, given.label, given.trust, given.margin)

    @torch.no_grad()
    def explain(self, z: Any, i: int | None = None) -> Explanation | list[Explanation]:
        """Say why, in terms of the projected features; see :meth:`SEPC.explain`."""
        points = self.sepc.as_tensor(z)
        projected = self.projection(points if points.dim() == 2 else points.unsqueeze(0))
        return self.sepc.explain(projected if points.dim() == 2 else projected[0], i)

    @torch.no_grad()
    def predict(self, z: Any) -> np.ndarray[Any, np.dtype[Any]]:
        """The head's own labels, as a NumPy array of the user's labels."""
        return self.sepc.predict(self.projection(self.sepc.as_tensor(z)))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the head to a safetensors file: no pickle, no training point."""
        state = self.state_dict()
        arrays = {name: value.cpu().numpy() for name, value in state.items() if isinstance(value, Tensor)}
        storage.write(path, "trust_head", arrays, {"sepc": self.sepc.get_extra_state(), **self.get_extra_state()})

    @classmethod
    def load(cls, path: str | os.PathLike[str], device: torch.device | str = "cpu") -> TrustHead:
        """Read a head that :meth:`save` wrote, onto a device."""
        arrays, metadata = storage.read(path, "trust_head")
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        projection = Projection(
            tensors["projection.shift"], tensors["projection.matrix"], unit_length=metadata["unit_length"]
        )
        inner = {name.removeprefix("sepc."): tensor for name, tensor in tensors.items() if name.startswith("sepc.")}
        return cls(projection, SEPC.from_tensors(inner, metadata["sepc"])).to(device)

    def get_extra_state(self) -> dict[str, Any]:
        """Options that no buffer holds."""
        return {"unit_length": self.projection.unit_length}

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Take over the options."""
        self.projection.unit_length = bool(state["unit_length"])

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        resize_buffers(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)


def _gather(embeddings: Any, labels: Any, encoder: Callable[[Any], Tensor] | None) -> tuple[Any, Any]:
    """Embeddings and labels as given, or collected from batches through the encoder."""
    is_array = isinstance(embeddings, (Tensor, np.ndarray, list, tuple)) or hasattr(embeddings, "columns")
    if encoder is None:
        if not is_array:
            raise TypeError(
                f"embeddings must be an array or a tensor, got {type(embeddings).__name__}; batches need an encoder."
            )
        if labels is None:
            raise ValueError("labels are missing; only batches with an encoder bring their own.")
        return embeddings, labels
    if labels is not None:
        raise ValueError("With an encoder the batches bring the labels; do not give labels as well.")
    return _encode(embeddings, encoder)


@torch.no_grad()
def _encode(batches: Iterable[Any], encoder: Callable[[Any], Tensor]) -> tuple[Array, Array]:
    module = encoder if isinstance(encoder, nn.Module) else None
    was_training = module is not None and module.training
    device = next((p.device for p in module.parameters()), None) if module is not None else None
    found: list[Array] = []
    labels: list[Array] = []
    try:
        if module is not None:
            module.eval()
        for batch in batches:
            if not isinstance(batch, (tuple, list)) or len(batch) != 2:
                size = f" of {len(batch)}" if isinstance(batch, (tuple, list)) else ""
                raise TypeError(
                    f"Every batch must be a pair (inputs, labels), got a {type(batch).__name__}{size}. Wrap it: "
                    "TrustHead.fit(((b['x'], b['y']) for b in loader), encoder=...)."
                )
            inputs, targets = batch
            z = encoder(inputs.to(device) if device is not None and isinstance(inputs, Tensor) else inputs)
            if not isinstance(z, Tensor):
                raise TypeError(
                    f"The encoder must return a tensor of embeddings, got a {type(z).__name__}; take the right entry."
                )
            found.append(z.flatten(1).float().cpu().numpy())
            labels.append(np.asarray(targets))
    finally:
        if module is not None and was_training:
            module.train()
    if not found:
        raise ValueError("The batches are empty: there is nothing to fit.")
    return np.concatenate(found), np.concatenate(labels)


def _default_dim(sizes: Int[Array, "C"], features: int) -> int:
    return int(max(1, min(_MOST_DIMENSIONS, np.sqrt(sizes.min()), features)))


def _warn_of_small_classes(sizes: Int[Array, "C"], dim: int, classes: Array) -> None:
    small = [label for label, size in zip(classes.tolist(), sizes.tolist(), strict=True) if size < 2 * dim]
    if small:
        shown = ", ".join(map(repr, small[:5])) + (f" and {len(small) - 5} more" if len(small) > 5 else "")
        warnings.warn(
            f"{len(small)} classes have fewer than {2 * dim} points for {dim} dimensions: {shown}. Many of their "
            "points will stay isolated; choose a smaller dim or add data.",
            stacklevel=3,
        )

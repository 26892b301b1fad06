r"""Frozen SEP-C classifier: torch module that maps points to label, trust and rule."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from sepc_torch.data import files
from sepc_torch.data.options import check_choice, usable_device
from sepc_torch.ellipsoid import SURFACE_TOLERANCE
from sepc_torch.model import torch_ops
from sepc_torch.model.bank import EllipsoidBank
from sepc_torch.model.derived import Derived, buffer_of, resize_buffers
from sepc_torch.model.device_sync import can_synchronize, warm_up
from sepc_torch.model.explanation import Explanation, ModelParts, explain_rows
from sepc_torch.model.judging import judge_distances
from sepc_torch.model.kernels import (
    Kernel,
    Kernels,
    addressable,
    available,
    decide_distances,
    decide_points,
    kernels_for,
)
from sepc_torch.model.prediction import Prediction, bad_rows, predict_for_label, predictions_from_kernel, with_gradient
from sepc_torch.model.queries import class_indices, points_as_tensor, refuse_bad_rows, select_row
from sepc_torch.model.rules import Resolution, TrainingCounts, resolve
from sepc_torch.model.trust import posterior
from sepc_torch.partitioning.cells import Ledger
from sepc_torch.partitioning.record import Partition
from sepc_torch.shapes import Bool, Float, Int

Nearest = Literal["mahalanobis", "euclidean"]
NanPolicy = Literal["raise", "flag"]


class SEPC(Derived):
    r"""The paper's classifier with a fixed partition.

    The module holds buffers only: no parameter to train and no training point. Construct it with
    :meth:`from_partition` or :meth:`load`.

    On a CUDA device kernels process the batch in pieces of bounded memory. With ``nan_policy="flag"`` and
    ``nearest="mahalanobis"`` this path synchronises only to validate given labels. ``nan_policy="raise"`` synchronises
    to raise an error for NaN, and ``nearest="euclidean"`` synchronises to select the points outside every ellipsoid.

    For large batches a screening pass in float16 bounds the distances first. The bounds are rigorous, so every field
    is equal with and without screening; set ``screen`` to False to disable it.

    >>> import torch
    >>> from sepc_torch import Rule, partition
    >>> part = partition([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [5.0, 5.0], [6.0, 5.0], [5.0, 6.0]], [0, 0, 0, 1, 1, 1])
    >>> sepc = SEPC.from_partition(part)
    >>> out = sepc(torch.tensor([[0.3, 0.3], [4.0, 4.0]]))
    >>> out.label.tolist(), [Rule(r).name for r in out.rule.tolist()], out.trust.tolist()
    ([0, 1], ['SINGLE', 'OUTSIDE'], [1.0, 1.0])
    """

    derived = ("_kernels",)
    codes: Tensor
    cell_sizes: Tensor
    held: Tensor
    totals: Tensor
    scale: Tensor
    axis_centers: Tensor
    axis_directions: Tensor
    axis_lengths: Tensor

    def __init__(
        self,
        bank: EllipsoidBank,
        training_counts: TrainingCounts,
        totals: Int[Tensor, "C"],
        scale: Float[Tensor, "D"],
        *,
        classes: list[Any],
        feature_names: tuple[str, ...] | None = None,
        nearest: Nearest = "mahalanobis",
        nan_policy: NanPolicy = "raise",
        made: Mapping[str, Any] | None = None,
        screen: bool = True,
    ) -> None:
        super().__init__()
        check_choice("nearest", nearest, get_args(Nearest))
        check_choice("nan_policy", nan_policy, get_args(NanPolicy))
        self.bank = bank
        for name, tensor in training_counts._asdict().items():
            self.register_buffer(name, tensor, persistent=name != "held")  # derived from the other tables
        self.register_buffer("totals", totals)
        self.register_buffer("scale", scale)
        self.classes = list(classes)
        self.feature_names = feature_names
        self.nearest: Nearest = nearest
        self.nan_policy: NanPolicy = nan_policy
        self.made = dict(made or {})
        self.screen = screen
        self.restore()

    def restore(self) -> None:
        """Derive the principal axes that Euclidean distances need, and the kernels' tables."""
        if self.nearest == "euclidean":
            axes = self.bank.principal_axes(self.scale)
            for name, tensor in zip(("axis_centers", "axis_directions", "axis_lengths"), axes, strict=True):
                self.register_buffer(name, tensor, persistent=False)
        self.derive()

    def derive(self) -> None:
        """Derive the kernels' tables."""
        self._kernels: Kernels | None = None
        if self.bank.kernel != "torch" and available(self.codes) and addressable(self.training_counts):
            self._kernels = kernels_for(
                self.bank.offsets, self.bank.whiteners, self.bank.prepared, self.training_counts, self.totals
            )

    @classmethod
    def from_partition(
        cls,
        partition: Partition,
        nearest: Nearest = "mahalanobis",
        *,
        nan_policy: NanPolicy = "raise",
        dtype: torch.dtype = torch.float32,
        kernel: Kernel = "auto",
    ) -> SEPC:
        """Build the classifier from a partition.

        Args:
            partition: The result of :func:`~sepc_torch.partition`.
            nearest: Distance that defines the nearest ellipsoid of a point outside every ellipsoid:
                ``"mahalanobis"``, which needs no further computation, or ``"euclidean"``, the paper's convex program
                (solved for the whole batch).
            nan_policy: Treatment of rows that hold NaN or infinity: ``"raise"`` raises an error, ``"flag"`` gives them
                label -1 and trust 0.
            dtype: float32, or float64 for the accuracy of the partition itself. Float32 cannot represent ellipsoids
                that are small relative to their distance from zero (below about 1e-11 of it); a warning says so.
            kernel: ``"torch"`` disables the CUDA kernels for distances and decisions; the other values are those of
                :class:`~sepc_torch.model.bank.EllipsoidBank`.
        """
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"dtype must be torch.float32 or torch.float64, got {dtype}: distances need at least float32."
            )
        bank = EllipsoidBank(
            torch.from_numpy(np.stack([e.center for e in partition.ellipsoids])),
            torch.from_numpy(np.stack([e.whitener for e in partition.ellipsoids])),
            kernel=kernel,
        ).to(dtype)
        finite = all(bool(torch.isfinite(buffer).all()) for buffer in bank.buffers())
        least = float(bank.whiteners.abs().amax(dim=1).min())  # numbers below the smallest normal one lose digits
        if not finite or least < torch.finfo(dtype).tiny:
            raise ValueError(
                f"The ellipsoids exceed the range of {dtype}; scale the features, or use dtype=torch.float64."
            )
        return cls(
            bank,
            TrainingCounts.from_ledger(torch.from_numpy(partition.codes), partition.ledger, dtype),
            torch.from_numpy(partition.class_counts),
            torch.from_numpy(partition.scale).to(dtype),
            classes=partition.classes.tolist(),
            feature_names=partition.feature_names,
            nearest=nearest,
            nan_policy=nan_policy,
            made=partition.made,
        )

    @property
    def dim(self) -> int:
        """Number of features D."""
        return self.bank.dim

    @property
    def training_counts(self) -> TrainingCounts:
        """Class counts of the training set, for the rules."""
        return TrainingCounts(*(self._buffers[name] for name in TrainingCounts._fields))  # type: ignore[arg-type]

    def extra_repr(self) -> str:
        """Sizes of the model for ``repr``."""
        return (
            f"{len(self.bank)} ellipsoids, {len(self.classes)} classes, {self.dim} features, "
            f"{len(self.cell_sizes)} cells, nearest={self.nearest!r}"
        )

    def forward(self, z: Tensor, label: Tensor | None = None) -> Prediction:
        """Predict label, trust and rule of a batch.

        Args:
            z: Points (B, D).
            label: Labels (B,) from another source, as indices into ``classes``. Label, trust, margin and runner-up
                then refer to the given labels; rule, distance and nearest ellipsoid depend on the points only.
        """
        own, given = self.judge(z, label)
        return own if label is None else given

    def judge(self, z: Tensor, label: Tensor | None = None, *, checked: bool = False) -> tuple[Prediction, Prediction]:
        """Predict for the model's own labels and for given labels, by default the model's own.

        Rule, distance and nearest ellipsoid are equal in both predictions. With ``checked`` the caller guarantees valid
        indices and refuses rows without a finite distance itself: the checks here, which synchronise with a GPU, are
        skipped.
        """
        if label is not None:
            label = label.long() if checked else self._indices(label, z)
        kernels = self._kernels
        # The tables of a copied or loaded module can be on another device than its points.
        if kernels is None or getattr(z, "device", None) != kernels.tables.codes.device or not z.is_cuda:
            own, given = self._by_torch(z, label)
        else:
            own, given = self._by_kernel(z, label, kernels)
        if not checked:
            self._refuse_bad_rows(own.label < 0, z.dtype)
        return own, given

    def _by_torch(self, z: Tensor, label: Int[Tensor, "B"] | None) -> tuple[Prediction, Prediction]:
        distance = self.bank(z)
        return judge_distances(distance, self._nearness(z, distance), label, self.training_counts, self.totals)

    def _by_kernel(self, z: Tensor, label: Int[Tensor, "B"] | None, kernels: Kernels) -> tuple[Prediction, Prediction]:
        differentiates = torch.is_grad_enabled() and z.requires_grad
        if self.bank.prepared_for(z) is not None and self.nearest == "mahalanobis" and not differentiates:
            return predictions_from_kernel(
                *decide_points(z, label, self.bank.origin, kernels, screening=self.screen), label
            )
        distance = self.bank(z)
        decided = decide_distances(distance.detach(), self._nearness(z, distance), label, kernels)
        own, given = predictions_from_kernel(*decided, label)
        if differentiates:
            own, given = (with_gradient(prediction, distance, self.training_counts) for prediction in (own, given))
        return own, given

    def posterior(self, z: Tensor, label: Tensor | None = None) -> Float[Tensor, "B C"]:
        """The probability of every class given the class counts of the point's region.

        The point itself counts with ``label``, by default the label of the rules. That label is usually, but not
        always, the likeliest class: the union decides a tie, and Bayes' formula weights the counts by class size.
        """
        distance, found = self._resolve(z)
        bad = self._refuse_bad_rows(bad_rows(distance), z.dtype)
        counted = found.label if label is None else self._indices(label, z)
        return torch.where(bad[:, None], torch.nan, posterior(found.counts, self.totals, counted, distance.dtype))

    def _indices(self, label: Any, z: Tensor) -> Int[Tensor, "B"]:
        return class_indices(label, self.classes, z.shape[0], self.codes.device)

    def _resolve(self, z: Tensor) -> tuple[Float[Tensor, "B K"], Resolution]:
        distance = self.bank(z)
        return distance, resolve(distance.detach(), self.training_counts, self._nearness(z, distance))

    def _nearness(self, z: Tensor, distance: Float[Tensor, "B K"]) -> Float[Tensor, "B K"] | None:
        if self.nearest == "mahalanobis":
            return None
        dtype = distance.dtype
        wanted = (distance > 1.0 + SURFACE_TOLERANCE).all(dim=1)
        axes = (tensor.to(dtype) for tensor in (self.axis_centers, self.axis_directions, self.axis_lengths))
        return torch_ops.euclidean_distances(self.bank.relative(z.detach()) / self.scale.to(dtype), *axes, wanted)

    def _refuse_bad_rows(self, bad: Bool[Tensor, "B"], dtype: torch.dtype) -> Bool[Tensor, "B"]:
        """Raise an error for rows without a finite distance if ``nan_policy`` is ``"raise"``; return the mask.

        The check synchronises with a GPU. A compiled or captured graph cannot synchronise, so its rows are flagged
        under either policy.
        """
        if self.nan_policy == "raise" and can_synchronize(bad):
            refuse_bad_rows(bad, dtype)
        return bad

    def warmup(self, *rows: int) -> float:
        """Compile the kernels and allocate memory before the first request.

        Args:
            rows: Batch sizes; by default 1 and 4096, on CUDA also 32 768. Batch sizes of similar magnitude share
                compiled kernels.

        Returns:
            The elapsed seconds.

        >>> from sepc_torch import partition
        >>> sepc = SEPC.from_partition(partition([[0.0], [1.0], [5.0], [6.0]], [0, 0, 1, 1]))
        >>> sepc.warmup(1, 256) > 0
        True
        """

        def run(z: Tensor) -> None:
            self.judge(z)
            self.judge(z, self.codes.new_zeros(z.shape[0]), checked=True)

        return warm_up(run, self.bank.offsets, rows)

    @torch.no_grad()
    def predict(self, z: Any) -> np.ndarray[Any, np.dtype[Any]]:
        """Predict labels by name for an array, list of rows, DataFrame or tensor, as a NumPy array; None if flagged."""
        label = self(self.as_tensor(z)).label.cpu().numpy()
        names = np.array(self.classes)
        if (label >= 0).all():
            return names[label]
        return np.array([None if code < 0 else self.classes[code] for code in label], dtype=object)

    @torch.no_grad()
    def explain(self, z: Any, i: int | None = None) -> Explanation | list[Explanation]:
        """Explain predictions by rule, ellipsoids, counts, trust arithmetic, runner-up and features.

        Args:
            z: One point (D,) or a batch (B, D).
            i: Row of the batch to explain; by default all rows, as a list.
        """
        points, row = select_row(self.as_tensor(z), i)
        distance, found = self._resolve(points)
        bad = bad_rows(distance)
        if bool(bad.any()):
            raise ValueError(
                f"Row {int(bad.nonzero()[0]) if row is None else row} holds NaN, infinity or numbers too large for "
                f"{distance.dtype}: it has no prediction to explain. Leave this row out."
            )
        model = ModelParts(self.bank, self.training_counts, self.totals, self.classes, self.feature_names)
        prediction = predict_for_label(distance, found, self.training_counts, self.totals, found.label)
        rows = explain_rows(model, points, distance, found.counts, prediction)
        return rows if row is None else rows[0]

    def as_tensor(self, z: Any) -> Tensor:
        """Convert an array, list of rows, DataFrame or tensor to a floating-point tensor on the model's device."""
        return points_as_tensor(z, self.feature_names, self.codes.device, self.bank.offsets.dtype)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model to a safetensors file: buffers and metadata, without pickle and without training points."""
        state = self.state_dict()
        arrays = {name: value.cpu().numpy() for name, value in state.items() if isinstance(value, Tensor)}
        files.write(path, "sepc", arrays, self.get_extra_state())

    @classmethod
    def load(cls, path: str | os.PathLike[str], device: torch.device | str = "cpu") -> SEPC:
        """Read a model that :meth:`save` wrote and move it to a device."""
        where = usable_device(device)
        arrays, metadata = files.read(path, "sepc")
        with files.interpreting(path):
            model = cls.from_tensors({name: buffer_of(array) for name, array in arrays.items()}, metadata)
        return model.to(where)

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> SEPC:
        """Build the model from the tensors of a state dict and the metadata of a file."""
        bank = EllipsoidBank(tensors["bank.offsets"], tensors["bank.whiteners"], tensors["bank.origin"])
        ledger = Ledger(**{name: tensors[name].numpy() for name in Ledger._fields})
        training = TrainingCounts.from_ledger(tensors["codes"], ledger, bank.whiteners.dtype)
        names = metadata["feature_names"]
        return cls(
            bank,
            training,
            tensors["totals"],
            tensors["scale"],
            classes=metadata["classes"],
            feature_names=None if names is None else tuple(names),
            nearest=metadata["nearest"],
            nan_policy=metadata["nan_policy"],
            made=metadata["made"],
        )

    def get_extra_state(self) -> dict[str, Any]:
        """Labels and options for files and state dicts, as plain types that ``weights_only=True`` can read."""
        return {
            "classes": self.classes,
            "feature_names": None if self.feature_names is None else list(self.feature_names),
            "nearest": self.nearest,
            "nan_policy": self.nan_policy,
            "made": self.made,
        }

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Restore labels and options from a state dict."""
        self.classes = list(state["classes"])
        self.feature_names = None if state["feature_names"] is None else tuple(state["feature_names"])
        self.nearest, self.nan_policy, self.made = state["nearest"], state["nan_policy"], dict(state["made"])

    def _load_from_state_dict(self, state_dict: MutableMapping[str, Any], prefix: str, *args: Any) -> None:
        complete = resize_buffers(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)
        if complete:  # tables of an incomplete state dict need not fit together
            ledger = Ledger(**{name: getattr(self, name).cpu().numpy() for name in Ledger._fields})
            self.held = torch.from_numpy(ledger.held).to(self.codes.device)

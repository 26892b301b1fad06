"""The torch module of a trust head: its parts, its forward pass, and its state."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from sepc_torch.data.arrays import single_row_hint
from sepc_torch.data.table_encoding import TableEncoding
from sepc_torch.head.calibration import Calibrated, Calibration
from sepc_torch.head.evidence import GRIDS, Evidence, Measurements
from sepc_torch.head.graphed import GraphedHead
from sepc_torch.head.judge import GPU_ROWS, forward_in_pieces, group_indices, judge_rows
from sepc_torch.head.network_labels import flagged, network_labels, without_missing
from sepc_torch.head.prediction import HeadPrediction
from sepc_torch.head.projection import Projection
from sepc_torch.head.promise import Promise
from sepc_torch.head.training_set import KeptTrainingSet
from sepc_torch.model.buffers import at_least_float32, convert_state, resize_buffers
from sepc_torch.model.device_sync import Branches, can_synchronize, warm_up
from sepc_torch.model.precision import as_dtype
from sepc_torch.model.queries import check_logits, points_as_tensor, refuse_rows_without_prediction
from sepc_torch.model.sepc import SEPC
from sepc_torch.shapes import Array, Bool, Float, Int

_REMEDY = "Drop those rows, or fit the head with nan_policy='flag', which gives them the label -1."


class HeadModule(nn.Module):
    """The parts of a :class:`~sepc_torch.TrustHead`, which documents the arguments, and their forward pass."""

    _grids = 0  # in pickles of older versions

    def __init__(
        self,
        projection: Projection,
        sepc: SEPC,
        evidence: Evidence | None = None,
        feature_names: tuple[str, ...] | None = None,
        reference_ids: tuple[int | str, ...] | None = None,
        training_set: KeptTrainingSet | None = None,
        encoding: TableEncoding | None = None,
    ) -> None:
        super().__init__()
        self.training_set = training_set
        self.reference_ids = reference_ids
        self.feature_names = feature_names if encoding is None else encoding.feature_names
        self.encoding = encoding
        self.projection = projection
        self.sepc = sepc
        self.evidence = evidence
        self.calibration = None if evidence is None else Calibration(evidence.support_names, len(evidence.kinds))
        self.promise: Promise | None = None  # of the last accept_at
        self._stale_warned = False  # whether a warning already said that the calibration is stale
        self._grids = GRIDS  # those of the scores of the calibration

    @property
    def classes(self) -> list[Any]:
        """The labels, in the order of the class indices."""
        return self.sepc.classes

    @property
    def in_features(self) -> int:
        """Number of features D of the embeddings."""
        return self.projection.in_features

    @property
    def calibration_age(self) -> float:
        """Points added and forgotten since :meth:`calibrate` (or the fit), as a share of the training points."""
        return 0.0 if self.training_set is None else self.training_set.age

    def forward(
        self, z: Tensor, logits: Tensor | None = None, labels: Tensor | None = None, groups: Tensor | None = None
    ) -> HeadPrediction:
        """Predict a batch of embeddings (B, D), and assess the network's labels for them.

        With ``nan_policy="flag"`` and ``nearest="mahalanobis"`` the call does not synchronise with a CUDA device, so a
        CUDA graph can record it. ``nan_policy="raise"`` and ``labels`` are checked by value and synchronise.

        Args:
            z: The embeddings.
            logits: The network's logits (B, C), or None to assess the head's own labels.
            labels: The network's labels as indices (B,) into ``classes``, or None. Pass at most one of ``logits`` and
                ``labels``.
            groups: The groups (B,) of the points, if :meth:`accept_at` was given groups; points of an unknown group are
                not accepted.
        """
        if logits is not None and labels is not None:
            raise ValueError("Pass logits or labels, not both: each gives the network's prediction.")
        if isinstance(z, Tensor) and z.is_cuda and z.dim() == 2 and can_synchronize(z) and len(z) > GPU_ROWS:
            return forward_in_pieces(self, z, logits, labels, groups)
        if isinstance(z, Tensor):
            z = as_dtype(z, self.projection.shift.dtype)  # the same answer for every dtype of the input
        points = self.projection(z)
        if logits is None:
            own, given = self.sepc.judge(points, labels)
            measured = self._measured(z, given.label)
        else:
            check_logits(logits, (z.shape[0], len(self.classes)), z.device)
            label, missing = network_labels(logits)
            branches = Branches(z)
            with branches.branch():
                own, given = self.sepc.judge(points, label, checked=True)
            measured = self._measured(z, label)
            branches.join()
            if missing is not None:
                if self.sepc.nan_policy == "raise" and can_synchronize(missing):
                    refuse_rows_without_prediction(missing, _REMEDY)
                given = without_missing(given, missing)
        places = own.nearest, groups
        invalid = flagged(own.label)
        calibrated = self._calibrated(
            measured, given.label, invalid, logits, places, logits is None and labels is None, z.dtype
        )
        return HeadPrediction(*own, given.label, given.trust, given.margin, *calibrated)

    def _measured(self, z: Tensor, label: Int[Tensor, "B"]) -> Measurements | None:
        """The evidence for labels; None for a head without evidence."""
        if self.evidence is None or self.calibration is None:
            return None
        return self.evidence.measure(z, label if self.calibration.done else None)

    def _calibrated(
        self,
        measured: Measurements | None,
        label: Int[Tensor, "B"],
        invalid: Bool[Tensor, "B"],
        logits: Tensor | None,
        places: tuple[Int[Tensor, "B"], Int[Tensor, "B"] | None],
        own: bool,
        dtype: torch.dtype,
    ) -> Calibrated:
        """Return the calibrated values of labels; rows without a label or with an invalid embedding are refused."""
        calibration = self.calibration
        if measured is None or calibration is None:
            unknown = torch.full(label.shape, torch.nan, device=label.device)
            return Calibrated(unknown, unknown, unknown, unknown, unknown, torch.zeros_like(invalid))
        if logits is not None and calibration.without_logits and not torch.compiler.is_compiling():
            warnings.warn(
                "This head was calibrated without logits, so the network's labels have no calibration: their "
                "confidence and joint score are NaN, and none is accepted. Calibrate with logits, or call the head "
                "without logits.",
                stacklevel=5,  # two frames of nn.Module.__call__ lie between
            )
        self._warn_if_stale(stacklevel=6)
        given = measured, label, invalid, logits
        found: Calibrated = calibration(*given, own=own, region=places[0], group=places[1], dtype=dtype)
        return found

    def _warn_if_stale(self, stacklevel: int) -> None:
        """Warn, once after a calibration, that training points changed since, or that an older version made it."""
        if torch.compiler.is_compiling() or self._stale_warned or (self._grids == GRIDS and not self.calibration_age):
            return
        if self.calibration is None or not self.calibration.done:
            return
        self._stale_warned = True
        reason = (
            f"{self.calibration_age:.1%} of the training points were added or forgotten since. Its promises and "
            "p-values are those of the head before"
            if self._grids == GRIDS
            else "an older version made it, which rounded scores otherwise. A copy of a calibration point can get "
            "another p-value than the point"
        )
        warnings.warn(f"The calibration is stale: {reason}; call head.calibrate again.", stacklevel=stacklevel)

    @torch.no_grad()
    def judge(self, z: Any, logits: Any = None, groups: Any = None) -> HeadPrediction:
        """Assess embeddings in any form, a chunk of rows at a time.

        Args:
            z: (B, D) embeddings: an array, list of rows, tensor on any device, or a table with the columns that the
                head was fitted on.
            logits: (B, C) logits of the network in any of these forms, or None to assess the head's own labels. Those
                have a calibration of their own, also after a calibration with logits.
            groups: (B,) groups of the points, if :meth:`accept_at` was given groups.

        Returns:
            The fields of :meth:`forward`, on the CPU.

        >>> from sepc_torch import TrustHead
        >>> head = TrustHead.fit([[1.0, 0.0], [2.0, 0.1], [0.0, 1.0], [0.1, 2.0]], [0, 0, 1, 1], dim=1)
        >>> head.judge([[3.0, 0.0], [0.0, 3.0]]).label
        tensor([0, 1])
        """
        cpu, dtype = torch.device("cpu"), self.projection.shift.dtype
        points = points_as_tensor(self._encoded(z), self.feature_names, cpu, dtype)
        if points.dim() != 2:
            wanted, hint = f"(B, {self.in_features})", single_row_hint(points.shape)
            raise ValueError(f"Expected embeddings of shape {wanted}, got {tuple(points.shape)}.{hint}")
        given = None if logits is None else points_as_tensor(logits, None, cpu, dtype)
        if given is not None and (given.dim() != 2 or len(given) != len(points)):
            raise ValueError(
                f"Got {len(points)} rows of embeddings and logits of shape {tuple(given.shape)}; pass (B, C) logits, a "
                "row for each embedding. The logits of a single row are logits[None]."
            )
        return judge_rows(self, points, given, self.sepc.codes.device, group_indices(groups, len(points)))

    @torch.no_grad()
    def predict(self, z: Any) -> Array:
        """Return the head's own predictions as a NumPy array of the user's labels."""
        return self.sepc.predict(self.projection(self.as_tensor(z)))

    def as_tensor(self, z: Any) -> Tensor:
        """Convert embeddings to a tensor on the head's device: an array, list of rows, tensor, or a table.

        From a table the columns are taken that the head was fitted on, in any order.
        """
        where, dtype = self.sepc.codes.device, self.projection.shift.dtype
        return points_as_tensor(self._encoded(z), self.feature_names, where, dtype)

    def encode(self, table: Any) -> Float[Array, "B D"]:
        """Return the features of a table as a NumPy array in the dtype of the head, as an exported file takes them.

        Missing values and categories are encoded as in the fit; a row that cannot be encoded holds NaN.

        Args:
            table: A table with the columns that the head was fitted on, in any order; or an array of the features.

        >>> from sepc_torch import TrustHead
        >>> head = TrustHead.fit([[1.0, 0.0], [2.0, 0.1], [0.0, 1.0], [0.1, 2.0]], [0, 0, 1, 1], dim=1)
        >>> head.encode([[3, 1]])
        array([[3., 1.]], dtype=float32)
        """
        return self.as_tensor(table).to("cpu", self.projection.shift.dtype).numpy()

    def _encoded(self, z: Any) -> Any:
        """The features of a table, if the head has an encoding; anything else is returned as it is."""
        return z if self.encoding is None or not hasattr(z, "columns") else self.encoding.encode(z).points

    def graphed(self, rows: int, *, logits: bool = True) -> GraphedHead:
        """Record the head as a CUDA graph for batches of at most ``rows`` rows; the result is called like the head.

        A small batch takes little time on the device, but dozens of launches; a graph is one launch. The head must be
        on a CUDA device. Record again after :meth:`calibrate` and :meth:`accept_at`. Invalid rows are flagged under
        either ``nan_policy``.

        Args:
            rows: Largest number of rows of a batch; smaller batches take as long.
            logits: Whether batches come with logits.
        """
        return GraphedHead(self, rows, self.in_features, len(self.classes) if logits else None)

    def warmup(self, *rows: int) -> float:
        """Run the head on random embeddings, so that kernels are compiled and memory is allocated before first use.

        Args:
            *rows: Expected batch sizes; by default 1 and 4096, on CUDA also 32 768. Each runs with and without logits.

        Returns:
            The elapsed seconds, including all work on the device.

        >>> from sepc_torch import TrustHead
        >>> head = TrustHead.fit([[1.0, 0.0], [2.0, 0.1], [0.0, 1.0], [0.1, 2.0]], [0, 0, 1, 1], dim=1)
        >>> head.warmup(1, 64) > 0.0
        True
        """

        def run(z: Tensor) -> None:
            self(z)
            if self.calibration is None or not self.calibration.without_logits:
                self(z, logits=z.new_zeros(z.shape[0], len(self.classes)))

        return warm_up(run, self.projection.matrix.new_empty(0, self.in_features), rows)

    def get_extra_state(self) -> dict[str, Any]:
        """Return the options that are not buffers."""
        names = None if self.feature_names is None else list(self.feature_names)
        ids = None if self.reference_ids is None else list(self.reference_ids)
        promise = None if self.promise is None else self.promise._asdict()
        encoding = {} if self.encoding is None else {"encoding": self.encoding.to_dict()}
        named = {
            "feature_names": names,
            "reference_ids": ids,
            "promise": promise,
            "rounded": self._grids,
            **encoding,
        }
        return {"unit_length": self.projection.unit_length, **named}

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Restore the options."""
        self.projection.unit_length = bool(state["unit_length"])
        # Files of formats 1 to 3 have no names, and no file of version 0.1 has identifiers.
        names, ids = state.get("feature_names"), state.get("reference_ids")
        self.feature_names = None if names is None else tuple(names)
        self.reference_ids = None if ids is None else tuple(ids)
        self.encoding = TableEncoding.from_dict(state["encoding"]) if "encoding" in state else None
        if self.encoding is not None and self.encoding.feature_names != self.feature_names:
            raise ValueError("the encoding of the table does not give the features of the head")
        self.promise = Promise.from_options(state.get("promise"))
        self._grids = int(state.get("rounded", 0))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> HeadModule:
        return super()._apply(at_least_float32(fn), recurse)  # type: ignore[no-untyped-call]

    def _load_from_state_dict(self, state_dict: MutableMapping[str, Any], prefix: str, *args: Any) -> None:
        convert_state(state_dict, prefix)
        if self.training_set is not None:
            # The present points are of another head.
            warnings.warn(
                f"A state dict holds no training points: loading it drops the {len(self.training_set)} points that "
                "this head kept, and the head can no longer be updated. TrustHead.save and TrustHead.load keep them.",
                stacklevel=4,  # the caller of load_state_dict
            )
            self.training_set = None
        if self.evidence is not None:
            self.evidence.match_kinds(state_dict, f"{prefix}evidence.")
        resize_buffers(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)

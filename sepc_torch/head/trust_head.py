r"""The module :class:`TrustHead`: fit, calibrate, predict, accept and save, for a neural network's embeddings.

::

    head = TrustHead.fit(embeddings, labels)        # arrays, a DataLoader and the encoder, or Parquet
    head.calibrate(held_out, their_labels, their_logits)
    out = head(encoder(x), logits=classifier(encoder(x)))
    out.network_trust                               # share of the training points of the region that support the label
    out.confidence                                  # probability that the label is right
    out.joint, out.accept                           # probability that it is right and the point known; accept or not
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
import torch
from torch import Tensor, nn

from sepc_torch.data import files
from sepc_torch.data.arrays import numeric_points, refuse_duplicates, rows_per_chunk, single_row_hint
from sepc_torch.data.options import check_count, check_not_negative, float64_device, usable_device
from sepc_torch.data.progress import Choice
from sepc_torch.data.table_classifier import TableClassifier, read_classifier
from sepc_torch.data.table_encoding import EncodedArray, TableEncoding, row_hashes
from sepc_torch.data.warn import warn_user
from sepc_torch.ellipsoid import Ellipsoid
from sepc_torch.head.calibration.assess import class_probabilities, finite_logits, rate_rows
from sepc_torch.head.calibration.calibration import LEAST_CALIBRATION, Calibration, calibration_set, example_set
from sepc_torch.head.calibration.label_calibration import Acceptance, LabelCalibration
from sepc_torch.head.evidence.densities import RegionDensities
from sepc_torch.head.evidence.evidence import Evidence, Measurements
from sepc_torch.head.evidence.layer_distance import LayerDistance
from sepc_torch.head.evidence.neighbours import Neighbours
from sepc_torch.head.evidence.shared_gaussian import SharedGaussian
from sepc_torch.head.explanation import DecisionExplanation, explain_decisions
from sepc_torch.head.graphed import GraphedHead
from sepc_torch.head.network_labels import flagged, network_labels, without_missing
from sepc_torch.head.prediction import HeadPrediction, Promise
from sepc_torch.head.promises.conformal import check_share
from sepc_torch.head.promises.costs import CostAcceptance, cost_matrix
from sepc_torch.head.promises.groups import By, GroupAcceptance, accept_by_group
from sepc_torch.head.promises.novelties import Novelties, UnknownShare, find_novelties, unknown_share
from sepc_torch.head.promises.sets import PredictionSets, set_thresholds
from sepc_torch.head.promises.shift import Shift, TargetAcceptance, accept_for_target, shifted_p_values
from sepc_torch.head.reading.layers import layers_in_order
from sepc_torch.head.reading.projection import Method, Normalize, Projection
from sepc_torch.head.reading.sources import embedding_source, row_ids
from sepc_torch.head.row_groups import group_rows
from sepc_torch.head.standard_operators import StandardOperators
from sepc_torch.head.training_set import (
    KeptTrainingSet,
    UpdateCertificate,
    certify,
    kept_points,
    kept_regions,
)
from sepc_torch.model.bank import EllipsoidBank
from sepc_torch.model.derived import at_least_float32, resize_buffers
from sepc_torch.model.device_sync import Branches, can_synchronize, warm_up
from sepc_torch.model.precision import as_dtype
from sepc_torch.model.queries import (
    check_logits,
    class_codes,
    class_columns,
    class_indices,
    feature_columns,
    points_as_tensor,
    refuse_bad_rows,
    refuse_undefined_logits,
    rows_without_prediction,
    select_row,
    unstated_order,
)
from sepc_torch.model.rules import TrainingCounts
from sepc_torch.model.sepc import SEPC, NanPolicy
from sepc_torch.partitioning.cells import ledger
from sepc_torch.shapes import Array, Bool, Float, Int

if TYPE_CHECKING:
    from sepc_torch.head.fit import PartitionOptions


# Share of in-distribution points that a newly calibrated head flags.
_FLAG_RATE = 0.05
_REMEDY = "Drop those rows, or fit the head with nan_policy='flag', which gives them the label -1."
# The share of target rows that may be expected to find no calibration point, per false discovery that is allowed.
_SPARE_DISCOVERIES = 0.01
# Number of columns in an error message.
_NAMED = 5
# Prefix of the arrays of training points in a file.
_TRAINING = "training."
# That of the arrays of a classifier.
_CLASSIFIER = "classifier."
# Rows that a GPU takes at a time: more would take more memory and no less time.
GPU_ROWS = 2**17


class TrustHead(nn.Module):
    """SEP-C classifier on projected embeddings that also assesses the labels of a network.

    Args:
        projection: Projection from embeddings to the coordinates of the partition.
        sepc: The frozen SEP-C classifier on projected embeddings.
        evidence: Class densities and reference points, or None for a head that cannot be calibrated.
        feature_names: Names of the features that the head was fitted on, if they came in a table.
        reference_ids: Identifiers of the reference points in the training set, for explanations.
        training_set: The training points that :meth:`update`, :meth:`forget` and :meth:`refit` need, or None.
        encoding: Encoding of a table with categories and missing values as these features. The methods of the head
            then take tables, which they encode, and the result of :meth:`encode`, but no other arrays.
        classifier: A classifier of the encoded rows. The methods of the head then judge its labels: where no logits are
            given, they take those of the classifier.

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> labels = np.repeat([0, 1], 200)
    >>> embeddings = rng.normal(size=(400, 16)) + 3.0 * labels[:, None]
    >>> head = TrustHead.fit(embeddings, labels, normalize="standardize")
    >>> out = head(torch.tensor(embeddings[:2]), logits=torch.tensor([[2.0, 0.0], [0.0, 2.0]]))
    >>> out.network_label.tolist(), (out.network_trust > 0.5).tolist()
    ([0, 1], [True, False])

    A calibrated head accepts points of the calibration distribution whose labels are likely to be right:

    >>> held = rng.normal(size=(400, 16)) + 3.0 * labels[:, None]
    >>> head.calibrate(held, labels).accept_at(flag_rate=0.1)
    Acceptance(threshold=..., coverage=0.9..., error=0.0, points=320, found=True)
    >>> head(torch.tensor(held[:2] + np.array([[0.0], [50.0]]))).accept
    tensor([ True, False])
    """

    def __init__(
        self,
        projection: Projection,
        sepc: SEPC,
        evidence: Evidence | None = None,
        feature_names: tuple[str, ...] | None = None,
        reference_ids: tuple[int | str, ...] | None = None,
        training_set: KeptTrainingSet | None = None,
        encoding: TableEncoding | None = None,
        classifier: TableClassifier | None = None,
    ) -> None:
        super().__init__()
        if classifier is not None and encoding is None:
            raise ValueError("A classifier of a table needs the encoding of the table: pass encoding=.")
        self.training_set = training_set
        self.reference_ids = reference_ids
        self.feature_names = feature_names if encoding is None else encoding.feature_names
        self.encoding = encoding
        self.classifier = classifier
        # Sorted hashes of the rows that made the head, and the share of rows like these that equal one of them.
        self.fitted_rows: Int[Array, "n"] | None = None
        self.repeats = 0.0
        self.projection = projection
        self.sepc = sepc
        self.evidence = evidence
        self.calibration = None if evidence is None else Calibration(evidence.support_names, len(evidence.kinds))
        # Whether columns of logits without names are known to be in the order of the classes. Classes that are names
        # are sorted, unless the caller of fit states another order.
        self.order_stated = not any(isinstance(label, str) for label in sepc.classes)
        self.promise: Promise | None = None  # of the last accept_at
        self.network: dict[str, Any] | None = None  # where a TrustedModel reads its network
        self._changes = 0  # points added and forgotten since the calibration
        self._stale_warned = False  # whether a warning already said that the calibration is stale

    @classmethod
    def fit(
        cls,
        embeddings: Any,
        labels: Any = None,
        *,
        encoder: Callable[[Any], Any] | None = None,
        dim: int | None = None,
        normalize: Normalize = "l2",
        projection: Method = "pca",
        max_impure: int | None = None,
        max_per_class: int | Literal["auto"] | None = "auto",
        nan_policy: NanPolicy = "raise",
        reference_points: int | None = None,
        partition: PartitionOptions | None = None,
        n_jobs: int | None = None,
        progress: Choice = "auto",
        classes: Any = None,
        ids: Any = None,
        keep_points: bool = False,
        encoding: TableEncoding | None = None,
        classifier: TableClassifier | None = None,
        layers: Any = None,
        device: torch.device | str | None = None,
    ) -> TrustHead:
        r"""Fit a head to labelled embeddings.

        The embeddings are read twice, a chunk of rows at a time, and never copied as a whole. The fit keeps 8 bytes for
        each of the ``dim`` coordinates of a row and 4 bytes for each of at most 64 coordinates of the densities. The
        partition copies its coordinates once, and once more for several processes. A fit that needs more memory than is
        available raises MemoryError: at the first chunk if the number of rows is known, otherwise after the first pass.

        Args:
            embeddings: The embeddings (N, D) in one of these forms:

                - an array (also a ``numpy.memmap``), a tensor on any device, a list of rows or a DataFrame;
                - an iterable of batches ``(inputs, labels)`` such as a ``DataLoader``, together with ``encoder``. It is
                  read twice and must give the same rows each time, in any order. An iterator or a generator can be
                  read only once: its embeddings are kept in memory, in float32;
                - a ``pyarrow.Table``, a ``pyarrow.dataset.Dataset``, or the path of a Parquet file or of a folder of
                  Parquet files. The embeddings are all columns except the labels, or one column of lists.
            labels: (N,) labels; None with an iterable of batches; the name of the label column with Arrow and Parquet.
            encoder: The network from inputs to embeddings. It runs without gradients, in evaluation mode, on its own
                device. It can return a pair ``(embeddings, layers)`` with a dictionary of ``layers``.
            dim: Dimension of the projection. By default :math:`\min(32, \lfloor n / 2 \rfloor, D)`, where classes of at
                least :math:`n` points hold 90 % of the points: an ellipsoid needs more points than dimensions.
            normalize: ``"l2"`` scales embeddings to unit length, which improves distances for most networks;
                ``"standardize"`` divides features by their standard deviation; ``None`` leaves embeddings unchanged.
            projection: ``"pca"``, or ``"lda"`` to use the labels.
            max_impure: Largest number of points of other classes in an ellipsoid. By default 1 % of the points of the
                median class that are fitted, and at least 2.
            max_per_class: Fit the ellipsoids to a random sample of at most this many points of each class. Counts,
                densities and reference points see all points; see :func:`~sepc_torch.partition`. ``"auto"`` fits to
                all points up to :math:`2^{18}`, and to a sample of about that many beyond. None always fits to all.
            nan_policy: ``"raise"`` or ``"flag"`` for embeddings that hold NaN or, with ``"l2"``, only zeros, and for
                logits that hold NaN. Flagged rows have the label -1, no trust and no confidence, and are not accepted;
                see :class:`~sepc_torch.HeadPrediction`. Rows whose largest logit is not unique are flagged under either
                policy. Compiled code and CUDA graphs flag under either policy.
            reference_points: Largest number of training embeddings to keep for the distance to the nearest one; at
                least one per class. By default 16 384, and fewer above 512 features. With 0 the head keeps none, and
                confidence and nonconformity score depend on the class densities only.
            partition: Further options of the partition; see :class:`~sepc_torch.head.fit.PartitionOptions`.
            n_jobs: Number of processes, as in joblib.
            progress: ``"auto"`` shows a progress bar on a terminal for long fits.
            classes: The labels in the order of the network's logits; by default sorted. Labels that are names need
                ``classes``, or logits as a table with these names, before :meth:`calibrate` takes logits.
            ids: Identifiers (N,) of the rows, integers or strings, or the name of their column in a table. Explanations
                name training examples by them. By default the positions of the rows; for a loader, the positions in
                its second pass.
            keep_points: Keep the projected training points, so that the head can be updated; see :meth:`update`.
            encoding: The encoding of the table that the embeddings were encoded from. The methods of the head then take
                such tables.
            classifier: A frozen classifier of these embeddings, of :func:`sepc_torch.sklearn.tables.fit_classifier`;
                the head then judges its labels.
            layers: Activations of earlier layers of the network by name, ``{"layer1": z1, "layer2": z2}``: rows
                (N, D_l), maps (N, C, H, W) or tokens (N, T, C), which are averaged over positions. Every layer adds
                one kind of nonconformity: a Mahalanobis distance. Unknowns that look ordinary in the last layer often
                stand out in an earlier one. Partition, rules and trust use the embeddings alone. :meth:`calibrate` and
                every call of the head then need the same layers.
            device: Device that computes distances of training points to ellipsoids (see
                :func:`~sepc_torch.partition`) and covariances of embeddings, in float64. The fitted head is on the CPU;
                :meth:`~torch.nn.Module.to` moves it.
        """
        from sepc_torch.head.fit import fit_parts  # imported here: a frozen head runs without the solvers

        where = None if device is None else float64_device(device)
        parts = fit_parts(
            embedding_source(embeddings, labels, encoder, ids, layers, where),
            classes,
            dim=dim,
            normalize=normalize,
            projection=projection,
            max_impure=max_impure,
            max_per_class=max_per_class,
            reference_points=reference_points,
            nan_policy=nan_policy,
            partition_options=partition or {},
            n_jobs=n_jobs,
            progress=progress,
            keep_points=bool(keep_points),
            device=where,
        )
        head = cls(**parts, encoding=encoding, classifier=classifier)
        head.order_stated |= classes is not None
        return head

    @classmethod
    def empty(cls, in_features: int = 1, classes: Sequence[Any] = (0, 1)) -> TrustHead:
        """Return a head without knowledge, to load the state dict of another head into.

        ``load_state_dict`` replaces all buffers, whatever their shapes. Until then predictions have no meaning.

        Args:
            in_features: Number of features of the embeddings.
            classes: The labels.

        >>> fitted = TrustHead.fit([[1.0, 0.0], [2.0, 0.1], [0.0, 1.0], [0.1, 2.0]], ["a", "a", "b", "b"], dim=1)
        >>> head = TrustHead.empty()
        >>> head.load_state_dict(fitted.state_dict())
        <All keys matched successfully>
        >>> head.predict([[3.0, 0.0]]).tolist()
        ['a']
        """
        return cls(*_empty_parts(check_count(in_features, "in_features", least=1), list(classes)))

    @property
    def classes(self) -> list[Any]:
        """The labels, in the order of the class indices."""
        return self.sepc.classes

    @property
    def in_features(self) -> int:
        """Number of features D of the embeddings."""
        return self.projection.in_features

    @property
    def layer_names(self) -> tuple[str, ...]:
        """Names of the earlier layers of the network that the head was fitted with."""
        return () if self.evidence is None else self.evidence.layer_names

    @property
    def takes_logits(self) -> bool:
        """Whether the head was calibrated with logits, so that it assesses the network's labels."""
        return self.calibration is not None and self.calibration.network.done

    @property
    def calibration_age(self) -> float:
        """Points added and forgotten since :meth:`calibrate` (or the fit), as a share of the training points."""
        return self._changes / int(self.sepc.totals.sum())

    def forward(
        self,
        z: Tensor,
        logits: Tensor | None = None,
        labels: Tensor | None = None,
        groups: Tensor | None = None,
        layers: Mapping[str, Tensor] | None = None,
    ) -> HeadPrediction:
        """Predict a batch of embeddings (B, D), and assess the network's labels for them.

        In ``torch.onnx.export`` the head uses standard operators only, so a module that holds a head can be exported.
        With ``nan_policy="flag"`` and ``nearest="mahalanobis"`` the call does not synchronise with a CUDA device, so a
        CUDA graph can record it. ``nan_policy="raise"`` and ``labels`` are checked by value and synchronise.

        Args:
            z: The embeddings. A head of a table (``encoding``) takes the encoded features here, not the columns of the
                table: ``torch.from_numpy(head.encode(table))``.
            logits: The network's logits (B, C), or None to assess the head's own labels.
            labels: The network's labels as indices (B,) into ``classes``, or None. Pass at most one of ``logits`` and
                ``labels``.
            groups: The groups (B,) of the points, if :meth:`accept_at` was given groups; points of an unknown group are
                not accepted.
            layers: Activations of the layers that the head was fitted with, by name: rows (B, D_l), maps (B, C, H, W)
                or tokens (B, T, C). A row with NaN in a layer is refused.
        """
        if logits is not None and labels is not None:
            raise ValueError("Pass logits or labels, not both: each gives the network's prediction.")
        if isinstance(z, Tensor) and z.is_cuda and z.dim() == 2 and can_synchronize(z) and len(z) > GPU_ROWS:
            return forward_in_pieces(self, z, logits, labels, groups, layers)
        if torch.onnx.is_in_onnx_export():  # ONNX has none of this package's operators
            with StandardOperators():
                return self._predict(z, logits, labels, groups, layers)
        return self._predict(z, logits, labels, groups, layers)

    def _predict(
        self,
        z: Tensor,
        logits: Tensor | None,
        labels: Tensor | None,
        groups: Tensor | None,
        layers: Mapping[str, Tensor] | None,
    ) -> HeadPrediction:
        """The prediction of :meth:`forward`, for a batch that fits into memory."""
        if isinstance(z, Tensor):
            z = as_dtype(z, self.projection.shift.dtype)  # the same answer for every dtype of the input
        sepc, evidence, calibration = self._parts()
        points = self.projection(z)
        rows = self._layer_rows(layers, z.shape[0])  # len would fix the number of rows in an exported graph
        if any(x.device != z.device for x in rows):
            raise ValueError(f"The layers must be on the device of the embeddings, {z.device}.")
        missing = None
        if logits is None:
            given = None if labels is None else class_indices(labels, self.classes, z.shape[0], sepc.codes.device)
            of_head, of_network = sepc.judge(points, given, checked=True)
            measured = _measure(evidence, calibration, z, of_network.label, rows)
        else:
            check_logits(logits, (z.shape[0], len(self.classes)), z.device)
            label, missing = network_labels(logits)
            branches = Branches(z)
            with branches.branch():
                of_head, of_network = sepc.judge(points, label, checked=True)
            measured = _measure(evidence, calibration, z, label, rows)
            branches.join()
            if missing is not None:
                of_network = without_missing(of_network, missing)
        invalid, label = flagged(of_head.label), of_network.label
        known = *of_head, label, of_network.trust, of_network.margin
        if measured is None:
            _refuse(sepc, invalid, missing, logits, z.dtype)
            unknown = torch.full(label.shape, torch.nan, device=label.device)
            return HeadPrediction(*known, unknown, unknown, unknown, unknown, unknown, torch.zeros_like(invalid))
        assert calibration is not None
        if logits is not None and calibration.without_logits and not torch.compiler.is_compiling():
            warn_user(
                "This head was calibrated without logits, so the network's labels have no calibration: their "
                "confidence and joint score are NaN, and none is accepted. Calibrate with logits, or call the head "
                "without logits.",
            )
        self._warn_if_stale()
        calibrated = calibration(
            *(measured, label, invalid, logits),
            own=logits is None and labels is None,
            region=of_head.nearest,
            group=groups,
            dtype=z.dtype,
        )
        _refuse(sepc, invalid, missing, logits, z.dtype)
        return HeadPrediction(*known, *calibrated)

    def _parts(self) -> tuple[SEPC, Evidence | None, Calibration | None]:
        """The parts that :meth:`replace_points` replaces, all from before or all from after it in another thread."""
        parts: dict[str, Any] = self._modules
        return parts["sepc"], parts.get("evidence"), parts.get("calibration")

    def _layer_rows(self, layers: Mapping[str, Any] | None, rows: int | torch.SymInt) -> list[Tensor]:
        """The rows of all layers in the order and the dtype of the head, checked."""
        widths = [] if self.evidence is None else self.evidence.layer_widths
        found = layers_in_order(layers, self.layer_names, widths, rows)
        return [as_dtype(x, self.projection.shift.dtype) for x in found]

    def _layers_on(self, device: torch.device, layers: Mapping[str, Any] | None, rows: int) -> dict[str, Tensor] | None:
        """The rows of layers in any form by name, as tensors on a device; None for a head without layers."""
        found = [x.to(device) for x in self._layer_rows(layers, rows)]
        return dict(zip(self.layer_names, found, strict=True)) or None

    def _warn_if_stale(self) -> None:
        """Warn, once after a calibration or after loading, that training points changed since the calibration."""
        if torch.compiler.is_compiling() or self._stale_warned or not self._changes:
            return
        if self.calibration is None or not self.calibration.done:
            return
        self._stale_warned = True
        warn_user(
            f"The calibration is stale: {self.calibration_age:.1%} of the training points were added or forgotten "
            "since. Its promises and p-values are those of the head before; call head.calibrate again.",
        )

    @torch.no_grad()
    def judge(
        self, z: Any, logits: Any = None, groups: Any = None, *, layers: Mapping[str, Any] | None = None
    ) -> HeadPrediction:
        """Assess embeddings in any form, a chunk of rows at a time.

        Args:
            z: (B, D) embeddings: an array, list of rows, tensor on any device, or a table with the columns that the
                head was fitted on. A head of a table (``encoding``) takes only tables, which it encodes, and the
                result of :meth:`encode`.
            logits: (B, C) logits of the network in any of these forms, or None to assess the labels of the head's
                classifier, or, without one, the head's own labels. Those have a calibration of their own, also after a
                calibration with logits. Columns of a table are matched with the classes by name, other columns by
                position.
            groups: (B,) groups of the points, if :meth:`accept_at` was given groups.
            layers: The activations of the layers that the head was fitted with, by name, in any of these forms.

        Returns:
            The fields of :meth:`forward`, on the CPU.

        >>> from sepc_torch import TrustHead
        >>> head = TrustHead.fit([[1.0, 0.0], [2.0, 0.1], [0.0, 1.0], [0.1, 2.0]], [0, 0, 1, 1], dim=1)
        >>> head.judge([[3.0, 0.0], [0.0, 3.0]]).label
        tensor([0, 1])
        """
        z, logits = self.with_logits(z, logits)
        points, given, of_layers = self._batch(z, logits, layers, torch.device("cpu"))
        return judge_rows(self, points, given, self.sepc.codes.device, group_indices(groups, len(points)), of_layers)

    def with_logits(self, z: Any, logits: Any = None) -> tuple[Any, Any]:
        """Return the rows with their logits: those given, or those of the classifier for a head with one.

        The rows of a head without a classifier are returned as they came. Otherwise they are encoded.
        """
        if self.classifier is None or self.encoding is None or logits is not None:
            return z, logits
        z = self._encoded(z)
        return z, self.classifier.logits(z, self.encoding)

    def seen(self, z: Any) -> float | None:
        """Return the share of rows of a table that equal a row that made the head; None if it keeps no hashes.

        :attr:`repeats` is the share that is expected of new rows like those of the fit.
        """
        if self.fitted_rows is None:
            return None
        rows = self.encode(z)
        return float(np.isin(row_hashes(rows), self.fitted_rows).mean()) if len(rows) else 0.0

    def _batch(
        self, z: Any, logits: Any, layers: Mapping[str, Any] | None, device: torch.device
    ) -> tuple[Float[Tensor, "B D"], Float[Tensor, "B C"] | None, dict[str, Tensor] | None]:
        """Embeddings, logits and layers in any form as tensors on a device, one row for each embedding."""
        dtype = self.projection.shift.dtype
        points = points_as_tensor(self._encoded(z), self.feature_names, device, dtype)
        if points.dim() != 2:
            wanted, hint = f"(B, {self.in_features})", single_row_hint(points.shape)
            raise ValueError(f"Expected embeddings of shape {wanted}, got {tuple(points.shape)}.{hint}")
        given = None
        if logits is not None:
            given = points_as_tensor(class_columns(logits, self.classes)[0], None, device, dtype, "logits")
        if given is not None and (given.dim() != 2 or len(given) != len(points)):
            raise ValueError(
                f"Got {len(points)} rows of embeddings and logits of shape {tuple(given.shape)}; pass (B, C) logits, a "
                "row for each embedding. The logits of a single row are logits[None]."
            )
        return points, given, self._layers_on(device, layers, len(points))

    @torch.no_grad()
    def predict_proba(
        self, z: Any, logits: Any = None, *, layers: Mapping[str, Any] | None = None
    ) -> Float[Tensor, "B C"]:
        """Return a probability for every class, provided that the point is of a known kind; rows sum to one.

        The probability of the label is its ``confidence``. The other classes share the rest like the softmax of their
        logits, divided by the temperature of the calibration; without logits, like the distances to their nearest
        reference points. If the confidence is low, another class can be more probable than the label. Before
        :meth:`calibrate` the numbers only rank. Rows without a prediction give every class the same probability.

        Args:
            z: (B, D) embeddings in any form that :meth:`judge` takes.
            logits: (B, C) logits of the network, or None for the head's own labels.
            layers: The activations of the layers that the head was fitted with, by name.

        Returns:
            The probabilities on the device of the head, in the order of ``classes``.

        >>> rng = np.random.default_rng(0)
        >>> labels = np.arange(600) % 3
        >>> points = rng.normal(size=(600, 4)) + 4.0 * np.eye(3, 4)[labels]
        >>> head = TrustHead.fit(points[:300], labels[:300], normalize=None).calibrate(points[300:], labels[300:])
        >>> head.predict_proba(4.0 * np.eye(3, 4)).argmax(dim=1)
        tensor([0, 1, 2])
        """
        if self.evidence is None or self.calibration is None:
            raise RuntimeError("This head has no evidence for probabilities; make it with TrustHead.fit.")
        z, logits = self.with_logits(z, logits)
        labels = self._labels_for(logits)
        found = []
        for points, given, of_layers in self._chunks(z, logits, layers):
            groups = None
            if len(labels.group_threshold):  # acceptance needs a group, and probabilities do not
                groups = torch.zeros(len(points), dtype=torch.int64, device=points.device)
            out = self(points, given, groups=groups, layers=of_layers)
            scores = self.evidence.class_scores(points) if given is None else given
            tempered = finite_logits(scores) / labels.temperature.double()
            shares = class_probabilities(out.confidence, out.network_label.clamp_min(0), tempered)
            found.append(torch.where((out.network_label < 0).unsqueeze(1), 1.0 / len(self.classes), shares))
        return torch.cat(found)

    @torch.no_grad()
    def sets(
        self,
        z: Any,
        logits: Any = None,
        *,
        coverage: float = 0.9,
        per_class: bool = False,
        layers: Mapping[str, Any] | None = None,
    ) -> PredictionSets:
        """Return the set of classes that each point may have; it holds the true class with probability ``coverage``.

        The probability is over calibration points and a new point that is drawn like them, and exact for every number
        of calibration points; :mod:`sepc_torch.head.promises.sets` has the proof. A set is empty if no
        class is likely enough: the point is unlike the calibration points or, where labels are right more often than
        ``coverage``, among the least certain ones. A row without a prediction has the set of all classes. After a
        calibration with out-of-fold rows (``head.promise.exact`` is False) the coverage is an estimate.

        Args:
            z: (B, D) embeddings in any form that :meth:`judge` takes.
            logits: (B, C) logits of the network, or None for sets from the evidence of the head alone.
            coverage: The promised share of points whose true class is in their set.
            per_class: Keep the coverage among the points of each true class, not only on average. Sets are larger, and
                a class with too few ranked points is in every set.
            layers: The activations of the layers that the head was fitted with, by name.

        Returns:
            The sets, on the device of the head.

        >>> rng = np.random.default_rng(0)
        >>> labels = np.arange(1200) % 3
        >>> points = rng.normal(size=(1200, 4)) + 2.0 * np.eye(3, 4)[labels]
        >>> head = TrustHead.fit(points[:300], labels[:300], normalize=None).calibrate(points[300:], labels[300:])
        >>> head.sets([[2.0, 0.0, 0.0, 0.0], [1.0, 1.0, -1.0, 0.0], [0.0, 0.0, 0.0, 90.0]], coverage=0.9).names
        [(0,), (0, 1), ()]
        """
        self.require_calibration()
        z, logits = self.with_logits(z, logits)
        labels = self._labels_for(logits)
        least = set_thresholds(labels, coverage, bool(per_class))
        found = [self._class_scores(labels, *rows) >= least for rows in self._chunks(z, logits, layers)]
        return PredictionSets(torch.cat(found), float(coverage), bool(per_class), tuple(self.classes))

    def _labels_for(self, logits: Any) -> LabelCalibration:
        """The calibration of the network's labels if there are logits, otherwise of the head's own labels."""
        assert self.calibration is not None
        if logits is not None and self.calibration.without_logits:
            raise ValueError(
                "This head was calibrated without logits, so it knows no probabilities of the network's labels. "
                "Calibrate with logits, or leave them out."
            )
        return self.calibration.own if logits is None else self.calibration.network

    def _chunks(
        self, z: Any, logits: Any, layers: Mapping[str, Any] | None
    ) -> Iterator[tuple[Float[Tensor, "b D"], Float[Tensor, "b C"] | None, dict[str, Tensor] | None]]:
        """Rows of a batch on the device of the head, a chunk at a time; an empty batch is one chunk."""
        points, *others = self._batch(z, logits, layers, self.sepc.codes.device)
        widths = [] if self.evidence is None else self.evidence.layer_widths
        step = rows_per_chunk(max(self.in_features, len(self.classes), *widths))
        for start in range(0, max(len(points), 1), step):
            rows = slice(start, start + step)
            given, of_layers = (_some_rows(part, rows) for part in others)
            yield points[rows], given, of_layers

    def _class_scores(
        self,
        labels: LabelCalibration,
        z: Float[Tensor, "B D"],
        logits: Float[Tensor, "B C"] | None,
        layers: Mapping[str, Tensor] | None,
    ) -> Float[Tensor, "B C"]:
        """The scores of all classes that prediction sets are made of, in float64."""
        assert self.evidence is not None
        assert labels.plain is not None
        self._warn_if_stale()
        label = self.sepc(self.projection(z)).label
        invalid = flagged(label)
        scores = self.evidence.class_scores(z) if logits is None else logits
        if logits is not None:
            check_logits(logits, (len(z), len(self.classes)), z.device)
            if self.sepc.nan_policy == "raise":
                refuse_undefined_logits(logits, _REMEDY)
            label = torch.where(rows_without_prediction(logits), -1, logits.argmax(dim=1))
        measured = self.evidence.measure(z, label.clamp_min(0), self._layer_rows(layers, len(z)))
        rated = rate_rows(measured, logits, label, invalid, labels.plain)
        return labels.class_scores(rated.ranking, rated.typicality, torch.where(rated.refused, -1, label), scores)

    @torch.no_grad()
    def predict(self, z: Any) -> Array:
        """Return labels as a NumPy array: those of the classifier, or, without one, the head's own predictions."""
        z, logits = self.with_logits(z)
        if logits is None:
            return self.sepc.predict(self.projection(self.as_tensor(z)))
        none = np.isnan(logits).any(axis=1)
        names = np.array([*self.classes, None], dtype=object) if none.any() else np.array(self.classes)
        return names[np.where(none, -1, np.where(np.isnan(logits), -np.inf, logits).argmax(axis=1))]

    def explain(
        self,
        z: Any,
        i: int | None = None,
        *,
        logits: Any = None,
        groups: Any = None,
        layers: Mapping[str, Any] | None = None,
    ) -> DecisionExplanation | list[DecisionExplanation]:
        """Explain the decisions that :meth:`forward` takes: accepted or refused, why, and similar training examples.

        Args:
            z: One embedding (D,) or a batch (B, D), in any form that :meth:`judge` takes.
            i: Row of the batch to explain; by default all rows, as a list.
            logits: The network's logits (C,) or (B, C). Without logits the head's own labels are explained.
            groups: (B,) groups of the points, if :meth:`accept_at` was given groups.
            layers: The activations of the layers that the head was fitted with, by name: of all rows of ``z``, or of
                the one embedding.

        Returns:
            For each row a record: ``str()`` gives a sentence and the numbers, ``to_dict()`` all values.

        >>> head = TrustHead.fit([[1.0, 0.0], [2.0, 0.1], [0.0, 1.0], [0.1, 2.0]], [0, 0, 1, 1], dim=1)
        >>> found = head.explain([3.0, 0.1], logits=[2.0, 0.0])
        >>> print(found.sentence)
        Not decided: the head is not calibrated. The network's label is 0; its share of ... training points is 1.000.
        >>> [example.id for example in found.examples]
        [1, 0]
        """
        return self._explain(z, i, logits, groups, layers, "network" if self.classifier is None else "classifier")

    @torch.no_grad()
    def _explain(
        self, z: Any, i: int | None, logits: Any, groups: Any, layers: Mapping[str, Any] | None, source: str
    ) -> DecisionExplanation | list[DecisionExplanation]:
        """The result of :meth:`explain`; ``source`` says whose logits they are."""
        if i is not None and getattr(i, "shape", ()) != ():
            raise TypeError(
                f"i is the number of a row, got {type(i).__name__}. Pass logits by name: explain(z, logits=...)."
            )
        z, logits = self.with_logits(z, logits)
        whole = self.as_tensor(z)
        points, row = select_row(whole, i)
        given = None
        if logits is not None:
            columns = class_columns(logits, self.classes)[0]
            given = select_row(points_as_tensor(columns, None, points.device, points.dtype, "logits"), i)[0]
        group = group_indices(groups, len(points) if row is None else 1 if groups is None else len(groups))
        if group is not None:
            group = (group if row is None else group[row : row + 1]).to(points.device)
        if layers is not None and whole.dim() == 1:
            layers = {name: _batch_of_one(x) for name, x in layers.items()}
        of_layers = self._layers_on(points.device, layers, 1 if whole.dim() == 1 else len(whole))
        if of_layers is not None and row is not None:
            of_layers = {name: x[row : row + 1] for name, x in of_layers.items()}
        out = self(points, logits=given, groups=group, layers=of_layers)
        rows = explain_decisions(self, points, given, out, group, of_layers, source)
        return rows if row is None else rows[0]

    @torch.inference_mode(False)  # the new buffers outlive the call, and load_state_dict writes to them
    @torch.no_grad()
    def calibrate(
        self,
        embeddings: Any,
        labels: Any,
        logits: Any = None,
        *,
        layers: Mapping[str, Any] | None = None,
        rank_fraction: float | None = None,
        seed: int = 0,
        ids: Any = None,
        unknowns: Any = None,
        unknown_logits: Any = None,
        unknown_layers: Mapping[str, Any] | None = None,
        unknown_odds: float | None = None,
        units: Any = None,
    ) -> TrustHead:
        """Calibrate the head with points that neither the network nor the head was fitted on.

        After calibration :attr:`HeadPrediction.confidence` is a probability, p-values and joint scores are defined, and
        the head accepts on average at least 95 % of the points of the calibration distribution. :meth:`accept_at`
        changes the promise. A head that has a promise of :meth:`accept_at` keeps it: its threshold is found anew, and
        the head accepts nothing, with a warning, if none is found, if the promise is by given groups, or if it is over
        units and ``units`` is not given.

        Args:
            embeddings: (M, D) embeddings of at least 20 points, drawn independently from the distribution of the points
                to assess. Points that are not independent need ``units``.
            labels: The true labels (M,).
            logits: The network's logits (M, C). Columns of a table are matched with the classes by name, other columns
                by position: for labels that are names, :meth:`TrustHead.fit` must have been given ``classes``. Without
                logits only the head's own labels are calibrated, and softmax is not used.
            layers: The activations of the layers that the head was fitted with, by name.
            rank_fraction: The share of the points that are only ranked, for p-values and thresholds; the other points
                fit the joint score. The guarantees hold because no point does both. By default 0.8, and less for fewer
                than 200 points: at least 40 points, or half of them, fit.
            seed: Seed of the random choice of the ranked points.
            ids: (M,) identifiers of what the rows were taken from, such as pictures or patients. Rows with the same
                identifier are not independent: if some repeat, a warning says that the promises do not hold without
                ``units``.
            units: (M,) integers or strings that name the unit of each point, such as a picture, a video or a patient.
                Units must be drawn independently; the points of a unit need not be. All points of a unit are ranked, or
                none, and the promises of :meth:`accept_at` are then over units. P-values are not exact for points in
                units.
            unknowns: (U, D) embeddings of at least 5 examples of unknowns: points that should be refused, such as
                pictures of other things. They move the weights of the kinds of nonconformity towards those that see
                them, and allow larger odds of unknowns at the same price. They are never ranked, so that p-values and
                promises stay exact.
            unknown_logits: The network's logits (U, C) for the examples; needed if there are ``logits``.
            unknown_layers: The activations of the layers for the examples; needed if there are ``layers``.
            unknown_odds: Prior odds, from 0 to 1, that a point is of an unknown kind. Larger odds refuse more unknowns,
                and more ordinary but rare points; with 0 the joint score is a confidence. By default at most 0.03, with
                examples of unknowns at most 1, and so small that the joint score accepts almost as many calibration
                points as confidence alone, at a risk of about half of the error; see
                :func:`~sepc_torch.head.calibration.label_calibration.affordable_odds`.
        """
        if self.evidence is None or self.calibration is None:
            raise RuntimeError("This head has no evidence to calibrate; make it with TrustHead.fit.")
        of_classifier = logits is None and self.classifier is not None
        embeddings, logits = self.with_logits(embeddings, logits)
        if of_classifier and unknowns is not None:
            unknowns, unknown_logits = self.with_logits(unknowns, unknown_logits)
        if logits is not None:
            logits, named = class_columns(logits, self.classes)
            if not (named or of_classifier or self.order_stated):
                raise unstated_order(self.classes, "TrustHead.fit")
        rank_fraction = None if rank_fraction is None else check_share(rank_fraction, "rank_fraction")
        seed = check_count(seed, "seed")
        if unknown_odds is not None:
            unknown_odds = _checked_odds(unknown_odds)
        if (unknown_logits is None) != (unknowns is None or logits is None):
            raise ValueError(
                "Examples of unknowns need logits if the calibration points have them: pass unknown_logits."
                if unknown_logits is None
                else "unknown_logits are those of unknowns, beside logits: pass all three, or leave out unknown_logits."
            )
        if (unknown_layers is None) != (unknowns is None or not self.layer_names):
            raise ValueError(
                f"The head has the layers {list(self.layer_names)}: pass those of unknowns as unknown_layers."
                if unknown_layers is None
                else "unknown_layers are those of unknowns, for a head that was fitted with layers; leave them out."
            )
        z = self._checked_points(embeddings, "embeddings")
        codes = class_codes(labels, self.classes, len(z), z.device)
        if len(z) < LEAST_CALIBRATION:
            raise ValueError(
                f"{len(z)} points are too few to calibrate with; pass at least {LEAST_CALIBRATION - len(z)} more."
            )
        if ids is not None and units is None:
            _warn_of_repeated(row_ids(ids, len(z)))
        own = self.sepc(self.projection(z))
        of_layers = [x.to(z.device) for x in self._layer_rows(layers, len(z))]
        data = calibration_set(self.evidence, z, codes, own.label, logits, len(self.classes), of_layers)
        shown = None
        if unknowns is not None:
            given = None if unknown_logits is None else class_columns(unknown_logits, self.classes)[0]
            points = self._checked_points(unknowns, "unknowns")
            of_unknowns = [x.to(z.device) for x in self._layer_rows(unknown_layers, len(points))]
            shown = example_set(self.evidence, points, given, len(self.classes), of_unknowns)
        calibration = Calibration(self.evidence.support_names, len(self.evidence.kinds))
        calibration.fit(
            *(data.values, data.right, codes, data.label, own.nearest, data.scores, rank_fraction, seed),
            unknown_odds=unknown_odds,
            unknowns=shown,
            units=_unit_codes(units, len(z)),
        )
        return self._adopt(calibration.to(z.device), exact=True)

    @overload
    def accept_at(
        self,
        *,
        risk: float | None = None,
        delta: float = 0.05,
        flag_rate: float | None = None,
        by: None = None,
        units: Any = None,
        average: bool = False,
        costs: None = None,
    ) -> Acceptance: ...

    @overload
    def accept_at(self, *, costs: Any, review: float, delta: float = 0.05, units: Any = None) -> CostAcceptance: ...

    @overload
    def accept_at(
        self, *, risk: float, delta: float = 0.05, by: By | Any, joint: bool = True, known: bool = True
    ) -> GroupAcceptance: ...

    @overload
    def accept_at(
        self,
        *,
        risk: float | None = None,
        delta: float = 0.05,
        flag_rate: float | None = None,
        target: Any,
        target_logits: Any = None,
        target_layers: Mapping[str, Any] | None = None,
        shift: Shift = "covariate",
    ) -> TargetAcceptance: ...

    @torch.inference_mode(False)  # as for calibrate
    def accept_at(
        self,
        *,
        risk: float | None = None,
        delta: float = 0.05,
        flag_rate: float | None = None,
        by: By | Any = None,
        joint: bool = True,
        known: bool = True,
        units: Any = None,
        average: bool = False,
        costs: Any = None,
        review: float | None = None,
        target: Any = None,
        target_logits: Any = None,
        target_layers: Mapping[str, Any] | None = None,
        shift: Shift = "covariate",
    ) -> Acceptance | GroupAcceptance | CostAcceptance | TargetAcceptance:
        """Set the acceptance threshold, with a guarantee for every sample size, for a risk, a flag rate or costs.

        Args:
            risk: The allowed share of wrong labels among the accepted ones. It holds with probability 1 - ``delta``
                over the calibration points. If no threshold qualifies, nothing is accepted, ``found`` is False, and a
                warning says which risk could be promised.
            delta: The allowed probability that the guarantee of ``risk`` or ``costs`` fails.
            flag_rate: The share of points of the calibration distribution that may be refused, on average over
                calibration sets.
            by: Keep the risk in every group, not only on average; see :mod:`sepc_torch.head.promises.groups` for the
                proof.

                - ``"predicted"``: among the accepted points of each predicted class, one threshold per class;
                - ``"region"``: among those of each region (the nearest ellipsoid, ``out.nearest``), one threshold per
                  region. Thin classes are merged with the nearest class, thin regions with the nearest region, of the
                  same class first; the promise then holds for the merged group;
                - integers from 0 that give the group of each calibration point: one threshold per group. Every call of
                  the head then needs ``groups=``. Groups are not merged;
                - ``"class"``: among the accepted points of each *true* class. The true class of a new point is unknown,
                  so all points share one threshold, the lowest that keeps the risk in every class. If there is none,
                  nothing is accepted.
            joint: Whether ``delta`` is the probability that the promise fails in any group, or in each single group.
            known: With integers as ``by``, whether the groups of new points are known. If not, as for the patients of a
                hospital that is not recorded, all groups share one threshold, the lowest that keeps the risk in each of
                them, and calls of the head take no ``groups``.
            average: Promise ``risk`` on average over calibration sets, without ``delta``. This accepts far more with
                few calibration points, but the risk of the calibration at hand exceeds the promised one about as often
                as not; see :func:`~sepc_torch.head.promises.conformal.average_threshold` for the exact statement. Not
                with ``by`` or units.
            units: (M,) names of the units of the calibration points, as in :meth:`calibrate`, which must have been
                given units too; by default those. With units, ``risk`` bounds the share of wrong labels among accepted
                ones, and ``flag_rate`` the share of refused points, where every unit counts alike; see
                :mod:`sepc_torch.head.promises.units` for the proof. Not with ``by``.
            costs: The cost (C, C) of accepting each predicted class (column) for a point of each true class (row), or
                the cost of any mistake as a number. Rows and columns of a DataFrame are matched with the classes by
                name. The calibration points that are not ranked choose the thresholds with the least mean cost, one for
                all points, and one of its own for a predicted class where that is clearly cheaper. The ranked points
                bound the expected cost of a point, with probability 1 - ``delta``; see
                :mod:`sepc_torch.head.promises.costs` for the proof.
            review: The cost of a refused point; needed with ``costs``.
            target: (T, D) embeddings of at least 50 unlabelled rows, drawn independently from where the head is used
                now, in any form that :meth:`judge` takes. ``risk`` or ``flag_rate`` is then promised for rows like
                these; see :mod:`sepc_torch.head.promises.shift` for the proof. Nothing is accepted, and a warning says
                why, if the assumption of ``shift`` is rejected or if the target has too many rows where there are few
                calibration points. About as many rows as calibration points are useful. Not with ``by``, ``units``,
                ``average`` and ``costs``.
            target_logits: The network's logits (T, C) for the target rows; needed if :meth:`calibrate` had logits.
            target_layers: The activations of the layers for the target rows; needed if the head has layers.
            shift: What the promise for the target assumes: ``"covariate"``, that labels in a region are as right as
                before, or ``"label"``, that those of a true class are.

        Returns:
            With ``target``, a :class:`~sepc_torch.head.promises.shift.TargetAcceptance`. With ``by``, a record of every
            group; see :class:`~sepc_torch.head.promises.groups.GroupAcceptance`. With ``costs``, the thresholds and the
            cost; see :class:`~sepc_torch.head.promises.costs.CostAcceptance`. Otherwise the threshold with its coverage
            and error on the ranked calibration points: for the network's labels if :meth:`calibrate` had logits,
            otherwise for the head's own labels. Labels without a calibration are never accepted: labels passed as
            ``labels=``, and the network's labels after a calibration without logits.
        """
        # Thresholds are set in a copy: other threads, and an error, never see a part of them.
        calibration = copy.deepcopy(self.require_calibration())
        if sum(given is not None for given in (risk, flag_rate, costs)) != 1:
            raise ValueError("Pass exactly one of risk, flag_rate and costs.")
        if (costs is None) != (review is None):
            raise ValueError("costs are those of accepted labels, review is that of a refused one: pass both.")
        if by is not None and costs is not None:
            raise ValueError("costs choose thresholds by predicted class where that is cheaper; leave out by.")
        if by is not None and risk is None:
            raise ValueError("by keeps a risk in every group; pass risk, not flag_rate.")
        if by is not None and (units is not None or calibration.own.in_units):
            raise ValueError(
                "Promises by group hold for independent points, and the calibration points came in units. Leave out "
                "by=, or calibrate with one point of each unit and without units=."
            )
        if not known and (by is None or isinstance(by, str)):
            raise ValueError("known=False is for given groups: pass by=, the group of each calibration point.")
        if average and (risk is None or by is not None or units is not None or calibration.own.in_units):
            raise ValueError("average=True is for a risk over independent points: leave out flag_rate, by and units.")
        if target is None and (target_logits is not None or target_layers is not None):
            raise ValueError("target_logits and target_layers belong to target: pass the embeddings as target.")
        if target is not None and (by is not None or units is not None or average or costs is not None):
            raise ValueError(
                "A promise for a target is one risk or flag_rate over all its rows: leave out by, units, average and "
                "costs. For groups, units or costs of shifted rows, label some of them and calibrate with these."
            )
        if target is not None and calibration.own.in_units:
            raise ValueError(
                "A promise for a target holds for independent points, and the calibration points came in units. "
                "Calibrate with one point of each unit and without units=."
            )
        if units is not None:
            _set_units(calibration, units)
        self._warn_if_stale()
        if target is not None:
            wanted = Promise(risk, delta, flag_rate, exact=self.promise is None or self.promise.exact, shift=shift)
            shown = self._judge_target(target, target_logits, target_layers, calibration.network.done)
            sources = (calibration.own, calibration.network)[: len(shown)]
            given = shift, risk, delta, flag_rate
            *_, shifted = [
                accept_for_target(labels, self.sepc, out, *given) for labels, out in zip(sources, shown, strict=True)
            ]
            if not shifted.found:
                warn_user(f"The head accepts nothing: {shifted.limits}.")
            self.calibration, self.promise = calibration, wanted._replace(found=shifted.found)
            return shifted
        kind = by if by is None or isinstance(by, str) else "group" if known else "environment"
        exact = self.promise is None or self.promise.exact
        price = None
        if costs is not None:
            matrix, review = cost_matrix(costs, self.classes), check_not_negative(review, "review")
            price = float(costs) if np.ndim(costs) == 0 else tuple(map(tuple, matrix.tolist()))
        wanted = Promise(
            *(risk, delta, flag_rate, kind),
            joint=joint,
            exact=exact,
            units=calibration.own.in_units,
            average=average,
            costs=price,
            review=review,
        )
        found, promise = self._set_thresholds(calibration, wanted, by)
        self.calibration, self.promise = calibration, promise
        return found

    @torch.no_grad()
    def _judge_target(self, target: Any, logits: Any, layers: Mapping[str, Any] | None, with_logits: bool) -> list[Any]:
        """Predictions for target rows: of the head's own labels and, ``with_logits``, of the network's."""
        target, logits = self.with_logits(target, logits)
        if (logits is None) == with_logits:
            raise ValueError(
                "Target rows need logits, as the calibration points or the other rows have them: pass target_logits."
                if logits is None
                else "The calibration points or the other rows have no logits; leave out target_logits."
            )
        if (layers is None) != (not self.layer_names):
            raise ValueError(
                f"The head has the layers {list(self.layer_names)}: pass those of the target rows as target_layers."
                if layers is None
                else "target_layers are for a head that was fitted with layers; leave them out."
            )
        points, given, of_layers = self._batch(target, logits, layers, torch.device("cpu"))
        groups = None
        if self.require_calibration().own.group_threshold.shape[0]:  # acceptance needs a group, and scores do not
            groups = torch.zeros(len(points), dtype=torch.int64)
        sources = [None] if given is None else [None, given]
        return [judge_rows(self, points, source, self.sepc.codes.device, groups, of_layers) for source in sources]

    def require_calibration(self) -> Calibration:
        """Return the calibration of the head; raise RuntimeError if there is none."""
        if self.calibration is None or not self.calibration.done:
            raise RuntimeError("The head must be calibrated first: head.calibrate(embeddings, labels, logits).")
        return self.calibration

    def _adopt(self, calibration: Calibration, exact: bool) -> TrustHead:
        """Replace the calibration, and find the thresholds of the head's promise anew.

        Args:
            calibration: A fitted calibration, on the device of the head.
            exact: Whether held-out points were ranked, so that promises are exact.
        """
        wanted = self.promise
        if wanted is None or not wanted.chosen:
            rate = calibration.own.least_flag_rate(_FLAG_RATE)
            wanted = Promise(None, 0.05, rate, chosen=False)
        wanted = wanted._replace(exact=exact)
        lacking = None
        if wanted.by in ("group", "environment") and self.calibration is not None:
            groups = max(len(source.group_threshold) for source in (self.calibration.own, self.calibration.network))
            for source in (calibration.own, calibration.network):
                source.set_table("group_threshold", np.full(groups, np.inf))
            lacking = (
                "by given groups, and those of the new calibration points are not known. Call accept_at(risk=..., "
                "by=groups) again."
            )
        elif wanted.by is not None and calibration.own.in_units:
            lacking = (
                "by group, and holds for independent points, but the new calibration points came in units. Call "
                "accept_at(risk=...) without by=."
            )
        elif wanted.average and calibration.own.in_units:
            lacking = (
                "on average over independent points, but the new calibration points came in units. Call "
                "accept_at(risk=...) without average=True."
            )
        elif wanted.chosen and wanted.units and not calibration.own.in_units:
            lacking = (
                "over units, and those of the new calibration points are not known. Call calibrate(..., units=ids), or "
                "accept_at again for independent points."
            )
        elif wanted.shift is not None:
            lacking = (
                "about shifted rows, and those are not known to the new calibration. Call accept_at(..., target=rows) "
                "again, or accept_at without target if the calibration points now are like the rows in use."
            )
        if lacking is None:
            wanted = wanted._replace(units=calibration.own.in_units)
            promise = self._set_thresholds(calibration, wanted, wanted.by)[1]
        else:
            promise = wanted._replace(found=False)
            warn_user(f"The head accepts nothing: its promise is {lacking}")
        self.calibration, self.promise = calibration, promise
        self._changes, self._stale_warned = 0, False
        return self

    def _set_thresholds(
        self, calibration: Calibration, wanted: Promise, by: By | Any
    ) -> tuple[Acceptance | GroupAcceptance | CostAcceptance, Promise]:
        """Set the thresholds of a calibration; return their record, and the promise with what was found."""
        sources = [calibration.own, calibration.network] if calibration.network.done else [calibration.own]
        risk, delta = wanted.risk, wanted.delta
        if wanted.costs is not None:
            assert wanted.review is not None
            matrix = cost_matrix(wanted.costs, self.classes)
            cheapest = [labels.accept_cheapest(matrix, wanted.review, delta) for labels in sources][-1]
            return cheapest, wanted._replace(bound=cheapest.bound)
        if by is not None:
            assert risk is not None
            in_groups = risk, delta, by, wanted.joint, wanted.by != "environment"
            table = [accept_by_group(labels, self.sepc, *in_groups) for labels in sources][-1]
            if not table.found:
                refused = sum(not row.found for row in table.groups)
                warn_user(
                    f"The risk {risk:g} cannot be promised in {refused} of {len(table.groups)} groups; the head "
                    f"accepts none of their points. For example, {table.limits} Print the result for a table.",
                )
            merged = any(len(row.group) > 1 for row in table.groups)
            groups = len(table.groups) if merged else None
            return table, wanted._replace(found=any(row.found for row in table.groups), groups=groups)
        options = risk, delta, wanted.flag_rate, wanted.average
        found = [labels.accept(*options) for labels in sources][-1]
        if risk is not None and not found.found:
            warn_user(f"The head accepts nothing: {sources[-1].shortfall(risk, delta)}")
        return found, wanted._replace(found=found.found)

    def novelties(
        self,
        z: Any,
        logits: Any = None,
        fdr: float = 0.1,
        *,
        layers: Mapping[str, Any] | None = None,
        target: Any = None,
        target_logits: Any = None,
        target_layers: Mapping[str, Any] | None = None,
    ) -> Novelties:
        """Declare which samples of a batch are novel, with the false discovery rate controlled.

        On average at most a share ``fdr`` of the samples declared novel are ordinary: drawn from the distribution of
        the calibration points. :func:`~sepc_torch.head.promises.novelties.find_novelties` has the procedure and its
        proof. The rate is over calibration sets and batches; no promise is made about one batch, or for samples that
        were chosen by their scores. Rows without a prediction count as the least typical.

        ``groups`` of the result are clusters of the novel samples, which may be new classes; see
        :func:`~sepc_torch.head.row_groups.group_rows`.

        Args:
            z: (B, D) embeddings in any form that :meth:`judge` takes.
            logits: (B, C) logits of the network, or None for p-values without their energy.
            fdr: The allowed share of ordinary samples among those declared novel.
            layers: The activations of the layers that the head was fitted with, by name.
            target: (T, D) embeddings of at least 50 other, ordinary rows from where the batch is from. Samples drawn
                like these rows then count as ordinary, if scores within a region are distributed as before (covariate
                shift; see :mod:`sepc_torch.head.promises.shift`). If that is rejected, nothing is declared novel, with
                a warning.
            target_logits: The network's logits (T, C) for the target rows; needed if there are ``logits``.
            target_layers: The activations of the layers for the target rows; needed if there are ``layers``.
        """
        z, logits = self.with_logits(z, logits)
        if target is None:
            if target_logits is not None or target_layers is not None:
                raise ValueError("target_logits and target_layers belong to target: pass the embeddings as target.")
            found = find_novelties(*self._p_values(z, logits, layers), fdr)
        else:
            labels, fdr = self._p_value_labels(logits), check_share(fdr, "fdr")
            shown = self._judge_target(target, target_logits, target_layers, logits is not None)[-1]
            out = self.judge(z, logits, layers=layers)
            p_value, ranked, limits = shifted_p_values(labels, self.sepc, shown, out, _SPARE_DISCOVERIES * fdr)
            if limits:
                warn_user(f"Nothing is declared novel: {limits}.")
            found = find_novelties(torch.ones_like(p_value) if limits else p_value, ranked, fdr)
        rows = found.novel.numpy().nonzero()[0]
        return found._replace(groups=group_rows(self, self.as_tensor(z)[rows], rows) if len(rows) else ())

    def unknown_share(
        self, z: Any, logits: Any = None, delta: float = 0.05, *, layers: Mapping[str, Any] | None = None
    ) -> UnknownShare:
        """Estimate which share of the rows of a batch, such as those of a day in use, is of unknown kinds.

        The rows need no labels. They must be drawn independently, and not be chosen by their scores.
        :func:`~sepc_torch.head.promises.novelties.unknown_share` has the bounds and their proof.

        Args:
            z: (B, D) embeddings in any form that :meth:`judge` takes.
            logits: (B, C) logits of the network, or None for p-values without their energy.
            delta: The allowed probability that the interval fails.
            layers: The activations of the layers that the head was fitted with, by name.

        >>> rng = np.random.default_rng(0)
        >>> labels = np.arange(1200) % 2
        >>> points = rng.normal(size=(1200, 4)) + 4.0 * labels[:, None]
        >>> head = TrustHead.fit(points[:200], labels[:200], normalize=None).calibrate(points[200:700], labels[200:700])
        >>> print(head.unknown_share(points[700:]))
        The share of unknown kinds among 500 rows cannot be told apart from zero (0.0% to ...% with probability 0.95).
        >>> points[700:900, 0] += 20.0
        >>> print(head.unknown_share(points[700:]))
        About 38.2% of 500 rows are of unknown kinds (...% to ...% with probability 0.95).
        """
        return unknown_share(*self._p_values(z, logits, layers), delta)

    def _p_values(self, z: Any, logits: Any, layers: Mapping[str, Any] | None) -> tuple[Float[Tensor, "B"], int]:
        """The p-values of a batch, and the number of ranked points."""
        z, logits = self.with_logits(z, logits)
        labels = self._p_value_labels(logits)
        return self.judge(z, logits, layers=layers).p_value, len(labels.ranked_nonconformity)

    def _p_value_labels(self, logits: Any) -> LabelCalibration:
        """The calibration that p-values come from; warn if its points came in units."""
        calibration = self.require_calibration()
        labels = calibration.own if logits is None else calibration.labels
        if labels.in_units:
            warn_user(
                "The calibration rows of this head came in units, whose rows are not independent: p-values are "
                "approximate, and so is this promise. For an exact one, calibrate with one row of each unit, without "
                "units=, and pass one row of each unit.",
            )
        return labels

    @property
    def marked(self) -> tuple[Any, ...]:
        """Labels of the classes whose ellipsoids :meth:`refit` must solve again."""
        return () if self.training_set is None else tuple(self.classes[c] for c in self.training_set.marked)

    def update(self, z: Any, y: Any, ids: Any = None) -> TrustHead:
        """Add labelled embeddings; see :func:`sepc_torch.head.updates.add_points`.

        Args:
            z: Embeddings (M, D), or rows of a table.
            y: Their labels (M,), all known to the head.
            ids: Their identifiers (M,), new to the head; by default the integers after the largest one.
        """
        from sepc_torch.head.updates import add_points  # imported here: a frozen head runs without the solvers

        return add_points(self, self._encoded(z), y, ids)

    def forget(self, ids: Any) -> TrustHead:
        """Remove training points; see :func:`sepc_torch.head.updates.remove_points`.

        Args:
            ids: Identifiers of the points: positions, or the ``ids`` of :meth:`fit` and :meth:`update`.
        """
        from sepc_torch.head.updates import remove_points

        return remove_points(self, ids)

    def refit(self, classes: Any = None, n_jobs: int | None = None, progress: Choice = "auto") -> TrustHead:
        """Solve the ellipsoids of some classes again; see :func:`sepc_torch.head.updates.refit`.

        Args:
            classes: Labels of the classes; by default the marked ones.
            n_jobs: Number of processes, as in joblib.
            progress: Whether to show a progress bar.
        """
        from sepc_torch.head.updates import refit

        return refit(self, classes, n_jobs, progress)

    def certificate(self) -> UpdateCertificate:
        """Say of each class what updates did, and how near its ellipsoids are to those of a full fit."""
        return certify(self)

    @torch.inference_mode(False)  # the new buffers outlive the call
    @torch.no_grad()
    def replace_points(self, sepc: SEPC, evidence: Evidence, training_set: KeptTrainingSet) -> TrustHead:
        """Replace the training points, with the classifier and the evidence that follow from them."""
        before = kept_points(self)
        assert self.calibration is not None
        calibration = copy.deepcopy(self.calibration)
        calibration.renumber_regions(kept_regions(before.ellipsoids, training_set.ellipsoids))
        # One assignment: a thread that judges sees all old parts or all new ones.
        self._modules = {**self._modules, "sepc": sepc, "evidence": evidence, "calibration": calibration}
        self._changes += abs(len(training_set) - len(before))
        self.training_set = training_set
        self.reference_ids = training_set.reference_ids
        return self

    def as_tensor(self, z: Any) -> Tensor:
        """Convert embeddings to a tensor on the head's device: an array, list of rows, tensor, or a table.

        From a table the columns are taken that the head was fitted on, in any order.
        """
        where, dtype = self.sepc.codes.device, self.projection.shift.dtype
        return points_as_tensor(self._encoded(z), self.feature_names, where, dtype)

    def encode(self, table: Any) -> Float[Array, "B D"]:
        """Return the features of a table as a NumPy array in the dtype of the head, as an exported file takes them.

        Missing values and categories are encoded as in the fit; a row that cannot be encoded holds NaN. The other
        methods of the head take the result in place of the table.

        Args:
            table: A table, or a dictionary of columns, with the columns that the head was fitted on, in any order. A
                head without an encoding also takes arrays.

        >>> from sepc_torch import TrustHead
        >>> head = TrustHead.fit([[1.0, 0.0], [2.0, 0.1], [0.0, 1.0], [0.1, 2.0]], [0, 0, 1, 1], dim=1)
        >>> head.encode([[3, 1]])
        array([[3., 1.]], dtype=float32)
        """
        features = self.as_tensor(table).to("cpu", self.projection.shift.dtype).numpy()
        return features if self.encoding is None else features.view(EncodedArray)

    def _checked_points(self, z: Any, name: str) -> Float[Tensor, "M D"]:
        """Embeddings or rows of a table as a tensor on the head's device; an error if they are not finite."""
        points = numeric_points(feature_columns(self._encoded(z), self.feature_names), name)[0]
        if points.shape[1] != self.in_features:
            raise ValueError(f"Expected {name} of shape (points, {self.in_features}), got {points.shape}.")
        return torch.tensor(points, dtype=self.projection.shift.dtype, device=self.sepc.codes.device)

    def _encoded(self, z: Any) -> Any:
        """The features of a table; a head without an encoding takes z as it is."""
        if self.encoding is None or isinstance(z, EncodedArray):
            return z
        if not isinstance(z, Mapping) and not hasattr(z, "columns"):
            raise TypeError(
                f"The head encodes the columns of a table ({', '.join(map(repr, self.encoding.columns[:_NAMED]))}"
                f"{', ...' if len(self.encoding.columns) > _NAMED else ''}), and a {type(z).__name__} does not say "
                "whether its numbers are encoded. Pass the table, or head.encode(table)."
            )
        z = z.to_pydict() if hasattr(z, "to_pydict") else z  # Arrow's tables do not say whether they have a column
        refuse_duplicates([name for name in getattr(z, "columns", ()) if name in self.encoding.columns], "The table")
        return self.encoding.encode(z).points

    def graphed(self, rows: int, *, logits: bool = True) -> GraphedHead:
        """Record the head as a CUDA graph for batches of at most ``rows`` rows; the result is called like the head.

        A small batch takes little time on the device, but dozens of launches; a graph is one launch. The head must be
        on a CUDA device. Record again after :meth:`calibrate` and :meth:`accept_at`. Invalid rows are flagged under
        either ``nan_policy``.

        Args:
            rows: Largest number of rows of a batch; smaller batches take as long.
            logits: Whether batches come with logits.
        """
        widths = [] if self.evidence is None else self.evidence.layer_widths
        layers = dict(zip(self.layer_names, widths, strict=True))
        return GraphedHead(self, rows, self.in_features, len(self.classes) if logits else None, layers)

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
        widths = [] if self.evidence is None else self.evidence.layer_widths

        def run(z: Tensor) -> None:
            layers = {name: z.new_ones(len(z), width) for name, width in zip(self.layer_names, widths, strict=True)}
            self(z, layers=layers or None)
            if self.calibration is None or not self.calibration.without_logits:
                self(z, logits=z.new_zeros(z.shape[0], len(self.classes)), layers=layers or None)

        return warm_up(run, self.projection.matrix.new_empty(0, self.in_features), rows)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the head to a safetensors file, without pickle; of training points, reference and kept points only."""
        arrays = {name: value.cpu().numpy() for name, value in self.state_dict().items() if isinstance(value, Tensor)}
        options = {"sepc": self.sepc.get_extra_state(), **self.get_extra_state()}
        if self.training_set is not None:
            arrays |= {_TRAINING + name: array for name, array in self.training_set.arrays().items()}
            options["training"] = self.training_set.metadata()
        if self.classifier is not None:
            arrays |= {_CLASSIFIER + name: array for name, array in self.classifier.arrays().items()}
            options["classifier"] = self.classifier.kind
        if self.fitted_rows is not None:
            arrays["fitted_rows"], options["repeats"] = self.fitted_rows, self.repeats
        files.write(path, "trust_head", arrays, options)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], device: torch.device | str = "cpu", *, trust: bool = False
    ) -> TrustHead:
        """Load a head that :meth:`save` wrote, onto a device.

        Args:
            path: The file.
            device: The device.
            trust: Whether to load an estimator that the user of the head fitted (``sepc fit --model module:object``).
                Such a file can run code. No other file holds any.
        """
        where = usable_device(device)
        arrays, options = files.read(path, "trust_head")
        fitted_rows = arrays.pop("fitted_rows", None)
        training, of_classifier = (
            {name.removeprefix(prefix): arrays[name] for name in list(arrays) if name.startswith(prefix)}
            for prefix in (_TRAINING, _CLASSIFIER)
        )
        parts = (_TRAINING, _CLASSIFIER)
        tensors = {name: torch.from_numpy(a) for name, a in arrays.items() if not name.startswith(parts)}
        with files.interpreting(path):
            head = cls.empty()
            if "evidence.polar.shift" not in tensors:
                head.evidence = head.calibration = None
            if tensors["projection.shift"].dtype == torch.float64:
                head.double()
            head.load_state_dict({**tensors, "_extra_state": options, "sepc._extra_state": options["sepc"]})
            if training:
                head.training_set = KeptTrainingSet.from_arrays(training, options["training"], arrays["sepc.codes"])
            if "classifier" in options:
                made = options["classifier"], of_classifier, head.encoding, head.classes, trust
                head.classifier = read_classifier(*made)
            head.fitted_rows, head.repeats = fitted_rows, float(options.get("repeats", 0.0))
            return head.to(where)

    def get_extra_state(self) -> dict[str, Any]:
        """Return the options that are not buffers."""
        names = None if self.feature_names is None else list(self.feature_names)
        ids = None if self.reference_ids is None else list(self.reference_ids)
        promise = None if self.promise is None else self.promise._asdict()
        encoding = {} if self.encoding is None else {"encoding": self.encoding.to_dict()}
        named = {
            "feature_names": names,
            "reference_ids": ids,
            "order_stated": self.order_stated,
            "promise": promise,
            "changes": self._changes,
            "layers": list(self.layer_names),
            "network": self.network,
            **encoding,
        }
        return {"unit_length": self.projection.unit_length, **named}

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Restore the options."""
        self.projection.unit_length = bool(state["unit_length"])
        names, ids = state["feature_names"], state["reference_ids"]
        self.feature_names = None if names is None else tuple(names)
        self.reference_ids = None if ids is None else tuple(ids)
        self.order_stated = bool(state.get("order_stated", False))
        self.encoding = TableEncoding.from_dict(state["encoding"]) if "encoding" in state else None
        if self.encoding is not None and self.encoding.feature_names != self.feature_names:
            raise ValueError("the encoding of the table does not give the features of the head")
        self.promise = Promise.from_options(state["promise"])
        self.network = state.get("network")
        self._changes = int(state["changes"])
        if self.evidence is not None:
            self.evidence.layer_names = tuple(state["layers"])
        self._stale_warned = False

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TrustHead:
        return super()._apply(at_least_float32(fn), recurse)  # type: ignore[no-untyped-call]

    def _load_from_state_dict(self, state_dict: MutableMapping[str, Any], prefix: str, *args: Any) -> None:
        if self.training_set is not None:
            # The present points are of another head.
            warn_user(
                f"A state dict holds no training points: loading it drops the {len(self.training_set)} points that "
                "this head kept, and the head can no longer be updated. TrustHead.save and TrustHead.load keep them.",
            )
            self.training_set = None
        if self.evidence is not None:
            there = f"{prefix}evidence.layers."
            count = len({name.removeprefix(there).partition(".")[0] for name in state_dict if name.startswith(there)})
            if count != len(self.evidence.layers):
                like = self.projection.shift
                self.evidence.set_layers(_empty_layer(len(self.classes)).to(like) for _ in range(count))
        resize_buffers(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)


def checked_head(head: Any) -> TrustHead:
    """The head; a TypeError with a remedy for anything else, such as a :class:`~sepc_torch.TrustedModel`."""
    if isinstance(head, TrustHead):
        return head
    if isinstance(getattr(head, "head", None), TrustHead):
        raise TypeError(
            f"Expected a TrustHead, got a {type(head).__name__}. Pass its .head, and the rows that it reads: "
            "rows = model.read(loader), then rows.z, rows.logits and layers=rows.layers."
        )
    raise TypeError(f"Expected a TrustHead, got a {type(head).__name__}.")


def _batch_of_one(values: Any) -> Any:
    """Activations of a single row as a batch: (D,), a map (C, H, W) or tokens (T, C) get a dimension."""
    x = values if isinstance(values, Tensor) else np.asarray(values)
    return x if x.ndim > 1 and len(x) == 1 else x[None]


def _checked_odds(odds: Any) -> float:
    """The prior odds as a number from 0 to 1."""
    if isinstance(odds, bool) or not isinstance(odds, int | float | np.number) or not 0.0 <= odds <= 1.0:
        raise ValueError(
            f"unknown_odds must be a number from 0 to 1, got {odds!r}. 0.03 says that about three points in a hundred "
            "are of an unknown kind; None chooses the odds by what they cost."
        )
    return float(odds)


def _warn_of_repeated(ids: Array) -> None:
    """Warn if identifiers of calibration points repeat."""
    distinct = len(np.unique(ids))
    if distinct < len(ids):
        warn_user(
            f"{len(ids)} calibration points have only {distinct} different ids: rows with the same id are not "
            "independent, and p-values and promises hold for independent rows only. Pass units=ids for promises over "
            "units, or calibrate with one row of each id.",
        )


def _unit_codes(units: Any, points: int) -> Int[Array, "M"] | None:
    """The units of calibration points, numbered as they first occur; None for units of one point each.

    Units of one point are independent points.
    """
    if units is None:
        return None
    _, first, codes = np.unique(row_ids(units, points, "units"), return_index=True, return_inverse=True)
    return None if len(first) == points else first.argsort().argsort()[codes]


def _set_units(calibration: Calibration, units: Any) -> None:
    """Replace the units of the calibration points; refuse units with points in both parts of the calibration."""
    sources = [source for source in (calibration.own, calibration.network) if source.done]
    known, held = sources[0].in_units, sources[0].ranked_rows.cpu().numpy()
    codes = _unit_codes(units, len(sources[0].point_label))
    if codes is None and not known:
        return
    both = 0 if codes is None else len(np.intersect1d(codes[held], np.delete(codes, held)))
    if codes is None or both or not known:
        raise ValueError(
            "accept_at takes the units of calibrate, so that every unit either fits the score or sets the threshold: "
            + (f"{both} of the given units do both" if known and both else "calibrate was given other units or none")
            + ". Call calibrate(..., units=ids) with these units first."
        )
    for source in sources:
        source.point_unit = torch.from_numpy(codes).to(source.ranked_rows.device)


# Rows of a batch: a tensor, tensors by name, or None.
Rows = Tensor | Mapping[str, Tensor] | None


def forward_in_pieces(forward: Callable[..., HeadPrediction], z: Tensor, *others: Rows) -> HeadPrediction:
    """Apply a head's forward to pieces of at most :data:`GPU_ROWS` rows: memory does not grow with the batch."""
    pieces = [slice(start, start + GPU_ROWS) for start in range(0, len(z), GPU_ROWS)]
    columns = zip(*(forward(*(_some_rows(part, piece) for part in (z, *others))) for piece in pieces), strict=True)
    return HeadPrediction(*(torch.cat(column) for column in columns))


def _some_rows(values: Rows, rows: slice, device: torch.device | None = None) -> Any:
    """Some rows of a tensor or of tensors by name, on a device if one is given."""
    if isinstance(values, Mapping):
        return {name: _some_rows(value, rows, device) for name, value in values.items()}
    return None if values is None else values[rows] if device is None else values[rows].to(device)


def _measure(
    evidence: Evidence | None, calibration: Calibration | None, z: Tensor, label: Int[Tensor, "B"], layers: list[Tensor]
) -> Measurements | None:
    """The evidence for labels; None for a head without evidence."""
    if evidence is None or calibration is None:
        return None
    return evidence.measure(z, label if calibration.done else None, layers)


def _refuse(
    sepc: SEPC, invalid: Bool[Tensor, "B"], missing: Bool[Tensor, "B"] | None, logits: Tensor | None, dtype: torch.dtype
) -> None:
    """Raise an error for rows that cannot be judged, unless they are to be flagged.

    The check waits for the device once, when all work of the batch is queued there.

    Args:
        sepc: The classifier, which holds the policy.
        invalid: Rows whose embedding has no finite distance.
        missing: Rows whose logits give no label, among them those of undefined logits; None if there are none.
        logits: The logits.
        dtype: The dtype of the embeddings.
    """
    if sepc.nan_policy != "raise" or not can_synchronize(invalid):
        return
    if bool((invalid if missing is None else invalid | missing).any()):
        refuse_bad_rows(invalid, dtype)
        if logits is not None:
            refuse_undefined_logits(logits, _REMEDY)


def judge_rows(
    forward: Callable[..., HeadPrediction],
    z: Float[Tensor, "B D"],
    logits: Float[Tensor, "B C"] | None,
    device: torch.device,
    groups: Int[Tensor, "B"] | None = None,
    layers: Mapping[str, Tensor] | None = None,
) -> HeadPrediction:
    """Apply a head's forward to rows a chunk at a time on a device; the results are on the CPU."""
    widths = [x.shape[1] for x in (z, logits, *(layers or {}).values()) if x is not None]
    step = rows_per_chunk(max(widths))
    chunks: list[HeadPrediction] = []
    for start in range(0, max(len(z), 1), step):
        rows = slice(start, start + step)
        out = forward(*(_some_rows(part, rows, device) for part in (z, logits, None, groups, layers)))
        chunks.append(HeadPrediction(*(column.cpu() for column in out)))
    columns: list[Tensor] = [torch.cat(column) for column in zip(*chunks, strict=True)]
    return HeadPrediction(*columns)


def group_indices(groups: Any, rows: int) -> Int[Tensor, "B"] | None:
    """Groups of points as a tensor on the CPU, one for each row; None stays None."""
    if groups is None:
        return None
    # A copy: columns of tables may be read-only, and torch warns of such memory.
    given = groups.cpu() if isinstance(groups, Tensor) else torch.from_numpy(np.array(groups))
    if given.shape != (rows,) or given.is_floating_point() or given.dtype == torch.bool:
        raise ValueError(
            f"Expected {rows} groups, one integer for each row; got {given.dtype} of shape {tuple(given.shape)}."
        )
    return given.long()


def _empty_parts(in_features: int, classes: list[Any]) -> tuple[Projection, SEPC, Evidence]:
    """The modules of a head whose classes have one training point each, all at one place."""
    codes = np.arange(len(classes))
    balls = [Ellipsoid(np.zeros(1), np.eye(1))] * len(classes)
    training = TrainingCounts.from_ledger(
        torch.from_numpy(codes), ledger(balls, np.zeros((len(classes), 1)), codes, len(classes)), torch.float32
    )
    bank = EllipsoidBank(torch.zeros(len(classes), 1), torch.ones(len(classes), 1, 1))
    sepc = SEPC(bank, training, torch.ones(len(classes), dtype=torch.int64), torch.ones(1), classes=classes)
    regions = EllipsoidBank(torch.zeros(len(classes), 1), torch.ones(len(classes), 1, 1))
    ones = torch.ones(len(classes))
    evidence = Evidence(
        _projection(in_features + 1, least_length=torch.ones(())),
        RegionDensities(regions, ones, ones.clone(), torch.from_numpy(codes)),
        _projection(in_features),
        Neighbours(torch.zeros(len(classes), in_features), torch.from_numpy(codes), eleven_bits=True),
        SharedGaussian(torch.ones(1, 1), torch.zeros(len(classes), 1), torch.ones(1), torch.zeros(())),
    )
    return _projection(in_features), sepc, evidence


def _empty_layer(classes: int) -> LayerDistance:
    """A layer of one feature, to be filled from a state dict."""
    gaussian = SharedGaussian(torch.ones(1, 1), torch.zeros(classes, 1), torch.ones(1), torch.zeros(()))
    return LayerDistance(_projection(2, least_length=torch.ones(())), gaussian)


def _projection(columns: int, least_length: Tensor | None = None) -> Projection:
    return Projection(
        torch.zeros(columns), torch.zeros(1, columns), unit_length=least_length is not None, least_length=least_length
    )

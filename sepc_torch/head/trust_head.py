r"""The module :class:`TrustHead`: fit, calibrate, predict, accept and save, for a neural network's embeddings.

::

    head = TrustHead.fit(embeddings, labels)        # arrays, a DataLoader and the encoder, or Parquet
    head.calibrate(held_out, their_labels, their_logits)
    out = head(encoder(x), logits=classifier(encoder(x)))
    out.network_trust                               # the paper's trust: share of training points that support the label
    out.confidence                                  # probability that the label is right
    out.joint, out.accept                           # probability that it is right and the point known; accept or not
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from sepc_torch.data import files
from sepc_torch.data.arrays import count, float64_device, numeric_points, usable_device
from sepc_torch.data.progress import Choice
from sepc_torch.data.table_encoding import TableEncoding
from sepc_torch.ellipsoid import DEFAULT_FLOOR
from sepc_torch.head.calibration import Calibrated, Calibration
from sepc_torch.head.calibration_set import calibration_set
from sepc_torch.head.certificate import UpdateCertificate, certify
from sepc_torch.head.conformal import check_share
from sepc_torch.head.empty import empty_parts
from sepc_torch.head.evidence import Evidence
from sepc_torch.head.explanation import DecisionExplanation, ExplainedHead, explain_decisions
from sepc_torch.head.fit_options import FitOptions
from sepc_torch.head.graphed import GraphedHead
from sepc_torch.head.groups import By, GroupAcceptance, accept_by_group
from sepc_torch.head.head_files import read_head, write_head
from sepc_torch.head.judge import GPU_ROWS, forward_in_pieces, group_indices, judge_rows
from sepc_torch.head.label_calibration import Acceptance
from sepc_torch.head.novelties import Novelties, find_novelties
from sepc_torch.head.prediction import HeadPrediction
from sepc_torch.head.projection import Method, Normalize, Projection
from sepc_torch.head.promise import Promise
from sepc_torch.head.sources import embedding_source
from sepc_torch.head.training_set import KeptTrainingSet, kept_points
from sepc_torch.model.buffers import at_least_float32, convert_state, resize_buffers
from sepc_torch.model.device_sync import can_synchronize, warm_up
from sepc_torch.model.queries import (
    check_logits,
    class_codes,
    feature_columns,
    points_as_tensor,
    refuse_rows_without_prediction,
    rows_without_prediction,
    select_row,
)
from sepc_torch.model.sepc import SEPC, NanPolicy, Nearest
from sepc_torch.partitioning.record import Rest
from sepc_torch.shapes import Array, Bool, Int

# Share of in-distribution points that a newly calibrated head flags.
_FLAG_RATE = 0.05
# Least number of calibration points: both halves of the split need enough points to fit and to rank.
LEAST_CALIBRATION = 20


class TrustHead(nn.Module):
    """SEP-C classifier on projected embeddings that also assesses the labels of a network.

    Args:
        projection: Projection from embeddings to the coordinates of the partition.
        sepc: The frozen SEP-C classifier on projected embeddings.
        evidence: Class densities and reference points, or None for a head that cannot be calibrated.
        feature_names: Names of the features that the head was fitted on, if they came in a table.
        reference_ids: Identifiers of the reference points in the training set, for explanations.
        training_set: The training points that :meth:`update`, :meth:`forget` and :meth:`refit` need, or None.
        encoding: Encoding of a table with categories and missing values as these features; tables are then encoded
            before they are judged.

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
    Acceptance(threshold=..., coverage=0.9..., error=0.0, points=200, found=True)
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
        max_per_class: int | Literal["auto"] | None = "auto",
        rest: Rest = "whole",
        max_isolated: int | None = 256,
        nearest: Nearest = "mahalanobis",
        nan_policy: NanPolicy = "raise",
        reference_points: int | None = None,
        floor: float = DEFAULT_FLOOR,
        solver: str = "native",
        n_jobs: int | None = None,
        progress: Choice = "auto",
        classes: Any = None,
        ids: Any = None,
        keep_points: bool = False,
        device: torch.device | str | None = None,
        witnesses: int | None = None,
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
                device.
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
            rest: How a class of more than two is separated from the others; see :func:`~sepc_torch.partition`.
            max_isolated: Largest number of isolated training points that get an ellipsoid of their own, a ball; None
                for all. If there are more, none gets one: they would cost as much as other ellipsoids and hold no new
                point.
            nearest: The distance that finds the nearest ellipsoid of a point outside every ellipsoid; see
                :meth:`SEPC.from_partition`.
            nan_policy: ``"raise"`` or ``"flag"`` for embeddings that hold NaN or, with ``"l2"``, only zeros, and for
                logits that hold NaN. Flagged rows have the label -1, no trust and no confidence, and are not accepted;
                see :class:`~sepc_torch.HeadPrediction`. Compiled code and CUDA graphs flag under either policy.
            reference_points: Largest number of training embeddings to keep for the distance to the nearest one; at
                least one per class. By default 16 384, and fewer above 512 features. With 0 the head keeps none, and
                confidence and nonconformity score depend on the class densities only.
            floor: Least semi-axis, in standard deviations.
            solver: ``"native"`` or the name of an installed cvxpy solver.
            n_jobs: Number of processes, as in joblib.
            progress: ``"auto"`` shows a progress bar on a terminal for long fits.
            classes: The labels in the order of the network's logits; by default sorted.
            ids: Identifiers (N,) of the rows, integers or strings, or the name of their column in a table. Explanations
                name training examples by them. By default the positions of the rows; for a loader, the positions in
                its second pass.
            keep_points: Keep the projected training points, so that the head can be updated; see :meth:`update`.
            device: Device that computes distances of training points to ellipsoids (see
                :func:`~sepc_torch.partition`) and covariances of embeddings, in float64. The fitted head is on the CPU;
                :meth:`~torch.nn.Module.to` moves it.
            witnesses: Deprecated name of ``reference_points``.
        """
        from sepc_torch.head.fit import fit_parts  # imported here: a frozen head runs without the solvers

        if witnesses is not None:
            if reference_points is not None:
                raise ValueError("Pass reference_points only; witnesses is its deprecated name.")
            warnings.warn("witnesses is deprecated; use reference_points.", DeprecationWarning, stacklevel=2)
            reference_points = witnesses
        options = FitOptions(
            dim=dim,
            normalize=normalize,
            projection=projection,
            max_impure=max_impure,
            max_per_class=max_per_class,
            rest=rest,
            max_isolated=max_isolated,
            nearest=nearest,
            nan_policy=nan_policy,
            reference_points=reference_points,
            floor=floor,
            solver=solver,
            n_jobs=n_jobs,
            progress=progress,
            device=None if device is None else float64_device(device),
            keep_points=bool(keep_points),
        )
        return cls(*fit_parts(embedding_source(embeddings, labels, encoder, ids), classes, options))

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
        return cls(*empty_parts(count(in_features, "in_features", least=1), list(classes)))

    @property
    def classes(self) -> list[Any]:
        """The labels, in the order of the class indices."""
        return self.sepc.classes

    @property
    def in_features(self) -> int:
        """Number of features D of the embeddings."""
        return self.projection.in_features

    def forward(
        self, z: Tensor, logits: Tensor | None = None, labels: Tensor | None = None, groups: Tensor | None = None
    ) -> HeadPrediction:
        """Predict a batch of embeddings (B, D), and assess the network's labels for them.

        With ``nan_policy="flag"`` and ``nearest="mahalanobis"`` the call does not synchronise with a CUDA device, so a
        CUDA graph can record it. ``nan_policy="raise"`` and ``labels`` are checked by value and synchronise.

        Args:
            z: The embeddings.
            logits: The network's logits (B, C), or None.
            labels: The network's labels as indices (B,) into ``classes``, or None. Pass at most one of ``logits`` and
                ``labels``.
            groups: The groups (B,) of the points, if :meth:`accept_at` was given groups; points of an unknown group are
                not accepted.
        """
        if logits is not None and labels is not None:
            raise ValueError("Pass logits or labels, not both: each gives the network's prediction.")
        if isinstance(z, Tensor) and z.is_cuda and z.dim() == 2 and len(z) > GPU_ROWS and can_synchronize(z):
            return forward_in_pieces(self, z, logits, labels, groups)
        if isinstance(z, Tensor):
            z = z.to(self.projection.shift.dtype)  # the same answer for every dtype of the input
        points = self.projection(z)
        if logits is None:
            own, given = self.sepc.judge(points, labels)
        else:
            check_logits(logits, (z.shape[0], len(self.classes)), z.device)
            # argmax returns a valid class index even for rows with NaN; these rows are masked below.
            own, given = self.sepc.judge(points, logits.argmax(dim=1), checked=True)
            missing = rows_without_prediction(logits)
            if self.sepc.nan_policy == "raise" and can_synchronize(missing):
                refuse_rows_without_prediction(
                    missing, "Drop those rows, or fit the head with nan_policy='flag', which gives them the label -1."
                )
            given = given._replace(
                label=torch.where(missing, -1, given.label),
                trust=torch.where(missing, 0.0, given.trust),
                margin=torch.where(missing, torch.nan, given.margin),
            )
        places = own.nearest, groups
        calibrated = self._calibrated(z, given.label, own.label < 0, logits, places, logits is None and labels is None)
        return HeadPrediction(*own, given.label, given.trust, given.margin, *calibrated)

    def _calibrated(
        self,
        z: Tensor,
        label: Int[Tensor, "B"],
        invalid: Bool[Tensor, "B"],
        logits: Tensor | None,
        places: tuple[Int[Tensor, "B"], Int[Tensor, "B"] | None],
        own: bool,
    ) -> Calibrated:
        """Return the calibrated values of labels; rows without a label or with an invalid embedding are refused."""
        if self.evidence is None or self.calibration is None:
            unknown = torch.full(label.shape, torch.nan, device=label.device)
            return Calibrated(unknown, unknown, unknown, unknown, unknown, torch.zeros_like(invalid))
        if logits is not None and self.calibration.without_logits and not torch.compiler.is_compiling():
            warnings.warn(
                "This head was calibrated without logits, so the network's labels have no calibration: their "
                "confidence and joint score are NaN, and none is accepted. Calibrate with logits, or call the head "
                "without logits.",
                stacklevel=5,  # two frames of nn.Module.__call__ lie between
            )
        self._warn_if_stale(stacklevel=6)
        found = self.calibration(
            self.evidence.measure(z), label, invalid, logits, own=own, region=places[0], group=places[1]
        )
        return found.to(z.dtype)

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

        >>> head = TrustHead.fit([[1.0, 0.0], [2.0, 0.1], [0.0, 1.0], [0.1, 2.0]], [0, 0, 1, 1], dim=1)
        >>> head.warmup(1, 64) > 0.0
        True
        """

        def run(z: Tensor) -> None:
            self(z)
            if self.calibration is None or not self.calibration.without_logits:
                self(z, logits=z.new_zeros(z.shape[0], len(self.classes)))

        return warm_up(run, self.projection.matrix.new_empty(0, self.in_features), rows)

    @torch.inference_mode(False)  # the new buffers outlive the call, and load_state_dict writes to them
    @torch.no_grad()
    def calibrate(
        self,
        embeddings: Any,
        labels: Any,
        logits: Any = None,
        *,
        rank_fraction: float = 0.5,
        seed: int = 0,
        hold_out: float | None = None,
    ) -> TrustHead:
        """Calibrate the head with points that neither the network nor the head was fitted on.

        After calibration :attr:`HeadPrediction.confidence` is a probability, p-values and joint scores are defined, and
        the head accepts on average at least 95 % of the points of the calibration distribution. :meth:`accept_at`
        changes the threshold.

        Args:
            embeddings: (M, D) embeddings of at least 20 points, from the distribution of the points to assess.
            labels: The true labels (M,).
            logits: The network's logits (M, C). Without logits only the head's own labels are calibrated, and softmax
                is not used.
            rank_fraction: The share of the points that are only ranked, for p-values and thresholds; the other points
                fit the joint score. The guarantees hold because no point does both.
            seed: Seed of the random choice of the ranked points.
            hold_out: Deprecated name of ``rank_fraction``.
        """
        if self.evidence is None or self.calibration is None:
            raise RuntimeError("This head has no evidence to calibrate; make it with TrustHead.fit.")
        if hold_out is not None:
            # Two frames of the decorators lie between this method and its caller.
            warnings.warn("hold_out is deprecated; use rank_fraction.", DeprecationWarning, stacklevel=4)
            rank_fraction = hold_out
        rank_fraction, seed = check_share(rank_fraction, "rank_fraction"), count(seed, "seed")
        points = numeric_points(feature_columns(self._encoded(embeddings), self.feature_names), "embeddings")[0]
        z = torch.tensor(points, dtype=torch.float32, device=self.sepc.codes.device)
        codes = class_codes(labels, self.classes, len(z), z.device)
        if len(z) < LEAST_CALIBRATION:
            raise ValueError(f"{len(z)} points are too few to calibrate with; pass at least {LEAST_CALIBRATION}.")
        own = self.sepc(self.projection(z))
        data = calibration_set(self.evidence, z, codes, own.label, logits, len(self.classes))
        calibration = Calibration(self.evidence.support_names, len(self.evidence.kinds))
        calibration.fit(
            *(data.values, data.right, codes, len(self.classes), rank_fraction, seed),
            *(data.logits, data.label, own.nearest),
        )
        self.calibration = calibration.to(z.device)
        self.training_set = None if self.training_set is None else self.training_set.calibrated()
        self._stale_warned = False
        self.accept_at(flag_rate=self.calibration.own.least_flag_rate(_FLAG_RATE))
        return self

    @overload
    def accept_at(
        self, *, risk: float | None = None, delta: float = 0.05, flag_rate: float | None = None, by: None = None
    ) -> Acceptance: ...

    @overload
    def accept_at(self, *, risk: float, delta: float = 0.05, by: By | Any, joint: bool = True) -> GroupAcceptance: ...

    def accept_at(
        self,
        *,
        risk: float | None = None,
        delta: float = 0.05,
        flag_rate: float | None = None,
        by: By | Any = None,
        joint: bool = True,
    ) -> Acceptance | GroupAcceptance:
        """Set the acceptance threshold, with a guarantee for every sample size. Pass ``risk`` or ``flag_rate``.

        Args:
            risk: The allowed share of wrong labels among the accepted ones. It holds with probability 1 - ``delta``
                over the calibration points. If no threshold qualifies, nothing is accepted, ``found`` is False, and a
                warning says which risk could be promised.
            delta: The allowed probability that the guarantee of ``risk`` fails.
            flag_rate: The share of points of the calibration distribution that may be refused, on average over
                calibration sets.
            by: Keep the risk in every group, not only on average; see :mod:`sepc_torch.head.groups` for the proof.

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

        Returns:
            With ``by``, a record of every group; see :class:`~sepc_torch.head.groups.GroupAcceptance`. Otherwise the
            threshold with its coverage and error on the ranked calibration points: for the network's labels if
            :meth:`calibrate` had logits, otherwise for the head's own labels. Labels without a calibration are never
            accepted: labels passed as ``labels=``, and the network's labels after a calibration without logits.
        """
        if self.calibration is None or not self.calibration.done:
            raise RuntimeError("The head must be calibrated first: head.calibrate(embeddings, labels, logits).")
        if (risk is None) == (flag_rate is None):
            raise ValueError("Pass exactly one of risk and flag_rate.")
        self._warn_if_stale(stacklevel=3)
        network = self.calibration.network if self.calibration.network.done else None
        if by is not None:
            if risk is None:
                raise ValueError("by keeps a risk in every group; pass risk, not flag_rate.")
            table = accept_by_group(self.calibration.own, self.sepc, risk, delta, by, joint)
            if network is not None:
                table = accept_by_group(network, self.sepc, risk, delta, by, joint)
            some = any(row.found for row in table.groups)
            self.promise = Promise(risk, delta, None, by if isinstance(by, str) else "group", some)
            if not table.found:
                refused = sum(not row.found for row in table.groups)
                warnings.warn(
                    f"The risk {risk:g} cannot be promised in {refused} of {len(table.groups)} groups; the head "
                    "accepts none of their points. Print the result for a table; calibrate with more points, or raise "
                    "risk.",
                    stacklevel=2,
                )
            return table
        found = self.calibration.own.accept(risk, delta, flag_rate)
        if network is not None:
            found = network.accept(risk, delta, flag_rate)
        self.promise = Promise(risk, delta, flag_rate, found=found.found)
        if risk is not None and not found.found:
            limits = (network or self.calibration.own).shortfall(risk, delta)
            warnings.warn(f"The head accepts nothing: {limits}", stacklevel=2)
        return found

    @torch.no_grad()
    def explain(
        self, z: Any, i: int | None = None, *, logits: Any = None, groups: Any = None
    ) -> DecisionExplanation | list[DecisionExplanation]:
        """Explain the decisions that :meth:`forward` takes: accepted or refused, why, and similar training examples.

        Args:
            z: One embedding (D,) or a batch (B, D), in any form that :meth:`judge` takes.
            i: Row of the batch to explain; by default all rows, as a list.
            logits: The network's logits (C,) or (B, C). Without logits the head's own labels are explained.
            groups: (B,) groups of the points, if :meth:`accept_at` was given groups.

        Returns:
            For each row a record: ``str()`` gives a sentence and the numbers, ``to_dict()`` all values.

        >>> head = TrustHead.fit([[1.0, 0.0], [2.0, 0.1], [0.0, 1.0], [0.1, 2.0]], [0, 0, 1, 1], dim=1)
        >>> found = head.explain([3.0, 0.1], logits=[2.0, 0.0])
        >>> print(found.sentence)
        Not decided: the head is not calibrated. The network's label is 0; the paper's trust in it is 1.000.
        >>> [example.id for example in found.examples]
        [1, 0]
        """
        if i is not None and getattr(i, "shape", ()) != ():
            raise TypeError(
                f"i is the number of a row, got {type(i).__name__}. Pass logits by name: explain(z, logits=...)."
            )
        points, row = select_row(self.as_tensor(z), i)
        given = None
        if logits is not None:
            given = select_row(points_as_tensor(logits, None, points.device, points.dtype), i)[0]
        group = group_indices(groups, len(points) if row is None else 1 if groups is None else len(groups))
        if group is not None:
            group = (group if row is None else group[row : row + 1]).to(points.device)
        out = self(points, logits=given, groups=group)
        own, thresholds = given is None, None
        if self.calibration is not None:
            labels = self.calibration.own if own else self.calibration.network
            if labels.done:
                least = labels.least_score(out.network_label.clamp_min(0), out.nearest, group)
                thresholds = least.expand(len(points)).tolist()
        parts = ExplainedHead(self.projection, self.sepc, self.evidence, self.reference_ids, self.feature_names, own)
        rows = explain_decisions(parts, points, given, out, thresholds)
        return rows if row is None else rows[0]

    @torch.no_grad()
    def judge(self, z: Any, logits: Any = None, groups: Any = None) -> HeadPrediction:
        """Assess embeddings in any form, a chunk of rows at a time.

        Args:
            z: (B, D) embeddings: an array, list of rows, tensor on any device, or a table with the columns that the
                head was fitted on.
            logits: (B, C) logits of the network in any of these forms, or None.
            groups: (B,) groups of the points, if :meth:`accept_at` was given groups.

        Returns:
            The fields of :meth:`forward`, on the CPU.

        >>> head = TrustHead.fit([[1.0, 0.0], [2.0, 0.1], [0.0, 1.0], [0.1, 2.0]], [0, 0, 1, 1], dim=1)
        >>> head.judge([[3.0, 0.0], [0.0, 3.0]]).label
        tensor([0, 1])
        """
        cpu, dtype = torch.device("cpu"), self.projection.shift.dtype
        points = points_as_tensor(self._encoded(z), self.feature_names, cpu, dtype)
        if points.dim() != 2:
            raise ValueError(f"Expected embeddings of shape (B, {self.in_features}), got {tuple(points.shape)}.")
        given = None if logits is None else points_as_tensor(logits, None, cpu, dtype)
        if given is not None and len(given) != len(points):
            raise ValueError(
                f"Got {len(points)} rows of embeddings and {len(given)} rows of logits; pass one for each."
            )
        return judge_rows(self, points, given, self.sepc.codes.device, group_indices(groups, len(points)))

    def report(
        self,
        z: Any,
        y: Any = None,
        logits: Any = None,
        path: str | os.PathLike[str] = "report.html",
        images: Any = None,
        texts: Any = None,
        ids: Any = None,
        class_names: Any = None,
        unknown: Any = None,
        groups: Any = None,
        drift: Any = None,
    ) -> Path:
        """Write a trust report of labelled or unlabelled points: one HTML file, and its numbers in a JSON file beside.

        The arguments are those of :func:`sepc_torch.report.write_report` (extra ``report``).

        Returns:
            The path of the HTML file.
        """
        from sepc_torch.report import write_report  # imported here: a head runs without the packages of a report

        return write_report(
            self,
            z,
            y,
            logits,
            path,
            images=images,
            texts=texts,
            ids=ids,
            class_names=class_names,
            unknown=unknown,
            groups=groups,
            drift=drift,
        )

    def novelties(self, z: Any, logits: Any = None, fdr: float = 0.1) -> Novelties:
        """Declare which samples of a batch are novel, with the false discovery rate controlled.

        On average at most a share ``fdr`` of the samples declared novel are ordinary: drawn from the distribution of
        the calibration points. :func:`~sepc_torch.head.novelties.find_novelties` has the procedure and its proof. The
        rate is over calibration sets and batches; no promise is made about one batch, or for samples that were chosen
        by their scores. Rows without a prediction count as the least typical.

        Args:
            z: (B, D) embeddings in any form that :meth:`judge` takes.
            logits: (B, C) logits of the network, or None for p-values without their energy.
            fdr: The allowed share of ordinary samples among those declared novel.
        """
        if self.calibration is None or not self.calibration.done:
            raise RuntimeError("The head must be calibrated first: head.calibrate(embeddings, labels, logits).")
        network = self.calibration.network if logits is not None and self.calibration.network.done else None
        ranked = len((network or self.calibration.own).held_nonconformity)
        return find_novelties(self.judge(z, logits).p_value, ranked, fdr)

    @torch.no_grad()
    def predict(self, z: Any) -> Array:
        """Return the head's own predictions as a NumPy array of the user's labels."""
        return self.sepc.predict(self.projection(self.as_tensor(z)))

    @property
    def marked(self) -> tuple[Any, ...]:
        """Labels of the classes whose ellipsoids :meth:`refit` must solve again."""
        return () if self.training_set is None else tuple(self.classes[c] for c in self.training_set.marked)

    @property
    def calibration_age(self) -> float:
        """Points added and forgotten since :meth:`calibrate` (or the fit), as a share of the training points."""
        return 0.0 if self.training_set is None else self.training_set.age

    def _warn_if_stale(self, stacklevel: int) -> None:
        """Warn, once after a calibration, that training points changed since."""
        if torch.compiler.is_compiling() or self._stale_warned or not self.calibration_age:
            return
        if self.calibration is None or not self.calibration.done:
            return
        self._stale_warned = True
        warnings.warn(
            f"The calibration is stale: {self.calibration_age:.1%} of the training points were added or forgotten "
            "since. Its promises and p-values are those of the head before; call head.calibrate again.",
            stacklevel=stacklevel,
        )

    def update(self, z: Any, y: Any, ids: Any = None) -> TrustHead:
        """Add labelled embeddings (M, D) of known classes; see :func:`sepc_torch.head.updates.add_points`."""
        return self._updated("add_points", z, y, ids)

    def forget(self, ids: Any) -> TrustHead:
        """Remove the points with these identifiers; see :func:`sepc_torch.head.updates.remove_points`."""
        return self._updated("remove_points", ids)

    def refit(self, classes: Any = None, n_jobs: int | None = None, progress: Choice = "auto") -> TrustHead:
        """Solve the ellipsoids of the marked or given classes again; see :func:`sepc_torch.head.updates.refit`."""
        return self._updated("refit", classes, n_jobs, progress)

    def certificate(self) -> UpdateCertificate:
        """Say of each class what updates did, and how near its ellipsoids are to those of a full fit."""
        return certify(self.sepc, kept_points(self.training_set))

    @torch.inference_mode(False)  # the new buffers outlive the call
    @torch.no_grad()
    def _updated(self, change: str, *args: Any) -> TrustHead:
        """Replace classifier, evidence and training points by the result of a function of the module ``updates``."""
        from sepc_torch.head import updates  # imported here: a frozen head runs without the solvers

        kept, evidence = kept_points(self.training_set), self.evidence
        assert evidence is not None  # fits that keep points fit the evidence too
        parts = updates.UpdatableParts(self.projection, self.sepc, evidence, kept, self.feature_names)
        _, self.sepc, self.evidence, self.training_set, _ = getattr(updates, change)(parts, *args)
        self.reference_ids = self.training_set.reference_ids
        return self

    def as_tensor(self, z: Any) -> Tensor:
        """Convert embeddings to a tensor on the head's device: an array, list of rows, tensor, or a table.

        From a table the columns are taken that the head was fitted on, in any order.
        """
        where, dtype = self.sepc.codes.device, self.projection.shift.dtype
        return points_as_tensor(self._encoded(z), self.feature_names, where, dtype)

    def _encoded(self, z: Any) -> Any:
        """The features of a table, if the head has an encoding; anything else is returned as it is."""
        return z if self.encoding is None or not hasattr(z, "columns") else self.encoding.encode(z).points

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the head to a safetensors file, without pickle; of training points, reference and kept points only."""
        options = {"sepc": self.sepc.get_extra_state(), **self.get_extra_state()}
        write_head(path, self.state_dict(), options, self.training_set)

    def to_onnx(self, path: str | os.PathLike[str], *, logits: bool | None = None) -> None:
        """Write the head as an ONNX file of standard operators, opset 18, for any batch size (extra ``onnx``).

        The inputs are ``z`` (B, D) and ``logits`` (B, C), the outputs are the fields of
        :class:`~sepc_torch.HeadPrediction`. The metadata of the file hold ``classes``, ``feature_names`` and
        ``in_features`` as JSON. Rows with NaN are flagged, whatever the ``nan_policy``. Of ellipsoids equally near to a
        point outside, the graph expands at most four.

        Args:
            path: The file to write.
            logits: Whether the graph takes logits; by default if the head was calibrated with logits.
        """
        from sepc_torch.serving.export import write_onnx  # imported here: a head runs without the packages of ONNX

        write_onnx(self, path, logits=logits)

    def export(self, path: str | os.PathLike[str], *, logits: bool | None = None) -> None:
        """Write the head as a ``.pt2`` file that ``torch.export.load`` reads in a process without this package.

        ``torch.export.load(path).module()(z, logits)`` returns a dictionary of the fields of
        :class:`~sepc_torch.HeadPrediction`, on the CPU. Arguments and limits are those of :meth:`to_onnx`; the
        description is the extra file ``head.json``.
        """
        from sepc_torch.serving.export import write_pt2  # imported here: it stands above this module

        write_pt2(self, path, logits=logits)

    @classmethod
    def load(cls, path: str | os.PathLike[str], device: torch.device | str = "cpu") -> TrustHead:
        """Load a head that :meth:`save` wrote, onto a device."""
        where = usable_device(device)
        parts = read_head(path)
        with files.interpreting(path):
            head = cls(parts.projection, parts.sepc, parts.evidence, training_set=parts.training_set)
            head.set_extra_state(parts.options)
            if head.calibration is not None:
                if head.projection.matrix.dtype == torch.float64:
                    head.calibration.double()
                resize_buffers(head.calibration, parts.calibration, "")
                head.calibration.load_state_dict(parts.calibration)
            return head.to(where)

    def get_extra_state(self) -> dict[str, Any]:
        """Return the options that are not buffers."""
        names = None if self.feature_names is None else list(self.feature_names)
        ids = None if self.reference_ids is None else list(self.reference_ids)
        promise = None if self.promise is None else self.promise._asdict()
        encoding = {} if self.encoding is None else {"encoding": self.encoding.to_dict()}
        named = {"feature_names": names, "reference_ids": ids, "promise": promise, **encoding}
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

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TrustHead:
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

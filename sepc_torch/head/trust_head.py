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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from sepc_torch.data import files
from sepc_torch.data.options import count, float64_device, usable_device
from sepc_torch.data.progress import Choice
from sepc_torch.ellipsoid import DEFAULT_FLOOR
from sepc_torch.head.calibrated_head import CalibratedHead
from sepc_torch.head.certificate import UpdateCertificate, certify
from sepc_torch.head.empty import empty_parts
from sepc_torch.head.explanation import DecisionExplanation, ExplainedHead, explain_decisions
from sepc_torch.head.fit_options import FitOptions
from sepc_torch.head.head_files import read_head, write_head
from sepc_torch.head.judge import group_indices
from sepc_torch.head.projection import Method, Normalize
from sepc_torch.head.sources import embedding_source
from sepc_torch.head.training_set import kept_points
from sepc_torch.model.buffers import resize_buffers
from sepc_torch.model.queries import points_as_tensor, select_row
from sepc_torch.model.sepc import NanPolicy, Nearest
from sepc_torch.partitioning.record import Rest


class TrustHead(CalibratedHead):
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

    @property
    def marked(self) -> tuple[Any, ...]:
        """Labels of the classes whose ellipsoids :meth:`refit` must solve again."""
        return () if self.training_set is None else tuple(self.classes[c] for c in self.training_set.marked)

    def update(self, z: Any, y: Any, ids: Any = None) -> TrustHead:
        """Add labelled embeddings (M, D), or rows of a table; see :func:`sepc_torch.head.updates.add_points`."""
        return self._updated("add_points", self._encoded(z), y, ids)

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

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the head to a safetensors file, without pickle; of training points, reference and kept points only."""
        options = {"sepc": self.sepc.get_extra_state(), **self.get_extra_state()}
        write_head(path, self.state_dict(), options, self.training_set)

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

    def to_onnx(self, path: str | os.PathLike[str], *, logits: bool | None = None) -> None:
        """Write the head as an ONNX file of standard operators, opset 18, for any batch size (extra ``onnx``).

        The inputs are ``z`` (B, D) and ``logits`` (B, C), the outputs are the fields of
        :class:`~sepc_torch.HeadPrediction`. The metadata of the file hold ``classes``, ``feature_names``,
        ``in_features`` and ``encoding`` as JSON. A head of a table with categories takes encoded numbers, which
        :meth:`encode` returns. Rows with NaN are flagged, whatever the ``nan_policy``. Of ellipsoids equally near to a
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

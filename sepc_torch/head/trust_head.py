r"""A trust head for the embeddings of a neural network: normalise, project, partition, freeze.

::

    head = TrustHead.fit(embeddings, labels)        # arrays or tensors, or a DataLoader and the encoder
    head.calibrate(held_out, their_labels, their_logits)
    out = head(encoder(x), logits=classifier(encoder(x)))
    out.network_trust                               # the paper's trust: which training points vouch for the label
    out.confidence, out.joint, out.accept           # the probability that it is right; right and known; good enough?
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor, nn

from sepc_torch.data import files
from sepc_torch.data.arrays import check_choice, count, float64_device, numeric_points, training_set, usable_device
from sepc_torch.data.progress import Choice
from sepc_torch.ellipsoid import DEFAULT_FLOOR
from sepc_torch.head.calibration import Acceptance, Calibrated, Calibration
from sepc_torch.head.conformal import check_share
from sepc_torch.head.embeddings import gather
from sepc_torch.head.evidence import Evidence, fit_evidence, pieces_of
from sepc_torch.head.prediction import HeadPrediction
from sepc_torch.head.projection import Method, Normalize, Projection, default_dim, fit_projection, warn_of_small_classes
from sepc_torch.model.buffers import at_least_float32, resize_buffers
from sepc_torch.model.device_sync import can_synchronize, warm_up
from sepc_torch.model.explanation import Explanation
from sepc_torch.model.queries import check_logits, class_codes, refuse_rows_without_prediction, rows_without_prediction
from sepc_torch.model.sepc import SEPC, NanPolicy, Nearest
from sepc_torch.shapes import Bool, Int

# Training points kept to measure how near the next one is, and how many numbers that may be: 32 MiB.
_WITNESSES = 16384
_WITNESS_NUMBERS = 2**23
# Ordinary points that a freshly calibrated head refuses.
_FLAG_RATE = 0.05
# The share of calibration points that may lie on training points by chance: some data sets repeat themselves.
_MOST_TWINS = 0.5
# Calibration points that can be split in two halves which still say something.
LEAST_CALIBRATION = 20
# Fewer than this are hardly a picture of an embedding; it is said when a tiny class is the reason.
_FEW_DIMENSIONS = 4


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

    Calibrated on other points, it accepts what is ordinary and likely to be right:

    >>> held = rng.normal(size=(400, 16)) + 3.0 * labels[:, None]
    >>> head.calibrate(held, labels).accept_at(flag_rate=0.1)
    Acceptance(threshold=..., coverage=0.9..., error=0.0, points=200, found=True)
    >>> head(torch.tensor(held[:2] + np.array([[0.0], [50.0]]))).accept
    tensor([ True, False])
    """

    def __init__(self, projection: Projection, sepc: SEPC, evidence: Evidence | None = None) -> None:
        super().__init__()
        self.projection = projection
        self.sepc = sepc
        self.evidence = evidence
        self.calibration = None if evidence is None else Calibration(evidence.names, evidence.kinds)

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
        witnesses: int | None = None,
        floor: float = DEFAULT_FLOOR,
        solver: str = "native",
        n_jobs: int | None = None,
        progress: Choice = "auto",
        classes: Any = None,
        device: torch.device | str | None = None,
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
            nan_policy: ``"raise"`` or ``"flag"`` embeddings that hold NaN or, with ``"l2"``, nothing but zeros, and
                logits that hold NaN. Flagged rows get the label -1, no trust and no confidence, and are not accepted;
                see :class:`~sepc_torch.HeadPrediction`. Compiled and in a CUDA graph every policy flags.
            witnesses: How many training embeddings the head keeps, at most, to measure the distance to the nearest; by
                default 16 384, fewer above 512 features; of every class at least one. With 0 it keeps none, and
                confidence and strangeness rest on the regions alone.
            floor: Least semi-axis, in standard deviations.
            solver: ``"native"`` or the name of an installed cvxpy solver.
            n_jobs: Processes, as in joblib.
            progress: ``"auto"`` shows a bar on a terminal for long fits.
            classes: The labels in the order of the network's logits; by default sorted.
            device: Where to measure training points against all the ellipsoids; see
                :func:`~sepc_torch.partition`. The head itself is made on the CPU, :meth:`~torch.nn.Module.to` moves it.
        """
        from sepc_torch.partitioning.fit import partition  # a frozen head runs where the offline half is not installed

        if normalize not in ("l2", "standardize", None):
            raise ValueError(f"normalize must be 'l2', 'standardize' or None, got {normalize!r}.")
        check_choice("projection", projection, get_args(Method))
        if witnesses is not None:
            count(witnesses, "witnesses")
        if device is not None:
            device = float64_device(device)
        embeddings, labels = gather(embeddings, labels, encoder)
        data = training_set(embeddings, labels, classes, least_per_class=1)
        sizes = np.bincount(data.codes)
        features = data.points.shape[1]
        if dim is None:
            dim = default_dim(sizes, features)
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
        warn_of_small_classes(sizes, len(project.matrix), data.classes)
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
            device=device,
        )
        sepc = SEPC.from_partition(part, nearest, nan_policy=nan_policy)
        sepc.feature_names = tuple(f"component {j}" for j in range(sepc.dim))
        if witnesses is None:
            witnesses = min(_WITNESSES, _WITNESS_NUMBERS // features)
        pieces = pieces_of(part, points, data.codes, device)
        return cls(project, sepc, fit_evidence(data.points, data.codes, pieces, witnesses))

    @property
    def classes(self) -> list[Any]:
        """The labels, in the order of indices."""
        return self.sepc.classes

    @property
    def in_features(self) -> int:
        """Number of features D of the embeddings."""
        return self.projection.in_features

    def forward(self, z: Tensor, logits: Tensor | None = None, labels: Tensor | None = None) -> HeadPrediction:
        """Judge a batch of embeddings (B, D), and the network's labels for them where given as logits or as indices.

        On CUDA nothing waits for the device with ``nan_policy="flag"`` and ``nearest="mahalanobis"``, so a CUDA graph
        can hold the call. To raise, values must be looked at, and ``labels`` always are: those wait.
        """
        if logits is not None and labels is not None:
            raise ValueError("Give logits or labels, not both: each says what the network predicted.")
        points = self.projection(z)
        if logits is None:
            own, given = self.sepc.judge(points, labels)
        else:
            check_logits(logits, (z.shape[0], len(self.classes)), z.device)
            # The index of a maximum is that of a class, even where it is NaN; such rows are refused below.
            own, given = self.sepc.judge(points, logits.argmax(dim=1), checked=True)
            silent = rows_without_prediction(logits)
            if self.sepc.nan_policy == "raise" and can_synchronize(silent):
                refuse_rows_without_prediction(
                    silent, "Drop those rows, or fit the head with nan_policy='flag', which refuses them."
                )
            given = given._replace(
                label=torch.where(silent, -1, given.label),
                trust=torch.where(silent, 0.0, given.trust),
                margin=torch.where(silent, torch.nan, given.margin),
            )
        calibrated = self._calibrated(z, given.label, own.label < 0, logits, own=logits is None and labels is None)
        return HeadPrediction(*own, given.label, given.trust, given.margin, *calibrated)

    def _calibrated(
        self, z: Tensor, label: Int[Tensor, "B"], bad: Bool[Tensor, "B"], logits: Tensor | None, *, own: bool
    ) -> Calibrated:
        """What evidence and calibration say of labels; where there is none, or no distance, nothing good."""
        if self.evidence is None or self.calibration is None:
            unknown = torch.full(label.shape, torch.nan, device=label.device)
            return Calibrated(unknown, unknown, unknown, unknown, unknown, torch.zeros_like(bad))
        if logits is not None and self.calibration.without_logits and not torch.compiler.is_compiling():
            warnings.warn(
                "This head was calibrated without logits and knows nothing of the network's labels: their confidence "
                "and joint score are NaN, and none is accepted. Calibrate with logits, or judge without them.",
                stacklevel=5,  # torch's call of a module stands between
            )
        index = label.clamp_min(0)
        facts = self.evidence(z, index)
        bad = bad | facts.support.isnan().any(dim=1)
        facts = facts._replace(strangeness=torch.where(bad[:, None], torch.nan, facts.strangeness))
        found = self.calibration(facts, index, logits, own=own)
        refused = bad | (label < 0)
        return found._replace(
            confidence=torch.where(refused, 0.0, found.confidence),
            class_p_value=torch.where(refused & ~bad, torch.nan, found.class_p_value),
            joint=torch.where(refused, 0.0, found.joint),
            accept=found.accept & ~refused,
        )

    def warmup(self, *rows: int) -> float:
        """Judge random embeddings, so that the first request finds kernels compiled and memory taken.

        Args:
            *rows: The sizes of batches to expect; by default 1 and 4096, on CUDA also 32 768. Each is judged with and
                without logits.

        Returns:
            The seconds it took, up to the end of all work on the device.

        >>> head = TrustHead.fit([[1.0, 0.0], [2.0, 0.1], [0.0, 1.0], [0.1, 2.0]], [0, 0, 1, 1], dim=1)
        >>> head.warmup(1, 64) > 0.0
        True
        """

        def judge(z: Tensor) -> None:
            self(z)
            if self.calibration is None or not self.calibration.without_logits:
                self(z, logits=z.new_zeros(z.shape[0], len(self.classes)))

        return warm_up(judge, self.projection.matrix.new_empty(0, self.in_features), rows)

    @torch.inference_mode(False)  # what is made here is kept, and loaded into later
    @torch.no_grad()
    def calibrate(
        self, embeddings: Any, labels: Any, logits: Any = None, *, hold_out: float = 0.5, seed: int = 0
    ) -> TrustHead:
        """Learn how far to believe labels, from points that neither the network nor the head was fitted on.

        After it :attr:`HeadPrediction.confidence` is a probability, there are p-values and joint scores, and the head
        accepts all but one ordinary point in twenty; :meth:`accept_at` chooses otherwise.

        Args:
            embeddings: (M, D) of at least 20 points, drawn like those to be judged.
            labels: Their true labels (M,).
            logits: The network's logits (M, C). Without them the head's own labels are judged, and softmax is not used.
            hold_out: The share of the points that is only ranked, for p-values and thresholds; the others fit the joint
                score. The promises hold because no point does both.
            seed: For the choice of those.
        """
        if self.evidence is None or self.calibration is None:
            raise RuntimeError("This head has no evidence to calibrate; make it with TrustHead.fit.")
        hold_out, seed = check_share(hold_out, "hold_out"), count(seed, "seed")
        z = torch.from_numpy(numeric_points(embeddings, "embeddings")[0]).float().to(self.sepc.codes.device)
        codes = class_codes(labels, self.classes, len(z), z.device)
        if len(z) < LEAST_CALIBRATION:
            raise ValueError(f"{len(z)} points are too few to calibrate with; give at least {LEAST_CALIBRATION}.")
        own = self.sepc(self.projection(z)).label
        measured = self.evidence.measure(z)
        facts = {"own": self.evidence.judge(measured, own.clamp_min(0))}
        bad = (own < 0) | facts["own"].support.isnan().any(dim=1)
        if bool(bad.any()):
            raise ValueError(
                f"Row {int(bad.nonzero()[0])} of embeddings has no direction; leave it out. The promises then hold for "
                "embeddings that have one."
            )
        if measured.near is not None and float((measured.near.amin(dim=1) == 0).double().mean()) > _MOST_TWINS:
            warnings.warn(
                "Most calibration points are training points of the head: everything new will seem strange. Calibrate "
                "with points that neither the network nor the head was fitted on.",
                stacklevel=4,  # two decorators stand between
            )
        right = {"own": own == codes}
        if logits is not None:
            # NumPy takes lists and tables too; -inf, which masks a class, is allowed.
            given = logits if isinstance(logits, Tensor) else torch.from_numpy(np.array(logits, dtype=np.float64))
            logits = given.to(z.device)
            check_logits(logits, (len(z), len(self.classes)), z.device)
            refuse_rows_without_prediction(
                rows_without_prediction(logits), "Leave those rows out: nothing can be learnt from them."
            )
            label = logits.argmax(dim=1)
            facts["network"] = self.evidence.judge(measured, label)
            right["network"] = label == codes
        calibration = Calibration(self.evidence.names, self.evidence.kinds)
        calibration.fit(facts, right, codes, len(self.classes), hold_out, seed, logits)
        self.calibration = calibration.to(z.device)
        self.accept_at(flag_rate=self.calibration.own.least_flag_rate(_FLAG_RATE))
        return self

    def accept_at(
        self, *, risk: float | None = None, delta: float = 0.05, flag_rate: float | None = None
    ) -> Acceptance:
        """Set which labels the head accepts, with a promise that holds for every sample size.

        Args:
            risk: The share of wrong labels among the accepted that is allowed, kept with probability 1 - ``delta``
                over the calibration points. Where no threshold qualifies nothing is accepted, and ``found`` says so.
            delta: The probability that the promise about risk may fail.
            flag_rate: Instead, the share of ordinary points that may be refused, on average over calibrations.

        Returns:
            The threshold and what it does to the calibration points that were held out. It judges the network's labels
            where logits were given to :meth:`calibrate`, else the head's own. Labels that a calibration says nothing
            about are never accepted: those given as ``labels=``, and the network's after a calibration without logits.
        """
        if self.calibration is None or not self.calibration.done:
            raise RuntimeError("The head must be calibrated first: head.calibrate(embeddings, labels, logits).")
        if (risk is None) == (flag_rate is None):
            raise ValueError("Give risk or flag_rate, one of them.")
        own = self.calibration.own.accept(risk, delta, flag_rate)
        return self.calibration.network.accept(risk, delta, flag_rate) if self.calibration.network.done else own

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
        """Write the head to a safetensors file: no pickle, and no training point but the witnesses."""
        state = self.state_dict()
        arrays = {name: value.cpu().numpy() for name, value in state.items() if isinstance(value, Tensor)}
        files.write(path, "trust_head", arrays, {"sepc": self.sepc.get_extra_state(), **self.get_extra_state()})

    @classmethod
    def load(cls, path: str | os.PathLike[str], device: torch.device | str = "cpu") -> TrustHead:
        """Read a head that :meth:`save` wrote, onto a device."""
        where = usable_device(device)
        arrays, metadata = files.read(path, "trust_head")
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        projection = Projection(
            tensors["projection.shift"], tensors["projection.matrix"], unit_length=metadata["unit_length"]
        )

        def part(prefix: str) -> dict[str, Tensor]:
            return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}

        evidence = Evidence.from_tensors(part("evidence.")) if "evidence.polar.shift" in tensors else None
        head = cls(projection, SEPC.from_tensors(part("sepc."), metadata["sepc"]), evidence)
        if head.calibration is not None:
            if projection.matrix.dtype == torch.float64:
                head.calibration.double()
            resize_buffers(head.calibration, part("calibration."), "")
            head.calibration.load_state_dict(part("calibration."))
        return head.to(where)

    def get_extra_state(self) -> dict[str, Any]:
        """Options that no buffer holds."""
        return {"unit_length": self.projection.unit_length}

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Take over the options."""
        self.projection.unit_length = bool(state["unit_length"])

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TrustHead:
        return super()._apply(at_least_float32(fn), recurse)  # type: ignore[no-untyped-call]

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        resize_buffers(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)

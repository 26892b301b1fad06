r"""Evidence for a label (class densities, nearest training points), and nonconformity scores of a point.

The paper's trust counts the training points of a region. It explains a prediction, but it is 1 in most places and
cannot rank points there. Two log ratios can rank. Both compare the class c of the label with all other classes:

- regions: :math:`\log \frac{p(z, c)}{\sum_{c' \ne c} p(z, c')}` with the densities of
  :mod:`sepc_torch.head.evidence.densities`,
- neighbours: :math:`\log \frac{d_{\ne c}(z)}{d_c(z)}`, the distance to the nearest training point of another class
  over the distance to the nearest training point of the class itself (the trust score of Jiang et al. 2018).

Kinds of nonconformity measure how far a point is from the training data, each in its own way:

- density: minus the log of the largest class density, of direction and length;
- nearest: the distance to the nearest reference point, in the coordinates of the embeddings;
- nearest_white: the same distance with every direction scaled to unit variance;
- mahalanobis: the Mahalanobis distance of directions to the nearest class mean, with the residual outside the
  directions of largest variance (:mod:`sepc_torch.head.evidence.shared_gaussian`);
- one Mahalanobis distance for every earlier layer of the network that the head was fitted with
  (:mod:`sepc_torch.head.evidence.layer_distance`);
- energy, where logits are given: :math:`-\log \sum_c e^{l_c}` (Liu et al. 2020).

:mod:`sepc_torch.head.calibration.combined_score` combines them.

Numbers whose last digits could depend on the device or the batch are rounded to grids (:func:`on_grid`): asinh of the
log ratio of the regions, asinh of the largest log density and of the energy, and logs of distances. They agree far
below the steps of the grids, so that scores are equal. Both searches for the nearest reference point round coordinates
to eleven bits, unless reference points are close to each other
(:class:`~sepc_torch.head.evidence.neighbours.Neighbours`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from sepc_torch.data.arrays import rows_per_chunk
from sepc_torch.head.evidence.densities import RegionDensities, fit_densities
from sepc_torch.head.evidence.layer_distance import LayerDistance, gaussian_kernel_tables
from sepc_torch.head.evidence.neighbours import Neighbours
from sepc_torch.head.evidence.shared_gaussian import SharedGaussian, shared_gaussian
from sepc_torch.head.reading.coordinates import coordinates, fits
from sepc_torch.head.reading.passes import ProjectedSet
from sepc_torch.head.reading.projection import Projection
from sepc_torch.model.bank import EllipsoidBank
from sepc_torch.model.derived import Derived
from sepc_torch.model.device_sync import Branches
from sepc_torch.partitioning.record import Partition, PartitionEllipsoid
from sepc_torch.shapes import Array, Float, Int

# Bound of the log ratio of distances: the distance is zero for a copy of a training point. e**7 is about a thousand.
MAX_LOG_RATIO = 7.0
# Distances in directions of unit variance below this are rounding errors of float32.
ROUNDING = 1e-5
# Bound of asinh(log odds) of softmax: a masked class (logit -inf) makes the log odds infinite. sinh(10) is about 11000.
MAX_SOFTMAX = 10.0
# Steps of the grids for asinh of the log odds of the regions, asinh of the largest log density and of the energy, and
# logs of distances.
ODDS_STEP, LOG_STEP, DISTANCE_STEP = 2.0**-8, 2.0**-10, 2.0**-10


class EvidenceValues(NamedTuple):
    """Support for a label, and nonconformity scores of the point, for every row of a batch, in float64."""

    support: Float[Tensor, "B F"]
    nonconformity: Float[Tensor, "B S"]


class Measurements(NamedTuple):
    """Measurements of a batch.

    Attributes:
        density: Log densities of every class; -inf for classes that do not matter to given labels.
        near: Distances to the nearest reference point of every class, as far as given labels need them; None without
            reference points.
        white: Distances to the nearest reference point in whitened coordinates; None without reference points.
        mahalanobis: Squared Mahalanobis distances of the embeddings, then of every earlier layer, in float64.
        regions: Tables to compute the densities of single rows again in float64; empty if they are exact.
    """

    density: Float[Tensor, "B C"]
    near: Float[Tensor, "B C"] | None
    white: Float[Tensor, "B"] | None
    mahalanobis: Float[Tensor, "L1 B"]
    regions: list[Tensor]

    @property
    def nonconformity(self) -> Float[Tensor, "B S"]:
        """The kinds of :attr:`Evidence.kinds`, in float64."""
        return torch.stack(self.kinds(), dim=1)

    def kinds(self) -> list[Float[Tensor, "B"]]:
        """The columns of the nonconformity."""
        kinds = [-_log_on_grid(self.density.amax(dim=1))]
        if self.near is not None and self.white is not None:
            # A copy of a reference point has the distance zero. In whitened coordinates it differs by rounding errors.
            both = torch.stack([self.near.amin(dim=1), torch.where(self.white < ROUNDING, 0.0, self.white)])
            kinds += _distance_on_grid(both.double()).unbind()
        return [*kinds, *_distance_on_grid(self.mahalanobis).unbind()]


class Evidence(Derived):
    """Evidence from class densities and, with reference points, from distances to neighbours.

    Args:
        polar: Projection from embeddings to the coordinates of the densities: direction and log length.
        densities: Class densities in the polar coordinates.
        white: Projection from embeddings to directions of unit variance.
        reference_points: Training points, in the coordinates of the embeddings; may be empty.
        gaussian: Class means and pooled covariance in the polar coordinates.
        layers: Distances of earlier layers of the network, by name.
    """

    derived = (
        "tables",
        "gaussian_tables",
    )

    def __init__(
        self,
        polar: Projection,
        densities: RegionDensities,
        white: Projection,
        reference_points: Neighbours,
        gaussian: SharedGaussian,
        layers: Mapping[str, LayerDistance] | None = None,
    ) -> None:
        super().__init__()
        self.polar, self.densities, self.white, self.reference_points = polar, densities, white, reference_points
        self.gaussian = gaussian
        self.layer_names = tuple(layers or ())
        self.set_layers((layers or {}).values())
        self.restore()

    def restore(self) -> None:
        """Compute the reference points in whitened coordinates, which the state dict omits, and the tables."""
        points = self.white(self.reference_points.points)
        codes, origin = torch.zeros_like(self.reference_points.codes), points.new_zeros(points.shape[1])
        self.white_reference_points = Neighbours(points, codes, origin, persistent=False, eleven_bits=True)
        self._whitened_in = self.reference_points.offsets.dtype
        self.derive()

    def derive(self) -> None:
        """Lay out the tables of the CUDA kernel of all coordinates; none where it cannot run."""
        if self.reference_points.offsets.dtype != self._whitened_in:
            self.restore()
            return
        others = [self.white] if self.reference_points.ends else []
        self.widths = [len(projection.matrix) for projection in (self.polar, *others)]
        self.tables, self.gaussian_tables = gaussian_kernel_tables(self.polar, self.gaussian, others)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of the columns of the nonconformity."""
        found = ["density"]
        if self.reference_points.ends:
            found += ["nearest", "nearest_white"]
        return (*found, "mahalanobis", *(f"layer {name}" for name in self.layer_names))

    @property
    def support_names(self) -> tuple[str, ...]:
        """Names of the columns of the support."""
        return ("regions", "neighbours") if self.reference_points.ends else ("regions",)

    def set_layers(self, layers: Iterable[LayerDistance]) -> None:
        """Replace the distances of earlier layers."""
        self.layers: Collection[LayerDistance] = nn.ModuleList(layers)  # type: ignore[assignment]

    @property
    def layer_widths(self) -> list[int]:
        """Number of features of every earlier layer."""
        return [layer.polar.in_features for layer in self.layers]

    def measure(
        self,
        z: Float[Tensor, "B D"],
        label: Int[Tensor, "B"] | None = None,
        layers: Sequence[Float[Tensor, "B _"]] = (),
    ) -> Measurements:
        """Return the measurements of embeddings, without gradients.

        With labels, as indices into the classes, densities are exact only as far as these labels need them, which is
        faster (:meth:`RegionDensities.for_labels`). ``layers`` holds the activations of every earlier layer.
        """
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self.measure(z, label, layers)
        branches = Branches(z)
        further: list[Tensor] = []
        if self.layer_names:
            with branches.branch():
                further = [layer(x) for layer, x in zip(self.layers, layers, strict=True)]
        if fits(z, self.tables):
            polar, *found = coordinates(z, self.tables, self.widths, self.gaussian_tables)
            white = found[0] if self.reference_points.ends else None
            mahalanobis = found[-1]
        else:
            polar, square = self.polar.with_square(z)
            white = self.white(z) if self.reference_points.ends else None
            mahalanobis = self.gaussian(polar, square)
        near, nearest = None, None
        if white is not None:
            with branches.branch():
                nearest = self.white_reference_points(white).squeeze(1)
            with branches.branch():
                near = self.reference_points(z) if label is None else self.reference_points.for_labels(z, label)
        density, regions = (self.densities(polar), []) if label is None else self.densities.for_labels(polar, label)
        branches.join()
        return Measurements(density, near, nearest, torch.stack([mahalanobis, *further]), regions)

    def class_scores(self, z: Float[Tensor, "B D"]) -> Float[Tensor, "B C"]:
        """Return the scores of all classes of embeddings; see :func:`class_scores`."""
        if self.reference_points.ends:
            return class_scores(None, self.reference_points(z))
        return class_scores(self.densities(self.polar(z)), None)

    def values(self, measurements: Measurements, label: Int[Tensor, "B"]) -> EvidenceValues:
        """Return the evidence for labels, given as indices into the classes."""
        support = label_support(measurements.density, measurements.near, label)
        return EvidenceValues(support, measurements.nonconformity)

    def forward(
        self, z: Float[Tensor, "B D"], label: Int[Tensor, "B"], layers: Sequence[Float[Tensor, "B _"]] = ()
    ) -> EvidenceValues:
        """Return the evidence for the label of each embedding; no gradient flows through it."""
        return self.values(self.measure(z, layers=layers), label)


def label_support(
    density: Float[Tensor, "B C"], near: Float[Tensor, "B C"] | None, label: Int[Tensor, "B"]
) -> Float[Tensor, "B F"]:
    """Support for labels from log densities and, with reference points, from distances to the nearest ones."""
    return torch.stack(support_columns(density, near, None, label), dim=1)


def class_scores(density: Float[Tensor, "B C"] | None, near: Float[Tensor, "B C"] | None) -> Float[Tensor, "B C"]:
    r"""Scores of all classes without logits, in float64: :math:`\log \frac{\max_{c'} d_{c'}}{d_c}` of the distances d.

    The distances are those to the nearest reference points; the log ratio is cut at :data:`MAX_LOG_RATIO`. Without
    reference points the scores are the log densities, which are worse: they are far apart in many dimensions.

    >>> class_scores(None, torch.tensor([[1.0, 2.0, 0.0]])).round(decimals=2)
    tensor([[0.6900, 0.0000, 7.0000]], dtype=torch.float64)
    """
    if near is None:
        assert density is not None
        return density.double()
    logs = on_grid(near.double().clamp_min(torch.finfo(near.dtype).tiny).log(), DISTANCE_STEP)
    return (logs.amax(dim=1, keepdim=True) - logs).clamp_max(MAX_LOG_RATIO)


def support_columns(
    density: Float[Tensor, "B C"],
    near: Float[Tensor, "B C"] | None,
    logits: Float[Tensor, "B C"] | None,
    label: Int[Tensor, "B"],
) -> list[Float[Tensor, "B"]]:
    """The columns of the support for labels: of logits in float64 if given, of densities, of neighbours if given."""
    if logits is None:
        columns = [on_grid(torch.asinh(log_odds(density, label)), ODDS_STEP)]
    else:
        softmax, regions = torch.asinh(log_odds(torch.stack([logits, density]), label)).unbind()
        columns = [_bounded(softmax), on_grid(regions, ODDS_STEP)]
    if near is not None:
        columns.append(_log_ratio(near, label).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    return columns


def on_grid(values: Float[Tensor, "*k B"], step: float) -> Float[Tensor, "*k B"]:
    """The nearest multiples of a step.

    >>> on_grid(torch.tensor([0.3, 0.5, -0.6]), 0.25)
    tensor([ 0.2500,  0.5000, -0.5000])
    """
    return torch.floor(values / step + 0.5) * step


def log_odds(score: Float[Tensor, "*k B C"], label: Int[Tensor, "B"]) -> Float[Tensor, "*k B"]:
    r"""Log odds :math:`s_c - \log \sum_{c' \ne c} e^{s_{c'}}` of a label, from log densities or logits.

    >>> log_odds(torch.tensor([[0.0, 0.0, 0.0]]).log_softmax(1), torch.tensor([1])).exp()
    tensor([0.5000])
    """
    index = label.unsqueeze(1)
    if score.dim() > 2:
        index = index.expand(*score.shape[:-1], 1)
    return score.gather(-1, index).squeeze(-1) - score.scatter(-1, index, -torch.inf).logsumexp(dim=-1)


def with_softmax(values: EvidenceValues, logits: Float[Tensor, "B C"], label: Int[Tensor, "B"]) -> EvidenceValues:
    """Prepend asinh of the network's log odds for the label to the support."""
    support = values.support
    softmax = _bounded(torch.asinh(log_odds(logits.double(), label)))
    return values._replace(support=torch.cat([softmax.to(support.dtype).unsqueeze(1), support], dim=1))


def _bounded(softmax: Float[Tensor, "B"]) -> Float[Tensor, "B"]:
    """The support of softmax within its bounds. Two logits of the same infinity have no difference (NaN): zero."""
    return softmax.nan_to_num(nan=0.0).clamp(-MAX_SOFTMAX, MAX_SOFTMAX)


def with_energy(values: EvidenceValues, logits: Float[Tensor, "B C"]) -> EvidenceValues:
    """Append minus the log of the sum of exponentials of the network's logits to the nonconformity."""
    energy = energies(logits.double()).unsqueeze(1)
    return values._replace(nonconformity=torch.cat([values.nonconformity, energy.to(values.nonconformity)], dim=1))


def energies(logits: Float[Tensor, "B C"]) -> Float[Tensor, "B"]:
    """The energy of every row of logits in float64, with asinh on the grid.

    >>> energies(torch.zeros(1, 2).double())  # -log(2) is -0.6931
    tensor([-0.6937], dtype=torch.float64)
    """
    return _log_on_grid(-logits.logsumexp(dim=1))


def _log_on_grid(values: Float[Tensor, "B"]) -> Float[Tensor, "B"]:
    """The numbers, logs of densities or sums, whose asinh is on the grid."""
    return torch.sinh(on_grid(torch.asinh(values), LOG_STEP))


def _distance_on_grid(values: Float[Tensor, "*k B"]) -> Float[Tensor, "*k B"]:
    """The distances whose log is on the grid; zero stays zero."""
    return on_grid(values.log(), DISTANCE_STEP).exp()


def _log_ratio(near: Float[Tensor, "B C"], label: Int[Tensor, "B"]) -> Float[Tensor, "B"]:
    r"""Log ratio :math:`\log \frac{d_{\ne c}}{d_c}` of the distances to the nearest other class and to the label's."""
    index = label.unsqueeze(1)
    both = torch.cat([near.scatter(1, index, torch.inf).amin(dim=1, keepdim=True), near.gather(1, index)], dim=1)
    logs = on_grid(both.double().clamp_min(torch.finfo(near.dtype).tiny).log(), DISTANCE_STEP)
    other, own = logs.unbind(dim=1)
    return other - own


def pieces_of(
    part: Partition, points: Float[Array, "N R"], codes: Int[Array, "N"], device: torch.device | str | None = None
) -> Int[Array, "N"]:
    """Index of the nearest ellipsoid of its own class for each point.

    The points of one ellipsoid form a *piece*; the index is -1 if the piece is too small: if it has no more
    points than dimensions. With a torch device the distances are computed there, otherwise in NumPy.
    """
    piece, owner = np.empty(len(points), dtype=np.int64), part.codes
    for c in range(len(part.classes)):
        rows = np.flatnonzero(codes == c)
        own = np.flatnonzero(owner == c)
        # A few rows at a time: the distances of a large class to all its ellipsoids would fill the memory.
        step = rows_per_chunk(max(len(own), points.shape[1]))
        for start in range(0, len(rows), step):
            some = rows[start : start + step]
            piece[some] = own[_nearest([part.ellipsoids[k] for k in own], points[some], device)]
    return np.where(np.bincount(piece)[piece] > points.shape[1], piece, -1)


def _nearest(
    ellipsoids: list[PartitionEllipsoid], points: Float[Array, "n R"], device: torch.device | str | None
) -> Int[Array, "n"]:
    if device is None:
        return np.argmin([e.distance(points) for e in ellipsoids], axis=0)
    centers, whiteners = (
        torch.from_numpy(np.stack(arrays)) for arrays in zip(*((e.center, e.whitener) for e in ellipsoids), strict=True)
    )
    bank = EllipsoidBank(centers, whiteners).to(device)
    return bank(torch.from_numpy(points).to(device)).argmin(dim=1).cpu().numpy()


def fit_evidence(
    data: ProjectedSet, pieces: Int[Array, "N"], layers: Mapping[str, LayerDistance] | None = None
) -> Evidence:
    """Fit the evidence to projected training embeddings.

    Args:
        data: The projected embeddings.
        pieces: The piece of its class that each embedding belongs to; -1 for no piece.
        layers: The fitted distances of earlier layers.
    """
    densities, spread = fit_densities(data.coordinates, data.codes, pieces)
    deviations = 1.0 / np.linalg.norm(data.polar.matrix.double().numpy(), axis=1)
    gaussian = shared_gaussian(spread, deviations, data.polar.shift.shape[0], data.variance)
    return Evidence(data.polar, densities, data.white, data.reference_points, gaussian, layers)

r"""Class densities for the evidence: Student's t mixtures over whole classes and the pieces of their ellipsoids.

A region is a group of training points: a whole class, or the points of a class in one ellipsoid (a piece). The n points
of a region are taken as a sample of a Gaussian with unknown mean and covariance. Their posterior predictive density is
Student's multivariate t, whose contours are ellipsoids. The prior of the covariance is the pooled spread within
regions, with the least weight for which the prior has a mean. A region of few points thus borrows its shape from the
others, and there is no parameter to tune. The density of a class is half the density of the whole class and half the
density of its pieces:

.. math:: p(z, c) = \tfrac12 \frac{N_c}{N} t_c(z) + \tfrac12 \sum_{k \in c} \frac{n_k}{\sum_j n_j} t_k(z).

With one region per class, a strong prior would give linear discriminant analysis, and no prior quadratic discriminant
analysis.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sepc_torch.data.arrays import rows_per_chunk
from sepc_torch.head.kernels.tables import RegionTables, WideRegions
from sepc_torch.head.reading.moments import Moments
from sepc_torch.model import torch_ops
from sepc_torch.model.bank import EllipsoidBank
from sepc_torch.model.derived import Derived
from sepc_torch.model.device_sync import readable
from sepc_torch.model.kernels import Split
from sepc_torch.model.kernels.launch import has_float64_products, on_device
from sepc_torch.model.kernels.rounded_ellipsoids import Rounded, rounded
from sepc_torch.model.kernels.tables import upper_triangular
from sepc_torch.model.precision import as_dtype
from sepc_torch.shapes import Array, Float, Int

# Least variance of every direction, as a share of the mean variance within regions: a direction without variance would
# dominate every distance. _LEAST_SHARE, as a share of the total variance, covers regions that all are single points.
_LEAST_VARIANCE = 1e-3
_LEAST_SHARE = 1e-6
# Error of a distance d = |W x| in float32 on a CPU, per unit of d and of sqrt(R) |D x|; the diagonal matrix D has the
# lengths of the columns of W. About twice the largest that was measured, of points chosen to have large errors.
_UNIT = 2.0**-24
_OWN_ERROR, _SPREAD_ERROR = 8.0 * _UNIT, 3.2 * _UNIT
# Rows of a batch from which a CPU takes distances in float32: with fewer, finding the open rows takes as long.
_QUICK_ROWS = 32


class ClassSpread(NamedTuple):
    """Class means (C, R), and a whitener (R, R): it maps the pooled covariance within classes to the identity."""

    means: Float[Array, "C R"]
    whitener: Float[Array, "R R"]


class Mixture(NamedTuple):
    """Regions as terms of mixtures in float64; ``power`` is half the sum of the freedom and the dimension."""

    log_weight: Float[Tensor, "K"]
    freedom: Float[Tensor, "K"]
    power: Float[Tensor, "K"]
    codes: Int[Tensor, "K"]


class OpenTables(NamedTuple):
    """Points (B, R) in float32, regions in float64, and the largest errors of log densities.

    With them the densities of single rows can be computed again in float64.
    """

    points: Float[Tensor, "B R"]
    origin: Float[Tensor, "R"]
    offsets: Float[Tensor, "K R"]
    whiteners: Float[Tensor, "K R R"]
    log_weight: Float[Tensor, "K"]
    freedom: Float[Tensor, "K"]
    power: Float[Tensor, "K"]
    codes: Int[Tensor, "K"]
    error: Float[Tensor, "B C"]


class RegionDensities(Derived):
    r"""Log densities :math:`\log p(z, c)` of points under every class: mixtures of the regions' Student's t.

    Args:
        bank: The ellipsoid :math:`(z - \mu_k)^\top S_k^{-1} (z - \mu_k) \le 1` of every region's t.
        log_weight: Log weight of every region, including the normalising constant of its t.
        freedom: Degrees of freedom of every region's t.
        codes: The class of every region.
    """

    derived = (
        "classes",
        "mixture",
        "wide",
        "coarse",
        "kernel_tables",
        "spread_tables",
        "narrow",
    )
    log_weight: Tensor
    freedom: Tensor
    codes: Tensor

    def __init__(
        self,
        bank: EllipsoidBank,
        log_weight: Float[Tensor, "K"],
        freedom: Float[Tensor, "K"],
        codes: Int[Tensor, "K"],
    ) -> None:
        super().__init__()
        self.bank = bank
        self.register_buffer("log_weight", log_weight)
        self.register_buffer("freedom", freedom)
        self.register_buffer("codes", codes)
        self.restore()

    def derive(self) -> None:
        """Compute what is not saved: the number of classes, the regions in float64, and the tables of the kernels."""
        self.classes = int(self.codes.max()) + 1
        freedom = self.freedom.double()
        self.mixture = Mixture(self.log_weight.double(), freedom, (freedom + self.bank.dim) / 2, self.codes)
        self.wide = self.bank.origin.double(), self.bank.offsets.double(), self.bank.whiteners.double()
        self.coarse: Rounded | None = None
        self.kernel_tables: list[Tensor] = []
        if self.bank.prepared is not None and has_float64_products():
            self.coarse = rounded(self.bank.prepared)
            starts = torch.nn.functional.pad(torch.bincount(self.codes, minlength=self.classes).cumsum(0), (1, 0))
            order = self.codes.argsort(stable=True)
            weights = self.mixture.log_weight, self.mixture.freedom
            *centers, whiteners = self.wide
            matrices = upper_triangular(whiteners)  # half of every matrix is zero
            self.kernel_tables = [order.int(), starts.int(), *weights, self.codes.int(), *centers, matrices]
        self.spread_tables: list[Tensor] = []
        # Subtracting an origin would round, far from the centres by more than the distances allow.
        self.narrow = self.log_weight.dtype == torch.float32 and not bool(self.bank.origin.any())

    def forward(self, points: Float[Tensor, "B R"]) -> Float[Tensor, "B C"]:
        """Return the log density of each point under each class, in float64.

        Points are first rounded to the dtype of the module, so that every device has the same.
        """
        # Distances in float64: in float32 their last digits would depend on the batch.
        origin, offsets, whiteners = self.wide
        offset = _rounded_relative(points, origin, self.log_weight.dtype == torch.float32)
        return _log_densities(torch_ops.distances(offset, offsets, whiteners), list(self.mixture), self.classes)

    def for_labels(
        self, points: Float[Tensor, "B R"], label: Int[Tensor, "B"]
    ) -> tuple[Float[Tensor, "B C"], list[Tensor]]:
        """Log densities as far as the log odds of labels and the largest log density depend on them.

        For modules in float32 this is faster than :meth:`forward`. CUDA kernels compute only densities that matter; the
        others are -inf. On a CPU, batches outside of graphs take distances in float32. Elsewhere the densities are
        those of :meth:`forward`.

        Args:
            points: The points.
            label: The labels as indices into the classes; -1 for a row without a label.

        Returns:
            The densities and, where distances are in float32, the tables to compute single rows again in float64
            (:class:`OpenTables`).
        """
        narrow = as_dtype(points, self.log_weight.dtype)
        if (prepared := self.bank.prepared_for(narrow)) is not None and self.coarse is not None:
            bank, coarse = (list(prepared[:-1]), prepared.reach), (list(self.coarse[:-1]), self.coarse.relative)
            return _densities_for_labels(narrow, label, self.bank.origin, *bank, *coarse, self.kernel_tables), []
        if not self.narrow or not readable(points) or len(points) < _QUICK_ROWS:
            return self(points), []
        found, error = self._with_errors(narrow)
        return found, [narrow, *self.wide, *self.mixture, error]

    def _with_errors(self, points: Float[Tensor, "B R"]) -> tuple[Float[Tensor, "B C"], Float[Tensor, "B C"]]:
        """Log densities from distances in float32, and their largest errors."""
        if not self.spread_tables:
            squares = torch.linalg.vector_norm(self.wide[2], dim=1).square()
            weighted = squares * self.wide[1]
            self.spread_tables = [squares.T, -2.0 * weighted.T, (weighted * self.wide[1]).sum(dim=1)]
        square, linear, constant = self.spread_tables
        _, freedom, power, codes = self.mixture
        rows = torch_ops.rows_per_piece(freedom, 8 * len(codes))
        densities, errors = [], []
        for some, near in zip(points.split(rows), self.bank(points).split(rows), strict=True):
            z, distance = some.double(), near.double()
            spread = torch.addmm(constant + z.square() @ square, z, linear).clamp_min_(0.0).sqrt_()
            off = _OWN_ERROR * distance + _SPREAD_ERROR * self.bank.dim**0.5 * spread
            off *= 2.0 * power * distance / (freedom + distance.square())  # the derivative of a log density
            most, share, total = _shares(distance, self.mixture, self.classes)
            densities.append(most + total.log())
            # The error of the log of a sum is the mean of the errors of the logs of its terms.
            errors.append(torch.zeros_like(most).scatter_add(1, codes.expand(len(some), -1), share * off) / total)
        return torch.cat(densities), torch.cat(errors)


def densities_again(tables: OpenTables, rows: Int[Tensor, "n"], classes: int) -> Float[Tensor, "n C"]:
    """Log densities of single rows in float64, as :meth:`RegionDensities.forward` computes them."""
    points, origin, offsets, whiteners, *regions, _ = tables
    offset = points.index_select(0, rows).double() - origin
    return mixtures(torch_ops.distances(offset, offsets, whiteners), Mixture(*regions), classes)


def _class_log_densities(distance: Float[Tensor, "B K"], regions: list[Tensor], classes: int) -> Float[Tensor, "B C"]:
    """Log density of each class in float64, from the distances to all regions; in pieces of rows."""
    mixture = Mixture(*regions)
    rows = torch_ops.rows_per_piece(mixture.power, 4 * mixture.codes.shape[0])
    if distance.shape[0] <= rows:
        return mixtures(distance, mixture, classes)
    return torch.cat([mixtures(piece, mixture, classes) for piece in distance.split(rows)])


def mixtures(distance: Float[Tensor, "B K"], regions: Mixture, classes: int) -> Float[Tensor, "B C"]:
    """Log densities of mixtures, from distances to their regions; all in float64."""
    most, _, total = _shares(distance, regions, classes)
    return most + total.log()


def _shares(
    distance: Float[Tensor, "B K"], regions: Mixture, classes: int
) -> tuple[Float[Tensor, "B C"], Float[Tensor, "B K"], Float[Tensor, "B C"]]:
    """The largest log density of the regions of each class, all densities over it, and their sums by class."""
    log_weight, freedom, power, codes = regions
    each = log_weight - power * torch.log1p(distance.square() / freedom)
    count = distance.shape[0]  # torch.export would treat len(distance) as a constant
    codes = codes.expand(count, -1)
    # logsumexp over the regions of each class: subtract the class maximum first, or distant points underflow.
    most = each.new_full((count, classes), -torch.inf).scatter_reduce(1, codes, each, "amax")
    share = torch.exp(each - most.gather(1, codes))
    return most, share, torch.zeros_like(most).scatter_add(1, codes, share)


# Points relative to an origin in float64; narrow points are first rounded to float32.
_rounded_relative = torch_ops.opaque(
    "rounded_relative(Tensor points, Tensor origin, bool narrow) -> Tensor",
    lambda points, origin, narrow: (
        as_dtype(as_dtype(points, torch.float32) if narrow else points, torch.float64) - origin
    ),
    lambda points, origin, narrow: points.new_empty(points.shape, dtype=torch.float64),
)
_log_densities = torch_ops.operator(
    "log_densities(Tensor distance, Tensor[] regions, int classes) -> Tensor",
    _class_log_densities,
    lambda distance, regions, classes: distance.new_empty(distance.shape[0], classes, dtype=torch.float64),
)


def _launch_densities(
    points: Tensor,
    label: Tensor,
    origin: Tensor,
    bank: list[Tensor],
    reach: float,
    coarse: list[Tensor],
    relative: float,
    regions: list[Tensor],
) -> Float[Tensor, "B C"]:
    from sepc_torch.head.kernels.mixtures import log_densities

    ellipsoids = Split(*bank, reach), Rounded(*coarse, relative)  # type: ignore[call-arg, arg-type]
    with on_device(points):
        return log_densities(points, label, origin, *ellipsoids, RegionTables(*regions[:4]), WideRegions(*regions[4:]))


_densities_for_labels = torch_ops.operator(
    "densities_for_labels(Tensor points, Tensor label, Tensor origin, Tensor[] bank, float reach, Tensor[] coarse, "
    "float relative, Tensor[] regions) -> Tensor",
    _launch_densities,
    lambda points, label, origin, bank, reach, coarse, relative, regions: points.new_empty(
        points.shape[0], regions[1].shape[0] - 1, dtype=torch.float64
    ),
)


def fit_densities(
    points: Float[Array, "N R"], codes: Int[Array, "N"], pieces: Int[Array, "N"], dtype: torch.dtype = torch.float32
) -> tuple[RegionDensities, ClassSpread]:
    """Fit class densities to labelled points; return also the spread within classes.

    Args:
        points: Training points, with unit variance in every direction, in float32 or float64. Sums are in float64.
        codes: The class of each point.
        pieces: The piece that each point belongs to, as any number unique to the piece; -1 for no piece.
        dtype: Dtype of the fitted module.

    >>> points = np.array([[0.0], [0.2], [0.1], [2.0], [2.2], [2.1]])
    >>> densities, spread = fit_densities(points, np.array([0, 0, 0, 1, 1, 1]), np.full(6, -1))
    >>> densities(torch.tensor([[0.1], [2.1]])).argmax(dim=1).tolist()
    [0, 1]
    >>> spread.means.round(6).tolist(), spread.whitener.round(1).tolist()
    ([[0.1], [2.1]], [[10.0]])
    """
    classes, spread = _students(points, codes)
    levels = [classes]
    owner = np.zeros(0, dtype=np.int64)
    inside = pieces >= 0
    if inside.any():
        kept, first = np.unique(pieces[inside], return_index=True)
        levels.append(_students(points, np.where(inside, np.searchsorted(kept, pieces), -1))[0])
        owner = codes[inside][first]
    means, whiteners, weights, freedom = (np.concatenate(parts) for parts in zip(*levels, strict=True))
    densities = RegionDensities(
        # The origin is zero: differences to a centre near a point are then exact, also in float32.
        EllipsoidBank(
            torch.from_numpy(means).to(dtype),
            torch.from_numpy(whiteners).to(dtype),
            torch.zeros(points.shape[1], dtype=dtype),
        ),
        torch.from_numpy(weights - math.log(len(levels))).to(dtype),
        torch.from_numpy(freedom).to(dtype),
        torch.from_numpy(np.concatenate([np.arange(len(means) - len(owner)), owner])),
    )
    return densities, spread


def pooled_prior(scatter: Float[Array, "R R"], points: int, groups: int) -> Float[Array, "R R"]:
    """Pooled covariance within groups from the sum of their scatter matrices, with a least variance added."""
    prior = scatter / max(points - groups, 1)
    return prior + (_LEAST_VARIANCE * np.trace(prior) / len(prior) + _LEAST_SHARE) * np.eye(len(prior))


def _students(
    points: Float[Array, "N R"], group: Int[Array, "N"]
) -> tuple[tuple[Float[Array, "K R"], Float[Array, "K R R"], Float[Array, "K"], Float[Array, "K"]], ClassSpread]:
    r"""Mean, whitener, log weight and degrees of freedom of the predictive t of every group; -1 is no group.

    Also returns the means with the whitener of :math:`\Psi_0`, the spread that all groups share.

    The prior is :math:`\Sigma \sim W^{-1}(\Psi_0, \nu_0)` with :math:`\nu_0 = R + 2`; its mean :math:`\Psi_0` is the
    pooled spread within groups. For n points with scatter matrix :math:`S` the predictive t has
    :math:`\nu = n + \nu_0 - R + 1` degrees of freedom and the scale matrix
    :math:`\frac{n + 1}{n \nu} (\Psi_0 + S)`.
    """
    dim = points.shape[1]
    size = np.bincount(group[group >= 0])
    total = int(size.sum())
    order = np.argsort(group, kind="stable")[len(group) - total :]
    means = np.empty((len(size), dim))
    scatters = np.empty((len(size), dim, dim))
    for k, rows in enumerate(np.split(order, size.cumsum()[:-1])):
        moments = Moments(dim)
        # A few rows at a time, because one group may hold most of the points.
        step = rows_per_chunk(dim)
        for start in range(0, len(rows), step):
            moments.add(points[rows[start : start + step]])
        means[k], scatters[k] = moments.mean, moments.scatter
    prior = pooled_prior(scatters.sum(axis=0), total, len(size))
    freedom = size + 3.0
    whiteners = scatters  # each is replaced in the loop: for many regions these are the largest arrays
    weights = np.empty(len(size))
    for k, scatter in enumerate(scatters):
        factor = np.linalg.cholesky((prior + scatter) * (size[k] + 1) / (size[k] * freedom[k]))
        whiteners[k] = np.linalg.inv(factor)
        weights[k] = (
            math.log(size[k] / total)
            + math.lgamma((freedom[k] + dim) / 2)
            - math.lgamma(freedom[k] / 2)
            - dim / 2 * math.log(freedom[k] * math.pi)
            - float(np.log(np.diag(factor)).sum())
        )
    return (means, whiteners, weights, freedom), ClassSpread(means, np.linalg.inv(np.linalg.cholesky(prior)))

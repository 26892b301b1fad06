r"""D-optimal design, the dual of program (2) (minimum-volume ellipsoid), by an interior-point method on a working set.

For points lifted to :math:`x_i = (y_i, 1) \in \mathbb{R}^n` and weights :math:`u \ge 0` with sum 1, let
:math:`M = \sum_i u_i x_i x_i^\top` and :math:`g_i = x_i^\top M^{-1} x_i`. The design is optimal exactly when
:math:`\max_i g_i = n`; then :math:`\{y : x^\top M^{-1} x \le n\}` is the minimum-volume ellipsoid :math:`E_\star`. For
any other design, let :math:`\max_i g_i = n (1 + \mathtt{gap}) = n + \epsilon`. Every eigenvalue of
:math:`M^{-1} M_\star`, where :math:`M_\star` is the optimum, lies between the roots

.. math:: \lambda_\pm = 1 + \tfrac{\epsilon}{2} \pm \tfrac12 \sqrt{\epsilon\,(4 + \epsilon - 4/n)},

because the eigenvalues sum to at most :math:`n + \epsilon` and their inverses to at most :math:`n`. Hence
:math:`\{g \le n \lambda_-\} \subseteq E_\star \subseteq \{g \le n \lambda_+\}`. A coarse design therefore already
classifies most points as certainly inside or certainly outside :math:`E_\star`, and points with
:math:`g_i < n \lambda_-` cannot support the ellipsoid (Harman and Pronzato, 2007).

Only points near the surface need new values :math:`g_i`. When the design moves from :math:`M_0` to :math:`M`, each
value grows at most by the factor :math:`\kappa = \lambda_{\max}(M^{-1} M_0)`. So :math:`\kappa` times the last known
value is an upper bound on the new value (:class:`Variances`). The bounds also hold for every subset of the points, so
the design of a subset starts from the bounds of the whole set.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.linalg import qr
from scipy.linalg.lapack import dpotrf, dtrtri

from sepc_torch.shapes import Array, Bool, Float, Int
from sepc_torch.solvers.interior_point import Objective, interior_point
from sepc_torch.solvers.newton import Solve, newton_system

# Up to this many points, or three per dimension, the working set is the whole set: rounds would cost more.
_DIRECT = 400
# Multiplicative steps u <- u g / n before the interior-point method. They give the few far points of heavy-tailed sets
# their weight; a handful is enough.
_MULTIPLICATIVE_STEPS = 8
# Limit on the rounds of a design, each with its own working set; a safeguard.
_MAX_ROUNDS = 80
# Points whose value g is below this share of n are far from the surface: the working set does not need them.
_NEAR = 0.9
_NONE = np.zeros(0, dtype=np.int64)


class Bounds(NamedTuple):
    r"""The factors :math:`\lambda_- \le 1 \le \lambda_+` between which scalings of a design enclose the optimum."""

    inner: float
    outer: float


def enclosure(gap: float, n: int) -> Bounds:
    r"""The factors :math:`\lambda_\pm` for a relative gap in lifted dimension n.

    >>> enclosure(0.0, 3)
    Bounds(inner=1.0, outer=1.0)
    """
    eps = n * max(gap, 0.0)
    middle, half = 1.0 + eps / 2, 0.5 * np.sqrt(eps * (4.0 + eps - 4.0 / n))
    # The product of the roots is 1 + eps / n. Division avoids the cancellation in middle - half.
    return Bounds(float((1.0 + eps / n) / (middle + half)), float(middle + half))


def inverse_root(x: Float[Array, "M n"], u: Float[Array, "M"]) -> Float[Array, "n n"]:
    r"""The inverse Cholesky factor :math:`L^{-1}` of :math:`M = L L^\top = \sum_i u_i x_i x_i^\top`."""
    factor, failed = dpotrf((x * u[:, None]).T @ x, lower=1, clean=1)
    if not failed:
        inverse, failed = dtrtri(factor, lower=1)
    if failed:
        raise np.linalg.LinAlgError("the points with positive weight do not span the space")
    return inverse


def variances(lifted: Float[Array, "n N"], root: Float[Array, "n n"]) -> Float[Array, "N"]:
    r"""The values :math:`g_i = \|L^{-1} x_i\|^2` of all columns, computed in blocks that fit in the cache."""
    n, count = lifted.shape
    g = np.empty(count)
    block = max(512, 131072 // n)
    for start in range(0, count, block):
        v = root @ lifted[:, start : start + block]
        np.multiply(v, v, out=v)
        v.sum(axis=0, out=g[start : start + block])
    return g


class Variances:
    """Upper bounds on the values :math:`g_i` of a set of columns, replaced by exact values where needed."""

    def __init__(self, lifted: Float[Array, "n N"]) -> None:
        self._lifted = lifted
        self._columns: Int[Array, "M"] | None = None  # None: all columns
        self._bound = np.full(lifted.shape[1], np.inf)
        self._root: Float[Array, "n n"] | None = None

    def __len__(self) -> int:
        return len(self._bound)

    def columns(self, places: Int[Array, "m"] | None = None) -> Float[Array, "n m"]:
        """The lifted points with the given indices; None: all points of the set."""
        if places is None:
            return self._lifted if self._columns is None else self._lifted[:, self._columns]
        return self._lifted[:, places if self._columns is None else self._columns[places]]

    def subset(self, places: Int[Array, "m"]) -> Variances:
        """The bounds of some of the columns; the columns themselves are not copied."""
        part = Variances.__new__(Variances)
        part._lifted, part._root = self._lifted, self._root
        part._columns = places if self._columns is None else self._columns[places]
        part._bound = self._bound[places]
        return part

    def at_least(
        self, root: Float[Array, "n n"], level: float, among: Int[Array, "m"]
    ) -> tuple[Int[Array, "k"], Float[Array, "k"]]:
        """Move to the design with inverse factor ``root`` and compute the values that can reach ``level``.

        Returns the indices in ``among`` whose upper bound reaches the level, and their exact values g. All other values
        in ``among`` are below the level.
        """
        if self._root is not None:
            factor, _ = dtrtri(self._root, lower=1)
            self._bound *= float(np.linalg.norm(root @ factor, 2)) ** 2 * (1.0 + 1e-12)
        self._root = root
        reaching = among[self._bound[among] >= level]
        everything = len(reaching) == len(self)
        g = variances(self.columns(None if everything else reaching), root)
        self._bound[reaching] = g
        return reaching, g

    def bounds(self) -> Float[Array, "M"]:
        """The upper bounds for the current design."""
        return self._bound


class Design:
    """D-optimal design on the columns of ``lifted``, refined on demand by :meth:`refine`.

    ``support`` and ``weights`` describe the best design so far. ``gap`` is its certified gap over all columns, and
    ``root`` the inverse Cholesky factor of its information matrix. ``start`` holds indices of columns for the first
    working set, such as the support of a similar set. :meth:`subset` continues from this design with some of the
    columns.
    """

    support: Int[Array, "S"]
    weights: Float[Array, "S"]
    root: Float[Array, "n n"]
    gap: float
    _working: Int[Array, "M"]
    _x: Float[Array, "M n"]
    _u: Float[Array, "M"]

    def __init__(self, lifted: Float[Array, "n N"], start: Int[Array, "S"] | None = None) -> None:
        self._initialise(Variances(lifted))
        working = self._first_working_set(lifted, start)
        try:
            self._set_working_set(working, None)
        except np.linalg.LinAlgError:
            # The outermost points do not span the space: add the pivots of a QR factorisation.
            pivots = qr(lifted, mode="r", pivoting=True, check_finite=False)[1][: 4 * self.n]
            self._set_working_set(np.union1d(working, pivots), None)
        self._slack = 0.1
        self._update_certificate()

    def subset(self, places: Int[Array, "M"]) -> Design:
        """The design of the columns ``places``, renumbered from 0, started from the remaining weights of this design.

        Raises LinAlgError if the remaining support points do not span the space.
        """
        part = Design.__new__(Design)
        part._initialise(self._variances.subset(places))
        place = np.full(self.count, -1)
        place[places] = np.arange(len(places))
        left = place[self.support] >= 0
        part._set_working_set(place[self.support[left]], self.weights[left])
        part._update_certificate()
        return part

    def refine(self, tolerance: float) -> float:
        """Improve the design until ``gap <= tolerance`` or rounding stops the progress; return the gap."""
        while self.gap > tolerance and self._stalled < 6 and self._rounds < _MAX_ROUNDS:
            self._choose_working_set()
            everything = len(self._working) == len(self._candidates)
            inner = tolerance if everything else max(0.5 * tolerance, min(1e-2, 0.05 * self.gap))
            self._u = interior_point(LogDeterminant(self._x), self._u, inner, self._slack)
            self._rounds += 1
            self._update_certificate()
        return self.gap

    @property
    def bounds(self) -> Bounds:
        """The factors between which scalings of the current ellipsoid enclose the optimal ellipsoid."""
        return enclosure(self.gap, self.n)

    def columns(self) -> Float[Array, "S n"]:
        """The lifted support points, one per row."""
        return self._variances.columns(self.support).T

    def _initialise(self, known: Variances) -> None:
        self._variances = known
        self.n, self.count = len(known.columns(_NONE)), len(known)
        self.gap = np.inf
        self._candidates = np.arange(self.count)
        self._stalled = 0
        self._rounds = 0

    def _set_working_set(self, working: Int[Array, "M"], u: Float[Array, "M"] | None) -> None:
        x = np.ascontiguousarray(self._variances.columns(working).T)
        self._u = _multiplicative_start(x) if u is None else u
        self._working, self._x = working, x

    def _first_working_set(self, lifted: Float[Array, "n N"], start: Int[Array, "S"] | None) -> Int[Array, "M"]:
        if self.count <= max(_DIRECT, 3 * self.n):
            return np.arange(self.count)
        outermost = min(self.count - 1, max(200, 12 * self.n))
        radius = np.einsum("ij,ij->j", lifted, lifted)
        chosen = [np.argpartition(-radius, outermost)[:outermost], lifted.argmax(1), lifted.argmin(1)]
        if start is not None:
            chosen.append(start)
        return np.unique(np.concatenate(chosen))

    def _update_certificate(self) -> None:
        """Update the certificate, and eliminate the points that cannot support the optimal ellipsoid."""
        positive = self._u > 0
        u = self._u[positive] / self._u[positive].sum()
        root = inverse_root(self._x[positive], u)
        # The largest value is at least n, so values below _NEAR * n do not affect the certificate.
        self._near, self._g = self._variances.at_least(root, _NEAR * self.n, self._candidates)
        gap = max(float(self._g.max()) / self.n - 1.0, 0.0)
        self._stalled = 0 if gap < 0.9 * self.gap else self._stalled + 1
        if gap < self.gap:
            self.gap, self.root = gap, root
            self.support, self.weights = self._working[positive], u
        self._round_support, self._round_weights = self._working[positive], u
        self._round_gap = gap
        heavy = self._round_support[u > 1e-3 / len(self._working)]
        candidate = self._variances.bounds() >= self.n * enclosure(gap, self.n).inner
        candidate[heavy] = True
        if np.count_nonzero(candidate[self._candidates]) < 0.8 * len(self._candidates):
            self._candidates = self._candidates[candidate[self._candidates]]

    def _choose_working_set(self) -> None:
        """Keep the points with significant weight; add the worst violators and near-violators of g <= n."""
        heavy = self._round_weights > 1e-3 / max(len(self._working), 1)
        kept = self._round_support[heavy]
        near = self._g > self.n * (1.0 - 0.5 * min(self._round_gap, 2.0 * (1.0 - _NEAR)))
        violators, g = self._near[near], self._g[near]
        limit = 2 * self.n + len(kept)
        if len(violators) > limit:
            violators = violators[np.argpartition(-g, limit - 1)[:limit]]
        working = np.union1d(kept, violators)
        if len(self._candidates) <= max(1.2 * len(working) + 50, _DIRECT if self._rounds == 0 else 0):
            working = self._candidates
        self._slack = float(np.clip(self._round_gap, 1e-9, 0.1 if self._rounds == 0 else 0.3))
        weights = np.zeros(self.count)
        weights[kept] = self._round_weights[heavy]
        weights = weights[working]
        self._set_working_set(working, (1.0 - self._slack) * weights / weights.sum() + self._slack / len(working))


def _multiplicative_start(x: Float[Array, "M n"]) -> Float[Array, "M"]:
    """Starting weights: a few multiplicative steps from equal weights."""
    n = x.shape[1]
    u = np.full(len(x), 1.0 / len(x))
    for _ in range(_MULTIPLICATIVE_STEPS):
        v = x @ inverse_root(x, u).T
        u *= np.einsum("ij,ij->i", v, v) / n
        u = np.maximum(u / u.sum(), 1e-12 / len(u))
    return u / u.sum()


class LogDeterminant(Objective):
    r"""The objective :math:`\log\det M(u)` with gradient :math:`g` and target :math:`n`: optimal weights sum to 1."""

    def __init__(self, x: Float[Array, "M n"]) -> None:
        self.x = x
        self.target = float(x.shape[1])

    def move(self, u: Float[Array, "M"]) -> None:
        """Compute M(u), the points whitened by M(u), and their squared norms g."""
        self.v = self.x @ inverse_root(self.x, u).T
        self.g = np.einsum("ij,ij->i", self.v, self.v)

    def gap(self, u: Float[Array, "M"]) -> float:
        """The relative gap of the design u / sum(u)."""
        return float(self.g.max()) * float(u.sum()) / self.target - 1.0

    def inessential(self, u: Float[Array, "M"], gap: float) -> Bool[Array, "M"] | None:
        """Points below the inner bound, if they are at least 15 % of all points; otherwise None."""
        n = self.x.shape[1]
        if gap >= 0.5 or len(u) <= n + 1:
            return None
        drop = self.g * float(u.sum()) < n * enclosure(gap, n).inner
        return drop if n <= len(u) - np.count_nonzero(drop) < 0.85 * len(u) else None

    def keep(self, keep: Bool[Array, "M"]) -> None:
        """Remove all other points."""
        self.x = self.x[keep]

    def newton(self, d: Float[Array, "M"], accuracy: float) -> Solve:
        """Solver for the Newton system, in the whitened points."""
        return newton_system(self.v, self.g, d, accuracy)

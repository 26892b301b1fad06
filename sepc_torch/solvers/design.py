r"""D-optimal design, the dual of the minimum-volume ellipsoid, refined on demand and certified at every stage.

For points lifted to :math:`x_i = (y_i, 1) \in \mathbb{R}^n` and weights :math:`u \ge 0` with sum 1, let
:math:`M = \sum_i u_i x_i x_i^\top` and :math:`g_i = x_i^\top M^{-1} x_i`. The design is optimal exactly when
:math:`\max_i g_i = n`, and :math:`\{y : x^\top M^{-1} x \le n\}` is then the minimum-volume ellipsoid. Short of
that, with :math:`\max_i g_i = n (1 + \mathtt{gap}) = n + \epsilon`, every eigenvalue of :math:`M^{-1} M_\star` lies
between the roots

.. math:: \lambda_\pm = 1 + \tfrac{\epsilon}{2} \pm \tfrac12 \sqrt{\epsilon\,(4 + \epsilon - 4/n)},

because they sum to at most :math:`n + \epsilon` and their inverses to at most :math:`n`. Hence
:math:`\{g \le n \lambda_-\} \subseteq E_\star \subseteq \{g \le n \lambda_+\}`: a coarse design already tells
surely inside from surely outside, and points with :math:`g_i < n \lambda_-` can never support the ellipsoid (Harman
and Pronzato, 2007).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.linalg import qr
from scipy.linalg.lapack import dpotrf, dtrtri

from sepc_torch.shapes import Array, Bool, Float, Int
from sepc_torch.solvers.interior import Objective, interior_point
from sepc_torch.solvers.newton import Solve, newton_system

# Up to this many points, or three per dimension, the interior point takes them all at once: rounds cost more.
_DIRECT = 400
# Multiplicative steps u <- u g / n before the interior point; they tame heavy tails, and more than 8 gain nothing.
_MULTIPLICATIVE_STEPS = 8
_MAX_ROUNDS = 80


class Bounds(NamedTuple):
    r"""The factors :math:`\lambda_- \le 1 \le \lambda_+` that enclose the optimal ellipsoid."""

    inner: float
    outer: float


def enclosure(gap: float, n: int) -> Bounds:
    r"""The roots :math:`\lambda_\pm` for a relative gap in lifted dimension n.

    >>> enclosure(0.0, 3)
    Bounds(inner=1.0, outer=1.0)
    """
    eps = n * max(gap, 0.0)
    middle, half = 1.0 + eps / 2, 0.5 * np.sqrt(eps * (4.0 + eps - 4.0 / n))
    # The product of the roots is 1 + eps / n; dividing avoids the cancellation in middle - half.
    return Bounds(float((1.0 + eps / n) / (middle + half)), float(middle + half))


def inverse_root(x: Float[Array, "M n"], u: Float[Array, "M"]) -> Float[Array, "n n"]:
    r"""The inverse Cholesky factor :math:`L^{-1}` of :math:`M = L L^\top = \sum_i u_i x_i x_i^\top`."""
    factor, failed = dpotrf((x * u[:, None]).T @ x, lower=1, clean=1)
    if not failed:
        inverse, failed = dtrtri(factor, lower=1)
    if failed:
        raise np.linalg.LinAlgError("the weighted points do not span the space")
    return inverse


def variances(lifted: Float[Array, "n N"], root: Float[Array, "n n"]) -> Float[Array, "N"]:
    r"""The values :math:`g_i = \|L^{-1} x_i\|^2` of all columns, in blocks that stay in the cache."""
    n, count = lifted.shape
    g = np.empty(count)
    block = max(512, 131072 // n)
    for start in range(0, count, block):
        v = root @ lifted[:, start : start + block]
        np.multiply(v, v, out=v)
        v.sum(axis=0, out=g[start : start + block])
    return g


class Design:
    """A design on the columns of ``lifted`` that :meth:`refine` improves until a gap is proven.

    ``support`` and ``weights`` describe the best design so far, ``gap`` its certificate over all columns, ``root``
    the inverse Cholesky factor of its information matrix. ``start`` names columns worth looking at first, such as
    the support of a similar set.
    """

    support: Int[Array, "S"]
    weights: Float[Array, "S"]
    root: Float[Array, "n n"]
    gap: float

    def __init__(self, lifted: Float[Array, "n N"], start: Int[Array, "S"] | None = None) -> None:
        self.n, self.count = lifted.shape
        self.gap = np.inf
        self._candidates = np.arange(self.count)
        self._lifted = lifted
        self._stalled = 0
        self._rounds = 0
        self._working = self._first_working_set(start)
        self._x = np.ascontiguousarray(lifted[:, self._working].T)
        try:
            self._u = _multiplicative_start(self._x)
        except np.linalg.LinAlgError:  # the outermost points do not span: add the pivots of a QR factorisation
            pivots = qr(lifted, mode="r", pivoting=True, check_finite=False)[1][: 4 * self.n]
            self._working = np.union1d(self._working, pivots)
            self._x = np.ascontiguousarray(lifted[:, self._working].T)
            self._u = _multiplicative_start(self._x)
        self._slack = 0.1
        self._survey()

    def refine(self, tolerance: float) -> float:
        """Improve the design until ``gap <= tolerance`` or arithmetic allows no more; return the gap."""
        while self.gap > tolerance and self._stalled < 6 and self._rounds < _MAX_ROUNDS:
            self._choose_working_set()
            everything = len(self._working) == len(self._candidates)
            inner = tolerance if everything else max(0.5 * tolerance, min(1e-2, 0.05 * self.gap))
            self._u = interior_point(LogDeterminant(self._x), self._u, inner, self._slack)
            self._rounds += 1
            self._survey()
        return self.gap

    @property
    def bounds(self) -> Bounds:
        """Factors that enclose the optimal ellipsoid between scalings of the current one."""
        return enclosure(self.gap, self.n)

    def _first_working_set(self, start: Int[Array, "S"] | None) -> Int[Array, "M"]:
        if self.count <= max(_DIRECT, 3 * self.n):
            return np.arange(self.count)
        outermost = min(self.count - 1, max(200, 12 * self.n))
        radius = np.einsum("ij,ij->j", self._lifted, self._lifted)
        chosen = [np.argpartition(-radius, outermost)[:outermost], self._lifted.argmax(1), self._lifted.argmin(1)]
        if start is not None:
            chosen.append(start)
        return np.unique(np.concatenate(chosen))

    def _survey(self) -> None:
        """Evaluate every candidate, update the certificate, and drop for ever what cannot support the ellipsoid."""
        carriers = self._u > 0
        u = self._u[carriers] / self._u[carriers].sum()
        root = inverse_root(self._x[carriers], u)
        self._g = variances(self._lifted, root)
        worst = float(self._g.max())
        gap = max(worst / self.n - 1.0, 0.0)
        self._stalled = 0 if gap < 0.9 * self.gap else self._stalled + 1
        if gap < self.gap:
            self.gap, self.root = gap, root
            self.support, self.weights = self._candidates[self._working[carriers]], u
        self._full = np.zeros(len(self._candidates))
        self._full[self._working[carriers]] = u
        self._round_gap = gap
        keep = (self._g >= self.n * enclosure(gap, self.n).inner) | (self._full > 1e-3 / len(self._working))
        if np.count_nonzero(keep) < 0.8 * len(keep):
            self._candidates, self._g, self._full = self._candidates[keep], self._g[keep], self._full[keep]
            self._lifted = np.ascontiguousarray(self._lifted[:, keep])

    def _choose_working_set(self) -> None:
        """Carriers of weight stay; violators and near-violators come in, the worst first."""
        carriers = np.flatnonzero(self._full > 1e-3 / max(len(self._working), 1))
        near = np.flatnonzero(self._g > self.n * (1.0 - 0.5 * min(self._round_gap, 0.2)))
        limit = 2 * self.n + len(carriers)
        if len(near) > limit:
            near = near[np.argpartition(-self._g[near], limit - 1)[:limit]]
        working = np.union1d(carriers, near)
        if len(self._candidates) <= max(1.2 * len(working) + 50, _DIRECT if self._rounds == 0 else 0):
            working = np.arange(len(self._candidates))
        self._working = working
        self._x = np.ascontiguousarray(self._lifted[:, working].T)
        self._slack = float(np.clip(self._round_gap, 1e-9, 0.1 if self._rounds == 0 else 0.3))
        weights = self._full[working]
        self._u = (1.0 - self._slack) * weights / weights.sum() + self._slack / len(working)


def _multiplicative_start(x: Float[Array, "M n"]) -> Float[Array, "M"]:
    n = x.shape[1]
    u = np.full(len(x), 1.0 / len(x))
    for _ in range(_MULTIPLICATIVE_STEPS):
        v = x @ inverse_root(x, u).T
        u *= np.einsum("ij,ij->i", v, v) / n
        u = np.maximum(u / u.sum(), 1e-12 / len(u))
    return u / u.sum()


class LogDeterminant(Objective):
    r"""The objective :math:`\log\det M(u)`, whose gradient is g and whose weights sum to 1 at the optimum."""

    def __init__(self, x: Float[Array, "M n"]) -> None:
        self.x = x
        self.target = float(x.shape[1])

    def move(self, u: Float[Array, "M"]) -> None:
        """Whiten the points by M(u)."""
        self.v = self.x @ inverse_root(self.x, u).T
        self.g = np.einsum("ij,ij->i", self.v, self.v)

    def gap(self, u: Float[Array, "M"]) -> float:
        """The gap of the design u / sum(u)."""
        return float(self.g.max()) * float(u.sum()) / self.target - 1.0

    def inessential(self, u: Float[Array, "M"], gap: float) -> Bool[Array, "M"] | None:
        """Points below the inner bound, once they are a good part."""
        n = self.x.shape[1]
        if gap >= 0.5 or len(u) <= n + 1:
            return None
        drop = self.g * float(u.sum()) < n * enclosure(gap, n).inner
        return drop if n <= len(u) - np.count_nonzero(drop) < 0.85 * len(u) else None

    def keep(self, keep: Bool[Array, "M"]) -> None:
        """Forget all other points."""
        self.x = self.x[keep]

    def newton(self, d: Float[Array, "M"], accuracy: float) -> Solve:
        """The Newton system in the whitened points."""
        return newton_system(self.v, self.g, d, accuracy)

r"""Means and scatter matrices of embeddings that come in chunks, in float64: all that a projection is fitted to.

:class:`Moments` accumulates points as they are. :class:`EmbeddingMoments` accumulates embeddings, their directions and
the logarithms of their lengths in one pass; each product of a chunk with itself is computed once.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch

from sepc_torch.data.arrays import scale_or_one
from sepc_torch.shapes import Array, Float, Int

# Least length of an embedding, as a share of the median length; the logarithm of zero is not finite.
_SHORT = 1e-3
# Rows that the median length is taken over: they fix it to better than one percent, which is more than _SHORT needs.
_MEDIAN_ROWS = 65536


class Moments:
    r"""Count n, mean m and scatter :math:`S = \sum_i (x_i - m)(x_i - m)^\top` of points that come in chunks.

    Two groups of points are merged by

    .. math:: S = S_1 + S_2 + \frac{n_1 n_2}{n_1 + n_2} (m_1 - m_2)(m_1 - m_2)^\top,

    a sum of positive semidefinite matrices. It does not cancel, however far the points are from zero.

    Args:
        dim: Number of features D.
        device: Torch device that computes the products of chunks; None for NumPy.

    >>> moments = Moments(1)
    >>> moments.add(np.array([[1.0], [2.0]]))
    >>> moments.add(np.array([[6.0]]))
    >>> moments.count, moments.mean, moments.scatter
    (3, array([3.]), array([[14.]]))
    """

    count: int
    mean: Float[Array, "D"]
    scatter: Float[Array, "D D"]

    def __init__(self, dim: int, device: torch.device | None = None) -> None:
        self.count, self.mean, self.scatter = 0, np.zeros(dim), np.zeros((dim, dim))
        self._device = device

    @property
    def covariance(self) -> Float[Array, "D D"]:
        """The covariance matrix :math:`S / n`."""
        return self.scatter / self.count

    def add(self, x: Float[Array, "n D"]) -> None:
        """Add points; they are converted to float64."""
        if len(x) == 0:
            return
        mean = x.mean(axis=0, dtype=np.float64)
        centred = x - mean
        if self._device is None:
            scatter = centred.T @ centred
        else:
            on_device = torch.from_numpy(centred).to(self._device)
            scatter = (on_device.T @ on_device).cpu().numpy()
        self._merge(len(x), mean, scatter)

    def merged(self, other: Moments) -> Moments:
        """Moments of the points of both, of as many leading features as the other has."""
        dim = len(other.mean)
        both = Moments(dim, self._device)
        both._merge(self.count, self.mean[:dim], self.scatter[:dim, :dim])
        both._merge(other.count, other.mean, other.scatter)
        return both

    def _merge(self, count: int, mean: Float[Array, "D"], scatter: Float[Array, "D D"]) -> None:
        total = self.count + count
        if total == 0:
            return
        apart = mean - self.mean
        if self.count:
            self.scatter += np.outer(apart, (self.count * count / total) * apart)
        self.scatter += scatter
        self.mean = self.mean + (count / total) * apart
        self.count = total


class EmbeddingMoments:
    r"""Moments of embeddings x, of their directions :math:`x / \|x\|` and of their polar features, in one pass.

    The polar features are :math:`(x / r, \log r)` with :math:`r = \max(\|x\|, \ell)`. The least length :math:`\ell` is
    a thousandth of the median length of the first chunks with together at least 65 536 rows, or of all rows if there
    are fewer. These chunks are kept until their median is known; views of arrays take no memory.

    Args:
        sums_of: Also sum the embeddings (``"raw"``), directions (``"direction"``) or polar features (``"polar"``) of
            every class; None for no sums.
        device: Torch device that computes the products of chunks; None for NumPy.

    >>> moments = EmbeddingMoments()
    >>> moments.add(np.array([[3.0, 4.0], [0.0, 2.0]]), np.array([0, 1]))
    >>> moments.finish()
    >>> moments.raw.mean, moments.direction().mean, moments.polar().mean.round(4)
    (array([1.5, 3. ]), array([0.3, 0.9]), array([0.3   , 0.9   , 1.1513]))
    """

    raw: Moments
    class_sums: Float[Array, "C D"]
    class_counts: Int[Array, "C"]

    def __init__(
        self, sums_of: Literal["raw", "direction", "polar"] | None = None, device: torch.device | None = None
    ) -> None:
        self._sums_of, self._device = sums_of, device
        self._held: list[tuple[Float[Array, "n D"], Int[Array, "n"]]] = []
        self._held_rows = 0
        self.least = 0.0
        self.zeros = False
        self.class_counts = np.zeros(0, dtype=np.int64)

    @property
    def features(self) -> int:
        """Number of features D of the embeddings."""
        return len(self.raw.mean)

    def add(self, x: Float[Array, "n D"], codes: Int[Array, "n"]) -> None:
        """Add a chunk of at least one embedding, with their classes. It must not change until :meth:`finish`."""
        if self.least:
            self._absorb(x, codes)
            return
        self._held.append((x, codes))
        self._held_rows += len(x)
        if self._held_rows >= _MEDIAN_ROWS:
            self.finish()

    def finish(self) -> None:
        """Add the chunks that are still kept; call it after the last chunk."""
        held, self._held = self._held, []
        if held and not self.least:
            features = held[0][0].shape[1]
            self.raw, self._long = Moments(features, self._device), Moments(features + 1, self._device)
            self._short = Moments(features, self._device), Moments(features + 1, self._device)
            self._largest, self._shift = np.zeros(features), held[0][0].mean(axis=0, dtype=np.float64)
            self.class_sums = np.zeros((0, features + (self._sums_of == "polar")))
            middle = float(np.median(np.concatenate([_lengths(x) for x, _ in held])))
            self.least = max(float(np.finfo(np.float64).tiny), _SHORT * middle)
        for x, codes in held:
            self._absorb(x, codes)

    def direction(self) -> Moments:
        """Moments of the directions; an embedding of zeros has the direction zero."""
        return self._long.merged(self._short[0])

    def polar(self) -> Moments:
        """Moments of the polar features."""
        return self._long.merged(self._short[1])

    def feature_scale(self) -> Float[Array, "D"]:
        """Standard deviation of each feature of the embeddings, 1 for a constant feature."""
        return scale_or_one(np.sqrt(np.diag(self.raw.covariance)), self._largest)

    def class_means(self) -> Float[Array, "C D"]:
        """Means of the classes, relative to the mean of all points, of the features named by ``sums_of``."""
        means = self.class_sums / self.class_counts[:, None]
        if self._sums_of == "raw":
            return means - (self.raw.mean - self._shift)
        return means - (self.direction() if self._sums_of == "direction" else self.polar()).mean

    def _absorb(self, x: Float[Array, "n D"], codes: Int[Array, "n"]) -> None:
        x = x.astype(np.float64, copy=False)
        self.raw.add(x)
        self._largest = np.maximum(self._largest, np.maximum(x.max(axis=0), -x.min(axis=0)))
        length = _lengths(x)
        short = length < self.least
        self.zeros = self.zeros or not length.all()
        polar = np.empty((len(x), x.shape[1] + 1))
        np.divide(x, np.maximum(length, self.least)[:, None], out=polar[:, :-1])
        np.log(np.maximum(length, self.least), out=polar[:, -1])
        if self._sums_of is not None:
            # Relative to a point nearby: sums far from zero would lose digits.
            features = x - self._shift if self._sums_of == "raw" else polar
            self._add_class_sums(_directions(x) if self._sums_of == "direction" else features, codes)
        # Directions and polar features differ only for embeddings shorter than the least length, which are rare. The
        # others share one product.
        if short.any():
            self._short[0].add(_directions(x[short]))
            self._short[1].add(polar[short])
            polar = polar[~short]
        self._long.add(polar)

    def _add_class_sums(self, x: Float[Array, "n D"], codes: Int[Array, "n"]) -> None:
        new = int(codes.max()) + 1 - len(self.class_sums)
        if new > 0:
            self.class_sums = np.concatenate([self.class_sums, np.zeros((new, x.shape[1]))])
            self.class_counts = np.concatenate([self.class_counts, np.zeros(new, dtype=np.int64)])
        order = np.argsort(codes, kind="stable")
        present, starts, counts = np.unique(codes[order], return_index=True, return_counts=True)
        self.class_sums[present] += np.add.reduceat(x[order], starts, axis=0)
        self.class_counts[present] += counts


def _lengths(x: Float[Array, "n D"]) -> Float[Array, "n"]:
    """Lengths of rows in float64."""
    x = x.astype(np.float64, copy=False)
    return np.sqrt(np.einsum("ij,ij->i", x, x))


def _directions(x: Float[Array, "n D"]) -> Float[Array, "n D"]:
    """Rows divided by their lengths; rows of zeros stay zeros."""
    return x / np.maximum(_lengths(x), np.finfo(np.float64).tiny)[:, None]

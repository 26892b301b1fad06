r"""Linear systems of the Newton step in the dual of program (2), solved by the cheapest of three methods.

The system is :math:`(H + \mathrm{diag}(d))\, x = r` with :math:`H_{ij} = (v_i^\top v_j)^2`. If the rows :math:`v_i` are
the points :math:`x_i` whitened by the current matrix, :math:`H` is the negative Hessian of
:math:`\log\det \sum_i u_i x_i x_i^\top`. The methods are a dense Cholesky factorisation, the Woodbury identity
(:math:`H` has rank at most :math:`p = n (n + 1) / 2`), and preconditioned conjugate gradients.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy.linalg.lapack import dpotrf, dpotrs

from sepc_torch.shapes import Array, Float

Solve = Callable[[Array, Array | None], Array]
"""``solve(r, guess)`` returns x; conjugate gradients start from the guess, the direct methods ignore it."""


def newton_system(v: Float[Array, "M n"], g: Float[Array, "M"], d: Float[Array, "M"], tolerance: float) -> Solve:
    """Solver for several right-hand sides, factorised once; ``g`` holds the squared row norms of ``v``."""
    count, n = v.shape
    pairs = n * (n + 1) // 2
    # Rough costs in flops, plus a constant for the calls. The estimate for conjugate gradients assumes fourteen
    # products for each of the two right-hand sides (predictor and corrector).
    dense = count * count * (count / 3 + n) * 1.3 + 2e4
    low_rank = count * pairs * (pairs + 6.0) + pairs**3 / 3 + 4e4
    iterative = 28.0 * (4.0 * count * n * n + 4e5)
    try:
        if dense <= min(low_rank, iterative):
            return _dense(v, g, d)
        if low_rank <= iterative:
            return _low_rank(v, d)
    except np.linalg.LinAlgError:
        pass  # cospherical points near the end of the path; conjugate gradients need no factorisation
    return _iterative(v, g, d, tolerance)


def _cholesky(matrix: Float[Array, "M M"]) -> Float[Array, "M M"]:
    factor, failed = dpotrf(matrix.T, lower=1, overwrite_a=1)
    if failed:
        raise np.linalg.LinAlgError("the Newton matrix is not positive definite")
    return factor


def _dense(v: Float[Array, "M n"], g: Float[Array, "M"], d: Float[Array, "M"]) -> Solve:
    """Cholesky factorisation of the M x M matrix."""
    h = v @ v.T
    h *= h
    # Duplicate points make H singular. The shift is below the rounding error of its entries, and the outer iteration
    # corrects its effect.
    h.ravel()[:: len(h) + 1] += d + 1e-14 * float(g.max()) ** 2
    factor = _cholesky(h)
    return lambda r, guess: dpotrs(factor, r, lower=1)[0]


def _low_rank(v: Float[Array, "M n"], d: Float[Array, "M"]) -> Solve:
    """Woodbury identity for H = K K^T, where the columns of K are the p products of two coordinates."""
    i, j = np.triu_indices(v.shape[1])
    k = v[:, i] * v[:, j]
    k *= np.where(i == j, 1.0, np.sqrt(2.0))
    return _woodbury(k, d)


def factored_system(k: Float[Array, "M p"], d: Float[Array, "M"]) -> Solve:
    r"""Solver for :math:`(K K^\top + \mathrm{diag}(d))\, x = r`, by factorising the smaller of M x M and p x p."""
    if k.shape[0] > k.shape[1]:
        return _woodbury(k, d)
    h = k @ k.T
    h.ravel()[:: len(h) + 1] += d + 1e-14 * float(h.max())
    factor = _cholesky(h)
    return lambda r, guess: dpotrs(factor, r, lower=1)[0]


def _woodbury(k: Float[Array, "M p"], d: Float[Array, "M"]) -> Solve:
    """Solver for (K K^T + diag(d)) x = r through the p x p capacitance matrix I + K^T diag(1/d) K."""
    k_over_d = k / d[:, None]
    capacitance = k.T @ k_over_d
    capacitance.ravel()[:: len(capacitance) + 1] += 1.0
    factor = _cholesky(capacitance)

    def solve(r: Array, _guess: Array | None) -> Array:
        x = r / d
        return x - k_over_d @ dpotrs(factor, k.T @ x, lower=1)[0]

    return solve


def _iterative(v: Float[Array, "M n"], g: Float[Array, "M"], d: Float[Array, "M"], tolerance: float) -> Solve:
    """Conjugate gradients with a diagonal preconditioner; H x = diag(V (V^T diag(x) V) V^T) costs O(M n^2)."""
    preconditioner = 1.0 / (g * g + d)

    def apply(x: Array) -> Array:
        inner = (v * x[:, None]).T @ v
        return np.einsum("ij,ij->i", v @ inner, v) + d * x

    def solve(r: Array, guess: Array | None) -> Array:
        x = np.zeros_like(r) if guess is None else guess.copy()
        residual = r - apply(x) if guess is not None else r.copy()
        z = preconditioner * residual
        direction = z.copy()
        rz = float(residual @ z)
        stop = tolerance**2 * float(r @ (preconditioner * r))
        for _ in range(80):  # a safeguard: the preconditioned system is well conditioned and needs fewer steps
            if rz <= stop:
                break
            image = apply(direction)
            step = rz / float(direction @ image)
            x += step * direction
            residual -= step * image
            z = preconditioner * residual
            rz, previous = float(residual @ z), rz
            direction *= rz / previous
            direction += z
        return x

    return solve

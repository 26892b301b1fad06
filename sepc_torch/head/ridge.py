r"""Ridge regression of class indicators: a linear classifier in closed form, its penalty by leave-one-out errors."""

from __future__ import annotations

import numpy as np

from sepc_torch.shapes import Array, Float, Int

# Candidate penalties, as shares of the largest eigenvalue: from hardly any to almost only the class shares.
_PENALTIES = 10.0 ** np.arange(-6, 1)


def ridge_shares(
    points: Float[Array, "N D"], codes: Int[Array, "N"], classes: int, z: Float[Array, "B D"]
) -> Float[Array, "B C"]:
    r"""Estimated shares of the classes at new points, by linear regression of the indicators of the classes.

    :math:`\hat p(z) = \bar y + (X^\top X + a I)^{-1} X^\top Y \cdot (z - \bar x)`, cut to [0, 1], with centred points X
    and indicators Y. The penalty a minimises the mean square of the leave-one-out errors
    :math:`(y_i - \hat y_i) / (1 - h_i)`, where :math:`h_i` is the leverage of point i.

    Args:
        points: Points with known classes.
        codes: Their classes, as indices from 0.
        classes: Number of classes.
        z: New points.

    >>> points = np.array([[0.0], [1.0], [10.0], [11.0]])
    >>> ridge_shares(points, np.array([0, 0, 1, 1]), 2, np.array([[0.5], [5.5], [99.0]])).round(1)
    array([[1. , 0. ],
           [0.5, 0.5],
           [0. , 1. ]])
    """
    centre, indicators = points.mean(axis=0), np.eye(classes)[codes]
    shares = indicators.mean(axis=0)
    centred, target = points - centre, indicators - shares
    values, vectors = np.linalg.eigh(centred.T @ centred)
    values, rotated = np.maximum(values, 0.0), centred @ vectors
    moments = rotated.T @ target
    # Equal points have no direction; any penalty then gives the class shares.
    penalties = _PENALTIES * (values[-1] if values[-1] > 0 else 1.0)
    errors = []
    for penalty in penalties:
        leverage = (rotated**2 / (values + penalty)).sum(axis=1) + 1.0 / len(points)
        residual = target - rotated @ (moments / (values + penalty)[:, None])
        # A leverage of one, up to rounding, fits its own point whatever the class is: it counts as a large error.
        errors.append(float(((residual / np.maximum(1.0 - leverage, 1e-9)[:, None]) ** 2).mean()))
    weights = vectors @ (moments / (values + penalties[int(np.argmin(errors))])[:, None])
    return np.clip(shares + (z - centre) @ weights, 0.0, 1.0)

r"""Differentiable layers: minimum-volume ellipsoids and closest points of reduced hulls, with gradients in the points.

::

    layer = MVELayer(points=100, features=8)      # backend="native" (default) or "cvxpylayers"
    e = layer(z)                                  # z (M, D) or (B, M, D); e.center, e.whitener, e.log_volume(), ...
    loss = EllipsoidLoss(classes=10, features=8)  # for a training step: loss(embeddings, labels)

The package solves the minimum-volume ellipsoid, program (2), with two interior-point methods:

- :mod:`sepc_torch.solvers.interior_point` is written in NumPy. It solves one set at a time, on working sets, which is
  fast for large sets. The offline functions use it. The layer uses it on the CPU without floor and smoothing.
- :mod:`sepc_torch.layers.interior_point` is written in torch. It solves a batch of sets at once. The layer uses it on
  GPUs, for the smoothed program, for the floored program, and for sets that the other method does not solve.

Both are Mehrotra's predictor-corrector method on the same dual. Without smoothing, the layer then runs a crossover:
Newton's method on the active set takes the multipliers from a gap of 1e-9 or less to rounding. Without the crossover a
gradient would have half the digits. A certificate is computed from the final multipliers: no point is outside, and
every point with positive weight is on the surface. ``dual`` holds the dual and its derivatives, ``implicit`` the
derivative of its solution, ``native`` the whitening of the points and the ellipsoids, and ``balls`` the special case of
sets that a ball of the floor's radius covers.

The package also states program (2) in cvxpy twice. :mod:`sepc_torch.solvers.programs.minimum_volume` states it with
constant points, generated constraints and an optional floor, for any cvxpy solver. ``cvxpylayers_backend`` states it
with the points as parameters, because cvxpylayers differentiates with respect to parameters. Program (4), the closest
points of reduced hulls, has one statement of weights and constraints, in
:mod:`sepc_torch.solvers.programs.reduced_hull`. :class:`RCHLayer` gives it the points as parameters. cvxpylayers is an
optional dependency (extra ``layers``), imported only by the code that needs it.
"""

from __future__ import annotations

from sepc_torch.layers.ellipsoids import RefittedEllipsoid
from sepc_torch.layers.loss import EllipsoidLoss, LossTerms
from sepc_torch.layers.mve import MVELayer
from sepc_torch.layers.reduced_hulls import ClosestPoints, RCHLayer

__all__ = ["ClosestPoints", "EllipsoidLoss", "LossTerms", "MVELayer", "RCHLayer", "RefittedEllipsoid"]

r"""Differentiable refits: ellipsoids and reduced hulls whose gradient reaches the points that they were fitted to.

::

    layer = MVELayer(points=100, features=8)      # backend="native" (default) or "cvxpylayers"
    e = layer(z)                                  # z (M, D) or (B, M, D); e.center, e.whitener, e.log_volume(), ...
    loss = EllipsoidLoss(classes=10, features=8)  # for a training step: loss(embeddings, labels)

Where the line to the offline solver is. There is one algorithm for the minimum-volume ellipsoid in this package, the
dual interior point of :mod:`sepc_torch.solvers`, and the layer ends where it ends. On the CPU the layer calls that
solver's design for every set, working sets and elimination included (``implicit``). What the offline solver does not
have is here: the crossover that takes its answer from a gap of 1e-9 to rounding, without which a gradient has half the
digits (``interior.crossover``); the derivative (``implicit``); and the same Newton system and step rule over a batch of
tensors (``interior.interior_point``), for GPUs, where sets one by one would leave the machine idle, and for the
smoothed and floored programs, which need every point at once (``forms`` holds the dual that they share; ``balls`` the
case that a ball of the floor's radius covers everything). Certificates
are taken anew from the result: no point outside, every point that carries weight on the surface.

``stated`` states program (2), and ``hulls`` program (4), in cvxpy with the points as parameters, for cvxpylayers (extra
``layers``); nothing else here imports it.
"""

from __future__ import annotations

from sepc_torch.layers.ellipsoids import RefittedEllipsoid
from sepc_torch.layers.loss import EllipsoidLoss, LossTerms
from sepc_torch.layers.mve import MVELayer
from sepc_torch.layers.reduced_hulls import ClosestPoints, RCHLayer

__all__ = ["ClosestPoints", "EllipsoidLoss", "LossTerms", "MVELayer", "RCHLayer", "RefittedEllipsoid"]

r"""The dual of program (2) for a batch of point sets, plain and floored: gradient, Hessian, derivative in the points.

For multipliers :math:`\lambda \ge 0` of points :math:`y_i` let :math:`\omega = \sum_i \lambda_i`,
:math:`c = \sum_i \lambda_i y_i / \omega` and :math:`S = \sum_i \lambda_i (y_i - c)(y_i - c)^\top`. The ellipsoid of
:math:`\lambda` is :math:`\{(y - c)^\top P (y - c) \le 1\}` with

.. math:: P = S^{-1} \quad\text{(plain)}, \qquad P = \min(1, S^{-1}) \quad\text{(semi-axes of at least 1)},

and the dual :math:`\max_{\lambda \ge 0} F(\lambda) - \omega` has the gradient :math:`h_i - 1`,
:math:`h_i = (y_i - c)^\top P (y_i - c)`, and the negative Hessian
:math:`2\, (y_i - c)^\top P (y_j - c) / \omega + \sum_{ab} \Gamma_{ab}\, y_{ia} y_{ib} y_{ja} y_{jb}` in the
eigenvectors of S, with the divided differences :math:`\Gamma_{ab} = -(p(s_a) - p(s_b)) / (s_a - s_b)`. This is the dual
of :mod:`sepc_torch.solvers.floored`; without the floor it is, with :math:`\lambda = D u`, that of
:mod:`sepc_torch.solvers.d_optimal`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from sepc_torch.shapes import Bool, Float


def center_and_scatter(
    y: Float[Tensor, "B M D"], u: Float[Tensor, "B M"]
) -> tuple[Float[Tensor, "B 1 D"], Float[Tensor, "B D D"]]:
    """The weighted mean c and scatter S of the points, differentiable in both arguments."""
    mass = u.sum(-1)[:, None, None]
    center = (u.unsqueeze(-2) @ y) / mass
    offsets = y - center
    return center, (u.unsqueeze(-1) * offsets).mT @ offsets


class Form(ABC):
    """The dual at the multipliers u, which are zero for masked points."""

    def __init__(self, y: Float[Tensor, "B M D"], mask: Bool[Tensor, "B M"], u: Float[Tensor, "B M"]) -> None:
        self.u = u
        self.mass = u.sum(-1, keepdim=True)
        center, scatter = center_and_scatter(y, u)
        self.offsets = torch.where(mask.unsqueeze(-1), y - center, torch.zeros_like(y))
        self.prepare(scatter)

    @abstractmethod
    def prepare(self, scatter: Float[Tensor, "B D D"]) -> None:
        """Factorise the scatter."""

    @property
    @abstractmethod
    def h(self) -> Float[Tensor, "B M"]:
        """The squared distances to the centre in the metric P, zero for masked points."""

    @abstractmethod
    def hessian(self) -> Float[Tensor, "B M M"]:
        """The negative Hessian of the dual."""

    @abstractmethod
    def curved(self, factors: Float[Tensor, "B M"]) -> Float[Tensor, "B M D"]:
        r"""The rows :math:`(\Gamma \circ \sum_i \ell_i y_i y_i^\top)\, y_j`, y relative to the centre."""

    @abstractmethod
    def steepness(self) -> Float[Tensor, "B M D"]:
        """The vectors P (y - c), half the gradients of h in y."""

    def pullback(self, factors: Float[Tensor, "B M"]) -> Float[Tensor, "B M D"]:
        r"""The gradient of :math:`\sum_i \ell_i h_i` in the points, with constant multipliers.

        .. math:: 2 \ell_j P y_j - \frac{2 \lambda_j}{\omega} \sum_i \ell_i P y_i
                  - 2 \lambda_j \Big(\Gamma \circ \sum_i \ell_i y_i y_i^\top\Big) y_j
        """
        steep = self.steepness()
        mean = (factors.unsqueeze(-2) @ steep) / self.mass.unsqueeze(-1)
        return 2 * (factors.unsqueeze(-1) * steep - self.u.unsqueeze(-1) * (mean + self.curved(factors)))

    @staticmethod
    @abstractmethod
    def precision(scatter: Float[Tensor, "B D D"]) -> Float[Tensor, "B D D"]:
        """P as a differentiable function of the scatter."""


class PlainForm(Form):
    """Program (2) without a floor; the points must span the space."""

    def prepare(self, scatter: Float[Tensor, "B D D"]) -> None:
        """Whiten the points by a Cholesky factor; sets without one get NaN."""
        self.root, failed = torch.linalg.cholesky_ex(scatter)
        self.root = torch.where(failed[:, None, None] > 0, torch.full_like(self.root, torch.nan), self.root)
        self.v = torch.linalg.solve_triangular(self.root, self.offsets.mT, upper=False)

    @cached_property
    def h(self) -> Float[Tensor, "B M"]:
        """The squared norms of the whitened points."""
        return self.v.square().sum(-2)

    @cached_property
    def _products(self) -> Float[Tensor, "B M M"]:
        return self.v.mT @ self.v

    def hessian(self) -> Float[Tensor, "B M M"]:
        """The negative Hessian; without a floor both terms are functions of the products :math:`y_i^T P y_j`."""
        return self._products * (self._products + (2 / self.mass).unsqueeze(-1))

    def curved(self, factors: Float[Tensor, "B M"]) -> Float[Tensor, "B M D"]:
        """The vectors P B P y for the moment matrix B, as combinations of the vectors P y."""
        return self._products @ (factors.unsqueeze(-1) * self.steepness())

    def steepness(self) -> Float[Tensor, "B M D"]:
        """The vectors P (y - c), by a triangular solve with the transposed Cholesky factor."""
        return torch.linalg.solve_triangular(self.root.mT, self.v, upper=True).mT

    @staticmethod
    def precision(scatter: Float[Tensor, "B D D"]) -> Float[Tensor, "B D D"]:
        """The inverse of the scatter."""
        return torch.cholesky_inverse(torch.linalg.cholesky(scatter))


class FlooredForm(Form):
    """Program (2) with semi-axes of at least 1; the points need not span the space."""

    def prepare(self, scatter: Float[Tensor, "B D D"]) -> None:
        """Rotate the points to the eigenvectors of the scatter; sets with a scatter that is not finite get NaN."""
        finite = scatter.isfinite().flatten(1).all(-1)[:, None, None]
        self.s, self.basis = torch.linalg.eigh(torch.where(finite, scatter, torch.zeros_like(scatter)))
        self.t = torch.where(finite, self.offsets @ self.basis, torch.full_like(self.offsets, torch.nan))
        self.p = 1 / self.s.clamp_min(1)

    @cached_property
    def h(self) -> Float[Tensor, "B M"]:
        """The squared coordinates along the eigenvectors, weighted by the eigenvalues of P."""
        return (self.t.square() @ self.p.unsqueeze(-1)).squeeze(-1)

    def hessian(self) -> Float[Tensor, "B M M"]:
        """The negative Hessian; its second term is a Gram matrix of products of two coordinates."""
        dim = self.t.shape[-1]
        i, j = torch.triu_indices(dim, dim, device=self.t.device)
        weight = divided_differences(self.s)[:, i, j] * torch.where(i == j, 1.0, 2.0)
        pairs = self.t[:, :, i] * self.t[:, :, j]
        first = (self.t * (2 * self.p / self.mass).unsqueeze(-2)) @ self.t.mT
        return first + (pairs * weight.unsqueeze(-2)) @ pairs.mT

    def curved(self, factors: Float[Tensor, "B M"]) -> Float[Tensor, "B M D"]:
        """The rows, computed in the eigenvectors and rotated back."""
        moment = (factors.unsqueeze(-1) * self.t).mT @ self.t
        return self.t @ (divided_differences(self.s) * moment) @ self.basis.mT

    def steepness(self) -> Float[Tensor, "B M D"]:
        """The vectors P (y - c), computed in the eigenvectors and rotated back."""
        return (self.t * self.p.unsqueeze(-2)) @ self.basis.mT

    @staticmethod
    def precision(scatter: Float[Tensor, "B D D"]) -> Float[Tensor, "B D D"]:
        """The inverse of the scatter, with its eigenvalues limited to 1."""
        return _FlooredInverse.apply(scatter)  # type: ignore[no-untyped-call]


def divided_differences(s: Float[Tensor, "B D"]) -> Float[Tensor, "B D D"]:
    r"""The :math:`\Gamma_{ab}` of :math:`p(s) = \min(1, 1/s)`, in closed forms that never divide by zero."""
    a, b = torch.maximum(s[:, :, None], s[:, None, :]), torch.minimum(s[:, :, None], s[:, None, :])
    mixed = (a > 1) & (b < 1)
    across = (1 - 1 / a.clamp_min(1)) / torch.where(mixed, a - b, torch.ones_like(a))
    above = 1 / (a * b).clamp_min(1)
    return torch.where(b >= 1, above, torch.where(mixed, across, torch.zeros_like(a)))


class _FlooredInverse(torch.autograd.Function):
    """The spectral function min(1, 1/s) with its own gradient; that of ``eigh`` is NaN for equal eigenvalues."""

    @staticmethod
    def forward(ctx: Any, scatter: Float[Tensor, "B D D"]) -> Float[Tensor, "B D D"]:
        s, basis = torch.linalg.eigh(scatter)
        ctx.save_for_backward(s, basis)
        return (basis / s.clamp_min(1).unsqueeze(-2)) @ basis.mT

    @staticmethod
    def backward(ctx: Any, grad: Float[Tensor, "B D D"]) -> Float[Tensor, "B D D"]:
        s, basis = ctx.saved_tensors
        inner = basis.mT @ (0.5 * (grad + grad.mT)) @ basis
        return -basis @ (divided_differences(s) * inner) @ basis.mT

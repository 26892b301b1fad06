r"""Rounded ellipsoids: a bank in float16 for the screening kernels, with a bound of the error.

Rounded ellipsoids (:class:`Rounded`) let a screening pass use one float16 product instead of three. With
:math:`\hat R = R \operatorname{diag}(s) / u`, one unit u per ellipsoid, and :math:`x = z / s`, the pass computes

.. math:: \tilde d = u \,\| H \operatorname{fl}_{16}(x) - b \|, \quad H = \operatorname{fl}_{16}(\hat R),\
   b = \operatorname{fl}_{32}(\hat R c).

By the triangle inequality, and :math:`|\operatorname{fl}_{16}(x_i) - x_i| \le 2^{-11} |x_i|`,

.. math:: |\tilde d - d| \le u \bigl(\|H - \hat R\| + 2^{-11} \|H\| + \gamma \||H|\|\bigr) \|x\|
   + u \bigl(\|\hat R c - b\| + \gamma \|b\|\bigr) + \rho \tilde d

in spectral norms, where :math:`\gamma` bounds the rounding of sums and :math:`\rho` that of squares and the root. The
second term also covers the error of the float32-accurate distance, and so the difference between the ellipsoids as
pairs of float16 numbers and those in float64. If the bound leaves one possible decision, it is therefore the decision
of either distance.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sepc_torch.model.kernels.tables import TOP, Split, power_of_two_above
from sepc_torch.shapes import Float

# Half a unit in the last place of float16, and the least float16 number in units of TOP.
_HALF_UNIT = 2.0**-11
_LEAST_UNIT = 2.0**-38
# Rounding of sums on tensor cores: four float32 units for every addition that can round, and as much again for *each*
# of the two other products of the accurate distance.
_SUM_UNIT = 3.0 * 2.0**-21
# Squarings of a matrix before its Frobenius norm: the bound exceeds the spectral norm by at most the factor D^(1/128).
_SQUARINGS = 5


class Rounded(NamedTuple):
    r"""Ellipsoids in float16 and the bound :math:`e = \mathtt{slope}\,\|x\| + \mathtt{offset} + \rho \tilde d`.

    ``matrix`` (K, F, F) holds :math:`H_{ji}` at [k, i, j], ``bias`` (K, F) is b, ``unit`` (K,) is u, ``relative`` is
    :math:`\rho`. Features are in the units of the bank's :class:`Split`.
    """

    matrix: Tensor
    bias: Float[Tensor, "K F"]
    unit: Float[Tensor, "K"]
    slope: Float[Tensor, "K"]
    offset: Float[Tensor, "K"]
    relative: float


def rounded(bank: Split) -> Rounded:
    """Round the ellipsoids of a bank to float16 and bound the error; norms are computed in float64 and rounded up."""
    # The triangular factor at [k, i, j], as in the split bank.
    r = (bank.high.double() + bank.low.double()) * bank.row_scale.double().unsqueeze(1)
    padded = r.shape[1]
    u = power_of_two_above(r.abs().amax(dim=(1, 2)).clamp_min(torch.finfo(torch.float32).tiny)) / TOP
    scaled = r / u[:, None, None]
    matrix = scaled.half()
    h = matrix.double()
    exact_bias = torch.einsum("kij,ki->kj", scaled, bank.centers.double())
    bias = exact_bias.float()
    size, terms = spectral_bound(h), spectral_bound(h.abs())
    sums = (padded / 16 + 8) * _SUM_UNIT
    root = padded**0.5
    center = torch.linalg.vector_norm(bank.centers.double(), dim=1)
    slope = spectral_bound(h - scaled) + (_HALF_UNIT + _LEAST_UNIT * root) * size + sums * terms
    offset = (
        # Squares below the range of float32 are lost from the norm of a point.
        2.0**-63 * root * slope
        + torch.linalg.vector_norm(exact_bias - bias.double(), dim=1)
        + _LEAST_UNIT * root * bank.reach * size
        + sums * (torch.linalg.vector_norm(exact_bias, dim=1) + terms * center)
    )
    return Rounded(
        matrix=matrix.contiguous(),
        bias=bias.contiguous(),
        unit=u.float(),
        slope=_rounded_up(slope * u),
        offset=_rounded_up(offset * u),
        relative=(padded + 16) * 2.0**-23,
    )


def spectral_bound(matrix: Float[Tensor, "K F F"]) -> Float[Tensor, "K"]:
    r"""A bound on spectral norms: :math:`\|A\|_2^{2^{m + 1}} = \|(A^\top A)^{2^m}\|_2 \le \|(A^\top A)^{2^m}\|_F`."""
    gram = matrix.mT @ matrix
    logarithm = torch.zeros(len(matrix), dtype=torch.float64, device=matrix.device)
    for step in range(_SQUARINGS + 1):
        size = torch.linalg.matrix_norm(gram).clamp_min(torch.finfo(torch.float64).tiny)
        logarithm += size.log() / 2**step
        if step < _SQUARINGS:
            gram = gram / size[:, None, None]
            gram = gram @ gram
    return torch.exp(logarithm / 2) * (1.0 + 1e-6)


def _rounded_up(numbers: Float[Tensor, "K"]) -> Float[Tensor, "K"]:
    """Convert to float32, increased by more than the rounding errors of a point's norm and of the bound."""
    return (numbers * (1.0 + 2.0**-16) + 1e-30).float()

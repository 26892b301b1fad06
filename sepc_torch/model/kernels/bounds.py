r"""How far a product of float16 numbers can be from the distance it stands for.

For screening a bank is rounded to float16, one scale to an ellipsoid, and points are too, so that tensor cores need one
product instead of three: with :math:`\hat R = R \operatorname{diag}(s) / u` and :math:`x = z / s`,

.. math:: \tilde d = u \,\| H \operatorname{fl}_{16}(x) - b \|, \quad H = \operatorname{fl}_{16}(\hat R),\
   b = \operatorname{fl}_{32}(\hat R c).

By the triangle inequality, and :math:`|\operatorname{fl}_{16}(x_i) - x_i| \le 2^{-11} |x_i|`,

.. math:: |\tilde d - d| \le u \bigl(\|H - \hat R\| + 2^{-11} \|H\| + \gamma \||H|\|\bigr) \|x\|
   + u \bigl(\|\hat R c - b\| + \gamma \|b\|\bigr) + \rho \tilde d

in spectral norms, with :math:`\gamma` for the rounding of sums and :math:`\rho` for that of squares and the root. The
second term also covers what the float32-accurate distance itself may be off, so that a decision which the bound leaves
no doubt about is the decision of that distance. Norms are computed in float64, once for a bank, and never too small.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sepc_torch.model.kernels.splitting import TOP, Split, power_of_two_above
from sepc_torch.shapes import Float

# Half a unit in the last place of float16, and of the least float16 numbers in units of the largest used.
_HALF_UNIT = 2.0**-11
_LEAST_UNIT = 2.0**-38
# Rounding of sums on tensor cores: four times float32's for every addition that can round, and as much again for the
# two other products of the accurate distance.
_SUM_UNIT = 3.0 * 2.0**-21
# Squarings of a matrix before its Frobenius norm: the bound exceeds the spectral norm by at most D^(1/128).
_SQUARINGS = 5


class Screen(NamedTuple):
    r"""A bank in float16 and the bound :math:`e = \mathtt{slope}\,\|x\| + \mathtt{offset} + \rho \tilde d`.

    ``matrix`` (K, P, P) holds :math:`H_{ji}` at [k, i, j], ``bias`` (K, P) is b, ``unit`` (K,) is u, ``relative`` is
    :math:`\rho`; features are in the units of the bank's :class:`~sepc_torch.model.kernels.splitting.Split`.
    """

    matrix: Tensor
    bias: Float[Tensor, "K P"]
    unit: Float[Tensor, "K"]
    slope: Float[Tensor, "K"]
    offset: Float[Tensor, "K"]
    relative: float


def screen(bank: Split) -> Screen:
    """Round a bank that was prepared for the accurate kernel, and bound what that changes."""
    # The triangular factor at [k, i, j], as the accurate kernel has it.
    r = (bank.high.double() + bank.low.double()) * bank.row_scale.double().unsqueeze(1)
    padded = r.shape[1]
    u = power_of_two_above(r.abs().amax(dim=(1, 2)).clamp_min(torch.finfo(torch.float32).tiny)) / TOP
    scaled = r / u[:, None, None]
    matrix = scaled.half()
    rounded = matrix.double()
    exact_bias = torch.einsum("kij,ki->kj", scaled, bank.centers.double())
    bias = exact_bias.float()
    size = spectral_bound(rounded)
    sums = (padded / 16 + 8) * _SUM_UNIT
    root = padded**0.5
    center = torch.linalg.vector_norm(bank.centers.double(), dim=1)
    terms = spectral_bound(rounded.abs())
    slope = spectral_bound(rounded - scaled) + (_HALF_UNIT + _LEAST_UNIT * root) * size + sums * terms
    offset = (
        # Squares below float32's range are lost from the norm of a point.
        2.0**-63 * root * slope
        + torch.linalg.vector_norm(exact_bias - bias.double(), dim=1)
        + _LEAST_UNIT * root * bank.reach * size
        + sums * (torch.linalg.vector_norm(exact_bias, dim=1) + terms * center)
    )
    return Screen(
        matrix=matrix.contiguous(),
        bias=bias.contiguous(),
        unit=u.float(),
        slope=_upwards(slope * u),
        offset=_upwards(offset * u),
        relative=(padded + 16) * 2.0**-23,
    )


def spectral_bound(matrix: Float[Tensor, "K P P"]) -> Float[Tensor, "K"]:
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


def _upwards(numbers: Float[Tensor, "K"]) -> Float[Tensor, "K"]:
    """In float32, by more than what rounding takes from the norms of points and from the bound's own arithmetic."""
    return (numbers * (1.0 + 2.0**-16) + 1e-30).float()

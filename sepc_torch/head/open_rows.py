"""Open rows: those whose rounded evidence could change with the error of densities from distances in float32.

Everything that a head returns depends on the densities only through two numbers, both rounded to grids: asinh of the
log odds of the label, and asinh of the largest log density. A row is *open* if the error could move one of them to
another grid point. The densities of open rows are computed again in float64, so that all values are those of densities
in float64. On CUDA there are no open rows, since kernels compute the densities that matter in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sepc_torch.head.densities import OpenTables, densities_again
from sepc_torch.head.evidence import LOG_STEP, ODDS_STEP, Measurements, log_odds
from sepc_torch.shapes import Bool, Float, Int


def settled(measured: Measurements, label: Int[Tensor, "B"], invalid: Bool[Tensor, "B"]) -> Measurements:
    """The measurements with the densities of open rows in float64; on a CPU, outside of graphs.

    Args:
        measured: The measurements; without tables of the regions they are returned as they are.
        label: The labels as indices into the classes.
        invalid: Rows with an invalid embedding, which are never open.
    """
    if not measured.regions:
        return measured
    tables, density = OpenTables(*measured.regions), measured.density
    rows = (open_rows(density, label, tables.error) & ~invalid).nonzero().squeeze(1)
    if len(rows):
        density = density.index_copy(0, rows, densities_again(tables, rows, density.shape[1]))
    return measured._replace(density=density, regions=[])


def open_rows(density: Float[Tensor, "B C"], label: Int[Tensor, "B"], error: Float[Tensor, "B C"]) -> Bool[Tensor, "B"]:
    r"""Whether a row is open, from its log densities and their largest errors.

    The error of the log of a sum is the mean of the errors of the logs of its terms. asinh has the slope
    :math:`1 / \sqrt{1 + x^2}`.

    >>> density = torch.tensor([[-1.0, -2.0], [-1.0, -1.0]], dtype=torch.float64)
    >>> open_rows(density, torch.tensor([0, 0]), torch.full((2, 2), 1e-6).double())
    tensor([False, False])
    >>> open_rows(density, torch.tensor([0, 0]), torch.full((2, 2), 1e-3).double())
    tensor([True, True])
    """
    index, top = label.unsqueeze(1), density.amax(dim=1, keepdim=True)
    share = density.scatter(1, index, -torch.inf).softmax(dim=1)
    of_odds = error.gather(1, index).squeeze(1) + (share * error).sum(dim=1)
    # A class whose log density is almost the largest could have the largest one.
    of_density = torch.where(density > top - 1.0, error, 0.0).amax(dim=1)
    numbers = torch.stack([log_odds(density, label), top.squeeze(1)])
    errors = torch.stack([of_odds, of_density])
    errors = errors / (1.0 + (numbers.abs() - errors).clamp_min(0.0).square()).sqrt()
    step = numbers.new_tensor([[ODDS_STEP], [LOG_STEP]])
    place = torch.asinh(numbers) / step + 0.5
    # NaN and infinity are not farther from an edge than the error.
    return ~((place - place.round()).abs() > errors / step).all(dim=0)

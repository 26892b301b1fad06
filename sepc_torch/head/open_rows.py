"""Open rows: those whose rounded evidence could change with the error of densities from distances in float32.

Everything that a head returns depends on the densities only through two numbers, both rounded to grids: asinh of the
log odds of the label, and asinh of the largest log density. A row is *open* if the error could move one of them to
another grid point. The densities of open rows are computed again in float64, so that all values are those of densities
in float64. The kernel of :mod:`sepc_torch.head.kernels.assess` does the same on CUDA.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sepc_torch.head.densities import densities_again
from sepc_torch.head.evidence import DENSITY_STEP, ODDS_STEP, Measurements, log_odds
from sepc_torch.head.kernels.tables import OpenTables
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
    rows = (open_rows(density, label, tables.accuracy) & ~invalid).nonzero().squeeze(1)
    if len(rows):
        density = density.index_copy(0, rows, densities_again(tables, rows, density.shape[1]))
    return measured._replace(density=density, regions=[])


def open_rows(
    density: Float[Tensor, "B C"], label: Int[Tensor, "B"], accuracy: Float[Tensor, "2"]
) -> Bool[Tensor, "B"]:
    r"""Whether a row is open, from its log densities.

    ``accuracy`` holds a and b: a log density l is off by less than :math:`a (b - l)`. The log densities of the label
    and of all others are at least the largest one minus the size of the odds. asinh has the slope
    :math:`1 / \sqrt{1 + x^2}`.

    >>> density = torch.tensor([[-1.0, -2.0], [-1.0, -1.0]], dtype=torch.float64)
    >>> open_rows(density, torch.tensor([0, 0]), torch.tensor([1e-6, 0.0]).double())
    tensor([False, False])
    >>> open_rows(density, torch.tensor([0, 0]), torch.tensor([1e-3, 0.0]).double())
    tensor([ True, False])
    """
    factor, top = accuracy.unbind()
    numbers = torch.stack([log_odds(density, label), density.amax(dim=1)])
    size = numbers.abs()
    of_density = factor * (top - numbers[1])
    error = torch.stack([2.0 * (of_density + factor * size[0]), of_density])
    error = error / (1.0 + (size - error).clamp_min(0.0).square()).sqrt()
    step = numbers.new_tensor([[ODDS_STEP], [DENSITY_STEP]])
    place = torch.asinh(numbers) / step + 0.5
    # NaN and infinity are not farther from an edge than the error.
    return ~((place - place.round()).abs() > error / step).all(dim=0)

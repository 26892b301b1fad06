"""All coordinates that a head takes of an embedding, as one operator on CUDA devices.

On other devices, and where gradients are wanted, :class:`~sepc_torch.head.reading.projection.Projection` and
:class:`~sepc_torch.head.evidence.shared_gaussian.SharedGaussian` compute them in plain torch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sepc_torch.head.kernels.tables import GaussianTables, LinearTables
from sepc_torch.model import torch_ops
from sepc_torch.model.kernels import possible
from sepc_torch.model.kernels.launch import has_float64_products, on_device


def supported(like: Tensor) -> bool:
    """Whether the operator can run on the device and in the dtype of a tensor."""
    return possible(like) and has_float64_products()


def _launch(z: Tensor, tables: list[Tensor], widths: list[int], gaussian: list[Tensor]) -> list[Tensor]:
    from sepc_torch.head.kernels.coordinates import project

    with on_device(z):
        return project(z, LinearTables(*tables), widths, GaussianTables(*gaussian) if gaussian else None)


def _shapes(z: Tensor, _tables: list[Tensor], widths: list[int], gaussian: list[Tensor]) -> list[Tensor]:
    found = [z.new_empty(z.shape[0], width) for width in widths]
    return [*found, z.new_empty(z.shape[0], dtype=torch.float64)] if gaussian else found


# Coordinates of one or two projections in float32 and, with Gaussian tables, squared distances in float64.
coordinates = torch_ops.operator(
    "coordinates(Tensor z, Tensor[] tables, int[] widths, Tensor[] gaussian) -> Tensor[]", _launch, _shapes
)


def fits(z: Tensor, tables: list[Tensor]) -> bool:
    """Whether the operator can take a batch: there are tables on its device, and nothing is to be differentiated."""
    if not tables or z.dtype != torch.float32 or z.device != tables[0].device:
        return False
    return not (torch.is_grad_enabled() and z.requires_grad)

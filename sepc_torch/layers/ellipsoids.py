"""The result :class:`RefittedEllipsoid` of a layer: ellipsoids as tensors, with distance, log-volume and overlap."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sepc_torch.shapes import Float

# Newton steps for the maximum over s. About 8 suffice; a step that leaves the bracket is replaced by a bisection.
_NEWTON_STEPS = 30


@dataclass(frozen=True, eq=False)
class RefittedEllipsoid:
    r"""Ellipsoids :math:`\{z : \|W (z - c)\| \le 1\}`, differentiable in the points that they were fitted to.

    The batch dimensions, none or one (B), are those of the layer's input. The whitener is upper triangular with
    positive diagonal, as everywhere in this package. All methods return the dtype of the fields, with autocast off.

    >>> e = RefittedEllipsoid(torch.zeros(2), 0.5 * torch.eye(2))
    >>> e.distance(torch.tensor([[3.0, 4.0]])), e.log_volume().exp()
    (tensor([2.5000]), tensor(4.))
    """

    center: Float[Tensor, "*batch D"]
    whitener: Float[Tensor, "*batch D D"]

    @property
    def dim(self) -> int:
        """Number of features D."""
        return self.center.shape[-1]

    def log_volume(self) -> Float[Tensor, "*batch"]:
        r"""Log-volume in units of the unit ball, :math:`-\log\det W`."""
        return -self.whitener.diagonal(dim1=-2, dim2=-1).log().sum(-1)

    def distance(self, z: Float[Tensor, "*points D"]) -> Float[Tensor, "*distances"]:
        r"""Mahalanobis distances :math:`\|W (z - c)\|` of points (P, D), or (B, P, D) with one set per ellipsoid.

        The result has shape (P,), or (B, P) for a batch of ellipsoids. 1 is the surface. The gradient at a centre is
        zero.
        """
        if z.ndim < 2 or z.ndim > self.center.ndim + 1 or z.shape[-1] != self.dim:
            wanted = f"(points, {self.dim})"
            if self.center.ndim == 2:
                wanted += f" or ({len(self.center)}, points, {self.dim})"
            raise ValueError(f"z must have shape {wanted}, got {tuple(z.shape)}.")
        with torch.autocast(self.center.device.type, enabled=False):
            offsets = z.to(self.center.dtype) - self.center.unsqueeze(-2)
            return torch.linalg.vector_norm(offsets @ self.whitener.mT, dim=-1)

    def overlap(self, other: RefittedEllipsoid) -> Float[Tensor, "*batch"]:
        r"""Overlap of the ellipsoids: 1 for a common centre, 0 if they touch, negative if they are apart.

        With shape matrices :math:`Q = (W^\top W)^{-1}` and :math:`v = c_2 - c_1` the overlap is

        .. math:: 1 - \max_{0 < s < 1} f(s), \quad f(s) = v^\top \Big(\frac{Q_1}{1-s} + \frac{Q_2}{s}\Big)^{-1} v,

        as in :func:`sepc_torch.ellipsoid.separation`. It is positive exactly if the interiors intersect. Scaled about
        their centres by the square root of the maximum, the ellipsoids touch. :math:`f` is concave with one maximum, so
        that the overlap is smooth in both ellipsoids. (At a common centre every s is a maximum, and the gradient is
        zero.) By the envelope theorem the maximising s counts as a constant for gradients. The computation is in
        float64 for every dtype: for ellipsoids of very different size, s is so near to 0 or 1 that float32 rounds it.

        >>> a, b = (RefittedEllipsoid(torch.tensor([x, 0.0]), torch.eye(2)) for x in (0.0, 2.0))
        >>> a.overlap(b), a.overlap(a)
        (tensor(0.), tensor(1.))
        """
        if other.dim != self.dim:
            raise ValueError(
                f"The ellipsoids have {self.dim} and {other.dim} dimensions; both must have the same number."
            )
        dtype = torch.promote_types(self.center.dtype, other.center.dtype)
        with torch.autocast(self.center.device.type, enabled=False):
            w1, w2 = self.whitener.double(), other.whitener.double()
            q = w1 @ (other.center.double() - self.center.double()).unsqueeze(-1)
            # In the coordinates in which the first ellipsoid is the unit ball, the second has the whitener X, and
            # f(s) = s (1 - s) |a|^2 with L a = X q, L L^T = s X X^T + (1 - s) I.
            x = torch.linalg.solve_triangular(w1, w2, upper=True, left=False)
            gram, image = x @ x.mT, x @ q
            s = _maximiser(gram.detach(), image.detach())[..., None, None]
            eye = torch.eye(self.dim, dtype=x.dtype, device=x.device)
            root = torch.linalg.cholesky(s * gram + (1 - s) * eye)
            a = torch.linalg.solve_triangular(root, image, upper=False)
            return (1 - (s * (1 - s) * a.square()).sum((-2, -1))).to(dtype)


def _maximiser(gram: Float[Tensor, "*batch D D"], image: Float[Tensor, "*batch D 1"]) -> Float[Tensor, "*batch"]:
    r"""The s that maximises :math:`f(s) = s (1 - s) \sum_i p_i^2 / (s \sigma_i + 1 - s)`.

    Here :math:`\sigma` are the eigenvalues of the Gram matrix and p the image in its eigenvectors.
    """
    sigma, basis = torch.linalg.eigh(gram)
    p2 = (basis.mT @ image).squeeze(-1).square()
    s = torch.full_like(p2[..., 0], 0.5)
    low, high = torch.zeros_like(s), torch.ones_like(s)
    for _ in range(_NEWTON_STEPS):
        t = s.unsqueeze(-1)
        denominator = t * sigma + (1 - t)
        slope = (p2 * ((1 - t) ** 2 - t * t * sigma) / denominator**2).sum(-1)
        curvature = -2 * (p2 * sigma / denominator**3).sum(-1)
        low, high = torch.where(slope > 0, s, low), torch.where(slope > 0, high, s)
        newton = s - slope / curvature
        s = torch.where((newton > low) & (newton < high), newton, 0.5 * (low + high))
    # With a common centre f is zero for every s.
    return torch.where(p2.sum(-1) > 0, s, torch.full_like(s, 0.5))

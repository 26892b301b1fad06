"""Checks of a head's kernels on the CPU, run by test_kernels.py in a process with TRITON_INTERPRET=1.

TRITON_INTERPRET=1 python tests/head_kernels_in_the_interpreter.py 7
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
from odd_classes import hard_points, odd_classes
from triton.runtime import interpreter

from sepc_torch import TrustHead
from sepc_torch.head.calibration import assess
from sepc_torch.head.evidence.densities import RegionDensities, fit_densities
from sepc_torch.head.evidence.evidence import log_odds
from sepc_torch.head.evidence.neighbours import as_half
from sepc_torch.head.evidence.shared_gaussian import SharedGaussian
from sepc_torch.head.kernels import mixtures
from sepc_torch.head.kernels.assess import assess_on_cuda
from sepc_torch.head.kernels.coordinates import mean_of_positions, project
from sepc_torch.head.kernels.labels import largest_logits, mask_missing
from sepc_torch.head.kernels.mixtures import log_densities
from sepc_torch.head.kernels.search import nearest_into
from sepc_torch.head.kernels.tables import (
    Affine,
    GaussianTables,
    RegionTables,
    SearchTables,
    WideRegions,
    distinct_points,
    linear_tables,
    search_tables,
)
from sepc_torch.head.reading.projection import fit_projection
from sepc_torch.model.kernels import split
from sepc_torch.model.kernels.rounded_ellipsoids import rounded
from sepc_torch.model.kernels.tables import upper_triangular
from sepc_torch.model.queries import rows_without_prediction

Rng = np.random.Generator


def count_by_tensors() -> None:
    """Let the interpreter use a loaded number as the bound of a loop: NumPy 2.4 no longer converts arrays of one."""
    plain = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        plain(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


def check_search(rng: Rng) -> None:
    """The nearest point of every class and its distance, for large and small classes, one and several blocks."""
    for sizes, dim, rows in (((70, 1, 200), 7, 5), ((3, 1, 20, 2), 70, 3), ((40,), 16, 2)):
        codes = np.repeat(np.arange(len(sizes)), sizes)
        points = torch.from_numpy(rng.normal(size=(len(codes), dim))).float()
        z = torch.from_numpy(rng.normal(size=(rows, dim))).float()
        z[0] = points[-1]
        origin = torch.from_numpy(rng.normal(size=dim)).float()
        ends = np.cumsum(sizes).tolist()
        distance, index = torch.empty(rows, len(sizes)), torch.empty(rows, len(sizes), dtype=torch.int64)
        nearest_into(z + origin, origin, points, tables_of(points, ends), distance, index)
        z = z + origin - origin  # rounded as in the kernel
        apart = torch.cdist(z.double(), points.double())
        for c, (first, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
            least = apart[:, first:end].amin(dim=1)
            assert ((index[:, c] >= first) & (index[:, c] < end)).all()
            found = apart.gather(1, index[:, c : c + 1]).squeeze(1)
            assert torch.allclose(distance[:, c].double(), found, rtol=1e-6, atol=1e-6)
            assert torch.allclose(found, least, rtol=1e-12)
        check_labelled(z + origin, origin, points, ends, distance, torch.arange(rows) % len(sizes))
        if sizes == (40,):
            check_half_search(points, z, codes)
    zero = torch.zeros(dim)
    for size in (1e-25, 1.0, 1e15):
        some, small = size * points, size * torch.stack([0.0 * z[0], 1e-14 * z[0]])
        nearest_into(small, zero, some, tables_of(some, ends), distance, index)
        assert torch.allclose(distance[:, 0].double(), some.double().norm(dim=1).amin().expand(2), rtol=1e-6)
    z[1, 2] = torch.nan
    nearest_into(z, zero, points, tables_of(points, ends), distance, index)
    assert distance[1].isnan().all()
    assert ((index >= 0) & (index < len(points))).all()
    check_invalid_rows(points)


def check_invalid_rows(points: torch.Tensor) -> None:
    """A row of NaN or infinity is assigned a point of every class."""
    ends = [10, 11, 30]
    z = points[:4].clone()
    z[0], z[1, 0], z[2, 1] = torch.inf, torch.nan, -torch.inf
    distance, index = torch.empty(4, 3), torch.empty(4, 3, dtype=torch.int64)
    nearest_into(z, torch.zeros(z.shape[1]), points[:30], tables_of(points[:30], ends), distance, index)
    assert torch.equal(torch.bucketize(index, torch.tensor(ends), right=True), torch.arange(3).expand(4, -1))
    assert not distance[:3].isfinite().any()


def tables_of(points: torch.Tensor, ends: list[int], pairs: bool = True) -> SearchTables:
    return search_tables(points, *distinct_points(points, ends), pairs=pairs)


def check_close_points(rng: Rng) -> None:
    """The nearest of points whose distances to a row differ by less than products with pairs of float16 can tell."""
    for sizes, dim in (((700, 90), 20), ((20, 3, 5), 70)):
        total, ends = sum(sizes), np.cumsum(sizes).tolist()
        z = torch.from_numpy(rng.normal(size=(3, dim))).float()
        steps = rng.normal(size=(total, dim))
        steps *= (0.5 + 1e-7 * rng.random((total, 1))) / np.linalg.norm(steps, axis=1, keepdims=True)
        points = z[1] + torch.from_numpy(steps).float()
        points[5] = points[0]
        distance, index = torch.empty(3, len(sizes)), torch.empty(3, len(sizes), dtype=torch.int64)
        nearest_into(z, torch.zeros(dim), points, tables_of(points, ends), distance, index)
        for c, (first, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
            apart = (points[None, first:end].double() - z[:, None].double()).square().sum(dim=2)
            assert torch.equal(index[:, c], first + apart.argmin(dim=1))
            assert torch.equal(distance[:, c], apart.amin(dim=1).sqrt().float())
        label = torch.tensor([1, 0, -1])
        check_labelled(z, torch.zeros(dim), points, ends, distance, label)


def check_labelled(
    z: torch.Tensor,
    origin: torch.Tensor,
    points: torch.Tensor,
    ends: list[int],
    distance: torch.Tensor,
    label: torch.Tensor,
) -> None:
    """With labels, the distances to the label's class and to the nearest other class are those of the whole search."""
    found = torch.empty_like(distance)
    nearest_into(z, origin, points, tables_of(points, ends), found, torch.empty(found.shape).long(), label)
    own = torch.nn.functional.one_hot(label.clamp_min(0), len(ends)).bool()
    other = distance.masked_fill(own, torch.inf).amin(dim=1, keepdim=True)
    assert torch.equal(found, torch.where(own, distance, other))


def check_half_search(points: torch.Tensor, z: torch.Tensor, codes: np.ndarray) -> None:
    """Points with the digits of float16 are searched exactly with one product."""
    some, origin = as_half(points), points.mean(dim=0)
    tables = tables_of(some, [len(codes)], pairs=False)
    distance, index = torch.empty(len(z), 1), torch.empty(len(z), 1, dtype=torch.int64)
    nearest_into(z, origin, some, tables, distance, index)
    rows = as_half(z - origin)
    apart = (rows.double()[:, None] - some.double()).square().sum(dim=2)
    least, nearest = apart.sqrt().min(dim=1)
    assert tables.low.numel() == 0
    assert not torch.equal(rows, z - origin)
    assert torch.equal(index[:, 0], nearest)
    assert torch.equal(distance[:, 0], least.float())


def head_of(rng: Rng, **options: int) -> tuple[TrustHead, torch.Tensor, torch.Tensor]:
    labels = np.arange(240) % 3
    x = rng.normal(size=(240, 5)) + 2.0 * np.eye(3, 5)[labels]
    head = TrustHead.fit(x, labels, dim=3, nan_policy="flag", **options)  # type: ignore[arg-type]
    held, logits = rng.normal(size=(120, 5)) + 2.0 * np.eye(3, 5)[labels[:120]], rng.normal(size=(120, 3))
    head.calibrate(held, labels[:120], logits)
    z = torch.from_numpy(rng.normal(size=(7, 5)) * 3.0).float()
    return head, z, torch.from_numpy(4.0 * rng.normal(size=(7, 3)))


def check_coordinates(rng: Rng) -> None:
    """Projections and the distance to the nearest mean equal those of plain torch, also of invalid rows."""
    for dim, features, classes, normalize in ((3, 5, 3, None), (3, 5, 3, "polar"), (40, 70, 20, "l2")):
        codes = np.arange(600) % classes
        x = rng.normal(size=(600, features)) * np.linspace(1.0, 3.0, features) + np.eye(classes, features)[codes]
        polar = fit_projection(x, codes, dim, normalize, "pca")  # type: ignore[arg-type]
        white = fit_projection(x, codes, features, None, "pca")
        gaussian = SharedGaussian(
            torch.from_numpy(rng.normal(size=(dim, dim))).float(),
            torch.from_numpy(rng.normal(size=(classes, dim))).float(),
            1.0 / polar.matrix.norm(dim=1),
            torch.tensor(0.5),
        )
        z = torch.from_numpy(rng.normal(size=(6, features))).float()
        z[1], z[2, 0], z[3], z[4] = 0.0, torch.nan, 1e30, 1e-30
        first = polar.affine()._replace(scale=gaussian.deviations)
        third = Affine(first.lengths, first.shift, gaussian.whitener.double() @ first.matrix, first.scale)
        tables = linear_tables([(0, first), (1, white.affine()), (2, third)], features, polar.least())
        means = GaussianTables(gaussian.means.double(), gaussian.outside.double().reshape(1))
        found = project(z, tables, [dim, features], means)
        coordinates, square = polar.with_square(z)
        expected = coordinates.float(), white(z), gaussian(coordinates, square)
        for one, other in zip(found, expected, strict=True):
            assert torch.allclose(one, other, rtol=1e-6, atol=1e-6, equal_nan=True), (one, other)
        alone = project(z, linear_tables([(0, polar.affine())], features, polar.least()), [dim], None)
        assert torch.equal(alone[0].nan_to_num(), found[0].nan_to_num())


def check_means_of_positions(rng: Rng) -> None:
    """Means over positions equal those of plain torch in every layout, with NaN where there is one.

    The interpreter cuts numbers off when it makes bfloat16 of them; the GPU's tests have that dtype.
    """
    for shape in ((3, 5, 7), (2, 70, 130), (1, 16, 64), (0, 4, 9)):
        for dtype in (torch.float32, torch.float16):
            x = torch.from_numpy(100.0 * rng.normal(size=shape)).to(dtype)
            x[:1, :1, :1] = torch.nan
            expected = x.mean(dim=2, dtype=torch.float64).to(dtype)
            strided = torch.zeros(*shape[:2], 2 * shape[2], dtype=dtype)[..., ::2]
            for given in (x, x.transpose(1, 2).contiguous().transpose(1, 2), strided.copy_(x)):
                assert torch.equal(mean_of_positions(given).nan_to_num(), expected.nan_to_num()), (shape, dtype)


def kernel_densities(model: RegionDensities, z: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """The densities of the kernels, with tables as on a CUDA device."""
    bank = split(model.bank.offsets, model.bank.whiteners)
    starts = torch.nn.functional.pad(torch.bincount(model.codes).cumsum(0), (1, 0))
    tables = RegionTables(model.codes.argsort(stable=True).int(), starts.int(), *model.mixture[:2])
    origin, offsets, whiteners = model.wide
    wide = WideRegions(model.codes.int(), origin, offsets, upper_triangular(whiteners))
    return log_densities(z, label, model.bank.origin, bank, rounded(bank), tables, wide)


def check_same_odds(model: RegionDensities, z: torch.Tensor, label: torch.Tensor, name: str = "") -> float:
    """The log odds of labels and the largest density are those of plain torch; return the share of classes left out."""
    found, exact = kernel_densities(model, z, label), model(z)
    index = label.clamp_min(0)
    for one, other in ((found.amax(dim=1), exact.amax(dim=1)), (log_odds(found, index), log_odds(exact, index))):
        assert torch.allclose(one, other, rtol=1e-10, atol=1e-10, equal_nan=True), (name, one - other)
    kept = found > -torch.inf
    # Densities that are not left out lack at most what was left out of the largest one of their class.
    assert torch.allclose(found[kept], exact[kept], rtol=1e-2, atol=1e-2), name
    return 1.0 - float(kept.double().mean())


def check_densities(rng: Rng) -> None:
    """The densities that matter to a label are those of plain torch, in small and large tiles."""
    head, _, _ = head_of(rng)
    assert head.evidence is not None
    model = head.evidence.densities
    z = torch.from_numpy(rng.normal(size=(300, 5)) * 10.0 ** rng.uniform(-2.0, 2.0, size=(300, 1))).float()
    points = head.evidence.polar(z)
    points[2, 1] = torch.nan
    points[3:9] *= 1e6
    label = torch.from_numpy(rng.integers(-1, 3, size=300))
    assert check_same_odds(model, points[:7], label[:7]) < 1.0
    mixtures._MANY_ROWS = 1
    check_same_odds(model, points, label)
    whole = kernel_densities(model, points, label)
    mixtures._MANY_ROWS = 2**13
    assert whole[2].isnan().all()
    assert torch.equal(whole[:40].nan_to_num(9.0), kernel_densities(model, points[:40], label[:40]).nan_to_num(9.0))


def check_densities_of_odd_classes(rng: Rng) -> None:
    """The same for classes that are small, or thin in some directions, for points of them and hard ones near them."""
    left_out = []
    for name, points, codes in odd_classes(rng):
        model, _ = fit_densities(points, codes, np.full(len(codes), -1))
        z = torch.from_numpy(points[rng.permutation(len(codes))[:64]]).float()
        z[:32] += 3e-4 * torch.from_numpy(rng.normal(size=(32, z.shape[1]))).float()
        _, offsets, whiteners = model.wide
        z = torch.cat([z, torch.from_numpy(hard_points(rng, offsets[0].numpy(), whiteners[0].numpy(), 64)).float()])
        label = torch.from_numpy(rng.integers(model.classes, size=len(z)))
        left_out.append(check_same_odds(model, z, label, name))
    assert max(left_out) > 0.3, left_out


def check_assess(rng: Rng) -> None:
    """Calibrated values equal those of plain torch to float64's accuracy, also of refused rows and odd logits."""
    for options in ({}, {"reference_points": 0}):
        head, z, logits = head_of(rng, **options)
        assert head.evidence is not None
        assert head.calibration is not None
        z[5] = 1e4
        measured = head.evidence.measure(z)
        measured.density[4] = torch.nan
        logits[1, 0], logits[2, 1], logits[3] = -torch.inf, torch.inf, torch.nan
        label = torch.tensor([0, 1, 1, -1, 0, 2, 1])
        invalid = torch.tensor([False] * 6 + [True])
        for labels, given in ((head.calibration.network, [logits.float()]), (head.calibration.own, [])):
            for least in (torch.tensor(0.3).double(), torch.linspace(0.0, 1.0, 7).double()):
                near, white = ([] if part is None else [part] for part in (measured.near, measured.white))
                rows = near, white, measured.mahalanobis, given, label, invalid, least
                assert labels.plain is not None
                expected, accepted = assess.assess_plainly(measured.density, *rows, labels.plain.tensors())
                columns, accept = assess_on_cuda(measured.density, *rows, labels.tables())
                assert torch.allclose(columns, expected, rtol=1e-11, atol=1e-12, equal_nan=True), columns - expected
                assert torch.equal(accept, accepted)


def check_labels(rng: Rng) -> None:
    """The largest logit and rows without a label are those of plain torch, also of many classes and odd logits."""
    odd = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0])
    for classes, dtype in ((1, torch.float32), (3, torch.float64), (150, torch.float16)):
        logits = torch.from_numpy(rng.normal(size=(classes, 40))).to(dtype).T
        logits[:20] = odd.to(dtype)[torch.from_numpy(rng.integers(4, size=(20, classes)))]
        logits[20], logits[21], logits[22, -1] = -torch.inf, torch.inf, torch.inf
        logits[23], logits[24:30, -1], logits[30:34] = 0.0, logits[24:30].amax(dim=1), logits[30:34].round()
        label, missing = largest_logits(logits)
        assert torch.equal(missing, rows_without_prediction(logits))
        assert torch.equal(label[~missing], logits.argmax(dim=1)[~missing])
        assert ((label >= 0) & (label < classes)).all()
        numbers = torch.from_numpy(rng.normal(size=(2, 40))).float()
        masked = mask_missing(label, numbers[0], numbers[1], missing)
        assert torch.equal(masked[0], torch.where(missing, -1, label))
        assert torch.equal(masked[1], torch.where(missing, 0.0, numbers[0]))
        assert torch.equal(masked[2].nan_to_num(9.0), torch.where(missing, 9.0, numbers[1]))


if __name__ == "__main__":
    count_by_tensors()
    generator = np.random.default_rng(int(sys.argv[1]))
    with torch.no_grad():
        for check in (
            check_search,
            check_close_points,
            check_coordinates,
            check_means_of_positions,
            check_densities,
            check_densities_of_odd_classes,
            check_assess,
            check_labels,
        ):
            check(generator)
    sys.stdout.write("right\n")

"""``EllipsoidLoss``: its value and gradient, small and flat classes, mixed precision, and a training step."""

from __future__ import annotations

import copy
import pickle
import time
import warnings

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from sepc_torch import EllipsoidLoss, minimum_volume_ellipsoid

Rng = np.random.Generator


def batch(rng: Rng, classes: int = 3, each: int = 30, dim: int = 4, apart: float = 1.0) -> tuple[Tensor, Tensor]:
    labels = np.repeat(np.arange(classes), each)
    z = rng.normal(size=(len(labels), dim)) + apart * rng.normal(size=(classes, dim))[labels]
    order = rng.permutation(len(labels))
    return torch.from_numpy(z[order]), torch.from_numpy(labels[order])


def test_equals_the_formula(rng: Rng) -> None:
    """Against the offline solver, class by class."""
    z, y = batch(rng)
    whole = minimum_volume_ellipsoid(z.numpy(), tol=1e-10)
    volume, intrusion = [], []
    for k in range(3):
        e = minimum_volume_ellipsoid(z[y == k].numpy(), tol=1e-10)
        volume.append((e.log_volume - whole.log_volume) / 4)
        intrusion.append(np.maximum(0.0, 1.2**2 - e.distance(z[y != k].numpy()) ** 2).mean())
    loss = EllipsoidLoss(3, 4, volume=0.3, margin=1.2)
    terms = loss.terms(z, y)
    assert float(terms.volume) == pytest.approx(np.mean(volume), abs=1e-6)
    assert float(terms.intrusion) == pytest.approx(np.mean(intrusion), abs=1e-6)
    assert float(loss(z, y)) == pytest.approx(0.3 * np.mean(volume) + np.mean(intrusion), abs=1e-6)


def test_does_not_change_with_the_scale_of_the_embedding(rng: Rng) -> None:
    """An encoder must not lower the loss by shrinking its embeddings."""
    z, y = batch(rng)
    loss = EllipsoidLoss(3, 4)
    for scale in (0.1, 10.0):
        assert float(loss(scale * z + 5.0, y)) == pytest.approx(float(loss(z, y)), rel=1e-9)


def test_gradcheck(rng: Rng) -> None:
    z, y = batch(rng, classes=2, each=12, dim=2)
    loss = EllipsoidLoss(2, 2, smoothing=1e-3)
    assert torch.autograd.gradcheck(lambda z: loss(z, y), z.requires_grad_(), eps=1e-6, atol=1e-6, fast_mode=True)


def test_a_step_lowers_it_and_a_detached_refit_moves_only_others(rng: Rng) -> None:
    z, y = batch(rng)
    for through in (True, False):
        loss = EllipsoidLoss(3, 4, through_refit=through, smoothing=1e-3)
        x = z.clone().requires_grad_()
        before = loss(x, y)
        (grad,) = torch.autograd.grad(before, x)
        assert (grad != 0).any()
        if through:
            assert float(loss(z - 1e-4 * grad, y)) < before.item()
    far = z + 1e3 * torch.eye(3, 4, dtype=torch.float64)[y]
    x = far.clone().requires_grad_()
    EllipsoidLoss(3, 4, through_refit=False)(x, y).backward()
    assert x.grad is not None
    assert (x.grad == 0).all()  # no point is within the margin of another class, and volumes are constants


def test_does_not_change_with_the_order_of_the_batch(rng: Rng) -> None:
    z, y = batch(rng)
    order = torch.from_numpy(rng.permutation(len(y)))
    loss = EllipsoidLoss(3, 4)
    assert float(loss(z[order], y[order])) == pytest.approx(float(loss(z, y)), rel=1e-9)


def test_small_classes_are_left_out_with_one_warning(rng: Rng) -> None:
    z, y = batch(rng)
    keep = (y != 1) | (torch.cumsum(y == 1, 0) <= 4)
    loss = EllipsoidLoss(4, 4)
    with pytest.warns(
        UserWarning, match=r"at least 5 points; the batch of 64 holds too few of the classes 1 \(4\), 3 \(0\)"
    ):
        left = loss.terms(z[keep], y[keep])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = loss.terms(z[keep], y[keep])
    assert torch.equal(left.volume, again.volume)
    x = z[:3].clone().requires_grad_()
    with pytest.warns(UserWarning, match="too few of the classes"):
        nothing = loss(x, y[:3])
    nothing.backward()
    assert nothing.item() == 0.0
    assert x.grad is not None
    assert (x.grad == 0).all()


def test_a_flat_class_is_an_error_only_without_a_floor(rng: Rng) -> None:
    z, y = batch(rng)
    z[y == 2, 1] = 0.5
    x = z.requires_grad_()
    EllipsoidLoss(3, 4)(x, y).backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    with pytest.raises(ValueError, match="do not span all 4 dimensions"):
        EllipsoidLoss(3, 4, floor=0.0)(z, y)


def test_small_embeddings_take_no_longer_than_others(rng: Rng) -> None:
    """Far below the floor every ellipsoid is a ball, which needs no solve with all 4000 points."""
    z = torch.from_numpy(1e-5 * rng.normal(size=(4000, 8))).requires_grad_()
    loss = EllipsoidLoss(2, 8)
    began = time.perf_counter()
    value = loss(z, torch.arange(4000) % 2)
    value.backward()
    assert time.perf_counter() - began < 3
    assert z.grad is not None
    assert z.grad.isfinite().all()
    assert float(loss.terms(z, torch.arange(4000) % 2).volume) == 0.0  # every class has the volume of the whole


def test_the_backends_agree(rng: Rng) -> None:
    z, y = batch(rng, classes=2, each=15, dim=2)
    native, other = (EllipsoidLoss(2, 2, backend=backend)(z, y) for backend in ("native", "cvxpylayers"))
    assert float(other) == pytest.approx(float(native), abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_training_step_in_mixed_precision(rng: Rng, dtype: torch.dtype) -> None:
    z, y = batch(rng, dim=6)
    encoder = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))
    loss = EllipsoidLoss(3, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        embedding = encoder(z.float())
        assert embedding.dtype == dtype
        value = loss(embedding, y)
    assert value.dtype == torch.float32
    value.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in encoder.parameters())


def test_carries_no_state(rng: Rng) -> None:
    z, y = batch(rng)
    loss = EllipsoidLoss(3, 4)
    assert not loss.state_dict()
    for other in (copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))):
        assert torch.equal(other(z, y), loss(z, y))


def test_refuses_bad_input(rng: Rng) -> None:
    z, y = batch(rng)
    loss = EllipsoidLoss(3, 4)
    with pytest.raises(ValueError, match="Labels must lie between 0 and 2, got 0 to 3"):
        loss(z, torch.where(y == 2, 3, y))
    with pytest.raises(ValueError, match=r"shape \(N, 4\) and labels \(N,\), got \(90, 3\) and \(90,\)"):
        loss(z[:, :3], y)
    for labels in (y.double(), y > 0):
        with pytest.raises(TypeError, match=r"integers from 0 to 2, got torch\.(float64|bool); .*labels\.long\(\)"):
            loss._check(z, labels)
    for few in (90, 3):  # with too few points for any ellipsoid, too
        with pytest.raises(ValueError, match="embeddings hold NaN or infinity"):
            loss(torch.full_like(z[:few], torch.nan), y[:few])
    with pytest.raises(ValueError, match="margin must be a finite number of at least 0"):
        EllipsoidLoss(3, 4, margin=-1.0)
    with pytest.raises(ValueError, match=r"floor=0\.1 needs backend='native'"):
        EllipsoidLoss(3, 4, floor=0.1, backend="cvxpylayers")


@pytest.mark.gpu
def test_on_cuda(rng: Rng) -> None:
    z, y = batch(rng)
    loss = EllipsoidLoss(3, 4)
    x = z.cuda().requires_grad_()
    value = loss(x, y.cuda())
    value.backward()
    assert value.is_cuda
    assert value.item() == pytest.approx(float(loss(z, y)), rel=1e-8)
    assert x.grad is not None
    assert x.grad.isfinite().all()

"""Subsets of samples that depend on their ids only, so they are equal in every process, run and epoch."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from sepc_torch.shapes import Bool, Int


def hash_ids(ids: Int[Tensor, "n"]) -> Int[Tensor, "n"]:
    """Pseudo-random hash of ids: the finaliser of SplitMix64, in arithmetic modulo 2**64.

    The samples with the lowest hashes are a random subset that does not depend on the number of processes.

    >>> len(hash_ids(torch.arange(1000)).unique())
    1000
    """
    x = ids.to(torch.int64) + -7046029254386353131
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def id_numbers(ids: Sequence[int | str]) -> Int[Tensor, "n"]:
    """Integer of each id: itself, or 64 bits of a cryptographic hash of text, equal on every machine.

    >>> id_numbers([7, 8]).tolist(), id_numbers(["a.png"]).tolist() == id_numbers(["a.png"]).tolist()
    ([7, 8], True)
    """
    numbers = [
        int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big", signed=True)
        if isinstance(name, str)
        else name
        for name in ids
    ]
    return torch.tensor(numbers, dtype=torch.int64)


def calibration_half(numbers: Int[Tensor, "n"]) -> Bool[Tensor, "n"]:
    """Mask of about half of the samples, by a bit of the hash of their numbers (:func:`id_numbers`).

    >>> 450 < int(calibration_half(torch.arange(1000)).sum()) < 550
    True
    """
    return hash_ids(numbers) < 0


def sample_per_class(ids: Int[Tensor, "n"], labels: Int[Tensor, "n"], limit: int | None) -> Bool[Tensor, "n"]:
    """Mask of at most ``limit`` samples per class, a pseudo-random subset that depends on ids and labels only.

    >>> sample_per_class(torch.arange(6), torch.tensor([0, 0, 0, 0, 1, 1]), 2).sum()
    tensor(4)
    """
    keep = torch.ones(len(ids), dtype=torch.bool)
    if limit is None:
        return keep
    hashes = hash_ids(ids)
    for label in labels.unique().tolist():
        here = (labels == label).nonzero().squeeze(1)
        keep[here[hashes[here].argsort(stable=True)[limit:]]] = False
    return keep


def random_subset(ids: Int[Tensor, "n"], limit: int | None, seed: int = 0) -> Int[Tensor, "m"]:
    """Positions of at most ``limit`` samples, ascending: a pseudo-random subset that depends on ids and seed.

    >>> len(random_subset(torch.arange(9), 4)), random_subset(torch.arange(3), None).tolist()
    (4, [0, 1, 2])
    """
    if limit is None or len(ids) <= limit:
        return torch.arange(len(ids))
    return hash_ids(ids + hash_ids(torch.tensor([seed]))).argsort(stable=True)[:limit].sort().values

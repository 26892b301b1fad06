"""Shared fixtures: shape checks at every call, fresh but repeatable random inputs, data sets, skipping of GPU tests."""

from __future__ import annotations

import os
import secrets
import shlex
import zlib
from collections.abc import Generator
from pathlib import Path

import numpy as np
import pytest

try:
    import beartype  # noqa: F401 - named below
    import jaxtyping
except ImportError:  # a machine that only has what a frozen model needs can still run the tests of that
    pass
else:
    # Before the package is first imported: from here on every call checks its shape annotations.
    jaxtyping.install_import_hook("sepc_torch", "beartype.beartype")

_SEED = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--seed", type=int, default=None, help="repeat a run: the seed it printed (default: a fresh one every time)"
    )

    parser.addoption(
        "--slow-share", type=float, default=1.0, help="run only this share of the slow tests, chosen by the seed"
    )


def pytest_configure(config: pytest.Config) -> None:
    chosen: int | None = config.getoption("--seed")
    config.stash[_SEED] = secrets.randbelow(2**32) if chosen is None else chosen
    config.option.seed = config.stash[_SEED]  # the worker processes of pytest-xdist inherit the options


def pytest_report_header(config: pytest.Config) -> str:
    return f"random inputs: --seed {config.stash[_SEED]}"


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Random inputs, different in every run and every test; the seed of a failing run repeats them.

    The test's own name is mixed in, so that a test draws the same inputs whether it runs alone or with the others.
    """
    return np.random.default_rng([request.config.stash[_SEED], zlib.crc32(request.node.nodeid.encode())])


@pytest.fixture(scope="module")
def module_rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Random inputs for a fixture that all tests of a module share."""
    return np.random.default_rng([request.config.stash[_SEED], zlib.crc32(request.node.nodeid.encode())])


@pytest.fixture
def seeded() -> None:
    """The same weights and batches in every run, for tests that train a network and do not test randomness."""
    import torch

    torch.manual_seed(1)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and {"rng", "module_rng"} & set(getattr(item, "fixturenames", ())):
        again = f"pytest {shlex.quote(item.nodeid)} --seed {item.config.stash[_SEED]}"
        report.sections.append(("Random inputs", f"repeat with: {again}"))
    return report


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of public data sets, named by the environment variable SEPC_DATA."""
    folder = os.environ.get("SEPC_DATA")
    if not folder:
        pytest.skip("SEPC_DATA is not set: name the folder that holds the public data sets to run this test")
    path = Path(folder)
    if not path.is_dir():
        pytest.fail(f"SEPC_DATA names {folder!r}, which is not a folder", pytrace=False)
    return path


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    share = config.getoption("--slow-share")

    def kept(item: pytest.Item) -> bool:
        chance = zlib.crc32(f"{config.stash[_SEED]} {item.nodeid}".encode()) / 2**32
        return chance < share or item.get_closest_marker("slow") is None

    left_out = [item for item in items if not kept(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if kept(item)]
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))

"""Settings of the whole process: several threads change them at once, and nothing stays changed."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from threadpoolctl import ThreadpoolController

from sepc_torch import MVELayer
from sepc_torch.data.shared_setting import SharedSetting
from sepc_torch.partitioning.processes import one_thread
from sepc_torch.solvers.d_optimal import Design
from sepc_torch.solvers.programs import solve


def enter_and_leave_in_order(context: Callable[[], AbstractContextManager[Any]], look: Callable[[], Any]) -> list[Any]:
    """Two threads: the first enters, the second enters, the first leaves, the second leaves; a look after each step."""
    leave = [threading.Event(), threading.Event()]
    entered = [threading.Event(), threading.Event()]

    def work(i: int) -> None:
        with context():
            entered[i].set()
            leave[i].wait()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    seen = []
    for thread, event in zip(threads, entered, strict=True):
        thread.start()
        event.wait()
        seen.append(look())
    for thread, event in zip(threads, leave, strict=True):
        event.set()
        thread.join()
        seen.append(look())
    return seen


def blas_threads() -> list[int]:
    return [library.num_threads for library in ThreadpoolController().select(user_api="blas").lib_controllers]


def set_blas_threads(numbers: list[int]) -> None:
    """Set the numbers in a thread that ends; threadpoolctl 3.8 ignores other threads while this one lives."""

    def work() -> None:
        for library, number in zip(
            ThreadpoolController().select(user_api="blas").lib_controllers, numbers, strict=True
        ):
            library.set_num_threads(number)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


@pytest.fixture
def two_blas_threads() -> Iterator[list[int]]:
    """Two threads for each BLAS library that can have them: one is the default of a machine with one core."""
    before = blas_threads()
    set_blas_threads([2] * len(before))
    yield blas_threads()
    set_blas_threads(before)


def test_partitions_in_threads_leave_blas_as_it_was(two_blas_threads: list[int]) -> None:
    assert 2 in two_blas_threads
    one = [1] * len(two_blas_threads)
    assert enter_and_leave_in_order(one_thread, blas_threads) == [one, one, one, two_blas_threads]


def test_a_layer_solves_small_sets_with_one_thread(
    two_blas_threads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    refine = Design.refine

    def watched(self: Design, gap: float) -> None:
        seen.append(blas_threads())
        refine(self, gap)

    monkeypatch.setattr(Design, "refine", watched)
    MVELayer(30, 3)(torch.randn(2, 30, 3, dtype=torch.float64))
    assert seen
    assert {number for numbers in seen for number in numbers} == {1}
    assert blas_threads() == two_blas_threads


def test_solvers_in_threads_leave_the_warning_filters_as_they_were() -> None:
    before = list(warnings.filters)
    seen = enter_and_leave_in_order(lambda: solve._WITHOUT_WARNINGS, lambda: list(warnings.filters))
    assert all(filters[0][0] == "ignore" for filters in seen[:3])
    assert seen[3] == before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_process_restores_the_setting_of_a_thread_that_it_does_not_have() -> None:
    changed = []

    @contextmanager
    def change() -> Iterator[None]:
        changed.append(True)
        yield
        changed.clear()

    setting = SharedSetting(change)
    with setting._lock:  # held by another thread at the moment of the fork
        child = os.fork()
        if child == 0:
            os._exit(0 if not setting._lock.locked() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    entered, leave = threading.Event(), threading.Event()

    def work() -> None:
        with setting:
            entered.set()
            leave.wait()

    thread = threading.Thread(target=work)
    thread.start()
    entered.wait()
    child = os.fork()
    if child == 0:
        before = list(changed)
        with setting:
            inside = list(changed)
        os._exit(0 if (before, inside, changed) == ([], [True], []) else 1)
    leave.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert changed == []

"""The compiled cases: a pool of processes starts on all collected ones at once, and tests take theirs as they come.

Kernels are compiled afresh in every session, into a cache folder of its own.
"""

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path

import pytest

from tests.compile import worker
from tests.compile.assembly import Assembly
from tests.compile.cases import Case
from tests.compile.target_names import TARGETS

Compile = Callable[[Case, str], list[Assembly]]


def _pool(num_processes: int, without_settle: bool, cache: Path) -> ProcessPoolExecutor:
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(num_processes, context, worker.prepare, (without_settle, str(cache)))


@pytest.fixture(scope="session")
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compile]:
    """compiled(case, target): the kernels of `case`, in stream order.

    A process compiles for one target only: what ops remember from call to call, such as the configuration chosen for a
    shape, was made for one kind of GPU.
    """
    share = max(1, (os.cpu_count() or 1) // len(TARGETS))
    pools = {name: _pool(share, False, tmp_path_factory.mktemp(name)) for name in TARGETS}
    futures: dict[tuple[Case, str], Future[list[Assembly]]] = {}

    def start(case: Case, target: str) -> Future[list[Assembly]]:
        if (case, target) not in futures:
            futures[case, target] = pools[target].submit(worker.compile_case, case, target)
        return futures[case, target]

    for item in request.session.items:
        params = getattr(getattr(item, "callspec", None), "params", {})
        if {"case", "target"} <= params.keys():
            start(params["case"], params["target"])
    yield lambda case, target: start(case, target).result()
    for pool in pools.values():
        pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="session")
def compiled_without_settle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compile]:
    """The same, in one process for all targets, with `signal.settle` doing nothing: what the checks must find."""
    pool = _pool(1, True, tmp_path_factory.mktemp("planted"))
    yield lambda case, target: pool.submit(worker.compile_case, case, target).result()
    pool.shutdown(cancel_futures=True)

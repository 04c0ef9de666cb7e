"""The compiled cases: pools of processes start on all collected ones at once, and tests take theirs as they come.

Kernels are compiled afresh in every session, into cache folders of its own.
"""

import functools
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path

import pytest

from pyrocshmem.testing import TARGETS, Compiled
from tests.compile import publishers, worker
from tests.compile.cases import CASES, Case

Compile = Callable[[Case, str], list[Compiled]]
Rest = tuple[Future[set[str]], dict[str, Future[list[Compiled]]]]
# Fixtures of what is compiled in processes of its own.
APART = {
    "compiled_without_settle",
    "compiled_by_atomics",
    "compiled_without_marks",
    "compiled_recorded",
    "rest",
}
# Whose kernels take the longest, as they go to the assembler, another process.
SLOWEST = "sm_90"


def _pool(num_processes: int, without: str, cache: Path) -> ProcessPoolExecutor:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.compile.preload"])
    return ProcessPoolExecutor(num_processes, context, worker.prepare, (without, str(cache)))


@pytest.fixture(scope="session")
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compile]:
    """compiled(case, target): the kernels of `case`, in stream order.

    A process compiles for one target only: what ops remember from call to call, such as the configuration chosen for a
    shape, was made for one kind of GPU.
    """
    share = max(1, (os.cpu_count() or 1) // len(TARGETS))
    pools = {name: _pool(share + (name == SLOWEST), "", tmp_path_factory.mktemp(name)) for name in TARGETS}
    futures: dict[tuple[Case, str], Future[list[Compiled]]] = {}

    def start(case: Case, target: str) -> Future[list[Compiled]]:
        if (case, target) not in futures:
            futures[case, target] = pools[target].submit(worker.compile_case, case, target)
        return futures[case, target]

    for item in request.session.items:
        _start_of(item, start)
        # Now, too: their tests come last, when all other processes are idle.
        for name in APART & set(getattr(item, "fixturenames", ())):
            request.getfixturevalue(name)
    yield lambda case, target: start(case, target).result()
    for pool in pools.values():
        pool.shutdown(cancel_futures=True)


def _start_of(item: pytest.Item, start: Callable[[Case, str], object]) -> None:
    """Start on the case of a test that has one."""
    params = getattr(getattr(item, "callspec", None), "params", {})
    if {"case", "target"} <= params.keys():
        start(params["case"], params["target"])


def _apart(
    request: pytest.FixtureRequest, cache: Path, without: str, job: Compile = worker.compile_case
) -> Iterator[Compile]:
    """The same, in one process for all targets: what differs from all other kernels of the session."""
    pool = _pool(1, without, cache)
    start = functools.cache(lambda case, target: pool.submit(job, case, target))
    for item in request.session.items:
        if request.fixturename in getattr(item, "fixturenames", ()):
            _start_of(item, start)
    yield lambda case, target: start(case, target).result()
    pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="session")
def compiled_without_settle(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Compile]:
    """With `signal.settle` doing nothing: what the checks must find."""
    yield from _apart(request, tmp_path_factory.mktemp("settle"), "settle")


@pytest.fixture(scope="session")
def compiled_by_atomics(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Compile]:
    """With flags raised by release atomics."""
    yield from _apart(request, tmp_path_factory.mktemp("atomics"), "stores")


@pytest.fixture(scope="session")
def compiled_without_marks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Compile]:
    """With `trace.mark` doing nothing."""
    yield from _apart(request, tmp_path_factory.mktemp("marks"), "marks")


@pytest.fixture(scope="session")
def compiled_recorded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Compile]:
    """Of calls that a timeline records."""
    yield from _apart(request, tmp_path_factory.mktemp("recorded"), "", worker.compile_recorded)


@pytest.fixture(scope="session")
def rest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rest]:
    """(the names of what the cases launch, of each target the kernels that no case compiles)."""
    pool = _pool(1, "", tmp_path_factory.mktemp("rest"))
    # What is launched depends on the dtype in nothing.
    cases = [case for case in CASES if case.dtype == "bfloat16"]
    launched = pool.submit(publishers.planned, cases, SLOWEST)
    yield launched, {name: pool.submit(publishers.compile_rest, None, name) for name in TARGETS}
    pool.shutdown(cancel_futures=True)

"""Guards taken out, one by one: the abort watch, the vote, the fingerprint of a call. Without it a test turns red.

Each is looked at with the guard and without: what a test of the fault asserts holds with it, and fails without. One
start of the ranks; the plants work in Triton's interpreter and on the host. Controls of the other guards stand beside
their tests; tests/faults/guard_list.py lists all.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pyrocshmem import Heap, ShmemError, groups, signal, stream_k
from pyrocshmem.calls.workspace import Workspace
from tests.faults.heap_support import MIB
from tests.fused.bodies import integer_call
from tests.fused.cases import HEAP_BYTES
from tests.ranks import run_ranks, values
from tests.stopwatch import Stopwatch, until
from tests.stream_k.products import integers, small_config

TIER = 2
pytestmark = [pytest.mark.cpu, pytest.mark.alone]

SHORT_S, LONG_S, WAIT_S = 0.4, 2.0, 20.0
SHAPE = (20, 16, 24)


@contextlib.contextmanager
def without_watching_abort_words() -> Iterator[None]:
    """Inside, a kernel of this rank that waits doesn't see that a peer gave up."""
    honest = signal.load_now
    signal.load_now = lambda words: honest(words) * 0
    yield
    signal.load_now = honest


def seconds_until_told(heap: Heap, workspace: Workspace, call: int) -> tuple[float, float]:
    """Rank 0 gives up early on rank 1, which doesn't come; seconds until rank 2, which waits for both, ends, and of
    these how many it was late."""
    config = small_config(algorithm="two_shot")
    assert integer_call(heap, call, SHAPE, config, workspace)
    workspace.control[int(signal.BUDGET_US.value)] = int(1e6 * (SHORT_S if heap.rank == 0 else LONG_S))
    heap.barrier()
    watch = Stopwatch()
    with contextlib.suppress(ShmemError):
        if heap.rank == 1:
            until(lambda: int(heap.system[0]))
        else:
            integer_call(heap, call, SHAPE, config, workspace)
    found = watch.seconds(), watch.late()
    heap.recover()
    workspace.control[int(signal.BUDGET_US.value)] = int(1e6 * WAIT_S)
    return found


def unequal_sizes(heap: Heap) -> tuple[str, bool]:
    """Ranks ask for different sizes, then for the same: (what the first call said, whether the second one's tensors lie
    at the same place)."""
    try:
        kept: Any = heap.zeros(1000 + 1000 * heap.rank)
        said = ""
    except ShmemError as error:
        kept, said = None, type(error).__name__
    x = heap.zeros(8)
    places = heap.group.exchange(str(heap.offset(x)).encode(), "offsets")
    del kept
    return said, len(set(places)) == 1


def different_activations(heap: Heap, workspace: Workspace) -> tuple[str, bool]:
    """Rank 0 asks for another activation than its peers: (what the call said, whether all have the same result)."""
    shares = [
        [
            integers(*sizes, torch.float32, 9 * peer + place)
            for place, sizes in enumerate(((40, 24), (24, 33)))
        ]
        for peer in range(heap.world_size)
    ]
    out = torch.full((40, 33), float("nan"))
    said = ""
    try:
        stream_k.gemm_all_reduce(
            *shares[heap.rank],
            group=heap,
            out=out,
            activation="none" if heap.rank == 0 else "relu",
            config=small_config(algorithm="one_shot"),
            workspace=workspace,
        )
    except ShmemError as error:
        said = type(error).__name__
    results = heap.group.exchange(out.numpy().tobytes(), "results")
    return said, len(set(results)) == 1


def with_and_without(rank: int, world_size: int) -> dict[str, list[Any]]:
    """By guard, what was seen with it and without it."""
    with Heap(HEAP_BYTES, timeout=60) as heap, Heap(MIB) as other:
        workspace = Workspace(heap, wait_seconds=WAIT_S)
        told = [seconds_until_told(heap, workspace, 1)]
        with without_watching_abort_words():
            told.append(seconds_until_told(heap, workspace, 2))

        calls = [different_activations(heap, workspace)]
        with pytest.MonkeyPatch.context() as patch:
            whole = groups.Group.exchange
            # The op's name is compared, its shapes, types and configuration are not.
            named = lambda self, payload, what, *more: whole(self, payload, what.partition("(")[0], *more)  # noqa: E731
            patch.setattr(groups.Group, "exchange", named)
            calls.append(different_activations(heap, workspace))

        sizes = [unequal_sizes(other)]
        other.vote = lambda call, payload=b"": [payload] * world_size  # type: ignore[method-assign]
        sizes.append(unequal_sizes(other))
        return {"abort watch": told, "vote": sizes, "fingerprint": calls}


@pytest.fixture(scope="module")
def ends() -> list[dict[str, list[Any]]]:
    return values(run_ranks(with_and_without, 3))


def test_case_1_without_the_abort_watch_peers_wait_on(ends: list[dict[str, list[Any]]]) -> None:
    (watching, late), (blind, _) = ends[2]["abort watch"]
    assert watching < LONG_S + late
    assert blind >= LONG_S


def test_cases_5_and_6_without_the_vote_heaps_drift_apart(ends: list[dict[str, list[Any]]]) -> None:
    for end in ends:
        assert end["vote"] == [("CallMismatch", True), ("", False)]


def test_cases_5_and_6_without_the_fingerprint_results_differ(ends: list[dict[str, list[Any]]]) -> None:
    for end in ends:
        # With it nothing is written; without it the call says nothing, and ranks have different results.
        assert end["fingerprint"] == [("CallMismatch", True), ("", False)]

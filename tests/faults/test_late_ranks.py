"""Fault 2: a rank that comes when its peers have given up sees the abort, and writes nothing into their memory.

Rank 1 is held in the middle of its launch, where its host's check is behind it; rank 0 waits its budget out, raises,
and fills its result with canaries; then rank 1 goes on, and finds all flags up that it needs to write. The control is
a rank that doesn't look at its abort word. The plants work in Triton's interpreter, where a kernel looks its helpers
up each time it calls them.
"""

import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pyrocshmem import Heap, PeerTimeout, ShmemError, collectives, message, signal, status, stream_k
from pyrocshmem.calls.workspace import Workspace
from pyrocshmem.collectives import words
from tests.fused.cases import HEAP_BYTES
from tests.ranks import run_ranks, values
from tests.stream_k.products import integers, small_config

TIER = 2
pytestmark = [pytest.mark.cpu, pytest.mark.alone]

SHORT_S, BLIND_S, WAIT_S = 0.3, 0.4, 20.0
CANARY = 77.0
M, N, K = 40, 24, 16

# (op, placement, algorithm) of those whose kernels write into their peers' results as soon as all flags are up.
WRITES = [
    ("gemm_all_scatter", "inside", "two_shot"),
    ("gemm_all_scatter", "after", "two_shot"),
    ("gemm_all_reduce", "after", "two_shot"),
    ("rms_norm", "", ""),
]
# And of those that don't, lack what rank 0 has not sent, or look at the word between copies: they must raise, too.
KEEPS = [
    ("gemm_all_reduce", "copy_engine", "two_shot"),
    ("gemm_all_reduce", "inside", "two_shot"),
    ("gemm_all_scatter", "copy_engine", "two_shot"),
    ("gemm_all_scatter", "pull", "two_shot"),
    ("all_gather_gemm", "copy_engine", "two_shot"),
    ("gemm_reduce_scatter", "copy_engine", "two_shot"),
]
# And of those, what a peer that gave up in the first half would send in the second.
SENDS = [("gemm_all_reduce", "messages", "two_shot"), ("all_reduce", "", "two_shot")]
WAYS = {"": WRITES + KEEPS + SENDS, "blind": WRITES, "unguarded": SENDS[1:]}


# Of each way with each guard left out: (code of the record, whether the canaries are whole).
Ends = dict[str, list[tuple[int, bool]]]


class _Meeting:
    """Words by which the ranks of a heap that has a fault still tell one another where they are."""

    def __init__(self, heap: Heap) -> None:
        self.words = heap.zeros(4, dtype=torch.int32)
        self.peers = heap.peer_view(self.words, 1 - heap.rank)

    def tell(self, word: int, number: int) -> None:
        self.peers[word] = number

    def wait(self, word: int, number: int) -> None:
        deadline = time.monotonic() + WAIT_S
        while int(self.words[word]) != number:
            assert time.monotonic() < deadline, "the other rank did not come"
            time.sleep(0.002)


def _call(way: tuple[str, str, str], heap: Heap, workspace: Workspace, out: torch.Tensor, seed: int) -> None:
    name, placement, algorithm = way
    if name == "rms_norm":
        x, weight = integers(M, N, torch.float32, seed), torch.ones(N)
        collectives.rms_norm(x, weight, 1e-5, group=heap, replicated=True, out=out, workspace=workspace)
        return
    if name == "all_reduce":
        x = integers(M, N, torch.float32, seed)
        collectives.all_reduce(x, group=heap, out=out, algorithm=algorithm, workspace=workspace)
        return
    rows, more = M, {}
    if name == "all_gather_gemm":
        rows, more = M // heap.world_size, {"num_rows": M}
    a, b = integers(rows, K, torch.float32, seed), integers(K, N, torch.float32, seed + 1)
    config = small_config(placement=placement, algorithm=algorithm, chunk=1)
    getattr(stream_k, name)(a, b, group=heap, out=out, config=config, workspace=workspace, **more)


def _shape(name: str, world_size: int) -> tuple[int, int]:
    if name in ("gemm_all_scatter", "rms_norm"):
        return M, N * world_size
    return (M // world_size if name == "gemm_reduce_scatter" else M), N


def _late(
    heap: Heap, workspace: Workspace, meeting: _Meeting, way: tuple[str, str, str], number: int, without: str
) -> tuple[int, bool]:
    """(code of this rank's record, whether its canaries are whole). without: the guard that is left out."""
    workspace.control[int(signal.BUDGET_US.value)] = int(1e6 * WAIT_S)
    out = heap.zeros(*_shape(way[0], heap.world_size))
    _call(way, heap, workspace, out, number)
    heap.synchronize()
    budget_s = SHORT_S if heap.rank == 0 else BLIND_S if without == "blind" else WAIT_S
    workspace.control[int(signal.BUDGET_US.value)] = int(1e6 * budget_s)
    heap.barrier()
    if heap.rank == 0:
        with pytest.MonkeyPatch.context() as plant:
            if without == "unguarded":
                plant.setattr(words, "unless", lambda gone, sums: sums)
            with pytest.raises(PeerTimeout):
                _call(way, heap, workspace, out, number)
        out.fill_(CANARY)
        meeting.tell(0, number)
        meeting.wait(1, number)
    else:
        with pytest.MonkeyPatch.context() as plant:
            _hold_launches(plant, lambda: meeting.wait(0, number))
            if without == "blind":
                plant.setattr(signal, "load_now", _blind)
            with pytest.raises(ShmemError):
                _call(way, heap, workspace, out, number)
        meeting.tell(1, number)
    code, whole = int(heap.status[status.Word.CODE]), bool((out == CANARY).all())
    heap.recover()
    return code, whole


def _blind(words: Any, *of_notes: Any, honest: Any = signal.load_now) -> Any:
    """What an abort word that is down says; notes as they are."""
    return honest(words, *of_notes) * len(of_notes)


def _hold_launches(plant: pytest.MonkeyPatch, hold: Callable[[], None]) -> None:
    """The next launches of this rank stand still, when they have begun, until `hold` returns."""
    for module, name in ((signal, "begin"), (message, "number")):
        honest: Any = getattr(module, name)

        def late(*args: Any, honest: Any = honest, **more: Any) -> Any:
            found = honest(*args, **more)
            hold()
            return found

        plant.setattr(module, name, late)


def late_ranks(rank: int, world_size: int) -> Ends:
    numbers = itertools.count(1)
    with Heap(HEAP_BYTES, timeout=WAIT_S) as heap:
        place = Workspace(heap), _Meeting(heap)
        return {
            without: [_late(heap, *place, way, next(numbers), without) for way in ways]
            for without, ways in WAYS.items()
        }


@pytest.fixture(scope="module")
def ends() -> list[Ends]:
    return values(run_ranks(late_ranks, 2, timeout=120.0))


def test_a_late_rank_sees_the_abort_and_writes_nothing(ends: list[Ends]) -> None:
    waited, late = ends[0][""], ends[1][""]
    assert [code for code, _ in waited] == [status.Code.TIMEOUT] * len(waited)
    assert [way for way, (_, whole) in zip(WAYS[""], waited, strict=True) if not whole] == []
    assert [way for way, (code, _) in zip(WAYS[""], late, strict=True) if code != status.Code.ABORTED] == []


def test_a_rank_that_does_not_look_overwrites_its_peers_results(ends: list[Ends]) -> None:
    """The control: what each of them would have written."""
    assert [way for way, (_, whole) in zip(WRITES, ends[0]["blind"], strict=True) if whole] == []


def test_a_late_rank_takes_sums_that_lack_something(ends: list[Ends]) -> None:
    """The control: without the guard its kernel finds all that it waits for, and records nothing. (One of tiles looks
    at the abort word once more.)"""
    assert [code for code, _ in ends[1]["unguarded"]] == [0]

"""Faults 1 and 2 as a kernel meets them: a wait for a peer that never comes ends, and the peers are told.

Who gave up, what the kernel still wrote, how long it took and what every host raises is asserted on every rank.
"""

from typing import Any

import pytest
import torch

from pyrocshmem import Heap, PeerAborted, PeerTimeout, ShmemError, signal, status, target
from pyrocshmem.calls.workspace import Workspace
from pyrocshmem.collectives.consumer import gate_kernel
from pyrocshmem.collectives.order import Problem
from tests.pyrocshmem import kernels
from tests.ranks import run_ranks, values
from tests.stopwatch import Stopwatch, until, within

TIER = 2
BUDGET_S, LONG_S, SLACK_S = 0.5, 30.0, 2.0
UNTOUCHED = -5
LANES = 4


def _wait(
    heap: Heap, workspace: Workspace, flags: Any, tiles: list[int], peers: list[int], expected: int
) -> Any:
    """(seconds, of these late, out): the wait of one program for `LANES` flags."""
    make = lambda numbers: torch.tensor(numbers, dtype=torch.int32, device=heap.device)  # noqa: E731
    out = torch.full((2,), UNTOUCHED, dtype=torch.int32, device=heap.device)
    arguments = (flags, make(tiles), make(peers), out, make([expected]), workspace.context)
    switches = {"LANES": LANES, "WORLD": heap.world_size}
    if not target.interpreted():
        kernels.wait_kernel.warmup(*arguments, grid=(1,), **switches)
    heap.barrier()
    watch = Stopwatch()
    kernels.wait_kernel[(1,)](*arguments, **switches)
    if heap.device.type == "cuda":
        torch.cuda.synchronize(heap.device)
    return watch.seconds(), watch.late(), out.tolist()


def missing_body(rank: int, world: int) -> dict[str, Any]:
    """Rank 0 waits half a second for a flag of rank 2, rank 1 long for rank 0's; rank 2 starts nothing."""
    with Heap(1 << 20) as heap:
        workspace = Workspace(heap, wait_seconds=LONG_S if rank else BUDGET_S)
        guard = heap.full((64,), 7, dtype=torch.int32)
        flags = heap.full((LANES,), 40, dtype=torch.int32)
        after = heap.full((64,), 9, dtype=torch.int32)
        if rank == 0:
            # Three of the four are up: the record must name the one that is not.
            flags.copy_(torch.tensor([41, 41, 40, 42]))
            seconds, late, out = _wait(heap, workspace, flags, [3, 4, 5, 6], [0, 1, 2, 0], 41)
        elif rank == 1:
            seconds, late, out = _wait(heap, workspace, flags, [8, 8, 8, 8], [0, 0, 0, 0], 41)
        else:
            heap.barrier()
            watch, out = Stopwatch(), [UNTOUCHED] * 2
            until(lambda: int(heap.system[0]))
            seconds, late = watch.seconds(), watch.late()
        record = heap.status.tolist()
        error: ShmemError | None = None
        try:
            heap.check()
            heap.barrier()
        except ShmemError as fault:
            error = fault
        intact = bool((guard == 7).all() and (after == 9).all())
        held = flags.tolist()
        return {
            "seconds": seconds,
            "late": late,
            "out": out,
            "record": record,
            "error": error,
            "intact": intact,
            "flags": held,
        }


@pytest.fixture(scope="module")
def ends() -> list[dict[str, Any]]:
    return values(run_ranks(missing_body, 3))


@pytest.mark.num_ranks(3)
@pytest.mark.alone
def test_the_wait_ends_in_time_and_names_what_it_waited_for(ends: list[dict[str, Any]]) -> None:
    first, record = ends[0], ends[0]["record"]
    assert BUDGET_S <= first["seconds"] < BUDGET_S + SLACK_S + first["late"]
    assert record[status.Word.CODE] == status.Code.TIMEOUT
    facts = {word.name: record[word] for word in status.Word if word.name not in ("CODE", "WAITED_US")}
    want = {"OP": status.Op.TEST, "RANK": 0, "PEER": 2, "TILE": 5, "EXPECTED": 41, "SEEN": 40, "EPOCH": 41}
    assert facts == want
    assert BUDGET_S * 1e6 <= record[status.Word.WAITED_US] < (BUDGET_S + SLACK_S + first["late"]) * 1e6
    error = first["error"]
    assert isinstance(error, PeerTimeout)
    assert (error.op, error.rank, error.peer, error.tile, error.expected, error.seen) == (
        "test",
        0,
        2,
        5,
        41,
        40,
    )
    for fact in ("test", "rank 0", "rank 2", "5", "41", "40"):
        assert fact in str(error)


@pytest.mark.num_ranks(3)
@pytest.mark.alone
def test_a_peer_that_waits_is_told_at_once(ends: list[dict[str, Any]]) -> None:
    told = ends[1]
    assert told["seconds"] < BUDGET_S + SLACK_S + told["late"]
    assert told["record"][status.Word.CODE] == status.Code.ABORTED
    assert told["record"][status.Word.PEER] == 0
    assert isinstance(told["error"], PeerAborted)
    assert told["error"].peer == 0


@pytest.mark.num_ranks(3)
@pytest.mark.alone
def test_a_peer_that_waits_for_nothing_is_told(ends: list[dict[str, Any]]) -> None:
    told = ends[2]
    assert told["seconds"] < BUDGET_S + SLACK_S + told["late"]
    assert told["record"][status.Word.CODE] == status.Code.OK
    assert isinstance(told["error"], PeerAborted)
    assert told["error"].peer == 0


@pytest.mark.num_ranks(3)
def test_nothing_is_written_after_a_wait_that_gave_up(ends: list[dict[str, Any]]) -> None:
    assert [end["out"] for end in ends[:2]] == [[2, UNTOUCHED]] * 2
    assert all(end["intact"] for end in ends)
    assert [end["flags"] for end in ends] == [[41, 41, 40, 42], [40] * 4, [40] * 4]


def test_the_first_record_stands() -> None:
    """Later waits of the same rank are consequences: they end at once, and leave the record alone."""
    device = target.device()
    workspace = Workspace(device=device, wait_seconds=0.05)
    flags = torch.zeros(LANES, dtype=torch.int32, device=device)
    out = torch.full((2,), UNTOUCHED, dtype=torch.int32, device=device)
    epoch = torch.ones(1, dtype=torch.int32, device=device)

    def wait(tile: int) -> None:
        tiles = torch.full((LANES,), tile, dtype=torch.int32, device=device)
        kernels.wait_kernel[(1,)](flags, tiles, tiles, out, epoch, workspace.context, LANES=LANES, WORLD=1)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    wait(11)
    with pytest.raises(PeerTimeout) as first:
        workspace.check()
    assert first.value.tile == 11
    workspace.control[2] = int(LONG_S * 1e6)
    with within(SLACK_S):
        wait(22)
    with pytest.raises(PeerTimeout) as second:
        workspace.check()
    assert second.value.tile == 11
    assert out.tolist() == [2, UNTOUCHED]


def test_a_gate_names_the_call_and_its_own_rank() -> None:
    """It counts programs of the own GEMM, so what it expects is no call's number."""
    workspace = Workspace(device=target.device(), wait_seconds=0.05)
    workspace.control[int(signal.EPOCH.value)] = 41
    problem = Problem(0, 0, 0, 0, 0, 0, 1, 3, 0).packed()
    gate_kernel[(1,)](workspace.context, problem, None, OP=int(status.Op.GEMM_ALL_REDUCE), WORLD=1)
    if workspace.device.type == "cuda":
        torch.cuda.synchronize(workspace.device)
    with pytest.raises(PeerTimeout, match="in vain for a program of its own") as raised:
        workspace.check()
    facts = raised.value
    assert (facts.op, facts.rank, facts.peer, facts.tile) == ("gemm_all_reduce", 0, 0, None)
    assert (facts.call, facts.expected, facts.seen) == (42, 3, 0)

"""Signals: data then flag, epochs that wrap, calls that are counted, ranks that meet. Every guard has its control.

On the CPU target a program's writes are in order by themselves, so the control of `publish` is the flag raised before
the data. That its barrier is there on GPUs is read in the assembly (tests/compile); tests/litmus has many rounds.
"""

import time

import pytest
import torch

from pyrocshmem import Heap, PeerAborted, status, target
from pyrocshmem.calls.workspace import Workspace
from tests.pyrocshmem import kernels
from tests.ranks import run_ranks, values
from tests.stopwatch import until

TIER = 1
FEW = 60
BLOCK = 256
WAIT_S = 20.0
NEAR_2_31, NEAR_2_32 = (1 << 31) - 30, -30  # int32: the second is just under 2^32


def litmus_body(
    rank: int, world: int, rounds: int, start: int, early: bool, constant: bool
) -> tuple[int, int]:
    """(rounds with stale data, rounds played) of this rank."""
    with Heap(1 << 20) as heap:
        workspace = Workspace(heap, wait_seconds=WAIT_S)
        flags = workspace.buffer("flags", 2, torch.int32)
        workspace.restart(start)
        data = heap.full((BLOCK,), -7, dtype=torch.int32)
        zero = torch.zeros(1, dtype=torch.int32, device=heap.device)
        wrong = torch.full((2,), -1, dtype=torch.int32, device=heap.device)
        arguments = (data, flags, zero, wrong, rounds, workspace.context)
        switches = {"EARLY": early, "CONSTANT": constant, "WORLD": world, "BLOCK": BLOCK}
        if not target.interpreted():
            # Loaded before any rank can wait: loading code waits for kernels that spin.
            kernels.litmus_kernel.warmup(*arguments, grid=(1,), **switches)
        heap.barrier()
        kernels.run(kernels.litmus_kernel, 1, *arguments, **switches)
        heap.barrier()
        bad, played = wrong.tolist()
        return bad, played


@pytest.mark.num_ranks(2)
@pytest.mark.alone
def test_flag_before_data_is_found() -> None:
    ends = values(run_ranks(litmus_body, 2, FEW, 0, True, False))
    assert [played for _, played in ends] == [FEW] * 2
    assert ends[1][0] > 0, "the planted mistake was not seen: the litmus test proves nothing"


@pytest.mark.num_ranks(2)
@pytest.mark.parametrize("start", [NEAR_2_31, NEAR_2_32], ids=["2^31", "2^32"])
def test_epochs_wrap(start: int) -> None:
    assert values(run_ranks(litmus_body, 2, FEW, start, False, False)) == [(0, FEW)] * 2


@pytest.mark.num_ranks(2)
@pytest.mark.alone
def test_constant_epoch_is_found() -> None:
    ends = values(run_ranks(litmus_body, 2, FEW, NEAR_2_31, False, True))
    assert ends[1][0] > 0


@pytest.mark.parametrize(
    ("ahead", "is_up"),
    [
        (0, True),
        (1, True),
        (3, True),
        (4, False),
        (-1, False),
        (1000, False),
        ((1 << 31) - 1, False),
        (-(1 << 31), False),
    ],
)
@pytest.mark.parametrize("epoch", [5, (1 << 31) - 1, -1, -(1 << 31)])
def test_only_the_next_calls_count_as_fresh(ahead: int, is_up: bool, epoch: int) -> None:
    """A flag that an old call left, however long ago, isn't up; one that a peer two calls ahead has raised is."""
    device = target.device()
    workspace = Workspace(device=device, wait_seconds=0.005)
    value = (epoch + ahead + (1 << 31)) % (1 << 32) - (1 << 31)
    flags = torch.tensor([value], dtype=torch.int32, device=device)
    name = torch.tensor([3], dtype=torch.int32, device=device)
    expected = torch.tensor([epoch], dtype=torch.int32, device=device)
    out = torch.full((2,), -5, dtype=torch.int32, device=device)
    kernels.run(kernels.wait_kernel, 1, flags, name, name, out, expected, workspace.context, LANES=1, WORLD=1)
    assert out.tolist() == ([1, 1] if is_up else [2, -5])
    assert flags.item() == value


@pytest.mark.parametrize("programs", [1, 7, 400])
def test_calls_are_counted_once_whatever_the_grid(programs: int) -> None:
    device = target.device()
    workspace = Workspace(device=device)
    seen = torch.full((programs + 8,), -9, dtype=torch.int32, device=device)
    closed = torch.zeros(1, dtype=torch.int32, device=device)
    for call in range(1, 4):
        kernels.run(kernels.call_kernel, programs, seen, closed, workspace.context, WORLD=1)
        assert workspace.epoch() == call
        assert closed.item() == call
        assert (seen[:programs] == call).all()
        assert (seen[programs:] == -9).all()


@pytest.mark.parametrize(("word", "looks"), [(3, True), (3, False), (0, True)], ids=["told", "blind", "well"])
def test_a_call_that_a_peer_gave_up_on_ends_with_a_fault(word: int, looks: bool) -> None:
    """Though none of its own waits did: what it took may be wrong. Blind is the control."""
    device = target.device()
    workspace = Workspace(device=device)
    value = torch.tensor([word], dtype=torch.int32, device=device)
    kernels.run(kernels.aborted_kernel, 3, value, workspace.context, LOOKS=looks, WORLD=1)
    assert workspace.epoch() == 1
    record = workspace.status.tolist()
    if word and looks:
        facts = (status.Word.CODE, status.Word.PEER, status.Word.EPOCH)
        assert [record[fact] for fact in facts] == [status.Code.ABORTED, word - 1, 1]
        with pytest.raises(PeerAborted):
            workspace.check()
    else:
        assert record == [0] * status.NUM_WORDS
    assert workspace.context.abort.item() == word


def test_a_chain_longer_than_what_is_resident_ends() -> None:
    """Program p waits for p - 1: with a grid larger than the GPU holds at once, only waits on lower ids can end."""
    device = target.device()
    programs = 200 if target.interpreted() else 5_000
    workspace = Workspace(device=device)
    flags = torch.zeros(programs, dtype=torch.int32, device=device)
    for _ in range(2):
        seen = torch.full((programs,), -9, dtype=torch.int32, device=device)
        kernels.run(kernels.chain_kernel, programs, flags, seen, workspace.context, WORLD=1)
        assert seen.tolist() == list(range(programs))
    workspace.check()


def meet_body(
    rank: int, world: int, enter: bool, together: bool, late_s: float | None, calls: int
) -> list[list[int]]:
    """What this rank found in each rank's stamp, call by call; rank 1 comes late to each. late_s: None until rank 0
    has gone on."""
    with Heap(1 << 20) as heap:
        workspace = Workspace(heap, wait_seconds=WAIT_S)
        stamps, gone_on = heap.zeros(1, dtype=torch.int32), heap.zeros(1, dtype=torch.int32)
        at_1 = heap.peer_view(gone_on, 1)
        out = torch.full((world,), -1, dtype=torch.int32, device=heap.device)
        arguments = (stamps, out, workspace.context)
        switches = {"ENTER": enter, "TOGETHER": together, "WORLD": world}
        if not target.interpreted():
            kernels.meet_kernel.warmup(*arguments, grid=(1,), **switches)
        found = []
        for call in range(1, 1 + calls):
            heap.barrier()
            if rank == 1 and late_s is None:
                until(lambda: int(gone_on) == call)  # noqa: B023 (runs at once)
            elif rank == 1:
                time.sleep(late_s)
            kernels.run(kernels.meet_kernel, 1, *arguments, **switches)
            heap.synchronize()
            found.append(out.tolist())
            if rank == 0:
                at_1.fill_(call)
        heap.barrier()
        return found


@pytest.mark.parametrize("world", [pytest.param(r, marks=pytest.mark.num_ranks(r)) for r in (2, 3)])
@pytest.mark.parametrize("how", ["entered", "left"])
def test_nobody_goes_on_before_the_last_has_come(world: int, how: str) -> None:
    ends = values(run_ranks(meet_body, world, how == "entered", how == "left", 0.15, 3))
    assert ends == [[[call] * world for call in (1, 2, 3)]] * world


@pytest.mark.num_ranks(2)
@pytest.mark.alone
def test_without_meeting_a_rank_goes_on_too_early() -> None:
    ends = values(run_ranks(meet_body, 2, False, False, None, 2))
    assert all(found[1] != call for call, found in enumerate(ends[0], 1))


@pytest.mark.gpu
def test_a_captured_call_counts_at_every_replay() -> None:
    device = target.device()
    workspace = Workspace(device=device)
    programs = 300
    seen = torch.zeros(programs, dtype=torch.int32, device=device)
    closed = torch.zeros(1, dtype=torch.int32, device=device)
    kernels.run(kernels.call_kernel, programs, seen, closed, workspace.context, WORLD=1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(2):
            kernels.run(kernels.call_kernel, programs, seen, closed, workspace.context, WORLD=1)
    assert workspace.epoch() == 1
    for replay in range(1, 51):
        graph.replay()
        assert workspace.epoch() == 1 + 2 * replay
    kernels.run(kernels.call_kernel, programs, seen, closed, workspace.context, WORLD=1)
    assert workspace.epoch() == 102
    assert (seen == 102).all()
    assert closed.item() == 102

"""Messages in slots that the workspace has outgrown, as a captured graph sends them, between calls in the new ones and
after a recovery."""

import time
from unittest import mock

import pytest
import torch

from pyrocshmem import Heap, collectives, message_slots, signal, target
from pyrocshmem.calls import workspace as workspaces
from pyrocshmem.errors import PeerAborted, PeerTimeout
from tests.ranks import run_ranks, values

TIER = 2
pytestmark = pytest.mark.cpu
FEWEST_QUADS = 1 << 8
FEW, MANY, MORE = 100, 1500, 5000
CALLS = 6
SHORT_S, CONTROL_S, LONG_S = 0.3, 1.5, 10.0


class Calls:
    """Sums of integers over ranks: as ever, and by a plan of before the slots grew, which stands for a graph: both go
    on with the memory that they were made for."""

    def __init__(self, heap: Heap) -> None:
        message_slots._FEWEST_QUADS = FEWEST_QUADS
        self.heap, self.space, self.seed = heap, workspaces.Workspace(heap), 0
        self.right(FEW, False)
        ((_, self.plan),) = self.space.plans.values()
        self.space._captured = True

    def right(self, count: int, replayed: bool) -> bool:
        """Whether the next call is."""
        self.seed += 1
        generator = torch.Generator().manual_seed(self.seed)
        parts = torch.randint(-8, 9, (self.heap.world_size, count), generator=generator).float()
        x = parts[self.heap.rank].to(target.device(self.heap.rank))
        out = torch.full_like(x, torch.nan)
        if replayed:
            with self.space.begin(None):
                self.plan.run(x, out)
        else:
            options = {"group": self.heap, "algorithm": "one_shot", "workspace": self.space}
            collectives.all_reduce(x, out=out, **options)
        self.heap.synchronize()
        return torch.equal(out.cpu(), parts.sum(0))

    def stay_away(self) -> None:
        """Until a peer has given up."""
        while True:
            self.heap.check()
            time.sleep(0.01)

    def wait(self, seconds: float) -> None:
        """How long calls do from now on."""
        self.space.control[int(signal.BUDGET_US.value)] = int(seconds * 1e6)

    def wrong(self, count: int) -> list[str]:
        """Of replays with calls of so many elements between them."""
        each = [self.right(*((count, False) if i % 3 == 1 else (FEW, True))) for i in range(CALLS)]
        return [f"{count}: {each}"] * (not all(each))


def between_calls(rank: int, world_size: int, recovers: bool) -> list[str]:
    """What was wrong, of two sizes to which the slots grow, after a fault the second time."""
    patience = LONG_S if recovers else CONTROL_S
    with Heap(4 << 20) as heap:
        calls = Calls(heap)
        calls.wait(patience)
        wrong = calls.wrong(MANY)
        heap.vote("before the fault")
        calls.wait(SHORT_S)
        with pytest.raises((PeerTimeout, PeerAborted)):
            calls.stay_away() if rank else calls.right(FEW, True)
        if not recovers:
            calls.space._outgrown.clear()
        heap.recover()
        calls.wait(patience)
        calls.seed = 1000
        return wrong + calls.wrong(MORE)


@pytest.mark.parametrize("before", [False, True], ids=["another stream", "the stream of the call before"])
def test_a_capture_is_noticed(before: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a captured graph uses is kept when it is outgrown."""
    capturing = False
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: mock.Mock())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    space = workspaces.Workspace(device=torch.device("cpu"))
    if before:
        space.order()
    assert not space._captured
    capturing = True
    space.order()
    assert space._captured


@pytest.mark.num_ranks(2)
def test_outgrown_slots() -> None:
    assert values(run_ranks(between_calls, 2, True)) == [[], []]


@pytest.mark.num_ranks(2)
def test_without_a_guard_calls_go_wrong() -> None:
    """Where those outgrown are left as a fault left them."""
    ends = run_ranks(between_calls, 2, False)
    assert any(not end.ok or end.value for end in ends)
    assert all(end.ok or "PeerTimeout" in end.describe() or "PeerAborted" in end.describe() for end in ends)

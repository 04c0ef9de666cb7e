"""A body: ranks of one op, fused or of whole tensors, meet one fault after another, and recover from each in the same
processes.

Rank 1 is the one that is late, raises, is stopped, is killed. What it finds it hands to the others before it dies.
"""

import json
import os
import signal as signals
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from pyrocshmem import Heap, ShmemError, collectives, message, note, signal, target
from pyrocshmem.calls.workspace import Workspace
from tests.faults.heap_support import mapped_files
from tests.fused.cases import HEAP_BYTES, Case, Operands, call, digest, judge
from tests.stopwatch import Stopwatch
from tests.stream_k.products import Frame, integers

WAIT_S, LATE_WAIT_S, LONG_WAIT_S, VOTE_S = 1.0, 2.0, 20.0, 30.0
VICTIM = 1


@dataclass(frozen=True)
class Whole:
    """`collectives.all_reduce` of a tensor [M, N] a rank, in the place of a fused op's `Case`."""

    M: int
    N: int
    algorithm: str
    dtype: torch.dtype = torch.float32


class _Fused:
    """A rank's calls of a case."""

    def __init__(self, case: Case, heap: Heap) -> None:
        self.case, self.heap = case, heap
        self.operands = Operands(case, heap.rank, heap.world_size, 7)
        self.shape = self.operands.shape

    def call(self, out: torch.Tensor, workspace: Workspace) -> None:
        call(self.case, self.heap, self.operands, out, workspace)

    def judge(self, out: torch.Tensor) -> None:
        judge(self.case, self.operands, out, self.heap.world_size)


class _OfTensors:
    """The same of whole tensors, whose sum is exact."""

    def __init__(self, whole: Whole, heap: Heap) -> None:
        self.whole, self.heap, self.shape = whole, heap, (whole.M, whole.N)
        self.parts = [integers(*self.shape, whole.dtype, 70 + rank) for rank in range(heap.world_size)]

    def call(self, out: torch.Tensor, workspace: Workspace) -> None:
        collectives.all_reduce(
            self.parts[self.heap.rank],
            group=self.heap,
            out=out,
            algorithm=self.whole.algorithm,
            workspace=workspace,
        )

    def judge(self, out: torch.Tensor) -> None:
        assert torch.equal(out, torch.stack(self.parts).sum(0))


class Meeting:
    """One rank's heap, workspace and calls of `case`, and the outputs between canaries."""

    def __init__(self, case: Case | Whole, group: Any = None) -> None:
        self.heap = Heap(HEAP_BYTES, group, timeout=VOTE_S)
        self.rank = self.heap.rank
        self.workspace = Workspace(self.heap, wait_seconds=LONG_WAIT_S)
        self.calls = _Fused(case, self.heap) if isinstance(case, Case) else _OfTensors(case, self.heap)
        self.frame = Frame(*self.calls.shape, case.dtype)
        self.guard = self.heap.full((64,), 7, dtype=torch.int32)

    def wait_budget(self, seconds: float) -> None:
        self.workspace.control[int(signal.BUDGET_US.value)] = int(seconds * 1e6)

    def op(self) -> torch.Tensor:
        self.frame.poison()
        self.calls.call(self.frame.out, self.workspace)
        self.heap.synchronize()
        return self.frame.out

    def right(self) -> str:
        """The result's bits; AssertionError unless it keeps its bound and nothing around it was touched."""
        out = self.op()
        self.calls.judge(out)
        self.intact()
        return digest(out)

    def intact(self) -> None:
        self.frame.check()
        assert bool((self.guard == 7).all())

    def fault_of(self, body: Callable[[], Any]) -> dict[str, Any]:
        """What `body` raised and when; and what the calls after it raised, which must not wait. late_s, again_late_s:
        of these times, what the machine took."""
        watch = Stopwatch()
        try:
            body()
            error: Exception | None = None
        except ShmemError as raised:
            error = raised
        ended, again, later_watch = time.monotonic(), [], Stopwatch()
        seconds, late_s = watch.seconds(), watch.late()
        for later in (self.op, self.heap.barrier, lambda: self.heap.zeros(3), self.heap.check):
            try:
                later()
                again.append("nothing")
            except ShmemError as raised:
                again.append(type(raised).__name__)
        facts = ("op", "rank", "peer", "tile", "expected", "seen", "call", "waited_s", "process")
        return {
            "kind": type(error).__name__,
            "text": str(error),
            **{name: getattr(error, name, None) for name in facts},
            "seconds": seconds,
            "late_s": late_s,
            "ended": ended,
            "again": again,
            "again_s": later_watch.seconds(),
            "again_late_s": later_watch.late(),
        }


def _before_announcing(deed: Callable[[], None]) -> None:
    """On the CPU target this rank does `deed`, its last, in its next kernel, before the kernel announces anything."""

    def planted(*args: Any, **more: Any) -> None:
        deed()

    signal.publish = message.push = note.push = planted


def _die() -> None:
    os.kill(os.getpid(), signals.SIGKILL)


def _late(meeting: Meeting) -> dict[str, Any]:
    """Case 3."""
    meeting.wait_budget(LATE_WAIT_S)
    undelayed = meeting.right()
    start = time.monotonic()  # before the victim, who may leave the barrier first, begins to sleep
    meeting.heap.barrier()
    if meeting.rank == VICTIM:
        time.sleep(0.8 * LATE_WAIT_S)
    late = meeting.right()
    meeting.wait_budget(LONG_WAIT_S)
    return {"same": late == undelayed, "seconds": time.monotonic() - start}


def _raises(meeting: Meeting) -> dict[str, Any]:
    """Case 4. It is the abort that ends the waits, whose budget is long."""
    meeting.heap.barrier()
    if meeting.rank == VICTIM:
        time.sleep(0.3)  # the others wait in their kernels by then
        raised = time.monotonic()
        meeting.heap.abort("KeyError: 'weights'")
        return {**meeting.fault_of(meeting.heap.check), "raised": raised}
    if meeting.rank > VICTIM:
        time.sleep(0.8)  # rank 0 has begun to recover by then, which must not hide who raised
    return meeting.fault_of(meeting.op)


def _stopped(meeting: Meeting, pids: list[int]) -> dict[str, Any]:
    """Case 2. Rank 0 wakes the one that stopped, once it has given up itself."""
    meeting.wait_budget(WAIT_S)
    meeting.heap.barrier()
    if meeting.rank == VICTIM:
        meeting.frame.poison()
        os.kill(os.getpid(), signals.SIGSTOP)
        found = meeting.fault_of(meeting.op)
        # On a GPU the call may have been launched, and its peers' tiles may have been there.
        found["untouched"] = bool(meeting.frame.out.isnan().all())
    else:
        found = meeting.fault_of(meeting.op)
        if meeting.rank == 0:
            time.sleep(0.5)  # the others look at what it does, too
            os.kill(pids[VICTIM], signals.SIGCONT)
    meeting.intact()
    return found


def faults_in_turn(rank: int, world_size: int, case: Case | Whole) -> dict[str, Any]:
    """By case number, what this rank found, and what rank 1 found; after the kill, what the survivors did."""
    meeting = Meeting(case)
    heap = meeting.heap
    pids = [int(reply) for reply in heap.vote("pids", str(os.getpid()).encode())]
    found: dict[str, Any] = {"3": _late(meeting)}
    bits = meeting.right()
    for name, fault in (("4", lambda: _raises(meeting)), ("2", lambda: _stopped(meeting, pids))):
        usage = heap.usage()
        found[name] = fault()
        assert heap.broken
        start = time.monotonic()
        heap.recover()
        found[name]["recover_s"] = time.monotonic() - start
        meeting.wait_budget(LONG_WAIT_S)
        assert heap.usage() == usage
        found[name]["recovered"] = meeting.right() == bits
    found["of victim"] = json.loads(heap.vote("found", json.dumps(found).encode())[VICTIM])

    if rank == VICTIM:
        if target.interpreted():
            _before_announcing(_die)
            meeting.op()
        time.sleep(0.2)
        _die()
    meeting.wait_budget(WAIT_S)
    found["1"] = meeting.fault_of(meeting.op)
    meeting.intact()
    found["files"] = mapped_files()
    survivors = [peer for peer in range(world_size) if peer != VICTIM]
    watch = Stopwatch()
    heap.close()
    # A heap of the survivors, over a group of ours and, where it takes no more than the store, one of torch's.
    groups = [heap.group.subgroup(survivors)]
    if len(survivors) > 1:
        groups.append(dist.new_group(survivors, backend="gloo", use_local_synchronization=True))
    for group in groups:
        smaller = Meeting(case, group)
        smaller.right()
        smaller.heap.close()
    found["went on"], found["went on late"] = watch.seconds(), watch.late()
    return found

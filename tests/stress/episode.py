"""A start of ranks that makes rounds of calls, until something is wrong or the time is over.

    ends = run_ranks(episode, 3, rounds, seconds, None)       # of each rank an Episode
    ends = run_ranks(shrink, 3, ends[0].value.failed, seconds, None)

Ranks meet between rounds, over gloo and not over what is being tested, to compare notes. Inside a round nothing but
the calls themselves keeps them together.
"""

from __future__ import annotations

import contextlib
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pyrocshmem import Heap, PeerAborted, PeerTimeout, signal
from pyrocshmem.calls.workspace import workspace_for
from pyrocshmem.stream_k.ops import gemm_all_reduce
from tests.fused import bodies
from tests.fused.cases import digest
from tests.stream_k.products import ON_CPU
from tests.stress.ops import OPS, Call
from tests.stress.rounds import GRAPH, Round, groups_of, shrunk

# The largest calls on GPUs keep some 60 MB a slot on 8 ranks, and of messages two slots.
HEAP_BYTES = (48 if ON_CPU else 512) << 20
# A rank that shares a core may be late by seconds: a wait must not run out unless a rank is missing.
PATIENT_S, SHORT_S, SLACK_S = 30.0, 0.5, 4.0
_STALL_S = 0.02

# Mistakes for the runner to find; in the interpreter a kernel looks its helpers up each time it calls them.
PLANTS: dict[str, Callable[[], None]] = {
    "constant_epoch": lambda: setattr(signal, "end", bodies.end_without_counting),
    "single_slot": lambda: setattr(gemm_all_reduce, "tiles", bodies.with_a_single_slot()),
}


@dataclass
class Episode:
    """rounds: that were made. failed: the one that went wrong, None if none did; wrong: what did. counts: of calls by
    op, and of what disturbed them."""

    rounds: int = 0
    failed: Round | None = None
    wrong: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


def episode(
    rank: int, world_size: int, rounds: Sequence[Round], seconds: float, plant: str | None
) -> Episode:
    """Make `rounds` for `seconds`, on the same heaps, until one goes wrong. plant: a name of PLANTS."""
    ranks = _Ranks(rank, world_size, plant)
    for each in rounds:
        if ranks.found.failed is not None or ranks.over(seconds):
            break
        if wrong := ranks.make(each):
            ranks.found.failed, ranks.found.wrong = each, wrong
    return ranks.found


def shrink(rank: int, world_size: int, failed: Round, seconds: float, plant: str | None) -> Episode:
    """Make `failed` smaller for `seconds`: the smallest round found that still goes wrong, each on heaps of its own."""
    ranks = _Ranks(rank, world_size, plant)
    # What depends on who comes first need not show every time.
    candidates, smallest = [failed] * 3, Episode()
    while candidates and not ranks.over(seconds):
        candidate = candidates.pop(0)
        wrong = ranks.make(candidate)
        ranks.close()
        # A smaller call that an op refuses is no smaller case of one that it does not.
        if wrong and (smallest.failed is None or _refused(wrong) == _refused(smallest.wrong)):
            smallest.failed, smallest.wrong = candidate, wrong
            candidates = list(shrunk(candidate, world_size))
    return smallest


def _refused(wrong: list[str]) -> bool:
    return any(f": {kind}: " in text for text in wrong for kind in ("ValueError", "TypeError"))


class _Ranks:
    """This rank among those of an episode: the groups, their heaps, and how ranks compare notes."""

    def __init__(self, rank: int, world_size: int, plant: str | None) -> None:
        if plant is not None:
            PLANTS[plant]()
        self.rank, self.world_size, self.begin = rank, world_size, time.monotonic()
        self.members = groups_of(world_size)
        self.control = dist.new_group(backend="gloo")
        self.groups = [dist.new_group(each) for each in self.members]
        self.heaps: dict[int, Heap] = {}
        self.found = Episode()

    def over(self, seconds: float) -> bool:
        """Whether on any rank `seconds` have passed."""
        return any(self._tell(time.monotonic() - self.begin > seconds))

    def _tell(self, mine: Any) -> list[Any]:
        everyone: list[Any] = [None] * self.world_size
        dist.all_gather_object(everyone, mine, group=self.control)
        return everyone

    def make(self, each: Round) -> list[str]:
        """Make a round; what went wrong."""
        mine: tuple[list[str], list[Any]] = [], []
        members = self.members[each.group]
        if self.rank in members:
            if each.group not in self.heaps:
                self.heaps[each.group] = Heap(HEAP_BYTES, self.groups[each.group])
            player = _Player(each, self.heaps[each.group], self.found.counts)
            mine = player.play()
            self.heaps[each.group] = player.heap
        everyone = self._tell(mine)
        wrong = [f"rank {rank}: {text}" for rank, (texts, _) in enumerate(everyone) for text in texts]
        wrong += _different(each, [everyone[rank][1] for rank in members])
        self.found.rounds += 1
        return wrong

    def close(self) -> None:
        for heap in self.heaps.values():
            heap.close()
        self.heaps.clear()


def _different(each: Round, bits: list[list[tuple[int, str]]]) -> list[str]:
    """Results that should be the same on every rank, and are not."""
    wrong = []
    for number, same in enumerate(zip(*bits, strict=False)):
        op, facts = each.kinds[same[0][0]]
        if OPS[op].same(facts) and len(set(same)) > 1:
            wrong.append(f"result {number}, {op}: the ranks differ")
    return wrong


@contextlib.contextmanager
def _stalled(here: bool) -> Iterator[None]:
    """Inside, this rank dawdles between seeing a flag and using what it stands for."""
    honest = signal.wait
    if here and ON_CPU:
        bodies.stall_after_waits(_STALL_S)
    try:
        yield
    finally:
        signal.wait = honest


def _kept(result: torch.Tensor) -> torch.Tensor:
    """A copy, contiguous to the last stride."""
    return torch.empty(result.shape, dtype=result.dtype, device=result.device).copy_(result)


class _Player:
    """One rank's part of a round. wrong: what was, as text. bits: kind and digest of each result."""

    def __init__(self, each: Round, heap: Heap, counts: Counter[str]) -> None:
        self.round, self.heap, self.counts = each, heap, counts
        self.wrong: list[str] = []
        self.bits: list[tuple[int, str]] = []
        self.results: list[tuple[int, int, torch.Tensor]] = []
        self.device = heap.device
        self.streams: list[Any] = [None] * each.num_streams
        if self.device.type == "cuda" and each.num_streams > 1:
            self.streams = [torch.cuda.Stream(self.device) for _ in range(each.num_streams)]
        self.graph: torch.cuda.CUDAGraph | None = None
        self.captured: list[torch.Tensor] = []
        self.calls: list[list[Call]] = []

    def _make_calls(self) -> list[list[Call]]:
        """Of each stream, the calls of all kinds, with operands of their own."""
        calls = [[OPS[op].make(facts, self.heap) for op, facts in self.round.kinds] for _ in self.streams]
        self._wait_at_most(PATIENT_S)
        self.heap.synchronize()  # other streams go on from here
        return calls

    def _wait_at_most(self, seconds: float) -> None:
        workspace_for(self.heap).control[int(signal.BUDGET_US.value)] = int(seconds * 1e6)

    def play(self) -> tuple[list[str], list[tuple[int, str]]]:
        """(wrong, bits)."""
        try:
            with _stalled(self.round.stalled == self.heap.rank):
                self._play()
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)[-4:]
            places = ", ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames)
            self.wrong.append(f"{type(error).__name__}: {error} ({places})")
            self.heap.abort(self.wrong[-1])  # the others needn't wait for this rank
        return self.wrong, self.bits

    def _play(self) -> None:
        each = self.round
        self.calls = self._make_calls()
        for number, (kind, data) in enumerate(each.order):
            if each.cancelled is not None and number == each.cancelled[0]:
                # Once more: what other kinds have grown since, this one plans anew, with a vote, whose limit is longer.
                self._call(0, kind, data)
                self.heap.barrier()  # the short limit is for the missing rank, not for one that is late to come here
                self._cancelled(kind, data)
                break
            self._delay(each.delays_ms[number][self.heap.rank])
            if kind == GRAPH:
                self._replay(data)
            else:
                self._call(number % len(self.streams), kind, data)
        self.heap.synchronize()
        self._judge()
        for calls in self.calls:
            for call in calls:
                call.free()

    def _delay(self, milliseconds: int) -> None:
        if not milliseconds:
            return
        if self.device.type == "cuda":
            torch.cuda._sleep(milliseconds * 100_000)  # some 0.05 ms each, on the device
        else:
            time.sleep(milliseconds / 1e3)

    def _call(self, stream: int, kind: int, data: int) -> None:
        with torch.cuda.stream(self.streams[stream]) if self.streams[stream] else contextlib.nullcontext():
            self.calls[stream][kind].load(data)
            self.results.append((kind, data, _kept(self.calls[stream][kind].run())))
        self.counts[self.round.kinds[kind][0]] += 1

    def _replay(self, data: int) -> None:
        """All kinds once more, as one graph, captured when it is first needed."""
        calls = self.calls[0]
        if self.graph is None:
            # Once more outside: what one kind has grown, the kinds before it plan anew.
            for kind in range(len(calls)):
                self._call(0, kind, data)
            torch.cuda.synchronize(self.device)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                self.captured = [call.run() for call in calls]
        for call in calls:
            call.load(data)
        self.graph.replay()
        self.results += [(kind, data, _kept(out)) for kind, out in enumerate(self.captured)]
        self.counts["graph replay"] += 1

    def _cancelled(self, kind: int, data: int) -> None:
        """One rank makes no more calls: the others raise in time, it is told, then all go on."""
        assert self.round.cancelled is not None
        begin, missing = time.monotonic(), self.round.cancelled[1]
        if self.heap.rank == missing:
            while int(self.heap.system[0]) == 0 and time.monotonic() - begin < SHORT_S + SLACK_S:
                time.sleep(0.002)
        else:
            self._wait_at_most(SHORT_S)
            self.calls[0][kind].load(data)
            try:
                self.calls[0][kind].run()
                self.heap.synchronize()
                self.wrong.append(f"a call came through that rank {missing} did not make")
            except (PeerTimeout, PeerAborted) as error:
                if isinstance(error, PeerTimeout) and error.peer == self.heap.rank:
                    self.wrong.append(f"the fault names the rank itself: {error}")
        spent = time.monotonic() - begin
        if spent > SHORT_S + SLACK_S:
            self.wrong.append(
                f"it took {spent:.1f} s until this rank knew that rank {missing} stopped calling"
            )
        self.counts["cancelled"] += 1
        self._recover()

    def _recover(self) -> None:
        """A heap that works, and on it every kind once."""
        if self.round.new_heap:
            group = self.heap.group
            self.heap.close()
            self.heap = Heap(HEAP_BYTES, group)
        else:
            self.heap.recover()
            for calls in self.calls:
                for call in calls:
                    call.free()
        self.calls = self._make_calls()
        for kind in range(len(self.round.kinds)):
            self._call(0, kind, 1000 + kind)

    def _judge(self) -> None:
        for number, (kind, data, result) in enumerate(self.results):
            self.bits.append((kind, digest(result)))
            if error := self.calls[0][kind].judge(data, result):
                self.wrong.append(f"call {number}, {self.round.kinds[kind][0]}: {error}")

"""Timelines: which program did what when, of calls on all ranks.

    with stream_k.timeline.record(heap) as recorder:
        stream_k.gemm_all_reduce(a, b, group=heap, out=out)     # plans and compiles
        recorder.restart()                                      # forgets that; lines the ranks up
        stream_k.gemm_all_reduce(a, b, group=heap, out=out)
    recorder.timeline.exposed_us
    timeline_files.write(recorder.timeline, Path("out.json"))    # for Perfetto; and out.png

Calls made inside are calls of their own, whose kernels mark their stages (`pyrocshmem.trace`): planned anew, a
little slower. Calls made outside run kernels that know nothing of it. Copies of the copy engine have no program:
the stream's events before and after tell when they ran, a few microseconds less exactly.

Each rank's clock is set against rank 0's by barriers, marked before and after, in each of which another rank
comes last. Nobody leaves one before everybody has entered it, so each bounds the difference from both sides.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from pyrocshmem import signal, status, target, trace
from pyrocshmem.calls.call_name import CallName
from pyrocshmem.calls.kernel_launch import Launch
from pyrocshmem.calls.planned import run
from pyrocshmem.calls.workspace import Workspace, find_workspace
from pyrocshmem.heap import Heap

COPY = "copy"
MMA = trace.STAGES[trace.MMA.value]

_ROW_WORDS, _MAX_EVENTS = trace.ROW_WORDS.value, trace.MAX_EVENTS.value
_CHUNK_WORDS = 8 << 20
_ROUNDS_A_RANK = 6
_LATE_S = 0.0005
# About 2 ms in which the host enqueues the next call.
_SLEEP_CYCLES = 4_000_000
_OP = tl.constexpr(int(status.Op.BARRIER))

# Names of kernels in a timeline, where they have others.
_KERNELS = {
    "stream_k_kernel": "GEMM",
    "gemm_kernel": "GEMM",
    "sum_parts_kernel": "sums of parts",
    "sum_rows": "GEMM + sums",
    "sum_blocks_kernel": "sums",
    "step_kernel": "stream",
    "consumer_kernel": "consumer",
    "gate_kernel": "gate",
    "pull_kernel": "pulls",
    "copy_kernel": "copies",
    "exchange_kernel": "exchange",
    "rms_norm_kernel": "norm",
}

# (kernel, lane, stage, tile, begin, end), in nanoseconds of the rank's own clock.
_RawSpan = tuple[str, int, str, int, int, int]


class Span(NamedTuple):
    """A stage of a program, a copy, or a library's product. kernel, lane: the kernel's short name and the program's
    number, or "stream" or "BLAS" and the number of the stream whose steps and copies, or products, these are. tile:
    what `trace.mark` was told, -1: none.
    begin_us, end_us: microseconds since the first span of any rank."""

    rank: int
    kernel: str
    lane: int
    stage: str
    tile: int
    begin_us: float
    end_us: float


@dataclass(frozen=True)
class Timeline:
    """What was recorded, on all ranks.

    clock_error_us: how far the clocks of two ranks may be apart. dropped: stages that did not fit.
    """

    spans: tuple[Span, ...]
    clock_error_us: float
    dropped: int

    @property
    def total_us(self) -> float:
        """From the first span's begin to the last one's end."""
        return max((span.end_us for span in self.spans), default=0.0)

    @property
    def exposed_us(self) -> float:
        """Exposed communication: the time in which no program multiplies, before the last product ended and after,
        from a rank's first span to its last; of the rank that has most of it."""
        ranks = {span.rank for span in self.spans}
        return max(
            (_idle_us([span for span in self.spans if span.rank == rank]) for rank in ranks), default=0.0
        )


def _idle_us(spans: list[Span]) -> float:
    """Time between the first begin and the last end of one rank's spans that no product covers."""
    at = begin = min(span.begin_us for span in spans)
    idle = 0.0
    for first, last in sorted((span.begin_us, span.end_us) for span in spans if span.stage == MMA):
        idle += max(0.0, first - at)
        at = max(at, last)
    end = max(span.end_us for span in spans)
    assert begin <= at <= end
    return idle + end - at


@triton.jit
def meet_kernel(context, events, WORLD: tl.constexpr):
    """A barrier of all ranks, one program each, marked before and after."""
    epoch = signal.begin(context, True, WORLD)
    trace.mark(events, trace.WAIT, -1)
    signal.barrier(epoch, context, _OP, WORLD)
    trace.mark(events, trace.END, -1)
    signal.end(context, epoch)


def clock_offset(ours: np.ndarray, theirs: np.ndarray) -> tuple[int, int]:
    """(how far our clock is ahead of theirs, by how much that may be wrong), in nanoseconds.

    ours, theirs: int64 [rounds, 2]: when each entered and left the same barriers, by its own clock.
    """
    lowest = int((ours[:, 0] - theirs[:, 1]).max())
    highest = int((ours[:, 1] - theirs[:, 0]).min())
    return (lowest + highest) // 2, (highest - lowest + 1) // 2


@dataclass(frozen=True)
class _Launched:
    kernel: str
    stores: str
    stream: int
    events: torch.Tensor


@dataclass(frozen=True)
class _Timed:
    """What is none of our kernels; begin, end: CUDA events, on a CPU nanoseconds."""

    kernel: str
    stage: str
    stream: int
    begin: Any
    end: Any


class Recorder:
    """Hands out the buffers of a recording on this rank. `timeline`: what came out, once the recording has ended."""

    timeline: Timeline

    def __init__(self, heap: Heap, workspace: Workspace) -> None:
        self.heap, self._workspace = heap, workspace
        self._on_gpu = heap.device.type == "cuda"
        self._records: list[_Launched | _Timed] = []
        self._chunks = [self._new_chunk(_CHUNK_WORDS)]
        self._chunk, self._used = 0, 0
        self.sample = self._chunks[0]

    def _new_chunk(self, words: int) -> torch.Tensor:
        return torch.zeros(words, dtype=torch.int64, device=self.heap.device)

    def _stream(self) -> int:
        return torch.cuda.current_stream(self.heap.device).cuda_stream if self._on_gpu else 0

    def _now(self) -> Any:
        """A CUDA event on the current stream; on a CPU nanoseconds."""
        if not self._on_gpu:
            return time.monotonic_ns()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def events(self, launch: Launch) -> torch.Tensor:
        """int64 [programs, ROW_WORDS], zeros, for a launch that comes next on the current stream."""
        programs = launch.grid[0]
        words = programs * _ROW_WORDS
        if self._used + words > self._chunks[self._chunk].numel():
            self._chunk, self._used = self._chunk + 1, 0
            if self._chunk == len(self._chunks):
                self._chunks.append(self._new_chunk(max(words, _CHUNK_WORDS)))
            elif self._chunks[self._chunk].numel() < words:
                self._chunks[self._chunk] = self._new_chunk(words)
        events = self._chunks[self._chunk][self._used :][:words].view(programs, _ROW_WORDS)
        # Compiled for addresses that 16 divides.
        self._used += words + words % 2
        epilogue = launch.constants.get("EPILOGUE")
        # Epilogues that do more than store are named so.
        name = "" if epilogue is None else epilogue.fn.__name__
        sums = name.startswith("sum")
        stores = "push" if name.startswith("push") else "reduce" if sums else "store"
        # The product with the sums has programs of the same numbers as the one before it, which may not have ended.
        kernel = name if sums else launch.kernel.fn.__name__
        self._records.append(_Launched(kernel, stores, self._stream(), events))
        return events

    def copy(self, copy: Callable[[torch.Tensor], object], argument: torch.Tensor) -> None:
        """`copy(argument)`, recorded."""
        self._time("stream", COPY, lambda: copy(argument))

    def product(self, multiply: Callable[[], object]) -> None:
        """`multiply()`, recorded."""
        self._time("BLAS", MMA, multiply)

    def _time(self, kernel: str, stage: str, enqueue: Callable[[], object]) -> None:
        begin = self._now()
        enqueue()
        self._records.append(_Timed(kernel, stage, self._stream(), begin, self._now()))

    def restart(self) -> None:
        """Forget what was recorded, and line the ranks up on the device for the call that comes next. Collective;
        waits for the device."""
        self.heap.synchronize()
        self._forget()
        if self._on_gpu:
            torch.cuda._sleep(_SLEEP_CYCLES)
        # Ties the clock of events to that of the kernels.
        self._met, self._met_event = self._meet(), self._now()
        self._records.clear()

    def _forget(self) -> None:
        for i, chunk in enumerate(self._chunks[: self._chunk + 1]):
            (chunk if i < self._chunk else chunk[: self._used]).zero_()
        self._chunk, self._used = 0, 0
        self._records.clear()

    def _meet(self) -> torch.Tensor:
        """Enqueue a barrier; its events."""
        workspace, world = self._workspace, self.heap.world_size
        run(workspace, "meet", CallName("meet"), meet_kernel, {"WORLD": world}, 1, (workspace.context,))
        last = self._records[-1]
        assert isinstance(last, _Launched)
        return last.events

    def align(self) -> tuple[int, int]:
        """(nanoseconds that this rank's clock is ahead of rank 0's, the largest error of any rank's). Collective."""
        heap = self.heap
        times = []
        for turn in range(_ROUNDS_A_RANK * heap.world_size):
            if turn % heap.world_size == heap.rank:
                time.sleep(_LATE_S)
            events = self._meet()
            heap.synchronize()
            times.append(events[0, [1, 3]].tolist())
        self._forget()
        mine = np.array(times, dtype=np.int64)
        of_ranks = [np.frombuffer(x, np.int64).reshape(-1, 2) for x in heap.vote("clocks", mine.tobytes())]
        found = [clock_offset(theirs, of_ranks[0]) for theirs in of_ranks]
        return found[heap.rank][0], max((error for _, error in found[1:]), default=0)

    def collect(self, ahead_ns: int, error_ns: int) -> Timeline:
        """What all ranks recorded, by the clock of rank 0. Collective; waits for the device."""
        self.heap.synchronize()
        spans: list[_RawSpan] = []
        dropped = 0
        streams = {
            stream: i for i, stream in enumerate(dict.fromkeys(record.stream for record in self._records))
        }
        for record in self._records:
            stream = streams[record.stream]
            if isinstance(record, _Timed):
                begin, end = self._nanoseconds(record.begin), self._nanoseconds(record.end)
                spans.append((record.kernel, stream, record.stage, -1, begin, end))
                continue
            rows = record.events.cpu().numpy()
            dropped += int(np.maximum(rows[:, 0] - _MAX_EVENTS, 0).sum())
            for program, row in enumerate(rows):
                lane = stream if record.kernel == "step_kernel" else program
                spans += _spans_of(row, _KERNELS.get(record.kernel, record.kernel), lane, record.stores)
        mine = json.dumps([[*span[:4], span[4] - ahead_ns, span[5] - ahead_ns] for span in spans])
        return _joined(self.heap.vote("timeline", f"{dropped} {mine}".encode()), error_ns)

    def _nanoseconds(self, moment: Any) -> int:
        """A moment of `_now` by the kernels' clock."""
        if not self._on_gpu:
            return moment
        return int(self._met[0, 3].item()) + int(self._met_event.elapsed_time(moment) * 1e6)


def _spans_of(row: np.ndarray, kernel: str, lane: int, stores: str) -> Iterator[_RawSpan]:
    """The stages of one program, from the marks in `row`. stores: what its stage "store" is."""
    count = min(int(row[0]), _MAX_EVENTS)
    marks = row[1 : 1 + 2 * count].reshape(-1, 2).tolist()
    for (begin, what), (end, _) in pairwise(marks):
        stage = trace.STAGES[what % 256]
        if stage != "end":
            yield kernel, lane, stores if stage == "store" else stage, what // 256 - 1, begin, end


def _joined(payloads: Iterable[bytes], error_ns: int) -> Timeline:
    found: list[tuple[int, _RawSpan]] = []
    dropped = 0
    for rank, payload in enumerate(payloads):
        lost, text = payload.decode().split(" ", 1)
        dropped += int(lost)
        found += [(rank, tuple(span)) for span in json.loads(text)]
    start = min((begin for _, (*_, begin, _) in found), default=0)
    spans = tuple(
        Span(rank, kernel, lane, stage, tile, (begin - start) / 1e3, (end - start) / 1e3)
        for rank, (kernel, lane, stage, tile, begin, end) in found
    )
    return Timeline(spans, error_ns / 1e3, dropped)


@contextmanager
def record(group: Any = None, workspace: Workspace | None = None) -> Iterator[Recorder]:
    """Record the calls that this thread makes inside; collective over `group` at both ends.

    group: a Heap, ProcessGroup, DeviceMesh; None: the default process group. workspace: whose barriers align the
    clocks; None: the heap's own. Not for calls in a captured graph. Raises ValueError inside another recording, and
    what the ops raise.
    """
    heap, workspace = find_workspace(group, workspace)
    if workspace.hosts is not None:
        raise ValueError(f"{workspace.hosts!r}: a timeline is of one host")
    recorder = Recorder(heap, workspace)
    with trace.recording(recorder):
        # The ranks of the CPU target have one clock, which barriers of milliseconds would only blur.
        clocks = (0, 0) if target.interpreted() else recorder.align()
        recorder.restart()
        yield recorder
        recorder.timeline = recorder.collect(*clocks)


def record_call(call: Callable[[], object], group: Any = None) -> Timeline:
    """The timeline of one `call`, made three times: to plan it, to warm up, and to be recorded."""
    with record(group) as recorder:
        for _ in range(2):
            call()
        recorder.restart()
        call()
    return recorder.timeline

"""Measuring calls of several providers in turn, on all ranks together: the one harness of the command lines, the
benchmarks and the tuning.

    meter = Meter(device, lined_up=num_ranks > 1)
    samples = meter.in_turn({"ours": ours, "reference": theirs}, 30)     # of `Run`s that have been called once
    samples.seconds["ours"]

Per sample on a GPU: poison the output, flush the L2 cache, keep the device busy while the host enqueues (a sample then
holds no host time; for longer where that was too short), line the ranks up by a tiny all-reduce, then start event,
call, end event. The spin comes before the all-reduce: GPUs' clocks differ, and a spin after it would put the ranks out
of step again. A sample is this rank's own; the time of a call is the largest of all ranks
(`reference.report.slowest`). On a CPU: wall clock.
A call of microseconds is timed as a share of many in a graph (`repeated`), which the host can't hold up.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist

# Written before each timed call so that operands don't wait in the L2 cache of a GPU (60 MB on an H200).
_FLUSH_BYTES = 256 << 20
# About 1.5 ms: eager ops take the host up to 0.5 ms between two ranks, 1 ms between eight. For what takes it longer, as
# the launch of a large graph may, the spin is up to so many times as long.
_BUSY_CYCLES, _MOST_BUSY = 3_000_000, 8
WARM_UP_SECONDS = 0.5
_WARM_UP_ROUNDS = 3
# Providers that are timed less often take part in every third round, in which the GPU's clock is read, too.
_SELDOM_ROUNDS = 3
# Runs of ours whose bits are compared, on GPUs; the interpreter has time for no more than are timed.
_RUNS_COMPARED = 20

# Calls of a graph read copies of B in turn, so that B comes from memory and not from L2: copies of so many bytes lie
# between two readings of one. At least twice the L2 of any GPU here (H200: 60 MB).
COLD_BYTES = 128 << 20

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# In place of NaN.
_POISON = 113
_CHECKSUM_COLUMNS = 1024


@dataclass
class Run:
    """A call that is ready to be measured.

    function: the call; what it returns is the output where `returns`, else it writes `out`. prepare: before each call,
    instead of poisoning the output: for calls that work in place. as_result: makes the output the result.
    """

    function: Callable[[], Any]
    out: torch.Tensor | None
    prepare: Callable[[], None] | None = None
    as_result: Callable[[torch.Tensor], torch.Tensor] | None = None
    returns: bool = False

    def call(self) -> None:
        """One call."""
        made = self.function()
        if self.returns:
            self.out = made

    def reset(self) -> None:
        """Poison the output, or bring the input of a call in place back."""
        if self.prepare is not None:
            self.prepare()
        elif self.out is not None:
            poison(self.out)

    def result(self) -> torch.Tensor:
        """The output, in the layout of the op's result."""
        assert self.out is not None
        return self.as_result(self.out) if self.as_result is not None else self.out

    def checksum(self) -> torch.Tensor | None:
        """An int64 on the device, alike for equal bits of the output; None where nothing is written here, or what
        is there depends on the calls before (`prepare`).

        Words are summed by rows and by columns of a grid, weighted by their place: two errors that make up for one
        another would have to share both.
        """
        if self.out is None or self.prepare is not None:
            return None
        words = self.out.reshape(-1).view(_WORDS[self.out.element_size()])
        width = math.gcd(words.numel(), _CHECKSUM_COLUMNS)
        grid = words.view(words.numel() // width, width)
        found = torch.zeros((), dtype=torch.int64, device=words.device)
        for sums in (grid.sum(dim, dtype=torch.int64) for dim in (0, 1)):
            found += (sums * torch.arange(1, sums.numel() + 1, device=words.device)).sum()
        return found


def poison(x: torch.Tensor) -> None:
    """Fill `x` with what no result is full of."""
    x.fill_(float("nan") if x.dtype.is_floating_point else _POISON)


class Clock(Protocol):
    """A GPU's own."""

    def now(self) -> tuple[float, float] | None:
        """(MHz, W); None: not known."""


@dataclass
class Samples:
    """What a rank saw of each provider. seconds: of each sample. clocks: (MHz, W) after some of them, on its GPU.
    checksums: of ours, one a run."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    clocks: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    checksums: dict[str, list[int]] = field(default_factory=dict)


class Meter:
    """Takes the samples of a rank. lined_up: whether ranks start each sample together. clock: of the GPU.

    Where it is cold, the first samples are preceded by WARM_UP_SECONDS of their own calls; the device stays busy from
    then on, and later ones start with a few calls of each provider. On a CPU nothing has to warm up.
    """

    def __init__(
        self, device: torch.device, lined_up: bool, clock: Clock | None = None, *, cold: bool = True
    ) -> None:
        self.device, self.on_gpu = device, device.type == "cuda"
        self.flush = torch.empty(_FLUSH_BYTES if self.on_gpu else 0, dtype=torch.uint8, device=device)
        self.token = torch.zeros(1, device=device) if lined_up else None
        self.clock, self.cold = clock, cold
        self.busy_cycles = _BUSY_CYCLES

    def sample(self, call: Callable[[], object], reset: Callable[[], object]) -> float:
        """Seconds of one call on this rank."""
        reset()
        self.flush.fill_(1)
        if self.on_gpu:
            torch.cuda.synchronize(self.device)
            torch.cuda._sleep(self.busy_cycles)
        if self.token is not None:
            dist.all_reduce(self.token)
        if not self.on_gpu:
            begin = time.perf_counter()
            call()
            return time.perf_counter() - begin
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        if start.query():
            # The device got there first, so this sample holds host time: later ones, of which warming up takes some
            # before any counts, begin later.
            self.busy_cycles = min(2 * self.busy_cycles, _MOST_BUSY * _BUSY_CYCLES)
        end.record()
        torch.cuda.synchronize(self.device)
        return start.elapsed_time(end) / 1e3

    def in_turn(
        self,
        runs: Mapping[str, Run],
        iters: int,
        calls: Mapping[str, Callable[[], object]] | None = None,
        *,
        seldom: Collection[str] = (),
        compared: Collection[str] = (),
    ) -> Samples:
        """`iters` samples of each provider, A B C A B C.

        calls: what a sample calls, where that is not `Run.call`: the replay of a graph. seldom: providers that take
        part in every third round only. compared: those whose results are compared bit by bit from run to run.
        """
        calls = calls if calls is not None else {name: run.call for name, run in runs.items()}
        self.busy_cycles = _BUSY_CYCLES
        found = Samples({name: [] for name in calls}, {name: [] for name in calls})
        bits: dict[str, list[torch.Tensor]] = {}
        for i in range(-self._num_warm_up_rounds(calls, runs), iters):
            for name, call in calls.items():
                if name in seldom and i % _SELDOM_ROUNDS:
                    continue
                seconds = self.sample(call, runs[name].reset)
                if i < 0:
                    continue
                found.seconds[name].append(seconds)
                if self.clock is not None and i % _SELDOM_ROUNDS == 0:
                    seen = self.clock.now()
                    found.clocks[name] += [seen] if seen is not None else []
                if name in compared:
                    _note_bits(name, runs[name], bits)
        for name in bits if self.on_gpu else ():
            for _ in range(_RUNS_COMPARED - len(bits[name])):
                runs[name].reset()
                calls[name]()
                _note_bits(name, runs[name], bits)
        found.checksums = {name: [int(x) for x in torch.stack(each).tolist()] for name, each in bits.items()}
        return found

    def _num_warm_up_rounds(self, calls: Mapping[str, Callable[[], object]], runs: Mapping[str, Run]) -> int:
        if not self.on_gpu:
            return 0
        if not self.cold:
            return _WARM_UP_ROUNDS
        self.cold = False
        begin = time.perf_counter()
        for name, call in calls.items():
            self.sample(call, runs[name].reset)
        spent = torch.tensor(time.perf_counter() - begin, device=self.device)
        if self.token is not None:
            # The same number of rounds on all ranks.
            dist.all_reduce(spent, op=dist.ReduceOp.MIN)
        return max(_WARM_UP_ROUNDS, round(WARM_UP_SECONDS / float(spent)))


def _note_bits(name: str, run: Run, bits: dict[str, list[torch.Tensor]]) -> None:
    if (found := run.checksum()) is not None:
        bits.setdefault(name, []).append(found)


def time_in_turn(
    calls: Mapping[str, tuple[Callable[[], object], torch.Tensor]], iters: int, device: torch.device
) -> dict[str, tuple[float, ...]]:
    """Seconds on this rank of `iters` calls of each provider, in turn, after a few: for many short measurements.

    calls: by name, the call and the tensor that it writes, which holds NaN before each. All ranks of the
    default process group, where there is one, time the same calls, each of which they have made once.
    """
    meter = Meter(device, lined_up=dist.is_initialized(), cold=False)
    samples = meter.in_turn({name: Run(call, out) for name, (call, out) in calls.items()}, iters)
    return {name: tuple(seconds) for name, seconds in samples.seconds.items()}


def repeated(call: Callable[[], object], calls: int) -> Callable[[], None]:
    """The replay of a CUDA graph of `calls` calls. One more is made before, on the stream of the capture: it loads
    what the call launches."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Not torch.cuda.graph, which collects garbage first: a tenth of a second in each of a thousand captures.
    with torch.cuda.stream(stream):
        # Other threads (NCCL's watchdog) may query events meanwhile.
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for _ in range(calls):
                call()
        except Exception:
            # It fails too, by then; the first error is the one that tells.
            with contextlib.suppress(RuntimeError):
                graph.capture_end()
            raise
        graph.capture_end()
    return graph.replay


def cold_copies(b: torch.Tensor, calls: int) -> list[torch.Tensor]:
    """`b` and copies of it, which the `calls` calls of a graph are to read in turn."""
    copies = COLD_BYTES // max(b.nbytes, 1) + 1
    return [b, *(b.clone() for _ in range(min(copies, calls - 1)))]


def host_seconds(call: Callable[[], object], calls: int, device: torch.device) -> float:
    """Mean seconds that the host spends in one of `calls` calls in a row, none of which it waits for."""
    call()
    torch.cuda.synchronize(device)
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    spent = (time.perf_counter() - begin) / calls
    torch.cuda.synchronize(device)
    return spent

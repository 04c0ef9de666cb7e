"""A rank's clock: samples of providers in turn, with the GPU's own clock and the bits of the results beside them.

A sample, on a GPU: poison the output, flush the L2 cache, keep the device busy while the host enqueues, line the
ranks up by a tiny all-reduce, start event, call, end event. On a CPU: wall clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from pyrocshmem.benchmarks import providers
from pyrocshmem.benchmarks.clocks import Clocks
from pyrocshmem.benchmarks.provider import Run

WARM_UP_SECONDS = 0.5
_WARM_UP_CALLS = 3
_FLUSH_BYTES = 256 << 20
_BUSY_CYCLES = 1_000_000  # about 0.5 ms: PyTorch's fused ops take the host nearly that long
_VARIANT_ROUNDS = 3
# Runs of ours whose bits are compared, on GPUs; the interpreter has time for no more than are timed.
_RUNS_COMPARED = 20


@dataclass
class Samples:
    """What a rank saw of each provider. seconds: of each sample. clocks: (MHz, W) after some of them, on its GPU.
    checksums: of ours, one a run."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    clocks: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    checksums: dict[str, list[int]] = field(default_factory=dict)


class Meter:
    """Takes the samples of a rank. lined_up: whether ranks start each sample together.

    The first case is preceded by WARM_UP_SECONDS of its own calls; the device stays busy from then on, and later
    cases start with a few calls of each provider.
    """

    def __init__(self, device: torch.device, lined_up: bool) -> None:
        self.device, self.on_gpu = device, device.type == "cuda"
        self.flush = torch.empty(_FLUSH_BYTES if self.on_gpu else 0, dtype=torch.uint8, device=device)
        self.token = torch.zeros(1, device=device) if lined_up else None
        self.clocks = Clocks(device)
        self.cold = True

    def sample(self, call: Callable[[], object], reset: Callable[[], None]) -> float:
        """Seconds of one call on this rank."""
        reset()
        self.flush.fill_(1)
        if self.on_gpu:
            torch.cuda.synchronize(self.device)
            torch.cuda._sleep(_BUSY_CYCLES)
        if self.token is not None:
            dist.all_reduce(self.token)
        if not self.on_gpu:
            begin = time.perf_counter()
            call()
            return time.perf_counter() - begin
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        torch.cuda.synchronize(self.device)
        return start.elapsed_time(end) / 1e3

    def in_turn(self, calls: dict[str, Callable[[], object]], runs: dict[str, Run], iters: int) -> Samples:
        """`iters` samples of each provider, A B C A B C; variants take part in every third round, in which the GPU's
        clock is read after each sample."""
        found = Samples({name: [] for name in calls}, {name: [] for name in calls})
        bits: dict[str, list[torch.Tensor]] = {}
        warm = self._num_warm_up_rounds(calls, runs)
        for i in range(-warm, iters):
            for name, call in calls.items():
                if name in providers.VARIANTS and i % _VARIANT_ROUNDS:
                    continue
                seconds = self.sample(call, runs[name].reset)
                if i < 0:
                    continue
                found.seconds[name].append(seconds)
                if i % _VARIANT_ROUNDS == 0 and (reading := self.clocks.now()) is not None:
                    found.clocks[name].append(reading)
                _note_bits(name, runs[name], bits)
        for name in bits if self.on_gpu else ():
            for _ in range(_RUNS_COMPARED - len(bits[name])):
                runs[name].reset()
                calls[name]()
                _note_bits(name, runs[name], bits)
        found.checksums = {name: [int(x) for x in torch.stack(each).tolist()] for name, each in bits.items()}
        return found

    def _num_warm_up_rounds(self, calls: dict[str, Callable[[], object]], runs: dict[str, Run]) -> int:
        if not self.on_gpu:
            return 0
        if not self.cold:
            return _WARM_UP_CALLS
        self.cold = False
        begin = time.perf_counter()
        for name, call in calls.items():
            self.sample(call, runs[name].reset)
        spent = torch.tensor(time.perf_counter() - begin)
        if self.token is not None:
            # The same number of rounds on all ranks.
            dist.all_reduce(spent, op=dist.ReduceOp.MIN)
        return max(_WARM_UP_CALLS, round(WARM_UP_SECONDS / float(spent)))


def _note_bits(name: str, run: Run, bits: dict[str, list[torch.Tensor]]) -> None:
    if name.startswith("ours") and (found := run.checksum()) is not None:
        bits.setdefault(name, []).append(found)

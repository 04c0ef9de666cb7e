"""Timing calls of several providers in turn, on all ranks together.

    seconds = time_in_turn({"ours": (ours, out), "reference": (theirs, expected)}, 20, device)

Per sample on a GPU: poison the provider's output, flush the L2 cache, keep the device busy while the host
enqueues, line the ranks up by a tiny all-reduce, then start event, call, end event. A sample is this rank's
own; the time of a call is the largest of all ranks (`reference.report.slowest`). On a CPU: wall clock.
A call of microseconds is timed as a share of many in a graph (`repeated`), which the host can't hold up.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

Calls = Mapping[str, tuple[Callable[[], object], torch.Tensor]]

# Written before each timed call so that operands don't wait in the L2 cache of a GPU (60 MB on an H200).
_FLUSH_BYTES = 256 << 20
_SLEEP_CYCLES = 1_000_000  # about 0.5 ms
_GPU_WARM_UP, _CPU_WARM_UP = 3, 1

# Calls of a graph read copies of B in turn, so that B comes from memory and not from L2: copies of so many bytes lie
# between two readings of one. At least twice the L2 of any GPU here (H200: 60 MB).
COLD_BYTES = 128 << 20


def time_in_turn(
    calls: Calls, iters: int, device: torch.device, say: Callable[[str], object] = lambda text: None
) -> dict[str, tuple[float, ...]]:
    """Seconds on this rank of `iters` calls of each provider, in turn (A B A B ...), after a warm-up.

    calls: by name, the call and the tensor that it writes, which holds NaN before each. All ranks of the
    default process group, where there is one, time the same calls. say: is told what begins.
    """
    on_gpu = device.type == "cuda"
    flush = torch.empty(_FLUSH_BYTES if on_gpu else 0, dtype=torch.uint8, device=device)
    token = torch.zeros(1, device=device)
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    say("compiling, warming up" if on_gpu else "warming up")
    for i in range(-(_GPU_WARM_UP if on_gpu else _CPU_WARM_UP), iters):
        if i == 0:
            say(f"timing {iters} calls of {' and '.join(calls)}")
        for name, (call, out) in calls.items():
            out.fill_(float("nan"))
            flush.fill_(i & 1)
            if on_gpu:
                torch.cuda.synchronize(device)
                # While this runs the host enqueues what follows: the sample then holds no host time.
                torch.cuda._sleep(_SLEEP_CYCLES)
            if dist.is_initialized():
                dist.all_reduce(token)
            spent = _time_on_gpu(call, device) if on_gpu else _time_on_cpu(call)
            if i >= 0:
                seconds[name].append(spent)
    return {name: tuple(samples) for name, samples in seconds.items()}


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


def _time_on_gpu(call: Callable[[], object], device: torch.device) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize(device)
    return begin.elapsed_time(end) / 1e3


def _time_on_cpu(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin

"""Measuring cases on a rank: providers in turn, on the same tensors, checked afterwards.

    for case, record in measure_cases(cases, names, iters, heap, device): ...     # on every rank

A sample, on a GPU: poison the output, flush the L2 cache, keep the device busy while the host enqueues, line the
ranks up by a tiny all-reduce, start event, call, end event. `graph` cases replay a CUDA graph of several calls
(`shapes.graph_calls`) instead of one call, and count its share. On a CPU: wall clock.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import check, providers
from benchmarks.operands import Operands
from benchmarks.provider import Run, Unavailable
from benchmarks.shapes import LINK_BYTES_PER_S, TIMED, Case, graph_calls
from reference.timing import host_seconds

WARM_UP_SECONDS = 0.5
_WARM_UP_CALLS = 3
_FLUSH_BYTES = 256 << 20
_BUSY_CYCLES = 1_000_000  # about 0.5 ms: PyTorch's fused ops take the host nearly that long
_HOST_CALLS = 20
_VARIANT_ROUNDS = 3


class Meter:
    """A rank's clock. lined_up: whether ranks start each sample together.

    The first case is preceded by WARM_UP_SECONDS of its own calls; the device stays busy from then on, and later
    cases start with a few calls of each provider.
    """

    def __init__(self, device: torch.device, lined_up: bool) -> None:
        self.device, self.on_gpu = device, device.type == "cuda"
        self.flush = torch.empty(_FLUSH_BYTES if self.on_gpu else 0, dtype=torch.uint8, device=device)
        self.token = torch.zeros(1, device=device) if lined_up else None
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

    def in_turn(
        self, calls: dict[str, Callable[[], object]], runs: dict[str, Run], iters: int
    ) -> dict[str, Any]:
        """Seconds of `iters` calls of each provider, A B C A B C; variants take part in every third round."""
        found: dict[str, list[float]] = {name: [] for name in calls}
        warm = self._num_warm_up_rounds(calls, runs)
        for i in range(-warm, iters):
            for name, call in calls.items():
                if name in providers.VARIANTS and i % _VARIANT_ROUNDS:
                    continue
                seconds = self.sample(call, runs[name].reset)
                if i >= 0:
                    found[name].append(seconds)
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


def measure_cases(
    cases: list[Case], names: tuple[str, ...] | None, iters: int, heap: Any, device: torch.device
) -> Iterator[tuple[Case, dict[str, Any]]]:
    """Measure `cases`, all of one op; on every rank, each case with its record.

    heap: of the ranks that run a case together. None: cases of one rank, which the ranks of the default
    process group share out among themselves, one each at a time. names: of providers; None: all.
    """
    together = heap is not None
    rank, ranks = dist.get_rank(), dist.get_world_size()
    meter = Meter(device, lined_up=together and ranks > 1)
    step = 1 if together else ranks
    for first in range(0, len(cases), step):
        batch = cases[first : first + step]
        mine = batch[0] if together else batch[rank] if rank < len(batch) else None
        parts: list[Any] = [None] * ranks
        dist.all_gather_object(parts, mine and _measure(mine, names, iters, heap, meter))
        if together:
            yield batch[0], merged(parts)
        else:
            yield from ((case, merged([part])) for case, part in zip(batch, parts, strict=False))


class Table:
    """The providers of a case: those that are ready, and why the others are not. Collective.

    makers: by name, what makes a provider's run and calls it once. ranks: that run the case together.
    """

    def __init__(self, makers: Mapping[str, Callable[[], Run]], case: Case, ranks: int) -> None:
        self.ranks = ranks
        self.runs: dict[str, Run] = {}
        self.calls: dict[str, Callable[[], object]] = {}
        self.skipped: dict[str, str] = {}
        self.failed: dict[str, str] = {}
        for name, make in makers.items():
            self._try(name, self.runs, make)
        # When all have been called once: a workspace that one of them grew is planned anew by the others.
        for name, run in list(self.runs.items()):
            self._try(name, self.calls, partial(_call_of, run, case))
            if name not in self.calls:
                _close(self.runs.pop(name))

    def _try(self, name: str, table: dict[str, Any], make: Callable[[], Any]) -> None:
        """Put what `make` gives into `table`, unless any rank has a reason against it."""
        made, reason, fault = None, "", False
        try:
            made = make()
        except Unavailable as error:
            reason = str(error)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            # A variant may refuse what it is not made for, before it launches anything; the default may not.
            fault = name.startswith("ours") and not (isinstance(error, ValueError) and name != "ours")
        found: list[Any] = [(reason, fault)]
        if self.ranks > 1:
            found = [None] * self.ranks
            dist.all_gather_object(found, (reason, fault))
        reasons = [reason for reason, _ in found if reason]
        if not reasons:
            table[name] = made
            return
        if isinstance(made, Run):
            _close(made)
        (self.failed if any(fault for _, fault in found) else self.skipped)[name] = reasons[0]

    def close(self) -> None:
        """Graphs first: they refer to what the runs hold, and these to the operands."""
        self.calls.clear()
        for run in self.runs.values():
            _close(run)
        self.runs.clear()


def _measure(
    case: Case, names: tuple[str, ...] | None, iters: int, heap: Any, meter: Meter
) -> dict[str, Any]:
    """This rank's part of the record of a case."""
    operands = Operands(case, heap, meter.device)
    makers = {
        name: partial(_ready, name, operands)
        for name in providers.providers_of(case.op)
        if names is None or name in names
    }
    table = Table(makers, case, operands.ranks)
    runs = table.runs
    begin = time.time()
    seconds = meter.in_turn(table.calls, runs, iters)
    end = time.time()
    if heap is not None:
        heap.synchronize()
    # A call in place has gone through its data many times in a graph: the check is of one more call.
    for run in runs.values():
        if run.prepare is not None:
            run.prepare()
            run.call()
    truths = {what: operands.truth(what) for what in sorted({run.what for run in runs.values()})}
    errors = {name: check.error_of(run, truths[run.what], operands.ranks) for name, run in runs.items()}
    host = {}
    if meter.on_gpu and "ours" in runs:
        host["ours"] = 1e6 * host_seconds(runs["ours"].call, _HOST_CALLS, meter.device)
    configs = {name: _plain(run.config) for name, run in runs.items() if run.config is not None}
    table.close()
    part = part_of(case, meter.device, table, seconds, host, errors, configs, (begin, end))
    return part | {"weights": operands.num_weights}


def part_of(
    case: Case,
    device: torch.device,
    table: Table,
    seconds: dict[str, list[float]],
    host_us: dict[str, float],
    errors: dict[str, Any],
    configs: dict[str, Any],
    span: tuple[float, float],
) -> dict[str, Any]:
    """A rank's part of a record, from what was measured. seconds: samples, of a graph's calls where timed so."""
    calls_each = graph_calls(case) if case.timing == "graph" else 1
    return {
        **dataclasses.asdict(case),
        "device": _device_name(device),
        "us": {name: [1e6 * s / calls_each for s in spent] for name, spent in seconds.items()},
        "host_us": host_us,
        "error": errors,
        "skipped": table.skipped,
        "failed": table.failed,
        "config": configs,
        "span": span,
    }


def _ready(name: str, operands: Operands) -> Run:
    run = providers.prepare(name, operands)
    run.call()
    if operands.device.type == "cuda":
        torch.cuda.synchronize(operands.device)
    return run


def _call_of(run: Run, case: Case) -> Callable[[], object]:
    """What a sample calls: one call, or the replay of a graph of several."""
    if case.timing != "graph":
        run.call()
        return run.call
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run.call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Not torch.cuda.graph, which collects garbage first: a tenth of a second in each of a thousand captures.
    with torch.cuda.stream(stream):
        # Other threads (NCCL's watchdog) may query events meanwhile.
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for _ in range(graph_calls(case)):
                run.call()
        except Exception:
            # It fails too, by then; the first error is the one that tells.
            with contextlib.suppress(RuntimeError):
                graph.capture_end()
            raise
        graph.capture_end()
    return graph.replay


def _close(run: Run) -> None:
    if run.close is not None:
        run.close()


def merged(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The record of a case from its ranks' parts: samples of the slowest rank, errors of the worst one."""
    record = dict(parts[0])
    for field in ("us", "host_us", "error"):
        record[field] = {}
    for name in parts[0]["us"]:
        record["us"][name] = [
            max(sample) for sample in zip(*(part["us"][name] for part in parts), strict=True)
        ]
        record["error"][name] = check.worst([part["error"][name] for part in parts])
    for name in parts[0]["host_us"]:
        record["host_us"][name] = max(part["host_us"][name] for part in parts)
    record["wrong"] = [name for name, error in record["error"].items() if error["num_bad"]]
    record.update(_derived(record))
    return record


def broken(case: Case, device: str, reason: str) -> dict[str, Any]:
    """The record of a case that no rank came back from."""
    nothing: dict[str, Any] = {name: {} for name in ("us", "host_us", "error", "skipped", "config")}
    failed = {"failed": {"ours": reason.splitlines()[0][:300]}, "wrong": []}
    record = {**dataclasses.asdict(case), "device": device, **nothing, **failed}
    return record | _derived(record)


def _derived(record: dict[str, Any]) -> dict[str, Any]:
    """Floor, efficiency and bandwidths, from the medians. None where nothing can be said: floors are of GPUs."""
    op, ranks = TIMED[record["op"]], record["ranks"]
    if op.kind == "layer":
        return {"link_bytes": None, "floor_us": None, "efficiency": {}}
    M, N, K = record["M"], record["N"], record["K"]
    median = {name: _median(samples) for name, samples in record["us"].items()}
    itemsize = getattr(torch, record["dtype"]).itemsize
    nbytes = op.link_bytes(M, N, K, ranks, itemsize)
    on_gpu = record["device"] != "cpu"
    link_us = 1e6 * nbytes / LINK_BYTES_PER_S
    alone = [
        median[name] for name in ("blas", "ours_gemm" if op.kind != "gemm" else "ours") if name in median
    ]
    known = on_gpu and (bool(alone) or op.kind == "collective")
    floor = max([link_us, min(alone, default=0.0)]) if known else None
    found: dict[str, Any] = {"link_bytes": nbytes, "floor_us": floor, "efficiency": {}}
    if floor is not None:
        fused = {name: us for name, us in median.items() if name not in ("blas", "ours_gemm")}
        found["efficiency"] = {name: floor / us for name, us in fused.items()}
    if op.kind == "collective":
        found["bus_gb_per_s"] = {name: nbytes / us / 1e3 for name, us in median.items()}
    return found


def _median(samples: list[float]) -> float:
    return float(torch.tensor(samples, dtype=torch.float64).quantile(0.5))


def _device_name(device: torch.device) -> str:
    return "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)


def _plain(config: Any) -> dict[str, Any]:
    values = dataclasses.asdict(config)
    return {k: str(v).removeprefix("torch.") if isinstance(v, torch.dtype) else v for k, v in values.items()}

"""Measuring cases on a rank: providers in turn, on the same tensors, checked afterwards.

    for case, record in measure_cases(cases, names, iters, heap, device): ...     # on every rank

`reference.timing` takes the samples. `graph` cases replay a CUDA graph of several calls (`shapes.graph_calls`) instead
of one call, and count its share.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from pyrocshmem.benchmarks import check, memory, providers
from pyrocshmem.benchmarks.clocks import Clocks
from pyrocshmem.benchmarks.derive import merged
from pyrocshmem.benchmarks.operands import Operands
from pyrocshmem.benchmarks.provider import Run, Unavailable
from pyrocshmem.benchmarks.shapes import Case, graph_calls
from pyrocshmem.calls.workspace import Workspace
from pyrocshmem.errors import HeapOutOfMemory
from pyrocshmem.json_objects import all_gather_json
from pyrocshmem.reference.timing import Meter, Samples, host_seconds, repeated

# A run that outlives this hangs; ranks wait for one another as long, since each may compile what others have done.
LIMIT_S = 3600.0
_HOST_CALLS = 20
# Whose memory is read: the default, and the strict mode, which sends twice the bytes.
_READ_MEMORY_OF = ("ours", "ours_fp32")


def measure_cases(
    cases: list[Case], names: tuple[str, ...] | None, iters: int, heap: Any, device: torch.device
) -> Iterator[tuple[Case, dict[str, Any]]]:
    """Measure `cases`, all of one op; on every rank, each case with its record.

    heap: of the ranks that run a case together. None: cases of one rank, which the ranks of the default
    process group share out among themselves, one each at a time. names: of providers; None: all.
    """
    together = heap is not None
    rank, ranks = dist.get_rank(), dist.get_world_size()
    meter = Meter(device, together and ranks > 1, Clocks(device))
    spare = Workspace(heap, device)
    step = 1 if together else ranks
    for first in range(0, len(cases), step):
        batch = cases[first : first + step]
        mine = batch[0] if together else batch[rank] if rank < len(batch) else None
        part = mine and _measure(mine, names, iters, heap, meter, spare)
        parts = all_gather_json(part, "parts of records", timeout=LIMIT_S)
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
            # A variant may refuse what it is not made for, or find no room, before it launches anything; the default
            # may not.
            refused = isinstance(error, ValueError | HeapOutOfMemory) and name != "ours"
            fault = name.startswith("ours") and not refused
        found: list[Any] = [(reason, fault)]
        if self.ranks > 1:
            found = all_gather_json((reason, fault), f"whether {name} is ready", timeout=LIMIT_S)
        reasons = [reason for reason, _ in found if reason]
        if not reasons:
            table[name] = made
            return
        if isinstance(made, Run):
            _close(made)
        (self.failed if any(fault for _, fault in found) else self.skipped)[name] = reasons[0]

    def samples(self, meter: Meter, iters: int) -> Samples:
        """Of the providers in turn: ours as they are configured by default more often than otherwise, and their bits
        compared from run to run."""
        ours = [name for name in self.runs if name.startswith("ours")]
        return meter.in_turn(self.runs, iters, self.calls, seldom=providers.VARIANTS, compared=ours)

    def close(self) -> None:
        """Graphs first: they refer to what the runs hold, and these to the operands."""
        self.calls.clear()
        for run in self.runs.values():
            _close(run)
        self.runs.clear()


def _measure(
    case: Case, names: tuple[str, ...] | None, iters: int, heap: Any, meter: Meter, spare: Workspace
) -> dict[str, Any]:
    """This rank's part of the record of a case. spare: a workspace that other calls leave alone."""
    operands = Operands(case, heap, meter.device)
    makers = {
        name: partial(_ready, name, operands)
        for name in providers.providers_of(case.op)
        if names is None or name in names
    }
    table = Table(makers, case, operands.num_ranks)
    runs = table.runs
    samples = table.samples(meter, iters)
    if heap is not None:
        heap.synchronize()
    # A call in place has gone through its data many times in a graph: the check is of one more call.
    for run in runs.values():
        if run.prepare is not None:
            run.prepare()
            run.call()
    truths = {what: operands.sampled(what) for what in sorted({run.what for run in runs.values()})}
    errors = {name: check.error_of(run, truths[run.what], operands.num_ranks) for name, run in runs.items()}
    # From here on B stays the same: it is a repeated call whose host time and memory are asked for.
    operands.hold_weights()
    host = {}
    if meter.on_gpu and "ours" in runs:
        host["ours"] = 1e6 * host_seconds(runs["ours"].call, _HOST_CALLS, meter.device)
    used = {name: memory.used_by(runs[name], operands, spare) for name in _READ_MEMORY_OF if name in runs}
    configs = {name: _plain(run.config) for name, run in runs.items() if run.config is not None}
    schedules = {name: run.schedule for name, run in runs.items() if run.schedule}
    allowed = memory.allowed_bytes(case, runs["ours"].config, meter.device) if "ours" in runs else None
    table.close()
    part = part_of(case, meter.device, table, samples, host, errors, configs)
    more: dict[str, Any] = {"workspace_bytes": used, "workspace_allowed_bytes": allowed}
    more |= {"schedule": schedules, "weights": operands.num_weights}
    return part | more


def part_of(
    case: Case,
    device: torch.device,
    table: Table,
    samples: Samples,
    host_us: dict[str, float],
    errors: dict[str, Any],
    configs: dict[str, Any],
) -> dict[str, Any]:
    """A rank's part of a record, from what was measured. samples: of a graph's calls where timed so."""
    calls_each = graph_calls(case) if case.timing == "graph" else 1
    return {
        **dataclasses.asdict(case),
        "device": _device_name(device),
        "us": {name: [1e6 * s / calls_each for s in spent] for name, spent in samples.seconds.items()},
        "readings": samples.clocks,
        "checksums": samples.checksums,
        "workspace_bytes": {},
        "host_us": host_us,
        "error": errors,
        "skipped": table.skipped,
        "failed": table.failed,
        "config": configs,
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
    return repeated(run.call, graph_calls(case))


def _close(run: Run) -> None:
    if run.close is not None:
        run.close()


def _device_name(device: torch.device) -> str:
    return "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)


def _plain(config: Any) -> dict[str, Any]:
    values = dataclasses.asdict(config)
    return {k: str(v).removeprefix("torch.") if isinstance(v, torch.dtype) else v for k, v in values.items()}

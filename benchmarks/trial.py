"""Timing the candidates of one op at one shape, on all ranks together.

    outcome = tune_case(case, heap, device, iters=7, run=0)     # on every rank, the same everywhere

All candidates get a few samples, the best of them and the cost model's choice more; the one that wins must do so once
more, against that choice alone. A time is the maximum over the ranks; rank 0 decides. On a GPU cases of microseconds
are timed as replays of a CUDA graph. Every element of every candidate's result is held to the result of the cost
model's choice.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from pyrocshmem import stream_k
from pyrocshmem.benchmarks.candidates import candidates
from pyrocshmem.calls import planning
from pyrocshmem.heap import Heap
from pyrocshmem.reference.accuracy import Partials, bound, compare
from pyrocshmem.reference.operands import Operands
from pyrocshmem.reference.problems import BY_NAME
from pyrocshmem.reference.timing import repeated, time_in_turn
from pyrocshmem.stream_k.choice import table
from pyrocshmem.stream_k.choice.config import Config
from pyrocshmem.stream_k.choice.placement import wire_of
from pyrocshmem.warming import compile_shared_out

_QUICK_ITERS = 2
# By device: where the cost model's choice takes less, graphs of several calls are timed.
_GRAPH_BELOW_S = {"cuda": 200e-6}
_GRAPH_CALLS = 20
_FINALISTS = 3
# What a candidate must win by; otherwise the cost model's choice stays.
_GAIN = 1.01
# Elements that are checked at once: in float64 256 MiB a tensor.
_BLOCK_ELEMENTS = 1 << 25
# Two results may each be as far from the truth as the bound says; magnitudes are known to about 16 bits.
_TWO_RESULTS = 2.05


@dataclass(frozen=True)
class Case:
    """An op at one shape: M, N, K of a rank's product, on `ranks` ranks. partial_dtype: as in `Config`."""

    op: str
    M: int
    N: int
    K: int
    dtype: torch.dtype
    ranks: int
    partial_dtype: torch.dtype | None = None

    @property
    def wire(self) -> torch.dtype | None:
        """What partial sums travel in; None: there are none."""
        return wire_of(self.op, self.dtype, self.partial_dtype)

    def __str__(self) -> str:
        partials = f", {table.dtype_name(self.wire)} partials" if self.wire else ""
        return f"{self.op} {self.M} x {self.N} x {self.K}{partials}"


@dataclass(frozen=True)
class Outcome:
    """The entry of a case; fields in which its configuration differs from the cost model's choice; what gave a wrong
    result."""

    entry: table.Entry
    differs: dict[str, Any]
    wrong: list[str]


def tune_case(case: Case, heap: Heap | None, device: torch.device, iters: int, run: int) -> Outcome:
    """Tune a case. Collective over the default process group, whose ranks all run the same product where the case has
    one rank. heap: of the ranks; None for `gemm`.

    Raises RuntimeError where the cost model's choice does not run.
    """
    trial = _Trial(case, heap, device)
    tried = candidates(case.op, (case.M, case.N, case.K), case.dtype, case.ranks, device, case.partial_dtype)
    base = next(iter(tried))
    trial.compile(tried)
    fit = [config for config in tried if trial.runs(config)]
    wrong = [config for config in fit if not trial.is_right(config)]
    fit = [config for config in fit if config not in wrong]
    if base not in fit:
        raise RuntimeError(f"{case}: the cost model's choice, {base}, does not run")
    below = _GRAPH_BELOW_S.get(device.type)
    if below is not None and trial.medians([base], _QUICK_ITERS)[base] < below:
        trial.time_graphs()
    quick = trial.medians(fit, _QUICK_ITERS)
    finalists = sorted(fit, key=lambda config: quick[config])[:_FINALISTS]
    final = trial.medians(dict.fromkeys([base, *finalists]), iters)
    best = min(final, key=lambda config: final[config])
    if best != base:
        # What came first of several may owe that to chance, and to what was timed before it.
        final = trial.medians([base, best], 2 * iters)
    if not trial.is_right(best):
        wrong.append(best)
    if best in wrong or final[base] < _GAIN * final[best]:
        best = base
    variant = tried[best]
    entry = table.Entry(
        op=case.op,
        ranks=case.ranks,
        dtype=table.dtype_name(case.dtype),
        partial_dtype=table.wire_name(case.wire),
        M=case.M,
        N=case.N,
        K=case.K,
        config=None if best == base else _plain(best),
        most_programs=variant.most_programs,
        comm_each=variant.comm_each,
        us=round(1e6 * final[best], 2),
        cost_model_us=round(1e6 * final[base], 2),
        run=run,
        timing="graph" if trial.graphs else "eager",
    )
    usual = dataclasses.asdict(base)
    differs = {name: value for name, value in dataclasses.asdict(best).items() if value != usual[name]}
    return Outcome(entry, differs, [f"{case}: WRONG result with {config}" for config in wrong])


class _Trial:
    """Operands of a case on this rank, and the result that all candidates must give."""

    def __init__(self, case: Case, heap: Heap | None, device: torch.device) -> None:
        self.case, self.heap, self.device = case, heap, device
        problem = BY_NAME[case.op]
        shape = problem.global_shape((case.M, case.N, case.K), case.ranks)
        # A GEMM alone is each rank's own.
        of_rank = (heap.rank, case.ranks) if heap is not None else (0, 1)
        self.operands = Operands(problem, shape, case.dtype, 0, *of_rank, device)
        self.magnitude, self.partials = self._magnitudes()
        self.out = torch.empty_like(self.magnitude)
        self.options = self.operands.keywords() | ({} if heap is None else {"group": heap})
        self.expected: torch.Tensor | None = None
        self.graphs = False

    def _magnitudes(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Of the result's elements: the sums of their terms' absolute values; where partials are rounded, the sums
        over ranks of theirs."""
        x = self.operands
        if self.heap is None:
            return x.a.abs() @ x.b.abs(), None
        run = x.absolute().reference()
        run.call()
        if table.wire_name(self.case.wire) is None:
            return run.result(), None
        partials = (x.a @ x.b).abs()
        dist.all_reduce(partials)
        return run.result(), partials[x.problem.part(x.shape, x.rank, x.num_ranks)]

    def call(self, config: Config) -> None:
        """One call of the op, into `out`; it reads the next copy of B."""
        x = self.operands
        getattr(stream_k, self.case.op)(x.a, x.b, out=self.out, config=config, **self.options)

    def time_graphs(self) -> None:
        """From now on samples are replays of a graph of several calls."""
        self.graphs = True
        self.operands.cool_weights(_GRAPH_CALLS)

    def compile(self, configs: Iterable[Config]) -> None:
        """Compile what calls with `configs` need, all at once: one after another they would take longer than all that
        is timed."""
        with planning.only("collect") as needed:
            for config in configs:
                with contextlib.suppress(ValueError):
                    self.call(config)
        compile_shared_out([*needed.values()], self.heap)

    def _timed(self, config: Config) -> Callable[[], object]:
        """What a sample calls: one call, or the replay of a graph of several."""
        call = partial(self.call, config)
        return repeated(call, _GRAPH_CALLS) if self.graphs else call

    def runs(self, config: Config) -> bool:
        """Whether all ranks can run with it: ValueError is how an op refuses a configuration."""
        try:
            self.call(config)
        except ValueError:
            return self._everywhere(False)
        return self._everywhere(True)

    def is_right(self, config: Config) -> bool:
        """Whether a call gives all ranks what the first one gave that was asked about."""
        self.out.fill_(float("nan"))
        self.call(config)
        if self.heap is not None:
            self.heap.synchronize()
        if self.expected is None:
            self.expected = self.out.clone()
        return self._everywhere(self._within_bound(self.expected))

    def _within_bound(self, expected: torch.Tensor) -> bool:
        step = max(1, _BLOCK_ELEMENTS // max(1, self.out.shape[1]))
        for first in range(0, self.out.shape[0], step):
            rows = slice(first, first + step)
            truth, magnitude = expected[rows].double(), self.magnitude[rows].double()
            terms = None
            if self.partials is not None:
                assert self.case.wire is not None
                terms = Partials(self.partials[rows].double(), self.case.ranks, self.case.wire)
            allowed = bound(truth, truth, magnitude, self.operands.shape[2], self.case.dtype, terms)
            if not compare(self.out[rows], truth, truth, _TWO_RESULTS * allowed).ok:
                return False
        return bool(expected.isfinite().all())

    def medians(self, configs: Iterable[Config], iters: int) -> dict[Config, float]:
        """Median seconds of a call with each, on the slowest rank; rank 0's word, on all ranks."""
        calls: dict[str, tuple[Callable[[], object], torch.Tensor]] = {}
        configs = list(configs)
        for i, config in enumerate(configs):
            calls[str(i)] = self._timed(config), self.out
        seconds = time_in_turn(calls, iters, self.device)
        slowest = torch.tensor(list(seconds.values()), dtype=torch.float64, device=self.device)
        slowest /= _GRAPH_CALLS if self.graphs else 1
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        dist.broadcast(slowest, src=0)
        return dict(zip(configs, map(statistics.median, slowest.tolist()), strict=True))

    def _everywhere(self, holds: bool) -> bool:
        flag = torch.tensor(int(holds), device=self.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MIN)
        return bool(flag.item())


def _plain(config: Config) -> dict[str, Any]:
    return {name: value for name, value in dataclasses.asdict(config).items() if name != "partial_dtype"}

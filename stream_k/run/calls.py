"""Our call of a problem, ready to be measured: what `./run.sh` runs, and what the benchmarks call ours.

run = our_run(operands, heap, config=config)
run.call()
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pyrocshmem import collectives, stream_k
from pyrocshmem.calls.workspace import Workspace
from pyrocshmem.heap import Heap
from pyrocshmem.reference.operands import Operands, first
from pyrocshmem.reference.timing import Run

_PACKAGES = {"collectives": collectives, "stream_k": stream_k}


def our_run(
    x: Operands, heap: Heap | None, workspace: Callable[[], Workspace | None] = lambda: None, **options: Any
) -> Run:
    """The call of the op of `x.problem`. heap: of the ranks; None for a GEMM on one rank. workspace: asked for at each
    call; None: the heap's. options: of the op: `config`, `algorithm`, `partial_dtype`."""
    problem, more = x.problem, x.arguments()
    function: Callable[..., Any] = getattr(_PACKAGES[problem.package], problem.op)
    options |= x.keywords() | ({} if heap is None else {"group": heap})
    if problem.joins == "meet":
        assert heap is not None
        return meeting(heap, lambda: function(workspace=workspace(), **options))
    if problem.norm and problem.op != "rms_norm":  # it makes its result, and more than that
        if problem.gemm:
            return Run(
                lambda: first(function(x.a, x.b, *more, workspace=workspace(), **options)), None, returns=True
            )
        return Run(lambda: first(function(x.x, *more, workspace=workspace(), **options)), None, returns=True)
    out = x.new(*x.result_shape())
    if problem.gemm:
        return Run(lambda: function(x.a, x.b, out=out, workspace=workspace(), **options), out)
    return Run(lambda: function(x.x, *more, out=out, workspace=workspace(), **options), out)


def meeting(heap: Heap, wait: Callable[[], object]) -> Run:
    """A barrier, which has no result of its own: before it every rank writes its number of calls to all others, and the
    result [1, R] is 1 for each rank whose last write can be read after it."""
    seen = heap.zeros(heap.world_size, dtype=torch.float32)
    places = [heap.peer_view(seen, peer)[heap.rank : heap.rank + 1] for peer in range(heap.world_size)]
    calls = 0

    def announce() -> None:
        nonlocal calls
        calls += 1
        for place in places:
            place.fill_(calls)

    return Run(wait, seen, prepare=announce, as_result=lambda found: (found == calls).float()[None])

"""`warm_up`: calls made ready before they are made, for every number of rows.

    pyrocshmem.warm_up(("all_gather_gemm", 7168, 8192), ("gemm_all_reduce", 8192, 3584), rows=4096,
                       dtype=torch.bfloat16, group=group)

The first call of an op compiles its kernels, which takes seconds, and other numbers of rows want other tiles. Here each
call is planned for numbers of rows of every kind up to the largest, which says what it needs: buffers, which are made,
and kernels, which ranks share out among them and compile at once, several each. Triton keeps what it compiled on disk,
so that the next process, and each rank for what its peers compiled, only loads it.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import torch
import triton

import pyrocshmem.collectives
import pyrocshmem.stream_k  # noqa: F401  which register their ops
from pyrocshmem import target
from pyrocshmem.calls import planning
from pyrocshmem.calls.op import Sizes, find
from pyrocshmem.calls.workspace import Workspace, check_workspace, find_workspace, local_workspace
from pyrocshmem.checks import as_integer
from pyrocshmem.elements import DTYPES, names
from pyrocshmem.forming import own_device
from pyrocshmem.heap import Heap
from pyrocshmem.torch_contexts import on_device

Named = tuple[str, int, int]

# Numbers of rows that rules and tiles may tell apart: few; whole tile rows, and how many are missing from them, up to
# _MANY_ROWS and beyond.
_FEW = (1, 2, 3, 4, 7, 8, 15, 16, 17, 24, 31, 32, 33, 48, 49)
_TILE_ROWS = 64
_INSIDE, _MANY_ROWS, _INSIDE_OF_MANY = (0, 1, 31, 32, 63), 2048, (0, 1, 63)
# At once, of a rank: compiling is Python's for a third of the time.
_MOST_THREADS = 8


class WarmedUp(NamedTuple):
    """What `warm_up` did: how many kernels there are now for these calls, and the seconds that it took."""

    kernels: int
    seconds: float


def warm_up(
    *calls: Named | Callable[[int], object],
    rows: int,
    dtype: torch.dtype | None = None,
    group: Any = None,
    workspace: Workspace | None = None,
    threads: int | None = None,
) -> WarmedUp:
    """Make `calls` ready for any number of rows from 1 to `rows`: collective, and nothing is sent or computed.

    calls: (op, N, K), an op's name and N and K of this rank's GEMM [M, K] x [K, N], as for `stream_k.choose`, with B
    as layers hold it, the transpose of a contiguous [N, K]; for an op without a GEMM N columns of this rank, and any K.
    Or a function that makes calls of these ops, of the number of rows that it is given (M, of all ranks' A), say with a
    bias; what else it does is done each time.
    rows: the most there will be. dtype: of operands, where calls are named. group: as of the ops; None: the default
    process group. workspace: of the calls; None: the group's own (of `gemm`, the device's). threads: that compile in
    this process; None: the cores divided among the ranks, 8 at most.

    Later calls of up to so many rows need no vote, make no buffer that peers reach and compile nothing; those with
    other options, layouts or alignments may. Takes memory for the operands of the largest call, while it runs.
    Returns a `WarmedUp`. Raises TypeError, ValueError for calls there are not; what the ops raise.
    """
    begin = time.perf_counter()
    if as_integer("rows", rows) < 1:
        raise ValueError(f"rows is {rows}, at least 1 is needed")
    if workspace is not None:
        check_workspace(workspace)
    alone = all(isinstance(call, tuple) and call[:1] == ("gemm",) for call in calls)
    heap = None
    if workspace is not None or not alone:
        space = find_workspace(group, None)[1] if workspace is None else workspace
        if space.hosts is not None:
            raise ValueError(
                f"{space.hosts!r}: calls over several hosts can't be made ready before they are made"
            )
        heap = space.heap
    device = own_device(None) if heap is None else heap.device
    makers = [_maker(call, rows, dtype, device, heap, workspace) for call in calls]
    with torch.no_grad(), on_device(device):
        with planning.only("collect") as needed:
            for call in makers:
                _plan_all(call, rows)
        compilations = [*needed.values()]
        compile_shared_out(compilations, heap, threads)
        for launch, args in compilations:
            launch.compile(args)
        with planning.only("sizes"):
            # What plans share has gone where a buffer grew on the way.
            for call, count in itertools.product(makers, range(rows, 0, -_TILE_ROWS)):
                call(count)
        with planning.only("plan"):
            for call in makers:
                call(rows)
        if heap is not None:
            heap.vote("warm_up: ready")
    return WarmedUp(len(compilations), time.perf_counter() - begin)


def _plan_all(call: Callable[[int], object], most: int) -> None:
    """Plan `call` for a number of rows of every kind; and where two that follow one another are placed otherwise, whose
    buffers are others, for the most rows between them that are placed as the first is."""

    def placed(rows: int) -> list[str]:
        planning.here.placements.clear()
        call(rows)
        return planning.here.placements.copy()

    def differs(first: list[str], rows: int) -> bool:
        return placed(rows) != first

    found = {rows: placed(rows) for rows in numbers_of_rows(most)}
    for low, high in itertools.pairwise(sorted(found)):
        if found[low] != found[high]:
            # The first number from `low` on that is not as `low` is. Each one on the way is planned, the last as well.
            bisect.bisect_left(range(low, high), True, key=partial(differs, found[low]))


def numbers_of_rows(most: int) -> Iterator[int]:
    """Numbers of rows from 1 to `most` among which there is one of every kind, the largest first: buffers then grow
    but once."""
    ends = range(-(-most // _TILE_ROWS) * _TILE_ROWS, 0, -_TILE_ROWS)
    inside = (end - less for end in ends for less in (_INSIDE if end <= _MANY_ROWS else _INSIDE_OF_MANY))
    yield from dict.fromkeys(
        count for count in (most, most - 1, *inside, *reversed(_FEW)) if 0 < count <= most
    )


def compile_shared_out(
    compilations: list[planning.Compilation], heap: Heap | None, threads: int | None = None
) -> None:
    """Compile what all ranks of `heap` need alike, each rank its share, and then find what the peers compiled; nothing
    is loaded, so what needs more than the device has is no error yet. Collective; heap None: this process alone.
    threads: as for `warm_up`."""
    world = 1 if heap is None else heap.world_size
    if threads is None:
        threads = min(_MOST_THREADS, max(1, (os.cpu_count() or 1) // world))
    if heap is not None and world > 1:
        compile_at_once(compilations[heap.rank :: world], threads)
        heap.vote("compiled")
    compile_at_once(compilations, threads)


def compile_at_once(compilations: Iterable[planning.Compilation], threads: int) -> None:
    """Compile what calls need; on the CPU target there is nothing to compile."""
    if target.interpreted():
        return
    with contextlib.ExitStack() as ended:
        pool = ended.enter_context(ThreadPoolExecutor(threads))
        ended.enter_context(triton.AsyncCompileMode(pool))
        for launch, args in compilations:
            launch.ask_for(args)


def _maker(
    call: Named | Callable[[int], object],
    rows: int,
    dtype: torch.dtype | None,
    device: torch.device,
    heap: Heap | None,
    workspace: Workspace | None,
) -> Callable[[int], object]:
    """What makes the call with so many rows. TypeError, ValueError for what is none."""
    if callable(call):
        return call
    if not isinstance(call, tuple) or len(call) != 3:
        raise TypeError(f"a call is {call!r}; (op, N, K) is needed, or a function of the number of rows")
    name, N, K = call
    op = find(name)
    if op.sized is None:
        raise ValueError(f"op is {name!r}, which needs no warming up")
    for letter, size in (("N", N), ("K", K)):
        if as_integer(letter, size) < 1 and (letter == "N" or op.package == "stream_k"):
            raise ValueError(f"{letter} of {name} is {size}, at least 1 is needed")
    if dtype not in DTYPES:
        raise TypeError(f"dtype is {dtype}, allowed are {names()}")
    if name == "gemm":
        workspace = workspace or local_workspace(device)
    elif workspace is None:
        workspace = find_workspace(heap, None)[1]
    return op.sized(Sizes(N, K, rows, dtype, workspace))

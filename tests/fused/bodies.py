"""Bodies of test_protocol.py and test_gather_scatter_ops.py: calls in which a rank is delayed at the worst moment.

Most bodies return how many of their calls were wrong. Operands are -1, 0 and 1, so that a wrong sum is wrong by
whole numbers.
The plants work in Triton's interpreter only, where a kernel looks its helpers up each time it calls them.
"""

import contextlib
import importlib.util
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from pyrocshmem import Heap, signal, stream_k
from pyrocshmem.calls.workspace import Workspace
from pyrocshmem.collectives import reduce_tiles
from pyrocshmem.reference.problems import PROBLEMS
from pyrocshmem.stream_k.choice.config import BY_BLOCKS, BY_ROWS
from pyrocshmem.stream_k.ops import gemm_all_reduce
from tests.fused.cases import HEAP_BYTES, Case, Operands, Verdict, call, judge, run_case
from tests.stream_k.products import ON_CPU, integers, small_config

DELAY_S, STALL_S = 0.2, 0.02
_WAIT_S = 20.0
Shape = tuple[int, int, int]
Arguments = tuple[torch.Tensor, torch.Tensor, dict[str, int]]


@triton.jit
def end_without_counting(context, epoch):
    """`signal.end` as it must not be: the epoch stays."""
    last = signal.is_last(context)
    if last:
        tl.store(context.control + signal.BEGUN, 0)
    return last


def integer_problem(heap: Heap, seed: int, shape: Shape, op: str) -> tuple[Arguments, torch.Tensor]:
    """(a, b and the global sizes of a call, its result in float64) of this rank. op: a name of reference.problems; N
    and K of `shape` are those of a rank's operands, M is that of the product."""
    M, N, K = shape
    rank, world_size = heap.rank, heap.world_size
    shares = [
        (
            integers(M, K, torch.float32, 1000 * seed + peer),
            integers(K, N, torch.float32, 1000 * seed + 500 + peer),
        )
        for peer in range(world_size)
    ]
    problem = PROBLEMS[op]
    a, b = shares[rank if problem.sums else 0][0], shares[rank][1]
    if problem.sums:
        expected = torch.stack([x.double() @ y.double() for x, y in shares]).sum(0)
    elif problem.out_cut == "N":
        expected = a.double() @ b.double()
    else:
        expected = torch.cat([a.double() @ y.double() for _, y in shares], dim=1)
    if op == "reduce_scatter":
        expected = expected.tensor_split(world_size)[rank]
    if op == "all_gather":
        return (a.tensor_split(world_size)[rank], b, {"num_rows": M}), expected
    return (a, b, {}), expected


def integer_call(
    heap: Heap, seed: int, shape: Shape, config: stream_k.Config, workspace: Workspace, op: str = "all_reduce"
) -> bool:
    """One call with data of its own, of `integer_problem`; whether it came out exactly."""
    (a, b, sizes), expected = integer_problem(heap, seed, shape, op)
    options: dict[str, Any] = {"group": heap, "config": config, "workspace": workspace, **sizes}
    out = getattr(stream_k, PROBLEMS[op].op)(a, b, **options)
    return torch.equal(out.double(), expected)


def changing_data(
    rank: int, world_size: int, ways: list[tuple[str, str, str]], counting: bool
) -> dict[tuple[str, str, str], int]:
    """Rank 1 is late in every call but the first. Without counting, the flags of the call before look raised.

    ways: (op, placement, algorithm), each on a heap of its own.
    """
    if not counting:
        signal.end = end_without_counting
    return {way: _wrong_with_changing_data(*way) for way in ways}


def _wrong_with_changing_data(op: str, placement: str, algorithm: str) -> int:
    config = small_config(placement=placement, algorithm=algorithm, chunk=1)
    # Row blocks of several steps, whose sizes differ by one.
    shape = (151, 24, 24) if placement in (*BY_ROWS, *BY_BLOCKS) else (40, 24, 24)
    wrong = 0
    with Heap(HEAP_BYTES) as heap:
        workspace = Workspace(heap, wait_seconds=_WAIT_S)
        for call in range(4):
            if heap.rank == 1 and call > 0:
                time.sleep(DELAY_S)
            wrong += not integer_call(heap, call, shape, config, workspace, op)
        heap.vote("done")
    return wrong


def with_a_single_slot() -> ModuleType:
    """`collectives.reduce_tiles` in which both slots of the partials are the same."""
    source = Path(reduce_tiles.__file__).read_text()
    assert source.count("(epoch & 1)") >= 3
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "reduce_tiles_with_a_single_slot.py"
        path.write_text(source.replace("(epoch & 1)", "(epoch & 0)"))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
        # The interpreter reads a function's source when it is first called.
        for helper in list(vars(module).values()):
            if hasattr(helper, "rewrite") and callable(helper.rewrite):
                helper.rewrite()
        return module


@contextlib.contextmanager
def delayed_reads(tiles: ModuleType) -> Iterator[None]:
    """This rank sleeps between seeing a tile's flags and reading its partials."""
    honest: Callable[..., Any] = tiles._sources

    def late(*args: Any, **more: Any) -> Any:
        time.sleep(DELAY_S)
        return honest(*args, **more)

    tiles._sources = late  # type: ignore[attr-defined]
    yield
    tiles._sources = honest  # type: ignore[attr-defined]


def stall_after_waits(seconds: float) -> None:
    """From now on this rank sleeps between seeing a flag and doing what it waited for."""
    honest: Callable[..., Any] = signal.wait

    def late(*args: Any, **more: Any) -> Any:
        seen = honest(*args, **more)
        time.sleep(seconds)
        return seen

    signal.wait = late


def overwritten(rank: int, world_size: int, case: Case, symmetric: bool) -> list[str]:
    """The last rank is late in every call but the first, and, where a plant can make it so, whenever it has seen a
    flag; the others go on, with other data in the same operands.

    symmetric: the operands lie on the heap, where peers could read them in place.
    """
    errors = []
    late = rank == world_size - 1
    with Heap(HEAP_BYTES) as heap:
        first = Operands(case, rank, world_size, 0)
        if symmetric:
            # Rank 0's shares are the largest, and allocations are the same on all ranks.
            most = Operands(case, 0, world_size, 0)
            a, b = (heap.empty(x.numel(), dtype=case.dtype) for x in (most.a, most.b))
            a, b = a[: first.a.numel()].view(first.a.shape), b[: first.b.numel()].view(first.b.shape)
        else:
            a, b = torch.empty_like(first.a), torch.empty_like(first.b)
        results = []
        for seed in range(4):
            operands = Operands(case, rank, world_size, seed)
            if late and seed > 0:
                time.sleep(DELAY_S)
                if ON_CPU and seed == 1:
                    stall_after_waits(STALL_S)
            a.copy_(operands.a)
            b.copy_(operands.b)
            operands.a, operands.b = a, b
            results.append((operands, call(case, heap, operands)))
            a.fill_(float("nan"))
            b.fill_(float("nan"))
        heap.synchronize()
        for operands, found in results:
            try:
                judge(case, operands, found, world_size)
            except AssertionError as error:
                errors.append(str(error))
        heap.vote("done")
    return errors


def stalled_reader(
    rank: int, world_size: int, sequences: list[list[Shape]], placement: str, single_slot: bool
) -> list[int]:
    """Fault 8: rank 1 stalls between flag and read, while rank 0 goes on into the next call, whose shape may differ.

    sequences: of shapes that follow one another, each on a heap of its own.
    """
    if single_slot:
        gemm_all_reduce.tiles = with_a_single_slot()
    return [_wrong_with_a_stalled_reader(shapes, placement) for shapes in sequences]


def _wrong_with_a_stalled_reader(shapes: list[Shape], placement: str) -> int:
    # One program for the GEMM, so that inside it, too, all tiles are pushed before the first is read.
    num_programs = 3 if placement == "beside" else 1
    config = small_config(placement=placement, algorithm="one_shot", num_programs=num_programs)
    with Heap(HEAP_BYTES) as heap:
        workspace = Workspace(heap, wait_seconds=_WAIT_S)
        # Plans are made together; the stall comes afterwards.
        wrong = sum(not integer_call(heap, 50, shape, config, workspace) for shape in shapes)
        stall = delayed_reads(gemm_all_reduce.tiles) if heap.rank == 1 else contextlib.nullcontext()
        with stall:
            for call in range(4):
                wrong += not integer_call(heap, call, shapes[call % len(shapes)], config, workspace)
        heap.vote("done")
    return wrong


def slow_flags(rank: int, world_size: int, calls: list[tuple[str, tuple[int, int, int]]]) -> int:
    """Rank 1 raises the flags of its peers one by one, with stalls; the other ranks run ahead into another op."""
    with Heap(HEAP_BYTES) as heap:
        workspace = Workspace(heap, wait_seconds=_WAIT_S)
        config = small_config(algorithm="one_shot")
        wrong = sum(not integer_call(heap, 50, shape, config, workspace, op) for op, shape in calls)
        if rank == 1:
            honest = signal.raise_flag

            def one_by_one(flag: Any, epoch: Any, mask: Any = None, scope: Any = signal._SYSTEM) -> None:
                lanes = mask.handle.data.nonzero()[0] if mask is not None else []
                if len(lanes) < 2:
                    honest(flag, epoch, mask, scope)
                    return
                for lane in lanes:
                    only = mask & (tl.arange(0, len(mask.handle.data)) == int(lane))
                    honest(flag, epoch, only, scope)
                    time.sleep(DELAY_S)

            signal.raise_flag = one_by_one
        for call in range(2):
            op, shape = calls[call % len(calls)]
            wrong += not integer_call(heap, call, shape, config, workspace, op)
        heap.vote("done")
    return wrong


def wrapped(rank: int, world_size: int, epoch: int, cases: list[Case]) -> list[Verdict]:
    """Fault 7: the workspace's counter starts just below a limit of int32."""
    with Heap(HEAP_BYTES) as heap:
        workspace = Workspace(heap)
        verdicts = [run_case(case, heap, 90, workspace) for case in cases]
        workspace.restart(epoch)
        for call in range(3):
            verdicts += [run_case(case, heap, call, workspace) for case in cases]
        assert workspace.epoch() == (epoch + 3 * len(cases) + 2**31) % 2**32 - 2**31
    return verdicts


def two_workspaces(rank: int, world_size: int, cases: list[Case]) -> list[Verdict]:
    """Calls in turn on two workspaces of one heap, and on two heaps (fault 26)."""
    with Heap(HEAP_BYTES) as heap, Heap(HEAP_BYTES) as other:
        places = [(heap, Workspace(heap)), (heap, Workspace(heap)), (other, Workspace(other))]
        return [
            run_case(case, where, seed, workspace)
            for seed, case in enumerate(cases)
            for where, workspace in places
        ]


def subgroups(rank: int, world_size: int, cases: list[Case]) -> list[Verdict]:
    """Overlapping groups: all ranks, and ranks 0 and 2 alone, which make calls on both, in turn (fault 26)."""
    outer = dist.group.WORLD
    pair = dist.new_group([0, 2])
    mesh = dist.device_mesh.init_device_mesh(
        "cpu" if not torch.cuda.is_available() else "cuda", (world_size,)
    )
    verdicts = []
    with Heap(HEAP_BYTES, outer) as heap:
        inner = Heap(HEAP_BYTES, pair) if rank in (0, 2) else None
        from_mesh = Heap(HEAP_BYTES, mesh)
        for seed, case in enumerate(cases):
            verdicts.append(run_case(case, heap, seed))
            if inner is not None:
                error = run_case(case, inner, seed).error
                assert not error, error
            verdicts.append(run_case(case, from_mesh, seed))
        from_mesh.close()
        if inner is not None:
            inner.close()
    return verdicts

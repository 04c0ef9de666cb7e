"""What the plans of a workspace share: launches of steps, and where peers have its buffers."""

import gc
import math
import random
from collections import Counter
from dataclasses import replace
from itertools import repeat
from typing import Any
from unittest import mock

import pytest
import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from pyrocshmem import Heap, blocks, stream_k
from pyrocshmem.calls import planning
from pyrocshmem.calls.kernel_launch import Launch, kinds
from pyrocshmem.calls.workspace import KEPT_PLANS, Workspace, workspace_for
from pyrocshmem.collectives.row_blocks import step_kernel
from pyrocshmem.stream_k.local_gemm.aligned_copies import Copies
from pyrocshmem.stream_k.local_gemm.kernel import stream_k_kernel
from pyrocshmem.stream_k.local_gemm.product import Product
from pyrocshmem.stream_k.ops.op import Call
from pyrocshmem.stream_k.ops.planned import on_all_ranks
from pyrocshmem.stream_k.ops.rows import RowsPlan
from pyrocshmem.stream_k.ops.steps import step_launch
from pyrocshmem.testing.planning_heap import PlanningHeap
from tests.ranks import run_ranks, values
from tests.stream_k.products import integers, small_config

TIER = 1
pytestmark = pytest.mark.cpu

HEAP_BYTES = 16 << 20
N, K = 48, 40


def test_steps_of_a_workspace_are_compiled_once() -> None:
    space, other = (Workspace(PlanningHeap(2)) for _ in range(2))
    compiled = mock.Mock(return_value="machine code")
    with mock.patch.object(Launch, "compile", compiled):
        first, again = (step_launch(space, 3, ends=True) for _ in range(2))
        assert [launch.compile_once(tuple) for launch in (first, again)] == ["machine code"] * 2
        assert compiled.call_count == 1
    assert first is again
    different = [step_launch(space, 4, ends=True), step_launch(space, 3), step_launch(other, 3, ends=True)]
    assert all(launch is not first for launch in different)
    with mock.patch("pyrocshmem.trace.recorder", return_value=object()):
        assert step_launch(space, 3, ends=True) is not first


def test_places_on_all_ranks_are_those_of_each_tensor() -> None:
    """Of any shape in a buffer, whichever was asked for first."""
    heap = PlanningHeap(3)
    space = Workspace(heap)
    buffer = space.buffer("some", 24, torch.float16)
    with mock.patch.object(heap, "peer_view", wraps=heap.peer_view) as views:
        for tensor in (buffer[2:8].view(2, 3), buffer.view(4, 6)[:, 2:5]):
            for there in on_all_ranks(space, tensor):
                assert (there.data_ptr(), there.shape, there.stride()) == (
                    tensor.data_ptr(),
                    tensor.shape,
                    tensor.stride(),
                )
        assert views.call_count == heap.world_size - 1


def grown(rank: int, world_size: int) -> tuple[bool, bool, int]:
    """(whether all results are right, whether plans had something to share, freed blocks of the heap that something
    still refers to) after a call of more rows than the one before."""
    config = small_config(placement="copy_engine", split="none")
    right = True
    with Heap(HEAP_BYTES) as heap:
        for rows in (64, 640):
            a, b = integers(rows, K, torch.float16, 1), integers(K, N, torch.float16, 2 + rank)
            out = stream_k.gemm_all_scatter(a, b, group=heap, config=config)
            every = [integers(K, N, torch.float16, 2 + peer) for peer in range(world_size)]
            right &= torch.equal(out.double(), torch.cat([a.double() @ x.double() for x in every], 1))
        gc.collect()
        return right, bool(workspace_for(heap).plans.shared), len(blocks.retired)


@pytest.mark.num_ranks(2)
def test_a_buffer_that_was_outgrown_is_let_go() -> None:
    """Views of it at peers are not kept for plans that are gone: a heap would keep its memory."""
    assert values(run_ranks(grown, 2)) == [(True, True, 0)] * 2


OPS = ("all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce", "gemm_all_scatter")
MOST_ROWS = 1500
BY_COPIES = small_config(placement="copy_engine", split="none", num_programs=4)
# What calls differ in, beside rows.
FACTORS: dict[str, tuple[Any, ...]] = {
    "dtype": (torch.float16, torch.float32, torch.float8_e4m3fn),
    "scales": ("rowwise", "blockwise", "tensorwise"),
    "size": ((N, K), (288, 512), (250, 136)),
    "a": ("rows", "columns", "wide rows", "wide columns", "odd rows"),
    "b": ("rows", "columns"),
    "bias": (None, torch.float32, torch.float16),
    "out": (None, "rows", "columns", "wide rows"),
    "activation": ("none", "relu"),
    "config": (BY_COPIES, replace(BY_COPIES, split="stream_k"), replace(BY_COPIES, block_n=256)),
}


def matrix(rows: int, columns: int, dtype: torch.dtype, layout: str) -> torch.Tensor:
    if layout == "columns":
        return torch.zeros(columns, rows, dtype=dtype).t()
    if layout == "wide columns":
        return torch.zeros(columns, MOST_ROWS + 4, dtype=dtype)[:, :rows].t()
    if layout == "odd rows":
        return torch.zeros(rows * (columns + 1) + 1, dtype=dtype)[1:].view(rows, columns + 1)[:, :columns]
    return torch.zeros(rows, columns + 16 * (layout == "wide rows"), dtype=dtype)[:, :columns]


def planned(op: str, rows: int, chosen: dict[str, Any], heap: PlanningHeap) -> None:
    """Plan a call of so many rows."""
    (n, k), dtype, recipe = chosen["size"], chosen["dtype"], chosen["scales"]
    scaled = dtype.itemsize == 1
    own = len(range(1, rows, 2))  # of rank 1 of 2
    a = matrix(own if op == "all_gather_gemm" else rows, k, torch.float16 if scaled else dtype, chosen["a"])
    b = matrix(k, n, a.dtype, chosen["b"])
    options: dict[str, Any] = {name: chosen[name] for name in ("activation", "config")}
    if scaled and recipe == "blockwise":
        options["config"] = replace(chosen["config"], block_n=min(128, chosen["config"].block_n))
    if scaled:
        scales = {
            "rowwise": ((len(a), 1), (1, n)),
            "blockwise": ((len(a), -(-k // 128)), (-(-k // 128), -(-n // 128))),
            "tensorwise": ((1, 1), (1, 1)),
        }[recipe]
        a, b = a.to(dtype), b.to(dtype)
        options |= dict(zip(("scale_a", "scale_b"), map(torch.ones, scales), strict=True))
        options["out_dtype"] = torch.float16
    elif chosen["bias"] is not None:
        options["bias"] = torch.zeros(n, dtype=chosen["bias"] if dtype == torch.float16 else dtype)
    if chosen["out"] is not None:
        shape = own if op == "gemm_reduce_scatter" else rows, n * (2 if op == "gemm_all_scatter" else 1)
        options["out"] = matrix(*shape, torch.float16 if scaled else dtype, chosen["out"])
    if op == "all_gather_gemm":
        options["num_rows"] = rows
    getattr(stream_k, op)(a, b, group=heap, **options)


def told(x: object) -> dict[str, Any]:
    """All that a product or a launch is, but for what it shares."""
    found = {name: value for name, value in vars(x).items() if name not in ("shared", "alike")}
    for name, value in found.items():
        if isinstance(value, TensorDescriptor):
            found[name] = vars(value)
        elif isinstance(value, Copies):  # a new one each time
            found[name] = Copies
    return found


@pytest.mark.parametrize("op", OPS)
def test_what_plans_share_is_what_each_would_make(
    op: str, h200: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products and launches, and machine code by the kinds of the arguments that a plan asks with: all but rows that
    differs between calls gives them others."""
    product, launch = Call.product, Product.launch
    compiled: dict[Launch, Any] = {}
    asked: Counter[Launch] = Counter()

    def checked_product(call: Call, *args: Any, **more: Any) -> Product:
        found = product(call, *args, **more)
        assert told(found) == told(product(replace(call, alike=None), *args, **more))
        return found

    def checked_launch(self: Product, *args: Any, once: bool = False, **more: Any) -> Launch:
        found = launch(self, *args, once=once, **more)
        assert told(found) == told(launch(self, *args, **more))
        return found

    def compile_once(launch: Launch, arguments: Any) -> None:
        # The numbers of a step are not specialized.
        found = kinds(arguments(), repeat(launch.kernel is not step_kernel))
        assert compiled.setdefault(launch, found) == found, launch.kernel
        asked[launch] += 1

    monkeypatch.setattr(Call, "product", checked_product)
    monkeypatch.setattr(Product, "launch", checked_launch)
    monkeypatch.setattr(Launch, "compile_once", compile_once)
    heap, draw = PlanningHeap(2), random.Random(op)
    heap.nbytes = 0  # no result lies on it
    calls = []
    for _ in range(8):
        drawn = {name: draw.choice(values) for name, values in FACTORS.items()}
        calls += [drawn | {name: value} for name, values in FACTORS.items() for value in values]
    with planning.only("sizes"), torch.no_grad():
        # The most first: buffers that grow would let all go. Then some that fill all waves.
        for rows in (MOST_ROWS, 128, 256, *draw.sample(range(2, MOST_ROWS), 2)):
            for chosen in calls:
                planned(op, rows, chosen, heap)
    assert sum(uses > 2 for launch, uses in asked.items() if launch.kernel is stream_k_kernel) > 4


def test_a_launch_is_compiled_again_when_buffers_are_outgrown() -> None:
    """Also for a plan that has it and is being made."""
    space = Workspace(PlanningHeap(2))
    launch = step_launch(space, 3)
    with mock.patch.object(Launch, "compile", mock.Mock(side_effect=["small", "large"])):
        assert launch.compile_once(tuple) == "small"
        space.buffer("some", 16, torch.float16)
        assert launch.compile_once(tuple) == "small"
        space.buffer("some", 32, torch.float16)
        assert launch.compile_once(tuple) == "large"


def test_what_is_shared_is_bounded(h200: torch.device) -> None:
    """Of calls whose A lies in columns each number of rows has its own."""
    heap = PlanningHeap(2)
    with planning.only("plan"), torch.no_grad(), mock.patch.object(Launch, "compile", return_value=None):
        sizes = []
        for rows in range(2000, 1000, -1):
            a, b = torch.empty(K, rows, dtype=torch.float16).t(), torch.empty(K, N, dtype=torch.float16)
            stream_k.gemm_all_scatter(a, b, group=heap, config=BY_COPIES)
            sizes.append(len(workspace_for(heap).plans.shared))
    assert max(sizes) > sizes[-1]
    assert max(sizes) <= 4 * KEPT_PLANS + 8


# Some end in the same row of tiles of a block of rows, some in another one.
ROWS = (256, 255, 193, 250, 130, 65, 129, 128, 66, 127, 3, 1, 2, 250)


def with_other_rows(rank: int, world_size: int, op: str, inner: int) -> tuple[list[int], int]:
    """(rows of calls whose results were wrong, plans that were made from nothing) of calls of `op`, of this inner size,
    one number of rows after another, each of them twice."""
    wrong = []
    config = replace(BY_COPIES, chunk=2, num_programs=3)
    bias = integers(1, N, torch.float16, 7)[0]
    whole = mock.patch.object(RowsPlan, "__init__", autospec=True, side_effect=RowsPlan.__init__)
    with Heap(HEAP_BYTES) as heap, whole as made:
        for turn, rows in enumerate(sorted(ROWS * 2, key=ROWS.index)):
            each = [
                [integers(*size, torch.float16, 100 * turn + peer) for size in ((rows, inner), (inner, N))]
                for peer in range(world_size)
            ]
            result = sum(a.double() @ b.double() for a, b in each) + bias.double()
            result = result if op == "gemm_all_reduce" else torch.tensor_split(result, world_size)[rank]
            out = torch.full(result.shape, math.nan, dtype=torch.float16, device=heap.device)
            a, b = each[rank]
            getattr(stream_k, op)(a, b, group=heap, out=out, bias=bias, config=config)
            wrong += [] if torch.equal(out.double(), result) else [rows]
    return wrong, made.call_count


@pytest.mark.parametrize(
    "ranks", [pytest.param(ranks, marks=pytest.mark.num_ranks(ranks)) for ranks in (2, 3)]
)
@pytest.mark.parametrize("op", ["gemm_all_reduce", "gemm_reduce_scatter"])
def test_plans_made_of_those_of_other_rows(op: str, ranks: int) -> None:
    """Plans are made from nothing for the first rows of each number of tile rows of a rank's block."""
    tile_rows = {-(-rows // (ranks * BY_COPIES.block_m)) for rows in ROWS}
    assert values(run_ranks(with_other_rows, ranks, op, K)) == [([], len(tile_rows))] * ranks


@pytest.mark.num_ranks(2)
def test_plans_of_operands_that_are_copied_are_made_from_nothing() -> None:
    """Rows of an odd pitch are copied, into memory for as many as a plan was made for."""
    assert values(run_ranks(with_other_rows, 2, "gemm_reduce_scatter", K + 1)) == [([], len(set(ROWS)))] * 2

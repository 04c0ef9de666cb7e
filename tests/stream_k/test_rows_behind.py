"""Rows that lie behind those of A in its storage: read where they are, needed by nobody, and never read where they are
not."""

import math
import warnings
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from pyrocshmem import Heap, stream_k, target
from pyrocshmem.calls.tensors import MASKED, rows_held
from pyrocshmem.calls.workspace import Workspace
from pyrocshmem.stream_k.choice.placement import placements_by_op
from pyrocshmem.stream_k.local_gemm import product
from pyrocshmem.stream_k.local_gemm.aligned_copies import rows_cost_more
from pyrocshmem.stream_k.local_gemm.plan import GemmPlan
from tests.fused.cases import HEAP_BYTES
from tests.ranks import run_ranks, values
from tests.stream_k.products import Frame, check_product, device, random, same_bits, small_config

TIER = 1
DTYPE = torch.float16
# Tiles of `small_config` end below both.
N, K = 72, 64


def top_of(a: torch.Tensor, rows: int) -> torch.Tensor:
    """The values of `a` as the top of a tensor of so many rows, the others NaN."""
    return a.new_full((rows, a.shape[1]), math.nan)[: len(a)].copy_(a)


@pytest.mark.parametrize(
    ("rows", "held", "found"),
    [(1, 1, 1), (1, 15, 1), (1, 16, 16), (1, 255, 128), (1, 256, 256), (16, 16, 16), (16, 40, 32), (17, 63, 32),
     (17, 300, 256), (40, 48, 48), (129, 200, 192), (255, 300, 256), (256, 512, 256),
     (300, 511, 300)],
)  # fmt: skip
def test_rows_held(rows: int, held: int, found: int) -> None:
    assert rows_held(torch.empty(held, 24)[:rows]) == found
    # The last row may be a part of a line; what lies before the first doesn't count.
    whole = torch.empty(held + 3, 40)[3:, 16:]
    assert rows_held(whole[:rows, :24]) == found
    assert rows_held(torch.empty(24, held).t()[:rows]) == rows
    assert rows_held(torch.empty(1, 24).expand(rows, 24)) == rows


def plans_of(workspace: Workspace) -> list[GemmPlan]:
    return [plan for plan in workspace.plans.values() if isinstance(plan, GemmPlan)]


def rows_read(plan: GemmPlan) -> int:
    """Rows of the tensor that the descriptor of A is of."""
    return int(plan.product.a_template.shape[0])


@pytest.mark.num_ranks(1)
@pytest.mark.parametrize("split", ["none", "stream_k", "split_k", "separate"])
def test_read_and_not_needed(split: str) -> None:
    """The same bits as without them, though they are NaN; all of the last tile's are read where they are held."""
    config = small_config(split=split, num_programs=4)
    for M in (1, 33, config.block_m + 1):
        a, b = random(M, K, DTYPE), random(K, N, DTYPE)
        whole = -(-M // config.block_m) * config.block_m
        workspace, frame = Workspace(device=device()), Frame(M, N, DTYPE)
        stream_k.gemm(top_of(a, whole), b, out=frame.out, config=config, workspace=workspace)
        check_product(frame.out, a, b)
        frame.check()
        assert [rows_read(plan) for plan in plans_of(workspace)] == [whole]
        assert same_bits(frame.out, stream_k.gemm(a, b, config=config))


@pytest.mark.num_ranks(1)
def test_a_plan_that_reads_them_is_not_for_operands_without() -> None:
    workspace, config = Workspace(device=device()), small_config()
    a, b = random(5, K, DTYPE), random(K, N, DTYPE)
    for each in (top_of(a, config.block_m), a, top_of(a, config.block_m - 1)):
        check_product(stream_k.gemm(each, b, config=config, workspace=workspace), a, b)
    # The third may have rows for smaller tiles, and a plan of its own.
    assert [rows_read(plan) for plan in plans_of(workspace)] in ([config.block_m, 5], [config.block_m, 5, 5])


@pytest.mark.parametrize(
    ("shape", "rows", "tiles_n", "better"),
    [  # us as it is, and by a copy, or with rows there and 1 us for a copy
        ((1, 4096, 3584), 16, 128, True),  # 10.3, 9.4
        ((8, 28672, 8192), 16, 112, False),  # 119.2, 119.4
        ((17, 4096, 1024), 64, 128, True),  # 5.8, 4.9
        ((48, 14336, 8192), 64, 112, False),  # 62.7, 63.9
        ((65, 8192, 3584), 128, 128, True),  # 33.0, 20.2
        ((112, 1024, 1024), 128, 32, False),  # 3.6, 4.6
        ((132, 8192, 8192), 256, 64, True),  # 96.4, 51.5
        ((4100, 4096, 4096), 4224, 16, False),  # a copy of 34 MB
    ],
)
def test_when_a_copy_is_better(
    shape: tuple[int, int, int], rows: int, tiles_n: int, better: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What readings on H200 say of products far from where both ways take as long."""
    (M, N, K), made = shape, {"dtype": DTYPE, "device": "meta"}
    a, b = torch.empty(M, K, **made), torch.empty(K, N, **made)
    for backend, expected in (("cuda", better), ("hip", False)):
        monkeypatch.setattr(target, "backend", lambda backend=backend: backend)
        assert rows_cost_more(a, b, rows, tiles_n) == expected


@pytest.mark.num_ranks(1)
def test_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits by pointers, with NaN behind the last row, wherever K is whole blocks; else not by these."""
    found = []
    real = product._better_masked

    def asked(a: torch.Tensor, config: Any, schedule: Any) -> bool:
        with mock.patch.object(target, "backend", return_value="cuda"):
            found.append(real(a, replace(config, block_m=16, block_n=64), schedule))
        return found[-1]

    monkeypatch.setattr(product, "_better_masked", asked)
    config = small_config(split="stream_k", num_programs=3)
    monkeypatch.setattr(product, "_MASKED_FROM", 1)
    for M, columns, masked in ((1, 96, True), (40, 96, True), (5, 80, False), (5, 72, False)):
        a, b, workspace = random(M, columns, DTYPE), random(columns, N, DTYPE), Workspace(device=device())
        whole = -(-M // config.block_m) * config.block_m
        out = stream_k.gemm(top_of(a, whole - 1), b, config=config, workspace=workspace)
        check_product(out, a, b)
        (plan,) = plans_of(workspace)
        assert found.pop() == masked == (plan.product.a_how == MASKED)
        assert same_bits(out, stream_k.gemm(top_of(a, 256), b, config=config))
    # Of few tiles, or short rows, zeros cost less.
    monkeypatch.setattr(product, "_MASKED_FROM", 1 << 19)
    stream_k.gemm(
        random(1, 96, DTYPE), random(96, N, DTYPE), config=config, workspace=Workspace(device=device())
    )
    assert not found.pop()


def fused_ways(rank: int, world_size: int) -> list[str]:
    """What rows of NaN behind A change, and where a plan was used for an A without them."""
    wrong = []
    ops = [(op, each.name) for op, all_ in placements_by_op().items() for each in all_ if op != "gemm"]
    with Heap(HEAP_BYTES) as heap:
        for op, placement in (*ops, ("gemm_all_reduce_rms_norm", "messages")):
            M = 40 if op == "all_gather_gemm" else 41
            workspace = Workspace(heap)
            a, b = random(M, K, DTYPE, 1 + rank), random(K, N, DTYPE, 5 + rank)
            config = small_config(placement=placement, num_programs=4, num_comm_programs=1)
            more = (None, torch.ones_like(b[0]), 1e-5) if op.endswith("norm") else ()

            def made(
                a: torch.Tensor, op: str = op, b: Any = b, more: Any = more, **options: Any
            ) -> torch.Tensor:
                out = getattr(stream_k, op)(a, b, *more, group=heap, **options)
                return out if isinstance(out, torch.Tensor) else out[0]

            # The plan that reads most first: the others may not have it.
            found = [
                made(each, config=config, workspace=workspace) for each in (top_of(a, 256), top_of(a, 64), a)
            ]
            if found[0].isnan().any() or not all(same_bits(each, found[0]) for each in found):
                wrong.append(f"{op} {placement}")
            whole = -(-M // config.block_m) * config.block_m
            plans: list[Any] = [*workspace.plans.values()]
            products = [getattr(plan.sent.gemm, "product", None) for plan in plans if hasattr(plan, "sent")]
            read = {each.a_template.shape[0] for each in products if each is not None}
            if placement == "messages" and op != "all_gather_gemm" and read != {whole, M}:
                wrong.append(f"{op}: plans that read {read} rows")
            heap.synchronize()
    return wrong


def copied_on_a_heap(rank: int, world_size: int) -> list[bool]:
    """Whether copies lie in the workspace, unless it has a fixed size, and are made anew in each call."""
    config, said = small_config(placement="messages", algorithm="one_shot"), []
    with Heap(HEAP_BYTES) as heap, mock.patch.object(product, "rows_cost_more", return_value=True):
        workspaces = [Workspace(heap), Workspace(heap, nbytes=8 << 20)]
        for workspace, copied in zip(workspaces, (True, False), strict=True):
            for turn in range(3):
                a, b = (
                    [random(*shape, DTYPE, 10 * turn + r) for r in range(2)] for shape in ((41, K), (K, N))
                )
                out = stream_k.gemm_all_reduce(
                    a[rank], b[rank], group=heap, config=config, workspace=workspace
                )
                exact = sum(x.double() @ y.double() for x, y in zip(a, b, strict=True))
                said.append(bool((out.double() - exact).abs().max() < 0.1))
            plans: list[Any] = [*workspace.plans.values()]
            copies = [plan.sent.gemm.product.copies for plan in plans]
            said.append([each.kept for each in copies] == [True] if copied else copies == [None])
        heap.synchronize()
    return said


def gathered(rank: int, world_size: int) -> list[str]:
    """What an all-gather before a product, whose memory is fresh, is warned of."""
    with Heap(HEAP_BYTES) as heap, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        workspace = Workspace(heap)
        workspace.buffer("own gathered", 64 * K, DTYPE, local=True).fill_(math.inf)
        config = small_config(placement="messages", block_m=64)
        a, b = random(16, K, DTYPE, rank), random(K, N, DTYPE, 2)
        assert stream_k.all_gather_gemm(a, b, group=heap, config=config, workspace=workspace).isfinite().all()
        return [str(each.message) for each in warned if each.category is RuntimeWarning]


@pytest.mark.cpu
@pytest.mark.num_ranks(2)
def test_nobody_is_warned_of_what_is_behind_gathered_rows() -> None:
    """The interpreter computes with NumPy, which tells of every infinity."""
    assert values(run_ranks(gathered, 2)) == [[]] * 2


@pytest.mark.num_ranks(2)
def test_copies_on_a_heap() -> None:
    assert values(run_ranks(copied_on_a_heap, 2)) == [[True] * 8] * 2


@pytest.mark.num_ranks(2)
def test_fused_ops_need_none_of_them() -> None:
    assert values(run_ranks(fused_ways, 2, timeout=150.0)) == [[]] * 2


@pytest.mark.num_gpus(2)
def test_on_two_gpus() -> None:
    assert values(run_ranks(copied_on_a_heap, 2)) == [[True] * 8] * 2
    assert values(run_ranks(fused_ways, 2, timeout=150.0)) == [[]] * 2

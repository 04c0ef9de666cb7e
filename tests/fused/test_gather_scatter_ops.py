"""`all_gather_gemm` and `gemm_reduce_scatter`: right on every rank, whose shares of rows differ by one where M does
not divide; refused calls; inputs that are overwritten at once; replays of a CUDA graph.
"""

import itertools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from pyrocshmem import Heap, stream_k
from pyrocshmem.calls.workspace import Workspace, workspace_for
from pyrocshmem.errors import ShmemError
from pyrocshmem.reference.problems import PROBLEMS
from pyrocshmem.stream_k.choice.config import BY_ROWS
from pyrocshmem.stream_k.choice.placement import placement_names
from pyrocshmem.stream_k.choice.rules import cost_model
from pyrocshmem.stream_k.ops import pulls
from tests.fused import bodies
from tests.fused.cases import (
    HEAP_BYTES,
    Case,
    Operands,
    Verdict,
    assert_right,
    assert_same_bits,
    call,
    judge,
    repeat,
    run_case,
    run_cases,
)
from tests.ranks import run_ranks, values
from tests.stream_k.products import Frame, device, random

TIER = 3
TIMEOUT_S = 100.0
FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
OPS = ("all_gather", "reduce_scatter")


WAYS = [(op, placement) for op in OPS for placement in placement_names(PROBLEMS[op].op)]
# Those that are pulled into the caller's tensor.
PULLED = [("all_reduce", "copy_engine"), *(("all_scatter", placement) for placement in BY_ROWS)]
OUTS = ("new", "ordinary", "strided", "symmetric")

every_op = pytest.mark.parametrize("op", OPS)
every_way = pytest.mark.parametrize("way", WAYS, ids="-".join)


def cases_of(op: str, placement: str) -> list[Case]:
    """For three ranks. Sizes of 0, 1, 2: ranks without rows, without a share of K, without anything."""
    split = (("split", "stream_k"), ("num_programs", 3))
    long = 936 if op == "reduce_scatter" else 312
    made = [
        Case(op, 97, 45, 51, FP16, config=(("comm_rows", 8),)),
        Case(op, 50, 40, 64, FP32, "symmetric", layout="transposed"),
        # Columns that descriptors read; blocks of rows start where they may not.
        Case(op, 52, 40, 64, FP32, "new", layout="transposed"),
        Case(op, 2, 70, 40, BF16, "ordinary", bias="own", activation="gelu"),
        Case(op, 2, 33, 40, FP32, "symmetric", bias="fp32"),
        Case(op, 33, 40, 0, FP32, "strided", bias="fp32"),
        Case(op, 34, 40, 0, FP16, "ordinary"),
        Case(op, 20, 24, 2, FP32, "ordinary"),
        Case(op, 1, 1, 3, FP16, "symmetric"),
        Case(op, 0, 8, 8, FP16, "ordinary"),
        Case(op, 8, 0, 8, FP32),
        Case(op, 64, 72, long, FP16, "symmetric", bias="fp32", activation="silu", config=split),
        Case(op, 40, 20, 48, FP32, "strided", bias="own", activation="relu", layout="misaligned"),
        Case(op, 41, 37, 53, BF16, "ordinary", layout="mixed"),
        Case(op, 41, 37, 53, FP16, "symmetric", layout="mixed"),
    ]
    return [case.with_config(placement=placement) for case in made]


@every_way
@pytest.mark.num_ranks(3)
def test_three_ranks(way: tuple[str, str]) -> None:
    assert_right(values(run_ranks(run_cases, 3, cases_of(*way), timeout=TIMEOUT_S)))


@pytest.mark.num_ranks(2)
def test_two_ranks() -> None:
    layouts = itertools.cycle(("column", "sliced", "view"))
    cases = [
        Case(op, 71, 50, 66, dtype, out, layout=next(layouts)).with_config(placement=placement)
        for (op, placement), dtype in itertools.product(WAYS, (FP16, BF16, FP32))
        for out in (OUTS if dtype == FP16 else OUTS[:1])
    ]
    # The strict mode, whose partial sums are not rounded, and those that travel in the other 16 bits.
    cases += [
        Case(op, 71, 50, 66, FP16).with_config(placement=placement, partial_dtype=dtype)
        for (op, placement), dtype in itertools.product(WAYS, (FP32, BF16))
        if op == "reduce_scatter"
    ]
    assert_right(values(run_ranks(run_cases, 2, cases, timeout=TIMEOUT_S)))


@pytest.mark.num_ranks(4)
def test_four_ranks() -> None:
    cases = [
        Case(op, 97, 64, 128, FP16, out, bias="own").with_config(placement=placement)
        for (op, placement), out in zip(WAYS, itertools.cycle(("symmetric", "new")), strict=False)
    ]
    assert_right(values(run_ranks(run_cases, 4, cases, timeout=TIMEOUT_S)))


@pytest.mark.num_ranks(5)
def test_sums_of_five_ranks() -> None:
    """Ranks without rows; steps that groups of tile rows don't divide, nor steps the blocks; split tiles for peers."""
    split = {"chunk": 2, "group_m": 4, "split": "stream_k", "num_programs": 5}
    cases = []
    for op in ("reduce_scatter", "all_reduce"):
        few, odd = Case(op, 3, 20, 24, FP32, "ordinary"), Case(op, 331, 7, 40, FP16, bias="own")
        large = Case(op, 334, 40, 1500, FP16, "strided", "fp32", "silu").with_config(**split)
        cases += [few, odd.with_config(chunk=2, group_m=3, num_programs=2), large]
    cases = [case.with_config(placement="copy_engine") for case in cases]
    assert_right(values(run_ranks(run_cases, 5, cases, timeout=TIMEOUT_S)))


def in_parts(rank: int, world_size: int, cases: list[Case]) -> tuple[list[Verdict], int]:
    """Cases whose steps have two tiles, where they may be cut; and how many parts of rows there were."""
    parts, honest, config = [], pulls.Block, cases[0].small_config()
    step = 2 * config.block_m * config.block_n

    def block(rows: Any, columns: tuple[int, int], tiles: Any) -> pulls.Block:
        parts.append(columns[0] > 0)
        return honest(rows, columns, tiles)

    with mock.patch.object(pulls, "STEP_ELEMENTS", step), mock.patch.object(pulls, "Block", block):
        return run_cases(rank, world_size, cases), sum(parts)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("op", ["all_scatter", "all_reduce", "reduce_scatter"])
@pytest.mark.num_ranks(3)
def test_wide_steps_come_in_parts(op: str, ranks: int) -> None:
    """The last one of columns that end inside a tile; of blocks of rows that differ, and that some ranks have not; of
    all of a block's rows at once, which are sent in parts, too."""
    sizes = [(97, 90, 40), (64, 128, 16), (33, 75, 24), (2, 70, 8)]
    cases = [
        Case(op, *size, FP16, out, bias="own").with_config(
            placement="copy_engine", chunk=chunk, group_m=chunk, num_programs=2
        )
        for size, chunk, out in itertools.product(sizes, (2, 16), OUTS)
        if (chunk == 16 or op != "reduce_scatter") and (size[0] > 2 or out != "strided")
    ]
    for found, parts in values(run_ranks(in_parts, ranks, cases, timeout=TIMEOUT_S)):
        assert_right([found])
        assert parts >= len([case for case in cases if case.M > 2])


@pytest.mark.num_ranks(1)
def test_one_rank() -> None:
    """No peers: the result is the product, whatever the placement."""
    cases = [
        Case(op, 40, 50, 64, dtype, out, bias="fp32", activation="silu").with_config(placement=placement)
        for (op, placement), dtype, out in zip(WAYS * 2, (FP16, FP32, BF16, FP16), OUTS, strict=False)
    ]
    assert_right(values(run_ranks(run_cases, 1, cases, timeout=TIMEOUT_S)))


def other_placements(rank: int, world_size: int, op: str) -> list[str]:
    """What calls with placements that the op doesn't have raise; and that a right one follows."""
    case = Case(op, 41, 37, 53, FP16, "ordinary")
    with Heap(HEAP_BYTES) as heap:
        found = [
            outcome(lambda p=placement: run_case(case.with_config(placement=p), heap, 1))  # type: ignore[misc]
            for placement in placement_names()
            if placement not in placement_names(PROBLEMS[op].op)
        ]
        assert_right([[run_case(case, heap, 2)]])
        return found


@every_op
@pytest.mark.num_ranks(2)
def test_placements_that_it_does_not_have(op: str) -> None:
    for found in values(run_ranks(other_placements, 2, op, timeout=TIMEOUT_S)):
        assert len(found) == len(placement_names()) - len(placement_names(PROBLEMS[op].op)) > 0
        assert all(text.startswith("ValueError: Config.placement is ") for text in found), found


@pytest.mark.num_ranks(2)
def test_20_calls() -> None:
    """Fault 22: the same bits every time; data of the call before, or of another op, would show."""
    ways = [*WAYS, ("all_reduce", "after")]
    cases = [Case(op, 41, 20, 24, FP32).with_config(placement=placement) for op, placement in ways]
    verdicts = values(run_ranks(repeat, 2, cases, 20, timeout=TIMEOUT_S))
    assert_right(verdicts)
    for of_rank in verdicts:
        assert_same_bits(of_rank, len(cases))


@pytest.mark.parametrize("symmetric", [False, True], ids=["ordinary", "symmetric"])
@every_way
@pytest.mark.num_ranks(3)
def test_operands_are_the_callers_again_when_the_call_returns(way: tuple[str, str], symmetric: bool) -> None:
    op, placement = way
    case = Case(op, 40, 33, 48, FP32).with_config(placement=placement)
    assert values(run_ranks(bodies.overwritten, 3, case, symmetric, timeout=TIMEOUT_S)) == [[]] * 3


def captured(rank: int, world_size: int, case: Case) -> list[str]:
    """Replays of one graph with inputs changed in place, eager calls of both ops between."""
    errors = []
    with Heap(HEAP_BYTES) as heap:
        inputs = Operands(case, rank, world_size, 0)
        frame = Frame(*inputs.shape, case.dtype)
        call(case, heap, inputs, frame.out)
        heap.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call(case, heap, inputs, frame.out)
        for seed in range(1, 11):
            fresh = Operands(case, rank, world_size, seed)
            inputs.a.copy_(fresh.a)
            inputs.b.copy_(fresh.b)
            if fresh.bias is not None and inputs.bias is not None:
                inputs.bias.copy_(fresh.bias)
            frame.poison()
            graph.replay()
            heap.synchronize()
            try:
                judge(case, fresh, frame.out, world_size)
                frame.check()
            except AssertionError as error:
                errors.append(f"replay {seed}: {error}")
            if seed % 3 == 0:
                errors += [found.error for found in eager_calls(heap, seed) if found.error]
    return errors


def eager_calls(heap: Heap, seed: int) -> list[Verdict]:
    return [run_case(Case(op, 41, 33, 48, FP32, "symmetric"), heap, seed) for op in OPS]


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.num_ranks(2))])
@pytest.mark.parametrize("way", [*WAYS, *PULLED], ids="-".join)
@pytest.mark.gpu
def test_replayed_in_a_graph(way: tuple[str, str], num_ranks: int) -> None:
    op, placement = way
    case = Case(op, 97, 72, 136, FP16, bias="own").with_config(placement=placement, chunk=1)
    assert values(run_ranks(captured, num_ranks, case, timeout=TIMEOUT_S)) == [[]] * num_ranks


def outcome(body: Callable[[], Any]) -> str:
    """Class and text of what `body` raises, "" if nothing."""
    try:
        body()
    except (ShmemError, ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def op_of(op: str) -> Callable[..., Any]:
    return getattr(stream_k, PROBLEMS[op].op)  # type: ignore[no-any-return]


def goes_on(heap: Heap, op: str, seed: int) -> None:
    error = run_case(Case(op, 21, 24, 32, FP32, "symmetric"), heap, seed).error
    assert not error, error


def wrong_calls(rank: int, world_size: int, op: str) -> dict[str, str]:
    """The caller's mistakes, the same on all ranks; by name, what they raised."""
    found = {}
    case = Case(op, 21, 24, 64, FP32)
    with Heap(HEAP_BYTES) as heap, Heap(1 << 20) as other:
        operands = Operands(case, rank, world_size, 1)
        a, b, (rows, columns) = operands.a, operands.b, operands.shape
        out = torch.full((rows, columns), float("nan"), device=device())
        bias = random(1, columns, FP32, 3)[0]
        calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
            "mixed": ((a, b.half()), {}),
            "float64": ((a.double(), b.double()), {}),
            "whole numbers": ((a.int(), b.int()), {}),
            "no tensor": ((a.tolist(), b), {}),
            "dimensions": ((a[0], b), {}),
            "dimensions of b": ((a, b[None]), {}),
            "inner": ((a, b[1:]), {}),
            "shape of out": ((a, b), {"out": out[:, 1:]}),
            "rows of out": ((a, b), {"out": random(21 if rows < 21 else 11, columns, FP32)}),
            "dtype of out": ((a, b), {"out": out.half()}),
            "overlap of out": ((a, b), {"out": out[:1].expand(rows, columns)}),
            "out is b": ((a, b), {"out": b[:rows]}),
            "bias": ((a, b), {"bias": bias[1:]}),
            "dtype of bias": ((a, b), {"bias": bias.half()}),
            "activation": ((a, b), {"activation": "swish"}),
            "workspace": ((a, b), {"workspace": Workspace(other)}),
            "group": ((a, b), {"group": "world"}),
            "device": ((a.to("meta"), b.to("meta")), {"out": None}),
        }
        if op == "all_gather":
            calls["rows of all ranks"] = ((a, b), {"num_rows": 30})
        for seed, (name, (given, more)) in enumerate(calls.items()):
            options = {"group": heap, "out": out, **operands.sizes, **more}
            found[name] = outcome(lambda o=given, m=options: op_of(op)(*o, **m))  # type: ignore[misc]
            assert out.isnan().all(), name
            goes_on(heap, op, seed)
    return found


# How each error begins, and what it must say.
MISTAKES = {
    "mixed": ("TypeError", "b is torch.float16; allowed are torch.float16, torch.bfloat16, torch.float32"),
    "float64": ("TypeError", "torch.float64, allowed are torch.float16, torch.bfloat16, torch.float32"),
    "whole numbers": ("TypeError", "torch.int32, allowed are torch.float16, torch.bfloat16, torch.float32"),
    "no tensor": ("TypeError", "list"),
    "dimensions": ("ValueError", "a has 1 dimensions"),
    "dimensions of b": ("ValueError", "b has 3 dimensions"),
    "inner": ("ValueError", "inner"),
    "shape of out": ("ValueError", "out"),
    "rows of out": ("ValueError", "out"),
    "dtype of out": ("TypeError", "out has dtype torch.float16, allowed is torch.float32"),
    "overlap of out": ("ValueError", "out"),
    "out is b": ("ValueError", "shares memory with b"),
    "bias": ("ValueError", "(23,)"),
    "dtype of bias": ("TypeError", "bias has dtype torch.float16, allowed are torch.float32"),
    "activation": ("ValueError", "'swish'"),
    "workspace": ("ValueError", "workspace"),
    "group": ("TypeError", "group is a str"),
    "device": ("ValueError", "meta"),
}


@every_op
@pytest.mark.num_ranks(2)
def test_wrong_calls(op: str) -> None:
    expected = MISTAKES | ({"rows of all ranks": ("ValueError", "of 30")} if op == "all_gather" else {})
    for found in values(run_ranks(wrong_calls, 2, op, timeout=TIMEOUT_S)):
        assert found.keys() == expected.keys()
        for name, (error, part) in expected.items():
            assert found[name].startswith(f"{error}: "), f"{name}: {found[name]!r}"
            assert part in found[name], f"{name}: {found[name]!r}"


def different_calls(rank: int, world_size: int, op: str) -> dict[str, str]:
    """Ranks that disagree; by name, what this one's call raised."""
    first = rank == 0
    M, N, K = 11, 24, 32
    a, b = random(M, K, FP32, 1), random(K, N, FP32, 2)
    calls: dict[str, tuple[torch.Tensor, torch.Tensor, dict[str, Any]]] = {
        # Blocks of different M, or products of different M.
        "rows": (a if first else random(M + 2, K, FP32), b, {}),
        "dtype": (a if first else a.half(), b if first else b.half(), {}),
        "activation": (a, b, {"activation": "relu" if first else "silu"}),
        "bias": (a, b, {"bias": random(1, N, FP32)[0] if first else None}),
    }
    if op == "all_gather":
        calls["inner size of the gathered A"] = (a if first else a[:, 1:], b if first else b[1:], {})
    else:
        calls["columns"] = (a, b if first else b[:, 1:], {})
    found = {}
    with Heap(HEAP_BYTES) as heap:
        for seed, (name, (mine, columns, more)) in enumerate(calls.items()):
            found[name] = outcome(lambda x=mine, y=columns, m=more: op_of(op)(x, y, group=heap, **m))  # type: ignore[misc]
            goes_on(heap, op, seed)
    return found


@every_op
@pytest.mark.num_ranks(2)
def test_ranks_that_disagree_are_told(op: str) -> None:
    """On all ranks, with an error of the call; nothing hangs, and the next call works."""
    for found in values(run_ranks(different_calls, 2, op, timeout=TIMEOUT_S)):
        kept = {
            name: text for name, text in found.items() if not text.startswith(("CallMismatch", "ValueError"))
        }
        assert not kept


def by_blas_and_by_ours(rank: int, world_size: int) -> list[int]:
    """Rows of the gathers by messages whose results were wrong, where rank 0 multiplies by the BLAS, and its peers,
    which have other numbers of columns, by our kernel."""
    placement, N, K = ("unfused", 40, 32) if rank == 0 else ("messages", 24 + rank, 32)

    def chosen(op: Any, request: Any, M: int, workspace: Any) -> Any:
        return cost_model(op.name, M, N, K, FP16, world_size, device(), placement=placement)

    wrong = []
    with Heap(HEAP_BYTES) as heap, mock.patch("pyrocshmem.stream_k.ops.op._chosen", chosen):
        for turn, M in enumerate((5, 64, 5, 33, 2, 64)):
            rows = random(M, K, FP16, turn)  # the same everywhere
            b = random(K, N, FP16)
            out = torch.full((M, N), torch.nan, dtype=FP16, device=rows.device)
            own = torch.tensor_split(rows, world_size)[rank]
            stream_k.all_gather_gemm(own, b, group=heap, out=out, num_rows=M)
            heap.synchronize()
            off = (out.double() - rows.double() @ b.double()).abs().max().item()
            wrong += [] if off < 0.02 else [M]
        assert {plan.placement for plan in workspace_for(heap).plans.values()} == {placement}
    return wrong


@pytest.mark.parametrize(
    "ranks", [pytest.param(ranks, marks=pytest.mark.num_ranks(ranks)) for ranks in (2, 3)]
)
def test_behind_messages_each_rank_multiplies_as_it_likes(ranks: int) -> None:
    """So columns, of which each may have its own, may decide who multiplies few rows."""
    assert values(run_ranks(by_blas_and_by_ours, ranks, timeout=TIMEOUT_S)) == [[]] * ranks

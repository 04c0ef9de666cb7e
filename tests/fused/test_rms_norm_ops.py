"""`gemm_all_reduce_rms_norm` and `gemm_rms_norm_all_scatter`: right and equal on all ranks; odd rows; gradients;
refused calls. tests/library traces them. Starts of ranks are few: a start runs many checks.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pyrocshmem import Heap, target  # before Triton

import triton  # isort: skip
import triton.language as tl  # isort: skip

from pyrocshmem.calls.workspace import Workspace
from pyrocshmem.collectives.epilogue import row_squares
from pyrocshmem.reference import rms_norm as reference
from pyrocshmem.stream_k.ops.gemm_rms_norm import scattered
from tests.fused import norm_bodies as bodies
from tests.fused.cases import HEAP_BYTES
from tests.fused.norm_bodies import BF16, F16, F32, Case
from tests.fused.norm_gradients import gradients
from tests.ranks import run_ranks, values
from tests.stream_k.products import device

TIER = 3
TIMEOUT_S = 110.0
ONE, TWO = ((("algorithm", algorithm),) for algorithm in ("one_shot", "two_shot"))


def cases(few: bool) -> list[Case]:
    """Rows that ranks don't divide, fewer than ranks, one, none; columns that units don't divide, fewer than a unit;
    shares of K of different lengths, and none."""
    return [
        Case(2, 37, 25, F16, F32, config=TWO),
        Case(7, 37, 25, F16, F32, residual=False, bias=F32),
        Case(1, 45, 24, F32, BF16, bias=F32, config=TWO),
        Case(4, 3, 24, F32, F16, residual=False, config=ONE),
        Case(5, 40, 33, F32, F32, wire=F16, config=ONE),
        Case(6, 33, 25, BF16, F32, residual=False),
        Case(34, 40, 130, F16, F32, wire=F32, config=TWO),
        Case(6, 9, 25, F16, F32, residual=False, bias=F32, hidden=11),
        Case(4, 5, 8, F32, F32, residual=False, hidden=1),
        Case(
            34,
            70,
            130,
            BF16,
            F32,
            residual=False,
            bias=F32,
            config=(("split", "stream_k"), ("num_programs", 3)),
        ),
        Case(5, 80, 40, F16, F32, residual=False, config=(("block_m", 16), ("block_n", 64))),
        *(
            []
            if few
            else [
                Case(1, 72, 24, F16, F16, bias=F16, config=ONE),
                Case(0, 24, 16, F16, F16, residual=False),
                Case(3, 24, 0, F16, F32, bias=F16),
                Case(6, 33, 25, BF16, BF16, bias=F32, config=TWO),
                Case(6, 33, 25, F16, F32, config=(("placement", "after"), *TWO)),
                Case(7, 37, 25, F16, F32, wire=F32, config=(("placement", "unfused"), *TWO)),
                Case(6, 33, 25, F32, F32, bias=F32, config=(("placement", "unfused"), *ONE)),
                Case(9, 40, 24, F16, F32, residual=False, config=None),
                Case(3, 2100, 8, F16, F16, config=TWO),
            ]
        ),
    ]


def body(rank: int, world_size: int, few: bool) -> tuple[list[str], list[str]]:
    with Heap(HEAP_BYTES) as heap:
        return bodies.forward(heap, cases(few))


def besides(rank: int, world_size: int) -> dict[str, Any]:
    with Heap(HEAP_BYTES) as heap:
        found: dict[str, Any] = {"late": bodies.late(heap, True)}
        found["unguarded"] = bodies.late(heap, False) if target.interpreted() else None
        found |= {"same_bits": bodies.same_bits(heap), "odd_rows": bodies.odd_rows(heap)}
        found["repeated"], found["graphs"] = bodies.repeated(heap)
        return found | {"mistakes": bodies.mistakes(heap)}


def derivatives(rank: int, world_size: int) -> list[str]:
    with Heap(HEAP_BYTES) as heap:
        return gradients(heap)


def assert_right(found: list[tuple[list[str], list[str]]]) -> None:
    assert [wrong for wrong, _ in found] == [[]] * len(found)
    bits = [each for _, each in found]
    assert all(each == bits[0] for each in bits)
    assert len(bits[0]) > 2 * len(cases(few=True))


@pytest.mark.num_ranks(3)
def test_three_ranks() -> None:
    assert_right(values(run_ranks(body, 3, True, timeout=TIMEOUT_S)))


@pytest.mark.gpu
@pytest.mark.num_ranks(4)
def test_four_ranks() -> None:
    assert_right(values(run_ranks(body, 4, True, timeout=TIMEOUT_S)))


# How each error begins, and what it must say.
MISTAKES = {
    "length": ("ValueError", "weight is (23,)"),
    "strides": ("ValueError", "contiguous (24,)"),
    "dtype": ("TypeError", "int64, allowed are torch.float16, torch.bfloat16, torch.float32"),
    "no weight": ("TypeError", "NoneType"),
    "eps": ("ValueError", "eps is -1.0"),
    "residual": ("ValueError", "residual is (3, 24)"),
    "residual's dtype": ("TypeError", "residual has dtype torch.float16, allowed is torch.float32"),
    "twice": ("ValueError", "beside a config"),
    "rows differ": ("CallMismatch", "3 x 24"),
    "eps differ": ("CallMismatch", "eps="),
    "residuals differ": ("CallMismatch", "residual=False"),
    "weights differ": ("CallMismatch", "weight=torch.float16"),
    "length of a shard's": ("ValueError", "weight is (23,)"),
    "columns differ": ("CallMismatch", "rms_norm"),
    "columns not of hidden": ("ValueError", "torch.tensor_split"),
    "rows of columns differ": ("CallMismatch", "rms_norm"),
}


@pytest.mark.num_ranks(2)
def test_two_ranks() -> None:
    """All sizes, in one start."""
    assert_right(values(run_ranks(body, 2, False, timeout=TIMEOUT_S)))


@pytest.mark.num_ranks(2)
def test_gradients() -> None:
    assert values(run_ranks(derivatives, 2, timeout=TIMEOUT_S)) == [[], []]


@pytest.mark.num_ranks(2)
def test_late_ranks_and_mistakes() -> None:
    """Late ranks, with their control; the same bits; odd rows; other data at the same places; mistakes."""
    found = values(run_ranks(besides, 2, timeout=TIMEOUT_S))
    for each in found:
        assert each["late"] == 0
        assert each["same_bits"] == []
        assert each["odd_rows"] == each["repeated"] == []
        assert (each["graphs"] > 0) == (target.backend() == "cuda" and not target.interpreted())
        assert each["mistakes"].keys() == MISTAKES.keys()
        for name, (error, part) in MISTAKES.items():
            assert each["mistakes"][name].startswith(f"{error}: "), f"{name}: {each['mistakes'][name]!r}"
            assert part in each["mistakes"][name], f"{name}: {each['mistakes'][name]!r}"
    if target.interpreted():
        assert sum(each["unguarded"] for each in found) > 0


@pytest.mark.num_ranks(1)
def test_one_rank() -> None:
    assert_right(values(run_ranks(body, 1, True, timeout=TIMEOUT_S)))


def by_the_blas(rank: int, world_size: int) -> list[tuple[list[str], list[str]]]:
    """On all ranks, and on the first alone."""
    shared = [Case(37, 40, 24, F16, F32, residual=False), Case(6, 24, 16, F32, F32, residual=False, bias=F32)]
    with Heap(HEAP_BYTES) as heap:
        return [bodies.by_the_blas(heap, shared, ranks) for ranks in ((0,), tuple(range(world_size)))]


@pytest.mark.num_ranks(2)
def test_products_of_the_blas() -> None:
    """Of columns: each rank multiplies as is fastest for its own, and all have the same result."""
    first, *others = values(run_ranks(by_the_blas, 2, timeout=TIMEOUT_S))
    assert [wrong for wrong, _ in first] == [[], []]
    assert all(bits for _, bits in first)
    assert others == [first] * len(others)


SPLIT = {"split": "stream_k", "num_programs": 3}
FEW_ROWS = {"block_m": 16, "block_n": 64}


@pytest.mark.num_ranks(1)
@pytest.mark.parametrize(
    ("case", "changes"),
    [
        (Case(40, 70, 33, F16, F32), {"subtiles": 1}),
        (Case(40, 70, 33, BF16, F32, bias=F32), {}),
        (Case(64, 64, 40, BF16, F32, bias=BF16), {}),
        (Case(70, 100, 200, F32, F32), SPLIT),
        (Case(70, 180, 200, F16, F32, bias=F16), {**SPLIT, "block_n": 128, "subtiles": 4}),
        (Case(3, 150, 70, F16, F16), {**FEW_ROWS, "subtiles": 1}),
        (Case(20, 150, 200, BF16, F32, bias=F32), {**FEW_ROWS, **SPLIT}),
        (Case(1, 1, 1, F16, F32), {}),
    ],
    ids=str,
)
def test_the_norm_takes_the_squares_of_the_tiles(case: Case, changes: dict[str, Any]) -> None:
    """Whole tiles and split ones, of few rows, partly outside; of the rounded product, with a bias too."""
    with Heap(1 << 22) as heap:
        assert bodies.squares(heap, case, **changes) == []


@triton.jit
def squares_of_twos(sums, col, N, WIDTH: tl.constexpr):
    twos = tl.full((4, WIDTH), 2.0, tl.float32)
    tl.store(sums + tl.arange(0, 4), row_squares(twos, col, N, WIDTH))


@pytest.mark.num_ranks(1)
@pytest.mark.parametrize("N", [33, 45, 48, 70])
def test_columns_outside_do_not_count(N: int) -> None:
    """A copy of B has memory for whole tiles, and anything in it."""
    sums = torch.empty(4, device=device())
    squares_of_twos[(1,)](sums, 32, N, WIDTH=16)
    assert sums.tolist() == [4.0 * min(N - 32, 16)] * 4


@pytest.mark.num_ranks(1)
def test_a_spoilt_result_is_seen() -> None:
    """Of what judges here: one element off by two roundings, one row normalized on its own columns."""
    case = Case(4, 24, 16, F32, F32)
    with Heap(1 << 20) as heap:
        whole = bodies.Whole(case, heap, 1)
        y, total = whole.all_reduce()
        assert not whole.wrong_total(total)
        assert not whole.wrong_norm(y, total)
        operands = (whole.a, whole.b, whole.residual, whole.weight)
        judges: tuple[tuple[Any, Callable[[Any], str]], ...] = (
            (total, whole.wrong_total),
            (y, lambda y: whole.wrong_norm(y, total)),
            # What the command line judges by.
            (y, lambda spoilt: str(reference.check_product(spoilt, *operands, bodies.EPS, y))),
        )
        for x, judge in judges:
            spoilt = x.clone()
            spoilt[2, 3] *= 1.0001
            assert "1 of 96 elements bad" in judge(spoilt)


@pytest.mark.num_ranks(1)
def test_operands_of_another_device_in_an_operator() -> None:
    """What torch.library calls looks at that, too, before it allocates."""
    operands = (
        torch.empty(4, 8, device="meta"),
        torch.empty(8, 8, device="meta"),
        torch.empty(8, device="meta"),
    )
    with Heap(1 << 20) as heap, pytest.raises(ValueError, match="a is on meta, the heap of this rank on"):
        scattered(*operands, 1e-6, None, None, False, None, Workspace(heap))

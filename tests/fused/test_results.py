"""`gemm_all_reduce` and `gemm_all_scatter`: right and equal on all ranks, in every placement.

Each test starts ranks that run a list of cases: outputs of every kind, poisoned and between canaries; biases and
activations; sizes that are prime, 0, and smaller than the number of ranks.
"""

import dataclasses
import itertools

import pytest
import torch

from pyrocshmem import target
from pyrocshmem.stream_k.choice.config import BY_MESSAGE, BY_ROWS
from pyrocshmem.stream_k.choice.placement import placement_names
from tests.fused.cases import STRIDE_0, Case, assert_right, assert_same_bits, repeat, run_cases
from tests.ranks import run_ranks, values

TIER = 3
TIMEOUT_S = 100.0
FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
WAYS = [
    ("all_reduce", "after", "one_shot"),
    ("all_reduce", "after", "two_shot"),
    ("all_reduce", "beside", "one_shot"),
    ("all_reduce", "beside", "two_shot"),
    ("all_reduce", "own_stream", "one_shot"),
    ("all_reduce", "own_stream", "two_shot"),
    ("all_reduce", "inside", "one_shot"),
    ("all_reduce", "inside", "two_shot"),
    ("all_reduce", "copy_engine", "two_shot"),
    ("all_reduce", "messages", "one_shot"),
    ("all_reduce", "messages", "two_shot"),
    ("all_reduce", "unfused", "one_shot"),
    ("all_reduce", "unfused", "two_shot"),
    ("all_scatter", "after", "two_shot"),
    ("all_scatter", "beside", "two_shot"),
    ("all_scatter", "own_stream", "two_shot"),
    ("all_scatter", "inside", "two_shot"),
    ("all_scatter", "copy_engine", "two_shot"),
    ("all_scatter", "pull", "two_shot"),
    ("all_scatter", "messages", "two_shot"),
    ("all_scatter", "unfused", "two_shot"),
]


def cases_of(op: str, placement: str, algorithm: str) -> list[Case]:
    split = (("split", "stream_k"), ("num_programs", 3))
    made = [
        Case(op, 67, 45, 51, FP16, config=(("comm_rows", 8),)),
        Case(op, 50, 40, 64, FP32, "symmetric", squares=True),
        Case(op, 2, 70, 40, BF16, "ordinary", bias="own", activation="gelu"),
        Case(op, 33, 40, 0, FP32, "strided", bias="fp32"),
        Case(op, 1, 1, 3, FP16, "symmetric"),
        Case(op, 0, 8, 8, FP16),
        Case(op, 8, 0, 8, FP32, squares=True),
        Case(
            op,
            64,
            72,
            936 if op == "all_reduce" else 312,
            FP16,
            "symmetric",
            bias="fp32",
            activation="silu",
            config=split,
        ),
        Case(op, 40, 20, 48, FP32, "strided", bias="own", activation="relu", squares=True),
    ]
    if placement in BY_ROWS:
        # Rows that don't lie together, or are none.
        outs = ("padded", "misaligned", "column")
        made += [Case(op, M, 19, 24, FP16, out) for out, M in zip(outs, (67, 41, 5), strict=True)]
        made.append(Case(op, 1, 20, 8, FP32, "misaligned", bias="fp32"))
    return [placed(case, placement, algorithm) for case in made]


def placed(case: Case, placement: str, algorithm: str) -> Case:
    """Row blocks and messages come without squares."""
    squares = case.squares and placement not in (*BY_ROWS, *BY_MESSAGE)
    return dataclasses.replace(case, squares=squares).with_config(
        placement=placement, algorithm=algorithm, chunk=1
    )


@pytest.mark.parametrize("placement", placement_names())
@pytest.mark.num_ranks(3)
def test_three_ranks(placement: str) -> None:
    cases = [case for way in WAYS if way[1] == placement for case in cases_of(*way)]
    assert_right(values(run_ranks(run_cases, 3, cases, timeout=TIMEOUT_S)))


@pytest.mark.num_ranks(2)
def test_two_ranks() -> None:
    layouts = ("transposed", "column", *STRIDE_0)
    cases = [
        Case(op, 70, 50, 64, FP16, out, layout=layout).with_config(placement=placement, algorithm=algorithm)
        for (op, placement, algorithm), out, layout in zip(
            WAYS, itertools.cycle(("new", "symmetric", "strided")), itertools.cycle(layouts), strict=False
        )
    ]
    assert_right(values(run_ranks(run_cases, 2, cases, timeout=TIMEOUT_S)))


@pytest.mark.num_ranks(4)
def test_four_ranks() -> None:
    # All of them on GPUs, where they take no time.
    ways = [way for way in WAYS if way[1] == "beside"] if target.interpreted() else WAYS
    cases = [
        Case(op, 97, 64, 128, FP16, "symmetric").with_config(placement=placement, algorithm=algorithm)
        for op, placement, algorithm in ways
    ]
    assert_right(values(run_ranks(run_cases, 4, cases, timeout=TIMEOUT_S)))


@pytest.mark.num_ranks(1)
def test_one_rank() -> None:
    """No peers: the result is the product, in every placement."""
    cases = [
        placed(Case(op, 40, 50, 64, dtype, out, bias="fp32", squares=squares), placement, algorithm)
        for (op, placement, algorithm), dtype, out, squares in zip(
            WAYS,
            itertools.cycle((FP16, FP32)),
            itertools.cycle(("new", "symmetric", "strided")),
            itertools.cycle((True, False)),
            strict=False,
        )
    ]
    assert_right(values(run_ranks(run_cases, 1, cases, timeout=TIMEOUT_S)))


@pytest.mark.num_ranks(2)
def test_partials_of_other_dtypes() -> None:
    """The strict mode, whose partial sums are not rounded, and those that travel in the other 16 bits."""
    cases = [
        Case("all_reduce", 70, 50, 256, FP16).with_config(
            placement=placement, algorithm=algorithm, partial_dtype=dtype
        )
        for (op, placement, algorithm), dtype in itertools.product(WAYS, (FP32, BF16))
        if op == "all_reduce"
    ]
    assert_right(values(run_ranks(run_cases, 2, cases, timeout=TIMEOUT_S)))


@pytest.mark.num_ranks(2)
def test_20_calls() -> None:
    """Fault 22: the same bits every time, on every rank; data of the call before, or of another way, would show."""
    cases = [placed(Case(op, 41, 20, 24, FP32), placement, how) for op, placement, how in WAYS]
    verdicts = values(run_ranks(repeat, 2, cases, 20, timeout=TIMEOUT_S))
    assert_right(verdicts)
    assert_same_bits(verdicts[0], len(cases))

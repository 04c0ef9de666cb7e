"""A residual meets a sum over ranks before the sum is rounded, whatever sums it: ops with a residual, elementwise
against float64, within one rounding and what sums in fp32 may be off. In the strict mode, where no partial sum is
rounded: a second rounding shows there. `test_partial_sums.py` has every bit of the other one."""

import dataclasses
import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pyrocshmem import Heap, collectives, stream_k
from pyrocshmem.reference import rms_norm as reference
from pyrocshmem.reference.accuracy import EPS32, make_operand
from pyrocshmem.shards import shard_range
from tests.fused.cases import HEAP_BYTES
from tests.ranks import run_ranks, values
from tests.stream_k.products import device, small_config

TIER = 2
TIMEOUT_S = 110.0
EPS = 1e-5
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Of all ways to sum; the choice's own comes beside these, at sizes of less than a wave of tiles and of more.
PLACES = (
    {"placement": "after"},
    {"placement": "beside"},
    {"placement": "own_stream", "algorithm": "one_shot"},
    {"placement": "inside", "algorithm": "one_shot"},
    {"placement": "inside", "algorithm": "two_shot"},
    {"placement": "copy_engine", "chunk": 1},
    {"placement": "messages", "algorithm": "two_shot"},
    {"placement": "unfused", "algorithm": "one_shot"},
    {"placement": "beside", "split": "stream_k", "num_programs": 5},
)
CHOSEN = ((17, 130, 33), (17, 33, 33), (333, 33, 20), (100, 130, 20))


@dataclasses.dataclass(frozen=True)
class Case:
    """M N K: global sizes. changes: to small_config; None: what the op chooses. bias: its dtype. odd: no row of the
    residual starts at a multiple of 16 bytes, and they don't lie together."""

    shape: tuple[int, int, int]
    dtype: torch.dtype
    changes: tuple[tuple[str, Any], ...] | None = None
    bias: torch.dtype | None = None
    odd: bool = False


def cases(seed: int, few: bool) -> Iterator[Case]:
    """few: every second way to sum, where four interpreters share a machine."""
    draw = random.Random(seed)
    for number, shape in enumerate(CHOSEN[1:2] if few else CHOSEN):
        for dtype in DTYPES if number < 2 else DTYPES[number % 2 :: 2]:
            yield Case(shape, dtype, odd=number == 1)
    for place in PLACES[seed % 2 :: 2] if few else PLACES:
        dtype = draw.choice(DTYPES[:2])
        sizes = (draw.randint(33, 75), draw.choice((40, 64, 77)), draw.randint(1, 70))
        bias = draw.choice((None, None, dtype, torch.float32))
        yield Case(sizes, dtype, tuple(place.items()), bias, odd=draw.random() < 0.3)


def beyond(found: torch.Tensor, exact: torch.Tensor, magnitude: torch.Tensor, terms: int) -> int:
    """How many elements are farther from `exact` than one rounding, and a sum of so many fp32 terms of that
    `magnitude`, allow."""
    info = torch.finfo(found.dtype)
    rounding = info.eps / 2 * exact.abs() + info.smallest_normal * info.eps / 2
    allowed = rounding + math.sqrt(max(terms, 1)) * EPS32 * magnitude
    return int(((found.double() - exact).abs() <= allowed).logical_not().sum())


class Operands:
    """The whole ones of a case, the same on all ranks."""

    def __init__(self, case: Case, seed: int) -> None:
        def make(shape: tuple[int, ...], tag: str, dtype: torch.dtype) -> torch.Tensor:
            return make_operand(shape, dtype, seed, 0, tag=tag, device="cpu").to(device())

        M, N, K = case.shape
        self.K = K
        self.a, self.b = make((M, K), "a", case.dtype), make((K, N), "b", torch.float32)
        self.b = (self.b * K**-0.5).to(case.dtype)
        self.bias = None if case.bias is None else make((N,), "bias", case.bias)
        wide = make((M, N + 3), "residual", case.dtype)
        self.residual = wide[:, 1 : N + 1] if case.odd else wide[:, :N].contiguous()
        self.weight = make((N,), "weight", case.dtype)
        more = [x.double() for x in (self.residual, self.bias) if x is not None]
        self.sums = self.a.double() @ self.b.double()
        self.exact = sum(more, self.sums)
        self.magnitude = sum((x.abs() for x in more), self.a.double().abs() @ self.b.double().abs())

    def beyond(self, total: torch.Tensor) -> int:
        return beyond(total, self.exact, self.magnitude, self.K)


def products(rank: int, world_size: int, seed: int) -> list[str]:
    """Of the total and of its norm: what is wrong. Also whether a sum that was rounded before would be found."""
    wrong = []
    with Heap(HEAP_BYTES) as heap:
        for number, case in enumerate(cases(seed, few=world_size > 2)):
            whole = Operands(case, seed + number)
            part = slice(*shard_range(case.shape[2], rank, world_size))
            options: dict[str, Any] = {"partial_dtype": torch.float32}
            if case.changes is not None:
                options = {"config": small_config(**dict(case.changes), **options)}
            y, total = stream_k.gemm_all_reduce_rms_norm(
                whole.a[:, part], whole.b[part], whole.residual, whole.weight, EPS, group=heap, bias=whole.bias,
                **options,
            )  # fmt: skip
            heap.synchronize()
            if bad := whole.beyond(total):
                wrong.append(f"{case}: {bad} of {total.numel()} elements of the total")
            ref = reference.in_float64(total, whole.weight, EPS)
            if beyond(y, ref, ref.abs(), case.shape[1] + 16):
                wrong.append(f"{case}: the norm is not that of the rounded total")
            rounded = (whole.exact - whole.residual.double()).to(case.dtype)
            if case.dtype != torch.float32 and not whole.beyond(rounded + whole.residual):
                wrong.append(f"{case}: nobody would see two roundings")
    return wrong


def whole_tensors(rank: int, world_size: int, seed: int) -> list[str]:
    """The same of the ops on tensors in memory."""
    wrong = []
    with Heap(HEAP_BYTES) as heap:
        for number, dtype in enumerate(DTYPES):
            *x, residual = (
                make_operand((9, 40), dtype, seed + number, source, device="cpu").to(device())
                for source in range(world_size + 1)
            )
            weight = torch.ones(40, dtype=dtype, device=device())
            terms = torch.stack([each.double() for each in (*x, residual)])
            for algorithm in ("one_shot", "two_shot"):
                _, total = collectives.all_reduce_rms_norm(
                    x[rank], residual, weight, EPS, group=heap, algorithm=algorithm
                )
                if beyond(total, terms.sum(0), terms.abs().sum(0), len(terms)):
                    wrong.append(f"all_reduce_rms_norm, {algorithm}, {dtype}")
            for kept in DTYPES:
                _, h = collectives.rms_norm(x[rank], weight, EPS, group=heap, residual=residual.to(kept))
                exact = x[rank].double() + residual.to(kept).double()
                if beyond(h, exact, exact.abs(), 1):
                    wrong.append(f"rms_norm, {dtype}, a residual of {kept}")
        heap.synchronize()
    return wrong


@pytest.mark.num_ranks(1)
def test_products_on_one_rank() -> None:
    assert values(run_ranks(products, 1, random.randrange(1 << 20), timeout=TIMEOUT_S)) == [[]]


@pytest.mark.num_ranks(2)
def test_products_on_two_ranks() -> None:
    assert values(run_ranks(products, 2, random.randrange(1 << 20), timeout=TIMEOUT_S)) == [[]] * 2


@pytest.mark.num_ranks(4)
def test_products_on_four_ranks() -> None:
    assert values(run_ranks(products, 4, random.randrange(1 << 20), timeout=TIMEOUT_S)) == [[]] * 4


@pytest.mark.num_ranks(2)
def test_whole_tensors() -> None:
    assert values(run_ranks(whole_tensors, 2, random.randrange(1 << 20), timeout=TIMEOUT_S)) == [[]] * 2


@pytest.mark.num_ranks(1)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_the_command_line_sees_two_roundings(dtype: torch.dtype) -> None:
    """By what it judges: where the residual takes most of the sum away, the sum's rounding is large beside what is
    left."""
    a, b = make_operand((9, 40), dtype, 1, 0, tag="a"), make_operand((40, 64), dtype, 1, 0, tag="b")
    sums = a.double() @ b.double()
    residual = (make_operand((9, 64), dtype, 1, 0, tag="residual").double() / 64 - sums).to(dtype)
    weight = torch.ones(64, dtype=dtype)
    once, twice = (sums + residual.double()).to(dtype), sums.to(dtype) + residual
    right, wrong = (reference.in_float64(total, weight, EPS).to(dtype) for total in (once, twice))
    given = (a, b, residual, weight, EPS, right)
    assert reference.check_product(right, *given).ok
    assert not reference.check_product(wrong, *given).ok

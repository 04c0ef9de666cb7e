"""`all_reduce_rms_norm`: right and equal on all ranks, odd rows, gradients, refused calls; one start of ranks does all.

Each result is judged in two steps, both elementwise: the total against float64, then the norm of just that total.
tests/fused/test_rms_norm_ops.py has late ranks, of the same kernel.
"""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.nn import functional

from pyrocshmem import CallMismatch, Heap, collectives, message
from pyrocshmem.calls.workspace import workspace_for
from pyrocshmem.collectives.all_reduce_rms_norm import results
from pyrocshmem.reference import rms_norm as reference
from pyrocshmem.reference.accuracy import bound, compare, make_operand
from tests.fused.cases import digest
from tests.ranks import run_ranks, values
from tests.stream_k.products import device

TIER = 2
TIMEOUT_S = 100.0
HEAP_BYTES = 16 << 20
EPS = 1e-5
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Case:
    """layout: of x and the residual: "row", "column" (of the last two dimensions), "odd" (off 16-byte boundaries)."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    weight: torch.dtype
    algorithm: str = "auto"
    residual: bool = True
    layout: str = "row"


# Columns that units don't divide, fewer than a unit; rows fewer than ranks, that ranks don't divide, in three
# dimensions, in one, none.
FEW = [
    Case((7, 37), F16, F32, "two_shot"),
    Case((2, 2, 40), BF16, BF16, "one_shot"),
    Case((1, 45), F32, F16, "two_shot", residual=False),
]
MORE = [
    Case((4, 3), BF16, F32, "two_shot", layout="column"),
    Case((5, 48), F16, F16, layout="odd"),
    Case((24,), F32, F32, "one_shot"),
    Case((3, 2100), F16, BF16, "one_shot", residual=False),
    Case((0, 24), F16, F16),
    Case((2, 0), F32, F32),
]


def laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    if layout == "column":
        return x.mT.contiguous().mT
    return torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape) if layout == "odd" else x


class Whole:
    """What all ranks bring, and how results are judged."""

    def __init__(self, case: Case, heap: Heap, seed: int) -> None:
        self.case, self.heap = case, heap
        self.parts = [self._random(case.shape, case.dtype, "x", seed, r) for r in range(heap.world_size)]
        self.weight = self._random(case.shape[-1:], case.weight, "weight", seed, 0)
        self.residual = self._random(case.shape, case.dtype, "residual", seed, 0) if case.residual else None

    def _random(
        self, shape: tuple[int, ...], dtype: torch.dtype, tag: str, seed: int, rank: int
    ) -> torch.Tensor:
        made = make_operand(shape, dtype, seed, rank, tag=tag).to(device())
        return made if tag == "weight" else laid_out(made, self.case.layout)

    @property
    def x(self) -> torch.Tensor:
        return self.parts[self.heap.rank]

    def call(self, eps: float = EPS) -> tuple[torch.Tensor, torch.Tensor]:
        # What the allocator gives next is then NaN where the op doesn't write it.
        poison = [
            torch.full(self.case.shape, torch.nan, dtype=self.case.dtype, device=device()) for _ in "ab"
        ]
        del poison
        given = (self.x, self.residual, self.weight, eps)
        return collectives.all_reduce_rms_norm(*given, group=self.heap, algorithm=self.case.algorithm)

    def wrong(self, y: torch.Tensor, total: torch.Tensor) -> str:
        case = self.case
        if not all(
            (x.shape, x.dtype, x.is_contiguous()) == (case.shape, case.dtype, True) for x in (y, total)
        ):
            return f"{y.shape} {y.dtype}, {total.shape} {total.dtype}"
        if total.numel() == 0:
            return ""
        rows = (-1, case.shape[-1])
        terms = [part.double() for part in (*self.parts, self.residual) if part is not None]
        exact, magnitude = (sum(each).reshape(rows) for each in (terms, [x.abs() for x in terms]))
        allowed = bound(exact, exact.to(case.dtype), magnitude, len(terms), case.dtype)
        found = compare(total.view(rows), exact, exact, allowed)
        if not found.ok:
            return f"the total: {found}"
        h = total.view(rows)
        plain = functional.rms_norm(h.float(), h.shape[1:], self.weight.float(), EPS).to(case.dtype)
        found = reference.check(y.view(rows), h, self.weight, EPS, plain)
        return "" if found.ok else f"the norm: {found}"


def forward(heap: Heap, cases: list[Case]) -> tuple[list[str], list[str]]:
    """(what was wrong, the bits of all results), of two sets of data for the same plan."""
    wrong, bits = [], []
    for number, case in enumerate(cases):
        planned = len(workspace_for(heap).plans)
        for seed in (number, number + 100):
            whole = Whole(case, heap, seed)
            y, total = whole.call()
            heap.synchronize()
            wrong += [f"{case}: {text}" for text in (whole.wrong(y, total),) if text]
            bits += [digest(y), digest(total)]
        if heap.world_size > 1 and len(workspace_for(heap).plans) != planned + (total.numel() > 0):
            wrong.append(f"{case}: planned anew")
    return wrong, bits


def odd_rows(heap: Heap) -> list[str]:
    """Zeros, NaN, infinity, and the bits of an empty message: as in PyTorch, and the other rows as ever."""
    wrong = []
    sentinel = torch.tensor([message.SENTINEL.value], dtype=torch.int32, device=device()).view(F32)
    for algorithm, eps in (("one_shot", 0.0), ("two_shot", 0.0), ("two_shot", EPS)):
        whole = Whole(Case((7, 40), F32, F32, algorithm), heap, 3)
        honest, _ = whole.call(eps)
        assert whole.residual is not None
        for x in (*whole.parts, whole.residual):
            x[1] = 0.0
        whole.parts[-1][2, 20], whole.residual[3, 7], whole.parts[0][5, 1] = torch.nan, torch.inf, torch.inf
        whole.residual[6] = sentinel
        y, total = whole.call(eps)
        heap.synchronize()
        theirs = functional.rms_norm(total, (40,), whole.weight, eps)
        if not torch.isclose(y, theirs, rtol=1e-5, atol=0, equal_nan=True).all():
            wrong.append(f"{algorithm}, eps {eps}: not as PyTorch's")
        if y[1].isnan().all() != (eps == 0) or not y[[2, 3, 5, 6]].isnan().any(1).all():
            wrong.append(f"{algorithm}, eps {eps}: the odd rows")
        if not torch.equal(y[[0, 4]], honest[[0, 4]]):
            wrong.append(f"{algorithm}, eps {eps}: the other rows")
    return wrong


def gradients(heap: Heap) -> list[str]:
    """Of every operand, against the whole model in float64; what is off, or would pass when doubled."""
    wrong = []
    for case in (Case((5, 24), F32, F32), Case((2, 2, 10), F16, F32)):
        whole = Whole(case, heap, 5)
        more = [make_operand(case.shape, case.dtype, 6, 0, tag=tag).to(device()) for tag in ("y", "total")]
        mine = [x.clone().requires_grad_() for x in (whole.x, whole.residual, whole.weight)]
        found = torch.autograd.grad(
            collectives.all_reduce_rms_norm(*mine, EPS, group=heap, algorithm="two_shot"), mine, more
        )
        heap.synchronize()
        exact = [x.double().requires_grad_() for x in (whole.x, whole.residual, whole.weight)]
        others = sum(p.double() for r, p in enumerate(whole.parts) if r != heap.rank)
        h = exact[0] + others + exact[1]
        y = functional.rms_norm(h, h.shape[-1:], exact[2], EPS)
        expected = torch.autograd.grad((y, h), exact, [g.double() for g in more])
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            allowed = 8 * torch.finfo(case.dtype).eps * other.abs().max()
            off, doubled = (((k * one.double() - other).abs() > allowed).any() for k in (1, 2))
            if off or not doubled:
                wrong.append(f"{case}: gradient {number}, doubled {bool(doubled)}")
    return wrong


def outcome(heap: Heap, x: Any, residual: Any, weight: Any, eps: float = EPS, algorithm: str = "auto") -> str:
    try:
        collectives.all_reduce_rms_norm(x, residual, weight, eps, group=heap, algorithm=algorithm)
        heap.synchronize()
    except (ValueError, TypeError, CallMismatch) as error:
        if heap.broken:  # all know both calls, which differ when they run
            heap.recover()
        return f"{type(error).__name__}: {error}"
    return ""


# By name, how each error begins, and what it must say.
MISTAKES = {
    "no tensor": ("TypeError", "x is a list"),
    "dtype": (
        "TypeError",
        "x is torch.int64, a tensor is needed of torch.float16, torch.bfloat16, torch.float32",
    ),
    "no dimension": ("ValueError", "1 dimensions or more"),
    "algorithm": ("ValueError", "allowed are auto, one_shot, two_shot"),
    "length": ("ValueError", "weight is (23,)"),
    "strides": ("ValueError", "contiguous (24,)"),
    "weight's dtype": ("TypeError", "int64, allowed are torch.float16, torch.bfloat16, torch.float32"),
    "no weight": ("TypeError", "NoneType"),
    "eps": ("ValueError", "eps is -1.0"),
    "residual": ("ValueError", "residual is (3, 24)"),
    "residual's dtype": ("TypeError", "residual has dtype torch.float16, allowed is torch.float32"),
    "a number as residual": ("TypeError", "residual is a float"),
    "rows differ": ("CallMismatch", "3 x 24"),
    "none on one": ("CallMismatch", "0 x 24"),
    "eps differ": ("CallMismatch", "eps="),
    "residuals differ": ("CallMismatch", "residual=False"),
    "weights differ": ("CallMismatch", "weight=torch.float16"),
    "algorithms differ": ("CallMismatch", "two_shot"),
}


def mistakes(heap: Heap) -> dict[str, str]:
    """By name, what the caller's mistakes, and ranks that disagree, raise."""
    whole = Whole(Case((4, 24), F32, F32), heap, 1)
    x, residual, weight = whole.x, whole.residual, whole.weight
    assert residual is not None
    first = heap.rank == 0
    rows, none = 3 + first, 4 * first
    calls: dict[str, tuple[Any, ...]] = {
        "no tensor": ([x], residual, weight),
        "dtype": (x.long(), residual, weight),
        "no dimension": (x[0, 0], None, weight),
        "algorithm": (x, residual, weight, EPS, "three_shot"),
        "length": (x, residual, weight[1:]),
        "strides": (x, residual, torch.cat((weight, weight))[::2]),
        "weight's dtype": (x, residual, weight.long()),
        "no weight": (x, residual, None),
        "eps": (x, residual, weight, -1.0),
        "residual": (x, residual[1:], weight),
        "residual's dtype": (x, residual.half(), weight),
        "a number as residual": (x, 1.0, weight),
        "rows differ": (x[:rows], residual[:rows], weight),
        "none on one": (x[:none], residual[:none], weight),
        "eps differ": (x, residual, weight, EPS * (1 + first)),
        "residuals differ": (x, residual if first else None, weight),
        "weights differ": (x, residual, weight if first else weight.half()),
        "algorithms differ": (x, residual, weight, EPS, "one_shot" if first else "two_shot"),
    }
    found = {name: outcome(heap, *args) for name, args in calls.items()}
    text = whole.wrong(*whole.call())
    assert not text, text
    return found


def body(rank: int, world_size: int, few: bool) -> dict[str, Any]:
    with Heap(HEAP_BYTES) as heap:
        if few:
            return {"forward": forward(heap, FEW)}
        return {
            "forward": forward(heap, [*FEW, *MORE]),
            "odd_rows": odd_rows(heap),
            "gradients": gradients(heap),
            "mistakes": mistakes(heap),
        }


def assert_right(found: list[dict[str, Any]], cases: int) -> None:
    for wrong, bits in (each["forward"] for each in found):
        assert wrong == []
        assert bits == found[0]["forward"][1]
        assert len(bits) == 4 * cases


@pytest.mark.num_ranks(2)
def test_two_ranks() -> None:
    """All sizes; odd rows; gradients; mistakes."""
    found = values(run_ranks(body, 2, False, timeout=TIMEOUT_S))
    assert_right(found, len(FEW) + len(MORE))
    for each in found:
        assert each["odd_rows"] == []
        assert each["gradients"] == []
        assert each["mistakes"].keys() == MISTAKES.keys()
        for name, (error, part) in MISTAKES.items():
            assert each["mistakes"][name].startswith(f"{error}: "), f"{name}: {each['mistakes'][name]!r}"
            assert part in each["mistakes"][name], f"{name}: {each['mistakes'][name]!r}"


@pytest.mark.parametrize("world_size", [pytest.param(n, marks=pytest.mark.num_ranks(n)) for n in (1, 3)])
def test_other_numbers_of_ranks(world_size: int) -> None:
    assert_right(values(run_ranks(body, world_size, True, timeout=TIMEOUT_S)), len(FEW))


@pytest.mark.num_ranks(1)
def test_a_spoilt_result_is_seen() -> None:
    """Of what judges here: one element off by two roundings."""
    with Heap(1 << 20) as heap:
        whole = Whole(Case((4, 24), F32, F32), heap, 1)
        y, total = whole.call()
        assert not whole.wrong(y, total)
        for spoilt in (y, total):
            spoilt[2, 3] *= 1.0001
            assert "1 of 96 elements bad" in whole.wrong(y, total)
            spoilt[2, 3] /= 1.0001


@pytest.mark.cpu
def test_eps_is_a_float() -> None:
    """0 and 0.0 are one key of plans, and two types of an argument: a kernel is compiled for one."""
    x, weight = torch.zeros(1, 8), torch.ones(8)
    assert {type(results(x, None, weight, eps)[1].eps) for eps in (0, 0.0)} == {float}

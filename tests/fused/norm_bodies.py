"""What the ranks of test_rms_norm_ops.py run: operands of the products with RMSNorm, and how results are judged.

Each result is judged in two steps, both elementwise: what was normalized against the product in float64, then the norm
of just that. Bodies return what was wrong, in words.
"""

import dataclasses
import itertools
import time
from typing import Any
from unittest import mock

import torch
from torch.nn import functional

from pyrocshmem import CallMismatch, Heap, message, stream_k
from pyrocshmem.calls.workspace import Workspace
from pyrocshmem.elements import ELEMENTS
from pyrocshmem.errors import WorkspaceBusy
from pyrocshmem.reference import rms_norm as reference
from pyrocshmem.reference.accuracy import (
    EPS32,
    Partials,
    bound,
    compare,
    make_operand,
    sum_of_partials,
)
from pyrocshmem.shards import shard_range
from pyrocshmem.stream_k.local_gemm.blas import BlasPlan
from pyrocshmem.stream_k.ops import gemm_rms_norm
from tests.fused.cases import digest
from tests.stream_k.products import ON_CPU, check_product, device, small_config

EPS = 1e-5
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
DELAY_S, CALLS = 0.1, 4 if ON_CPU else 20


@dataclasses.dataclass(frozen=True)
class Case:
    """Global sizes; `columns` are one rank's where it holds columns, `hidden` then all ranks', if given. config:
    changes to small_config; None: what the op chooses. wire: what partial sums are asked to travel in."""

    M: int
    columns: int
    K: int
    dtype: torch.dtype
    weight: torch.dtype
    residual: bool = True
    bias: torch.dtype | None = None
    config: tuple[tuple[str, Any], ...] | None = ()
    wire: torch.dtype | None = None
    hidden: int | None = None

    def options(self) -> dict[str, Any]:
        if self.config is None:
            return {"partial_dtype": self.wire}
        changes = {"placement": "messages", **dict(self.config), "partial_dtype": self.wire}
        return {"config": small_config(**changes)}


class Whole:
    """A product's operands, the same on all ranks, and the shares of one. scattered: B is cut by columns."""

    def __init__(self, case: Case, heap: Heap, seed: int, scattered: bool = False) -> None:
        def make(shape: tuple[int, ...], tag: str, dtype: torch.dtype) -> torch.Tensor:
            return make_operand(shape, dtype, seed, 0, tag=tag, device="cpu").to(device())

        self.case, self.heap = case, heap
        N = case.columns * (heap.world_size if scattered else 1)
        if scattered and case.hidden is not None:
            N = case.hidden
        self.a, self.b = make((case.M, case.K), "a", case.dtype), make((case.K, N), "b", case.dtype)
        self.weight = make((N,), "weight", case.weight)
        self.bias = None if case.bias is None else make((N,), "bias", case.bias)
        self.residual = make((case.M, N), "residual", case.dtype) if case.residual else None
        self.inner = slice(*shard_range(case.K, heap.rank, heap.world_size))
        self.columns = slice(*shard_range(N, heap.rank, heap.world_size))

    def all_reduce(self, eps: float = EPS, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
        # What the allocator gives next is then NaN where the op doesn't write it.
        poison = [torch.full_like(self.a.new_empty(self.case.M, self.case.columns), torch.nan) for _ in "ab"]
        del poison
        return stream_k.gemm_all_reduce_rms_norm(
            self.a[:, self.inner], self.b[self.inner], self.residual, self.weight, eps,
            group=self.heap, bias=self.bias, **{**self.case.options(), **more},
        )  # fmt: skip

    def all_scatter(self, eps: float = EPS, **more: Any) -> torch.Tensor:
        bias = None if self.bias is None else self.bias[self.columns]
        return stream_k.gemm_rms_norm_all_scatter(
            self.a, self.b[:, self.columns], self.weight[self.columns].clone(), eps,
            hidden=self.case.hidden, group=self.heap, bias=None if bias is None else bias.clone(), **more,
        )  # fmt: skip

    def blocks(self, *configs: stream_k.Config | None) -> torch.Tensor:
        """Every rank's columns of the product, with the bits that they have on that rank. configs: one for each rank,
        or one for all; none: what is chosen."""
        world = self.heap.world_size
        configs = configs if len(configs) == world else (configs or (None,)) * world
        biases = itertools.repeat(None) if self.bias is None else self.bias.tensor_split(world)
        shares = zip(self.b.tensor_split(world, 1), biases, configs, strict=False)
        parts = [stream_k.gemm(self.a, b, bias=bias, config=config) for b, bias, config in shares]
        product = torch.cat(parts, dim=1)
        check_product(product, self.a, self.b, self.bias)
        return product

    def wrong_total(self, total: torch.Tensor) -> str:
        """Of the sum over ranks, plus bias, plus residual."""
        case = self.case
        parts = [x.double() for x in (self.bias, self.residual) if x is not None]
        exact = sum(parts, self.a.double() @ self.b.double())
        size = sum((x.abs() for x in parts), self.a.double().abs() @ self.b.double().abs())
        plain = sum((x.float() for x in parts), self.a.float() @ self.b.float()).to(case.dtype)
        world = self.heap.world_size
        terms = None
        if world > 1:
            sizes = sum_of_partials(self.a.double(), self.b.double(), world)[1]
            terms = Partials(sizes, world, ELEMENTS[case.dtype].wire_dtype(case.wire))
        allowed = bound(exact, plain, size, max(case.K, 1), case.dtype, terms)
        found = compare(total, exact, plain, allowed)
        return "" if found.ok and total.shape == exact.shape else f"the sum: {found}"

    def wrong_norm(self, y: torch.Tensor, h: torch.Tensor) -> str:
        """Of the norm of `h`, whole rows."""
        plain = functional.rms_norm(h.float(), h.shape[1:], self.weight.float(), EPS).to(y.dtype)
        found = reference.check(y, h, self.weight, EPS, plain)
        right = found.ok and y.dtype == self.case.dtype and y.shape == h.shape
        return "" if right else f"the norm: {found}"


def forward(heap: Heap, cases: list[Case]) -> tuple[list[str], list[str]]:
    """(what was wrong, the bits of all results) of both ops."""
    wrong, bits = [], []
    for seed, case in enumerate(cases):
        whole = Whole(case, heap, seed)
        y, total = whole.all_reduce()
        heap.synchronize()
        wrong += [
            f"{case}: {text}" for text in (whole.wrong_total(total), whole.wrong_norm(y, total)) if text
        ]
        bits += [digest(y), digest(total)]
        if (
            case.residual
            or case.wire is not None
            or (case.config and ("algorithm", "two_shot") in case.config)
        ):
            continue  # which the other op doesn't have
        whole = Whole(case, heap, seed, scattered=True)
        config = case.options().get("config")
        if config is not None:
            config = dataclasses.replace(config, placement="after")
        y = whole.all_scatter(config=config)
        heap.synchronize()
        wrong += [
            f"{case}, all_scatter: {text}" for text in (whole.wrong_norm(y, whole.blocks(config)),) if text
        ]
        bits.append(digest(y))
    return wrong, bits


def by_the_blas(heap: Heap, cases: list[Case], ranks: tuple[int, ...]) -> tuple[list[str], list[str]]:
    """(what was wrong, the bits of all results) of `gemm_rms_norm_all_scatter` where the BLAS is chosen on these
    ranks alone, whose products leave no squares: who multiplies is each rank's own affair."""
    wrong, bits = [], []
    chosen = [small_config(placement="blas" if rank in ranks else "after") for rank in range(heap.world_size)]
    for seed, case in enumerate(cases):
        whole = Whole(case, heap, seed, scattered=True)
        workspace = Workspace(heap)
        with mock.patch.object(gemm_rms_norm, "choose", return_value=chosen[heap.rank]):
            y = whole.all_scatter(workspace=workspace)
        heap.synchronize()
        (plan,) = workspace.plans.values()
        found = isinstance(plan.norm.gemm, BlasPlan), plan.norm.squares is None
        if found != (heap.rank in ranks,) * 2:
            wrong.append(f"{case}: by the BLAS, without squares: {found}")
        text = whole.wrong_norm(y, whole.blocks(*chosen))
        wrong += [f"{case}: {text}"] if text else []
        bits.append(digest(y))
    return wrong, bits


def odd_rows(heap: Heap) -> list[str]:
    """Zeros, NaN and infinity in one rank's share or in the residual: as in PyTorch, and the other rows as ever. The
    bits of an empty message are a NaN as well."""
    wrong = []
    case = Case(9, 40, 24, F32, F32)
    sentinel = torch.tensor([message.SENTINEL.value], dtype=torch.int32, device=device()).view(F32)
    for algorithm, eps in itertools.product(("one_shot", "two_shot"), (0.0, EPS)):
        whole = Whole(case, heap, 3)
        assert whole.residual is not None
        config = small_config(placement="messages", algorithm=algorithm)
        honest, _ = whole.all_reduce(eps, config=config)
        whole.a[1] = whole.residual[1] = 0.0
        whole.a[2, 20], whole.residual[4, 7], whole.a[6, 1] = float("nan"), float("inf"), float("inf")
        whole.residual[8] = sentinel
        y, total = whole.all_reduce(eps, config=config)
        heap.synchronize()
        theirs = functional.rms_norm(total, (40,), whole.weight, eps)
        odd = [1, 2, 4, 6, 8]
        if not torch.isclose(y, theirs, rtol=1e-5, atol=0, equal_nan=True).all():
            wrong.append(f"{algorithm}, eps {eps}: not as PyTorch's")
        if y[1].isnan().all() != (eps == 0) or not all(y[row].isnan().any() for row in odd[1:]):
            wrong.append(f"{algorithm}, eps {eps}: the odd rows")
        if not torch.equal(*(x[[row for row in range(9) if row not in odd]] for x in (y, honest))):
            wrong.append(f"{algorithm}, eps {eps}: the other rows")
        scattered = Whole(case, heap, 3, scattered=True)
        scattered.a[1], scattered.a[2, 20] = 0.0, float("nan")
        y = scattered.all_scatter(eps)
        heap.synchronize()
        if y[1].isnan().all() != (eps == 0) or not y[2].isnan().all() or y[[0, *range(3, 9)]].isnan().any():
            wrong.append(f"all_scatter, eps {eps}")
    return wrong


def late(heap: Heap, emptied: bool) -> int:
    """Calls of data of their own, rank 1 late in all but the first: how many were wrong."""
    honest = message.restore
    if not emptied:
        message.restore = lambda *args: None
    workspace, wrong = Workspace(heap, wait_seconds=20.0), 0
    for seed in range(6):
        case = Case(5, 24, 16, F32, F32, config=(("algorithm", ("one_shot", "two_shot")[seed % 2]),))
        whole = Whole(case, heap, seed)
        if heap.rank == 1 and seed > 1:
            time.sleep(DELAY_S)
        y, total = whole.all_reduce(workspace=workspace)
        wrong += bool(whole.wrong_total(total) or whole.wrong_norm(y, total))
    heap.synchronize()
    heap.vote("done")
    message.restore = honest
    return wrong


def same_bits(heap: Heap) -> list[str]:
    """Calls of two sets of data in turn: where one gave several results."""
    cases = [
        Case(5, 24, 16, F16, F32, config=(("algorithm", algorithm),))
        for algorithm in ("one_shot", "two_shot")
    ]
    wrong = []
    for case in cases:
        wholes = [Whole(case, heap, seed) for seed in range(2)]
        bits = [tuple(map(digest, wholes[call % 2].all_reduce())) for call in range(CALLS)]
        if (len(set(bits[::2])), len(set(bits[1::2])), len(set(bits))) != (1, 1, 2):
            wrong.append(str(case))
    wholes = [Whole(Case(2, 8, 8, F16, F32), heap, seed, scattered=True) for seed in range(2)]
    bits = [(digest(wholes[call % 2].all_scatter()),) for call in range(CALLS)]
    if (len(set(bits[::2])), len(set(bits[1::2])), len(set(bits))) != (1, 1, 2):
        wrong.append("all_scatter")
    return wrong


def squares(heap: Heap, case: Case, **changes: Any) -> list[str]:
    """Of one rank: whether the tiles of `case`'s product leave the sums of the squares of what is stored, and whether
    it is these that the norm takes, while no other call gets between the two."""
    wrong: list[str] = []
    config, workspace = small_config(**changes), Workspace(heap)
    whole = Whole(case, heap, 5, scattered=True)
    y = whole.all_scatter(0.0, config=config, workspace=workspace)
    (plan,) = workspace.plans.values()
    honest, sums = plan.norm.gemm.run, plan.norm.squares

    def watched(a: Any, b: Any, bias: Any, out: torch.Tensor) -> None:
        sums.fill_(torch.nan)
        honest(a, b, bias, out)
        tiles = out.double().square().split(config.block_n, dim=1)
        exact = torch.stack([tile.sum(dim=1) for tile in tiles])
        # Of positive terms, each of which is rounded, and every sum.
        if sums.shape != exact.shape or not ((sums - exact).abs() <= 32 * EPS32 * exact).all():
            wrong.append("the squares' sums")
        try:
            with workspace.begin(None):
                wrong.append("another call gets between product and norm")
        except WorkspaceBusy:
            pass
        sums.mul_(4)

    plan.norm.gemm.run = watched
    plan.norm.graphs.allowed = False
    halved = whole.all_scatter(0.0, config=config, workspace=workspace)
    plan.norm.gemm.run = honest
    heap.synchronize()
    normal = halved.abs() >= torch.finfo(case.dtype).tiny
    if not torch.equal((2 * halved)[normal], y[normal]) or not normal.any():
        wrong.append("the norm is not of those squares")
    product = stream_k.gemm(whole.a, whole.b, bias=whole.bias, config=config)
    if text := whole.wrong_norm(whole.all_scatter(config=config, workspace=workspace), product):
        wrong.append(text)
    return wrong


def repeated(heap: Heap) -> tuple[list[str], int]:
    """(what was wrong with calls whose tensors lie at the same places, with other data each time, their graphs)."""
    wrong, workspace = [], Workspace(heap)
    # Operands that are read as they lie: calls that copy them first have no graph.
    whole, *others = (Whole(Case(40, 72, 40, F16, F32), heap, seed, scattered=True) for seed in range(4))
    for number in range(9):
        for name in ("a", "b", "weight"):
            getattr(whole, name).copy_(getattr(others[number % 3], name))
        y = whole.all_scatter(workspace=workspace)
        heap.synchronize()
        wrong += [f"call {number}: {text}" for text in (whole.wrong_norm(y, whole.blocks()),) if text]
        y.fill_(torch.nan)
        del y
    (plan,) = workspace.plans.values()
    return wrong, plan.norm.graphs.captures


def outcome(call: Any, *args: Any, **more: Any) -> str:
    try:
        call(*args, **more)
    except (ValueError, TypeError, CallMismatch) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def mistakes(heap: Heap) -> dict[str, str]:
    """By name, what the caller's mistakes, and ranks that disagree, raise."""
    case = Case(4, 24, 16, F32, F32)
    whole, columns = Whole(case, heap, 1), Whole(case, heap, 1, scattered=True)
    a, b = whole.a[:, whole.inner], whole.b[whole.inner]
    residual, weight = whole.residual, whole.weight
    assert residual is not None
    first = heap.rank == 0
    wide = torch.cat((weight, weight))
    calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
        "length": ((a, b, residual, weight[1:], EPS), {}),
        "strides": ((a, b, residual, wide[::2], EPS), {}),
        "dtype": ((a, b, residual, weight.long(), EPS), {}),
        "no weight": ((a, b, residual, None, EPS), {}),
        "eps": ((a, b, residual, weight, -1.0), {}),
        "residual": ((a, b, residual[1:], weight, EPS), {}),
        "residual's dtype": ((a, b, residual.half(), weight, EPS), {}),
        "twice": ((a, b, residual, weight, EPS), {"config": small_config(), "partial_dtype": F16}),
        "rows differ": ((a[: 3 + first], b, residual[: 3 + first], weight, EPS), {}),
        "eps differ": ((a, b, residual, weight, EPS * (1 + first)), {}),
        "residuals differ": ((a, b, residual if first else None, weight, EPS), {}),
        "weights differ": ((a, b, residual, weight if first else weight.half(), EPS), {}),
    }
    found = {}
    for name, (args, more) in calls.items():
        found[name] = outcome(stream_k.gemm_all_reduce_rms_norm, *args, group=heap, **more)
        y, total = whole.all_reduce()
        assert not whole.wrong_total(total), name
        assert not whole.wrong_norm(y, total), name
    op, b, weight = (
        stream_k.gemm_rms_norm_all_scatter,
        columns.b[:, columns.columns],
        columns.weight[columns.columns],
    )
    found["length of a shard's"] = outcome(op, columns.a, b, weight[1:], EPS, group=heap)
    width = 23 + first
    found["columns differ"] = outcome(op, columns.a, b[:, :width], weight[:width], EPS, group=heap)
    more = {"group": heap, "hidden": 50}
    found["columns not of hidden"] = outcome(op, columns.a, b[:, :width], weight[:width], EPS, **more)
    found["rows of columns differ"] = outcome(op, columns.a[: 3 + first], b, weight, EPS, group=heap)
    config = small_config(placement="after")  # of both: the BLAS may add in another order
    assert not columns.wrong_norm(columns.all_scatter(config=config), columns.blocks(config))
    return found

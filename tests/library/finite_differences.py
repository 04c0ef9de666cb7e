"""Gradients of the ops on two ranks against finite differences of the ops themselves.

With G a random gradient of the results, L(x) = <G, results> and v a random direction of all operands at once,
p(t) = L(x + t v) has the derivative <gradient, v> at 0, which is compared with

    (8 (p(h) - p(-h)) - (p(2h) - p(-2h))) / 12 h        off by h^4 / 30 times p's fifth derivative.

The ops compute in fp32, with a unit u = 2^-24; sums over results and ranks are float64. x, v and G are multiples of 1/8
no larger than 2, of so few bits that x + t v, products, and sums of them are exact in fp32.

- Products and collectives are linear in each operand, so p is a quadratic at most, the formula exact at h = 1, and
  nothing is rounded: both sides are equal.
- Norms: what is normalized is exact. Of N columns the sum of squares is off by at most N u of itself, the mean plus eps
  by 2 u more; the root halves that, and with 2 u of its own and two products a result y is off by (N/2 + 5) u |y|. So p
  is off by at most E = (N/2 + 5) u sum |G y|, the formula by 18 E / 12 h. The fifth derivative: with k the ratio of
  what a row changes by to the row (root mean squares), 1 / rms(t) generates Legendre polynomials, whose size is at
  most 1, so its n-th derivative is at most n! k^n / rms, and that of p about 2 5! k^5 sum |G y|: together
  8 h^4 k^5 sum |G y|. At h = 2^-5 and k = 1 that is a quarter of the former where N is 12. So 3 E / h is allowed for
  both, for what moving weights and second factors add to the latter, and for the roundings of the gradient itself,
  which are not divided by h.

<https://en.wikipedia.org/wiki/Finite_difference_coefficient> has the formula.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from pyrocshmem import Heap, collectives, stream_k
from tests.library.bodies import HEAP_BYTES
from tests.stream_k.products import device

EPS = 0.125
DIRECTIONS = 3
_UNIT, _STEP = 2.0**-24, 2.0**-5
_STENCIL = {1: 8, -1: -8, 2: -1, -2: 1}
_GRID = 8


@dataclass(frozen=True)
class Op:
    """function: of its operands by name. own: shapes of this rank's parts of operands; shared: of operands that every
    rank has whole. whole: whether every rank has all of the results. columns: of a norm's rows; 0: no norm."""

    function: Callable[..., Any]
    own: dict[str, tuple[int, ...]]
    shared: dict[str, tuple[int, ...]] = field(default_factory=dict)
    whole: bool = True
    columns: int = 0


def ops(rank: int) -> dict[str, Op]:
    """By name. Shares of rows and of K differ by one."""
    inner = 3 - rank
    shares = {"a": (5, inner), "b": (inner, 4)}
    gathered = {"a": (3 - rank, 4), "b": (4, 3), "bias": (3,)}
    row = {"weight": (8,), "residual": (4, 8)}
    once_more = partial(stream_k.all_gather_gemm, num_rows=5, save_gathered=False)
    norm = partial(collectives.rms_norm, eps=EPS)
    normed_sum = partial(stream_k.gemm_all_reduce_rms_norm, eps=EPS)
    normed_columns = partial(stream_k.gemm_rms_norm_all_scatter, eps=EPS)
    return {
        "all_gather_gemm": Op(partial(stream_k.all_gather_gemm, num_rows=5), gathered, whole=False),
        "all_gather_gemm, gathered again": Op(once_more, gathered, whole=False),
        "gemm_reduce_scatter": Op(stream_k.gemm_reduce_scatter, shares, {"bias": (4,)}, whole=False),
        "gemm_all_reduce": Op(stream_k.gemm_all_reduce, shares, {"bias": (4,)}),
        "gemm_all_scatter": Op(stream_k.gemm_all_scatter, {"b": (4, 3), "bias": (3,)}, {"a": (3, 4)}),
        "gemm_all_reduce_rms_norm": Op(
            normed_sum, {"a": (4, inner), "b": (inner, 8)}, {**row, "bias": (8,)}, columns=8
        ),
        "gemm_rms_norm_all_scatter": Op(
            normed_columns, {"b": (5, 6), "weight": (6,), "bias": (6,)}, {"a": (4, 5)}, columns=12
        ),
        "all_reduce_rms_norm": Op(
            partial(collectives.all_reduce_rms_norm, eps=EPS), {"x": (4, 8)}, row, columns=8
        ),
        "rms_norm": Op(
            norm, {"x": (4, 6), "weight": (6,), "residual": (4, 6)}, whole=False, columns=12
        ),
        "rms_norm, replicated": Op(
            partial(norm, replicated=True), {"x": (4, 6), "weight": (6,)}, columns=12
        ),
        "all_reduce": Op(collectives.all_reduce, {"x": (3, 4)}),
        "all_gather": Op(collectives.all_gather, {"x": (3, 4)}),
        "reduce_scatter": Op(collectives.reduce_scatter, {"x": (5, 4)}, whole=False),
        "all_scatter": Op(collectives.all_scatter, {"x": (3, 4)}),
        "broadcast": Op(partial(collectives.broadcast, root=1), {"x": (3, 4)}),
    }  # fmt: skip


@dataclass(frozen=True)
class Found:
    """Of one direction, on one rank: the finite difference, <gradient, direction> of its own and of shared operands,
    and what is allowed."""

    difference: float
    own: float
    shared: float
    allowed: float


class _Draw:
    """Tensors on the grid, which all ranks draw alike, or each for itself."""

    def __init__(self, rank: int, seed: int) -> None:
        self.own, self.shared = (torch.Generator().manual_seed(100 * seed + n) for n in (rank + 1, 0))

    def __call__(self, shape: tuple[int, ...], alike: bool, largest: int) -> torch.Tensor:
        bounds, generator = largest * _GRID, self.shared if alike else self.own
        return (torch.randint(-bounds, bounds + 1, shape, generator=generator) / _GRID).to(device())

    def operands(self, op: Op, largest: int) -> dict[str, torch.Tensor]:
        found = {name: self(shape, False, largest) for name, shape in op.own.items()}
        return found | {name: self(shape, True, largest) for name, shape in op.shared.items()}


def _tensors(results: Any) -> tuple[torch.Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


def _inner(xs: Any, ys: Any) -> float:
    return sum(float((x.double() * y.double()).sum()) for x, y in zip(xs, ys, strict=True))


def compare(op: Op, heap: Heap, seed: int) -> list[Found]:
    """Each direction's numbers on this rank."""
    draw = _Draw(heap.rank, seed)
    x = {name: operand.requires_grad_() for name, operand in draw.operands(op, 2).items()}
    results = _tensors(op.function(**x, group=heap))
    weights = [draw(tuple(y.shape), op.whole, 2) for y in results]
    gradients = dict(zip(x, torch.autograd.grad(results, list(x.values()), weights), strict=True))
    step = _STEP if op.columns else 1.0
    size = sum(float((g * y.detach()).double().abs().sum()) for g, y in zip(weights, results, strict=True))
    allowed = 3 * (op.columns / 2 + 5) * _UNIT * size / step if op.columns else 0.0
    found = []
    for _ in range(DIRECTIONS):
        v = draw.operands(op, 1)
        difference = 0.0
        for times, factor in _STENCIL.items():
            with torch.no_grad():
                moved = {name: operand + times * step * v[name] for name, operand in x.items()}
                difference += factor * _inner(_tensors(op.function(**moved, group=heap)), weights)
        own, shared = (
            _inner((gradients[n] for n in names), (v[n] for n in names)) for names in (op.own, op.shared)
        )
        found.append(Found(difference / (12 * step), own, shared, allowed))
    return found


def body(rank: int, world_size: int) -> dict[str, list[Found]]:
    """By op."""
    with Heap(HEAP_BYTES) as heap:
        return {name: compare(op, heap, seed) for seed, (name, op) in enumerate(ops(rank).items())}


def errors(name: str, ranks: list[list[Found]]) -> list[str]:
    """What is wrong with an op's gradient, by what its ranks found."""
    op, wrong = ops(0)[name], []
    derivatives = []
    for direction, each in enumerate(zip(*ranks, strict=True)):
        difference, allowed = (
            getattr(each[0], what) if op.whole else sum(getattr(one, what) for one in each)
            for what in ("difference", "allowed")
        )
        gradient = each[0].shared + sum(one.own for one in each)
        if not abs(gradient - difference) <= allowed:
            wrong.append(
                f"{name}, direction {direction}: {gradient} instead of {difference}, {allowed:.1g} allowed"
            )
        if len({one.shared for one in each}) > 1:
            wrong.append(f"{name}, direction {direction}: gradients of what all ranks have differ")
        derivatives.append(abs(difference))
    # A test that everything passes would say nothing.
    return (
        wrong if max(derivatives) > 100 * allowed else [*wrong, f"{name}: {allowed} allowed of {derivatives}"]
    )

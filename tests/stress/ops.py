"""The table of ops that the stress runner draws from. A new one joins by a line of `_ALL`.

A call is described by its facts, plain data that JSON can hold, drawn from a random generator; from facts, a heap and
the number of a set of data every rank makes the same operands.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any, Protocol

import torch

import collectives
import stream_k
from pyrocshmem import Heap
from reference.accuracy import EPS32
from reference.problems import PROBLEMS
from stream_k.config import BY_ROWS, PLACEMENTS_OF
from tests.fused.cases import Case, Operands, call, judge
from tests.stream_k.products import ACTIVATIONS, ON_CPU, check_product, device, laid_out, random, small_config

Facts = dict[str, Any]

# Around the edges of blocks of 32 and 64, and primes.
_SIZES = (1, 2, 7, 16, 31, 32, 33, 48, 64, 65, 97, 113)
_LARGE = 2 if ON_CPU else 12
# Of a rank that there is not: what all ranks have.
_NOBODY = 999
_DTYPES = ("float32", "float16") if ON_CPU else ("float32", "float16", "bfloat16")


class Call(Protocol):
    """An op with operands of its own, which stay where they are: a CUDA graph can replay it."""

    def load(self, data: int) -> None:
        """Put set number `data` into the operands, and NaN into an output that the caller gave."""

    def run(self) -> torch.Tensor:
        """Enqueue the op; its result."""

    def judge(self, data: int, result: torch.Tensor) -> str:
        """What is wrong with the result for that set, "" when nothing is."""

    def free(self) -> None:
        """Give back what lies on the heap: collective."""


@dataclass(frozen=True)
class Op:
    """draw: facts for a number of ranks. make: a call. meets: every rank waits for every other, so that all notice one
    that doesn't call. same: every rank gets the same bits."""

    name: str
    draw: Callable[[Random, int], Facts]
    make: Callable[[Facts, Heap], Call]
    meets: bool = True
    same: Callable[[Facts], bool] = lambda facts: False


def _size(rng: Random, most: int = 1 << 30) -> int:
    sizes = [size for size in _SIZES if size <= most]
    size = rng.choice(sizes)
    return size * rng.randint(1, _LARGE) if rng.random() < 0.2 else size


# -- products --


def _draw_product(collective: str, rng: Random, num_ranks: int) -> Facts:
    facts: Facts = {"M": _size(rng), "N": _size(rng), "K": max(_size(rng), num_ranks)}
    facts |= {"dtype": rng.choice(_DTYPES), "layout": rng.choice(("view", "row", "mixed", "column"))}
    facts |= {"bias": rng.choice((None, None, "own", "fp32")), "activation": rng.choice(list(ACTIVATIONS))}
    if collective == "gemm":
        return facts | {"config": {"split": rng.choice(("auto", "none", "stream_k"))}}
    facts["out"] = rng.choice(("new", "symmetric", "strided", "ordinary"))
    config: Facts = {"placement": rng.choice(PLACEMENTS_OF[PROBLEMS[collective].op])}
    if config["placement"] == "messages":
        # Gathered by messages, the ranks' blocks of rows are all alike.
        facts["M"] *= num_ranks if PROBLEMS[collective].a_cut == "M" else 1
        return facts | {"config": config}
    if config["placement"] in BY_ROWS:
        config["chunk"] = rng.randint(1, 3)
    else:
        config["split"] = rng.choice(("auto", "none", "stream_k"))
    if collective == "all_reduce" and config["placement"] not in BY_ROWS:
        config["algorithm"] = rng.choice(("one_shot", "two_shot"))
    if PROBLEMS[collective].sums and rng.random() < 0.2:
        facts |= {"bias": None, "activation": "none", "dtype": "float16"}
        config["partial_dtype"] = "float16"
    return facts | {"config": config}


class _Product:
    """A GEMM with its communication, as tests/fused describes and judges it."""

    def __init__(self, collective: str, facts: Facts, heap: Heap) -> None:
        self.heap, self.world = heap, heap.world_size
        changes = {**facts["config"]}
        if "partial_dtype" in changes:
            changes["partial_dtype"] = getattr(torch, changes["partial_dtype"])
        sizes = facts["M"], facts["N"], facts["K"], getattr(torch, facts["dtype"])
        more = {name: facts[name] for name in ("out", "bias", "activation", "layout")}
        self.case = Case(collective, *sizes, config=tuple(changes.items()), **more)
        self.operands = Operands(self.case, heap.rank, self.world, 0)
        rows, columns = self.operands.shape
        self.out: torch.Tensor | None = None
        self.buffer: torch.Tensor | None = None
        if facts["out"] == "symmetric":
            most = -(-self.case.M // self.world) if self.case.problem.out_cut == "M" else rows
            self.buffer = heap.empty(most * columns, dtype=self.case.dtype)
            self.out = self.buffer[: rows * columns].view(rows, columns)
        elif facts["out"] != "new":
            step = 2 if facts["out"] == "strided" else 1
            self.out = torch.empty(rows, step * columns, dtype=self.case.dtype, device=device())[:, ::step]

    def load(self, data: int) -> None:
        fresh = Operands(self.case, self.heap.rank, self.world, data)
        for mine, new in ((self.operands.a, fresh.a), (self.operands.b, fresh.b)):
            mine.copy_(new)
        if self.operands.bias is not None:
            self.operands.bias.copy_(fresh.bias)
        if self.out is not None:
            self.out.fill_(float("nan"))

    def run(self) -> torch.Tensor:
        return call(self.case, self.heap, self.operands, self.out)

    def judge(self, data: int, result: torch.Tensor) -> str:
        try:
            judge(self.case, Operands(self.case, self.heap.rank, self.world, data), result, self.world)
        except AssertionError as error:
            return str(error)
        return ""

    def free(self) -> None:
        if self.buffer is not None:
            self.heap.free(self.buffer)


class _Gemm:
    """`stream_k.gemm`: one rank's own, between the calls of all."""

    def __init__(self, facts: Facts, heap: Heap) -> None:
        self.facts, self.rank = facts, heap.rank
        self.a, self.b, self.bias = self._operands(0)
        layout: str = {"view": "row", "mixed": "misaligned"}.get(facts["layout"]) or facts["layout"]
        self.a, self.b = laid_out(self.a, layout), laid_out(self.b, layout)
        self.config = small_config(**facts["config"])

    def _operands(self, data: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        M, N, K = (self.facts[name] for name in "MNK")
        dtype = getattr(torch, self.facts["dtype"])
        seed = 10 * data + 100_000 * self.rank
        bias = None
        if self.facts["bias"] is not None:
            bias = random(1, N, torch.float32 if self.facts["bias"] == "fp32" else dtype, seed + 2)[0]
        return random(M, K, dtype, seed), random(K, N, dtype, seed + 1), bias

    def load(self, data: int) -> None:
        a, b, bias = self._operands(data)
        self.a.copy_(a)
        self.b.copy_(b)
        if self.bias is not None:
            self.bias.copy_(bias)

    def run(self) -> torch.Tensor:
        return stream_k.gemm(
            self.a, self.b, bias=self.bias, activation=self.facts["activation"], config=self.config
        )

    def judge(self, data: int, result: torch.Tensor) -> str:
        a, b, bias = self._operands(data)
        try:
            check_product(result, a, b, bias, self.facts["activation"])
        except AssertionError as error:
            return str(error)
        return ""

    def free(self) -> None:
        pass


# -- collectives of whole tensors --


@dataclass(frozen=True)
class _Whole:
    """A collective of a tensor [M, N] a rank. expected: from all ranks' tensors in float64 and the own rank. options:
    arguments to choose from. same: every rank gets the same. most_rows: but for few twice as large."""

    name: str
    expected: Callable[[list[torch.Tensor], int], torch.Tensor]
    options: tuple[tuple[str, tuple[Any, ...]], ...] = ()
    same: bool = True
    most_rows: int = 1 << 30

    def draw(self, rng: Random, num_ranks: int) -> Facts:
        facts: Facts = {"M": _size(rng, self.most_rows), "N": _size(rng), "dtype": rng.choice(_DTYPES)}
        return facts | {"options": {name: rng.choice(values) for name, values in self.options}}


class _Collective:
    """A call of a `_Whole`. Data are whole numbers, so that its result is exact."""

    def __init__(self, whole: _Whole, facts: Facts, heap: Heap) -> None:
        self.whole, self.facts, self.heap = whole, facts, heap
        self.x = self._data(0, 0)

    def _data(self, data: int, rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * data + rank)
        shape = (self.facts["M"], self.facts["N"])
        numbers = torch.randint(-30, 31, shape, generator=generator)
        return numbers.to(getattr(torch, self.facts["dtype"])).to(device())

    def load(self, data: int) -> None:
        self.x.copy_(self._data(data, self.heap.rank))

    def run(self) -> torch.Tensor:
        return getattr(collectives, self.whole.name)(self.x, group=self.heap, **self.facts["options"])

    def judge(self, data: int, result: torch.Tensor) -> str:
        parts = [self._data(data, rank).double() for rank in range(self.heap.world_size)]
        wrong = result.double() != self.whole.expected(parts, self.heap.rank)
        if not wrong.any():
            return ""
        first = tuple(int(i) for i in wrong.nonzero()[0])
        return f"{int(wrong.sum())} of {wrong.numel()} elements are wrong, the first at {first}"

    def free(self) -> None:
        pass


_WHOLE = (
    _Whole(
        "all_reduce",
        lambda parts, rank: sum(parts[1:], parts[0]),
        options=(("algorithm", ("auto", "one_shot", "two_shot")),),
    ),
    _Whole("all_gather", lambda parts, rank: torch.cat(parts, 0)),
    _Whole("all_scatter", lambda parts, rank: torch.cat(parts, 1)),
    _Whole(
        "reduce_scatter",
        lambda parts, rank: sum(parts[1:], parts[0]).tensor_split(len(parts))[rank],
        same=False,
    ),
    _Whole("broadcast", lambda parts, rank: parts[0]),
)


class _Norm(_Collective):
    """`collectives.rms_norm` of columns that are spread over the ranks."""

    def run(self) -> torch.Tensor:
        options = self.facts["options"]
        out = collectives.rms_norm(
            self.x, torch.ones_like(self.x[0]), 1e-5, group=self.heap, replicated=options["replicated"]
        )
        assert isinstance(out, torch.Tensor)
        return out

    def judge(self, data: int, result: torch.Tensor) -> str:
        world, rank = self.heap.world_size, self.heap.rank
        whole = torch.cat([self._data(data, peer).double() for peer in range(world)], 1)
        return _wrong_norm(
            result,
            whole,
            lambda y: y if self.facts["options"]["replicated"] else y.tensor_split(world, 1)[rank],
        )


def _wrong_norm(
    result: torch.Tensor, whole: torch.Tensor, part: Callable[[torch.Tensor], torch.Tensor] = lambda y: y
) -> str:
    """What is wrong with a part of the RMSNorm of whole rows in float64, "" when nothing is."""
    expected = part(whole * torch.rsqrt(whole.square().mean(1, keepdim=True) + 1e-5))
    # One rounding of the result, and fp32 sums, a root and two products before it.
    allowed = torch.finfo(result.dtype).eps / 2 + (8 + math.sqrt(whole.shape[1])) * EPS32
    error = (result.double() - expected).abs() - allowed * expected.abs()
    if bool((error <= torch.finfo(result.dtype).smallest_normal).all()):
        return ""
    return f"the result is wrong by {float(error.max()):.3e} more than roundings explain"


class _SumNorm(_Collective):
    """`collectives.all_reduce_rms_norm`; its result is the total above the norm."""

    def __init__(self, whole: _Whole, facts: Facts, heap: Heap) -> None:
        super().__init__(whole, facts, heap)
        self.residual = self._data(0, _NOBODY)

    def load(self, data: int) -> None:
        super().load(data)
        self.residual.copy_(self._data(data, _NOBODY))

    def run(self) -> torch.Tensor:
        weight = torch.ones_like(self.x[0])
        norm, total = collectives.all_reduce_rms_norm(
            self.x, self.residual, weight, 1e-5, group=self.heap, **self.facts["options"]
        )
        return torch.cat((total, norm))

    def judge(self, data: int, result: torch.Tensor) -> str:
        total, norm = result.chunk(2)
        parts = [self._data(data, rank).double() for rank in (*range(self.heap.world_size), _NOBODY)]
        # Exact sums, rounded once.
        if not torch.equal(total, self.whole.expected(parts, self.heap.rank).to(total.dtype)):
            return "the total is wrong"
        return _wrong_norm(norm, total.double())


_NORM = _Whole(
    "rms_norm", lambda parts, rank: parts[rank], options=(("replicated", (False, True)),), same=False
)
_SUM_NORM = _Whole(
    "all_reduce_rms_norm",
    lambda parts, rank: sum(parts[1:], parts[0]),
    options=(("algorithm", ("auto", "one_shot", "two_shot")),),
    # A program a row, which costs the interpreter a tenth of a second.
    most_rows=16 if ON_CPU else 1 << 30,
)

_ALL = (
    Op("gemm", partial(_draw_product, "gemm"), _Gemm, meets=False),
    *(
        Op(
            problem.op,
            partial(_draw_product, collective),
            partial(_Product, collective),
            same=lambda facts, cut=problem.out_cut: not cut,  # type: ignore[misc]
        )
        for collective, problem in PROBLEMS.items()
    ),
    *(
        Op(whole.name, whole.draw, partial(_Collective, whole), same=lambda facts, whole=whole: whole.same)  # type: ignore[misc]
        for whole in _WHOLE
    ),
    Op("rms_norm", _NORM.draw, partial(_Norm, _NORM)),
    Op("all_reduce_rms_norm", _SUM_NORM.draw, partial(_SumNorm, _SUM_NORM), same=lambda facts: True),
)
OPS = {op.name: op for op in _ALL}

"""The table of ops that the stress runner draws from. A new one joins by a line of `_ALL`.

A call is described by its facts, plain data that JSON can hold, drawn from a random generator; from facts, a heap and
the number of a set of data every rank makes the same operands.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Protocol

import torch

from pyrocshmem import Heap, stream_k
from pyrocshmem.reference.problems import PROBLEMS
from pyrocshmem.stream_k.choice.config import BY_MESSAGE, BY_ROWS
from pyrocshmem.stream_k.choice.placement import placement_names
from tests.fused import norm_bodies
from tests.fused.cases import STRIDE_0, Case, Operands, call, judge
from tests.stream_k.products import ACTIVATIONS, ON_CPU, check_product, device, laid_out, random, small_config
from tests.stress import float8, tensors
from tests.stress.tensors import DTYPES, Facts, draw_size

_LAYOUTS = ("view", "row", "mixed", "column", "transposed", *STRIDE_0)


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


# -- products --


def _refill(mine: torch.Tensor, new: torch.Tensor) -> None:
    """`new` into the memory of `mine`, which has one element along a stride of 0."""
    once = tuple(slice(1) if stride == 0 else slice(None) for stride in mine.stride())
    mine[once].copy_(new[once])


def _draw_sizes(rng: Random, num_ranks: int, most_rows: int = 1 << 30) -> Facts:
    sizes = {"M": draw_size(rng, most_rows), "N": draw_size(rng), "K": max(draw_size(rng), num_ranks)}
    return {**sizes, "dtype": rng.choice(DTYPES)}


def _draw_product(collective: str, rng: Random, num_ranks: int) -> Facts:
    facts = {**_draw_sizes(rng, num_ranks), "layout": rng.choice(_LAYOUTS)}
    facts |= {"bias": rng.choice((None, None, "own", "fp32")), "activation": rng.choice(list(ACTIVATIONS))}
    if collective == "gemm":
        return facts | {"config": {"split": rng.choice(("auto", "none", "stream_k", "separate"))}}
    facts["out"] = rng.choice(("new", "symmetric", "strided", "ordinary"))
    config = _draw_config(collective, rng)
    if config["placement"] in BY_MESSAGE:
        # Gathered by messages, the ranks' blocks of rows are all alike.
        facts["M"] *= num_ranks if PROBLEMS[collective].a_cut == "M" else 1
    if PROBLEMS[collective].sums and rng.random() < 0.4:
        config["partial_dtype"] = rng.choice(("float32", "bfloat16"))
    return facts | {"config": config}


def _draw_config(collective: str, rng: Random) -> Facts:
    config: Facts = {"placement": rng.choice(placement_names(PROBLEMS[collective].op))}
    if config["placement"] in BY_ROWS:
        config["chunk"] = rng.randint(1, 3)
    else:
        config["split"] = rng.choice(("auto", "none", "stream_k", "separate"))
    if collective == "all_reduce" and config["placement"] not in BY_ROWS:
        config["algorithm"] = rng.choice(("one_shot", "two_shot"))
    return config


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
            _refill(mine, new)
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
        self.layout = {"view": "row", "mixed": "misaligned"}.get(facts["layout"], facts["layout"])
        self.a, self.b, self.bias = self._operands(0)
        self.config = small_config(**facts["config"])

    def _operands(self, data: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        M, N, K = (self.facts[name] for name in "MNK")
        dtype = getattr(torch, self.facts["dtype"])
        seed = 10 * data + 100_000 * self.rank
        bias = None
        if self.facts["bias"] is not None:
            bias = random(1, N, torch.float32 if self.facts["bias"] == "fp32" else dtype, seed + 2)[0]
        a, b = random(M, K, dtype, seed), random(K, N, dtype, seed + 1)
        return laid_out(a, self.layout), laid_out(b, self.layout), bias

    def load(self, data: int) -> None:
        a, b, bias = self._operands(data)
        _refill(self.a, a)
        _refill(self.b, b)
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


class _NormProduct:
    """A product with RMSNorm, as tests/fused describes and judges it. scattered: of columns, else of sums, whose result
    is the total above the norm."""

    def __init__(self, scattered: bool, facts: Facts, heap: Heap) -> None:
        self.scattered, self.heap = scattered, heap
        dtype = getattr(torch, facts["dtype"])
        kinds = {"own": dtype, "fp32": torch.float32, None: None}
        self.case = norm_bodies.Case(
            *(facts[name] for name in "MNK"),
            dtype,
            kinds[facts["weight"]],
            facts["residual"],
            kinds[facts["bias"]],
            tuple(facts["config"].items()),
            kinds[facts["wire"]],
        )
        # Of the GEMM that leaves squares: messages, the case's own default, have none.
        self.scattering = dataclasses.replace(self.case.options()["config"], placement="after")
        self.whole = self._operands(0)

    def _operands(self, data: int) -> norm_bodies.Whole:
        return norm_bodies.Whole(self.case, self.heap, data, self.scattered)

    def load(self, data: int) -> None:
        fresh = self._operands(data)
        for name in ("a", "b", "weight", "bias", "residual"):
            if (mine := getattr(self.whole, name)) is not None:
                mine.copy_(getattr(fresh, name))

    def run(self) -> torch.Tensor:
        if self.scattered:
            return self.whole.all_scatter(config=self.scattering)
        norm, total = self.whole.all_reduce()
        return torch.cat((total, norm))

    def judge(self, data: int, result: torch.Tensor) -> str:
        whole = self._operands(data)
        if not self.scattered:
            total, norm = result.chunk(2)
            return whole.wrong_total(total) or whole.wrong_norm(norm, total)
        try:
            return whole.wrong_norm(result, whole.blocks(self.scattering))
        except AssertionError as error:
            return str(error)

    def free(self) -> None:
        pass


def _draw_norm_product(scattered: bool, rng: Random, num_ranks: int) -> Facts:
    kinds = ("own", "fp32")
    # A program a row, which costs the interpreter a tenth of a second.
    facts = {**_draw_sizes(rng, num_ranks, 16 if ON_CPU else 1 << 30), "weight": rng.choice(kinds)}
    facts["bias"] = rng.choice((None, *kinds))
    if scattered:
        config = {"split": rng.choice(("auto", "none", "stream_k", "separate"))}
        return facts | {"residual": False, "wire": None, "config": config}
    wire = "fp32" if rng.random() < 0.4 else None
    return facts | {"residual": rng.random() < 0.7, "wire": wire, "config": _draw_config("all_reduce", rng)}


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
        Op(
            name,
            partial(_draw_norm_product, scattered),
            partial(_NormProduct, scattered),
            same=lambda facts: True,
        )
        for name, scattered in (("gemm_all_reduce_rms_norm", False), ("gemm_rms_norm_all_scatter", True))
    ),
    *(
        Op(
            whole.name,
            whole.draw,
            partial(tensors.Collective, whole),
            same=lambda facts, whole=whole: whole.same,  # type: ignore[misc]
        )
        for whole in tensors.WHOLE
    ),
    Op("float8", float8.draw, float8.Float8, same=float8.same),
    Op("barrier", lambda rng, num_ranks: {}, tensors.Barrier),
    Op("rms_norm", tensors.NORM.draw, partial(tensors.Norm, tensors.NORM)),
    Op(
        "all_reduce_rms_norm",
        tensors.SUM_NORM.draw,
        partial(tensors.SumNorm, tensors.SUM_NORM),
        same=lambda facts: True,
    ),
)
OPS = {op.name: op for op in _ALL}

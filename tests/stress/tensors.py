"""Collectives of whole tensors, as the stress runner calls them, and what all its ops draw from."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import torch

from pyrocshmem import Heap, collectives, stream_k
from pyrocshmem.reference.accuracy import EPS32
from tests.stream_k.products import ON_CPU, device

Facts = dict[str, Any]

# Around the edges of blocks of 32 and 64, and primes.
_SIZES = (1, 2, 7, 16, 31, 32, 33, 48, 64, 65, 97, 113)
_LARGE = 2 if ON_CPU else 12
# Of a rank that there is not: what all ranks have.
_NOBODY = 999
DTYPES = ("float32", "float16") if ON_CPU else ("float32", "float16", "bfloat16")


def draw_size(rng: Random, most: int = 1 << 30) -> int:
    sizes = [size for size in _SIZES if size <= most]
    size = rng.choice(sizes)
    return size * rng.randint(1, _LARGE) if rng.random() < 0.2 else size


@dataclass(frozen=True)
class Whole:
    """A collective of a tensor [M, N] a rank. expected: from all ranks' tensors in float64 and the own rank. options:
    arguments to choose from. same: every rank gets the same. most_rows: but for few twice as large."""

    name: str
    expected: Callable[[list[torch.Tensor], int], torch.Tensor]
    options: tuple[tuple[str, tuple[Any, ...]], ...] = ()
    same: bool = True
    most_rows: int = 1 << 30

    def draw(self, rng: Random, num_ranks: int) -> Facts:
        facts: Facts = {"M": draw_size(rng, self.most_rows), "N": draw_size(rng), "dtype": rng.choice(DTYPES)}
        return facts | {"options": {name: rng.choice(values) for name, values in self.options}}


class Collective:
    """A call of a `Whole`. Data are whole numbers, so that its result is exact."""

    def __init__(self, whole: Whole, facts: Facts, heap: Heap) -> None:
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


class Barrier:
    """`collectives.barrier` between a write of every rank's and a read of all ranks'; and behind the reads, so that the
    next write waits for them."""

    def __init__(self, facts: Facts, heap: Heap) -> None:
        self.heap, self.number = heap, torch.zeros(1, device=heap.device)
        self.word = heap.zeros(1)
        self.words = [heap.peer_view(self.word, peer) for peer in range(heap.world_size)]

    def load(self, data: int) -> None:
        self.number.fill_(data)

    def run(self) -> torch.Tensor:
        self.word.copy_(self.number)
        collectives.barrier(group=self.heap)
        seen = torch.cat(self.words)
        collectives.barrier(group=self.heap)
        return seen

    def judge(self, data: int, result: torch.Tensor) -> str:
        return "" if (result == data).all() else f"ranks had written {result.tolist()}, not {data}"

    def free(self) -> None:
        self.heap.free(self.word)


WHOLE = (
    Whole(
        "all_reduce",
        lambda parts, rank: sum(parts[1:], parts[0]),
        options=(("algorithm", ("auto", "one_shot", "two_shot")),),
    ),
    Whole("all_gather", lambda parts, rank: torch.cat(parts, 0)),
    Whole("all_scatter", lambda parts, rank: torch.cat(parts, 1)),
    Whole(
        "reduce_scatter",
        lambda parts, rank: sum(parts[1:], parts[0]).tensor_split(len(parts))[rank],
        same=False,
    ),
    Whole("broadcast", lambda parts, rank: parts[0]),
)


class Norm(Collective):
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


class SumNorm(Collective):
    """`collectives.all_reduce_rms_norm`; its result is the total above the norm, and above what that was in 8 bits."""

    def __init__(self, whole: Whole, facts: Facts, heap: Heap) -> None:
        super().__init__(whole, facts, heap)
        self.residual = self._data(0, _NOBODY)

    def load(self, data: int) -> None:
        super().load(data)
        self.residual.copy_(self._data(data, _NOBODY))

    def run(self) -> torch.Tensor:
        weight = torch.ones_like(self.x[0])
        options = dict(self.facts["options"])
        recipe = options.pop("quantize")
        given = (self.x, self.residual, weight, 1e-5)
        if recipe is None:
            norm, total = collectives.all_reduce_rms_norm(*given, group=self.heap, **options)
            return torch.cat((total, norm))
        options |= {"quantize": recipe, "keep_norm": True}
        found = collectives.all_reduce_rms_norm(*given, group=self.heap, **options)
        return torch.cat((found.total, found.norm, self._back(found.quantized, found.scale)))

    def _back(self, q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return stream_k.dequantize(q, scale, self.x.dtype)

    def judge(self, data: int, result: torch.Tensor) -> str:
        recipe = self.facts["options"]["quantize"]
        total, norm, *in_8_bits = result.chunk(2 if recipe is None else 3)
        for found in in_8_bits:
            if not torch.equal(found, self._back(*stream_k.quantize(norm, recipe))):
                return "the norm in 8 bits is wrong"
        parts = [self._data(data, rank).double() for rank in (*range(self.heap.world_size), _NOBODY)]
        # Exact sums, rounded once.
        if not torch.equal(total, self.whole.expected(parts, self.heap.rank).to(total.dtype)):
            return "the total is wrong"
        return _wrong_norm(norm, total.double())


NORM = Whole(
    "rms_norm", lambda parts, rank: parts[rank], options=(("replicated", (False, True)),), same=False
)
SUM_NORM = Whole(
    "all_reduce_rms_norm",
    lambda parts, rank: sum(parts[1:], parts[0]),
    options=(
        ("algorithm", ("auto", "one_shot", "two_shot")),
        ("quantize", (None, "rowwise", "blockwise")),
    ),
    # A program a row, which costs the interpreter a tenth of a second.
    most_rows=16 if ON_CPU else 1 << 30,
)

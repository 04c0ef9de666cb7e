"""What the ranks of the tests of batch invariance run: every public op on batches made of the same rows.

A batch is a tensor of row numbers; the operands are those rows of tensors that all ranks have alike. Each call gives
its name, the rows of its result that this rank has, and their numbers. `unlike` compares them with those of one batch
of all rows, bit by bit.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

import pyrocshmem
from pyrocshmem import Heap, collectives, stream_k
from pyrocshmem.reference.accuracy import make_operand
from pyrocshmem.shards import shard_range
from pyrocshmem.stream_k.choice.config import BY_BLAS
from pyrocshmem.stream_k.choice.placement import placement_names
from tests.stream_k.products import ON_CPU, device, laid_out

HEAP_BYTES = (64 if ON_CPU else 1024) << 20
EPS = 1e-6


class Sizes(NamedTuple):
    """rows: of the largest batch. columns, inner: N of one rank, K of one rank."""

    rows: int
    columns: int
    inner: int
    dtype: torch.dtype


Found = tuple[str, torch.Tensor, torch.Tensor]


class Operands:
    """Of all rows, the same on all ranks, from a seed."""

    def __init__(self, heap: Heap, sizes: Sizes, seed: int) -> None:
        def make(shape: tuple[int, ...], tag: str, dtype: torch.dtype = sizes.dtype) -> torch.Tensor:
            return make_operand(shape, dtype, seed, 0, tag=tag, device="cpu").to(device())

        self.heap, self.sizes = heap, sizes
        world, M = heap.world_size, sizes.rows
        N, K = sizes.columns * world, sizes.inner * world
        self.a, self.b = make((M, K), "a"), make((K, N), "b")
        self.residual, self.bias = make((M, N), "residual"), make((N,), "bias", torch.float32)
        self.weight, self.upstream = make((N,), "weight"), make((M, N), "upstream")
        self.inner = slice(*shard_range(K, heap.rank, world))
        self.columns = slice(*shard_range(N, heap.rank, world))

    def own(self, numbers: torch.Tensor) -> slice:
        """This rank's rows of a batch that is divided by rows."""
        return slice(*shard_range(len(numbers), self.heap.rank, self.heap.world_size))

    def forward(self, numbers: torch.Tensor, layout: str = "view") -> Iterator[Found]:
        """Every op of that batch."""

        def rows(x: torch.Tensor) -> torch.Tensor:
            taken = x[numbers.to(x.device)]
            return taken if layout == "view" else laid_out(taken, layout)

        group, mine = {"group": self.heap}, self.own(numbers)
        a, a_k, b_k = rows(self.a), rows(self.a[:, self.inner]), self.b[self.inner]
        b_n, bias_n = self.b[:, self.columns], self.bias[self.columns]
        shard = {"num_rows": len(numbers), **group}
        yield "gemm", stream_k.gemm(a, self.b, bias=self.bias, activation="silu"), numbers
        yield "gemm_all_reduce", stream_k.gemm_all_reduce(a_k, b_k, bias=self.bias, **group), numbers
        strict = {"partial_dtype": torch.float32, **group}
        yield "gemm_all_reduce, strict", stream_k.gemm_all_reduce(a_k, b_k, **strict), numbers
        yield "gemm_reduce_scatter", stream_k.gemm_reduce_scatter(a_k, b_k, **group), numbers[mine]
        yield "gemm_all_scatter", stream_k.gemm_all_scatter(a, b_n, bias=bias_n, **group), numbers
        yield "all_gather_gemm", stream_k.all_gather_gemm(a[mine], b_n, **shard), numbers
        several = stream_k.all_gather_gemm(a[mine], [b_n, b_n[:, :5]], **shard)
        yield from ((f"all_gather_gemm of several, {i}", c, numbers) for i, c in enumerate(several))
        residual, weight = rows(self.residual), self.weight
        norm, total = stream_k.gemm_all_reduce_rms_norm(a_k, b_k, residual, weight, EPS, **group)
        yield "gemm_all_reduce_rms_norm", norm, numbers
        yield "gemm_all_reduce_rms_norm, the total", total, numbers
        weight_n = weight[self.columns].clone()
        scattered = stream_k.gemm_rms_norm_all_scatter(a, b_n, weight_n, EPS, **group)
        yield "gemm_rms_norm_all_scatter", scattered, numbers
        x = residual * (1 + self.heap.rank)
        norm, total = collectives.all_reduce_rms_norm(x, residual, weight, EPS, **group)
        yield "all_reduce_rms_norm", norm, numbers
        yield "all_reduce_rms_norm, the total", total, numbers
        columns = rows(self.residual[:, self.columns])
        norm, total = collectives.rms_norm(columns, weight_n, EPS, residual=columns, **group)
        yield "rms_norm", norm, numbers
        whole = collectives.rms_norm(columns, weight_n, EPS, replicated=True, **group)
        yield "rms_norm, replicated", whole, numbers
        for algorithm in ("one_shot", "two_shot"):
            summed = collectives.all_reduce(x, op="avg", algorithm=algorithm, **group)
            yield f"all_reduce, {algorithm}", summed, numbers
        yield "reduce_scatter", collectives.reduce_scatter(x, **group), numbers[mine]
        yield "all_scatter", collectives.all_scatter(columns, **group), numbers
        gathered = collectives.all_gather(residual, **group)
        yield "all_gather", gathered, numbers.repeat(self.heap.world_size)
        yield "broadcast", collectives.broadcast(residual, 0, **group), numbers

    def backward(self, numbers: torch.Tensor) -> Iterator[Found]:
        """The gradient of the activations of every op that has one."""
        group, mine = {"group": self.heap}, self.own(numbers)
        here = numbers.to(self.a.device)
        b_k, b_n, weight = self.b[self.inner], self.b[:, self.columns], self.weight
        weight_n, g = weight[self.columns].clone(), self.upstream[here]
        shard = {"num_rows": len(numbers), **group}
        a, a_k, a_m = self.a[here], self.a[here][:, self.inner], self.a[here][mine]
        residual, columns = self.residual[here], self.residual[here][:, self.columns]
        calls: dict[str, tuple[torch.Tensor, Callable[[torch.Tensor], Any], torch.Tensor, torch.Tensor]] = {
            "gemm": (a, lambda x: stream_k.gemm(x, self.b), g, numbers),
            "gemm_all_reduce": (a_k, lambda x: stream_k.gemm_all_reduce(x, b_k, **group), g, numbers),
            "gemm_reduce_scatter": (
                a_k, lambda x: stream_k.gemm_reduce_scatter(x, b_k, **group), g[mine], numbers
            ),
            "gemm_all_scatter": (a, lambda x: stream_k.gemm_all_scatter(x, b_n, **group), g, numbers),
            "all_gather_gemm": (
                a_m, lambda x: stream_k.all_gather_gemm(x, b_n, **shard), g[:, self.columns], numbers[mine]
            ),
            "gemm_all_reduce_rms_norm": (
                a_k,
                lambda x: stream_k.gemm_all_reduce_rms_norm(x, b_k, residual, weight, EPS, **group)[0],
                g,
                numbers,
            ),
            "gemm_rms_norm_all_scatter": (
                a, lambda x: stream_k.gemm_rms_norm_all_scatter(x, b_n, weight_n, EPS, **group), g, numbers
            ),
            "all_reduce_rms_norm": (
                residual,
                lambda x: collectives.all_reduce_rms_norm(x, None, weight, EPS, **group)[0],
                g,
                numbers,
            ),
            "rms_norm": (
                columns,
                lambda x: collectives.rms_norm(x, weight_n, EPS, **group),
                g[:, self.columns],
                numbers,
            ),
            "all_gather": (
                residual, lambda x: collectives.all_gather(x, **group)[: len(numbers)], g, numbers
            ),
        }  # fmt: skip
        for name, (x, call, upstream, which) in calls.items():
            x = x.clone().requires_grad_()
            call(x).backward(upstream)
            assert x.grad is not None
            yield f"gradient of {name}", x.grad, which


def batches(rows: int, sizes: tuple[int, ...]) -> Iterator[tuple[torch.Tensor, str]]:
    """(numbers of rows, how they lie): batches of these sizes from the first row on, from the last ones, of rows in any
    order, and of rows that are not where descriptors like them."""
    draw = torch.Generator().manual_seed(rows)
    for number, size in enumerate(size for size in sizes if size <= rows):
        first = torch.arange(size)
        yield first, "view"
        if number % 2:
            yield rows - size + first, ("row", "transposed")[number // 2 % 2]
        else:
            yield torch.randperm(rows, generator=draw)[:size], ("misaligned", "sliced")[number // 2 % 2]


def unlike(
    operands: Operands, sizes: tuple[int, ...], forward: bool = True, backward: bool = False
) -> list[str]:
    """Which results had rows whose bits depend on their batch, and in which batches."""
    found = []
    everything = torch.arange(operands.sizes.rows)
    # The place of each row in a result that has all this rank ever has, and that result.
    wanted: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def calls(numbers: torch.Tensor, layout: str) -> Iterator[Found]:
        if forward:
            yield from operands.forward(numbers, layout)
        if backward:
            yield from operands.backward(numbers)

    for name, rows, numbers in calls(everything, "view"):
        assert len(rows) == len(numbers), name
        places = torch.full((operands.sizes.rows,), -1)
        places[numbers] = torch.arange(len(numbers))
        wanted[name] = places, bits(rows)
    for batch, layout in batches(operands.sizes.rows, sizes):
        for name, rows, numbers in calls(batch, layout):
            places, whole = wanted[name]
            # A rank has other rows of a smaller batch than of all.
            here = places[numbers] >= 0
            differ = (bits(rows)[here] != whole[places[numbers[here]]]).flatten(1).any(1).cpu()
            if bad := numbers[here][differ].tolist():
                found.append(f"{name}, {len(batch)} rows, {layout}: {len(bad)} of them, the first {bad[0]}")
    return found


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.detach().clone().contiguous().view(torch.int16)


def names(found: list[str]) -> set[str]:
    return {each.partition(",")[0] for each in found}


def compared(
    rank: int, world_size: int, cases: list[tuple[Sizes, tuple[int, ...], bool]], mode: bool
) -> list[str]:
    """`unlike` of cases: sizes, rows of batches, whether gradients are compared, too."""
    found = []
    with Heap(HEAP_BYTES) as heap, pyrocshmem.batch_invariant() if mode else contextlib.nullcontext():
        for seed, (sizes, batch_sizes, gradients) in enumerate(cases):
            each = unlike(Operands(heap, sizes, seed), batch_sizes, backward=gradients)
            found += [f"{sizes}: {text}" for text in each] if mode else each
    return found


def every_placement(rank: int, world_size: int, sizes: Sizes) -> list[str]:
    """Where rows had other bits by one placement, or by one algorithm, than by another."""
    wrong = []
    with Heap(HEAP_BYTES) as heap, pyrocshmem.batch_invariant():
        x = Operands(heap, sizes, 5)
        numbers = torch.arange(sizes.rows)
        a_k, b_k, b_n = x.a[:, x.inner], x.b[x.inner], x.b[:, x.columns]
        mine = x.own(numbers)
        M, N, K = sizes.rows, sizes.columns, sizes.inner
        wide, deep = N * world_size, K * world_size
        calls = {
            "gemm_all_reduce": (wide, K, lambda **more: stream_k.gemm_all_reduce(a_k, b_k, **more)),
            "gemm_reduce_scatter": (wide, K, lambda **more: stream_k.gemm_reduce_scatter(a_k, b_k, **more)),
            "gemm_all_scatter": (N, deep, lambda **more: stream_k.gemm_all_scatter(x.a, b_n, **more)),
            "all_gather_gemm": (
                N, deep, lambda **more: stream_k.all_gather_gemm(x.a[mine], b_n, num_rows=M, **more)
            ),
        }  # fmt: skip
        for name, (columns, inner, call) in calls.items():
            wanted = bits(call(group=heap))
            for placement in (each for each in placement_names(name) if each not in BY_BLAS):
                asked = (name, M, columns, inner, sizes.dtype, world_size, heap.device)
                for algorithm in ("one_shot", "two_shot") if name == "gemm_all_reduce" else ("two_shot",):
                    config = dataclasses.replace(
                        stream_k.choose(*asked, placement=placement), algorithm=algorithm
                    )
                    if not torch.equal(bits(call(group=heap, config=config)), wanted):
                        wrong.append(f"{name} by {placement}, {algorithm}")
        heap.synchronize()
    return wrong

"""The collectives on whole tensors as data, for the command line: how each is called, beside what, checked how.

    problem = STANDALONE["rms_norm"]
    calls = problem.prepare(Setting(heap, (M, N), dtype, seed))
    calls.ours(); calls.reference(); calls.check().ok

M x N is what a rank brings, of `rms_norm` what all bring together. One more collective is one more entry of
`STANDALONE`, and a line in stream_k/run/usage.txt; `stream_k.run.norm_problems` has the RMSNorms of products.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from pyrocshmem.collectives import whole_tensors
from pyrocshmem.collectives.all_reduce_rms_norm import all_reduce_rms_norm
from pyrocshmem.collectives.rms_norm import rms_norm
from pyrocshmem.heap import Heap
from pyrocshmem.reference import accuracy, norm_problems, ops
from pyrocshmem.reference.accuracy import Accuracy, make_operand
from pyrocshmem.reference.norm_problems import EPS
from pyrocshmem.shards import shard_range

ROOT = 0


@dataclass(frozen=True)
class Setting:
    """Where and on what a collective is run."""

    heap: Heap
    shape: tuple[int, ...]
    dtype: torch.dtype
    seed: int


@dataclass(frozen=True)
class Calls:
    """A collective and its reference on one rank: calls, the tensors that they write, and the check of the first."""

    ours: Callable[[], object]
    result: torch.Tensor
    reference: Callable[[], object]
    expected: torch.Tensor
    check: Callable[[], Accuracy]


@dataclass(frozen=True)
class Standalone:
    """steps: what the reference does; holds: what a rank brings and gets; bound: what the error is held to; in words.
    gpu_shape, cpu_shape: the sizes, where none are asked for: M, N; of a product M, N, K. function: its name, where it
    is not that of `collectives`. even: N must be a multiple of the ranks."""

    collective: str
    steps: str
    holds: str
    bound: str
    prepare: Callable[[Setting], Calls]
    gpu_shape: tuple[int, ...]
    cpu_shape: tuple[int, ...]
    function: str = ""
    even: bool = False


def normed(name: str, prepare: Callable[[Setting], Calls], function: str = "") -> Standalone:
    """An op that ends with RMSNorm, in the reference's words."""
    words = norm_problems.NORMS[name]
    texts, shapes = (words.steps, words.holds, words.bound), (words.gpu_shape, words.cpu_shape)
    return Standalone(name, *texts, prepare, *shapes, function, words.even)


def norm_setting(setting: Setting) -> norm_problems.Setting:
    """The same as `reference.norm_problems` has it."""
    heap = setting.heap
    return norm_problems.Setting(
        heap.rank, heap.world_size, heap.device, setting.shape, setting.dtype, setting.seed
    )


def calls_that_make(setting: Setting, ours: Callable[[], torch.Tensor], op: norm_problems.Op) -> Calls:
    """Calls that return their results: the tensors that are looked at become these, without a copy."""
    result, expected = (torch.empty(0, dtype=setting.dtype, device=setting.heap.device) for _ in "re")
    return Calls(
        lambda: result.set_(ours()),
        result,
        lambda: expected.set_(op.reference()),
        expected,
        lambda: op.check(result, expected),
    )


def _rms_norm(setting: Setting, replicated: bool) -> Calls:
    heap, op = setting.heap, norm_problems.Columns(norm_setting(setting), replicated)
    shape = op.h[:, op.columns].shape
    make = heap.empty if replicated else partial(torch.empty, device=heap.device)
    result, expected = (
        make(shape, dtype=setting.dtype),
        torch.empty(shape, dtype=setting.dtype, device=heap.device),
    )
    return Calls(
        lambda: rms_norm(op.x, op.weight, EPS, group=heap, out=result, **op.options),
        result,
        lambda: op.reference(out=expected),
        expected,
        lambda: op.check(result, expected),
    )


def _all_reduce_rms_norm(setting: Setting) -> Calls:
    op = norm_problems.Sum(norm_setting(setting))
    operands = (op.x, op.residual, op.weight, EPS)
    return calls_that_make(setting, lambda: all_reduce_rms_norm(*operands, group=setting.heap)[0], op)


class _Bulk:
    """x [M, N] of each rank, and what the collective must make of all of them."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self.heap = setting, setting.heap
        self.rank, self.ranks = setting.heap.rank, setting.heap.world_size
        self.x = self.of_rank(self.rank)

    def of_rank(self, rank: int) -> torch.Tensor:
        """What that rank brings."""
        options = {"tag": "x", "device": self.heap.device}
        return make_operand(self.setting.shape, self.setting.dtype, self.setting.seed, rank, **options)

    def all_ranks(self) -> list[torch.Tensor]:
        """What each rank brings."""
        return [self.of_rank(rank) for rank in range(self.ranks)]

    def sums(self, result: torch.Tensor, expected: torch.Tensor, rows: slice) -> Accuracy:
        """Hold rows of the sum over ranks against float64, beside the library's."""
        exact, magnitude = (
            torch.zeros(result.shape, dtype=torch.float64, device=result.device) for _ in "em"
        )
        for x in self.all_ranks():
            exact += x[rows]
            magnitude += x[rows].abs()
        allowed = accuracy.bound(exact, expected, magnitude, self.ranks, result.dtype)
        return accuracy.compare(result, exact, expected, allowed)

    def copies(self, result: torch.Tensor, exact: torch.Tensor) -> Accuracy:
        """Hold what is only moved against what was sent: no error is allowed."""
        exact = exact.double()
        return accuracy.compare(result, exact, exact, torch.zeros_like(exact))

    def new(self, *shape: int) -> torch.Tensor:
        """A tensor like x."""
        return self.x.new_empty(shape)


def _all_reduce(setting: Setting) -> Calls:
    bulk = _Bulk(setting)
    result, expected = (bulk.new(*setting.shape) for _ in "re")
    return Calls(
        lambda: whole_tensors.all_reduce(bulk.x, group=bulk.heap, out=result),
        result,
        lambda: ops.all_reduce(bulk.x, out=expected),
        expected,
        lambda: bulk.sums(result, expected, slice(None)),
    )


def _reduce_scatter(setting: Setting) -> Calls:
    bulk = _Bulk(setting)
    rows = slice(*shard_range(setting.shape[0], bulk.rank, bulk.ranks))
    result, expected = (bulk.new(rows.stop - rows.start, setting.shape[1]) for _ in "re")
    return Calls(
        lambda: whole_tensors.reduce_scatter(bulk.x, group=bulk.heap, out=result),
        result,
        lambda: ops.reduce_scatter(bulk.x, out=expected),
        expected,
        lambda: bulk.sums(result, expected, rows),
    )


def _all_gather(setting: Setting) -> Calls:
    bulk, (M, N) = _Bulk(setting), setting.shape
    result, expected = (bulk.new(bulk.ranks * M, N) for _ in "re")
    return Calls(
        lambda: whole_tensors.all_gather(bulk.x, group=bulk.heap, out=result),
        result,
        lambda: ops.all_gather(bulk.x, out=expected),
        expected,
        lambda: bulk.copies(result, torch.cat(bulk.all_ranks())),
    )


def _all_scatter(setting: Setting) -> Calls:
    bulk, (M, N) = _Bulk(setting), setting.shape
    result, expected = (bulk.new(M, bulk.ranks * N) for _ in "re")
    gathered = bulk.new(bulk.ranks, M, N)
    return Calls(
        lambda: whole_tensors.all_scatter(bulk.x, group=bulk.heap, out=result),
        result,
        lambda: ops.gather_columns(bulk.x, bulk.ranks * N, out=expected, gathered=gathered),
        expected,
        lambda: bulk.copies(result, torch.cat(bulk.all_ranks(), dim=1)),
    )


def _broadcast(setting: Setting) -> Calls:
    bulk = _Bulk(setting)
    result, expected = (bulk.new(*setting.shape) for _ in "re")

    def reference_broadcast() -> None:
        if bulk.rank == ROOT:
            expected.copy_(bulk.x)
        dist.broadcast(expected, ROOT)

    return Calls(
        lambda: whole_tensors.broadcast(bulk.x, ROOT, group=bulk.heap, out=result),
        result,
        reference_broadcast,
        expected,
        lambda: bulk.copies(result, bulk.of_rank(ROOT)),
    )


def _barrier(setting: Setting) -> Calls:
    """Every rank writes x to its right neighbour between two barriers: without the first, the neighbour may wipe it
    out; without the second, read too early."""
    bulk = _Bulk(setting)
    letter = bulk.heap.empty(*setting.shape, dtype=setting.dtype)
    to_neighbour = bulk.heap.peer_view(letter, (bulk.rank + 1) % bulk.ranks)
    result, expected = (bulk.new(*setting.shape) for _ in "re")
    token = torch.zeros(1, device=bulk.heap.device)

    def exchanged(barrier: Callable[[], object], out: torch.Tensor) -> None:
        letter.fill_(float("nan"))
        barrier()
        to_neighbour.copy_(bulk.x)
        barrier()
        out.copy_(letter)

    return Calls(
        lambda: exchanged(lambda: whole_tensors.barrier(group=bulk.heap), result),
        result,
        lambda: exchanged(lambda: dist.all_reduce(token), expected),
        expected,
        lambda: bulk.copies(result, bulk.of_rank((bulk.rank - 1) % bulk.ranks)),
    )


_SHAPES = ((4096, 8192), (64, 512))
_SUM = "error of the reference + sqrt(R) 2^-23 sum |x| + one rounding"
_COPY = "none: the values are moved, not computed"
_ALL = (
    Standalone("all_gather", "all_gather", "x; the x of all, by rows", _COPY, _all_gather, *_SHAPES),
    Standalone("all_reduce", "all_reduce", "x; the sum over ranks", _SUM, _all_reduce, *_SHAPES),
    Standalone(
        "all_scatter",
        "all_gather, then copies of the column blocks",
        "x; the x of all, by columns",
        _COPY,
        _all_scatter,
        *_SHAPES,
    ),
    Standalone(
        "reduce_scatter",
        "reduce_scatter",
        "x; its own rows of the sum over ranks",
        _SUM,
        _reduce_scatter,
        *_SHAPES,
    ),
    Standalone("broadcast", "broadcast", f"x; the x of rank {ROOT}", _COPY, _broadcast, *_SHAPES),
    Standalone(
        "barrier",
        "an all_reduce of one number before and after the ranks write to one another",
        "x, which it writes to its neighbour between two barriers; the other neighbour's",
        _COPY,
        _barrier,
        (1, 8),
        (1, 8),
    ),
    normed("rms_norm", partial(_rms_norm, replicated=False)),
    normed("rms_norm_replicated", partial(_rms_norm, replicated=True)),
    normed("all_reduce_rms_norm", _all_reduce_rms_norm),
)
STANDALONE: Mapping[str, Standalone] = {problem.collective: problem for problem in _ALL}

"""What a case computes on, and what it must compute: the operands of a rank, and samples of the true result.

operands = Operands(case, heap, device)
truth = operands.truth("result")          # float64, at rows that all ranks agree on
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from pyrocshmem.benchmarks.shapes import COLUMN_NORMS, GRAPH_CALLS, NORMS, OPS, Case
from pyrocshmem.reference.accuracy import make_operand
from pyrocshmem.reference.timing import cold_copies
from pyrocshmem.shards import shard_range

# Rows of a result that are held to float64, spread evenly over it; all of them up to this many.
CHECKED_ROWS = 192
CHECKED_ELEMENTS = 1 << 20
EPS = 1e-6
# Every rank has the same A, and columns of B of its own.
_SAME_A = ("gemm_all_scatter", "gemm_rms_norm_all_scatter")
# Of a broadcast.
ROOT = 0


@dataclass
class Truth:
    """Samples of the true result. rows: which of the result's rows, or elements where `flat`.

    ref64: their values in float64. magnitude: the sums of the terms' absolute values. partials: the sum over
    ranks of the absolute values of their partial results. K: number of terms of an element. steps: roundings of the
    value on its way that are the op's own.
    """

    rows: torch.Tensor
    ref64: torch.Tensor
    magnitude: torch.Tensor
    partials: torch.Tensor
    K: int
    steps: int = 0


class Operands:
    """Random normal operands of one rank: a [., .] and b [., .] of a product, or x of a collective.

    all_gather_gemm: a is this rank's share of the M rows, [M/R, K]; gemm_all_scatter: a is the same on all
    ranks. `share` is what the rank holds of the result's rows in gemm_reduce_scatter and reduce_scatter.
    Of ops with a norm (`NORMS`): residual [M, N] and gain [N], the same on all ranks; of `COLUMN_NORMS` gain [N], of
    this rank's columns. num_weights: copies of b. workspace: of calls of ours; None: the heap's or the device's.
    """

    def __init__(self, case: Case, heap: Any, device: torch.device, seed: int = 0) -> None:
        self.case, self.heap, self.device = case, heap, device
        self.rank: int = heap.rank if heap is not None else 0
        self.ranks: int = heap.world_size if heap is not None else 1
        self.dtype = getattr(torch, case.dtype)
        self.seed = seed
        self.kind = OPS[case.op].kind
        self.share = shard_range(case.M, self.rank, self.ranks)
        M, N, K = case.M, case.N, case.K
        self.num_weights = 0
        self.workspace: Any = None
        if case.op in NORMS:
            self.residual = self._random((M, N), 0, "residual")
            self.gain = self._random((1, N), 0, "gain")[0]
        if case.op in COLUMN_NORMS:
            self.gain = self._random((1, N), self.rank, "gain")[0]
        if self.kind == "collective":
            self.x = self._random((M, N), self.rank, "x")
            return
        rows = self.share[1] - self.share[0] if case.op == "all_gather_gemm" else M
        self.a = self._random((rows, K), 0 if case.op in _SAME_A else self.rank, "a")
        weights = [self._random((K, N), self.rank, "b")]
        if case.timing == "graph":
            weights = cold_copies(weights[0], GRAPH_CALLS)
        self.num_weights = len(weights)
        self._weights: Iterator[torch.Tensor] = itertools.cycle(weights)

    @property
    def b(self) -> torch.Tensor:
        """[K, N]; in a graph another copy for each call."""
        return next(self._weights)

    def hold_weights(self) -> None:
        """From now on every call reads the same copy of B."""
        if self.num_weights:
            self._weights = itertools.repeat(self.b)

    def _random(self, shape: tuple[int, int], rank: int, tag: str) -> torch.Tensor:
        return make_operand(shape, self.dtype, self.seed, rank, tag=tag, device=self.device)

    def new(self, *shape: int) -> torch.Tensor:
        """An ordinary tensor."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def result_shape(self) -> tuple[int, int]:
        """Rows and columns of this rank's result."""
        M, N = self.case.M, self.case.N
        if self.case.op in (*_SAME_A, "all_scatter", "rms_norm_replicated"):
            return M, N * self.ranks
        if self.case.op == "all_gather":
            return M * self.ranks, N
        if self.case.op in ("gemm_reduce_scatter", "reduce_scatter"):
            return self.share[1] - self.share[0], N
        return M, N

    def whole_gain(self) -> torch.Tensor:
        """[R x N] of `COLUMN_NORMS`."""
        return torch.cat([self._random((1, self.case.N), rank, "gain")[0] for rank in range(self.ranks)])

    def whole_a(self) -> torch.Tensor:
        """A [M, K] of the local product, gathered where ranks have shares. Collective for all_gather_gemm."""
        if self.case.op != "all_gather_gemm" or self.ranks == 1:
            return self.a
        shapes = [shard_range(self.case.M, rank, self.ranks) for rank in range(self.ranks)]
        # Every rank can make its peers' shares itself: no collective that wants equal sizes.
        parts = [
            self._random((end - begin, self.case.K), rank, "a") for rank, (begin, end) in enumerate(shapes)
        ]
        return torch.cat(parts)

    def truth(self, what: str) -> Truth:
        """Samples of the "result", or of the "product" that this rank computes. Collective for the former."""
        return self._of_collective() if self.kind == "collective" else self._of_product(what)

    def _rows(self) -> torch.Tensor:
        # Evenly spread, at another place in each step: every tile row and every place in a tile is met.
        M = self.case.M
        if M <= CHECKED_ROWS:
            return torch.arange(M, device=self.device)
        step = M / CHECKED_ROWS
        generator = torch.Generator().manual_seed(self.seed)
        jitter = torch.rand(CHECKED_ROWS, generator=generator, dtype=torch.float64)
        found = ((torch.arange(CHECKED_ROWS) + jitter) * step).long().clamp_(max=M - 1)
        return found.to(self.device)

    def _of_product(self, what: str) -> Truth:
        case, rows = self.case, self._rows()
        a = self.whole_a()[rows].double()
        b = self.b.double()
        ref, magnitude = a @ b, a.abs() @ b.abs_()
        if what == "product" or case.op in ("gemm", "all_gather_gemm"):
            return Truth(rows, ref, magnitude, ref.abs(), case.K)
        if self.kind == "row":
            partials = ref.abs()
            for each in (ref, magnitude, partials):
                self._sum(each)
            if case.op in NORMS:
                return self._normalized(rows, ref, magnitude, partials)
            return self._own_rows(Truth(rows, ref, magnitude, partials, case.K * self.ranks))
        if case.op in COLUMN_NORMS:
            return self._normalized_columns(rows, ref, magnitude)
        ref, magnitude = self._side_by_side(ref), self._side_by_side(magnitude)
        return Truth(rows, ref, magnitude, ref.abs(), case.K)

    def _own_rows(self, truth: Truth) -> Truth:
        """Those of this rank's block, where the op scatters rows."""
        if self.case.op not in ("gemm_reduce_scatter", "reduce_scatter"):
            return truth
        begin, end = self.share
        mine = (truth.rows >= begin) & (truth.rows < end)
        ref, magnitude, partials = truth.ref64[mine], truth.magnitude[mine], truth.partials[mine]
        return Truth(truth.rows[mine] - begin, ref, magnitude, partials, truth.K)

    def _normalized(
        self, rows: torch.Tensor, ref: torch.Tensor, magnitude: torch.Tensor, partials: torch.Tensor
    ) -> Truth:
        """RMSNorm of the sums plus the residual. The sum of squares has N terms more, and some for the root; its error
        is one of the value's. The total is rounded before its norm is taken, which moves value and root."""
        residual = self.residual[rows].double()
        total = ref + residual
        scale = torch.rsqrt(total.square().mean(1, keepdim=True) + EPS) * self.gain.double()
        value, each = total * scale, scale.abs()
        terms = max(self.case.K, 1) * self.ranks + self.case.N + 16
        magnitude = magnitude * each + value.abs()
        return Truth(rows, value, magnitude, (partials + residual.abs()) * each, terms, steps=2)

    def _normalized_columns(self, rows: torch.Tensor, mine: torch.Tensor, magnitude: torch.Tensor) -> Truth:
        """RMSNorm over all ranks' columns, of which `mine` are this rank's. A product is rounded before that, which
        moves value and root."""
        K, columns = self.case.K, self.ranks * self.case.N
        squares = mine.square().sum(1, keepdim=True)
        self._sum(squares)
        scale = torch.rsqrt(squares / columns + EPS) * self.gain.double()
        value = mine * scale
        magnitude = magnitude * scale.abs() + value.abs()
        if self.case.op != "rms_norm":
            value, magnitude = self._side_by_side(value), self._side_by_side(magnitude)
        return Truth(rows, value, magnitude, value.abs(), max(K, 1) + columns + 16, steps=2 if K else 0)

    def _of_collective(self) -> Truth:
        op = self.case.op
        if op == "barrier":
            # Of every rank, whether what it did before is seen.
            seen = torch.ones(1, self.ranks, dtype=torch.float64, device=self.device)
            return Truth(torch.zeros(1, dtype=torch.int64), seen, torch.zeros_like(seen), seen, 1)
        if op in COLUMN_NORMS:
            rows = self._rows()
            mine = self.x[rows].double()
            return self._normalized_columns(rows, mine, torch.zeros_like(mine))
        if op in ("all_gather", "all_scatter"):
            rows = self._rows()
            parts = self._gathered(self.x[rows].double())
            if op == "all_gather":
                ref = torch.cat(parts)
                rows = torch.cat([rank * self.case.M + rows for rank in range(self.ranks)])
            else:
                ref = torch.cat(parts, dim=1)
            return Truth(rows, ref, torch.zeros_like(ref), ref.abs(), 1)
        if op in ("reduce_scatter", *NORMS):
            rows = self._rows()
            ref = self.x[rows].double()
            partials = ref.abs()
            self._sum(ref)
            self._sum(partials)
            if op in NORMS:
                return self._normalized(rows, ref, partials, partials)
            return self._own_rows(Truth(rows, ref, partials, partials, self.ranks))
        columns = self._columns()
        ref = self.x[0, columns].double()
        partials = ref.abs()
        if op == "broadcast":
            if self.ranks > 1:
                dist.broadcast(ref, ROOT)
            return Truth(columns, ref[:, None], torch.zeros_like(ref)[:, None], ref.abs()[:, None], 1)
        self._sum(ref)
        self._sum(partials)
        return Truth(columns, ref[:, None], partials[:, None], partials[:, None], self.ranks)

    def _columns(self) -> torch.Tensor:
        """Of a tensor of one row: evenly spread, at another place in each step."""
        step = max(1, self.case.N // CHECKED_ELEMENTS)
        columns = torch.arange(0, self.case.N, step)
        generator = torch.Generator().manual_seed(self.seed)
        columns += torch.randint(step, columns.shape, generator=generator)
        return columns.clamp_(max=self.case.N - 1).to(self.device)

    def _sum(self, x: torch.Tensor) -> None:
        if self.ranks > 1:
            dist.all_reduce(x)

    def _gathered(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's `x`."""
        if self.ranks == 1:
            return [x]
        parts = [torch.empty_like(x) for _ in range(self.ranks)]
        dist.all_gather(parts, x.contiguous())
        return parts

    def _side_by_side(self, x: torch.Tensor) -> torch.Tensor:
        """Every rank's `x` [m, n], as columns: [m, R x n]."""
        return torch.cat(self._gathered(x), dim=1)

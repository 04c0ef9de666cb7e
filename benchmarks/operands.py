"""What a case computes on, and what it must compute: the operands of a rank, and samples of the true result.

with_heap = Operands(case, heap, device)
truth = with_heap.truth("result")          # float64, at rows that all ranks agree on
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.shapes import OPS, Case
from reference.accuracy import make_operand
from reference.ops import shard_range

# Rows of a result that are held to float64, spread evenly over it; all of them up to this many.
CHECKED_ROWS = 192
CHECKED_ELEMENTS = 1 << 20


@dataclass
class Truth:
    """Samples of the true result. rows: which of the result's rows, or elements where `flat`.

    ref64: their values in float64. magnitude: the sums of the terms' absolute values. partials: the sum over
    ranks of the absolute values of their partial results. K: number of terms of an element.
    """

    rows: torch.Tensor
    ref64: torch.Tensor
    magnitude: torch.Tensor
    partials: torch.Tensor
    K: int


class Operands:
    """Random normal operands of one rank: a [., .] and b [., .] of a product, or x of a collective.

    all_gather_gemm: a is this rank's share of the M rows, [M/R, K]; gemm_all_scatter: a is the same on all
    ranks. `share` is what the rank holds of the result's rows in gemm_reduce_scatter.
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
        self.on_heap: list[torch.Tensor] = []
        if self.kind == "collective":
            self.x = self.symmetric(M, N)
            self.x.copy_(self._random((M, N), self.rank, "x"))
            return
        rows = self.share[1] - self.share[0] if case.op == "all_gather_gemm" else M
        self.a = self._random((rows, K), 0 if case.op == "gemm_all_scatter" else self.rank, "a")
        self.b = self._random((K, N), self.rank, "b")

    def _random(self, shape: tuple[int, int], rank: int, tag: str) -> torch.Tensor:
        return make_operand(shape, self.dtype, self.seed, rank, tag=tag, device=self.device)

    def new(self, *shape: int) -> torch.Tensor:
        """An ordinary tensor."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def symmetric(self, *shape: int) -> torch.Tensor:
        """A tensor on the heap, freed by `close`. Collective."""
        self.on_heap.append(self.heap.empty(*shape, dtype=self.dtype))
        return self.on_heap[-1]

    def close(self) -> None:
        """Give back what lies on the heap. Collective."""
        while self.on_heap:
            self.heap.free(self.on_heap.pop())

    def result_shape(self) -> tuple[int, int]:
        """Rows and columns of this rank's result."""
        M, N = self.case.M, self.case.N
        if self.case.op in ("gemm_all_scatter", "all_scatter"):
            return M, N * self.ranks
        if self.case.op == "gemm_reduce_scatter":
            return self.share[1] - self.share[0], N
        return M, N

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
            if case.op == "gemm_reduce_scatter":
                begin, end = self.share
                mine = (rows >= begin) & (rows < end)
                rows, ref, magnitude, partials = (
                    rows[mine] - begin,
                    ref[mine],
                    magnitude[mine],
                    partials[mine],
                )
            return Truth(rows, ref, magnitude, partials, case.K * self.ranks)
        ref, magnitude = self._side_by_side(ref), self._side_by_side(magnitude)
        return Truth(rows, ref, magnitude, ref.abs(), case.K)

    def _of_collective(self) -> Truth:
        if self.case.op == "all_scatter":
            rows = self._rows()
            ref = self._side_by_side(self.x[rows].double())
            return Truth(rows, ref, torch.zeros_like(ref), ref.abs(), 1)
        step = max(1, self.case.N // CHECKED_ELEMENTS)
        columns = torch.arange(0, self.case.N, step, device=self.device)
        ref = self.x[0, columns].double()
        partials = ref.abs()
        self._sum(ref)
        self._sum(partials)
        return Truth(columns, ref[:, None], partials[:, None], partials[:, None], self.ranks)

    def _sum(self, x: torch.Tensor) -> None:
        if self.ranks > 1:
            dist.all_reduce(x)

    def _side_by_side(self, x: torch.Tensor) -> torch.Tensor:
        """Every rank's `x` [m, n], as columns: [m, R x n]."""
        if self.ranks == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.ranks)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, dim=1)

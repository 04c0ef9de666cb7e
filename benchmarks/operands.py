"""What a case computes on, and what it must compute: the operands of a rank, and samples of the true result.

operands = Operands(case, heap, device)
sample = operands.sampled("result")          # float64, at rows of this rank's result
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from pyrocshmem.benchmarks.shapes import GRAPH_CALLS, OPS, Case
from pyrocshmem.reference import operands
from pyrocshmem.reference.accuracy import Truth
from pyrocshmem.reference.problems import BY_NAME


@dataclass(frozen=True)
class Sample:
    """Rows and columns (None: all) of a result, and what they must be."""

    rows: torch.Tensor
    columns: torch.Tensor | None
    truth: Truth

    def of(self, result: torch.Tensor) -> torch.Tensor:
        """The same rows and columns of a result."""
        found = result[self.rows]
        return found if self.columns is None else found[:, self.columns]


class Operands(operands.Operands):
    """Of a case on this rank. heap: of the ranks that run it together; None: it is one rank's. workspace: of calls of
    ours; None: the heap's or the device's."""

    def __init__(self, case: Case, heap: Any, device: torch.device, seed: int = 0) -> None:
        problem = BY_NAME[case.op]
        rank, ranks = (heap.rank, heap.world_size) if heap is not None else (0, 1)
        shape = problem.global_shape((case.M, case.N, case.K)[: len(problem.letters)], ranks)
        dtype = getattr(torch, case.dtype)
        super().__init__(problem, shape, dtype, seed, rank, ranks, device, residual=problem.norm == "sum")
        self.case, self.heap, self.kind = case, heap, OPS[case.op].kind
        self.workspace: Any = None
        if case.timing == "graph":
            self.cool_weights(GRAPH_CALLS)

    def sampled(self, what: str) -> Sample:
        """Of the "result", or of the "product" that this rank computes."""
        if what == "product":
            rows, _ = self.sample(whole=False)
            return Sample(rows, None, self.local_truth(rows))
        rows, columns = self.sample()
        return Sample(rows, columns, self.truth(rows, columns))

"""`FusedPlan`: the launches of a fused op for operands of one kind, and the way from there to a call."""

from __future__ import annotations

from typing import Any

import torch

from pyrocshmem.calls.graphs import Graphs
from pyrocshmem.calls.kernel_launch import Launch
from pyrocshmem.calls.workspace import Workspace
from pyrocshmem.stream_k.local_gemm.product import Product

Arguments = tuple[Any, ...]
_SIDE = 0


def in_passing(workspace: Workspace, count: int, dtype: torch.dtype) -> torch.Tensor:
    """`count` elements on the heap for what nobody reads after the call: written by this rank and, once it has entered
    the call, by peers. All such calls of a workspace share one buffer."""
    size = count * dtype.itemsize
    return workspace.buffer("in passing", size, torch.uint8)[:size].view(dtype)


class FusedPlan:
    """The launches of an op for operands of one kind, and the buffers that they share. Ops derive from it.

    product: the GEMM; not set on a rank without columns, nor where the BLAS multiplies (blas). launches: in stream
    order. result: a buffer of the workspace, to be copied to `out`; None: the op writes `out` itself.
    squares: fp32 [tiles x M], where asked for. called: the call as the ranks compared it. shape: of the result. graphs:
    of repeated calls.
    """

    product: Product
    blas: bool = False
    launches: list[Launch]
    result: torch.Tensor | None
    squares: torch.Tensor
    called: str
    shape: tuple[int, int]
    workspace: Workspace
    graphs: Graphs

    @property
    def replayable(self) -> bool:
        """Whether a graph of a call can be replayed."""
        product = getattr(self, "product", None)
        return not self.blas and (product is None or product.replayable)

    def arguments(
        self, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
    ) -> tuple[Arguments, ...]:
        """Arguments of each launch."""
        raise NotImplementedError

    def compile(self, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        """Compile and load every kernel."""
        arguments = self.arguments(a, b, bias, out)
        if len(self.launches) == 2:
            arguments = arguments[::2]
        for launch, args in zip(self.launches, arguments, strict=False):
            launch.compile(args)

    def run(self, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        """Enqueue the call: its launches one after another, or, of three, the last two beside the first."""
        a, b = self.product.readable(a, b)
        arguments = self.arguments(a, b, bias, out)
        beside = len(self.launches) == 3
        if beside:
            self.workspace.fork(_SIDE)
        self.launches[0](arguments[0])
        if beside:
            with self.workspace.beside(_SIDE):
                self.launches[1](arguments[1])
                self.launches[2](arguments[2])
            self.workspace.join(_SIDE)
        elif len(self.launches) == 2:
            self.launches[1](arguments[2])

    def call(self, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        """Make the call, `run` or a graph of it."""
        self.graphs.run((a, b, bias, out), lambda: self.run(a, b, bias, out))

    def second(self, a: torch.Tensor) -> torch.Tensor:
        """What the call returns beside its result, where asked for: a new tensor. a: the caller's operand."""
        return self.squares.view(-1, a.shape[0]).t().clone()

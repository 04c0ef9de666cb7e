"""`FusedPlan`: the launches of a fused op for operands of one kind, and the way from there to a call."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from pyrocshmem import signal, target
from pyrocshmem.calls.call_name import CallName
from pyrocshmem.calls.graphs import Graphs
from pyrocshmem.calls.kernel_launch import rooms_beside
from pyrocshmem.calls.workspace import Workspace
from pyrocshmem.stream_k.local_gemm.blas import BlasPlan
from pyrocshmem.stream_k.local_gemm.product import Product
from pyrocshmem.stream_k.local_gemm.scales import Operand

_SIDE = 0


def in_passing(workspace: Workspace, count: int, dtype: torch.dtype) -> torch.Tensor:
    """`count` elements on the heap for what nobody reads after the call: written by this rank and, once it has entered
    the call, by peers. All such calls of a workspace share one buffer."""
    size = count * dtype.itemsize
    return workspace.buffer("in passing", size, torch.uint8)[:size].view(dtype)


def at_rank(workspace: Workspace, tensor: torch.Tensor, rank: int) -> torch.Tensor:
    """What `rank` has at the place of `tensor`, which lies in a buffer of the workspace on the heap. Plans share what
    they know of the buffer, since a new view of a peer's memory takes the host as long as ten of this one."""
    heap, shared = workspace.heap, workspace.plans.shared
    assert heap is not None
    if rank == heap.rank:
        return tensor
    key = "at a peer", rank, tensor.untyped_storage().data_ptr(), tensor.dtype
    there = shared.get(key)
    if there is None:
        there = shared[key] = heap.peer_view(tensor, rank)
    view: torch.Tensor = there.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return view


def on_all_ranks(workspace: Workspace, tensor: torch.Tensor) -> list[torch.Tensor]:
    """`at_rank` of each."""
    return [at_rank(workspace, tensor, rank) for rank in range(workspace.world_size)]


def least_free(gemm: Any, waits: Iterable[Any], count: int) -> int:
    """Multiprocessors that a GEMM must leave free where `count` programs of `waits` may be resident before it: on one
    that has no room for both, the GEMM's program would begin only when such a wait ends, which may be for that
    program's tiles. All as `Launch.compile` gives them; None, where nothing is compiled. Of NVIDIA's: elsewhere a GEMM
    leaves one free (`with_a_free_multiprocessor`)."""
    if gemm is None or target.backend() != "cuda":
        return 0
    return max(0, count - min(rooms_beside(gemm, wait) for wait in waits))


def call_number(workspace: Workspace) -> torch.Tensor:
    """[1], on the device: the number of the call in progress, which copy engines raise flags to."""
    return workspace.control[int(signal.CURRENT.value) :][:1]


class ByRole(NamedTuple):
    """What each launch of a plan has: the GEMM's, of a consumer in a launch of its own, and of the gate that this has
    where it runs beside the GEMM; None where there is none."""

    gemm: Any
    gate: Any = None
    consumer: Any = None


class FusedPlan:
    """The launches of an op for operands of one kind, and the buffers that they share. Ops derive from it.

    product: the GEMM; not set on a rank without columns, nor where the BLAS multiplies. blas: its GEMM there; of
    several one, since all heed the same switches. launches: each a `Launch`. result: a buffer of the workspace, to be
    copied to `out`; None: the op writes `out` itself. squares: fp32 [tiles x M], where asked for. called: the call as
    the ranks compared it. placement: its configuration's. shape, dtype: of the result. graphs: of repeated calls.
    least_free: as the function of this name has it, of a compiled plan.
    """

    product: Product
    blas: BlasPlan | None = None
    launches: ByRole
    result: torch.Tensor | None
    squares: torch.Tensor
    called: CallName
    placement: str
    shape: tuple[int, int]
    dtype: torch.dtype
    workspace: Workspace
    graphs: Graphs
    least_free: int = 0

    @property
    def replayable(self) -> bool:
        """Whether a graph of a call can be replayed."""
        product = getattr(self, "product", None) if self.blas is None else self.blas
        return product is None or product.replayable

    def make_graphs(self) -> None:
        """Of its calls, none so far."""
        switch = None if self.blas is None else self.blas.switch
        self.graphs = Graphs(self.workspace, self.replayable, switch=switch)

    def arguments(self, a: Operand, b: Operand, bias: torch.Tensor | None, out: torch.Tensor) -> ByRole:
        """Arguments of each launch."""
        raise NotImplementedError

    def compile(self, a: Operand, b: Operand, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        """Compile and load every kernel."""
        for launch, arguments in zip(self.launches, self.arguments(a, b, bias, out), strict=True):
            if launch is not None:
                launch.compile(arguments)

    def run(self, a: Operand, b: Operand, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        """Enqueue the call: the GEMM, and the consumer behind it or, where it has a gate, beside it."""
        a, b = self.product.readable(a, b)
        launches, arguments = self.launches, self.arguments(a, b, bias, out)
        if launches.gate is not None:
            self.workspace.fork(_SIDE)
        launches.gemm(arguments.gemm)
        if launches.gate is not None:
            with self.workspace.beside(_SIDE):
                launches.gate(arguments.gate)
                launches.consumer(arguments.consumer)
            self.workspace.join(_SIDE)
        elif launches.consumer is not None:
            launches.consumer(arguments.consumer)

    def second(self, a: torch.Tensor) -> Any:
        """What the call returns beside its result, where asked for: a new tensor. a: the caller's operand."""
        return self.squares.view(-1, a.shape[0]).t().clone()

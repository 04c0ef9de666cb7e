"""`gemm_all_scatter`: the column-parallel product, every rank's columns on every rank. The protocol is `collectives.scatter_tiles`'s."""

from __future__ import annotations

from typing import Any

import torch

from collectives import scatter_tiles as tiles
from pyrocshmem import status
from pyrocshmem.heap import Heap
from stream_k import fused
from stream_k.config import Config, choose
from stream_k.epilogue import ACTIVATIONS
from stream_k.gemm import gemm, widened, with_inner_size
from stream_k.kernel import POINTER
from stream_k.operands import as_argument, check_product, how_to_write
from stream_k.product import make_product
from stream_k.workspace import Workspace


def gemm_all_scatter(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    group: Any = None,
    out: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    activation: str = "none",
    squared_partials: bool = False,
    allow_tf32: bool = False,
    config: Config | None = None,
    workspace: Workspace | None = None,
) -> Any:
    """activation(a @ b + bias) of every rank, side by side, on every rank: the same bits on all of them and on every run.

    a: [M, K], b: [K, N/R]: this rank's columns, the same shapes on all ranks, any strides; float16, bfloat16 or float32. bias: [N/R], its columns'.
    out: [M, N]. None: a new tensor, the caller's own like any other. A contiguous tensor on the group's heap (the same one on every rank): peers write it
    directly, with no copy; it must not be read on another stream while a later call writes it.
    squared_partials: also return fp32 [M, R x tiles_n], per tile the sum over its columns of the squares of each row, before rounding.
    group, config, workspace: as in `gemm_all_reduce`.

    Returns out, or (out, squares). Nothing waits for the device: a fault of a peer shows at the next call, or at `heap.synchronize()`.
    Raises TypeError, ValueError before any launch; `CallMismatch`, `PeerTimeout`, `PeerAborted`, `HeapOutOfMemory`, `WorkspaceBusy`.
    """
    place = fused.place_of(group, workspace, a)
    heap = place.heap
    columns = heap.world_size * b.shape[1] if isinstance(b, torch.Tensor) and b.ndim == 2 else 0
    M, N, K = check_product(a, b, bias, activation, out, columns)
    if heap.world_size == 1 and not squared_partials:
        return gemm(a, b, bias=bias, activation=activation, out=out, allow_tf32=allow_tf32, config=config)
    if fused.interpreted_bf16(a):
        wide = gemm_all_scatter(
            a.float(), b.float(), group=heap, bias=widened(bias), activation=activation, squared_partials=squared_partials, config=config, workspace=workspace
        )
        value = wide[0] if squared_partials else wide
        value = value.bfloat16() if out is None else out.copy_(value)
        return (value, wide[1]) if squared_partials else value
    chosen = config if config is not None else choose("gemm_all_scatter", M, N, K, a.dtype, heap.world_size, heap.device)
    offset = fused.symmetric_offset(heap, out)
    if out is None:
        out = torch.empty(M, columns, dtype=a.dtype, device=a.device)
    if min(M, N) == 0:
        return (out, torch.zeros(M, 0, device=a.device)) if squared_partials else out
    a, b = with_inner_size(a, b)
    how = (activation, squared_partials, allow_tf32, offset, chosen)
    key = ("gemm_all_scatter", fused.kind(a), fused.kind(b), fused.kind(bias), *how)
    facts = {"bias": bias is not None, "activation": activation, "squares": squared_partials, "tf32": allow_tf32}
    call = lambda: fused.describe("gemm_all_scatter", M, N, a.dtype, **facts, out_offset=offset, config=chosen)  # noqa: E731
    make = lambda longest_k: _Plan(place, a, b, bias, out, offset is not None, how, longest_k)  # noqa: E731
    plan = fused.find_plan(place, key, a.shape[1], call, make, (a, b, bias, out))
    fused.run(place, plan, a, b, bias, out)
    if not squared_partials:
        return out
    assert isinstance(plan, _Plan)
    return out, plan.squares.view(-1, M).t().clone()


class _Plan:
    """Launches, and the buffers that they share."""

    def __init__(
        self, place: fused.Place, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, direct: bool, how: tuple[Any, ...],
        longest_k: int,
    ) -> None:
        activation, squared, allow_tf32, _, config = how
        heap: Heap = place.heap
        workspace = place.workspace
        world = heap.world_size
        inside = config.placement == "inside"
        comm = fused.comm_programs(config)
        product = make_product(a, b, config, allow_tf32, comm, stores_fp32=a.dtype == torch.float32, longest_k=longest_k)
        self.product = product
        self.rank = heap.rank
        num_tiles = product.schedule.num_tiles
        self.flags = workspace.buffer("flags", (world + 1) * num_tiles, torch.int32)
        self.result: torch.Tensor | None = None
        if not direct:
            size = product.M * product.N * world
            self.result = workspace.buffer("results", size, a.dtype)[:size].view(product.M, product.N * world)
        squares = world * product.schedule.tiles_n * product.M if squared else 1
        self.squares = workspace.buffer("squares", squares, torch.float32)[:squares]
        self.context = workspace.context
        self.fix_up = product.fix_up(workspace)
        # The peers' places are known as pointers only.
        self.c_how = POINTER if inside else how_to_write(self._columns(out))
        act = (ACTIVATIONS.index(activation), int(bias is not None), self.c_how)
        move = (config.comm_rows, int(comm > 0))
        options = (*act, 0, int(squared), *move)
        op = int(status.Op.GEMM_ALL_SCATTER)
        epilogue = tiles.push_output if inside else tiles.publish_output
        consumer = {"after": None, "beside": tiles.push_tiles, "inside": tiles.await_own_tiles}[config.placement]
        lag = 0 if inside else -1
        self.launches = [product.launch(op, world, epilogue, consumer, options, lag=lag, ends=consumer is not None)]
        if consumer is None:
            self.launches.append(fused.consumer_launch(product, tiles.push_tiles, options, world, heap.device))

    def _columns(self, out: torch.Tensor) -> torch.Tensor:
        """This rank's block of columns of the result."""
        result = out if self.result is None else self.result
        return result[:, self.rank * self.product.N : (self.rank + 1) * self.product.N]

    def arguments(
        self, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
    ) -> list[fused.Arguments]:
        """Arguments of each launch."""
        product = self.product
        x, y = product.operands(a, b)
        columns = self._columns(out)
        c = as_argument(columns, self.c_how, product.config.block_m, product.part_n)
        results = out if self.result is None else self.result
        extra = (results, self.flags, self.squares, bias if bias is not None else results, 1)
        gemm_arguments = (x, y, c, *self.fix_up, extra, self.context, product.problem, product.strides)
        return [gemm_arguments, (extra, self.context, product.problem)][: len(self.launches)]

"""`gemm_all_reduce`: the row-parallel product, summed over ranks, on every rank. The protocol is `collectives.reduce_tiles`'s."""

from __future__ import annotations

from typing import Any

import torch

from collectives import reduce_tiles as tiles
from pyrocshmem import status
from pyrocshmem.heap import Heap
from stream_k import fused
from stream_k.config import Config, choose
from stream_k.epilogue import ACTIVATIONS
from stream_k.gemm import gemm, widened, with_inner_size
from stream_k.operands import as_argument, check_product, how_to_read
from stream_k.product import make_product
from stream_k.workspace import Workspace


def gemm_all_reduce(
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
    """activation(sum over ranks of a @ b + bias) on every rank, the same bits on all of them and on every run.

    a: [M, K/R], b: [K/R, N]: this rank's shares, any strides; float16, bfloat16 or float32. M and N are the same on all ranks, shares of K may differ.
    group: a ProcessGroup, a 1-D DeviceMesh, a Heap; None: the default process group. All its ranks call together, in the same order.
    out: [M, N]. None: a new tensor, the caller's own like any other. A contiguous tensor on the group's heap (the same one on every rank): peers write it
    directly, with no copy; it must not be read on another stream while a later call writes it. bias: [N], added once, to the sum.
    squared_partials: also return fp32 [M, tiles_n], per tile the sum over its columns of the squares of each row of the result, before rounding.
    config: as `stream_k.choose` makes it; `partial_dtype` halves the traffic at the price of one rounding a rank. workspace: see `Workspace`.

    Returns out, or (out, squares). Nothing waits for the device: a fault of a peer shows at the next call, or at `heap.synchronize()`.
    Raises TypeError, ValueError before any launch; `CallMismatch`, `PeerTimeout`, `PeerAborted`, `HeapOutOfMemory`, `WorkspaceBusy`.
    """
    columns = b.shape[1] if isinstance(b, torch.Tensor) and b.ndim == 2 else 0
    M, N, K = check_product(a, b, bias, activation, out, columns)
    place = fused.place_of(group, workspace, a)
    heap = place.heap
    if heap.world_size == 1 and not squared_partials:
        return gemm(a, b, bias=bias, activation=activation, out=out, allow_tf32=allow_tf32, config=config)
    if fused.interpreted_bf16(a):
        wide = gemm_all_reduce(
            a.float(), b.float(), group=heap, bias=widened(bias), activation=activation, squared_partials=squared_partials, config=config, workspace=workspace
        )
        value = wide[0] if squared_partials else wide
        value = value.bfloat16() if out is None else out.copy_(value)
        return (value, wide[1]) if squared_partials else value
    chosen = config if config is not None else choose("gemm_all_reduce", M, N, K, a.dtype, heap.world_size, heap.device)
    offset = fused.symmetric_offset(heap, out)
    if out is None:
        out = torch.empty(M, N, dtype=a.dtype, device=a.device)
    if min(M, N) == 0:
        return (out, torch.zeros(M, 0, device=a.device)) if squared_partials else out
    a, b = with_inner_size(a, b)
    how = (activation, squared_partials, allow_tf32, offset, out.is_contiguous(), chosen)
    key = ("gemm_all_reduce", fused.kind(a), fused.kind(b), fused.kind(bias), *how)
    facts = {"bias": bias is not None, "activation": activation, "squares": squared_partials, "tf32": allow_tf32}
    call = lambda: fused.describe("gemm_all_reduce", M, N, a.dtype, **facts, out_offset=offset, config=chosen)  # noqa: E731
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
        activation, squared, allow_tf32, _, contiguous, config = how
        heap: Heap = place.heap
        workspace = place.workspace
        world = heap.world_size
        self.one_shot = config.algorithm == "one_shot"
        pushed = config.placement == "inside"
        dtype = config.partial_dtype or torch.float32
        comm = fused.comm_programs(config)
        product = make_product(a, b, config, allow_tf32, comm, stores_fp32=dtype == torch.float32, longest_k=longest_k)
        self.product = product
        tile_elements = config.block_m * config.block_n
        num_tiles = product.schedule.num_tiles
        places = num_tiles
        if pushed:
            places = world * (num_tiles if self.one_shot else -(-num_tiles // world))
        self.slot_elements = places * tile_elements
        self.partials = workspace.buffer("partials", 2 * self.slot_elements, dtype)
        self.flags = workspace.buffer("flags", (world + 1) * num_tiles, torch.int32)
        # A result that nobody else writes can be the caller's tensor; so can one that peers reach.
        self.result: torch.Tensor | None = None
        if not direct and not (self.one_shot and contiguous):
            buffer = workspace.buffer("results", product.M * product.N, a.dtype)
            self.result = buffer[: product.M * product.N].view(product.M, product.N)
        squares = product.schedule.tiles_n * product.M if squared else 1
        self.squares = workspace.buffer("squares", squares, torch.float32)[:squares]
        self.context = workspace.context
        self.fix_up = product.fix_up(workspace)
        self.c: Any = self.partials
        if not pushed:
            rows = self.partials[: 2 * self.slot_elements].view(-1, config.block_n)
            self.c = as_argument(rows, how_to_read(rows), config.block_m, product.part_n)
        act = (ACTIVATIONS.index(activation), int(bias is not None), 0)
        move = (config.comm_rows, int(comm > 0))
        options = (*act, int(self.one_shot), int(squared), *move)
        op = int(status.Op.GEMM_ALL_REDUCE)
        epilogue = tiles.push_partial if pushed else tiles.publish_partial
        consumer = {"after": None, "beside": tiles.reduce_groups, "inside": tiles.reduce_own_tiles}[config.placement]
        self.launches = [product.launch(op, world, epilogue, consumer, options, lag=1, ends=consumer is not None)]
        if consumer is None:
            self.launches.append(fused.consumer_launch(product, tiles.reduce_groups, options, world, heap.device))

    def arguments(
        self, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
    ) -> list[fused.Arguments]:
        """Arguments of each launch."""
        product = self.product
        x, y = product.operands(a, b)
        results = out if self.result is None else self.result
        extra = (self.partials, self.slot_elements, results, self.flags, self.squares, bias if bias is not None else out)
        gemm_arguments = (x, y, self.c, *self.fix_up, extra, self.context, product.problem, product.strides)
        return [gemm_arguments, (extra, self.context, product.problem)][: len(self.launches)]

"""`gemm_all_reduce`: the row-parallel product, summed over ranks, on every rank. The protocol is
`collectives.reduce_tiles`'s."""

from __future__ import annotations

from typing import Any

import torch

from pyrocshmem import status
from pyrocshmem.calls.operators import once
from pyrocshmem.calls.tensors import as_argument, how_to_read
from pyrocshmem.calls.workspace import Workspace
from pyrocshmem.collectives import reduce_tiles as tiles
from pyrocshmem.collectives.epilogue import PLAIN, Finish, activation_number
from pyrocshmem.elements import ELEMENTS
from pyrocshmem.stream_k.choice import completed, tilings, variants, verdicts
from pyrocshmem.stream_k.choice.config import BY_MESSAGE, Config
from pyrocshmem.stream_k.choice.placement import Placement
from pyrocshmem.stream_k.local_gemm.scales import Operand, scaling_of
from pyrocshmem.stream_k.ops import over_hosts
from pyrocshmem.stream_k.ops.by_message import MessagePlan
from pyrocshmem.stream_k.ops.gradients import (
    Gradients,
    bias_gradient,
    keep_sum,
    of_replicated,
)
from pyrocshmem.stream_k.ops.op import (
    NO_SCALES,
    Call,
    GemmOp,
    Request,
    call,
    consumer_launches,
    register_gemm,
)
from pyrocshmem.stream_k.ops.planned import ByRole, FusedPlan
from pyrocshmem.stream_k.ops.rows import RowsPlan
from pyrocshmem.stream_k.ops.summed_blocks import SummedBlocksPlan


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
    partial_dtype: torch.dtype | None = None,
    workspace: Workspace | None = None,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Any:
    """activation(sum over ranks of a @ b + bias) on every rank, the same bits on all of them and on every
    run.

    a: [M, K/R] or [.., M, K/R], whose dimensions the results have then, b: [K/R, N]: this rank's shares, any strides;
    float16, bfloat16 or float32. M and N are the same on all ranks, shares of K may differ. From call to call, at the
    same M and N, a share may change on some ranks alone, without a config as long as it stays the same multiple of 64
    when rounded, and where no tile is split: with split="none", or placement "copy_engine", "blas_blocks", "messages"
    or "unfused" (on H200 every default is one of these). Otherwise change it on all ranks in the same call: ranks
    compare a call that is new, and a rank that is alone with one ends in `PeerTimeout`.
    group: a ProcessGroup, a 1-D DeviceMesh, a Heap; None: the default process group. All its ranks call
    together, in the same order.
    out: [M, N]. None: a new tensor, the caller's own like any other. A contiguous tensor on the group's heap
    (the same one on every rank): peers write it directly, with no copy; it must not be read on another stream
    while a later call writes it. In placement "copy_engine" any tensor with contiguous rows needs no copy, in
    "blas_blocks" none does.
    bias: [N], of the operands' dtype or float32, added once, to the sum. activation: "none", "relu", "gelu" (exact),
    "silu". allow_tf32: as in `gemm`.
    squared_partials: also return fp32 [M, tiles_n]: for each tile column and row, the sum of the squares of the result
    before it is rounded. Not in placements "copy_engine", "blas_blocks", "messages" and "unfused".
    config: as `stream_k.choose` makes it; None: its choice. partial_dtype: what partial sums travel in where there is
    no config. None: the result's dtype, to which each rank's is rounded once; in float16 one beyond its range makes the
    sum infinite. torch.float32: the strict mode, at twice the bytes. More in `Config`. workspace: see `Workspace`.
    Has a gradient (`stream_k.ops.gradients`: a replicated result has a replicated gradient). Where one is needed,
    and where torch.compile traces the call, out, config and squared_partials are a ValueError.

    Inside a host partial sums go through the heap. Over several hosts each rank sends the sum of its host of 1 / L of
    the elements, L ranks a host, to the rank of its number on the other hosts, piece by piece beside the GEMM of the
    next rows: once of two hosts, else shares of it twice. `config` and `squared_partials` are a ValueError there.

    Returns out, or (out, squares). Nothing waits for the device: a peer's fault shows at the next call, or
    at `heap.synchronize()`. Raises TypeError, ValueError before any launch; `CallMismatch`, `PeerTimeout`,
    `PeerAborted`, `HeapOutOfMemory`, `WorkspaceBusy`.
    """
    scaling = scaling_of(scale_a, scale_b, out_dtype, use_fast_accum)
    request = Request(
        a, b, out, bias, activation, squared_partials, allow_tf32, config, partial_dtype, scaling=scaling
    )
    return call(OP, request, group, workspace)


def _make_plan(call: Call) -> FusedPlan:
    if call.config.placement in BY_MESSAGE:
        return MessagePlan(call, OP, call.config.algorithm)
    if call.config.placement == "blas_blocks":
        return SummedBlocksPlan(call, everywhere=True)
    return RowsPlan.of(call, everywhere=True) if call.config.placement == "copy_engine" else _Plan(call)


class _Plan(FusedPlan):
    def __init__(self, call: Call) -> None:
        config, heap, workspace = call.config, call.heap, call.workspace
        world = heap.world_size
        self.one_shot = config.algorithm == "one_shot"
        pushed = config.placement == "inside"
        dtype = call.wire
        product = call.product(stores_fp32=ELEMENTS[dtype].wide)
        self.product = product
        tile_elements = config.block_m * config.block_n
        num_tiles = product.schedule.num_tiles
        places = num_tiles
        if pushed:
            places = world * (num_tiles if self.one_shot else -(-num_tiles // world))
        self.partials, self.slot_elements = workspace.slots("partials", places * tile_elements, dtype)
        self.flags = workspace.flags(2 * num_tiles)
        # A result that nobody else writes can be the caller's tensor; so can one that peers reach.
        self.result: torch.Tensor | None = None
        if not call.direct and not (self.one_shot and call.out.is_contiguous()):
            # In a one-shot no peer writes it: off the heap, since only this rank may need it.
            size, name = product.M * product.N, "own results" if self.one_shot else "results"
            buffer = workspace.buffer(name, size, call.out.dtype, local=self.one_shot)
            self.result = buffer[:size].view(product.M, product.N)
        squares = product.schedule.tiles_n * product.M if call.request.squared_partials else 1
        self.squares = workspace.buffer("squares", squares, torch.float32)[:squares]
        self.workspace, self.context = workspace, workspace.context
        self.fix_up = product.fix_up(workspace)
        self.c: Any = self.partials
        if not pushed:
            rows = self.partials.view(-1, config.block_n)
            self.c = as_argument(rows, how_to_read(rows), config.block_m, product.part_n)
        activation = activation_number(call.request.activation)
        beside = config.placement == "beside"
        options = tiles.Options(
            activation, self.one_shot, call.request.squared_partials, config.comm_rows, beside
        )
        op = int(status.Op.GEMM_ALL_REDUCE)
        epilogue = tiles.push_partial if pushed else tiles.publish_partial
        consumer = {
            "after": None,
            "own_stream": None,
            "beside": tiles.reduce_groups,
            "inside": tiles.reduce_own_tiles,
        }[config.placement]
        announce = None if pushed else tiles.announce_partial
        gemm = product.launch(op, world, epilogue, options, announce=announce, consumer=consumer, lag=1)
        self.launches = ByRole(gemm)
        if consumer is None:
            apart = consumer_launches(product, op, tiles.reduce_groups, options, world, heap.device)
            self.launches = ByRole(gemm, *apart)

    def arguments(self, a: Operand, b: Operand, bias: torch.Tensor | None, out: torch.Tensor) -> ByRole:
        results, finish = (
            out if self.result is None else self.result,
            PLAIN if bias is None else Finish.of(bias),
        )
        extra = tiles.Sums(self.partials, self.slot_elements, results, self.flags, self.squares, finish)
        of_gemm = self.product.arguments(a, b, self.c, self.fix_up, extra, self.context)
        sizes = self.context, self.product.packed_problem
        return ByRole(of_gemm, sizes, (extra, *sizes))


@once
def _backward(ctx: Any, grad: torch.Tensor) -> Gradients:
    """Backward of `gemm_all_reduce`: every rank has the whole gradient, so nothing is sent."""
    a, b = ctx.saved_tensors
    grad_a, grad_b = of_replicated(ctx, a, b, grad)
    return grad_a, grad_b, None, bias_gradient(ctx, grad), None, None, None, *NO_SCALES


# In the order in which they are asked; those behind the first that suits any sizes are had by name.
_PLACEMENTS = (
    Placement("blas_blocks", verdicts.blocks_to_reduce, completed.own_rows_in_two),
    Placement("unfused", verdicts.short_sum_for_blas, completed.fewest_hops),
    Placement(
        "messages",
        verdicts.few_tiles_or_two_waves,
        completed.fewest_hops,
        tilings.sent,
        variants=variants.half_tiles,
    ),
    Placement(
        "copy_engine",
        verdicts.tall_blocks,
        completed.summed_row_blocks,
        variants=variants.of_several_waves(variants.summed_blocks),
        blocks=True,
    ),
    Placement(
        "own_stream",
        verdicts.on_sm_90,
        completed.beside,
        variants=variants.of_several_waves(variants.summed_beside),
    ),
    Placement(
        "beside",
        verdicts.otherwise,
        completed.summed_within,
        variants=variants.of_several_waves(variants.itself),
    ),
    Placement(
        "inside", verdicts.by_name, completed.summed_within, variants=variants.itself_or_both_algorithms
    ),
    Placement("after", verdicts.by_name, completed.summed_after, variants=variants.both_algorithms),
)

OP = register_gemm(
    GemmOp(
        name="gemm_all_reduce",
        package="stream_k",
        holds="M x K/R, K/R x N",
        result="the sum over ranks, M x N",
        command="all_reduce",
        steps="matmul, then all_reduce",
        reference="gemm_all_reduce",
        a_cut="K",
        b_cut="K",
        placements=_PLACEMENTS,
        plan=_make_plan,
        over_hosts=over_hosts.summed_everywhere,
        keep=keep_sum,
        backward=_backward,
    )
)

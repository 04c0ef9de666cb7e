"""The placements "messages" and "unfused": a whole GEMM, and a collective on its operand or result that costs
microseconds.

For products of a wave or less, decode steps above all, the latency of the collective is what counts: by messages
(`collectives.exchange_kernel`) it is one trip over the links, or two.

    all_gather_gemm        all ranks' rows of a, then the product
    gemm_reduce_scatter    the product, then its parts to their owners, who sum them
    gemm_all_reduce        the product, then all of it to everyone (one-shot), or parts to their owners and sums to
                           everyone (two-shot)
    gemm_all_scatter       the product, this rank's columns, to everyone

In "messages" products leave the GEMM tile by tile (`collectives.message_tiles`); in "unfused" they go to memory, and
the BLAS multiplies where it can (`stream_k.local_gemm.blas`). Partial products travel in `Config.wire_dtype`; bias
and activation are applied to their sum.
"""

from __future__ import annotations

import torch

from pyrocshmem.calls.workspace import Workspace
from pyrocshmem.collectives.epilogue import PLAIN, Finish, activation_number
from pyrocshmem.collectives.exchange import Exchange, sent_by_tiles
from pyrocshmem.collectives.exchange_kernel import AfterSum
from pyrocshmem.collectives.message_tiles import Options, Parts, send_tile
from pyrocshmem.message_slots import QUAD_BYTES
from pyrocshmem.stream_k.choice.config import Config
from pyrocshmem.stream_k.local_gemm.blas import BlasPlan
from pyrocshmem.stream_k.local_gemm.plan import Sent, plan_gemm
from pyrocshmem.stream_k.local_gemm.scales import Operand, Scheme, data_of, operands_of
from pyrocshmem.stream_k.ops.op import Call, GemmOp
from pyrocshmem.stream_k.ops.planned import FusedPlan, in_passing

# A product in memory is summed in about so many pieces, each of at least so many elements. All at once an op takes 3
# to 6% less time, and its slots twice the memory (2 x H200, products of two waves of tiles).
_PIECES, _PIECE = 4, 2 << 20


def piece_bytes(elements: int, dtype: torch.dtype) -> int:
    """What a piece takes of a slot, of a product in memory of so many elements."""
    return max(_PIECE, -(-elements // _PIECES)) * dtype.itemsize


class SentProduct:
    """A product a @ b whose elements go to other ranks by an exchange of `kind`, into results like `out`, with
    `after`. Its tiles send them where they can; otherwise, and unfused, the product goes to a buffer for the exchange.

    dtype: what travels. bias, activation: of the product, before it is sent. scheme: of 8-bit operands' scales.
    """

    def __init__(
        self,
        workspace: Workspace,
        op: int,
        kind: str,
        a: Operand,
        b: Operand,
        config: Config,
        allow_tf32: bool,
        dtype: torch.dtype,
        out: torch.Tensor,
        after: AfterSum,
        bias: torch.Tensor | None = None,
        activation: str = "none",
        sum_activation: str = "none",
        scheme: Scheme | None = None,
    ) -> None:
        x, shape = data_of(a), (len(data_of(a)), data_of(b).shape[1])
        world = workspace.world_size
        self.x = torch.empty(1, dtype=dtype, device=x.device).expand(shape)
        unfused = config.placement == "unfused"
        tiles = not unfused and sent_by_tiles(kind, self.x, out.dtype, world, after.by_rows)
        if not tiles:
            self.x = in_passing(workspace, shape[0] * shape[1], dtype).view(shape)
        in_pieces = kind in ("two_shot", "reduce_scatter") and not tiles
        self.exchange = Exchange(
            workspace,
            op,
            kind,
            self.x,
            out,
            after=after,
            tiles=tiles,
            piece_bytes=piece_bytes(self.x.numel(), dtype) if in_pieces else None,
            activation=activation_number(sum_activation),
        )
        self.place, sent = self.x, None
        if tiles:
            self.place = self.exchange.messages.view(dtype)
            unit = QUAD_BYTES // out.element_size()
            sent = Sent(
                send_tile,
                Options(activation_number(activation), world, unit),
                Parts,
                self.exchange.part_of_tiles(),
            )
        given = (a, b, config, allow_tf32, bias, activation, self.place, workspace, sent)
        self.gemm = plan_gemm(*given, scheme=scheme)

    def run(
        self, a: Operand, b: Operand, bias: torch.Tensor | None, out: torch.Tensor, after: AfterSum
    ) -> None:
        """Enqueue it for tensors of this kind; bias: the product's."""
        self.gemm.run(a, b, bias, self.place)
        self.exchange.run(self.x, out, after)


class MessagePlan(FusedPlan):
    """The plan of a GEMM and the exchange that follows it. kind: of the exchange (`collectives.exchange`)."""

    def __init__(self, call: Call, op: GemmOp, kind: str) -> None:
        config, request, workspace = call.config, call.request, call.workspace
        self.workspace = workspace
        self.sums = op.sums
        self.columns = call.out.shape[1]
        # Where nothing is summed, the GEMM's own epilogue finishes its tiles.
        self.after = AfterSum(PLAIN, self.columns) if self.sums else AfterSum()
        self.result = None
        written = call.out
        if not call.out.is_contiguous():
            size = call.out.numel()
            self.result = workspace.buffer("own results", size, call.out.dtype, local=True)[:size]
            self.result = written = self.result.view(call.out.shape)
        bias, activation = (None, "none") if self.sums else (request.bias, request.activation)
        self.sent = SentProduct(
            workspace,
            op.number,
            kind,
            *operands_of(call.a, call.b, request.scaling),
            config,
            request.allow_tf32,
            call.wire if self.sums else call.out.dtype,
            written,
            self._after(request.bias),
            bias,
            activation,
            request.activation if self.sums else "none",
            call.scheme,
        )
        if isinstance(self.sent.gemm, BlasPlan):
            self.blas = self.sent.gemm
        else:
            self.product = self.sent.gemm.product

    def _after(self, bias: torch.Tensor | None) -> AfterSum:
        if bias is None or not self.sums:
            return self.after
        return self.after._replace(finish=Finish.of(bias))

    def compile(self, a: Operand, b: Operand, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        """Nothing: both parts are compiled when they are planned."""

    def run(self, a: Operand, b: Operand, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        """Enqueue the call."""
        written = out if self.result is None else self.result
        self.sent.run(a, b, None if self.sums else bias, written, self._after(bias))

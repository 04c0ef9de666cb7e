"""The placement "messages": a whole GEMM, and a collective on its operand or result that costs microseconds.

For products of a wave or less, decode steps above all, there is nothing to overlap with: what counts is the latency of
the collective, and of messages (`collectives.exchange_kernel`) it is one trip of the links, or two.

    all_gather_gemm        all ranks' rows of a, then the product
    gemm_reduce_scatter    the partial product, then its parts, summed where they arrive
    gemm_all_reduce        the same, everything to everyone, or parts to their owners and sums to everyone
    gemm_all_scatter       the rank's columns, then everyone's

Partial products travel in `Config.partial_dtype`, fp32 unless set or where the result is fp32; bias and activation
follow their sum.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from collectives.exchange import Exchange, Finish
from pyrocshmem import status
from stream_k.config import Config
from stream_k.fused import Call
from stream_k.gemm import GemmPlan
from stream_k.plan import FusedPlan
from stream_k.workspace import Workspace

_KINDS = {
    "all_gather_gemm": (status.Op.ALL_GATHER_GEMM, "all_gather"),
    "gemm_reduce_scatter": (status.Op.GEMM_REDUCE_SCATTER, "reduce_scatter"),
    "gemm_all_reduce": (status.Op.GEMM_ALL_REDUCE, ""),
    "gemm_all_scatter": (status.Op.GEMM_ALL_SCATTER, "all_scatter"),
}


def partial_dtype(config: Config, out_dtype: torch.dtype) -> torch.dtype:
    """What partial products travel in. The exchange sends whole quads: a unit of fp32 results would be half a quad of
    16-bit parts."""
    return torch.float32 if out_dtype == torch.float32 else config.partial_dtype or torch.float32


def product_buffer(workspace: Workspace, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """Where a whole product waits for its exchange."""
    size = shape[0] * shape[1]
    return workspace.buffer("product", size, dtype, local=True)[:size].view(shape)


class MessagePlan(FusedPlan):
    """A GEMM before or after an exchange, for the op of that name."""

    def __init__(self, call: Call, name: str) -> None:
        op, kind = _KINDS[name]
        config, request, workspace = call.config, call.request, call.workspace
        self.workspace = workspace
        self.gathers, self.sums = (
            name == "all_gather_gemm",
            name in ("gemm_reduce_scatter", "gemm_all_reduce"),
        )
        self.finish = (
            Finish(columns=call.out.shape[1], activation=request.activation) if self.sums else Finish()
        )
        M, N = call.num_rows, call.b.shape[1]
        if self.gathers and M % call.heap.world_size != 0:
            raise ValueError(
                f"Config.placement is 'messages', for as many rows on each rank; a has {M} on {call.heap.world_size}"
            )
        self.result = None
        written = call.out
        if not self.gathers and not call.out.is_contiguous():
            size = call.out.numel()
            self.result = workspace.buffer("own results", size, call.out.dtype, local=True)[:size]
            self.result = written = self.result.view(call.out.shape)
        if self.gathers:
            size = M * call.a.shape[1]
            self.between = workspace.buffer("own gathered", size, call.a.dtype, local=True)[:size].view(M, -1)
            a, c, bias, activation = self.between, call.out, request.bias, request.activation
        else:
            dtype = partial_dtype(config, call.out.dtype) if self.sums else call.a.dtype
            self.between = product_buffer(workspace, (M, N), dtype)
            a, c = call.a, self.between
            bias, activation = (None, "none") if self.sums else (request.bias, request.activation)
        # A rank without columns only sends its rows.
        self.gemm = (
            GemmPlan(a, call.b, config, request.allow_tf32, bias, activation, c, workspace) if N > 0 else None
        )
        if self.gemm is not None:
            self.product = self.gemm.product
        if name == "gemm_all_reduce":
            kind = config.algorithm
        x, out = (call.a, self.between) if self.gathers else (self.between, written)
        self.exchange = Exchange(workspace, op, kind, x, out, finish=self._finish(request.bias))

    def _finish(self, bias: torch.Tensor | None) -> Finish:
        return replace(self.finish, bias=bias) if self.sums and bias is not None else self.finish

    def compile(self, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        """Both parts are compiled when they are planned."""

    def run(self, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        """Enqueue the call."""
        if self.gathers:
            self.exchange.run(a, self.between)
            if self.gemm is not None:
                self.gemm.run(self.between, b, bias, out)
            return
        assert self.gemm is not None
        self.gemm.run(a, b, None if self.sums else bias, self.between)
        written = out if self.result is None else self.result
        self.exchange.run(self.between, written, self._finish(bias))

    def second(self, a: torch.Tensor) -> torch.Tensor:
        """The gathered rows, as a new tensor."""
        return self.between[:, : a.shape[1]].clone()

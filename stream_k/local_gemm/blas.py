"""Products by the vendor's BLAS, through PyTorch: the GEMM of placement "unfused".

From 129 to some 1000 rows its tiles, whose heights need not be powers of two, are up to a third faster than ours
(docs/log.md).
"""

from __future__ import annotations

import torch

from pyrocshmem import target, trace
from pyrocshmem.calls import planning
from pyrocshmem.elements import ELEMENTS


class BlasPlan:
    """A product in the place of `stream_k.gemm.GemmPlan`, for operands of one kind: stored whole to results like
    `out`, which is contiguous, of their dtype or float32."""

    # The library's memory belongs to the stream that captures, and PyTorch gives one stream to several workspaces.
    replayable = False

    def __init__(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        # Once, so that the library and its kernels are loaded before any kernel of the op can wait.
        if planning.here.mode != "sizes":
            self.run(a, b, None, torch.empty_like(out))

    @staticmethod
    def can_run(a: torch.Tensor, out_dtype: torch.dtype, bias: torch.Tensor | None, activation: str) -> bool:
        """Whether it computes what `gemm` does, as accurately: the sum over K rounded once. A bias or an activation
        would follow that rounding; whether float32 goes through tf32 is a switch of the process; and fp32 results of
        16-bit operands are asked of NVIDIA's alone."""
        if bias is not None or activation != "none":
            return False
        if target.interpreted():
            return True
        return not ELEMENTS[a.dtype].tf32 and (out_dtype == a.dtype or target.backend() == "cuda")

    def run(self, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        """Enqueue a call on tensors of this kind; there is no bias."""
        trace.product(lambda: self._multiply(a, b, out))

    @staticmethod
    def _multiply(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        if out.device.type == "cpu":
            # PyTorch on a CPU has no fp32 results of 16-bit operands.
            out.copy_(a.float() @ b.float())
        elif out.dtype == a.dtype:
            torch.mm(a, b, out=out)
        else:
            torch.mm(a, b, out_dtype=out.dtype, out=out)

"""The products with RMSNorm as data, for the command line: see `collectives.problems`. M N K are global sizes.

The ops make their results, so there is no output that could be poisoned: each call's are looked at as they are.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from collectives.problems import EPS, Calls, Setting, Standalone
from reference import rms_norm as reference
from reference.accuracy import Accuracy, make_operand
from reference.ops import shard_range
from stream_k.fused_rms_norm import gemm_all_reduce_rms_norm, gemm_rms_norm_all_scatter


class _Product:
    """The whole operands, which the check needs and the shares are cut from, and the results of both providers."""

    def __init__(self, setting: Setting) -> None:
        M, N, K = setting.shape
        shapes = {"a": (M, K), "b": (K, N), "residual": (M, N), "weight": (N,)}
        self.a, self.b, self.residual, self.weight = (
            make_operand(shape, setting.dtype, setting.seed, 0, tag=tag, device=setting.heap.device)
            for tag, shape in shapes.items()
        )
        self.ours = self.theirs = self.none = self.a.new_empty(0)

    def check(self, residual: torch.Tensor | None) -> Accuracy:
        return reference.check_product(
            self.ours, self.a, self.b, residual, self.weight, EPS, baseline=self.theirs
        )


def _all_reduce(setting: Setting) -> Calls:
    whole, heap = _Product(setting), setting.heap
    part = slice(*shard_range(setting.shape[2], heap.rank, heap.world_size))
    more = (whole.b[part].contiguous(), whole.residual, whole.weight, EPS)
    a = whole.a[:, part].contiguous()

    def ours() -> None:
        whole.ours, _ = gemm_all_reduce_rms_norm(a, *more, group=heap)

    def theirs() -> None:
        whole.theirs, _ = reference.gemm_all_reduce_rms_norm(a, *more)

    return Calls(ours, whole.none, theirs, whole.none, lambda: whole.check(whole.residual))


def _all_scatter(setting: Setting) -> Calls:
    whole, heap = _Product(setting), setting.heap
    part = slice(*shard_range(setting.shape[1], heap.rank, heap.world_size))
    b, weight = whole.b[:, part].contiguous(), whole.weight[part].clone()

    def ours() -> None:
        whole.ours = gemm_rms_norm_all_scatter(whole.a, b, weight, EPS, group=heap)

    def theirs() -> None:
        whole.theirs = reference.gemm_rms_norm_all_gather(whole.a, b, weight, EPS)

    return Calls(ours, whole.none, theirs, whole.none, lambda: whole.check(None))


_BOUND = (
    "error of the reference + errors of the product, normalized + sqrt(N + 16) 2^-23 |result| + one rounding"
)
# Decoding: tokens of Llama-70B's down projection, or columns of its hidden size; a small product.
_ALL = (
    Standalone(
        "gemm_rms_norm",
        "matmul, all_reduce, add, rms_norm",
        "K/R columns of A and rows of B, the residual; the RMSNorm of the sum over ranks, and the sum",
        _BOUND,
        _all_reduce,
        (32, 8192, 28672),
        (4, 192, 640),
        "stream_k.gemm_all_reduce_rms_norm",
    ),
    Standalone(
        "gemm_rms_norm_all_scatter",
        "matmul, square, all_reduce of the sums, scale, all_gather of the columns",
        "A, N/R columns of B; the RMSNorm of all columns",
        _BOUND,
        _all_scatter,
        (32, 8192, 8192),
        (16, 192, 640),
        "stream_k.gemm_rms_norm_all_scatter",
        even=True,
    ),
)
NORMS: Mapping[str, Standalone] = {problem.collective: problem for problem in _ALL}

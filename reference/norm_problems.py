"""The ops that end with RMSNorm as data, for the command lines: operands, the reference's call, the check.

    op = NORMS["all_reduce_rms_norm"].make(Setting(rank, ranks, device, (M, N), dtype, seed))
    y = op.reference()                                     # this rank's result
    op.check(y, op.plain(), partial_roundings=ranks).ok    # against float64

Every rank makes the whole operands, which the check needs, and cuts its own from them. M N K are global sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch.nn import functional

from pyrocshmem.reference import rms_norm as reference
from pyrocshmem.reference.accuracy import Accuracy, make_operand
from pyrocshmem.shards import shard_range

EPS = 1e-6


@dataclass(frozen=True)
class Setting:
    """Which rank of how many, and on what it computes. shape: M, N; of a product M, N, K."""

    rank: int
    num_ranks: int
    device: torch.device
    shape: tuple[int, ...]
    dtype: torch.dtype
    seed: int

    def operand(self, shape: tuple[int, ...], tag: str, rank: int = 0) -> torch.Tensor:
        """Random, the same for the same arguments."""
        return make_operand(shape, self.dtype, self.seed, rank, tag=tag, device=self.device)

    def mine(self, size: int) -> slice:
        """This rank's of so many items."""
        return slice(*shard_range(size, self.rank, self.num_ranks))


class Op(Protocol):
    """One op with its operands."""

    def reference(self) -> torch.Tensor:
        """This rank's result, by torch.distributed."""

    def plain(self) -> torch.Tensor:
        """The same of the whole operands, without a collective."""

    def check(self, out: torch.Tensor, baseline: torch.Tensor, partial_roundings: int = 0) -> Accuracy:
        """Hold a result against float64, beside `baseline`. partial_roundings: of each rank's part of a sum, allowed
        where a library adds in the operands' dtype."""


class Columns:
    """`rms_norm` of x + residual [M, N], of which each rank has columns; the weights are fp32."""

    def __init__(self, setting: Setting, replicated: bool) -> None:
        M, N = setting.shape
        self.mine = setting.mine(N)
        whole = [setting.operand((M, N), tag) for tag in ("x", "residual")]
        self.weights = make_operand((N,), torch.float32, setting.seed, 0, tag="weight", device=setting.device)
        self.x, self.residual = (tensor[:, self.mine].contiguous() for tensor in whole)
        self.weight = self.weights[self.mine].contiguous()
        self.h = (whole[0].float() + whole[1].float()).to(setting.dtype)
        self.options = {"residual": self.residual, "hidden": N, "replicated": replicated}
        self.columns = slice(None) if replicated else self.mine

    def reference(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """`reference.rms_norm`."""
        return reference.rms_norm(self.x, self.weight, EPS, out=out, **self.options)[0]

    def plain(self) -> torch.Tensor:
        """PyTorch's norm of whole rows."""
        y = functional.rms_norm(self.h.float(), self.weights.shape, self.weights, EPS)
        return y[:, self.columns].to(self.h.dtype)

    def check(self, out: torch.Tensor, baseline: torch.Tensor, partial_roundings: int = 0) -> Accuracy:
        """Of the columns. Sums of squares are fp32: none of them is rounded."""
        return reference.check(out, self.h, self.weights, EPS, baseline, self.columns)


class Sum:
    """`all_reduce_rms_norm`: x [M, N] on each rank, a residual and a weight that all have."""

    def __init__(self, setting: Setting) -> None:
        self.parts = [setting.operand(setting.shape, "x", rank) for rank in range(setting.num_ranks)]
        self.x = self.parts[setting.rank]
        self.residual = setting.operand(setting.shape, "residual")
        self.weight = setting.operand(setting.shape[1:], "weight")

    def reference(self) -> torch.Tensor:
        """all_reduce, add, rms_norm."""
        return reference.all_reduce_rms_norm(self.x, self.residual, self.weight, EPS)[0]

    def plain(self) -> torch.Tensor:
        """PyTorch's sum and norm."""
        total = torch.stack([x.float() for x in (*self.parts, self.residual)]).sum(0).to(self.x.dtype)
        return functional.rms_norm(total, self.weight.shape, self.weight, EPS)

    def check(self, out: torch.Tensor, baseline: torch.Tensor, partial_roundings: int = 0) -> Accuracy:
        """Of the norm."""
        parts = torch.stack([x.double() for x in self.parts])
        sums, magnitude = parts.sum(0), parts.abs().sum(0)
        rounded = partial_roundings * torch.finfo(out.dtype).eps / 2 * magnitude
        more = (self.residual, self.weight, EPS, baseline)
        return reference.check_total(out, sums, magnitude, len(parts), *more, rounded=rounded)


class _Product:
    """The whole operands of a product with RMSNorm."""

    def __init__(self, setting: Setting) -> None:
        M, N, K = setting.shape
        shapes = {"a": (M, K), "b": (K, N), "residual": (M, N), "weight": (N,)}
        self.whole_a, self.whole_b, self.residual, self.whole_weight = (
            setting.operand(shape, tag) for tag, shape in shapes.items()
        )
        self.num_ranks = setting.num_ranks

    def normalized(self, total: torch.Tensor) -> torch.Tensor:
        """PyTorch's norm."""
        return functional.rms_norm(total, self.whole_weight.shape, self.whole_weight, EPS)


class RowProduct(_Product):
    """`gemm_all_reduce_rms_norm`: K/R columns of A and rows of B on each rank."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        part = setting.mine(setting.shape[2])
        a, b = self.whole_a[:, part].contiguous(), self.whole_b[part].contiguous()
        self.operands = (a, b, self.residual, self.whole_weight, EPS)

    def reference(self) -> torch.Tensor:
        """matmul, all_reduce, add, rms_norm."""
        return reference.gemm_all_reduce_rms_norm(*self.operands)[0]

    def plain(self) -> torch.Tensor:
        """The same on one device."""
        return self.normalized(torch.addmm(self.residual, self.whole_a, self.whole_b))

    def check(self, out: torch.Tensor, baseline: torch.Tensor, partial_roundings: int = 0) -> Accuracy:
        """Of the norm."""
        given = (self.whole_a, self.whole_b, self.residual, self.whole_weight, EPS, baseline)
        roundings = {"num_partials": self.num_ranks, "partial_roundings": partial_roundings}
        return reference.check_product(out, *given, **roundings)


class ColumnProduct(_Product):
    """`gemm_rms_norm_all_scatter`: N/R columns of B on each rank."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        part = setting.mine(setting.shape[1])
        self.operands = (
            self.whole_a, self.whole_b[:, part].contiguous(), self.whole_weight[part].clone(), EPS
        )  # fmt: skip

    def reference(self) -> torch.Tensor:
        """matmul, square, all_reduce of the sums, scale, all_gather of the columns."""
        return reference.gemm_rms_norm_all_gather(*self.operands)

    def plain(self) -> torch.Tensor:
        """The same on one device."""
        return self.normalized(self.whole_a @ self.whole_b)

    def check(self, out: torch.Tensor, baseline: torch.Tensor, partial_roundings: int = 0) -> Accuracy:
        """Of the norm. Products are whole: none of their parts is rounded."""
        return reference.check_product(
            out, self.whole_a, self.whole_b, None, self.whole_weight, EPS, baseline
        )


@dataclass(frozen=True)
class NormProblem:
    """steps: what the reference does; holds: what a rank brings and gets; bound: what the error is held to; in words.
    gpu_shape, cpu_shape: the sizes where none are asked for. sums: parts are added over ranks, which a library rounds.
    even: N must be a multiple of the ranks."""

    collective: str
    make: Callable[[Setting], Op]
    steps: str
    holds: str
    bound: str
    gpu_shape: tuple[int, ...]
    cpu_shape: tuple[int, ...]
    sums: bool = False
    even: bool = False


_STEPS = "add the residual, square, all_reduce of the sums, scale"
_BOUND = "error of the reference + sqrt(N + 16) 2^-23 |result| + one rounding"
_ALL = (
    NormProblem(
        "rms_norm",
        partial(Columns, replicated=False),
        _STEPS,
        "its columns of x and of the residual; its columns of the result",
        _BOUND,
        (8192, 8192),
        (64, 512),
    ),
    NormProblem(
        "rms_norm_replicated",
        partial(Columns, replicated=True),
        f"{_STEPS}, all_gather of the columns",
        "its columns of x and of the residual; all columns of the result",
        _BOUND,
        (8192, 8192),
        (64, 512),
    ),
    NormProblem(
        "all_reduce_rms_norm",
        Sum,
        "all_reduce, add, rms_norm",
        "x, the residual; the RMSNorm of the sum over ranks plus the residual",
        f"errors of the sum, normalized + {_BOUND}",
        (64, 8192),
        (16, 512),
        sums=True,
    ),
    # Decoding: tokens of Llama-70B's down projection, or columns of its hidden size; a small product.
    NormProblem(
        "gemm_rms_norm",
        RowProduct,
        "matmul, all_reduce, add, rms_norm",
        "K/R columns of A and rows of B, the residual; the RMSNorm of the sum over ranks, and the sum",
        f"errors of the product, normalized + {_BOUND}",
        (32, 8192, 28672),
        (4, 192, 640),
        sums=True,
    ),
    NormProblem(
        "gemm_rms_norm_all_scatter",
        ColumnProduct,
        "matmul, square, all_reduce of the sums, scale, all_gather of the columns",
        "A, N/R columns of B; the RMSNorm of all columns",
        f"errors of the product, normalized + {_BOUND}",
        (32, 8192, 8192),
        (16, 192, 640),
        even=True,
    ),
)
NORMS: Mapping[str, NormProblem] = {problem.collective: problem for problem in _ALL}

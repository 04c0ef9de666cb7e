"""The ops over ranks as data: what each rank holds, which reference computes it, what it must hold at the end.

    problem = find_problem("reduce_scatter")
    problem.default_shape(4, on_gpu=False)                     # M, N, K: global sizes
    problem.describe_share((M, N, K), 4)                       # in words
    rows, columns = problem.part((M, N, K), rank, 4)           # of A @ B: this rank's result

`reference.operands.Operands` makes a rank's tensors of a problem, calls the reference and checks a result. The command
lines, the benchmarks and the tests read this table, which is made of the registry of ops (`pyrocshmem.calls.op`).

C = A x B, M N K global sizes, R ranks. A cut is the letter of the size that is shared out among the ranks, by
`pyrocshmem.shards.shard_range`, or "" where every rank has the whole. Ops without a GEMM take x [M, N] of each rank;
of `rms_norm`, whose columns are cut, M N are the sizes of what all ranks bring together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from pyrocshmem import collectives, stream_k  # noqa: F401  whose ops are registered then
from pyrocshmem.calls.op import Op, registered
from pyrocshmem.shards import shard_range
from pyrocshmem.stream_k.ops.op import GemmOp

Shape = tuple[int, ...]  # M, N, and K where there is a GEMM

EPS = 1e-6
# Of a broadcast.
ROOT = 0


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What is known of one op. name, package, command, reference, steps: as the registry has them; op: the public
    function, which two problems may share. words: what a rank brings and gets; of a configured op, what it gets.

    gemm: whether A and B are multiplied; configured: whether the op takes a `stream_k.Config`. a_cut, b_cut, out_cut:
    the cuts of A, of B and of the result; b_cut is the local GEMM's, too; of ops without a GEMM it is the cut of x.
    joins: how the ranks' blocks make the result: "sum", "columns" (side by side), "rows" (one below the other), "root"
    (rank 0's), "meet" (there is none: a barrier), or "" (each rank's own). norm: RMSNorm at the end, of the "sum" plus
    a residual, or of rows whose "columns" lie on all ranks; "" where there is none.
    gpu_share, cpu_share: a rank's part of the sizes that are run when none are asked for. even: N must be a multiple of
    the ranks. sizes: arguments of the reference that are global sizes, by their letters; op_sizes: those of the op.
    scratch: scratch tensors of the reference, by the letters of their shapes, with R for the ranks and W for ceil(N/R).
    """

    name: str
    op: str
    package: str
    command: str
    reference: Callable[..., Any] | str
    steps: str
    words: str
    gemm: bool = False
    configured: bool = False
    a_cut: str = ""
    b_cut: str = ""
    out_cut: str = ""
    joins: str = ""
    norm: str = ""
    gpu_share: Shape
    cpu_share: Shape
    even: bool = False
    sizes: Mapping[str, str] = field(default_factory=dict)
    op_sizes: Mapping[str, str] = field(default_factory=dict)
    scratch: Mapping[str, str] = field(default_factory=dict)

    @property
    def letters(self) -> str:
        """Of its sizes."""
        return "MNK" if self.gemm else "MN"

    @property
    def sums(self) -> bool:
        """Whether the ranks' partial results are added."""
        return self.joins == "sum"

    @property
    def in_place(self) -> bool:
        """Whether torch.distributed leaves the result in what it is given."""
        return not self.gemm and not self.norm and not self.out_cut and self.joins in ("sum", "root")

    @property
    def moves(self) -> bool:
        """Whether values only move: a result is then right bit by bit."""
        return not self.gemm and not self.norm and not self.sums

    def local_shape(self, shape: Shape, num_ranks: int) -> Shape:
        """The largest sizes of a rank's own GEMM, or x."""
        return tuple(part.stop - part.start for part in self.slices(self.b_cut, shape, 0, num_ranks))

    def global_shape(self, local: Shape, num_ranks: int) -> Shape:
        """The sizes where every rank's own are `local`."""
        return tuple(
            size * (num_ranks if letter == self.b_cut else 1)
            for letter, size in zip(self.letters, local, strict=True)
        )

    def default_shape(self, num_ranks: int, on_gpu: bool) -> Shape:
        """Global sizes to run when none are asked for: a rank's work is the same for any number of ranks."""
        M, *rest = self.gpu_share if on_gpu else self.cpu_share
        if self.gemm and self.a_cut == "M":  # as many rows on every rank: then they come by messages
            M -= M % num_ranks
        return self.global_shape((M, *rest), num_ranks)

    def even_shape(self, shape: Shape, num_ranks: int) -> Shape:
        """`shape` with as many columns as make the ranks' shares of B equal, where it is cut so: our ops want that."""
        M, N, *K = shape
        return (M, -(-N // num_ranks) * num_ranks, *K) if self.gemm and self.b_cut == "N" else shape

    def check_sizes(self, shape: Shape, num_ranks: int, least: int = 1) -> None:
        """ValueError for sizes that this many ranks can't run."""
        if min(shape) < least:
            raise ValueError(f"shape is {shape}, allowed sizes of {least} or more")
        if self.even and shape[1] % num_ranks != 0:
            raise ValueError(f"N is {shape[1]}, a multiple of the {num_ranks} ranks is needed")

    def check_dtype(self, dtype: torch.dtype) -> None:
        """ValueError for integers, unless they are moved or added and nothing else."""
        if not dtype.is_floating_point and (self.gemm or self.norm or self.joins == "meet"):
            raise ValueError(
                f"dtype is {dtype}, which is for a collective alone, with --shape M,N, not {self.name}"
            )

    def describe_share(self, shape: Shape, num_ranks: int) -> str:
        """What rank 0 brings and what it holds at the end, in words."""
        if not self.configured:
            return self.words
        a, b, out = (
            [part.stop - part.start for part in self.slices(cut, shape, 0, num_ranks)]
            for cut in (self.a_cut, self.b_cut, self.out_cut)
        )
        return f"A {a[0]} x {a[2]}, B {b[2]} x {b[1]}; result {out[0]} x {out[1]}, {self.words}"

    def describe_bound(self, dtype: torch.dtype, partials: str = "") -> str:
        """What the error of a result of `dtype` is held to, in words. partials: how those of a sum over ranks are
        rounded, "" where they are not."""
        if self.moves:
            return "none: the values are moved, not computed"
        if not dtype.is_floating_point:
            return "none: integers are added"
        terms = "sqrt(K) 2^-23 |A| @ |B|" if self.gemm else "sqrt(R) 2^-23 sum |x|" if self.sums else ""
        if self.norm:
            before = "errors of the GEMM, normalized + " if self.gemm else "errors of the sum, normalized + "
            terms = (before if terms else "") + "sqrt(N + 16) 2^-23 |result|"
        return f"{partials or 'rounding error of the exact result'} + {terms} + one rounding"

    def link_bytes(self, M: int, N: int, K: int, num_ranks: int, itemsize: int) -> float:
        """Bytes that each rank must send at least, without multicast. M, N, K of a rank's own GEMM, or x."""
        others = num_ranks - 1.0
        share = others / num_ranks
        # Sums of squares are fp32, one a row.
        found = others * M * 4 / itemsize if self.norm == "columns" else 0.0
        if self.a_cut == "M":
            found += share * M * K
        elif self.joins == "sum":
            found += share * M * N * (1 if self.out_cut == "M" else 2)
        elif self.joins in ("rows", "columns") and not self.out_cut:
            found += others * M * N
        elif self.joins == "root":
            # The others pass it on.
            found += float(num_ranks > 1) * M * N
        return itemsize * found

    def shares(
        self, a: torch.Tensor, b: torch.Tensor, rank: int, num_ranks: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What `rank` has of a [M, K] and b [K, N], as views."""
        shape = (a.shape[0], b.shape[1], a.shape[1])
        rows, _, a_depth = self.slices(self.a_cut, shape, rank, num_ranks)
        _, columns, b_depth = self.slices(self.b_cut, shape, rank, num_ranks)
        return a[rows, a_depth], b[b_depth, columns]

    def op_arguments(self, shape: Shape) -> dict[str, int]:
        """The global sizes that the op itself is told."""
        return {name: shape["MNK".index(letter)] for name, letter in self.op_sizes.items()}

    def part(self, shape: Shape, rank: int, num_ranks: int) -> tuple[slice, slice]:
        """The rows and columns of the whole result, M x N, that `rank` holds at the end."""
        rows, columns, *_ = self.slices(self.out_cut, shape, rank, num_ranks)
        return rows, columns

    def result_shape(self, shape: Shape, rank: int, num_ranks: int) -> tuple[int, int]:
        """Rows and columns of this rank's result."""
        M, N = (part.stop - part.start for part in self.part(shape, rank, num_ranks))
        if self.joins == "meet":
            return 1, num_ranks
        stacked = not self.b_cut  # where x is whole, the blocks of all ranks are more than it
        if self.joins == "rows":
            return M * num_ranks, N
        return M, N * (num_ranks if self.joins == "columns" and stacked else 1)

    def slices(self, cut: str, shape: Shape, rank: int, num_ranks: int) -> tuple[slice, ...]:
        """Of M, N (and K): all of them but the one with the letter `cut`, of which `rank` has its share."""
        return tuple(
            slice(*shard_range(size, rank, num_ranks)) if letter == cut else slice(0, size)
            for letter, size in zip(self.letters, shape, strict=True)
        )


# Sizes of a rank's GEMM whose tiles Stream-K splits, in every op (tests/scripts/test_default_shapes.py). On GPUs few
# rows of a layer of hidden size 2048: 32 tiles on the 132 SMs of an H100 or H200. On a CPU small: three tiles of 32
# K-iterations on the six programs of the CPU target.
_GPU_SHARE = (32, 2048, 5120)
_CPU_SHARE = (64, 192, 2048)

# What references of GEMMs are given besides A, B and the result: sizes, and scratch.
_SIZES = {"all_gather_gemm": {"num_rows": "M"}, "gemm_all_gather": {"num_columns": "N"}}
_SCRATCH = {
    "all_gather_gemm": {"gathered": "MK"},
    "gemm_all_gather": {"block": "MW", "gathered": "RMW"},
    "gemm_reduce_scatter": {"partial": "MN"},
}

# What the registry does not say of ops that a caller can't configure, by their names.
_X: dict[str, Any] = {"gpu_share": (4096, 8192), "cpu_share": (64, 512)}
# 8192 columns on 8 GPUs.
_X_COLUMNS: dict[str, Any] = {
    "b_cut": "N", "joins": "columns", "norm": "columns", "gpu_share": (8192, 1024), "cpu_share": (64, 128)
}  # fmt: skip
_NORM_STEPS = "add the residual, square, all_reduce of the sums, scale"
_MORE: Mapping[str, dict[str, Any]] = {
    "all_gather": _X | {"joins": "rows"},
    "all_reduce": _X | {"joins": "sum"},
    "all_scatter": _X | {"joins": "columns", "scratch": {"gathered": "RMN"}},
    "reduce_scatter": _X | {"joins": "sum", "out_cut": "M"},
    "broadcast": _X | {"joins": "root"},
    # Of a word for each rank, which says whether what that rank did before is seen.
    "barrier": {"b_cut": "N", "joins": "meet", "gpu_share": (1, 1), "cpu_share": (1, 1)},
    "rms_norm": _X_COLUMNS
    | {
        "out_cut": "N",
        "steps": _NORM_STEPS,
        "words": "its columns of x and of the residual; its columns of the result",
    },
    "all_reduce_rms_norm": {"joins": "sum", "norm": "sum", "gpu_share": (64, 8192), "cpu_share": (16, 512)},
    # Decoding: tokens of Llama-70B's down projection, or columns of its hidden size, on 8 GPUs; a small GEMM.
    "gemm_all_reduce_rms_norm": {
        "gemm": True, "a_cut": "K", "b_cut": "K", "joins": "sum", "norm": "sum",
        "gpu_share": (32, 8192, 3584), "cpu_share": (4, 192, 160),
    },
    "gemm_rms_norm_all_scatter": {
        "gemm": True, "b_cut": "N", "joins": "columns", "norm": "columns", "even": True,
        "gpu_share": (32, 1024, 8192), "cpu_share": (16, 48, 640),
    },
}  # fmt: skip


def problem_of(op: Op) -> Problem:
    """What an op that is registered computes. ValueError for one that this module can't tell it of: an op without a
    GEMM from outside the library."""
    common: dict[str, Any] = {"name": op.name, "op": op.name, "package": op.package, "command": op.command}
    common |= {"reference": op.reference, "steps": op.steps}
    if not isinstance(op, GemmOp):
        if op.name not in _MORE:
            raise ValueError(f"{op.name} has no problem: it is no GemmOp, and {__name__} does not know it")
        return Problem(**common | {"words": f"{op.holds}; {op.result}"} | _MORE[op.name])
    name = op.reference if isinstance(op.reference, str) else ""
    return Problem(
        **common,
        gemm=True,
        configured=True,
        a_cut=op.a_cut,
        b_cut=op.b_cut,
        out_cut=op.out_cut,
        joins="sum" if op.sums else "columns" if op.b_cut == "N" and op.is_replicated else "",
        words=op.result.rpartition(", ")[0] or op.result,
        gpu_share=_GPU_SHARE,
        cpu_share=_CPU_SHARE,
        sizes=_SIZES.get(name, {}),
        op_sizes={"num_rows": "M"} if op.a_cut == "M" else {},
        scratch=_SCRATCH.get(name, {}),
    )


def _all() -> Iterator[Problem]:
    """Those of the library; first the GEMMs that a caller may configure, which have namesakes without a GEMM."""
    for op in sorted(registered(), key=lambda op: not isinstance(op, GemmOp)):
        if op.package not in ("collectives", "stream_k"):
            continue
        problem = problem_of(op)
        yield problem
        if op.name == "rms_norm":
            words = "its columns of x and of the residual; all columns of the result"
            steps = f"{_NORM_STEPS}, all_gather of the columns"
            name = "rms_norm_replicated"
            yield replace(problem, name=name, command=name, out_cut="", words=words, steps=steps)


ALL = tuple(_all())
BY_NAME: Mapping[str, Problem] = {problem.name: problem for problem in ALL}
# The GEMMs that a caller may configure, by their names on the command lines.
PROBLEMS: Mapping[str, Problem] = {each.command: each for each in ALL if each.configured and each.command}
COMMANDS = tuple(dict.fromkeys(problem.command for problem in ALL if problem.command))


def find_problem(command: str, num_sizes: int | None = None) -> Problem:
    """The problem of that name on the command lines; ValueError with the names there are for any other.

    num_sizes: some have a namesake without a GEMM, which two sizes mean. A problem of that name is also found where
    none has as many sizes.
    """
    found = [problem for problem in ALL if command and problem.command == command]
    if not found:
        raise ValueError(f"collective is {command!r}, allowed {', '.join(COMMANDS)}")
    return next((problem for problem in found if len(problem.letters) == num_sizes), found[0])

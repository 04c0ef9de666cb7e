"""The ops over ranks as data: what each rank holds of A, B and C, and which reference computes it.

    problem = find_problem("reduce_scatter")
    a_share, b_share = problem.shares(a, b, rank, num_ranks)      # views of the whole A and B
    call, out = problem.prepare(a_share, b_share, (M, N, K), rank, num_ranks)
    call()                                                        # out is now part of A @ B:
    rows, columns = problem.part((M, N, K), rank, num_ranks)      # check(out, a[rows], b[:, columns], ...)

C = A x B, M N K global sizes, R ranks. A cut is the letter of the size that is shared out among the ranks, by
`ops.shard_range`, or "" where every rank has the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from pyrocshmem.reference import ops

Shape = tuple[int, int, int]

# Sizes of a rank's product whose tiles Stream-K splits, in every op (tests/scripts/test_default_shapes.py). Few rows of
# a layer of hidden size 5120: 80 tiles on the 132 SMs of an H100 or H200.
_GPU_SHAPE = (64, 5120, 5120)
# Small: three tiles of 32 K-iterations on the six programs of the CPU target.
_CPU_SHAPE = (64, 192, 2048)


@dataclass(frozen=True)
class Problem:
    """One op. M N K are always the global sizes.

    collective: the name on the command lines. op: of the function in `stream_k`. reference: the function of
    `reference.ops`; steps: what it does. a_cut, b_cut, out_cut: the cuts of A, of B and of the result; b_cut is
    the local product's, too. result: what a rank has at the end, in words.
    sizes: arguments of `reference` that are global sizes, by their letters; op_sizes: those of the op. scratch:
    scratch tensors of `reference`, by the letters of their shapes, with R for the ranks and W for ceil(N/R).
    """

    collective: str
    op: str
    reference: Callable[..., torch.Tensor]
    steps: str
    a_cut: str
    b_cut: str
    out_cut: str
    result: str
    sizes: Mapping[str, str] = field(default_factory=dict)
    op_sizes: Mapping[str, str] = field(default_factory=dict)
    scratch: Mapping[str, str] = field(default_factory=dict)

    @property
    def sums(self) -> bool:
        """Whether partial products are added over ranks."""
        return self.b_cut == "K"

    def local_shape(self, shape: Shape, num_ranks: int) -> Shape:
        """(M, N, K) of the largest product of a rank."""
        return self._held(self.b_cut, shape, num_ranks)

    def default_shape(self, num_ranks: int, on_gpu: bool) -> Shape:
        """Global sizes to run when none are asked for: a rank's work is the same for any number of ranks."""
        base = dict(zip("MNK", _GPU_SHAPE if on_gpu else _CPU_SHAPE, strict=True))
        base[self.b_cut] *= num_ranks
        if self.a_cut == "M":  # as many rows on every rank: then they come by messages
            base["M"] -= base["M"] % num_ranks
        return base["M"], base["N"], base["K"]

    def describe_share(self, shape: Shape, num_ranks: int) -> str:
        """What rank 0 multiplies and what it holds at the end, in words."""
        a_rows, _, a_depth = self._held(self.a_cut, shape, num_ranks)
        _, b_columns, b_depth = self._held(self.b_cut, shape, num_ranks)
        rows, columns, _ = self._held(self.out_cut, shape, num_ranks)
        return f"A {a_rows} x {a_depth}, B {b_depth} x {b_columns}; result {rows} x {columns}, {self.result}"

    def shares(
        self, a: torch.Tensor, b: torch.Tensor, rank: int, num_ranks: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What `rank` has of a [M, K] and b [K, N], as views."""
        shape = (a.shape[0], b.shape[1], a.shape[1])
        rows, _, a_depth = _slices(self.a_cut, shape, rank, num_ranks)
        _, columns, b_depth = _slices(self.b_cut, shape, rank, num_ranks)
        return a[rows, a_depth], b[b_depth, columns]

    def op_arguments(self, shape: Shape) -> dict[str, int]:
        """The global sizes that the op itself is told."""
        return {name: shape["MNK".index(letter)] for name, letter in self.op_sizes.items()}

    def part(self, shape: Shape, rank: int, num_ranks: int) -> tuple[slice, slice]:
        """The rows and columns of C that `rank` holds at the end."""
        return _slices(self.out_cut, shape, rank, num_ranks)[:2]

    def prepare(
        self, a_share: torch.Tensor, b_share: torch.Tensor, shape: Shape, rank: int, num_ranks: int
    ) -> tuple[Callable[[], torch.Tensor], torch.Tensor]:
        """The reference's call on this rank of the default process group, and the buffer that it writes.

        The call allocates nothing, but where rows don't divide by the ranks.
        """
        lengths = dict(zip("MNK", shape, strict=True))
        lengths |= {"R": num_ranks, "W": -(-shape[1] // num_ranks)}
        rows, columns = self.part(shape, rank, num_ranks)
        out = a_share.new_empty(rows.stop - rows.start, columns.stop - columns.start)
        more = {name: lengths[letter] for name, letter in self.sizes.items()}
        scratch = {
            name: a_share.new_empty([lengths[letter] for letter in letters])
            for name, letters in self.scratch.items()
        }
        return lambda: self.reference(a_share, b_share, out=out, **more, **scratch), out

    @staticmethod
    def _held(cut: str, shape: Shape, num_ranks: int) -> Shape:
        """(M, N, K) of what rank 0, whose shares are the longest, has of something with this cut."""
        M, N, K = (part.stop - part.start for part in _slices(cut, shape, 0, num_ranks))
        return M, N, K


def _slices(cut: str, shape: Shape, rank: int, num_ranks: int) -> tuple[slice, slice, slice]:
    """Of M, N and K: all of them but the one with the letter `cut`, of which `rank` has its share."""
    M, N, K = (
        slice(*ops.shard_range(size, rank, num_ranks)) if letter == cut else slice(0, size)
        for letter, size in zip("MNK", shape, strict=True)
    )
    return M, N, K


_ALL = (
    Problem(
        "all_gather",
        "all_gather_gemm",
        ops.all_gather_gemm,
        "all_gather, then matmul",
        a_cut="M",
        b_cut="N",
        out_cut="N",
        result="its own columns",
        sizes={"num_rows": "M"},
        op_sizes={"num_rows": "M"},
        scratch={"gathered": "MK"},
    ),
    Problem(
        "all_reduce",
        "gemm_all_reduce",
        ops.gemm_all_reduce,
        "matmul, then all_reduce",
        a_cut="K",
        b_cut="K",
        out_cut="",
        result="the sum over ranks",
    ),
    Problem(
        "all_scatter",
        "gemm_all_scatter",
        ops.gemm_all_gather,
        "matmul, then all_gather of the column blocks",
        a_cut="",
        b_cut="N",
        out_cut="",
        result="the columns of all ranks",
        sizes={"num_columns": "N"},
        scratch={"block": "MW", "gathered": "RMW"},
    ),
    Problem(
        "reduce_scatter",
        "gemm_reduce_scatter",
        ops.gemm_reduce_scatter,
        "matmul, then reduce_scatter",
        a_cut="K",
        b_cut="K",
        out_cut="M",
        result="its own rows of the sum over ranks",
        scratch={"partial": "MN"},
    ),
)
PROBLEMS: Mapping[str, Problem] = {problem.collective: problem for problem in _ALL}


def find_problem(collective: str) -> Problem:
    """The problem of that name; ValueError with the names there are for any other."""
    if collective not in PROBLEMS:
        raise ValueError(f"collective is {collective!r}, allowed {', '.join(PROBLEMS)}")
    return PROBLEMS[collective]

"""What the ranks of the fused ops' tests run: cases, their operands, and how a result is judged.

Bodies return a list with one `Verdict` a call; the test's own process compares the ranks' bits.
"""

import dataclasses
import hashlib
from typing import Any

import torch

from pyrocshmem import Heap, stream_k
from pyrocshmem.calls.workspace import Workspace
from pyrocshmem.reference.accuracy import make_operand
from pyrocshmem.reference.problems import PROBLEMS, Problem
from pyrocshmem.stream_k.choice.placement import placement_names
from tests.stream_k.products import ACTIVATIONS, Frame, check_product, device, laid_out, small_config

HEAP_BYTES = 32 << 20
MIXED_LAYOUTS = ("row", "transposed", "misaligned")
STRIDE_0 = ("one row", "one column")
_CANARY = 77.0


@dataclasses.dataclass(frozen=True)
class Case:
    """A call. op: a name of reference.problems. M N K are global sizes, but N is the columns of one rank for
    "all_scatter" and "all_gather".

    out: "new", "ordinary", "strided" or "symmetric". bias: None, "own" (dtype) or "fp32". config: changes to
    small_config. layout: how both operands lie: "view" of the full ones, a name of products.LAYOUTS (those of
    STRIDE_0 are views of full ones whose rows, or columns, are all the same), or "mixed": another on every rank.
    """

    op: str
    M: int
    N: int
    K: int
    dtype: torch.dtype
    out: str = "new"
    bias: str | None = None
    activation: str = "none"
    squares: bool = False
    config: tuple[tuple[str, Any], ...] = ()
    layout: str = "view"

    @property
    def problem(self) -> Problem:
        return PROBLEMS[self.op]

    def with_config(self, **changes: Any) -> "Case":
        return dataclasses.replace(self, config=tuple({**dict(self.config), **changes}.items()))

    def small_config(self) -> stream_k.Config:
        return small_config(**{"placement": placement_names(self.problem.op)[-1], **dict(self.config)})

    def wire(self, world_size: int) -> torch.dtype | None:
        """What partial sums travel in; None: there are none."""
        if not self.problem.sums or world_size == 1:
            return None
        return self.small_config().wire_dtype(self.dtype)

    def columns(self, world_size: int) -> int:
        """Of the full product."""
        return self.N * (world_size if self.problem.b_cut == "N" else 1)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """error: empty when the call was right. digest: of the result's bits."""

    case: Case
    error: str
    digest: str


class Operands:
    """The full product, the share of `rank`, which rows and columns of the product are its result, and the global
    sizes that the op asks for."""

    def __init__(self, case: Case, rank: int, world_size: int, seed: int) -> None:
        def make(shape: tuple[int, ...], tag: str, dtype: torch.dtype = case.dtype) -> torch.Tensor:
            return make_operand(shape, dtype, seed, 0, tag=tag, device="cpu").to(device())

        columns = case.columns(world_size)
        self.full_a, self.full_b = make((case.M, case.K), "a"), make((case.K, columns), "b")
        if case.layout in STRIDE_0:
            self.full_a, self.full_b = (laid_out(x, case.layout) for x in (self.full_a, self.full_b))
        self.full_bias = None
        if case.bias is not None:
            self.full_bias = make((columns,), "bias", torch.float32 if case.bias == "fp32" else case.dtype)
        # Views: columns of A don't lie together, and their addresses are not aligned.
        self.a, self.b = case.problem.shares(self.full_a, self.full_b, rank, world_size)
        if case.layout not in ("view", *STRIDE_0):
            layout = MIXED_LAYOUTS[rank % len(MIXED_LAYOUTS)] if case.layout == "mixed" else case.layout
            self.a, self.b = laid_out(self.a, layout), laid_out(self.b, layout)
        self.bias = self.full_bias
        if self.full_bias is not None and case.problem.b_cut == "N":
            self.bias = self.full_bias[rank * case.N : (rank + 1) * case.N].clone()
        whole = (case.M, columns, case.K)
        self.part, self.sizes = case.problem.part(whole, rank, world_size), case.problem.op_arguments(whole)

    @property
    def shape(self) -> tuple[int, int]:
        """Of the result."""
        rows, columns = self.part
        return rows.stop - rows.start, columns.stop - columns.start

    def factors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Rows of A, columns of B, and their bias, that the result is the product of."""
        rows, columns = self.part
        return (
            self.full_a[rows],
            self.full_b[:, columns],
            None if self.full_bias is None else self.full_bias[columns],
        )


class SymmetricFrame:
    """A contiguous output on the heap between canaries, as `products.Frame`. most_rows: of all ranks, whose
    allocations must be equal."""

    def __init__(self, heap: Heap, rows: int, columns: int, dtype: torch.dtype, most_rows: int) -> None:
        self.heap = heap
        self.buffer = heap.full((32 + most_rows * columns,), _CANARY, dtype=dtype)
        self.out = self.buffer[16 : 16 + rows * columns].view(rows, columns)
        self.out.fill_(float("nan"))

    def check(self) -> None:
        assert (self.buffer[:16] == _CANARY).all()
        assert (self.buffer[16 + self.out.numel() :] == _CANARY).all()


def digest(x: torch.Tensor) -> str:
    return hashlib.sha256(x.contiguous().cpu().view(torch.uint8).numpy().tobytes()).hexdigest()


def call(
    case: Case,
    heap: Heap,
    operands: Operands,
    out: torch.Tensor | None = None,
    workspace: Workspace | None = None,
) -> Any:
    """The case's op on this rank's share."""
    # The ops that return them have the argument.
    squares = {"squared_partials": True} if case.squares else {}
    return getattr(stream_k, case.problem.op)(
        operands.a,
        operands.b,
        group=heap,
        out=out,
        bias=operands.bias,
        activation=case.activation,
        config=case.small_config(),
        workspace=workspace,
        **squares,
        **operands.sizes,
    )


def judge(case: Case, operands: Operands, out: torch.Tensor, world_size: int) -> None:
    """AssertionError unless the result keeps its bound, against its part of the full product in float64."""
    check_product(out, *operands.factors(), case.activation, wire=case.wire(world_size), num_ranks=world_size)


def judge_squares(case: Case, operands: Operands, squares: torch.Tensor, world_size: int) -> None:
    """AssertionError unless each tile has the sum of its rows' squares, of the unrounded result."""
    bias = 0.0 if operands.full_bias is None else operands.full_bias.double()
    result = ACTIVATIONS[case.activation](operands.full_a.double() @ operands.full_b.double() + bias)
    width = case.small_config().block_n
    blocks = world_size if case.op == "all_scatter" else 1
    expected = [
        tile.square().sum(1)
        for block in range(blocks)
        for tile in result[:, block * case.N : (block + 1) * case.N].split(width, dim=1)
        if case.N > 0
    ]
    assert squares.dtype == torch.float32
    assert squares.shape == (case.M, len(expected))
    if expected:
        torch.testing.assert_close(squares.double(), torch.stack(expected, dim=1), rtol=1e-4, atol=1e-6)


def run_case(case: Case, heap: Heap, seed: int, workspace: Workspace | None = None) -> Verdict:
    """Make the call into a poisoned output, judge it, look at the canaries."""
    world_size = heap.world_size
    operands = Operands(case, heap.rank, world_size, seed)
    rows, columns = operands.shape
    frame: Any = None
    if case.out == "symmetric":
        most_rows = -(-case.M // world_size) if case.problem.out_cut == "M" else rows
        frame = SymmetricFrame(heap, rows, columns, case.dtype, most_rows)
    elif case.out != "new":
        frame = Frame(rows, columns, case.dtype, {"ordinary": "row"}.get(case.out, case.out))
    else:
        # An allocator gives the memory that was freed last: what the op doesn't write is then NaN.
        torch.full((rows, columns), float("nan"), dtype=case.dtype, device=device())
    given = None if frame is None else frame.out
    found = call(case, heap, operands, given, workspace)
    value, squares = found if case.squares else (found, None)
    heap.synchronize()
    error = ""
    try:
        assert given is None or value is given
        judge(case, operands, value, world_size)
        if squares is not None:
            judge_squares(case, operands, squares, world_size)
        if frame is not None:
            frame.check()
    except AssertionError as wrong:
        error = f"{case} (seed {seed}): {wrong}"
    verdict = Verdict(case, error, digest(value))
    if case.out == "symmetric":
        heap.free(frame.buffer)
    return verdict


def run_cases(rank: int, world_size: int, cases: list[Case]) -> list[Verdict]:
    """A body: all cases on one heap, one after another."""
    with Heap(HEAP_BYTES) as heap:
        return [run_case(case, heap, seed) for seed, case in enumerate(cases)]


def repeat(rank: int, world_size: int, cases: list[Case], calls: int) -> list[Verdict]:
    """A body: two sets of data in turn, `calls` times, with the cases interleaved on one workspace."""
    with Heap(HEAP_BYTES) as heap:
        return [run_case(case, heap, number % 2) for number in range(calls) for case in cases]


def assert_right(verdicts_of_ranks: list[list[Verdict]]) -> None:
    """Every call right on every rank; where every rank has the whole result, it is the same, bit by bit."""
    errors = [
        f"rank {rank}: {verdict.error}"
        for rank, verdicts in enumerate(verdicts_of_ranks)
        for verdict in verdicts
        if verdict.error
    ]
    assert not errors, "\n".join(errors)
    for number, verdict in enumerate(verdicts_of_ranks[0]):
        bits = {verdicts[number].digest for verdicts in verdicts_of_ranks}
        assert verdict.case.problem.out_cut or len(bits) == 1, f"{verdict.case}: the ranks' results differ"


def assert_same_bits(verdicts: list[Verdict], num_cases: int) -> None:
    """What `repeat` returned for a rank: each set of data has given one result, and the two sets different ones."""
    wrong = []
    for number in range(num_cases):
        bits = [verdict.digest for verdict in verdicts[number::num_cases]]
        found = len(set(bits[::2])), len(set(bits[1::2])), len(set(bits))
        if found != (1, 1, 2):
            wrong.append(f"{verdicts[number].case}: {found} results of the even calls, the odd ones, and all")
    assert not wrong, "\n".join(wrong)

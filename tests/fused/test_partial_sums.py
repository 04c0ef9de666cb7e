"""What becomes of partial sums between ranks, in every placement: each is rounded once to what it travels in, the
owner's like the others', all are added in fp32, and the sum is rounded once.

Most tests use integers whose partial sums fp32 holds exactly and 16 bits do not. Their sums are then the same in
whatever order fp32 adds, so that every bit of a result is known, whoever multiplied and added. On the CPU target ops
compute in fp32 what is bfloat16, its partial sums included: there that dtype has the bits of the strict mode.
"""

import dataclasses
import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pyrocshmem import CallMismatch, Heap  # before Triton

import triton  # isort: skip
import triton.language as tl  # isort: skip

from pyrocshmem import stream_k
from pyrocshmem.collectives import row_blocks
from pyrocshmem.elements import ELEMENTS
from pyrocshmem.reference import ops as reference
from pyrocshmem.reference.accuracy import check, make_operand, root_mean_square, sum_of_partials
from pyrocshmem.shards import shard_range
from pyrocshmem.stream_k.choice.placement import placement_names
from tests.fused.cases import HEAP_BYTES
from tests.ranks import run_ranks, values
from tests.stream_k.products import device, small_config

TIER = 3
TIMEOUT_S = 110.0
FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
EPS = 1e-5
# Of a rank's K.
DEPTH = 48
# By how much an error may exceed that of a library that rounds after each addition, in root mean square.
MOST = 1.02


@dataclasses.dataclass(frozen=True)
class Way:
    """An op that sums over ranks, and how it is configured."""

    op: str
    placement: str
    algorithm: str = "two_shot"
    split: str = "none"

    def config(self, partial_dtype: torch.dtype | None = None) -> stream_k.Config:
        changes = {**dataclasses.asdict(self), "partial_dtype": partial_dtype, "chunk": 1}
        del changes["op"]
        return small_config(**changes, num_programs=5 if self.split != "none" else 0)


def sums_of(op: str) -> list[Way]:
    """In every placement of an all-reduce, and with tiles of several programs, whose parts are added first."""
    found = [
        Way(op, name, how) for name in placement_names("gemm_all_reduce") for how in ("one_shot", "two_shot")
    ]
    found = [way for way in found if (way.placement, way.algorithm) != ("copy_engine", "one_shot")]
    return [*found, *(Way(op, name, split="stream_k") for name in ("beside", "copy_engine"))]


SUMS, NORMS = sums_of("gemm_all_reduce"), sums_of("gemm_all_reduce_rms_norm")
SCATTERED = [Way("gemm_reduce_scatter", name) for name in placement_names("gemm_reduce_scatter")]
# As the rules configure them.
DEFAULTS = [
    way
    for way in (*SUMS, *SCATTERED)
    if way.split == "none"
    and way.placement not in ("after", "inside")
    and (way.algorithm == "two_shot" or way.placement in ("messages", "unfused"))
]


class Product:
    """The operands of all ranks, and what an op makes of a rank's shares of K."""

    def __init__(self, heap: Heap, a: torch.Tensor, b: torch.Tensor) -> None:
        self.heap, self.a, self.b = heap, a, b

    def share(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        inner = slice(*shard_range(self.a.shape[1], rank, self.heap.world_size))
        return self.a[:, inner], self.b[inner]

    def terms(self) -> list[torch.Tensor]:
        """The ranks' partial sums, in float64."""
        return [a.double() @ b.double() for a, b in map(self.share, range(self.heap.world_size))]

    def exact(self) -> torch.Tensor:
        return self.a.double() @ self.b.double()

    def run(self, way: Way, partial_dtype: torch.dtype | None = None, **more: Any) -> torch.Tensor:
        """The sum: all of it, or this rank's rows."""
        return self.call(way.op, config=way.config(partial_dtype), **more)

    def call(self, op: str, residual: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
        a, b = self.share(self.heap.rank)
        # What the allocator gives next is then NaN where the op doesn't write it.
        torch.full((len(a), b.shape[1]), torch.nan, dtype=a.dtype, device=a.device)
        found: torch.Tensor
        if op == "gemm_all_reduce_rms_norm":
            weight = torch.ones(b.shape[1], dtype=a.dtype, device=a.device)
            _, found = stream_k.gemm_all_reduce_rms_norm(
                a, b, residual, weight, EPS, group=self.heap, **options
            )
        else:
            found = getattr(stream_k, op)(a, b, group=self.heap, **options)
        return found

    def own(self, whole: torch.Tensor, op: str) -> torch.Tensor:
        """What `op` leaves of a whole result on this rank."""
        mine = slice(*shard_range(len(whole), self.heap.rank, self.heap.world_size))
        return whole[mine] if op == "gemm_reduce_scatter" else whole


def new_seed() -> int:
    return random.randrange(1 << 20)


def normal(shape: tuple[int, ...], dtype: torch.dtype, seed: int, tag: str) -> torch.Tensor:
    return make_operand(shape, dtype, seed, 0, tag=tag, device="cpu").to(device())


def integers(shape: tuple[int, ...], most: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-most, most + 1, shape, generator=generator).to(dtype).to(device())


def of_integers(heap: Heap, dtype: torch.dtype, seed: int, rows: int = 75) -> Product:
    """Partial sums of thousands, which fp16 rounds to multiples of 2 to 16. In the first two columns those of ranks 0
    and 1 are beyond fp16's range, or at its end, and their sums are within it."""
    K = DEPTH * heap.world_size
    a, b = integers((rows, K), 48, dtype, seed), integers((K, 40), 48, dtype, seed + 1)
    a[:, [0, DEPTH]], b[[0, DEPTH]], b[:, :2] = 256.0, 0.0, 0.0
    b[0, :2], b[DEPTH, 0], b[DEPTH, 1] = 256.0, -128.0, -256.0
    return Product(heap, a, b)


def rounded_sum(
    terms: list[torch.Tensor], wire: torch.dtype, dtype: torch.dtype, added: Any = 0.0
) -> torch.Tensor:
    """What must come out, bit by bit."""
    return (torch.stack([term.to(wire).float() for term in terms]).sum(0) + added).to(dtype)


def same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """The same bits, but for the signs of zeros and the kinds of NaN."""
    plain = (x.nan_to_num(1234.5, math.inf, -math.inf) for x in (found, wanted))
    return found.dtype == wanted.dtype and torch.equal(*plain)


def every_bit(rank: int, world_size: int, ways: list[Way], seed: int, rows: int = 75) -> list[str]:
    """What is not as it must be."""
    wrong = []
    with Heap(HEAP_BYTES) as heap:
        for dtype in (FP16, BF16):
            product = of_integers(heap, dtype, seed, rows)
            terms, element = product.terms(), ELEMENTS[dtype]
            bias, residual = integers((40,), 999, FP32, seed + 2), integers((rows, 40), 999, dtype, seed + 3)
            of_wire = {wire: rounded_sum(terms, wire, dtype) for wire in (FP16, BF16, FP32)}
            assert not any(same(*pair) for pair in itertools.combinations(of_wire.values(), 2))
            assert not of_wire[FP16][:, :2].isfinite().any()
            assert of_wire[BF16].isfinite().all()
            assert of_wire[FP32].isfinite().all()
            default = of_wire[element.wire_dtype(None)]
            for way in ways:
                for mode in (None, FP32, dtype, BF16) if dtype == FP16 else (None,):
                    found = product.run(way, mode)
                    if not same(found, product.own(of_wire[element.wire_dtype(mode)], way.op)):
                        wrong.append(f"{way}, {dtype}, partial_dtype {mode}, seed {seed}")
                # What is added is added in fp32, to the sum.
                more, added = {"bias": bias}, bias
                if way.op == "gemm_all_reduce_rms_norm":
                    more, added = {"bias": bias, "residual": residual}, bias + residual.float()
                wanted = rounded_sum(terms, element.wire_dtype(None), dtype, added)
                assert not same(wanted, (default.float() + added).to(dtype))
                if not same(product.run(way, **more), product.own(wanted, way.op)):
                    wrong.append(f"{way}, {dtype}, {', '.join(more)}, seed {seed}")
        heap.synchronize()
    return wrong


# A norm by messages costs the interpreter a program a row.
@pytest.mark.parametrize(
    ("ways", "rows"), [(SUMS, 75), (SCATTERED, 75), (NORMS, 17)], ids=["sums", "scattered", "norms"]
)
@pytest.mark.num_ranks(2)
def test_every_bit_of_two_ranks(ways: list[Way], rows: int) -> None:
    assert values(run_ranks(every_bit, 2, ways, new_seed(), rows, timeout=TIMEOUT_S)) == [[]] * 2


@pytest.mark.num_ranks(3)
def test_every_bit_of_three_ranks() -> None:
    assert values(run_ranks(every_bit, 3, DEFAULTS, new_seed(), timeout=TIMEOUT_S)) == [[]] * 3


@pytest.mark.num_ranks(4)
def test_every_bit_of_four_ranks() -> None:
    ways = [way for way in DEFAULTS if way.placement in ("copy_engine", "messages")]
    ways.append(Way("gemm_all_reduce_rms_norm", "copy_engine"))
    assert values(run_ranks(every_bit, 4, ways, new_seed(), timeout=TIMEOUT_S)) == [[]] * 4


@triton.jit
def as_it_is(part, DTYPE: tl.constexpr):
    """`epilogue.partial_sum` as it must not be: not rounded where it does not travel."""
    return part


def rows_elsewhere(
    rank: int, world_size: int, ways: list[Way], seed: int, rounds: bool = True
) -> list[list[list[int]]]:
    """By way the bits of each row that the rank gets: of a product, and of one whose rows are those of the first one a
    block of rows further. rounds: owners round their own terms."""
    if not rounds:
        row_blocks.partial_sum = as_it_is
    found = []
    with Heap(HEAP_BYTES) as heap:
        block, K = small_config().block_m, DEPTH * world_size
        a, b = normal((world_size * block, K), FP16, seed, "a"), normal((K, 40), FP16, seed, "b")
        for way, rows in itertools.product(ways, (a, a.roll(block, 0))):
            bits = Product(heap, rows, b).run(way).view(torch.int16)
            found.append(bits.tolist())
        heap.synchronize()
    return found


def moved_with_their_rows(ends: list[list[list[list[int]]]], ways: list[Way]) -> list[bool]:
    """By way, whether each row has the bits that it has elsewhere."""
    found = []
    for number, way in enumerate(ways):
        parts = ends if way.op == "gemm_reduce_scatter" else ends[-1:]
        there, elsewhere = (
            torch.cat([torch.tensor(part[2 * number + turn]) for part in parts]) for turn in range(2)
        )
        found.append(torch.equal(there.roll(len(there) // len(ends), 0), elsewhere))
    return found


def assert_the_owner_does_not_matter(ranks: int) -> None:
    ends = values(run_ranks(rows_elsewhere, ranks, DEFAULTS, new_seed(), timeout=TIMEOUT_S))
    right = moved_with_their_rows(ends, DEFAULTS)
    assert all(right), [way for way, alike in zip(DEFAULTS, right, strict=True) if not alike]


@pytest.mark.num_ranks(2)
def test_two_owners_round_alike() -> None:
    assert_the_owner_does_not_matter(2)


@pytest.mark.num_ranks(3)
def test_three_owners_round_alike() -> None:
    assert_the_owner_does_not_matter(3)


@pytest.mark.num_ranks(4)
def test_four_owners_round_alike() -> None:
    assert_the_owner_does_not_matter(4)


@pytest.mark.cpu
@pytest.mark.num_ranks(2)
def test_an_owner_that_does_not_round_is_found() -> None:
    """The control of the tests above, where an owner's term does not pass through memory."""
    ways = [way for way in DEFAULTS if way.placement == "copy_engine"]
    assert {way.op for way in ways} == {"gemm_all_reduce", "gemm_reduce_scatter"}
    ends = values(run_ranks(rows_elsewhere, 2, ways, new_seed(), False, timeout=TIMEOUT_S))
    assert moved_with_their_rows(ends, ways) == [False] * len(ways)


def gradients(rank: int, world_size: int, seed: int) -> list[str]:
    """Those that are sums over ranks: of an all-gather's A, and of an all-scatter's."""
    wrong = []
    with Heap(HEAP_BYTES) as heap:
        for dtype, mode in ((FP16, None), (FP16, FP32), (BF16, None)):
            # dC B' with B' as the product's second factor.
            product = of_integers(heap, dtype, seed)
            grad, b = product.a, product.share(rank)[1].t()
            wanted = rounded_sum(product.terms(), ELEMENTS[dtype].wire_dtype(mode), dtype)
            mine = slice(*shard_range(len(grad), rank, world_size))
            a = torch.ones(len(grad), b.shape[0], dtype=dtype, device=grad.device)
            rows, columns = a[mine].clone().requires_grad_(), a.clone().requires_grad_()
            options: dict[str, Any] = {"group": heap, "partial_dtype": mode}
            stream_k.all_gather_gemm(rows, b, num_rows=len(grad), **options).backward(product.share(rank)[0])
            stream_k.gemm_all_scatter(columns, b, **options).backward(grad)
            assert rows.grad is not None
            assert columns.grad is not None
            wrong += [] if same(rows.grad, wanted[mine]) else [f"all_gather_gemm, {dtype}, {mode}"]
            wrong += [] if same(columns.grad, wanted) else [f"gemm_all_scatter, {dtype}, {mode}"]
        heap.synchronize()
    return wrong


@pytest.mark.num_ranks(2)
def test_every_bit_of_gradients() -> None:
    assert values(run_ranks(gradients, 2, new_seed(), timeout=TIMEOUT_S)) == [[]] * 2


def subnormals(rank: int, world_size: int, ways: list[Way], seed: int) -> list[str]:
    """Partial sums so small that fp16 holds few of their bits, against the bound; and whether the bound would do
    without what each of them loses there."""
    wrong = []
    with Heap(HEAP_BYTES) as heap:
        K = DEPTH * world_size
        a, b = (
            (normal(shape, FP32, seed, tag) * 2.0**-11).to(FP16)
            for tag, shape in (("a", (70, K)), ("b", (K, 40)))
        )
        product = Product(heap, a, b)
        exact, sizes = sum_of_partials(a.double(), b.double(), world_size)
        assert (sizes > 0).all()
        unit = torch.finfo(FP16).eps / 2
        for way in ways:
            found = product.run(way)
            rows = product.own(torch.arange(70, device=a.device), way.op)
            judged = check(
                found, a[rows], b, exact[rows].to(FP16), num_partials=world_size, partial_roundings=1
            )
            wrong += [] if judged.ok else [f"{way}: {judged}"]
            # Sums in fp32 lose nothing here.
            without = unit * (sizes[rows] + exact[rows].abs()) + 2.0**-25
            if not ((found.double() - exact[rows]).abs() > without).any():
                wrong.append(f"{way}: nobody would miss R 2^-25")
        heap.synchronize()
    return wrong


@pytest.mark.num_ranks(4)
def test_subnormal_partials() -> None:
    ways = [way for way in DEFAULTS if way.placement in ("copy_engine", "messages", "beside")]
    assert values(run_ranks(subnormals, 4, ways, new_seed(), timeout=TIMEOUT_S)) == [[]] * 4


def step_by_step(product: Product, op: str) -> torch.Tensor:
    """What NCCL does: partial sums in 16 bits, added one after another, rounded each time. (Not gloo, which may round
    less often, and in an order of its own.)"""
    pairs = map(product.share, range(product.heap.world_size))
    first, *rest = ((a.float() @ b.float()).to(a.dtype) for a, b in pairs)
    for term in rest:
        first = (first.float() + term.float()).to(first.dtype)
    return product.own(first, op)


def by_the_library(product: Product, op: str) -> torch.Tensor:
    a, b = product.share(product.heap.rank)
    found: torch.Tensor = getattr(reference, op)(a.contiguous(), b.contiguous())
    return found


def errors(
    rank: int, world_size: int, ways: list[Way], seed: int, library: Callable[[Product, str], torch.Tensor]
) -> list[str]:
    """Where our root mean square error is larger than it may be beside a library's; or where it would not be seen that
    partial sums lost three more bits."""
    wrong = []
    with Heap(HEAP_BYTES) as heap:
        for dtype in (FP16, BF16):
            K = 64 * world_size
            product = Product(heap, normal((96, K), dtype, seed, "a"), normal((K, 64), dtype, seed, "b"))
            for way in ways:
                exact = product.own(product.exact(), way.op)
                theirs = root_mean_square(library(product, way.op), exact)
                ours = root_mean_square(product.run(way), exact)
                if ours > MOST * theirs:
                    wrong.append(f"{way}, {dtype}: {ours / theirs:.3f} times theirs")
                coarse = root_mean_square(product.run(way, BF16), exact)
                if dtype == FP16 and coarse < 1.5 * MOST * theirs:
                    wrong.append(f"{way}: nobody would see worse ones")
        heap.synchronize()
    return wrong


@pytest.mark.num_ranks(2)
def test_errors_of_two_ranks_beside_a_library_s() -> None:
    assert values(run_ranks(errors, 2, DEFAULTS, new_seed(), step_by_step, timeout=TIMEOUT_S)) == [[]] * 2


@pytest.mark.num_ranks(4)
def test_errors_of_four_ranks_beside_a_library_s() -> None:
    ways = [way for way in DEFAULTS if way.placement in ("copy_engine", "messages")]
    assert values(run_ranks(errors, 4, ways, new_seed(), step_by_step, timeout=TIMEOUT_S)) == [[]] * 4


@pytest.mark.gpu
@pytest.mark.gpu_a_rank("NCCL takes one rank a GPU")
@pytest.mark.num_ranks(2)
def test_errors_beside_those_of_nccl() -> None:
    assert values(run_ranks(errors, 2, DEFAULTS, new_seed(), by_the_library, timeout=TIMEOUT_S)) == [[]] * 2


def in_two_modes(rank: int, world_size: int, seed: int) -> dict[str, tuple[str, bool]]:
    """By call, what is raised where the last rank asks for the strict mode and the others don't, and whether the result
    is untouched. A call that all make alike is right afterwards."""
    found = {}
    mode = FP32 if rank == world_size - 1 else None
    with Heap(HEAP_BYTES) as heap:
        product = of_integers(heap, FP16, seed)
        wanted = rounded_sum(product.terms(), FP16, FP16)
        for op in ("gemm_all_reduce", "gemm_reduce_scatter", "gemm_all_reduce_rms_norm"):
            ways = {"alone": {"partial_dtype": mode}, "config": {"config": Way(op, "messages").config(mode)}}
            for name, options in ways.items():
                out = product.own(torch.full_like(wanted, 77.0), op)
                given = {} if op == "gemm_all_reduce_rms_norm" else {"out": out}
                text = ""
                try:
                    product.call(op, **options, **given)
                except CallMismatch as error:
                    text = str(error)
                found[f"{op}, {name}"] = text, bool((out == 77.0).all())
                assert same(product.run(Way(op, "copy_engine")), product.own(wanted, op))
        heap.synchronize()
    return found


@pytest.mark.num_ranks(2)
def test_ranks_in_two_modes() -> None:
    for found in values(run_ranks(in_two_modes, 2, new_seed(), timeout=TIMEOUT_S)):
        assert len(found) == 6
        for text, untouched in found.values():
            assert "torch.float32" in text
            assert untouched

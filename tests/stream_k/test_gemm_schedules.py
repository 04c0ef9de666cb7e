"""`stream_k.gemm` under forced schedules: split tiles, more programs than tiles and fewer, the same bits every time.

Operands of -1, 0 and 1 make every sum exact, so that one missing or doubled K-iteration can't hide in a bound.
"""

import copy
import dataclasses

import pytest
import torch
import triton
import triton.language as tl

from pyrocshmem import stream_k
from pyrocshmem.calls.workspace import Workspace, local_workspace
from pyrocshmem.collectives import order
from pyrocshmem.stream_k.local_gemm import kernel
from pyrocshmem.stream_k.local_gemm.plan import GemmPlan
from pyrocshmem.stream_k.local_gemm.product import Product
from tests.stream_k.products import (
    ON_CPU,
    Frame,
    check_product,
    device,
    integers,
    random,
    same_bits,
    small_config,
)

TIER = 1
pytestmark = pytest.mark.num_ranks(1)

# Tiles of small_config: 2 x 4 of 10 iterations, the last of each cut.
M, N, K = (50, 104, 312) if ON_CPU else (100, 232, 312)
TILES = 8
PROGRAMS = (1, 3, 5, 7, 8, 13, 132)


def exact_product(config: stream_k.Config, dtype: torch.dtype = torch.float16, seed: int = 1) -> None:
    """AssertionError unless the product of integers comes out exactly, and nothing around it is touched."""
    a, b = integers(M, K, dtype, seed), integers(K, N, dtype, seed + 1)
    frame = Frame(M, N, dtype, "padded")
    stream_k.gemm(a, b, out=frame.out, config=config)
    assert torch.equal(frame.out.double(), a.double() @ b.double())
    frame.check()


@pytest.mark.parametrize("num_programs", PROGRAMS)
def test_exact_under_every_split(num_programs: int) -> None:
    """Fault 13: more programs than tiles, or than multiprocessors, finish."""
    for seed, split in enumerate(("none", "stream_k", "split_k", "auto")):
        exact_product(small_config(split=split, num_programs=num_programs), seed=10 * num_programs + seed)


def test_the_splits_are_what_they_say() -> None:
    """Without this, the test above might force nothing."""
    config = small_config()
    sizes = (M, N, K, config.block_m, config.block_n, config.block_k)
    kinds = {p: stream_k.make_schedule(*sizes, p, split="stream_k").kind for p in PROGRAMS}
    assert stream_k.make_schedule(*sizes, 1).num_tiles == TILES
    assert {p for p, kind in kinds.items() if kind == "stream_k"} >= {3, 5, 7, 13}
    hybrid = stream_k.make_schedule(*sizes, 3, split="stream_k")
    assert (hybrid.num_split_tiles, hybrid.whole_tiles) == (5, 3)
    assert stream_k.make_schedule(*sizes, 304, split="none").kind == "data_parallel"
    assert stream_k.make_schedule(64, 64, 32 * 64, 32, 32, 32, 16, split="split_k").kind == "split_k"


@pytest.mark.parametrize("num_programs", [78, 132, 304])
def test_one_tile_for_all_programs(num_programs: int) -> None:
    """Fault 13: the waves of the GPUs we know, on whatever runs this. The finisher adds up to 303 partials."""
    depth = 32 * 8 * num_programs
    a, b = (
        integers(16, depth, torch.float16, num_programs),
        integers(depth, 24, torch.float16, num_programs + 1),
    )
    config = small_config(split="stream_k", num_programs=num_programs)
    sizes = (16, 24, depth, config.block_m, config.block_n, config.block_k)
    assert stream_k.make_schedule(*sizes, num_programs, split="stream_k").workspace_tiles == num_programs
    # Sums of up to 78,000 products, exact in fp32; rounded once to the output.
    assert torch.equal(stream_k.gemm(a, b, config=config), (a.double() @ b.double()).half())


def test_split_k() -> None:
    """Skinny products in equal parts."""
    for rows, programs in ((1, 4), (16, 8), (33, 16)):
        a, b = integers(rows, 1024, torch.float32, rows), integers(1024, 64, torch.float32, rows + 1)
        config = small_config(split="split_k", num_programs=programs)
        assert torch.equal(stream_k.gemm(a, b, config=config).double(), a.double() @ b.double())


@pytest.mark.parametrize(("tiles", "num_programs", "parts"), [(4, 3, 3), (6, 4, 2), (3, 7, 2), (1, 5, 3)])
def test_parts_of_the_last_wave(tiles: int, num_programs: int, parts: int) -> None:
    """Whole tiles and, of the tiles behind them, parts, some of which are an iteration longer."""
    config = small_config(split="split_k", num_programs=num_programs)
    depth = 41 * config.block_k - 5
    a, b = (
        integers(tiles * config.block_m - 3, depth, torch.float16, tiles),
        integers(depth, 24, torch.float16, parts),
    )
    sizes = (a.shape[0], 24, depth, config.block_m, config.block_n, config.block_k)
    schedule = stream_k.make_schedule(*sizes, num_programs, split="split_k")
    rest = tiles % num_programs
    assert (schedule.num_split_tiles, schedule.num_split_programs) == (rest, parts * rest)
    assert torch.equal(stream_k.gemm(a, b, config=config).double(), a.double() @ b.double())


@pytest.mark.parametrize("num_parts", [2, 3, 4, 5, 9])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_separate_reduction(num_parts: int, dtype: torch.dtype) -> None:
    """By a second kernel, in fours, whatever lay in the workspace; biased and activated once."""
    rows, columns, tiles = 40, 72, 6 if ON_CPU else 2
    config = small_config(split="separate", block_k=16, num_programs=num_parts * tiles + tiles - 1)
    depth = 16 * (10 * num_parts + 35)
    sizes = (rows, columns, depth, config.block_m, config.block_n, config.block_k)
    schedule = stream_k.make_schedule(*sizes, config.num_programs, split="separate")
    assert (schedule.num_split_tiles, schedule.num_split_programs) == (tiles, num_parts * tiles)
    a, b = integers(rows, depth, dtype, num_parts), integers(depth, columns, dtype, num_parts + 1)
    bias, workspace = integers(1, columns, dtype, 3)[0], Workspace(device=device())
    expected = (a.double() @ b.double() + bias.double()).relu()
    for layout in ("row", "column", "strided"):
        frame = Frame(rows, columns, dtype, layout)
        for _ in range(2):
            frame.poison()
            stream_k.gemm(
                a, b, bias=bias, activation="relu", out=frame.out, config=config, workspace=workspace
            )
            assert torch.equal(frame.out.double(), expected)
            workspace.buffer("fix-up", 1, torch.float32, local=True).fill_(torch.nan)
        frame.check()


def test_no_parts_are_left_where_a_second_kernel_lacks_something() -> None:
    """It stores no squares."""
    config = small_config(split="separate", block_k=16, num_programs=8)
    a, b = integers(20, 1024, torch.float16, 1), integers(1024, 24, torch.float16, 2)
    out, workspace = torch.empty(20, 24, dtype=a.dtype, device=device()), Workspace(device=device())
    squares = torch.empty(1, 20, device=device())
    plans = [
        GemmPlan(a, b, config, False, None, "none", out, workspace, squares=given)
        for given in (None, squares)
    ]
    assert [plan.sum is None for plan in plans] == [False, True]
    assert [plan.product.config.split for plan in plans] == ["separate", "auto"]
    plans[1].run(a, b, None, out)
    assert torch.equal(out.double(), a.double() @ b.double())
    assert torch.equal(squares.double().sum(0), out.double().square().sum(1))


@pytest.mark.parametrize("subtiles", [1, 2, 4])
def test_subtiles(subtiles: int) -> None:
    """A tile leaves the registers in 1, 2 or 4 parts, and comes back so in a fix-up."""
    config = dataclasses.replace(
        small_config(num_programs=3, split="stream_k"), block_n=64, subtiles=subtiles
    )
    for dtype in (torch.float16, torch.float32):
        exact_product(config, dtype, seed=subtiles)


@pytest.mark.parametrize("group_m", [1, 3, 16])
def test_orders_of_tiles(group_m: int) -> None:
    for split in ("none", "stream_k"):
        exact_product(small_config(group_m=group_m, split=split, num_programs=5), seed=group_m)


@pytest.mark.parametrize(
    ("dtype", "split"),
    [
        (torch.float16, "none"),
        (torch.float16, "stream_k"),
        (torch.float32, "stream_k"),
        (torch.float16, "separate"),
    ],
    ids=str,
)
def test_same_bits_in_20_runs(dtype: torch.dtype, split: str) -> None:
    """Fault 22, with other products on the same workspace in between."""
    config = small_config(split=split, num_programs=3)
    a, b = random(M, K, dtype), random(K, N, dtype)
    first = stream_k.gemm(a, b, config=config)
    check_product(first, a, b)
    for run in range(19):
        if run % 9 == 0:
            exact_product(small_config(split="stream_k", num_programs=13), dtype, seed=run)
        assert same_bits(stream_k.gemm(a, b, config=config), first)


def test_fix_ups_are_fresh_in_every_call() -> None:
    """New data at each call: the partials, and the flags, of the call before would show."""
    config = small_config(split="stream_k", num_programs=3)
    for seed in range(5):
        exact_product(config, seed=100 + seed)


@pytest.mark.parametrize("epoch", [2**31 - 3, -3], ids=["2^31", "2^32"])
def test_epochs_wrap_around(epoch: int) -> None:
    """Fault 7: the counter of calls, an int32, passes 2^31 and 2^32."""
    workspace = Workspace(device=device())
    config = small_config(split="stream_k", num_programs=3)
    stream_k.gemm(
        random(M, K, torch.float32), random(K, N, torch.float32), config=config, workspace=workspace
    )
    workspace.restart(epoch)
    for call in range(4):
        a, b = random(M, K, torch.float32), random(K, N, torch.float32)
        check_product(stream_k.gemm(a, b, config=config, workspace=workspace), a, b)
        assert workspace.epoch() == (epoch + call + 1 + 2**31) % 2**32 - 2**31


# -- negative controls: with a planted mistake, the same tests must fail --


def plant(monkeypatch: pytest.MonkeyPatch, name: str, change: int) -> None:
    """The kernel is told a number of the schedule that is `change` off; the launch stays as it was."""
    honest = Product.problem.func  # type: ignore[attr-defined]

    def problem(self: Product) -> tuple[int, ...]:
        lie = copy.copy(self.schedule)
        object.__setattr__(lie, name, getattr(lie, name) + change)
        return honest(dataclasses.replace(self, schedule=lie))

    monkeypatch.setattr(Product, "problem", property(problem))
    local_workspace(device()).plans.clear()


@pytest.fixture
def forget_plans():
    yield
    local_workspace(device()).plans.clear()


@pytest.mark.parametrize(
    ("split", "name", "change"),
    [("stream_k", "iters_per_tile", -1), ("stream_k", "num_split_programs", 1), ("none", "num_programs", 1)],
)
@pytest.mark.usefixtures("forget_plans")
def test_an_off_by_one_is_caught(monkeypatch: pytest.MonkeyPatch, split: str, name: str, change: int) -> None:
    config = small_config(split=split, num_programs=3)
    exact_product(config)
    plant(monkeypatch, name, change)
    with pytest.raises(AssertionError):
        exact_product(config)
    a, b, frame = random(M, K, torch.float16, 5), random(K, N, torch.float16, 6), Frame(M, N, torch.float16)
    stream_k.gemm(a, b, out=frame.out, config=config)
    with pytest.raises(AssertionError, match="bad"):
        check_product(frame.out, a, b)


@triton.jit
def one_iteration_short(program, problem):
    lo, hi = order.program_range(program, problem)
    return lo, hi - (program == 1).to(tl.int32)


@pytest.mark.cpu
def test_a_lost_iteration_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the kernel itself: program 1 ends its share one iteration early."""
    config = small_config(split="stream_k", num_programs=3)
    monkeypatch.setattr(kernel, "program_range", one_iteration_short)
    with pytest.raises(AssertionError):
        exact_product(config)


@triton.jit
def without_fix_up(
    parts, first, last, step, epoch, tile, workspace, fix_up_flags, context, events,
    WORLD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SUBTILES: tl.constexpr,
):  # fmt: skip
    return parts


@pytest.mark.cpu
def test_a_missing_fix_up_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_config(split="stream_k", num_programs=3)
    monkeypatch.setattr(kernel, "_add_partials", without_fix_up)
    with pytest.raises(AssertionError):
        exact_product(config)

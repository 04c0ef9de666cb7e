"""`stream_k.local_gemm.aligned_copies`: operands that TMA can't address are copied bit by bit, and the product of
the copies is the one of operands that TMA can address."""

import math
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from pyrocshmem import stream_k
from pyrocshmem.calls.tensors import POINTER, ROW, how_to_read
from pyrocshmem.calls.workspace import Workspace
from pyrocshmem.stream_k.local_gemm import aligned_copies, product
from pyrocshmem.stream_k.local_gemm.aligned_copies import Copies
from pyrocshmem.stream_k.local_gemm.product import make_product
from tests.stream_k.products import Frame, check_product, device, laid_out, random, same_bits, small_config

TIER = 1
pytestmark = pytest.mark.num_ranks(1)
DTYPE = torch.float16


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory for copies holds NaN."""

    empty = torch.Tensor.new_empty

    def new_empty(self: torch.Tensor, *shape: Any, **options: Any) -> torch.Tensor:
        made = empty(self, *shape, **options)
        return made.fill_(math.nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)


def unlike(x: torch.Tensor, by_rows: bool = False) -> str:
    """How the copy of `x`, made beside the one of another operand, differs from it; "" if it doesn't."""
    other = laid_out(random(5, 3, DTYPE), "misaligned")
    made = Copies(other, x).run(other, x)[1] if not by_rows else Copies(x, other, by_rows).run(x, other)[0]
    columns = x.stride(1) != 1 and x.stride(0) == 1 and not by_rows
    lines = x.t() if columns else x
    if made.shape[0] != lines.shape[0] or made.stride(0) % 64 or made.data_ptr() % 16:
        return f"lines {tuple(made.shape)}, strides {made.stride()}"
    length = lines.shape[1]
    if not same_bits(made[:, :length], torch.zeros(lines.shape, dtype=DTYPE, device=x.device).copy_(lines)):
        return "other elements"
    return (
        "" if torch.equal(made[:, length:], torch.zeros_like(made[:, length:])) else "not zeros behind them"
    )


def test_bit_by_bit() -> None:
    """Lengths on either side of a block and of 128 bytes; NaN, infinities and zeros of both signs among the values."""
    for lines, length in ((1, 1), (3, 7), (65, 63), (64, 65), (130, 513), (2, 1100)):
        x = random(lines, length, DTYPE)
        x.view(-1)[: 3 : max(1, x.numel() // 4)] = torch.tensor(math.inf, dtype=DTYPE)
        x[-1, -1], x[0, 0] = math.nan, -0.0
        for layout in ("misaligned", "column", "strided", "one row", "one column"):
            operand = laid_out(x, layout)
            assert unlike(operand) == "", (lines, length, layout)
    assert unlike(laid_out(random(70, 9, DTYPE), "column"), by_rows=True) == ""


@triton.jit
def one_element_short(
    x, copy, block, lines, length, stride, step, pitch, width, LINES: tl.constexpr, ELEMENTS: tl.constexpr
):
    wide = tl.cdiv(length, ELEMENTS)
    i = (block // wide * LINES + tl.arange(0, LINES))[:, None]
    j = (block % wide * ELEMENTS + tl.arange(0, ELEMENTS))[None, :]
    value = tl.load(x + i * stride + j * step, mask=(i < lines) & (j < length - 1), other=0.0)
    tl.store(copy + i * pitch + j, value, mask=(i < lines) & (j < width))


def exact_bits(layouts: tuple[str, str], M: int = 70, N: int = 49, K: int = 131) -> None:
    """AssertionError unless the product of operands in these layouts keeps its bound, and has the bits of the product
    of the same values where TMA can read them."""
    x, y, bias = random(M, K, DTYPE), random(K, N, DTYPE), random(1, N, torch.float32)[0]
    a, b = laid_out(x, layouts[0]), laid_out(y, layouts[1])
    for split in ("none", "stream_k"):
        config, frame = small_config(split=split, num_programs=4), Frame(M, N, DTYPE)
        stream_k.gemm(a, b, bias=bias, out=frame.out, config=config)
        check_product(frame.out, a, b, bias)
        frame.check()
        there = stream_k.gemm(laid_out(x, "sliced"), laid_out(y, "sliced"), bias=bias, config=config)
        assert same_bits(frame.out, there)


# Of the rows here, 131 and 49 elements long, none but the first starts where TMA could read it.
@pytest.mark.parametrize(
    "layouts", [("row", "row"), ("sliced", "row"), ("misaligned", "sliced"), ("strided", "transposed")]
)
def test_the_product_of_copies(layouts: tuple[str, str]) -> None:
    exact_bits(layouts)


@pytest.mark.cpu
def test_a_lost_element_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aligned_copies, "copy_block", one_element_short)
    assert unlike(laid_out(random(3, 7, DTYPE), "misaligned")) == "other elements"
    with pytest.raises(AssertionError, match="bad"):
        exact_bits(("row", "row"))


def test_what_is_copied() -> None:
    """Nothing that TMA can address, nothing of 4 bytes an element, and no A that most rows come to from elsewhere."""
    config = small_config()

    def found(a: torch.Tensor, b: torch.Tensor, **options: Any) -> tuple[bool, bool]:
        planned = make_product(a, b, config, False, **options)
        made = planned.readable(a, b)
        copied = made[0] is not a, made[1] is not b
        for x, how, copy in ((a, planned.a_how, copied[0]), (b, planned.b_how, copied[1])):
            assert how == (ROW if copy else how_to_read(x))
        return copied

    odd, even = (laid_out(random(40, 40, DTYPE), layout) for layout in ("misaligned", "row"))
    assert (how_to_read(odd), how_to_read(even)) == (POINTER, ROW)
    assert found(even, even) == (False, False)
    assert found(odd, even) == (True, False)
    assert found(even, odd) == (False, True)
    assert found(odd, odd) == (True, True)
    assert found(odd, odd, keeps_a=True) == (False, True)
    wide = laid_out(random(40, 41, torch.float32), "row")
    assert found(wide, laid_out(random(41, 40, torch.float32), "misaligned")) == (False, False)


def test_copied_to_where_rows_lie_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the last tile reads behind the copied rows, NaN here, is in no result."""
    monkeypatch.setattr(product, "rows_cost_more", lambda *_: True)
    config = small_config()
    for M in (1, config.block_m + 1, config.block_m):
        a, b, workspace = random(M, 64, DTYPE), random(64, 51, DTYPE), Workspace(device=device())
        out = stream_k.gemm(a, b, config=config, workspace=workspace)
        check_product(out, a, b)
        made = make_product(a, b, config, False)
        whole = -(-M // config.block_m) * config.block_m
        copied = made.readable(a, b)[0]
        assert made.a_template.shape == [whole, 64]
        assert (copied is a) if whole == M else (copied.shape == (whole, 64) and same_bits(copied[:M], a))


def test_copied_columns_have_room_too() -> None:
    """Of a transposed B as well, which TMA would find columns outside of."""
    config = small_config()
    a, b = random(33, 45, DTYPE), laid_out(random(45, config.block_n + 3, DTYPE), "transposed")
    planned = make_product(a, b, config, False)
    copied = planned.readable(a, b)
    assert [x.shape[0] for x in copied] == [-(-33 // config.block_m) * config.block_m, 2 * config.block_n]
    assert copied[1].isnan().any()  # where nothing was copied to, all the same
    check_product(stream_k.gemm(a, b, config=config), a, b)


def test_copies_are_of_the_call() -> None:
    """Calls in a row on the same plan, other data: each result is its own call's."""
    workspace, config = Workspace(device=device()), small_config()
    for _ in range(3):
        a, b = random(33, 45, DTYPE), random(45, 51, DTYPE)
        check_product(stream_k.gemm(a, b, config=config, workspace=workspace), a, b)
    assert len(workspace.plans) == 1


@pytest.mark.gpu
def test_replayed_in_a_graph() -> None:
    """The copies are made anew in every replay, of what is there then."""
    a, b, out = (torch.empty(333, 333, dtype=DTYPE, device=device()) for _ in range(3))
    stream_k.gemm(a, b, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stream_k.gemm(a, b, out=out)
        stream_k.gemm(a, b, out=out)
    for _ in range(3):
        a.copy_(random(333, 333, DTYPE))
        b.copy_(random(333, 333, DTYPE))
        out.fill_(math.nan)
        graph.replay()
        check_product(out, a, b)

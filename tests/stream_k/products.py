"""Operands, outputs and the bound for tests of products.

a = laid_out(random(M, K, dtype, 1), "column")              # surrounded by NaN: a read outside shows
frame = Frame(M, N, dtype, "padded")                        # poisoned, surrounded by canaries
check_product(stream_k.gemm(a, b, out=frame.out), a, b)
frame.check()
"""

import itertools
import math

import torch
from torch.nn import functional

from pyrocshmem import target
from pyrocshmem.reference.accuracy import EPS32, Partials, bound, compare, sum_of_partials
from pyrocshmem.stream_k.choice.config import Config

ON_CPU = target.interpreted()
ACTIVATIONS = {"none": lambda x: x, "relu": torch.relu, "gelu": functional.gelu, "silu": functional.silu}
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
LAYOUTS = ("row", "column", "transposed", "sliced", "strided", "one row", "one column", "misaligned")
OUT_LAYOUTS = ("row", "padded", "column", "strided", "misaligned")

# Of the activations used here none is steeper than this.
_STEEPEST = 1.13
_CANARY = 77.0

_seeds = itertools.count(1)


def device() -> torch.device:
    """Where this process' kernels run: a spawned rank's GPU is the current one, whatever its number in a group."""
    return target.device() if ON_CPU else torch.device("cuda", torch.cuda.current_device())


def small_config(**changes: object) -> Config:
    """Small blocks, so that small products have several tiles and iterations."""
    block = 32 if ON_CPU else 64
    sizes = {
        "block_m": block,
        "block_n": block,
        "block_k": 32,
        "num_warps": 4,
        "num_stages": 2,
        "comm_rows": 16,
    }
    shape = {"group_m": 2, "subtiles": 2, "flatten": False, "num_comm_programs": 2, "placement": "after"}
    return Config(**{**sizes, **shape, **changes})  # type: ignore[arg-type]


def random(rows: int, columns: int, dtype: torch.dtype, seed: int | None = None) -> torch.Tensor:
    """Standard normal [rows, columns]; without a seed, other data at each call."""
    generator = torch.Generator().manual_seed(next(_seeds) if seed is None else seed)
    return torch.randn(rows, columns, generator=generator).to(dtype).to(device())


def integers(rows: int, columns: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """-1, 0 or 1: sums of fewer than 2048 products are exact in every dtype but bfloat16 (256)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, 2, (rows, columns), generator=generator).to(dtype).to(device())


def laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """The values of `x` (of its first row or column, for those with stride 0) in a layout, NaN all around them."""
    rows, columns = x.shape

    def inside(height: int, width: int, row: int, column: int) -> torch.Tensor:
        return x.new_full((height, width), math.nan)[row : row + rows, column : column + columns]

    if layout == "row":
        return x.clone()
    if layout == "column":
        view = x.new_full((columns + 3, rows + 16), math.nan)[2 : 2 + columns, 8 : 8 + rows].t()
    elif layout == "transposed":
        view = torch.empty_like(x.t(), memory_format=torch.contiguous_format).t()
    elif layout == "sliced":
        # Bases and strides of whole 16 bytes, as TMA wants them.
        view = inside(rows + 3, (columns + 31) // 16 * 16, 1, 8)
    elif layout == "strided":
        view = x.new_full((2 * rows + 1, 3 * columns + 2), math.nan)[1::2, 1::3][:rows, :columns]
    elif layout == "one row":
        return x[:1].expand(rows, columns)
    elif layout == "one column":
        return x[:, :1].expand(rows, columns)
    elif layout == "misaligned":
        view = inside(rows + 2, columns + 4, 1, 3)
    else:
        raise ValueError(f"layout {layout!r}, allowed are {LAYOUTS}")
    return view.copy_(x)


class Frame:
    """An output [rows, columns] of NaN inside a buffer of canaries."""

    def __init__(self, rows: int, columns: int, dtype: torch.dtype, layout: str = "row") -> None:
        height, width = rows + 4, columns + 4
        if layout == "padded":
            width = (columns + 31) // 16 * 16
        if layout == "strided":
            height, width = 2 * rows + 4, 3 * columns + 16
        self.buffer = torch.full((height, width), _CANARY, dtype=dtype, device=device())
        if layout == "row":
            # Contiguous: canaries before and behind.
            flat = self.buffer.flatten()
            self.buffer = torch.cat((flat, flat))
            self.out = self.buffer[16 : 16 + rows * columns].view(rows, columns)
        elif layout == "padded":
            self.out = self.buffer[2 : 2 + rows, :columns]
        elif layout == "column":
            self.buffer = torch.full((columns + 4, rows + 24), _CANARY, dtype=dtype, device=device())
            self.out = self.buffer[2 : 2 + columns, 8 : 8 + rows].t()
        elif layout == "strided":
            self.out = self.buffer[1 : 1 + 2 * rows : 2, 2 : 2 + 3 * columns : 3]
        elif layout == "misaligned":
            self.out = self.buffer[1 : 1 + rows, 3 : 3 + columns]
        else:
            raise ValueError(f"layout {layout!r}, allowed are {OUT_LAYOUTS}")
        assert self.out.shape == (rows, columns)
        self.poison()

    def poison(self) -> None:
        self.out.fill_(math.nan)

    def check(self) -> None:
        """AssertionError when anything around the output was written."""
        value = self.out.clone()
        self.out.fill_(_CANARY)
        around = (self.buffer != _CANARY).nonzero()
        self.out.copy_(value)
        assert len(around) == 0, (
            f"{len(around)} elements outside of the output were written, the first at {around[0].tolist()}"
        )


def check_product(
    out: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str = "none",
    baseline: torch.Tensor | None = None,
    wire: torch.dtype | None = None,
    num_ranks: int = 1,
) -> None:
    """AssertionError unless `out` keeps the bound of `reference.accuracy` for activation(a @ b + bias).

    The bound's magnitude includes the bias, and an activation passes errors on as steeply as it is. baseline: None
    is the product in fp32, rounded once: stricter than any library that rounds more. wire: what the partial sums of
    `num_ranks` ranks travel in, who share K; None: there are none.
    """
    dtype, act = out.dtype, ACTIVATIONS[activation]
    a64, b64 = a.double(), b.double()
    shift = torch.zeros(b.shape[1], dtype=torch.float64, device=b.device) if bias is None else bias.double()
    product = a64 @ b64 + shift
    magnitude = (a64.abs() @ b64.abs() + shift.abs()) * (1.0 if activation == "none" else 1.5 * _STEEPEST)
    steep = 1.0 if activation == "none" else _STEEPEST
    sizes = steep * sum_of_partials(a64, b64, num_ranks)[1]
    terms = None if wire is None else Partials(sizes, steep * num_ranks, wire)
    if baseline is None:
        baseline = act(a.float() @ b.float() + shift.float()).to(dtype)
    ref64 = act(product)
    allowed = bound(ref64, baseline, magnitude, max(a.shape[1], 1), dtype, terms)
    if activation != "none":
        # fp32 exp and erf, and the subtraction 1 + erf, which cancels for negative inputs.
        allowed += 4 * EPS32 * product.abs()
    found = compare(out, ref64, baseline, allowed)
    assert out.shape == ref64.shape
    assert found.ok, f"{tuple(a.shape)} x {tuple(b.shape)} {dtype}, {activation}: {found}"


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    return torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))

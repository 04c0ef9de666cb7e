"""GEMMs of 8-bit operands with scales: every element against float64, by recipe, and what is refused."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from pyrocshmem import batch_invariant, stream_k, target
from pyrocshmem.elements import float8
from pyrocshmem.stream_k.choice.scaled import choose_scaled
from pyrocshmem.stream_k.local_gemm.scales import Scheme
from tests.float8_error import may_be_off

TIER = 2
DEVICE = target.device()
E4M3, E5M2 = float8()
RESULTS = (torch.bfloat16, torch.float16, torch.float32)
RECIPES = ("tensorwise", "rowwise", "blockwise")
# Odd sizes; fewer rows than a tile; K that 128 doesn't divide, and less than 128.
SHAPES = ((33, 96, 200), (1, 130, 300), (7, 16, 16), (5, 9, 1))


def operands(M: int, N: int, K: int, a_dtype: torch.dtype = E4M3, b_dtype: torch.dtype = E4M3) -> Any:
    a = torch.randn(M, K, device=DEVICE).to(a_dtype)
    return a, torch.randn(N, K, device=DEVICE).to(b_dtype).t()


def scales_of(recipe: str, M: int, N: int, K: int) -> tuple[torch.Tensor, torch.Tensor]:
    blocks, columns = -(-K // 128), -(-N // 128)
    shapes: dict[str, Any] = {
        "tensorwise": ((), (1,)),
        "rowwise": ((M, 1), (1, N)),
        "blockwise": ((M, blocks), (blocks, columns)),
    }
    first, second = (torch.rand(shape, device=DEVICE) + 0.1 for shape in shapes[recipe])
    return first, second


def spread(x: torch.Tensor, scale: torch.Tensor, height: int) -> torch.Tensor:
    """float64 of what x with its scale stands for; height: rows of a block."""
    if scale.numel() > 1 and height > 1:
        scale = scale.repeat_interleave(height, 0)[: x.shape[0]]
    if scale.ndim == 2 and scale.shape[1] not in (1, x.shape[1]):
        scale = scale.repeat_interleave(128, 1)[:, : x.shape[1]]
    return x.double() * scale.double()


def worst_ratio(
    out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scales: Any, recipe: str, fast: bool = False
) -> float:
    """The largest error over its bound: that of the sum, and a rounding of the result."""
    A = spread(a, scales[0], 1)
    B = spread(b, scales[1], 128 if recipe == "blockwise" else 1)
    exact, info = A @ B, torch.finfo(out.dtype)
    bound = info.eps / 2 * exact.abs() + may_be_off(A, B, fast) + info.tiny * info.eps
    return float(((out.double() - exact).abs() / bound).max())


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_element(recipe: str) -> None:
    for (M, N, K), kinds in itertools.product(SHAPES, ((E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2))):
        a, b = operands(M, N, K, *kinds)
        scales = scales_of(recipe, M, N, K)
        for dtype in RESULTS:
            out = torch.full((M, N), float("nan"), dtype=dtype, device=DEVICE)
            stream_k.gemm(a, b, scale_a=scales[0], scale_b=scales[1], out_dtype=dtype, out=out)
            assert worst_ratio(out, a, b, scales, recipe) <= 1, (M, N, K, kinds, dtype)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_number(recipe: str) -> None:
    """Subnormal ones, both zeros, infinities and NaNs among them."""
    one = torch.ones(16, 1, device=DEVICE).to(E4M3).t()
    for kind in (E4M3, E5M2):
        every = torch.arange(256, device=DEVICE).to(torch.uint8).view(kind)
        scales = [torch.ones_like(scale) for scale in scales_of(recipe, 256, 16, 1)]
        out = stream_k.gemm(
            every[:, None], one, scale_a=scales[0], scale_b=scales[1], out_dtype=torch.float32
        )
        exact = every.float()[:, None].expand(256, 16)
        torch.testing.assert_close(out, exact, rtol=0, atol=0, equal_nan=True)


def test_fast_sums() -> None:
    a, b = operands(96, 64, 512)
    for recipe in RECIPES:
        scales = scales_of(recipe, 96, 64, 512)
        out = stream_k.gemm(a, b, scale_a=scales[0], scale_b=scales[1], use_fast_accum=True)
        assert worst_ratio(out, a, b, scales, recipe, fast=True) <= 1


def test_a_wrong_scale_shows() -> None:
    """What `test_every_element` would say of a kernel that takes the next row's scale, or the next block's."""
    a, b = operands(64, 96, 256)
    for recipe in ("rowwise", "blockwise"):
        scales = scales_of(recipe, 64, 96, 256)
        for dim in range(2):
            moved = scales[0].roll(1, dim) if scales[0].shape[dim] > 1 else scales[0] * 1.01
            out = stream_k.gemm(a, b, scale_a=moved, scale_b=scales[1], out_dtype=torch.float32)
            assert worst_ratio(out, a, b, scales, recipe) > (100 if target.interpreted() else 4)


def test_bias_activation_and_layouts() -> None:
    a, b = operands(48, 80, 384)
    bias = torch.randn(80, device=DEVICE)
    for recipe in RECIPES:
        scales = scales_of(recipe, 48, 80, 384)
        given = {"scale_a": scales[0], "scale_b": scales[1], "out_dtype": torch.float32}
        plain = stream_k.gemm(a, b, **given)
        done = stream_k.gemm(a, b, bias=bias, activation="relu", **given)
        assert torch.allclose(done, torch.relu(plain + bias), rtol=1e-5, atol=1e-4)
        # Rows of B one behind another; every second row of A; scales that lie transposed.
        wide = torch.zeros(96, 384, device=DEVICE).to(E4M3)
        wide[::2] = a
        turned = {
            **given,
            "scale_a": scales[0].t().contiguous().t(),
            "scale_b": scales[1].t().contiguous().t(),
        }
        if scales[0].ndim == 2:
            assert torch.equal(stream_k.gemm(wide[::2], b.contiguous(), **turned), plain)


def test_tiles_that_are_split() -> None:
    M, N, K = 100, 150, 512
    a, b = operands(M, N, K)
    for recipe in RECIPES:
        scales = scales_of(recipe, M, N, K)
        rules = choose_scaled("gemm", M, N, K, 1, a.device, Scheme(recipe, False), 0)
        small = replace(
            rules, placement="after", block_m=64, block_n=64, block_k=64, subtiles=1, num_programs=0
        )
        for split in ("none", "stream_k", "separate"):
            config = replace(small, split=split)
            out = stream_k.gemm(
                a, b, scale_a=scales[0], scale_b=scales[1], out_dtype=torch.float32, config=config
            )
            assert worst_ratio(out, a, b, scales, recipe) <= 1


def test_three_dimensions() -> None:
    a, b = operands(12, 40, 128)
    scales = scales_of("rowwise", 12, 40, 128)
    flat = stream_k.gemm(a, b, scale_a=scales[0], scale_b=scales[1])
    deep = stream_k.gemm(a.view(3, 4, 128), b, scale_a=scales[0].view(3, 4, 1), scale_b=scales[1])
    assert torch.equal(deep.view(12, 40), flat)


def test_compiled() -> None:
    a, b = operands(16, 32, 128)
    scales = scales_of("rowwise", 16, 32, 128)

    def call(x: torch.Tensor, y: torch.Tensor, of_x: torch.Tensor, of_y: torch.Tensor) -> torch.Tensor:
        return stream_k.gemm(x, y, scale_a=of_x, scale_b=of_y, out_dtype=torch.float32) + 1

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(a, b, *scales), call(a, b, *scales))


@pytest.mark.parametrize("recipe", RECIPES)
def test_rows_in_every_batch(recipe: str) -> None:
    M, N, K = 70, 64, 512
    # Of every magnitude, so that fp32 can't hold their sums.
    a, b = (torch.exp2(torch.rand(rows, K, device=DEVICE) * 17 - 9).to(E4M3) for rows in (M, N))
    b = b.t()
    scales = scales_of(recipe, M, N, K)
    for dtype in (torch.bfloat16, torch.float32):
        whole = None
        with batch_invariant():
            for rows in (slice(70), slice(33), slice(16), slice(1), slice(5, 70), slice(69, 70)):
                of_a = scales[0] if recipe == "tensorwise" else scales[0][rows]
                out = stream_k.gemm(a[rows], b, scale_a=of_a, scale_b=scales[1], out_dtype=dtype)
                whole = out if whole is None else whole
                assert torch.equal(out, whole[rows]), (rows, dtype)


def test_nothing_and_zeros() -> None:
    a, b = operands(4, 8, 128)
    one = torch.ones((), device=DEVICE)
    assert stream_k.gemm(a[:0], b, scale_a=one, scale_b=one).shape == (0, 8)
    assert not stream_k.gemm(a, b, scale_a=one * 0, scale_b=one).any()
    without = stream_k.gemm(a[:, :0], b[:0], scale_a=one, scale_b=one, out_dtype=torch.float32)
    assert without.shape == (4, 8)
    assert not without.any()


def test_refusals() -> None:
    a, b = operands(8, 16, 256)
    ones = scales_of("rowwise", 8, 16, 256)
    wide = a.float()
    for error, word, args, more in (
        (TypeError, "with scale_a and scale_b", (a, b), {}),
        (TypeError, "float8_e4m3fn", (wide, b.float()), {"scale_a": ones[0], "scale_b": ones[1]}),
        (ValueError, "come together", (a, b), {"scale_a": ones[0]}),
        (ValueError, "go with", (wide, b.float()), {"out_dtype": torch.float32}),
        (
            TypeError,
            "out_dtype is",
            (a, b),
            {"scale_a": ones[0], "scale_b": ones[1], "out_dtype": torch.int8},
        ),
        (TypeError, "scale_a has dtype", (a, b), {"scale_a": ones[0].half(), "scale_b": ones[1]}),
        (
            ValueError,
            r"(8, 1) with one or (1, 16), and (8, 2) with (2, 1)",
            (a, b),
            {"scale_a": ones[0], "scale_b": ones[1].t()},
        ),
        (
            ValueError,
            "has no gradient",
            (a, b),
            {"scale_a": ones[0].clone().requires_grad_(), "scale_b": ones[1]},
        ),
    ):
        with pytest.raises(error) as caught:
            stream_k.gemm(*args, **more)
        assert word in str(caught.value), (word, str(caught.value))
    blocks = scales_of("blockwise", 8, 16, 256)
    config = replace(choose_scaled("gemm", 8, 16, 256, 1, a.device, Scheme("rowwise", False), 0), block_k=256)
    with pytest.raises(ValueError, match="at most 128 are allowed"):
        stream_k.gemm(a, b, scale_a=blocks[0], scale_b=blocks[1], config=config)

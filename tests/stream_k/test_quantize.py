"""`quantize`: the bits of PyTorch's own conversion of x / scale, by recipe, and what becomes of odd values; the same
behind SwiGLU and RMSNorm."""

import itertools
from functools import partial
from typing import Any

import pytest
import torch

from pyrocshmem import batch_invariant, stream_k, target
from pyrocshmem.elements import float8
from pyrocshmem.stream_k.nn.pointwise import swiglu

TIER = 1
DEVICE = target.device()
RECIPES = ("tensorwise", "rowwise", "blockwise", "blockwise_weight")
SHAPES = ((1, 1), (5, 300), (130, 257), (64, 2048))


def groups(x: torch.Tensor, recipe: str) -> tuple[int, int]:
    """Rows and columns of a group."""
    M, K = x.shape
    return {"tensorwise": (M, K), "rowwise": (1, K), "blockwise": (1, 128), "blockwise_weight": (128, 128)}[
        recipe
    ]


def expected(x: torch.Tensor, recipe: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(bits, scales) by PyTorch's ops."""
    (M, K), (height, width), most = x.shape, groups(x, recipe), torch.finfo(dtype).max
    padded = torch.nn.functional.pad(x.float(), (0, -K % width, 0, -M % height))
    largest = padded.view(-(-M // height), height, -(-K // width), width).abs().amax((1, 3))
    # By a tensor: a GPU would multiply by a number's reciprocal.
    scales = torch.where(largest == 0, 1.0, largest / torch.full_like(largest, most))
    each = scales.repeat_interleave(height, 0)[:M].repeat_interleave(width, 1)[:, :K]
    bits = (x.float() / each).clamp(-most, most).to(dtype).view(torch.uint8)
    return bits, scales.view(()) if recipe == "tensorwise" else scales


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_bit(recipe: str) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    for kind, dtype, (M, K) in itertools.product(float8(), dtypes, SHAPES):
        magnitude = torch.exp2(torch.randint(-12, 12, (M, K), device=DEVICE).float())
        x = (torch.randn(M, K, device=DEVICE) * magnitude).to(dtype)
        x[0] = 0
        bits, scales = expected(x, recipe, kind)
        # Rows, and columns one behind another.
        for given in (x, x.t().contiguous().t()):
            q, found = stream_k.quantize(given, recipe, dtype=kind)
            assert torch.equal(found, scales), (M, K, dtype, kind)
            assert torch.equal(q.view(torch.uint8), bits), (M, K, dtype, kind)
        back = stream_k.dequantize(q, found)
        most = float(x.float().abs().max())
        assert torch.allclose(
            back, x.float(), rtol=2.0 ** (-3 if kind == float8()[0] else -2), atol=most * 2.0**-9
        )


@pytest.mark.parametrize(
    "exponent", [-149, -140, -127, -126, -65, -64, -63, -20, 0, 20, 63, 64, 65, 126, 127]
)
def test_quotients_are_rounded_as_division_rounds_them(exponent: int) -> None:
    """Any bits over scales of any size, and what lies at, just below and just above the middle of two numbers."""
    for kind, fraction in itertools.product(float8(), (1.0, 1.3333334)):
        if exponent < -126 and fraction > 1:
            continue  # subnormal
        scale = torch.ldexp(torch.full((), fraction), torch.tensor(exponent)).to(DEVICE)
        numbers = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(kind).float()
        numbers = numbers[numbers.isfinite()].sort().values
        middles = ((numbers[1:] + numbers[:-1]) / 2).view(torch.int32)
        around = [(middles + step).view(torch.float32) * scale for step in range(-2, 3)]
        anything = (
            torch.randint(-(1 << 31), 1 << 31, (1 << 12,), device=DEVICE).to(torch.int32).view(torch.float32)
        )
        odd = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan")], device=DEVICE)
        x = torch.cat((anything, odd, *around, numbers * scale))[None]
        most = torch.finfo(kind).max
        wanted = (x / scale).clamp(-most, most).to(kind)
        q, _ = stream_k.quantize(x, "tensorwise", dtype=kind, scale=scale)
        assert torch.equal(q.float().isnan(), wanted.float().isnan())
        number = ~wanted.float().isnan()
        assert torch.equal(q.view(torch.uint8)[number], wanted.view(torch.uint8)[number])


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shape", [(0, 256), (3, 0)], ids=str)
def test_nothing_and_back(recipe: str, shape: tuple[int, int]) -> None:
    back = stream_k.dequantize(*stream_k.quantize(torch.empty(shape, device=DEVICE), recipe), torch.float16)
    assert (back.shape, back.dtype) == (shape, torch.float16)


def test_a_known_scale_saturates() -> None:
    kind = float8()[0]
    most = torch.finfo(kind).max
    x = torch.tensor([[1.0, -3.0, 4 * most, -5 * most, float("inf"), 0.0]], device=DEVICE)
    q, scale = stream_k.quantize(x, "tensorwise", scale=torch.full((), 2.0, device=DEVICE))
    assert scale.item() == 2
    assert q.float().tolist() == [[0.5, -1.5, most, -most, most, 0.0]]


def test_odd_values_stay_in_their_group() -> None:
    x = torch.ones(3, 256, device=DEVICE)
    x[1, 3], x[2, 200] = float("nan"), float("inf")
    q, scales = stream_k.quantize(x, "blockwise")
    assert scales.isinf().tolist() == [[False, False], [True, False], [False, True]]
    for at, group in ((3, q[1, :128]), (72, q[2, 128:])):
        assert group.float().isnan().nonzero().tolist() == [[at]]
        assert group.float().nan_to_num(0).eq(0).all()
    others = torch.cat((q[0], q[1, 128:], q[2, :128])).float()
    assert (others == torch.finfo(q.dtype).max).all()


def test_nothing() -> None:
    x = torch.empty(0, 256, device=DEVICE)
    for recipe, shape in (("tensorwise", ()), ("rowwise", (0, 1)), ("blockwise", (0, 2))):
        q, scales = stream_k.quantize(x, recipe)
        assert (q.shape, tuple(scales.shape)) == ((0, 256), shape)


def test_products_of_what_is_quantized() -> None:
    """As exact as the recipe is: what is small beside another group's numbers is nearer in finer groups."""
    torch.manual_seed(1)
    x, weight = torch.randn(64, 512, device=DEVICE), torch.randn(96, 512, device=DEVICE)
    x[:, :128] *= 1e5
    weight[:, :128] = 0
    exact, errors = x.double() @ weight.double().t(), []
    for recipe in ("rowwise", "blockwise"):
        a, of_a = stream_k.quantize(x, recipe)
        b, of_b = stream_k.quantize(weight, "rowwise" if recipe == "rowwise" else "blockwise_weight")
        out = stream_k.gemm(a, b.t(), scale_a=of_a, scale_b=of_b.t(), out_dtype=torch.float32)
        errors.append(float((out.double() - exact).norm() / exact.norm()))
    assert errors[1] < 0.06 < errors[0]


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
def test_behind_swiglu(recipe: str) -> None:
    """The bits of `quantize` of what the kernel of that gives."""
    for dtype, (M, K) in itertools.product((torch.float16, torch.bfloat16, torch.float32), SHAPES):
        product = torch.randn(M, 2 * K, device=DEVICE).to(dtype) * 3
        with batch_invariant():  # by the kernel on CPUs, too
            inner = swiglu(product)
        scale = torch.full((), 0.01, device=DEVICE) if recipe == "tensorwise" else None
        expected, of_expected = stream_k.quantize(inner, recipe, scale=scale)
        for given in (product, product.t().contiguous().t()):
            q, found = stream_k.quantize_swiglu(given, recipe, scale=scale)
            assert torch.equal(found, of_expected)
            assert torch.equal(q.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
def test_behind_a_norm(recipe: Any) -> None:
    """The bits of `quantize` of the norm that comes with it, which is right; with and without a residual."""
    for dtype, shape in itertools.product(
        (torch.float16, torch.bfloat16, torch.float32), (*SHAPES, (2, 3, 140))
    ):
        x, residual = (torch.randn(shape, device=DEVICE).to(dtype) for _ in "ab")
        weight = torch.randn(shape[-1], device=DEVICE)
        scale = torch.full((), 0.01, device=DEVICE) if recipe == "tensorwise" else None
        for added, given in ((None, x), (residual, x.mT.contiguous().mT)):
            call = partial(
                stream_k.quantize_rms_norm, given, weight, 1e-5, quantize=recipe, quantize_scale=scale
            )
            found, same = call(residual=added, keep_norm=True), call(residual=added)
            total = x if added is None else (x.float() + residual.float()).to(dtype)
            assert torch.equal(found.total, total)
            assert found.norm is not None
            rows = found.norm.view(-1, shape[-1])
            exact = torch.nn.functional.rms_norm(total.double(), shape[-1:], weight.double(), 1e-5)
            unit = torch.finfo(dtype).eps / 2 + 1e-6
            assert ((found.norm.double() - exact).abs() <= unit * exact.abs() + 1e-7).all()
            q, scales = stream_k.quantize(rows, recipe, scale=scale)
            for each in (found, same):
                assert torch.equal(each.quantized.view(torch.uint8), q.view(torch.uint8).view(shape))
                assert torch.equal(each.scale.flatten(), scales.flatten())
            assert same.norm is None


def test_a_norm_of_odd_rows() -> None:
    """As `quantize` has them: NaN, infinities, zeros, none."""
    x, weight = torch.randn(6, 300, device=DEVICE), torch.randn(300, device=DEVICE)
    x[1], x[2, 7], x[3, 200], weight[40] = 0.0, float("nan"), float("inf"), 0.0
    for recipe, eps in itertools.product(("rowwise", "blockwise"), (0.0, 1e-5)):
        found = stream_k.quantize_rms_norm(x, weight, eps, quantize=recipe, keep_norm=True)  # type: ignore[arg-type]
        assert found.norm is not None
        q, scales = stream_k.quantize(found.norm, recipe)
        assert torch.equal(found.scale, scales)
        assert torch.equal(found.quantized.float().nan_to_num(1e9), q.float().nan_to_num(1e9))
    assert stream_k.quantize_rms_norm(x[:0], weight, 0.0, quantize="rowwise").scale.shape == (0, 1)


def test_a_row_has_the_same_bits_in_every_batch() -> None:
    x, weight = torch.randn(5000, 2100, device=DEVICE), torch.randn(2100, device=DEVICE)
    with batch_invariant():
        rows = [stream_k.quantize_rms_norm(x[:n], weight, 1e-5, quantize="rowwise") for n in (1, 100, 5000)]
    for found in rows[1:]:
        assert torch.equal(found.quantized[:1].view(torch.uint8), rows[0].quantized.view(torch.uint8))
        assert torch.equal(found.scale[:1], rows[0].scale)


def test_refusals() -> None:
    x = torch.ones(4, 128, device=DEVICE)
    one = torch.ones((), device=DEVICE)
    for error, word, args, more in (
        (TypeError, "dtype", (x.int(), "rowwise"), {}),
        (ValueError, "3 dimensions", (x.view(2, 2, 128), "rowwise"), {}),
        (ValueError, "allowed are tensorwise", (x, "columnwise"), {}),
        (TypeError, "float8", (x, "rowwise"), {"dtype": torch.int8}),
        (ValueError, "with 'tensorwise'", (x, "rowwise"), {"scale": one}),
        (ValueError, "one element", (x, "tensorwise"), {"scale": torch.ones(2, device=DEVICE)}),
    ):
        with pytest.raises(error) as caught:
            stream_k.quantize(*args, **more)
        assert word in str(caught.value), (word, str(caught.value))
    with pytest.raises(ValueError, match="needs a scale"):
        stream_k.quantize_swiglu(x, "tensorwise")
    with pytest.raises(ValueError, match="as many columns"):
        stream_k.quantize_swiglu(x[:, :3], "rowwise")
    weight = torch.ones(128, device=DEVICE)
    with pytest.raises(ValueError, match="a recipe is needed"):
        stream_k.quantize_rms_norm(x, weight, 0.0, quantize=None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no gradient"):
        stream_k.quantize_rms_norm(x, weight.requires_grad_(), 0.0, quantize="rowwise")

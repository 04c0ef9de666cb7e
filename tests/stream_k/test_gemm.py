"""`stream_k.gemm`: shapes, layouts, biases, activations, special values and errors, held to the elementwise bound.

Outputs start as NaN between canaries; operands lie between NaN. Schedules are forced in test_gemm_schedules.py.
"""

import math

import pytest
import torch

from pyrocshmem import stream_k
from tests.stream_k.products import (
    ACTIVATIONS,
    DTYPES,
    LAYOUTS,
    ON_CPU,
    OUT_LAYOUTS,
    Frame,
    check_product,
    device,
    laid_out,
    random,
    small_config,
)

TIER = 1
# The interpreter computes with NumPy, which tells of every infinity.
pytestmark = [pytest.mark.num_ranks(1)]

SHAPES = [
    (1, 1, 1), (1, 1, 64), (1, 64, 1), (64, 1, 1), (1, 130, 97), (131, 1, 70), (2, 3, 5), (7, 13, 31), (16, 16, 16),
    (64, 64, 64), (96, 32, 128), (97, 193, 131), (128, 64, 192), (65, 127, 33),
]  # fmt: skip
EMPTY = [(0, 5, 3), (5, 0, 3), (5, 3, 0), (0, 0, 0), (0, 5, 0), (1, 1, 0), (70, 40, 0)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_shapes(dtype: torch.dtype) -> None:
    for M, N, K in SHAPES + ([] if ON_CPU else [(1024, 1536, 512), (4096, 1000, 777)]):
        a, b, frame = random(M, K, dtype), random(K, N, dtype), Frame(M, N, dtype)
        assert stream_k.gemm(a, b, out=frame.out) is frame.out
        check_product(frame.out, a, b)
        frame.check()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sizes_of_zero(dtype: torch.dtype) -> None:
    """K = 0 is a sum of nothing; an output without elements is returned as it is."""
    for M, N, K in EMPTY:
        bias = random(1, N, torch.float32)[0]
        frame = Frame(M, N, dtype, "padded")
        stream_k.gemm(random(M, K, dtype), random(K, N, dtype), out=frame.out)
        assert torch.equal(frame.out, torch.zeros_like(frame.out))
        stream_k.gemm(random(M, K, dtype), random(K, N, dtype), bias=bias, activation="silu", out=frame.out)
        check_product(frame.out, random(M, K, dtype), random(K, N, dtype), bias, "silu")
        frame.check()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str) -> None:
    """Every layout of A with every one of B, outputs of all layouts in turn."""
    dtype = (torch.float16, torch.float32)[LAYOUTS.index(layout) % 2]
    M, N, K = 70, 49, 72
    for number, other in enumerate(LAYOUTS):
        a, b = laid_out(random(M, K, dtype), layout), laid_out(random(K, N, dtype), other)
        frame = Frame(M, N, dtype, OUT_LAYOUTS[number % len(OUT_LAYOUTS)])
        stream_k.gemm(a, b, out=frame.out, config=small_config())
        check_product(frame.out, a, b)
        frame.check()


@pytest.mark.parametrize("layout", ["row", "column", "misaligned"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tiles_of_few_rows(dtype: torch.dtype, layout: str) -> None:
    """Those that are multiplied transposed, whole, in parts and in several rows, and narrower ones, which are not."""
    K, N = 200, 150
    b = laid_out(random(K, N, dtype), layout)
    for block_m, block_n, M, split in (
        (16, 64, 5, "none"),
        (16, 64, 16, "stream_k"),
        (32, 128, 37, "split_k"),
        (32, 64, 29, "none"),
        (16, 32, 3, "stream_k"),
    ):
        tile = {"block_m": block_m, "block_n": block_n, "subtiles": 1, "split": split}
        a, frame = laid_out(random(M, K, dtype), layout), Frame(M, N, dtype)
        stream_k.gemm(a, b, out=frame.out, config=small_config(**tile, block_k=16, num_programs=5))
        check_product(frame.out, a, b)
        frame.check()


@pytest.mark.parametrize("layout", OUT_LAYOUTS)
def test_outputs(layout: str) -> None:
    """Whole and cut tiles at every edge; nothing around the output is written, split or not."""
    for number, (M, N) in enumerate(((64, 64), (97, 61), (33, 80))):
        dtype = DTYPES[(number + OUT_LAYOUTS.index(layout)) % 3]
        frame = Frame(M, N, dtype, layout)
        a, b = random(M, 300, dtype), random(300, N, dtype)
        for split in ("none", "stream_k"):
            frame.poison()
            stream_k.gemm(a, b, out=frame.out, config=small_config(split=split, num_programs=5))
            check_product(frame.out, a, b)
            frame.check()


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bias_and_activation(activation: str, dtype: torch.dtype) -> None:
    M, N, K = 37, 75, 40
    a, b = random(M, K, dtype), random(K, N, dtype)
    for bias in (
        None,
        random(1, N, dtype)[0],
        random(1, N, torch.float32)[0],
        random(1, N + 1, dtype)[0, 1:],
    ):
        frame = Frame(M, N, dtype, "padded")
        stream_k.gemm(a, b, bias=bias, activation=activation, out=frame.out)
        check_product(frame.out, a, b, bias, activation)
        frame.check()


def test_a_new_output_is_the_callers() -> None:
    a, b = random(33, 40, torch.float32), random(40, 33, torch.float32)
    first = stream_k.gemm(a, b)
    kept = first.clone()
    second = stream_k.gemm(b, a)
    assert first.data_ptr() != second.data_ptr()
    assert torch.equal(first, kept)
    assert first.is_contiguous()


def test_data_may_change_between_calls() -> None:
    """The plan of a call is kept; nothing of its data is."""
    a, b, out = (torch.empty(40, 40, dtype=torch.float16, device=device()) for _ in range(3))
    for _ in range(4):
        a.copy_(random(40, 40, torch.float16))
        b.copy_(random(40, 40, torch.float16))
        out.fill_(math.nan)
        stream_k.gemm(a, b, out=out)
        check_product(out, a, b)
        moved = random(40, 40, torch.float16)
        check_product(stream_k.gemm(moved, b), moved, b)


@pytest.mark.gpu
def test_tf32_only_when_asked() -> None:
    a, b = random(256, 1024, torch.float32), random(1024, 256, torch.float32)
    check_product(stream_k.gemm(a, b), a, b)
    rounded = stream_k.gemm(a, b, allow_tf32=True)
    error = (rounded.double() - a.double() @ b.double()).abs().max()
    # tf32 keeps 10 bits of mantissa: far worse than fp32, and yet right.
    assert 1e-4 < error < 1.0


def specials(dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Operands in which rows of A, and a column of B, hold every special value."""
    info = torch.finfo(dtype)
    a, b = random(40, 48, dtype, seed), random(48, 40, dtype, seed + 1)
    a[0, 5] = math.nan
    a[1, 7] = math.inf
    a[2, 9] = -math.inf
    a[3, :2] = torch.tensor([math.inf, -math.inf])
    a[4] = -0.0
    a[5] = info.smallest_normal * info.eps
    # fp16 overflows when it is rounded; a sum of fp32 that overflows on its way depends on the order.
    a[6] = info.max if dtype == torch.float16 else info.max / 2**12
    b[11, 3] = math.inf
    b[:, 4] = 0.0
    a[7] = 0.0
    b[:, 6] = info.smallest_normal / 2
    return a, b


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_special_values(dtype: torch.dtype, activation: str) -> None:
    """Fault 20: NaN and infinities in the elements where torch has them, everything else inside the bound."""
    a, b = specials(dtype, 3)
    product = a.float() @ b.float()
    # In float64, because torch's vectorized fp32 gelu makes NaN of an infinity.
    expected = ACTIVATIONS[activation](product.double()).to(dtype)
    out = stream_k.gemm(a, b, activation=activation)
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(out.isinf() * out.sign(), expected.isinf() * expected.sign())
    assert expected.isnan().any()
    assert expected.isinf().any()
    if activation == "none":
        check_product(out, a, b, baseline=expected)


def test_wrong_dtypes() -> None:
    """Fault 21: TypeError with the list of what is allowed."""
    a = random(8, 8, torch.float32)
    allowed = "allowed are torch.float16, torch.bfloat16, torch.float32"
    for dtype in (torch.float64, torch.int32, torch.complex64, torch.bool, torch.float8_e4m3fn):
        more = ", and 8-bit ones with scale_a and scale_b" if dtype == torch.float8_e4m3fn else ""
        with pytest.raises(TypeError, match=f"{allowed}{more}$") as caught:
            stream_k.gemm(a.to(dtype), a.to(dtype))
        assert str(dtype) in str(caught.value)
    with pytest.raises(TypeError, match=f"a is torch.float32 and b is torch.float16; {allowed}, one"):
        stream_k.gemm(a, a.half())
    with pytest.raises(TypeError, match=r"out has dtype torch.float16, allowed is torch.float32, "):
        stream_k.gemm(a, a, out=a.half())
    with pytest.raises(TypeError, match=r"bias has dtype torch.float16, allowed are torch.float32$"):
        stream_k.gemm(a, a, bias=a[0].half())
    with pytest.raises(
        TypeError, match=r"bias has dtype torch.bfloat16, allowed are torch.float16, torch.float32$"
    ):
        stream_k.gemm(a.half(), a.half(), bias=a[0].bfloat16())
    with pytest.raises(TypeError, match="a is a list"):
        stream_k.gemm([[1.0]], a)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="b is a NoneType"):
        stream_k.gemm(a, None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"workspace is a int, a stream_k.Workspace or None is needed"):
        stream_k.gemm(a, a, workspace=3)  # type: ignore[arg-type]
    for name in ("bias", "out"):
        with pytest.raises(TypeError, match=f"{name} is a list"):
            stream_k.gemm(a, a, **{name: [0.0] * 8})  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:.*(beta|prototype):UserWarning")
def test_tensors_without_strides() -> None:
    a = random(8, 8, torch.float32)
    for packed in (a.to_sparse(), a.to_sparse_csr(), torch.nested.nested_tensor([a, a])):
        for given in ({"a": packed, "b": a}, {"a": a, "b": packed}, {"a": a, "b": a, "out": packed}):
            with pytest.raises(
                TypeError, match=r"a tensor is (nested|of layout .*); dense ones .* are needed"
            ):
                stream_k.gemm(**given)


def test_wrong_shapes() -> None:
    """ValueError that names what came and what is needed; a given output stays as it was."""
    a, b, out = random(8, 6, torch.float32), random(6, 4, torch.float32), random(8, 4, torch.float32)
    before = out.clone()
    cases: list[tuple[str, tuple[torch.Tensor, ...], dict[str, object]]] = [
        (r"inner sizes 6 and 5 differ", (a, b[:5]), {}),
        (r"a has 1 dimensions, shape \(6,\)", (a[0], b), {}),
        (r"b has 3 dimensions", (a, b[None]), {}),
        (r"out has shape \(4, 8\), \(8, 4\) is needed", (a, b), {"out": out.t()}),
        (r"bias has shape \(8,\)", (a, b), {"bias": a[:, 0].contiguous()}),
        (r"strides \(2,\); contiguous \(4,\) is needed", (a, b), {"bias": out.flatten()[:8:2]}),
        (r"share a place", (a, b), {"out": out[:1].expand(8, 4)}),
        (r"share a place", (a, b), {"out": out.flatten().as_strided((8, 4), (2, 1))}),
        (r"activation is 'tanh', allowed are none, relu, gelu, silu", (a, b), {"activation": "tanh"}),
    ]
    for text, operands, more in cases:
        with pytest.raises(ValueError, match=text):
            stream_k.gemm(*operands, **{"out": out, **more})  # type: ignore[arg-type]
    assert torch.equal(out, before)


@pytest.mark.parametrize("name", ["a", "b", "bias"])
def test_output_over_an_operand(name: str) -> None:
    """Tiles are written while others are still read: refused; side by side in one buffer they are welcome."""
    buffer = random(32, 64, torch.float32)
    a, b, out = buffer[:, :32], random(32, 32, torch.float32), buffer[:, 32:]
    stream_k.gemm(a, b, out=out)
    check_product(out, a, b)
    operands = {"a": a, "b": b, "bias": b[3]}
    place = {"a": buffer[:, 1:33], "b": b, "bias": b}[name]
    if name == "bias":
        operands["b"] = random(32, 32, torch.float32)
    kept = place.clone()
    with pytest.raises(ValueError, match=f"out shares memory with {name}"):
        stream_k.gemm(operands["a"], operands["b"], bias=operands["bias"], out=place)
    assert torch.equal(place, kept)


@pytest.mark.parametrize("name", ["a", "b", "bias", "out"])
def test_the_negative_bit(name: str) -> None:
    """Memory that holds the values with the other sign is refused, where a call like it was planned before, too."""
    tensors = {
        "a": random(8, 8, torch.float32),
        "b": random(8, 8, torch.float32),
        "bias": random(1, 8, torch.float32)[0],
        "out": random(8, 8, torch.float32),
    }
    negative = torch.view_as_complex(torch.stack((tensors[name], tensors[name]), -1)).conj().imag
    assert negative.is_neg()
    tensors[name] = negative.resolve_neg()
    stream_k.gemm(**tensors)
    tensors[name] = torch._neg_view(tensors[name])
    with pytest.raises(ValueError, match=rf"{name} has PyTorch's negative bit; give {name}.resolve_neg\(\)"):
        stream_k.gemm(**tensors)


def test_autograd_knows_what_is_written() -> None:
    """A tensor that was saved for a gradient and then written, and one that needs a gradient itself."""
    a, b = random(8, 16, torch.float32), random(16, 8, torch.float32)
    x = random(8, 8, torch.float32).requires_grad_()
    y = x.exp()
    with torch.no_grad():
        stream_k.gemm(a, b, out=y)
        stream_k.gemm(a, b, out=x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    with pytest.raises(ValueError, match="out requires a gradient"):
        stream_k.gemm(a, b, out=x)
    with torch.inference_mode():
        stream_k.gemm(a, b, out=torch.empty_like(a[:, :8]))


def test_gradients_with_the_negative_bit() -> None:
    a, b = random(4, 6, torch.float32).requires_grad_(), random(6, 5, torch.float32)
    g = random(4, 5, torch.float32)
    ways = [torch.autograd.grad(stream_k.gemm(a, b), a, each)[0] for each in (torch._neg_view(g), -g)]
    assert torch.equal(*ways)

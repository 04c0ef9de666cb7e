"""The element-wise kernels of the layers against float64, forward and backward; and that layers use them on GPUs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch.nn.functional import silu

from pyrocshmem import target
from pyrocshmem.calls import remembered
from pyrocshmem.stream_k import nn as parallel
from pyrocshmem.stream_k.nn import pointwise
from pyrocshmem.stream_k.nn.pointwise import rotated_heads, swiglu
from tests.nn.models import HEAD_DIM, HEADS, HIDDEN, INTERMEDIATE, KV_HEADS, THETA

TIER = 1
DEVICE = target.device(0)
DTYPES = (torch.float16, torch.float32) + (() if target.interpreted() else (torch.bfloat16,))
# Of fp32 terms: some ten roundings, and an exponential as GPUs approximate it.
SLACK = 2**-18
Tensors = tuple[torch.Tensor, ...]


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Other data at each call."""
    return torch.randn(*shape).to(dtype).to(DEVICE)


def inside(x: torch.Tensor) -> torch.Tensor:
    """The values of `x` as a part of wider rows, NaN on both sides."""
    frame = x.new_full((*x.shape[:-1], x.shape[-1] + 5), torch.nan)
    view = frame[..., 2:-3]
    return view.copy_(x)


def wrong(found: Tensors, exact: Tensors, terms: Tensors) -> list[int]:
    """Of each result, how many elements are not `exact`, to one rounding and SLACK of `terms`, what was added up."""
    counts = []
    for each, wanted, sizes in zip(found, exact, terms, strict=True):
        assert each.shape == wanted.shape
        facts = torch.finfo(each.dtype)
        allowed = facts.eps / 2 * wanted.abs() + facts.smallest_normal * facts.eps + SLACK * sizes
        counts.append(int((~((each.double() - wanted).abs() <= allowed)).sum()))
    return counts


def derived(function: Callable[..., Any], x: torch.Tensor, grads: Tensors) -> tuple[Tensors, torch.Tensor]:
    """(the results of `function`, the gradient of `x`)."""
    x = x.detach().requires_grad_()
    made = function(x)
    made = made if isinstance(made, tuple) else (made,)
    torch.autograd.backward(made, [grad.to(each.dtype) for each, grad in zip(made, grads, strict=True)])
    assert x.grad is not None
    return tuple(each.detach() for each in made), x.grad


def swiglu_errors(product: torch.Tensor, g: torch.Tensor) -> list[int]:
    (found,), grad = derived(swiglu, product, (g,))
    (exact,), exact_grad = derived(swiglu, product.double(), (g,))
    gate, up = product.double().chunk(2, -1)
    spread = g.double().abs() * (1 + gate.abs())
    assert found.is_contiguous()
    assert torch.equal(found, swiglu(product)), "without autograd"
    return wrong(
        (found, grad),
        (exact, exact_grad),
        (exact.abs(), torch.cat((spread * up.abs(), spread * gate.abs()), -1)),
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_swiglu(dtype: torch.dtype, kernels: list[str]) -> None:
    """Widths on both sides of a block, odd ones; no rows, no columns; rows inside others; gradients of any strides."""
    for shape in ((1, 2), (3, 5), (2, 3, 34), (2, 1023), (1, 1025), (7, 64), (0, 6), (4, 0)):
        g = random(*shape, dtype=dtype)
        product = 4 * random(*shape[:-1], 2 * shape[-1], dtype=dtype)
        for x, upstream in ((product, g), (inside(product), inside(g)), (product, g.mT.contiguous().mT)):
            assert swiglu_errors(x, upstream) == [0, 0], shape
        assert swiglu_errors(product, g.new_ones(()).expand_as(g)) == [0, 0], shape
    assert set(kernels) == {"swiglu_kernel", "swiglu_backward_kernel"}


def test_swiglu_far_out(kernels: list[str]) -> None:
    """Where the exponential is infinite or nothing; NaN stays."""
    gate = torch.tensor([-1e30, -200.0, -100.0, 0.0, 100.0, 1e30, torch.inf, torch.nan], device=DEVICE)
    product = torch.cat((gate, torch.ones_like(gate)))[None]
    (found,), grad = derived(swiglu, product, (torch.ones_like(gate)[None],))
    of_gate, of_up = grad.chunk(2, -1)
    wanted = torch.tensor([0.0, 0.0, -100 * 3.8e-44, 0.0, 100.0, 1e30, torch.inf, torch.nan], device=DEVICE)
    slopes = torch.tensor([0.0, 0.0, 0.0, 0.5, 1.0, 1.0], device=DEVICE)
    torch.testing.assert_close(found[0], wanted, rtol=1e-6, atol=1e-37, equal_nan=True)
    torch.testing.assert_close(of_up[0], wanted, rtol=1e-6, atol=1e-37, equal_nan=True)
    torch.testing.assert_close(of_gate[0, :6], slopes, rtol=1e-6, atol=1e-37)
    assert kernels == ["swiglu_kernel", "swiglu_backward_kernel"]


def rotation_errors(
    heads: torch.Tensor, G: int, turn: tuple[torch.Tensor, torch.Tensor], grads: Tensors
) -> list[int]:
    H = heads.shape[2] - 2 * G
    found, grad = derived(lambda x: rotated_heads(x, turn, G), heads, grads)
    wide = (turn[0].double(), turn[1].double())
    exact, exact_grad = derived(lambda x: rotated_heads(x, wide, G), heads.double(), grads)
    # What the halves of a head and those of its gradient add up to; v and its gradient are exact.
    sizes = [each.double().abs() for each in (*pointwise._split(heads, G)[:2], *grads[:2])]
    q, k, dq, dk = ((sum(each.chunk(2, -1))).repeat(1, 1, 1, 2) for each in sizes)  # type: ignore[call-overload]
    terms = torch.cat((dq, dk, torch.zeros_like(dk)), 1).transpose(1, 2)
    alone = rotated_heads(heads, turn, G)
    assert all(torch.equal(*pair) for pair in zip(found, alone, strict=True)), "without autograd"
    assert found[2].data_ptr() == heads[:, :, H + G :].data_ptr()
    assert torch.equal(grad[:, :, H + G :], grads[2].transpose(1, 2))
    assert found[0].transpose(1, 2).stride(1) == (H + G) * heads.shape[3]
    return wrong((*found[:2], grad), (*exact[:2], exact_grad), (q, k, terms))


def turn_of(S: int, D: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Not of angles: that the sines stay with the cosines of theirs shows all the same, and S = 1 is no identity."""
    return random(S, D // 2), random(S, D // 2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotation(dtype: torch.dtype, kernels: list[str]) -> None:
    """Heads of all sizes; several sequences; one token; none; gradients as attention lays them out, and otherwise."""
    for B, S, H, G, D in (
        (1, 1, 1, 1, 2), (2, 3, 4, 2, 6), (3, 1, 2, 1, 80), (1, 5, 3, 3, 128), (2, 19, 2, 1, 64), (2, 0, 2, 1, 4),
        (0, 3, 2, 1, 4),
    ):  # fmt: skip
        turn, heads = turn_of(S, D), random(B, S, H + 2 * G, D, dtype=dtype)
        grads = tuple(random(B, n, S, D, dtype=dtype) for n in (H, G, G))
        by_token = tuple(each.transpose(1, 2).contiguous().transpose(1, 2) for each in grads)
        by_feature = tuple(each.mT.contiguous().mT for each in grads)
        as_heads = pointwise._split(torch.cat(grads, 1).transpose(1, 2).contiguous(), G)
        mixed = (by_feature[0], by_token[1], inside(grads[2]))
        for mine in (grads, by_token, as_heads, mixed):
            assert rotation_errors(heads, G, turn, mine) == [0, 0, 0], (B, S, H, G, D)
    assert set(kernels) == {"rotate_kernel"}


def test_blocks_follow_one_another(kernels: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """More blocks than programs, which then do several."""
    monkeypatch.setattr(pointwise, "_SHARE", 1)
    monkeypatch.setattr(pointwise, "num_sms", lambda device: 3)
    remembered.forget()
    grids = []
    launch = pointwise.Launch
    monkeypatch.setattr(
        pointwise,
        "Launch",
        lambda kernel, grid, *more, **o: grids.append(grid) or launch(kernel, grid, *more, **o),
    )
    assert swiglu_errors(random(5, 2 * 1030), random(5, 1030)) == [0, 0]
    grads = tuple(random(2, n, 31, 128) for n in (3, 2, 2))
    assert rotation_errors(random(2, 31, 7, 128), 2, turn_of(31, 128), grads) == [0, 0, 0]
    assert grids == [3] * 4
    remembered.forget()


@pytest.mark.cpu
def test_a_wrong_kernel_is_seen(kernels: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: without the last rounding to nearest, and with sines of the next token."""
    cut = pointwise.rounded

    @triton.jit
    def cut_off(value, DTYPE: tl.constexpr):
        return (value * 0.9990234375).to(DTYPE)

    monkeypatch.setattr(pointwise, "rounded", cut_off)
    bad = swiglu_errors(random(9, 64, dtype=torch.float16), random(9, 32, dtype=torch.float16))
    assert min(bad) > 50
    monkeypatch.setattr(pointwise, "rounded", cut)
    turn, heads = turn_of(4, 6), random(1, 4, 3, 6)
    grads = tuple(random(1, 1, 4, 6) for _ in range(3))
    rotated = pointwise._rotate

    def shifted(q: Any, k: Any, v: Any, out: Any, turn: Any, direction: int) -> None:
        rotated(q, k, v, out, (turn[0], turn[1].roll(1, 0)), direction)

    monkeypatch.setattr(pointwise, "_rotate", shifted)
    assert min(rotation_errors(heads, 1, turn, grads)) > 0
    assert kernels


def test_nothing_is_differentiated_twice(kernels: list[str]) -> None:
    product = random(2, 6).requires_grad_()
    (grad,) = torch.autograd.grad(swiglu(product).square().sum(), product, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
    assert kernels


def stepped(layer: torch.nn.Module, call: Callable[..., torch.Tensor], x: torch.Tensor) -> Tensors:
    """The output, and the gradients of the input and of all weights."""
    (y,), grad = derived(call, x, (torch.linspace(-1, 1, x.numel(), device=DEVICE).view(x.shape),))
    grads = [each.grad for each in layer.parameters()]
    layer.zero_grad()
    return y, grad, *(each for each in grads if each is not None)


def layers(dtype: torch.dtype) -> list[tuple[torch.nn.Module, Callable[..., torch.Tensor]]]:
    """Each, and what calls it on [6, HIDDEN]."""
    torch.manual_seed(8)
    options: dict[str, Any] = {"device": DEVICE, "dtype": dtype}
    mlp = parallel.ParallelMLP(HIDDEN, INTERMEDIATE, **options)
    attention = parallel.ParallelAttention(HIDDEN, HEADS, KV_HEADS, HEAD_DIM, rope_theta=THETA, **options)
    return [(mlp, mlp), (attention, lambda x: attention(x, batch_size=2))]


USED = ["swiglu_kernel", "swiglu_backward_kernel", "rotate_kernel", "rotate_kernel"]


def test_layers(kernels: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With the kernels and without; of the joined product's halves, gate is the one that is bent."""
    x = random(6, HIDDEN)
    found = [stepped(*each, x) for each in layers(torch.float32)]
    assert kernels == USED
    monkeypatch.setattr(pointwise, "_by_kernel", lambda x: False)
    wanted = [stepped(*each, x) for each in layers(torch.float32)]
    assert kernels == USED
    for mine, ordinary in zip(found, wanted, strict=True):
        for each, exact in zip(mine, ordinary, strict=True):
            torch.testing.assert_close(each, exact, rtol=1e-5, atol=1e-6)
    ((mlp, _), _) = layers(torch.float32)
    gate, up = mlp.gate_proj(x), mlp.up_proj(x)
    torch.testing.assert_close(found[0][0], mlp.down_proj(silu(gate) * up), rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
def test_layers_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager bf16 layers take the kernels, in a graph too; float64, a learned rotation and torch.compile don't."""
    ran: list[str] = []
    run = pointwise._run
    monkeypatch.setattr(
        pointwise, "_run", lambda kernel, *more: (ran.append(kernel.__name__), run(kernel, *more))
    )
    x = random(6, HIDDEN, dtype=torch.bfloat16)
    for layer, call in layers(torch.bfloat16):
        stepped(layer, call, x)
    assert ran == USED
    product, heads = random(9, 64, dtype=torch.bfloat16), random(2, 3, 4, 8, dtype=torch.bfloat16)
    turn = turn_of(3, 8)

    def both(product: torch.Tensor, heads: torch.Tensor) -> Tensors:
        return swiglu(product), *rotated_heads(heads, turn, 1)

    wanted = both(product.double(), heads.double())
    compiled = torch.compile(both, backend="eager", fullgraph=True)(product, heads)
    rotated_heads(heads, (turn[0], turn[1].clone().requires_grad_()), 1)
    assert ran == USED
    eager = both(product, heads)
    assert len(ran) == len(USED) + 2
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = both(product, heads)
    for each in captured[:3]:
        each.fill_(torch.nan)
    graph.replay()
    assert all(torch.equal(*pair) for pair in zip(captured, eager, strict=True))
    for each, traced, exact in zip(eager, compiled, wanted, strict=True):
        terms = torch.full_like(exact, 16.0)
        assert wrong((each,), (exact,), (terms,)) == [0]
        # The formula rounds twice.
        assert ((each - traced).abs() <= 2**-7 * each.abs() + 2**-12).all()


def test_who_is_served() -> None:
    """Nobody on a CPU, no class derived from Tensor, no traced call."""
    x = random(2, 4)
    assert pointwise._by_kernel(x) == x.is_cuda
    assert not pointwise._by_kernel(x.double())
    assert not pointwise._by_kernel(torch.nn.Parameter(x))
    turn = turn_of(2, 4)
    heads = random(1, 2, 3, 4)
    assert all(pointwise._simple(each, heads) for each in turn)
    refused = (turn[0].half(), turn[0].t(), turn[0][:1], turn[0].clone().requires_grad_(), turn[0].to("meta"))
    assert not any(pointwise._simple(each, heads) for each in refused)
    assert not pointwise._simple(turn[0], random(1, 2, 3, 5))

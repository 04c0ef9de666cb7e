"""SwiGLU where its product lies: where nobody else has that, and nowhere else."""

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from pyrocshmem.stream_k.nn.pointwise import swiglu
from tests.nn.models import HIDDEN, INTERMEDIATE
from tests.nn.test_pointwise import DTYPES, inside, layers, random

TIER = 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_swiglu_in_the_place_of_the_gate(dtype: torch.dtype, kernels: list[str]) -> None:
    """Of a spent product: the same bits, no memory of its own, nothing written but the gate. Not with a gradient."""
    for shape in ((3, 10), (2, 3, 68), (1, 2050), (0, 6), (4, 0)):
        for product in (random(*shape, dtype=dtype), inside(random(*shape, dtype=dtype))):
            wanted, before = swiglu(product), product.clone()
            kept = product.clone().requires_grad_()
            assert torch.equal(swiglu(kept, spent=True), wanted), shape
            assert torch.equal(kept, before), shape
            found = swiglu(product, spent=True)
            assert torch.equal(found, wanted), shape
            assert found.numel() == 0 or found.data_ptr() == product.data_ptr(), shape
            assert torch.equal(product.chunk(2, -1)[1], before.chunk(2, -1)[1]), shape


class Wrapper(torch.nn.Module):
    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any) -> torch.Tensor:
        return self.layer(*args)


def test_an_mlp_reuses_its_product_and_nothing_that_a_hook_has_seen(kernels: list[str]) -> None:
    x, ((mlp, _), _) = random(6, HIDDEN), layers(torch.float32)
    inner, seen = mlp.gate_proj, []
    places: list[bool] = []

    def look(layer: Any, args: Any, y: torch.Tensor) -> None:
        if layer is inner:
            seen.append((y, y.clone()))

    wanted = mlp(x)
    mlp.down_proj.register_forward_pre_hook(
        lambda layer, args: places.append(args[0].stride(0) == 2 * INTERMEDIATE)
    )
    with torch.no_grad():
        assert torch.equal(mlp(x), wanted)
        # As two products: of other sizes, so of other tiles, whose sums a CPU's BLAS may add in another order.
        apart = mlp.down_proj(swiglu(torch.cat((inner(x), mlp.up_proj(x)), -1)))
        torch.testing.assert_close(apart, wanted)
        for register in (inner.register_forward_hook, register_module_forward_hook):
            with register(look):
                assert torch.equal(mlp(x), apart)
        # Nor one that calls it by another way, as libraries that wrap modules do.
        forward = inner.forward

        def kept(*args: Any) -> torch.Tensor:
            y = forward(*args)
            look(inner, args, y)
            return y

        with mock.patch.object(inner, "forward", kept):
            assert torch.equal(mlp(x), apart)
        # A wrapper may have hooks, or keep what it passes on.
        inner.register_forward_hook(look)
        mlp.gate_proj = Wrapper(inner)
        assert torch.equal(mlp(x), apart)
    assert places == [True, False, *[True] * 4]
    assert len(seen) == 4
    assert all(torch.equal(*each) for each in seen)


def test_selective_checkpoints_keep_what_they_have_seen(kernels: list[str]) -> None:
    """Of a frozen product, which needs no gradient and would be written over, and one that a residual is added to."""
    x, ((mlp, _), _) = random(6, HIDDEN), layers(torch.float32)
    mlp.requires_grad_(False)
    mlp.down_proj.weight.requires_grad_()

    def gradient(**how: Any) -> torch.Tensor:
        y = checkpoint(lambda x: mlp(x, residual=x).square(), x, use_reentrant=False, **how)
        return torch.autograd.grad(y.sum(), mlp.down_proj.weight)[0]

    kept = [torch.ops.stream_k.gemm.default, torch.ops.stream_k.gemm_all_reduce.default]
    found = gradient(context_fn=partial(create_selective_checkpoint_contexts, kept))
    torch.testing.assert_close(found, gradient(), rtol=0, atol=0)

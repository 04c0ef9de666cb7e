"""Activations of three dimensions and more: the bits of the calls on matrices that they stand for."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pyrocshmem import Heap, stream_k
from tests.fused.cases import HEAP_BYTES
from tests.fused.test_gather_scatter_ops import outcome
from tests.ranks import run_ranks, values
from tests.stream_k.products import random, same_bits

TIER = 2
TIMEOUT_S = 110.0
FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32


def tensor(*shape: int, dtype: torch.dtype = FP32, seed: int | None = None) -> torch.Tensor:
    return random(math.prod(shape[:-1]), shape[-1], dtype, seed).view(shape)


def laid_out(a: torch.Tensor) -> torch.Tensor:
    """The same values, the first two dimensions exchanged in memory."""
    return a.transpose(0, 1).contiguous().transpose(0, 1)


def alike(found: Any, expected: Any, sizes: tuple[int, ...]) -> None:
    if isinstance(found, (list, tuple)):
        assert len(found) == len(expected)
        for x, y in zip(found, expected, strict=True):
            alike(x, y, sizes)
        return
    assert found.shape == (*sizes, expected.shape[-1])
    assert same_bits(found.reshape(expected.shape), expected)


def calls(heap: Heap, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Each op on `shape`, then on the matrix of its rows."""
    ranks, rank = heap.world_size, heap.rank
    a, b = tensor(*shape, dtype=dtype), tensor(shape[-1], 8, dtype=dtype)
    bias, weight = tensor(1, 8, dtype=dtype)[0], tensor(1, 8, dtype=dtype)[0]
    norms = tensor(1, 8 * ranks, dtype=dtype, seed=1)[0][8 * rank : 8 * rank + 8]
    first, *others = shape[:-1]
    ops: dict[str, tuple[Callable[..., Any], int]] = {
        "gemm": (lambda a, **more: stream_k.gemm(a, b, bias=bias, activation="gelu", **more), first),
        "gemm_all_reduce": (lambda a, **more: stream_k.gemm_all_reduce(a, b, group=heap, **more), first),
        "gemm_all_scatter": (
            lambda a, **more: stream_k.gemm_all_scatter(a, b, group=heap, bias=bias, **more),
            first,
        ),
        "gemm_reduce_scatter": (
            lambda a, **more: stream_k.gemm_reduce_scatter(a, b, group=heap, **more),
            first // ranks,
        ),
        "all_gather_gemm": (
            lambda a, **more: stream_k.all_gather_gemm(a, b, group=heap, bias=bias, **more),
            first * ranks,
        ),
    }
    for name, (op, size) in ops.items():
        sizes = (size, *others)
        for given in (a, laid_out(a)):
            expected = op(given.flatten(0, -2).contiguous())
            alike(op(given), expected, sizes)
            out = torch.full((*sizes, expected.shape[-1]), torch.nan, dtype=dtype, device=a.device)
            assert op(given, out=out) is out, name
            alike(out, expected, sizes)
    if dtype == FP32:
        op, _ = ops["gemm_all_reduce"]
        found, squares = op(a, squared_partials=True)
        expected, of_rows = op(a.flatten(0, -2), squared_partials=True)
        alike(found, expected, shape[:-1])
        assert torch.equal(squares, of_rows.view(*shape[:-1], -1))
    residual = tensor(*shape[:-1], 8, dtype=dtype, seed=2)
    for given in (residual, laid_out(residual), None):
        flat = None if given is None else given.flatten(0, -2)
        more = (weight, 1e-5)
        found = stream_k.gemm_all_reduce_rms_norm(a, b, given, *more, group=heap)
        alike(
            found, stream_k.gemm_all_reduce_rms_norm(a.flatten(0, -2), b, flat, *more, group=heap), shape[:-1]
        )
    same = tensor(*shape, dtype=dtype, seed=3)
    found = stream_k.gemm_rms_norm_all_scatter(same, b, norms, 1e-5, group=heap)
    expected = stream_k.gemm_rms_norm_all_scatter(same.flatten(0, -2), b, norms, 1e-5, group=heap)
    alike(found, expected, shape[:-1])


def batches(rank: int, ranks: int) -> list[str]:
    """A body; returns what wrong calls raise."""
    with Heap(HEAP_BYTES) as heap:
        calls(heap, (ranks, 3, 16), FP16)
        calls(heap, (2 * ranks, 2, 3, 9), FP32)
        calls(heap, (ranks, 1, 5), BF16)
        calls(heap, (ranks, 0, 8), FP16)
        # Gradients are those of the matrix.
        pairs = []
        for shape in ((ranks, 3, 16), (3 * ranks, 16)):
            a, b = (tensor(*size, seed=rank).requires_grad_() for size in (shape, (16, 8)))
            rows = stream_k.all_gather_gemm(a, b, group=heap)
            back = stream_k.gemm_reduce_scatter(rows.relu(), b.t(), group=heap)
            back.square().sum().backward()
            pairs.append((back.detach().flatten(0, -2), a.grad.flatten(0, -2), b.grad))
        assert all(same_bits(x, y) for x, y in zip(*pairs, strict=True))
        a, b = tensor(3, ranks, 8), tensor(8, 4)
        out = tensor(4, 3, ranks).permute(1, 2, 0)
        apart = out.new_empty(3, 4, ranks).transpose(1, 2)[:, :1].expand(3, ranks, 4).transpose(0, 1)
        wrong: list[Callable[[], Any]] = [
            lambda: stream_k.gemm_reduce_scatter(a, b, group=heap),
            lambda: stream_k.all_gather_gemm(a, b, group=heap, num_rows=3),
            lambda: stream_k.gemm(a, b, out=out.transpose(0, 1)),
            lambda: stream_k.gemm(a, b, out=out[0]),
            lambda: stream_k.gemm(a.transpose(0, 1), b, out=apart),
            lambda: stream_k.gemm_all_reduce_rms_norm(a, b, out.transpose(0, 1), b[0], 1e-5, group=heap),
        ]
        return [outcome(call) for call in wrong]


@pytest.mark.num_ranks(2)
def test_batches() -> None:
    for first, *others in values(run_ranks(batches, 2, timeout=TIMEOUT_S)):
        assert "a is (3, 2, 8): the first of its 3 dimensions is divided over 2 ranks" in first
        num_rows, sizes, shape, pitch, residual = others
        assert "num_rows is 3 and a is (3, 2, 8)" in num_rows
        assert "out has shape (2, 3, 4), (3, 2, N) is needed" in sizes
        assert "out has shape (2, 4), (3, 2, N) is needed" in shape
        assert "its rows must lie at one distance" in pitch
        assert "residual has shape (2, 3, 4), (3, 2, N) is needed" in residual

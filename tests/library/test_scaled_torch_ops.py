"""PyTorch's two operators of 8-bit operands by ours: against float64, in every dimension, with the scales that they
take."""

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pyrocshmem import target, torch_ops
from pyrocshmem.elements import float8
from tests.ranks import run_ranks, values

TIER = 3
TIMEOUT_S = 110.0
FP32 = torch.float32
# NVIDIA's matrix units keep 14 bits or so of a sum of 8-bit products.
TOLERANCE = 1e-4 if target.interpreted() else 5e-3


def numbers(*shape: int, seed: int, device: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(float8()[0]).to(device)


def scale(*shape: int, seed: int, device: Any) -> torch.Tensor:
    return (torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) + 0.2).to(device)


def near(found: torch.Tensor, exact: torch.Tensor) -> bool:
    return found.shape == exact.shape and torch.allclose(
        found.double(), exact, rtol=TOLERANCE, atol=TOLERANCE
    )


def gathers(rank: int, world: int) -> list[str]:
    """What is wrong of gathers."""
    device, name, wrong = target.device(rank), dist.group.WORLD.group_name, []
    op = torch.ops.symm_mem.fused_all_gather_scaled_matmul
    K = 32
    bs = [numbers(N, K, seed=N, device=device).t() for N in (16, 24)]
    shapes = ((4, K), (2, 3, K))
    for shape, mode in itertools.product(shapes, ("one", "own rows", "all rows")):
        for dim in range(len(shape) - 1):
            shards = [numbers(*shape, seed=50 + peer, device=device) for peer in range(world)]
            whole = torch.cat(shards, dim)
            of_whole = scale(*whole.shape[:-1], 1, seed=3, device=device)
            given = of_whole
            if mode == "own rows":
                given = of_whole.narrow(dim, rank * shape[dim], shape[dim]).contiguous()
            elif mode == "one":
                given = of_whole = torch.full((1,), 0.75, device=device)
            of_bs = [
                scale(1, b.shape[1], seed=9, device=device)
                if mode != "one"
                else torch.full((1,), 0.5, device=device)
                for b in bs
            ]
            nothing = [None] * len(bs)
            more = (dim, name, nothing, nothing, [FP32] * len(bs), [False] * len(bs))
            a, products = op(shards[rank], bs, given, of_bs, *more)
            if not torch.equal(a.float(), whole.float()):
                wrong.append(f"gathered {shape} along {dim}, {mode}")
            for number, (b, of_b, found) in enumerate(zip(bs, of_bs, products, strict=True)):
                exact = (whole.double() * of_whole.double()) @ (b.double() * of_b.double())
                if not near(found, exact):
                    wrong.append(f"product {number} of {shape} along {dim}, {mode}")
    return wrong


def scatters(rank: int, world: int) -> list[str]:
    """What is wrong of scatters."""
    device, name, wrong = target.device(rank), dist.group.WORLD.group_name, []
    op = torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter
    K, N = 32, 12 * world
    shapes = ((6 * world,), (2 * world, 3 * world))
    for leading, by_rows, reduce_op in itertools.product(shapes, (False, True), ("sum", "avg")):
        for dim in range(len(leading) + 1):
            terms = []
            for peer in range(world):
                a, b = (
                    numbers(*leading, K, seed=peer, device=device),
                    numbers(N, K, seed=70 + peer, device=device).t(),
                )
                of_a = (
                    scale(*leading, 1, seed=peer, device=device)
                    if by_rows
                    else torch.full((1,), 0.5, device=device)
                )
                of_b = (
                    scale(1, N, seed=peer, device=device)
                    if by_rows
                    else torch.full((1,), 0.25, device=device)
                )
                terms.append((a.double() * of_a.double()) @ (b.double() * of_b.double()))
                if peer == rank:
                    mine = a, b, of_a, of_b
            exact = sum(terms).chunk(world, dim)[rank] / (world if reduce_op == "avg" else 1)
            a, b, of_a, of_b = mine
            # As PyTorch's passes call it: A as a matrix, and the shape that the product had.
            flat, of_flat = a.flatten(0, -2), of_a.flatten(0, -2) if by_rows else of_a
            found = op(
                flat, b, of_flat, of_b, reduce_op, dim, 0, name, [*leading, N], None, None, FP32, False
            )
            if not near(found, exact):
                wrong.append(f"{leading} along {dim}, {by_rows=}, {reduce_op}")
    return wrong


def served(rank: int, world: int) -> list[str]:
    with torch_ops.install():
        return [*gathers(rank, world), *scatters(rank, world)]


@pytest.mark.parametrize("ranks", [pytest.param(n, marks=pytest.mark.num_ranks(n)) for n in (2, 3)])
def test_calls(ranks: int) -> None:
    assert values(run_ranks(served, ranks, timeout=TIMEOUT_S)) == [[]] * ranks

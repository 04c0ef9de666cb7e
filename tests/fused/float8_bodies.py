"""Fused ops of 8-bit operands: what ranks bring, and what they must get."""

from __future__ import annotations

from typing import Any

import torch

from pyrocshmem.elements import float8
from pyrocshmem.shards import shard_range
from tests.float8_error import may_be_off

KINDS = dict(zip(("e4m3", "e5m2"), float8(), strict=True))
RECIPES = ("tensorwise", "rowwise", "blockwise")
SUMS = ("gemm_reduce_scatter", "gemm_all_reduce")
OPS = (*SUMS, "gemm_all_scatter", "all_gather_gemm")
# Whose results are the ranks' own.
DIVIDED = ("gemm_reduce_scatter", "all_gather_gemm")


def blocks(size: int) -> int:
    return -(-size // 128)


class Whole:
    """Both operands of all ranks: shares of K for a sum, of N for a scatter. kind: of A, "e5m2" with subnormal numbers
    among the others."""

    def __init__(
        self,
        op: str,
        recipe: str,
        M: int,
        N: int,
        K: int,
        world: int,
        device: Any,
        seed: int,
        kind: str = "e4m3",
    ) -> None:
        self.op, self.recipe, self.world, self.M, self.N = op, recipe, world, M, N
        generator = torch.Generator().manual_seed(seed)

        def rand(*shape: int) -> torch.Tensor:
            return (torch.rand(*shape, generator=generator, device="cpu") + 0.1).to(device)

        def numbers(kind: str, *shape: int) -> torch.Tensor:
            x = torch.randn(*shape, generator=generator, device="cpu")
            if kind == "e5m2":
                x *= torch.exp2(-16 * torch.rand(*shape, generator=generator, device="cpu"))
            return x.to(KINDS[kind]).to(device)

        self.shares = []
        for _ in range(world):
            if op in SUMS or not self.shares:
                a = numbers(kind, M, K)
                of_a = {"tensorwise": (1,), "rowwise": (M, 1), "blockwise": (M, blocks(K))}[recipe]
                scale_a = rand(*of_a)
            of_b = {"tensorwise": (1,), "rowwise": (1, N), "blockwise": (blocks(K), blocks(N))}[recipe]
            self.shares.append((a, numbers("e4m3", N, K).t(), scale_a, rand(*of_b)))

    def of_rank(self, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """a, b, scale_a, scale_b."""
        a, b, of_a, of_b = self.shares[rank]
        if self.op != "all_gather_gemm":
            return a, b, of_a, of_b
        rows = slice(*shard_range(len(a), rank, self.world))
        return a[rows], b, of_a if of_a.numel() == 1 else of_a[rows], of_b

    def exact(self, fast: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(the result, what its sums may be off by, the sum of the magnitudes of what ranks add), float64."""
        found = []
        for a, b, of_a, of_b in self.shares:
            K, N = b.shape
            if self.recipe == "blockwise":
                of_a = of_a.repeat_interleave(128, 1)[:, :K]
                of_b = of_b.repeat_interleave(128, 0)[:K].repeat_interleave(128, 1)[:, :N]
            left, right = a.double() * of_a.double(), b.double() * of_b.double()
            product = left @ right
            found.append((product, may_be_off(left, right, fast), product.abs()))
        if self.op in SUMS:
            return tuple(sum(each) for each in zip(*found, strict=True))  # type: ignore[return-value]
        return tuple(torch.cat(each, 1) for each in zip(*found, strict=True))  # type: ignore[return-value]

    def ratio(self, out: torch.Tensor, rank: int, roundings: int = 1, fast: bool = False) -> float:
        """The largest error of this rank's result over its bound. roundings: of each rank's term, where it is added."""
        exact, off, terms = self.exact(fast)
        if self.op == "gemm_reduce_scatter":
            rows = slice(*shard_range(self.M, rank, self.world))
            exact, off, terms = exact[rows], off[rows], terms[rows]
        if self.op == "all_gather_gemm":
            exact, off = (x[:, rank * self.N :][:, : self.N] for x in (exact, off))
        assert out.shape == exact.shape
        if not out.numel():
            return 0.0
        unit = torch.finfo(out.dtype).eps / 2
        bound = unit * exact.abs() + off + roundings * 2.0**-24 * self.world
        bound += roundings * unit * terms if self.op in SUMS else 0
        return float(((out.double() - exact).abs() / bound).max())

"""Fused ops of 8-bit operands, as the stress runner calls them."""

from __future__ import annotations

from random import Random
from typing import Any

import torch

from pyrocshmem import Heap, stream_k
from tests.fused.float8_bodies import DIVIDED, KINDS, OPS, RECIPES, Whole
from tests.stress.tensors import Facts, draw_size


def draw(rng: Random, num_ranks: int) -> Facts:
    facts: Facts = {"op": rng.choice(OPS), "recipe": rng.choice(RECIPES), "fast": rng.random() < 0.3}
    facts["M"], facts["N"] = draw_size(rng), draw_size(rng)
    # More than one block of 128 at times.
    facts["K"] = draw_size(rng) * rng.choice((1, 1, 4))
    return facts | {"kind": rng.choice(list(KINDS)), "dtype": rng.choice(("float16", "float32"))}


def same(facts: Facts) -> bool:
    """Whether every rank gets the same."""
    return facts["op"] not in DIVIDED


class Float8:
    """A call; `tests.fused.float8_bodies` has the operands and the bound."""

    def __init__(self, facts: Facts, heap: Heap) -> None:
        self.facts, self.heap = facts, heap
        self.mine = [x.clone() for x in self._whole(0).of_rank(heap.rank)]
        # A weight read transposed.
        self.mine[1] = self.mine[1].t().contiguous().t()

    def _whole(self, data: int) -> Whole:
        op, recipe, kind, *sizes = (self.facts[name] for name in ("op", "recipe", "kind", "M", "N", "K"))
        return Whole(op, recipe, *sizes, self.heap.world_size, self.heap.device, data, kind)

    def load(self, data: int) -> None:
        for mine, new in zip(self.mine, self._whole(data).of_rank(self.heap.rank), strict=True):
            mine.copy_(new)

    def run(self) -> torch.Tensor:
        a, b, scale_a, scale_b = self.mine
        more: dict[str, Any] = {"out_dtype": getattr(torch, self.facts["dtype"])}
        more |= {"use_fast_accum": self.facts["fast"], "group": self.heap}
        if self.facts["op"] == "all_gather_gemm":
            more["num_rows"] = self.facts["M"]
        return getattr(stream_k, self.facts["op"])(a, b, scale_a=scale_a, scale_b=scale_b, **more)

    def judge(self, data: int, result: torch.Tensor) -> str:
        ratio = self._whole(data).ratio(result, self.heap.rank, fast=self.facts["fast"])
        return "" if ratio <= 1 else f"{ratio:.2f} of the bound"

    def free(self) -> None:
        pass

"""Fused ops of 8-bit operands: every element against float64, the same bits on all ranks, by recipe and placement."""

import dataclasses
import itertools
import time
from typing import Any
from unittest import mock

import pytest
import torch

from pyrocshmem import CallMismatch, Heap, stream_k, target
from pyrocshmem.elements import float8
from pyrocshmem.shards import shard_range
from pyrocshmem.stream_k.choice.config import BY_BLAS
from pyrocshmem.stream_k.choice.placement import placement_names
from pyrocshmem.stream_k.ops.gathered_rows import PiecesPlan
from tests.ranks import run_ranks, values

TIER = 3
TIMEOUT_S = 150.0
E4M3, E5M2 = float8()
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
RECIPES = ("tensorwise", "rowwise", "blockwise")
SUMS = ("gemm_reduce_scatter", "gemm_all_reduce")
OPS = (*SUMS, "gemm_all_scatter", "all_gather_gemm")
# Whose results are the ranks' own.
DIVIDED = ("gemm_reduce_scatter", "all_gather_gemm")
HEAP_BYTES = 32 << 20
# Of a sum of 8-bit products: what NVIDIA's matrix units keep of 128 of them.
EPS = 2.0**-22 if target.interpreted() else 2.0**-15


def blocks(size: int) -> int:
    return -(-size // 128)


class Whole:
    """Both operands of all ranks: shares of K for a sum, of N for a scatter."""

    def __init__(
        self, op: str, recipe: str, M: int, N: int, K: int, world: int, device: Any, seed: int
    ) -> None:
        self.op, self.recipe, self.world = op, recipe, world
        generator = torch.Generator().manual_seed(seed)

        def rand(*shape: int) -> torch.Tensor:
            return (torch.rand(*shape, generator=generator) + 0.1).to(device)

        def numbers(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(E4M3).to(device)

        self.shares = []
        for _ in range(world):
            if op in SUMS or not self.shares:
                a = numbers(M, K)
                of_a = {"tensorwise": (1,), "rowwise": (M, 1), "blockwise": (M, blocks(K))}[recipe]
                scale_a = rand(*of_a)
            of_b = {"tensorwise": (1,), "rowwise": (1, N), "blockwise": (blocks(K), blocks(N))}[recipe]
            self.shares.append((a, numbers(N, K).t(), scale_a, rand(*of_b)))

    def of_rank(self, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """a, b, scale_a, scale_b."""
        a, b, of_a, of_b = self.shares[rank]
        if self.op != "all_gather_gemm":
            return a, b, of_a, of_b
        rows = slice(*shard_range(len(a), rank, self.world))
        return a[rows], b, of_a if of_a.numel() == 1 else of_a[rows], of_b

    def exact(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(the result, |A| |B| of it, the sum of the magnitudes of what ranks add), float64."""
        found = []
        for a, b, of_a, of_b in self.shares:
            K, N = b.shape
            if self.recipe == "blockwise":
                of_a = of_a.repeat_interleave(128, 1)[:, :K]
                of_b = of_b.repeat_interleave(128, 0)[:K].repeat_interleave(128, 1)[:, :N]
            left, right = a.double() * of_a.double(), b.double() * of_b.double()
            found.append((left @ right, left.abs() @ right.abs(), (left @ right).abs()))
        if self.op in SUMS:
            return tuple(sum(each) for each in zip(*found, strict=True))  # type: ignore[return-value]
        return tuple(torch.cat(each, 1) for each in zip(*found, strict=True))  # type: ignore[return-value]


def every_op(
    rank: int, world_size: int, recipe: str, seed: int, by_placement: bool
) -> list[tuple[str, bytes]]:
    """(what is wrong, the bits where all ranks have the same result) of each call: by default, or in each placement."""
    found = []
    calls = [
        (op, placement, shape, dtype)
        for op in OPS
        for placement in (placement_names(op) if by_placement else (None,))
        for shape in ((24, 32, 160), (5, 48, 64))
        for dtype in ((FP32,) if by_placement else (FP16, FP32))
        if placement not in BY_BLAS
    ]
    with Heap(HEAP_BYTES) as heap:
        for op, placement, (M, N, K), dtype in calls:
            whole = Whole(op, recipe, M, N, K, world_size, heap.device, seed)
            a, b, of_a, of_b = whole.of_rank(rank)
            more: dict[str, Any] = {"group": heap, "scale_a": of_a, "scale_b": of_b, "out_dtype": dtype}
            if placement is not None:
                chosen = stream_k.choose(op, M, N, K, BF16, world_size, heap.device, placement=placement)
                more["config"] = dataclasses.replace(chosen, block_m=16, block_n=32, block_k=64, comm_rows=8)
            if op == "all_gather_gemm":
                more["num_rows"] = M
            out = getattr(stream_k, op)(a, b, **more)
            heap.synchronize()
            exact, magnitude, terms = whole.exact()
            if op == "gemm_reduce_scatter":
                rows = slice(*shard_range(M, rank, world_size))
                exact, magnitude, terms = exact[rows], magnitude[rows], terms[rows]
            if op == "all_gather_gemm":
                columns = slice(rank * N, (rank + 1) * N)
                exact, magnitude = exact[:, columns], magnitude[:, columns]
            eps = torch.finfo(dtype).eps / 2
            bound = eps * exact.abs() + K**0.5 * EPS * magnitude + 2.0**-24 * world_size
            bound += eps * terms if op in SUMS else 0
            ratio = float(((out.double() - exact).abs() / bound).max()) if out.numel() else 0.0
            what = f"{op}, {placement}, {(M, N, K)}, {dtype}: {ratio:.2f} of the bound"
            same = b"" if op in DIVIDED else out.cpu().contiguous().view(torch.uint8).numpy().tobytes()
            found.append((what if not ratio <= 1 else "", same))
    return found


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("ranks", [pytest.param(n, marks=pytest.mark.num_ranks(n)) for n in (1, 2, 3)])
def test_every_op(ranks: int, recipe: str) -> None:
    check(values(run_ranks(every_op, ranks, recipe, 11, False, timeout=TIMEOUT_S)))


@pytest.mark.num_ranks(2)
@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_every_placement(recipe: str) -> None:
    check(values(run_ranks(every_op, 2, recipe, 12, True, timeout=TIMEOUT_S)))


def check(ends: list[list[tuple[str, bytes]]]) -> None:
    for of_call in zip(*ends, strict=True):
        assert [wrong for wrong, _ in of_call] == [""] * len(of_call)
        assert len({same for _, same in of_call}) == 1


def normed(rank: int, world_size: int, recipe: str) -> list[str]:
    """What is wrong of sums that are normalized: of few rows in one exchange, and behind an all-reduce."""
    wrong = []
    with Heap(HEAP_BYTES) as heap:
        for (M, N, K), placement, dtype in itertools.product(
            ((5, 48, 160), (24, 32, 64)), ("messages", "own_stream"), (FP16, BF16)
        ):
            whole = Whole("gemm_all_reduce", recipe, M, N, K, world_size, heap.device, M)
            a, b, of_a, of_b = whole.of_rank(rank)
            generator = torch.Generator().manual_seed(9)
            residual, weight = (torch.rand(*shape, generator=generator) for shape in ((M, N), (N,)))
            residual, weight = residual.to(heap.device, dtype), weight.to(heap.device)
            more: dict[str, Any] = {"group": heap, "scale_a": of_a, "scale_b": of_b, "out_dtype": dtype}
            if placement != "messages":
                chosen = stream_k.choose(
                    "gemm_all_reduce", M, N, K, BF16, world_size, heap.device, placement=placement
                )
                more["config"] = dataclasses.replace(chosen, block_m=16, block_n=32, block_k=64, comm_rows=8)
            y, total = stream_k.gemm_all_reduce_rms_norm(a, b, residual, weight, 1e-6, **more)
            heap.synchronize()
            exact, magnitude, terms = whole.exact()
            exact += residual.double()
            eps = torch.finfo(dtype).eps
            bound = eps * (exact.abs() + terms) + K**0.5 * EPS * magnitude + 2.0**-24 * world_size
            norm = torch.nn.functional.rms_norm(total.double(), (N,), weight.double(), 1e-6)
            if not ((total.double() - exact).abs() <= bound).all():
                wrong.append(f"total of {M, N, K}, {placement}, {dtype}")
            if total.dtype != dtype or not ((y.double() - norm).abs() <= 2 * eps * norm.abs() + 1e-6).all():
                wrong.append(f"norm of {M, N, K}, {placement}, {dtype}")
    return wrong


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("ranks", [pytest.param(n, marks=pytest.mark.num_ranks(n)) for n in (1, 2)])
def test_norms(ranks: int, recipe: str) -> None:
    assert values(run_ranks(normed, ranks, recipe, timeout=TIMEOUT_S)) == [[]] * ranks


def other_calls(rank: int, world_size: int) -> list[str]:
    """What ranks hear that differ in the recipe, in what is stored, and in how sums are made."""
    said = []
    with Heap(HEAP_BYTES) as heap:
        whole = {
            recipe: Whole("gemm_all_reduce", recipe, 8, 16, 256, world_size, heap.device, 3)
            for recipe in RECIPES
        }
        for recipe, more in (
            (("rowwise", "blockwise")[rank], {}),
            ("rowwise", {"out_dtype": (FP16, FP32)[rank]}),
            ("rowwise", {"out_dtype": FP32, "use_fast_accum": rank == 1}),
        ):
            a, b, of_a, of_b = whole[recipe].shares[rank]
            with pytest.raises(CallMismatch) as caught:
                stream_k.gemm_all_reduce(
                    a, b, group=heap, scale_a=of_a, scale_b=of_b, **{"out_dtype": FP32, **more}
                )
            said.append(str(caught.value))
            heap.recover()
    return said


@pytest.mark.num_ranks(2)
def test_ranks_that_differ() -> None:
    for said in values(run_ranks(other_calls, 2)):
        for text, words in zip(
            said, ("scales of blocks", "result=torch.float16", "use_fast_accum=True"), strict=True
        ):
            assert words in text


def several(rank: int, world_size: int, recipe: str) -> list[bool]:
    """Whether products of one gather are those of a call each."""
    M, K = 10, 256
    with Heap(HEAP_BYTES) as heap:
        wholes = [Whole("all_gather_gemm", recipe, M, N, K, world_size, heap.device, 5) for N in (24, 40, 8)]
        a, _, of_a, _ = wholes[0].of_rank(rank)
        bs, of_bs = zip(
            *((b, of_b) for _, b, _, of_b in (whole.of_rank(rank) for whole in wholes)), strict=True
        )
        more: dict[str, Any] = {"group": heap, "num_rows": M, "scale_a": of_a, "out_dtype": FP32}
        together = stream_k.all_gather_gemm(a, [*bs], scale_b=[*of_bs], **more)
        each = [
            stream_k.all_gather_gemm(a, b, scale_b=of_b, **more) for b, of_b in zip(bs, of_bs, strict=True)
        ]
        heap.synchronize()
        return [torch.allclose(x, y, rtol=1e-5, atol=1e-5) for x, y in zip(together, each, strict=True)]


@pytest.mark.num_ranks(2)
@pytest.mark.parametrize("recipe", RECIPES)
def test_several_products_of_one_gather(recipe: str) -> None:
    assert values(run_ranks(several, 2, recipe)) == [[True] * 3] * 2


def gathered(rank: int, world_size: int, early: bool) -> bool:
    """Whether a gather is right, of which rank 0's scales come late: before its flags or, early, behind them."""
    M, N, K = 32, 16, 64

    def push_late(self: PiecesPlan, sent: tuple[torch.Tensor, ...]) -> None:
        for rows, (data, scales), flag in self.pieces:
            data.copy_(sent[0][rows])
            if early:
                flag.copy_(self.epoch)
            time.sleep(0.3)
            scales.copy_(sent[1][rows])
            flag.copy_(self.epoch)

    with Heap(HEAP_BYTES) as heap:
        whole = Whole("all_gather_gemm", "rowwise", M, N, K, world_size, heap.device, 7)
        a, b, of_a, of_b = whole.of_rank(rank)
        chosen = stream_k.choose("all_gather_gemm", M, N, K, BF16, world_size, heap.device)
        config = dataclasses.replace(chosen, placement="copy_engine", split="none", chunk=1)
        more: dict[str, Any] = {"group": heap, "scale_b": of_b, "out_dtype": FP32, "config": config}
        # What lies where the scales will.
        stream_k.all_gather_gemm(a, b, scale_a=2 * of_a, **more)
        heap.barrier()
        with mock.patch.object(PiecesPlan, "_push", PiecesPlan._push if rank else push_late):
            found = stream_k.all_gather_gemm(a, b, scale_a=of_a, **more)
        heap.synchronize()
        exact = whole.exact()[0][:, rank * N :][:, :N]
        return torch.allclose(found.double(), exact, rtol=1e-4, atol=1e-3)


@pytest.mark.cpu
@pytest.mark.num_ranks(2)
def test_scales_arrive_before_their_flag() -> None:
    assert values(run_ranks(gathered, 2, False)) == [True, True]
    assert values(run_ranks(gathered, 2, True))[1] is False

"""Inside `batch_invariant(tp_invariant=True)` results have the same bits on 1, 2, 4 and 8 ranks, and so have gradients
of activations; they are as accurate as the strict mode's."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

import pyrocshmem
from pyrocshmem import CallMismatch, Heap, collectives, stream_k  # before Triton
from pyrocshmem.calls.invariance import blocks_of_share
from pyrocshmem.reference.accuracy import make_operand
from pyrocshmem.shards import shard_range
from tests.ranks import run_ranks, values
from tests.stream_k.products import ON_CPU, check_product, device

TIER = 2
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
HEAP_BYTES = (64 if ON_CPU else 1024) << 20
EPS = 1e-6
# (M, N, K, dtype): K is 8 blocks of less than a step; of one that ends inside a step; it is 4 blocks.
CASES = ((9, 40, 64, F32), (5, 48, 344, F16), (3, 16, 12, BF16))
if not ON_CPU:
    CASES += ((300, 512, 4096, BF16), (4096, 1024, 11008, F16))

# The result, and the dimension along which ranks have parts of it; None: each has all.
Found = dict[str, tuple[torch.Tensor, int | None]]


class Operands:
    """Of the whole problem, and the shares of one rank."""

    def __init__(self, heap: Heap, M: int, N: int, K: int, dtype: torch.dtype) -> None:
        def make(shape: tuple[int, ...], tag: str, dtype: torch.dtype = dtype) -> torch.Tensor:
            return make_operand(shape, dtype, 3, 0, tag=tag, device="cpu").to(device())

        self.M, self.group = M, {"group": heap}
        self.a, self.b, self.residual = make((M, K), "a"), make((K, N), "b"), make((M, N), "residual")
        self.weight, self.bias, self.g = make((N,), "weight"), make((N,), "bias", F32), make((M, N), "g")
        self.k, self.n, self.m = (slice(*shard_range(size, heap.rank, heap.world_size)) for size in (K, N, M))

    def forward(self) -> Found:
        a, b, k, n, group = self.a, self.b, self.k, self.n, self.group
        weight_n, residual = self.weight[n].clone(), self.residual
        biased = {"bias": self.bias, "activation": "silu", **group}
        norm, total = stream_k.gemm_all_reduce_rms_norm(a[:, k], b[k], residual, self.weight, EPS, **group)
        own, updated = collectives.rms_norm(residual[:, n], weight_n, EPS, residual=residual[:, n], **group)
        gathered = stream_k.all_gather_gemm(a[self.m], b[:, n], num_rows=self.M, **group)
        return {
            "gemm": (stream_k.gemm(a, b), None),
            "gemm_all_reduce": (stream_k.gemm_all_reduce(a[:, k], b[k], **biased), None),
            "gemm_reduce_scatter": (stream_k.gemm_reduce_scatter(a[:, k], b[k], **group), 0),
            "gemm_all_scatter": (stream_k.gemm_all_scatter(a, b[:, n], **group), None),
            "all_gather_gemm": (gathered, 1),
            "gemm_all_reduce_rms_norm": (norm, None),
            "gemm_all_reduce_rms_norm, the total": (total, None),
            "gemm_rms_norm_all_scatter": (
                stream_k.gemm_rms_norm_all_scatter(a, b[:, n], weight_n, EPS, **group), None
            ),
            "rms_norm": (own, 1),
            "rms_norm, with its residual": (updated, 1),
        }  # fmt: skip

    def backward(self) -> Found:
        b, k, n, m, g, group = self.b, self.k, self.n, self.m, self.g, self.group
        weight, weight_n, residual = self.weight, self.weight[n].clone(), self.residual
        gather = {"num_rows": self.M, **group}
        calls: dict[str, tuple[Any, Callable[[Any], Any], Any, int | None]] = {
            "gemm_all_reduce": (self.a[:, k], lambda x: stream_k.gemm_all_reduce(x, b[k], **group), g, 1),
            "gemm_all_scatter": (self.a, lambda x: stream_k.gemm_all_scatter(x, b[:, n], **group), g, None),
            "all_gather_gemm": (
                self.a[m], lambda x: stream_k.all_gather_gemm(x, b[:, n], **gather), g[:, n], 0
            ),
            "gemm_all_reduce_rms_norm": (
                self.a[:, k],
                lambda x: stream_k.gemm_all_reduce_rms_norm(x, b[k], residual, weight, EPS, **group)[0], g, 1,
            ),
            "gemm_rms_norm_all_scatter": (
                self.a, lambda x: stream_k.gemm_rms_norm_all_scatter(x, b[:, n], weight_n, EPS, **group), g, None
            ),
            "rms_norm": (residual[:, n], lambda x: collectives.rms_norm(x, weight_n, EPS, **group), g[:, n], 1),
        }  # fmt: skip
        found: Found = {}
        for name, (x, call, upstream, dim) in calls.items():
            x = x.clone().requires_grad_()
            call(x).backward(upstream)
            found[f"gradient of {name}"] = x.grad, dim
        return found


def results(rank: int, world_size: int, tp: bool) -> list[dict[str, tuple[Any, int | None]]]:
    """Of each case that so many ranks can share, as lists of numbers' bits."""
    found = []
    with Heap(HEAP_BYTES) as heap, pyrocshmem.batch_invariant(tp_invariant=tp):
        for case in CASES:
            if case[2] % world_size or case[1] % world_size:
                found.append({})
                continue
            x = Operands(heap, *case)
            all_of_them = x.forward() | x.backward()
            if tp:
                check_product(all_of_them["gemm_reduce_scatter"][0], x.a[x.m], x.b)
                check_product(all_of_them["gemm_all_scatter"][0], x.a, x.b)
            found.append(
                {name: (y.detach().float().cpu().numpy(), dim) for name, (y, dim) in all_of_them.items()}
            )
        heap.synchronize()
    return found


def whole(ranks: list[Any], case: int) -> dict[str, torch.Tensor]:
    """What ranks have of a case, put together."""
    joined = {}
    for name, (first, dim) in ranks[0][case].items():
        parts = [torch.from_numpy(rank[case][name][0]) for rank in ranks]
        joined[name] = torch.from_numpy(first) if dim is None else torch.cat(parts, dim)
    return joined


def different(numbers: tuple[int, ...], tp: bool) -> list[str]:
    """Results that had other bits on more ranks than on one."""
    one, *more = (values(run_ranks(results, number, tp, timeout=240.0)) for number in numbers)
    return [
        f"{name} of {case} on {len(ranks)} ranks"
        for number, case in enumerate(CASES)
        for ranks in more
        for name, x in whole(ranks, number).items()
        if not torch.equal(x, whole(one, number)[name])
    ]


@pytest.mark.num_ranks(4)
@pytest.mark.timeout(600)
def test_one_two_and_four_ranks() -> None:
    assert different((1, 2, 4), True) == []


@pytest.mark.cpu
@pytest.mark.num_ranks(2)
def test_without_it_bits_depend_on_the_number_of_ranks() -> None:
    found = " ".join(different((1, 2), False))
    for name in (
        "gemm_all_reduce of",
        "gemm_reduce_scatter of",
        "gradient of gemm_all_scatter of",
        "rms_norm of",
    ):
        assert name in found, found


def eight(rank: int, world_size: int) -> bool:
    a, b = (torch.randn(shape, generator=torch.Generator().manual_seed(4)) for shape in ((7, 80), (80, 16)))
    a, b = a.to(device()), b.to(device())
    k = slice(*shard_range(80, rank, world_size))
    with Heap(HEAP_BYTES) as heap, pyrocshmem.batch_invariant(tp_invariant=True):
        found = stream_k.gemm_all_reduce(a[:, k], b[k], group=heap)
        blocks = [stream_k.gemm(a[:, 10 * i : 10 * i + 10], b[10 * i : 10 * i + 10]) for i in range(8)]
        while len(blocks) > 1:
            blocks = [x + y for x, y in zip(blocks[::2], blocks[1::2], strict=True)]
        return torch.equal(found, blocks[0])


@pytest.mark.num_ranks(8)
def test_eight_ranks_and_the_tree() -> None:
    assert values(run_ranks(eight, 8, timeout=120.0)) == [True] * 8


def said(calls: list[Callable[[], Any]]) -> list[str]:
    """The error of each call."""
    texts = []
    for call in calls:
        with pytest.raises((ValueError, CallMismatch)) as caught:
            call()
        texts.append(f"{caught.type.__name__}: {caught.value}")
    return texts


def refused_by_two(rank: int, world_size: int) -> list[str]:
    a, b, weight, uneven = torch.ones(4, 8), torch.ones(8, 8), torch.ones(4 - rank), 7 + rank
    with Heap(HEAP_BYTES) as heap, pyrocshmem.batch_invariant(tp_invariant=True):
        group = {"group": heap}
        config = stream_k.choose("gemm_all_reduce", 4, 8, 8, F32, world_size, heap.device)
        other = dataclasses.replace(config, k_blocks=2)
        return said(
            [
                lambda: stream_k.gemm_all_reduce(a.half(), b.half(), partial_dtype=F16, **group),
                lambda: stream_k.gemm_all_reduce(a, b, config=other, **group),
                lambda: stream_k.gemm_all_reduce(torch.ones(4, uneven), torch.ones(uneven, 8), **group),
                lambda: collectives.rms_norm(a[:, : 4 - rank], weight, EPS, hidden=7, **group),
            ]
        )


def refused_by_three(rank: int, world_size: int) -> list[str]:
    a, b, weight = torch.ones(4, 8), torch.ones(8, 8), torch.ones(8)
    with Heap(HEAP_BYTES) as heap, pyrocshmem.batch_invariant(tp_invariant=True):
        group = {"group": heap}
        return said(
            [
                lambda: stream_k.gemm_all_reduce(a, b, **group),
                lambda: stream_k.gemm_all_reduce_rms_norm(a, b, None, weight, EPS, **group),
                lambda: collectives.rms_norm(a, weight, EPS, **group),
            ]
        )


@pytest.mark.cpu
@pytest.mark.num_ranks(3)
def test_what_it_can_not_keep() -> None:
    words = (
        "partial_dtype of gemm_all_reduce is torch.float16, but the call is tp-invariant",
        "Config.k_blocks is 2, and here all calls of these N, K and dtype have 4",
        "of equal shares of K; the ranks' are [7, 8]",
        "hidden is 7, no multiple of the 2 ranks",
    )
    for texts in values(run_ranks(refused_by_two, 2)):
        for text, expected in zip(texts, words, strict=True):
            assert text.startswith("ValueError"), text
            assert expected in text
    for texts in values(run_ranks(refused_by_three, 3)):
        assert all("1, 2, 4 or 8 ranks; the group has 3" in text for text in texts), texts


@pytest.mark.cpu
def test_shares_are_branches() -> None:
    """Ranks' blocks are all blocks, whatever the number of ranks that divides the total."""
    for total in (8, 12, 520, 1376, 4096, 2, 6):
        for ranks in (1, 2, 4, 8):
            if total % ranks == 0:
                assert blocks_of_share("K", total, ranks) * ranks == blocks_of_share("K", total, 1)
            else:
                with pytest.raises(ValueError, match=f"K is {total}, no multiple of the {ranks} ranks"):
                    blocks_of_share("K", total, ranks)
    assert blocks_of_share("K", 0, 4) == 1


@pytest.mark.cpu
def test_blocks_need_whole_tiles_and_a_multiple() -> None:
    config = stream_k.choose("gemm", 4, 8, 12, F32, 1, torch.device("cpu"))
    with pytest.raises(ValueError, match="k_blocks is 2 with split 'stream_k'"):
        dataclasses.replace(config, split="stream_k", k_blocks=2)
    with pytest.raises(ValueError, match="k_blocks is 3, allowed are"):
        dataclasses.replace(config, split="none", k_blocks=3)
    whole_tiles = dataclasses.replace(config, split="none", k_blocks=8, placement="after")
    with pytest.raises(ValueError, match="k_blocks is 8, which K = 12 is no multiple"):
        stream_k.gemm(torch.ones(4, 12), torch.ones(12, 8), config=whole_tiles)

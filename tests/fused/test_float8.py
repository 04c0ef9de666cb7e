"""Fused ops of 8-bit operands: every element against float64, the same bits on all ranks, by recipe and placement."""

import dataclasses
import itertools
import time
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

from pyrocshmem import CallMismatch, Heap, PeerTimeout, batch_invariant, signal, stream_k, target
from pyrocshmem.calls.workspace import Workspace, workspace_for
from pyrocshmem.stream_k.choice.config import BY_BLAS
from pyrocshmem.stream_k.choice.placement import placement_names
from pyrocshmem.stream_k.ops.gathered_rows import PiecesPlan
from tests.float8_error import may_be_off
from tests.fused.float8_bodies import DIVIDED, OPS, RECIPES, Whole
from tests.ranks import run_ranks, values
from tests.stopwatch import until

TIER = 3
TIMEOUT_S = 150.0
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# What it stores; the CPU target rounds bfloat16 from what our GEMM stores.
BY_BLAS_RESULT = FP16 if target.interpreted() else BF16
HEAP_BYTES = 32 << 20
SHORT_US = 500_000


def every_op(
    rank: int, world_size: int, recipe: str, seed: int, by_placement: bool
) -> list[tuple[str, bytes]]:
    """(what is wrong, the bits where all ranks have the same result) of each call: by default, or in each placement."""
    found = []
    small, odd = (24, 32, 160), (5, 48, 64)
    if by_placement:
        # The last one the BLAS can multiply.
        cases = [(small, FP32, "e4m3"), (odd, FP32, "e4m3"), ((18, 32, 512), BY_BLAS_RESULT, "e4m3")]
    else:
        results = (FP16, "e4m3"), (FP32, "e4m3"), (FP32, "e5m2")
        cases = [(shape, *result) for shape in (small, odd) for result in results]
    calls = [
        (op, placement, *case)
        for op in OPS
        for placement in (placement_names(op) if by_placement else (None,))
        for case in cases
    ]
    with Heap(HEAP_BYTES) as heap:
        for op, placement, (M, N, K), dtype, kind in calls:
            whole = Whole(op, recipe, M, N, K, world_size, heap.device, seed, kind)
            a, b, of_a, of_b = whole.of_rank(rank)
            more: dict[str, Any] = {"group": heap, "scale_a": of_a, "scale_b": of_b, "out_dtype": dtype}
            if placement is not None:
                chosen = stream_k.choose(op, M, N, K, BF16, world_size, heap.device, placement=placement)
                more["config"] = dataclasses.replace(chosen, block_m=16, block_n=32, block_k=64, comm_rows=8)
            if op == "all_gather_gemm":
                more["num_rows"] = M
            out = getattr(stream_k, op)(a, b, **more)
            heap.synchronize()
            ratio = whole.ratio(out, rank)
            what = f"{op}, {placement}, {(M, N, K)}, {kind}, {dtype}: {ratio:.2f} of the bound"
            if placement in BY_BLAS and K == 512 and not list(workspace_for(heap).plans.values())[-1].blas:
                found.append((f"{what}, not by the BLAS", b""))
            same = b"" if op in DIVIDED else out.cpu().contiguous().view(torch.uint8).numpy().tobytes()
            found.append((what if not ratio <= 1 else "", same))
    return found


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("ranks", [pytest.param(n, marks=pytest.mark.num_ranks(n)) for n in (1, 2, 3, 4)])
def test_every_op(ranks: int, recipe: str) -> None:
    check(values(run_ranks(every_op, ranks, recipe, 11, False, timeout=TIMEOUT_S)))


@pytest.mark.num_ranks(2)
@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_every_placement(recipe: str) -> None:
    check(values(run_ranks(every_op, 2, recipe, 12, True, timeout=TIMEOUT_S)))


def repeated(rank: int, world_size: int, recipe: str) -> list[str]:
    """What is wrong of calls by the BLAS with the same tensors, in which other data come each time: on a GPU they are
    replayed from the third on."""
    wrong, (M, N, K) = [], (1026, 256, 512)
    with Heap(HEAP_BYTES) as heap:
        for op, placement in itertools.product(OPS, ("unfused", "blas_blocks")):
            if placement not in placement_names(op):
                continue
            wholes = [Whole(op, recipe, M, N, K, world_size, heap.device, seed) for seed in range(4)]
            tensors = [torch.empty_like(x) for x in wholes[0].of_rank(rank)]
            config = stream_k.choose(op, M, N, K, BF16, world_size, heap.device, placement=placement)
            more: dict[str, Any] = {"group": heap, "config": config, "out_dtype": BY_BLAS_RESULT}
            if op == "all_gather_gemm":
                more["num_rows"] = M
            out = None
            for whole in wholes:
                for mine, given in zip(tensors, whole.of_rank(rank), strict=True):
                    mine.copy_(given)
                a, b, of_a, of_b = tensors
                out = getattr(stream_k, op)(a, b, out=out, scale_a=of_a, scale_b=of_b, **more)
                heap.synchronize()
                wrong += [f"{op}, {placement}"] * (not whole.ratio(out, rank) <= 1)
                heap.barrier()
    return wrong


@pytest.mark.gpu
@pytest.mark.num_ranks(2)
@pytest.mark.parametrize("recipe", RECIPES)
def test_repeated_calls(recipe: str) -> None:
    assert values(run_ranks(repeated, 2, recipe, timeout=TIMEOUT_S)) == [[]] * 2


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
            exact, off, terms = whole.exact()
            exact += residual.double()
            eps = torch.finfo(dtype).eps
            bound = eps * (exact.abs() + terms) + off + 2.0**-24 * world_size
            norm = torch.nn.functional.rms_norm(total.double(), (N,), weight.double(), 1e-6)
            if not ((total.double() - exact).abs() <= bound).all():
                wrong.append(f"total of {M, N, K}, {placement}, {dtype}")
            if total.dtype != dtype or not ((y.double() - norm).abs() <= 2 * eps * norm.abs() + 1e-6).all():
                wrong.append(f"norm of {M, N, K}, {placement}, {dtype}")
            wrong += scattered(heap, recipe, (M, N, K), dtype)
    return wrong


def scattered(heap: Heap, recipe: str, sizes: tuple[int, int, int], dtype: torch.dtype) -> list[str]:
    """What is wrong of a norm over the columns of all ranks."""
    (M, N, K), world, rank = sizes, heap.world_size, heap.rank
    whole = Whole("gemm_all_scatter", recipe, M, N, K, world, heap.device, M + 1)
    a, b, of_a, of_b = whole.of_rank(rank)
    weight = torch.rand(world * N, generator=torch.Generator().manual_seed(9)).to(heap.device)
    more: dict[str, Any] = {"group": heap, "scale_a": of_a, "scale_b": of_b, "out_dtype": dtype}
    own = weight[rank * N :][:N].clone()

    def call(a: torch.Tensor) -> torch.Tensor:
        return stream_k.gemm_rms_norm_all_scatter(a, b, own, 1e-6, **more)

    y = call(a)
    # Traced, it is one operator with the scales.
    traced = torch.compile(call, fullgraph=True, backend="eager")(a)
    heap.synchronize()
    if not torch.equal(traced, y):
        return [f"scattered norm of {sizes}, {dtype}, traced"]
    exact, off, _ = whole.exact()
    eps, rms = torch.finfo(dtype).eps, exact.square().mean(1, keepdim=True).sqrt()
    norm = torch.nn.functional.rms_norm(exact, (world * N,), weight.double(), 1e-6)
    off *= weight.double() / rms
    right = ((y.double() - norm).abs() <= 3 * eps * norm.abs() + 2 * off + 1e-6).all()
    return [] if right and y.dtype == dtype else [f"scattered norm of {sizes}, {dtype}"]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("ranks", [pytest.param(n, marks=pytest.mark.num_ranks(n)) for n in (1, 2)])
def test_norms(ranks: int, recipe: str) -> None:
    assert values(run_ranks(normed, ranks, recipe, timeout=TIMEOUT_S)) == [[]] * ranks


def invariant(rank: int, world_size: int, recipe: str) -> list[Any]:
    """In the batch-invariant mode: how many different bits the first row has, of each op that all ranks have results
    of; and what is said of a configuration by hand."""
    found: list[Any] = []
    with Heap(HEAP_BYTES) as heap, batch_invariant():
        for op in ("gemm_all_reduce", "gemm_all_scatter"):
            a, b, of_a, of_b = Whole(op, recipe, 24, 32, 300, world_size, heap.device, 5).of_rank(rank)
            more: dict[str, Any] = {"group": heap, "scale_b": of_b, "out_dtype": FP32}
            bits = set()
            for rows in (24, 7, 1):
                of_rows = of_a if of_a.numel() == 1 else of_a[:rows]
                out = getattr(stream_k, op)(a[:rows], b, scale_a=of_rows, **more)
                bits.add(out[0].cpu().numpy().tobytes())
            found.append(len(bits))
        config = stream_k.choose("gemm_all_scatter", 24, 32, 300, BF16, world_size, heap.device)
        config = dataclasses.replace(config, block_m=16, block_n=32, block_k=128, comm_rows=8)
        with pytest.raises(ValueError, match="take no config"):
            stream_k.gemm_all_scatter(a, b, scale_a=of_a, config=config, **more)
    return found


@pytest.mark.num_ranks(2)
@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_rows_in_every_batch(recipe: str) -> None:
    assert values(run_ranks(invariant, 2, recipe)) == [[1, 1]] * 2


def uneven(rank: int, world_size: int) -> list[float]:
    """Errors over their bounds of sums of which ranks have other shares of K: all choose by the longest."""
    M, N, sizes = 20, 48, (640, 48, 16)[:world_size]
    generator = torch.Generator().manual_seed(8)
    found = []
    with Heap(HEAP_BYTES) as heap:
        for recipe in RECIPES:
            of_b = "blockwise_weight" if recipe == "blockwise" else recipe
            pairs = [
                (torch.randn(M, K, generator=generator), torch.randn(N, K, generator=generator))
                for K in sizes
            ]
            shares = [
                (
                    stream_k.quantize(a.to(heap.device), recipe),
                    stream_k.quantize(b.to(heap.device), of_b),
                )
                for a, b in pairs
            ]
            meant = [[stream_k.dequantize(*x).double() for x in share] for share in shares]
            exact = sum(a @ b.t() for a, b in meant)
            # Each rank's sum, and the sum of ranks in fp32.
            bound = sum(may_be_off(a, b.t()) + 2.0**-23 * (a @ b.t()).abs() for a, b in meant)
            (a, of_a), (b, scale_b) = shares[rank]
            more: dict[str, Any] = {"scale_b": scale_b.t() if scale_b.ndim else scale_b, "out_dtype": FP32}
            more |= {"group": heap, "scale_a": of_a}
            total = stream_k.gemm_all_reduce(a, b.t(), **more)
            weight = torch.ones(N, device=heap.device)
            _, same = stream_k.gemm_all_reduce_rms_norm(a, b.t(), None, weight, 1e-6, **more)
            heap.synchronize()
            found += [float(((x.double() - exact).abs() / bound).max()) for x in (total, same)]
    return found


@pytest.mark.num_ranks(3)
def test_shares_of_k_that_differ() -> None:
    for found in values(run_ranks(uneven, 3)):
        assert max(found) <= 1


def without_rows(rank: int, world_size: int) -> float:
    """The error over its bound of a gather of one row, in pieces, of which the last rank has none."""
    with Heap(HEAP_BYTES) as heap:
        whole = Whole("all_gather_gemm", "blockwise", 1, 32, 300, world_size, heap.device, 6)
        a, b, of_a, of_b = whole.of_rank(rank)
        chosen = stream_k.choose("all_gather_gemm", 1, 32, 300, BF16, world_size, heap.device)
        config = dataclasses.replace(chosen, placement="copy_engine", split="none", chunk=1, block_k=64)
        more: dict[str, Any] = {"group": heap, "config": config, "out_dtype": FP32, "num_rows": 1}
        out = stream_k.all_gather_gemm(a, b, scale_a=of_a, scale_b=of_b, **more)
        heap.synchronize()
        return whole.ratio(out, rank)


@pytest.mark.num_ranks(2)
def test_a_rank_without_rows() -> None:
    assert max(values(run_ranks(without_rows, 2))) <= 1


def squares(rank: int, world_size: int) -> list[bool]:
    """Whether squared partials are those of the result, of few rows, which else would go by messages, and of many."""
    right = []
    with Heap(HEAP_BYTES) as heap:
        for op, M in itertools.product(("gemm_all_reduce", "gemm_all_scatter"), (5, 300)):
            a, b, of_a, of_b = Whole(op, "rowwise", M, 32, 64, world_size, heap.device, 8).of_rank(rank)
            more = {"group": heap, "scale_a": of_a, "scale_b": of_b, "out_dtype": FP32}
            out, parts = getattr(stream_k, op)(a, b, squared_partials=True, **more)
            heap.synchronize()
            right.append(torch.allclose(parts.double().sum(1), out.double().square().sum(1), rtol=1e-4))
    return right


@pytest.mark.num_ranks(2)
def test_squared_partials() -> None:
    assert values(run_ranks(squares, 2, timeout=TIMEOUT_S)) == [[True] * 4] * 2


def with_gradients(rank: int, world_size: int) -> list[str]:
    """What gathers say whose bias needs a gradient: of one B, and of several."""
    said = []
    with Heap(HEAP_BYTES) as heap:
        a, b, of_a, of_b = Whole("all_gather_gemm", "rowwise", 8, 16, 64, world_size, heap.device, 6).of_rank(
            rank
        )
        bias = torch.zeros(16, device=heap.device, requires_grad=True)
        for bs, of_bs, biases in ((b, of_b, bias), ([b, b], [of_b, of_b], [None, bias])):
            with pytest.raises(ValueError, match="has no gradient") as caught:
                stream_k.all_gather_gemm(a, bs, scale_a=of_a, scale_b=of_bs, bias=biases, group=heap)
            said.append(str(caught.value))
    return said


@pytest.mark.num_ranks(2)
def test_there_are_no_gradients() -> None:
    for said in values(run_ranks(with_gradients, 2)):
        assert ["has no gradient; call it under torch.no_grad()" in text for text in said] == [True, True]


def other_calls(rank: int, world_size: int) -> list[str]:
    """What ranks hear that differ in what travels, in what is stored, and in how sums are made."""
    said = []
    with Heap(HEAP_BYTES) as heap:
        for op, recipe, more in (
            ("all_gather_gemm", ("rowwise", "blockwise")[rank], {}),
            ("gemm_all_reduce", "rowwise", {"out_dtype": (FP16, FP32)[rank]}),
            ("gemm_all_reduce", "rowwise", {"out_dtype": FP32, "use_fast_accum": rank == 1}),
            ("gemm_all_reduce", ("rowwise", "blockwise")[rank], {"use_fast_accum": True}),
        ):
            whole = Whole(op, recipe, 8, 16, 256, world_size, heap.device, 3)
            a, b, of_a, of_b = whole.of_rank(rank)
            with pytest.raises(CallMismatch) as caught:
                getattr(stream_k, op)(
                    a, b, group=heap, scale_a=of_a, scale_b=of_b, **{"out_dtype": FP32, **more}
                )
            said.append(str(caught.value))
            heap.recover()
        # Refused before ranks plan together: nothing is broken.
        whole = Whole("gemm_all_scatter", "rowwise", 8, 16, 256, world_size, heap.device, 3)
        a, b, of_a, of_b = whole.of_rank(rank)
        weight = torch.ones(16, device=heap.device)
        given: dict[str, Any] = {"group": heap, "scale_a": of_a, "scale_b": of_b}
        with batch_invariant(tp_invariant=True), pytest.raises(ValueError, match="is not tp-invariant"):
            stream_k.gemm_rms_norm_all_scatter(a, b, weight, 1e-6, **given)
        with pytest.raises(ValueError, match="scale_b"):
            stream_k.gemm_rms_norm_all_scatter(a, b, weight, 1e-6, **{**given, "scale_b": of_b[:, :3]})
        assert not heap.broken
        stream_k.gemm_rms_norm_all_scatter(a, b, weight, 1e-6, **given)
        heap.synchronize()
    return said


@pytest.mark.num_ranks(2)
def test_ranks_that_differ() -> None:
    words = ("2 scales a row", "result=torch.float16", "use_fast_accum=True", "use_fast_accum=True")
    for said in values(run_ranks(other_calls, 2)):
        for text, expected in zip(said, words, strict=True):
            assert expected in text


def left_alone(rank: int, world_size: int) -> list[str]:
    """What rank 0 hears in calls that rank 1 doesn't make, each between right ones; and what was wrong with these."""
    said = []
    with Heap(HEAP_BYTES) as heap:
        workspace, told = Workspace(heap, wait_seconds=20.0), heap.zeros(1)
        tell = heap.peer_view(told, 1)

        def made(call: Any) -> torch.Tensor:
            found: torch.Tensor = call()
            heap.synchronize()
            return found

        for op, recipe in zip(OPS, ("rowwise", "blockwise", "rowwise", "blockwise"), strict=True):
            whole = Whole(op, recipe, 8, 16, 256, world_size, heap.device, 4)
            a, b, of_a, of_b = whole.of_rank(rank)
            more: dict[str, Any] = {"scale_a": of_a, "scale_b": of_b, "out_dtype": FP32}
            call = partial(getattr(stream_k, op), a, b, group=heap, workspace=workspace, **more)
            for _ in range(2):
                told.zero_()
                if whole.ratio(made(call), rank) > 1:
                    said.append(f"{op}: wrong")
                workspace.control[int(signal.BUDGET_US.value)] = SHORT_US
                if rank == 0:
                    with pytest.raises(PeerTimeout) as caught:
                        made(call)
                    said.append(str(caught.value))
                    tell.fill_(1)
                else:
                    until(told.item)
                heap.recover()
                workspace.control[int(signal.BUDGET_US.value)] = 20_000_000
    return said


@pytest.mark.num_ranks(2)
def test_a_rank_that_is_left_alone_hears_of_it() -> None:
    """Whether data or scales are missing; and recovers."""
    alone, other = values(run_ranks(left_alone, 2, timeout=100.0))
    assert other == []
    for number, text in enumerate(alone):
        assert OPS[number // 2] in text
        assert "rank 0 waited" in text
        assert "rank 1" in text
    assert len(alone) == 2 * len(OPS)


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

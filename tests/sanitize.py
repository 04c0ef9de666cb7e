"""Every kernel once, for compute-sanitizer:

    compute-sanitizer --tool memcheck python -m tests.sanitize
    compute-sanitizer --tool racecheck --target-processes all python -m tests.sanitize --ranks 2

A world of one runs the kernels against its own heap. Where a rank alone would run the plain GEMM, or copy, the plans
are made all the same, but for sums of row blocks, which take two. Several ranks, one process each, go round the GPUs,
and take a GPU's time in turns where there are more of them. They run the kernels of tests/litmus, too, guards and all.
No call is replayed as a graph, whose kernels a sanitizer runs one at a time, in its own order
(`pyrocshmem.calls.graphs`).
Each result is checked, so that a run which launched nothing can't pass. Prints a line a call; exits with 1 when a
result is wrong.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

# Every tensor is an allocation of its own, so that a read past its end is one of nobody's memory.
os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")

from pyrocshmem import Heap, target  # isort: skip  # before Triton
import torch
import torch.distributed as dist
import typer

from pyrocshmem import batch_invariant, collectives, status, stream_k
from pyrocshmem.calls.call_name import CallName
from pyrocshmem.calls.planned import run
from pyrocshmem.calls.timeline import meet_kernel
from pyrocshmem.calls.workspace import Workspace, workspace_for
from pyrocshmem.collectives.exchange import _KINDS, exchange
from pyrocshmem.doctor import ring_kernel
from pyrocshmem.message_slots import SENTINEL
from pyrocshmem.stream_k.choice.config import BY_BLOCKS, BY_MESSAGE, BY_ROWS
from pyrocshmem.stream_k.choice.placement import placement_names, placements_by_op
from pyrocshmem.stream_k.local_gemm import product
from pyrocshmem.stream_k.nn import pointwise
from pyrocshmem.stream_k.ops import gemm_rms_norm
from pyrocshmem.stream_k.ops import op as fused
from tests import sharing
from tests.fused.norm_bodies import EPS
from tests.litmus.bodies import Litmus, litmus
from tests.stress.ops import OPS, Facts

# What a rank alone has a part of, of ops by row blocks and by messages; sums of row blocks take two.
PLANNED = [
    (name, placement)
    for name in placements_by_op()
    for placement in (*BY_ROWS, *BY_MESSAGE)
    if name != "gemm" and placement in placement_names(name)
    if placement in BY_MESSAGE or name in ("all_gather_gemm", "gemm_all_scatter")
]
SHAPES = ((256, 512, 1024), (97, 193, 131))
# Products that, as an H200 has them, fetch B ahead of the launch before, and leave their parts to a second one.
CHOSEN = ((63, 4095, 1024), (64, 4096, 1024), (5, 250, 4096))


def close(out: torch.Tensor, expected: torch.Tensor) -> bool:
    """Within what rounding to fp16 explains."""
    return bool((out.double() - expected).abs().max() <= 2**-9 * expected.abs().max())


def alone() -> int:
    """A world of one: the number of wrong results."""
    device = target.device()
    wrong = 0

    def report(name: str, ok: bool) -> None:
        nonlocal wrong
        wrong += not ok
        print(f"{name}: {'right' if ok else 'WRONG'}", flush=True)

    with Heap(256 << 20) as heap:
        for M, N, K in CHOSEN:
            a = torch.randn(M, K, dtype=torch.float16, device=device)
            b = torch.randn(K, N, dtype=torch.float16, device=device)
            report(f"gemm {M} {N} {K}", close(stream_k.gemm(a, b), a.double() @ b.double()))
        for M, N, K in SHAPES:
            a = torch.randn(M, K, dtype=torch.float16, device=device)
            b = torch.randn(K, N, dtype=torch.float16, device=device)
            expected = a.double() @ b.double()
            squares = expected.square().sum(1)
            for split in ("none", "stream_k"):
                config = stream_k.Config(placement="after", split=split, num_programs=5)
                report(f"gemm {M} {N} {K} {split}", close(stream_k.gemm(a, b, config=config), expected))
            config = stream_k.Config(
                block_m=64,
                block_n=64,
                block_k=16,
                num_warps=4,
                subtiles=1,
                split="separate",
                placement="after",
            )
            report(f"gemm {M} {N} {K} separate", close(stream_k.gemm(a, b, config=config), expected))
            for op in ("gemm_all_reduce", "gemm_all_scatter"):
                for placement in ("after", "beside", "own_stream", "inside"):
                    for algorithm in ("one_shot", "two_shot") if op == "gemm_all_reduce" else ("two_shot",):
                        config = stream_k.choose(op, M, N, K, a.dtype, 1, device)
                        config = dataclasses.replace(config, placement=placement, algorithm=algorithm)
                        # Squares asked for: a world of one then takes the kernels of a larger one.
                        out, partials = getattr(stream_k, op)(
                            a, b, group=heap, config=config, squared_partials=True
                        )
                        heap.synchronize()
                        ok = close(out, expected) and close(partials.sum(1), squares)
                        report(f"{op} {M} {N} {K} {placement} {algorithm}", ok)
            for name, placement in PLANNED:
                config = stream_k.choose(name, M, N, K, a.dtype, 1, device)
                config = dataclasses.replace(config, placement=placement, split="none", chunk=1)
                with mock.patch.object(fused, "_without_plan", return_value=None):
                    out = getattr(stream_k, name)(a, b, group=heap, config=config)
                heap.synchronize()
                report(f"{name} {M} {N} {K} {placement}", close(out, expected))
        for name, ok in (
            *_exchanges(heap),
            *_norm_products(heap),
            *_norms(heap),
            *_more_norms(heap),
            *_float8(heap),
            *_signals(heap),
        ):
            report(name, ok)
    for name, ok in (*_edges(device), *_pointwise(device)):
        report(name, ok)
    return wrong


def _exchanges(heap: Heap) -> Iterator[tuple[str, bool]]:
    """Whole tensors in all ways, of whole units and of odd sizes: what one rank sends itself. Integers that need marks,
    and largest values."""
    dtypes = (torch.float16, "sum"), (torch.float32, "max"), (torch.int64, "sum"), (torch.uint8, "min")
    for kind, (dtype, reduction) in itertools.product(_KINDS, dtypes):
        for shape in ((96, 80), (7, 13)):
            x = torch.randn(shape).to(dtype) if dtype.is_floating_point else _marked(shape, dtype, 0)
            x = x.to(heap.device)
            out = torch.zeros_like(x)
            exchange(workspace_for(heap), status.Op.TEST, kind, x, out, reduction=reduction)
            heap.synchronize()
            yield f"{kind} {shape} {dtype} {reduction}", torch.equal(out, x)


def _marked(shape: tuple[int, int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Integers of whose words many look like an empty slot."""
    nbytes = math.prod(shape) * dtype.itemsize
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(SENTINEL - 3, SENTINEL + 3, (nbytes // 4 + 1,), generator=generator)
    return words.to(torch.int32).view(torch.uint8)[:nbytes].view(dtype).view(shape)


def _integers(heap: Heap) -> Iterator[tuple[str, bool]]:
    """The same between ranks."""
    for shape in ((96, 80), (7, 13)):
        parts = [_marked(shape, torch.int64, rank).to(heap.device) for rank in range(heap.world_size)]
        x, total = parts[heap.rank], torch.stack(parts).sum(0)
        for name, found, expected in (
            ("one_shot", collectives.all_reduce(x, group=heap, algorithm="one_shot"), total),
            ("two_shot", collectives.all_reduce(x, group=heap, algorithm="two_shot"), total),
            ("all_gather", collectives.all_gather(x, group=heap), torch.cat(parts)),
            ("all_scatter", collectives.all_scatter(x, group=heap), torch.cat(parts, 1)),
            ("broadcast", collectives.broadcast(x, 1, group=heap), parts[1]),
        ):
            heap.synchronize()
            yield f"{name} {shape} of integers", torch.equal(found, expected)


def _norm_products(heap: Heap) -> Iterator[tuple[str, bool]]:
    """Both products with RMSNorm, of one rank; the sum as several ranks make it."""
    norm = torch.nn.functional.rms_norm
    for M, N, K in SHAPES:
        a, b, residual, weight = (
            torch.randn(shape, dtype=torch.float16, device=heap.device)
            for shape in ((M, K), (K, N), (M, N), (N,))
        )
        product = a.double() @ b.double()
        y = stream_k.gemm_rms_norm_all_scatter(a, b, weight, EPS, group=heap)
        heap.synchronize()
        ok = close(y, norm(product, (N,), weight.double(), EPS))
        yield f"gemm_rms_norm_all_scatter {M} {N} {K}", ok
        operands = a, b, residual, weight, EPS, None
        exact = product + residual.double()
        for placement, algorithm in itertools.product(BY_MESSAGE, ("one_shot", "two_shot")):
            config = stream_k.choose("gemm_all_reduce", M, N, K, a.dtype, 1, heap.device)
            config = dataclasses.replace(config, placement=placement, algorithm=algorithm)
            workspace, call = workspace_for(heap), CallName("gemm_all_reduce_rms_norm")
            workspace.compare(call)
            y, total = gemm_rms_norm._Plan(call, *operands, False, config, workspace).run(*operands)
            heap.synchronize()
            ok = close(total, exact) and close(y, norm(exact, (N,), weight.double(), EPS))
            yield f"gemm_all_reduce_rms_norm {M} {N} {K} {placement} {algorithm}", ok


def _norms(heap: Heap) -> Iterator[tuple[str, bool]]:
    """RMSNorm of columns that are spread over ranks, forward and backward."""
    world, rank = heap.world_size, heap.rank
    for (M, N), replicated in itertools.product(((96, 80), (7, 13)), (False, True)):
        generator = torch.Generator().manual_seed(M)
        # x, weight, and what the result is multiplied by: of all ranks.
        wholes = [
            torch.randn(*rows, world * N, generator=generator).half().to(heap.device)
            for rows in ((M,), (), (M,))
        ]
        own = slice(rank * N, (rank + 1) * N)
        x, weight = (whole[..., own].clone().requires_grad_() for whole in wholes[:2])
        y = collectives.rms_norm(x, weight, EPS, group=heap, replicated=replicated)
        assert isinstance(y, torch.Tensor)
        part = slice(None) if replicated else own
        (y * wholes[2][:, part]).sum().backward()
        heap.synchronize()
        exact = [whole.double().requires_grad_() for whole in wholes]
        truth = torch.nn.functional.rms_norm(exact[0], (world * N,), exact[1], EPS)
        (truth * exact[2]).sum().backward()
        pairs = [(y, truth[:, part])]
        pairs += [(mine.grad, each.grad[..., own]) for mine, each in zip((x, weight), exact, strict=False)]
        yield (
            f"rms_norm {M} {N} {'replicated' if replicated else 'sharded'}",
            all(close(*pair) for pair in pairs),
        )


def _more_norms(heap: Heap) -> Iterator[tuple[str, bool]]:
    """Norms of queries and keys, and norms in 8 bits of a rank's own rows and behind SwiGLU."""
    world, rank, device = heap.world_size, heap.rank, heap.device
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).half().to(device)

    M, N, n, norm = 97, 160, 48, torch.nn.functional.rms_norm
    whole, weights = random(world, M, N + n + 3), (random(N), random(n))
    columns = (slice(0, N), slice(N, N + n))
    both = [whole[rank][:, part] for part in columns]
    found = collectives.rms_norm_pair(*both, *weights, EPS, group=heap)
    exact = [
        norm(torch.cat([*whole[..., part]], 1).double(), (world * size,), weight.repeat(world).double(), EPS)
        for part, size, weight in zip(columns, (N, n), weights, strict=True)
    ]
    pairs = [
        (y, truth[:, rank * size :][:, :size]) for y, truth, size in zip(found, exact, (N, n), strict=True)
    ]
    yield "rms_norm_pair", all(close(*pair) for pair in pairs)
    of_head = random(16)
    found = collectives.rms_norm_pair(*both, of_head, of_head, EPS, head_dim=16)
    truth = [norm(x.double().unflatten(1, (-1, 16)), (16,), of_head.double(), EPS).flatten(1) for x in both]
    yield "rms_norm_pair of heads", all(close(*pair) for pair in zip(found, truth, strict=True))
    recipes: tuple[Any, ...] = ("rowwise", "blockwise")
    for recipe in recipes:
        x, residual, weight = random(M, 300), random(M, 300), random(300)
        normed = stream_k.quantize_rms_norm(
            x, weight, EPS, quantize=recipe, residual=residual, keep_norm=True
        )
        back = stream_k.dequantize(normed.quantized, normed.scale)
        yield f"quantize_rms_norm {recipe}", torch.equal(back, in_8_bits(normed.norm, recipe))
        q, scale = stream_k.quantize_swiglu(random(M, 600), recipe)
        yield f"quantize_swiglu {recipe}", bool(stream_k.dequantize(q, scale).isfinite().all())


def _invariant(heap: Heap) -> Iterator[tuple[str, bool]]:
    """What the modes of `batch_invariant` have kernels of their own for: K as a tree of blocks, and norms of rows."""
    M, N, K = 96, 80, 128
    world, device = heap.world_size, heap.device
    generator = torch.Generator().manual_seed(1)
    a, b, residual, weight = (
        torch.randn(shape, generator=generator).half().to(device)
        for shape in ((world, M, K), (world, K, N), (M, N), (N,))
    )
    mine = a[heap.rank], b[heap.rank]
    product = torch.bmm(a.double(), b.double()).sum(0)
    total = product + residual.double()
    exact = torch.nn.functional.rms_norm(total, (N,), weight.double(), EPS)
    for tp_invariant in (False, True):
        with batch_invariant(tp_invariant=tp_invariant):
            sums = stream_k.gemm_all_reduce(*mine, group=heap)
            rows = stream_k.gemm_reduce_scatter(*mine, group=heap)
            y, updated = stream_k.gemm_all_reduce_rms_norm(*mine, residual, weight, EPS, group=heap)
            found = list(_norms(heap))
        heap.synchronize()
        mode = "tp_invariant" if tp_invariant else "batch_invariant"
        yield f"gemm_all_reduce {mode}", close(sums, product)
        yield f"gemm_reduce_scatter {mode}", close(rows, product.chunk(world)[heap.rank])
        yield f"gemm_all_reduce_rms_norm {mode}", close(updated, total) and close(y, exact)
        yield from ((f"{name} {mode}", ok) for name, ok in found)


def _float8(heap: Heap) -> Iterator[tuple[str, bool]]:
    """Quantizing, and 8-bit operands in each recipe and, where rows are gathered, each way of them."""
    M, N, K = 98, 80, 264
    world, rank, device = heap.world_size, heap.rank, heap.device
    generator = torch.Generator().manual_seed(2)
    rows, weights = (torch.randn(world, n, K, generator=generator).half().to(device) for n in (M, N))
    for recipe in ("tensorwise", "rowwise", "blockwise"):
        of_weights = "blockwise_weight" if recipe == "blockwise" else recipe
        a = [stream_k.quantize(x, recipe) for x in rows]
        b = [stream_k.quantize(x, of_weights) for x in weights]
        A, B = ([stream_k.dequantize(*x).double() for x in operands] for operands in (a, b))
        own, columns, scale_b = a[rank][0], b[rank][0].t(), b[rank][1]
        scales = {"scale_a": a[rank][1], "scale_b": scale_b.t() if scale_b.ndim else scale_b}
        product = A[rank] @ B[rank].t()
        yield f"gemm {recipe}", near(stream_k.gemm(own, columns, **scales), product)
        found = stream_k.gemm(own, columns, use_fast_accum=True, **scales)
        yield f"gemm {recipe}, fast", near(found, product)
        mine = {**scales, "group": heap}
        total = sum(x @ y.t() for x, y in zip(A, B, strict=True))
        yield f"gemm_all_reduce {recipe}", near(stream_k.gemm_all_reduce(own, columns, **mine), total)
        ones = torch.ones(N, dtype=torch.bfloat16, device=device)
        _, found = stream_k.gemm_all_reduce_rms_norm(own, columns, None, ones, EPS, **mine)
        yield f"gemm_all_reduce_rms_norm {recipe}", near(found, total)
        if recipe != "tensorwise":
            more = {"group": heap, "quantize": recipe, "keep_norm": True}
            normed = stream_k.gemm_all_reduce_rms_norm(own, columns, None, ones, EPS, **scales, **more)
            back = stream_k.dequantize(normed.quantized, normed.scale)
            yield (
                f"gemm_all_reduce_rms_norm, quantized {recipe}",
                torch.equal(back, in_8_bits(normed.norm, recipe)),
            )
        found = stream_k.gemm_reduce_scatter(own, columns, **mine)
        yield f"gemm_reduce_scatter {recipe}", near(found, total.tensor_split(world)[rank])
        wide = torch.cat([A[0] @ y.t() for y in B], 1)
        more = {"scale_b": scales["scale_b"], "group": heap}
        found = stream_k.gemm_all_scatter(a[0][0], columns, scale_a=a[0][1], **more)
        yield f"gemm_all_scatter {recipe}", near(found, wide)
        config = stream_k.choose("all_gather_gemm", M, N, K, torch.bfloat16, world, device)
        config = dataclasses.replace(config, block_m=32, block_n=64, comm_rows=8, split="none", chunk=1)
        for placement in ("messages", "copy_engine"):
            shard, scale = a[0][0].tensor_split(world)[rank], a[0][1]
            scale = scale.tensor_split(world)[rank] if scale.numel() > 1 else scale
            gathers = {"config": dataclasses.replace(config, placement=placement), "num_rows": M}
            found = stream_k.all_gather_gemm(shard, columns, scale_a=scale, **gathers, **more)
            yield f"all_gather_gemm {recipe} {placement}", near(found, A[0] @ B[rank].t())
        heap.synchronize()


def in_8_bits(x: torch.Tensor | None, recipe: str) -> torch.Tensor:
    assert x is not None
    return stream_k.dequantize(*stream_k.quantize(x, recipe))


def near(out: torch.Tensor, expected: torch.Tensor) -> bool:
    """Within what the matrix unit and rounding to bf16 explain."""
    return bool((out.double() - expected).abs().max() <= 2**-7 * expected.abs().max())


def _signals(heap: Heap) -> Iterator[tuple[str, bool]]:
    """What `pyrocshmem doctor` and timelines launch."""
    workspace, world = workspace_for(heap), heap.world_size
    data = heap.zeros(64, dtype=torch.int32)
    wrong = torch.zeros(1, dtype=torch.int32, device=heap.device)
    ring = data, wrong, workspace.context
    if not target.interpreted():
        ring_kernel.warmup(*ring, WORLD=world, BLOCK=64, grid=(1,))
    heap.barrier()
    ring_kernel[(1,)](*ring, WORLD=world, BLOCK=64)
    heap.synchronize()
    yield "ring", int(wrong) == 0 and bool(data.all())
    before = workspace.epoch()
    run(workspace, "meet", CallName("meet"), meet_kernel, {"WORLD": world}, 1, (workspace.context,))
    heap.synchronize()
    yield "meet", workspace.epoch() == before + 1


def _edges(device: torch.device) -> Iterator[tuple[str, bool]]:
    """Products whose last tile has rows behind those of A: none's, those of a larger tensor, those of a copy."""
    for M, N, K in ((3, 8192, 512), (17, 4096, 1024), (200, 512, 1024)):
        whole = torch.randn(256, K, dtype=torch.float16, device=device)
        b = torch.randn(N, K, dtype=torch.float16, device=device).t()
        expected = whole[:M].double() @ b.double()
        plain = whole[:M].clone()
        for name, a, masked, copied in (
            ("as it is", plain, False, False),
            ("masked", plain, True, False),
            ("copied", plain, False, True),
            ("rows behind", whole[:M], False, False),
        ):
            with (
                mock.patch.object(product, "_better_masked", return_value=masked),
                mock.patch.object(product, "rows_cost_more", return_value=copied),
            ):
                out = stream_k.gemm(a, b, workspace=Workspace(device=device))
            yield f"gemm {M} {N} {K} {name}", close(out, expected)


def _pointwise(device: torch.device) -> Iterator[tuple[str, bool]]:
    """The kernels between products, forward and backward, of even and odd sizes."""
    for M, F, D in ((16, 1032, 64), (7, 1027, 6)):
        x = torch.randn(M, 2 * F, dtype=torch.float16, device=device, requires_grad=True)
        gate, up = x.detach().double().requires_grad_().chunk(2, -1)
        y, exact = pointwise._SwiGLU.apply(x), torch.nn.functional.silu(gate) * up
        y.sum().backward()
        wanted = torch.cat(torch.autograd.grad(exact.sum(), (gate, up)), -1)
        yield f"swiglu {M} {F}", close(y, exact) and close(x.grad, wanted)
        heads = torch.randn(2, M, 7, D, dtype=torch.float16, device=device, requires_grad=True)
        turn = torch.randn(2, M, D // 2, device=device).unbind()
        found = pointwise._Rotated.apply(heads, *turn, 2)
        exact_heads = heads.detach().double().requires_grad_()
        truth = pointwise.rotated_heads(exact_heads, turn, 2)
        grads = [torch.randn_like(each) for each in found]
        torch.autograd.backward(found, grads)
        torch.autograd.backward(truth, [each.double() for each in grads])
        pairs = [*zip(found, truth, strict=True), (heads.grad, exact_heads.grad)]
        yield f"rotate {M} {D}", all(close(*pair) for pair in pairs)


_FACTS: Facts = {"M": 96, "N": 80, "dtype": "float16"}
_NORM: Facts = {"K": 128, "bias": "own", "weight": "fp32", "wire": None}
_PRODUCT: Facts = {"K": 128, "layout": "row", "bias": "own", "activation": "none", "out": "symmetric"}


def _calls() -> Iterator[tuple[str, Facts]]:
    """Every op of several ranks, in every placement and algorithm, with partial sums of 16 bits and of fp32."""
    for name in OPS:
        if name in placements_by_op() and name != "gemm":
            sums = name in ("gemm_all_reduce", "gemm_reduce_scatter")
            modes: tuple[Facts, ...] = ({}, {"partial_dtype": "float32"}) if sums else ({},)
            for placement, mode in itertools.product(placement_names(name), modes):
                both = name == "gemm_all_reduce" and placement not in (*BY_ROWS, *BY_BLOCKS)
                for more in ({"algorithm": "one_shot"}, {"algorithm": "two_shot"}) if both else ({},):
                    yield name, {**_FACTS, **_PRODUCT, "config": {"placement": placement, **more, **mode}}
                    if name == "all_gather_gemm":  # unequal blocks of rows take other kernels
                        yield name, {**_FACTS, **_PRODUCT, "M": 97, "config": {"placement": placement}}
        elif name == "gemm_all_reduce_rms_norm":
            # Of blocks of rows what sums adds the residual.
            ways = [*itertools.product(BY_MESSAGE, ("one_shot", "two_shot"))]
            ways += [(placement, "two_shot") for placement in ("copy_engine", *BY_BLOCKS)]
            for (placement, algorithm), wire in itertools.product(ways, (None, "fp32")):
                config = {"placement": placement, "algorithm": algorithm}
                yield name, {**_FACTS, **_NORM, "wire": wire, "residual": True, "config": config}
        elif name == "gemm_rms_norm_all_scatter":
            yield name, {**_FACTS, **_NORM, "residual": False, "config": {"split": "stream_k"}}
        elif name == "all_reduce_rms_norm":
            for algorithm, recipe in itertools.product(
                ("one_shot", "two_shot"), (None, "rowwise", "blockwise")
            ):
                yield name, {**_FACTS, "options": {"algorithm": algorithm, "quantize": recipe}}
        elif name == "all_reduce":
            for algorithm in ("one_shot", "two_shot"):
                yield name, {**_FACTS, "options": {"algorithm": algorithm}}
        elif name == "rms_norm":
            for replicated in (False, True):
                yield name, {**_FACTS, "options": {"replicated": replicated}}
        elif name not in ("gemm", "float8"):  # `_float8` has the latter
            yield name, {**_FACTS, "options": {}}


# Rounds enough that every place is used twice, and, of copies, a batch.
_LITMUS = [Litmus(how, 60) for how in ("push", "pull", "buffering")]
_LITMUS += [Litmus("tma", 60, pieces=8), Litmus("copies", 200)]


def _memory_order(rank: int, world_size: int) -> Iterator[tuple[str, bool]]:
    """The kernels that the tests of the memory order play with, in both directions of every pair."""
    for found in litmus(rank, world_size, _LITMUS):
        sends = found.litmus.how != "buffering" and rank == found.pair[0]
        played = found.played > 0 if sends else found.played == found.litmus.rounds
        yield f"litmus {found.litmus.how} {found.pair}", played and found.bad == 0 and not any(found.missed)


def together(rank: int, world_size: int, meeting: str) -> int:
    """One of several ranks, which meet in a file and may share GPUs: the number of wrong results."""
    device = sharing.device(rank)
    if device.type != "cpu":
        torch.cuda.set_device(device)
    store = dist.FileStore(meeting, world_size)
    # Without NCCL, which refuses ranks that share a GPU.
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    wrong = 0
    with Heap(256 << 20) as heap:
        for name, facts in _calls():
            call = OPS[name].make(facts, heap)
            call.load(1)
            result = call.run().clone()
            heap.synchronize()
            error = call.judge(1, result)
            call.free()
            wrong += error != ""
            if rank == 0 or error:
                print(
                    f"rank {rank}: {name} {facts.get('config', facts.get('options'))}: {error or 'right'}",
                    flush=True,
                )
        more = (_integers, _norms, _more_norms, _invariant, _float8, _signals)
        for name, ok in (found for each in more for found in each(heap)):
            wrong += not ok
            print(f"rank {rank}: {name}: {'right' if ok else 'WRONG'}", flush=True)
        heap.barrier()
    for name, ok in _memory_order(rank, world_size):
        wrong += not ok
        print(f"rank {rank}: {name}: {'right' if ok else 'WRONG'}", flush=True)
    dist.destroy_process_group()
    return wrong


def main(
    ranks: Annotated[int, typer.Option(help="processes, which may share GPUs")] = 1,
    rank: Annotated[int | None, typer.Option(hidden=True)] = None,
    meeting: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    os.environ.setdefault("PYROCSHMEM_GRAPHS", "0")
    if rank is not None:
        raise typer.Exit(1 if together(rank, ranks, meeting) else 0)
    if ranks == 1:
        raise typer.Exit(1 if alone() else 0)
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "tests.sanitize",
            f"--ranks={ranks}",
            f"--meeting={Path(folder) / 'store'}",
        ]
        environment = {"PYROCSHMEM_WAIT_SECONDS": sharing.WAIT_SECONDS, **os.environ}
        processes = [subprocess.Popen([*command, f"--rank={r}"], env=environment) for r in range(ranks)]
        raise typer.Exit(max(abs(process.wait()) for process in processes))


if __name__ == "__main__":
    typer.run(main)

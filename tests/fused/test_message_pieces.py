"""Messages larger than a slot may be go in pieces: the same results, bias and norm included."""

import dataclasses
import itertools

import pytest
import torch
from torch.nn import functional

from pyrocshmem import Heap, stream_k, target
from pyrocshmem.calls.workspace import Workspace
from pyrocshmem.collectives import exchange
from pyrocshmem.stream_k.ops import by_message
from tests.ranks import run_ranks, values

TIER = 2
SHAPES = ((40, 51, 33), (7, 64, 16), (2, 300, 16))
# A few rows of the first products, less than one of the last.
PIECE_BYTES = 2048


def in_pieces(rank: int, world_size: int) -> list[str]:
    """Every sum with a bias, in many pieces; what is further from float64 than fp32 sums are."""
    exchange.PIECE_BYTES, by_message._PIECE = PIECE_BYTES, PIECE_BYTES // 4
    by_message._PIECES = 1 << 20  # as many as that makes
    device = target.device(rank)
    wrong = []
    with Heap(32 << 20) as heap:
        for M, N, K in SHAPES:
            generator = torch.Generator().manual_seed(M)
            a, b, bias, residual = (
                torch.randn(*shape, generator=generator).to(device)
                for shape in ((M, K * world_size), (K * world_size, N), (N,), (M, N))
            )
            share = slice(rank * K, rank * K + K)
            operands = (a[:, share], b[share])
            product = a.double() @ b.double() + bias.double()
            total = product + residual.double()
            config = stream_k.choose("gemm_all_reduce", M, N, K, a.dtype, world_size, device)
            for placement, algorithm in itertools.product(("messages", "unfused"), ("one_shot", "two_shot")):
                chosen = dataclasses.replace(config, placement=placement, algorithm=algorithm)
                workspace = Workspace(heap)
                common = {"group": heap, "bias": bias, "config": chosen, "workspace": workspace}
                found = {
                    "sum": (stream_k.gemm_all_reduce(*operands, activation="relu", **common), product.relu()),
                    "rows": (
                        stream_k.gemm_reduce_scatter(*operands, **common),
                        torch.tensor_split(product, world_size)[rank],
                    ),
                }
                weight = torch.ones(N, device=device)
                normed, kept = stream_k.gemm_all_reduce_rms_norm(*operands, residual, weight, 1e-6, **common)
                found["norm"] = normed, functional.rms_norm(total, (N,), eps=1e-6)
                found["total"] = kept, total
                heap.synchronize()
                pieces = [len(plan.sent.exchange.launches) for plan in workspace.plans.values()]
                if SHAPES[0] == (M, N, K) and min(pieces) < 2:
                    wrong.append(f"{M} x {N}, {placement}, {algorithm}: pieces {pieces}")
                for name, (value, expected) in found.items():
                    error = (value.double() - expected).abs().max().item()
                    if not error <= 1e-5 * expected.abs().max().item():
                        wrong.append(f"{name} {M} x {N}, {placement}, {algorithm}: off by {error}")
                workspace.free()
    return wrong


@pytest.mark.num_ranks(2)
def test_in_pieces() -> None:
    assert values(run_ranks(in_pieces, 2, timeout=90.0)) == [[]] * 2


@pytest.mark.parametrize("world", [2, 3, 4, 8])
@pytest.mark.parametrize("kind", ["two_shot", "reduce_scatter"])
def test_a_large_product_takes_few_launches(kind: str, world: int) -> None:
    """About four, however large it is: one for each 2M elements would be 15 of 61 MB, which hosts are slower than."""
    for M, N in ((3739, 8192), (4913, 5120), (8787, 6144), (16384, 16384), (1025, 4096)):
        x = torch.empty(1, dtype=torch.bfloat16).expand(M, N)
        size = by_message.piece_bytes(x.numel(), x.dtype)
        pieces = exchange._pieces(kind, x, x.dtype, world, False, size)
        assert len(pieces) <= 5
        assert sum(piece.rows * piece.width for piece in pieces) >= -(-M * N // world)
        slots = 2 * max(exchange.slot_bytes(kind, piece, x.dtype, x.dtype, world) for piece in pieces)
        most = max(1.0, 4 / (M * N / by_message._PIECE)) * x.numel() * x.element_size()
        assert slots <= 1.1 * most * (1 if kind == "two_shot" else 0.5), (M, N)

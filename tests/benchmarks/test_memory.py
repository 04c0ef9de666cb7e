"""Workspaces of a middle size: what a call of each op keeps, in every placement, against what its design needs."""

from collections.abc import Callable

import pytest
import torch

from pyrocshmem import Heap, target
from pyrocshmem.benchmarks import chosen, memory, providers
from pyrocshmem.benchmarks.operands import Operands
from pyrocshmem.benchmarks.provider import Unavailable, provided
from pyrocshmem.benchmarks.shapes import Case
from pyrocshmem.calls.workspace import Workspace
from pyrocshmem.stream_k.choice.config import Config
from pyrocshmem.stream_k.choice.placement import placement_names
from pyrocshmem.stream_k.run.calls import our_run
from tests.ranks import run_ranks, values

TIER = 2
pytestmark = pytest.mark.gpu_a_rank("allocations of a rank are its GPU's")

M, N, K, R = 512, 256, 64, 2
RESULT = M * N * 2  # of fp16
# Flags of tiles and steps, tokens.
SMALL = 8 << 10


def slots(width: int) -> int:
    """Two, of the partial sums that go to peers."""
    return 2 * M * N * (R - 1) // R * width


def messages(nbytes: int) -> int:
    """Two slots that take turns, each of whole MiB (up to 4 of them)."""
    return 2 * -(-nbytes >> 20 << 20)


# By op, of placements: bytes that the design needs where partial sums have so many. What is pulled tile by tile has the
# rank's own rows in its slots, too; of an all-scatter the result lies on the heap, where peers write it, and so it does
# of an all-reduce in two shots.
Need = Callable[[int], int]
PULLED: Need = lambda width: 2 * M * N * width  # noqa: E731
SUMMED: dict[str, Need] = dict.fromkeys(("after", "beside", "own_stream", "inside"), PULLED)
NEEDS: dict[str, dict[str, Need]] = {
    "gemm_reduce_scatter": {
        "copy_engine": slots,
        "blas_blocks": lambda width: slots(width) + M * N // R * width,
        "messages": lambda width: messages(M * N * width),
        "unfused": lambda width: messages(M * N * width) + M * N * width,
    },
    "gemm_all_reduce": SUMMED
    | {
        "copy_engine": lambda width: slots(width) + RESULT // R,
        "blas_blocks": lambda width: slots(width) + M * N // R * width + RESULT // R,
        "messages": lambda width: messages(R * M * N * width),
        "unfused": lambda width: messages(R * M * N * width) + M * N * width,
    },
    "all_gather_gemm": {
        "copy_engine": lambda _: M * K * 2,
        "blas_blocks": lambda _: M * K * 2,
        "messages": lambda _: messages(M * K * 2) + M * K * 2,
        "unfused": lambda _: messages(M * K * 2) + M * K * 2,
    },
    "gemm_all_scatter": dict.fromkeys(("after", "beside", "own_stream", "inside"), lambda _: R * RESULT)
    | dict.fromkeys(("copy_engine", "pull"), lambda _: RESULT)
    | {
        "messages": lambda _: messages(R * RESULT),
        "unfused": lambda _: messages(R * RESULT) + RESULT,
    },
}
# Those that targets.md's bounds are for: big products, with 16-bit partial sums.
BOUND = {
    "gemm_reduce_scatter": "copy_engine",
    "gemm_all_reduce": "copy_engine",
    "all_gather_gemm": "copy_engine",
}


def held(rank: int, world_size: int) -> list[tuple[str, Config, int, int, float | None]]:
    """(op, configuration, bytes of a partial sum, bytes held, bytes allowed) of each provider."""
    device, found = target.device(rank), []
    with Heap(64 << 20) as heap:
        spare = Workspace(heap)
        for op in NEEDS:
            case = Case(op, "custom", M, N, K, "float16", world_size, "eager")
            for name in ("ours", "ours_fp32", *(f"ours_{each}" for each in placement_names(op))):
                if name not in providers.providers_of(op):
                    continue
                operands = Operands(case, heap, device)
                try:
                    run = providers.prepare(name, operands)
                except Unavailable:
                    continue  # it is the default
                config = run.config
                width = config.wire_dtype(torch.float16).itemsize
                used = memory.used_by(run, operands, spare)
                assert used is not None
                assert spare.nbytes_in_use() == 0
                found.append((op, config, width, used, memory.allowed_bytes(case, config, device)))
    return found


@pytest.mark.num_ranks(2)
def test_every_placement_keeps_what_its_design_needs() -> None:
    for found in values(run_ranks(held, 2, timeout=150)):
        assert {(op, config.placement) for op, config, *_ in found} == {
            (op, placement) for op, needs in NEEDS.items() for placement in needs
        }
        for op, config, width, used, allowed in found:
            need = NEEDS[op][config.placement](width)
            if op == "gemm_all_reduce" and config.placement in SUMMED and config.algorithm == "two_shot":
                need += RESULT
            # Where no tile is split there is room for one all the same, which nobody uses.
            tile = 4 * config.block_m * config.block_n
            assert need <= used <= need + tile + SMALL, (op, config)
            if BOUND.get(op) == config.placement and width == 2:
                assert allowed is not None
                assert used <= allowed + SMALL, op


@pytest.mark.num_ranks(1)
def test_a_product_alone_keeps_a_tile_a_program() -> None:
    (used, allowed, split, _), (none, _, _, tile) = values(run_ranks(alone, 1))[0]
    assert split
    assert 0 < used <= allowed
    # There is room for one all the same, which nobody uses.
    assert none <= tile + SMALL


def alone(rank: int, world_size: int) -> list[tuple[int | None, float | None, bool, int]]:
    """Of a product whose tiles are split, and of one whose tiles are not: bytes held, allowed, whether they are, those
    of a tile."""
    device, found = target.device(rank), []
    for m, k in ((64, 2048), (64, 64)):
        case = Case("gemm", "custom", m, 64, k, "float16", 1, "eager")
        operands = Operands(case, None, device)
        config = chosen.own_gemm(m, 64, k, torch.float16, device)
        run = provided(our_run(operands, None, lambda x=operands: x.workspace, config=config))
        used = memory.used_by(run, operands, Workspace(device=device))
        tile = 4 * config.block_m * config.block_n
        found.append((used, memory.allowed_bytes(case, config, device), k > 64, tile))
    return found

"""8-bit operands over made-up hosts: each element against float64, the same bits on all ranks that have the same
result, whatever the pieces."""

import itertools
from typing import Any

import pytest
import torch

from pyrocshmem import stream_k
from tests.fused.float8_bodies import DIVIDED, OPS, Whole
from tests.hosts.made_up import bits, cut_small, divide
from tests.ranks import run_ranks, values

TIER = 3
TIMEOUT_S = 150.0
FP16, FP32 = torch.float16, torch.float32


def calls(rank: int, world_size: int, num_hosts: int, recipe: str, as_large: bool) -> list[tuple[str, bytes]]:
    """(what is wrong, the bits where all ranks have the same result) of each call."""
    if as_large:
        cut_small()
    hosts = divide(rank, world_size, num_hosts)
    found = []
    for op, (M, N, K), dtype in itertools.product(OPS, ((24, 32, 160), (5, 48, 64)), (FP16, FP32)):
        whole = Whole(op, recipe, M, N, K, world_size, hosts.device, 21)
        a, b, of_a, of_b = whole.of_rank(rank)
        more: dict[str, Any] = {"scale_a": of_a, "scale_b": of_b, "out_dtype": dtype}
        if op == "all_gather_gemm":
            more["num_rows"] = M
        out = getattr(stream_k, op)(a, b, **more)
        hosts.synchronize()
        # A rank's term is rounded, and a host's.
        ratio = whole.ratio(out, rank, roundings=2)
        what = f"{op}, {(M, N, K)}, {dtype}: {ratio:.2f} of the bound"
        if op == "all_gather_gemm":
            # Of one gather, whose rows are kept.
            _, second = stream_k.all_gather_gemm(a, [b, b], **{**more, "scale_b": [of_b, of_b]})
            if not torch.allclose(second, out, rtol=1e-3, atol=1e-3):
                found.append((f"{what}, several", b""))
        found.append((what if not ratio <= 1 else "", b"" if op in DIVIDED else bits(out)))
    return found


@pytest.mark.parametrize(
    ("ranks", "recipe", "as_large"),
    [
        pytest.param(ranks, recipe, as_large, marks=pytest.mark.num_ranks(ranks))
        for ranks, recipe, as_large in (
            (2, "rowwise", False),
            (2, "blockwise", True),
            (4, "rowwise", True),
            (4, "tensorwise", True),
            (4, "blockwise", False),
        )
    ],
)
def test_two_hosts(ranks: int, recipe: str, as_large: bool) -> None:
    for of_call in zip(*values(run_ranks(calls, ranks, 2, recipe, as_large, timeout=TIMEOUT_S)), strict=True):
        assert [wrong for wrong, _ in of_call] == [""] * ranks
        assert len({same for _, same in of_call}) == 1

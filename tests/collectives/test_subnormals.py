"""Sums of subnormal numbers are exact: of bf16 ones, and of float16's, by every op that sums over ranks."""

import pytest
import torch

from pyrocshmem import Heap, collectives, stream_k
from tests.ranks import run_ranks, values
from tests.stream_k.products import device

TIER = 1
TIMEOUT_S = 110.0
EPS = 1e-6


def sums(rank: int, world_size: int) -> list[str]:
    """Of numbers below the smallest normal one, both signs, no two of them alike; rank 0's and rank 1's sum is another
    such, or the smallest normal ones. What is wrong."""
    wrong = []
    with Heap(16 << 20) as heap:
        for dtype in (torch.bfloat16, torch.float16):
            steps = 1 << (7 if dtype == torch.bfloat16 else 10)  # from one normal number to its double
            units = torch.randint(1, steps, (2, 8, 24), generator=torch.Generator().manual_seed(7))
            units[:, :, ::3] *= -1
            units[1, :4] = 0
            smallest = torch.finfo(dtype).smallest_normal / steps
            x = [(each.double() * smallest).to(dtype).to(device()) for each in units]
            exact = (units.sum(0).double() * smallest).to(dtype).to(device())
            one, weight = (
                torch.eye(24, dtype=dtype, device=device()),
                torch.ones(24, dtype=dtype, device=device()),
            )
            assert exact.double().ne(0).any()
            assert torch.equal(exact.double(), x[0].double() + x[1].double())
            mine = x[rank]
            found = {
                "all_reduce, one-shot": collectives.all_reduce(mine, group=heap, algorithm="one_shot"),
                "all_reduce, two-shot": collectives.all_reduce(mine, group=heap, algorithm="two_shot"),
                "reduce_scatter": collectives.reduce_scatter(mine, group=heap),
                "all_reduce_rms_norm": collectives.all_reduce_rms_norm(mine, None, weight, EPS, group=heap)[
                    1
                ],
                "a residual": collectives.all_reduce_rms_norm(
                    mine * (rank == 0), x[1], weight, EPS, group=heap
                )[1],
                "rms_norm": collectives.rms_norm(x[0], weight, EPS, group=heap, residual=x[1])[1],
                "gemm_all_reduce": stream_k.gemm_all_reduce(mine, one, group=heap),
                "gemm_reduce_scatter": stream_k.gemm_reduce_scatter(mine, one, group=heap),
                "gemm_all_reduce_rms_norm": stream_k.gemm_all_reduce_rms_norm(
                    mine * (rank == 0), one, x[1], weight, EPS, group=heap
                )[1],
            }
            heap.synchronize()
            rows = exact.tensor_split(world_size)[rank]
            for name, value in found.items():
                if not torch.equal(value, rows if "scatter" in name else exact):
                    wrong.append(
                        f"{name}, {dtype}: {value.flatten()[:3].tolist()}, {exact.flatten()[:3].tolist()}"
                    )
            product = stream_k.gemm(x[0], one)
            if not torch.equal(product, x[0]):
                wrong.append(f"gemm, {dtype}")
    return wrong


@pytest.mark.num_ranks(2)
def test_sums_of_subnormal_numbers() -> None:
    assert values(run_ranks(sums, 2, timeout=TIMEOUT_S)) == [[], []]

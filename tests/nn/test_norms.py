"""The norm that goes with a row-parallel layer is the one PyTorch would compute, whether part of the product or not."""

from typing import Any

import pytest
import torch
from torch import nn

from pyrocshmem import Heap, target
from stream_k import nn as parallel
from tests.ranks import run_ranks, values

TIER = 3


@torch.no_grad()
def default_eps(rank: int, world_size: int) -> list[str]:
    """Of activations whose squares are as small as epsilons: what is wrong, by dtype and kind of layer."""
    device = target.device(rank)
    wrong = []
    with Heap(16 << 20) as heap:
        for dtype in (torch.float16, torch.bfloat16):
            torch.manual_seed(1)
            place: dict[str, Any] = {"device": device, "dtype": dtype}
            whole, x = nn.Linear(32, 64, bias=False, **place), torch.randn(8, 32).to(dtype).to(device) / 500
            norm = nn.RMSNorm(64, **place)
            exact = norm(whole(x)).double()
            for sequence_parallel in (False, True):
                options: dict[str, Any] = {"sequence_parallel": sequence_parallel, "group": heap}
                layer = parallel.RowParallelLinear.from_linear(whole, **options)
                y, total = layer(x.chunk(world_size, -1)[rank].contiguous(), norm=norm)
                wanted = exact.tensor_split(world_size)[rank] if sequence_parallel else exact
                # Rows of 64 such elements, whose product and norm are rounded once each.
                allowed = 4 * torch.finfo(dtype).eps
                for what, other in (("its own sum", norm(total).double()), ("PyTorch's layer", wanted)):
                    off = float((y.double() - other).abs().max() / other.abs().max())
                    if not off <= allowed:
                        wrong.append(f"{dtype}, {sequence_parallel}: off by {off} from the norm of {what}")
    return wrong


@pytest.mark.num_ranks(2)
def test_the_default_eps_is_that_of_pytorch() -> None:
    assert values(run_ranks(default_eps, 2)) == [[], []]

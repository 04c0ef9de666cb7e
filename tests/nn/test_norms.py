"""The norm that goes with a row-parallel layer is the one PyTorch would compute, whether part of the product or not."""

import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from pyrocshmem import Heap, collectives, stream_k, target
from pyrocshmem.stream_k import nn as parallel
from tests.ranks import run_ranks, values

TIER = 3
EPS = 1e-5


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


def doubled(module: nn.Module, args: Any, y: torch.Tensor) -> torch.Tensor:
    return 2 * y if isinstance(module, nn.RMSNorm) else y


def shifted(module: nn.Module, args: Any) -> Any:
    return (args[0] + 1,) if isinstance(module, nn.RMSNorm) else args


# What makes another layer of a norm, and could tell that it was not called.
CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "a hook": lambda norm: norm.register_forward_hook(doubled),
    "a hook before": lambda norm: norm.register_forward_pre_hook(shifted),
    "a hook of all modules": lambda norm: register_module_forward_hook(doubled),
    "a hook of all before": lambda norm: register_module_forward_pre_hook(shifted),
    # Libraries that wrap modules give them one.
    "a forward of its own": lambda norm: mock.patch.object(norm, "forward", lambda x: 2 * x),
}


@pytest.mark.parametrize("name", CHANGES)
@torch.no_grad()
def test_a_norm_that_was_changed_is_called(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any other is part of the product."""
    device = target.device(0)
    fused: list[int] = []
    op = stream_k.gemm_all_reduce_rms_norm
    monkeypatch.setattr(
        stream_k, "gemm_all_reduce_rms_norm", lambda *a, **o: (fused.append(1), op(*a, **o))[1]
    )
    x, layer = torch.randn(4, 6, device=device), parallel.RowParallelLinear(6, 16, device=device)
    for norm in (nn.RMSNorm(16, EPS, device=device), parallel.RMSNorm(16, EPS, device=device)):
        y, total = layer(x, norm=norm)
        torch.testing.assert_close(y, norm(total))
        assert fused.pop()
        with CHANGES[name](norm):
            found, wanted = layer(x, norm=norm)[0], norm(total)
        torch.testing.assert_close(found, wanted)
        assert (wanted - y).abs().max() > 0.1
        assert not fused


def test_an_eps_that_is_traced_and_one_that_is_none() -> None:
    """Dynamic shapes make a symbol of eps, too."""
    device = target.device(0)
    x, weight = torch.randn(4, 8, device=device), torch.rand(8, device=device)
    b = torch.randn(8, 8, device=device)
    calls: tuple[Callable[[torch.Tensor, float], Any], ...] = (
        lambda x, eps: collectives.rms_norm(x, weight, eps),
        lambda x, eps: collectives.all_reduce_rms_norm(x, None, weight, eps)[0],
        lambda x, eps: stream_k.gemm_all_reduce_rms_norm(x, b, None, weight, eps)[0],
    )
    for call in calls:
        torch._dynamo.reset()
        traced = torch.compile(call, backend="eager", dynamic=True, fullgraph=True)
        torch.testing.assert_close(traced(x, EPS), call(x, EPS))
        for wrong in (-1e-5, math.nan, math.inf):
            with pytest.raises(ValueError, match=f"eps is {wrong}, allowed are finite numbers of 0 or more"):
                call(x, wrong)

"""Gradients and training over hosts: equal to those of one host, by operators, layers and torch.compile."""

from typing import Any

import pytest
import torch

from pyrocshmem import collectives, stream_k
from pyrocshmem.shards import shard_range
from pyrocshmem.stream_k.nn import ColumnParallelLinear, RowParallelLinear
from tests.hosts.made_up import cut_small, divide, use_device
from tests.ranks import run_ranks, values

TIER = 3
M, N, K = 12, 16, 32


def differentiated(rank: int, world_size: int, num_hosts: int, compiled: bool) -> list[str]:
    """What gradients are wrong, of each op whose inputs ranks share, against PyTorch's of the whole."""
    cut_small()
    use_device(rank)
    if num_hosts > 1:
        divide(rank, world_size, num_hosts)
    torch.manual_seed(3)
    A, B, G = torch.randn(M, K), torch.randn(K, N), torch.randn(M, N)
    weight, residual = torch.rand(N), torch.randn(M, N)
    m, n, k = (slice(*shard_range(size, rank, world_size)) for size in (M, N, K))
    every = slice(None)

    def normed(x: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, (x.shape[1],), of, 1e-5)

    ops: dict[str, tuple[Any, Any, Any, Any, Any]] = {
        # the op, the whole, this rank's of A, of B, of the result
        "all_gather_gemm": (stream_k.all_gather_gemm, torch.mm, (m, every), (every, n), (every, n)),
        "gemm_reduce_scatter": (stream_k.gemm_reduce_scatter, torch.mm, (every, k), (k, every), (m, every)),
        "gemm_all_reduce": (stream_k.gemm_all_reduce, torch.mm, (every, k), (k, every), (every, every)),
        "gemm_all_scatter": (stream_k.gemm_all_scatter, torch.mm, (every, every), (every, n), (every, every)),
        "gemm_all_reduce_rms_norm": (
            lambda a, b: stream_k.gemm_all_reduce_rms_norm(a, b, residual, weight, 1e-5)[0],
            lambda a, b: normed(a @ b + residual, weight),
            (every, k), (k, every), (every, every),
        ),
        "gemm_rms_norm_all_scatter": (
            lambda a, b: stream_k.gemm_rms_norm_all_scatter(a, b, weight[n].contiguous(), 1e-5),
            lambda a, b: normed(a @ b, weight),
            (every, every), (every, n), (every, every),
        ),
        "reduce_scatter": (
            lambda a, b: collectives.reduce_scatter(a @ b),
            torch.mm, (every, k), (k, every), (m, every),
        ),
    }  # fmt: skip
    wrong = []
    for name, (op, whole, of_a, of_b, of_c) in ops.items():
        a, b = A[of_a].clone().requires_grad_(), B[of_b].clone().requires_grad_()
        full_a, full_b = A.clone().requires_grad_(), B.clone().requires_grad_()
        whole(full_a, full_b).backward(G)
        call = torch.compile(op, fullgraph=True, backend="aot_eager") if compiled else op
        call(a, b).backward(G[of_c])
        for letter, found, wanted in (("a", a.grad, full_a.grad[of_a]), ("b", b.grad, full_b.grad[of_b])):
            if not torch.allclose(found, wanted, rtol=1e-4, atol=1e-4):
                wrong.append(f"{name}: {letter}'s is off by {(found - wanted).abs().max():.2e}")
    return wrong


ranks_of_two_hosts = pytest.mark.parametrize(
    "ranks", [pytest.param(ranks, marks=pytest.mark.num_ranks(ranks)) for ranks in (2, 4)]
)


@ranks_of_two_hosts
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_gradients(compiled: bool, ranks: int) -> None:
    assert values(run_ranks(differentiated, ranks, 2, compiled, timeout=150.0)) == [[]] * ranks


def layers(rank: int, world_size: int, num_hosts: int) -> list[float]:
    """Losses of a block of two layers that ranks divide, trained for a few steps."""
    use_device(rank)
    if num_hosts > 1:
        divide(rank, world_size, num_hosts)
    torch.manual_seed(1)
    up, down = torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)
    x, y = torch.randn(2, 6, 16), torch.randn(2, 6, 16)
    first = ColumnParallelLinear.from_linear(up, sequence_parallel=False)
    second = RowParallelLinear.from_linear(down, sequence_parallel=False)
    optimizer = torch.optim.AdamW([*first.parameters(), *second.parameters()], 1e-2)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = (second(torch.relu(first(x))) - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses


@ranks_of_two_hosts
def test_layers_train_as_on_one_host(ranks: int) -> None:
    over_two, on_one = (values(run_ranks(layers, ranks, hosts, timeout=100.0)) for hosts in (2, 1))
    assert over_two == [over_two[0]] * ranks
    assert over_two[0] == pytest.approx(on_one[0], abs=1e-5)
    assert over_two[0][-1] < over_two[0][0]

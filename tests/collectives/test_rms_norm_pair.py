"""`rms_norm_pair`: the bits of two calls of `rms_norm`, in one exchange; norms of heads against float64; gradients,
refused calls, a rank that is left alone."""

from typing import Any

import pytest
import torch
from torch.nn import functional

from pyrocshmem import CallMismatch, Heap, PeerTimeout, batch_invariant, collectives, signal
from pyrocshmem.calls.workspace import Workspace
from pyrocshmem.shards import shard_range
from tests.ranks import run_ranks, values
from tests.stopwatch import until
from tests.stream_k.products import device

TIER = 2
TIMEOUT_S = 100.0
HEAP_BYTES = 16 << 20
EPS = 1e-5
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
# Tokens, columns of all ranks' queries and keys: of several steps of columns, that ranks don't divide, one, none, of
# which a rank alone has none.
SHAPES = (
    ((5,), 96, 24),
    ((2, 3), 6000, 130),
    ((19,), 37, 5),
    ((3,), 3, 3),
    ((0,), 24, 12),
    ((4,), 24, 0),
    ((2,), 1, 4),
)


def random(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device(), dtype)


def shares(heap: Heap, tokens: tuple[int, ...], hidden: tuple[int, int], dtype: torch.dtype) -> Any:
    """(q, k), which are columns of one product with others, and (their weights), of this rank."""
    mine = [slice(*shard_range(n, heap.rank, heap.world_size)) for n in hidden]
    wide = random((*tokens, sum(hidden) + 7), dtype, 1)
    q, k = wide[..., : hidden[0]][..., mine[0]], wide[..., hidden[0] : sum(hidden)][..., mine[1]]
    joined = torch.cat((q, k, wide[..., -7:]), -1)
    N = q.shape[-1]
    weights = [random((n,), F32, 2)[part].clone() for n, part in zip(hidden, mine, strict=True)]
    return (joined[..., :N], joined[..., N : N + k.shape[-1]]), tuple(weights)


def columns(heap: Heap) -> list[str]:
    """What differs from two calls of `rms_norm`, in every mode; and calls that are more than one exchange."""
    wrong = []
    for number, (tokens, *hidden) in enumerate(SHAPES):
        dtype = (F16, BF16, F32)[number % 3]
        both, weights = shares(heap, tokens, tuple(hidden), dtype)
        more: Any = {"group": heap}
        expected = [
            collectives.rms_norm(x, weight, EPS, hidden=n, **more)
            for x, weight, n in zip(both, weights, hidden, strict=True)
        ]
        found = collectives.rms_norm_pair(*both, *weights, EPS, hidden=tuple(hidden), **more)
        if not all(
            torch.equal(*pair) and pair[0].is_contiguous() for pair in zip(found, expected, strict=True)
        ):
            wrong.append(f"{tokens} {hidden} {dtype}")
    both, weights = shares(heap, (3,), (48, 24), F16)
    for tp_invariant in (False, True) if heap.world_size != 3 else (False,):
        with batch_invariant(tp_invariant=tp_invariant):
            expected = [
                collectives.rms_norm(*each, EPS, group=heap) for each in zip(both, weights, strict=True)
            ]
            found = collectives.rms_norm_pair(*both, *weights, EPS, group=heap)
        if not all(map(torch.equal, found, expected)):
            wrong.append(f"tp_invariant={tp_invariant}")
    workspace = Workspace(heap)
    numbers = []
    for _ in range(2):
        collectives.rms_norm_pair(*both, *weights, EPS, group=heap, workspace=workspace)
        heap.synchronize()
        numbers.append(int(workspace.messages(0)[0][0]))
    if numbers[1] - numbers[0] != 1:
        wrong.append(f"calls {numbers}")
    return wrong


def heads(heap: Heap) -> list[str]:
    """What is wrong with norms of heads, with and without a gradient."""
    wrong = []
    for D, dtype, counts in ((16, F16, (4, 2)), (80, BF16, (3, 1)), (1, F32, (5, 5)), (128, F32, (2, 0))):
        wide = random((2, 5, sum(counts) * D + 3), dtype, 4)
        q, k = wide[..., : counts[0] * D], wide[..., counts[0] * D : sum(counts) * D]
        weights = random((D,), F32, 5), random((D,), BF16, 6)
        for needs in (False, True):
            given = [x.detach().clone().requires_grad_() if needs else x for x in (q, k)]
            found = collectives.rms_norm_pair(*given, *weights, EPS, head_dim=D)
            for x, y, weight in zip((q, k), found, weights, strict=True):
                exact = functional.rms_norm(
                    x.double().unflatten(-1, (-1, D)), (D,), weight.double(), EPS
                ).flatten(-2)
                unit = torch.finfo(dtype).eps / 2 + 1e-6
                off = (y.double() - exact).abs() > unit * exact.abs() + 1e-7
                if off.any() or y.shape != x.shape or y.dtype != dtype:
                    wrong.append(f"{D} {dtype} {counts} gradient {needs}")
    return wrong


def gradients(heap: Heap) -> list[str]:
    """What differs from those of two calls of `rms_norm`."""
    both, weights = shares(heap, (5,), (48, 24), F32)
    found = []
    for together in (False, True):
        given = [x.detach().clone().requires_grad_() for x in (*both, *weights)]
        if together:
            results = collectives.rms_norm_pair(*given, EPS, group=heap)
        else:
            results = tuple(
                collectives.rms_norm(x, weight, EPS, group=heap)
                for x, weight in zip(given[:2], given[2:], strict=True)
            )
        upstream = [random(tuple(x.shape), F32, 7 + n) for n, x in enumerate(results)]
        found.append(torch.autograd.grad(results, given, upstream))
        heap.synchronize()
    names = ("q", "k", "q_weight", "k_weight")
    return [name for name, one, other in zip(names, *found, strict=True) if not torch.equal(one, other)]


MISTAKES = {
    "k": ("TypeError", "k is a list"),
    "dtypes": ("ValueError", "one dtype"),
    "rows": ("ValueError", "all dimensions but the last alike"),
    "weight": ("ValueError", "q_weight is (7,)"),
    "head": ("ValueError", "no whole number of heads of 5"),
    "no head": ("ValueError", "head_dim is 0"),
    "hidden": ("ValueError", "two numbers"),
    "eps": ("ValueError", "eps is -1"),
    "columns differ": ("CallMismatch", "rms_norm_pair"),
}


def mistakes(heap: Heap) -> dict[str, str]:
    q, k, weight = random((4, 8), F16, 1), random((4, 8), F16, 2), random((8,), F16, 3)
    wide = random((4, 8 + heap.rank), F16, 4)
    calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
        "k": ((q, [k], weight, weight, EPS), {}),
        "dtypes": ((q, k.float(), weight, weight, EPS), {}),
        "rows": ((q, k[1:], weight, weight, EPS), {}),
        "weight": ((q, k, weight[1:], weight, EPS), {}),
        "head": ((q, k, weight[:5], weight[:5], EPS), {"head_dim": 5}),
        "no head": ((q, k, weight[:0], weight[:0], EPS), {"head_dim": 0}),
        "hidden": ((q, k, weight, weight, EPS), {"hidden": (16, 16, 16)}),
        "eps": ((q, k, weight, weight, -1.0), {}),
        "columns differ": ((q, wide, weight, wide[0].clone(), EPS), {}),
    }
    said = {}
    for name, (given, more) in calls.items():
        with pytest.raises((TypeError, ValueError, CallMismatch)) as caught:
            collectives.rms_norm_pair(*given, group=heap, **more)
        said[name] = f"{caught.type.__name__}: {caught.value}"
        if heap.broken:
            heap.recover()
    return said


def left_alone(heap: Heap) -> str:
    """What rank 0 hears in a call that the others don't make; the next one is right."""
    both, weights = shares(heap, (5,), (48, 24), F32)
    workspace, told = Workspace(heap, wait_seconds=20.0), heap.zeros(1)
    tell = [heap.peer_view(told, peer) for peer in range(heap.world_size)]

    def call() -> Any:
        found = collectives.rms_norm_pair(*both, *weights, EPS, group=heap, workspace=workspace)
        heap.synchronize()
        return found

    expected, said = call(), ""
    workspace.control[int(signal.BUDGET_US.value)] = 500_000
    if heap.rank == 0:
        with pytest.raises(PeerTimeout) as caught:
            call()
        said = str(caught.value)
        for each in tell:
            each.fill_(1)
    else:
        until(told.item)
    heap.recover()
    workspace.control[int(signal.BUDGET_US.value)] = 20_000_000
    assert all(map(torch.equal, call(), expected))
    return said


def body(rank: int, world_size: int) -> dict[str, Any]:
    with Heap(HEAP_BYTES) as heap:
        found: dict[str, Any] = {"columns": columns(heap), "heads": heads(heap), "gradients": gradients(heap)}
        if world_size == 2:
            found |= {"mistakes": mistakes(heap), "alone": left_alone(heap)}
        return found


@pytest.mark.num_ranks(2)
def test_two_ranks() -> None:
    ends = values(run_ranks(body, 2, timeout=TIMEOUT_S))
    for found in ends:
        said = found.pop("mistakes")
        assert said.keys() == MISTAKES.keys()
        for name, (error, part) in MISTAKES.items():
            assert said[name].startswith(f"{error}: "), f"{name}: {said[name]!r}"
            assert part in said[name], f"{name}: {said[name]!r}"
    alone = ends[0].pop("alone")
    assert "rms_norm_pair" in alone
    assert "rank 1" in alone
    assert ends[1].pop("alone") == ""
    assert ends == [{"columns": [], "heads": [], "gradients": []}] * 2


@pytest.mark.parametrize("world_size", [pytest.param(n, marks=pytest.mark.num_ranks(n)) for n in (1, 3)])
def test_other_numbers_of_ranks(world_size: int) -> None:
    ends = values(run_ranks(body, world_size, timeout=TIMEOUT_S))
    assert ends == [{"columns": [], "heads": [], "gradients": []}] * world_size

"""What the command line doesn't run of the collectives over made-up hosts: other reductions, integers, dimensions, in
place, any root, asynchronously; and operands that are refused."""

from typing import Any

import pytest
import torch

import pyrocshmem
from pyrocshmem import collectives, stream_k
from tests.hosts.made_up import cut_small, divide
from tests.ranks import run_ranks, values

TIER = 2
SEED = 5


def x_of(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(SEED + rank)
    drawn = torch.randint(-50, 50, shape, generator=generator, device="cpu")
    return drawn.to(dtype).to(torch.get_default_device())


REDUCED: dict[str, Any] = {
    "sum": lambda xs: xs.sum(0),
    "avg": lambda xs: xs.double().mean(0),
    "max": lambda xs: xs.amax(0),
    "min": lambda xs: xs.amin(0),
}


def reductions(rank: int, world_size: int, num_hosts: int) -> list[str]:
    cut_small()
    divide(rank, world_size, num_hosts)
    wrong = []
    for dtype in (torch.int32, torch.int64, torch.uint8, torch.float32):
        xs = torch.stack([x_of(peer, (7, 3), dtype) for peer in range(world_size)])
        for op, reduced in REDUCED.items():
            if op == "avg" and not dtype.is_floating_point:
                continue
            expected = reduced(xs).to(dtype)
            for given, found in (
                (expected, collectives.all_reduce(xs[rank], op=op)),
                (expected.tensor_split(world_size)[rank], collectives.reduce_scatter(xs[rank], op=op)),
                (
                    expected.tensor_split(world_size, 1)[rank],
                    collectives.reduce_scatter(xs[rank], op=op, scatter_dim=1),
                ),
            ):
                if not torch.allclose(found.double(), given.double(), rtol=1e-6):
                    wrong.append(f"{op} of {dtype}: {found} for {given}")
    nan = torch.full((5,), float("nan"))
    nan[rank] = rank
    largest = collectives.all_reduce(nan, op="max")
    if not (largest[:world_size] == torch.arange(world_size)).all() or not largest[world_size:].isnan().all():
        wrong.append(f"max counts a NaN: {largest}")
    either = collectives.all_reduce(torch.tensor([rank == 1, False]))
    if either.tolist() != [True, False]:
        wrong.append(f"sum of bools: {either}")
    return wrong


def moved(rank: int, world_size: int, num_hosts: int) -> list[str]:
    divide(rank, world_size, num_hosts)
    wrong = []
    xs = [x_of(peer, (3, 2, 5), torch.int64) for peer in range(world_size)]
    for dim in (0, 1, 2, -1):
        if not collectives.all_gather(xs[rank], gather_dim=dim).equal(torch.cat(xs, dim)):
            wrong.append(f"all_gather along {dim}")
    for root in range(world_size):
        if not collectives.broadcast(xs[rank], root).equal(xs[root]):
            wrong.append(f"broadcast of {root}")
    place = torch.full((3 * world_size, 2, 5), -1)
    mine = place[3 * rank : 3 * rank + 3].copy_(xs[rank])
    work = collectives.all_gather(mine, out=place, async_op=True)
    work.wait()
    if not place.equal(torch.cat(xs)):
        wrong.append("all_gather in place, asynchronously")
    total = xs[rank].clone()
    if collectives.all_reduce_(total) is not total or not total.equal(sum(xs)):
        wrong.append("all_reduce_")
    nothing = torch.empty(0, 4)
    if collectives.all_reduce(nothing).shape != (0, 4) or collectives.all_gather(nothing).shape != (0, 4):
        wrong.append("nothing")
    collectives.barrier()
    return wrong


def refused(rank: int, world_size: int) -> list[str]:
    """The text of each error, and what the ops say after them."""
    hosts = divide(rank, world_size, 2)
    a, b = torch.ones(4, 8, dtype=torch.float16), torch.ones(8, 4, dtype=torch.float16)
    config = stream_k.choose("gemm_all_reduce", 4, 4, 8, a.dtype, 2, a.device)
    texts = []
    for more in (
        {"config": config},
        {"squared_partials": True},
        {"partial_dtype": torch.float32},
        {"workspace": stream_k.Workspace(hosts.heap)},
        {"bias": torch.ones(3, dtype=torch.float16)},
    ):
        with pytest.raises(ValueError) as caught:  # noqa: PT011 - the texts are compared by the test
            stream_k.gemm_all_reduce(a, b, **more)
        texts.append(str(caught.value))
    with pytest.raises(ValueError) as caught, pyrocshmem.batch_invariant(tp_invariant=True):  # noqa: PT011
        stream_k.gemm_all_reduce(a, b)
    texts.append(str(caught.value))
    assert stream_k.gemm_all_reduce(a, b).eq(8 * world_size).all()
    return texts


@pytest.mark.num_ranks(4)
def test_reductions() -> None:
    assert values(run_ranks(reductions, 4, 2)) == [[]] * 4


@pytest.mark.num_ranks(3)
def test_reductions_of_three_hosts() -> None:
    assert values(run_ranks(reductions, 3, 3)) == [[]] * 3


@pytest.mark.num_ranks(4)
def test_what_only_moves() -> None:
    assert values(run_ranks(moved, 4, 2)) == [[]] * 4


@pytest.mark.num_ranks(2)
def test_refusals_before_any_launch() -> None:
    for texts in values(run_ranks(refused, 2)):
        words = (
            "takes no config",
            "no squared_partials",
            "travel in",
            "one of its own",
            "bias has shape",
            "tp-invariant",
        )
        assert [word for word, text in zip(words, texts, strict=True) if word not in text] == []

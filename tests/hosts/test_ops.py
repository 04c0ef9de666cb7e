"""Every op of the command line over made-up hosts: each element against float64, the same bits on all ranks that have
the same result, whatever the pieces."""

import itertools
import random
import time
from typing import Any
from unittest import mock

import pytest
import torch

import pyrocshmem
from pyrocshmem import network, stream_k, target
from pyrocshmem.hosts import Hosts
from pyrocshmem.reference.accuracy import make_operand
from pyrocshmem.reference.operands import Operands
from pyrocshmem.reference.problems import PROBLEMS
from pyrocshmem.stream_k.run.calls import our_run
from tests.hosts.made_up import bits, cut_small, divide
from tests.ranks import run_ranks, values

TIER = 3
TIMEOUT_S = 150.0
FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
# A barrier has no result but in a heap.
NAMES = [name for name, problem in PROBLEMS.items() if problem.joins != "meet"]
# Rows that no number of ranks divides, fewer rows than ranks, and one size that all divide.
ROWS = (24, 13, 2, 1)
CALLS = 80


def new_seed() -> int:
    found = random.SystemRandom().getrandbits(32)
    print(f"seed {found}")
    return found


def sizes(name: str, rows: int, world_size: int) -> tuple[int, ...]:
    shape = (rows, 8 * world_size, 24 * world_size)[: len(PROBLEMS[name].letters)]
    return PROBLEMS[name].even_shape(shape, world_size)


def every_op(
    rank: int,
    world_size: int,
    num_hosts: int,
    names: list[str],
    dtypes: list[torch.dtype],
    seed: int,
    as_large: bool,
) -> list[Any]:
    if as_large:
        cut_small()
    return calls(divide(rank, world_size, num_hosts), names, dtypes, seed)


def calls(hosts: Hosts, names: list[str], dtypes: list[torch.dtype], seed: int) -> list[Any]:
    """(what was run, what is wrong with it, the bits of a result that all ranks have) of each call."""
    found = []
    for name, dtype, rows in itertools.product(names, dtypes, ROWS):
        what, wrong, result = judged(hosts, name, rows, dtype, seed)
        found.append((what, wrong, b"" if PROBLEMS[name].out_cut else bits(result)))
    return found


def judged(
    hosts: Hosts, name: str, rows: int, dtype: torch.dtype, seed: int, late_s: float = 0.0
) -> tuple[Any, str, torch.Tensor]:
    """(what was run, what is wrong with it, the result) of a call that this rank makes so late."""
    problem = PROBLEMS[name]
    shape = sizes(name, rows, hosts.world_size)
    x = Operands(problem, shape, dtype, seed, hosts.rank, hosts.world_size, hosts.device)
    run = our_run(x, None)
    run.reset()
    time.sleep(late_s)
    run.call()
    result = run.result()
    # Of a GEMM each rank's term is rounded, and the sum of a host that has other terms.
    roundings = int(problem.gemm) + int(hosts.local_size > 1) if problem.sums and dtype != FP32 else 0
    accuracy = x.check(result, roundings=roundings, partial_dtype=dtype if roundings else None)
    return (name, shape, dtype), "" if accuracy.ok else str(accuracy), result


def random_calls(hosts: Hosts, seed: int) -> list[Any]:
    """What is wrong of CALLS random calls, one after another, of ranks that are late at random."""
    draw, own = random.Random(seed), random.Random(seed + 1 + hosts.rank)
    wrong = []
    for number in range(CALLS):
        name, rows, dtype = draw.choice(NAMES), draw.randint(0, 20), draw.choice((FP16, FP32))
        late_s = own.random() / 20 if own.random() < 0.1 else 0.0
        what, text, _ = judged(hosts, name, rows, dtype, seed + number, late_s)
        if text:
            wrong.append((number, str(what), text))
    hosts.barrier()
    return wrong


def check(found: list[list[Any]]) -> None:
    for of_call in zip(*found, strict=True):
        what, *_ = of_call[0]
        assert [wrong for _, wrong, _ in of_call] == [""] * len(of_call), what
        assert len({same for *_, same in of_call}) == 1, f"{what}: ranks have different bits"


@pytest.mark.num_ranks(4)
@pytest.mark.parametrize("as_large", [False, True], ids=["small", "as large"])
def test_two_hosts_of_two(as_large: bool) -> None:
    dtypes = [FP16, BF16, FP32]
    check(values(run_ranks(every_op, 4, 2, NAMES, dtypes, new_seed(), as_large, timeout=TIMEOUT_S)))


@pytest.mark.num_ranks(2)
@pytest.mark.parametrize("as_large", [False, True], ids=["small", "as large"])
def test_two_hosts_of_one(as_large: bool) -> None:
    dtypes = [FP16, BF16, FP32]
    check(values(run_ranks(every_op, 2, 2, NAMES, dtypes, new_seed(), as_large, timeout=TIMEOUT_S)))


@pytest.mark.num_ranks(3)
def test_three_hosts_of_one() -> None:
    check(values(run_ranks(every_op, 3, 3, NAMES, [FP16, FP32], new_seed(), True, timeout=TIMEOUT_S)))


def of_late_ranks(rank: int, world_size: int, seed: int) -> list[Any]:
    cut_small()
    return random_calls(divide(rank, world_size, 2), seed)


# On the CPU target the hosts of test_namespaces.py make them.
@pytest.mark.gpu
@pytest.mark.parametrize(
    "ranks", [pytest.param(ranks, marks=pytest.mark.num_ranks(ranks)) for ranks in (2, 4)]
)
def test_random_calls(ranks: int) -> None:
    assert values(run_ranks(of_late_ranks, ranks, new_seed(), timeout=TIMEOUT_S)) == [[]] * ranks


def first_row(rank: int, world_size: int, seed: int) -> list[bool]:
    """Whether the first row has the same bits in every batch, by op, in the mode that promises it."""
    cut_small()
    divide(rank, world_size, 2)
    K, N = 64, 40
    device = target.device(rank)
    a = make_operand((24, K), FP16, seed, rank, tag="a", device=device)
    b = make_operand((K, N), FP16, seed, rank, tag="b", device=device)
    with pyrocshmem.batch_invariant():
        return [
            len({bits(op(a[:rows], b)[0]) for rows in (1, 2, 7, 24)}) == 1
            for op in (stream_k.gemm_all_reduce, stream_k.gemm_all_scatter)
        ]


@pytest.mark.num_ranks(4)
def test_rows_in_every_batch() -> None:
    assert values(run_ranks(first_row, 4, new_seed())) == [[True, True]] * 4


def unwaited(rank: int, world_size: int) -> list[str]:
    """What is wrong where nobody waits for the blocks of other hosts, on a network that takes a while."""
    over = divide(rank, world_size, 2)
    meet = network.Network._meet

    def slow(self: Any, send: Any, receive: Any) -> None:
        time.sleep(0.2)
        meet(self, send, receive)

    with (
        mock.patch.object(network.Network, "_meet", slow),
        mock.patch.object(type(over), "wait"),
    ):
        found = calls(over, ["all_reduce", "all_gather", "all_scatter"], [FP32], seed=1)
    return [wrong for _, wrong, _ in found if wrong]


@pytest.mark.cpu
@pytest.mark.num_ranks(2)
def test_without_the_wait_results_are_wrong() -> None:
    assert all(values(run_ranks(unwaited, 2)))

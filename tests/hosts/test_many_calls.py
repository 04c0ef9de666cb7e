"""Random calls over made-up hosts, one after another, of ranks that are late at random: every result is right."""

import random
import time
from typing import Any

import pytest
import torch

from pyrocshmem.reference.operands import Operands
from pyrocshmem.reference.problems import PROBLEMS
from pyrocshmem.stream_k.run.calls import our_run
from tests.hosts.made_up import cut_small, divide
from tests.hosts.test_ops import NAMES, new_seed, sizes
from tests.ranks import run_ranks, values

TIER = 3
CALLS = 120


def many(rank: int, world_size: int, num_hosts: int, seed: int) -> list[Any]:
    cut_small()
    over = divide(rank, world_size, num_hosts)
    draw, own = random.Random(seed), random.Random(seed + 1 + rank)
    wrong = []
    for number in range(CALLS):
        name, rows = draw.choice(NAMES), draw.randint(0, 20)
        dtype = draw.choice((torch.float16, torch.float32))
        problem = PROBLEMS[name]
        x = Operands(problem, sizes(name, rows, world_size), dtype, seed + number, rank, world_size)
        run = our_run(x, None)
        run.reset()
        if own.random() < 0.1:
            time.sleep(own.random() / 20)
        run.call()
        roundings = 2 if problem.sums and dtype != torch.float32 else 0
        accuracy = x.check(run.result(), roundings=roundings, partial_dtype=dtype if roundings else None)
        if not accuracy.ok:
            wrong.append((number, name, rows, dtype, str(accuracy)))
    over.barrier()
    return wrong


@pytest.mark.num_ranks(4)
def test_random_calls() -> None:
    assert values(run_ranks(many, 4, 2, new_seed(), timeout=150.0)) == [[]] * 4

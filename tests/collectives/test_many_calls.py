"""Many calls of every collective in turn, ranks late at random, data and sizes that change: the right bits each time.

Bits are right when they are those of a call that nobody disturbed, which is held to float64 first, and was the same on
all ranks.
"""

import hashlib
import random
import time

import pytest
import torch
import torch.distributed as dist

from pyrocshmem import Heap, message, target  # before Triton
from pyrocshmem.reference.operands import Operands
from pyrocshmem.reference.problems import ALL, BY_NAME
from pyrocshmem.reference.timing import Run
from pyrocshmem.stream_k.run.calls import our_run

import triton  # isort: skip
import triton.language as tl

from tests.ranks import run_ranks, values

TIER = 3
# GPUs that other processes share take turns, and a call is several.
pytestmark = [] if target.interpreted() else [pytest.mark.alone]
ON_CPU = target.interpreted()
ONE_EACH = ("reduce_scatter", "rms_norm", "barrier")  # of which ranks get results of their own
# RMSNorm takes the interpreter long, and has late ranks of its own: test_rms_norm.py, tests/fused/test_rms_norm_ops.py.
STANDALONE = tuple(problem.name for problem in ALL if not problem.gemm)
NAMES = tuple(name for name in (*STANDALONE, "two_shot") if not (ON_CPU and "rms_norm" in name))
ROUNDS, UNGUARDED_ROUNDS = 25 if ON_CPU else 10_000, 3
LONGEST_S = 0.01 if ON_CPU else 0.0003
SHAPES = ((4, 6), (9, 24)) if ON_CPU else ((4, 6), (1, 4096), (33, 512), (9, 24), (500, 1024))
ENTRIES = 2 if ON_CPU else 9
DTYPES = (torch.float16, torch.float32)


@triton.jit
def leave_as_it_is(pointer, mask, apart=4, QUADS: tl.constexpr = 1):
    """`message.restore` as it must not be: data of two calls ago look like today's."""
    return


def prepared(heap: Heap, name: str, entry: int) -> tuple[Operands, Run]:
    problem = BY_NAME["all_reduce" if name == "two_shot" else name]
    shape, dtype = SHAPES[entry % len(SHAPES)], DTYPES[entry % 2]
    x = Operands(problem, shape, dtype, entry, heap.rank, heap.world_size, heap.device)
    return x, our_run(x, heap, **({"algorithm": "two_shot"} if name == "two_shot" else {}))


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int16 if x.dtype.itemsize == 2 else torch.int32)


def called(heap: Heap, pool: dict[str, list[tuple[Run, torch.Tensor]]], rounds: int, late: float) -> int:
    """Elements that came out wrong, of so many calls of each name, of which this share is late."""
    order, chance = random.Random(7), random.Random(1000 + heap.rank)
    wrong = torch.zeros((), dtype=torch.int64, device=heap.device)
    for number in range(rounds * len(pool)):
        name = NAMES[number % len(pool)]
        run, expected = pool[name][order.randrange(len(pool[name]))]
        if chance.random() < late:
            time.sleep(chance.uniform(0, LONGEST_S))
        if not ON_CPU and chance.random() < late:
            torch.cuda._sleep(chance.randrange(100_000))
        run.reset()
        run.call()
        wrong += (bits(run.result()) != bits(expected)).sum()
    heap.synchronize()
    heap.vote("all have called")
    return int(wrong)


def many_calls(rank: int, world_size: int) -> dict[str, object]:
    """What was not right of undisturbed calls, and wrong elements of disturbed ones, with a guard and without it."""
    unequal = []
    with Heap(256 << 20) as heap:
        pool: dict[str, list[tuple[Run, torch.Tensor]]] = {name: [] for name in NAMES}
        for name, entries in pool.items():
            for entry in range(ENTRIES):
                x, run = prepared(heap, name, entry)
                run.reset()
                run.call()
                heap.synchronize()
                result = run.result().clone()
                found = hashlib.sha256(bits(result).cpu().numpy().tobytes()).digest()
                all_found = [b""] * world_size
                dist.all_gather_object(all_found, found)
                if not x.check(result).ok or (name not in ONE_EACH and set(all_found) != {found}):
                    unequal.append(f"{name} {entry}")
                entries.append((run, result))
        result: dict[str, object] = {"unequal": unequal, "wrong": called(heap, pool, ROUNDS, 0.25)}
        if ON_CPU:
            message.restore = leave_as_it_is
            result["unguarded"] = called(heap, pool, UNGUARDED_ROUNDS, 0.5)
        return result


@pytest.mark.num_ranks(2)
@pytest.mark.timeout(400)
def test_many_calls_with_random_delays() -> None:
    """On a CPU also the control: without its guard the protocol takes data of another call."""
    found = values(run_ranks(many_calls, 2, timeout=180.0))
    assert [each["unequal"] for each in found] == [[], []]
    assert [each["wrong"] for each in found] == [0, 0]
    assert not ON_CPU or sum(each["unguarded"] for each in found) > 0

"""Faults 7, 10, 11 and 27: many calls on one workspace, late at random, across wrap-arounds, in graphs, on two streams.

Small whole numbers, so that a call that took data of another one is off by whole numbers.
"""

import random as chances
import time

import pytest
import torch

from pyrocshmem import Heap, collectives, target
from pyrocshmem.calls.workspace import Workspace
from pyrocshmem.doctor import ring_kernel
from tests.fused.bodies import integer_call
from tests.fused.cases import HEAP_BYTES, Case, Operands, call, judge
from tests.ranks import run_ranks, values
from tests.stream_k.products import Frame, small_config

TIER = 3
# GPUs that other processes share take turns, and a call is several.
pytestmark = [] if target.interpreted() else [pytest.mark.alone]
ON_CPU = target.interpreted()
SIZE = 64
# From each of two epochs on: 1,000 in all in the interpreter, where one takes 15 to 18 ms.
CALLS = 500 if ON_CPU else 5_000
LONGEST_S = 0.004 if ON_CPU else 0.0002
REPLAYS = 50


def kind_of(number: int) -> str:
    """Of call `number`. On GPUs exchanges of a small kernel are among them."""
    return ("product", "sum", "sum" if ON_CPU else "ring")[number % 3]


# Messages have a count of their own.
COUNTED = sum(kind_of(number) != "sum" for number in range(CALLS))


def calls_with_delays(rank: int, world_size: int, starts: list[int]) -> int:
    """Wrong calls, of CALLS from each epoch in `starts` on; a rank in four is late, by a random time."""
    chance = chances.Random(1000 + rank)
    config, shape = small_config(algorithm="one_shot"), (20, 16, 16)
    with Heap(HEAP_BYTES) as heap:
        workspace = Workspace(heap, wait_seconds=20.0)
        data = heap.zeros(SIZE, dtype=torch.int32)
        wrong = torch.zeros(1, dtype=torch.int32, device=heap.device)
        base = torch.arange(SIZE, dtype=torch.float32, device=heap.device)
        ring = (data, wrong, workspace.context)

        def one(number: int) -> None:
            if kind_of(number) == "product":
                wrong.add_(int(not integer_call(heap, number, shape, config, workspace)))
            elif kind_of(number) == "sum":
                mine = base + number % 997 + 5000 * rank
                total = collectives.all_reduce(mine, group=heap, workspace=workspace)
                expected = world_size * (base + number % 997) + 5000 * sum(range(world_size))
                wrong.add_((total != expected).any().int())
            else:
                ring_kernel[(1,)](*ring, WORLD=world_size, BLOCK=SIZE)

        for number in range(3):  # planned and loaded by all together, before anyone is late
            if number == 2 and not ON_CPU:
                ring_kernel.warmup(*ring, WORLD=world_size, BLOCK=SIZE, grid=(1,))
                heap.barrier()
            one(number)
        for start in starts:
            workspace.restart(start)
            for number in range(CALLS):
                if chance.random() < 0.25:
                    time.sleep(chance.uniform(0, LONGEST_S))
                one(number)
            heap.synchronize()
            assert workspace.epoch() == (start + COUNTED + 2**31) % 2**32 - 2**31
        heap.vote("done")
        return int(wrong.item())


@pytest.mark.num_ranks(2)
@pytest.mark.timeout(400)
def test_cases_7_and_27_many_calls_with_random_delays_across_both_wraps() -> None:
    starts = [2**31 - COUNTED // 2, -(COUNTED // 2)]
    assert values(run_ranks(calls_with_delays, 2, starts, timeout=150.0)) == [0, 0]


def graphs_of_several_calls(rank: int, world_size: int, ways: list[tuple[str, str]]) -> list[str]:
    """Graphs of one, two and three calls, replayed with inputs changed in place, eager calls between."""
    errors = []
    cases = [Case(op, 97, 72, 136, torch.float16).with_config(placement=place) for op, place in ways]
    with Heap(HEAP_BYTES) as heap:
        inputs = [Operands(case, rank, world_size, 0) for case in cases]
        frames = [Frame(*each.shape, torch.float16) for each in inputs]
        for number in range(1, len(cases) + 1):
            chosen = list(zip(cases, inputs, frames, strict=True))[:number]
            for case, operands, frame in chosen:
                call(case, heap, operands, frame.out)
            heap.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for case, operands, frame in chosen:
                    call(case, heap, operands, frame.out)
            for replay in range(REPLAYS):
                fresh = [Operands(case, rank, world_size, 100 * number + replay) for case, _, _ in chosen]
                for (_, operands, frame), new in zip(chosen, fresh, strict=True):
                    operands.a.copy_(new.a)
                    operands.b.copy_(new.b)
                    frame.poison()
                graph.replay()
                heap.synchronize()
                for (case, _, frame), new in zip(chosen, fresh, strict=True):
                    try:
                        judge(case, new, frame.out, world_size)
                        frame.check()
                    except AssertionError as error:
                        errors.append(f"{number} calls, replay {replay}, {case.op}: {error}")
                if replay % 10 == 0:
                    case, operands, frame = chosen[-1]
                    judge(case, fresh[-1], call(case, heap, operands), world_size)
    return errors


@pytest.mark.gpu
@pytest.mark.num_ranks(2)
def test_case_10_graphs_of_one_two_and_three_calls() -> None:
    ways = [("all_reduce", "after"), ("reduce_scatter", "copy_engine"), ("all_gather", "copy_engine")]
    assert values(run_ranks(graphs_of_several_calls, 2, ways, timeout=110.0)) == [[], []]


@pytest.mark.gpu
@pytest.mark.num_ranks(2)
def test_graphs_of_calls_that_pull_into_the_callers_tensor() -> None:
    """A replay's copies have the places of the capture, and the peers' data of the replay."""
    ways = [("all_scatter", "copy_engine"), ("all_reduce", "copy_engine"), ("all_scatter", "copy_engine")]
    assert values(run_ranks(graphs_of_several_calls, 2, ways, timeout=110.0)) == [[], []]


def on_two_streams(rank: int, world_size: int, placement: str) -> list[str]:
    """What was wrong; each second call's stream sleeps before it, and the other one's call comes at once."""
    case = Case("all_reduce", 40, 33, 24, torch.float32).with_config(placement=placement)
    errors = []
    with Heap(HEAP_BYTES) as heap:
        workspace = Workspace(heap, wait_seconds=20.0)
        inputs = [Operands(case, rank, world_size, seed) for seed in range(7)]
        results = [call(case, heap, inputs[0], None, workspace)]
        heap.synchronize()
        streams = [torch.cuda.Stream(), torch.cuda.Stream()]
        for number, operands in enumerate(inputs[1:]):
            with torch.cuda.stream(streams[number % 2]):
                if number % 2 == 0:
                    torch.cuda._sleep(200_000_000)  # about 100 ms
                results.append(call(case, heap, operands, None, workspace))
        heap.synchronize()
        for number, (operands, out) in enumerate(zip(inputs, results, strict=True)):
            try:
                judge(case, operands, out, world_size)
            except AssertionError as error:
                errors.append(f"call {number}: {error}")
    return errors


@pytest.mark.gpu
@pytest.mark.num_ranks(2)
@pytest.mark.parametrize("placement", ["after", "own_stream"])
def test_case_11_two_streams_on_one_workspace(placement: str) -> None:
    assert values(run_ranks(on_two_streams, 2, placement, timeout=60.0)) == [[], []]

"""The collectives alone by name: each result is right beside the library's, a spoilt one is seen; the command line."""

import json
from pathlib import Path

import pytest
import torch

from pyrocshmem import Heap
from pyrocshmem.reference.operands import Operands
from pyrocshmem.reference.problems import ALL
from pyrocshmem.run_command import app
from pyrocshmem.stream_k.run.calls import our_run
from pyrocshmem.stream_k.run.job import Job, run_rank
from tests import commands
from tests.ranks import run_ranks, values

TIER = 2
SHAPE = (7, 10)
STANDALONE = [problem for problem in ALL if not problem.gemm]
INTEGERS = [problem for problem in STANDALONE if not problem.norm and problem.joins != "meet"]


def every_name(rank: int, world_size: int) -> list[str]:
    """What went wrong, of a job for each name; and of a result with one element changed, which must be found."""
    wrong = []
    for problem in STANDALONE:
        shape = (1, world_size) if problem.name == "barrier" else SHAPE
        found = run_rank(rank, world_size, Job(problem.command, shape, torch.float16, seed=3, iters=1))
        if not found.accuracy.ok or set(found.seconds) != {"ours", "reference"}:
            wrong.append(f"{problem.name}: {found}")
    for problem in INTEGERS:
        found = run_rank(rank, world_size, Job(problem.command, SHAPE, torch.int64, seed=3, iters=1))
        if not found.accuracy.ok:
            wrong.append(f"{problem.name} of integers: {found}")
    with Heap(32 << 20) as heap:
        for problem, dtype in [(each, torch.float16) for each in STANDALONE] + [
            (each, torch.uint8) for each in INTEGERS
        ]:
            x = Operands(problem, SHAPE, dtype, 4, rank, world_size, heap.device)
            run = our_run(x, heap)
            run.reset()
            run.call()
            heap.synchronize()
            result = run.result().clone()
            if dtype == torch.uint8:
                result[-1, -1] += 1
            else:
                result[-1, -1] *= 1.01
            if x.check(result).num_bad != 1:
                wrong.append(f"{problem.name}: not seen")
    return wrong


@pytest.mark.num_ranks(2)
def test_every_name() -> None:
    assert values(run_ranks(every_name, 2, timeout=100.0)) == [[], []]


def test_integers_are_for_what_moves_or_adds_them() -> None:
    for problem in ALL:
        if problem in INTEGERS:
            problem.check_dtype(torch.int32)
        else:
            with pytest.raises(ValueError, match=r"dtype is torch\.int32, which is for a collective alone"):
                problem.check_dtype(torch.int32)


@pytest.mark.num_ranks(2)
@pytest.mark.gpu_a_rank("commands start a rank a GPU")
@pytest.mark.parametrize(
    "arguments", [("broadcast", "--dtype", "int32", "--shape", "7,50"), ("all_reduce", "--shape", "7,50")]
)
def test_the_command(arguments: tuple[str, ...], tmp_path: Path) -> None:
    """Two sizes are those of the collective alone, though it has a namesake behind a GEMM."""
    out = tmp_path / "result.json"
    done = commands.invoke(app, "-n", "2", "--iters", "2", "--json", str(out), "-c", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"collectives.{arguments[0]}" in done.stdout
    assert done.stdout.splitlines()[-1] == "all 2 ranks right"
    result = json.loads(out.read_text())
    assert result["ok"] is True
    assert {who: len(samples) for who, samples in result["seconds"].items()} == {"ours": 2, "reference": 2}

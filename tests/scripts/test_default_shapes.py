"""The default problem of `./run.sh` has tiles that Stream-K splits, on a CPU and on a GPU of 132 SMs."""

from collections.abc import Iterator

import pytest
import torch

from pyrocshmem import target
from pyrocshmem.reference.problems import PROBLEMS
from pyrocshmem.stream_k.choice import table
from pyrocshmem.stream_k.run.job import Job, make_schedule

TIER = 1
pytestmark = pytest.mark.cpu
CPU = torch.device("cpu")


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Configurations are chosen as for an H100 or H200."""
    monkeypatch.setattr(target, "backend", lambda: "cuda")
    monkeypatch.setattr(target, "interpreted", lambda: False)
    monkeypatch.setattr(target, "CPU_PROGRAMS", 132)
    remembered = target.num_sms, table.choice
    for each in remembered:
        each.cache_clear()
    yield
    for each in remembered:
        each.cache_clear()


def split_tiles(collective: str, num_ranks: int, on_gpu: bool) -> int:
    shape = PROBLEMS[collective].default_shape(num_ranks, on_gpu)
    schedule = make_schedule(
        Job(collective, shape, torch.bfloat16 if on_gpu else torch.float16), num_ranks, CPU
    )
    assert schedule.kind in ("stream_k", "split_k")
    assert schedule.has_shared_tiles
    return schedule.num_split_tiles


@pytest.mark.parametrize("collective", PROBLEMS)
@pytest.mark.parametrize("num_ranks", range(1, 9))
def test_on_a_cpu(collective: str, num_ranks: int) -> None:
    assert split_tiles(collective, num_ranks, on_gpu=False) == 3


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("collective", PROBLEMS)
@pytest.mark.parametrize("num_ranks", range(1, 9))
def test_on_an_h100(collective: str, num_ranks: int) -> None:
    assert split_tiles(collective, num_ranks, on_gpu=True) == 32

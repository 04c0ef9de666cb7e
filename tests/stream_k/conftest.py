"""What tests of choices share: an H200 that isn't there, and nothing remembered."""

from collections.abc import Iterator

import pytest
import torch

from pyrocshmem import target
from pyrocshmem.stream_k.choice import gemm_model, table

REMEMBERED = (target.num_sms, table.choice, gemm_model._tile_times, gemm_model._gathering_times)


@pytest.fixture(autouse=True)
def _nothing_remembered() -> Iterator[None]:
    """A test that changes a device or a constant of a model would leave choices made by it to those that follow."""
    for each in REMEMBERED:
        each.cache_clear()
    yield
    for each in REMEMBERED:
        each.cache_clear()


@pytest.fixture
def h200(_nothing_remembered: None, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A device of 132 SMs, for choices: nothing runs there."""
    monkeypatch.setattr(target, "backend", lambda: "cuda")
    monkeypatch.setattr(target, "interpreted", lambda: False)
    monkeypatch.setattr(target, "CPU_PROGRAMS", 132)
    return torch.device("cpu")

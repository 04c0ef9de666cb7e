"""What tests of choices share: an H200 that isn't there."""

from collections.abc import Iterator

import pytest
import torch

from pyrocshmem import target
from pyrocshmem.stream_k.choice import table


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """A device of 132 SMs, for choices: nothing runs there."""
    monkeypatch.setattr(target, "backend", lambda: "cuda")
    monkeypatch.setattr(target, "interpreted", lambda: False)
    monkeypatch.setattr(target, "CPU_PROGRAMS", 132)
    remembered = (target.num_sms, table.choice)
    for each in remembered:
        each.cache_clear()
    yield torch.device("cpu")
    for each in remembered:
        each.cache_clear()

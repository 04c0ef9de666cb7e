"""What tests of the element-wise kernels share."""

from typing import Any

import pytest
import torch

from pyrocshmem.stream_k.nn import pointwise


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Kernels run here, too, into memory of NaN; the names of those that did."""
    monkeypatch.setattr(pointwise, "_by_kernel", lambda x: x.dtype != torch.float64)
    empty, run, ran = torch.Tensor.new_empty, pointwise._run, []

    def poisoned(*facts: Any, **options: Any) -> torch.Tensor:
        made = empty(*facts, **options)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    def noted(kernel: Any, *others: Any) -> None:
        ran.append(kernel.__name__)
        run(kernel, *others)

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    monkeypatch.setattr(pointwise, "_run", noted)
    return ran

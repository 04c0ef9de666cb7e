"""What the norms take for an eps: any number, as Python's; TypeError for the rest, before anything is planned."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from pyrocshmem import Heap, collectives, stream_k
from pyrocshmem.groups import ThreadGroup

TIER = 1
pytestmark = pytest.mark.cpu

# On a group of one rank; of results that are more than one the norm is the first.
CALLS: dict[str, Callable[..., Any]] = {
    "rms_norm": lambda x, w, eps, heap: collectives.rms_norm(x, w, eps, group=heap),
    "all_reduce_rms_norm": lambda x, w, eps, heap: collectives.all_reduce_rms_norm(
        x, None, w, eps, group=heap
    ),
    "gemm_all_reduce_rms_norm": lambda x, w, eps, heap: stream_k.gemm_all_reduce_rms_norm(
        x, torch.eye(8), None, w, eps, group=heap
    ),
    "gemm_rms_norm_all_scatter": lambda x, w, eps, heap: stream_k.gemm_rms_norm_all_scatter(
        x, torch.eye(8), w, eps, group=heap
    ),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_eps(call: Callable[..., Any]) -> None:
    x, weight = torch.randn(3, 8), torch.randn(8)
    with Heap(16 << 20, ThreadGroup.create(1)[0]) as heap:
        for wrong in (None, "1e-3", torch.tensor(1e-3)):
            with pytest.raises(TypeError, match=r"eps is a .*, a number is needed"):
                call(x, weight, wrong, heap)
        for eps in (np.float32(0.5), np.float64(0.5), np.int64(1), 1):
            for needs in (False, True):
                mine = x.clone().requires_grad_(needs)
                found = call(mine, weight, eps, heap)
                found = found[0] if isinstance(found, tuple) else found
                exact = functional.rms_norm(x.double(), (8,), weight.double(), float(eps))
                torch.testing.assert_close(found.detach(), exact.float())
                if needs:
                    found.sum().backward()
                    assert mine.grad is not None

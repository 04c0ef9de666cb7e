"""What is done to a finished tile is compiled in: a kernel of one activation is not taken for that of another.

Triton 3.6 took any constant that stood beside a pointer in a kernel's tuple for the first one that it had seen.
"""

import pytest
import torch

from pyrocshmem import Workspace, stream_k, testing

TIER = 1
pytestmark = pytest.mark.every_triton
# All four of them, two beside a bias and two without one: any two would do.
ACTIVATIONS = {True: ("relu", "silu"), False: ("none", "gelu")}


def kernels(op: str, activation: str, with_bias: bool) -> tuple[str, ...]:
    """The assembly of all kernels of a call, for sm_90."""
    a, b = torch.empty(70, 64, dtype=torch.float16), torch.empty(64, 48, dtype=torch.float16)
    bias = torch.empty(48) if with_bias else None

    def call() -> None:
        if op == "gemm":
            workspace = Workspace(device=torch.device("cpu"))
            stream_k.gemm(a, b, bias=bias, activation=activation, workspace=workspace)
        else:
            heap = testing.PlanningHeap(2)
            getattr(stream_k, op)(
                a, b, bias=bias, activation=activation, group=heap, workspace=Workspace(heap)
            )

    return tuple(each.text for each in testing.compile_call("sm_90", call))


@pytest.mark.parametrize("op", ["gemm", "gemm_all_reduce", "gemm_all_scatter"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_each_activation_has_kernels_of_its_own(op: str, with_bias: bool) -> None:
    first, second = (kernels(op, activation, with_bias) for activation in ACTIVATIONS[with_bias])
    assert first != second

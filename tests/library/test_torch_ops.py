"""`torch_ops.install`: PyTorch's symmetric-memory operators by ours, whose calls they are, and what is left behind."""

import pytest

from tests.library import served
from tests.ranks import run_ranks, values

TIER = 3
TIMEOUT_S = 110.0


@pytest.mark.parametrize("ranks", [pytest.param(n, marks=pytest.mark.num_ranks(n)) for n in (2, 3, 4)])
def test_calls(ranks: int) -> None:
    """Several Bs, every dimension, both reductions, every dtype and layout, sizes of 0: right, laid out as PyTorch
    says, and made by this library."""
    found = values(run_ranks(served.calls, ranks, ranks == 3, timeout=2 * TIMEOUT_S))
    assert len(set(found)) == 1
    assert found[0] > (10 if ranks == 3 else 60)


@pytest.mark.num_ranks(2)
def test_installs_come_and_go() -> None:
    """In any order, for one group and for all; the kernel that was there before makes all other calls."""
    for found in values(run_ranks(served.installs, 2, timeout=TIMEOUT_S)):
        assert found == {
            "before": False,
            "both": (True, True),
            "one group": (True, False),
            "float64": False,
            "the other group": (False, True),
            "none": (False, False),
            "with": True,
            "after an exception": False,
            "nothing is left": True,
            "lists": ((None, []), True),
        }


@pytest.mark.num_ranks(2)
def test_compiled_functions() -> None:
    for found in values(run_ranks(served.compiled, 2, timeout=2 * TIMEOUT_S)):
        for name in ("block", "moved", "summed"):
            assert found[name] == (True, True)
            assert found[f"{name} again"]
            assert found[f"{name} after"] == "" or "NotImplementedError" in found[f"{name} after"]


@pytest.mark.num_ranks(2)
def test_no_gradient() -> None:
    for found in values(run_ranks(served.gradients, 2, timeout=TIMEOUT_S)):
        assert found == dict.fromkeys(found, (None, None))
        assert len(found) == 5


@pytest.mark.num_ranks(2)
def test_operators_that_pytorch_lacks() -> None:
    for found in values(run_ranks(served.undefined, 2, timeout=TIMEOUT_S)):
        assert found["before"] == found["after"]
        assert found["before"].startswith("AttributeError")


MISTAKES = {
    "dimension": "ValueError: gather_dim is 2 and A has shape (8, 8)",
    "negative": "ValueError: scatter_dim is -1",
    "vector": "ValueError: gather_dim is 0 and A has shape (8,); it must have 2 dimensions or more",
    "inner": "ValueError: a is (8, 8) and b is (7, 4): their inner sizes 8 and 7 differ",
    "inner of columns": "inner sizes 16 and 8 differ",
    "batch of B": "ValueError: b has 3 dimensions",
    "mixed": "TypeError: a is torch.float32 and b is torch.float16",
    "reduction": "ValueError: reduce_op is 'max', allowed are sum, avg",
    "reduction of a sum": "ValueError: reduce_op is 'max', allowed are sum, avg",
    "uneven rows": "dimension 0 of the product is 7, and must be a multiple of the group's 2 ranks",
    "uneven columns": "dimension 1 of the product is 3, and must be a multiple",
    "no group": "nobody",
    "float64": "TypeError: an operand is torch.float64, allowed are torch.float16, torch.bfloat16, torch.float32",
    "install a heap": "TypeError: group is a Heap, allowed: None, ProcessGroup, 1-D DeviceMesh",
    "install a name": "TypeError: group is a str",
    "install another's": "not a member",
    "not installed": "ValueError: group '0' was not installed",
    "another schema": "has symm_mem::two_shot_all_reduce_(Tensor(a!) input, str reduce_op",
    "after that": "NotImplementedError: Could not run",
}


@pytest.mark.num_ranks(2)
def test_mistakes() -> None:
    for found in values(run_ranks(served.mistakes, 2, timeout=TIMEOUT_S)):
        for name, text in found.items():
            assert MISTAKES[name] in text or text == "", f"{name}: {text}"
        assert found.keys() - {"float64"} == MISTAKES.keys() - {"float64"}

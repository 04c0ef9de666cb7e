"""A row that is normalized has its squares added in one order by every kernel that may do it: the blocks that are
added along their first dimension lie in registers alike. What is added is the same code (`collectives.normalizing`).
Where they don't, `row_norm.is_apart` has one kernel do it for all numbers of rows."""

import re
from unittest import mock

import pytest
import torch
import triton

import pyrocshmem
from pyrocshmem import Workspace, collectives
from pyrocshmem.calls.invariance import BATCH
from pyrocshmem.collectives import row_norm as rows
from pyrocshmem.testing import Compiled, PlanningHeap, compile_call
from pyrocshmem.versions import version_of

TIER = 3
EPS = 1e-6
_REDUCE = re.compile(
    r'"tt\.reduce"\([^)]*\) <\{axis = 0 : i32\}> \(\{(.*?)\}\) : \((tensor<\d+x\d+xf32, (#\w+)>)\)', re.S
)


def layouts(kernel: Compiled) -> set[tuple[str, str]]:
    """(shape, layout) of the fp32 blocks of two dimensions that are added along the first."""
    named = dict(re.findall(r"^(#\w+) = (.*)$", kernel.ttgir, re.M))
    found = _REDUCE.findall(kernel.ttgir)
    return {(block.partition(",")[0], named[layout]) for body, block, layout in found if "addf" in body}


@pytest.mark.every_triton
@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
@pytest.mark.parametrize(
    ("num_ranks", "columns", "dtype", "weights"),
    [
        (2, 4096, torch.bfloat16, torch.bfloat16),
        (2, 7169, torch.bfloat16, torch.bfloat16),
        (3, 7169, torch.float32, torch.bfloat16),
        (8, 512, torch.float16, torch.float32),
    ],
)
def test_squares_are_added_alike(
    target: str, num_ranks: int, columns: int, dtype: torch.dtype, weights: torch.dtype
) -> None:
    x, weight = torch.zeros(4, columns, dtype=dtype), torch.ones(columns, dtype=weights)
    heap = PlanningHeap(num_ranks)
    more = {"group": heap, "workspace": Workspace(heap)}

    def exchange(algorithm: str) -> object:
        return collectives.all_reduce_rms_norm(x, x, weight, EPS, algorithm=algorithm, **more)

    calls = {
        "one-shot": lambda: exchange("one_shot"),
        "two-shot": lambda: exchange("two_shot"),
        "alone": lambda: rows.row_norm(x, weight, EPS, num_ranks),
        "backward": lambda: rows.row_norm_gradients(x, x, weight, EPS, num_ranks),
        "alone, read twice": lambda: rows.row_norm(x.new_zeros(1000, columns), weight, EPS, num_ranks),
    }
    found = {}
    for name, call in calls.items():
        (kernel,) = compile_call(target, call)
        assert kernel.spills == 0, name
        found[name] = layouts(kernel), kernel.num_warps
    assert found["alone"][0]  # with older versions of Triton in two layouts
    assert found["alone, read twice"] == found["alone"]
    with mock.patch.object(pyrocshmem.target, "backend", return_value="cuda" if target == "sm_90" else "hip"):
        apart = rows.is_apart(BATCH, x, columns, weight)
    exchanges = [found["one-shot"], found["two-shot"]]
    assert apart or exchanges == [found["alone"]] * 2, found
    if version_of(triton.__version__) >= (3, 7):
        assert not apart
        assert len(found["alone"][0]) == 1
        assert all(each == found["alone"] for each in found.values()), found

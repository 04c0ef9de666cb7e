"""The sum of what hosts bring compiles for every target, without spills, and moves 16 bytes at a time."""

import itertools

import pytest
import torch

from pyrocshmem import testing
from pyrocshmem.collectives.epilogue import Finish
from pyrocshmem.collectives.host_sums import host_sum

TIER = 1
ROWS, COLUMNS = 64, 128
# (dtype, reduction, hosts): what sums of GEMMs are, and the others.
SUMS = [*itertools.product((torch.float16, torch.bfloat16, torch.float32), ("sum",), (2, 3, 16))]
OTHERS = [
    (torch.float32, "avg", 3),
    (torch.bfloat16, "max", 4),
    (torch.int64, "sum", 2),
    (torch.bool, "max", 3),
]


def compiled(target: str, dtype: torch.dtype, reduction: str, hosts: int, finish: Finish) -> testing.Compiled:
    parts, out = torch.empty(hosts, ROWS, COLUMNS, dtype=dtype), torch.empty(ROWS, COLUMNS, dtype=dtype)
    (kernel,) = testing.compile_call(
        target, lambda: host_sum(parts, out, reduction, finish, columns=COLUMNS, activation=2)
    )
    return kernel


@pytest.mark.parametrize("target", ["sm_90", "gfx942", "gfx950"])
def test_sums(target: str) -> None:
    for dtype, reduction, hosts in SUMS:
        finish = Finish.of(torch.empty(COLUMNS, dtype=dtype))
        kernel = compiled(
            target, dtype, reduction, hosts, finish._replace(residual=torch.empty(ROWS, COLUMNS))
        )
        assert kernel.spills == 0, (dtype, hosts)
        wide = r"\bst\.global\.v4\.b32" if kernel.nvidia else r"\b(?:global|buffer)_store_dwordx4"
        assert kernel.count(wide), (dtype, hosts)
        loads = r"\bld\.global\.v4\.b32" if kernel.nvidia else r"\b(?:global|buffer)_load_dwordx4"
        assert kernel.count(loads) >= hosts, (dtype, hosts)


@pytest.mark.parametrize("target", ["sm_90", "gfx942", "gfx950"])
def test_other_reductions(target: str) -> None:
    for dtype, reduction, hosts in OTHERS:
        assert compiled(target, dtype, reduction, hosts, Finish.of()).spills == 0, (dtype, reduction)

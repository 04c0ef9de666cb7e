"""A row that is normalized has its squares added in one order by every kernel that may do it: the blocks that are
added along their first dimension lie in registers alike. What is added is the same code (`collectives.normalizing`).
Where they don't, `row_norm.is_apart` has one kernel do it for all numbers of rows."""

import contextlib
import re
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import triton

import pyrocshmem
from pyrocshmem import Workspace, collectives, stream_k
from pyrocshmem.calls.invariance import BATCH
from pyrocshmem.collectives import rms_norm_plan
from pyrocshmem.collectives import row_norm as rows
from pyrocshmem.testing import Compiled, PlanningHeap, compile_call
from pyrocshmem.versions import version_of

TIER = 3
EPS = 1e-6
_REDUCE = re.compile(
    r'"tt\.reduce"\([^)]*\) <\{axis = (\d) : i32\}> \(\{(.*?)\}\) : \((tensor<\d+x\d+xf32, (#\w+)>)\)', re.S
)


def layouts(kernel: Compiled, axis: str = "0") -> set[tuple[str, str]]:
    """(shape, layout) of the fp32 blocks of two dimensions that are added along one of `axis`."""
    named = dict(re.findall(r"^(#\w+) = (.*)$", kernel.ttgir, re.M))
    found = _REDUCE.findall(kernel.ttgir)
    return {
        (block.partition(",")[0], named[layout])
        for along, body, block, layout in found
        if "addf" in body and along in axis
    }


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


def _misaligned(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.numel() + 1)[1:].view(x.shape)


def _padded(x: torch.Tensor, more: int) -> torch.Tensor:
    """Columns of a wider matrix, `more` of them beyond a multiple of 16."""
    return x.new_empty(len(x), -(-x.shape[1] // 16) * 16 + more)[:, : x.shape[1]]


# Where operands may be.
PLACES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "misaligned": _misaligned,
    "of a wider matrix": lambda x: _padded(x, 32),
    "of a wider matrix, rows misaligned": lambda x: _padded(x, 5),
    "one row of a wider matrix": lambda x: _padded(x[:1], 32),
}


def norms(
    x: torch.Tensor, weight: torch.Tensor, ranks: int, in_place: bool, mode: bool
) -> dict[str, Callable[[], object]]:
    """Every norm, by a workspace of its own, as `batch_invariant` or as by default makes it."""

    def group() -> dict[str, object]:
        heap = PlanningHeap(ranks)
        return {"group": heap, "workspace": Workspace(heap)}

    def made(call: Callable[[], object]) -> Callable[[], object]:
        def run() -> object:
            with pyrocshmem.batch_invariant() if mode else contextlib.nullcontext():
                return call()

        return run

    def backward(more: torch.Tensor | None) -> object:
        space, columns = Workspace(PlanningHeap(ranks)), ranks * x.shape[1]
        return rms_norm_plan.backward(space, x, more, x, weight, torch.ones(len(x)), columns, x.dtype)

    out, bias = x if in_place else None, _misaligned(weight) if in_place else None
    calls = {
        "all_reduce_rms_norm": lambda: collectives.all_reduce_rms_norm(x, x, weight, EPS, **group()),
        "row_norm": lambda: rows.row_norm(x, weight, EPS, ranks),
        "row_norm_gradients": lambda: rows.row_norm_gradients(x, x, weight, EPS, ranks),
        "rms_norm": lambda: collectives.rms_norm(x, weight, EPS, out=out, **group()),
        "rms_norm of a sum": lambda: collectives.rms_norm(x, weight, EPS, residual=x, **group()),
        "gradient of rms_norm": lambda: backward(None),
        "gradient of rms_norm of a sum": lambda: backward(x),
        "rms_norm_pair": lambda: collectives.rms_norm_pair(x, x, weight, weight, EPS, **group()),
        "rms_norm_pair of heads": lambda: collectives.rms_norm_pair(
            x, x, weight[: x.shape[1] // 4], weight[: x.shape[1] // 4], EPS, head_dim=x.shape[1] // 4
        ),
        "gemm_all_reduce_rms_norm": lambda: stream_k.gemm_all_reduce_rms_norm(
            x.new_zeros(len(x), 64), x.new_zeros(64, x.shape[1]), x, weight, EPS, bias=bias, **group()
        ),
    }
    return {name: made(call) for name, call in calls.items()}


def found_layouts(target: str, call: Callable[[], object]) -> set[tuple[str, str]]:
    """Of all kernels of a call that add rows."""
    return {each for kernel in compile_call(target, call) for each in layouts(kernel, axis="01")}


@pytest.mark.every_triton
@pytest.mark.parametrize(
    ("target", "columns", "dtype", "weights"),
    [("sm_90", 4096, torch.bfloat16, torch.float32), ("gfx942", 4100, torch.float16, torch.float16)],
)
def test_squares_are_added_alike_wherever_operands_are(
    target: str, columns: int, dtype: torch.dtype, weights: torch.dtype
) -> None:
    x, weight = torch.zeros(4, columns, dtype=dtype), torch.ones(columns, dtype=weights)
    plain = {name: found_layouts(target, call) for name, call in norms(x, weight, 2, False, True).items()}
    assert all(plain.values())
    for place, put in PLACES.items():
        for in_place in (False, True):
            for name, call in norms(put(x), _misaligned(weight), 2, in_place, True).items():
                assert found_layouts(target, call) == plain[name], (name, place, in_place)


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_without_the_mode_the_order_depends_on_where_operands_are(target: str) -> None:
    x, weight = torch.zeros(4, 4096, dtype=torch.float16), torch.ones(4096, dtype=torch.float16)
    plain, other = (
        found_layouts(target, norms(*operands, 2, True, False)["rms_norm"])
        for operands in ((x, weight), (_misaligned(x), _misaligned(weight)))
    )
    assert plain != other

"""The benchmark of 8-bit operands: what it measures is right, a wrong result shows, and so does what it means."""

import itertools
import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from typer.testing import CliRunner

from pyrocshmem import PeerAborted, options, stream_k, target
from pyrocshmem.benchmarks import float8
from pyrocshmem.benchmarks.float8 import (
    OPS,
    RECIPES,
    Quantized,
    Took,
    error_over_bound,
    measure,
    slowest,
    table,
)
from pyrocshmem.benchmarks.provider import Unavailable
from pyrocshmem.benchmarks.shapes import cases_of
from pyrocshmem.calls import planning
from tests.ranks import run_ranks, values

TIER = 3


def cases(ops: tuple[str, ...], ranks: int) -> list[Any]:
    return [cases_of(op, "tiny", ranks, "float16", False)[0] for op in ops]


@pytest.mark.cpu
@pytest.mark.num_ranks(2)
def test_results_are_compared() -> None:
    for recipe, ranks in itertools.product(RECIPES, (1, 2)):
        wanted = cases(OPS[:1] if ranks == 1 else OPS[1:], ranks)
        for of_rank in values(run_ranks(measure, ranks, wanted, recipe, 2)):
            assert len(of_rank) == len(wanted)
            for took in of_rank:
                assert min(took.seconds.values()) > 0
                assert {"ours", "ours, 16 bits"} <= took.seconds.keys()
                # A result that is nowhere off was not compared.
                assert all(0 < error <= 1 for error in took.errors.values())


def scaled_product(
    a: torch.Tensor,
    b: torch.Tensor,
    of_a: torch.Tensor,
    _: Any,
    of_b: torch.Tensor,
    __: Any,
    *,
    output_dtype: Any,
) -> torch.Tensor:
    """What `F.scaled_mm` does with scales of blocks, which it refuses on a CPU."""
    assert of_a.stride() == (1, len(a))
    blocks = -(-len(b) // 128)
    right = stream_k.dequantize(b.t(), of_b.t()[:, :blocks]).t()
    return (stream_k.dequantize(a, of_a) @ right).to(output_dtype)


def by_the_vendor(rank: int, world_size: int, recipe: Any) -> list[Took]:
    """A measurement in which the vendor's GEMM and collectives run on the CPU."""
    wanted = [case for op in OPS[1:] for case in cases_of(op, "12,40,384", 2, "bfloat16", False)]
    with (
        mock.patch.object(float8, "need_gpus"),
        mock.patch.object(float8.F, "scaled_mm", scaled_product),
    ):
        return measure(rank, world_size, wanted, recipe, 1)


@pytest.mark.cpu
@pytest.mark.num_ranks(2)
@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_the_vendors_way_is_right(recipe: str) -> None:
    for of_rank in values(run_ranks(by_the_vendor, 2, recipe)):
        assert [0 < took.errors["scaled_mm"] <= 1 for took in of_rank] == [True] * 4


def lost_in_16_bits(rank: int, world_size: int) -> list[Took]:
    """A measurement whose op in 16 bits raises on rank 1 alone."""
    real = stream_k.gemm_all_reduce

    def lost(a: torch.Tensor, *args: Any, **more: Any) -> torch.Tensor:
        if a.dtype == torch.float16 and rank == 1:
            raise RuntimeError("lost")
        return real(a, *args, **more)

    with mock.patch.object(stream_k, "gemm_all_reduce", lost):
        return measure(rank, world_size, cases(("gemm_all_reduce",), 2) * 2, "rowwise", 1)


@pytest.mark.cpu
@pytest.mark.num_ranks(2)
def test_ours_that_fails_is_no_provider_that_is_not_there() -> None:
    first, second = run_ranks(lost_in_16_bits, 2)
    assert isinstance(first.exception, PeerAborted)
    assert second.exception is not None
    assert str(second.exception) == "lost"


@pytest.mark.cpu
@pytest.mark.num_ranks(2)
def test_fewer_rows_than_ranks() -> None:
    wanted = [case for op in OPS[1:] for case in cases_of(op, "1,40,256", 2, "float16", False)]
    for recipe in RECIPES:
        first, second = values(run_ranks(measure, 2, wanted, recipe, 1))
        for case, *both in zip(wanted, first, second, strict=True):
            largest = [max(took.errors.values()) for took in both]
            assert 0 < largest[0] <= 1
            assert largest[1] == 0 if case.op == "gemm_reduce_scatter" else 0 < largest[1] <= 1


def compiled(rank: int, world_size: int) -> list[list[str]]:
    """The modes in which ours were called before each time that kernels were compiled, of three cases, two at once."""
    real, called, found = float8._call_of_ours, [], []

    def noted(*given: Any, **more: Any) -> Any:
        called.append(planning.here.mode or "made")
        return real(*given, **more)

    def ends(*_: Any) -> None:
        found.append(called.copy())
        called.clear()

    with (
        mock.patch.object(float8, "_COMPILED_AT_ONCE", 2),
        mock.patch.object(float8, "_call_of_ours", noted),
        mock.patch.object(float8, "compile_shared_out", ends),
    ):
        measure(rank, world_size, cases(OPS[1:], world_size)[:3], "blockwise", 1)
    return found


@pytest.mark.cpu
@pytest.mark.num_ranks(2)
def test_kernels_are_compiled_some_cases_at_once() -> None:
    """In 8 and 16 bits; then the first two cases are measured, and so on."""
    for found in values(run_ranks(compiled, 2)):
        assert found == [["collect"] * 4, ["made"] * 4 + ["collect"] * 2]


@pytest.mark.cpu
@pytest.mark.num_ranks(2)
@pytest.mark.parametrize("ranks", [1, 2])
def test_no_case_begins_after_the_time_is_up(ranks: int) -> None:
    wanted = cases(OPS[:1] if ranks == 1 else OPS[1:3], ranks) * 2
    assert [len(took) for took in values(run_ranks(measure, ranks, wanted, "rowwise", 1, 0.0))] == [1] * ranks


@pytest.mark.parametrize("op", ["all_gather_gemm", "gemm_reduce_scatter"])
def test_rows_that_leave_ranks_waiting_are_not_given_to_pytorch(op: str) -> None:
    for rows, text in ((126, "between multiples of 16 bytes"), (127, "equally many rows"), (128, "GPU")):
        case = cases_of(op, f"{rows},40,256", 2, "float16", False)[0]
        x: Any = SimpleNamespace(recipe="rowwise", case=case, num_ranks=2, device=torch.device("cpu"))
        with pytest.raises(Unavailable, match=text):
            float8._fused(x)


def halved(rank: int, world_size: int) -> float:
    """The error of a product whose scales are wrong."""
    gemm = stream_k.gemm

    def wrong(*args: Any, scale_a: torch.Tensor | None = None, **more: Any) -> torch.Tensor:
        return gemm(*args, scale_a=None if scale_a is None else scale_a / 2, **more)

    with mock.patch.object(stream_k, "gemm", wrong):
        return measure(rank, world_size, cases(("gemm",), 1), "rowwise", 1)[0].errors["ours"]


@pytest.mark.cpu
def test_wrong_scales_show() -> None:
    assert values(run_ranks(halved, 1))[0] > 10


def test_table() -> None:
    took = [
        slowest(
            [
                Took({"ours": 2e-6, "scaled_mm": 3e-6}, {"ours": 0.5}),
                Took({"ours": 1e-6, "scaled_mm": 4e-6}, {"ours": 0.25}),
            ]
        ),
        Took({"ours": 1e-6}, {"ours": 0.75}),
        Took({"ours": 1e-6, "scaled_mm": 1e-6}, {"ours": 0.75, "scaled_mm": float("nan")}),
    ]
    lines = table(cases_of("gemm", "tiny", 1, "float16", False)[:1] * 3, took)
    assert lines[2].endswith("| 2.0 | 4.0 | 0.50 |")
    assert lines[3].endswith("| 1.0 |  | 0.75 |")
    assert lines[4].endswith("| 1.0 | 1.0 wrong | 0.75 |")
    assert lines[-1] == "gemm, scaled_mm over ours: 2.000, worst 2.000 (1 cases)"


@pytest.mark.cpu
@pytest.mark.parametrize("older", [False, True])
def test_deep_gemm_gets_its_operands(older: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By rows of both, with scales of blocks of them; it can't be installed without CUDA."""

    def multiply(a: Any, b: Any, out: torch.Tensor) -> None:
        out.copy_(stream_k.dequantize(*a) @ stream_k.dequantize(*b).t())

    products, layouts = {True: "gemm_fp8_fp8_bf16_nt", False: "fp8_gemm_nt"}, {True: "col", False: "mn"}
    names = {products[older]: multiply, f"get_{layouts[older]}_major_tma_aligned_tensor": lambda x: x}
    monkeypatch.setitem(sys.modules, "deep_gemm", SimpleNamespace(**names))
    monkeypatch.setattr(float8, "_need_gpu", lambda _: None)
    x = Quantized(cases(("gemm",), 1)[0], None, target.device(), "blockwise")
    assert error_over_bound(x, float8._deep_gemm(x)().to(x.dtype), fast=False) <= 1


def test_what_is_refused() -> None:
    app = options.app(help="")
    app.command()(float8.main)
    for arguments, words in (
        (["--recipe", "columnwise"], "--recipe is 'columnwise'"),
        (["-n", "2", "--ops", "gemm"], "--ops has 'gemm'"),
        (["--ops", "gemm_all_reduce"], "--ops has 'gemm_all_reduce'"),
    ):
        found = CliRunner().invoke(app, arguments)
        assert found.exit_code == 2
        assert words in found.output

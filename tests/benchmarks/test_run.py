"""Runs of the harness: small shapes, on ranks, with the records that come out of them."""

import dataclasses
import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from pyrocshmem import Heap, RanksFailed, target
from pyrocshmem.benchmarks import ahead, memory, providers, records, run, stats, tables
from pyrocshmem.benchmarks.__main__ import app
from pyrocshmem.benchmarks.measure import measure_cases
from pyrocshmem.benchmarks.operands import Operands
from pyrocshmem.benchmarks.providers import Run
from pyrocshmem.benchmarks.schema import IS_DEFAULT
from pyrocshmem.benchmarks.shapes import OPS, Case
from tests import commands
from tests.benchmarks import made_up
from tests.ranks import run_ranks, values
from tests.scripts import support

TIER = 3
pytestmark = pytest.mark.gpu_a_rank("it times beside NCCL")

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.num_ranks(2)
def test_every_op(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "all.jsonl"
    names = "ours,ours_fp32,ours_no_blas,ours_gemm,ours_whole_tiles,blas,unfused,unfused_stacked,blas_ours,"
    names += "blas_torch_one_shot,torch_symm_mem,kraken"
    options = (
        "--shapes",
        "tiny",
        "--iters",
        "2",
        "-n",
        "2",
        "--providers",
        names,
        "--csv",
        str(tmp_path / "x.csv"),
    )
    monkeypatch.setattr(sys, "argv", ["benchmarks", "all", *options])
    done = commands.invoke(app, "all", *options, "--json", str(path))
    file = records.read(path)
    assert file is not None
    assert run.problems(file.cases) == [], done.stderr
    assert done.returncode == 0, done.stdout + done.stderr
    assert file.environment["multicast"] is False
    assert file.environment["environment"]["NCCL_NVLS_ENABLE"] == "0"
    assert file.environment["torch"] == torch.__version__
    assert "--providers" in file.environment["command"]
    assert {case["op"] for case in file.cases} == set(OPS)
    assert len(file.cases) == 29
    for case in file.cases:
        assert "ours" in case["us"], case["skipped"]
        assert ("blas" if case["op"] == "gemm" else "unfused") in case["us"], case["skipped"]
        for samples in case["us"].values():
            assert len(samples) == 2
            assert min(samples) > 0
        assert all(0 <= error["worst_ratio"] <= 1 for error in case["error"].values())
        assert all(error["num_elements"] > 0 for error in case["error"].values())
        ours = [name for name in case["us"] if name.startswith("ours")]
        assert set(case["bits"]) == set(ours) - ({"ours"} if case["op"] == "barrier" else set())
        assert all(bits["runs"] >= 2 and bits["distinct"] == 1 for bits in case["bits"].values())
        if case["op"] in ("gemm_reduce_scatter", "gemm_all_reduce", "gemm_all_reduce_rms_norm"):
            assert {"ours", "ours_fp32"} <= case["us"].keys()
        if case["op"] == "gemm":
            assert "ours_no_blas" in case["us"] or case["skipped"]["ours_no_blas"] == IS_DEFAULT
        # Whatever has a configuration says what that chose.
        assert case["schedule"].keys() == case["config"].keys()
        assert case["schedule"].get("ours_whole_tiles", "whole") == "whole"
        # Messages take 1 MiB a slot at least, also for a case this small.
        assert case["workspace_bytes"]["ours"] >= (2 << 20 if case["op"] == "all_reduce" else 0)
        if target.interpreted():
            assert case["floor_us"] is None
            assert (case["dropped"], case["clocks_mhz"]) == ("", {})
    skipped = next(case for case in file.cases if case["op"] == "gemm_reduce_scatter")["skipped"]
    if target.interpreted():
        assert skipped["torch_symm_mem"] == "needs GPUs"
        decoded = next(case for case in file.cases if case["op"] == "gemm_all_reduce")["skipped"]
        assert decoded["blas_torch_one_shot"] == "needs GPUs"
    assert "### gemm_all_reduce, tiny" in done.stdout


@pytest.mark.cpu
def test_kernels_of_a_corpus() -> None:
    """One case each of a few dozen kernels stands for all 500; a plan of it can be made. Here nothing is compiled
    ahead."""
    cases = run.plan(["gemm"], "stream-k-corpus", None, 1, None)
    assert len(cases) == 500
    found = ahead.kernels(cases)
    assert 2 <= len(found) <= 60
    case, config = min(found.values(), key=lambda job: job[0].M * job[0].N * job[0].K)
    assert ahead.plan(case, config).product.config == config
    assert ahead.compile_ahead(cases) == 0


def _replaced(make: Callable[[Any], Run]) -> None:
    ops, _ = providers._PROVIDERS["ours"]
    providers._PROVIDERS["ours"] = (ops, make)


def _measured(
    heap: Heap, iters: int = 1, names: tuple[str, ...] = ("ours", "unfused")
) -> list[dict[str, Any]]:
    device = target.device(heap.rank)
    case = Case("gemm_all_reduce", "tiny", 40, 24, 16, "float16", heap.world_size, "eager")
    return [record for _, record in measure_cases([case], names, iters, heap, device)]


def off_by_one_element(rank: int, world_size: int) -> list[dict[str, Any]]:
    """A provider whose output is right but for one element, on one rank."""
    right = providers._PROVIDERS["unfused"][1]

    def make(operands: Any) -> Run:
        made = right(operands)
        function = made.function

        def call() -> None:
            function()
            assert made.out is not None
            if rank == 1:
                made.out[-1, 3] *= 1.5

        made.function = call
        return made

    _replaced(make)
    with Heap(1 << 20) as heap:
        return _measured(heap)


def writes_once(rank: int, world_size: int) -> list[dict[str, Any]]:
    """A provider that computes in its first call and leaves its output alone afterwards."""
    right = providers._PROVIDERS["unfused"][1]

    def make(operands: Any) -> Run:
        made, calls = right(operands), []
        function = made.function

        def call() -> None:
            calls.append(1)
            # All ranks alike: the product is collective.
            if len(calls) == 1:
                function()

        made.function = call
        return made

    _replaced(make)
    with Heap(1 << 20) as heap:
        return _measured(heap)


def other_bits_each_time(rank: int, world_size: int) -> list[dict[str, Any]]:
    """A provider whose last element differs by one rounding from call to call, on one rank."""
    right = providers._PROVIDERS["unfused"][1]

    def make(operands: Any) -> Run:
        made, calls = right(operands), []
        function = made.function

        def call() -> None:
            function()
            calls.append(1)
            assert made.out is not None
            if rank == 1:
                made.out.view(torch.int16)[-1, -1] += len(calls) % 2

        made.function = call
        return made

    _replaced(make)
    with Heap(1 << 20) as heap:
        return _measured(heap, iters=2)


def held_weights(rank: int, world_size: int) -> list[dict[str, Any]]:
    """Records whose memory says 7 where B had stopped changing when it was read."""

    def used_by(run: Run, operands: Operands, spare: object) -> int:
        return 7 if isinstance(operands._weights, itertools.repeat) else 0

    memory.used_by = used_by  # type: ignore[assignment]
    with Heap(16 << 20) as heap:
        return _measured(heap)


def no_room(rank: int, world_size: int) -> list[dict[str, Any]]:
    """Messages, and the same as a variant, on a heap that their slots don't fit on."""
    with Heap(1 << 20) as heap:
        return _measured(heap, names=("ours", "ours_unfused"))


def breaks_on_a_rank(rank: int, world_size: int) -> list[dict[str, Any]]:
    """A provider that one rank can't prepare."""

    def make(operands: Any) -> Run:
        if rank == 1:
            raise MemoryError("no room on rank 1")
        return Run(lambda: None, None)

    _replaced(make)
    with Heap(1 << 20) as heap:
        return _measured(heap)


@pytest.mark.num_ranks(2)
@pytest.mark.parametrize("body", [off_by_one_element, writes_once])
def test_a_wrong_result_is_marked(body: Callable[..., Any]) -> None:
    for (record,) in values(run_ranks(body, 2)):
        assert record["wrong"] == ["ours"]
        assert record["error"]["ours"]["num_bad"] > 0
        assert record["error"]["unfused"]["num_bad"] == 0
        assert "WRONG result of ours" in run.problems([record])[0]


@pytest.mark.num_ranks(2)
def test_results_that_differ_from_run_to_run_fail_the_case() -> None:
    for (record,) in values(run_ranks(other_bits_each_time, 2)):
        assert record["error"]["ours"]["num_bad"] == 0
        assert record["bits"]["ours"]["distinct"] == 2
        assert record["wrong"] == ["ours"]
        assert "WRONG: 2 results of ours in" in run.problems([record])[0]


@pytest.mark.num_ranks(2)
def test_host_time_and_memory_are_of_a_repeated_call() -> None:
    for (record,) in values(run_ranks(held_weights, 2)):
        assert record["workspace_bytes"] == {"ours": 7}


@pytest.mark.num_ranks(2)
def test_ours_failing_on_one_rank_is_a_problem_and_hangs_nobody() -> None:
    for (record,) in values(run_ranks(breaks_on_a_rank, 2)):
        assert record["failed"] == {"ours": "MemoryError: no room on rank 1"}
        assert list(record["us"]) == ["unfused"]
        assert "ours failed" in run.problems([record])[0]


@pytest.mark.num_ranks(2)
def test_a_variant_without_room_is_skipped_and_the_default_is_a_problem() -> None:
    for (record,) in values(run_ranks(no_room, 2)):
        assert record["skipped"]["ours_unfused"].startswith("HeapOutOfMemory")
        assert record["failed"].keys() == {"ours"}


@pytest.mark.num_ranks(2)
def test_what_two_sets_have_in_common_is_measured_once(tmp_path: Path) -> None:
    llama = Case("gemm_all_scatter", "llama3", 8, 8, 8, "float16", 2, "eager")
    cases = [llama, dataclasses.replace(llama, M=4), dataclasses.replace(llama, shapes="sweep")]
    file = run.run(cases, ("blas", "unfused"), 1, 2, tmp_path / "x.jsonl", "0123")
    found = [(case["shapes"], case["M"]) for case in file.cases]
    assert found == [("llama3", 8), ("sweep", 8), ("llama3", 4)]
    assert file.cases[0]["us"] == file.cases[1]["us"]
    assert file.environment["commit"] == "0123"
    assert "gpus_after" in file.environment


@pytest.mark.cpu
def test_a_case_that_breaks_the_ranks_is_a_problem_and_the_others_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = [Case("gemm_all_reduce", "tiny", m, 8, 8, "float16", 2, "eager") for m in (1, 2, 3)]
    asked = []

    def spawned(
        fn: object, ranks: int, todo: list[Case], names: object, iters: int, path: Path, **_: object
    ) -> None:
        asked.append([case.M for case in todo])
        for case in todo:
            if case.M == 2:
                raise RanksFailed([]) from TimeoutError("a wait ran out")
            times = {"ours": 5.0, "blas": 2.0}
            record = made_up.case(case.op, case.shapes, case.M, case.N, case.K, **times)
            records.append(path, record | {"dtype": case.dtype, "ranks": case.ranks, "device": "cpu"})

    monkeypatch.setattr(run, "spawn", spawned)
    file = run.run(cases, None, 1, 2, tmp_path / "x.jsonl", "")
    assert asked == [[1, 2, 3], [3]]
    assert [(case["M"], case["failed"]) for case in file.cases] == [
        (1, {}),
        (2, {"ours": "TimeoutError('a wait ran out')"}),
        (3, {}),
    ]
    (problem,) = run.problems(file.cases)
    assert problem.startswith("gemm_all_reduce 2 x 8 x 8 float16: ours failed: TimeoutError")
    assert "| 2 x 8 x 8 | eager | failed |" in tables.document([file])


@pytest.mark.cpu
def test_a_wrong_result_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = made_up.case("gemm", "tiny", 8, 8, 8, ours=1, blas=1) | {"wrong": ["ours"]}
    file = records.File(tmp_path / "x.jsonl", made_up.ENVIRONMENT, [case])
    monkeypatch.setattr(run, "run", lambda *arguments: file)
    done = CliRunner().invoke(app, ["gemm", "--shapes", "8,8,8"], env={"COLUMNS": "200"})
    assert done.exit_code == 1
    assert "gemm 8 x 8 x 8 bfloat16: WRONG result of ours" in done.output


@pytest.mark.num_ranks(2)
def test_launch_script(tmp_path: Path) -> None:
    out = tmp_path / "one.jsonl"
    arguments = (
        "gemm_all_reduce",
        "32",
        "16",
        "8",
        "--dtype=float16",
        "--iters=2",
        "--providers=unfused,blas",
    )
    backend = "cpu" if target.interpreted() else "gpu"
    done = support.bash(
        tmp_path,
        f'"{ROOT}/benchmarks/launch.sh" "$@"',
        *arguments,
        f"--json={out}",
        PYROCSHMEM_NO_VENV="1",
        PYROCSHMEM_BACKEND=backend,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert lines[0]["num_ranks"] == (target.num_devices() or 2)
    (case,) = [line for line in lines if "op" in line]
    assert (case["M"], case["N"], case["K"], case["dtype"], case["shapes"]) == (
        32,
        16,
        8,
        "float16",
        "custom",
    )
    assert {name: len(samples) for name, samples in case["us"].items()} == {"blas": 2, "unfused": 2}


@pytest.mark.cpu
@pytest.mark.parametrize(
    "arguments", [(), ("gemm", "1", "2"), ("gemm", "1", "2", "-3"), ("gemm", "1", "x", "3")]
)
def test_launch_script_refuses_at_once(arguments: tuple[str, ...], tmp_path: Path) -> None:
    done = support.bash(tmp_path, f'"{ROOT}/benchmarks/launch.sh" "$@"', *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Usage: benchmarks/launch.sh OP M N K" in done.stderr


@pytest.mark.cpu
def test_a_cpu_gives_no_ratios_and_measures_no_large_case(monkeypatch: pytest.MonkeyPatch) -> None:
    made = made_up.case("gemm", "tiny", 8, 8, 8, ours=1, blas=2)
    assert stats.speedup(made, "blas") == 2
    assert stats.speedup(made | {"device": "cpu"}, "blas") is None
    monkeypatch.setattr(run, "run", lambda *arguments: pytest.fail("it would have been measured"))
    done = CliRunner().invoke(
        app, ["gemm_all_reduce", "--shapes", "llama3", "-n", "2"], env={"COLUMNS": "200"}
    )
    assert done.exit_code == 2
    assert done.stderr.endswith("bench gemm_all_reduce --shapes tiny\n")

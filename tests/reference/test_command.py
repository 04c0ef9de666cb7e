"""`python -m pyrocshmem reference` and reference/run.sh as a user runs them: what they print, and how they exit."""

import json
import math
import re
import subprocess
from pathlib import Path

import pytest
import torch
import typer
from rich.console import Console

import pyrocshmem.launching
from pyrocshmem import options, target
from pyrocshmem.options import parse_shape
from pyrocshmem.reference import report
from pyrocshmem.reference.__main__ import USAGE, app
from pyrocshmem.reference.accuracy import Accuracy
from pyrocshmem.reference.job import Job, Result
from pyrocshmem.reference.problems import ALL, find_problem
from tests import commands
from tests.conftest import ROOT

TIER = 2
pytestmark = pytest.mark.gpu_a_rank("commands start a rank a GPU")

GOOD = Accuracy(0.5, 1.0, 0.5, 0, 12, None)
BAD = Accuracy(math.inf, 0.0, math.inf, 3, 12, (1, 2))


@pytest.mark.parametrize(
    ("collective", "ranks", "shape", "dtype"),
    [
        pytest.param("all_gather", 3, "97,47,80", "float16", marks=pytest.mark.num_ranks(3)),
        pytest.param("all_reduce", 3, "97,193,131", "float32", marks=pytest.mark.num_ranks(3)),
        pytest.param("all_scatter", 2, "64,47,80", "float16", marks=pytest.mark.num_ranks(2)),
        pytest.param("reduce_scatter", 2, "65,48,81", "bfloat16", marks=pytest.mark.num_ranks(2)),
        pytest.param("all_reduce", 3, "5,7", "float16", marks=pytest.mark.num_ranks(3)),
        pytest.param("reduce_scatter", 2, "5,7", "float32", marks=pytest.mark.num_ranks(2)),
        pytest.param("all_gather", 2, "5,7", "bfloat16", marks=pytest.mark.num_ranks(2)),
        pytest.param("all_scatter", 3, "5,7", "float16", marks=pytest.mark.num_ranks(3)),
        pytest.param("broadcast", 2, "5,7", "float16", marks=pytest.mark.num_ranks(2)),
        pytest.param("rms_norm_replicated", 3, "5,37", "float16", marks=pytest.mark.num_ranks(3)),
        pytest.param("gemm_rms_norm_all_scatter", 2, "5,38,81", "float16", marks=pytest.mark.num_ranks(2)),
        pytest.param("all_reduce_rms_norm", 3, "7,37", "float16", marks=pytest.mark.num_ranks(3)),
        pytest.param("rms_norm", 2, "5,37", "float32", marks=pytest.mark.num_ranks(2)),
        pytest.param("gemm_rms_norm", 2, "5,37,81", "bfloat16", marks=pytest.mark.num_ranks(2)),
    ],
)
def test_run(collective: str, ranks: int, shape: str, dtype: str, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    options = ("--shape", shape, "--dtype", dtype, "--iters", "2", "--seed", "5", "--json", str(out))
    arguments = ("-n", str(ranks), "-c", collective, *options)
    # One as a user starts it.
    done = (
        commands.start("pyrocshmem", "reference", *arguments)
        if collective == "all_scatter"
        else commands.invoke(app, *arguments)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for part in ("runs on", "because", "per rank", "bound there", "median", shape.replace(",", " "), dtype):
        assert part in done.stdout
    assert done.stdout.count("│ right") == ranks
    assert done.stdout.splitlines()[-1] == f"all {ranks} ranks right"
    assert done.stdout.splitlines()[0].endswith("times here mean nothing.") == target.interpreted()
    if collective == "all_scatter":
        for step in (f"starting {ranks} ranks", "warming up", "timing 2 calls of reference", "checking"):
            assert step in done.stderr
    result = json.loads(out.read_text())
    assert result["ok"] is True
    assert len(result["accuracy"]) == ranks == result["num_ranks"]
    moved = find_problem(collective, shape.count(",") + 1).moves
    for found in result["accuracy"]:
        assert (found["max_error"] == 0) if moved else (0 < found["max_error"] <= found["bound_at_max"])
    assert len(result["seconds"]["reference"]) == 2


@pytest.mark.num_ranks(2)
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("-c", "rms_norm", "--shape", "0,2"), "shape is (0, 2), allowed sizes of 1 or more"),
        (("-c", "gemm_rms_norm_all_scatter", "--shape", "4,5,6"), "N is 5, a multiple of the 2 ranks"),
    ],
)
def test_bad_options(arguments: tuple[str, ...], text: str) -> None:
    """That need torch to be known as bad; tests/scripts/test_options.py has the others."""
    done = commands.invoke(app, *arguments)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert text in done.stderr


@pytest.mark.gpu
def test_more_gpus_than_there_are() -> None:
    present = torch.cuda.device_count()
    if present >= options.MAX_RANKS:
        pytest.skip("more than these are refused whatever the machine has")
    done = commands.start("pyrocshmem", "reference", "-n", "8")
    assert done.returncode == 2
    assert f"8 GPUs asked for, this machine has {present}" in done.stderr


@pytest.mark.cpu
def test_gpu_asked_for_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    done = commands.start("pyrocshmem", "reference", "--backend", "gpu")
    assert done.returncode == 2
    assert "sees no GPU here" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("accuracy", "code", "text"),
    [([GOOD, GOOD], 0, "all 2 ranks right"), ([GOOD, BAD], 1, "rank 1 is WRONG, of 2")],
)
def test_a_wrong_rank_fails_the_run(
    accuracy: list[Accuracy], code: int, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spawned(*arguments: object) -> list[Result]:
        assert isinstance(arguments[2], Job)
        return [Result(found, (0.25, 0.5)) for found in accuracy]

    monkeypatch.setattr(pyrocshmem.launching, "spawn", spawned)
    monkeypatch.setattr(target, "num_devices", lambda: 2)
    done = commands.invoke(app, "-n", "2", "--shape", "6,2,2")
    assert done.returncode == code, done.stdout
    assert done.stdout.splitlines()[-1] == text
    assert ("WRONG: 3 of 12 bad" in done.stdout) == bool(code)


def test_help_of_the_script_names_every_option() -> None:
    # An empty environment with a bare PATH: help needs no set-up.
    done = subprocess.run(
        ["/usr/bin/env", "-i", "PATH=/usr/bin:/bin", str(ROOT / "reference" / "run.sh"), "-h"],
        check=True,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.stdout.startswith("Usage: ./run.sh [OPTIONS]")
    assert "Example:\n  ./run.sh -n 4 -c all_reduce" in done.stdout
    names = {problem.command for problem in ALL if problem.joins != "meet"} - {""}
    assert all(re.search(rf"\n  {collective}\s", done.stdout) for collective in names)
    listed = set(re.findall(r"(?<!\S)-{1,2}[a-z][a-z-]*", done.stdout.split("Example:", maxsplit=1)[0]))
    options = {name for option in typer.main.get_command(app).params for name in option.opts}
    assert listed == options | {"-h", "--help"}


@pytest.mark.parametrize("text", ["", "1,2", "1,2,3,4", "a,b,c", "-1,2,3", "1.5,2,3", "1,,3"])
def test_parse_shape_refuses(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"got {text!r}")):
        parse_shape(text)


def test_parse_shape() -> None:
    assert parse_shape("97, 193,0") == (97, 193, 0)


def test_usage_has_the_collectives_that_there_are() -> None:
    expected = {(each.command, each.letters) for each in ALL if each.command and each.joins != "meet"}
    found = options.collectives(USAGE.read_text())
    assert {(name, letters) for name, several in found.items() for letters in several} == expected


def test_report_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "backend", lambda: "cuda")
    assert [report.format_seconds(s) for s in (1.234e-5, 4.567e-3, 1.5)] == ["12.3 us", "4.57 ms", "1.50 s"]
    assert report.slowest([(1.0, 5.0), (3.0, 2.0)]) == (3.0, 5.0)
    console = Console(width=120, record=True)
    timings = [report.Timing("fused", (1.0, 3.0, 2.0)), report.Timing("reference", (3.0, 3.0, 3.0))]
    report.print_times(console, timings, 6e9)
    text = console.export_text()
    assert "speed over reference" in text
    assert re.search(r"fused\s+│\s+2\.00 s\s+│\s+1\.00 s\s+│\s+3\.0\s+│\s+1\.500", text)
    report.write_json(tmp_path / "x.json", {"a": 1}, [BAD], timings)
    result = json.loads((tmp_path / "x.json").read_text())
    assert (result["a"], result["ok"], result["accuracy"][0]["max_error"]) == (1, False, "inf")

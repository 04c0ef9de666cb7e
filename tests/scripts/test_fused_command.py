"""`python -m pyrocshmem run`, which run.sh starts: every collective runs, is checked and timed; mistakes exit with
2."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pyrocshmem import launching, options, signal, target
from pyrocshmem.calls.op import registered
from pyrocshmem.reference.accuracy import Accuracy
from pyrocshmem.reference.problems import ALL, PROBLEMS
from pyrocshmem.run_command import USAGE, app
from pyrocshmem.stream_k.choice.config import Config
from pyrocshmem.stream_k.run.job import Result, with_block
from tests import commands

TIER = 2
NORMS = {problem.command: problem for problem in ALL if problem.gemm and problem.norm}
pytestmark = pytest.mark.gpu_a_rank("commands start a rank a GPU")


def check_what_a_run_says(done: subprocess.CompletedProcess[str], ranks: int) -> None:
    """Of times on a CPU that they mean nothing, of each step that it begins, and last that all is right."""
    lines = done.stdout.splitlines()
    assert lines[-1] == f"all {ranks} ranks right"
    on_cpu = target.backend() == "host"
    assert lines[0].endswith("times here mean nothing.") == on_cpu
    assert ("speed over reference" in done.stdout) == (not on_cpu)
    if done.args[0] == sys.executable:  # in this process, ranks write past what is collected
        for step in ("starting", "warming up", "timing 2 calls of ours and reference", "checking against"):
            assert step in done.stderr


@pytest.mark.parametrize("collective", PROBLEMS)
@pytest.mark.num_ranks(3)
def test_run(collective: str, tmp_path: Path) -> None:
    """Sizes that 3 ranks don't divide."""
    out = tmp_path / "result.json"
    options = ("--shape", "97,43,131", "--dtype", "float16", "--iters", "2", "--json", str(out))
    arguments = ("-n", "3", "-c", collective, *options)
    # One as a user starts it.
    done = (
        commands.start("pyrocshmem", "run", *arguments)
        if collective == "all_reduce"
        else commands.invoke(app, *arguments)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    problem = PROBLEMS[collective]
    for part in ("runs on", "because", "whole tiles", "communication", "workspace"):
        assert part in done.stdout
    check_what_a_run_says(done, 3)
    for part in (f"stream_k.{problem.op}", problem.steps, problem.describe_share((97, 43, 131), 3)):
        assert part in done.stdout
    assert ("partials in float16" in done.stdout) == problem.sums
    assert "by messages" in done.stdout
    assert done.stdout.count("│ right") == 3
    result = json.loads(out.read_text())
    assert result["ok"] is True
    assert all(0 < found["max_error"] <= found["bound_at_max"] for found in result["accuracy"])
    assert {who: len(samples) for who, samples in result["seconds"].items()} == {"ours": 2, "reference": 2}


@pytest.mark.parametrize("collective", NORMS)
@pytest.mark.num_ranks(2)
def test_run_with_a_norm(collective: str, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    options = ("--shape", "3,44,131", "--dtype", "float16", "--iters", "2", "--json", str(out))
    done = commands.invoke(app, "-n", "2", "-c", collective, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    for part in (f"stream_k.{NORMS[collective].op}", NORMS[collective].steps, "M N K = 3 44 131", "GFLOP/s"):
        assert part in done.stdout
    check_what_a_run_says(done, 2)
    result = json.loads(out.read_text())
    assert all(0 < found["max_error"] <= found["bound_at_max"] for found in result["accuracy"])
    assert {who: len(samples) for who, samples in result["seconds"].items()} == {"ours": 2, "reference": 2}


@pytest.mark.parametrize(
    ("collective", "placement"),
    [("all_reduce", "auto"), ("all_reduce", "beside"), ("all_scatter", "auto"), ("all_gather", "auto")],
)
@pytest.mark.num_ranks(2)
def test_run_with_another_tile(collective: str, placement: str) -> None:
    options = ("--shape", "200,70,96", "--dtype", "float16", "--iters", "1", "--placement", placement)
    tiles = set()
    for block in ("64,128,32", "32,16,64"):
        done = commands.invoke(app, "-n", "2", "-c", collective, *options, "--block", block)
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"{block.replace(',', ' x ')}, " in done.stdout
        assert done.stdout.splitlines()[-1] == "all 2 ranks right"
        tiles.update(re.findall(r"(\d+) whole tiles, (\d+) split", done.stdout))
    assert len(tiles) == 2, "smaller tiles are more"


@pytest.mark.cpu
def test_a_tile_that_is_too_large_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def spawn(*arguments: object) -> None:
        error = ValueError("stream_k_kernel needs 262152 bytes of shared memory a program")
        raise launching.RanksFailed([launching.RankResult(0, exception=error)]) from error

    monkeypatch.setattr(launching, "spawn", spawn)
    done = commands.invoke(app, "-n", "1", "--block", "256,256,256")
    assert done.returncode == 2
    assert (
        done.stderr.splitlines()[-1] == "error: stream_k_kernel needs 262152 bytes of shared memory a program"
    )
    with pytest.raises(launching.RanksFailed):  # its own choice is no mistake of the caller's
        commands.invoke(app, "-n", "1")


@pytest.mark.parametrize("block", [(256, 256, 256), (16, 16, 16), (64, 256, 32), (256, 16, 128)])
@pytest.mark.cpu
def test_another_tile_needs_no_more_shared_memory(block: tuple[int, int, int]) -> None:
    config = Config()
    found = with_block(config, block)
    assert (found.block_m, found.block_n, found.block_k) == block

    def loads(config: Config) -> int:
        return config.num_stages * (config.block_m + config.block_n) * config.block_k

    assert loads(found) <= loads(config) or found.num_stages == 1
    parts = [each.block_m * each.block_n // each.subtiles for each in (config, found)]
    assert parts[1] <= parts[0]


@pytest.mark.parametrize("collective", PROBLEMS)
@pytest.mark.cpu
def test_default_shape_on_one_rank(collective: str) -> None:
    done = commands.invoke(app, "-n", "1", "-c", collective, "--iters", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "M N K = 64 192 2048" in done.stdout
    assert "3 split tiles" in done.stdout
    assert done.stdout.splitlines()[-1] == "the one rank is right"


@pytest.mark.cpu
def test_batch_invariant() -> None:
    """Tiles that the default cuts are whole, and the run says so."""
    options = ("--shape", "64,192,2048", "--iters", "1", "--batch-invariant")
    done = commands.invoke(app, "-n", "1", "-c", "all_reduce", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 split tiles" in done.stdout
    assert "batch-invariant: tiles are whole" in " ".join(done.stdout.replace("│", " ").split())
    assert done.stdout.splitlines()[-1] == "the one rank is right"
    options = ("--shape", "7,40,96", "--iters", "1", "--tp-invariant")
    done = commands.invoke(app, "-n", "2", "-c", "reduce_scatter", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "k_blocks 4 instead of 1" in " ".join(done.stdout.replace("│", " ").split())
    assert "partials in fp32" in " ".join(done.stdout.replace("│", " ").split())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ("-c", "all_reduce", "--batch-invariant", "--placement", "unfused"),
            "which this config would break",
        ),
        (("-c", "all_reduce", "--shape", "7,50", "--placement", "inside"), "all_reduce has no GEMM"),
        (("-c", "gemm_rms_norm", "--placement", "messages"), "gemm_rms_norm chooses its GEMM itself"),
        (("-n", "3", "-c", "gemm_rms_norm_all_scatter", "--shape", "7,50,9"), "N is 50, a multiple of the 3"),
        (
            ("-c", "all_gather", "--placement", "inside"),
            "is 'inside', allowed blas_blocks, unfused, messages, copy_engine, auto",
        ),
        (
            ("-c", "reduce_scatter", "--placement", "within"),
            "is 'within', allowed blas_blocks, unfused, messages, copy_engine, auto",
        ),
        (
            ("-c", "all_reduce", "--placement", "within"),
            "is 'within', allowed blas_blocks, unfused, messages, copy_engine, own_stream, beside, inside, after, auto",
        ),
        (("-c", "all_gather", "--partial-dtype", "bfloat16"), "all_gather has no partial sums to travel in"),
        (
            ("--shape", "8192,8192,8192"),
            "this works: python -m pyrocshmem run -n 4 -c all_scatter --shape 64,",
        ),
        (
            ("--block", "64,48,64"),
            "block is (64, 48, 64), allowed are 16, 32, 64, 128, 256 for each of M, N, K",
        ),
        (("--block", "64,64,64", "--placement", "unfused"), "whose product is the BLAS's: it takes no block"),
        (
            ("-c", "gemm_rms_norm", "--block", "64,64,64"),
            "gemm_rms_norm chooses its GEMM itself: leave --block",
        ),
        (("--backend", "gpu"), "--backend gpu, but this process runs kernels on CPU"),
    ],
)
@pytest.mark.cpu
def test_mistakes(arguments: tuple[str, ...], text: str) -> None:
    """That need torch to be known as such; test_options.py has the others."""
    done = commands.invoke(app, *arguments)
    assert done.returncode == 2
    assert (text in done.stderr, done.stderr.count("\n"), done.stdout) == (True, 1, "")


@pytest.mark.parametrize(
    ("dtype", "partial", "wire"),
    [
        ("float16", None, "float16"),
        ("float16", "float32", "fp32"),
        ("float16", "bfloat16", "bfloat16"),
        ("float32", "float16", "fp32"),
        # Which the CPU target computes in fp32.
        ("bfloat16", None, "fp32" if target.interpreted() else "bfloat16"),
    ],
)
@pytest.mark.num_ranks(2)
def test_what_partials_travel_in(dtype: str, partial: str | None, wire: str) -> None:
    """Rounded once, and held to that; not in the strict mode, and those of fp32 results never, in whatever
    placement."""
    asked = ("--partial-dtype", partial) if partial else ()
    for placement in ("inside", "copy_engine", "messages"):
        sizes = ("--shape", "64,96,130", "--dtype", dtype, "--iters", "1")
        ways = (*asked, "--placement", placement)
        done = commands.invoke(app, "-n", "2", "-c", "all_reduce", *sizes, *ways)
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"partials in {wire}" in done.stdout
        assert ("a rounding of each rank's partial" in done.stdout) == (wire != "fp32")


@pytest.mark.gpu
def test_the_other_backend() -> None:
    """Another than the one that was found when the package was imported: it runs there, or says why it can't."""
    refusal = ""
    try:
        target.check_interpreter()
    except RuntimeError as error:
        refusal = str(error)
    done = commands.start("pyrocshmem", "run", "-n", "2", "--backend", "cpu", "--iters", "1")
    assert done.returncode == (2 if refusal else 0)
    assert (refusal or "runs on │ CPU") in " ".join((done.stdout + done.stderr).split())


def test_help_has_the_collectives_that_there_are() -> None:
    """The option -c is checked by it, before torch can be imported."""
    found = options.collectives(USAGE.read_text())
    expected = {(each.command, each.letters) for each in ALL if each.command}
    assert {(name, letters) for name, several in found.items() for letters in several} == expected
    ours = {op.command for op in registered() if op.package in ("stream_k", "collectives")} - {""}
    assert ours == set(found) - {"rms_norm_replicated"}, "which is rms_norm with an argument"


def test_most_ranks() -> None:
    assert int(signal.MAX_WORLD.value) == options.MAX_RANKS


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("bad", "text"), [([1], "rank 1 is WRONG, of 3"), ([0, 2], "ranks 0, 2 are WRONG, of 3")]
)
def test_a_wrong_rank_is_named_last(bad: list[int], text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def spawn(body: object, ranks: int, job: object) -> list[Result]:
        accuracy = [
            Accuracy(0.5, 1.0, 0.5, rank in bad, 12, (1, 2) if rank in bad else None) for rank in range(ranks)
        ]
        return [Result(each, {"ours": (0.25,), "reference": (0.5,)}, 0) for each in accuracy]

    monkeypatch.setattr(launching, "spawn", spawn)
    done = commands.invoke(app, "-n", "3", "-c", "all_reduce")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (1, text)

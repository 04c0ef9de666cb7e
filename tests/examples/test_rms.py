"""The RMSNorm examples: each launch model runs and is right; a wrong result on any rank ends with 1."""

import importlib
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import typer

from pyrocshmem import collectives

TIER = 3
pytestmark = pytest.mark.gpu_a_rank("examples start a rank a GPU")
ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "rms"
# Shares that differ by one; a row for a program.
ROWS, HIDDEN = 2, 37
# Result, and gradients of x and weight, of four mixes of types, each sharded and replicated; a sum and a gradient more
# where there is a residual.
CHECKS = 4 * 2 * 3 + 2 * 2 * 2


def run(*command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *command],
        check=False,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )


@pytest.mark.parametrize(
    ("before", "script", "after"),
    [
        ((), "spawn.py", ("-n", "2")),
        (("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"), "torchrun.py", ()),
    ],
    ids=["spawn", "torchrun"],
)
@pytest.mark.num_ranks(2)
def test_example(before: tuple[str, ...], script: str, after: tuple[str, ...]) -> None:
    done = run(*before, str(FOLDER / script), *after, "--rows", str(ROWS), "--hidden", str(HIDDEN))
    assert done.returncode == 0, done.stdout + done.stderr
    check_table(done.stdout)


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("script", "options", "text"),
    [
        ("torchrun.py", (), "not started by torchrun: RANK, WORLD_SIZE"),
        ("threads.py", ("-n", "9"), "9 ranks asked for, allowed are 1 to 8"),
    ],
)
def test_mistakes(script: str, options: tuple[str, ...], text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    done = run(str(FOLDER / script), *options)
    assert done.returncode == 2
    assert text in done.stderr
    assert "Traceback" not in done.stderr


def check_table(text: str) -> None:
    """Every check is there and right, on two ranks, and compared something: 16 bits differ from float64."""
    assert "RMSNorm on 2 ranks" in text
    assert text.count("right on every rank") == CHECKS
    assert len(re.findall(r"result .*│ 0\.[1-4]\d+ ", text)) >= 6


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Imports a module of the examples, whose `common` is not that of other examples."""
    monkeypatch.syspath_prepend(str(FOLDER))
    names = ("common", "threads")
    before = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    yield importlib.import_module
    for name in names:
        sys.modules.pop(name, None)
    sys.modules.update(before)


def off_on_rank_1(honest: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(*args: Any, group: Any, **options: Any) -> Any:
        found = honest(*args, group=group, **options)
        if group.rank == 1 and not isinstance(found, tuple):
            return found * 1.01
        return found

    return wrong


@pytest.mark.num_ranks(2)
def test_threads(
    example: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process: that is all it takes."""
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(typer.Exit) as ended:
        example("threads").main(2, ROWS, HIDDEN)
    text = capsys.readouterr().out
    assert ended.value.exit_code == 0, text
    check_table(text)


@pytest.mark.num_ranks(2)
def test_a_rank_without_columns(example: Callable[[str], Any], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended:
        example("threads").main(2, ROWS, 1)
    text = capsys.readouterr().out
    assert ended.value.exit_code == 0, text
    assert text.count("right on every rank") == CHECKS


@pytest.mark.cpu
def test_threads_that_are_wrong(
    example: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    threads = example("threads")
    monkeypatch.setattr(collectives, "rms_norm", off_on_rank_1(collectives.rms_norm))
    with pytest.raises(typer.Exit) as ended:
        threads.main(2, 1, 12)
    assert ended.value.exit_code == 1
    assert "WRONG, rank 1" in capsys.readouterr().out


@pytest.mark.cpu
def test_processes_that_are_wrong(example: Callable[[str], Any]) -> None:
    """What the examples of processes end with."""
    common = example("common")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    right, wrong = torch.ones(2, 3), torch.full((2, 3), 1.5)
    for found, code in ((right, None), (wrong, 1)):
        dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
        findings = [("x", common._against(found, right.double(), torch.full((2, 3), 1e-3).double()))]
        if code is None:
            common.finish(findings)
        else:
            with pytest.raises(SystemExit) as ended:
                common.finish(findings)
            assert ended.value.code == code
    assert not dist.is_initialized()

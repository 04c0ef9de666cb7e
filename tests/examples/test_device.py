"""The device examples: each runs and is right on 2 and 3 ranks; who never comes is named; what is wrong ends with 1."""

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pyrocshmem import PeerTimeout
from tests.ranks import run_ranks, values

TIER = 2
pytestmark = pytest.mark.gpu_a_rank("examples start a rank a GPU")
ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "device"
EXAMPLES = ("put", "put_signal_wait", "ring_all_gather")
# Of --late, for the example that has it.
OPTIONS = {"put_signal_wait": (False,)}


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Imports a module of the examples, whose `common` is not that of other examples. Ranks find it in the same way."""
    monkeypatch.syspath_prepend(str(FOLDER))
    names = ("common", *EXAMPLES)
    before = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    yield importlib.import_module
    for name in names:
        sys.modules.pop(name, None)
    sys.modules.update(before)


@pytest.mark.parametrize("ranks", [pytest.param(n, marks=pytest.mark.num_ranks(n)) for n in (2, 3)])
@pytest.mark.parametrize("name", EXAMPLES)
def test_every_call_is_right(name: str, ranks: int, example: Callable[[str], Any]) -> None:
    """Ranks look at what each call brought, and fail where it is wrong."""
    values(run_ranks(example(name).rank_main, ranks, *OPTIONS.get(name, ())))


@pytest.mark.num_ranks(2)
@pytest.mark.alone
def test_a_peer_that_never_comes_is_named(example: Callable[[str], Any]) -> None:
    late = run_ranks(example("put_signal_wait").rank_main, 2, True)
    fault = late[0].exception
    assert isinstance(fault, PeerTimeout), late[0].describe()
    assert (fault.op, fault.rank, fault.peer, fault.tile) == ("put_signal_wait", 0, 1, 0)
    assert (fault.call, fault.expected, fault.seen) == (2, 2, 1)
    assert fault.waited_s >= example("put_signal_wait").WAIT_S


def start(script: str, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(FOLDER / script), *options],
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=110,
    )


@pytest.mark.num_ranks(2)
def test_the_command() -> None:
    done = start("put.py", "-n", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == ["rank 0: right", "rank 1: right"]


@pytest.mark.cpu
def test_mistakes_are_lines() -> None:
    done = start("ring_all_gather.py", "-n", "9")
    assert (done.returncode, done.stderr.splitlines()[-1]) == (
        2,
        "ring_all_gather.py: error: 9 ranks, allowed are 1 to 8",
    )
    done = start("put.py", PYROCSHMEM_BACKEND="abacus")
    assert done.returncode == 2
    assert done.stderr.startswith("error: PYROCSHMEM_BACKEND='abacus'")


def wrong_main(rank: int, world_size: int) -> None:
    assert rank == 0, "that is not what was sent"


@pytest.mark.cpu
def test_a_rank_that_is_wrong(
    example: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["put.py", "-n", "2"])
    with pytest.raises(SystemExit) as ended:
        example("common").run(wrong_main)
    assert ended.value.code == 1
    assert "rank 0: right\nrank 1: that is not what was sent" in capsys.readouterr().out


@pytest.mark.cpu
@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_are_short_and_quoted_as_they_are(name: str) -> None:
    """docs/device-kernels.md has the kernel and the launcher of each."""
    text = (FOLDER / f"{name}.py").read_text()
    assert len(text.splitlines()) < 60
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/device-kernels.md").read_text(), re.DOTALL)
    quoted = text[text.index("@triton.jit") : text.index("\n\ndef rank_main")]
    assert quoted in blocks

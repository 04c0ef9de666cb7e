"""Examples and the stress runner as a user starts them: `-h`, and numbers of ranks that are refused."""

import subprocess
import sys

import pytest

from tests.scripts import support

TIER = 1
pytestmark = pytest.mark.cpu


def start(*arguments: str) -> subprocess.CompletedProcess[str]:
    return support.bash(
        support.ROOT, f'exec "{sys.executable}" "$@"', *arguments, PYTHONPATH=str(support.ROOT)
    )


@pytest.mark.parametrize(
    "program",
    [("examples/rms/torchrun.py",), ("examples/training/model_parallel.py",), ("-m", "tests.stress")],
    ids=" ".join,
)
def test_help(program: tuple[str, ...]) -> None:
    done = start(*program, "-h")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Usage: ")
    assert "-h, --help" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("examples/rms/spawn.py", "-n", "99"), "99 ranks asked for, allowed are 1 to 8"),
        (("-m", "tests.stress", "--ranks", "99"), "99 ranks asked for, allowed are 0 to 8"),
        (("-m", "tests.stress", "--json", "nowhere/x.json"), "nowhere/x.json can't be written"),
        (("-m", "tests.stress", "--nosuch"), "there is no option --nosuch, allowed are --op, --minutes"),
    ],
)
def test_what_is_refused(arguments: tuple[str, ...], text: str) -> None:
    done = start(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert text in done.stderr

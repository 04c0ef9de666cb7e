"""tests/run.sh and tests/conftest.py: order, passes, skips, and the closing line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scripts import support

TIER = 1
pytestmark = pytest.mark.cpu

HARNESS = ("run.sh", "conftest.py", "__init__.py", "faults/cases.py", "faults/guard_list.py")
CHEAP = """
import pytest
TIER = 0
@pytest.mark.cpu
def test_cheap(): pass
"""
DEAR = """
import pytest
TIER = 3
def test_dear(): pass
@pytest.mark.gpu
def test_gpu(): pass
@pytest.mark.num_gpus(63)
def test_many(): pass
"""
RANKS = """
import pytest
@pytest.mark.num_ranks(3)
def test_ranks(): pass
"""
SHARING = """
import pytest
@pytest.fixture(scope="module")
def made(): pass
@pytest.mark.parametrize("number", range(8))
def test_shared(made, number): pass
"""
FAILING = "def test_wrong(): assert 1 == 2\n"
COMPILED = """
import os
def test_compiled(): assert os.environ["TRITON_INTERPRET"] == "0"
"""


# Stand-ins that start at once; what they stand in for is used by every other test.
TARGET = """
import os
def interpreted(): return os.environ.get("PYROCSHMEM_BACKEND") == "cpu"
def describe(): return "a stand-in"
"""
TORCH = """
import os
class cuda:
    def device_count(): return int(os.environ.get("STANDIN_GPUS", "0"))
"""


def test_help() -> None:
    """Of this script, without a set-up: a bare PATH."""
    bare = {"PATH": "/usr/bin:/bin", "PYROCSHMEM_NO_VENV": "1"}
    command = [str(support.ROOT / "tests/run.sh"), "--max-tier", "1", "-h"]
    done = subprocess.run(
        command, check=True, env=bare, capture_output=True, text=True, timeout=support.TIMEOUT_S
    )
    assert done.stdout.startswith("Runs every test that this machine can run")
    assert "\n  tests/run.sh --max-tier 1 " in done.stdout
    assert "arguments go to pytest" in done.stdout
    assert "set -uo" not in done.stdout


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The harness with tests of its own. The dear module sorts first by name."""
    tree = support.copy_tree(tmp_path, *(f"tests/{name}" for name in HARNESS), *support.ACTIVATION)
    support.fake_module(tree, "pyrocshmem", target=TARGET)
    support.fake_module(tree, "torch", __init__=TORCH)
    (tree / "finegrained_alloc/build.sh").write_text("")
    # This run is one of many at once: at low priority, its pass that compiles would starve beside them.
    (tree / "bin").mkdir()
    (tree / "bin/renice").write_text("#!/bin/sh\n")
    (tree / "bin/renice").chmod(0o755)
    for name, source in {
        "a/test_dear.py": DEAR,
        "b/test_cheap.py": CHEAP,
        "compile/test_c.py": COMPILED,
    }.items():
        (tree / "tests" / name).parent.mkdir()
        (tree / "tests" / name).write_text(source)
    return tree


def run(tree: Path, *arguments: str, **environment: str) -> tuple[int, str, str]:
    """(exit status, closing line, everything printed) of tests/run.sh, by default without the GPU pass."""
    environment = {
        "PYROCSHMEM_NO_VENV": "1",
        "PYROCSHMEM_BACKEND": "cpu",
        "PYROCSHMEM_TEST_WORKERS": "1",
        "PATH": f"{tree / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
    } | environment
    done = support.bash(tree, 'tests/run.sh -p no:cacheprovider "$@"', *arguments, **environment)
    return done.returncode, done.stdout.splitlines()[-1], done.stdout + done.stderr


def test_all_passes_add_up(tree: Path) -> None:
    code, closing, text = run(tree, "-v")
    assert (code, closing) == (0, "3 passed, 0 failed, 2 skipped"), text
    assert (
        text.index("test_cheap PASSED") < text.index("test_dear PASSED") < text.index("test_compiled PASSED")
    )
    assert "needs a GPU, this is the CPU target" in text
    assert "pass: gpu, not run: PYROCSHMEM_BACKEND=cpu" in text


def test_several_at_once_and_the_others_alone(tree: Path) -> None:
    (tree / "tests/b/test_alone.py").write_text("import pytest\n@pytest.mark.alone\ndef test_apart(): pass\n")
    (tree / "tests/b/test_shared.py").write_text(SHARING)
    code, closing, text = run(tree, "-v", "tests/b", PYROCSHMEM_TEST_WORKERS="2")
    assert (code, closing) == (0, "10 passed, 0 failed, 0 skipped"), text
    assert "2 workers" in text
    # xdist 3.8 is deaf to groups with pytest 9.2.
    workers = {line.split()[0] for line in text.splitlines() if "PASSED tests/b/test_shared.py" in line}
    assert len(workers) == 1, "what a module's tests share is made twice"
    assert text.index("test_cheap") < text.index("test_apart PASSED"), "with others around it"


@pytest.mark.parametrize(
    ("line", "ran"),
    [
        ('raise RuntimeError("the interpreter of Triton 1 does not work with NumPy 2: no")', False),
        # Anything else is a failure, and must not pass for a pass that can't run here.
        ('raise RuntimeError("broken")', True),
    ],
)
def test_an_interpreter_that_fails_is_no_failure(tree: Path, line: str, ran: bool) -> None:
    source = tree / "pyrocshmem/target.py"
    source.write_text(f"{TARGET}if interpreted(): {line}\n")
    code, closing, text = run(tree, "-v")
    reason = "pass: cpu, not run: the interpreter of Triton 1 does not work with NumPy 2: no ==="
    assert (reason in text) == (not ran), text
    assert (code != 0) == ran
    assert closing == ("1 passed, 1 failed, 0 skipped" if ran else "1 passed, 0 failed, 0 skipped")


def test_with_gpus_each_test_has_its_pass(tree: Path) -> None:
    (tree / "tests/b/test_ranks.py").write_text(RANKS)
    code, closing, text = run(tree, "-v", STANDIN_GPUS="2")
    assert (code, closing) == (0, "4 passed, 0 failed, 0 skipped"), (
        text
    )  # those marked gpu are left to their pass
    code, closing, text = run(tree, "-v", STANDIN_GPUS="2", PYROCSHMEM_BACKEND="gpu")
    assert (code, closing) == (0, "2 passed, 0 failed, 2 skipped"), text
    assert "test_gpu PASSED" in text
    assert "test_dear PASSED" in text
    assert "test_cheap" not in text  # it says that it is for the CPU pass only
    assert "needs 63 GPUs, this machine has 2" in text
    assert "starts 3 ranks, this machine has 2 GPUs" in text


def test_a_failure_and_a_crash_fail_the_run(tree: Path) -> None:
    """One in each pass."""
    (tree / "tests/compile/test_wrong.py").write_text(FAILING)
    (tree / "tests/b/test_crash.py").write_text("import os\ndef test_crash(): os._exit(3)\n")
    code, closing, text = run(tree, "tests/b", "tests/compile")
    assert (code, closing) == (1, "1 passed, 2 failed, 0 skipped"), text


@pytest.mark.parametrize(
    ("arguments", "code", "passed"),
    [
        (("tests/b/test_cheap.py::test_cheap", "tests/compile", "-k", "cheap"), 0, 1),
        (("--max-tier", "0", "-k", "dear or compiled"), 5, 0),
    ],
)
def test_arguments_go_to_pytest(tree: Path, arguments: tuple[str, ...], code: int, passed: int) -> None:
    got, closing, text = run(tree, *arguments)
    assert (got, closing) == (code, f"{passed} passed, 0 failed, 0 skipped"), text

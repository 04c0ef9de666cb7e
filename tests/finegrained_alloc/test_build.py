"""build.sh and loading: one second, no work when nothing changed, two at once, a clear message when it was not run."""

import concurrent.futures
import os
import resource
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from pyrocshmem import finegrained_alloc
from tests.finegrained_alloc import support

TIER = 0
pytestmark = pytest.mark.cpu


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The package without its library, in a directory that holds nothing else."""
    ignore = shutil.ignore_patterns("*.so", "*.so.*", "__pycache__")
    return Path(shutil.copytree(support.PACKAGE, tmp_path / "finegrained_alloc", ignore=ignore))


def build(directory: Path, *arguments: str, **extra: str) -> subprocess.CompletedProcess[str]:
    """Without optimizing, which takes most of the time, unless `extra` says otherwise."""
    return subprocess.run(
        ["sh", str(directory / "build.sh"), *arguments],
        env=os.environ | {"CFLAGS": "-O0"} | extra,
        capture_output=True,
        text=True,
        timeout=support.TIMEOUT_S,
        check=False,
    )


@pytest.mark.alone
def _seconds_of_children() -> float:
    """What all that have ended have had of a core."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_builds_without_a_warning_and_quickly(copy: Path) -> None:
    begin = _seconds_of_children()
    done = build(copy, CFLAGS="-Werror -pedantic")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    # Of a core, however many others want it: one.
    assert _seconds_of_children() - begin < 5
    assert [path.name for path in copy.glob("*.so*")] == ["libfinegrained_alloc.so"]


def test_builds_again_only_when_a_source_is_newer(copy: Path) -> None:
    library = copy / "libfinegrained_alloc.so"
    assert build(copy).returncode == 0
    first = library.stat()
    assert build(copy, CC="false").returncode == 0  # a compiler that always fails is not called
    assert library.stat() == first
    later = time.time() + 10
    os.utime(copy / "hip_abi.h", (later, later))
    assert build(copy).returncode == 0
    assert library.stat().st_ino != first.st_ino


def test_a_failed_build_leaves_the_old_library_and_nothing_else(copy: Path) -> None:
    assert build(copy).returncode == 0
    before = (copy / "libfinegrained_alloc.so").read_bytes()
    (copy / "host.c").write_text("this is not C\n")
    later = time.time() + 10
    os.utime(copy / "host.c", (later, later))
    assert build(copy).returncode != 0
    assert (copy / "libfinegrained_alloc.so").read_bytes() == before
    assert [path.name for path in copy.glob("*.so*")] == ["libfinegrained_alloc.so"]


def test_ranks_may_build_at_once(copy: Path) -> None:
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        results = list(pool.map(lambda _: build(copy), range(3)))
    assert [result.returncode for result in results] == [0, 0, 0], results
    assert [path.name for path in copy.glob("*.so*")] == ["libfinegrained_alloc.so"]
    code = 'with fga.alloc(1, "host"): say(built=True)'
    assert support.run_child(f"sys.path.insert(0, {str(copy.parent)!r})\n{code}") == [{"built": True}]


def test_the_library_needs_no_gpu_runtime() -> None:
    done = subprocess.run(
        ["ldd", str(support.PACKAGE / "libfinegrained_alloc.so")],
        capture_output=True,
        text=True,
        timeout=support.TIMEOUT_S,
        check=True,
    )
    assert "cuda" not in done.stdout
    assert "hip" not in done.stdout


def test_importing_loads_nothing() -> None:
    code = (
        'say(mapped="libfinegrained_alloc" in open("/proc/self/maps").read(), torch="torch" in sys.modules)'
    )
    assert support.run_child(code) == [{"mapped": False, "torch": False}]


def test_load_opens_once() -> None:
    assert finegrained_alloc.load() is finegrained_alloc.load()

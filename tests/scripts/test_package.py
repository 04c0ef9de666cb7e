"""`pip install .`: what the build backend makes of a clean tree holds the C library, built here.

The hooks of pyproject.toml's backend are called as pip calls them, without a network and without pip.
"""

import importlib.metadata
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.scripts import support

TIER = 1
LIBRARY = "pyrocshmem/finegrained_alloc/libfinegrained_alloc.so"


def backend_version() -> int:
    """The first number of the version of setuptools; 0: not installed."""
    try:
        return int(importlib.metadata.version("setuptools").split(".")[0])
    except importlib.metadata.PackageNotFoundError:
        return 0


pytestmark = [
    pytest.mark.cpu,
    pytest.mark.skipif(backend_version() < 77, reason="setuptools 77, the build backend, is not installed"),
]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    project = tomllib.loads((support.ROOT / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["packages"]["find"]["include"] == ["pyrocshmem*"]
    packages = (
        "pyrocshmem",
        *(path.name for path in (support.ROOT / "pyrocshmem").iterdir() if path.is_symlink()),
    )
    return support.copy_tree(tmp_path, "pyproject.toml", "setup.py", "README.md", "LICENSE", *packages)


def call(hook: str, tree: Path, out: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    code = f"from setuptools import build_meta; build_meta.{hook}({str(out)!r})"
    return support.bash(tree, f'exec "{sys.executable}" -c "$1"', code, **environment)


def test_a_wheel_of_the_sdist_holds_a_library_that_loads(tree: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = call("build_sdist", tree, out)
    assert done.returncode == 0, done.stdout + done.stderr
    shutil.unpack_archive(next(out.glob("*.tar.gz")), tmp_path / "unpacked")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    assert not (unpacked / LIBRARY).exists()

    done = call("build_wheel", unpacked, out)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = out.glob("*.whl")
    assert "-py3-none-linux" in wheel.name, "a wheel for one kind of machine, and any Python"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    assert not (unpacked / LIBRARY).exists(), "the sources are left as they are"

    code = (
        "from pyrocshmem import finegrained_alloc as fga; fga.alloc(4096, 'host').free(); "
        "print(fga.library.LIBRARY_PATH)"
    )
    done = support.bash(tmp_path, f'exec "{sys.executable}" -c "$1"', code, PYTHONPATH=str(tmp_path / "site"))
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{tmp_path / 'site' / LIBRARY}\n"
    assert (tmp_path / "site/pyrocshmem/stream_k/run/usage.txt").exists()
    assert {path.name for path in (tmp_path / "site").iterdir() if not path.name.endswith(".dist-info")} == {
        "pyrocshmem"
    }
    # Type checkers read the annotations of packages that say so.
    assert (tmp_path / "site/pyrocshmem/py.typed").exists()


def test_an_editable_installation_has_the_library_beside_its_sources(tree: Path, tmp_path: Path) -> None:
    done = call("build_editable", tree, tmp_path / "out")
    assert done.returncode == 0, done.stdout + done.stderr
    built = (tree / LIBRARY).stat()
    # activate.sh has nothing left to build.
    assert support.bash(tree, "sh finegrained_alloc/build.sh", CC="false").returncode == 0
    assert (tree / LIBRARY).stat() == built


def test_without_a_compiler_the_message_says_so(tree: Path, tmp_path: Path) -> None:
    done = call("build_wheel", tree, tmp_path / "out", CC="no-such-compiler")
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert "could not build the C library finegrained_alloc" in last
    assert "it needs a C compiler" in last
    assert "CC names another than cc" in last
    assert not list((tmp_path / "out").glob("*.whl"))

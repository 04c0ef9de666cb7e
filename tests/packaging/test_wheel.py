"""What users install: a wheel that brings one name, used from a folder whose files have the names of ours.

However the project is reached (the source tree, an editable installation, a wheel, torchrun), each of its files is
one module, so that no op is registered twice.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from tests.scripts import support
from tests.scripts.test_package import backend_version, call

TIER = 3
pytestmark = [
    pytest.mark.cpu,
    pytest.mark.skipif(backend_version() < 77, reason="setuptools 77, the build backend, is not installed"),
    pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="pip is not installed"),
]

ROOT = support.ROOT
SITE_PACKAGES = Path(pytest.__file__).parents[1]
# Prints where the package is, which of our files are two modules, which of our folders were imported by a bare name,
# the operators and, as a control, the files of which a second module was made on purpose.
IDENTITY = """
import json, os, sys, torch
import pyrocshmem
from pyrocshmem import benchmarks, collectives, reference, stream_k
from pyrocshmem.benchmarks import shapes
from pyrocshmem.reference import ops
from pyrocshmem.stream_k import nn

def twice():
    parts = tuple(os.path.realpath(os.path.dirname(module.__file__)) for module in (pyrocshmem, stream_k))
    of_file = {}
    for module in set(sys.modules.values()):
        if (file := os.path.realpath(getattr(module, "__file__", None) or "")).startswith(parts):
            of_file.setdefault(file, []).append(module)
    return sorted(file for file, modules in of_file.items() if len(modules) > 1)

found = {
    "file": pyrocshmem.__file__,
    "twice": twice(),
    "tops": sorted({name.split(".")[0] for name in sys.modules} & set(os.environ["FOLDERS"].split())),
    "ops": [name for name in torch._C._dispatch_get_all_op_names() if name.startswith(("stream_k::", "collectives::"))],
}
sys.path.append(os.path.dirname(os.path.realpath(stream_k.__file__)))
import choice.config  # a second module of each of two files
found["planted"] = twice()
print("found", json.dumps(found))
"""
FOLDERS = ("finegrained_alloc", "collectives", "stream_k", "reference", "benchmarks")


def sources(folder: Path) -> Path:
    """A copy of what a distribution is made of."""
    return support.copy_tree(
        folder, "pyproject.toml", "setup.py", "README.md", "LICENSE", "pyrocshmem", *FOLDERS
    )


def build(hook: str, folder: Path) -> Path:
    done = call(hook, sources(folder), folder / "out")
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (folder / "out").glob("*.whl")
    return wheel


def install(wheel: Path, site: Path) -> None:
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        str(site),
    ]
    subprocess.run([*pip, str(wheel)], check=True, timeout=support.TIMEOUT_S, capture_output=True)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("build_wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clean folder with the wheel in it."""
    place = tmp_path_factory.mktemp("site")
    install(wheel, place)
    return place


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A user's folder, where our names mean something else."""
    folder = tmp_path / "of the user"
    (folder / "collectives").mkdir(parents=True)
    for name in ("reference.py", "collectives/__init__.py"):
        (folder / name).write_text(f"raise SystemExit('this is the {name} of the user')\n")
    return folder


def run(folder: Path, path: Path | None, *command: str, python: str = sys.executable) -> str:
    """What `python COMMAND` in `folder` prints on stdout, `path` being the PYTHONPATH."""
    inherited = {name: value for name, value in os.environ.items() if name not in support.DECIDING}
    environment = inherited | {
        "PYROCSHMEM_BACKEND": "cpu",
        "FOLDERS": " ".join(FOLDERS),
        "OMP_NUM_THREADS": "1",
        **({"PYTHONPATH": str(path)} if path else {}),
    }
    done = subprocess.run(
        [python, *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check_identity(printed: str, place: Path) -> None:
    (line,) = (line for line in printed.splitlines() if line.startswith("found "))
    found = json.loads(line.removeprefix("found "))
    assert found["file"] == str(place / "pyrocshmem/__init__.py")
    assert found["twice"] == []
    assert found["tops"] == []
    planted = [place / "pyrocshmem/stream_k/choice" / name for name in ("__init__.py", "config.py")]
    assert found["planted"] == [os.path.realpath(path) for path in planted]
    assert {"stream_k::gemm_all_reduce", "collectives::rms_norm"} <= set(found["ops"])


def test_a_wheel_brings_one_name(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name.split("/")[0] for name in archive.namelist()}
    (about,) = (name for name in names if name.endswith(".dist-info"))
    assert names == {"pyrocshmem", about}


def test_the_example_of_the_readme_runs_from_a_wheel(site: Path, elsewhere: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    example = next(block for block in blocks if "__main__" in block)
    (elsewhere / "example.py").write_text(example)
    assert run(elsewhere, site, "example.py").strip(), "the example prints what it computed"


def test_the_command_runs_from_a_wheel(site: Path, elsewhere: Path) -> None:
    command = (
        "-m",
        "pyrocshmem",
        "run",
        "-n",
        "2",
        "-c",
        "all_reduce",
        "--shape",
        "64,64,64",
        "--iters",
        "1",
    )
    assert "right" in run(elsewhere, site, *command)


def test_a_wheel_has_one_module_a_file(site: Path, elsewhere: Path) -> None:
    (elsewhere / "identity.py").write_text(IDENTITY)
    # From a program beside files of the same names: they are not asked.
    check_identity(run(elsewhere, site, "identity.py"), site)


def test_an_editable_installation_has_one_module_a_file(tmp_path: Path, elsewhere: Path) -> None:
    wheel = build("build_editable", tmp_path)
    # An environment of its own, since this one may have an editable installation, which comes first.
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    (place,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    install(wheel, place)
    (place / "others.pth").write_text(f"{SITE_PACKAGES}\n")
    (elsewhere / "identity.py").write_text(IDENTITY)
    python = str(tmp_path / "venv/bin/python")
    check_identity(run(elsewhere, None, "identity.py", python=python), tmp_path / "a project")


def test_the_source_tree_has_one_module_a_file(elsewhere: Path) -> None:
    """With the repository's root on the path, a folder of it can be found by its own name, and says which to use."""
    refusals = "".join(
        f"try: import {name}\nexcept ImportError as error: print(error)\n"
        for name in ("stream_k", "collectives", "reference", "benchmarks")
    )
    (elsewhere / "identity.py").write_text(f"import sys\nsys.path[0] = {str(ROOT)!r}\n{refusals}{IDENTITY}")
    printed = run(elsewhere, ROOT, "identity.py")
    for name in ("stream_k", "collectives", "reference", "benchmarks"):
        assert f"this is pyrocshmem.{name}: import it by that name" in printed
    check_identity(printed, ROOT)


def test_a_rank_of_torchrun_has_one_module_a_file(elsewhere: Path) -> None:
    (elsewhere / "identity.py").write_text(IDENTITY)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1")
    check_identity(run(elsewhere, ROOT, *torchrun, "identity.py"), ROOT)

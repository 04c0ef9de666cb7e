"""apptainer/build.sh and run.sh against a stand-in for apptainer that records how it was called."""

import json
import sys
import tomllib
from pathlib import Path

import pytest

from tests.scripts import support

TIER = 0
pytestmark = pytest.mark.cpu

STANDIN = """#!{python}
import json, os, pathlib, sys
pathlib.Path({log!r}).write_text(json.dumps({{"args": sys.argv[1:], "cwd": os.getcwd()}}))
for name in sys.argv[1:]:
    if name.endswith(".new.sif"):
        pathlib.Path(name).write_text("image")
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return support.copy_tree(tmp_path, "apptainer")


@pytest.fixture
def standin(tmp_path: Path) -> Path:
    """The stand-in; the file beside it named `call` holds its last call."""
    path = tmp_path / "apptainer"
    path.write_text(STANDIN.format(python=sys.executable, log=str(tmp_path / "call")))
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("script", ["build.sh", "run.sh"])
def test_without_apptainer(tree: Path, tmp_path: Path, script: str) -> None:
    done = support.bash(tree, f"apptainer/{script}", PATH=support.path_without_python(tmp_path))
    assert done.returncode == 1
    assert "neither apptainer nor singularity" in done.stderr
    assert support.bash(tree, f"apptainer/{script} --help").stdout.startswith(f"Usage: ./apptainer/{script}")


def test_build(tree: Path, tmp_path: Path, standin: Path) -> None:
    path = support.path_without_python(tmp_path, apptainer=str(standin))
    done = support.bash(tree, "cd apptainer && ./build.sh --fakeroot", PATH=path)
    assert done.returncode == 0, done.stderr
    call = json.loads((tmp_path / "call").read_text())
    assert call["cwd"] == str(tree)  # %files of the definition are relative to it
    assert call["args"][:3] == ["build", "--force", "--fakeroot"]
    assert [path.name for path in (tree / "apptainer").glob("*.sif")] == ["pyrocshmem.sif"]


def test_run(tree: Path, tmp_path: Path, standin: Path) -> None:
    path = support.path_without_python(tmp_path, apptainer=str(standin))
    done = support.bash(tree, "apptainer/run.sh echo", PATH=path)
    assert done.returncode == 1
    assert "build it with apptainer/build.sh" in done.stderr

    (tree / "apptainer/pyrocshmem.sif").write_text("image")
    done = support.bash(tree, "apptainer/run.sh echo 'two words' '$(touch pwned)'", PATH=path)
    assert done.returncode == 0, done.stderr
    args = json.loads((tmp_path / "call").read_text())["args"]
    assert args[0] == "exec"
    assert args[-3:] == ["echo", "two words", "$(touch pwned)"]
    assert args[args.index("--bind") + 1] == args[args.index("--pwd") + 1] == str(tree)
    assert not list(tree.rglob("pwned"))


def test_definition_copies_every_package() -> None:
    """A package that is added to the project must be added to the image, and what is copied must exist."""
    text = (support.ROOT / "apptainer/pyrocshmem.def").read_text()
    lines = text.split("%files\n")[1].split("%post")[0].strip().splitlines()
    places = dict(line.split() for line in lines)  # one source and one destination a line
    assert all(place == f"/opt/pyrocshmem/{name}" for name, place in places.items())
    project = tomllib.loads((support.ROOT / "pyproject.toml").read_text())
    packages = {name.rstrip("*") for name in project["tool"]["setuptools"]["packages"]["find"]["include"]}
    assert packages <= set(places)
    # What tests read and run besides: they are in the image, too.
    read = {"setup.py", "examples", "docs", "run.sh", ".ci/run", "constraints.txt"}
    own = {f"apptainer/{name}" for name in ("build.sh", "run.sh", "pyrocshmem.def")}
    assert read | own <= set(places)
    assert "apptainer" not in places, "that folder holds the last image"
    assert [name for name in places if not (support.ROOT / name).exists()] == []


def test_base_image_is_pinned_to_a_supported_torch() -> None:
    text = (support.ROOT / "apptainer/pyrocshmem.def").read_text()
    base = next(line for line in text.splitlines() if line.startswith("From:"))
    assert ":latest" not in base
    version = tuple(map(int, base.rsplit("_", 1)[1].split(".")[:2]))
    assert (2, 11) <= version < (2, 14)

"""tests/versions.sh: which environment it uses, what it installs into it, and whose words and status it ends with.

No test reaches a network: pip is given no index, and installed packages are stood in for.
"""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.scripts import support

TIER = 1
pytestmark = pytest.mark.cpu

VERSION = "2.14.1"
RUN = """#!/bin/sh
python -c 'import sys; print(sys.prefix)'
echo "$VIRTUAL_ENV" "$@"
exit 5
"""
# Instead of an installation: its arguments, a line. Without STANDIN_CPU there are no CPU builds.
PIP = """
import os, sys
print("pip", *(text for text in sys.argv[1:] if not text.startswith("-")), file=sys.stderr)
sys.exit("+" in "".join(sys.argv) and "STANDIN_CPU" not in os.environ)
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    tree = support.copy_tree(tmp_path, "tests/versions.sh", "pyproject.toml", "constraints.txt")
    (tree / "tests/run.sh").write_text(RUN)
    (tree / "tests/run.sh").chmod(0o755)
    return tree


def requirements() -> list[str]:
    """What an environment has to have, as pyproject.toml has it."""
    project = tomllib.loads((support.ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    return [*project["dependencies"], *extras["test"], *extras["plot"]]


def environment(folder: Path, torch: str, lacks: str = "") -> Path:
    """One that seems to have `torch` and all requirements but `lacks`, and a pip that only says what it is asked."""
    venv = folder / f".venv-torch{VERSION}"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    (site,) = venv.glob("lib/python*/site-packages")
    for requirement in requirements():
        name = requirement.partition(">=")[0]
        if name != lacks:
            version = torch if name == "torch" else "1.0"
            about = site / f"{name.replace('-', '_')}-{version}.dist-info"
            about.mkdir()
            (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    support.fake_module(site, "torch", __init__=f"__version__ = '{torch}'")
    support.fake_module(site, "triton", __init__="__version__ = '3.8.0'")
    support.fake_module(site, "pip", __main__=PIP)
    return venv


def run(tree: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return support.bash(tree, 'exec tests/versions.sh "$@"', *arguments, **variables)


def test_help(tree: Path) -> None:
    """Without an environment."""
    done = run(tree, "-h", PATH="/usr/bin:/bin")
    assert done.returncode == 0
    assert done.stdout.startswith("Runs the tests with one version of torch")
    assert "VERSIONS_ENV_DIR=/scratch tests/versions.sh" in done.stdout
    assert "set -uo" not in done.stdout


@pytest.mark.parametrize("torch", [VERSION, f"{VERSION}+cpu", f"{VERSION}+cu130"])
def test_an_environment_that_lacks_nothing_is_used_as_it_is(tree: Path, tmp_path: Path, torch: str) -> None:
    folder = tmp_path / "environments"
    venv = environment(folder, torch)
    done = run(tree, VERSION, "--max-tier", "1", VERSIONS_ENV_DIR=str(folder))
    said, prefix, arguments = done.stdout.splitlines()
    assert said == f"torch {torch}, Triton 3.8.0"
    assert (prefix, arguments) == (str(venv), f"{venv} --max-tier 1"), "in the environment"
    assert done.returncode == 5, "that of tests/run.sh"
    assert done.stderr == "", "pip was not asked"


@pytest.mark.parametrize(
    ("torch", "lacks", "cpu", "asked"),
    [
        ("2.13.0+cpu", "", False, [f"torch=={VERSION}"]),
        ("2.13.0+cpu", "", True, [f"torch=={VERSION}", f"torch=={VERSION}+cpu"]),
        (f"{VERSION}+cu130", "hypothesis", True, [each for each in requirements() if "hypothesis" in each]),
    ],
)
def test_only_what_is_missing_is_installed(
    tree: Path, torch: str, lacks: str, cpu: bool, asked: list[str]
) -> None:
    """Into the environment in the project's folder; of torch the CPU build where there is one."""
    venv = environment(tree, torch, lacks)
    done = run(tree, VERSION, **({"STANDIN_CPU": "1"} if cpu else {}))
    installing, pip = done.stderr.splitlines()
    assert installing == f"tests/versions.sh: installing {asked[0]} into {venv}"
    assert pip.split() == ["pip", "install", "constraints.txt", *asked]
    assert done.returncode == 5


def test_an_environment_is_made_and_left_for_the_next_try(tree: Path) -> None:
    for _ in range(2):
        done = run(tree, VERSION, PIP_NO_INDEX="1", PIP_FIND_LINKS="")
        assert done.returncode == 2
        assert "tests/versions.sh: pip failed (above)" in done.stderr
        assert done.stdout == "", "no test was run"
    assert (tree / f".venv-torch{VERSION}/bin/python").exists()


@pytest.mark.parametrize("version", ["", "2.14", "latest", "--max-tier"])
def test_a_version_is_needed(tree: Path, version: str) -> None:
    done = run(tree, version)
    assert done.returncode == 2
    assert done.stderr == (
        f"tests/versions.sh: name a version of torch with its three numbers, as 2.14.1; got '{version}'\n"
    )
    assert not list(tree.glob(".venv*"))


def test_a_folder_that_is_not_there(tree: Path, tmp_path: Path) -> None:
    done = run(tree, VERSION, VERSIONS_ENV_DIR=str(tmp_path / "none"))
    assert done.returncode == 2
    assert f"VERSIONS_ENV_DIR is no folder: '{tmp_path / 'none'}'" in done.stderr

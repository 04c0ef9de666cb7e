"""./run.sh: help and mistakes are answered at once, with nothing set up."""

import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tests.scripts import support

TIER = 0
pytestmark = pytest.mark.cpu


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return support.copy_tree(tmp_path, "run.sh", "activate.sh", "stream_k/run/usage.txt")


@pytest.mark.parametrize("arguments", [("-h",), ("--help",), ("-n", "4", "--help"), ("-n4", "-h")])
@pytest.mark.alone
def test_help_needs_no_set_up(tree: Path, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    start = time.monotonic()
    done = support.bash(tree, './run.sh "$@"', *arguments, PATH=support.path_without_python(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert time.monotonic() - start < 5
    assert done.stdout == (support.ROOT / "stream_k/run/usage.txt").read_text()
    assert done.stdout.startswith("Usage: ./run.sh [OPTIONS]\n")
    assert "\nExample:\n" in done.stdout
    assert not (tree / ".venv").exists()


@pytest.mark.parametrize(
    "option", ["--no-such", "-z", "--num", "--.*", "--no; touch pwned", "--$(touch pwned)"]
)
def test_unknown_options_exit_2_without_set_up(tree: Path, tmp_path: Path, option: str) -> None:
    done = support.bash(tree, './run.sh -n 4 "$@"', option, PATH=support.path_without_python(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert f"no such option: '{option}'" in done.stderr
    assert not (tree / ".venv").exists()
    assert not list(tree.glob("**/pwned*"))


def test_works_from_another_folder_and_through_a_link(tree: Path, tmp_path: Path) -> None:
    done = support.bash(tmp_path, '"a project/run.sh" -h', CDPATH="/")
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck() -> None:
    parts = {p: p.relative_to(support.ROOT).parts for p in support.ROOT.rglob("*.sh")}
    scripts = [path for path, names in parts.items() if not any(name.startswith(".") for name in names)]
    scripts.append(support.ROOT / ".ci/run")
    done = subprocess.run(
        ["shellcheck", "-x", *map(str, scripts)],
        cwd=support.ROOT,
        capture_output=True,
        text=True,
        timeout=support.TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert len(scripts) >= 6


def test_every_script_can_be_executed() -> None:
    for name in (
        "run.sh",
        "tests/run.sh",
        ".ci/run",
        "reference/run.sh",
        "apptainer/build.sh",
        "apptainer/run.sh",
    ):
        assert (support.ROOT / name).stat().st_mode & 0o111, name


def test_help_names_every_option_of_the_program() -> None:
    """run.sh refuses what its help doesn't name, so an option that is added to one must be added to the other."""
    source = (support.ROOT / "pyrocshmem/run_command.py").read_text()
    options = set(
        re.findall(r'"(--?[a-z][a-z-]*)"', " ".join(re.findall(r"typer\.Option\((.*?)\)\]", source)))
    )
    assert "--num-gpus" in options
    usage = (support.ROOT / "stream_k/run/usage.txt").read_text()
    assert set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", usage)) == options

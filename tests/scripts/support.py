"""A bare copy of the project's scripts in a temporary folder, and a way to run them with a chosen environment.

tree = support.copy_tree(tmp_path, "activate.sh", "pyproject.toml")
done = support.bash(tree, "source ./activate.sh; echo $PYTHONPATH", PYROCSHMEM_NO_VENV="1")
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 200  # for what hangs: beside busy processes a script takes many times as long as alone

ACTIVATION = ("activate.sh", "pyproject.toml", "constraints.txt", "finegrained_alloc")

# What decides which environment is used: tests set these themselves, whatever the shell that started pytest had.
DECIDING = (
    "PYROCSHMEM_NO_VENV",
    "PYROCSHMEM_BACKEND",
    "TRITON_INTERPRET",
    "PYTHONPATH",
    "VERSIONS_ENV_DIR",
    "VIRTUAL_ENV",
    "CONDA_PREFIX",
    "APPTAINER_CONTAINER",
    "SINGULARITY_CONTAINER",
    "LOADEDMODULES",
    "PYTEST_ADDOPTS",
)

NEEDED_COMMANDS = [
    "bash",
    "sh",
    "cc",
    "as",
    "ld",
    "cat",
    "chmod",
    "cksum",
    "cp",
    "dirname",
    "env",
    "find",
    "grep",
    "ls",
]
NEEDED_COMMANDS += ["mktemp", "mv", "rm", "sed", "sleep", "tr", "uname"]


def copy_tree(folder: Path, *names: str) -> Path:
    """A new folder below `folder` with copies of the project's files and folders `names`."""
    tree = folder / "a project"  # with a space: scripts must quote
    tree.mkdir()
    for name in names:
        source, place = ROOT / name, tree / name
        place.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(
                source, place, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "*.so")
            )
        else:
            shutil.copy2(source, place)
    return tree


def bash(
    folder: Path, script: str, *arguments: str, shell: str = "bash", **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run `script` in `folder`. Without PATH in `environment`, `python` is the one that runs these tests."""
    inherited = {name: value for name, value in os.environ.items() if name not in DECIDING}
    inherited["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        [shell, "-c", script, shell, *arguments],
        cwd=folder,
        env=inherited | environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def path_without_python(folder: Path, **extra: str) -> str:
    """A PATH with what the scripts need but no Python; `extra` adds commands, by name, that lead to a file."""
    tools = folder / "tools"
    tools.mkdir()
    for name in NEEDED_COMMANDS:
        if target := shutil.which(name):
            (tools / name).symlink_to(target)
    for name, target in extra.items():
        (tools / name).symlink_to(target)
    return str(tools)


def fake_module(folder: Path, name: str, **files: str) -> None:
    """A package `name` below `folder`, its modules given by name with their text; `__init__` is empty if not given."""
    package = folder / name
    package.mkdir(parents=True)
    for module, text in ({"__init__": ""} | files).items():
        (package / f"{module}.py").write_text(text)


def fake_torch(folder: Path, version: str = "2.13.0", cuda: str | None = "13.0") -> str:
    """A folder for PYTHONPATH that looks like an installed torch, Triton and every other requirement."""
    torch = f"from typing import Optional\n__version__ = '{version}'\ncuda: Optional[str] = {cuda!r}\n"
    fake_module(folder, "torch", version=torch + "hip: Optional[str] = None\n")
    fake_module(folder, "triton", __init__="__version__ = '3.9.0'\n")
    for name in ("numpy", "typer", "rich", "pytest", "pytest_timeout", "xdist", "hypothesis", "matplotlib"):
        fake_module(folder, name)
    return str(folder)

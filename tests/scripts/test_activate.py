"""activate.sh: which environment it chooses, that it installs nothing where it must not, and that it leaves no trace.

No test reaches a network: pip is given no index, and installed packages are stood in for by empty ones on PYTHONPATH.
"""

import re
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from tests.scripts import support

TIER = 1
pytestmark = pytest.mark.cpu

BASE_PYTHON = next(
    (
        str(path)
        for name in (f"python3.{sys.version_info.minor}", "python3")
        if (path := Path(sys.base_prefix) / "bin" / name).exists()
    ),
    sys.executable,
)


LIBRARY = "finegrained_alloc/libfinegrained_alloc.so"
# `python3 -m venv` takes seconds, most of them for pip: it copies one that was made before. FOLDER comes last.
COPIES = """#!/bin/sh
[ "$1 $2" = "-m venv" ] || exec "{python}" "$@"
case $* in *--system-site-packages*) system=true ;; *) system=false ;; esac
for folder; do :; done
cp -a "{made}" "$folder"
sed -i "s#{made}#$folder#" "$folder"/bin/activate
sed -i "s/^\\(include-system-site-packages = \\).*/\\1$system/" "$folder/pyvenv.cfg"
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """With the C library, so that activation need not build it."""
    tree = support.copy_tree(tmp_path, *support.ACTIVATION)
    shutil.copy2(support.ROOT / LIBRARY, tree / LIBRARY)
    return tree


@pytest.fixture(scope="module")
def copying_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python that makes virtual environments at once."""
    folder = tmp_path_factory.mktemp("made")
    # With a space, as the copies' folders have one: Debian's Python quotes a path in `activate` only where it must.
    venv = folder / "a venv"
    subprocess.run([BASE_PYTHON, "-m", "venv", str(venv)], check=True, timeout=support.TIMEOUT_S)
    python = folder / "python"
    python.write_text(COPIES.format(python=BASE_PYTHON, made=venv))
    python.chmod(0o755)
    return str(python)


def made(tree: Path) -> set[str]:
    """What activation added to the copy."""
    return {path.name for path in tree.iterdir()} - set(support.ACTIVATION)


def test_no_venv_installs_nothing(tree: Path, tmp_path: Path) -> None:
    """But it builds the C library."""
    (tree / LIBRARY).unlink()
    calls = tmp_path / "calls"
    spy = tmp_path / "spy"
    spy.mkdir()
    (spy / "python").write_text(f'#!/bin/sh\necho "$@" >>"{calls}"\nexec "{sys.executable}" "$@"\n')
    (spy / "python").chmod(0o755)
    path = f"{spy}:{support.path_without_python(tmp_path, python3=str(spy / 'python'))}"
    done = support.bash(
        tree,
        'source ./activate.sh && echo "[$PYTHONPATH]"',
        PYROCSHMEM_NO_VENV="1",
        PATH=path,
        PYTHONPATH="/other",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"[{tree}:/other]\n"
    assert made(tree) == set()
    assert (tree / LIBRARY).exists()
    called = calls.read_text()
    assert called
    assert not {"pip", "venv"} & set(called.split())


def test_no_venv_names_what_is_missing(tree: Path, tmp_path: Path) -> None:
    path = support.path_without_python(tmp_path, python=BASE_PYTHON)
    site = Path(support.fake_torch(tmp_path / "site"))
    shutil.rmtree(site / "torch")
    done = support.bash(tree, "source ./activate.sh", PYROCSHMEM_NO_VENV="1", PATH=path, PYTHONPATH=str(site))
    assert done.returncode == 0
    assert "lacks: torch or triton" in done.stderr
    assert "Nothing is installed" in done.stderr


def test_active_environment_with_torch_is_used(tree: Path, tmp_path: Path) -> None:
    path = support.path_without_python(tmp_path, python=BASE_PYTHON)
    site = support.fake_torch(tmp_path / "site", cuda=None)
    done = support.bash(
        tree,
        'source ./activate.sh && echo "[${VIRTUAL_ENV:-}]"',
        PATH=path,
        PYTHONPATH=site,
        CONDA_PREFIX="/some/env",
        PIP_NO_INDEX="1",
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")
    assert made(tree) == set()


@pytest.mark.alone
def test_torch_for_gpus_of_this_machine_is_used(tree: Path, tmp_path: Path, copying_python: str) -> None:
    """.venv on top of it; the second activation is quick; a change of the requirements is noticed."""
    # No command `python`: else that of a container would be used as it is.
    path = support.path_without_python(tmp_path, python3=copying_python)
    environment = {"PATH": path, "PYTHONPATH": support.fake_torch(tmp_path / "site"), "PIP_NO_INDEX": "1"}
    script = 'source ./activate.sh && echo "[$VIRTUAL_ENV]"'
    done = support.bash(tree, script, **environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"[{tree}/.venv]\n"
    assert "using this machine's torch and Triton; installing nothing" in done.stderr
    assert "include-system-site-packages = true" in (tree / ".venv/pyvenv.cfg").read_text()

    def seconds_of_another() -> float:
        start = time.monotonic()
        done = support.bash(tree, script, **environment)
        assert (done.returncode, done.stderr) == (0, "")
        return time.monotonic() - start

    # Once of several times where others have the processor.
    assert any(seconds_of_another() < 2 for _ in range(5)), (
        "an activation that finds everything must be quick"
    )

    with (tree / "constraints.txt").open("a") as file:
        file.write("# changed\n")
    assert "installing" in support.bash(tree, script, **environment).stderr
    assert support.bash(tree, script, **environment).stderr == ""

    moved = tree.rename(tree.parent / "moved")  # a virtual environment can't be moved: it is made again
    done = support.bash(moved, script, **environment)
    assert done.stdout == f"[{moved}/.venv]\n"
    assert "making .venv" in done.stderr


def test_two_activations_at_once_make_one_environment(
    tree: Path, tmp_path: Path, copying_python: str
) -> None:
    path = support.path_without_python(tmp_path, python3=copying_python)
    environment = {"PATH": path, "PYTHONPATH": support.fake_torch(tmp_path / "site"), "PIP_NO_INDEX": "1"}
    script = "bash activate.sh >one & bash activate.sh >two; code=$?; wait $! && exit $code"
    done = support.bash(tree, script, **environment)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("making .venv") == 1
    assert (tree / "one").read_text() == (tree / "two").read_text() == f"{tree}/.venv\n"


def test_only_what_is_missing_is_installed(tree: Path, tmp_path: Path, copying_python: str) -> None:
    """By the packages' names, all that the extras `test` and `plot` have."""
    site = Path(support.fake_torch(tmp_path / "site"))
    for name in ("pytest", "pytest_timeout", "xdist", "hypothesis", "matplotlib"):
        shutil.rmtree(site / name)
    bare = tmp_path / "bare"  # without what this machine's Python has
    bare.write_text(f'#!/bin/sh\n[ "$1" = -m ] || set -- -S "$@"\nexec "{copying_python}" "$@"\n')
    bare.chmod(0o755)
    path = support.path_without_python(tmp_path, python3=str(bare))
    done = support.bash(tree, ". ./activate.sh", PATH=path, PYTHONPATH=str(site), PIP_NO_INDEX="1")
    (said,) = re.findall("torch and Triton; installing (.*)", done.stderr)
    extras = tomllib.loads((tree / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    names = {re.split("[>=]", text)[0] for text in (*extras["test"], *extras["plot"])}
    assert {name.replace("_", "-") for name in said.split()} == names


@pytest.mark.parametrize("version", ["2.5.1", "2.16.0"])
def test_failed_installation_leaves_no_stamp(
    tree: Path, tmp_path: Path, version: str, copying_python: str
) -> None:
    """Also: a torch outside the supported window is not used, so that pip is asked for another."""
    path = support.path_without_python(tmp_path, python3=copying_python)
    site = support.fake_torch(tmp_path / "site", version=version)
    done = support.bash(
        tree,
        "source ./activate.sh; echo alive $?",
        PATH=path,
        PYTHONPATH=site,
        PIP_NO_INDEX="1",
        PIP_FIND_LINKS="",
    )
    assert done.stdout == "alive 1\n", done.stderr
    assert "pip failed" in done.stderr
    assert not (tree / ".venv/stamp").exists()


def test_an_environment_of_the_user_s_is_not_touched(tree: Path) -> None:
    kept = tree / ".venv" / "kept"
    kept.parent.mkdir()
    kept.write_text("")
    done = support.bash(tree, "source ./activate.sh", VIRTUAL_ENV=str(kept.parent))
    assert done.returncode == 1
    assert "'.venv' is not of this script's making" in done.stderr
    assert kept.exists()
    assert not (tree / ".venv.lock").exists()


def test_python_too_old(tree: Path, tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.9.1 && exit 0\nexit 1\n')
    old.chmod(0o755)
    done = support.bash(
        tree,
        "source ./activate.sh; echo alive $?",
        PATH=support.path_without_python(tmp_path, python3=str(old)),
    )
    assert done.stdout == "alive 1\n"
    assert "needs Python 3.11 or newer; found Python 3.9.1" in done.stderr


def test_another_shell_is_told_so(tree: Path) -> None:
    if shutil.which("dash") is None:
        pytest.skip("dash is not installed")
    done = support.bash(tree, ". ./activate.sh || echo alive $?", shell="dash", PYROCSHMEM_NO_VENV="1")
    assert (done.stdout, done.stderr.count("\n")) == ("alive 1\n", 1), done.stderr
    assert "neither bash nor zsh" in done.stderr


STATE = {
    "bash": 'set +o; shopt -p; trap; compgen -A function; (set -o posix; set) | grep -o "^_*pyrocshmem[^=]*"; pwd',
    "zsh": "setopt; trap; print -l ${(k)functions}; typeset +m '*pyrocshmem*'; pwd",
}


@pytest.mark.parametrize("shell", ["bash", "zsh"])
@pytest.mark.parametrize("options", ["true", "set -eu", "set -o noglob"])
@pytest.mark.parametrize("works", [True, False], ids=["works", "fails"])
def test_leaves_no_trace_in_the_shell(tree: Path, shell: str, options: str, works: bool) -> None:
    """Options, traps, functions, variables and the folder are as before, also when activation fails."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    if not works:
        (tree / "finegrained_alloc/build.sh").write_text("exit 1\n")
    script = f"""
        {options}
        state() {{ {STATE[shell]}; }}
        ( state ) >before || true
        if source ./activate.sh; then echo yes; else echo no; fi
        ( state ) >after || true
    """
    done = support.bash(tree, script, shell=shell, PYROCSHMEM_NO_VENV="1")
    assert done.stdout == ("yes\n" if works else "no\n"), done.stderr
    before, after = (tree / "before").read_text(), (tree / "after").read_text()
    assert before.strip()
    assert before == after


def test_set_e_would_be_noticed(tree: Path) -> None:
    """The control of the test above: a planted `set -e` in the sourced part shows."""
    text = (tree / "activate.sh").read_text()
    (tree / "activate.sh").write_text(text.replace("# shellcheck shell=bash\n", "set -e\n", 1))
    with pytest.raises(AssertionError):
        test_leaves_no_trace_in_the_shell(tree, "bash", "true", True)


def test_executed_by_bash_says_which_environment(tree: Path) -> None:
    done = subprocess.run(
        ["bash", "activate.sh"],
        cwd=tree,
        env={"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "PYROCSHMEM_NO_VENV": "1"},
        capture_output=True,
        text=True,
        timeout=support.TIMEOUT_S,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr

"""benchmarks/records.sh: its commands are ones that `python -m pyrocshmem bench` takes, and one that fails stops no
other."""

import shlex
import subprocess
from pathlib import Path

import pytest

from pyrocshmem.benchmarks import run
from pyrocshmem.benchmarks.__main__ import _SEVERAL
from pyrocshmem.benchmarks.shapes import OPS
from tests.scripts import support

TIER = 0
pytestmark = pytest.mark.cpu

SETS = (
    "models",
    "models-fp32",
    "llama3",
    "sweep",
    "decode",
    "batches",
    "collectives",
    "layers",
    "corpus",
    "corpus-64",
)


def records(tmp_path: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run it with a python that writes down what it is asked for, and fails at decoding."""
    tree = support.copy_tree(tmp_path, "benchmarks/records.sh")
    (tree / "activate.sh").write_text("")
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text('#!/bin/sh\necho "$@" >>"$ASKED"\ncase "$*" in *decode*) exit 1 ;; esac\n')
    python.chmod(0o755)
    environment |= {"ASKED": str(tmp_path / "asked"), "PATH": f"{python.parent}:/usr/bin:/bin"}
    return support.bash(tmp_path, '"a project/benchmarks/records.sh" "$@"', *arguments, **environment)


def test_commands(tmp_path: Path) -> None:
    done = records(tmp_path, "there", COMMIT="0123456789abcdef", ITERS="3")
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == "something was wrong in: decode"
    asked = [shlex.split(line) for line in (tmp_path / "asked").read_text().splitlines()]
    measured = set()
    for name, (_, module, command, op, *options) in zip(SETS, asked, strict=True):
        given = dict(zip(options[::2], options[1::2], strict=True))
        assert (module, command) == ("pyrocshmem", "bench")
        commit = given["--commit"]
        assert (given["--iters"], commit) == ("3", "0123456789abcdef")
        assert given["--json"] == f"there/{name}.jsonl"
        assert "--providers" not in given
        ops = list(_SEVERAL.get(op, (op,)))
        ranks = int(given.get("-n", "2"))
        cases = run.plan(ops, given.get("--shapes"), given.get("--dtype"), ranks, None, commit)
        assert cases
        assert name[:6] != "models" or {case.shapes for case in cases} == {"models-01234567"}
        measured |= {case.op for case in cases}
    assert set(OPS) <= measured


@pytest.mark.parametrize("arguments", [(), ("there", "lama3"), ("-x",)])
def test_mistakes_are_told_at_once(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    done = records(tmp_path, *arguments)
    assert done.returncode == 2
    assert "Usage: benchmarks/records.sh FOLDER [SET...]" in done.stderr
    assert not (tmp_path / "asked").exists()

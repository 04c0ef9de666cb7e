"""benchmarks/records.sh: its commands are ones that `python -m pyrocshmem bench` takes, and one that fails stops no
other."""

import re
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
    "narrow",
    "corpus",
    "corpus-64",
)


def records(tmp_path: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run it with a python that writes down what it is asked for, and fails at decoding and in tensorwise recipes; the
    digest of its sources is what DIGEST says."""
    tree = tmp_path / "a project"
    if not tree.exists():
        support.copy_tree(tmp_path, "benchmarks/records.sh")
        (tree / "activate.sh").write_text("")
        python = tmp_path / "bin" / "python"
        python.parent.mkdir()
        python.write_text(
            '#!/bin/sh\n[ "$1" != -c ] || { echo "$DIGEST"; exit; }\n'
            'echo "$@" >>"$ASKED"\necho "measured"\necho "said" >&2\n'
            'case "$*" in *decode*|*tensorwise*) exit 1 ;; esac\n'
        )
        python.chmod(0o755)
    environment = {"DIGEST": "0123"} | environment
    environment |= {"ASKED": str(tmp_path / "asked"), "PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"}
    return support.bash(tmp_path, '"a project/benchmarks/records.sh" "$@"', *arguments, **environment)


def test_commands(tmp_path: Path) -> None:
    done = records(tmp_path, "there", *SETS, COMMIT="0123456789abcdef", ITERS="3")
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == "something was wrong in, or ended: decode"
    asked = [shlex.split(line) for line in (tmp_path / "asked").read_text().splitlines()]
    measured = set()
    for name, (_, module, command, op, *options, last) in zip(SETS, asked, strict=True):
        given = dict(zip(options[::2], options[1::2], strict=True))
        assert (module, command, last) == ("pyrocshmem", "bench", "--resume")
        commit = given["--commit"]
        assert (given["--iters"], commit) == ("3", "0123456789abcdef")
        assert given["--json"] == f"{tmp_path}/there/{name}.jsonl"
        assert "--providers" not in given
        ops = list(_SEVERAL.get(op, (op,)))
        ranks = int(given.get("-n", "2"))
        cases = run.plan(ops, given.get("--shapes"), given.get("--dtype"), ranks, None, commit)
        assert cases
        assert name[:6] != "models" or {case.shapes for case in cases} == {"models-01234567"}
        measured |= {case.op for case in cases}
    assert set(OPS) <= measured
    records(tmp_path, "there", "models", PROVIDERS="ours,blas")
    assert "--providers ours,blas --json" in (tmp_path / "asked").read_text().splitlines()[-1]


def test_what_is_printed_is_measured_once(tmp_path: Path) -> None:
    """But where it failed, and of other sources."""
    sets = ("float8-gemm-rowwise", "float8-gemm-tensorwise")

    def asked() -> list[str]:
        path = tmp_path / "asked"
        lines = path.read_text().splitlines() if path.exists() else []
        path.write_text("")
        return [line.rpartition("--recipe ")[2] for line in lines]

    for digest, expected in (
        ("0123", ["rowwise --commit 89ab", "tensorwise --commit 89ab"]),
        ("0123", ["tensorwise --commit 89ab"]),
        ("4567", ["rowwise --commit 89ab", "tensorwise --commit 89ab"]),
    ):
        done = records(tmp_path, "there", *sets, COMMIT="89ab", DIGEST=digest)
        assert done.returncode == 1
        assert asked() == expected
    lines = (tmp_path / "there" / "float8-gemm-rowwise.txt").read_text().splitlines()
    assert lines[1:] == ["measured", "complete, of sources 4567"]


def test_all_sets_have_a_command(tmp_path: Path) -> None:
    usage = records(tmp_path, "-h").stdout
    named = usage.partition("sets: ")[2].split()
    script = (support.ROOT / "benchmarks" / "records.sh").read_text()
    assert sorted(named) == sorted(re.findall(r"^  \[(.*?)\]=", script, re.MULTILINE))
    assert set(SETS) < set(named)


@pytest.mark.parametrize("arguments", [(), ("there", "lama3"), ("-x",)])
def test_mistakes_are_told_at_once(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    done = records(tmp_path, *arguments)
    assert done.returncode == 2
    assert "Usage: benchmarks/records.sh FOLDER [SET...]" in done.stderr
    assert not (tmp_path / "asked").exists()

"""Runs that go on where an earlier one of the same code ended, and which code is the same."""

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from pyrocshmem.benchmarks import records, sources
from pyrocshmem.benchmarks.__main__ import app
from tests import commands

TIER = 2
pytestmark = pytest.mark.cpu

OPTIONS = ("gemm", "--shapes", "tiny", "--iters", "2", "-n", "1", "--providers", "ours,blas")


def measured(path: Path, *more: str) -> tuple[list[dict[str, Any]], list[str]]:
    """(cases, commands of the runs) of the file after one more run."""
    done = commands.invoke(app, *OPTIONS, "--json", str(path), *more)
    assert done.returncode == 0, done.stdout + done.stderr
    file = records.read(path)
    assert file is not None
    return [case for case in file.cases if case.pop("run")], file.environment["commands"]


def test_a_run_goes_on_with_what_one_of_the_same_code_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.jsonl"
    monkeypatch.setattr(sys, "argv", ["bench", *OPTIONS])
    whole, _ = measured(path, "--commit", "0123456789abcdef")
    header, first, *others = path.read_text().splitlines(keepends=True)
    assert len(others) == 2  # the second case, and the GPUs afterwards
    # As a run that was killed while it wrote leaves it.
    path.write_text(header + first + others[0][:40])
    again, runs = measured(path, "--resume")
    assert again[0] == whole[0]
    assert again[1]["us"] != whole[1]["us"]
    assert [case["M"] for case in again] == [case["M"] for case in whole]
    assert len(runs) == 2
    found = records.read(path)
    assert found is not None
    assert found.environment["commit"] == "0123456789abcdef"  # which drew the cases
    # All is there: nothing is measured.
    assert measured(path, "--resume")[0] == again
    # Other code: these records are not to be lost.
    content = path.read_bytes()
    monkeypatch.setattr(records, "digest", lambda: "other")
    done = commands.invoke(app, *OPTIONS, "--json", str(path), "--resume")
    assert done.returncode == 2
    assert "has records of other sources; go on in another file" in done.stderr
    assert path.read_bytes() == content
    # Without --resume the file is written anew, as ever.
    anew, runs = measured(path)
    assert anew[0]["us"] != whole[0]["us"]
    assert (len(anew), len(runs)) == (2, 1)


def test_to_go_on_takes_a_file() -> None:
    done = commands.invoke(app, *OPTIONS, "--resume")
    assert done.returncode == 2
    assert "--resume needs the file to go on with" in done.stderr


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("stream_k/local_gemm/kernel.py", True),
        ("benchmarks/measure.py", True),
        ("benchmarks/models.toml", True),
        ("benchmarks/front_page.py", False),
        ("benchmarks/records.sh", False),
        ("benchmarks/results/notes.md", False),
        ("docs/guide.md", False),
        ("tests/conftest.py", False),
    ],
)
def test_which_sources_count(name: str, counts: bool, tmp_path: Path) -> None:
    for folder in ("stream_k/local_gemm", "benchmarks"):
        shutil.copytree(
            sources.ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("results", "__pycache__")
        )
    package = tmp_path / "pyrocshmem"
    package.mkdir()
    for folder in ("stream_k", "benchmarks"):
        (package / folder).symlink_to(Path("..", folder))
    place = tmp_path / name
    place.parent.mkdir(parents=True, exist_ok=True)
    place.touch()
    before = sources.digest.__wrapped__(package)
    with place.open("a") as file:
        file.write("\n")
    assert (sources.digest.__wrapped__(package) != before) == counts


def test_an_installed_package_has_the_digest_of_the_tree(tmp_path: Path) -> None:
    """Whose folders are no links."""
    package = tmp_path / "pyrocshmem"
    shutil.copytree(sources._PACKAGE, package, ignore=shutil.ignore_patterns("results", "__pycache__"))
    assert sources.digest.__wrapped__(package) == sources.digest()
    with (package / "heap.py").open("a") as file:
        file.write("\n")
    assert sources.digest.__wrapped__(package) != sources.digest()

"""The pictures of the page on several hosts say what their commands draw today."""

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

TIER = 1
pytestmark = pytest.mark.cpu

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "img"
COMMANDS = {
    "hosts.svg": [str(FOLDER / "hosts.py")],
    "scale.svg": ["-m", "pyrocshmem", "bench", "scale", "--plot"],
}


def words(path: Path) -> list[str | None]:
    return [node.text for node in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")]


@pytest.mark.parametrize("name", COMMANDS)
def test_it_says_what_is_drawn(tmp_path: Path, name: str) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / name
    command = [sys.executable, *COMMANDS[name], str(out)]
    subprocess.run(
        command,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        timeout=100,
        capture_output=True,
    )
    assert words(out) == words(FOLDER / name)

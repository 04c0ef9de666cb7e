"""The Python of README.md, the guide and the tutorials runs, on two ranks, and prints what the page says."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TIER = 2
pytestmark = pytest.mark.cpu

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *(ROOT / "docs" / f"{name}.md" for name in ("guide", "reproducibility")),
    *sorted((ROOT / "docs" / "tutorials").glob("*.md")),
]


def blocks(page: Path, language: str) -> list[str]:
    """What stands in the fences of `language` on a page, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def output(code: str, folder: Path) -> str:
    """What a program prints; it is a file, since ranks import it and Triton reads a kernel's source."""
    program = folder / "program.py"
    program.write_text(code)
    # As a reader's shell has it, not as pytest's process does.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(program)],
        check=False,
        cwd=ROOT,
        env={**environment, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
@pytest.mark.num_ranks(2)
def test_a_page_prints_what_it_says(page: Path, tmp_path: Path) -> None:
    (expected,) = blocks(page, "text")
    assert output("".join(blocks(page, "python")), tmp_path) == expected


@pytest.mark.num_ranks(2)
def test_the_first_example_of_the_readme(tmp_path: Path) -> None:
    assert output(blocks(ROOT / "README.md", "python")[0], tmp_path)


def test_the_kernel_of_the_readme_is_the_example() -> None:
    assert blocks(ROOT / "README.md", "python")[1] in (ROOT / "examples/device/put.py").read_text()

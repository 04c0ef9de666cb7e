"""The supported versions of torch and Triton: in pyproject.toml, and everywhere else as there."""

import re
from pathlib import Path

import pytest
import torch
import triton

from pyrocshmem import doctor, versions
from pyrocshmem.doctor import NOTE, OK
from pyrocshmem.versions import Window, version_of, window

TIER = 1
pytestmark = pytest.mark.cpu

ROOT = Path(__file__).resolve().parents[2]
WORDS = ("README.md", "docs/setup.md", "docs/state.md")


@pytest.fixture
def project(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """What was read before is read again, now and afterwards."""
    monkeypatch.setattr(versions, "_project", versions._project.__wrapped__)
    return monkeypatch


def test_what_runs_here_is_supported() -> None:
    assert torch.__version__ in window("torch")
    assert triton.__version__ in window("triton")


@pytest.mark.parametrize(
    ("version", "inside"),
    [
        ("3.6.0", True),
        ("3.6.0+git1234", True),
        ("3.10.0a1", True),
        ("3.10.2.post1", True),
        ("3.5.9", False),
        ("3.11.0", False),
        ("4.6.0", False),
        ("2.99.0", False),
    ],
)
def test_a_window(version: str, inside: bool) -> None:
    known = Window((3, 6), (3, 11))
    assert (version in known) is inside
    assert str(known) == "3.6 to 3.10"


def test_numbers_are_compared_as_numbers() -> None:
    assert version_of("3.10.0") == (3, 10) > version_of("3.9.1+rocm7.0")


def test_an_installation_has_the_same(project: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Written by a build backend, which sorts what a requirement says."""
    expected = [window(name) for name in versions.WINDOWS]
    wheel = []
    for name, known in zip(versions.WINDOWS, expected, strict=True):
        low, high = (".".join(map(str, end)) for end in (known.low, known.high))
        wheel += [f"{name}<{high},>={low}", f'{name}x>=1.0; extra == "test"']
    project.setattr(versions, "_PROJECT", tmp_path / "pyproject.toml")
    project.setattr(versions.metadata, "requires", lambda name: wheel)
    project.setattr(versions.metadata, "version", lambda name: "9.8")
    assert [window(name) for name in versions.WINDOWS] == expected
    assert versions.version() == "9.8"


@pytest.mark.parametrize("page", WORDS)
def test_pages_name_the_same(page: str) -> None:
    """README, setup and state, each of which has both, across the ends of lines."""
    text = " ".join((ROOT / page).read_text().replace("|", " ").split())
    for name in versions.WINDOWS:
        named = re.findall(rf"(?i)\b{name}[ (]+(\d+\.\d+ to \d+\.\d+)", text)
        assert named, f"{page} names no versions of {name}"
        assert set(named) == {str(window(name))}, page


def test_commands_that_pages_give_name_the_same() -> None:
    """`pip install 'torch>=...,<...'`: as pyproject.toml has it."""
    required = re.search(r'"(torch>=[^"]+)"', (ROOT / "pyproject.toml").read_text())
    assert required is not None
    given = re.findall(r"'(torch>=[^']+)'", (ROOT / "docs/setup.md").read_text())
    assert set(given) == {required[1]}


@pytest.mark.parametrize(
    ("name", "version", "verdict"), [("torch", "2.99.0", NOTE), ("triton", "3.99.0", NOTE), (None, "", OK)]
)
def test_doctor_names_what_is_not_supported(
    monkeypatch: pytest.MonkeyPatch, name: str | None, version: str, verdict: str
) -> None:
    if name is not None:
        monkeypatch.setattr({"torch": torch, "triton": triton}[name], "__version__", version)
    (found,) = doctor.check_versions()
    assert (found.verdict, bool(found.advice)) == (verdict, verdict == NOTE)
    assert f"torch {torch.__version__} (supported: {window('torch')})" in found.found
    assert f"triton {triton.__version__} (supported: {window('triton')})" in found.found

"""The project's version, and those of torch and Triton that it supports: from pyproject.toml, without torch."""

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

WINDOWS = ("torch", "triton")
_PROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"


@cache
def _project() -> tuple[str, list[str]]:
    """(version, requirements) of the source tree that this is, or of what is installed."""
    if _PROJECT.is_file():
        about = tomllib.loads(_PROJECT.read_text()).get("project", {})
        if about.get("name") == "pyrocshmem":
            return str(about["version"]), about["dependencies"]
    return metadata.version("pyrocshmem"), metadata.requires("pyrocshmem") or []


def version() -> str:
    """The project's version."""
    return _project()[0]


def version_of(text: str) -> tuple[int, int]:
    """The first two numbers of a version: (3, 6) of "3.6.0+git"."""
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


@dataclass(frozen=True)
class Window:
    """Supported versions of a package, by their first two numbers: from `low`, before `high`."""

    low: tuple[int, int]
    high: tuple[int, int]

    def __contains__(self, version: str) -> bool:
        return self.low <= version_of(version) < self.high

    def __str__(self) -> str:
        return f"{self.low[0]}.{self.low[1]} to {self.high[0]}.{self.high[1] - 1}"


def window(package: str) -> Window:
    """That of `package`, one of `WINDOWS`."""
    (required,) = [text for text in _project()[1] if re.match(rf"{package}\b", text)]
    bounds = dict(re.findall(r"(>=|<)(\d+\.\d+)", required))
    return Window(version_of(bounds[">="]), version_of(bounds["<"]))

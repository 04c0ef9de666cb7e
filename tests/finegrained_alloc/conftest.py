"""The library, and the stand-in for the GPU runtimes, are built once before the first of these tests."""

import subprocess
from pathlib import Path

import pytest

from tests.finegrained_alloc import support
from tests.finegrained_alloc.standin import Standin


@pytest.fixture(autouse=True, scope="session")
def built_library() -> None:
    support.build_library()


@pytest.fixture(scope="session")
def standin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("standin") / "libstandin.so"
    source = support.HERE / "standin_runtime.c"
    command = [
        "cc",
        "-std=c11",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-fPIC",
        "-shared",
        "-I",
        str(support.PACKAGE),
    ]
    subprocess.run([*command, str(source), "-o", str(library)], check=True, timeout=support.TIMEOUT_S)
    return library


@pytest.fixture(params=["hip", "cuda"])
def runtime(request: pytest.FixtureRequest, standin: Path, tmp_path: Path) -> Standin:
    return Standin(standin, request.param, tmp_path / "log")

"""Finding the GPU runtimes: which library, what is missing, what is said of it. Against the recording stand-in."""

from pathlib import Path

import pytest

from tests.finegrained_alloc import support
from tests.finegrained_alloc.standin import Standin

TIER = 1
pytestmark = pytest.mark.cpu


@pytest.mark.parametrize(
    ("extra", "part"),
    [
        ({"STANDIN_DEVICES": "0"}, "no device"),
        ({"STANDIN_FAIL": "hipGetDeviceCount=100,cuInit=100"}, "error 100"),
    ],
)
def test_no_device(runtime: Standin, extra: dict[str, str], part: str) -> None:
    code = "say(found=fga.available(B), error=error_of(fga.alloc, 5, B), count=error_of(fga.device_count, B))"
    (facts,) = runtime.run(code, **extra)
    assert facts["found"][0] is False
    assert part in facts["found"][1]
    assert facts["error"][0] == facts["count"][0] == "Unavailable"


def test_what_is_available_is_described(runtime: Standin) -> None:
    (facts,) = runtime.run("say(found=fga.available(B), count=fga.device_count(B))")
    assert facts["found"][0] is True
    version = runtime.pick("HIP 6.3", "driver API 13.0")
    assert facts["found"][1].endswith(f"libstandin.so, {version}, 2 devices")
    assert facts["count"] == 2


def test_a_library_without_the_symbols(runtime: Standin) -> None:
    name = runtime.pick("hipGetErrorString", "cuInit")
    (facts,) = support.run_child(
        "say(found=fga.available(sys.argv[1]))",
        runtime.backend,
        PYROCSHMEM_HIP_LIBRARY="libc.so.6",
        PYROCSHMEM_CUDA_LIBRARY="libc.so.6",
    )
    assert facts["found"] == [False, f"{runtime.backend}: libc.so.6 has no {name}"]


def test_a_library_that_is_not_there(runtime: Standin) -> None:
    missing = "/nonexistent/libgpu.so"
    (facts,) = support.run_child(
        "say(found=fga.available(sys.argv[1]))",
        runtime.backend,
        PYROCSHMEM_HIP_LIBRARY=missing,
        PYROCSHMEM_CUDA_LIBRARY=missing,
    )
    assert facts["found"][0] is False
    assert missing in facts["found"][1]


def test_an_old_hip_is_refused(standin: Path, tmp_path: Path) -> None:
    runtime = Standin(standin, "hip", tmp_path / "log")
    (facts,) = runtime.run("say(found=fga.available(B))", STANDIN_VERSION="50221153")
    assert facts["found"] == [False, f"hip: {standin} is of version 5.2, expected 6.0 or newer"]


def test_the_copy_that_is_loaded_already_is_used(standin: Path, tmp_path: Path) -> None:
    """PyTorch's wheels bring their own libamdhip64: a second copy would not know its pointers."""
    bundled = tmp_path / "libamdhip64.so.6"
    bundled.write_bytes(standin.read_bytes())
    code = """
loaded = ctypes.CDLL(sys.argv[1])
memory = fga.alloc(5, "hip")
say(text=fga.available("hip")[1], live=loaded.standin_live())
"""
    (facts,) = support.run_child(
        code, str(bundled), PYROCSHMEM_HIP_LIBRARY="", STANDIN_LOG=str(tmp_path / "log")
    )
    assert facts["live"] == 1
    assert facts["text"].startswith(f"hip: {bundled}")

"""The prototypes and constants of hip_abi.h and cuda_abi.h against the vendors' headers and AMD's own library.

The headers come from Debian's libamdhip64-dev (with the library) and from the Triton wheel (both vendors').
"""

import importlib.util
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.finegrained_alloc import support

TIER = 0
pytestmark = pytest.mark.cpu

DEBIAN = Path("/usr/include")
DEBIAN_HIP_LIBRARY = Path("/usr/lib/x86_64-linux-gnu/libamdhip64.so")
STRICT = ["-std=c11", "-Wall", "-Wextra", "-Werror"]


def triton_include(backend: str) -> Path:
    spec = importlib.util.find_spec("triton")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "backends" / backend / "include"


def compile_check(
    source: Path, include: Path, abi: Path, *arguments: str
) -> subprocess.CompletedProcess[str]:
    command = ["cc", *STRICT, "-D__HIP_PLATFORM_AMD__", "-isystem", str(include), "-I", str(abi), str(source)]
    return subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=support.TIMEOUT_S, check=False
    )


CASES = [
    pytest.param("check_hip.c", "hip_abi.h", DEBIAN, "hip/hip_runtime_api.h", id="hip-debian"),
    pytest.param("check_hip.c", "hip_abi.h", triton_include("amd"), "hip/hip_runtime_api.h", id="hip-triton"),
    pytest.param("check_cuda.c", "cuda_abi.h", triton_include("nvidia"), "cuda.h", id="cuda-triton"),
]


@pytest.mark.parametrize(("check", "abi", "include", "header"), CASES)
def test_prototypes_and_constants_are_the_vendor_s(check: str, abi: str, include: Path, header: str) -> None:
    if not (include / header).exists():
        pytest.skip(f"{include / header} is not installed")
    done = compile_check(support.HERE / check, include, support.PACKAGE, "-fsyntax-only")
    assert done.returncode == 0, done.stderr


# What a slip would look like: a wrong flag, a narrower size, a missing argument.
SLIPS = [
    pytest.param("hip_abi.h", "FINEGRAINED 0x1u", "FINEGRAINED 0x2u", id="hip-flag"),
    pytest.param(
        "hip_abi.h", "(void **ptr, size_t nbytes", "(void **ptr, unsigned int nbytes", id="hip-size"
    ),
    pytest.param("hip_abi.h", "(int peer, unsigned int flags)", "(int peer)", id="hip-argument"),
    pytest.param("cuda_abi.h", "ENABLED 704u", "ENABLED 705u", id="cuda-error"),
    pytest.param(
        "cuda_abi.h", "cuMemAlloc_v2, (CUdeviceptr *ptr", "cuMemAlloc_v2, (unsigned int *ptr", id="cuda-ptr"
    ),
]


@pytest.mark.parametrize(("abi", "right", "wrong"), SLIPS)
def test_a_slip_in_the_table_does_not_compile(tmp_path: Path, abi: str, right: str, wrong: str) -> None:
    vendor = "amd" if abi == "hip_abi.h" else "nvidia"
    text = (support.PACKAGE / abi).read_text()
    assert right in text
    (tmp_path / abi).write_text(text.replace(right, wrong))
    check = support.HERE / ("check_hip.c" if vendor == "amd" else "check_cuda.c")
    assert compile_check(check, triton_include(vendor), tmp_path, "-fsyntax-only").returncode != 0


def test_amd_s_library_has_every_symbol(tmp_path: Path) -> None:
    if not DEBIAN_HIP_LIBRARY.exists() or not (DEBIAN / "hip").exists():
        pytest.skip("libamdhip64-dev is not installed")
    program = tmp_path / "check_hip"
    check = support.HERE / "check_hip.c"
    arguments = ["-Wl,--no-undefined", "-o", str(program), str(DEBIAN_HIP_LIBRARY)]
    done = compile_check(check, DEBIAN, support.PACKAGE, *arguments)
    assert done.returncode == 0, done.stderr
    if shutil.which("nm"):
        done = subprocess.run(
            ["nm", "-u", str(program)], capture_output=True, text=True, timeout=60, check=True
        )
        assert "hipExtMallocWithFlags" in done.stdout  # the linker saw real references


def test_amd_s_library_loads_and_says_what_is_missing() -> None:
    if not DEBIAN_HIP_LIBRARY.exists():
        pytest.skip("libamdhip64-dev is not installed")
    (facts,) = support.run_child(
        'say(found=fga.available("hip"))', PYROCSHMEM_HIP_LIBRARY=str(DEBIAN_HIP_LIBRARY)
    )
    found, text = facts["found"]
    # Debian's is of version 5.2: both reasons come after every symbol was found.
    assert found or text.startswith("hip: no device") or text.endswith("expected 6.0 or newer"), text

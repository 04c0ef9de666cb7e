"""Whether a product and a sum become one instruction: the same with every version of Triton, and nobody is told of it.

Triton 3.9 warns where `TRITON_DEFAULT_FP_FUSION` is unset, since 3.10 has another default. The library sets it.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import triton

from pyrocshmem.versions import version_of
from tests.conftest import ROOT

TIER = 3

VARIABLE = "TRITON_DEFAULT_FP_FUSION"
# Prints how many fused instructions the kernel has for each target, and then, its control, compiles without a setting.
PROGRAM = """
import os, re, sys
from pyrocshmem import testing
import torch, triton, triton.language as tl

@triton.jit
def multiply_add_kernel(x, y, z, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(z + i, tl.load(x + i) * tl.load(y + i) + tl.load(z + i))

def compiled(target, size):
    tensors = [torch.empty(size) for _ in range(3)]
    return testing.compile_for(target, multiply_add_kernel, tensors, {"BLOCK": size}).text

for target in ("sm_90", "gfx942"):
    text = compiled(target, 1024)
    print(len(re.findall(r"\\bfma\\.rn\\.|\\bv_(?:pk_)?fmac?_f32", text)))
print("unset", file=sys.stderr)
os.environ.pop("TRITON_DEFAULT_FP_FUSION")
compiled("sm_90", 512)
"""


def compiled(folder: Path, **environment: str) -> tuple[list[bool], str, str]:
    """(whether fused instructions were found for each target, what was written to stderr, and what without a
    setting)."""
    program = folder / "program.py"
    program.write_text(PROGRAM)
    inherited = {name: value for name, value in os.environ.items() if name != VARIABLE}
    settings = {
        "TRITON_INTERPRET": "0",
        "PYROCSHMEM_BACKEND": "cpu",
        "PYTHONPATH": str(ROOT),
        "TRITON_CACHE_DIR": str(folder / "cache"),
    }
    done = subprocess.run(
        [sys.executable, str(program)],
        check=True,
        env=inherited | settings | environment,
        capture_output=True,
        text=True,
    )
    said, _, without = done.stderr.partition("unset\n")
    return [int(line) > 0 for line in done.stdout.splitlines()], said, without


@pytest.fixture(scope="module")
def by_default(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[bool], str, str]:
    return compiled(tmp_path_factory.mktemp("fusion"))


@pytest.mark.every_triton
def test_products_are_fused_and_nobody_is_told(by_default: tuple[list[bool], str, str]) -> None:
    fused, said, _ = by_default
    assert fused == [True, True]
    assert VARIABLE not in said


def test_the_callers_setting_stays(tmp_path: Path) -> None:
    fused, said, _ = compiled(tmp_path, **{VARIABLE: "0"})
    assert fused == [False, False]
    assert VARIABLE not in said


@pytest.mark.skipif(version_of(triton.__version__) < (3, 9), reason="Triton before 3.9 says nothing")
def test_without_a_setting_it_is_told(by_default: tuple[list[bool], str, str]) -> None:
    """The control of the tests above."""
    assert re.search(rf"UserWarning: {VARIABLE} is unset", by_default[2])

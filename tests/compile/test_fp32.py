"""How float32 products by FMA read B from shared memory: as rows, whatever B is in memory.

As columns all lanes of a warp would read from one bank: a fifth of the speed (docs/log.md).
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TIER = 1
ROOT = Path(__file__).parents[2]

SCRIPT = """
import sys
import torch
from pyrocshmem import Workspace, stream_k, testing
from pyrocshmem.stream_k.local_gemm import mainloop
from tests.compile import planted as stand_ins

layout, planted = sys.argv[1:]
if planted == "True":
    mainloop._in_rows = stand_ins.left_in_columns
a, b = torch.empty(256, 512), torch.empty(512, 384)
b = b if layout == "row" else torch.empty(384, 512).t()
config = stream_k.Config(
    placement="after", block_m=64, block_n=128, block_k=32, num_stages=3, subtiles=1, flatten=False, split="none"
)
workspace = Workspace(device=torch.device("cpu"))
(kernel,) = testing.compile_call("sm_90", lambda: stream_k.gemm(a, b, config=config, workspace=workspace))
print(kernel.ttgir)
"""


def read_from(layout: str, planted: bool) -> str:
    """What the right operand of the one product is read from."""
    variables = os.environ | {"TRITON_INTERPRET": "0", "PYROCSHMEM_BACKEND": "cpu"}
    command = [sys.executable, "-c", SCRIPT, layout, str(planted)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=120, env=variables, cwd=ROOT
    )
    right = r"ttg\.local_load \S+ : !ttg\.memdesc<32x128xf32, (#\w+), .*opIdx = 1"
    (name,) = set(re.findall(right, done.stdout))
    (layout_of,) = re.findall(rf"^{name} = (.*)$", done.stdout, re.MULTILINE)
    return str(layout_of)


@pytest.mark.parametrize(
    ("layout", "planted", "expected"),
    [
        ("row", False, "transposed = false"),  # where TMA puts it
        ("column", False, "order = [1, 0]"),
        ("column", True, "order = [0, 1]"),
    ],
)
def test_where_the_right_operand_is_read_from(layout: str, planted: bool, expected: str) -> None:
    assert expected in read_from(layout, planted)

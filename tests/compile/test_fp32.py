"""How float32 products by FMA read B from shared memory: as rows, whatever B is in memory.

As columns all lanes of a warp would read from one bank: a fifth of the speed (docs/log.md).
"""

import re
from pathlib import Path

import pytest

from tests.compile.conftest import _pool

TIER = 1


def compiled(layout: str, planted: bool) -> str:
    """The intermediate code of a product. In a prepared process of its own: a plant outlives its use."""
    import torch

    from pyrocshmem import Workspace, stream_k, testing
    from pyrocshmem.stream_k.local_gemm import mainloop
    from tests.compile import planted as stand_ins

    if planted:
        mainloop._in_rows = stand_ins.left_in_columns
    a, b = torch.empty(256, 512), torch.empty(512, 384)
    b = b if layout == "row" else torch.empty(384, 512).t()
    config = stream_k.Config(
        placement="after",
        block_m=64,
        block_n=128,
        block_k=32,
        num_stages=3,
        subtiles=1,
        flatten=False,
        split="none",
    )
    workspace = Workspace(device=torch.device("cpu"))
    (kernel,) = testing.compile_call("sm_90", lambda: stream_k.gemm(a, b, config=config, workspace=workspace))
    return kernel.ttgir


@pytest.mark.parametrize(
    ("layout", "planted", "expected"),
    [
        ("row", False, "transposed = false"),  # where TMA puts it
        ("column", False, "order = [1, 0]"),
        ("column", True, "order = [0, 1]"),
    ],
)
def test_where_the_right_operand_is_read_from(
    layout: str, planted: bool, expected: str, tmp_path: Path
) -> None:
    with _pool(1, "", tmp_path) as pool:
        code = pool.submit(compiled, layout, planted).result()
    right = r"ttg\.local_load \S+ : !ttg\.memdesc<32x128xf32, (#\w+), .*opIdx = 1"
    (name,) = set(re.findall(right, code))
    (layout_of,) = re.findall(rf"^{name} = (.*)$", code, re.MULTILINE)
    assert expected in layout_of

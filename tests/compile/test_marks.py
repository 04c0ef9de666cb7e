"""What the marks of a timeline (`pyrocshmem.trace`) do to the kernels: nothing when they are off, and when they are on
clocks in the right places and no other pipeline."""

import pytest

from pyrocshmem.testing import Compiled
from tests.compile.cases import CASES, FULL_PIPELINE_BYTES, SUMMING, Case
from tests.compile.conftest import Compile

TIER = 3

TARGET = "sm_90"
OWN_STREAM = (("placement", "own_stream"), ("algorithm", "two_shot"))
COPIED = (("placement", "copy_engine"),)
GEMM = Case("gemm", changes=(("split", "none"), ("num_programs", 0)), hot=True)
# Of those that are compiled anyway, without a recorder.
MARKED = [
    GEMM,
    Case("gemm_all_reduce", changes=OWN_STREAM, hot=True),
    SUMMING,
    Case("all_gather_gemm", changes=COPIED, hot=True),
    Case("all_reduce", arguments=(("algorithm", "two_shot"),), hot=True),
]
every_case = pytest.mark.parametrize(
    ("case", "target"), [pytest.param(case, TARGET, id=str(case)) for case in MARKED]
)


def _facts(kernel: Compiled) -> tuple[str, str, int, int, int]:
    # From the first .file on there are only names and lines of the source.
    text = kernel.normal().split("\n.file")[0]
    return kernel.kernel, text, kernel.registers, kernel.spills, kernel.shared_memory


@every_case
def test_off_is_the_code_of_a_kernel_without_marks(
    case: Case, target: str, compiled: Compile, compiled_without_marks: Compile
) -> None:
    """Instructions, registers, spills and shared memory."""
    assert case in CASES
    off, unmarked = compiled(case, target), compiled_without_marks(case, target)
    assert [_facts(kernel) for kernel in off] == [_facts(kernel) for kernel in unmarked]


@every_case
def test_on_keeps_the_pipeline(
    case: Case, target: str, compiled: Compile, compiled_recorded: Compile
) -> None:
    """Marks bring clocks into the loops of the GEMM, and leave its stages as they are."""
    for off, on in zip(compiled(case, target), compiled_recorded(case, target), strict=True):
        assert on.kernel == off.kernel
        assert on.count("%globaltimer") > off.count("%globaltimer")
        assert on.shared_memory == off.shared_memory, f"{on.kernel}: shared memory"
        assert on.count(r"wgmma\.mma_async") == off.count(r"wgmma\.mma_async")


def test_marks_stay_in_order(compiled_recorded: Compile) -> None:
    """Of a tile's marks none moves, with its loads, ahead of the end of the tile before."""
    (gemm,) = compiled_recorded(GEMM, TARGET)
    assert gemm.shared_memory == FULL_PIPELINE_BYTES
    before, _, after = gemm.normal().partition("wgmma.mma_async")
    assert before.count("%globaltimer") == 1, "the first tile's"
    assert after.index("wgmma.wait_group.sync.aligned 0") < after.index("%globaltimer")

"""Every kernel configuration that ships compiles for every target, and its assembly is what it should be."""

import pytest

from tests.compile import assembly as rules
from tests.compile.assembly import Assembly
from tests.compile.cases import CASES, Case
from tests.compile.conftest import Compile
from tests.compile.target_names import TARGETS

TIER = 3
# The first test of a session may have to wait until all of the pool's processes have imported torch on a busy machine.
pytestmark = pytest.mark.timeout(400)

# All four stages of A and B, and the tile on its way out.
FULL_PIPELINE_BYTES = 229_408
# With Triton 3.6, ptxas keeps a copying kernel at 64 registers by putting one word on the stack.
ONE_WORD_BYTES = 8


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest) -> str:
    return request.param


def _gpu_scope_releases(kernel: Assembly) -> set[str]:
    """What may be told to this GPU alone: a split tile's partial, a tile to the copiers beside, a program's end."""
    constants = kernel.constants
    allowed = set()
    if kernel.kernel != "stream_k_kernel" or constants["ENDS"] == "True":
        allowed.add("ticket")
    if constants.get("SPLIT") == "True":
        allowed.add("fix-up")
    if constants.get("EPILOGUE") == "publish_output":
        allowed.add("local tile")
    return allowed


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel(case: Case, target: str, compiled: Compile) -> None:
    """Compiling checks that shared memory suffices. The rest is read in the assembly."""
    kernels = compiled(case, target)
    wrong = [f"{kernel.kernel}: {text}" for kernel in kernels for text in _faults(case, kernel)]
    assert not wrong, "\n".join(wrong)


def _faults(case: Case, kernel: Assembly) -> list[str]:
    wrong = rules.unsettled_releases(kernel) + rules.unacquired_polls(kernel)
    wrong += _wrong_scopes(case, kernel)
    if kernel.kernel == "stream_k_kernel" and case.dtype != "float32":
        matrix = r"\bwgmma\.mma_async" if kernel.nvidia else r"\bv_mfma_f32_"
        if not kernel.count(matrix):
            wrong.append("no matrix instructions")
    allowed = ONE_WORD_BYTES if kernel.nvidia and kernel.kernel != "stream_k_kernel" else 0
    if case.hot and kernel.spills > allowed:
        wrong.append(f"spills {kernel.spills}, {kernel.registers} registers")
    if kernel.kernel != "stream_k_kernel":
        # The kernels that only move tiles: 16 bytes an access, or the links idle.
        wide = r"\bst\.global\.v4\.b32" if kernel.nvidia else r"\b(?:global|buffer)_store_dwordx4"
        if not kernel.count(wide):
            wrong.append("no 16-byte stores")
        wrong += rules.narrow_accesses(kernel)
    return wrong


def _wrong_scopes(case: Case, kernel: Assembly) -> list[str]:
    scopes = rules.release_scopes(kernel)
    wrong = []
    if scopes["other"]:
        wrong.append(f"{scopes['other']} releases with a scope that reaches neither the GPU nor the system")
    if case.op != "gemm" and not scopes["sys"]:
        wrong.append("no release reaches the peers")
    allowed = _gpu_scope_releases(kernel)
    # A compiler may double the code of a tile's end (whole and split tiles have one each), never invent one.
    if scopes["gpu"] and not allowed:
        wrong.append(f"{scopes['gpu']} releases reach this GPU alone, none may")
    if scopes["gpu"] < len(allowed):
        wrong.append(f"{scopes['gpu']} releases for this GPU alone, expected {', '.join(sorted(allowed))}")
    return wrong


def test_shipped_gemm_keeps_its_pipeline(compiled: Compile) -> None:
    """A barrier in the loop, or a tile too wide, would leave fewer stages: shared memory shows it."""
    base = next(case for case in CASES if case.op == "gemm" and case.dtype == "bfloat16")
    assert [kernel.shared for kernel in compiled(base, "sm_90")] == [FULL_PIPELINE_BYTES]
    beside = (("placement", "beside"), ("algorithm", "two_shot"))
    fed = [case for case in CASES if case.dtype == "bfloat16" and case.changes == beside]
    assert fed
    for case in fed:
        for kernel in compiled(case, "sm_90"):
            assert kernel.shared == FULL_PIPELINE_BYTES, (str(case), kernel.shared)


def test_split_cases_are_split(target: str, compiled: Compile) -> None:
    """The cases that are there for the fix-up compile it."""
    split = [case for case in CASES if ("split", "stream_k") in case.changes and case.dtype == "bfloat16"]
    assert len(split) >= 3
    for case in split:
        assert compiled(case, target)[0].constants["SPLIT"] == "True", str(case)

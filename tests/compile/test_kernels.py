"""Every kernel configuration that ships compiles for every target, and its assembly is what it should be."""

import itertools
import re

import pytest
import triton

from pyrocshmem.testing import Compiled
from tests.compile import assembly as rules
from tests.compile.cases import (
    BLOCKS,
    CASES,
    COMPILED,
    EVEN,
    EVERY_TRITON,
    FEW,
    FOUR_STAGES_BYTES,
    FULL_PIPELINE_BYTES,
    GATHERED_PIPELINE_BYTES,
    LARGE,
    SMALL,
    STRICT,
    UNEVEN,
    Case,
)
from tests.compile.conftest import Compile

TIER = 3

# With Triton 3.6, ptxas keeps a copying kernel at 64 registers by putting one word on the stack.
ONE_WORD_BYTES = 8

OLD_TRITON = triton.__version__.startswith("3.6.")
# The two loops of a GEMM that gathers: gfx950's vector registers don't suffice with Triton 3.6.
GATHERING_SPILLS = 32 if OLD_TRITON else 0

# A float a row, on its way from the registers that summed it to those that store it.
SQUARES_BYTES = 128 * 4

# Kernels that wait and tell, but move nothing.
GATES = ("gate_kernel", "step_kernel")
GEMMS = ("stream_k_kernel", "gemm_kernel")
# What makes copies of operands whose alignment is lost, and what puts scales, wherever they lie, behind rows.
COPIES = ("copy_kernel", "put_kernel")
PARTS = "sum_parts_kernel"
# These tell nobody.
QUANTIZING = ("quantize_kernel", "quantize_norm_kernel")
SILENT = (
    *COPIES,
    PARTS,
    *QUANTIZING,
    "swiglu_kernel",
    "swiglu_backward_kernel",
    "rotate_kernel",
    "norm_heads_kernel",
)
# And those whose data carry their own flag.
MESSAGES = ("exchange_kernel", "rms_norm_kernel", "rms_norm_backward_kernel", "norm_pair_kernel")
# What makes numbers of 8 bits.
QUANTIZED = [case for case in CASES if {"recipe", "quantize"} & {*dict(case.arguments)}]


def _gpu_scope_releases(kernel: Compiled) -> set[str]:
    """What may be told to this GPU alone: a split tile's partial, a tile to its helpers, a program's end."""
    constants = kernel.constants
    allowed = set()
    # The ticket of an exchange orders nothing: its data are messages.
    if (
        kernel.kernel not in ("gate_kernel", "pull_kernel", "exchange_kernel")
        and constants.get("ENDS", "True") == "True"
    ):
        allowed.add("ticket")
    if constants.get("SPLIT") == "True" and constants["SEPARATE"] == "False":
        allowed.add("fix-up")
    if constants.get("ANNOUNCE") in ("announce_output", "announce_rows"):
        allowed.add("local tile")
    return allowed


@pytest.mark.parametrize(
    ("case", "target"),
    [
        pytest.param(
            case, target, marks=pytest.mark.every_triton if target == "sm_90" and case in EVERY_TRITON else ()
        )
        for case, target in COMPILED
    ],
    ids=str,
)
def test_kernel(case: Case, target: str, compiled: Compile) -> None:
    """Compiling checks that shared memory suffices. The rest is read in the assembly."""
    kernels = compiled(case, target)
    wrong = [f"{kernel.kernel}: {text}" for kernel in kernels for text in _faults(case, kernel)]
    assert not wrong, "\n".join(wrong)


def _faults(case: Case, kernel: Compiled) -> list[str]:
    wrong = rules.unsettled_releases(kernel) + rules.hasty_releases(kernel) + _wrong_scopes(case, kernel)
    wrong += rules.misplaced_releases(kernel)
    if kernel.kernel in GEMMS and case.hot:
        wrong += rules.slow_stores(kernel)
    if kernel.kernel not in MESSAGES:
        wrong += rules.unacquired_polls(kernel)
    if kernel.kernel in GEMMS and case.dtype != "float32":
        # Those of 16 and 32 rows are transposed: Hopper's instructions take 64 of something.
        matrix = r"\bwgmma\.mma_async" if kernel.nvidia else r"\bv_mfma_f32_"
        if case.recipe:
            matrix += r"\S*(?:e4m3|fp8|f8f6f4)"
            # Nothing is made wider on its way.
            if kernel.count(r"\bcvt\S*e4m3|\bv_cvt_\S*fp8"):
                wrong.append("8-bit operands are converted")
        if not kernel.count(matrix):
            wrong.append("no matrix instructions")
    allowed = ONE_WORD_BYTES if kernel.nvidia and kernel.kernel not in GEMMS else 0
    if case.op == "all_gather_gemm" and kernel.target == "gfx950":
        allowed = GATHERING_SPILLS
    if case.hot and kernel.spills > allowed:
        wrong.append(f"spills {kernel.spills}, {kernel.registers} registers")
    if kernel.kernel in MESSAGES:
        wrong += _wrong_messages(case, kernel)
    elif kernel.constants.get("EPILOGUE") == "send_tile":
        wrong += _not_past_caches(kernel, "store")
    elif kernel.kernel in QUANTIZING:
        wrong += rules.narrow_accesses(kernel)
    elif kernel.kernel not in (*GEMMS, *GATES, PARTS):
        # The kernels that only move tiles: 16 bytes an access, or the links idle.
        wide = r"\bst\.global\.v4\.b32" if kernel.nvidia else r"\b(?:global|buffer)_store_dwordx4"
        if not kernel.count(wide):
            wrong.append("no 16-byte stores")
        if kernel.kernel not in COPIES:
            wrong += rules.narrow_accesses(kernel)
    return wrong


def _wrong_messages(case: Case, kernel: Compiled) -> list[str]:
    """Messages go past the caches, where peers' polls would else not find them, and polls end. (How many there are:
    test_polls.py.)"""
    constants = kernel.constants
    wrong = []
    if kernel.kernel == "exchange_kernel":
        # What tiles have sent is summed, or stored, and goes no further.
        ends = constants["TILES"] == "True" and (constants["SUMS"], constants["GATHERS"]) != ("True", "True")
        wrong += _not_past_caches(kernel, "load", *(() if ends else ("store",)))
    if constants.get("PARTS", "") != "0":
        wrong += _not_past_caches(kernel, "note's load", "note's store")
    return wrong + rules.endless_polls(kernel) if kernel.nvidia else wrong


def _not_past_caches(kernel: Compiled, *names: str) -> list[str]:
    if kernel.nvidia:
        ways = {
            "store": r"\bst\.relaxed\.sys\.global\.v4\.u32",
            "load": rules.QUAD_LOADS,
            "note's store": r"\bst\.relaxed\.sys\.global\.u64",
            "note's load": rules.NOTE_LOADS,
        }
    else:
        ways = {
            "store": r"\bglobal_store_dword .* sc0 sc1",
            "load": r"\bglobal_load_dword .* sc0 sc1",
            "note's store": r"\bglobal_store_dwordx2 .* sc0 sc1",
            "note's load": r"\bglobal_load_dwordx2 .* sc0 sc1",
        }
    return [f"no {name} of messages past the caches" for name in names if not kernel.count(ways[name])]


def _wrong_scopes(case: Case, kernel: Compiled) -> list[str]:
    scopes = rules.release_scopes(kernel)
    wrong = []
    if scopes["other"]:
        wrong.append(f"{scopes['other']} releases with a scope that reaches neither the GPU nor the system")
    if kernel.kernel in SILENT:
        return [f"{scopes} releases where nothing is told"] if any(scopes.values()) else []
    # A product before or after messages tells nobody.
    if kernel.constants["WORLD"] != "1" and not scopes["sys"]:
        wrong.append("no release reaches the peers")
    allowed = _gpu_scope_releases(kernel)
    # A compiler may double the code of a tile's end (whole and split tiles have one each), never invent one.
    if scopes["gpu"] and not allowed:
        wrong.append(f"{scopes['gpu']} releases reach this GPU alone, none may")
    if scopes["gpu"] < len(allowed):
        wrong.append(f"{scopes['gpu']} releases for this GPU alone, expected {', '.join(sorted(allowed))}")
    return wrong


FED = [
    case
    for case in CASES
    if case.hot
    and (case.shape in (LARGE, EVEN) or (case.shape == UNEVEN and case.changes))
    and case.layouts == ("row", "row")
    and "k_blocks" not in dict(case.changes)  # whose loops are several, of smaller tiles
    if ("split", "stream_k") not in case.changes
]


def _gemms(kernels: list[Compiled]) -> list[Compiled]:
    """One, or two of an op that sums row blocks: of the peers' rows, and of the own ones with the sums."""
    assert kernels[0].kernel in GEMMS
    return [kernel for kernel in kernels if kernel.kernel in GEMMS]


TREES = [case for case in CASES if "k_blocks" in dict(case.changes)]


@pytest.mark.parametrize("case", TREES, ids=str)
def test_blocks_of_a_tree_grow_side_by_side(case: Case, compiled: Compile) -> None:
    """A step multiplies one of each of several blocks, and none waits for the others: before the next one, at most the
    products of the step before are waited for. The last one of a loop waits for all."""
    for gemm in (kernel for kernel in compiled(case, "sm_90") if kernel.kernel in GEMMS):
        blocks, together = (int(n) for n in re.findall(r"(?:blocks|together)=(\d+)", gemm.constants["ALONG"]))
        assert together <= blocks == dict(case.changes)["k_blocks"]
        assert together > 1 or int(gemm.constants["BLOCK_K"]) > 64, "its stages have no room for several"
        waits = [int(n) for n in re.findall(r"wgmma\.wait_group\.sync\.aligned (\d+)", gemm.text)]
        assert sorted({*waits}) == [0, together], waits
        loops = blocks // together
        assert waits.count(0) == waits.count(together) == loops, waits


@pytest.mark.parametrize("case", [case for case in FED if "gemm" in case.op], ids=str)
def test_shipped_gemm_keeps_its_pipeline(case: Case, compiled: Compile) -> None:
    """A barrier in the loop, or a tile too wide, would leave fewer stages: shared memory shows it. What sums, or adds a
    residual, stores by pointers, in parts that need less room."""
    first, *second = (gemm.shared_memory for gemm in _gemms(compiled(case, "sm_90")))
    squares = SQUARES_BYTES if case.op == "gemm_rms_norm_all_scatter" else 0
    gathered = case.op == "all_gather_gemm" and case.shape == UNEVEN
    if case.op == "gemm_all_reduce_rms_norm" and case.world_size == 1:
        assert FOUR_STAGES_BYTES < first < FULL_PIPELINE_BYTES
        return
    assert first == (GATHERED_PIPELINE_BYTES if gathered else FULL_PIPELINE_BYTES) + squares
    assert all(FOUR_STAGES_BYTES < shared <= FULL_PIPELINE_BYTES for shared in second), second


@pytest.mark.parametrize(
    ("op", "dtype"),
    [
        ("gemm_reduce_scatter", "bfloat16"),
        ("gemm_all_reduce", "bfloat16"),
        ("gemm_all_reduce", "float16"),
    ],
)
def test_an_owner_rounds_as_its_peers_do(op: str, dtype: str, compiled: Compile) -> None:
    """The GEMM that sums has the roundings of one that sends, beside those of its result, which are all that it has in
    the strict mode: no compiler has taken a rounding and its way back for nothing."""
    default = Case(op, dtype, changes=(("placement", "copy_engine"),), hot=True)
    # Which op it is, and which type of 16 bits, changes nothing of these.
    strict = Case("gemm_all_reduce", changes=(*default.changes, *STRICT), hot=True)
    assert {default, strict} <= {*CASES}
    (sends, sums), (sends_wide, sums_wide) = (
        [gemm.count(r"\bcvt\.rn\.(?:bf16|f16)(?:x2)?\.f32") for gemm in _gemms(compiled(case, "sm_90"))]
        for case in (default, strict)
    )
    assert sends > sends_wide == 0
    assert sums == sends + sums_wide


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
@pytest.mark.parametrize("placement", ["copy_engine", "own_stream", "messages"])
def test_two_partials_in_bfloat16_are_added_in_fp32(placement: str, target: str, compiled: Compile) -> None:
    """Where the sum is rounded to fp16, too, for which they may be too large."""
    changes = (("placement", placement), ("partial_dtype", "bfloat16"))
    for kernel in compiled(Case("gemm_all_reduce", "float16", FEW, 2, changes), target):
        assert not re.search(r"\badd(?:\.\w+)*\.f16(?:x2)?\b|\bv_(?:pk_)?add_f16", kernel.text)


# An sm_90 multiprocessor: registers (a warp gets whole 256s), bytes of shared memory, of which a program takes some for
# itself, threads; and how many of them an H200 has.
REGISTERS, SHARED_BYTES, PROGRAM_BYTES, THREADS, PROCESSORS = 65_536, 233_472, 1_024, 2_048, 132
BESIDE = [case for case in FED if dict(case.changes).get("placement") == "own_stream" or case in BLOCKS]


def _of_four_in_bfloat16(case: Case) -> bool:
    """Of each op and placement: what is left for a Triton between the ends of the window."""
    return case.dtype == "bfloat16" and case.world_size == 4 and not {*STRICT} <= {*case.changes}


def _fits(programs: list[Compiled]) -> bool:
    """Whether all of these can be resident on one multiprocessor at once."""
    threads = [32 * program.num_warps for program in programs]
    registers = sum(n * -(-program.registers // 8) * 8 for n, program in zip(threads, programs, strict=True))
    shared = sum(program.shared_memory + PROGRAM_BYTES for program in programs)
    return registers <= REGISTERS and shared <= SHARED_BYTES and sum(threads) <= THREADS


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.every_triton if _of_four_in_bfloat16(case) else ())
        for case in BESIDE
    ],
    ids=str,
)
def test_helpers_fit_beside_the_gemm(case: Case, compiled: Compile) -> None:
    """A helper that found no room would start when the GEMM ends, and overlap with nothing."""
    kernels = compiled(case, "sm_90")
    gemms = _gemms(kernels)
    helpers = [kernel for kernel in kernels if kernel.kernel not in GEMMS]
    sums = case.op == "gemm_reduce_scatter" or (case in BLOCKS and case.op == "gemm_all_reduce")
    assert len(gemms) == (2 if sums else 1)
    assert helpers
    for gemm, helper in itertools.product(gemms, helpers):
        if helper.kernel == "step_kernel" and case.op != "all_gather_gemm":
            # As many as may wait before it begins.
            waits = 2 if case.op == "gemm_all_reduce" and gemm.constants["PEERS"] == "True" else 1
            assert _fits([gemm] + [helper] * (waits + gemm.programs - PROCESSORS))
            continue
        assert gemm.programs < PROCESSORS, "no multiprocessor is left for the launches of helpers"
        if case.op == "gemm_all_scatter" and helper.kernel in ("consumer_kernel", "pull_kernel"):
            # They move most, and have multiprocessors for themselves.
            each = -(-helper.programs // (PROCESSORS - gemm.programs))
            assert _fits([helper] * each), (each, helper.registers, helper.shared_memory)
        else:
            each = -(-helper.programs // PROCESSORS)
            assert _fits([gemm] + [helper] * each), (helper.kernel, each, gemm.registers, helper.registers)


# Tiles of which a multiprocessor is to hold two: 128 x 64, 128 x 128 and 64 x 64.
@pytest.mark.parametrize("shape", [(5928, 1928, 368), (3395, 1784, 129), (4840, 1760, 259)], ids=str)
def test_tiles_that_share_a_multiprocessor_fit(shape: tuple[int, int, int], compiled: Compile) -> None:
    gemm = compiled(Case("gemm", "float16", shape), "sm_90")[-1]
    assert gemm.programs > PROCESSORS
    assert _fits([gemm] * 2)
    assert gemm.spills == 0


@pytest.mark.every_triton
@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
@pytest.mark.parametrize("shape", [LARGE, SMALL], ids=str)
def test_promoted_products_find_their_blocks_loaded(
    shape: tuple[int, int, int], recipe: str, compiled: Compile
) -> None:
    """Besides the loads of a turn, four, there are those before the loop. Triton has none where a value is handed on
    for two turns: blocks are then loaded one by one."""
    case = Case("gemm", shape=shape, world_size=2, layouts=("row", "column"), recipe=recipe)
    for gemm in _gemms(compiled(case, "sm_90")):
        assert gemm.count(r"cp\.async\.bulk\.tensor\S*shared::(?:cluster|cta)\.global") >= 8


@pytest.mark.every_triton
@pytest.mark.parametrize("shape", [(16, 8192, 4096), (256, 1792, 4096), LARGE], ids=str)
def test_scales_of_blocks_are_read_a_turn_after_they_are_loaded(
    shape: tuple[int, int, int], compiled: Compile
) -> None:
    """By no instruction between their load and the next product, which would wait for them."""
    case = Case("gemm", shape=shape, layouts=("row", "column"), recipe="blockwise")
    [gemm] = _gemms(compiled(case, "sm_90"))
    turn = rules.main_loop(gemm)
    loads = [at for at, line in enumerate(turn) if re.search(r"\bLDG\.", line)]
    assert len(loads) >= 4
    for at in loads:
        loaded = re.findall(r"\bR\d+\b", turn[at])[0]
        for line in itertools.takewhile(lambda line: "GMMA" not in line, turn[at + 1 :]):
            assert not re.search(rf",.*\b{loaded}\b", line), line


@pytest.mark.parametrize(("shape", "asked"), [(SMALL, True), (LARGE, False)], ids=str)
def test_l2_is_asked_for_scales_of_blocks(
    shape: tuple[int, int, int], asked: bool, compiled: Compile
) -> None:
    """Ahead of the main loop and in it, where tiles are small; once what made A is over, which may make them, too."""
    case = Case("gemm", shape=shape, layouts=("row", "column"), recipe="blockwise")
    [gemm] = _gemms(compiled(case, "sm_90"))
    _, wait, after = gemm.text.partition("griddepcontrol.wait")
    assert wait
    assert ("prefetch.global.L2" in after) == asked
    assert any("CCTL.E.PF2" in line for line in rules.main_loop(gemm)) == asked


@pytest.mark.parametrize(("layout", "target"), [("row", "sm_90"), ("column", "sm_90"), ("row", "gfx942")])
def test_b_is_fetched_ahead_of_the_launch_before(layout: str, target: str, compiled: Compile) -> None:
    """And nothing is read, which that launch may still write."""
    gemm = compiled(Case("gemm", shape=(64, 4096, 1024), layouts=("row", layout)), target)[-1]
    ahead, wait, _ = gemm.text.partition("griddepcontrol.wait")
    if target != "sm_90":
        assert not wait
        assert "prefetch" not in gemm.text
        return
    assert "prefetch.global.L2" in ahead
    assert not re.search(r"\bld\.(?:\w+\.)*global|\bcp\.async", ahead)


@pytest.mark.parametrize("shape", [(16, 1024, 8192), (64, 1024, 8192)], ids=str)
def test_parts_are_added_when_all_are_there(shape: tuple[int, int, int], compiled: Compile) -> None:
    """By a kernel that may start while they are made. The one that makes them finishes no tile, and waits for none."""
    gemm, added = compiled(Case("gemm", shape=shape), "sm_90")
    assert (gemm.kernel, gemm.constants["SEPARATE"]) == ("gemm_kernel", "True")
    assert not any(rules.release_scopes(gemm).values())
    assert added.kernel == PARTS
    before, wait, after = added.text.partition("griddepcontrol.wait")
    assert wait
    loads = r"\bld\.global\S*v4"
    assert not re.search(loads, before)
    assert len(re.findall(loads, after)) >= 4


# Two programs on a multiprocessor, several waves, a copied B.
@pytest.mark.parametrize(
    ("shape", "layout"), [((16, 8192, 2048), "row"), (LARGE, "row"), ((64, 4096, 1027), "column")], ids=str
)
def test_b_is_not_fetched_ahead_where_it_gains_nothing(
    shape: tuple[int, int, int], layout: str, compiled: Compile
) -> None:
    gemm = compiled(Case("gemm", shape=shape, layouts=("row", layout)), "sm_90")[-1]
    assert gemm.kernel == "gemm_kernel"
    assert "griddepcontrol.wait" in gemm.text
    assert "prefetch.global" not in gemm.text


def test_what_does_not_fit_is_found() -> None:
    def program(registers: int, shared: int, warps: int) -> Compiled:
        return Compiled("sm_90", "hand_written", {}, "", shared, registers, 0, warps)

    gemm = program(168, FULL_PIPELINE_BYTES, 8)
    assert _fits([gemm] + [program(88, 0, 4)] * 2)
    assert not _fits([gemm] + [program(89, 0, 4)] * 2)
    assert not _fits([gemm, program(32, 4096, 4)])
    assert not _fits([program(16, 0, 32)] * 3)


def test_too_many_stages_are_refused_before_anything_runs(compiled: Compile) -> None:
    """As Triton itself says it."""
    case = Case("gemm", changes=(("num_stages", 8), ("split", "none")))
    text = r"gemm_kernel needs \d{6} bytes of shared memory .* has 232448"
    with pytest.raises(ValueError, match=text):
        compiled(case, "sm_90")


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_split_cases_are_split(target: str, compiled: Compile) -> None:
    """The cases that are there for the fix-up compile it."""
    split = [
        case
        for case, on in COMPILED
        if on == target and ("split", "stream_k") in case.changes and case.dtype == "bfloat16"
    ]
    assert {"gemm", "gemm_all_reduce"} <= {case.op for case in split}
    for case in split:
        assert compiled(case, target)[0].constants["SPLIT"] == "True", str(case)


@pytest.mark.parametrize("case", QUANTIZED, ids=str)
def test_a_group_is_divided_once(case: Case, compiled: Compile) -> None:
    """Fewer divisions than a thread has elements: each may branch, and then the next one waits for it."""
    quantizing = [kernel for kernel in compiled(case, "sm_90") if _quantizes(kernel)]
    assert quantizing
    for kernel in quantizing:
        assert 0 < kernel.count(r"\bdiv\.rn\.f32") < _elements(kernel)


@pytest.mark.parametrize("case", [case for case in QUANTIZED if case.op == "quantize_rms_norm"], ids=str)
def test_a_row_is_read_again_when_all_of_it_is_stored(case: Case, compiled: Compile) -> None:
    """By its program's other threads, too, of which a sanitizer doesn't know."""
    (kernel,) = (kernel for kernel in compiled(case, "sm_90") if kernel.kernel == "quantize_norm_kernel")
    before, barrier, after = kernel.normal().partition("cp.async.bulk.wait_group 0;\nbar.sync 0;")
    assert barrier
    assert re.search(r"\bst\.global", before)
    assert re.search(r"\bld\.global", after)


def _quantizes(kernel: Compiled) -> bool:
    return kernel.kernel in QUANTIZING or kernel.constants.get("SCALES", "0") != "0"


def _elements(kernel: Compiled) -> int:
    """Of 16 bits, that a thread has at once."""
    constants, threads = kernel.constants, 32 * kernel.num_warps
    if kernel.kernel in QUANTIZING:
        return int(constants["ROWS"]) * int(constants["COLUMNS"]) // threads
    return 8 * max(1, int(constants["STEP"]) * int(constants["RANKS"]) // threads)

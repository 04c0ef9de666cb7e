"""The checks of the assembly find what they are there for, and targets don't get one another's code."""

import re

import pytest
import triton

from pyrocshmem.testing import TARGETS, Compiled
from pyrocshmem.versions import version_of
from tests.compile import assembly as rules
from tests.compile import control_flow
from tests.compile.cases import CASES, Case
from tests.compile.conftest import Compile

TIER = 3

# One of the first cases that are compiled. Publishes at system scope from an epilogue and from a consumer.
PUBLISHING = Case(
    "gemm_all_reduce", "bfloat16", changes=(("placement", "beside"), ("algorithm", "two_shot")), hot=True
)
assert PUBLISHING in CASES


@pytest.mark.parametrize("target", TARGETS)
def test_missing_barrier_in_publish_is_found(
    target: str, compiled: Compile, compiled_without_settle: Compile
) -> None:
    assert not any(rules.unsettled_releases(kernel) for kernel in compiled(PUBLISHING, target))
    planted = compiled_without_settle(PUBLISHING, target)
    assert all(rules.unsettled_releases(kernel) for kernel in planted)


def test_each_target_gets_its_own_code(compiled_without_settle: Compile) -> None:
    """One process compiles all three, one after another."""
    kernels = {name: compiled_without_settle(PUBLISHING, name)[0] for name in TARGETS}
    assert ".target sm_90a" in kernels["sm_90"].text
    for name in ("gfx942", "gfx950"):
        assert re.search(rf'\.amdgcn_target\s+"[^"]*{name}\b', kernels[name].text), name
    assert len({kernel.text for kernel in kernels.values()}) == len(TARGETS)


# Fits without pipelined stores, too: two sub-tiles.
TELLING = Case("gemm_all_scatter", changes=(("placement", "own_stream"),), hot=True)
assert TELLING in CASES


@pytest.mark.skipif(
    version_of(triton.__version__) < (3, 8), reason="Triton before 3.8 pipelines beside atomics"
)
@pytest.mark.parametrize(("case", "target"), [(TELLING, "sm_90")], ids=str)
def test_stores_that_an_atomic_slows_are_found(
    case: Case, target: str, compiled: Compile, compiled_by_atomics: Compile
) -> None:
    gemm, planted = compiled(case, target)[0], compiled_by_atomics(case, target)[0]
    assert planted.shared_memory == gemm.shared_memory, "shared memory alone would show it"
    assert not rules.slow_stores(gemm)
    assert rules.slow_stores(planted)
    assert not rules.unsettled_releases(planted)


STORE = "st.global.b32 [%rd1], %r1;"
SETTLE = "cp.async.bulk.wait_group 0;\nbar.sync 0;"
RELEASE = "@p st.release.sys.global.u32 [%rd2], %r3;"
TICKET = "atom.global.gpu.acq_rel.add.u32 %r2, [%rd2], %r3;"
TO_2, IN_1, IN_2, BACK_TO_1 = "bra.uni $L__BB0_2;", "$L__BB0_1:", "$L__BB0_2:", "bra.uni $L__BB0_1;"


def _ptx(*lines: str) -> Compiled:
    return Compiled("sm_90", "hand_written", {}, "\n".join(lines), 0, 0, 0)


@pytest.mark.parametrize(
    ("lines", "is_wrong"),
    [
        ((STORE, SETTLE, RELEASE, "ret;"), False),
        ((STORE, RELEASE, "ret;"), True),
        ((STORE, SETTLE, TICKET, "ret;"), False),
        ((STORE, TICKET, "ret;"), True),
        ((SETTLE, STORE, RELEASE, "ret;"), True),
        ((STORE, "bar.sync 0;", RELEASE, "ret;"), True),
        ((STORE, "cp.async.bulk.wait_group.read 0;\nbar.sync 0;", RELEASE, "ret;"), True),
        # The store stands below the release, and runs before it.
        ((TO_2, IN_1, RELEASE, "ret;", IN_2, STORE, BACK_TO_1), True),
        ((TO_2, IN_1, RELEASE, "ret;", IN_2, STORE, SETTLE, BACK_TO_1), False),
        # One of two ways to the release jumps over the settling.
        ((STORE, "@%p1 bra $L__BB0_1;", SETTLE, "$L__BB0_1:", RELEASE, "ret;"), True),
        # A loop: the store of one round, the release of the next.
        (("$L__BB0_1:", SETTLE, RELEASE, STORE, "@%p1 bra $L__BB0_1;", "ret;"), False),
        (("$L__BB0_1:", RELEASE, STORE, "@%p1 bra $L__BB0_1;", "ret;"), True),
    ],
)
def test_release_rule(lines: tuple[str, ...], is_wrong: bool) -> None:
    assert bool(rules.unsettled_releases(_ptx(*lines))) == is_wrong


def test_scope_of_a_release_is_read() -> None:
    kernel = _ptx(RELEASE, TICKET, RELEASE.replace(".sys", ".gpu"), RELEASE.replace(".sys", ".cta"))
    assert rules.release_scopes(kernel) == {"sys": 1, "gpu": 2, "other": 1}


BLOCKED = "#blocked = #ttg.blocked<{{sizePerThread = [{}], threadsPerWarp = [{}], warpsPerCTA = [{}], order = [{}]}}>"
ONE_EACH, ROWS = BLOCKED.format(1, 32, 8, 0), BLOCKED.format("1, 1", "2, 16", "8, 1", "1, 0")


@pytest.mark.parametrize(
    ("layout", "of", "is_wrong"),
    [
        (ONE_EACH, "tensor<8xi32, #blocked>", False),
        (ONE_EACH, "i32", False),
        (ROWS, "tensor<8xi32, #ttg.slice<{dim = 1, parent = #blocked}>>", True),
        (ROWS, "tensor<8xi32, #blocked>", True),
        (ONE_EACH, "tensor<8xi32, #blocked1>", True),
        (ONE_EACH, "tuple<i32>", True),
    ],
)
def test_flags_outside_the_first_warp_are_found(layout: str, of: str, is_wrong: bool) -> None:
    store = f'%1 = tt.elementwise_inline_asm "@p st.release.sys.global.u32 [$1], $2;" {{}} %2 : {of} -> {of} loc(#loc1)'
    kernel = Compiled("sm_90", "hand_written", {}, "", 0, 0, 0, ttgir=f"{layout}\n{store}\n")
    assert bool(rules.misplaced_releases(kernel)) == is_wrong


def test_waits_for_visible_stores_are_found() -> None:
    store = "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd1, {%r1, %r2}], [%r3];"
    read, visible = "cp.async.bulk.wait_group.read 0;", "cp.async.bulk.wait_group 0;"
    assert not rules.slow_stores(_ptx(read, store, read, store, visible))
    assert rules.slow_stores(_ptx(read, store, visible, store, visible))


def test_gcn_needs_every_wave_to_drain() -> None:
    """On AMD the barrier alone orders nothing: each wave's stores must be done before it."""
    store = "global_store_dword v[0:1], v2, off"
    release = "buffer_wbl2 sc0 sc1\ns_waitcnt vmcnt(0)\nglobal_atomic_swap v[2:3], v1, off sc1"
    drain = ";;#ASMSTART\ns_waitcnt vmcnt(0)\n;;#ASMEND"

    def make(*lines: str) -> Compiled:
        return Compiled("gfx942", "hand_written", {}, "\n".join(lines), 0, 0, 0)

    good = make(store, drain, "s_barrier", release, "s_endpgm")
    assert not rules.unsettled_releases(good)
    assert rules.release_scopes(good) == {"sys": 1, "gpu": 0, "other": 0}
    assert rules.unsettled_releases(make(store, "s_barrier", release, "s_endpgm"))
    assert rules.unsettled_releases(make(store, "s_barrier", drain, release, "s_endpgm"))
    assert rules.release_scopes(make(release.replace("sc0 sc1", "sc1"))) == {"sys": 0, "gpu": 1, "other": 0}


def test_gcn_waits_for_its_write_back() -> None:
    store, atomic = "global_store_dword v[0:1], v2, off", "global_atomic_swap v[2:3], v1, off sc1"
    hasty = f"buffer_wbl2 sc0 sc1\ns_waitcnt lgkmcnt(0)\n{atomic}"
    waits = f"buffer_wbl2 sc0 sc1\ns_waitcnt vmcnt(0) lgkmcnt(0)\n{atomic}"
    written = ";;#ASMSTART\nbuffer_wbl2 sc0 sc1\ns_waitcnt vmcnt(0)\n;;#ASMEND"

    def wrong(*lines: str) -> bool:
        text = "\n".join((*lines, "s_endpgm"))
        return bool(rules.hasty_releases(Compiled("gfx942", "hand_written", {}, text, 0, 0, 0)))

    assert not wrong(store, waits)
    assert wrong(store, hasty)
    assert not wrong(store, written, "s_cbranch_execz .LBB0_1", hasty, ".LBB0_1:")
    assert wrong(written, store, hasty)
    assert wrong(store, "s_cbranch_scc1 .LBB0_1", written, ".LBB0_1:", hasty)
    assert wrong(store, written.replace("sc0 ", ""), hasty)
    assert not wrong(store, written, hasty.replace("sc0 ", ""))


def test_calls_are_not_read_over() -> None:
    with pytest.raises(ValueError, match="call"):
        control_flow.blocks_of("call.uni (retval0), f, (param0);", {})


def test_narrow_accesses_are_counted() -> None:
    ptx = _ptx("st.global.b16 [%rd1], %rs1;", "st.global.v4.b32 [%rd1], {};")
    assert rules.narrow_accesses(ptx) == ["1 x st.global.b16"]
    text = "global_load_ushort v1, v[2:3], off\nglobal_load_dwordx4 v[0:3], v[4:5], off"
    gcn = Compiled("gfx950", "hand_written", {}, text, 0, 0, 0)
    assert rules.narrow_accesses(gcn) == ["1 x global_load_ushort"]

"""Each message is polled for once, every poll gives up in time, and sums stay in the threads that polled. Run at both
ends of the window of Triton's versions: what makes one of them repeat a poll does nothing to the other, and cost 4 us
of an all-reduce of 14 (2 x H200, Triton 3.6)."""

import itertools
import math
import re

import pytest

from pyrocshmem import message, note
from pyrocshmem.testing import Compiled
from tests.compile.assembly import NOTE_LOADS, QUAD_LOADS, endless_polls
from tests.compile.cases import CASES, FEW, SMALL, STRICT, Case
from tests.compile.conftest import Compile

TIER = 1

# A tensor that threads hand to one another through shared memory: its elements.
CONVERTED = re.compile(r"ttg\.convert_layout .*: tensor<([\dx]+)x\w+,")
# What `signal.load_now` becomes.
UNCACHED = "ld.volatile.global"
WHOLE = ("all_reduce", "all_gather", "reduce_scatter", "all_scatter", "broadcast", "all_reduce_rms_norm")
# Between ranks, unless the case names another placement.
NORMS = [case for case in CASES if case.op == "gemm_all_reduce_rms_norm" and case.world_size > 1]
BY_MESSAGES = [
    case for case in CASES if case.op in WHOLE or (case.shape in (SMALL, FEW) and case.world_size > 1)
]
BY_MESSAGES += [case for case in NORMS if case not in BY_MESSAGES and "placement" not in dict(case.changes)]


@pytest.mark.parametrize(("case", "target"), [(case, "sm_90") for case in BY_MESSAGES], ids=str)
def test_polls(case: Case, target: str, compiled: Compile) -> None:
    exchanges = [kernel for kernel in compiled(case, target) if kernel.kernel == "exchange_kernel"]
    assert exchanges or case.op in (
        "gemm",
        "gemm_reduce_scatter",
        "all_gather_gemm",
        "gemm_rms_norm_all_scatter",
    )
    assert [text for kernel in exchanges for text in repeated_polls(case, kernel)] == []
    assert [text for kernel in exchanges for text in endless_polls(kernel)] == []
    assert [text for kernel in exchanges for text in moved_sums(kernel)] == []
    for kernel in exchanges:
        # Two of the report. Warps that ask past the caches queue at one place of L2, but who has not waited for the
        # kernel before must: for the call's number and the abort word.
        assert kernel.count(UNCACHED) == (4 if kernel.constants["TILES"] == "True" else 2)


def repeated_polls(case: Case, kernel: Compiled) -> list[str]:
    """A layout conversion of what was polled for may make the compiler poll again, for every thread's every word."""
    constants = kernel.constants
    if not kernel.nvidia or constants.get("ALIGNED") != "True":
        return []
    # Of partial products that travel in fp32, a unit of 16-bit results is two quads; in a second hop it is one, and so
    # is the first message of tiles.
    sums = constants["SUMS"] == "True"
    wide = sums and case.op.startswith("gemm") and case.dtype != "float32" and {*STRICT} <= {*case.changes}
    hops = (2 if wide else 1) + (sums and constants["GATHERS"] == "True")
    if "int" in case.dtype or (case.recipe and case.op == "all_gather_gemm"):
        hops *= 2  # each has marks, as words of 8-bit rows have
    first = constants.get("TILES") == "True"
    units = max(1, int(constants["STEP"]) * int(constants["RANKS"]) // (32 * kernel.num_warps))
    # Where rows have scales there are two of each program.
    notes = (
        0 if constants.get("PARTS", "0") == "0" else 2 * units if constants.get("SCALES") == "2" else units
    )
    found, noted = kernel.count(QUAD_LOADS), kernel.count(NOTE_LOADS)
    needed = hops * units + first
    wrong = [] if found == needed else [f"{found} loads of messages, {needed} are needed"]
    return wrong + ([] if noted == notes else [f"{noted} loads of notes, {notes} are needed"])


def moved_sums(kernel: Compiled) -> list[str]:
    """Conversions of blocks of units; a number for each rank may be converted, and largest elements of groups."""
    if kernel.constants.get("SCALES") == "3":
        return []
    elements = (math.prod(map(int, sizes.split("x"))) for sizes in CONVERTED.findall(kernel.ttgir))
    return [f"{n} elements are converted" for n in elements if n > int(kernel.constants["RANKS"])]


def test_a_moved_sum_is_found() -> None:
    """The control: a sum of each unit, which Triton 3.9 made of a residual that was loaded by other threads."""
    line = "%9 = ttg.convert_layout %8 : tensor<{}xf32, #ttg.slice<{{dim = 1, parent = #b}}>> -> tensor<{}xf32, #b1>"
    for sizes, moved in (("2", 0), ("64", 1), ("64x2", 1)):
        text = line.format(sizes, sizes)
        kernel = Compiled("sm_90", "exchange_kernel", {"RANKS": "2"}, "", 0, 0, 0, ttgir=text)
        assert len(moved_sums(kernel)) == moved


def test_a_repeated_poll_is_found() -> None:
    """The control: a two-shot all-reduce needs two loads, of integers four, in fp32 partials' three, and one of notes
    for a norm."""
    constants = {"ALIGNED": "True", "SUMS": "True", "GATHERS": "True", "STEP": "32", "RANKS": "4"}
    load, note = (
        "ld.relaxed.sys.global.v4.u32 {w0, w1, w2, w3}, [a];\n",
        "ld.relaxed.sys.global.u64 both, [a];\n",
    )
    for op, dtype, changes, parts, needed in (
        ("all_reduce", "bfloat16", (), 0, 2),
        ("all_reduce", "int64", (), 0, 4),
        ("gemm_all_reduce", "bfloat16", (), 0, 2),
        ("gemm_all_reduce", "bfloat16", STRICT, 0, 3),
        ("gemm_all_reduce_rms_norm", "bfloat16", STRICT, 8, 3),
    ):
        found = {**constants, "PARTS": str(parts)}
        for count, notes in itertools.product(range(1, 6), range(3)):
            kernel = Compiled("sm_90", "exchange_kernel", found, load * count + note * notes, 0, 0, 0)
            case = Case(op, dtype, changes=changes)
            assert bool(repeated_polls(case, kernel)) == (count != needed or notes != (parts > 0))


LOOKS = "ld.relaxed.sys.global.u32 m", "mov.u64 now, %globaltimer", "setp.lt.u64 p", "setp.eq.and.u32 p, m"


@pytest.mark.parametrize("gone", ["", *LOOKS, "setp.ne.u32 p, m, 0;\n@p ", "AGAIN:"])
def test_an_endless_poll_is_found(gone: str) -> None:
    """The control: a poll without the load of the abort word, the look at the clock, or what follows from them."""
    for text in (*map(message._poll_quads, (1, 2)), *map(note._poll_notes, (1, 2))):
        assert gone in text
        lines = text.replace(gone, "") if gone.endswith(("@p ", ":")) else _without_line(text, gone)
        kernel = Compiled("sm_90", "exchange_kernel", {}, lines, 0, 0, 0)
        assert bool(endless_polls(kernel)) == (gone != "")


def _without_line(text: str, start: str) -> str:
    return "\n".join(line for line in text.splitlines() if not start or not line.startswith(start))

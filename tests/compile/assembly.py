"""The rules that the assembly of a kernel is held to.

Rules return what they found wrong as a list of sentences, empty when all is well:

    assert not unsettled_releases(assembly)
"""

import re

from pyrocshmem.testing import Compiled
from tests.compile import control_flow

# Of lines of `_normal`, where what `signal.settle` writes has become the one line SETTLE.
_NVIDIA = {
    "store": re.compile(
        r"\bst\.(?:volatile\.)?global|\bcp\.(?:reduce\.)?async\.bulk\.tensor\S*\.global\.shared"
    ),
    "release": re.compile(r"\b(?:atom|red|st)\.\S*(?:release|acq_rel)"),
    "drain": re.compile(r"^SETTLE$"),
    "barrier": re.compile(r"^SETTLE$"),
}
_AMD = {
    "store": re.compile(r"\b(?:global|flat|buffer)_store_"),
    # A release is a write-back of the caches up to its scope, with the atomic right behind it.
    "release": re.compile(r"\bbuffer_wbl2\b"),
    "drain": re.compile(r"^SETTLE$"),
    "barrier": re.compile(r"\bs_barrier\b"),
}
_TMA_STORE = r"\bcp\.async\.bulk\.tensor\S*\.global\.shared"
_STORE_READ = r"\bcp\.async\.bulk\.wait_group\.read\b"
# Of Triton's intermediate code: where the elements of what `signal.raise_flag` stores lie, none for a number.
_RAISED = re.compile(
    r'elementwise_inline_asm "[^"]*\bst\.release\b[^"]*"[^\n]* : [^\n]*-> (?:tensor<\d+xi32, )?#?(\w+)'
)
_ONE_LANE_EACH = re.compile(
    r"^#(\w+) = #ttg\.blocked<\{sizePerThread = \[\d+\], threadsPerWarp = \[32\], warpsPerCTA = \[\d+\], order = \[0\]",
    re.MULTILINE,
)
# As `signal.settle` writes them. What Triton adds by itself doesn't count: not every version adds it.
_NVIDIA_SETTLE = re.compile(r"^cp\.async\.bulk\.wait_group 0;\nbar\.sync 0;$", re.MULTILINE)
_AMD_SETTLE = re.compile(r"^;+#ASMSTART\ns_waitcnt vmcnt\(0\)\n;+#ASMEND$", re.MULTILINE)
# As `pyrocshmem.write_back` writes it.
_AMD_WRITE_BACK = re.compile(
    r"^;+#ASMSTART\nbuffer_wbl2 ((?:sc0 )?sc1)\ns_waitcnt vmcnt\(0\)\n;+#ASMEND$", re.MULTILINE
)
_AMD_RELEASE = re.compile(
    r"buffer_wbl2([^\n]*)\n(?:s_\w+[^\n]*\n)*?((?:global|flat|buffer)_(?:atomic|store)_[^\n]*)"
)


# Of messages and of notes, as `pyrocshmem.message` and `note` write them for NVIDIA.
QUAD_LOADS = r"\bld\.relaxed\.sys\.global\.v4\.u32"
NOTE_LOADS = r"\bld\.relaxed\.sys\.global\.u64"
_POLLED = re.compile(rf"(?:{QUAD_LOADS}|{NOTE_LOADS}).*")
_MESSAGE_LOOP = re.compile(r"^AGAIN:\n(.*?)^DONE:$", re.DOTALL | re.MULTILINE)
# Round again only where the abort word is 0 and the clock has not reached the deadline.
_GIVES_UP = re.compile(
    r"^ld\.relaxed\.sys\.global\.u32 (\w+), \[(\S+)\];\n"
    r"mov\.u64 (\w+), %globaltimer;\n"
    r"setp\.lt\.u64 (\w+), \3, \S+;\n"
    r"setp\.eq\.and\.u32 (\w+), \1, 0, \4;\n"
    r"@\5 bra AGAIN;\n(?!.*bra AGAIN)",
    re.DOTALL | re.MULTILINE,
)


def _normal(assembly: Compiled) -> str:
    """`Compiled.normal`, with SETTLE for `signal.settle`, and with WRITTEN BACK for `write_back`."""
    text = assembly.normal()
    if assembly.nvidia:
        return _NVIDIA_SETTLE.sub("SETTLE", text)
    return _AMD_WRITE_BACK.sub(r"WRITTEN BACK \1", _AMD_SETTLE.sub("SETTLE", text))


def unsettled_releases(assembly: Compiled) -> list[str]:
    """Releases that some path reaches with no `signal.settle` before them, or with a write in between."""
    kinds = _NVIDIA if assembly.nvidia else _AMD
    if assembly.num_warps == 1:
        # Nobody to meet: AMD's compiler leaves the barrier out.
        kinds = {**kinds, "barrier": kinds["drain"]}
    return control_flow.unsettled(control_flow.blocks_of(_normal(assembly), kinds))


def misplaced_releases(assembly: Compiled) -> list[str]:
    """NVIDIA: blocks of flags of which an element may lie in no lane of the first warp: `signal.raise_flag` would not
    raise it."""
    if not assembly.nvidia:
        return []
    fit = {"i32", *_ONE_LANE_EACH.findall(assembly.ttgir)}
    layouts = _RAISED.findall(assembly.ttgir)
    wrong = [f"flags in layout {layout}" for layout in layouts if layout not in fit]
    if len(layouts) != assembly.ttgir.count("st.release."):
        wrong.append("a release whose layout can't be read")
    return wrong


def slow_stores(assembly: Compiled) -> list[str]:
    """NVIDIA: TMA stores of whole tiles that wait until they are visible, where it would do that shared memory has been
    read: what becomes of those that Triton doesn't pipeline. (Split tiles have as many stores, and those may.)"""
    stores, reads = assembly.count(_TMA_STORE), assembly.count(_STORE_READ)
    if assembly.constants.get("SPLIT") == "True":
        stores //= 2
    return [f"{stores} TMA stores, {reads} waits for reads of shared memory alone"] if reads < stores else []


def hasty_releases(assembly: Compiled) -> list[str]:
    """AMD: releases whose atomic some path reaches before the caches have been written back: the write-back must be
    waited for, right behind it or by `write_back` before."""

    def named(release: re.Match[str]) -> str:
        waits = re.search(r"^s_waitcnt [^\n]*\bvmcnt\(0\)", release[0], re.MULTILINE)
        scope = "sc0 sc1" if "sc0" in release[1] else "sc1"
        return release[0] if waits else f"HASTY {scope}\n{release[2]}"

    text = _AMD_RELEASE.sub(named, _normal(assembly))
    wrong = []
    for scope, enough in (("sc0 sc1", "sc0 sc1"), ("sc1", "(?:sc0 )?sc1")):
        done = re.compile(f"^WRITTEN BACK {enough}$")
        kinds = {
            "store": _AMD["store"],
            "release": re.compile(f"^HASTY {scope}$"),
            "drain": done,
            "barrier": done,
        }
        wrong += control_flow.unsettled(control_flow.blocks_of(text, kinds))
    return wrong


def release_scopes(assembly: Compiled) -> dict[str, int]:
    """How many releases reach the other ranks ("sys") and how many only this GPU ("gpu"); "other" should not occur."""
    scopes = {"sys": 0, "gpu": 0, "other": 0}
    text = _normal(assembly)
    if assembly.nvidia:
        for line in text.splitlines():
            if _NVIDIA["release"].search(line):
                scopes[next((name for name in ("sys", "gpu") if f".{name}." in line), "other")] += 1
        return scopes
    for write_back, atomic in _AMD_RELEASE.findall(text):
        # System scope: the write-back goes to memory, and the atomic itself past this GPU's L2.
        scope = (
            "other"
            if "sc1" not in write_back
            else "sys"
            if "sc0" in write_back and "sc1" in atomic
            else "gpu"
        )
        scopes[scope] += 1
    scopes["other"] += text.count("buffer_wbl2") - sum(scopes.values())
    return scopes


def unacquired_polls(assembly: Compiled) -> list[str]:
    """Whether flags are polled past the caches, and acquired once they are up; on NVIDIA, whether the threads agree on
    that, for each has looked for itself."""
    agreed = True
    if assembly.nvidia:
        polls = assembly.count(r"ld\.volatile\.global")
        loads = assembly.count(r"ld\.acquire\.(?:sys|gpu)\.global\.u32")
        acquires = min(loads, assembly.count(r"fence\.proxy\.async\.global;\nbar\.sync 0;"))
        agreed = assembly.count(r"bar\.red\.and\.pred") >= 2 * min(loads, 1)
    else:
        polls = assembly.count(r"(?:global|flat)_load_dword\b.* sc0 sc1")
        acquires = assembly.count(r"buffer_inv sc0 sc1\ns_waitcnt vmcnt\(0\)")
    wrong = []
    if polls and not acquires:
        wrong.append(f"{polls} polls and no acquire")
    if acquires and not polls:
        wrong.append(f"{acquires} acquires and no poll that goes past the caches")
    if not agreed:
        wrong.append("a wait whose threads need not agree on how it ended")
    return wrong


def endless_polls(assembly: Compiled) -> list[str]:
    """NVIDIA: polls of messages and notes whose loop does not end when a peer gives up or time is over."""
    wrong, in_loops = [], 0
    for loop in _MESSAGE_LOOP.findall(_normal(assembly)):
        polled = _POLLED.findall(loop)
        in_loops += len(polled)
        given_up = _GIVES_UP.search(loop)
        # No other way round: what skips the look does so for a number of rounds.
        skips = re.findall(r"^(@\w+ )?bra AGAIN;$", loop, re.MULTILINE)[:-1]
        if given_up is None or "" in skips or f"[{given_up[2]}]" in "".join(polled):
            wrong.append("a poll that looks at no clock, or no abort word")
    if in_loops != assembly.count(_POLLED.pattern):
        wrong.append(f"{assembly.count(_POLLED.pattern)} loads of messages, {in_loops} in loops that end")
    return wrong


def narrow_accesses(assembly: Compiled) -> list[str]:
    """Accesses of global memory of 2 bytes or fewer: what tiles become when their pointers' alignment is lost."""
    if assembly.nvidia:
        found = re.findall(r"\b(?:ld|st)\.global\.(?:b8|b16|u16)\b", assembly.text)
    else:
        found = re.findall(
            r"\b(?:global|flat|buffer)_(?:load|store)_(?:u?short\w*|[us]?byte\w*)", assembly.text
        )
    return [f"{found.count(each)} x {each}" for each in sorted(set(found))]


def main_loop(kernel: Compiled) -> list[str]:
    """The instructions of the last loop of an NVIDIA kernel that multiplies by wgmma, as the assembler has them."""
    found = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?;)", kernel.machine_code())
    code = [(int(address, 16), line) for address, line in found]
    last = max(at for at, (_, line) in enumerate(code) if "GMMA" in line)
    for at in range(last, len(code)):
        address, line = code[at]
        back = re.search(r"\bBRA 0x([0-9a-f]+)", line)
        if back and int(back[1], 16) < address:
            return [line for begin, line in code[: at + 1] if begin >= int(back[1], 16)]
    raise AssertionError("no branch back behind the last product")

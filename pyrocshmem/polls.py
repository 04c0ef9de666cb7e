"""How a wait looks again and again: loads past the caches, the pause between two of them, and the loop that waits for
words that carry their own flag, as NVIDIA's assembler takes it."""

import triton
import triton.language as tl
from triton.language import target_info

from pyrocshmem import interpreter, target

_INTERPRETED = tl.constexpr(target.interpreted())
_PAUSE_NS = 40
_PAUSE = tl.constexpr(f"nanosleep.u32 {_PAUSE_NS};\nmov.u32 $0, 0;")


def _host_yield():
    # Ranks share the processor's cores on the CPU target, threads its interpreter too: a rank that spins keeps
    # the one it waits for from running. To look once takes half a millisecond there, a small kernel twenty.
    interpreter.pass_on(0.002)


# Triton's dependency scan refuses plain functions; this one runs in the interpreter only.
setattr(_host_yield, "__triton_builtin__", True)  # noqa: B010


@triton.jit
def pause():
    """Between two polls: leave the processor to others."""
    if _INTERPRETED:
        _host_yield()
    elif not target_info.is_hip():
        tl.inline_asm_elementwise(_PAUSE, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def load_now(words, LONG: tl.constexpr = False):
    """A relaxed load at system scope of an int32 (LONG: an int64), or of a block of them. It orders nothing, as
    `signal.wait` does."""
    if _INTERPRETED:
        value = tl.load(words)
    elif target_info.is_hip():
        # Triton 3.6 drops `volatile` on AMD: the load would be served by a cache, for ever.
        SIZE: tl.constexpr = "dwordx2" if LONG else "dword"
        value = tl.inline_asm_elementwise(
            "global_load_" + SIZE + " $0, $1, off sc0 sc1\ns_waitcnt vmcnt(0)",
            "=&v,v", [words.to(tl.int64)], dtype=tl.int64 if LONG else tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        value = tl.load(words, volatile=True)
    return value


@triton.jit
def peek(words, mask, other, safe):
    """What int32 `words` hold right now, `other` where not `mask`; a relaxed load at system scope. safe: an address
    that can always be read."""
    if not _INTERPRETED and target_info.is_hip():
        # As numbers: Triton 3.6 can't choose between pointers into two tensors.
        value = load_now(tl.where(mask, words.to(tl.int64), safe.to(tl.int64)))
        value = tl.where(mask, value, other)
    else:
        value = tl.load(words, mask=mask, other=other, volatile=True)
    return value


def poll_text(loads: list[str], words: list[str], missing: list[str], inputs: int) -> str:
    """PTX of a loop: run `loads` until `missing` leaves predicate q false; every 256th time look at the clock and the
    abort word. Outputs: the words, late. Inputs: `inputs` operands of `loads` and `missing`, then mask, deadline, the
    abort word's address."""
    late, mask, deadline, abort = (f"${len(words) + i}" for i in (0, *range(inputs + 1, inputs + 4)))
    lines = [
        "{",
        ".reg .pred p, q;",
        f".reg .u32 {', '.join(words)}, found, n, m, gone;",
        ".reg .u64 now, both;",
        *(f"mov.u32 {word}, 0;" for word in (*words, "n", "gone")),
        f"setp.eq.u32 p, {mask}, 0;",
        "@p bra DONE;",
        "AGAIN:",
        *loads,
        *missing,
        "@!q bra DONE;",
        # Whoever polls without a pause holds up what is on its way to it (2 x H200: 0.8 us of 3.2 at 1 KiB).
        f"nanosleep.u32 {_PAUSE_NS};",
        "add.u32 n, n, 1;",
        "and.b32 m, n, 255;",
        "setp.ne.u32 p, m, 0;",
        "@p bra AGAIN;",
        f"ld.relaxed.sys.global.u32 m, [{abort}];",
        "mov.u64 now, %globaltimer;",
        f"setp.lt.u64 p, now, {deadline};",
        "setp.eq.and.u32 p, m, 0, p;",
        "@p bra AGAIN;",
        "mov.u32 gone, 1;",
        "DONE:",
        *(f"mov.u32 ${i}, {word};" for i, word in enumerate(words)),
        f"mov.u32 {late}, gone;",
        "}",
    ]
    return "\n".join(lines)

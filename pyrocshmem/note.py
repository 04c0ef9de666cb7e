"""Notes: a word beside the number of its call, 8 bytes that are stored and loaded at once.

A note has arrived when it holds the call's number, as in NCCL's LL protocol. It has an address of its own, which
nothing else uses, so nobody has to empty it as the slots of messages are (`pyrocshmem.message`), and several programs
can read it. Notes lie behind the slots, those of two calls interleaved: ranks are never further apart, since in every
call every rank hears from every rank, by messages or by notes.

    number = message.number(messages)
    note.push(remote(note.first(messages, slot_quads, number) + 2 * place, ..), word, number, mask)
    words, late = note.poll(note.first(messages, slot_quads, number), place, number, mask, deadline, context)
"""

import triton
import triton.language as tl
from triton.language import target_info

from pyrocshmem import message_slots, signal, target
from pyrocshmem.polls import pause, poll_text
from pyrocshmem.trace import now_ns

_INTERPRETED = tl.constexpr(target.interpreted())
_HEAD, _SLOTS = tl.constexpr(message_slots.HEAD_WORDS), tl.constexpr(message_slots.NUM_SLOTS)

# Bytes from a note to the next: between them lies one of the next call.
_APART = 16


def _poll_notes(count: int) -> str:
    """PTX: poll until so many notes, one or two, have the number in the second input; the first is the address of the
    first of them."""
    place, number = f"${count + 1}", f"${count + 2}"
    loads = [
        f"ld.relaxed.sys.global.u64 both, [{place}];",
        "mov.b64 {w0, found}, both;",
        f"setp.ne.u32 q, found, {number};",
    ]
    if count == 2:
        loads[1:1] = [f"ld.relaxed.sys.global.u64 now, [{place}+{_APART}];"]
        loads += ["mov.b64 {w1, found}, now;", f"setp.ne.or.u32 q, found, {number}, q;"]
    return poll_text(loads, [f"w{i}" for i in range(count)], [], 2)


_POLL_ONE, _POLL_TWO = tl.constexpr(_poll_notes(1)), tl.constexpr(_poll_notes(2))


@triton.jit
def first(messages, slot_quads, number):
    """Where the notes of call `number` begin: an int64 pointer; note number i is 2 i elements behind it."""
    behind = messages + _HEAD + tl.cast(slot_quads, tl.int64) * (4 * _SLOTS)
    return behind.to(tl.pointer_type(tl.int64), bitcast=True) + (number & 1)


@triton.jit
def push(pointer, word, number, mask):
    """Store int32 words as notes of call `number` at `pointer` (a block of int64 pointers), in the own heap or a
    peer's, so that a poll there sees them soon."""
    both = tl.cast(number, tl.int64) << 32 | (word.to(tl.int64) & 0xFFFFFFFF)
    if _INTERPRETED:
        tl.store(pointer, both, mask=mask)
    elif target_info.is_hip():
        tl.store(pointer, both, mask=mask, cache_modifier=".wt")
    else:
        tl.inline_asm_elementwise(
            """{
            .reg .pred p;
            setp.ne.u32 p, $3, 0;
            @p st.relaxed.sys.global.u64 [$1], $2;
            mov.u32 $0, 0;
            }""",
            "=r,l,l,r", [pointer.to(tl.int64), both, mask.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def poll(notes, place, number, mask, deadline, context, COUNT: tl.constexpr = 1):
    """Wait, where `mask`, for COUNT (1 or 2) notes from number `place` (a block) on of call `number`, whose notes begin
    at `notes` (`first`).

    Returns (a tuple of COUNT blocks of words, late): zeros where not `mask`; late is 1 where they did not come before
    `deadline`, or a peer gave up.
    """
    abort = context.abort
    # An address that can be read where nothing is waited for.
    pointer = notes + 2 * tl.where(mask, place, 0)
    if not _INTERPRETED and not target_info.is_hip():
        where, called, there = pointer.to(tl.int64), tl.cast(number, tl.int32), mask.to(tl.int32)
        if COUNT == 1:
            word, late = tl.inline_asm_elementwise(
                _POLL_ONE, "=r,=r,l,r,r,l,l", [where, called, there, deadline, abort.to(tl.int64)],
                dtype=(tl.int32, tl.int32), is_pure=False, pack=1,
            )  # fmt: skip
            words = (word,)
        else:
            word, more, late = tl.inline_asm_elementwise(
                _POLL_TWO, "=r,=r,=r,l,r,r,l,l", [where, called, there, deadline, abort.to(tl.int64)],
                dtype=(tl.int32, tl.int32, tl.int32), is_pure=False, pack=1,
            )  # fmt: skip
            words = (word, more)  # type: ignore[assignment]
    else:
        late = _all_missing(pointer, number, mask, COUNT)
        aborted = signal.load_now(abort)
        waiting = tl.max(late)
        while (waiting != 0) & (aborted == 0) & (now_ns() < deadline):
            pause()
            waiting = tl.max(_all_missing(pointer, number, mask, COUNT))
            aborted = signal.load_now(abort)
        # The loop can't carry blocks: they are read once more.
        late = _all_missing(pointer, number, mask, COUNT)
        words = ()  # type: ignore[assignment]
        for k in tl.static_range(COUNT):
            here = mask & (late == 0)
            word = tl.where(here, signal.load_now(pointer + 2 * k, True), 0).to(tl.int32)
            words = words + (word,)  # type: ignore[assignment]
    return words, late


@triton.jit
def _all_missing(pointer, number, mask, COUNT: tl.constexpr):
    """1 where one of COUNT notes has not arrived."""
    missing = _missing(pointer, number, mask)
    if COUNT == 2:
        missing |= _missing(pointer + 2, number, mask)
    return missing


@triton.jit
def _missing(pointer, number, mask):
    """1 where a note has not arrived."""
    return tl.where(mask & (signal.load_now(pointer, True) >> 32 != number), 1, 0)

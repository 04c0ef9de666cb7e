"""Messages: data that carry their own flag, for calls whose size is microseconds.

A receiver's slot holds SENTINEL in every 32-bit word until a peer's data overwrite it: what is not SENTINEL has
arrived, so there is no flag to raise after the data and no second trip to read them. The sentinel is a NaN that
arithmetic never makes, in float32 and in both halves in bfloat16 and float16; data with just these bits are sent
as the NaN beside it (`clean`). Integers can't be sent this way.

Three slots rotate. A call pushes into its peers' slot `count % 3`, and puts SENTINEL back into its own slot of the
call before; the next but one will use that again:

    count, slot = message.begin(messages, slot_quads)                  # the own slot of this call
    message.push(remote(slot + ..), words, mask, ..)                   # 16 bytes each
    message.restore(messages, slot_quads, count, STEP)                 # the slot of the call before
    last = signal.is_last(context, False)                              # all have read the count
    words, late = message.poll(slot + .., mask, deadline, context)
    if last: message.advance(messages, count, used_words)

Why that is enough: a rank that has finished call n + 1 has heard from every peer in it, and a peer sends in call
n + 1 only after its call n has put the sentinels back. Hence the one rule for callers: in every call every rank
hears from every rank, be it 16 bytes. Ranks whose data are late make `poll` give up after the wait budget.
What such a rank still pushes when its peers have given up lands in their slots alone, which nobody takes for a
result: the peers' record stands until `Heap.recover`, which empties the slots.
The count lies before the slots: a graph that holds others, from before they grew, goes on with its own.

The protocol is NCCL's and FlashInfer's "low latency" idea, as published with NVIDIA's Lamport all-reduce kernels.
A quad is 16 bytes, four words: what one thread stores and loads at once. Blocks of quads travel as tuples of four
int32 blocks.
"""

import triton
import triton.language as tl
from triton.language import target_info

from pyrocshmem import signal, target
from pyrocshmem.trace import now_ns

_EMPTY = "0xFFF3FFF3"
SENTINEL = tl.constexpr(int(_EMPTY, 16) - (1 << 32))
QUAD_BYTES = 16
NUM_SLOTS = 3
# Words before the slots, a line of a cache: how many calls there were so far, and how many words the last of them used
# of its slot.
HEAD_WORDS = 32
COUNT, USED = 0, 1

_PAUSE_NS = 40
_INTERPRETED = tl.constexpr(target.interpreted())
# The count of calls starts again here: a multiple of the number of slots.
_WRAP = tl.constexpr(3 << 28)
_HEAD, _COUNT, _USED = tl.constexpr(HEAD_WORDS), tl.constexpr(COUNT), tl.constexpr(USED)


@triton.jit
def begin(messages, slot_quads, WAITED: tl.constexpr = True):
    """(number of this call, its slot in `messages`, which holds three of `slot_quads` quads each). WAITED: the kernel
    has waited for the one before it."""
    count = _head(messages + _COUNT, WAITED)
    return count, slot_of(messages, slot_quads, count)


@triton.jit
def number(messages):
    """The number of the call that is to close next, for a kernel that has waited for the one before it."""
    return _head(messages + _COUNT, True)


@triton.jit
def _head(word, WAITED: tl.constexpr):
    """A word before the slots. Past the caches where the kernel before may have yet to write it; not elsewhere, since
    all warps that ask one place of L2 are answered one after another, two a nanosecond: a gather of 16 MiB, which has
    65536, took 66 us instead of 49 (2 x H200)."""
    if WAITED:
        value = tl.load(word)
    else:
        value = signal.load_now(word)
    return value


@triton.jit
def slot_of(messages, slot_quads, count):
    """The slot of call number `count`, of the own messages or a peer's (`device.remote`)."""
    return messages + _HEAD + tl.cast(count % 3, tl.int64) * slot_quads * 4


@triton.jit
def restore(messages, slot_quads, count, STEP: tl.constexpr, WAITED: tl.constexpr = True):
    """The grid puts SENTINEL back into what the call before used of its slot, STEP words at a time. WAITED: as in
    `begin`."""
    used = _head(messages + _USED, WAITED)
    slot = slot_of(messages, slot_quads, count + 2)
    empty = tl.full((STEP,), SENTINEL, tl.int32)
    for step in range(tl.program_id(0), tl.cdiv(used, STEP), tl.num_programs(0)):
        offsets = step * STEP + tl.arange(0, STEP)
        tl.store(slot + offsets, empty, mask=offsets < used)


@triton.jit
def advance(messages, count, used_words):
    """Close the call, in the program for which `signal.is_last` was true: all have read the count by then."""
    tl.store(messages + _COUNT, (count + 1) % _WRAP)
    tl.store(messages + _USED, used_words)


@triton.jit
def clean(word):
    """`word`, or the NaN beside it where it looks like an empty slot."""
    return tl.where(word == SENTINEL, SENTINEL - 1, word)


@triton.jit
def fetch(pointer, mask):
    """The quads at `pointer` (a block of int32 pointers to 16 aligned bytes), zeros where not `mask`."""
    if not _INTERPRETED and not target_info.is_hip():
        words = tl.inline_asm_elementwise(
            """{
            .reg .pred p;
            setp.ne.u32 p, $5, 0;
            mov.u32 $0, 0; mov.u32 $1, 0; mov.u32 $2, 0; mov.u32 $3, 0;
            @p ld.global.v4.u32 {$0, $1, $2, $3}, [$4];
            }""",
            "=r,=r,=r,=r,l,r", [pointer.to(tl.int64), mask.to(tl.int32)],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1,
        )  # fmt: skip
    else:
        words = (
            tl.load(pointer, mask=mask, other=0),
            tl.load(pointer + 1, mask=mask, other=0),
            tl.load(pointer + 2, mask=mask, other=0),
            tl.load(pointer + 3, mask=mask, other=0),
        )
    return words


@triton.jit
def keep(pointer, words, mask):
    """Store quads at `pointer`, for kernels that follow."""
    w0, w1, w2, w3 = words
    if not _INTERPRETED and not target_info.is_hip():
        tl.inline_asm_elementwise(
            """{
            .reg .pred p;
            setp.ne.u32 p, $6, 0;
            @p st.global.v4.u32 [$1], {$2, $3, $4, $5};
            mov.u32 $0, 0;
            }""",
            "=r,l,r,r,r,r,r", [pointer.to(tl.int64), w0, w1, w2, w3, mask.to(tl.int32)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.store(pointer, w0, mask=mask)
        tl.store(pointer + 1, w1, mask=mask)
        tl.store(pointer + 2, w2, mask=mask)
        tl.store(pointer + 3, w3, mask=mask)


@triton.jit
def push(pointer, words, mask):
    """Store quads at `pointer`, in the own heap or a peer's, such that whoever polls there sees them soon."""
    w0, w1, w2, w3 = words
    if not _INTERPRETED and not target_info.is_hip():
        tl.inline_asm_elementwise(
            """{
            .reg .pred p;
            setp.ne.u32 p, $6, 0;
            @p st.relaxed.sys.global.v4.u32 [$1], {$2, $3, $4, $5};
            mov.u32 $0, 0;
            }""",
            "=r,l,r,r,r,r,r", [pointer.to(tl.int64), w0, w1, w2, w3, mask.to(tl.int32)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        _push_word(pointer, w0, mask)
        _push_word(pointer + 1, w1, mask)
        _push_word(pointer + 2, w2, mask)
        _push_word(pointer + 3, w3, mask)


@triton.jit
def _push_word(pointer, word, mask):
    if _INTERPRETED:
        tl.store(pointer, word, mask=mask)
    else:
        # Through the caches: a plain store may stay in the own L2 until the kernel ends.
        tl.store(pointer, word, mask=mask, cache_modifier=".wt")


@triton.jit
def deadline_ns(context):
    """When a wait that starts now gives up, in nanoseconds of `trace.now_ns`."""
    return now_ns() + tl.load(context[0] + signal.BUDGET_US).to(tl.int64) * 1000


def _poll_text(quads: int) -> str:
    """PTX: load so many quads until none has an empty word; look at the clock and the abort word every 256th time.
    Outputs: the words, late. Inputs: an address a quad, mask, deadline, address of the abort word."""
    words = [f"w{i}" for i in range(4 * quads)]
    late, *addresses, mask, deadline, abort = (f"${4 * quads + i}" for i in range(4 + quads))
    lines = [
        "{",
        ".reg .pred p, q;",
        f".reg .u32 {', '.join(words)}, n, m, gone;",
        ".reg .u64 now;",
        *(f"mov.u32 {word}, 0;" for word in (*words, "n", "gone")),
        f"setp.eq.u32 p, {mask}, 0;",
        "@p bra DONE;",
        "AGAIN:",
        *(
            f"ld.relaxed.sys.global.v4.u32 {{{', '.join(words[4 * i : 4 * i + 4])}}}, [{address}];"
            for i, address in enumerate(addresses)
        ),
        f"setp.eq.u32 q, w0, {_EMPTY};",
        *(f"setp.eq.or.u32 q, {word}, {_EMPTY}, q;" for word in words[1:]),
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


_POLL_ONE, _POLL_TWO = tl.constexpr(_poll_text(1)), tl.constexpr(_poll_text(2))


@triton.jit
def poll(pointer, mask, deadline, context, apart=4, QUADS: tl.constexpr = 1):
    """Wait for QUADS (1 or 2) quads each, `apart` words from one another, the first at `pointer` (a block of int32
    pointers into the own heap), where `mask`.

    Returns (a tuple of blocks of words, late): zeros where not `mask`; late is 1 where the data did not come before
    `deadline`, or a peer gave up.
    """
    control, abort, record, heap_bases = context
    if not _INTERPRETED and not target_info.is_hip():
        # Each thread waits for its own words: no barrier between the arrival of the last and its use.
        where, there, stop = pointer.to(tl.int64), mask.to(tl.int32), abort.to(tl.int64)
        if QUADS == 1:
            w0, w1, w2, w3, late = tl.inline_asm_elementwise(
                _POLL_ONE, "=r,=r,=r,=r,=r,l,r,l,l", [where, there, deadline, stop],
                dtype=(tl.int32, tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1,
            )  # fmt: skip
            words = (w0, w1, w2, w3)
        else:
            w0, w1, w2, w3, w4, w5, w6, w7, late = tl.inline_asm_elementwise(
                _POLL_TWO, "=r,=r,=r,=r,=r,=r,=r,=r,=r,l,l,r,l,l",
                [where, (pointer + apart).to(tl.int64), there, deadline, stop],
                dtype=(
                    tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32,
                ),
                is_pure=False, pack=1,
            )  # fmt: skip
            words = (w0, w1, w2, w3, w4, w5, w6, w7)  # type: ignore[assignment]
    else:
        waiting = tl.max(_missing(pointer, mask, abort, apart, QUADS))
        aborted = signal.load_now(abort)
        while (waiting != 0) & (aborted == 0) & (now_ns() < deadline):
            signal.pause()
            waiting = tl.max(_missing(pointer, mask, abort, apart, QUADS))
            aborted = signal.load_now(abort)
        # The loop can't carry the words themselves: they are read once more.
        late = _missing(pointer, mask, abort, apart, QUADS)
        words = ()  # type: ignore[assignment]
        for k in tl.static_range(4 * QUADS):
            word = signal.peek(pointer + k // 4 * apart + k % 4, mask, 0, abort)
            words = words + (word,)  # type: ignore[assignment]
    return words, late


@triton.jit
def _missing(pointer, mask, abort, apart, QUADS: tl.constexpr):
    """1 where a word has not arrived."""
    missing = tl.where(signal.peek(pointer, mask, 0, abort) == SENTINEL, 1, 0)
    for k in tl.static_range(1, 4 * QUADS):
        word = signal.peek(pointer + k // 4 * apart + k % 4, mask, 0, abort)
        missing |= tl.where(word == SENTINEL, 1, 0)
    return missing

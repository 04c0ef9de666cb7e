"""Messages: data that carry their own flag, for calls that take microseconds.

A receiver's slot holds SENTINEL in every 32-bit word until a peer's data overwrite it: a word that is not SENTINEL has
arrived, so there is no flag to raise after the data and no second trip to read them. The receiver then puts SENTINEL
back. It is a NaN that arithmetic never makes, as a float32 and, in both halves, as bfloat16 and float16; data
with just these bits are sent as the NaN beside it (`clean`). `pyrocshmem.collectives.any_bits` sends integers.

The memory has a head, whose first word is the number of the next call, and two slots, which calls use in turn:

    number = message.number(messages)
    slot = message.slot_of(messages, slot_quads, number)               # this rank's
    message.push(remote(slot + ..), words, mask, ..)                   # 16 bytes each
    last = signal.is_last(context, False)                              # in the last program: all have read the number
    words, late = message.poll(slot + .., mask, deadline, context)
    message.restore(slot + .., mask)                                   # empty what this program has polled for
    if last: message.advance(messages, number)

A quad is 16 bytes, four words: what one thread stores and loads at once. Blocks of quads travel as tuples of four
int32 blocks.

Why that is enough: a rank that has finished call n + 1 has heard from every peer in it, and a peer sends in call n + 1
only when its call n has ended, at which its slot was empty again. So in call n + 2 the rank may push into the slot of
call n. Hence the one rule for callers: in every call every rank hears from every rank, be it 16 bytes.

Ranks whose data are late make a poll give up after the wait budget. What such a rank still pushes when its peers have
given up lands in their slots alone, where nobody takes it for a result: the peers' record stands until `Heap.recover`,
which empties the slots. Slots that grow are new memory with a number of its own, so that a graph captured before goes
on with the old slots and their number.

The idea is that of NCCL's "low latency" protocol and of the Lamport all-reduce kernels published by NVIDIA and in
FlashInfer. `pyrocshmem.note` has messages that need no emptying.
"""

import triton
import triton.language as tl
from triton.language import target_info

from pyrocshmem import message_slots, signal, target
from pyrocshmem.polls import pause, poll_text
from pyrocshmem.trace import now_ns

SENTINEL = tl.constexpr(message_slots.SENTINEL)
_EMPTY = hex(message_slots.SENTINEL & 0xFFFFFFFF)

_INTERPRETED = tl.constexpr(target.interpreted())
# Numbers are from 0 to this one, and begin again.
_LAST_NUMBER = tl.constexpr((1 << 31) - 1)
_HEAD = tl.constexpr(message_slots.HEAD_WORDS)


@triton.jit
def number(messages, WAITED: tl.constexpr = True):
    """The number of this call. WAITED: the kernel has waited for the one before it to end.

    Without WAITED the load bypasses the caches, since the kernel before may have yet to write it. With it it doesn't:
    L2 answers warps that ask for one address one after another, two a nanosecond, and a gather of 16 MiB, which has
    65536 of them, took 66 us instead of 49 (2 x H200).
    """
    if WAITED:
        value = tl.load(messages)
    else:
        value = signal.load_now(messages)
    return value


@triton.jit
def slot_of(messages, slot_quads, number):
    """Where the slot of call `number` begins, in this rank's messages or a peer's (`device.remote`). slot_quads: its
    length."""
    return messages + _HEAD + tl.cast(number & 1, tl.int64) * slot_quads * 4


@triton.jit
def restore(pointer, mask, apart=4, QUADS: tl.constexpr = 1):
    """Put SENTINEL back into quads that this program has polled for, with the same arguments. Don't use what that poll
    returned afterwards, unless it was reduced: the compiler may poll once more for it."""
    # Several threads may have polled for one quad.
    signal.meet()
    empty = tl.full(pointer.shape, SENTINEL, tl.int32)
    for k in tl.static_range(QUADS):
        keep(pointer + k * apart, (empty, empty, empty, empty), mask)


@triton.jit
def advance(messages, number):
    """Close the call, in the program for which `signal.is_last` was true: all programs have read the number by then."""
    tl.store(messages, (number + 1) & _LAST_NUMBER)


@triton.jit
def clean(word):
    """`word`, or the NaN beside it where it equals SENTINEL."""
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
    """Store quads at `pointer`, for kernels that follow: an ordinary store, 16 bytes at once."""
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
    """Store quads at `pointer`, in the own heap or a peer's, so that a poll there sees them soon: relaxed, at system
    scope."""
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
    return now_ns() + tl.load(context.control + signal.BUDGET_US).to(tl.int64) * 1000


def _poll_quads(quads: int) -> str:
    """PTX: poll until no word of so many quads is SENTINEL; their addresses are the first inputs."""
    words = [f"w{i}" for i in range(4 * quads)]
    loads = [
        f"ld.relaxed.sys.global.v4.u32 {{{', '.join(words[4 * i : 4 * i + 4])}}}, [${4 * quads + 1 + i}];"
        for i in range(quads)
    ]
    missing = [
        f"setp.eq.u32 q, w0, {_EMPTY};",
        *(f"setp.eq.or.u32 q, {word}, {_EMPTY}, q;" for word in words[1:]),
    ]
    return poll_text(loads, words, missing, quads)


_POLL_ONE, _POLL_TWO = tl.constexpr(_poll_quads(1)), tl.constexpr(_poll_quads(2))


@triton.jit
def poll(pointer, mask, deadline, context, apart=4, QUADS: tl.constexpr = 1):
    """Wait, where `mask`, for QUADS (1 or 2) quads a lane: the first at `pointer` (a block of int32 pointers into the
    own heap), the second `apart` words behind it.

    Returns (a tuple of 4 QUADS blocks of words, late): zeros where not `mask`; late is 1 where the data did not come
    before `deadline` (`deadline_ns`), or a peer gave up: don't use them.
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
            pause()
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

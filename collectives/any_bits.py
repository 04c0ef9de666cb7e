"""Messages of any bits, for integers: `pyrocshmem.message` can't send a word that equals its sentinel.

Such a word is sent as DOUBT, the number beside SENTINEL. A quad that has a DOUBT, whichever it stands for, is followed
by a second one, its marks: 1 for each word that was SENTINEL, 0 for the others. Who finds a DOUBT waits for the marks,
which lie in a region of their own, `apart` words behind the quad. So every pattern of bits arrives, and data without
these two words, as a rule all, cost comparisons and no bytes.

    any_bits.push(peers + .., apart, words, mask)
    words, doubted, late = any_bits.poll(slot + .., apart, mask, deadline, context)
    any_bits.restore(slot + .., apart, mask, doubted)

Arguments as those of `message`.
"""

import triton
import triton.language as tl

from pyrocshmem import message

_DOUBT = tl.constexpr(message.SENTINEL.value - 1)


@triton.jit
def push(pointer, apart, words, mask):
    """Send quads, and the marks of those that need them."""
    cleaned, marks = (), ()
    for k in tl.static_range(4):
        cleaned = cleaned + (message.clean(words[k]),)  # type: ignore[assignment]
        marks = marks + (tl.where(words[k] == message.SENTINEL, 1, 0),)  # type: ignore[assignment]
    message.push(pointer, cleaned, mask)
    message.push(pointer + apart, marks, mask & doubtful(cleaned))


@triton.jit
def doubtful(words):
    """Whether a word of a quad that was sent is a DOUBT."""
    w0, w1, w2, w3 = words
    return (w0 == _DOUBT) | (w1 == _DOUBT) | (w2 == _DOUBT) | (w3 == _DOUBT)


@triton.jit
def poll(pointer, apart, mask, deadline, context):
    """Returns (words as they were before `push`, which quads had marks, late)."""
    sent, late = message.poll(pointer, mask, deadline, context)
    doubted = mask & doubtful(sent)
    marks, later = message.poll(pointer + apart, doubted, deadline, context)
    words = ()
    for k in tl.static_range(4):
        words = words + (tl.where(marks[k] == 1, message.SENTINEL, sent[k]),)  # type: ignore[assignment]
    return words, doubted, late | later


@triton.jit
def restore(pointer, apart, mask, doubted):
    """Empty what was polled for, the marks first: a compiler that computes `doubted` anew reads the quads again."""
    message.restore(pointer + apart, doubted)
    message.restore(pointer, mask)

"""Kernels of the device API's and the signals' tests, each with its negative controls as constexpr switches."""

import contextlib
from typing import Any

import triton
import triton.language as tl

from pyrocshmem import device as shmem
from pyrocshmem import interpreter, signal, status, target

_OP = tl.constexpr(int(status.Op.TEST))
# Elements: no heap is so large.
_FAR = tl.constexpr(1 << 43)


def run(kernel: Any, num_programs: int, *arguments: Any, **constants: Any) -> None:
    """One launch. On the CPU target as the ops launch theirs, which takes a quarter of the time."""
    with interpreter.taken() if target.interpreted() else contextlib.nullcontext():
        kernel[(num_programs,)](*arguments, **constants)


@triton.jit
def move_kernel(
    x, y, z, n, peer, source_peer, heap_bases, OP: tl.constexpr, OTHER: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One move between x [n] and y or z, every third element left out. y: local; z: symmetric, copied from."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n
    mask = inside & (offsets % 3 != 1)
    if OP == "load":
        tl.store(y + offsets, shmem.load(x + offsets, peer, heap_bases, mask, OTHER), mask=inside)
    elif OP == "store":
        shmem.store(x + offsets, tl.load(y + offsets, mask=mask), peer, heap_bases, mask)
    elif OP == "get":
        shmem.get(x + offsets, y + offsets, peer, heap_bases, mask)
    elif OP == "put":
        shmem.put(x + offsets, y + offsets, peer, heap_bases, mask)
    else:
        shmem.copy(x + offsets, z + offsets, peer, source_peer, heap_bases, mask)


@triton.jit
def atomic_kernel(
    x, values, compare, seen, n, peer, heap_bases,
    OP: tl.constexpr, SEM: tl.constexpr, SCOPE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One atomic on `peer`'s x [n], every third element, far from any heap, left out. seen: what was there."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = (offsets < n) & (offsets % 3 != 1)
    place = x + offsets + tl.where(mask, 0, _FAR)
    value = tl.load(values + offsets, mask=mask)
    guess = tl.load(compare + offsets, mask=mask)
    if OP == "add":
        before = shmem.atomic_add(place, value, peer, heap_bases, mask, SEM, SCOPE)
    elif OP == "sub":
        before = shmem.atomic_sub(place, value, peer, heap_bases, mask, SEM, SCOPE)
    elif OP == "xchg":
        before = shmem.atomic_xchg(place, value, peer, heap_bases, mask, SEM, SCOPE)
    elif OP == "and":
        before = shmem.atomic_and(place, value, peer, heap_bases, mask, SEM, SCOPE)
    elif OP == "or":
        before = shmem.atomic_or(place, value, peer, heap_bases, mask, SEM, SCOPE)
    elif OP == "xor":
        before = shmem.atomic_xor(place, value, peer, heap_bases, mask, SEM, SCOPE)
    elif OP == "min":
        before = shmem.atomic_min(place, value, peer, heap_bases, mask, SEM, SCOPE)
    elif OP == "max":
        before = shmem.atomic_max(place, value, peer, heap_bases, mask, SEM, SCOPE)
    else:
        before = shmem.atomic_cas(place, guess, value, peer, heap_bases, mask, SEM, SCOPE)
    tl.store(seen + offsets, before, mask=mask)


@triton.jit
def scalar_kernel(x, out, peer, heap_bases):
    """On a peer's x: out[0] = x[0]; x[1] = 11; out[1] = x[2], which goes up by 5; x[3] = out[2]; out[3] = x[4], which
    becomes 12 if it is 104; x[5] would become 13, but is left out."""
    tl.store(out, shmem.load(x, peer, heap_bases))
    shmem.store(x + 1, 11, peer, heap_bases)
    tl.store(out + 1, shmem.atomic_add(x + 2, 5, peer, heap_bases))
    shmem.put(x + 3, out + 2, peer, heap_bases)
    tl.store(out + 3, shmem.atomic_cas(x + 4, 104, 12, peer, heap_bases, peer >= 0))
    shmem.atomic_cas(x + 5, tl.load(x + 5), 13, 1 - peer, heap_bases, peer < 0)


@triton.jit
def count_kernel(x, z, counter, peer, heap_bases, BLOCK: tl.constexpr):
    """Put z into `peer`'s x, then count there that it is done."""
    offsets = tl.arange(0, BLOCK)
    shmem.put(x + offsets, z + offsets, peer, heap_bases)
    tl.debug_barrier()
    shmem.atomic_add(counter, 1, peer, heap_bases)


@triton.jit
def ticket_kernel(counter, taken, count, heap_bases):
    """Take `count` numbers from rank 0's counter, one after another."""
    for i in range(count):
        tl.store(taken + i, shmem.atomic_add(counter, 1, 0, heap_bases))


@triton.jit
def _dawdle(place):
    """Some time: a hundred dependent reads. Returns 0 when the word at `place` holds 0."""
    total = 0
    for _ in range(100):
        total += tl.load(place + total, volatile=True)
    return total


@triton.jit
def litmus_kernel(
    data, flags, zero, wrong, rounds, context,
    EARLY: tl.constexpr, CONSTANT: tl.constexpr, WORLD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Message passing: rank 0 writes a block in rank 1's heap and raises its flag; rank 1 compares and acknowledges.

    wrong[0]: rounds in which any element was not this round's; wrong[1]: rounds that were played. Controls: EARLY
    raises the flag before the data; CONSTANT waits for the same number in every round.
    """
    control, abort, record, heap_bases = context
    rank = tl.load(control + signal.RANK)
    start = tl.load(control + signal.EPOCH)
    offsets = tl.arange(0, BLOCK)
    one = tl.arange(0, 1)
    bad = 0
    played = 0
    for i in range(rounds):
        epoch = start + 1 + i
        number = epoch
        acknowledged = epoch - 1
        if CONSTANT:
            number = start + 1
            acknowledged = tl.where(i == 0, start, start + 1)
        if rank == 0:
            if signal.wait(flags + 1 + one, one == 0, acknowledged, i, 1, context, _OP, WORLD):
                if EARLY:
                    signal.publish(flags, number, 1, heap_bases)
                if EARLY or CONSTANT:
                    epoch += _dawdle(zero)
                shmem.store(data + offsets, tl.full((BLOCK,), 1, tl.int32) * epoch, 1, heap_bases)
                if not EARLY:
                    signal.publish(flags, number, 1, heap_bases)
                played += 1
        elif signal.wait(flags + one, one == 0, number, i, 0, context, _OP, WORLD):
            stale = tl.load(data + offsets) != epoch
            bad += tl.max(stale.to(tl.int32), axis=0)
            played += 1
            signal.publish(flags + 1, number, 0, heap_bases)
    tl.store(wrong, bad)
    tl.store(wrong + 1, played)


@triton.jit
def wait_kernel(flags, tiles, peers, out, expected, context, LANES: tl.constexpr, WORLD: tl.constexpr):
    """Wait for LANES flags; out[0] is 1 when they came and 2 when not, out[1] only written when they came."""
    lanes = tl.arange(0, LANES)
    epoch = tl.load(expected)
    there = signal.wait(
        flags + lanes, lanes >= 0, epoch, tl.load(tiles + lanes), tl.load(peers + lanes), context, _OP, WORLD
    )
    if there:
        tl.store(out + 1, 1)
    tl.store(out, tl.where(there, 1, 2))


@triton.jit
def call_kernel(seen, closed, context, WORLD: tl.constexpr):
    """A call that does nothing: every program notes its epoch, the one that closes the call counts."""
    epoch = signal.begin(context, WORLD > 1, WORLD)
    tl.store(seen + tl.program_id(0), epoch)
    if signal.end(context, epoch):
        tl.store(closed, tl.load(closed) + 1)


@triton.jit
def aborted_kernel(word, context, LOOKS: tl.constexpr, WORLD: tl.constexpr):
    """A call during which a peer sets the abort word to `word` (0: none does), after this rank's last wait. LOOKS: it
    ends as it must; the control ends without a look."""
    epoch = signal.begin(context, False, WORLD)
    if tl.program_id(0) == 0:
        tl.store(context.abort, tl.load(word))
    signal.settle()
    if LOOKS:
        signal.end(context, epoch)
    elif signal.is_last(context):
        tl.store(context.control + signal.EPOCH, epoch)


@triton.jit
def chain_kernel(flags, seen, context, WORLD: tl.constexpr):
    """Program p waits for program p - 1, whose number it finds in `seen`."""
    epoch = signal.begin(context, False, WORLD)
    program = tl.program_id(0)
    one = tl.arange(0, 1)
    value = 0
    if program > 0:
        if signal.wait(flags + program - 1 + one, one == 0, epoch, program, 0, context, _OP, WORLD, "gpu"):
            value = tl.load(seen + program - 1) + 1
    tl.store(seen + program, value)
    signal.settle()
    signal.raise_flag(flags + program, epoch, scope="gpu")
    signal.end(context, epoch)


@triton.jit
def meet_kernel(stamps, out, context, ENTER: tl.constexpr, TOGETHER: tl.constexpr, WORLD: tl.constexpr):
    """out[p] is what rank p had in its stamp when this rank went on. A rank stamps its own heap with the epoch first.

    ENTER: wait until all have entered; TOGETHER: until all leave. With neither, nothing says that the peers have come.
    """
    control, abort, record, heap_bases = context
    tl.store(stamps, tl.load(control + signal.EPOCH) + 1)
    epoch = signal.begin(context, True, WORLD)
    met = epoch > 0
    if ENTER:
        met = signal.wait_entered(epoch, context, _OP, WORLD)
    if signal.end(context, epoch):
        if TOGETHER:
            met = signal.barrier(epoch, context, _OP, WORLD)
    if met:
        for peer in tl.static_range(WORLD):
            tl.store(out + peer, shmem.load(stamps, peer, heap_bases))

"""Litmus kernels: rounds of the smallest exchanges that the protocol is made of, thousands in one launch.

Each guard is a constexpr, so that a control takes it out. Every wait has the workspace's budget. Word 0 of `flags` is
raised by the sender at the receiver, word 1 by the receiver at the sender; round i has the epoch `start + 1 + i`.
"""

import triton
import triton.language as tl

from pyrocshmem import signal, status
from pyrocshmem.device import remote
from pyrocshmem.polls import pause
from pyrocshmem.trace import now_us

_OP = tl.constexpr(int(status.Op.TEST))


@triton.jit
def _spin(flag, epoch, context):
    """`signal.wait` of one flag without what makes it a wait: relaxed, and nothing is acquired after it."""
    control, abort, record, heap_bases = context
    budget = tl.load(control + signal.BUDGET_US)
    begin = now_us()
    up = 0
    aborted = tl.load(abort, volatile=True)
    while (up == 0) & (aborted == 0) & (now_us() - begin < budget):
        pause()
        up = tl.where(tl.load(flag, volatile=True) - epoch >= 0, 1, 0)
        aborted = tl.load(abort, volatile=True)
    if up == 0:
        # The rounds that follow must not wait again.
        tl.store(abort, 1 + tl.load(control + signal.RANK))
    return up == 1


@triton.jit
def _uneven(zeros, offsets, peer, heap_bases):
    """Zeros that come late to half of the warps: four times over the link, one after another, and not from the own
    memory. That is longer than a flag takes to arrive and its receiver to read the first words."""
    far = (offsets // 128) % 8 >= 4
    places = tl.where(far, remote(zeros, peer, heap_bases).to(tl.int64), zeros.to(tl.int64))
    late = offsets * 0
    for _ in tl.static_range(4):
        late = tl.load(places.to(zeros.dtype) + late, volatile=True)
    return late


@triton.jit
def message_kernel(
    data, tiles, zeros, flags, found, start, sender, receiver, rounds, context,
    HOW: tl.constexpr, SETTLED: tl.constexpr, ACQUIRED: tl.constexpr,
    WORLD: tl.constexpr, RING: tl.constexpr, PIECES: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Message passing. `sender` writes the round's epoch into `data`, then raises a flag; `receiver` compares.

    HOW: "push", into the receiver's heap; "pull", at home, from where the receiver reads; "tma", as push, by
    `tiles`, a descriptor of the receiver's `data`. data: int32 [RING, PIECES x SIZE, SIZE]: a round has a place and
    a flag (word 2 + place) of its own among RING of them, which are used again once all have been compared. found:
    rounds with a stale word, rounds played, and a sum that keeps the early reads.
    Controls: not SETTLED leaves out all of `signal.settle`, not ACQUIRED what follows a wait. (The drain of TMA stores
    has none: without it 200,000 rounds each way between two H200s were right; tests/compile reads it in the assembly.)
    """
    control, abort, record, heap_bases = context
    rank = tl.load(control + signal.RANK)
    first = tl.load(start) + 1
    offsets = tl.arange(0, SIZE * SIZE)
    one = tl.arange(0, 1)
    bad = 0
    played = 0
    sums = 0
    free = first > 0
    for i in range(rounds):
        epoch = first + i
        turn = i % RING
        flag = flags + 2 + turn
        mine = data + turn * (PIECES * SIZE * SIZE)
        if rank == sender:
            if (turn == 0) & (i > 0):
                free = signal.wait(flags + 1 + one, one == 0, epoch - 1, i, receiver, context, _OP, WORLD)
            if free:
                if HOW == "tma":
                    for piece in range(PIECES):
                        row = (turn * PIECES + piece) * SIZE
                        tiles.store([row, 0], tl.full((SIZE, SIZE), 1, tl.int32) * epoch)
                else:
                    place = mine
                    if HOW == "push":
                        place = remote(mine, receiver, heap_bases)
                    for piece in range(PIECES):
                        value = epoch + _uneven(zeros, offsets, receiver, heap_bases)
                        tl.store(place + piece * SIZE * SIZE + offsets, value)
                if SETTLED:
                    signal.publish(flag, epoch, receiver, heap_bases)
                else:
                    signal.raise_flag(remote(flag, receiver, heap_bases), epoch)
                played += 1
        else:
            place = mine
            if HOW == "pull":
                place = remote(mine, sender, heap_bases)
            # What is read before its flag has come lies in L1, where only the acquire looks past it.
            for piece in range(PIECES):
                sums += tl.max(tl.load(place + piece * SIZE * SIZE + offsets), axis=0)
            if ACQUIRED:
                came = signal.wait(flag + one, one == 0, epoch, i, sender, context, _OP, WORLD)
            else:
                came = _spin(flag, epoch, context)
            if came:
                stale = 0
                for piece in range(PIECES):
                    value = tl.load(place + piece * SIZE * SIZE + offsets)
                    stale = tl.maximum(stale, tl.max((value != epoch).to(tl.int32), axis=0))
                bad += stale
                played += 1
                if turn == RING - 1:
                    signal.publish(flags + 1, epoch, sender, heap_bases)
    tl.store(found, bad)
    tl.store(found + 1, played)
    tl.store(found + 2, sums)


@triton.jit
def buffering_kernel(
    cell, flags, missed, found, start, peer, rounds, context, MET: tl.constexpr, WORLD: tl.constexpr
):
    """Store buffering: each rank writes the other's cell and then reads its own; at least one must find it written.

    missed[i]: whether this rank did not find what its peer wrote in round i. MET: both raise a flag and wait for the
    other's in between, as `signal.barrier` does, and then neither may miss anything; without it both may, for a
    store may wait in the own GPU while the load behind it goes ahead.
    """
    control, abort, record, heap_bases = context
    first = tl.load(start) + 1
    one = tl.arange(0, 1)
    played = 0
    for i in range(rounds):
        epoch = first + i
        # Both start a round together.
        signal.publish(flags, epoch, peer, heap_bases)
        if signal.wait(flags + one, one == 0, epoch, i, peer, context, _OP, WORLD):
            tl.store(remote(cell, peer, heap_bases), epoch)
            if MET:
                signal.publish(flags + 1, epoch, peer, heap_bases)
                if signal.wait(flags + 1 + one, one == 0, epoch, i, peer, context, _OP, WORLD):
                    played += 1
            else:
                played += 1
            seen = tl.load(cell, volatile=True)
            tl.store(missed + i, (seen - epoch < 0).to(tl.int8))
    tl.store(found + 1, played)


@triton.jit
def receive_kernel(
    data, flags, found, start, sender, rounds, context, WORLD: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """The receiver's side of `rounds` copies, each followed by the copy of its flag: row i of `data` [rounds, WIDTH]
    must hold epoch `start + 1 + i` once word 2 + i of `flags` has reached `start + 1`. Then word 0 at the sender."""
    control, abort, record, heap_bases = context
    epoch = tl.load(start) + 1
    offsets = tl.arange(0, WIDTH)
    one = tl.arange(0, 1)
    bad = 0
    played = 0
    for i in range(rounds):
        if signal.wait(flags + 2 + i + one, one == 0, epoch, i, sender, context, _OP, WORLD):
            value = tl.load(data + i * WIDTH + offsets)
            bad += tl.max((value != epoch + i).to(tl.int32), axis=0)
            played += 1
    tl.store(found, tl.load(found) + bad)
    tl.store(found + 1, tl.load(found + 1) + played)
    signal.publish(flags, epoch, sender, heap_bases)


@triton.jit
def received_kernel(flags, found, start, receiver, context, WORLD: tl.constexpr):
    """The sender waits until the receiver has compared all copies of the batch that began at `start`."""
    one = tl.arange(0, 1)
    if signal.wait(flags + one, one == 0, tl.load(start) + 1, -1, receiver, context, _OP, WORLD):
        tl.store(found + 1, tl.load(found + 1) + 1)

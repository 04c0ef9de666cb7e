"""Signals: the one place that orders memory between programs and ranks.

Calls on a workspace are numbered; the number of a call is its epoch. A flag is an int32 that holds the epoch of the
last call whose data are complete. `publish` makes all earlier writes of the whole program visible, then raises the
flag; `wait` returns once the flag has reached the epoch, or gives up. docs/architecture.md has a diagram.

    epoch = signal.begin(context, True, WORLD)      # the number of this call; tells the peers we are in it
    ...write a tile...
    signal.publish(flag, epoch, peer, heap_bases)   # drain, barrier, release at system scope
    if signal.wait(flags, mask, epoch, tiles, peers, context, OP, WORLD):
        ...read the tiles...
    signal.end(context, epoch)                      # the last program of the grid closes the call

Rules that the rest of the project relies on:
- Epochs, not resets. Nothing is zeroed between calls; the counter lives in device memory, so a CUDA graph can be
  replayed. Epochs are compared by their int32 difference, so wrap-around is harmless.
- `entered[p] >= n` says that peer p has begun call n, hence has finished call n - 1: its buffers of call n - 1 may be
  overwritten. For buffers that alternate between two slots `entered[p] >= n - 1` is enough.
- Waits end. A wait gives up when its budget runs out or the rank's abort word is set; it then records {op, rank, peer,
  tile, expected, seen} in `status` (host-visible), sets the abort word of every peer, and the kernel runs to its end
  without touching what it did not get. `Heap.check` turns the record into `PeerTimeout` or `PeerAborted`.
- A rank that gives up tells its peers before it publishes anything more, and `end` looks at the abort word: a call that
  took anything from such a rank never passes for done. `wait_entered` looks at it too: a rank that comes too late
  writes to nobody.
- No other file uses `tl.atomic_*` on a flag.

`context` is a `Context`.

Measured on H200: a signal takes 0.8 us one way relaxed, 1.3 us with release/acquire at system scope.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language import target_info

from pyrocshmem import dependent_launch, status, target
from pyrocshmem.device import remote
from pyrocshmem.polls import load_now, pause, peek
from pyrocshmem.trace import now_us
from pyrocshmem.write_back import write_back

# Words of `control`.
EPOCH = tl.constexpr(0)  # number of the last finished call
TICKET = tl.constexpr(1)  # programs of this call that have ended
BUDGET_US = tl.constexpr(2)  # how long a wait may last
RANK = tl.constexpr(3)
BEGUN = tl.constexpr(4)  # programs of this call's GEMM that have begun
CURRENT = tl.constexpr(5)  # number of the call that was entered last: what copy engines raise flags to
ENTERED = tl.constexpr(32)  # per peer: the last call it has entered
BARRIER = tl.constexpr(40)  # per peer: the last call whose barrier it has reached
CONTROL_WORDS = 64

# Width of a block with one lane a rank: flags of all peers are raised and read at once.
MAX_WORLD = tl.constexpr(8)

# A flag is up when it is 0 to 3 calls past the one waited for. A wider window would let a flag that was not used for
# 2^31 calls (hours of decoding) pass for a fresh one.
_WINDOW, _SYSTEM = tl.constexpr(4), tl.constexpr("sys")
_INTERPRETED = tl.constexpr(target.interpreted())
_TIMEOUT = tl.constexpr(int(status.Code.TIMEOUT))
_ABORTED = tl.constexpr(int(status.Code.ABORTED))
_WORD_CODE = tl.constexpr(int(status.Word.CODE))
_WORD_OP = tl.constexpr(int(status.Word.OP))
_WORD_RANK = tl.constexpr(int(status.Word.RANK))
_WORD_PEER = tl.constexpr(int(status.Word.PEER))
_WORD_TILE = tl.constexpr(int(status.Word.TILE))
_WORD_EXPECTED = tl.constexpr(int(status.Word.EXPECTED))
_WORD_SEEN = tl.constexpr(int(status.Word.SEEN))
_WORD_WAITED_US = tl.constexpr(int(status.Word.WAITED_US))
_WORD_EPOCH = tl.constexpr(int(status.Word.EPOCH))


class Context(NamedTuple):
    """What a kernel needs to take part in calls: tensors on the host, pointers in a kernel.

    control: int32[64], words as above; on the heap when there are peers. abort: int32[1], 0 or 1 + the rank that gave
    up. record: int64[16] (`pyrocshmem.status`). heap_bases: int64[1 + max(R, 8)] (`Heap`).
    """

    control: Any
    abort: Any
    record: Any
    heap_bases: Any


@triton.jit
def meet():
    """Barrier of this program's threads; orders nothing between programs."""
    if not _INTERPRETED:
        tl.debug_barrier()


@triton.jit
def settle():
    """Every write that any thread of this program has made, TMA stores included, is done before this returns
    in any thread.

    Inline assembly on NVIDIA, because `tl.debug_barrier` in a loop with `flatten=True` switches its
    pipelining off, and because `desc.store` waits only until shared memory may be reused.
    """
    if _INTERPRETED:
        pass
    elif target_info.is_hip():
        tl.inline_asm_elementwise("s_waitcnt vmcnt(0)", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
        tl.debug_barrier()
    else:
        tl.inline_asm_elementwise(
            "cp.async.bulk.wait_group 0;\nbar.sync 0;\nmov.u32 $0, 0;",
            "=r", [], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def _agreed(value):
    """The least `value`, 0 or 1, of this program's threads, which meet. Warps look at memory for themselves, not at the
    same time: those that went different ways from there would wait for one another's loads, barriers and matrix
    instructions for ever. AMD's waves have no instruction for it, and go on."""
    if not _INTERPRETED and not target_info.is_hip():
        value = tl.inline_asm_elementwise(
            "{\n.reg .pred p, q;\nsetp.ne.u32 p, $1, 0;\nbar.red.and.pred q, 0, p;\nselp.u32 $0, 1, 0, q;\n}",
            "=r,r", [value], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    return value


@triton.jit
def _acquire(flags, mask, safe, scope: tl.constexpr):
    """Make visible, to all threads and to TMA loads, what `flags` (raised, where `mask`) announce. safe: an address
    that can always be read."""
    if _INTERPRETED:
        pass
    elif target_info.is_hip():
        tl.inline_asm_elementwise(
            "buffer_inv sc0 sc1\ns_waitcnt vmcnt(0)", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )
        tl.debug_barrier()
    else:
        # Neither `fence.acq_rel` nor a proxy fence of more than global memory, which wait for all that this program has
        # written, too: 3 us behind a tile's stores. Of this load, whose value nobody needs, ptxas keeps CCTL.IVALL.
        there = tl.where(mask, flags.to(tl.int64), safe.to(tl.int64))
        load: tl.constexpr = "ld.acquire." + scope + ".global.u32 $0, [$1];"
        tl.inline_asm_elementwise(load, "=r,l", [there], dtype=tl.int32, is_pure=False, pack=1)
        meet: tl.constexpr = "fence.proxy.async.global;\nbar.sync 0;\nmov.u32 $0, 0;"
        tl.inline_asm_elementwise(meet, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def raise_flag(flag, epoch, mask=None, scope: tl.constexpr = _SYSTEM):
    """Set `flag` (an address or a block of up to 32 addresses, local or remote) to `epoch` with release. Only after
    `settle`, which brings in the other threads' writes: `publish` does both.

    Inline assembly on NVIDIA, because Triton 3.8 and later don't pipeline the TMA stores of a loop that has a release
    atomic: each store then waits until it is visible. A plain store does, as a word has one writer; of the abort word,
    which has several, any one's value will do.
    """
    if _INTERPRETED or target_info.is_hip():
        write_back(scope)
        tl.atomic_xchg(flag, epoch, mask=mask, sem="release", scope=scope)
    else:
        LANES: tl.constexpr = flag.numel
        tl.static_assert(LANES <= 32, "flags of more than one warp's lanes")
        told = tl.full((), 1, tl.int32) if mask is None else mask.to(tl.int32)
        # Every warp holds all of the block; the first one's lanes store, each its own.
        tl.inline_asm_elementwise(
            "{\n.reg .pred p;\n.reg .u32 lane;\nmov.u32 lane, %tid.x;\nsetp.ne.u32 p, $3, 0;\n"
            f"setp.lt.and.u32 p, lane, {LANES}, p;\n@p st.release.{scope}.global.u32 [$1], $2;\nmov.u32 $0, 0;\n}}",
            "=r,l,r,r", [flag.to(tl.int64), epoch, told], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def publish(flag, epoch, peer, heap_bases, mask=None, scope: tl.constexpr = _SYSTEM):
    """Make this program's writes visible, then set `flag` in the heap of `peer` (a rank, or a block of ranks)
    to `epoch`.

    Example: publish(flags + tile, 7, lanes, heap_bases, lanes < WORLD) raises flags[tile] to 7 on every rank.
    """
    settle()
    raise_flag(remote(flag, peer, heap_bases), epoch, mask, scope)


@triton.jit
def word(flags, index, writer):
    """The address of flag number `index` of rank `writer`, each a number or a block.

    Every word has one writer, whatever the op and the shape of a call: calls that follow one another use `flags`
    differently, and a late write of one rank for the last call must not undo another's for the next. The flags of all
    ranks for one index lie side by side, to be read at once.

    Example: index 3, writer 1 is flags[25].
    """
    return flags + index * MAX_WORLD + writer


@triton.jit
def _is_up(flags, mask, epoch, safe):
    """1 where a flag has reached `epoch`. A peer is ahead by two calls at most; any other difference is of an old
    call."""
    ahead = peek(flags, mask, epoch, safe) - epoch
    return tl.where((ahead >= 0) & (ahead < _WINDOW), 1, 0)


@triton.jit
def _pick(values, lane, lanes):
    """Element `lane` of a block, or of a scalar that stands for all lanes."""
    return tl.sum(tl.where(lanes == lane, values, 0), axis=0)


@triton.jit
def report(
    peer, tile, expected, seen, waited_us, call, context, OP: tl.constexpr, WORLD: tl.constexpr,
    MET: tl.constexpr = False,
):  # fmt: skip
    """Record that a wait of call number `call` ended without what it waited for; when no rank gave up before,
    tell the others. The first record stands: it names the cause, later ones its consequences. MET: all threads of the
    program are here, not those of some warps alone."""
    control, abort, record, heap_bases = context
    rank = tl.load(control + RANK)
    aborter = load_now(abort) - 1
    aborted = aborter >= 0
    if MET:
        aborted = _agreed(tl.where(aborted, 1, 0)) == 1
    if tl.load(record + _WORD_CODE, volatile=True) == 0:
        tl.store(record + _WORD_OP, tl.full((), OP, tl.int64))
        tl.store(record + _WORD_RANK, rank.to(tl.int64))
        tl.store(record + _WORD_PEER, tl.where(aborted, aborter, peer).to(tl.int64))
        tl.store(record + _WORD_TILE, tl.cast(tile, tl.int64))
        tl.store(record + _WORD_EXPECTED, tl.cast(expected, tl.int64))
        tl.store(record + _WORD_SEEN, tl.cast(seen, tl.int64))
        tl.store(record + _WORD_WAITED_US, waited_us.to(tl.int64))
        tl.store(record + _WORD_EPOCH, tl.cast(call, tl.int64))
        # By one thread, without a barrier: warps may differ on whether there is a record. The host reads the rest when
        # it sees the code.
        if not _INTERPRETED:
            HIP: tl.constexpr = target_info.is_hip()
            fence: tl.constexpr = "s_waitcnt vmcnt(0)" if HIP else "fence.acq_rel.sys;\nmov.u32 $0, 0;"
            tl.inline_asm_elementwise(fence, "=r", [], dtype=tl.int32, is_pure=False, pack=1)
        tl.store(record + _WORD_CODE, tl.where(aborted, _ABORTED, _TIMEOUT).to(tl.int64))
    if not aborted:
        if WORLD > 1:
            lanes = tl.arange(0, MAX_WORLD)
            publish(abort, 1 + rank, lanes, heap_bases, (lanes < WORLD) & (lanes != rank))
        # The own word last: who goes on because of it finds the record whole, and publishes what may be wrong.
        settle()
        raise_flag(abort, 1 + rank)


@triton.jit
def wait(
    flags, mask, epoch, tiles, peers, context, OP: tl.constexpr, WORLD: tl.constexpr, scope: tl.constexpr = _SYSTEM,
    call=None, FIRST: tl.constexpr = False,
):  # fmt: skip
    """Wait until all of `flags` (a block of addresses in the own memory, where `mask`) have reached `epoch`.

    True: what they announce can be read. False: gave up; do not read it.

    For the record alone: OP (a `status.Op`), `tiles` and `peers` (a block each, or one number for all lanes) name what
    was waited for, and `call` the number of the call where that is not `epoch`. scope: of the acquire. FIRST: look at
    the abort word first, and give up if it is set even where all flags are up.
    """
    control, abort, record, heap_bases = context
    if FIRST:
        told = load_now(abort)
    up = tl.min(_is_up(flags, mask, epoch, abort), axis=0)
    if FIRST:
        up = tl.where(told == 0, up, 0)
    up = _agreed(up)
    if up == 0:
        budget = tl.load(control + BUDGET_US)
        start = now_us()
        waited = start - start
        going = _may_go_on(abort, waited, budget, flags.shape[0])
        while (up == 0) & (going == 1):
            pause()
            up = tl.min(_is_up(flags, mask, epoch, abort), axis=0)
            waited = now_us() - start
            going = _may_go_on(abort, waited, budget, flags.shape[0])
        up = _agreed(up)
        if up == 0:
            lanes = tl.arange(0, flags.shape[0])
            lane = tl.argmin(_is_up(flags, mask, epoch, abort), axis=0)
            seen = _pick(peek(flags, mask, epoch, abort), lane, lanes)
            peer, tile = _pick(peers, lane, lanes), _pick(tiles, lane, lanes)
            report(peer, tile, epoch, seen, waited, epoch if call is None else call, context, OP, WORLD, True)
    _acquire(flags, mask, abort, scope)
    return up == 1


@triton.jit
def _may_go_on(abort, waited, budget, LANES: tl.constexpr):
    """1 until a wait's budget is spent or the abort word is set. Flags of several warps are looked at in common, so
    these leave the loop together; fewer are each warp's own affair."""
    going = tl.where((load_now(abort) == 0) & (waited < budget), 1, 0)
    return _agreed(going) if LANES > 32 else going


@triton.jit
def begin(context, ENTERS: tl.constexpr, WORLD: tl.constexpr):
    """The epoch of this call. ENTERS: program 0 tells every peer that this rank has entered the call, hence finished
    the one before, and every program counts itself for `wait_begun`."""
    control, abort, record, heap_bases = context
    dependent_launch.allow_next()
    epoch = tl.load(control + EPOCH) + 1
    if ENTERS:
        if tl.program_id(0) == 0:
            lanes = tl.arange(0, MAX_WORLD)
            tl.store(control + CURRENT, epoch)
            publish(control + ENTERED + tl.load(control + RANK), epoch, lanes, heap_bases, lanes < WORLD)
        tl.atomic_add(control + BEGUN, 1, sem="relaxed", scope="gpu")
    return epoch


@triton.jit
def wait_begun(count, context, OP: tl.constexpr, WORLD: tl.constexpr):
    """Wait until `count` programs of this call have begun, hence occupy their multiprocessors. False: gave up."""
    control, one = context.control, tl.arange(0, 1)
    # Of one program the count is a constant, which has no type yet.
    count, rank, call = tl.cast(count, tl.int32), tl.load(control + RANK), tl.load(control + EPOCH) + 1
    return wait(control + BEGUN + one, one == 0, count, -1, rank, context, OP, WORLD, "gpu", call)


@triton.jit
def wait_entered(epoch, context, OP: tl.constexpr, WORLD: tl.constexpr):
    """Wait until every peer has entered call `epoch`. False: gave up, or a peer has, even if all have entered."""
    control, abort, record, heap_bases = context
    lanes = tl.arange(0, MAX_WORLD)
    # A single rank tells nobody that it enters, and waits for nobody.
    peers = (lanes < WORLD) & (WORLD > 1)
    return wait(control + ENTERED + lanes, peers, epoch, -1, lanes, context, OP, WORLD, FIRST=WORLD > 1)


@triton.jit
def end(context, epoch):
    """Close the call: the last program of the grid to come here writes the number from which the next call counts.
    True in that program."""
    control, abort, record, heap_bases = context
    told = load_now(abort)  # its latency hides behind the ticket's
    last = is_last(context)
    if last:
        tl.store(control + BEGUN, 0)
        tl.store(control + EPOCH, epoch)
    if told != 0:
        # What this program took may be what a peer published after it had given up.
        report(0, -1, epoch, epoch, epoch - epoch, epoch, context, 0, 1)
    return last


@triton.jit
def is_last(context, ORDERS: tl.constexpr = True):
    """True in the last program of the grid to come here; what the others did before is visible to it. Without ORDERS
    nothing is visible, it knows only that they have read what they read: a release would wait until all that was pushed
    has arrived. Either way threads of a program meet, so that one may then store where another has loaded: a result may
    be its operand."""
    if ORDERS:
        settle()
        write_back("gpu")
    else:
        meet()
    sem: tl.constexpr = "acq_rel" if ORDERS else "relaxed"
    last = tl.atomic_add(context.control + TICKET, 1, sem=sem, scope="gpu") == tl.num_programs(0) - 1
    if last:
        tl.store(context.control + TICKET, 0)
    return last


@triton.jit
def barrier(epoch, context, OP: tl.constexpr, WORLD: tl.constexpr):
    """Between ranks, once a call, by one program of each: everything that the programs of any rank did before
    is visible after it on all. False: gave up.

    In the last program of a call (`end`) it keeps what follows on the stream from overwriting what peers still read.
    """
    control, abort, record, heap_bases = context
    lanes = tl.arange(0, MAX_WORLD)
    publish(control + BARRIER + tl.load(control + RANK), epoch, lanes, heap_bases, lanes < WORLD)
    return wait(control + BARRIER + lanes, lanes < WORLD, epoch, -1, lanes, context, OP, WORLD)

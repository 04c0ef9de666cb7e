"""Device API: read, write and update a peer's heap from inside a Triton kernel.

A heap pointer addresses the same offset on every rank, so a remote address is `pointer - heap_bases[0] +
heap_bases[1 + peer]`, where `heap_bases` (`Heap.heap_bases`, int64[1 + max(R, 8)]) holds this rank's own base first and
then the base of every rank.

    import triton
    import triton.language as tl
    from pyrocshmem import device as shmem

    @triton.jit
    def push_kernel(x, n, peer, heap_bases, BLOCK: tl.constexpr):
        offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        shmem.put(x + offsets, x + offsets, peer, heap_bases, mask=offsets < n)

Argument order everywhere: pointer, value (or local pointer), peer, heap_bases, mask, sem, scope. `pointer` always
points into this rank's own heap (a scalar or a block of pointers); `peer` is a rank of the heap's group, possibly the
own one. Nothing here checks `peer`: check it before the launch. Atomics default to the strongest ordering (`acq_rel`,
`sys`), because a flag with a weaker one is the bug that shows up only on another machine. Flags themselves belong to
`pyrocshmem.signal`.

Atomics work on int32 and int64 (add also on floats); Triton 3.6 drops `scope="sys"` of `atomic_cas` on
gfx942.
"""

import triton
import triton.language as tl

from pyrocshmem.write_back import write_back

# Heaps start on 2 MiB boundaries, so the distance between two of them keeps any alignment of `pointer`.
# Triton can't know that of a number it loads from memory: without the hint, stores through the result become
# 2 bytes wide.
_HEAP_ALIGNMENT = tl.constexpr(4096)
_STRONGEST = tl.constexpr("acq_rel")
_SYSTEM = tl.constexpr("sys")


@triton.jit
def remote(pointer, peer, heap_bases):
    """The address in `peer`'s heap that corresponds to `pointer` in ours.

    Example: own base 0x1000, peer's base 0x9000, pointer 0x1040: the result is 0x9040.
    """
    distance = tl.multiple_of(tl.load(heap_bases + 1 + peer) - tl.load(heap_bases), _HEAP_ALIGNMENT)
    return (pointer.to(tl.pointer_type(tl.int8), bitcast=True) + distance).to(pointer.dtype, bitcast=True)


@triton.jit
def others(pointer, rank, heap_bases, WORLD: tl.constexpr):
    """`pointer` in the heap of every peer of `rank`, which is this rank: a tuple of WORLD - 1, the neighbour's first,
    so that ranks that walk it in order don't all write to the same one."""
    places = ()
    for k in tl.static_range(WORLD - 1):
        places = places + (remote(pointer, (rank + 1 + k) % WORLD, heap_bases),)  # type: ignore[assignment]
    return places


@triton.jit
def load(pointer, peer, heap_bases, mask=None, other=None):
    """Values at `pointer` in `peer`'s heap. Unordered: wait for a flag first."""
    return tl.load(remote(pointer, peer, heap_bases), mask=mask, other=other)


@triton.jit
def store(pointer, value, peer, heap_bases, mask=None):
    """Write `value` at `pointer` in `peer`'s heap. Unordered: publish a flag afterwards."""
    tl.store(remote(pointer, peer, heap_bases), value, mask=mask)


@triton.jit
def get(pointer, target, peer, heap_bases, mask=None):
    """Copy from `pointer` in `peer`'s heap to the local address `target`."""
    tl.store(target, load(pointer, peer, heap_bases, mask), mask=mask)


@triton.jit
def put(pointer, source, peer, heap_bases, mask=None):
    """Copy from the local address `source` to `pointer` in `peer`'s heap."""
    store(pointer, tl.load(source, mask=mask), peer, heap_bases, mask)


@triton.jit
def copy(pointer, source, peer, source_peer, heap_bases, mask=None):
    """Copy from `source` in `source_peer`'s heap to `pointer` in `peer`'s heap."""
    store(pointer, load(source, source_peer, heap_bases, mask), peer, heap_bases, mask)


@triton.jit
def _place(pointer, peer, heap_bases, sem: tl.constexpr, scope: tl.constexpr):
    """`remote`, for an atomic."""
    if sem != "relaxed" and sem != "acquire":
        write_back(scope)
    return remote(pointer, peer, heap_bases)


@triton.jit
def atomic_add(
    pointer, value, peer, heap_bases, mask=None, sem: tl.constexpr = _STRONGEST, scope: tl.constexpr = _SYSTEM
):
    """Add `value` at `pointer` in `peer`'s heap; returns what was there before."""
    return tl.atomic_add(
        _place(pointer, peer, heap_bases, sem, scope), value, mask=mask, sem=sem, scope=scope
    )


@triton.jit
def atomic_sub(
    pointer, value, peer, heap_bases, mask=None, sem: tl.constexpr = _STRONGEST, scope: tl.constexpr = _SYSTEM
):
    """Subtract `value` at `pointer` in `peer`'s heap; returns what was there before."""
    return tl.atomic_add(
        _place(pointer, peer, heap_bases, sem, scope), -value, mask=mask, sem=sem, scope=scope
    )


@triton.jit
def atomic_cas(
    pointer, compare, value, peer, heap_bases, mask=None, sem: tl.constexpr = _STRONGEST, scope: tl.constexpr = _SYSTEM
):  # fmt: skip
    """Where `pointer` in `peer`'s heap holds `compare`, put `value` there; returns what was there before."""
    place = _place(pointer, peer, heap_bases, sem, scope)
    if mask is None:
        before = tl.atomic_cas(place, compare, value, sem=sem, scope=scope)
    else:
        # Triton's has no mask. A masked-out lane compares the word of one that isn't with 0 and puts 0 there, which
        # changes nothing. Where all are masked out, nothing is done.
        none = tl.zeros(place.shape, place.dtype.element_ty)
        address = tl.where(mask, place.to(tl.int64), 0)
        some = tl.max(address) if len(place.shape) > 0 else address
        before = none
        if some != 0:
            place = tl.where(mask, address, some).to(place.dtype)
            before = tl.atomic_cas(
                place, tl.where(mask, compare, none), tl.where(mask, value, none), sem=sem, scope=scope
            )
    return before


@triton.jit
def atomic_xchg(
    pointer, value, peer, heap_bases, mask=None, sem: tl.constexpr = _STRONGEST, scope: tl.constexpr = _SYSTEM
):
    """Put `value` at `pointer` in `peer`'s heap; returns what was there before."""
    return tl.atomic_xchg(
        _place(pointer, peer, heap_bases, sem, scope), value, mask=mask, sem=sem, scope=scope
    )


@triton.jit
def atomic_and(
    pointer, value, peer, heap_bases, mask=None, sem: tl.constexpr = _STRONGEST, scope: tl.constexpr = _SYSTEM
):
    """Bitwise and with `value` at `pointer` in `peer`'s heap; returns what was there before."""
    return tl.atomic_and(
        _place(pointer, peer, heap_bases, sem, scope), value, mask=mask, sem=sem, scope=scope
    )


@triton.jit
def atomic_or(
    pointer, value, peer, heap_bases, mask=None, sem: tl.constexpr = _STRONGEST, scope: tl.constexpr = _SYSTEM
):
    """Bitwise or with `value` at `pointer` in `peer`'s heap; returns what was there before."""
    return tl.atomic_or(_place(pointer, peer, heap_bases, sem, scope), value, mask=mask, sem=sem, scope=scope)


@triton.jit
def atomic_xor(
    pointer, value, peer, heap_bases, mask=None, sem: tl.constexpr = _STRONGEST, scope: tl.constexpr = _SYSTEM
):
    """Bitwise exclusive or with `value` at `pointer` in `peer`'s heap; returns what was there before."""
    return tl.atomic_xor(
        _place(pointer, peer, heap_bases, sem, scope), value, mask=mask, sem=sem, scope=scope
    )


@triton.jit
def atomic_min(
    pointer, value, peer, heap_bases, mask=None, sem: tl.constexpr = _STRONGEST, scope: tl.constexpr = _SYSTEM
):
    """Minimum with `value` at `pointer` in `peer`'s heap; returns what was there before."""
    return tl.atomic_min(
        _place(pointer, peer, heap_bases, sem, scope), value, mask=mask, sem=sem, scope=scope
    )


@triton.jit
def atomic_max(
    pointer, value, peer, heap_bases, mask=None, sem: tl.constexpr = _STRONGEST, scope: tl.constexpr = _SYSTEM
):
    """Maximum with `value` at `pointer` in `peer`'s heap; returns what was there before."""
    return tl.atomic_max(
        _place(pointer, peer, heap_bases, sem, scope), value, mask=mask, sem=sem, scope=scope
    )

"""Elements as the words of messages: loading, storing and packing blocks of units.

A unit is 16 bytes of the result: 8 elements of a 16-bit dtype, 4 of float32. A unit of x has the same elements, in one
quad (16 bytes), or in two where x is float32 and the result is not. Two forms of a block of units:
  words    a tuple of int32 blocks, one for each word of a unit (four a quad): what travels
  values   a tuple of fp32 blocks, one for each element of a unit: what is computed with. Of integers int32 blocks, or
           int64 ones; kernels get their tensors as int32 or uint8 ones, and their dtype as INTEGER
"""

import triton
import triton.language as tl
from triton.language import target_info

from pyrocshmem import message, target
from pyrocshmem.collectives import pair_sums
from pyrocshmem.collectives.epilogue import rounded

_INTERPRETED = tl.constexpr(target.interpreted())
# A store where the mask is set, of so many bits.
_STORE = """{
.reg .pred p;
setp.ne.u32 p, $3, 0;
@p st.global.b%d [$1], $2;
mov.u32 $0, 0;
}"""
_STORE_4, _STORE_8 = tl.constexpr(_STORE % 32), tl.constexpr(_STORE % 64)


@triton.jit
def load_unit(x, place, first, end, mask, UNIT: tl.constexpr, ALIGNED: tl.constexpr):
    """Words of units whose elements begin at x + `place`. first: the number of a unit's first element; elements from
    number `end` on are zeros. ALIGNED: units start at multiples of 16 bytes and are whole."""
    BITS: tl.constexpr = x.dtype.element_ty.primitive_bitwidth
    PER_WORD: tl.constexpr = 32 // BITS
    words = ()
    if ALIGNED:
        pointer = (x + place).to(tl.pointer_type(tl.int32), bitcast=True)
        for quad in tl.static_range(UNIT // PER_WORD // 4):
            words = words + message.fetch(pointer + 4 * quad, mask & (first < end))
    else:
        for k in tl.static_range(UNIT // PER_WORD):
            word = tl.zeros(place.shape, tl.int32)
            for i in tl.static_range(PER_WORD):
                here = mask & (first + k * PER_WORD + i < end)
                value = tl.load(x + place + k * PER_WORD + i, mask=here, other=0)
                word |= _bits(value) << (BITS * i)
            words = words + (word,)  # type: ignore[assignment]
    return words


@triton.jit
def store_unit(out, place, first, end, words, mask, UNIT: tl.constexpr, ALIGNED: tl.constexpr):
    """The counterpart of `load_unit`, for words of `out`'s dtype."""
    DTYPE: tl.constexpr = out.dtype.element_ty
    PER_WORD: tl.constexpr = 32 // DTYPE.primitive_bitwidth
    if ALIGNED:
        message.keep((out + place).to(tl.pointer_type(tl.int32), bitcast=True), words, mask & (first < end))
    else:
        for e in tl.static_range(UNIT):
            value = _value(words[e // PER_WORD], e % PER_WORD, DTYPE)
            tl.store(out + place + e, value, mask=mask & (first + e < end))


@triton.jit
def store_bytes(out, place, first, end, found, mask, UNIT: tl.constexpr, ALIGNED: tl.constexpr):
    """As `store_unit`, of elements of one byte: `found` has those of a unit in one integer."""
    if ALIGNED:
        _keep((out + place).to(tl.pointer_type(found.dtype), bitcast=True), found, mask & (first < end))
    else:
        where = (out + place).to(tl.pointer_type(tl.uint8), bitcast=True)
        for e in tl.static_range(UNIT):
            tl.store(where + e, (found >> (8 * e)).to(tl.uint8), mask=mask & (first + e < end))


@triton.jit
def _keep(pointer, found, mask):
    """An ordinary store of 4 or 8 bytes at once. For one of `tl.store` Triton would choose how `found` lies, and have
    it computed so: from messages that are polled for once more (3.6)."""
    if not _INTERPRETED and not target_info.is_hip():
        operands = [pointer.to(tl.int64), found, mask.to(tl.int32)]
        if found.dtype.primitive_bitwidth == 64:
            tl.inline_asm_elementwise(_STORE_8, "=r,l,l,r", operands, dtype=tl.int32, is_pure=False, pack=1)
        else:
            tl.inline_asm_elementwise(_STORE_4, "=r,l,r,r", operands, dtype=tl.int32, is_pure=False, pack=1)
    else:
        tl.store(pointer, found, mask=mask)


@triton.jit
def _bits(value):
    """The bits of an element in the low end of an int32."""
    if value.dtype.primitive_bitwidth == 32:
        bits = value.to(tl.int32, bitcast=True)
    elif value.dtype.primitive_bitwidth == 8:
        bits = value.to(tl.int32) & 0xFF
    else:
        bits = value.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return bits


@triton.jit
def _value(word, i: tl.constexpr, DTYPE: tl.constexpr):
    """Element `i` of a word."""
    if DTYPE.primitive_bitwidth == 32:
        value = word.to(DTYPE, bitcast=True)
    elif DTYPE.primitive_bitwidth == 8:
        value = (word >> (8 * i)).to(DTYPE)
    else:
        value = (word >> (16 * i)).to(tl.int16).to(DTYPE, bitcast=True)
    return value


@triton.jit
def cut(x, ROWS: tl.constexpr, COLS: tl.constexpr, UNIT: tl.constexpr):
    """The values of `x` [ROWS, COLS]: UNIT (4 or 8) blocks [ROWS, COLS / UNIT], of element 0, 1, .. of every unit."""
    even, odd = x.reshape((ROWS, COLS // 2, 2)).split()
    e0, e2 = even.reshape((ROWS, COLS // 4, 2)).split()
    e1, e3 = odd.reshape((ROWS, COLS // 4, 2)).split()
    elements = (e0, e1, e2, e3)
    if UNIT == 8:
        e0, e4 = e0.reshape((ROWS, COLS // 8, 2)).split()
        e1, e5 = e1.reshape((ROWS, COLS // 8, 2)).split()
        e2, e6 = e2.reshape((ROWS, COLS // 8, 2)).split()
        e3, e7 = e3.reshape((ROWS, COLS // 8, 2)).split()
        elements = (e0, e1, e2, e3, e4, e5, e6, e7)  # type: ignore[assignment]
    return elements


@triton.jit
def send(slots, place, apart, words, mask):
    """Push words of units into `slots`, of one rank or several: a unit's first quad is number `place`, its second
    `place` + `apart`."""
    for k in tl.static_range(len(words) // 4):
        four = (words[4 * k], words[4 * k + 1], words[4 * k + 2], words[4 * k + 3])
        message.push(slots + (place + k * apart) * 4, four, mask)


@triton.jit
def unpack(words, UNIT: tl.constexpr, DTYPE: tl.constexpr):
    """Words of DTYPE as fp32 values."""
    PER_WORD: tl.constexpr = 32 // DTYPE.primitive_bitwidth
    values = ()
    for e in tl.static_range(UNIT):
        values = values + (_value(words[e // PER_WORD], e % PER_WORD, DTYPE).to(tl.float32),)  # type: ignore[assignment]
    return values


@triton.jit
def pack(values, DTYPE: tl.constexpr):
    """fp32 values, each rounded to DTYPE once, as words that can be sent."""
    PER_WORD: tl.constexpr = 32 // DTYPE.primitive_bitwidth
    words = ()
    for k in tl.static_range(len(values) // PER_WORD):
        word = _bits(rounded(values[k * PER_WORD], DTYPE))
        if PER_WORD == 2:
            word |= _bits(rounded(values[2 * k + 1], DTYPE)) << 16
        words = words + (message.clean(word),)  # type: ignore[assignment]
    return words


@triton.jit
def unpack_integers(words, INTEGER: tl.constexpr):
    """Words of INTEGER, a dtype of 8 to 64 bits, as int32 values, those of 64 bits as int64 ones."""
    BITS: tl.constexpr = INTEGER.primitive_bitwidth
    values = ()
    if BITS == 64:
        for k in tl.static_range(len(words) // 2):
            low, high = words[2 * k].to(tl.int64) & 0xFFFFFFFF, words[2 * k + 1].to(tl.int64)
            values = values + (low | (high << 32),)  # type: ignore[assignment]
    else:
        for e in tl.static_range(len(words) * 32 // BITS):
            # To the high end and back, which brings its sign.
            value = words[e * BITS // 32] << (32 - BITS - e * BITS % 32)
            value = value >> (32 - BITS)
            if INTEGER.is_int_unsigned() and BITS < 32:
                value &= (1 << BITS) - 1
            values = values + (value,)  # type: ignore[assignment]
    return values


@triton.jit
def pack_integers(values, INTEGER: tl.constexpr):
    """The counterpart of `unpack_integers`: of values that are too large their low bits."""
    BITS: tl.constexpr = INTEGER.primitive_bitwidth
    words = ()
    if BITS == 64:
        for k in tl.static_range(len(values)):
            words = words + (values[k].to(tl.int32), (values[k] >> 32).to(tl.int32))  # type: ignore[assignment]
    elif BITS == 32:
        words = values
    else:
        PER_WORD: tl.constexpr = 32 // BITS
        for k in tl.static_range(len(values) // PER_WORD):
            word = values[k * PER_WORD] & ((1 << BITS) - 1)
            for i in tl.static_range(1, PER_WORD):
                word |= (values[k * PER_WORD + i] & ((1 << BITS) - 1)) << (BITS * i)
            words = words + (word,)  # type: ignore[assignment]
    return words


@triton.jit
def clean(words):
    """`words` as they can be sent: none is the sentinel."""
    cleaned = ()
    for k in tl.static_range(len(words)):
        cleaned = cleaned + (message.clean(words[k]),)  # type: ignore[assignment]
    return cleaned


@triton.jit
def any_rank(words):
    """Blocks [U] of blocks [U, ranks] that are the same for every rank."""
    one = ()
    for k in tl.static_range(len(words)):
        one = one + (tl.max(words[k], axis=1),)  # type: ignore[assignment]
    return one


@triton.jit
def unless(gone, words):
    """`words`; where `gone`, the sentinel, which leaves a slot empty."""
    kept = ()
    for k in tl.static_range(len(words)):
        kept = kept + (tl.where(gone == 0, words[k], message.SENTINEL),)  # type: ignore[assignment]
    return kept


@triton.jit
def of_either(mask, words, others):
    """`words` where `mask`, else `others`."""
    chosen = ()
    for k in tl.static_range(len(words)):
        chosen = chosen + (tl.where(mask, words[k], others[k]),)  # type: ignore[assignment]
    return chosen


@triton.jit
def sum_ranks(values, valid):
    """Sums [U] over the ranks of blocks [U, ranks], where `valid`."""
    sums = ()
    for e in tl.static_range(len(values)):
        # -0.0 is what changes no sum, not even one of zeros.
        sums = sums + (pair_sums.along(tl.where(valid, values[e], -0.0), 1),)  # type: ignore[assignment]
    return sums


@triton.jit
def spread(words, ranks: tl.constexpr):
    """Blocks [U] as [U, ranks], the same for every rank.

    Everything computed from messages stays in one of these two shapes: to convert another, [U, 1] say, into the layout
    of messages, Triton 3.6 would repeat the polls.
    """
    wide = ()
    for k in tl.static_range(len(words)):
        wide = wide + (tl.broadcast_to(words[k][:, None], [words[k].shape[0], ranks]),)  # type: ignore[assignment]
    return wide

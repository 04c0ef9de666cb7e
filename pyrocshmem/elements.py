"""Element types: what operands and results may be made of, and what the code that is not a kernel must know of each.

    ELEMENTS[a.dtype].wide        # one row a type

A new type is a row here and, where its sums are scaled, a line in `collectives.epilogue.finished`. Its eps and its
bytes are PyTorch's to know.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pyrocshmem import target  # isort: skip  # before Triton
import triton


@dataclass(frozen=True)
class Element:
    """An element type of operands.

    results: what their GEMM may store, the first unless an `out` says otherwise. biases: what a bias may be of. wire:
    what each rank's partial sum of a result of this type may be rounded to for its way between ranks, the first unless
    the caller asks for another. tf32: whether operands may be multiplied as tf32, where the caller allows it.
    interpreted: whether Triton's interpreter computes with it rightly. scaled: whether operands come with scales.
    """

    dtype: torch.dtype
    results: tuple[torch.dtype, ...]
    biases: tuple[torch.dtype, ...]
    wire: tuple[torch.dtype, ...]
    tf32: bool = False
    interpreted: bool = True
    scaled: bool = False

    @property
    def wide(self) -> bool:
        """4 bytes. A tile on its way out then takes twice the shared memory. Narrower elements are less than an
        asynchronous copy moves: by pointers they come one at a time, with nothing in flight, so operands that TMA can't
        address are copied for it."""
        return self.dtype.itemsize >= 4

    def wire_dtype(self, asked: torch.dtype | None) -> torch.dtype:
        """What partial sums of results of this type travel in, where the caller asked for `asked`."""
        if self.widened:
            return torch.float32
        return asked if asked in self.wire else self.wire[0]

    @property
    def widened(self) -> bool:
        """Whether ops compute in float32 what has this type, its partial sums included: in the interpreter, where it
        would be wrong."""
        return target.interpreted() and not self.interpreted


_FP16, _BF16, _FP32 = torch.float16, torch.bfloat16, torch.float32
# Of operands with scales.
SCALED_RESULTS = (_BF16, _FP16, _FP32)
_ROWS = (
    #       dtype  results   biases          wire
    Element(_FP16, (_FP16,), (_FP16, _FP32), (_FP16, _FP32, _BF16)),
    Element(_BF16, (_BF16,), (_BF16, _FP32), (_BF16, _FP32, _FP16), interpreted=False),
    # Messages are whole quads: a unit of fp32 results would be half a quad of 16-bit parts.
    Element(_FP32, (_FP32,), (_FP32,), (_FP32,), tf32=True),
    *(
        Element(dtype, SCALED_RESULTS, SCALED_RESULTS, (), scaled=True)
        for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
    ),
)
ELEMENTS = {row.dtype: row for row in _ROWS}
DTYPES = tuple(row.dtype for row in _ROWS if not row.scaled)
# What a caller may ask for, whatever the results.
WIRE_DTYPES = (_FP32, _BF16, _FP16)

# What collectives reduce, and what they move: the latter as bits, whatever these mean.
REDUCED = (*DTYPES, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
MOVED = (*REDUCED, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2)


def float8() -> tuple[torch.dtype, torch.dtype]:
    """The 8-bit floating-point types of this target's matrix instructions: of 3 bits of mantissa, and of 2. gfx942 has
    others than the rest, whose bits mean other numbers."""
    if target.backend() == "hip" and triton.runtime.driver.active.get_current_target().arch == "gfx942":
        return torch.float8_e4m3fnuz, torch.float8_e5m2fnuz
    return torch.float8_e4m3fn, torch.float8_e5m2


def names(dtypes: tuple[torch.dtype, ...] = DTYPES) -> str:
    """For an error's text."""
    return ", ".join(map(str, dtypes))

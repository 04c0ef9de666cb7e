"""Programmatic dependent launch: the next kernel of a stream gets ready while this one still runs.

A kernel whose launch allows it (`Launch(.., chained=True)`) starts as soon as all programs of the one before it have
called `allow_next` or ended, and `wait_for_previous` holds it until that one has ended and all it wrote can be read. A
kernel that needs nothing of that one may run beside it and wait at its end, for the sake of what comes after both: then
the one before must not be chained itself, or must allow the next only when it has waited, so that whatever came before
that has ended.
What is saved is the latency of a launch. Only NVIDIA has this; elsewhere kernels follow one another as ever.
"""

import triton
import triton.language as tl
from triton.language import target_info

from pyrocshmem import target

_INTERPRETED = tl.constexpr(target.interpreted())


@triton.jit
def allow_next():
    """From now on the next kernel may be made ready. It still sees nothing that this one writes before its end."""
    if not _INTERPRETED and not target_info.is_hip():
        tl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents;\nmov.u32 $0, 0;",
            "=r",
            [],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def wait_for_previous():
    """Before a chained kernel touches memory that those before it write, and before it ends: they have ended."""
    if not _INTERPRETED and not target_info.is_hip():
        tl.inline_asm_elementwise(
            "griddepcontrol.wait;\nmov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )

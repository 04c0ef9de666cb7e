"""Programmatic dependent launch: the next kernel of a stream gets ready while this one still runs.

A chained kernel (`Launch(.., chained=True)`) starts as soon as all programs of the kernel before it have called
`allow_next` or ended; its `wait_for_previous` returns when that kernel has ended and all it wrote can be read. That
saves the latency of a launch.

A kernel that needs nothing of the one before may run beside it and call `wait_for_previous` at its end, for the sake of
what comes after both. Then the one before must not be chained itself, or must call `allow_next` only after its own
`wait_for_previous`: otherwise what came before the two may still be running.

Only NVIDIA has this; elsewhere kernels follow one another as usual, and both functions do nothing.
"""

import triton
import triton.language as tl
from triton.language import target_info

from pyrocshmem import target

_INTERPRETED = tl.constexpr(target.interpreted())


@triton.jit
def allow_next():
    """From now on the next kernel may start. Until this one ends it must not read what this one writes."""
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
    """Wait until the kernel before has ended. To be called before a chained kernel touches memory that earlier kernels
    write and, at the latest, before it ends."""
    if not _INTERPRETED and not target_info.is_hip():
        tl.inline_asm_elementwise(
            "griddepcontrol.wait;\nmov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )

"""In the place of `pyrocshmem.trace.mark`: kernels as if they had no marks."""

import triton
import triton.language as tl


@triton.jit
def mark_nothing(events, stage: tl.constexpr, tile, when=1):
    """Nothing."""

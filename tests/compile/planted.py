"""What kernels are compiled with in the place of the real thing: mistakes that the checks must find; no marks."""

import triton
import triton.language as tl


@triton.jit
def settle_nothing():
    """In the place of `pyrocshmem.signal.settle`: no drain, no barrier."""


@triton.jit
def mark_nothing(events, stage: tl.constexpr, tile, when=1):
    """In the place of `pyrocshmem.trace.mark`: kernels as if they had no marks."""


@triton.jit
def raise_by_atomic(flag, epoch, mask=None, scope: tl.constexpr = "sys"):
    """In the place of `pyrocshmem.signal.raise_flag`: by an atomic, beside which Triton from 3.8 on
    pipelines no store."""
    tl.atomic_xchg(flag, epoch, mask=mask, sem="release", scope=scope)


@triton.jit
def left_in_columns(y, R: tl.constexpr, C: tl.constexpr):
    """In the place of `stream_k.local_gemm.mainloop._in_rows`."""
    return y

"""A consumer in a launch of its own, beside the GEMM's or after it, and the gate that keeps it from starting early."""

import triton
import triton.language as tl

from pyrocshmem import signal, trace
from pyrocshmem.calls.kernel_launch import Launch
from pyrocshmem.collectives.order import unpacked


@triton.jit
def consumer_kernel(
    extra, context, problem, events, CONSUMER: tl.constexpr, OPTIONS: tl.constexpr, WORLD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A consumer on its own, after or beside the GEMM whose call it closes. problem: packed."""
    epoch = signal.begin(context, False, WORLD)
    CONSUMER(epoch, extra, context, unpacked(problem), events, WORLD, BLOCK_M, BLOCK_N, OPTIONS)
    signal.end(context, epoch)
    trace.mark(events, trace.END, -1)


@triton.jit
def gate_kernel(context, problem, events, OP: tl.constexpr, WORLD: tl.constexpr):
    """One small program that ends when all programs of the call's GEMM have begun: what follows it on its stream
    can't take the multiprocessors that they need. problem: packed."""
    trace.mark(events, trace.WAIT, -1)
    signal.wait_begun(unpacked(problem).num_gemm_programs, context, OP, WORLD)
    trace.mark(events, trace.END, -1)


def gate_launch(op: int, world_size: int) -> Launch:
    """The launch of `gate_kernel`."""
    return Launch(gate_kernel, 1, {"OP": op, "WORLD": world_size}, 1, 1)

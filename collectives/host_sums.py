"""The sum of what several hosts bring, which this rank has from each of them: over blocks in one memory.

    host_sum(parts, total, "sum", finish, columns=N)      # parts [H, ...], total [...]: contiguous

Terms are added in fp32, or as integers, neighbours first (`collectives.pair_sums`): in an order that depends on the
number of hosts alone, so that a sum has the same bits whatever its size and wherever it is made. It is finished like a
tile, and rounded once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pyrocshmem import target
from pyrocshmem.calls.kernel_launch import Launch
from pyrocshmem.collectives import pair_sums, reductions
from pyrocshmem.collectives.epilogue import PLAIN, Finish, activate, rounded

# Elements of a program: 16 bytes a thread of 16-bit terms. In the interpreter a program costs more than its data.
_THREADS = 256
_ELEMENTS, _INTERPRETED = 8 * _THREADS, 1 << 14


@triton.jit(do_not_specialize=("units", "columns", "first"))
def host_sum_kernel(
    parts, out, finish, units, columns, first,
    HOSTS: tl.constexpr, STEP: tl.constexpr, ACTIVATION: tl.constexpr, REDUCTION: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """STEP elements of `out` [n], of parts [HOSTS, n]. finish: a `collectives.epilogue.Finish`, its bias that of rows
    of `columns` elements, in which `out` begins with column `first`. n is `units` times UNIT."""
    DTYPE: tl.constexpr = parts.dtype.element_ty
    n = units * UNIT
    start = tl.program_id(0).to(tl.int64) * STEP
    i = tl.arange(0, STEP)
    inside = i < n - start
    if REDUCTION == "max" or REDUCTION == "min":
        total = _extreme(parts + start, i, n, inside, HOSTS, REDUCTION)
    else:
        terms = ()
        for host in tl.static_range(HOSTS):
            place = parts + start + tl.cast(host, tl.int64) * n
            terms = terms + (tl.load(place + i, mask=inside, other=0),)  # type: ignore[assignment]
        if DTYPE.is_floating():
            total = pair_sums.of_terms(terms)
            if REDUCTION == "avg":
                total = tl.math.div_rn(total, tl.full(total.shape, HOSTS, tl.float32))
        else:
            total = tl.zeros((STEP,), DTYPE)  # of integers, which wrap around in their own type
            for host in tl.static_range(HOSTS):
                total += terms[host]
    if DTYPE.is_floating():
        if finish.bias is not None:
            column = (first + start + i) % columns
            total += tl.load(finish.bias + column, mask=inside, other=0.0).to(tl.float32)
        total = activate(total, ACTIVATION)
        if finish.residual is not None:
            total += tl.load(finish.residual + start + i, mask=inside, other=0.0).to(tl.float32)
        total = rounded(total, DTYPE)
    tl.store(out + start + i, total.to(DTYPE), mask=inside)


@triton.jit
def _extreme(parts, i, n, inside, HOSTS: tl.constexpr, REDUCTION: tl.constexpr):
    """The largest or smallest term, as `reductions` has it."""
    DTYPE: tl.constexpr = parts.dtype.element_ty
    hosts = tl.arange(0, triton.next_power_of_2(HOSTS))
    valid = inside[:, None] & (hosts < HOSTS)[None, :]
    values = tl.load(parts + hosts.to(tl.int64)[None, :] * n + i[:, None], mask=valid, other=0)
    if DTYPE.is_floating():
        found = reductions.floats((values.to(tl.float32),), valid, REDUCTION, HOSTS)
    else:
        WIDE: tl.constexpr = tl.int64 if DTYPE.primitive_bitwidth == 64 else tl.int32
        found = reductions.integers((values.to(WIDE),), valid, REDUCTION)
    return found[0]


def host_sum(
    parts: torch.Tensor,
    out: torch.Tensor,
    reduction: str = "sum",
    finish: Finish = PLAIN,
    columns: int = 1,
    first: int = 0,
    activation: int = 0,
) -> None:
    """Enqueue it. reduction: of `reductions.REDUCTIONS`, of bools "max" or "min". columns, first: of a bias, as the
    kernel has them. activation: its number."""
    n, hosts = out.numel(), parts.shape[0]
    if n == 0:
        return
    unit = 16 if n % 16 == 0 else 1  # whole quads, of any type
    step = _INTERPRETED if target.interpreted() else _ELEMENTS
    constants = {
        "HOSTS": hosts,
        "STEP": step,
        "ACTIVATION": activation,
        "REDUCTION": reduction,
        "UNIT": unit,
    }
    if parts.dtype == torch.bool:
        parts, out = parts.view(torch.uint8), out.view(torch.uint8)
    args = (parts, out, finish, n // unit, columns, first)
    lanes = 64 if target.backend() == "hip" else 32
    launch = Launch(host_sum_kernel, -(-n // step), constants, _THREADS // lanes, 1)
    launch.compile(args)
    launch(args)

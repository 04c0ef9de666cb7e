"""Memory that a call of ours keeps beyond inputs and output, beside what it may keep."""

from __future__ import annotations

import torch

from pyrocshmem.benchmarks import chosen
from pyrocshmem.benchmarks.operands import Operands
from pyrocshmem.benchmarks.provider import Run
from pyrocshmem.benchmarks.shapes import Case
from pyrocshmem.calls.workspace import Workspace
from pyrocshmem.errors import HeapOutOfMemory
from pyrocshmem.stream_k.choice.config import Config
from pyrocshmem.target import num_sms


def used_by(run: Run, operands: Operands, spare: Workspace) -> int | None:
    """Bytes of a workspace that makes this call alone: `spare`, which is empty, and is again afterwards. None where the
    heap has no room for two. Collective."""
    operands.workspace = spare
    try:
        run.call()
        if operands.heap is not None:
            operands.heap.synchronize()
        elif operands.device.type == "cuda":
            torch.cuda.synchronize(operands.device)
        return spare.nbytes_in_use()
    except HeapOutOfMemory:
        return None
    finally:
        operands.workspace = None
        spare.free()


def allowed_bytes(case: Case, config: Config | None, device: torch.device) -> float | None:
    """Of the operands' dtype: slots for two calls in turn, of what peers send, and the result where peers write that; A
    gathered; and with `config` an fp32 tile a program, unless the BLAS multiplies. None for ops that no bound is stated
    for.

    fp32 partial sums of 16-bit operands take twice the slots: that is not allowed for here.
    """
    M, N, K, ranks = case.M, case.N, case.K, case.ranks
    slots = 2 * (ranks - 1) / ranks * M * N
    elements = {
        "gemm": 0.0,
        "gemm_reduce_scatter": slots,
        "gemm_all_reduce": slots + M * N,
        "all_gather_gemm": float(M * K),
    }
    if case.op not in elements or config is None:
        return None
    tiles = 0 if chosen.takes_blas(case.op, config.placement) else fix_up_bytes(config, device)
    return elements[case.op] * getattr(torch, case.dtype).itemsize + tiles


def fix_up_bytes(config: Config, device: torch.device) -> int:
    """An fp32 tile a program."""
    programs = config.num_programs or num_sms(device)
    return 4 * programs * config.block_m * config.block_n

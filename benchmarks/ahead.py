"""Compiling ahead: the kernels of many products at once, by processes that leave them in Triton's cache.

Each of the 500 products of a Stream-K corpus needs one of some 30 kernels, and a kernel takes 2 s; one process after
another would compile for longer than it measures. Variants of a few are left to be compiled when they come.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import torch

from pyrocshmem import target
from pyrocshmem.benchmarks import chosen
from pyrocshmem.benchmarks.shapes import TIMED, Case
from pyrocshmem.calls.workspace import local_workspace
from pyrocshmem.stream_k.choice.config import Config
from pyrocshmem.stream_k.local_gemm.plan import GemmPlan
from pyrocshmem.stream_k.local_gemm.product import schedule_of

# Fewer products are compiled as they come.
_MANY = 40
_MOST_PROCESSES = 12


def compile_ahead(cases: Iterable[Case]) -> int:
    """Compile what ours needs for the products alone among `cases`, on GPUs, where they are many. Returns how many
    kernels those are.

    One that doesn't compile is left to who measures it: the reason belongs into a record.
    """
    products = [case for case in cases if TIMED[case.op].kind == "gemm"]
    if target.backend() == "host" or len(products) < _MANY:
        return 0
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(_MOST_PROCESSES, os.cpu_count() or 1), context) as pool:
        # Not in this process, which must not touch the GPU before it starts the ranks.
        jobs = pool.submit(kernels, products).result()
        for job in [pool.submit(plan, case, config) for case, config in jobs.values()]:
            job.exception()
    return len(jobs)


def kernels(cases: Iterable[Case]) -> dict[tuple[object, ...], tuple[Case, Config]]:
    """A case and a configuration of each kernel that `cases` need, those in whole tiles besides."""
    found: dict[tuple[object, ...], tuple[Case, Config]] = {}
    device = target.device()
    for case in cases:
        dtype = getattr(torch, case.dtype)
        own = chosen.own_gemm(case.M, case.N, case.K, dtype, device)
        for config in (own, replace(own, split="none")):
            split = schedule_of(config, case.M, case.N, case.K, device).has_shared_tiles
            # Results that TMA can address are stored by it; operands it reads all, where they lie or their copies.
            aligned = case.N * dtype.itemsize % 16 == 0
            code = replace(config, split="none", num_programs=0)
            found.setdefault((case.dtype, code, split, aligned), (case, config))
    return found


def plan(case: Case, config: Config) -> GemmPlan:
    """A product's plan, whose kernels are compiled then."""
    device, dtype = target.device(), getattr(torch, case.dtype)
    a, b, out = (
        torch.empty(shape, dtype=dtype, device=device)
        for shape in ((case.M, case.K), (case.K, case.N), (case.M, case.N))
    )
    return GemmPlan(a, b, config, False, None, "none", out, local_workspace(device))

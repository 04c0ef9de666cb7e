"""Compiling ahead: the kernels of many products at once, by processes that leave them in Triton's cache.

Each of the 500 products of a Stream-K corpus needs one of some 30 kernels, and a kernel takes 2 s; one process after
another would compile for longer than it measures. Variants of a few are left to be compiled when they come. Products
that are the BLAS' by default need no kernel, unless our own GEMM is measured, too, or planned beside it.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import torch

from pyrocshmem import target
from pyrocshmem.benchmarks import chosen
from pyrocshmem.benchmarks.shapes import TIMED, Case
from pyrocshmem.calls.workspace import local_workspace
from pyrocshmem.stream_k.choice.config import Config
from pyrocshmem.stream_k.local_gemm.blas import keeps_own
from pyrocshmem.stream_k.local_gemm.plan import GemmPlan
from pyrocshmem.stream_k.local_gemm.product import schedule_of

# Fewer products are compiled as they come.
_MANY = 40
_MOST_PROCESSES = 12


def compile_ahead(cases: Iterable[Case], names: tuple[str, ...] | None = None) -> int:
    """Compile what ours among the providers `names` (None: all) need for the products alone among `cases`, on GPUs,
    where they are many. Returns how many kernels those are.

    One that doesn't compile is left to who measures it: the reason belongs into a record.
    """
    products = [case for case in cases if TIMED[case.op].kind == "gemm"]
    if target.backend() == "host" or len(products) < _MANY:
        return 0
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(_MOST_PROCESSES, os.cpu_count() or 1), context) as pool:
        # Not in this process, which must not touch the GPU before it starts the ranks.
        jobs = pool.submit(kernels, products, names).result()
        for job in [pool.submit(plan, case, config) for case, config in jobs.values()]:
            job.exception()
    return len(jobs)


def kernels(
    cases: Iterable[Case], names: tuple[str, ...] | None = None
) -> dict[tuple[object, ...], tuple[Case, Config]]:
    """A case and a configuration of each kernel that ours among the providers `names` (None: all) need for `cases`."""
    found: dict[tuple[object, ...], tuple[Case, Config]] = {}
    device = target.device()
    for case in cases:
        dtype = getattr(torch, case.dtype)
        for config in _compiled(case, dtype, device, names):
            split = schedule_of(config, case.M, case.N, case.K, device).has_shared_tiles
            # Results that TMA can address are stored by it; operands it reads all, where they lie or their copies.
            aligned = case.N * dtype.itemsize % 16 == 0
            code = replace(config, split="none", num_programs=0)
            found.setdefault((case.dtype, code, split, aligned), (case, config))
    return found


def _compiled(
    case: Case, dtype: torch.dtype, device: torch.device, names: tuple[str, ...] | None
) -> Iterator[Config]:
    """Those with which our kernel is compiled for a case."""
    a, b, _ = _tensors(case, dtype, torch.device("meta"))
    default = chosen.default_gemm(a, b, device)
    own = chosen.own_gemm(case.M, case.N, case.K, dtype, device)
    by_blas = chosen.takes_blas("gemm", default.placement)
    if _takes_part("ours", names) and (not by_blas or keeps_own(dtype)):
        yield replace(default, placement=own.placement)
    if _takes_part("ours_no_blas", names) and by_blas:
        yield own
    if _takes_part("ours_whole_tiles", names) and own.split != "none":
        yield replace(own, split="none")


def _takes_part(name: str, names: tuple[str, ...] | None) -> bool:
    return names is None or name in names


def plan(case: Case, config: Config) -> GemmPlan:
    """A product's plan, whose kernels are compiled then."""
    device, dtype = target.device(), getattr(torch, case.dtype)
    a, b, out = _tensors(case, dtype, device)
    return GemmPlan(a, b, config, False, None, "none", out, local_workspace(device))


def _tensors(case: Case, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """A, B and the result, as `benchmarks.operands` has them."""
    shapes = ((case.M, case.K), (case.K, case.N), (case.M, case.N))
    return [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]

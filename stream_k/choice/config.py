"""Configurations: how a GEMM is tiled, scheduled and joined to its communication.

    config = stream_k.choose("gemm_all_reduce", M, N, K, torch.bfloat16, world_size, device)
    config = dataclasses.replace(config, placement="inside", num_stages=3)
    stream_k.gemm_all_reduce(a, b, group=group, config=config)

Every rank must use the same configuration; the ops check that when they plan a call.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any, TypeVar

import torch

from pyrocshmem import target
from pyrocshmem.calls.op import registered
from pyrocshmem.checks import as_integer
from pyrocshmem.elements import ELEMENTS, WIRE_DTYPES
from pyrocshmem.stream_k.local_gemm.schedule import SPLITS

# Those whose results move in blocks of rows, beside a GEMM that leaves SMs free.
BY_ROWS = ("copy_engine", "pull")
# Those whose results move in blocks of rows, of which each is a product of its own.
BY_BLOCKS = ("blas_blocks",)
# Those that overlap nothing: a GEMM, and an exchange of its operand or result by messages.
BY_MESSAGE = ("messages", "unfused")
# Those whose GEMM is the vendor's BLAS's, where that computes the same (`stream_k.local_gemm.blas`).
BY_BLAS = ("blas", "unfused", "blas_blocks")


def known_placements() -> tuple[str, ...]:
    """Names of the placements of all registered ops."""
    found = [getattr(op, "placements", ()) for op in registered()]
    return tuple(dict.fromkeys(placement.name for placements in found for placement in placements))


ALGORITHMS = ("one_shot", "two_shot")
# Fields that machine code doesn't depend on: kernels get them as numbers, or they say how many programs there are.
_NUMBERS = ("group_m", "num_programs", "chunk")
# Of 32 threads, 1024 in all; and the 32-bit registers of an SM.
_MOST_WARPS, _MOST_ELEMENTS = 32, 1 << 16


@dataclass(frozen=True)
class Config:
    """One way to run an op; immutable, changed with `dataclasses.replace`. ValueError for a field that is out of range,
    TypeError for a size that is no integer, and a switch that is no bool.

    The GEMM:
      block_m, block_n, block_k  the tile and its step along K, in elements: powers of two from 16 on
      num_warps, num_stages      of a program, as Triton has them
      group_m                    tile rows whose tiles are done column by column (`collectives.order.tile_coords`)
      subtiles                   1, 2 or 4: column parts in which a tile leaves the registers
      flatten                    overlap a tile's epilogue with the next one's loads (NVIDIA)
      k_blocks                   1, 2, 4 or 8: parts of K of one length whose sums are added as a binary tree; several
                                 need whole tiles, split="none". See `pyrocshmem.batch_invariant`
      split                      a name of `stream_k.local_gemm.schedule.SPLITS`
      num_programs               programs of the launch; 0: one an SM. In placement "copy_engine" fewer where an SM has
                                 no room for what waits beside one
    Communication:
      placement                  where finished tiles are consumed: the name of a placement of a registered op, see
                                 docs/architecture.md. Whether the op at hand has it is checked when a call is planned
      algorithm                  of an all-reduce: "one_shot" (every rank sums everything) or "two_shot" (owners sum)
      num_comm_programs          programs that consume beside the GEMM: some of num_programs in placement "beside",
                                 otherwise of a launch of their own
      comm_warps                 warps of a program of that launch
      comm_rows                  rows of a tile that a consumer moves at a time
      chunk                      tile rows that copy engines or pulls move at a time: of each rank's row block or, in
                                 an all-scatter, of the whole result. The rows are as many on all ranks, whatever
                                 their tiles. Wide steps of one group are cut into parts of their columns. In placement
                                 "blas_blocks" of an all-reduce: of a rank's own rows, those that are multiplied and
                                 summed before the others; as many as it has, or more: not cut
      partial_dtype              what partial sums travel in, of ops that sum over ranks. None: the result's dtype, to
                                 which every rank's partial is rounded once, as other libraries do. torch.float32: the
                                 strict mode, as accurate as one GPU's sums, at twice the bytes. torch.bfloat16 or
                                 torch.float16: that, whatever 16 bits the result has. Those of fp32 results stay fp32
    """

    block_m: int = 128
    block_n: int = 256
    block_k: int = 64
    num_warps: int = 8
    num_stages: int = 4
    group_m: int = 8
    subtiles: int = 2
    flatten: bool = True
    split: str = "auto"
    k_blocks: int = 1
    num_programs: int = 0
    placement: str = "beside"
    algorithm: str = "two_shot"
    num_comm_programs: int = 32
    comm_warps: int = 8
    comm_rows: int = 8
    chunk: int = 4
    partial_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.type == "int":
                as_integer(f"Config.{field.name}", getattr(self, field.name))
        if not isinstance(self.flatten, bool):
            raise TypeError(f"Config.flatten is a {type(self.flatten).__name__}, a bool is needed")
        for name in ("block_m", "block_n", "block_k", "num_warps", "comm_rows", "comm_warps"):
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                raise ValueError(f"Config.{name} must be a power of two, got {value}")
            # Of matrix instructions, and of descriptors, which on one rank alone may read the operands.
            if name.startswith("block") and value < 16:
                raise ValueError(f"Config.{name} is {value}, at least 16 are needed")
            if name.endswith("warps") and value > _MOST_WARPS:
                raise ValueError(f"Config.{name} is {value}, a program has at most {_MOST_WARPS}")
        if self.block_m * self.block_n > _MOST_ELEMENTS:
            raise ValueError(
                f"Config.block_m x block_n is {self.block_m} x {self.block_n}, a program has registers for a tile of "
                f"at most {_MOST_ELEMENTS} elements"
            )
        for name, allowed in (
            ("subtiles", (1, 2, 4)),
            ("k_blocks", (1, 2, 4, 8)),
            ("split", SPLITS),
            ("placement", known_placements()),
            ("algorithm", ALGORITHMS),
            ("partial_dtype", (None, *WIRE_DTYPES)),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"Config.{name} is {getattr(self, name)!r}, allowed are {allowed}")
        for name in ("num_stages", "group_m", "num_comm_programs", "chunk"):
            if getattr(self, name) < 1:
                raise ValueError(f"Config.{name} must be at least 1, got {getattr(self, name)}")
        if self.k_blocks > 1 and self.split != "none":
            raise ValueError(
                f"Config.k_blocks is {self.k_blocks} with split {self.split!r}: blocks of K are of whole tiles, which "
                "split='none' keeps"
            )
        if self.num_programs < 0 or (
            self.placement == "beside" and 0 < self.num_programs <= self.num_comm_programs
        ):
            raise ValueError(
                f"Config.num_programs is {self.num_programs}, of which {self.num_comm_programs} consume "
                "beside the GEMM: none is left for it"
            )
        if self.comm_rows > self.block_m:
            raise ValueError(f"Config.comm_rows is {self.comm_rows}, at most block_m = {self.block_m}")
        if self.block_n // self.subtiles < 16:
            raise ValueError(
                f"Config.subtiles is {self.subtiles}: parts of {self.block_n // self.subtiles} columns, "
                "at least 16 are needed"
            )

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """What partial sums of results of `dtype` travel in."""
        return ELEMENTS[dtype].wire_dtype(self.partial_dtype)


T = TypeVar("T")


def changed(whole: T, **changes: Any) -> T:
    """`dataclasses.replace`, of changes that need no check: in a tenth of its time, of which a plan takes several."""
    made = object.__new__(type(whole))
    made.__dict__.update(whole.__dict__, **changes)
    return made


# All of a configuration that machine code depends on.
of_kernels = attrgetter(*(field.name for field in fields(Config) if field.name not in _NUMBERS))


def check_config(config: object) -> None:
    """TypeError for what is neither a `Config` nor None."""
    if config is not None and not isinstance(config, Config):
        raise TypeError(f"config is a {type(config).__name__}, a stream_k.Config or None is needed")


# SMs that a GEMM leaves free where helpers run on streams of their own. A helper that starts before the GEMM would
# otherwise keep one of its programs waiting. Waits of copy engines leave a GEMM room (`planned.least_free`).
SPARE = 4


def with_a_free_multiprocessor(config: Config, device: torch.device) -> Config:
    """`config` of a fused op; where other launches run beside its GEMM and num_programs is 0, with a num_programs that
    leaves some SMs free. ValueError for one that leaves none."""
    if config.placement not in ("own_stream", *BY_ROWS):
        return config
    num_sms = target.num_sms(device)
    if config.num_programs == 0 and num_sms > 1:
        return changed(config, num_programs=max(num_sms - SPARE, num_sms // 2))
    # Whether its waits have room beside the GEMM is known when both are compiled.
    looked_at = config.placement == "copy_engine" and target.backend() == "cuda"
    if config.num_programs >= num_sms + looked_at:
        raise ValueError(
            f"Config.num_programs is {config.num_programs} on {num_sms} multiprocessors; with placement "
            f"{config.placement!r} the GEMM must leave one free"
        )
    return config

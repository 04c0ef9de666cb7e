"""Measured configurations: the table that `python -m pyrocshmem tune` fills and `stream_k.choose` looks up.

    {"runs": [{"command": .., "commit": .., ...}], "entries": [{"arch": "sm_90", "op": "gemm", "M": 4096, ...}]}

An entry counts for its architecture, number of multiprocessors, op, ranks and dtypes alone, and for shapes within a
factor of two of its own, in M, N and K taken together; of the nearest ones the largest is taken. What does not fit the
shape at hand is the cost model's. PYROCSHMEM_TUNED names another table, or "none".
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from pyrocshmem.checks import as_integer
from pyrocshmem.elements import DTYPES
from pyrocshmem.stream_k.choice.config import PLACEMENTS_OF, Config, with_a_free_multiprocessor
from pyrocshmem.stream_k.choice.gemm_model import balanced_programs
from pyrocshmem.stream_k.choice.rules import cost_model
from pyrocshmem.target import num_multiprocessors

FILE = Path(__file__).with_name("tuned.json")

# Largest distance of an entry, in log2 of M, N and K.
_REACH = 1.0

Shape = tuple[int, int, int]


@dataclass(frozen=True)
class Variant:
    """A configuration whose numbers of programs follow the number of tiles.

    most_programs: what the GEMM's programs are balanced for; 0: they are the config's. comm_each: programs that
    consume, for every multiprocessor that the GEMM leaves free; 0: they are the config's.
    """

    config: Config
    most_programs: int = 0
    comm_each: int = 0

    def fitted(self, M: int, N: int, processors: int) -> Config:
        """The configuration for a result [M, N], neither of them 0. ValueError where there is none."""
        config = self.config
        if not self.most_programs:
            return config
        programs = balanced_programs(num_tiles(config, M, N), self.most_programs)
        comm = self.comm_each * (processors - programs) or config.num_comm_programs
        return dataclasses.replace(config, num_programs=programs, num_comm_programs=comm)


@dataclass(frozen=True)
class Entry:
    """A line of the table: the fastest configuration of `op` for a local product [M, K] x [K, N].

    arch: as `architecture` gives it. gpu: its name, for people. partial_dtype: None is fp32. config: the fields of
    a `Config` but for partial_dtype; None: the cost model's choice is the fastest. most_programs, comm_each: as in
    `Variant`. us, cost_model_us: medians of it and of the cost model's choice, on the slowest rank, in
    microseconds. run: number of the run, in the table's list, that measured it. timing: "eager", or "graph" (replays of
    many calls), as in the records of benchmarks.
    """

    arch: str
    gpu: str
    multiprocessors: int
    op: str
    ranks: int
    dtype: str
    partial_dtype: str | None
    M: int
    N: int
    K: int
    config: dict[str, Any] | None
    most_programs: int
    comm_each: int
    us: float
    cost_model_us: float
    run: int
    timing: str = "eager"

    @property
    def shape(self) -> Shape:
        """(M, N, K)."""
        return self.M, self.N, self.K

    @property
    def kind(self) -> tuple[object, ...]:
        """What must be equal for the entry to count."""
        return self.arch, self.multiprocessors, self.op, self.ranks, self.dtype, self.partial_dtype


class Table:
    """Entries and the runs that measured them."""

    def __init__(self, runs: list[dict[str, Any]], entries: list[Entry]) -> None:
        self.runs = runs
        self.entries = {(entry.kind, entry.shape): entry for entry in entries}

    @classmethod
    def read(cls, path: Path) -> Table:
        """The table in a file. ValueError, with the file's name, for what is none."""
        try:
            found = json.loads(path.read_text())
            entries = [Entry(**entry) for entry in found["entries"]]
            for entry in entries:
                if min(entry.shape) < 1:
                    raise ValueError(f"an entry's M, N, K are {entry.shape}, allowed are 1 or more")
            return cls(list(found["runs"]), entries)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"{path} is no table of configurations: {type(error).__name__}: {error}"
            ) from None

    def add(self, entry: Entry) -> None:
        """Put an entry in, in the place of one of the same kind and shape."""
        self.entries[entry.kind, entry.shape] = entry

    def write(self, path: Path) -> None:
        """An entry a line, in order, so that differences can be read. Raises OSError. Whoever reads meanwhile, or after
        a Ctrl-C, finds the old table or the new one."""
        entries = sorted(self.entries.values(), key=lambda entry: (*map(str, entry.kind), entry.shape))
        lists = {"runs": self.runs, "entries": [dataclasses.asdict(entry) for entry in entries]}
        parts = [
            f'"{name}": [' + ",".join("\n" + json.dumps(item) for item in items) + "\n]"
            for name, items in lists.items()
        ]
        path = path.resolve()
        new = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            new.write_text("{\n" + ",\n".join(parts) + "\n}\n")
            new.replace(path)
        finally:
            new.unlink(missing_ok=True)


@lru_cache(maxsize=4096, typed=True)  # 8.0 would find what 8 gave
def choose(
    op: str,
    M: int,
    N: int,
    K: int,
    dtype: torch.dtype,
    world_size: int,
    device: torch.device,
    partial_dtype: torch.dtype | None = None,
    placement: str | None = None,
) -> Config:
    """The configuration for a rank's product [M, K] x [K, N] of `op`: "gemm" or a fused op's name.

    M, N, K: of this rank's product: M rows of all ranks (also of `all_gather_gemm`), and its share of N or K. dtype: of
    the operands. world_size: ranks of the group. partial_dtype: as in `Config`. placement: one of `Config`'s; None: the
    fastest known: the table's (`tuned.json`) where that has a similar product, else the cost model's.
    Returns a frozen `Config`; change it with `dataclasses.replace`. Raises ValueError for an unknown op, sizes below 0
    and fewer than one rank, TypeError for a dtype that the ops don't take, or a number that is no integer.
    """
    if op not in PLACEMENTS_OF:
        raise ValueError(f"op is {op!r}, allowed are {', '.join(PLACEMENTS_OF)}")
    if dtype not in DTYPES:
        raise TypeError(f"dtype is {dtype}, allowed are {', '.join(map(str, DTYPES))}")
    for name, number, least in (("M", M, 0), ("N", N, 0), ("K", K, 0), ("world_size", world_size, 1)):
        if as_integer(name, number) < least:
            raise ValueError(f"{name} is {number}, allowed are {least} or more")
    device = torch.device(device)
    config = cost_model(op, M, N, K, dtype, world_size, device, partial_dtype, placement)
    if placement is not None:
        return config
    return preferred(config, op, (M, N, K), dtype, world_size, device)


def preferred(
    config: Config, op: str, shape: Shape, dtype: torch.dtype, ranks: int, device: torch.device
) -> Config:
    """What the table has for a local product of `shape`, (M, N, K); otherwise `config`, the cost model's choice.

    Raises ValueError where PYROCSHMEM_TUNED names what is no table.
    """
    path = os.environ.get("PYROCSHMEM_TUNED") or str(FILE)
    if path == "none" or min(shape) < 1:
        return config
    processors = num_multiprocessors(device)
    kind = (architecture(device), processors, op, ranks, dtype_name(dtype), wire_name(config.partial_dtype))
    entries = _entries(path).get(kind, [])
    entry = min(
        entries, key=lambda found: (_distance(shape, found.shape), -math.prod(found.shape)), default=None
    )
    if entry is None or _distance(shape, entry.shape) == math.inf or entry.config is None:
        return config
    try:
        found = _for_shape(entry, config, shape, processors)
        check(op, found, device)
    except (ValueError, TypeError):
        return config
    return found


def check(op: str, config: Config, device: torch.device) -> None:
    """Raise ValueError for a configuration that `op` can't run with on `device`."""
    if config.placement not in PLACEMENTS_OF[op]:
        raise ValueError(f"{op} has no placement {config.placement!r}")
    if op == "gemm":
        return
    if op == "all_gather_gemm" and config.placement == "copy_engine" and config.split != "none":
        raise ValueError(
            f"Config.split is {config.split!r}; {op} keeps tiles whole, since their rows come in turn"
        )
    with_a_free_multiprocessor(config, device)
    programs = config.num_programs or num_multiprocessors(device)
    if config.placement == "beside" and programs <= config.num_comm_programs:
        raise ValueError(
            f"of {programs} programs {config.num_comm_programs} consume: none is left for the GEMM"
        )


def num_tiles(config: Config, M: int, N: int) -> int:
    """Tiles of a result [M, N]."""
    return -(-M // config.block_m) * -(-N // config.block_n)


def architecture(device: torch.device) -> str:
    """What kernels are compiled for: "sm_90", "gfx942", ...; "cpu" in the interpreter."""
    if device.type == "cpu":
        return "cpu"
    if torch.version.hip:
        return str(torch.cuda.get_device_properties(device).gcnArchName).split(":", maxsplit=1)[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def dtype_name(dtype: torch.dtype) -> str:
    """As in the table: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def wire_name(partial_dtype: torch.dtype | None) -> str | None:
    """As in the table, where fp32 partials are None."""
    return None if partial_dtype in (None, torch.float32) else dtype_name(partial_dtype)


@lru_cache(maxsize=16)
def _entries(path: str) -> dict[tuple[object, ...], list[Entry]]:
    """The entries of a file by their kinds."""
    found: dict[tuple[object, ...], list[Entry]] = {}
    for entry in Table.read(Path(path)).entries.values():
        found.setdefault(entry.kind, []).append(entry)
    return found


def _distance(shape: Shape, other: Shape) -> float:
    """How far apart two shapes are; inf beyond the reach of an entry."""
    distance = math.hypot(*(math.log2(x / y) for x, y in zip(shape, other, strict=True)))
    return distance if distance <= _REACH else math.inf


def _for_shape(entry: Entry, cost: Config, shape: Shape, processors: int) -> Config:
    """The entry's configuration for a product of another shape. ValueError, TypeError where it has none."""
    assert entry.config is not None
    config = Config(**entry.config, partial_dtype=cost.partial_dtype)
    tiles, measured = num_tiles(config, *shape[:2]), num_tiles(config, entry.M, entry.N)
    if tiles == measured:
        return config
    if (tiles < processors) != (measured < processors):
        raise ValueError("what is fastest for one wave of tiles says nothing about several")
    if entry.op == "gemm":
        # Whether to split the last wave depends on what is in it: the cost model's part.
        # Its programs are as many as share a multiprocessor: those of another size don't.
        size = ("block_m", "block_n", "block_k", "num_warps", "num_stages", "subtiles")
        same = all(getattr(config, name) == getattr(cost, name) for name in size)
        split = config.split if config.split == "apart" else "auto"
        return dataclasses.replace(config, num_programs=cost.num_programs if same else 0, split=split)
    return Variant(config, entry.most_programs, entry.comm_each).fitted(*shape[:2], processors)

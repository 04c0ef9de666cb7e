"""Measured configurations: the table that `python -m pyrocshmem tune` fills and `stream_k.choose` looks up.

    {"runs": [{"command": .., "commit": .., ...}], "entries": [{"arch": "sm_90", "op": "gemm", "M": 4096, ...}]}

An entry counts for its architecture, number of SMs, op, ranks and dtypes alone, and for shapes within a
factor of two of its own, in M, N and K taken together; of the nearest ones the largest is taken. What does not fit the
shape at hand is left to the rules. PYROCSHMEM_TUNED names another table, or "none".
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pyrocshmem import target
from pyrocshmem.checks import as_integer
from pyrocshmem.elements import DTYPES
from pyrocshmem.stream_k.choice.config import Config, with_a_free_multiprocessor
from pyrocshmem.stream_k.choice.placement import Variant, find_placement, num_tiles, placements_of
from pyrocshmem.stream_k.choice.rules import Decision, decide

FILE = Path(__file__).with_name("tuned.json")

# Largest distance of an entry, in log2 of M, N and K.
_REACH = 1.0

Shape = tuple[int, int, int]


@dataclass(frozen=True)
class Entry:
    """A line of the table: the fastest configuration of `op` for a local GEMM [M, K] x [K, N].

    arch: as `architecture` gives it. gpu: its name, for people. partial_dtype: what partial sums travel in; None: fp32,
    or there are none. config: the fields of a `Config` but for partial_dtype; None: the rules' choice is the fastest.
    most_programs, comm_each: as in `Variant`. us, cost_model_us: medians of it and of the rules' choice, on the slowest
    rank, in microseconds. run: number of the run, in the table's list, that measured it. timing: "eager", or "graph"
    (replays of many calls), as in the records of benchmarks.
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


class Lookup(NamedTuple):
    """What the table says of a call: its configuration and the entry that gave it, None where there is none that
    counts; and in words which entry, or why none. factor: how many times as large, or as small, the shape is as the
    nearest entry's, in M, N and K taken together; 0 where there is no such entry."""

    config: Config | None
    entry: Entry | None
    why: str
    factor: float = 0.0


class Choice(NamedTuple):
    """What `choose` gives for a call, what the rules say of it, and what the table does; None: it wasn't asked, since
    the caller asked for a placement by name."""

    config: Config
    rules: Decision
    table: Lookup | None


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
    """The configuration for a rank's GEMM [M, K] x [K, N] of `op`: "gemm" or a fused op's name.

    M, N, K: of this rank's GEMM: M rows of all ranks (also of `all_gather_gemm`), and its share of N or K. dtype: of
    the operands. world_size: ranks of the group. partial_dtype: as in `Config`. placement: one of the op's; None: the
    fastest known: the table's (`tuned.json`) where that has a similar GEMM, else that of the rules.
    Returns a frozen `Config`; change it with `dataclasses.replace`. `stream_k.explain` says why it is this one. Raises
    ValueError for an unknown op, a placement that the op doesn't have, sizes below 0 and fewer than one rank, TypeError
    for a dtype that the ops don't take, or a number that is no integer.
    """
    return choice(op, M, N, K, dtype, world_size, device, partial_dtype, placement).config


def choice(
    op: str,
    M: int,
    N: int,
    K: int,
    dtype: torch.dtype,
    world_size: int,
    device: torch.device,
    partial_dtype: torch.dtype | None = None,
    placement: str | None = None,
) -> Choice:
    """What `choose` gives, which has the arguments, and how it came about."""
    placements_of(op)
    if dtype not in DTYPES:
        raise TypeError(f"dtype is {dtype}, allowed are {', '.join(map(str, DTYPES))}")
    for name, number, least in (("M", M, 0), ("N", N, 0), ("K", K, 0), ("world_size", world_size, 1)):
        if as_integer(name, number) < least:
            raise ValueError(f"{name} is {number}, allowed are {least} or more")
    device = torch.device(device)
    decision = decide(op, M, N, K, dtype, world_size, device, partial_dtype, placement)
    if placement is not None:
        return Choice(decision.config, decision, None)
    found = _look_up(decision, op, (M, N, K), dtype, world_size, device)
    return Choice(decision.config if found.config is None else found.config, decision, found)


def _look_up(
    decision: Decision, op: str, shape: Shape, dtype: torch.dtype, ranks: int, device: torch.device
) -> Lookup:
    """What the table has for a local GEMM of `shape`, (M, N, K); `decision`: the rules'.

    Raises ValueError where PYROCSHMEM_TUNED names what is no table.
    """
    path = table_path()
    if path is None:
        return Lookup(None, None, "PYROCSHMEM_TUNED is none")
    if min(shape) < 1:
        return Lookup(None, None, "it has no entries for empty operands")
    num_sms, config, wire = target.num_sms(device), decision.config, decision.facts.wire
    kind = (architecture(device), num_sms, op, ranks, dtype_name(dtype), wire_name(wire))
    entries = [entry for entry in _read(str(path)).entries.values() if entry.kind == kind]
    if not entries:
        dtypes = describe_dtypes(dtype, wire)
        return Lookup(
            None, None, f"it has no entry for {op} of {dtypes}, {ranks} ranks, {kind[0]} with {num_sms} SMs"
        )
    entry = min(entries, key=lambda found: (_distance(shape, found.shape), -math.prod(found.shape)))
    factor = 2 ** _distance(shape, entry.shape)
    nearest = f"the nearest of {len(entries)} entries, M N K = {' '.join(map(str, entry.shape))}"
    if _distance(shape, entry.shape) > _REACH:
        return Lookup(
            None, None, f"{nearest}, is a factor of {factor:.1f} away, more than {2**_REACH:g}", factor
        )
    if entry.config is None:
        return Lookup(config, entry, f"{nearest}, says that the rules' choice was the fastest", factor)
    try:
        found = _for_shape(entry, config, shape, num_sms)
        check(op, found, device)
    except (ValueError, TypeError) as error:
        return Lookup(None, None, f"{nearest}, can't be used here: {error}", factor)
    return Lookup(found, entry, f"{nearest}, has it", factor)


def check(op: str, config: Config, device: torch.device) -> None:
    """Raise ValueError for a configuration that `op` can't run with on `device`."""
    placement = find_placement(op, config.placement)
    if placement.whole_tiles and config.split != "none":
        raise ValueError(
            f"Config.split is {config.split!r}; {op} keeps tiles whole, since their rows come in turn"
        )
    with_a_free_multiprocessor(config, device)
    programs = config.num_programs or target.num_sms(device)
    if config.placement == "beside" and programs <= config.num_comm_programs:
        raise ValueError(
            f"of {programs} programs {config.num_comm_programs} consume: none is left for the GEMM"
        )


def table_path() -> Path | None:
    """Where the table is; None where PYROCSHMEM_TUNED is "none"."""
    path = os.environ.get("PYROCSHMEM_TUNED") or str(FILE)
    return None if path == "none" else Path(path)


def run_of(entry: Entry) -> dict[str, Any]:
    """The run that measured an entry of the table in use."""
    path = table_path()
    runs = _read(str(path)).runs if path is not None else []
    return runs[entry.run] if 0 <= entry.run < len(runs) else {}


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


def wire_name(wire: torch.dtype | None) -> str | None:
    """What partial sums travel in, as in the table; None: fp32, or there are none."""
    return None if wire in (None, torch.float32) else dtype_name(wire)


def describe_dtypes(dtype: torch.dtype, wire: torch.dtype | None) -> str:
    """For people: "bfloat16", or "bfloat16 with float32 partial sums", where these travel in another type."""
    return dtype_name(dtype) + ("" if wire in (None, dtype) else f" with {dtype_name(wire)} partial sums")


@lru_cache(maxsize=16)
def _read(path: str) -> Table:
    return Table.read(Path(path))


def _distance(shape: Shape, other: Shape) -> float:
    """How far two shapes are from each other, in log2."""
    return math.hypot(*(math.log2(x / y) for x, y in zip(shape, other, strict=True)))


def _for_shape(entry: Entry, cost: Config, shape: Shape, num_sms: int) -> Config:
    """The entry's configuration for a GEMM of another shape. ValueError, TypeError where it has none."""
    assert entry.config is not None
    config = Config(**entry.config, partial_dtype=cost.partial_dtype)
    tiles, measured = num_tiles(config, *shape[:2]), num_tiles(config, entry.M, entry.N)
    if tiles == measured:
        return config
    if (tiles < num_sms) != (measured < num_sms):
        raise ValueError("what is fastest for one wave of tiles says nothing about several")
    if find_placement(entry.op, config.placement).alone:
        # Whether to split the last wave depends on what is in it: the rules' part.
        # Its programs are as many as share an SM: those of another size don't.
        size = ("block_m", "block_n", "block_k", "num_warps", "num_stages", "subtiles")
        same = all(getattr(config, name) == getattr(cost, name) for name in size)
        split = config.split if config.split == "separate" else "auto"
        return dataclasses.replace(config, num_programs=cost.num_programs if same else 0, split=split)
    return Variant(config, entry.most_programs, entry.comm_each).fitted(*shape[:2], num_sms)

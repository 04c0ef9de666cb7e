"""Measured configurations: the table that `python -m pyrocshmem tune` fills and `stream_k.choose` looks up.

    {"made_with": {"arch": "sm_90", ..}, "runs": [{"command": .., ..}], "entries": [{"op": "gemm", "M": 4096, ..}]}

It is the user's own (`stream_k.choice.cache`), or the file that PYROCSHMEM_TUNED names; "none": there is none. An entry
counts for its op, ranks and dtypes alone, and for shapes within a factor of two of its own, in M, N and K taken
together; of the nearest ones the largest is taken. What does not fit the shape at hand is left to the rules.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from pyrocshmem import target
from pyrocshmem.calls.invariance import NONE, Invariance, current
from pyrocshmem.checks import as_integer
from pyrocshmem.elements import DTYPES
from pyrocshmem.heap import Heap
from pyrocshmem.stream_k.choice.cache import Made, default_path, made_here, one_line, read_json, say_once
from pyrocshmem.stream_k.choice.config import Config, with_a_free_multiprocessor
from pyrocshmem.stream_k.choice.invariant import why_not
from pyrocshmem.stream_k.choice.placement import Variant, find_placement, num_tiles, placements_of
from pyrocshmem.stream_k.choice.rules import Decision, decide
from pyrocshmem.stream_k.choice.tilings import SHARED_BYTES

# Largest distance of an entry, in log2 of M, N and K.
_REACH = 1.0
# What no measurement chooses: an entry beyond it is none. Of counts that grow with the device: so many times its SMs.
_MOST = {"block_m": 256, "block_n": 256, "block_k": 256, "num_warps": 16, "comm_warps": 16, "num_stages": 16}
_MOST_AN_SM = {"num_programs": 8, "num_comm_programs": 8}
_LARGEST = (1 << 31) - 1

Shape = tuple[int, int, int]


@dataclass(frozen=True)
class Entry:
    """A line of the table: the fastest configuration of `op` for a local GEMM [M, K] x [K, N].

    partial_dtype: what partial sums travel in; None: fp32, or there are none. config: the fields of a `Config` but for
    partial_dtype; None: the rules' choice is the fastest. most_programs, comm_each: as in `Variant`. us, cost_model_us:
    medians of it and of the rules' choice, on the slowest rank, in microseconds. run: number of the run, in the table's
    list, that measured it. timing: "eager", or "graph" (replays of many calls), as in the records of benchmarks.
    """

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

    def __post_init__(self) -> None:
        """TypeError or ValueError for what no run wrote: the file is read as data, whoever made it."""
        for name in ("op", "dtype", "timing"):
            _require(name, getattr(self, name), str)
        _require("partial_dtype", self.partial_dtype, str | None)
        _require("config", self.config, dict | None)
        for least, names in enumerate((("most_programs", "comm_each", "run"), ("ranks", "M", "N", "K"))):
            for name in names:
                if not least <= as_integer(name, getattr(self, name)) <= _LARGEST:
                    raise ValueError(
                        f"an entry's {name} is {getattr(self, name)}, allowed are {least} to {_LARGEST}"
                    )
        for name in ("us", "cost_model_us"):
            _require(name, getattr(self, name), int | float)
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(
                    f"an entry's {name} is {getattr(self, name)}, allowed are finite numbers above 0"
                )

    @property
    def shape(self) -> Shape:
        """(M, N, K)."""
        return self.M, self.N, self.K

    @property
    def kind(self) -> tuple[object, ...]:
        """What must be equal for the entry to count."""
        return self.op, self.ranks, self.dtype, self.partial_dtype


def _require(name: str, value: object, allowed: Any) -> None:
    if not isinstance(value, allowed) or isinstance(value, bool):
        raise TypeError(f"an entry's {name} is a {type(value).__name__}")


class OtherVersions(ValueError):
    """A table that was measured on another GPU, with other versions, or with other sources of this library."""


class Table:
    """Entries, the runs that measured them, and what they were measured with."""

    def __init__(self, made: Made, runs: list[dict[str, Any]], entries: Iterable[Entry]) -> None:
        self.made = made
        self.runs = runs
        self.entries = {(entry.kind, entry.shape): entry for entry in entries}

    @classmethod
    def read(cls, path: Path, here: Made) -> Table:
        """The table in a file, made with what `here` says. `OtherVersions` for one that was made with anything else,
        ValueError for what is none, both with the file's name."""
        try:
            found = read_json(path)
            made = Made(**found["made_with"])
            if different := made.differs(here):
                raise OtherVersions(f"{path} was measured {different}")
            runs = [dict(run) for run in found["runs"]]
            return cls(made, runs, [Entry(**entry) for entry in found["entries"]])
        except OtherVersions:
            raise
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"{path} is no table of configurations: {type(error).__name__}: {error}"
            ) from None

    @cached_property
    def digest(self) -> str:
        """The same for the same entries, whatever runs they are of."""
        plain = [self.made, sorted(json.dumps(dataclasses.asdict(each)) for each in self.entries.values())]
        return hashlib.sha256(json.dumps(plain).encode()).hexdigest()

    def add(self, entry: Entry) -> None:
        """Put an entry in, in the place of one of the same kind and shape."""
        self.entries[entry.kind, entry.shape] = entry

    def write(self, path: Path) -> None:
        """An entry a line, in order, so that differences can be read; what may read it, the umask says. Raises OSError.
        Whoever reads meanwhile, or after a Ctrl-C, finds the old table or the new one."""
        entries = sorted(self.entries.values(), key=lambda entry: (*map(str, entry.kind), entry.shape))
        lists = {"runs": self.runs, "entries": [dataclasses.asdict(entry) for entry in entries]}
        parts = [f'"made_with": {json.dumps(self.made._asdict())}']
        parts += [
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


class InUse(NamedTuple):
    """The table that `choose` asks, and why there is none where it is None."""

    table: Table | None
    why: str = ""


@lru_cache(maxsize=16)
def _in_use(named: str, device: torch.device) -> InUse:
    """The table for `device`, where PYROCSHMEM_TUNED is `named`. ValueError where that names what is no table."""
    if named == "none":
        return InUse(None, "PYROCSHMEM_TUNED is none")
    path = Path(named) if named else default_path(device)
    try:
        if path is None or not (named or _is_there(path)):
            return InUse(None, "there is none: `python -m pyrocshmem tune` makes one")
        return InUse(Table.read(path, made_here(device)))
    except (ValueError, OSError) as error:
        if named and not isinstance(error, OtherVersions):
            raise
        why = one_line(str(error))
        say_once(f"{why}; it is ignored until `python -m pyrocshmem tune` has measured anew")
        return InUse(None, f"it is ignored: {why}")


def _is_there(path: Path) -> bool:
    """Whether there is anything in this place, even what can't be read."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


def in_use(device: torch.device) -> InUse:
    """The table that `choose` asks on `device`. ValueError where PYROCSHMEM_TUNED names what is no table."""
    return _in_use(os.environ.get("PYROCSHMEM_TUNED", ""), device)


# By heap: whether all its ranks read the same table.
_alike: WeakKeyDictionary[Heap, bool] = WeakKeyDictionary()


def choose_together(
    heap: Heap,
    op: str,
    M: int,
    N: int,
    K: int,
    dtype: torch.dtype,
    partial_dtype: torch.dtype | None,
    allow_tf32: bool,
    invariance: Invariance = NONE,
) -> Choice:
    """What `choice` gives all ranks of `heap`: by the table where all of them read the same. Collective the first time,
    but in a mode of `invariance`, which asks no table.

    Ranks must choose alike, but each reads a file of its own: of another home, or one that was tuned meanwhile.
    """
    facts = (op, M, N, K, dtype, heap.world_size, heap.device, partial_dtype)
    if invariance or heap.world_size == 1 or _is_read_by_all(heap, op):
        return choice(*facts, allow_tf32=allow_tf32, invariance=invariance)
    rules = decide(*facts, allow_tf32=allow_tf32)
    return Choice(rules.config, rules, None)


def _is_read_by_all(heap: Heap, op: str) -> bool:
    """Whether all ranks of `heap` read the same table: a vote, the first time. op: of the call, for `CallMismatch`."""
    if heap not in _alike:
        table = in_use(heap.device).table
        mine = "" if table is None else table.digest
        digests = heap.vote(f"{op}: table of configurations", mine.encode())
        _alike[heap] = len(set(digests)) == 1
        if not _alike[heap] and heap.rank == 0:
            others = ", ".join(str(rank) for rank, found in enumerate(digests) if found != digests[0])
            say_once(
                f"rank 0 reads another table of measured configurations than ranks {others}: none is used where they "
                "work together. Give all of them the same file (PYROCSHMEM_TUNED), or none"
            )
    return _alike[heap]


class Lookup(NamedTuple):
    """What the table says of a call: its configuration and the entry that gave it, None where there is none that
    counts; and in words which entry, or why none. factor: how many times as large, or as small, the shape is as the
    nearest entry's, in M, N and K taken together; 0 where there is no such entry. run: the run that measured it."""

    config: Config | None
    entry: Entry | None
    why: str
    factor: float = 0.0
    run: dict[str, Any] | None = None


class Choice(NamedTuple):
    """What `choose` gives for a call, what the rules say of it, and what the table does; None: it wasn't asked, since
    the caller asked for a placement by name."""

    config: Config
    rules: Decision
    table: Lookup | None


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
    allow_tf32: bool = False,
    invariance: Invariance | None = None,
) -> Config:
    """The configuration for a rank's GEMM [M, K] x [K, N] of `op`: "gemm" or a fused op's name.

    M, N, K: of this rank's GEMM: M rows of all ranks (also of `all_gather_gemm`), and its share of N or K. dtype: of
    the operands. world_size: ranks of the group. partial_dtype: as in `Config`. placement: one of the op's; None: the
    fastest known: that of the table which `python -m pyrocshmem tune` made here, where it has a similar GEMM, else that
    of the rules. allow_tf32: as of the call: float32 operands may go through tf32. invariance: the mode of the call, in
    which the table isn't asked; None: that of this thread (`pyrocshmem.batch_invariant`).
    Returns a frozen `Config`; change it with `dataclasses.replace`. `stream_k.explain` says why it is this one. Raises
    ValueError for an unknown op, a placement that the op doesn't have, sizes below 0 and fewer than one rank, TypeError
    for a dtype that the ops don't take, or a number that is no integer.
    """
    invariance = current() if invariance is None else invariance
    return choice(
        op, M, N, K, dtype, world_size, device, partial_dtype, placement, allow_tf32, invariance
    ).config


@lru_cache(maxsize=512, typed=True)  # 8.0 would find what 8 gave
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
    allow_tf32: bool = False,
    invariance: Invariance = NONE,
) -> Choice:
    """What `choose` gives, which has the arguments, and how it came about."""
    placements_of(op)
    if dtype not in DTYPES:
        raise TypeError(f"dtype is {dtype}, allowed are {', '.join(map(str, DTYPES))}")
    for name, number, least in (("M", M, 0), ("N", N, 0), ("K", K, 0), ("world_size", world_size, 1)):
        if as_integer(name, number) < least:
            raise ValueError(f"{name} is {number}, allowed are {least} or more")
    device = torch.device(device)
    asked = (op, M, N, K, dtype, world_size, device, partial_dtype, placement, allow_tf32, invariance)
    decision = decide(*asked)
    if placement is not None:
        return Choice(decision.config, decision, None)
    if invariance:
        found = Lookup(None, None, f"what it chooses may depend on M, and the call is {invariance}")
    elif decision.facts.in_tf32:
        found = Lookup(None, None, "its entries are of products without tf32")
    else:
        found = _look_up(decision, op, (M, N, K), dtype, world_size, device)
    return Choice(decision.config if found.config is None else found.config, decision, found)


def _look_up(
    decision: Decision, op: str, shape: Shape, dtype: torch.dtype, ranks: int, device: torch.device
) -> Lookup:
    """What the table has for a local GEMM of `shape`, (M, N, K); `decision`: the rules'.

    Raises ValueError where PYROCSHMEM_TUNED names what is no table.
    """
    table, why = in_use(device)
    if table is None:
        return Lookup(None, None, why)
    if min(shape) < 1:
        return Lookup(None, None, "it has no entries for empty operands")
    config, wire = decision.config, decision.facts.wire
    kind = (op, ranks, dtype_name(dtype), wire_name(wire))
    entries = [entry for entry in table.entries.values() if entry.kind == kind]
    if not entries:
        return Lookup(
            None, None, f"it has no entry for {op} of {describe_dtypes(dtype, wire)}, {ranks} ranks"
        )
    entry = min(entries, key=lambda found: (_distance(shape, found.shape), -math.prod(found.shape)))
    factor = 2 ** _distance(shape, entry.shape)
    nearest = f"the nearest of {len(entries)} entries, M N K = {' '.join(map(str, entry.shape))}"
    if _distance(shape, entry.shape) > _REACH:
        return Lookup(
            None, None, f"{nearest}, is a factor of {factor:.1f} away, more than {2**_REACH:g}", factor
        )
    run = table.runs[entry.run] if entry.run < len(table.runs) else {}
    if entry.config is None:
        return Lookup(config, entry, f"{nearest}, says that the rules' choice was the fastest", factor, run)
    try:
        found = _for_shape(entry, config, shape, target.num_sms(device))
        _check_measured(found, dtype, device)
        check(op, found, device)
    except (ValueError, TypeError) as error:
        return Lookup(None, None, f"{nearest}, can't be used here: {error}", factor)
    return Lookup(found, entry, f"{nearest}, has it", factor, run)


def _check_measured(config: Config, dtype: torch.dtype, device: torch.device) -> None:
    """ValueError for what no run measured, since it would not fit on `device`."""
    most = _MOST | {name: each * target.num_sms(device) for name, each in _MOST_AN_SM.items()}
    for name, limit in most.items():
        if getattr(config, name) > limit:
            raise ValueError(f"Config.{name} is {getattr(config, name)}, measured are up to {limit}")
    staged = config.num_stages * (config.block_m + config.block_n) * config.block_k * dtype.itemsize
    if target.backend() == "cuda" and staged > SHARED_BYTES:
        raise ValueError(f"{staged} bytes of stages, an SM has {SHARED_BYTES}")


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


def check_invariant(
    op: str,
    config: Config,
    M: int,
    N: int,
    K: int,
    dtype: torch.dtype,
    world_size: int,
    device: torch.device,
    invariance: Invariance,
) -> None:
    """ValueError for a caller's configuration with which a row's bits would depend on what `invariance` says they don't
    depend on. The other arguments are `choose`'s."""
    if invariance:
        rules = choice(op, M, max(N, 1), K, dtype, world_size, device, invariance=invariance).rules
        reason = why_not(config, rules.config, rules.facts)
        if reason:
            raise ValueError(f"{op} is {invariance} here, which this config would break: {reason}")


def dtype_name(dtype: torch.dtype) -> str:
    """As in the table: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def wire_name(wire: torch.dtype | None) -> str | None:
    """What partial sums travel in, as in the table; None: fp32, or there are none."""
    return None if wire in (None, torch.float32) else dtype_name(wire)


def describe_dtypes(dtype: torch.dtype, wire: torch.dtype | None) -> str:
    """For people: "bfloat16", or "bfloat16 with float32 partial sums", where these travel in another type."""
    return dtype_name(dtype) + ("" if wire in (None, dtype) else f" with {dtype_name(wire)} partial sums")


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

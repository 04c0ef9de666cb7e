"""`explain`: why `choose` gives a call the configuration that it gives, and what the next best would cost.

    print(stream_k.explain("gemm_all_reduce", 4096, 4096, 1792, torch.bfloat16, 2, device))

It says what was compared while choosing and nothing else: a time is a model's estimate or an entry's measurement, and
where there is neither, it says that there is none.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pyrocshmem.calls.invariance import Invariance, current
from pyrocshmem.stream_k.choice.cache import one_line
from pyrocshmem.stream_k.choice.config import BY_BLAS, BY_MESSAGE, Config, with_a_free_multiprocessor
from pyrocshmem.stream_k.choice.placement import Estimate, Facts, find_placement
from pyrocshmem.stream_k.choice.rules import Decision
from pyrocshmem.stream_k.choice.table import Choice, Entry, choice, describe_dtypes
from pyrocshmem.stream_k.local_gemm.product import schedule_of, tiles_of_block
from pyrocshmem.stream_k.local_gemm.schedule import Schedule

# Estimates that are printed, the fastest first.
_SHOWN = 3


@dataclass(frozen=True)
class Explanation:
    """Why `op` has this configuration; `str()` is a few lines for a reader, `line()` one.

    config: what `choose` gives. facts: the sizes, dtypes and the device that it was chosen for. decided_by: "table" (an
    entry has the configuration, or says that the rules' choice was the fastest), "rules" or "caller" (the placement was
    asked for by name). placement: why this placement, a clause. tile: why this tile, a clause. table: what the table
    says, "" where it wasn't asked. entry: the entry that counts; its times, in microseconds, are of its own shape.
    refused: (name, why not) of the placements that the rules asked before. next_best: (name, why) of the next
    placement, in the op's order, that suits, too; None: there is none. estimates: times by a model, of our tiles, the
    chosen one's first; empty where no model chose the tile. schedule: of the GEMM, of all blocks of rows together where
    they are launched in turn; None for an empty result, and where the BLAS multiplies if it can. fixed: what the mode
    of `pyrocshmem.batch_invariant` fixes, and what that costs where a model says it; "" where there is no mode.
    """

    op: str
    config: Config
    facts: Facts
    decided_by: str
    placement: str
    tile: str
    table: str
    refused: tuple[tuple[str, str], ...]
    next_best: tuple[str, str] | None
    estimates: tuple[Estimate, ...]
    entry: Entry | None
    schedule: Schedule | None
    fixed: str = ""

    def line(self) -> str:
        """The choice, what decided and why, the schedule and the next best, in one line."""
        tile = "" if self.config.placement in BY_BLAS else f"tile {_size(self.config)}"
        chosen = ", ".join(filter(None, (self.config.placement, tile)))
        parts = [
            f"{chosen}, by {self.decided_by}: {self._because()}",
            self._waves(),
            self.fixed,
            f"next best: {self._next()}",
        ]
        return "; ".join(part for part in parts if part)

    def __str__(self) -> str:
        facts, config = self.facts, self.config
        sizes = f"M N K = {facts.M} {facts.N} {facts.K} of a rank"
        where = f"{_ranks(facts.world_size)}, {facts.target} with {facts.num_sms} SMs"
        dtypes = describe_dtypes(facts.dtype, facts.wire)
        lines = [f"{self.op}, {sizes}, {dtypes}, {where}", f"  chosen by {self.decided_by}: {config}"]
        if self.table:
            lines.append(f"  table: {self.table}")
        lines.append(f"  placement {config.placement}: {self.placement}")
        lines += [f"    not {name}: {why}" for name, why in self.refused]
        blas = ", where the BLAS can't multiply" if config.placement in BY_BLAS else ""
        tile = f"{_size(config)}, {config.num_warps} warps, {config.num_stages} stages"
        lines.append(f"  tile {tile}{blas}: {self.tile}")
        if self.schedule is not None:
            lines.append(f"  schedule: {self._waves()}")
        if self.fixed:
            lines.append(f"  {self.fixed}")
        lines.append(f"  next best: {self._next()}")
        for each in self.estimates[1 : _SHOWN + 1] if not blas else ():
            lines.append(
                f"    tile {each.tile}: about {each.us:.1f} us, the chosen one {self.estimates[0].us:.1f} us"
            )
        return "\n".join(lines)

    def _because(self) -> str:
        if self.entry is not None:
            entry = self.entry
            times = f"{entry.us:g} us, the rules' choice {entry.cost_model_us:g} us"
            return f"measured at M N K = {' '.join(map(str, entry.shape))}, {times}"
        # What suits any sizes was chosen since those before it don't. Of a GEMM alone the tile is the choice.
        name, why_not = self.refused[-1] if self.refused else ("", "")
        alone = find_placement(self.op, self.config.placement).alone and self.config.placement not in BY_BLAS
        return (self.tile if alone else self.placement) + (f"; not {name}: {why_not}" if name else "")

    def _waves(self) -> str:
        if self.schedule is None:
            return ""
        plan = self.schedule
        split = f"{plan.num_split_tiles} of them split" if plan.has_shared_tiles else "none split"
        waves = "1 wave" if plan.waves == 1 else f"{plan.waves} waves"
        return f"{plan.num_tiles} tiles, {split}, {waves} on {plan.num_programs} programs"

    def _next(self) -> str:
        if self.entry is not None and self.entry.config is not None:
            return (
                f"the rules' choice, which took {self.entry.cost_model_us / self.entry.us:.2f} times as long"
            )
        by_blas, times = self.config.placement in BY_BLAS, self.estimates
        if len(times) > 1 and not by_blas:
            return f"tile {times[1].tile}, {times[1].us / times[0].us:.2f} times as long by the model"
        if self.next_best is None:
            return "unknown, nothing was estimated or measured"
        # Of our GEMM, where the BLAS is the faster one.
        time = f"about {times[0].us:.1f} us by the model" if times else "of unknown time"
        return f"{self.next_best[0]} ({self.next_best[1]}), {time}"


def explain(
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
) -> Explanation:
    """Why `stream_k.choose`, with the same arguments, gives the configuration that it gives.

    M, N, K: of a rank's GEMM [M, K] x [K, N], as for `choose`: M rows of all ranks, and this rank's share of N or K.
    dtype: of the operands. world_size: ranks of the group. partial_dtype: what partial sums travel in, as in `Config`.
    placement: explain the configuration of this one; None: that of the fastest one known. allow_tf32: as of the call.
    invariance: the mode of the call; None: that of this thread (`pyrocshmem.batch_invariant`).
    Returns an `Explanation`: which rule decided, with its thresholds and the values compared with them, or which entry
    of the measured table; the schedule; and what the next best would cost, where that was measured or a model gives it,
    in microseconds. Nothing is launched. Raises what `choose` raises.
    """
    mode = current() if invariance is None else invariance
    asked = (op, M, N, K, dtype, world_size, device, partial_dtype, placement, allow_tf32)
    found = choice(*asked, mode)
    config, decision = found.config, found.rules
    entry = None if found.table is None else found.table.entry
    by_rules = config == decision.config
    if entry is not None:
        decided_by = "table"
    else:
        decided_by = "rules" if placement is None else "caller"
    if not by_rules:
        why_placement, why_tile = "the entry of the table has it", "the entry of the table has it"
    else:
        why_placement = decision.asked[-1][1].why if decision.asked else "it was asked for by name"
        why_tile = decision.tiling.why
    return Explanation(
        op=op,
        config=config,
        facts=decision.facts,
        decided_by=decided_by,
        placement=why_placement,
        tile=why_tile,
        table=_table_says(found),
        refused=tuple((asked.name, verdict.why) for asked, verdict in decision.asked[:-1])
        if by_rules
        else (),
        next_best=_next_best(op, decision) if by_rules and decision.asked else None,
        estimates=decision.tiling.estimates if by_rules else (),
        entry=entry,
        schedule=_schedule(op, found),
        fixed=_fixed(op, found, choice(*asked)) if mode else "",
    )


def _fixed(op: str, found: Choice, default: Choice) -> str:
    """What a mode fixes of a call, and its cost: the time of what it takes over that of what the default takes."""
    facts, mine, other = found.rules.facts, found.config, default.config
    different = [
        f"{name} {getattr(mine, name)} instead of {getattr(other, name)}"
        for name in ("placement", "split", "k_blocks", "block_m", "block_n", "block_k", "partial_dtype")
        if getattr(mine, name) != getattr(other, name)
    ]
    text = f"{facts.invariance}: tiles are whole, the BLAS isn't asked; "
    if not different:
        return text + "the default is the same, so it costs nothing but the order in which a norm adds"
    text += ", ".join(different)
    times = [each.rules.tiling.estimates for each in (found, default)]
    if find_placement(op, other.placement).name in BY_BLAS or not all(times):
        return f"{text}, at a cost that no model knows"
    return f"{text}, which takes {times[0][0].us / times[1][0].us:.2f} times as long by the model"


def _next_best(op: str, decision: Decision) -> tuple[str, str] | None:
    """The first placement behind the deciding one that suits as well."""
    for placement in decision.behind:
        verdict = placement.suits(decision.facts)
        if verdict.suits:
            return placement.name, verdict.why
    return None


def _table_says(found: Choice) -> str:
    """What the table says of the call, and where an entry counted, when and on what it was measured."""
    if found.table is None:
        return ""
    entry = found.table.entry
    if entry is None:
        return found.table.why
    run = found.table.run or {}
    date, machine = str(run.get("date", "")).partition("T")[0], run.get("target", "a machine like this")
    times = f"{entry.us:g} us, {entry.timing}, the rules' choice {entry.cost_model_us:g} us"
    away = "this shape" if found.table.factor == 1 else f"a factor of {found.table.factor:.2f} away"
    return one_line(f"{found.table.why}; {away}, measured {date or 'some day'} on {machine}: {times}")


def _schedule(op: str, found: Choice) -> Schedule | None:
    """The GEMM's, as the op plans it."""
    facts, config = found.rules.facts, found.config
    placement = find_placement(op, config.placement)
    if min(facts.M, facts.N) < 1 or config.placement in BY_BLAS:
        return None
    rows = facts.M
    comm = config.num_comm_programs if config.placement == "beside" and facts.world_size > 1 else 0
    if placement.blocks:
        rows = facts.world_size * tiles_of_block(facts.M, facts.world_size, config.block_m) * config.block_m
    if config.placement not in BY_MESSAGE and not placement.alone:
        config = with_a_free_multiprocessor(config, facts.device)
    return schedule_of(config, rows, facts.N, max(facts.K, 1), facts.device, comm)


def _size(config: Config) -> str:
    return f"{config.block_m} x {config.block_n} x {config.block_k}"


def _ranks(number: int) -> str:
    return "1 rank" if number == 1 else f"{number} ranks"

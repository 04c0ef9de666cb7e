"""Timelines: clocks, marks, what is recorded of each op. What marks cost is read in the code: tests/compile."""

import functools
import itertools
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
import triton
from hypothesis import given
from hypothesis import strategies as st

from pyrocshmem import CallMismatch, Heap, stream_k, trace
from pyrocshmem.calls import timeline, timeline_files
from pyrocshmem.calls.timeline import COPY, MMA, Timeline
from pyrocshmem.stream_k.choice.config import BY_MESSAGE, BY_ROWS, Config
from tests.ranks import run_ranks, values
from tests.stream_k.products import device, random, small_config

TIER = 3
M, N, K = 96, 64, 64
WORLD = 2
GEMMS = ("GEMM", "GEMM + sums")
OPS = {
    "gemm_all_reduce": ("after", "beside", "own_stream", "inside", "copy_engine", "blas_blocks", *BY_MESSAGE),
    "gemm_reduce_scatter": ("copy_engine", "blas_blocks", *BY_MESSAGE),
    "gemm_all_scatter": ("beside", "own_stream", "inside", *BY_ROWS, *BY_MESSAGE),
    "all_gather_gemm": ("blas_blocks", "copy_engine", *BY_MESSAGE),
}


# Clocks.


@given(
    ahead=st.integers(-(10**15), 10**15),
    steps=st.lists(
        st.tuples(*(st.integers(0, 10**6) for _ in range(4))),
        min_size=1,
        max_size=20,
    ),
)
def test_clock_offset_is_within_its_error(ahead: int, steps: list[tuple[int, ...]]) -> None:
    """Ranks enter barriers at any time, and leave them at any time after both have entered."""
    at, ours, theirs = 0, [], []
    for enter_us, enter_them, leave_us, leave_them in steps:
        entered = (at + enter_us, at + enter_them)
        at = max(entered) + max(leave_us, leave_them)
        ours.append((entered[0] + ahead, max(entered) + leave_us + ahead))
        theirs.append((entered[1], max(entered) + leave_them))
    offset, error = timeline.clock_offset(np.array(ours), np.array(theirs))
    assert abs(offset - ahead) <= error


def aligned(rank: int, world_size: int) -> tuple[int, int]:
    with Heap(8 << 20) as heap, timeline.record(heap) as recorder:
        return recorder.align()


@pytest.mark.cpu
def test_alignment_finds_that_ranks_have_one_clock() -> None:
    found = values(run_ranks(aligned, 2))
    assert all(abs(ahead) <= error for ahead, error in found)
    assert found[0] == (0, found[1][1])
    assert 0 < found[1][1] < 10**9


# Marks.


@triton.jit
def marking_kernel(events, count):
    for i in range(0, count):
        trace.mark(events, trace.WAIT, i, i % 2 == 0)
    trace.mark(events, trace.END, -1)


def test_marks_that_do_not_fit_are_counted() -> None:
    limit, words = trace.MAX_EVENTS.value, trace.ROW_WORDS.value
    events = torch.zeros(2, words, dtype=torch.int64, device=device())
    marking_kernel[(2,)](events, 10)
    rows = events.cpu()
    assert rows[:, 0].tolist() == [6, 6]
    assert [what // 256 - 1 for what in rows[1, 2:14:2].tolist()] == [0, 2, 4, 6, 8, -1]
    assert [trace.STAGES[what % 256] for what in rows[1, 2:14:2].tolist()] == ["wait"] * 5 + ["end"]
    assert rows[1, 1:13:2].tolist() == sorted(rows[1, 1:13:2].tolist())
    assert not rows[:, 13:].any()
    events.zero_()
    events[:, 0] = limit - 2
    marking_kernel[(2,)](events, 10)
    rows = events.cpu()
    assert rows[:, 0].tolist() == [limit + 4] * 2, "later marks are counted only"
    assert rows[0, 1 + 2 * (limit - 2) :: 2].all()
    assert (rows[1, 1 : 1 + 2 * (limit - 2)] == 0).all()


# Recordings.


def _operands(op: str, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    rows = M // WORLD if op == "all_gather_gemm" else M
    a = torch.randn(rows, K, generator=generator, dtype=torch.float32).to(device())
    b = torch.randn(K, N, generator=generator, dtype=torch.float32).to(device())
    return a, b


def recorded(rank: int, world_size: int, calls: list[tuple[str, Config]]) -> list[tuple[Timeline, bool]]:
    """Of each call its timeline, and whether its bits are those of a call that nobody records."""
    recordings = []
    with Heap(32 << 20) as heap:
        for op, config in calls:
            a, b = _operands(op, rank)
            call = functools.partial(getattr(stream_k, op), a, b, group=heap, config=config)
            plain = call().clone()
            results = []
            found = timeline.record_call(lambda: results.append(call()), heap)  # noqa: B023 (runs at once)
            results.append(call())
            heap.synchronize()
            recordings.append((found, all(torch.equal(plain, each) for each in results)))
    return recordings


@pytest.mark.alone
@pytest.mark.num_ranks(2)
def test_recordings(tmp_path: Path) -> None:
    """Of every op, in every placement that differs."""
    calls = [
        (op, small_config(placement=placement, split="none", chunk=1, num_programs=4))
        for op, placements in OPS.items()
        for placement in placements
    ]
    ranks = values(run_ranks(recorded, WORLD, calls, timeout=100.0))
    wrong = []
    for (op, config), *recordings in zip(calls, *ranks, strict=True):
        try:
            _check_recording(op, config, recordings, tmp_path)
        except AssertionError as error:
            wrong.append(f"{op}, {config.placement}: {error}")
    assert not wrong, "\n".join(wrong)


def _check_recording(op: str, config: Config, recordings: list[tuple[Timeline, bool]], folder: Path) -> None:
    (found, same), (again, same_there) = recordings
    assert same
    assert same_there, "recording changed the result"
    assert found == again, "every rank gets the same timeline"
    tiles = -(-M // config.block_m) * (N // config.block_n)
    if config.placement == "copy_engine" and op != "gemm_all_scatter":
        tiles = WORLD * -(-M // WORLD // config.block_m) * (N // config.block_n)
    if config.placement in BY_MESSAGE:
        _check_messages(op, config, found, tiles)
    elif config.placement == "blas_blocks":
        own_in_two = op == "gemm_all_reduce" and config.chunk * config.block_m < M // WORLD
        for rank in range(WORLD):
            own = [span for span in found.spans if span.rank == rank]
            assert Counter(span.stage for span in own if span.kernel != "stream")[MMA] == WORLD + own_in_two
            assert Counter(span.stage for span in own)[COPY] == (WORLD - 1) * (1 + own_in_two)
    whole = (*BY_MESSAGE, "blas_blocks")
    for rank in range(WORLD if config.placement not in whole else 0):
        own = [span for span in found.spans if span.rank == rank]
        sums_own = config.placement == "copy_engine" and op in ("gemm_all_reduce", "gemm_reduce_scatter")
        stored = {"push"} if config.placement == "inside" else {"store", "reduce"} if sums_own else {"store"}
        for stage in ({MMA}, stored):
            counts = Counter(span.tile for span in own if span.kernel in GEMMS and span.stage in stage)
            assert counts == dict.fromkeys(range(tiles), 1), (rank, stage)
        stages = {span.stage for span in own}
        if config.placement in BY_ROWS:
            copies = [span for span in own if span.stage == COPY]
            assert len(copies) == _num_copies(op, config)
            assert all(span.kernel == "stream" for span in copies)
            assert ("pulls" in {span.kernel for span in own}) == (config.placement == "pull")
        elif config.placement != "inside":  # there the epilogue announces
            assert "announce" in stages
        moved = {"gemm_all_reduce": "reduce", "gemm_reduce_scatter": "reduce", "gemm_all_scatter": "push"}
        if config.placement in BY_ROWS:
            moved["gemm_all_scatter"] = COPY if config.placement == "copy_engine" else "pull"
        assert moved.get(op, MMA) in stages
    _check_order(found)
    assert found.dropped == 0
    assert 0 < found.exposed_us < found.total_us
    written = timeline_files.write(found, folder / "out.json", op)
    assert {path.name for path in written} == {"out.json", "out.png"}
    assert written[1].read_bytes().startswith(b"\x89PNG")


def _check_messages(op: str, config: Config, found: Timeline, tiles: int) -> None:
    """A product, of all tiles or in one piece by the BLAS, and an exchange."""
    kernel, products = ("GEMM", tiles) if config.placement == "messages" else ("BLAS", 1)
    stages = {"push", "wait", "store"} | ({"reduce"} if "reduce" in op else set())
    for rank in range(WORLD):
        own = [span for span in found.spans if span.rank == rank]
        assert [span.kernel for span in own if span.stage == MMA] == [kernel] * products
        assert {span.stage for span in own if span.kernel == "exchange"} == stages


def _num_copies(op: str, config: Config) -> int:
    """Of a rank, which has one peer: what copy engines move."""
    steps = -(-M // WORLD // config.block_m)
    # Rows or partials are pushed and, in an all-reduce, sums pulled, from both ranks, as columns are.
    columns = 2 * -(-M // config.block_m)
    if config.placement == "pull":
        return 0
    return {"gemm_all_reduce": 3 * steps, "gemm_all_scatter": columns}.get(op, steps)


def _check_order(found: Timeline) -> None:
    """Stages of a lane follow one another; a tile is stored after it was multiplied, and summed after that."""
    lanes = defaultdict(list)
    done: dict[tuple[int, int], float] = {}
    for span in found.spans:
        assert span.begin_us <= span.end_us
        lanes[span.rank, span.kernel, span.lane].append(span)
        if span.kernel in GEMMS and span.stage == MMA:
            done[span.rank, span.tile] = span.end_us
    for spans in lanes.values():
        spans.sort(key=lambda span: (span.begin_us, span.end_us))
        for first, second in itertools.pairwise(spans):
            assert first.end_us <= second.begin_us + found.clock_error_us
    for span in found.spans:
        # An exchange numbers its programs, whose parts are no tiles.
        if span.stage in ("store", "push") and span.tile >= 0 and span.kernel != "exchange":
            assert span.begin_us >= done[span.rank, span.tile]
        if span.kernel == "GEMM + sums" and span.stage == "reduce":
            # Its wait for the peers is part of it.
            assert span.begin_us >= done[span.rank, span.tile]
        elif span.stage == "reduce" and span.kernel in ("GEMM", "consumer"):
            stored = max(done[rank, span.tile] for rank in range(WORLD))
            assert span.begin_us >= stored - found.clock_error_us


def fix_up(rank: int, world_size: int) -> Timeline:
    config = small_config(split="stream_k", num_programs=5)
    a, b = random(M, 512, torch.float32, 0), random(512, N, torch.float32, 1)
    with Heap(8 << 20) as heap:
        return timeline.record_call(lambda: stream_k.gemm(a, b, config=config), heap)


def test_recording_of_split_tiles() -> None:
    (found,) = values(run_ranks(fix_up, 1))
    stages = Counter(span.stage for span in found.spans)
    assert stages["fix-up"] > 0
    assert stages[MMA] > stages["store"] == -(-M // small_config().block_m) * (N // small_config().block_n)


def mismatch(rank: int, world_size: int) -> str:
    a, b = _operands("gemm_all_reduce", rank)
    config = small_config()
    with Heap(32 << 20) as heap:
        with timeline.record(heap) as recorder:
            try:
                with timeline.record(heap):
                    pass
            except ValueError as error:
                inner = str(error)
            recorder.restart()
        if rank == 0:
            with trace.recording(recorder):
                try:
                    stream_k.gemm_all_reduce(a, b, group=heap, config=config)
                except CallMismatch as error:
                    return f"{inner}; {error}"
        else:
            try:
                stream_k.gemm_all_reduce(a, b, group=heap, config=config)
            except CallMismatch as error:
                return f"{inner}; {error}"
    return ""


@pytest.mark.num_ranks(2)
def test_all_ranks_record_or_none() -> None:
    for text in values(run_ranks(mismatch, 2)):
        assert "is being recorded already" in text
        assert "recorded=True" in text
        assert "recorded=False" in text

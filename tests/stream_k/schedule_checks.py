"""What a schedule promises, as checks on its segments: `check_schedule(schedule)` raises AssertionError."""

from collections import defaultdict

from pyrocshmem.stream_k.local_gemm.schedule import Schedule, Segment


def check_schedule(schedule: Schedule) -> None:
    """Assert everything that a schedule promises, from its segments alone."""
    programs = range(schedule.num_programs)
    segments = [schedule.segments(program) for program in programs]
    check_coverage(schedule, segments)
    check_order(segments)
    check_shares(schedule, segments)
    check_waits(segments)
    # One at a time in id order, as the interpreter does; then all resident, the scheduler favouring high ids.
    simulate(segments, list(programs), resident=1)
    simulate(segments, list(reversed(programs)), resident=len(programs))


def check_coverage(schedule: Schedule, segments: list[list[Segment]]) -> None:
    """Every iteration of every tile once; one finisher a tile, which adds all other programs in order."""
    of_tile = defaultdict(list)
    for program, done in enumerate(segments):
        for segment in done:
            of_tile[segment.tile].append((segment.k_begin, segment.k_end, program, segment))
    assert sorted(of_tile) == list(range(schedule.num_tiles))
    for tile, parts in of_tile.items():
        parts.sort(key=lambda part: part[:3])
        ends = [0]
        for k_begin, k_end, _, _ in parts:
            assert k_begin == ends[-1], f"tile {tile}: iterations from {ends[-1]}, then from {k_begin}"
            assert k_end > k_begin or schedule.iters_per_tile == 0
            ends.append(k_end)
        assert ends[-1] == schedule.iters_per_tile
        assert [segment.finishing for *_, segment in parts] == [False] * (len(parts) - 1) + [True]
        *earlier, (_, _, finisher, last) = parts
        assert list(last.contributors) == [program for _, _, program, _ in earlier]
        assert all(program < finisher for program in last.contributors)
        assert schedule.finisher(tile) == finisher


def check_order(segments: list[list[Segment]]) -> None:
    """At most one contribution a program, before everything else; programs without work are not launched."""
    for done in segments:
        assert done, "a program without work"
        contributing = [index for index, segment in enumerate(done) if not segment.finishing]
        assert contributing in ([], [0])
        assert all(not segment.contributors for segment in done if not segment.finishing)


def check_waits(segments: list[list[Segment]]) -> None:
    """Programs that begin together hardly wait: when a finisher has done its own iterations, the other partials of the
    tile are there, or one iteration away, since shares differ by one. Where programs finish before they contribute,
    each waits for the one before: a chain."""
    ended: dict[tuple[int, int], int] = {}  # iterations after which (program, tile) is done, if nobody waits
    for program, done in enumerate(segments):
        iterations = 0
        for segment in done:
            iterations += segment.k_end - segment.k_begin
            ended[program, segment.tile] = iterations
            for peer in segment.contributors:
                assert ended[peer, segment.tile] <= iterations + 1, f"program {program} waits for {peer}"


def check_shares(schedule: Schedule, segments: list[list[Segment]]) -> None:
    """Shares of the split region differ by one iteration at most; derived numbers agree with the segments."""
    shares = [hi - lo for lo, hi in map(schedule.program_range, range(schedule.num_programs))]
    split = shares[: schedule.num_split_programs]
    assert sum(shares) == schedule.split_iters == sum(split)
    assert not split or max(split) - min(split) <= 1
    in_split = [
        sum(s.k_end - s.k_begin for s in done if s.tile < schedule.num_split_tiles) for done in segments
    ]
    assert in_split == shares
    lengths = [sum(s.k_end - s.k_begin for s in done) for done in segments]
    assert schedule.max_iters == max(lengths, default=0)
    contributors = [p for p, done in enumerate(segments) if not all(s.finishing for s in done)]
    assert (schedule.workspace_tiles > 0) == bool(contributors) == (schedule.kind != "data_parallel")
    assert all(program < schedule.workspace_tiles for program in contributors)
    assert schedule.waves * schedule.num_programs >= schedule.num_tiles


def simulate(segments: list[list[Segment]], order: list[int], resident: int) -> None:
    """Run the programs, `resident` at a time, started in `order`; AssertionError if all that run wait."""
    published: set[tuple[int, int]] = set()
    waiting, running = list(order), []
    position = dict.fromkeys(order, 0)
    while waiting or running:
        while waiting and len(running) < resident:
            running.append(waiting.pop(0))
        progress = False
        for program in list(running):
            done = segments[program]
            while position[program] < len(done):
                segment = done[position[program]]
                if any((peer, segment.tile) not in published for peer in segment.contributors):
                    break
                if not segment.finishing:
                    published.add((program, segment.tile))
                position[program] += 1
                progress = True
            if position[program] == len(done):
                running.remove(program)
                progress = True
        assert progress, f"deadlock: programs {running} wait for partials that nobody running will publish"


def tiles_in_order(tiles_m: int, tiles_n: int, group_m: int) -> list[tuple[int, int]]:
    """(row, column) of every tile, in the order in which `collectives.order.tile_coords` counts them."""
    return [
        (row, column)
        for first in range(0, tiles_m, group_m)
        for column in range(tiles_n)
        for row in range(first, min(first + group_m, tiles_m))
    ]

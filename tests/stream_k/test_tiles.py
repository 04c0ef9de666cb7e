"""`stream_k.choice.gemm_model`: the tiles chosen for products alone on an H200, against measurements of them there."""

import math
import statistics

import pytest
import torch

from pyrocshmem import stream_k
from pyrocshmem.stream_k.choice import gemm_model, rules
from pyrocshmem.stream_k.choice.gemm_model import COHORTS, DEEP, FOUR_WARPS, TILES, fastest_tile
from pyrocshmem.stream_k.local_gemm.product import schedule_of

TIER = 0
pytestmark = pytest.mark.cpu

NUM_SMS = 132
ALL = (*TILES, FOUR_WARPS, COHORTS)
# (M, N, K): microseconds of tiles, by their places in ALL, as the model would cut them; one H200, fp16, and of N that 8
# divides bf16, B from memory.
MEASURED = {
    (147, 1589, 415): {4: 6.7, 5: 7.0, 6: 6.5, 7: 7.0, 8: 5.7, 9: 6.0, 10: 6.0},
    (264, 1953, 2461): {1: 23.4, 2: 21.4, 4: 16.8, 6: 16.6, 8: 18.9, 9: 18.4, 10: 21.1},
    (335, 2651, 6957): {0: 59.8, 2: 51.8, 3: 59.0, 4: 51.5, 6: 49.3, 8: 55.9, 9: 57.4},
    (426, 331, 848): {4: 6.1, 5: 6.0, 6: 6.1, 7: 6.0, 8: 5.0, 9: 4.5, 10: 4.7},
    (611, 955, 646): {4: 8.3, 5: 9.7, 6: 8.3, 7: 9.8, 8: 9.1, 9: 8.4, 10: 9.6},
    (815, 3540, 6046): {0: 91.0, 1: 110.0, 2: 98.8, 3: 92.6, 4: 114.5, 6: 94.1, 9: 120.1},
    (1198, 3524, 1332): {0: 41.9, 1: 38.5, 2: 34.8, 3: 38.1, 5: 36.8, 6: 40.0, 7: 36.4},
    (2387, 610, 827): {1: 12.9, 2: 12.5, 4: 14.2, 5: 12.5, 6: 13.0, 7: 12.2, 8: 13.6},
    (3219, 1106, 2102): {0: 37.1, 1: 40.4, 2: 37.6, 3: 36.6, 5: 44.4, 6: 47.8, 7: 40.6},
    (4041, 6828, 2239): {0: 219.9, 1: 305.8, 2: 230.8, 3: 262.3},
    (5389, 2147, 3506): {0: 153.7, 1: 208.6, 2: 161.7, 3: 172.4, 5: 205.8, 6: 213.9, 7: 191.2},
    (165, 1102, 6925): {4: 25.1, 6: 23.6, 7: 24.7, 8: 22.8, 9: 25.6, 10: 22.4},
    (189, 230, 7318): {5: 17.5, 6: 17.4, 7: 16.3, 8: 13.5, 9: 15.9, 10: 14.2},
    (498, 5571, 6047): {0: 104.7, 2: 105.7, 3: 105.1, 4: 112.5, 6: 103.8, 9: 128.5},
    (7103, 368, 642): {0: 16.8, 1: 17.2, 2: 17.6, 3: 16.2, 5: 18.1, 6: 18.1, 7: 16.9},
    (200, 8192, 7168): {1: 57.1, 2: 48.8, 4: 59.0, 6: 54.3, 8: 66.5, 11: 46.3},
    (256, 8192, 2048): {1: 16.8, 2: 16.3, 4: 19.2, 6: 17.7, 8: 20.6, 11: 15.4},
    (384, 5120, 4096): {1: 26.7, 2: 25.8, 4: 33.4, 6: 30.0, 8: 37.5, 11: 25.0},
    (512, 2048, 2048): {1: 13.2, 2: 13.2, 4: 10.8, 6: 10.2, 8: 11.5, 11: 13.2},
    (512, 8192, 4096): {0: 45.4, 1: 48.7, 2: 50.7, 4: 65.0, 6: 56.5, 8: 83.9, 11: 47.2},
    (768, 2048, 4096): {1: 23.8, 2: 23.6, 4: 31.9, 6: 26.7, 8: 27.9, 11: 23.5},
    (768, 8192, 4096): {1: 77.1, 2: 75.5, 4: 100.8, 6: 83.7, 8: 126.8, 11: 68.6},
}


def lost() -> float:
    """The mean ratio of the measurement of a chosen tile to the shortest of its product."""
    found = []
    for shape, measurements in MEASURED.items():
        tile, _ = fastest_tile(*shape, NUM_SMS)
        found.append(measurements.get(ALL.index(tile), math.inf) / min(measurements.values()))
    return statistics.geometric_mean(found)


def errors() -> list[float]:
    return [
        abs(
            math.log(
                gemm_model._time(tile, gemm_model._schedule(tile, *shape, NUM_SMS), *shape, NUM_SMS) / us
            )
        )
        for shape, measurements in MEASURED.items()
        for tile, us in ((ALL[i], us) for i, us in measurements.items())
    ]


def test_choices_are_nearly_the_fastest() -> None:
    assert lost() < 1.04
    assert statistics.fmean(errors()) < 0.2


@pytest.mark.parametrize(
    ("name", "value"), [("_END", 0.0), ("_MEMORY", 0.5), ("_FIX_UP", 20.0), ("_START", 9.0)]
)
def test_a_wrong_constant_shows(monkeypatch: pytest.MonkeyPatch, name: str, value: float) -> None:
    monkeypatch.setattr(gemm_model, name, value)
    assert lost() >= 1.04 or statistics.fmean(errors()) >= 0.2


def test_choose(h200: torch.device) -> None:
    """The configuration of a product alone has the model's tile and schedule, that of few rows narrow tiles."""

    def chosen(M: int, N: int, K: int, dtype: torch.dtype = torch.bfloat16) -> stream_k.Config:
        return stream_k.choose("gemm", M, N, K, dtype, 1, h200)

    for shape in (*MEASURED, (65, 1, 1), (65, 100_000, 256), (8192, 1792, 4096)):
        found = chosen(*shape)
        tile, schedule = fastest_tile(*shape, NUM_SMS)
        assert (found.block_m, found.block_n, found.block_k) == (tile.block_m, tile.block_n, tile.block_k)
        made = schedule_of(found, *shape, h200)
        assert (made.num_split_tiles, made.num_split_programs) == (
            schedule.num_split_tiles,
            schedule.num_split_programs,
        )
        # Fewer programs, as many waves.
        assert made.waves == schedule.waves
    blocks = [(c.block_m, c.block_n) for c in (chosen(M, 4096, 3584) for M in (1, 16, 64, 128))]
    assert blocks == [(16, 64), (16, 64), (64, 32), (64, 64)]
    # Cut where most multiprocessors would idle: 16 tiles of 64 K-iterations in eight parts, 64 tiles never.
    for N, K, parts in ((1024, 8192, 8), (4096, 14336, 1)):
        made = schedule_of(chosen(1, N, K), 1, N, K, h200)
        assert made.num_programs == N // 64 * parts
    # A second kernel adds the parts, where K is long; else tiles of few columns stay whole.
    splits = [
        chosen(M, 1024, K).split for M, K in ((1, 4096), (24, 4096), (64, 4096), (128, 8192), (1, 2048))
    ]
    assert splits == ["separate", "separate", "separate", "separate", "none"]
    # Four warps where TMA stores the result; small steps along K for what is read as fast as memory answers.
    tiles_of = [(c.block_m, c.block_n, c.num_warps) for c in (chosen(768, N, 4096) for N in (8192, 8191))]
    assert tiles_of == [(128, 128, 4), (128, 128, 8)]
    deep = [chosen(M, N, 7168) for M, N in ((65, 5120), (128, 8192), (128, 4096), (129, 8192), (64, 8192))]
    # Cohorts where there is less than a wave of tiles, or hardly more than one, and K is long.
    shapes = (
        (512, 5120, 12800),
        (1000, 5120, 5120),
        (384, 8192, 7168),
        (1000, 5120, 1024),
        (8192, 3584, 8192),
    )
    assert [chosen(*shape).split == "stream_k" for shape in shapes] == [True, True, False, False, False]
    assert [c.num_stages == DEEP.num_stages for c in deep] == [True, True, False, False, False]
    few, more = chosen(4096, 1792, 4096), chosen(4096, 4160, 4096)
    assert (few.num_programs, more.num_programs) == (112, NUM_SMS)
    assert chosen(4096, 4096, 4096, torch.float32).block_k == 32
    # Messages go by the same tiles, whatever K.
    for op in ("gemm_all_reduce", "gemm_all_scatter", "gemm_reduce_scatter"):
        sizes = ((256, 4096, K) for K in (64, 1000, 30_000))
        found = {stream_k.choose(op, *size, torch.bfloat16, 2, h200, placement="messages") for size in sizes}
        assert len(found) == 1


def test_few_rows_with_long_k(h200: torch.device) -> None:
    """As measured: a second kernel adds parts of tiles, of 64 columns where those leave half of the SMs idle and rows
    are few, of 128 where there are more of either; of up to 16 rows only where columns are few."""
    none, narrow, wide = ("none", 64), ("separate", 64), ("separate", 128)
    measured = {
        (19, 3584, 18944): narrow,
        (32, 3072, 28672): narrow,
        (16, 3584, 18944): none,
        (19, 3584, 8192): none,
        (33, 3072, 7680): ("none", 32),
        (33, 3072, 8192): wide,
        (40, 1024, 14336): narrow,
        (40, 2048, 14336): narrow,
        (48, 3584, 18944): wide,
        (64, 4352, 10752): wide,
        (20, 5632, 8192): wide,
        (20, 5632, 7680): none,
        (52, 5632, 20480): wide,
        (53, 6144, 24576): wide,
        (53, 6144, 15360): none,
        (53, 6784, 24576): none,
    }
    for shape, expected in measured.items():
        found = stream_k.choose("gemm", *shape, torch.bfloat16, 1, h200)
        assert (found.placement, found.split, found.block_n) == ("after", *expected), shape
        # Where ranks may have other shares of K, which must not matter, nothing is cut by it.
        fused = stream_k.choose("all_gather_gemm", *shape, torch.bfloat16, 2, h200)
        assert fused.split != "separate", shape


def test_who_brings_columns(h200: torch.device) -> None:
    """Programs where links have more to do than SMs, of which each has one to itself."""

    def chosen(ranks: int, N: int, K: int) -> stream_k.Config:
        return stream_k.choose("gemm_all_scatter", 8192, N, K, torch.bfloat16, ranks, h200)

    for ranks, K, placement in ((4, 8192, "pull"), (4, 16384, "copy_engine"), (2, 1024, "copy_engine")):
        assert chosen(ranks, 3584, K).placement == placement
    pulled, odd = chosen(4, 3584, 8192), chosen(4, 3580, 8192)
    assert pulled.num_programs + pulled.num_comm_programs == NUM_SMS
    # Rows that don't start at multiples of 16 bytes take programs many narrow loads.
    assert odd.placement == "copy_engine"


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize(
    "op", ["all_gather_gemm", "gemm_all_scatter", "gemm_all_reduce", "gemm_reduce_scatter"]
)
def test_few_rows_that_leave_as_messages_have_even_waves(op: str) -> None:
    """144 tiles on 132 SMs left 120 of them idle for half of the time."""
    wire = torch.bfloat16 if "reduce" in op else None
    cases = ((7, 9216, 72), (2, 10240, 80), (16, 17408, 91), (7, 8448, 0), (48, 16384, 128))
    for M, N, programs in cases:
        # Of the last an all-gather is the BLAS', unless it is asked for messages.
        by_name = "messages" if (op, M) == ("all_gather_gemm", 48) else None
        found = rules.cost_model(op, M, N, 4096, torch.bfloat16, 2, torch.device("cpu"), wire, by_name)
        assert (found.placement, found.split, found.num_programs) == ("messages", "none", programs)
    found = rules.cost_model(op, 7, 9216, 4096, torch.float32, 2, torch.device("cpu"), wire, "messages")
    assert found.num_programs == 0

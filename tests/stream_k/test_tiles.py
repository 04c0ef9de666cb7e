"""`stream_k.tiles`: the tiles chosen for products alone on an H200, against readings of them there."""

import math
import statistics
from collections.abc import Iterator

import pytest
import torch

import stream_k
from pyrocshmem import target
from stream_k import config, tiles, tuned
from stream_k.product import schedule_of
from stream_k.tiles import TILES, fastest_tile

TIER = 0
pytestmark = pytest.mark.cpu

PROCESSORS = 132
# (M, N, K): microseconds of tiles, by their places in TILES, as the model would cut them; one H200, fp16.
READINGS = {
    (165, 200, 457): {3: 5.0, 4: 5.2, 5: 4.9, 6: 5.2, 7: 4.3, 8: 4.3, 9: 3.9},
    (1995, 220, 621): {3: 6.0, 4: 6.3, 5: 5.8, 6: 6.5, 7: 5.0, 8: 5.4},
    (5077, 288, 341): {0: 8.6, 1: 6.5, 2: 6.7, 3: 6.3, 4: 6.3, 6: 7.6},
    (2423, 2531, 6216): {0: 127.2, 1: 158.9, 2: 161.5},
    (209, 4021, 1149): {3: 8.9, 4: 9.6, 5: 8.2, 6: 9.5, 8: 9.5},
    (7762, 400, 422): {0: 9.6, 1: 10.5, 2: 10.3, 4: 11.6, 6: 13.5},
    (4713, 245, 2789): {0: 28.9, 1: 19.6, 2: 27.5},
    (1419, 446, 197): {1: 6.0, 3: 4.8, 4: 4.8, 5: 4.9, 6: 4.9, 8: 4.6},
    (3133, 1998, 129): {0: 15.6, 1: 15.4, 2: 15.2, 6: 12.5},
}


def lost() -> float:
    """The largest ratio of the reading of a chosen tile to the shortest of its product."""
    found = []
    for shape, readings in READINGS.items():
        tile, _ = fastest_tile(*shape, PROCESSORS)
        found.append(readings.get(TILES.index(tile), math.inf) / min(readings.values()))
    return max(found)


def errors() -> list[float]:
    return [
        abs(math.log(tiles._time(tile, tiles._schedule(tile, *shape, PROCESSORS), *shape, PROCESSORS) / us))
        for shape, readings in READINGS.items()
        for tile, us in ((TILES[i], us) for i, us in readings.items())
    ]


def test_choices_are_nearly_the_fastest() -> None:
    assert lost() < 1.1
    assert statistics.fmean(errors()) < 0.1


@pytest.mark.parametrize(
    ("name", "value"), [("_END", 0.0), ("_MEMORY", 1.0), ("_PARTIAL_AREA", 40.0), ("_START", 9.0)]
)
def test_a_wrong_constant_shows(monkeypatch: pytest.MonkeyPatch, name: str, value: float) -> None:
    monkeypatch.setattr(tiles, name, value)
    assert lost() >= 1.1 or statistics.fmean(errors()) >= 0.1


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """A device of as many multiprocessors, for choices: nothing runs there."""
    monkeypatch.setattr(target, "backend", lambda: "cuda")
    monkeypatch.setattr(target, "interpreted", lambda: False)
    monkeypatch.setattr(config, "CPU_PROGRAMS", PROCESSORS)
    remembered = (config.num_multiprocessors, tuned.choose)
    for each in remembered:
        each.cache_clear()
    yield torch.device("cpu")
    for each in remembered:
        each.cache_clear()


def test_choose(h200: torch.device) -> None:
    """The configuration of a product alone has the model's tile and schedule, that of few rows one wave of small
    tiles."""

    def chosen(M: int, N: int, K: int, dtype: torch.dtype = torch.bfloat16) -> stream_k.Config:
        return stream_k.choose("gemm", M, N, K, dtype, 1, h200)

    for shape in (*READINGS, (1, 1, 1), (64, 100_000, 256), (8192, 1792, 4096)):
        found = chosen(*shape)
        tile, schedule = fastest_tile(*shape, PROCESSORS)
        assert (found.block_m, found.block_n, found.block_k) == (tile.block_m, tile.block_n, tile.block_k)
        made = schedule_of(found, *shape, h200)
        assert (made.num_split_tiles, made.num_split_programs) == (
            schedule.num_split_tiles,
            schedule.num_split_programs,
        )
        # Fewer programs, as many waves.
        assert made.waves == schedule.waves
    blocks = [(c.block_m, c.block_n) for c in (chosen(M, 4096, 3584) for M in (1, 16, 64, 128))]
    assert blocks == [(16, 32), (16, 32), (64, 32), (64, 64)]
    whole, parts = chosen(4096, 1792, 4096), chosen(8192, 1792, 4096)
    assert (whole.num_programs, parts.num_programs) == (112, PROCESSORS)
    assert chosen(4096, 4096, 4096, torch.float32).block_k == 32
    # Beside communication all ranks must choose alike, whatever their K.
    for op in ("gemm_all_reduce", "gemm_all_scatter", "gemm_reduce_scatter"):
        found = {stream_k.choose(op, 256, 4096, K, torch.bfloat16, 2, h200) for K in (64, 1000, 30_000)}
        assert len(found) == 1


def test_who_brings_columns(h200: torch.device) -> None:
    """Programs where links have more to do than multiprocessors, of which each has one to itself."""

    def chosen(ranks: int, N: int, K: int) -> stream_k.Config:
        return stream_k.choose("gemm_all_scatter", 8192, N, K, torch.bfloat16, ranks, h200)

    for ranks, K, placement in ((4, 8192, "pull"), (4, 16384, "copy_engine"), (2, 1024, "copy_engine")):
        assert chosen(ranks, 3584, K).placement == placement
    pulled, odd = chosen(4, 3584, 8192), chosen(4, 3580, 8192)
    assert pulled.num_programs + pulled.num_comm_programs == PROCESSORS
    # Rows that don't start at multiples of 16 bytes take programs many narrow loads.
    assert odd.placement == "copy_engine"

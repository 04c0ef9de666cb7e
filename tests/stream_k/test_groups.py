"""How many tile rows a group has whose tiles are done column by column, against measurements on H200s."""

import statistics
from math import ceil

import pytest
import torch

from pyrocshmem.stream_k.choice import rules
from pyrocshmem.stream_k.local_gemm.schedule import even_group

TIER = 0
pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("h200")]

Size = tuple[int, int, int]
# Microseconds of a GEMM alone, M, N, K, in groups of so many tile rows.
ALONE: dict[Size, dict[int, float]] = {
    (516, 28672, 4096): {8: 239.4, 9: 208.5},
    (700, 28672, 8192): {8: 552.1, 11: 520.9},
    (1100, 8192, 4096): {8: 116.1, 9: 113.0},
    (1200, 12288, 5120): {8: 214.4, 10: 207.8},
    (1650, 7168, 5120): {7: 159.8, 8: 159.9, 12: 160.2, 13: 158.7},
    (2070, 3072, 8192): {8: 165.0, 9: 153.5, 11: 149.0, 12: 148.6, 16: 162.3},
    (2100, 8192, 4096): {8: 221.7, 9: 215.1, 11: 212.7, 12: 215.0, 16: 222.6},
    (2200, 29568, 8192): {8: 1647.1, 9: 1619.7, 12: 1649.4, 16: 1648.9},
    (2943, 1792, 5120): {8: 89.5, 12: 88.8, 16: 88.8},
    (2956, 55296, 5120): {8: 2524.0, 12: 2591.9, 16: 2592.2},
    (3000, 12800, 5120): {8: 587.6, 12: 587.6, 16: 606.1},
    (12959, 3072, 2048): {8: 248.2, 11: 238.4, 12: 238.6, 16: 243.9},
}
# The same of an all-reduce of two ranks, whose copies move a group at a time.
SUMMED: dict[Size, dict[int, float]] = {
    (4550, 8192, 4096): {16: 518, 6: 488, 9: 474, 18: 475},
    (5376, 5120, 6144): {16: 525, 6: 510, 7: 522, 11: 520, 21: 527},
    (6000, 5120, 5120): {16: 514, 6: 509, 8: 512, 12: 507, 24: 506},
    (6281, 8192, 4096): {16: 661, 7: 668, 9: 659, 13: 658, 25: 653},
    (8152, 5120, 2560): {16: 378, 7: 385, 8: 381, 11: 382},
    (8998, 4096, 4096): {16: 486, 6: 485, 8: 484, 9: 478, 12: 487, 18: 480},
    (10000, 4096, 7168): {16: 837, 6: 842, 8: 839, 10: 841, 14: 844, 20: 847},
    (11934, 7168, 10240): {16: 2399, 6: 2424, 8: 2405, 10: 2398, 12: 2412, 24: 2405},
    (13312, 2048, 4096): {16: 383, 6: 369, 8: 370, 11: 372, 13: 372, 18: 376},
    (13749, 8192, 4096): {16: 1343, 6: 1349, 8: 1342, 11: 1342, 14: 1332, 18: 1347},
}


def chosen(op: str, size: Size, ranks: int, placement: str) -> int:
    device = torch.device("cpu")
    config = rules.cost_model(op, *size, torch.bfloat16, ranks, device, placement=placement)
    if op == "gemm_all_reduce":
        assert config.chunk == config.group_m
    return config.group_m


@pytest.mark.parametrize(
    ("op", "ranks", "placement", "measured", "fixed", "gained"),
    [
        ("gemm", 1, "after", ALONE, 8, 1.03),
        ("gemm_all_reduce", 2, "copy_engine", SUMMED, 16, 1.01),
    ],
)
def test_groups_are_nearly_the_fastest(
    op: str, ranks: int, placement: str, measured: dict[Size, dict[int, float]], fixed: int, gained: float
) -> None:
    """fixed: tile rows that were a group whatever the sizes, which took `gained` times as long."""
    lost, before = [], []
    for size, times in measured.items():
        best = min(times.values())
        lost.append(times[chosen(op, size, ranks, placement)] / best)
        before.append(times[fixed] / best)
    assert max(lost) < 1.025
    assert statistics.geometric_mean(before) > gained * statistics.geometric_mean(lost)


@pytest.mark.parametrize("about", [1, 2, 7, 8, 10, 16])
def test_even_groups(about: int) -> None:
    """About as many tile rows as asked for, and no more groups than that makes."""
    for tiles_m in range(1, 500):
        group = even_group(tiles_m, about)
        assert 1 <= group <= tiles_m
        assert group <= 1.5 * about + 1
        if tiles_m >= about:
            assert group >= about / 1.5
        if tiles_m < 1.5 * about:
            assert group == tiles_m
        assert ceil(tiles_m / group) <= max(1, tiles_m / about + 0.5)


def test_the_examples() -> None:
    assert [even_group(tiles_m, 8) for tiles_m in (9, 18, 20, 28)] == [9, 9, 7, 7]

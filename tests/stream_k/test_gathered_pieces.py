"""In which pieces an all-gather of an H200 brings the rows of its peers, and by which tiles they are multiplied."""

import pytest
import torch

from stream_k import Config, cost_model

TIER = 0
pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("h200")]

RANKS = 2
# M, N, K of a rank's product: microseconds on 2 x H200, bf16, eager, by the height and width of tiles and the pieces of
# a block.
READINGS = {
    (1024, 3584, 8192): {(128, 256, 1): 133, (128, 128, 1): 118},
    (2048, 1792, 4096): {(128, 256, 1): 88, (128, 128, 1): 74, (128, 128, 2): 78},
    (2048, 3584, 8192): {(128, 256, 1): 182, (128, 128, 1): 218, (64, 128, 1): 203, (128, 256, 4): 187},
    (4096, 1792, 4096): {(128, 256, 1): 114, (128, 256, 2): 118, (128, 128, 1): 123},
    (4096, 3584, 8192): {(128, 256, 1): 341, (128, 256, 2): 342, (128, 256, 8): 352},
    (8192, 1792, 4096): {(128, 256, 1): 195, (128, 256, 2): 187, (128, 256, 4): 189, (128, 256, 8): 193},
    (8192, 3584, 8192): {(128, 256, 1): 617, (128, 256, 2): 618, (128, 256, 8): 625},
    (16384, 1792, 4096): {(128, 256, 1): 365, (128, 256, 2): 323, (128, 256, 4): 326, (128, 256, 8): 330},
}


def chosen(M: int, N: int, K: int, ranks: int = RANKS, dtype: torch.dtype = torch.bfloat16) -> Config:
    where = torch.device("cpu")
    return cost_model.cost_model("all_gather_gemm", M, N, K, dtype, ranks, where, placement="copy_engine")


@pytest.mark.parametrize("shape", READINGS, ids=str)
def test_choices_are_nearly_the_fastest(shape: tuple[int, int, int]) -> None:
    config = chosen(*shape)
    pieces = -(-shape[0] // RANKS // (config.chunk * config.block_m))
    readings = READINGS[shape]
    assert readings[config.block_m, config.block_n, pieces] <= 1.01 * min(readings.values())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_pieces_do_not_depend_on_columns(ranks: int, dtype: torch.dtype) -> None:
    """Ranks may have different numbers of them, and must agree on the pieces."""
    for M in (1, 100, 1000, 4097, 16384, 65536, 1 << 20):
        for K in (64, 4096, 16384):
            heights = {chosen(M, N, K, ranks, dtype) for N in (1, 63, 64, 65, 257, 1792, 1793, 28672)}
            assert len({config.chunk * config.block_m for config in heights}) == 1, (M, K)

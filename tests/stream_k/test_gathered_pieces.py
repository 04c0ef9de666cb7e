"""In which pieces an all-gather of an H200 brings the rows of its peers, and by which tiles they are multiplied."""

import dataclasses
import statistics

import pytest
import torch

from pyrocshmem.stream_k import Config
from pyrocshmem.stream_k.choice import gemm_model, rules, tilings
from pyrocshmem.stream_k.local_gemm.product import make_product
from pyrocshmem.stream_k.ops import op

TIER = 0
pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("h200")]

RANKS = 2
# Height and width of tiles, pieces of a block.
WAYS = (
    (128, 256, 1),
    (128, 256, 2),
    (128, 256, 4),
    (128, 128, 1),
    (128, 128, 2),
    (64, 256, 1),
    (64, 256, 2),
    (64, 128, 1),
    (64, 128, 2),
    (64, 64, 1),
    (64, 64, 2),
    (64, 32, 1),
    (64, 32, 2),
)
# M, N, K of a rank's product: microseconds of these ways, 0 where there is no measurement; 2 x H200, bf16, eager.
# fmt: off
MEASURED = {
    (1024, 3584, 8192):  (131,   0,   0, 111,   0, 105,   0, 119,   0, 153,   0,   0,   0),
    (2048, 1024, 8192):  (146,   0,   0, 115,   0, 109,   0,  95,   0, 103,   0,   0,   0),
    (2048, 1792, 4096):  ( 86,   0,   0,  71,   0,  68,   0,  71,   0,  85,   0,   0,   0),
    (2048, 3584, 8192):  (182, 182, 187, 218, 223, 219, 220, 203, 205,   0,   0,   0,   0),
    (3072, 512, 8192):   (167, 171,   0, 139, 141, 136, 141, 115, 118,   0, 111,   0,   0),
    (3072, 1024, 8192):  (169, 175,   0, 140, 147, 137, 142, 141, 122,   0,   0,   0,   0),
    (4096, 64, 8192):    (  0, 192,   0,   0, 157,   0, 155,   0, 137,   0, 132,   0, 138),
    (4096, 256, 8192):   (  0, 193,   0,   0, 159,   0, 157,   0, 141,   0, 136,   0, 138),
    (4096, 1024, 8192):  (190, 197,   0, 165, 167, 161, 166, 166, 144,   0,   0,   0,   0),
    (4096, 1792, 4096):  (114, 118, 126, 123, 120, 123, 121, 122, 110,   0,   0,   0,   0),
    (4096, 3584, 8192):  (341, 342, 345, 387, 383, 372, 373, 388, 389,   0,   0,   0,   0),
    (5000, 1792, 4096):  (164, 144,   0, 155, 144, 160, 163, 170, 175,   0,   0,   0,   0),
    (6000, 1000, 4096):  (185, 161,   0, 151, 132, 176, 151, 165, 162,   0,   0,   0,   0),
    (6000, 1024, 4096):  (169, 144,   0, 137, 120, 135, 120, 128, 120,   0,   0,   0,   0),
    (6144, 1000, 4096):  (140, 140,   0, 156, 130, 178, 150, 169, 166,   0,   0,   0,   0),
    (6144, 1024, 4096):  (131, 137,   0, 142, 121, 139, 121, 128, 119,   0,   0,   0,   0),
    (6144, 1792, 4096):  (176, 151,   0, 171, 174, 168, 170, 193, 198,   0,   0,   0,   0),
    (6144, 2560, 4096):  (193, 194,   0, 229, 230, 224, 225, 220, 221,   0,   0,   0,   0),
    (8192, 640, 4096):   (  0, 157,   0,   0, 142,   0, 152,   0, 144,   0, 144,   0,   0),
    (8192, 1280, 8192):  (  0, 283,   0,   0, 298,   0, 288,   0, 294,   0, 455,   0,   0),
    (8192, 1792, 4096):  (195, 187, 189,   0,   0,   0,   0,   0,   0,   0,   0,   0,   0),
    (8192, 3584, 8192):  (617, 618, 621,   0,   0,   0,   0,   0,   0,   0,   0,   0,   0),
    (16384, 512, 4096):  (240, 245,   0, 251, 229, 253, 231, 257, 231,   0,   0,   0,   0),
    (16384, 1792, 4096): (365, 323, 326,   0,   0,   0,   0,   0,   0,   0,   0,   0,   0),
}
# fmt: on


def chosen(M: int, N: int, K: int, ranks: int = RANKS, dtype: torch.dtype = torch.bfloat16) -> Config:
    where = torch.device("cpu")
    return rules.cost_model("all_gather_gemm", M, N, K, dtype, ranks, where, placement="copy_engine")


def lost() -> list[float]:
    """Ratios of the measurements of what is chosen to the shortest, of products that have one."""
    found = []
    for shape, row in MEASURED.items():
        config = chosen(*shape)
        pieces = -(-shape[0] // RANKS // (config.chunk * config.block_m))
        measurement = row[WAYS.index((config.block_m, config.block_n, pieces))]
        if measurement:
            found.append(measurement / min(filter(None, row)))
    return found


def test_choices_are_nearly_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    ratios = lost()
    assert len(ratios) == len(MEASURED)
    assert statistics.geometric_mean(ratios) < 1.015
    assert max(ratios) < 1.06
    # Nor would it do to take whole blocks always, or to think that rows are there at once.
    for module, name, value in ((tilings, "_GATHERED_PIECE", 1 << 40), (gemm_model, "_LINK", 1e9)):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, value)
            gemm_model._gathering_times.cache_clear()
            assert statistics.geometric_mean(lost()) > 1.03, name


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_pieces_do_not_depend_on_columns(ranks: int, dtype: torch.dtype) -> None:
    """Ranks may have different numbers of them, and must agree on the pieces."""
    for M in (1, 100, 1000, 4097, 16384, 65536, 1 << 20):
        for K in (64, 4096, 16384):
            heights = {chosen(M, N, K, ranks, dtype) for N in (1, 63, 64, 65, 257, 1792, 1793, 28672)}
            assert len({config.chunk * config.block_m for config in heights}) == 1, (M, K)


def test_pieces_are_no_constants() -> None:
    """Batches of other sizes take other pieces: that must not compile the kernel anew."""
    a, b = torch.zeros(512, 64, dtype=torch.float16), torch.zeros(64, 256, dtype=torch.float16)
    launches = [
        make_product(a, b, Config(chunk=chunk), False, row_blocks=2, keeps_a=True).launch(
            0, 2, None, (), order="GATHERS"
        )
        for chunk in (1, 2)
    ]
    assert launches[0].constants == launches[1].constants


def test_a_table_says_how_and_the_model_in_which_pieces() -> None:
    model = Config(placement="copy_engine", chunk=6)
    found = Config(placement="copy_engine", block_m=256, chunk=1, group_m=4)
    assert op._gathering_as(model, found) == dataclasses.replace(found, chunk=3)
    for other in (
        dataclasses.replace(found, placement="unfused"),
        dataclasses.replace(found, block_m=512, block_n=64),
    ):
        assert op._gathering_as(model, other) == model

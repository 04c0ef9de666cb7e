"""When the cost model gives an op of an H200 to the BLAS and an exchange, against measurements there."""

import statistics

import pytest
import torch

from pyrocshmem.stream_k.choice import rules, verdicts

TIER = 0
pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("h200")]

BF16, FP32 = torch.bfloat16, torch.float32
RANKS = 2
# Rows of a rank that end with a tile.
WHOLE = (256, 512, 768)
# (op, M, N, K of a rank's product, what partial sums travel in): microseconds of placements, what was chosen before
# there was the pair first; 2 x H200, bf16, graphs of 6 or 10 calls. Without a fraction: 2 x H100.
MEASURED: dict[tuple[str, int, int, int, torch.dtype | None], dict[str, float]] = {
    ("gemm_all_reduce", 64, 8192, 2048, FP32): {"messages": 18.8, "unfused": 23.1},
    ("gemm_all_reduce", 128, 4096, 3584, FP32): {"messages": 22.5, "unfused": 24.6},
    ("gemm_all_reduce", 160, 8192, 7168, FP32): {"messages": 66.4, "unfused": 54.2},
    ("gemm_all_reduce", 200, 4096, 3584, BF16): {"messages": 25.9, "unfused": 22.9},
    ("gemm_all_reduce", 200, 8192, 2048, FP32): {"messages": 40.3, "unfused": 36.8},
    ("gemm_all_reduce", 384, 8192, 7168, BF16): {"messages": 96.5, "unfused": 85.5},
    ("gemm_all_reduce", 512, 4096, 3584, BF16): {"messages": 41.0, "unfused": 39.0},
    ("gemm_all_reduce", 1024, 4096, 2048, FP32): {"messages": 68.7, "unfused": 68.8},
    ("gemm_all_reduce", 1024, 8192, 2048, FP32): {"own_stream": 141.2, "unfused": 140.9},
    ("gemm_all_reduce", 2048, 4096, 2048, FP32): {"copy_engine": 147.1, "unfused": 141.8},
    ("gemm_all_reduce", 2048, 4096, 7168, BF16): {"copy_engine": 214, "unfused": 219},
    ("gemm_all_reduce", 2048, 4096, 7168, FP32): {"copy_engine": 218.0, "unfused": 242.8},
    ("gemm_all_reduce", 2048, 8192, 3584, FP32): {"copy_engine": 241.5, "unfused": 312.6, "messages": 317.7},
    ("gemm_all_reduce", 4096, 4096, 1792, BF16): {"copy_engine": 151, "unfused": 197, "messages": 196.2},
    ("gemm_reduce_scatter", 64, 4096, 1024, FP32): {"messages": 11.8, "unfused": 14.5},
    ("gemm_reduce_scatter", 128, 8192, 2048, FP32): {"messages": 22.0, "unfused": 25.5},
    ("gemm_reduce_scatter", 160, 8192, 7168, BF16): {"messages": 56.2, "unfused": 44.2},
    ("gemm_reduce_scatter", 200, 8192, 2048, BF16): {"messages": 29.2, "unfused": 25.4},
    ("gemm_reduce_scatter", 256, 4096, 1024, FP32): {"messages": 16.1, "unfused": 17.1},
    ("gemm_reduce_scatter", 384, 4096, 3584, BF16): {"messages": 29.7, "unfused": 27.3},
    ("gemm_reduce_scatter", 512, 4096, 1792, FP32): {"messages": 32.5, "unfused": 35.4},
    ("gemm_reduce_scatter", 1024, 8192, 7168, FP32): {"copy_engine": 202.4, "unfused": 231.9},
    ("gemm_reduce_scatter", 1024, 8192, 2048, BF16): {
        "copy_engine": 80,
        "unfused": 87.8,
        "blas_blocks": 79,
    },
    ("gemm_reduce_scatter", 2048, 4096, 1024, FP32): {"copy_engine": 94.0, "unfused": 95.6},
    ("gemm_reduce_scatter", 2048, 4096, 1024, BF16): {
        "copy_engine": 67,
        "unfused": 66.7,
        "blas_blocks": 64,
    },
    ("gemm_reduce_scatter", 2048, 4096, 2048, FP32): {"copy_engine": 112.6, "unfused": 125.9},
    ("gemm_reduce_scatter", 2048, 4096, 3584, BF16): {
        "copy_engine": 97,
        "unfused": 111.5,
        "blas_blocks": 105,
    },
    ("gemm_reduce_scatter", 2048, 8192, 3584, FP32): {
        "copy_engine": 202.1,
        "unfused": 264.1,
        "messages": 302.0,
    },
    ("all_gather_gemm", 64, 8192, 2048, None): {"messages": 15.3, "unfused": 17.3},
    ("all_gather_gemm", 200, 8192, 7168, None): {"messages": 55.3, "unfused": 46.8},
    ("all_gather_gemm", 256, 4096, 3584, None): {"messages": 25.5, "unfused": 24.2},
    ("all_gather_gemm", 512, 8192, 7168, None): {"copy_engine": 116.2, "unfused": 97.5, "messages": 99.0},
    ("all_gather_gemm", 1024, 1792, 4096, None): {"copy_engine": 56.7, "unfused": 41.4, "messages": 42.3},
    ("all_gather_gemm", 1024, 4096, 3584, None): {"copy_engine": 68.7, "unfused": 58.2, "messages": 57.1},
    ("all_gather_gemm", 2048, 3584, 8192, None): {
        "copy_engine": 179.8,
        "unfused": 221.2,
        "blas_blocks": 173.2,
    },
    ("all_gather_gemm", 4096, 4096, 1024, None): {"copy_engine": 58.3, "unfused": 71.3, "messages": 70.9},
    ("all_gather_gemm", 2864, 3072, 5120, None): {
        "copy_engine": 173.0,
        "unfused": 164.6,
        "blas_blocks": 136.3,
    },
    ("all_gather_gemm", 1718, 3584, 5120, None): {
        "copy_engine": 117.5,
        "unfused": 117.8,
        "blas_blocks": 106.0,
    },
    ("all_gather_gemm", 1536, 3072, 4096, None): {"copy_engine": 90.0, "unfused": 75.6, "blas_blocks": 71.0},
    ("all_gather_gemm", 1792, 4608, 4096, None): {
        "copy_engine": 102.5,
        "unfused": 119.5,
        "blas_blocks": 110.6,
    },
    ("all_gather_gemm", 2304, 4608, 7168, None): {
        "copy_engine": 229.1,
        "unfused": 247.9,
        "blas_blocks": 221.8,
    },
    ("all_gather_gemm", 1456, 13824, 5120, None): {
        "copy_engine": 317.1,
        "unfused": 287.4,
        "blas_blocks": 293.7,
    },
    ("all_gather_gemm", 3072, 8192, 2048, None): {
        "copy_engine": 149.0,
        "unfused": 163.6,
        "blas_blocks": 159.2,
    },
    ("all_gather_gemm", 3226, 4096, 3584, None): {
        "copy_engine": 167.4,
        "unfused": 166.6,
        "blas_blocks": 146.1,
    },
    ("gemm_reduce_scatter", 921, 16384, 26624, BF16): {"copy_engine": 1128, "blas_blocks": 1067},
    ("gemm_reduce_scatter", 1138, 8192, 14336, BF16): {"copy_engine": 454, "blas_blocks": 359},
    ("gemm_reduce_scatter", 1656, 12288, 16896, BF16): {"copy_engine": 1051, "blas_blocks": 875},
    ("gemm_reduce_scatter", 1792, 7168, 3584, BF16): {"copy_engine": 142, "blas_blocks": 159},
    ("gemm_reduce_scatter", 2428, 4096, 7168, BF16): {"copy_engine": 242, "blas_blocks": 212},
    ("gemm_reduce_scatter", 2814, 8192, 14336, BF16): {"copy_engine": 903, "blas_blocks": 925},
    ("gemm_reduce_scatter", 2440, 5120, 7168, BF16): {"copy_engine": 314, "blas_blocks": 267},
    ("gemm_reduce_scatter", 3205, 5376, 10752, BF16): {"copy_engine": 569, "blas_blocks": 494},
    ("gemm_reduce_scatter", 3584, 12288, 6144, BF16): {"copy_engine": 748, "blas_blocks": 766},
    ("gemm_reduce_scatter", 4608, 4096, 6144, BF16): {"copy_engine": 348, "blas_blocks": 322},
    ("gemm_reduce_scatter", 5632, 5120, 7168, BF16): {"copy_engine": 557, "blas_blocks": 607},
    ("gemm_reduce_scatter", 15616, 4096, 7168, BF16): {"copy_engine": 1199, "blas_blocks": 1253},
    ("gemm_all_reduce", 1401, 12288, 14336, BF16): {"copy_engine": 794, "unfused": 723, "blas_blocks": 722},
    ("gemm_all_reduce", 1550, 5120, 8704, BF16): {"copy_engine": 312, "unfused": 240, "blas_blocks": 243},
    ("gemm_all_reduce", 2891, 12288, 6144, BF16): {"copy_engine": 656, "unfused": 757, "blas_blocks": 667},
    ("gemm_all_reduce", 1792, 12288, 16896, BF16): {
        "copy_engine": 1105,
        "own_stream": 1122,
        "unfused": 1100,
        "blas_blocks": 1050,
    },
    ("gemm_all_reduce", 4352, 8192, 14336, BF16): {
        "copy_engine": 1419,
        "own_stream": 1480,
        "unfused": 1522,
        "blas_blocks": 1416,
    },
    ("gemm_all_reduce", 8152, 5120, 2560, BF16): {"copy_engine": 379, "unfused": 526, "blas_blocks": 450},
    ("gemm_all_reduce", 1900, 7168, 2560, BF16): {"copy_engine": 171, "unfused": 191, "blas_blocks": 180},
    ("gemm_all_reduce", 2560, 12288, 14336, BF16): {
        "copy_engine": 1249,
        "unfused": 1316,
        "blas_blocks": 1229,
    },
    ("gemm_all_reduce", 2846, 7168, 10240, BF16): {"copy_engine": 682, "unfused": 652, "blas_blocks": 606},
    ("gemm_all_reduce", 3500, 8192, 4096, BF16): {"copy_engine": 375, "unfused": 482, "blas_blocks": 402},
    ("gemm_all_reduce", 4096, 8192, 8192, BF16): {"copy_engine": 758, "unfused": 886, "blas_blocks": 784},
    ("gemm_all_reduce", 5000, 5120, 12800, BF16): {"copy_engine": 987, "unfused": 953, "blas_blocks": 933},
    ("gemm_all_reduce", 10000, 4096, 7168, BF16): {"copy_engine": 843, "unfused": 958, "blas_blocks": 853},
    ("gemm_all_reduce", 2781, 12288, 6144, BF16): {"copy_engine": 592, "unfused": 722, "blas_blocks": 645},
    ("gemm_all_reduce", 4550, 8192, 4096, BF16): {"copy_engine": 479, "unfused": 611, "blas_blocks": 528},
    ("gemm_all_reduce", 13312, 2048, 4096, BF16): {"copy_engine": 367, "unfused": 461, "blas_blocks": 391},
    ("gemm_all_reduce", 5376, 5120, 6144, BF16): {"copy_engine": 516, "unfused": 601, "blas_blocks": 523},
    ("gemm_all_reduce", 11934, 7168, 10240, BF16): {
        "copy_engine": 2309,
        "unfused": 2628,
        "blas_blocks": 2399,
    },
    ("gemm_all_reduce", 1506, 5120, 16384, BF16): {"copy_engine": 386, "unfused": 383, "blas_blocks": 378},
    ("gemm_all_reduce", 2560, 5376, 10752, BF16): {"copy_engine": 496, "unfused": 470, "blas_blocks": 452},
    ("gemm_all_reduce", 6000, 5120, 5120, BF16): {"copy_engine": 499, "unfused": 583, "blas_blocks": 504},
    **{
        ("gemm_reduce_scatter", M, N, K, BF16): {"copy_engine": own, "blas_blocks": blocks}
        for M, N, K, own, blocks in (
            (1536, 4096, 7168, 167, 143),
            (1800, 8192, 7168, 319, 302),
            (2000, 5120, 7168, 243, 218),
            (2300, 4096, 4096, 152, 129),
            (2600, 5120, 5120, 244, 217),
            (3000, 12288, 6144, 613, 630),
            (3112, 4096, 4096, 197, 168),
            (4300, 4096, 7168, 393, 348),
            (5000, 8192, 4096, 477, 487),
            (1700, 6144, 12288, 390, 486),
            (10752, 7168, 2048, 468, 500),
            (12204, 3840, 5120, 642, 671),
            (2781, 12288, 6144, 548, 584),
            (1536, 5120, 5120, 130, 137),
            (5376, 5120, 6144, 480, 479),
            (1536, 5120, 2560, 85.6, 77.9),
            (3328, 5376, 2048, 153.3, 134.0),
            (2912, 4096, 2048, 98.5, 95.6),
            (3533, 5120, 2048, 155.4, 133.6),
            (8448, 3072, 1536, 142.8, 169.6),
            (2208, 5376, 2048, 97.5, 96.1),
            (3629, 5120, 2560, 176.3, 156.4),
            (13354, 2048, 1024, 137.1, 165.4),
            (5000, 4096, 2048, 136.3, 146.8),
            (5000, 3072, 1536, 106.8, 106.0),
            (6000, 2880, 2048, 133.5, 132.6),
            (2700, 3584, 1792, 88.3, 77.9),
            (1400, 5120, 2560, 83.7, 73.7),
            (1400, 5376, 2048, 79.8, 68.5),
            (2048, 5120, 2048, 92.6, 85.2),
            (5000, 6144, 3072, 294.3, 296.4),
        )
    },
    **{
        (op, M, N, K, BF16): {"messages": messages, "unfused": unfused}
        for op, M, N, K, messages, unfused in (
            ("gemm_all_reduce", 72, 5120, 25600, 118.2, 89.3),
            ("gemm_all_reduce", 80, 16384, 26624, 240.8, 245.2),
            ("gemm_all_reduce", 89, 5120, 13824, 73.9, 60.6),
            ("gemm_all_reduce", 96, 12288, 16896, 136.3, 134.3),
            ("gemm_all_reduce", 100, 7168, 9216, 60.3, 55.5),
            ("gemm_all_reduce", 112, 4096, 14336, 50.7, 54.8),
            ("gemm_all_reduce", 120, 8192, 8192, 59.3, 58.1),
            ("gemm_all_reduce", 128, 5120, 5120, 39.1, 34.5),
            ("gemm_reduce_scatter", 72, 5120, 25600, 113.7, 88.7),
            ("gemm_reduce_scatter", 89, 5120, 13824, 70.6, 60.0),
            ("gemm_reduce_scatter", 100, 7168, 9216, 57.6, 53.4),
            ("gemm_reduce_scatter", 112, 4096, 14336, 49.8, 53.5),
            ("gemm_reduce_scatter", 128, 5120, 5120, 36.4, 33.2),
            ("gemm_all_reduce", 70, 2560, 12800, 44.2, 36.3),
            ("gemm_all_reduce", 80, 512, 8192, 19.1, 17.3),
            ("gemm_all_reduce", 100, 2048, 8192, 32.0, 27.5),
            ("gemm_all_reduce", 128, 1024, 5120, 19.0, 18.0),
            ("gemm_all_reduce", 128, 2048, 5120, 22.8, 23.7),
            ("gemm_all_reduce", 128, 3072, 8192, 34.2, 35.6),
            ("gemm_reduce_scatter", 128, 2048, 5120, 21.8, 23.3),
            ("gemm_reduce_scatter", 72, 4608, 2048, 21.2, 19.7),
            ("gemm_reduce_scatter", 80, 4096, 2048, 19.3, 18.8),
            ("gemm_reduce_scatter", 80, 5120, 2560, 25.0, 21.6),
            ("gemm_reduce_scatter", 112, 7168, 1024, 19.2, 19.7),
            ("gemm_reduce_scatter", 256, 3584, 7168, 42.4, 41.1),
            ("gemm_reduce_scatter", 256, 4096, 2048, 23.3, 23.9),
            ("gemm_reduce_scatter", 256, 4096, 4096, 32.5, 34.6),
            ("gemm_reduce_scatter", 256, 5120, 2560, 33.8, 27.5),
            ("gemm_reduce_scatter", 256, 7168, 10240, 77.1, 67.9),
            ("gemm_reduce_scatter", 256, 8192, 4096, 45.1, 44.1),
            ("gemm_reduce_scatter", 256, 4096, 14336, 69.8, 62.1),
            ("gemm_reduce_scatter", 256, 8192, 10240, 88.1, 82.0),
            ("gemm_reduce_scatter", 256, 8192, 14336, 115.3, 108.3),
            ("gemm_reduce_scatter", 512, 4096, 14336, 103.1, 96.9),
            ("gemm_reduce_scatter", 512, 3072, 4096, 39.0, 34.2),
            ("gemm_reduce_scatter", 512, 5120, 2560, 44.4, 41.9),
            ("gemm_reduce_scatter", 768, 5120, 4096, 66.3, 68.3),
            ("gemm_all_reduce", 72, 7168, 2048, 27.0, 25.4),
            ("gemm_all_reduce", 80, 5120, 2560, 26.0, 23.0),
            ("gemm_all_reduce", 104, 4096, 2048, 19.1, 20.7),
            ("gemm_all_reduce", 112, 5120, 4096, 33.7, 31.2),
            ("gemm_all_scatter", 80, 3584, 1792, 18.0, 18.2),
            ("gemm_all_scatter", 80, 5120, 2560, 26.8, 23.1),
            ("gemm_all_scatter", 96, 4608, 2048, 24.4, 22.1),
            ("gemm_all_scatter", 96, 8192, 1024, 25.6, 22.8),
            ("gemm_all_scatter", 104, 2048, 4096, 21.1, 21.5),
            ("gemm_all_scatter", 120, 7168, 2048, 34.3, 26.5),
        )
    },
    **{
        ("all_gather_gemm", 1280, N, K, None): {
            "copy_engine": copies,
            "blas_blocks": blocks,
            "unfused": unfused,
            "messages": messages,
        }
        for N, K, copies, blocks, unfused, messages in (
            (1536, 2048, 31.8, 32.9, 24.2, 23.4),
            (5120, 2048, 52.6, 60.5, 54.8, 54.5),
            (8192, 2048, 73.8, 74.5, 69.0, 77.1),
            (3072, 2560, 43.5, 43.8, 41.8, 40.5),
            (2560, 3072, 49.1, 48.2, 47.5, 46.1),
            (8192, 3072, 106.3, 100.5, 98.9, 112.2),
        )
    },
    ("gemm_all_scatter", 89, 2560, 6912, None): {"messages": 30.4, "unfused": 27.2},
    ("gemm_all_scatter", 100, 3584, 4608, None): {"messages": 27.2, "unfused": 25.7},
    ("gemm_all_scatter", 112, 2048, 7168, None): {"messages": 25.2, "unfused": 25.6},
    ("gemm_all_scatter", 64, 4096, 3584, None): {"messages": 14.0, "unfused": 16.0},
    ("gemm_all_scatter", 200, 8192, 7168, None): {"messages": 70.4, "unfused": 55.9},
    ("gemm_all_scatter", 256, 4096, 3584, None): {"messages": 29.9, "unfused": 26.4},
    ("gemm_all_scatter", 512, 8192, 2048, None): {"messages": 74.7, "unfused": 62.2},
    ("gemm_all_scatter", 1024, 4096, 1024, None): {"messages": 69.3, "unfused": 54.8},
    ("gemm_all_scatter", 1024, 8192, 2048, None): {"copy_engine": 97.5, "unfused": 116.3, "messages": 141.5},
    ("gemm_all_scatter", 2048, 1792, 4096, None): {"messages": 84.9, "unfused": 71.6},
    ("gemm_all_scatter", 4096, 4096, 3584, None): {"copy_engine": 210.9, "unfused": 260.1, "messages": 282.7},
    ("gemm_all_scatter", 465, 32768, 5120, None): {"copy_engine": 284, "unfused": 309},
    ("gemm_all_scatter", 512, 17408, 5120, None): {"copy_engine": 223, "unfused": 185},
    ("gemm_all_scatter", 651, 7168, 12288, None): {"copy_engine": 319, "unfused": 208},
    ("gemm_all_scatter", 768, 11008, 4096, None): {"copy_engine": 145, "unfused": 151},
    ("gemm_all_scatter", 889, 9216, 16384, None): {"copy_engine": 403, "unfused": 404},
    ("gemm_all_scatter", 1151, 11008, 4096, None): {"copy_engine": 194, "unfused": 229},
    ("gemm_all_scatter", 1574, 3840, 5120, None): {"copy_engine": 154, "unfused": 130},
    ("gemm_all_scatter", 2048, 14336, 3584, None): {"copy_engine": 339, "unfused": 451},
    ("gemm_all_scatter", 4096, 3584, 8192, None): {"copy_engine": 391, "unfused": 410},
    ("gemm_all_scatter", 8626, 1792, 12288, None): {"copy_engine": 568, "unfused": 560},
    ("gemm_all_scatter", 1023, 7168, 4096, None): {"copy_engine": 137, "unfused": 140},
    ("gemm_all_scatter", 5686, 1792, 3072, None): {"copy_engine": 146, "unfused": 151},
    ("gemm_all_scatter", 1273, 11008, 7168, None): {"copy_engine": 351, "unfused": 347},
    ("gemm_all_scatter", 4514, 3840, 6144, None): {"copy_engine": 363, "unfused": 377},
    ("gemm_all_scatter", 3739, 3840, 8192, None): {"copy_engine": 387, "unfused": 380},
    ("gemm_all_scatter", 2366, 4608, 8192, None): {"copy_engine": 323, "unfused": 292},
    ("gemm_all_scatter", 2369, 7168, 4096, None): {"copy_engine": 264, "unfused": 296},
}

# (M, N, K of a rank's product) of all-reduces with about two waves of tiles: as above, of 20 calls.
TWO_WAVES: dict[tuple[str, int, int, int, torch.dtype | None], dict[str, float]] = {
    ("gemm_all_reduce", M, N, K, BF16): {"messages": messages, "unfused": unfused}
    for M, N, K, messages, unfused in (
        (480, 16384, 1536, 82.5, 91.7),
        (512, 16384, 6144, 180.9, 190.0),
        (640, 12288, 1536, 78.4, 92.2),
        (700, 12288, 6144, 213.3, 194.6),
        (1000, 8192, 2048, 90.8, 104.2),
        (1000, 8192, 6144, 175.6, 189.8),
        (1024, 8192, 1536, 82.3, 95.4),
        (1024, 8192, 3584, 124.0, 137.8),
        (1152, 7168, 2560, 102.7, 115.2),
        (1152, 7168, 4096, 134.7, 148.8),
        (1400, 6144, 2048, 97.5, 107.9),
        (1400, 6144, 3072, 117.3, 127.6),
        (1536, 5120, 2560, 103.9, 112.2),
        (1536, 5120, 4096, 134.1, 142.7),
        (1536, 5120, 6144, 177.7, 185.8),
        (1600, 5120, 1536, 86.1, 94.1),
        (1600, 5120, 4096, 140.5, 148.3),
        (1900, 4096, 1024, 77.5, 81.0),
        (1900, 4096, 2048, 96.4, 99.3),
        (2048, 4096, 1024, 83.4, 85.1),
        (2048, 4096, 2048, 103.0, 106.3),
        (2048, 4096, 2560, 113.1, 115.4),
        (2304, 3584, 2048, 99.4, 104.6),
        (2304, 3584, 4096, 141.9, 147.8),
        (2700, 2880, 1536, 85.2, 91.8),
        (2700, 2880, 2048, 95.8, 101.3),
        (2700, 3072, 1536, 88.6, 94.6),
    )
}

# (M, N, K of a rank's product) of reduce-scatters whose partial blocks take 9 to 17 us to copy: as above.
SCATTERED: dict[tuple[str, int, int, int, torch.dtype | None], dict[str, float]] = {
    ("gemm_reduce_scatter", M, N, K, BF16): {"copy_engine": own, "unfused": unfused, "blas_blocks": blocks}
    for M, N, K, own, unfused, blocks in (
        (600, 5376, 10752, 157.1, 116.6, 128.1),
        (610, 5120, 2560, 68.8, 50.4, 51.3),
        (650, 8192, 8192, 188.5, 150.1, 144.9),
        (938, 5120, 2048, 69.7, 63.6, 57.1),
        (1024, 5120, 4096, 104.6, 88.5, 82.5),
        (1125, 4096, 4096, 105.8, 79.5, 73.5),
        (1152, 4096, 14336, 300.9, 199.1, 216.0),
        (1280, 4096, 2048, 69.4, 63.3, 58.2),
        (1500, 3584, 7168, 165.2, 134.9, 126.2),
    )
}

# (M, N, K of a rank's product) of all-gathers of few rows: as above.
FEW_GATHERED: dict[tuple[str, int, int, int, torch.dtype | None], dict[str, float]] = {
    ("all_gather_gemm", M, N, K, None): {"unfused": behind, "blas_blocks": blocks}
    for M, N, K, behind, blocks in (
        (640, 16384, 16384, 481.7, 482.4),
        (768, 8192, 14336, 275.9, 263.1),
        (1024, 5120, 5120, 94.2, 97.9),
        (1024, 7168, 12288, 296.7, 262.5),
        (1400, 5120, 7168, 175.2, 164.0),
    )
}


def placement(
    op: str,
    M: int,
    N: int,
    K: int,
    wire: torch.dtype | None,
    dtype: torch.dtype = BF16,
    allow_tf32: bool = False,
) -> str:
    facts = (op, M, N, K, dtype, RANKS, torch.device("cpu"), wire)
    return rules.cost_model(*facts, allow_tf32=allow_tf32).placement


# A GEMM alone of 17 to 64 rows, M, N, K: microseconds by the BLAS and by ours, operands from memory.
OF_FEW_ROWS = {
    (18, 4352, 5120): (17.1, 15.1),
    (40, 4352, 2048): (7.6, 8.8),
    (48, 4352, 13824): (41.3, 39.6),
    (20, 4608, 10752): (31.5, 29.8),
    (48, 4608, 4096): (13.1, 15.9),
    (64, 4608, 4096): (12.8, 14.8),
    (32, 4864, 3072): (10.4, 11.9),
    (44, 4864, 2048): (8.8, 10.2),
    (20, 5120, 8192): (26.9, 26.4),
    (20, 5120, 5120): (16.3, 18.7),
    (24, 5120, 7168): (21.1, 24.9),
    (40, 5120, 7168): (21.5, 24.0),
    (48, 5120, 8192): (28.5, 26.9),
    (64, 5120, 5120): (16.7, 18.6),
    (24, 5376, 4096): (14.3, 15.9),
    (64, 5632, 3072): (11.5, 12.6),
    (40, 5632, 10752): (36.2, 36.3),
    (48, 6144, 3072): (12.8, 13.3),
    (64, 6144, 10752): (41.4, 38.4),
    (24, 7168, 3072): (14.0, 13.4),
    (32, 8192, 2048): (10.9, 9.7),
    (64, 8192, 7168): (33.0, 31.8),
    (33, 6144, 2560): (11.1, 11.0),
    (56, 6144, 2560): (11.2, 11.1),
    (36, 8192, 2048): (11.1, 11.3),
    (56, 8960, 2048): (13.1, 13.3),
    (36, 9216, 2560): (14.8, 17.4),
    (42, 10240, 6144): (33.9, 38.6),
    (48, 11008, 6144): (35.3, 40.2),
    (42, 12288, 4096): (28.7, 30.5),
    (56, 14336, 4096): (32.2, 33.6),
    (36, 14336, 12288): (88.9, 92.4),
    (63, 16384, 6144): (51.8, 51.6),
    (63, 17408, 4096): (42.3, 39.8),
    (63, 18944, 2560): (27.7, 32.7),
    (42, 18944, 6144): (65.2, 67.4),
    (42, 22016, 12288): (136.3, 135.4),
    (64, 24576, 3072): (41.0, 43.9),
    (63, 27648, 2560): (39.1, 40.3),
    (36, 28672, 4096): (60.7, 62.6),
    (42, 29568, 7168): (107.4, 107.4),
    (42, 33792, 7168): (119.8, 117.2),
    (33, 33792, 2048): (37.7, 37.1),
    (56, 37888, 2048): (45.0, 44.8),
    (63, 43008, 12288): (253.3, 253.1),
    (64, 53248, 8192): (225.3, 221.3),
    (56, 57344, 7168): (207.5, 195.7),
    (33, 57344, 3072): (90.3, 89.3),
}

# The same of 1 to 64 rows and more than a wave of tiles of 64 columns.
OF_MANY_COLUMNS = {
    (16, 15360, 5120): (39.9, 39.3),
    (27, 15360, 5120): (40.0, 41.1),
    (9, 16384, 2048): (18.6, 18.7),
    (24, 16384, 2048): (18.9, 19.0),
    (21, 16384, 4096): (33.2, 33.8),
    (19, 16384, 5120): (40.4, 42.6),
    (24, 16384, 8192): (62.2, 63.7),
    (28, 16384, 13312): (98.4, 101.8),
    (17, 16384, 26624): (197.0, 198.4),
    (17, 17920, 5120): (47.7, 46.8),
    (10, 18432, 16384): (147.2, 145.8),
    (23, 18432, 16384): (151.6, 147.5),
    (29, 18944, 3584): (37.5, 39.4),
    (21, 20480, 7168): (76.5, 74.2),
    (2, 24576, 6144): (68.8, 70.4),
    (4, 24576, 6144): (68.9, 71.3),
    (11, 24576, 6144): (70.7, 73.6),
    (14, 24576, 6144): (70.8, 73.5),
    (22, 24576, 6144): (71.0, 73.8),
    (6, 25600, 5120): (66.7, 66.5),
    (29, 25600, 5120): (67.3, 73.2),
    (1, 26624, 16384): (195.8, 200.7),
    (12, 26624, 16384): (201.6, 202.8),
    (13, 26624, 16384): (206.1, 207.7),
    (26, 26624, 16384): (212.1, 211.4),
    (2, 28672, 3584): (48.3, 49.9),
    (6, 28672, 3584): (49.6, 51.3),
    (12, 28672, 3584): (49.1, 51.3),
    (32, 28672, 3584): (51.8, 54.3),
    (4, 28672, 4096): (54.9, 56.8),
    (10, 28672, 4096): (56.2, 58.8),
    (12, 28672, 4096): (55.5, 57.9),
    (28, 28672, 4096): (57.5, 61.4),
    (2, 28672, 5120): (68.1, 69.5),
    (4, 28672, 5120): (67.8, 70.0),
    (10, 28672, 5120): (69.3, 72.2),
    (30, 28672, 5120): (70.6, 75.7),
    (16, 28672, 12288): (165.2, 164.8),
    (31, 28672, 12288): (165.7, 173.7),
    (4, 29568, 8192): (108.5, 111.5),
    (8, 29568, 8192): (109.5, 111.9),
    (2, 32768, 5120): (75.9, 78.5),
    (4, 32768, 5120): (75.6, 79.1),
    (9, 32768, 5120): (77.7, 80.8),
    (22, 32768, 5120): (78.3, 83.5),
    (8, 33792, 12288): (181.2, 186.4),
    (16, 33792, 12288): (181.6, 186.1),
    (4, 34816, 5120): (83.4, 85.3),
    (12, 34816, 5120): (85.8, 87.3),
    (39, 34816, 5120): (83.2, 88.3),
    (1, 35840, 5120): (88.2, 86.4),
    (2, 35840, 5120): (88.0, 86.7),
    (32, 35840, 5120): (90.2, 94.2),
    (4, 51200, 5120): (120.3, 127.3),
    (6, 51200, 5120): (120.2, 128.5),
    (51, 51200, 5120): (149.8, 145.9),
    (2, 53248, 16384): (390.9, 400.0),
    (4, 53248, 16384): (393.5, 400.2),
    (41, 53248, 16384): (404.1, 444.3),
    (1, 55296, 5120): (129.8, 130.6),
    (6, 55296, 5120): (130.8, 132.2),
    (26, 55296, 5120): (136.6, 138.8),
    (1, 106496, 16384): (766.7, 769.2),
    (4, 106496, 16384): (777.2, 771.8),
    (37, 106496, 16384): (803.5, 830.7),
}


def lost(measured: dict[tuple[str, int, int, int, torch.dtype | None], dict[str, float]] = MEASURED) -> float:
    """The mean ratio of the measurement of what is chosen to the shortest."""
    return statistics.geometric_mean(
        measurements[placement(*case)] / min(measurements.values()) for case, measurements in measured.items()
    )


def test_choices_are_nearly_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lost() < 1.02
    # Nor would it do to choose the pair never.
    for rows in ("_SENT_ROWS", "_OWN_ROWS"):
        monkeypatch.setattr(verdicts, rows, 1 << 30)
    assert lost() > 1.05


def test_few_gathered_rows_of_many_bytes_come_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lost(FEW_GATHERED) < 1.001
    monkeypatch.setattr(verdicts, "_BLOCKS_BYTES", 1 << 40)
    assert lost(FEW_GATHERED) > 1.04


def test_blocks_that_are_copied_soon_are_scattered_by_the_blas(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lost(SCATTERED) < 1.005
    monkeypatch.setattr(verdicts, "_CUT_GEMM", 0.0)
    assert lost(SCATTERED) > 1.008
    monkeypatch.setattr(verdicts, "_SCATTERED_US", 1e3)
    assert lost(SCATTERED) > 1.03


def test_long_rows_of_whole_tiles_are_for_the_blas(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = {
        case: took for case, took in MEASURED.items() if case[0] == "gemm_reduce_scatter" and case[1] in WHOLE
    }
    assert len(whole) == 15
    assert lost(whole) < 1.01
    monkeypatch.setattr(verdicts, "_SENT_K", 1 << 30)
    assert lost(whole) > 1.015
    monkeypatch.setattr(verdicts, "_SENT_TILES", 0.0)
    assert lost(whole) > 1.05


def test_few_rows_that_leave_sms_idle_are_for_the_blas(monkeypatch: pytest.MonkeyPatch) -> None:
    few = {case: took for case, took in MEASURED.items() if 64 < case[1] <= 128 and case[4] is not FP32}
    assert len(few) == 37
    assert lost(few) < 1.02
    monkeypatch.setattr(verdicts, "_SENT_TILES", 0.0)
    assert lost(few) > 1.06


def lost_alone(measured: dict[tuple[int, int, int], tuple[float, float]]) -> float:
    """The same of a GEMM alone."""
    return statistics.geometric_mean(
        (by_blas if placement("gemm", *sizes, None) == "blas" else own) / min(by_blas, own)
        for sizes, (by_blas, own) in measured.items()
    )


def test_gemms_of_few_rows_that_leave_sms_idle_are_for_the_blas(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lost_alone(OF_FEW_ROWS) < 1.01
    monkeypatch.setattr(verdicts, "_IDLE_K", 0)
    assert lost_alone(OF_FEW_ROWS) > 1.03


def test_gemms_of_few_rows_and_many_columns_are_for_the_blas(monkeypatch: pytest.MonkeyPatch) -> None:
    num_sms = 132
    many = OF_MANY_COLUMNS | {sizes: took for sizes, took in OF_FEW_ROWS.items() if sizes[1] > 64 * num_sms}
    assert len(many) == 88
    assert lost_alone(many) < 1.005
    monkeypatch.setattr(verdicts, "_MOST_COLUMNS", 1 << 20)
    assert lost_alone(many) > 1.013
    # No other rule has these columns then.
    for name, value in {"_FEWEST_COLUMNS": 1 << 20, "_IDLE_K": 0, "_DEEP_K": 1 << 20}.items():
        monkeypatch.setattr(verdicts, name, value)
    assert lost_alone(many) > 1.03


def test_all_reduces_of_two_full_waves_leave_as_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lost(TWO_WAVES) < 1.005
    monkeypatch.setattr(verdicts, "_LONG_K", 0)
    assert lost(TWO_WAVES) > 1.06


def test_own_rows_in_two_products_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a block has eight tile rows: sums of most of them travel beside the product of the others."""
    case = ("gemm_all_reduce", 2846, 7168, 10240, BF16)
    chosen = rules.cost_model(*case[:4], BF16, RANKS, torch.device("cpu"), BF16)
    assert (chosen.placement, chosen.chunk * chosen.block_m) == ("blas_blocks", 9 * 128)
    low = rules.cost_model("gemm_all_reduce", 1401, 12288, 14336, BF16, RANKS, torch.device("cpu"), BF16)
    assert (low.placement, low.chunk * low.block_m >= 701) == ("blas_blocks", True)
    case = ("gemm_all_reduce", 2560, 12288, 14336, BF16)
    assert placement(*case) == "blas_blocks"
    monkeypatch.setattr(verdicts, "_FEWEST_TALL", 100)
    assert placement(*case) == "copy_engine"


def test_what_ranks_may_have_of_their_own_does_not_matter() -> None:
    """Columns of an all-gather, but for who multiplies behind messages of few rows; and float32 is the BLAS' whatever
    the sizes, unless it may go through tf32."""
    for M, K in ((200, 7168), (1024, 4096), (2048, 3584), (65, 4096), (64, 100_000)):
        assert len({placement("all_gather_gemm", M, N, K, None) for N in (1, 64, 4096, 100_000)}) == 1
    few = [placement("all_gather_gemm", 64, N, 4096, None) for N in (1, 64, 8192, 100_000)]
    assert few == ["messages"] * 3 + ["unfused"]
    for case in MEASURED:
        assert placement(*case, dtype=FP32) == "unfused"
        assert placement(*case, dtype=FP32, allow_tf32=True) != "unfused"
    for op in ("gemm_all_reduce", "gemm_reduce_scatter", "gemm_all_scatter", "all_gather_gemm"):
        assert placement(op, 1, 4096, 4096, None, dtype=FP32) == "unfused"

"""`Config`: what it refuses, and that what `choose` gives is fit to run."""

import dataclasses
import pickle

import pytest
import torch

from pyrocshmem import stream_k
from pyrocshmem.stream_k import nn
from pyrocshmem.stream_k.choice.config import ALGORITHMS, Config
from pyrocshmem.stream_k.choice.placement import placement_names
from pyrocshmem.stream_k.local_gemm.schedule import SPLITS
from pyrocshmem.target import CPU_PROGRAMS, num_sms
from tests.stream_k.products import DTYPES, device

TIER = 0
OPS = ("gemm", "gemm_all_reduce", "gemm_all_scatter", "gemm_reduce_scatter", "all_gather_gemm")

WRONG = [
    ({"block_m": 0}, "block_m must be a power of two, got 0"),
    ({"block_m": 8, "comm_rows": 8}, "block_m is 8, at least 16 are needed"),
    ({"block_n": 8, "subtiles": 1}, "block_n is 8, at least 16 are needed"),
    ({"block_k": 4}, "block_k is 4, at least 16 are needed"),
    ({"block_n": 96}, "block_n must be a power of two, got 96"),
    ({"block_k": -32}, "block_k must be a power of two, got -32"),
    ({"num_warps": 3}, "num_warps must be a power of two, got 3"),
    ({"comm_rows": 12}, "comm_rows must be a power of two, got 12"),
    ({"comm_rows": 256}, "comm_rows is 256, at most block_m = 128"),
    ({"subtiles": 3}, r"subtiles is 3, allowed are \(1, 2, 4\)"),
    ({"subtiles": 4, "block_n": 32}, "parts of 8 columns, at least 16"),
    ({"split": "stream-k"}, "split is 'stream-k', allowed are .*'stream_k', 'split_k', 'separate'"),
    (
        {"placement": "before"},
        r"placement is 'before', allowed are \(.*'copy_engine'.*\)",
    ),
    ({"comm_warps": 3}, "comm_warps must be a power of two, got 3"),
    ({"comm_warps": 64}, "comm_warps is 64, a program has at most 32"),
    ({"num_warps": 64}, "num_warps is 64, a program has at most 32"),
    (
        {"block_m": 512},
        "block_m x block_n is 512 x 256, a program has registers for a tile of at most 65536 elements",
    ),
    ({"chunk": 0}, "chunk must be at least 1, got 0"),
    ({"algorithm": "ring"}, r"algorithm is 'ring', allowed are \('one_shot', 'two_shot'\)"),
    ({"partial_dtype": torch.float64}, "partial_dtype is torch.float64, allowed are"),
    ({"num_stages": 0}, "num_stages must be at least 1, got 0"),
    ({"group_m": 0}, "group_m must be at least 1, got 0"),
    ({"num_comm_programs": 0}, "num_comm_programs must be at least 1, got 0"),
    ({"num_programs": -1}, "num_programs is -1"),
]


@pytest.mark.parametrize(("change", "text"), WRONG, ids=[str(change) for change, _ in WRONG])
@pytest.mark.cpu
def test_refuses(change: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        dataclasses.replace(Config(), **change)  # type: ignore[arg-type]


@pytest.mark.cpu
def test_a_switch_is_a_bool() -> None:
    with pytest.raises(TypeError, match=r"Config\.flatten is a int, a bool is needed"):
        Config(flatten=1)  # type: ignore[arg-type]


@pytest.mark.cpu
def test_is_a_value() -> None:
    """Frozen, compared and hashed by its fields, sent to ranks: a key of plans."""
    config = Config(block_m=64)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.block_m = 32  # type: ignore[misc]
    again = pickle.loads(pickle.dumps(config))
    assert again == config
    assert hash(again) == hash(config)
    assert dataclasses.replace(config, num_stages=2) != config


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_choose_gives_a_fit_one(op: str, dtype: torch.dtype) -> None:
    """Whatever the shape: names that exist, programs left for the GEMM, a schedule that can be made."""
    for M, N, K in (
        (1, 1, 1),
        (0, 0, 0),
        (16, 4096, 4096),
        (4096, 16, 128),
        (8192, 8192, 3584),
        (97, 193, 131),
    ):
        for world_size in (1, 2, 3, 8):
            config = stream_k.choose(op, M, N, K, dtype, world_size, device())
            assert config.split in SPLITS
            assert config.placement in placement_names(op)
            assert config.algorithm in ALGORITHMS
            assert config.partial_dtype in (None, dtype)
            # Alone nothing consumes, so that any number of programs will do.
            assert op != "gemm" or dataclasses.replace(config, num_programs=1).num_programs == 1
            programs = config.num_programs or num_sms(device())
            blocks = (config.block_m, config.block_n, config.block_k)
            schedule = stream_k.make_schedule(M, N, K, *blocks, programs, split=config.split)
            assert schedule.num_programs <= programs


@pytest.mark.cpu
def test_programs_of_the_cpu_target() -> None:
    """Enough for several waves of a small product, few enough to follow."""
    assert num_sms(torch.device("cpu")) == CPU_PROGRAMS
    assert CPU_PROGRAMS > 1


def test_what_is_loaded_when_asked_for_is_listed() -> None:
    for package in (stream_k, nn):
        assert set(package.__all__) <= set(dir(package))

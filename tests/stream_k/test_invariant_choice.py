"""What batch invariance fixes of a configuration: nothing that a row's bits depend on follows M, on any target."""

import dataclasses

import pytest
import torch

from pyrocshmem import interpreter, stream_k
from pyrocshmem.calls.invariance import BATCH, NONE
from pyrocshmem.stream_k.choice import invariant, rules
from pyrocshmem.stream_k.choice.config import BY_BLAS, Config
from pyrocshmem.stream_k.choice.placement import placements_by_op
from pyrocshmem.stream_k.local_gemm.product import schedule_of

TIER = 0
pytestmark = pytest.mark.cpu

CPU = torch.device("cpu")
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
ROWS = (1, 2, 7, 16, 17, 33, 64, 65, 100, 128, 129, 333, 1000, 4096, 12345)
COLUMNS = ((40, 640), (512, 8192), (4096, 1792), (7168, 9216), (5120, 12800))


def choices(dtype: torch.dtype, N: int, K: int, mode: int) -> list[tuple[str, int, Config]]:
    facts = ((op, M, N, K, dtype, 1 if op == "gemm" else 2, CPU) for op in placements_by_op() for M in ROWS)
    return [(op[0], op[1], rules.cost_model(*op, invariance=mode)) for op in facts]  # type: ignore[arg-type]


def is_fixed(dtype: torch.dtype, tile: bool) -> None:
    """No BLAS, no tile that is cut; with `tile`, one tile for all M."""
    for N, K in COLUMNS:
        tiles = set()
        for op, M, config in choices(dtype, N, K, BATCH):
            assert config.placement not in BY_BLAS, (op, M, N, K)
            assert not schedule_of(config, M, N, K, CPU).has_shared_tiles, (op, M, N, K)
            assert invariant.why_not(config, config, rules.decide(op, M, N, K, dtype, 2, CPU).facts) == ""
            tiles.add((config.block_m, config.block_n, config.block_k))
        assert not tile or len(tiles) == 1, (N, K, tiles)


@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)
def test_on_an_h200(h200: torch.device, dtype: torch.dtype) -> None:
    """Tiles of 16 bits follow M: all are multiplied by wgmma."""
    is_fixed(dtype, tile=dtype == F32)
    default = [config for N, K in COLUMNS for *_, config in choices(dtype, N, K, NONE)]
    assert any(config.placement in BY_BLAS for config in default)
    if dtype != F32:
        assert any(config.split != "none" for config in default)
        wide = stream_k.choose("gemm", 64, 4096, 4096, dtype, 1, CPU, invariance=BATCH)
        assert (wide.block_m, wide.block_n) != (128, 256)  # few rows keep their tiles


@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)
def test_on_the_cpu_target(dtype: torch.dtype) -> None:
    is_fixed(dtype, tile=True)
    assert len({config.block_m for *_, config in choices(dtype, 40, 640, NONE)}) > 1


def test_a_tile_without_wgmma_is_refused_on_an_h200(h200: torch.device) -> None:
    facts = rules.decide("gemm", 64, 4096, 4096, BF16, 1, CPU, invariance=BATCH).facts
    config = Config(split="none", placement="after")
    assert invariant.why_not(config, config, facts) == ""
    for changes, words in (
        ({"block_m": 32, "block_n": 32, "subtiles": 1}, "32 x 32 and 8 warps"),
        ({"num_warps": 2}, "and 2 warps"),
        ({"split": "stream_k"}, "split is 'stream_k'"),
        ({"placement": "blas"}, "placement is 'blas'"),
    ):
        assert words in invariant.why_not(dataclasses.replace(config, **changes), config, facts)  # type: ignore[arg-type]


def test_an_interpreter_that_runs_unchanged_can_not_promise_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "_unknown", lambda: "Triton 9.9 is not one of 3.6 to 3.9")
    stream_k.choose("gemm", 8, 8, 8, F32, 1, CPU, invariance=NONE)
    with pytest.raises(RuntimeError, match=r"Triton 9\.9 .* a row's bits depend on its batch"):
        stream_k.choose("gemm", 9, 9, 9, F32, 1, CPU, invariance=BATCH)


def test_it_is_explained(h200: torch.device) -> None:
    def fixed(M: int, N: int, K: int, op: str = "gemm") -> str:
        return stream_k.explain(op, M, N, K, BF16, 1 if op == "gemm" else 2, CPU, invariance=BATCH).fixed

    assert "placement after instead of blas" in fixed(333, 7168, 9216)
    assert "at a cost that no model knows" in fixed(333, 7168, 9216)
    assert "the default is the same" in fixed(8192, 8192, 3584, "gemm_reduce_scatter")
    assert "split none instead of separate" in fixed(16, 512, 8192)
    call = ("gemm", 333, 7168, 9216, BF16, 1, CPU)
    assert stream_k.explain(*call).fixed == ""
    found = stream_k.explain(*call, invariance=BATCH)
    assert found.fixed in found.line()
    assert found.fixed in str(found)
    assert "table: what it chooses may depend on M, and the call is batch-invariant" in str(found)

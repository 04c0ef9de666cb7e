"""The adapter of Kraken, on a stand-in: which of its functions an op calls, and with what."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import _symmetric_memory as symmetric_memory

from pyrocshmem.benchmarks import peer_providers
from pyrocshmem.benchmarks.provider import Run, Unavailable

TIER = 0
pytestmark = pytest.mark.cpu


@pytest.mark.parametrize(
    ("op", "copies", "expected"),
    [
        ("gemm_reduce_scatter", False, "gemm_reduce_scatter"),
        ("gemm_reduce_scatter", True, "gemm_reduce_scatter_ce_persistent"),
        ("gemm_all_reduce", False, "gemm_one_shot_all_reduce_fused"),
    ],
)
def test_what_is_called(op: str, copies: bool, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        assert b.stride() == (1, len(b))
        return a @ b

    monkeypatch.setitem(sys.modules, "kraken.fused", SimpleNamespace(**{expected: product}))
    monkeypatch.setattr(peer_providers, "need_gpus", lambda x: None)
    a, b = torch.arange(24.0).view(4, 6), torch.arange(30.0).view(6, 5)  # whose sums are exact
    x: Any = SimpleNamespace(a=a, b=b, case=SimpleNamespace(op=op, M=4, N=5), num_ranks=2)
    run = peer_providers.kraken(x, copies)
    assert torch.equal(run.function(), a @ b)
    assert (run.roundings, run.library) == (2, True)


def test_signals_have_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """More tiles than PyTorch has signals for would be signalled beyond them."""
    monkeypatch.setitem(sys.modules, "kraken.fused", SimpleNamespace(gemm_one_shot_all_reduce_fused=torch.mm))
    monkeypatch.setattr(peer_providers, "need_gpus", lambda x: None)
    tile = 64

    def made(tiles: int) -> Run:
        case = SimpleNamespace(op="gemm_all_reduce", M=2 * tile, N=tiles // 2 * tile - 1)
        x: Any = SimpleNamespace(a=torch.ones(1, 1), b=torch.ones(1, 1), case=case, num_ranks=2)
        return peer_providers.kraken(x)

    made(2)  # which makes room
    most = symmetric_memory.get_signal_pad_size() // 4 // 2
    assert made(most).function().item() == 1
    with pytest.raises(Unavailable, match=f"{2 * (most + 2)} signals"):
        made(most + 2)

"""Rows of 8-bit operands on their way, with their scales: every byte and every scale arrives."""

import itertools

import pytest
import torch

from pyrocshmem import target
from pyrocshmem.elements import float8
from pyrocshmem.stream_k.local_gemm.scales import Scaled
from pyrocshmem.stream_k.ops.scaled_rows import ScaledRows

TIER = 1
DEVICE = target.device()
E4M3 = float8()[0]


def some_bytes(rows: int, columns: int) -> torch.Tensor:
    return torch.randint(0, 256, (rows, columns), dtype=torch.uint8, device=DEVICE).view(E4M3)


@pytest.mark.parametrize("K", [1, 16, 130, 1100])
def test_every_byte_and_scale(K: int) -> None:
    """Of rows and of columns one behind another, beginning anywhere; scales by rows, by columns, and one of all."""
    for M, count in itertools.product((0, 1, 5, 70), (1, 3, 9)):
        rows = ScaledRows(K, E4M3, count)
        first = torch.rand(M, count, device=DEVICE)
        scales = [first, torch.rand(count, M, device=DEVICE).t()]
        if count == 1:
            scales.append(torch.rand((), device=DEVICE))
        for a in (some_bytes(M, K), some_bytes(K, M).t(), some_bytes(M, K + 3)[:, 3:]):
            for scale in scales:
                found = rows.operand(rows.words(Scaled(a, scale)))
                assert torch.equal(found.data.view(torch.uint8), a.view(torch.uint8))
                assert torch.equal(found.scale, (scale if scale.ndim else scale.view(1, 1)).expand(M, count))


def test_nothing_else_is_written() -> None:
    """What lies between a row of 130 bytes and its scale, and behind that, stays."""
    rows = ScaledRows(130, E4M3, 1)
    words = torch.full((3, rows.width), -1, dtype=torch.int32, device=DEVICE)
    a = Scaled(some_bytes(3, 130), torch.zeros(3, 1, device=DEVICE))
    to = rows.operand(words)
    rows.launch(a, to)(rows.arguments(a, to))
    found = words.view(torch.uint8)
    assert (found[:, 130:144] == 255).all()
    assert (found[:, 144:148] == 0).all()
    assert (found[:, 148:] == 255).all()
    assert rows.width % 32 == 0

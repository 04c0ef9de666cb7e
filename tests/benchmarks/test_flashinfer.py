"""The adapter of FlashInfer's norm in 8 bits, on a stand-in for its kernel: what it is given, and that another
rounding or another meaning of the scale is found."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pyrocshmem.benchmarks import peer_providers
from pyrocshmem.reference.problems import EPS

TIER = 0
pytestmark = pytest.mark.cpu
M, N = 5, 256


class StandIn:
    """`flashinfer.comm` of one rank. wrong: multiplies by the scale where it should divide."""

    AllReduceFusionPattern = SimpleNamespace(kARResidualRMSNorm="norm", kARResidualRMSNormFP8Quant="8 bits")

    def __init__(self, wrong: bool) -> None:
        self.wrong = wrong

    def allreduce_fusion(
        self, given: torch.Tensor, workspace: Any, *, pattern: str, residual_in: torch.Tensor,
        residual_out: torch.Tensor, rms_gamma: torch.Tensor, rms_eps: float, launch_with_pdl: bool,
        norm_out: torch.Tensor | None = None, quant_out: torch.Tensor | None = None,
        scale_factor: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        residual_out.copy_(given + residual_in)
        total = residual_out.float()
        norm = total * (total.square().mean(1, keepdim=True) + rms_eps).rsqrt() * rms_gamma.float()
        if pattern == "norm":
            assert norm_out is not None
            norm_out.copy_(norm)
            return
        assert quant_out is not None
        assert scale_factor is not None
        assert scale_factor.shape == (1,)
        scaled = norm * scale_factor if self.wrong else norm / scale_factor
        quant_out.copy_(scaled.clamp(-448, 448).to(quant_out.dtype))


@pytest.mark.parametrize("wrong", [False, True])
def test_the_norm_in_8_bits(wrong: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    random = torch.Generator().manual_seed(1)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random).bfloat16()

    closed: list[bool] = []
    workspace = SimpleNamespace(destroy=lambda: closed.append(True))
    monkeypatch.setattr(
        peer_providers, "flashinfer_workspace", lambda x, tokens, hidden: (StandIn(wrong), workspace)
    )
    x: Any = SimpleNamespace(
        case=SimpleNamespace(M=M, N=N), x=values(M, N), residual=values(M, N), weight=values(N), num_ranks=1,
        device=torch.device("cpu"), new=lambda *shape: torch.empty(shape, dtype=torch.bfloat16),
    )  # fmt: skip
    run = peer_providers.flashinfer_tensorwise(x)
    run.reset()
    run.call()
    total = (x.x + x.residual).float()
    truth = total * (total.square().mean(1, keepdim=True) + EPS).rsqrt() * x.weight.float()
    found = run.result().float()
    assert bool(found.isnan().all()) == wrong
    if not wrong:
        assert torch.allclose(found, truth, rtol=2**-7, atol=0)
    assert run.close is not None
    run.close()
    assert closed == [True]

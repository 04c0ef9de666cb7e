"""`ParallelMLP`: gate, up and down projection with SwiGLU (Shazeer 2020), gate and up as one product."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import nn

from pyrocshmem.stream_k.nn.functional import is_plain
from pyrocshmem.stream_k.nn.linear import ColumnParallelLinear, RowParallelLinear
from pyrocshmem.stream_k.nn.pointwise import swiglu


class ParallelMLP(nn.Module):
    """y = down_proj(silu(gate_proj(x)) * up_proj(x)), the intermediate features divided over the ranks.

    hidden: features in and out; intermediate: those between. In the unsharded model's state dict: gate_proj, up_proj,
    down_proj. Raises ValueError, naming the layer, where the ranks can't divide `intermediate`. Other arguments:
    `ColumnParallelLinear`.
    """

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        *,
        bias: bool = False,
        group: Any = None,
        sequence_parallel: bool = False,
        partial_dtype: torch.dtype | None = None,
        save_gathered: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        name: str = "ParallelMLP",
    ) -> None:
        super().__init__()
        options: dict[str, Any] = {
            "group": group, "sequence_parallel": sequence_parallel, "partial_dtype": partial_dtype,
            "device": device, "dtype": dtype,
        }  # fmt: skip
        sizes = {"gate_proj": intermediate, "up_proj": intermediate}
        self.gate_up_proj = ColumnParallelLinear(
            hidden, sizes, bias, save_gathered=save_gathered, name=f"{name}.gate_up_proj", **options
        )
        self.down_proj = RowParallelLinear(intermediate, hidden, bias, name=f"{name}.down_proj", **options)

    @classmethod
    def from_linears(
        cls,
        gate_proj: nn.Linear,
        up_proj: nn.Linear,
        down_proj: nn.Linear,
        *,
        group: Any = None,
        sequence_parallel: bool = False,
        partial_dtype: torch.dtype | None = None,
        save_gathered: bool = True,
        name: str = "ParallelMLP",
    ) -> Self:
        """The layer made of ordinary ones, which all ranks hold alike; it has their dtype, device and bias."""
        options: dict[str, Any] = {
            "group": group, "sequence_parallel": sequence_parallel, "partial_dtype": partial_dtype,
            "save_gathered": save_gathered,
        }  # fmt: skip
        parts = {"gate_proj": gate_proj, "up_proj": up_proj}
        made = cls(down_proj.out_features, down_proj.in_features, device="meta", name=name, **options)
        made.gate_up_proj = made.gate_up_proj.adopt(parts)
        made.down_proj = made.down_proj.adopt({"": down_proj})
        return made

    def forward(
        self,
        x: torch.Tensor,
        *,
        num_rows: int | None = None,
        residual: torch.Tensor | None = None,
        norm: nn.Module | None = None,
    ) -> Any:
        """[.., hidden] -> [.., hidden], + residual; with a norm, (norm(y), y).

        x, residual: where sequence_parallel, this rank's block of dimension 0. num_rows: as of `ColumnParallelLinear`.
        """
        spent = is_plain(self.gate_up_proj, (ColumnParallelLinear,))
        inner = swiglu(self.gate_up_proj(x, num_rows), spent=spent)
        return self.down_proj(inner, residual=residual, norm=norm)

"""`ParallelMLP`: gate, up and down projection with SwiGLU (Shazeer 2020), gate and up as one product."""

from __future__ import annotations

from typing import Any, ClassVar, Self

import torch
from torch import nn

from pyrocshmem.stream_k.nn.float8 import Float8
from pyrocshmem.stream_k.nn.linear import ColumnParallelLinear, RowParallelLinear, joint_product
from pyrocshmem.stream_k.nn.packed import WithPack
from pyrocshmem.stream_k.nn.pointwise import swiglu


class ParallelMLP(WithPack):
    """y = down_proj(silu(gate_proj(x)) * up_proj(x)), the intermediate features divided over the ranks.

    hidden: features in and out; intermediate: those between, cut as `torch.chunk` cuts. Other arguments:
    `ColumnParallelLinear`. Its layers have the names of the unsharded model's: gate_proj, up_proj, down_proj.
    """

    PACKED: ClassVar[tuple[str, ...]] = ("gate_proj", "up_proj")

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
        float8: Float8 | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        name: str = "ParallelMLP",
    ) -> None:
        super().__init__()
        options: dict[str, Any] = {
            "group": group, "sequence_parallel": sequence_parallel, "partial_dtype": partial_dtype,
            "float8": float8, "device": device, "dtype": dtype,
        }  # fmt: skip
        for each in self.PACKED:
            layer = ColumnParallelLinear(
                hidden, intermediate, bias, save_gathered=save_gathered, name=f"{name}.{each}", **options
            )
            self.add_module(each, layer)
        self.down_proj = RowParallelLinear(intermediate, hidden, bias, name=f"{name}.down_proj", **options)
        self.pack()

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
        float8: Float8 | None = None,
        name: str = "ParallelMLP",
    ) -> Self:
        """The layer made of ordinary ones, which all ranks hold alike; it has their dtype, device and bias."""
        options: dict[str, Any] = {
            "group": group, "sequence_parallel": sequence_parallel, "partial_dtype": partial_dtype,
            "save_gathered": save_gathered, "float8": float8,
        }  # fmt: skip
        made = cls(down_proj.out_features, down_proj.in_features, device="meta", name=name, **options)
        made.adopt_all(gate_proj=gate_proj, up_proj=up_proj, down_proj=down_proj)
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
        product, down = joint_product((self.gate_proj, self.up_proj), x, num_rows), self.down_proj
        if isinstance(down, RowParallelLinear) and down.takes_swiglu(product, residual):
            dim = down.sequence_dim if down.sequence_parallel else None
            return down.product(product, dim, residual, norm, swiglu=True)
        return down(swiglu(product, spent=True), residual=residual, norm=norm)

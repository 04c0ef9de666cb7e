"""Checks of a product's operands, and how the kernel reads them: through a tensor descriptor where TMA can,
by pointers otherwise."""

from __future__ import annotations

import torch

from pyrocshmem.calls.tensors import (
    _check_same_device,
    check_plain,
    check_writable,
    share_memory,
    tell_autograd,
)
from pyrocshmem.collectives.epilogue import ACTIVATIONS
from pyrocshmem.elements import DTYPES, ELEMENTS, float8, names
from pyrocshmem.stream_k.local_gemm.scales import Scaling


def check_product(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    scaling: Scaling | None = None,
) -> tuple[int, int, int]:
    """(M, N, K) of a [M, K] x b [K, N]. scaling: of 8-bit operands, which ops take with one alone.

    Raises TypeError for what is no tensor or has a dtype that is not allowed or mixed, ValueError for shapes,
    devices and names that don't fit.
    """
    allowed = DTYPES if scaling is None else float8()
    for name, x in (("a", a), ("b", b)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}, a torch.Tensor is needed")
        if x.dtype not in allowed:
            raise TypeError(f"{name} has dtype {x.dtype}, allowed are {names(allowed)}{_with(scaling, x)}")
        if x.ndim != 2:
            raise ValueError(f"{name} has {x.ndim} dimensions, shape {tuple(x.shape)}; a matrix is needed")
        check_plain(name, x)
    if a.dtype != b.dtype and scaling is None:
        raise TypeError(f"a is {a.dtype} and b is {b.dtype}; allowed are {names()}, one for both")
    if a.shape[1] != b.shape[0]:
        raise ValueError(
            f"a is {tuple(a.shape)} and b is {tuple(b.shape)}: their inner sizes {a.shape[1]} and {b.shape[0]} differ"
        )
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}, allowed are {', '.join(ACTIVATIONS)}")
    M, K, N = a.shape[0], a.shape[1], b.shape[1]
    if bias is not None:
        if not isinstance(bias, torch.Tensor):
            raise TypeError(f"bias is a {type(bias).__name__}, a torch.Tensor or None is needed")
        check_plain("bias", bias)
        biases = ELEMENTS[a.dtype].biases
        if bias.dtype not in biases:
            raise TypeError(f"bias has dtype {bias.dtype}, allowed are {names(biases)}")
        if bias.shape != (N,) or (N > 1 and bias.stride(0) != 1):
            raise ValueError(
                f"bias has shape {tuple(bias.shape)}, strides {bias.stride()}; contiguous ({N},) is needed"
            )
    for name, x in (("b", b), ("bias", bias)):
        _check_same_device(name, x, a)
    return M, N, K


def _with(scaling: Scaling | None, x: torch.Tensor) -> str:
    """What an error's text says of scales where they are what decides."""
    if scaling is None:
        return ", and 8-bit ones with scale_a and scale_b" if x.dtype in float8() else ""
    return " with scale_a and scale_b here"


def in_one(bias: torch.Tensor | None, residual: torch.Tensor | None) -> torch.Tensor | None:
    """What a sum gets before it is rounded, as an epilogue takes it: the bias [N], or the residual [M, N], or, of
    both, a residual that has the bias in it, in fp32."""
    if bias is None or residual is None:
        return bias if residual is None else residual
    return residual + bias.float()


def check_output(
    out: torch.Tensor | None,
    shape: tuple[int, int],
    allowed: tuple[torch.dtype, ...],
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
) -> None:
    """TypeError or ValueError unless `out`, if given, can take a result of `shape`, of an allowed dtype, from checked
    operands."""
    if out is None:
        return
    if not isinstance(out, torch.Tensor):
        raise TypeError(f"out is a {type(out).__name__}, a torch.Tensor or None is needed")
    if out.dtype not in allowed:
        raise TypeError(f"out has dtype {out.dtype}, allowed is {names(allowed)}, the operands'")
    if out.shape != shape:
        raise ValueError(f"out has shape {tuple(out.shape)}, ({shape[0]}, {shape[1]}) is needed")
    check_plain("out", out)
    check_writable("out", out)
    _check_same_device("out", out, a)
    claim(out, a, b, bias)


def claim(out: torch.Tensor, *operands: torch.Tensor | None) -> None:
    """Before `out`, the caller's, is written, past autograd: what that has saved of it is known to be gone.

    ValueError where it needs a gradient itself, or shares memory with an operand: a, b or the bias.
    """
    storage = out.untyped_storage().data_ptr()
    for name, x in zip(("a", "b", "bias"), operands, strict=True):
        # The addresses of storages first: that is all it costs a call that does no such thing.
        if x is not None and x.untyped_storage().data_ptr() == storage and share_memory(out, x):
            raise ValueError(
                f"out shares memory with {name}, which is still read while out is written; give another out"
            )
    tell_autograd(out)

"""Activations [.., K] of three dimensions and more: the ops multiply matrices, whose rows are all their dimensions but
the last, flattened in their order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from pyrocshmem.calls.tensors import check_dense


def is_batched(a: Any) -> bool:
    """Whether `a` is such a tensor. TypeError for one that is not dense."""
    if not isinstance(a, torch.Tensor) or a.ndim <= 2:  # matrices are checked where operands are
        return False
    if not torch.compiler.is_compiling():  # a traced call is checked when it runs
        check_dense(a)
    return True


def by_rows(call: Callable[[torch.Tensor, Any], Any], a: torch.Tensor, out: Any, first: Any = None) -> Any:
    """call(a as a matrix, out as matrices), whose results, one or several [M, N], get the dimensions of `a` again.

    out: None, a tensor [.., N], or several; it is returned as it is. first: the size of the results' first dimension;
    None: that of a's.
    """
    sizes = a.shape[:-1] if first is None else (first, *a.shape[1:-1])
    given = [*out] if isinstance(out, (list, tuple)) else [out]
    into = [_rows(x, sizes) for x in given]
    found = call(a.flatten(0, -2), into if isinstance(out, (list, tuple)) else into[0])
    results = [found] if isinstance(found, torch.Tensor) else found
    given += [None] * (len(results) - len(given))
    shaped = [x.view(*sizes, x.shape[-1]) if y is None else y for x, y in zip(results, given, strict=False)]
    return shaped[0] if results is not found else type(found)(shaped)


def scattered(a: torch.Tensor, world_size: int) -> Any:
    """The first size of a rank's block of a result whose rows are divided. ValueError where blocks of rows would not be
    blocks of that dimension."""
    if a.shape[0] % world_size != 0:
        raise ValueError(
            f"a is {tuple(a.shape)}: the first of its {a.ndim} dimensions is divided over {world_size} ranks, and must "
            "be a multiple of that; give a matrix, of whose rows ranks may get unequal blocks"
        )
    return a.shape[0] // world_size


def gathered(a: torch.Tensor, world_size: int, num_rows: int | None) -> Any:
    """The first size of all ranks' `a`. ValueError where `num_rows` says another."""
    first = a.shape[0] * world_size
    if num_rows is not None and num_rows != first:
        raise ValueError(
            f"num_rows is {num_rows} and a is {tuple(a.shape)}: of an a of {a.ndim} dimensions all {world_size} ranks "
            f"hold as much, {first} in all; give a matrix, of which ranks may hold unequal blocks"
        )
    return first


def rows_of(name: str, x: Any, sizes: Sequence[Any]) -> Any:
    """An operand [*sizes, N] as a matrix; ValueError for other sizes. What is no tensor is refused where operands are
    checked."""
    if not isinstance(x, torch.Tensor):
        return x
    if x.shape[:-1] != torch.Size(sizes):
        raise ValueError(f"{name} has shape {tuple(x.shape)}, ({', '.join(map(str, sizes))}, N) is needed")
    return x.flatten(0, -2)


def scales_of_rows(scale_a: Any, a: torch.Tensor) -> Any:
    """Scales of a batch `a` as those of its rows: [.., scales of a row] as a matrix; of all of it, as they are."""
    if isinstance(scale_a, torch.Tensor) and scale_a.ndim == a.ndim:
        return scale_a.flatten(0, -2)
    return scale_a


def _rows(out: Any, sizes: Sequence[int]) -> Any:
    """`out` as a matrix over the same memory."""
    if not isinstance(out, torch.Tensor):
        return out
    try:
        return out.view(rows_of("out", out, sizes).shape)
    except RuntimeError:
        raise ValueError(
            f"out has shape {tuple(out.shape)}, strides {out.stride()}: its rows must lie at one distance"
        ) from None

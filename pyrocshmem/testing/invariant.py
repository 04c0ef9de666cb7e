"""`assert_batch_invariant`: whether the rows of a function's result depend on the batch that they come in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch


class _Batch(NamedTuple):
    """A batch to be tried: what it is, in words; the rows, and the number of each row among all."""

    what: str
    rows: torch.Tensor
    numbers: torch.Tensor


def assert_batch_invariant(
    fn: Callable[[torch.Tensor], Any], rows: torch.Tensor, sizes: Sequence[int] | None = None, seed: int = 0
) -> None:
    """AssertionError unless each row of `fn(batch)` has the same bits in every batch that is made of `rows`.

        with pyrocshmem.batch_invariant():
            testing.assert_batch_invariant(model, rows=tokens)

    fn: of a batch, rows along the first dimension; returns a tensor, or a tuple or list of tensors, with a row for each
    row of the batch. rows: [M, ..], at least 2: what batches are made of. sizes: of the batches, each tried with other
    rows before and behind; None: 1, 2, 3, 7, 16, .. up to M. seed: of the order of rows, the same on all ranks where
    `fn` is collective. Beside contiguous batches it tries ones that begin inside a larger tensor, and strided ones.
    The error names the batch, the row, and the first element that differs, with both values. Raises ValueError where
    fewer than 2 rows are given, or a result has not as many rows as its batch.
    """
    if rows.ndim == 0 or rows.shape[0] < 2:
        raise ValueError(f"rows has shape {tuple(rows.shape)}, at least 2 rows are needed")
    wanted = _results(fn, rows)
    for batch in _batches(rows, sizes, seed):
        for number, (right, found) in enumerate(zip(wanted, _results(fn, batch.rows), strict=True)):
            _compare(f"result {number} of " if len(wanted) > 1 else "", batch, right, found, rows.shape[0])


def _results(fn: Callable[[torch.Tensor], Any], batch: torch.Tensor) -> list[torch.Tensor]:
    """Copies of what `fn` returns."""
    found = fn(batch)
    tensors = list(found) if isinstance(found, (tuple, list)) else [found]
    for tensor in tensors:
        if tensor.ndim == 0 or tensor.shape[0] != batch.shape[0]:
            raise ValueError(
                f"a result has shape {tuple(tensor.shape)} for {batch.shape[0]} rows: its rows are needed"
            )
    return [tensor.detach().clone() for tensor in tensors]


def _batches(rows: torch.Tensor, sizes: Sequence[int] | None, seed: int) -> Iterator[_Batch]:
    M = rows.shape[0]
    if sizes is None:
        sizes = [size for size in (1, 2, 3, 7, 16, 17, 64, 100, 256, 1000, 4096) if size <= M]
    draw = torch.Generator().manual_seed(seed)
    for size in sizes:
        for first in dict.fromkeys((0, (M - size) // 2, M - size)):
            numbers = torch.arange(first, first + size)
            yield _Batch(f"{size} rows from row {first} on", rows[first : first + size].clone(), numbers)
        numbers = torch.randint(M, (size,), generator=draw)
        here = numbers.to(rows.device)
        yield _Batch(f"{size} rows in another order", rows[here], numbers)
        inside = torch.cat((rows[:1], rows[here], rows[:1]))[1:-1]
        yield _Batch(f"{size} rows inside a larger tensor", inside, numbers)
        if rows.ndim > 1 and rows.shape[-1] > 0:
            wide = torch.cat((rows[here], rows[here]), -1)[..., : rows.shape[-1]]
            yield _Batch(f"{size} rows that are not contiguous", wide, numbers)


def _compare(which: str, batch: _Batch, wanted: torch.Tensor, found: torch.Tensor, num_rows: int) -> None:
    right = wanted[batch.numbers.to(wanted.device)]
    if right.dtype != found.dtype or right.shape != found.shape:
        raise AssertionError(
            f"{which}{batch.what} is {found.dtype} {tuple(found.shape)}, of all {num_rows} rows it is {right.dtype} "
            f"{tuple(right.shape)}"
        )
    unlike = _bits(right) != _bits(found)
    different = unlike.any(1).nonzero().flatten().tolist()
    if different:
        row = different[0]
        column = int(unlike[row].nonzero()[0, 0])
        mine, theirs = found[row].flatten(), right[row].flatten()
        raise AssertionError(
            f"{which}{batch.what}: {len(different)} of {found.shape[0]} rows have other bits than among all "
            f"{num_rows}; of row {int(batch.numbers[row])} element {column} is {mine[column].item()!r} instead of "
            f"{theirs[column].item()!r}"
        )


def _bits(x: torch.Tensor) -> torch.Tensor:
    """`x` as a matrix of integers, a row for each: NaNs, and zeros of both signs, have their own."""
    rows = x.contiguous().view(x.shape[0], -1)
    if not x.is_floating_point():
        return rows
    return rows.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])

"""Batch invariance: the mode in which a row of a result has the same bits in every batch.

    with pyrocshmem.batch_invariant():
        y = stream_k.gemm_all_reduce(x, w, group=group)      # y[i] depends on x[i] and w, on no other row, on no M

A call is made in the strictest of the modes that its thread, its workspace and the environment ask for. It is part of
what ranks compare of a call. Operators of torch.library, and so graphs that torch.compile makes and backward passes,
which run on threads of their own, have it in the name of their group (`marked`).
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Protocol

import torch


class Invariance(IntEnum):
    """What the bits of a row do not depend on. NONE: they may depend on the batch. BATCH: not on the number of rows,
    nor on where the row is among them. TP: nor on the number of ranks. A later one promises what those before it do."""

    NONE = 0
    BATCH = 1
    TP = 2

    def __str__(self) -> str:
        return ("", "batch-invariant", "tp-invariant")[self]


NONE, BATCH, TP = Invariance

# What the environment may say.
_WORDS = {"": NONE, "0": NONE, "1": BATCH, "tp": TP}


class _HasMode(Protocol):
    invariance: Invariance


class _Here(threading.local):
    mode: Invariance = NONE


_here = _Here()
# Of the thread that entered or left the mode last. What torch.compile traces reads this in the place of the thread's
# own, which it can't guard: a graph that was made in another mode is then made anew.
_traced: int = 0


def _of_environment() -> Invariance:
    word = os.environ.get("PYROCSHMEM_BATCH_INVARIANT", "")
    if word not in _WORDS:
        raise ValueError(
            f"PYROCSHMEM_BATCH_INVARIANT={word!r}, allowed are {', '.join(filter(None, _WORDS))}"
        )
    return _WORDS[word]


_always = _of_environment()


def current(workspace: _HasMode | None = None) -> Invariance:
    """The mode of a call that this thread makes now. workspace: of the call."""
    mode = max(_here.mode, _always)
    return mode if workspace is None else max(mode, workspace.invariance)


def asked() -> int:
    """The mode that this thread and the environment ask for, where torch.compile may trace who asks."""
    return max(_traced, _always) if torch.compiler.is_compiling() else current()


def wanted(batch_invariant: bool, tp_invariant: bool) -> Invariance:
    """The mode that two switches ask for. TypeError for what is no bool."""
    for name, value in (("batch_invariant", batch_invariant), ("tp_invariant", tp_invariant)):
        if not isinstance(value, bool):
            raise TypeError(f"{name} is a {type(value).__name__}, a bool is needed")
    return TP if tp_invariant else BATCH if batch_invariant else NONE


@contextmanager
def batch_invariant(*, tp_invariant: bool = False) -> Iterator[None]:
    """Inside, the bits of a row of every result depend on that row, the weights, N, K, R and dtypes alone.

    Of all public ops, collectives and norms, and of their gradients with respect to activations: not on the number of
    rows, the row's place among them, strides and alignment of the batch, CUDA graphs, or what else the device does.
    What can't keep that is a ValueError that says why, before any launch. All ranks make a call in the same mode, or
    all raise `CallMismatch`.

    tp_invariant: nor on the number of ranks R, which is then 1, 2, 4 or 8 and divides what is cut over ranks: sums over
    K are a binary tree over 8 blocks of K (fewer, where 8 doesn't divide it), of which a rank's share is a branch, and
    partial sums travel in float32.

    It counts for this thread, and for the backward passes of calls made inside; functions that torch.compile compiled
    outside are compiled once more. docs/reproducibility.md says what the mode fixes, and what that costs.
    """
    with at_least(wanted(True, tp_invariant)):
        yield


@contextmanager
def at_least(mode: Invariance) -> Iterator[None]:
    """Inside, calls of this thread are made in this mode or in a stricter one."""
    global _traced
    before = _here.mode
    _here.mode = max(before, mode)
    _traced = int(_here.mode)
    try:
        yield
    finally:
        _here.mode = before
        _traced = int(before)


# In the names of groups: see `marked`.
_MARKS = tuple(f" ({mode})" if mode else "" for mode in Invariance)


def marked(name: str, workspace: _HasMode | None = None) -> str:
    """`name`, of a group or of nothing, with the mode in which a call is made now, for an operator's schema."""
    mode = asked()
    return name + _MARKS[mode if workspace is None else max(mode, workspace.invariance)]


def unmarked(name: str) -> tuple[str, Invariance]:
    """(the name, the mode) that `marked` joined."""
    for mode in Invariance:
        if mode and name.endswith(_MARKS[mode]):
            return name.removesuffix(_MARKS[mode]), mode
    return name, NONE


# Blocks into which the mode TP cuts what ranks share: as many as there may be ranks, fewer where it is no multiple.
BLOCKS = 8


def blocks_of_share(what: str, total: int, num_ranks: int) -> int:
    """Of how many blocks a rank's share of `total` is, in the mode TP: a branch of the tree in which all are added.
    what: the size, in words. ValueError for what ranks can't share so."""
    if num_ranks not in (1, 2, 4, 8):
        raise ValueError(f"calls are {TP} here, of 1, 2, 4 or 8 ranks; the group has {num_ranks}")
    if total % num_ranks:
        raise ValueError(f"calls are {TP} here, and {what} is {total}, no multiple of the {num_ranks} ranks")
    return math.gcd(total, BLOCKS) // num_ranks if total else 1


def of_call(workspace: _HasMode) -> str:
    """What ranks compare of a call's mode, behind all else: a clause, "" where there is no mode."""
    mode = current(workspace)
    return f", {mode}" if mode else ""

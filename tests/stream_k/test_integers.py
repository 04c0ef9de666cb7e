"""Counts, sizes and places that are no integers, or too small, and what is no configuration: TypeError or ValueError,
and no garbage, of ops, choices and configurations."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from pyrocshmem import Heap, collectives, stream_k
from pyrocshmem.checks import as_integer
from pyrocshmem.groups import ThreadGroup

TIER = 1
pytestmark = pytest.mark.cpu

NONE = (1.0, 1.5, True, "1", torch.tensor(1.0))
X = torch.ones(1, 1)
CPU = torch.device("cpu")


def choose(*sizes: Any) -> stream_k.Config:
    M, N, K, world_size = sizes
    return stream_k.choose("gemm_all_reduce", M, N, K, torch.float32, world_size, CPU)


# By the argument's name, calls that take it, on a group of one rank.
CALLS: dict[str, Callable[[Any, Heap], Any]] = {
    "root": lambda n, heap: collectives.broadcast(X, n, group=heap),
    "hidden": lambda n, heap: collectives.rms_norm(X, X[0], 1e-6, hidden=n, group=heap),
    "num_rows": lambda n, heap: stream_k.all_gather_gemm(X, X, num_rows=n, group=heap),
    "M": lambda n, heap: choose(n, 1, 1, 1),
    "N": lambda n, heap: choose(1, n, 1, 1),
    "K": lambda n, heap: choose(1, 1, n, 1),
    "world_size": lambda n, heap: choose(1, 1, 1, n),
}


def test_arguments() -> None:
    with Heap(16 << 20, ThreadGroup.create(1)[0]) as heap:
        for name, call in CALLS.items():
            for number in NONE:
                with pytest.raises(TypeError, match=f"^{name} must be an integer, got"):
                    call(number, heap)
            if name != "root":
                call(np.int64(1), heap)
        first: Any = np.int64(0)
        assert collectives.broadcast(X, first, group=heap).equal(X)


def test_too_few() -> None:
    for name, sizes in (
        ("M", (-1, 1, 1, 1)),
        ("N", (1, -1, 1, 1)),
        ("K", (1, 1, -1, 1)),
        ("world_size", (1, 1, 1, 0)),
    ):
        with pytest.raises(ValueError, match=f"^{name} is {min(sizes)}, allowed are"):
            choose(*sizes)
    assert choose(0, 0, 0, 1)


def test_a_gradient_does_not_change_that() -> None:
    half: Any = 0.5
    with Heap(16 << 20, ThreadGroup.create(1)[0]) as heap, pytest.raises(TypeError, match=r"got 0\.5"):
        collectives.broadcast(X.clone().requires_grad_(), half, group=heap)


def test_configurations() -> None:
    config = stream_k.Config()
    numbers = [each.name for each in dataclasses.fields(config) if type(getattr(config, each.name)) is int]
    assert {"block_m", "num_warps", "chunk"} < set(numbers)
    for name in numbers:
        wrong: tuple[Any, ...] = (True, float(getattr(config, name)))
        for number in wrong:
            with pytest.raises(TypeError, match=rf"Config\.{name} must be an integer, got {number}"):
                stream_k.Config(**{name: number})


def test_numbers_that_no_choice_is_for() -> None:
    for place, name in enumerate(("M", "N", "K", "world_size")):
        sizes = [64] * 3 + [2]
        sizes[place] = -1
        with pytest.raises(ValueError, match=rf"^{name} is -1, allowed are"):
            choose(*sizes)
    with pytest.raises(ValueError, match=r"^world_size is 0, allowed are 1 or more"):
        choose(1, 1, 1, 0)
    assert choose(0, 0, 0, 1)


def test_what_is_no_configuration() -> None:
    wrong: Any = "auto"
    with Heap(16 << 20, ThreadGroup.create(1)[0]) as heap:
        for call in (
            lambda: stream_k.gemm(X, X, config=wrong),
            lambda: stream_k.gemm_all_reduce(X, X, group=heap, config=wrong),
            lambda: stream_k.gemm_all_reduce_rms_norm(X, X, None, X[0], 1e-6, group=heap, config=wrong),
            lambda: stream_k.gemm_rms_norm_all_scatter(X, X, X[0], 1e-6, group=heap, config=wrong),
        ):
            with pytest.raises(TypeError, match=r"^config is a str, a stream_k\.Config or None is needed"):
                call()


def test_what_is_one() -> None:
    assert [as_integer("n", n) for n in (3, np.int32(3), torch.tensor(3))] == [3, 3, 3]
    assert {type(as_integer("n", n)) for n in (3, np.int32(3), torch.tensor(3))} == {int}

"""Calls in which one tensor after another lies elsewhere: none is replayed by a graph that knows another place.

On the CPU target, with a stand-in for graphs: what is replayed is the enqueued call with the tensors that were there
when it was captured.
"""

from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn.functional import rms_norm

from pyrocshmem import Heap, stream_k
from pyrocshmem.reference.problems import PROBLEMS
from pyrocshmem.stream_k.ops import gemm_rms_norm
from tests.ranks import run_ranks, values
from tests.stream_k.graph_standins import replay_what_was_enqueued
from tests.stream_k.products import integers, small_config

TIER = 3
TIMEOUT_S = 110.0
pytestmark = pytest.mark.cpu
WORLD = 2
M, N, K = 34, 24, 16

# (op, placement): a plan of each kind; all go one way (`FusedPlan.call`).
WAYS = [
    ("all_reduce", "copy_engine"),
    ("all_reduce", "messages"),
    ("all_scatter", "copy_engine"),
    ("reduce_scatter", "copy_engine"),
    ("all_gather", "copy_engine"),
]

Tensors = dict[str, torch.Tensor]


def operands(op: str, rank: int, seed: int) -> Tensors:
    """Of a rank: any other one's, too."""
    rows = torch.empty(M).tensor_split(WORLD)[rank].shape[0] if op == "all_gather" else M
    same = 0 if op == "all_scatter" else rank
    made = {
        "a": integers(rows, K, torch.float32, 100 * seed + same),
        "b": integers(K, N, torch.float32, 100 * seed + 10 + rank),
    }
    made["bias"] = integers(1, N, torch.float32, 100 * seed + 20 + (0 if PROBLEMS[op].sums else rank))[0]
    return made


def product(op: str, rank: int, every: list[Tensors]) -> torch.Tensor:
    """float64; every: all ranks' operands."""
    if PROBLEMS[op].sums:
        total = sum(each["a"].double() @ each["b"].double() for each in every) + every[rank]["bias"].double()
        return total.tensor_split(WORLD)[rank] if op == "reduce_scatter" else total  # type: ignore[union-attr, return-value]
    if op == "all_gather":
        rows = torch.cat([each["a"].double() for each in every])
        return rows @ every[rank]["b"].double() + every[rank]["bias"].double()
    blocks = [each["a"].double() @ each["b"].double() + each["bias"].double() for each in every]
    return torch.cat(blocks, 1)


def wrong_calls(heap: Heap, way: tuple[str, str], log: list[str]) -> list[str]:
    """Three calls, of which the last is replayed; then calls with one tensor elsewhere, with other data in it."""
    op, placement = way
    options: dict[str, Any] = {"group": heap, "config": small_config(placement=placement, chunk=1)}
    if op == "all_gather":
        options["num_rows"] = M
    every = [operands(op, rank, 1) for rank in range(WORLD)]
    out = torch.empty(product(op, heap.rank, every).shape)
    found = []

    def call(what: str) -> None:
        mine = every[heap.rank]
        out.fill_(torch.nan)
        getattr(stream_k, PROBLEMS[op].op)(mine["a"], mine["b"], bias=mine["bias"], out=out, **options)
        if not torch.equal(out.double(), product(op, heap.rank, every)):
            found.append(f"{way}: {what}")

    for number in range(3):
        for rank, each in enumerate(every):
            for name, value in operands(op, rank, 2 + number).items():
                each[name].copy_(value)
        call(f"call {number}")
    assert log[-3:] == ["e", "c", "r"]
    for name in ("a", "b", "bias", "out"):
        known = out, [dict(each) for each in every]
        if name == "out":
            out = torch.empty_like(out)
        else:
            for rank, each in enumerate(every):
                each[name] = operands(op, rank, 9)[name]
        call(f"{name} elsewhere")
        out, every = known
    return found


def wrong_norms(heap: Heap, log: list[str]) -> list[str]:
    """As `wrong_calls`, of the product with a norm, whose results are given these places."""
    config = small_config(placement="messages")
    honest, places = gemm_rms_norm.results, [torch.empty(M, N) for _ in range(2)]

    def results(*given: Any) -> Any:
        _, after = honest(*given)
        return places[0], after._replace(total=places[1])

    def make(seed: int) -> list[Tensors]:
        every = [operands("all_reduce", rank, seed) for rank in range(WORLD)]
        for each in every:
            each["residual"] = integers(M, N, torch.float32, 100 * seed + 50)
            each["weight"] = integers(1, N, torch.float32, 100 * seed + 60)[0]
        return every

    every, found = make(1), []

    def call(what: str) -> None:
        mine = every[heap.rank]
        for place in places:
            place.fill_(torch.nan)
        operands = mine["a"], mine["b"], mine["residual"], mine["weight"], 1e-5
        stream_k.gemm_all_reduce_rms_norm(*operands, group=heap, bias=mine["bias"], config=config)
        expected = product("all_reduce", heap.rank, every) + mine["residual"].double()
        normed = rms_norm(expected, (N,), mine["weight"].double(), 1e-5)
        if not (
            torch.equal(places[1].double(), expected)
            and torch.allclose(places[0].double(), normed, atol=1e-5)
        ):
            found.append(f"norm: {what}")

    with mock.patch.object(gemm_rms_norm, "results", results):
        for number in range(3):
            for each, other in zip(every, make(2 + number), strict=True):
                for name, value in other.items():
                    each[name].copy_(value)
            call(f"call {number}")
        assert log[-3:] == ["e", "c", "r"]
        for number in range(2):
            known, places[number] = places[number], torch.empty(M, N)
            call(f"result {number} elsewhere")
            places[number] = known
        for name in every[0]:
            there = [each[name] for each in every]
            for each, other in zip(every, make(9), strict=True):
                each[name] = other[name]
            call(f"{name} elsewhere")
            for each, tensor in zip(every, there, strict=True):
                each[name] = tensor
    return found


def body(rank: int, world_size: int, ways: list[tuple[str, str]], keyed: bool) -> list[str]:
    log: list[str] = []
    replay_what_was_enqueued(log, keyed)
    with Heap(32 << 20) as heap:
        wrong = [each for way in ways for each in wrong_calls(heap, way, log)]
        return wrong + wrong_norms(heap, log)


@pytest.mark.num_ranks(WORLD)
def test_every_tensor_is_in_the_key() -> None:
    assert values(run_ranks(body, WORLD, WAYS, True, timeout=TIMEOUT_S)) == [[]] * WORLD


@pytest.mark.num_ranks(WORLD)
def test_without_the_key() -> None:
    """The control: a call with any tensor elsewhere is wrong."""
    way = WAYS[1]
    expected = [f"{way}: {name} elsewhere" for name in ("a", "b", "bias", "out")]
    norm = ("result 0", "result 1", "a", "b", "bias", "residual", "weight")
    expected += [f"norm: {name} elsewhere" for name in norm]
    assert values(run_ranks(body, WORLD, [way], False, timeout=TIMEOUT_S)) == [expected] * WORLD

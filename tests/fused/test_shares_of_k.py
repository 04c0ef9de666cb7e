"""A rank whose share of K changes while its peers' stay: it plans alone where the schedules of ranks may differ.

Without that it would ask for a vote that its peers, who know the call, don't come to. Products of a rank alone, before
an exchange, may even be split on some ranks only, and must not put them out of step.
"""

import dataclasses
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from pyrocshmem import Heap, stream_k
from pyrocshmem.calls.workspace import Workspace
from pyrocshmem.stream_k.choice.cache import made_here
from pyrocshmem.stream_k.choice.config import Config
from pyrocshmem.stream_k.choice.rules import cost_model
from pyrocshmem.stream_k.choice.table import Entry, Table, choose
from pyrocshmem.stream_k.ops import op as fused
from tests.fused.cases import HEAP_BYTES
from tests.ranks import run_ranks, values
from tests.stream_k.products import device, integers, small_config

TIER = 3
SHAPE = (40, 24)
WAIT_S = 20.0

WAYS = [
    ("gemm_all_reduce", "after", "two_shot"),
    ("gemm_all_reduce", "beside", "one_shot"),
    ("gemm_all_reduce", "inside", "two_shot"),
    ("gemm_all_reduce", "copy_engine", "two_shot"),
    ("gemm_all_reduce", "messages", "one_shot"),
    ("gemm_all_reduce", "unfused", "two_shot"),
    ("gemm_reduce_scatter", "copy_engine", "two_shot"),
    ("gemm_reduce_scatter", "messages", "two_shot"),
]


def _is_right(
    heap: Heap, op: str, config: Config | None, workspace: Workspace, shares: tuple[int, int]
) -> bool:
    """One call with data of its own, small whole numbers; whether it came out exactly."""
    M, N = SHAPE
    made = [
        (
            integers(M, share, torch.float32, 100 * share + peer),
            integers(share, N, torch.float32, 200 * share + peer),
        )
        for peer, share in enumerate(shares)
    ]
    expected = torch.stack([a.double() @ b.double() for a, b in made]).sum(0)
    if op == "gemm_reduce_scatter":
        expected = expected.tensor_split(heap.world_size)[heap.rank]
    out = torch.full(expected.shape, float("nan"), device=device())
    a, b = made[heap.rank]
    getattr(stream_k, op)(a, b, group=heap, out=out, config=config, workspace=workspace)
    heap.synchronize()
    return torch.equal(out.double(), expected)


def changing_shares(rank: int, world_size: int) -> dict[str, list[bool]]:
    found = {}
    with Heap(HEAP_BYTES) as heap:
        workspace = Workspace(heap, wait_seconds=WAIT_S)
        for op, placement, algorithm in WAYS:
            waits_for_peers = placement in ("after", "beside", "inside")
            split = "none" if waits_for_peers else "stream_k"
            config = small_config(placement=placement, algorithm=algorithm, split=split)
            found[f"{op} {placement}"] = [
                _is_right(heap, op, config, workspace, shares)
                for shares in ((24, 24), (24, 400), (24, 8), (0, 8), (400, 400))
            ]
    return found


@pytest.mark.num_ranks(2)
def test_a_share_that_changes_on_one_rank_alone() -> None:
    for found in values(run_ranks(changing_shares, 2)):
        assert found == {f"{op} {placement}": [True] * 5 for op, placement, _ in WAYS}


def of_two_lengths(rank: int, world_size: int) -> list[int]:
    """The inner sizes that configurations were chosen for, of calls of one N and several K, whose tiles have as many
    steps."""
    found = []
    with Heap(HEAP_BYTES) as heap:
        workspace = Workspace(heap, wait_seconds=WAIT_S)
        for K in (400, 24, 700):
            with mock.patch.object(fused, "choose_together", wraps=fused.choose_together) as chosen:
                assert _is_right(heap, "gemm_all_reduce", None, workspace, (K, K))
            *_, plan = workspace.plans.values()
            if not plan.blas:  # which has no steps
                steps, config = plan.product.schedule.iters_per_tile, plan.product.config
                assert steps == -(-K // config.block_k)
            found.append(chosen.call_args.args[4])
    return found


@pytest.mark.num_ranks(2)
def test_layers_of_one_width_and_two_lengths() -> None:
    """The two row-parallel linears of a transformer's layer: the second one was planned, and multiplied, as long as
    the first."""
    assert values(run_ranks(of_two_lengths, 2)) == [[400, 24, 700]] * 2


def by_share(op: str, M: int, N: int, K: int, *facts: Any, **options: Any) -> Config:
    """A model that depends on K."""
    return cost_model(op, M, N, K, *facts, **{"placement": "inside" if K > 128 else "after", **options})


def _has_right_squares(heap: Heap, workspace: Workspace, shares: tuple[int, int]) -> bool:
    M, N = SHAPE
    ones = torch.ones(M, shares[heap.rank]), torch.ones(shares[heap.rank], N)
    _, squares = stream_k.gemm_all_reduce(*ones, group=heap, squared_partials=True, workspace=workspace)
    heap.synchronize()
    return torch.equal(squares.sum(1), torch.full((M,), float(N * sum(shares) ** 2)))


def with_a_table(rank: int, world_size: int, path: str) -> list[bool]:
    """Whether sums of unequal shares were right, and gathers of unequal columns, with a table that would have the ranks
    choose differently."""
    os.environ["PYROCSHMEM_TUNED"] = path
    found = []
    with Heap(HEAP_BYTES) as heap:
        workspace = Workspace(heap, wait_seconds=WAIT_S)
        # The second call is new to rank 1 alone.
        for shares in ((129, 128), (129, 129), (50, 50)):
            found.append(_is_right(heap, "gemm_all_reduce", None, workspace, shares))
        with mock.patch.object(fused, "cost_model", by_share):
            found.append(_has_right_squares(heap, workspace, (129, 128)))
        for columns in ((32, 32), (32, 9), (32, 0)):
            a, b = integers(32, 64, torch.float32, rank), integers(64, columns[rank], torch.float32, 7)
            c = stream_k.all_gather_gemm(a, b, group=heap, workspace=workspace)
            rows = torch.cat([integers(32, 64, torch.float32, peer) for peer in range(world_size)])
            heap.synchronize()
            found.append(torch.equal(c, rows @ b))
    return found


@pytest.mark.num_ranks(2)
@pytest.mark.cpu
@pytest.mark.parametrize("gathering", ["copy_engine", "unfused"])
def test_ranks_choose_alike(tmp_path: Path, gathering: str) -> None:
    """Entries that reach one rank's share, or columns, and not the other's."""
    cpu, (M, N) = torch.device("cpu"), SHAPE
    entries = []
    for op, rows, width, placement in (
        ("gemm_all_reduce", M, N, "inside"),
        ("all_gather_gemm", 64, 32, gathering),
    ):
        model = cost_model(op, rows, width, 64, torch.float32, 2, cpu)
        other = cost_model(op, rows, width, 64, torch.float32, 2, cpu, placement=placement)
        assert other.placement != model.placement
        fields = {name: value for name, value in dataclasses.asdict(other).items() if name != "partial_dtype"}
        entries.append(Entry(op, 2, "float32", None, rows, width, 64, fields, 0, 0, 1.0, 2.0, 0))
    path = tmp_path / "tuned.json"
    Table(made_here(cpu), [], entries).write(path)
    where = (M, N, 128, torch.float32, 2, cpu)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYROCSHMEM_TUNED", str(path))
        reached = choose("gemm_all_reduce", *where)
        beyond = choose("gemm_all_reduce", M, N, 129, *where[3:])
    assert reached.placement == "inside" != beyond.placement
    assert values(run_ranks(with_a_table, 2, str(path))) == [[True] * 7] * 2

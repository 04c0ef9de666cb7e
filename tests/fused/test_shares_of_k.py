"""A rank whose share of K changes while its peers' stay: it plans alone where the schedules of ranks may differ.

Without that it would ask for a vote that its peers, who know the call, don't come to. Products of a rank alone, before
an exchange, may even be split on some ranks only, and must not put them out of step.
"""

import pytest
import torch

import stream_k
from pyrocshmem import Heap
from stream_k.config import Config
from stream_k.workspace import Workspace
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
    ("gemm_reduce_scatter", "copy_engine", "two_shot"),
    ("gemm_reduce_scatter", "messages", "two_shot"),
]


def _is_right(heap: Heap, op: str, config: Config, workspace: Workspace, shares: tuple[int, int]) -> bool:
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

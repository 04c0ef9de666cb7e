"""Products whose tiles leave as messages: where they can, and the same bits as by way of a buffer."""

from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from pyrocshmem import Heap, signal, status, stream_k
from pyrocshmem.calls.workspace import Workspace
from pyrocshmem.collectives import exchange_kernel as exchange_module
from pyrocshmem.collectives.exchange import sent_by_tiles
from pyrocshmem.stream_k.choice.config import Config
from pyrocshmem.stream_k.ops import by_message
from tests.fused.cases import HEAP_BYTES
from tests.ranks import run_ranks, values
from tests.stopwatch import until
from tests.stream_k.products import random, small_config

TIER = 2
# Rows that the ranks don't divide, columns that a tile doesn't; as deep as tiles must be to be split, and otherwise.
M, N, DEEP, SHALLOW = 35, 72, 144, 40
EPS = 1e-5


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("kind", "shape", "dtype", "ranks", "by_rows", "sent"),
    [
        ("one_shot", (1, 8), torch.float16, 8, False, True),
        ("one_shot", (5, 12), torch.float16, 2, False, False),  # a unit would go on in the next row
        ("one_shot", (5, 12), torch.float32, 2, False, True),
        ("two_shot", (4, 8), torch.float16, 4, False, True),
        ("two_shot", (3, 8), torch.float16, 4, False, False),  # the last rank has nothing to sum
        ("two_shot", (3, 64), torch.float16, 4, False, True),
        ("two_shot", (3, 64), torch.float16, 4, True, False),  # nor has it where parts are whole rows
        ("two_shot", (6, 64), torch.float16, 4, True, False),
        ("two_shot", (7, 64), torch.float16, 4, True, True),
        ("reduce_scatter", (5, 64), torch.float16, 4, False, True),
        ("reduce_scatter", (3, 64), torch.float16, 4, False, False),
        ("all_scatter", (3, 64), torch.float16, 4, False, True),
        ("all_scatter", (3, 63), torch.float16, 4, False, False),
        ("one_shot", (1 << 14, 1 << 13), torch.float16, 4, False, False),  # in pieces
    ],
)
def test_what_tiles_can_send(
    kind: str, shape: tuple[int, int], dtype: torch.dtype, ranks: int, by_rows: bool, sent: bool
) -> None:
    x = torch.empty(1, dtype=dtype).expand(shape)
    assert sent_by_tiles(kind, x, dtype, ranks, by_rows) == sent


def _configs(dtype: torch.dtype) -> Iterator[Config]:
    if dtype == torch.float16:
        # Units of two quads. They come first: where slots grow, plans are made anew.
        for algorithm in ("one_shot", "two_shot"):
            yield small_config(placement="messages", algorithm=algorithm, partial_dtype=torch.float32)
        # Multiplied transposed.
        yield small_config(placement="messages", algorithm="two_shot", block_m=16, block_n=64, subtiles=1)
    yield small_config(placement="messages", algorithm="one_shot")
    blocks = {"block_m": 32, "block_n": 32, "block_k": 16, "num_programs": 4}
    yield small_config(placement="messages", algorithm="two_shot", split="stream_k", **blocks)


def _calls(heap: Heap, workspace: Workspace, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Results of every op that sends a product, in several ways."""
    bias, residual, weight = (random(rows, N, dtype, 30 + rows) for rows in (1, M, 2))
    where: dict[str, Any] = {"group": heap, "workspace": workspace}
    found = {}
    for i, config in enumerate(_configs(dtype)):
        K = DEEP if config.split == "stream_k" else SHALLOW
        a, b = random(M, K, dtype, 10 + heap.rank), random(K, N, dtype, 20 + heap.rank)
        more = {**where, "config": config, "bias": bias[0]}
        sums = (
            ("gemm_all_reduce", "gemm_reduce_scatter")
            if config.algorithm == "two_shot"
            else ("gemm_all_reduce",)
        )
        for op in (*sums, "gemm_all_scatter"):
            found[f"{op} {i}"] = getattr(stream_k, op)(a, b, activation="silu", **more)
        normed = stream_k.gemm_all_reduce_rms_norm(a, b, residual, weight[0], EPS, **more)
        found |= {f"norm {i}": normed[0], f"total {i}": normed[1]}
    heap.synchronize()
    # The one that splits, of three ops and one with a norm.
    plans = [plan.sent.gemm.product.schedule for plan in workspace.plans.values()]
    assert sum(schedule.has_shared_tiles for schedule in plans) == 4, plans
    return found


def both_ways(rank: int, world_size: int) -> list[str]:
    """What differs, or was not sent as asked."""
    wrong = []
    with Heap(HEAP_BYTES) as heap:
        for dtype in (torch.float16, torch.float32):
            ways, sent = {}, {}
            for tiles in (True, False):
                count: Counter[bool] = Counter()

                def asked(*args: Any, tiles: bool = tiles, count: Counter[bool] = count) -> bool:
                    count[sent_by_tiles(*args)] += 1
                    return tiles and sent_by_tiles(*args)

                with mock.patch.object(by_message, "sent_by_tiles", asked):
                    ways[tiles] = _calls(heap, Workspace(heap), dtype)
                sent[tiles] = count
            for name, value in ways[True].items():
                if not torch.equal(value.view(torch.uint8), ways[False][name].view(torch.uint8)):
                    wrong.append(f"{name} {dtype}")
                if not value.isfinite().all():
                    wrong.append(f"{name} {dtype}: not finite")
            if sent[True] != sent[False] or not sent[True][True] or sent[True][False]:
                wrong.append(f"{dtype}: {sent}")
    return wrong


@pytest.mark.num_ranks(3)
def test_the_same_bits_as_by_way_of_a_buffer() -> None:
    assert values(run_ranks(both_ways, 3, timeout=100.0)) == [[]] * 3


@pytest.mark.num_gpus(2)
def test_the_same_bits_on_two_gpus() -> None:
    assert values(run_ranks(both_ways, 2, timeout=100.0)) == [[]] * 2


class Blind:
    """`signal`, but for what an exchange reads of the abort word."""

    def __getattr__(self, name: str) -> Any:
        return getattr(signal, name)

    def load_now(self, words: Any) -> Any:
        return signal.load_now(words) * 0


def late_between(rank: int, world_size: int, blind: bool) -> int:
    """The code of this rank's record. Rank 1 stands still between the two kernels of a call; its peer finishes that,
    gives up on the next, and goes on to the one that has the same slot."""
    with Heap(HEAP_BYTES, timeout=20.0) as heap:
        workspace = Workspace(heap, wait_seconds=20.0)
        met = heap.zeros(1, dtype=torch.int32)
        a, b = torch.ones(16, 32), torch.ones(32, 32)
        stream_k.gemm_all_reduce(a, b, group=heap, config=small_config(placement="messages", algorithm="one_shot"),
                                 workspace=workspace)  # fmt: skip
        (plan,) = (plan for plan in workspace.plans.values() if isinstance(plan, by_message.MessagePlan))
        sent, out, after = plan.sent, torch.empty(16, 32), plan._after(None)
        heap.barrier()
        if rank == 0:
            for call in range(4):
                if call == 1:  # rank 1 has sent its part of the first
                    workspace.control[int(signal.BUDGET_US.value)] = 300_000
                sent.run(a * (1 + call), b, None, out, after)
            heap.peer_view(met, 1)[0] = 1
        else:
            sent.gemm.run(a, b, None, sent.place)
            until(met.item)
            with mock.patch.object(exchange_module, "signal", Blind() if blind else signal):
                sent.exchange.run(sent.x, out, after)
        code = int(heap.status[status.Word.CODE])
        heap.recover()
        return code


@pytest.mark.cpu
@pytest.mark.num_ranks(2)
@pytest.mark.parametrize("blind", [False, True], ids=["", "without the look at the abort word"])
def test_a_rank_that_is_late_between_the_two_kernels(blind: bool) -> None:
    """It says so; the control takes data of two calls for one, and says nothing."""
    ends = values(run_ranks(late_between, 2, blind, timeout=60.0))
    assert ends == [status.Code.TIMEOUT, 0 if blind else status.Code.ABORTED]

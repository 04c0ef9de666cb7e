"""The placements "unfused" and "blas_blocks": the BLAS multiplies where it does what `gemm` would, and `gemm`
elsewhere."""

import itertools
from typing import Any
from unittest import mock

import pytest
import torch

from pyrocshmem import Heap, stream_k, target
from pyrocshmem.shards import shard_range
from pyrocshmem.stream_k.choice.placement import placement_names
from pyrocshmem.stream_k.local_gemm.blas import BlasPlan
from pyrocshmem.stream_k.local_gemm.plan import GemmPlan
from pyrocshmem.stream_k.ops.all_gather_gemm import OP as GATHER
from pyrocshmem.stream_k.ops.op import Request, run
from tests.fused.cases import HEAP_BYTES
from tests.ranks import run_ranks, values
from tests.stream_k.graph_standins import replay_what_was_enqueued
from tests.stream_k.products import integers, small_config

TIER = 3
TIMEOUT_S = 60.0
F16, F32 = torch.float16, torch.float32
M, N, K = 34, 40, 24

# (op, dtype, arguments, whether the BLAS may: what it rounds is a sum, or the result of the op).
CASES: list[tuple[str, torch.dtype, dict[str, Any], bool]] = [
    ("gemm_all_reduce", F16, {}, True),
    ("gemm_all_reduce", F16, {"bias": F16, "activation": "relu"}, True),
    ("gemm_reduce_scatter", F16, {"bias": F16}, True),
    ("gemm_all_scatter", F16, {}, True),
    ("gemm_all_scatter", F16, {"bias": F16}, True),
    ("gemm_all_scatter", F16, {"bias": F32}, False),
    ("gemm_all_scatter", F16, {"activation": "relu"}, False),
    ("all_gather_gemm", F16, {}, True),
    ("all_gather_gemm", F16, {"bias": F16}, True),
    ("all_gather_gemm", F16, {"bias": F32}, False),
    ("gemm_all_reduce", F32, {}, True),
    ("gemm_all_reduce", F32, {"allow_tf32": True}, False),
    ("gemm_reduce_scatter", F32, {"bias": F32}, True),
    ("all_gather_gemm", F32, {"bias": F32}, True),
    ("gemm_all_scatter", F32, {}, True),
]
SWITCH = torch.backends.mkldnn.matmul if target.interpreted() else torch.backends.cuda.matmul


def cases(placement: str) -> list[tuple[str, torch.dtype, dict[str, Any], bool]]:
    return [case for case in CASES if placement in placement_names(case[0])]


def products(placement: str, world_size: int) -> int:
    """Of a call."""
    return world_size if placement == "blas_blocks" else 1


def who_multiplies(
    rank: int, world_size: int, placement: str, in_tf32: tuple[int, ...]
) -> list[tuple[int, int, bool]]:
    """(products by the BLAS, by our own GEMM, whether the result is exact) of two calls of each case. in_tf32: ranks
    whose switch lets fp32 products of the BLAS go through tf32 at the second one."""
    found = []
    with Heap(HEAP_BYTES) as heap:
        for number, (op, dtype, more, _) in enumerate(cases(placement)):
            gathers, scatters = op == "all_gather_gemm", op == "gemm_all_scatter"
            every = [
                (
                    integers(
                        M // world_size if gathers else M, K, dtype, 50 if scatters else 10 * number + r
                    ),
                    integers(K, N, dtype, 100 + 10 * number + r),
                    integers(1, N, more.get("bias", dtype), 200 + (r if scatters or gathers else 0))[0],
                )
                for r in range(world_size)
            ]
            a, b, bias = every[rank]
            options = {**more, "bias": bias if more.get("bias") else None}
            if gathers:
                options["num_rows"] = M
            config = small_config(placement=placement, algorithm="one_shot")
            with (
                mock.patch.object(
                    BlasPlan, "multiplies", autospec=True, side_effect=BlasPlan.multiplies
                ) as asked,
                mock.patch.object(GemmPlan, "run", autospec=True, side_effect=GemmPlan.run) as own,
            ):
                getattr(stream_k, op)(a, b, group=heap, config=config, **options)
                SWITCH.fp32_precision = "tf32" if rank in in_tf32 else "ieee"
                out = getattr(stream_k, op)(a, b, group=heap, config=config, **options)
                SWITCH.fp32_precision = "ieee"
            heap.synchronize()
            both = asked.call_count + own.call_count
            if gathers:
                exact = torch.cat([each[0] for each in every]).double() @ b.double()
            elif scatters:
                exact = torch.cat([a.double() @ each[1].double() for each in every], 1)
            else:
                exact = sum(each[0].double() @ each[1].double() for each in every)  # type: ignore[assignment]
            if more.get("bias"):
                exact = exact + (torch.cat([each[2] for each in every]) if scatters else bias).double()
            if "activation" in more:
                exact = exact.relu()
            if op == "gemm_reduce_scatter":
                exact = exact.tensor_split(world_size)[rank]
            # A plan of the BLAS that is asked and may not runs our own.
            blas = asked.call_count - max(0, both - 2 * products(placement, world_size))
            found.append((blas, own.call_count, torch.equal(out.double(), exact)))
    return found


@pytest.mark.num_ranks(2)
@pytest.mark.parametrize("placement", ["unfused", "blas_blocks"])
@pytest.mark.parametrize("in_tf32", [(), (1,), (0, 1)], ids=str)
def test_the_blas_multiplies_where_it_may(
    in_tf32: tuple[int, ...], placement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who does, ranks need not agree on: what they exchange is the same."""
    monkeypatch.setenv("PYROCSHMEM_GRAPHS", "0")  # which ask, too
    ranks, each = run_ranks(who_multiplies, 2, placement, in_tf32, timeout=TIMEOUT_S), products(placement, 2)
    for rank, found in enumerate(values(ranks)):
        for (blas, own, right), case in zip(found, cases(placement), strict=True):
            expected = 0 if not case[3] else 1 if case[1] == F32 and rank in in_tf32 else 2
            assert (blas, own, right) == (each * expected, each * (2 - expected), True), case


def sums_in_two(rank: int, world_size: int) -> list[tuple[int, bool]]:
    """(products, whether the result is exact) of two calls of each case, the own rows of which are in two parts."""
    found = []
    of_sums = [(dtype, more) for op, dtype, more, _ in CASES if op == "gemm_all_reduce"]
    with Heap(HEAP_BYTES) as heap:
        for number, ((dtype, more), rows) in enumerate(itertools.product(of_sums, (203, 97 * world_size))):
            config = small_config(placement="blas_blocks", chunk=1)
            wide = torch.empty(rows, 2 * N, dtype=dtype)
            for seed, out in enumerate((wide[:, :N], wide[:, 1::2])):
                every = [
                    (
                        integers(rows, K, dtype, 10 * number + r + seed),
                        integers(K, N, dtype, 100 + 10 * number + r),
                    )
                    for r in range(world_size)
                ]
                bias = integers(1, N, more.get("bias", dtype), 200 + seed)[0]
                options = {**more, "bias": bias if more.get("bias") else None, "out": out.fill_(torch.nan)}
                stream_k.gemm_all_reduce(*every[rank], group=heap, config=config, **options)
                heap.synchronize()
                exact = sum(a.double() @ b.double() for a, b in every) + (
                    bias.double() if more.get("bias") else 0
                )
                plan = [*heap.workspace.plans.values()][-1]
                exact = exact.relu() if "activation" in more else exact
                found.append((len(plan.blocks), torch.equal(out.double(), exact)))
    return found


@pytest.mark.cpu
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_own_rows_in_two_products(num_ranks: int) -> None:
    """Into tensors of any strides, which peers can't write."""
    for found in values(run_ranks(sums_in_two, num_ranks, timeout=TIMEOUT_S)):
        assert found == [(num_ranks + 1, True)] * len(found)


def keeps_rows(rank: int, world_size: int, num_rows: int) -> dict[str, Any]:
    """Gathered rows of two calls by blocks that the BLAS multiplies, which must not lie where the next call's do; the
    last rank has no columns. What the caller's stream did at the end of a call."""
    rows = slice(*shard_range(num_rows, rank, world_size))
    columns, order = 0 if rank == world_size - 1 else N, []
    with Heap(HEAP_BYTES) as heap:
        results = []
        for seed in (1, 2):
            whole, b = integers(num_rows, K, F16, seed), integers(K, columns, F16, 10 + seed)
            config = small_config(placement="blas_blocks")
            request = Request(whole[rows], b, None, None, "none", False, False, config)
            request = request._replace(num_rows=num_rows, save_gathered=True)
            out, gathered = run(GATHER, request, heap, None)
            results.append((out, gathered, whole, b))
        (plan,) = heap.workspace.plans.values()
        with (
            mock.patch.object(heap.workspace, "join", side_effect=lambda side: order.append(f"join {side}")),
            mock.patch.object(plan, "end", side_effect=lambda *_: order.append("end")),
        ):
            plan.run(whole[rows], b, None, out)
        heap.synchronize()
        right = [torch.equal(each, whole) for _, each, whole, _ in results]
        exact = [torch.equal(out.double(), whole.double() @ b.double()) for out, _, whole, b in results]
    return {"gathered": right, "products": exact, "order": order, "replayable": plan.replayable}


@pytest.mark.cpu
@pytest.mark.parametrize(("num_ranks", "num_rows"), [(2, 35), (3, 2)])
def test_blocks_keep_the_gathered_rows(num_ranks: int, num_rows: int) -> None:
    for rank, found in enumerate(values(run_ranks(keeps_rows, num_ranks, num_rows))):
        assert found["gathered"] == found["products"] == [True, True]
        # Peers may write where rows were gathered once this rank has ended the call.
        kept = ["join 1"] if rank < num_ranks - 1 else []
        assert found["order"] == ["join 0", *kept, "end"]
        assert not found["replayable"]


def what_is_replayed(rank: int, world_size: int) -> dict[str, str]:
    """Of calls with the same tensors, whether they were enqueued, captured or replayed, "!" behind what is wrong: three
    that may not go through tf32, two that may, one more."""
    log: list[str] = []
    replay_what_was_enqueued(log, keyed=False)  # but for the switch
    found = {}
    shares = [(integers(M, K, F32, seed), integers(K, N, F32, 10 + seed)) for seed in range(world_size)]
    (a, b), rows = shares[rank], torch.cat([a for a, _ in shares]).double() @ shares[rank][1].double()
    total = torch.stack([a.double() @ b.double() for a, b in shares]).sum(0)
    results = {"all_gather_gemm": rows, "gemm_all_reduce": total, "gemm_all_reduce_rms_norm": None}
    results["gemm_reduce_scatter"] = total.tensor_split(world_size)[rank]
    with Heap(HEAP_BYTES) as heap:
        for placement, (op, exact) in itertools.product(
            ("messages", "unfused", "blas_blocks"), results.items()
        ):
            if exact is None and placement == "blas_blocks":
                continue  # an all-reduce, then a norm
            config = small_config(placement=placement, partial_dtype=F32)
            out = None if exact is None else torch.empty(exact.shape)
            more: dict[str, Any] = {"group": heap, "config": config}
            log.clear()
            for precision in ("ieee", "ieee", "ieee", "tf32", "tf32", "ieee"):
                SWITCH.fp32_precision = precision
                if out is None:
                    stream_k.gemm_all_reduce_rms_norm(a, b, None, torch.ones(N), 1e-5, **more)
                else:
                    getattr(stream_k, op)(a, b, out=out.fill_(torch.nan), **more)
                SWITCH.fp32_precision = "ieee"
                heap.synchronize()
                if out is not None:
                    log[-1] += "" if torch.equal(out.double(), exact) else "!"
            found[f"{op} {placement}"] = "".join(log)
    return found


@pytest.mark.cpu
@pytest.mark.num_ranks(2)
def test_calls_of_the_blas_are_replayed() -> None:
    """While switches are as they were when the call was captured; our own GEMM heeds none."""
    for found in values(run_ranks(what_is_replayed, 2, timeout=TIMEOUT_S)):
        assert len(found) == 11
        for name, log in found.items():
            assert log == ("ecrrrr" if name.endswith("messages") else "ecrecr"), name

"""Fault 30: launches that split tiles end, with the same bits, however they follow one another and whatever runs beside
them.

A finisher waits for programs of lower numbers alone. That ends only if these run: where the launch before still holds
SMs, where the next one is there early (dependent launch), where another kernel keeps some SMs for itself, and where
programs run one after another (the CPU target).
"""

from collections.abc import Callable

import pytest
import torch

from pyrocshmem import stream_k
from pyrocshmem.calls.workspace import Workspace
from pyrocshmem.stream_k.local_gemm.plan import GemmPlan
from tests.stream_k.products import ON_CPU, Frame, device, integers, small_config

TIER = 2
pytestmark = pytest.mark.num_ranks(1)

CALLS = 8 if ON_CPU else 200
CALLS_OF_A_GRAPH = 10
# (M, N, K, tile): whole waves and a part-full one, and fewer tiles than SMs.
LARGE, FEW = ((70, 100, 640), (20, 40, 640)) if ON_CPU else ((2500, 1850, 1600), (333, 1030, 1984))
TILES = {
    "128 x 128": {"block_m": 128, "block_n": 128, "block_k": 64, "num_warps": 4, "num_stages": 4},
    "128 x 256": {"block_m": 128, "block_n": 256, "block_k": 64, "num_warps": 8, "num_stages": 3},
}
BUDGET_S = 5.0


def config_of(tile: str, split: str) -> stream_k.Config:
    if ON_CPU:
        return small_config(split=split, num_programs=5)
    return stream_k.Config(placement="after", split=split, num_programs=132, **TILES[tile])  # type: ignore[arg-type]


class Calls:
    """Calls of one exact product on a workspace of its own. `follow` checks what the last one left."""

    def __init__(self, sizes: tuple[int, int, int], config: stream_k.Config) -> None:
        M, N, K = sizes
        self.a, self.b = integers(M, K, torch.float16, 1), integers(K, N, torch.float16, 2)
        self.expected = self.a.double() @ self.b.double()
        self.frame = Frame(M, N, torch.float16)
        self.config, self.workspace = config, Workspace(device=device(), wait_seconds=BUDGET_S)

    def enqueue(self) -> None:
        stream_k.gemm(self.a, self.b, out=self.frame.out, config=self.config, workspace=self.workspace)

    @property
    def plan(self) -> GemmPlan:
        (plan,) = self.workspace.plans.values()
        return plan

    def follow(self, enqueue: Callable[[], None], count: int) -> None:
        self.frame.poison()
        for _ in range(count):
            enqueue()
        self.workspace.check()
        if not ON_CPU:
            torch.cuda.synchronize()
        self.workspace.check()
        assert torch.equal(self.frame.out.double(), self.expected)
        self.frame.check()


@pytest.fixture(
    params=[(sizes, split) for sizes in (LARGE, FEW) for split in ("stream_k", "split_k")], ids=str
)
def shape(request: pytest.FixtureRequest) -> tuple[tuple[int, int, int], str]:
    return request.param


@pytest.fixture(params=list(TILES)[: 1 if ON_CPU else None])
def calls(request: pytest.FixtureRequest, shape: tuple[tuple[int, int, int], str]) -> Calls:
    sizes, split = shape
    made = Calls(sizes, config_of(request.param, split))
    made.follow(made.enqueue, 1)
    assert made.plan.product.split, "nothing is split here"
    return made


def test_in_a_row(calls: Calls) -> None:
    assert calls.plan.launch.chained or ON_CPU or torch.version.hip, "no dependent launch here"
    calls.follow(calls.enqueue, CALLS)


@pytest.mark.gpu
def test_as_a_graph(calls: Calls) -> None:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS_OF_A_GRAPH):
            calls.enqueue()
    calls.follow(graph.replay, CALLS // CALLS_OF_A_GRAPH)


@pytest.mark.gpu
def test_beside_other_kernels(calls: Calls) -> None:
    """Kernels of all sizes come and go on another stream, so that a launch finds any number of SMs free."""
    stream = torch.cuda.Stream()
    squares = [torch.randn(n, n, dtype=torch.float16, device=device()) for n in (256, 1024, 4096)]
    sums = [square.new_empty(square.shape) for square in squares]
    turn = 0

    def enqueue() -> None:
        nonlocal turn
        with torch.cuda.stream(stream):
            torch.mm(squares[turn % 3], squares[turn % 3], out=sums[turn % 3])
        turn += 1
        calls.enqueue()

    calls.follow(enqueue, CALLS)


@pytest.mark.gpu
@pytest.mark.alone
def test_finishers_do_not_wait_in_a_chain() -> None:
    """Where programs finish a tile before they contribute to the next one, each waits for the one before: this product
    then takes 1374 us, instead of 214 and of 212 with whole tiles (H100)."""

    def microseconds(split: str) -> float:
        calls = Calls((4096, 4160, 4096), config_of("128 x 256", split))
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        calls.follow(calls.enqueue, 20)
        start.record()
        for _ in range(CALLS):
            calls.enqueue()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1000 / CALLS

    assert microseconds("stream_k") < 2 * microseconds("none")


@pytest.mark.gpu
def test_the_product_whose_timing_did_not_end() -> None:
    """16384 x 6656 x 16384, among the timings of which one never ended (docs/log.md)."""
    M, N, K = 16384, 6656, 16384
    a, b = (torch.randn(rows, K, device=device()).bfloat16() for rows in (M, N))
    config = config_of("128 x 256", "stream_k")
    workspace, out = Workspace(device=device(), wait_seconds=BUDGET_S), a.new_empty(M, N)
    results = []
    for count in (1, 20):
        out.fill_(torch.nan)
        for _ in range(count):
            stream_k.gemm(a, b.t(), out=out, config=config, workspace=workspace)
        torch.cuda.synchronize()
        workspace.check()
        results.append(out[::97].clone())
    assert torch.equal(*results)
    some = a[::4096].double() @ b.double().t()
    assert (out[::4096].double() - some).abs().max() <= 2**-7 * some.abs().max()

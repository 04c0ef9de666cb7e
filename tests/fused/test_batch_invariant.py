"""Inside `pyrocshmem.batch_invariant` a row of every op's result, and of its gradient, has the same bits in every
batch: whatever the number of rows, where the row is, and how the batch lies in memory. Each promise has its control."""

import contextlib
import dataclasses
import sys
from functools import partial
from typing import Any
from unittest import mock

import hypothesis
import pytest
import torch
from hypothesis import strategies

import pyrocshmem
from pyrocshmem import CallMismatch, Heap, Workspace, collectives, stream_k  # before Triton
from pyrocshmem.calls import invariance
from pyrocshmem.calls.invariance import BATCH, NONE, TP
from pyrocshmem.collectives import row_norm, row_sums
from pyrocshmem.elements import DTYPES
from pyrocshmem.json_objects import all_gather_json
from pyrocshmem.stream_k.choice import rules
from pyrocshmem.stream_k.choice.config import changed
from tests.fused import invariant_bodies as bodies
from tests.fused.invariant_bodies import Sizes
from tests.ranks import run_ranks, values
from tests.stream_k.products import ON_CPU, device, small_config

TIER = 2
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
# Rows of batches, and of all.
FEW, MANY = ((7,), (1, 7, 33)) if ON_CPU else ((1, 7, 64, 1000), (1, 2, 7, 16, 64, 100, 256, 1000, 4096))
ROWS = 34 if ON_CPU else 4096
# Long enough along K for the default to split tiles, in another way where there are two rows of them.
SPLIT = Sizes(ROWS, 20, 2200, F32)
TIMEOUT_S = 240.0


def all_ranks(num_ranks: int, *args: Any, body: Any = bodies.compared) -> list[str]:
    found = values(run_ranks(body, num_ranks, *args, timeout=TIMEOUT_S))
    return [text for rank in found for text in rank]


def of_ranks(*numbers: int) -> list[Any]:
    return [pytest.param(number, marks=pytest.mark.num_ranks(number)) for number in numbers]


@pytest.mark.num_ranks(2)
def test_every_op_of_two_ranks() -> None:
    cases = [(Sizes(ROWS, 40, 72, dtype), FEW, dtype == F32) for dtype in DTYPES]
    assert all_ranks(2, [*cases, (SPLIT, MANY, False)], True) == []


@pytest.mark.num_ranks(1)
def test_every_op_of_one_rank() -> None:
    assert all_ranks(1, [(SPLIT, FEW, True), (Sizes(ROWS, 130, 64, BF16), FEW, False)], True) == []


@pytest.mark.parametrize("num_ranks", of_ranks(3, 4))
def test_every_op_of_more_ranks(num_ranks: int) -> None:
    assert all_ranks(num_ranks, [(Sizes(ROWS, 21, 50, F16), FEW, num_ranks == 3)], True) == []


@pytest.mark.num_ranks(2)
def test_without_the_mode_rows_depend_on_their_batch() -> None:
    """The control: what the mode fixes is not fixed otherwise."""
    found = bodies.names(all_ranks(2, [(SPLIT, FEW, False)], False))
    assert found >= {"gemm", "gemm_all_reduce", "gemm_reduce_scatter", "gemm_all_reduce_rms_norm"}, found


def planted(rank: int, world_size: int, where: str) -> list[str]:
    """As `bodies.compared`, with a choice that depends on the number of rows, as it must not."""
    fixed, of = rules.fixed, row_sums.Blocks.of

    def split_some(config: Any, facts: Any) -> Any:
        return changed(fixed(config, facts), split="split_k" if facts.M == 7 else "none")

    def rows_at_once(M: int, N: int, device: torch.device, alike: bool = False) -> Any:
        found = of(M, N, device, alike)
        return dataclasses.replace(found, columns=16) if M == 7 else found

    plants = {
        "split": mock.patch.object(rules, "fixed", split_some),
        "norm": mock.patch.object(row_sums.Blocks, "of", rows_at_once),
    }
    with plants[where]:
        sizes = {"split": SPLIT, "norm": Sizes(ROWS, 90, 40, F32)}[where]
        return bodies.compared(rank, world_size, [(sizes, (7,), False)], True)


@pytest.mark.num_ranks(2)
@pytest.mark.parametrize(("where", "what"), [("split", "gemm_all_reduce"), ("norm", "rms_norm")])
def test_a_planted_choice_by_rows_is_caught(where: str, what: str) -> None:
    found = all_ranks(2, where, body=planted)
    assert any(f": {what}," in text for text in found), found


@pytest.mark.num_ranks(3)
def test_every_placement_gives_a_row_the_same_bits() -> None:
    assert all_ranks(3, Sizes(70, 40, 60, F32), body=bodies.every_placement) == []


def drawn(rank: int, world_size: int, examples: int) -> list[str]:
    """Sizes as hypothesis draws them: alike on all ranks, which also hear of each other's mistakes."""
    wrong: list[str] = []
    size = strategies.integers(1, 70)
    with Heap(bodies.HEAP_BYTES) as heap, pyrocshmem.batch_invariant():
        # The phase that explains a failure traces every line of Python, which is what kernels are here.
        @hypothesis.settings(
            max_examples=examples,
            derandomize=True,
            database=None,
            deadline=None,
            phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
        )
        @hypothesis.given(
            strategies.integers(2, 34),
            size,
            size,
            strategies.sampled_from(DTYPES),
            strategies.integers(1, 34),
        )
        def compare(rows: int, columns: int, inner: int, dtype: torch.dtype, few: int) -> None:
            x = bodies.Operands(heap, Sizes(rows, columns, inner, dtype), rows)
            found = bodies.unlike(x, (1, few))
            assert not any(all_gather_json(found, "drawn sizes", heap.group)), found

        try:
            compare()
        except AssertionError as error:
            wrong.append(str(error))
    return wrong


@pytest.mark.num_ranks(2)
def test_drawn_sizes() -> None:
    # On a GPU nearly every size compiles kernels of its own.
    assert all_ranks(2, 4 if ON_CPU else 8, body=drawn) == []


def summed(rank: int, world_size: int) -> list[bool]:
    """Sums over ranks against the tree of neighbours, made here."""
    draw = torch.Generator().manual_seed(1)
    terms = [torch.randn(33, 40, generator=draw).to(device()) for _ in range(world_size)]
    right = terms
    while len(right) > 1:
        odd = right[len(right) // 2 * 2 :]
        right = [a + b for a, b in zip(right[::2], right[1::2], strict=False)] + odd
    with Heap(bodies.HEAP_BYTES) as heap:
        found = [
            collectives.all_reduce(terms[rank], group=heap, algorithm=a) for a in ("one_shot", "two_shot")
        ]
        heap.synchronize()
        return [torch.equal(each, right[0]) for each in found]


@pytest.mark.parametrize("num_ranks", of_ranks(3, 4))
def test_sums_are_a_tree_of_neighbours(num_ranks: int) -> None:
    assert values(run_ranks(summed, num_ranks)) == [[True, True]] * num_ranks


def in_different_modes(rank: int, world_size: int, planned: bool) -> str:
    a, b = torch.ones(4, 8), torch.ones(8, 8)
    with Heap(bodies.HEAP_BYTES) as heap:
        for everyone in (False, True) if planned else ():
            with pyrocshmem.batch_invariant() if everyone else contextlib.nullcontext():
                stream_k.gemm_all_reduce(a, b, group=heap)
        try:
            with pyrocshmem.batch_invariant() if rank == 0 else contextlib.nullcontext():
                stream_k.gemm_all_reduce(a, b, group=heap)
                heap.synchronize()
                stream_k.gemm_all_reduce(a, b, group=heap)
        except CallMismatch as error:
            return str(error)
    return ""


@pytest.mark.cpu
@pytest.mark.num_ranks(2)
@pytest.mark.parametrize("planned", [False, True], ids=["new", "planned"])
def test_ranks_in_different_modes(planned: bool) -> None:
    for text in values(run_ranks(in_different_modes, 2, planned)):
        assert "batch-invariant" in text


def refused(rank: int, world_size: int) -> dict[str, str]:
    a, b, weight = torch.ones(4, 640), torch.ones(640, 8), torch.ones(8)
    texts = {}
    with Heap(bodies.HEAP_BYTES) as heap, pyrocshmem.batch_invariant():
        group = {"group": heap}
        tile = {"block_m": 32, "block_n": 32, "block_k": 64}
        cut, other = small_config(**tile), small_config(block_k=32, split="none")
        blas = dataclasses.replace(cut, placement="blas", split="none")
        calls = {
            "squares": lambda: stream_k.gemm_all_reduce(a, b, squared_partials=True, **group),
            "split": lambda: stream_k.gemm(a, b, config=cut),
            "tile": lambda: stream_k.gemm(a, b, config=other),
            "blas": lambda: stream_k.gemm(a, b, config=blas),
            "fused": lambda: stream_k.gemm_all_reduce(a, b, config=cut, **group),
            "norm of a sum": lambda: stream_k.gemm_all_reduce_rms_norm(a, b, None, weight, 0.0, config=cut, **group),
            "norm of columns": lambda: stream_k.gemm_rms_norm_all_scatter(a, b, weight, 0.0, config=cut, **group),
        }  # fmt: skip
        launched = heap.workspace
        for name, call in calls.items():
            try:
                call()
            except ValueError as error:
                texts[name] = str(error)
        assert launched is None or launched.epoch() == 0
    return texts


@pytest.mark.cpu
@pytest.mark.num_ranks(2)
def test_what_would_break_it_is_refused() -> None:
    for texts in values(run_ranks(refused, 2)):
        for name, words in {
            "squares": "squared_partials", "split": "split is 'auto'", "tile": "block_k is 32", "blas": "BLAS",
            "fused": "split is 'auto'", "norm of a sum": "split is 'auto'", "norm of columns": "split is 'auto'",
        }.items():  # fmt: skip
            assert words in texts[name], texts[name]
            assert "batch-invariant" in texts[name]


def by_workspace(rank: int, world_size: int) -> list[Any]:
    """A workspace that asks for the mode, beside the mode itself; the second without its split."""
    x = [
        torch.randn(rows, 2200, generator=torch.Generator().manual_seed(rows)).to(device())
        for rows in (7, 40)
    ]
    b = torch.randn(2200, 48, generator=torch.Generator().manual_seed(0)).to(device())
    with Heap(bodies.HEAP_BYTES) as heap:
        space = Workspace(heap, batch_invariant=True)
        found = []
        for a in x:
            mine = [
                stream_k.gemm_all_reduce(a, b, group=heap, workspace=space),
                stream_k.gemm(a, b, workspace=space),
            ]
            # By its operator, too, whose backward has the mode of the call.
            leaf = a.clone().requires_grad_()
            stream_k.gemm_all_reduce(leaf, b, group=heap, workspace=space).backward(mine[0])
            with pyrocshmem.batch_invariant():
                right = [stream_k.gemm_all_reduce(a, b, group=heap), stream_k.gemm(a, b)]
                right.append(stream_k.gemm(mine[0], b.t()))
            found += [torch.equal(*pair) for pair in zip((*mine, leaf.grad), right, strict=True)]
        return [*found, torch.equal(stream_k.gemm(x[0], b), stream_k.gemm(x[0], b, workspace=space))]


@pytest.mark.cpu
@pytest.mark.num_ranks(2)
def test_a_workspace_may_ask_for_it() -> None:
    for found in values(run_ranks(by_workspace, 2)):
        assert found == [True] * 6 + [False]


def apart(rank: int, world_size: int) -> list[list[Any]]:
    """How many of the two norms of sums are made behind them as kernels are laid now, and by an older Triton; whether
    the results are the same. Of 20 columns, and of 24, which are whole units of 16 bytes."""
    found = []
    for N in (20, 24):
        norm_of_sums = sys.modules["pyrocshmem.collectives.all_reduce_rms_norm"]
        a, b = torch.randn(3, 16).half(), torch.randn(16, N).half()
        x, weight = a @ b, torch.randn(N).half()
        with Heap(bodies.HEAP_BYTES) as heap, pyrocshmem.batch_invariant():
            group, results, behind = {"group": heap}, {}, []
            for alike in (True, False):
                space = Workspace(heap)
                with (
                    mock.patch.object(row_norm, "_LAYS_ALIKE", alike),
                    mock.patch.object(norm_of_sums, "row_norm", wraps=row_norm.row_norm) as alone,
                ):
                    more = {**group, "workspace": space}
                    norms = (
                        collectives.all_reduce_rms_norm(x, None, weight, bodies.EPS, **more),
                        stream_k.gemm_all_reduce_rms_norm(a, b, x, weight, bodies.EPS, **more),
                    )
                    results[alike] = [each.clone() for norm in norms for each in norm]
                    behind.append(alone.call_count)
            equal = [torch.equal(*pair) for pair in zip(results[True], results[False], strict=True)]
            found.append([*behind, all(equal)])
    return found


@pytest.mark.cpu
@pytest.mark.num_ranks(2)
def test_norms_that_an_older_triton_lays_otherwise_are_apart() -> None:
    for found in values(run_ranks(apart, 2)):
        assert found == [[0, 2, True], [0, 0, True]]


def norms_of_a_workspace(rank: int, world_size: int) -> list[bool]:
    """Of a workspace that asks for the mode, new and planned calls, beside those inside the mode."""
    draw = torch.Generator().manual_seed(0)
    x, weight = torch.randn(40, 2000, generator=draw), torch.randn(2000, generator=draw)
    with Heap(bodies.HEAP_BYTES) as heap:
        space = Workspace(heap, tp_invariant=True)
        call = partial(collectives.all_reduce_rms_norm, x, None, weight, bodies.EPS, group=heap)
        with pyrocshmem.batch_invariant(tp_invariant=True):
            right = call()[0].clone()
        return [torch.equal(call(workspace=space)[0], right) for _ in range(2)] + [
            torch.equal(call()[0], right)
        ]


@pytest.mark.cpu
@pytest.mark.num_ranks(2)
def test_a_workspace_s_norms_are_in_its_mode() -> None:
    for found in values(run_ranks(norms_of_a_workspace, 2)):
        assert found == [True, True, False]


def results_anywhere(rank: int, world_size: int) -> list[bool]:
    """Whether norms inside the mode come out right where a result is, in place or not, at no multiple of 16 bytes, or
    in rows of a wider matrix; new and planned calls."""
    draw, N, found = torch.Generator().manual_seed(3), 40, []
    x, weight = torch.randn(9, N, generator=draw), torch.randn(N, generator=draw)
    with Heap(bodies.HEAP_BYTES) as heap, pyrocshmem.batch_invariant():
        call = partial(collectives.rms_norm, weight=weight, eps=bodies.EPS, group=heap)
        right, updated = call(x, residual=x)
        alone = call(x)
        for _ in range(2):
            for place in (torch.empty(9 * N + 1)[1:].view(9, N), torch.empty(9, N + 25)[:, :N]):
                result, more = call(x, residual=x, out=place.fill_(torch.nan))
                found += [result is place, torch.equal(place, right), torch.equal(more, updated)]
                place.copy_(x)
                found += [call(place, out=place) is place, torch.equal(place, alone)]
    return found


@pytest.mark.cpu
@pytest.mark.num_ranks(2)
def test_results_may_be_anywhere() -> None:
    for found in values(run_ranks(results_anywhere, 2)):
        assert found == [True] * 20


@pytest.mark.cpu
def test_the_environment_may_ask_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for word, mode in (("", NONE), ("0", NONE), ("1", BATCH), ("tp", TP)):
        monkeypatch.setenv("PYROCSHMEM_BATCH_INVARIANT", word)
        assert invariance._of_environment() == mode
    monkeypatch.setenv("PYROCSHMEM_BATCH_INVARIANT", "yes")
    with pytest.raises(ValueError, match="'yes', allowed are 0, 1, tp"):
        invariance._of_environment()
    monkeypatch.setattr(invariance, "_always", BATCH)
    assert invariance.current() == BATCH


@pytest.mark.cpu
def test_the_mode_is_a_thread_s_and_ends() -> None:
    import threading

    seen = []
    with pyrocshmem.batch_invariant():
        other = threading.Thread(target=lambda: seen.append(invariance.current()))
        other.start()
        other.join()
        assert invariance.current() == BATCH
        with pyrocshmem.batch_invariant():
            pass
        assert invariance.current() == BATCH
    assert (seen, invariance.current()) == ([NONE], NONE)
    with pytest.raises(TypeError, match="batch_invariant is a str, a bool"):
        Workspace(device=device(), batch_invariant="yes")  # type: ignore[arg-type]


def compiled(rank: int, world_size: int) -> list[bool]:
    """A function that was compiled outside is compiled once more inside, and keeps the mode in its backward."""
    graphs: list[str] = []

    def count(module: Any, _: Any) -> Any:
        graphs.append(str(module.graph))
        return module

    b = torch.randn(640, 48, generator=torch.Generator().manual_seed(0)).to(device())
    x = torch.randn(7, 640, generator=torch.Generator().manual_seed(1)).to(device())
    with Heap(bodies.HEAP_BYTES) as heap:
        group = {"group": heap}
        fn = torch.compile(
            lambda a: stream_k.gemm(stream_k.gemm_all_reduce(a, b, **group), b.t()), backend=count
        )
        outside = fn(x)
        with pyrocshmem.batch_invariant():
            inside = fn(x)
            right = stream_k.gemm(stream_k.gemm_all_reduce(x, b, **group), b.t())
            marked = [stream_k.gemm_all_reduce(x, b, **group)]
        default = stream_k.gemm(stream_k.gemm_all_reduce(x, b, **group), b.t())
        whole = torch.compile(lambda a: stream_k.gemm_all_reduce(a, b, **group), backend="aot_eager")
        leaf = x.clone().requires_grad_()
        with pyrocshmem.batch_invariant():
            y = whole(leaf)
        y.backward(marked[0])
        with pyrocshmem.batch_invariant():
            grad = stream_k.gemm(marked[0], b.t())
        return [
            torch.equal(outside, default), torch.equal(inside, right), len(graphs) == 2,
            "batch-invariant" in graphs[1], "batch-invariant" not in graphs[0], torch.equal(leaf.grad, grad),
        ]  # fmt: skip


@pytest.mark.cpu
@pytest.mark.num_ranks(2)
@pytest.mark.timeout(300)
def test_compiled() -> None:
    assert values(run_ranks(compiled, 2, timeout=TIMEOUT_S)) == [[True] * 6] * 2


def replayed(rank: int, world_size: int) -> list[bool]:
    """A graph's rows against an eager call's of another batch."""
    x = bodies.Operands(Heap(bodies.HEAP_BYTES), Sizes(300, 256, 512, BF16), 3)
    a, b, few = x.a[:, x.inner].contiguous(), x.b[x.inner], slice(40, 47)
    with pyrocshmem.batch_invariant():
        args = (b, None, x.weight, bodies.EPS)
        eager = stream_k.gemm_all_reduce_rms_norm(a, *args, group=x.heap)
        part = a[few].clone()
        stream_k.gemm_all_reduce_rms_norm(part, *args, group=x.heap)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            captured = stream_k.gemm_all_reduce_rms_norm(part, *args, group=x.heap)
        graph.replay()
        x.heap.synchronize()
    return [torch.equal(c, e[few]) for c, e in zip(captured, eager, strict=True)]


@pytest.mark.gpu
@pytest.mark.num_ranks(2)
def test_graphs() -> None:
    assert values(run_ranks(replayed, 2)) == [[True, True]] * 2

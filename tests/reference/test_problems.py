"""The table of ops: shares of A and B, multiplied, are the part of C that it says; texts and default shapes."""

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from pyrocshmem import collectives, stream_k
from pyrocshmem.calls.op import Op
from pyrocshmem.reference import operands
from pyrocshmem.reference.operands import Operands
from pyrocshmem.reference.problems import ALL, PROBLEMS, Problem, find_problem, problem_of
from pyrocshmem.stream_k.ops.op import GemmOp

TIER = 0
ROOT = Path(__file__).resolve().parents[2]
M, N, K = 7, 11, 13
RANKS = (1, 2, 3, 8)

pytestmark = pytest.mark.cpu
every_op = pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS.keys())


@every_op
@pytest.mark.parametrize("ranks", RANKS)
def test_shares_make_the_result(problem: Problem, ranks: int) -> None:
    a, b = torch.randn(M, K, dtype=torch.float64), torch.randn(K, N, dtype=torch.float64)
    shares = [problem.shares(a, b, rank, ranks) for rank in range(ranks)]
    whole_a = torch.cat([a_share for a_share, _ in shares]) if problem.a_cut == "M" else None
    products = [(a_share if whole_a is None else whole_a) @ b_share for a_share, b_share in shares]
    if problem.sums:
        products = [torch.stack(products).sum(0)]
    c = torch.cat(products, dim=1)
    torch.testing.assert_close(c, a @ b)
    parts = [c[problem.part((M, N, K), rank, ranks)] for rank in range(ranks)]
    if problem.out_cut == "":
        assert all(torch.equal(part, c) for part in parts)
    else:
        assert torch.equal(torch.cat(parts, dim="MN".index(problem.out_cut)), c)
        # As the fused ops document it.
        split = torch.tensor_split(c, ranks, dim="MN".index(problem.out_cut))
        assert [part.shape for part in parts] == [part.shape for part in split]


@every_op
def test_the_local_product_is_the_largest(problem: Problem) -> None:
    lengths = dict(zip("MNK", (M, N, K), strict=True))
    lengths[problem.b_cut] = -(-lengths[problem.b_cut] // 3)
    assert problem.local_shape((M, N, K), 3) == tuple(lengths.values())


@every_op
@pytest.mark.parametrize("on_gpu", [False, True])
def test_default_shapes_are_the_same_work_for_a_rank(problem: Problem, on_gpu: bool) -> None:
    local = [problem.local_shape(problem.default_shape(ranks, on_gpu), ranks) for ranks in RANKS]
    assert {shape[1:] for shape in local} == {local[0][1:]}
    M = 32 if on_gpu else 64
    rows = [M - M % ranks if problem.a_cut == "M" else M for ranks in RANKS]
    assert [shape[0] for shape in local] == rows, "as many on every rank that brings some"


def test_the_table_names_what_exists() -> None:
    for problem in ALL:
        assert callable(
            getattr({"stream_k": stream_k, "collectives": collectives}[problem.package], problem.op)
        )
        if problem.command:
            assert find_problem(problem.command, len(problem.letters)) is problem
    for command, problem in PROBLEMS.items():
        assert find_problem(command) is problem
        assert problem.letters == "MNK"
    assert find_problem("broadcast", 3).letters == "MN", "no namesake has three sizes"
    with pytest.raises(ValueError, match="is 'gather', allowed all_gather, all_reduce, all_scatter, reduce_"):
        find_problem("gather")


def test_shares_in_words() -> None:
    words = {name: problem.describe_share((M, N, K), 3) for name, problem in PROBLEMS.items()}
    assert words == {
        "all_gather": "A 3 x 13, B 13 x 4; result 7 x 4, all rows, its own columns",
        "all_reduce": "A 7 x 5, B 5 x 11; result 7 x 11, the sum over ranks",
        "all_scatter": "A 7 x 13, B 13 x 4; result 7 x 11, the columns of all ranks",
        "reduce_scatter": "A 7 x 5, B 5 x 11; result 3 x 11, its M/R rows of the sum over ranks",
    }


def operands_of(problem: Problem, rank: int, ranks: int, dtype: torch.dtype = torch.float16) -> Operands:
    shape = problem.global_shape((6, 8, 16)[: len(problem.letters)], ranks)
    return Operands(problem, shape, dtype, 7, rank, ranks)


def rows_of(x: Operands) -> torch.Tensor:
    return torch.arange(x.result_shape()[0])


@pytest.mark.parametrize("problem", ALL, ids=[problem.name for problem in ALL])
def test_one_wrong_element_is_seen(problem: Problem) -> None:
    """By what judges the libraries' results, too; tests/reference/test_command.py holds them to it."""
    for rank in range(3):
        x = operands_of(problem, rank, 3, torch.float32)
        out = x.truth(rows_of(x)).value.float()
        assert out.shape == x.result_shape()
        for allowed in ({}, x.of_library()):
            assert x.check(out, **allowed).ok
            spoilt = out.clone()
            spoilt[-1, 2] *= 1.001
            found = x.check(spoilt, **allowed)
            assert (found.num_bad, found.first_bad) == (1, (len(out) - 1, 2))
    with pytest.raises(ValueError, match="out must be"):
        x.check(out[1:])


@pytest.mark.parametrize("problem", ALL, ids=[problem.name for problem in ALL])
def test_samples_and_blocks_are_parts_of_the_whole(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    x = operands_of(problem, 1, 2)
    whole = x.truth(rows_of(x))
    for limit in ("SAMPLED_ROWS", "SAMPLED_COLUMNS", "BLOCK_ELEMENTS"):
        monkeypatch.setattr(operands, limit, 5)
    rows, columns = x.sample()
    assert len(rows) == min(5, x.result_shape()[0])
    assert (len(columns) == 5) if columns is not None else x.result_shape()[1] <= 5
    part = x.truth(rows, columns)
    for name in ("value", "slack", "own", "partials", "typical"):
        expected = getattr(whole, name)[rows] if columns is None else getattr(whole, name)[rows][:, columns]
        torch.testing.assert_close(getattr(part, name), expected)
    out = whole.value.half()
    out[-1, -1] *= 1.5
    found = x.check(out)
    assert (found.num_bad, found.first_bad) == (1, (out.shape[0] - 1, out.shape[1] - 1))


def test_an_op_from_outside() -> None:
    """Its cuts say what ranks have, and what they must hold; its reference is a function of its own."""
    words = {
        "name": "mine",
        "package": "elsewhere",
        "holds": "M x K/R, K/R x N",
        "result": "a block of rows, M/R x N",
    }
    op = GemmOp(**words, a_cut="K", b_cut="K", out_cut="M", steps="matmul", reference=torch.matmul)
    problem = problem_of(op)
    assert problem.describe_share((7, 8, 9), 2) == "A 7 x 5, B 5 x 8; result 4 x 8, a block of rows"
    x = Operands(problem, (7, 8, 9), torch.float32)
    run = x.reference()
    run.call()
    assert x.check(run.result()).ok
    with pytest.raises(ValueError, match="mine has no problem"):
        problem_of(Op(**words))


def test_calls_of_a_graph_read_copies_in_turn() -> None:
    x = operands_of(PROBLEMS["all_reduce"], 0, 2)
    assert x.b is x.b
    x.cool_weights(3)
    assert (x.num_weights, len({x.b.data_ptr() for _ in range(6)})) == (3, 3)
    x.hold_weights()
    assert x.b is x.b


def test_picture_of_the_cuts(tmp_path: Path) -> None:
    """The committed one is what the script draws of today's ops."""
    pytest.importorskip("matplotlib")
    out, folder = tmp_path / "cuts.svg", ROOT / "docs" / "img"
    command = [sys.executable, str(folder / "cuts.py"), str(out)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, check=True, env=environment, timeout=100, capture_output=True)
    found, committed = (
        [node.text for node in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")]
        for path in (out, folder / "cuts.svg")
    )
    assert found == committed
    assert {problem.op for problem in PROBLEMS.values()} <= set(found)
    assert found.count("A: M x K/R") == 3
    assert found.count("B: K x N/R") == 3

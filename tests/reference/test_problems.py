"""The table of ops: shares of A and B, multiplied, are the part of C that it says; texts and default shapes."""

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from pyrocshmem import stream_k
from pyrocshmem.reference.norm_problems import NORMS, NormProblem, Setting
from pyrocshmem.reference.problems import PROBLEMS, Problem, find_problem

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
    rows = [M - M % ranks if problem.a_cut == "M" else M for M, ranks in zip([64] * 4, RANKS, strict=True)]
    assert [shape[0] for shape in local] == rows, "as many on every rank that brings some"


def test_the_table_names_what_exists() -> None:
    for name, problem in PROBLEMS.items():
        assert find_problem(name) is problem
        assert callable(getattr(stream_k, problem.op))
    with pytest.raises(ValueError, match="is 'gather', allowed all_gather, all_reduce, all_scatter, reduce_"):
        find_problem("gather")


def test_shares_in_words() -> None:
    words = {name: problem.describe_share((M, N, K), 3) for name, problem in PROBLEMS.items()}
    assert words == {
        "all_gather": "A 3 x 13, B 13 x 4; result 7 x 4, its own columns",
        "all_reduce": "A 7 x 5, B 5 x 11; result 7 x 11, the sum over ranks",
        "all_scatter": "A 7 x 13, B 13 x 4; result 7 x 11, the columns of all ranks",
        "reduce_scatter": "A 7 x 5, B 5 x 11; result 3 x 11, its own rows of the sum over ranks",
    }


@pytest.mark.parametrize("problem", NORMS.values(), ids=NORMS.keys())
def test_one_wrong_element_of_a_norm_is_seen(problem: NormProblem) -> None:
    """By what judges the libraries' results, too."""
    shape = (5, 24, 16)[: len(problem.gpu_shape)]
    op = problem.make(Setting(1, 2, torch.device("cpu"), shape, torch.float32, 7))
    out = op.plain()
    assert op.check(out.clone(), out, 2).ok
    spoilt = out.clone()
    spoilt[-1, 2] *= 1.0001
    assert op.check(spoilt, out, 2).num_bad == 1


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

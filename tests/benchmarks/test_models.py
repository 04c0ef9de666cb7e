"""The drawn set `models`: whose layers, how many rows, and that a seed says all of it."""

import math
import secrets
import statistics

import pytest

from pyrocshmem.benchmarks import models, run, shapes

TIER = 1
pytestmark = pytest.mark.cpu


def test_the_table() -> None:
    table = models.models()
    assert len(table) >= 12
    assert sum(model.intermediate is None for model in table.values()) >= 2, "mixtures of experts, too"
    assert len(set(table.values())) == len(table), "none of them twice"
    for name, model in table.items():
        assert model.heads % model.kv_heads == 0, name
        assert model.hidden % 64 == 0, name


def test_gemms_of_a_layer() -> None:
    llama = models.models()["llama-3_1-70b"]
    assert llama.gemm("qkv", 1) == (8192 + 2 * 1024, 8192)
    assert llama.gemm("qkv", 4) == (2048 + 2 * 256, 8192)
    assert llama.gemm("o", 4) == (8192, 2048)
    assert llama.gemm("gate_up", 4) == (2 * 7168, 8192)
    assert llama.gemm("down", 4) == (8192, 7168)
    # 8 heads of keys on 16 ranks: two hold the same.
    assert llama.gemm("qkv", 16) == (512 + 2 * 128, 8192)
    assert llama.gemm("qkv", 3) is None
    assert llama.gemm("down", 3) is None
    assert models.models()["mixtral-8x7b"].gemm("down", 2) is None


@pytest.mark.parametrize("kind", ["column", "row", "gemm"])
def test_a_seed_says_all(kind: str) -> None:
    seed, other = secrets.token_hex(4), secrets.token_hex(4)
    cases = models.drawn(kind, 2, seed)
    assert len(cases) == models.NUM_CASES
    assert cases == models.drawn(kind, 2, seed)
    assert cases != models.drawn(kind, 2, other)
    assert all(1 <= M <= models.MOST_ROWS for M, _, _ in cases)
    assert sum(M % 256 == 0 for M, _, _ in cases) >= models.NUM_CASES // 2


def test_rows_are_drawn_log_uniformly() -> None:
    rows = [M for i in range(20) for M, _, _ in models.drawn("row", 2, str(i))[::2]]
    octaves = statistics.quantiles((math.log2(M) for M in rows), n=4)
    # Of 640 draws a quartile is known to a third of an octave or so.
    assert octaves == pytest.approx([3.5, 7.0, 10.5], abs=1.0)


def test_one_seed_for_all_ops() -> None:
    ops = ["all_gather_gemm", "gemm_reduce_scatter"]
    found = run.plan(ops, "models", "bfloat16", 2, None)
    assert {case.op for case in found} == set(ops)
    (name,) = {case.shapes for case in found}
    assert shapes.NAME.fullmatch(name)
    seed = name.removeprefix("models-")
    assert [case for case in found if case.op == ops[0]] == shapes.cases_of(
        ops[0], f"models:{seed}", 2, "bfloat16", False
    )
    assert run.plan(ops, "models", "bfloat16", 2, None) != found


@pytest.mark.parametrize("text", ["models:", "models:no seed", "models:../x", "models:" + "a" * 17])
def test_bad_seeds(text: str) -> None:
    with pytest.raises(ValueError, match="letters and digits"):
        shapes.cases_of("gemm", text, 1, "bfloat16", False)


def test_a_collective_has_no_models() -> None:
    with pytest.raises(ValueError, match="all_gather has no shapes 'models:1'"):
        shapes.cases_of("all_gather", "models:1", 2, "bfloat16", False)

"""What `benchmarks.searches` reads out of the tables of `pyrocshmem tune`."""

import json
from pathlib import Path

import pytest

from pyrocshmem.benchmarks import searches, sets_page
from pyrocshmem.benchmarks.shapes import cases_of

TIER = 0
pytestmark = pytest.mark.cpu

RUNS = [
    {
        "command": f"python -m pyrocshmem tune -n 2 --shapes {shapes} --out x.json",
        "commit": "c0ffee0123",
        "target": "2 x NVIDIA H200 (cuda), because 2 GPUs found",
        "ranks": 2,
    }
    for shapes in ("models:5eed", "llama3")
]


def entry(op: str, run: int, ratio: float) -> dict[str, object]:
    return {"op": op, "run": run, "us": 10.0, "cost_model_us": 10.0 * ratio}


def write(path: Path, entries: list[dict[str, object]]) -> None:
    path.write_text(json.dumps({"runs": RUNS, "entries": entries}))


def test_a_search_for_each_op_and_run_of_drawn_shapes(tmp_path: Path) -> None:
    write(
        tmp_path / "2026-01-01-2xH200-tune-all.json",
        [
            entry("gemm_reduce_scatter", 0, 1.5),
            entry("gemm_reduce_scatter", 0, 1.0),
            entry("gemm_reduce_scatter", 1, 9.0),
            entry("gemm", 0, 1.25),
        ],
    )
    (tmp_path / "other.json").write_text("{}")
    alone, fused = searches.read(tmp_path)
    assert (alone.op, alone.ranks, alone.machine, alone.ratios) == ("gemm", 1, "1 x H200", (1.25,))
    assert (fused.op, fused.ranks, fused.machine, fused.ratios) == (
        "gemm_reduce_scatter", 2, "2 x H200", (1.0, 1.5)
    )  # fmt: skip
    drawn = cases_of("gemm_reduce_scatter", "models:5eed", 2, "bfloat16", True)
    assert fused.num_drawn == len({(case.M, case.N, case.K) for case in drawn})
    row = f"| `gemm_reduce_scatter` | 5eed | 2 x H200 | c0ffee0 | 2 of {fused.num_drawn} | 1.250 | 1.475 | 1.500 |"
    assert row in searches.choices_table([alone, fused])
    assert row in "".join(sets_page.sections([], [alone, fused]))
    assert searches.choices_table([]) == ""


def test_what_is_no_table(tmp_path: Path) -> None:
    path = tmp_path / "2026-01-01-2xH200-tune-gemm.json"
    for text in (
        "",
        "{}",
        '{"runs": [], "entries": [{"op": "gemm", "run": 0, "us": 1, "cost_model_us": 1}]}',
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"tune-gemm\.json"):
            searches.read(tmp_path)


def test_ratios_in_words() -> None:
    ratios = [2.0, *[1.0] * 18, 1.5]
    words = "20 cases, cost model over fastest 1.075 on average, 1.525 at the 95th percentile, 2.000 at worst"
    assert str(searches.Ratios(ratios)) == words
    assert "1.500 at the 95th" in str(searches.Ratios([*ratios, 1.0]))

"""Records of when partial sums travelled in fp32 by default are read with today's names of providers."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pyrocshmem.benchmarks import records, stats
from pyrocshmem.benchmarks.__main__ import RESULTS
from pyrocshmem.benchmarks.schema import IS_DEFAULT
from pyrocshmem.benchmarks.shapes import TIMED
from tests.benchmarks import made_up

TIER = 1
pytestmark = pytest.mark.cpu

OLD = made_up.ENVIRONMENT | {"format": 2}


def read(tmp_path: Path, *lines: dict[str, Any]) -> list[records.Record]:
    """The cases of a file of these lines."""
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = records.read(path)
    assert found is not None
    return found.cases


def everywhere(op: str, **times: float) -> dict[str, Any]:
    """A record in which each provider stands in every field that is by provider."""
    case = made_up.case(op, "llama3", 64, 64, 64, **times)
    for field in ("host_us", "efficiency", "workspace_bytes", "peak_mib"):
        case[field] = dict(times)
    for field in ("config", "skipped", "failed"):
        case[field] = {name: {"us": us} if field == "config" else str(us) for name, us in times.items()}
    case["clocks_mhz"] = {name: [us] for name, us in times.items()}
    case["bits"] = {name: {"runs": int(us), "distinct": 1} for name, us in times.items()}
    return case | {"wrong": list(times)}


def test_every_field_has_todays_names(tmp_path: Path) -> None:
    old = everywhere(
        "gemm_all_reduce", ours=1, ours_16bit=2, ours_beside=3, ours_gemm=4, unfused=5, blas_ours=6
    )
    new = everywhere(
        "gemm_all_reduce", ours_fp32=1, ours=2, ours_fp32_beside=3, ours_gemm=4, unfused=5, blas_ours=6
    )
    (found,) = read(tmp_path, OLD, old)
    assert found == new | {"run": OLD}
    assert read(tmp_path, made_up.ENVIRONMENT, old) == [old | {"run": made_up.ENVIRONMENT}]


def test_layers_sum_too(tmp_path: Path) -> None:
    times = {"ours": 1.0, "ours_16bit": 2.0, "ours_compiled": 3.0, "ours_symm_mem": 4.0, "torch_tp": 5.0}
    old = made_up.case("layer_training", "llama3-8b", 2048, 4096, 14336, **times)
    (found,) = read(tmp_path, OLD, old)
    names = ("ours_fp32", "ours", "ours_fp32_compiled", "ours_symm_mem", "torch_tp")
    assert {name: records.median(found, name) for name in names} == dict(
        zip(names, times.values(), strict=True)
    )
    assert len(found["us"]) == len(names)


def test_what_was_the_default_then_is_the_strict_mode_now(tmp_path: Path) -> None:
    case = made_up.case("gemm_all_reduce", "llama3", 64, 64, 64, ours=1, ours_16bit=2)
    case["skipped"] = {"ours_beside": IS_DEFAULT, "kraken": IS_DEFAULT}
    (found,) = read(tmp_path, OLD, case)
    assert records.median(found, "ours_fp32_beside") == 1
    assert found["skipped"]["kraken"] == IS_DEFAULT


def test_what_sums_nothing_stays(tmp_path: Path) -> None:
    for op in ("all_gather_gemm", "gemm_all_scatter"):
        case = everywhere(op, ours=1, ours_beside=2, unfused=3)
        assert read(tmp_path, OLD, case) == [case | {"run": OLD}]
    alone = made_up.case("all_reduce", "sizes", 1, 64, 0, ours=1, ours_one_shot=2, unfused=3)
    assert read(tmp_path, OLD, alone)[0]["us"] == alone["us"]


def test_fp32_operands_had_one_mode(tmp_path: Path) -> None:
    case = made_up.case("gemm_all_reduce", "llama3", 64, 64, 64, ours=1, ours_beside=2) | {"dtype": "float32"}
    case["skipped"] = {"ours_16bit": "float32 has 4 bytes"}
    (found,) = read(tmp_path, OLD, case)
    assert found["us"] == case["us"]
    assert found["skipped"] == {"ours_fp32": "float32 has 4 bytes"}


def test_no_gemm_was_the_blas(tmp_path: Path) -> None:
    case = made_up.case("gemm", "llama3", 64, 64, 64, ours=10, blas=20)
    (found,) = read(tmp_path, OLD, case)
    assert stats.speedup(found, "blas", "ours_no_blas") == 2
    (found,) = read(tmp_path, made_up.ENVIRONMENT, case)
    assert stats.speedup(found, "blas", "ours_no_blas") is None


def test_runs_of_both_formats_in_one_file(tmp_path: Path) -> None:
    """Each case is read as its own run wrote it."""
    old = made_up.case("gemm_all_reduce", "llama3", 64, 64, 64, ours=1, ours_16bit=2)
    new = made_up.case("gemm_all_reduce", "llama3", 65, 64, 64, ours=3, ours_fp32=4)
    after = {"gpus_after": []}
    found = read(tmp_path, OLD, old, after, made_up.ENVIRONMENT, new, OLD, old)
    assert [(records.median(case, "ours"), records.median(case, "ours_fp32")) for case in found] == [
        (2, 1),
        (3, 4),
        (2, 1),
    ]
    assert [case["run"]["format"] for case in found] == [2, 3, 2]


def test_a_run_is_never_a_records_own_word(tmp_path: Path) -> None:
    case = made_up.case("gemm", "llama3", 64, 64, 64, ours=10, blas=20) | {"run": {"commit": "made up"}}
    assert read(tmp_path, made_up.ENVIRONMENT, case)[0]["run"] == made_up.ENVIRONMENT


def test_samples_that_contradict_todays_names_are_refused(tmp_path: Path) -> None:
    """The spread is of pairs: what is `ours` now must have as many samples as the baseline."""
    case = made_up.case("gemm_all_reduce", "llama3", 64, 64, 64, ours=1, ours_16bit=2, unfused=3)
    case["us"]["ours_16bit"] = [2.0]
    with pytest.raises(ValueError, match=r"us.unfused has 3 samples, allowed are as many as us.ours: 1"):
        read(tmp_path, OLD, case)


def test_the_records_that_are_committed() -> None:
    """Where configurations say what partial sums travelled in, both names say the same: in the records of 4 GPUs, in 9
    fused sums of Llama 3 of each op and in 20 of decoding."""
    wire = {"ours": "bfloat16", "ours_fp32": None}
    seen: Counter[str] = Counter()
    for file in records.read_all(sorted(RESULTS.glob("*.jsonl"))):
        for case in file.cases:
            if TIMED[case["op"]].kind != "row" or case["run"]["format"] != 2 or not case["config"]:
                continue
            said = {name: case["config"][name]["partial_dtype"] for name in wire}
            assert said == wire, (file.path, case["op"], case["M"])
            seen[case["op"]] += 1
    assert seen == {"gemm_reduce_scatter": 9, "gemm_all_reduce": 29}

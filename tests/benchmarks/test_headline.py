"""Which cases README shows: published drawn sets before the Llama shapes, decided by the records alone."""

from pathlib import Path
from typing import Any

import pytest

from pyrocshmem.benchmarks import documents, headline, models, records, seeds, stats
from tests.benchmarks import made_up

TIER = 1
pytestmark = pytest.mark.cpu

COMMIT, NEWER = "0123abcd" + 32 * "9", "ba5eba11" + 32 * "9"


@pytest.fixture(autouse=True)
def history(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seeds, "may_be_in_history", lambda commit: True)


def file(cases: list[dict[str, Any]], **environment: Any) -> records.File:
    return records.File(Path("x.jsonl"), made_up.ENVIRONMENT | environment, cases)


def listed(op: str, shapes: str, speed: float, **fields: Any) -> dict[str, Any]:
    base = "blas" if op == "gemm" else "unfused"
    return made_up.case(op, shapes, 64, 64, 64, ours=10, **{base: 10 * speed}) | fields


def drawn(op: str, commit: str, speed: float, seed: str = "", **fields: Any) -> records.File:
    kind, base = ("gemm", "blas") if op == "gemm" else ("row", "unfused")
    seed = seed or commit[:8]
    times = {"ours": 10.0, base: 10 * speed}
    cases = [
        made_up.case(op, models.set_name(seed), *sizes, **times)
        | {"ranks": 1 if op == "gemm" else 2}
        | fields
        for sizes in models.drawn(kind, 2, seed)
    ]
    return file(cases, commit=commit, started=f"2026-01-0{3 if commit == NEWER else 2}T00:00:00Z")


def shown(*files: records.File) -> dict[str, str]:
    """By op, what is shown."""
    found = headline.headline(stats.groups(files))
    assert found is not None
    return {group.op: found.set_of(group) for group in found.fused}


OLD = file(
    [
        listed("all_gather_gemm", "llama3", 2, ranks=2),
        listed("gemm_all_reduce", "sweep", 9, ranks=2),
        listed("gemm_all_reduce", "decode", 9, ranks=2),
        listed("gemm_all_reduce", "llama3", 3, ranks=2),
        listed("gemm_all_reduce_rms_norm", "decode", 4, ranks=2),
        listed("gemm_all_reduce_rms_norm", "batches", 4, ranks=2),
        listed("gemm_reduce_scatter", "llama3", 5),
        listed("gemm", "llama3", 1),
    ]
)


def test_without_published_seeds() -> None:
    """The Llama shapes, then decoding; of two GPUs, and of others where these have none; no tuning seed."""
    tuned = drawn("gemm_all_reduce", COMMIT, 8, seed="tuneA")
    assert shown(OLD, tuned) == {
        "all_gather_gemm": "llama3",
        "gemm_all_reduce": "llama3",
        "gemm_all_reduce_rms_norm": "decode",
        "gemm_reduce_scatter": "llama3, 4 x GPU X",
    }


def test_a_published_seed_comes_first() -> None:
    """On whatever machine; the machine that has most of them names the table."""
    elsewhere = drawn("gemm_all_reduce", COMMIT, 8, device="GPU Y")
    found = shown(OLD, elsewhere)
    assert found["gemm_all_reduce"] == "models-0123abcd"
    assert found["all_gather_gemm"] == "llama3, 2 x GPU X"
    assert shown(OLD, drawn("gemm_all_reduce", COMMIT, 8))["all_gather_gemm"] == "llama3"


def test_the_newest_of_several() -> None:
    older, newer = drawn("gemm_all_reduce", COMMIT, 8), drawn("gemm_all_reduce", NEWER, 7)
    for files in ((older, newer), (newer, older)):
        assert shown(OLD, *files)["gemm_all_reduce"] == "models-ba5eba11"


def test_16_bits_before_fp32() -> None:
    wide = file([listed("all_gather_gemm", "llama3", 9, ranks=2, dtype="float32")])
    found = headline.headline(stats.groups([OLD, wide]))
    assert found is not None
    assert {group.dtype for group in found.fused} == {"bfloat16"}


def test_nothing_to_show() -> None:
    on_cpu = file([listed("gemm_all_reduce", "llama3", 2, device="cpu")])
    alone = file([listed("gemm", "llama3", 2)])
    assert headline.headline(stats.groups([on_cpu, alone])) is None
    assert documents.readme_table([on_cpu]) == "Nothing was measured on GPUs yet.\n"


def test_the_table_says_what_it_shows() -> None:
    text = documents.readme_table([OLD, drawn("gemm_all_reduce", COMMIT, 8)])
    assert "| `gemm_all_reduce` | models-0123abcd | 8.00 (8.00) |  |  |  | operands |" in text
    assert (
        "Shapes: `llama3`: nine layers of Llama 3; `models-0123abcd`: 64 layers of public models, drawn by the hash of "
        "the commit measured; `decode`: 1 to 256 rows."
    ) in text
    assert text.startswith("2 x GPU X; 2026-01-02; torch 2.11, triton 3.6, nccl 2.28. Multicast")


def test_over_the_best_peer_of_each_drawn_case() -> None:
    """Of a drawn set no peer has all cases; what is half ours is no peer of others."""
    made = drawn("gemm_all_reduce", COMMIT, 8)
    for case in made.cases[::2]:
        case["us"]["nccl_window"], case["error"]["nccl_window"] = [20.0] * 3, case["error"]["ours"]
    half = len({(case["M"], case["N"], case["K"]) for case in made.cases[::2]})
    count = len({(case["M"], case["N"], case["K"]) for case in made.cases})
    mean = (2**half * 8 ** (count - half)) ** (1 / count)
    text = documents.readme_table([OLD, made])
    assert (
        f"| `gemm_all_reduce` | models-0123abcd | 8.00 (8.00) |  | {mean:.2f} (2.00) |  | operands |" in text
    )
    assert "Best peers: the fastest of each case for `gemm_all_reduce`.\n" in text
    for case in made.cases:
        case["us"].pop("nccl_window", None)
        case["us"]["blas_ours"], case["error"]["blas_ours"] = [5.0] * 3, case["error"]["ours"]
    assert (
        "| `gemm_all_reduce` | models-0123abcd | 8.00 (8.00) |  |  |  | operands |"
        in documents.readme_table([OLD, made])
    )


def test_the_picture_shows_the_same() -> None:
    """And our own kernel over the BLAS, also where the default is the BLAS."""
    pytest.importorskip("matplotlib")
    from pyrocshmem.benchmarks import plots

    gemm = drawn("gemm", COMMIT, 1)
    for case in gemm.cases:
        case["us"]["ours_no_blas"], case["error"]["ours_no_blas"] = [20.0] * 3, case["error"]["ours"]
    found = plots.figures([OLD, drawn("gemm_all_reduce", COMMIT, 8), gemm])
    (axis,) = found["speedup"].axes
    bars = {
        label.get_text(): bar.get_width()
        for label, bar in zip(axis.get_yticklabels(), axis.patches, strict=True)
    }
    assert bars == pytest.approx(
        {
            "gemm_all_reduce, models": 8.0,
            "gemm_reduce_scatter, llama3, 4 x GPU X": 5.0,
            "gemm_all_reduce_rms_norm, decode": 4.0,
            "all_gather_gemm, llama3": 2.0,
            "our GEMM kernel, models": 0.5,
        }
    )
    assert axis.get_title(loc="left").endswith("on 2 x GPU X, bfloat16")

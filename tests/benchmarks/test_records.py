"""What is made from records (summary, tables, plots), and what is measured: sets of shapes, bytes, options."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pyrocshmem.benchmarks import documents, run, stats, tables
from pyrocshmem.benchmarks import records as records_module
from pyrocshmem.benchmarks.__main__ import app
from pyrocshmem.benchmarks.notes import NO_NOTES
from pyrocshmem.benchmarks.schema import IS_DEFAULT, same_as
from pyrocshmem.benchmarks.shapes import OPS, SIZES, cases_of, corpus
from tests.benchmarks import made_up
from tests.benchmarks.made_up import FUSED

TIER = 2
pytestmark = pytest.mark.cpu

KEYS = ["op", "device", "ranks", "dtype", "shapes", "cases", "overlap_efficiency", "speedup", "worst_speedup"]


def test_summary(tmp_path: Path) -> None:
    gemm = made_up.case("gemm", "llama3", 64, 64, 64, ours=50, blas=60)
    path = made_up.write(tmp_path / "a.jsonl", [*FUSED, gemm])
    done = CliRunner().invoke(app, ["summary", str(path), "--json"])
    assert done.exit_code == 0, done.output
    first, second = json.loads(done.stdout)
    assert list(first) == list(second) == KEYS
    assert (first["op"], first["cases"], first["ranks"], first["overlap_efficiency"]) == ("gemm", 1, 1, None)
    assert first["speedup"] == {"blas": pytest.approx(1.2)}
    assert (second["op"], second["shapes"], second["cases"]) == ("gemm_all_reduce", "llama3", 2)
    assert second["overlap_efficiency"] == pytest.approx(0.8)
    assert second["speedup"] == pytest.approx({"blas": 0.8, "unfused": 1.0, "nccl_window": 0.9})
    assert second["worst_speedup"] == pytest.approx({"blas": 0.8, "unfused": 0.5, "nccl_window": 0.9})


def test_summary_for_people_and_of_several_files(tmp_path: Path) -> None:
    older = made_up.write(tmp_path / "a.jsonl", FUSED)
    newer = made_up.case("gemm_all_reduce", "llama3", 8192, 4096, 1792, ours=100, unfused=400)
    files = [str(made_up.write(tmp_path / "b.jsonl", [newer])), str(older)]
    text = Path(files[0]).read_text()
    Path(files[0]).write_text(text.replace(made_up.ENVIRONMENT["started"], "2026-01-03T00:00:00Z"))
    (tmp_path / "old.jsonl").write_text('{"command": "an older format"}\n')
    done = CliRunner().invoke(app, ["summary", *files, str(tmp_path / "old.jsonl")])
    assert done.exit_code == 0, done.output
    # The record that was made later counts, whatever the order of the files: sqrt(2 x 4).
    assert "| unfused | 2.83 | 2.00 |" in done.output
    assert "old.jsonl: not in format" in done.output


@pytest.mark.parametrize("command", ["summary", "report"])
def test_records_that_can_t_be_read(command: str, tmp_path: Path) -> None:
    (tmp_path / "text.jsonl").write_text("op, us\n")
    (tmp_path / "list.jsonl").write_text("[1]\n")
    for name in ("none.jsonl", "text.jsonl", "list.jsonl"):
        done = CliRunner().invoke(app, [command, str(tmp_path / name)])
        assert done.exit_code == 2, done.output
        assert done.output.startswith("error: ")
        assert name in done.output
        assert done.output.count("\n") == 1


def test_wrong_results_do_not_count() -> None:
    wrong = made_up.case("gemm_all_reduce", "llama3", 16384, 4096, 1792, ours=1, unfused=1000) | {
        "wrong": ["ours"]
    }
    file = records_module.File(Path("x.jsonl"), made_up.ENVIRONMENT, [*FUSED, wrong])
    (found,) = stats.summary([file])
    assert found["cases"] == 2
    assert found["speedup"]["unfused"] == pytest.approx(1.0)
    assert "WRONG" in tables.document([file])
    assert len(run.problems(file.cases)) == 1


def test_report(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from pyrocshmem.benchmarks import plots

    cases = [
        *FUSED,
        made_up.case("gemm", "stream-k-corpus", 300, 200, 100, ours=10, blas=9, ours_whole_tiles=12),
        made_up.case("all_reduce", "sizes", 1, 2048, 0, ours=10, unfused=20, torch_one_shot=9),
        made_up.case("barrier", "once", 1, 0, 0, ours=3, unfused=9),
    ]
    root = tmp_path
    (root / "docs").mkdir()
    (root / "README.md").write_text(f"before\n{documents.BEGIN}\nold\n{documents.END}\nafter\n")
    files = [records_module.File(tmp_path / "made.jsonl", made_up.ENVIRONMENT, cases)]
    drawn = plots.draw(files, root / "drawn")
    stale = root / "docs" / "results" / "of-an-older-report.svg"
    stale.parent.mkdir()
    stale.touch()
    documents.write(files, drawn, root, NO_NOTES, plots.FRONT, [])
    text = "".join(page.read_text() for page in (root / "docs" / "results").glob("*.md"))
    assert "50 (**0.50**)" in text  # a losing case, shown
    first = (root / "docs" / "results.md").read_text()
    assert "| `gemm_all_reduce` | llama3 | 2 | 1.00 | 0.50 | 1 | 0.67 | 0.50 | 2 |" in first
    assert "- `gemm_all_reduce`: 2 (0.50 at " in first
    assert "`kraken` (not importable; 2 cases)" in text
    readme = (root / "README.md").read_text()
    assert readme.startswith(f"before\n{documents.BEGIN}\n")
    assert readme.endswith(f"{documents.END}\nafter\n")
    assert "old" not in readme
    row = "| `gemm_all_reduce` | llama3 | 1.00 (0.50) |  | 0.90 (0.90) |  | operands |"
    assert [line for line in readme.splitlines() if line.startswith("| `")] == [row]  # the fused op alone
    assert "unfused 1.00 (0.50)" in text  # the summary has every peer
    names = {path.stem for path in drawn if path.name != plots.FRONT}
    for part in ("-time", "-efficiency", "-utilisation", "roofline", "speedup-over-peers"):
        assert any(name.endswith(part) for name in names), part
    assert not any(name.startswith("barrier") for name in names)  # one point
    assert {path.name for path in stale.parent.glob("*.svg")} == {f"{name}.svg" for name in names}
    assert all(path.stat().st_size > 1000 for path in stale.parent.glob("*.svg"))
    assert (root / "docs" / "img" / plots.FRONT).read_bytes() == (root / "drawn" / plots.FRONT).read_bytes()
    assert all(text.count(f"({name}.svg)") == 1 for name in names)


def test_the_corpus_shows_a_point_a_product_and_provider(tmp_path: Path) -> None:
    """A provider that would do what another one does has its reading: our own kernel that of the default, whole tiles
    that of the default or of our own kernel."""
    pytest.importorskip("matplotlib")
    from pyrocshmem.benchmarks import plots

    split = made_up.case("gemm", "stream-k-corpus", 300, 200, 100, ours=10, blas=9, ours_whole_tiles=12)
    split["skipped"] = {"ours_no_blas": IS_DEFAULT}
    whole = made_up.case("gemm", "stream-k-corpus", 301, 200, 100, ours=10, blas=9)
    whole["skipped"] = {"ours_no_blas": IS_DEFAULT, "ours_whole_tiles": IS_DEFAULT}
    blas = made_up.case("gemm", "stream-k-corpus", 302, 200, 100, ours=9, blas=9, ours_no_blas=11)
    blas["skipped"] = {"ours_whole_tiles": same_as("ours_no_blas")}
    (group,) = stats.groups([records_module.File(tmp_path / "x", made_up.ENVIRONMENT, [split, whole, blas])])
    figure = plots.utilisation(group)
    flops = [2 * case["M"] * 200 * 100 / 1e6 for case in group.cases]
    times = {"blas": (9, 9, 9), "ours_whole_tiles": (12, 10, 11), "ours_no_blas": (10, 10, 11)}
    best = max(each / 9 for each in flops)
    for axis in figure.axes:
        rates = [each / us for each, us in zip(flops, times.pop(axis.get_title()), strict=True)]
        assert list(axis.lines[0].get_ydata()) == pytest.approx([100 * rate / best for rate in rates])
    assert times == {}


def test_a_variant_that_is_another_one_has_its_numbers() -> None:
    """In cells, without a ratio; in means and counts; not among those that were skipped."""
    taken = made_up.case("gemm", "llama3", 300, 200, 100, ours=10, blas=10, ours_no_blas=20)
    own = made_up.case("gemm", "llama3", 301, 200, 100, ours=10, blas=20) | {
        "skipped": {"ours_no_blas": IS_DEFAULT, "ours_whole_tiles": same_as("ours_no_blas")}
    }
    file = records_module.File(Path("x.jsonl"), made_up.ENVIRONMENT, [taken, own])
    (group,) = stats.groups([file])
    assert stats.speedups(group, "blas", "ours_no_blas") == pytest.approx([0.5, 2.0])
    assert [tables.cell(case, "ours_no_blas", ()) for case in group.cases] == ["20 (2.00)", "10"]
    assert tables.cell(group.cases[0], "ours_whole_tiles", ()) == ""  # nobody knows
    text = tables.document([file])
    assert "ours_no_blas` (it is" not in text
    wrong = group.cases[1] | {"wrong": ["ours"]}
    assert stats.speedup(wrong, "blas", "ours_no_blas") is None
    # Only ours may stand for another one, whatever a record says.
    lying = own | {"skipped": {"ours": "it is blas", "kraken": IS_DEFAULT}}
    assert tables.cell(lying, "kraken", ()) == "skipped"


def test_sets_of_shapes() -> None:
    llama = {
        op: [(c.M, c.N, c.K) for c in cases_of(op, "llama3", 4, "bfloat16", True)] for op in list(OPS)[:5]
    }
    assert len(llama["gemm"]) == 18
    assert llama["all_gather_gemm"][0] == (4096, 1792, 4096)
    assert llama["gemm_all_reduce"][0] == (4096, 4096, 1792)
    assert llama["gemm_all_reduce"] == [(m, k, n) for m, n, k in llama["gemm_all_scatter"]]
    decode = cases_of("gemm_all_reduce", "decode", 4, "bfloat16", True)
    assert {case.timing for case in decode} == {"graph"}
    assert (16, 8192, 7168) in {(c.M, c.N, c.K) for c in decode}
    batches = cases_of("gemm_all_reduce", "batches", 4, "bfloat16", True)
    assert {(c.N, c.K) for c in batches} == {(c.N, c.K) for c in decode}
    assert len(batches) == 20
    assert all(c.timing == "graph" and c.M % 16 for c in batches)
    assert (4091, 1801, 4104) in {
        (c.M, c.N, c.K) for c in cases_of("all_gather_gemm", "sweep", 4, "bfloat16", True)
    }
    assert corpus() == corpus()
    assert len(corpus()) == 500
    assert all(128 <= size <= 8192 for shape in corpus() for size in shape)
    aligned = corpus(64)
    assert all(128 <= size <= 8192 and size % 64 == 0 for shape in aligned for size in shape)
    for shape, near in zip(corpus(), aligned, strict=True):
        assert all(abs(x - y) <= 32 for x, y in zip(shape, near, strict=True))
    sizes = cases_of("all_reduce", "sizes", 4, "bfloat16", True)
    assert [2 * c.M * c.N for c in sizes] == list(SIZES) == [1 << i for i in range(10, 30)]
    assert [c.M * c.N * 4 * 2 for c in cases_of("all_scatter", "sizes", 4, "bfloat16", True)] == list(SIZES)


def test_shapes_from_a_file_and_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("shapes = [[1, 2, 3], [4, 5, 6]]\nsizes = [1024]\n")
    found = cases_of("gemm_all_scatter", str(path), 2, "float16", False)
    assert [(c.shapes, c.M, c.N, c.K) for c in found] == [("mine", 1, 2, 3), ("mine", 4, 5, 6)]
    assert cases_of("all_reduce", str(path), 2, "float16", False)[0].N == 512
    assert [c.N for c in cases_of("all_reduce", "64,128", 2, "float16", False)] == [32, 64]


@pytest.mark.parametrize(
    "op", sorted(op.name for op in OPS.values() if op.kind == "collective" and op.name != "barrier")
)
def test_sizes_of_less_than_an_element_a_rank(op: str) -> None:
    found = cases_of(op, "1,2,6,100000", 4, "float32", False)
    assert all(case.M > 0 and case.N > 0 for case in found)
    assert [c.M * c.N for c in found] == sorted(c.M * c.N for c in found)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("gemm", "--shapes", "1,2"), "shapes is '1,2'; allowed are llama3, decode"),
        (("gemm", "--shapes", "0,2,3"), "shapes is '0,2,3'"),
        (
            ("gemm_all_reduce", "--shapes", "stream-k-corpus"),
            "gemm_all_reduce has no shapes 'stream-k-corpus'",
        ),
        (("all_reduce", "--shapes", "llama3"), "all_reduce takes sizes or tiny, or bytes, not 'llama3'"),
        (
            ("gemm", "--shapes", "models:commit", "--commit", "76403a9"),
            "got '76403a9': give --commit, 8 digits",
        ),
        (("gemm", "--shapes", "no-such.toml"), "no-such.toml"),
        (("gemm", "--providers", "ours,nobody"), "no such providers: nobody; there are blas, ours"),
        (("gemm", "--dtype", "int8"), "dtype is 'int8', allowed float16 (fp16)"),
        (("gemm", "--shapes", "[/x]"), "[/x]"),
        (("gemm", "--iters", "0"), "iters is 0, allowed 1 or more"),
        (("gemm", "-n", "0"), "0 ranks asked for"),
        (("multicast",), "No such command"),
        (("gemm", "--shapes", "tiny", "-n", "1", "--csv", "nowhere/at/all.csv"), "nowhere/at/all.csv"),
    ],
)
def test_bad_options(arguments: tuple[str, ...], text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is measured."""
    monkeypatch.delattr(run, "run")
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert done.exit_code == 2, done.output
    assert text in done.output

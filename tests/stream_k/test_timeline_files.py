"""What a timeline says, its files, and the option of the command that writes them."""

import gzip
import json
from pathlib import Path

import pytest

from pyrocshmem.calls import timeline_files
from pyrocshmem.calls.timeline import COPY, MMA, Span, Timeline
from pyrocshmem.run_command import app
from tests import commands

TIER = 2


def _made_up(programs: int = 2, tiles: int = 2) -> Timeline:
    spans = [
        Span(rank, "GEMM", program, stage, tile, 10.0 * tile + begin, 10.0 * tile + end)
        for rank in range(2)
        for program in range(programs)
        for tile in range(tiles)
        for stage, begin, end in ((MMA, 1.0, 7.0), ("store", 7.0, 8.5))
    ]
    spans.append(Span(0, "stream", 1, COPY, -1, 0.0, 9.0))
    spans.append(Span(1, "consumer", 0, "reduce", 0, 17.0, 30.25))
    return Timeline(tuple(spans), 1.5, 0)


def test_exposed_communication() -> None:
    """Rank 1: 1..30.25, multiplying 1..7 and 11..17. Rank 0: 0..18.5, the same products."""
    assert _made_up().total_us == 30.25
    assert _made_up().exposed_us == 29.25 - 12.0
    only_rank_0 = Timeline(tuple(span for span in _made_up().spans if span.rank == 0), 0.0, 0)
    assert only_rank_0.exposed_us == 18.5 - 12.0
    no_products = Timeline((Span(0, "all_reduce", 0, "reduce", 0, 2.0, 6.0),), 0.0, 0)
    assert no_products.exposed_us == 4.0
    assert Timeline((), 0.0, 0).exposed_us == 0.0


def test_overlapping_products_count_once() -> None:
    spans = [
        Span(0, "GEMM", i, MMA, i, begin, end)
        for i, (begin, end) in enumerate([(0, 10), (2, 4), (8, 12), (15, 20)])
    ]
    assert Timeline(tuple(spans), 0.0, 0).exposed_us == 3.0


def test_chrome_trace(tmp_path: Path) -> None:
    (path, _) = timeline_files.write(_made_up(), tmp_path / "a.json", "an op")
    found = json.loads(path.read_text())
    facts = found["otherData"]
    assert facts["exposed_communication_us"] == 17.25
    assert facts["clock_error_us"] == 1.5
    names = {
        (e["pid"], e["tid"]): e["args"]["name"] for e in found["traceEvents"] if e["name"] == "thread_name"
    }
    assert set(names.values()) == {"GEMM 0", "GEMM 1", "stream 1", "consumer 0"}
    assert len(names) == 6, "a thread for each program of each rank"
    events = [event for event in found["traceEvents"] if event["ph"] == "X"]
    assert len(events) == len(_made_up().spans)
    copy = next(event for event in events if event["name"] == COPY)
    assert (copy["ts"], copy["dur"], names[copy["pid"], copy["tid"]]) == (0.0, 9.0, "stream 1")
    (zipped, _) = timeline_files.write(_made_up(), tmp_path / "b.json.gz", "an op")
    assert json.loads(gzip.decompress(zipped.read_bytes())) == found
    assert (tmp_path / "b.png").exists()


@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
def test_a_picture_is_drawn_anew_from_its_file(tmp_path: Path, name: str) -> None:
    pytest.importorskip("matplotlib")
    path, picture = timeline_files.write(_made_up(), tmp_path / name, "an op, its sizes")
    first = picture.read_bytes()
    picture.unlink()
    assert timeline_files.redraw(path) == picture
    assert picture.read_bytes() == first


def test_large_traces_stay_below_a_megabyte(tmp_path: Path) -> None:
    large = _made_up(programs=128, tiles=64)
    text = json.dumps(timeline_files.chrome_trace(large, "large"), separators=(",", ":"))
    assert len(text) < 1_000_000
    facts = json.loads(text)["otherData"]
    assert facts["programs"].startswith("one in ")
    assert facts["exposed_communication_us"] == large.exposed_us, "of all programs"
    kept, every = timeline_files.thinned(large.spans, 2000)
    assert len(kept) <= 2000
    assert {span.lane % every for span in kept if span.kernel == "GEMM"} == {0}
    assert {"stream", "consumer"} <= {span.kernel for span in kept}, "kernels of few programs are whole"


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\.json or \.json\.gz file, got .*a\.png"):
        timeline_files.write(_made_up(), tmp_path / "a.png")


@pytest.mark.num_ranks(2)
@pytest.mark.gpu_a_rank("commands start a rank a GPU")
def test_option_of_the_command(tmp_path: Path) -> None:
    out = tmp_path / "out[a].json"  # no markup
    arguments = ("-n", "2", "-c", "reduce_scatter", "--placement", "copy_engine", "--shape", "96,64,128")
    done = commands.invoke(app, *arguments, "--iters", "1", "--trace", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "exposed communication: " in done.stdout
    assert f"timeline: {out.with_suffix('.png')}" in done.stdout
    found = json.loads(out.read_text())
    assert {event["pid"] for event in found["traceEvents"]} == {0, 1}
    assert found["otherData"]["title"].startswith("gemm_reduce_scatter, M N K = 96 64 128")
    assert 0 < found["otherData"]["exposed_communication_us"] < found["otherData"]["total_us"]
    assert {MMA, "store", "announce", "wait", COPY, "reduce"} <= {
        event["name"] for event in found["traceEvents"]
    }


@pytest.mark.parametrize(
    ("collective", "sizes", "lanes", "stages"),
    [
        ("gemm_rms_norm", "3,96,128", {"GEMM", "exchange"}, {MMA, "push", "wait", "reduce"}),
        ("gemm_rms_norm_all_scatter", "3,96,128", {"GEMM", "norm"}, {MMA, "push", "wait", "store"}),
        ("all_reduce", "3,96", {"exchange"}, {"push", "wait", "reduce"}),
    ],
)
@pytest.mark.num_ranks(2)
@pytest.mark.gpu_a_rank("commands start a rank a GPU")
def test_option_of_the_command_for_other_ops(
    tmp_path: Path, collective: str, sizes: str, lanes: set[str], stages: set[str]
) -> None:
    out = tmp_path / "out.json"
    arguments = ("-n", "2", "-c", collective, "--shape", sizes, "--iters", "1", "--trace", str(out))
    done = commands.invoke(app, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"timeline: {out.with_suffix('.png')}" in done.stdout
    events = json.loads(out.read_text())["traceEvents"]
    for rank in range(2):
        mine = [event for event in events if event["pid"] == rank]
        threads = (event["args"]["name"] for event in mine if event["name"] == "thread_name")
        assert {name.rsplit(" ", 1)[0] for name in threads} == lanes
        assert stages <= {event["name"] for event in mine}


@pytest.mark.cpu
def test_command_refuses_other_files(tmp_path: Path) -> None:
    done = commands.invoke(app, "-n", "1", "--trace", str(tmp_path / "out.png"))
    assert done.returncode == 2
    assert ".json or .json.gz file" in done.stderr

"""Records that somebody made up to do harm, or that broke: one line says what is wrong; what is text stays text."""

import copy
import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pyrocshmem import RankResult, RanksFailed
from pyrocshmem.benchmarks import __main__ as commands
from pyrocshmem.benchmarks import escape, records, run, stats, tables
from pyrocshmem.benchmarks.shapes import Case, cases_of
from tests import commands as processes
from tests.benchmarks import made_up

TIER = 2
pytestmark = pytest.mark.cpu

ALL_REDUCE = made_up.case("all_reduce", "sizes", 1, 2048, 0, ours=10, unfused=20)
FUSED = made_up.FUSED[1]
US = FUSED["us"]
NEEDED = (
    "op", "shapes", "M", "N", "K", "dtype", "ranks", "timing", "device", "us", "host_us", "error", "wrong", "skipped",
    "failed", "config", "link_bytes", "floor_us", "efficiency",
)  # fmt: skip
# A line that stands for another: of a case with these fields, without these, or this text.
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "dtype that leads out of docs": ({"dtype": "../../../../out/pwn"}, "dtype is '../../../../out/pwn', allowed"),
    "op that leads out of docs": ({"op": "../../../../out/pwn"}, "op is '../../../../out/pwn', allowed are gemm,"),
    "shapes that lead out of docs": ({"shapes": "../../out/pwn"}, "shapes is '../../out/pwn', allowed are letters"),
    "shapes of Markdown": ({"shapes": "a|b\n\n# c [d](javascript:1)"}, "shapes is 'a|b"),
    "shapes of rich's markup": ({"shapes": "[/] [bold"}, "shapes is '[/] [bold', allowed are letters"),
    "shapes of a formula": ({"shapes": "$\\frac{1}{$"}, "shapes is '$"),
    "shapes with a line break behind": ({"shapes": "llama3\n"}, r"shapes is 'llama3\n', allowed"),
    "M of text": ({"M": "x"}, "M is 'x', allowed are whole numbers from 1 to"),
    "M of many digits": ({"M": 10**400}, "M is 1000"),
    "M below 1": ({"M": 0}, "M is 0, allowed are whole numbers from 1"),
    "M of true": ({"M": True}, "M is True, allowed"),
    "M of 1.5": ({"M": 1.5}, "M is 1.5, allowed are whole"),
    "K of no rows": ({"K": 0}, "M, N, K are (8192, 4096, 0), allowed for gemm_all_reduce are 1 or more"),
    "ranks below 1": ({"ranks": 0}, "ranks is 0, allowed"),
    "op of a list": ({"op": ["a"]}, "op is ['a'], allowed are gemm"),
    "timing": ({"timing": "x"}, "timing is 'x', allowed are eager, graph"),
    "device of a number": ({"device": 3}, "device is 3, allowed is text"),
    "device of a book": ({"device": "x" * 5000}, "device is 'xxx"),
    "us of a list": ({"us": [1.0]}, "us is [1.0], allowed are objects"),
    "us of text": ({"us": {"ours": ["a"]}}, "us.ours[0] is 'a', allowed are numbers"),
    "us of NaN in text": ({"us": {"ours": ["nan", "inf"]}}, "us.ours[0] is 'nan', allowed are numbers"),
    "us of 0": ({"us": {"ours": [0.0]}}, "us.ours[0] is 0.0, allowed are numbers from 0.001"),
    "us below 0": ({"us": {"ours": [-1.0]}}, "us.ours[0] is -1.0, allowed"),
    "us of no sample": ({"us": {"ours": []}}, "us.ours is [], allowed are lists of 1"),
    "us of a null": ({"us": {"ours": None}}, "us.ours is None, allowed are lists"),
    "us of two lengths": ({"us": {**US, "ours": [1.0]}}, "us.unfused has 3 samples, allowed are as many as us.ours: 1"),
    "us of a provider with markup": ({"us": {"[/]": [1.0]}}, "a name in us is '[/]', allowed are letters"),
    "us without an error": ({"us": {"ours": [1.0], "x": [1.0]}}, "us names x, allowed are those in error"),
    "wrong of an object": ({"wrong": {"ours": 1}}, "wrong is {'ours': 1}, allowed are lists"),
    "wrong that nobody timed": ({"wrong": ["x"]}, "wrong names x, allowed are those in error"),
    "error of a number": ({"error": {"ours": 3}}, "error.ours is 3, allowed are objects"),
    "error without a field": ({"error": {"ours": {}}}, "error.ours has no max_error, "),
    "efficiency of 0": ({"efficiency": {"ours": 0}}, "efficiency.ours is 0, allowed are numbers"),
    "skipped of a list": ({"skipped": {"x": ["y"]}}, "skipped.x is ['y'], allowed is text"),
    "failed of text": ({"failed": "x"}, "failed is 'x', allowed are objects"),
    "floor of text": ({"floor_us": "x"}, "floor_us is 'x', allowed are numbers"),
    "clocks without power": ({"power_w": None}, "clock_mhz and power_w are read together"),
    "clocks of one": ({"clock_mhz": [1.0]}, "clock_mhz is [1.0], allowed are lists of 2 to 2"),
    "bits of a number": ({"bits": {"ours": 3}}, "bits.ours is 3, allowed are objects"),
    "workspace of text": ({"workspace_bytes": {"ours": "x"}}, "workspace_bytes.ours is 'x', allowed"),
    "peak of text": ({"peak_mib": {"ours": "x"}}, "peak_mib.ours is 'x', allowed"),
    "schedule that there is not": ({"schedule": {"ours": "<b>"}}, "schedule.ours is '<b>', allowed are blas, whole"),
    "corpus of another op": ({"shapes": "stream-k-corpus"}, "shapes is stream-k-corpus, allowed for gemm alone"),
    "collective with K": ({**ALL_REDUCE, "K": 1}, "M, N, K are (1, 2048, 1), allowed for all_reduce are M and N of"),
    "collective of nothing": ({**ALL_REDUCE, "N": 0}, "M, N, K are (1, 0, 0), allowed for all_reduce are M and N of"),
}  # fmt: skip
ENVIRONMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "started of a number": ({"started": 3}, "started is 3, allowed are times like 2026-01-31T23:59:59Z"),
    "started that is Markdown": ({"started": "[x](y)"}, "started is '[x](y)', allowed are times"),
    "gpus of text": ({"gpus": "x"}, "gpus is 'x', allowed are lists"),
    "gpus of numbers": ({"gpus": [1]}, "gpus[0] is 1, allowed is text"),
    "command of a list": ({"command": []}, "command is [], allowed is text"),
    "torch of null": ({"torch": None}, "torch is None, allowed is text"),
    "uncommitted of a number": ({"uncommitted": 3}, "uncommitted is 3, allowed are lists"),
    "ranks of text": ({"num_ranks": "4"}, "num_ranks is '4', allowed are whole numbers"),
}
LINES: dict[str, tuple[bytes, str]] = {
    "deep": (b"[" * 100000, "it nests too deep; allowed is an object in JSON"),
    "deep inside": (b'{"op": ' + b"[" * 100000 + b"]" * 100000 + b"}", "it nests too deep; allowed"),
    "no JSON": (b"op, us", "Expecting value; allowed is an object in JSON"),
    "list": (b"[1]", "it is a list; allowed is an object"),
    "NaN": (b'{"op": NaN}', "NaN is no number in JSON; allowed"),
    "number of too many digits": (b'{"M": ' + b"1" * 5000 + b"}", "; allowed is an object"),
    "infinity by its exponent": (
        json.dumps(FUSED).replace("80.0", "1e999", 1).encode(),
        "is inf, allowed are numbers",
    ),
    "no UTF-8": (b'{"op": "\xff"}', "'utf-8' codec can't decode byte 0xff in position 8: invalid start byte; allowed"),
    "UTF-16": (json.dumps(FUSED).encode("utf-16"), "'utf-8' codec can't decode"),
    "missing fields": (b'{"op": "gemm"}', "there is no shapes, M, N, K, dtype, "),
    "neither case nor environment": (b'{"M": 3}', "there is no format, command, "),
    "more than what follows a run": (b'{"gpus_after": [], "started": 3}', "there is no format, command, "),
}  # fmt: skip


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where `report` writes."""
    root = tmp_path / "root"
    (root / "docs").mkdir(parents=True)
    (root / "docs" / "results.md").write_text("old")
    (root / "README.md").write_text(README)
    monkeypatch.setattr(commands, "ROOT", root)
    monkeypatch.setattr(commands, "RESULTS", root / "records")
    return root


README = "before\n<!-- readings: made by benchmarks.report -->\nold\n<!-- end of readings -->\nafter\n"


def everything_below(folder: Path) -> dict[str, bytes]:
    """Files and what they hold."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


def is_refused(path: Path, line: int, text: str) -> None:
    """By both commands, in one line, and nothing is written."""
    before = everything_below(path.parent)
    for command in ("summary", "report"):
        done = CliRunner().invoke(commands.app, [command, str(path)])
        assert done.exit_code == 2, (done.output, done.exception)
        assert isinstance(done.exception, SystemExit)  # no other that would be a traceback
        assert done.output.startswith(f"error: {path}:{line}: "), done.output[:300]
        assert text in done.output
        assert done.output.count("\n") == 1
        assert len(done.output) < 1000
        assert done.output[:-1].isprintable()
    assert everything_below(path.parent) == before


def write(path: Path, *lines: dict[str, Any] | bytes) -> Path:
    """A file of these lines."""
    path.write_bytes(
        b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines)
    )
    return path


@pytest.mark.parametrize("what", CASES)
def test_a_hostile_case(what: str, root: Path, tmp_path: Path) -> None:
    fields, text = CASES[what]
    path = write(tmp_path / "x.jsonl", made_up.ENVIRONMENT, ALL_REDUCE, {**FUSED, **fields})
    is_refused(path, 3, text)


@pytest.mark.parametrize("field", NEEDED)
def test_a_case_without_a_field(field: str, root: Path, tmp_path: Path) -> None:
    case = {name: value for name, value in FUSED.items() if name != field}
    text = "there is no format" if field == "op" else f"there is no {field}; needed are op, shapes, "
    is_refused(write(tmp_path / "x.jsonl", made_up.ENVIRONMENT, case), 2, text)


@pytest.mark.parametrize("what", ENVIRONMENTS)
def test_a_hostile_environment(what: str, root: Path, tmp_path: Path) -> None:
    """As the first line, and as that of a later run in the same file."""
    fields, text = ENVIRONMENTS[what]
    hostile = made_up.ENVIRONMENT | fields
    is_refused(write(tmp_path / "x.jsonl", hostile, FUSED), 1, text)
    is_refused(write(tmp_path / "x.jsonl", made_up.ENVIRONMENT, FUSED, hostile), 3, text)


@pytest.mark.parametrize("what", LINES)
def test_a_broken_line(what: str, root: Path, tmp_path: Path) -> None:
    line, text = LINES[what]
    is_refused(write(tmp_path / "x.jsonl", made_up.ENVIRONMENT, FUSED, line, FUSED), 3, text)


def test_an_empty_file(root: Path, tmp_path: Path) -> None:
    for content in (b"", b"\n \n"):
        (tmp_path / "x.jsonl").write_bytes(content)
        is_refused(tmp_path / "x.jsonl", 1, "the file is empty, allowed are lines of JSON")


def test_a_file_without_end(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "_MOST_BYTES", 1 << 20)
    done = CliRunner().invoke(commands.app, ["summary", "/dev/zero"])
    assert (done.exit_code, done.output) == (
        2,
        "error: /dev/zero is larger than 1 MiB, allowed for records\n",
    )


def test_a_line_that_a_killed_run_has_cut(root: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", made_up.ENVIRONMENT, FUSED, FUSED)
    path.write_bytes(path.read_bytes()[:-100])
    is_refused(path, 3, "and the file ends there, as a killed run leaves it: delete this line; allowed")


def test_a_run_goes_on_after_a_rank_was_killed_while_it_wrote(tmp_path: Path) -> None:
    """The line that was begun goes, its case has failed, and the others stay."""
    path = tmp_path / "x.jsonl"
    records.start(path, made_up.ENVIRONMENT)
    records.append(path, FUSED)
    whole = path.read_bytes()
    path.write_bytes(whole + whole[-200:-100])
    fields = {field.name for field in dataclasses.fields(Case)}
    done, left = (Case(**{name: case[name] for name in fields}) for case in reversed(made_up.FUSED))
    error = RanksFailed([RankResult(0, exitcode=-9)])
    assert run._after_break(path, [done, left], made_up.ENVIRONMENT, error) == []
    found = records.read(path)
    assert found is not None
    assert path.read_bytes().startswith(whole)
    assert [(case["M"], list(case["failed"])) for case in found.cases] == [(8192, []), (4096, ["ours"])]


def test_only_files_in_another_format(root: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", {"command": "an older format"})
    for command in ("summary", "report"):
        done = CliRunner().invoke(commands.app, [command, str(path)])
        assert done.exit_code == 2
        assert "x.jsonl: not in format 2 or 3, left out\nerror: there are no records" in done.output


def test_as_a_process_it_ends_in_one_line_too(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", made_up.ENVIRONMENT, b"[" * 100000)
    done = processes.start("pyrocshmem.benchmarks", "summary", str(path))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: {path}:2: it nests too deep; allowed is an object in JSON, in UTF-8\n"


HOSTILE = (
    "[red]H200[/] <script>alert(1)</script> | x |\n\n# y\x1b[31m `z` [a](javascript:1) $\\undefined{$ $$ &lt; ~~s~~ "
    "\\ \ud800\u202e"
)
IN_MARKDOWN = (
    r"\[red\]H200\[/\] \<script\>alert(1)\</script\> \| x \|\\n\\n\# y\\x1b\[31m \`z\` \[a\](javascript:1) "
    r"\$\\undefined{\$ \$\$ \&lt; \~\~s\~\~ \\ \\ud800\\u202e"
)


PAGES = ("gemm.md", "gemm_all_reduce.md")


def test_text_stays_text_in_documents(root: Path, tmp_path: Path) -> None:
    """What a device is called, and every other text, as it is written there."""
    pytest.importorskip("matplotlib")
    fields = {
        "device": HOSTILE,
        "skipped": {"kraken": HOSTILE},
        "failed": {"x": HOSTILE},
        "dropped": "",
    }
    cases = [
        FUSED | fields,
        made_up.FUSED[0] | fields | {"dropped": HOSTILE},
        made_up.case("gemm", "stream-k-corpus", 3, 2, 1, ours=10, blas=9) | {"device": HOSTILE},
    ]
    names = ("command", "commit", "torch", "triton", "nccl", "python")
    environment = made_up.ENVIRONMENT | dict.fromkeys(names, HOSTILE) | {"gpus": [HOSTILE]}
    path = write(tmp_path / "x.jsonl", environment, *cases)
    done = CliRunner().invoke(commands.app, ["report", str(path)])
    assert done.exit_code == 0, (done.output, done.exception)
    readme, first = ((root / name).read_text() for name in ("README.md", "docs/results.md"))
    sets, *others = ((root / "docs/results" / name).read_text() for name in ("sets.md", *PAGES))
    results = "".join([first, sets, *others])
    assert readme.startswith("before\n<!-- ")
    assert readme.endswith(" -->\nafter\n")
    assert f"\n4 x {IN_MARKDOWN}; 2026-" in readme
    assert f"torch {IN_MARKDOWN}, triton {IN_MARKDOWN}, nccl {IN_MARKDOWN}. Multicast" in readme
    assert f"### gemm_all_reduce, llama3, bfloat16, 4 x {IN_MARKDOWN}\n" in results
    assert f"`kraken` ({IN_MARKDOWN}; 2 cases)" in results
    assert f"`x` ({IN_MARKDOWN}; 2 cases)" in results
    assert f"4096 x 4096 x 1792 ({IN_MARKDOWN})" in results
    shown = HOSTILE.replace("\n", r"\n").replace("\x1b", r"\x1b").replace("\ud800\u202e", r"\ud800\u202e")
    assert f"- `` {shown} `` on 4 x {IN_MARKDOWN}, at commit `[red]H200[`, 2026-" in results
    # The rows of its tables have as many cells as their heads.
    for text, cells in ((readme, 7), (first, 9), (sets, 7)):
        lines = [line for line in text.splitlines() if line.startswith("| `gemm_all_reduce`")]
        assert lines
        assert all(len(re.findall(r"(?<!\\)\|", line)) == cells + 1 for line in lines)
    for text in (readme, results):
        assert "\x1b" not in text
        assert "<script>" not in re.sub("`` .*? ``", "", text)
    written = set(everything_below(root))
    pictures = (
        "gemm-all-reduce-bfloat16-4-time",
        "gemm-all-reduce-bfloat16-4-efficiency",
        "stream-k-corpus-bfloat16-utilisation",
        "roofline",
        "speedup-over-peers",
    )
    assert written - {"README.md", "docs/results.md", "docs/img/speedup.svg"} == {
        f"docs/results/{name}" for name in ("sets.md", *PAGES, *(f"{name}.svg" for name in pictures))
    }
    picture = (root / "docs/results/gemm-all-reduce-bfloat16-4-time.svg").read_text()
    assert "&lt;script&gt;alert(1)&lt;/script&gt; | x |\\n\\n# y\\x1b[31m" in picture
    assert r"$\undefined{$ $$ &amp;lt;" in picture


def test_text_stays_text_on_terminals(root: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", made_up.ENVIRONMENT, FUSED | {"device": HOSTILE})
    done = CliRunner().invoke(commands.app, ["summary", str(path)])
    assert done.exit_code == 0, (done.output, done.exception)
    assert f"| 4 x {IN_MARKDOWN} | 1 |" in done.output
    assert done.output.replace("\n", "").isprintable()
    done = CliRunner().invoke(commands.app, ["summary", "--json", str(path)])
    assert json.loads(done.stdout)[0]["device"] == HOSTILE
    assert done.output.isascii()


@pytest.mark.parametrize(
    ("function", "text", "shown"),
    [
        (escape.visible, "a\x00\x1b[2J\r\x9b\u2028é", "a\\x00\\x1b[2J\\r\\x9b\\u2028é"),
        (escape.markdown, "a_b*c*|", r"a_b\*c\*\|"),
        (escape.code, "a|$<", "`a|$<`"),
        (escape.code, "a``b`", "``` a``b` ```"),
        (escape.plot, "$x$ \\$\n", "\\$x\\$ \\\\$\\n"),
    ],
)
def test_what_an_escaped_text_looks_like(function: Callable[[str], str], text: str, shown: str) -> None:
    assert function(text) == shown


@pytest.mark.parametrize("broken", ["notes", "README"])
def test_a_report_that_can_t_be_written_leaves_all_as_it_was(broken: str, root: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (root / "records").mkdir()
    file = {"notes": root / "records" / "notes.md", "README": root / "README.md"}[broken]
    file.write_bytes({"notes": b"## gemm\n\xff", "README": b"no table"}[broken])
    path = write(tmp_path / "x.jsonl", made_up.ENVIRONMENT, FUSED)
    before = everything_below(root)
    done = CliRunner().invoke(commands.app, ["report", str(path)])
    assert done.exit_code == 2, (done.output, done.exception)
    assert done.output.startswith(f"error: {file}")
    assert done.output.count("\n") == 1
    assert everything_below(root) == before


def read_or_none(path: Path) -> records.File | None:
    """None: it is refused."""
    try:
        return records.read(path)
    except ValueError:
        return None


VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 1, 1 << 39, 10**30, 1e-300, 1e300, "", "x", "$", "\x1b[", "../x", [], [1.0], ["x"], {},
    {"ours": 1.0}, {"ours": [1e-3, 1e10]}, {"ours": "x"}, {"ours": None}, {"ours": {}}, {"../x": 1.0},
)  # fmt: skip


@pytest.mark.parametrize("op", ["gemm", "gemm_all_reduce", "all_reduce", "layer_forward"])
def test_what_is_read_can_be_shown(op: str, root: Path, tmp_path: Path) -> None:
    """Every field in turn with every value of a list: the line is refused, or tables and summary can be made of it."""
    shapes = {"gemm": "stream-k-corpus", "all_reduce": "sizes"}.get(op, "llama3")
    whole = made_up.case(op, shapes, 64, 32, 0 if op == "all_reduce" else 16, ours=10, unfused=20, blas=5)
    whole["peak_mib"] = {"ours": 3.0}
    taken = refused = 0
    for field in whole:
        for value in VALUES:
            case = copy.deepcopy(whole) | {field: value}
            found = read_or_none(write(tmp_path / "x.jsonl", made_up.ENVIRONMENT, case))
            if found is None:
                refused += 1
                continue
            taken += 1
            tables.document([found])
            tables.summary_table(stats.summary([found]))
    assert taken > 20
    assert refused > 200


def test_a_set_s_name_is_checked_before_it_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "a|b.toml"
    path.write_text("shapes = [[1, 2, 3]]\n")
    with pytest.raises(ValueError, match=r"a\|b.toml gives the set's name, allowed are letters"):
        cases_of("gemm", str(path), 1, "float16", False)


def test_a_header_that_could_not_be_read_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="num_ranks is 0, allowed"):
        records.start(tmp_path / "x.jsonl", made_up.ENVIRONMENT | {"num_ranks": 0})
    assert not (tmp_path / "x.jsonl").exists()

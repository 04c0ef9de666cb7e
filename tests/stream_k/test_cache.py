"""The user's cache of measured configurations: where it is, when it counts, and that nothing in it breaks a run."""

import dataclasses
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pyrocshmem import Heap, stream_k
from pyrocshmem.benchmarks.tune_command import app
from pyrocshmem.stream_k.choice import cache
from pyrocshmem.stream_k.choice import table as tuned
from pyrocshmem.stream_k.choice.rules import cost_model
from pyrocshmem.stream_k.ops import gemm_rms_norm, op
from tests import commands
from tests.ranks import run_ranks, values
from tests.stream_k.products import integers
from tests.stream_k.test_tuned import CPU, HALF, TINY, entry, forget

TIER = 1
pytestmark = pytest.mark.cpu

SHAPE = (512, 512, 256)
NARROW = dataclasses.replace(TINY, placement="after", comm_rows=32)


def choose() -> Any:
    return stream_k.choose("gemm_all_scatter", *SHAPE, HALF, 2, CPU)


USUAL = cost_model("gemm_all_scatter", *SHAPE, HALF, 2, CPU)
assert USUAL != NARROW


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the user's cache would be; there is none yet."""
    monkeypatch.delenv("PYROCSHMEM_TUNED")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    forget()
    found = cache.default_path(CPU)
    assert found is not None
    found.parent.mkdir(mode=0o700)
    yield found
    forget()


def written(path: Path, *entries: tuned.Entry, **made: Any) -> dict[str, Any]:
    """Puts a table there; returns what the file holds. made: what it was made with that isn't here."""
    tuned.Table(cache.made_here(CPU)._replace(**made), [{"commit": "a"}], entries).write(path)
    forget()
    return json.loads(path.read_text())


def test_it_is_the_default(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder of the user's; a file a GPU. Without one the rules decide, and nobody says a word."""
    assert (path.parent.name, path.name) == ("pyrocshmem", f"tuned-cpu-{cache.made_here(CPU).num_sms}.json")
    assert choose() == USUAL
    written(path, entry(NARROW))
    assert choose() == NARROW
    assert "measured" in str(stream_k.explain("gemm_all_scatter", *SHAPE, HALF, 2, CPU))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("given", [None, "", "here/there"])
def test_without_a_variable_it_is_in_the_home(
    given: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """XDG has relative paths ignored."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if given is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", given)
    found = cache.default_path(CPU)
    assert found is not None
    assert found.parent == tmp_path / ".cache" / "pyrocshmem"


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("PYROCSHMEM_TUNED")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", nowhere)
    forget()
    assert choose() == USUAL
    done = commands.invoke(app, "--ops", "gemm")
    assert done.returncode == 2
    assert "no home folder" in done.stderr
    assert capsys.readouterr().err == ""
    forget()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"arch": "sm_90"}, "on sm_90 with 6 SMs, not cpu with 6"),
        ({"num_sms": 132}, "on cpu with 132 SMs, not cpu with 6"),
        ({"torch": "2.10.0"}, "with torch 2.10.0, not"),
        ({"triton": "3.4.0"}, "with triton 3.4.0, not"),
        ({"sources": "0" * 16}, "with other sources of this library"),
    ],
    ids=str,
)
def test_other_versions_are_ignored(
    path: Path,
    change: dict[str, Any],
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In one line that says what to do, once a process; the same where the file is named."""
    for named in (False, True):
        if named:
            monkeypatch.setenv("PYROCSHMEM_TUNED", str(path))
        # Entries of another version may have other fields.
        whole = written(path, entry(NARROW), **change)
        path.write_text(json.dumps({**whole, "entries": [{"op": "gemm", "speed": "fast"}]}))
        assert choose() == USUAL
        tuned.choice.cache_clear()
        assert choose() == USUAL
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"pyrocshmem: {path} was measured {text}")
        assert "python -m pyrocshmem tune" in line
        assert "it is ignored" in str(stream_k.explain("gemm_all_scatter", *SHAPE, HALF, 2, CPU))


def _deep(path: Path, text: str) -> None:
    path.write_text("[" * 100_000)


def _pipe(path: Path, text: str) -> None:
    path.unlink()
    os.mkfifo(path)


def _endless(path: Path, text: str) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def _folder(path: Path, text: str) -> None:
    path.unlink()
    path.mkdir()


def _circle(path: Path, text: str) -> None:
    path.unlink()
    path.symlink_to(path)


def _huge(path: Path, text: str) -> None:
    with path.open("ab") as file:
        file.truncate(1 << 40)


def _changed(change: Callable[[dict[str, Any]], object]) -> Callable[[Path, str], object]:
    def write(path: Path, text: str) -> None:
        whole = json.loads(text)
        change(whole)
        path.write_text(json.dumps(whole))

    return write


def _entry_with(**fields: Any) -> Callable[[Path, str], object]:
    return _changed(lambda whole: whole["entries"][0].update(fields))


BROKEN: dict[str, Callable[[Path, str], object]] = {
    "empty": lambda path, text: path.write_text(""),
    "cut": lambda path, text: path.write_text(text[: len(text) // 2]),
    "not JSON": lambda path, text: path.write_text("not JSON"),
    "bytes": lambda path, text: path.write_bytes(b"\xff\x00\xfe" * 100),
    "list": lambda path, text: path.write_text("[]"),
    "number": lambda path, text: path.write_text("9" * 10_000),
    "deep": _deep,
    "pipe": _pipe,
    "endless": _endless,
    "folder": _folder,
    "circle": _circle,
    "huge": _huge,
    "no head": _changed(lambda whole: whole.pop("made_with")),
    "other head": _changed(lambda whole: whole["made_with"].update(user="me")),
    "long head": _changed(lambda whole: whole["made_with"].update({"a" * 10**6: 1})),
    "head of lists": _changed(lambda whole: whole.update(made_with=[[]])),
    "no entries": _changed(lambda whole: whole.pop("entries")),
    "entries by name": _changed(lambda whole: whole.update(entries={"a": {}})),
    "runs of text": _changed(lambda whole: whole.update(runs=["a"])),
    "field with a line\nbreak \x1b[2J": _entry_with(**{"a\nb\x1b[2J": 1}),
    **{
        f"{name}={value!r}": _entry_with(**{name: value})
        for name, value in (
            ("M", 0), ("M", -8), ("M", "8"), ("M", None), ("M", True), ("N", 8.5), ("K", 10**400), ("ranks", 0),
            ("op", 7), ("op", ["gemm"]), ("dtype", {}), ("partial_dtype", 1), ("config", "fast"), ("config", [1]),
            ("us", float("nan")), ("us", float("inf")), ("us", "1"), ("us", -1.0), ("cost_model_us", None),
            ("run", -1), ("most_programs", -1), ("most_programs", 10**12), ("comm_each", "1"), ("timing", 3),
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("which", BROKEN, ids=repr)
def test_a_broken_one_is_ignored(
    path: Path, which: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one line; a file that the caller named is a ValueError."""
    written(path, entry(NARROW))
    assert choose() == NARROW
    BROKEN[which](path, path.read_text())
    forget()
    assert choose() == USUAL
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"pyrocshmem: {path} is no table of configurations: ")
    assert line.isprintable()
    assert len(line) < 1000
    monkeypatch.setenv("PYROCSHMEM_TUNED", str(path))
    forget()
    with pytest.raises(ValueError, match=r"tuned-cpu-6\.json is no table of configurations"):
        choose()


@pytest.mark.parametrize("most_programs", [0, 1, 1 << 30])
def test_an_entry_of_any_numbers_breaks_nothing(path: Path, most_programs: int) -> None:
    """Within what is read, whatever the shape: what it gives can run, or is left to the rules."""
    largest = (1 << 31) - 1
    for shape in ((1, 1, 1), (largest, largest, largest), SHAPE):
        written(path, entry(NARROW, shape, most_programs=most_programs, comm_each=most_programs, run=largest))
        for asked in ((1, 1, 1), (0, 5, 5), SHAPE):
            found = stream_k.choose("gemm_all_scatter", *asked, HALF, 2, CPU)
            assert found.num_programs <= 8 * 6
        assert str(stream_k.explain("gemm_all_scatter", *SHAPE, HALF, 2, CPU))


def test_a_named_file_that_is_not_there(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYROCSHMEM_TUNED", str(path))
    with pytest.raises(
        ValueError, match=r"tuned-cpu-6\.json is no table of configurations: FileNotFoundError"
    ):
        choose()


def test_a_home_that_is_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As of daemons, whose home is /dev/null: they have no cache."""
    monkeypatch.delenv("PYROCSHMEM_TUNED")
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    forget()
    assert choose() == USUAL
    assert capsys.readouterr().err == ""
    forget()


@pytest.mark.parametrize("asked", ["open", "lstat"])  # of the file, or of its folder
def test_a_file_that_can_not_be_read(
    path: Path, asked: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written(path, entry(NARROW))
    real = getattr(os, asked)

    def refuse(what: Any, *more: Any, **options: Any) -> Any:
        if what == path:
            raise PermissionError(13, "Permission denied", str(path))
        return real(what, *more, **options)

    monkeypatch.setattr(os, asked, refuse)
    monkeypatch.setattr(os, "open", refuse if asked == "open" else lambda *_: refuse(path))
    assert choose() == USUAL
    (line,) = capsys.readouterr().err.splitlines()
    assert "PermissionError" in line


def test_what_is_hashed() -> None:
    """All modules of the library with kernels that ops launch, and all that choose and launch them."""
    hashed = {str(file.relative_to(cache._PACKAGE)) for file in cache.source_files()}
    kernels = {
        str(file.relative_to(cache._PACKAGE))
        for folder in (".", "calls", "collectives", "stream_k/local_gemm", "stream_k/ops")
        for file in (cache._PACKAGE / folder).glob("*.py")
        if "@triton.jit" in file.read_text()
    }
    # What the doctor tries, and marks of timelines, which other kernels have.
    assert kernels - hashed == {"doctor.py", "trace.py"}
    assert {"stream_k/choice/rules.py", "stream_k/local_gemm/product.py", "stream_k/ops/op.py"} <= hashed


def test_tune_writes_it(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whole or not at all, in a folder of the user's own; what was measured otherwise gives way, with a line."""
    made: list[Path] = []

    def measured(
        function: Any, ranks: int, cases: Any, iters: int, out: Path, table: tuned.Table, **_: Any
    ) -> Any:
        made.append(out)
        table.add(entry(NARROW, run=len(table.runs) - 1))
        table.write(out)
        return [[]]

    monkeypatch.setattr("pyrocshmem.benchmarks.tune.spawn", measured)
    monkeypatch.setattr("pyrocshmem.benchmarks.tune.plan", lambda *_: [])
    path.parent.rmdir()
    for before in ("none", "one", "stale", "broken"):
        if before == "stale":
            written(path, entry(ranks=4), torch="1.0")
        elif before == "broken":
            path.write_text("{")
        done = commands.invoke(app, "--ops", "gemm", "-n", "2")
        assert done.returncode == 0, done.stderr
        assert str(path) in done.stdout.replace("\n", "")
        assert ("a new one takes its place" in done.stderr) == (before in ("stale", "broken"))
        forget()
        assert choose() == NARROW
        found = tuned.Table.read(path, cache.made_here(CPU))
        assert (len(found.runs), len(found.entries)) == ((2, 1) if before == "one" else (1, 1))
    assert set(made) == {path}
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert [each.name for each in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("stale", [False, True])
def test_tune_leaves_a_named_file_that_is_no_such_table(path: Path, stale: bool) -> None:
    if stale:
        written(path, entry(), torch="1.0")
    else:
        path.write_text("mine")
    before = path.read_text()
    done = commands.invoke(app, "--ops", "gemm", "-n", "2", "--out", str(path))
    assert done.returncode == 2
    assert "give another --out" in done.stderr
    assert path.read_text() == before


M, N, K = 64, 64, 32


def multiplies_with_own_table(rank: int, world_size: int, paths: list[str], asked: str) -> dict[str, Any]:
    """What calls give and choose where each rank reads a file of its own, with the lines that it says; and what it
    chooses without the vote."""
    os.environ["PYROCSHMEM_TUNED"] = paths[rank]
    found: dict[str, Any] = {"said": [], "right": [], "chosen": []}
    tuned.say_once = found["said"].append  # type: ignore[assignment]

    def choosing(*given: Any) -> tuned.Choice:
        made = tuned.choose_together(*given)
        found["chosen"].append(made.config)
        return made

    op.choose_together = gemm_rms_norm.choose_together = choosing  # type: ignore[attr-defined]
    a, b = integers(M, K, HALF, rank), integers(K, N, HALF, 10 + rank)
    every = [
        integers(M, K, HALF, r).double() @ integers(K, N, HALF, 10 + r).double() for r in range(world_size)
    ]
    with Heap(16 << 20) as heap:
        for rows in (M, M // 2):  # both new: one vote for all
            if asked == "norm":
                weight = torch.ones(N, dtype=HALF)
                _, out = stream_k.gemm_all_reduce_rms_norm(a[:rows], b, None, weight, 1e-5, group=heap)
            else:
                out = stream_k.gemm_all_reduce(a[:rows], b, group=heap)
            found["right"].append(torch.equal(out.double(), sum(every)[:rows]))
        tuned._is_read_by_all = lambda heap, op: True  # type: ignore[assignment]
        alone = tuned.choose_together(heap, "gemm_all_reduce", M, N, K, HALF, None, False)
    return {**found, "alone": alone.config}


def of_all_reduce(config: Any, ranks: int) -> tuned.Entry:
    return entry(config, (M, N, K), op="gemm_all_reduce", ranks=ranks, partial_dtype="float16")


OTHER = dataclasses.replace(NARROW, placement="unfused", algorithm="one_shot", group_m=3)


@pytest.fixture
def files(tmp_path: Path) -> Callable[..., list[str]]:
    def write(ranks: int, *configs: Any) -> list[str]:
        forget()
        paths = []
        for number, config in enumerate(configs):
            path = tmp_path / f"{number}.json"
            if config is not None:
                tuned.Table(cache.made_here(CPU), [], [of_all_reduce(config, ranks)]).write(path)
            paths.append(str(path) if config is not None else "none")
        return paths

    return write


@pytest.mark.num_ranks(3)
@pytest.mark.parametrize(("ranks", "asked"), [(2, "sum"), (2, "norm"), (3, "sum")])
def test_ranks_that_read_the_same_table_use_it(
    files: Callable[..., list[str]], ranks: int, asked: str
) -> None:
    paths = files(ranks, *[OTHER] * ranks)
    for found in values(run_ranks(multiplies_with_own_table, ranks, paths, asked)):
        assert found["said"] == []
        assert found["right"] == [True, True]
        assert [config.group_m for config in found["chosen"]] == [OTHER.group_m] * 2


@pytest.mark.num_ranks(3)
@pytest.mark.parametrize(
    ("configs", "asked"),
    [
        ((OTHER, None), "sum"),
        ((None, OTHER), "norm"),
        ((OTHER, NARROW), "sum"),
        ((OTHER, OTHER, None), "norm"),
        ((NARROW, OTHER, NARROW), "sum"),
    ],
    ids=range(5),
)
def test_ranks_that_read_different_tables_use_none(
    files: Callable[..., list[str]], configs: tuple[Any, ...], asked: str
) -> None:
    """Rank 0 says so, once; without the vote they choose differently."""
    ranks = len(configs)
    paths = files(ranks, *configs)
    found = values(run_ranks(multiplies_with_own_table, ranks, paths, asked))
    for each in found:
        assert each["right"] == [True, True]
        assert each["chosen"] == found[0]["chosen"]
        assert OTHER.group_m not in [config.group_m for config in each["chosen"]]
    (line,), *silent = [each["said"] for each in found]
    others = ", ".join(str(rank) for rank in range(1, ranks) if configs[rank] != configs[0])
    assert line.startswith(f"rank 0 reads another table of measured configurations than ranks {others}:")
    assert silent == [[]] * (ranks - 1)
    assert len({each["alone"] for each in found}) == 2

"""Bad options of every command: one line that says what was typed and what is allowed, exit status 2, no torch."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from pyrocshmem import options, target
from tests.scripts import support

TIER = 0
pytestmark = pytest.mark.cpu

COMMANDS = ("run", "reference", "bench", "tune", "doctor", "info")


@pytest.fixture
def without_torch(tmp_path: Path) -> str:
    """A PYTHONPATH on which torch and Triton can't be imported."""
    for name in ("torch", "triton"):
        support.fake_module(tmp_path / "none", name, __init__=f"raise AssertionError('{name} was imported')")
    return f"{tmp_path / 'none'}:{support.ROOT}"


def start(path: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    code = 'exec "$0" -m pyrocshmem "$@"'
    return subprocess.run(
        ["bash", "-c", code, sys.executable, *arguments],
        cwd=support.ROOT,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": path, "COLUMNS": "200"} | environment,
        capture_output=True,
        text=True,
        timeout=support.TIMEOUT_S,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("nosuch", "'nosuch'. Allowed are run, reference, bench, tune, info, doctor."),
        ("--nosuch", "there is no option --nosuch, allowed are --plain, --version, --help"),
        (
            "run --nosuch",
            "there is no option --nosuch, allowed are --num-gpus, --collective, --hosts, --shape, --dtype",
        ),
        ("run -n 0", "0 ranks asked for, allowed are 1 to 8"),
        ("run -n 99", "99 ranks asked for, allowed are 1 to 8"),
        ("run -n two", "'two'"),
        ("run -n", "'-n'"),
        ("run -c multicast", "collective is 'multicast', allowed all_gather, all_reduce, all_scatter"),
        ("run --dtype fp8", "dtype is 'fp8', allowed float16 (fp16), bfloat16 (bf16), float32 (fp32)"),
        ("run --partial-dtype int8", "partial dtype is 'int8', allowed float16"),
        ("run --shape 1,2,x", "--shape must be M,N,K or M,N, sizes of 1 or more, got '1,2,x'"),
        ("run -c gemm_rms_norm --shape 1,2", "--shape must be M,N,K, 3 sizes of 1 or more, got '1,2'"),
        ("run -c broadcast --shape 1,2,3", "--shape must be M,N, 2 sizes of 1 or more, got '1,2,3'"),
        ("run --block 64,64", "--block must be M,N,K, 3 sizes of 0 or more, got '64,64'"),
        ("run --iters 0", "iters is 0, allowed 1 or more"),
        ("run --backend tpu", "'tpu' is not one of 'auto', 'gpu', 'cpu'"),
        ("run --json nowhere/x.json", "nowhere/x.json can't be written: there is no folder nowhere"),
        ("run --json [a]/x.json", "[a]/x.json can't be written: there is no folder [a]"),
        ("run --trace nowhere/x.json", "nowhere/x.json can't be written: there is no folder nowhere"),
        ("run -c [/red]", "collective is '[/red]', allowed"),
        ("run -c all_gather --shape 0,8,8", "sizes of 1 or more, got '0,8,8'"),
        ("run --json /", "Is a directory: '/'"),
        ("run -n 2 all_reduce", "did you mean: python -m pyrocshmem run -n 2 -c all_reduce"),
        ("run -n 2 all reduce", "'all' is no option: see python -m pyrocshmem run --help"),
        ("run -c barrier all_reduce", "'all_reduce' is no option: see"),
        ("reference --nosuch", "there is no option --nosuch, allowed are --num-gpus, --collective"),
        ("reference -n 0", "0 ranks asked for, allowed are 1 to 8"),
        ("reference -n 99", "99 ranks asked for, allowed are 1 to 8"),
        ("reference -c barrier", "collective is 'barrier', allowed all_gather, all_reduce, all_scatter"),
        ("reference --shape 1", "--shape must be"),
        ("reference --dtype fp8", "dtype is 'fp8', allowed float16"),
        ("reference --iters 0", "iters is 0, allowed 1 or more"),
        ("reference all_reduce", "did you mean: python -m pyrocshmem reference -c all_reduce"),
        ("bench", "Missing command. Allowed are report, summary, scale, gemm, "),
        ("bench nosuch", "'nosuch'. Allowed are report, summary, scale, gemm, "),
        ("bench gemm -n 99", "99 ranks asked for, allowed are 1 to 8"),
        ("bench gemm --dtype fp8", "dtype is 'fp8', allowed float16"),
        ("bench gemm --iters 0", "iters is 0, allowed 1 or more"),
        ("bench gemm --json nowhere/x", "nowhere/x can't be written"),
        ("bench summary nowhere.jsonl", "nowhere.jsonl"),
        ("tune -n 99", "99 ranks asked for, allowed are 1 to 8"),
        ("tune --out nowhere/x", "nowhere/x can't be written"),
        ("tune --out x.json -n 99", "99 ranks asked for, allowed are 1 to 8"),
        ("tune --out x.json --dtype fp8", "dtype is 'fp8', allowed float16"),
        ("doctor --ranks 0", "0 ranks asked for, allowed are 1 to 8"),
        ("doctor --ranks 99", "99 ranks asked for, allowed are 1 to 8"),
        ("doctor --seconds 0", "seconds is 0, allowed more than 0"),
        ("doctor --nosuch", "there is no option --nosuch, allowed are --ranks, --seconds, --plain, --help"),
        ("info all", "(all)"),
    ],
)
def test_bad_options(without_torch: str, arguments: str, text: str) -> None:
    done = start(without_torch, *arguments.split())
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1, done.stderr
    assert text in done.stderr


@pytest.mark.parametrize("command", ["", *COMMANDS, "bench gemm", "bench report"])
def test_help(without_torch: str, command: str) -> None:
    done = start(without_torch, *command.split(), "-h")
    if not command:
        assert start(without_torch, "--help").stdout == done.stdout
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Usage: ")
    assert "-h, --help" in done.stdout
    if not command:
        assert all(f"\n  {name} " in done.stdout for name in COMMANDS)


def test_an_answer_takes_less_than_a_second_of_a_core(without_torch: str) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert start(without_torch, "run", "-n", "99").returncode == 2
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1


def test_a_script_is_named_as_it_was_called(without_torch: str) -> None:
    done = start(without_torch, "run", "-n", "2", "--seed", "all_reduce", PYROCSHMEM_SCRIPT="./run.sh")
    assert "got 'all_reduce'" in done.stderr
    done = start(without_torch, "run", "-n", "2", "all_reduce", "--seed", "1", PYROCSHMEM_SCRIPT="./run.sh")
    assert done.stderr.endswith("did you mean: ./run.sh -n 2 -c all_reduce --seed 1\n")


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("./run.sh -n 2 all_reduce", "did you mean: ./run.sh -n 2 -c all_reduce\n"),
        ("./run.sh -n 99", "99 ranks asked for, allowed are 1 to 8\n"),
        ("reference/run.sh all_reduce", "did you mean: reference/run.sh -c all_reduce\n"),
        ("reference/run.sh -n 99", "99 ranks asked for, allowed are 1 to 8\n"),
    ],
)
def test_scripts(without_torch: str, command: str, text: str) -> None:
    done = support.bash(support.ROOT, command, PYROCSHMEM_NO_VENV="1", PYTHONPATH=without_torch)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith(text)


def test_version(without_torch: str) -> None:
    done = start(without_torch, "--version")
    line = next(
        line for line in (support.ROOT / "pyproject.toml").read_text().splitlines() if "version =" in line
    )
    assert done.stdout == f"pyrocshmem {line.split(chr(34))[1]}\n"


def test_programs_import_the_target_at_once(without_torch: str) -> None:
    """Whatever their arguments: Triton may be the next that they import."""
    for program in (["-c", "import pyrocshmem", "-m", "pyrocshmem"], ["-m", "pyrocshmem.run_command"]):
        done = subprocess.run(
            [sys.executable, *program],
            env={"PYTHONPATH": without_torch},
            capture_output=True,
            text=True,
            timeout=support.TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 1
        assert "torch was imported" in done.stderr


def test_a_program_called_pyrocshmem_imports_the_target_at_once(without_torch: str, tmp_path: Path) -> None:
    """Only the script beside this Python is ours."""
    (tmp_path / "pyrocshmem").write_text("import pyrocshmem\n")
    done = subprocess.run(
        [sys.executable, str(tmp_path / "pyrocshmem")],
        env={"PYTHONPATH": without_torch},
        capture_output=True,
        text=True,
        timeout=support.TIMEOUT_S,
        check=False,
    )
    assert "torch was imported" in done.stderr


@pytest.mark.parametrize(
    ("short", "name"), [("fp16", "float16"), ("bf16", "bfloat16"), ("fp32", "float32"), (None, None)]
)
def test_short_names_of_types(short: str | None, name: str | None) -> None:
    assert options.check_dtype(short) == options.check_dtype(name) == name


def test_collectives_of_a_help_text() -> None:
    usage = "Options:\n  -c, --c NAME   of\n\nCollectives, of C = A x B:\n  one   Of\n  two_of\n      more text\n\n"
    usage += "Collectives alone:\n  two_of, three\n       With\n\nExample:\n  run it\n"
    assert options.collectives(usage) == {"one": ("MNK",), "two_of": ("MNK", "MN"), "three": ("MN",)}


def test_more_ranks_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "backend", lambda: "cuda")
    monkeypatch.setattr(target, "num_devices", lambda: 2)
    options.check_gpus(2)
    with pytest.raises(ValueError, match=r"^3 GPUs asked for, this machine has 2$"):
        options.check_gpus(3)
    monkeypatch.setattr(target, "backend", lambda: "host")
    options.check_gpus(3)

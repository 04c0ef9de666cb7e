"""Which target is chosen, and what happens to Triton's environment."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pyrocshmem import target

TIER = 1
pytestmark = pytest.mark.cpu

ROOT = Path(__file__).resolve().parents[2]
ROCM = "PYROCSHMEM_BACKEND='rocm', allowed are auto, gpu, cpu"


@pytest.mark.parametrize(
    ("asked", "interpret", "gpus", "on_cpu", "why"),
    [
        (None, None, 0, True, "sees no GPU"),
        (None, None, 2, False, "2 GPUs found"),
        ("auto", "1", 2, True, "TRITON_INTERPRET=1"),
        ("auto", "1", 0, True, "sees no GPU"),
        ("cpu", None, 2, True, "PYROCSHMEM_BACKEND=cpu"),
        ("gpu", None, 2, False, "PYROCSHMEM_BACKEND=gpu"),
        ("auto", "0", 0, True, "sees no GPU"),
    ],
)
def test_choice(monkeypatch, asked, interpret, gpus, on_cpu, why):
    choose(monkeypatch, asked, interpret, gpus)
    chosen, reason = target._choose()
    assert chosen is on_cpu
    assert why in reason


@pytest.mark.parametrize(
    ("asked", "interpret", "gpus", "kind", "words"),
    [
        ("rocm", None, 0, ValueError, "'rocm', allowed are auto, gpu, cpu"),
        ("gpu", None, 0, RuntimeError, "sees no GPU here"),
        ("gpu", "1", 2, RuntimeError, "contradicts TRITON_INTERPRET=1"),
    ],
)
def test_bad_choice(monkeypatch, asked, interpret, gpus, kind, words):
    choose(monkeypatch, asked, interpret, gpus)
    with pytest.raises(kind, match=words):
        target._choose()


@pytest.mark.parametrize(
    ("command", "asked", "text"),
    [
        (("-m", "pyrocshmem", "run", "-n", "1"), "gpu", "PYROCSHMEM_BACKEND=gpu, but torch"),
        (("-m", "pyrocshmem", "run", "--backend", "gpu"), "cpu", "PYROCSHMEM_BACKEND=gpu, but torch"),
        (("-m", "pyrocshmem", "doctor"), "rocm", ROCM),
        (("-m", "pyrocshmem"), "rocm", ROCM),
        (("-m", "pyrocshmem.stream_k.local_gemm.schedule_plot"), "rocm", ROCM),
        (("-m", "pyrocshmem", "run", "-n", "2"), "rocm", ROCM),
        (("-m", "pyrocshmem.reference", "-n", "2"), "rocm", ROCM),
        (("-m", "pyrocshmem.reference", "--backend", "gpu"), "cpu", "--backend gpu, but this process runs"),
        (("-m", "pyrocshmem.benchmarks", "gemm"), "gpu", "PYROCSHMEM_BACKEND=gpu, but torch"),
        (("-m", "pyrocshmem.benchmarks", "report"), "rocm", ROCM),
        (("examples/rms/threads.py",), "rocm", ROCM),
        (("examples/training/tensor_parallel.py", "--steps", "1"), "rocm", ROCM),
    ],
)
def test_a_command_answers_a_bad_choice_in_one_line(command, asked, text):
    done = run(*command, PYROCSHMEM_BACKEND=asked, CUDA_VISIBLE_DEVICES="", HIP_VISIBLE_DEVICES="")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {text}")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["torch_ops", "collectives", "Heap", "launch"])
def test_whatever_a_command_asks_for_first_comes_behind_the_target(name):
    """What imports Triton would settle by itself whether kernels are interpreted."""
    code = f"""
import sys
sys.orig_argv, sys.argv = ["python", "-m", "pyrocshmem"], ["-m"]
import pyrocshmem
assert "torch" not in sys.modules
print(pyrocshmem.{name} is not None, pyrocshmem.target.interpreted())
"""
    done = run("-c", code, PYROCSHMEM_BACKEND="cpu", TRITON_INTERPRET="")
    assert (done.returncode, done.stdout, done.stderr) == (0, "True True\n", "")


def test_an_import_raises_for_a_bad_choice():
    code = "try:\n    from pyrocshmem import stream_k\nexcept ValueError as error:\n    print(error)"
    done = run("-c", code, PYROCSHMEM_BACKEND="rocm")
    assert (done.returncode, done.stdout) == (0, ROCM + "\n")


def test_a_program_that_is_called_like_a_command_gets_the_exception(tmp_path):
    code = "try:\n    from pyrocshmem import stream_k\nexcept ValueError as error:\n    print(error)"
    script = tmp_path / "benchmarks" / "__main__.py"
    # Of the other the package imports this project, and the command's name is its argument.
    package = tmp_path / "theirs" / "__init__.py"
    for path in (script, package):
        path.parent.mkdir()
        path.write_text(code)
    (package.parent / "__main__.py").write_text("")
    for command in ([str(script)], ["-m", "theirs", "benchmarks"]):
        done = run(*command, PYROCSHMEM_BACKEND="rocm", PYTHONPATH=f"{ROOT}:{tmp_path}")
        assert (done.returncode, done.stdout) == (0, ROCM + "\n"), done.stderr


def choose(monkeypatch, asked, interpret, gpus):
    monkeypatch.setattr(target, "_num_gpus", lambda: gpus)
    for name, value in (("PYROCSHMEM_BACKEND", asked), ("TRITON_INTERPRET", interpret)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)


def python(code: str, **environment: str) -> subprocess.CompletedProcess:
    return run("-c", code, **environment)


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    inherited = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "PYROCSHMEM_BACKEND")}
    inherited.pop("TRITON_DEFAULT_FP_FUSION", None)
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=inherited | {"PYROCSHMEM_BACKEND": "cpu", "PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )


def test_triton_imported_first_is_refused():
    done = python("import triton; import pyrocshmem")
    assert done.returncode == 1
    assert "Import pyrocshmem first, or set TRITON_INTERPRET=1" in done.stderr


def test_cross_compiling_without_a_gpu_is_respected():
    code = (
        "import pyrocshmem, os; from pyrocshmem import target; import triton.language as tl;"
        "print(target.interpreted(), target.backend(), target.device(), os.environ['TRITON_INTERPRET'],"
        " os.environ['TRITON_DEFAULT_FP_FUSION'], type(tl.cdiv).__name__)"
    )
    done = python(code, TRITON_INTERPRET="0")
    assert done.stdout.split() == ["False", "host", "cpu", "0", "1", "JITFunction"], done.stderr
    done = python(code, TRITON_DEFAULT_FP_FUSION="0")
    assert done.stdout.split() == ["True", "host", "cpu", "1", "0", "InterpretedFunction"], done.stderr


@pytest.mark.parametrize(
    ("triton", "numpy", "works"),
    [
        ("3.6.0", "2.3.5", True),
        ("3.6.0+git1234", "2.4.0", False),
        ("3.6.0", "3.0.0rc1", False),
        ("3.7.0", "2.4.1", True),
        ("3.10.0", "2.10.0", True),
    ],
)
def test_interpreter_and_numpy(triton, numpy, works):
    if works:
        target._check_interpreter(triton, numpy)
        return
    with pytest.raises(RuntimeError, match=f"the interpreter of Triton .* does not work with NumPy {numpy}"):
        target._check_interpreter(triton, numpy)


@pytest.mark.parametrize(("interpret", "refused"), [("1", True), ("0", False)])
def test_an_interpreter_that_fails_is_refused_when_it_is_needed(interpret, refused):
    code = (
        "import numpy, runpy, sys, types; numpy.__version__ = '9.9';"
        "sys.modules['triton'] = module = types.ModuleType('triton'); module.__version__ = '3.6.0';"
        f"runpy.run_path({target.__file__!r})"
    )
    done = python(code, TRITON_INTERPRET=interpret)
    assert (done.returncode, "does not work with NumPy 9.9" in done.stderr) == (int(refused), refused), (
        done.stderr
    )


def test_no_gpu_for_a_rank(monkeypatch):
    monkeypatch.setattr(target, "_on_cpu", False)
    monkeypatch.setattr(target, "_num_gpus", lambda: 2)
    assert str(target.device(1)) == "cuda:1"
    with pytest.raises(ValueError, match="local rank 2 has no GPU of its own: this machine has 2"):
        target.device(2)

"""Where kernels run: on a GPU, or on the CPU through Triton's interpreter. Decided once, when first imported.

Import it (importing `pyrocshmem` does) before Triton: `TRITON_INTERPRET` is read when Triton is imported.

- `PYROCSHMEM_BACKEND=auto` (the default): a GPU when there is one, otherwise the CPU.
- `PYROCSHMEM_BACKEND=cpu`: the CPU, GPUs or not.
- `PYROCSHMEM_BACKEND=gpu`: a GPU, `RuntimeError` without one.
- What is wrong with these is an exception for programs; commands and examples print it as a line and exit with 2.
- `TRITON_INTERPRET=0` set by the caller on a machine with no GPU is kept: kernels are then compiled, not run.
"""

import os
import sys
from functools import cache

import torch

from pyrocshmem.entry import is_command
from pyrocshmem.versions import version_of

BACKENDS = ("auto", "gpu", "cpu")


def _choose() -> tuple[bool, str]:
    """(whether the CPU target is used, why)."""
    asked = os.environ.get("PYROCSHMEM_BACKEND", "auto")
    if asked not in BACKENDS:
        raise ValueError(f"PYROCSHMEM_BACKEND={asked!r}, allowed are {', '.join(BACKENDS)}")
    interpret = os.environ.get("TRITON_INTERPRET", "")
    if asked == "cpu":
        return True, "PYROCSHMEM_BACKEND=cpu"
    if asked == "gpu":
        if interpret == "1":
            raise RuntimeError("PYROCSHMEM_BACKEND=gpu contradicts TRITON_INTERPRET=1; unset one of them")
        if not _num_gpus():
            raise RuntimeError(f"PYROCSHMEM_BACKEND=gpu, but torch {torch.__version__} sees no GPU here")
        return False, "PYROCSHMEM_BACKEND=gpu"
    if not _num_gpus():
        # Before the variable, which processes may have inherited from one that came here.
        return True, f"torch {torch.__version__} sees no GPU"
    if interpret == "1":
        return True, "TRITON_INTERPRET=1"
    return False, f"{_num_gpus()} GPUs found"


def _num_gpus() -> int:
    return torch.cuda.device_count()


def _check_interpreter(triton: str, numpy: str) -> None:
    """Raise RuntimeError for a Triton whose interpreter fails with this NumPy, in every loop over a bound known at run
    time."""
    if version_of(triton) < (3, 7) and version_of(numpy) >= (2, 4):
        raise RuntimeError(
            f'the interpreter of Triton {triton} does not work with NumPy {numpy} ("only 0-dimensional arrays can be '
            'converted to Python scalars"): kernels can\'t run on this CPU target. Install "numpy<2.4" or Triton 3.7'
        )


def check_interpreter() -> None:
    """RuntimeError where this environment's Triton can't interpret kernels."""
    # Not before it is settled that kernels are interpreted.
    import numpy
    import triton

    _check_interpreter(triton.__version__, numpy.__version__)


def _apply(on_cpu: bool) -> None:
    # The default of this setting changes in Triton 3.10: results must not.
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    interpret = os.environ.get("TRITON_INTERPRET")
    if not on_cpu or interpret == "0":
        return
    if interpret != "1":
        if "triton" in sys.modules:
            raise RuntimeError(
                "Triton was imported before pyrocshmem, without TRITON_INTERPRET=1: its kernels can't run on "
                "this CPU target. Import pyrocshmem first, or set TRITON_INTERPRET=1 in the environment"
            )
        os.environ["TRITON_INTERPRET"] = "1"
    check_interpreter()


def _settle() -> tuple[bool, str]:
    try:
        chosen = _choose()
        _apply(chosen[0])
    except (RuntimeError, ValueError) as error:
        # Commands import this before their own code, which prints mistakes, can run.
        if is_command():
            print(f"error: {error}", file=sys.stderr)
            sys.exit(2)
        raise
    return chosen


_on_cpu, _reason = _settle()


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter. False where they are compiled, even if only to be read."""
    return _on_cpu and os.environ.get("TRITON_INTERPRET") == "1"


def backend() -> str:
    """The backend of `finegrained_alloc` for this target: "host", "cuda" or "hip"."""
    if _on_cpu:
        return "host"
    return "hip" if torch.version.hip else "cuda"


def num_devices() -> int:
    """GPUs that ranks of this target can use; 0 on the CPU target."""
    return 0 if _on_cpu else _num_gpus()


def device_type() -> str:
    """Of the devices of this target, as `torch.device` names it."""
    return "cpu" if _on_cpu else "cuda"


def device(local_rank: int = 0) -> torch.device:
    """The device of a rank of this machine. `ValueError` when there are fewer GPUs than that."""
    if _on_cpu:
        return torch.device("cpu")
    if not 0 <= local_rank < _num_gpus():
        raise ValueError(f"local rank {local_rank} has no GPU of its own: this machine has {_num_gpus()}")
    return torch.device("cuda", local_rank)


def describe() -> str:
    """Where kernels run and why, in one line."""
    if interpreted():
        return f"CPU (Triton interpreter), because {_reason}"
    if _on_cpu:
        return f"CPU, kernels compiled but not run (TRITON_INTERPRET=0), because {_reason}"
    name = torch.cuda.get_device_name(0)
    return f"{_num_gpus()} x {name} ({backend()}), because {_reason}"


# SMs that the CPU target pretends to have: enough for several waves, few enough to follow by eye.
CPU_PROGRAMS = 6


@cache
def num_sms(device: torch.device) -> int:
    """SMs of `device` (AMD: compute units); CPU_PROGRAMS on the CPU target."""
    if device.type == "cpu":
        return CPU_PROGRAMS
    return torch.cuda.get_device_properties(device).multi_processor_count

"""GPUs that need not be here: Triton compiles for them, loads nothing, runs nothing.

    with pretend("gfx942"):
        stream_k.gemm(a, b)          # plans and compiles; the launch does nothing

Each target has a device number of its own, because a jit function keeps what it compiled by device number: with one
number for all, the code of the first target would be handed to the others. `tests/compile/test_harness.py` checks that.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import triton
from triton.backends.compiler import GPUTarget

from pyrocshmem import target as own_target
from pyrocshmem.calls import remembered
from pyrocshmem.testing.compiled import resources


@dataclass(frozen=True)
class Target:
    """A GPU: Triton's name of it, the device number it has here, bytes of shared memory (LDS) of a program."""

    name: str
    triton: GPUTarget
    device: int
    num_sms: int
    shared_bytes: int

    @property
    def nvidia(self) -> bool:
        return self.triton.backend == "cuda"


_TARGETS = {
    "sm_90": Target("sm_90", GPUTarget("cuda", 90, 32), 0, 132, 232_448),
    "gfx942": Target("gfx942", GPUTarget("hip", "gfx942", 64), 1, 304, 65_536),
    "gfx950": Target("gfx950", GPUTarget("hip", "gfx950", 64), 2, 256, 163_840),
}
TARGETS = tuple(_TARGETS)


class _Utilities:
    """What Triton asks a driver when it loads machine code; nothing is loaded."""

    def __init__(self, target: Target) -> None:
        self._target = target

    def get_device_properties(self, device: int) -> dict[str, int]:
        # Triton refuses a kernel that needs more shared memory than this, as it would on the real device.
        return {"max_shared_mem": self._target.shared_bytes}

    def load_binary(
        self, name: str, kernel: bytes, shared: int, device: int
    ) -> tuple[int, int, int, int, int]:
        used = resources(kernel) if self._target.nvidia else (0, 0)
        return 1, 0, *used, 1024

    def unload_module(self, module: int) -> None:
        pass


class _Driver:
    def __init__(self, target: Target) -> None:
        self._target = target
        self.utils = _Utilities(target)

    def get_current_target(self) -> GPUTarget:
        return self._target.triton

    def get_current_device(self) -> int:
        return self._target.device

    def get_current_stream(self, device: int) -> int:
        return 0

    def map_python_to_cpp_type(self, name: str) -> str:
        return name

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        return lambda *args: None


@contextmanager
def pretend(name: str) -> Iterator[Target]:
    """Inside, this process seems to have GPUs of the target `name`, as many multiprocessors, and that backend; what is
    launched is compiled, and doesn't run.

    The driver stays when the block ends, as kernels that are dropped later unload through it. Raises ValueError for a
    target that is none of TARGETS, RuntimeError in a process that runs kernels.
    """
    if name not in _TARGETS:
        raise ValueError(f"target is {name!r}, allowed are {', '.join(TARGETS)}")
    if own_target.interpreted() or own_target.backend() != "host":
        raise RuntimeError(
            f"this process runs kernels ({own_target.describe()}), so it can't compile them for {name}: start one with "
            "TRITON_INTERPRET=0 and PYROCSHMEM_BACKEND=cpu in its environment"
        )
    from pyrocshmem.stream_k.local_gemm import blas, plan

    target = _TARGETS[name]
    triton.runtime.driver.set_active(_Driver(target))
    backend = "cuda" if target.nvidia else "hip"
    with (
        mock.patch.object(own_target, "backend", return_value=backend),
        mock.patch.object(own_target, "CPU_PROGRAMS", target.num_sms),
        # Operands lie on the CPU here, whatever the target.
        mock.patch.object(plan, "check_device"),
        mock.patch.object(blas, "_multiply"),
    ):
        _forget()
        try:
            yield target
        finally:
            _forget()


def _forget() -> None:
    """What is remembered was chosen, and launches are compiled, for one kind of GPU."""
    from pyrocshmem.stream_k.choice import table

    for choice in (own_target.num_sms, table.choice):
        choice.cache_clear()
    remembered.forget()

"""A kernel launch that is prepared once and repeated: no argument binding, no compilation on the way.

    launch = Launch(kernel, grid, constants, num_warps=8, num_stages=4)
    launch.compile(args)          # compiles and loads; nothing runs
    launch(args)                  # repeated; `args` may hold other tensors of the same kind

On the CPU target a launch runs in Triton's interpreter, where kernels of several threads take turns.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Hashable, Iterable
from functools import cache
from itertools import repeat
from typing import Any

import torch
import triton
from triton.runtime.errors import OutOfResources
from triton.tools.tensor_descriptor import TensorDescriptor

from pyrocshmem import interpreter, target, trace
from pyrocshmem.calls import planning

# Ranks that are threads would compile the same kernel at once, each for its GPU; compilers have options of the process.
_compiler = threading.Lock()

_ALIGNED, _INT32, _INT64, _TWO_GIB = 16, 1 << 31, 1 << 63, 1 << 31
_ALL = repeat(True)

# Triton's compiled kernels, by what they were compiled for. Its own look-up takes the host three times as long, and a
# call of another number of rows asks for those of an earlier one.
_known: dict[Hashable, Any] = {}


def _current_device() -> int:
    return int(triton.runtime.driver.active.get_current_device())


def kinds(args: tuple[Any, ...], specialized: Iterable[bool] = _ALL) -> Hashable:
    """All of `args` that Triton compiles a kernel for, and maybe more. specialized: whether the value of each counts,
    if it is an integer. A call of new rows asks for each launch, so this is written for speed."""
    found: list[Any] = []
    for arg, by_value in zip(args, specialized, strict=False):
        which = type(arg)
        if which is int:
            bits = 32 if -_INT32 <= arg < _INT32 else 64 if arg < _INT64 else 65
            found.append((bits, arg == 1, arg % _ALIGNED == 0) if by_value else bits)
        elif which is TensorDescriptor:
            found.append((arg.base.dtype, *arg.block_shape, arg.padding))
        elif which is torch.Tensor or isinstance(arg, torch.Tensor):
            small = arg.untyped_storage().nbytes() < _TWO_GIB
            found.append((arg.dtype, arg.data_ptr() % _ALIGNED == 0, small))
        else:
            found.append((which, kinds(arg)) if isinstance(arg, tuple) else which)
    return tuple(found)


# Of a multiprocessor of sm_90: registers, bytes of shared memory, and those of them that each program costs.
_REGISTERS, _SHARED, _RESERVED = 1 << 16, 228 << 10, 1 << 10
# CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, and per cent.
_CARVEOUT, _ALL_OF_IT = 9, 100


def rooms_beside(kernel: Any, small: Any) -> int:
    """How many programs of `small`, which waits, a multiprocessor has room for beside one of `kernel`: both as
    `Launch.compile` gives them."""
    (registers, shared), (few, little) = map(_takes, (kernel, small))
    return min((_REGISTERS - registers) // few, (_SHARED - shared) // little)


def _takes(kernel: Any) -> tuple[int, int]:
    """(registers, bytes of shared memory) of a program."""
    threads, of_thread = 32 * kernel.metadata.num_warps, -(-kernel.n_regs // 8) * 8
    return threads * of_thread, kernel.metadata.shared + _RESERVED


@cache
def _leave_shared_memory(function: int) -> None:
    """A multiprocessor divides shared memory from L1 when it is idle, for the kernel that comes first: without this a
    program of a large GEMM can't begin before a small one that is there has left (docs/log.md). function: the driver's
    handle; 0: nothing is loaded, where code is only compiled for a GPU."""
    if not function:
        return
    driver = ctypes.CDLL("libcuda.so.1")
    code = driver.cuFuncSetAttribute(ctypes.c_void_p(function), _CARVEOUT, _ALL_OF_IT)
    if code:
        raise RuntimeError(f"cuFuncSetAttribute: error {code} of the CUDA driver")


@cache
def _specialized(kernel: Any) -> tuple[bool, ...]:
    """Of which arguments of a kernel the value counts, if it is an integer."""
    return tuple(not parameter.do_not_specialize for parameter in kernel.params)


class Launch:
    """One kernel with its grid and its constants; only the run-time arguments change from call to call.

    Every pointer must keep its alignment (divisible by 16 or not) and every integer its value from `compile`
    on: that is what Triton specializes the code for, and nobody checks it again.
    Compiled while a timeline is recorded it marks its stages, and runs only where one is: the kernel's last
    run-time argument is `events` (`pyrocshmem.trace`), which comes from the recorder. A kernel may have none.
    chained: the kernel may start before the one before it ends, and has a `chain.wait_for_previous`; false where the
    target has no such launches. max_registers: of a thread, NVIDIA, for what is to run beside the kernel; 0: any. It
    gets more only where it would spill with as few. waits: it may wait on a multiprocessor for a GEMM that begins there
    after it, and leaves that all shared memory.
    """

    def __init__(
        self,
        kernel: Any,
        grid: int,
        constants: dict[str, Any],
        num_warps: int,
        num_stages: int,
        chained: bool = False,
        max_registers: int = 0,
        waits: bool = False,
    ) -> None:
        self.kernel = kernel
        self.grid = (grid, 1, 1)
        self.constants = constants
        self.options: dict[str, Any] = {"num_warps": num_warps, "num_stages": num_stages}
        on_nvidia = target.backend() == "cuda" and not target.interpreted()
        self.chained = chained and on_nvidia
        self.max_registers = max_registers if on_nvidia else 0
        self.waits = waits and on_nvidia
        if self.chained:
            self.options["launch_pdl"] = True
        self._values = tuple(constants.values())
        self._marks = "events" in kernel.arg_names
        self._run: Any = None
        self._compiled: Any = None
        self._recorded = False

    def compile(self, args: tuple[Any, ...]) -> Any:
        """Compile for `args` and load the machine code, before any kernel of the op can wait: loading a
        module while a kernel of the same device spins would wait for that kernel. Returns Triton's compiled
        kernel; None in the interpreter. ValueError where the kernel needs more of the device than it has."""
        recorder = trace.recorder()
        self._recorded = recorder is not None and self._marks
        if target.interpreted() or planning.here.mode == "sizes":
            return None
        arguments = (*args, *self._events(None if recorder is None else recorder.sample))
        if planning.here.mode == "collect":
            planning.collect(self._compiled_for(arguments), self, args)
            return None
        try:
            with _compiler:
                compiled, self._run = self._loaded(arguments)
                if 0 < self.max_registers < compiled.n_regs:
                    # Not at once: under a limit the assembler takes more registers than without, and spills.
                    fewer, run = self._loaded(arguments, maxnreg=self.max_registers)
                    if fewer.n_spills <= compiled.n_spills:
                        compiled, self._run = fewer, run
        except OutOfResources as error:
            unit = "" if error.name == "threads" else "bytes of "
            raise ValueError(
                f"{self.kernel.__name__} needs {error.required} {unit}{error.name} a program, the device has "
                f"{error.limit}; smaller blocks and a smaller Config.num_stages need less"
            ) from None
        return compiled

    def compile_once(self, arguments: Callable[[], tuple[Any, ...]]) -> Any:
        """What the first `compile` gave, of a launch that plans share. arguments: makes them."""
        if self._compiled is None:
            self._compiled = self.compile(arguments())
        return self._compiled

    def compile_again(self) -> None:
        """At the next `compile_once`, whose arguments may be of other kinds."""
        self._compiled = None

    def ask_for(self, args: tuple[Any, ...]) -> None:
        """Begin to compile for `args`: in Triton's AsyncCompileMode, which the caller has entered."""
        arguments = (*args, *self._events(None))
        self.kernel.warmup(*arguments, grid=self.grid, **self.constants, **self.options)

    def _loaded(self, arguments: tuple[Any, ...], **options: int) -> tuple[Any, Any]:
        """(Triton's compiled kernel, what launches it)."""
        key = self._compiled_for(arguments, **options)
        compiled = _known.get(key)
        if compiled is None:
            kernel = self.kernel
            compiled = kernel.warmup(*arguments, grid=self.grid, **self.constants, **self.options, **options)
            _known[key] = compiled
        run = compiled[self.grid]
        if self.waits:
            _leave_shared_memory(compiled.function)
        return compiled, run

    def _compiled_for(self, arguments: tuple[Any, ...], **options: int) -> Hashable:
        """All that the machine code depends on."""
        what = (_current_device(), *self._values, *self.options.values(), *options.items())
        return self.kernel, what, kinds(arguments, _specialized(self.kernel))

    def _events(self, buffer: Any) -> tuple[Any, ...]:
        return (buffer,) if self._marks else ()

    def __call__(self, args: tuple[Any, ...]) -> None:
        events = self._events(trace.recorder().events(self) if self._recorded else None)  # type: ignore[union-attr]
        if self._run is not None:
            self._run(*args, *events, *self._values)
            return
        with interpreter.taken():
            self.kernel[self.grid](*args, *events, **self.constants, **self.options)

"""Kernels of several threads in Triton's interpreter, whose state (which program runs, what `triton.language`
does) belongs to the process: threads take turns, and a kernel that waits for another's passes its turn on.

    with turns.taken():              # around a launch on the CPU target
        kernel[grid](...)
    turns.pass_on(seconds)           # inside a kernel, between two polls of a wait

One thread at a time executes programs. Ranks that are threads can't deadlock here: a wait polls, and each poll
passes the turn on; a thread that is outside of kernels needs none. A kernel that is resumed finds the numbers of
its program as they were.

The interpreter replaces functions of `triton.language` when a kernel starts and again in every call of a jit
function, which takes half of its time, and puts them back when a kernel ends, under the others that run. Here they
are replaced once, by the first kernel, for as long as any kernel runs; and what takes which place is looked for once
a process, since to look through the modules takes milliseconds, as long as a small kernel.

All this is by private names of Triton's, so it is done for the versions of `versions.window` alone, and only where the
names are there. Another Triton's interpreter runs unchanged, which rank 0 says in one line: kernels take longer, what
is rounded to bf16 is cut off, 8-bit subnormal numbers and NaNs are misread, and a kernel that waits keeps its turn, so
ranks can't be threads.
"""

import contextlib
import dataclasses
import functools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import triton
import triton.language as tl
from triton.language import core, semantic
from triton.runtime import interpreter

from pyrocshmem import versions

# What is replaced below, or needed to do so.
_NAMES = (
    (interpreter, "_LangPatchScope _patch_lang _get_np_dtype _convert_float _ir interpreter_builder"),
    (interpreter, "interpreter_semantic"),
    (interpreter, "InterpreterBuilder TensorHandle"),
    (core, "_unwrap_if_constexpr block_type tensor"),
    (
        semantic.TritonSemantic,
        "binary_op_type_checking_impl broadcast_impl_value cast computation_type_impl",
    ),
)

# Of a kernel's source, that are remembered as blocks.
_MOST_NUMBERS = 512

_turn = threading.Lock()
_owner: int | None = None  # the thread whose turn it is
_running = 0  # kernels that have begun and not ended
_restore = contextlib.ExitStack()


def _take() -> None:
    global _owner
    _turn.acquire()
    _owner = threading.get_ident()


def _give() -> None:
    global _owner
    _owner = None
    _turn.release()


class _Nothing:
    """What a jit function inside a kernel has replaced."""

    def restore(self) -> None:
        pass


def _languages() -> tuple[Any, Any]:
    """Both modules whose functions are replaced: the interpreter looks for them among a function's globals."""
    return tl, core


@functools.cache
def _unknown() -> str:
    """Why this Triton's interpreter is left as it is; "" where its names are known."""
    version, known = triton.__version__, versions.window("triton")
    if version not in known:
        return f"Triton {version} is not one of {known}"
    lacking = [name for place, names in _NAMES for name in names.split() if not hasattr(place, name)]
    return f"Triton {version} lacks {', '.join(lacking)}" if lacking else ""


@functools.cache
def _say_unknown() -> None:
    """Once, of all ranks."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(
            f"pyrocshmem: {_unknown()}, so its interpreter runs unchanged: slowly, bf16 is cut off, not rounded, and "
            "8-bit subnormal numbers and NaNs are misread",
            file=sys.stderr,
        )


def check_threads() -> None:
    """RuntimeError where ranks can't be threads: a kernel that waits could not let another thread's run."""
    if _unknown():
        raise RuntimeError(
            f"{_unknown()}, so its interpreter runs unchanged, which ranks that are threads can't share: make them "
            "processes (pyrocshmem.spawn), or install a supported version"
        )


def check_rows() -> None:
    """RuntimeError where the bits of a row of a product depend on where it is."""
    if _unknown():
        raise RuntimeError(
            f"{_unknown()}, so its interpreter runs unchanged, and a row's bits depend on its batch there: install a "
            "supported version"
        )


def _direct(replacement: Any) -> Any:
    """A replacement without two steps on the way to the function of `triton.language` that it calls, if it calls one:
    keywords are copied without a certain one, and a wrapper of the function sees that it is there again."""
    member = (getattr(replacement, "__kwdefaults__", None) or {}).get("member")
    if member is None:
        return replacement
    function, meaning = getattr(member, "__wrapped__", member), interpreter.interpreter_semantic

    def direct(*args: Any, **options: Any) -> Any:
        options["_semantic"] = meaning
        return function(*args, **options)

    return direct


@functools.cache
def _replacements(patch_lang: Callable[[Any], Any]) -> list[tuple[Any, str, Any]]:
    """(module or class, name, what kernels need there), in the order in which the interpreter replaces."""
    scope = patch_lang(_languages)
    found = [(place, name, _direct(getattr(place, name))) for place, name, _ in scope._changes]
    scope.restore()
    return found


@functools.cache
def _remembering(numpy_type: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`interpreter._get_np_dtype`, which makes a table of all types in each of its many calls, with what it said."""
    known: dict[str, Any] = {}

    def remembered(triton_type: Any) -> Any:
        # Types that compare by their parts have no hash; names have the parts in them.
        if triton_type.name not in known:
            known[triton_type.name] = numpy_type(triton_type)
        return known[triton_type.name]

    return remembered


@functools.cache
def _float8_numbers() -> dict[Any, Any]:
    """What each byte stands for, fp32, by type: of those that the CPU target takes."""
    every_byte = torch.arange(256).to(torch.uint8)
    kinds = (tl.float8e4nv, torch.float8_e4m3fn), (tl.float8e5, torch.float8_e5m2)
    return {kind: every_byte.view(dtype).float().numpy() for kind, dtype in kinds}


@functools.cache
def _converting(convert_float: Callable[..., Any]) -> Callable[..., Any]:
    """`interpreter._convert_float`, which widens subnormal numbers of bf16 and e5m2 to zeros, and a NaN of e4m3 to 480,
    and rounds to bf16 by cutting off bits, garbling subnormal numbers."""

    to_nearest = interpreter._ir.ROUNDING_MODE.RTNE

    def converted(values: Any, given: Any, wanted: Any, rounding: Any) -> Any:
        if given in _float8_numbers() and wanted in (tl.float16, tl.float32):
            return _float8_numbers()[given][values].astype(np.float32 if wanted == tl.float32 else np.float16)
        if (given, wanted) == (tl.bfloat16, tl.float32):
            # The upper half of an fp32.
            return np.asarray(values.astype(np.uint32) << 16)
        if (given, wanted) == (tl.float32, tl.bfloat16) and rounding in (None, to_nearest):
            bits = values.view(np.uint32)
            upper = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16  # ties to even
            return np.asarray(np.where(np.isnan(values), bits >> 16 | 0x40, upper).astype(np.uint16))
        return convert_float(values, given, wanted, rounding)

    return converted


def _dot_by_rows() -> Callable[..., Any]:
    """`InterpreterBuilder.create_dot`, whose product of blocks adds along K in an order that depends on where a row is
    in its block, and on how blocks lie in memory. Row by row it takes twice the time, of a thirtieth of a kernel's."""
    create_dot = interpreter.InterpreterBuilder.create_dot

    def by_rows(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        a, b = (
            self.create_fp_to_fp(x, tl.float32, None) if x.dtype in _float8_numbers() else x for x in (a, b)
        )
        if a.data.ndim != 2 or a.data.dtype.kind != "f":
            return create_dot(self, a, b, d, *options)
        rows, columns = (np.ascontiguousarray(x.data, dtype=d.data.dtype) for x in (a, b))
        products = np.matmul(rows[:, None], columns)[:, 0]
        return interpreter.TensorHandle(products + d.data, d.dtype.scalar)

    return by_rows


def _remembered_blocks() -> Callable[..., None]:
    """`core.block_type.__init__`, which checks each shape and writes a name for it. Types of one shape share it."""
    initialize = core.block_type.__init__
    known: dict[tuple[str, object], tuple[Any, int, str]] = {}
    shapes: dict[tuple[int, ...], Any] = {}

    def remembered(self: Any, element_type: Any, shape: Any) -> None:
        # By its identity, which is that of no other: a shape that types share is kept.
        found = known.get((element_type.name, id(shape)))
        if found is None:
            sizes = tuple(core._unwrap_if_constexpr(size) for size in shape)
            key = element_type.name, sizes
            if key not in known:
                initialize(self, element_type, shape)
                shared = shapes.setdefault(sizes, self.shape)
                known[key] = known[element_type.name, id(shared)] = shared, self.numel, self.name
            found = known[key]
        self.element_ty = element_type
        self.shape, self.numel, self.name = found

    return remembered


def _quick_broadcast() -> Callable[..., Any]:
    """`TritonSemantic.broadcast_impl_value`, which compares all sizes of two shapes, mostly of one with itself."""
    broadcast = semantic.TritonSemantic.broadcast_impl_value

    def quick(self: Any, left: Any, right: Any) -> Any:
        if left.type.is_block():
            fit = right.type.is_block() and left.type.shape is right.type.shape
        else:
            fit = not right.type.is_block()
        return (left, right) if fit else broadcast(self, left, right)

    return quick


def _quick_cast() -> Callable[..., Any]:
    """`TritonSemantic.cast`, which compares types, mostly one with itself, part by part."""
    cast = semantic.TritonSemantic.cast

    def quick(self: Any, value: Any, wanted: Any, *rounding: Any) -> Any:
        return value if value.type.scalar is wanted else cast(self, value, wanted, *rounding)

    return quick


def _remembered_promotion() -> Callable[..., Any]:
    """`TritonSemantic.computation_type_impl`, which asks a dozen questions about two types."""
    promote = semantic.TritonSemantic.computation_type_impl
    known: dict[tuple[object, ...], Any] = {}

    def remembered(self: Any, left: Any, left_scalar: bool, right: Any, *others: bool) -> Any:
        key = left.name, left_scalar, right.name, *others
        if key not in known:
            known[key] = promote(self, left, left_scalar, right, *others)
        return known[key]

    return remembered


def _remembered_operands() -> Callable[..., Any]:
    """`TritonSemantic.binary_op_type_checking_impl`, which brings two operands to one type and shape: mostly two that
    have them, or a block and a number of the kernel's source, which is made a block of it each time."""
    check = semantic.TritonSemantic.binary_op_type_checking_impl
    as_they_are: set[object] = set()
    # The second operand where the first, a tensor, stays as it is. Nothing writes to an operand. Steps of a loop are
    # such numbers, too: the oldest go.
    numbers: dict[object, Any] = {}

    def remembered(self: Any, left: Any, right: Any, *options: Any, **named: Any) -> tuple[Any, Any]:
        if not isinstance(left, core.tensor):
            return check(self, left, right, *options, **named)
        if isinstance(right, core.tensor):
            key = left.type.name, right.type.name, options, *named.items()
            if key in as_they_are:
                return left, right
            found = check(self, left, right, *options, **named)
            if found[0] is left and found[1] is right:
                as_they_are.add(key)
            return found
        # 1, 1.0 and True are equal, and so are zeros of both signs.
        key = left.type.name, type(right), right or str(right), options, *named.items()
        if key in numbers:
            return left, numbers[key]
        found = check(self, left, right, *options, **named)
        if found[0] is left:
            found[1].handle.data.setflags(write=False)
            if len(numbers) == _MOST_NUMBERS:
                del numbers[next(iter(numbers))]
            numbers[key] = found[1]
        return found

    return remembered


def _remembered_tensors() -> Callable[..., None]:
    """`core.tensor.__init__`, which makes a tuple of each shape, with a type of its own."""
    initialize, known = core.tensor.__init__, {}

    def remembered(self: Any, handle: Any, type: Any) -> None:
        if type.name not in known:
            initialize(self, handle, type)
            known[type.name] = self.shape, self.numel, self.dtype
        self.handle, self.type = handle, type
        self.shape, self.numel, self.dtype = known[type.name]

    return remembered


@functools.cache
def _quicker() -> list[tuple[Any, str, Any]]:
    """(class, name, what makes half of kernels' time unnecessary): what the same types and shapes came to before."""
    return [
        (core.block_type, "__init__", _remembered_blocks()),
        (core.tensor, "__init__", _remembered_tensors()),
        (semantic.TritonSemantic, "binary_op_type_checking_impl", _remembered_operands()),
        (semantic.TritonSemantic, "broadcast_impl_value", _quick_broadcast()),
        (semantic.TritonSemantic, "cast", _quick_cast()),
        (semantic.TritonSemantic, "computation_type_impl", _remembered_promotion()),
    ]


def _replace() -> contextlib.ExitStack:
    """Replace what kernels need; closing the stack puts all back."""
    scope, stack = interpreter._LangPatchScope(), contextlib.ExitStack()
    stack.callback(scope.restore)
    for place, name, needed in _replacements(interpreter._patch_lang) + _quicker():
        scope.set_attr(place, name, needed)
    scope.set_attr(interpreter.InterpreterBuilder, "create_dot", _dot_by_rows())
    scope.set_attr(interpreter, "_patch_lang", lambda fn: _Nothing())
    scope.set_attr(interpreter, "_get_np_dtype", _remembering(interpreter._get_np_dtype))
    scope.set_attr(interpreter, "_convert_float", _converting(interpreter._convert_float))
    builder = interpreter.interpreter_builder
    stack.callback(setattr, builder, "options", builder.options)
    # It checks every sum of integers, at a quarter of its time, and drops what it finds unless it debugs.
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)
    return stack


def _no_warnings() -> Any:
    """NumPy would warn of infinities and NaNs, most of them in elements that no kernel stores."""
    return np.errstate(all="ignore")


@contextlib.contextmanager
def taken() -> Iterator[None]:
    """This thread's turn, for one launch of a kernel in the interpreter."""
    global _running, _restore
    if _unknown():
        _say_unknown()
        # It has no owner, so that it is not passed on.
        with _turn, _no_warnings():
            yield
        return
    _take()
    try:
        if _running == 0:
            _restore = _replace()
        _running += 1
        try:
            with _no_warnings():
                yield
        finally:
            _running -= 1
            if _running == 0:
                _restore.close()
    finally:
        _give()


def pass_on(seconds: float) -> None:
    """Let other threads, and other processes, run for `seconds` at least, then go on as before."""
    if _owner != threading.get_ident():
        # It has the interpreter for itself: launched without `taken`, or in one that is used as it is.
        time.sleep(seconds)
        return
    builder = interpreter.interpreter_builder
    program = builder.grid_dim, builder.grid_idx
    _give()
    time.sleep(seconds)
    _take()
    builder.grid_dim, builder.grid_idx = program

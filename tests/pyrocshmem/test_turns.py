"""Ranks that are threads on the CPU target: their kernels take turns in Triton's one interpreter."""

import contextlib
import math
import threading
import time
import warnings
from typing import Any

import pytest
import torch

from pyrocshmem import Heap, PeerTimeout, spawn_threads  # before Triton
from pyrocshmem import interpreter as turns

import triton  # isort: skip
import triton.language as tl
from triton.language import semantic

from pyrocshmem import collectives, polls, stream_k
from pyrocshmem.calls.kernel_launch import Launch
from pyrocshmem.calls.workspace import Workspace
from pyrocshmem.versions import version_of

TIER = 1
pytestmark = pytest.mark.cpu
POLLS = 20
DEADLINE_S = 30.0
begun: list[threading.Event] = []


def poll() -> None:
    """What a wait does between two looks, at least until all kernels have begun. Not `polls.pause`: calling a jit
    function would replace the interpreter's functions again."""
    polls._host_yield()
    deadline = time.monotonic() + DEADLINE_S
    while not all(each.is_set() for each in begun) and time.monotonic() < deadline:
        polls._host_yield()


def has_begun(index: int) -> None:
    begun[int(index)].set()


@triton.jit
def numbers_kernel(before, after, counts, index, polls, events):
    """What a program is told of itself before and after it has passed its turn on several times."""
    program = tl.program_id(0)
    tl.store(before + program, program)
    has_begun(index)
    for _ in range(polls):
        poll()
    tl.store(after + program, tl.program_id(0))
    tl.store(counts + program, tl.num_programs(0))


def run_at_once(*grids: int) -> list[Any]:
    """The kernel in a thread for each grid, one begun after another, all of them before the first ends: numbers that
    were wrong, or the exception, of each."""
    wrong: list[Any] = [None] * len(grids)
    begun[:] = [threading.Event() for _ in grids]

    def body(index: int, grid: int) -> None:
        try:
            before, after, counts = (torch.full((grid,), -1, dtype=torch.int32) for _ in range(3))
            args = (before, after, counts, index, POLLS * (1 + index))
            launch = Launch(numbers_kernel, grid, {}, 4, 1)
            launch.compile(args)
            assert index == 0 or begun[index - 1].wait(DEADLINE_S)
            launch(args)
            expected = torch.arange(grid, dtype=torch.int32)
            wrong[index] = sum(int((x != expected).sum()) for x in (before, after)) + int(
                (counts != grid).sum()
            )
        except Exception as error:
            wrong[index] = error

    threads = [threading.Thread(target=body, args=item) for item in enumerate(grids)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return wrong


def test_kernels_that_overlap_keep_their_program_numbers() -> None:
    assert run_at_once(1, 5, 3) == [0, 0, 0]


def test_without_its_numbers_a_program_takes_anothers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above."""

    def forgetful(seconds: float) -> None:
        turns._give()
        time.sleep(seconds)
        turns._take()

    monkeypatch.setattr(turns, "pass_on", forgetful)
    assert run_at_once(1, 5, 3) != [0, 0, 0]


def test_the_first_to_end_takes_the_interpreter_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of what is replaced around all kernels."""
    monkeypatch.setattr(turns, "_replace", contextlib.ExitStack)
    assert run_at_once(1, 5, 3) != [0, 0, 0]


def test_ordinary_functions_are_back_when_all_have_ended() -> None:
    def now() -> tuple[Any, ...]:
        module = turns.interpreter
        own = (
            module._patch_lang,
            module._get_np_dtype,
            module._convert_float,
            module.interpreter_builder.options,
        )
        own += tuple(vars(semantic.TritonSemantic).values())
        return tl.multiple_of, tl.reduce, tl.arange, *own

    ordinary = now()
    assert run_at_once(2, 3) == [0, 0]
    assert now() == ordinary


def test_the_interpreter_replaces_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in every call of a jit function, which made kernels take twice the time. What it replaces is looked for once
    a process."""
    replaced = []
    honest = turns.interpreter._patch_lang
    monkeypatch.setattr(turns.interpreter, "_patch_lang", lambda fn: replaced.append(fn) or honest(fn))
    assert spawn_threads(sums, 1, 60.0) == [(True, True)]
    assert replaced == [turns._languages]


@triton.jit
def convert_kernel(narrow, wide, widened, narrowed, events, SIZE: tl.constexpr):
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(widened + i, tl.load(narrow + i).to(tl.float32))
    tl.store(narrowed + i, tl.load(wide + i).to(tl.bfloat16))


def check_bits(found: torch.Tensor, expected: torch.Tensor) -> None:
    """The same bits; a NaN may have others."""
    bits = torch.int32 if found.dtype == torch.float32 else torch.int16
    same = (found.view(bits) == expected.view(bits)) | (found.isnan() & expected.isnan())
    assert same.all(), (expected[~same][:5], found[~same][:5])


def test_bf16_is_converted_as_pytorch_does() -> None:
    """Every bf16 number, subnormal ones and NaNs among them, and fp32 ones of any bits and halfway between two of
    bf16."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    halfway = (every.view(torch.int16).to(torch.int32) << 16 | 0x8000).view(torch.float32)
    any_bits = (
        torch.randint(-(1 << 31), 1 << 31, (1 << 16,), dtype=torch.int64).to(torch.int32).view(torch.float32)
    )
    for wide in (halfway, any_bits, any_bits * 2.0**-126):
        widened, narrowed = torch.empty_like(wide), torch.empty_like(every)
        Launch(convert_kernel, 4, {"SIZE": 1 << 14}, 4, 1)((every, wide, widened, narrowed))
        check_bits(widened, every.float())
        check_bits(narrowed, wide.bfloat16())


@triton.jit
def widen_kernel(bytes_, as_half, as_float, events, KIND: tl.constexpr):
    i = tl.arange(0, 256)
    narrow = tl.load(bytes_ + i).to(KIND, bitcast=True)
    tl.store(as_half + i, narrow.to(tl.float16))
    tl.store(as_float + i, narrow.to(tl.float32))


def test_8_bits_are_widened_as_pytorch_does() -> None:
    """Every number of both types."""
    for kind, dtype in ((tl.float8e4nv, torch.float8_e4m3fn), (tl.float8e5, torch.float8_e5m2)):
        every = torch.arange(256).to(torch.uint8)
        half, single = torch.empty(256, dtype=torch.float16), torch.empty(256)
        Launch(widen_kernel, 1, {"KIND": kind}, 4, 1)((every, half, single))
        check_bits(half, every.view(dtype).half())
        check_bits(single, every.view(dtype).float())


def test_nobody_is_warned_of_infinities() -> None:
    """No GPU warns of what its kernels compute."""
    with warnings.catch_warnings():
        warnings.simplefilter(
            "error", RuntimeWarning
        )  # NumPy's of values; of its own, Triton 3.6 causes others
        product = stream_k.gemm(torch.full((40, 24), math.inf), torch.zeros(24, 33))
    assert product.isnan().all()


def sums(group: Any, wait_seconds: float) -> tuple[bool, bool]:
    """A whole-tensor collective of several programs, and a fused op."""
    with Heap(4 << 20, group) as heap:
        workspace = Workspace(heap, wait_seconds=wait_seconds)
        x = heap.full((20000,), float(heap.rank + 1))
        total = collectives.all_reduce(x, group=heap, workspace=workspace)
        a, b = torch.full((40, 24), float(1 + heap.rank)), torch.ones(24, 33)
        product = stream_k.gemm_all_reduce(a, b, group=heap, workspace=workspace)
        expected = sum(range(1, heap.world_size + 1))
        return bool((total == expected).all()), bool((product == 24 * expected).all())


def asked(monkeypatch: pytest.MonkeyPatch, name: str) -> list[Any]:
    """The arguments of every call that reaches a method of Triton's own during kernels of several types."""
    found: list[Any] = []
    honest = getattr(semantic.TritonSemantic, name)

    def spy(self: Any, *arguments: Any) -> Any:
        found.append(arguments)
        return honest(self, *arguments)

    monkeypatch.setattr(semantic.TritonSemantic, name, spy)
    monkeypatch.setattr(turns, "_quicker", turns._quicker.__wrapped__)
    assert spawn_threads(sums, 1, 60.0) == [(True, True)]
    assert found
    return found


def test_equal_shapes_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most operands have one shape and one type; to compare them part by part took up to a third of a kernel's time."""
    for pair in asked(monkeypatch, "broadcast_impl_value"):
        shapes = [each.type.is_block() and list(each.type.shape) for each in pair]
        assert shapes[0] != shapes[1]


def test_equal_types_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not any(value.type.scalar is wanted for value, wanted, *_ in asked(monkeypatch, "cast"))


def test_types_are_promoted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [tuple(map(str, each)) for each in asked(monkeypatch, "computation_type_impl")]
    assert len(set(names)) == len(names)


def test_operands_of_one_type_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [
        (left.type.name, right.type.name, *options)
        for left, right, *options in asked(monkeypatch, "binary_op_type_checking_impl")
        if isinstance(left, tl.tensor) and isinstance(right, tl.tensor) and left.type == right.type
    ]
    assert pairs
    assert len(set(pairs)) == len(pairs)


@triton.jit
def equal_numbers_kernel(x, sums, products, events, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    whole = tl.load(x + i)
    tl.store(sums + i, (whole + 1).to(tl.float32) / 2)
    tl.store(sums + SIZE + i, (whole + 1.0) / 2)
    tl.store(sums + 2 * SIZE + i, (whole + 1.5).to(tl.float32))
    value = whole.to(tl.float32)
    tl.store(products + i, value * 0.0)
    tl.store(products + SIZE + i, value * -0.0)
    tl.store(products + 2 * SIZE + i, (value * 0).to(tl.float32))


def test_equal_numbers_of_other_types_and_signs_are_others() -> None:
    """What a number of the source becomes beside a block is remembered."""
    x = torch.arange(1, 17, dtype=torch.int32)
    sums, products = (torch.full((3, 16), math.nan) for _ in range(2))
    for _ in range(2):
        Launch(equal_numbers_kernel, 1, {"SIZE": 16}, 4, 1)((x, sums, products))
    assert torch.equal(sums, torch.stack([(x + 1) / 2, (x + 1.0) / 2, x + 1.5]))
    # Triton before 3.9 takes any zero of the source for one without a sign.
    signs = torch.tensor([[False], [version_of(triton.__version__) >= (3, 9)], [False]])
    assert torch.equal(torch.signbit(products), signs.expand(3, 16))
    assert not products.any()


@triton.jit
def steps_kernel(x, out, steps, events, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    total = tl.load(x + i)
    for step in range(steps):
        total += i * step
    tl.store(out + i, total)


def test_few_numbers_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is a block."""
    monkeypatch.setattr(turns, "_quicker", turns._quicker.__wrapped__)
    honest, found = turns._remembered_operands, []
    monkeypatch.setattr(turns, "_remembered_operands", lambda: found.append(honest()) or found[0])
    x, out, steps = torch.zeros(16, dtype=torch.int32), torch.empty(16, dtype=torch.int32), 1000
    Launch(steps_kernel, 1, {"SIZE": 16}, 4, 1)((x, out, steps))
    assert torch.equal(out, torch.arange(16, dtype=torch.int32) * (steps * (steps - 1) // 2))
    (numbers,) = (c.cell_contents for c in found[0].__closure__ if isinstance(c.cell_contents, dict))
    assert len(numbers) == turns._MOST_NUMBERS


@pytest.mark.parametrize("num_ranks", [2, 8])
def test_ops_of_threads(num_ranks: int) -> None:
    assert spawn_threads(sums, num_ranks, 60.0, timeout=90) == [(True, True)] * num_ranks


def test_a_wait_that_keeps_its_turn_waits_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above."""
    monkeypatch.setattr(turns, "pass_on", time.sleep)
    with pytest.raises(RuntimeError) as caught:
        spawn_threads(sums, 2, 0.3, timeout=60)
    assert isinstance(caught.value.__cause__, PeerTimeout)

"""Programs of a GEMM begin beside what waits on their multiprocessors, for tiles that they may have yet to do."""

import time
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl

from pyrocshmem import stream_k, target
from pyrocshmem.calls.kernel_launch import Launch, rooms_beside
from pyrocshmem.stream_k.ops.planned import least_free
from tests.stream_k.products import device

TIER = 1
pytestmark = pytest.mark.num_ranks(1)


def kernel(registers: int, warps: int, shared: int) -> SimpleNamespace:
    return SimpleNamespace(n_regs=registers, metadata=SimpleNamespace(num_warps=warps, shared=shared))


# As compiled with Triton 3.6: GEMMs of the peers' rows and of a rank's own, in 16 bits, and in 8 bits with scales of
# rows and of blocks.
WAIT = kernel(32, 4, 32)
PEERS, SUMS = kernel(189, 8, 229_408), kernel(240, 8, 196_664)
ROWWISE, BLOCKWISE = kernel(227, 8, 213_048), kernel(253, 8, 213_048)


@pytest.mark.cpu
def test_room_by_registers_and_shared_memory() -> None:
    assert [rooms_beside(gemm, WAIT) for gemm in (PEERS, SUMS, ROWWISE, BLOCKWISE)] == [2, 1, 1, 0]
    # A program can have all of a multiprocessor's shared memory.
    assert rooms_beside(kernel(128, 8, 227 << 10), WAIT) == 0


@pytest.mark.cpu
def test_as_many_stay_free_as_have_no_room(h200: torch.device) -> None:
    assert [least_free(gemm, [WAIT, WAIT], 2) for gemm in (PEERS, SUMS, ROWWISE, BLOCKWISE)] == [0, 1, 1, 2]
    assert [least_free(gemm, [WAIT], 1) for gemm in (PEERS, SUMS, ROWWISE, BLOCKWISE)] == [0, 0, 0, 1]
    assert least_free(SUMS, [WAIT], 0) == 0
    assert least_free(None, [None], 2) == 0


@triton.jit(do_not_specialize=["most"])
def wait_kernel(flag, most, out, KIND: tl.constexpr):
    """KIND: one machine code for each, whose attributes are its own."""
    turn = 0
    value = tl.load(flag, volatile=True)
    while (value == 0) & (turn < most):
        value = tl.load(flag, volatile=True)
        turn += 1
    tl.store(out + tl.program_id(0), value + KIND)


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("waits", [True, False])
def test_a_gemm_begins_beside_what_waits(waits: bool) -> None:
    """Two waits on every multiprocessor, and then a GEMM that takes most of the shared memory of each. The control is
    a wait that doesn't leave it."""
    if target.backend() != "cuda":
        pytest.skip("of NVIDIA's multiprocessors, which divide their memory")
    sms = target.num_sms(device())
    a = torch.randn(4096, 2048, device=device(), dtype=torch.bfloat16)
    b = torch.randn(4096, 2048, device=device(), dtype=torch.bfloat16).t()
    expected, out = a @ b, torch.empty(4096, 4096, device=device(), dtype=torch.bfloat16)
    config = stream_k.Config(placement="after", split="none", num_programs=sms)
    stream_k.gemm(a, b, out=out, config=config)
    flag = torch.zeros(1, dtype=torch.int32, device=device())
    one, told = torch.ones_like(flag), torch.empty(2 * sms, dtype=torch.int32, device=device())
    wait = Launch(wait_kernel, 2 * sms, {"KIND": int(waits)}, 4, 1, waits=waits)
    arguments = (flag, 1 << 22, told)
    wait.compile(arguments)
    first, second, third = (torch.cuda.Stream() for _ in range(3))
    out.zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(first):
        wait(arguments)
    time.sleep(0.05)
    with torch.cuda.stream(second):
        stream_k.gemm(a, b, out=out, config=config)
    time.sleep(0.2)
    ended, waiting = second.query(), not first.query()
    with torch.cuda.stream(third):
        flag.copy_(one)
    torch.cuda.synchronize()
    assert waiting
    assert ended == waits
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2.0)

"""What could keep ranks from working on this machine: `python -m pyrocshmem doctor`.

Each check says what it found, whether that is well, and what to do about it. The last one starts ranks that exchange
data for some seconds, through the same handles, heaps and signals as every op; on GPUs that includes IPC between
processes.
"""

import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
import triton.language as tl

from pyrocshmem import device as shmem
from pyrocshmem import finegrained_alloc, launching, signal, status, target
from pyrocshmem.forming import CPU_HEAP_BYTES, default_bytes
from pyrocshmem.heap import Heap
from pyrocshmem.machine import container_limits, first_line, links
from pyrocshmem.trace import now_us

OK, NOTE, FAULT = "ok", "note", "FAULT"

_SHM = "/dev/shm"
_MEMFD = "memfd"  # what the C library says that it uses instead
_HEAP_BYTES = 1 << 20
_BLOCK = 256
_CALLS_BETWEEN_LOOKS = 10
_CLOCK_S = 0.2
_CLOCK_ERROR = 0.05  # a wait may be this much longer or shorter than its budget
_FILES = 1024
_NO_IPC = (
    "processes can't share GPU memory: a container needs --ipc=host, and its ranks one process namespace"
)
# What maps a handle in another process. torch brings the GPU runtime; without a GPU it would only cost seconds.
_OPENER = """
import sys
if sys.argv[1] != "host":
    import torch
sys.path.append(sys.argv[3])  # last: modules there have names of the standard library's
import finegrained_alloc
device, at = int(sys.argv[2]), None
if sys.argv[4] == "at":
    at = finegrained_alloc.reserve(finegrained_alloc.PIECE, sys.argv[1], device).ptr
with finegrained_alloc.open_handle(bytes.fromhex(sys.stdin.read()), device, at) as mapping:
    print(mapping.nbytes)
"""
_OPENER_S = 60
_OP = tl.constexpr(int(status.Op.TEST))


@dataclass(frozen=True)
class Finding:
    """check: its name. verdict: OK, NOTE (ranks work, with limits) or FAULT (they don't). found, advice: in words."""

    check: str
    verdict: str
    found: str
    advice: str = ""


def gib(nbytes: float) -> str:
    return f"{nbytes / 2**30:.1f} GiB"


def check_target() -> Iterator[Finding]:
    """Where kernels run, and whether the C library is there for it."""
    yield Finding("target", OK, target.describe())
    try:
        usable, text = finegrained_alloc.available(target.backend())
    except finegrained_alloc.NotBuilt as error:
        yield Finding(
            "C library", FAULT, str(error), "run finegrained_alloc/build.sh; it needs any C compiler"
        )
        return
    yield Finding(
        "C library",
        OK if usable else FAULT,
        f"{target.backend()}: {text}",
        "" if usable else "install the GPU driver, or set PYROCSHMEM_BACKEND=cpu",
    )


def check_peers() -> Iterator[Finding]:
    """Whether GPUs reach one another's memory, and over what."""
    count = target.num_devices()
    if count < 2:
        found = "no GPU is used: all processes reach /dev/shm" if count == 0 else "one GPU: no peers"
        yield Finding(
            "peers", OK if count == 0 else NOTE, found, "" if count == 0 else "ranks need a GPU each"
        )
        return
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    apart = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    yield Finding(
        "peers",
        FAULT if apart else OK,
        f"no peer access: {apart}" if apart else f"each of {count} GPUs reaches the others' memory",
        "use GPUs under one root complex, switch off ACS / IOMMU isolation, or choose with CUDA_VISIBLE_DEVICES"
        if apart
        else "",
    )
    kinds = links()
    slow = sorted({kind for pair in pairs if not (kind := kinds.get(pair, "NV")).startswith("NV")})
    found = ", ".join(sorted({kinds.get(pair, "unknown") for pair in pairs}))
    yield Finding(
        "links", NOTE if slow else OK, found, "without NVLink ops are limited by PCIe" if slow else ""
    )


def _opened_elsewhere(memory: finegrained_alloc.Allocation, where: str) -> str:
    """Why another process can't map `memory`, "" where it can. where: "at" an address of its choice, or "anywhere"."""
    # As ranks do: from a GPU of its own, where there is one.
    device = 1 if target.num_devices() > 1 else 0
    done = subprocess.run(
        [sys.executable, "-c", _OPENER, memory.backend, str(device), str(Path(__file__).parent), where],
        input=memory.export().hex(),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=_OPENER_S,
        check=False,
    )
    if done.returncode == 0 and done.stdout.split() == [str(memory.nbytes)]:
        return ""
    return (done.stderr.strip().splitlines() or [f"its exit status is {done.returncode}"])[-1]


def check_ipc() -> Iterator[Finding]:
    """Whether another process can map memory of this one through a handle: on one GPU, too."""
    with finegrained_alloc.alloc(_BLOCK, target.backend()) as memory:
        problem = _opened_elsewhere(memory, "anywhere")
    yield Finding(
        "IPC",
        FAULT if problem else OK,
        f"another process {'can not map memory of this one: ' + problem if problem else 'maps memory of this one'}",
        _NO_IPC if problem else "",
    )


def why_fixed() -> str:
    """Why heaps that aren't given a size can't grow here, "" where they can: as far as that shows without a peer."""
    try:
        with (
            finegrained_alloc.reserve(finegrained_alloc.PIECE, target.backend()) as space,
            finegrained_alloc.alloc(space.nbytes, space.backend, at=space.ptr) as memory,
        ):
            memory.export()
    except (RuntimeError, MemoryError) as error:
        return str(error)
    return ""


def check_growth() -> Iterator[Finding]:
    """Whether heaps that aren't given a size take memory as they need it."""
    problem = why_fixed()
    if not problem:
        with (
            finegrained_alloc.reserve(finegrained_alloc.PIECE, target.backend()) as space,
            finegrained_alloc.alloc(space.nbytes, space.backend, at=space.ptr) as memory,
        ):
            problem = _opened_elsewhere(memory, "at")
    size = default_bytes(target.device())
    yield Finding(
        "heap size",
        NOTE if problem else OK,
        f"{gib(size.fixed)} when it forms, since it can't grow: {problem}"
        if problem
        else f"grows with what is on it, up to {gib(size.limit)}",
        "give heaps a size (nbytes, or PYROCSHMEM_HEAP_BYTES) if that is too much" if problem else "",
    )


def check_shared_memory() -> Iterator[Finding]:
    """Room in /dev/shm for heaps of ranks on a CPU."""
    usable, text = finegrained_alloc.available("host")
    if not usable or _MEMFD in text:
        yield Finding(
            "/dev/shm",
            NOTE if usable else FAULT,
            text,
            "mount a tmpfs there, as containers do by default: its size is a limit that a full heap runs into early",
        )
        return
    usage = shutil.disk_usage(_SHM)
    needed = 2 * CPU_HEAP_BYTES
    short = target.backend() == "host" and usage.free < needed
    yield Finding(
        "/dev/shm",
        FAULT if short else OK,
        f"{gib(usage.total)}, {gib(usage.free)} free",
        f"the heaps of two ranks may soon need {gib(needed)}: start the container with a larger --shm-size"
        if short
        else "",
    )


def check_limits() -> Iterator[Finding]:
    """Limits of the container and of the process, and whether a debugger may look at a rank that hangs."""
    memory, tasks = container_limits()
    cores = len(os.sched_getaffinity(0))
    found = f"memory {'unlimited' if memory is None else gib(memory)}, {cores} cores"
    yield Finding("container", OK, f"{found}, tasks {'unlimited' if tasks is None else tasks}")
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    few = 0 <= files < _FILES
    advice = f"ulimit -n {_FILES}: a rank opens some files for each peer" if few else ""
    yield Finding("open files", NOTE if few else OK, f"at most {files}", advice)
    scope = first_line("/proc/sys/kernel/yama/ptrace_scope")
    closed = scope not in ("", "0") and os.geteuid() != 0
    yield Finding(
        "ptrace",
        NOTE if closed else OK,
        f"kernel.yama.ptrace_scope is {scope or 'not there'}",
        "py-spy and gdb can't attach to a rank that hangs: run them as root, or in a container with "
        "--cap-add SYS_PTRACE"
        if closed
        else "",
    )


@triton.jit
def clock_kernel(out):
    """out[0]: microseconds, by the clock that ends waits."""
    tl.store(out, now_us())


def check_clock() -> Iterator[Finding]:
    """Whether the device's clock, which ends waits, runs as fast as the host's."""
    if not _runs_kernels():
        return
    out = torch.zeros(1, dtype=torch.int64, device=target.device())
    clock_kernel[(1,)](out)  # compiled, loaded
    ticks, times = [], []
    for pause in (_CLOCK_S, 0.0):
        before = time.monotonic()
        clock_kernel[(1,)](out)
        ticks.append(int(out.item()) / 1e6)
        times.append((before, time.monotonic()))
        time.sleep(pause)
    # The device's clock was read somewhere between the two host times of a launch.
    shortest, longest = times[1][0] - times[0][1], times[1][1] - times[0][0]
    passed = ticks[1] - ticks[0]
    wrong = not (1 - _CLOCK_ERROR) * shortest <= passed <= (1 + _CLOCK_ERROR) * longest
    ratio = 2 * passed / (shortest + longest)
    source = first_line("/sys/devices/system/clocksource/clocksource0/current_clocksource")
    yield Finding(
        "clock",
        FAULT if wrong else OK,
        f"the device's runs at {ratio:.3f} of the host's ({source or 'unknown source'})",
        f"waits last {1 / ratio if ratio > 0 else float('inf'):.2f} of their budget: report it, with the device and "
        "its driver"
        if wrong
        else "",
    )


def _runs_kernels() -> bool:
    """Not where kernels are compiled only."""
    return target.interpreted() or target.num_devices() > 0


@triton.jit
def ring_kernel(data, wrong, context, WORLD: tl.constexpr, BLOCK: tl.constexpr):
    """A call: every rank writes into its right neighbour's `data`, and counts in `wrong` what is not its left one's."""
    control, abort, record, heap_bases = context
    rank = tl.load(control + signal.RANK)
    offsets = tl.arange(0, BLOCK)
    epoch = signal.begin(context, True, WORLD)
    # The neighbour has entered this call, hence has read what the last one brought.
    if signal.wait_entered(epoch, context, _OP, WORLD):
        shmem.store(data + offsets, epoch * WORLD + rank + offsets, (rank + 1) % WORLD, heap_bases)
        if signal.barrier(epoch, context, _OP, WORLD):
            left = (rank + WORLD - 1) % WORLD
            bad = (tl.load(data + offsets) != epoch * WORLD + left + offsets).to(tl.int32)
            tl.store(wrong, tl.load(wrong) + tl.sum(bad, axis=0))
    signal.end(context, epoch)


def exchange_for(rank: int, world_size: int, seconds: float) -> tuple[float, float, int, int]:
    """A rank of the self-test: (seconds to form a heap, of a call, calls, wrong elements)."""
    start = time.monotonic()
    with Heap(_HEAP_BYTES) as heap:
        formed = time.monotonic() - start
        control = heap.zeros(int(signal.CONTROL_WORDS), dtype=torch.int32)
        control[int(signal.RANK.value)] = rank
        control[int(signal.BUDGET_US.value)] = 10_000_000
        data = heap.zeros(_BLOCK, dtype=torch.int32)
        wrong = torch.zeros(1, dtype=torch.int32, device=heap.device)
        arguments = (data, wrong, signal.Context(control, heap.system, heap.status, heap.heap_bases))
        if not target.interpreted():  # loaded before any rank can wait
            ring_kernel.warmup(*arguments, WORLD=world_size, BLOCK=_BLOCK, grid=(1,))
        heap.barrier()
        calls, start, going = 0, time.monotonic(), True
        while going:
            for _ in range(_CALLS_BETWEEN_LOOKS):
                ring_kernel[(1,)](*arguments, WORLD=world_size, BLOCK=_BLOCK)
            calls += _CALLS_BETWEEN_LOOKS
            heap.synchronize()
            # All go on, or none.
            going = b"0" not in heap.vote("go on", b"1" if time.monotonic() - start < seconds else b"0")
        spent = time.monotonic() - start
        return formed, spent / calls, calls, int(wrong.item())


def check_ranks(num_ranks: int, seconds: float) -> Iterator[Finding]:
    """The self-test: ranks form a heap, map one another's memory, exchange data and look at all of it."""
    if not _runs_kernels():
        yield Finding(
            "self-test", NOTE, "not run: kernels are compiled here, not run", "unset TRITON_INTERPRET"
        )
        return
    ends = launching.run_ranks(exchange_for, num_ranks, seconds, timeout=60 + 2 * seconds)
    failed = [end.describe().strip().splitlines() for end in ends if not end.ok]
    if failed:
        text = f"{failed[0][0]} {failed[0][-1] if len(failed[0]) > 1 else ''}".strip()
        advice = (
            _NO_IPC if "Ipc" in text else "look at this error; the checks before this one may name its cause"
        )
        yield Finding("self-test", FAULT, text, advice)
        return
    formed, call, calls, _ = ends[0].value
    bad = sum(end.value[3] for end in ends)
    yield Finding(
        "self-test",
        FAULT if bad else OK,
        f"{num_ranks} processes share memory: heap in {formed:.2f} s, {calls} exchanges of {1e6 * call:.0f} us, "
        f"{bad} wrong elements",
        "data came late or broken: report it, with the devices and their driver" if bad else "",
    )


def default_ranks() -> int:
    """Ranks of the self-test when nobody asks for a number: every GPU, two processes on a CPU."""
    return min(target.num_devices(), int(signal.MAX_WORLD.value)) or 2


def examine(num_ranks: int, seconds: float) -> Iterator[Finding]:
    """All checks, one finding after another. A check that fails itself is a fault, and the others go on."""
    checks: dict[str, Callable[[], Iterator[Finding]]] = {
        "target": check_target,
        "peers": check_peers,
        "IPC": check_ipc,
        "heap size": check_growth,
        "/dev/shm": check_shared_memory,
        "limits": check_limits,
        "clock": check_clock,
        "self-test": lambda: check_ranks(num_ranks, seconds),
    }
    for name, check in checks.items():
        try:
            yield from check()
        except Exception as error:
            yield Finding(
                name, FAULT, f"{type(error).__name__}: {error}", "this check itself failed; look at its error"
            )

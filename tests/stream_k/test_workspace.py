"""`Workspace` of one device: growth, fixed sizes, two threads, epochs. (Those with peers: tests/fused.)"""

import sys
import threading
from types import SimpleNamespace

import pytest
import torch

import pyrocshmem
from pyrocshmem import Heap, signal, stream_k
from pyrocshmem.calls.call_name import CallName
from pyrocshmem.calls.workspace import Workspace, local_workspace
from tests.stream_k.products import Frame, check_product, device, random, small_config

TIER = 1
pytestmark = pytest.mark.num_ranks(1)

SPLIT = small_config(split="stream_k", num_programs=5)
M, N, K = 3 * SPLIT.block_m, 3 * SPLIT.block_n + 24, 304


def product(workspace: Workspace, config: stream_k.Config = SPLIT) -> None:
    a, b = random(M, K, torch.float16), random(K, N, torch.float16)
    check_product(stream_k.gemm(a, b, config=config, workspace=workspace), a, b)


def test_needs_a_place() -> None:
    with pytest.raises(ValueError, match="a heap or a device, got neither"):
        Workspace()


BUDGETS = ["soon", "", "nan", "inf", "0", "-1", "2147.5"]


@pytest.mark.parametrize("text", BUDGETS)
def test_a_budget_that_kernels_can_not_hold(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYROCSHMEM_WAIT_SECONDS", text)
    allowed = "allowed are numbers greater than 0, at most 2147"
    with pytest.raises(ValueError, match=f"PYROCSHMEM_WAIT_SECONDS='{text}', {allowed}"):
        Workspace(device=device())
    if text not in BUDGETS[:2]:
        with pytest.raises(ValueError, match=f"wait_seconds is {float(text)}, {allowed}"):
            Workspace(device=device(), wait_seconds=float(text))


def test_the_longest_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """The argument comes first, and whatever the environment says is then of no account."""
    monkeypatch.setenv("PYROCSHMEM_WAIT_SECONDS", "never")
    control = Workspace(device=device(), wait_seconds=2147).control
    assert int(control[int(signal.BUDGET_US.value)]) == 2_147_000_000


def test_grows_as_calls_need_it() -> None:
    workspace = Workspace(device=device())
    assert workspace.nbytes_in_use() == 0
    product(workspace, small_config(split="none"))
    whole = workspace.nbytes_in_use()
    product(workspace)
    tile = 4 * SPLIT.block_m * SPLIT.block_n
    assert workspace.nbytes_in_use() >= 5 * tile > whole
    grown = workspace.nbytes_in_use()
    product(workspace)
    product(workspace, small_config(split="none"))
    assert workspace.nbytes_in_use() == grown


def test_freed_it_holds_what_later_calls_need() -> None:
    """Of a rank alone on its heap, too, whose memory comes back."""
    with Heap(8 << 20) as heap:
        for workspace, more in (
            (Workspace(device=device()), 1000),
            (Workspace(heap), 1000),
            (Workspace(heap), 0),
        ):
            before = heap.usage()
            if more:
                workspace.buffer("more", more, torch.int32)
            product(workspace, small_config(split="none"))
            small = workspace.nbytes_in_use()
            product(workspace)
            assert workspace.nbytes_in_use() > small > 0
            workspace.free()
            assert workspace.nbytes_in_use() == 0
            assert heap.usage() == before
            product(workspace, small_config(split="none"))
            assert workspace.nbytes_in_use() == small - 4 * more


def test_a_grown_workspace_forgets_plans_of_the_smaller_one() -> None:
    """A kept plan would go on writing to the buffer that was given back."""
    workspace = Workspace(device=device())
    product(workspace)
    product(workspace, small_config(split="stream_k", num_programs=7))
    for _ in range(3):
        product(workspace)


def test_too_small() -> None:
    """Fault 9: refused before anything is launched, with both sizes; the next call that fits works."""
    tile = 4 * SPLIT.block_m * SPLIT.block_n
    workspace = Workspace(device=device(), nbytes=4 * tile)
    a, b, frame = random(M, K, torch.float16), random(K, N, torch.float16), Frame(M, N, torch.float16)
    with pytest.raises(ValueError, match=rf"the workspace has {4 * tile} bytes, this call needs {5 * tile}"):
        stream_k.gemm(a, b, out=frame.out, config=SPLIT, workspace=workspace)
    assert frame.out.isnan().all()
    frame.check()
    assert workspace.epoch() == 0
    product(Workspace(device=device(), nbytes=5 * tile + 1024))


def test_messages_that_have_no_room_leave_those_there_are_as_they_were() -> None:
    """What was asked for in vain must not pass for room later."""
    few, more, many = (16 * quads for quads in (1 << 16, 3 << 16, 1 << 20))
    workspace = Workspace(device=device(), nbytes=4 * few)
    made, quads = workspace.messages(few)
    for needed, notes in ((many, 0), (more, 0), (few, 1 << 22)):
        with pytest.raises(ValueError, match="the workspace has"):
            workspace.messages(needed, notes)
        again, quads_again = workspace.messages(few)
        assert again is made
        assert quads_again == quads


def test_on_another_device() -> None:
    """Fault 16, of the workspace and of the operands themselves."""
    a = random(8, 8, torch.float32)
    with pytest.raises(ValueError, match=f"a is on {a.device}, the kernels of this rank run on meta"):
        stream_k.gemm(a, a, workspace=Workspace(device=torch.device("meta")))
    with pytest.raises(ValueError, match="a is on meta, but kernels run elsewhere"):
        stream_k.gemm(a.to("meta"), a.to("meta"))


def test_the_callers_default_device_is_of_no_account() -> None:
    a = random(8, 8, torch.float32)
    with torch.device("meta"):
        out = stream_k.gemm(a, a, workspace=Workspace(device=device()))
    check_product(out, a, a)


def test_counts_the_calls_that_split() -> None:
    workspace = Workspace(device=device())
    for call in range(3):
        product(workspace)
        assert workspace.epoch() == call + 1
    product(workspace, small_config(split="none"))
    assert workspace.epoch() == 3


def test_busy() -> None:
    """Fault 11: a call from another thread, while one is being launched, raises and leaves the output alone."""
    workspace = Workspace(device=device())
    inside, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        with workspace.begin(None):
            inside.set()
            go_on.wait(30)

    holder = threading.Thread(target=hold)
    holder.start()
    try:
        assert inside.wait(30)
        a, b, frame = random(M, K, torch.float16), random(K, N, torch.float16), Frame(M, N, torch.float16)
        with pytest.raises(pyrocshmem.WorkspaceBusy, match="in use by a call of another thread"):
            stream_k.gemm(a, b, out=frame.out, config=SPLIT, workspace=workspace)
        assert frame.out.isnan().all()
        # One of its own is all that the second thread needs.
        product(Workspace(device=device()))
    finally:
        go_on.set()
        holder.join()
    product(workspace)


@pytest.mark.cpu
@pytest.mark.parametrize("captured", [False, True])
def test_what_grows_outlives_the_last_call(captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A buffer that is given back may be in use on another stream than that of its allocation, or in a graph."""
    workspace, held = Workspace(device=device()), []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda x, stream: held.append((x.data_ptr(), stream)))
    old = workspace.buffer("place", 8, torch.float32, local=True).data_ptr()
    stream = object()
    workspace._stream, workspace._captured = stream, captured  # type: ignore[assignment]
    workspace.buffer("place", 16, torch.float32, local=True)
    assert [x.data_ptr() for _, x in workspace._outgrown] == ([old] if captured else [])
    assert held == ([] if captured else [(old, stream)])


@pytest.mark.cpu
def test_plans_outlive_what_they_were_made_for() -> None:
    """A captured graph may read what only a plan holds."""
    workspace = Workspace(device=device())
    workspace.buffer("place", 8, torch.float32, local=True)
    workspace.plans["call"] = plan = object()
    workspace.note_capture()
    workspace.plans["another call"] = object()
    workspace.buffer("place", 16, torch.float32, local=True)
    assert ([*workspace.plans.values()], workspace._retired) == ([], [plan])


def test_free_again_after_an_error() -> None:
    workspace = Workspace(device=device())
    with pytest.raises(RuntimeError, match="planted"), workspace.begin(None):
        raise RuntimeError("planted")
    product(workspace)


def test_the_devices_own() -> None:
    assert local_workspace(device()) is local_workspace(device())


class Devices:
    """Stands in for GPUs, of which 0 is the caller's current one. kernels: where each was compiled, and launched."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current = 0
        self.kernels: list[tuple[str, int]] = []
        for name in ("_exchange_device", "_maybe_exchange_device"):
            monkeypatch.setattr(torch.cuda, name, self.exchange)
        monkeypatch.setattr(Workspace, "order", lambda workspace: None)

    def exchange(self, device: int) -> int:
        self.current, before = device, self.current
        return before

    def kernel(self, what: str) -> None:
        self.kernels.append((what, self.current))


@pytest.mark.cpu
def test_the_current_device_is_of_no_account(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product on GPU 1 while GPU 0 is the current one, as PyTorch's own would be: Triton compiles, loads and launches
    on the current one, whose kernels could not reach its tensors."""
    devices, workspace = Devices(monkeypatch), Workspace(device=device())
    workspace.device = torch.device("cuda", 1)

    class Plan:
        def __init__(self, *arguments: object, **options: object) -> None:
            devices.kernel("compiled")

        def run(self, *arguments: object) -> None:
            devices.kernel("launched")

    module = sys.modules["pyrocshmem.stream_k.local_gemm.plan"]
    for name, value in {"GemmPlan": Plan, "check_device": lambda a, device: None}.items():
        monkeypatch.setattr(module, name, value)
    a, b = random(M, K, torch.float16), random(K, N, torch.float16)
    for _ in range(2):
        stream_k.gemm(a, b, config=SPLIT, workspace=workspace)
    assert devices.kernels == [("compiled", 1), ("launched", 1), ("launched", 1)]
    assert devices.current == 0
    with pytest.raises(RuntimeError, match="planted"), workspace.begin(None):
        raise RuntimeError("planted")
    assert devices.current == 0


@pytest.mark.cpu
def test_nor_is_it_where_calls_are_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ops on a heap: fused ones, and all others."""
    devices, module = Devices(monkeypatch), sys.modules["pyrocshmem.stream_k.ops.op"]
    with Heap(1 << 20) as heap:
        workspace = Workspace(heap)
        heap.device = workspace.device = torch.device("cuda", 1)
        workspace.agreed["a call", 0] = 0
        workspace.planned_together(CallName("a call"), lambda _: devices.kernel("planned"))
        plan = SimpleNamespace(called=None, shape=(M, N), dtype=torch.float16, result=None)
        plan.graphs = SimpleNamespace(never=True)
        plan.run = lambda *tensors: devices.kernel("launched")
        monkeypatch.setattr(module, "_without_plan", lambda *facts: None)
        monkeypatch.setattr(module, "_make_plan", lambda *facts: devices.kernel("fused") or plan)
        a, b = random(M, K, torch.float16), random(K, N, torch.float16)
        stream_k.gemm_all_reduce(a, b, group=heap, workspace=workspace)
        heap.device = workspace.device = device()
    assert devices.kernels == [("planned", 1), ("fused", 1), ("launched", 1)]
    assert devices.current == 0


@pytest.mark.cpu
def test_is_not_made_under_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a first product in a graph would leave the device a workspace whose words nothing has zeroed."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="under CUDA graph capture: make the call once before"):
            local_workspace(torch.device("cuda", 0))


@pytest.mark.gpu
def test_does_not_grow_under_capture() -> None:
    """Fault 10: RuntimeError, and the workspace goes on to work."""
    workspace = Workspace(device=device())
    a, b, out = random(M, K, torch.float16), random(K, N, torch.float16), random(M, N, torch.float16)
    with (
        pytest.raises(RuntimeError, match=r"would have to grow .* under CUDA graph capture"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        stream_k.gemm(a, b, out=out, config=SPLIT, workspace=workspace)
    product(workspace)


@pytest.mark.gpu
def test_replayed_in_a_graph() -> None:
    """Fault 10: replays with inputs changed in place, eager calls between; the epoch lives on the device."""
    workspace = Workspace(device=device())
    a, b, out = random(M, K, torch.float16), random(K, N, torch.float16), random(M, N, torch.float16)
    stream_k.gemm(a, b, out=out, config=SPLIT, workspace=workspace)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stream_k.gemm(a, b, out=out, config=SPLIT, workspace=workspace)
    for replay in range(50):
        a.copy_(random(M, K, torch.float16))
        out.fill_(float("nan"))
        graph.replay()
        check_product(out, a, b)
        if replay % 10 == 0:
            product(workspace)

"""What another user, or a damaged message, could get at: names, modes, handles, sizes from peers, shells.

Files are private, unguessable and checked when opened: tests/faults/test_alloc_faults.py, test_forming_faults.py and
tests/finegrained_alloc/test_host.py. Here: nothing is unpickled that a peer sent, handles travel through the group's
store alone and don't stay there, sizes that peers announce are checked, no command goes through a shell.
"""

import ast
import contextlib
import copy
import json
import multiprocessing.connection
import os
import pickle
import re
import socket
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from pyrocshmem import Heap, ShmemError, ThreadGroup, finegrained_alloc, spawn_threads
from pyrocshmem.stores import MemoryBoard
from tests.faults.heap_support import MIB, raised_by

TIER = 0
pytestmark = pytest.mark.cpu

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    "pyrocshmem", "stream_k", "collectives", "finegrained_alloc", "reference", "benchmarks", "examples",
)  # fmt: skip
# Modules and functions that unpickle: what a file holds, or what a peer or another process has sent.
UNPICKLERS = ("pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve")
OBJECT_COLLECTIVES = (
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list",
    "recv_object_list",
)  # fmt: skip
PROCESSES = (
    "concurrent.futures.ProcessPoolExecutor", "multiprocessing.Pool", "multiprocessing.Queue",
    "multiprocessing.SimpleQueue", "multiprocessing.JoinableQueue", "multiprocessing.Manager",
    "multiprocessing.managers", "multiprocessing.connection.Client", "multiprocessing.connection.Listener",
    "torch.multiprocessing.spawn", "torch.multiprocessing.Queue", "torch.distributed.rpc",
)  # fmt: skip
OF_PYTORCH = ("torch.distributed.checkpoint", "torch.distributed.pipelining")
# What a file may use, and why: only processes that it started itself can write there, or it is PyTorch's own.
ALLOWED = {
    "pyrocshmem/launching.py": (
        "pickle",
        "A rank's end comes through a pair of sockets without a name: nobody can connect to them, so no authkey is "
        "asked for. Only that rank, a child of the same user, gets the other one: inherited, or handed over by the "
        "fork server, whose socket is private (test_the_fork_server_s_socket_is_private).",
    ),
    "pyrocshmem/rank_process.py": (
        "pickle",
        "The function and its arguments come from the parent with the order to start, in the stream that "
        "multiprocessing itself unpickles; the rank's own end is rebuilt to see that it can be.",
    ),
    "benchmarks/ahead.py": (
        "concurrent.futures.ProcessPoolExecutor",
        "Its processes are children of this one, joined to it by pipes without names.",
    ),
    "examples/rms/spawn.py": (
        "torch.multiprocessing.spawn",
        "The example shows this way to start ranks. Its children get their arguments through a pipe, and one that "
        "failed leaves its traceback in a file of the temporary folder.",
    ),
    "examples/training/common.py": (
        "torch.distributed.checkpoint",
        "The example shows PyTorch's checkpoints, which unpickle the metadata of the folder that the user names, and "
        "plans of the job's own ranks.",
    ),
    "examples/training/pipeline_parallel.py": (
        "torch.distributed.pipelining",
        "The example shows PyTorch's pipelines, in which neighbouring stages send each other shapes, pickled.",
    ),
}
SHELLS = ("os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput")


def violations(root: Path, allowed: Mapping[str, tuple[str, str]] = ALLOWED) -> list[str]:
    """Lines that unpickle, evaluate text or start a shell, as `file:line: what`."""
    found = []
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            name = path.relative_to(root).as_posix()
            tree = ast.parse(path.read_text(), name)
            names = _imported(tree)
            for node in ast.walk(tree):
                what = _suspect(node, names)
                if what and what != allowed.get(name, ("", ""))[0]:
                    found.append(f"{name}:{getattr(node, 'lineno', 0)}: {what}")
    return found


def _imported(tree: ast.AST) -> dict[str, str]:
    """Names of a file, and what they stand for: {"dist": "torch.distributed"}."""
    found = {"context": "multiprocessing"}  # what its get_context gives has its functions
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {each.asname: each.name for each in node.names if each.asname}
        elif isinstance(node, ast.ImportFrom):
            found |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
    return found


def _suspect(node: ast.AST, names: dict[str, str]) -> str:
    """names: as `_imported` gives them."""
    if isinstance(node, ast.Import):
        return next((what for each in node.names if (what := _unpickles(each.name))), "")
    if isinstance(node, ast.ImportFrom):
        return next((what for each in node.names if (what := _unpickles(f"{node.module}.{each.name}"))), "")
    if isinstance(node, ast.Attribute):
        return _unpickles(_full_name(node, names))
    if isinstance(node, ast.Constant):
        return node.value if node.value in OBJECT_COLLECTIVES else ""  # for getattr
    return _suspect_call(node, names) if isinstance(node, ast.Call) else ""


def _full_name(node: ast.expr, names: dict[str, str]) -> str:
    first, dot, rest = ast.unparse(node).partition(".")
    return f"{names.get(first, first)}{dot}{rest}"


def _unpickles(name: str) -> str:
    """What of the lists above a name with dots is, or lies in; "" for others."""
    if (last := name.rpartition(".")[2]) in OBJECT_COLLECTIVES:
        return last
    return next(
        (what for what in (*UNPICKLERS, *PROCESSES, *OF_PYTORCH) if f"{name}.".startswith(f"{what}.")), ""
    )


def _suspect_call(node: ast.Call, names: dict[str, str]) -> str:
    called = _full_name(node.func, names)
    options = {each.arg: ast.unparse(each.value) for each in node.keywords}
    if called in ("eval", "exec", *SHELLS):
        return called
    if options.get("shell", "False") != "False":
        return "shell="
    if called == "torch.load" and options.get("weights_only") != "True":
        return called
    if options.get("allow_pickle", "False") != "False":
        return "allow_pickle="
    # Of a connection of multiprocessing; a socket's, and a process group's, has arguments.
    return ".recv()" if called.endswith(".recv") and not node.args and not node.keywords else ""


def test_nothing_is_unpickled_evaluated_or_given_to_a_shell() -> None:
    assert violations(ROOT) == []


def test_nothing_is_allowed_that_is_not_there() -> None:
    found = {tuple(re.split(r":\d+: ", line)) for line in violations(ROOT, allowed={})}
    assert found == {(name, what) for name, (what, _) in ALLOWED.items()}


def test_the_fork_server_s_socket_is_private() -> None:
    """The one thing with a name on the way between a parent and its ranks: a file that only this user can reach, not
    a name that every process of the machine can connect to."""
    address = multiprocessing.connection.arbitrary_address("AF_UNIX")  # what the fork server takes
    assert address.startswith("/")
    folder = Path(address).parent.stat()
    assert (folder.st_uid, folder.st_mode & 0o777) == (os.getuid(), 0o700)
    for end in (pipe := multiprocessing.get_context("forkserver").Pipe()):
        with socket.socket(fileno=os.dup(end.fileno())) as connected:
            assert (connected.getsockname(), connected.getpeername()) == ("", "")
    for end in pipe:
        end.close()


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("import pickle", "pickle"),
        ("from pickle import loads", "pickle"),
        ("os.system('ls ' + name)", "os.system"),
        ("subprocess.run(f'ls {name}', shell=True)", "shell="),
        ("eval(text)", "eval"),
        ("torch.load(path)", "torch.load"),
        ("torch.load(path, weights_only=False)", "torch.load"),
        ("import torch as t; t.load(path)", "torch.load"),
        ("from torch import load as read; read(path)", "torch.load"),
        ("numpy.load(path, allow_pickle=True)", "allow_pickle="),
        ("text = connection.recv()", ".recv()"),
        ("dist.all_gather_object(found, own)", "all_gather_object"),
        ("import torch.distributed as d; d.broadcast_object_list(found, src=0)", "broadcast_object_list"),
        ("gather = torch.distributed.gather_object", "gather_object"),
        ("from torch.distributed import scatter_object_list", "scatter_object_list"),
        ("getattr(dist, 'recv_object_list')(found)", "recv_object_list"),
        ("from concurrent.futures import ProcessPoolExecutor", "concurrent.futures.ProcessPoolExecutor"),
        ("from multiprocessing.connection import Listener", "multiprocessing.connection.Listener"),
        ("context.Queue()", "multiprocessing.Queue"),
        ("import torch; torch.multiprocessing.spawn(main)", "torch.multiprocessing.spawn"),
        ("from torch.distributed import checkpoint", "torch.distributed.checkpoint"),
    ],
)
def test_a_planted_line_is_found(tmp_path: Path, line: str, what: str) -> None:
    for package in PACKAGES:
        (tmp_path / package).mkdir()
    (tmp_path / "pyrocshmem" / "planted.py").write_text(f"{line}\n")
    assert violations(tmp_path) == [f"pyrocshmem/planted.py:1: {what}"]


@pytest.mark.parametrize(
    "line",
    [
        "torch.load(path, weights_only=True)",
        "numpy.load(path, allow_pickle=False)",
        "dist.recv(hidden, rank - 1)",
        "json.loads(reply)",
        "dist.all_gather(found, own)",
        "from concurrent.futures import ThreadPoolExecutor",
        "import queue; queue.Queue()",
    ],
)
def test_a_harmless_line_is_let_through(tmp_path: Path, line: str) -> None:
    (tmp_path / "pyrocshmem").mkdir()
    (tmp_path / "pyrocshmem" / "planted.py").write_text(f"{line}\n")
    assert violations(tmp_path) == []


def test_scripts_evaluate_only_fixed_text() -> None:
    """Words that a user gives stay words: no unquoted `$@`, and `eval` only of text without a value in it."""
    scripts = [path for path in (*ROOT.glob("*.sh"), *ROOT.glob("*/*.sh")) if ".venv" not in path.parts]
    assert len(scripts) > 4
    for path in scripts:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            code = line.partition(" #")[0] if not line.lstrip().startswith("#") else ""
            where = f"{path.name}:{number}: {line}"
            assert not re.search(r"\beval\b(?!\s+'[^']*'\s*$)", code), where
            assert not re.search(r'(?<!")\$[@*](?!")', code.replace('"$@"', "")), where


def test_heaps_and_allocations_are_not_pickled() -> None:
    with Heap(MIB) as heap, finegrained_alloc.alloc(5000, "host") as memory:
        for thing in (heap, memory, finegrained_alloc.open_handle(memory.export())):
            for attempt in (pickle.dumps, copy.copy):
                with pytest.raises(TypeError, match="can't be pickled or copied"):
                    attempt(thing)
        thing.close()


def _heap_of_two(group: ThreadGroup, seen: list[tuple[str, bytes]]) -> list[str]:
    with Heap(MIB, group) as heap:
        heap.barrier()
        heap.barrier()
        board = group._board
        assert isinstance(board, MemoryBoard)
        return [key for key, value in board._values.items() if b"handle" in value]


def test_handles_travel_through_the_store_as_text_and_do_not_stay_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[str, bytes]] = []
    honest = MemoryBoard.set

    def watched(board: MemoryBoard, key: str, value: bytes) -> None:
        seen.append((key, value))
        honest(board, key, value)

    monkeypatch.setattr(MemoryBoard, "set", watched)
    assert spawn_threads(_heap_of_two, 2, seen) == [[], []]
    offers = [value for _, value in seen if b'"handles"' in value]
    assert len(offers) == 2
    for offer in offers:
        facts = json.loads(offer[offer.index(b"{") :])
        (handle,) = facts["handles"]
        assert len(bytes.fromhex(handle)) == finegrained_alloc.handle_bytes()


def _announces(group: ThreadGroup, nbytes: int, numbers: threading.local) -> tuple[str, int]:
    """What a rank says whose peer exports sound memory of `nbytes` bytes, which is not the size that was agreed."""
    numbers.rank = group.rank
    error, _ = raised_by(lambda: Heap(MIB, group))
    with Heap(MIB, group) as heap:
        return str(error), int(heap.ones(8).sum())


@pytest.mark.parametrize("nbytes", [4096, 4 * MIB])
def test_a_peer_s_size_is_checked_before_it_is_used(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    numbers, planted = threading.local(), []
    honest = finegrained_alloc.Allocation.export

    def other_memory(memory: finegrained_alloc.Allocation) -> bytes:
        if numbers.rank == 1 and not planted:
            planted.append(finegrained_alloc.alloc(nbytes, "host"))
            return honest(planted[0])
        return honest(memory)

    monkeypatch.setattr(finegrained_alloc.Allocation, "export", other_memory)
    ends = spawn_threads(_announces, 2, nbytes, numbers)
    planted[0].free()
    for text, total in ends:
        assert f"rank 0 could not map the heap of rank 1: its handle stands for {nbytes} bytes" in text
        assert total == 8


@pytest.mark.parametrize("message", [b"", b"\x01", (1000).to_bytes(4, "little") + b"zeros"])
def test_a_damaged_message_is_an_error(message: bytes) -> None:
    first, second = ThreadGroup.create(2)
    second._board.set(second._key("0/1"), message)
    with pytest.raises(ShmemError, match="damaged"):
        first.exchange(b"", "zeros", 5.0)


def test_files_have_no_names_and_are_closed_once_the_heap_is_there() -> None:
    def opened() -> list[str]:
        links = []
        for descriptor in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                links.append(os.readlink(descriptor))
        return [link for link in links if link.startswith("/dev/shm/")]

    before = opened()
    with finegrained_alloc.alloc(4096, "host"):
        (file,) = set(opened()) - set(before)
        assert re.fullmatch(r"/dev/shm/#\d+ \(deleted\)", file)
    with Heap(MIB):
        assert opened() == before

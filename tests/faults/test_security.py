"""What another user, or a damaged message, could get at: names, modes, handles, sizes from peers, shells.

Files are private, unguessable and checked when opened: tests/faults/test_alloc_faults.py, test_forming_faults.py and
tests/finegrained_alloc/test_host.py. Here: nothing is unpickled that a peer sent, handles travel through the group's
store alone and don't stay there, sizes that peers announce are checked, no command goes through a shell.
"""

import ast
import contextlib
import copy
import json
import os
import pickle
import re
import threading
from pathlib import Path

import pytest

import finegrained_alloc
from pyrocshmem import Heap, ShmemError, ThreadGroup, spawn_threads
from pyrocshmem.boards import MemoryBoard
from tests.faults.heap_support import MIB, raised_by

TIER = 0
pytestmark = pytest.mark.cpu

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    "pyrocshmem", "stream_k", "collectives", "finegrained_alloc", "reference", "benchmarks", "examples",
)  # fmt: skip
# Between a parent and the ranks that it started, through a pipe that nobody else has.
PICKLES = ("pyrocshmem/launch.py", "pyrocshmem/rank_process.py")
UNPICKLERS = ("pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve")
SHELLS = ("os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput")


def violations(root: Path) -> list[str]:
    """Lines that unpickle, evaluate text or start a shell, as `file:line: what`."""
    found = []
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            name = path.relative_to(root).as_posix()
            for node in ast.walk(ast.parse(path.read_text(), name)):
                what = _suspect(node)
                if what and not (what in UNPICKLERS and name in PICKLES):
                    found.append(f"{name}:{getattr(node, 'lineno', 0)}: {what}")
    return found


def _suspect(node: ast.AST) -> str:
    if isinstance(node, ast.Import | ast.ImportFrom):
        module = getattr(node, "module", "") or ""
        return next((n for n in (module, *(a.name for a in node.names)) if n in UNPICKLERS), "")
    if not isinstance(node, ast.Call):
        return ""
    called = ast.unparse(node.func)
    if called in ("eval", "exec", *SHELLS):
        return called
    through_shell = any(k.arg == "shell" and ast.unparse(k.value) != "False" for k in node.keywords)
    loads = called == "torch.load" and not any(
        k.arg == "weights_only" and ast.unparse(k.value) == "True" for k in node.keywords
    )
    return "shell=" if through_shell else "torch.load" if loads else ""


def test_nothing_is_unpickled_evaluated_or_given_to_a_shell() -> None:
    assert violations(ROOT) == []


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("import pickle", "pickle"),
        ("from pickle import loads", "pickle"),
        ("os.system('ls ' + name)", "os.system"),
        ("subprocess.run(f'ls {name}', shell=True)", "shell="),
        ("eval(text)", "eval"),
        ("torch.load(path)", "torch.load"),
    ],
)
def test_a_planted_line_is_found(tmp_path: Path, line: str, what: str) -> None:
    for package in PACKAGES:
        (tmp_path / package).mkdir()
    (tmp_path / "pyrocshmem" / "planted.py").write_text(f"{line}\n")
    assert violations(tmp_path) == [f"pyrocshmem/planted.py:1: {what}"]


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
    offers = [value for _, value in seen if b'"handle"' in value]
    assert len(offers) == 2
    for offer in offers:
        facts = json.loads(offer[offer.index(b"{") :])
        assert len(bytes.fromhex(facts["handle"])) == finegrained_alloc.handle_bytes()


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

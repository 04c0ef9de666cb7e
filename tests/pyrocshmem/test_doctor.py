"""`python -m pyrocshmem doctor`: every check finds what it is there for, and says what to do about it."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from pyrocshmem import RankResult, doctor, finegrained_alloc, info, launching, machine, target
from pyrocshmem.__main__ import app
from pyrocshmem.doctor import FAULT, NOTE, OK, Finding

TIER = 2


def only(findings: Iterator[Finding], check: str) -> Finding:
    (found,) = [finding for finding in findings if finding.check == check]
    return found


@pytest.mark.alone
def test_all_checks_and_a_self_test() -> None:
    ended = CliRunner().invoke(app, ["doctor", "--plain", "--seconds", "0.2", "--ranks", str(ranks())])
    lines = ended.output.splitlines()
    assert ended.exit_code == 0, ended.output
    checks = (
        "target",
        "C library",
        "peers",
        "IPC",
        "heap size",
        "/dev/shm",
        "container",
        "open files",
        "ptrace",
        "clock",
        "self-test",
    )
    for check in checks:
        assert any(f" {check}: " in line for line in lines), ended.output
    (tested,) = [line for line in lines if " self-test: " in line]
    assert f"{ranks()} processes share memory" in tested
    assert tested.endswith(", 0 wrong elements")
    assert lines[-1].endswith(", 0 faults")


def ranks() -> int:
    return min(doctor.default_ranks(), 2)


@pytest.mark.cpu
def test_a_fault_is_the_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Iterator[Finding]:
        raise OSError("no such machine")

    monkeypatch.setattr(doctor, "check_target", broken)
    monkeypatch.setattr(doctor, "check_ranks", lambda *arguments: iter(()))
    ended = CliRunner().invoke(app, ["doctor", "--plain"])
    assert ended.exit_code == 1
    assert "FAULT target: OSError: no such machine -> " in ended.output
    assert ended.output.rstrip().endswith(", 1 faults")
    assert " /dev/shm: " in ended.output, "the others go on"


@pytest.mark.cpu
def test_a_library_that_is_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_built(backend: str) -> None:
        raise finegrained_alloc.NotBuilt("it is not built")

    monkeypatch.setattr(finegrained_alloc, "available", not_built)
    found = only(doctor.check_target(), "C library")
    assert (found.verdict, found.found) == (FAULT, "it is not built")
    assert "finegrained_alloc/build.sh" in found.advice


@pytest.mark.cpu
def test_whether_heaps_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    found = only(doctor.check_growth(), "heap size")
    assert found.verdict == OK
    assert found.found.startswith("grows with what is on it, up to ")
    assert [cell for cell in info.heap_table().columns[2].cells if "what it needs, up to " in str(cell)]

    with monkeypatch.context() as patch:  # no other process can map it so
        patch.setattr(doctor, "_OPENER", "raise SystemExit('no descriptor')")
        found = only(doctor.check_growth(), "heap size")
    assert (found.verdict, found.found) == (
        NOTE,
        "0.1 GiB when it forms, since it can't grow: no descriptor",
    )
    assert "PYROCSHMEM_HEAP_BYTES" in found.advice

    def refuse(*arguments: object) -> None:
        raise finegrained_alloc.Unavailable("no virtual memory here")

    monkeypatch.setattr(finegrained_alloc, "reserve", refuse)
    found = only(doctor.check_growth(), "heap size")
    assert (found.verdict, found.found) == (
        NOTE,
        "0.1 GiB when it forms, since it can't grow: no virtual memory here",
    )
    table = info.heap_table()
    assert "0.1 GiB at once: no virtual memory here" in [str(cell) for cell in table.columns[2].cells]


@pytest.mark.cpu
def test_a_small_dev_shm_and_none(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = SimpleNamespace(total=64 << 20, used=0, free=64 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: sizes)
    room = only(doctor.check_shared_memory(), "/dev/shm")
    assert (room.verdict, room.found) == (FAULT, "0.1 GiB, 0.1 GiB free")
    assert "--shm-size" in room.advice
    for found, verdict in (
        ((True, "host: memfd, since /dev/shm holds no nameless files"), NOTE),
        ((False, "host: a file in /dev/shm: Function not implemented"), FAULT),
    ):
        monkeypatch.setattr(finegrained_alloc, "available", lambda backend, found=found: found)
        (finding,) = doctor.check_shared_memory()
        assert (finding.verdict, finding.found) == (verdict, found[1])
        assert "mount a tmpfs there" in finding.advice


@pytest.mark.cpu
def test_limits_of_a_container(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "container_limits", lambda: (3 << 30, 50))
    monkeypatch.setattr(doctor, "first_line", lambda path: {"ptrace_scope": "1"}[Path(path).name])
    monkeypatch.setattr(doctor.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda which: (64, 64))
    container, descriptors, ptrace = doctor.check_limits()
    assert "memory 3.0 GiB" in container.found
    assert container.found.endswith("tasks 50")
    assert (descriptors.verdict, descriptors.found) == (NOTE, "at most 64")
    assert "ulimit -n" in descriptors.advice
    assert (ptrace.verdict, "SYS_PTRACE" in ptrace.advice) == (NOTE, True)


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("files", "limits"),
    [
        ({"memory.max": str(3 << 30), "pids.max": "50"}, (3 << 30, 50)),
        ({"memory.max": "max", "pids.max": "max"}, (None, None)),
        ({"memory/memory.limit_in_bytes": str(3 << 30), "pids/pids.max": "50"}, (3 << 30, 50)),
        ({"memory/memory.limit_in_bytes": str(2**63 - 4096), "pids/pids.max": "max"}, (None, None)),
        ({}, (None, None)),
    ],
    ids=["v2", "v2 without limits", "v1", "v1 without limits", "nothing"],
)
def test_limits_of_both_cgroup_versions(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    files: dict[str, str],
    limits: tuple[int | None, int | None],
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    assert machine.container_limits() == limits


@pytest.mark.cpu
def test_a_handle_that_no_other_process_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    assert only(doctor.check_ipc(), "IPC").verdict == OK
    sealed = finegrained_alloc.Allocation.export

    def export(memory: finegrained_alloc.Allocation) -> bytes:
        handle = sealed(memory)
        memory.seal()
        return handle

    monkeypatch.setattr(finegrained_alloc.Allocation, "export", export)
    found = only(doctor.check_ipc(), "IPC")
    assert found.verdict == FAULT
    assert "can not map memory of this one: finegrained_alloc.library.StaleHandle: " in found.found
    assert "--ipc=host" in found.advice


@pytest.mark.cpu
@pytest.mark.alone
def test_a_clock_that_runs_at_half_its_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert only(doctor.check_clock(), "clock").verdict == OK
    honest = doctor.time.monotonic
    monkeypatch.setattr(
        doctor, "time", SimpleNamespace(monotonic=lambda: 2 * honest(), sleep=doctor.time.sleep)
    )
    # Where the processor is late by more than the clock's error, it says nothing: not a few times in a row.
    looks = (only(doctor.check_clock(), "clock") for _ in range(10))
    found = next(found for found in looks if found.verdict == FAULT)
    ratio = float(found.found.split()[4])
    assert 0.3 < ratio < 0.7, found
    assert "of their budget" in found.advice


@pytest.mark.cpu
@pytest.mark.parametrize(("apart", "kind"), [(True, "SYS"), (False, "NV18")])
def test_gpus_that_do_not_reach_one_another(monkeypatch: pytest.MonkeyPatch, apart: bool, kind: str) -> None:
    monkeypatch.setattr(target, "num_devices", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: not apart)
    monkeypatch.setattr(doctor, "links", lambda: {(0, 1): kind, (1, 0): kind})
    peers, link = doctor.check_peers()
    assert (peers.verdict, link.verdict) == ((FAULT, NOTE) if apart else (OK, OK))
    assert link.found == kind
    assert ("[(0, 1), (1, 0)]" in peers.found) == apart


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("end", "found", "advice"),
    [
        (RankResult(1, exitcode=-9), "rank 1: died (signal SIGKILL)", "look at this error"),
        (
            RankResult(1, None, RuntimeError(), "Traceback\n cuda: cuIpcOpenMemHandle: not supported\n"),
            "cuIpcOpenMemHandle: not supported",
            "--ipc=host",
        ),
        (RankResult(1, (0.1, 0.1, 20, 3)), "3 wrong elements", "data came late or broken"),
    ],
)
def test_a_self_test_that_fails(
    monkeypatch: pytest.MonkeyPatch, end: RankResult, found: str, advice: str
) -> None:
    ends = [RankResult(0, (0.1, 0.1, 20, 0)), end]
    monkeypatch.setattr(launching, "run_ranks", lambda *arguments, timeout: ends)
    (finding,) = doctor.check_ranks(2, 0.1)
    assert finding.verdict == FAULT
    assert found in finding.found
    assert advice in finding.advice

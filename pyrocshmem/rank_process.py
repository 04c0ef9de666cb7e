"""A rank's own side of `launch.spawn`: what the process does from its start to its end.

`rank_main` joins the group, runs the function, reports its result or exception through the pipe, and stays
until the parent has heard of every rank: only then may the memory that peers have mapped go.
"""

import contextlib
import ctypes
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from pyrocshmem import endings, groups, secret, target
from pyrocshmem.errors import describe
from pyrocshmem.groups import Group
from pyrocshmem.stores import store_board
from pyrocshmem.timeouts import init_seconds

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Job:
    """What a rank is told.

    `port` is the store's on the loopback interface; `call` the pickled (fn, args); `environment` what to run
    in, None: as inherited; `forked_by` the process whose child the rank is, None: a fork server's; `secret` what the
    ranks share, which nobody else may see.
    """

    rank: int
    world_size: int
    port: int
    call: bytes
    environment: dict[str, str] | None
    forked_by: int | None
    secret: bytes = field(repr=False)


def init_process_group(
    store: Any, rank: int, world_size: int, device: torch.device, shared: bytes | None
) -> None:
    """`torch.distributed.init_process_group` over `store`; `InitTimeout` names ranks that don't come. shared: the
    secret of the ranks, None: they have none."""
    # Before torch's own rendezvous, because this one names who is missing.
    launch = Group(store_board(dist.PrefixStore("launch", store), shared), rank, world_size, "launch")
    launch.introduce()
    nonces = launch.exchange(secret.nonce(), "starting the ranks")
    if shared is not None:
        secret.use(secret.of_ranks(shared, nonces))
    on_cpu = device.type == "cpu"
    if not on_cpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "gloo" if on_cpu else "cpu:gloo,cuda:nccl",
        store=dist.PrefixStore("torch", store),
        rank=rank,
        world_size=world_size,
        device_id=None if on_cpu else device,
    )
    groups.as_group(None)  # now, so that peers know of this process whatever becomes of it


def _die_with_parent(forked_by: int | None) -> None:
    """End this process when the one that asked for it ends, even if it is killed."""
    if forked_by is not None:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != forked_by:
            os._exit(1)  # it had ended before
        return
    # A fork server lives as long as any of its children, so its death tells nothing: watch the parent itself.
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_kill_when_ready, args=(parent.sentinel,), daemon=True).start()


def _kill_when_ready(sentinel: int) -> None:
    wait([sentinel])
    os.kill(os.getpid(), signal.SIGKILL)


def rank_main(job: Job, pipe: Connection) -> None:
    """Be rank `job.rank`. Doesn't return."""
    _die_with_parent(job.forked_by)
    # Ctrl-C reaches every process of a terminal; the parent ends its ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if job.environment is not None:
        os.environ.clear()
        os.environ.update(job.environment)
    value, error, text = None, None, ""
    try:
        fn, args = pickle.loads(job.call)
        _join(job)
        value = fn(job.rank, job.world_size, *args)
    except BaseException as raised:
        error, text = raised, traceback.format_exc()
    error = _report(pipe, value, error, text)
    if error is not None:  # after the report: the parent takes the first failure for the cause
        _tell_peers(describe(error))
    _leave(pipe)


def _tell_peers(message: str) -> None:
    with contextlib.suppress(RuntimeError, ValueError):  # the store may be what failed
        if dist.is_initialized():
            groups.as_group(None).abort(message)  # for peers that wait where this rank hasn't been yet
    endings.abort_all(message)
    groups.abort_all(message)


def _join(job: Job) -> None:
    """Make this process rank `job.rank` of a default process group."""
    device = target.device(job.rank)
    if device.type == "cpu":
        torch.set_num_threads(1)
        # Ranks of one machine: gloo must not depend on what the host name resolves to.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    seconds = timedelta(seconds=init_seconds())
    store = dist.TCPStore("127.0.0.1", job.port, is_master=False, timeout=seconds, wait_for_workers=False)
    init_process_group(store, job.rank, job.world_size, device, job.secret)


def _report(pipe: Connection, value: Any, error: BaseException | None, text: str) -> BaseException | None:
    """Send the rank's end; returns its error, which may be that the result can't be sent."""
    try:
        message = pickle.dumps((value, error, text))
        pickle.loads(message)  # some exceptions pickle, but can't be rebuilt
    except Exception as problem:
        if error is None:
            error = TypeError(f"the rank's result can't be sent: {problem}")
            text = f"{error}\n{traceback.format_exc()}"
        else:
            error = RuntimeError(describe(error))
        message = pickle.dumps((None, error, text))
    with contextlib.suppress(OSError):
        pipe.send_bytes(message)
    return error


def _leave(pipe: Connection) -> None:
    """Wait until every rank has finished with this one's memory, then end without running what might hang."""
    try:
        all_ok = pipe.recv_bytes() == b"\1"
    except (EOFError, OSError):
        all_ok = False
    with contextlib.suppress(Exception):
        endings.leave_all()
        if all_ok and dist.is_initialized():
            dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)

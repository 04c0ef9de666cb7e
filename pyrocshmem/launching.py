"""Start ranks: as processes (`spawn`), as threads (`spawn_threads`), or under torchrun (`from_torchrun`).

    def main(rank, world_size, shape):         # at the top level of a module, so that a rank can import it
        ...
        return something_picklable

    results = spawn(main, 4, (128, 64))        # the default process group is ready in every rank

Protocol: the parent hosts the rendezvous store, on the loopback interface, so that no rank's death takes it
away. A rank reports its result or its exception, then stays, memory and all, until the parent has heard of
every rank. When one fails, the others get a while to fail by themselves (their errors tell more), then they
are killed. No rank outlives the parent.

On the CPU target a server that has imported torch forks the ranks, which saves each of them 2 s.
"""

import contextlib
import itertools
import multiprocessing
import numbers
import os
import pickle
import socket
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import wait
from typing import Any

import torch
import torch.distributed as dist

from pyrocshmem import endings, secret, target
from pyrocshmem.environment import changed_environment
from pyrocshmem.errors import PeerAborted, describe
from pyrocshmem.groups import ThreadGroup
from pyrocshmem.rank_process import Job, init_process_group, rank_main
from pyrocshmem.results import RankResult, RanksFailed
from pyrocshmem.timeouts import init_seconds, wait_seconds
from pyrocshmem.torch_contexts import on_device

_TIMEOUT_S = 600.0
_GRACE_S = 5.0
_EXIT_S = 10.0
_LOOK_S = 1.0
_joined = itertools.count()  # process groups that `from_torchrun` has made


def spawn(
    fn: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    backend: str | None = None,
    timeout: float = _TIMEOUT_S,
) -> list[Any]:
    """Run `fn(rank, world_size, *args)` in `num_ranks` processes; the results in rank order.

    Each rank has the default process group (gloo, and NCCL or RCCL on GPUs) and, on GPUs, the GPU of its
    number as the current device. `fn` and `args` are pickled: call it in a file, under `if __name__ == "__main__":`.

    Args:
        backend: "cpu" or "gpu" instead of the target of this process.
        timeout: seconds until ranks that haven't finished are killed.

    Raises:
        ValueError: more ranks than GPUs, or a bad argument.
        RanksFailed: a rank raised, died, or ran out of time.
    """
    results, first = _run(fn, num_ranks, args, backend, timeout, _GRACE_S)
    if first is not None:
        raise RanksFailed(results) from first.exception
    return [result.value for result in results]


def run_ranks(
    fn: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    backend: str | None = None,
    timeout: float = _TIMEOUT_S,
) -> list[RankResult]:
    """As `spawn`, but returns every rank's end, and lets the others go on to theirs when one fails."""
    return _run(fn, num_ranks, args, backend, timeout, timeout)[0]


def spawn_threads(
    fn: Callable[..., Any], num_ranks: int, *args: Any, timeout: float = _TIMEOUT_S
) -> list[Any]:
    """Run `fn(group, *args)` in `num_ranks` threads, each with its `ThreadGroup`; the results in rank order.

    On GPUs thread r has GPU r as its current device. Raises as `spawn`, but can't kill threads that are late.
    `RuntimeError` on the CPU target for several threads with a Triton that is not one of the supported versions.
    """
    _check_num_ranks(num_ranks, target.backend() != "host", target.num_devices())
    _check_timeout(timeout)
    if num_ranks > 1 and target.interpreted():
        from pyrocshmem import interpreter

        interpreter.check_threads()
    results: dict[int, RankResult] = {}
    groups = ThreadGroup.create(num_ranks)

    def body(group: ThreadGroup) -> None:
        try:
            with on_device(target.device(group.rank)):
                value = fn(group, *args)
            results[group.rank] = RankResult(group.rank, value)
        except BaseException as error:
            results[group.rank] = RankResult(group.rank, None, error, traceback.format_exc())
            endings.abort_all(describe(error), group)
            group.abort(describe(error))

    threads = [threading.Thread(target=body, args=(group,), daemon=True) for group in groups]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout
    for thread in threads:
        thread.join(max(0.0, min(deadline - time.monotonic(), threading.TIMEOUT_MAX)))
    for rank in range(num_ranks):
        if rank not in results:
            results[rank] = RankResult(rank, None, TimeoutError(f"did not finish within {timeout:g} s"))
    first = _cause([result for result in results.values() if not result.ok])
    ends = [results[rank] for rank in range(num_ranks)]
    if first is not None:
        raise RanksFailed(ends) from first.exception
    return [end.value for end in ends]


def from_torchrun() -> tuple[int, int]:
    """Initialise the default process group in a process that torchrun started; returns (rank, world_size).

    The ranks share a secret where `PYROCSHMEM_SECRET` holds one, or the file that `PYROCSHMEM_SECRET_FILE` names.

    Raises `ValueError` when this is not such a process, there are more local ranks than GPUs, or the secret is too
    short or can be read by others; `InitTimeout` names the ranks that did not come.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    if absent := [name for name in names if name not in os.environ]:
        raise ValueError(
            f"not started by torchrun: {', '.join(absent)} not set; use `torchrun --nproc-per-node R`"
        )
    rank, world_size, local_rank = (int(os.environ[name]) for name in names[:3])
    if not dist.is_initialized():
        device = target.device(local_rank)
        shared = secret.from_environment()
        agent_hosts = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        store: Any = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=rank == 0 and not agent_hosts,
            timeout=timedelta(seconds=init_seconds()),
            wait_for_workers=False,
        )
        # A restart of the ranks meets the same store again, and so does a process group after one was destroyed.
        attempt = f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}.{next(_joined)}"
        prefixed = dist.PrefixStore(f"pyrocshmem/attempt{attempt}", store)
        init_process_group(prefixed, rank, world_size, device, shared)
    return rank, world_size


def _check_num_ranks(num_ranks: int, on_gpu: bool, num_gpus: int) -> None:
    if isinstance(num_ranks, bool) or not isinstance(num_ranks, int):
        raise TypeError(f"num_ranks is a {type(num_ranks).__name__}, allowed is int")
    if num_ranks < 1:
        raise ValueError(f"{num_ranks} ranks asked, allowed are 1 or more")
    if on_gpu and num_ranks > num_gpus:
        raise ValueError(f"{num_ranks} ranks asked, each needs a GPU of its own, this machine has {num_gpus}")


def _check_timeout(timeout: Any) -> None:
    if isinstance(timeout, bool) or not isinstance(timeout, numbers.Real):
        raise TypeError(f"timeout is a {type(timeout).__name__}, allowed are seconds, a number")
    if not float(timeout) > 0:
        raise ValueError(f"timeout is {timeout}, allowed are seconds greater than 0")


def _listen() -> tuple[Any, int]:
    """(store, port) on the loopback interface: the store has no password, so other machines must not reach
    it. Users of this one may: see `secret`."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(128)
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return store, port


def _run(
    fn: Callable[..., Any],
    num_ranks: int,
    args: tuple[Any, ...],
    backend: str | None,
    timeout: float,
    grace: float,
) -> tuple[list[RankResult], RankResult | None]:
    """(every rank's end, the first failure)."""
    if backend not in (None, "cpu", "gpu"):
        raise ValueError(f"backend {backend!r}, allowed are None, 'cpu' and 'gpu'")
    own = "cpu" if target.backend() == "host" else "gpu"
    wanted = backend or own
    _check_num_ranks(num_ranks, wanted == "gpu", torch.cuda.device_count())
    _check_timeout(timeout)
    # Here rather than in every rank.
    init_seconds()
    wait_seconds()
    try:
        call = pickle.dumps((fn, args))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"ranks can't be given {fn!r} and its arguments: {error}; fn must be importable"
        ) from error
    fork = target.interpreted() and wanted == own
    changes: dict[str, str | None] = {}
    if wanted != own:
        changes = {"PYROCSHMEM_BACKEND": wanted, "TRITON_INTERPRET": None}
    context: Any = multiprocessing.get_context("forkserver" if fork else "spawn")
    if fork:
        # The first launch of a kernel would import the second.
        context.set_forkserver_preload(["pyrocshmem.launching", "triton.experimental.gluon"])
    store, port = _listen()
    shared = secret.make()
    ranks: list[_Rank] = []
    try:
        with changed_environment(changes):
            for rank in range(num_ranks):
                environment = dict(os.environ) if fork else None
                forked_by = None if fork else os.getpid()
                job = Job(rank, num_ranks, port, call, environment, forked_by, shared)
                ranks.append(_Rank(context, job))
        return _collect(ranks, timeout, grace)
    except BaseException:  # Ctrl-C, or a rank that didn't start: don't wait for ranks that nobody will hear
        for each in ranks:
            each.process.kill()
        raise
    finally:
        for each in ranks:
            each.end()
        del store


class _Rank:
    """The parent's side of a rank."""

    def __init__(self, context: Any, job: Job) -> None:
        self.rank = job.rank
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=rank_main, args=(job, theirs), name=f"pyrocshmem-rank{job.rank}"
        )
        self.process.start()
        theirs.close()

    def has_ended(self) -> bool:
        """Whether it has reported or died. A process that it has forked may keep the pipe, and the sentinel, open."""
        return self.pipe.poll() or not self.process.is_alive()

    def result(self) -> RankResult:
        """The end that a rank that has ended has reported, or that it died."""
        try:
            # Asked once more: it may have reported since, and then died. Of nothing pickle makes an EOFError, too.
            value, error, text = pickle.loads(self.pipe.recv_bytes() if self.pipe.poll() else b"")
        except (EOFError, OSError):
            self.process.join()
            return RankResult(self.rank, exitcode=self.process.exitcode)
        except Exception as problem:  # the bytes came, but hold what this process can't rebuild
            return RankResult(self.rank, None, problem, traceback.format_exc())
        return RankResult(self.rank, value, error, text)

    def give_up(self, why: str) -> RankResult:
        self.process.kill()
        return RankResult(self.rank, None, TimeoutError(why))

    def release(self, all_ok: bool) -> None:
        """Let the rank end; `all_ok` says whether it can expect the others to take part in that."""
        with contextlib.suppress(OSError):
            self.pipe.send_bytes(b"\1" if all_ok else b"\0")

    def end(self) -> None:
        self.process.join(_EXIT_S if self.process.is_alive() else 0)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.pipe.close()
        self.process.close()


def _collect(ranks: list[_Rank], timeout: float, grace: float) -> tuple[list[RankResult], RankResult | None]:
    results: dict[int, RankResult] = {}
    failed: list[RankResult] = []  # in the order in which they came
    deadline, why = time.monotonic() + timeout, f"did not finish within {timeout:g} s"
    while pending := [each for each in ranks if each.rank not in results]:
        wait([each.pipe for each in pending], max(0.0, min(_LOOK_S, deadline - time.monotonic())))
        ended = [each for each in pending if each.has_ended()]
        for each in ended or (pending if time.monotonic() >= deadline else []):
            result = results[each.rank] = each.result() if ended else each.give_up(why)
            if result.ok:
                continue
            if not failed and time.monotonic() + grace < deadline:
                deadline = time.monotonic() + grace
                why = f"did not finish within {grace:g} s of the failure of rank {result.rank}"
            failed.append(result)
    for each in ranks:
        each.release(not failed)
    return [results[each.rank] for each in ranks], _cause(failed)


def _cause(failed: Sequence[RankResult]) -> RankResult | None:
    """The failure, of those in order of time, that is not one of hearing of another's."""
    causes = [result for result in failed if not isinstance(result.exception, PeerAborted)]
    return next(iter([*causes, *failed]), None)

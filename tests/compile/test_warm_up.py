"""What is compiled for calls of other numbers of rows: nothing, once they were warmed up; a few kernels, otherwise."""

import multiprocessing
import random
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.compile import worker

TIER = 3
pytestmark = pytest.mark.cpu

N, K, ROWS = 8192, 3584, 6000
# Of all-scatters: the first rows of a tile row leave SMs idle for longer than an exchange takes, the others don't.
WHERE_PLACEMENTS_CHANGE = range(1150, 1220)
GEMMS = (
    "gemm",
    "gemm_all_reduce",
    "gemm_reduce_scatter",
    "gemm_all_scatter",
    "all_gather_gemm",
    "gemm_rms_norm_all_scatter",
)
OPS = (*GEMMS, "all_reduce", "all_gather", "all_reduce_rms_norm", "rms_norm")


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessPoolExecutor]:
    context = multiprocessing.get_context("forkserver")
    made = ProcessPoolExecutor(1, context, worker.prepare, ("", str(tmp_path_factory.mktemp("warm"))))
    yield made
    made.shutdown(cancel_futures=True)


def compiled(
    op: str,
    warmed: bool,
    seed: int,
    specialized: bool = False,
    between: bool = True,
    sizes: tuple[int, int] = (N, K),
) -> tuple[int, int, int, int]:
    """(kernels that `warm_up` compiled, those compiled for many numbers of rows after that, votes on these, launches
    while warming up), for sm_90, without compiling them. specialized: counts are, as Triton has it by default.
    between: whether `warm_up` looks where placements change."""
    import contextlib
    from unittest import mock

    import torch
    from triton.runtime import jit

    import pyrocshmem
    from pyrocshmem import counts, testing
    from pyrocshmem.calls import kernel_launch
    from pyrocshmem.calls.op import Sizes, find
    from pyrocshmem.calls.workspace import Workspace
    from pyrocshmem.stream_k.local_gemm import blas
    from pyrocshmem.testing.targets import pretend

    made: list[str] = []

    class Kernel:
        n_regs, n_spills, function = 1, 0, 0
        metadata = mock.Mock(num_warps=1, shared=0)

        def __getitem__(self, grid: object) -> object:
            return lambda *args: None

    def compile_nothing(
        self: jit.JITFunction, key: str, signature: object, device: int, *rest: object
    ) -> Kernel:
        made.append(self.__name__)
        self.device_caches[device][0][key] = kernel = Kernel()
        return kernel

    launched = mock.Mock(return_value=None)
    plain = {"packed": lambda count: count} if specialized else {}
    with contextlib.ExitStack() as patched, torch.no_grad():
        patched.enter_context(pretend("sm_90"))
        for place, name, new in (
            (jit.JITFunction, "_do_compile", compile_nothing),
            (kernel_launch.Launch, "__call__", launched),
            (torch.Tensor, "copy_", lambda x, *rest, **options: x),
            (blas, "_multiply", lambda *_: None),
        ):
            patched.enter_context(mock.patch.object(place, name, new))
        for name, new in plain.items():
            patched.enter_context(mock.patch.object(counts, name, new))
        patched.enter_context(mock.patch("pyrocshmem.calls.row_copy.RowCopy.__call__"))
        if not between:
            patched.enter_context(mock.patch("pyrocshmem.warming.bisect"))
        for kernel, *_ in kernel_launch._known:
            kernel.device_caches.clear()
        kernel_launch._known.clear()
        heap = testing.PlanningHeap(2)
        space = heap.workspace = Workspace(heap)
        columns, inner = sizes
        width = columns if op in GEMMS else inner
        dtype = torch.bfloat16
        if warmed:
            pyrocshmem.warm_up((op, width, inner), rows=ROWS, dtype=dtype, workspace=space, threads=1)
        during, before = launched.call_count, len(made)
        call = find(op).sized(Sizes(width, inner, ROWS, dtype, space))
        draw = random.Random(seed)
        votes = mock.Mock(side_effect=heap.vote)
        with mock.patch.object(heap, "vote", votes):
            for rows in [
                ROWS,
                *(draw.randrange(1, ROWS) for _ in range(150)),
                *(draw.randrange(1, 200) for _ in range(50)),
                *WHERE_PLACEMENTS_CHANGE,
            ]:
                call(rows)
        return before, len(made) - before, votes.call_count, during


@pytest.mark.parametrize("op", OPS)
def test_nothing_is_compiled_after_warming_up(op: str, pool: ProcessPoolExecutor) -> None:
    seed = random.randrange(1 << 30)
    kernels, later, votes, launches = pool.submit(compiled, op, True, seed).result()
    assert (later, votes, launches) == (0, 0, 0), f"seed {seed}"
    assert 0 < kernels <= 40


def test_buffers_between_numbers_of_rows(pool: ProcessPoolExecutor) -> None:
    """The control: a larger buffer, on which ranks vote, where `warm_up` doesn't look for the rows in between."""
    assert pool.submit(compiled, "gemm_all_scatter", True, 1, between=False).result()[2] > 0


def test_what_is_compiled_without(pool: ProcessPoolExecutor) -> None:
    """The controls: kernels of other tiles, a few, and votes on the call and its buffers; many more where counts are
    specialized."""
    none, later, votes, _ = pool.submit(compiled, "gemm_reduce_scatter", False, 1).result()
    assert none == 0
    assert 0 < later <= 40
    assert 0 < votes <= 30
    # Where more kernels are ours than the BLAS'.
    plain, specialized = (
        pool.submit(compiled, "gemm_reduce_scatter", False, 1, each, sizes=(4096, 2048)).result()[1]
        for each in (False, True)
    )
    assert specialized > 1.2 * plain

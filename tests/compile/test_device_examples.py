"""The examples of device kernels compile for every target through `pyrocshmem.testing`, and keep the rules."""

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest

from pyrocshmem.testing import TARGETS
from tests.compile import assembly as rules
from tests.compile import device_examples
from tests.compile.conftest import _pool

TIER = 1


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessPoolExecutor]:
    pool = _pool(1, "", tmp_path_factory.mktemp("examples"))
    yield pool
    pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("target", TARGETS)
def test_examples(target: str, process: ProcessPoolExecutor) -> None:
    """Each is one kernel, which settles what it wrote before it releases at system scope, and acquires what it polls
    for."""
    found = process.submit(device_examples.compile_examples, target).result()
    names = {name: [kernel.kernel for kernel in kernels] for name, kernels in found.items()}
    assert names == {
        "put": ["put_kernel"],
        "put_signal_wait": ["send_kernel"],
        "ring_all_gather": ["ring_kernel"],
    }
    for name, (kernel,) in found.items():
        assert kernel.target == target
        for rule in (
            rules.unsettled_releases,
            rules.hasty_releases,
            rules.misplaced_releases,
            rules.unacquired_polls,
        ):
            assert not rule(kernel), (name, rule.__name__)
        # Of `signal.begin` and of what the kernel itself tells; the ticket of `signal.end` is for this GPU alone.
        scopes = rules.release_scopes(kernel)
        assert scopes["sys"] >= 3, (name, scopes)
        assert (scopes["gpu"], scopes["other"]) == (1, 0), (name, scopes)
        assert kernel.spills == 0
        assert (kernel.num_warps, kernel.programs) == (4, 4)


def test_what_is_known_is_not_compiled_again(process: ProcessPoolExecutor) -> None:
    """But a tensor of another alignment is another kind: Triton's code for the first would be wrong."""
    first, said, unaligned = process.submit(device_examples.compile_again, "gfx942").result()
    assert (first, unaligned) == (1, 1)
    assert said == "the call compiled nothing for gfx942: it launches nothing, or nothing that is new"


@pytest.mark.parametrize("target", TARGETS)
def test_one_kernel(target: str, process: ProcessPoolExecutor) -> None:
    four, eight, said = process.submit(device_examples.compile_one, target).result()
    assert (four.kernel, four.constants) == ("put_kernel", {"WORLD": "4", "BLOCK": "256"})
    assert [compiled.num_warps for compiled in (four, eight)] == [4, 8]
    assert four.text != eight.text
    assert (".target sm_90" if four.nvidia else f'{target}"') in four.text
    assert 0 < four.registers <= 255
    assert bool(four.cubin) == four.nvidia
    assert said == "kernel is a function, a @triton.jit function is needed"


def test_the_page_says_how(process: ProcessPoolExecutor) -> None:
    one, called = process.submit(device_examples.run_page).result()
    assert [len(one.split()), called.split()[0]] == [3, "put_kernel"]
    assert called.endswith(" 0"), "spills"

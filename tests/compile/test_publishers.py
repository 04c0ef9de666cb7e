"""No kernel that publishes escapes the checks of its assembly: every one is compiled, by a case or here."""

from pathlib import Path

import pytest

from pyrocshmem.testing import TARGETS
from tests.compile import assembly as rules
from tests.compile import publishers
from tests.compile.conftest import Rest

TIER = 3
ROOT = Path(__file__).resolve().parents[2]
REST = {"rms_norm_kernel", "meet_kernel", "ring_kernel"}
ATOMICS = "count_kernel"  # of the device API


def test_every_kernel_that_publishes_is_compiled(rest: Rest) -> None:
    graph, telling = publishers.call_graph(ROOT), publishers.publishers(ROOT)
    roots = rest[0].result()
    assert "stream_k_kernel" in roots
    assert {"_raise_arrived", "announce_partial", "_raise_word"} <= telling
    missing = telling - publishers.reached(graph, roots | REST)
    assert not missing, f"publish, and no case compiles them: {', '.join(sorted(missing))}"


def test_a_function_that_nothing_launches_is_missed() -> None:
    """The control: without the launches of `REST`, and with only one op."""
    graph, telling = publishers.call_graph(ROOT), publishers.publishers(ROOT)
    assert telling >= REST
    seen = publishers.reached(graph, {"stream_k_kernel", "announce_partial"})
    assert "announce_partial" in seen
    assert REST | {"_raise_arrived", "announce_rows"} <= telling - seen


@pytest.mark.parametrize("target", TARGETS)
def test_the_rest(rest: Rest, target: str) -> None:
    """Barrier, drain and scope before every release; a poll past the caches, acquired."""
    kernels = rest[1][target].result()
    atomics = next(kernel for kernel in kernels if kernel.kernel == ATOMICS)
    kernels = [kernel for kernel in kernels if kernel is not atomics]
    assert {kernel.kernel for kernel in kernels} == REST
    # The assembler may leave out a load whose value nobody needs, but not what makes it acquire.
    acquiring = [kernel for kernel in kernels if kernel.nvidia and kernel.count(r"ld\.acquire")]
    assert bool(acquiring) == target.startswith("sm_")
    assert all("CCTL.IVALL" in kernel.machine_code() for kernel in acquiring)
    # A record's code is stored last, for the host, which then reads the rest.
    assert all(kernel.count(r"fence\.acq_rel\.sys;") for kernel in acquiring)
    for kernel in kernels:
        assert not rules.unsettled_releases(kernel), kernel.kernel
        assert not rules.hasty_releases(kernel), kernel.kernel
        assert not rules.misplaced_releases(kernel), kernel.kernel
        assert not rules.unacquired_polls(kernel), kernel.kernel
        scopes = rules.release_scopes(kernel)
        assert scopes["other"] == 0
        assert scopes["sys"] > 0
    assert not rules.hasty_releases(atomics)

"""What every test shares: the target, the order, the skips and the passes.

A pytest process has one target, since `TRITON_INTERPRET` is read when Triton is imported. So `tests/run.sh`
starts one process for each pass (`--pass`):

- `cpu`      everything but `tests/compile`, on the CPU target; where there are GPUs, without the tests
             marked `gpu`, which have their own pass
- `compile`  `tests/compile` alone, with `TRITON_INTERPRET=0`: compiles for GPUs that need not exist
- `gpu`      the tests marked `gpu` and those that run on any target; not those marked `cpu`

Without `--pass`, pytest runs what it is given on the target that the environment selects.

Within a pass, modules run in the order of their constant `TIER`: 0 cheapest .. 4 slowest, 2 if not set.
`--max-tier N` leaves out dearer ones. `--alone only` and `--alone without` take a pass apart, for the second part to
run several tests at once. `--ranks-a-gpu N` runs the tests that want more ranks than there are GPUs, and no others,
with up to N ranks on each (`tests/sharing.py`). `--tally FILE` writes the counts that `tests/run.sh` adds up.
`-m fault --junitxml FILE` runs the tests of the table of faults; `tests/faults/report.py` reads the file.
"""

import contextlib
import gc
import json
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import hypothesis
import pytest

from pyrocshmem import target  # before Triton: decides whether kernels are interpreted
from tests.faults import guard_list

# What this user has tuned must not count, in ranks and commands that tests start neither.
os.environ["PYROCSHMEM_TUNED"] = "none"

ROOT = Path(__file__).resolve().parents[1]
COMPILE_DIR = ROOT / "tests" / "compile"
DEFAULT_TIER = 2
TIERS = range(5)
SHARED_TIMEOUT_S = 400

# A rank on a shared core may be descheduled for longer than hypothesis' default of 200 ms an example.
hypothesis.settings.register_profile("pyrocshmem", deadline=None)
hypothesis.settings.load_profile("pyrocshmem")


def pytest_collection_finish() -> None:
    """What is loaded stays: who collects garbage in a test need not look through it, which takes 0.3 s each time."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """At the end of Python all is looked through, and what extensions call a leak is none."""
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _as_if_there_had_been_no_process_group() -> Iterator[None]:
    """What a test made and destroyed in this process: those that follow may compute alone again. (Nothing to do where
    no test has imported torch.)"""
    yield
    dist, bootstrap = sys.modules.get("torch.distributed"), sys.modules.get("pyrocshmem.groups")
    if dist and bootstrap and not dist.is_initialized():
        dist.distributed_c10d._backend = None
        bootstrap._names_used.clear()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("pyrocshmem")
    group.addoption("--pass", dest="test_pass", choices=("cpu", "compile", "gpu"), help="which pass this is")
    group.addoption("--max-tier", type=int, default=TIERS[-1], help="leave out modules with a higher TIER")
    group.addoption("--alone", choices=("only", "without"), help="the tests that others disturb, or the rest")
    group.addoption(
        "--ranks-a-gpu",
        type=int,
        default=1,
        help="only what wants more ranks than GPUs, up to so many on each",
    )
    group.addoption("--tally", metavar="FILE", help="write {passed, failed, skipped} as JSON to FILE")


def pytest_configure(config: pytest.Config) -> None:
    config.args[:] = paths_of_pass(config.args, config.getoption("test_pass"))
    if not config.args:
        pytest.exit("nothing of what was asked for belongs to this pass", pytest.ExitCode.NO_TESTS_COLLECTED)
    ranks_a_gpu = config.getoption("ranks_a_gpu")
    if ranks_a_gpu < 1:
        raise pytest.UsageError(f"--ranks-a-gpu is {ranks_a_gpu}, allowed are 1 or more")
    if ranks_a_gpu > 1:
        from tests import sharing

        stack = contextlib.ExitStack()
        stack.enter_context(sharing.shared(ranks_a_gpu))
        config.add_cleanup(stack.close)


def paths_of_pass(args: Iterable[str], test_pass: str | None) -> list[str]:
    """The path arguments that belong to a pass. A folder above `tests/compile` stands for it in its pass."""
    if test_pass is None:
        return list(args)
    kept = []
    for arg in args:
        path = Path(arg.split("::")[0]).resolve()
        inside = path == COMPILE_DIR or COMPILE_DIR in path.parents
        if test_pass == "compile" and path in COMPILE_DIR.parents:
            kept += [str(COMPILE_DIR)] if COMPILE_DIR.exists() else []
        elif inside == (test_pass == "compile"):
            kept.append(arg)
    return kept


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    test_pass = config.getoption("test_pass")
    skip_compile = test_pass in ("cpu", "gpu") or (test_pass is None and target.interpreted())
    return True if skip_compile and collection_path == COMPILE_DIR else None


def pytest_report_header(config: pytest.Config) -> str:
    test_pass = config.getoption("test_pass")
    return f"target: {_where(config)}" + (f" (pass: {test_pass})" if test_pass else "")


def _where(config: pytest.Config) -> str:
    if (ranks_a_gpu := config.getoption("ranks_a_gpu")) == 1:
        return target.describe()
    from tests import sharing

    return sharing.describe(ranks_a_gpu)


def _num_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _tier(item: pytest.Item) -> int:
    tier = getattr(getattr(item, "module", None), "TIER", DEFAULT_TIER)
    if tier not in TIERS:
        raise pytest.UsageError(f"{item.path}: TIER is {tier!r}, allowed are 0..{TIERS[-1]}")
    return tier


def _num_ranks(item: pytest.Item) -> int:
    """How many the test starts, 0 if it doesn't say."""
    marker = item.get_closest_marker("num_ranks")
    return marker.args[0] if marker else 0


def _skip_reason(item: pytest.Item, on_gpu: bool, num_gpus: int, ranks_a_gpu: int) -> str | None:
    if item.get_closest_marker("gpu") and not on_gpu:
        return "needs a GPU, this is the CPU target"
    if (marker := item.get_closest_marker("num_gpus")) and num_gpus < marker.args[0]:
        return f"needs {marker.args[0]} GPUs, this machine has {num_gpus}"
    num_ranks = _num_ranks(item)
    if on_gpu and num_ranks > num_gpus * ranks_a_gpu:
        each = f" with {ranks_a_gpu} ranks each" if ranks_a_gpu > 1 else ""
        return f"starts {num_ranks} ranks, this machine has {num_gpus} GPUs{each}"
    if ranks_a_gpu > 1 and (marker := item.get_closest_marker("gpu_a_rank")):
        return f"needs a GPU for each rank: {marker.args[0]}"
    if ranks_a_gpu > 1 and item.get_closest_marker("alone"):
        return "asserts on times, on free memory or on who comes first: needs a GPU for each rank"
    return None


def _left_to_another_pass(item: pytest.Item, test_pass: str | None, num_gpus: int) -> bool:
    if test_pass == "cpu":
        return num_gpus > 0 and item.get_closest_marker("gpu") is not None
    return test_pass == "gpu" and item.get_closest_marker("cpu") is not None


def _has_enough_gpus(item: pytest.Item, on_gpu: bool, num_gpus: int) -> bool:
    """Whether the test runs as well where each rank has a GPU of its own."""
    return not on_gpu or _num_ranks(item) <= num_gpus or item.get_closest_marker("cpu") is not None


def _mark_fault(item: pytest.Item, where: str) -> None:
    name = item.nodeid.partition("[")[0]
    if found := guard_list.properties_of(name):
        item.add_marker("fault")
        item.user_properties += [("test", name), ("target", where), *found]


def _keep_together(item: pytest.Item) -> None:
    """Tests that share what a module's fixture has made, ranks' ends for instance: one worker runs them, or each would
    make it anew."""
    made = {
        name: getattr(item, "callspec", None)
        for name, found in item._fixtureinfo.name2fixturedefs.items()
        if found[-1].scope == "module"
    }
    if made:
        which = [
            str(call.indices[name]) for name, call in sorted(made.items()) if call and name in call.params
        ]
        item.add_marker(pytest.mark.xdist_group("-".join((item.nodeid.partition("::")[0], *which))))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    on_gpu, num_gpus = not target.interpreted(), _num_gpus()
    test_pass, max_tier = config.getoption("test_pass"), config.getoption("max_tier")
    ranks_a_gpu = config.getoption("ranks_a_gpu")
    kept, dropped, where = [], [], _where(config)
    for item in items:
        if item.get_closest_marker("num_gpus"):
            item.add_marker("gpu")
        left_out = _tier(item) > max_tier or _left_to_another_pass(item, test_pass, num_gpus)
        if ranks_a_gpu > 1:
            left_out |= _has_enough_gpus(item, on_gpu, num_gpus)
            item.add_marker(pytest.mark.timeout(SHARED_TIMEOUT_S), append=False)
        if alone := config.getoption("alone"):
            left_out |= (item.get_closest_marker("alone") is not None) != (alone == "only")
        (dropped if left_out else kept).append(item)
        _mark_fault(item, where)
        _keep_together(item)
        if reason := _skip_reason(item, on_gpu and num_gpus > 0, num_gpus, ranks_a_gpu):
            item.add_marker(pytest.mark.skip(reason=reason))
    items[:] = sorted(kept, key=_tier)  # stable: the order inside a module stays
    if dropped:
        config.hook.pytest_deselected(items=dropped)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if tally := config.getoption("tally"):
        outcomes = ("passed", "xfailed", "failed", "error", "skipped")
        count = {k: len(terminalreporter.getreports(k)) for k in outcomes}
        result = {
            "passed": count["passed"] + count["xfailed"],
            "failed": count["failed"] + count["error"],
            "skipped": count["skipped"],
        }
        Path(tally).write_text(json.dumps(result))

"""`python -m pyrocshmem tune`: what it tries, what it takes for right, and the whole of it."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from triton.runtime.errors import OutOfResources

from pyrocshmem import Heap, stream_k, target, warming
from pyrocshmem.benchmarks import trial, tune
from pyrocshmem.benchmarks.candidates import candidates
from pyrocshmem.benchmarks.shapes import cases_of
from pyrocshmem.benchmarks.trial import Case, tune_case
from pyrocshmem.benchmarks.tune_command import app
from pyrocshmem.calls import kernel_launch
from pyrocshmem.calls.kernel_launch import Launch
from pyrocshmem.stream_k.choice import table
from pyrocshmem.stream_k.choice.cache import made_here
from pyrocshmem.stream_k.choice.config import Config
from pyrocshmem.stream_k.choice.gemm_model import balanced_programs
from pyrocshmem.stream_k.choice.placement import Variant, num_tiles, placements_by_op
from pyrocshmem.stream_k.choice.rules import cost_model
from pyrocshmem.stream_k.choice.tilings import SHARED_BYTES
from tests import commands
from tests.ranks import run_ranks, values
from tests.stream_k.test_tuned import CPU, HALF, forget

TIER = 3
pytestmark = pytest.mark.cpu

OPS = tuple(placements_by_op())


@pytest.fixture(autouse=True)
def _forgotten_afterwards() -> Iterator[None]:
    """What is remembered of the devices that a test made up, when these are gone."""
    yield
    forget()


@pytest.mark.parametrize("interpreted", [True, False])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("shape", [(16, 4096, 1024), (4096, 3584, 8192), (4091, 1801, 4104)], ids=str)
def test_candidates(
    op: str, shape: tuple[int, int, int], interpreted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cost model's choice and a few that can run, all different, each the one that its variant gives again."""
    processors = 6 if interpreted else 132
    monkeypatch.setattr(target, "CPU_PROGRAMS", processors)
    monkeypatch.setattr(target, "interpreted", lambda: interpreted)
    monkeypatch.setattr(target, "backend", lambda: "host" if interpreted else "cuda")
    forget()
    dtype = HALF if interpreted else torch.bfloat16
    ranks = 4 if op != "gemm" else 1
    found = candidates(op, shape, dtype, ranks, CPU)
    assert 2 <= len(found) <= 9
    assert next(iter(found)) == cost_model(op, *shape, dtype, ranks, CPU)
    for config, variant in found.items():
        table.check(op, config, CPU)
        assert variant.fitted(shape[0], shape[1], processors) == config
        if variant.most_programs:
            tiles = num_tiles(config, shape[0], shape[1])
            assert config.num_programs == balanced_programs(tiles, variant.most_programs)


@pytest.mark.parametrize(
    ("shape", "programs"),
    [((1995, 220, 621), 128), ((3133, 1998, 129), 264), ((5928, 1928, 368), 264)],
    ids=str,
)
def test_candidates_around_small_tiles(
    shape: tuple[int, int, int], programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stages fit, even where the model's tile has many; programs that share multiprocessors stay as many."""
    monkeypatch.setattr(target, "CPU_PROGRAMS", 132)
    monkeypatch.setattr(target, "interpreted", lambda: False)
    monkeypatch.setattr(target, "backend", lambda: "cuda")
    forget()
    found = list(candidates("gemm", shape, torch.bfloat16, 1, CPU))
    assert found[0].num_programs == programs
    for config in found:
        stage = 2 * (config.block_m + config.block_n) * config.block_k
        assert config.num_stages * stage <= SHARED_BYTES, config
    size = (found[0].block_m, found[0].block_n, found[0].num_warps)
    cut = [config for config in found if config.split in ("split_k", "stream_k")]
    assert {(config.block_m, config.block_n, config.num_warps) for config in cut} == {size}
    assert {config.num_programs for config in cut} == {programs if programs > 132 else 0}


class _Greedy:
    """A kernel that compiles, and then needs more than the device has."""

    arg_names, params = (), ()

    def warmup(self, *args: object, **options: object) -> Any:
        return self

    def __getitem__(self, grid: object) -> None:
        raise OutOfResources(401_408, 232_448, "shared memory")


def test_too_much_shared_memory_is_a_value_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "interpreted", lambda: False)
    monkeypatch.setattr(kernel_launch, "_current_device", lambda: 0)
    kernel = _Greedy()
    kernel.__name__ = "greedy_kernel"  # type: ignore[attr-defined]
    launch = Launch(kernel, 1, {}, 4, 8)
    text = "greedy_kernel needs 401408 bytes of shared memory a program, the device has 232448; .*num_stages"
    with pytest.raises(ValueError, match=text):
        launch.compile(())


def plants_a_wrong_result(rank: int, world_size: int) -> dict[str, Any]:
    """Two configurations, of which the other one is fast and wrong."""
    base = cost_model("gemm", 64, 48, 32, HALF, 1, CPU)
    other = dataclasses.replace(base, group_m=1)
    trial.candidates = lambda *_: {config: Variant(config) for config in (base, other)}
    real = stream_k.gemm

    def gemm(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor, config: Config) -> torch.Tensor:
        if config == base:
            return real(a, b, out=out, config=config)
        out.copy_(a @ b)
        # On one rank alone, in one element, by little: all ranks must drop it.
        out[3, 5] += 0.05 if rank == 1 else 0.0
        return out

    stream_k.gemm = gemm
    outcome = tune_case(Case("gemm", 64, 48, 32, HALF, 1), None, CPU, 1, 0)
    return {"config": outcome.entry.config, "wrong": outcome.wrong}


def refuses_on_a_rank(rank: int, world_size: int) -> dict[str, Any] | None:
    base = cost_model("gemm", 64, 48, 32, HALF, 1, CPU)
    other = dataclasses.replace(base, group_m=1)
    trial.candidates = lambda *_: {config: Variant(config) for config in (base, other)}

    def gemm(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor, config: Config) -> torch.Tensor:
        if config == other and rank == 1:
            raise ValueError("no room")
        return out.copy_(a @ b)

    stream_k.gemm = gemm
    return tune_case(Case("gemm", 64, 48, 32, HALF, 1), None, CPU, 1, 0).entry.config


def passes_over_a_sum(rank: int, world_size: int) -> tuple[bool, bool]:
    """Whether a right sum, and one that lacks a rank's share in a tile, are taken for right."""
    case = Case("gemm_all_reduce", 64, 48, 32, HALF, world_size, HALF)
    with Heap(16 << 20) as heap:
        found = trial._Trial(case, heap, CPU)
        base = cost_model(case.op, case.M, case.N, case.K, HALF, world_size, CPU, HALF)
        right = found.is_right(base)
        assert found.expected is not None
        found.expected[:32, :32] -= (found.operands.a @ found.operands.b)[:32, :32]
        return right, found.is_right(base)


def times_calls_of(microseconds: float) -> dict[str, Any]:
    """An entry for two configurations, the other one a fifth faster, as if a call took so long; how many calls were
    made in each graph, of how many copies of B."""
    base = cost_model("gemm", 64, 48, 32, HALF, 1, CPU)
    other = dataclasses.replace(base, group_m=1)
    trial.candidates = lambda *_: {config: Variant(config) for config in (base, other)}
    trial._GRAPH_BELOW_S = {"cpu": 200e-6}
    graphs: list[list[int]] = []
    read: list[tuple[int, Config]] = []

    def gemm(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor, config: Config) -> torch.Tensor:
        read.append((b.data_ptr(), config))
        return out.copy_(a @ b)

    def repeated(call: Callable[[], object], calls: int) -> Callable[[], None]:
        def replay() -> None:
            for _ in range(calls):
                call()

        return replay

    def time_in_turn(calls: Any, iters: int, device: torch.device) -> dict[str, tuple[float, ...]]:
        found = {}
        for name, (call, _) in calls.items():
            read.clear()
            call()
            graphs.append([len(read), len({place for place, _ in read})])
            found[name] = (1e-6 * microseconds * len(read) * (0.8 if read[0][1] == other else 1),) * iters
        return found

    stream_k.gemm, trial.repeated, trial.time_in_turn = gemm, repeated, time_in_turn
    entry = tune_case(Case("gemm", 64, 48, 32, HALF, 1), None, CPU, 3, 0).entry
    return {"entry": (entry.us, entry.cost_model_us, entry.timing), "graphs": graphs}


def times_short_and_long(rank: int, world_size: int) -> list[dict[str, Any]]:
    return [times_calls_of(microseconds) for microseconds in (50, 250)]


@pytest.mark.num_ranks(1)
def test_cases_of_microseconds_are_timed_as_graphs() -> None:
    """Of 20 calls that read copies of B in turn; times are a call's."""
    ((short, long),) = values(run_ranks(times_short_and_long, 1))
    assert short == {"entry": (40.0, 50.0, "graph"), "graphs": [[1, 1], *[[20, 20]] * 6]}
    assert long == {"entry": (200.0, 250.0, "eager"), "graphs": [[1, 1]] * 7}


def wins_by_chance(rank: int, world_size: int) -> tuple[dict[str, Any] | None, float, float]:
    """(configuration, time, the cost model's) of an entry where another one is the fastest of several, and no faster
    when only these two are timed."""
    base = cost_model("gemm", 64, 48, 32, HALF, 1, CPU)
    others = [dataclasses.replace(base, group_m=group) for group in (1, 2)]
    trial.candidates = lambda *_: {config: Variant(config) for config in (base, *others)}

    def medians(self: Any, configs: Any, iters: int) -> dict[Config, float]:
        several = len(dict.fromkeys(configs)) > 2
        return {config: 8e-6 if several and config == others[1] else 10e-6 for config in configs}

    trial._Trial.medians = medians  # type: ignore[method-assign]
    entry = tune_case(Case("gemm", 64, 48, 32, HALF, 1), None, CPU, 3, 0).entry
    return entry.config, entry.us, entry.cost_model_us


@pytest.mark.num_ranks(1)
def test_what_wins_must_win_again() -> None:
    assert values(run_ranks(wins_by_chance, 1)) == [(None, 10.0, 10.0)]


@pytest.mark.num_ranks(2)
def test_a_wrong_result_is_found_and_not_taken() -> None:
    for found in values(run_ranks(plants_a_wrong_result, 2)):
        assert found["config"] is None
        (text,) = found["wrong"]
        assert text.startswith("gemm 64 x 48 x 32: WRONG result with Config(")
        assert "group_m=1" in text


@pytest.mark.num_ranks(2)
def test_what_a_rank_refuses_no_rank_times() -> None:
    assert values(run_ranks(refuses_on_a_rank, 2)) == [None, None]


@pytest.mark.num_ranks(2)
def test_sums_of_rounded_partials_are_held_to_their_bound() -> None:
    assert values(run_ranks(passes_over_a_sum, 2)) == [(True, False)] * 2


@pytest.mark.num_ranks(2)
def test_tune(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks, small products; its table is what `choose` looks up, and a second run adds to it."""
    path = tmp_path / "mine.json"
    common = ("-n", "2", "--iters", "1", "--commit", "0123", "--out", str(path))
    options = ("--ops", "gemm,gemm_all_reduce", "--shapes", "20,9,8", "--partial-dtype", "float16")
    done = commands.start("pyrocshmem", "tune", *options, *common)
    assert done.returncode == 0, done.stdout + done.stderr
    for text in ("gemm_all_reduce 20 x 9 x 8, float16 partials", "cost model", "fastest"):
        assert text in done.stdout
    more = ("--ops", "gemm", "--shapes", "20,9,8", "--shapes", "40,9,8")
    done = commands.invoke(app, *more, *common)
    assert done.returncode == 0, done.stdout + done.stderr
    found = table.Table.read(path, made_here(CPU))
    kinds = {(one.op, one.ranks, one.M, one.partial_dtype): one for one in found.entries.values()}
    assert set(kinds) == {
        ("gemm", 1, 20, None), ("gemm", 1, 40, None), ("gemm_all_reduce", 2, 20, "float16")
    }  # fmt: skip
    assert [kinds[key].run for key in sorted(kinds, key=str)] == [1, 1, 0]
    assert all(run["commit"] == "0123" and run["versions"]["torch"] for run in found.runs)
    assert "--ops gemm,gemm_all_reduce" in found.runs[0]["command"]
    assert all(0 < one.us <= one.cost_model_us for one in kinds.values())

    monkeypatch.setenv("PYROCSHMEM_TUNED", str(path))
    forget()
    for (op, ranks, _, wire), one in kinds.items():
        partial = HALF if wire else None
        chosen = stream_k.choose(op, *one.shape, HALF, ranks, CPU, partial)
        expected = cost_model(op, *one.shape, HALF, ranks, CPU, partial)
        if one.config is not None:
            expected = Config(**one.config, partial_dtype=partial)
        assert chosen == expected
    forget()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--ops", "gemm,all_reduce"), "no such op: all_reduce; there are gemm, all_gather_gemm"),
        (("--shapes", "8,8"), "--shapes must be M,N,K"),
        (("--shapes", "0,8,8"), "sizes of 1 or more, got '0,8,8'"),
        (("-n", "1"), "on one rank the fused ops are gemm"),
        (("-n", "0"), "0 ranks"),
        (("--ops", "[/x]"), "no such op: [/x]; there are gemm"),
        (("--iters", "0"), "iters is 0, allowed 1 or more"),
    ],
)
def test_mistakes(arguments: tuple[str, ...], text: str, tmp_path: Path) -> None:
    out = tmp_path / "x.json"
    done = commands.invoke(app, *arguments, "--out", str(out))
    assert done.returncode == 2
    assert text in done.stderr
    assert not out.exists()


def test_what_is_planned() -> None:
    """llama3: nine products an op, both orders for a GEMM, sums with each kind of partials."""
    cases = tune.plan(tune.OPS, ["llama3"], "bfloat16", None, 4)
    count = {op: len([case for case in cases if case.op == op]) for op in tune.OPS}
    assert count == {
        "gemm": 18, "all_gather_gemm": 9, "gemm_all_reduce": 18, "gemm_all_scatter": 9, "gemm_reduce_scatter": 18
    }  # fmt: skip
    assert {(case.N, case.K) for case in cases if case.op == "gemm_all_reduce"} == {
        (4096, 1792), (8192, 3584), (16384, 6656)
    }  # fmt: skip
    assert {case.ranks for case in cases if case.op == "gemm"} == {1}


def test_drawn_shapes_are_those_of_benchmarks() -> None:
    for op in tune.OPS:
        cases = tune.plan((op,), ["models:5eed"], "bfloat16", "bfloat16", 2)
        drawn = [(case.M, case.N, case.K) for case in cases_of(op, "models:5eed", 2, "bfloat16", True)]
        assert [(case.M, case.N, case.K) for case in cases] == list(dict.fromkeys(drawn))
        assert len(cases) > 40


def test_what_needs_too_much_is_compiled_and_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused when it is called, as one of many candidates."""
    launch = mock.Mock()
    launch.compile.side_effect = ValueError("gemm_kernel needs 262192 bytes of shared memory")
    monkeypatch.setattr(target, "interpreted", lambda: False)
    warming.compile_shared_out([(launch, (1, 2))], None)
    launch.ask_for.assert_called_once_with((1, 2))


def test_candidates_are_collected_before_they_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    case, asked = Case("gemm", 64, 48, 32, HALF, 1), []
    monkeypatch.setattr(trial, "compile_shared_out", lambda needed, heap: asked.append(needed))
    launched = mock.Mock()
    monkeypatch.setattr(Launch, "__call__", launched)
    configs = candidates(case.op, (64, 48, 32), HALF, 1, CPU)
    trial._Trial(case, None, CPU).compile(configs)
    assert len(asked) == 1
    assert not launched.called

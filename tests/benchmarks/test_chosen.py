"""What a configuration chose: said while measuring, kept in records, derived for older ones where that is exact, and
counted on the page."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pyrocshmem import stream_k, target
from pyrocshmem.benchmarks import ahead, chosen, providers, records, stats, tables
from pyrocshmem.benchmarks.operands import Operands
from pyrocshmem.benchmarks.provider import Unavailable
from pyrocshmem.benchmarks.schema import IS_DEFAULT, same_as
from pyrocshmem.benchmarks.shapes import Case
from pyrocshmem.calls.workspace import local_workspace
from pyrocshmem.stream_k.choice.config import Config
from pyrocshmem.stream_k.choice.placement import placement_names
from pyrocshmem.stream_k.local_gemm import plan
from pyrocshmem.stream_k.local_gemm.blas import BlasPlan
from pyrocshmem.stream_k.local_gemm.product import schedule_of
from tests.benchmarks import made_up

TIER = 1
pytestmark = pytest.mark.cpu

CPU = torch.device("cpu")
FP16 = torch.float16
# On the CPU target's six programs: tiles too short to cut, and half a wave of long ones.
WHOLE, CUT = (96, 96, 64), (64, 192, 2048)


def of_gemm(*shape: int, **changes: Any) -> str:
    config = dataclasses.replace(chosen.own_gemm(*shape, FP16, CPU), **changes)
    return chosen.schedule(config, "gemm", *shape, FP16, 1, CPU, None, chosen.own_placement("gemm"))


def test_names_of_schedules() -> None:
    own = chosen.own_gemm(*CUT, FP16, CPU)
    assert schedule_of(own, *CUT, CPU).has_shared_tiles
    assert of_gemm(*WHOLE) == "whole"
    assert of_gemm(*CUT) == "split_k"
    assert of_gemm(*CUT, split="none") == "whole"
    assert of_gemm(*CUT, split="separate") == "separate"


def test_fused_ops_say_theirs() -> None:
    """The placement that is the BLAS's, and those that keep tiles whole, whatever their split would be."""
    for op in ("gemm_all_reduce", "gemm_reduce_scatter", "all_gather_gemm", "gemm_all_scatter"):
        for placement in placement_names(op):
            call = (op, 128, 96, 64, FP16, 2, CPU, None, placement)
            found = chosen.schedule(stream_k.choose(*call), *call)
            assert (found == "blas") == (placement in ("unfused", "blas_blocks")), (op, placement)
            if placement == "copy_engine" and op == "all_gather_gemm":
                assert found == "whole"


def test_the_blas_is_a_placement_of_the_op() -> None:
    assert chosen.takes_blas("gemm_all_reduce", "unfused")
    assert not chosen.takes_blas("gemm_all_reduce", "beside")
    # Records may say anything.
    for nonsense in ("nowhere", None, 3, ["unfused"], {"a": 1}):
        assert not chosen.takes_blas("gemm_all_reduce", nonsense)
    assert not chosen.takes_blas("all_reduce", "unfused")
    assert chosen.own_placement("gemm") == "after"


def case(op: str = "gemm_all_reduce", **fields: Any) -> records.Record:
    return (
        made_up.case(op, "models-x", 64, 64, 64, ours=1, **({"blas": 2} if op == "gemm" else {"unfused": 2}))
        | fields
    )


def config(**fields: Any) -> dict[str, Any]:
    return {"config": {"ours": {"split": "auto", "placement": "beside"} | fields}}


@pytest.mark.parametrize(
    ("record", "schedule", "text"),
    [
        (case(**config(placement="unfused")), "blas", "blas"),
        (case(**config(split="none", placement="copy_engine")), "whole", "copy_engine, whole"),
        # What the rules of that day made of it is not known.
        (case(**config()), "", "beside"),
        (case(**config(split="stream_k", placement="messages")), "", "messages"),
        (
            case(**config(placement="messages"), schedule={"ours": "stream_k"}),
            "stream_k",
            "messages, stream_k",
        ),
        (case(config={}), "", ""),
        (case(config={"ours": {"placement": "<b>", "split": ["none"]}}), "", ""),
        (case("gemm", **config(split="none", placement="after")), "whole", "whole"),
        (case("gemm", **config(placement="after"), schedule={"ours": "separate"}), "separate", "separate"),
        (case("all_reduce", K=0, config={}), "", ""),
    ],
)
def test_of_records(record: records.Record, schedule: str, text: str) -> None:
    assert chosen.of_case(record) == schedule
    assert chosen.text(record) == text


def gemm(M: int, schedule: dict[str, str], skipped: dict[str, str] | None = None) -> records.Record:
    """A GEMM in which these were timed."""
    times = dict.fromkeys(schedule, 10.0) | {"blas": 10.0}
    more = {"schedule": schedule, "config": {name: {} for name in schedule}, "skipped": skipped or {}}
    return made_up.case("gemm", "models-x", M, 64, 64, **times) | more


def test_the_page_counts_what_was_chosen() -> None:
    cases = [
        gemm(1, {"ours": "split_k"}, {"ours_no_blas": IS_DEFAULT}),
        gemm(2, {"ours": "blas", "ours_no_blas": "stream_k"}),
        gemm(3, {"ours": "blas", "ours_no_blas": "whole"}),
        gemm(4, {"ours": "separate"}, {"ours_no_blas": IS_DEFAULT}),
        made_up.case("gemm", "models-x", 5, 64, 64, ours=1, blas=2) | {"config": {"ours": {"split": "auto"}}},
    ]
    file = records.File(Path("x.jsonl"), made_up.ENVIRONMENT, cases)
    text = tables.document([file])
    kinds = "the BLAS | whole tiles | Stream-K | equal parts | separate reduction | not in the record"
    assert f"| chosen by | cases | {kinds} |" in text
    assert "| ours | 5 | 2 |  |  | 1 | 1 | 1 |" in text
    assert "| ours_no_blas | 4 |  | 1 | 1 | 1 | 1 |  |" in text
    rows = {line.split(" | ")[0]: line.split(" | ")[2] for line in text.splitlines() if "| eager |" in line}
    assert rows == {
        "| 1 x 64 x 64": "split_k",
        "| 2 x 64 x 64": "blas (stream_k)",
        "| 3 x 64 x 64": "blas (whole)",
        "| 4 x 64 x 64": "separate",
        "| 5 x 64 x 64": "",
    }
    # Of a set that is not drawn the column alone.
    (listed,) = stats.groups(
        [dataclasses.replace(file, cases=[each | {"shapes": "llama3"} for each in cases])]
    )
    text = tables.group_text(listed, tables.NO_NOTES)
    assert "chosen by" not in text
    assert "| chosen |" in text


@pytest.fixture
def blas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has `choose` give the BLAS for `gemm`, as the rules do on an H200."""
    real = stream_k.choose

    def choose(op: str, *facts: Any, **more: Any) -> Config:
        asked = facts[7] if len(facts) > 7 else None
        found = real(op, *facts, **more)
        return dataclasses.replace(found, placement="blas") if op == "gemm" and asked is None else found

    monkeypatch.setattr(stream_k, "choose", choose)
    monkeypatch.setattr(plan, "choose", choose)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the BLAS were slow for lines that begin between multiples of 16 bytes here, too."""
    monkeypatch.setattr(plan, "is_slow", lambda a, b, out: out.shape[1] * out.element_size() % 16 != 0)


@pytest.fixture
def multiplied(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Who multiplied, call by call: "blas" or "own"."""
    found: list[str] = []
    local_workspace(CPU).plans.clear()
    for name, kind in (("blas", BlasPlan), ("own", plan.GemmPlan)):
        monkeypatch.setattr(kind, "run", lambda *given, name=name: found.append(name))
    yield found
    local_workspace(CPU).plans.clear()


def prepared(name: str, *shape: int) -> Any:
    """A provider of a GEMM; or the reason why it is not timed."""
    operands = Operands(Case("gemm", "custom", *shape, "float16", 1, "eager"), None, target.device(0))
    try:
        return providers.prepare(name, operands)
    except Unavailable as error:
        return str(error)


def test_without_the_blas_where_the_default_is_our_kernel() -> None:
    assert prepared("ours_no_blas", *CUT) == IS_DEFAULT
    assert prepared("ours_whole_tiles", *CUT).config.split == "none"


@pytest.mark.usefixtures("blas")
def test_without_the_blas_where_it_is_the_default() -> None:
    run = prepared("ours_no_blas", *CUT)
    assert (run.config.placement, run.schedule) == ("after", "split_k")
    assert run.config == chosen.own_gemm(*CUT, FP16, CPU)
    whole = prepared("ours_whole_tiles", *CUT)
    assert (whole.config.placement, whole.config.split, whole.schedule) == ("after", "none", "whole")


@pytest.mark.parametrize("columns", [CUT[1], CUT[1] - 1])
@pytest.mark.usefixtures("blas", "slow")
def test_ours_is_the_call_without_a_configuration(columns: int, multiplied: list[str]) -> None:
    """So it isn't the BLAS where a user's call avoids that, and the record says so."""
    shape, fits = (CUT[0], columns, CUT[2]), columns == CUT[1]
    run = prepared("ours", *shape)
    run.call()
    assert multiplied == ["blas" if fits else "own"]
    own = chosen.own_gemm(*shape, FP16, CPU)
    assert run.config == dataclasses.replace(own, placement="blas" if fits else "after")
    assert run.schedule == ("blas" if fits else "split_k")
    no_blas = prepared("ours_no_blas", *shape)
    assert no_blas.config == own if fits else no_blas == IS_DEFAULT


@pytest.mark.parametrize("op", ["gemm", "gemm_all_reduce", "gemm_reduce_scatter", "all_gather_gemm"])
def test_a_configuration_is_given_where_it_is_changed(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []
    monkeypatch.setattr(stream_k, op, lambda *tensors, **options: given.append(options))
    operands = Operands(Case(op, "custom", *CUT, "float16", 1, "eager"), None, CPU)
    providers.prepare("ours", operands).call()
    assert "config" not in given[-1]
    changed = providers._ours(num_stages=2)(operands)
    changed.call()
    assert given[-1]["config"] == changed.config
    assert changed.config.num_stages == 2


def ahead_of(dtype: str, columns: int, *names: str) -> list[str]:
    """What is compiled ahead for a product: how each configuration splits tiles."""
    case = Case("gemm", "custom", CUT[0], columns, CUT[2], dtype, 1, "eager")
    found = ahead.kernels([case], names or None)
    assert all(config.placement == "after" for _, config in found.values())
    return sorted(config.split for _, config in found.values())


@pytest.mark.usefixtures("blas", "slow")
def test_what_the_blas_multiplies_is_not_compiled_ahead() -> None:
    """Of bfloat16; of float16 a switch of the process may want our own kernel, which is planned with it."""
    fits, between = CUT[1], CUT[1] - 1
    assert ahead_of("bfloat16", fits, "ours", "blas") == []
    assert ahead_of("float16", fits, "ours", "blas") == ["auto"]
    assert ahead_of("bfloat16", between, "ours", "blas") == ["auto"]
    assert ahead_of("bfloat16", fits, "ours_no_blas") == ["auto"]
    assert ahead_of("bfloat16", between, "ours_no_blas") == []
    assert ahead_of("bfloat16", fits, "ours_whole_tiles") == ["none"]
    assert ahead_of("bfloat16", fits) == ahead_of("float16", between) == ["auto", "none"]
    assert ahead_of("float16", fits, "blas") == []


@pytest.mark.usefixtures("blas")
def test_whole_tiles_that_are_our_kernels_own(monkeypatch: pytest.MonkeyPatch) -> None:
    own = dataclasses.replace(chosen.own_gemm(*WHOLE, FP16, CPU), split="none")
    monkeypatch.setattr(chosen, "own_gemm", lambda *facts: own)
    assert prepared("ours_whole_tiles", *WHOLE) == same_as("ours_no_blas")


@pytest.mark.usefixtures("blas")
def test_the_gemm_of_a_floor_is_our_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The BLAS is timed beside it: the floor is the faster of the two."""
    asked = []
    monkeypatch.setattr(stream_k, "gemm", lambda *tensors, config, **more: asked.append(config))
    operands = Operands(
        Case("gemm_all_reduce", "custom", *CUT, "float16", 1, "eager"), None, target.device(0)
    )
    providers.prepare("ours_gemm", operands).call()
    assert [config.placement for config in asked] == ["after"]

"""The table of measured configurations: which entry of it counts for a call."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pyrocshmem import stream_k, target
from pyrocshmem.stream_k.choice import cache
from pyrocshmem.stream_k.choice import table as tuned
from pyrocshmem.stream_k.choice.config import Config
from pyrocshmem.stream_k.choice.rules import cost_model

TIER = 0
pytestmark = pytest.mark.cpu

CPU = torch.device("cpu")
HALF, WIDE = torch.float16, torch.float32

# 64 tiles, several waves on the 12 SMs that `table` gives the CPU target.
SHAPE = (512, 512, 256)
NUM_SMS = 12
TINY = Config(
    block_m=64, block_n=64, num_warps=1, num_stages=1, group_m=2, flatten=False, num_comm_programs=2, comm_rows=16
)  # fmt: skip
INSIDE = dataclasses.replace(TINY, placement="inside")
Put = Callable[..., None]


def fields_of(config: Config) -> dict[str, Any]:
    return {name: value for name, value in dataclasses.asdict(config).items() if name != "partial_dtype"}


def entry(config: Config | None = INSIDE, shape: tuple[int, int, int] = SHAPE, **changes: Any) -> tuned.Entry:
    M, N, K = shape
    fields = {"op": "gemm_all_scatter", "ranks": 2, "dtype": "float16", "partial_dtype": None}
    fields |= {"M": M, "N": N, "K": K, "most_programs": 0, "comm_each": 0}
    plain = None if config is None else fields_of(config)
    return tuned.Entry(**{**fields, "config": plain, "us": 1.0, "cost_model_us": 2.0, "run": 0, **changes})


def forget() -> None:
    """What `choose` remembers of a table and of a device."""
    tuned.choice.cache_clear()
    target.num_sms.cache_clear()
    tuned._in_use.cache_clear()
    cache.say_once.cache_clear()


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Put]:
    """table(*entries): what `choose` looks up from then on."""
    path = tmp_path / "table.json"
    monkeypatch.setenv("PYROCSHMEM_TUNED", str(path))
    monkeypatch.setattr(target, "CPU_PROGRAMS", NUM_SMS)

    def put(*entries: tuned.Entry) -> None:
        forget()
        tuned.Table(cache.made_here(CPU), [{}], entries).write(path)

    forget()
    yield put
    forget()


def choose(shape: tuple[int, int, int] = SHAPE, **changes: Any) -> Config:
    call = {"op": "gemm_all_scatter", "dtype": HALF, "world_size": 2, "partial_dtype": None, **changes}
    op, dtype, ranks = call.pop("op"), call.pop("dtype"), call.pop("world_size")
    return stream_k.choose(op, *shape, dtype, ranks, CPU, **call)


def usual(shape: tuple[int, int, int] = SHAPE, **changes: Any) -> Config:
    call = {"op": "gemm_all_scatter", "dtype": HALF, "ranks": 2, **changes}
    return cost_model(call["op"], *shape, call["dtype"], call["ranks"], CPU)


def test_an_entry_of_the_shape_is_taken(table: Put) -> None:
    table(entry())
    assert choose() == INSIDE != usual()


@pytest.mark.parametrize(
    "change",
    [
        {"op": "gemm_all_reduce"},
        {"ranks": 4},
        {"dtype": "bfloat16"},
        {"partial_dtype": "float16"},
    ],
    ids=str,
)
def test_an_entry_of_another_kind_is_not(table: Put, change: dict[str, Any]) -> None:
    table(entry(**change))
    assert choose() == usual()


def test_entries_of_sums_count_for_what_travels(table: Put) -> None:
    """An entry without a dtype is of fp32 partial sums; those of fp16 are what a call of fp16 has unless it says
    otherwise."""
    table(entry(op="gemm_all_reduce"), entry(TINY, op="gemm_all_reduce", partial_dtype="float16"))
    reduce = {"op": "gemm_all_reduce"}
    assert choose(**reduce) == TINY
    assert choose(partial_dtype=HALF, **reduce) == dataclasses.replace(TINY, partial_dtype=HALF)
    assert choose(partial_dtype=WIDE, **reduce) == dataclasses.replace(INSIDE, partial_dtype=WIDE)
    other = torch.bfloat16
    assert choose(partial_dtype=other, **reduce) == dataclasses.replace(usual(**reduce), partial_dtype=other)


@pytest.mark.parametrize(
    ("shape", "taken"),
    [
        ((1024, 512, 256), True),
        ((512, 256, 256), True),
        ((700, 350, 350), True),
        ((1025, 512, 256), False),
        ((1024, 600, 256), False),
        ((256, 1024, 128), False),
        ((512, 255, 256), False),
        ((512, 512, 513), False),
        ((512, 512, 0), False),
    ],
)
def test_reach(table: Put, shape: tuple[int, int, int], taken: bool) -> None:
    table(entry())
    assert choose(shape) == (INSIDE if taken else usual(shape))


def test_the_nearest_entry_is_taken(table: Put) -> None:
    table(
        entry(INSIDE, (512, 512, 256)), entry(TINY, (1024, 512, 256)), entry(None, (1024, 1024, 256))
    )  # fmt: skip
    assert choose((700, 512, 256)) == INSIDE
    assert choose((512, 256, 256)) == INSIDE
    assert choose((750, 512, 256)) == TINY
    # Where the cost model's choice was the fastest, it is now.
    assert choose((1000, 900, 256)) == usual((1000, 900, 256))


def test_of_two_as_near_the_larger_is_taken(table: Put) -> None:
    entries = entry(TINY, (256, 512, 256)), entry(INSIDE, (1024, 512, 256))
    for each in (entries, reversed(entries)):
        table(*each)
        assert choose((512, 512, 256)) == INSIDE


def test_programs_follow_the_tiles(table: Put) -> None:
    """Balanced for as many as when it was measured; consumers fill what is left."""
    own = dataclasses.replace(TINY, placement="own_stream", num_programs=8, num_comm_programs=12)
    table(entry(own, most_programs=10, comm_each=3))
    assert choose() == own
    found = choose((576, 512, 256))  # 72 tiles: 8 waves of 9
    assert (found.num_programs, found.num_comm_programs) == (9, 9)
    table(entry(own, most_programs=10))
    assert choose((576, 512, 256)).num_comm_programs == 12


def test_a_gemm_splits_its_last_wave_as_the_cost_model_says(table: Put) -> None:
    whole = dataclasses.replace(TINY, placement="after", split="none", num_programs=11, group_m=4)
    gemm = {"op": "gemm", "ranks": 1}
    table(entry(whole, **gemm))
    assert choose(op="gemm", world_size=1) == whole
    found = choose((576, 512, 256), op="gemm", world_size=1)
    assert (found.split, found.num_programs, found.group_m) == ("auto", 0, 4)
    table(entry(dataclasses.replace(whole, split="separate"), **gemm))
    assert choose((576, 512, 256), op="gemm", world_size=1).split == "separate"


def test_programs_that_share_an_sm_are_those_of_a_size() -> None:
    """Not of another with as many rows and columns, which has other stages and warps."""
    shared = dataclasses.replace(TINY, placement="after", num_programs=2 * NUM_SMS)
    for other, programs in (({}, 2 * NUM_SMS), ({"num_warps": 2}, 0), ({"num_stages": 2}, 0)):
        measured = entry(dataclasses.replace(shared, num_programs=0, **other), op="gemm", ranks=1)
        assert tuned._for_shape(measured, shared, (576, 512, 256), NUM_SMS).num_programs == programs


@pytest.mark.parametrize(
    "change",
    [
        {"placement": "nowhere"},
        {"placement": "own_stream", "num_programs": NUM_SMS},
        {"placement": "beside", "num_comm_programs": NUM_SMS},
        {"block_m": 48},
        {"num_stages": "4"},
        {"warp_groups": 2},
        {"flatten": []},
        {"block_m": 512},
        {"num_warps": 32},
        {"num_stages": 10**6},
        {"num_programs": 10**9},
        {"num_comm_programs": 10**9, "placement": "after"},
    ],
    ids=str,
)
def test_what_can_not_run_is_left_to_the_cost_model(table: Put, change: dict[str, Any]) -> None:
    table(
        entry(config=None) if not change else dataclasses.replace(entry(), config=fields_of(INSIDE) | change)
    )
    assert choose() == usual()


def test_gathered_rows_are_never_split(table: Put) -> None:
    default = cost_model("all_gather_gemm", *SHAPE, HALF, 2, CPU)
    blocks = cost_model("all_gather_gemm", *SHAPE, HALF, 2, CPU, placement="copy_engine")
    wider = dataclasses.replace(blocks, group_m=blocks.group_m + 1)
    table(entry(wider, op="all_gather_gemm"))
    assert choose(op="all_gather_gemm") == wider
    table(entry(dataclasses.replace(wider, split="auto"), op="all_gather_gemm"))
    assert choose(op="all_gather_gemm") == default


def test_one_wave_is_not_several(table: Put) -> None:
    shape = (128, 256, 256)  # 8 tiles; twice the rows and columns are 32
    table(entry(INSIDE, shape))
    assert choose(shape) == INSIDE
    assert choose((256, 512, 256)) == usual((256, 512, 256))


def test_a_placement_that_is_asked_for_is_the_cost_models(table: Put) -> None:
    table(entry())
    assert choose(placement="after").placement == "after"
    assert choose(placement="inside") == cost_model(
        "gemm_all_scatter", *SHAPE, HALF, 2, CPU, placement="inside"
    )


def test_no_table(table: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    table(entry())
    assert choose() == INSIDE
    monkeypatch.setenv("PYROCSHMEM_TUNED", "none")
    forget()
    assert choose() == usual()


def test_entries_are_of_products_without_tf32(table: Put) -> None:
    table(entry(dtype="float32"), entry(dtype="float16"))
    assert choose(dtype=WIDE) == INSIDE
    assert choose(dtype=WIDE, allow_tf32=True) == usual(dtype=WIDE)
    assert choose(allow_tf32=True) == INSIDE


def test_equal_kinds_are_replaced_and_others_stay(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    old, other = entry(), entry(ranks=4)
    made = cache.made_here(CPU)
    tuned.Table(made, [{"commit": "a"}], [old, other]).write(path)
    again = tuned.Table.read(path, made)
    new = entry(TINY, run=1)
    again.add(new)
    again.write(path)
    found = tuned.Table.read(path, made)
    assert sorted(found.entries.values(), key=lambda entry: entry.ranks) == [new, other]
    assert found.runs == [{"commit": "a"}]


def test_a_table_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Ctrl-C in the middle leaves it: a part of a table would be the end of every `choose`."""
    path = tmp_path / "table.json"
    made = cache.made_here(CPU)
    tuned.Table(made, [], [entry(None)]).write(path)
    before, whole = path.read_text(), Path.write_text

    def half(self: Path, text: str) -> None:
        whole(self, text[: len(text) // 2])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(KeyboardInterrupt):
        tuned.Table(made, [], [entry(), entry(None, op="gemm")]).write(path)
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]

"""`stream_k.explain`: it names what `choose` gives, the comparison that decided, and no time that nobody computed."""

import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pyrocshmem import stream_k, target
from pyrocshmem.benchmarks.candidates import candidates
from pyrocshmem.calls import op as registry
from pyrocshmem.stream_k.choice import rules, verdicts
from pyrocshmem.stream_k.choice.config import Config
from pyrocshmem.stream_k.choice.gemm_model import tile_times
from pyrocshmem.stream_k.choice.placement import Facts, Placement, Verdict, placement_names, placements_by_op
from pyrocshmem.stream_k.choice.table import choice
from pyrocshmem.stream_k.local_gemm.product import schedule_of
from tests.stream_k.test_tuned import INSIDE, SHAPE, Put, entry
from tests.stream_k.test_tuned import table as table  # noqa: PLC0414  a fixture

TIER = 0
pytestmark = pytest.mark.cpu

CPU = torch.device("cpu")
HALF, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
SHAPES = (
    (0, 0, 0),
    (16, 1024, 8192),
    (128, 4096, 3584),
    (1000, 4100, 2048),
    (4096, 0, 4096),
    (4096, 3584, 8192),
)


def check_all(device: torch.device) -> None:
    for op in placements_by_op():
        for shape in SHAPES:
            for dtype, ranks, wire in ((BF16, 2, None), (HALF, 4, FP32), (FP32, 3, None)):
                for placement in (None, *placement_names(op)):
                    call = (op, *shape, dtype, ranks, device, wire, placement)
                    found = stream_k.explain(*call)
                    assert found.config == stream_k.choose(*call)
                    assert found.config.placement == placement or placement is None
                    assert found.decided_by == ("rules" if placement is None else "caller")
                    verdicts_said = [found.placement, *(why for _, why in found.refused)]
                    verdicts_said += [] if found.next_best is None else [found.next_best[1]]
                    for text in (str(found), found.line()):
                        # But for what verdicts say, times are the estimates', where a model chose.
                        for clause in verdicts_said:
                            text = text.replace(clause, "")
                        assert bool(re.search(r"\d us|by the model|times as long", text)) <= bool(
                            found.estimates
                        )
                    assert "\n" not in found.line()
                    assert repr(found.config) in str(found)


def test_names_the_choice_of_an_h200(h200: torch.device) -> None:
    check_all(h200)


def test_names_the_choice_of_the_cpu_target() -> None:
    if not target.interpreted():
        pytest.skip("kernels are compiled here")
    check_all(CPU)


# op, (M, N, K, ranks, partial_dtype) on both sides of a threshold, and what is said on each side.
CROSSED = [
    ("gemm_all_reduce", (64, 8192, 2048, 2, None), (65, 8192, 2048, 2, None), "M = 64 is at most 64 rows", "M = 65"),
    ("gemm_all_reduce", (128, 8192, 2048, 2, None), (129, 8192, 2048, 2, None), "most 128 rows", "more than 128 rows"),
    (
        "gemm_all_reduce",
        (2048, 4096, 2048, 2, FP32),
        (2048, 4096, 2049, 2, FP32),
        "K = 2048 is at most 2048",
        "K = 2049 is more than 2048",
    ),
    (
        "gemm_all_reduce",
        (1792, 4096, 2049, 2, FP32),
        (1792, 4096, 2049, 2, None),
        "long enough for fp32 sums",
        "partial sums travel in 16 bits",
    ),
    (
        "gemm_all_reduce",
        (2048, 4096, 6144, 2, None),
        (2048, 4096, 6145, 2, None),
        "placement messages: 256 tiles on 132 SMs fill two waves, and K = 6144 is at most 6144",
        "placement unfused",
    ),
    (
        "gemm_all_reduce",
        (1792, 4096, 2048, 2, None),
        (1793, 4096, 2048, 2, None),
        "placement unfused",
        "placement messages: 240 tiles on 132 SMs fill two waves",
    ),
    (
        "gemm_all_reduce",
        (768, 16384, 3584, 2, None),
        (1024, 12288, 3584, 2, None),
        "384 rows, fewer than 512",
        "512 rows, at least 512",
    ),
    (
        "gemm_reduce_scatter",
        (256, 4096, 64, 2, None),
        (257, 4096, 64, 2, None),
        "M = 256 is a multiple of",
        "at most one and a half waves",
    ),
    (
        "gemm_reduce_scatter",
        (256, 4096, 4607, 2, None),
        (256, 4096, 4608, 2, None),
        "K = 4607 is less than 4608, and 128 tiles keep most of 132 SMs busy",
        "128 tiles are at most one and a half waves",
    ),
    (
        "gemm_reduce_scatter",
        (256, 4096, 4096, 2, None),
        (256, 3584, 4096, 2, None),
        "128 tiles keep most of 132 SMs busy",
        "112 tiles are at most one and a half waves",
    ),
    (
        "gemm_all_reduce",
        (72, 5120, 2047, 2, None),
        (72, 5120, 2048, 2, None),
        "placement messages",
        "placement unfused: M = 72 is more than 64 rows",
    ),
    ("gemm_all_scatter", (64, 8192, 1024, 2, None), (65, 8192, 1024, 2, None), "at most 64 rows", "more than 64"),
    (
        "gemm_all_reduce",
        (2428, 4096, 2200, 2, None),
        (2428, 4096, 5600, 2, None),
        "us more than full ones: sums of the BLAS' blocks take",
        "us more than full ones: longer than sums of the BLAS' blocks take",
    ),
    (
        "gemm_reduce_scatter",
        (2048, 8192, 1100, 2, None),
        (2048, 8192, 1200, 2, None),
        "a GEMM of 47 us is too short",
        "4 waves on 132 SMs for 512 tiles, 2 us more than full ones",
    ),
    (
        "gemm_reduce_scatter",
        (4086, 8192, 4096, 4, None),
        (4102, 8192, 4096, 4, None),
        "1022 rows, which end inside a tile, are fewer than 1024",
        "1026 rows, which end inside a tile, are enough",
    ),
    (
        "gemm_reduce_scatter",
        (4088, 6656, 4096, 8, None),
        (4104, 6656, 4096, 8, None),
        "511 rows, which end inside a tile, are fewer than 512",
        "513 rows, which end inside a tile, are enough",
    ),
    (
        "gemm_reduce_scatter",
        (1100, 4096, 4096, 2, None),
        (1120, 4096, 4096, 2, None),
        "copies of partial blocks take 13.7 us, of up to 13.7",
        "copies of partial blocks take 13.9 us, more than 13.7",
    ),
    (
        "gemm_reduce_scatter",
        (1024, 16384, 6143, 2, None),
        (1024, 16384, 6144, 2, None),
        "us more than full ones and 12 us of late copies: sums of the BLAS' blocks take 29 us",
        "blocks of 512 rows are fewer than 640, with K = 6144 at least 6144",
    ),
    (
        "gemm_reduce_scatter",
        (4608, 4096, 4096, 4, None),
        (4096, 4096, 4096, 4, None),
        "with room for more than 1.3 times",
        "with room for at most 1.3 times",
    ),
    (
        "gemm_all_reduce",
        (1024, 8192, 3584, 2, None),
        (1152, 8192, 3584, 2, None),
        "copies of partial blocks take 25.4 us, of up to 27.0",
        "copies of partial blocks take 28.6 us, more than 27.0",
    ),
    (
        "all_gather_gemm",
        (1536, 4096, 1360, 2, None),
        (1536, 4096, 1368, 2, None),
        "4177920 bytes, at most 4194304",
        "4202496 bytes, more than 4194304",
    ),
    (
        "all_gather_gemm",
        (1280, 4096, 2048, 2, None),
        (1536, 4096, 2048, 2, None),
        "5242880 bytes, at most 8388608 for 1280 rows",
        "6291456 bytes, more than 4194304 for 1536 rows",
    ),
    (
        "all_gather_gemm",
        (1499, 4096, 4096, 2, None),
        (1501, 4096, 4096, 2, None),
        "M = 1499 is at most 1500, and A of 12279808 bytes is at most 16777216",
        "M = 1501 is more than 1500",
    ),
    (
        "all_gather_gemm",
        (2048, 4096, 2048, 2, None),
        (2048, 4096, 2056, 2, None),
        "K = 2048 is at most 2048",
        "K = 2056 is more than 2048",
    ),
    (
        "all_gather_gemm",
        (8193, 4096, 4096, 4, None),
        (8192, 4096, 4096, 4, None),
        "not equally many on each of 4",
        "2048 rows, which end with a tile, are enough",
    ),
    (
        "gemm_all_scatter",
        (768, 8192, 4096, 2, None),
        (1024, 8192, 4096, 2, None),
        "copies end 33 us late: more than an exchange behind the GEMM takes, 42 us",
        "copies end 33 us late: an exchange behind the GEMM takes 55 us",
    ),
    (
        "gemm_all_scatter",
        (8192, 3584, 12287, 4, None),
        (8192, 3584, 12288, 4, None),
        "K = 12287 is less than 12288",
        "K = 12288 is at least 12288",
    ),
    ("gemm_all_scatter", (8192, 3584, 4096, 4, None), (8192, 3583, 4096, 4, None), "links are busier", "7166 bytes"),
    ("gemm", (64, 5120, 7168, 1, None), (65, 5120, 7168, 1, None), "M = 64 is at most 64", "M = 65 is at most 128"),
]  # fmt: skip


@pytest.mark.parametrize(("op", "first", "second", "before", "after"), CROSSED, ids=str)
def test_a_threshold_that_is_crossed(
    op: str, first: tuple[int, ...], second: tuple[int, ...], before: str, after: str, h200: torch.device
) -> None:
    """Both numbers are in the reason, and the choice changes with it."""
    one, other = (stream_k.explain(op, *call[:3], BF16, call[3], h200, call[4]) for call in (first, second))  # type: ignore[misc]
    assert before in str(one)
    assert before not in str(other)
    assert after in str(other)
    assert after not in str(one)
    tile = (one.config.block_m, one.config.block_n, one.config.num_stages)
    assert one.config.placement != other.config.placement or tile != (
        other.config.block_m, other.config.block_n, other.config.num_stages
    )  # fmt: skip


def test_few_rows_alone_are_cut_where_k_is_long(h200: torch.device) -> None:
    """Beside communication more than a wave is cut whatever K is, of which ranks may have different shares, and less
    than one never."""

    def explained(N: int, K: int) -> stream_k.Explanation:
        return stream_k.explain("gemm", 27, N, K, BF16, 1, h200, placement="after")

    for N, split, beside in ((10240, "stream_k", "stream_k"), (5120, "separate", "none")):
        short, long = explained(N, 8191), explained(N, 8192)
        assert (short.config.split, long.config.split) == ("none", split)
        for K in (8191, 8192):
            assert stream_k.choose("gemm_all_reduce", 27, N, K, BF16, 2, h200).split == beside
    assert "K = 8191 is too short to cut them" in str(explained(10240, 8191))
    assert "K = 8192 is long enough for 40 tiles of 128 columns" in str(explained(5120, 8192))


def test_other_tiles_have_the_model_s_times(h200: torch.device) -> None:
    found = stream_k.explain("gemm", 4096, 1792, 4096, BF16, 1, h200, placement="after")
    times = tile_times(4096, 1792, 4096, 132)
    assert [each.us for each in found.estimates] == [each.us for each in times]
    assert f"about {times[1].us:.1f} us, the chosen one {times[0].us:.1f} us" in str(found)
    assert f"{times[1].tile}, {times[1].us / times[0].us:.2f} times as long" in found.line()
    assert found.schedule == schedule_of(found.config, 4096, 1792, 4096, h200)
    # Where the BLAS is the faster one, ours is the next best.
    found = stream_k.explain("gemm", 4096, 1792, 4096, BF16, 1, h200)
    assert found.line().startswith("blas, by rules: M = 4096 is more than 64 rows")
    assert (
        f"next best: after (nothing consumes its tiles), about {times[0].us:.1f} us by the model"
        in found.line()
    )
    assert "where the BLAS can't multiply: it takes the least time" in str(found)
    assert found.schedule is None
    # Few rows have a rule of their own, which the model knows nothing of.
    assert stream_k.explain("gemm", 64, 1792, 4096, BF16, 1, h200).estimates == ()


def test_placements_in_their_order(h200: torch.device) -> None:
    """Those before say why not; the next one that suits is the next best, of which no time is known."""
    found = stream_k.explain("gemm_all_reduce", 4096, 4096, 3584, BF16, 2, h200)
    assert found.config.placement == "copy_engine"
    assert [name for name, _ in found.refused] == ["blas_blocks", "unfused", "messages"]
    assert found.next_best is not None
    assert found.next_best[0] == "own_stream"
    assert "own_stream (it suits any sizes on sm_90), of unknown time" in found.line()


def test_row_blocks_have_tiles_of_their_own(h200: torch.device) -> None:
    found = stream_k.explain("gemm_reduce_scatter", 6145, 4096, 3584, BF16, 4, h200)
    assert found.schedule is not None
    assert found.schedule.tiles_m == 4 * 13


def test_an_entry_of_the_table(table: Put) -> None:
    table(entry(us=10.0, cost_model_us=12.5))
    call = ("gemm_all_scatter", *SHAPE, HALF, 2, CPU)
    found = stream_k.explain(*call)
    assert found.decided_by == "table"
    assert found.config == stream_k.choose(*call) == INSIDE
    for text in ("10 us", "12.5 us", "this shape", "took 1.25 times as long"):
        assert text in str(found)
    # Why the rules chose something else is no reason for this.
    assert found.refused == ()
    further = stream_k.explain("gemm_all_scatter", 512, 512, 400, HALF, 2, CPU)
    assert "a factor of 1.56 away" in str(further)
    away = stream_k.explain("gemm_all_scatter", 512, 512, 513, HALF, 2, CPU)
    assert away.decided_by == "rules"
    assert "a factor of 2.0 away, more than 2" in away.table
    assert "10 us" not in str(away)


def test_an_entry_that_confirms_the_rules(table: Put) -> None:
    table(entry(None, us=12.5, cost_model_us=12.5))
    found = stream_k.explain("gemm_all_scatter", *SHAPE, HALF, 2, CPU)
    assert found.decided_by == "table"
    assert found.config == rules.cost_model("gemm_all_scatter", *SHAPE, HALF, 2, CPU)
    assert "the rules' choice was the fastest" in str(found)
    assert found.refused != ()


def test_an_entry_that_does_not_fit(table: Put) -> None:
    table(dataclasses.replace(entry(), config={**(entry().config or {}), "block_m": 48}))
    found = stream_k.explain("gemm_all_scatter", *SHAPE, HALF, 2, CPU)
    assert found.decided_by == "rules"
    assert "can't be used here: Config.block_m must be a power of two, got 48" in found.table


def test_when_and_on_what_it_was_measured(table: Put, tmp_path: Path) -> None:
    table(entry())
    path = tmp_path / "table.json"
    text = json.loads(path.read_text())
    text["runs"] = [{"date": "2026-11-22T12:09:53Z", "target": "4 x NVIDIA H200 (cuda)"}]
    path.write_text(json.dumps(text))
    found = stream_k.explain("gemm_all_scatter", *SHAPE, HALF, 2, CPU)
    assert "measured 2026-11-22 on 4 x NVIDIA H200 (cuda)" in str(found)


def test_what_choose_refuses() -> None:
    with pytest.raises(ValueError, match=r"op is 'gemm_all', allowed are .*gemm_all_reduce"):
        stream_k.explain("gemm_all", 8, 8, 8, HALF, 2, CPU)
    with pytest.raises(
        ValueError, match="'inside', all_gather_gemm has blas_blocks, unfused, messages, copy_engine"
    ):
        stream_k.explain("all_gather_gemm", 8, 8, 8, HALF, 2, CPU, placement="inside")


def test_an_op_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its placements are asked, and a configuration may have their names, as long as the op is registered."""
    large = Placement(
        "by_carrier",
        lambda facts: Verdict(facts.M > 64, f"M = {facts.M}, more than 64 are needed"),
        fewer_warps,
    )
    small = Placement("by_hand", verdicts.otherwise)
    with monkeypatch.context() as patch:
        patch.setitem(
            registry._ops, "gemm_carried", SimpleNamespace(name="gemm_carried", placements=(large, small))
        )
        found = stream_k.explain("gemm_carried", 65, 64, 64, HALF, 2, CPU)
        assert (found.config.placement, found.config.comm_warps) == ("by_carrier", 2)
        assert found.next_best == ("by_hand", "it suits any sizes")
        found = stream_k.explain("gemm_carried", 64, 64, 64, HALF, 2, CPU)
        assert found.config.placement == "by_hand"
        assert found.refused == (("by_carrier", "M = 64, more than 64 are needed"),)
        asked = stream_k.choose("gemm_carried", 64, 64, 64, HALF, 2, CPU, placement="by_carrier")
        assert asked.placement == "by_carrier"
        assert len(candidates("gemm_carried", (65, 64, 64), HALF, 2, CPU)) == 2
        # The library's ops don't have it.
        with pytest.raises(ValueError, match="'by_carrier', gemm_all_reduce has blas_blocks, unfused"):
            stream_k.choose("gemm_all_reduce", 64, 64, 64, HALF, 2, CPU, placement="by_carrier")
    choice.cache_clear()
    with pytest.raises(ValueError, match=r"Config\.placement is 'by_carrier', allowed are"):
        Config(placement="by_carrier")


def fewer_warps(config: Config, facts: Facts) -> Config:
    return dataclasses.replace(config, comm_warps=2)

"""What is said of drawn sets: the best peer of each case, percentiles, and efficiencies where the floor is clear."""

from pathlib import Path
from typing import Any

import pytest

from pyrocshmem.benchmarks import records, sets_page, stats, tables
from pyrocshmem.benchmarks.notes import Notes, Reason
from pyrocshmem.benchmarks.shapes import LINK_BYTES_PER_S
from tests.benchmarks import made_up

TIER = 1
pytestmark = pytest.mark.cpu


def group(*cases: dict[str, Any]) -> stats.Group:
    (found,) = stats.groups([records.File(Path("x.jsonl"), made_up.ENVIRONMENT, list(cases))])
    return found


def case(M: int, op: str = "gemm_all_reduce", **times: float) -> dict[str, Any]:
    return made_up.case(op, "models-x", M, 64, 64, **times)


def test_the_best_peer_is_that_of_each_case() -> None:
    """Of others alone: not the BLAS, which is a part of the op, and nothing that is half ours. Not of cases that are
    dropped or wrong."""
    found = group(
        case(1, ours=10, blas=1, unfused=20, nccl_window=15, torch_symm_mem=30),
        case(2, ours=10, ours_fp32=20, blas=1, ours_gemm=1, unfused=12, blas_ours=5),
        case(3, ours=10, blas=1),
        case(4, ours=10, unfused=1) | {"dropped": "clocks"},
        case(5, ours=10, unfused=1) | {"wrong": ["ours"]},
        case(6, ours=10, unfused=1, nccl_window=40) | {"wrong": []},
    )
    assert stats.speedups_over_best(found) == pytest.approx([1.5, 1.2, 0.1])
    assert stats.speedups_over_best(found, "ours_fp32") == pytest.approx([0.6])
    gemm = group(case(1, "gemm", ours=10, blas=9), case(2, "gemm", ours=10, blas=12))
    assert stats.speedups_over_best(gemm) == pytest.approx([0.9, 1.2])


@pytest.mark.parametrize(
    ("gemm_us", "own_us", "link_us", "clear"),
    [
        (300, None, 240, True),
        (299, None, 100, False),
        (300, None, 241, False),
        (240, None, 300, True),
        (241, None, 300, False),
        (300, None, 0, True),
        # The GEMM's time is that of the faster one.
        (400, 320, 300, False),
        (400, 300, 500, True),
        (None, None, 900, False),
    ],
)
def test_clear_floors(gemm_us: float | None, own_us: float | None, link_us: float, clear: bool) -> None:
    times = {"blas": gemm_us, "ours_gemm": own_us}
    alone = {name: us for name, us in times.items() if us is not None}
    floor = max([link_us, min(alone.values(), default=0)])
    found = case(1, ours=1000, **alone) | {"link_bytes": link_us * LINK_BYTES_PER_S / 1e6, "floor_us": floor}
    assert stats.has_clear_floor(found) == clear
    assert stats.has_clear_floor(found | {"floor_us": None}) is False


def clear_case(M: int, efficiency: float, gemm_us: float = 500.0) -> dict[str, Any]:
    found = case(M, ours=gemm_us / efficiency, unfused=1100, blas=gemm_us)
    return found | {"floor_us": gemm_us, "link_bytes": 0.0, "efficiency": {"ours": efficiency}}


def test_the_table_of_drawn_sets() -> None:
    cases = [clear_case(M, 0.8 + M / 200) for M in range(1, 21)]
    cases += [clear_case(100, 0.3, gemm_us=100), clear_case(101, 0.5, gemm_us=100)]
    cases.append(clear_case(102, 0.1) | {"dropped": "SM clocks of providers 3.0% apart", "efficiency": {}})
    file = records.File(Path("x.jsonl"), made_up.ENVIRONMENT, cases)
    (row,) = [
        line for line in sets_page.drawn_table([file]).splitlines() if line.startswith("| `gemm_all_reduce`")
    ]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[:6] == ["`gemm_all_reduce`", "models-x (tuning seed)", "4 x GPU X", "ours", "23", "1"]
    speeds = sorted([1100 * (0.8 + M / 200) / 500 for M in range(1, 21)] + [3.3, 5.5])
    assert float(cells[6]) == pytest.approx(stats.geometric_mean(speeds), abs=0.005)
    assert float(cells[7]) == pytest.approx(speeds[1] + 0.05 * (speeds[2] - speeds[1]), abs=0.006)
    assert float(cells[8]) == pytest.approx(min(speeds), abs=0.005)
    clear = [0.8 + M / 200 for M in range(1, 21)]
    assert cells[9] == "20"
    assert float(cells[10]) == pytest.approx(stats.geometric_mean(clear), abs=0.005)
    assert (float(cells[11]), cells[12]) == (pytest.approx(min(clear), abs=0.0051), "0.30")
    text = tables.document([file])
    assert "Dropped, 1 of 23, without ratios" in text


def test_all_cases_of_a_drawn_set_are_shown_with_its_distribution() -> None:
    """Also those that lose against another peer than the baseline."""
    cases = [case(M, ours=10, unfused=30, nccl_window=9 if M == 64 else 20) for M in range(1, 65)]
    (found,) = stats.groups([records.File(Path("x.jsonl"), made_up.ENVIRONMENT, cases)])
    text = tables.group_text(found, tables.NO_NOTES)
    assert all(f"| {M} x 64 x 64 |" in text for M in range(1, 65))
    assert "| ours | unfused | 3.000 |" in text
    assert "| ours | the best peer |" in text
    assert "| 1 of 64 |" in text
    assert "- `nccl_window` at 64 x 64 x 64 (0.900): reason not known." in text


def test_the_blas_beside_itself_needs_no_note() -> None:
    for schedule, speed, reason in (
        ("blas", 0.985, "within 2%, by the BLAS, as the one beside it"),
        ("blas", 0.97, "as written"),
        ("whole", 0.985, "as written"),
    ):
        found = made_up.case("gemm", "models-x", 64, 64, 64, ours=1, blas=speed) | {
            "schedule": {"ours": schedule}
        }
        written = Notes(reasons={"gemm": [Reason(("64 x 64 x 64",), (), "as written")]})
        assert tables.why_behind(found, "blas", speed, written) == reason


def test_no_table_without_drawn_sets() -> None:
    listed = made_up.case("gemm", "llama3", 64, 64, 64, ours=1, blas=2)
    assert sets_page.drawn_table([records.File(Path("x.jsonl"), made_up.ENVIRONMENT, [listed])]) == ""

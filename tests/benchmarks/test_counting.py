"""What counts: ranks' parts made one record, dropped cases, bits, memory, notes, and how tables show them."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pyrocshmem.benchmarks import notes, records, run, stats, tables
from pyrocshmem.benchmarks.clocks import Clocks
from pyrocshmem.benchmarks.derive import merged
from pyrocshmem.benchmarks.provider import Run
from tests.benchmarks import made_up
from tests.benchmarks.made_up import FUSED

TIER = 2
pytestmark = pytest.mark.cpu


def part(us: float, **changes: Any) -> dict[str, Any]:
    """A rank's part of a record."""
    found = made_up.case("gemm_all_reduce", "llama3", 8, 8, 8, ours=us, blas=5)
    found |= {"readings": {}, "checksums": {"ours": [7, 7]}} | changes
    return found


def test_slowest_rank_and_worst_error_count() -> None:
    a, b = part(10), part(20, workspace_bytes={"ours": 4 << 20})
    b["error"]["ours"] |= {"worst_ratio": math.inf, "num_bad": 3}
    found = merged([a, b])
    assert found["us"]["ours"] == [18.0, 20.0, 22.0]
    assert found["host_us"] == {"ours": 30.0}
    assert found["workspace_bytes"] == {"ours": 4 << 20}
    assert found["wrong"] == ["ours"]
    assert found["error"]["ours"]["num_bad"] == 3
    # All-reduce of 8 x 8 bf16 on 4 ranks: 2 x 3/4 x 128 bytes; the product alone is the larger part of the floor.
    assert found["link_bytes"] == 192
    assert found["floor_us"] == 5
    assert found["efficiency"] == {"ours": 0.25}


def test_other_bits_in_another_run_are_wrong() -> None:
    """On one rank, in one of its runs; ranks may have results of their own."""
    same = merged([part(10), part(10, checksums={"ours": [8, 8]})])
    assert same["bits"] == {"ours": {"runs": 2, "distinct": 1}}
    assert same["wrong"] == []
    found = merged([part(10), part(10, checksums={"ours": [7, 9]})])
    assert found["bits"] == {"ours": {"runs": 2, "distinct": 2}}
    assert found["wrong"] == ["ours"]
    assert "WRONG: 2 results of ours in 2 runs" in run.problems([found])[0]


def test_a_case_is_dropped_whose_providers_had_other_clocks() -> None:
    """Of the same rank; ranks may differ, and so may samples."""
    fast = {"ours": [(1980, 500), (1200, 500), (1980, 500)], "blas": [(1950, 700)]}
    slow = {"ours": [(1500, 500)], "blas": [(1529, 500)]}
    kept = merged([part(10, readings=fast), part(10, readings=slow)])
    assert kept["dropped"] == ""
    assert kept["clocks_mhz"] == {"ours": [1980, 1500], "blas": [1950, 1529]}
    assert (kept["clock_mhz"], kept["power_w"]) == ([1200, 1980], 700)
    assert kept["efficiency"] == {"ours": 0.5}
    found = merged([part(10, readings=fast), part(10, readings=slow | {"blas": [(1531, 500)]})])
    assert found["dropped"] == "SM clocks of providers 2.1% apart"
    assert found["efficiency"] == {}
    unknown = merged([part(10), part(10)])
    assert (unknown["dropped"], unknown["clock_mhz"], unknown["power_w"]) == ("", None, None)


def test_what_is_dropped_does_not_count(tmp_path: Path) -> None:
    slow = made_up.case("gemm_all_reduce", "llama3", 16384, 4096, 1792, ours=1, unfused=1000)
    slow |= {"dropped": "SM clocks of providers 3.0% apart", "efficiency": {}}
    file = records.File(tmp_path / "x", made_up.ENVIRONMENT, [*FUSED, slow])
    (found,) = stats.summary([file])
    assert found["cases"] == 2
    assert found["speedup"]["unfused"] == pytest.approx(1.0)
    assert "16384 x 4096 x 1792 (SM clocks of providers 3.0% apart)" in tables.document([file])


class FakeNvml:
    """NVML as ctypes gives it, of a GPU at 1755 MHz and 650 W."""

    def __init__(self, fails: str = "") -> None:
        self.fails = fails

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            values = {"nvmlDeviceGetClockInfo": 1755, "nvmlDeviceGetPowerUsage": 650_000}
            if name in values:
                arguments[-1]._obj.value = values[name]
            # The clock of the multiprocessors is number 1.
            wrong = name == "nvmlDeviceGetClockInfo" and arguments[1] != 1
            return int(wrong or name == self.fails)

        return call


def test_nvml_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1-2"))
    gpu = torch.device("cuda", 0)
    assert Clocks(gpu, FakeNvml()).now() == (1755, 650)
    for step in (
        "nvmlInit_v2",
        "nvmlDeviceGetHandleByUUID",
        "nvmlDeviceGetClockInfo",
        "nvmlDeviceGetPowerUsage",
    ):
        assert Clocks(gpu, FakeNvml(step)).now() is None
    assert Clocks(torch.device("cpu"), FakeNvml()).now() is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_checksums_see_bits_and_places(dtype: torch.dtype) -> None:
    x = torch.randn(3, 2048).to(dtype)
    run_of_x = Run(lambda: None, x)
    before = run_of_x.checksum()
    assert before == run_of_x.checksum()
    for change in (lambda: x[0, [3, 4]].flip(0), lambda: x[0, [3, 4]] + x.new_tensor([1.0, -1.0])):
        kept = x.clone()
        x[0, [3, 4]] = change()
        assert run_of_x.checksum() != before
        x.copy_(kept)
    assert run_of_x.checksum() == before
    x[x == 0] = 1
    zero = Run(lambda: None, torch.zeros(5, dtype=dtype)).checksum()
    assert zero != Run(lambda: None, -torch.zeros(5, dtype=dtype)).checksum()
    assert Run(lambda: None, torch.zeros(0, 4, dtype=dtype)).checksum() == 0
    assert Run(lambda: None, None).checksum() is None


def test_a_reason_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("## gemm\n- at 2 KiB: no marks\n")
    with pytest.raises(ValueError, match="at 2 KiB: no marks' must be"):
        notes.read(tmp_path / "notes.md")


def test_the_notes_that_are_committed_can_be_read() -> None:
    from pyrocshmem.benchmarks.__main__ import RESULTS
    from pyrocshmem.benchmarks.shapes import TIMED

    found = notes.read(RESULTS / "notes.md")
    assert set(found.words) <= set(TIMED)
    assert "gemm_reduce_scatter" in found.words

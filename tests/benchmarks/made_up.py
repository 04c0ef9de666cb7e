"""Records that nobody measured, for tests of what is made from records."""

import json
from pathlib import Path
from typing import Any

from pyrocshmem.benchmarks.schema import FORMAT
from pyrocshmem.benchmarks.shapes import TIMED

ENVIRONMENT: dict[str, Any] = {
    "format": FORMAT,
    "command": "python -m pyrocshmem bench all",
    "commit": "0123456789abcdef",
    "uncommitted": [],
    "started": "2026-01-02T03:04:05Z",
    "num_ranks": 4,
    "target": "4 x GPU X",
    "python": "3.12",
    "torch": "2.11",
    "triton": "3.6",
    "nccl": "2.28",
    "multicast": False,
    "gpus": ["GPU X, 1, 1980 MHz"],
}


def case(op: str, shapes: str, M: int, N: int, K: int, **times: float) -> dict[str, Any]:
    """A case in which each provider took its time, give or take 10%; floor 80 us."""
    us = {name: [0.9 * time, time, 1.1 * time] for name, time in times.items()}
    error = {"max_error": 0.1, "bound_at_max": 0.2, "worst_ratio": 0.5, "num_bad": 0, "num_elements": 9}
    found: dict[str, Any] = {
        "op": op,
        "shapes": shapes,
        "M": M,
        "N": N,
        "K": K,
        "dtype": "bfloat16",
        "ranks": 1 if op == "gemm" else 4,
        "timing": "eager",
        "device": "GPU X",
        "us": us,
        "host_us": {"ours": 30.0},
        "error": {name: dict(error) for name in times},
        "wrong": [],
        "skipped": {"kraken": "not importable"},
        "failed": {},
        "config": {"ours": {"block_m": 128}},
        "link_bytes": 1e6,
        "floor_us": 80.0,
        "efficiency": {
            name: 80.0 / time for name, time in times.items() if name not in ("blas", "ours_gemm")
        },
        "clock_mhz": [1900.0, 1980.0],
        "power_w": 600.0,
        "clocks_mhz": {name: [1980.0] for name in times},
        "dropped": "",
        "bits": {"ours": {"runs": 20, "distinct": 1}},
        "workspace_bytes": {"ours": 3 << 20},
        "workspace_allowed_bytes": 2 << 20,
    }
    if TIMED[op].kind == "collective":
        found["bus_gb_per_s"] = {name: 1e3 / time for name, time in times.items()}
    return found


FUSED = [
    case("gemm_all_reduce", "llama3", 4096, 4096, 1792, ours=100, blas=80, unfused=200, nccl_window=90),
    case("gemm_all_reduce", "llama3", 8192, 4096, 1792, ours=100, blas=80, unfused=50),
]


def write(path: Path, cases: list[dict[str, Any]]) -> Path:
    """A file of records."""
    lines = [ENVIRONMENT, *cases, {"gpus_after": ["GPU X, 1, 1980 MHz"]}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path

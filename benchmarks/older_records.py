"""Records of format 2, read as today's, which is 3.

Until November 25, 2026 partial sums travelled in fp32 unless asked otherwise: of ops that sum 16-bit operands `ours` is
what is `ours_fp32` now, `ours_16bit` what is `ours`, and other variants were the strict mode's: `ours_compiled` becomes
`ours_fp32_compiled`. `gemm` never took the BLAS, so that `ours_no_blas` would have been `ours`.
"""

from __future__ import annotations

from typing import Any

from pyrocshmem.benchmarks.schema import IS_DEFAULT, same_as
from pyrocshmem.benchmarks.shapes import TIMED

# Fields that are objects by provider.
_BY_PROVIDER = (
    "us",
    "host_us",
    "error",
    "skipped",
    "failed",
    "config",
    "efficiency",
    "clocks_mhz",
    "bits",
    "workspace_bytes",
    "peak_mib",
)
# Of ours, but no sums of ours, or such as PyTorch's operators ask for.
_WITHOUT_SUMS = ("ours_gemm", "ours_symm_mem")


def as_today(case: dict[str, Any]) -> dict[str, Any]:
    """A case's record of format 2, which has been checked, with today's names of providers."""
    kind = TIMED[case["op"]].kind
    if kind == "gemm":
        return case | {"skipped": {"ours_no_blas": IS_DEFAULT} | case["skipped"]}
    if kind not in ("row", "layer"):
        return case
    rename = _strict if case["dtype"] == "float32" else _renamed
    found = {
        field: {rename(k): v for k, v in case[field].items()} for field in _BY_PROVIDER if case.get(field)
    }
    # What was skipped since it was the default of then is that default's.
    skipped = {
        name: same_as("ours_fp32") if reason == IS_DEFAULT and name.startswith("ours_fp32_") else reason
        for name, reason in found.get("skipped", case["skipped"]).items()
    }
    return case | found | {"skipped": skipped, "wrong": [rename(name) for name in case["wrong"]]}


def _renamed(name: str) -> str:
    if name == "ours_16bit":
        return "ours"
    if not name.startswith("ours") or name in _WITHOUT_SUMS:
        return name
    return name.replace("ours", "ours_fp32", 1)


def _strict(name: str) -> str:
    """Of fp32 operands, whose partial sums are as wide in either mode."""
    return "ours_fp32" if name == "ours_16bit" else name

"""SM clock and power of a rank's GPU while providers take turns, and whether their clocks allow a comparison.

NVML's own library, which every NVIDIA driver brings, is asked by ctypes: PyTorch's `clock_rate` and `power_draw` need a
package that few machines have, and nvidia-smi takes longer to start than a case to measure. Where there is no NVML
nothing is known, and nothing is said.
"""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch

# Of what a comparison allows: the fastest provider's clock over the slowest one's.
MOST_APART = 0.02
_SM = 1  # NVML_CLOCK_SM


class Clocks:
    """Of one GPU. library: NVML's, loaded; None finds it."""

    def __init__(self, device: torch.device, library: Any = None) -> None:
        self._library, self._handle = library, ctypes.c_void_p()
        if device.type != "cuda" or torch.version.hip:
            self._library = None
            return
        try:
            self._library = library if library is not None else ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            return
        # By its name: NVML counts GPUs that CUDA_VISIBLE_DEVICES hides.
        name = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
        handle = ctypes.byref(self._handle)
        if self._library.nvmlInit_v2() or self._library.nvmlDeviceGetHandleByUUID(name, handle):
            self._library = None

    def now(self) -> tuple[float, float] | None:
        """(SM clock in MHz, power in W, which NVML may average over a second); None: not known."""
        if self._library is None:
            return None
        clock, power = ctypes.c_uint(), ctypes.c_uint()
        failed = self._library.nvmlDeviceGetClockInfo(self._handle, _SM, ctypes.byref(clock))
        failed |= self._library.nvmlDeviceGetPowerUsage(self._handle, ctypes.byref(power))
        return None if failed else (float(clock.value), power.value / 1e3)


def of_ranks(parts: Sequence[Mapping[str, Sequence[tuple[float, float]]]]) -> dict[str, Any]:
    """What a record says of the ranks' readings {provider: [(MHz, W)]}: clocks_mhz {provider: the median of each rank},
    clock_mhz [least, largest] and power_w of all, dropped: why the case must not count, "" where it may."""
    clocks: dict[str, list[float]] = {}
    for part in parts:
        for name, seen in part.items():
            if seen:
                clocks.setdefault(name, []).append(statistics.median(clock for clock, _ in seen))
    every = [reading for part in parts for seen in part.values() for reading in seen]
    return {
        "clocks_mhz": clocks,
        "clock_mhz": [min(c for c, _ in every), max(c for c, _ in every)] if every else None,
        "power_w": max(watts for _, watts in every) if every else None,
        "dropped": _why_dropped(clocks),
    }


def _why_dropped(clocks: Mapping[str, Sequence[float]]) -> str:
    # Ranks may differ from one another: all providers of a case run on all of them.
    ranks = list(zip(*clocks.values(), strict=False))
    apart = max((max(each) / min(each) - 1 for each in ranks if min(each) > 0), default=0.0)
    return f"SM clocks of providers {100 * apart:.1f}% apart" if apart > MOST_APART else ""

"""A case's record from its ranks' parts, and what follows from samples: floors, efficiencies, bandwidths."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

import torch

from pyrocshmem.benchmarks import check, clocks
from pyrocshmem.benchmarks.shapes import LINK_BYTES_PER_S, TIMED, Case
from pyrocshmem.reference import report
from pyrocshmem.reference.problems import BY_NAME


def merged(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The record of a case from its ranks' parts: samples of the slowest rank, errors of the worst one.

    What gave other bits in another run is as wrong as what is off.
    """
    record = {name: value for name, value in parts[0].items() if name not in ("checksums", "readings")}
    for field in ("us", "host_us", "error", "workspace_bytes", "bits"):
        record[field] = {}
    for name in parts[0]["us"]:
        record["us"][name] = list(report.slowest([part["us"][name] for part in parts]))
        record["error"][name] = check.worst([part["error"][name] for part in parts])
    for name in parts[0]["host_us"]:
        record["host_us"][name] = max(part["host_us"][name] for part in parts)
    for name in parts[0]["workspace_bytes"]:
        record["workspace_bytes"][name] = max(part["workspace_bytes"][name] for part in parts)
    for name in parts[0]["checksums"]:
        of_ranks = [part["checksums"][name] for part in parts]
        runs = {"runs": min(map(len, of_ranks)), "distinct": max(len(set(each)) for each in of_ranks)}
        record["bits"][name] = runs
    record.update(clocks.of_ranks([part["readings"] for part in parts]))
    unequal = {name for name, runs in record["bits"].items() if runs["distinct"] > 1}
    record["wrong"] = [n for n, error in record["error"].items() if error["num_bad"] or n in unequal]
    record.update(_derived(record))
    return record


def broken(case: Case, device: str, reason: str) -> dict[str, Any]:
    """The record of a case that no rank came back from."""
    fields = ("us", "host_us", "error", "skipped", "config", "workspace_bytes", "bits")
    nothing: dict[str, Any] = {name: {} for name in fields} | clocks.of_ranks([])
    failed = {"failed": {"ours": reason.splitlines()[0][:300]}, "wrong": []}
    record = {**dataclasses.asdict(case), "device": device, **nothing, **failed}
    return record | _derived(record)


def _derived(record: dict[str, Any]) -> dict[str, Any]:
    """Floor, efficiency and bandwidths, from the medians. None where nothing can be said: floors are of GPUs. A case
    that is dropped has no efficiency."""
    op, ranks = TIMED[record["op"]], record["ranks"]
    if op.kind == "layer":
        return {"link_bytes": None, "floor_us": None, "efficiency": {}}
    M, N, K = record["M"], record["N"], record["K"]
    median = {name: statistics.median(samples) for name, samples in record["us"].items()}
    itemsize = getattr(torch, record["dtype"]).itemsize
    nbytes = BY_NAME[record["op"]].link_bytes(M, N, K, ranks, itemsize)
    on_gpu = record["device"] != "cpu"
    link_us = 1e6 * nbytes / LINK_BYTES_PER_S
    alone = [
        median[name] for name in ("blas", "ours_gemm" if op.kind != "gemm" else "ours") if name in median
    ]
    known = on_gpu and (bool(alone) or op.kind == "collective")
    # A barrier moves nothing: it has none.
    floor = max([link_us, min(alone, default=0.0)]) or None if known else None
    found: dict[str, Any] = {"link_bytes": nbytes, "floor_us": floor, "efficiency": {}}
    if floor is not None and not record["dropped"]:
        fused = {name: us for name, us in median.items() if name not in ("blas", "ours_gemm")}
        found["efficiency"] = {name: floor / us for name, us in fused.items()}
    if op.kind == "collective":
        found["bus_gb_per_s"] = {name: nbytes / us / 1e3 for name, us in median.items()}
    return found

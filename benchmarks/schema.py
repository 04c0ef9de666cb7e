"""What lines of records may hold: types, ranges, names, and what one field says about another.

check_case(line), check_together(line), check_environment(line)      # ValueError: what is wrong, and what is allowed

Records may come from anybody. Names are those of ops, dtypes and the like, or words that are safe in a file's name;
numbers are finite and within what a machine can be; all else is text (`benchmarks.escape`). A field that is not listed
here is let through, and nothing reads it.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from pyrocshmem.benchmarks.shapes import CORPORA, NAME, NAMES, TIMED, baseline

# Of records that are written, and those that are read.
FORMAT = 3
FORMATS = (2, FORMAT)
# What a configuration may choose (`benchmarks.chosen`).
SCHEDULES = ("blas", "whole", "stream_k", "split_k", "separate")
# Why a provider of ours is not timed in a case, though it can be: it would do what another one does.
IS_DEFAULT = "it is the default"
_IS = "it is "

# Raises ValueError for a value; `where` names the field.
Check = Callable[[Any, str], None]

_STARTED = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")
_MOST_TEXT, _MOST_ITEMS = 4096, 1 << 20
_LARGEST_SIZE, _MOST_RANKS = 1 << 40, 1 << 16


def same_as(provider: str) -> str:
    """The same reason, where the other one is not the default."""
    return f"{_IS}{provider}"


def timed_as(case: dict[str, Any], provider: str) -> str:
    """Whose samples are a provider's: its own, or those of the one of ours that does the same in this case."""
    reason = case["skipped"].get(provider, "")
    if provider in case["us"] or not provider.startswith("ours_") or not reason.startswith(_IS):
        return provider
    other = "ours" if reason == IS_DEFAULT else reason.removeprefix(_IS)
    return other if other.startswith("ours") and other in case["us"] else provider


def _refuse(value: Any, where: str, allowed: str) -> NoReturn:
    raise ValueError(f"{where} is {reprlib.repr(value)}, allowed {allowed}")


def _whole(low: int, high: int) -> Check:
    def check(value: Any, where: str) -> None:
        if type(value) is not int or not low <= value <= high:
            _refuse(value, where, f"are whole numbers from {low} to {high}")

    return check


def _number(low: float, high: float, also: tuple[Any, ...] = ()) -> Check:
    """also: other values than those from `low` to `high`."""

    def check(value: Any, where: str) -> None:
        if type(value) not in (int, float, str) or not (value in also or _within(value, low, high)):
            more = "".join(f", or {each!r}" for each in also)
            _refuse(value, where, f"are numbers from {low:g} to {high:g}{more}")

    return check


def _within(value: Any, low: float, high: float) -> bool:
    return not isinstance(value, str) and low <= value <= high


def _one_of(names: Sequence[str]) -> Check:
    def check(value: Any, where: str) -> None:
        if not isinstance(value, str) or value not in names:
            _refuse(value, where, f"are {', '.join(names)}")

    return check


def _matching(pattern: re.Pattern[str], what: str) -> Check:
    def check(value: Any, where: str) -> None:
        if not isinstance(value, str) or not pattern.fullmatch(value):
            _refuse(value, where, what)

    return check


def _text(value: Any, where: str) -> None:
    if not isinstance(value, str) or len(value) > _MOST_TEXT:
        _refuse(value, where, f"is text of at most {_MOST_TEXT} characters")


def _bool(value: Any, where: str) -> None:
    if not isinstance(value, bool):
        _refuse(value, where, "are true and false")


def _or_null(check: Check) -> Check:
    def check_or_null(value: Any, where: str) -> None:
        if value is not None:
            check(value, where)

    return check_or_null


def _list(of: Check, least: int = 0, most: int = _MOST_ITEMS) -> Check:
    def check(value: Any, where: str) -> None:
        if not isinstance(value, list) or not least <= len(value) <= most:
            _refuse(value, where, f"are lists of {least} to {most}")
        for i, item in enumerate(value):
            of(item, f"{where}[{i}]")

    return check


def _by_name(of: Check) -> Check:
    """An object whose keys are names."""

    def check(value: Any, where: str) -> None:
        if not isinstance(value, dict) or len(value) > _MOST_ITEMS:
            _refuse(value, where, f"are objects of at most {_MOST_ITEMS} names")
        for name, item in value.items():
            _name(name, f"a name in {where}")
            of(item, f"{where}.{name}")

    return check


def _object(fields: Mapping[str, Check], more: Mapping[str, Check] | None = None) -> Check:
    """An object that has `fields`, and may have `more`."""
    more = more or {}

    def check(value: Any, where: str) -> None:
        if not isinstance(value, dict):
            _refuse(value, where, "are objects")
        if missing := [name for name in fields if name not in value]:
            inside = f"{where} has" if where else "there is"
            raise ValueError(f"{inside} no {', '.join(missing)}; needed are {', '.join(fields)}")
        for name, of in {**fields, **more}.items():
            if name in value:
                of(value[name], f"{where}.{name}" if where else name)

    return check


_name = _matching(NAME, NAMES)
_amount = _number(1e-15, 1e18, (0,))
_us = _number(1e-3, 1e10)
_ratio = _number(1e-15, 1e15)
# As `records.append` writes them, who are no numbers in JSON.
_error = _number(0, 1e300, ("inf", "nan"))

_CASE = _object(
    {
        "op": _one_of(list(TIMED)),
        "shapes": _name,
        "M": _whole(1, _LARGEST_SIZE),
        "N": _whole(0, _LARGEST_SIZE),
        "K": _whole(0, _LARGEST_SIZE),
        "dtype": _one_of(("bfloat16", "float16", "float32")),
        "ranks": _whole(1, _MOST_RANKS),
        "timing": _one_of(("eager", "graph")),
        "device": _text,
        "us": _by_name(_list(_us, least=1)),
        "host_us": _by_name(_amount),
        "error": _by_name(
            _object(
                {
                    "max_error": _error,
                    "bound_at_max": _error,
                    "worst_ratio": _error,
                    "num_bad": _whole(0, _LARGEST_SIZE**2),
                    "num_elements": _whole(0, _LARGEST_SIZE**2),
                }
            )
        ),
        "wrong": _list(_name),
        "skipped": _by_name(_text),
        "failed": _by_name(_text),
        "config": _by_name(_object({})),
        "link_bytes": _or_null(_amount),
        "floor_us": _or_null(_ratio),
        "efficiency": _by_name(_ratio),
    },
    {
        "bus_gb_per_s": _by_name(_amount),
        "clock_mhz": _or_null(_list(_amount, 2, 2)),
        "clocks_mhz": _by_name(_list(_amount)),
        "power_w": _or_null(_amount),
        "dropped": _text,
        "bits": _by_name(_object({"runs": _whole(0, _MOST_ITEMS), "distinct": _whole(0, _MOST_ITEMS)})),
        "workspace_bytes": _by_name(_or_null(_amount)),
        "workspace_allowed_bytes": _or_null(_amount),
        "peak_mib": _by_name(_amount),
        "schedule": _by_name(_one_of(SCHEDULES)),
    },
)

_ENVIRONMENT = _object(
    {
        "format": _whole(FORMATS[0], FORMAT),
        "command": _text,
        "commit": _text,
        "uncommitted": _list(_text),
        "started": _matching(_STARTED, "are times like 2026-01-31T23:59:59Z"),
        "num_ranks": _whole(1, _MOST_RANKS),
        "target": _text,
        "python": _text,
        "torch": _text,
        "triton": _text,
        "nccl": _or_null(_text),
        "multicast": _bool,
        "gpus": _list(_text),
    },
    {"sources": _text},
)

_AFTERWARDS = _object({"gpus_after": _list(_text)})


def check_case(line: dict[str, Any]) -> None:
    """ValueError where a case's record is none: a field is missing or can't be what it is."""
    _CASE(line, "")


def check_environment(line: dict[str, Any]) -> None:
    """ValueError where the first line of a run is none, or a line after its cases, which has gpus_after alone."""
    (_AFTERWARDS if list(line) == ["gpus_after"] else _ENVIRONMENT)(line, "")


def check_together(case: dict[str, Any]) -> None:
    """ValueError where fields that `check_case` allows, with today's names of providers, contradict one another: what
    tables and plots take for granted."""
    op, kind, us = case["op"], TIMED[case["op"]].kind, case["us"]
    sizes = case["M"], case["N"], case["K"]
    if kind == "collective":
        if case["K"] or (op != "barrier" and not case["N"]):
            raise ValueError(f"M, N, K are {sizes}, allowed for {op} are M and N of 1 or more, K of 0")
        if "bus_gb_per_s" not in case:
            raise ValueError(f"there is no bus_gb_per_s, which {op} needs")
    elif min(sizes) < 1:
        raise ValueError(f"M, N, K are {sizes}, allowed for {op} are 1 or more")
    if case["shapes"] in CORPORA and kind != "gemm":
        raise ValueError(f"shapes is {case['shapes']}, allowed for gemm alone, not for {op}")
    for field, names in (("us", us), ("wrong", case["wrong"])):
        if unknown := [name for name in names if name not in case["error"]]:
            raise ValueError(f"{field} names {unknown[0]}, allowed are those in error")
    base = baseline(op)
    if base in us and "ours" in us and len(us[base]) != len(us["ours"]):
        raise ValueError(
            f"us.{base} has {len(us[base])} samples, allowed are as many as us.ours: {len(us['ours'])}"
        )
    if (case.get("clock_mhz") is None) != (case.get("power_w") is None):
        raise ValueError("clock_mhz and power_w are read together, allowed are both or none")

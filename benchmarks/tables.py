"""Markdown made from records: tables of cases, who is ahead and who isn't, and the summary."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

from pyrocshmem.benchmarks import chosen, models, seeds, stats
from pyrocshmem.benchmarks.escape import code, markdown
from pyrocshmem.benchmarks.notes import NO_NOTES, Notes
from pyrocshmem.benchmarks.records import File, Record, median
from pyrocshmem.benchmarks.schema import SCHEDULES, timed_as
from pyrocshmem.benchmarks.shapes import (
    COLUMN_NORMS,
    MEMORY_BYTES_PER_S,
    NORMS,
    TIMED,
    baseline,
    tensor_bytes,
)
from pyrocshmem.benchmarks.stats import Group

EFFICIENCY = "efficiency"
# The default, and the strict mode where partial sums of 16-bit operands are added; and a GEMM by our kernel alone.
MODES = ("ours", "ours_fp32")
CHOICES = (*MODES, "ours_no_blas")

# A set with more cases than this is shown by its worst cases; all of a drawn set are.
_ALL_CASES = models.NUM_CASES
_WORST_CASES = 20
# Samples of the same product by the same library differ by so much.
_SAME = 0.98
_SCHEDULE_WORDS = dict(
    zip(SCHEDULES, ("the BLAS", "whole tiles", "Stream-K", "equal parts", "separate reduction"), strict=True)
)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def number(value: float | None, digits: int = 3) -> str:
    """To so many significant digits, nothing for None."""
    if value is None:
        return ""
    return f"{value:.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:.{digits}g}"


def ratio(value: float | None, peer: bool) -> str:
    """A speed-up, bold where it is a loss against a peer."""
    if value is None:
        return ""
    return f"**{value:.2f}**" if peer and value < 1 else f"{value:.2f}"


def shape(case: Record) -> str:
    """Of a product, or of rows that are normed; of another collective, the bytes of the whole tensor."""
    if case["op"] == "barrier":
        return "no data"
    if case["op"] in (*NORMS, *COLUMN_NORMS) and not case["K"]:
        return f"{case['M']} x {case['N'] * (case['ranks'] if case['op'] in COLUMN_NORMS else 1)}"
    if TIMED[case["op"]].kind != "collective":
        return f"{case['M']} x {case['N']} x {case['K']}"
    return size(tensor_bytes(*(case[name] for name in ("op", "M", "N", "ranks", "dtype"))))


def size(nbytes: int) -> str:
    """Bytes with the unit in which they read well: "64 KiB"."""
    step = 2 if nbytes >= 1 << 20 else 1 if nbytes >= 1 << 10 else 0
    return f"{nbytes / 1024**step:.4g} {('B', 'KiB', 'MiB')[step]}"


def cell(case: Record, provider: str, peers: Sequence[str]) -> str:
    """Median, and the speed-up of ours over it; of what does the same as another one the median alone. What is wrong or
    was skipped says so."""
    if (other := timed_as(case, provider)) != provider:
        return cell(case, other, ()).partition(" ")[0]
    if provider in case["wrong"]:
        return "WRONG"
    if provider in case["failed"]:
        return "failed"
    time = median(case, provider)
    if time is None:
        return "skipped" if provider in case["skipped"] else ""
    speed = stats.speedup(case, provider) if provider != "ours" else None
    if speed is None:
        return number(time)
    return f"{number(time)} ({ratio(speed, provider in peers)})"


Column = tuple[str, Callable[[Record], str]]


def columns_of(group: Group, cases: Sequence[Record]) -> list[Column]:
    """What a table of `cases` says of each: headings, and what a row has there. What no record has, has no column."""
    peers, base = stats.peers(group), baseline(group.op)
    kind = TIMED[group.op].kind
    found: list[Column] = [
        ("size" if kind == "collective" else "M x N x K", _name),
        ("timing", lambda case: case["timing"]),
    ]
    if any(chosen.text(case) for case in cases):
        found.append(("chosen", chosen.text))
    found += [(name, lambda case, name=name: cell(case, name, peers)) for name in group.providers]  # type: ignore[misc]
    found.append((f"spread over {base}", lambda case: _spread(case, base)))
    if kind in ("row", "column"):
        found.append(("floor", lambda case: number(case["floor_us"])))
        found.append((EFFICIENCY, lambda case: number(case["efficiency"].get("ours"), 2)))
    if kind == "collective":
        found.append(("bus GB/s", lambda case: number(case["bus_gb_per_s"].get("ours"))))
    if any(stats.memory_gb_per_s(case) for case in cases):
        found.append(("memory GB/s (share of peak)", _bandwidth))
    for name in MODES:
        if any(name in case["host_us"] for case in cases):
            heading = "host us" if name == "ours" else f"host us of {name}"
            found.append((heading, lambda case, name=name: number(case["host_us"].get(name)) or "-"))  # type: ignore[misc]
    held = [name for name in MODES if any(name in (case.get("workspace_bytes") or {}) for case in cases)]
    if held:
        allowed = "allowed with 2-byte partial sums; fp32 ones are twice that" if len(held) > 1 else "allowed"
        found.append((f"workspace MiB of {', '.join(held)} ({allowed})", _workspace))
    if any(case.get("peak_mib") for case in cases):
        found.append(("peak MiB", lambda case: _peaks(case, group.providers)))
    return found


def case_table(group: Group, cases: Sequence[Record]) -> str:
    """A row a case, a column a provider, and the geometric mean and worst case of the group."""
    columns, peers = columns_of(group, cases), stats.peers(group)
    rows = [[text(case) for _, text in columns] for case in cases]
    ratios = {name: stats.speedups(group, name) for name in group.providers if name != "ours"}
    efficiency = number(stats.geometric_mean(stats.efficiencies(group)), 2)
    for title, value in (("**geometric mean**", stats.geometric_mean), ("**worst**", min)):
        row = {name: ratio(value(found), name in peers) for name, found in ratios.items() if found}
        row |= {EFFICIENCY: efficiency} if value is stats.geometric_mean else {}
        rows.append([title, *(row.get(heading, "") for heading, _ in columns[1:])])
    return table([heading for heading, _ in columns], rows)


def _name(case: Record) -> str:
    return f"{shape(case)} (dropped)" if stats.dropped(case) else shape(case)


def _spread(case: Record, base: str) -> str:
    between = stats.spread(case, base)
    return f"{between[0]:.2f} to {between[1]:.2f}" if between else ""


def _bandwidth(case: Record) -> str:
    rate, peak = stats.memory_gb_per_s(case), MEMORY_BYTES_PER_S.get(case["device"])
    if rate is None:
        return "-"
    return f"{rate:.0f} ({1e9 * rate / peak:.0%})" if peak is not None else f"{rate:.0f}"


def _workspace(case: Record) -> str:
    held, allowed = case.get("workspace_bytes") or {}, case.get("workspace_allowed_bytes")
    found = [held[name] for name in MODES if name in held]
    texts = [number(None if used is None else used / 2**20) or "-" for used in found]
    if not texts:
        return "-"
    return f"{', '.join(texts)} ({number(allowed / 2**20) if allowed is not None else '-'})"


def _peaks(case: Record, providers: Sequence[str]) -> str:
    peaks = case.get("peak_mib") or {}
    return ", ".join(f"{name} {number(peaks[name])}" for name in providers if name in peaks)


def distribution(group: Group) -> str:
    """Percentiles of the speed-up of every variant of ours over the baseline, and where there are other peers over the
    best one of each case; and how many cases lose."""
    base = baseline(group.op)
    over: dict[str, Callable[[str], list[float]]] = {base: lambda name: stats.speedups(group, base, name)}
    if set(stats.peers(group)) - {base, *stats.OURS_IN_PART}:
        over["the best peer"] = lambda name: stats.speedups_over_best(group, name)
    rows = []
    for name in group.providers:
        for peer, speeds in over.items() if name.startswith("ours") and name not in stats.NOT_PEERS else ():
            if found := speeds(name):
                shares = (0, 0.05, 0.25, 0.5, 0.75, 0.95, 1)
                percents = [f"{stats.percentile(found, share):.2f}" for share in shares]
                losing = sum(value < 1 for value in found)
                mean = f"{stats.geometric_mean(found):.3f}"
                rows.append([name, peer, mean, *percents, f"{losing} of {len(found)}"])
    percents = ["worst", "5%", "25%", "median", "75%", "95%", "best"]
    return table(["speed of", "over", "geometric mean", *percents, "losing"], rows)


def seed_text(group: Group) -> str:
    """Of a drawn set, whose seed it is; "" of any other."""
    if not (seed := models.seed_of_set(group.shapes)):
        return ""
    if reason := seeds.objection(group):
        return f"Tuning seed {code(seed)}: {markdown(reason)}.\n"
    return f"Published seed {code(seed)}, which nobody chose: it begins the hash of the commit measured.\n"


def choices(group: Group) -> str:
    """How often each schedule, and the BLAS, was chosen; "" where no record has a configuration."""
    rows = []
    for name in [name for name in CHOICES if name in group.providers]:
        cases = [case for case in group.cases if timed_as(case, name) in case["config"]]
        found = [chosen.of_case(case, name) for case in cases]
        counts = [found.count(each) for each in (*SCHEDULES, "")]
        rows += [[name, str(len(found)), *(str(count or "") for count in counts)]] if found else []
    words = [_SCHEDULE_WORDS[each] for each in SCHEDULES]
    return table(["chosen by", "cases", *words, "not in the record"], rows) if rows else ""


def behind(group: Group, notes: Notes) -> str:
    """Where each peer is faster than ours, by what ratio, and why as far as the notes know; "" where none is."""
    lines = []
    for peer in stats.peers(group):
        lost: dict[str, list[str]] = {}
        for case in group.cases:
            speed = stats.speedup(case, peer)
            if speed is not None and speed < 1:
                lost.setdefault(why_behind(case, peer, speed, notes), []).append(
                    f"{shape(case)} ({speed:.3f})"
                )
        lines += [f"- `{peer}` at {', '.join(found)}: {reason}.\n" for reason, found in lost.items()]
    return f"Ours is behind\n\n{''.join(lines)}" if lines else ""


def why_behind(case: Record, peer: str, speed: float, notes: Notes) -> str:
    """Why `case` has so much of a peer's speed: by its record, or as somebody wrote it down."""
    if peer == "blas" and case["op"] == "gemm" and speed >= _SAME and chosen.of_case(case) == "blas":
        return "within 2%, by the BLAS, as the one beside it"
    return notes.reason(case["op"], shape(case), peer) or "reason not known"


def group_text(group: Group, notes: Notes) -> str:
    """Heading, whose seed, tables, losing cases, clocks, and who was skipped why."""
    parts = [f"### {markdown(group.title)}\n"]
    cases: Sequence[Record] = group.cases
    if seed := seed_text(group):
        parts += [seed, *filter(None, [choices(group)]), distribution(group)]
    if len(cases) > _ALL_CASES:
        base = baseline(group.op)
        # What failed first, what is dropped last.
        known = [case for case in cases if not stats.dropped(case)]
        cases = sorted(known, key=lambda case: stats.speedup(case, base) or 0)[:_WORST_CASES]
        parts += [] if seed else [distribution(group)]
        parts.append(f"The {len(cases)} worst of {len(group.cases)} cases:\n")
    parts.append(case_table(group, cases))
    if len(group.cases) <= _ALL_CASES and (lost := behind(group, notes)):
        parts.append(lost)
    parts += [text for text in (_floors(group), _dropped(group), _clocks(group)) if text]
    for kind in ("skipped", "failed"):
        reasons: dict[tuple[str, str], int] = {}
        for case in group.cases:
            for name, reason in case[kind].items():
                if timed_as(case, name) == name:
                    reasons[name, reason] = reasons.get((name, reason), 0) + 1
        if reasons:
            texts = [
                f"`{name}` ({markdown(reason)}; {count} cases)" for (name, reason), count in reasons.items()
            ]
            parts.append(f"{kind.capitalize()}: {', '.join(texts)}.\n")
    return "\n".join(parts)


def _floors(group: Group) -> str:
    """Which floors our own product had no part in."""
    fused = TIMED[group.op].kind in ("row", "column")
    alone = [case for case in group.cases if case["floor_us"] and "ours_gemm" not in case["us"]]
    if not fused or not alone:
        return ""
    return (
        f"Floors of {len(alone)} of {len(group.cases)} cases are of the BLAS alone: our own product was not timed "
        "beside them. Where that is the faster one, their efficiency is less than it says here.\n"
    )


def _dropped(group: Group) -> str:
    texts = [f"{shape(case)} ({markdown(why)})" for case in group.cases if (why := stats.dropped(case))]
    if not texts:
        return ""
    return (
        f"Dropped, {len(texts)} of {len(group.cases)}, without ratios and in no mean: {', '.join(texts)}.\n"
    )


def _clocks(group: Group) -> str:
    """Of all cases together, and of how many the providers' own are not known, on GPUs; whose bits were compared."""
    texts = []
    clocks = [clock for case in group.cases for clock in case.get("clock_mhz") or ()]
    if clocks:
        watts = max(case["power_w"] for case in group.cases if case.get("clock_mhz"))
        texts.append(f"SM clock {min(clocks):.0f} to {max(clocks):.0f} MHz, at most {watts:.0f} W.")
    unknown = sum(not case.get("clocks_mhz") for case in group.cases)
    if unknown and group.device != "cpu":
        texts.append(f"Clocks of each provider are not known of {unknown} of {len(group.cases)} cases.")
    if runs := [bits["runs"] for case in group.cases if (bits := case.get("bits", {}).get("ours"))]:
        texts.append(f"Bits of ours compared over {min(runs)} runs or more in {len(runs)} cases.")
    return " ".join(texts) + "\n" if texts else ""


def file_text(file: File) -> str:
    """What made the records."""
    env = file.environment
    gpu = markdown(env["gpus"][0].split(",")[0]) if env["gpus"] else "CPU"
    found = versions(env, ("torch", "triton", "nccl", "python"))
    commands = ", ".join(code(command) for command in env.get("commands", [env["command"]]))
    # Those of a run without --json are gone.
    kept = f" Records: {code(file.path.name)}." if file.path.exists() else ""
    return (
        f"- {commands} on {env['num_ranks']} x {gpu}, at commit {code(env['commit'][:10])}{changed(env)}, "
        f"{env['started']}; {found}.{kept}\n"
    )


def document(files: Sequence[File], notes: Notes = NO_NOTES, ops: Container[str] = TIMED) -> str:
    """Everything that the records say of `ops`, and the notes before each op's tables."""
    parts, last = [], ""
    for group in stats.groups(files):
        if group.op not in ops:
            continue
        if group.op != last:
            parts.append(f"## {group.op}\n")
            if text := notes.text(group.op):
                parts.append(f"{text}\n")
        parts.append(group_text(group, notes))
        last = group.op
    made_by = [file_text(file) for file in files if any(case["op"] in ops for case in file.cases)]
    return "".join(made_by) + "\n" + "\n".join(parts)


def summary_table(found: Sequence[dict[str, Any]]) -> str:
    """A row for each op, set and provider."""
    rows = []
    for item in found:
        for name, speed in item["speedup"].items():
            what = [
                item["op"],
                item["shapes"],
                item["dtype"],
                f"{item['ranks']} x {markdown(item['device'])}",
            ]
            worst = f"{item['worst_speedup'][name]:.2f}"
            rows.append(
                [
                    *what,
                    str(item["cases"]),
                    number(item["overlap_efficiency"], 2),
                    name,
                    f"{speed:.2f}",
                    worst,
                ]
            )
    header = ["op", "shapes", "dtype", "on", "cases", "efficiency", "against", "speed-up", "worst"]
    return table(header, rows)


def versions(env: dict[str, Any], names: Sequence[str]) -> str:
    """Of the packages of these names that a run had."""
    return ", ".join(f"{name} {markdown(env[name])}" for name in names if env[name])


def changed(env: dict[str, Any]) -> str:
    """What is not of the commit that a run names."""
    return f" with {len(env['uncommitted'])} files changed since" if env["uncommitted"] else ""

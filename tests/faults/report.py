"""docs/reliability.md, made of pytest's own results: what happened to each fault and each guard, where, and how fast.

    PYROCSHMEM_BACKEND=cpu python -m pytest --pass cpu -m fault --junitxml cpu.xml
    TRITON_INTERPRET=0 python -m pytest --pass compile -m fault --junitxml compile.xml
    PYROCSHMEM_BACKEND=gpu python -m pytest --pass gpu -m fault --junitxml gpu.xml
    PYROCSHMEM_BACKEND=gpu python -m pytest --pass gpu -m fault --ranks-a-gpu 2 --junitxml shared.xml
    python -m tests.stress --minutes 10 --json stress.json
    python -m tests.faults.report cpu.xml compile.xml gpu.xml shared.xml --stress stress.json

What the files say goes into results.jsonl beside this one, a line a test and target, in place of what was known of
these; the page is made of all that is there. Exits 1 when a test failed, or when a fault or guard has no test that
passed. Of a test's runs in one file, with other parameters, the worst verdict counts; of several files the last.
"""

import json
import subprocess
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated
from xml.etree import ElementTree

import typer

from tests.faults.cases import CASES
from tests.faults.guard_list import GUARD_LIST

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(__file__).with_name("results.jsonl")
PASSED, SKIPPED, FAILED = "passed", "skipped", "FAILED"
_ORDER = (SKIPPED, PASSED, FAILED)  # of several runs with other parameters, the last of these counts


@dataclass(frozen=True)
class Result:
    """Of a test function on a target: the verdict on all its parameters, how many passed (None: not known), their
    seconds in all, and the longest time from a fault to its error, where the test measures it. reason: why it was
    skipped."""

    test: str
    target: str
    verdict: str
    passed: int | None
    seconds: float
    to_error: float | None
    reason: str
    commit: str


@dataclass(frozen=True)
class Stress:
    """A run of `python -m tests.stress` on a target: how many rounds of random calls of how many ops."""

    target: str
    rounds: int
    seconds: float
    seed: int
    num_ops: int
    failed: bool
    commit: str


def short(target: str) -> str:
    """ "CPU" of "CPU (Triton interpreter), because ..."."""
    return target.partition(" (")[0].replace("CPU, kernels compiled but not run", "compiled")


def read(paths: Iterable[Path], commit: str) -> list[Result]:
    """One result a test and target, in the order of the files. Only tests that carry the properties of conftest.py."""
    found: dict[tuple[str, str], Result] = {}
    for path in paths:
        of_file: dict[tuple[str, str], Result] = {}
        for case in ElementTree.parse(path).getroot().iter("testcase"):
            properties = {p.get("name", ""): p.get("value", "") for p in case.iter("property")}
            if "test" not in properties:
                continue
            one = _result(case, properties, commit)
            key = (one.test, one.target)
            of_file[key] = _worst(of_file[key], one) if key in of_file else one
        found |= of_file
    return list(found.values())


def _result(case: ElementTree.Element, properties: dict[str, str], commit: str) -> Result:
    skipped = case.find("skipped")
    failed = case.find("failure") is not None or case.find("error") is not None
    verdict = FAILED if failed else SKIPPED if skipped is not None else PASSED
    measured = properties.get("seconds")
    return Result(
        properties["test"],
        short(properties["target"]),
        verdict,
        int(verdict == PASSED),
        float(case.get("time", "0")),
        None if measured is None else float(measured),
        "" if skipped is None else skipped.get("message", ""),
        commit,
    )


def _worst(first: Result, second: Result) -> Result:
    times = [each.to_error for each in (first, second) if each.to_error is not None]
    return replace(
        first,
        verdict=max(first.verdict, second.verdict, key=_ORDER.index),
        passed=(first.passed or 0) + (second.passed or 0),
        seconds=first.seconds + second.seconds,
        to_error=max(times) if times else None,
        reason=first.reason or second.reason,
    )


def read_stress(paths: Iterable[Path], commit: str) -> list[Stress]:
    """Of what `python -m tests.stress --json` has written."""
    found = []
    for path in paths:
        run = json.loads(path.read_text())
        options, failed = run["options"], bool(run["failure"])
        counts = run["rounds"], run["seconds"], options["seed"], len(options["ops"])
        found.append(Stress(short(run["target"]), *counts, failed, commit))
    return found


def stored(path: Path) -> tuple[list[Result], list[Stress]]:
    """What `store` has written; nothing where there is no file."""
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [Result(**row) for row in rows if "test" in row], [
        Stress(**row) for row in rows if "test" not in row
    ]


def store(
    path: Path, results: Iterable[Result], stress: Iterable[Stress]
) -> tuple[list[Result], list[Stress]]:
    """All that is known with these, which replace what was known of the same test, or random calls, on the same
    target. What the table does not name is dropped."""
    known, known_stress = stored(path)
    of_test = {(each.test, each.target): each for each in [*known, *results]}
    of_target = {each.target: each for each in [*known_stress, *stress]}
    named = {test for case in CASES for test in case.tests} | {
        test for each in GUARD_LIST for test in each.controls
    }
    kept = sorted(
        (each for each in of_test.values() if each.test in named), key=lambda each: (each.target, each.test)
    )
    rows = [*kept, *of_target.values()]
    path.write_text("".join(f"{json.dumps(asdict(row))}\n" for row in rows))
    return kept, list(of_target.values())


def verdict(results: list[Result]) -> str:
    """Of the tests of one case: failed when any did, passed when any passed."""
    return max((each.verdict for each in results), key=_ORDER.index, default="not run")


def _cell(results: list[Result]) -> str:
    said = verdict(results)
    if said == SKIPPED:
        return f"skipped: {results[0].reason}"
    if not results:
        return said
    counts = [each.passed for each in results if each.passed is not None]
    runs = f"{sum(counts)} runs, " if len(counts) == len(results) else ""
    text = f"{said}, {runs}{sum(each.seconds for each in results):.1f} s"
    times = [each.to_error for each in results if each.to_error is not None]
    return text + (f", to the error {max(times):.2f} s" if times else "")


def _row(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', ' ') for cell in cells)} |"


def _head(*cells: str) -> list[str]:
    return [_row(*cells), _row(*["---"] * len(cells))]


def _name(test: str) -> str:
    return test.rpartition("::")[2]


def _listed(tests: Iterable[str]) -> str:
    return "; ".join(f"`{_name(test)}`" for test in tests)


def table_of_cases(results: list[Result], targets: list[str]) -> list[str]:
    """A row a case: what happens, what must follow, and what came of its tests on each target."""
    lines = _head("case", "what happens", "what must follow", *targets)
    for case in CASES:
        mine = [each for each in results if each.test in case.tests]
        cells = [_cell([each for each in mine if each.target == target]) for target in targets]
        lines.append(_row(str(case.number), case.what, case.then, *cells))
    return lines


def table_of_guards(results: list[Result], targets: list[str]) -> list[str]:
    """A row a guard: what goes wrong without it, the tests that turn red, and the controls that take it out."""
    lines = _head("guard", "without it", "turns red", "control, which takes it out", *targets)
    for guard in GUARD_LIST:
        mine = [each for each in results if each.test in guard.controls]
        cells = [_cell([each for each in mine if each.target == target]) for target in targets]
        lines.append(_row(guard.name, guard.without, _listed(guard.red), _listed(guard.controls), *cells))
    return lines


def table_of_tests(results: list[Result]) -> list[str]:
    """A row a test and target."""
    lines = _head("case", "test", "target", "commit", "seconds", "verdict")
    for case in CASES:
        for test in case.tests:
            for each in (one for one in results if one.test == test):
                seconds = f"{each.seconds:.1f}"
                said = f"skipped: {each.reason}" if each.verdict == SKIPPED else each.verdict
                lines.append(_row(str(case.number), f"`{test}`", each.target, each.commit, seconds, said))
    return lines


def lines_of_stress(runs: Iterable[Stress]) -> list[str]:
    """A line a run."""
    return [
        f"- {run.target}, commit `{run.commit}`: {run.rounds} rounds of random calls in {run.seconds:.0f} s, seed "
        f"{run.seed}, {run.num_ops} ops: {'**found a mistake**' if run.failed else 'nothing was wrong'}."
        for run in runs
    ]


def lines_of_commits(results: list[Result], targets: list[str]) -> list[str]:
    """A line a target: the commits that its tests ran at, of most tests first."""
    lines = []
    for target in targets:
        count = Counter(each.commit for each in results if each.target == target and each.verdict != SKIPPED)
        lines.append(
            f"- {target}: " + ", ".join(f"`{commit}` ({n} tests)" for commit, n in count.most_common())
        )
    return lines


def problems(results: list[Result], stress: Iterable[Stress] = ()) -> list[str]:
    """What keeps the table from being green, a line each."""
    found = [f"{each.test} failed on {each.target}" for each in results if each.verdict == FAILED]
    on_gpu = any(each.target not in ("CPU", "compiled") for each in results)
    for case in CASES:
        if not (case.gpu and not on_gpu) and not any(
            each.verdict == PASSED for each in results if each.test in case.tests
        ):
            found.append(f"case {case.number} has no test that passed")
    for guard in GUARD_LIST:
        if not any(each.verdict == PASSED for each in results if each.test in guard.controls):
            found.append(f"no control of the guard {guard.name!r} passed")
    found += [f"random calls on {run.target} found a mistake" for run in stress if run.failed]
    return found


def document(results: list[Result], stress: list[Stress]) -> str:
    """The whole page."""
    targets = sorted(
        {each.target for each in results}, key=lambda name: (name != "CPU", name != "compiled", name)
    )
    lines = [
        "# Faults and guards: what was run",
        "",
        "Made by `python -m tests.faults.report` of `tests/faults/results.jsonl`, which holds the latest run of each",
        "test on each target, by commit:",
        "",
        *lines_of_commits(results, targets),
        "",
        "A cell says the verdict of a case's tests on a target, how often they ran with other parameters, and",
        "their time in all; to the error: the longest time from the fault, or from the start of the call, to the",
        "exception. Tests that share one start of the ranks have its time in the first of them.",
        "*compiled*: the assembly for three targets was read.",
        "",
        "## Faults",
        "",
        *table_of_cases(results, [target for target in targets if target != "compiled"]),
        "",
        "## Guards, and what turns red without them",
        "",
        *table_of_guards(results, targets),
        "",
    ]  # fmt: skip
    if stress:
        lines += ["## Random calls", "", *lines_of_stress(stress), ""]
    lines += ["## Tests of each case", "", *table_of_tests(results), ""]
    return "\n".join(lines)


def main(
    results: Annotated[
        list[Path] | None, typer.Argument(help="what `pytest -m fault --junitxml` has written")
    ] = None,
    stress: Annotated[
        list[Path] | None, typer.Option(help="what `python -m tests.stress --json` wrote")
    ] = None,
    data: Annotated[Path, typer.Option(help="all results")] = DATA,
    out: Annotated[Path, typer.Option(help="the page")] = ROOT / "docs" / "reliability.md",
    commit: Annotated[str, typer.Option(help="that was run, where git can't tell it")] = "",
) -> None:
    """Take the files' results and write the page; exit 1 when it is not all green."""
    if not commit:
        command = ["git", "rev-parse", "--short=7", "HEAD"]
        try:
            commit = subprocess.run(
                command, cwd=ROOT, capture_output=True, text=True, check=True
            ).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            raise typer.BadParameter("git can't tell it here: give --commit") from None
    found, runs = store(data, read(results or [], commit), read_stress(stress or [], commit))
    out.write_text(document(found, runs))
    wrong = problems(found, runs)
    for line in wrong:
        typer.echo(line, err=True)
    raise typer.Exit(1 if wrong else 0)


if __name__ == "__main__":
    typer.run(main)

"""docs/reliability.md, made of pytest's own results: what happened to each fault and each guard, where, and how fast.

    PYROCSHMEM_BACKEND=cpu python -m pytest --pass cpu -m fault --junitxml cpu.xml
    TRITON_INTERPRET=0 python -m pytest --pass compile -m fault --junitxml compile.xml
    PYROCSHMEM_BACKEND=gpu python -m pytest --pass gpu -m fault --junitxml gpu.xml
    PYROCSHMEM_BACKEND=gpu python -m pytest --pass gpu -m fault --ranks-a-gpu 2 --junitxml shared.xml
    python -m tests.stress --minutes 10 --json stress.json
    python -m tests.faults.report cpu.xml compile.xml gpu.xml shared.xml --stress stress.json

Exits 1 when a test failed, or when a fault or guard has no test that passed. Of a test's runs in one file, with other
parameters, the worst verdict counts; a later file replaces what an earlier one says of the same test and target.
"""

import json
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from xml.etree import ElementTree

import typer

from tests.faults.cases import CASES
from tests.faults.guard_list import GUARD_LIST

ROOT = Path(__file__).resolve().parents[2]
PASSED, SKIPPED, FAILED = "passed", "skipped", "FAILED"
_ORDER = (SKIPPED, PASSED, FAILED)  # of several runs with other parameters, the last of these counts


@dataclass(frozen=True)
class Result:
    """Of a test function on a target: the verdict on all its parameters, how many passed, their seconds in all, and
    the longest time from a fault to its error, where the test measures it. reason: why it was skipped."""

    test: str
    target: str
    verdict: str
    passed: int
    seconds: float
    to_error: float | None
    reason: str


def short(target: str) -> str:
    """ "CPU" of "CPU (Triton interpreter), because ..."."""
    return target.partition(" (")[0].replace("CPU, kernels compiled but not run", "compiled")


def read(paths: Iterable[Path]) -> list[Result]:
    """One result a test and target, in the order of the files. Only tests that carry the properties of conftest.py."""
    found: dict[tuple[str, str], Result] = {}
    for path in paths:
        of_file: dict[tuple[str, str], Result] = {}
        for case in ElementTree.parse(path).getroot().iter("testcase"):
            properties = {p.get("name", ""): p.get("value", "") for p in case.iter("property")}
            if "test" not in properties:
                continue
            one = _result(case, properties)
            key = (one.test, one.target)
            of_file[key] = _worst(of_file[key], one) if key in of_file else one
        found |= of_file
    return list(found.values())


def _result(case: ElementTree.Element, properties: dict[str, str]) -> Result:
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
    )


def _worst(first: Result, second: Result) -> Result:
    times = [each.to_error for each in (first, second) if each.to_error is not None]
    return Result(
        first.test,
        first.target,
        max(first.verdict, second.verdict, key=_ORDER.index),
        first.passed + second.passed,
        first.seconds + second.seconds,
        max(times) if times else None,
        first.reason or second.reason,
    )


def verdict(results: list[Result]) -> str:
    """Of the tests of one case: failed when any did, passed when any passed."""
    return max((each.verdict for each in results), key=_ORDER.index, default="not run")


def _cell(results: list[Result]) -> str:
    said = verdict(results)
    if said == SKIPPED:
        return f"skipped: {results[0].reason}"
    if not results:
        return said
    text = (
        f"{said}, {sum(each.passed for each in results)} runs, {sum(each.seconds for each in results):.1f} s"
    )
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
    lines = _head("case", "test", "target", "seconds", "verdict")
    for case in CASES:
        for test in case.tests:
            for each in (one for one in results if one.test == test):
                seconds = f"{each.seconds:.1f}"
                said = f"skipped: {each.reason}" if each.verdict == SKIPPED else each.verdict
                lines.append(_row(str(case.number), f"`{test}`", each.target, seconds, said))
    return lines


def lines_of_stress(paths: Iterable[Path]) -> list[str]:
    """A line a run of `python -m tests.stress --json`."""
    lines = []
    for path in paths:
        run = json.loads(path.read_text())
        options = run["options"]
        said = "**found a mistake**" if run["failure"] else "nothing was wrong"
        lines.append(
            f"- {short(run['target'])}: {run['rounds']} rounds of random calls in {run['seconds']:.0f} s, "
            f"seed {options['seed']}, {len(options['ops'])} ops: {said}."
        )
    return lines


def problems(results: list[Result], stress: Iterable[Path] = ()) -> list[str]:
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
    found += [f"{path} holds a mistake" for path in stress if json.loads(path.read_text())["failure"]]
    return found


def document(results: list[Result], stress: list[Path], commit: str) -> str:
    """The whole page."""
    targets = sorted(
        {each.target for each in results}, key=lambda name: (name != "CPU", name != "compiled", name)
    )
    lines = [
        "# Faults and guards: what was run",
        "",
        f"Made by `python -m tests.faults.report` of the results of a test run at commit `{commit}`.",
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
    results: Annotated[list[Path], typer.Argument(help="what `pytest -m fault --junitxml` has written")],
    stress: Annotated[
        list[Path] | None, typer.Option(help="what `python -m tests.stress --json` wrote")
    ] = None,
    out: Annotated[Path, typer.Option(help="the page")] = ROOT / "docs" / "reliability.md",
    commit: Annotated[str, typer.Option(help="that was run, where git can't tell it")] = "",
) -> None:
    """Write the page; exit 1 when it is not all green."""
    if not commit:
        command = ["git", "rev-parse", "--short=10", "HEAD"]
        try:
            commit = subprocess.run(
                command, cwd=ROOT, capture_output=True, text=True, check=True
            ).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            raise typer.BadParameter("git can't tell it here: give --commit") from None
    found = read(results)
    out.write_text(document(found, stress or [], commit))
    wrong = problems(found, stress or [])
    for line in wrong:
        typer.echo(line, err=True)
    raise typer.Exit(1 if wrong else 0)


if __name__ == "__main__":
    typer.run(main)

"""The table of faults is whole, its tests exist, and the page made of results says what they say."""

import ast
from pathlib import Path
from xml.sax.saxutils import quoteattr

import pytest
import typer
from typer.testing import CliRunner

from tests.faults import report
from tests.faults.cases import CASES
from tests.faults.guard_list import GUARD_LIST, properties_of

TIER = 0
pytestmark = pytest.mark.cpu

ROOT = Path(__file__).resolve().parents[2]
CPU = "CPU (Triton interpreter), because of a reason"


def all_names() -> list[str]:
    of_cases = [test for case in CASES for test in case.tests]
    return of_cases + [test for guard in GUARD_LIST for test in (*guard.red, *guard.controls)]


def test_there_are_36_and_every_one_has_a_test() -> None:
    assert [case.number for case in CASES] == list(range(1, 37))
    assert all(case.tests for case in CASES)
    assert all(guard.red and guard.controls for guard in GUARD_LIST)


@pytest.mark.parametrize("path", sorted({test.partition("::")[0] for test in all_names()}))
def test_its_tests_exist(path: str) -> None:
    module = ast.parse((ROOT / path).read_text())
    there = {node.name for node in module.body if isinstance(node, ast.FunctionDef)}
    wanted = {name for where, _, name in (test.partition("::") for test in all_names()) if where == path}
    assert wanted <= there


def test_tests_carry_their_numbers(request: pytest.FixtureRequest) -> None:
    name = "tests/faults/test_heap_faults.py::test_cases_5_and_6_different_calls_are_listed_on_all_ranks"
    assert properties_of(name) == [("case", "5"), ("case", "6")]
    control = "tests/pyrocshmem/test_signal.py::test_constant_epoch_is_found"
    assert properties_of(control) == [("guard", "epoch")]
    assert properties_of(request.node.nodeid) == []


def results(
    where: Path, of_target: str, failing: str = "", leave_out: str = "", seconds: str = "0.5"
) -> Path:
    """A file as pytest writes it, of every test in the table."""
    lines = ["<testsuites><testsuite>", '<testcase name="test_other" time="9" />']
    for test in dict.fromkeys(all_names()):
        if test == leave_out:
            continue
        facts = {"test": test, "target": of_target, "seconds": seconds}
        listed = "".join(f"<property name={quoteattr(k)} value={quoteattr(v)} />" for k, v in facts.items())
        inner = '<failure message="no" />' if test == failing else ""
        lines.append(f'<testcase name="a[1]" time="1.25"><properties>{listed}</properties>{inner}</testcase>')
    where.write_text("\n".join([*lines, "</testsuite></testsuites>"]))
    return where


def run(where: Path, *arguments: str | Path, commit: str = "abc123") -> tuple[int, str]:
    """Exit status and output of a report that has its data and its page in `where`."""
    app = typer.Typer()
    app.command()(report.main)
    places = ("--data", where / "results.jsonl", "--out", where / "page.md", "--commit", commit)
    ended = CliRunner().invoke(app, [str(argument) for argument in (*arguments, *places)])
    return ended.exit_code, ended.output


def test_what_is_not_green_is_said(tmp_path: Path) -> None:
    failing = CASES[1].tests[0]
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    code, output = run(first, results(tmp_path / "a.xml", CPU, failing=failing))
    assert code == 1
    assert f"{failing} failed on CPU" in output
    page = (first / "page.md").read_text()
    assert "FAILED" in next(line for line in page.splitlines() if line.startswith("| 2 |"))
    (missing,) = CASES[27].tests
    code, output = run(second, results(tmp_path / "b.xml", CPU, leave_out=missing))
    assert (code, output.strip()) == (1, "case 28 has no test that passed")
    # The last run of a test counts.
    both = [results(tmp_path / "c.xml", CPU), tmp_path / "a.xml"]
    assert run(first, *both)[0] == 1
    assert run(first, *both[::-1])[0] == 0

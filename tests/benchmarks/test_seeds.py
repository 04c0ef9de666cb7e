"""Seeds that nobody could choose: which drawn sets a page calls published, and which it calls a tuning seed's."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pyrocshmem.benchmarks import __main__ as commands
from pyrocshmem.benchmarks import models, pages, records, run, seeds, stats, tables
from pyrocshmem.benchmarks.notes import NO_NOTES
from tests.benchmarks import made_up

TIER = 1
pytestmark = pytest.mark.cpu

COMMIT = "0123abcd" + 32 * "9"
SEED = COMMIT[:8]


@pytest.fixture(autouse=True)
def history(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has COMMIT, whatever git knows here."""
    monkeypatch.setattr(seeds, "may_be_in_history", lambda commit: commit == COMMIT)


def drawn(seed: str, op: str = "gemm_all_reduce", **fields: Any) -> list[dict[str, Any]]:
    """Records of all cases that a seed draws."""
    kind = {"gemm_all_reduce": "row", "all_gather_gemm": "column", "gemm": "gemm"}[op]
    times = {"ours": 10.0, "blas" if op == "gemm" else "unfused": 20.0}
    shapes = models.set_name(seed)
    return [made_up.case(op, shapes, *sizes, **times) | fields for sizes in models.drawn(kind, 4, seed)]


def group(cases: list[dict[str, Any]], **environment: Any) -> stats.Group:
    """The cases as a report has them. environment: of the run."""
    made = made_up.ENVIRONMENT | {"commit": COMMIT} | environment
    (found,) = stats.groups([records.File(Path("x.jsonl"), made, cases)])
    return found


@pytest.mark.parametrize("op", ["gemm_all_reduce", "all_gather_gemm", "gemm"])
def test_a_published_seed(op: str) -> None:
    found = group(drawn(SEED, op))
    assert seeds.objection(found) == ""
    assert seeds.is_published(found)
    assert f"Published seed `{SEED}`" in tables.seed_text(found)


@pytest.mark.parametrize(
    ("seed", "environment", "reason"),
    [
        ("1f00ba12", {}, f"it is not the first eight digits of the commit measured, {COMMIT[:10]}"),
        (SEED.upper(), {}, "it is not the first eight digits"),
        (SEED[:7], {}, "it is not the first eight digits"),
        (COMMIT[:9], {}, "it is not the first eight digits"),
        # A commit of fewer digits could be grown into any seed.
        (
            "76403a9",
            {"commit": "76403a9"},
            "it is not the first eight digits of the commit measured, 76403a9",
        ),
        ("76403a9SEED", {"commit": "76403a9"}, "it is not the first eight digits"),
        ("main", {"commit": "main"}, "it is not the first eight digits"),
        (SEED, {"commit": ""}, "the commit measured is not known"),
        (SEED, {"uncommitted": [" M stream_k/x.py"]}, "1 files had been changed since the commit measured"),
        (SEED, {"commit": SEED + 32 * "8"}, "is not in the history of this one"),
    ],
)
def test_a_tuning_seed(seed: str, environment: dict[str, Any], reason: str) -> None:
    found = group(drawn(seed), **environment)
    assert reason in seeds.objection(found)
    assert not seeds.is_published(found)
    assert tables.seed_text(found).startswith(f"Tuning seed `{seed}`: ")


def test_cases_that_are_left_out_or_put_in() -> None:
    """Losing cases can't be left out, nor others put in their places."""
    cases = drawn(SEED)
    count = len({(case["M"], case["N"], case["K"]) for case in cases})
    missing = group(cases[1:])
    assert len(missing.cases) == count - 1
    assert seeds.objection(missing) == "1 of the cases that it draws are missing, 0 are others"
    other = made_up.case("gemm_all_reduce", models.set_name(SEED), 7, 8, 9, ours=1, unfused=9)
    assert "0 of the cases that it draws are missing, 1 are others" in seeds.objection(group([*cases, other]))
    # A case that failed or was dropped is there.
    dropped = [cases[0] | {"dropped": "clocks"}, *cases[1:]]
    assert seeds.is_published(group(dropped))


def test_one_case_of_another_run_spoils_it() -> None:
    first, *others = drawn(SEED)
    spoilt = first | {"run": made_up.ENVIRONMENT | {"commit": "f" * 40}}
    assert "it is not the first eight digits of the commit measured, ffffffffff" in seeds.objection(
        group([spoilt, *others])
    )


def test_other_sets_have_no_seed() -> None:
    found = group([made_up.case("gemm", "llama3", 64, 64, 64, ours=1, blas=2)])
    assert not seeds.is_published(found)
    assert tables.seed_text(found) == ""


def test_what_nothing_is_drawn_for_is_told_and_hangs_nobody() -> None:
    """A record may say anything: that no model has."""
    alone = made_up.case("all_reduce", models.set_name(SEED), 1, 64, 0, ours=1, unfused=2)
    assert "nothing is drawn of kind 'collective'" in seeds.objection(group([alone]))
    many = made_up.case("gemm_all_reduce", models.set_name(SEED), 1, 64, 64, ours=1, unfused=2) | {
        "ranks": 65536
    }
    assert seeds.objection(group([many])) == "no model can be divided over 65536 ranks"


def git(folder: Path, *arguments: str) -> str:
    """What git prints there."""
    identity = ("-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false")
    done = subprocess.run(
        ["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def test_the_history_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    whole = tmp_path / "whole"
    whole.mkdir()
    git(whole, "init", "-q", "-b", "main")

    def commit(text: str) -> str:
        git(whole, "commit", "-q", "--allow-empty", "-m", text)
        return git(whole, "rev-parse", "HEAD")

    first = commit("first")
    git(whole, "checkout", "-q", "-b", "aside")
    aside = commit("aside")
    git(whole, "checkout", "-q", "main")
    last = commit("last")
    assert [seeds.may_be_in_history(each, whole) for each in (first, last, first[:8], aside, "f" * 40)] == [
        True,
        True,
        True,
        False,
        False,
    ]
    # Where history is not at hand, nobody can tell: a shallow clone, and a tree without git inside another one's.
    shallow = tmp_path / "shallow"
    git(tmp_path, "clone", "-q", "--depth", "1", f"file://{whole}", str(shallow))
    inside = whole / "installed"
    inside.mkdir()
    assert seeds.may_be_in_history("f" * 40, shallow)
    assert seeds.may_be_in_history("f" * 40, inside)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert seeds.may_be_in_history("e" * 40, whole)


def test_the_page_says_which_is_which() -> None:
    """In the group's caption, in both tables, and of a seed that only begins as the commit does."""
    environment = made_up.ENVIRONMENT | {"commit": COMMIT}
    published = records.File(Path("a.jsonl"), environment, drawn(SEED))
    tuned = records.File(Path("b.jsonl"), environment, drawn("tuneA"))
    page = "".join(pages.pages_of([published, tuned], NO_NOTES, [], []).values())
    assert f"Published seed `{SEED}`, which nobody chose" in page
    assert "Tuning seed `tuneA`: it is not the first eight digits" in page
    for name, kind in ((f"models-{SEED}", "published"), ("models-tuneA", "tuning seed")):
        assert page.count(f"| `gemm_all_reduce` | {name} ({kind}) | 4 x GPU X | ours |") == 2
    begun = f"{SEED[:7]}SEED"
    found = stats.groups([records.File(Path("c.jsonl"), environment, drawn(begun))])
    assert found
    for group in found:
        assert tables.seed_text(group).startswith(f"Tuning seed `{begun}`: it is not the first eight digits")


def test_the_commit_draws() -> None:
    assert models.with_seed("models:commit", COMMIT) == f"models:{SEED}"
    assert models.with_seed("models:tuneA", COMMIT) == "models:tuneA"
    found = run.plan(["gemm", "all_gather_gemm", "all_reduce"], "models:commit", "bfloat16", 2, None, COMMIT)
    assert {(case.op, case.shapes) for case in found} == {
        ("gemm", f"models-{SEED}"),
        ("all_gather_gemm", f"models-{SEED}"),
    }


@pytest.mark.parametrize("commit", ["", "76403a9", "main", "0123ABCD" + 32 * "9", "0123abcg" + 32 * "9"])
def test_a_commit_that_gives_no_seed(commit: str) -> None:
    with pytest.raises(ValueError, match="models:commit is drawn by the commit measured") as caught:
        run.plan(["gemm"], "models:commit", None, 2, None, commit)
    assert ("git can't tell" if not commit else repr(commit)) in str(caught.value)


@pytest.mark.parametrize("changed", [[], [" M stream_k/x.py"]])
def test_the_command_takes_gits_commit_of_a_clean_tree(
    changed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def planned(*arguments: Any) -> list[Any]:
        asked.append(arguments[-1])
        raise ValueError("enough")

    answers = {"rev-parse": COMMIT, "status": "\n".join(changed)}
    monkeypatch.setattr(records, "output_of", lambda *command: answers[command[1]])
    monkeypatch.setattr(run, "plan", planned)
    done = CliRunner().invoke(commands.app, ["gemm", "--shapes", "models:commit"], env={"COLUMNS": "200"})
    assert done.exit_code == 2
    if changed:
        assert "models:commit is for what is committed: 1 files are changed" in done.output
        assert asked == []
        # Who tells the commit answers for the tree.
        CliRunner().invoke(commands.app, ["gemm", "--shapes", "models:commit", "--commit", "e" * 40])
        assert asked == ["e" * 40]
    else:
        assert asked == [COMMIT]

"""Which drawn sets are published ones: those whose seed nobody could choose.

    reason = seeds.objection(group)      # "" for a published set, else why it is one of a tuning seed

The seed of a published set is the first eight hexadecimal digits of the hash of the commit that was measured: nobody
knew it while the code was written and tuned. All of the cases that it draws are there, no file had been changed since
the commit, and that is in the history that git has here.
"""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pyrocshmem.benchmarks import models
from pyrocshmem.benchmarks.shapes import TIMED
from pyrocshmem.benchmarks.sources import ROOT
from pyrocshmem.benchmarks.stats import Group


def objection(group: Group) -> str:
    """Why the seed of a drawn set is no published one; "" where it is."""
    seed = models.seed_of_set(group.shapes)
    for case in group.cases:
        if found := _objection_to(seed, case["run"]):
            return found
    try:
        drawn = set(models.drawn(TIMED[group.op].kind, group.ranks, seed))
    except ValueError as error:
        return str(error)
    measured = {(case["M"], case["N"], case["K"]) for case in group.cases}
    if drawn != measured:
        return f"{len(drawn - measured)} of the cases that it draws are missing, {len(measured - drawn)} are others"
    return ""


def is_published(group: Group) -> bool:
    """Whether it is a drawn set, and its seed a published one."""
    return bool(models.seed_of_set(group.shapes)) and not objection(group)


def _objection_to(seed: str, run: Mapping[str, Any]) -> str:
    """run: the environment of a record."""
    commit, changed = str(run["commit"]), run["uncommitted"]
    if not commit:
        return "the commit measured is not known"
    if models.seed_of_commit(commit) != seed:
        return f"it is not the first eight digits of the commit measured, {commit[:10]}"
    if changed:
        return f"{len(changed)} files had been changed since the commit measured"
    if not may_be_in_history(commit):
        return f"the commit measured, {commit[:10]}, is not in the history of this one"
    return ""


@functools.cache
def may_be_in_history(commit: str, root: Path = ROOT) -> bool:
    """Whether `commit` is an ancestor of what is checked out at `root`, or git has no whole history there to tell."""
    if not (root / ".git").exists() or _git(root, "rev-parse", "--is-shallow-repository") != (0, "false"):
        return True
    return _git(root, "merge-base", "--is-ancestor", commit, "HEAD")[0] == 0


def _git(root: Path, *arguments: str) -> tuple[int, str]:
    """(exit status, what it printed); -1 where there is no git."""
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
    except OSError:
        return -1, ""
    return done.returncode, done.stdout.strip()

"""Whenever a rank or the parent of ranks is killed while heaps form, no memory and no process is left."""

import json
import subprocess
import sys

import pytest

from tests.finegrained_alloc import support

TIER = 2


@pytest.mark.cpu
@pytest.mark.parametrize(("ranks", "parents"), [(200, 0), (0, 4)], ids=["200 ranks", "4 parents"])
def test_killed_at_random_instants_while_heaps_form(ranks: int, parents: int) -> None:
    nbytes = support.odd_size()
    command = [sys.executable, "-m", "tests.faults.kills", str(ranks), str(parents), str(nbytes)]
    done = subprocess.run(
        command,
        cwd=support.ROOT,
        env=support.environment({}),
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    end = json.loads(done.stdout)
    assert end["killed"] >= ranks + parents
    assert end["heaps"] >= ranks / 4, "they were killed before they did anything"
    assert end["files"] == []
    assert end["holders"] == []

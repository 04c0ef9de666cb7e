"""Objects from all ranks, as JSON."""

import math
import os
import pickle
from typing import Any

import pytest

from pyrocshmem import Group, ShmemError, ThreadGroup, spawn_threads
from pyrocshmem.json_objects import all_gather_json

TIER = 0
pytestmark = pytest.mark.cpu


def _gathered(group: ThreadGroup, values: list[Any]) -> list[Any]:
    return all_gather_json(values[group.rank], "values", group)


def test_every_rank_gets_all_in_order() -> None:
    values = [{"us": [0.1, 1 / 3, 2**63], "none": None, "text": 'é\n"'}, None, [True, (1, "x")]]
    expected = [*values[:2], [True, [1, "x"]]]
    assert spawn_threads(_gathered, 3, values) == [expected] * 3


def test_infinities_and_nans() -> None:
    for found in spawn_threads(_gathered, 2, [math.inf, [-math.inf, math.nan]]):
        assert found[:1] == [math.inf]
        assert found[1][0] == -math.inf
        assert math.isnan(found[1][1])


def test_what_json_has_no_place_for_is_said_before_anything_is_sent() -> None:
    group = ThreadGroup.create(1)[0]
    with pytest.raises(TypeError, match="not JSON serializable"):
        all_gather_json({"device": object()}, "values", group)
    assert group.rounds == 0


class _Runs:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (os.environ["PLANTED"],)


def _sends(group: Group, payload: bytes) -> str:
    if group.rank == 1:
        group.exchange(payload, "values")
        return ""
    with pytest.raises(ShmemError) as raised:
        all_gather_json("sound", "values", group)
    return str(raised.value)


@pytest.mark.parametrize("payload", ["pickle", b"", b"\xff", b"[" * 100000])
def test_a_message_that_is_no_json_is_an_error_and_nothing_runs(
    payload: str | bytes, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLANTED", str(tmp_path / "planted"))
    sent = pickle.dumps(_Runs()) if isinstance(payload, str) else payload
    text, _ = spawn_threads(_sends, 2, sent)
    assert text.startswith("values: what rank 1 sent is no JSON: ")
    assert not (tmp_path / "planted").exists()

"""`tests.sanitize`, which runs under compute-sanitizer on GPUs alone, can be run at all: on the CPU target."""

import pytest

TIER = 2
pytestmark = pytest.mark.cpu


def test_a_world_of_one(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")  # to be taken back: the module sets it
    from tests import sanitize

    monkeypatch.setattr(sanitize, "SHAPES", ((7, 13, 5),))
    assert sanitize.alone() == 0
    assert capsys.readouterr().out.count(": right\n") > 40

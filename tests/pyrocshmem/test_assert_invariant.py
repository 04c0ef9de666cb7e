"""`testing.assert_batch_invariant` passes what computes rows apart, and names what mixes them."""

import re

import pytest
import torch

from pyrocshmem.testing import assert_batch_invariant

TIER = 0
ROWS = torch.randn(20, 6, generator=torch.Generator().manual_seed(0))


def test_rows_that_are_computed_apart_pass() -> None:
    seen: list[tuple[int, bool, bool]] = []

    def fn(batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        inside = batch.data_ptr() != batch.untyped_storage().data_ptr()
        seen.append((len(batch), batch.is_contiguous(), inside))
        return batch.half() * 2, (batch > 0).sum(1)

    assert_batch_invariant(fn, ROWS)
    assert {size for size, *_ in seen} == {1, 2, 3, 7, 16, 17, 20}
    assert {inside for _, contiguous, inside in seen if contiguous} == {True, False}
    assert any(not contiguous for _, contiguous, _ in seen)
    assert_batch_invariant(lambda batch: batch * 2, torch.arange(5), sizes=(2,))
    nan = torch.full((3, 2), torch.nan)
    assert_batch_invariant(lambda batch: batch, nan)


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (lambda x: x - x.mean(0), "1 rows from row 0 on: 1 of 1 rows have other bits than among all 20"),
        (lambda x: x * (1 + (torch.arange(len(x)) == 5)[:, None]), "than among all 20; of row 11 element 0"),
        (lambda x: x * torch.where(torch.tensor(len(x) == 7), -1.0, 1.0), "7 rows from row 0 on: 7 of 7"),
        (lambda x: (x, x if x.is_contiguous() else x + 1), "result 1 of 2 rows that are not contiguous: 2 of 2"),
        (lambda x: torch.zeros_like(x) * (-1 if len(x) == 3 else 1), "is -0.0 instead of 0.0"),
        (lambda x: x.double() if len(x) == 2 else x, "2 rows from row 0 on is torch.float64"),
    ],
)  # fmt: skip
def test_what_mixes_rows_is_named(fn: object, words: str) -> None:
    with pytest.raises(AssertionError, match=re.escape(words)):
        assert_batch_invariant(fn, ROWS, sizes=(1, 2, 3, 7) if "row 11" not in words else (7,))  # type: ignore[arg-type]


def test_what_it_can_not_compare() -> None:
    with pytest.raises(ValueError, match=re.escape("rows has shape (1, 6), at least 2")):
        assert_batch_invariant(lambda x: x, ROWS[:1])
    with pytest.raises(ValueError, match=re.escape("a result has shape (6,) for 20 rows")):
        assert_batch_invariant(lambda x: x.sum(0), ROWS)

"""The library is built once before the first of these tests, as it is before anyone uses it."""

import pytest

from tests.finegrained_alloc import support


@pytest.fixture(autouse=True, scope="session")
def built_library() -> None:
    support.build_library()

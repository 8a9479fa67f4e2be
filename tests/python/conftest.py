"""The pool of worker processes that all tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    shared = Pool()
    yield shared
    shared.close()

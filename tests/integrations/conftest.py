"""Tests with other libraries, on Gloo ranks of tests/python/pool.py. `make test-integrations` runs them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))

from pool import Pool  # noqa: E402


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    shared = Pool("cpu")
    yield shared
    shared.close()

"""The pool of worker processes that all tests share, and the device that their tensors are on.

`pytest --device asyncdev` runs tests on the device of tests/async_device, which is as asynchronous as a GPU and has
process groups with NCCL's rules. Its delays follow from `--seed`.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pytest

import async_tests
from pool import Pool


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", choices=("cpu", "asyncdev"), default="cpu", help="where the tests' tensors are")
    parser.addoption("--seed", type=int, help="of the delays on asyncdev; default: a random one, which is printed")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--device") != "cpu":
        seed = config.getoption("--seed")
        async_tests.choose(random.randrange(1 << 30) if seed is None else seed)


def pytest_report_header(config: pytest.Config) -> list[str]:
    if config.getoption("--device") == "cpu":
        return []
    return [f"tensors on asyncdev, delays of --seed {os.environ[async_tests.SEED]}"]


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    shared = Pool()
    yield shared
    shared.close()

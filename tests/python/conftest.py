"""Fixtures: the pools of worker processes that all tests share.

`pytest --device asyncdev` puts the tensors of `pool` on the device of tests/async_device, and deselects tests without
a pool: they would repeat the run on CPU. With `--device cuda` the workers share one GPU, over NCCL.
`pytest --one-in 3` runs every test function with one third of its parameter sets; `--turn` (0, 1 or 2) selects the
third. Tests marked on_device run with all their parameter sets wherever their tensors are not on the CPU.
`pytest --full-for 600` runs, after 600 seconds, only the last parameter set of each function that has not run. The
first one often has a single rank.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator

import pytest

import async_tests  # noqa: F401  (so that async_device is found)
from pool import Pool

_SEED = pytest.StashKey[int]()
_START = pytest.StashKey[float]()
_STARTED_FUNCTIONS = pytest.StashKey[set[str]]()
_LAST_SETS = pytest.StashKey[dict[str, str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    devices = ("cpu", "asyncdev", "cuda")
    parser.addoption("--device", choices=devices, default="cpu", help="where the tensors of tests are")
    parser.addoption("--seed", type=int, help="of delays on asyncdev (default: a random one, which is printed)")
    parser.addoption("--one-in", type=int, default=1, help="of each test function, one in so many sets of parameters")
    parser.addoption("--turn", type=int, default=0, help="which of them: the remainder of this number by --one-in")
    parser.addoption("--full-for", type=float, help="seconds after which a test function runs at most once")


def pytest_configure(config: pytest.Config) -> None:
    seed = config.getoption("--seed")
    config.stash[_SEED] = random.randrange(1 << 30) if seed is None else seed
    config.stash[_START], config.stash[_STARTED_FUNCTIONS] = time.monotonic(), set()


@pytest.hookimpl(trylast=True)  # after pytest's own -k and -m, so that --one-in counts tests that run
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    device = config.getoption("--device")
    _keep(_taken(config, [item for item in items if _fits(item, device)]), config, items)
    config.stash[_LAST_SETS] = {_function(item): item.nodeid for item in items}


def _keep(kept: list[pytest.Item], config: pytest.Config, items: list[pytest.Item]) -> None:
    remaining = set(kept)
    if others := [item for item in items if item not in remaining]:
        items[:] = kept
        config.hook.pytest_deselected(items=others)


def _fits(item: pytest.Item, device: str) -> bool:
    """Returns true if the test can run with this `--device` and differs there from the run on CPU."""
    if device == "cpu":
        return True
    if item.get_closest_marker("cpu_only") is not None:
        return False
    fixtures = getattr(item, "fixturenames", ())
    if device == "cuda":
        return "async_pool" not in fixtures  # has its own device
    return "pool" in fixtures or "async_pool" in fixtures or "async_device" in item.path.parts


def _function(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def pytest_runtest_setup(item: pytest.Item) -> None:
    limit, started = item.config.getoption("--full-for"), item.config.stash[_STARTED_FUNCTIONS]
    is_late = limit is not None and time.monotonic() - item.config.stash[_START] > limit
    function = _function(item)
    if is_late and (function in started or item.nodeid != item.config.stash[_LAST_SETS][function]):
        pytest.skip(f"after --full-for {limit:.0f} seconds; one set of parameters runs")
    started.add(function)


def _taken(config: pytest.Config, items: list[pytest.Item]) -> list[pytest.Item]:
    """Returns one of every `--one-in` parameter sets of each test function, and at least one."""
    number, turn = config.getoption("--one-in"), config.getoption("--turn")
    if number < 1:
        raise pytest.UsageError(f"--one-in must be 1 or more, got {number}")
    total = Counter(_function(item) for item in items)
    seen: Counter[str] = Counter()
    taken = []
    for item in items:
        function = _function(item)
        is_taken = seen[function] % number == turn % number % total[function]
        seen[function] += 1
        if is_taken or _runs_all_sets(item, config.getoption("--device")):
            taken.append(item)
    return taken


def _runs_all_sets(item: pytest.Item, device: str) -> bool:
    is_on_device = device != "cpu" or "async_pool" in getattr(item, "fixturenames", ())
    return is_on_device and item.get_closest_marker("on_device") is not None


def pytest_report_header(config: pytest.Config) -> str:
    return f"asyncdev: delays follow from --seed {config.stash[_SEED]}"


@pytest.fixture(scope="session")
def async_pool(pytestconfig: pytest.Config) -> Iterator[Pool]:
    """A pool whose tensors are on the asynchronous device."""
    import async_device

    async_device.build()
    shared = Pool("asyncdev", pytestconfig.stash[_SEED])
    yield shared
    shared.close()


@pytest.fixture(scope="session")
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    device = request.config.getoption("--device")
    if device == "asyncdev":
        yield request.getfixturevalue("async_pool")
        return
    shared = Pool(device)
    yield shared
    shared.close()

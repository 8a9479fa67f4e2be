"""Tests of the options of conftest.py that select parameter sets, in nested runs of pytest."""

from __future__ import annotations

import shlex

import pytest

import conftest

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.any_torch

TESTS = """
    import pytest

    worlds = pytest.mark.parametrize("world", [1, 2, 4])

    @worlds
    def test_plain(world): pass

    @worlds
    def test_pool(pool, world): pass

    @worlds
    @pytest.mark.on_device
    def test_async(async_pool, world): pass

    @pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.cpu_only("reason"))])
    def test_cpu(pool, world): pass

    @pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.long), 4])
    def test_long(pool, world): pass
"""


def _run(pytester: pytest.Pytester, args: str) -> pytest.HookRecorder:
    pytester.makeini("[pytest]\nmarkers =\n  long\n  on_device\n  cpu_only(reason)")
    pytester.makepyfile(TESTS)
    return pytester.inline_run("-p", "no:cacheprovider", *shlex.split(args), plugins=[conftest])


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ("--one-in 20 --turn 5", "plain[4] pool[4] async[1] async[2] async[4] cpu[4] long[4]"),
        ("--one-in 20 --turn 1 -m 'not long'", "plain[2] pool[2] async[1] async[2] async[4] cpu[2] long[4]"),
        ("--one-in 2 --turn 1 --device asyncdev", "pool[2] async[1] async[2] async[4] cpu[2] long[2]"),
        ("--one-in 20 --turn 2 --device asyncdev", "pool[4] async[1] async[2] async[4] cpu[1] long[4]"),
        ("--device cuda -k 'async or cpu'", "cpu[1] cpu[2]"),
    ],
)
def test_selected_sets(pytester: pytest.Pytester, args: str, expected: str) -> None:
    (finish,) = _run(pytester, f"--collect-only {args}").getcalls("pytest_collection_finish")
    assert [item.name for item in finish.session.items] == [f"test_{name}" for name in expected.split()]


@pytest.mark.parametrize(("seconds", "expected"), [(0, ["plain[4]"]), (600, ["plain[1]", "plain[2]", "plain[4]"])])
def test_last_set_runs_late(pytester: pytest.Pytester, seconds: int, expected: list[str]) -> None:
    passed, _, failed = _run(pytester, f"-k plain --full-for {seconds}").listoutcomes()
    assert [report.nodeid.partition("::test_")[2] for report in passed] == expected and not failed

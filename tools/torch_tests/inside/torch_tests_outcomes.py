"""A pytest plugin that writes each test's outcome at once, so that a run that hangs or dies keeps its outcomes.

One JSON object per line in $SHARDWRIGHT_TORCH_TESTS_OUT/outcomes.jsonl: {"test", "outcome", "text"}; the outcome is
`started`, `passed`, `failed`, `skipped` or `uncollectable`. Tests named in the file `done` there are skipped.
"""

from __future__ import annotations

import json
import os
import pathlib

_OUT = pathlib.Path(os.environ["SHARDWRIGHT_TORCH_TESTS_OUT"])


def _write(test, outcome, text=""):
    with (_OUT / "outcomes.jsonl").open("a") as file:
        file.write(json.dumps({"test": test, "outcome": outcome, "text": text}) + "\n")


def pytest_collection_modifyitems(items):
    done_file = _OUT / "done"
    done = set(done_file.read_text().splitlines()) if done_file.exists() else set()
    items[:] = [item for item in items if item.nodeid not in done]


def pytest_collectreport(report):
    if report.failed:
        _write(report.nodeid, "uncollectable", report.longreprtext)


def pytest_runtest_logstart(nodeid):
    _write(nodeid, "started")


def pytest_runtest_logreport(report):
    # Set-up and tear-down report only failures and skips.
    if report.when == "call" or not report.passed:
        _write(report.nodeid, report.outcome, report.longreprtext)

"""Adds a part to the summary of tools/gpu_check and prints it: gpu_summary.py FILE NAME STATUS SECONDS.

For a part with tests, it counts passed, failed and skipped tests, from test_NAME.xml next to FILE; a part whose tests
were all skipped counts as not run. It does not import torch, so a summary after each part takes little time.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

NO_TEST_RAN = 5  # pytest's status
OUT_OF_TIME = 124


def ask_for(field: str) -> list[str]:
    """Returns this field of each GPU, from nvidia-smi."""
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip().splitlines()


def version_of(*packages: str) -> str | None:
    for package in packages:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def count_tests(report: Path) -> dict[str, int]:
    """Returns the number of tests of a JUnit report by outcome; nothing if the report is missing or incomplete."""
    try:
        suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
    except (OSError, ElementTree.ParseError):
        return {}
    names = ("tests", "skipped", "failures", "errors")
    tests, skipped, failures, errors = (sum(int(suite.get(name, 0)) for suite in suites) for name in names)
    return {"passed": tests - skipped - failures - errors, "failed": failures + errors, "skipped": skipped}


def outcome_of(status: int, tests: dict[str, int]) -> str:
    if status == OUT_OF_TIME:
        return "OUT OF TIME"
    if status not in (0, NO_TEST_RAN):
        return f"FAILED with status {status}"
    nothing_ran = status == NO_TEST_RAN or (tests and tests["passed"] == 0)
    return "NOTHING RAN: all skipped" if nothing_ran else "ok"


def main(file: Path, name: str, status: int, seconds: int) -> None:
    if file.exists():
        summary: dict[str, Any] = json.loads(file.read_text())
    else:
        summary = {
            "gpus": ask_for("name"),
            "driver": next(iter(ask_for("driver_version")), None),
            "python": platform.python_version(),
            "torch": version_of("torch"),
            "nccl": version_of("nvidia-nccl-cu13", "nvidia-nccl-cu12"),
            "parts": [],
        }
    # A part that runs again in a later call replaces its earlier entry.
    summary["parts"] = [part for part in summary["parts"] if part["name"] != name]
    tests = count_tests(file.parent / f"test_{name}.xml")
    outcome = outcome_of(status, tests)
    summary["parts"].append({"name": name, "status": status, "seconds": seconds, "outcome": outcome, **tests})
    file.write_text(json.dumps(summary, indent=2) + "\n")
    counted = "".join(f", {number} {what}" for what, number in tests.items())
    print(f"=== {name}: {outcome} after {seconds} s{counted}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))

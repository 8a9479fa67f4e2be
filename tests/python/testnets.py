"""Runs `tools/testnet` in tests: ranks in network namespaces, connected by links of a given rate."""

from __future__ import annotations

import functools
import os
import pathlib
import subprocess
import sys

import pytest

TESTNET = pathlib.Path(__file__).parents[2] / "tools" / "testnet"
IMPOSSIBLE = 3


def run(
    network: list[str], command: list[str], *, environment: dict[str, str] | None = None, timeout_seconds: float = 120
) -> subprocess.CompletedProcess[str]:
    """Runs a command on a network such as ``["2", "1", "1gbit"]``. Returns its output and exit status."""
    return subprocess.run(
        [str(TESTNET), *network, "--", *command],
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
        env={**os.environ, **(environment or {})},
    )


@functools.cache
def _why_not(network: tuple[str, ...]) -> str | None:
    done = run(list(network), ["true"])
    return done.stderr.strip() if done.returncode == IMPOSSIBLE else None


def skip_without(*network: str) -> None:
    """Skips the test if such a network cannot be made, and gives the reason."""
    reason = _why_not(network or ("1", "1", "1gbit"))
    if reason is not None:
        pytest.skip(reason)


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]

"""A short training over links that lose packets, delay and fail; `make test-links` runs a long one."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

import testnets

TRAINING = pathlib.Path(__file__).parents[1] / "links" / "training.py"


@pytest.mark.long
@pytest.mark.parametrize("scenario", ["lossy", "nodes", "interrupted", "cut"])
def test_training_over_bad_links(scenario: str) -> None:
    testnets.skip_without("2", "1", "100mbit")
    command = [sys.executable, str(TRAINING), "--short", "--only", scenario]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, env=dict(os.environ))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all as they should be" in done.stdout

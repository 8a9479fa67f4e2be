"""The programs in examples/ that need other libraries run as a whole."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshes import IS_2_11

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("program", "num_ranks"),
    [
        ("transformers_tp.py", 2),
        pytest.param("torchtitan_linear.py", 4, marks=pytest.mark.release),
        pytest.param("torchtitan_fully_shard.py", 4, marks=pytest.mark.release),
    ],
)
def test_program_runs_under_torchrun(program: str, num_ranks: int) -> None:
    """The programs compare their results with the unsharded model's, and fail if they differ."""
    if IS_2_11 and program == "torchtitan_fully_shard.py":
        pytest.skip("torchtitan 0.3 needs torch 2.12")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    ran = subprocess.run(
        [sys.executable, *launcher, str(EXAMPLES / program)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout

"""Runs the multi-rank scripts of tests/gpu on the asynchronous device, so that they need no GPU in CI."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import async_tests  # noqa: F401  (so that async_device is found)

FOLDER = Path(__file__).resolve().parents[1] / "gpu"
LIMIT_SECONDS = 240
GRACE_SECONDS = 20  # a rank at its limit prints its position and exits


TASKS = (
    *("nccl_ranks.py reach", "nccl_ranks.py check", "nccl_ranks.py peers"),
    *("model_ranks.py attention", "model_ranks.py fully_shard", "model_ranks.py many"),
    "model_ranks.py compiled",  # by "aot_eager": Inductor has no code generator for this device
)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.long
def test_scripts_run_without_a_gpu(task: str) -> None:
    import async_device

    async_device.build()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script, name = task.split()
    settings = {
        "SHARDWRIGHT_RANKS_DEVICE": async_device.DEVICE,
        "SHARDWRIGHT_RANKS_SECONDS": str(LIMIT_SECONDS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
    }
    deadline = time.monotonic() + LIMIT_SECONDS + GRACE_SECONDS
    processes = [
        subprocess.Popen(
            [sys.executable, str(FOLDER / script), name],
            env={**os.environ, **settings, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        printed = [process.communicate(timeout=deadline - time.monotonic())[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(printed)


def test_scripts_do_not_hardcode_cuda() -> None:
    """Only checks of capabilities and compilers' CUDA graphs may name CUDA."""
    allowed = ("IS_CUDA", "cudagraph_")
    for script in ("nccl_ranks.py", "model_ranks.py"):
        lines = (FOLDER / script).read_text().splitlines()
        named = [line for line in lines if "cuda" in line and not line.strip().startswith(("#", '"'))]
        assert all(any(word in line for word in allowed) for line in named), named

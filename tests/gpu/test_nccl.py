"""Redistributes and products over NCCL: one rank, and several that share this GPU if NCCL allows it."""

from __future__ import annotations

import functools
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("nccl_ranks.py")
LIMIT_SECONDS = 90
REACH_SECONDS = 30
GRACE_SECONDS = 10  # a rank at its limit prints its position and exits
# Settings that let several ranks share one GPU, depending on the version of NCCL; see nccl_ranks.py.
WAYS = {"host ids": {"NCCL_HOSTID": "rank{rank}"}, "multi-rank": {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def run(task: str, world: int, way: str, script: Path = SCRIPT, limit_seconds: float = LIMIT_SECONDS) -> str:
    """Runs ranks to the end, and returns the output of the first failed one, or "". `way` lets them share a GPU."""
    deadline = time.monotonic() + limit_seconds + GRACE_SECONDS
    common = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "WORLD_SIZE": str(world),
        "NCCL_MAX_CTAS": "4",
        "NCCL_SOCKET_IFNAME": "lo",
        "SHARDWRIGHT_RANKS_SECONDS": str(limit_seconds),
    }
    ranks = []
    for rank in range(world):
        settings = {name: value.format(rank=rank) for name, value in WAYS[way].items()} if world > 1 and way else {}
        environment = {**common, **settings, "RANK": str(rank)}
        command = [sys.executable, str(script), task]
        ranks.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    failed = ""
    for rank, process in enumerate(ranks):
        try:
            printed, _ = process.communicate(timeout=max(0.0, deadline - time.monotonic()) if not failed else 5)
        except subprocess.TimeoutExpired:
            process.kill()
            printed = f"rank {rank} did not end\n{process.communicate()[0]}"
        if process.returncode != 0 and not failed:
            failed = f"rank {rank}:\n{printed}"
    return failed


@functools.cache
def way_that_works() -> tuple[str | None, str]:
    reasons = []
    for way in WAYS:
        failed = run("reach", 2, way, limit_seconds=REACH_SECONDS)
        if not failed:
            return way, ""
        reasons.append(f"{way}: {failed.strip().splitlines()[-1]}")
    return None, "; ".join(reasons)


def check_on_one_gpu(task: str, world: int, script: Path = SCRIPT, limit_seconds: float = LIMIT_SECONDS) -> None:
    """Fails with the output of the first failed rank. Skips if this NCCL allows only one rank per GPU."""
    way: str | None = "host ids"
    if world > 1:
        way, reason = way_that_works()
        if way is None:
            pytest.skip(f"this NCCL takes one rank per GPU: {reason}")
        print(f"several ranks on one GPU by {way}")
    failed = run(task, world, way or "", script, limit_seconds)
    assert not failed, failed


@pytest.mark.parametrize("world", [1, 2, 4])
def test_nccl_ranks_match_global_tensors(world: int) -> None:
    check_on_one_gpu("check", world)

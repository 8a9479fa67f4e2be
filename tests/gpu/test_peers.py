"""Redistributes and products through arenas that peers copy from (`sw.prepare(peer_arena_bytes=...)`). Each rank has a
GPU if there are enough; otherwise ranks share one if NCCL and PyTorch allow it. The tests check results, not time;
benchmarks/gpu_peers.py measures time and needs two GPUs."""

from __future__ import annotations

import pytest
import test_nccl
import torch


@pytest.mark.parametrize("world", [2, 4])
def test_peer_arenas_match_global_tensors(world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    way: str | None = ""
    if torch.cuda.device_count() < world:
        way, reason = test_nccl.way_that_works()
        if way is None:
            pytest.skip(f"{world} ranks need {world} GPUs: this NCCL takes one rank per GPU: {reason}")
        monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    failed = test_nccl.run("peers", world, way)
    assert not failed, failed

"""Attention, `sw.fully_shard` and `sw.redistribute_many` over NCCL: one rank, and several that share this GPU where
this NCCL lets them."""

from __future__ import annotations

from pathlib import Path

import pytest
import test_nccl

SCRIPT = Path(__file__).with_name("model_ranks.py")


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("task", ["attention", "fully_shard", "many"])
def test_against_whole_tensors(task: str, world: int) -> None:
    way: str | None = "host ids"
    if world > 1:
        way, reason = test_nccl.way_that_works()
        if way is None:
            pytest.skip(f"this NCCL takes one rank per GPU: {reason}")
    failed = test_nccl.run(task, world, way or "", SCRIPT)
    assert not failed, failed

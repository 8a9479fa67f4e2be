"""Attention, `sw.fully_shard`, `sw.redistribute_many` and compiled code over NCCL: one rank, and several that share
this GPU if NCCL allows it."""

from __future__ import annotations

from pathlib import Path

import pytest
import test_nccl

SCRIPT = Path(__file__).with_name("model_ranks.py")


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("task", ["attention", "compiled", "fully_shard", "many"])
def test_models_match_unsharded_tensors(task: str, world: int) -> None:
    test_nccl.check_on_one_gpu(task, world, SCRIPT, 240 if task == "compiled" else test_nccl.LIMIT_SECONDS)

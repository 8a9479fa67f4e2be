"""Trains a transformers Llama, sharded by its own tensor-parallel plan, with shardwright doing every redistribute.

    pip install transformers accelerate
    torchrun --nproc-per-node 2 examples/transformers_tp.py

Runs on CPU with Gloo: five steps under ``strict=True``, once with ``tp_plan="auto"`` and once with a DistributedConfig,
next to the same steps of the unsharded model on each rank. Prints the losses of both and shardwright's counters. Exits
with 1 if the losses differ or any redistribute fell back to PyTorch. Tested with transformers 5.24.
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig

import shardwright as sw

STEPS = 5
TOLERANCE = 1e-5
CONFIG = LlamaConfig(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    max_position_embeddings=64,
)


def losses_of(model: torch.nn.Module, ids: torch.Tensor) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(STEPS):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float((loss.full_tensor() if isinstance(loss, DTensor) else loss).detach()))
    return losses


def main() -> int:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    ids = torch.randint(0, CONFIG.vocab_size, (2, 16))
    ways: dict[str, dict[str, Any]] = {
        "tp_plan": {"tp_plan": "auto"},
        "DistributedConfig": {"distributed_config": DistributedConfig(tp_size=dist.get_world_size(), tp_plan="auto")},
    }
    is_right = True
    with tempfile.TemporaryDirectory() as mine:
        folder = [mine]
        dist.broadcast_object_list(folder)
        for name, options in ways.items():
            torch.manual_seed(1)
            unsharded = LlamaForCausalLM(CONFIG)
            if dist.get_rank() == 0:
                unsharded.save_pretrained(folder[0])
            dist.barrier()
            parallel = LlamaForCausalLM.from_pretrained(folder[0], **options)
            sw.reset_stats()
            with sw.enabled(strict=True):
                actual = losses_of(parallel, ids)
            expected = losses_of(unsharded, ids)
            stats = sw.stats()
            close = all(abs(a - b) < TOLERANCE for a, b in zip(actual, expected, strict=True))
            is_right = is_right and close and stats["fallbacks"] == 0 and stats["calls"] > 0
            if dist.get_rank() == 0:
                print(f"{name}: {stats['calls']} redistributes, {stats['fallbacks']} by PyTorch's own path")
                print("  losses       ", " ".join(f"{loss:.5f}" for loss in actual))
                print("  whole model's", " ".join(f"{loss:.5f}" for loss in expected), flush=True)
            dist.barrier()
    dist.destroy_process_group()
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())

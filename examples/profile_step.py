"""Profiles training steps on all ranks, and lists what moved.

    torchrun --nproc-per-node 4 examples/profile_step.py profiles
    shardwright trace profiles                    # one trace of all ranks, in Perfetto

Trains a small model with sharded weights and tensor parallelism. After three steps, in which groups are made and plans
are cached, one step is profiled. In the trace, each step of a plan is a range with its layouts and bytes, next to the
products that it overlaps. Rank 0 then prints the calls, bytes and time of each pair of layouts in two more steps,
without the profiler.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import shardwright as sw
from shardwright.parallel import ColwiseParallel, RowwiseParallel

WIDTH, LAYERS, ROWS, WARM_UP = 256, 4, 64, 3


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def make_model(mesh: DeviceMesh) -> nn.Sequential:
    model = nn.Sequential(*(Layer() for _ in range(LAYERS)))
    for layer in model:
        parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        sw.fully_shard(layer, mesh=mesh["dp"])
    return model


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "profiles")
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    model, x = make_model(mesh), torch.randn(ROWS, WIDTH)

    def step() -> None:
        model(x).square().mean().backward()
        model.zero_grad()

    for _ in range(WARM_UP):
        step()
    folder.mkdir(parents=True, exist_ok=True)
    with torch.profiler.profile() as profile, torch.profiler.record_function("training step"):
        step()
    profile.export_chrome_trace(str(folder / f"rank{dist.get_rank()}.json.gz"))

    sw.debug.record_layouts()
    for _ in range(2):
        step()
    if dist.get_rank() == 0:
        for layouts, row in sw.stats(by="layout").items():
            print(f"{row['seconds'] * 1e3:8.2f} ms {row['calls']:5d} calls {row['bytes']:12,d} B  {layouts}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""A pipeline of two stages, each with replicas, sharded weights and tensor parallelism: four kinds of parallelism.

    torchrun --nproc-per-node 8 examples/pipeline_stages.py

The mesh has four dims:

    stage      consecutive layers; PyTorch's 1F1B schedule sends activations from stage to stage, in micro-batches
    replicate  copies of a stage, for other samples of the batch
    shard      other samples again; weights are sharded over them, and gathered when they are used
    tp         the ranks that share hidden units

Gradients are accumulated over the micro-batches of a step and reduced once. Prints losses next to those of the whole
model on one rank.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

import shardwright as sw
from report import say, say_losses
from shardwright.parallel import ColwiseParallel, RowwiseParallel

DIMS = ("stage", "replicate", "shard", "tp")
NUM_STAGES, LAYERS_PER_STAGE, WIDTH = 2, 2, 24
ROWS, MICRO_BATCHES, STEPS = 8, 4, 5  # rows of a data-parallel rank in a step


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer() for _ in range(NUM_STAGES * LAYERS_PER_STAGE)))


def parallelize(layers: nn.Sequential, mesh: DeviceMesh) -> None:
    for layer in layers:
        parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    for module in [*layers, layers]:
        sw.fully_shard(
            module,
            mesh=mesh["replicate", "shard"],
            options=sw.fsdp.Options(placements=lambda parameter: [Replicate(), Shard(0)]),
        )


def train(mesh: DeviceMesh) -> tuple[list[float], list[float]]:
    """Returns the losses of each step, of the pipeline and of the whole model."""
    stage = mesh.get_local_rank("stage")
    is_last = stage == NUM_STAGES - 1
    whole = make_model()
    layers = make_model()[stage * LAYERS_PER_STAGE :][:LAYERS_PER_STAGE]
    parallelize(layers, mesh)
    pipeline = Schedule1F1B(
        PipelineStage(layers, stage, NUM_STAGES, torch.device("cpu"), group=mesh.get_group("stage")),
        n_microbatches=MICRO_BATCHES,
        loss_fn=F.mse_loss,
    )
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (layers, whole)]
    ways = mesh["replicate"].size() * mesh["shard"].size()
    index = mesh.get_local_rank("replicate") * mesh["shard"].size() + mesh.get_local_rank("shard")
    losses: tuple[list[float], list[float]] = ([], [])
    for _ in range(STEPS):
        inputs, targets = torch.randn(2, ways * ROWS, WIDTH)  # the same on all ranks
        part, target = inputs.chunk(ways)[index], targets.chunk(ways)[index]
        of_micro_batches: list[torch.Tensor] = []
        pipeline.step(
            *([part] if stage == 0 else []),
            **({"target": target, "losses": of_micro_batches} if is_last else {}),
        )
        expected = F.mse_loss(whole(inputs), targets)
        expected.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        loss = torch.stack(of_micro_batches).mean() if is_last else torch.zeros(())
        dist.all_reduce(loss)
        losses[0].append(loss.item() / (ways * mesh["tp"].size()))
        losses[1].append(expected.item())
    return losses


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    world = dist.get_world_size()
    if world % 8:
        raise SystemExit(f"the number of ranks must be a multiple of 8 (two each for stage, shard and tp), got {world}")
    mesh = init_device_mesh("cpu", (NUM_STAGES, world // 8, 2, 2), mesh_dim_names=DIMS)
    pipeline, whole = train(mesh)
    say(f"{mesh.shape} ranks for {', '.join(DIMS)}; loss by step")
    say_losses({"pipeline": pipeline, "on one rank": whole})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

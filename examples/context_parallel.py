"""A small transformer on ranks that share weights in three ways: context, tensor and sharded data parallelism.

    torchrun --nproc-per-node 8 examples/context_parallel.py

The mesh has four dims:

    replicate  copies of everything, for other samples of the batch
    shard      other samples again; weights are sharded over them, and over cp, and gathered when they are used
    cp         the ranks that share a sequence: attention is `scaled_dot_product_attention` of shardwright.attention,
               everything else works on single tokens
    tp         the ranks that share heads and hidden units

Trains for a few steps and prints losses next to those of the unsharded model on one rank.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

import shardwright as sw
from report import say, say_losses
from shardwright.parallel import ColwiseParallel, ContextParallel, RowwiseParallel

DIMS = ("replicate", "shard", "cp", "tp")
TOKENS, WIDTH, HEADS, LAYERS = 64, 32, 4, 2


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        heads = F.scaled_dot_product_attention(rotated(q, rotary), rotated(k, rotary), v, is_causal=True)
        return self.wo(heads.transpose(1, 2).flatten(2))


def rotary_table(length: int) -> torch.Tensor:
    """Returns cos and sin of the angles of each position: [length, depth of a head]."""
    half = WIDTH // HEADS // 2
    angles = torch.arange(length)[:, None] * 1000.0 ** (-torch.arange(half) / half)
    return torch.cat([angles.cos(), angles.sin()], 1)


def rotated(x: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
    cos, sin = rotary.chunk(2, 1)
    first, second = x.chunk(2, 3)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], 3)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norms[0](x), rotary)
        return x + self.down(F.silu(self.up(self.norms[1](x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)

    def forward(self, tokens: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, rotary)
        return self.head(x)


def parallelize(model: Model, mesh: DeviceMesh, length: int) -> None:
    """Prepares the model for sequences of this length."""
    for layer in model.layers:
        parallelize_module(layer.attention, mesh["cp"], ContextParallel(size=length, layout="zigzag"))
        styles = {f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")}
        styles |= {"attention.wo": RowwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(layer, mesh["tp"], styles)
    data = mesh["replicate", "shard", "cp"]
    for module in [*model.layers, model]:
        sw.fully_shard(
            module, mesh=data, options=sw.fsdp.Options(placements=lambda parameter: [Replicate(), Shard(0), Shard(0)])
        )


def part_of(full: torch.Tensor, mesh: DeviceMesh, dim: int) -> torch.Tensor:
    """Returns this rank's part of a sequence that all ranks have."""
    return sw.attention.redistribute_sequence(
        full, "whole", "zigzag", dim=dim, size=full.shape[dim], group=mesh.get_group("cp")
    )


def loss_of(model: nn.Module, tokens: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Returns this rank's contribution to the mean loss of the global batch, [samples, positions + 1].

    Contributions sum to the mean loss. `fully_shard` averages gradients, so the caller multiplies by the number of
    data-parallel ranks.
    """
    ways = mesh["replicate"].size() * mesh["shard"].size()
    index = mesh.get_local_rank("replicate") * mesh["shard"].size() + mesh.get_local_rank("shard")
    local_tokens = tokens.chunk(ways)[index]
    rotary = rotary_table(tokens.shape[1] - 1)
    inputs, labels = (part_of(t, mesh, 1) for t in (local_tokens[:, :-1], local_tokens[:, 1:]))
    logits = model(inputs, part_of(rotary, mesh, 0))
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / tokens[:, 1:].numel()


def train(mesh: DeviceMesh, length: int, steps: int) -> tuple[list[float], list[float]]:
    """Returns the losses of each step, of the parallel and of the unsharded model."""
    torch.manual_seed(0)
    unsharded, model = Model(), Model()
    model.load_state_dict(unsharded.state_dict())
    parallelize(model, mesh, length)
    optimizers = [torch.optim.AdamW(trained.parameters(), lr=1e-2) for trained in (model, unsharded)]
    num_data_ranks = mesh["replicate", "shard", "cp"].size()
    losses: tuple[list[float], list[float]] = ([], [])
    for _ in range(steps):
        tokens = torch.randint(TOKENS, (4, length + 1))  # the same on all ranks
        loss = loss_of(model, tokens, mesh)
        (loss * num_data_ranks).backward()
        logits = unsharded(tokens[:, :-1], rotary_table(length))
        expected = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        expected.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses[0].append(total.item() / mesh["tp"].size())  # ranks of tp have the same loss
        losses[1].append(expected.item())
    return losses


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    world = dist.get_world_size()
    if world % 4:
        raise SystemExit(f"the number of ranks must be a multiple of 4 (two for cp and two for tp), got {world}")
    mesh = init_device_mesh("cpu", (1, world // 4, 2, 2), mesh_dim_names=DIMS)
    parallel, unsharded = train(mesh, length=45, steps=5)
    say(f"{mesh.shape} ranks for {', '.join(DIMS)}; loss by step")
    say_losses({"parallel": parallel, "on one rank": unsharded})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

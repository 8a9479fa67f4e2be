"""Trains a mixture of experts: every rank holds some experts, and tokens travel to them.

    torchrun --nproc-per-node 4 examples/experts.py

Ten experts are spread over the ranks, unevenly if the ranks do not divide ten. Everything else is sharded over the same
ranks by `sw.fully_shard`. Each rank has samples of its own. `sw.experts.dispatch` sends a token once to each rank that
has any of its experts, and `sw.experts.combine` returns the weighted sums. Prints losses next to those of the whole
model on one rank.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardwright as sw
from report import say, say_losses

EXPERTS, TOP_K, WIDTH, LAYERS = 10, 3, 16, 2
TOKENS, STEPS = 32, 5  # tokens of a rank in a step


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.up(x)))


class Layer(nn.Module):
    """A router and experts. Once `held` is set, this rank has only its own experts, and tokens travel."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleDict({str(expert): Expert() for expert in range(EXPERTS)})
        self.held: list[list[int]] = []  # the experts of each rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        scores, expert_ids = self.router(normed).softmax(-1).topk(TOP_K, dim=-1)
        if not self.held:
            results = torch.stack([expert(normed) for expert in self.experts.values()], 1)
            return x + (scores.unsqueeze(-1) * results.take_along_dim(expert_ids.unsqueeze(-1), 1)).sum(1)
        rows, tokens_per_expert, handle = sw.experts.dispatch(normed, expert_ids, scores, self.held)
        parts = zip(self.experts.values(), rows.split(tokens_per_expert.tolist()), strict=True)
        results = torch.cat([expert(part) for expert, part in parts])
        return x + sw.experts.combine(results, handle)


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer() for _ in range(LAYERS)))


def parallelize(model: nn.Sequential, mesh: DeviceMesh, held: list[list[int]]) -> None:
    """Removes the experts of other ranks, and shards everything but experts. Gradients are sums over the ranks."""
    for layer in model:
        layer.held = held
        layer.experts = nn.ModuleDict({str(expert): layer.experts[str(expert)] for expert in held[mesh.get_rank()]})
        sw.fully_shard(layer, mesh=mesh, ignored_params=set(layer.experts.parameters()))
        layer.set_gradient_divide_factor(1.0)


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    whole, model = make_model(), make_model()
    held = [experts.tolist() for experts in torch.arange(EXPERTS).tensor_split(mesh.size())]
    parallelize(model, mesh, held)
    optimizers = [torch.optim.AdamW(trained.parameters(), lr=1e-2) for trained in (model, whole)]
    losses: list[float] = []
    expected_losses: list[float] = []
    for _ in range(STEPS):
        inputs, targets = torch.randn(2, mesh.size() * TOKENS, WIDTH)  # the same on all ranks
        mine = slice(mesh.get_local_rank() * TOKENS, (mesh.get_local_rank() + 1) * TOKENS)
        # This rank's part of the mean over all tokens.
        loss = F.mse_loss(model(inputs[mine]), targets[mine]) / mesh.size()
        loss.backward()
        expected = F.mse_loss(whole(inputs), targets)
        expected.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item())
        expected_losses.append(expected.item())
    say(f"experts by rank: {held}; loss by step")
    say_losses({"parallel": losses, "on one rank": expected_losses})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Models for tests of `sw.fully_shard`, and how they are trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor


class Mlp(nn.Module):
    """Layers with uneven weights under weights of the model's own; the first and last share one."""

    def __init__(self, width: int = 10, depth: int = 3, tied: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter = nn.Linear(width, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width + 1), nn.Tanh(), nn.Linear(2 * width + 1, width, bias=False))
            for _ in range(depth)
        )
        self.leave = nn.Linear(width, width, bias=False)
        if tied:
            self.leave.weight = self.enter.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.leave(x)


def shard(model: Mlp, wrap: Callable[..., Any], mesh: Any, outermost: Any = None, **options: Any) -> Mlp:
    for layer in model.layers:
        wrap(layer, mesh=mesh, **options)
    wrap(model, mesh=mesh, **{**options, **(outermost or {})})
    return model


def batch(step: int, rank: int | None = None, width: int = 10) -> torch.Tensor:
    rank = dist.get_rank() if rank is None else rank
    return torch.randn(4, width, generator=torch.Generator().manual_seed(1000 * step + rank))


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).float().square().mean()


def whole_loss(model: nn.Module, step: int) -> torch.Tensor:
    """The average over the batches of all ranks, for a model that is not sharded."""
    world = dist.get_world_size()
    losses = [loss_of(model, batch(step, rank)) for rank in range(world)]
    return torch.stack(losses).mean()


def full(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def part(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gradients(model: nn.Module) -> list[Any]:
    return [None if p.grad is None else p.grad for p in model.parameters()]

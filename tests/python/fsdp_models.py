"""Models and training helpers for tests of `sw.fully_shard`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import shardwright as sw
from shardwright.fsdp import packing


class Mlp(nn.Module):
    """Layers with uneven weights between two linear layers of the root, which share their weight if `tied`."""

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


def flat_fully_shard(module: Any, options: sw.fsdp.Options | None = None, **arguments: Any) -> Any:
    """Calls `sw.fully_shard`. Takes the fields of its options as keywords, as tables of cases list them."""
    own = {field.name for field in dataclasses.fields(sw.fsdp.Options)} & arguments.keys()
    flat = {name: arguments.pop(name) for name in own}
    return sw.fully_shard(module, options=dataclasses.replace(options or sw.fsdp.Options(), **flat), **arguments)


def without_packing() -> Any:
    """Returns a context and decorator in which all weights have messages of their own."""
    return mock.patch.dict(packing.COPIED_BYTES_PER_US, dict.fromkeys(packing.COPIED_BYTES_PER_US, 0.0))


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


def whole_loss(model: nn.Module, step: int, width: int = 10) -> torch.Tensor:
    """Returns the mean loss over the batches of all ranks, for an unsharded model."""
    world = dist.get_world_size()
    losses = [loss_of(model, batch(step, rank, width)) for rank in range(world)]
    return torch.stack(losses).mean()


def full(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def part(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gradients(model: nn.Module) -> list[Any]:
    return [None if p.grad is None else p.grad for p in model.parameters()]


def agreement_bytes(model: nn.Module, events: int = 3) -> int:
    """Returns the bytes a rank receives in comparisons: for each event, an all-reduce of 256 bytes per mesh dim.

    The last event, the end of a backward, has 16 bytes and one for each weight, if these are more.
    """
    parameters: list[Any] = list(model.parameters())
    sizes = parameters[0].device_mesh.shape
    sent = [256] * events + [len(parameters) - 240] * (len(parameters) > 240)
    return sum(-(-2 * (size - 1) * each // size) for size in sizes for each in sent if math.prod(sizes) > 1)


def last_reduction_is_in_chunks(schedule: Any) -> bool:
    """Returns True if the last reduction of a `StepSchedule` is in chunks."""
    *_, in_chunks = schedule.reductions[-1]
    return bool(in_chunks)


def received_bytes(model: nn.Module, units: Sequence[nn.Module | Sequence[nn.Module]]) -> int:
    """Returns the bytes this rank receives in a step: gathered weights, in chunks or not, and float32 gradients.

    Args:
        units: for each unit of the schedule, the modules with its parameters. Only parameters of two dims are chunked.
    """
    schedule, world = sw.fsdp.schedule(model), dist.get_world_size()
    weights = [list((nn.ModuleList(unit) if isinstance(unit, Sequence) else unit).parameters()) for unit in units]

    def lacks(parameters: Sequence[Any]) -> int:
        return sum(4 * (p.numel() - p.to_local().numel()) for p in parameters)

    received = agreement_bytes(model, 3 if schedule.reductions else 2)
    received += sum(lacks([p for p in weights[unit] if p.ndim > 1]) for unit, _ in schedule.chunk_gathers)
    for weight, *_ in schedule.gathers:
        original_of = schedule.original_of[weight]
        whole = weights[weight] if original_of < 0 else [p for p in weights[original_of] if p.ndim == 1]
        received += lacks(whole)
    parts = (p.to_local().numel() for unit, *_ in schedule.reductions for p in weights[unit])  # type: ignore[attr-defined]
    return received + sum(4 * (world - 1) * part for part in parts)

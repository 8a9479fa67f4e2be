"""Small weights of a unit share messages: few collectives, the results of separate ones, and the same choice on ranks.

Other tests of `sw.fully_shard` have small weights too, so they check values in shared messages.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import meshes
import shardwright as sw
from fsdp_models import Mlp, batch, flat_fully_shard, full, loss_of, part, shard, without_packing
from meshes import get_mesh
from pool import Pool
from shardwright.fsdp import packing
from shardwright.layouts.layout import Layout, Mesh

pytestmark = pytest.mark.on_device


class Small(nn.Module):
    """Weights of several shapes: even and uneven over the ranks, and shorter than the ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(12)
        self.up = nn.Linear(12, 7)
        self.down = nn.Linear(7, 12)
        self.scale = nn.Parameter(torch.rand(1) + 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(self.norm(x)))) * self.scale


class TensorParallel(nn.Module):
    """Two layers over tensor parallelism. The weight of the first is sharded along its first dim, which FSDP shards."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(12)
        self.up = nn.Linear(12, 8)
        self.down = nn.Linear(8, 12)
        self.to(meshes.device)
        parallelize_module(self, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(self.norm(x))))


def _trained(model: Any, mesh: Any, **options: Any) -> tuple[int, list[torch.Tensor]]:
    """Trains two steps. Returns the calls of the second step's moves, and the gradients of both."""
    flat_fully_shard(model, mesh=mesh, **options)
    gradients = []
    calls = 0
    for step in range(2):
        sw.reset_stats()
        loss_of(model, batch(step, width=12).to(meshes.device)).backward()
        calls = sw.stats()["calls"]
        gradients += [part(p.grad).clone() for p in model.parameters()]
        model.zero_grad()
    return calls, gradients


def _packed_and_not(mesh_shape: tuple[int, ...], case: str) -> None:
    mesh, options, most_calls = get_mesh(mesh_shape), {}, 3  # two gathers and a reduction
    if case == "second dim":
        options = {"shard_placement_fn": lambda p: Shard(p.ndim - 1)}
    elif case == "mixed":
        options = {"message_format": lambda p: "float8" if p.ndim > 1 else None}
        most_calls = 6  # an exchange of scales for each gather, and gradients in two dtypes
    found = []
    for context in (contextlib.nullcontext(), without_packing()):
        with context:
            if case == "tensor parallel":
                most_calls = 6  # the layers' weights are on both mesh dims, the norm's on one
                found.append(_trained(TensorParallel(mesh["b"]), mesh["a"]))
            else:
                found.append(_trained(Small().to(meshes.device), mesh, **options))
    (calls, packed), (separate_calls, separate) = found
    for a, b in zip(packed, separate, strict=True):
        assert torch.equal(a, b) if meshes.device == "cpu" else torch.allclose(a, b, rtol=1e-5, atol=1e-6)
    assert calls <= most_calls < separate_calls - 4, (calls, separate_calls)


@pytest.mark.parametrize(
    ("mesh_shape", "case"),
    [
        ((2,), "uneven"),
        ((4,), "uneven"),
        ((2, 2), "uneven"),
        ((4,), "second dim"),
        ((4,), "mixed"),
        ((2, 2), "tensor parallel"),
    ],
    ids=str,
)
def test_small_weights_share_messages(pool: Pool, mesh_shape: tuple[int, ...], case: str) -> None:
    """A step has few messages, and its gradients have the bits of those with a message for each weight."""
    pool.run(_packed_and_not, math.prod(mesh_shape), mesh_shape, case)


def _choice() -> None:
    grid = Mesh(get_mesh((2,)))

    def gather(rows: int) -> packing.Pair:
        return Layout(grid, (rows, 64), ["S(0)"], torch.float32), Layout(grid, (rows, 64), ["R"], torch.float32)

    rows = [3, 1 << 20, 8, 16]
    (message,) = packing.messages_of("cpu", [gather(n) for n in rows])
    assert [item.move for item in message.items] == [0, 2, 3], "the second tensor is too large"
    assert (message.received_bytes, message.sent_bytes) == (4 * 64 * 27, 4 * 64 * 14)
    assert not packing.messages_of("cpu", [gather(3), gather(1 << 20)]), "one tensor shares with no other"
    moves: list[tuple[list[str], list[str]]] = [(["S(0)"], ["S(1)"]), (["R"], ["S(0)"]), (["R"], ["R"])]
    pairs = [(Layout(grid, (4, 4), src, torch.float32), Layout(grid, (4, 4), dst, torch.float32)) for src, dst in moves]
    assert not packing.messages_of("cpu", pairs * 2), "these are no gathers and no reductions"


def test_large_tensors_have_their_own_messages(pool: Pool) -> None:
    pool.run(_choice, 2)


def _packing_after_schedule() -> None:
    model = shard(Mlp().to(meshes.device), sw.fully_shard, get_mesh((2,)))
    whole = Mlp().to(meshes.device)
    for step in range(4):
        with without_packing() if step < 2 else contextlib.nullcontext():
            loss_of(model, batch(step).to(meshes.device)).backward()
        loss = torch.stack([loss_of(whole, batch(step, rank).to(meshes.device)) for rank in range(2)]).mean()
        expected = torch.autograd.grad(loss, list(whole.parameters()))
        for p, gradient in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(full(p.grad), gradient, rtol=1e-4, atol=1e-6)
        model.zero_grad()


def test_schedules_stay_valid_when_more_weights_share_messages(pool: Pool) -> None:
    """A measurement of links can make more weights small. Their message does not overwrite weights of other units."""
    pool.run(_packing_after_schedule, 2)

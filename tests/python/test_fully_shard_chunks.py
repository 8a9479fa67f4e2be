"""`sw.fsdp.Options(chunked=True)`: weights are multiplied in chunks while they are gathered."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import meshes
import shardwright as sw
from allocations import allocated_peak
from fsdp_models import (
    Mlp,
    agreement_bytes,
    batch,
    flat_fully_shard,
    full,
    loss_of,
    received_bytes,
    shard,
    without_packing,
)
from meshes import get_mesh
from pool import Pool
from shardwright.fsdp import api, chunks, runner
from shardwright.fsdp.methods import ATTRIBUTE


class Timed(runner.Runner):
    """A runner for which each use takes ten times as long as the gather of a layer."""

    def _agreed_times(self, *args: Any) -> Any:
        found = super()._agreed_times(*args)
        return found._replace(uses=[10 * self.units[1].gather_ps] * len(found.uses))


def make(mesh: Any, width: int = 10, **options: Any) -> Mlp:
    return shard(Mlp(width, tied=False).to(meshes.device), flat_fully_shard, mesh, outermost=options)


@without_packing()  # weights that share a message would be faster than in chunks
def _trains(mesh_shape: tuple[int, ...]) -> None:
    mesh, width = get_mesh(mesh_shape), 256
    runner, api.Runner = api.Runner, Timed  # type: ignore[misc]
    try:
        # Nothing is gathered ahead, so that each layer waits for its weights.
        model, unsharded = make(mesh, width, chunked=True, prefetch=0), Mlp(width, tied=False).to(meshes.device)
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, unsharded)]
        for step in range(5):
            with sw.debug.wire_meter() as meter:
                loss_of(model, batch(step, width=width).to(meshes.device)).backward()
            losses = [
                loss_of(unsharded, batch(step, rank, width).to(meshes.device)) for rank in range(dist.get_world_size())
            ]
            torch.stack(losses).mean().backward()
            for p, q in zip(model.parameters(), unsharded.parameters(), strict=True):
                torch.testing.assert_close(full(p.grad), q.grad, rtol=1e-4, atol=1e-5)
            if step >= 3:
                # The last layer is not in chunks: it stays unsharded until its backward, which would gather it again.
                assert [i for i in sw.fsdp.schedule(model).original_of if i >= 0] == [1, 2]
                if meshes.device == "cpu" or len(mesh_shape) == 1:  # otherwise one all-reduce over both dims is faster
                    assert [unit for unit, *_, in_chunks in sw.fsdp.schedule(model).reductions if in_chunks] == [0]
                if len(mesh_shape) == 1:
                    assert meter.received_bytes == received_bytes(model, [[model.enter, model.leave], *model.layers])
            assert all(type(layer[0]) is nn.Linear for layer in model.layers)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    finally:
        api.Runner = runner  # type: ignore[misc]


@pytest.mark.parametrize("mesh_shape", [(2,), (3,), (2, 2)], ids=str)
def test_trains_as_the_unsharded_model(pool: Pool, mesh_shape: tuple[int, ...]) -> None:
    pool.run(_trains, torch.Size(mesh_shape).numel(), mesh_shape)


class Odd(nn.Module):
    """Layers that also use their weights other than by a call of a Linear with a plain tensor."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second, self.third = (nn.Linear(9, 9) for _ in range(3))
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.linear(self.first(x), self.first.weight)
        with torch.autocast("cpu", torch.bfloat16, enabled=meshes.device == "cpu"):
            x = self.second(x)
        if self.fails:
            raise KeyError
        return self.third(x.float()[None])[0] + self.third.weight.norm()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(9, 9, bias=False), Odd(), nn.Linear(9, 7)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _limit_below_one_unit() -> None:
    """Runs forwards in less memory than a unit takes, with different batches on ranks and other uses of weights."""
    mesh = get_mesh((3,))
    models = [Model().to(meshes.device) for _ in range(3)]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    limit = 1600  # the largest unit takes 1,080 bytes of weights, with alignment 3,072
    for model, options in ((models[1], {"chunked": True}), (models[2], {})):
        for layer in model.layers:
            sw.fully_shard(layer, mesh=mesh)
        flat_fully_shard(model, mesh=mesh, options=sw.fsdp.Options(memory_limit=limit), **options)
    unsharded, ours, without = models
    rank = dist.get_rank()
    with torch.no_grad():
        for step in range(4):
            x = torch.randn(rank, 4, 9, generator=torch.Generator().manual_seed(step)).to(meshes.device)
            torch.testing.assert_close(ours(x).cpu(), unsharded(x).cpu(), rtol=2e-2, atol=2e-2)
        schedule = sw.fsdp.schedule(ours)
        assert schedule.original_of == [-1] * 4 + [1, 2, 3] and schedule.peak_bytes <= limit
        with pytest.raises(ValueError, match=r"budget_bytes must be at least \d+, got 1600"):
            without(x)
        ours.layers[1].fails = True
        with pytest.raises(KeyError):
            ours(x)
        ours.layers[1].fails = False
        assert [type(m) for m in ours.layers[1].children()] == [nn.Linear] * 3
        torch.testing.assert_close(ours(x).cpu(), unsharded(x).cpu(), rtol=2e-2, atol=2e-2)
        # A step leaves the recorded sequence, and a unit is unsharded by hand.
        y = unsharded.layers[1](x)
        torch.testing.assert_close(ours.layers[2](y).cpu(), unsharded.layers[2](y).cpu())
        ours.layers[0].unshard()
        assert torch.equal(ours.layers[0].weight, unsharded.layers[0].weight)
        torch.testing.assert_close(ours(x).cpu(), unsharded(x).cpu(), rtol=2e-2, atol=2e-2)
        with sw.debug.wire_meter() as meter:
            ours(x)
        lacks = sum(4 * (p.numel() - p.to_local().numel()) for p in ours.parameters())
        again = sum(4 * (p.numel() - p.to_local().numel()) for p in ours.layers[1].parameters() if p.ndim > 1)
        received = meter.received_bytes - agreement_bytes(ours, 2)
        assert lacks <= received <= lacks + again, "three weights of Odd are also needed whole"


def test_forwards_run_in_less_memory_than_a_unit(pool: Pool) -> None:
    pool.run(_limit_below_one_unit, 3)


def _takes_less_memory() -> None:
    mesh, width = get_mesh((2,)), 512
    peaks = []
    for options in ({}, {"memory_limit": 4 << 20, "chunked": True}):
        model = make(mesh, width, prefetch=0, **options)
        x = batch(0, width=width)

        def forward(model: Mlp = model, x: torch.Tensor = x) -> None:
            with torch.no_grad():
                model(x)

        forward()
        forward()
        sw.runtime.release_staging()
        _, allocated = allocated_peak(forward)
        runner = getattr(model, ATTRIBUTE).runner
        peaks.append((runner._arena.numel() + allocated, sw.fsdp.schedule(model).peak_bytes))
    (whole, planned), (chunked, in_chunks) = peaks
    assert planned > 6 << 20 and in_chunks <= 4 << 20
    activations = 4 * 4 * 3 * 1025
    assert whole >= planned and chunked <= in_chunks + activations, peaks


@pytest.mark.cpu_only("the profiler counts the host's memory")
def test_chunked_forward_takes_less_memory(pool: Pool) -> None:
    pool.run(_takes_less_memory, 2)


def _linear_units() -> None:
    """Units that are themselves Linear modules also multiply in chunks: nothing reads their full weights."""
    mesh, limit = get_mesh((2,)), 15000  # each weight takes 16,384 bytes or more
    torch.manual_seed(2)
    unsharded = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 65)).to(meshes.device)
    sharded = copy.deepcopy(unsharded)
    for layer in sharded:
        sw.fully_shard(layer, mesh=mesh)
    sw.fully_shard(sharded, mesh=mesh, options=sw.fsdp.Options(chunked=True, memory_limit=limit))
    with torch.no_grad():
        sharded(torch.ones(1, 64, device=meshes.device))
        with mock.patch.object(chunks.ChunkedWeight, "read", side_effect=AssertionError("somebody reads a weight")):
            for step in range(3):
                x = batch(step, width=64).to(meshes.device)
                torch.testing.assert_close(sharded(x), unsharded(x), rtol=1e-4, atol=1e-5)
    assert [unit for unit in sw.fsdp.schedule(sharded).original_of if unit >= 0] == [1, 2]
    assert [type(layer).__name__ for layer in sharded] == ["ShardedLinear", "ShardedLinear"]


def test_linear_units_multiply_in_chunks(pool: Pool) -> None:
    pool.run(_linear_units, 2)


def _invalid_chunked() -> None:
    mesh = get_mesh((2,))
    with pytest.raises(ValueError, match="chunked must be True or False, got 1"):
        sw.fully_shard(Mlp().to(meshes.device), mesh=mesh, options=sw.fsdp.Options(chunked=1))  # type: ignore[arg-type]
    model = shard(Mlp().to(meshes.device), flat_fully_shard, mesh, chunked=True)
    with pytest.raises(ValueError, match="chunked must be set in the outermost call only, got True for layers.0"):
        model(batch(0).to(meshes.device))


def test_invalid_chunked_raises(pool: Pool) -> None:
    pool.run(_invalid_chunked, 2)

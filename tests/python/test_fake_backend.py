"""Dry runs on PyTorch's fake backend: no data moves, and results equal those of stock PyTorch."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import dtensors
import shardwright as sw
from pool import run_isolated

WORLD = 4


def _dry_run() -> list[str]:
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=WORLD)
    mesh = init_device_mesh("cpu", (WORLD,))
    own = torch.arange(64.0).view(8, 8)
    differs = []
    for src, dst in dtensors.MOVES:
        x = DTensor.from_local(own, mesh, [src], run_check=False)
        stock = x.redistribute(mesh, [dst]).to_local()
        with sw.enabled():
            ours = x.redistribute(mesh, [dst]).to_local()
        # In torch 2.11 the fake backend does not initialize the result of a reduce-scatter.
        is_defined = not (src.is_partial() and dst.is_shard()) or torch.__version__ >= "2.15"
        if ours.shape != stock.shape or (is_defined and not torch.equal(ours, stock)):
            differs.append(f"{src} -> {dst}: {ours} where stock has {stock}")
        if src.is_shard() and dst.is_replicate() and not torch.equal(ours, torch.cat([own] * WORLD, src.dim)):
            differs.append(f"{src} -> {dst}: the parts of other ranks are not copies of its own: {ours}")
    assert set(sw.stats()["fallback_reasons"]) == {"fake backend, which moves no data"}
    return differs


def test_dry_run_equals_stock() -> None:
    (outcome,) = run_isolated(_dry_run, 1)
    assert outcome.ok, outcome.error or outcome.exit_code
    assert not outcome.value


def _compiled_dry_run() -> None:
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=WORLD)
    mesh = init_device_mesh("cpu", (WORLD,))

    @torch.compile(backend="aot_eager", fullgraph=True)
    def gather(x: DTensor) -> torch.Tensor:
        return x.redistribute(mesh, [Shard(1)]).to_local() + 0

    own = torch.arange(16.0).view(2, 8)
    with sw.enabled():
        result = gather(DTensor.from_local(own, mesh, [Shard(0)], run_check=False))
    assert torch.equal(result, torch.cat([own[:, 2:4]] * WORLD))


def test_dry_run_of_compiled_code() -> None:
    (outcome,) = run_isolated(_compiled_dry_run, 1)
    assert outcome.ok, outcome.error or outcome.exit_code

"""Meshes may outlive `destroy_process_group` and still exist after a new `init_process_group`."""

from __future__ import annotations

import datetime
import pathlib
import tempfile
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import shardwright as sw
from pool import run_isolated
from shardwright.runtime import groups

WORLD = 4


def _reinitialize(scratch: str, number: int, rank: int, world: int) -> None:
    dist.destroy_process_group()
    store = dist.FileStore(str(pathlib.Path(scratch) / str(number)), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=datetime.timedelta(seconds=40))


def _use_meshes_after_reinitialization(scratch: str, compiles: bool) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    full = torch.rand(8, 8, generator=torch.Generator().manual_seed(0))
    expected = torch.softmax(full, 0) + torch.softmax(full, 1)

    def gather(x: DTensor) -> torch.Tensor:
        softened = torch.softmax(x, 0) + torch.softmax(x, 1)  # DTensor redistributes implicitly and caches how
        return softened.redistribute(x.device_mesh, [Replicate(), Replicate()]).to_local()

    call = torch.compile(gather, backend="aot_eager", fullgraph=True) if compiles else gather
    first: DeviceMesh | None = None
    with sw.enabled(strict=True):
        for number in range(3):
            _reinitialize(scratch, number, rank, world)
            mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("a", "b"))
            mesh._flatten("a_b")  # the default group, which graphs of an earlier iteration find by name
            assert first is None or first == mesh
            for src in ([Shard(0), Shard(1)], [Shard(1), Shard(0)]):
                a, b = mesh.get_coordinate()
                local = full.chunk(2, src[0].dim)[a].chunk(world // 2, src[1].dim)[b].contiguous()
                x = DTensor.from_local(local, mesh, src, run_check=False)
                torch.testing.assert_close(call(x), expected)
            if first is None:
                first = mesh
            # PyTorch's caches may return a mesh of the first process group that equals the current one.
            grid = sw.Mesh(first)
            for is_compiling in (False, True):
                with mock.patch("torch.compiler.is_compiling", return_value=is_compiling):
                    assert {(0,), (1,), (0, 1)} <= set(groups.dims_with_groups(grid, first))
                    owner = groups.owner_of(first)
                    found = [groups.find_or_make(grid.group_ranks(rank, [d]), owner) for d in range(2)]
                for d, group in enumerate(found):
                    assert group == mesh.get_group(d), "another group than today's mesh has"
                    total = torch.ones(1)
                    dist.all_reduce(total, group=group)
                    assert total.item() == mesh.size(d)


@pytest.mark.parametrize("compiles", [False, True])
def test_mesh_outlives_process_group(compiles: bool) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        outcomes = run_isolated(_use_meshes_after_reinitialization, WORLD, scratch, compiles)
    assert all(outcome.ok for outcome in outcomes), "\n".join(str(o.error or o.exit_code) for o in outcomes)

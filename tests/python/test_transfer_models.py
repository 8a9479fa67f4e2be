"""Transfers from and to models on slices of meshes."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import oracle
import shardwright as sw
from pool import Pool

pytestmark = pytest.mark.cpu_only("the modules are on the CPU")


@pytest.fixture
def folder() -> Iterator[str]:
    path = tempfile.mkdtemp(prefix="shardwright_models_")
    yield path
    shutil.rmtree(path)


def _norms_on_slices(folder: str, dims: tuple[int, int], uses_fsdp: bool) -> None:
    """A norm without a style of tensor parallelism lies on mesh["dp"], or is replicated by hand on mesh["tp"]."""
    mesh = DeviceMesh("cpu", torch.arange(4).view(dims), mesh_dim_names=("dp", "tp"))
    net = nn.Sequential(nn.LayerNorm(5), nn.Linear(5, 6))
    parallelize_module(net, mesh["tp"], {"1": ColwiseParallel()})
    if uses_fsdp:
        fully_shard(net, mesh=mesh["dp"])
    whole = {name: oracle.global_tensor(x.shape, x.dtype, i) for i, (name, x) in enumerate(net.state_dict().items())}

    def check() -> None:
        for name, x in net.state_dict().items():
            assert torch.equal(x.full_tensor() if isinstance(x, DTensor) else x, whole[name]), name

    sw.transfer(whole, to=net.state_dict()).start().wait()
    check()
    dcp.save(net.state_dict(), checkpoint_id=folder)
    for load in (
        lambda to: sw.load_checkpoint(folder, to),
        lambda to: dcp.load(to, storage_reader=sw.CheckpointReader(folder)),
    ):
        with torch.no_grad():
            for x in net.parameters():
                x.zero_()
        load(net.state_dict())
        check()
    serve = {name: sw.Layout(sw.Mesh({"one": 2}, [3, 1]), x.shape, ["S(0)"]) for name, x in whole.items()}
    t = sw.transfer(net.state_dict(), to=serve)
    t.start().wait()
    for name, x in t.tensors.items():
        assert torch.equal(x, whole[name].chunk(2)[[3, 1].index(dist.get_rank())]), name


@pytest.mark.parametrize("uses_fsdp", [True, False])
def test_slices_of_a_mesh_are_replicas(pool: Pool, folder: str, uses_fsdp: bool) -> None:
    pool.run(_norms_on_slices, 4, folder, (2, 2), uses_fsdp)


def _slices_that_differ() -> list[str]:
    rank = dist.get_rank()
    said = []
    cases: list[tuple[list[int], int]] = [
        ([0, 1] if rank < 2 else [1, 2], 4),  # a rank in two slices; rank 3 is in none
        ([0] if rank == 0 else [1, 2, 3], 4),  # other sizes
        ([0, 1] if rank < 2 else [2, 3], 4 + rank // 2),  # other shapes
    ]
    for ranks, rows in cases:
        # Without communication, and without groups: a rank outside the mesh passes nothing.
        mesh = DeviceMesh("cpu", ranks, _init_backend=False)
        layout = sw.Layout(sw.Mesh({"a": len(ranks)}, ranks), (rows,), ["S(0)"])
        state = None
        if rank in ranks:
            local = torch.zeros(layout.local_shape(rank))
            state = {"w": DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=(rows,), stride=(1,))}
        with pytest.raises(ValueError) as raised:
            sw.transfer(state, {"w": torch.zeros(4)})
        said.append(str(raised.value))
    return said


def test_slices_that_are_no_replicas(pool: Pool) -> None:
    said = pool.run(_slices_that_differ, 4)
    assert said[0] == said[1] == said[2] == said[3]
    for text in said[0]:
        assert "source w: the ranks declare different layouts" in text
        assert "no source is mapped" not in text
    assert "whose mesh has ranks [0, 1]" in said[0][0] and "whose mesh has ranks [1, 2]" in said[0][0]
    assert "slices of a mesh that have equal sizes and no rank in common" in said[0][0]

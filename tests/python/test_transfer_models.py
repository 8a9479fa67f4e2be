"""Tests of transfers from and to models that change after planning, on slices of meshes, and with empty parts."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import meshes
import oracle
import shardwright as sw
from pool import Pool

pytestmark = pytest.mark.cpu_only("the modules are on the CPU")


@pytest.fixture
def folder() -> Iterator[str]:
    path = tempfile.mkdtemp(prefix="shardwright_models_")
    yield path
    shutil.rmtree(path)


def _converted(model: nn.Linear) -> None:
    model.to(torch.float64).to(torch.float32)


def _assigned(model: nn.Linear) -> None:
    model.load_state_dict({name: p.clone() for name, p in model.state_dict().items()}, assign=True)


def _replaced(model: nn.Linear) -> None:
    model.weight = nn.Parameter(model.weight.detach().clone())


CHANGES: tuple[Callable[[nn.Linear], None], ...] = (_converted, _assigned, _replaced)


def _model(kind: str) -> nn.Linear:
    model = nn.Linear(4, 6, bias=False)
    mesh = meshes.get_mesh((2,))
    if kind == "sw.fully_shard":
        sw.fully_shard(model, mesh=mesh)
    elif kind == "fully_shard":
        fully_shard(model, mesh=mesh)
    return model


def _given(model: nn.Linear, what: str) -> Any:
    """Returns the argument for a transfer and keeps no other reference to it."""
    if what == "parameters":
        return {"weight": model.weight}
    return model.state_dict() if what == "state_dict()" else model.state_dict


def _follows_change(kind: str, what: str, change: Callable[[nn.Linear], None]) -> bool:
    return kind == "sw.fully_shard" or what == "state_dict" or (what == "parameters" and change is _converted)


def _whole(model: nn.Linear) -> torch.Tensor:
    weight = model.weight.detach()
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


_GONE = "was replaced after the transfer was planned|other tensors used this memory when the transfer was planned"


def _from_changed_models(kind: str) -> None:
    serve = sw.Mesh({"one": 1}, [1])
    layouts = {"weight": sw.Layout(serve, (6, 4), ["R"])}
    for what in ("parameters", "state_dict()", "state_dict"):
        for change in CHANGES:
            model = _model(kind)
            held = model.weight  # as an optimizer has it
            t = sw.transfer(_given(model, what), layouts)
            del held
            for version in range(2):
                change(model)
                with torch.no_grad():
                    model.weight.copy_(torch.ones_like(model.weight) * (version + 2))
                if not _follows_change(kind, what, change):
                    with pytest.raises(ValueError, match=_GONE):
                        t.start()
                    continue
                t.start().wait()
                for x in t.tensors.values():
                    assert x.eq(version + 2).all(), (what, change)


@pytest.mark.parametrize("kind", ["sw.fully_shard", "fully_shard", "plain"])
def test_start_reads_current_parameters(pool: Pool, kind: str) -> None:
    pool.run(_from_changed_models, 2, kind)


def _into_changed_models(kind: str, staging: str | None) -> None:
    source = torch.zeros(6, 4)
    for what in ("parameters", "state_dict()", "state_dict"):
        for change in CHANGES:
            model = _model(kind)
            t = sw.transfer({"weight": source}, _given(model, what), staging=staging)
            for version in range(2):
                source.fill_(version + 7)
                if version == 1:
                    change(model)
                if version == 1 and not _follows_change(kind, what, change):
                    with pytest.raises(ValueError, match=_GONE):
                        t.start()
                    continue
                t.start().wait()
                assert torch.equal(_whole(model), source), (what, change, version)


@pytest.mark.parametrize("staging", [None, "double"])
@pytest.mark.parametrize("kind", ["sw.fully_shard", "fully_shard", "plain"])
def test_start_writes_current_parameters(pool: Pool, kind: str, staging: str | None) -> None:
    pool.run(_into_changed_models, 2, kind, staging)


def _changed_on_one_rank() -> list[str]:
    rank = dist.get_rank()
    source = torch.ones(4)
    to = torch.zeros(4)
    t = sw.transfer({"w": source} if rank == 1 else None, {"w": to})
    said = []
    wrong = (torch.ones(4, dtype=torch.float64), torch.ones(5), to[:])
    for other in wrong:
        if rank == 1:
            source.data = other
        with pytest.raises(ValueError) as raised:
            t.start()
        said.append(str(raised.value))
        with pytest.raises(ValueError, match="transfer: nothing was moved"):
            t.receive()
        assert not to.any()
    source.data = torch.full((4,), 3.0)
    t.start().wait()
    assert to.eq(3).all()

    def lacks() -> dict[str, torch.Tensor]:
        return {"w": source, "v": source} if rank == 0 or not planned else {}

    planned: list[bool] = []
    t = sw.transfer(lacks, {"w": to, "v": torch.zeros(4)})
    planned.append(True)
    with pytest.raises(ValueError) as raised:
        t.start()
    said.append(str(raised.value))
    return said


def test_change_on_one_rank_raises_on_every_rank(pool: Pool) -> None:
    said = pool.run(_changed_on_one_rank, 2)
    assert said[0] == said[1]
    for text, expected in zip(
        said[0],
        (
            "source w: must be float32 of shape (4,), as when planned, got float64 of shape (4,)",
            "source w: must be float32 of shape (4,), as when planned, got float32 of shape (5,)",
            "destination w: its memory must not be shared, got memory shared with source w",
            "source v: the state dict lacks this name now",
        ),
        strict=True,
    ):
        assert expected in text and "(on rank 1)" in text, text


def _temporaries() -> None:
    """Starts a transfer repeatedly whose tensors nothing else references, some of them parts of larger tensors."""
    t = sw.transfer(
        {"a": torch.ones(4), "b": torch.arange(8.0)[2:6]}, {"a": torch.zeros(4), "b": torch.zeros(9)[::2][:4]}
    )
    for _ in range(3):
        t.start().wait()
    assert t.tensors["a"].tolist() == [1, 1, 1, 1]
    assert t.tensors["b"].tolist() == [2, 3, 4, 5]


def test_transfer_keeps_its_tensors_alive(pool: Pool) -> None:
    pool.run(_temporaries, 1)


def _norms_on_slices(folder: str, dims: tuple[int, int], uses_fsdp: bool) -> None:
    """A norm without a tensor-parallel style is a DTensor on mesh["dp"] under FSDP2, and a plain tensor without it."""
    mesh = DeviceMesh("cpu", torch.arange(4).view(dims), mesh_dim_names=("dp", "tp"))
    net = nn.Sequential(nn.LayerNorm(5), nn.Linear(5, 6))
    parallelize_module(net, mesh["tp"], {"1": ColwiseParallel()})
    if uses_fsdp:
        fully_shard(net, mesh=mesh["dp"])
    full = {name: oracle.global_tensor(x.shape, x.dtype, i) for i, (name, x) in enumerate(net.state_dict().items())}

    def check() -> None:
        for name, x in net.state_dict().items():
            assert torch.equal(x.full_tensor() if isinstance(x, DTensor) else x, full[name]), name

    sw.transfer(full, to=net.state_dict()).start().wait()
    check()
    dcp.save(net.state_dict(), checkpoint_id=folder)
    for load in (
        lambda to: sw.checkpoints.load_checkpoint(folder, to),
        lambda to: dcp.load(to, storage_reader=sw.checkpoints.CheckpointReader(folder)),
    ):
        with torch.no_grad():
            for x in net.parameters():
                x.zero_()
        load(net.state_dict())
        check()
    serve = {name: sw.Layout(sw.Mesh({"one": 2}, [3, 1]), x.shape, ["S(0)"]) for name, x in full.items()}
    t = sw.transfer(net.state_dict(), to=serve)
    t.start().wait()
    for name, x in t.tensors.items():
        assert torch.equal(x, full[name].chunk(2)[[3, 1].index(dist.get_rank())]), name


@pytest.mark.parametrize("uses_fsdp", [True, False])
def test_slices_of_a_mesh_are_replicas(pool: Pool, folder: str, uses_fsdp: bool) -> None:
    pool.run(_norms_on_slices, 4, folder, (2, 2), uses_fsdp)


def _slices_that_differ() -> list[str]:
    rank = dist.get_rank()
    said = []
    cases: list[tuple[list[int], int]] = [
        ([0, 1] if rank < 2 else [1, 2], 4),  # a rank in two slices; rank 3 is in none
        ([0] if rank == 0 else [1, 2, 3], 4),  # the sizes differ
        ([0, 1] if rank < 2 else [2, 3], 4 + rank // 2),  # the shapes differ
    ]
    for ranks, rows in cases:
        # The mesh makes no groups and does not communicate. A rank outside the mesh passes no state dict.
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


def test_slices_that_are_not_replicas_raise(pool: Pool) -> None:
    said = pool.run(_slices_that_differ, 4)
    assert said[0] == said[1] == said[2] == said[3]
    for text in said[0]:
        assert "source w: the layout must be equal on all ranks, got" in text
        assert "no source is mapped" not in text
    assert "whose mesh has ranks [0, 1]" in said[0][0] and "whose mesh has ranks [1, 2]" in said[0][0]
    assert "slices of a mesh that have equal sizes and no rank in common" in said[0][0]


def _parts_without_elements(folder: str) -> None:
    """The second rank of tp has no column of a one-column matrix. FSDP2 gives it a part of shape (0, 0)."""
    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("dp", "tp"))
    net = nn.Sequential(nn.Linear(1, 7))
    parallelize_module(net, mesh["tp"], {"0": RowwiseParallel()})
    fully_shard(net, mesh=mesh["dp"])
    full = {"0.weight": torch.arange(7.0).view(7, 1), "0.bias": torch.arange(7.0)}
    dcp.save(full, checkpoint_id=folder)
    serve = {name: sw.Layout(sw.Mesh({"one": 4}), x.shape, ["R"]) for name, x in full.items()}
    for fill in (
        lambda to: sw.transfer(full, to).start().wait(),
        lambda to: sw.transfer(full, to, staging="double").start().wait(),
        lambda to: list(sw.transfer(full, to).receive()),
        lambda to: sw.checkpoints.load_checkpoint(folder, to),
        lambda to: dcp.load(to, storage_reader=sw.checkpoints.CheckpointReader(folder)),
    ):
        with torch.no_grad():
            for x in net.parameters():
                x.zero_()
        to = net.state_dict()
        fill(to)
        t = sw.transfer(net.state_dict(), serve)
        t.start().wait()
        for name, x in t.tensors.items():
            assert torch.equal(x, full[name]), name
    src = sw.Layout(sw.Mesh({"one": 4}), (2, 4), ["S(0)"])
    dst = sw.Layout(src.mesh, src.shape, ["S(1)"])
    local = torch.ones(1, 4) if dist.get_rank() < 2 else torch.ones(0, 0)
    for out in (None, [torch.zeros(2, 1)]):
        moved = sw.redistribute_many([(local, src, dst)], out=out)
        assert isinstance(moved, list) and torch.equal(moved[0], torch.ones(2, 1))


def test_empty_parts_may_have_any_empty_shape(pool: Pool, folder: str) -> None:
    pool.run(_parts_without_elements, 4, folder)

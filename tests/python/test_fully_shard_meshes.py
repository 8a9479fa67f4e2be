"""`shard_placement_fn` of `sw.fully_shard` that selects meshes of parameters, as torch's ShardPlacementResult does.

Results are compared with separate calls for each mesh, and with stock FSDP2 if it has this feature (torch 2.15).
"""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard as stock_fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import DTensor, Shard

import meshes
import shardwright as sw
from fsdp_models import batch, flat_fully_shard, loss_of, part
from meshes import get_mesh
from pool import Pool

_Result: Any = getattr(_fsdp_common, "ShardPlacementResult", types.SimpleNamespace)


class Experts(nn.Module):
    """A model with experts, which are sharded over one mesh dim, and other weights, which are sharded over both."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.ModuleList(nn.Linear(10, 6, bias=False) for _ in range(2))
        self.shared = nn.Linear(10, 6)
        self.out = nn.Linear(6, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(sum(expert(x) for expert in self.experts) + self.shared(x)))


def _of_its_own(mesh: Any, dim: int) -> Any:
    return _Result(placement=Shard(dim), mesh_info=_fsdp_common.FSDPMeshInfo(mesh, shard_mesh_dim=0))


def _trained(model: nn.Module) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, foreach=False)
    found = []
    for step in range(3):
        loss = loss_of(model, batch(step))
        loss.backward()
        found += [loss.detach(), *(part(p.grad).clone() for p in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return found


def _parameters_on_different_meshes() -> None:
    mesh = get_mesh((2, 2), flatten=[("a", "b")])
    world, inner = mesh["a", "b"]._flatten("a_b"), mesh["b"]

    def model_of(wrap: Any) -> nn.Module:
        model = Experts()
        experts = {id(expert.weight) for expert in model.experts}
        own = _of_its_own(inner, 1)
        wrap(model, mesh=world, shard_placement_fn=lambda p: own if id(p) in experts else None)
        return model

    ours = model_of(flat_fully_shard)
    weight = ours.experts[0].weight  # type: ignore[index,union-attr]
    assert isinstance(weight, DTensor) and weight.device_mesh == inner and weight.to_local().shape == (6, 5)
    assert ours.out.weight.device_mesh == world  # type: ignore[union-attr]
    found = _trained(ours)

    apart = Experts()
    sw.fully_shard(list(apart.experts), mesh=inner, shard_placement_fn=lambda p: Shard(1))
    sw.fully_shard(apart, mesh=world)
    for a, b in zip(found, _trained(apart), strict=True):
        assert torch.equal(a, b)
    if _Result is not types.SimpleNamespace:
        for a, b in zip(found, _trained(model_of(stock_fully_shard)), strict=True):
            torch.testing.assert_close(a, b)

    outside = _Result(placement=None, mesh_info=types.SimpleNamespace(mesh=_mesh_of_others(mesh), shard_mesh_dim=0))
    refused: list[tuple[Any, dict[str, Any], str]] = [
        (lambda p: 1, {}, "shard_placement_fn must return a Shard, None or .* for weight, got 1"),
        (lambda p: _of_its_own(inner, 2), {}, r"a Shard with dim in \[-2, 1\] for weight, got Shard\(dim=2\)"),
        (lambda p: outside, {}, r"shard_placement_fn must return a mesh that contains .* \(\d\), for weight, got"),
        (lambda p: _of_its_own(inner, 0), {"same_data_dims": [0]}, "must not return a mesh .* got one for weight"),
        (lambda p: _of_its_own(inner, 0), {"reshard_after_forward": 4}, "must be .* a divisor of 2, .*, got 4"),
    ]
    for function, options, text in refused:
        with pytest.raises(ValueError, match=text):
            flat_fully_shard(nn.Linear(2, 2, bias=False), mesh=world, shard_placement_fn=function, **options)

    stock = {
        name for name in dir(stock_fully_shard(Experts(), mesh=world)) if name.startswith(("set_", "reset_", "final"))
    }
    assert all(hasattr(ours, name) for name in stock), "each has what it does, or says why not"
    ours.reset_iter_state()  # type: ignore[operator]
    for a, b in zip(_trained(ours), _trained(apart), strict=True):
        assert torch.equal(a, b)


def _mesh_of_others(mesh: Any) -> Any:
    """Returns a mesh without this rank."""
    return types.SimpleNamespace(get_coordinate=lambda: None, ranks=[(dist.get_rank() + 1) % mesh.size()])


def test_parameters_on_different_meshes(pool: Pool) -> None:
    pool.run(_parameters_on_different_meshes, 4)


def _model_of_one_rank() -> None:
    """Rank 0 makes and uses a further model, between the `sw.fully_shard` and the first use of a model of all ranks."""
    mesh, alone = get_mesh((2, 2)), DeviceMesh(meshes.device, [0])
    model = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10))
    for layer, dim in zip(model, "ab", strict=True):
        sw.fully_shard(layer, mesh=mesh[dim])
    sw.fully_shard(model, mesh=mesh["a"])
    if dist.get_rank() == 0:
        sw.fully_shard(nn.Linear(10, 10), mesh=alone)(batch(0)).sum().backward()
    for step in range(2):
        loss_of(model, batch(step)).backward()


def test_one_rank_may_have_a_further_model(pool: Pool) -> None:
    pool.run(_model_of_one_rank, 4)

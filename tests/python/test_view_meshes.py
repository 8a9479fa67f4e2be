"""Tests of views of DTensors that split a mesh dim: mesh and placements of the result, communication, gradients."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

import dtensors
import shardwright as sw
from meshes import device, get_mesh
from pool import Pool
from shardwright.runtime import groups
from test_views import _layout, part

# Mesh, shape, placements and shape of the view; then the mesh and the placements of the result.
CASES: list[Any] = [
    ((4,), (16, 3), ["S(0)"], (2, 8, 3), (2, 2), ["S(0)", "S(1)"]),
    ((4,), (2, 8, 3), ["S(1)"], (4, 4, 3), (2, 2), ["SS(0,2)", "S(1)"]),
    ((8,), (64,), ["S(0)"], (4, 16), (4, 2), ["S(0)", "S(1)"]),
    ((2, 4), (6, 16), ["S(0)", "S(1)"], (6, 2, 8), (2, 2, 2), ["S(0)", "S(1)", "S(2)"]),
    ((4, 2), (16, 4), ["S(0)", "S(1)"], (2, 8, 4), (2, 2, 2), ["S(0)", "S(1)", "S(2)"]),
    ((2, 4), (16, 5), ["P", "S(0)"], (2, 8, 5), (2, 2, 2), ["P", "S(0)", "S(1)"]),
]


def _split(
    sizes: tuple[int, ...],
    shape: tuple[int, ...],
    placements: list[str],
    other: tuple[int, ...],
    fine: tuple[int, ...],
    expected: list[str],
) -> None:
    mesh = get_mesh(sizes)
    numbers = torch.Generator().manual_seed(0)
    full, weights = (torch.randn(shape, generator=numbers).to(device) for _ in range(2))
    x = dtensors.distribute(full, mesh, placements).requires_grad_()
    sw.views.view(x, other)  # makes the process groups
    known = groups.state()
    with CommDebugMode() as communication, sw.debug.wire_meter() as wire:
        y = sw.views.view(x, other)
    assert communication.get_total_counts() == 0 and wire.received_bytes == 0 and groups.state() == known
    assert tuple(y.device_mesh.shape) == fine and y.placements == dtensors.to_placements(expected)
    assert y.device_mesh.mesh.flatten().tolist() == mesh.mesh.flatten().tolist()
    is_sum = [placement.is_partial() for placement in x.placements]
    assert torch.equal(y.to_local(), x.to_local().reshape(y.to_local().shape))
    if not any(is_sum):
        assert torch.equal(y.to_local(), part(full.view(other), _layout(y)))
        is_strided = any(text.startswith("SS") for text in expected)
        if torch.__version__ >= "2.15" or not is_strided:  # older versions cannot gather strided tensors
            assert torch.equal(y.detach().full_tensor(), full.view(other))  # by PyTorch's collectives
    for placed in (["R" if text == "P" else text for text in expected], ["R"] * len(fine)):
        there = dtensors.distribute(weights.view(other), y.device_mesh, placed)
        (gradient,) = torch.autograd.grad(sw.views.view(x, other), x, there)
        assert gradient.device_mesh == mesh
        kept = [Replicate() if was_sum else placement for was_sum, placement in zip(is_sum, x.placements, strict=True)]
        assert list(gradient.placements) == kept
        assert torch.equal(gradient.to_local(), part(weights, _layout(gradient)))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_views_split_mesh_dims(pool: Pool, case: Any) -> None:
    pool.run(_split, math.prod(case[0]), *case)


def _operators_and_gradients() -> None:
    """Applies operators to the result, takes second gradients, and views it in the original shape."""
    mesh = get_mesh((4,))
    full = torch.randn(16, 3, generator=torch.Generator().manual_seed(0)).to(device)
    plain = full.clone().requires_grad_()
    x = dtensors.distribute(full, mesh, ["S(0)"]).requires_grad_()
    y = sw.views.view(x, (2, 8, 3))
    weight = dtensors.distribute(torch.eye(3, 5, device=device), y.device_mesh, ["R", "R"])
    expected = (plain.view(2, 8, 3) @ torch.eye(3, 5, device=device)).square()
    with sw.enabled(strict=True, views=True):
        found = (y @ weight).square()
        assert found.placements == (Shard(0), Shard(1))
        torch.testing.assert_close(found.detach().full_tensor(), expected.detach())
        (once,) = torch.autograd.grad(found.sum(), x, create_graph=True)
        (there,) = torch.autograd.grad(expected.sum(), plain, create_graph=True)
        torch.testing.assert_close(once.detach().full_tensor(), there.detach())
        (twice,) = torch.autograd.grad(once.pow(3).sum(), x)
        (plainly,) = torch.autograd.grad(there.pow(3).sum(), plain)
        torch.testing.assert_close(twice.full_tensor(), plainly)
    back = sw.views.view(y.detach(), (16, 3))
    assert back.placements == (Shard(0), Shard(0)) and torch.equal(back.to_local(), x.detach().to_local())
    with pytest.raises(RuntimeError, match="view .*is being modified inplace"):
        y.mul_(2)


def test_operators_and_gradients_on_split_mesh(pool: Pool) -> None:
    pool.run(_operators_and_gradients, 4)


def _keeps_mesh_of_source() -> None:
    """With redistribute=True, and for DTensor's own views, results are on the mesh of their source."""
    mesh = get_mesh((4,))
    full = torch.arange(48.0, device=device).view(16, 3)
    x = dtensors.distribute(full, mesh, ["S(0)"]).requires_grad_()
    y = sw.views.view(x, (2, 8, 3), redistribute=True)
    assert y.device_mesh is mesh and torch.equal(y.full_tensor(), full.view(2, 8, 3))
    # In the shape of the source this gradient would need a split mesh. It is returned on the source's mesh.
    source = dtensors.distribute(full.view(2, 8, 3), mesh, ["R"]).requires_grad_()
    cut = dtensors.distribute(full, mesh, ["S(0)"])
    (gradient,) = torch.autograd.grad(sw.views.view(source, (16, 3)), source, cut)
    assert gradient.device_mesh is mesh and torch.equal(gradient.full_tensor(), full.view(2, 8, 3))
    with sw.enabled(views=True):
        try:
            found = x.detach().view(2, 8, 3)
        except RuntimeError:
            return  # stock raises too
        assert found.device_mesh is mesh and torch.equal(found.full_tensor(), full.view(2, 8, 3))


def test_redistribute_keeps_mesh_of_source(pool: Pool) -> None:
    pool.run(_keeps_mesh_of_source, 4)


def _flattened_dims_of_root() -> None:
    root = init_device_mesh(device, (2, 2), mesh_dim_names=("dp", "tp"))
    x = dtensors.distribute(torch.arange(16.0, device=device), root._flatten("all"), ["S(0)"]).requires_grad_()
    y = sw.views.view(x, (2, 8))
    assert y.device_mesh is root and y.placements == (Shard(0), Shard(1))
    y.sum().backward()
    assert x.grad is not None and x.grad.device_mesh is x.device_mesh and x.grad.placements == x.placements
    # If the root has other dims, the mesh is a new one.
    wide = init_device_mesh(device, (1, 4), mesh_dim_names=("dp", "tp"))
    x = dtensors.distribute(torch.arange(16.0, device=device), wide, ["R", "S(0)"])
    assert tuple(sw.views.view(x, (2, 8)).device_mesh.shape) == (1, 2, 2)


def test_views_reuse_root_mesh_of_flattened_dims(pool: Pool) -> None:
    pool.run(_flattened_dims_of_root, 4)


def _on_some_ranks() -> None:
    mesh = DeviceMesh(device, torch.tensor([5, 1, 7, 3]))
    full = torch.arange(16.0, device=device)
    is_member = mesh.get_coordinate() is not None
    local = dtensors.my_local(full, mesh, ["S(0)"]) if is_member else full[:0]
    x = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=full.shape, stride=(1,))
    y = sw.views.view(x, (2, 8))
    assert y.device_mesh.mesh.tolist() == [[5, 1], [7, 3]] and y.shape == (2, 8)
    if is_member:
        expected = dtensors.my_local(full.view(2, 8), y.device_mesh, ["S(0)", "S(1)"])
        assert torch.equal(y.to_local(), expected)


def test_views_on_mesh_of_some_ranks(pool: Pool) -> None:
    pool.run(_on_some_ranks, 8)


def _preserved_rank_order() -> None:
    """PyTorch keeps the order of ranks only in groups that it makes itself, which excludes those of a split mesh."""
    mesh = DeviceMesh(device, torch.tensor([3, 1, 2, 0]), preserve_rank_order=True)
    full = torch.arange(16.0, device=device)
    x = DTensor.from_local(dtensors.my_local(full, mesh, ["S(0)"]), mesh, [Shard(0)], run_check=False)
    assert torch.equal(x.full_tensor(), full)
    with pytest.raises(ValueError, match="redistribute"):
        sw.views.view(x, (2, 8))
    y = sw.views.view(x, (2, 8), redistribute=True)
    assert y.device_mesh == mesh and torch.equal(y.full_tensor(), full.view(2, 8))


@pytest.mark.skipif(
    "preserve_rank_order" not in inspect.signature(DeviceMesh.__init__).parameters,
    reason="this torch has no such meshes",
)
def test_meshes_with_preserved_rank_order_are_not_split(pool: Pool) -> None:
    pool.run(_preserved_rank_order, 4)


def _compiled() -> None:
    x = dtensors.distribute(torch.arange(16.0), get_mesh((4,)), ["S(0)"])
    with pytest.raises(Exception, match="x must have a view on its own mesh in compiled code, got"):
        torch.compile(lambda x: sw.views.view(x, (2, 8)), backend="aot_eager", fullgraph=True)(x)
    moved = torch.compile(lambda x: sw.views.view(x, (2, 8), redistribute=True), backend="aot_eager", fullgraph=True)(x)
    assert torch.equal(moved.full_tensor(), torch.arange(16.0).view(2, 8))


@pytest.mark.cpu_only("compiled code is compared on the CPU")
def test_compiled_code_refuses_split_mesh(pool: Pool) -> None:
    pool.run(_compiled, 4)


def _pending() -> None:
    """Views keep pending reductions other than sums."""
    mesh = get_mesh((2, 4))
    local = torch.full((4, 5), float(dist.get_rank()), device=device)
    x = DTensor.from_local(local, mesh, [Partial("max"), Shard(0)], run_check=False)
    y = sw.views.view(x, (2, 8, 5))
    assert y.placements == (Partial("max"), Shard(0), Shard(1))
    expected = torch.arange(4.0, 8.0, device=device).repeat_interleave(20).view(2, 8, 5)
    assert torch.equal(y.full_tensor(), expected)


def test_views_keep_pending_reductions(pool: Pool) -> None:
    pool.run(_pending, 8)

"""Products of DTensors as autograd sees them: writes to operands, ranks outside the mesh, layers without a loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

import shardwright as sw
import shardwright.parallel as sw_parallel
from meshes import device, get_mesh
from pool import Pool

WRITES: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "operand": lambda x, weight: x.detach().add_(1),
    "weight": lambda x, weight: weight.detach().mul_(2),
    "optimizer": lambda x, weight: _step(weight),
}


def _step(weight: torch.Tensor) -> None:
    weight.grad = torch.ones_like(weight)
    torch.optim.SGD([weight], lr=0.5).step()


def _write_before_backward(write: str, options: dict[str, Any]) -> None:
    mesh = get_mesh((2,))
    x = distribute_tensor(torch.ones(4, 6, device=device), mesh, [Shard(0)], src_data_rank=None).requires_grad_()
    weight = distribute_tensor(torch.ones(8, 6, device=device), mesh, [Shard(0)], src_data_rank=None).requires_grad_()
    for product in (sw.linear, F.linear):
        with sw.enabled(overlap=True):
            y = product(x, weight, **(options if product is sw.linear else {}))
            WRITES[write](x, weight)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.sum().backward()


@pytest.mark.parametrize(("write", "options"), [("operand", {}), ("weight", {"save": "gathered"}), ("optimizer", {})])
def test_writes_to_operands_before_the_backward_raise(pool: Pool, write: str, options: dict[str, Any]) -> None:
    pool.run(_write_before_backward, 2, write, options)


def _outside() -> None:
    """Rank 1 has no part of the mesh. Its program is that of rank 0."""
    dist.new_group([0])
    mesh = DeviceMesh(device, torch.tensor([0]), mesh_dim_names=("alone",))
    for needs in (False, True):
        found = []
        for linear in (F.linear, sw.linear):
            x = distribute_tensor(torch.ones(4, 6, device=device), mesh, [Replicate()]).requires_grad_(needs)
            weight = distribute_tensor(torch.ones(6, 6, device=device), mesh, [Replicate()]).requires_grad_()
            y = linear(torch.relu(linear(x, weight)), weight)
            y.sum().backward()
            with torch.no_grad():
                flags = y.requires_grad, y.is_leaf, linear(x, weight).requires_grad
            gradients = [t.grad is not None and (t.grad.shape, t.grad.to_local().shape) for t in (x, weight)]
            found.append((flags, gradients))
        assert found[0] == found[1]


def test_ranks_outside_the_mesh_run_the_same_program(pool: Pool) -> None:
    pool.run(_outside, 2)


def _gradient_of_bias() -> None:
    mesh = get_mesh((2,))
    x = distribute_tensor(torch.ones(6, device=device), mesh, [Replicate()], src_data_rank=None)
    weight = distribute_tensor(torch.ones(4, 6, device=device), mesh, [Shard(0)], src_data_rank=None)
    bias = distribute_tensor(torch.ones(4, device=device), mesh, [Shard(0)], src_data_rank=None).requires_grad_()
    gradient = distribute_tensor(torch.ones(4, device=device), mesh, [Shard(0)], src_data_rank=None)
    for _ in range(2):
        sw.linear(x, weight, bias).backward(gradient)
    assert gradient.to_local().tolist() == [1, 1] and bias.grad.to_local().tolist() == [2, 2]


def test_gradient_of_a_bias_has_memory_of_its_own(pool: Pool) -> None:
    pool.run(_gradient_of_bias, 2)


def _layers_without_a_loss() -> None:
    mesh = get_mesh((2,))
    style = sw_parallel.ColwiseParallel(input_layouts=Shard(0), use_local_output=False, shares_gather=True)
    for used in range(3):
        layers = [parallelize_module(torch.nn.Linear(6, 4, device=device), mesh, style) for _ in range(3)]
        x = distribute_tensor(torch.ones(4, 6, device=device), mesh, [Shard(0)], src_data_rank=None)
        results = [layer(x) for layer in layers]
        results[used].sum().backward()
        for i, layer in enumerate(layers):
            for parameter in layer.parameters():
                assert (isinstance(parameter.grad, DTensor) and bool(parameter.grad.to_local().all())) == (i == used)
                assert i == used or parameter.grad is None


def test_layers_without_a_loss_get_no_gradient(pool: Pool) -> None:
    """A zero gradient would let an optimizer decay the weight."""
    pool.run(_layers_without_a_loss, 2)

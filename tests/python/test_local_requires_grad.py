"""DTensor's operators run below autograd, also if the local tensor requires grad, as after `from_local`."""

from __future__ import annotations

import contextlib

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

import shardwright as sw
from meshes import get_mesh
from pool import Pool

WORLD = 4


def _step(uses_shardwright: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a sum for which a replicated parameter is sliced, and the parameter's gradient.

    The local tensor is a view of a parameter, made without autograd. The parameter is then written, as by an
    optimizer, so autograd would refuse to make a graph on the view.
    """
    mesh = get_mesh((WORLD,))
    parameter = torch.nn.Parameter(torch.arange(64.0).view(8, 8))
    x = DTensor.from_local(parameter, mesh, [Replicate()], run_check=False)
    assert x._local_tensor.requires_grad and x._local_tensor._is_view()
    with torch.no_grad():
        parameter.add_(1)
    y = DTensor.from_local(torch.ones(2, 8), mesh, [Shard(0)], run_check=False)
    with sw.enabled(strict=True) if uses_shardwright else contextlib.nullcontext():
        z = y + x
        assert z.placements == (Shard(0),), "nothing was redistributed"
        z.pow(2).sum().backward()
    assert parameter.grad is not None
    return z.full_tensor().detach(), parameter.grad


def _as_stock() -> None:
    for actual, expected in zip(_step(False), _step(True)):
        assert torch.equal(actual, expected)


def test_gradients_of_local_parameters_equal_stock(pool: Pool) -> None:
    pool.run(_as_stock, WORLD)

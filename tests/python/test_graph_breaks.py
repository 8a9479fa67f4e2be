"""Redistributes in code that Dynamo leaves out of its graphs. It also leaves out the functions of the drop-in."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

import oracle
import shardwright as sw
from compilers import fresh_compilers
from dtensors import distribute
from meshes import get_mesh
from pool import Pool

SHAPE = (6, 4)
LOCK = threading.Lock()  # Dynamo runs a frame eagerly if it breaks the graph in such a block, and compiles its callees


def _explicit(x: DTensor) -> torch.Tensor:
    with LOCK:
        y = (x * 1).redistribute(placements=[Replicate()])
    return y.to_local().square().sum()


def _implicit(x: DTensor) -> torch.Tensor:
    with LOCK:
        y = x @ distribute(torch.ones(4, 4), x.device_mesh, ["S(0)"])
        y = y.redistribute(placements=[Replicate()])
    return y.to_local().square().sum()


def _between_meshes(x: DTensor) -> torch.Tensor:
    with LOCK:
        y = x.redistribute(get_mesh((1, 2)), [Replicate(), Shard(1)])
        y = y.redistribute(placements=[Replicate(), Replicate()])
    return y.to_local().square().sum()


def _with_backward(x: DTensor) -> torch.Tensor:
    with LOCK:
        loss = (x * 1).redistribute(placements=[Replicate()]).to_local().square().sum()
        if x.requires_grad:
            loss.backward()
    return loss.detach()


def _by_function(x: DTensor) -> torch.Tensor:
    return (sw.redistribute(x * 1, [Replicate()]) * 2).to_local().square().sum()


def _of_plain_tensor(x: DTensor) -> torch.Tensor:
    src, dst = (sw.Layout(sw.Mesh({"a": 2}), SHAPE, [text]) for text in ("S(0)", "R"))
    local = sw.redistribute_local(x.to_local() * 1, src, dst, device_mesh=x.device_mesh)
    return (local * 2).square().sum()


def _view(x: DTensor) -> torch.Tensor:
    with LOCK:
        y = (x * 1).view(2, 3, 4)
    return y.redistribute(placements=[Replicate()]).to_local().square().sum()


def _linear(x: DTensor) -> torch.Tensor:
    with LOCK:
        y = torch.nn.functional.linear(x, distribute(torch.ones(4, 4), x.device_mesh, ["S(0)"]))
    return y.redistribute(placements=[Replicate()]).to_local().square().sum()


def _results(function: Callable[[DTensor], torch.Tensor], has_gradient: bool) -> list[torch.Tensor]:
    """Runs a function of a DTensor and its backward. Returns the loss and the gradient."""
    x = distribute(oracle.global_tensor(SHAPE, torch.float32, 3, True), get_mesh((2,)), ["S(0)"])
    x = x.detach().requires_grad_(has_gradient)
    loss = function(x)
    if loss.requires_grad:
        loss.backward()
    return [loss.detach(), *([x.grad.to_local()] if x.grad is not None else [])]


def _equals_eager(function: Callable[[DTensor], torch.Tensor]) -> None:
    options = {"views": True, "overlap": True} if function in (_view, _linear) else {}
    with sw.enabled(strict=True, **options):
        for has_gradient in (False, True):
            expected = _results(function, has_gradient)
            with fresh_compilers():
                compiled = torch.compile(function, backend="aot_eager")
                for _ in range(3):
                    results = _results(compiled, has_gradient)
                    assert len(results) == len(expected) == 1 + has_gradient
                    assert all(map(torch.equal, results, expected))


@pytest.mark.parametrize(
    "function",
    [_explicit, _implicit, _between_meshes, _with_backward, _by_function, _of_plain_tensor, _view, _linear],
)
def test_compiled_code_with_graph_breaks_equals_eager_code(
    pool: Pool, function: Callable[[DTensor], torch.Tensor]
) -> None:
    pool.run(_equals_eager, 2, function)

"""Gradients under `sw.fully_shard` of weights that some ranks or backwards do not use, against unsharded models."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

import shardwright as sw
from fsdp_models import full
from meshes import get_mesh
from pool import Pool
from shardwright.fsdp.methods import ATTRIBUTE

WIDTH = 8


class Routed(nn.Module):
    """Uses one of two norms, or none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        for p in self.parameters():
            nn.init.normal_(p)

    def forward(self, x: Any, which: int | None) -> Any:
        return x if which is None else self.norms[which](x)


def _check_gradients(model: nn.Module, expected: nn.Module) -> None:
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        if q.grad is not None:
            torch.testing.assert_close(full(p.grad), q.grad, rtol=1e-4, atol=1e-5)
    model.zero_grad()
    expected.zero_grad()


def _routes_over_tensor_parallelism(differs_in_step: int) -> None:
    """Gradients of sequence-parallel norms are pending sums over tensor-parallel ranks, which zeros must be too."""
    mesh = get_mesh((2, 2))
    rank, own = mesh.get_local_rank("a"), mesh.get_local_rank("b")
    model: Any = Routed()
    expected = copy.deepcopy(model)
    parallelize_module(model, mesh["b"], {f"norms.{i}": SequenceParallel() for i in range(2)})
    sw.fully_shard(model, mesh=mesh["a"])
    for step in range(4):
        routes = (0, 1) if step >= differs_in_step else (step % 2, step % 2)
        for data_rank, which in enumerate(routes):
            x = torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(10 * step + data_rank))
            (expected(x, which).pow(3).sum() / 2).backward()
            if data_rank == rank:
                y = model(DTensor.from_local(x.chunk(2, 1)[own], mesh["b"], [Shard(1)]), which)
                y.pow(3).sum().full_tensor().backward()
        _check_gradients(model, expected)


@pytest.mark.cpu_only("the rules do not depend on the device")
@pytest.mark.parametrize("differs_in_step", [0, 1, 2])
def test_ranks_may_use_different_weights_over_tensor_parallelism(pool: Pool, differs_in_step: int) -> None:
    pool.run(_routes_over_tensor_parallelism, 4, differs_in_step)


def _accumulates_on_one_rank() -> None:
    """Rank 1 accumulates no gradient in some steps, but both ranks follow the schedule of accumulated gradients."""
    model: Any = Routed()
    expected = copy.deepcopy(model)
    sw.fully_shard(model, mesh=get_mesh((2,)))
    for step, route in enumerate((0, None, 0, None)):
        for syncs, routes in ((False, (0, route)), (True, (1, 1))):
            model.set_requires_gradient_sync(syncs)
            batches = torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(10 * step + syncs))
            for rank, which in enumerate(routes):
                x = batches[rank].clone().requires_grad_()
                (expected(x, which).pow(3).sum() / 2).backward()
                if rank == dist.get_rank():
                    model(x, which).pow(3).sum().backward()
        _check_gradients(model, expected)
    assert len(sw.fsdp.schedules(model)) == 2


def test_accumulates_gradients_that_one_rank_does_not_have(pool: Pool) -> None:
    pool.run(_accumulates_on_one_rank, 2)


def _keeps_over_replicas(ends: str) -> None:
    mesh = get_mesh((2, 2))
    model: Any = Routed()
    expected = copy.deepcopy(model)
    for module in (*model.norms, model):
        sw.fully_shard(module, mesh=mesh)
    for step in range(2):
        for which in range(2):
            model.set_requires_all_reduce(ends == "backward" and which == 1)
            batches = torch.randn(4, 3, WIDTH, generator=torch.Generator().manual_seed(10 * step + which))
            model(batches[dist.get_rank()], which).pow(3).sum().backward()
            (expected(batches, which).pow(3).sum() / 4).backward()
        if ends == "finalize_backward":
            assert all(p.grad is None for p in model.parameters())
            model.set_requires_all_reduce(True)
            model.finalize_backward()
        _check_gradients(model, expected)


@pytest.mark.parametrize("ends", ["backward", "finalize_backward"])
def test_gradients_that_wait_for_replicas_are_reduced(pool: Pool, ends: str) -> None:
    """HSDP: the backward or call that reduces over replicas also reduces units that it does not run."""
    pool.run(_keeps_over_replicas, 4, ends)


def _freezes_before_the_backward() -> None:
    """As a discriminator is trained, and a generator through it. A backward heeds the flags that it finds."""
    mesh = get_mesh((2,))
    for reshards in (True, False):
        model: Any = Routed()
        expected = copy.deepcopy(model)
        sw.fully_shard(model, mesh=mesh, reshard_after_forward=reshards)
        for step in range(3):
            batches = torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(step))
            own = batches[dist.get_rank()]
            output = model(own.clone().requires_grad_(), 0)
            model.requires_grad_(False)
            output.sum().backward()
            assert all(p.grad is None for p in model.parameters())
            model.requires_grad_(True)
            loss = model(own, 0).pow(3).sum()
            model.requires_grad_(False)
            loss = loss + model(own.clone().requires_grad_(), 0).sum()
            model.requires_grad_(True)
            loss.backward()
            (expected(batches, 0).pow(3).sum() / 2).backward()
            _check_gradients(model, expected)
        model.unshard()
        model.requires_grad_(False)
        assert not model(own, 0).requires_grad
        assert not any(p.requires_grad for p in model.parameters())
        for _ in range(2):
            model(own.clone().requires_grad_(), 0).sum().backward()
        assert not getattr(model, ATTRIBUTE).runner.reductions.comparisons.started


def test_gradients_of_weights_that_were_frozen_before_the_backward_end(pool: Pool) -> None:
    pool.run(_freezes_before_the_backward, 2)


def _steps_in_hooks(order: tuple[int, ...]) -> None:
    """An optimizer runs in hooks of parameters. Modules that run several times have several reductions in a backward.

    `order`: the norm that each call uses.
    """
    mesh = get_mesh((2,))
    model: Any = Routed()
    expected = copy.deepcopy(model)
    sw.fully_shard(model, mesh=mesh)
    counts = [0, 0]

    def step_in_hook(parameter: Any) -> None:
        counts[0] += 1
        with torch.no_grad():
            parameter.mul_(0.9).sub_(0.1 * parameter.grad)
        parameter.grad = None

    def count(gradient: Any) -> None:
        counts[1] += 1

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step_in_hook)
        p.register_hook(count)
    for step in range(4):
        batches = torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(step))
        x, y = batches[dist.get_rank()].clone().requires_grad_(), batches
        for which in order:
            x, y = model(x, which), expected(y, which)
        x.pow(3).sum().backward()
        (y.pow(3).sum() / 2).backward()
        with torch.no_grad():
            for q in expected.parameters():
                if q.grad is not None:
                    q.mul_(0.9).sub_(0.1 * q.grad)
                    q.grad = None
        for p, q in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(full(p), q, rtol=1e-3, atol=1e-5)
    assert counts == [4 * 2 * len(set(order))] * 2


@pytest.mark.parametrize("order", [(0,), (0, 0, 0), (0, 1), (0, 1, 0)], ids=str)
def test_hooks_of_parameters_run_once_in_a_backward(pool: Pool, order: tuple[int, ...]) -> None:
    pool.run(_steps_in_hooks, 2, order)

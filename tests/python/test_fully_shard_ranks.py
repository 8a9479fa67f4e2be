"""`sw.fully_shard` on ranks that differ: all of them raise in that step, and nothing waits for a timeout.

Steps that all ranks change in the same way train like the unsharded model.
"""

from __future__ import annotations

import datetime
import functools
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import shardwright as sw
from fsdp_models import batch, flat_fully_shard, full
from meshes import get_mesh
from pool import Pool

DIFFERS = "the ranks have used different modules in this step, or some have failed"
ALL = (0, 1, 2)
# Blocks that rank 0 and the other ranks run.
ORDERS = ((ALL, (0, 1)), (ALL, (1, 2)), (ALL, (1, 0, 2)), (ALL, ()), ((0, 1), ALL), (ALL, (0, 0, 1, 2)))


class Blocks(nn.Module):
    """Blocks of several sizes, which run in any order. Returns the outputs of all layers."""

    def __init__(self, width: int = 10) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter = nn.Linear(width, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, size), nn.Tanh(), nn.Linear(size, width)) for size in (5, 9, 13)
        )
        self.leave = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, order: Sequence[int]) -> Any:
        outputs = [self.enter(x)]
        for index in order:
            outputs.append(outputs[-1] + self.blocks[index](outputs[-1]))
        outputs.append(self.leave(outputs[-1]))
        return lambda: outputs  # no hook looks into a closure


def _sharded(mesh: Any, **options: Any) -> Blocks:
    model = Blocks()
    for block in model.blocks:
        flat_fully_shard(block, mesh=mesh, **options)
    flat_fully_shard(model, mesh=mesh, **options)
    return model


def _train_step(model: Blocks, unsharded: Blocks, step: int, order: Sequence[int] = ALL, loss: int = -1) -> None:
    """Runs a step of both models, and compares gradients."""
    world = dist.get_world_size()
    model(batch(step), order)()[loss].square().sum().backward()
    sum(unsharded(batch(step, rank), order)()[loss].square().sum() / world for rank in range(world)).backward()
    for (name, p), q in zip(model.named_parameters(), unsharded.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), f"{name} in step {step}"
        if q.grad is not None:
            torch.testing.assert_close(full(p.grad), q.grad)
    model.zero_grad()
    unsharded.zero_grad()


def _departures(shape: tuple[int, ...]) -> None:
    mesh = get_mesh(shape)
    for options in ({}, {"reshard_after_forward": False}):
        model, unsharded = _sharded(mesh, **options), Blocks()
        before = sw.stats()["unplanned_steps"]
        orders = (ALL, ALL, (0, 2), (0, 1), (2, 1, 0), (0, 1, 2, 2), ALL)
        for step, order in enumerate(orders):
            _train_step(model, unsharded, step, order)
            with torch.no_grad():
                got, expected = model(batch(step), order)(), unsharded(batch(step), order)()
            torch.testing.assert_close(got[-1], expected[-1])
        for step in range(4):  # backwards alone leave the schedule
            _train_step(model, unsharded, step, loss=(-1, 1)[step % 2])
        assert sw.stats()["unplanned_steps"] > before


@pytest.mark.parametrize("shape", [(2,), (2, 2)])
def test_all_ranks_may_leave_a_schedule(pool: Pool, shape: tuple[int, ...]) -> None:
    pool.run(_departures, len(shape) * 2, shape)


def _raises(function: Any, match: str) -> None:
    begin = time.monotonic()
    with pytest.raises((ValueError, RuntimeError), match=match):
        function()
    assert time.monotonic() - begin < 20  # less than the timeout of a collective


def _step(model: Blocks, trains: bool, order: Sequence[int]) -> None:
    with torch.set_grad_enabled(trains):
        loss = model(batch(0), order)()[-1].sum()
    if trains:
        loss.backward()


def _different_orders(num_steps: int, trains: bool) -> None:
    """Ranks differ in a step after `num_steps` equal ones. The next step is right."""
    for orders in ORDERS:
        model, unsharded = _sharded(get_mesh((dist.get_world_size(),))), Blocks()
        for _ in range(num_steps):
            _step(model, trains, ALL)
        _raises(functools.partial(_step, model, trains, orders[dist.get_rank() > 0]), DIFFERS)
        model.zero_grad()
        _train_step(model, unsharded, 1)


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_ranks_that_run_other_units_raise(pool: Pool, num_steps: int, trains: bool) -> None:
    pool.run(_different_orders, 3, num_steps, trains)


def _one_rank_fails(when: str) -> None:
    """Rank 0 leaves the step, as after an error in the user's code. The group's timeout is short."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=2))
    model = _sharded(DeviceMesh.from_group(group, "cpu"))
    if when != "first use":
        loss = model(batch(0), ALL)()[-1].sum()
    if when == "later step":
        loss.backward()
    if dist.get_rank() == 0:
        return
    event = {"first use": "first use of", "backward": "beginning of a backward", "later step": ""}[when]
    match = f"rank 1 failed in sw.fully_shard, comparing the .*{event}.*, on ranks .0, 1.: one of them has raised"
    with pytest.raises(dist.DistBackendError, match=match):
        loss.backward() if when == "backward" else model(batch(0), ALL)


@pytest.mark.parametrize("when", ["first use", "backward", "later step"])
def test_error_on_one_rank_lets_others_name_the_event(pool: Pool, when: str) -> None:
    pool.run(_one_rank_fails, 2, when)


def _models_without_names() -> None:
    """Equal modules that no outermost module contains have the same name. Ranks use them in different orders."""
    for num_steps in (0, 3):
        blocks: Any = [sw.fully_shard(nn.Linear(6, 6), mesh=get_mesh((2,))) for _ in range(3)]
        for _ in range(num_steps):
            nn.Sequential(*blocks)(torch.ones(2, 6)).sum().backward()
        order = (0, 2, 1) if dist.get_rank() else (0, 1, 2)
        match = f"{DIFFERS}|the ranks have different modules"
        _raises(lambda: nn.Sequential(*(blocks[i] for i in order))(torch.ones(2, 6)), match)  # noqa: B023


def test_models_without_names_raise(pool: Pool) -> None:
    pool.run(_models_without_names, 2)


def _different_losses(num_steps: int) -> None:
    model, unsharded = _sharded(get_mesh((2,))), Blocks()
    for step in range(num_steps):
        _train_step(model, unsharded, step)
    losses = model(batch(0), ALL)()
    _raises(lambda: losses[-1 if dist.get_rank() else 1].sum().backward(), DIFFERS)
    model.zero_grad()
    _train_step(model, unsharded, 1)


@pytest.mark.parametrize("num_steps", [0, 3])
def test_losses_that_lead_to_other_units_raise(pool: Pool, num_steps: int) -> None:
    pool.run(_different_losses, 2, num_steps)


def _write_on_one_rank(num_steps: int, name: str) -> None:
    options = WRITTEN[name]
    model, unsharded = _sharded(get_mesh((2,)), **options), Blocks()

    def train(step: int) -> None:
        if "message_format" not in options:
            _train_step(model, unsharded, step)
            return
        model(batch(step), ALL)()[-1].sum().backward()
        model.zero_grad()

    for step in range(num_steps):
        train(step)
    for syncs in (True, False):
        model.set_requires_gradient_sync(syncs)  # type: ignore[operator]
        loss = model(batch(0), ALL)()[-1].sum()
        if dist.get_rank() == 1:
            with torch.no_grad():
                model.blocks[1][0].weight.mul_(1)
        _raises(loss.backward, f"{DIFFERS}|0.weight was written between a forward and its backward")
        model.zero_grad()
    model.set_requires_gradient_sync(True)  # type: ignore[operator]
    train(1)


WRITTEN: dict[str, dict[str, Any]] = {
    "released": {"reshard_after_forward": True},
    "gathered": {"reshard_after_forward": False},
    "replicas": {"placements": lambda p: [Replicate()], "store_placements": lambda p: [Shard(0)]},
    "float8": {"message_format": "float8"},
}


@pytest.mark.parametrize("name", list(WRITTEN))
@pytest.mark.parametrize("num_steps", [0, 3])
def test_a_write_on_one_rank_raises_on_all(pool: Pool, num_steps: int, name: str) -> None:
    pool.run(_write_on_one_rank, 2, num_steps, name)


def _penalties() -> None:
    """DTensor replicates the gradient of a penalty on a dim of size 1, also on a rank without a part of it."""
    linear = nn.Linear(6, 1)
    linear.requires_grad_()
    model: Any = sw.fully_shard(nn.Linear(6, 1), mesh=get_mesh((2,)))
    for name, p in model.named_parameters():
        p.data.copy_(distribute_tensor(getattr(linear, name).detach(), p.device_mesh, [Shard(0)], src_data_rank=None))
    xs = [torch.randn(3, 6, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
    for _ in range(2):
        penalty: Any = sum(p.square().sum().full_tensor() for p in model.parameters())
        (model(xs[dist.get_rank()]).sum() + penalty).backward()
        (sum(linear(x).sum() / 2 for x in xs) + sum(p.square().sum() for p in linear.parameters())).backward()
        for p, q in zip(model.parameters(), linear.parameters(), strict=True):
            assert isinstance(p.grad, DTensor) and p.grad.placements == p.placements
            torch.testing.assert_close(full(p.grad), q.grad)
        model.zero_grad()
        linear.zero_grad()


def test_penalties_on_parameters_without_a_part(pool: Pool) -> None:
    pool.run(_penalties, 2)

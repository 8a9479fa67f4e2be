"""Writes to parameters between steps that do not change version counters, while gathered copies are kept."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import shardwright as sw
from compilers import compiled
from fsdp_models import flat_fully_shard
from meshes import get_mesh
from pool import Pool


def _load(model: nn.Module, parameters: list[Any], folder: str) -> None:
    dcp.load(model.state_dict(), checkpoint_id=folder)


def _read_checkpoint(model: nn.Module, parameters: list[Any], folder: str) -> None:
    dcp.load(model.state_dict(), storage_reader=sw.checkpoints.CheckpointReader(folder))


def _copy_to_local(model: nn.Module, parameters: list[Any], folder: str) -> None:
    for parameter in parameters:
        parameter.to_local().mul_(3)


def _copy_to_data(model: nn.Module, parameters: list[Any], folder: str) -> None:
    for parameter in parameters:
        parameter.data.mul_(3)


def _foreach(model: nn.Module, parameters: list[Any], folder: str) -> None:
    torch._foreach_mul_(parameters, 3)


def _write_on_one_rank(model: nn.Module, parameters: list[Any], folder: str) -> None:
    """Only rank 0 writes. Its values must reach the other rank too."""
    for parameter in parameters if dist.get_rank() == 0 else ():
        parameter.data.neg_()


Write = Callable[[nn.Module, list[Any], str], None]

WRITES: tuple[Write, ...] = (_load, _read_checkpoint, _copy_to_local, _copy_to_data, _foreach, _write_on_one_rank)

ZERO_1: dict[str, Any] = {"placements": lambda p: [Replicate()], "store_placements": lambda p: [Shard(0)]}


def _expected(parameters: list[Any], x: torch.Tensor) -> torch.Tensor:
    """Returns the output of a plain module with the current values of the parameters."""
    weight, bias = (parameter.full_tensor() for parameter in parameters)
    return nn.functional.linear(x, weight, bias)


def _write_between_uses(writes: Sequence[Write], folder: str, mode: str) -> None:
    mesh, x = get_mesh((2,)), torch.randn(2, 5, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    given = nn.Linear(5, 5)
    dcp.save({k: v + 1 for k, v in given.state_dict().items()}, checkpoint_id=folder)
    for options, stays, runs_before in (
        ({}, False, True),
        ({}, True, True),
        (ZERO_1, False, False),
        (ZERO_1, True, True),
    ):
        model: Any = flat_fully_shard(copy.deepcopy(given), mesh=mesh, **options)
        parameters, run = list(model.parameters()), compiled(model, mode)
        if stays:
            model.set_reshard_after_backward(False)
        with torch.no_grad():
            if runs_before:
                run(x)
            for write in writes:
                for unshards in (False, False, True):
                    if unshards:
                        model.unshard()
                    write(model, parameters, folder)
                    expected = _expected(parameters, x)
                    torch.testing.assert_close(run(x), expected, msg=write.__name__)
        run(x).sum().backward()
        assert all(parameter.grad is not None for parameter in parameters)


@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__.strip("_"))
def test_writes_take_effect(pool: Pool, tmp_path: Path, write: Write) -> None:
    pool.run(_write_between_uses, 2, [write], str(tmp_path), "eager")


def test_writes_to_compiled_models_take_effect(pool: Pool, tmp_path: Path) -> None:
    """A model with each set of options is compiled once, for all writes in turn."""
    pool.run(_write_between_uses, 2, WRITES, str(tmp_path), "model")


def _write_before_a_backward_without_hooks() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    flat_fully_shard(model, mesh=get_mesh((2,)))
    parameters = list(model.parameters())
    for _ in range(2):
        model.unshard()  # type: ignore[operator]
        loss = model.forward(torch.ones(2, 6)).sum()  # runs no hooks
        with torch.no_grad():
            for parameter in parameters:
                parameter.mul_(2)
        with pytest.raises(RuntimeError, match="written between a forward and its backward"):
            loss.backward()
        model.reshard()  # type: ignore[operator]


def test_a_write_before_a_backward_without_hooks_raises(pool: Pool) -> None:
    pool.run(_write_before_a_backward_without_hooks, 2)

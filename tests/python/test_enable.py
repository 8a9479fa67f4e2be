"""Enabling and disabling the drop-in: the functions it replaces, nested blocks, and the restored state."""

from __future__ import annotations

import importlib
import sys
import types

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, _redistribute

import shardwright as sw
from meshes import get_mesh
from pool import Outcome, Pool, run_isolated

WORLD = 2
# Modules of PyTorch that have redistribute_local_tensor as an attribute.
MODULES = (
    "torch.distributed.tensor._redistribute",
    "torch.distributed.tensor._api",
    "torch.distributed.tensor._dispatch",
    "torch.distributed.tensor.experimental._tp_transform",
)


def _bound_functions() -> list[object]:
    return [importlib.import_module(name).redistribute_local_tensor for name in MODULES]


def _engine_calls(times: int = 1) -> int:
    """Runs some redistributes. Returns the number that the engine ran."""
    mesh = get_mesh((WORLD,))
    sw.reset_stats()
    for _ in range(times):
        x = DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0)], run_check=False)
        assert torch.equal(x.redistribute(mesh, [Replicate()]).to_local(), torch.ones(4, 4))
    return int(sw.stats()["calls"])


def _all_good(outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        assert outcome.ok, f"rank {outcome.rank}: {outcome.error or outcome.exit_code}"


def _on_and_off() -> None:
    before = _bound_functions()
    assert _engine_calls() == 0
    sw.enable()
    assert _engine_calls(2) == 2
    sw.disable()
    assert _engine_calls() == 0
    assert all(now is then for now, then in zip(_bound_functions(), before, strict=True))


def test_enable_and_disable() -> None:
    """Runs in new processes, where the drop-in has never been enabled."""
    _all_good(run_isolated(_on_and_off, WORLD))


def _blocks() -> None:
    with sw.enabled():
        assert _engine_calls() == 1
        with sw.enabled(strict=True):
            assert _engine_calls() == 1
        assert _engine_calls() == 1
    assert _engine_calls() == 0
    with pytest.raises(KeyError), sw.enabled():
        raise KeyError("of the user")
    assert _engine_calls() == 0, "an exception left the engine on"
    sw.enable()
    with sw.enabled(strict=True):
        assert _engine_calls() == 1
    assert _engine_calls() == 1, "the end of a block switched off what was on before it"
    sw.disable()
    assert _engine_calls() == 0


def test_nested_enabled_blocks(pool: Pool) -> None:
    pool.run(_blocks, WORLD)


def _imported_by_name() -> None:
    """A user's modules have imported the function, under its own name and under another one."""
    original = _redistribute.redistribute_local_tensor
    client = types.ModuleType("client_of_redistribute")
    client.redistribute_local_tensor = client.mover = original
    sys.modules[client.__name__] = client
    try:
        sw.enable()
        assert client.redistribute_local_tensor is not original and client.mover is not original
        sw.disable()
        assert client.redistribute_local_tensor is original and client.mover is original
    finally:
        del sys.modules[client.__name__]


def test_enable_replaces_imported_names() -> None:
    _all_good(run_isolated(_imported_by_name, WORLD))


def _implicit() -> int:
    """Operators redistribute their inputs, also after PyTorch has cached the operator's sharding."""
    mesh = get_mesh((WORLD,))
    rows = DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0)], run_check=False)
    columns = DTensor.from_local(torch.ones(4, 2), mesh, [Shard(1)], run_check=False)
    sw.reset_stats()
    with sw.enabled(strict=True):
        for _ in range(5):
            assert torch.equal((rows + columns).full_tensor(), torch.full((4, 4), 2.0))
    return int(sw.stats()["calls"])


def test_implicit_redistributes_use_the_engine(pool: Pool) -> None:
    for calls in pool.run(_implicit, WORLD):
        assert calls == 10, "an operator's redistribute or the full_tensor passed the engine by"


def _cost_is_stock() -> None:
    """DTensor's choice of strategies still uses PyTorch's costs."""
    from torch.distributed.tensor import _collective_utils

    cost = _collective_utils.redistribute_cost
    with sw.enabled():
        assert _collective_utils.redistribute_cost is cost


def test_strategies_stay_stock(pool: Pool) -> None:
    pool.run(_cost_is_stock, WORLD)

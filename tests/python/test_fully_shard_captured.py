"""`sw.fully_shard` after two warm-up steps: weights keep their addresses, and graphs can capture steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Replicate, Shard

import shardwright as sw
from fsdp_models import flat_fully_shard
from meshes import get_mesh
from pool import Pool
from test_fully_shard import Model, loss_of, parts, tokens_of

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "little memory": {"memory_limit": 9000},
    "bfloat16": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    "float8": {"message_format": "float8"},
    "mxfp8": {"message_format": "mxfp8"},
    "ZeRO-1": {"placements": lambda p: [Replicate()], "store_placements": lambda p: [Shard(0)]},
}
WARM_UP_STEPS, STEPS = 2, 6


def _made(options: dict[str, Any], kind: str) -> tuple[Any, torch.optim.Optimizer]:
    outermost = {name: value for name, value in options.items() if name == "memory_limit"}
    others = {name: value for name, value in options.items() if name not in outermost}
    model = Model(kind)
    for layer in model.layers:
        flat_fully_shard(layer, mesh=get_mesh((2,)), **others)
    flat_fully_shard(model, mesh=get_mesh((2,)), **others, **outermost)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)


def _step(model: Any, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> None:
    optimizer.zero_grad(set_to_none=False)
    loss_of(model, tokens).backward()
    optimizer.step()


def _addresses(name: str) -> None:
    """After the warm-up, all weights have the same addresses in each of their uses."""
    model, optimizer = _made(OPTIONS[name], "plain")
    seen: list[list[int]] = []
    for layer in model.layers:
        weights = layer._shardwright_unit.unit.weights

        def note(*_: Any, weights: Any = weights) -> None:
            seen[-1] += [weight.memory.data_ptr() for weight in weights]

        layer.up.register_forward_pre_hook(note)
        layer.up.register_full_backward_pre_hook(note)
    for step in range(STEPS):
        seen.append([])
        _step(model, optimizer, tokens_of(step))
    assert all(seen[-1])
    assert all(addresses == seen[WARM_UP_STEPS] for addresses in seen[WARM_UP_STEPS:])


@pytest.mark.parametrize("name", OPTIONS)
def test_weights_keep_their_addresses_after_warm_up(pool: Pool, name: str) -> None:
    pool.run(_addresses, 2, name)


def _captured(name: str, kind: str) -> None:
    """Replays train as eager steps do. The device raises on every call that must not be captured."""
    import async_device
    from async_device import strict

    options = OPTIONS[name]
    expected, optimizer = _made(options, kind)
    after: list[list[torch.Tensor]] = []
    for step in range(STEPS):
        _step(expected, optimizer, tokens_of(step))
        after.append([part.cpu() for part in parts([p.detach() for p in expected.parameters()])])
    model, optimizer = _made(options, kind)
    for step in range(WARM_UP_STEPS):
        _step(model, optimizer, tokens_of(step))
    tokens = tokens_of(WARM_UP_STEPS)
    sw.reset_stats()
    gathers = [len(schedule.gathers) for schedule in sw.fsdp.schedules(model)]
    before = strict.counters()
    with async_device.captured() as graph:
        _step(model, optimizer, tokens)
    made = {count: strict.counters().get(count, 0) - before.get(count, 0) for count in ("rendezvous", "split")}
    assert made == {"rendezvous": 0, "split": 0}
    assert strict.counters()["communicators"] == before["communicators"]
    for step in range(WARM_UP_STEPS, STEPS):
        tokens.copy_(tokens_of(step))
        graph.replay()
        for parameter, right in zip(model.parameters(), after[step], strict=True):
            assert torch.equal(parameter.detach().to_local().cpu(), right)
    assert [len(schedule.gathers) for schedule in sw.fsdp.schedules(model)] == gathers
    assert sw.stats()["unplanned_steps"] == 0


# No 8-bit formats: the device has no operators for them, and operators of the host synchronize.
CAPTURED = [(name, "plain") for name in ("plain", "little memory", "bfloat16", "ZeRO-1")]
CAPTURED += [("plain", kind) for kind in ("repeated", "checkpointed")]


@pytest.mark.parametrize(("name", "kind"), CAPTURED)
def test_replays_train_as_eager_steps(async_pool: Pool, name: str, kind: str) -> None:
    async_pool.run(_captured, 2, name, kind)


def _eager_steps_between_replays() -> None:
    """Alternates replays and eager steps."""
    import async_device

    expected, optimizer = _made({}, "plain")
    model, its_optimizer = _made({}, "plain")
    tokens = tokens_of(0)
    for step in range(WARM_UP_STEPS):
        _step(model, its_optimizer, tokens_of(step))
    with async_device.captured() as graph:
        _step(model, its_optimizer, tokens)
    for step in range(STEPS):
        _step(expected, optimizer, tokens_of(step))
        if step >= WARM_UP_STEPS and step % 2:
            _step(model, its_optimizer, tokens_of(step))
        elif step >= WARM_UP_STEPS:
            tokens.copy_(tokens_of(step))
            graph.replay()
    for parameter, right in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(parameter.detach().to_local().cpu(), right.detach().to_local().cpu())


def test_eager_steps_between_replays(async_pool: Pool) -> None:
    async_pool.run(_eager_steps_between_replays, 2)

"""FSDP2's methods on modules under `sw.fully_shard`, compared with stock FSDP2 and the unsharded model."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard as stock_fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

import shardwright as sw
from compilers import MODES, compiled
from fsdp_models import (
    Mlp,
    agreement_bytes,
    batch,
    flat_fully_shard,
    full,
    gradients,
    loss_of,
    part,
    shard,
    whole_loss,
    without_packing,
)
from meshes import get_mesh
from pool import Pool

STEPS = 4
EAGER_AND_COMPILED = pytest.mark.parametrize("mode", ["eager", "model"])


def accumulate(model: Any, steps: int, micro_steps: int) -> list[Any]:
    """Returns the gradients at the end of each step. Only the last micro-step of a step reduces."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    found = []
    for step in range(steps):
        for micro_step in range(micro_steps):
            if hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(micro_step == micro_steps - 1)
                model.set_is_last_backward(micro_step == micro_steps - 1)
                loss_of(model, batch(10 * step + micro_step)).backward()
            else:
                whole_loss(model, 10 * step + micro_step).backward()
        found += [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return found


def _accumulates(mesh_shape: tuple[int, ...], mode: str) -> None:
    mesh = get_mesh(mesh_shape)
    sw.reset_stats()
    model = shard(Mlp(), flat_fully_shard, mesh)
    run = compiled(model, mode)
    ours = accumulate(run, STEPS, 3)
    assert sw.stats()["unplanned_steps"] == 0
    stock = accumulate(shard(Mlp(), stock_fully_shard, mesh), STEPS, 3)
    unsharded = accumulate(Mlp(), STEPS, 3)
    for a, b, c in zip(ours, stock, unsharded, strict=True):
        if mesh_shape in [(1,), (2,)] and mode == "eager":
            assert torch.equal(part(a), part(b))
        torch.testing.assert_close(part(a), part(b))
        torch.testing.assert_close(full(a), c)

    # Steps without reductions have their own schedule, whose peak includes unsharded gradients.
    kept, last = sw.fsdp.schedules(model)
    assert not kept.reductions and len(last.reductions) == 4
    full_bytes = sum(p.numel() * 4 for p in model.parameters())
    for schedule in (kept, last):
        assert ", held " in str(schedule)
        assert schedule.peak_bytes >= schedule.arena_bytes + full_bytes

    # Steps without reductions receive only weights.
    model.set_requires_gradient_sync(False)
    with sw.debug.wire_meter() as meter:
        loss_of(run, batch(0)).backward()
    units = [[*layer.parameters()] for layer in model.layers]
    units.insert(0, [model.enter.weight, model.enter.bias])
    lacking = [sum((p.numel() - p.to_local().numel()) * 4 for p in unit) for unit in units]
    assert meter.received_bytes == sum(lacking[unit] for unit, *_ in kept.gathers) + agreement_bytes(model)
    assert all(p.grad is None for p in model.parameters())
    # The next backward that reduces also reduces accumulated gradients, even of units without a gradient in it.
    expected = Mlp()
    with torch.no_grad():
        for p, q in zip(expected.parameters(), model.parameters(), strict=True):
            p.copy_(full(q))
    whole_loss(expected, 0).backward()
    expected_sum = sum(loss_of(expected.layers[0], batch(1, rank)) for rank in range(mesh.size())) / mesh.size()
    expected_sum.backward()
    model.set_requires_gradient_sync(True)
    model.layers[1].set_requires_gradient_sync(False)
    x = batch(1)
    loss_of(model.layers[0], x).backward()
    assert model.layers[1][0].weight.grad is None, "it still waits"
    model.layers[1].set_requires_gradient_sync(True)
    (loss_of(run, batch(1)) * 0).backward()
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(full(p.grad), q.grad)


@pytest.mark.cpu_only("compared with stock FSDP2 on Gloo")
@pytest.mark.parametrize(("world", "mode"), [(1, "eager"), (2, "model"), (2, "eager"), (3, "eager")])
def test_accumulation_without_reductions_equals_stock(pool: Pool, world: int, mode: str) -> None:
    pool.run(_accumulates, world, (world,), mode)


def _accumulates_over_replicas(mode: str) -> None:
    """HSDP: gradients accumulate without an all-reduce over replicas, which have different data."""
    mesh = get_mesh((2, 2))
    found = []
    for wrap in (flat_fully_shard, stock_fully_shard):
        model: Any = shard(Mlp(), wrap, mesh)
        run = compiled(model, mode if wrap is flat_fully_shard else "eager")
        for step in range(2):
            for micro_step in range(3):
                model.set_requires_all_reduce(micro_step == 2)
                with sw.debug.wire_meter() as meter:
                    loss_of(run, batch(10 * step + micro_step)).backward()
                assert micro_step < 2 or all(p.grad is not None for p in model.parameters())
                if wrap is flat_fully_shard and micro_step < 2 and step == 0:
                    assert all(p.grad is None for p in model.parameters())
            found.append(meter.received_bytes)
        found.append(gradients(model))
    reference = Mlp()
    for step in range(2):
        for micro_step in range(3):
            whole_loss(reference, 10 * step + micro_step).backward()
    for a, b, c in zip(found[2], found[5], reference.parameters(), strict=True):
        torch.testing.assert_close(part(a), part(b))
        torch.testing.assert_close(full(a), c.grad)


@pytest.mark.cpu_only("compared with stock FSDP2 on Gloo")
@EAGER_AND_COMPILED
def test_hsdp_accumulation_equals_stock(pool: Pool, mode: str) -> None:
    pool.run(_accumulates_over_replicas, 4, mode)


def _unshards(mode: str) -> None:
    mesh = get_mesh((3,))
    model: Any = shard(Mlp(), flat_fully_shard, mesh)
    run = compiled(model, mode)
    reference = Mlp()
    layer = model.layers[1]
    assert isinstance(layer, sw.fsdp.ShardedModule) and isinstance(layer, nn.Sequential)
    assert type(layer).__name__ == "ShardedSequential" and type(layer[:2]) is nn.Sequential

    for step in range(3):
        handle = layer.unshard(async_op=True)
        assert isinstance(layer[0].weight, DTensor)
        handle.wait()
        handle.wait()
        assert torch.equal(layer[0].weight, reference.layers[1][0].weight)
        with sw.debug.wire_meter() as meter:
            assert layer.unshard() is None
            layer[2].unshard() if isinstance(layer[2], sw.fsdp.ShardedModule) else None
        assert meter.received_bytes <= 2, "a byte, by which ranks agree that nothing was written"
        layer.reshard()
        assert isinstance(layer[0].weight, DTensor)
        model.unshard()  # with a handle or without, the next step uses the unsharded weights
        layer.unshard(async_op=True)
        torch.testing.assert_close(loss_of(run, batch(step)), loss_of(reference, batch(step)))
        loss_of(run, batch(step)).backward()
        whole_loss(reference, step).backward()
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(full(p.grad), q.grad)
        model.unshard()  # `zero_grad` finds the sharded gradients although modules have unsharded weights
        for each in (model, reference):
            each.zero_grad(set_to_none=step > 0)
    # Weights are gathered again after writes to their shards.
    layer.unshard()
    layer.reshard()
    layer.unshard()
    with torch.no_grad():
        for p in layer.parameters():
            p.zero_() if isinstance(p, DTensor) else None
    model.reshard()
    with pytest.raises(RuntimeError, match="reshard cannot release layers.1 in the middle"):
        handle = layer[2].register_forward_hook(lambda *_: layer.reshard())
        try:
            model(batch(0))
        finally:
            handle.remove()
    loss_of(run, batch(0)).backward()
    assert all(isinstance(p, DTensor) for p in model.parameters())


@EAGER_AND_COMPILED
def test_unshards_and_reshards(pool: Pool, mode: str) -> None:
    pool.run(_unshards, 3, mode)


@without_packing()  # buffers of shared messages would fill the memory limit
def _reshard_and_prefetch_settings() -> None:
    """`set_reshard_after_*` and prefetch lists change which weights are gathered when, but not results."""
    mesh = get_mesh((2,))
    model: Any = shard(Mlp(), flat_fully_shard, mesh, {"prefetch": 0, "memory_limit": 8000})
    reference = shard(Mlp(), stock_fully_shard, mesh)

    def step(number: int) -> int:
        with sw.debug.wire_meter() as meter:
            loss_of(model, batch(number)).backward()
        loss_of(reference, batch(number)).backward()
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.equal(p.grad.to_local(), q.grad.to_local())
        return meter.received_bytes

    step(0)
    step(0)  # ranks compare times
    (schedule,) = sw.fsdp.schedules(model)
    plain = step(1)
    assert [start for unit, _, start, *_ in schedule.gathers if unit == 2][0] > 1
    assert [unit for unit, *_ in schedule.gathers].count(1) == 2

    model.set_modules_to_forward_prefetch([model.layers[0], model.layers[1]])
    (prefetched,) = sw.fsdp.schedules(model)
    assert [start for unit, _, start, *_ in prefetched.gathers if unit in (1, 2)][:2] == [0, 0]
    assert step(2) < plain, "what is gathered ahead stays"
    model.set_modules_to_forward_prefetch([])
    assert step(3) == plain
    free: Any = shard(Mlp(), flat_fully_shard, mesh, {"prefetch": 0})
    loss_of(free, batch(0)).backward()
    for modules in ([], [free.layers[1]]):
        free.layers[2].set_modules_to_backward_prefetch(modules)
        (prefetched,) = sw.fsdp.schedules(free)
        backwards = [i for i, line in enumerate(str(prefetched).splitlines()) if "backward Mlp, layers" in line]
        starts = [start for unit, _, start, *_ in prefetched.gathers if unit == 2]
        assert starts[-1] == backwards[1] if not modules else starts[-1] <= backwards[0], modules
    (before,) = sw.fsdp.schedules(model)
    model.layers[0].set_reshard_after_forward(False)
    (stays,) = sw.fsdp.schedules(model)
    assert [unit for unit, *_ in stays.gathers].count(1) == 1
    assert step(4) < plain
    for is_resharded, expected in ((True, before), (False, stays)):  # options that had a schedule get it back
        model.layers[0].set_reshard_after_forward(is_resharded)
        assert sw.fsdp.schedules(model) == [expected]
    with pytest.raises(ValueError, match=r"budget_bytes must be at least \d+, got 8000"):
        model.set_reshard_after_forward(False)
    model.set_reshard_after_forward(True)
    assert step(5) == plain

    model.layers[0].set_reshard_after_backward(False)
    step(6)
    (held,) = sw.fsdp.schedules(model)
    assert ", held " in str(held)
    again = step(7)
    assert again < plain
    for foreach in (True, False):  # weights that an optimizer wrote are gathered again
        for each in (model, reference):
            torch.optim.SGD(each.parameters(), lr=0.1, foreach=foreach).step()
        lacking = sum(p.numel() - p.to_local().numel() for p in model.layers[0].parameters())
        assert step(8) == again + 4 * lacking
        assert step(9) == again
    model.layers[0].set_reshard_after_backward(True)
    step(10)
    assert step(11) == plain
    for call, text in (
        (
            lambda: model.set_modules_to_forward_prefetch([nn.Linear(1, 1)]),
            "forward_prefetch must be under sw.fully_shard, got a Linear",
        ),
        (lambda: model.set_requires_gradient_sync(None), "requires_gradient_sync must be True or False, got None"),
        (lambda: model.set_reshard_after_backward(1), "reshard_after_backward must be True or False, got 1"),
        (lambda: model.set_gradient_divide_factor(0), "factor must be a number above 0, got 0"),
    ):
        with pytest.raises(ValueError, match=text):
            call()


@pytest.mark.cpu_only("compared with stock FSDP2 on Gloo")
def test_reshard_and_prefetch_settings(pool: Pool) -> None:
    pool.run(_reshard_and_prefetch_settings, 2)


def _divides(mode: str) -> None:
    mesh = get_mesh((3,))
    found = []
    for wrap in (flat_fully_shard, stock_fully_shard):
        model: Any = shard(Mlp(), wrap, mesh)
        for module in [*model.layers, model]:
            module.set_gradient_divide_factor(2.0)
            if wrap is stock_fully_shard:
                module.set_force_sum_reduction_for_comms(True)  # Gloo only sums
        loss_of(compiled(model, mode if wrap is flat_fully_shard else "eager"), batch(0)).backward()
        found.append(gradients(model))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(part(a), part(b))


@pytest.mark.cpu_only("compared with stock FSDP2 on Gloo")
@EAGER_AND_COMPILED
def test_gradient_divide_factor_equals_stock(pool: Pool, mode: str) -> None:
    pool.run(_divides, 3, mode)


def _ignores(mode: str) -> None:
    """Ignored parameters are not sharded. The others train with clipping as in stock, next to a second model."""
    mesh = get_mesh((2,))
    optimizers = [
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    ]
    models = []
    for wrap in (flat_fully_shard, stock_fully_shard):
        model: Any = Mlp()
        ignored = {model.layers[0][0].bias, model.enter.bias}
        shard(model, wrap, mesh, ignored_params=ignored)
        assert all(not isinstance(p, DTensor) for p in ignored) and model.enter.bias in ignored
        models.append(model)
    other: Any = shard(Mlp(), flat_fully_shard, mesh)
    runs = {models[0]: compiled(models[0], mode, models[0].layers)}
    for make in optimizers:
        made = [make(model.parameters()) for model in models]
        for step in range(3):
            norms = []
            for model, optimizer in zip(models, made, strict=True):
                loss = loss_of(runs.get(model, model), batch(step))
                other_loss = loss_of(other, batch(step))
                loss.backward()
                other_loss.backward()
                sharded = [p for p in model.parameters() if isinstance(p, DTensor)]
                norms.append(full(nn.utils.clip_grad_norm_(sharded, 0.01)))
                optimizer.step()
                optimizer.zero_grad()
            assert norms[0] > 0.01
            pairs = [norms, *zip(*(map(part, model.parameters()) for model in models), strict=True)]
            for a, b in pairs:
                torch.testing.assert_close(a, b, **({"rtol": 0, "atol": 0} if mode == "eager" else {}))
    with pytest.raises(ValueError, match="ignored_params must be a set of nn.Parameter only, got a str"):
        sw.fully_shard(nn.Linear(2, 2), mesh=mesh, ignored_params="bias")  # type: ignore[arg-type]


@pytest.mark.cpu_only("compared with stock FSDP2 on Gloo")
@MODES
def test_ignored_parameters_clipping_and_a_second_model(pool: Pool, mode: str) -> None:
    pool.run(_ignores, 2, mode)


def _frees(mode: str) -> None:
    model: Any = shard(Mlp(), flat_fully_shard, get_mesh((2,)))
    run = compiled(model, mode, model.layers)
    for step in range(2):
        loss_of(run, batch(step)).backward()
    model.set_requires_gradient_sync(False)
    loss_of(run, batch(2)).backward()
    from shardwright.fsdp.methods import ATTRIBUTE

    runner = getattr(model, ATTRIBUTE).runner
    arena = StorageWeakRef(runner._arena.untyped_storage())
    gone = [
        weakref.ref(runner),
        *(weakref.ref(weight.unsharded) for unit in runner.units for weight in unit.weights),
        *(weakref.ref(p) for p in model.parameters()),
    ]
    del runner, model, run
    torch._dynamo.reset()
    gc.collect()
    assert all(reference() is None for reference in gone) and arena.expired()


@MODES
def test_deleted_model_frees_its_memory(pool: Pool, mode: str) -> None:
    pool.run(_frees, 2, mode)

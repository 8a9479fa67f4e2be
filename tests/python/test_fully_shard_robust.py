"""`sw.fully_shard` after exceptions of all kinds, deletion of models, and bounds of recorded state."""

from __future__ import annotations

import contextlib
import functools
import gc
import unittest.mock as mock
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdp_models import Mlp, batch, flat_fully_shard, full, loss_of, shard, whole_loss
from meshes import get_mesh
from pool import Pool
from shardwright.fsdp import runner
from shardwright.fsdp.methods import ATTRIBUTE
from shardwright.fsdp.units import Unit

ZERO_1 = {"placements": lambda p: [Replicate()], "store_placements": lambda p: [Shard(0)]}


class Stop(BaseException):
    """Not an Exception, like KeyboardInterrupt: module hooks do not see it."""


def _stop(*_: Any) -> None:
    raise Stop


def _in_forward(model: Any) -> Callable[[], None]:
    return model.layers[1][1].register_forward_hook(_stop).remove


def _in_backward(model: Any) -> Callable[[], None]:
    return model.layers[1][1].register_full_backward_hook(_stop).remove


def _in_unit(name: str) -> Callable[[Any], Callable[[], None]]:
    """Returns a function that makes the fourth call of a method of Unit raise Stop."""

    def begin(model: Any) -> Callable[[], None]:
        before = getattr(Unit, name)
        count = 0

        def stop(unit: Unit, *args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == 4:
                raise Stop
            return before(unit, *args, **kwargs)

        setattr(Unit, name, stop)
        return lambda: setattr(Unit, name, before)

    return begin


def _survives() -> None:
    interrupts = (_in_forward, _in_backward, _in_unit("to_unsharded"), _in_unit("release"), _in_unit("finish_gather"))
    for interrupt in interrupts:
        model, unsharded = shard(Mlp(), flat_fully_shard, get_mesh((2,))), Mlp()
        state = {name: full(value).clone() for name, value in model.state_dict().items()}
        for step in range(4):
            if step in (0, 2):
                end = interrupt(model)
                with pytest.raises(Stop):
                    loss_of(model, batch(100 + step)).backward()
                end()
                if step == 2:  # calls that a user makes after Ctrl-C
                    for name, value in model.state_dict().items():
                        assert isinstance(value, DTensor) and torch.equal(full(value), state[name])
                    model.layers[1].unshard()
                    model.layers[1].reshard()
                model.zero_grad()
            loss_of(model, batch(step)).backward()
            assert all(isinstance(p, DTensor) for p in model.parameters())
            whole_loss(unsharded, step).backward()
            for p, q in zip(model.parameters(), unsharded.parameters(), strict=True):
                torch.testing.assert_close(full(p.grad), q.grad)
            model.zero_grad()
            unsharded.zero_grad()


def test_survives_exceptions_of_all_kinds(pool: Pool) -> None:
    pool.run(_survives, 2)


def _frees(is_interrupted: bool) -> None:
    """A deleted model frees its memory at once, without a collection of reference cycles."""
    model: Any = shard(Mlp(), flat_fully_shard, get_mesh((2,)))
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(3):
        loss_of(model, batch(step)).backward()
        optimizer.step()
    model.set_requires_gradient_sync(False)
    loss_of(model, batch(2)).backward()
    model.layers[0].unshard()
    if is_interrupted:
        end = _in_forward(model)
        with contextlib.suppress(Stop):
            model(batch(0))
        end()
        del end
    runner = getattr(model, ATTRIBUTE).runner
    gone = [weakref.ref(each) for each in (model, *model.modules(), runner, runner._arena, *runner.units)]
    gone += [weakref.ref(each) for unit in runner.units for weight in unit.weights for each in (weight, weight.memory)]
    gone += [weakref.ref(p) for p in model.parameters()]
    del runner, optimizer
    gc.collect()
    gc.disable()
    try:
        del model
        assert [reference() for reference in gone if reference() is not None] == []
    finally:
        gc.enable()


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_deleted_model_frees_its_memory(pool: Pool, is_interrupted: bool) -> None:
    pool.run(_frees, 2, is_interrupted)


def _recorded_state() -> None:
    model: Any = shard(Mlp(), flat_fully_shard, get_mesh((2,)))
    unsharded = Mlp()

    def check() -> None:
        runner = getattr(model, ATTRIBUTE).runner
        assert len(runner.schedules) <= 3 and len(runner._uses) <= 20
        for p, q in zip(model.parameters(), unsharded.parameters(), strict=True):
            if q.grad is not None:
                torch.testing.assert_close(full(p.grad), q.grad)
        model.zero_grad()
        unsharded.zero_grad()

    with mock.patch.multiple(runner, MAX_USES=20, MAX_PLANS=3):
        model(batch(0))
        outputs = []
        for number in range(30):  # forwards without a backward so far
            outputs.append(model.layers[number % 2](batch(number)))
            assert len(getattr(model, ATTRIBUTE).runner._uses) <= 20
        sum(out.sum() for out in outputs).backward()
        for number in range(30):
            (sum(unsharded.layers[number % 2](batch(number, rank)).sum() for rank in range(2)) / 2).backward()
        check()
        for count in range(6):  # steps of different kinds
            for i, layer in enumerate(model.layers):
                layer.set_requires_gradient_sync(bool(count >> i & 1))
            loss_of(model, batch(count)).backward()
            whole_loss(unsharded, count).backward()
            assert len(getattr(model, ATTRIBUTE).runner.schedules) <= 3
        model.set_requires_gradient_sync(True)
        loss_of(model, batch(6)).backward()
        whole_loss(unsharded, 6).backward()
        check()


def test_recorded_state_is_bounded(pool: Pool) -> None:
    pool.run(_recorded_state, 2)


def _double_backward() -> None:
    model = shard(Mlp(), flat_fully_shard, get_mesh((2,)))
    unsharded = Mlp()
    x = batch(0).requires_grad_()
    for step in range(3):
        with pytest.raises(RuntimeError, match="create_graph must be False in a backward of Mlp, got True"):
            torch.autograd.grad(loss_of(model, x), x, create_graph=True)
        loss_of(model, batch(step)).backward()
        whole_loss(unsharded, step).backward()
        for p, q in zip(model.parameters(), unsharded.parameters(), strict=True):
            torch.testing.assert_close(full(p.grad), q.grad)


def test_double_backward_raises(pool: Pool) -> None:
    pool.run(_double_backward, 2)


def _without_the_outermost_forward() -> None:
    """Trains by calls of inner modules alone, on their outputs; the outermost module is only unsharded."""
    mesh = get_mesh((2,))

    def losses(model: Any, x: torch.Tensor) -> list[torch.Tensor]:
        hidden = model.layers[0](model.enter(x))
        return [loss_of(torch.nn.Identity(), value) for value in (hidden, model.layers[1](hidden))]

    for backwards in ("one", "two"):
        model, unsharded = shard(Mlp(tied=False), flat_fully_shard, mesh), Mlp(tied=False)
        for step in range(3):
            model.unshard()
            of_ranks = [losses(unsharded, batch(step, rank)) for rank in range(2)]
            expected = [torch.stack(each).mean() for each in zip(*of_ranks, strict=True)]
            for first, second in (losses(model, batch(step)), expected):
                if backwards == "one":
                    (first + second).backward()
                else:
                    first.backward(retain_graph=True)
                    second.backward()
            for p, q in zip(model.parameters(), unsharded.parameters(), strict=True):
                assert (p.grad is None) == (q.grad is None)
                if p.grad is not None:
                    torch.testing.assert_close(full(p.grad), q.grad)
            model.zero_grad()
            unsharded.zero_grad()
    model = shard(Mlp(tied=False), flat_fully_shard, mesh)
    x = batch(0).requires_grad_()
    x.register_hook(lambda _: model.unshard())
    with pytest.raises(RuntimeError, match="Mlp must be used before the backward of the modules in it"):
        loss_of(model.layers[0], x).backward()


def test_gradients_without_the_outermost_forward(pool: Pool) -> None:
    """No gradient is lost if a backward uses the outermost module's weights before its forward was ever called."""
    pool.run(_without_the_outermost_forward, 2)


def _transposed() -> None:
    """Weights that are not contiguous train, also with a held shard of another layout than the parameter."""
    for options in ({}, ZERO_1):
        unsharded, model = Mlp(tied=False), Mlp(tied=False)
        for each in (unsharded, model):
            each.enter.weight = torch.nn.Parameter(each.enter.weight.detach().t())
        shard(model, flat_fully_shard, get_mesh((2,)), **options)
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (unsharded, model)]
        for step in range(2):
            loss_of(model, batch(step)).backward()
            whole_loss(unsharded, step).backward()
            for p, q in zip(model.parameters(), unsharded.parameters(), strict=True):
                torch.testing.assert_close(full(p.grad), q.grad)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


def test_transposed_weights(pool: Pool) -> None:
    pool.run(_transposed, 2)


def _written_before_the_backward(has_store: bool) -> None:
    """Autograd cannot check versions of weights that are gathered. Hooks that do may be disabled in the forward."""
    model = shard(Mlp(tied=False), flat_fully_shard, get_mesh((2,)), **(ZERO_1 if has_store else {}))
    no_hooks = functools.partial(torch.autograd.graph.disable_saved_tensors_hooks, "no hooks")
    for context in (contextlib.nullcontext, no_hooks):
        for name in ("layers.1.0.weight", "enter.weight"):
            with context():
                loss = loss_of(model, batch(0).requires_grad_())
            with torch.no_grad():
                model.get_parameter(name).mul_(2)
            with pytest.raises(RuntimeError, match="written between a forward and its backward"):
                loss.backward()
            model.reset_iter_state()
    with no_hooks():
        loss = loss_of(model, batch(0))
    loss.backward()


@pytest.mark.parametrize("has_store", [False, True])
def test_writes_before_the_backward_raise(pool: Pool, has_store: bool) -> None:
    pool.run(_written_before_the_backward, 2, has_store)


def _full_parameters_in_an_optimizer() -> None:
    unsharded = Mlp()
    early = torch.optim.SGD(unsharded.parameters(), lr=0.1)
    model: Any = shard(unsharded, flat_fully_shard, get_mesh((2,)), reshard_after_forward=False)
    loss_of(model, batch(0))  # without a backward
    late = torch.optim.SGD(model.parameters(), lr=0.1)
    for optimizer in (early, late):
        with pytest.raises(RuntimeError, match=r"must have the sharded parameters of sw.fully_shard, got .* in full"):
            optimizer.step()
    model.reset_iter_state()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def test_optimizers_refuse_full_parameters(pool: Pool) -> None:
    pool.run(_full_parameters_in_an_optimizer, 2)


def _trains_like(model: Any, unsharded: torch.nn.Module, steps: range) -> None:
    """Trains both models without an optimizer, and compares their gradients."""
    for step in steps:
        model.zero_grad()
        unsharded.zero_grad()
        loss_of(model, batch(step)).backward()
        whole_loss(unsharded, step).backward()
        for p, q in zip(model.parameters(), unsharded.parameters(), strict=True):
            torch.testing.assert_close(full(p.grad), q.grad, rtol=1e-4, atol=1e-6)


def _out_of_memory() -> None:
    unsharded, model = Mlp(), shard(Mlp(), flat_fully_shard, get_mesh((2,)))
    no_memory = mock.patch.object(runner, "empty_bytes", side_effect=torch.OutOfMemoryError("no memory for the arena"))
    with no_memory, pytest.raises(torch.OutOfMemoryError):
        loss_of(model, batch(0)).backward()
    _trains_like(model, unsharded, range(1, 5))


def test_trains_after_the_arena_could_not_grow(pool: Pool) -> None:
    pool.run(_out_of_memory, 2)


def _first_evaluates_in_inference_mode() -> None:
    model = flat_fully_shard(
        torch.nn.Linear(64, 64), mesh=get_mesh((2,)), message_format="mxfp8", matmul_format="float8"
    )
    x = batch(0, width=64)
    for _ in range(2):
        with torch.inference_mode():
            expected = model(x)
    for _ in range(3):
        y = model(x)
        assert torch.equal(y, expected)
        y.square().sum().backward()


def test_trains_after_a_first_evaluation_in_inference_mode(pool: Pool) -> None:
    pool.run(_first_evaluates_in_inference_mode, 2)


def _removes_a_layer() -> None:
    unsharded, model = Mlp(), shard(Mlp(), flat_fully_shard, get_mesh((2,)))
    _trains_like(model, unsharded, range(3))
    for each in (model, unsharded):
        del each.layers[1]
    gc.collect()
    _trains_like(model, unsharded, range(3, 6))
    model.double().float()
    _trains_like(model, unsharded, range(6, 9))
    layer: Any = model.layers[0]
    del model
    gc.collect()
    layer.double()(batch(0).double()).sum().backward()


def test_trains_after_modules_were_removed(pool: Pool) -> None:
    pool.run(_removes_a_layer, 2)


class ReturnsWeight(torch.nn.Linear):
    """Returns its weight besides the result, as models with a fused loss do."""

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), self.weight


def _returned_weights() -> None:
    model: Any = flat_fully_shard(ReturnsWeight(10, 10), mesh=get_mesh((2,)), reshard_after_forward=False)
    for step in range(4):
        y, weight = model(batch(step))
        (y @ weight.t()).square().mean().backward()
        assert not weight._backward_hooks


def test_returned_weights_keep_no_hooks(pool: Pool) -> None:
    pool.run(_returned_weights, 2)

"""Changes to modules under `sw.fully_shard`: conversions, loaded state, rejected settings, ranks that differ."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.func import functional_call
from torch.nn.utils import prune

import shardwright as sw
from compilers import MODES, compiled
from fsdp_models import Mlp, batch, flat_fully_shard, full, loss_of, shard, whole_loss
from meshes import get_mesh
from pool import Pool


@dataclasses.dataclass
class Result:
    hidden: torch.Tensor
    others: list[Any]


class ReturnsDataclass(nn.Linear):
    def forward(self, x: torch.Tensor | Result) -> Any:
        given = x.hidden if isinstance(x, Result) else x
        return Result(given + super().forward(given), [x, {"count": 3}])


def _returns_dataclasses() -> None:
    mesh = get_mesh((2,))

    def chain() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(ReturnsDataclass(10, 10) for _ in range(3)))

    sharded, unsharded = chain(), chain()
    for layer in sharded:
        sw.fully_shard(layer, mesh=mesh)
    sw.fully_shard(sharded, mesh=mesh)
    for step in range(3):
        sharded(batch(step)).hidden.square().mean().backward()
        torch.stack([unsharded(batch(step, rank)).hidden.square().mean() for rank in range(2)]).mean().backward()
        for p, q in zip(sharded.parameters(), unsharded.parameters(), strict=True):
            torch.testing.assert_close(full(p.grad), q.grad)


def test_dataclass_outputs_train(pool: Pool) -> None:
    pool.run(_returns_dataclasses, 2)


def _freezes_first_layers(mode: str) -> None:
    """Backwards end in the middle of the schedule once the first layers are frozen."""
    mesh = get_mesh((2,))

    def chain() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(10, 10) for _ in range(4)))

    sharded, unsharded = chain(), chain()
    sharded[0].requires_grad_(False)
    for layer in sharded:
        sw.fully_shard(layer, mesh=mesh)
    sw.fully_shard(sharded, mesh=mesh)
    run = compiled(sharded, mode, sharded)
    for step, frozen in enumerate([0, 0, 0, 0, 1, 2, 3, 0, 2, 2]):
        for model in (sharded, unsharded):
            for number, layer in enumerate(model):
                layer.requires_grad_(number >= frozen)
        loss_of(run, batch(step)).backward()
        whole_loss(unsharded, step).backward()
        for p, q in zip(sharded.parameters(), unsharded.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), step
            if q.grad is not None:
                torch.testing.assert_close(full(p.grad), q.grad)
            p.grad = q.grad = None


@MODES
def test_gradients_are_complete_if_a_backward_ends_early(pool: Pool, mode: str) -> None:
    pool.run(_freezes_first_layers, 2, mode)


def _different_modules() -> None:
    mesh, rank = get_mesh((3,)), dist.get_rank()
    is_odd = rank == 1
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"message_format": torch.bfloat16 if is_odd else None}, {}, "unit 0"),
        ({"shard_placement_fn": lambda p: Shard(p.ndim - 1 if is_odd else 0)}, {}, "unit 0"),
        ({"reshard_after_forward": not is_odd}, {}, "unit 0"),
        ({}, {"memory_limit": 1 << (20 + is_odd)}, "memory_limit"),
        ({}, {"prefetch": 1 + is_odd}, "prefetch"),
    ]
    for options, outermost, name in cases:
        model = shard(Mlp(), flat_fully_shard, mesh, outermost, **options)
        for _ in range(2):  # the error leaves no state behind
            who = rf"  {name}: .* on ranks \[0, 2\]; .* on ranks \[1\]"
            with pytest.raises(ValueError, match=rf"(?s)different modules .*this is rank {rank}\).*{who}"):
                model(batch(0))
            assert all(isinstance(p, DTensor) for p in model.parameters())
    model = Mlp()
    for layer in model.layers[is_odd:]:
        sw.fully_shard(layer, mesh=mesh)
    sw.fully_shard(model, mesh=mesh)
    with pytest.raises(ValueError, match=r"number of units: 4 on ranks \[0, 2\]; 3 on ranks \[1\]"):
        model(batch(0))


def test_error_names_ranks_with_different_modules(pool: Pool) -> None:
    pool.run(_different_modules, 3)


def _state_dicts_between_uses() -> None:
    model = shard(Mlp(), flat_fully_shard, get_mesh((2,)))
    expected = {name: full(value).clone() for name, value in model.state_dict().items()}
    loss_of(model, batch(0)).backward()
    for module in (model, *model.layers):
        module.unshard()
    states = model.state_dict()
    assert all(isinstance(value, DTensor) for value in states.values())
    for name, value in states.items():
        assert torch.equal(full(value), expected[name])
    # Loaded values take effect although weights are already unsharded.
    for module in (model, *model.layers):
        module.unshard()
    model.load_state_dict({name: 2 * value for name, value in states.items()})
    for _ in range(2):
        reference = Mlp()
        reference.load_state_dict({name: 2 * value for name, value in expected.items()})
        assert torch.equal(model(batch(0)), reference(batch(0)))

    # Replaced parameters survive a conversion before their first use.
    replaced = {
        name: DTensor.from_local(3 * v.to_local(), v.device_mesh, v.placements, shape=v.shape, stride=v.stride())
        for name, v in model.state_dict().items()
    }
    model.load_state_dict(replaced, assign=True)
    model.to("cpu")
    reference.load_state_dict({name: 6 * value for name, value in expected.items()})
    assert torch.equal(model(batch(0)), reference(batch(0)))


def test_state_dicts_between_uses(pool: Pool) -> None:
    pool.run(_state_dicts_between_uses, 2)


def _load_other(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, list[Any], list[Any]]:
    """Returns a loss, the parameters that it was computed from, and those that the model has afterwards."""
    used = list(model.parameters())
    loss = loss_of(model, x)
    model.load_state_dict({name: 2 * value for name, value in model.state_dict().items()}, assign=True)
    return loss, used, list(model.parameters())


def _call_functionally(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, list[Any], list[Any]]:
    own = dict(model.named_parameters())
    others = {name: nn.Parameter(2 * p.detach()) for name, p in own.items()}
    used = list(others.values())  # the call writes the parameters that modules have after it to `others`
    return functional_call(model, others, (x,)).square().mean(), used, list(own.values())


def _evaluate_others(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, list[Any], list[Any]]:
    own = dict(model.named_parameters())
    loss = loss_of(model, x)
    with torch.no_grad():
        functional_call(model, {name: 2 * p for name, p in own.items()}, (x,))
    return loss, list(own.values()), list(own.values())


def _replaces_before_the_backward() -> None:
    """A backward uses the parameters of its forward, and leaves those that the model has by then."""
    torch.manual_seed(0)
    unsharded = nn.Sequential(nn.Linear(10, 7), nn.Linear(7, 3))
    for stays in (False, True):
        model = copy.deepcopy(unsharded)
        for module in (*model, model):
            sw.fully_shard(module, mesh=get_mesh((2,)), reshard_after_forward=not stays)
        for replace in (_call_functionally, _evaluate_others, _load_other, _evaluate_others):
            loss, used, kept = replace(model, batch(0))
            loss.backward()
            assert [id(p) for p in model.parameters()] == [id(p) for p in kept]
            values = [full(p).detach().requires_grad_() for p in used]
            outputs = functional_call(
                unsharded, dict(zip(model.state_dict(), values)), torch.cat([batch(0, 0), batch(0, 1)])
            )
            for p, gradient in zip(used, torch.autograd.grad(outputs.square().mean(), values), strict=True):
                torch.testing.assert_close(full(p.grad), gradient)
                p.grad = None

    # A forward with other parameters, between a forward and its backward.
    model = nn.Sequential(nn.Linear(10, 3))
    sw.fully_shard(model, mesh=get_mesh((2,)))
    loss = loss_of(model, batch(0))
    with pytest.raises(RuntimeError, match="must run before a later forward with gradients"):
        (loss + _call_functionally(model, batch(0))[0]).backward()
    # Values that were computed from the parameters.
    doubled = {name: 2 * p for name, p in model.named_parameters()}
    with torch.no_grad():
        functional_call(model, doubled, (batch(0),))
    with pytest.raises(RuntimeError, match="got another parameter, a DTensor that is not a leaf"):
        functional_call(model, doubled, (batch(0),))
    loss_of(model, batch(0)).backward()
    prune.identity(model[0], "weight")
    with pytest.raises(
        RuntimeError, match="weight must stay a DTensor parameter .*, got another parameter, a NoneType"
    ):
        model(batch(0))

    tied: Any = shard(Mlp(), flat_fully_shard, get_mesh((2,)))
    tied.leave.weight = nn.Parameter(2 * tied.enter.weight.detach())
    with pytest.raises(RuntimeError, match="enter.weight must stay tied"):
        tied(batch(0))


def test_parameters_replaced_before_the_backward(pool: Pool) -> None:
    pool.run(_replaces_before_the_backward, 2)


def _optimizer_steps_after_conversions() -> None:
    """`nn.Module.to` drops attributes of DTensor parameters, and `foreach` optimizers do not change versions."""
    mesh = get_mesh((2,))
    for options in ({}, {"placements": lambda p: [Replicate()], "store_placements": lambda p: [Shard(0)]}):
        model, unsharded = Mlp(tied=False), Mlp(tied=False)
        for layer in model.layers:
            flat_fully_shard(layer, mesh=mesh, **options)
            layer.to("cpu")  # the outermost unit must not take the converted parameters
        flat_fully_shard(model, mesh=mesh, **options)
        model.set_reshard_after_backward(False)
        ours = torch.optim.SGD(model.parameters(), lr=0.5, foreach=True)
        theirs = torch.optim.SGD(unsharded.parameters(), lr=0.5)
        for step in range(5):
            if step == 3:
                model.to("cpu")
            loss_of(model, batch(step)).backward()
            whole_loss(unsharded, step).backward()
            for a, b in zip(model.parameters(), unsharded.parameters(), strict=True):
                torch.testing.assert_close(full(a.grad), b.grad)
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()


def test_optimizer_steps_after_conversions_take_effect(pool: Pool) -> None:
    pool.run(_optimizer_steps_after_conversions, 2)


def _rejected_settings_change_nothing() -> None:
    model = shard(Mlp(), flat_fully_shard, get_mesh((2,)))
    for step in range(2):
        loss_of(model, batch(step)).backward()
    limited = shard(
        Mlp(), flat_fully_shard, get_mesh((2,)), {"memory_limit": sw.fsdp.schedule(model).peak_bytes - 2500}
    )
    for step in range(4):
        loss_of(limited, batch(step)).backward()
    before = str(sw.fsdp.schedule(limited))
    for method in (limited.set_reshard_after_forward, limited.set_reshard_after_backward):
        with pytest.raises(ValueError, match="budget_bytes"):
            method(False)
        assert str(sw.fsdp.schedule(limited)) == before
        limited.set_modules_to_forward_prefetch([])  # other settings still work
        loss_of(limited, batch(0)).backward()


def test_rejected_settings_change_nothing(pool: Pool) -> None:
    pool.run(_rejected_settings_change_nothing, 2)


class _BackwardInForward(nn.Module):
    """A module whose forward runs a backward of its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(10, 3, bias=False)
        self.scale = nn.Parameter(torch.ones(3))
        self.found: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            self.layer(x.detach()).square().sum().backward()
        with contextlib.suppress(AttributeError):
            self.found.append(full(self.layer.weight.grad).clone())
        return self.layer(x) * self.scale


def _backwards_within_forwards() -> None:
    torch.manual_seed(0)
    model = _BackwardInForward()
    weight = model.layer.weight.detach().clone().requires_grad_()
    sw.fully_shard(model.layer, mesh=get_mesh((2,)))
    sw.fully_shard(model, mesh=get_mesh((2,)))
    for step in range(3):
        model(batch(step)).sum().backward()
        for p in model.parameters():
            p.grad = None
        (expected,) = torch.autograd.grad(
            sum((batch(step, rank) @ weight.t()).square().sum() for rank in range(2)) / 2, weight
        )
        torch.testing.assert_close(model.found[step], expected)


def test_forwards_may_contain_backwards(pool: Pool) -> None:
    pool.run(_backwards_within_forwards, 2)


def _gradients_of_the_input_alone(mode: str) -> None:
    torch.manual_seed(0)
    unsharded = nn.Sequential(nn.Linear(10, 10), nn.Tanh(), nn.Linear(10, 10))
    sharded = copy.deepcopy(unsharded)
    for layer in (sharded[0], sharded[2]):
        sw.fully_shard(layer, mesh=get_mesh((2,)))
    run = compiled(sharded, mode, (sharded[0], sharded[2]))
    for _ in range(3):
        x, y = (batch(0).requires_grad_() for _ in range(2))
        (found,) = torch.autograd.grad(run(x).square().sum(), x)
        torch.testing.assert_close(found, torch.autograd.grad(unsharded(y).square().sum(), y)[0])
        run(x).square().sum().backward(inputs=[x])
        torch.testing.assert_close(x.grad, found)
        assert all(p.grad is None for p in sharded.parameters())


@MODES
def test_gradients_of_the_input_alone_leave_those_of_weights(pool: Pool, mode: str) -> None:
    pool.run(_gradients_of_the_input_alone, 2, mode)

"""Gradients and weights under `sw.fully_shard` that reach a backward on paths that no hook of an output sees."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import itertools
import types
import weakref
from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.utils.checkpoint import CheckpointError, checkpoint

import shardwright as sw
from compilers import MODES, compiled
from fsdp_models import batch, flat_fully_shard, full, loss_of
from meshes import IS_2_11, get_mesh
from pool import Pool
from test_fsdp_replacement import Chain as ChainOfLinears
from test_fsdp_replacement import SentInHalf, TwoTensor, give_methods


class _Dict(dict[str, Any]):
    pass


class _List(list[Any]):
    pass


class _Attributes(dict[str, Any]):
    __getattr__ = dict.__getitem__  # type: ignore[assignment]


@dataclasses.dataclass
class _Data:
    y: torch.Tensor


class _Plain:
    def __init__(self, y: torch.Tensor) -> None:
        self.y = y


class _Hidden:
    """An object that hides its tensor in a closure."""

    def __init__(self, y: torch.Tensor) -> None:
        self.get = lambda: y


CONTAINERS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "dict subclass": (lambda y: _Dict(y=y), lambda out: out["y"]),
    "list subclass": (lambda y: _List([y]), lambda out: out[0]),
    "attribute dict": (lambda y: _Attributes(y=y), lambda out: out.y),
    "dataclass": (_Data, lambda out: out.y),
    "set": (lambda y: {y}, lambda out: next(iter(out))),
    "UserDict": (lambda y: UserDict(y=y), lambda out: out["y"]),
    "namespace": (lambda y: types.SimpleNamespace(y=y), lambda out: out.y),
    "plain object": (_Plain, lambda out: out.y),
    "closure": (_Hidden, lambda out: out.get()),
}


class Block(nn.Module):
    """A block whose backward reads its weights: a matrix, a norm and a scalar."""

    def __init__(self, container: str) -> None:
        super().__init__()
        self.linear, self.norm, self.scale = nn.Linear(6, 6), nn.LayerNorm(6), nn.Parameter(torch.ones(()))
        self.container = container

    def forward(self, x: torch.Tensor) -> Any:
        return CONTAINERS[self.container][0](torch.tanh(self.norm(self.linear(x)) * self.scale))


class Chain(nn.Module):
    def __init__(self, container: str, is_checkpointed: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(container) for _ in range(3)])
        self.container, self.is_checkpointed = container, is_checkpointed

    def forward(self, x: torch.Tensor) -> Any:
        for block in self.blocks:
            out = checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x)
            x = x + CONTAINERS[self.container][1](out)
        return CONTAINERS[self.container][0](x)


def _batches() -> list[torch.Tensor]:
    return [torch.randn(3, 6, generator=torch.Generator().manual_seed(rank)) for rank in range(dist.get_world_size())]


def _sharded(unsharded: nn.Module, mode: str = "eager") -> Any:
    """Returns a sharded copy, compiled by `mode`. Its units are its `blocks` and the rest."""
    model = copy.deepcopy(unsharded)
    blocks = list(getattr(model, "blocks", []))
    for block in blocks:
        sw.fully_shard(block, mesh=get_mesh((2,)))
    return compiled(sw.fully_shard(model, mesh=get_mesh((2,))), mode, blocks or [model])


def _check_gradients(model: nn.Module, unsharded: nn.Module, case: str) -> None:
    for (name, parameter), (_, right) in zip(model.named_parameters(), unsharded.named_parameters(), strict=True):
        assert (parameter.grad is None) == (right.grad is None), (
            f"{case}: {name}.grad is {parameter.grad}, not {right.grad}"
        )
        if parameter.grad is not None:
            torch.testing.assert_close(full(parameter.grad), right.grad, msg=lambda text: f"{case}: {name}: {text}")  # noqa: B023


def _train_with_containers(containers: list[str], is_checkpointed: bool, mode: str) -> None:
    for container in containers:
        opened = CONTAINERS[container][1]
        torch.manual_seed(0)
        unsharded = Chain(container, is_checkpointed)
        model = _sharded(unsharded, mode)
        for step in range(3):  # steps follow a schedule from the second one on
            opened(model(_batches()[dist.get_rank()])).square().mean().backward()
            sum(opened(unsharded(x)).square().mean() / 2 for x in _batches()).backward()
            _check_gradients(model, unsharded, f"{container}, step {step}")


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_outputs_in_any_container_train(pool: Pool, is_checkpointed: bool) -> None:
    pool.run(_train_with_containers, 2, list(CONTAINERS), is_checkpointed, "eager")


# torch 2.11 does not compile functions with a namespace, so that hooks run as eager code.
OPAQUE = {"UserDict", "closure", "plain object"} | (set() if IS_2_11 else {"namespace"})


@pytest.mark.parametrize("mode", ["blocks", "model"])
@pytest.mark.parametrize("container", [*sorted(CONTAINERS.keys() - {"dataclass"}), "dataclass"])
def test_compiled_outputs_in_any_container_train(pool: Pool, container: str, mode: str) -> None:
    """With the whole model compiled, the backward of a graph cannot gather for outputs that no hook opens."""
    if mode == "model" and container in OPAQUE:
        pool.run(_raises_for_container, 2, container)
    else:
        pool.run(_train_with_containers, 2, [container], container == "dataclass", mode)


def _raises_for_container(container: str) -> None:
    with pytest.raises(RuntimeError, match="scale: a weight under sw.fully_shard was read after it was released"):
        _train_with_containers([container], False, "model")


def _train_with_checkpoints_by_hooks(mode: str) -> None:
    """Trains with torch's composable checkpoint, whose saved-tensor hooks begin within the forward of the unit."""
    container = next(iter(CONTAINERS))
    opened = CONTAINERS[container][1]
    unsharded, model = Chain(container), Chain(container)
    model.load_state_dict(unsharded.state_dict())
    for block in model.blocks:
        composable_checkpoint(block)
        sw.fully_shard(block.norm, mesh=get_mesh((2,)))
        sw.fully_shard(block, mesh=get_mesh((2,)))
    model = compiled(sw.fully_shard(model, mesh=get_mesh((2,))), mode, model.blocks)
    if mode == "model":  # torch.compile does not support this checkpoint, with or without sharding
        with pytest.raises(CheckpointError):
            opened(model(_batches()[dist.get_rank()])).square().mean().backward()
        return
    for step in range(3):
        opened(model(_batches()[dist.get_rank()])).square().mean().backward()
        sum(opened(unsharded(x)).square().mean() / 2 for x in _batches()).backward()
        _check_gradients(model, unsharded, f"step {step}")


@MODES
def test_composable_checkpoints_train(pool: Pool, mode: str) -> None:
    pool.run(_train_with_checkpoints_by_hooks, 2, mode)


class StoresHidden(nn.Module):
    """A module that stores a tensor that is not an output."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.hidden = self.b(torch.tanh(self.a(x)))
        return self.b(self.hidden)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.a(x)))


def _loss_on_hidden(model: Any, x: torch.Tensor) -> torch.Tensor:
    model(x)
    return model.hidden.square().mean()


def _loss_on_both(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean() + model.hidden.square().mean()


def _loss_of_method(model: Any, x: torch.Tensor) -> torch.Tensor:
    if hasattr(model, "unshard"):
        model.unshard()
    return model.encode(x).square().mean()


def _losses_without_outputs(mode: str) -> None:
    torch.manual_seed(0)
    for loss in (_loss_on_hidden, _loss_on_both, _loss_of_method):
        for needs_gradient in (False, True):
            unsharded = StoresHidden()
            model = _sharded(unsharded, mode)
            for step in range(2):
                inputs = [x.requires_grad_(needs_gradient) for x in _batches()]
                loss(model, inputs[dist.get_rank()]).backward()
                sum(loss(unsharded, x.detach()) / 2 for x in inputs).backward()
                _check_gradients(
                    model, unsharded, f"{loss.__name__}, input needs gradient: {needs_gradient}, step {step}"
                )
                model.zero_grad()
                unsharded.zero_grad()
            model.reshard()


@MODES
def test_losses_on_tensors_that_are_not_outputs_train(pool: Pool, mode: str) -> None:
    pool.run(_losses_without_outputs, 2, mode)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: torch.Tensor, which: list[int]) -> torch.Tensor:
        for expert in which:
            x = self.experts[expert](x)
        return x


# Experts that ranks 0 and 1 use in each step.
ROUTES = [([0], [1]), ([0, 2], [1]), ([3], [3]), ([0, 1], [2, 3]), ([0], [0]), ([0, 1, 2, 3], [0]), ([1, 1], [2, 0])]


def _routes(unused: bool, accumulates: bool, mode: str) -> None:
    torch.manual_seed(0)
    unsharded = Experts()
    model = _sharded(unsharded, mode)
    model.set_reduce_scatter_unused_params(unused)
    rank = dist.get_rank()
    for step, routes in enumerate(ROUTES):
        is_last = not accumulates or step % 3 == 2 or step == len(ROUTES) - 1
        model.set_requires_gradient_sync(is_last)
        model(_batches()[rank], routes[rank]).square().mean().backward()
        sum(unsharded(x, route).square().mean() / 2 for x, route in zip(_batches(), routes)).backward()
        if not is_last:
            continue
        for parameter in unsharded.parameters() if unused else ():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        _check_gradients(model, unsharded, f"step {step}")
        model.zero_grad()
        unsharded.zero_grad()


@MODES
@pytest.mark.parametrize(("unused", "accumulates"), [(False, False), (True, False), (False, True)])
def test_ranks_may_use_different_weights(pool: Pool, unused: bool, accumulates: bool, mode: str) -> None:
    pool.run(_routes, 2, unused, accumulates, mode)


class Branches(nn.Module):
    """Ranks choose between equal units: one of two, or both in another order."""

    def __init__(self, trains: bool, takes_both: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head, *blocks = (nn.Linear(6, 6) for _ in range(3))
        self.blocks = nn.ModuleList(blocks).requires_grad_(trains)
        self.takes_both = takes_both

    def forward(self, x: torch.Tensor, swaps: bool) -> torch.Tensor:
        first, second = reversed(self.blocks) if swaps else self.blocks
        return self.head(second(first(x)) if self.takes_both else first(x))


def _different_units(trains: bool, takes_both: bool, mode: str) -> None:
    """Messages of equal sizes would mix up the weights of the units. All ranks raise, and the next step is right."""
    model, checked = (_sharded(Branches(trains, takes_both), mode) for _ in range(2))
    unsharded, x = Branches(trains, takes_both), _batches()[dist.get_rank()]
    swaps = dist.get_rank() == 1

    def step() -> torch.Tensor:
        return model(x, swaps).sum()

    used_different = functools.partial(pytest.raises, ValueError, match="the ranks have used different modules")
    for records in (True, False):
        with torch.set_grad_enabled(records):
            with used_different():
                step()
            torch.testing.assert_close(model(x, False), unsharded(x, False))
    model.reset_iter_state()
    with used_different():
        step().backward()
    model.zero_grad()  # gradients that were reduced before the error
    checked.requires_grad_(False)
    with used_different():
        checked(x.clone().requires_grad_(), swaps).sum().backward()
    model(x, False).sum().backward()
    for each in _batches():
        (unsharded(each, False).sum() / 2).backward()
    _check_gradients(model, unsharded, "after errors")
    sw.debug.check_ranks()
    try:
        error = r"nothing was sent(.|\n)*gather: blocks.0 .*; blocks.1 "
        with torch.no_grad(), pytest.raises(RuntimeError, match=error):
            checked(x, swaps)
    finally:
        sw.debug.check_ranks(False)


@MODES
@pytest.mark.parametrize(("trains", "takes_both"), [(False, False), (True, True)])
def test_ranks_that_use_different_units_raise(pool: Pool, trains: bool, takes_both: bool, mode: str) -> None:
    pool.run(_different_units, 2, trains, takes_both, mode)


def _reads_after_release(mode: str) -> None:
    torch.manual_seed(0)
    model = _sharded(StoresHidden(), mode)
    model.unshard()
    loss = model.encode(_batches()[0].requires_grad_()).sum()
    model.reshard()
    with pytest.raises(RuntimeError, match="was read after it was released"):
        loss.backward()
    model(_batches()[0]).sum().backward()  # the next step works
    assert model.a.weight.grad is not None


@MODES
def test_reading_a_released_weight_raises(pool: Pool, mode: str) -> None:
    pool.run(_reads_after_release, 2, mode)


def _writes_in_place(mode: str) -> None:
    torch.manual_seed(0)
    model = _sharded(StoresHidden(), mode)
    seen: list[torch.Tensor] = []
    model.register_forward_hook(lambda module, args, output: seen.append(module.hidden))
    y = model(_batches()[0])
    with torch.no_grad():
        seen[0].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@MODES
def test_writing_a_saved_activation_raises(pool: Pool, mode: str) -> None:
    pool.run(_writes_in_place, 2, mode)


def _writes_before_backward(mode: str) -> None:
    torch.manual_seed(0)
    model = _sharded(StoresHidden(), mode)
    module = getattr(model, "_orig_mod", model)
    register_fsdp_forward_method(module, "encode")
    for stays, forward in itertools.product((False, True), (model, module.encode)):
        model.set_reshard_after_forward(not stays)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        first, second = (forward(x).sum() for x in _batches())
        first.backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match="(was|were) written between a forward and its backward"):
            second.backward()


@MODES
def test_writing_a_weight_before_the_backward_raises(pool: Pool, mode: str) -> None:
    pool.run(_writes_before_backward, 2, mode)


def _saved_tensors() -> list[Any]:
    """Returns what autograd has saved for backwards, in this and in earlier tests."""
    return [each for each in gc.get_objects() if type(each).__name__ in ("_SavedWeight", "_SavedTensor")]


def _forwards_without_backwards(mode: str) -> None:
    """No reference cycle contains tensors that autograd saved."""
    torch.manual_seed(0)
    model = _sharded(Chain("plain object"), mode)
    gc.collect()
    gc.disable()
    try:
        of_earlier_tests = _saved_tensors()
        y = model(_batches()[0]).y
        saved = weakref.ref(y)
        del y
        assert saved() is None
        assert not {*map(id, _saved_tensors())} - {*map(id, of_earlier_tests)}
    finally:
        gc.enable()


@MODES
def test_graphs_are_freed_without_a_backward(pool: Pool, mode: str) -> None:
    pool.run(_forwards_without_backwards, 2, mode)


def _hooks_of_parameters(mode: str) -> None:
    torch.manual_seed(0)
    unsharded = nn.Linear(6, 6)
    model = _sharded(unsharded, mode)
    for module in (model, unsharded):
        module.weight.register_hook(lambda gradient: gradient * 3)
        module.bias.register_hook(lambda gradient: None)
    model(_batches()[dist.get_rank()]).square().mean().backward()
    sum(unsharded(x).square().mean() / 2 for x in _batches()).backward()
    _check_gradients(model, unsharded, "hooks of parameters")


@MODES
def test_hooks_of_parameters_get_reduced_gradients(pool: Pool, mode: str) -> None:
    pool.run(_hooks_of_parameters, 2, mode)


class _StoresResult(nn.Module):
    """A unit with weights that are gathered by extensions, which stores its result instead of returning it."""

    def __init__(self, kind: type) -> None:
        super().__init__()
        self.chain = ChainOfLinears(6, wraps=kind is SentInHalf)
        for layer in self.chain if kind is TwoTensor else []:
            layer.weight = nn.Parameter(TwoTensor(layer.weight.detach(), layer.weight.detach().clone()))
            layer.bias = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.result = self.chain(x)
        return x.detach()


def _reads_of_extensions(kind: type) -> None:
    """A backward gathers weights that no hook of an output gathers, and detects writes."""
    model = sw.fully_shard(
        nn.Sequential(flat_fully_shard(_StoresResult(kind), mesh=get_mesh((2,)))), mesh=get_mesh((2,))
    )
    unsharded = ChainOfLinears(6, wraps=False)
    for layer in unsharded if kind is TwoTensor else []:
        layer.bias = None
    for layer in model[0].chain if kind is TwoTensor else []:
        give_methods(layer.weight._local_tensor)
    tolerance = {"rtol": 0.02, "atol": 0.02} if kind is SentInHalf else {"rtol": 1e-5, "atol": 1e-6}
    for step in range(3):
        model(batch(step, width=6))
        model[0].result.square().mean().backward()
        torch.stack([loss_of(unsharded, batch(step, rank, width=6)) for rank in range(2)]).mean().backward()
        for p, q in zip(model.parameters(), unsharded.parameters(), strict=True):
            torch.testing.assert_close(full(p.grad), q.grad, **tolerance)
            p.grad = q.grad = None
    model(batch(0, width=6))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
    with pytest.raises(RuntimeError, match="written between a forward and its backward"):
        model[0].result.sum().backward()


@pytest.mark.parametrize("kind", [SentInHalf, TwoTensor])
def test_backwards_read_weights_of_extensions(pool: Pool, kind: type) -> None:
    pool.run(_reads_of_extensions, 2, kind)

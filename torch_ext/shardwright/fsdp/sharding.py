"""`fully_shard`: weights that are cut between steps and gathered when they are used."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.utils._pytree import tree_flatten, tree_unflatten

from .. import argument_checks, groups
from .._planner import StepSchedule
from .steps import Runner
from .weights import Unit, Weight

Modules = TypeVar("Modules", nn.Module, list[nn.Module])

# Attributes: of modules, the state of the unit that hooks them; of parameters, that they belong to a unit, both as they
# were given, which other modules may still have, and as they are now.
_ATTRIBUTE = "_shardwright_unit"
_GIVEN, _SHARDED = "_shardwright_given", "_shardwright_sharded"


def fully_shard(
    module: Modules,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None = None,
    rest: Callable[[nn.Parameter], Sequence[Placement] | None] | None = None,
    memory_limit: int | None = None,
    prefetch: int | str = "auto",
) -> Modules:
    """Cuts the parameters of a module over a mesh, and gathers them when they are used.

    Like FSDP2's function of this name: call it on the layers of a model first, then on the model, on all ranks alike.
    Each call makes one unit of the parameters that no earlier call took; a unit is gathered as a whole, for the
    forwards and backwards of its modules. Parameters become DTensors, so optimizers, checkpoints and gradient norms see
    what they see with FSDP2; gradients are averaged over the mesh.

    A first step gathers as it goes. From its sequence of uses follows a schedule: each gather starts one unit ahead, a
    gathered unit stays where memory allows, and gradients are reduced alongside the next use. Gathered weights lie in
    one arena, at the same addresses in every step. A step that leaves the sequence gathers as it goes again, and is
    counted (``sw.stats()["unplanned_steps"]``).

    Args:
        module: a module, or a list of modules whose parameters make one unit.
        mesh: over which data is parallel; default, all ranks. With two dims, parameters are replicated over the first
            and cut over the second, as in FSDP2's HSDP.
        reshard_after_forward: False keeps the unit gathered from its first use of a step to its last. True and None
            leave it to the schedule.
        shard_placement_fn: the tensor dim along which a parameter is cut, as a Shard; default, dim 0. Any dim may be
            uneven.
        rest: instead of that, the placements of a parameter on all mesh dims, such as ``[Shard(0), Shard(1)]``; None
            for the default.
        memory_limit: bytes for gathered weights and gradients before they are reduced, on this rank, the same on all;
            only in the outermost call. Default: what it takes to gather one unit ahead and reduce one gradient behind.
        prefetch: for how many changes of units ahead to gather; "auto" is 1. Only in the outermost call.

    Returns:
        `module`.

    Raises:
        ValueError: an argument of the wrong type or value; a module that is under FSDP2 or was given before; a
            parameter that is a DTensor already, is on another device than the mesh, or is tied to one of another unit.
            The end of the first step raises it if `memory_limit` is too small.
    """
    groups.check_initialised()
    modules = _checked_modules(module)
    _check_options(reshard_after_forward, memory_limit, prefetch)
    if shard_placement_fn is not None and rest is not None:
        raise ValueError("rest: got a function besides shard_placement_fn; allowed is one of the two")
    found = _parameters_of(modules)
    mesh = _checked_mesh(mesh, found, rest is not None)
    weights = []
    for given, places in found:
        placements = _placements_of(given, places[0][2], mesh, shard_placement_fn, rest)
        weights.append((given, places, placements))
    made = []
    with torch.no_grad():
        for given, places, placements in weights:
            weight = Weight(places[0][2], given, [(owner, name) for owner, name, _ in places], mesh, placements)
            setattr(given, _GIVEN, True)
            setattr(weight.sharded, _SHARDED, True)
            made.append(weight)
    unit = Unit(type(modules[0]).__name__, modules, made, reshard_after_forward is False)
    state = _State(unit, memory_limit, 1 if prefetch == "auto" else int(prefetch))
    for each in modules:
        setattr(each, _ATTRIBUTE, state)
        each.register_forward_pre_hook(state.before_forward, prepend=True, with_kwargs=True)
        each.register_forward_hook(state.after_forward, always_call=True)
    return module


def schedules(module: nn.Module) -> list[StepSchedule]:
    """Returns the schedules of a model's steps so far: ``print(schedule)`` shows uses, gathers, releases and the peak.

    Args:
        module: the outermost module under `fully_shard`.

    Raises:
        ValueError: it is none.
    """
    state = getattr(module, _ATTRIBUTE, None)
    if state is None:
        raise ValueError(
            f"module: got a {type(module).__name__} that sw.fully_shard has not seen; allowed is one it has"
        )
    return [] if state.runner is None else list(state.runner.schedules)


class _State:
    """A unit with its hooks, and the runner that it shares with the other units of the model."""

    def __init__(self, unit: Unit, memory_limit: int | None, prefetch: int) -> None:
        self.unit = unit
        self.memory_limit = memory_limit
        self.prefetch = prefetch
        self.runner: Runner | None = None

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("a module under sw.fully_shard cannot be copied; copy it before, or use its state_dict")

    @torch._disable_dynamo
    def before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self.runner is None:
            self.runner = _make_runner(module)
        runner, unit = self.runner, self.unit
        is_within_backward = bool(unit.backwards)
        forward = runner.begin_forward(unit)
        if is_within_backward or not torch.is_grad_enabled():
            return args, kwargs
        flat, spec = tree_flatten((args, kwargs))
        where = [i for i, value in enumerate(flat) if isinstance(value, torch.Tensor) and value.requires_grad]
        if where:
            end = functools.partial(runner.end_backward, unit, forward)
            for i, tensor in zip(where, _AtInputs.apply(end, *(flat[i] for i in where)), strict=True):  # type: ignore[no-untyped-call]
                flat[i] = tensor
            args, kwargs = tree_unflatten(flat, spec)
        return args, kwargs

    @torch._disable_dynamo
    def after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        runner, unit = self.runner, self.unit
        if runner is None or not unit.forwards:
            return  # the hook before has failed
        forward = unit.forwards[-1]
        is_within_backward = bool(unit.backwards)
        runner.end_forward(unit)
        if is_within_backward or not torch.is_grad_enabled():
            return
        for tensor in tree_flatten(output)[0]:
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(functools.partial(_begin_backward, runner, unit, forward))


def _begin_backward(runner: Runner, unit: Unit, forward: int, gradient: torch.Tensor) -> None:
    runner.begin_backward(unit, forward)


class _AtInputs(torch.autograd.Function):
    """Calls a function when gradients have reached the inputs of a forward."""

    @staticmethod
    def forward(ctx: Any, end: Callable[[], None], *tensors: torch.Tensor) -> Any:  # type: ignore[override]
        ctx.end = end
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.end()
        return None, *gradients


def _make_runner(outermost: nn.Module) -> Runner:
    """Makes a runner for all units in a module, which is called first of all its units."""
    states: list[_State] = []
    for name, module in outermost.named_modules():
        state = getattr(module, _ATTRIBUTE, None)
        if state is None or state in states:
            continue
        if name and (state.memory_limit is not None or state.prefetch != 1):
            raise ValueError(
                f"memory_limit, prefetch: got {state.memory_limit} and {state.prefetch} for {name}, which lies in "
                f"another unit; allowed is to give them in the outermost call"
            )
        state.unit.name = name or type(outermost).__name__
        states.append(state)
    own: _State = getattr(outermost, _ATTRIBUTE)
    runner = Runner([state.unit for state in states], own.memory_limit, own.prefetch)
    for state in states:
        if state.runner is not None:  # it was called on its own before
            state.runner.abort()
        state.runner = runner
    return runner


def _checked_modules(given: Any) -> tuple[nn.Module, ...]:
    modules = tuple(given) if isinstance(given, list) else (given,)
    if not modules or not all(isinstance(module, nn.Module) for module in modules):
        raise ValueError(f"module: got {type(given).__name__}; allowed is a module, or a list of modules")
    for module in modules:
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            raise ValueError(
                f"module: got a {type(module).__name__}, which has no forward; allowed are modules that do"
            )
        if hasattr(module, _ATTRIBUTE):
            raise ValueError(f"module: a {type(module).__name__} was given to sw.fully_shard before; allowed is once")
        for inner in module.modules():
            if isinstance(inner, FSDPModule):
                raise ValueError(
                    f"module: a {type(inner).__name__} is under FSDP2's fully_shard; allowed is one of the two"
                )
    return modules


def _check_options(reshard_after_forward: Any, memory_limit: Any, prefetch: Any) -> None:
    if reshard_after_forward is not None and not isinstance(reshard_after_forward, bool):
        raise ValueError(
            f"reshard_after_forward: got {reshard_after_forward!r}; allowed are True, False and None. Copies that are "
            "cut less than at rest are not built"
        )
    is_limit = isinstance(memory_limit, int) and not isinstance(memory_limit, bool) and memory_limit >= 0
    if memory_limit is not None and not is_limit:
        raise ValueError(f"memory_limit: got {memory_limit!r}; allowed is a number of bytes, or None")
    is_count = isinstance(prefetch, int) and not isinstance(prefetch, bool) and prefetch >= 0
    if prefetch != "auto" and not is_count:
        raise ValueError(f'prefetch: got {prefetch!r}; allowed are "auto" and numbers from 0 on')


Place = tuple[nn.Module, str, str]  # module, name in it, name in all


def _parameters_of(modules: tuple[nn.Module, ...]) -> list[tuple[nn.Parameter, list[Place]]]:
    """Returns the parameters that no unit has, each with its places."""
    found: dict[int, tuple[nn.Parameter, list[Place]]] = {}
    visited: set[int] = set()
    for index, root in enumerate(modules):
        for prefix, owner in root.named_modules():
            if id(owner) in visited:
                continue
            visited.add(id(owner))
            for name, parameter in owner._parameters.items():
                if parameter is None or hasattr(parameter, _SHARDED):
                    continue
                full = ".".join(part for part in (str(index) if len(modules) > 1 else "", prefix, name) if part)
                _check_parameter(full, parameter)
                found.setdefault(id(parameter), (parameter, []))[1].append((owner, name, full))
    return list(found.values())


def _check_parameter(name: str, parameter: nn.Parameter) -> None:
    if hasattr(parameter, _GIVEN):
        raise ValueError(
            f"{name}: is tied to a weight of another unit; allowed is to give the modules that share it in one call, "
            "as a list, or to leave both to the outermost one"
        )
    if isinstance(parameter, DTensor):
        raise ValueError(
            f"{name}: is a DTensor; allowed are plain parameters. Other parallelism underneath is not built"
        )
    if parameter.device.type == "meta":
        raise ValueError(f"{name}: is on the meta device; allowed are parameters with values")
    argument_checks.check_tensor(name, parameter.detach())


def _checked_mesh(mesh: DeviceMesh | None, found: list[tuple[nn.Parameter, list[Place]]], has_rest: bool) -> DeviceMesh:
    argument_checks.check_device_mesh("mesh", mesh)
    if mesh is None:
        device_type = found[0][0].device.type if found else "cpu"
        mesh = init_device_mesh(device_type, (torch.distributed.get_world_size(),))
    if mesh.ndim > 2 and not has_rest:
        raise ValueError(f"mesh: has {mesh.ndim} dims; allowed are 1 and 2, or any number with rest=")
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"mesh: {mesh} does not hold rank {torch.distributed.get_rank()}; all its ranks call, no others"
        )
    for parameter, places in found:
        if parameter.device.type != mesh.device_type:
            raise ValueError(
                f"{places[0][2]}: is on {parameter.device}; allowed is the mesh's kind of device, {mesh.device_type}"
            )
    return mesh


def _placements_of(
    parameter: nn.Parameter,
    name: str,
    mesh: DeviceMesh,
    shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None,
    rest: Callable[[nn.Parameter], Sequence[Placement] | None] | None,
) -> list[Placement]:
    chosen = rest(parameter) if rest is not None else None
    if chosen is not None:
        placements = argument_checks.placements_of(chosen, mesh.ndim)
        if any(placement.is_partial() for placement in placements):
            raise ValueError(f"rest: got {placements} for {name}; allowed are placements without pending reductions")
        return placements
    shard = shard_placement_fn(parameter) if shard_placement_fn is not None else None
    if shard is not None and not isinstance(shard, Shard):
        raise ValueError(f"shard_placement_fn: returned {shard!r} for {name}; allowed is a Shard, or None")
    if parameter.ndim == 0:
        return [Replicate()] * mesh.ndim
    dim = 0 if shard is None else shard.dim
    if not -parameter.ndim <= dim < parameter.ndim:
        raise ValueError(f"shard_placement_fn: returned {shard!r} for {name} of shape {tuple(parameter.shape)}")
    return [Replicate()] * (mesh.ndim - 1) + [Shard(dim % parameter.ndim)]

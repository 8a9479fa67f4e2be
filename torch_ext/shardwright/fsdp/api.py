"""`fully_shard`: weights that are sharded between uses and gathered when they are used.

A *unit* is the weights of one call of `fully_shard`, FSDP2's parameter group. A *use* is a range of compute, of a
forward or a backward, with the units that it needs. The *runner* (runner.py) of a model gathers and releases all units
of the model. This file has the hooks that tell the runner when uses begin and end:

    pre-forward      `_State.before_forward`, before the forward of a module of the unit
    post-forward     `_State.after_forward`, after it
    pre-backward     `_pre_backward`, when the gradient of an output of that forward is computed
    post-backward    `_PostBackward`, when the gradients of its inputs are computed
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Callable
from types import FrameType, SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, RegistryItem
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.fsdp import fully_shard as stock_fully_shard
from torch.utils._pytree import tree_flatten, tree_unflatten

from .._planner import StepSchedule
from ..debug import explaining
from ..layouts.errors import argument_error
from ..runtime import groups
from . import extensions, graphs, offload, reads, scheduler
from .arguments import (
    GIVEN,
    SHARDED,
    Options,
    ShardingArguments,
    ShardPlacementFn,
    checked_ignored,
    checked_modules,
    checked_options,
    data_mesh_of,
    device_type_of,
    kept_ranks_of,
    parameters_of,
)
from .calls import mapped, tensors_in
from .float8_products import product_of
from .formats import Policy
from .layouts import Layouts
from .methods import ATTRIBUTE, finalize_backward, original_class, sharded_class
from .runner import Runner
from .units import Unit, check_no_create_graph, is_in_backward
from .weights import DtypesOf, Weight

explaining.step_listeners.append(scheduler.listening)

Modules = TypeVar("Modules", nn.Module, list[nn.Module])


def fully_shard(
    module: Modules,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: ShardPlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: Any | None = None,
    options: Options | None = None,
) -> Modules:
    """Shards the parameters of a module over a mesh, and gathers them when they are used.

    Use it like FSDP2's function: call it on the layers of a model first, then on the model, on all ranks with the same
    arguments. Each call makes one unit of the parameters that no earlier call took. The weights of a unit are gathered
    together, for the forwards and backwards of its modules. Parameters become DTensors, so optimizers, checkpoints and
    gradient norms work as with FSDP2. Gradients are averaged over the mesh.

    The first step gathers each unit when it is used, and records the sequence of uses. Later steps follow a schedule
    made from it: each gather starts one unit ahead, a gathered unit stays gathered where memory allows, and gradients
    are reduced during the next use. Gathered weights are stored in one arena, at the same addresses in every step. A
    step with another sequence gathers without a schedule, and is counted (``sw.stats()["unplanned_steps"]``).

    Args:
        module: a module, or a list of modules whose parameters make one unit.
        mesh: the data-parallel mesh; default, all ranks. With two dims, parameters are replicated over the first and
            sharded over the second, as in FSDP2's HSDP. Parameters that are DTensors already, such as those of tensor
            parallelism, must be on other dims of the mesh that `mesh` is part of. In use they keep their own shards;
            between uses these are sharded further.
        reshard_after_forward: False keeps the unit gathered from its first use of a step to its last, and leaves the
            full weights in its modules from the forward to the backward. True and None leave this to the schedule. A
            number of ranks: when the unit is released between two uses, each group of so many consecutive ranks of the
            mesh keeps a copy, from which the unit is gathered again.
        shard_placement_fn: a function that returns the tensor dim along which to shard a parameter, as a Shard; default
            dim 0. Any dim may be uneven. It may return torch's ``ShardPlacementResult``, which also names the mesh.
        mp_policy: torch's ``MixedPrecisionPolicy``. Parameters and their gradients keep their dtype. Gathered weights
            and messages have param_dtype. Gradients are reduced in reduce_dtype.
        offload_policy: torch's ``CPUOffloadPolicy``: parameters, gradients and so optimizer states are in host memory,
            pinned unless the policy has pin_memory=False. A gather begins with a copy to the device and a reduction
            ends with a copy to the host, on separate streams. Parameters may be given on the host; the device is then
            the current one. On CPU the policy changes nothing. ``OffloadPolicy()``, the default, offloads nothing.
        ignored_params: parameters to leave unsharded. Their gradients are not reduced.
        dp_mesh_dims: the data-parallel dims of `mesh`, for parameters that are DTensors on all of `mesh`, or plain
            tensors with types of spmd_types: torch's DataParallelMeshDims, or an object with its attributes ``shard``
            and ``replicate``.
        options: settings that FSDP2 does not have.

    Returns:
        `module`. Its class is now a subclass of its former class and of `ShardedModule`, which has FSDP2's methods.

    Raises:
        ValueError: an argument has a wrong type or value; a module is under FSDP2 or was given before; a parameter is
            on another device than the mesh (or, with CPUOffloadPolicy, than the host), is tied to a parameter of
            another unit, or is a DTensor on a mesh that cannot be combined with `mesh`.
            The first forward raises it if ranks gave different arguments. The end of the first step raises it if
            `memory_limit` is too small; with activations of `checkpoint_cut`, the end of the second step.
    """
    groups.check_initialized()
    modules = checked_modules(module)
    options = checked_options(options)
    if shard_placement_fn is not None and options.placements is not None:
        raise argument_error("placements", "None with shard_placement_fn", "a function")
    policy, offloaded = Policy(mp_policy, options.message_format), offload.checked(offload_policy)
    found = parameters_of(modules, checked_ignored(ignored_params))
    device_type = device_type_of([parameter for parameter, _ in found])
    data = data_mesh_of(mesh, dp_mesh_dims, options.same_data_dims, device_type, options.placements is not None)
    kept_ranks_of(reshard_after_forward, data)
    host_copies = offload.host_copies_of(offloaded, data.mesh.device_type, [parameter for parameter, _ in found])
    placing = ShardingArguments(data, shard_placement_fn, options, reshard_after_forward, host_copies is not None)
    layouts = [placing.layouts_of(sites[0][2], parameter) for parameter, sites in found]
    dtypes_of = _dtypes_by(policy, options.matmul_format)
    dtypes = [
        dtypes_of(sites[0][2], parameter, [site[:2] for site in sites], placed)
        for (parameter, sites), placed in zip(found, layouts, strict=True)
    ]
    weights = []
    with torch.no_grad():
        for (parameter, sites), placed, (in_dtypes, product) in zip(found, layouts, dtypes, strict=True):
            owners = [site[:2] for site in sites]
            weight = Weight(sites[0][2], parameter, owners, placed, in_dtypes, host_copies, product)
            setattr(parameter, GIVEN, True)
            setattr(weight.sharded, SHARDED, True)
            weights.append(weight)
    unit = Unit(type(modules[0]).__name__, modules, weights, reshard_after_forward is False, host_copies)
    state = _State(unit, policy, dtypes_of, options)
    for owner in modules:
        setattr(owner, ATTRIBUTE, state)
        owner.__class__ = sharded_class(type(owner))
        _register(owner, state)
        owner.register_forward_pre_hook(state.before_forward, prepend=True, with_kwargs=True)
        owner.register_forward_hook(state.after_forward, always_call=True)
    _register_state_dict_hooks(state)
    return module


def _register(module: nn.Module, state: _State) -> None:
    """Adds FSDP2's registry entries to a module: `replicate` then skips it, and `fully_shard.state` returns `state`."""
    module.__dict__.setdefault(REGISTRY_KEY, {})["fully_shard"] = RegistryItem()
    module.__dict__.setdefault(STATE_KEY, {})[inspect.unwrap(stock_fully_shard)] = state


def _register_state_dict_hooks(state: _State) -> None:
    """Adds hooks: state dicts have sharded parameters, and loading one may change their dtypes and devices."""
    for owner in {owner: None for weight in state.unit.weights for owner, _ in weight.owners}:
        owner.register_state_dict_pre_hook(state.before_state_dict)
        owner.register_load_state_dict_pre_hook(state.before_state_dict)
        owner.register_load_state_dict_post_hook(state.after_conversion)


def _dtypes_by(policy: Policy, matmul_format: str | None) -> DtypesOf:
    """Returns a function that checks a parameter, and returns its dtypes and its `weights.Product`, if it has one."""

    def dtypes_of(name: str, parameter: nn.Parameter, owners: Any, placed: Layouts) -> Any:
        in_dtypes = policy.of(parameter)
        in_dtypes.gathers.check(name, placed.shards, placed.mesh.device_type)
        if extensions.has_extension(getattr(parameter, "_local_tensor", parameter)):
            extensions.check(name, placed, in_dtypes.are_plain and matmul_format is None)
        if matmul_format is None:
            return in_dtypes, None
        return product_of(name, parameter, owners, placed, in_dtypes)

    return dtypes_of


def schedules(module: nn.Module) -> list[StepSchedule]:
    """Returns the schedules of a model's steps so far, one for each kind of step.

    ``print(schedule)`` shows uses, gathers, releases and the peak. ``to_json()`` also has addresses.

    Args:
        module: the outermost module under `fully_shard`.

    Raises:
        ValueError: `module` is not under `fully_shard`.
    """
    state = getattr(module, ATTRIBUTE, None)
    if state is None:
        raise argument_error("module", "a module under sw.fully_shard", f"a {type(module).__name__} that is not")
    return [] if state.runner is None else list(state.runner.schedules)


def schedule(module: nn.Module) -> StepSchedule:
    """Returns the schedule of a model's training step.

    ``print`` shows uses, gathers, releases, the peak, arena offsets and, once a step has been timed, the predicted
    timeline of compute and transfers; ``to_svg()`` draws it. ``lanes`` has the start and end of every event in
    picoseconds, including copies between host and device; it is None before a timed step. ``activations`` are those of
    `checkpoint_cut`, and ``prefetch`` is the chosen value of that option.

    If there are schedules for several sequences of uses, the longest with a backward is returned; if none has a
    backward, the longest.

    Args:
        module: the outermost module under `fully_shard`.

    Raises:
        ValueError: `module` is not under `fully_shard`, or no step has ended yet.
    """
    found = schedules(module)
    if not found:
        raise ValueError("module must have ended a step, got none. Run one training step first")
    return max(found, key=lambda each: (bool(each.reductions), len(each.uses)))


class _State:
    """The hooks of one unit. `runner` is shared by all units of the model; None before the first forward."""

    def __init__(self, unit: Unit, policy: Policy, dtypes_of: DtypesOf, options: Options) -> None:
        self.unit = unit
        self.dtypes_of = dtypes_of
        self.policy = policy
        self.options = options
        self.runner: Runner | None = None
        # Attributes of FSDP2's state that torch reads or writes.
        self._comm_ctx = object()  # torch's `share_comm_ctx` sets it; unused, as all units share their streams
        self._fsdp_param_groups = ()  # `share_comm_ctx` reads it
        self._state_ctx = SimpleNamespace(all_states=())  # pipeline stages of torch 2.11 read it
        self._handle = graphs.handle_of(self)  # operators in compiled graphs refer to the unit by it
        unit.ready_runner = functools.partial(_runner_of, weakref.ref(self), weakref.ref(unit))
        self._why_not_in_graphs = graphs.why_not(unit)  # None: graphs may contain the unit's events

    @graphs.traced_by_callers
    def before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Pre-forward hook: casts the inputs, opens the unit and gathers it. Returns the inputs."""
        is_traced = torch.compiler.is_compiling()
        if is_traced and self._why_not_in_graphs is None:
            return graphs.begin_forward(self._handle, self.unit, self._cast_inputs(args, kwargs))
        return self._begin_forward(module, args, kwargs, is_traced or graphs.is_called_by_compiled_code(module))

    @graphs.traced_by_callers
    def after_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Post-forward hook: closes the unit. Returns the output, cast to output_dtype."""
        if torch.compiler.is_compiling() and self._why_not_in_graphs is None:
            return self._cast_output(graphs.end_forward(self._handle, self.unit, output))
        return self._end_forward(output)

    def _cast_inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Returns the arguments of a forward, cast to param_dtype if the policy casts inputs."""
        if not self.policy.casts_inputs:
            return args, kwargs
        return mapped(self.policy.cast_inputs, args), mapped(self.policy.cast_inputs, kwargs)

    def _cast_output(self, output: Any) -> Any:
        """Returns the output of a forward, cast to output_dtype if the policy has one."""
        return mapped(self.policy.cast_output, output) if self.policy.casts_outputs else output

    # torch's `register_fsdp_forward_method` calls `_pre_forward` and `_post_forward`, FSDP2's names, around a method.

    def _pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            self._begin_method(sys._getframe(1))
        return self.before_forward(module, args, kwargs)

    def _post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        output = self.after_forward(module, args, output)
        if not torch.compiler.is_compiling():
            self._end_method()
        return output

    def _root_post_backward_final_callback(self) -> None:
        """Reduces accumulated gradients and releases weights. Pipeline stages of torch 2.11 call it."""
        if self.runner is not None:
            self.runner.abort_if_failed()
            finalize_backward(self.runner)

    @torch._disable_dynamo
    def _begin_method(self, frame: FrameType) -> None:
        """Records a call of a registered forward method. `frame`: the frame of torch's wrapper of the method."""
        runner = self.ready_runner()
        runner.calls.end_failed(runner.end_forward)
        runner.calls.begin(frame, self.unit)

    @torch._disable_dynamo
    def _end_method(self) -> None:
        """Records the end of a registered forward method."""
        if self.runner is not None:
            self.runner.calls.end()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"a module under sw.fully_shard has no {name} of FSDP2's FSDPState. Use methods of sw.fsdp.ShardedModule"
        )

    def adopt_conversions(self) -> None:
        """Adopts the dtypes and devices to which parameters were converted between steps."""
        if self.runner is not None:
            self.ready_runner()
        else:
            self.unit.convert(self.dtypes_of)
            _check_can_gather(self.unit.modules[0], [self])

    def after_conversion(self, *_: Any) -> None:
        """Hook: adopts a conversion now, because a compiler traces weights before the forward.

        If a step runs or a gradient is not reduced yet, the next forward adopts it or raises.
        """
        unit, runner = self.unit, self.runner
        if not unit.is_converted or not unit.can_convert:
            return
        if runner is not None and not runner.open and not _pending_weights(runner):
            _drop_runner(runner)
        if self.runner is None:
            unit.convert(self.dtypes_of)

    def ready_runner(self, outermost: nn.Module | None = None, converts: bool = True) -> Runner:
        """Returns the runner of the model. Makes it if there is none, and again if parameters were converted.

        Args:
            outermost: the module that contains all units of the model. None: the module of this unit.
            converts: False in a compiled graph, which was traced before a conversion. Later checks then raise.
        """
        runner = self.runner
        if converts and runner is not None and not runner.open and any(unit.is_converted for unit in runner.units):
            if pending := _pending_weights(runner):
                raise RuntimeError(
                    f"parameters were converted while the gradient of {pending[0]} waits for a reduction. Before a "
                    "conversion run a backward that reduces gradients, or call finalize_backward()"
                )
            outermost = next(iter(runner.units[0].modules), outermost)  # it may have been freed
            _drop_runner(runner)
        if self.runner is None:
            self.runner = _make_runner(outermost or self.unit.modules[0], converts)
        return self.runner

    @torch._disable_dynamo
    def _begin_forward(self, module: nn.Module, args: Any, kwargs: Any, is_compiled: bool) -> Any:
        """Opens the unit. Returns the inputs, cast, with a post-backward hook on their gradients."""
        args, kwargs = self._cast_inputs(args, kwargs)
        runner, unit = self.ready_runner(module), self.unit
        runner.calls.end_failed(runner.end_forward)
        is_within_backward = bool(unit.backwards)
        if not is_in_backward():
            around = (runner.units[index] for index in runner.open)
            graphs.note_eager(unit, around, is_compiled, self._why_not_in_graphs)
        forward = runner.begin_forward(unit)
        if is_within_backward or not torch.is_grad_enabled():
            return args, kwargs
        reads.note_forward(unit, forward)
        if len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor):  # tree_flatten is slow
            if args[0].requires_grad:
                args = _PostBackward.apply(functools.partial(runner.end_backward, unit, forward), args[0])  # type: ignore[no-untyped-call]
            return args, kwargs
        flat, spec = tree_flatten((args, kwargs))
        where = [i for i, value in enumerate(flat) if isinstance(value, torch.Tensor) and value.requires_grad]
        if where:
            end = functools.partial(runner.end_backward, unit, forward)
            for i, tensor in zip(where, _PostBackward.apply(end, *(flat[i] for i in where)), strict=True):  # type: ignore[no-untyped-call]
                flat[i] = tensor
            args, kwargs = tree_unflatten(flat, spec)
        return args, kwargs

    def before_state_dict(self, module: nn.Module, *_: Any) -> None:
        """Hook: gives modules their sharded parameters after `unshard`, because a state dict has only those."""
        if self.runner is not None:
            self.runner.abort_if_failed()
        if self.unit.host_copies is not None:
            self.unit.host_copies.make_host_wait()
        if not self.unit.is_open:
            self.unit.to_sharded()

    @torch._disable_dynamo
    def _end_forward(self, output: Any) -> Any:
        """Closes the unit. Returns the output, cast, with a pre-backward hook on its tensors."""
        runner, unit = self.runner, self.unit
        if runner is None or not unit.forwards:
            return output  # the pre-forward hook has failed
        runner.calls.end_failed(runner.end_forward)
        forward = unit.forwards[-1]
        is_within_backward = bool(unit.backwards)
        runner.end_forward(unit)
        if not is_within_backward and torch.is_grad_enabled():
            for tensor in tensors_in(output):
                if tensor.requires_grad and not isinstance(tensor, nn.Parameter):  # a weight would keep each hook
                    tensor.register_hook(functools.partial(_pre_backward, runner, unit, forward))
        return self._cast_output(output)


def _runner_of(state: weakref.ref[_State], unit: weakref.ref[Unit]) -> Runner:
    """Returns the runner of a unit, also if the model was freed. Raises RuntimeError if the runner was freed too."""
    if (found := state()) is not None:
        return found.ready_runner()
    # The model was freed, but its autograd graph still exists.
    found_unit = unit()
    runner: Runner | None = None if found_unit is None or found_unit.runner is None else found_unit.runner()
    if runner is None:
        raise RuntimeError("a model of sw.fully_shard was freed before its backward; keep it until its backwards end")
    return runner


def _pre_backward(runner: Runner, unit: Unit, forward: int, gradient: torch.Tensor) -> None:
    """Pre-backward hook of the unit's forward number `forward`: the gradient of an output is computed."""
    check_no_create_graph(unit.name)
    reads.check_backward(unit, forward)
    runner.begin_backward(unit, forward)


class _PostBackward(torch.autograd.Function):
    """Post-backward hook: returns the inputs of a forward. Its backward calls `end` and passes their gradients on."""

    @staticmethod
    def forward(ctx: Any, end: Callable[[], None], *tensors: torch.Tensor) -> Any:  # type: ignore[override]
        ctx.end = end
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.end()
        return None, *gradients


def _pending_weights(runner: Runner) -> list[str]:
    """Returns the names of weights with gradients that are kept for a later reduction."""
    return [weight.name for unit in runner.units for weight in unit.weights if weight.gradients.are_pending]


def _drop_runner(runner: Runner) -> None:
    """Aborts the running step, and removes the runner from all its units."""
    runner.abort()
    for module in (module for unit in runner.units for module in unit.modules[:1]):
        getattr(module, ATTRIBUTE).runner = None


def _make_runner(outermost: nn.Module, converts: bool) -> Runner:
    """Makes the runner of all units in `outermost`, and compares the units between ranks.

    Args:
        outermost: the module whose forward is called first.
        converts: adopt dtypes and devices that parameters were converted to.
    """
    states: list[_State] = []
    for name, module in outermost.named_modules():
        state = getattr(module, ATTRIBUTE, None)
        if state is None or state in states:
            continue
        for option, value in state.options.of_model.items() if name else ():
            if value != getattr(Options(), option):
                raise argument_error(option, "set in the outermost call only", f"{value!r} for {name}")
        state.unit.name = name or original_class(type(outermost)).__name__
        states.append(state)
    if any(state.runner is not None and state.runner.is_in_backward for state in states):
        raise RuntimeError(
            f"{states[0].unit.name} must be used before the backward of the modules in it, got its first use within "
            "that backward. Call its forward, or its unshard() before its parameters are used without its forward"
        )
    for state in states if converts else ():
        state.unit.convert(state.dtypes_of)
    _check_can_gather(outermost, states)
    own: Options = getattr(outermost, ATTRIBUTE).options
    ahead = None if own.prefetch == "auto" else int(own.prefetch)
    runner = Runner([state.unit for state in states], own.memory_limit, ahead, own.chunked)
    runner.reductions.comparisons.compare_units(own.of_model)
    for state in states:
        if state.runner is not None:  # the unit was used before without the outermost module
            state.runner.abort(drops_gradients=bool(state.runner.open or state.runner._backward_callback))
        state.runner = runner
    return runner


def _check_can_gather(outermost: nn.Module, states: list[_State]) -> None:
    """Raises RuntimeError if a weight is on meta, or lacks the extension protocol that it needs."""
    prefixes = {module: name for name, module in outermost.named_modules()}
    on_meta = [
        ".".join(part for part in (prefixes.get(module), name) if part)
        for state in states
        for weight in state.unit.weights
        if weight.part.is_meta
        for module, name in weight.owners[:1]
    ]
    if on_meta:  # FSDP2's error text, with the remedy added
        raise RuntimeError(
            "FSDP parameters should be materialized from meta device before training, but the following were still on "
            f"meta device: {on_meta}. Call to_empty(device=...) on the model, then initialize the parameters by "
            "reset_parameters() of each module or by load_state_dict"
        )
    for weight in (weight for state in states for weight in state.unit.weights):
        extensions.check_protocol(weight.name, weight.local_part)

"""The methods of modules under `sw.fully_shard`. They have the names and arguments of FSDP2's methods."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.fsdp import FSDPModule

from ..layouts.errors import argument_error
from ..runtime.agreement import MeshWords
from .chunks import linear_forward
from .reads import SavedWeightHooks
from .runner import Runner
from .unit_options import UnitOptions
from .units import Unit, by_mesh, forget_written_copies

# Attribute of a module: the state of its unit, an object with attributes `unit` and `runner` (or None).
ATTRIBUTE = "_shardwright_unit"


class UnshardHandle(fsdp.UnshardHandle):
    """A gather that `ShardedModule.unshard` has started."""

    def __init__(self, unit: Unit) -> None:
        self._unit: Unit | None = unit

    def wait(self) -> None:
        """Waits for the gather, and gives the modules their full parameters."""
        unit, self._unit = self._unit, None
        if unit is not None and unit.is_resident:
            with torch.no_grad():
                unit.finish_gather()
            unit.to_unsharded()


class ReductionHandle(getattr(fsdp, "GradientReductionHandle", object)):  # type: ignore[misc]  # since torch 2.15
    """The result of `ShardedModule.finalize_backward`, which returns only after its reductions have ended."""

    def wait(self) -> None:
        """Does nothing."""


class ShardedModule(FSDPModule):
    """The methods of modules under `sw.fully_shard`; their names and arguments are those of FSDP2's `FSDPModule`.

    `sw.fully_shard` makes the class of a module a subclass of this class and of its former class. This class is a
    subclass of FSDP2's, so PyTorch's functions and other libraries treat such modules as FSDP2's. Every method of
    FSDP2's class is defined here, or raises NotImplementedError. All ranks call a method with the same arguments.
    FSDP2's methods change the time of a gather or release. These methods constrain the schedule instead, from the next
    step on.
    """

    _orig_cls_mro_index = 3  # index of the original class in `__mro__`; FSDP2 reads it

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Returns a module of the original class. Containers call this when they are sliced."""
        original = original_class(cls)
        module: Any = original.__new__(original, *args, **kwargs)
        module.__init__(*args, **kwargs)
        return module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the forward, with hooks. If it raises any exception, resets the step so that the next one can run."""
        if torch.compiler.is_compiling():
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        state = getattr(self, ATTRIBUTE)
        depth = len(state.unit.forwards)
        try:
            with SavedWeightHooks(self):  # type: ignore[arg-type]
                return super().__call__(*args, **kwargs)  # type: ignore[misc]
        except BaseException as error:
            if state.runner is not None:
                state.runner.fail_forward(state.unit, depth, error)
            raise

    def __deepcopy__(self, memo: Any) -> Any:
        """Raises TypeError, because hooks and units refer to this module."""
        raise TypeError("a module under sw.fully_shard cannot be copied; copy it before, or use its state_dict")

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gathers this module's weights now, but not those of units within it.

        They stay gathered until their next use ends, or until the schedule releases them if that is later, or until
        `reshard`. Their memory is not part of the schedule's.

        Args:
            async_op: return a handle before the gather ends. Its `wait` waits for the gather; so does the next forward.
        """
        unit = _unit_of(self)
        if not unit.is_open:
            getattr(self, ATTRIBUTE).adopt_conversions()
            if any(module is not self for module in _modules_of(self, True)):  # they may be used without its forward
                getattr(self, ATTRIBUTE).ready_runner()
            unit.adopt_changes()
            with torch.no_grad():
                step = f"{unit.name}.unshard, comparing flags of writes"
                words = {mesh: MeshWords(mesh, unit.device) for mesh in by_mesh([unit])}
                forget_written_copies([unit], lambda flags: {m: words[m].largest(flags[m], step) for m in flags})
                if unit.is_resident and (unit.is_stale or unit.chunked_gather is not None):
                    unit.release()
                if not unit.is_resident:
                    unit.start_gather_alone()
                unit.record_fingerprints()
            unit.is_unsharded = True
        handle = UnshardHandle(unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Releases this module's gathered weights, but not those of units within it. The next use gathers them again.

        Raises:
            RuntimeError: a forward or backward uses them.
        """
        unit = _unit_of(self)
        if unit.is_open:
            raise RuntimeError(
                f"reshard cannot release {unit.name} in the middle of a forward or backward. Call it before or after"
            )
        unit.is_unsharded = False
        if unit.is_resident:
            unit.release()
        unit.to_sharded()

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Sets whether backwards reduce gradients.

        If not, full gradients are kept and summed, in reduce_dtype, until the next backward that reduces gradients.
        Schedules count their memory. An exception in a backward discards them.
        """
        _check_flag("requires_gradient_sync", requires_gradient_sync)
        for unit_options in _unit_options_of(self, recurse):
            unit_options.reduces = unit_options.reduces_over_replicas = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Sets whether backwards reduce gradients over mesh dims on which a weight is replicated.

        If not, gradients are reduced to shards, which are kept and summed until the next backward that does.
        """
        _check_flag("requires_all_reduce", requires_all_reduce)
        for unit_options in _unit_options_of(self, recurse):
            unit_options.reduces_over_replicas = requires_all_reduce

    def set_reduce_scatter_unused_params(self, value: bool = True, *, recurse: bool = True) -> None:
        """Sets whether weights that no rank has used in a backward get a gradient of zeros. By default they get none.

        Ranks may use different weights in either case: each weight gets the average of its own gradients.
        """
        _check_flag("value", value)
        for unit_options in _unit_options_of(self, recurse):
            unit_options.reduces_unused = value

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Does nothing: reductions end before the backward does, so gradients can always be read after it."""
        _check_flag("is_last_backward", is_last_backward)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """False keeps weights gathered from their first use of a step to the last; True leaves it to the schedule.

        Raises:
            ValueError: `memory_limit` is too small for the weights that stay gathered.
        """
        _check_flag("reshard_after_forward", reshard_after_forward)
        self._change_options(
            recurse, lambda unit_options: setattr(unit_options, "keep_gathered", not reshard_after_forward)
        )

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """False keeps weights gathered after a step, for the next one, until they are written or `reshard` is called.

        Such weights are stored outside the arena. Schedules count their memory, and list a gather of 0 bytes, which
        runs only if the weights were written. True releases them at the end of the next step.

        Raises:
            ValueError: `memory_limit` is too small for the weights that stay gathered.
        """
        _check_flag("reshard_after_backward", reshard_after_backward)
        self._change_options(
            recurse, lambda unit_options: setattr(unit_options, "keep_between_steps", not reshard_after_backward)
        )

    def set_modules_to_forward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Makes gathers of these modules start no later than a forward of this module begins.

        Gathers of all uses in between start then too, as far as memory allows. `prefetch` still applies.

        Raises:
            ValueError: a module is not under `sw.fully_shard`, or `memory_limit` is too small.
        """
        units = _unit_references("set_modules_to_forward_prefetch", modules)
        self._change_options(False, lambda unit_options: setattr(unit_options, "forward_prefetch", units))

    def set_modules_to_backward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Like `set_modules_to_forward_prefetch`, for backwards."""
        units = _unit_references("set_modules_to_backward_prefetch", modules)
        self._change_options(False, lambda unit_options: setattr(unit_options, "backward_prefetch", units))

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divides the sums of gradients over ranks by this factor. Without it, gradients are averages over ranks."""
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not factor > 0:
            raise argument_error("factor", "a number above 0", repr(factor))
        _unit_of(self).unit_options.divides_by = float(factor)

    set_reduce_scatter_divide_factor = set_gradient_divide_factor  # FSDP2's older name

    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], None], *, stream: torch.Stream | None = None) -> None:
        """Calls `hook` with each reduced gradient of this module's weights, before it is added to the parameter's. The
        gradient is a local tensor. The hook may write to it, such as by an all-reduce over further ranks.

        FSDP2 calls its hook once, with the gradients of all weights in one flat tensor. Here the hook is called once
        for each weight, in the same order on all ranks.

        Args:
            stream: the stream on which the hook runs; default, the current one.
        """
        if not callable(hook):
            raise argument_error("hook", "a function", f"a {type(hook).__name__}")
        _unit_of(self).unit_options.gradient_hook = hook if stream is None else _on_stream(hook, stream)

    def set_post_optim_event(self, event: torch.Event | None) -> None:
        """Makes the current stream wait for an event that was recorded after the optimizer's step.

        None does nothing: streams of the CPU record no events.
        """
        if event is None:
            return
        device = next((weight.memory.device for weight in _unit_of(self).weights), torch.device("cpu"))
        if device.type != "cpu":
            event.wait(torch.accelerator.current_stream(device))
        elif event.device is not None and event.device.type != "cpu":
            event.synchronize()

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Does nothing: `set_requires_gradient_sync` decides whether backwards reduce gradients or keep them.

        `finalize_backward` reduces gradients that were kept.
        """
        _check_flag("enabled", enabled)
        _unit_of(self)

    def finalize_backward(self, *, async_op: bool = False) -> ReductionHandle | None:
        """Reduces the gradients that backwards have kept, of units that reduce gradients now, and releases weights that
        need not stay gathered (`set_reshard_after_backward`).

        Args:
            async_op: return a handle, as FSDP2 does. Its `wait` does nothing.
        """
        _unit_of(self)
        runner: Runner | None = getattr(self, ATTRIBUTE).runner
        if runner is not None:
            finalize_backward(runner)
        return ReductionHandle() if async_op else None

    def reset_iter_state(self) -> None:
        """Resets the step after an exception, as the next forward does. Discards gradients that are not reduced yet."""
        _unit_of(self)
        runner: Runner | None = getattr(self, ATTRIBUTE).runner
        if runner is not None:
            runner.abort()

    def _get_fsdp_state(self) -> Any:
        """Returns the replacement of FSDP2's internal state. `register_fsdp_forward_method` calls its hooks."""
        return getattr(self, ATTRIBUTE)

    def _change_options(self, recurse: bool, change: Callable[[UnitOptions], None]) -> None:
        """Changes options of units, and makes schedules again. Undoes both if a schedule raises ValueError."""
        saved = [(unit_options, dataclasses.replace(unit_options)) for unit_options in _unit_options_of(self, recurse)]
        for unit_options, _ in saved:
            change(unit_options)
        if all(unit_options == former for unit_options, former in saved):
            return
        try:
            self._reschedule(recurse)
        except ValueError:
            for unit_options, former in saved:
                vars(unit_options).update(vars(former))
            self._reschedule(recurse)
            raise

    def _reschedule(self, recurse: bool) -> None:
        """Makes the schedules of the runners of these modules again."""
        runners: dict[int, Runner] = {}
        for module in _modules_of(self, recurse):
            runner: Runner | None = getattr(module, ATTRIBUTE).runner
            if runner is not None:
                runners[id(runner)] = runner
        for runner in runners.values():
            runner.reschedule()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears gradients, also those of sharded parameters while modules have unsharded ones. Accumulated gradients
        that are not reduced yet stay (`reset_iter_state`)."""
        super().zero_grad(set_to_none)  # type: ignore[misc]
        found = {id(parameter) for parameter in self.parameters()}  # type: ignore[attr-defined]
        units = {getattr(module, ATTRIBUTE).unit for module in _modules_of(self, True)}
        for weight in (weight for unit in units for weight in unit.weights if id(weight.unsharded) in found):
            if weight.sharded.grad is not None:
                weight.sharded.grad = None if set_to_none else torch.zeros_like(weight.sharded.grad)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Applies `fn` to the sharded parameters, as `to` and `cuda` do, and adopts their dtypes and devices."""
        unit = _unit_of(self)
        if not unit.is_open:
            self.reshard()  # `fn` applies to sharded parameters
        applied = super(FSDPModule, self)._apply(fn, recurse=recurse)  # not FSDP2's, which requires FSDP2's parameters
        unit.watch_again()
        getattr(self, ATTRIBUTE).after_conversion()
        return applied


# Methods of FSDP2's modules in torch 2.15 that do nothing here. They tune FSDP2's execution, which schedules replace.
_IGNORED = (
    "_set_unshard_async_op set_allocate_memory_from_process_group_for_comm set_force_sum_reduction_for_comms "
    "set_keep_unsharded_storage "
    "set_reduce_scatter_max_input_buffers set_separate_reduce_scatter_group set_symm_mem_for_comm "
    "set_unshard_in_backward"
)
# Unsupported methods, and the remedy.
_UNSUPPORTED = {
    "set_custom_all_gather": "leave it out: transfers are shardwright's",
    "set_custom_reduce_scatter": "leave it out: transfers are shardwright's",
}


def _unsupported(name: str, remedy: str) -> Callable[..., None]:
    """Returns a method that raises NotImplementedError. `name`: its name."""

    def refuse(self: ShardedModule, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(f"modules under sw.fully_shard do not support {name}; {remedy}")

    return refuse


def _do_nothing(self: ShardedModule, *args: Any, **kwargs: Any) -> None:
    """Does nothing: it tunes FSDP2's execution, which a schedule replaces."""


for _name in _IGNORED.split():
    setattr(ShardedModule, _name, _do_nothing)
for _name, _remedy in _UNSUPPORTED.items():
    setattr(ShardedModule, _name, _unsupported(_name, _remedy))


_sharded_classes: dict[type, type] = {}  # by original class


def sharded_class(original: type) -> type:
    """Returns the class that a module of class `original` gets: a subclass of it and of `ShardedModule`. Cached."""
    if original not in _sharded_classes:
        members = {"forward": linear_forward} if original.forward is nn.Linear.forward else {}  # type: ignore[attr-defined]
        _sharded_classes[original] = type(f"Sharded{original.__name__}", (ShardedModule, original), members)
    return _sharded_classes[original]


def original_class(module_class: type) -> type:
    """Returns the class that a module had before `sw.fully_shard`."""
    if not issubclass(module_class, ShardedModule):
        return module_class
    return module_class.__mro__[module_class.__mro__.index(FSDPModule) + 1]


def finalize_backward(runner: Runner) -> None:
    """Reduces the accumulated gradients of units that reduce now. Releases weights that need not stay gathered."""
    with torch.no_grad():
        runner.reductions.end_backward("finalize_backward")
        for unit in runner.units:
            unit.finish_copies()
            if unit.is_resident and not unit.is_open and not unit.is_held:
                unit.release()


def _on_stream(hook: Callable[[torch.Tensor], None], stream: torch.Stream) -> Callable[[torch.Tensor], None]:
    """Returns a function that runs a gradient hook on `stream`, ordered after and before the current stream."""

    def run(gradient: torch.Tensor) -> None:
        current = torch.accelerator.current_stream(gradient.device)
        stream.wait_stream(current)
        with stream:
            hook(gradient)
        current.wait_stream(stream)

    return run


def _unit_of(module: Any) -> Unit:
    """Returns the unit of a module, after it has aborted a step that has failed (`Runner.abort_if_failed`)."""
    state = getattr(module, ATTRIBUTE)
    if state.runner is not None:
        state.runner.abort_if_failed()
    return state.unit


def _modules_of(module: Any, recurse: bool) -> Iterator[nn.Module]:
    """Yields the modules under `sw.fully_shard`: the module itself and, with `recurse`, those in it."""
    for each in module.modules() if recurse else [module]:
        if isinstance(each, ShardedModule):
            yield each


def _unit_options_of(module: Any, recurse: bool) -> Iterator[UnitOptions]:
    """Yields the options of a module's unit and, with `recurse`, those of the units in it."""
    for each in _modules_of(module, recurse):
        yield _unit_of(each).unit_options


def _check_flag(argument: str, value: Any) -> None:
    """Raises ValueError unless the value is a bool."""
    if not isinstance(value, bool):
        raise argument_error(argument, "True or False", repr(value))


def _unit_references(method: str, modules: Any) -> list[Any]:
    """Returns weak references to the units of modules. Raises ValueError if one is not under `sw.fully_shard`."""
    found = []
    for module in modules:
        if not isinstance(module, ShardedModule):
            raise argument_error(f"modules of {method}", "under sw.fully_shard", f"a {type(module).__name__}")
        found.append(weakref.ref(_unit_of(module)))
    return found

"""Units: groups of weights that are gathered together, like FSDP2's parameter groups.

Terms of this file and of its users:

    open                  a forward or a backward of one of the unit's modules runs
    resident              the gathered weights have memory; a gather may still be in progress
    arena                 the buffer of the model's Runner in which the schedule gives gathered weights addresses
    held                  gathered outside the arena, and not released when a step ends
    stale                 gathered before the latest write to the parameters
    refresh               the move from the parameters to the shards that gathers read, if those have another layout
    kept copy             a copy in layout `keep` (layouts.py) that a release leaves, for the next gather of the step
    accumulated gradient  full gradient of backwards that do not reduce; a later backward reduces it
    in chunks             gathered chunk by chunk during matmuls, not before the use (chunks.py)
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .._native import _runtime
from . import offload, packing
from .gather import set_scales
from .gradients import Reduction
from .moves import Version, versions_differ
from .packing import DeferredWork, MoveBatch, aligned, empty_bytes
from .unit_options import UnitOptions
from .weights import DtypesOf, Weight


def options_key(units: Sequence[Unit]) -> Hashable:
    """Returns a key of the options and flags that a schedule depends on, and that users may change between steps."""

    def of(unit: Unit) -> Hashable:
        values = (tuple(each) if isinstance(each, list) else each for each in vars(unit.unit_options).values())
        return (*values, *(weight.sharded.requires_grad for weight in unit.weights))

    return tuple(map(of, units))


_numbers = itertools.count(1)  # numbers of units, in the order of `sw.fully_shard`


class Unit:
    """The weights of one call of `sw.fully_shard`, which are gathered together."""

    def __init__(
        self,
        name: str,
        modules: tuple[nn.Module, ...],
        weights: list[Weight],
        keep_gathered: bool,  # initial value of that option
        host_copies: offload.HostCopies | None = None,
    ) -> None:
        self.name = name
        self.number = next(_numbers)
        self.host_copies = host_copies  # copies between host and device; None without offload
        self._modules = [weakref.ref(module) for module in modules]
        self.weights = weights
        self.forwards: list[int] = []  # numbers of the forwards that are running, innermost last
        self.backwards: set[int] = set()  # numbers of forwards whose backward has begun and not ended
        self.last_replaced_forward = 0  # number of the last forward with gradients of former parameters; 0: none
        self.is_resident = False  # gathered, or being gathered
        self.is_in_graph = False  # the events of the running forward are operators in a compiled graph (graphs.py)
        self.is_called_by_compiled_code = False  # compiled code called the running forward, but its hooks are eager
        self.unit_options = UnitOptions(keep_gathered)
        # Backwards since the last reduction kept their gradients, on any rank. Equal on all ranks.
        self.has_accumulated_gradients = False
        # This unit's ChunkedUnit (chunks.py), else None: while some weights are gathered in chunks, and while modules
        # have the class that multiplies in chunks.
        self.chunked_gather: Any = None
        self.chunked_products: Any = None
        self._in_arena = False  # its gathered storage is in the shared arena; the next step overwrites it
        self.is_unsharded = False  # gathered by `unshard`, and not used since
        self._is_gathering = False  # a gather is in progress
        self.is_left_unsharded = False  # modules keep the unsharded parameters between a forward and its backward
        # Sharded parameters and their versions at the latest gather, and at the gather that the kept copy is from.
        self._gathered_from: list[Version] = []
        self._kept_from: list[Version] = []
        self.runner: weakref.ref[Any] | None = None  # the Runner of the model, once there is one
        self.ready_runner: Any = None  # function that returns the Runner, and makes it if there is none (api.py)
        for weight in weights:
            weight.unit = weakref.ref(self)
            weight.watch_gradients(functools.partial(_note_gradient, weakref.ref(self)))

    @property
    def modules(self) -> list[nn.Module]:
        """The modules that `sw.fully_shard` was called with."""
        return [module for reference in self._modules if (module := reference()) is not None]

    @property
    def device(self) -> torch.device:
        """The device on which weights are gathered."""
        return next((weight.memory.device for weight in self.weights), torch.device("cpu"))

    @property
    def is_open(self) -> bool:
        """True while a forward or a backward of one of its modules runs."""
        return bool(self.forwards or self.backwards)

    @property
    def is_held(self) -> bool:
        """True if the unit stays gathered between steps, in memory outside the arena."""
        return (self.is_unsharded or self.unit_options.keep_between_steps) and not self._in_arena

    @property
    def use_bytes(self) -> int:
        """Bytes that a gather takes, message buffers included, on the rank with the largest shards."""
        return use_bytes(self.weights)

    @property
    def sharded_bytes(self) -> int:
        """Bytes of the shards that this rank has at all times."""
        return sum(weight.sharded_bytes for weight in self.weights)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the full gradients of one backward, and of their copies for messages."""
        return gradient_bytes(self.weights)

    @property
    def accumulated_gradient_bytes(self) -> int:
        """Bytes of the accumulated gradients of all weights that require gradients."""
        return sum(weight.accumulated_gradient_bytes for weight in self.weights if weight.sharded.requires_grad)

    @property
    def keep_bytes(self) -> int:
        """Bytes that stay allocated from the first use of a step to the last: gathered weights, or kept copies."""
        if self.unit_options.keep_gathered:
            return self.use_bytes
        return sum(aligned(weight.kept_bytes) for weight in self.weights)

    @property
    def description(self) -> str:
        """A text of all properties that decide the unit's messages, to compare ranks."""
        prefix = "stays gathered after forwards; " if self.unit_options.keep_gathered else ""
        return prefix + "; ".join(weight.description for weight in self.weights)

    @property
    def gather_ps(self) -> int:
        """The predicted time of a gather, in picoseconds."""
        return gather_cost(self.weights).ps

    @property
    def reduce_ps(self) -> int:
        """The predicted time to reduce all gradients of the unit, in picoseconds."""
        return reduce_cost(self.weights).ps

    def start_gather(self, memory: torch.Tensor) -> None:
        """Starts to gather into `memory`: from the kept copy if it is up to date, otherwise from the shards."""
        if self.runner is not None and (runner := self.runner()) is not None:
            runner.note_gather(self)
        self.start_refresh()
        self.is_resident = self._in_arena = self._is_gathering = True
        versions = self.versions
        from_kept = bool(self._kept_from) and not versions_differ(self._kept_from, versions)
        self._gathered_from = versions
        scaled = (weight for weight in self.weights if weight.gather.format.needs_amax)
        set_scales(weight.scale_request for weight in scaled if weight.gather.needs_scale(weight.source))
        offset_bytes, batch = 0, MoveBatch()
        with contextlib.nullcontext() if self.host_copies is None else self.host_copies.on_h2d_stream():
            for weight in self.weights:
                if self.chunked_gather is not None and self.chunked_gather.has(weight):
                    continue  # gathered in chunks during the use
                weight.start_gather(memory, offset_bytes, from_kept, batch.adder(weight.moves))
                offset_bytes += weight.gathered_bytes
            batch.start(memory[offset_bytes:])

    def start_gather_alone(self) -> None:
        """Starts to gather into newly allocated memory, outside the arena."""
        self.start_gather(empty_bytes(self.use_bytes, self.device))
        self._in_arena = False
        if self.unit_options.keep_between_steps:
            self.record_fingerprints()

    def start_scheduled_gather(self, memory: torch.Tensor) -> None:
        """Starts to gather into `memory` of the arena, or outside of it if the unit stays gathered between steps."""
        if self.unit_options.keep_between_steps:
            self.start_gather_alone()
        else:
            self.start_gather(memory)

    def save_kept_copy(self, memory: torch.Tensor, offset_bytes: int) -> None:
        """Copies the parts of gathered weights that a release keeps to `memory`, unless the kept copy is up to date."""
        if versions_differ(self._kept_from, self._gathered_from):
            for weight in self.weights:
                weight.save_kept_copy(memory, offset_bytes)
                offset_bytes += aligned(weight.kept_bytes)
            self._kept_from = self._gathered_from

    def drop_kept(self) -> None:
        """Frees the kept copies; the next gather reads the shards."""
        for weight in self.weights:
            weight.drop_kept()
        self._kept_from = []

    def start_refresh(self) -> None:
        """Starts to refresh the shards that gathers read, if parameters have another layout and were written."""
        for weight in self.weights:
            weight.start_refresh()

    def end_step(self) -> None:
        """Waits for refreshes and for copies between host and device, and frees the kept copies."""
        for weight in self.weights:
            weight.finish_refresh()
        self.drop_kept()
        self.finish_copies()

    def finish_copies(self) -> None:
        """Blocks the host until gradients are in host memory and parameters in host memory may be written."""
        if self.host_copies is not None:
            for weight in self.weights:
                weight.finish_gradients()
            self.host_copies.make_host_wait()

    def finish_gather(self) -> None:
        """Waits for the gather, if one is in progress."""
        if not self._is_gathering:
            return
        if self.host_copies is not None:
            self.host_copies.make_stream_wait()
        for weight in self.weights:
            weight.finish_gather()
        self._is_gathering = False

    @property
    def is_stale(self) -> bool:
        """True if a parameter was written or replaced after it was gathered."""
        return versions_differ(self._gathered_from, self.versions)

    @property
    def is_forgotten(self) -> bool:
        """True if gathered weights are stale by `forget_copies`, which all ranks call for the same units."""
        return bool(self.weights) and not self._gathered_from

    @property
    def versions(self) -> list[Version]:
        """The current sharded parameters and their versions."""
        return [(weight.sharded, weight.version) for weight in self.weights]

    def adopt_changes(self, is_trained: bool = True) -> None:
        """Adopts parameters that users have replaced, frozen or unfrozen between uses. `is_trained`: for gradients."""
        for weight in self.weights:
            weight.adopt_changes(is_trained)
        replaced = [weight.note_trained() for weight in self.weights if is_trained]
        if any(replaced) and self.runner is not None and (runner := self.runner()) is not None:
            self.last_replaced_forward = runner.num_forwards - len(self.forwards)  # without the forward that begins

    def adopt_for_backward(self) -> None:
        """Adopts the parameters of the latest forward with gradients, and whether they are frozen now."""
        for weight in self.weights:
            weight.adopt_for_backward()

    def end_backward(self) -> None:
        """Ends a backward: undoes changes that were made for it alone, and waits for copies to the host."""
        for weight in self.weights:
            weight.restore_requires_grad()
        self.finish_copies()

    @property
    def is_converted(self) -> bool:
        """True if parameters have other dtypes or device types than the unit was set up for."""
        return any(weight.is_converted for weight in self.weights)

    @property
    def can_convert(self) -> bool:
        """True if all parameters are on a device from which they can be gathered, or on meta."""
        return all(weight.is_gatherable for weight in self.weights)

    def convert(self, dtypes_of: DtypesOf) -> None:
        """Sets up again the weights whose parameters have another dtype or device. Must be called between steps."""
        changed = [weight for weight in self.weights if weight.is_converted or weight.has_other_extension]
        if changed:
            self.to_sharded()
            if self.is_resident:
                self.release()
            self.drop_kept()
        for weight in changed:
            weight.convert(dtypes_of)

    def watch_again(self) -> None:
        """Detects writes again after `nn.Module._apply`, which drops attributes of parameters and may write them."""
        for weight in self.weights:
            weight.watch_again()

    def release(self) -> None:
        """Frees the gathered weights. Modules that were left with unsharded parameters get their sharded ones."""
        if self.is_left_unsharded:
            self.to_sharded()
        self.finish_gather()
        for weight in self.weights:
            weight.release()
        self.is_resident = False
        self._end_chunked_products()
        self.set_chunked_gather(None)

    def set_chunked_gather(self, chunked_unit: Any) -> None:
        """Makes gathers leave out the weights of a ChunkedUnit, which are gathered in chunks. None: no weights."""
        if self.chunked_gather is not None:
            self.chunked_gather.set_absent(False)
        self.chunked_gather = chunked_unit
        if chunked_unit is not None:
            chunked_unit.set_absent(True)

    def _end_chunked_products(self) -> None:
        """Gives modules that multiply in chunks their former class back."""
        if self.chunked_products is not None:
            self.chunked_products.end()
            self.chunked_products = None

    def to_unsharded(self, products: Any = None) -> None:
        """Gives the modules unsharded parameters; those in `products` (a ChunkedUnit) are multiplied in chunks."""
        self.is_left_unsharded = False  # a release within a forward or backward must not give it sharded parameters
        if products is not self.chunked_products:
            self._end_chunked_products()
        for weight in self.weights:
            if products is None or not products.has(weight):
                weight.to_unsharded()
        if products is not None:
            self.chunked_products = products
            products.begin()

    def to_sharded(self) -> None:
        """Gives the modules their sharded parameters. Parameters that users have replaced stay."""
        self._end_chunked_products()
        self.is_left_unsharded = False
        for weight in self.weights:
            weight.to_sharded(self.is_in_graph)

    def to_sharded_after_forward(self) -> None:
        """Gives the modules their sharded parameters, unless the unit stays gathered until its backward."""
        # Modules that compute in chunks or in a graph do not have the unsharded parameters.
        is_chunked = self.chunked_gather is not None or self.chunked_products is not None
        stays = self.unit_options.keep_gathered and not self.is_in_graph and not is_chunked
        if stays and torch.is_grad_enabled() and not is_in_backward():
            self.is_left_unsharded = True
        else:
            self.to_sharded()

    def read(self, forward: int) -> None:
        """Gathers the weights, if they are not gathered, for a backward that reads weights saved by this forward.

        Raises:
            RuntimeError: outside of a backward, or in a backward with create_graph=True.
        """
        if self.is_open:
            return
        if not is_in_backward():
            if self.is_resident:
                return
            raise RuntimeError(f"saved weights of {self.name} must be read in a backward, got a read outside of it")
        check_no_create_graph(self.name)
        self.ready_runner().begin_backward(self, forward)

    def fail_backward(self, error: RuntimeError) -> None:
        """Makes the running backward raise an error at its end, on all ranks. Outside of a backward, raises it now."""
        if not is_in_backward():
            raise error
        self.ready_runner().fail_backward(error)

    def start_reduction(self, weights: Iterable[Weight], drops_result: bool = False) -> Reduction | None:
        """Starts to reduce the gradients of these weights. A weight without a gradient contributes zeros.

        All ranks pass the same weights. Returns None if there is nothing to wait for.
        """
        reduction = Reduction([])
        batch = MoveBatch()
        unit_options = self.unit_options
        for weight in weights:
            arguments = unit_options.reduces_over_replicas, unit_options.divides_by, batch.adder(weight.moves)
            for pending in weight.start_reduction(*arguments, drops_result):
                reduction.in_flight.append((unit_options.hooked(weight.receiver_of(pending)), pending))
        batch.start()
        for _, pending in reduction.in_flight:
            if isinstance(pending.work, DeferredWork) and pending.work.is_shared:
                pending.sent = None
        return reduction if reduction.in_flight else None

    def accumulate_gradients(self) -> None:
        """Adds the gradients from autograd to the accumulated gradients."""
        self.has_accumulated_gradients = True
        for weight in self.weights:
            weight.accumulate_gradient()

    def drop_gradients(self) -> None:
        """Discards all gradients that are not yet added to the sharded parameters' gradients."""
        self.has_accumulated_gradients = False
        for weight in self.weights:
            weight.drop_gradient()

    @property
    def has_copies(self) -> bool:
        """True if a write to parameters would make gathered weights or held shards stale. Equal on all ranks."""
        return bool(self.weights) and (self.is_resident or any(w.store is not w.shards for w in self.weights))

    @property
    def is_prepared(self) -> bool:
        """True if a gather starts no other transfers before. False after a write. Equal on ranks that write equally."""
        return all(weight.is_prepared for weight in self.weights)

    def record_fingerprints(self) -> None:
        """Records fingerprints of the parameters that were just gathered, for `was_written`."""
        for weight in self.weights:
            weight.record_fingerprint()

    def was_written(self) -> bool:
        """Returns true if parameters on this rank were written since copies of them were made."""
        return (self.is_resident and self.is_stale) or any(weight.was_written for weight in self.weights)

    def forget_copies(self) -> None:
        """Marks gathered weights and held shards as stale, so that the next use gathers again."""
        self._gathered_from = []
        for weight in self.weights:
            weight.mark_prepared(False)


def gather_cost(weights: Sequence[Weight]) -> packing.Cost:
    """Returns the predicted cost to gather weights of a unit together, from their shards."""
    return packing.cost_of([each for weight in weights for each in weight.gathers])


def reduce_cost(weights: Sequence[Weight]) -> packing.Cost:
    """Returns the predicted cost to reduce the gradients of weights of a unit together."""
    return packing.cost_of([each for weight in weights if weight.sharded.requires_grad for each in weight.reductions])


def use_bytes(weights: Sequence[Weight]) -> int:
    """Returns the bytes that a gather of weights of a unit takes in the arena."""
    packed = gather_cost(weights).received_bytes
    if any(weight.kept is not None for weight in weights):
        from_kept = packing.cost_of([each for weight in weights for each in weight.gathers_from_kept])
        packed = max(packed, from_kept.received_bytes)
    return sum(weight.gathered_bytes for weight in weights) + packed


def gradient_bytes(weights: Sequence[Weight]) -> int:
    """Returns the bytes of full gradients of weights of a unit, and of their copies for messages."""
    cost = reduce_cost(weights)
    full = sum(weight.gradient_bytes for weight in weights if weight.sharded.requires_grad)
    return full + cost.sent_bytes + cost.received_bytes


def _note_gradient(unit: weakref.ref[Unit], _: torch.Tensor) -> None:
    """Hook: autograd has added to the gradient of an unsharded parameter."""
    if (found := unit()) is not None:
        check_no_create_graph(found.name)
        found.ready_runner().note_gradient(found)


def check_no_create_graph(name: str) -> None:
    """Raises RuntimeError in a backward that records a graph."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"create_graph must be False in a backward of {name}, got True. The second backward would need weights "
            "that sw.fully_shard has released by then"
        )


def is_in_backward() -> bool:
    """Returns true if autograd runs a backward on this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


def forget_written_copies(units: Sequence[Unit], largest: Callable[[dict[DeviceMesh, bytes]], Any]) -> None:
    """Marks copies of a unit's parameters as stale if any rank has written the parameters since the copies were made.

    Versions do not show all writes, such as writes to tensors of a state dict, so fingerprints are compared too.
    `largest`: returns the maximum of each byte over the ranks of a mesh. Called, for all meshes, if a unit has copies.
    """
    on_meshes = by_mesh([unit for unit in units if unit.has_copies])
    device = units[0].device
    if not on_meshes or (device.type != "cpu" and _runtime.is_capturing(device.type)):
        return  # a capture can compare versions only
    flags = {mesh: bytes(unit.was_written() for unit in on_mesh) for mesh, on_mesh in on_meshes.items()}
    for mesh, was_written in largest(flags).items():
        for unit, is_written in zip(on_meshes.get(mesh, ()), was_written):
            if is_written:
                unit.forget_copies()


def by_mesh(units: Sequence[Unit]) -> dict[DeviceMesh, list[Unit]]:
    """Returns the units of each mesh. A unit whose weights are on several meshes is listed for each."""
    found: dict[DeviceMesh, list[Unit]] = {}
    for unit in units:
        for mesh in dict.fromkeys(weight.mesh for weight in unit.weights):
            found.setdefault(mesh, []).append(unit)
    return found

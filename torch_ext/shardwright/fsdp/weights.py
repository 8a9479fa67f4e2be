"""Weights: parameters that are sharded between uses and gathered in use.

part           this rank's shard of the parameter that the module has between uses (layout `store` of layouts.py)
held shard     a separate shard in layout `shards`, if `store` is another layout; gathers read it, not the part
kept copy      a shard in layout `keep`, copied from the full weight before a release; later gathers may read it
product        a matmul that reads the received messages, so that they need not be decoded (float8_products.py)
scales         a buffer of a product, for scales in the order that the matmul reads
owner          a module that has the parameter
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import nn

from .._native import _runtime
from ..layouts.layout import Layout
from ..runtime import executables, plain_tensors
from ..transfers.current import owners as tensor_owners
from . import extensions, moves, offload
from .formats import Dtypes, with_dtype
from .gather import Move, ScaleRequest, WeightGather
from .gradients import GradientMixin, Gradients
from .layouts import Layouts, empty, has_arithmetic, local_of, most_bytes
from .moves import Moves, Version, versions_differ
from .packing import Pair, aligned
from .registrations import Registrations


class Product(Protocol):
    """A matmul by the received messages of a weight, in the module that has the weight."""

    padding_bytes: int  # padding after each received tensor
    scales_bytes: int  # size of `Weight.scales`; 0: none

    def prepare(self, weight: Weight) -> None: ...  # prepares received messages for matmuls
    def begin(self, weight: Weight) -> None: ...  # makes the module multiply by received messages
    def end(self, weight: Weight) -> None: ...  # undoes `begin`


# Weights by the addresses of the StorageImpls of their full weights, which do not change between gathers.
by_storage: weakref.WeakValueDictionary[int, Weight] = weakref.WeakValueDictionary()

# A function of a parameter's name, the parameter, its owners and its layouts. It returns its dtypes and its product.
DtypesOf: TypeAlias = Callable[
    [str, nn.Parameter, "Sequence[tuple[nn.Module, str]]", Layouts], "tuple[Dtypes, Product | None]"
]


class Weight(GradientMixin):
    """A parameter: `sharded`, the DTensor that modules have between uses, and `unsharded`, which they have in use.

    `unsharded` is the same tensor for the weight's life, because autograd keeps it and views of it from forward to
    backward. It has memory only while the weight is gathered, or always if the held shard is the full weight
    (`is_replicated`, as in ZeRO-1). `memory` is its local tensor.
    """

    def __init__(
        self,
        name: str,
        given: nn.Parameter,  # the parameter to shard, full on each rank or a DTensor
        owners: Sequence[tuple[nn.Module, str]],  # modules that have the parameter, and its name in each
        layouts: Layouts,
        dtypes: Dtypes,
        host_copies: offload.HostCopies | None = None,  # None: the part stays on the device
        product: Product | None = None,
    ) -> None:
        self.name = name
        self._read_error = (
            f"{name}: a weight under sw.fully_shard was read after it was released; use it in a forward of its module, "
            "keep it gathered (module.unshard(), reshard_after_forward=False), or save it for a backward by "
            "ctx.save_for_backward"
        )
        self.registrations = Registrations(owners)
        self._host_copies = host_copies
        super().__init__(host_copies)
        self._is_read = False  # a module has read it other than by `product`, so each gather decodes it
        self.scales: torch.Tensor | None = None  # buffer of `product` (bytes), until `release`
        self.unit: weakref.ref[Any] | None = None  # the Unit that gathers it
        moves.mark_full(given, name)
        data = given.detach()
        self._device = _device_of(data, layouts, host_copies)
        local = local_of(data) if data.is_meta else local_of(data).to(self._device)
        part = _shard_of(local, layouts, layouts.store)
        self.sharded = nn.Parameter(layouts.as_parameter(part, host_copies), requires_grad=given.requires_grad)
        moves.watch(self.sharded)
        held = None if layouts.store is layouts.shards else _shard_of(local, layouts, layouts.shards)
        self._set_up(layouts, dtypes, product, held)
        self._trained = self.sharded  # the parameter of the latest forward with gradients
        self.registrations.set(self.sharded)
        tensor_owners.add(self)

    def _set_up(self, layouts: Layouts, dtypes: Dtypes, product: Product | None, held: torch.Tensor | None) -> None:
        """Prepares gathers and reductions for the parameter's current dtype and device. `held`: the held shard."""
        self.layouts, self.mesh = layouts, layouts.mesh
        self.store, self.shards, self.use = layouts.store, layouts.shards, layouts.use
        self.moves = Moves(layouts)
        self._part_device_type, self._dtype = self.part.device.type, self.part.dtype
        device = self.part.device if self.part.is_meta else self._device
        self.gather = WeightGather(dtypes.gathers, dtypes.use, self.shards, self.moves, device)
        self.gradients = Gradients(dtypes, layouts, self.moves)
        self.is_replicated = (
            self.store is not self.shards and self.shards == self.use and dtypes.is_shard_dtype(self._dtype)
        )
        self._held_shard = held
        self._held_version: Version | None = (self.sharded, self.version)
        self._fingerprint: int | None = None  # fingerprint of the part when copies of it were made
        self._refresh: dist.Work | None = None  # the move from the part to the held shard, in progress
        self._refreshed_from: torch.Tensor | None = None  # the device copy of the part that the refresh reads
        self.extension: extensions.Extension | None = None
        if extensions.has_extension(self.local_part):
            where = self.owners[0][0], layouts, self.moves, device
            self.extension = extensions.Extension(self.name, *where, dtypes, self._read_error)
            full = self.memory = torch.empty(0, dtype=dtypes.use, device=device)  # until the first gather
        else:
            full = layouts.as_used(
                held if self.is_replicated and held is not None else empty(self.use, dtypes.use, device)
            )
            self.memory = local_of(full.detach())
        self._set_full(full)
        self.product = product  # if given, `memory` has storage only after `read`
        # With offload, gathers read a staging buffer, to which the part is copied.
        self._is_staged = self._host_copies is not None and held is None and self.extension is None
        self._set_sizes(dtypes)
        self.sharded_bytes = self.part.nbytes + (0 if held is None else held.nbytes)
        self.kept: torch.Tensor | None = None
        self._kept_pair: tuple[Layout, Layout] | None = None  # layouts of `kept` and of the weight gathered from it
        if layouts.kept is not None:
            self._kept_pair = with_dtype(layouts.kept[0], dtypes.use), with_dtype(layouts.kept[1], dtypes.use)
        if layouts.kept is not None and not self.is_replicated:
            self.kept = empty(layouts.kept[0], dtypes.use, device)
        self.kept_bytes = 0 if self.kept is None or self._kept_pair is None else most_bytes(self._kept_pair[0])
        self._set_pairs(dtypes)
        self.drop_kept()
        self.release()
        if self._held_shard is not None:
            self.record_fingerprint()

    def _set_pairs(self, dtypes: Dtypes) -> None:
        """Sets the source and target layouts of gathers and reductions, from which their cost is predicted."""
        # The moves of a gather from the shards, and of a gather from the kept copy, if there is one.
        self._pairs = [] if self.is_replicated else self.gather.pairs(self.use)
        self.gathers = [(self.moves, pair) for pair in self._pairs]
        copies: list[Pair] = [] if self.kept is None or self._kept_pair is None else [self._kept_pair]
        self.gathers_from_kept = [(self.moves, pair) for pair in copies] or self.gathers
        self.reductions: list[tuple[Moves, Pair]] = []  # of a gradient with the placements of the weight in use
        if self.sharded.requires_grad or has_arithmetic(self._dtype):  # frozen weights may be integers or float8
            gradient = with_dtype(self.layouts.usual_gradient, dtypes.gradients)
            self.reductions.append((self.moves, (gradient, with_dtype(self.store, dtypes.gradients))))

    def _set_full(self, full: torch.Tensor) -> None:
        """Makes a tensor in layout `use` the parameter `unsharded`, and watches its gradients."""
        self.unsharded = nn.Parameter(full, self.sharded.requires_grad)
        moves.mark_full(self.unsharded, self.name)
        self.storages = extensions.storages_by_address(full, self.extension)
        by_storage.update(dict.fromkeys(self.storages, self))
        self._watch()

    @property
    def has_other_extension(self) -> bool:
        """True if the shard has gained or lost the methods of the extension protocol since it was set up."""
        return extensions.has_extension(self.local_part) != (self.extension is not None)

    @property
    def _current_local_tensor(self) -> torch.Tensor | None:
        """The local tensor of the sharded parameter that the module has now; None if that is no DTensor."""
        found = self.registrations.first
        return getattr(self.sharded if found is self.unsharded else found, "_local_tensor", None)

    @property
    def is_converted(self) -> bool:
        """True if the module's parameter has another dtype or device type than this weight is set up for."""
        part = self._current_local_tensor
        return part is not None and (part.dtype != self._dtype or part.device.type != self._part_device_type)

    @property
    def is_gatherable(self) -> bool:
        """True if the module's parameter is on a device from which it can be gathered, or on meta."""
        part = self._current_local_tensor
        return part is None or part.device.type in (self._shard_device_type, "meta")

    @property
    def _shard_device_type(self) -> str:
        """The device type of shards: the host's with offload."""
        return "cpu" if self._host_copies is not None else self._device.type

    def convert(self, dtypes_of: DtypesOf) -> None:
        """Adopts the current dtype and device of the module's parameter. Must be called between steps."""
        self._adopt_parameter()
        self.note_trained()
        if self.product is not None:
            self.product.end(self)
        layouts = self.layouts if self.part.dtype == self._dtype else self.layouts.with_dtype(self.part.dtype)
        dtypes, product = dtypes_of(self.name, self.sharded, self.owners, layouts)
        device = self.part.device if self.part.is_meta else self._device
        held = None if layouts.store is layouts.shards else empty(layouts.shards, self.part.dtype, device)
        self._set_up(layouts, dtypes, product, held)
        self.mark_prepared(False)

    def _set_sizes(self, dtypes: Dtypes) -> None:
        """Sets sizes in bytes: those of the rank with the largest shard, so that all ranks make the same schedule."""
        in_use = with_dtype(self.use, dtypes.use)
        numel = most_bytes(in_use) // dtypes.use.itemsize
        self.gradient_bytes = numel * self.gradients.bytes_per_element  # a full gradient and its copy for messages
        self.accumulated_gradient_bytes = numel * dtypes.reduce.itemsize  # in reduce_dtype
        padding = 0 if self.product is None else self.product.padding_bytes
        # A weight that is replicated, multiplied as received, or made by an extension needs no memory of its own.
        has_none = self.is_replicated or self.product is not None or self.extension is not None
        self.full_bytes = 0 if has_none else most_bytes(in_use)
        buffers = [] if self.is_replicated or self.extension is not None else self.gather.buffers(self.use)
        self._buffer_bytes = [most_bytes(layout) + padding for layout in buffers]
        if self.product is not None and self.product.scales_bytes > 0:
            self._buffer_bytes.append(self.product.scales_bytes)
        self._buffer_bytes += [most_bytes(self.shards)] * self._is_staged
        self.gathered_bytes = sum(map(aligned, (self.full_bytes, *self._buffer_bytes)))  # arena bytes of a gather

    @property
    def owners(self) -> list[tuple[nn.Module, str]]:
        """The modules that have the parameter, and its name in each."""
        return self.registrations.owners

    @property
    def current(self) -> nn.Parameter:
        """The sharded parameter that modules have now. Users may have replaced it since the last step."""
        found: nn.Parameter | None = self.registrations.first
        return self.sharded if found is None or found is self.unsharded else found

    @property
    def part(self) -> torch.Tensor:
        """This rank's shard of the parameter, without autograd."""
        return self.local_part.detach()

    @property
    def local_part(self) -> torch.Tensor:
        """This rank's shard of the parameter: the tensor itself, with methods that users have set on it."""
        return self.sharded._local_tensor  # type: ignore[attr-defined]

    @property
    def version(self) -> tuple[int, ...]:
        """A value that changes with each write to the parameter."""
        return moves.version_of(self.sharded)

    @property
    def source(self) -> tuple[int, tuple[int, ...]]:
        """A value that changes with each write to the parameter, and with each replacement."""
        return id(self.sharded), self.version

    @property
    def scale_request(self) -> ScaleRequest:
        """This weight as an item of `set_scales`."""
        self.finish_refresh()
        return ScaleRequest(self.gather, self._gather_source, self.source)

    @property
    def _gather_source(self) -> torch.Tensor:
        """The shard that gathers read, before a copy from the host."""
        return self.part if self._held_shard is None else self._held_shard

    def to_unsharded(self) -> None:
        """Gives the owners the unsharded parameter; with a product, also the class that multiplies by messages."""
        self.registrations.set_unsharded(self.unsharded, self.sharded)
        if self.product is not None:
            self.product.begin(self)

    def to_sharded(self, is_in_graph: bool) -> None:
        """Gives the owners the sharded parameter, or the one that users have replaced it by.

        `is_in_graph`: see `Registrations.set_sharded`.
        """
        if self.product is not None:
            self.product.end(self)
        self.adopt_requires_grad()
        self.registrations.set_sharded(self.unsharded, self.sharded, is_in_graph)

    def note_trained(self) -> bool:
        """Notes that a forward with gradients uses the parameter. Returns true if the previous one used another."""
        former, self._trained = self._trained, self.sharded
        return former is not self.sharded

    def adopt_for_backward(self) -> None:
        """Adopts the parameter of the latest forward with gradients, and whether it is frozen now."""
        self.sharded = self._trained
        self.match_requires_grad(until_end=True)

    def adopt_changes(self, is_trained: bool = True) -> None:
        """Adopts a parameter that users have replaced or frozen. Raises RuntimeError if it cannot be gathered, or, with
        `is_trained`, cannot get a gradient."""
        self._adopt_parameter(is_trained)
        part = self.local_part
        if part.dtype != self._dtype or part.device.type != self._part_device_type:
            raise RuntimeError(
                f"{self.name} must stay {self._dtype} on {self._part_device_type} during a step, got {part.dtype} on "
                f"{part.device}. Convert parameters between steps; in compiled models call to() of a module under "
                "sw.fully_shard"
            )
        self.match_requires_grad()

    def _adopt_parameter(self, is_trained: bool = False) -> None:
        """Adopts the module's current parameter as `sharded`. Raises RuntimeError if its layout or device differs."""
        found = self.registrations.first
        if found is self.unsharded:  # a forward without gradients may have adopted another parameter meanwhile
            found = self.sharded = self._trained
        self.registrations.check(self.name, found, self.unsharded, self.sharded, is_trained)
        if found is not self.sharded:
            if self.has_gradient:
                before = "Before that, run a backward that reduces gradients, or call finalize_backward()"
                raise RuntimeError(f"{self.name} was replaced while its gradient waits for a reduction. {before}")
            self.sharded = found
            self.registrations.set(found)
            self.watch_again(is_written=not moves.is_watched(found))  # a former parameter that returns was not written
        part = self.local_part
        if part.device.type not in (self._shard_device_type, "meta"):
            raise RuntimeError(
                f"{self.name} must stay on {self._shard_device_type}"
                + (" with offload_policy" if self._host_copies is not None else "")
                + f" after sw.fully_shard, got {part.device}"
            )

    def record_fingerprint(self) -> None:
        """Records a fingerprint of the part for `was_written`. Not in a capture, where the host cannot wait."""
        is_captured = self._part_device_type not in ("cpu", "meta") and _runtime.is_capturing(self._part_device_type)
        is_readable = self.extension is None and not self.part.is_meta and not is_captured
        self._fingerprint = _runtime.fingerprint_of(self.part) if is_readable else None

    @property
    def was_written(self) -> bool:
        """True if the parameter was written since copies of it were made: its version or fingerprint has changed."""
        if self._needs_refresh:
            return True
        return self._fingerprint is not None and self._fingerprint != _runtime.fingerprint_of(self.part)

    @property
    def _needs_refresh(self) -> bool:
        old = self._held_version
        return self._held_shard is not None and (old is None or versions_differ([old], [(self.sharded, self.version)]))

    @property
    def is_prepared(self) -> bool:
        """True if a gather starts no other transfers before: for the held shard, or for the scale of its messages."""
        return not (self._needs_refresh or (self.gather.format.needs_amax and self.gather.needs_scale(self.source)))

    def mark_prepared(self, is_prepared: bool) -> None:
        """Marks the held shard and the scale as those of the current parameter, or as stale."""
        self._held_version = (self.sharded, self.version) if is_prepared else None
        self.gather.scale_source = self.source if is_prepared else None

    def watch_again(self, is_written: bool = True) -> None:
        """Detects writes after a replacement, which counts as a write if `is_written`. With offload, pins memory."""
        if is_written:
            moves.watch(self.sharded)
        if self._host_copies is not None and self.part.device.type == "cpu":
            self.sharded._local_tensor = self._host_copies.to_host_memory(self.part)  # type: ignore[attr-defined]

    @property
    def description(self) -> str:
        """A text of all properties that decide the messages of this weight, to compare ranks."""
        kept = self.layouts.kept
        layouts = {"store": self.store, "shards": self.shards, "use": self.use, "keep": kept and kept[0]}
        placed = ", ".join(f"{name} {layout.placements}" for name, layout in layouts.items() if layout is not None)
        dtypes = self.gradients.dtypes
        weight, sent = type(dtypes.gathers).__name__, f"{dtypes.gathers.dtype}, {dtypes.gradients}"
        return (
            f"{self.name} of shape {tuple(self.shards.shape)} and dtype {self.shards.dtype}: {placed}; used as "
            f"{dtypes.use}, sent as {weight} of {sent}, summed in {dtypes.reduce}"
            + (", multiplied in its message format" if self.product is not None else "")
            + (", offloaded to the host" if self._host_copies is not None else "")
        )

    def start_refresh(self) -> None:
        """Starts to move the part to the held shard, if the parameter was written or replaced."""
        if self._held_shard is None or not self._needs_refresh:
            return
        self.finish_refresh()
        self._held_version = self.sharded, self.version
        self.record_fingerprint()
        if self._host_copies is None:
            self._refresh = self.moves(self.store, self.shards, self.part, self._held_shard.data)
            return
        with self._host_copies.on_h2d_stream():
            self._refreshed_from = self.part.to(self._host_copies.device, non_blocking=True)
            self._refresh = self.moves(self.store, self.shards, self._refreshed_from, self._held_shard.data)

    def finish_refresh(self) -> None:
        """Waits for the move to the held shard, if one is in progress."""
        if self._refreshed_from is not None and self._host_copies is not None:
            self._host_copies.make_stream_wait()
            self._refreshed_from = None
        if self._refresh is not None:
            self._refresh.wait()
            self._refresh = None

    def start_gather(self, memory: torch.Tensor, offset_bytes: int, from_kept: bool, move: Move | None = None) -> None:
        """Starts to gather, from the shards or from the kept copy, into memory that the caller keeps until `release`.

        `move` starts the moves; default: `moves`.
        """
        self.finish_refresh()
        if self.is_replicated:
            return
        if self.extension is not None:
            offsets = itertools.accumulate(map(aligned, self._buffer_bytes), initial=offset_bytes)
            self.extension.start(self.local_part, [(memory, offset) for _, offset in zip(self._buffer_bytes, offsets)])
            return
        if self.product is None:
            _runtime.view_arena(self.memory, memory, offset_bytes)
        # `.data` has its own version counter, so autograd does not see a gather as a change of saved tensors.
        if from_kept and self.kept is not None and self._kept_pair is not None:
            self.gather.start_from_copy(self._kept_pair, self.kept, self.memory.data, move or self.moves)
            return
        offset_bytes += aligned(self.full_bytes)
        buffers = []
        for size_bytes in self._buffer_bytes:
            buffers.append(memory[offset_bytes : offset_bytes + size_bytes])
            offset_bytes += aligned(size_bytes)
        part = self._gather_source
        if self._is_staged and self._host_copies is not None:
            part = self._host_copies.copy_to_device(self.part, buffers.pop())
        if self.product is not None and self.product.scales_bytes > 0:
            self.scales = buffers.pop()
        self.gather.start(self._pairs, part, self.memory.data, buffers, move or self.moves)

    def finish_gather(self) -> None:
        """Waits for the gather. With a product, messages are decoded to the full weight only once `read` was called."""
        if self.extension is not None:
            if (weight := self.extension.finish(self.unsharded)) is not None:
                self._set_full(self.layouts.as_used(weight))
                self._buffer_bytes = self.extension.output_bytes
                self.gathered_bytes = sum(map(aligned, self._buffer_bytes))
            return
        self.gather.finish(self.memory.data if self.product is None else None)
        if self.product is not None:
            self.product.prepare(self)
            if self._is_read:
                self._decode_received()

    def read(self) -> nn.Parameter:
        """Returns the unsharded parameter, for a read other than by `product`. Decodes this and all later gathers."""
        if not self._is_read:
            self._is_read = True
            self._decode_received()
        return self.unsharded

    def _decode_received(self) -> None:
        """Decodes the received messages to the full weight, in newly allocated memory."""
        if self.gather.undecoded is not None:
            with torch.no_grad():
                memory = torch.empty(self.memory.nbytes, dtype=torch.uint8, device=self.memory.device)
                _runtime.view_arena(self.memory, memory, 0)
                self.gather.format.decode(*self.gather.undecoded, self.memory.data)

    def save_kept_copy(self, memory: torch.Tensor, offset_bytes: int) -> None:
        """Makes the kept copy from the gathered weight, in memory that the caller keeps until `drop_kept`."""
        if self.kept is not None and self._kept_pair is not None:
            _runtime.view_arena(self.kept, memory, offset_bytes)
            layout, use = self._kept_pair
            executables.run(self.moves.executable(use, layout), self.memory, False, self.kept)

    def drop_kept(self) -> None:
        """Takes the memory of the kept copy away."""
        if self.kept is not None and not self.kept.is_meta:
            _runtime.release_memory(self.kept, self._read_error)

    def release(self) -> None:
        """Takes the memory of `unsharded` away. A read before the next gather raises an error."""
        self.gather.undecoded = self.scales = None
        if self.extension is not None:
            self.extension.release()
        if not self.is_replicated and not self.memory.is_meta:
            _runtime.release_memory(self.memory, self._read_error)


def _shard_of(local: torch.Tensor, layouts: Layouts, layout: Layout) -> torch.Tensor:
    """Returns this rank's shard in `layout`, without communication. `local` is in layout `use`.

    The shard is contiguous, and shares no memory with `local`.
    """
    if extensions.is_subclass(local) or extensions.has_extension(local):
        return extensions.shard(local, layouts)
    if local.is_meta:
        return empty(layout, local.dtype, local.device)
    part = plain_tensors.redistribute_part(local, layouts.use, layout, layouts.mesh, False, True)
    is_shared = part.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
    return part.clone(memory_format=torch.contiguous_format) if is_shared else part.contiguous()


def _device_of(data: torch.Tensor, layouts: Layouts, host_copies: offload.HostCopies | None) -> torch.device:
    """Returns the device on which a weight is gathered."""
    if host_copies is not None:
        return host_copies.device
    return offload.current_device(layouts.mesh.device_type) if data.is_meta else data.device

"""Moves many plain tensors together, without gradients: `redistribute_parts`, under `redistribute_many`."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd import forward_ad

from .._native import _planner, _runtime
from ..layouts import argument_values
from ..layouts.errors import argument_error
from ..planning.batches import BUCKET_BYTES, BUCKETS, Pair, batch_of, checked_layouts
from . import argument_checks, checking, counters, executables, groups, memory_spans, plain_tensors, plan_log
from .agreement import GroupWords, Statement

_ITEMS_TEXT = "a list of (local or None, src, dst)"


class ManyHandle:
    """A `redistribute_many` in flight. Every method may be called any number of times.

    On devices with streams, waiting makes the current stream wait; the host continues.
    """

    def __init__(self, pending: _runtime.BatchHandle | None, results: list[torch.Tensor], moving: list[int]) -> None:
        self._pending = pending
        self._results = results
        self._index_in_batch = {item: index for index, item in enumerate(moving)}

    def wait(self) -> list[torch.Tensor]:
        """Waits until all tensors have arrived, and returns them."""
        if self._pending is not None:
            self._pending.wait()
        return self._results

    def wait_for_sources(self) -> None:
        """Waits until the local tensors that were given may be written to."""
        if self._pending is not None:
            self._pending.wait_for_sources()

    def wait_for(self, item: int) -> torch.Tensor:
        """Waits for one tensor, given by its index in the list of items, and returns it."""
        item = argument_values.integer(item, "item")
        if not 0 <= item < len(self._results):
            raise argument_error("item", f"in [0, {len(self._results) - 1}]", item)
        result = self._results[item]
        if self._pending is not None and (index := self._index_in_batch.get(item)) is not None:
            self._pending.wait_for_destination(index)
        return result

    def is_done(self) -> bool:
        """Returns True if all tensors have arrived. Does not wait."""
        return self._pending is None or self._pending.is_done()


def redistribute_parts(
    items: Sequence[tuple[torch.Tensor | None, _planner.Layout, _planner.Layout]],
    *,
    bucket_bytes: int = BUCKET_BYTES,
    buckets: int = BUCKETS,
    out: Sequence[torch.Tensor | None] | None = None,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str | None = None,
    async_op: bool = False,
    tracked: Sequence[int] = (),
) -> list[torch.Tensor] | ManyHandle:
    """Does the work of `redistribute_many` for plain tensors, without gradients. Arguments are as there, except:

    Args:
        items: tensors must not require gradients if gradients are enabled.
        tracked: indices of the items whose results the caller makes require gradients, ascending. Ranks compare them.
    """
    groups.check_initialized()
    argument_checks.check_group_of_this_rank(group)
    call = _Call(items, out, bucket_bytes, buckets, group, device)
    call.tracked = tuple(tracked)
    # Ranks compare their arguments only if the key is not cached. So it is looked up even if arguments are invalid: the
    # other ranks, which may have cached it, would not take part in a comparison.
    key = call.key()
    batches = _batches_of(group)
    prepared = call.lookup(batches, key)
    if prepared is not None and not checking.is_on():
        call.check(prepared.dtypes)
        counters.counts.cache_hits += 1
    else:
        full = call.check_and_make_batch()
        if call.error is not None and not call.is_read and batches:
            # The other ranks may have cached their layouts, and so never compare. If this rank raises now and exits,
            # its connections close, and the other ranks stop waiting.
            raise call.error
        full = call.agreed_batch(full, group)
        prepared = _prepare(call, full, group)
        while len(batches) >= MAX_BATCHES:
            del batches[next(iter(batches))]
        batches[key] = prepared
    return _run(call, prepared, group, async_op)


class _Prepared(NamedTuple):
    """A planned batch, bound to a group, for all calls with the same layouts. Items are given by their index."""

    executable: _runtime.BoundBatch | None  # None if nothing moves
    moving: list[int]  # indices of the items in the batch
    reduced: dict[int, _planner.Layout]  # for each item with pending values: the layout to reduce it to first
    # Properties of each item. Reading them from the layouts in every call would take longer than moving tens of
    # thousands of small tensors.
    dtypes: list[torch.dtype]
    is_on_source: list[bool]  # True if this rank is on the source mesh
    shapes: list[tuple[int, ...]]  # the local shape of the result


# Batches that all ranks of a group have compared, by group. The number is bounded for each group alone, so that all its
# ranks drop the same batches, regardless of other groups. Executables do not keep process groups alive.
MAX_BATCHES = 256  # of one group
_batches: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Hashable, _Prepared]] = weakref.WeakKeyDictionary()
groups.default_group_gone_hooks.append(_batches.clear)


def _batches_of(group: dist.ProcessGroup | None) -> dict[Hashable, _Prepared]:
    """Returns the batches of a group, by `_Call.key`."""
    return _batches.setdefault(groups.default_if_none(group), {})


class _Call:
    """The arguments of a call on this rank, and the error if they are invalid."""

    def __init__(
        self, items: Any, out: Any, bucket_bytes: Any, buckets: Any, group: dist.ProcessGroup | None, device: Any
    ) -> None:
        self.rank = dist.get_rank(group)
        self.out: list[torch.Tensor | None] | None = None  # by item
        self.has_out = out is not None
        self.locals: list[torch.Tensor | None] = []  # this rank's parts, by item
        self.pairs: list[Pair] = []  # (source, destination) layouts, by item
        self.is_read = False  # True once `pairs` is valid, so that the cache can be looked up
        self.bucket_bytes, self.buckets = BUCKET_BYTES, BUCKETS
        self.tracked: tuple[int, ...] = ()  # the argument of `redistribute_parts`
        self.error: Exception | None = None  # the first error found in the arguments
        try:
            self._read(items, out, bucket_bytes, buckets)
        except ValueError as error:
            self.error = error
        tensors = (x for x in [*self.locals, *(self.out or [])] if isinstance(x, torch.Tensor))
        tensor_device = next((x.device for x in tensors), None)
        self.device = tensor_device or torch.device("cpu")
        self.knows_device = True  # False if the device is ambiguous and no tensor shows it
        try:
            if self.pairs or device is not None:
                self.device = plain_tensors.device_among_many(device, tensor_device, group)
        except ValueError as error:
            self.error = self.error or error
            self.knows_device = tensor_device is not None

    def _read(self, items: Any, out: Any, bucket_bytes: Any, buckets: Any) -> None:
        """Reads the arguments into attributes. Raises ValueError for invalid ones."""
        self.bucket_bytes = argument_values.integer(bucket_bytes, "bucket_bytes")
        self.buckets = argument_values.integer(buckets, "buckets")
        triples = checked_layouts(items, "items", _ITEMS_TEXT, 3)
        self.pairs = [(src, dst) for _, src, dst in triples]
        self.is_read = True
        # Waiting for an asynchronous tensor loses its autograd history. So those that require gradients are not waited
        # for; a check rejects them later.
        has_history = (torch.is_grad_enabled() and getattr(x, "requires_grad", False) for x, _, _ in triples)
        self.locals = [x if h else plain_tensors.waited(x) for (x, _, _), h in zip(triples, has_history, strict=True)]
        if out is not None:
            self.out = argument_values.items(out, "out", "a list of tensors or None, one for each item")
            if len(self.out) != len(triples):
                raise argument_error("out", f"a list of {len(triples)}, one per item", len(self.out))

    def check(self, dtypes: Sequence[torch.dtype]) -> None:
        """Checks the arguments of a call whose layouts are cached. `dtypes` has the dtype of each item.

        Skips the slow checks if each tensor is plain. The executable checks shapes and devices itself.
        """
        if self.error is not None:
            raise self.error
        allowed = (torch.Tensor, torch.nn.Parameter)
        grad = torch.is_grad_enabled()
        tensors: list[Any] = [*zip(self.locals, dtypes, strict=True), *zip(self.out or [], dtypes, strict=False)]
        plain = (
            type(x) in allowed and x.dtype is d and not (grad and x.requires_grad) for x, d in tensors if x is not None
        )
        need_no_check = forward_ad._current_level < 0 and all(plain)
        written = (x for x in self.out or [] if x is not None)
        if not need_no_check or any(x.is_conj() or x.is_neg() or argument_checks.overlaps_itself(x) for x in written):
            self._check_tensors()
        if self.out is not None:
            self._check_memory()

    def check_and_make_batch(self) -> _planner.Batch | None:
        """Checks all arguments. Returns the batch of all items, or sets `error` and returns None if any is invalid."""
        if self.error is None:
            try:
                self._check_tensors()
                self._check_memory()
                self._check_overlaps()
                return batch_of([_pair_to_compare(*pair) for pair in self.pairs], self.bucket_bytes, self.buckets)
            except ValueError as error:
                self.error = error
        return None

    def agreed_batch(self, batch: _planner.Batch | None, group: dist.ProcessGroup | None) -> _planner.Batch:
        """Returns the batch if all ranks of the group have equal batches. All ranks must call.

        Digest n covers the first n items. If the last digests differ, a binary search finds the first item that
        differs. All ranks make the same number of exchanges. Example with 4 items, of which item 2 differs:

            exchange digest 4: differs             item in [0, 4)
            exchange digest 2: equal               item in [2, 4)
            exchange digest 3: differs             item in [2, 3), so it is item 2

        Raises:
            ValueError, RuntimeError: as `compare` does, on all ranks.
        """
        words = GroupWords(groups.default_if_none(group))
        fields = {
            "number of items": len(self.pairs),
            "bucket_bytes": self.bucket_bytes,
            "buckets": self.buckets,
            "out": "given" if self.has_out else "not given",
            "items that require gradients": list(self.tracked),
            "device (device= for ranks without tensors)": self.device.type,
        }
        digests = [digest >> 1 for digest in (batch.digests() if batch is not None else [0])]  # 63 bits fit int64

        def are_same(digest: int, fields: Mapping[str, object]) -> bool:
            received = words.compare(Statement("redistribute_many", fields), self.error, torch.tensor([digest]))
            return bool((received == digest).all())

        same = are_same(digests[-1], fields)
        assert batch is not None
        if same:
            return batch
        low, high = 0, len(self.pairs)  # the first `low` items are equal on all ranks, the first `high` are not
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if are_same(digests[middle], {}) else (low, middle)
        first = f"{batch.item_text(low)} (digest {digests[high] & 0xFFFFFFFF:08x})"
        words.compare(Statement("redistribute_many", {f"item {low}, the first that differs": first}))
        raise AssertionError("digests differ, so compare has raised")

    def _check_tensors(self) -> None:
        """Checks local parts and outputs against the layouts. Raises ValueError."""
        for i, (local, (src, _)) in enumerate(zip(self.locals, self.pairs, strict=True)):
            self._check_tensor(f"the local part of items[{i}]", local, src)
        for i, (output, (_, dst)) in enumerate(zip(self.out or [], self.pairs, strict=False)):
            self._check_tensor(f"out[{i}]", output, dst)
            if output is not None:
                argument_checks.check_writable(f"out[{i}]", output)

    def _check_memory(self) -> None:
        """Checks that no output begins at the address of another tensor, or raises ValueError.

        This finds the usual overlaps in little time; `_check_overlaps` finds all.
        """
        begins = {x.data_ptr(): f"items[{i}]" for i, x in enumerate(self.locals) if x is not None and x.numel() > 0}
        for i, output in enumerate(self.out or []):
            if output is None or output.numel() == 0:
                continue
            if (other := begins.setdefault(output.data_ptr(), f"out[{i}]")) != f"out[{i}]":
                raise argument_error(f"out[{i}]", "a tensor with memory of its own", f"one sharing {other}'s memory")

    def _check_overlaps(self) -> None:
        """Checks that no output has a byte in common with another tensor, or raises ValueError."""
        read = {f"items[{i}]": x for i, x in enumerate(self.locals) if x is not None}
        written = {f"out[{i}]": x for i, x in enumerate(self.out or []) if x is not None}
        for source, destination, _, _ in memory_spans.shared_memory(read, written, among_written=True):
            raise argument_error(destination, "a tensor with memory of its own", f"one sharing {source}'s memory")

    def _check_tensor(self, name: str, tensor: torch.Tensor | None, layout: _planner.Layout) -> None:
        """Checks a local part or output, named `name` in errors, against its layout on this rank."""
        shape = tuple(layout.local_shape(self.rank))
        if tensor is None:
            if layout.mesh.coordinate(self.rank) is not None:
                on_rank = f"on rank {self.rank}, which is on the mesh of {layout}"
                raise argument_error(name, f"a tensor of shape {shape} {on_rank}", None)
            return
        if torch.is_grad_enabled() and getattr(tensor, "requires_grad", False):
            got = "one that requires a gradient; use .detach() or torch.no_grad()"
            raise argument_error(name, "a tensor without gradients in calls with out= or async_op=True", got)
        argument_checks.check_movable(name, tensor)
        on_mesh = layout.mesh.coordinate(self.rank) is not None
        has_shape = tuple(tensor.shape) == shape or (tensor.numel() == 0 and 0 in shape)
        if not has_shape if on_mesh else tensor.numel() > 0:
            raise argument_error(name, f"of shape {shape} on rank {self.rank}, as in {layout}", tuple(tensor.shape))
        if str(tensor.dtype) != f"torch.{layout.dtype}":
            raise argument_error(name, f"of dtype {layout.dtype}, as in {layout}", tensor.dtype)
        if tensor.device != self.device:
            raise argument_error(name, f"on {self.device}, like the other tensors", tensor.device)

    def key(self, kind: str | None = None) -> Hashable:
        """Returns the cache key of the call, for this rank's device type or for the device type `kind`."""
        return tuple(self.pairs), self.bucket_bytes, self.buckets, self.has_out, self.tracked, kind or self.device.type

    def lookup(self, batches: dict[Hashable, _Prepared], key: Hashable) -> _Prepared | None:
        """Returns the cached batch of the call, of any device type if the device is not known; None if not cached."""
        if not self.is_read:
            return None
        if self.knows_device:
            return batches.get(key)
        return next((entry for kind in argument_checks.DEVICE_TYPES if (entry := batches.get(self.key(kind)))), None)

    def source(self, i: int, prepared: _Prepared) -> torch.Tensor | None:
        """Returns the local part of an item, or None if this rank holds no elements of it."""
        local = self.locals[i] if prepared.is_on_source[i] else None
        if local is None or local.numel():
            return local
        shape = self.pairs[i][0].local_shape(self.rank)
        return local if tuple(local.shape) == tuple(shape) else local.new_empty(shape)

    def destination(self, i: int, prepared: _Prepared) -> torch.Tensor:
        """Returns the tensor that receives an item: the one given in `out`, or a new one."""
        output = None if self.out is None else self.out[i]
        if output is None or 0 in prepared.shapes[i]:
            return torch.empty(prepared.shapes[i], dtype=prepared.dtypes[i], device=self.device)
        return output


def _run(
    call: _Call, prepared: _Prepared, group: dist.ProcessGroup | None, async_op: bool
) -> list[torch.Tensor] | ManyHandle:
    """Moves the tensors of a call by its prepared batch. Returns the results by item, or a handle to wait for them."""
    counters.counts.batches += 1
    counters.counts.batched_tensors += len(prepared.moving)
    nothing = {dtype: torch.empty(0, dtype=dtype, device=call.device) for dtype in set(prepared.dtypes)}
    sources = []
    for i in prepared.moving:
        source = call.source(i, prepared)
        source = nothing[prepared.dtypes[i]] if source is None else argument_checks.resolved(source)
        if (layout := prepared.reduced.get(i)) is not None:
            source = plain_tensors.redistribute_local(source.detach(), call.pairs[i][0], layout, group=group)
        sources.append(source.detach() if source.requires_grad else source)
    destinations = [call.destination(i, prepared) for i in prepared.moving]
    results = dict(zip(prepared.moving, destinations, strict=True))
    pending = None
    if prepared.executable is not None:
        into = [x.detach() if x.requires_grad else x for x in destinations]
        torch.autograd.graph.increment_version(into)  # tells autograd about the write
        if async_op:
            pending = prepared.executable.start(sources, into)
        else:
            prepared.executable.run(sources, into)
    outputs = (results.get(i, call.source(i, prepared)) for i in range(len(call.pairs)))
    tensors = [nothing[d].clone() if x is None else x for x, d in zip(outputs, prepared.dtypes, strict=True)]
    if call.out is not None:
        tensors = [output if output is not None else tensor for output, tensor in zip(call.out, tensors, strict=True)]
    return ManyHandle(pending, tensors, prepared.moving) if async_op else tensors


def _prepare(call: _Call, full: _planner.Batch, group: dist.ProcessGroup | None) -> _Prepared:
    """Plans a call's batch and binds this rank's program. Collective among the ranks of the group.

    `full` is the batch of all items. Items whose layouts are equal do not move, unless the call has `out`.
    """
    moving = [i for i, (src, dst) in enumerate(call.pairs) if call.out is not None or src != dst]
    dtypes = [getattr(torch, src.dtype) for src, _ in call.pairs]
    is_on_source = [src.mesh.coordinate(call.rank) is not None for src, _ in call.pairs]
    shapes = [dst.local_shape(call.rank) for _, dst in call.pairs]
    if not moving:
        return _Prepared(None, moving, {}, dtypes, is_on_source, shapes)
    batch = full
    if len(moving) < len(call.pairs):
        batch = batch_of([call.pairs[i] for i in moving], call.bucket_bytes, call.buckets)
    executable = executables.bind_batch(batch, call.device.type, group)
    reduced = {moving[index]: layout for index, layout in batch.reductions().items()}
    counters.counts.plans += 1
    plan_log.note_batch(batch)
    return _Prepared(executable, moving, reduced, dtypes, is_on_source, shapes)


def _pair_to_compare(src: _planner.Layout, dst: _planner.Layout) -> Pair:
    """Returns an item's layouts for the comparison of ranks. A batch cannot have pending destinations.

    So if values stay pending because both layouts are equal, the pair is returned without its pending reductions.
    """
    if src == dst and src.has_pending:
        return src.without_pending(), src.without_pending()
    return src, dst

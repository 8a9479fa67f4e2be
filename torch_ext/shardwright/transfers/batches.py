"""Batches of a transfer's tensors, bound to a process group.

A batch moves boxes of elements from sources to a range of destinations, in rounds of messages (csrc/batch).
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from .._native import _planner, _runtime
from ..rules import explaining
from ..runtime import argument_checks, executables, groups, plain_tensors
from .setup import Setup


class Run:
    """A running batch. Methods may be called any number of times. `index` is that of a destination in the batch."""

    def __init__(self, pending: _runtime.BatchHandle | None, num_destinations: int) -> None:
        self._pending = pending
        self._num_destinations = num_destinations

    def completion_order(self) -> list[int]:
        """Returns the indices of the destinations, in the order in which this rank completes its part of them."""
        return self._pending.completion_order if self._pending is not None else list(range(self._num_destinations))

    def wait_for_sources(self) -> None:
        """Waits until this rank's sources may be written to again."""
        if self._pending is not None:
            self._pending.wait_for_sources()

    def wait_for(self, index: int) -> None:
        """Waits until a destination is complete on this rank, and this rank has sent its elements to the others."""
        if self._pending is not None:
            self._pending.wait_for_destination_and_sends(index)

    def wait(self) -> None:
        """Waits until the batch is complete on this rank."""
        if self._pending is not None:
            self._pending.wait()

    def is_done(self) -> bool:
        """Returns True if the batch is complete on this rank. Does not wait."""
        return self._pending is None or self._pending.is_done()


class BoundBatch:
    """The batch that fills a range of destinations. All ranks of the group make equal batches."""

    def __init__(
        self,
        setup: Setup,
        destinations: range,
        bucket_bytes: int,
        buckets: int,
        group: dist.ProcessGroup | None,
        first_sender_group: int = 0,
    ) -> None:
        begin, end = (
            bisect.bisect_left(setup.items, edge, key=lambda item: item.destination)
            for edge in (destinations.start, destinations.stop)
        )
        items = setup.items[begin:end]
        batch_index_of: dict[int, int] = {}
        for item in items:
            batch_index_of.setdefault(item.source, len(batch_index_of))
        self._setup = setup
        self._sources = list(batch_index_of)  # for each source of the batch: its index in the transfer
        self._layouts = [setup.sources[source] for source in batch_index_of]
        try:
            self.batch = _planner.Batch(
                self._layouts,
                [setup.destinations[destination] for destination in destinations],
                [(batch_index_of[item.source], item.destination - destinations.start, item.axes) for item in items],
                bucket_bytes,
                buckets,
                first_sender_group,
            )
            self._executable = executables.bind_batch(self.batch, setup.device.type, group) if items else None
        except ValueError as error:  # a bucket is too small
            raise explaining.with_names(error, [setup.names[item.destination] for item in items]) from None
        # For each source with pending reductions, by index: the layout to which it is reduced before the batch starts.
        self._reduced = self.batch.reductions()
        self._group = groups.weakly(group)

    def start(self, destinations: Sequence[torch.Tensor]) -> Run:
        """Starts the batch. `destinations` are this rank's tensors to write to, in the order of the destinations."""
        if self._executable is None:
            return Run(None, len(destinations))
        sources = list(map(self._source, range(len(self._sources))))
        written = [tensor.detach() for tensor in destinations]
        torch.autograd.graph.increment_version(written)  # the writes bypass autograd
        return Run(self._executable.start(sources, written), len(written))

    def _source(self, index: int) -> torch.Tensor:
        """Returns this rank's part of a source of the batch. Collective if the source has pending values to reduce."""
        source = argument_checks.resolved(self._setup.source(self._sources[index]).detach())
        if (reduced := self._reduced.get(index)) is None:
            return source
        return plain_tensors.redistribute_local(source, self._layouts[index], reduced, group=self._group.get())


@functools.lru_cache(maxsize=1024)
def largest_part_bytes(layout: _planner.Layout) -> int:
    """Returns the bytes of the largest local tensor of a layout."""
    itemsize = int(getattr(torch, layout.dtype).itemsize)
    return itemsize * max(math.prod(layout.local_shape(rank)) for rank in layout.mesh.ranks)
